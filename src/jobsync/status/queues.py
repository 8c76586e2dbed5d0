"""The status of all queues, read from the store without joining or writing anything.

It is a snapshot: which queues exist, what is in them, which processes work on them, and what a
message waits for.
"""

from collections.abc import Mapping

import msgspec

from jobsync.components import Components
from jobsync.core.messages import MessageState
from jobsync.errors import Corrupt, NotFound, closest_name
from jobsync.queue.backend import (
    DEFAULT_NAMESPACE,
    MessageInfo,
    name_queue,
)
from jobsync.queue.directory import Pause, QueueContent, QueueDirectory
from jobsync.queue.opening import open_directory
from jobsync.queue.worker_status import ReportedLimit, WorkerStatus, read_worker_statuses
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

_ROUNDING = 1e-6


class QueueWorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process that handles a queue's messages, or has claimed some of them."""

    worker_id: str
    state: SessionCondition
    concurrency: int | None
    """How many handlers it runs at once; None if it does not report that it handles any."""
    claims: int
    """How many messages it has claimed, including prefetched ones."""
    is_paused: bool
    tasks: tuple[str, ...] | None = None
    """The tasks whose messages it handles, the empty one for messages without; None for these
    alone. If there are very many, not all are here."""
    has_more_tasks: bool = False
    """Whether it handles messages of tasks that are not listed."""
    limits: Mapping[str, ReportedLimit] = {}
    """The limits of its tasks by name, and that of the queue under the empty one."""
    heard: float | None
    """Seconds since its session last wrote, if the store has a clock."""
    timeout: float
    """Seconds of silence after which it is declared dead."""
    host: str
    pid: int | None
    incarnation: str

    @property
    def works(self) -> bool:
        """Whether it claims messages."""
        return self.state == "live" and self.concurrency is not None and not self.is_paused

    def knows(self, task: str) -> bool:
        """Whether it handles messages of a task; it may if not all are listed."""
        known = ("",) if self.tasks is None else self.tasks
        return self.has_more_tasks or task in known

    @property
    def is_busy(self) -> bool:
        """Whether all its handlers are busy."""
        return self.claims >= (self.concurrency or 0)


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one queue."""

    name: str
    counts: Mapping[MessageState, int]
    oldest: float | None
    """When the oldest unclaimed message was pushed; Unix seconds."""
    pause: Pause | None
    workers: list[QueueWorkerStatus]

    def find_limits(self, task: str) -> list[str]:
        """Return in words the limits that may keep messages of a task from being claimed now.

        Those on concurrency count only if as many messages of the queue are claimed. How much
        a rate allows is not known here.
        """
        claimed, found = self.counts.get("claimed", 0), dict[str, None]()
        for worker in self.workers:
            for name in {"": None, task: None}:
                limit = worker.limits.get(name) if worker.works else None
                whose = f"task {name}" if name else f"queue {self.name}"
                if limit is None:
                    continue
                if limit.max_concurrency is not None and claimed >= limit.max_concurrency:
                    found[f"max_concurrency={limit.max_concurrency} of {whose}"] = None
                if limit.rate:
                    found[f"rate_limit={_format_rate(limit.rate)} of {whose}"] = None
        return list(found)


def _format_rate(rate: float) -> str:
    """Return messages a second as `rate_limit` is written."""
    for seconds, unit in ((1, "second"), (60, "minute"), (3600, "hour"), (86_400, "day")):
        count = rate * seconds
        if count >= 1 and abs(count - round(count)) < _ROUNDING:
            return f"{round(count)}/{unit}"
    return f"{rate:g}/second"


class MessageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A message with everything that decides when it is handled."""

    message: MessageInfo
    queue: QueueStatus
    holder: QueueWorkerStatus | None
    """The worker that has claimed it; None if there is none, or its session is gone."""
    head: MessageInfo | None = None
    """The message of its group that blocks it, if it is blocked."""


