"""What an action knows about its run, and what it can do from a thread.

The context of an attempt is the same for an `async def` action and for a plain function. Its
attributes may be read on any thread. A plain function calls coroutines of the database
or the scheduler by `context.run`.
"""

import asyncio
import copy
from collections.abc import Awaitable, Mapping
from datetime import datetime
from typing import Any, Self, TypeVar

from jobsync.errors import Invalid
from jobsync.user_code import discard

__all__ = ["JobContext"]

T = TypeVar("T")

_FIELDS = (
    "job_name",
    "job_id",
    "execution_id",
    "scheduled_time",
    "scheduled_at",
    "attempt",
    "is_manual",
    "data",
    "database",
    "scheduler",
    "lost",
    "lost_reason",
)


class JobContext:
    """What an action knows about its run. Each attempt has its own.

    Its attributes are items too: `context["job_name"]`. An item with another name is one of `data`.

    Args:
        job_name: the job's name.
        execution_id: identifies this run; the same for each attempt.
        scheduled_at: the instant that fires, in the job's zone.
        database: of the scheduler.
        scheduler: the plugin.
        attempt: the number of the first attempt. It is above 1 where a run is resumed.
        is_manual: whether `run_job` started it.
        data: the job's own `context`, and what `run_job` passes.

    Attributes:
        attempt: the number of this attempt, counted from 1.
    """

    def __init__(
        self,
        *,
        job_name: str,
        execution_id: str,
        scheduled_at: datetime,
        database: Any = None,
        scheduler: Any = None,
        attempt: int = 1,
        is_manual: bool = False,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.job_name = job_name
        self.execution_id = execution_id
        self.scheduled_at = scheduled_at
        self.database = database
        self.scheduler = scheduler
        self.attempt = attempt
        self.is_manual = is_manual
        self.data = dict(data or {})
        self._lost_reason = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        # Without the data, which may hold secrets.
        return f"JobContext({self.job_name!r}, {self.execution_id!r}, attempt={self.attempt})"

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in _FIELDS else self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in _FIELDS or name in self.data

    def get(self, name: str, default: Any = None) -> Any:
        """Return an item, or the default if there is none."""
        return getattr(self, name) if name in _FIELDS else self.data.get(name, default)

    @property
    def job_id(self) -> str:
        """The job's name."""
        return self.job_name

    @property
    def scheduled_time(self) -> float:
        """The instant that fires, in seconds since 1970."""
        return self.scheduled_at.timestamp()

    @property
    def lost(self) -> bool:
        """Whether this attempt has timed out or was stopped. Stop: nothing counts any more."""
        return bool(self._lost_reason)

    @property
    def lost_reason(self) -> str:
        """Why nothing counts any more; empty while it does."""
        return self._lost_reason

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the scheduler's event loop, and block until it has ended.

        For plain functions: `context.run(context.scheduler.run_job("report"))`.

        Raises:
            Invalid: the caller is on the event loop, which it would block for ever.
        """
        if self._loop is None or self._loop is _find_loop():
            discard(work)
            raise Invalid("run", work, "is for plain functions", "await the coroutine instead")
        waiting = _await(work)
        try:
            running = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError:
            # The loop is closed.
            waiting.close()
            discard(work)
            raise
        return running.result()

    def for_attempt(self, attempt: int) -> Self:
        """Return the context of an attempt. Called on the event loop."""
        context = copy.copy(self)
        context.attempt = attempt
        context.data = dict(self.data)
        context._lost_reason = ""  # noqa: SLF001 - a copy of its own
        context._loop = asyncio.get_running_loop()  # noqa: SLF001 - likewise
        return context

    def mark_lost(self, reason: str) -> None:
        """Record that nothing counts any more. The first reason stays."""
        self._lost_reason = self._lost_reason or reason


async def _await(work: Awaitable[T]) -> T:
    return await work


def _find_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
