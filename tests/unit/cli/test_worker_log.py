"""The log of a worker: a line for each fact, and the message with what handlers log."""

import asyncio
import datetime as dt
import json
import logging
import typing
from collections.abc import Iterator
from importlib import import_module

import msgspec
import pytest
from waiting import until

from jobsync import Database, QueuePlugin
from jobsync.cli.work import _log_plan
from jobsync.cli.worker_log import _show, log_facts, start_logging
from jobsync.coordination.events import CoordinatorPromoted
from jobsync.events import Events, HandlerFailed, known_events


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Put the logging of the tests back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_events_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Times are local; those of another day have their date."""
    start_logging("text", "info")
    noon = dt.datetime(2001, 2, 3, 12, 0, 5).astimezone().timestamp()
    promoted = CoordinatorPromoted(
        role="default/a", worker_id="w1", epoch=3, until=noon, timestamp=1.5e18
    )
    Events().emit(promoted)
    (line,) = capsys.readouterr().err.splitlines()
    assert line[9:] == (
        "coord:coordinator-promoted role=default/a worker_id=w1 epoch=3 "
        "until=2001-02-03T12:00:05 timestamp=1.5e+18"
    )


NOON = dt.datetime(2001, 2, 3, 12, 0, 5).astimezone().timestamp()
DURATIONS = {
    *("delay", "duration", "lag", "pause", "progress", "timeout", "wait", "worker_timeout")
}
"""The fields of events that have a number and no time."""


def test_each_number_of_an_event_is_shown_as_a_time_or_a_number() -> None:
    """Those of the events of all packages, by the names of their fields."""
    for package in ("coordination", "jobs", "queue", "scheduler", "ttl"):
        import_module(f"jobsync.{package}.events")
    numbers = {
        field
        for kind in known_events().values()
        for field, type_ in typing.get_type_hints(kind).items()
        if field in kind.__struct_fields__ and type_ in (float, float | None)
    }
    assert numbers >= {"until", "timestamp", "duration"}
    for field in numbers:
        expected = "981201605" if field in DURATIONS else "12:00:05"
        assert _show(field, 981201605.0 if field in DURATIONS else NOON, NOON) == expected, field


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("until", NOON, "12:00:05"),
        ("until", NOON - 86_400, "2001-02-02T12:00:05"),
        ("until", NOON + 86_400, "2001-02-04T12:00:05"),
        ("delay", 0.25, "0.25"),
        ("delay", 100.0, "100"),
        ("delay", 1.23456, "1.235"),
        ("epoch", 3, "3"),
        ("tasks", ("a", "b"), "a,b"),
        ("tasks", [], "''"),
        ("reason", "no answer", "'no answer'"),
        ("reason", "", "''"),
        ("is_new", True, "True"),
        ("error", "E: no\nand more", "'E: no'"),
        (
            "error",
            'E: no\n  File "/a/first.py", line 3, in outer\n  File "/b/last.py", line 7, in inner',
            "'E: no (last.py, line 7, in inner)'",
        ),
    ],
)
def test_a_field_is_one_word_for_people(name: str, value: object, shown: str) -> None:
    """An error is its first line and the last place that it passed; days are told apart."""
    assert _show(name, value, NOON) == shown


def test_json_keeps_each_field_of_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose names are taken have an underscore after them."""
    start_logging("json", "info")
    failed = HandlerFailed(event="db:connected", callback="app.listen", error="ValueError: no")
    Events().emit(failed)
    line = json.loads(capsys.readouterr().err)
    fields = msgspec.structs.asdict(failed)
    assert (line["event"], line["event_"]) == (failed.name, fields.pop("event"))
    assert line.items() >= fields.items()