class QueuesStatus:
    """The status of all queues. Created by `read_queues_status`."""

    def __init__(
        self,
        directory: QueueDirectory,
        contents: Mapping[str, QueueContent],
        sessions: list[SessionStatus],
    ) -> None:
        self._directory = directory
        self._sessions = sessions
        self._statuses = {item.incarnation: read_worker_statuses(item.facts) for item in sessions}
        reported = {name for statuses in self._statuses.values() for name in statuses}
        self._contents = {
            name: contents.get(name, QueueContent()) for name in sorted({*contents, *reported})
        }

    def check_none_set_aside(self, id: str) -> None:
        """Check that a message that was not found is not in a page that cannot be read.

        Raises:
            Corrupt: it may be; names the pages.
        """
        if self._directory.set_aside:
            detail = f"the page is set aside, and no other has message {id}"
            raise Corrupt(" or ".join(sorted(self._directory.set_aside)), detail)

    def queues(self) -> list[QueueStatus]:
        """Return all queues that have messages, workers or a pause, by name."""
        return [self._build(name) for name in self._contents]

    def queue(self, name: str) -> QueueStatus:
        """Return one queue, by its full name, or by its resource if that is unique.

        Raises:
            NotFound: there is no such queue, or there are several.
        """
        return self._build(self._complete_name(name))

    async def message(self, id: str) -> MessageStatus | None:
        """Return the status of a message; None if no message that can be read has that id."""
        found = await self._directory.find([id])
        if not found:
            return None
        (message,) = found
        queue = self._build(message.queue)
        holders = [item for item in queue.workers if item.incarnation == message.session]
        is_blocked = message.state == "blocked" and message.group is not None
        return MessageStatus(
            message=message,
            queue=queue,
            holder=holders[0] if holders and message.state == "claimed" else None,
            head=await self._directory.find_head(message.queue, message.group or "")
            if is_blocked
            else None,
        )

    def _complete_name(self, name: str) -> str:
        full = name if "/" in name else name_queue(DEFAULT_NAMESPACE, name)
        if full in self._contents:
            return full
        matching = [known for known in self._contents if known.endswith(f"/{name}")]
        if len(matching) == 1:
            return matching[0]
        raise NotFound("queue", name, list(self._contents), closest_name(full, self._contents))

    def _build(self, name: str) -> QueueStatus:
        content = self._contents.get(name, QueueContent())
        return QueueStatus(
            name=name,
            counts=content.counts,
            oldest=content.oldest,
            pause=content.pause,
            workers=[
                _build_worker(session, self._statuses[session.incarnation].get(name), content)
                for session in self._sessions
                if session.incarnation in content.claims
                or (name in self._statuses[session.incarnation] and session.state != "dead")
            ],
        )


def _build_worker(
    session: SessionStatus, status: WorkerStatus | None, content: QueueContent
) -> QueueWorkerStatus:
    pid = session.facts.get("pid")
    return QueueWorkerStatus(
        worker_id=session.worker_id,
        state=session.state,
        concurrency=None if status is None else status.concurrency,
        claims=content.claims.get(session.incarnation, 0),
        is_paused=status is not None and status.is_paused,
        tasks=None if status is None else status.tasks,
        has_more_tasks=status is not None and status.has_more_tasks,
        limits={} if status is None else status.limits,
        heard=session.heard,
        timeout=session.timeout,
        host=str(session.facts.get("host", "")),
        pid=pid if isinstance(pid, int) else None,
        incarnation=session.incarnation,
    )


async def read_queues_status(store: Store, components: Components) -> QueuesStatus:
    """Return the status of all queues of a store, and of their workers.

    Raises:
        Unavailable: the store does not answer.
    """
    directory = open_directory(store, components)
    contents = await directory.read_contents()
    return QueuesStatus(
        directory, contents, (await read_cluster_status(store, components)).sessions
    )
