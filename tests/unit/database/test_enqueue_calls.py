"""The calls of a resource that enqueue: to which queue, with which options, on which event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from jobsync import Database, Invalid, Resource


class Queue:
    """Notes what is enqueued to it, and on which event loop."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.calls: list[tuple[str, list[Any], dict[str, Any]]] = []
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def enqueue_many(self, data: Sequence[Any], **options: Any) -> list[str]:
        """Enqueue nothing."""
        self.calls.append(("enqueue", list(data), options))
        self.loops.append(asyncio.get_running_loop())
        return [f"id {n}" for n in range(len(data))]

    def check_messages(self, data: Sequence[Any], **options: Any) -> None:
        """Check nothing."""
        self.calls.append(("check", list(data), options))


@pytest.fixture
async def tasks() -> AsyncIterator[Resource]:
    """A resource without a queue."""
    async with Database("memory://") as database:
        yield await database.create_resource("tasks")


async def call(tasks: Resource, verb: str, **options: Any) -> Any:
    """Enqueue or check a message by one of the calls."""
    record = {"id": "a", "n": 1}
    if verb == "check_messages":
        return tasks.check_messages([record], **options)
    data: Any = [record] if "many" in verb else record
    method = getattr(tasks, verb)
    if verb.endswith("_sync"):
        return await asyncio.to_thread(method, data, **options)
    return await method(data, **options)


VERBS = ["enqueue", "enqueue_many", "enqueue_sync", "enqueue_many_sync", "check_messages"]


@pytest.mark.parametrize("verb", VERBS)
async def test_every_call_goes_to_the_chosen_queue_with_all_options(
    tasks: Resource, verb: str
) -> None:
    """The only queue needs no choice; one that is not there is never replaced by another."""
    with pytest.raises(Invalid, match=r"has no queue in this process .*'tasks'"):
        await call(tasks, verb)
    slow, fast = Queue("slow"), Queue("fast")
    options: dict[str, Any] = {"delay": 5, "priority": 3, "key": "k", "connection": None}
    what = "check" if verb == "check_messages" else "enqueue"
    expected = (what, [{"id": "a", "n": 1}], options)
    result: Any = {"check": None, "enqueue": "id 0"}[what]
    result = [result] if "many" in verb else result
    tasks.add_queue(slow)
    for namespace in (None, "slow"):
        assert await call(tasks, verb, namespace=namespace, **options) == result
    with pytest.raises(Invalid, match=r"which has slow in this process .*'fast'.*namespace='slow'"):
        await call(tasks, verb, namespace="fast", **options)
    tasks.add_queue(fast)
    assert await call(tasks, verb, namespace="slow", **options) == result
    for namespace in (None, "", "other"):
        with pytest.raises(Invalid, match=r"has fast and slow in this process"):
            await call(tasks, verb, namespace=namespace, **options)
    assert (slow.calls, fast.calls) == ([expected] * 3, [])
    assert await call(tasks, verb, namespace="fast", **options) == result
    again = Queue("fast")
    tasks.add_queue(again)
    assert await call(tasks, verb, namespace="fast", **options) == result
    assert (len(slow.calls), fast.calls, again.calls) == (3, [expected], [expected])
    # Without a connection of the caller's, all of it runs where the database lives.
    assert {*slow.loops, *fast.loops, *again.loops} <= {asyncio.get_running_loop()}


@pytest.mark.parametrize("verb", ["enqueue_sync", "enqueue_many_sync"])
async def test_the_callers_connection_is_used_on_its_own_thread(tasks: Resource, verb: str) -> None:
    """Its transaction belongs to that thread."""
    queue = Queue("default")
    tasks.add_queue(queue)
    await call(tasks, verb, connection=object())
    assert queue.loops != [asyncio.get_running_loop()]
