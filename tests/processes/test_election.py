"""Real processes that elect on real stores, and are killed, frozen and blocked meanwhile.

The tests assert order, counts and what the store holds: if the machine starves a process for longer
than its timeout, the others rightly elect again. Times are only recorded.
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
from election_processes import CandidateProcess, ElectionProcesses, check_beliefs, check_writes
from servers import Locate
from waiting import now, until
from worker_protocol import Fact

from jobsync.core.trust import Timing

SEED = 20261115
NODES = 5
TIMING = Timing(heartbeat=1, timeout=4)
PATIENT = Timing(heartbeat=1, timeout=10)
"""For elections that a busy machine must not disturb."""


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of store."""
    return str(request.param)


@pytest.fixture
def election(kind: str, locate: Locate, tmp_path: Path) -> ElectionProcesses:
    """Return a group without processes yet, on an empty store."""
    return ElectionProcesses(locate(kind), tmp_path / "facts", TIMING)


@pytest.fixture
def patient(kind: str, locate: Locate, tmp_path: Path) -> ElectionProcesses:
    """Return a group with a timeout that a busy machine does not reach."""
    return ElectionProcesses(locate(kind), tmp_path / "facts", PATIENT)


class Storm:
    """Strikes candidates, by a seed, and counts the strikes."""

    def __init__(self, election: ElectionProcesses, seed: int) -> None:
        self.strikes = {"kill": 0, "pause": 0, "stop": 0}
        self._election = election
        self._dice = random.Random(seed)

    async def rage(self, seconds: float, show: Callable[[str], object]) -> None:
        """Strike again and again; end with all candidates there and running."""
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
                    show(f"{end - now():.0f} s to go, {self.strikes}")
                await asyncio.sleep(self._dice.uniform(0.2, 1.5))

    def _draw_kinds(self) -> Iterator[str]:
        """Yield every kind equally often, in random order."""
        while True:
            yield from self._dice.sample(sorted(self.strikes), len(self.strikes))

    def _choose_victim(self) -> CandidateProcess | None:
        """Return a running process, preferably a leader."""
        running = [each for each in self._election.running if not each.is_ending]
        joined = [each for each in running if each.has_reported("joined")]
        leading = [e for e in joined if any(self._leads(e, r) for r in self._election.roles)]
        # Always both draws, so that what follows does not depend on who happens to lead.
        spare, number = self._dice.random() < 0.3, self._dice.random()
        choice = joined if spare or not leading else leading
        return choice[int(number * len(choice))] if choice else None

    def _leads(self, candidate: CandidateProcess, role: str) -> bool:
        return candidate in self._election.find_believers(role)

    async def _strike(self, kind: str, victim: CandidateProcess) -> None:
        match kind:
            case "kill":
                victim.kill()
                assert await victim.ended() == -signal.SIGKILL
                await self._election.start(1)
            case "pause":
                victim.freeze()
                await asyncio.sleep(TIMING.timeout + self._dice.uniform(0.5, 2))
                victim.thaw()
            case "stop":
                victim.stop()
                assert await victim.ended() == 0, victim.log
                await self._election.start(1)


async def test_no_stale_write_is_accepted_in_a_storm(
    election: ElectionProcesses, kind: str, full_scale: bool, proof: Any
) -> None:
    """Under kills, pauses and restarts each role has one leader, and no earlier term writes."""
    seed = int(time.time()) if full_scale else SEED
    async with election:
        await election.reported("joined", await election.start(NODES))
        await election.leaders()
        storm, settled = Storm(election, seed), []
        for seconds in [15] * 4 if full_scale else [10]:
            await storm.rage(seconds, proof.tell)
            settled.append(await settle(election))
        survivors = election.running
        for candidate in survivors:
            candidate.stop()
        assert [await each.ended() for each in survivors] == [0] * NODES
        final = await election.read_singletons()
        facts = election.facts()
        for role in election.roles:
            assert check_writes(facts, role, final[role]) == []
            assert check_beliefs(facts, role) == []
        assert election.find_silent_failures() == []
    assert min(storm.strikes.values()) > 0
    proof.record(
        "election storm",
        url=kind,
        seed=seed,
        **storm.strikes,
        terms=sum(len(election.promotions(role)) for role in election.roles),
        accepted=sum(value["count"] for value in final.values()),
        refused_by_store=sum(fact["by_store"] for fact in election.facts("refused")),
        settled_median_s=round(statistics.median(settled), 1),
        settled_worst_s=round(max(settled), 1),
    )


