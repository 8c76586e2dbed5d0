"""Mutants of indexes, backfills, archives and sweeps: the simulated world must catch each.

A mutant that survives means that the world checks too little, not that the code is safe.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import record_stories
from msgspec.structs import replace
from mutants import is_caught

from jobsync.components import Components
from jobsync.core.expiry import ExpiryRule, read_time
from jobsync.database import backfill, index, index_entries
from jobsync.database.archive import ArchiveMark, ArchiveMoves, MoveResult
from jobsync.database.backfill import Backfill
from jobsync.database.definition import Definition, IndexState
from jobsync.database.document import Document
from jobsync.database.index import Index, IndexedWriter
from jobsync.database.index_entries import IndexEntry
from jobsync.database.resource_records import ResourceRecords
from jobsync.errors import Unavailable
from jobsync.stores.contract import Change, Outcome, Record, Store
from jobsync.testing.stories import Story
from jobsync.ttl import sweep
from jobsync.ttl.plugin import TTLPlugin
from jobsync.ttl.sweep import ResourceSweep

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]


def writes_entries_after_their_records(patch: pytest.MonkeyPatch) -> None:
    """A record is written first, and its entries afterwards."""

    async def write(self: IndexedWriter, store: Store, changes: Sequence[Change]) -> list[Outcome]:
        nonces = self._ids.nonces(len(changes))
        plans = [self._plan(*each) for each in zip(changes, nonces, strict=True)]
        outcomes = await store.write([plan.change for plan in plans])
        await index_entries.write_entries(
            store, [entry for plan in plans for entry in plan.entries]
        )
        await index_entries.remove_entries(store, [key for plan in plans for key in plan.left])
        return outcomes

    patch.setattr(IndexedWriter, "write", write)


def removes_entries_too_early(patch: pytest.MonkeyPatch) -> None:
    """The entry that a record leaves is removed before the record is written."""

    async def write(self: IndexedWriter, store: Store, changes: Sequence[Change]) -> list[Outcome]:
        plans = [self._plan(change, "") for change in changes]
        await index_entries.remove_entries(store, [key for plan in plans for key in plan.left])
        return await was(self, store, changes)

    was = IndexedWriter.write
    patch.setattr(IndexedWriter, "write", write)


def removes_entries_of_writes_that_may_arrive(patch: pytest.MonkeyPatch) -> None:
    """An entry without its record is removed at once."""
    patch.setattr(index, "BURIAL_AGE", -1e9)


def leaves_dangling_entries(patch: pytest.MonkeyPatch) -> None:
    """An entry that no record names is never removed."""

    async def remove(*_: object) -> None:
        pass

    patch.setattr(Index, "_remove_dead", remove)


def believes_entries(patch: pytest.MonkeyPatch) -> None:
    """A lookup returns each record that has an entry, whether it names that entry or not."""
    patch.setattr(Index, "_names", lambda _self, record, _entry: not record.deleted)


def reports_what_it_does_not_know(patch: pytest.MonkeyPatch) -> None:
    """If the reply to the removal of an old entry is lost, so is the result of the write."""

    async def remove(store: Store, keys: Sequence[str]) -> None:
        await store.drop(keys)

    patch.setattr(index, "remove_entries", remove)


def believes_its_definition_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A process never reads a definition again."""

    async def keep(*_: object) -> None:
        pass

    patch.setattr(ResourceRecords, "_reread_definition", keep)


def builds_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """A backfill begins while others write by an older definition."""
    patch.setattr(backfill, "BUILD_DELAY", 0.0)
    patch.setattr(backfill, "LATE_BUILD_DELAY", 0.0)


def waits_anew_in_each_process(patch: pytest.MonkeyPatch) -> None:
    """A backfill waits for as long as if its index had been added a moment ago."""

    async def measure(_: Store, notes: Sequence[Any], __: Components) -> list[float]:
        return [0.0 for _ in notes]

    patch.setattr(backfill, "measure_ages", measure)


def marks_ready_what_is_not(patch: pytest.MonkeyPatch) -> None:
    """An index is ready without a backfill."""

    async def build(*_: object) -> bool:
        return True

    patch.setattr(Backfill, "_build", build)


def notes_progress_too_early(patch: pytest.MonkeyPatch) -> None:
    """A backfill notes its progress before the entries are written."""

    async def write(store: Store, entries: Sequence[Any]) -> None:
        held.setdefault(id(store), []).append(list(entries))
        while len(held[id(store)]) > 1:
            await was(store, held[id(store)].pop(0))

    async def build(self: Backfill, name: str, state: IndexState) -> bool:
        is_built = await built(self, name, state)
        for entries in held.pop(id(self._get_store()), []):
            await was(self._get_store(), entries)
        return is_built

    held: dict[int, list[list[Any]]] = {}
    was, built = index_entries.write_entries, Backfill._build
    patch.setattr(backfill, "write_entries", write)
    patch.setattr(Backfill, "_build", build)


def gives_up_a_backfill(patch: pytest.MonkeyPatch) -> None:
    """A backfill that meets an error is not tried again."""

    async def run(self: Backfill, name: str) -> None:
        try:
            await was(self, name)
        except Unavailable:
            return

    was = Backfill.run_in_background
    patch.setattr(Backfill, "run_in_background", run)


def fails_if_a_backfill_is_refused(patch: pytest.MonkeyPatch) -> None:
    """A backfill that is not allowed to write makes its database fail."""
    patch.setattr(Backfill, "run_in_background", Backfill.run)


def drops_what_others_read(patch: pytest.MonkeyPatch) -> None:
    """Writers do not keep an index that was replaced."""
    patch.setattr(Definition, "kept_indexes", property(lambda self: self.indexes))


