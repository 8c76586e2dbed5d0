"""Rows on PostgreSQL that another transaction is about to change: skipped, or waited for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import pytest
from psycopg import AsyncConnection
from queue_locations import PostgresQueues
from servers import PostgresServer
from waiting import until

from jobsync.core.messages import FINISHED, LIVE, Transition
from jobsync.queue.backend import Message, NewMessage, Settlement
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.settings import QueueOrder
from jobsync.queue.single_message import StoredResult
from jobsync.queue.sql.claims import MAX_CLAIM_BYTES
from jobsync.queue.sql.message_rows import encode_payloads
from jobsync.queue.sql.postgres import PostgresBackend
from jobsync.queue.sql.postgres_places import run_steps
from jobsync.queue.transaction_backend import TransactionBackend

ME = "worker-1.a"
ONE_AT_A_TIME = QueueLimits(max_concurrency=1)

Other = AsyncConnection[Any]
"""Of another process, in a transaction."""


class Stage(NamedTuple):
    """Backends of one queue, in two processes."""

    location: PostgresQueues
    backend: PostgresBackend
    elsewhere: PostgresBackend

    @property
    def transactions(self) -> TransactionBackend:
        """Those of handlers."""
        assert self.backend.transactions is not None
        return self.backend.transactions


Open = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def open_stage(postgres: PostgresServer) -> AsyncIterator[Open]:
    """Opens a queue in an empty schema."""
    location = PostgresQueues(postgres.url)

    async def open_stage(order: QueueOrder = "fifo", limits: QueueLimits = NO_LIMITS) -> Stage:
        backends = [await location.open("emails", None, order, limits) for _ in range(2)]
        assert isinstance(backends[0], PostgresBackend)
        assert isinstance(backends[1], PostgresBackend)
        return Stage(location, backends[0], backends[1])

    yield open_stage
    await location.close()


@pytest.fixture
async def other(postgres: PostgresServer) -> AsyncIterator[Other]:
    """A connection that begins a transaction by its first statement."""
    async with await AsyncConnection.connect(postgres.url) as connection:
        yield connection


async def run_beside(
    other: Other, location: PostgresQueues, work: Coroutine[Any, Any, Any]
) -> tuple[Any, bool]:
    """Run something until it ends or waits for the other transaction, which is then committed.

    Returns:
        Its result, and whether it has waited.
    """
    running = asyncio.create_task(work)
    number = other.info.backend_pid
    blocked = f"SELECT 1 FROM pg_stat_activity WHERE {number} = ANY (pg_blocking_pids(pid))"
    await until(lambda: running.done() or location.execute(blocked), "it ends or waits")
    has_waited = not running.done()
    await other.commit()
    return await running, has_waited


def new_messages(*names: str, **options: Any) -> list[NewMessage]:
    """Return messages with these ids."""
    options = {"max_attempts": 4, **options}
    return [NewMessage(id=name, value={"n": name}, **options) for name in names]


async def claim(backend: PostgresBackend, limit: int = 10, **options: Any) -> list[Message]:
    """Claim as `ME` for a minute."""
    claimed = await backend.claim(limit, session=ME, visibility=60, **options)
    return claimed.messages


async def settle(backend: PostgresBackend, move: Transition, *messages: Message) -> list[bool]:
    """Settle claims in one way."""
    return await backend.settle([Settlement(receipt=each.receipt, move=move) for each in messages])


async def read_states(backend: PostgresBackend) -> dict[str, str]:
    """Return the states of all messages."""
    found = [info for state in (*LIVE, *FINISHED) for info in await backend.browse(state)]
    return {info.id: info.state for info in found}


# What leaves rows alone that others have locked. Each prepares `a` and `b` in different rows of a
# table, and returns the table and what treats both.

Skipping = tuple[str, Callable[[], Coroutine[Any, Any, Any]], Any]
"""A table, what is done, and its result for one row."""


async def claim_apart(stage: Stage) -> None:
    """Claim each message by a claim of its own."""
    await stage.backend.push(new_messages(*"ab"))
    assert [len(await claim(stage.backend, 1)) for _ in "ab"] == [1, 1]


async def end_claims(stage: Stage) -> Skipping:
    """Claims of a dead session."""
    await claim_apart(stage)

    async def work() -> list[str]:
        return [ended.id for ended in await stage.backend.end_claims({ME})]

    return "jobsync_claim", work, ["b"]


async def bury_both(stage: Stage) -> None:
    """Make both dead letters."""
    await stage.backend.push(new_messages(*"ab"))
    await settle(stage.backend, "bury", *await claim(stage.backend))


async def redrive(stage: Stage) -> Skipping:
    """Dead letters."""
    await bury_both(stage)
    return "jobsync_finished", stage.backend.redrive, 1


async def forget_dead(stage: Stage) -> Skipping:
    """Old dead letters."""
    await bury_both(stage)
    stage.location.advance(60)

    async def work() -> int:
        return await stage.backend.forget("dead", older_than=30)

    return "jobsync_finished", work, 1


async def forget_completed(stage: Stage) -> Skipping:
    """Claims whose messages were completed long ago."""
    await stage.backend.push(new_messages(*"ab"))
    for _ in "ab":
        await settle(stage.backend, "complete", *await claim(stage.backend, 1))
    stage.location.advance(60)

    async def work() -> int:
        return await stage.backend.forget("completed", older_than=30)

    return "jobsync_claim", work, 1


async def forget_in_open_claims(stage: Stage) -> Skipping:
    """Claims of which one message was completed long ago, and one is in work."""
    await stage.backend.push(new_messages("a", "a2", "b", "b2"))
    for _ in "ab":
        await settle(stage.backend, "complete", (await claim(stage.backend, 2))[0])
    stage.location.advance(60)

    async def work() -> int:
        return await stage.backend.forget("completed", older_than=30)

    return "jobsync_claim", work, 1


SKIPPING = [end_claims, redrive, forget_dead, forget_completed, forget_in_open_claims]


@pytest.mark.parametrize("prepare", SKIPPING)
async def test_rows_that_others_have_locked_are_left_to_them(
    open_stage: Open, other: Other, prepare: Callable[[Stage], Awaitable[Skipping]]
) -> None:
    """Nobody waits for them; they are treated the next time."""
    stage = await open_stage()
    table, work, expected = await prepare(stage)
    is_first = "id = 'a'" if table == "jobsync_finished" else "'a' = ANY (ids)"
    await lock(other, stage, table, is_first)
    assert await run_beside(other, stage.location, work()) == (expected, False)
    again = await work()
    assert again in (1, ["a"])


async def lock(other: Other, stage: Stage, table: str, condition: str) -> None:
    """Lock rows in the other transaction."""
    ((schema,),) = stage.location.execute("SELECT '{}'")
    statement = f"SELECT 1 FROM {schema}.{table} WHERE {condition} FOR UPDATE"
    cursor = await other.execute(statement.encode())
    assert len(await cursor.fetchall()) == 1


CLAIMED: dict[str, tuple[QueueOrder, dict[str, Any]]] = {
    "new": ("fifo", {}),
    "delayed": ("fifo", {"delay": 1}),
    "ranked by others": ("fifo", {"priority": 1}),
    "newest first": ("lifo", {}),
    "newest first, delayed": ("lifo", {"delay": 1}),
    "newest first, ranked by others": ("lifo", {"priority": 1}),
    "above 0": ("priority", {"priority": 1}),
    "without a priority": ("priority", {}),
    "below 0": ("priority", {"priority": -1}),
    "by priority, delayed": ("priority", {"priority": 1, "delay": 1}),
    "of a task": ("fifo", {"task": "send"}),
    "of a task, delayed": ("fifo", {"task": "send", "delay": 1}),
    "of a task, newest first, delayed": ("lifo", {"task": "send", "delay": 1}),
}


@pytest.mark.parametrize(("order", "options"), CLAIMED.values(), ids=CLAIMED)
async def test_a_claim_leaves_messages_that_others_have_locked(
    open_stage: Open, other: Other, order: QueueOrder, options: dict[str, Any]
) -> None:
    """It never waits for them, in whatever order it looks for messages."""
    stage = await open_stage(order)
    await stage.backend.push(new_messages(*"ab", **options))
    stage.location.advance(2)
    tasks = [options["task"]] if "task" in options else None
    await lock(other, stage, "jobsync_message", "id = 'a'")
    work = claim(stage.backend, tasks=tasks)
    found, has_waited = await run_beside(other, stage.location, work)
    assert ([each.id for each in found], has_waited) == (["b"], False)
    assert [each.id for each in await claim(stage.elsewhere, tasks=tasks)] == ["a"]


# What waits for others. One claim has `a` and `b`, and another transaction completes `a`.


class Claimed(NamedTuple):
    """The messages of one claim."""

    stage: Stage
    a: Message
    b: Message


class Waiting(NamedTuple):
    """What is done to the claim meanwhile, and what becomes of it."""

    work: Callable[[Claimed], Coroutine[Any, Any, Any]]
    result: Any
    b: str
    """The state of `b`; `a` is completed."""


async def complete_with_result(stage: Stage, message: Message) -> list[bool]:
    """Complete a message whose handler has returned something."""
    result = StoredResult("1")
    batch = [Settlement(receipt=message.receipt, move="complete", result=result)]
    return await stage.backend.settle(batch)


async def cancel(stage: Stage, name: str) -> str | None:
    """Cancel a message from outside; return its session."""
    ended = await stage.backend.cancel(name)
    return None if ended is None else ended.session


WAITING = {
    "complete the other": Waiting(
        lambda it: settle(it.stage.backend, "complete", it.b), [True], "completed"
    ),
    "complete both": Waiting(
        lambda it: settle(it.stage.backend, "complete", it.a, it.b), [True, True], "completed"
    ),
    "complete both, of which it knows nothing yet": Waiting(
        lambda it: settle(it.stage.elsewhere, "complete", it.a, it.b), [True, True], "completed"
    ),
    "complete the other with a result": Waiting(
        lambda it: complete_with_result(it.stage, it.b), [True], "completed"
    ),
    "retry the other": Waiting(
        lambda it: settle(it.stage.backend, "retry", it.b), [True], "waiting"
    ),
    "retry both": Waiting(
        lambda it: settle(it.stage.backend, "retry", it.a, it.b), [False, True], "waiting"
    ),
    "extend both": Waiting(
        lambda it: it.stage.backend.extend([it.a.receipt, it.b.receipt], 90),
        [False, True],
        "claimed",
    ),
    "cancel it": Waiting(lambda it: cancel(it.stage, "a"), None, "claimed"),
    "cancel the other": Waiting(lambda it: cancel(it.stage, "b"), ME, "cancelled"),
    "purge what is claimed": Waiting(lambda it: it.stage.backend.purge(["claimed"]), 1, ""),
    "read what became of it": Waiting(
        lambda it: it.stage.transactions.read_outcome(it.a.receipt),
        "completed",
        "claimed",
    ),
}


@pytest.mark.parametrize("case", WAITING.values(), ids=WAITING)
async def test_a_claim_is_changed_as_others_have_left_it(
    open_stage: Open, other: Other, case: Waiting
) -> None:
    """What its row was before they committed is not written back, and decides nothing."""
    stage = await open_stage()
    await stage.elsewhere.push(new_messages(*"ab"))
    a, b = await claim(stage.elsewhere)
    assert await stage.transactions.complete_within(other, a.receipt)
    work = case.work(Claimed(stage, a, b))
    assert await run_beside(other, stage.location, work) == (case.result, True)
    expected = {"a": "completed", "b": case.b} if case.b else {"a": "completed"}
    assert await read_states(stage.backend) == expected
    assert await stage.backend.count() == _count(expected)


def _count(states: dict[str, str]) -> dict[str, int]:
    found = list(states.values())
    return {state: found.count(state) for state in found}


async def test_a_claim_that_is_extended_twice_at_once_keeps_the_longer_time(
    open_stage: Open, other: Other
) -> None:
    """Each extension of one of its messages leaves those of the others."""
    stage = await open_stage()
    await stage.backend.push(new_messages(*"ab"))
    a, b = await claim(stage.backend)
    statement = stage.backend._sql["extend"].encode()
    columns = {"ids": ["a"], "claims": [a.receipt.claim], "distinct": [a.receipt.claim]}
    await other.execute(statement, {**columns, "visibility": 3600.0})
    work = stage.backend.extend([b.receipt], 1800)
    assert await run_beside(other, stage.location, work) == ([True], True)
    dues = {info.id: info.due or 0.0 for info in await stage.backend.browse("claimed")}
    assert dues["a"] - dues["b"] > 900


async def test_a_message_that_is_added_while_the_head_of_its_group_ends_becomes_the_head(
    open_stage: Open, other: Other
) -> None:
    """Who ends the head waits for those who add to the group."""
    stage = await open_stage()
    await stage.backend.push(new_messages("a", group="g"))
    (head,) = await claim(stage.backend)
    added = new_messages("b", group="g")
    await run_steps(other, stage.elsewhere._places.push(added, encode_payloads(added)))
    work = settle(stage.backend, "complete", head)
    assert await run_beside(other, stage.location, work) == ([True], True)
    assert [each.id for each in await claim(stage.backend)] == ["b"]


async def test_claims_at_the_same_time_count_each_other(open_stage: Open, other: Other) -> None:
    """Under a limit the next claim waits for the one before, and counts its messages."""
    stage = await open_stage(limits=ONE_AT_A_TIME)
    await stage.backend.push(new_messages(*"abc"))
    await settle(stage.backend, "complete", *await claim(stage.backend))
    parameters = {
        "queue": "emails",
        "claim": "1",
        "session": ME,
        "visibility": 60.0,
        "limit": 10,
        "suspects": False,
        "max_bytes": MAX_CLAIM_BYTES,
        "floor": 0,
        "since": None,
    }
    steps = stage.elsewhere._places.claim("claim", ONE_AT_A_TIME, (), parameters)
    rows, *_ = await run_steps(other, steps)
    assert [row[6] for row in rows] == ["b"]
    assert await run_beside(other, stage.location, claim(stage.backend)) == ([], True)
    assert await read_states(stage.backend) == {"a": "completed", "b": "claimed", "c": "ready"}


async def test_a_key_that_is_taken_over_while_old_ones_are_removed_is_held(
    open_stage: Open, other: Other
) -> None:
    """By the message that came later: its push is committed while the removal waits."""
    stage = await open_stage()
    await stage.backend.push(new_messages("a", key="k"))
    await settle(stage.backend, "complete", *await claim(stage.backend))
    added = new_messages("b", key="k")
    await run_steps(other, stage.elsewhere._places.push(added, encode_payloads(added)))
    seen, has_waited = await run_beside(
        other, stage.location, stage.backend.forget_keys(after="", limit=10)
    )
    assert (seen.removed, has_waited) == (0, True)
    assert await stage.backend.push(new_messages("c", key="k")) == {"c": "b"}


async def test_a_key_whose_time_begins_again_while_old_ones_are_removed_is_held(
    open_stage: Open, other: Other
) -> None:
    """By the same message, which was replaced: only its time is another one."""
    stage = await open_stage()
    (first,) = new_messages("a", key="k", key_ttl=60, delay=60)
    await stage.backend.push([first])
    stage.location.execute("UPDATE {}.jobsync_key SET held_until = clock_timestamp()")
    holder = {"keys": ["k"], "ids": ["a"], "ttls": [60.0], "queue": "emails"}
    await other.execute(stage.elsewhere._sql["take_keys"].encode(), holder)
    seen, has_waited = await run_beside(
        other, stage.location, stage.backend.forget_keys(after="", limit=10)
    )
    assert (seen.removed, has_waited) == (0, True)
    assert await stage.backend.push(new_messages("c", key="k", key_ttl=60)) == {"c": "a"}
