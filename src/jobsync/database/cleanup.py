"""Removes old tombstones and expired values for good.

Guarantees: records that exist and have not expired are never touched. A cleanup is safe at any
time, in any process, also in several at once. Of all processes that have a session and know a
prefix, one cleans it: an hour after the last time on SQL, a day on object stores, where listing
names costs money. Losing the race to another process costs three requests.

Tombstones are buried once they are an hour old (`BURIAL_AGE`). So are notes on the backfill of an
index that is complete, which a process has left that died at that moment. What cannot be removed
now is removed next time.
"""

from collections.abc import Callable, Container, Mapping, Sequence

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.database.definition import KNOWN_FORMAT
from jobsync.database.index_entries import remove_index
from jobsync.database.index_notes import NOTES, find_noted_index, list_old_notes
from jobsync.database.plugin_storage import PluginStorage
from jobsync.database.registry import DEFINITIONS, DROPPED, ResourceRegistry, list_dropped_indexes
from jobsync.database.resource_records import DATA
from jobsync.database.supervisor import WorkPostponed
from jobsync.errors import JobsyncError, Unavailable
from jobsync.events import Event
from jobsync.stores.contract import BURIAL_AGE, Applied, Put, Record, Store

__all__ = ["LAST_CLEANUPS", "Cleanup", "DatabaseTidied"]

LAST_CLEANUPS = "tidy/turn"
"""The record with the time of each prefix's last cleanup."""

_HOUR = 3600.0
_PAGE = 1000
_REMEMBERED = 10
"""Intervals after which a prefix that is no longer cleaned is forgotten."""


class DatabaseTidied(Event, frozen=True, kw_only=True):
    """Old tombstones were removed for good, and expired values were deleted."""

    name = "db:tidied"

    buried: int
    """Number of tombstones removed."""
    swept: int
    """Number of plugins' values that had expired."""


class _CleanupScope(msgspec.Struct, frozen=True):
    """What a cleanup covers."""

    prefixes: Sequence[str]
    """Where records are created and deleted."""
    storages: Sequence[PluginStorage]
    dropped: Mapping[str, Record]
    """Notes about dropped resources, by their prefix; see `ResourceRegistry.drop`."""

    def limit_to(self, prefixes: Container[str]) -> "_CleanupScope":
        """Return the part of this scope that is under some prefixes."""
        return _CleanupScope(
            [prefix for prefix in self.prefixes if prefix in prefixes],
            [storage for storage in self.storages if storage.prefix in prefixes],
            {prefix: note for prefix, note in self.dropped.items() if prefix in prefixes},
        )