def removes_what_was_renewed(patch: pytest.MonkeyPatch) -> None:
    """A sweep deletes the current version of a record, not the one that had expired."""

    async def write(self: ResourceSweep, changes: Sequence[Change]) -> list[Any]:
        current = await self._records.keyspace.store.get_many([change.key for change in changes])
        return await was(
            self,
            [
                replace(change, base=record) if record is not None else change
                for change, record in zip(changes, current, strict=True)
            ],
        )

    was = ResourceSweep._write_apart
    patch.setattr(ResourceSweep, "_write_apart", write)


def trusts_entries(patch: pytest.MonkeyPatch) -> None:
    """A sweep goes by an entry, and does not look at its record."""

    async def handle(self: ResourceSweep, state: IndexState, entries: Sequence[IndexEntry]) -> None:
        assert isinstance(state.rule, ExpiryRule)
        keys = [self._records.keyspace.key(entry.id) for entry in entries]
        records = await self._records.keyspace.store.get_many(list(dict.fromkeys(keys)))
        expired = [
            sweep._Expired(Document(each), each, 0.0) for each in records if each is not None
        ]
        await self._apply(state.rule, expired, self._get_now())

    patch.setattr(ResourceSweep, "_handle", handle)


def goes_by_its_own_clock(patch: pytest.MonkeyPatch) -> None:
    """A sweep goes by the wall clock of its machine."""
    patch.setattr(TTLPlugin, "_get_now", lambda self: self.database.components.clock.wall().seconds)


def expires_what_was_deleted(patch: pytest.MonkeyPatch) -> None:
    """A record that was soft-deleted expires again."""

    def expires_at(self: ExpiryRule, document: dict[str, Any]) -> float | None:
        start = read_time(document.get(self.field))
        return None if start is None else start + (self.ttl or 0.0)

    patch.setattr(ExpiryRule, "expires_at", expires_at)


def copies_under_any_id(patch: pytest.MonkeyPatch) -> None:
    """Each attempt to archive a record gives its copy another id."""

    async def copy(
        self: ArchiveMoves, target: Any, moves: Sequence[tuple[Record, ArchiveMark]], *rest: Any
    ) -> Any:
        ids = self._ids.records(len(moves))
        changed = [
            (record, replace(mark, id=new)) for (record, mark), new in zip(moves, ids, strict=True)
        ]
        return await was(self, target, changed, *rest)

    was = ArchiveMoves._copy
    patch.setattr(ArchiveMoves, "_copy", copy)


def deletes_before_it_copies(patch: pytest.MonkeyPatch) -> None:
    """A record is deleted, and then its copy is made."""

    async def complete(self: ArchiveMoves, marked: Sequence[Record]) -> MoveResult:
        await self._delete(marked, MoveResult())
        return await was(self, marked)

    was = ArchiveMoves.complete
    patch.setattr(ArchiveMoves, "complete", complete)


def changes_what_is_being_moved(patch: pytest.MonkeyPatch) -> None:
    """A writer changes a record that is marked, and does not complete its move first."""

    async def finish(*_: object) -> bool:
        return False

    patch.setattr(ArchiveMoves, "finish", finish)


def sweeps_in_its_first_term_only(patch: pytest.MonkeyPatch) -> None:
    """Nobody sweeps after the first leader."""

    async def work(self: TTLPlugin) -> None:
        if not leaders:
            leaders.append(self)
        if leaders[0] is self:
            await was(self)

    leaders: list[TTLPlugin] = []
    was = TTLPlugin.coordinator_work
    patch.setattr(TTLPlugin, "coordinator_work", work)


KILLED: dict[Patch, tuple[Story, int, str]] = {
    writes_entries_after_their_records: (record_stories.races, 0, "X4"),
    removes_entries_too_early: (record_stories.races, 0, "X4"),
    removes_entries_of_writes_that_may_arrive: (record_stories.races, 1, "X4"),
    leaves_dangling_entries: (record_stories.lost_replies, 1, "XL2"),
    believes_entries: (record_stories.races, 1, "X5"),
    reports_what_it_does_not_know: (record_stories.lost_replies, 0, "X6"),
    believes_its_definition_for_ever: (record_stories.adds_partitions, 0, "X4"),
    builds_without_waiting: (record_stories.adds_partitions, 0, "X4"),
    waits_anew_in_each_process: (record_stories.builds_in_short_lives, 0, "XL3"),
    marks_ready_what_is_not: (record_stories.adds_partitions, 0, "X4"),
    notes_progress_too_early: (record_stories.builds_during_an_outage, 0, "X4"),
    gives_up_a_backfill: (record_stories.builds_during_an_outage, 0, "XL3"),
    fails_if_a_backfill_is_refused: (record_stories.builds_during_an_outage, 2, "A1"),
    drops_what_others_read: (record_stories.redefines, 0, "X5"),
    removes_what_was_renewed: (record_stories.renews, 0, "X1"),
    trusts_entries: (record_stories.renews, 0, "X1"),
    goes_by_its_own_clock: (record_stories.skewed, 0, "X1"),
    expires_what_was_deleted: (record_stories.kills, 0, "X1"),
    copies_under_any_id: (record_stories.renews, 0, "X2"),
    deletes_before_it_copies: (record_stories.renews, 0, "X2"),
    changes_what_is_being_moved: (record_stories.renews, 1, "X3"),
    sweeps_in_its_first_term_only: (record_stories.kills, 0, "XL1"),
}
"""For each mutant a story and a seed that catch it, and the invariant that it violates. In
`test_records` these report nothing."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, seed, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant, first=seed)
