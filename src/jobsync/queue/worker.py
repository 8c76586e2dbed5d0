"""One process's share of a queue: claims messages, runs handlers, settles.

Promises: a handler runs only while its claim is surely this worker's, see `hand`. After that
it is cancelled, or told by `context.lost`, and nothing is settled. A suspect runs alone, see
`quarantine`. Told to stop, a worker claims no more, gives back what has not begun, and lets
handlers finish for `grace` seconds; a coroutine that has not by then is cancelled and its
message given back, so that a deployment spends no attempt.

A handler's slot is free once it has returned: settlements gather meanwhile, and go in one
batch. What is in hand, from claim to the store's last answer, is bounded all the same.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import ContextVar
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono, backoff_limit
from jobsync.core.messages import Failed, HandlerVerdict, Retries, Returned, Transition, decide
from jobsync.errors import Corrupt, Unavailable
from jobsync.queue.backend import (
    ClaimResult,
    EndedClaim,
    Message,
    QueueBackend,
    Settlement,
)
from jobsync.queue.completer import Completer
from jobsync.queue.context import Context
from jobsync.queue.executor import Deadlines, Executor
from jobsync.queue.in_flight import Delivery, InFlight, Quarantine
from jobsync.queue.reaper import Reaper
from jobsync.queue.settings import QueueSettings

__all__ = ["Worker", "WorkerListener", "find_caller"]

_AHEAD = 10
_FAR_AHEAD = 50
"""So many messages for each handler are claimed ahead at most, where that is little work."""
_SOON = 0.02
"""Seconds of work that are little."""
_LEFT = 4
"""What part of what was claimed ahead may be left when more is claimed: a fourth."""
_MEASURED = 0.2
"""How much the latest handler counts in the average of how long they take."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_SHORTEST_REST = 0.02
_DOUBT = 0.25
_PATIENCE = 3
_INSTANT = 0.002
_TURN = 0.002
"""Seconds for which handlers that wait for nothing may go on, before all else has its turn."""
_USUAL = Retries()
_LISTEN = 3600.0


_handled: ContextVar["tuple[Worker, Delivery] | None"] = ContextVar("jobsync_handled", default=None)
"""What is being handled, for whoever runs below a handler."""


def find_caller(port: QueueBackend | None) -> "Worker | None":
    """Give the worker of a queue whose handler it is that asks, if one does."""
    found = _handled.get()
    if found is None:
        return None
    worker, held = found
    return worker if worker.port is port and worker.runs(held) else None


class WorkerListener(msgspec.Struct, kw_only=True):
    """What a worker tells of, each by a call."""

    settled: Callable[[Delivery, HandlerVerdict, float], Coroutine[Any, Any, None] | None]
    """A message was settled: with its outcome, and the pause before the next attempt. May give
    more to do, which nothing waits for but the end."""
    lost: Callable[[Message, str], None]
    ended: Callable[[list[EndedClaim]], None]
    overran: Callable[[Message, float], None]
    progressed: Callable[[Message, float], None]
    failed: Callable[[Exception, str | None], None]
    """Something went wrong, perhaps with a message."""


