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

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
)

from jobsync.core.arguments import check_count, check_seconds
from jobsync.core.codec import Json
from jobsync.core.messages import MessageState
from jobsync.core.retry import MAX_ATTEMPTS
from jobsync.database.database import Database
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.database.home_loop import HomeLoop, check_blocking, on_home_loop
from jobsync.errors import Invalid, closest_name
from jobsync.queue.backend import MessageInfo
from jobsync.queue.enqueue import check_when
from jobsync.queue.placing import check_placing
from jobsync.queue.task_arguments import TaskSignature

__all__ = [
    "CallOptions",
    "QueueTask",
    "TaskCall",
    "TaskHandle",
    "TaskQueue",
    "check_options",
    "translate_options",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
C = TypeVar("C")
R_co = TypeVar("R_co", covariant=True)

_CELERY_NAMES = ("delay", "apply_async")
"""What enqueues a task in Celery."""


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


class TaskQueue(Protocol):
    """The queue of a task, as tasks use it."""

    async def enqueue_many(
        self, data: Sequence[Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> list[str]:
        """Push messages in order, all or none; return their ids."""
        ...

    def enqueue_many_sync(
        self, data: Sequence[Mapping[str, Json]], **options: Unpack[EnqueueOptions]
    ) -> list[str]:
        """Push messages from a plain function; return their ids."""
        ...

    @property
    def home_loop(self) -> HomeLoop | None:
        """The event loop of its database; None before it is attached."""
        ...

    @property
    def database(self) -> Database:
        """The database that it is attached to."""
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


@on_home_loop
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

    @property
    def home_loop(self) -> HomeLoop | None:
        """The event loop of the database."""
        return self._queue.home_loop

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

    def result_sync(self, *, timeout: float | None = None) -> R_co:
        """Wait as `result` does, in a plain function on any thread."""
        check_blocking("result_sync", "await handle.result(…) instead")
        return self._queue.database.home_loop.call(self.result(timeout=timeout))

    def cancel_sync(self) -> bool:
        """Cancel the message as `cancel` does, in a plain function on any thread."""
        check_blocking("cancel_sync", "await handle.cancel() instead")
        return self._queue.database.home_loop.call(self.cancel())


@on_home_loop
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

    if not TYPE_CHECKING:
        # Type checkers would let any attribute pass.

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _CELERY_NAMES:
                task = self._short_name
                text += f": use `await {task}.enqueue(…)`, or {task}.enqueue_sync(…)"
                text += " in blocking code"
            raise AttributeError(text, name=name, obj=self)

    @property
    def home_loop(self) -> HomeLoop | None:
        """The event loop of the database; None for calls that use a connection of the caller."""
        is_own = self._options.get("connection") is not None
        return None if is_own else self.queue.home_loop

    def encode_some(self, /, **arguments: Any) -> dict[str, Json]:
        """Return some arguments of a call as they are stored.

        Raises:
            Invalid: one is unknown or cannot be stored; names it.
        """
        return self._signature.encode_some(arguments)

    def encode(self, /, *args: P.args, **kwargs: P.kwargs) -> dict[str, Json]:
        """Return the arguments of a call as they are stored.

        Raises:
            Invalid: one is missing, unknown or of another type; names it.
        """
        return self._encode("enqueue", *args, **kwargs)

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue a call of the function; return its message.

        Raises:
            Invalid: an argument is missing, unknown or of another type, or an option is wrong;
                nothing was enqueued.
            OutcomeUnknown: it may or may not have been enqueued.
        """
        (handle,) = await self._push([self._encode("enqueue", *args, **kwargs)])
        return handle

    async def enqueue_many(self, calls: Iterable[Mapping[str, Any]]) -> list[TaskHandle[R]]:
        """Enqueue many calls, all or none; return their messages.

        Args:
            calls: the arguments of each, by name.

        Raises:
            Invalid: an argument or an option is wrong; nothing was enqueued.
            OutcomeUnknown: all or none of them may have been enqueued.
        """
        return await self._push([self._encode("enqueue_many", **each) for each in calls])

    def enqueue_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Enqueue a call as `enqueue` does, from a plain function on any thread.

        Raises:
            Invalid: as `enqueue`; or an event loop runs in this thread, and would be blocked.
        """
        values = self._encode("enqueue_sync", *args, **kwargs)
        (handle,) = self._push_sync([values], "enqueue")
        return handle

    def enqueue_many_sync(self, calls: Iterable[Mapping[str, Any]]) -> list[TaskHandle[R]]:
        """Enqueue many calls as `enqueue_many` does, from a plain function on any thread."""
        values = [self._encode("enqueue_many_sync", **each) for each in calls]
        return self._push_sync(values, "enqueue_many")

    def _encode(self, method: str, /, *args: Any, **kwargs: Any) -> dict[str, Json]:
        """Return the arguments of a call as they are stored.

        Raises:
            Invalid: one is wrong; an option among them is named with the call that takes it.
        """
        try:
            return self._signature.encode(*args, **kwargs)
        except Invalid as error:
            option = error.field
            is_option = option in kwargs and option in CallOptions.__annotations__
            if not is_option or self._signature.has(option):
                raise
            value = kwargs[option]
            shown = value if isinstance(value, int | float) else "…"
            fix = f"use {self._short_name}.with_options({option}={shown}).{method}(…)"
            raise Invalid(option, error.value, error.problem, fix) from None

    @property
    def _short_name(self) -> str:
        return self.name.rpartition(".")[2]

    async def _push(self, values: Sequence[dict[str, Json]]) -> list[TaskHandle[R]]:
        return self._build_handles(await self.queue.enqueue_many(values, **self._find_options()))

    def _push_sync(self, values: Sequence[dict[str, Json]], awaited: str) -> list[TaskHandle[R]]:
        task = self._short_name
        check_blocking(f"{task}.{awaited}_sync", f"await {task}.{awaited}(…) instead")
        return self._build_handles(self.queue.enqueue_many_sync(values, **self._find_options()))

    def _find_options(self) -> EnqueueOptions:
        return {**self._options, "task": self.name}

    def _build_handles(self, ids: Sequence[str]) -> list[TaskHandle[R]]:
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

    def __call__(self, /, *args: Q.args, **kwargs: Q.kwargs) -> C:
        """Call the function, without a message: for tests."""
        return self.function(*args, **kwargs)

    def with_options(self, **options: Unpack[CallOptions]) -> TaskCall[P, R]:
        """Return this task with options of its messages: `task.with_options(delay=60).enqueue()`.

        Raises:
            Invalid: an option is unknown or wrong.
        """
        check_options(options, CallOptions.__annotations__)
        return TaskCall(self.queue, self.name, self._signature, translate_options(options))


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check the names of options of a task.

    Raises:
        Invalid: one is unknown.
    """
    names = [*known]
    for name, value in options.items():
        if name not in names:
            hint = closest_name(name, names)
            fix = f"did you mean {hint}?" if hint else f"use {', '.join(names)}"
            raise Invalid(name, value, "is not an option of a task", fix)


def translate_options(options: CallOptions) -> EnqueueOptions:
    """Return options as the queue takes them: it counts attempts, not retries.

    Raises:
        Invalid: one is wrong.
    """
    translated: dict[str, Any] = {**options}
    if translated.get("timeout") is not None:
        check_seconds("timeout", translated["timeout"], is_zero_allowed=False)
    if "max_retries" in translated:
        retries = translated.pop("max_retries")
        check_count("max_retries", retries, least=0, most=MAX_ATTEMPTS - 1)
        translated["max_attempts"] = retries + 1
    chosen = cast("EnqueueOptions", translated)
    check_when(chosen)
    check_placing(chosen)
    return chosen
