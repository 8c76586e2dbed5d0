"""Workers that stand back from a role for a while, and leaders that learn of their wrong clocks."""

import asyncio
from typing import Any

import pytest
from fleets import HOUR, SETTINGS, TIMING, BilledStore, Fleet, Worker
from waiting import until

from jobsync.components import Components
from jobsync.coordination.coordinator import Coordinator
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.errors import NotFound
from jobsync.status.sessions import ClusterStatus, read_cluster_status
from jobsync.stores.contract import Head
from jobsync.stores.memory import MemoryStore
from jobsync.testing.weather import Weather

STORES = [MemoryStore, BilledStore]
SLOW = 1.06
"""Factor for a duration by the slowest clock, with the latency of the store."""
SHORT_MANDATES = CoordinatorSettings(
    heartbeat_interval=5, worker_timeout=15, min_epoch_duration=20, max_epoch_duration=60
)
REASON = "this machine's clock is 92 s ahead of the object store's"


def candidacy(worker: Worker) -> Coordinator:
    """Return a worker's candidacy."""
    return worker.coordinators["work"]


def oldest(fleet: Fleet, *, without: Worker | None = None) -> Worker:
    """Return the worker that sorts first."""
    return min(
        (worker for worker in fleet.workers if worker is not without),
        key=lambda worker: candidacy(worker).worker_id,
    )


async def settled(fleet: Fleet) -> Worker:
    """Start a fleet; return its leader, which is its oldest worker."""
    fleet.start_all()
    await until(lambda: len(fleet.leaders()) == 1, "a leader")
    # To the oldest at the end of the first mandate.
    await until(lambda: fleet.leaders() == [oldest(fleet)], "the oldest as leader")
    leader = oldest(fleet)
    await until(lambda: candidacy(leader).is_coordinator, "the end of the cold start")
    return leader


async def status(fleet: Fleet) -> ClusterStatus:
    """Return what an operator sees."""
    return await read_cluster_status(fleet.store, fleet.world.node("reader").components)


def demotions(worker: Worker) -> list[str]:
    """Return why a worker's terms ended."""
    return [event.reason for event in worker.events_named("coord:coordinator-demoted")]


@pytest.mark.parametrize("store", STORES)
def test_a_leader_that_stands_back_is_replaced_within_a_heartbeat(store: type[MemoryStore]) -> None:
    """The oldest of the others leads next; the reason is in the event and in the role's past."""
    fleet = Fleet(200, store=store, settings=SHORT_MANDATES, records_events=True)

    async def story() -> None:
        leader = await settled(fleet)
        leader.events.clear()
        candidacy(leader).withhold(REASON)
        await asyncio.sleep(SLOW * TIMING.heartbeat + 0.1)
        assert fleet.leaders() == [oldest(fleet, without=leader)]
        assert not candidacy(leader).is_coordinator
        assert demotions(leader) == [REASON]
        (role,) = (await status(fleet)).roles
        assert role.past[-1].why == REASON
        assert role.past[-1].worker == candidacy(leader).worker_id
        assert role.withheld == {candidacy(leader).worker_id: REASON}
        assert role.candidates == len(fleet.workers) - 1

    fleet.run(story)


@pytest.mark.parametrize("store", STORES)
def test_the_oldest_does_not_lead_again_before_it_stands(store: type[MemoryStore]) -> None:
    """Neither when mandates end, nor by request, nor when leaders die; afterwards it does."""
    fleet = Fleet(201, store=store, settings=SHORT_MANDATES, records_events=True)

    async def story() -> None:
        first = await settled(fleet)
        candidacy(first).withhold(REASON)
        await until(lambda: fleet.leaders() not in ([], [first]), "another leader")
        promoted = len(first.events_named("coord:coordinator-promoted"))
        await asyncio.sleep(5 * 60)
        (leader,) = fleet.leaders()
        desired = candidacy(first).worker_id
        forced = candidacy(leader).ensure_coordinator(force=True, desired_coordinator=desired)
        with pytest.raises(NotFound):
            await leader.run(forced)
        fleet.replace(leader)
        await asyncio.sleep(2 * TIMING.timeout + 2 * TIMING.heartbeat)
        assert len(fleet.leaders()) == 1
        assert len(first.events_named("coord:coordinator-promoted")) == promoted
        assert candidacy(first).withheld == REASON
        candidacy(first).stand()
        await until(lambda: fleet.leaders() == [first], "the oldest leads again")
        (role,) = (await status(fleet)).roles
        assert role.withheld == {}
        assert role.candidates == len(fleet.workers)

    fleet.run(story)


