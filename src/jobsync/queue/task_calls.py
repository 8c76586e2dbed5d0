"""Makes functions tasks of a queue: the decorator, and what a queue knows of its tasks."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    NamedTuple,
    Protocol,
    TypedDict,
    cast,
    overload,
)

from jobsync.core.arguments import check_count
from jobsync.core.codec import Json
from jobsync.core.retry import Backoff, Retries
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.errors import Invalid, closest_name
from jobsync.events import Event
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.enqueue import check_task_name
from jobsync.queue.events import CronUnscheduled, TaskUnknown
from jobsync.queue.executor import Executor, MessageHandler
from jobsync.queue.limits import NO_LIMITS, QueueLimits, parse_rate
from jobsync.queue.placing import check_priority
from jobsync.queue.settings import QueueSettings
from jobsync.queue.task_arguments import EncodedArguments, TaskSignature
from jobsync.queue.tasks import (
    CallOptions,
    P,
    QueueTask,
    R,
    TaskQueue,
    check_options,
    translate_options,
)
from jobsync.safe_text import safe_name
from jobsync.user_functions import check_function

__all__ = ["CRON_FIX", "TaskCalls", "TaskOptions"]

CRON_FIX = "write Database(plugins=[queue, SchedulerPlugin()])"
"""What makes tasks with a cron be enqueued."""
_FIX = "write @queue.task, or @queue.task(max_retries=5)"
_OWN_OPTIONS = {
    *("name", "backoff", "cron", "timezone"),
    *("max_concurrency", "rate_limit", "rate_burst"),
}
"""The options of a task that are not those of its messages."""

_MOST_UNKNOWN = 100
"""The most names of unknown tasks that are remembered and reported."""


class TaskOptions(TypedDict, total=False):
    """What `QueuePlugin.task` takes.

    `max_retries`, `timeout`, `priority`, `group`, `key`, `key_ttl` and `replace` are those of each
    message, unless a call has its own.
    """

    name: str | None
    """The stored name; that of the module and the function by default."""
    max_retries: int
    timeout: float | None
    backoff: Backoff
    """Takes how often a message has failed, and returns the seconds until the next attempt."""
    priority: int
    group: str | Callable[[Mapping[str, Json]], str] | None
    key: str | Callable[[Mapping[str, Json]], str] | None
    key_ttl: float | timedelta | None
    replace: bool
    max_concurrency: int | None
    """How many of its messages all processes together handle at once; no limit by default."""
    rate_limit: str | None
    """How many of its messages all processes together start in a time, such as "100/minute"."""
    rate_burst: int | None
    """How many of them may start at once after a pause; 1."""
    cron: str
    """When it is enqueued, without arguments, by the scheduler of the same database."""
    timezone: str
    """In which `cron` is meant; the scheduler's by default."""


