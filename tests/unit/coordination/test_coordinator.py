"""Membership and coordinators of one process, on a thread of their own, in memory."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import until

from jobsync import (
    Components,
    CoordinatorSettings,
    Hooks,
    Invalid,
    Membership,
    Misconfigured,
    Store,
    Term,
    Unavailable,
)
from jobsync.coordination import membership as membership_module
from jobsync.coordination.coordinator import Coordinator, StandaloneElection
from jobsync.coordination.role import HeldTerm, Role
from jobsync.coordination.runner import OwnThread
from jobsync.coordination.session import HookFailure
from jobsync.coordination.succession import (
    REQUESTS,
    HandoverRequest,
    read_request,
    request_handover,
)
from jobsync.core.clock import Mono
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

QUICK: dict[str, Any] = {"heartbeat_interval": 0.1, "worker_timeout": 0.7}


async def test_without_an_election_the_work_is_done() -> None:
    """Without an election a process leads at once, writes, and stops on request."""
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


@pytest.mark.parametrize("error", [None, ValueError("of the block")], ids=["returns", "raises"])
async def test_a_block_with_a_membership_ends_with_its_session(
    error: ValueError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it ends: the session has left, its thread has ended, and its store is closed."""
    closed: list[Store] = []

    class NotedStore(StoreDecorator):
        async def close(self) -> None:
            closed.append(self)
            await super().close()

    async def open_noted(*_: object) -> Store:
        return NotedStore(store)

    store = MemoryStore()
    monkeypatch.setattr(membership_module, "open_store", open_noted)
    threads = set(threading.enumerate())
    with suppress(ValueError):
        async with await Membership.join("memory://", **QUICK) as membership:
            assert await membership.members()
            if error is not None:
                raise error
    assert membership.store in closed
    assert not await membership.members()
    await until(lambda: threads.issuperset(threading.enumerate()), "its thread has ended")


@pytest.mark.parametrize(
    "error",
    [
        Misconfigured("url", "…", "may not be written", "grant it"),
        Unavailable("store", "too many connections"),
        RuntimeError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("failing", ["open", "write"])
async def test_a_session_that_cannot_start_says_why(error: Exception, failing: str) -> None:
    """The error of the store that the session would have had, not only that it has ended."""

    class FailingStore(StoreDecorator):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            del changes
            raise error

    async def open_own() -> Store:
        if failing == "open":
            raise error
        return FailingStore(MemoryStore())

    membership = Membership(
        MemoryStore(),
        Components.system(),
        CoordinatorSettings(**QUICK),
        open_own=open_own,
        host=OwnThread(),
    )
    with pytest.raises(type(error)) as caught:
        await membership.start()
    assert caught.value is error


async def test_without_an_election_a_process_can_stand_back_too() -> None:
    """It stops its work, says why, and begins again when it stands."""
    components = Components.system()
    reasons: list[str] = []
    components.events.on("coord:coordinator-demoted", lambda event: reasons.append(event.reason))
    calls: list[str] = []

    async def become(_: Term) -> None:
        calls.append("become")

    async def stop(_: Term) -> None:
        calls.append("stop")

    membership = await Membership.join("memory://", components, enable_coordinator=False, **QUICK)
    alone = await membership.coordinate("report", Hooks(on_become=become, on_stop=stop))
    await until(lambda: calls == ["become"])
    alone.withhold("the clock is off")
    alone.withhold("another reason")
    assert not alone.is_coordinator
    await until(lambda: calls == ["become", "stop"])
    assert reasons == ["the clock is off"]

    async def shown() -> object:
        (peer,) = await membership.members()
        return peer.facts.get("withheld")

    async def is_shown() -> bool:
        return await shown() == {"default/report": alone.withheld}

    async def is_over() -> bool:
        return await shown() is None

    await until(is_shown)
    alone.stand()
    await until(is_over)
    await until(lambda: calls == ["become", "stop", "become"])
    alone.withhold("the clock is off again")
    await until(is_shown)
    await alone.stop()
    assert calls == ["become", "stop"] * 2
    await until(is_over)
    await membership.leave()


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((), "stopped"),
        (("back",), "the clock is off"),
        (("back", "end"), "stopped"),
        (("back", "stand"), "the clock is off"),
        (("back", "stand", "end"), "stopped"),
        (("back", "stand", "back"), "the clock is off"),
        (("end", "back"), "the clock is off"),
    ],
    ids=str,
)
async def test_without_an_election_the_last_reason_counts(
    steps: tuple[str, ...], reason: str
) -> None:
    """Whatever came before; and a role that was released is not held again."""
    membership = await Membership.join("memory://", enable_coordinator=False, **QUICK)
    alone = StandaloneElection("default/report", membership.session)
    for step in steps:
        match step:
            case "end":
                alone.end()
            case _:
                alone.withheld = "the clock is off" if step == "back" else ""
    assert alone.end_reason == (0, reason)
    is_held = "end" not in steps and steps[-1:] != ("back",)
    assert (alone.held_term is not None, alone.leading_term is not None) == (is_held, is_held)
    await membership.leave()


