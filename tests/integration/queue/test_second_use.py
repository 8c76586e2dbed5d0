"""Whatever became of its first use, a queue handles messages again as if it were new."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from servers import Locate
from waiting import until

from jobsync import Context, Database, Document, QueuePlugin


class Stage:
    """A queue whose handler is a coroutine function, or a plain one that runs on threads."""

    def __init__(self, url: str, kind: str) -> None:
        self.seen: list[tuple[int, int]] = []
        """The number of each message that was handled, and its attempt."""
        self.database = Database(url)
        self.is_busy = threading.Event()
        """Set while a handler works that ends only when `may_end` is set, or it is cut short."""
        self.may_end = threading.Event()
        handler = {"coroutine": self.handle, "function": self.handle_on_a_thread}[kind]
        self.queue = QueuePlugin(resource="tasks", on_message=handler, concurrency=2, grace=5)

    async def handle(self, task: Document, context: Context) -> None:
        """Handle a message."""
        self.is_busy.set()
        await until(lambda: task.n or self.may_end.is_set(), "the handler may end")
        self.seen.append((task.n, context.attempt))

    def handle_on_a_thread(self, task: Document, context: Context) -> None:
        """Handle a message."""
        self.is_busy.set()
        assert task.n or self.may_end.wait(60)
        self.seen.append((task.n, context.attempt))

    async def handle_all(self, *numbers: int) -> None:
        """Enqueue messages, and wait until each was handled."""
        await self.queue.enqueue_many([{"n": n} for n in numbers])
        await until(lambda: {n for n, _ in self.seen} >= {*numbers}, "all are handled")

    async def begin(self) -> None:
        """Begin a message that does not end by itself."""
        await self.queue.enqueue({"n": 0})
        await until(self.is_busy.is_set, "it is begun")


async def stop(stage: Stage) -> None:
    """Stop in order while a handler works."""
    await stage.begin()
    stopping = asyncio.create_task(stage.queue.stop())
    await asyncio.sleep(0)
    stage.may_end.set()
    await stopping
    await stage.queue.start()


async def stop_idle(stage: Stage) -> None:
    """Stop twice after all messages were handled."""
    await stage.handle_all(1, 2, 3)
    for _ in range(2):
        await stage.queue.stop()
        await stage.queue.start()


async def cancel_stop(stage: Stage) -> None:
    """Cancel a stop that waits for a handler, and stop again."""
    await stage.begin()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await stage.queue.stop()
    stage.may_end.set()
    await stage.queue.stop()
    await stage.queue.start()


async def reconnect(stage: Stage) -> None:
    """Disconnect in order, and connect."""
    await stage.handle_all(1)
    await stage.database.disconnect()
    await stage.database.connect()


async def disconnect_in_a_hurry(stage: Stage) -> None:
    """Disconnect while a handler works that does not end in time."""
    await stage.begin()
    await stage.database.disconnect(within=0.2)
    stage.may_end.set()
    await stage.database.connect()


async def fail(stage: Stage) -> None:
    """Background work of the queue raises, so that the database fails."""
    await stage.handle_all(1)

    async def work() -> None:
        raise ZeroDivisionError

    def has_failed() -> bool:
        try:
            _ = stage.database.store
        except ZeroDivisionError:
            return True
        return False

    stage.queue.run_in_background(work)
    await until(has_failed, "the database has failed")
    await stage.database.disconnect()
    await stage.database.connect()


async def drain(stage: Stage) -> None:
    """Handle all messages in the caller's task."""
    await stage.queue.enqueue_many([{"n": 1}, {"n": 2}])
    await stage.queue.drain()


async def pause(stage: Stage) -> None:
    """Pause, stop and start: it claims nothing before it is resumed."""
    stage.queue.pause()
    await stage.queue.enqueue({"n": 1})
    await stage.queue.stop()
    await stage.queue.start()
    # A worker that starts later finds its message, so that this one would have.
    later = QueuePlugin(resource="others", on_message=lambda _: None)
    await stage.database.use_plugin(later)
    await later.enqueue({})
    await until(lambda: later.stats()["completed"] == 1, "the other queue works")
    assert await stage.queue.count() == 1
    assert stage.seen == []
    stage.queue.resume()


FIRST_USES = [
    stop,
    stop_idle,
    cancel_stop,
    reconnect,
    disconnect_in_a_hurry,
    fail,
    drain,
    pause,
]


@pytest.mark.parametrize(
    ("store", "kind"),
    [("sqlite", "function"), ("postgres", "coroutine")],
    ids=["sqlite", "postgres"],
)
@pytest.mark.parametrize("first_use", FIRST_USES, ids=lambda use: use.__name__)
async def test_a_used_queue_is_as_good_as_new(
    locate: Locate, store: str, kind: str, first_use: Callable[[Stage], Awaitable[None]]
) -> None:
    """Messages are handled at their first attempt, as many at once as before, and it can end."""
    stage = Stage(locate(store), kind)
    await stage.database.use_plugin(stage.queue)
    await stage.database.connect()
    await first_use(stage)
    stage.seen.clear()
    await stage.handle_all(*range(10, 20))
    assert sorted(stage.seen)[-10:] == [(n, 1) for n in range(10, 20)]
    assert stage.queue.is_running
    assert stage.database.unready() == []
    await stage.database.disconnect()
    assert not stage.queue.is_running
