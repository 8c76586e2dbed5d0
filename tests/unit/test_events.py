"""Listeners hear every fact once per registration, in order, whatever others do."""

import asyncio
import logging
import pickle
import re
import threading
import types
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from jobsync.errors import Invalid
from jobsync.events import Event, Events, HandlerFailed, known_events


class Elected(Event, frozen=True, kw_only=True):
    """A fact with fields."""

    name = "test:coord:elected"
    level = logging.INFO

    worker_id: str
    epoch: int = 0


class Started(Event, frozen=True, kw_only=True):
    """A fact with aliases, in another family."""

    name = "test:s3-queue:started"
    aliases = ("test:queue:started", "testStarted")


class Lost(Event, frozen=True, kw_only=True):
    """A fact that is always logged."""

    name = "test:coord:lost"
    level = logging.WARNING

    reason: Any = None


ELECTED = Elected(worker_id="w-1", epoch=41)


@pytest.fixture
def events() -> Events:
    """A hub that nobody hosts."""
    return Events()


@pytest.fixture
def heard(events: Events) -> list[HandlerFailed]:
    """Whatever failed."""
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
    """A mistyped item names the field that was meant, or all there are."""
    with pytest.raises(KeyError, match=re.escape(words)):
        event[field]


def test_a_name_is_not_a_field() -> None:
    """What describes the kind is no part of the payload."""
    with pytest.raises(KeyError):
        ELECTED["name"]
    assert "level" not in ELECTED


def test_a_payload_cannot_be_changed() -> None:
    """No listener can alter what the next one reads."""
    event: Any = ELECTED
    with pytest.raises(AttributeError):
        event.epoch = 42


def test_a_payload_survives_a_pickle() -> None:
    """A fact can cross processes."""
    assert pickle.loads(pickle.dumps(ELECTED)) == ELECTED


# Kinds


def test_every_kind_is_known_by_its_own_name() -> None:
    """The register gives kinds under canonical names, in order, and not under aliases."""
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
    """A second kind that claims a name or an alias is refused, and leaves no trace."""
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
    """A name that could be taken for a family, or for nothing, is no name."""
    with pytest.raises(Invalid, match="must have a well-formed event name"):
        _define("Odd", name=name)


def test_a_field_cannot_hide_the_name() -> None:
    """A payload field called `name` is refused when the class is defined."""
    with pytest.raises(Invalid, match="must have a well-formed event name"):
        _define("Hidden", __annotations__={"name": str})


def test_a_reloaded_kind_replaces_itself() -> None:
    """The same class defined again takes over its names, and gives up those it dropped."""
    old = _define("Reloaded", name="test:reloaded", aliases=("test:old-alias",))
    new = _define("Reloaded", name="test:reloaded", aliases=("test:new-alias",))
    assert known_events()["test:reloaded"] is new
    events, heard = Events(), list[Event]()
    with pytest.raises(Invalid):
        events.on("test:old-alias", heard.append)
    events.on("test:reloaded", heard.append)
    events.emit(old())
    assert len(heard) == 1


def test_a_kind_without_a_name_goes_by_its_parents() -> None:
    """A refined fact reaches whoever listens to the plain one."""

    class ElectedHere(Elected, frozen=True, kw_only=True):
        host: str

    events, heard = Events(), list[Event]()
    events.on("test:coord:elected", heard.append)
    events.emit(ElectedHere(worker_id="w", host="h"))
    assert [event["host"] for event in heard] == ["h"]
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
def test_a_fact_is_heard_under_each_of_its_names(events: Events, name: str) -> None:
    """Name, alias and family all lead to the fact, once, and to no other."""
    heard: list[Event] = []
    assert events.on(name, heard.append) is not None
    events.emit(Started())
    assert heard == [Started()]


