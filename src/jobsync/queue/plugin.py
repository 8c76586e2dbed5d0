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

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Unpack, cast, get_args, overload

import msgspec

from jobsync.coordination.events import WorkerDied
from jobsync.core.arguments import check_resource_name, check_seconds
from jobsync.core.retry import Backoff, Retries, default_backoff
from jobsync.database.coordinator_plugin import CoordinatorPlugin, split_options
from jobsync.database.document import Document, RecordT
from jobsync.database.home_loop import on_home_loop
from jobsync.database.record_types import RecordType
from jobsync.errors import Invalid, JobsyncError, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue import events
from jobsync.queue.backend import QueueBackend, QueuePart, name_queue, show_queue
from jobsync.queue.completed_ttl import CompletedTtl
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.executor import Executor, Handler, MessageFunction, MessageHandler
from jobsync.queue.fleet import PluginFleet
from jobsync.queue.in_flight import build_reader
from jobsync.queue.limits import QueueLimits
from jobsync.queue.local_workers import LocalWorkers
from jobsync.queue.maintenance import Maintenance
from jobsync.queue.message_calls import MessageCalls
from jobsync.queue.message_records import MessageRecords
from jobsync.queue.opening import check_limits, open_backend
from jobsync.queue.progress import ProgressWriter
from jobsync.queue.pull import PulledClaims
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueOptions, QueueSettings, translate
from jobsync.queue.task_calls import CRON_FIX, TaskCalls
from jobsync.queue.usage import UsageEstimate, estimate_usage
from jobsync.queue.worker import Worker, find_calling_worker
from jobsync.queue.worker_status import WorkerStatus, build_worker_facts, report_limits
from jobsync.settings import Sources, resolve
from jobsync.user_functions import check_function

__all__ = ["QueuePlugin", "S3QueuePlugin"]

ResultT = TypeVar("ResultT")

_STATS_INTERVAL = 60.0
_SCHEDULER_TIME = 1.0  # seconds in which a scheduler may be added after a queue with crons
_ALIASES = (
    *("workers", "max_retries", "ticket_interval", "on_message", "on_complete", "on_error"),
    *("resource", "payload", "timeout", "backoff", "namespace"),
)


