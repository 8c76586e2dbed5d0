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
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.retry import ExponentialBackoff, Retries
from jobsync.errors import Unavailable
from jobsync.queue.backend import ClaimResult, Message, QueueBackend
from jobsync.queue.claim_holder import ClaimHolder
from jobsync.queue.executor import Executor
from jobsync.queue.handler_slots import HandlerSlots, running_delivery
from jobsync.queue.in_flight import Delivery, MessageReader, read_document
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.settings import QueueSettings
from jobsync.queue.shutdown import CALLBACK_TIME, LAST_MOMENTS, Shutdown, wait_for_change

__all__ = ["Worker", "find_calling_worker"]

_BACKOFF = ExponentialBackoff(first=0.1, longest=2.0)
_DISTRUST_WAIT = 0.25
"""Seconds between checks whether the session is trusted again: nothing notifies of it."""
_MAX_EMPTY_POLLS = 3
_MAX_CALLBACKS = 1000
"""While this many callbacks run, nothing is claimed."""
_LARGEST_CLAIM = 100
"""The most messages of a claim where requests are billed: so many become suspects if it lapses."""
_LISTEN = 3600.0
_NO_TASK = frozenset({""})


def find_calling_worker(backend: QueueBackend | None) -> "Worker | None":
    """Return the worker of a queue if one of its handlers or callbacks is the caller."""
    worker, delivery = running_delivery.get() or (None, None)
    if not isinstance(worker, Worker) or delivery is None or worker.backend is not backend:
        return None
    return worker if worker.is_handling(delivery) else None


class Worker(ClaimHolder):
    """Handles messages until it is stopped.

    Args:
        backend: where the messages are stored.
        membership: the session that holds the claims.
        executor: runs the handlers.
        settings: concurrency, timeouts and intervals.
        retries: the delays of failed messages.
        timeout: seconds that a handler may take, unless its message has its own timeout.
        components: time and randomness.
        reporter: is told what happens.
        read: returns a message as its handler reads it.
        quota: stop after this many messages.
        until_empty: stop when there is nothing left to claim, now or when a rate allows it.
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
        read: MessageReader = read_document,
        *,
        quota: int | None = None,
        until_empty: bool = False,
    ) -> None:
        super().__init__(backend, membership, settings, retries, components, reporter, read)
        self.is_paused = False
        self._executor = executor
        self._quota = quota
        self._until_empty = until_empty
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
        self._empty_polls = 0
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
            # What ends while a claim is under way may let others be claimed, unseen by it.
            was_idle = not self._in_flight
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
                is_last = self._until_empty and was_idle and not self._in_flight
                if is_last and not await self._is_held_back(claimed):
                    return
                await wait_for_change(self._changed, self._find_poll_wait(claimed))

    async def _is_held_back(self, claimed: ClaimResult) -> bool:
        """Whether a rate leaves messages for later, which could be claimed now otherwise."""
        if claimed.rate is None:
            return False
        try:
            return await self.backend.has_claimable(self._find_tasks())
        except Unavailable as error:
            # Nobody knows: the next claim asks again.
            self.on_failure(error)
            return True

    def _is_done(self) -> bool:
        return self._quota is not None and self.handled >= self._quota

    async def _fetch(self) -> ClaimResult | None:
        """Claim messages and start them; return None if there is no room."""
        if self.is_paused or self._find_wait() > 0:
            self._unanswered_since = None
            return None
        room = self._find_room()
        if room > 0 and self._quarantine.is_wanted:
            claimed = await self._claim(1, suspects=True)
            if claimed.result.messages:
                return claimed.result
            room = self._find_room()
        if room <= 0:
            return None
        may_exceed = self.backend.is_billed and self._quota is None
        most = self._slots.find_most(_LARGEST_CLAIM) if may_exceed else None
        return (await self._claim(room, suspects=False, at_most=most)).result

    def _find_wait(self) -> float:
        """Return the seconds for which nothing may be claimed, unless something changes."""
        if not self._membership.is_trusted:
            return _DISTRUST_WAIT
        return self._quarantine.wait(is_free=not (self._in_flight or self._slots.running))

    def _find_room(self) -> int:
        """Return how many messages may be claimed now."""
        # While suspects were claimed, this worker may have been paused, or told to stop.
        is_resting = self.is_paused or self._slots.is_stopping or self.is_waiting_for_callbacks
        room = 0 if is_resting else self._slots.find_room()
        if self._quota is None:
            return room
        return min(room, self._quota - self.handled - len(self._in_flight))

    def _find_tasks(self) -> frozenset[str] | None:
        """Return the tasks that this worker knows: a message of newer code is left to others."""
        tasks = self._executor.tasks
        return None if tasks == _NO_TASK else tasks

    def _find_retries(self, message: Message) -> Retries:
        """Return the pauses after failures of a message: its task's, or the queue's."""
        return self._executor.find(message.task).retries or self._retries

    def _note_ended(self, claimed: ClaimResult) -> ClaimResult:
        """Return that there is more to claim, for a worker that ends when there is not."""
        return msgspec.structs.replace(claimed, more=True) if self._until_empty else claimed

    def on_claimed(self, deliveries: list[Delivery]) -> None:
        """Start the handlers of messages."""
        self._empty_polls = 0 if deliveries else self._empty_polls
        self._slots.add(deliveries)

    @property
    def expects_more(self) -> bool:
        """Whether instant handlers are about to end."""
        return self._slots.expects_more

    def on_lost(self, delivery: Delivery, reason: str) -> None:
        """Report a claim that is lost, and end its handler."""
        self._reporter.on_lost(delivery.message, reason)
        self._slots.drop(delivery)
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
