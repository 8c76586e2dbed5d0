"""Sessions in a simulated world with faults: no dead session trusts itself."""

import asyncio
from collections.abc import Sequence

import pytest
from chance import FakeClock, SeededRandomness
from fleets import HOUR, TIMING, Fleet

from jobsync import Components, Events, Unknown
from jobsync.coordination.session import Session, SessionOwner
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore


def test_a_calm_hour_kills_nobody() -> None:
    """Without faults all sessions live on and trust themselves, and the oldest worker leads."""
    fleet = Fleet(1)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(HOUR)
        fleet.check_steady()

    fleet.world.run(story)
    assert fleet.all_violations == []
    assert fleet.deaths == 0
    gained = [each for each in fleet.world.history if each.what == "gained"]
    # The first leader may have handed over to the oldest worker at the end of its mandate.
    assert len(gained) <= 2


def test_outages_of_the_store_kill_nobody() -> None:
    """Ten minutes without a store for all workers, twice: the same sessions go on.

    Each outage is reported once.
    """
    fleet = Fleet(2, records_events=True)

    def incarnations() -> list[str]:
        return [worker.membership.incarnation for worker in fleet.workers if worker.membership]

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        before = incarnations()
        for outages in (1, 2):
            for link in fleet.links:
                link.requests_pass = False
            await asyncio.sleep(600)
            assert not any(worker.is_trusted for worker in fleet.workers)
            for link in fleet.links:
                link.requests_pass = True
            await asyncio.sleep(120)
            assert incarnations() == before
            fleet.check_steady()
            for worker in fleet.workers:
                assert len(worker.events_named("coord:store-silent")) == outages

    fleet.world.run(story)
    assert fleet.all_violations == []
    assert fleet.deaths == 0


def test_a_killed_process_is_declared_dead_in_time() -> None:
    """Its death is written within a timeout and a heartbeat of the kill, by slow clocks."""
    fleet = Fleet(3)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        fleet.leaders()[0].node.kill()
        await asyncio.sleep(1.06 * (TIMING.timeout + TIMING.heartbeat) + 1)
        assert sum(worker.is_trusted for worker in fleet.workers) == len(fleet.workers) - 1
        fleet.check_steady()

    fleet.world.run(story)
    assert fleet.all_violations == []
    assert fleet.deaths == 1


@pytest.mark.parametrize("how", ["never there", "killed", "removed"])
def test_whoever_watches_a_session_learns_that_it_is_gone(how: str) -> None:
    """Leaders and followers, whether its record says dead, was removed, or was never there."""
    fleet = Fleet(4)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        victim = next(worker for worker in fleet.workers if worker not in fleet.leaders())
        others = [worker for worker in fleet.workers if worker is not victim]
        assert victim.membership is not None
        watched = victim.membership.incarnation if how != "never there" else "nobody"
        for worker in others:
            assert worker.membership is not None
            worker.membership.watch("test", [watched])
        if how != "never there":
            victim.node.kill()
        if how == "removed":
            await fleet.store.drop([f"session/{watched}"])
        await asyncio.sleep(1.06 * (TIMING.timeout + 2 * TIMING.heartbeat) + 1)
        for worker in others:
            assert worker.membership is not None
            assert worker.membership.is_dead(watched)

    fleet.world.run(story)
    assert fleet.all_violations == []


class WithholdingStore(StoreDecorator):
    """Withholds writes on demand, and answers that their outcome is unknown."""

    pending: Sequence[Change] | None = None
    is_withholding = False

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if not self.is_withholding:
            return await self.inner.write(changes)
        self.pending = changes
        return [Unknown("withheld") for _ in changes]


def trusts_at(session: Session, clock: FakeClock, seconds: float) -> bool:
    """Whether a session trusts itself at some moment."""
    clock.mono_seconds = seconds
    return session.trusted


def components_with(clock: FakeClock) -> Components:
    """Return components with a clock that stands still."""
    return Components(clock=clock, randomness=SeededRandomness(1), events=Events())


async def test_a_heartbeat_that_lands_late_is_adopted(clock: FakeClock) -> None:
    """A session does not lose to its own heartbeat; trust counts from when that was sent."""
    components = components_with(clock)
    store = WithholdingStore(MemoryStore(components=components))
    session = Session(SessionOwner(store, components, TIMING, "worker-1"))
    await session.open()
    first = session.incarnation
    store.is_withholding = True
    sent = clock.mono()
    assert await session.heartbeat() == "live"
    assert store.pending is not None
    store.is_withholding = False
    await store.write(store.pending)
    assert await session.heartbeat() == "live"
    end = TIMING.trusted_until(sent).seconds
    assert trusts_at(session, clock, end - 0.1)
    assert not trusts_at(session, clock, end)
    assert await session.heartbeat() == "live"
    assert trusts_at(session, clock, end)
    assert (session.incarnation, session.lapses) == (first, 1)


async def test_a_session_whose_record_is_gone_is_lost(clock: FakeClock) -> None:
    """An absent record means dead: nothing that it held counts any more."""
    components = components_with(clock)
    store = MemoryStore(components=components)
    session = Session(SessionOwner(store, components, TIMING, "worker-1"))
    await session.open()
    await store.drop([f"session/{session.incarnation}"])
    assert await session.heartbeat() == "lost"
    assert not session.trusted


async def test_a_session_ends_even_if_its_last_heartbeat_lands_late(clock: FakeClock) -> None:
    """A heartbeat without a reply that lands before the end leaves no record that reads live."""
    components = components_with(clock)
    store = WithholdingStore(MemoryStore(components=components))
    session = Session(SessionOwner(store, components, TIMING, "worker-1"))
    await session.open()
    store.is_withholding = True
    await session.heartbeat()
    store.is_withholding = False
    assert store.pending is not None
    await store.write(store.pending)
    await session.end()
    record = await store.get(f"session/{session.incarnation}")
    assert record is not None
    assert record.value["state"] == "dead"


async def test_a_heartbeat_that_lands_after_it_was_forgotten_becomes_the_base(
    clock: FakeClock,
) -> None:
    """Fifty heartbeats later it renews no trust, but becomes the base of the next one.

    Found: a session with nobody to declare it dead then lost to its own heartbeat forever.
    """
    components = components_with(clock)
    store = WithholdingStore(MemoryStore(components=components))
    session = Session(SessionOwner(store, components, TIMING, "worker-1"))
    await session.open()
    store.is_withholding = True
    await session.heartbeat()
    first = store.pending
    assert first is not None
    for _ in range(50):
        await session.heartbeat()
    store.is_withholding = False
    await store.write(first)
    assert await session.heartbeat() == "live"
    assert not session.trusted
    assert await session.heartbeat() == "live"
    assert session.trusted
