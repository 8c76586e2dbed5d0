"""Runs the handlers of claimed messages, as many at once as there are slots.

A slot is free once its handler has returned. A coroutine that exceeds its timeout is cancelled; if
it runs on, or is a plain function, its message is settled without it and its slot stays occupied.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Protocol

from jobsync.core.clock import Clock, Mono
from jobsync.core.messages import Failed, HandlerVerdict, Returned
from jobsync.queue.context import ClaimOwner, Context
from jobsync.queue.executor import Deadlines, Executor, build_late_verdict
from jobsync.queue.in_flight import Delivery, InFlight, Prefetch
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings
from jobsync.user_code import UserTasks

__all__ = ["HandlerSlots", "SlotsOwner", "describe_running", "running_delivery"]

_REFILL = 0.25
_EARLY_REFILL = 0.66
"""More is claimed when this share of the prefetched messages is left. Instant handlers would have
handled a quarter before the claim is answered."""
_TURN = 0.002
"""Seconds for which handlers that never wait may run before everything else has a turn."""
_CANCEL_TIME = 5.0
"""Seconds in which a cancelled handler must end before its message is settled without it."""
_CANCELLED = "CancelledError: the handler was cancelled from within"

running_delivery: ContextVar["tuple[SlotsOwner, Delivery] | None"] = ContextVar(
    "jobsync_running_delivery", default=None
)
"""The delivery whose handler or callback runs in this context, and its worker."""


def describe_running() -> dict[str, str | int]:
    """Return which message is handled in this context, for logs; nothing outside handlers."""
    owner, delivery = running_delivery.get() or (None, None)
    if owner is None or delivery is None:
        return {}
    message = delivery.message
    task: dict[str, str | int] = {"task": message.task} if message.task else {}
    return {"message_id": message.id, "queue": owner.queue, "attempt": message.attempt, **task}


class SlotsOwner(ClaimOwner, Protocol):
    """The worker whose messages are handled."""

    @property
    def queue(self) -> str:
        """The stored name of its queue."""
        ...

    def conclude(
        self, delivery: Delivery, verdict: HandlerVerdict, ended: Mono | None = None
    ) -> None:
        """Settle a message, unless its handler has done so or it is lost.

        Args:
            delivery: the message.
            verdict: how its handler ended.
            ended: when; now, if the caller does not know.
        """
        ...

    def on_released(self, delivery: Delivery) -> None:
        """The handler of a suspect has ended, or the handling of a message that is lost."""
        ...


class HandlerSlots:
    """The handlers of one worker.

    Args:
        executor: runs a handler.
        settings: how many run at once, and how many messages are claimed in advance.
        timeout: seconds that a handler may take, unless its message has its own timeout.
        worker_id: the name of the worker, for contexts.
        in_flight: the claims, each of which must be certain when its handler starts.
        clock: this machine's clock.
        owner: the worker.
        reporter: is told of handlers that run on.
        changed: set when there is room for more, or a task has ended.
    """

    def __init__(
        self,
        executor: Executor,
        settings: QueueSettings,
        timeout: float | None,
        worker_id: str,
        in_flight: InFlight,
        clock: Clock,
        owner: SlotsOwner,
        reporter: QueueReporter,
        changed: asyncio.Event,
    ) -> None:
        self.deadlines = Deadlines(clock, self._on_deadline)
        self.tasks = UserTasks(changed.set)
        self.running: dict[Delivery, None] = {}
        self.is_stopping = False
        """Whether no further handler may start."""
        self._executor = executor
        self._concurrency = settings.concurrency
        self._timeout = timeout
        self._worker_id = worker_id
        self._in_flight = in_flight
        self._clock = clock
        self._owner = owner
        self._reporter = reporter
        self._changed = changed
        self._ready: deque[Delivery] = deque()
        self._overrun: dict[Delivery, None] = {}
        """Handlers that run on although their messages are settled or lost."""
        self._servers = 0
        """How many tasks handle messages, or are about to."""
        # Not a copy: a task with limits may be added later.
        self._prefetch = Prefetch(settings, lambda: executor.has_limits)
        self._largest_claim = 0
        """The most messages that a claim may have beyond what is wanted."""
        self._refill_at = 0
        """More is claimed when at most this many messages are ready."""
        self._turn = _TURN / settings.concurrency

    @property
    def is_stuck(self) -> bool:
        """Whether handlers that ran out of time occupy every slot."""
        return len(self._overrun) >= self._concurrency

    @property
    def expects_more(self) -> bool:
        """Whether instant handlers are about to end."""
        return bool(self._ready) and self._prefetch.is_instant

    def list_handled(self) -> list[Delivery]:
        """Return the deliveries whose handlers run, also on threads that were left behind."""
        return list({**self.running, **self._executor.functions.copy()})

    def list_useful(self) -> list[Delivery]:
        """Return the deliveries whose handlers still decide what becomes of them."""
        return [delivery for delivery in self.running if delivery not in self._overrun]

    def find_room(self) -> int:
        """Return how many messages may be claimed now."""
        prefetch = self._prefetch.limit
        most = self._concurrency + prefetch
        # Not one by one: a batch costs as much as a single message. Nor while the store accepts
        # no settlements: the messages in flight are limited.
        share = _EARLY_REFILL if self._prefetch.is_instant else _REFILL
        self._refill_at = int(prefetch * share)
        limit = 2 * max(most, self._largest_claim)
        if len(self._ready) > self._refill_at or len(self._in_flight) > limit or self.is_stuck:
            return 0
        return most - len(self._ready) - len(self.running)

    def find_most(self, most: int) -> int:
        """Return how many messages may be claimed if they come together, as in a page."""
        self._largest_claim = self._prefetch.find_most(most)
        return self._largest_claim

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Handle messages when there are free slots."""
        self._ready.extend(deliveries)
        self._start_servers()

    def drop(self, delivery: Delivery) -> None:
        """End the handling of a message that is lost."""
        if delivery.is_on_loop and not delivery.is_settling:
            self._cancel(delivery)
        if delivery in self._ready:
            self._ready.remove(delivery)
        if delivery not in self.running:
            # Otherwise it is released when its handler has ended.
            self._owner.on_released(delivery)

    def return_ready(self) -> None:
        """Return the messages that have not started."""
        while self._ready:
            self._owner.conclude(self._ready.popleft(), Returned())

    def cancel_overrun(self) -> None:
        """Cancel the handlers that run on: nobody knows when they return."""
        for delivery in self._overrun:
            if delivery.task is not None:
                delivery.task.cancel()

    def interrupt(self) -> None:
        """Ask the handlers to end, because their worker stops."""
        for delivery in self.list_useful():
            delivery.is_interrupted = True
            if not delivery.is_on_loop:
                delivery.mark_context_lost()
            elif delivery.task is not None:
                delivery.task.cancel()

    def _start_servers(self) -> None:
        """Start tasks for as many ready messages as may run."""
        most = 0 if self.is_stopping else self._concurrency
        while self._servers < min(most, len(self.running) + len(self._ready)):
            self._servers += 1
            self.tasks.start(self._serve())

    async def _serve(self) -> None:
        """Handle ready messages one by one: a task for each would cost more than most handlers."""
        task, begun = asyncio.current_task(), self._clock.mono()
        # The clock is read once for each message: its handler starts when the one before has ended.
        now = begun
        try:
            # A cancelled task starts nothing else, whatever the reason.
            while task is not None and not task.cancelling():
                delivery = self._next_ready(now)
                if delivery is None:
                    break
                delivery.task = task
                now = await self._handle(delivery, now)
                if now - begun >= self._turn:
                    await asyncio.sleep(0)
                    begun = now = self._clock.mono()
        finally:
            self._servers -= 1
            self._start_servers()

    def _next_ready(self, now: Mono) -> Delivery | None:
        """Return the next message to start, if there is one."""
        while self._ready and not self.is_stopping:
            delivery = self._ready.popleft()
            if self._in_flight.check(delivery, now):
                return delivery
        return None

    async def _handle(self, delivery: Delivery, started: Mono) -> Mono:
        """Run a message's handler, which starts now, and settle; return when it has ended."""
        self._prepare(delivery, started)
        try:
            verdict, overrun = await self._executor.run(delivery)
            if delivery.is_interrupted and not delivery.is_late and isinstance(verdict, Failed):
                verdict = Returned()
            ended = self._clock.mono()
            self._owner.conclude(delivery, verdict, ended)
            # Not kept: an error refers to the frames of its callers, and this is one of them.
            del verdict
            if overrun is not None:
                self._report_overrun(delivery)
                # Its thread is occupied until it returns.
                await asyncio.wait([overrun])
                ended = self._clock.mono()
            self._prefetch.measure(ended - started)
        except asyncio.CancelledError:
            self._conclude_cancelled(delivery)
            ended = self._clock.mono()
        finally:
            self._release(delivery)
        return ended

    def _prepare(self, delivery: Delivery, started: Mono) -> None:
        """Start a handler's time."""
        message, timeout = delivery.message, delivery.message.timeout
        handler = self._executor.find(message.task)
        delivery.timeout = self._timeout if timeout is None else timeout
        delivery.started = started
        self.running[delivery] = None
        delivery.is_on_loop = handler.is_async
        if delivery.timeout is not None:
            self.deadlines.add(delivery, started + delivery.timeout)
        if handler.takes_context:
            delivery.context = Context(
                message, self._worker_id, self._clock, delivery.timeout, self._owner
            )
        running_delivery.set((self._owner, delivery))

    def _release(self, delivery: Delivery) -> None:
        """Clean up after a handler has ended."""
        # Not kept: the task would refer to what it has run, and that to the task.
        delivery.task = None
        self.running.pop(delivery, None)
        if self._overrun:
            self._overrun.pop(delivery, None)
        self.deadlines.remove(delivery)
        if delivery.message.is_suspect:
            self._owner.on_released(delivery)
        if len(self._ready) <= self._refill_at:
            self._changed.set()

    def _conclude_cancelled(self, delivery: Delivery) -> None:
        """Settle a message whose handler was cancelled, unless it is lost."""
        late = build_late_verdict(delivery)
        if late is not None:
            self._owner.conclude(delivery, late)
        elif not delivery.is_on_loop:
            # The plain function continues: nobody else may claim its message before it lapses.
            pass
        elif delivery.is_interrupted:
            self._owner.conclude(delivery, Returned())
        else:
            self._owner.conclude(delivery, Failed(_CANCELLED))

    def _on_deadline(self, delivery: Delivery) -> None:
        """End a handler's time; settle without it if it was cancelled and runs on."""
        if delivery.is_late or delivery.is_lost:
            self._conclude_cancelled(delivery)
            self._report_overrun(delivery)
        else:
            delivery.is_late = True
            delivery.mark_context_lost()
            self._cancel(delivery)

    def _cancel(self, delivery: Delivery) -> None:
        """Cancel a handler, and check later that it has ended."""
        if delivery.task is not None:
            delivery.task.cancel()
        if delivery.is_on_loop:
            self.deadlines.add(delivery, self._clock.mono() + _CANCEL_TIME)

    def _report_overrun(self, delivery: Delivery) -> None:
        if delivery not in self._overrun:
            self._overrun[delivery] = None
            self._reporter.on_overrun(delivery.message, delivery.timeout or 0.0)
            if self.is_stuck:
                self.return_ready()
