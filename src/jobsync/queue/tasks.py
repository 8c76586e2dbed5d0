"""Tasks: functions whose calls are messages of a queue.

    emails = QueuePlugin("emails")

    @emails.task(max_retries=5, timeout=30)
    async def send(to: str, subject: str = "Hello") -> str: ...

    handle = await send.enqueue(to="user@example.com")
    print(await handle.result(timeout=10))

A queue has any number of tasks, and beside them one handler for messages without a task. A worker
claims only messages of tasks that it knows: while new code is deployed, a message of a new task
waits for a worker with that code, and spends no attempt on others.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import update_wrapper
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from jobsync.core.arguments import check_count
from jobsync.core.codec import Json
from jobsync.core.messages import MessageState
from jobsync.core.retry import Backoff, Retries
from jobsync.database.resource import EnqueueOptions
from jobsync.errors import Invalid, closest_name
from jobsync.queue.backend import MessageInfo
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.enqueue import check_task_name
from jobsync.queue.executor import MessageHandler
from jobsync.queue.task_arguments import EncodedArguments, TaskSignature
from jobsync.safe_text import safe_name
from jobsync.user_functions import check_function

__all__ = ["CallOptions", "QueueTask", "TaskCall", "TaskCalls", "TaskHandle", "TaskOptions"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
C = TypeVar("C")
R_co = TypeVar("R_co", covariant=True)

_FIX = "write @queue.task, or @queue.task(max_retries=5)"
_OWN_OPTIONS = {"name", "backoff", "cron", "timezone"}
"""The options of a task that are not those of its messages."""


class CallOptions(TypedDict, total=False):
    """How a task's message is enqueued; see `Resource.enqueue`."""

    delay: float | timedelta
    at: datetime
    timeout: float | None
    max_retries: int
    priority: int
    group: str | Callable[[Mapping[str, Json]], str] | None
    key: str | Callable[[Mapping[str, Json]], str] | None
    key_ttl: float | timedelta | None
    replace: bool
    connection: object


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
    cron: str
    """When it is enqueued, without arguments, by the scheduler of the same database."""
    timezone: str
    """In which `cron` is meant; the scheduler's by default."""


