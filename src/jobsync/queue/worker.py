"""One process's worker of a queue: claims messages, runs handlers, settles.

Guarantees: a handler runs only while its claim is certainly this worker's (see `in_flight`).
After that it is cancelled, or sees `context.lost`, and nothing is settled. A suspect runs alone
(see `reaper.Quarantine`). On `stop` a worker claims no more, returns messages that have not
started, and lets handlers finish for `grace` seconds. Then coroutines are cancelled, plain
functions see `context.lost`, and their messages are returned, so a deployment spends no attempt.
A handler that does not end even then is left behind: user code cannot prolong a shutdown.

Handlers run in slots, see `handler_slots`; settlements collect meanwhile and are sent in one batch.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono
from jobsync.core.messages import Completed, Failed, HandlerVerdict, Returned, Transition, decide
from jobsync.core.retry import ExponentialBackoff, Retries
from jobsync.errors import Corrupt, Unavailable
from jobsync.queue.backend import ClaimResult, EndedClaim, Message, QueueBackend, Settlement
from jobsync.queue.completer import Completer
from jobsync.queue.executor import Executor
from jobsync.queue.handler_slots import HandlerSlots, running_delivery
from jobsync.queue.in_flight import Delivery, InFlight
from jobsync.queue.reaper import Quarantine, Reaper
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings
from jobsync.queue.shutdown import CALLBACK_TIME, LAST_MOMENTS, Shutdown, wait_for_change
from jobsync.queue.transaction import TransactionOpener, check_no_transaction
from jobsync.user_code import UserTasks

__all__ = ["Worker", "find_calling_worker"]

_BACKOFF = ExponentialBackoff(first=0.1, longest=2.0)
_DISTRUST_WAIT = 0.25
"""Seconds between checks whether the session is trusted again: nothing notifies of it."""
_MAX_EMPTY_POLLS = 3
_MAX_CALLBACKS = 1000
"""While this many callbacks run, nothing is claimed."""
_LARGEST_CLAIM = 100
"""The most messages of a claim where requests are billed: so many become suspects if it lapses."""
_GATHER = 2.0
"""Seconds for which settlements are gathered at most where requests are billed."""
_DEFAULT_RETRIES = Retries()
_LISTEN = 3600.0


def find_calling_worker(backend: QueueBackend | None) -> "Worker | None":
    """Return the worker of a queue if one of its handlers or callbacks is the caller."""
    worker, delivery = running_delivery.get() or (None, None)
    if not isinstance(worker, Worker) or delivery is None or worker.backend is not backend:
        return None
    return worker if worker.is_handling(delivery) else None


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
        reporter: is told what happens.
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
        reporter: QueueReporter,
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
        self._settings = settings
        self._retries = retries
        self._clock = components.clock
        self._randomness = components.randomness
        self._reporter = reporter
        self._quota = quota
        self._until_empty = until_empty
        self._visibility = settings.visibility_timeout
        self._changed = asyncio.Event()
        self._in_flight = InFlight(backend, membership, self._clock, self._visibility, self)
        self.open_transaction = TransactionOpener(backend, self._in_flight, components, self).open
        self._slots = HandlerSlots(
            executor,
            settings,
            timeout,
            membership.worker_id,
            self._in_flight,
            self._clock,
            self,
            reporter,
            self._changed,
        )
        gather = min(_GATHER, self._visibility / 6) if backend.is_billed else 0.0
        self._completer = Completer(backend, components, self, gather=gather)
        self._reaper = Reaper(backend, membership, self._clock, self)
        self._quarantine = Quarantine(self._clock, self._visibility / 3)
        self._called_back: dict[Delivery, None] = {}
        """Messages whose callbacks run."""
        self._empty_polls = 0
        self._unanswered_since: Mono | None = None
        """When the first claim was sent that is unanswered."""
        self._callbacks = UserTasks(self._changed.set)
        self._shutdown = Shutdown(
            settings,
            self._clock,
            self._slots,
            self._in_flight,
            self._completer,
            self._callbacks,
            self._changed,
        )

    @property
    def running(self) -> int:
        """How many handlers run."""
        return len(self._slots.running)

    @property
    def is_stuck(self) -> bool:
        """Whether handlers that ran out of time occupy every slot."""
        return self._slots.is_stuck

    @property
    def is_waiting_for_callbacks(self) -> bool:
        """Whether so many callbacks run that nothing is claimed."""
        return len(self._callbacks) >= _MAX_CALLBACKS

    @property
    def user_code(self) -> list[str]:
        """Descriptions of the handlers and callbacks that run."""
        handled = self._slots.list_handled()
        handlers = [f"the handler of message {delivery.message.id}" for delivery in handled]
        return [*handlers, *(["callbacks"] if self._callbacks else [])]

    @property
    def silence(self) -> float:
        """Seconds for which the store has not answered this worker's claims."""
        since = self._unanswered_since
        return 0.0 if since is None else self._clock.mono() - since

    def is_handling(self, delivery: Delivery) -> bool:
        """Whether a delivery's handler or callback runs."""
        return delivery in self._slots.running or delivery in self._called_back

    def look_for_late_claims(self) -> None:
        """Check the claims of dead workers again in an interval."""
        self._reaper.look_again()

    async def run(self) -> None:
        """Work until `stop`, or until the quota or the end of the queue is reached."""
        parts = (
            self._in_flight.renew,
            self._in_flight.watch,
            self._slots.deadlines.watch,
            self._completer.run,
            self._reaper.run,
            self._listen,
            self._slots.tasks.watch,
            self._callbacks.watch,
        )
        try:
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(self._run_part(part)) for part in parts]
                await self._run_part(self._fetch_until_done)
                await self._run_part(self._shutdown.run)
                for loop in loops:
                    loop.cancel()
        except GeneratorExit:
            # This coroutine is closed: nothing can be awaited.
            raise
        except BaseException:
            # Nothing can be settled any more, and functions on threads cannot be cancelled.
            for delivery in list(self._in_flight):
                self._in_flight.lose(delivery, "its worker has failed or was cancelled")
            await self._slots.tasks.cancel(LAST_MOMENTS)
            await self._callbacks.cancel(CALLBACK_TIME)
            raise
        finally:
            self.ended.set()

    def stop(self, within: float | None = None) -> None:
        """Claim no more, and end.

        Args:
            within: seconds that the caller can wait. Handlers have most of them to finish, but
                not more than `grace`.
        """
        self._shutdown.limit(within)
        self.finish()

    def finish(self) -> None:
        """Claim no more, and end after the handlers, however long they take."""
        self._slots.is_stopping = True
        self._changed.set()

    def wake(self) -> None:
        """Poll now: something may have changed."""
        self._changed.set()

    async def settle(self, message: Message, verdict: HandlerVerdict) -> bool:
        """End a claim; return whether the store accepted it."""
        delivery = self._in_flight.find(message)
        if delivery is None:
            return False
        check_no_transaction(delivery)
        delivery.answer = asyncio.get_running_loop().create_future()
        self._submit(delivery, verdict, ended=None)
        return await asyncio.shield(delivery.answer)

    async def extend(self, message: Message, seconds: float) -> bool:
        """Extend a claim; return whether it stands."""
        return await self._in_flight.extend(message, seconds)

    def report_progress(self, message: Message, progress: float) -> None:
        """Report how far a handler is."""
        self._reporter.on_progress(message, progress)

    async def _run_part(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part of this worker. However it ends, no handler starts without it."""
        try:
            await part()
        finally:
            self._slots.is_stopping = True

    async def _fetch_until_done(self) -> None:
        failures = 0
        while not (self._slots.is_stopping or self._is_done()):
            self._changed.clear()
            try:
                claimed = await self._fetch()
                failures = 0
            except Unavailable as error:
                failures += 1
                self.on_failure(error)
                await _BACKOFF.sleep(failures, self._clock, self._randomness)
                continue
            if claimed is None:
                await wait_for_change(
                    self._changed, self._find_wait() or self._settings.poll_interval
                )
                continue
            # The claimed messages start before more are requested.
            await asyncio.sleep(0)
            if not (claimed.more or self._quarantine.is_wanted):
                if self._until_empty and not self._in_flight:
                    return
                await wait_for_change(self._changed, self._find_poll_wait(claimed))

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
        return self._quarantine.wait(is_free=not (self._in_flight or self._slots.running))

    def _find_room(self) -> int:
        """Return how many messages may be claimed now."""
        room = 0 if self.is_waiting_for_callbacks else self._slots.find_room()
        if self._quota is None:
            return room
        return min(room, self._quota - self.handled - len(self._in_flight))

    async def _claim(self, limit: int, *, suspects: bool) -> ClaimResult:
        """Claim messages and start them; end claims of others that have lapsed."""
        sent, session = self._clock.mono(), self._membership.incarnation
        self._unanswered_since = self._unanswered_since or sent
        may_exceed = self.backend.is_billed and self._quota is None and not suspects
        claimed = await self.backend.claim(
            limit,
            session=session,
            visibility=self._visibility,
            suspects=suspects,
            at_most=self._slots.find_most(_LARGEST_CLAIM) if may_exceed else None,
        )
        self._unanswered_since = None
        deliveries = self._accept(claimed.messages, session, sent)
        if suspects:
            self._quarantine.start(deliveries[0] if deliveries else None)
        elif claimed.suspects:
            self._quarantine.notice()
        self._empty_polls = 0 if deliveries else self._empty_polls
        self._slots.add(deliveries)
        self._reaper.is_quiet = claimed.lapse is None and not claimed.messages
        if claimed.lapse is not None and claimed.lapse <= 0:
            keep = [delivery.id for delivery in self._in_flight]
            self.on_ended(ended := await self.backend.end_claims(keep=keep))
            if self._until_empty and ended:
                return msgspec.structs.replace(claimed, more=True)
        return claimed

    def _accept(self, messages: Iterable[Message], session: str, sent: Mono) -> list[Delivery]:
        """Add messages to those in flight; bury those that no handler can read."""
        deliveries = []
        for message in messages:
            try:
                deliveries.append(self._in_flight.add(message, session, sent))
            except Corrupt as corrupt:
                self._reporter.on_failure(corrupt, message.id)
                bury = Settlement(receipt=message.receipt, move="bury", error=str(corrupt))
                self._completer.submit(bury, None)
        return deliveries

    def conclude(
        self, delivery: Delivery, verdict: HandlerVerdict, ended: Mono | None = None
    ) -> None:
        """Settle a message, unless its handler has done so or it is lost."""
        if self._in_flight.find(delivery.message) is delivery:
            self._submit(delivery, verdict, ended)

    def _submit(self, delivery: Delivery, verdict: HandlerVerdict, ended: Mono | None) -> None:
        delivery.verdict, delivery.is_settling = verdict, True
        started, receipt = delivery.started, delivery.message.receipt
        if started is not None:
            delivery.duration = (ended or self._clock.mono()) - started
        if isinstance(verdict, Completed):
            settlement = Settlement(receipt=receipt, move="complete")
        else:
            move, delivery.delay = self._decide(delivery.message, verdict)
            error = verdict.error if isinstance(verdict, Failed) else ""
            settlement = Settlement(receipt=receipt, move=move, delay=delivery.delay, error=error)
        self._completer.submit(settlement, delivery)

    def _decide(self, message: Message, verdict: HandlerVerdict) -> tuple[Transition, float]:
        counts = {"attempt": message.attempt, "max_attempts": message.max_attempts}
        if not isinstance(verdict, Failed):
            return decide(verdict, **counts, retries=_DEFAULT_RETRIES, draw=0.0)
        draw = self._randomness.uniform(0, 1)
        try:
            return decide(verdict, **counts, retries=self._retries, draw=draw)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's backoff may raise anything
            self._reporter.on_failure(error, message.id)
            return decide(verdict, **counts, retries=_DEFAULT_RETRIES, draw=draw)

    @property
    def expects_more(self) -> bool:
        """Whether instant handlers are about to end."""
        return self._slots.expects_more

    def list_open_claims(self) -> set[str]:
        """Return the claims with messages whose settlements were not submitted."""
        return {
            delivery.message.receipt.claim
            for delivery in self._in_flight
            if not delivery.is_settling
        }

    def on_answer(self, delivery: Delivery | None, *, is_accepted: bool) -> None:
        """Report a settlement that the store has answered; start the user's callback."""
        if delivery is not None and delivery.verdict is not None:
            # Not kept: an error refers to the frames that it has passed, and those to this.
            verdict, delivery.verdict = delivery.verdict, None
            if is_accepted:
                self._in_flight.remove(delivery)
                self.handled += not isinstance(verdict, Returned)
                callback = self._reporter.on_settled(delivery, verdict, delivery.delay)
                if callback is not None:
                    self._callbacks.start(self._call_back(delivery, callback))
            else:
                self._in_flight.lose(delivery, "its claim had ended before it was settled")
            if delivery.answer is not None and not delivery.answer.done():
                delivery.answer.set_result(is_accepted)
        self._changed.set()

    async def _call_back(self, delivery: Delivery, callback: Coroutine[Any, Any, None]) -> None:
        """Run a callback of a message, which may stop this worker as a handler may."""
        running_delivery.set((self, delivery))
        self._called_back[delivery] = None
        try:
            await callback
        finally:
            del self._called_back[delivery]

    def on_lost(self, delivery: Delivery, reason: str) -> None:
        """Report a claim that is lost, and end its handler."""
        self._reporter.on_lost(delivery.message, reason)
        self._slots.drop(delivery)
        self._changed.set()

    def on_released(self, delivery: Delivery) -> None:
        """End its time alone, if it ran alone: others may run beside the next one."""
        self._quarantine.release(delivery)

    def on_failure(self, error: Exception) -> None:
        """Report that the store does not answer."""
        self._reporter.on_failure(error)

    def on_ended(self, ended: list[EndedClaim]) -> None:
        """Report claims of others that were ended: their messages can be claimed."""
        self._reporter.on_ended(ended)
        self._changed.set()

    def _find_poll_wait(self, claimed: ClaimResult) -> float:
        # A worker that finds nothing repeatedly polls less often: notifications announce news.
        self._empty_polls = 0 if claimed.messages else min(self._empty_polls + 1, _MAX_EMPTY_POLLS)
        longest = self._settings.poll_interval * max(1, self._empty_polls)
        return longest if claimed.next is None else min(longest, claimed.next)

    async def _listen(self) -> None:
        """Poll whenever messages were pushed, also while a claim is under way."""
        while True:
            try:
                await self.backend.wait(_LISTEN)
            except Unavailable:
                await self._clock.sleep(self._settings.poll_interval)
            self._changed.set()
