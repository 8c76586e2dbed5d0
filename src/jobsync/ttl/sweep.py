"""Finds the expired records of a resource and deals with them by its rule.

Guarantees: only a record that has expired by the clock at that moment is touched, and only the
version that was read: one that is renewed meanwhile stays. One record that cannot be dealt with
stops none of the others. What a sweep leaves, the next one finds.

Cost: one listing, if nothing is due, and a read of the definition if the last one was half a minute
ago. Otherwise a listing and a read of the records for each batch, their removal, and one read of
the definition, because its rule may have changed.

Hooks of the resource do not run. Its events are emitted.
"""

from collections.abc import Callable, Sequence

import msgspec

from jobsync.core.clock import Seconds
from jobsync.core.codec import Json
from jobsync.core.expiry import ExpiryRule, OnExpire, rank_of_time, render_time
from jobsync.core.schema import Fields
from jobsync.database.archive import read_mark
from jobsync.database.definition import IndexState
from jobsync.database.document import UPDATED, Document
from jobsync.database.index_entries import IndexEntry
from jobsync.database.resource import Resource
from jobsync.database.resource_records import DEFINITION_AGE
from jobsync.errors import Corrupt, Invalid, NewerFormat
from jobsync.stores.contract import Applied, Change, Conflicted, Outcome, Record, Unknown
from jobsync.ttl.callback import ExpiryCallback

__all__ = ["ResourceSweep", "SweepCounts", "SweepListener"]

_IS_DELETED = "is_deleted"


class SweepCounts(msgspec.Struct):
    """How many records a sweep has dealt with, and how."""

    deleted: int = 0
    soft_deleted: int = 0
    archived: int = 0
    kept: int = 0
    """By a callback."""
    errors: int = 0

    @property
    def expired(self) -> int:
        """How many had expired and were dealt with."""
        return self.deleted + self.soft_deleted + self.archived + self.kept

    def add(self, other: "SweepCounts") -> None:
        """Add the counts of another sweep."""
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class SweepListener(msgspec.Struct, frozen=True):
    """What a sweep reports."""

    on_expired: Callable[[Document, OnExpire, Seconds, bool], None]
    """Called with each record that was dealt with, how, when it had expired, and whether a callback
    kept it."""
    on_error: Callable[[str | None, str], None]
    """Called with the id of a record, or None, and the problem."""


class _Expired(msgspec.Struct, frozen=True):
    """A record that has expired."""

    document: Document
    record: Record
    expired_at: Seconds

    @property
    def id(self) -> str:
        """Of the record."""
        return str(self.record.value["id"])