@pytest.mark.parametrize(
    ("session", "end", "latest", "told"),
    [
        (("w.a", "live"), (0, ""), (3, 30.0), ("trust lapsed", 30.0)),
        (("w.a", "lost"), (0, ""), (3, 30.0), ("session lost", 30.0)),
        (("w.b", "live"), (0, ""), (3, 30.0), ("session lost", 30.0)),
        (("w.b", "new"), (0, ""), (3, 30.0), ("session lost", 30.0)),
        (("w.a", "live"), (2, "handed over"), (3, 30.0), ("trust lapsed", 30.0)),
        (("w.a", "live"), (3, "handed over"), (3, 30.0), ("handed over", 30.0)),
        (("w.b", "live"), (3, "fenced"), (4, 40.0), ("fenced", 10.0)),
        (("w.a", "lost"), (4, "stopped"), (4, 40.0), ("session lost", 10.0)),
        (("w.a", "live"), (3, "stopped"), None, ("stopped", 10.0)),
    ],
    ids=str,
)
async def test_a_demotion_says_why_this_term_has_ended_and_when_its_mandate_would_have(
    session: tuple[str, str],
    end: tuple[int, str],
    latest: tuple[int, float] | None,
    told: tuple[str, float],
) -> None:
    """Its own reason and its own mandate, not those of a term before or after."""

    def build_role(epoch: int, until: float) -> Role:
        return Role(epoch=epoch, owner="w.a", since=0.0, until=until, timeout=15.0)

    components = Components.system()
    demotions: list[Any] = []
    components.events.on("coord:coordinator-demoted", demotions.append)
    membership = await Membership.join("memory://", components, **QUICK)
    election = SimpleNamespace(
        name="default/report",
        session=SimpleNamespace(incarnation=session[0], state=session[1]),
        end_reason=end,
        role=None if latest is None else build_role(*latest),
    )
    coordinator = Coordinator(membership, cast("Any", election), Hooks(), membership.settings, ())
    coordinator._report_end(HeldTerm(3, "w.a", 0, Mono(0)), build_role(3, 10.0))
    (event,) = demotions
    assert (event.epoch, event.reason, event.until) == (3, *told)
    await membership.leave()


@pytest.mark.parametrize("end", ["stop", "abandon"])
async def test_a_failure_is_shown_until_the_same_hook_succeeds(end: str) -> None:
    """The success of another hook says nothing about it; the end of the term ends it."""
    shown: list[tuple[str, str] | None] = []
    worked = asyncio.Event()
    calls = 0

    async def fail(_: Term) -> None:
        raise ValueError("no")

    async def work(_: Term) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            worked.set()

    # A pause of the machine must not end the term.
    membership = await Membership.join(
        "memory://", coordinator_work_interval=0.001, worker_timeout=60.0
    )
    membership.publish_failure = (  # type: ignore[method-assign]
        lambda role, failure: shown.append(None if failure is None else (role, failure.callback))
    )
    report = await membership.coordinate("report", Hooks(on_become=fail, work=work))
    await worked.wait()
    assert shown == [("default/report", "on_become")]
    if end == "stop":
        await report.stop()
    else:
        report.abandon()
    assert shown == [("default/report", "on_become"), None]
    await membership.leave()


async def test_a_hook_that_raises_is_reported_and_called_again() -> None:
    """A failing hook becomes an event; the next call still comes, and the term goes on."""
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


