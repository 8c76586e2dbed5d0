"""One process's worker of a queue: claims messages, runs handlers, settles.

Guarantees: a handler runs only while its claim is certainly this worker's (see `in_flight`).
After that it is cancelled, or sees `context.lost`, and nothing is settled. A suspect runs alone
(see `reaper.Quarantine`). On `stop` a worker claims no more, returns messages that have not
started, and lets handlers finish for `grace` seconds. Then coroutines are cancelled, plain
functions see `context.lost`, and their messages are returned, so a deployment spends no attempt.
A handler that does not end even then is left behind: user code cannot prolong a shutdown.

A handler's slot is free once it has returned. Settlements collect meanwhile and are sent in one
batch. The number of messages in flight, from the claim to the store's last answer, is limited.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sized
from contextvars import ContextVar
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono, backoff_limit
from jobsync.core.messages import Failed, HandlerVerdict, Retries, Returned, Transition, decide
from jobsync.errors import Corrupt, Unavailable
from jobsync.queue.backend import ClaimResult, EndedClaim, Message, QueueBackend, Settlement
from jobsync.queue.completer import Completer
from jobsync.queue.context import Context
from jobsync.queue.executor import Deadlines, Executor, build_late_verdict
from jobsync.queue.in_flight import Delivery, InFlight, Prefetch
from jobsync.queue.reaper import Quarantine, Reaper
from jobsync.queue.settings import QueueSettings
from jobsync.user_code import UserTasks

__all__ = ["Worker", "WorkerListener", "find_calling_worker"]

_REFILL_SHARE = 4
"""More is claimed when a quarter of the prefetched messages is left."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_SHORTEST_WAIT = 0.02
_DISTRUST_WAIT = 0.25
"""Seconds between checks whether the session is trusted again: nothing notifies of it."""
_MAX_EMPTY_POLLS = 3
_TURN = 0.002
"""Seconds for which handlers that never wait may run before everything else has a turn."""
_RETURN_TIME = 5.0
"""Seconds of a limited shutdown for the last settlements and the end of the session."""
_LAST_MOMENTS = 0.9
"""Seconds after a shutdown's own time for user code and the store to react."""
_CALLBACK_TIME = 0.2
"""Seconds in which a cancelled callback must end."""
_CANCEL_TIME = 5.0
"""Seconds in which a cancelled handler must end before its message is settled without it."""
_MAX_CALLBACKS = 1000
"""While this many callbacks run, nothing is claimed."""
_CANCELLED = "CancelledError: the handler was cancelled from within"
_DEFAULT_RETRIES = Retries()
_LISTEN = 3600.0

_running_delivery: ContextVar["tuple[Worker, Delivery] | None"] = ContextVar(
    "jobsync_running_delivery", default=None
)
"""The delivery whose handler or callback runs in this context."""


def find_calling_worker(backend: QueueBackend | None) -> "Worker | None":
    """Return the worker of a queue if one of its handlers or callbacks is the caller."""
    found = _running_delivery.get()
    if found is None:
        return None
    worker, delivery = found
    return worker if worker.backend is backend and worker.is_handling(delivery) else None


class WorkerListener(msgspec.Struct, kw_only=True):
    """Callbacks of a worker."""

    on_settled: Callable[[Delivery, HandlerVerdict, float], Coroutine[Any, Any, None] | None]
    """A message was settled with a verdict and a delay before the next attempt. May return a
    callback, which runs in the background; the worker waits for it only at its end."""
    on_lost: Callable[[Message, str], None]
    on_ended: Callable[[list[EndedClaim]], None]
    on_overrun: Callable[[Message, float], None]
    on_progress: Callable[[Message, float], None]
    on_failure: Callable[[BaseException, str | None], None]
    """Something went wrong, perhaps with a message."""


