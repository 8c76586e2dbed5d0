"""How soon a worker that stops is followed, on a store that tells nobody of it.

Within one beat of its release, by the oldest that is left, however fast workers come and go.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fleets import SETTINGS, TIMING, DearStore, Fleet, Worker, take_note
from msgspec.structs import replace
from waiting import until

from jobsync.coordination.coordinator import Hooks
from jobsync.coordination.term import Term
from jobsync.testing.network import Weather

QUICK = Weather(latency=0.02)
"""A request takes less than a hundredth of a beat."""


class Succession:
    """Workers that lead, stop and are followed, and how long each release was of no use."""

    def __init__(self, seed: int, *, size: int = 3, rate: float = 0.049) -> None:
        works = ("schedule", "sweep")
        self.fleet = Fleet(seed, size=size, works=works, rate=rate, store=DearStore, listens=True)
        self.dice = self.fleet.world.dice
        for link in self.fleet.links:
            link.weather = QUICK

    def add(self, name: str, *works: str) -> Worker:
        """Start a worker."""
        worker = self.fleet.add(name, works)
        worker.link.weather = QUICK
        self.fleet.start(worker)
        return worker

    async def led(self, *works: str) -> list[Worker]:
        """Wait until somebody leads each of some works; give who."""
        await until(lambda: all(map(self._leaders, works)), interval=TIMING.heartbeat / 100)
        return [self._leaders(work)[0] for work in works]

    def _leaders(self, work: str) -> list[Worker]:
        held = ((each, each.held.get(work)) for each in self._standing())
        return [each for each, epoch in held if (work, "gained", epoch) in each.hooks]

    def _standing(self) -> list[Worker]:
        return [each for each in self.fleet.workers if not each.has_stopped]

    def oldest(self) -> Worker:
        """Give the worker that sorts before all others that stand."""
        joined = {w.membership.worker_id: w for w in self._standing() if w.membership is not None}
        return joined[min(joined)]

    async def stop(self, worker: Worker) -> None:
        """Let a worker leave in good order."""
        worker.stop()
        assert worker.life is not None
        await worker.life

    def vacancies(self, work: str) -> list[float]:
        """Give how many beats passed from each release until somebody led again."""
        found: list[float] = []
        freed: dict[int, float] = {}
        for each in self.fleet.world.history:
            details = each.details
            if each.what == "commit" and details["key"] == f"role/default/{work}":
                if details["value"]["owner"] is None:
                    # Whoever leaves may write it twice.
                    freed.setdefault(details["value"]["epoch"], each.at)
            elif (
                each.what == "gained" and details["work"] == work and details["epoch"] - 1 in freed
            ):
                found.append((each.at - freed[details["epoch"] - 1]) / TIMING.heartbeat)
        return found


@pytest.mark.parametrize("seed", range(8))
def test_who_comes_and_goes_faster_than_others_look_is_followed_within_a_beat(seed: int) -> None:
    """Leaders stop as soon as the next worker stands, and the oldest that is left leads.

    Found: whoever had seen no leader yet prepared for a moment, missed the end of that while it
    looked at something else, and led a beat later.
    """
    succession = Succession(seed)
    fleet = succession.fleet

    async def story() -> None:
        fleet.start_all()
        for _ in range(20):
            leader, _ = await succession.led(*fleet.works)
            await succession.stop(leader)
            heir = succession.oldest()
            assert set(await succession.led(*fleet.works)) == {heir}
            await asyncio.sleep(succession.dice.uniform(0.2, 0.9) * TIMING.heartbeat)
            fresh = fleet.follow(leader)
            await until(
                lambda fresh=fresh: len(fresh.coordinators) == len(fleet.works),  # type: ignore[misc]
                interval=TIMING.heartbeat / 100,
            )

    fleet.tell(story)
    for work in fleet.works:
        assert len(succession.vacancies(work)) == 20
        assert max(succession.vacancies(work)) < 1


def test_a_phase_that_ends_during_a_look_is_not_missed() -> None:
    """Whoever was elected leads as soon as it has prepared, though it looks around meanwhile.

    Found: it looked again a beat later, and led that much later.
    """
    succession = Succession(6, size=0)
    window, delay = TIMING.heartbeat / 2, 0.001

    async def story() -> None:
        worker = succession.fleet.add("first", ("schedule",))
        worker.settings = replace(SETTINGS, cold_start_preparation_delay=delay)
        succession.fleet.start(worker)
        assert await succession.led("schedule") == [worker]
        times = {e.phase: e.duration for e in worker.told("coord:cold-start-phase-changed")}
        assert window < times["preparing"] < times["ready"] < window + TIMING.heartbeat / 10

    succession.fleet.tell(story)


def test_who_leads_one_work_finds_in_time_that_another_is_free() -> None:
    """An older worker leads something else; it looks for what it follows as any follower does.

    Found: whoever led anything looked once a beat, and found the other role after that.
    """
    succession = Succession(7, size=0)

    async def story() -> None:
        older = succession.add("older", "schedule")
        await succession.led("schedule")
        younger = succession.add("younger", "sweep")
        await succession.led("sweep")
        await older.stand("sweep")
        for number in range(20):
            await asyncio.sleep(succession.dice.uniform(2, 3) * TIMING.heartbeat)
            await succession.stop(younger)
            assert await succession.led("sweep") == [older]
            await older.coordinators["sweep"].stop()
            younger = succession.add(f"younger-{number}", "sweep")
            await succession.led("sweep")
            await older.stand("sweep")

    succession.fleet.tell(story)
    # Every other vacancy is one that the older worker has ended.
    assert max(succession.vacancies("sweep")[::2]) < 0.95


def test_works_that_are_given_up_one_after_the_other_are_all_found() -> None:
    """Between the end of one work and that of the next the leader does something for a while.

    Found: whoever looked just then took the first, and looked for the second a beat later.
    """
    succession = Succession(8)
    fleet = succession.fleet

    def end_slowly(worker: Worker, work: str) -> Hooks:
        async def stop(term: Term) -> None:
            worker.note(work, "lost", term)
            await worker.node.clock.sleep(TIMING.heartbeat / 10)

        return replace(take_note(worker, work), on_stop=stop)

    fleet.hooks = end_slowly

    async def story() -> None:
        fleet.start_all()
        for _ in range(40):
            leader, _ = await succession.led(*fleet.works)
            await asyncio.sleep(succession.dice.uniform(2, 3) * TIMING.heartbeat)
            await succession.stop(leader)
            fleet.follow(leader)

    fleet.tell(story)
    assert max(succession.vacancies("sweep")) < 0.95


def test_works_that_are_given_up_together_are_taken_together() -> None:
    """Also by one who looks just after the first of them was given up, and before the second.

    Found: it took the first, and the second when it looked again.
    """
    succession = Succession(10)
    fleet, loop = succession.fleet, succession.fleet.world.loop
    for link in fleet.links:
        link.weather = Weather(latency=0.1)

    async def wait_for(work: str) -> float:
        await succession.led(work)
        return loop.time()

    async def story() -> None:
        fleet.start_all()
        for _ in range(40):
            leader, _ = await succession.led(*fleet.works)
            await asyncio.sleep(succession.dice.uniform(2, 3) * TIMING.heartbeat)
            leader.stop()
            first, second = await asyncio.gather(*map(wait_for, fleet.works))
            assert abs(second - first) < TIMING.heartbeat / 2
            fleet.follow(leader)

    fleet.tell(story)


def test_works_that_are_taken_together_cost_one_listing() -> None:
    """However many roles are free, who else stands for them is asked of the store once."""
    succession = Succession(11, size=0)

    async def story() -> None:
        worker = succession.add("alone", *succession.fleet.works)
        calls, around = [], worker.link.around

        async def count(call: str, sent: int, work: Callable[[], Awaitable[Any]]) -> Any:
            calls.append(call)
            return await around(call, sent, work)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.link, "around", count)
            assert await succession.led(*succession.fleet.works) == [worker, worker]
        assert calls.count("scan") == 1

    succession.fleet.tell(story)


def test_a_term_that_came_and_went_ends_a_cold_start() -> None:
    """Who sees that somebody has led meanwhile leads at once: all are there that may be elected.

    Found: it prepared as if nobody had ever led, and all waited for it.
    """
    succession = Succession(9, size=0)
    cautious = replace(SETTINGS, cold_start_preparation_delay=TIMING.heartbeat)

    async def story() -> None:
        quick, slow = (succession.add(name, "schedule") for name in ("quick", "slow"))
        quick.settings = replace(SETTINGS, skip_cold_start=True)
        slow.settings = cautious
        assert await succession.led("schedule") == [quick]
        await succession.stop(quick)
        assert await succession.led("schedule") == [slow]
        phases = [each.phase for each in slow.told("coord:cold-start-phase-changed")]
        assert phases == ["observing", "electing", "preparing", "ready"]

    succession.fleet.tell(story)
    assert max(succession.vacancies("schedule")) < 0.6


@pytest.mark.parametrize("seed", range(8))
def test_nobody_gives_way_for_longer_than_a_beat_after_the_release(seed: int) -> None:
    """An older worker that is there no more is waited for until it would have had the role.

    Found: the beat was counted from when the release was seen, and that may be a look later.
    """
    succession = Succession(seed, size=0, rate=0.0)

    async def story() -> None:
        leader = succession.add("leader", "schedule")
        await succession.led("schedule")
        elder = succession.add("elder", "schedule")
        await asyncio.sleep(succession.dice.uniform(0.1, 1) * TIMING.heartbeat)
        younger = succession.add("younger", "schedule")
        await asyncio.sleep(succession.dice.uniform(2, 3) * TIMING.heartbeat)
        elder.node.kill()
        await succession.stop(leader)
        assert await succession.led("schedule") == [younger]

    succession.fleet.tell(story)
    (vacancy,) = succession.vacancies("schedule")
    assert 0.9 < vacancy < 1.05
