"""Plain handlers that enqueue: `enqueue_sync` blocks, and a call that nobody awaits fails."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jobsync import (
    Context,
    Database,
    Document,
    MessageInfo,
    NoResult,
    QueuePlugin,
    Resource,
)

LONG = 60.0


async def handle_one(
    database: Database, handler: Callable[[Document], object]
) -> tuple[MessageInfo, list[str]]:
    """Return what became of a message, and the ids of those that its handler has enqueued."""
    queue = QueuePlugin(resource="tasks", on_message=handler, max_retries=0)
    await database.use_plugin(queue)
    name = await queue.enqueue({})
    with suppress(NoResult):
        await queue.result(name, timeout=LONG)
    found = await queue.get(name)
    assert found is not None
    return found, await database.resources.plg_default_following_queue.list_ids()


async def test_a_plain_handler_enqueues_with_enqueue_sync() -> None:
    """It blocks until the message is stored."""
    following = QueuePlugin(resource="following")
    async with Database("memory://", plugins=[following]) as database:

        def handle(_: Document) -> list[str]:
            one = database.resources.following.enqueue_sync({})
            return [one, *following.enqueue_many_sync([{}, {}])]

        message, names = await handle_one(database, handle)
        assert message.state == "completed"
        assert sorted(message.result) == sorted(names)
        assert len(names) == 3


async def test_a_plain_handler_that_forgot_to_await_has_failed() -> None:
    """The error has the fix; before, it counted as completed, and the message was lost."""
    async with Database("memory://", plugins=[QueuePlugin(resource="following")]) as database:

        def handle(_: Document) -> None:
            database.resources.following.enqueue({})  # type: ignore[unused-coroutine]

        message, names = await handle_one(database, handle)
        assert (message.state, names) == ("dead", [])
        (failure,) = message.errors
        assert "Resource.enqueue" in failure.error
        assert "never awaited" in failure.error
        assert "Call enqueue_sync, or write the function as async def." in failure.error


async def test_plain_handlers_may_run_loops_of_their_own() -> None:
    """And return what is awaited later: nothing of that is forgotten."""
    handled: list[str] = []

    def handle(_: Document, context: Context) -> Any:
        later: Resource = database.resources.following
        first = asyncio.run(later.enqueue({}))
        handled.append(first)
        assert context.attempt == 1
        return later.enqueue({})

    following = QueuePlugin(resource="following")
    queue = QueuePlugin(resource="tasks", on_message=handle, max_retries=0)
    async with Database("memory://", plugins=[following, queue]) as database:
        name = await queue.enqueue({})
        handled.append(await queue.result(name, timeout=LONG))
        assert len(set(handled)) == await following.count() == 2
