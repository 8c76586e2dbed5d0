"""What `jobsync why` answers for the name of a task of a queue, which is no message."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from waiting import until

from jobsync import Components, Database, QueuePlugin
from jobsync.cli import why as module
from jobsync.cli.render import ago, format_time
from jobsync.cli.why import find_queue_of_task, show_reason
from jobsync.status.queues import QueueStatus, QueueWorkerStatus
from jobsync.status.why import Reason
from jobsync.stores.memory import MemoryStore


async def test_the_name_of_a_task_leads_to_its_queue(capsys: pytest.CaptureFixture[str]) -> None:
    """While a live worker handles it; other names have no queue."""
    queue = QueuePlugin("orders")
    queue.task(name="shop.charge")(lambda: None)
    store, components = MemoryStore("why"), Components.system()

    async def find(name: str) -> str | None:
        return await find_queue_of_task(store, components, name)

    async def is_found() -> bool:
        return await find("shop.charge") == "default/orders"

    async with Database(connection=store, plugins=[queue]):
        await until(is_found, "the worker reports its tasks")
        assert await find("shop.chrge") is None
    assert await find("shop.charge") is None
    show_reason("shop.charge", None, queue="default/orders", as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["code"] == "unknown"
    assert row["reason"].startswith("it is a task of the queue default/orders, not a message")
    assert row["next"] == "run: jobsync queues browse default/orders; then jobsync why ID"


@pytest.mark.parametrize("state", ["live", "silent", "dead"])
@pytest.mark.parametrize("tasks", [None, (), ("", "shop.charge")])
async def test_only_a_live_worker_leads_to_the_queue_of_a_task(
    monkeypatch: pytest.MonkeyPatch, state: Any, tasks: tuple[str, ...] | None
) -> None:
    """One whose session is over may have had other code."""
    worker = QueueWorkerStatus(
        worker_id="w",
        state=state,
        concurrency=1,
        claims=1,
        is_paused=False,
        tasks=tasks,
        heard=1.0,
        timeout=15.0,
        host="here",
        pid=1,
        incarnation="w.1",
    )
    queue = QueueStatus(name="default/orders", counts={}, oldest=None, pause=None, workers=[worker])
    empty = msgspec.structs.replace(queue, name="default/a", workers=[])

    async def read(*_: object) -> SimpleNamespace:
        return SimpleNamespace(queues=lambda: [empty, queue])

    monkeypatch.setattr("jobsync.status.queues.read_queues_status", read)
    found = await find_queue_of_task(MemoryStore(), Components.system(), "shop.charge")
    assert found == ("default/orders" if state == "live" and tasks else None)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("queue", [None, "default/orders"])
def test_an_answer_without_a_message_names_the_store(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    queue: str | None,
    is_terminal: bool,
) -> None:
    """It may be another one than the user means; apart from the answer in a pipe."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    for name in ("jobsync.cli.render.named_store", "jobsync.cli.why.named_store"):
        monkeypatch.setattr(name, lambda: "sqlite:///a.db")
    show_reason("m", None, queue=queue, as_json=False)
    printed = capsys.readouterr()
    if is_terminal:
        assert "  store    sqlite:///a.db" in printed.out.splitlines()
    else:
        assert printed.err == ("none in sqlite:///a.db\n" if queue is None else "")


@pytest.mark.parametrize("until", [None, 9.0])
@pytest.mark.parametrize("since", [None, 0.0, 5.0])
def test_the_times_of_a_reason_are_shown_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    since: float | None,
    until: float | None,
) -> None:
    """Programs see both, people those that there are, also as ages."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(module, "now", lambda: 7.0)
    reason = Reason("unknown", "nobody knows", since=since, until=until)
    monkeypatch.setattr("jobsync.status.why.explain", lambda _: reason)
    show_reason("m", None, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "name": "m",
        "code": "unknown",
        "reason": "nobody knows",
        "since": since,
        "until": until,
        "next": row["next"],
    }
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show_reason("m", None, as_json=False)
    title, *facts = capsys.readouterr().out.splitlines()
    assert title == "m: nobody knows"
    shown = dict(fact.strip().split(maxsplit=1) for fact in facts)
    times = {"since": since, "until": until}
    assert {name: text for name, text in shown.items() if name in times} == {
        name: f"{format_time(at)} ({ago(7.0 - at)})" for name, at in times.items() if at is not None
    }


@pytest.mark.parametrize("queue", [None, "default/orders"])
def test_what_is_not_found_is_a_failure(monkeypatch: pytest.MonkeyPatch, queue: str | None) -> None:
    """Also if the name is that of a task: it is no message."""
    monkeypatch.setattr(module, "run_on_store", lambda _, __: (None, queue))
    done = CliRunner().invoke(module.why, ["shop.charge", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)[0]["code"] == "unknown"


@pytest.mark.parametrize(("name", "is_hinted"), [("shop.charge", True), ("charge", False)])
def test_a_dotted_name_may_be_a_task(
    capsys: pytest.CaptureFixture[str], name: str, is_hinted: bool
) -> None:
    """Where no worker is live, nobody knows."""
    show_reason(name, None, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["next"].startswith("check the id")
    assert row["next"].endswith("jobsync queues browse QUEUE") == is_hinted
