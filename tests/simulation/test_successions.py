"""How soon a worker that stops is replaced, on a store without notifications.

The oldest remaining worker follows within one heartbeat of the release, however fast workers
join and leave.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fleets import SETTINGS, TIMING, BilledStore, Fleet, Worker, record_hooks
from msgspec.structs import replace
from waiting import until

from jobsync.coordination.coordinator import Hooks
from jobsync.coordination.term import Term
from jobsync.testing.weather import Weather

QUICK = Weather(latency=0.02)
"""A request takes less than a hundredth of a heartbeat interval."""


class Succession:
    """Workers that lead, stop and are replaced, and how long each role was vacant."""

    def __init__(self, seed: int, *, size: int = 3, rate: float = 0.049) -> None:
        works = ("schedule", "sweep")
        self.fleet = Fleet(
            seed, size=size, works=works, rate=rate, store=BilledStore, records_events=True
        )
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
        """Wait until each work has a leader, and return the leaders."""
        await until(lambda: all(map(self._leaders, works)), interval=TIMING.heartbeat / 100)
        return [self._leaders(work)[0] for work in works]

    def _leaders(self, work: str) -> list[Worker]:
        held = ((each, each.held_epochs.get(work)) for each in self._list_candidates())
        return [each for each, epoch in held if (work, "gained", epoch) in each.hooks]

    def _list_candidates(self) -> list[Worker]:
        return [each for each in self.fleet.workers if not each.has_stopped]

    def oldest(self) -> Worker:
        """Return the oldest worker that is not stopped."""
        joined = {
            w.membership.worker_id: w for w in self._list_candidates() if w.membership is not None
        }
        return joined[min(joined)]

    async def stop(self, worker: Worker) -> None:
        """Stop a worker and wait for its end."""
        worker.stop()
        assert worker.task is not None
        await worker.task

    def vacancies(self, work: str) -> list[float]:
        """Return the heartbeats from each release until a worker led again."""
        found: list[float] = []
        released: dict[int, float] = {}
        for each in self.fleet.world.history:
            details = each.details
            if each.what == "commit" and details["key"] == f"role/default/{work}":
                if details["value"]["owner"] is None:
                    # A worker that leaves may write it twice.
                    released.setdefault(details["value"]["epoch"], each.at)
            elif (
                each.what == "gained"
                and details["work"] == work
                and details["epoch"] - 1 in released
            ):
                found.append((each.at - released[details["epoch"] - 1]) / TIMING.heartbeat)
        return found


@pytest.mark.parametrize("seed", range(8))
def test_quick_joins_and_leaves_are_followed_within_a_heartbeat(seed: int) -> None:
    """Leaders stop as soon as the next worker has joined; the oldest remaining one leads.

    Found: a worker that had seen no leader yet prepared for a moment, missed the end of that phase
    during a check, and led a heartbeat later.
    """
    succession = Succession(seed)
    fleet = succession.fleet

    async def story() -> None:
        fleet.start_all()
        for _ in range(20):
            leader, _ = await succession.led(*fleet.works)
            await succession.stop(leader)
            successor = succession.oldest()
            assert set(await succession.led(*fleet.works)) == {successor}
            await asyncio.sleep(succession.dice.uniform(0.2, 0.9) * TIMING.heartbeat)
            fresh = fleet.restart(leader)
            await until(
                lambda fresh=fresh: len(fresh.coordinators) == len(fleet.works),  # type: ignore[misc]
                interval=TIMING.heartbeat / 100,
            )

    fleet.run(story)
    for work in fleet.works:
        assert len(succession.vacancies(work)) == 20
        assert max(succession.vacancies(work)) < 1


def test_a_phase_that_ends_during_a_check_is_not_missed() -> None:
    """The elected worker leads as soon as it has prepared, even during a check.

    Found: it checked again a heartbeat later, and led that much later.
    """
    succession = Succession(6, size=0)
    window, delay = TIMING.heartbeat / 2, 0.001

    async def story() -> None:
        worker = succession.fleet.add("first", ("schedule",))
        worker.settings = replace(SETTINGS, cold_start_preparation_delay=delay)
        succession.fleet.start(worker)
        assert await succession.led("schedule") == [worker]
        times = {e.phase: e.duration for e in worker.events_named("coord:cold-start-phase-changed")}
        assert window < times["preparing"] < times["ready"] < window + TIMING.heartbeat / 10

    succession.fleet.run(story)


def test_the_leader_of_one_work_notices_in_time_that_another_is_free() -> None:
    """An older worker that leads another work checks as often as any follower.

    Found: a worker that led anything checked once a heartbeat, and found the other role late.
    """
    succession = Succession(7, size=0)

    async def story() -> None:
        older = succession.add("older", "schedule")
        await succession.led("schedule")
        younger = succession.add("younger", "sweep")
        await succession.led("sweep")
        await older.coordinate("sweep")
        for number in range(20):
            await asyncio.sleep(succession.dice.uniform(2, 3) * TIMING.heartbeat)
            await succession.stop(younger)
            assert await succession.led("sweep") == [older]
            await older.coordinators["sweep"].stop()
            younger = succession.add(f"younger-{number}", "sweep")
            await succession.led("sweep")
            await older.coordinate("sweep")

    succession.fleet.run(story)
    # The older worker has ended every other vacancy.
    assert max(succession.vacancies("sweep")[::2]) < 0.95


@pytest.mark.parametrize("seed", [8, 10, 19])
def test_works_released_one_after_another_are_all_found(seed: int) -> None:
    """The leader pauses between the release of one work and that of the next.

    Found: a worker that checked just then took the first, and the second a heartbeat later. And
    one that had just joined, and had seen no leader, prepared as if nobody had led before.
    """
    succession = Succession(seed)
    fleet = succession.fleet

    def stop_slowly(worker: Worker, work: str) -> Hooks:
        async def stop(term: Term) -> None:
            worker.record_hook(work, "lost", term)
            await worker.node.clock.sleep(TIMING.heartbeat / 10)

        return replace(record_hooks(worker, work), on_stop=stop)

    fleet.hooks = stop_slowly

    async def story() -> None:
        fleet.start_all()
        for _ in range(40):
            leader, _ = await succession.led(*fleet.works)
            await asyncio.sleep(succession.dice.uniform(2, 3) * TIMING.heartbeat)
            await succession.stop(leader)
            fleet.restart(leader)

    fleet.run(story)
    assert max(succession.vacancies("sweep")) < 0.95


def test_works_released_together_are_taken_together() -> None:
    """Also by a worker whose check runs after the first release and before the second.

    Found: it took the first, and the second only at its next check.
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
            fleet.restart(leader)

    fleet.run(story)