class Worker:
    """Handles messages until it is stopped.

    Args:
        backend: where the messages are stored.
        membership: the session that holds the claims.
        executor: runs the handler.
        settings: concurrency, timeouts and intervals.
        retries: the delays of failed messages.
        timeout: seconds that a handler may take, unless its message has its own timeout.
        components: time and randomness.
        listener: the callbacks.
        quota: stop after this many messages.
        until_empty: stop when there is nothing left to claim.
    """

    def __init__(
        self,
        backend: QueueBackend,
        membership: Membership,
        executor: Executor,
        settings: QueueSettings,
        retries: Retries,
        timeout: float | None,
        components: Components,
        listener: WorkerListener,
        *,
        quota: int | None = None,
        until_empty: bool = False,
    ) -> None:
        self.handled = 0
        """How many messages were handled, successfully or not."""
        self.is_paused = False
        self.ended = asyncio.Event()
        self.backend = backend
        self._membership = membership
        self._executor = executor
        self._settings = settings
        self._retries = retries
        self._timeout = timeout
        self._clock = components.clock
        self._randomness = components.randomness
        self._listener = listener
        self._quota = quota
        self._until_empty = until_empty
        self._visibility = settings.visibility_timeout
        self._in_flight = InFlight(
            backend, membership, self._clock, self._visibility, self._on_lost, self._on_failure
        )
        self._completer = Completer(
            backend, components, self._on_answer, self._on_failure, self._expects_more
        )
        self._deadlines = Deadlines(self._clock, self._on_deadline)
        self._reaper = Reaper(backend, membership, self._clock, self._on_ended, self._on_failure)
        self._quarantine = Quarantine(self._clock, self._visibility / 3)
        self._ready: deque[Delivery] = deque()
        self._running: dict[Delivery, None] = {}
        self._called_back: dict[Delivery, None] = {}
        """Messages whose callbacks run."""
        self._overrun: dict[Delivery, None] = {}
        """Handlers that run on although their messages are settled or lost."""
        self._servers = 0
        """How many tasks handle messages, or are about to."""
        self._empty_polls = 0
        self._unanswered_since: Mono | None = None
        """When the first claim was sent that is unanswered."""
        self._prefetch = Prefetch(settings)
        self._refill_at = 0
        """More is claimed when at most this many messages are ready."""
        self._changed = asyncio.Event()
        self._tasks = UserTasks(self._changed.set)
        self._callbacks = UserTasks(self._changed.set)
        self._finish_by: Mono | None = None
        """Until when handlers may finish, once this worker is told to stop."""
        self._end_by: Mono | None = None
        """When everything must have ended."""
        self._turn = _TURN / settings.concurrency
        self._is_stopping = False

    @property
    def running(self) -> int:
        """How many handlers run."""
        return len(self._running)

    @property
    def is_stuck(self) -> bool:
        """Whether handlers that ran out of time occupy every slot."""
        return len(self._overrun) >= self._settings.concurrency

    @property
    def is_waiting_for_callbacks(self) -> bool:
        """Whether so many callbacks run that nothing is claimed."""
        return len(self._callbacks) >= _MAX_CALLBACKS

    @property
    def user_code(self) -> list[str]:
        """Descriptions of the handlers and callbacks that run."""
        running = {**self._running, **dict.fromkeys(self._executor.functions)}
        handlers = [f"the handler of message {delivery.message.id}" for delivery in running]
        return [*handlers, *(["callbacks"] if self._callbacks else [])]

    @property
    def silence(self) -> float:
        """Seconds for which the store has not answered this worker's claims."""
        since = self._unanswered_since
        return 0.0 if since is None else self._clock.mono() - since

    def is_handling(self, delivery: Delivery) -> bool:
        """Whether a delivery's handler or callback runs."""
        return delivery in self._running or delivery in self._called_back

    def look_for_late_claims(self) -> None:
        """Check the claims of dead workers again in an interval."""
        self._reaper.look_again()

    async def run(self) -> None:
        """Work until `stop`, or until the quota or the end of the queue is reached."""
        parts = (
            self._in_flight.renew,
            self._in_flight.watch,
            self._deadlines.watch,
            self._completer.run,
            self._reaper.run,
            self._listen,
            self._tasks.watch,
            self._callbacks.watch,
        )
        try:
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(self._run_part(part)) for part in parts]
                await self._run_part(self._fetch_until_done)
                await self._run_part(self._wind_down)
                for loop in loops:
                    loop.cancel()
        except GeneratorExit:
            # This coroutine is closed: nothing can be awaited.
            raise
        except BaseException:
            # Nothing can be settled any more, and functions on threads cannot be cancelled.
            for delivery in list(self._in_flight):
                self._in_flight.lose(delivery, "its worker has failed or was cancelled")
            await self._tasks.cancel(_LAST_MOMENTS)
            await self._callbacks.cancel(_CALLBACK_TIME)
            raise
        finally:
            self.ended.set()

    def stop(self, within: float | None = None) -> None:
        """Claim no more, and end.

        Args:
            within: seconds that the caller can wait. Handlers have most of them to finish, but
                not more than `grace`.
        """
        grace, reserve = self._settings.grace, 0.0
        if within is not None:
            reserve = min(max(0.0, within) / 4, _RETURN_TIME)
            grace = min(grace, max(0.0, within - reserve))
        finish_by = self._clock.mono() + grace
        if self._finish_by is None or finish_by < self._finish_by:
            self._finish_by = finish_by
            self._end_by = finish_by + reserve + _LAST_MOMENTS
        self.finish()

    def finish(self) -> None:
        """Claim no more, and end after the handlers, however long they take."""
        self._is_stopping = True
        self._changed.set()

    def wake(self) -> None:
        """Poll now: something may have changed."""
        self._changed.set()

    async def settle(self, message: Message, verdict: HandlerVerdict) -> bool:
        """End a claim; return whether the store accepted it."""
        delivery = self._in_flight.find(message)
        if delivery is None:
            return False
        delivery.answer = asyncio.get_running_loop().create_future()
        self._submit(delivery, verdict)
        return await asyncio.shield(delivery.answer)

    async def extend(self, message: Message, seconds: float) -> bool:
        """Extend a claim; return whether it stands."""
        return await self._in_flight.extend(message, seconds)

    def report_progress(self, message: Message, progress: float) -> None:
        """Report how far a handler is."""
        self._listener.on_progress(message, progress)

    async def _run_part(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part of this worker. However it ends, no handler starts without it."""
        try:
            await part()
        finally:
            self._is_stopping = True

    async def _fetch_until_done(self) -> None:
        failures = 0
        while not (self._is_stopping or self._is_done()):
            self._changed.clear()
            try:
                claimed = await self._fetch()
                failures = 0
            except Unavailable as error:
                failures += 1
                self._on_failure(error)
                longest = backoff_limit(failures, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
                await self._clock.sleep(self._randomness.uniform(0, longest))
                continue
            if claimed is None:
                await self._wait_for_change(self._find_wait() or self._settings.poll_interval)
                continue
            # The claimed messages start before more are requested.
            await asyncio.sleep(0)
            if not (claimed.more or self._quarantine.is_wanted):
                if self._until_empty and not self._in_flight:
                    return
                await self._wait_for_change(self._find_poll_wait(claimed))

    def _is_done(self) -> bool:
        return self._quota is not None and self.handled >= self._quota

    async def _fetch(self) -> ClaimResult | None:
        """Claim messages and start them; return None if there is no room."""
        if self.is_paused or self._find_wait() > 0:
            self._unanswered_since = None
            return None
        if self._quarantine.is_wanted:
            claimed = await self._claim(1, suspects=True)
            if claimed.messages:
                return claimed
        room = self._find_room()
        return await self._claim(room, suspects=False) if room > 0 else None

    def _find_wait(self) -> float:
        """Return the seconds for which nothing may be claimed, unless something changes."""
        if not self._membership.is_trusted:
            return _DISTRUST_WAIT
        return self._quarantine.wait(is_free=not (self._in_flight or self._running))

    def _find_room(self) -> int:
        """Return how many messages may be claimed now."""
        prefetch = self._prefetch.limit
        most = self._settings.concurrency + prefetch
        # Not one by one: a batch costs as much as a single message. Nor while the store accepts
        # no settlements: the messages in flight are limited.
        self._refill_at = prefetch // _REFILL_SHARE
        if len(self._ready) > self._refill_at or len(self._in_flight) > 2 * most:
            return 0
        if self.is_stuck or self.is_waiting_for_callbacks:
            return 0
        room = most - len(self._ready) - len(self._running)
        if self._quota is None:
            return room
        return min(room, self._quota - self.handled - len(self._in_flight))

    async def _claim(self, limit: int, *, suspects: bool) -> ClaimResult:
        """Claim messages and start them; end claims of others that have lapsed."""
        sent, session = self._clock.mono(), self._membership.incarnation
        self._unanswered_since = self._unanswered_since or sent
        claimed = await self.backend.claim(
            limit, session=session, visibility=self._visibility, suspects=suspects
        )
        self._unanswered_since = None
        deliveries = self._accept(claimed.messages, session, sent)
        if suspects:
            self._quarantine.start(deliveries[0] if deliveries else None)
        elif claimed.suspects:
            self._quarantine.notice()
        self._ready.extend(deliveries)
        self._empty_polls = 0 if deliveries else self._empty_polls
        self._start_servers()
        self._reaper.is_quiet = claimed.lapse is None and not claimed.messages
        if claimed.lapse is not None and claimed.lapse <= 0:
            keep = [delivery.id for delivery in self._in_flight]
            self._on_ended(await self.backend.end_claims(keep=keep))
        return claimed

    def _accept(self, messages: Iterable[Message], session: str, sent: Mono) -> list[Delivery]:
        """Add messages to those in flight; bury those that no handler can read."""
        deliveries = []
        for message in messages:
            try:
                deliveries.append(self._in_flight.add(message, session, sent))
            except Corrupt as corrupt:
                self._listener.on_failure(corrupt, message.id)
                bury = Settlement(receipt=message.receipt, move="bury", error=str(corrupt))
                self._completer.submit(bury, None)
        return deliveries

    def _start_servers(self) -> None:
        """Start tasks for as many ready messages as may run."""
        most = 0 if self._is_stopping else self._settings.concurrency
        while self._servers < min(most, len(self._running) + len(self._ready)):
            self._servers += 1
            self._tasks.start(self._serve())

    async def _serve(self) -> None:
        """Handle ready messages one by one: a task for each would cost more than most handlers."""
        task, begun = asyncio.current_task(), self._clock.mono()
        try:
            # A cancelled task starts nothing else, whatever the reason.
            while task is not None and not task.cancelling():
                delivery = self._next_ready()
                if delivery is None:
                    break
                delivery.task = task
                if await self._handle(delivery) - begun >= self._turn:
                    await asyncio.sleep(0)
                    begun = self._clock.mono()
        finally:
            self._servers -= 1
            self._start_servers()

    def _next_ready(self) -> Delivery | None:
        """Return the next message to start, if there is one."""
        while self._ready and not self._is_stopping:
            delivery = self._ready.popleft()
            if self._in_flight.check(delivery):
                return delivery
        return None

    async def _handle(self, delivery: Delivery) -> Mono:
        """Run a message's handler and settle; return when that was done."""
        started = self._prepare(delivery)
        try:
            verdict, overrun = await self._executor.run(delivery)
            if delivery.is_interrupted and not delivery.is_late and isinstance(verdict, Failed):
                verdict = Returned()
            self._conclude(delivery, verdict)
            # Not kept: an error refers to the frames of its callers, and this is one of them.
            del verdict
            if overrun is not None:
                self._report_overrun(delivery)
                # Its thread is occupied until it returns.
                await asyncio.wait([overrun])
            self._prefetch.measure(self._clock.mono() - started)
        except asyncio.CancelledError:
            self._conclude_cancelled(delivery)
        finally:
            self._release(delivery)
        return self._clock.mono()

    def _prepare(self, delivery: Delivery) -> Mono:
        """Start a handler's time; return when that is."""
        message, executor, timeout = delivery.message, self._executor, delivery.message.timeout
        delivery.timeout = self._timeout if timeout is None else timeout
        delivery.started = started = self._clock.mono()
        self._running[delivery] = None
        delivery.is_on_loop = executor.is_async
        if delivery.timeout is not None:
            self._deadlines.add(delivery, started + delivery.timeout)
        if executor.takes_context:
            worker_id = self._membership.worker_id
            delivery.context = Context(message, worker_id, self._clock, delivery.timeout, self)
        _running_delivery.set((self, delivery))
        return started

    def _release(self, delivery: Delivery) -> None:
        """Clean up after a handler has ended."""
        # Not kept: the task would refer to what it has run, and that to the task.
        delivery.task = None
        self._running.pop(delivery, None)
        self._overrun.pop(delivery, None)
        self._deadlines.remove(delivery)
        self._quarantine.release(delivery)
        if len(self._ready) <= self._refill_at:
            self._changed.set()

    def _conclude_cancelled(self, delivery: Delivery) -> None:
        """Settle a message whose handler was cancelled, unless it is lost."""
        late = build_late_verdict(delivery)
        if late is not None:
            self._conclude(delivery, late)
        elif not delivery.is_on_loop:
            # The plain function continues: nobody else may claim its message before it lapses.
            pass
        elif delivery.is_interrupted:
            self._conclude(delivery, Returned())
        else:
            self._conclude(delivery, Failed(_CANCELLED))

    def _conclude(self, delivery: Delivery, verdict: HandlerVerdict) -> None:
        """Settle a message, unless its handler has done so or it is lost."""
        if self._in_flight.find(delivery.message) is delivery:
            self._submit(delivery, verdict)

    def _submit(self, delivery: Delivery, verdict: HandlerVerdict) -> None:
        move, delivery.delay = self._decide(delivery.message, verdict)
        delivery.verdict, delivery.is_settling = verdict, True
        started = delivery.started
        delivery.duration = 0.0 if started is None else self._clock.mono() - started
        error = verdict.error if isinstance(verdict, Failed) else ""
        receipt = delivery.message.receipt
        settlement = Settlement(receipt=receipt, move=move, delay=delivery.delay, error=error)
        self._completer.submit(settlement, delivery)

    def _decide(self, message: Message, verdict: HandlerVerdict) -> tuple[Transition, float]:
        if not isinstance(verdict, Failed):
            return _decide(message, verdict, _DEFAULT_RETRIES, 0.0)
        draw = self._randomness.uniform(0, 1)
        try:
            return _decide(message, verdict, self._retries, draw)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's backoff may raise anything
            self._listener.on_failure(error, message.id)
            return _decide(message, verdict, _DEFAULT_RETRIES, draw)

    def _expects_more(self) -> bool:
        """Whether instant handlers are about to end."""
        return bool(self._ready) and self._prefetch.is_instant

    def _on_answer(self, delivery: Delivery | None, is_accepted: bool) -> None:  # noqa: FBT001 - the answer itself
        if delivery is not None and delivery.verdict is not None:
            # Not kept: an error refers to the frames that it has passed, and those to this.
            verdict, delivery.verdict = delivery.verdict, None
            if is_accepted:
                self._in_flight.remove(delivery)
                self.handled += not isinstance(verdict, Returned)
                callback = self._listener.on_settled(delivery, verdict, delivery.delay)
                if callback is not None:
                    self._callbacks.start(self._call_back(delivery, callback))
            else:
                self._in_flight.lose(delivery, "its claim had ended before it was settled")
            if delivery.answer is not None and not delivery.answer.done():
                delivery.answer.set_result(is_accepted)
        self._changed.set()

    async def _call_back(self, delivery: Delivery, callback: Coroutine[Any, Any, None]) -> None:
        """Run a callback of a message, which may stop this worker as a handler may."""
        _running_delivery.set((self, delivery))
        self._called_back[delivery] = None
        try:
            await callback
        finally:
            del self._called_back[delivery]

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
            self._deadlines.add(delivery, self._clock.mono() + _CANCEL_TIME)

    def _report_overrun(self, delivery: Delivery) -> None:
        if delivery not in self._overrun:
            self._overrun[delivery] = None
            self._listener.on_overrun(delivery.message, delivery.timeout or 0.0)
            if self.is_stuck:
                self._return_ready()

    def _on_lost(self, delivery: Delivery, reason: str) -> None:
        self._listener.on_lost(delivery.message, reason)
        if delivery.is_on_loop and not delivery.is_settling:
            self._cancel(delivery)
        if delivery in self._ready:
            self._ready.remove(delivery)
        if delivery not in self._running:
            # Otherwise it is released when its handler has ended.
            self._quarantine.release(delivery)
        self._changed.set()

    def _on_ended(self, ended: list[EndedClaim]) -> None:
        self._listener.on_ended(ended)
        self._changed.set()

    def _on_failure(self, error: Exception) -> None:
        self._listener.on_failure(error, None)

    def _find_poll_wait(self, claimed: ClaimResult) -> float:
        # A worker that finds nothing repeatedly polls less often: notifications announce news.
        self._empty_polls = 0 if claimed.messages else min(self._empty_polls + 1, _MAX_EMPTY_POLLS)
        longest = self._settings.poll_interval * max(1, self._empty_polls)
        return longest if claimed.next is None else min(longest, claimed.next)

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, _SHORTEST_WAIT)):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _listen(self) -> None:
        """Poll whenever messages were pushed, also while a claim is under way."""
        while True:
            try:
                await self.backend.wait(_LISTEN)
            except Unavailable:
                await self._clock.sleep(self._settings.poll_interval)
            self._changed.set()

    async def _wind_down(self) -> None:
        """Return messages that have not started; let the others finish for a while."""
        self._return_ready()
        await self._finish_handlers()
        end_by = self._end_by or self._clock.mono() + self._settings.grace
        try:
            async with asyncio.timeout(end_by - self._clock.mono()):
                await self._completer.flush()
        except TimeoutError:
            for delivery in list(self._in_flight):
                self._in_flight.lose(delivery, "it could not be returned in time")
        await self._wait_while(lambda: self._callbacks, lambda: self._finish_by)
        await self._callbacks.cancel(_CALLBACK_TIME)

    def _return_ready(self) -> None:
        """Return the messages that have not started."""
        while self._ready:
            self._conclude(self._ready.popleft(), Returned())

    async def _finish_handlers(self) -> None:
        for delivery in self._overrun:
            # It is settled; nobody knows when its handler returns.
            if delivery.task is not None:
                delivery.task.cancel()
        await self._wait_while(self._list_useful, lambda: self._finish_by)
        for delivery in self._list_useful():
            self._interrupt(delivery)
        now = self._clock.mono()
        half = now + ((self._end_by or now) - now) / 2
        await self._wait_while(self._list_useful, lambda: half)
        for delivery in self._list_useful():
            self._in_flight.lose(delivery, "its handler did not end in time")
            if delivery.task is not None:
                delivery.task.cancel()

    def _list_useful(self) -> list[Delivery]:
        """Return the deliveries whose handlers still decide what becomes of them."""
        return [delivery for delivery in self._running if delivery not in self._overrun]

    async def _wait_while(
        self, list_busy: Callable[[], Sized], until: Callable[[], Mono | None]
    ) -> None:
        """Wait until nothing is busy, or until a moment, which `stop` may set meanwhile."""
        while list_busy():
            self._changed.clear()
            end = until()
            left = self._settings.poll_interval if end is None else end - self._clock.mono()
            if left <= 0:
                return
            await self._wait_for_change(left)

    def _interrupt(self, delivery: Delivery) -> None:
        """Ask a handler to end, because its worker stops."""
        delivery.is_interrupted = True
        if not delivery.is_on_loop:
            delivery.mark_context_lost()
        elif delivery.task is not None:
            delivery.task.cancel()


def _decide(
    message: Message, verdict: HandlerVerdict, retries: Retries, draw: float
) -> tuple[Transition, float]:
    return decide(
        verdict,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        retries=retries,
        draw=draw,
    )
