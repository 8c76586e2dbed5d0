"""One database that several event loops and threads use, on every store alike."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import servers

from jobsync import Database, QueuePlugin, Resource, Unavailable

THREADS = 8
EACH = 5


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def database(
    request: pytest.FixtureRequest, locate: servers.Locate, queue: QueuePlugin
) -> Database:
    """A database with a queue, on each kind of store; not connected."""
    return Database(locate(request.param), plugins=[queue], work=False)


@pytest.fixture
def queue() -> QueuePlugin:
    """The queue of the database."""
    return QueuePlugin(resource="tasks")


async def test_several_loops_enqueue_and_read_at_once(
    database: Database, queue: QueuePlugin
) -> None:
    """Each call runs on the loop of the database, and its caller gets the result."""

    async def use(number: int) -> list[str]:
        tasks, notes = database.resources.tasks, database.resources.notes
        await notes.insert({"id": str(number)})
        assert (await notes.get(str(number))).id == str(number)  # type: ignore[union-attr]
        assert str(number) in [note.id async for note in notes]
        return [await tasks.enqueue({"n": number}) for _ in range(EACH)]

    async with database:
        await database.create_resource("notes")
        with ThreadPoolExecutor(THREADS) as threads:
            loop = asyncio.get_running_loop()
            calls = [
                loop.run_in_executor(threads, lambda: asyncio.run(use(number)))  # noqa: B023
                for number in range(THREADS)
            ]
            found = await asyncio.gather(*calls)
        assert len({name for names in found for name in names}) == THREADS * EACH
        assert await queue.count() == THREADS * EACH
        assert await database.resources.notes.count() == THREADS


def test_one_loop_after_the_other(database: Database, queue: QueuePlugin) -> None:
    """A database whose loop was closed without a disconnect goes on, on the next one."""

    async def enqueue() -> str:
        await database.connect()
        return await database.resources.tasks.enqueue({})

    names = [asyncio.run(enqueue()) for _ in range(3)]
    assert asyncio.run(queue.count()) == len(set(names)) == 3
    asyncio.run(database.disconnect())


async def test_the_first_of_several_loops_connects(locate: servers.Locate) -> None:
    """The others wait for it, and use its connection."""
    database = Database(locate("sqlite"), work=False)
    connected: list[str] = []
    database.on("db:connected", lambda event: connected.append(event["store"]))
    may_end = threading.Barrier(THREADS)

    async def connect() -> None:
        may_end.wait()
        await database.connect()
        assert await database.list_resources() == []
        # The loop of the database must not end before the others have used it.
        await asyncio.to_thread(may_end.wait)

    with ThreadPoolExecutor(THREADS) as threads:
        calls = [threads.submit(asyncio.run, connect()) for _ in range(THREADS)]
        await asyncio.to_thread(lambda: [call.result() for call in calls])
    assert len(connected) == 1
    await database.disconnect()


def test_calls_are_coroutine_functions_for_frameworks() -> None:
    """Such as those that decide by it whether to await."""
    assert asyncio.iscoroutinefunction(Resource.enqueue)
    work = Database("memory://").list_resources()
    assert inspect.iscoroutine(work)
    work.close()


async def test_a_loop_that_stands_still_is_reported(locate: servers.Locate) -> None:
    """Instead of waiting for it. Once its tasks were cancelled, at its end, nobody needs it."""
    database, loop = Database(locate("memory")), asyncio.new_event_loop()
    await asyncio.to_thread(loop.run_until_complete, database.connect())
    assert not database.home_loop.enter()
    with pytest.raises(Unavailable, match="event loop of the database does not run"):
        await database.list_resources()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    await asyncio.to_thread(loop.run_until_complete, asyncio.wait(tasks))
    assert await database.list_resources() == []
    await asyncio.to_thread(loop.run_until_complete, database.disconnect())
    loop.close()


async def test_a_caller_whose_loop_ends_is_told(locate: servers.Locate) -> None:
    """The database lived on a loop that ends without a disconnect, while a call waits for it."""
    queue = QueuePlugin(resource="tasks")
    database = Database(locate("sqlite"), plugins=[queue], work=False)
    connected, may_end = asyncio.Event(), asyncio.Event()
    here = asyncio.get_running_loop()

    async def live() -> None:
        await database.connect()
        here.call_soon_threadsafe(connected.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(may_end.wait(), here))

    home = asyncio.create_task(asyncio.to_thread(asyncio.run, live()))
    await connected.wait()
    name = await queue.enqueue({})
    waiting = asyncio.create_task(queue.result(name))
    await queue.count()
    may_end.set()
    with pytest.raises(Unavailable, match="disconnected meanwhile"):
        await waiting
    await home
    await database.disconnect()