class ResourceSweep:
    """The sweeps of one resource.

    Args:
        resource: whose records expire.
        callback: asked about expired records, if the rule says so.
        get_now: returns the time in seconds since 1970, or raises why it is not known.
        batch_size: how many records are dealt with at a time.
        listener: what is reported.
        counts: are added to, also by a sweep that does not end.
    """

    def __init__(
        self,
        resource: Resource,
        callback: ExpiryCallback | None,
        get_now: Callable[[], Seconds],
        batch_size: int,
        listener: SweepListener,
        counts: SweepCounts,
    ) -> None:
        self._counts = counts
        self._resource = resource
        self._records = resource.records
        self._callback = callback
        self._get_now = get_now
        self._batch_size = batch_size
        self._listener = listener

    async def run(self) -> None:
        """Deal with all records that have expired by now.

        Raises:
            NewerFormat: newer code has defined the resource, and sweeps it.
            Unavailable: the store does not answer, or the time is not known.
        """
        until = rank_of_time(self._get_now())
        await self._records.refresh_definition(DEFINITION_AGE)
        state, is_checked, after = self._find_index(), False, ""
        while state is not None:
            page = await self._records.open_index(state).list_due(
                until, self._batch_size, after=after
            )
            if page.entries and not is_checked:
                is_checked = True
                await self._records.refresh_definition(0.0)
                self._records.check_format()
                current = self._find_index()
                if current is None or current.key != state.key:
                    # Another process has changed the rule.
                    state = current
                    continue
            if page.entries:
                await self._handle(state, page.entries)
            if page.next is None or not self._may_go_on:
                break
            after = page.next

    def _find_index(self) -> IndexState | None:
        return self._records.definition.find_index("expiry", "expiry")

    @property
    def _may_go_on(self) -> bool:
        return self._callback is None or self._callback.has_room

    async def _handle(self, state: IndexState, entries: Sequence[IndexEntry]) -> None:
        """Deal with the records of some entries of an index."""
        records = await self._records.open_index(state).match(entries)
        current, now = self._find_index(), self._get_now()
        if current is None or current.key != state.key or not isinstance(current.rule, ExpiryRule):
            # The rule has changed during the sweep; the next one goes by the new index.
            return
        rule = current.rule
        expired: list[_Expired] = []
        marked: list[_Expired] = []
        for entry, record in zip(entries, records, strict=True):
            if record is None:
                continue
            expires_at = rule.expires_at(record.value)
            if expires_at is None or expires_at > now:
                continue
            try:
                found = _Expired(Document(record), record, expires_at)
            except Corrupt as error:
                self._report_error(entry.id, str(error))
            else:
                (expired if read_mark(record) is None else marked).append(found)
        await self._complete_moves(marked)
        await self._apply(rule, expired, now)

    async def _apply(self, rule: ExpiryRule, expired: Sequence[_Expired], now: Seconds) -> None:
        if not expired:
            return
        match rule.on_expire:
            case "hard-delete":
                self._counts.deleted += await self._delete(expired, rule.on_expire)
            case "soft-delete":
                self._counts.soft_deleted += await self._soft_delete(rule, expired, now)
            case "archive":
                await self._archive(rule, expired, now)
            case "callback":
                await self._ask(rule, expired)

    async def _delete(self, expired: Sequence[_Expired], on_expire: OnExpire) -> int:
        changes = [each.record.delete() for each in expired]
        done = await self._write(expired, changes)
        self._records.report_deleted(*(each.id for each, _ in done))
        for each, _ in done:
            self._report(each, on_expire)
        return len(done)

    async def _soft_delete(
        self, rule: ExpiryRule, expired: Sequence[_Expired], now: Seconds
    ) -> int:
        marks = _build_marks(rule, self._records.definition.schema.fields, now)
        changes = [each.record.replace({**each.record.value, **marks}) for each in expired]
        done = await self._write(expired, changes)
        self._records.report_updated(*(each.id for each, _ in done))
        for each, _ in done:
            self._report(each, rule.on_expire)
        return len(done)

    async def _archive(self, rule: ExpiryRule, expired: Sequence[_Expired], now: Seconds) -> None:
        planned = await self._records.moves.plan(
            [each.record for each in expired],
            rule.archive_resource or "",
            now,
            keep_id=rule.keep_original_id,
        )
        movable: list[_Expired] = []
        changes: list[Change] = []
        for each, change in zip(expired, planned, strict=True):
            if isinstance(change, Exception):
                self._report_error(each.id, f"cannot be archived: {change}")
            else:
                movable.append(each)
                changes.append(change)
        marked = await self._write(movable, changes)
        await self._complete_moves(
            [msgspec.structs.replace(each, record=record) for each, record in marked]
        )

    async def _complete_moves(self, marked: Sequence[_Expired]) -> None:
        """Complete moves to the archive, which this or an earlier sweep has begun.

        That sweep may have gone by another rule.
        """
        if not marked:
            return
        result = await self._records.moves.complete([each.record for each in marked])
        by_key = {each.record.key: each for each in marked}
        for record in result.archived:
            self._report(by_key[record.key], "archive")
        for record in result.unsure:
            self._report_error(by_key[record.key].id, "its move is not complete")
        self._counts.archived += len(result.archived)

    async def _ask(self, rule: ExpiryRule, expired: Sequence[_Expired]) -> None:
        if self._callback is None:
            self._counts.errors += len(expired)
            self._listener.on_error(None, "its rule needs a callback, which this process lacks")
            return
        verdicts = await self._callback.ask([each.document for each in expired], self._resource)
        doomed: list[_Expired] = []
        for each, verdict in zip(expired, verdicts, strict=True):
            if verdict is True:
                doomed.append(each)
            elif verdict is False:
                self._counts.kept += 1
                self._report(each, rule.on_expire, is_kept=True)
            else:
                self._report_error(each.id, str(verdict))
        # The callback took its time; meanwhile the clock may have turned out to be wrong.
        self._get_now()
        self._counts.deleted += await self._delete(doomed, rule.on_expire)

    async def _write(
        self, expired: Sequence[_Expired], changes: Sequence[Change]
    ) -> list[tuple[_Expired, Record]]:
        """Change records that nobody has changed since; return those, with their new versions."""
        done: list[tuple[_Expired, Record]] = []
        outcomes = await self._write_apart(changes)
        for each, outcome in zip(expired, outcomes, strict=True):
            match outcome:
                case Applied(record):
                    done.append((each, record))
                case Conflicted():
                    # Renewed, or removed by another process.
                    continue
                case Unknown(reason):
                    self._report_error(each.id, f"its outcome is unknown: {reason}")
                case _:
                    self._report_error(each.id, str(outcome))
        return done

    async def _write_apart(
        self, changes: Sequence[Change]
    ) -> list[Outcome | Invalid | NewerFormat]:
        """Write changes; one that is refused stops none of the others."""
        try:
            return [*await self._records.write(changes)]
        except (Invalid, NewerFormat) as error:
            if len(changes) == 1:
                return [error]
        middle = len(changes) // 2
        return [
            *await self._write_apart(changes[:middle]),
            *await self._write_apart(changes[middle:]),
        ]

    def _report(self, each: _Expired, on_expire: OnExpire, *, is_kept: bool = False) -> None:
        self._listener.on_expired(each.document, on_expire, each.expired_at, is_kept)

    def _report_error(self, id: str, problem: str) -> None:
        self._counts.errors += 1
        self._listener.on_error(id, problem)


def _build_marks(rule: ExpiryRule, fields: Fields, now: Seconds) -> dict[str, Json]:
    """Return the fields that a soft-delete sets."""
    name = rule.delete_field or ""
    marks: dict[str, Json] = {name: render_time(now, fields.get(name)), UPDATED: round(now, 3)}
    match fields.get(_IS_DELETED):
        case None:
            pass
        case field if field.kind in {"boolean", "json"}:
            marks[_IS_DELETED] = True
        case field if field.kind == "string":
            marks[_IS_DELETED] = "true"
    return marks
