"""Every registration receives each event once, in order, whatever other listeners do."""

import asyncio
import logging
import pickle
import re
import threading
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

from jobsync import events as events_module
from jobsync.errors import Invalid
from jobsync.events import Event, Events, HandlerFailed, known_events


class Elected(Event, frozen=True, kw_only=True):
    """An event with fields."""

    name = "test:coord:elected"
    level = logging.INFO

    worker_id: str
    epoch: int = 0


class Started(Event, frozen=True, kw_only=True):
    """An event with aliases, in another family."""

    name = "test:s3-queue:started"
    aliases = ("test:queue:started", "testStarted")


class Lost(Event, frozen=True, kw_only=True):
    """An event that is always logged."""

    name = "test:coord:lost"
    level = logging.WARNING

    reason: Any = None


ELECTED = Elected(worker_id="w-1", epoch=41)


@pytest.fixture
def events() -> Events:
    """Events without a host."""
    return Events()


@pytest.fixture
def failures(events: Events) -> list[HandlerFailed]:
    """The failures of listeners, as they are emitted."""
    failures: list[HandlerFailed] = []
    events.on("jobsync:handler-failed", failures.append)
    return failures


def _raise(error: BaseException) -> Callable[[Event], None]:
    def fail(_: Event) -> None:
        raise error

    return fail


def _define(kind: str, **body: Any) -> Any:
    return types.new_class(
        kind, (Event,), exec_body=lambda space: space.update(body, __module__=__name__)
    )


# Payloads


def test_a_payload_reads_both_ways() -> None:
    """A field is an attribute and an item; the name is the canonical one."""
    assert (ELECTED.worker_id, ELECTED["worker_id"], ELECTED["epoch"]) == ("w-1", "w-1", 41)
    assert ELECTED.name == "test:coord:elected"
    assert "epoch" in ELECTED
    assert "epok" not in ELECTED


@pytest.mark.parametrize(
    ("event", "field", "words"),
    [
        (
            ELECTED,
            "workerId",
            "test:coord:elected has no field 'workerId'. Did you mean worker_id?",
        ),
        (ELECTED, "zzz", "test:coord:elected has no field 'zzz'. Known: worker_id, epoch."),
        (ELECTED, 0, "test:coord:elected has no field 0. Known: worker_id, epoch."),
        (Started(), "x", "test:s3-queue:started has no field 'x'. Known: no fields."),
    ],
)
def test_an_unknown_field_is_a_key_error(event: Event, field: Any, words: str) -> None:
    """A mistyped item gets the nearest field as a hint, or all fields."""
    with pytest.raises(KeyError, match=re.escape(words)):
        event[field]


def test_a_name_is_not_a_field() -> None:
    """Attributes of the kind are not part of the payload."""
    with pytest.raises(KeyError):
        ELECTED["name"]
    assert "level" not in ELECTED


def test_a_payload_cannot_be_changed() -> None:
    """A listener cannot change the event for the next one."""
    event: Any = ELECTED
    with pytest.raises(AttributeError):
        event.epoch = 42


def test_a_payload_survives_a_pickle() -> None:
    """An event survives pickling."""
    assert pickle.loads(pickle.dumps(ELECTED)) == ELECTED


# Kinds


def test_every_kind_is_known_by_its_own_name() -> None:
    """The registry lists kinds by canonical names, sorted, without aliases."""
    known = known_events()
    assert known["test:s3-queue:started"] is Started
    assert known["jobsync:handler-failed"] is HandlerFailed
    assert "test:queue:started" not in known
    assert list(known) == sorted(known)


@pytest.mark.parametrize(
    ("name", "aliases", "taken"),
    [
        ("test:coord:elected", (), "test:coord:elected"),
        ("test:queue:started", (), "test:queue:started"),
        ("test:new", ("test:coord:lost",), "test:coord:lost"),
        ("test:new", ("test:newer", "testStarted"), "testStarted"),
    ],
)
def test_a_name_belongs_to_one_kind(name: str, aliases: tuple[str, ...], taken: str) -> None:
    """A second kind with the same name or alias is refused, and is not registered."""
    before = known_events()
    with pytest.raises(
        Invalid, match=r"must not have the event name of .*\.(Elected|Started|Lost)"
    ) as caught:
        _define("Thief", name=name, aliases=aliases)
    assert caught.value.value == taken
    assert known_events() == before
    with pytest.raises(Invalid):
        Events().on("test:newer", print)