@pytest.mark.parametrize("store", STORES)
def test_if_all_stand_back_nobody_leads_and_it_shows_why(store: type[MemoryStore]) -> None:
    """The first that stands again leads within a heartbeat."""
    fleet = Fleet(202, store=store, settings=SETTINGS)

    async def story() -> None:
        fleet.start_all()
        await until(lambda: len(fleet.leaders()) == 1, "a leader")
        for worker in fleet.workers:
            candidacy(worker).withhold(f"{worker.node.name} is off")
        await until(lambda: fleet.leaders() == [], "no leader")
        for _ in range(20):
            await asyncio.sleep(TIMING.heartbeat)
            assert fleet.leaders() == []
        (role,) = (await status(fleet)).roles
        assert (role.state, role.leader, role.candidates) == ("vacant", None, 0)
        assert role.withheld == {
            candidacy(worker).worker_id: f"{worker.node.name} is off" for worker in fleet.workers
        }
        last = fleet.workers[-1]
        candidacy(last).stand()
        await asyncio.sleep(SLOW * TIMING.heartbeat + 0.1)
        assert fleet.leaders() == [last]

    fleet.run(story)


def test_a_role_that_nobody_has_held_shows_who_stands_back() -> None:
    """Also if all have stood back before the first election."""
    fleet = Fleet(203, size=2, store=BilledStore)

    async def story() -> None:
        fleet.start_all()
        await until(lambda: all(worker.coordinators for worker in fleet.workers), "candidacies")
        for worker in fleet.workers:
            candidacy(worker).withhold(REASON)
        await asyncio.sleep(60)
        assert fleet.leaders() == []
        (role,) = (await status(fleet)).roles
        assert (role.state, role.epoch, len(role.withheld)) == ("vacant", 0, 2)

    fleet.run(story)


def test_a_candidacy_that_was_stopped_is_not_shown_as_withheld() -> None:
    """A later one for the same role is a candidate at once."""
    fleet = Fleet(204, size=1)

    async def story() -> None:
        fleet.start_all()
        (worker,) = fleet.workers
        await until(lambda: fleet.leaders() == [worker], "a leader")
        candidacy(worker).withhold(REASON)
        await until(lambda: fleet.leaders() == [], "no leader")
        await worker.run(candidacy(worker).stop())
        await worker.run(worker.coordinate("work"))
        await until(lambda: fleet.leaders() == [worker], "a leader again")
        await asyncio.sleep(TIMING.heartbeat)
        (role,) = (await status(fleet)).roles
        assert role.withheld == {}

    fleet.run(story)


