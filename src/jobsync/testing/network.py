"""The way between a node and the store, and everything that can happen on it.

A request travels on its own: a node that is killed, paused or out of patience does not
call it back. So a write may land long after its sender gave up, arrive twice, or be
carried out with its reply lost. Each is drawn from the world's dice.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any, TypeVar

import msgspec

from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.stores.contract import Applied, Change, Delete, Outcome, Store, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.drafts import stamp
from jobsync.testing.world import Node, World

__all__ = ["CALM", "Link", "Weather"]

T = TypeVar("T")

_CHANGES_SOMETHING = {"append", "discard", "bury", "drop"}


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
    """It is carried out, and the reply is an error or never comes."""
    late: float = 0.0
    late_by: float = 600.0
    """It lands up to so many seconds after it was sent."""
    doubled: float = 0.0
    """It arrives twice."""
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
        faults: how many were injected.
    """

    def __init__(self, world: World, node: Node, store: Store, weather: Weather = CALM) -> None:
        super().__init__(store)
        self.weather = weather
        self.requests_pass = True
        self.replies_pass = True
        self.faults = 0
        self._world = world
        self._node = node

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        """Send a request, and wait for the reply as long as there is patience."""
        del sent
        try:
            return await self._ask(work)
        except TimeoutError:
            trouble = "no answer came in time"
        except _ReplyLostError:
            trouble = "the reply was lost"
        if call in _CHANGES_SOMETHING:
            raise OutcomeUnknown(self.name, trouble)
        raise Unavailable(self.name, trouble)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Send changes, marked so that every copy of the request is the same."""
        marked = stamp(changes, self._node.components.ids)
        unknown: list[Outcome] = [Unknown("no answer") for _ in marked]
        if self._strikes(self.weather.undecided):
            await asyncio.sleep(self._draw(self.weather.latency))
            return unknown
        try:
            return await self._ask(lambda: self._commit(marked))
        except (TimeoutError, _ReplyLostError):
            return unknown

    async def _commit(self, changes: Sequence[Change]) -> list[Outcome]:
        """Let the store carry out changes, and note those that were, in commit order."""
        outcomes = await self.inner.write(changes)
        for change, outcome in zip(changes, outcomes, strict=True):
            if isinstance(outcome, Applied):
                self._world.note(self._node.name, "commit", **_describe(change, outcome))
        return outcomes

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._strikes(self.weather.refused):
            await asyncio.sleep(self._draw(self.weather.latency))
            raise Unavailable(self.name, "the request was refused")
        reply: asyncio.Future[T] = self._world.loop.create_future()
        self._travel(self._deliver(work, reply))
        async with asyncio.timeout(self.weather.patience):
            return await reply

    async def _deliver(self, work: Callable[[], Awaitable[T]], reply: "asyncio.Future[T]") -> None:
        """Carry a request there and its reply back, whatever becomes of the sender."""
        if not self.requests_pass:
            self.faults += 1
            return
        weather = self.weather
        delay = self._draw(weather.latency)
        if self._strikes(weather.slow):
            delay += self._draw(weather.slow_by)
        if self._strikes(weather.late):
            delay += self._draw(weather.late_by)
        await asyncio.sleep(delay)
        if self._strikes(weather.doubled):
            self._travel(self._repeat(work))
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001 - the sender gets it
            _fail(reply, error)
            return
        if not self.replies_pass:
            self.faults += 1
            return
        await asyncio.sleep(self._draw(weather.latency))
        if self._strikes(weather.lost):
            _fail(reply, _ReplyLostError())
        elif not reply.done():
            reply.set_result(result)

    async def _repeat(self, work: Callable[[], Awaitable[Any]]) -> None:
        await asyncio.sleep(self._draw(self.weather.late_by))
        await work()

    def _travel(self, journey: Any) -> None:
        """Let something happen outside every node."""
        self._world.start(journey, Context())

    def _strikes(self, chance: float) -> bool:
        struck = chance > 0 and self._world.dice.random() < chance
        self.faults += struck
        return struck

    def _draw(self, most: float) -> float:
        return self._world.dice.uniform(0, most)


class _ReplyLostError(Exception):
    """The answer was an error that says nothing about what happened."""


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