@pytest.mark.parametrize("name", ["", "test:*", "two words", "test:", ":test", 7])
def test_an_ill_formed_name_is_refused(name: Any) -> None:
    """A name that reads as a family, or is empty, is refused."""
    with pytest.raises(Invalid, match="must have a well-formed event name"):
        _define("Odd", name=name)


def test_a_field_cannot_hide_the_name() -> None:
    """A payload field called `name` is refused when the class is defined."""
    with pytest.raises(Invalid, match="must have a well-formed event name"):
        _define("Hidden", __annotations__={"name": str})


def test_a_reloaded_kind_replaces_itself() -> None:
    """A class that is defined again keeps its names, and loses those that it dropped."""
    old = _define("Reloaded", name="test:reloaded", aliases=("test:old-alias",))
    new = _define("Reloaded", name="test:reloaded", aliases=("test:new-alias",))
    assert known_events()["test:reloaded"] is new
    events, received = Events(), list[Event]()
    with pytest.raises(Invalid):
        events.on("test:old-alias", received.append)
    events.on("test:reloaded", received.append)
    events.emit(old())
    assert len(received) == 1


def test_a_kind_without_a_name_goes_by_its_parents() -> None:
    """A refined event reaches the listeners of its parent."""

    class ElectedHere(Elected, frozen=True, kw_only=True):
        host: str

    events, received = Events(), list[Event]()
    events.on("test:coord:elected", received.append)
    events.emit(ElectedHere(worker_id="w", host="h"))
    assert [event["host"] for event in received] == ["h"]
    assert known_events()["test:coord:elected"] is Elected


# Listening


@pytest.mark.parametrize(
    "name",
    [
        "test:s3-queue:started",
        "test:queue:started",
        "testStarted",
        "test:s3-queue:*",
        "test:queue:*",
        "test:*",
        "*",
    ],
)
def test_an_event_is_received_under_each_of_its_names(events: Events, name: str) -> None:
    """A listener on its name, alias or family receives it once, and no other event."""
    received: list[Event] = []
    assert events.on(name, received.append) is not None
    events.emit(Started())
    assert received == [Started()]


@pytest.mark.parametrize(
    "name", ["test:coord:lost", "test:s3-queue:*", "test:coord:l*", "test:coord:elected:*"]
)
def test_other_events_are_not_received(events: Events, name: str) -> None:
    """A listener receives only the events that it registered for."""
    received: list[Event] = []
    events.on(name, received.append)
    events.emit(ELECTED)
    assert received == []


def test_each_registration_is_called(events: Events) -> None:
    """A callback that is registered three times is called three times."""
    received: list[Event] = []
    for name in ("test:s3-queue:started", "test:queue:started", "test:s3-queue:started"):
        events.on(name, received.append)
    events.emit(Started())
    assert len(received) == 3


def test_listeners_are_called_in_order(events: Events) -> None:
    """The order is that of registration, across names and families."""
    received: list[int] = []
    names = ["*", "test:coord:elected", "test:coord:*", "test:coord:elected", "test:*"]
    for place, name in enumerate(names):
        events.on(name, lambda _, place=place: received.append(place))
    events.emit(ELECTED)
    assert received == [0, 1, 2, 3, 4]


def test_on_and_once_decorate(events: Events) -> None:
    """Both decorate a function, and return it unchanged."""
    received: list[str] = []

    @events.on("test:coord:elected")
    def always(event: Elected) -> None:
        received.append(f"always {event.worker_id}")

    @events.once("test:coord:elected")
    def first(event: Elected) -> None:
        received.append(f"first {event.worker_id}")

    events.emit(ELECTED)
    events.emit(ELECTED)
    assert received == ["always w-1", "first w-1", "always w-1"]
    assert events.off("test:coord:elected", always)
    assert first.__name__ == "first"


def test_on_gives_the_callback_back(events: Events) -> None:
    """`on` returns the callback, for `off`."""
    callback = _raise(ValueError())
    assert events.on("*", callback) is callback
    assert events.once("*", callback) is callback


