"""Runs actions of scheduled jobs, mostly with virtual time, and notes what happens."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jobsync import Components
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.executor import ActionExecutor, ActionOutcome, AttemptFailure
from jobsync.testing.world import World
from jobsync.user_code import UserThreads

__all__ = ["DATABASE", "SCHEDULER", "ActionNotes", "ActionStage", "build_context", "play"]

DATABASE, SCHEDULER = "the database", "the scheduler"
SEEDS = range(5)


class ActionNotes:
    """Remembers what it is told: what happened, the attempt, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.times: list[float] = []

    def _tell(self, *what: Any) -> None:
        self.told.append(what)
        self.times.append(asyncio.get_running_loop().time())

    def on_attempt(self, context: JobContext) -> None:
        """Remember it."""
        self._tell("attempt", context.attempt)

    def on_attempt_failed(
        self, context: JobContext, failure: AttemptFailure, *, attempts: int, final: bool
    ) -> None:
        """Remember it."""
        assert attempts == context.attempt
        assert (failure.status == "timeout") == context.lost
        self._tell("final" if final else "failed", attempts, failure.status)

    def on_overrun(self, context: JobContext, seconds: float) -> None:
        """Remember it."""
        assert context.lost
        self._tell("overrun", context.attempt, round(seconds, 3))

    def on_backoff_failed(self, context: JobContext, error: BaseException) -> None:
        """Remember it."""
        self._tell("backoff", context.attempt, type(error).__name__)


class ActionStage:
    """Runs actions with the components of a world or of this machine."""

    def __init__(self, components: Components, **options: Any) -> None:
        self.components = components
        self._options = options
        self.listener = ActionNotes()
        self.executor: ActionExecutor

    async def run(
        self, action: Any, *, timeout: float | None = None, retries: int = 0, **more: Any
    ) -> ActionOutcome:
        """Run an action as a job."""
        self.executor = ActionExecutor(
            action, components=self.components, threads=UserThreads(), **self._options
        )
        attempt = more.pop("attempt", 1)
        return await self.executor.run(
            build_context(attempt=attempt),
            timeout=timeout,
            retries=retries,
            listener=self.listener,
            **more,
        )


def build_context(**more: Any) -> JobContext:
    """Return the context of a run."""
    instant = datetime(2026, 3, 1, 3, tzinfo=UTC)
    more = {"job_name": "report", "execution_id": "e1", "scheduled_at": instant, **more}
    return JobContext(**more, database=DATABASE, scheduler=SCHEDULER)


def play(story: Callable[[ActionStage], Awaitable[None]], **options: Any) -> None:
    """Run a story in several worlds with virtual time."""
    for seed in SEEDS:
        world = World(seed)
        world.run(partial(story, ActionStage(world.components, **options)))
