"""One worker process of the demo, and what all of them run. Started by `fleet`.

It sends mails from a queue, fires a clock job, lets records expire, and owns its share of the
tokens. SIGTERM makes it stop in good order.
"""

import asyncio
import os
import signal
import sys
import threading
from typing import Any

from jobsync.core.codec import Json
from jobsync.database.database import Database
from jobsync.jobs.coordination_config import CoordinationConfig
from jobsync.jobs.job import Job
from jobsync.queue.events import MessageCompleted
from jobsync.queue.plugin import QueuePlugin
from jobsync.scheduler.plugin import SchedulerPlugin
from jobsync.ttl.plugin import TTLPlugin

__all__ = [
    "BEAT",
    "CLOCK_JOB",
    "COMPLETIONS",
    "FLEET",
    "MAILS",
    "PERIOD",
    "SESSIONS",
    "TIMEOUT",
    "TOKENS",
    "build_queue",
    "build_scheduler",
]

BEAT, TIMEOUT = 1.0, 4.0
"""Seconds between two heartbeats, and without one until a process counts as dead. In production
they are 5 and 15."""
TIMING: dict[str, Any] = {
    "heartbeat_interval": BEAT,
    "worker_timeout": TIMEOUT,
    "skip_cold_start": True,
}
COMPLETIONS = "demo/completions"
"""The history of accepted completions."""
MAILS, SESSIONS, CLOCK_JOB, FLEET = "mails", "sessions", "clock", "sync_"
"""The names of the queue, of the records that expire, of the scheduled job and of the fleet that
shares tokens."""
_ATTRIBUTES = {"user": "string|required", "expires_at": "number|required"}
"""Of the records that expire."""
PERIOD = 2.0
"""Seconds between two firings."""
TOKENS = 120
_CONCURRENCY = 4
_SECONDS = 0.25
"""How long sending a mail takes."""
_LOG_PERIOD = 0.5
_KEPT = 3600.0
"""Seconds for which completed messages are remembered."""


def build_queue(**options: Any) -> QueuePlugin:
    """Return the queue of mails."""
    return QueuePlugin(
        resource=MAILS,
        concurrency=_CONCURRENCY,
        completed_ttl=_KEPT,
        visibility_timeout=2 * TIMEOUT,
        **TIMING,
        **options,
    )


def build_scheduler(**options: Any) -> SchedulerPlugin:
    """Return the scheduler."""
    return SchedulerPlugin(timezone="UTC", **TIMING, **options)


async def _send(number: int) -> None:
    """Send a mail: take a moment."""
    del number
    await asyncio.sleep(_SECONDS)


def _fire(*_: object) -> None:
    """Run the scheduled job: its history is what matters."""


def _share_tokens(url: str, name: str, stopping: threading.Event) -> None:
    """Own a share of the tokens until told to stop."""
    config = CoordinationConfig(
        total_tokens=TOKENS,
        heartbeat_interval_sec=BEAT,
        heartbeat_timeout_sec=TIMEOUT,
        reclaim_after=1.0,
    )
    with Job(name, "demo", coordination_config=config, url=url):
        stopping.wait()


class _CompletionLog:
    """Writes to the store which completions it has accepted, to count those that are doubled."""

    def __init__(self, queue: QueuePlugin) -> None:
        self._ids: list[Json] = []
        queue.on(MessageCompleted.name, lambda event: self._ids.append(event.message_id))

    async def keep(self, database: Database) -> None:
        """Write from time to time."""
        while True:
            await asyncio.sleep(_LOG_PERIOD)
            await self.write(database)

    async def write(self, database: Database) -> None:
        """Write what is new."""
        if self._ids:
            ids, self._ids = self._ids, []
            await database.store.append(COMPLETIONS, ids)


async def _work(url: str, name: str) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    queue, scheduler = build_queue(), build_scheduler()
    queue.task(name="send")(_send)
    completions = _CompletionLog(queue)
    # What nobody could fire is made up for, one run after the other.
    every = f"*/{PERIOD:.0f} * * * * *"
    scheduler.job(every, name=CLOCK_JOB, overlap="queue", misfire="all")(_fire)
    ttl = TTLPlugin(resources=[SESSIONS], cleanup_interval=1.0, **TIMING)
    leaving = threading.Event()
    async with Database(url, plugins=[queue, scheduler, ttl]) as database:
        await database.create_resource(name=SESSIONS, attributes=_ATTRIBUTES)
        sharing = asyncio.create_task(asyncio.to_thread(_share_tokens, url, name, leaving))
        keeping = asyncio.create_task(completions.keep(database))
        await stopping.wait()
        leaving.set()
        await sharing
        keeping.cancel()


if __name__ == "__main__":
    # The URL may contain a password, which the list of processes must not show.
    asyncio.run(_work(os.environ["JOBSYNC_URL"], sys.argv[1]))