def test_once_is_over_before_it_runs(events: Events) -> None:
    """A `once` callback that emits the same event is not called again."""
    received: list[Event] = []

    def again(event: Event) -> None:
        received.append(event)
        events.emit(event)

    events.once("test:coord:*", again)
    events.emit(ELECTED)
    assert received == [ELECTED]


@pytest.mark.parametrize("once", [False, True])
def test_off_ends_a_registration(events: Events, once: bool) -> None:
    """`off` returns whether there was a registration; the second time there is none."""
    received: list[Event] = []
    (events.once if once else events.on)("test:queue:started", received.append)
    assert not events.off("test:s3-queue:started", received.append)
    assert not events.off("test:queue:started", print)
    assert events.off("test:queue:started", received.append)
    assert not events.off("test:queue:started", received.append)
    events.emit(Started())
    assert received == []


def test_off_ends_every_registration_of_that_name(events: Events) -> None:
    """A callback that was registered twice under one name is gone after one `off`."""
    received: list[Event] = []
    events.on("*", received.append)
    events.on("*", received.append)
    assert events.off("*", received.append)
    events.emit(ELECTED)
    assert received == []


@pytest.mark.parametrize("once", [False, True])
def test_off_during_an_emit_holds_at_once(events: Events, once: bool) -> None:
    """A listener that an earlier one removed is not called."""
    received: list[Event] = []
    events.on("*", lambda _: events.off("*", received.append))
    (events.once if once else events.on)("*", received.append)
    events.emit(ELECTED)
    assert received == []


@pytest.mark.parametrize("name", ["test:coord:lost", "test:s3-queue:started", "testStarted", "*"])
def test_whoever_listens_is_known_at_once(
    events: Events, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`has_listener` follows every registration, here and in the parent."""
    monkeypatch.setattr(logging.getLogger("jobsync"), "disabled", True)
    kind = Lost if name == "test:coord:lost" else Started
    parent = Events()
    events.join(parent)
    received: list[Event] = []
    for place in (events, parent):
        assert not events.has_listener(kind)
        place.on(name, received.append)
        assert events.has_listener(kind)
        events.emit(kind())
        place.off(name, received.append)
        assert not events.has_listener(kind)
        events.emit(kind())
        place.once(name, received.append)
        assert events.has_listener(kind)
        events.emit(kind())
    assert len(received) == 4
    assert not events.has_listener(kind)


def test_a_log_counts_as_a_listener(events: Events) -> None:
    """An event that is logged is built, even without a listener."""
    logger = logging.getLogger("jobsync")
    level = logger.level
    try:
        logger.setLevel(logging.WARNING)
        assert events.has_listener(Lost)
        assert not events.has_listener(Started)
    finally:
        logger.setLevel(level)


def test_on_during_a_lookup_counts_from_the_next_emit(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread registers while the listeners of a kind are looked up for the first time."""
    received: list[Event] = []
    wants = events_module._Listener.wants
    waiting = [received.append]

    def register_first(self: Any, kind: type[Event]) -> bool:
        if waiting:
            events.on("*", waiting.pop())
        return wants(self, kind)

    monkeypatch.setattr(events_module._Listener, "wants", register_first)
    events.on("*", lambda _: None)
    for number in range(3):
        events.emit(ELECTED)
        assert received == [ELECTED] * number


def test_on_during_an_emit_waits_for_the_next(events: Events) -> None:
    """A listener that an earlier one added receives the next event, not this one."""
    received: list[Event] = []
    events.once("*", lambda _: events.on("*", received.append))
    events.emit(ELECTED)
    assert received == []
    events.emit(Started())
    assert received == [Started()]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("test:coord:electd", "did you mean 'test:coord:elected'?"),
        ("test:queue:start", "did you mean 'test:queue:started'?"),
        ("0", "call known_events() for all names"),
        ("", "call known_events() for all names"),
        ("test:*:elected*", ""),
        ("**", ""),
    ],
)
def test_an_unknown_name_is_refused(events: Events, name: str, fix: str) -> None:
    """A mistyped name is an error in every method, also before a function is decorated."""
    for call in (events.on, events.once, events.off):
        with pytest.raises(Invalid, match="must be a known event") as caught:
            call(name, print)
        assert caught.value.value == name
        assert fix in caught.value.fix
    with pytest.raises(Invalid):
        events.on(name)


