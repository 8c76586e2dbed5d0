"""Background work restarts while the store is away; other errors make the database fail."""

import asyncio
import inspect
import traceback
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness
from waiting import until

from jobsync import Components, Database, Event, Events, Unavailable
from jobsync.database.supervisor import DatabaseFailed, Supervisor


@pytest.fixture
def components(clock: FakeClock) -> Components:
    """Components with a clock that advances when code sleeps."""
    return Components(clock=clock, randomness=SeededRandomness(3), events=Events())


@pytest.fixture
def database(components: Components) -> Database:
    """A database in memory."""
    return Database("memory://", components=components)


async def test_work_that_is_cancelled_by_its_name_has_ended_then(database: Database) -> None:
    """However many steps its clean-up takes; other work goes on."""
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(name)

    async with database:
        supervisor = database._get_connection().supervisor
        for name in ("one", "other", "one"):
            supervisor.run(lambda name=name: work(name), name)  # type: ignore[misc]
        await asyncio.sleep(0)
        await supervisor.cancel("one")
        assert ended == ["one", "one"]
        assert supervisor.list_running() == ["other"]


async def test_work_restarts_while_the_store_is_unavailable(
    database: Database, clock: FakeClock
) -> None:
    """After growing pauses, each with an event; then the work is done and nothing has failed."""
    emitted: list[Event] = []
    database.on("db:work-postponed", emitted.append)
    attempts = 0
    done = asyncio.Event()

    async def work() -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= 8:
            raise Unavailable("memory://", "away")
        done.set()

    async with database:
        started = clock.mono()
        database.run_in_background(work, "reporting")
        await asyncio.wait_for(done.wait(), 10)
        assert attempts == 9
        assert {event["work"] for event in emitted} == {"reporting"}
        pauses = [event["pause"] for event in emitted]
        assert clock.mono() - started == pytest.approx(sum(pauses))
        limits = [0.5, 1, 2, 4, 8, 16, 30, 30]
        assert all(pause <= limit for pause, limit in zip(pauses, limits, strict=True))
        assert await database.list_resources() == []


@pytest.mark.parametrize(("seconds", "is_new"), [(0.0, False), (30.0, False), (30.1, True)])
async def test_pauses_grow_anew_after_work_that_lasted(
    database: Database, clock: FakeClock, seconds: float, *, is_new: bool
) -> None:
    """Longer than the longest pause: then it is another outage."""
    emitted: list[Event] = []
    database.on("db:work-postponed", emitted.append)
    done = asyncio.Event()
    attempts = 0

    async def work() -> None:
        nonlocal attempts
        attempts += 1
        if attempts in {8, 16}:
            await clock.sleep(seconds)
        if attempts <= 20:
            raise Unavailable("memory://", "away")
        done.set()

    async with database:
        database.run_in_background(work, "reporting")
        await asyncio.wait_for(done.wait(), 10)
        pauses = [event["pause"] for event in emitted]
        limits = [0.5, 1, 2, 4, 8, 16, 30, *[30] * 13]
        if is_new:
            limits = [*limits[:7], *limits[:8], *limits[:5]]
        # Drawn up to the limit, so that some are long if the limit is.
        assert all(pause <= limit for pause, limit in zip(pauses, limits, strict=True))
        assert is_new or max(pauses[7:9]) > 1


async def test_any_other_error_makes_the_database_fail(database: Database) -> None:
    """Every later call raises the cause, so does the end of the block; other work is cancelled."""
    emitted: list[Event] = []
    database.on("db:failed", emitted.append)
    other = asyncio.Event()

    async def fail() -> None:
        await other.wait()
        raise ZeroDivisionError("a bug")

    async def wait_forever() -> None:
        other.set()
        await asyncio.Event().wait()

    async def use() -> None:
        async with database:
            resource = await database.create_resource("a")
            task = database.run_in_background(wait_forever, "waiting")
            database.run_in_background(fail, "failing")
            await asyncio.wait([task], timeout=10)
            assert task.cancelled()
            for call in (resource.get("x"), resource.insert({}), database.list_resources()):
                with pytest.raises(ZeroDivisionError, match="a bug"):
                    await call
            with pytest.raises(ZeroDivisionError):
                database.run_in_background(wait_forever, "more")
            with pytest.raises(ZeroDivisionError):
                await database.connect()

    with pytest.raises(ZeroDivisionError, match="a bug"):
        await use()
    assert [event["error"] for event in emitted] == ["ZeroDivisionError: a bug"]
    async with database:
        assert await database.list_resources() == []


