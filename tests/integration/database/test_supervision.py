"""Background work: begun again while the store is away, and loud when it fails."""

import asyncio
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Database, Event, Events, Unavailable


@pytest.fixture
def components(clock: FakeClock) -> Components:
    """Time that passes when somebody sleeps."""
    return Components(clock=clock, randomness=SeededRandomness(3), events=Events())


@pytest.fixture
def database(components: Components) -> Database:
    """A database in memory."""
    return Database("memory://", components=components)


async def test_work_that_the_store_cannot_serve_begins_again(
    database: Database, clock: FakeClock
) -> None:
    """After pauses that grow, each told; then the work is done and nothing has failed."""
    told: list[Event] = []
    database.on("db:work-postponed", told.append)
    attempts = 0
    done = asyncio.Event()

    async def work() -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= 8:
            raise Unavailable("memory://", "away")
        done.set()

    async with database:
        begun = clock.mono()
        database.run_in_background(work, "tidying")
        await asyncio.wait_for(done.wait(), 10)
        assert attempts == 9
        assert {event["work"] for event in told} == {"tidying"}
        pauses = [event["pause"] for event in told]
        assert clock.mono() - begun == pytest.approx(sum(pauses))
        limits = [0.5, 1, 2, 4, 8, 16, 30, 30]
        assert all(pause <= limit for pause, limit in zip(pauses, limits, strict=True))
        assert await database.list_resources() == []


async def test_anything_else_makes_the_database_fail(database: Database) -> None:
    """Every later call raises the cause; other work is cancelled; leaving raises it too."""
    told: list[Event] = []
    database.on("db:failed", told.append)
    other = asyncio.Event()

    async def fail() -> None:
        await other.wait()
        raise ZeroDivisionError("a bug")

    async def go_on() -> None:
        other.set()
        await asyncio.Event().wait()

    async def use() -> None:
        async with database:
            resource = await database.create_resource("a")
            task = database.run_in_background(go_on, "going on")
            database.run_in_background(fail, "failing")
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()
            for call in (resource.get("x"), resource.insert({}), database.list_resources()):
                with pytest.raises(ZeroDivisionError, match="a bug"):
                    await call
            with pytest.raises(ZeroDivisionError):
                database.run_in_background(go_on, "more")
            with pytest.raises(ZeroDivisionError):
                await database.connect()

    with pytest.raises(ZeroDivisionError, match="a bug"):
        await use()
    assert [event["error"] for event in told] == ["ZeroDivisionError: a bug"]
    async with database:
        assert await database.list_resources() == []


async def test_what_the_caller_raises_comes_first(database: Database) -> None:
    """An exception of the body is not hidden by that of background work."""

    async def fail() -> None:
        raise ZeroDivisionError

    async def use() -> None:
        async with database:
            await asyncio.wait([database.run_in_background(fail, "failing")])
            raise KeyError

    with pytest.raises(KeyError):
        await use()


async def test_disconnecting_cancels_work_and_waits_for_it(database: Database) -> None:
    """What runs has its `finally`, and nothing is left afterwards."""
    cleaned: list[Any] = []
    before = asyncio.all_tasks()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    async with database:
        database.run_in_background(work, "waiting")
        await asyncio.sleep(0)
    assert cleaned == [True]
    assert asyncio.all_tasks() == before
