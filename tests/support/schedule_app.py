"""The application that `jobsync work schedule_app:open_database` runs in tests.

The environment says which store (JOBSYNC_URL) and, as JSON, which jobs (APP_JOBS: options by name,
without actions) and what else the plugin gets (APP_SETTINGS). A job's name says what it does.
"""

import asyncio
import json
import os
from typing import Any

from jobsync import Database, SchedulerPlugin

__all__ = ["open_database"]

LONG = 3600.0


async def act(_: Database, context: Any) -> Any:
    """Do what the name of the job says."""
    match context.job_name.partition("-")[0]:
        case "hold":
            await asyncio.sleep(LONG)
        case "fail":
            raise ValueError("no such table")
    return {"removed": 3}


def open_database() -> Database:
    """Return the database whose jobs this process fires."""
    jobs: dict[str, Any] = json.loads(os.environ["APP_JOBS"])
    settings = {"heartbeat_interval": 1, "worker_timeout": 4, "skip_cold_start": True}
    scheduler = SchedulerPlugin(
        jobs={name: {"action": act, "timeout": LONG, **options} for name, options in jobs.items()},
        **{**settings, **json.loads(os.environ["APP_SETTINGS"])},
    )
    return Database(os.environ["JOBSYNC_URL"], plugins=[scheduler])
