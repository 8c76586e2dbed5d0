"""A durable queue on a resource.

    queue = QueuePlugin(resource="tasks", on_message=handle)
    await db.use_plugin(queue)
    await db.resources.tasks.enqueue({"type": "send-email"})

Promises: an acknowledged enqueue is delivered at least once or found among the dead letters; a
message has at most one live claim; a stale receipt can neither complete, extend nor fail it. A
handler runs a second time only if the first claim ended unsettled: by a crash, or by a pause
longer than the session's timeout or the visibility timeout.

Without a handler this process only pushes. Whoever notes that a worker died ends its claims at
once. The coordinator forgets what was finished long ago.
"""

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from msgspec.structs import fields

from jobsync.coordination.events import WorkerDied
from jobsync.coordination.settings import CoordinatorSettings
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
from jobsync.database.coordinator_plugin import CoordinatorPlugin
from jobsync.errors import Invalid, Unavailable, closest_name
from jobsync.events import Event, HandlerFailed
from jobsync.queue import events
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
from jobsync.queue.executor import Executor, Handler, describe
from jobsync.queue.in_flight import Delivery
from jobsync.queue.settings import QueueSettings, translate
from jobsync.queue.sql import MessageRecords, open_backend
from jobsync.queue.worker import Worker, WorkerListener, find_caller
from jobsync.settings import Sources, resolve

__all__ = ["QueuePlugin", "S3QueuePlugin"]

_H = TypeVar("_H", bound=Handler)

_PENDING: tuple[MessageState, ...] = ("ready", "waiting")
_COUNTED: Mapping[str, tuple[MessageState, ...]] = {
    "pending": _PENDING,
    "processing": ("claimed",),
    "all": (*LIVE, *FINISHED),
    **{state: (state,) for state in (*LIVE, *FINISHED)},
}
_TO_GIVE_BACK = 5.0
"""Seconds that a store may take for the last settlements, and for the end of a session."""
_TELL = 60.0
"""Seconds between two accounts of what was done."""
_TIDY = 60.0
"""Seconds between rounds that forget what was finished long ago."""