async def test_listeners_outlive_the_work_that_fails(database: Database) -> None:
    """A coroutine of `db:failed` runs, and one that ran before the failure finishes."""
    finished: list[str] = []
    has_failed = asyncio.Event()

    @database.on("db:work-postponed")
    async def note_pause(_: Event) -> None:
        await has_failed.wait()
        finished.append("postponed")

    @database.on("db:failed")
    async def note_failure(_: Event) -> None:
        has_failed.set()
        await asyncio.sleep(0)
        finished.append("failed")

    attempts = iter([Unavailable("memory://", "away"), ZeroDivisionError("a bug")])

    async def fail() -> None:
        raise next(attempts)

    async def use() -> None:
        async with database:
            database.run_in_background(fail, "failing")
            await has_failed.wait()

    with pytest.raises(ZeroDivisionError):
        await use()
    assert sorted(finished) == ["failed", "postponed"]


async def test_an_error_of_the_caller_comes_first(database: Database) -> None:
    """An error in the block is not hidden by an error of background work."""

    async def fail() -> None:
        raise ZeroDivisionError

    async def use() -> None:
        async with database:
            await asyncio.wait([database.run_in_background(fail, "failing")])
            raise KeyError

    with pytest.raises(KeyError):
        await use()


async def test_disconnecting_cancels_work_and_waits_for_it(database: Database) -> None:
    """Its `finally` blocks run, and nothing is left afterwards."""
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


async def test_the_first_of_several_errors_is_the_cause_each_time(database: Database) -> None:
    """Those that follow from it are not told; the error stays as it was, however often raised."""
    failures: list[Event] = []
    database.on("db:failed", failures.append)
    has_begun = asyncio.Event()

    async def follow() -> None:
        try:
            has_begun.set()
            await asyncio.Event().wait()
        finally:
            raise KeyError("it was cancelled")

    async def fail() -> None:
        await has_begun.wait()
        raise ValueError("first")

    async with database:
        follower = database.run_in_background(follow, "follower")
        failing = database.run_in_background(fail, "failing")
        await asyncio.wait([follower, failing])
        await until(lambda: bool(failures), "the database fails")
        depths = set()
        for _ in range(3):
            with pytest.raises(ValueError, match="first") as caught:
                _ = database.store
            depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(depths) == 1
        assert failures == [DatabaseFailed(error="ValueError: first")]
        assert database.unready() == ["the database has failed: ValueError: first"]
        await database.disconnect()
    assert database.unready() == ["the database is not connected"]


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_listener_that_is_called_just_before_the_end_has_time_to_finish(
    components: Components, turns: int
) -> None:
    """However many steps it takes; it is neither cut off nor left behind."""
    supervisor = Supervisor(components)
    await supervisor.start()
    tasks = asyncio.all_tasks()
    told: list[str] = []

    async def listen(event: DatabaseFailed) -> None:
        told.append("begins")
        for _ in range(turns):
            await asyncio.sleep(0)
        told.append(event.error)

    components.events.on("db:failed", listen)
    components.events.emit(DatabaseFailed(error="ends"))
    await supervisor.stop()
    assert told == ["begins", "ends"]
    assert asyncio.all_tasks() <= tasks


async def test_a_listener_that_comes_too_late_is_not_begun(components: Components) -> None:
    """It was called just before the end, from another thread; nobody would wait for it."""
    supervisor = Supervisor(components)
    await supervisor.start()
    begun: list[str] = []

    async def listen(name: str) -> None:
        begun.append(name)

    supervisor._run_listener(listen("in time"))
    await supervisor.stop()
    tasks = asyncio.all_tasks()
    late = listen("late")
    supervisor._run_listener(late)
    await asyncio.sleep(0)
    assert (begun, asyncio.all_tasks()) == (["in time"], tasks)
    # It was closed, so that it is not reported as never awaited.
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED


@pytest.mark.parametrize("count", [1, 3])
async def test_listeners_that_do_not_end_are_cancelled_after_their_time(
    components: Components, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A stop waits for them for some seconds, and then until they have ended."""
    monkeypatch.setattr("jobsync.database.supervisor._GRACE", 0.01)
    supervisor = Supervisor(components)
    await supervisor.start()
    tasks = asyncio.all_tasks()
    told: list[str] = []

    async def listen() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            told.append("cancelled")

    for _ in range(count):
        supervisor._run_listener(listen())
    async with asyncio.timeout(60):
        await supervisor.stop()
    assert told == ["cancelled"] * count
    assert asyncio.all_tasks() <= tasks