class Cleanup:
    """Removes old tombstones and expired values.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        components: time, randomness and events.
        registry: of the resources.
        list_storages: returns the storages of plugins.
        list_prefixes: returns where else plugins create and delete records.
    """

    def __init__(
        self,
        get_store: Callable[[], Store],
        components: Components,
        registry: ResourceRegistry,
        list_storages: Callable[[], Sequence[PluginStorage]],
        list_prefixes: Callable[[], Sequence[str]],
    ) -> None:
        self._get_store = get_store
        self._components = components
        self._clock = components.clock
        self._randomness = components.randomness
        self._events = components.events
        self._registry = registry
        self._list_storages = list_storages
        self._list_prefixes = list_prefixes

    async def run(self) -> None:
        """Clean up at intervals, unless another process has."""
        interval = _HOUR * (24 if self._get_store().is_billed else 1)
        # Spread, so that processes that start together do not clean together.
        await self._clock.sleep(self._randomness.uniform(0, interval))
        while True:
            try:
                await self._clean(await self._claim(interval))
            except Unavailable:
                raise
            except JobsyncError as error:
                # Nothing depends on it, and a missing permission may be granted.
                self._events.emit(WorkPostponed(work="cleanup", error=str(error), pause=interval))
            await self._clock.sleep(interval)

    async def clean_all(self) -> DatabaseTidied:
        """Clean up everything now; return what was removed."""
        return await self._clean(await self._find_scope())

    async def _find_scope(self) -> _CleanupScope:
        """Return all that a cleanup covers."""
        storages = self._list_storages()
        notes = await self._registry.read_dropped()
        dropped = {f"{DATA}{name}/": note for name, note in notes.items()}
        data = {f"{DATA}{name}/" for name in await self._registry.refresh()}
        own = [*(storage.prefix for storage in storages), *self._list_prefixes()]
        prefixes = [DEFINITIONS, DROPPED, NOTES, *sorted(data | dropped.keys()), *own]
        return _CleanupScope(prefixes, storages, dropped)

    async def _clean(self, scope: _CleanupScope) -> DatabaseTidied:
        swept = sum([await storage.sweep() for storage in scope.storages])
        if NOTES in scope.prefixes:
            await self._remove_notes()
        buried = sum([await self._bury(prefix) for prefix in scope.prefixes])
        await self._forget(scope.dropped)
        event = DatabaseTidied(buried=buried, swept=swept)
        if scope.prefixes:
            self._events.emit(event)
        return event

    async def _remove_notes(self) -> None:
        """Remove the notes that were left on indexes that are settled, or gone."""
        store = self._get_store()
        if not (notes := await list_old_notes(store, self._components)):
            return
        # Read after the notes: what has become of an index since then has written them again.
        await self._registry.refresh()
        definitions = [resource.definition for resource in self._registry.resources.values()]
        if any(definition.format > KNOWN_FORMAT for definition in definitions):
            # Newer code does not tell which indexes it works on.
            return
        used = {key for definition in definitions for key in definition.unsettled_keys}
        left = [note.delete() for note in notes if find_noted_index(note) not in used]
        if left:
            await store.write(left)

    async def _bury(self, prefix: str) -> int:
        total = 0
        while True:
            count = await self._get_store().bury(prefix, limit=_PAGE)
            total += count
            if count < _PAGE:
                return total

    async def _forget(self, dropped: Mapping[str, Record]) -> None:
        """Delete the notes about resources whose last tombstone has been buried by now.

        Index entries that a late writer has left are removed before.
        """
        now, store = self._clock.wall().seconds, self._get_store()
        old = {
            prefix: note
            for prefix, note in dropped.items()
            if now - _read_time(note) > 2 * BURIAL_AGE
        }
        for prefix, note in old.items():
            for key in list_dropped_indexes(note):
                await remove_index(store, prefix.removeprefix(DATA).rstrip("/"), key)
        if old:
            await store.write([note.delete() for note in old.values()])

    async def _claim(self, interval: float) -> _CleanupScope:
        """Claim the prefixes not cleaned for an interval; none, if another process is faster."""
        scope, store, now = await self._find_scope(), self._get_store(), self._clock.wall().seconds
        record = await store.get(LAST_CLEANUPS, tombstones=True)
        times = _read_times(record)
        # Clocks may disagree: at worst it is done too often, or an interval later.
        due = {
            prefix for prefix in scope.prefixes if not 0 <= now - times.get(prefix, 0) < interval
        }
        if not due:
            return scope.limit_to(due)
        recent = {prefix: at for prefix, at in times.items() if now - at < _REMEMBERED * interval}
        value = {**recent, **dict.fromkeys(due, now)}
        (outcome,) = await store.write([Put(LAST_CLEANUPS, value, record)])
        return scope.limit_to(due if isinstance(outcome, Applied) else ())


def _read_times(record: Record | None) -> dict[str, float]:
    """Return when each prefix was cleaned; entries that are not times are ignored."""
    value: Json = None if record is None else record.value
    times = value.items() if isinstance(value, dict) else ()
    return {prefix: at for prefix, at in times if isinstance(at, int | float)}


def _read_time(note: Record) -> float:
    """Return when a resource was dropped; 0 if the note does not say."""
    at = note.value.get("at") if isinstance(note.value, dict) else None
    return at if isinstance(at, int | float) else 0.0
