"""What is reported of messages: events with their fields, counters, and the user's functions."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from hostile import HOSTILE, build_object, contain
from waiting import until

from jobsync.core.messages import (
    REVOKED,
    Cancel,
    Completed,
    Failed,
    HandlerVerdict,
    Returned,
    Snooze,
)
from jobsync.events import Event, HandlerFailed
from jobsync.queue import events
from jobsync.queue import reporter as reporter_module
from jobsync.queue.backend import EndedClaim, Message, Receipt
from jobsync.queue.in_flight import Delivery
from jobsync.queue.progress import ProgressWriter
from jobsync.queue.reporter import QueueReporter, ReportingQueue


def build_message(attempt: int) -> Message:
    """Return an attempt of a message that has two."""
    return Message(
        receipt=Receipt("id-1", attempt, "claim-1"),
        value={"id": "id-1"},
        attempt=attempt,
        max_attempts=2,
        timeout=None,
        is_suspect=False,
        enqueued=0.0,
    )


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize(
    ("verdict", "attempt", "counted", "callback"),
    [
        (Completed({"n": 1}), 1, "completed", ("complete", {"n": 1})),
        (Failed("no"), 1, "retried", ("error", "no")),
        (Failed("no", ValueError("mine")), 2, "dead", ("error", "mine")),
        (Cancel("stale"), 1, "cancelled", None),
        (Returned(), 1, "returned", None),
        (Snooze(5), 2, "returned", None),
        ("lost", 1, "lost", None),
    ],
)
async def test_the_end_of_a_claim_is_counted_and_ends_its_progress(
    verdict: Any, attempt: int, counted: str, callback: Any, *, is_used: bool
) -> None:
    """However it ends; the user's function gets the result, or the error."""
    called: list[Any] = []
    ended: list[str] = []
    queue = SimpleNamespace(
        queue="mails", emit=lambda _: None, events=SimpleNamespace(has_listener=lambda _: False)
    )
    progress = SimpleNamespace(is_used=is_used, end=ended.append)
    reporter = QueueReporter(
        cast("ReportingQueue", queue),
        lambda _, result: called.append(("complete", result)),
        lambda error, _: called.append(("error", str(error))),
        None,
        cast("ProgressWriter", progress),
    )
    message = build_message(attempt)
    if verdict == "lost":
        reporter.on_lost(message, "its claim has ended")
    else:
        delivery = Delivery("id-1", message, {"id": "id-1"}, "me", cast("Any", 0.0))
        running = reporter.on_settled(delivery, verdict, 0.0)
        assert (running is None) == (callback is None)
        if running is not None:
            await running
    reporter.close()
    assert reporter.counters == {counted: 1}
    assert called == ([] if callback is None else [callback])
    assert ended == (["id-1"] if is_used else [])


LEVELS: dict[int, list[type[Event]]] = {
    logging.ERROR: [events.MessageDead, events.MessageBuried, events.DelaysVetoed],
    logging.WARNING: [
        events.MessageRetried,
        events.MessageLost,
        events.ResultDropped,
        events.HandlerOverran,
        events.NewerMessages,
        events.CronUnscheduled,
        events.TaskUnknown,
        events.QueueError,
    ],
    logging.INFO: [events.MessageRecovered],
}


def test_what_somebody_should_look_at_is_logged_as_a_problem() -> None:
    """A dead letter as an error, and each failed attempt once; nothing else is."""
    kinds = {
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind.__name__[0] != "_"
    } - {Event}
    shown = {kind: level for level, kinds in LEVELS.items() for kind in kinds}
    assert {kind: kind.level for kind in kinds} == {
        kind: shown.get(kind, logging.DEBUG) for kind in kinds
    }
    assert kinds >= {*shown, events.AttemptError}


