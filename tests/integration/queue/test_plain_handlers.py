"""Plain handlers that enqueue: `enqueue_sync` blocks, and a call that nobody awaits fails."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from waiting import until

from jobsync import (
    Context,
    Database,
    Document,
    Invalid,
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
        assert sorted(message.result or []) == sorted(names)
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


async def test_a_plain_task_enqueues_another_one() -> None:
    """With `enqueue_sync` of the task, which is typed as the function is."""
    tasks = QueuePlugin("tasks", max_retries=0)

    @tasks.task
    def add(one: int, two: int = 1) -> int:
        return one + two

    @tasks.task
    def start(one: int) -> list[int]:
        handles = [add.enqueue_sync(one), *add.enqueue_many_sync([{"one": one, "two": 5}])]
        delayed = add.with_options(delay=LONG).enqueue_sync(one)
        assert delayed.cancel_sync()
        return [handle.result_sync(timeout=LONG) for handle in handles]

    @tasks.task
    def forget(one: int) -> None:
        add.enqueue(one)  # type: ignore[unused-coroutine]

    async with Database("memory://", plugins=[tasks]):
        handle = await start.enqueue(2)
        assert await handle.result(timeout=LONG) == [3, 7]
        with pytest.raises(Invalid, match="would block the event loop"):
            add.enqueue_sync(1)
        with pytest.raises(NoResult, match="enqueue_sync, or write the function as async def"):
            await (await forget.enqueue(1)).result(timeout=LONG)


async def test_tasks_are_enqueued_from_other_loops() -> None:
    """Their handles may be awaited there, too."""
    tasks = QueuePlugin("tasks")

    @tasks.task
    async def add(one: int) -> int:
        return one + 1

    async def use() -> int:
        return await (await add.enqueue(1)).result(timeout=LONG)

    async with Database("memory://", plugins=[tasks]):
        assert await asyncio.to_thread(asyncio.run, use()) == 2


@pytest.mark.parametrize("who", ["the program", "a handler"])
async def test_a_drain_runs_functions_beside_one_that_does_not_end(who: str) -> None:
    """Each of its messages is handled, once: they do not wait for a thread until they are dead."""
    may_end, begun, handled = threading.Event(), threading.Event(), list[int]()
    async with Database("memory://") as database:
        loop = asyncio.get_running_loop()

        def handle(message: Document) -> None:
            handled.append(message.n)
            if message.n:
                return
            begun.set()
            if who == "a handler":
                assert asyncio.run_coroutine_threadsafe(queue.drain(), loop).result(LONG) == 2
            else:
                assert may_end.wait(LONG)

        is_late = who == "the program"
        queue = QueuePlugin(
            resource="tasks",
            on_message=handle,
            workers=1,
            prefetch=0,
            timeout=0.3 if is_late else LONG,
            max_retries=0,
        )
        await database.use_plugin(queue)
        await queue.enqueue_many([{"n": n} for n in range(3)])
        await until(begun.is_set, "the function has begun")
        if is_late:
            await until(queue.stuck, "its time is over")
            assert await queue.drain() == 2
        may_end.set()
        await until(lambda: sum(queue.stats()[end] for end in ("completed", "dead")) == 3)
        assert queue.stats()["dead"] == is_late
    assert sorted(handled) == [0, 1, 2]
