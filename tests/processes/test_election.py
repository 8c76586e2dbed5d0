"""Real processes that elect on real stores, and are killed, stopped and held up meanwhile.

What is asserted is order, counts and what the store says: a machine that starves a process
for longer than its timeout makes the others elect anew, and rightly so. Times are figures.
"""

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from electorate import Citizen, Electorate, check_beliefs, check_writes
from ledger import Fact
from servers import Locate
from waiting import now, until

from jobsync.core.trust import Timing

SEED = 20261115
NODES = 5
TIMING = Timing(beat=1, timeout=4)
PATIENT = Timing(beat=1, timeout=10)
"""For elections that must not be disturbed by a busy machine."""


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which kind of store."""
    return str(request.param)


@pytest.fixture
def electorate(kind: str, locate: Locate, tmp_path: Path) -> Electorate:
    """Nobody yet, on an empty store."""
    return Electorate(locate(kind), tmp_path / "words", TIMING)


@pytest.fixture
def patient(kind: str, locate: Locate, tmp_path: Path) -> Electorate:
    """Likewise, with a timeout that a busy machine does not reach."""
    return Electorate(locate(kind), tmp_path / "words", PATIENT)


class Storm:
    """Strikes candidates, by a seed; keeps their number."""

    def __init__(self, electorate: Electorate, seed: int) -> None:
        self.strikes = {"kill": 0, "pause": 0, "stop": 0}
        self._electorate = electorate
        self._dice = random.Random(seed)

    async def rage(self, seconds: float, tell: Callable[[str], object]) -> None:
        """Strike again and again; end with everybody there and getting on."""
        end = now() + seconds
        async with asyncio.TaskGroup() as group:
            for kind in self._draw_kinds():
                if now() >= end:
                    break
                victim = self._choose_victim()
                if victim is not None:
                    self.strikes[kind] += 1
                    group.create_task(self._strike(kind, victim))
                if sum(self.strikes.values()) % 10 == 9:
                    tell(f"{end - now():.0f} s to go, {self.strikes}")
                await asyncio.sleep(self._dice.uniform(0.2, 1.5))

    def _draw_kinds(self) -> Iterator[str]:
        """Give every kind as often as the others, in any order."""
        while True:
            yield from self._dice.sample(sorted(self.strikes), len(self.strikes))

    def _choose_victim(self) -> Citizen | None:
        """Give a process that gets on, rather one that leads."""
        running = [each for each in self._electorate.running if not each.is_doomed]
        standing = [each for each in running if each.said("stands")]
        leading = [e for e in standing if any(self._leads(e, w) for w in self._electorate.works)]
        # Always both draws, so that what follows does not depend on who happens to lead.
        spare, number = self._dice.random() < 0.3, self._dice.random()
        choice = standing if spare or not leading else leading
        return choice[int(number * len(choice))] if choice else None

    def _leads(self, citizen: Citizen, work: str) -> bool:
        return citizen in self._electorate.believers(work)

    async def _strike(self, kind: str, victim: Citizen) -> None:
        match kind:
            case "kill":
                victim.strike(signal.SIGKILL)
                assert await victim.ended() == -signal.SIGKILL
                await self._electorate.start(1)
            case "pause":
                victim.strike(signal.SIGSTOP)
                await asyncio.sleep(TIMING.timeout + self._dice.uniform(0.5, 2))
                victim.strike(signal.SIGCONT)
            case "stop":
                victim.strike(signal.SIGTERM)
                assert await victim.ended() == 0, victim.complaints
                await self._electorate.start(1)


async def test_no_stale_write_is_accepted_in_a_storm(
    electorate: Electorate, kind: str, full_scale: bool, proof: Any
) -> None:
    """Whoever is killed, stopped or restarted: one leads each work, and no earlier term writes."""
    seed = int(time.time()) if full_scale else SEED
    async with electorate:
        await electorate.standing(await electorate.start(NODES))
        await electorate.leaders()
        storm, settled = Storm(electorate, seed), []
        for seconds in [15] * 4 if full_scale else [10]:
            await storm.rage(seconds, proof.tell)
            settled.append(await settle(electorate))
        survivors = electorate.running
        for citizen in survivors:
            citizen.strike(signal.SIGTERM)
        assert [await each.ended() for each in survivors] == [0] * NODES
        final = await electorate.singletons()
        words = electorate.told()
        for work in electorate.works:
            assert check_writes(words, work, final[work]) == []
            assert check_beliefs(words, work) == []
        assert electorate.silent_deaths() == []
    assert min(storm.strikes.values()) > 0
    proof.record(
        "election storm",
        url=kind,
        seed=seed,
        **storm.strikes,
        terms=sum(len(electorate.promotions(work)) for work in electorate.works),
        accepted=sum(value["count"] for value in final.values()),
        refused_by_store=sum(word["by_store"] for word in electorate.told("refused")),
        settled_median_s=round(statistics.median(settled), 1),
        settled_worst_s=round(max(settled), 1),
    )


async def settle(electorate: Electorate) -> float:
    """Let nothing happen until every work has its leader and all beat; give how long it took."""
    assert len(electorate.running) == NODES
    await electorate.standing(electorate.running)
    quiet = now()
    leaders = await electorate.leaders()
    settled = now() - quiet
    for work, leader in leaders.items():
        assert_led_in_time(leader, electorate.promotions(work)[-1], quiet)
    await until(
        lambda: all(each.beats(quiet, now()) for each in electorate.running), "everybody beats"
    )
    return settled


def assert_led_in_time(leader: Citizen, promoted: Fact, quiet: float) -> None:
    """Check that a leader was found within two timeouts, counted in its own beats."""
    # It may have beaten in a hurry, to tell that it stands and what it holds.
    allowed = 2 * TIMING.timeout / TIMING.beat + 2
    assert leader.beats(quiet, promoted.at) <= allowed


async def test_all_who_start_at_once_elect_once(
    patient: Electorate, kind: str, full_scale: bool, proof: Any
) -> None:
    """Five processes on an empty store, let go together, find one leader in one term."""
    async with patient:
        citizens = await patient.start(NODES)
        begun = now()
        await patient.standing(citizens)
        await patient.leaders()
        took = now() - begun
        elected = len(patient.works)
        await until(
            lambda: all(len(c.words("coord:coordinator-elected")) >= elected for c in citizens),
            "everybody has heard who leads",
        )
        for work in patient.works:
            assert [word["epoch"] for word in patient.promotions(work)] == [1]
        assert {word["epoch"] for word in patient.told("coord:coordinator-elected")} == {1}
        assert patient.silent_deaths() == []
    proof.record("one election", url=kind, nodes=NODES, took_s=round(took, 1))


async def test_a_clean_stop_has_a_successor_within_a_beat(
    patient: Electorate, kind: str, full_scale: bool, proof: Any
) -> None:
    """Who leaves releases what it held; the next term begins long before anybody could die."""
    rounds = 20 if full_scale else 2
    took = []
    async with patient:
        await patient.standing(await patient.start(3))
        leaders = await patient.leaders()
        for number in range(rounds):
            leader = leaders["schedule"]
            before = {work: patient.promotions(work)[-1] for work in patient.works}
            leader.strike(signal.SIGTERM)
            assert await leader.ended() == 0, leader.complaints
            left = leader.last("leaves").at
            leaders = await patient.leaders()
            for work, successor in leaders.items():
                if before[work]["worker_id"] == leader.worker:
                    promoted = patient.promotions(work)[-1]
                    assert promoted["epoch"] == before[work]["epoch"] + 1
                    # A look, a beat of giving way to an older one, and a beat to tell of it.
                    assert successor.beats(left, promoted.at) <= 3
                    took.append(promoted.at - left)
            await patient.standing(await patient.start(1))
            if number % 5 == 4:
                proof.tell(f"{number + 1} of {rounds} clean stops")
        demoted = patient.told("coord:coordinator-demoted")
        assert {word["reason"] for word in demoted} == {"stopped"}
        assert patient.told("coord:worker-died") == []
        assert patient.silent_deaths() == []
    assert took
    proof.record(
        "clean stop",
        url=kind,
        stops=len(took),
        beat_s=PATIENT.beat,
        median_s=round(statistics.median(took), 2),
        worst_s=round(max(took), 2),
    )


async def test_each_work_is_led_by_a_process_that_can_do_it(locate: Locate, tmp_path: Path) -> None:
    """Of unlike processes one that can do a work leads it, also when the one that can both dies."""
    async with Electorate(locate("sqlite"), tmp_path / "words", TIMING) as electorate:
        (versatile,) = await electorate.start(1)
        assert await electorate.leaders() == dict.fromkeys(electorate.works, versatile)
        (scheduler,) = await electorate.start(1, ["schedule"])
        (sweeper,) = await electorate.start(1, ["sweep"])
        await electorate.standing([scheduler, sweeper])
        versatile.strike(signal.SIGKILL)
        await versatile.ended()
        assert await electorate.leaders() == {"schedule": scheduler, "sweep": sweeper}
        for work, citizen in (("sweep", scheduler), ("schedule", sweeper)):
            others = [word["work"] for word in citizen.words("gained")]
            assert work not in others
        assert electorate.silent_deaths() == []


async def test_user_code_that_blocks_its_loop_does_not_cost_the_leadership(
    locate: Locate, tmp_path: Path
) -> None:
    """A leader whose loop stands still for three timeouts leads on in the same term."""

    async def lead_through(kind: str) -> None:
        async with Electorate(locate(kind), tmp_path / kind, TIMING) as electorate:
            await electorate.standing(await electorate.start(1))
            (leader,) = set((await electorate.leaders()).values())
            await electorate.standing(await electorate.start(1))
            leader.order("block", 3 * TIMING.timeout)
            await until(lambda: leader.said("did"), "the loop runs again")
            blocked, freed = leader.last("begins").at, leader.last("did").at
            assert freed - blocked >= 3 * TIMING.timeout
            assert set((await electorate.leaders()).values()) == {leader}
            for work in electorate.works:
                assert [word["epoch"] for word in electorate.promotions(work)] == [1]
            assert electorate.told("coord:session-lost", "coord:coordinator-demoted") == []
            assert electorate.silent_deaths() == []

    async with asyncio.TaskGroup() as group:
        for kind in ("sqlite", "postgres", "s3"):
            group.create_task(lead_through(kind))


async def test_a_starved_heartbeat_warns_with_its_lag(locate: Locate, tmp_path: Path) -> None:
    """C code that does not let go of the GIL, or a stopped process, delays beats: it is told."""
    held = 2 * TIMING.beat
    async with Electorate(locate("sqlite"), tmp_path / "words", TIMING) as electorate:
        (citizen,) = await electorate.start(1)
        await electorate.standing([citizen])
        citizen.order("hold-gil", held)
        await until(lambda: citizen.said("did"), "the GIL is free again")
        begun, done = citizen.last("begins").at, citizen.last("did").at
        await until(lambda: citizen.said("coord:heartbeat-late"), "a late beat is told")
        late = citizen.last("coord:heartbeat-late")
        assert TIMING.timeout / 10 < late["lag"] < done - begun + TIMING.beat
        assert late["worker_timeout"] == TIMING.timeout

        paused = now()
        citizen.strike(signal.SIGSTOP)
        await asyncio.sleep(held)
        citizen.strike(signal.SIGCONT)
        await until(lambda: citizen.said("coord:heartbeat-late", since=paused), "it is told again")
        assert citizen.last("coord:heartbeat-late")["lag"] > TIMING.timeout / 10
        assert electorate.silent_deaths() == []


async def test_a_forked_child_holds_nothing(kind: str, patient: Electorate) -> None:
    """A child neither leads nor writes nor coordinates by what it inherits; its parent goes on."""
    async with patient:
        (parent,) = await patient.start(1)
        await patient.leaders()
        parent.order("fork")
        await until(lambda: parent.said("did"), "the child has ended")
        assert parent.words("child failed") == []
        for word in parent.words("child inherits"):
            assert not word["is_coordinator"]
            assert not word["has_term"]
            assert not word["is_trusted"]
            assert {word["put"], word["fresh_put"]} <= {"Fenced", "Misconfigured"}
            assert word["coordinate"] == "Misconfigured"
        assert len(parent.words("child inherits")) == len(patient.works)
        if kind == "s3":
            # The object client's threads stay behind: the child is told so, and does not hang.
            assert "fork" in parent.last("child refused")["error"]
        else:
            joined = parent.last("child joined")
            assert joined["incarnation"] in joined["peers"]
            assert len(joined["peers"]) == 2
        assert set((await patient.leaders()).values()) == {parent}
        forked = parent.last("did").at
        await until(lambda: parent.beats(forked, now()) >= 2, "the parent beats on")
        await until(lambda: parent.said("wrote", since=forked), "the parent writes on")
        for work in patient.works:
            assert [word["epoch"] for word in patient.promotions(work)] == [1]
        assert "stolen" not in (await patient.singletons()).values()
        assert patient.silent_deaths() == []
