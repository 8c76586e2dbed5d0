"""A durable queue on a resource.

    queue = QueuePlugin(resource="tasks", on_message=handle)
    await db.use_plugin(queue)
    await db.resources.tasks.enqueue({"type": "send-email"})

Guarantees: an acknowledged enqueue is delivered at least once or is among the dead letters; a
message has at most one live claim; a stale receipt cannot complete, extend or fail it. A
handler runs a second time only if the first claim ended unsettled: by a crash, or by a pause
longer than the session's timeout or the visibility timeout.

Without a handler this process only pushes. The process that records a worker's death ends its
claims at once. The coordinator removes messages that were finished long ago.
"""

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from jobsync.coordination.events import WorkerDied
from jobsync.core.arguments import check_count, check_seconds
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.messages import (
    FINISHED,
    LIVE,
    Backoff,
    Cancel,
    Completed,
    Failed,
    HandlerVerdict,
    MessageState,
    Retries,
    Returned,
    Snooze,
    default_backoff,
    has_spent,
)
from jobsync.database.coordinator_plugin import CoordinatorPlugin, split_options
from jobsync.database.document import as_list
from jobsync.errors import (
    Invalid,
    Unavailable,
    format_error,
    safe_name,
    safe_str,
)
from jobsync.events import Event, HandlerFailed, is_for_task
from jobsync.queue import events
from jobsync.queue.arguments import check_state
from jobsync.queue.backend import (
    EndedClaim,
    Message,
    MessageInfo,
    QueueBackend,
    QueuePart,
    WorkerStatus,
    build_worker_facts,
    name_queue,
)
from jobsync.queue.enqueue import build_messages
from jobsync.queue.executor import Executor, Handler
from jobsync.queue.in_flight import Delivery
from jobsync.queue.maintenance import Maintenance
from jobsync.queue.settings import LONGEST_RETENTION, QueueSettings, translate
from jobsync.queue.sql import MessageRecords, open_backend
from jobsync.queue.worker import Worker, WorkerListener, find_calling_worker
from jobsync.settings import Sources, resolve
from jobsync.user_code import describe_error

__all__ = ["QueuePlugin", "S3QueuePlugin"]

_H = TypeVar("_H", bound=Handler)

_PENDING: tuple[MessageState, ...] = ("ready", "waiting")
_COUNTED: Mapping[str, tuple[MessageState, ...]] = {
    "pending": _PENDING,
    "processing": ("claimed",),
    "all": (*LIVE, *FINISHED),
    **{state: (state,) for state in (*LIVE, *FINISHED)},
}
_STATS_INTERVAL = 60.0
_TIME_FOR_PLUGINS = 4.0
"""Seconds in which a plugin that is added after the queue can say how long messages are kept."""
_ALIASES = ("workers", "max_retries", "ticket_interval")