async def settle(election: ElectionProcesses) -> float:
    """Wait until every role has its leader and all send heartbeats; return how long it took."""
    assert len(election.running) == NODES
    await election.reported("joined", election.running)
    quiet = now()
    leaders = await election.leaders()
    settled = now() - quiet
    for role, leader in leaders.items():
        assert_led_in_time(leader, election.promotions(role)[-1], quiet)
    await until(
        lambda: all(each.count_heartbeats(quiet, now()) for each in election.running),
        "all send heartbeats",
    )
    return settled


def assert_led_in_time(leader: CandidateProcess, promoted: Fact, quiet: float) -> None:
    """Check that a leader was found within two timeouts, counted in its own heartbeats."""
    # It may send extra ones, to say that it is a candidate and what it holds.
    allowed = 2 * TIMING.timeout / TIMING.heartbeat + 2
    assert leader.count_heartbeats(quiet, promoted.at) <= allowed


async def test_all_who_start_at_once_elect_once(
    patient: ElectionProcesses, kind: str, full_scale: bool, proof: Any
) -> None:
    """Five processes that join an empty store together find one leader in one term."""
    async with patient:
        candidates = await patient.start(NODES)
        begun = now()
        await patient.reported("joined", candidates)
        await patient.leaders()
        took = now() - begun
        elected = len(patient.roles)
        await until(
            lambda: all(len(c.facts("coord:coordinator-elected")) >= elected for c in candidates),
            "all know who leads",
        )
        for role in patient.roles:
            assert [fact["epoch"] for fact in patient.promotions(role)] == [1]
        assert {fact["epoch"] for fact in patient.facts("coord:coordinator-elected")} == {1}
        assert patient.find_silent_failures() == []
    proof.record("one election", url=kind, nodes=NODES, took_s=round(took, 1))


async def test_a_clean_stop_has_a_successor_within_a_beat(
    patient: ElectionProcesses, kind: str, full_scale: bool, proof: Any
) -> None:
    """A process that leaves releases its roles; the next term begins long before any timeout."""
    rounds = 20 if full_scale else 2
    took = []
    async with patient:
        await patient.reported("joined", await patient.start(3))
        leaders = await patient.leaders()
        for number in range(rounds):
            leader = leaders["schedule"]
            before = {role: patient.promotions(role)[-1] for role in patient.roles}
            leader.stop()
            assert await leader.ended() == 0, leader.log
            left = leader.last("left").at
            leaders = await patient.leaders()
            for role, successor in leaders.items():
                if before[role]["worker_id"] == leader.worker_id:
                    promoted = patient.promotions(role)[-1]
                    assert promoted["epoch"] == before[role]["epoch"] + 1
                    # A check, a heartbeat of deferring to an older one, and one to announce it.
                    assert successor.count_heartbeats(left, promoted.at) <= 3
                    took.append(promoted.at - leader.last("leaves").at)
            await patient.reported("joined", await patient.start(1))
            if number % 5 == 4:
                proof.tell(f"{number + 1} of {rounds} clean stops")
        demoted = patient.facts("coord:coordinator-demoted")
        assert {fact["reason"] for fact in demoted} == {"stopped"}
        assert patient.facts("coord:worker-died") == []
        assert patient.find_silent_failures() == []
    assert took
    proof.record(
        "clean stop",
        url=kind,
        stops=len(took),
        beat_s=PATIENT.heartbeat,
        median_s=round(statistics.median(took), 2),
        worst_s=round(max(took), 2),
    )


async def test_each_role_is_led_by_a_candidate_for_it(locate: Locate, tmp_path: Path) -> None:
    """Candidates for different roles lead only theirs, also when the one for both dies."""
    async with ElectionProcesses(locate("sqlite"), tmp_path / "facts", TIMING) as election:
        (versatile,) = await election.start(1)
        assert await election.leaders() == dict.fromkeys(election.roles, versatile)
        (scheduler,) = await election.start(1, ["schedule"])
        (sweeper,) = await election.start(1, ["sweep"])
        await election.reported("joined", [scheduler, sweeper])
        versatile.kill()
        await versatile.ended()
        assert await election.leaders() == {"schedule": scheduler, "sweep": sweeper}
        for role, candidate in (("sweep", scheduler), ("schedule", sweeper)):
            gained = [fact["role"] for fact in candidate.facts("gained")]
            assert role not in gained
        assert election.find_silent_failures() == []