def test_a_decorator_without_a_name_is_refused(events: Events) -> None:
    """`@events.on` without parentheses does not swallow the function."""
    on: Any = events.on
    with pytest.raises(Invalid, match="must be a known event"):
        on(_raise(ValueError()))


def test_a_callback_must_be_callable(events: Events) -> None:
    """A value that cannot be called is refused at registration."""
    callback: Any = "print"
    with pytest.raises(Invalid, match="must be callable"):
        events.on("*", callback)


def test_a_generator_is_refused(events: Events) -> None:
    """Calling it would run nothing."""

    def generate(_: Event) -> Iterator[None]:
        yield

    async def generate_later(_: Event) -> AsyncIterator[None]:
        yield

    for callback in (generate, generate_later):
        with pytest.raises(Invalid, match=r"is a generator, which nobody runs .*without yield"):
            events.on("*", callback)


def test_a_family_may_be_empty_yet(events: Events) -> None:
    """A family may be registered before any of its events is known."""
    events.on("test:nothing-here:*", print)


# Failures


def test_a_failing_listener_stops_no_other(events: Events, failures: list[HandlerFailed]) -> None:
    """The others receive the event, and the failure becomes an event of its own."""
    received: list[Event] = []
    callback = _raise(ValueError("no room"))
    events.on("test:coord:*", callback)
    events.on("test:coord:*", received.append)
    events.emit(ELECTED)
    assert received == [ELECTED]
    (failure,) = failures
    assert failure.event == "test:coord:elected"
    assert failure.callback.endswith("test_events._raise.<locals>.fail")
    assert failure.error == "ValueError: no room"
    assert failure.level == logging.ERROR


def test_a_callback_without_a_name_is_named_by_its_type(
    events: Events, failures: list[HandlerFailed]
) -> None:
    """A partial that fails is reported too."""
    events.on("test:*", partial(_raise(ValueError("x"))))
    events.emit(ELECTED)
    assert [failure.callback for failure in failures] == ["functools.partial"]