@on_home_loop
class QueuePlugin(CoordinatorPlugin, TaskCalls, MessageCalls[RecordT]):
    """A durable queue on a resource: any free process handles the next message.

    Functions become tasks of the queue by `task`; other messages go to `on_message`.

    Args:
        resource: the resource with the messages' schema; created without one if missing.
        payload: the type of messages without a task: a `Struct`, a dataclass, a `TypedDict` or a
            model of pydantic. Without it handlers get documents.
        on_message: handles a message: `async def handle(task)` or `handle(task, context)`,
            or a plain function, which runs on a thread.
        on_complete: called after each completed message: `(task, result)`. A plain function runs
            on a thread, as a handler does.
        on_error: called after each failure: `(error, task)`, likewise.
        timeout: seconds that a handler may take; None for no limit.
        backoff: takes how often a message has failed, and returns the seconds until the next
            attempt; 1, 2, 4 … 32 by default.
        namespace: separates several queues of one resource.
        options: as in `QueueOptions`.

    Raises:
        Invalid, Misconfigured: an option is unknown or wrong, with the fix.
    """

    slug: ClassVar[str] = "queue"
    _slug_aliases: ClassVar[tuple[str, ...]] = ("s3-queue",)

    @overload
    def __init__(
        self: "QueuePlugin[Document]",
        resource: str,
        *,
        payload: None = ...,
        on_message: MessageFunction[Document] | None = ...,
        on_complete: Callable[[Any, Any], Any] | None = ...,
        on_error: Callable[[BaseException, Any], Any] | None = ...,
        timeout: float | None = ...,
        backoff: Backoff = ...,
        namespace: str | None = ...,
        **options: Unpack[QueueOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        resource: str,
        *,
        payload: type[RecordT],
        on_message: MessageFunction[RecordT] | None = ...,
        on_complete: Callable[[Any, Any], Any] | None = ...,
        on_error: Callable[[BaseException, Any], Any] | None = ...,
        timeout: float | None = ...,
        backoff: Backoff = ...,
        namespace: str | None = ...,
        **options: Unpack[QueueOptions],
    ) -> None: ...
    def __init__(
        self,
        resource: str,
        *,
        payload: Any = None,
        on_message: Handler | None = None,
        on_complete: Handler | None = None,
        on_error: Handler | None = None,
        timeout: float | None = 3600.0,
        backoff: Backoff = default_backoff,
        namespace: str | None = None,
        **options: Any,
    ) -> None:
        resource = check_resource_name("resource", resource)
        options = translate(options)
        passed, shared = split_options(QueueSettings, options, "a queue", _ALIASES)
        super().__init__(namespace=namespace, **shared)
        sources = Sources.load(os.environ, Path.cwd())
        resolved = resolve(QueueSettings, passed, sources, section="queue")
        self.settings = resolved.value
        self._completed_ttl = CompletedTtl(
            self.settings.completed_ttl,
            is_explicit=resolved.origins["completed_ttl"].kind != "default",
        )
        if timeout is not None:
            check_seconds("timeout", timeout, is_zero_allowed=False)
        self.resource = resource
        self._payload = None if payload is None else RecordType("payload", payload)
        self._timeout = timeout
        self._retries = Retries(max_attempts=self.settings.max_attempts, backoff=backoff)
        self._executor = Executor(auto_acknowledge=self.settings.auto_acknowledge)
        self._known_tasks, self._cron_tasks, self._task_limits, self._unknown = {}, {}, {}, set()
        self._backend: QueueBackend | None = None
        self._progress = ProgressWriter(
            lambda: self.run_in_background(self._progress.run, "progress"),
            self._get_backend,
            lambda: self.database.components.clock,
        )
        self._reporter = QueueReporter(self, on_complete, on_error, timeout, self._progress)
        self._workers = LocalWorkers(
            self,
            self.settings.concurrency,
            self._build_worker,
            self._publish,
            lambda: self._executor.tasks,
        )
        self._maintenance = Maintenance(
            self.settings, self._completed_ttl.find_decided, self._reporter.on_newer
        )
        if on_message is not None:
            self.handler(on_message)

    def __repr__(self) -> str:
        return show_queue(type(self), self.namespace, self.resource)

    @overload
    def handler(self, function: Callable[[RecordT], ResultT]) -> Callable[[RecordT], ResultT]: ...
    @overload
    def handler(
        self, function: Callable[[RecordT, Context], ResultT]
    ) -> Callable[[RecordT, Context], ResultT]: ...
    @overload
    def handler(
        self, function: Callable[[RecordT, BlockingContext], ResultT]
    ) -> Callable[[RecordT, BlockingContext], ResultT]: ...
    def handler(self, function: Handler = cast("Any", None)) -> Handler:  # noqa: B008 - for the error alone
        """Handle messages without a task with this function. Can be used as a decorator.

        Raises:
            Invalid: the function takes no message, or there is a handler already.
        """
        check_function("function", function, "write @queue.handler, without parentheses")
        if "" in self._executor.tasks:
            problem = "cannot be added: there is a handler already"
            fix = "pass one handler, or make each function a task: @queue.task"
            raise Invalid("on_message", function, problem, fix)
        self._add_handler("", MessageHandler(function))
        return function

    def _add_handler(self, task: str, handler: MessageHandler) -> None:
        if self.is_running:
            check_limits(self.database.store, self._find_limits())
        self._executor.add(task, handler)
        if self.is_running:
            self._workers.start()

    def set_concurrency(self, concurrency: int) -> None:
        """Run so many handlers at once, whatever the option says. Call it before the start."""
        self.settings = msgspec.structs.replace(self.settings, concurrency=concurrency)
        self._workers.concurrency = concurrency

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
        return self._completed_ttl.find(self._database)

    def stats(self) -> dict[str, int]:
        """Return what this process has done since it started, from counters."""
        names = ("enqueued", "completed", "retried", "cancelled", "returned", "dead", "lost")
        counters = self._reporter.counters
        return {**{name: counters[name] for name in names}, "running": self._workers.running}

    def estimate_usage(
        self,
        *,
        workers: int,
        messages_per_day: float,
        messages_per_page: float = 1.0,
        seconds_per_page: float = 0.0,
        days: float = 30.0,
    ) -> UsageEstimate:
        """Return the requests and dollars of such a queue on S3, at Amazon's list prices.

        Args:
            workers: processes that handle messages.
            messages_per_day: evenly spread.
            messages_per_page: messages that are pushed together.
            seconds_per_page: seconds from the claim of a page until all its messages are handled.
            days: for how long.

        Raises:
            Invalid: a number is out of range.
        """
        return estimate_usage(
            workers=workers,
            messages_per_day=messages_per_day,
            messages_per_page=messages_per_page,
            seconds_per_page=seconds_per_page,
            heartbeat=self.coordination.timing_of(is_billed=True).heartbeat,
            visibility=self.settings.visibility_timeout,
            days=days,
        )

    def _check_running(self) -> None:
        self.database.check_works("claim messages")
        if not self.is_running:
            raise Invalid("queue", self.resource, "is not running", "await queue.start() first")

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is one of its handlers or callbacks."""
        return find_calling_worker(self._backend) is not None

    async def on_start(self) -> None:
        """Connect the resource to this queue, and end the claims of workers that die."""
        await self.on_declare()
        self.database.events.on(WorkerDied.name, self._end_claims_of)
        for plugin in self.list_started():
            await plugin.adopt_jobs(self.scheduled_jobs)

    async def on_declare(self) -> None:
        """Find or create the resource, and connect it to this queue."""
        database = self.database
        self._completed_ttl.start(database)
        order, limits = self.settings.order, self._find_limits()
        self._backend = open_backend(
            database.store, self.queue, database.components, order=order, limits=limits
        )
        if self.resource not in database.resources:
            await database.create_resource(self.resource)
        database.resources[self.resource].add_queue(self)
        for part in get_args(QueuePart):
            records = MessageRecords(database.store, database.components, self.queue, part)
            database.add_view(f"plg_{self.namespace}_{self.resource}_{part}", records)

    def _find_limits(self) -> QueueLimits:
        # Not a copy: a task may be added later.
        return msgspec.structs.replace(self.settings.limits, tasks=self._task_limits)

    @property
    def scheduled_jobs(self) -> Mapping[str, Mapping[str, Any]]:
        """The jobs that enqueue tasks with a cron."""
        return self._build_jobs(self.resource, self.namespace)

    def _on_cron_added(self, task: str) -> None:
        if self.is_running:
            self.run_in_background(partial(self._offer_job, task), "offers a job")

    async def _offer_job(self, task: str) -> None:
        """Offer a task to the schedulers that run; report it if there is none, or one refuses.

        Raises:
            Unavailable: the store does not answer, refuses, or its reply is lost; this is called
                again.
        """
        for plugin in self.list_started():
            try:
                await plugin.adopt_jobs({task: self.scheduled_jobs[task]})
            except Unavailable:
                raise
            except (Misconfigured, OutcomeUnknown) as error:
                # The job is not adopted now; offered again, it is, also if it was stored.
                raise Unavailable(self.database.store.name, str(error).rstrip(".")) from error
            except JobsyncError as error:
                self._reporter.on_failure(error)
        await self._warn_of_crons(task)

    async def on_stop(self) -> None:
        """Stop listening to deaths of workers."""
        self.database.events.off(WorkerDied.name, self._end_claims_of)

    async def _set_up(self, exit_stack: AsyncExitStack) -> None:
        """Join, become a candidate, then handle messages; stopping undoes this in reverse."""
        await super()._set_up(exit_stack)
        self._join_fleet(exit_stack)
        self.run_in_background(self._emit_stats, "stats")
        if self._cron_tasks:
            self.run_in_background(self._warn_of_crons, "crons")
        if self._executor.tasks:
            self._workers.start()
        exit_stack.push_async_callback(self._shut_down)

    def _join_fleet(self, exit_stack: AsyncExitStack) -> None:
        """Pass the session and the election of this plugin to the backend."""
        if self._coordinator is None:
            return
        backend, membership = self._get_backend(), self._get_membership()
        interval = self.settings.dispatch_interval
        fleet = PluginFleet(self, membership, self._coordinator, self._reporter, interval)
        backend.join(fleet)
        exit_stack.callback(backend.join, None)
        if backend.is_billed:
            self.run_in_background(backend.coordinate, "dispatcher")

    def prepare_stop(self) -> None:
        """Claim no more; handlers finish while other plugins stop."""
        self._workers.prepare_stop()
        if self._pulled is not None:
            self._pulled.is_stopping = True

    @property
    def stop_time(self) -> float:
        """Seconds that handlers have to finish."""
        return self.settings.grace

    def list_running(self) -> list[str]:
        """Return descriptions of the handlers and callbacks that run."""
        running = self._workers.user_code
        # Threads that were left behind may still run callbacks.
        is_missing = self._reporter.runs_functions and "callbacks" not in running
        return [*running, *(["callbacks"] if is_missing else [])]

    async def _shut_down(self) -> None:
        self._stop_pulled()
        await self._workers.stop()
        await self._wait_for_pulled()
        self._executor.close()
        self._reporter.close()

    def unready(self) -> str:
        """Return why it cannot work now; empty if all is well."""
        return self.stuck() or super().unready() or self._describe_wait()

    def _describe_wait(self) -> str:
        membership = self._membership
        if self._cron_tasks and not any(each.runs_jobs for each in self.list_started()):
            return f"task {min(self._cron_tasks)} has a cron, and no scheduler: {CRON_FIX}"
        return "" if membership is None else self._workers.describe_wait(membership.timing.timeout)

    def stuck(self) -> str:
        """Return that handlers do not end, if they occupy every slot: only a new process helps."""
        if self._workers.is_stuck:
            return "every slot is occupied by a handler that exceeded its timeout"
        return super().stuck()

    async def _end_claims_of(self, death: WorkerDied) -> None:
        """End the claims of a worker whose death this process has recorded."""
        self._workers.look_for_late_claims()
        try:
            self._reporter.on_ended(await self._get_backend().end_claims({death.incarnation}))
        except Unavailable as error:
            # The reaper of each worker checks, too.
            self._reporter.on_failure(error)

    async def _emit_stats(self) -> None:
        while True:
            await self.database.components.clock.sleep(_STATS_INTERVAL)
            self.emit(events.QueueStats(queue=self.queue, **self.stats()))

    async def _warn_of_crons(self, task: str | None = None) -> None:
        """Report tasks that nobody enqueues, or one of them, unless a scheduler starts soon."""
        await self.database.components.clock.sleep(_SCHEDULER_TIME)
        if not any(each.runs_jobs for each in self.list_started()):
            for event in self._build_cron_warnings(self.queue):
                if task is None or event.task == task:
                    self.emit(event)

    async def coordinator_work(self) -> None:
        """Remove messages that were finished long ago, and report those of newer code."""
        await self._maintenance.run(self._get_backend(), self.database.components.clock)

    def _get_backend(self) -> QueueBackend:
        if self._backend is None:
            fix = "await database.use_plugin(queue) first"
            raise Invalid("queue", self.resource, "was never started", fix)
        return self._backend

    def _publish(self, status: WorkerStatus | None) -> None:
        if status is not None:
            status = msgspec.structs.replace(status, limits=report_limits(self._find_limits()))
        self._get_membership().publish(**build_worker_facts(self.queue, status))

    def _build_worker(self, *, quota: int | None = None, until_empty: bool = False) -> Worker:
        if not self._executor.tasks:
            fix = "pass on_message=, or decorate functions with @queue.task"
            raise Invalid("queue", self.resource, "has no handler", fix)
        return Worker(
            self._get_backend(),
            self._get_membership(),
            self._executor,
            self.settings,
            self._retries,
            self._timeout,
            self.database.components,
            self._reporter,
            build_reader(self._payload),
            quota=quota,
            until_empty=until_empty,
        )

    def _build_pulled(self) -> PulledClaims:
        return PulledClaims(
            self._get_backend(),
            self._get_membership(),
            self.settings,
            self._retries,
            self.database.components,
            self._reporter,
            self.database.home_loop,
            build_reader(self._payload),
            is_paused=lambda: self._workers.is_paused,
        )


S3QueuePlugin = QueuePlugin
"""The documents' name of `QueuePlugin`."""
