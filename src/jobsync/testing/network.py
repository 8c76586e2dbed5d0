"""The way between a node and the store, and everything that can happen on it.

A request travels on its own: a node that is killed, paused or out of patience does not
call it back. So a write may land long after its sender gave up, arrive twice, or be
carried out with its reply lost. Each is drawn from the world's dice.

Commits are noted in the order in which the store made them, on one condition: the store
at the end answers without waiting for anything, as a `MemoryStore` does.
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

_CHANGES_SOMETHING = {"append", "discard", "bury", "drop", "transact"}


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """How often what happens to a request, between 0 and 1, and how long things take."""

    latency: float = 0.01
    """Each way takes up to so many seconds."""
    slow: float = 0.0
    slow_by: float = 25.0
    """A slow one takes up to so many more."""
    refused: float = 0.0
    """It is refused before it is carried out, and the sender hears of it."""
    undecided: float = 0.0
    """Nothing is decided (409): a write is unknown and was not carried out."""
    lost: float = 0.0
    """It is carried out, and the answer is an error that does not say so."""
    unanswered: float = 0.0
    """It is carried out, and no answer ever comes."""
    late: float = 0.0
    late_by: float = 600.0
    """It lands up to so many seconds after it was sent."""
    doubled: float = 0.0
    """It arrives twice."""
    corrupt: float = 0.0
    """Something that is read arrives damaged, this once; what is stored is whole."""
    patience: float = 5.0
    """After so many seconds without an answer the sender gives up."""


CALM = Weather()
"""Nothing goes wrong."""


class Link(StoreDecorator):
    """One node's way to the store.

    Args:
        world: whose dice decide, and whose history tells what was committed.
        node: whose way it is.
        store: what lies at its end.
        weather: what happens on it; may change at any time.

    Attributes:
        requests_pass: False while nothing that the node sends arrives.
        replies_pass: False while nothing that the store answers arrives.
        throttled: True while every request is refused as one too many.
        forbidden: True while every request is refused for want of rights.
        faults: how many were injected.
    """

    def __init__(self, world: World, node: Node, store: Store, weather: Weather = CALM) -> None:
        super().__init__(store)
        self.weather = weather
        self.requests_pass = True
        self.replies_pass = True
        self.throttled = False
        self.forbidden = False
        self.faults = 0
        self._world = world
        self._roll = world.dice.random
        # What is on its way belongs to no node.
        self._travel = world.loop.call_outside
        self._node = node
        self._ids = node.components.ids
        self._witness = CorruptionLog(self.name, node.components.events)
        node.links.append(self)

    def mend(self) -> None:
        """End everything that is wrong with it, and the bad weather."""
        self.weather = CALM
        self.requests_pass = self.replies_pass = True
        self.throttled = self.forbidden = False

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Send a request, and wait for the reply as long as there is patience."""
        del sent
        if call == "transact" and self._strikes(self.weather.undecided):
            await asyncio.sleep(self._draw(self.weather.latency))
            raise OutcomeUnknown(self.name, "nothing was decided")
        try:
            return await self._ask(work)
        except _NoAnswer as trouble:
            if call in _CHANGES_SOMETHING:
                raise OutcomeUnknown(self.name, str(trouble)) from None
            raise Unavailable(self.name, str(trouble)) from None

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by name; one may be damaged on the way."""
        records = await self.around(
            "get", len(keys), lambda: self.inner.get_many(keys, tombstones=tombstones)
        )
        if keys and self._strikes(self.weather.corrupt):
            raise Corrupt(self._world.dice.choice(keys), "it arrived damaged")
        return records

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records; one may be damaged on the way, and is left out."""
        records = await super().scan(prefix, after=after, limit=limit, where=where)
        return self._damage(records, [record.key for record in records], limit)

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history; a line may be damaged on the way, and is left out."""
        entries = await super().read(stream, after=after, limit=limit, where=where)
        return self._damage(entries, [f"{stream} {entry.id}" for entry in entries], limit)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Send changes, marked so that every copy of the request is the same."""
        marked = assign_nonces(changes, self._ids)
        if self._strikes(self.weather.undecided):
            await asyncio.sleep(self._draw(self.weather.latency))
            return [Unknown("nothing was decided") for _ in marked]
        try:
            return await self._ask(lambda: self._commit(marked))
        except _NoAnswer as trouble:
            return [Unknown(str(trouble)) for _ in marked]

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Send lines, named so that every copy of the request is the same."""
        await super().append(stream, entries, batch=batch or self._ids.batch())

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones."""

        async def bury() -> int:
            count = await self.inner.bury(prefix, older_than=older_than, limit=limit)
            self._world.note(self._node.name, "bury", prefix=prefix, count=count)
            return count

        return await self.around("bury", 0, bury)

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records for good."""

        async def drop() -> None:
            await self.inner.drop(keys)
            self._world.note(self._node.name, "drop", keys=list(keys))

        await self.around("drop", len(keys), drop)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if something changed; a hint may be lost, and does not pass a cut."""
        if self._strikes(self.weather.lost) or not (self.requests_pass and self.replies_pass):
            await asyncio.sleep(timeout)
        else:
            await self.inner.wait(topic, timeout)

    @property
    def sql(self) -> SqlAccess | None:
        """The way to the rows, if the store has any: over this link."""
        rows = self.inner.sql
        return RowLink(self, rows, self._node.name) if isinstance(rows, SharedRows) else rows

    def lets_hint_pass(self) -> bool:
        """Say whether a hint comes through: one may be lost, and none passes a cut."""
        is_open = self.requests_pass and self.replies_pass
        return is_open and not self._strikes(self.weather.lost)

    async def now(self) -> Wall | None:
        """Tell the store's own time of day."""
        return await self.around("now", 0, self.inner.now)

    async def close(self) -> None:
        """Let go of the way. The store at its end belongs to all nodes."""

    async def _commit(self, changes: Sequence[Change]) -> list[Outcome]:
        """Let the store carry out changes, and note those that were, in commit order."""
        outcomes = await self.inner.write(changes)
        for change, outcome in zip(changes, outcomes, strict=True):
            if isinstance(outcome, Applied):
                self._note_commit(change, outcome)
        return outcomes

    def _note_commit(self, change: Change, outcome: Applied) -> None:
        """Write down, at its moment, what the store has done."""
        self._world.note(self._node.name, "commit", **_describe(change, outcome))

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T:
        trouble = self._draw_refusal()
        if trouble is not None:
            await asyncio.sleep(self._draw(self.weather.latency))
            try:
                raise trouble
            finally:
                # Its traceback holds this frame: a circle, and work for the garbage collector.
                del trouble
        loop = self._world.loop
        reply: asyncio.Future[T] = asyncio.Future(loop=loop)
        self._send(work, reply)
        # Not asyncio.timeout, which costs more than the whole journey.
        alarm = loop.call_later(self.weather.patience, _give_up, reply)
        try:
            return await reply
        finally:
            alarm.cancel()
            # Likewise, by what it may have failed with.
            del reply

    def _draw_refusal(self) -> JobsyncError | None:
        """Give what the sender gets instead of an answer, if the request is refused."""
        if self.throttled:
            self._count()
            return Unavailable(self.name, "the server answered 503 SlowDown")
        if self.forbidden:
            self._count()
            problem = "does not allow this to these credentials (the server answered 403)"
            return Misconfigured("url", self.name, problem, "allow it")
        if self._strikes(self.weather.refused):
            return Unavailable(self.name, "the request was refused")
        return None

    def _send(self, work: Callable[[], Awaitable[T]], reply: "asyncio.Future[T]") -> None:
        """Put a request on its way, whatever becomes of the sender."""
        if not self.requests_pass:
            self._count()
            return
        weather = self.weather
        delay = self._draw(weather.latency)
        if self._strikes(weather.slow):
            delay += self._draw(weather.slow_by)
        if self._strikes(weather.late):
            delay += self._draw(weather.late_by)
        self._travel(delay, self._arrive, self._deliver, work, reply)
        if self._strikes(weather.doubled):
            again = delay + self._draw(weather.late_by)
            self._travel(again, self._arrive, self._repeat, work)

    def _arrive(self, carry_out: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Carry something out at once, as far as the store can without waiting."""
        errand = carry_out(*args)
        try:
            awaited = errand.send(None)
        except StopIteration:
            # Almost always that is all, and a task would cost more than the errand.
            return
        self._world.start(_go_on(errand, awaited))

    async def _deliver(self, work: Callable[[], Awaitable[T]], reply: "asyncio.Future[T]") -> None:
        """Carry a request out, and put the answer on its way."""
        try:
            result = await work()
        except JobsyncError as error:
            self._travel(0.0, _fail, reply, error)
            return
        if not self.replies_pass:
            self._count()
        elif self._strikes(self.weather.lost):
            self._travel(0.0, _fail, reply, _NoAnswer("the reply was lost"))
        elif not self._strikes(self.weather.unanswered):
            self._travel(self._draw(self.weather.latency), _answer, reply, result)

    async def _repeat(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Carry a request out again. The answer goes to nobody."""
        with suppress(JobsyncError):
            await work()

    def _damage(self, items: list[T], names: list[str], limit: int) -> list[T]:
        """Leave one out and report it, if it so happens."""
        # A full page stays full: one that is not would be taken for the last.
        if not 0 < len(items) < limit or not self._strikes(self.weather.corrupt):
            return items
        at = self._world.dice.randrange(len(items))
        self._witness.report(Corrupt(names[at], "it arrived damaged"))
        return items[:at] + items[at + 1 :]

    def _strikes(self, chance: float) -> bool:
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
def _go_on(errand: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Finish what has begun and waits for something."""
    with suppress(StopIteration):
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                errand.close()
                raise
            except BaseException as error:  # noqa: BLE001 - it is the errand's to take
                awaited = errand.throw(error)
            else:
                awaited = errand.send(sent)


class _NoAnswer(Exception):
    """Nobody can say what became of the request."""


def _answer(reply: "asyncio.Future[T]", result: T) -> None:
    if not reply.done():
        reply.set_result(result)


def _give_up(reply: "asyncio.Future[Any]") -> None:
    _fail(reply, _NoAnswer("no answer came"))


def _fail(reply: "asyncio.Future[Any]", error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
        # Asked for here, because whoever waits may be dead and never ask.
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
    """Give a node a store as its code sees one: over a link of its own, and settled.

    What its callers are told stands in the history, for `check_replies` to judge.
    """
    settled = SettlingStore(Link(node.world, node, store, weather), node.components)
    return RecordingStore(node, settled)