def test_works_taken_together_cost_one_listing() -> None:
    """However many roles are free, the candidates are listed once."""
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

    succession.fleet.run(story)


def test_a_term_that_is_already_over_ends_a_cold_start() -> None:
    """A worker that sees that another has led meanwhile leads at once.

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
        phases = [each.phase for each in slow.events_named("coord:cold-start-phase-changed")]
        assert phases == ["observing", "electing", "preparing", "ready"]

    succession.fleet.run(story)
    assert max(succession.vacancies("schedule")) < 0.6


@pytest.mark.parametrize("seed", range(8))
def test_nobody_defers_for_longer_than_a_heartbeat_after_the_release(seed: int) -> None:
    """Candidates wait for a dead older worker only as long as it would need to take the role.

    Found: the heartbeat interval counted from when the release was seen, up to a check later.
    """
    succession = Succession(seed, size=0, rate=0.0)

    async def story() -> None:
        leader = succession.add("leader", "schedule")
        await succession.led("schedule")
        older = succession.add("older", "schedule")
        await asyncio.sleep(succession.dice.uniform(0.1, 1) * TIMING.heartbeat)
        younger = succession.add("younger", "schedule")
        await asyncio.sleep(succession.dice.uniform(2, 3) * TIMING.heartbeat)
        older.node.kill()
        await succession.stop(leader)
        assert await succession.led("schedule") == [younger]

    succession.fleet.run(story)
    (vacancy,) = succession.vacancies("schedule")
    assert 0.9 < vacancy < 1.05
