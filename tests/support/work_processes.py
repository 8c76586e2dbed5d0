"""Processes that run `jobsync work`, seen from outside."""

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import WorkerProcess
from terminal import JOBSYNC

__all__ = ["ScheduleProcess", "WorkProcess"]


class WorkProcess(WorkerProcess):
    """One `jobsync work` on a queue.

    Args:
        url: the store.
        queue: the queue's name.
        log: the file that its standard error goes to.
        options: further options of `jobsync work`.
        facts: the file that it reports handled messages to.
        settings: of its plugin.
    """

    def __init__(
        self,
        url: str,
        queue: str,
        log: Path,
        *options: str,
        facts: str | Path = os.devnull,
        **settings: Any,
    ) -> None:
        super().__init__(
            log.stem,
            [*JOBSYNC, "work", "work_app:open_database", *options],
            log,
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                "JOBSYNC_URL": url,
                "JOBSYNC_HTTP": "0",
                "APP_QUEUE": queue,
                "APP_SETTINGS": json.dumps(settings),
                "APP_FACTS": str(facts),
            },
            stdout=subprocess.DEVNULL,
        )

    @property
    def is_at_work(self) -> bool:
        """Whether it has begun to work."""
        assert self.is_alive, self.log
        return "worker running" in self.log

    def probe(self, path: str) -> int:
        """Request a health endpoint; return the status."""
        (address,) = re.findall(r"http://\S+", self.log)
        try:
            with urllib.request.urlopen(f"{address}{path}", timeout=30) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code


class ScheduleProcess(WorkerProcess):
    """One `jobsync work` that fires scheduled jobs.

    Args:
        url: the store.
        log: the file that its standard error goes to.
        jobs: the options of its jobs, by name.
        settings: of its plugin.
    """

    def __init__(self, url: str, log: Path, jobs: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(
            log.stem,
            [*JOBSYNC, "work", "schedule_app:open_database"],
            log,
            cwd=Path(__file__).parent,
            env={
                **os.environ,
                "JOBSYNC_URL": url,
                "JOBSYNC_HTTP": "0",
                "APP_JOBS": json.dumps(jobs),
                "APP_SETTINGS": json.dumps(settings),
            },
            stdout=subprocess.DEVNULL,
        )

    @property
    def is_at_work(self) -> bool:
        """Whether it has begun to work."""
        assert self.is_alive, self.log
        return "worker running" in self.log
