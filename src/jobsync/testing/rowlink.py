"""A node's way to the rows of a simulated world, with all that happens on a link.

A transaction travels as any request does: it may be refused, come late, be carried out with
its reply lost, or arrive twice. Hints get lost with replies, and do not pass a cut.
"""

import itertools
import sqlite3
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.stores.sql_access import Parameters, SqliteAccess
from jobsync.testing.rows import ASKED, Rows

if TYPE_CHECKING:
    from jobsync.testing.network import Link

__all__ = ["RowLink"]

T = TypeVar("T")

_REPEATABLE = {"settle", "extend", "end_claims", "redrive", "purge", "forget"}
"""What a port promises to be safe to send again."""


class RowLink(SqliteAccess):
    """The rows, at the end of a link.

    Args:
        link: the way.
        rows: what lies at its end, with the store's clock.
        node: who sends.
    """

    def __init__(self, link: "Link", rows: Rows, node: str) -> None:
        self.clock = rows.clock
        self._link = link
        self._rows = rows
        self._node = node

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return await self._link.around("rows", 0, lambda: self._rows.read(query, parameters))

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction, wherever and whenever it arrives.

        Raises:
            OutcomeUnknown: no answer came, or none that says what was done.
        """
        # It arrives in nobody's context, and answers this question all the same.
        context, asked = copy_context(), ASKED.get()
        # No driver sends a transaction twice. What a port may repeat arrives twice none the less.
        may_repeat = asked is not None and asked.call in _REPEATABLE
        arrivals = itertools.count()

        async def arrive() -> T:
            if next(arrivals) and not may_repeat:
                raise Unavailable(place, "it was sent once")
            return context.copy().run(self._rows.commit, work, self._node)

        try:
            return await self._link.around("transact", 0, arrive)
        except OutcomeUnknown as unknown:
            raise OutcomeUnknown(place, unknown.detail) from None

    def wake(self, topic: str) -> None:
        """Let those who wait look, if the hint passes."""
        if self._link.lets_hint_pass():
            self._rows.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken, and the hint passes."""
        give_up = self.clock.mono() + timeout
        while (left := give_up - self.clock.mono()) > 0:
            if await self._rows.topics.wait(topic, left) and self._link.lets_hint_pass():
                return
