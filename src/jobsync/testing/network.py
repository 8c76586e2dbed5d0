"""The network between a node and the store, and all its faults.

Once sent, a request is independent of its sender: a node that is killed, paused or has timed out
does not cancel it. So a write may be applied long after its sender gave up, arrive twice, or be
applied while its reply is lost. The world's dice decide.

Commits are recorded in the order in which the store made them, provided that the store answers
without waiting for anything, as a `MemoryStore` does.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.errors import Corrupt, JobsyncError, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import (
    BURIAL_AGE,
    Applied,
    Change,
    Delete,
    Entry,
    Outcome,
    Record,
    Store,
    Unknown,
    Where,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.record_codec import assign_nonces
from jobsync.stores.settling import SettlingStore
from jobsync.stores.sql import SqlAccess
from jobsync.testing.recording import RecordingStore
from jobsync.testing.rows import SharedRows, name_current_call
from jobsync.testing.weather import CALM, PASSING, SINGLE, Fault, Weather
from jobsync.testing.world import Node, World

__all__ = ["Link", "connect"]

T = TypeVar("T")

_WRITES = {"append", "discard", "bury", "drop", "transact"}

_SLOW_REPLY = 0.95
"""The part of the sender's patience that a slow reply takes at most."""


class Link(StoreDecorator):
    """The connection of a node to the store.

    Args:
        world: provides the dice, and the history in which commits are recorded.
        node: the node.
        store: the store.
        weather: the faults; may be changed at any time.

    Attributes:
        requests_pass: False while no request of the node arrives.
        replies_pass: False while no reply of the store arrives.
        throttled: True while every request is refused as one too many.
        forbidden: True while every request is refused for lack of permission.
        withheld: the calls of a queue backend, such as "settle", whose requests do not arrive.
        faults: the number of faults so far.
    """

    def __init__(self, world: World, node: Node, store: Store, weather: Weather = CALM) -> None:
        super().__init__(store)
        self.weather = weather
        self.requests_pass = True
        self.replies_pass = True
        self.throttled = False
        self.forbidden = False
        self.withheld: frozenset[str] = frozenset()
        self.faults = 0
        self._ordained: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._was_struck = False
        """Whether a fault has struck since `Weather.again` was last drawn."""
        self._world = world
        self._roll = world.dice.random
        # A request that was sent belongs to no node.
        self._schedule = world.loop.call_outside
        self._node = node
        self._ids = node.components.ids
        self._corruption_log = CorruptionLog(self.name, node.components.events)
        node.links.append(self)

    def mend(self) -> None:
        """End all faults and the bad weather."""
        self.weather = CALM
        self.requests_pass = self.replies_pass = True
        self.throttled = self.forbidden = False
        self.withheld = frozenset()
        self._ordained.clear()

    def ordain(self, call: str, *faults: Fault) -> None:
        """Set the faults of the next requests of a call, one each, whatever the weather is.

        Args:
            call: a call of a store or a queue backend, such as "heads" or "settle".
            faults: in the order of the requests.
        """
        self._ordained[call].extend(faults)

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Send a request and wait for the reply, until the sender gives up."""
        del sent
        chosen = self._choose_weather(call)
        weather = chosen or self.weather
        # A driver reports this for a transaction; for other calls only if it is ordained.
        is_undecidable = call == "transact" or chosen is not None
        if is_undecidable and self._draw_fault(weather.undecided):
            await asyncio.sleep(self._draw(weather.latency))
            error = OutcomeUnknown if call in _WRITES else Unavailable
            raise error(self.name, "nothing was decided")
        try:
            return await self._request(work, chosen)
        except _NoReply as error:
            if call in _WRITES:
                raise OutcomeUnknown(self.name, str(error)) from None
            raise Unavailable(self.name, str(error)) from None

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key; one may arrive damaged."""
        records = await super().get_many(keys, tombstones=tombstones)
        if keys and self._affects("get") and self._draw_fault(self.weather.corrupt):
            raise Corrupt(self._world.dice.choice(keys), "it arrived damaged")
        return records

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records; one that arrives damaged is left out."""
        records = await super().scan(prefix, after=after, limit=limit, where=where)
        names = [record.key for record in records]
        return self._damage(records, names, limit) if self._affects("scan") else records

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history; an entry that arrives damaged is left out."""
        entries = await super().read(stream, after=after, limit=limit, where=where)
        names = [f"{stream} {entry.id}" for entry in entries]
        return self._damage(entries, names, limit) if self._affects("read") else entries

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Send changes, stamped so that every copy of the request is the same."""
        stamped = assign_nonces(changes, self._ids)
        if self.is_atomic or len(stamped) == 1:
            return await self._write_at_once(stamped)
        return await self._write_apart(stamped)

    async def _write_at_once(self, stamped: Sequence[Change]) -> list[Outcome]:
        """Send changes in one request."""
        try:
            await self.withhold(name_current_call())
        except OutcomeUnknown as unknown:
            return [Unknown(unknown.detail) for _ in stamped]
        chosen = self._choose_weather("write")
        weather = chosen or self.weather
        if self._draw_fault(weather.undecided):
            await asyncio.sleep(self._draw(weather.latency))
            return [Unknown("nothing was decided") for _ in stamped]
        try:
            return await self._request(lambda: self._commit(stamped), chosen)
        except _NoReply as error:
            return [Unknown(str(error)) for _ in stamped]

    async def _write_apart(self, stamped: Sequence[Change]) -> list[Outcome]:
        """Send each change in a request of its own, all at the same time, as to a bucket.

        Raises:
            Unavailable, Misconfigured: all were refused.
        """

        async def send(change: Change) -> Outcome | JobsyncError:
            try:
                (outcome,) = await self._write_at_once([change])
            except (Unavailable, Misconfigured) as refusal:
                return refusal
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(change)) for change in stamped]
        replies = [task.result() for task in tasks]
        refusals = [reply for reply in replies if isinstance(reply, JobsyncError)]
        if refusals and len(refusals) == len(replies):
            raise refusals[0]
        return [
            Unknown(str(reply)) if isinstance(reply, JobsyncError) else reply for reply in replies
        ]

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Send entries, with a batch id so that every copy of the request is the same."""
        await super().append(stream, entries, batch=batch or self._ids.batch())

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""

        async def bury() -> int:
            count = await self.inner.bury(prefix, older_than=older_than, limit=limit)
            self._world.note(self._node.name, "bury", prefix=prefix, count=count)
            return count

        return await self.around("bury", 0, bury)

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records permanently."""

        async def drop() -> None:
            await self.inner.drop(keys)
            self._world.note(self._node.name, "drop", keys=list(keys))

        await self.around("drop", len(keys), drop)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early on a notification; it may be lost, and does not pass a cut.

        If a fault is ordained or follows another, it may also be refused, come late, or come
        without a change.
        """
        chosen = self._choose_weather("wait")
        weather = chosen or self.weather
        refused = max(weather.refused, weather.forbidden, weather.undecided)
        if chosen is not None and self._draw_fault(refused):
            raise Unavailable(self.name, "the request was refused")
        if chosen is not None and self._draw_fault(weather.doubled):
            return
        if self._draw_fault(weather.lost) or not (self.requests_pass and self.replies_pass):
            await asyncio.sleep(timeout)
            return
        await self.inner.wait(topic, timeout)
        if chosen is not None and self._draw_fault(max(weather.slow, weather.slow_reply)):
            await asyncio.sleep(self._draw(weather.slow_by))

    @property
    def sql(self) -> SqlAccess | None:
        """Access to the rows of the store over this link, if it has any."""
        rows = self.inner.sql
        return rows.connect(self, self._node.name) if isinstance(rows, SharedRows) else rows

    async def withhold(self, call: str) -> None:
        """Wait in vain for the reply to a call, if its requests do not arrive.

        Raises:
            OutcomeUnknown: no reply arrived.
        """
        if call in self.withheld:
            self._count()
            await asyncio.sleep(self.weather.patience)
            raise OutcomeUnknown(self.name, "no reply arrived")

    def passes_notification(self) -> bool:
        """Whether a notification arrives: it may be lost, and does not pass a cut."""
        is_open = self.requests_pass and self.replies_pass
        return is_open and not (self._affects("wait") and self._draw_fault(self.weather.lost))

    async def now(self) -> Wall | None:
        """Read the wall clock of the store."""
        return await self.around("now", 0, self.inner.now)

    async def close(self) -> None:
        """Do nothing: the store belongs to all nodes."""

    async def _commit(self, changes: Sequence[Change]) -> list[Outcome]:
        """Execute changes, and record those that were applied, in commit order."""
        outcomes = await self.inner.write(changes)
        for change, outcome in zip(changes, outcomes, strict=True):
            if isinstance(outcome, Applied):
                self._record_commit(change, outcome)
        return outcomes

    def _record_commit(self, change: Change, outcome: Applied) -> None:
        record = outcome.record
        self._world.note(
            self._node.name,
            "commit",
            key=record.key,
            seq=record.seq,
            epoch=record.epoch,
            nonce=record.nonce,
            base=None if change.base is None else change.base.nonce,
            deleted=isinstance(change, Delete),
            value=record.value,
        )

    def _choose_weather(self, call: str) -> Weather | None:
        """Return the weather of one request; None for that of the link, whatever it will be."""
        weather = self.weather
        if self._ordained:
            for name in (call, name_current_call()):
                if faults := self._ordained.get(name):
                    return SINGLE[faults.popleft()]
        if weather.again and self._was_struck:
            self._was_struck = False
            surprises = self._world.surprises
            if surprises.random() < weather.again:
                return SINGLE[surprises.choice(PASSING)]
        if self._affects(call):
            return None
        return Weather(latency=weather.latency, patience=weather.patience)

    def _affects(self, call: str) -> bool:
        """Whether the weather affects a call."""
        calls = self.weather.calls
        return calls is None or call in calls or name_current_call() in calls

    async def _request(self, work: Callable[[], Awaitable[T]], chosen: Weather | None) -> T:
        refusal = self._draw_refusal(chosen or self.weather)
        if refusal is not None:
            await asyncio.sleep(self._draw(self.weather.latency))
            try:
                raise refusal
            finally:
                # Its traceback refers to this frame: a cycle for the garbage collector.
                del refusal
        loop = self._world.loop
        reply: asyncio.Future[T] = asyncio.Future(loop=loop)
        self._send(work, reply, chosen)
        # Not asyncio.timeout, which costs more than the request.
        timer = loop.call_later(self.weather.patience, _give_up, reply)
        try:
            return await reply
        finally:
            timer.cancel()
            # Likewise, by the exception that it may hold.
            del reply

    def _draw_refusal(self, weather: Weather) -> JobsyncError | None:
        """Return the error of the sender if the request is refused."""
        if self.throttled:
            self._count()
            return Unavailable(self.name, "the server answered 503 SlowDown")
        if self.forbidden:
            self._count()
        if self.forbidden or self._draw_fault(weather.forbidden):
            problem = "does not allow this to these credentials (the server answered 403)"
            return Misconfigured("url", self.name, problem, "allow it")
        if self._draw_fault(weather.refused):
            return Unavailable(self.name, "the request was refused")
        return None

    def _send(
        self,
        work: Callable[[], Awaitable[T]],
        reply: "asyncio.Future[T]",
        chosen: Weather | None,
    ) -> None:
        """Send a request, which from then on is independent of the sender."""
        if not self.requests_pass:
            self._count()
            return
        weather = chosen or self.weather
        delay = self._draw(weather.latency)
        if self._draw_fault(weather.slow):
            delay += self._draw(weather.slow_by)
        if self._draw_fault(weather.late):
            delay += weather.late_after + self._draw(weather.late_by)
        self._schedule(delay, self._world.run_now, self._execute, work, reply, chosen)
        if self._draw_fault(weather.doubled):
            again = delay + self._draw(weather.late_by)
            self._schedule(again, self._world.run_now, self._execute_again, work)

    async def _execute(
        self,
        work: Callable[[], Awaitable[T]],
        reply: "asyncio.Future[T]",
        chosen: Weather | None,
    ) -> None:
        """Execute a request and send the reply."""
        try:
            result = await work()
        except JobsyncError as error:
            self._schedule(0.0, _fail, reply, error)
            return
        weather = chosen or self.weather
        if not self.replies_pass:
            self._count()
        elif self._draw_fault(weather.lost):
            self._schedule(0.0, _fail, reply, _NoReply("the reply was lost"))
        elif not self._draw_fault(weather.unanswered):
            delay = self._draw(weather.latency)
            if self._draw_fault(weather.slow_reply):
                delay += _SLOW_REPLY * weather.patience * (1 + self._roll()) / 2
            self._schedule(delay, _succeed, reply, result)

    async def _execute_again(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Execute a request that has arrived twice. Nobody receives the reply."""
        with suppress(JobsyncError):
            await work()

    def _damage(self, items: list[T], names: list[str], limit: int) -> list[T]:
        """Leave one item out and report it, if the dice say so."""
        # A full page stays full: a shorter one would be taken for the last.
        if not 0 < len(items) < limit or not self._draw_fault(self.weather.corrupt):
            return items
        at = self._world.dice.randrange(len(items))
        self._corruption_log.report(Corrupt(names[at], "it arrived damaged"))
        return items[:at] + items[at + 1 :]

    def _draw_fault(self, chance: float) -> bool:
        if not chance or self._roll() >= chance:
            return False
        self._count()
        return True

    def _count(self) -> None:
        self.faults += 1
        self._was_struck = True
        self._world.faults += 1

    def _draw(self, most: float) -> float:
        return self._roll() * most


class _NoReply(Exception):
    """The outcome of a request is unknown."""


def _succeed(reply: "asyncio.Future[T]", result: T) -> None:
    if not reply.done():
        reply.set_result(result)


def _give_up(reply: "asyncio.Future[Any]") -> None:
    _fail(reply, _NoReply("no reply arrived"))


def _fail(reply: "asyncio.Future[Any]", error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
        # Retrieved here, because the sender may be dead and never retrieve it.
        reply.exception()


def connect(node: Node, store: Store, weather: Weather = CALM) -> Store:
    """Return a store as the code of a node uses it: over a link of its own, and settled.

    The replies are recorded in the history, for `check_replies`.
    """
    settled = SettlingStore(Link(node.world, node, store, weather), node.components)
    recording = RecordingStore(node, settled)
    # Stores of one name wake each other, as those of one process do.
    recording.name = f"{store.name}{node.name}"
    return recording
