"""Moves records to an archive, which is another resource.

Guarantee: whoever dies at whatever point, a moved record is in its resource or in the archive, and
the archive gets one copy of it. A record that is changed before the move begins stays.

How: a move has three writes, and the first one decides.

1. The record is marked with the archive, the id of its copy and a token, if nobody has changed it.
2. The copy is created under that id, by a write whose nonce begins with the token.
3. The record is deleted, if it still has the mark.

Whoever meets a marked record completes the move first: a later sweep, or a writer that wants to
change or delete the record, for whom it is then gone. A marked record has expired for good, so that
sweeps find it under any later rule.

If the id is taken, the copy was made by an earlier attempt, unless the id is that of the record
itself, which somebody else may have used in the archive since. What is there tells: the copy, or
its tombstone, remembers that nonce, also if it was changed, deleted or moved on meanwhile. Only a
tombstone that was removed, an hour after the copy was deleted, leaves no trace: a move that is
completed so late creates the copy again.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json, encode
from jobsync.core.expiry import ARCHIVING, render_time
from jobsync.core.schema import Schema
from jobsync.errors import Invalid, InvalidRecord, Unavailable
from jobsync.stores.contract import TRAIL_LENGTH, Applied, Conflicted, Put, Record, Unknown

if TYPE_CHECKING:
    from jobsync.database.resource_records import ResourceRecords

__all__ = [
    "ARCHIVING",
    "ArchiveMark",
    "ArchiveMoves",
    "MoveResult",
    "OpenRecords",
    "check_archive",
    "check_archived",
    "read_mark",
]

_ARCHIVED_AT = "archived_at"
_ARCHIVED_FROM = "archived_from"
_ORIGINAL_ID = "original_id"
_ADDED = (_ARCHIVED_AT, _ARCHIVED_FROM, _ORIGINAL_ID)
"""The fields that a move adds to a record."""

_TOKEN_LENGTH = 8
"""Of the 12 characters of a nonce: nobody else draws such a nonce, and no two attempts the same."""

OpenRecords: TypeAlias = Callable[[str], Awaitable["ResourceRecords"]]
"""Returns the records of a resource; creates it if there is none."""


class ArchiveMark(msgspec.Struct, frozen=True):
    """Where a record goes that is being moved."""

    resource: str
    """The archive."""
    id: str
    """Of the copy."""
    at: float
    """When the record was marked, in seconds since 1970."""
    token: str
    """What the nonces of all writes begin with that create the copy."""


def read_mark(record: Record | None) -> ArchiveMark | None:
    """Return the mark of a record that is being moved; None if it is not."""
    if record is None or not isinstance(record.value, dict) or ARCHIVING not in record.value:
        return None
    try:
        return msgspec.convert(record.value[ARCHIVING], ArchiveMark)
    except msgspec.ValidationError:
        # Nothing that this code has written; whoever changes the record next removes it.
        return None


def check_archive(place: str, name: str, schema: Schema) -> None:
    """Check that an archive can hold what a move adds to a record.

    Raises:
        Invalid: its schema refuses it.
    """
    for field in _ADDED:
        if schema.strict and field not in schema.fields:
            fix = f"add {field} to its attributes"
            raise Invalid(place, name, f"is strict and has no {field}", fix)


def check_archived(place: str, schema: Schema) -> None:
    """Check that a move overwrites no field that users have described.

    Raises:
        Invalid: it would. A schema with all of the fields that a move sets is that of an archive.
    """
    described = [field for field in _ADDED if field in schema.fields]
    if described and len(described) < len(_ADDED):
        problem = f"would overwrite {described[0]}, which is a field of its records"
        fix = "give the field another name, or choose another on_expire"
        raise Invalid(f"{place}.on_expire", "archive", problem, fix)


class MoveResult(msgspec.Struct):
    """What became of marked records. One in neither list was moved by another process."""

    archived: list[Record] = []
    """Moved by this process."""
    unsure: list[Record] = []
    """Perhaps not moved: a write has an unknown outcome."""


class ArchiveMoves:
    """The moves of the records of one resource to archives.

    Args:
        source: the records.
        open_archive: returns those of the archive of a name.
        components: the ids of copies.
    """

    def __init__(
        self, source: "ResourceRecords", open_archive: OpenRecords, components: Components
    ) -> None:
        self._source = source
        self._open_archive = open_archive
        self._ids = components.ids

    async def plan(
        self, records: Sequence[Record], archive: str, now: float, *, keep_id: bool
    ) -> list[Put | Invalid]:
        """Return the changes that mark records; an error for one that the archive refuses.

        Args:
            records: of the source.
            archive: the name of the archive.
            now: in seconds since 1970.
            keep_id: whether copies keep the ids of their records, where those are free.
        """
        target = await self._open_archive(archive)
        own_ids = [record.value["id"] for record in records]
        used: list[Record | None] = [None] * len(records)
        if keep_id:
            used = await target.keyspace.store.get_many(
                list(map(target.keyspace.key, own_ids)), tombstones=True
            )
        new_ids = self._ids.records(len(records))
        nonces = self._ids.nonces(len(records))
        planned: list[Put | Invalid] = []
        for record, own, taken, new, nonce in zip(
            records, own_ids, used, new_ids, nonces, strict=True
        ):
            copy_id = own if keep_id and taken is None else new
            mark = ArchiveMark(archive, copy_id, round(now, 3), nonce[:_TOKEN_LENGTH])
            try:
                encode(await target.prepare(self._build_copy(record, mark, target), mark.id))
            except (Invalid, InvalidRecord) as error:
                planned.append(error)
            else:
                planned.append(_mark(record, mark))
        return planned

    async def finish(self, records: Sequence[Record | None]) -> bool:
        """Complete the moves of those records that are marked; return whether any is.

        Raises:
            Unavailable: a move is not complete; try again.
        """
        marked = [record for record in records if record is not None and read_mark(record)]
        if marked and (await self.complete(marked)).unsure:
            problem = "a move to the archive is not complete"
            raise Unavailable(self._source.name, problem, "try again")
        return bool(marked)

    async def complete(self, marked: Sequence[Record]) -> MoveResult:
        """Complete the moves of marked records.

        Raises:
            Unavailable: the store does not answer; some may be complete.
        """
        result = MoveResult()
        waiting = list(marked)
        while waiting:
            by_archive: dict[str, list[tuple[Record, ArchiveMark]]] = {}
            for record in waiting:
                if (mark := read_mark(record)) is not None:
                    by_archive.setdefault(mark.resource, []).append((record, mark))
            waiting = []
            for archive, moves in by_archive.items():
                target = await self._open_archive(archive)
                copied, displaced = await self._copy(target, moves, result)
                await self._delete(copied, result)
                waiting += await self._mark_again(displaced, result)
        return result

    async def _copy(
        self,
        target: "ResourceRecords",
        moves: Sequence[tuple[Record, ArchiveMark]],
        result: MoveResult,
    ) -> tuple[list[Record], list[Record]]:
        """Create copies; return the records that have one, and those that need another id."""
        copies = [self._build_copy(record, mark, target) for record, mark in moves]
        changes = [
            Put(
                target.keyspace.key(mark.id),
                await _build_document(target, copy, mark.id),
                nonce=mark.token + nonce[_TOKEN_LENGTH:],
            )
            for (_, mark), copy, nonce in zip(
                moves, copies, self._ids.nonces(len(moves)), strict=True
            )
        ]
        outcomes = await target.write(changes)
        copied: list[Record] = []
        displaced: list[Record] = []
        created: list[str] = []
        for (record, mark), copy, outcome in zip(moves, copies, outcomes, strict=True):
            match outcome:
                case Unknown():
                    result.unsure.append(record)
                case Applied():
                    created.append(mark.id)
                    copied.append(record)
                case Conflicted():
                    is_copied = mark.id != record.value["id"] or await _has_copy(target, mark, copy)
                    (copied if is_copied else displaced).append(record)
        target.report_inserted(*created)
        return copied, displaced

    async def _delete(self, records: Sequence[Record], result: MoveResult) -> None:
        """Delete copied records."""
        outcomes = await self._source.write([record.delete() for record in records])
        deleted: list[Record] = []
        for record, outcome in zip(records, outcomes, strict=True):
            if isinstance(outcome, Applied):
                deleted.append(record)
            elif isinstance(outcome, Unknown):
                result.unsure.append(record)
            # After a conflict another process has completed the move.
        result.archived += deleted
        self._source.report_deleted(*(record.value["id"] for record in deleted))

    async def _mark_again(self, records: Sequence[Record], result: MoveResult) -> list[Record]:
        """Choose new ids for copies, because the archive has used theirs since they were marked."""
        changes = []
        for record, new_id in zip(records, self._ids.records(len(records)), strict=True):
            mark = read_mark(record)
            if mark is not None:
                changes.append(_mark(record, msgspec.structs.replace(mark, id=new_id)))
        outcomes = await self._source.write(changes)
        for record, outcome in zip(records, outcomes, strict=True):
            if isinstance(outcome, Unknown):
                result.unsure.append(record)
        return [outcome.record for outcome in outcomes if isinstance(outcome, Applied)]

    def _build_copy(
        self, record: Record, mark: ArchiveMark, target: "ResourceRecords"
    ) -> dict[str, Json]:
        """Return a copy without an id."""
        own = {
            name: value
            for name, value in record.value.items()
            if name != "id" and not name.startswith("_")
        }
        return {
            **own,
            _ARCHIVED_AT: render_time(mark.at, target.definition.schema.fields.get(_ARCHIVED_AT)),
            _ARCHIVED_FROM: self._source.name,
            _ORIGINAL_ID: record.value["id"],
        }


def _mark(record: Record, mark: ArchiveMark) -> Put:
    return record.replace({**record.value, ARCHIVING: msgspec.to_builtins(mark)})


async def _build_document(target: "ResourceRecords", copy: dict[str, Json], id: str) -> Json:
    try:
        return await target.prepare(copy, id)
    except InvalidRecord:
        # The archive was replaced since the mark. The record must not be lost.
        return target.stamp({"id": id, **copy})


async def _has_copy(target: "ResourceRecords", mark: ArchiveMark, copy: dict[str, Json]) -> bool:
    """Whether the archive has, or has had, the copy that this move makes."""
    found = await target.keyspace.store.get(target.keyspace.key(mark.id), tombstones=True)
    if found is None:
        return False
    if any(nonce.startswith(mark.token) for nonce in found.trail.split(" ")):
        return True
    # If it was written so often that it no longer remembers, it still says what it is a copy of.
    return (
        found.seq > TRAIL_LENGTH
        and isinstance(found.value, dict)
        and all(found.value.get(name) == copy[name] for name in (_ARCHIVED_FROM, _ORIGINAL_ID))
    )
