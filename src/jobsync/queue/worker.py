"""One process's share of a queue: claims messages, runs handlers, settles, renews.

Promises: a handler runs only while its claim is surely this worker's: from the first send of
its last renewal, for the visibility less a margin, and only while the session trusts itself.
After that the handler is cancelled, or told by `context.lost`, and nothing is settled. A suspect
runs while nothing else does. Told to stop, a worker claims no more, gives back what has not
begun, and lets handlers finish for `grace` seconds; a coroutine that has not by then is
cancelled and its message given back, so that a deployment spends no attempt.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.coordination.waiting import first_of
from jobsync.core.backoff import longest_pause
from jobsync.core.clock import Mono
from jobsync.core.messages import Failed, Move, Outcome, Retries, Returned, decide
from jobsync.database.document import Document
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.context import Context
from jobsync.queue.executor import Executor
from jobsync.queue.outbox import Outbox
from jobsync.queue.port import Claimed, Ended, Message, QueuePort, Settlement
from jobsync.queue.settings import QueueSettings
from jobsync.stores.contract import Record

__all__ = ["Told", "Worker", "document_of"]

_AHEAD = 10
_MEASURED = 0.2
"""How much the latest handler counts in the average of how long they take."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_SHORTEST_REST = 0.02
_DOUBT = 0.25


class Told(msgspec.Struct, kw_only=True):
    """What a worker tells of, each by a call."""

    settled: Callable[[Message, Outcome, float, float], Awaitable[None]]
    """A message was settled: with its outcome, the pause before the next attempt, and how
    long the handler took."""
    lost: Callable[[Message, str], None]
    ended: Callable[[list[Ended]], None]
    overran: Callable[[Message, float], None]
    progressed: Callable[[Message, float], None]
    failed: Callable[[Exception, str | None], None]
    """Something went wrong, perhaps with a message."""


