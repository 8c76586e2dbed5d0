"""Who lives and stands for what, listed once for everybody who asks during one look.

It stood so in the store a moment ago. A session that cannot be understood stands for nothing,
and is reported.
"""

from collections.abc import Callable

from jobsync.coordination.session import SESSIONS, read_life
from jobsync.errors import Corrupt
from jobsync.stores.contract import Store

__all__ = ["Roll"]

_MOST = 10_000
"""How many sessions are looked at in an election at the most."""


class Roll:
    """The sessions that live, by what they stand for. Costs nothing until it is asked.

    Args:
        store: where the sessions are.
        report: hears of what cannot be understood.
    """

    def __init__(self, store: Store, report: Callable[[Corrupt], object]) -> None:
        self._store = store
        self._report = report
        self._works: dict[str, tuple[str, ...]] | None = None

    async def standing_for(self, role: str) -> list[str]:
        """Give the incarnations that live and stand for a role, in order.

        Raises:
            Unavailable: the store does not answer.
        """
        if self._works is None:
            self._works = await self._list()
        return [each for each, works in self._works.items() if role in works]

    async def _list(self) -> dict[str, tuple[str, ...]]:
        found = {}
        for record in await self._store.scan(SESSIONS, limit=_MOST):
            # Most are dead, in a fleet that has seen much, and need no further understanding.
            if isinstance(record.value, dict) and record.value.get("state") == "dead":
                continue
            try:
                life = read_life(record)
            except Corrupt as corrupt:
                self._report(corrupt)
                continue
            if life.state == "live":
                found[record.key.removeprefix(SESSIONS)] = life.works
        return found