async def test_user_code_that_blocks_its_loop_does_not_cost_the_leadership(
    locate: Locate, tmp_path: Path
) -> None:
    """A leader whose loop is blocked for longer than its timeout leads on in the same term."""

    async def lead_through(kind: str) -> None:
        async with ElectionProcesses(locate(kind), tmp_path / kind, PATIENT) as election:
            await election.reported("joined", await election.start(1))
            (leader,) = set((await election.leaders()).values())
            await election.reported("joined", await election.start(1))
            leader.order("block", 1.5 * PATIENT.timeout)
            await until(lambda: leader.has_reported("order done"), "the loop runs again")
            blocked, freed = leader.last("order begun").at, leader.last("order done").at
            assert freed - blocked >= 1.5 * PATIENT.timeout
            assert set((await election.leaders()).values()) == {leader}
            for role in election.roles:
                assert [fact["epoch"] for fact in election.promotions(role)] == [1]
            assert election.facts("coord:session-lost", "coord:coordinator-demoted") == []
            assert election.find_silent_failures() == []

    async with asyncio.TaskGroup() as group:
        for kind in ("sqlite", "postgres", "s3"):
            group.create_task(lead_through(kind))


async def test_a_starved_heartbeat_warns_with_its_lag(locate: Locate, tmp_path: Path) -> None:
    """C code that holds the GIL, or a frozen process, delays heartbeats; an event reports it."""
    held = 2 * TIMING.heartbeat
    async with ElectionProcesses(locate("sqlite"), tmp_path / "facts", TIMING) as election:
        (candidate,) = await election.start(1)
        await election.reported("joined", [candidate])
        candidate.order("hold-gil", held)
        await until(lambda: candidate.has_reported("order done"), "the GIL is free again")
        begun, done = candidate.last("order begun").at, candidate.last("order done").at
        late = "coord:heartbeat-late"
        await until(lambda: candidate.has_reported(late), "a late heartbeat is reported")
        event = candidate.last(late)
        assert TIMING.timeout / 10 < event["lag"] < done - begun + TIMING.heartbeat
        assert event["worker_timeout"] == TIMING.timeout

        paused = now()
        candidate.freeze()
        await asyncio.sleep(held)
        candidate.thaw()
        await until(lambda: candidate.has_reported(late, since=paused), "it is reported again")
        assert candidate.last(late)["lag"] > TIMING.timeout / 10
        assert election.find_silent_failures() == []


async def test_a_forked_child_holds_nothing(kind: str, patient: ElectionProcesses) -> None:
    """A child neither leads, writes nor coordinates with what it inherits; its parent goes on."""
    async with patient:
        (parent,) = await patient.start(1)
        await patient.leaders()
        parent.order("fork")
        await until(lambda: parent.has_reported("order done"), "the child has ended")
        assert parent.facts("child failed") == []
        for fact in parent.facts("child inherits"):
            assert not fact["is_coordinator"]
            assert not fact["has_term"]
            assert not fact["is_trusted"]
            assert {fact["put"], fact["fresh_put"]} <= {"Fenced", "Misconfigured"}
            assert fact["coordinate"] == "Misconfigured"
        assert len(parent.facts("child inherits")) == len(patient.roles)
        if kind == "s3":
            # The object client's threads stay behind: the child gets an error, and does not hang.
            assert "fork" in parent.last("child refused")["error"]
        else:
            joined = parent.last("child joined")
            assert joined["incarnation"] in joined["peers"]
            assert len(joined["peers"]) == 2
        assert set((await patient.leaders()).values()) == {parent}
        forked = parent.last("order done").at
        await until(lambda: parent.count_heartbeats(forked, now()) >= 2, "the parent's heartbeats")
        await until(lambda: parent.has_reported("wrote", since=forked), "the parent writes on")
        for role in patient.roles:
            assert [fact["epoch"] for fact in patient.promotions(role)] == [1]
        assert "stolen" not in (await patient.read_singletons()).values()
        assert patient.find_silent_failures() == []