@pytest.mark.parametrize(
    "name", ["test:coord:lost", "test:s3-queue:*", "test:coord:l*", "test:coord:elected:*"]
)
def test_other_facts_are_not_heard(events: Events, name: str) -> None:
    """A listener hears nothing but what it asked for."""
    heard: list[Event] = []
    events.on(name, heard.append)
    events.emit(ELECTED)
    assert heard == []


def test_each_registration_is_called(events: Events) -> None:
    """A callback that is registered three times is called three times."""
    heard: list[Event] = []
    for name in ("test:s3-queue:started", "test:queue:started", "test:s3-queue:started"):
        events.on(name, heard.append)
    events.emit(Started())
    assert len(heard) == 3


def test_listeners_are_called_in_order(events: Events) -> None:
    """The order is that of registration, across names and families."""
    heard: list[int] = []
    names = ["*", "test:coord:elected", "test:coord:*", "test:coord:elected", "test:*"]
    for place, name in enumerate(names):
        events.on(name, lambda _, place=place: heard.append(place))
    events.emit(ELECTED)
    assert heard == [0, 1, 2, 3, 4]


def test_on_and_once_decorate(events: Events) -> None:
    """Both can stand above a function, and leave it as it is."""
    heard: list[str] = []

    @events.on("test:coord:elected")
    def always(event: Elected) -> None:
        heard.append(f"always {event.worker_id}")

    @events.once("test:coord:elected")
    def first(event: Elected) -> None:
        heard.append(f"first {event.worker_id}")

    events.emit(ELECTED)
    events.emit(ELECTED)
    assert heard == ["always w-1", "first w-1", "always w-1"]
    assert events.off("test:coord:elected", always)
    assert first.__name__ == "first"


def test_on_gives_the_callback_back(events: Events) -> None:
    """What was registered is at hand for `off`."""
    callback = _raise(ValueError())
    assert events.on("*", callback) is callback
    assert events.once("*", callback) is callback


def test_once_is_over_before_it_runs(events: Events) -> None:
    """A callback that emits the same fact again does not meet itself."""
    heard: list[Event] = []

    def again(event: Event) -> None:
        heard.append(event)
        events.emit(event)

    events.once("test:coord:*", again)
    events.emit(ELECTED)
    assert heard == [ELECTED]


@pytest.mark.parametrize("once", [False, True])
def test_off_ends_a_registration(events: Events, once: bool) -> None:
    """`off` says whether there was anything to end; the second time there is not."""
    heard: list[Event] = []
    (events.once if once else events.on)("test:queue:started", heard.append)
    assert not events.off("test:s3-queue:started", heard.append)
    assert not events.off("test:queue:started", print)
    assert events.off("test:queue:started", heard.append)
    assert not events.off("test:queue:started", heard.append)
    events.emit(Started())
    assert heard == []


def test_off_ends_every_registration_of_that_name(events: Events) -> None:
    """A callback that was registered twice under one name is gone after one `off`."""
    heard: list[Event] = []
    events.on("*", heard.append)
    events.on("*", heard.append)
    assert events.off("*", heard.append)
    events.emit(ELECTED)
    assert heard == []


@pytest.mark.parametrize("once", [False, True])
def test_off_during_an_emit_holds_at_once(events: Events, once: bool) -> None:
    """A listener that an earlier one removed is not called any more."""
    heard: list[Event] = []
    events.on("*", lambda _: events.off("*", heard.append))
    (events.once if once else events.on)("*", heard.append)
    events.emit(ELECTED)
    assert heard == []