class TaskQueue(Protocol):
    """The queue of a task, as tasks use it."""

    async def enqueue_many(
        self, data: Sequence[Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> list[str]:
        """Push messages in order, all or none; return their ids."""
        ...

    async def get(self, id: str) -> MessageInfo | None:
        """Return a message in any state."""
        ...

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Return messages in a state, the oldest first."""
        ...

    async def result(self, id: str, *, timeout: float | None = None) -> Json:
        """Wait until a message is completed; return what its handler returned."""
        ...

    async def cancel(self, id: str) -> bool:
        """Cancel a message that is not finished; return whether this call did."""
        ...


class TaskHandle(Generic[R_co]):
    """A message of a task that was enqueued.

    Attributes:
        id: the message's id. If another message holds the key, the id of that one.
    """

    def __init__(self, id: str, queue: TaskQueue, signature: TaskSignature) -> None:
        self.id = id
        self._queue = queue
        self._signature = signature

    def __repr__(self) -> str:
        return f"TaskHandle(id={self.id!r})"

    async def result(self, *, timeout: float | None = None) -> R_co:
        """Wait until the message is completed; return what the function returned.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Raises:
            NoResult: the message is dead, cancelled, unknown or forgotten, or its result could
                not be kept; the error says which.
            TimeoutError: it was not completed in time.
        """
        result = await self._queue.result(self.id, timeout=timeout)
        return cast("R_co", self._signature.decode_result(result))

    async def cancel(self) -> bool:
        """Cancel the message, if it is not finished; return whether this call did."""
        return await self._queue.cancel(self.id)

    async def get(self) -> MessageInfo | None:
        """Return the message in any state, with its progress or its result; None if unknown."""
        return await self._queue.get(self.id)


class TaskCall(Generic[P, R]):
    """A task with the options of a call: made by `QueueTask.with_options`.

    Attributes:
        name: the stored name of the task.
        queue: the task's.
    """

    def __init__(
        self, queue: TaskQueue, name: str, signature: TaskSignature, options: EnqueueOptions
    ) -> None:
        self.name = name
        self.queue = queue
        self._signature = signature
        self._options = options

    def encode_some(self, **arguments: Any) -> dict[str, Json]:
        """Return some arguments of a call as they are stored.

        Raises:
            Invalid: one is unknown or cannot be stored; names it.
        """
        return self._signature.encode_some(arguments)

    def encode(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Json]:
        """Return the arguments of a call as they are stored.

        Raises:
            Invalid: one is missing, unknown or of another type; names it.
        """
        return self._signature.encode(*args, **kwargs)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue a call of the function; return its message.

        Raises:
            Invalid: an argument is missing, unknown or of another type, or an option is wrong;
                nothing was enqueued.
            OutcomeUnknown: it may or may not have been enqueued.
        """
        (handle,) = await self._push([self._signature.encode(*args, **kwargs)])
        return handle

    async def enqueue_many(self, calls: Iterable[Mapping[str, Any]]) -> list[TaskHandle[R]]:
        """Enqueue many calls, all or none; return their messages.

        Args:
            calls: the arguments of each, by name.

        Raises:
            Invalid: an argument or an option is wrong; nothing was enqueued.
            OutcomeUnknown: all or none of them may have been enqueued.
        """
        return await self._push([self._signature.encode(**each) for each in calls])

    async def _push(self, values: Sequence[dict[str, Json]]) -> list[TaskHandle[R]]:
        options: EnqueueOptions = {**self._options, "task": self.name}
        ids = await self.queue.enqueue_many(values, **options)
        return [TaskHandle(name, self.queue, self._signature) for name in ids]


class QueueTask(TaskCall[P, R], Generic[Q, C, P, R]):
    """A function whose calls are messages of a queue. Calling it calls the function, here and now.

    Attributes:
        function: the user's function.
    """

    def __init__(
        self,
        queue: TaskQueue,
        name: str,
        signature: TaskSignature,
        function: Callable[Q, C],
    ) -> None:
        super().__init__(queue, name, signature, {})
        self.function = function
        update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"QueueTask({self.name!r})"

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> C:
        """Call the function, without a message: for tests."""
        return self.function(*args, **kwargs)

    def with_options(self, **options: Unpack[CallOptions]) -> TaskCall[P, R]:
        """Return this task with options of its messages: `task.with_options(delay=60).enqueue()`.

        Raises:
            Invalid: an option is unknown, or `max_retries` is not a number.
        """
        _check_options(options, CallOptions.__annotations__)
        return TaskCall(self.queue, self.name, self._signature, _translate(options))


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

    _known_tasks: dict[str, "KnownTask"]
    """By name."""
    _cron_tasks: dict[str, dict[str, Any]]
    """When to enqueue tasks, as the options of scheduled jobs, by name."""

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
        _check_options(options, TaskOptions.__annotations__)
        chosen = cast("TaskOptions", options)
        if function is None:
            return lambda function: self._add_task(function, chosen)
        return self._add_task(function, chosen)

    def _add_task(
        self, function: Callable[..., Any], options: TaskOptions
    ) -> QueueTask[..., Any, ..., Any]:
        check_function("function", function, _FIX)
        name = options.get("name")
        name = _find_name(function) if name is None else name
        check_task_name("name", name)
        if name in self._known_tasks:
            problem = "is that of another task of this queue"
            raise Invalid("name", name, problem, "pass another one: @queue.task(name=...)")
        signature = TaskSignature(name, function)
        backoff = options.get("backoff")
        retries = None if backoff is None else Retries(backoff=backoff)
        handler = MessageHandler(function, signature, retries)
        if "cron" in options:
            self._cron_tasks[name] = _build_job(signature, options)
        elif "timezone" in options:
            problem = "has no effect without a cron"
            raise Invalid("timezone", options["timezone"], problem, 'pass cron="0 3 * * *" too')
        chosen = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
        self._known_tasks[name] = KnownTask(signature, _translate(cast("CallOptions", chosen)))
        self._add_handler(name, handler)
        return QueueTask(cast("TaskQueue", self), name, signature, function)

    def _complete_options(self, data: Sequence[Any], options: EnqueueOptions) -> EnqueueOptions:
        """Return the options of messages, with those of their task if it is known here.

        Raises:
            Invalid: the messages are not arguments of the task's function.
        """
        known = self._known_tasks.get(options.get("task", ""))
        if known is None:
            return options
        for each in data:
            if isinstance(each, Mapping) and not isinstance(each, EncodedArguments):
                known.signature.check(each)
        return {**known.options, **options}

    def _build_jobs(self, resource: str, namespace: str) -> dict[str, dict[str, Any]]:
        """Return the scheduled jobs that enqueue tasks with a cron, by name."""
        queue = {"resource": resource, "namespace": namespace, "data": {}}
        return {
            name: {**options, "enqueue": {**queue, "task": name}}
            for name, options in self._cron_tasks.items()
        }

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


def _build_job(signature: TaskSignature, options: TaskOptions) -> dict[str, Any]:
    """Return when a task is enqueued.

    Raises:
        Invalid: its function needs arguments.
    """
    cron = options.get("cron")
    try:
        signature.check({})
    except Invalid as error:
        problem = (
            f"needs a function that can be called without arguments, and {error.field} has none"
        )
        raise Invalid("cron", cron, problem, f"give {error.field} a default") from None
    zone = {"timezone": options["timezone"]} if "timezone" in options else {}
    return {"schedule": cron, **zone}


def _check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    names = [*known]
    for name, value in options.items():
        if name not in names:
            hint = closest_name(name, names)
            fix = f"did you mean {hint}?" if hint else f"use {', '.join(names)}"
            raise Invalid(name, value, "is not an option of a task", fix)


def _translate(options: CallOptions) -> EnqueueOptions:
    """Return options as the queue takes them: it counts attempts, not retries."""
    translated: dict[str, Any] = {**options}
    if "max_retries" in translated:
        retries = translated.pop("max_retries")
        check_count("max_retries", retries, least=0)
        translated["max_attempts"] = retries + 1
    return cast("EnqueueOptions", translated)
