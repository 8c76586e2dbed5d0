"""The application that `jobsync work work_app:open_database` runs in tests.

The environment says which store (JOBSYNC_URL), which queue (APP_QUEUE), where to report
(APP_FACTS) and, as JSON, what else the plugin gets (APP_SETTINGS). A message says what happens to
it.
"""

import asyncio
import json
import os
import time
from typing import Any

from worker_protocol import FactWriter

from jobsync import Cancel, Context, Database, Document, QueuePlugin

__all__ = ["open_database"]

LONG = 3600.0

_facts = FactWriter(os.environ["APP_FACTS"], f"worker-{os.getpid()}")


async def handle(message: Document, context: Context) -> Any:
    """Do what the message asks for, and report it."""
    match message.get("kind", "plain"):
        case "hold":
            await asyncio.sleep(LONG)
        case "fail":
            raise ValueError(f"no such mailbox: {message['to']}")
        case "cancel":
            return Cancel("not wanted any more")
        case "compute":
            end = time.thread_time() + message["seconds"]
            while time.thread_time() < end:
                pass
            return None
    await asyncio.sleep(message.get("seconds", 0.0))
    _facts.report("handled", id=context.id, worker=context.worker_id, attempt=context.attempt)
    return None


def handle_in_thread(message: Document) -> None:
    """Block a thread for as long as the message says, past any timeout."""
    time.sleep(message["seconds"])


def open_database() -> Database:
    """Return the database that this process works on."""
    settings = json.loads(os.environ["APP_SETTINGS"])
    handler = handle_in_thread if settings.pop("blocks", False) else handle
    queue = QueuePlugin(
        resource=os.environ["APP_QUEUE"],
        on_message=handler,
        backoff=lambda _: LONG,
        **{"heartbeat_interval": 1, "worker_timeout": 4, "skip_cold_start": True, **settings},
    )
    return Database(os.environ["JOBSYNC_URL"], plugins=[queue])