@pytest.mark.parametrize("name", ["test:coord:lost", "test:s3-queue:started", "testStarted", "*"])
def test_whoever_listens_is_known_at_once(
    events: Events, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who would hear of a kind is asked before it is made, and follows every registration."""
    monkeypatch.setattr(logging.getLogger("jobsync"), "disabled", True)
    kind = Lost if name == "test:coord:lost" else Started
    whole = Events()
    events.join(whole)
    told: list[Event] = []
    for place in (events, whole):
        assert not events.has_listener(kind)
        place.on(name, told.append)
        assert events.has_listener(kind)
        events.emit(kind())
        place.off(name, told.append)
        assert not events.has_listener(kind)
        events.emit(kind())
        place.once(name, told.append)
        assert events.has_listener(kind)
        events.emit(kind())
    assert len(told) == 4
    assert not events.has_listener(kind)


def test_a_log_hears_too(events: Events) -> None:
    """What is logged is made, though nobody listens."""
    logger = logging.getLogger("jobsync")
    level = logger.level
    try:
        logger.setLevel(logging.WARNING)
        assert events.has_listener(Lost)
        assert not events.has_listener(Started)
    finally:
        logger.setLevel(level)


def test_on_during_an_emit_waits_for_the_next(events: Events) -> None:
    """A listener that an earlier one added hears the next fact, not this one."""
    heard: list[Event] = []
    events.once("*", lambda _: events.on("*", heard.append))
    events.emit(ELECTED)
    assert heard == []
    events.emit(Started())
    assert heard == [Started()]


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
    """A mistyped name is an error wherever it is given, also before a function is decorated."""
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
    """What cannot be called is refused when it is registered."""
    callback: Any = "print"
    with pytest.raises(Invalid, match="must be callable"):
        events.on("*", callback)


def test_a_family_may_be_empty_yet(events: Events) -> None:
    """A family is taken before any of its facts is known."""
    events.on("test:nothing-here:*", print)


# Failures


def test_a_failing_listener_stops_nobody(events: Events, heard: list[HandlerFailed]) -> None:
    """The others hear the fact, and the failure becomes a fact with its fields."""
    told: list[Event] = []
    callback = _raise(ValueError("no room"))
    events.on("test:coord:*", callback)
    events.on("test:coord:*", told.append)
    events.emit(ELECTED)
    assert told == [ELECTED]
    (failure,) = heard
    assert failure.event == "test:coord:elected"
    assert failure.callback.endswith("test_events._raise.<locals>.fail")
    assert failure.error == "ValueError: no room"
    assert failure.level == logging.ERROR


def test_a_callback_without_a_name_is_named_by_its_type(
    events: Events, heard: list[HandlerFailed]
) -> None:
    """A partial that fails is reported too."""
    events.on("test:*", partial(_raise(ValueError("x"))))
    events.emit(ELECTED)
    assert [failure.callback for failure in heard] == ["functools.partial"]


def test_a_listener_of_failures_that_fails_is_only_logged(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """No failure is told of a failure: nothing goes round in circles."""
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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
def test_what_is_no_error_passes_through(
    events: Events, heard: list[HandlerFailed], error: BaseException
) -> None:
    """An interrupt or a cancellation inside a callback reaches the emitter."""
    events.on("test:*", _raise(error))
    with pytest.raises(type(error)):
        events.emit(ELECTED)
    assert heard == []


# Coroutines


async def test_the_host_runs_coroutines() -> None:
    """An `async def` callback runs where the host says, beside plain ones."""
    heard: list[str] = []

    async def later(event: Elected) -> None:
        await asyncio.sleep(0)
        heard.append(f"later {event.worker_id}")

    async with asyncio.TaskGroup() as group:
        events = Events(group.create_task)
        events.on("test:coord:elected", later)
        events.on("test:coord:elected", lambda _: heard.append("now"))
        events.emit(ELECTED)
        assert heard == ["now"]
    assert heard == ["now", "later w-1"]


async def test_coroutines_wait_for_a_host(events: Events) -> None:
    """What arrives before a host is handed over when it comes, in order, and only once."""
    heard: list[str] = []

    async def later(event: Event) -> None:
        heard.append(event.name)

    spawned: list[Coroutine[Any, Any, None]] = []
    events.on("test:*", later)
    events.emit(ELECTED)
    events.emit(Started())
    assert heard == []
    events.host(spawned.append)
    events.host(spawned.append)
    assert len(spawned) == 2
    for coroutine in spawned:
        await coroutine
    assert heard == ["test:coord:elected", "test:s3-queue:started"]


async def test_a_host_can_leave(events: Events) -> None:
    """After a host has left, coroutines are kept for the next one."""
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
    events: Events, heard: list[HandlerFailed]
) -> None:
    """An `async def` that raises does not take its host down."""

    async def fail(_: Event) -> None:
        raise ValueError("too late")

    events.on("test:*", fail)
    async with asyncio.TaskGroup() as group:
        events.host(group.create_task)
        events.emit(ELECTED)
    (failure,) = heard
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


async def test_a_coroutine_can_be_cancelled(events: Events, heard: list[HandlerFailed]) -> None:
    """Cancelling what the host runs is no failure, and is not swallowed."""
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
    assert heard == []


# The log


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "jobsync"]


def test_an_event_is_logged_as_fields(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    """A line is the name and the fields, at the event's level, whoever listens or not."""
    caplog.set_level(logging.INFO, "jobsync")
    events.on("*", lambda _: None)
    events.on("*", lambda _: None)
    events.emit(ELECTED)
    assert _lines(caplog) == ["test:coord:elected worker_id=w-1 epoch=41"]
    assert caplog.records[0].levelno == logging.INFO


def test_a_quiet_event_is_logged_only_on_demand(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """Below the logger's level nothing is written; warnings are, without any set-up."""
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
    """No value can break the line or pass for another field, and none is endless."""
    events.emit(Lost(reason=value))
    assert _lines(caplog) == [f"test:coord:lost reason={shown}"]


def test_a_value_that_hides_itself_stays_hidden(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """Text of a derived type is shown by its own repr, never by what it holds."""

    class Masked(str):
        __slots__ = ()

        def __repr__(self) -> str:
            return "***"

    events.emit(Lost(reason=Masked("hunter2")))
    assert _lines(caplog) == ["test:coord:lost reason=***"]


def test_a_fact_is_logged_before_it_is_told(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener that takes the process down cannot keep the fact out of the log."""
    events.on("*", _raise(SystemExit()))
    with pytest.raises(SystemExit):
        events.emit(Lost(reason="gone"))
    assert _lines(caplog) == ["test:coord:lost reason=gone"]


def test_a_failure_is_logged_once_with_its_traceback(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """The line says which callback failed; the traceback says where."""
    events.on("test:*", _raise(ValueError("no room")))
    events.emit(ELECTED)
    (record,) = caplog.records
    assert record.getMessage().endswith('.<locals>.fail error="ValueError: no room"')
    assert record.exc_info
    assert record.exc_info[0] is ValueError


# Threads


def test_threads_lose_no_registration_and_no_fact(events: Events) -> None:
    """Many threads register, emit and remove at once; nothing is lost and once means once."""
    heard: list[str] = []
    only: list[Event] = []
    start = threading.Barrier(8)

    def note(mark: str, event: Elected) -> None:
        if event.worker_id == mark:
            heard.append(mark)

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
    assert len(heard) == len(set(heard)) == 400
    assert len(only) == 1
    assert events._listeners == {}


async def test_a_parts_events_are_also_those_of_the_whole(
    events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """Who listens to a part hears of that part alone; who listens above hears of all, once."""
    caplog.set_level(logging.DEBUG, "jobsync")
    one, two = Events(), Events()
    one.join(events)
    two.join(events)
    heard: dict[str, list[Event]] = {"one": [], "two": [], "all": []}
    one.on("test:coord:elected", heard["one"].append)
    two.on("test:coord:elected", heard["two"].append)
    events.on("test:coord:elected", heard["all"].append)
    one.emit(ELECTED)
    assert heard == {"one": [ELECTED], "two": [], "all": [ELECTED]}
    assert len(caplog.records) == 1


async def test_what_a_part_calls_is_hosted_above(events: Events) -> None:
    """Coroutines of a part's listeners run where the whole's do, and fail as they do."""
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
