"""Sessions in a rough world: nobody trusts himself who has been called dead."""

import asyncio
from collections.abc import Sequence

import pytest
from chance import FakeClock, SeededRandomness
from fleets import HOUR, TIMING, Fleet, run_storm

from jobsync import Components, Events, Unknown
from jobsync.coordination.session import Session
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.testing.invariants import check_commits, check_roles


@pytest.mark.parametrize("seed", range(15))
def test_nobody_trusts_himself_who_was_called_dead(seed: int) -> None:
    """Through a stormy hour, with clocks that differ by up to 10 %, trust ends before death."""
    fleet = run_storm(seed)
    assert fleet.violations == []
    assert check_commits(fleet.world.history) == []
    assert check_roles(fleet.world.history) == []
    assert len(fleet.leaders) == 1
    alive = [session for session in fleet.sessions.values() if session.state == "live"]
    assert sum(session.trusted for session in alive) == len(fleet.nodes)


def test_the_storms_kill() -> None:
    """Over some seeds sessions do die, so that the check has something to see."""
    assert sum(run_storm(seed).deaths for seed in range(5)) > 20


def test_a_calm_hour_kills_nobody() -> None:
    """Without faults every first session lives on, and trusts itself."""
    fleet = Fleet(1)

    async def story() -> None:
        fleet.start()
        await asyncio.sleep(HOUR)

    fleet.world.run(story)
    assert fleet.deaths == 0
    assert len(fleet.sessions) == len(fleet.nodes)
    assert all(session.trusted for session in fleet.sessions.values())


def test_an_outage_of_the_store_kills_nobody() -> None:
    """Ten minutes without a store, for all at once: the same sessions go on."""
    fleet = Fleet(2)

    async def story() -> None:
        fleet.start()
        await asyncio.sleep(60)
        for link in fleet.links:
            link.requests_pass = False
        await asyncio.sleep(600)
        assert not any(session.trusted for session in fleet.sessions.values())
        for link in fleet.links:
            link.requests_pass = True
        await asyncio.sleep(120)

    fleet.world.run(story)
    assert fleet.deaths == 0
    assert len(fleet.sessions) == len(fleet.nodes)
    assert all(session.trusted for session in fleet.sessions.values())


def test_a_killed_node_is_called_dead_in_time() -> None:
    """Within two timeouts of the kill its death is written; the others live."""
    fleet = Fleet(3)

    async def story() -> None:
        fleet.start()
        await asyncio.sleep(60)
        fleet.nodes[0].kill()
        await asyncio.sleep(2 * TIMING.timeout)

    fleet.world.run(story)
    assert fleet.deaths == 1
    assert sum(session.trusted for session in fleet.sessions.values()) == len(fleet.nodes) - 1


def test_a_node_that_leaves_holds_nothing_from_then_on() -> None:
    """A clean end is a death of one's own making."""
    fleet = Fleet(4, size=1)

    async def story() -> None:
        node, link = fleet.nodes[0], fleet.links[0]
        session = Session(link, node.components, TIMING, "worker-1")

        async def live() -> list[bool]:
            await session.open()
            trusted = [session.trusted]
            async with asyncio.TaskGroup() as group:
                group.create_task(session.end())
                while group._tasks:
                    await asyncio.sleep(0.001)
                    trusted.append(session.trusted)
            await session.beat()
            return trusted

        before, *after = await node.run(live())
        assert before
        assert len(after) > 1
        assert not any(after)
        assert session.state == "ended"

    fleet.world.run(story)
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


async def test_a_beat_that_lands_late_is_adopted(clock: FakeClock) -> None:
    """A session does not lose to a beat of its own, and trust counts from that beat's sending."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store = Holding(MemoryStore(components=components))
    session = Session(store, components, TIMING, "worker-1")
    await session.open()
    first = session.incarnation
    store.holding = True
    sent = clock.mono()
    assert await session.beat() == "live"
    assert store.held is not None
    store.holding = False
    await store.write(store.held)
    assert await session.beat() == "live"
    end = TIMING.trusted_until(sent).seconds
    assert trusts_at(session, clock, end - 0.1)
    assert not trusts_at(session, clock, end)
    assert await session.beat() == "live"
    assert trusts_at(session, clock, end)
    assert session.incarnation == first


async def test_a_session_whose_record_is_gone_is_lost(clock: FakeClock) -> None:
    """Absent is as good as dead: nothing that it held counts any more."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store = MemoryStore(components=components)
    session = Session(store, components, TIMING, "worker-1")
    await session.open()
    await store.drop([f"session/{session.incarnation}"])
    assert await session.beat() == "lost"
    assert not session.trusted
