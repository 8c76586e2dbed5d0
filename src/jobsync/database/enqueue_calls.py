"""The calls of a resource that enqueue messages to its queues."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypedDict, Unpack

from jobsync.core.codec import Json
from jobsync.database.document import RecordT, as_list
from jobsync.database.home_loop import HomeLoop, check_blocking, on_home_loop
from jobsync.errors import Invalid

__all__ = ["EnqueueCalls", "EnqueueOptions", "MessageSink"]


class EnqueueOptions(TypedDict, total=False):
    """How messages are enqueued; see `Resource.enqueue`."""

    delay: float | timedelta
    at: datetime
    timeout: float | None
    max_attempts: int | None
    priority: int
    group: str | Callable[[Mapping[str, Json]], str] | None
    key: str | Callable[[Mapping[str, Json]], str] | None
    key_ttl: float | timedelta | None
    replace: bool
    task: str
    connection: object


class MessageSink(Protocol):
    """What a resource enqueues its messages to: a queue, in practice."""

    namespace: str
    """What distinguishes it from other queues of the resource."""

    async def enqueue_many(
        self, data: Sequence[Any], **options: Unpack[EnqueueOptions]
    ) -> list[str]:
        """Enqueue messages, all or none; return their ids."""
        ...

    def check_messages(self, data: Sequence[Any], **options: Unpack[EnqueueOptions]) -> None:
        """Check messages and options as `enqueue_many` does; enqueue nothing."""
        ...


@on_home_loop
class EnqueueCalls(ABC, Generic[RecordT]):
    """What a resource enqueues."""

    name: str
    home_loop: HomeLoop
    _queues: dict[str, MessageSink]
    """By namespace."""

    async def enqueue(
        self,
        data: RecordT | Mapping[str, Json],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> str:
        """Enqueue a message that fits this resource's schema; return the message's id.

        Args:
            data: the message; without an id it gets the message's id.
            namespace: that of the queue, if this resource has several queues here.
            delay: seconds, or a `timedelta`, before it can be handled.
            at: when it can be handled at the earliest: a `datetime` with a time zone, judged by
                the store's clock if it has one.
            timeout: seconds that its handler may take; the queue's by default.
            max_attempts: how often it is tried; the queue's by default.
            priority: from -100 to 100, higher ones first; 0 by default. For queues with
                `order="priority"`.
            group: a name, or a function of the message that returns one. Messages of one group are
                handled one at a time and in order: one that fails or waits blocks those after it
                until it is completed, cancelled or dead.
            key: a text, or a function of the message. While another message holds the key, nothing
                is enqueued, and the id of that message is returned.
            key_ttl: seconds, or a `timedelta`, for which the message holds its key from now on,
                whatever becomes of it; by default it does as long as it is pending.
            replace: whether it replaces the message that holds the key, with a new delay. One that
                a worker has claimed stays, and the new message holds the key from now on.
            task: the name of the task that handles it; `data` has the arguments by name, as JSON,
                and the schema does not count. Other options are the task's by default, if this
                process knows it.
            connection: your psycopg, sqlite3 or SQLAlchemy connection to the same database:
                the message exists once your transaction commits, and only then.

        Raises:
            InvalidRecord: it breaks the schema; lists every invalid field.
            Invalid: this resource has no queue here, or several and none was chosen, or an option
                is unknown or wrong.
            OutcomeUnknown: it may or may not have been enqueued.
        """
        (name,) = await self.enqueue_many([data], namespace=namespace, **options)
        return name

    async def enqueue_many(
        self,
        data: Sequence[RecordT | Mapping[str, Json]],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> list[str]:
        """Enqueue messages in order, all or none; return their ids. See `enqueue`."""
        encoded = list(map(self._encode_message, as_list("data", data)))
        return await self._choose_queue(namespace).enqueue_many(encoded, **options)

    def enqueue_sync(
        self,
        data: RecordT | Mapping[str, Json],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> str:
        """Enqueue a message from a plain function, on any thread; block until it is stored.

        See `enqueue`. The database must be connected, on an event loop that runs.

        Raises:
            Invalid: an event loop runs in this thread, and would be blocked.
        """
        check_blocking("resource.enqueue_sync", "await resource.enqueue(…) instead")
        (name,) = self.enqueue_many_sync([data], namespace=namespace, **options)
        return name

    def enqueue_many_sync(
        self,
        data: Sequence[RecordT | Mapping[str, Json]],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> list[str]:
        """Enqueue messages in order, all or none, as `enqueue_sync` does; return their ids."""
        check_blocking("resource.enqueue_many_sync", "await resource.enqueue_many(…) instead")
        work = self.enqueue_many(data, namespace=namespace, **options)
        home = self.home_loop
        return home.call(work) if options.get("connection") is None else home.call_here(work)

    def check_messages(
        self,
        data: Sequence[RecordT | Mapping[str, Json]],
        *,
        namespace: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> None:
        """Check messages and options as `enqueue_many` does; enqueue nothing.

        Raises:
            Invalid: they would be refused, or this resource has no queue here, or several.
        """
        encoded = list(map(self._encode_message, data))
        self._choose_queue(namespace).check_messages(encoded, **options)

    def add_queue(self, queue: MessageSink) -> None:
        """Enqueue messages to this queue too; it replaces one of the same namespace."""
        self._queues[queue.namespace] = queue

    def _choose_queue(self, namespace: str | None) -> MessageSink:
        queues = self._queues
        if not queues:
            fix = f"await database.use_plugin(QueuePlugin(resource={self.name!r})) first"
            raise Invalid("resource", self.name, "has no queue in this process", fix)
        if namespace is None and len(queues) == 1:
            return next(iter(queues.values()))
        if namespace is None or namespace not in queues:
            known = " and ".join(sorted(queues))
            problem = f"must be that of a queue of {self.name}, which has {known} in this process"
            raise Invalid("namespace", namespace, problem, f"pass namespace={min(queues)!r}")
        return queues[namespace]

    @abstractmethod
    def _encode_message(self, data: RecordT | Mapping[str, Json]) -> Any: ...
