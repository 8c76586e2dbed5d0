"""Whatever became of its first use, a database or plugin can be used again as if it were new."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import until

from jobsync import Database, Plugin


class RecorderPlugin(Plugin):
    """Records how it is used; its start, its work and its stop do what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.installs = 0
        self.is_caller = False
        """Whether whoever calls is user code of this plugin."""
        self.install_error: Exception | None = None
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.hangs = False

    @property
    def stop_time(self) -> float:
        """Seconds that it takes to stop at most."""
        return 7.0

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is its user code."""
        return self.is_caller

    async def on_install(self) -> None:
        if self.install_error is not None:
            raise self.install_error
        self.installs += 1

    async def on_start(self) -> None:
        self.log.append("start")
        self.run_in_background(self.work)
        if self.start_error is not None:
            raise self.start_error

    async def on_stop(self) -> None:
        left = self.database.time_left
        self.log.append(("stop", None if left is None else round(left)))
        if self.hangs:
            await asyncio.Event().wait()
        if self.stop_error is not None:
            raise self.stop_error

    async def work(self) -> None:
        self.log.append("work")
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("work ended")

    def heal(self) -> None:
        """Forget what was recorded, and do everything right from now on."""
        self.log.clear()
        self.install_error = self.start_error = self.stop_error = None
        self.hangs = False


async def use(database: Database, recorder: RecorderPlugin) -> list[Any]:
    """Use a database and its plugin in every way; return what has happened."""
    await database.connect()
    for _ in range(3):
        await asyncio.sleep(0)
    resource = await database.create_resource("things", attributes={"tags": "array|default:[]"})
    for _ in range(2):
        record = await resource.insert({})
        assert record["tags"] == []
        record["tags"].append("mine")
    await recorder.stop()
    await recorder.start()
    for _ in range(3):
        await asyncio.sleep(0)
    found = [recorder.is_running, database.is_connected, database.unready(), recorder.installs]
    await disconnect_in_user_code(database, recorder)
    return [*recorder.log, *found, database.is_connected, recorder.is_running]


async def disconnect_in_user_code(database: Database, recorder: RecorderPlugin) -> None:
    """Disconnect as a handler does, and wait until it has happened."""
    recorder.is_caller = True
    await database.disconnect()
    recorder.is_caller = False
    await until(lambda: not database.is_connected and not recorder.is_running, "it disconnects")
    await until(lambda: database._later is None or database._later.done(), "all has ended")


async def end_in_user_code(database: Database, recorder: RecorderPlugin) -> None:
    """Disconnect without a limit, from a handler."""
    await database.connect()
    await disconnect_in_user_code(database, recorder)


async def fail_to_install(database: Database, recorder: RecorderPlugin) -> None:
    """A plugin cannot prepare what it needs, twice."""
    recorder.install_error = OSError("no such port")
    for _ in range(2):
        with pytest.raises(OSError, match="no such port"):
            await database.connect()


async def end_in_order(database: Database, _: RecorderPlugin) -> None:
    """Disconnect without a limit."""
    await database.connect()
    await database.disconnect()


async def end_in_time(database: Database, _: RecorderPlugin) -> None:
    """Disconnect with a limit, twice, the second one shorter."""
    await database.connect()
    await asyncio.gather(database.disconnect(within=5), database.disconnect(within=1))


async def fail_to_connect(database: Database, recorder: RecorderPlugin) -> None:
    """A plugin cannot start."""
    recorder.start_error = OSError("no such port")
    with pytest.raises(OSError, match="no such port"):
        await database.connect()


async def fail_to_start(database: Database, recorder: RecorderPlugin) -> None:
    """A plugin of a connected database cannot start again."""
    await database.connect()
    await recorder.stop()
    recorder.start_error = OSError("no such port")
    with pytest.raises(OSError, match="no such port"):
        await recorder.start()
    for _ in range(3):
        await asyncio.sleep(0)
    assert recorder.log.count("work") == recorder.log.count("work ended")
    await database.disconnect()


async def fail_to_stop(database: Database, recorder: RecorderPlugin) -> None:
    """A plugin raises when it is stopped."""
    await database.connect()
    recorder.stop_error = OSError("no such port")
    with pytest.raises(OSError, match="no such port"):
        await database.disconnect()


async def hang_in_stop(database: Database, recorder: RecorderPlugin) -> None:
    """A plugin does not stop within the limit."""
    await database.connect()
    recorder.hangs = True
    await database.disconnect(within=0.1)


async def cancel_disconnect(database: Database, recorder: RecorderPlugin) -> None:
    """The caller gives up, and disconnects once more."""
    await database.connect()
    recorder.hangs = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await database.disconnect(within=5)
    recorder.hangs = False
    await database.disconnect(within=5)


async def fail_in_work(database: Database, recorder: RecorderPlugin) -> None:
    """Background work raises, so that the database fails."""
    await database.connect()

    async def work() -> None:
        raise ZeroDivisionError

    recorder.run_in_background(work)
    for _ in range(20):
        await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        _ = database.store
    await database.disconnect()


FIRST_USES = [
    end_in_order,
    end_in_user_code,
    end_in_time,
    fail_to_install,
    fail_to_connect,
    fail_to_start,
    fail_to_stop,
    hang_in_stop,
    cancel_disconnect,
    fail_in_work,
]


@pytest.mark.parametrize("first_use", FIRST_USES, ids=lambda use: use.__name__)
async def test_a_used_database_is_as_good_as_new(
    first_use: Callable[[Database, RecorderPlugin], Awaitable[None]],
) -> None:
    """The same calls have the same effects, and nothing of the first use is left."""
    tasks = asyncio.all_tasks()
    fresh = RecorderPlugin()
    expected = await use(Database("memory://", plugins=[fresh]), fresh)
    assert expected[:3] == ["start", "work", ("stop", None)]
    recorder = RecorderPlugin()
    database = Database("memory://", plugins=[recorder])
    await first_use(database, recorder)
    assert recorder.log.count("work") == recorder.log.count("work ended")
    recorder.heal()
    assert await use(database, recorder) == expected
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize(
    ("first", "second"), [*itertools.product((None, 5.0, 50.0), repeat=2)], ids=str
)
async def test_a_second_disconnect_shortens_the_first_and_never_prolongs_it(
    first: float | None, second: float | None
) -> None:
    """Whoever can wait the least decides how much time is left."""
    recorder = RecorderPlugin()
    recorder.hangs = True
    database = await Database("memory://", plugins=[recorder]).connect()
    disconnecting = [asyncio.create_task(database.disconnect(within=first))]
    await until(lambda: not recorder.is_running, "it stops")
    disconnecting.append(asyncio.create_task(database.disconnect(within=second)))
    await asyncio.sleep(0)
    limits = [limit for limit in (first, second) if limit is not None]
    left = database.time_left
    assert (left is None) == (not limits)
    assert left is None or min(limits) - 2 < left <= min(limits)
    for task in disconnecting:
        task.cancel()
    await asyncio.wait(disconnecting)
    await database.disconnect(within=0)
