"""Who watches the sessions, and writes down their death.

An observer counts on its own clock, from the return of the first read that showed a
version. It never calls dead what it did not watch, without a gap, for the whole timeout.
"""

from jobsync.components import Components
from jobsync.coordination.session import SESSIONS
from jobsync.core.trust import Timing, Watch
from jobsync.stores.contract import Applied, Store

__all__ = ["Observer"]

_MOST = 10_000
"""How many sessions are watched at the most."""


class Observer:
    """Watches every session of a store. The owner calls `look` once a beat.

    Args:
        store: where the sessions are.
        components: the clock that counts.
        timing: the sessions' timeout.
    """

    def __init__(self, store: Store, components: Components, timing: Timing) -> None:
        self._store = store
        self._clock = components.clock
        self._timing = timing
        self._watches: dict[str, Watch] = {}
        self._dead: set[str] = set()

    async def look(self) -> list[str]:
        """Look at all sessions once; write down the death of those that have expired.

        Returns:
            The incarnations whose death this observer wrote.

        Raises:
            Unavailable: the store does not answer; nothing is concluded from that.
        """
        heads = await self._store.heads(SESSIONS, limit=_MOST)
        returned = self._clock.mono()
        seen = {head.key: head.version for head in heads}
        self._dead &= seen.keys()
        self._watches = {
            key: self._watches.get(key, Watch(version, returned, returned)).look(
                version, returned, self._timing
            )
            for key, version in seen.items()
            if key not in self._dead
        }
        expired = [key for key, watch in self._watches.items() if watch.expired(self._timing)]
        return [key.removeprefix(SESSIONS) for key in expired if await self._declare_dead(key)]

    async def _declare_dead(self, key: str) -> bool:
        """Replace the very version that was watched, or nothing."""
        record = await self._store.get(key)
        if record is None or record.version != self._watches[key].version:
            return False
        if record.value["state"] == "dead":
            self._dead.add(key)
            return False
        (outcome,) = await self._store.write([record.replace({**record.value, "state": "dead"})])
        return isinstance(outcome, Applied)