class QueuePlugin(CoordinatorPlugin):
    """Messages of a resource, handled by whichever process is free.

    Args:
        resource: whose schema messages obey; defined without one if it is not there.
        on_message: handles a message: `async def handle(task)` or `handle(task, context)`,
            or a plain function, which runs on a thread.
        on_complete: told of what was handled: `(task, result)`.
        on_error: told of every failure: `(error, task)`.
        timeout: seconds that a handler may take; None for no end.
        backoff: given how often a message has failed, gives the seconds until the next
            attempt; 1, 2, 4 … 32 by default.
        namespace: keeps several queues of one resource apart.
        options: as in `QueueSettings` and `CoordinatorSettings`; `workers`, `max_retries`
            and `ticket_interval` too.

    Raises:
        Invalid, Misconfigured: an option is unknown or wrong, with the fix.
    """

    slug: ClassVar[str] = "queue"
    slug_aliases: ClassVar[tuple[str, ...]] = ("s3-queue",)

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
        own = {field.name for field in fields(QueueSettings)}
        _refuse_unknown(options, own)
        super().__init__(
            namespace=namespace,
            **{name: value for name, value in options.items() if name not in own},
        )
        sources = Sources.load(os.environ, Path.cwd())
        chosen = {name: value for name, value in options.items() if name in own}
        self.settings = resolve(QueueSettings, chosen, sources, section="queue").value
        self.resource = resource
        self._timeout = timeout
        self._retries = Retries(max_attempts=self.settings.max_attempts, backoff=backoff)
        self._on_complete = on_complete
        self._on_error = on_error
        self._executor: Executor | None = None
        self._port: QueueBackend | None = None
        self._worker: Worker | None = None
        self._working: asyncio.Task[None] | None = None
        self._is_paused = False
        self._tidy_next = Mono(float("-inf"))
        self._counters: Counter[str] = Counter()
        if on_message is not None:
            self.handler(on_message)

    def handler(self, function: _H) -> _H:
        """Handle messages with this function; a decorator.

        Raises:
            Invalid: it takes no message, or there is a handler already.
        """
        if self._executor is not None:
            raise Invalid("on_message", function, "there is a handler already", "give one")
        self._executor = Executor(
            function,
            self.settings.concurrency,
            auto_acknowledge=self.settings.auto_acknowledge,
        )
        if self.is_running:
            self._begin()
        return function

    @property
    def kind(self) -> str:
        """A namespace has a queue for each resource."""
        return f"{self.slug}-{self.resource}"

    @property
    def queue(self) -> str:
        """How the store calls this queue."""
        return name_queue(self.namespace, self.resource)

    async def enqueue(
        self,
        data: Mapping[str, Json],
        *,
        delay: float = 0.0,
        timeout: float | None = None,
        max_attempts: int | None = None,
        connection: object = None,
    ) -> str:
        """Push a message; give its id. See `Resource.enqueue`."""
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
        """Push messages, all or none, in order; give their ids. See `Resource.enqueue`."""
        attempts = self.settings.max_attempts if max_attempts is None else max_attempts
        ids = self.database.components.ids.records(len(data))
        letters = build_messages(
            self.database.resource(self.resource),
            data,
            ids,
            delay=delay,
            timeout=timeout,
            max_attempts=attempts,
        )
        if connection is not None:
            # Whether and when it commits is the caller's to know: nothing is told of it.
            await self._open().push_within(connection, letters)
            return ids
        await self._open().push(letters)
        if self._worker is not None:
            self._worker.wake()
        self._counters["enqueued"] += len(ids)
        self.emit(events.MessagesEnqueued(queue=self.queue, ids=tuple(ids)))
        return ids

    async def count(self, state: str = "pending") -> int:
        """Count messages that are pending, processing, completed, dead, cancelled, or all."""
        if state not in _COUNTED:
            hint = closest_name(state, _COUNTED)
            fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(_COUNTED)}"
            raise Invalid("state", state, "is no state of a message", fix)
        counts = await self._open().count()
        return sum(counts.get(each, 0) for each in _COUNTED[state])

    def stats(self) -> dict[str, int]:
        """Tell what this process has done since it began, from counters."""
        names = ("enqueued", "completed", "retried", "cancelled", "returned", "dead", "lost")
        running = 0 if self._worker is None else self._worker.running
        return {**{name: self._counters[name] for name in names}, "running": running}

    async def browse(
        self, state: MessageState, *, after: str = "", limit: int = 100
    ) -> list[MessageInfo]:
        """Look at messages in a state, the oldest first; go on after the last one's `cursor`."""
        return await self._open().browse(state, after=after, limit=limit)

    async def dead_letters(self, *, after: str = "", limit: int = 100) -> list[MessageInfo]:
        """Look at the messages whose attempts are spent, with every error."""
        return await self._open().browse("dead", after=after, limit=limit)

    async def redrive(self, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        """Give dead letters, those named or all, a new life with all attempts; count them."""
        return await self._open().redrive(ids, limit=limit)

    async def purge(self, *, include_dead: bool = False) -> int:
        """Remove the messages that nobody handles yet, perhaps the dead letters too."""
        return await self._open().purge([*_PENDING, *(("dead",) if include_dead else ())])

    def pause(self) -> None:
        """Claim nothing in this process until `resume`; what runs goes on."""
        self._is_paused = True
        self._steer()

    def resume(self) -> None:
        """Claim again."""
        self._is_paused = False
        self._steer()

    async def pause_everywhere(self, reason: str = "") -> bool:
        """Let no process claim until `resume_everywhere`; what runs goes on.

        It stands in the store: who comes later claims nothing either. False says that the
        queue was paused before, and is as it was.
        """
        return await self._open().pause(reason)

    async def resume_everywhere(self) -> bool:
        """Let every process claim again; False says that the queue was not paused."""
        return await self._open().resume()

    async def drain(self, *, max_messages: int | None = None, deadline: float | None = None) -> int:
        """Handle messages until none is left, for one-shot runs; count them.

        What this process handles in the background stands aside meanwhile: what it has in
        hand is finished, and counted, or given back.

        Args:
            max_messages: stop after so many.
            deadline: claim no more after so many seconds.

        Raises:
            Invalid: the queue has no handler, or does not run.
        """
        clock = self.database.components.clock
        begun = clock.mono()
        # A handler would wait for its own end.
        aside = self._worker if find_caller(self._port) is None else None
        before = 0 if aside is None else aside.handled
        try:
            await self._stand_aside(aside)
            finished = 0 if aside is None else aside.handled - before
            quota = None if max_messages is None else max_messages - finished
            worker = self._make_worker(quota=quota, until_empty=True)
            left = None if deadline is None else deadline - (clock.mono() - begun)
            return finished + await _run_for(worker, left)
        finally:
            if aside is not None and self.is_running:
                self._begin()

    async def stop(self) -> None:
        """Stop, if it runs. A handler that asks goes on to its end; all stops after it."""
        caller = find_caller(self._port)
        if caller is None or self._lifecycle.action == "stop" or not self.database.is_connected:
            await super().stop()
        else:
            caller.stop()
            self.database.run_in_background(super().stop, f"{self.name} stops")

    @property
    def is_calling(self) -> bool:
        """Whether it is a hook or a handler of its own that asks, for which `stop` waits."""
        return super().is_calling or find_caller(self._port) is not None

    async def on_start(self) -> None:
        """Find the resource, and take its messages."""
        database = self.database
        self._port = open_backend(database.store, self.queue, database.components)
        if self.resource not in database.resources:
            await database.create_resource(self.resource)
        database.resources[self.resource].set_queue(self)
        for part in get_args(QueuePart):
            records = MessageRecords(database.store, database.components, self.queue, part)
            database.add_view(f"plg_{self.namespace}_{self.resource}_{part}", records)
        database.events.on(WorkerDied.name, self._end_claims_of)

    async def on_stop(self) -> None:
        """Hear of no more deaths."""
        self.database.events.off(WorkerDied.name, self._end_claims_of)

    async def _set_up(self, exit_stack: AsyncExitStack) -> None:
        """Join, stand for election, then handle messages; stopping begins with the last."""
        await super()._set_up(exit_stack)
        self.run_in_background(self._tell_stats_for_ever, "stats")
        self._begin()
        exit_stack.push_async_callback(self._end)

    async def _end(self) -> None:
        """Handle nothing more in this process."""
        await self._stand_aside(self._worker)
        if self._executor is not None:
            self._executor.close()

    async def _stand_aside(self, worker: Worker | None) -> None:
        """Claim no more; finish or give back what is in hand."""
        working = self._working
        if worker is None or working is None:
            return
        self._worker = self._working = None
        worker.stop(_share(self.database.time_left))
        self._get_membership().publish(**build_worker_facts(self.queue, None))
        await asyncio.wait([working])
        self.emit(events.WorkersStopped(queue=self.queue, worker_id=self.worker_id))

    def unready(self) -> str:
        """Say what keeps it from working, if anything does."""
        return self.stuck() or super().unready() or self._describe_silence()

    def _describe_silence(self) -> str:
        worker, membership = self._worker, self._membership
        if worker is None or membership is None or worker.silence <= membership.timing.timeout:
            return ""
        return f"its claims have had no answer for {worker.silence:.0f} s"

    def stuck(self) -> str:
        """Say that plain functions have taken every slot: nothing but a new process helps."""
        if self._worker is not None and self._worker.is_stuck:
            return "every slot is taken by a handler that goes on after its time is over"
        return super().stuck()

    async def _end_claims_of(self, death: WorkerDied) -> None:
        """End the claims of a worker whose death this one has written down."""
        try:
            self._note_ended(await self._open().end_claims({death.incarnation}))
        except Unavailable as error:
            # Those who handle messages look, too.
            self._note_failure(error, None)

    async def _tell_stats_for_ever(self) -> None:
        while True:
            await self.database.components.clock.sleep(_TELL)
            self.emit(events.QueueStats(queue=self.queue, **self.stats()))

    async def coordinator_work(self) -> None:
        """Forget what was finished long ago."""
        now = self.database.components.clock.mono()
        if now >= self._tidy_next:
            self._tidy_next = now + _TIDY
            await self._tidy()

    async def _tidy(self) -> None:
        port = self._open()
        await port.forget("completed", older_than=self.settings.completed_ttl)
        if self.settings.dead_ttl is not None:
            await port.forget("dead", older_than=self.settings.dead_ttl)

    def _open(self) -> QueueBackend:
        if self._port is None:
            fix = "await database.use_plugin(queue) first"
            raise Invalid("queue", self.resource, "was never started", fix)
        return self._port

    def _begin(self) -> None:
        """Handle messages in the background, if there is a handler and nobody does."""
        if self._executor is None or self._worker is not None:
            return
        self._worker = self._make_worker()
        self._steer()
        self._working = self.run_in_background(self._worker.run, "worker")
        self.emit(
            events.WorkersStarted(
                queue=self.queue,
                worker_id=self.worker_id,
                concurrency=self.settings.concurrency,
            )
        )

    def _steer(self) -> None:
        if self._worker is not None:
            self._worker.is_paused = self._is_paused
            self._worker.wake()
            duty = WorkerStatus(concurrency=self.settings.concurrency, is_paused=self._is_paused)
            self._get_membership().publish(**build_worker_facts(self.queue, duty))

    def _make_worker(self, *, quota: int | None = None, until_empty: bool = False) -> Worker:
        if self._executor is None:
            fix = "pass on_message=, or decorate one with @queue.handler"
            raise Invalid("queue", self.resource, "has no handler", fix)
        told = WorkerListener(
            settled=self._note_settled,
            lost=self._note_lost,
            ended=self._note_ended,
            overran=self._note_overrun,
            progressed=self._note_progress,
            failed=self._note_failure,
        )
        return Worker(
            self._open(),
            self._get_membership(),
            self._executor,
            self.settings,
            self._retries,
            self._timeout,
            self.database.components,
            told,
            quota=quota,
            until_empty=until_empty,
        )

    def _note_settled(
        self, held: Delivery, outcome: HandlerVerdict, delay: float
    ) -> Coroutine[Any, Any, None] | None:
        message = held.message
        match outcome:
            case Completed(result):
                self._counters["completed"] += 1
                self._tell(events.MessageCompleted, message, duration=held.took)
                if self._on_complete is not None:
                    return self._call("on_complete", self._on_complete, held.document, result)
            case Cancel(reason):
                self._counters["cancelled"] += 1
                self._tell(events.MessageCancelled, message, reason=reason)
            case Returned() | Snooze():
                self._counters["returned"] += 1
                self._tell(events.MessageReturned, message, delay=delay)
            case Failed(error, cause):
                if has_spent(message.attempt, message.max_attempts):
                    self._counters["dead"] += 1
                    self._tell(events.MessageDead, message, error=error)
                else:
                    self._counters["retried"] += 1
                    self._tell(events.MessageRetried, message, error=error, delay=delay)
                self._note_failure(cause or RuntimeError(error), message.id)
                if self._on_error is not None:
                    told = cause or RuntimeError(error)
                    return self._call("on_error", self._on_error, told, held.document)
        return None

    def _tell(self, kind: type[Event], about: Message | EndedClaim, **facts: Any) -> None:
        """Tell what became of a message, if anybody listens: there may be very many."""
        if self.events.hears(kind):
            self.emit(kind(queue=self.queue, message_id=about.id, attempt=about.attempt, **facts))

    def _note_lost(self, message: Message, reason: str) -> None:
        self._counters["lost"] += 1
        self._tell(events.MessageLost, message, reason=reason)

    def _note_ended(self, ended: list[EndedClaim]) -> None:
        for each in ended:
            self._tell(events.MessageRecovered, each, state=each.state)

    def _note_overrun(self, message: Message, timeout: float) -> None:
        self._tell(events.HandlerOverran, message, timeout=timeout)

    def _note_progress(self, message: Message, progress: float) -> None:
        self._tell(events.MessageProgressed, message, progress=progress)

    def _note_failure(self, error: Exception, message_id: str | None) -> None:
        told = f"{type(error).__name__}: {error}"
        self.emit(events.QueueError(queue=self.queue, error=told, message_id=message_id))

    def _call(
        self, name: str, function: Handler, *arguments: Any
    ) -> Coroutine[Any, Any, None] | None:
        """Call a function of the user's; what it raises is told, and stops nothing."""
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it becomes an event
            self._note_call_failed(name, function, error)
            return None
        return self._finish_call(name, function, result) if inspect.isawaitable(result) else None

    async def _finish_call(self, name: str, function: Handler, result: Awaitable[Any]) -> None:
        try:
            await result
        except Exception as error:  # noqa: BLE001 - likewise
            self._note_call_failed(name, function, error)

    def _note_call_failed(self, name: str, function: Handler, error: Exception) -> None:
        self.emit(HandlerFailed(event=name, callback=repr(function), error=describe(error)))


S3QueuePlugin = QueuePlugin
"""The documents' name for it."""


async def _run_for(worker: Worker, seconds: float | None) -> int:
    """Let a worker claim for so many seconds at most; give how many messages it handled."""
    timer: asyncio.TimerHandle | None = None
    if seconds is not None:
        timer = asyncio.get_running_loop().call_later(seconds, worker.stop)
    try:
        await worker.run()
    finally:
        if timer is not None:
            timer.cancel()
    return worker.handled


def _share(left: float | None) -> float | None:
    """Give the seconds that handlers have of those that are left, and keep some to give back."""
    return None if left is None else max(0.0, left - min(left / 4, _TO_GIVE_BACK))


def _refuse_unknown(options: Mapping[str, Any], own: set[str]) -> None:
    known = own | {field.name for field in fields(CoordinatorSettings)}
    for name, value in options.items():
        if name not in known:
            hint = closest_name(name, [*known, "workers", "max_retries", "ticket_interval"])
            fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(sorted(known))}"
            raise Invalid(name, value, "is not an option of a queue", fix)
