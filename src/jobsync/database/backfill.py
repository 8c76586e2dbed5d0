"""Adds the records that existed before to a new index, and removes the entries of former ones.

Guarantees: an index is marked ready only when it has every record, whoever dies meanwhile and
however many processes do this at once. It can be interrupted at any point and goes on where it was.

How: processes use a definition for `DEFINITION_AGE` seconds before they read it again, and a write
takes a bounded time, to which an object store adds that of requests that arrive late. After both
have passed, every writer keeps the new index, and nobody reads a
former one, which writers keep until then. Only then are all records read, in the order of their
ids, and the entries that they name are written. A record that changes meanwhile is kept by its
writer. Entries have the same key whoever writes them, so it does no harm to write one twice.

That time counts from a note on each index, which the first process stores at once. Whoever comes
later waits for the rest, by the store's clock: by the age of the note, or, at an object store, by
the times of two writes, of the note and of another record. Each index has its own rest, so one that
changes often delays no other. So processes that live for seconds only get it done too. If the
store's clock does not tell, the wait begins anew.

What is not covered: a process that stands still for longer than that between reading a definition
and writing a record, and a store whose clock is set forward meanwhile. `Database.backfill` with
`again=True` finds what was left.
"""

import logging
from collections.abc import Callable, Container, Iterable
from operator import methodcaller

import msgspec

from jobsync.components import Components
from jobsync.coordination.clock_skew import measure_time
from jobsync.coordination.fleet_clock import MAX_SKEW
from jobsync.core.expiry import ExpiryRule, rank_of_time
from jobsync.database.definition import Definition, IndexState
from jobsync.database.index import IndexedWriter
from jobsync.database.index_entries import remove_index, write_entries
from jobsync.database.index_notes import (
    BACKFILLS,
    measure_ages,
    progress_key,
    remove_notes,
    since_key,
)
from jobsync.database.registry import ResourceRegistry
from jobsync.database.resource_records import DATA, DEFINITION_AGE
from jobsync.database.supervisor import Supervisor, WorkPostponed
from jobsync.errors import JobsyncError, NotFound, OutcomeUnknown, Unavailable
from jobsync.events import Event
from jobsync.stores.contract import LATEST_ARRIVAL, Conflicted, Put, Record, Store, unwrap
from jobsync.stores.settling import DEADLINE

__all__ = [
    "BUILD_DELAY",
    "LATE_BUILD_DELAY",
    "Backfill",
    "IndexProgress",
    "IndexReady",
    "count_done",
]

_WRITE_TIME = 2 * DEADLINE + 30.0
"""Seconds that the write of a record with its entries may take."""

BUILD_DELAY = DEFINITION_AGE + _WRITE_TIME
"""Seconds after which every process writes by a changed definition."""

LATE_BUILD_DELAY = BUILD_DELAY + LATEST_ARRIVAL
"""Seconds after which also no earlier write arrives late, as it can at an object store."""

_TOGETHER = 1.0
"""Seconds: indexes that changed at once are worked on at once. Times of writes may be rounded."""

_LONG_PAUSE = 3600.0
_PAGE = 500


class IndexProgress(Event, frozen=True, kw_only=True):
    """A backfill has added more records to an index."""

    name = "resource:index-progress"
    level = logging.INFO

    resource: str
    index: str
    done: int
    """Number of records looked at so far."""


class IndexReady(Event, frozen=True, kw_only=True):
    """An index has all records, and is used from now on. One event, whoever works on it."""

    name = "resource:index-ready"
    level = logging.INFO

    resource: str
    index: str


class _Progress(msgspec.Struct, frozen=True):
    """How far a backfill is, as it is stored."""

    after: str = ""
    """The key of the last record whose entry was written."""
    done: int = 0


