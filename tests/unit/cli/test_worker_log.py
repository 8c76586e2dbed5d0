"""The log of a worker: a line for each fact, and the message with what handlers log."""

import asyncio
import datetime as dt
import json
import logging
from collections.abc import Iterator

import pytest
from waiting import until

from jobsync import Database, QueuePlugin
from jobsync.cli.work import _log_plan
from jobsync.cli.worker_log import start_logging
from jobsync.coordination.events import CoordinatorPromoted
from jobsync.events import Events


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


def test_lines_of_several_processes_have_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a process that is alone have none."""
    for process in (None, 3):
        start_logging("text", "info", process)
        logging.getLogger("jobsync.work").warning("late")
        start_logging("json", "info", process)
        logging.getLogger("jobsync.work").warning("late")
    text, line, numbered_text, numbered = capsys.readouterr().err.splitlines()
    assert (text[9:], numbered_text[9:]) == ("warning: late", "[3] warning: late")
    assert "process" not in json.loads(line)
    assert json.loads(numbered)["process"] == 3


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


async def test_what_a_handler_logs_has_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    """Id, queue, attempt and task; a failure is one line, and a dead letter an error."""
    queue = QueuePlugin("emails", max_attempts=1)

    @queue.task(name="send")
    async def send(to: str) -> None:
        await asyncio.sleep(0)
        logging.getLogger("app").info("sending to %s", to)
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