def test_events_of_a_queue_have_the_names_of_the_documents_too() -> None:
    """Those of a queue on S3, and what ends in the same way is heard by the same name."""
    for kind in vars(events).values():
        if isinstance(kind, type) and issubclass(kind, Event) and hasattr(kind, "name"):
            other = kind.name.replace("plg:queue:", "plg:s3-queue:")
            assert other in kind.aliases
    assert events.MessageBuried.name == events.MessageRecovered.name
    assert events.AttemptError.name == events.QueueError.name
    assert "plg:queue:message:complete" in events.MessageCompleted.aliases


class Notes:
    """A reporter to which somebody listens, and what it has emitted and stored."""

    def __init__(
        self,
        on_complete: Callable[..., Any] | None = None,
        on_error: Callable[..., Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.emitted: list[Event] = []
        self.stored: list[Any] = []
        queue = SimpleNamespace(
            queue="mails",
            emit=self.emitted.append,
            events=SimpleNamespace(has_listener=lambda _: True),
        )
        progress = SimpleNamespace(is_used=False, report=lambda *facts: self.stored.append(facts))
        self.reporter = QueueReporter(
            cast("ReportingQueue", queue),
            on_complete,
            on_error,
            timeout,
            cast("ProgressWriter", progress),
        )


def settle(reporter: QueueReporter, attempt: int, verdict: HandlerVerdict, delay: float) -> Any:
    """Report that an attempt, which took 2.5 seconds, was settled."""
    delivery = Delivery("id-1", build_message(attempt), {"id": "id-1"}, "me", cast("Any", 0.0))
    delivery.duration = 2.5
    return reporter.on_settled(delivery, verdict, delay)


ABOUT: dict[str, Any] = {"queue": "mails", "message_id": "id-1", "attempt": 1}
LAST: dict[str, Any] = {**ABOUT, "attempt": 2}


def build_claim(state: Any) -> EndedClaim:
    """Return the claim of another session that was ended."""
    return EndedClaim(id="id-1", state=state, attempt=2, session="s.1")


REPORTS: dict[str, tuple[Callable[[QueueReporter], object], list[Event], dict[str, int]]] = {
    "enqueued": (
        lambda to: to.on_enqueued(["a", "b", "c"]),
        [events.MessagesEnqueued(queue="mails", ids=("a", "b", "c"))],
        {"enqueued": 3},
    ),
    "completed": (
        lambda to: settle(to, 1, Completed({"n": 1}), 0.0),
        [events.MessageCompleted(**ABOUT, duration=2.5)],
        {"completed": 1},
    ),
    "cancelled by its handler": (
        lambda to: settle(to, 1, Cancel("stale"), 0.0),
        [events.MessageCancelled(**ABOUT, reason="stale")],
        {"cancelled": 1},
    ),
    "returned": (
        lambda to: settle(to, 1, Returned(), 0.5),
        [events.MessageReturned(**ABOUT, delay=0.5)],
        {"returned": 1},
    ),
    "snoozed": (
        lambda to: settle(to, 2, Snooze(5), 5.0),
        [events.MessageReturned(**LAST, delay=5.0)],
        {"returned": 1},
    ),
    "retried": (
        lambda to: settle(to, 1, Failed("no: a.py:1", ValueError("no")), 7.0),
        [
            events.MessageRetried(**ABOUT, error="no: a.py:1", delay=7.0),
            events.AttemptError(queue="mails", error="ValueError: no", message_id="id-1"),
        ],
        {"retried": 1},
    ),
    "dead": (
        lambda to: settle(to, 2, Failed("late"), 0.0),
        [
            events.MessageDead(**LAST, error="late"),
            events.AttemptError(queue="mails", error="RuntimeError: late", message_id="id-1"),
        ],
        {"dead": 1},
    ),
    "lost": (
        lambda to: to.on_lost(build_message(1), "its claim has ended"),
        [events.MessageLost(**ABOUT, reason="its claim has ended")],
        {"lost": 1},
    ),
    "ended": (
        lambda to: to.on_ended([build_claim("waiting"), build_claim("dead")]),
        [
            events.MessageRecovered(**LAST, state="waiting"),
            events.MessageBuried(**LAST, state="dead"),
        ],
        {},
    ),
    "overrun": (
        lambda to: to.on_overrun(build_message(1), 7.0),
        [events.HandlerOverran(**ABOUT, timeout=7.0)],
        {},
    ),
    "progress": (
        lambda to: to.on_progress(build_message(1), 0.25, "page 1"),
        [events.MessageProgressed(**ABOUT, progress=0.25, note="page 1")],
        {},
    ),
    "result dropped": (
        lambda to: to.on_result_dropped(build_message(1), "too large"),
        [events.ResultDropped(**ABOUT, reason="too large")],
        {},
    ),
    "cancelled from outside": (
        lambda to: to.on_cancelled(build_claim("cancelled")),
        [events.MessageCancelled(**LAST, reason=REVOKED)],
        {"cancelled": 1},
    ),
    "newer": (
        lambda to: to.on_newer(3, 9),
        [events.NewerMessages(queue="mails", count=3, format=9)],
        {},
    ),
    "failure": (
        lambda to: to.on_failure(ValueError("no")),
        [events.QueueError(queue="mails", error="ValueError: no", message_id=None)],
        {},
    ),
    "failure with a message": (
        lambda to: to.on_failure(ValueError("no"), "id-1"),
        [events.QueueError(queue="mails", error="ValueError: no", message_id="id-1")],
        {},
    ),
}
"""What is reported, the events that tell it, and what is counted."""


@pytest.mark.parametrize("name", REPORTS)
def test_what_happens_is_told_in_events_with_all_their_fields(name: str) -> None:
    """In this order, each once; counters count messages."""
    report, told, counted = REPORTS[name]
    notes = Notes()
    report(notes.reporter)
    assert notes.emitted == told
    assert [type(each) for each in notes.emitted] == [type(each) for each in told]
    assert notes.reporter.counters == counted
    assert notes.stored == (
        [(build_message(1).receipt, 0.25, "page 1")] if name == "progress" else []
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_reason_that_cannot_be_shown_is_told_all_the_same(name: str) -> None:
    """By a short text, whatever its own methods do."""
    with contain():
        notes = Notes()
        settle(notes.reporter, 1, Cancel(build_object(name)), 0.0)
        (told,) = notes.emitted
        assert isinstance(told, events.MessageCancelled)
        assert type(told.reason) is str
        assert notes.reporter.counters == {"cancelled": 1}


class _Stop(BaseException):
    pass


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), _Stop("no"), TimeoutError()])
@pytest.mark.parametrize("name", ["on_complete", "on_error"])
async def test_an_error_of_the_users_function_is_told_with_its_place(
    name: str, error: BaseException, *, is_async: bool
) -> None:
    """Whatever it raises: it ends neither the worker nor the program."""

    def fail(*_: Any) -> NoReturn:
        raise error

    async def fail_later(*_: Any) -> NoReturn:
        raise error

    function = fail_later if is_async else fail
    notes = Notes(**cast("Any", {name: function}))
    verdict = Completed(None) if name == "on_complete" else Failed("late")
    running = settle(notes.reporter, 1, verdict, 0.0)
    assert running is not None
    await running
    notes.reporter.close()
    told = notes.emitted[-1]
    assert isinstance(told, HandlerFailed)
    assert (told.event, told.callback.rpartition(".")[2]) == (name, function.__name__)
    assert type(error).__name__ in told.error
    assert f"in {function.__name__}" in told.error


