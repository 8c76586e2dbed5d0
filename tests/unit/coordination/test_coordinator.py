"""A process that coordinates: on a thread of its own, in memory."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from jobsync import (
    Components,
    CoordinatorSettings,
    Hooks,
    Invalid,
    Membership,
    Store,
    Term,
    Unavailable,
)
from jobsync.coordination.runner import OwnThread
from jobsync.stores.contract import Change, Outcome, StoreDecorator
from jobsync.stores.memory import MemoryStore

QUICK: dict[str, Any] = {"heartbeat_interval": 0.1, "worker_timeout": 0.7}


async def test_without_an_election_the_work_is_done() -> None:
    """Told to work alone, a process leads at once, writes, and stops when told."""
    calls: list[str] = []
    done = asyncio.Event()

    async def work(term: Term) -> None:
        await term.put("single/count", (await term.get("single/count") or 0) + 1)
        calls.append("work")
        done.set()

    async def stop(_: Term) -> None:
        calls.append("stop")

    membership = await Membership.join("memory://", enable_coordinator=False, **QUICK)
    alone = await membership.coordinate("report", Hooks(work=work, on_stop=stop))
    assert alone.coordinator_id == membership.worker_id
    assert await alone.ensure_coordinator() == membership.worker_id
    await done.wait()
    await alone.stop()
    await alone.stop()
    assert not alone.is_coordinator
    assert calls[-1] == "stop"
    record = await membership.store.get("single/count")
    assert record is not None
    assert record.value == calls.count("work")
    assert record.epoch == 0
    await membership.leave()
    await membership.leave()


async def test_a_hook_that_raises_is_told_and_called_again() -> None:
    """User code that fails is an event; the next call comes, and the term goes on."""
    components = Components.system()
    failures: list[str] = []
    components.events.on("jobsync:handler-failed", lambda event: failures.append(event.error))
    twice = asyncio.Event()

    async def work(_: Term) -> None:
        if len(failures) == 2:
            twice.set()
        raise ValueError("no")

    membership = await Membership.join(
        "memory://", components, coordinator_work_interval=0.01, **QUICK
    )
    report = await membership.coordinate("report", Hooks(work=work))
    await twice.wait()
    assert failures[:2] == ["ValueError: no"] * 2
    assert report.is_coordinator
    await membership.leave()


async def test_one_membership_stands_once_for_a_work() -> None:
    """A second candidacy for the same work is a mistake, and refused."""
    async with await Membership.join("memory://", **QUICK) as membership:
        await membership.coordinate("report")
        with pytest.raises(Invalid, match=r"work is already coordinated here \(got 'report'\)"):
            await membership.coordinate("report")
        await membership.coordinate("report", namespace="other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heartbeat_interval": 30_000}, r"heartbeat_interval .*got 30000.*Did you mean 30\?"),
        ({"worker_timeout": 10, "heartbeat_interval": 5}, "at least three heartbeats"),
        ({"min_epoch_duration": 400}, "min_epoch_duration .*max_epoch_duration=300 .*got 400"),
        ({"cold_start_observation_window": 15_000}, r"Did you mean 15\?"),
        ({"cold_start_preparation_delay": -1}, "Use 0 or more"),
        ({"coordinator_work_interval": 0}, "Use more than 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, float], message: str) -> None:
    """The error names the option, the value and the fix."""
    with pytest.raises(Invalid, match=message):
        CoordinatorSettings(**options)  # type: ignore[arg-type]


async def test_an_unknown_option_is_refused() -> None:
    """With a guess at what was meant."""
    with pytest.raises(Invalid, match="Did you mean heartbeat_interval"):
        await Membership.join("memory://", hartbeat_interval=1)


async def test_an_ill_formed_singleton_is_refused_at_once() -> None:
    """A slip in a key is the caller's to hear of, and no reason for the session to end."""
    membership = await Membership.join("memory://", **QUICK)
    with pytest.raises(Invalid, match="empty segment"):
        await membership.coordinate("report", governs=["single//count"])
    report = await membership.coordinate("report")
    assert await report.ensure_coordinator() == membership.worker_id
    await membership.leave()


