"""A process that handles messages, for `jobsync work shop:open_shop`.

The environment says where (JOBSYNC_URL), which queue (SHOP), and what else its plugin is to be
told (SHOP_OPTIONS, as JSON). A message says what is to become of it.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from jobsync import Cancel, Context, Database, Document, QueuePlugin

__all__ = ["open_shop"]

LONG = 3600.0


async def handle(task: Document, context: Context) -> Any:
    """Do what the message asks for, and note it where it says so."""
    match task.get("kind", "plain"):
        case "hold":
            await asyncio.sleep(LONG)
        case "fail":
            raise ValueError(f"no such mailbox: {task['to']}")
        case "cancel":
            return Cancel("not wanted any more")
    await asyncio.sleep(task.get("seconds", 0.0))
    if os.environ["SHOP_LEDGER"]:
        note(context)
    return None


def note(context: Context) -> None:
    """Note that a message was handled, in one piece, in a file that all processes share."""
    line = json.dumps({"id": context.id, "worker": context.worker_id, "attempt": context.attempt})
    with Path(os.environ["SHOP_LEDGER"]).open("ab", buffering=0) as ledger:
        ledger.write(f"{line}\n".encode())


def handle_slowly(task: Document) -> None:
    """Block a thread for as long as the message says, whatever its timeout."""
    time.sleep(task["seconds"])


def open_shop() -> Database:
    """Make the database that this process works on."""
    options = json.loads(os.environ.get("SHOP_OPTIONS", "{}"))
    handler = handle_slowly if options.pop("blocks", False) else handle
    queue = QueuePlugin(
        resource=os.environ["SHOP"],
        on_message=handler,
        backoff=lambda _: LONG,
        **{"heartbeat_interval": 1, "worker_timeout": 4, "skip_cold_start": True, **options},
    )
    return Database(os.environ["JOBSYNC_URL"], plugins=[queue])