def test_a_listener_of_failures_that_fails_is_only_logged(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure while handling a failure is not emitted: there is no loop."""
    calls: list[str] = []

    def fail(event: Event) -> None:
        calls.append(event.name)
        raise ValueError(event.name)

    events.on("*", fail)
    events.emit(ELECTED)
    assert calls == ["test:coord:elected", "jobsync:handler-failed"]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [re.findall(r" event=(\S+)", line) for line in errors] == [
        ["test:coord:elected"],
        ["jobsync:handler-failed"],
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_exit_passes_through(
    events: Events, failures: list[HandlerFailed], error: BaseException
) -> None:
    """A callback on the main thread may end the program."""
    events.on("test:*", _raise(error))
    with pytest.raises(type(error)):
        events.emit(ELECTED)
    assert failures == []


# Coroutines


async def test_the_host_runs_coroutines() -> None:
    """An `async def` callback runs on the host, beside plain ones."""
    received: list[str] = []

    async def later(event: Elected) -> None:
        await asyncio.sleep(0)
        received.append(f"later {event.worker_id}")

    async with asyncio.TaskGroup() as group:
        events = Events(group.create_task)
        events.on("test:coord:elected", later)
        events.on("test:coord:elected", lambda _: received.append("now"))
        events.emit(ELECTED)
        assert received == ["now"]
    assert received == ["now", "later w-1"]


async def test_coroutines_wait_for_a_host(events: Events) -> None:
    """Coroutines from before a host are started when it is set, in order, and only once."""
    received: list[str] = []

    async def later(event: Event) -> None:
        received.append(event.name)

    spawned: list[Coroutine[Any, Any, None]] = []
    events.on("test:*", later)
    events.emit(ELECTED)
    events.emit(Started())
    assert received == []
    events.host(spawned.append)
    events.host(spawned.append)
    assert len(spawned) == 2
    for coroutine in spawned:
        await coroutine
    assert received == ["test:coord:elected", "test:s3-queue:started"]


async def test_a_host_can_leave(events: Events) -> None:
    """After a host is removed, coroutines wait for the next one."""
    first: list[Coroutine[Any, Any, None]] = []
    second: list[Coroutine[Any, Any, None]] = []

    async def later(_: Event) -> None:
        pass

    events.on("test:*", later)
    events.host(first.append)
    events.host(None)
    events.emit(ELECTED)
    assert first == []
    events.host(second.append)
    assert len(second) == 1
    await second[0]


async def test_a_failing_coroutine_becomes_an_event(
    events: Events, failures: list[HandlerFailed]
) -> None:
    """An `async def` that raises does not stop its host."""

    async def fail(_: Event) -> None:
        raise ValueError("too late")

    events.on("test:*", fail)
    async with asyncio.TaskGroup() as group:
        events.host(group.create_task)
        events.emit(ELECTED)
    (failure,) = failures
    assert (failure.event, failure.error) == ("test:coord:elected", "ValueError: too late")
    assert failure.callback.endswith(".<locals>.fail")


async def test_a_failing_coroutine_of_failures_ends_there(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """An `async def` listener of everything that always fails is called twice, not for ever."""
    calls: list[str] = []

    async def fail(event: Event) -> None:
        calls.append(event.name)
        raise ValueError

    events.on("*", fail)
    async with asyncio.TaskGroup() as group:
        events.host(group.create_task)
        events.emit(ELECTED)
    assert calls == ["test:coord:elected", "jobsync:handler-failed"]
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 2


async def test_a_coroutine_can_be_cancelled(events: Events, failures: list[HandlerFailed]) -> None:
    """Cancelling a coroutine on the host is not a failure, and is not swallowed."""
    running = asyncio.Event()

    async def forever(_: Event) -> None:
        running.set()
        await asyncio.Event().wait()

    tasks: list[asyncio.Task[None]] = []
    events.host(lambda coroutine: tasks.append(asyncio.ensure_future(coroutine)))
    events.on("test:*", forever)
    events.emit(ELECTED)
    await running.wait()
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert failures == []


async def test_a_part_that_has_a_host_of_its_own_leaves_coroutines_to_the_whole(
    events: Events,
) -> None:
    """Once it has joined: they end with the whole, and not with the part."""
    own: list[Any] = []
    part, tasks = Events(own.append), list[Any]()
    done: list[Event] = []

    async def work(event: Event) -> None:
        done.append(event)

    part.on("test:coord:elected", work)
    part.join(events)
    events.host(lambda coroutine: tasks.append(asyncio.ensure_future(coroutine)))
    part.emit(ELECTED)
    await asyncio.gather(*tasks)
    assert (len(own), done) == (0, [ELECTED])


# The log


class _FailingHandler(logging.Handler):
    """A handler of log records that raises some error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def emit(self, _: logging.LogRecord) -> None:
        raise self._error


def test_a_log_handler_that_fails_is_told_and_hides_no_event(events: Events) -> None:
    """Listeners hear of the event first, and of the failure once, here and in the whole."""
    part, received = Events(), list[Event]()
    part.join(events)
    events.on("*", received.append)
    logger, handler = logging.getLogger("jobsync"), _FailingHandler(OSError("disk full"))
    logger.addHandler(handler)
    try:
        for place in (events, part):
            received.clear()
            place.emit(Lost())
            assert received == [
                Lost(),
                HandlerFailed(event=Lost.name, callback="logging", error="OSError: disk full"),
            ]
    finally:
        logger.removeHandler(handler)


def test_an_exit_in_a_log_handler_ends_the_program(events: Events) -> None:
    """As in any other function of the user's."""
    logger, handler = logging.getLogger("jobsync"), _FailingHandler(SystemExit(3))
    logger.addHandler(handler)
    try:
        with pytest.raises(SystemExit):
            events.emit(Lost())
    finally:
        logger.removeHandler(handler)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "jobsync"]


