"""Nothing that was deleted, or has expired, stays for ever.

Promises: what is there and has not expired is never touched; it is harmless at any time, for
anybody, also for several at once. Of all processes that have a session and know of a place
one does it, an hour after the last time on SQL, a day on objects, where looking at each name
costs money; whoever finds that somebody else was at it has made three requests.

Tombstones are buried once they are an hour old (`BURIAL_AGE`). What cannot be done now is
done next time.
"""

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.supervisor import WorkPostponed
from jobsync.errors import JobsyncError, Unavailable
from jobsync.events import Event
from jobsync.stores.contract import BURIAL_AGE, Applied, Put, Record, Store

__all__ = ["TURN", "Cleanup", "CleanupScope", "DatabaseTidied"]

TURN = "tidy/turn"
"""The record that says when each place was tidied last."""

_HOUR = 3600.0
_PAGE = 1000
_REMEMBERED = 10
"""For how many intervals a place that nobody tidies any more is remembered."""


class DatabaseTidied(Event, frozen=True, kw_only=True):
    """What was deleted is gone for good, and what had expired is deleted."""

    name = "db:tidied"

    buried: int
    """How many tombstones were removed."""
    swept: int
    """How many values of plugins had expired."""


class CleanupScope(msgspec.Struct, frozen=True):
    """Where there is something to do."""

    levels: Sequence[str]
    """Prefixes under which records come and go."""
    storages: Sequence[PluginStorage]
    dropped: Mapping[str, Record]
    """Notes of resources that are no more, by where their records were; see `Catalogue.drop`."""

    def among(self, levels: Container[str]) -> "CleanupScope":
        """Give those that are under some prefixes."""
        return CleanupScope(
            [level for level in self.levels if level in levels],
            [storage for storage in self.storages if storage.level in levels],
            {level: note for level, note in self.dropped.items() if level in levels},
        )


class Cleanup:
    """Removes what is left of deleted records.

    Args:
        source: gives the store, or raises what keeps it from being used.
        components: time, randomness and events.
        find_places: looks where there is something to do.
    """

    def __init__(
        self,
        source: Callable[[], Store],
        components: Components,
        find_places: Callable[[], Awaitable[CleanupScope]],
    ) -> None:
        self._source = source
        self._clock = components.clock
        self._randomness = components.randomness
        self._events = components.events
        self._find_places = find_places

    async def go_on(self) -> None:
        """Tidy up again and again, whenever nobody else has."""
        interval = _HOUR * (24 if self._source().is_billed else 1)
        # Spread, so that many who start at one time do not all come at one time.
        await self._clock.sleep(self._randomness.uniform(0, interval))
        while True:
            try:
                await self._tidy(await self._choose(interval))
            except Unavailable:
                raise
            except JobsyncError as error:
                # Nothing hangs on it, and a right that is lacking may be given.
                told = WorkPostponed(work="tidying", error=str(error), pause=interval)
                self._events.emit(told)
            await self._clock.sleep(interval)

    async def tidy(self) -> DatabaseTidied:
        """Tidy up now, and everywhere; tell what was removed."""
        return await self._tidy(await self._find_places())

    async def _tidy(self, places: CleanupScope) -> DatabaseTidied:
        swept = sum([await storage.sweep() for storage in places.storages])
        buried = sum([await self._bury(level) for level in places.levels])
        await self._forget(places.dropped.values())
        told = DatabaseTidied(buried=buried, swept=swept)
        if places.levels:
            self._events.emit(told)
        return told

    async def _bury(self, level: str) -> int:
        buried = 0
        while True:
            some = await self._source().bury(level, limit=_PAGE)
            buried += some
            if some < _PAGE:
                return buried

    async def _forget(self, notes: Iterable[Record]) -> None:
        """Remove the notes of resources whose last tombstone was old enough to be buried now."""
        now = self._clock.wall().seconds
        old = [note.delete() for note in notes if now - _read_time(note) > 2 * BURIAL_AGE]
        if old:
            await self._source().write(old)

    async def _choose(self, interval: float) -> CleanupScope:
        """Give the places where nobody was for so long; none, if somebody is faster."""
        places, store, now = await self._find_places(), self._source(), self._clock.wall().seconds
        turn = await store.get(TURN, tombstones=True)
        times = _read_times(turn)
        # By clocks that may disagree: at worst it is done too often, or an interval later.
        due = {level for level in places.levels if not 0 <= now - times.get(level, 0) < interval}
        if not due:
            return places.among(due)
        kept = {level: at for level, at in times.items() if now - at < _REMEMBERED * interval}
        (outcome,) = await store.write([Put(TURN, {**kept, **dict.fromkeys(due, now)}, turn)])
        return places.among(due if isinstance(outcome, Applied) else ())


def _read_times(turn: Record | None) -> dict[str, float]:
    """Give when each place was tidied; what nobody understands counts for nothing."""
    value: Json = None if turn is None else turn.value
    times = value.items() if isinstance(value, dict) else ()
    return {level: at for level, at in times if isinstance(at, int | float)}


def _read_time(note: Record) -> float:
    """Give when a resource was dropped; long ago, if nobody can say."""
    at = note.value.get("at") if isinstance(note.value, dict) else None
    return at if isinstance(at, int | float) else 0.0