class Mailbox:
    """An object of the user's."""

    def __repr__(self) -> str:
        return "<mailbox of ann>"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, 3),
        ([Mailbox()], ["<mailbox of ann>"]),
        ({Mailbox(): 1}, {"<mailbox of ann>": 1}),
        # Half a character, which no encoding has.
        ("\ud800x", "\\ud800x"),
    ],
)
def test_json_has_every_value(
    capsys: pytest.CaptureFixture[str], value: object, shown: object
) -> None:
    """One that JSON cannot carry is a text; the line has its other fields all the same."""
    start_logging("json", "info")
    log_facts("sent", {"value": value, "to": "ann"})
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["value"], line["to"]) == ("sent", shown, "ann")


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_is_the_lowest_that_is_logged(
    capsys: pytest.CaptureFixture[str], level: str
) -> None:
    """Whatever was set up before, and however often."""
    levels = ["debug", "info", "warning", "error"]
    for first in levels:
        start_logging("text", first)
        start_logging("text", level)
        for each in levels:
            logging.getLogger("app").log(logging.getLevelName(each.upper()), each)
        lines = capsys.readouterr().err.splitlines()
        assert [line.split()[-1] for line in lines] == levels[levels.index(level) :]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_is_logged_with_its_lines(
    capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    """In text below its record, in JSON as a field of it; the other fields are as always."""
    start_logging(log_format, "info")
    error = ValueError("no mailbox")

    def send() -> None:
        raise error

    try:
        send()
    except ValueError:
        logging.getLogger("app").exception("it failed")
    text = capsys.readouterr().err
    if log_format == "json":
        line = json.loads(text)
        assert (line["logger"], line["level"], line["message"]) == ("app", "error", "it failed")
        text = f"error: it failed\n{line['trace']}"
    first, *rest = text.splitlines()
    assert first.endswith("error: it failed")
    assert rest[0] == "Traceback (most recent call last):"
    assert any("test_worker_log.py" in line for line in rest)
    assert rest[-1] == "ValueError: no mailbox"


def test_lines_of_several_processes_have_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a process that is alone have none."""
    for process in (None, 3, 0):
        start_logging("text", "info", process)
        logging.getLogger("jobsync.work").warning("late")
        start_logging("json", "info", process)
        logging.getLogger("jobsync.work").warning("late")
    text, line, numbered_text, numbered, *first = capsys.readouterr().err.splitlines()
    assert (text[9:], numbered_text[9:]) == ("warning: late", "[3] warning: late")
    assert "process" not in json.loads(line)
    assert json.loads(numbered)["process"] == 3
    assert (first[0][9:], json.loads(first[1])["process"]) == ("[0] warning: late", 0)


def test_json_has_the_store_and_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, without secrets; the banner of the text has the same."""
    queue = QueuePlugin("emails", on_message=print)
    database = Database("postgresql://me:secret@host/db", plugins=[queue])
    start_logging("json", "info")
    _log_plan("app:db", database, None)
    line = json.loads(capsys.readouterr().err)
    assert (
        line.items()
        >= {
            "message": "worker starting",
            "target": "app:db",
            "store": "postgresql://***@host/db",
            "origin": "from the code",
        }.items()
    )
    assert line["runs"] == ["default/emails → messages without a task → builtins.print"]
    assert "probes" not in line


async def _handle_one(queue: QueuePlugin, log_format: str) -> str:
    """Handle a message of the task send in a worker, with a log; return its id."""
    start_logging(log_format, "info")
    async with Database("memory://", plugins=[queue]):
        logging.getLogger("app").info("outside")
        name = await queue.enqueue({"to": "a"}, task="send")
        await until(lambda: queue.stats()["dead"] == 1, "it is dead")
    return name


@pytest.mark.parametrize("logger", ["app", "app.jobsync", "jobsync_app", "jobsyncs.mail"])
async def test_what_a_handler_logs_has_its_message(
    capsys: pytest.CaptureFixture[str], logger: str
) -> None:
    """Id, queue, attempt and task; a failure is one line, and a dead letter an error."""
    queue = QueuePlugin("emails", max_attempts=1)

    @queue.task(name="send")
    async def send(to: str) -> None:
        await asyncio.sleep(0)
        logging.getLogger(logger).info("sending to %s", to)
        raise ValueError("no mailbox")

    name = await _handle_one(queue, "text")
    lines = [line[9:] for line in capsys.readouterr().err.splitlines()]
    assert "outside" in lines
    fields = f"message_id={name} queue=default/emails attempt=1"
    assert f"sending to a {fields} task=send" in lines
    (failure,) = [line for line in lines if "no mailbox" in line]
    assert failure.startswith("error: plg:queue:message-dead queue=default/emails ")
    assert "error='ValueError: no mailbox (test_worker_log.py, line " in failure


async def test_fields_of_a_message_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a plain function, which runs on a thread."""
    queue = QueuePlugin("emails", max_attempts=1)

    @queue.task(name="send")
    def send(to: str) -> None:
        logging.getLogger("app").info("sending to %s", to)
        raise ValueError("no mailbox")

    name = await _handle_one(queue, "json")
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = {row["message"]: row for row in rows if row["logger"] == "app"}
    fields = ("message_id", "queue", "attempt", "task")
    assert [found["sending to a"][key] for key in fields] == [name, "default/emails", 1, "send"]
    assert not {*fields} & {*found["outside"]}
    (failure,) = [row for row in rows if "no mailbox" in str(row)]
    assert (failure["event"], failure["level"]) == ("plg:queue:message-dead", "error")