def test_an_event_is_logged_as_fields(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    """A line has the name and the fields, at the event's level, with or without listeners."""
    caplog.set_level(logging.INFO, "jobsync")
    events.on("*", lambda _: None)
    events.on("*", lambda _: None)
    events.emit(ELECTED)
    assert _lines(caplog) == ["test:coord:elected worker_id=w-1 epoch=41"]
    assert caplog.records[0].levelno == logging.INFO
    # Handlers that want its fields get the event itself.
    assert vars(caplog.records[0])["fact"] is ELECTED


def test_a_quiet_event_is_logged_only_on_demand(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """Below the logger's level nothing is written; warnings are, without any setup."""
    events.emit(ELECTED)
    events.emit(Lost())
    assert _lines(caplog) == ["test:coord:lost reason=None"]
    caplog.set_level(logging.DEBUG, "jobsync")
    events.emit(Started())
    assert _lines(caplog)[1:] == ["test:s3-queue:started"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain-1:2/3", "plain-1:2/3"),
        ("é", "é"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ("line\nbreak", '"line\\nbreak"'),
        ('a"b', '"a\\"b"'),
        ("bell\a", '"bell\\u0007"'),
        (True, "True"),
        (1.5, "1.5"),
        (["a", 1], "\"['a', 1]\""),
        ("x" * 501, "x" * 499 + "…"),
    ],
    ids=repr,
)
def test_a_value_is_one_word(
    events: Events, caplog: pytest.LogCaptureFixture, value: Any, shown: str
) -> None:
    """No value can break the line or look like another field, and long ones are cut."""
    events.emit(Lost(reason=value))
    assert _lines(caplog) == [f"test:coord:lost reason={shown}"]


def test_a_value_that_hides_itself_stays_hidden(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """Text of a derived type is shown by its own repr, never by its content."""

    class Masked(str):
        __slots__ = ()

        def __repr__(self) -> str:
            return "***"

    events.emit(Lost(reason=Masked("hunter2")))
    assert _lines(caplog) == ["test:coord:lost reason=***"]


def test_an_event_is_logged_before_it_is_delivered(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener that ends the process cannot keep the event out of the log."""
    events.on("*", _raise(SystemExit()))
    with pytest.raises(SystemExit):
        events.emit(Lost(reason="gone"))
    assert _lines(caplog) == ["test:coord:lost reason=gone"]


def test_a_failure_is_logged_once_with_its_traceback(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the callback that failed; the traceback shows where."""
    events.on("test:*", _raise(ValueError("no room")))
    events.emit(ELECTED)
    (record,) = caplog.records
    assert record.getMessage().endswith('.<locals>.fail error="ValueError: no room"')
    assert record.exc_info
    assert record.exc_info[0] is ValueError


# Threads


def test_threads_lose_no_registration_and_no_fact(events: Events) -> None:
    """Many threads register, emit and remove at once; nothing is lost and once means once."""
    received: list[str] = []
    only: list[Event] = []
    start = threading.Barrier(8)

    def note(mark: str, event: Elected) -> None:
        if event.worker_id == mark:
            received.append(mark)

    def work(number: int) -> None:
        start.wait()
        for round_ in range(50):
            mark = f"{number}-{round_}"
            callback = events.on("test:coord:elected", partial(note, mark))
            events.emit(Elected(worker_id=mark))
            events.off("test:coord:elected", callback)

    events.once("test:coord:elected", only.append)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(received) == len(set(received)) == 400
    assert len(only) == 1
    assert events._listeners == {}


async def test_a_parts_events_are_also_those_of_the_whole(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """Listeners of a part receive its events only; listeners of the parent receive all, once."""
    caplog.set_level(logging.DEBUG, "jobsync")
    one, two = Events(), Events()
    one.join(events)
    two.join(events)
    received: dict[str, list[Event]] = {"one": [], "two": [], "all": []}
    one.on("test:coord:elected", received["one"].append)
    two.on("test:coord:elected", received["two"].append)
    events.on("test:coord:elected", received["all"].append)
    one.emit(ELECTED)
    assert received == {"one": [ELECTED], "two": [], "all": [ELECTED]}
    assert len(caplog.records) == 1


async def test_what_a_part_calls_is_hosted_above(events: Events) -> None:
    """Coroutines of a part's listeners run on the parent's host, and fail like the parent's."""
    part = Events()
    done: list[Event] = []
    failures: list[HandlerFailed] = []

    async def work(event: Event) -> None:
        done.append(event)
        raise RuntimeError("oops")

    part.on("test:coord:elected", work)
    events.on("jobsync:handler-failed", failures.append)
    part.emit(ELECTED)
    part.join(events)
    part.emit(ELECTED)
    assert done == []
    async with asyncio.TaskGroup() as group:
        events.host(group.create_task)
    assert done == [ELECTED, ELECTED]
    assert [failure.error for failure in failures] == ["RuntimeError: oops"] * 2