class QueuePlugin(CoordinatorPlugin):
    """A durable queue on a resource: any free process handles the next message.

    Args:
        resource: the resource with the messages' schema; created without one if missing.
        on_message: handles a message: `async def handle(task)` or `handle(task, context)`,
            or a plain function, which runs on a thread.
        on_complete: called after each completed message: `(task, result)`.
        on_error: called after each failure: `(error, task)`.
        timeout: seconds that a handler may take; None for no limit.
        backoff: takes how often a message has failed, and returns the seconds until the next
            attempt; 1, 2, 4 … 32 by default.
        namespace: separates several queues of one resource.
        options: as in `QueueSettings` and `CoordinatorSettings`; also `workers`, `max_retries`
            and `ticket_interval`.

    Raises:
        Invalid, Misconfigured: an option is unknown or wrong, with the fix.
    """

    slug: ClassVar[str] = "queue"
    _slug_aliases: ClassVar[tuple[str, ...]] = ("s3-queue",)

    def __init__(
        self,
        *,
        resource: str,
        on_message: Handler | None = None,
        on_complete: Handler | None = None,
        on_error: Handler | None = None,
        timeout: float | None = 3600.0,
        backoff: Backoff = default_backoff,
        namespace: str | None = None,
        **options: Any,
    ) -> None:
        options = translate(options)
        passed, shared = split_options(QueueSettings, options, "a queue", _ALIASES)
        super().__init__(namespace=namespace, **shared)
        sources = Sources.load(os.environ, Path.cwd())
        resolved = resolve(QueueSettings, passed, sources, section="queue")
        self.settings = resolved.value
        self._has_completed_ttl = resolved.origins["completed_ttl"].kind != "default"
        if timeout is not None:
            check_seconds("timeout", timeout, is_zero_allowed=False)
        self.resource = resource
        self._timeout = timeout
        self._retries = Retries(max_attempts=self.settings.max_attempts, backoff=backoff)
        self._on_complete = on_complete
        self._on_error = on_error
        self._executor: Executor | None = None
        self._backend: QueueBackend | None = None
        self._worker: Worker | None = None
        self._worker_task: asyncio.Task[None] | None = None
        self._workers: dict[Worker, None] = {}
        """Every worker whose handlers may run."""
        self._is_paused = False
        self._maintenance = Maintenance(self.settings, self._find_completed_ttl, self._on_newer)
        self._started_at = Mono(0.0)
        self._counters: Counter[str] = Counter()
        if on_message is not None:
            self.handler(on_message)

    def handler(self, function: _H) -> _H:
        """Handle messages with this function. Can be used as a decorator.

        Raises:
            Invalid: the function takes no message, or there is a handler already.
        """
        if self._executor is not None:
            problem = "cannot be added: there is a handler already"
            raise Invalid("on_message", function, problem, "pass one handler")
        self._executor = Executor(
            function,
            self.settings.concurrency,
            auto_acknowledge=self.settings.auto_acknowledge,
        )
        if self.is_running:
            self._start_worker()
        return function

    @property
    def kind(self) -> str:
        """What distinguishes it in its namespace, which has one queue per resource."""
        return f"{self.slug}-{self.resource}"

    @property
    def queue(self) -> str:
        """The stored name of this queue."""
        return name_queue(self.namespace, self.resource)

    @property
    def completed_ttl(self) -> float:
        """Seconds for which completed messages are remembered.

        The setting, if it was passed or configured. Otherwise what the plugins of the database
        say, whenever they were added; the longest counts.
        """
        governing = self._find_governing_ttl()
        return self.settings.completed_ttl if governing is None else governing

    def _find_governing_ttl(self) -> float | None:
        """Return what other plugins say about completed messages; None if nobody says anything."""
        if self._has_completed_ttl or self._database is None:
            return None
        plugins = self._database.plugins
        found = [plugins[name].completed_message_ttl for name in plugins]
        ttls = [ttl for ttl in found if ttl is not None]
        return min(max(ttls), LONGEST_RETENTION) if ttls else None

    def _find_completed_ttl(self) -> float | None:
        """Return how long completed messages are kept; None while it may still be decided."""
        if not self._has_completed_ttl and self._find_governing_ttl() is None:
            age = self.database.components.clock.mono() - self._started_at
            if age < _TIME_FOR_PLUGINS:
                return None
        return self.completed_ttl

    async def enqueue(
        self,
        data: Mapping[str, Json],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> str:
        """Push a message; return its id. See `Resource.enqueue`."""
        (name,) = await self.enqueue_many(
            [data],
            delay=delay,
            timeout=timeout,
            max_attempts=max_attempts,
            connection=connection,
        )
        return name

    async def enqueue_many(
        self,
        data: Sequence[Mapping[str, Json]],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> list[str]:
        """Push messages in order, all or none; return their ids. See `Resource.enqueue`."""
        attempts = self.settings.max_attempts if max_attempts is None else max_attempts
        data = as_list("data", data)
        ids = self.database.components.ids.records(len(data))
        new_messages = build_messages(
            self.database.resource(self.resource),
            data,
            ids,
            delay=delay,
            timeout=timeout,
            max_attempts=attempts,
        )
        if connection is not None:
            # Only the caller knows whether and when it commits: no event, no wake-up.
            await self._get_backend().push_within(connection, new_messages)
            return ids
        await self._get_backend().push(new_messages)
        if self._worker is not None:
            self._worker.wake()
        self._counters["enqueued"] += len(ids)
        self.emit(events.MessagesEnqueued(queue=self.queue, ids=tuple(ids)))
        return ids

    async def count(self, state: str = "pending") -> int:
        """Count messages that are pending, processing, completed, dead, cancelled, or all."""
        check_state(state, _COUNTED)
        counts = await self._get_backend().count()
        return sum(counts.get(counted, 0) for counted in _COUNTED[state])

    def stats(self) -> dict[str, int]:
        """Return what this process has done since it started, from counters."""
        names = ("enqueued", "completed", "retried", "cancelled", "returned", "dead", "lost")
        running = 0 if self._worker is None else self._worker.running
        return {**{name: self._counters[name] for name in names}, "running": running}

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Return messages in a state, the oldest first; continue after the last one's `cursor`."""
        return await self._get_backend().browse(state, after=after, limit=limit)

    async def dead_letters(self, *, after: str = "", limit: int = 100) -> list[MessageInfo]:
        """Return the messages without attempts left, with every error."""
        return await self._get_backend().browse("dead", after=after, limit=limit)

    async def redrive(self, ids: Sequence[str] | None = None, *, limit: int | None = None) -> int:
        """Queue dead letters again, all or by id, with all their attempts; return how many.

        Args:
            ids: the messages; without ids, all dead letters.
            limit: the most messages to queue again, the oldest first; None for no limit.
        """
        return await self._get_backend().redrive(ids, limit=limit)

    async def purge(self, *, include_dead: bool = False) -> int:
        """Remove unclaimed messages, optionally the dead letters too; return how many."""
        return await self._get_backend().purge([*_PENDING, *(("dead",) if include_dead else ())])

    def pause(self) -> None:
        """Stop claiming in this process until `resume`; running handlers continue."""
        self._is_paused = True
        self._apply_pause()

    def resume(self) -> None:
        """Claim again."""
        self._is_paused = False
        self._apply_pause()

    async def pause_everywhere(self, reason: str = "") -> bool:
        """Stop all processes from claiming until `resume_everywhere`; running handlers continue.

        The pause is stored, so processes that start later do not claim either. False means
        that the queue was already paused, and nothing changed.
        """
        return await self._get_backend().pause(reason)

    async def resume_everywhere(self) -> bool:
        """Allow all processes to claim again; False means that the queue was not paused."""
        return await self._get_backend().resume()

    async def drain(self, *, max_messages: int | None = None, deadline: float | None = None) -> int:
        """Handle messages until none is left, for one-shot runs; return how many.

        The background worker of this process stops meanwhile: its messages in flight are
        finished and counted, or returned.

        Args:
            max_messages: stop after this many.
            deadline: claim no more after this many seconds.

        Raises:
            Invalid: the queue has no handler, or is not running, or an argument is wrong.
        """
        _check_drain(max_messages, deadline)
        clock = self.database.components.clock
        start = clock.mono()
        # A handler would wait for its own end.
        background = self._worker if find_calling_worker(self._backend) is None else None
        before = 0 if background is None else background.handled
        try:
            await self._stop_worker(background)
            if not self.is_running:
                fix = "await queue.start() first"
                raise Invalid("queue", self.resource, "is not running", fix)
            finished = 0 if background is None else background.handled - before
            quota = None if max_messages is None else max_messages - finished
            worker = self._build_worker(quota=quota, until_empty=True)
            left = None if deadline is None else deadline - (clock.mono() - start)
            return finished + await self._run_for(worker, left)
        finally:
            if background is not None and self.is_running:
                self._start_worker()

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is one of its handlers or callbacks."""
        return find_calling_worker(self._backend) is not None

    async def on_start(self) -> None:
        """Find or create the resource, and connect it to this queue."""
        database = self.database
        self._started_at = database.components.clock.mono()
        self._backend = open_backend(database.store, self.queue, database.components)
        if self.resource not in database.resources:
            await database.create_resource(self.resource)
        database.resources[self.resource].set_queue(self)
        for part in get_args(QueuePart):
            records = MessageRecords(database.store, database.components, self.queue, part)
            database.add_view(f"plg_{self.namespace}_{self.resource}_{part}", records)
        database.events.on(WorkerDied.name, self._end_claims_of)

    async def on_stop(self) -> None:
        """Stop listening to deaths of workers."""
        self.database.events.off(WorkerDied.name, self._end_claims_of)

    async def _set_up(self, exit_stack: AsyncExitStack) -> None:
        """Join, become a candidate, then handle messages; stopping undoes this in reverse."""
        await super()._set_up(exit_stack)
        self.run_in_background(self._emit_stats, "stats")
        self._start_worker()
        exit_stack.push_async_callback(self._shut_down)

    def prepare_stop(self) -> None:
        """Claim no more; handlers finish while other plugins stop."""
        for worker in self._workers:
            worker.stop(self.database.time_left)

    @property
    def stop_time(self) -> float:
        """Seconds that handlers have to finish."""
        return self.settings.grace

    def list_running(self) -> list[str]:
        """Return descriptions of the handlers and callbacks that run."""
        # Workers of one queue share its threads.
        return list(dict.fromkeys(text for worker in self._workers for text in worker.user_code))

    async def _shut_down(self) -> None:
        self.prepare_stop()
        await self._stop_worker(self._worker)
        for worker in list(self._workers):
            # That of a `drain` may still run.
            await worker.ended.wait()
        if self._executor is not None:
            self._executor.close()

    async def _stop_worker(self, worker: Worker | None) -> None:
        """Claim no more; finish or return the messages in flight."""
        task = self._worker_task
        if worker is None or task is None:
            return
        self._worker = self._worker_task = None
        worker.stop(self.database.time_left)
        self._get_membership().publish(**build_worker_facts(self.queue, None))
        await asyncio.wait([task])
        self.emit(events.WorkersStopped(queue=self.queue, worker_id=self.worker_id))

    def unready(self) -> str:
        """Return why it cannot work now; empty if all is well."""
        return self.stuck() or super().unready() or self._describe_wait()

    def _describe_wait(self) -> str:
        worker, membership = self._worker, self._membership
        if worker is None or membership is None:
            return ""
        if worker.is_waiting_for_callbacks:
            return "too many callbacks of finished messages have not ended"
        if worker.silence <= membership.timing.timeout:
            return ""
        return f"the store has not answered its claims for {worker.silence:.0f} s"

    def stuck(self) -> str:
        """Return that handlers do not end, if they occupy every slot: only a new process helps."""
        if self._worker is not None and self._worker.is_stuck:
            return "every slot is occupied by a handler that exceeded its timeout"
        return super().stuck()

    async def _end_claims_of(self, death: WorkerDied) -> None:
        """End the claims of a worker whose death this process has recorded."""
        for worker in self._workers:
            worker.look_for_late_claims()
        try:
            self._on_ended(await self._get_backend().end_claims({death.incarnation}))
        except Unavailable as error:
            # The reaper of each worker checks, too.
            self._on_failure(error, None)

    async def _emit_stats(self) -> None:
        while True:
            await self.database.components.clock.sleep(_STATS_INTERVAL)
            self.emit(events.QueueStats(queue=self.queue, **self.stats()))

    async def coordinator_work(self) -> None:
        """Remove messages that were finished long ago, and report those of newer code."""
        await self._maintenance.run(self._get_backend(), self.database.components.clock)

    def _get_backend(self) -> QueueBackend:
        if self._backend is None:
            fix = "await database.use_plugin(queue) first"
            raise Invalid("queue", self.resource, "was never started", fix)
        return self._backend

    def _start_worker(self) -> None:
        """Handle messages in the background, if there is a handler and no worker yet."""
        if self._executor is None or self._worker is not None:
            return
        self._worker = self._build_worker()
        self._apply_pause()
        self._worker_task = self.run_in_background(partial(self._run, self._worker), "worker")
        self.emit(
            events.WorkersStarted(
                queue=self.queue,
                worker_id=self.worker_id,
                concurrency=self.settings.concurrency,
            )
        )

    async def _run(self, worker: Worker) -> None:
        self._workers = {other: None for other in self._workers if other.user_code}
        self._workers[worker] = None
        await worker.run()

    async def _run_for(self, worker: Worker, seconds: float | None) -> int:
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
        if self._worker is not None:
            self._worker.is_paused = self._is_paused
            self._worker.wake()
            status = WorkerStatus(concurrency=self.settings.concurrency, is_paused=self._is_paused)
            self._get_membership().publish(**build_worker_facts(self.queue, status))

    def _build_worker(self, *, quota: int | None = None, until_empty: bool = False) -> Worker:
        if self._executor is None:
            fix = "pass on_message=, or decorate one with @queue.handler"
            raise Invalid("queue", self.resource, "has no handler", fix)
        listener = WorkerListener(
            on_settled=self._on_settled,
            on_lost=self._on_lost,
            on_ended=self._on_ended,
            on_overrun=self._on_overrun,
            on_progress=self._on_progress,
            on_failure=self._on_failure,
        )
        return Worker(
            self._get_backend(),
            self._get_membership(),
            self._executor,
            self.settings,
            self._retries,
            self._timeout,
            self.database.components,
            listener,
            quota=quota,
            until_empty=until_empty,
        )

    def _on_settled(
        self, delivery: Delivery, verdict: HandlerVerdict, delay: float
    ) -> Coroutine[Any, Any, None] | None:
        message = delivery.message
        match verdict:
            case Completed(result):
                self._counters["completed"] += 1
                self._report(events.MessageCompleted, message, duration=delivery.duration)
                if self._on_complete is not None:
                    return self._call("on_complete", self._on_complete, delivery.document, result)
            case Cancel(reason):
                self._counters["cancelled"] += 1
                self._report(events.MessageCancelled, message, reason=safe_str(reason))
            case Returned() | Snooze():
                self._counters["returned"] += 1
                self._report(events.MessageReturned, message, delay=delay)
            case Failed(error, cause):
                if has_spent(message.attempt, message.max_attempts):
                    self._counters["dead"] += 1
                    self._report(events.MessageDead, message, error=error)
                else:
                    self._counters["retried"] += 1
                    self._report(events.MessageRetried, message, error=error, delay=delay)
                raised = RuntimeError(error) if cause is None else cause
                self._on_failure(raised, message.id)
                if self._on_error is not None:
                    return self._call("on_error", self._on_error, raised, delivery.document)
        return None

    def _report(self, kind: type[Event], about: Message | EndedClaim, **facts: Any) -> None:
        """Emit an event about a message if anybody listens: there may be very many."""
        if self.events.has_listener(kind):
            self.emit(kind(queue=self.queue, message_id=about.id, attempt=about.attempt, **facts))

    def _on_lost(self, message: Message, reason: str) -> None:
        self._counters["lost"] += 1
        self._report(events.MessageLost, message, reason=reason)

    def _on_ended(self, ended: list[EndedClaim]) -> None:
        for claim in ended:
            self._report(events.MessageRecovered, claim, state=claim.state)

    def _on_overrun(self, message: Message, timeout: float) -> None:
        self._report(events.HandlerOverran, message, timeout=timeout)

    def _on_progress(self, message: Message, progress: float) -> None:
        self._report(events.MessageProgressed, message, progress=progress)

    def _on_newer(self, count: int, format: int) -> None:
        self.emit(events.NewerMessages(queue=self.queue, count=count, format=format))

    def _on_failure(self, error: BaseException, message_id: str | None) -> None:
        text = format_error(error)
        self.emit(events.QueueError(queue=self.queue, error=text, message_id=message_id))

    def _call(
        self, name: str, function: Handler, *arguments: Any
    ) -> Coroutine[Any, Any, None] | None:
        """Call a function of the user's. An error in it becomes an event and stops nothing."""
        try:
            result = function(*arguments)
            is_awaitable = inspect.isawaitable(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; it becomes an event
            self._report_call_error(name, function, error)
            return None
        return self._finish_call(name, function, result) if is_awaitable else None

    async def _finish_call(self, name: str, function: Handler, result: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await result
        except BaseException as error:
            # An exit is an error of the function, as in a handler.
            if is_for_task(error) and not issubclass(type(error), SystemExit):
                raise
            self._report_call_error(name, function, error)

    def _report_call_error(self, name: str, function: Handler, error: BaseException) -> None:
        self.emit(
            HandlerFailed(event=name, callback=safe_name(function), error=describe_error(error))
        )


S3QueuePlugin = QueuePlugin
"""The documents' name of `QueuePlugin`."""


def _check_drain(max_messages: int | None, deadline: float | None) -> None:
    if max_messages is not None:
        check_count("max_messages", max_messages, least=0)
    if deadline is not None:
        check_seconds("deadline", deadline)
