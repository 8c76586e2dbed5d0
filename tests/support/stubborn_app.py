"""The application of tests in which user code keeps a `jobsync work` process from ending.

The environment says which store (JOBSYNC_URL), which handler (APP_HANDLER), and which file to
create once it runs (APP_STARTED).
"""

import asyncio
import os
import time
from pathlib import Path

from jobsync import Database, Document, QueuePlugin

__all__ = ["HANDLERS", "open_database"]

LONG = 3600.0


async def _ignore_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            continue


async def ignores_cancellation(_: Document) -> None:
    """Never end."""
    _started()
    await _ignore_cancellation()


async def blocks_the_loop(_: Document) -> None:
    """Block the event loop in a call of the operating system."""
    _started()
    time.sleep(LONG)  # noqa: ASYNC251 - on purpose


async def computes(_: Document) -> None:
    """Block the event loop in Python code."""
    _started()
    while True:
        pass


def never_returns(_: Document) -> None:
    """Block a thread."""
    _started()
    time.sleep(LONG)


async def leaves_a_task(_: Document) -> None:
    """Start a task of its own that never ends."""
    _tasks.append(asyncio.create_task(_ignore_cancellation()))
    _started()


async def waits(_: Document) -> None:
    """Wait, as a handler should: it can be cancelled."""
    _started()
    await asyncio.sleep(LONG)


async def ends_at_once(_: Document) -> None:
    """Do nothing; the callback below does not end."""


async def disconnects(_: Document) -> None:
    """Disconnect the database."""
    await _databases[0].disconnect()
    _started()


async def fails_and_blocks(_: Document) -> None:
    """Make the database fail, and block the event loop meanwhile."""

    async def fail() -> None:
        raise ZeroDivisionError

    database = _databases[0]
    database.on("db:failed", lambda _: asyncio.get_running_loop().call_soon(time.sleep, LONG))
    database.plugins["queue"].run_in_background(fail)
    _started()


async def on_complete(_: Document, __: object) -> None:
    """Never end, but accept a cancellation."""
    _started()
    await asyncio.sleep(LONG)


HANDLERS = {
    handler.__name__: handler
    for handler in (
        ignores_cancellation,
        blocks_the_loop,
        computes,
        never_returns,
        leaves_a_task,
        waits,
        ends_at_once,
        disconnects,
        fails_and_blocks,
    )
}
_tasks: list[asyncio.Task[None]] = []
_databases: list[Database] = []


def _started() -> None:
    Path(os.environ["APP_STARTED"]).touch()


def open_database() -> Database:
    """Return the database that this process works on."""
    name = os.environ["APP_HANDLER"]
    queue = QueuePlugin(
        resource="tasks",
        on_message=HANDLERS[name],
        on_complete=on_complete if name == "ends_at_once" else None,
        heartbeat_interval=1,
        worker_timeout=4,
    )
    _databases.append(Database(os.environ["JOBSYNC_URL"], plugins=[queue]))
    return _databases[0]
