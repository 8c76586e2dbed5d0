"""Sessions in a rough world: nobody trusts himself who has been called dead."""

import asyncio
from collections.abc import Sequence

from chance import FakeClock, SeededRandomness
from fleets import HOUR, TIMING, Fleet

from jobsync import Components, Events, Unknown
from jobsync.coordination.session import Session
from jobsync.stores.contract import Change, Outcome, StoreDecorator
from jobsync.stores.memory import MemoryStore


def test_a_calm_hour_kills_nobody() -> None:
    """Without faults every first session lives on and trusts itself, and the oldest leads."""
    fleet = Fleet(1)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(HOUR)
        fleet.judge_rest()

    fleet.world.run(story)
    assert fleet.verdict == []
    assert fleet.deaths == 0
    gained = [each for each in fleet.world.history if each.what == "gained"]
    # Whoever was first may have handed over, at the end of its mandate, to the oldest.
    assert len(gained) <= 2


def test_an_outage_of_the_store_kills_nobody() -> None:
    """Ten minutes without a store, for all at once: the same sessions go on."""
    fleet = Fleet(2)

    def incarnations() -> list[str]:
        return [worker.membership.incarnation for worker in fleet.workers if worker.membership]

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        before = incarnations()
        for link in fleet.links:
            link.requests_pass = False
        await asyncio.sleep(600)
        assert not any(worker.is_trusted for worker in fleet.workers)
        for link in fleet.links:
            link.requests_pass = True
        await asyncio.sleep(120)
        assert incarnations() == before
        fleet.judge_rest()

    fleet.world.run(story)
    assert fleet.verdict == []
    assert fleet.deaths == 0


def test_a_killed_process_is_called_dead_in_time() -> None:
    """Within a timeout and a beat of the kill, by slow clocks, its death is written."""
    fleet = Fleet(3)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        fleet.leaders()[0].node.kill()
        await asyncio.sleep(1.06 * (TIMING.timeout + TIMING.heartbeat) + 1)
        assert sum(worker.is_trusted for worker in fleet.workers) == len(fleet.workers) - 1
        fleet.judge_rest()

    fleet.world.run(story)
    assert fleet.verdict == []
    assert fleet.deaths == 1


class Holding(StoreDecorator):
    """Keeps writes back while told to."""

    held: Sequence[Change] | None = None
    holding = False

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if not self.holding:
            return await self.inner.write(changes)
        self.held = changes
        return [Unknown("held back") for _ in changes]


def trusts_at(session: Session, clock: FakeClock, seconds: float) -> bool:
    """Say whether a session trusts itself at some moment."""
    clock.mono_seconds = seconds
    return session.trusted


def components_with(clock: FakeClock) -> Components:
    """Give components with a clock that stands still."""
    return Components(clock=clock, randomness=SeededRandomness(1), events=Events())


async def test_a_beat_that_lands_late_is_adopted(clock: FakeClock) -> None:
    """A session does not lose to a beat of its own, and trust counts from that beat's sending."""
    components = components_with(clock)
    store = Holding(MemoryStore(components=components))
    session = Session(store, components, TIMING, "worker-1")
    await session.open()
    first = session.incarnation
    store.holding = True
    sent = clock.mono()
    assert await session.heartbeat() == "live"
    assert store.held is not None
    store.holding = False
    await store.write(store.held)
    assert await session.heartbeat() == "live"
    end = TIMING.trusted_until(sent).seconds
    assert trusts_at(session, clock, end - 0.1)
    assert not trusts_at(session, clock, end)
    assert await session.heartbeat() == "live"
    assert trusts_at(session, clock, end)
    assert (session.incarnation, session.lapses) == (first, 1)


async def test_a_session_whose_record_is_gone_is_lost(clock: FakeClock) -> None:
    """Absent is as good as dead: nothing that it held counts any more."""
    components = components_with(clock)
    store = MemoryStore(components=components)
    session = Session(store, components, TIMING, "worker-1")
    await session.open()
    await store.drop([f"session/{session.incarnation}"])
    assert await session.heartbeat() == "lost"
    assert not session.trusted


async def test_a_session_ends_even_if_its_last_beat_lands_late(clock: FakeClock) -> None:
    """A beat that was given up, and lands before the end, leaves no corpse that looks alive."""
    components = components_with(clock)
    store = Holding(MemoryStore(components=components))
    session = Session(store, components, TIMING, "worker-1")
    await session.open()
    store.holding = True
    await session.heartbeat()
    store.holding = False
    assert store.held is not None
    await store.write(store.held)
    await session.end()
    record = await store.get(f"session/{session.incarnation}")
    assert record is not None
    assert record.value["state"] == "dead"


async def test_a_beat_that_lands_when_it_is_long_forgotten_is_gone_on_from(
    clock: FakeClock,
) -> None:
    """Fifty beats were given up since: it renews no trust, but the next beat stands on it.

    Found: a session alone in the world then lost to its own beat for ever.
    """
    components = components_with(clock)
    store = Holding(MemoryStore(components=components))
    session = Session(store, components, TIMING, "worker-1")
    await session.open()
    store.holding = True
    await session.heartbeat()
    first = store.held
    assert first is not None
    for _ in range(50):
        await session.heartbeat()
    store.holding = False
    await store.write(first)
    assert await session.heartbeat() == "live"
    assert not session.trusted
    assert await session.heartbeat() == "live"
    assert session.trusted
