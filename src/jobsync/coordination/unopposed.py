"""A role without an election: for a process that works alone and was told so."""

from jobsync.coordination.election import Held
from jobsync.coordination.role import Role
from jobsync.coordination.session import Session
from jobsync.core.clock import Mono

__all__ = ["Unopposed"]


class Unopposed:
    """Holds a role from the beginning to the end, in epoch 0, which no election ever gives.

    Args:
        name: the role's.
        session: for the look of it; nothing hangs on it.
    """

    def __init__(self, name: str, session: Session) -> None:
        self.name = name
        self.session = session
        self.role: Role | None = None
        self.is_open = True
        self.why_over = (0, "stopped")
        self._held: Held | None = Held(0, session.incarnation, 0, Mono(0))

    @property
    def held(self) -> Held | None:
        """The one term there is."""
        return self._held

    @property
    def leading(self) -> Held | None:
        """The one term there is."""
        return self._held

    def end(self) -> None:
        """Hold it no longer."""
        self._held = None