class _Held:
    """A message in hand."""

    def __init__(self, message: Message, session: str, sent: Mono) -> None:
        self.message = message
        self.session = session
        self.sent = sent
        """When its claim, or its last renewal, was first sent."""
        self.begun = sent
        self.context: Context | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_lost = False
        self.is_settling = False
        """Whether its settlement is on its way: it is not renewed any more."""
        self.is_settled = False

    @property
    def id(self) -> str:
        """Name the message."""
        return self.message.id


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
        port: QueuePort,
        membership: Membership,
        executor: Executor,
        settings: QueueSettings,
        retries: Retries,
        timeout: float | None,
        components: Components,
        told: Told,
        *,
        quota: int | None = None,
        until_empty: bool = False,
    ) -> None:
        self.handled = 0
        """How many messages were settled."""
        self.is_paused = False
        self._port = port
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
        self._lease = self._visibility - max(self._visibility / 10, 0.05)
        self._outbox = Outbox(port, components, lambda error: told.failed(error, None))
        self._in_hand: dict[str, _Held] = {}
        self._ready: deque[_Held] = deque()
        self._running: set[_Held] = set()
        self._suspect: _Held | None = None
        """One that waits for everything else to end."""
        self._average = 0.0
        self._is_quiet = False
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup

    @property
    def is_quiet(self) -> bool:
        """Whether, as far as this worker knows, nobody has claimed anything."""
        return self._is_quiet and not self._in_hand

    @property
    def running(self) -> int:
        """How many handlers run."""
        return len(self._running)

    async def run(self) -> None:
        """Work until `stop`, or until there is nothing left to do where that was asked for."""
        async with asyncio.TaskGroup() as self._group:
            loops = [
                self._group.create_task(self._renew_for_ever()),
                self._group.create_task(self._outbox.run()),
            ]
            await self._fetch_for_ever()
            await self._wind_down()
            for loop in loops:
                loop.cancel()

    def stop(self) -> None:
        """Claim no more."""
        self._stopping.set()
        self._changed.set()

    def wake(self) -> None:
        """Look again: something may be different."""
        self._changed.set()

    async def settle(self, message: Message, outcome: Outcome) -> bool:
        """End a claim; say whether the store took it."""
        held = self._in_hand.get(message.id)
        if held is None or held.message is not message or held.is_lost or held.is_settling:
            return False
        held.is_settling = True
        move, delay = self._decide(message, outcome)
        error = outcome.error if isinstance(outcome, Failed) else ""
        settlement = Settlement(receipt=message.receipt, move=move, delay=delay, error=error)
        taken = await self._outbox.send(settlement, lambda: held.is_lost)
        if taken:
            took = 0.0 if held.context is None else self._clock.mono() - held.begun
            held.is_settled = True
            await self._told.settled(message, outcome, delay, took)
        else:
            self._lose(held, "its claim had ended before it was settled")
        self._forget(held)
        return taken

    async def extend(self, message: Message, seconds: float) -> bool:
        """Let a claim hold on."""
        held = self._in_hand.get(message.id)
        if held is None or held.is_lost or held.is_settling:
            return False
        (extended,) = await self._port.extend([message.receipt], seconds)
        if not extended:
            self._lose(held, "its claim has ended")
        return extended

    def report_progress(self, message: Message, progress: float) -> None:
        """Tell how far a handler is."""
        self._told.progressed(message, progress)

    def _decide(self, message: Message, outcome: Outcome) -> tuple[Move, float]:
        draw = self._randomness.uniform(0, 1)

        def ask(retries: Retries) -> tuple[Move, float]:
            return decide(
                outcome,
                attempt=message.attempt,
                max_attempts=message.max_attempts,
                retries=retries,
                draw=draw,
            )

        try:
            return ask(self._retries)
        except Exception as error:  # noqa: BLE001 - the user's backoff may raise anything
            self._told.failed(error, message.id)
            return ask(Retries())

    async def _fetch_for_ever(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._changed.clear()
            if self._quota is not None and self.handled >= self._quota:
                return
            room = self._find_room()
            if room <= 0:
                # Nobody tells when the session can be trusted again.
                trusted = self._membership.is_trusted
                await self._rest(self._settings.poll_interval if trusted else _DOUBT, listen=False)
                continue
            try:
                found = await self._fetch(room)
                failures = 0
            except Unavailable as error:
                failures += 1
                self._told.failed(error, None)
                longest = longest_pause(failures, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
                await self._rest(self._randomness.uniform(0, longest), listen=False)
                continue
            if found.messages:
                continue
            if self._until_empty and not (self._in_hand or found.suspects):
                return
            await self._rest(self._find_rest(found), listen=not self._until_empty)

    def _find_room(self) -> int:
        """Give how many messages may be claimed now."""
        if self.is_paused or self._suspect is not None or not self._membership.is_trusted:
            return 0
        concurrency = self._settings.concurrency
        most = concurrency + self._find_prefetch()
        if self._quota is not None:
            most = min(most, self._quota - self.handled)
        room = most - len(self._in_hand)
        # Not one by one: a batch costs as much as a single message.
        return room if room * 2 >= most or not self._ready else 0

    def _find_prefetch(self) -> int:
        """Claim ahead a second of measured work at most, and half the visibility."""
        most = self._settings.prefetch
        concurrency = self._settings.concurrency
        most = _AHEAD * concurrency if most is None else most
        if self._average == 0.0:
            return min(most, concurrency) if not self.handled else most
        return min(most, int(concurrency * min(1.0, self._visibility / 2) / self._average))

    async def _fetch(self, room: int) -> Claimed:
        """Claim messages, and let them begin; end claims of others that have lapsed."""
        claimed = await self._claim(room, suspects=False)
        self._is_quiet = claimed.next is None
        if claimed.next is not None and claimed.next <= 0:
            self._told.ended(await self._port.end_claims())
        if claimed.suspects:
            await self._claim(1, suspects=True)
        self._begin()
        return claimed

    async def _claim(self, limit: int, *, suspects: bool) -> Claimed:
        sent, session = self._clock.mono(), self._membership.incarnation
        claimed = await self._port.claim(
            limit, session=session, visibility=self._visibility, suspects=suspects
        )
        for message in claimed.messages:
            held = _Held(message, session, sent)
            self._in_hand[message.id] = held
            if message.is_suspect:
                self._suspect = held
            else:
                self._ready.append(held)
        return claimed

    def _begin(self) -> None:
        """Start as many handlers as may run."""
        while self._ready and len(self._running) < self._settings.concurrency:
            self._start(self._ready.popleft())
        if self._suspect is not None and not (self._ready or self._running):
            self._start(self._suspect)

    def _start(self, held: _Held) -> None:
        if self._check(held):
            self._running.add(held)
            held.task = self._group.create_task(self._handle(held))

    async def _handle(self, held: _Held) -> None:
        message = held.message
        timeout = self._timeout if message.timeout is None else message.timeout
        held.begun = self._clock.mono()
        deadline = None if timeout is None else self._clock.wall() + timeout
        context = Context(message, self._membership.worker_id, deadline, self)
        held.context = context
        running = self._executor.start(document_of(message), context)
        try:
            outcome = await self._executor.finish(running, context, timeout)
            if outcome is not None:
                await self.settle(message, outcome)
            if not running.done():
                self._told.overran(message, timeout or 0.0)
                # Its thread is taken until it returns.
                await asyncio.wait([running])
        except asyncio.CancelledError:
            if self._executor.is_async and not held.is_lost:
                await self.settle(message, Returned())
            raise
        finally:
            self._measure(self._clock.mono() - held.begun)
            self._running.discard(held)
            self._forget(held)

    def _measure(self, seconds: float) -> None:
        known = self._average
        self._average = seconds if known == 0.0 else known + _MEASURED * (seconds - known)

    def _forget(self, held: _Held) -> None:
        """Hold a message no more, once it is settled or lost and its handler has ended."""
        if held in self._running:
            return
        if self._in_hand.get(held.id) is held:
            del self._in_hand[held.id]
            self.handled += not held.is_lost
        if self._suspect is held:
            self._suspect = None
        if not self._stopping.is_set():
            self._begin()
        self._changed.set()

    async def _renew_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._find_renewal())
            mine = [held for held in self._in_hand.values() if self._check(held)]
            now = self._clock.mono()
            due = [
                held
                for held in mine
                if now - held.sent >= self._visibility / 3 and not held.is_settling
            ]
            if due:
                try:
                    await self._renew(due)
                except Unavailable as error:
                    self._told.failed(error, None)

    def _find_renewal(self) -> float:
        """Give the seconds until a claim may be lost, or is to be renewed."""
        now = self._clock.mono()
        ends = [held.sent + self._lease - now for held in self._in_hand.values()]
        return max(_SHORTEST_REST, min([self._visibility / 6, self._membership.trust_left, *ends]))

    async def _renew(self, due: list[_Held]) -> None:
        sent = self._clock.mono()
        receipts = [held.message.receipt for held in due]
        answers = await self._port.extend(receipts, self._visibility)
        for held, extended in zip(due, answers, strict=True):
            if extended:
                held.sent = sent
            elif self._in_hand.get(held.id) is held and not held.is_settling:
                self._lose(held, "its claim has ended")

    def _check(self, held: _Held) -> bool:
        """Say whether a claim is surely this worker's; if not, it is lost."""
        if held.is_lost or held.is_settled:
            return not held.is_lost
        if not self._membership.is_trusted or self._membership.incarnation != held.session:
            self._lose(held, "the session of this worker is in doubt")
        elif self._clock.mono() - held.sent >= self._lease:
            self._lose(held, "its claim could not be renewed in time")
        return not held.is_lost

    def _lose(self, held: _Held, reason: str) -> None:
        if held.is_lost:
            return
        held.is_lost = True
        self._told.lost(held.message, reason)
        if held.context is not None:
            held.context.lost = True
        if held.task is not None and self._executor.is_async:
            held.task.cancel()
        if held in self._ready:
            self._ready.remove(held)
        if held not in self._running:
            self._in_hand.pop(held.id, None)
            self._suspect = None if self._suspect is held else self._suspect
        self._changed.set()

    def _find_rest(self, found: Claimed) -> float:
        longest = self._settings.poll_interval
        return longest if found.next is None else min(longest, max(found.next, _SHORTEST_REST))

    async def _rest(self, seconds: float, *, listen: bool) -> None:
        """Wait until something is different here, or somebody has pushed."""
        waits = [self._changed.wait(), self._clock.sleep(seconds)]
        if listen:
            waits.append(self._listen(seconds))
        await first_of(*waits)

    async def _listen(self, seconds: float) -> None:
        try:
            await self._port.wait(seconds)
        except (OutcomeUnknown, Unavailable):
            await self._clock.sleep(seconds)

    async def _wind_down(self) -> None:
        """Give back what has not begun; let the rest finish, for a while."""
        unbegun = [*self._ready]
        if self._suspect is not None and self._suspect not in self._running:
            unbegun.append(self._suspect)
        self._ready.clear()
        grace = self._settings.grace
        async with asyncio.TaskGroup() as group:
            for held in unbegun:
                group.create_task(self._give_back(held, grace))
            group.create_task(self._let_finish(grace))

    async def _give_back(self, held: _Held, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await self.settle(held.message, Returned())
        except TimeoutError:
            self._lose(held, "it could not be given back in time")

    async def _let_finish(self, grace: float) -> None:
        tasks = {held.task for held in self._running if held.task is not None}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=None if self._until_empty else grace)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=grace)


def document_of(message: Message) -> Document:
    """Give a message as its handler reads it: `task.type` and `task["type"]`."""
    receipt = message.receipt
    return Document(
        Record(
            key=f"message/{message.id}",
            value=message.value,
            version=receipt.claim,
            seq=receipt.deliveries,
            epoch=0,
            format=1,
            trail=receipt.claim,
        )
    )