class Backfill:
    """Completes the indexes of resources.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        registry: of the resources.
        components: time, randomness and events.
        get_supervisor: returns what runs the background work.
    """

    def __init__(
        self,
        get_store: Callable[[], Store],
        registry: ResourceRegistry,
        components: Components,
        get_supervisor: Callable[[], Supervisor],
    ) -> None:
        self._get_store = get_store
        self._registry = registry
        self._components = components
        self._get_supervisor = get_supervisor
        self._clock = components.clock
        self._events = components.events

    def start(self, name: str) -> None:
        """Complete the indexes of a resource in the background, unless that runs already."""
        self._get_supervisor().run_once(lambda: self.run_in_background(name), _name_work(name))

    async def stop(self, name: str) -> None:
        """End the background work on a resource."""
        await self._get_supervisor().cancel(_name_work(name))

    async def run(self, name: str) -> None:
        """Work until every index of a resource is ready, and former ones have no entries.

        Raises:
            NotFound: there is no such resource.
            Unavailable: the store does not answer; what was done stays done.
        """
        while not (definition := await self._read(name)).is_settled:
            rests = await self._measure_rests(definition)
            pause = _choose_pause(rests.values())
            if pause > 0:
                await self._clock.sleep(pause)
            due = {key for key, rest in rests.items() if rest <= pause}
            await self._work_on(definition, due)

    async def _work_on(self, definition: Definition, due: Container[str]) -> None:
        """Work on the indexes whose time has come."""
        name = definition.name
        for index in definition.list_unready():
            if index.key not in due:
                continue
            if await self._build(name, index) and await self._mark_ready(name, index.key):
                self._events.emit(IndexReady(resource=name, index=index.rule.name))
            await remove_notes(self._get_store(), index.key)
        for index in definition.retired:
            if index.key not in due:
                continue
            if definition.expiry is None:
                # A sweep may have begun a move while the rule was dropped.
                await self._complete_moves_in(name, index)
            await self._registry.change(name, methodcaller("abandon_index", index))
        for key in definition.abandoned:
            if key in due:
                await remove_index(self._get_store(), name, key)
                await self._registry.change(name, methodcaller("forget_index", key))

    async def run_in_background(self, name: str) -> None:
        """Do the same, whatever goes wrong: queries are right without it, only slower.

        Raises:
            Unavailable: the store does not answer; try again.
        """
        while True:
            try:
                return await self.run(name)
            except NotFound:
                # Dropped meanwhile.
                return None
            except Unavailable:
                raise
            except OutcomeUnknown as error:
                raise Unavailable(self._get_store().name, str(error)) from error
            except JobsyncError as error:
                # Newer code has changed the definition, or a right is missing and may be granted.
                work = _name_work(name)
                self._events.emit(WorkPostponed(work=work, error=str(error), pause=_LONG_PAUSE))
                await self._clock.sleep(_LONG_PAUSE)

    async def repair(self, name: str) -> None:
        """Write the entries of all records to all ready indexes again."""
        for index in (await self._read(name)).indexes:
            if index.is_ready:
                await remove_notes(self._get_store(), index.key)
                await self._build(name, index)
                await remove_notes(self._get_store(), index.key)

    async def _measure_rests(self, definition: Definition) -> dict[str, float]:
        """Return how many seconds remain until every process knows an index as it is now.

        Returns:
            Those of each index that is not settled, by its key; 0 if its backfill has begun.
        """
        store = self._get_store()
        delay = BUILD_DELAY if store.is_atomic else LATE_BUILD_DELAY
        states = await self._list_changed(definition)
        rests = {key: 0.0 if key not in states else delay for key in definition.unsettled_keys}
        found = await store.get_many([since_key(key) for key in states], tombstones=True)
        stale: list[Put] = []
        notes: dict[str, Record] = {}
        for (key, state), note in zip(states.items(), found, strict=True):
            value = {"state": state}
            if note is None or note.value != value:
                stale.append(Put(since_key(key), value, note))
            else:
                notes[key] = note
        if stale:
            # If another process has just stored the same, that makes no difference.
            await store.write(stale)
        ages = await measure_ages(store, list(notes.values()), self._components)
        for key, age in zip(notes, ages, strict=True):
            rests[key] = max(0.0, delay - age)
        return rests

    async def _list_changed(self, definition: Definition) -> dict[str, str]:
        """Return the indexes that some process may not know yet as they are, and what they are."""
        building = [index.key for index in definition.list_unready()]
        notes = await self._get_store().get_many([progress_key(key) for key in building])
        new = [key for key, note in zip(building, notes, strict=True) if note is None]
        return {
            **dict.fromkeys(new, "new"),
            # One that came back, and was retired again, has others who read it.
            **{index.key: f"retired {index.retirements}" for index in definition.retired},
            **dict.fromkeys(definition.abandoned, "abandoned"),
        }

    async def complete_moves(self, name: str) -> None:
        """Complete the moves to archives that sweeps have begun; before the expiry is dropped.

        Raises:
            NotFound: there is no such resource.
            Unavailable: a move is not complete; try again.
        """
        for index in (await self._read(name)).kept_indexes:
            await self._complete_moves_in(name, index)

    async def drop_index(self, resource: str, kind: str, name: str) -> None:
        """Retire an index, whose entries are removed by the next run.

        Raises:
            NotFound: there is no such resource or index; lists the known ones.
        """
        definition = await self._read(resource)
        index = definition.find_index(kind, name)
        if index is None:
            known = [each.rule.name for each in definition.indexes if each.rule.kind == kind]
            raise NotFound(f"{kind} of {resource}", name, known)
        await self._registry.change(resource, methodcaller("remove_index", index.key))

    async def _complete_moves_in(self, name: str, state: IndexState) -> None:
        """Complete the moves of records that an index finds: they are due, by any clock."""
        if not isinstance(state.rule, ExpiryRule):
            return
        now = await measure_time(self._get_store(), f"{BACKFILLS}clock/", self._components)
        until, after = rank_of_time(now + MAX_SKEW), ""
        records = (await self._registry.change(name, lambda now: now)).records
        index = records.open_index(state)
        while True:
            page = await index.list_due(until, _PAGE, after=after)
            await records.moves.finish(await index.match(page.entries))
            if page.next is None:
                return
            after = page.next

    async def _build(self, name: str, index: IndexState) -> bool:
        """Write the entries of all records, from where an earlier backfill has stopped.

        Returns:
            Whether the index has all records; not if it was replaced meanwhile.
        """
        store = self._get_store()
        writer = IndexedWriter(name, [index], self._components)
        note: Record | None = None
        while True:
            now = (await self._read(name)).find_index(index.rule.kind, index.rule.name)
            if now is None or now.key != index.key:
                return False
            if now.is_ready and not index.is_ready:
                return True
            if note is None:
                # Not before: another process may have completed it, and removed its notes.
                note = await self._note(index, None, _Progress())
            progress = _read_note(note)
            records = await store.scan(f"{DATA}{name}/", after=progress.after, limit=_PAGE)
            await write_entries(
                store, [e for record in records for e in writer.build_entries(record)]
            )
            done = progress.done + len(records)
            self._events.emit(IndexProgress(resource=name, index=index.rule.name, done=done))
            if len(records) < _PAGE:
                return True
            note = await self._note(index, note, _Progress(records[-1].key, done))

    async def _mark_ready(self, name: str, key: str) -> bool:
        """Mark an index as ready; return whether it was not before."""
        was_ready = False

        def mark(now: Definition) -> Definition:
            nonlocal was_ready
            after = now.mark_ready(key)
            was_ready = after == now
            return after

        await self._registry.change(name, mark)
        return not was_ready

    async def _read(self, name: str) -> Definition:
        return (await self._registry.change(name, lambda now: now)).definition

    async def _note(self, index: IndexState, base: Record | None, progress: _Progress) -> Record:
        """Store how far it is; return what is stored, which may be another process's note."""
        store, key = self._get_store(), progress_key(index.key)
        (outcome,) = await store.write([Put(key, msgspec.to_builtins(progress), base)])
        if not isinstance(outcome, Conflicted):
            return unwrap(outcome, key)
        found = await store.get(key, tombstones=True)
        if found is not None and not found.deleted:
            return found
        # Without a note the index is complete by now: begin again, which does no harm.
        return await self._note(index, found, _Progress())


def _choose_pause(rests: Iterable[float]) -> float:
    """Return the least of several rests; those that end with it count too."""
    rests = sorted(rests)
    return max(rest for rest in rests if rest <= rests[0] + _TOGETHER)


async def count_done(store: Store, index: IndexState) -> int | None:
    """Return how many records a backfill has looked at; None if it has not begun, or has ended."""
    note = await store.get(progress_key(index.key))
    return None if note is None else _read_note(note).done


def _read_note(note: Record) -> _Progress:
    """Return how far a backfill is; the start, if the note cannot be understood."""
    try:
        return msgspec.convert(note.value, _Progress)
    except msgspec.ValidationError:
        return _Progress()


def _name_work(resource: str) -> str:
    """Return the name of the background work on a resource."""
    return f"backfill of {resource}"
