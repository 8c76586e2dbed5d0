"""How long completed messages are remembered: the queue's own setting, or what plugins say.

On its own because other plugins of a database decide it, whenever they are added.
"""

from jobsync.core.clock import Mono, Seconds
from jobsync.database.database import Database
from jobsync.queue.settings import LONGEST_RETENTION

__all__ = ["CompletedTtl"]

_TIME_FOR_PLUGINS: Seconds = 4.0
"""Seconds in which a plugin that is added after the queue can say how long messages are kept."""


class CompletedTtl:
    """How long the completed messages of a queue are remembered.

    Args:
        seconds: the queue's setting.
        is_explicit: whether it was passed or configured: then nobody else is asked.
    """

    def __init__(self, seconds: Seconds, *, is_explicit: bool) -> None:
        self._seconds = seconds
        self._is_explicit = is_explicit
        self._database: Database | None = None
        self._since = Mono(0.0)

    def start(self, database: Database) -> None:
        """Start the time in which plugins of a database can still decide."""
        self._database = database
        self._since = database.components.clock.mono()

    def find(self, database: Database | None) -> Seconds:
        """Return the seconds; the longest that a plugin of the database says counts."""
        governing = self._find_governing(database)
        return self._seconds if governing is None else governing

    def find_decided(self) -> Seconds | None:
        """Return the seconds; None while a plugin may still be added that decides them."""
        database = self._database
        if database is None:
            return None
        if not self._is_explicit and self._find_governing(database) is None:
            age = database.components.clock.mono() - self._since
            if age < _TIME_FOR_PLUGINS:
                return None
        return self.find(database)

    def _find_governing(self, database: Database | None) -> Seconds | None:
        """Return what other plugins say about completed messages; None if nobody does."""
        if self._is_explicit or database is None:
            return None
        plugins = database.plugins
        found = [plugins[name].completed_message_ttl for name in plugins]
        ttls = [ttl for ttl in found if ttl is not None]
        return min(max(ttls), LONGEST_RETENTION) if ttls else None