async def test_a_session_shows_how_often_a_hook_has_raised_in_a_row() -> None:
    """Each hook has a count of its own, which begins anew after a success."""
    shown: list[tuple[str, int] | None] = []
    raises = iter([True, True, True, False, True, True, False])
    done = asyncio.Event()

    async def fail(_: Term) -> None:
        raise ValueError("no")

    async def work(_: Term) -> None:
        is_failing = next(raises, None)
        if is_failing is None:
            done.set()
        elif is_failing:
            raise ValueError("no")

    def note(role: str, failure: HookFailure | None) -> None:
        assert role == "default/report"
        shown.append(None if failure is None else (failure.callback, failure.times))

    membership = await Membership.join("memory://", coordinator_work_interval=0.001, **QUICK)
    membership.publish_failure = note  # type: ignore[method-assign]
    await membership.coordinate("report", Hooks(on_become=fail, work=work))
    await done.wait()
    await membership.leave()
    name = "coordinator_work"
    assert shown == [
        *(("on_become", 1), (name, 1), (name, 2), (name, 3), None),
        *((name, 1), (name, 2), None),
    ]


@pytest.mark.parametrize(
    ("hanging", "count"), [("on_become", 1), ("work", 1), ("on_stop", 1), ("on_stop", 3)]
)
async def test_a_leave_that_is_cancelled_ends_every_hook(hanging: str, count: int) -> None:
    """Whichever hook hangs, of each work, and though the end of the term does not cancel it."""
    tasks = asyncio.all_tasks()
    hanging_now, ended = set[int](), set[int]()

    def build_hook(number: int) -> Any:
        async def hang(_: Term) -> None:
            hanging_now.add(number)
            try:
                await asyncio.Event().wait()
            finally:
                # It cleans up for ever, although its term is over.
                if hanging != "on_stop":
                    with suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
                ended.add(number)

        return hang

    membership = await Membership.join("memory://", skip_cold_start=True, **QUICK)
    hooks: list[dict[str, Any]] = [{hanging: build_hook(number)} for number in range(count)]
    reports = [
        await membership.coordinate(f"report {number}", Hooks(**each))
        for number, each in enumerate(hooks)
    ]
    await until(lambda: all(each.is_coordinator for each in reports), "it leads")
    if hanging != "on_stop":
        await until(lambda: len(hanging_now) == count, "all hooks hang")
    leaving = asyncio.ensure_future(membership.leave())
    await until(lambda: hanging_now, "a hook hangs")
    await until(lambda: not reports[0].is_coordinator, "its term is over")
    assert ended == set()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await until(lambda: asyncio.all_tasks() == tasks, "all tasks end")
    assert ended == hanging_now
    await until(lambda: membership.has_ended, "its session ends")


@pytest.mark.parametrize("enable_coordinator", [True, False], ids=["elected", "alone"])
@pytest.mark.parametrize("answer", ["an error", "nothing", "a pause"])
@pytest.mark.parametrize("hanging", ["on_become", "work"])
async def test_a_hook_cannot_outlast_its_term(
    hanging: str, answer: str, enable_coordinator: bool
) -> None:
    """Whatever it makes of its cancellation: `on_stop` follows, and it can lead again."""
    calls: list[tuple[str, bool]] = []
    entered = asyncio.Event()

    async def hang() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if answer == "an error":
                raise RuntimeError("the query was cancelled") from None
            if answer == "a pause":
                await asyncio.sleep(0)

    def note(name: str) -> Any:
        async def call(term: Term) -> None:
            calls.append((name, term.lasts))
            if name == hanging:
                await hang()

        return call

    membership = await Membership.join(
        "memory://",
        enable_coordinator=enable_coordinator,
        skip_cold_start=True,
        worker_timeout=60.0,
    )
    hooks = Hooks(on_become=note("on_become"), work=note("work"), on_stop=note("on_stop"))
    report = await membership.coordinate("report", hooks)
    begun = (
        [("on_become", True)] if hanging == "on_become" else [("on_become", True), ("work", True)]
    )
    for number in range(1, 3):
        await entered.wait()
        entered.clear()
        report.withhold("the clock is off")
        await until(
            lambda: report.election.can_take and not report.is_coordinator, "it has stopped"
        )
        assert calls == [*begun, ("on_stop", False)] * number
        report.stand()
    await entered.wait()
    leaving = asyncio.ensure_future(membership.leave())
    await until(leaving.done, "it leaves")
    assert calls == [*begun, ("on_stop", False)] * 3


