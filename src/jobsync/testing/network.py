"""The network between a node and the store, and all its faults.

Once sent, a request is independent of its sender: a node that is killed, paused or has timed out
does not cancel it. So a write may be applied long after its sender gave up, arrive twice, or be
applied while its reply is lost. The world's dice decide.

Commits are recorded in the order in which the store made them, provided that the store answers
without waiting for anything, as a `MemoryStore` does.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

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
    StoreDecorator,
    Unknown,
    Where,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.record_codec import assign_nonces
from jobsync.stores.settling import SettlingStore
from jobsync.stores.sql import SqlAccess
from jobsync.testing.recording import RecordingStore
from jobsync.testing.rows import RowLink, SharedRows
from jobsync.testing.world import Node, World

__all__ = ["CALM", "Link", "Weather", "connect"]

T = TypeVar("T")

_WRITES = {"append", "discard", "bury", "drop", "transact"}


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """The probabilities of faults of a request, from 0 to 1, and durations in seconds."""

    latency: float = 0.01
    """Maximum for each direction."""
    slow: float = 0.0
    slow_by: float = 25.0
    """Maximum that is added to a slow request."""
    refused: float = 0.0
    """It is refused before it is executed, and the sender gets an error."""
    undecided: float = 0.0
    """Nothing is decided (409): the outcome of a write is unknown, and it was not executed."""
    lost: float = 0.0
    """It is executed, and the sender gets an error that does not say so."""
    unanswered: float = 0.0
    """It is executed, and no reply ever arrives."""
    late: float = 0.0
    late_by: float = 600.0
    """Maximum after which a late request arrives."""
    doubled: float = 0.0
    """It arrives twice."""
    corrupt: float = 0.0
    """A record arrives damaged, once; the stored one is intact."""
    patience: float = 5.0
    """Seconds without a reply after which the sender gives up."""


CALM = Weather()
"""No faults."""


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

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Send a request and wait for the reply, until the sender gives up."""
        del sent
        if call == "transact" and self._draw_fault(self.weather.undecided):
            await asyncio.sleep(self._draw(self.weather.latency))
            raise OutcomeUnknown(self.name, "nothing was decided")
        try:
            return await self._request(work)
        except _NoReply as error:
            if call in _WRITES:
                raise OutcomeUnknown(self.name, str(error)) from None
            raise Unavailable(self.name, str(error)) from None

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key; one may arrive damaged."""
        records = await self.around(
            "get", len(keys), lambda: self.inner.get_many(keys, tombstones=tombstones)
        )
        if keys and self._draw_fault(self.weather.corrupt):
            raise Corrupt(self._world.dice.choice(keys), "it arrived damaged")
        return records

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records; one that arrives damaged is left out."""
        records = await super().scan(prefix, after=after, limit=limit, where=where)
        return self._damage(records, [record.key for record in records], limit)

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history; an entry that arrives damaged is left out."""
        entries = await super().read(stream, after=after, limit=limit, where=where)
        return self._damage(entries, [f"{stream} {entry.id}" for entry in entries], limit)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Send changes, stamped so that every copy of the request is the same."""
        stamped = assign_nonces(changes, self._ids)
        if self._draw_fault(self.weather.undecided):
            await asyncio.sleep(self._draw(self.weather.latency))
            return [Unknown("nothing was decided") for _ in stamped]
        try:
            return await self._request(lambda: self._commit(stamped))
        except _NoReply as error:
            return [Unknown(str(error)) for _ in stamped]

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
        """Return early on a notification; it may be lost, and does not pass a cut."""
        if self._draw_fault(self.weather.lost) or not (self.requests_pass and self.replies_pass):
            await asyncio.sleep(timeout)
        else:
            await self.inner.wait(topic, timeout)

    @property
    def sql(self) -> SqlAccess | None:
        """Access to the rows of the store over this link, if it has any."""
        rows = self.inner.sql
        return RowLink(self, rows, self._node.name) if isinstance(rows, SharedRows) else rows

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
        return is_open and not self._draw_fault(self.weather.lost)

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
        self._world.note(self._node.name, "commit", **_describe(change, outcome))

    async def _request(self, work: Callable[[], Awaitable[T]]) -> T:
        refusal = self._draw_refusal()
        if refusal is not None:
            await asyncio.sleep(self._draw(self.weather.latency))
            try:
                raise refusal
            finally:
                # Its traceback refers to this frame: a cycle for the garbage collector.
                del refusal
        loop = self._world.loop
        reply: asyncio.Future[T] = asyncio.Future(loop=loop)
        self._send(work, reply)
        # Not asyncio.timeout, which costs more than the request.
        timer = loop.call_later(self.weather.patience, _give_up, reply)
        try:
            return await reply
        finally:
            timer.cancel()
            # Likewise, by the exception that it may hold.
            del reply

    def _draw_refusal(self) -> JobsyncError | None:
        """Return the error of the sender if the request is refused."""
        if self.throttled:
            self._count()
            return Unavailable(self.name, "the server answered 503 SlowDown")
        if self.forbidden:
            self._count()
            problem = "does not allow this to these credentials (the server answered 403)"
            return Misconfigured("url", self.name, problem, "allow it")
        if self._draw_fault(self.weather.refused):
            return Unavailable(self.name, "the request was refused")
        return None

    def _send(self, work: Callable[[], Awaitable[T]], reply: "asyncio.Future[T]") -> None:
        """Send a request, which from then on is independent of the sender."""
        if not self.requests_pass:
            self._count()
            return
        weather = self.weather
        delay = self._draw(weather.latency)
        if self._draw_fault(weather.slow):
            delay += self._draw(weather.slow_by)
        if self._draw_fault(weather.late):
            delay += self._draw(weather.late_by)
        self._schedule(delay, self._receive, self._execute, work, reply)
        if self._draw_fault(weather.doubled):
            again = delay + self._draw(weather.late_by)
            self._schedule(again, self._receive, self._execute_again, work)

    def _receive(self, execute: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Execute a request at once, as far as that is possible without waiting."""
        coroutine = execute(*args)
        try:
            awaited = coroutine.send(None)
        except StopIteration:
            # Almost always it is done by now, and a task would cost more than the request.
            return
        self._world.start(_finish(coroutine, awaited))

    async def _execute(self, work: Callable[[], Awaitable[T]], reply: "asyncio.Future[T]") -> None:
        """Execute a request and send the reply."""
        try:
            result = await work()
        except JobsyncError as error:
            self._schedule(0.0, _fail, reply, error)
            return
        if not self.replies_pass:
            self._count()
        elif self._draw_fault(self.weather.lost):
            self._schedule(0.0, _fail, reply, _NoReply("the reply was lost"))
        elif not self._draw_fault(self.weather.unanswered):
            self._schedule(self._draw(self.weather.latency), _succeed, reply, result)

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
        self._world.faults += 1

    def _draw(self, most: float) -> float:
        return self._roll() * most


@types.coroutine
def _finish(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Run a coroutine to its end that has begun and waits for something."""
    with suppress(StopIteration):
        while True:
            try:
                value = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - the coroutine handles it
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(value)


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


def _describe(change: Change, outcome: Applied) -> dict[str, Any]:
    record = outcome.record
    return {
        "key": record.key,
        "seq": record.seq,
        "epoch": record.epoch,
        "nonce": record.nonce,
        "base": None if change.base is None else change.base.nonce,
        "deleted": isinstance(change, Delete),
        "value": record.value,
    }


def connect(node: Node, store: Store, weather: Weather = CALM) -> Store:
    """Return a store as the code of a node uses it: over a link of its own, and settled.

    The replies are recorded in the history, for `check_replies`.
    """
    settled = SettlingStore(Link(node.world, node, store, weather), node.components)
    return RecordingStore(node, settled)
