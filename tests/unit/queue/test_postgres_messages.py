"""What is asked of PostgreSQL for one message, and what becomes of the answers."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync import Events
from jobsync.core.messages import REVOKED
from jobsync.queue.backend import EndedClaim, Receipt, Settlement
from jobsync.queue.single_message import ProgressReport, StoredResult
from jobsync.queue.sql.message_rows import encode_error
from jobsync.queue.sql.postgres_messages import PostgresMessageOperations, build_results
from jobsync.queue.sql.single_message import PROGRESS_TTL
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.sql import as_array

NAME = {"id": "a", "queue": "emails"}
CANCEL = {**NAME, "error": encode_error(REVOKED)}


class Stage:
    """One message of a queue whose statements the test answers; without an answer, no rows."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.woken: list[str] = []
        self.answers = defaultdict[str, list[Any]](list, answers)

        async def run(_: Any, name: str, parameters: Any) -> list[Any]:
            return self.answer(name, parameters)

        async def run_steps(build: Any, topic: str) -> list[Any]:
            assert topic == "queue/emails"
            return cast("list[Any]", build())

        kind = type("Messages", (PostgresMessageOperations,), {"_run": run, "_run_repeatable": run})
        made: Any = kind()
        made.queue, made.topic = "emails", "queue/emails"
        made._access = SimpleNamespace(run_steps=run_steps)
        made._places = SimpleNamespace(end_message=self.answer)
        made._corruption_log = CorruptionLog("queue/emails", Events())
        made._notifications = SimpleNamespace(wake=self.woken.append)
        self.messages = cast("PostgresMessageOperations", made)

    def answer(self, name: str, parameters: Any) -> list[Any]:
        """Return the next answer of a statement."""
        self.asked.append((name, parameters))
        return self.answers[name].pop(0) if self.answers[name] else []


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("state", ["waiting", "claimed"])
async def test_a_message_is_cancelled_where_it_is(state: str, group: str | None) -> None:
    """Workers are woken if another one can be claimed now; waiters for its end are in any case.

    That is the next of a group, or one that a limit held back while this one was claimed.
    """
    rows = [("3", "w" if state == "claimed" else "", group)]
    stage = Stage(**{f"cancel_{state}": [rows]})
    ended = await stage.messages.cancel("a")
    session = "w" if state == "claimed" else ""
    assert ended == EndedClaim(id="a", state="cancelled", attempt=3, session=session)
    asked = ["cancel_waiting", "cancel_claimed"][: 1 if state == "waiting" else 2]
    assert stage.asked == [(name, CANCEL) for name in asked]
    is_freeing = group or state == "claimed"
    assert stage.woken == [*(["queue/emails"] if is_freeing else []), "queue/emails/ends"]


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("state", ["waiting", "finished"])
async def test_a_message_is_deleted_where_it_is(state: str, group: str | None) -> None:
    """In one of two tables; a finished one is the head of no group."""
    stage = Stage(**{f"delete_{state}": [[(group,)]]})
    assert await stage.messages.delete("a") == "deleted"
    asked = ["delete_waiting", "delete_finished"][: 1 if state == "waiting" else 2]
    assert stage.asked == [(name, NAME) for name in asked]
    wakes = ["queue/emails"] if group and state == "waiting" else []
    assert stage.woken == [*wakes, "queue/emails/ends"]


async def test_what_is_nowhere_is_not_ended() -> None:
    """Each table is asked once, and nobody is woken."""
    stage = Stage()
    assert await stage.messages.cancel("a") is None
    assert await stage.messages.delete("a") == "absent"
    assert not await stage.messages.run_now("a")
    names = [name for name, _ in stage.asked]
    assert names == [
        "cancel_waiting",
        "cancel_claimed",
        "find",
        "delete_waiting",
        "delete_finished",
        "find",
        "run_now",
    ]
    assert stage.woken == []


async def test_the_latest_report_of_each_message_is_sent() -> None:
    """Its own delivery, progress and note in each column."""
    stage = Stage()
    reports = [
        ProgressReport(Receipt("a", 2, "c"), 0.1, "first"),
        ProgressReport(Receipt("b", 7, "d"), 0.2, ""),
        ProgressReport(Receipt("a", 3, "e"), 0.3, "last"),
    ]
    await stage.messages.report_progress(reports)
    await stage.messages.clear_progress(["b", "a"])
    columns = {
        "queue": "emails",
        "ids": as_array(["a", "b"]),
        "deliveries": as_array([3, 7]),
        "progress": as_array([0.3, 0.2]),
        "notes": as_array(["last", ""]),
    }
    assert stage.asked == [
        ("report_progress", columns),
        ("clear_progress", {"ids": as_array(["b", "a"])}),
    ]


@pytest.mark.parametrize(
    ("counts", "parts"), [([0], 1), ([4], 1), ([5, 0], 2), ([5, 5, 1], 3), ([5, 6, 0], 3)]
)
@pytest.mark.parametrize("age", [1, PROGRESS_TTL - 1, PROGRESS_TTL + 1])
async def test_results_are_forgotten_to_the_end_and_progress_once(
    counts: list[int], parts: int, age: float
) -> None:
    """Progress not before a day is over, however soon messages are forgotten."""
    stage = Stage(forget_results=[[(count,)] for count in counts])
    await stage.messages._forget_results(age, 5)
    parameters = {"queue": "emails", "older_than": float(age), "limit": 5}
    kept = {**parameters, "older_than": max(age, PROGRESS_TTL)}
    assert stage.asked == [
        *[("forget_results", parameters)] * parts,
        ("forget_progress", kept),
    ]


def test_each_settlement_has_its_own_result() -> None:
    """Its text, or why there is none; nothing for those that returned nothing."""
    results = [StoredResult("1"), None, StoredResult(None, "too large"), StoredResult("2", "cut")]
    batch = [
        Settlement(receipt=Receipt(str(n), 1, "c"), move="complete", result=result)
        for n, result in enumerate(results)
    ]
    assert build_results(batch) == {
        "results": as_array(["1", None, None, "2"]),
        "problems": as_array(["", "", "too large", "cut"]),
    }
