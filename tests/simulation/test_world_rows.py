"""Rows in the simulated world: what a node's transactions come to, and what is noted of them."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jobsync import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.backend import ClaimResult, NewMessage, QueueBackend, Settlement
from jobsync.queue.sql import open_backend
from jobsync.testing import (
    Link,
    RecordingBackend,
    RowStore,
    Weather,
    World,
    check_answers,
    check_drained,
    check_messages,
    check_redelivered,
)

Deed = Callable[[World, Link, QueueBackend], Awaitable[Any]]


def live(deed: Deed) -> World:
    """Let something be done on a node with a queue; give the world in which it was."""
    world = World(0)
    node, store = world.node("a"), RowStore(world)
    link = Link(world, node, store)
    port = RecordingBackend(node, open_backend(link, "mails", node.components))
    world.run(lambda: deed(world, link, port))
    return world


def letter(name: str = "one", **options: Any) -> NewMessage:
    """Give a message to push."""
    return NewMessage(id=name, value={"to": name}, **{"max_attempts": 2, **options})


def states(world: World) -> list[str]:
    """Give the states in the history, in order."""
    return [each.details["state"] for each in world.history if each.what == "row"]


async def claim(port: QueueBackend, **options: Any) -> ClaimResult:
    """Claim what there is."""
    return await port.claim(10, session="me", visibility=30.0, **options)


def test_every_commit_stands_in_the_history() -> None:
    """A message is noted as each commit left it, with its question."""

    async def deed(_: World, __: Link, port: QueueBackend) -> None:
        await port.push([letter()])
        (message,) = (await claim(port)).messages
        await port.extend([message.receipt], 60.0)
        await port.settle([Settlement(receipt=message.receipt, move="complete")])
        await port.forget("completed", older_than=0.0)

    world = live(deed)
    assert states(world) == ["ready", "claimed", "claimed", "completed", "gone"]
    rows = [each for each in world.history if each.what == "row"]
    asked = [world.history[each.details["request"]].details["call"] for each in rows]
    assert asked == ["push", "claim", "extend", "settle", "forget"]
    assert check_messages(world.history) + check_answers(world.history) == []


def test_a_transaction_that_fails_leaves_nothing() -> None:
    """Neither in the database nor in the history."""

    async def deed(_: World, link: Link, port: QueueBackend) -> None:
        await port.push([letter()])
        with pytest.raises(Misconfigured, match="UNIQUE"):
            await port.push([letter("two"), letter()])
        assert await port.count() == {"ready": 1}

    assert states(live(deed)) == ["ready"]


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
def test_weather(weather: Weather, error: type[Exception], arrives: bool) -> None:
    """What is told of a push, and what became of it in the end."""

    async def deed(_: World, link: Link, port: QueueBackend) -> None:
        link.weather = weather
        with pytest.raises(error):
            await port.push([letter()])
        await asyncio.sleep(1e4)

    world = live(deed)
    assert states(world) == (["ready"] if arrives else [])
    assert check_answers(world.history) == []


def test_what_may_be_repeated_arrives_twice() -> None:
    """A settlement does, and changes nothing the second time; a push does not."""

    async def deed(_: World, link: Link, port: QueueBackend) -> None:
        link.weather = Weather(doubled=1.0, late_by=1.0)
        await port.push([letter()])
        (message,) = (await claim(port)).messages
        await port.extend([message.receipt], 60.0)
        await asyncio.sleep(5)
        await port.settle([Settlement(receipt=message.receipt, move="complete")])
        await asyncio.sleep(5)

    world = live(deed)
    assert states(world) == ["ready", "claimed", "claimed", "claimed", "completed"]
    assert check_messages(world.history) == []


def test_a_hint_does_not_pass_a_cut() -> None:
    """Whoever waits is told of a push, unless its link is cut."""

    async def deed(world: World, link: Link, port: QueueBackend) -> None:
        rows = link.sql
        assert rows is not None
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(port.wait(100.0))
            await asyncio.sleep(1)
            link.requests_pass = False
            rows.wake("queue/mails")
            await asyncio.sleep(1)
            assert not waiting.done()
            link.mend()
            rows.wake("queue/mails")
        assert world.loop.time() == pytest.approx(2.0)

    live(deed)


def test_a_message_that_is_left_is_found() -> None:
    """One that was acknowledged and is still to be handled, after everything has been."""

    async def deed(_: World, __: Link, port: QueueBackend) -> None:
        await port.push([letter()])

    assert len(check_drained(live(deed).history)) == 1


def test_a_claim_that_nobody_follows_up_is_found() -> None:
    """A message whose claim was ended waits for longer than was stated."""

    async def deed(world: World, _: Link, port: QueueBackend) -> None:
        await port.push([letter()])
        await claim(port)
        await asyncio.sleep(31)
        assert [each.state for each in await port.end_claims()] == ["waiting"]
        await asyncio.sleep(31)
        world.note("", "the end")

    history = live(deed).history
    assert check_redelivered(history, since=0.0, within=40.0) == []
    assert len(check_redelivered(history, since=0.0, within=20.0)) == 1
    assert check_redelivered(history, since=50.0, within=20.0) == []


def run_sql(statement: str) -> Callable[[sqlite3.Connection], object]:
    """Give work that runs one statement."""
    return lambda connection: connection.execute(statement)


@pytest.mark.parametrize(
    ("statement", "invariant", "problem"),
    [
        ("UPDATE jobsync_message SET claim = 'other'", "Q4", "was alive"),
        ("UPDATE jobsync_message SET due = due + 1", "Q10", "nobody asked to extend"),
        ("UPDATE jobsync_message SET payload = '1', due = due + 1", "Q2", "payload has changed"),
        ("UPDATE jobsync_message SET deliveries = 0", "Q6", "deliveries went back"),
        ("UPDATE jobsync_message SET max_attempts = 9", "Q2", "another message"),
        ("DELETE FROM jobsync_message", "Q1", "lost while it was claimed"),
        ("UPDATE jobsync_message SET state = 'waiting', suspect = 1", "Q13", "before it lapsed"),
        ("UPDATE jobsync_message SET state = 'ready'", "Q10", "goes from claimed to ready"),
    ],
)
def test_what_must_not_be_is_found(statement: str, invariant: str, problem: str) -> None:
    """A change of a claimed message that nobody has asked for."""

    async def deed(world: World, link: Link, port: QueueBackend) -> None:
        await port.push([letter()])
        await claim(port)
        assert isinstance(link.inner, RowStore)
        # On a node's behalf: what nobody's transaction does is a person's doing.
        link.inner.rows.commit(run_sql(statement), "b")
        # As if it had been part of the latest question.
        done = world.history[-1]
        assert done.node == "b"
        done.details["request"] = max(i for i, o in enumerate(world.history) if o.what == "request")

    found = check_messages(live(deed).history)
    assert any(each.invariant == invariant and problem in each.detail for each in found)