def test_a_term_that_ends_at_once_is_not_ended_twice() -> None:
    """One that stands again before its release keeps its term or has a new one, in order."""
    fleet = Fleet(205, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await until(lambda: len(fleet.leaders()) == 1, "a leader")
        for _ in range(20):
            for worker in fleet.workers:
                candidacy(worker).withhold(REASON)
                await asyncio.sleep(fleet.world.dice.random() * 0.05)
                candidacy(worker).stand()
        await asyncio.sleep(2 * TIMING.heartbeat)
        assert len(fleet.leaders()) == 1
        for worker in fleet.workers:
            names = [what for _, what, _ in worker.hooks]
            assert names == ["gained", "lost"] * (len(names) // 2) + ["gained"] * (len(names) % 2)

    fleet.run(story)


@pytest.mark.parametrize("seed", range(210, 216))
@pytest.mark.parametrize("store", STORES)
def test_one_leads_through_bad_weather_while_workers_stand_back_and_return(
    seed: int, store: type[MemoryStore]
) -> None:
    """No invariant of elections breaks, and in the end one of those that stand leads."""
    fleet = Fleet(seed, store=store, is_untampered=True)
    weather = Weather(slow=0.1, slow_by=8.0, refused=0.05, lost=0.1, late=0.05, doubled=0.05)

    async def story() -> None:
        fleet.start_all()
        for link in fleet.links:
            link.weather = weather
        dice = fleet.world.dice
        for _ in range(60):
            worker = dice.choice(fleet.workers)
            if worker.coordinators:
                each = candidacy(worker)
                each.stand() if each.withheld else each.withhold(REASON)
            await asyncio.sleep(dice.uniform(0, 20))
        for link in fleet.links:
            link.mend()
        for worker in fleet.workers:
            candidacy(worker).stand()
        candidacy(fleet.workers[0]).withhold(REASON)
        await asyncio.sleep(SLOW * (2 * TIMING.timeout + 2 * TIMING.heartbeat))
        assert len(fleet.leaders()) == 1
        assert fleet.leaders() != [fleet.workers[0]]

    fleet.run(story)


# Clocks.


class CountingStore(BilledStore):
    """A bucket that remembers where listings began, apart from those that began at the start."""

    def __init__(self, name: str = "", components: Components | None = None) -> None:
        super().__init__(name, components)
        self.later_pages: list[str] = []

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys, versions and times."""
        if after:
            self.later_pages.append(after)
        return await super().heads(prefix, after=after, until=until, limit=limit)


def skew_of(worker: Worker) -> float | None:
    """Return how far a worker believes its clock to be ahead."""
    return None if worker.membership is None else worker.membership.clock_skew


@pytest.mark.parametrize("skew", [-92.0, 0.0, 92.0])
def test_a_leader_learns_from_its_listings_how_far_its_clock_is_off(skew: float) -> None:
    """Within a heartbeat of its election, and from then on; it costs no request."""
    fleet = Fleet(220, size=0, store=BilledStore)
    worker = fleet.add("off", skew=skew)

    async def story() -> None:
        fleet.start_all()
        await until(lambda: fleet.leaders() == [worker], "a leader")
        await asyncio.sleep(1.5 * TIMING.heartbeat)
        for _ in range(100):
            found = skew_of(worker)
            assert found is not None
            # Its clock's rate is off by at most 5 %, too, and drifts all the time.
            assert abs(found - worker.node.clock.skew - drift(worker)) <= 1.5
            await asyncio.sleep(1)

    fleet.run(story)


def drift(worker: Worker) -> float:
    """Return by how much a worker's clock has drifted since the start of the world."""
    clock, world = worker.node.clock, worker.fleet.world
    return clock.wall().seconds - clock.skew - world.nodes["store"].clock.wall().seconds


def test_a_step_of_the_clock_is_noticed_before_the_next_heartbeat() -> None:
    """As is its correction."""
    fleet = Fleet(221, size=1, rate=0.0, store=BilledStore)

    async def story() -> None:
        fleet.start_all()
        (worker,) = fleet.workers
        await until(lambda: skew_of(worker) is not None, "a comparison")
        assert skew_of(worker) == 0
        worker.node.clock.step_wall(3600)
        found = skew_of(worker)
        assert found is not None
        assert 3598 < found <= 3600
        worker.node.clock.step_wall(-3600)
        assert skew_of(worker) == 0

    fleet.run(story)


def test_an_honest_clock_is_not_accused_by_slow_requests() -> None:
    """Nor by lost replies, for as long as the bad weather lasts."""
    fleet = Fleet(222, size=2, rate=0.0, store=BilledStore)
    weather = Weather(slow=0.5, slow_by=4.0, lost=0.2, refused=0.1)

    async def story() -> None:
        fleet.start_all()
        for link in fleet.links:
            link.weather = weather
        seen: list[Any] = []
        for _ in range(int(HOUR / 6)):
            await asyncio.sleep(1)
            seen += [skew_of(worker) for worker in fleet.workers if worker.membership]
        assert {found for found in seen if found is not None} == {0.0}

    fleet.run(story)


def test_one_that_does_not_lead_compares_its_clock_on_demand() -> None:
    """By one request every other timeout at most, because no listing tells it by the way."""
    fleet = Fleet(223, size=2, rate=0.0, store=CountingStore)
    assert isinstance(fleet.store, CountingStore)
    pages = fleet.store.later_pages

    async def story() -> None:
        fleet.start_all()
        await until(lambda: len(fleet.leaders()) == 1, "a leader")
        await asyncio.sleep(TIMING.heartbeat)
        (follower,) = (worker for worker in fleet.workers if worker not in fleet.leaders())
        assert skew_of(follower) is None
        follower.node.clock.step_wall(-40)
        membership = follower.membership
        assert membership is not None
        for _ in range(int(4 * TIMING.timeout)):
            await follower.run(membership.measure_clock())
            await asyncio.sleep(1)
        found = skew_of(follower)
        assert found is not None
        assert -40 <= found < -38
        key = f"session/{membership.incarnation}"
        assert set(pages) == {key[:-1]}
        assert len(pages) <= 3

    fleet.run(story)