async def test_the_users_function_may_take_the_timeout_of_the_queue() -> None:
    """It is cancelled then, and that is told; the end of the worker cancels it silently."""
    seen: list[str] = []

    async def hang(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    notes = Notes(on_complete=hang, timeout=0.01)
    async with asyncio.timeout(30):
        await settle(notes.reporter, 1, Completed(None), 0.0)
    assert seen == ["cancelled"]
    told = notes.emitted[-1]
    assert isinstance(told, HandlerFailed)
    assert told.error.startswith("TimeoutError")
    notes = Notes(on_complete=hang)
    task = asyncio.ensure_future(settle(notes.reporter, 1, Completed(None), 0.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled", "cancelled"]
    assert [type(each) for each in notes.emitted] == [events.MessageCompleted]


@pytest.mark.parametrize("name", ["on_complete", "on_error"])
async def test_the_users_function_gets_what_the_handler_got(name: str) -> None:
    """The message as it was read for the handler, which need not be as it was stored."""
    called: list[tuple[Any, ...]] = []
    notes = Notes(**cast("Any", {name: lambda *given: called.append(given)}))
    delivery = Delivery("id-1", build_message(1), SimpleNamespace(n=1), "me", cast("Any", 0.0))
    error = ValueError("no")
    for verdict in (Completed("done"), Failed("no: a.py:1", error), Cancel("stale"), Returned()):
        running = notes.reporter.on_settled(delivery, verdict, 0.0)
        if running is not None:
            await running
    notes.reporter.close()
    assert called == [
        (delivery.data, "done") if name == "on_complete" else (error, delivery.data),
    ]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", ["on_complete", "on_error"])
async def test_a_keyboard_interrupt_on_the_event_loop_ends_the_program(
    name: str, *, is_async: bool
) -> None:
    """There it is no error of the function; on a thread it can only be one."""

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    async def interrupt_later(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    notes = Notes(**cast("Any", {name: interrupt_later if is_async else interrupt}))
    verdict = Completed(None) if name == "on_complete" else Failed("late")
    running = settle(notes.reporter, 1, verdict, 0.0)
    if is_async:
        with pytest.raises(KeyboardInterrupt):
            running.send(None)
    else:
        await running
    notes.reporter.close()
    told = [type(each) for each in notes.emitted].count(HandlerFailed)
    assert told == (not is_async)


def list_failures(notes: Notes) -> list[str]:
    """Return the errors of callbacks that were reported."""
    return [each.error for each in notes.emitted if isinstance(each, HandlerFailed)]


async def test_a_plain_callback_runs_on_a_thread_for_its_timeout() -> None:
    """What it returns is awaited in the same time. One that runs on is listed, and not awaited."""
    may_end, loop = threading.Event(), threading.current_thread()
    threads: list[threading.Thread] = []
    returned: list[Coroutine[Any, Any, None]] = []
    together = threading.Barrier(10, timeout=60)

    def complete(_: Any, result: Any) -> Any:
        threads.append(threading.current_thread())
        if result == "blocks":
            together.wait()
            assert may_end.wait(60)
            returned.append(asyncio.sleep(0))
            return returned[-1]
        return asyncio.Event().wait() if result == "awaits" else None

    notes = Notes(on_complete=complete, timeout=0.5)
    blocked = [
        asyncio.ensure_future(settle(notes.reporter, 1, Completed("blocks"), 0.0))
        for _ in range(10)
    ]
    await until(lambda: len(threads) == 10, "ten run")
    # More than ten wait, but not for late ones.
    await settle(notes.reporter, 1, Completed("awaits"), 0.0)
    notes.reporter._timeout = None
    await settle(notes.reporter, 1, Completed("ends"), 0.0)
    told = list_failures(notes)
    assert len(told) == 11
    assert all(each.startswith("TimeoutError") for each in told)
    is_done = [task.done() for task in blocked]
    runs_functions = notes.reporter.runs_functions
    may_end.set()
    await until(lambda: not notes.reporter.runs_functions, "they have returned")
    states = {inspect.CORO_CLOSED}
    await until(lambda: set(map(inspect.getcoroutinestate, returned)) == states, "all is closed")
    notes.reporter.close()
    assert is_done == [True] * 10
    assert runs_functions
    assert len(returned) == 10
    assert loop not in threads


def test_a_plain_callback_that_outlives_its_event_loop_is_forgotten_when_it_returns() -> None:
    """Until then it is listed; in the next loop nothing is left of it."""
    begun, may_end = threading.Event(), threading.Event()

    def complete(*_: Any) -> None:
        begun.set()
        assert may_end.wait(60)

    notes = Notes(on_complete=complete)

    async def leave_it() -> None:
        task = asyncio.ensure_future(settle(notes.reporter, 1, Completed(None), 0.0))
        await until(begun.is_set, "it runs")
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave_it())
    notes.reporter.close()
    runs_functions = notes.reporter.runs_functions
    may_end.set()
    asyncio.run(until(lambda: not notes.reporter.runs_functions, "it is forgotten"))
    assert runs_functions


async def test_a_plain_callback_for_which_no_thread_can_be_started_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is told, and a thread that is started later does not call it."""
    called: list[str] = []
    notes = Notes(on_complete=lambda _, result: called.append(result))

    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        await settle(notes.reporter, 1, Completed("first"), 0.0)
    (told,) = list_failures(notes)
    assert told.startswith("RuntimeError: can't start new thread")
    assert not notes.reporter.runs_functions
    await settle(notes.reporter, 1, Completed("second"), 0.0)
    notes.reporter.close()
    assert called == ["second"]
    assert len(list_failures(notes)) == 1


async def test_a_plain_callback_that_another_thread_has_begun_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although none could be started for it: one has become idle just then."""
    begun = threading.Event()

    class Refusing(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> NoReturn:
            super().submit(*arguments, **options)
            assert begun.wait(60)
            raise RuntimeError("can't start new thread")

    def fail(*_: Any) -> NoReturn:
        begun.set()
        raise ValueError("mine")

    monkeypatch.setattr(reporter_module, "ThreadPoolExecutor", Refusing)
    notes = Notes(on_complete=fail)
    await settle(notes.reporter, 1, Completed(None), 0.0)
    notes.reporter.close()
    (told,) = list_failures(notes)
    assert told.startswith("ValueError: mine")
    assert not notes.reporter.runs_functions


async def test_a_plain_callback_begins_in_time_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is limited: that of those which nobody waits for, too."""
    monkeypatch.setattr(reporter_module, "_MOST_THREADS", 1)
    may_end = threading.Event()
    called: list[str] = []

    def complete(_: Any, result: str) -> None:
        called.append(result)
        if result == "blocks":
            assert may_end.wait(60)

    notes = Notes(on_complete=complete, timeout=0.5)
    for result in ("blocks", "late"):
        await settle(notes.reporter, 1, Completed(result), 0.0)
    cancelled = asyncio.ensure_future(settle(notes.reporter, 1, Completed("cancelled"), 0.0))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    may_end.set()
    await until(lambda: not notes.reporter.runs_functions, "it has returned")
    await settle(notes.reporter, 1, Completed("in time"), 0.0)
    notes.reporter.close()
    assert called == ["blocks", "in time"]
    assert [each.partition("\n")[0] for each in list_failures(notes)] == ["TimeoutError"] * 2


@pytest.mark.parametrize(
    "heard", sorted({type(each) for _, told, _ in REPORTS.values() for each in told}, key=str)
)
def test_events_that_nobody_hears_are_not_made(heard: Any) -> None:
    """There may be very many; rare ones are always told."""
    emitted: list[Event] = []
    queue = SimpleNamespace(
        queue="mails",
        emit=emitted.append,
        events=SimpleNamespace(has_listener=lambda kind: kind is heard),
    )
    progress = SimpleNamespace(is_used=False, report=lambda *_: None)
    for report, told, _ in REPORTS.values():
        emitted.clear()
        build = cast("Any", QueueReporter)
        report(build(queue, None, None, None, progress))
        rare = {events.NewerMessages, events.QueueError, events.AttemptError}
        assert emitted == [each for each in told if type(each) is heard or type(each) in rare]
