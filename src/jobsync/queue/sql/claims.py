"""What the rows of claims have in common on SQLite and PostgreSQL.

A claim moves messages into one row, which records by a letter how each of them is settled; the
schemas explain the letters.

On its own because both backends need it, and `common` is large.
"""

from collections.abc import Mapping, Sequence

from jobsync.core.messages import Transition
from jobsync.queue.sql.message_rows import ClaimedRow

__all__ = ["ANSWERS_TTL", "MAX_CLAIM_BYTES", "OUTCOMES", "UnsettledClaims"]

MAX_CLAIM_BYTES = 8 * 1024 * 1024
"""The size of a claim's messages after which it takes no more: they are one row."""

ANSWERS_TTL = 300.0
"""Seconds for which a claim is kept at least after its end, to answer settlements that are sent
again: far longer than anybody does that."""

OUTCOMES: Mapping[Transition, str] = {
    "complete": "c",
    "cancel": "x",
    "retry": "r",
    "bury": "d",
    "release": "b",
    "snooze": "s",
}
"""The letters of settlements in the row of a claim."""

_MAX_UNSETTLED = 1_000
"""How many claims are remembered of which nothing was settled."""


class UnsettledClaims:
    """The claims of this process of which nothing was settled. As a whole they cost less."""

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {}

    def add(self, claim: str, rows: Sequence[ClaimedRow]) -> None:
        """Remember the messages of a claim."""
        self._ids[claim] = [row[0] for row in rows]
        if len(self._ids) > _MAX_UNSETTLED:
            del self._ids[next(iter(self._ids))]

    def remove(self, claim: str) -> set[str]:
        """Return the ids of a claim's messages, once: from now on some of them are settled."""
        return {*self._ids.pop(claim, ())}