class TaskDecorator(Protocol):
    """Makes a function a task."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Awaitable[R]], /
    ) -> QueueTask[Concatenate[Context, P], Awaitable[R], P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[BlockingContext, P], R], /
    ) -> QueueTask[Concatenate[BlockingContext, P], R, P, R]: ...
    @overload
    def __call__(
        self, function: Callable[P, Awaitable[R]], /
    ) -> QueueTask[P, Awaitable[R], P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> QueueTask[P, R, P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> QueueTask[..., Any, ..., Any]:
        """Return the task."""
        ...


class KnownTask(NamedTuple):
    """A task of this process."""

    signature: TaskSignature
    options: EnqueueOptions
    """Of its messages."""


class TaskCalls(ABC):
    """The tasks of a `QueuePlugin`."""

    settings: QueueSettings
    _executor: Executor
    _known_tasks: dict[str, "KnownTask"]
    """By name."""
    _task_limits: dict[str, QueueLimits]
    """Of the tasks that have limits, by name."""
    _cron_tasks: dict[str, dict[str, Any]]
    """When to enqueue tasks, as the options of scheduled jobs, by name."""
    _unknown: set[str]
    """The names of tasks that were enqueued and are not known here."""

    @overload
    def task(
        self, function: Callable[Concatenate[Context, P], Awaitable[R]], /
    ) -> QueueTask[Concatenate[Context, P], Awaitable[R], P, R]: ...
    @overload
    def task(
        self, function: Callable[Concatenate[BlockingContext, P], R], /
    ) -> QueueTask[Concatenate[BlockingContext, P], R, P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> QueueTask[P, Awaitable[R], P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> QueueTask[P, R, P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = ...,
        max_retries: int = ...,
        timeout: float | None = ...,
        backoff: Backoff = ...,
        priority: int = ...,
        group: str | Callable[[Mapping[str, Json]], str] | None = ...,
        key: str | Callable[[Mapping[str, Json]], str] | None = ...,
        key_ttl: float | timedelta | None = ...,
        replace: bool = ...,
        max_concurrency: int | None = ...,
        rate_limit: str | None = ...,
        rate_burst: int | None = ...,
        cron: str = ...,
        timezone: str = ...,
    ) -> TaskDecorator: ...
    def task(self, function: Any = None, **options: Any) -> Any:
        """Make a function a task of this queue: a decorator, with options or without.

        The function is a coroutine function, or a plain one, which runs on a thread. It gets the
        arguments of the call that was enqueued, as its annotations say, and its context where a
        parameter is annotated as `Context` (`BlockingContext` in a plain function).

        Args:
            function: the function.
            options: as in `TaskOptions`.

        Raises:
            Invalid: an option is wrong, a parameter cannot be stored, or there is a task of this
                name.
        """
        check_options(options, TaskOptions.__annotations__)
        chosen = cast("TaskOptions", options)
        if function is None:
            return lambda function: self._add_task(function, chosen)
        return self._add_task(function, chosen)

    def _add_task(
        self, function: Callable[..., Any], options: TaskOptions
    ) -> QueueTask[..., Any, ..., Any]:
        check_function("function", function, _FIX)
        name = options.get("name")
        name = check_task_name("name", _find_name(function) if name is None else name)
        if name in self._known_tasks:
            problem = "is that of another task of this queue"
            raise Invalid("name", name, problem, "pass another one: @queue.task(name=...)")
        signature = TaskSignature(name, function)
        backoff = options.get("backoff")
        retries = None if backoff is None else Retries(backoff=backoff)
        chosen = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
        known = KnownTask(signature, translate_options(cast("CallOptions", chosen)))
        if "priority" in known.options:
            check_priority(known.options["priority"], self.settings.order)
        job = _build_job(signature, options)
        limits = _read_limits(options)
        is_limited = limits != NO_LIMITS
        handler = MessageHandler(function, signature, retries, is_limited=is_limited)
        if is_limited:
            self._task_limits[name] = limits
        try:
            self._add_handler(name, handler)
        except Invalid:
            self._task_limits.pop(name, None)
            raise
        self._known_tasks[name] = known
        if job is not None:
            self._cron_tasks[name] = job
            self._on_cron_added(name)
        return QueueTask(cast("TaskQueue", self), name, signature, function)

    def _complete_options(self, data: Sequence[Any], options: EnqueueOptions) -> EnqueueOptions:
        """Return the options of messages, with those of their task if it is known here.

        Raises:
            Invalid: the messages are not arguments of the task's function.
        """
        task = options.get("task", "")
        known = self._known_tasks.get(task)
        if known is None:
            if task and self._known_tasks:
                self._warn_of_unknown(task)
            return options
        for each in data:
            if isinstance(each, Mapping) and not isinstance(each, EncodedArguments):
                known.signature.check(each)
        defaults = known.options
        if "key" in options and options["key"] is None:
            # Without a key these would be refused.
            defaults = defaults.copy()
            defaults.pop("key_ttl", None)
            defaults.pop("replace", None)
        return {**defaults, **options}

    def _warn_of_unknown(self, task: str) -> None:
        """Report a task that only another process can have, once per name.

        Raises:
            Invalid: it is not a name.
        """
        task = check_task_name("task", task)
        if task in self._unknown or len(self._unknown) >= _MOST_UNKNOWN:
            return
        self._unknown.add(task)
        hint = closest_name(task, self._known_tasks)
        fix = f"did you mean {hint}?" if hint else "start a worker that has this task"
        self.emit(TaskUnknown(queue=self.queue, task=task, fix=fix))

    def _build_jobs(self, resource: str, namespace: str) -> dict[str, dict[str, Any]]:
        """Return the scheduled jobs that enqueue tasks with a cron, by name."""
        queue = {"resource": resource, "namespace": namespace, "data": {}}
        return {
            name: {**options, "enqueue": {**queue, "task": name}}
            for name, options in self._cron_tasks.items()
        }

    def _build_cron_warnings(self, queue: str) -> list[CronUnscheduled]:
        """Return what to report of tasks with a cron that nobody enqueues."""
        return [
            CronUnscheduled(queue=queue, task=task, cron=str(job["schedule"]), fix=CRON_FIX)
            for task, job in self._cron_tasks.items()
        ]

    @property
    def handlers(self) -> dict[str, str]:
        """The names of its handlers by task; that of messages without a task as the empty one."""
        return self._executor.list_functions()

    @property
    @abstractmethod
    def queue(self) -> str:
        """The stored name of this queue."""

    @abstractmethod
    def emit(self, event: Event) -> None:
        """Emit an event to the listeners of this queue and of its database."""

    @abstractmethod
    def _on_cron_added(self, task: str) -> None:
        """A task with a cron was added, perhaps while the queue runs."""

    @abstractmethod
    def _add_handler(self, task: str, handler: MessageHandler) -> None: ...


def _find_name(function: Callable[..., Any]) -> str:
    """Return the name of a function with its module, whether the module was run or imported."""
    name, main = safe_name(function), sys.modules.get("__main__")
    if not name.startswith("__main__."):
        return name
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        module = spec.name.removesuffix(".__main__")
    else:
        module = "__main__" if file is None else Path(file).stem
    return f"{module}.{name.removeprefix('__main__.')}"


def _read_limits(options: TaskOptions) -> QueueLimits:
    """Return the limits of a task.

    Raises:
        Invalid: one is wrong.
    """
    most = options.get("max_concurrency")
    if most is not None:
        check_count("max_concurrency", most, least=1)
    rate, burst = parse_rate(options.get("rate_limit"), options.get("rate_burst"))
    return QueueLimits(max_concurrency=most, rate=rate, burst=burst)


def _build_job(signature: TaskSignature, options: TaskOptions) -> dict[str, Any] | None:
    """Return when a task is enqueued by the scheduler; None if it is not.

    Raises:
        Invalid: its function needs arguments, or `cron` or `timezone` is wrong.
    """
    if "cron" not in options:
        if "timezone" in options:
            problem = "has no effect without a cron"
            raise Invalid("timezone", options["timezone"], problem, 'pass cron="0 3 * * *" too')
        return None
    from jobsync.core.cron import Schedule  # noqa: PLC0415 - slow to load, and seldom used

    cron = options["cron"]
    try:
        signature.check({})
    except Invalid as error:
        problem = f"needs a function without arguments, and this one needs {error.field!r}"
        raise Invalid("cron", cron, problem, f"give {error.field!r} a default") from None
    zone = {"timezone": options["timezone"]} if "timezone" in options else {}
    try:
        Schedule.parse(cron, **zone)
    except Invalid as error:
        field = "cron" if error.field == "schedule" else error.field
        raise Invalid(field, error.value, error.problem, error.fix) from None
    return {"schedule": cron, **zone}