class Stalling(StoreDecorator):
    """Holds up its whole thread in one write, as code that keeps the GIL would."""

    def __init__(self, inner: Store, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        seconds, self._seconds = self._seconds, 0.0
        time.sleep(seconds)  # noqa: ASYNC251 - the fault itself
        return await super().write(changes)


async def test_a_thread_that_is_held_up_within_a_beat_warns_too() -> None:
    """Starvation that begins while a beat is under way is told, like one between two beats."""
    components = Components.system()
    settings = CoordinatorSettings(heartbeat_interval=0.2, worker_timeout=2)
    late = asyncio.Event()
    components.events.on("coord:heartbeat-late", lambda _: late.set())
    home = MemoryStore("held-up", components)
    stalling = Stalling(MemoryStore("held-up", components), seconds=0.0)

    async def open_own() -> Store:
        return stalling

    membership = Membership(home, components, settings, open_own=open_own, host=OwnThread())
    await membership.start()
    stalling._seconds = 1.0
    async with asyncio.timeout(30):
        await late.wait()
    await membership.leave()


class Deaf(StoreDecorator):
    """A store that breaks, on demand, as no store should."""

    is_broken = False

    async def get_many(self, keys: Sequence[str], *, tombstones: bool = False) -> list[Any]:
        if self.is_broken:
            raise ZeroDivisionError("a bug")
        return await super().get_many(keys, tombstones=tombstones)


@pytest.mark.parametrize("end", ["leaves", "fails"])
async def test_who_waits_for_a_coordinator_hears_of_the_end(end: str) -> None:
    """Nobody waits for ever for a leader of whom nothing can be heard any more."""
    store = Deaf(MemoryStore())
    # It looks around for long: nobody leads meanwhile.
    slow = CoordinatorSettings(cold_start_observation_window=600, **QUICK)
    membership = Membership(
        store, Components.system(), slow, open_own=lambda: _give(store), host=OwnThread()
    )
    await membership.start()
    report = await membership.coordinate("report")
    waiting = asyncio.ensure_future(report.ensure_coordinator())
    await asyncio.sleep(0)
    if end == "leaves":
        await membership.leave()
        with pytest.raises(Invalid, match=r"work is no longer coordinated here \(got 'default"):
            await waiting
    else:
        store.is_broken = True
        with pytest.raises(
            Unavailable, match=r"the session is unavailable: it has ended\. Join again"
        ):
            await waiting
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await membership.ended()
    with pytest.raises((Invalid, Unavailable)):
        await report.ensure_coordinator()


async def _give(store: Store) -> Store:
    return store


async def test_stopping_again_does_not_end_a_later_candidacy() -> None:
    """Whoever holds on to one that is over can do no harm with it."""
    async with await Membership.join("memory://", **QUICK) as membership:
        first = await membership.coordinate("report")
        await first.ensure_coordinator()
        await first.stop()
        second = await membership.coordinate("report")
        await first.stop()
        await second.ensure_coordinator()
        async with asyncio.timeout(30):
            while not second.is_coordinator:
                await membership.change(1)


async def test_work_that_stops_its_own_coordination_goes_on_to_its_end() -> None:
    """It is not cancelled by its own wish, is not called again, and `on_stop` comes after it."""
    calls: list[str] = []
    over = asyncio.Event()

    async def work(_: Term) -> None:
        await report.stop()
        await asyncio.sleep(0)
        calls.append("work")

    async def stop(_: Term) -> None:
        await report.stop()
        calls.append("stop")
        over.set()

    async with await Membership.join(
        "memory://", coordinator_work_interval=0.01, **QUICK
    ) as membership:
        report = await membership.coordinate("report", Hooks(work=work, on_stop=stop))
        await over.wait()
        await report.stop()
        assert calls == ["work", "stop"]
        assert not report.is_coordinator


class Slow(StoreDecorator):
    """A store that takes its time with the first write."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked, self.answers = threading.Event(), threading.Event()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.asked.set()
        await asyncio.to_thread(self.answers.wait)
        return await super().write(changes)


async def test_whoever_gives_up_joining_leaves_no_session_behind() -> None:
    """The record that was on its way is ended in good order; nobody has to wait for its silence."""
    store = Slow(MemoryStore())
    settings = CoordinatorSettings(**QUICK)
    membership = Membership(
        store, Components.system(), settings, open_own=lambda: _give(store), host=OwnThread()
    )
    joining = asyncio.ensure_future(membership.start())
    await asyncio.to_thread(store.asked.wait)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    store.answers.set()
    await membership.ended()
    (session,) = await store.scan("session/")
    assert session.value["state"] == "dead"


async def test_a_call_that_the_end_of_the_thread_cuts_short_is_unavailable() -> None:
    """Not cancelled: nobody has cancelled the caller."""
    for _ in range(20):
        # Both run on the thread's own loop.
        host, ending = OwnThread(), asyncio.Event()

        async def live(ending: asyncio.Event = ending) -> None:
            await ending.wait()

        async def ask(ending: asyncio.Event = ending) -> None:
            ending.set()
            await asyncio.Event().wait()

        host.start(live)
        with pytest.raises(Unavailable, match="the session is unavailable: it has ended"):
            await host.call(ask)