async def test_a_wait_for_a_change_leaves_nothing_behind() -> None:
    """However it ends: by a change, by its timeout, or because it is cancelled."""
    async with await Membership.join("memory://", worker_timeout=60.0) as membership:
        waits = [asyncio.ensure_future(membership.change()) for _ in range(3)]
        await until(lambda: len(membership._waiters) == 3)
        waits[0].cancel()
        await asyncio.wait(waits[:1])
        membership.wake_waiters()
        await asyncio.gather(*waits[1:])
        await membership.change(0.0)
        assert membership._waiters == {}


async def test_no_role_is_taken_before_its_last_term_is_wound_up() -> None:
    """From the first hook to the end of the last one, however often it leads."""
    calls: list[tuple[str, bool]] = []

    def note(name: str) -> Any:
        async def call(_: Term) -> None:
            calls.append((name, report.election.can_take))

        return call

    async with await Membership.join("memory://", worker_timeout=60.0) as membership:
        hooks = Hooks(on_become=note("become"), on_stop=note("stop"))
        report = await membership.coordinate("report", hooks)
        for number in range(1, 3):
            await until(lambda number=number: len(calls) == 2 * number - 1)  # type: ignore[misc]
            report.withhold("a wrong clock")
            await until(lambda: report.election.can_take)
            assert calls == [("become", False), ("stop", False)] * number
            report.stand()


async def test_a_fenced_term_steps_down_for_the_highest_epoch_that_it_has_met() -> None:
    """Whichever record was read first: a lower one would be refused again."""
    async with await Membership.join("memory://", worker_timeout=60.0) as membership:
        held = HeldTerm(3, "w.a", 0, Mono(0))
        election: Any = SimpleNamespace(name="default/report", held_term=held)
        told: list[tuple[str, int, int]] = []

        async def step_down(*what: Any) -> None:
            told.append(what)
            election.held_term = None

        membership.step_down = cast("Any", step_down)  # type: ignore[method-assign]
        coordinator = Coordinator(membership, election, Hooks(), membership.settings, ())
        membership.publish(number=1)
        waiting = asyncio.ensure_future(coordinator._wait_until_over(held, [5, 9, 7]))
        await until(lambda: bool(told))
        membership.wake_waiters()
        await waiting
        assert told == [("default/report", 3, 9)]


async def test_what_is_watched_for_one_purpose_is_not_lost_by_another() -> None:
    """Each purpose replaces its own sessions, and only those; one without any leaves nothing."""
    async with await Membership.join("memory://", **QUICK) as membership:
        watched: dict[str, set[str]] = {}
        for purpose, names in (
            ("a", "xy"),
            ("b", "yz"),
            ("a", "x"),
            ("c", ""),
            ("b", ""),
            ("a", ""),
        ):
            watched[purpose] = set(names)
            membership.watch(purpose, names)
            assert {each: set(membership.watched(each)) for each in watched} == watched
            assert membership._member.watched == frozenset().union(*watched.values())
        assert membership._watched == {}


async def test_a_membership_coordinates_a_work_once() -> None:
    """A second candidacy for the same work is refused."""
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
def test_invalid_options_are_refused(options: dict[str, float], message: str) -> None:
    """The error names the option, the value and the fix."""
    with pytest.raises(Invalid, match=message):
        CoordinatorSettings(**options)  # type: ignore[arg-type]


async def test_an_unknown_option_is_refused() -> None:
    """The error suggests the nearest option."""
    with pytest.raises(Invalid, match="Did you mean heartbeat_interval"):
        await Membership.join("memory://", hartbeat_interval=1)


async def test_an_ill_formed_singleton_is_refused_at_once() -> None:
    """A malformed key raises for the caller, and does not end the session."""
    membership = await Membership.join("memory://", **QUICK)
    with pytest.raises(Invalid, match="empty segment"):
        await membership.coordinate("report", governs=["single//count"])
    report = await membership.coordinate("report")
    assert await report.ensure_coordinator() == membership.worker_id
    await membership.leave()


