"""Rows in a simulated world: transactions of nodes, and what is recorded of them."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jobsync import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.backend import ClaimResult, NewMessage, QueueBackend, Settlement
from jobsync.queue.opening import open_backend
from jobsync.stores.contract import Applied, Put
from jobsync.testing import (
    Link,
    RecordingBackend,
    RowStore,
    Weather,
    World,
    check_answers,
    check_drained,
    check_messages,
    check_orphans,
    check_redelivered,
)
from jobsync.testing.sqlite_rows import SqliteRows

Scenario = Callable[[World, Link, QueueBackend], Awaitable[Any]]


def run(scenario: Scenario) -> World:
    """Run a scenario on a node with a queue; return the world."""
    world = World(0)
    node, store = world.node("a"), RowStore(world)
    link = Link(world, node, store)
    backend = RecordingBackend(node, open_backend(link, "mails", node.components))
    world.run(lambda: scenario(world, link, backend))
    return world


def message(name: str = "one", **options: Any) -> NewMessage:
    """Return a message to push."""
    return NewMessage(id=name, value={"to": name}, **{"max_attempts": 2, **options})


def list_states(world: World) -> list[str]:
    """Return the states in the history, in order."""
    return [each.details["state"] for each in world.history if each.what == "row"]


async def claim(backend: QueueBackend, **options: Any) -> ClaimResult:
    """Claim all messages."""
    return await backend.claim(10, session="me", visibility=30.0, **options)


def test_every_commit_is_in_the_history() -> None:
    """A message is recorded as each commit has left it, with the request."""

    async def scenario(_: World, __: Link, backend: QueueBackend) -> None:
        await backend.push([message()])
        (claimed,) = (await claim(backend)).messages
        await backend.extend([claimed.receipt], 60.0)
        await backend.settle([Settlement(receipt=claimed.receipt, move="complete")])
        await backend.forget("completed", older_than=0.0)

    world = run(scenario)
    assert list_states(world) == ["ready", "claimed", "claimed", "completed", "gone"]
    rows = [each for each in world.history if each.what == "row"]
    calls = [world.history[each.details["request"]].details["call"] for each in rows]
    assert calls == ["push", "claim", "extend", "settle", "forget"]
    assert check_messages(world.history) + check_answers(world.history) == []


def test_a_failed_transaction_leaves_nothing() -> None:
    """Neither in the database nor in the history."""

    async def scenario(_: World, link: Link, backend: QueueBackend) -> None:
        await backend.push([message()])
        with pytest.raises(Misconfigured, match="UNIQUE"):
            await backend.push([message("two"), message()])
        assert await backend.count() == {"ready": 1}

    assert list_states(run(scenario)) == ["ready"]


@pytest.mark.parametrize(
    ("weather", "error", "arrives"),
    [
        (Weather(refused=1.0), Unavailable, False),
        (Weather(undecided=1.0), OutcomeUnknown, False),
        (Weather(lost=1.0), OutcomeUnknown, True),
        (Weather(unanswered=1.0), OutcomeUnknown, True),
        (Weather(late=1.0, late_by=1e4), OutcomeUnknown, True),
    ],
)
def test_faults_of_a_push(weather: Weather, error: type[Exception], arrives: bool) -> None:
    """The error of the caller, and whether the message arrives."""

    async def scenario(_: World, link: Link, backend: QueueBackend) -> None:
        link.weather = weather
        with pytest.raises(error):
            await backend.push([message()])
        await asyncio.sleep(1e4)

    world = run(scenario)
    assert list_states(world) == (["ready"] if arrives else [])
    assert check_answers(world.history) == []


def test_a_call_that_is_safe_to_repeat_arrives_twice() -> None:
    """A settlement does, and changes nothing the second time; a push does not."""

    async def scenario(_: World, link: Link, backend: QueueBackend) -> None:
        link.weather = Weather(doubled=1.0, late_by=1.0)
        await backend.push([message()])
        (claimed,) = (await claim(backend)).messages
        await backend.extend([claimed.receipt], 60.0)
        await asyncio.sleep(5)
        await backend.settle([Settlement(receipt=claimed.receipt, move="complete")])
        await asyncio.sleep(5)

    world = run(scenario)
    assert list_states(world) == ["ready", "claimed", "claimed", "claimed", "completed"]
    assert check_messages(world.history) == []


def test_a_notification_does_not_pass_a_cut() -> None:
    """A waiting caller is notified of a push, unless its link is cut."""

    async def scenario(world: World, link: Link, backend: QueueBackend) -> None:
        rows = link.sql
        assert rows is not None
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(backend.wait(100.0))
            await asyncio.sleep(1)
            link.requests_pass = False
            rows.wake("queue/mails")
            await asyncio.sleep(1)
            assert not waiting.done()
            link.mend()
            rows.wake("queue/mails")
        assert world.loop.time() == pytest.approx(2.0)

    run(scenario)


def test_an_unfinished_message_is_found() -> None:
    """It was acknowledged and not handled by the end."""

    async def scenario(_: World, __: Link, backend: QueueBackend) -> None:
        await backend.push([message()])

    assert len(check_drained(run(scenario).history)) == 1


def test_a_late_redelivery_is_found() -> None:
    """A message whose claim was ended waits for longer than the bound."""

    async def scenario(world: World, _: Link, backend: QueueBackend) -> None:
        await backend.push([message()])
        await claim(backend)
        await asyncio.sleep(31)
        assert [each.state for each in await backend.end_claims()] == ["waiting"]
        await asyncio.sleep(31)
        world.note("", "the end")

    history = run(scenario).history
    assert check_redelivered(history, since=0.0, within=40.0) == []
    assert len(check_redelivered(history, since=0.0, within=20.0)) == 1
    assert check_redelivered(history, since=50.0, within=20.0) == []


def test_a_claim_that_outlives_its_session_is_found() -> None:
    """The claim of a session that has ended stands for longer than the bound."""

    async def scenario(world: World, link: Link, backend: QueueBackend) -> None:
        (record,) = [
            outcome.record
            for outcome in await link.write([Put("session/me", {"state": "live"})])
            if isinstance(outcome, Applied)
        ]
        await backend.push([message()])
        await backend.claim(1, session="me", visibility=30.0)
        await asyncio.sleep(10)
        await link.write([record.replace({"state": "dead"})])
        await asyncio.sleep(31)
        await backend.end_claims()

    history = run(scenario).history
    assert check_orphans(history, since=0.0, within=32.0) == []
    assert [each.invariant for each in check_orphans(history, since=0.0, within=30.0)] == ["QL4"]
    assert check_orphans(history, since=20.0, within=30.0) == []


def test_withheld_calls_do_not_arrive() -> None:
    """One kind of call gets no answer while others do."""

    async def scenario(world: World, link: Link, backend: QueueBackend) -> None:
        await backend.push([message()])
        (claimed,) = (await claim(backend)).messages
        receipt = claimed.receipt
        link.withheld = frozenset(["extend"])
        with pytest.raises(Unavailable):
            await backend.extend([receipt], 30.0)
        assert await backend.settle([Settlement(receipt=receipt, move="complete")]) == [True]

    assert list_states(run(scenario)) == ["ready", "claimed", "completed"]


SET = "messages = json_set(messages, '$[0][{}]', {})"
PUT_BACK = """
INSERT INTO jobsync_message (
  id, queue, state, due, payload, deliveries, max_attempts, suspect, enqueued
)
SELECT low, queue, '{}', 0, CAST(payloads AS TEXT), 1, 2, 1, 0 FROM jobsync_claim;
UPDATE jobsync_claim SET outcomes = 'l', open = 0
"""


def run_sql(statements: str) -> Callable[[sqlite3.Connection], object]:
    """Return work that runs statements."""
    return lambda connection: [connection.execute(each) for each in statements.split(";")]


@pytest.mark.parametrize(
    ("statement", "invariant", "problem"),
    [
        ("UPDATE jobsync_claim SET claim = 'other'", "Q4", "was valid"),
        ("UPDATE jobsync_claim SET due = due + 1", "Q10", "extended by another call"),
        (
            "UPDATE jobsync_claim SET payloads = zeroblob(length(payloads)), due = due + 1",
            "Q2",
            "payload has changed",
        ),
        (f"UPDATE jobsync_claim SET {SET.format(2, 0)}", "Q6", "deliveries decreased"),
        (f"UPDATE jobsync_claim SET {SET.format(4, 9)}", "Q2", "another message"),
        ("DELETE FROM jobsync_claim", "Q1", "lost while it was claimed"),
        (PUT_BACK.format("waiting"), "Q13", "before it lapsed"),
        (PUT_BACK.format("ready"), "Q10", "goes from claimed to ready"),
    ],
)
def test_a_wrong_transition_is_found(statement: str, invariant: str, problem: str) -> None:
    """A change of a claimed message that no call has requested."""

    async def scenario(world: World, link: Link, backend: QueueBackend) -> None:
        await backend.push([message()])
        await claim(backend)
        assert isinstance(link.inner, RowStore)
        # As a node: a transaction without a node counts as one of a person.
        rows = link.inner.rows
        assert isinstance(rows, SqliteRows)
        rows.commit(run_sql(statement), "b")
        # As if it had been part of the latest request.
        done = world.history[-1]
        assert done.node == "b"
        done.details["request"] = max(i for i, o in enumerate(world.history) if o.what == "request")

    found = check_messages(run(scenario).history)
    assert any(each.invariant == invariant and problem in each.detail for each in found)
