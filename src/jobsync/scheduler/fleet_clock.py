"""The time by which instants are due: the store's, where it has a clock.

On its own because the loop, the runs and the plugin share it.
"""

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.stores.contract import Store


class FleetClock:
    """The time by which instants are due."""

    def __init__(self, membership: Membership, store: Store, components: Components) -> None:
        self._membership = membership
        self._store = store
        self._clock = components.clock
        self._offset: float | None = None
        self.veto = ""

    async def refresh(self) -> None:
        """Ask the store for its time."""
        now = await self._store.now()
        if now is not None:
            self._offset = now.seconds - self._clock.mono().seconds

    def now(self) -> float:
        """Return the time."""
        if self._offset is None:
            return self._clock.wall().seconds
        return self._clock.mono().seconds + self._offset
