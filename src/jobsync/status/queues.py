"""A look at queues from outside. Joins nothing, writes nothing.

What is shown stood in the store a moment ago: which queues there are, what is in them, who
works on them, and what a message waits for.
"""

from collections.abc import Mapping

import msgspec

from jobsync.components import Components
from jobsync.core.messages import MessageState
from jobsync.errors import NotFound, closest_name
from jobsync.queue.backend import (
    DEFAULT_NAMESPACE,
    MessageInfo,
    Pause,
    QueueContent,
    WorkerStatus,
    name_queue,
    read_worker_statuses,
)
from jobsync.queue.sql import QueueDirectory, open_directory
from jobsync.status.sessions import (
    SessionCondition,
    SessionStatus,
    read_cluster_status,
)
from jobsync.stores.contract import Store

__all__ = [
    "MessageStatus",
    "QueueStatus",
    "QueueWorkerStatus",
    "QueuesStatus",
    "read_queues_status",
]


class QueueWorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process that handles a queue's messages, or has some of them in hand."""

    worker_id: str
    state: SessionCondition
    concurrency: int | None
    """How many handlers it runs at once; None if it does not tell that it handles any."""
    claims: int
    """How many messages it has in hand, those that it claimed ahead too."""
    is_paused: bool
    heard: float | None
    """Seconds since its session last wrote, where the store has a clock to tell by."""
    timeout: float
    """Seconds of silence after which it is called dead."""
    host: str
    pid: int | None
    incarnation: str

    @property
    def works(self) -> bool:
        """Whether it claims messages."""
        return self.state == "live" and self.concurrency is not None and not self.is_paused

    @property
    def is_busy(self) -> bool:
        """Whether all its handlers have something to do."""
        return self.claims >= (self.concurrency or 0)


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One queue."""

    name: str
    counts: Mapping[MessageState, int]
    oldest: float | None
    """When the oldest of those was pushed that nobody has claimed; Unix seconds."""
    pause: Pause | None
    workers: list[QueueWorkerStatus]


class MessageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides about one message."""

    message: MessageInfo
    queue: QueueStatus
    holder: QueueWorkerStatus | None
    """Who has claimed it; None if nobody has, or if its session is gone altogether."""


class QueuesStatus:
    """What there is to see of all queues. Made by `read_queues_status`."""

    def __init__(
        self,
        directory: QueueDirectory,
        contents: Mapping[str, QueueContent],
        sessions: list[SessionStatus],
    ) -> None:
        self._directory = directory
        self._sessions = sessions
        self._duties = {each.incarnation: read_worker_statuses(each.facts) for each in sessions}
        told = {name for duties in self._duties.values() for name in duties}
        self._contents = {
            name: contents.get(name, QueueContent()) for name in sorted({*contents, *told})
        }

    def queues(self) -> list[QueueStatus]:
        """Give all queues that have messages, workers or a pause, by name."""
        return [self._see(name) for name in self._contents]

    def queue(self, name: str) -> QueueStatus:
        """Give one queue, by its full name or by its resource alone where that is enough.

        Raises:
            NotFound: there is none, or there are several.
        """
        return self._see(self._complete(name))

    async def message(self, id: str) -> MessageStatus | None:
        """Give all that decides about a message; None if there is none of that id."""
        found = await self._directory.find([id])
        if not found:
            return None
        (message,) = found
        queue = self._see(message.queue)
        holders = [each for each in queue.workers if each.incarnation == message.session]
        return MessageStatus(
            message=message,
            queue=queue,
            holder=holders[0] if holders and message.state == "claimed" else None,
        )

    def _complete(self, name: str) -> str:
        full = name if "/" in name else name_queue(DEFAULT_NAMESPACE, name)
        if full in self._contents:
            return full
        alike = [each for each in self._contents if each.endswith(f"/{name}")]
        if len(alike) == 1:
            return alike[0]
        raise NotFound("queue", name, list(self._contents), closest_name(full, self._contents))

    def _see(self, name: str) -> QueueStatus:
        content = self._contents.get(name, QueueContent())
        return QueueStatus(
            name=name,
            counts=content.counts,
            oldest=content.oldest,
            pause=content.pause,
            workers=[
                _see_worker(session, self._duties[session.incarnation].get(name), content)
                for session in self._sessions
                if session.incarnation in content.claims
                or (name in self._duties[session.incarnation] and session.state != "dead")
            ],
        )


def _see_worker(
    session: SessionStatus, duty: WorkerStatus | None, content: QueueContent
) -> QueueWorkerStatus:
    pid = session.facts.get("pid")
    return QueueWorkerStatus(
        worker_id=session.worker_id,
        state=session.state,
        concurrency=None if duty is None else duty.concurrency,
        claims=content.claims.get(session.incarnation, 0),
        is_paused=duty is not None and duty.is_paused,
        heard=session.heard,
        timeout=session.timeout,
        host=str(session.facts.get("host", "")),
        pid=pid if isinstance(pid, int) else None,
        incarnation=session.incarnation,
    )


async def read_queues_status(store: Store, components: Components) -> QueuesStatus:
    """Look at all queues of a store, and at who works on them.

    Raises:
        Misconfigured: this kind of store keeps no queues.
        Unavailable: the store does not answer.
    """
    directory = open_directory(store, components)
    contents = await directory.read_contents()
    return QueuesStatus(
        directory, contents, (await read_cluster_status(store, components)).sessions
    )
