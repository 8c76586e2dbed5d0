"""The workers of a queue in this process: one in the background, and one for each `drain`."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from jobsync.core.arguments import check_count, check_seconds
from jobsync.core.clock import Seconds
from jobsync.database.database import Database
from jobsync.database.supervisor import Work
from jobsync.events import Event
from jobsync.queue import events
from jobsync.queue.backend import QueueBackend
from jobsync.queue.worker import Worker, find_calling_worker
from jobsync.queue.worker_status import WorkerStatus, limit_tasks

__all__ = ["BuildWorker", "LocalWorkers", "QueueProcess"]


class BuildWorker(Protocol):
    """Builds a worker of the queue."""

    def __call__(self, *, quota: int | None = None, until_empty: bool = False) -> Worker:
        """Return a worker that ends after a number of messages, or when there are none left."""
        ...


class QueueProcess(Protocol):
    """The queue's plugin, as its workers use it."""

    @property
    def queue(self) -> str:
        """The stored name of the queue."""
        ...

    @property
    def worker_id(self) -> str:
        """The name of this process."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        ...

    @property
    def database(self) -> Database:
        """The database of the queue."""
        ...

    def run_in_background(self, work: Work, name: str) -> asyncio.Task[None]:
        """Run work until the plugin stops."""
        ...

    def emit(self, event: Event) -> None:
        """Emit an event."""
        ...


class LocalWorkers:
    """Starts and stops the workers of a queue.

    Args:
        plugin: of the queue.
        concurrency: how many handlers a worker runs at once.
        build: builds a worker.
        publish: publishes what this process does for the queue; None for nothing.
        list_tasks: returns the tasks whose messages are handled here.

    Attributes:
        concurrency: how many handlers a worker runs at once, which an event tells.
    """

    def __init__(
        self,
        plugin: QueueProcess,
        concurrency: int,
        build: BuildWorker,
        publish: Callable[[WorkerStatus | None], None],
        list_tasks: Callable[[], Collection[str]] = lambda: ("",),
    ) -> None:
        self._plugin = plugin
        self.concurrency = concurrency
        self._build = build
        self._publish = publish
        self._list_tasks = list_tasks
        self._background: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._all: dict[Worker, None] = {}
        """Every worker whose handlers may run."""
        self._is_paused = False
        self._drains = 0
        """How many calls of `drain` run, without those of handlers."""
        self._is_interrupted = False
        """Whether the worker in the background has stopped for them, or has not started."""

    @property
    def running(self) -> int:
        """How many handlers the worker in the background runs."""
        return 0 if self._background is None else self._background.running

    @property
    def is_stuck(self) -> bool:
        """Whether handlers that ran out of time occupy every slot."""
        return self._background is not None and self._background.is_stuck

    @property
    def user_code(self) -> list[str]:
        """Descriptions of the handlers and callbacks that run."""
        # Workers of one queue share its executor, which lists what runs on threads.
        return list(dict.fromkeys(text for worker in self._all for text in worker.user_code))

    def describe_wait(self, timeout: Seconds) -> str:
        """Return why the worker in the background claims nothing; empty if all is well.

        Args:
            timeout: seconds without an answer that are nothing special.
        """
        worker = self._background
        if worker is None:
            return ""
        if worker.is_waiting_for_callbacks:
            return "too many callbacks of finished messages have not ended"
        if worker.silence <= timeout:
            return ""
        return f"the store has not answered its claims for {worker.silence:.0f} s"

    def start(self) -> None:
        """Handle messages in the background; if a worker does, let it know of new tasks.

        While `drain` runs it waits for its end.
        """
        if self._background is not None:
            self._apply_pause()
            return
        if self._drains:
            self._is_interrupted = True
            return
        self._background = self._build()
        self._apply_pause()
        run = partial(self._run, self._background)
        self._task = self._plugin.run_in_background(run, "worker")
        self._plugin.emit(
            events.WorkersStarted(
                queue=self._plugin.queue,
                worker_id=self._plugin.worker_id,
                concurrency=self.concurrency,
            )
        )

    def wake(self) -> None:
        """Poll now: something may have changed."""
        if self._background is not None:
            self._background.wake()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is claimed in this process."""
        return self._is_paused

    def pause(self, *, is_paused: bool) -> None:
        """Claim nothing in this process, or claim again; running handlers continue."""
        self._is_paused = is_paused
        self._apply_pause()

    def prepare_stop(self) -> None:
        """Claim no more; handlers finish while other plugins stop."""
        for worker in self._all:
            worker.stop(self._plugin.database.time_left)

    async def stop(self) -> None:
        """Claim no more; finish or return all messages in flight."""
        self.prepare_stop()
        await self._stop_background()
        for worker in list(self._all):
            # That of a `drain` may still run.
            await worker.ended.wait()

    def look_for_late_claims(self) -> None:
        """Check the claims of dead workers again in an interval."""
        for worker in self._all:
            worker.look_for_late_claims()

    async def confirm(self, name: str) -> None:
        """Find out whether the claim of a message still stands, if a worker here has it."""
        for worker in list(self._all):
            await worker.confirm(name)

    async def drain(
        self,
        backend: QueueBackend,
        *,
        max_messages: int | None,
        deadline: Seconds | None,
        check: Callable[[], None],
    ) -> int:
        """Handle messages until none is left; return how many. Waits for what a rate holds back.

        The worker in the background stops until the last of several calls has ended: its messages
        in flight are finished and counted, or returned.

        Args:
            backend: of the queue.
            max_messages: stop after this many.
            deadline: claim no more after this many seconds.
            check: raises if the queue has been stopped meanwhile.

        Raises:
            Invalid: an argument is wrong.
        """
        if max_messages is not None:
            check_count("max_messages", max_messages, least=0)
        if deadline is not None:
            check_seconds("deadline", deadline)
        clock = self._plugin.database.components.clock
        start = clock.mono()
        # A handler would wait for its own end.
        is_within = find_calling_worker(backend) is not None
        background = None if is_within else self._background
        before = 0 if background is None else background.handled
        self._drains += not is_within
        try:
            if background is not None:
                self._is_interrupted = True
                await self._stop_background()
            check()
            finished = 0 if background is None else background.handled - before
            quota = None if max_messages is None else max_messages - finished
            worker = self._build(quota=quota, until_empty=True)
            left = None if deadline is None else deadline - (clock.mono() - start)
            return finished + await self._run_for(worker, left)
        finally:
            self._drains -= not is_within
            if self._is_interrupted and not self._drains:
                self._is_interrupted = False
                if self._plugin.is_running:
                    self.start()

    async def _stop_background(self) -> None:
        """Claim no more; finish or return the messages in flight."""
        worker, task = self._background, self._task
        if worker is None or task is None:
            return
        self._background = self._task = None
        worker.stop(self._plugin.database.time_left)
        self._publish(None)
        await asyncio.wait([task])
        self._plugin.emit(
            events.WorkersStopped(queue=self._plugin.queue, worker_id=self._plugin.worker_id)
        )

    async def _run(self, worker: Worker) -> None:
        # Not those that have ended, unless a handler of theirs runs on.
        kept = [each for each in self._all if each.user_code or not each.ended.is_set()]
        self._all = dict.fromkeys(kept)
        self._all[worker] = None
        await worker.run()

    async def _run_for(self, worker: Worker, seconds: Seconds | None) -> int:
        """Run a worker that claims for this many seconds at most; return how many it handled."""
        timer: asyncio.TimerHandle | None = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, worker.finish)
        try:
            await self._run(worker)
        finally:
            if timer is not None:
                timer.cancel()
        return worker.handled

    def _apply_pause(self) -> None:
        if self._background is not None:
            self._background.is_paused = self._is_paused
            self._background.wake()
            tasks, has_more = limit_tasks(self._list_tasks())
            self._publish(
                WorkerStatus(
                    concurrency=self.concurrency,
                    is_paused=self._is_paused,
                    tasks=tasks,
                    has_more_tasks=has_more,
                )
            )