class Worker:
    """Handles messages until told to stop.

    Args:
        port: where they are.
        membership: the session that claims hang on.
        executor: runs the handler.
        settings: how many at once, and so on.
        retries: how long failed messages rest.
        timeout: seconds that a handler may take, where its message says nothing.
        components: time and randomness.
        told: who is told what.
        quota: stop after so many messages.
        until_empty: stop when there is nothing left to claim.
    """

    def __init__(
        self,
        port: QueueBackend,
        membership: Membership,
        executor: Executor,
        settings: QueueSettings,
        retries: Retries,
        timeout: float | None,
        components: Components,
        told: WorkerListener,
        *,
        quota: int | None = None,
        until_empty: bool = False,
    ) -> None:
        self.handled = 0
        """How many messages were handled, well or not."""
        self.is_paused = False
        self.port = port
        self._membership = membership
        self._executor = executor
        self._settings = settings
        self._retries = retries
        self._timeout = timeout
        self._clock = components.clock
        self._randomness = components.randomness
        self._told = told
        self._quota = quota
        self._until_empty = until_empty
        self._visibility = settings.visibility_timeout
        self._hand = InFlight(
            port, membership, self._clock, self._visibility, self._note_lost, self._note_failed
        )
        self._outbox = Completer(
            port, components, self._note_answer, self._note_failed, self._expects_more
        )
        self._deadlines = Deadlines(self._clock, self._note_late)
        self._warden = Reaper(port, membership, self._clock, self._note_ended, self._note_failed)
        self._ready: deque[Delivery] = deque()
        self._running: set[Delivery] = set()
        self._serving = 0
        """How many tasks handle messages, or are about to."""
        self._quarantine = Quarantine(self._clock, self._visibility / 3)
        self._overrun: set[Delivery] = set()
        self._vain_looks = 0
        self._asked: Mono | None = None
        """When the first claim was sent that has had no answer since."""
        self._average = 0.0
        self._few = 0
        """So many are ready, or fewer, when more are claimed."""
        self._changed = asyncio.Event()
        self._grace = settings.grace
        self._turn = _TURN / settings.concurrency
        self._is_stopping = False
        self._group: asyncio.TaskGroup

    @property
    def running(self) -> int:
        """How many handlers run."""
        return len(self._running)

    @property
    def is_stuck(self) -> bool:
        """Whether plain functions that go on after their time have taken every slot."""
        return len(self._overrun) >= self._settings.concurrency

    @property
    def silence(self) -> float:
        """Seconds for which the store owes this worker an answer to its claims."""
        asked = self._asked
        return 0.0 if asked is None else self._clock.mono() - asked

    def runs(self, held: Delivery) -> bool:
        """Say whether a message's handler runs."""
        return held in self._running

    async def run(self) -> None:
        """Work until `stop`, or until there is nothing left to do where that was asked for."""
        async with asyncio.TaskGroup() as self._group:
            loops = [
                self._group.create_task(self._keep_up(loop))
                for loop in (
                    self._hand.renew_for_ever,
                    self._hand.watch_for_ever,
                    self._deadlines.watch_for_ever,
                    self._outbox.run,
                    self._warden.run,
                    self._listen_for_ever,
                )
            ]
            await self._keep_up(self._fetch_for_ever)
            await self._wind_down()
            for loop in loops:
                loop.cancel()

    def stop(self, grace: float | None = None) -> None:
        """Claim no more; let handlers finish for so many seconds, if that is less than usual."""
        if grace is not None:
            self._grace = min(self._grace, grace)
        self._is_stopping = True
        self._changed.set()

    def wake(self) -> None:
        """Look again: something may be different."""
        self._changed.set()

    async def settle(self, message: Message, outcome: HandlerVerdict) -> bool:
        """End a claim; say whether the store took it."""
        held = self._hand.find(message)
        if held is None:
            return False
        held.answered = asyncio.get_running_loop().create_future()
        self._send(held, outcome)
        return await asyncio.shield(held.answered)

    async def extend(self, message: Message, seconds: float) -> bool:
        """Let a claim hold on."""
        return await self._hand.extend(message, seconds)

    def report_progress(self, message: Message, progress: float) -> None:
        """Tell how far a handler is."""
        self._told.progressed(message, progress)

    async def _keep_up(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part of this worker; whatever ends it, no handler begins without it."""
        try:
            await part()
        finally:
            self._is_stopping = True

    async def _fetch_for_ever(self) -> None:
        failures = 0
        while not (self._is_stopping or self._is_done()):
            self._changed.clear()
            try:
                claimed = await self._fetch()
                failures = 0
            except Unavailable as error:
                failures += 1
                self._note_failed(error)
                longest = backoff_limit(failures, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
                await self._clock.sleep(self._randomness.uniform(0, longest))
                continue
            if claimed is None:
                await self._rest(self._find_wait() or self._settings.poll_interval)
                continue
            # What was claimed begins before more is asked for.
            await asyncio.sleep(0)
            if not (claimed.more or self._quarantine.is_wanted):
                if self._until_empty and not self._hand:
                    return
                await self._rest(self._find_rest(claimed))

    def _is_done(self) -> bool:
        return self._quota is not None and self.handled >= self._quota

    async def _fetch(self) -> ClaimResult | None:
        """Claim messages, if there is room, and let them begin; None if there is none."""
        if self.is_paused or self._find_wait() > 0:
            self._asked = None
            return None
        if self._quarantine.is_wanted:
            claimed = await self._claim(1, suspects=True)
            if claimed.messages:
                return claimed
        room = self._find_room()
        return await self._claim(room, suspects=False) if room > 0 else None

    def _find_wait(self) -> float:
        """Give the seconds for which nothing may be claimed, unless something changes."""
        if not self._membership.is_trusted:
            # Nobody tells when it can be trusted again.
            return _DOUBT
        return self._quarantine.wait(is_free=not (self._hand or self._running))

    def _find_room(self) -> int:
        """Give how many messages may be claimed now."""
        prefetch = self._find_prefetch()
        most = self._settings.concurrency + prefetch
        # Not one by one: a batch costs as much as a single message. Nor while the store takes
        # no settlements: what is in hand is bounded.
        self._few = prefetch // _LEFT
        if len(self._ready) > self._few or len(self._hand) > 2 * most:
            return 0
        room = most - len(self._ready) - len(self._running)
        return (
            room if self._quota is None else min(room, self._quota - self.handled - len(self._hand))
        )

    def _find_prefetch(self) -> int:
        """Claim ahead a second of measured work at most, and half the visibility."""
        most, concurrency = self._settings.prefetch, self._settings.concurrency
        if not self._average:
            return concurrency if most is None else min(most, concurrency)
        pace = concurrency / self._average
        if most is None:
            # Where handlers take no time a batch does, and the less for each the larger it is.
            most = max(_AHEAD * concurrency, min(_FAR_AHEAD * concurrency, int(pace * _SOON)))
        return min(most, int(pace * min(1.0, self._visibility / 2)))

    async def _claim(self, limit: int, *, suspects: bool) -> ClaimResult:
        """Claim messages, and let them begin; end claims of others that have lapsed."""
        sent, session = self._clock.mono(), self._membership.incarnation
        self._asked = self._asked or sent
        claimed = await self.port.claim(
            limit, session=session, visibility=self._visibility, suspects=suspects
        )
        self._asked = None
        taken = self._take(claimed.messages, session, sent)
        if suspects:
            self._quarantine.take(taken[0] if taken else None)
        elif claimed.suspects:
            self._quarantine.notice()
        self._ready.extend(taken)
        self._vain_looks = 0 if taken else self._vain_looks
        self._begin()
        self._warden.is_quiet = claimed.lapse is None and not claimed.messages
        if claimed.lapse is not None and claimed.lapse <= 0:
            keep = [held.id for held in self._hand]
            self._note_ended(await self.port.end_claims(keep=keep))
        return claimed

    def _take(self, messages: Iterable[Message], session: str, sent: Mono) -> list[Delivery]:
        """Hold messages; put among the dead letters what no handler can read."""
        taken = []
        for message in messages:
            try:
                taken.append(self._hand.take(message, session, sent))
            except Corrupt as corrupt:
                self._set_aside(message, corrupt)
        return taken

    def _set_aside(self, message: Message, corrupt: Corrupt) -> None:
        self._told.failed(corrupt, message.id)
        bury = Settlement(receipt=message.receipt, move="bury", error=str(corrupt))
        self._outbox.put(bury, None)

    def _begin(self) -> None:
        """Let as many handlers run as may."""
        most = 0 if self._is_stopping else self._settings.concurrency
        while self._serving < min(most, len(self._running) + len(self._ready)):
            self._serving += 1
            self._group.create_task(self._serve())

    async def _serve(self) -> None:
        """Handle what is ready, one by one: a task for each would cost more than most take."""
        task, begun = asyncio.current_task(), self._clock.mono()
        try:
            # Whom anybody has told to end, for whatever reason, begins nothing else.
            while task is not None and not task.cancelling() and (held := self._pick()) is not None:
                held.task = task
                if await self._handle(held) - begun >= self._turn:
                    await asyncio.sleep(0)
                    begun = self._clock.mono()
        finally:
            self._serving -= 1
            self._begin()

    def _pick(self) -> Delivery | None:
        """Give what is to begin now, if anything is."""
        while self._ready and not self._is_stopping:
            held = self._ready.popleft()
            if self._hand.check(held):
                return held
        return None

    async def _handle(self, held: Delivery) -> Mono:
        """Run a message's handler, and settle; give when that was done."""
        begun = self._prepare(held)
        try:
            outcome, overrun = await self._executor.run(held)
            self._conclude(held, outcome)
            if overrun is not None:
                self._told.overran(held.message, held.timeout or 0.0)
                # Its thread is taken until it returns.
                self._overrun.add(held)
                await asyncio.wait([overrun])
            ended = self._clock.mono()
            self._measure(ended - begun)
        except asyncio.CancelledError:
            # A plain function goes on: nobody else may have its message before it lapses.
            if self._executor.is_async:
                self._conclude(held, Returned())
            raise
        finally:
            self._release(held)
        return ended

    def _prepare(self, held: Delivery) -> Mono:
        """Let a handler's time begin; give when that is."""
        message, executor, timeout = held.message, self._executor, held.message.timeout
        held.timeout = self._timeout if timeout is None else timeout
        held.begun = begun = self._clock.mono()
        self._running.add(held)
        if held.timeout is not None and executor.is_async:
            self._deadlines.add(held, begun + held.timeout)
        if executor.takes_context:
            worker_id = self._membership.worker_id
            held.context = Context(message, worker_id, self._clock, held.timeout, self)
        _handled.set((self, held))
        return begun

    def _release(self, held: Delivery) -> None:
        """Take note that a handler has ended."""
        # Not kept: a task would refer to what it has run, and that to the task.
        held.task = None
        self._running.discard(held)
        self._overrun.discard(held)
        self._deadlines.remove(held)
        self._quarantine.release(held)
        if len(self._ready) <= self._few:
            self._changed.set()

    def _conclude(self, held: Delivery, outcome: HandlerVerdict) -> None:
        """Settle a message, unless its handler has done so, or it is lost."""
        if self._hand.find(held.message) is held:
            self._send(held, outcome)

    def _send(self, held: Delivery, outcome: HandlerVerdict) -> None:
        move, held.delay = self._decide(held.message, outcome)
        held.outcome, held.is_settling = outcome, True
        held.took = 0.0 if held.begun is None else self._clock.mono() - held.begun
        error = outcome.error if isinstance(outcome, Failed) else ""
        receipt = held.message.receipt
        settlement = Settlement(receipt=receipt, move=move, delay=held.delay, error=error)
        self._outbox.put(settlement, held)

    def _note_answer(self, held: Delivery | None, taken: bool) -> None:  # noqa: FBT001 - it is the fact
        if held is not None and held.outcome is not None:
            # Not kept: an error refers to the frames that it has passed, and those to this.
            outcome, held.outcome = held.outcome, None
            if taken:
                self._hand.drop(held)
                self.handled += not isinstance(outcome, Returned)
                more = self._told.settled(held, outcome, held.delay)
                if more is not None:
                    self._group.create_task(more)
            else:
                self._hand.lose(held, "its claim had ended before it was settled")
            if held.answered is not None and not held.answered.done():
                held.answered.set_result(taken)
        self._changed.set()

    def _decide(self, message: Message, outcome: HandlerVerdict) -> tuple[Transition, float]:
        if not isinstance(outcome, Failed):
            return _ask(message, outcome, _USUAL, 0.0)
        draw = self._randomness.uniform(0, 1)
        try:
            return _ask(message, outcome, self._retries, draw)
        except Exception as error:  # noqa: BLE001 - the user's backoff may raise anything
            self._told.failed(error, message.id)
            return _ask(message, outcome, _USUAL, draw)

    def _expects_more(self) -> bool:
        """Say whether handlers that take no time are about to end."""
        return bool(self._ready) and self._average < _INSTANT

    def _measure(self, seconds: float) -> None:
        known = self._average
        self._average = seconds if known == 0.0 else known + _MEASURED * (seconds - known)

    def _note_late(self, held: Delivery) -> None:
        held.is_late = True
        if held.task is not None:
            held.task.cancel()

    def _note_lost(self, held: Delivery, reason: str) -> None:
        self._told.lost(held.message, reason)
        if held.task is not None and self._executor.is_async and not held.is_settling:
            held.task.cancel()
        if held in self._ready:
            self._ready.remove(held)
        if held not in self._running:
            # Otherwise it is done with when its handler has ended.
            self._quarantine.release(held)
        self._changed.set()

    def _note_ended(self, ended: list[EndedClaim]) -> None:
        self._told.ended(ended)
        self._changed.set()

    def _note_failed(self, error: Exception) -> None:
        self._told.failed(error, None)

    def _find_rest(self, claimed: ClaimResult) -> float:
        # Whoever finds nothing again and again looks less often: others tell of news.
        self._vain_looks = 0 if claimed.messages else min(self._vain_looks + 1, _PATIENCE)
        longest = self._settings.poll_interval * max(1, self._vain_looks)
        return longest if claimed.next is None else min(longest, claimed.next)

    async def _rest(self, seconds: float) -> None:
        """Wait until something is different."""
        try:
            async with asyncio.timeout(max(seconds, _SHORTEST_REST)):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _listen_for_ever(self) -> None:
        """Look whenever somebody has pushed, also while a claim is under way."""
        while True:
            try:
                await self.port.wait(_LISTEN)
            except Unavailable:
                await self._clock.sleep(self._settings.poll_interval)
            self._changed.set()

    async def _wind_down(self) -> None:
        """Give back what has not begun; let the rest finish, for a while."""
        self._is_stopping = True
        while self._ready:
            self._conclude(self._ready.popleft(), Returned())
        await self._let_finish(None if self._until_empty else self._grace)
        try:
            async with asyncio.timeout(self._settings.grace):
                await self._outbox.flush()
        except TimeoutError:
            for held in list(self._hand):
                self._hand.lose(held, "it could not be given back in time")

    async def _let_finish(self, grace: float | None) -> None:
        for held in self._overrun:
            # It is settled; nobody knows when its function returns.
            if held.task is not None:
                held.task.cancel()
        tasks = {held.task for held in self._running if held.task is not None}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=grace)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=grace)


def _ask(
    message: Message, outcome: HandlerVerdict, retries: Retries, draw: float
) -> tuple[Transition, float]:
    return decide(
        outcome,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        retries=retries,
        draw=draw,
    )
