"""Plain handlers that enqueue: `enqueue_sync` blocks, and a call that nobody awaits fails."""

import asyncio
from typing import Any

import pytest

from jobsync import Context, Database, Document, QueuePlugin, Resource

LONG = 60.0


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_what_a_plain_handler_enqueues_is_stored_or_it_fails(is_awaited: bool) -> None:
    """A handler that forgot to await has failed, with the fix; nothing counts as completed."""
    following = QueuePlugin(resource="following")
    database = Database("memory://", plugins=[following])

    def handle(_: Document) -> str | None:
        later = database.resources.following
        if is_awaited:
            return later.enqueue_sync({})
        later.enqueue({})  # type: ignore[unused-coroutine]
        return None

    queue = QueuePlugin(resource="tasks", on_message=handle, max_retries=0)
    await asyncio.wait_for(run(database, queue), LONG)


async def run(database: Database, queue: QueuePlugin) -> None:
    """Handle one message, and check what became of it."""
    async with database:
        await database.use_plugin(queue)
        name = await queue.enqueue({})
        found = await queue.get(name)
        while found is not None and found.finished is None:
            await asyncio.sleep(0.01)
            found = await queue.get(name)
        assert found is not None
        if found.state == "completed":
            assert await database.resources.plg_default_following_queue.list_ids() == [found.result]
        else:
            (failure,) = found.errors
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