class Stalling(StoreDecorator):
    """Blocks its thread in one write, like code that holds the GIL."""

    def __init__(self, inner: Store, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        seconds, self._seconds = self._seconds, 0.0
        time.sleep(seconds)  # noqa: ASYNC251 - the fault itself
        return await super().write(changes)


async def test_a_thread_that_blocks_during_a_heartbeat_warns_too() -> None:
    """Starvation that begins during a heartbeat is reported, like one between two."""
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


class BreakingStore(StoreDecorator):
    """A store that fails with a bug on demand."""

    is_broken = False

    async def get_many(self, keys: Sequence[str], *, tombstones: bool = False) -> list[Any]:
        if self.is_broken:
            raise ZeroDivisionError("a bug")
        return await super().get_many(keys, tombstones=tombstones)


@pytest.mark.parametrize("end", ["leaves", "fails"])
async def test_a_wait_for_a_coordinator_ends_with_the_session(end: str) -> None:
    """Nobody waits forever for a leader after the session has ended."""
    store = BreakingStore(MemoryStore())
    # A long cold start: nobody leads meanwhile.
    slow = CoordinatorSettings(cold_start_observation_window=600, **QUICK)
    membership = Membership(
        store, Components.system(), slow, open_own=lambda: _return(store), host=OwnThread()
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


async def _return(store: Store) -> Store:
    return store


async def join_store(
    store: Store, own: Callable[[Store], Store] = lambda store: store, **options: Any
) -> Membership:
    """Return a membership in an open store; its session's thread uses `own` of it."""

    async def open_own() -> Store:
        return own(store)

    settings = CoordinatorSettings(**{**QUICK, **options})
    membership = Membership(
        store, Components.system(), settings, open_own=open_own, host=OwnThread()
    )
    await membership.start()
    return membership


async def test_who_has_just_become_a_candidate_can_ask_to_lead() -> None:
    """Others see its candidacy with its next heartbeat; the request waits for that."""
    name = "a-new-candidate"
    first = await join_store(MemoryStore(name), min_epoch_duration=0.0, worker_timeout=60.0)
    report = await first.coordinate("report")
    await report.ensure_coordinator()
    slow = Slow(MemoryStore(name))
    slow.allowed.set()
    second = await join_store(MemoryStore(name), lambda _: slow, worker_timeout=60.0)
    slow.allowed.clear()
    heir = await second.coordinate("report")
    asking = asyncio.ensure_future(
        heir.ensure_coordinator(force=True, desired_coordinator=second.worker_id)
    )
    # This one, or the one before: its thread may have sent that before it was told to wait.
    await until(lambda: slow.waiting, "a heartbeat is under way")
    await asyncio.wait([asking], timeout=0.05)
    slow.allowed.set()
    assert await asking == first.worker_id
    await until(lambda: heir.is_coordinator, "it leads")
    await second.leave()
    await first.leave()


class Asked(StoreDecorator):
    """A store in which others ask a holder to hand over, just before this one does."""

    def __init__(self, inner: Store, requests: Sequence[HandoverRequest]) -> None:
        super().__init__(inner)
        self.requests = list(requests)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if changes[0].key.startswith(REQUESTS) and self.requests:
            assert await request_handover(self.inner, "default/report", self.requests.pop(0))
        return await super().write(changes)


@pytest.mark.parametrize("desired", [["c"], ["c", "d", "e"], [None], ["b"], ["c", "b"]], ids=str)
async def test_of_several_forced_requests_at_once_the_last_counts(
    desired: list[str | None],
) -> None:
    """None of their callers is told that the outcome is unknown: it is known."""
    inner = MemoryStore()
    async with await join_store(inner, min_epoch_duration=60.0) as first:
        report = await first.coordinate("report")
        await report.ensure_coordinator()
        assert report.election.role is not None
        epoch = report.election.role.epoch
        store = Asked(
            inner,
            [HandoverRequest(epoch=epoch, by="c", desired=each, forced=True) for each in desired],
        )
        async with await join_store(store, lambda _: inner) as second:
            heir = await second.coordinate("report")
            own = second.worker_id
            former = await heir.ensure_coordinator(force=True, desired_coordinator=own)
            assert former == first.worker_id
            request = read_request(await inner.get(f"{REQUESTS}default/report"), epoch)
            assert request is not None
            assert (request.desired, request.forced) == (own, True)


async def test_a_process_that_works_alone_sleeps_during_an_outage() -> None:
    """Its term does not depend on its session, so the end of trust is nothing to wait for."""
    async with await Membership.join("memory://", enable_coordinator=False, **QUICK) as membership:
        alone = await membership.coordinate("report")
        membership._member.session._trusted_until = None
        assert membership.trust_left == 0.0
        waits = []
        change = membership.change

        async def count(timeout: float | None = None) -> None:
            waits.append(timeout)
            await change(timeout)

        membership.change = count  # type: ignore[method-assign]
        membership.wake_waiters()
        await until(lambda: waits)
        assert waits == [None]
        assert alone.is_coordinator


async def test_stopping_again_does_not_end_a_later_candidacy() -> None:
    """A stopped coordinator cannot harm its successor."""
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


async def test_a_hook_that_stops_its_coordinator_runs_to_its_end() -> None:
    """It is not cancelled and not called again, and `on_stop` comes after it."""
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
    """A store whose writes wait until they are allowed."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requested, self.allowed = threading.Event(), threading.Event()
        self.waiting = 0

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.requested.set()
        self.waiting += 1
        await asyncio.to_thread(self.allowed.wait)
        self.waiting -= 1
        return await super().write(changes)


@pytest.mark.parametrize("error", [Unavailable("store", "gone"), asyncio.CancelledError(), OSError])
async def test_a_join_that_fails_closes_the_store_that_it_has_opened(
    error: BaseException | type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it fails; a store that was joined is closed once, by the leave."""
    closed: list[str] = []

    class ClosedStore(MemoryStore):
        async def close(self) -> None:
            closed.append(self.name)

    async def open_one(url: str | None, components: Components) -> Store:
        del url
        return ClosedStore(components=components)

    async def fail(_: Membership) -> None:
        raise error

    monkeypatch.setattr(membership_module, "open_store", open_one)
    with monkeypatch.context() as patch:
        patch.setattr(Membership, "start", fail)
        with pytest.raises(error if isinstance(error, type) else type(error)):
            await Membership.join("memory://", **QUICK)
    assert closed == ["memory://"]
    membership = await Membership.join("memory://", **QUICK)
    before = len(closed)
    await membership.leave()
    assert len(closed) > before


async def test_a_cancelled_join_leaves_no_session() -> None:
    """The record that was being written is ended cleanly; nobody must wait for its timeout."""
    store = Slow(MemoryStore())
    settings = CoordinatorSettings(**QUICK)
    membership = Membership(
        store, Components.system(), settings, open_own=lambda: _return(store), host=OwnThread()
    )
    joining = asyncio.ensure_future(membership.start())
    await asyncio.to_thread(store.requested.wait)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    store.allowed.set()
    await membership.ended()
    (session,) = await store.scan("session/")
    assert session.value["state"] == "dead"


@pytest.mark.parametrize("end", ["returns", "fails"])
def test_a_member_ends_with_the_loop_that_it_was_joined_on(end: str) -> None:
    """A program forgets to leave: nothing is left to do the work, so that another takes it over."""
    url = f"memory://forgotten-{end}"
    others = set(threading.enumerate())

    async def forget_to_leave() -> str:
        membership = await Membership.join(url, skip_cold_start=True, **QUICK)
        report = await membership.coordinate("report")
        await until(lambda: report.is_coordinator, "it leads")
        if end == "fails":
            raise ZeroDivisionError(membership.worker_id)
        return membership.worker_id

    async def follow() -> str:
        async with await Membership.join(url, skip_cold_start=True, **QUICK) as membership:
            report = await membership.coordinate("report")
            await until(lambda: report.is_coordinator, "another leads", timeout=30)
            return membership.worker_id

    try:
        first = asyncio.run(forget_to_leave())
    except ZeroDivisionError as error:
        first = str(error)
    assert asyncio.run(follow()) != first
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
        assert not thread.is_alive()


async def test_a_call_cut_short_by_the_end_of_the_thread_is_unavailable() -> None:
    """It is not cancelled: nobody has cancelled the caller."""
    for _ in range(20):
        # Both run on the thread's own loop.
        host, ending = OwnThread(), asyncio.Event()

        async def wait_for_end(ending: asyncio.Event = ending) -> None:
            await ending.wait()

        async def end(ending: asyncio.Event = ending) -> None:
            ending.set()
            await asyncio.Event().wait()

        host.start(wait_for_end)
        with pytest.raises(Unavailable, match="the session is unavailable: it has ended"):
            await host.call(end)
