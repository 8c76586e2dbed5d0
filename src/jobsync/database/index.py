"""Indexes: find records by something other than their ids, such as a field or their expiry.

Guarantees: a record that was written through an index is found by it, whenever its writer died,
and only where it belongs: every lookup reads the record again.

How: an entry is a record of its own, without content, whose key says all:

    index/sessions/by_region.1f0c66a2/<rank><mark><id><end><nonce>

The rank is what the index orders by. The entry is written before its record and ends in the nonce
of that write, so no key is used twice, and an entry can be removed without a tombstone. A record
names its entries: their nonce is that of its own write, or the one that it keeps under `_entries`
if it has been rewritten since without leaving its rank. So the entry of a record that stays in its
rank stays too, and no lookup misses it. A writer that moves a record to another rank removes the
entry that the record has left; one that loses a race removes its own.

A writer that dies between these steps leaves an entry that its record does not name. It is
dangling: skipped, and removed by whoever finds it once the write that it announces can no longer
arrive. That is known at once if the record remembers that write; otherwise it takes an hour
(`BURIAL_AGE`) by the clocks of writer and finder, which must agree within 45 minutes. A writer
whose entries have taken long looks again whether it may still write the record.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.keys import escape
from jobsync.database.index_entries import (
    AFTER_IDS,
    HASHED,
    PLAIN,
    IndexEntry,
    IndexRule,
    decode_entry,
    find_id,
    find_nonce,
    index_prefix,
    name_entries,
    name_entry,
    parse_name,
    read_time,
    remove_entries,
    skip_id,
    write_entries,
)
from jobsync.errors import Unavailable
from jobsync.stores.contract import (
    BURIAL_AGE,
    Applied,
    Change,
    Conflicted,
    Delete,
    Outcome,
    Put,
    Record,
    Store,
    Unknown,
)
from jobsync.stores.corruption_log import CorruptionLog, read_each
from jobsync.stores.record_codec import build_records

__all__ = ["EntryPage", "Index", "IndexedWriter"]

_PAGE = 1000
_FORMAT = 2
"""The format of records that name their entries: code without indexes must not change them."""

_MAX_WAIT = 600.0
"""Seconds after which a record is not written any more: its entries may be taken for dead."""


class EntryPage(msgspec.Struct, frozen=True):
    """A page of entries in the order of the index."""

    entries: list[IndexEntry]
    next: str | None
    """The key to continue after; None at the end."""


class IndexedWriter:
    """Writes records of one resource together with their entries.

    Args:
        resource: its name.
        rules: of all its indexes.
        components: the clock that dates entries, and the randomness of nonces.
        confirm: raises if records must no longer be written by these rules.
    """

    def __init__(
        self,
        resource: str,
        rules: Iterable[IndexRule],
        components: Components,
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._confirm = confirm
        self._rules = [(rule, index_prefix(resource, rule.key)) for rule in rules]
        self._clock = components.clock
        self._ids = components.ids

    async def write(self, store: Store, changes: Sequence[Change]) -> list[Outcome]:
        """Write records, each after its new entries, and remove the entries that they leave.

        Raises:
            Invalid, Fenced, NewerFormat: a record cannot be written; nothing was.
            Unavailable: no record was written.
        """
        if not self._rules:
            return await store.write([_keep_format(change) for change in changes])
        plans = [
            self._plan(change, change.nonce or nonce)
            for change, nonce in zip(changes, self._ids.nonces(len(changes)), strict=True)
        ]
        entries = [entry for plan in plans for entry in plan.entries]
        records = [plan.change for plan in plans]
        if store.is_atomic:
            outcomes = (await store.write([*entries, *records]))[len(entries) :]
        else:
            # What the store would refuse must leave no entries.
            build_records(records, self._ids)
            began = self._clock.mono()
            await write_entries(store, entries)
            if self._confirm is not None:
                await self._confirm()
            if self._clock.mono() - began > _MAX_WAIT:
                problem = f"index entries took longer than {_MAX_WAIT:g} s"
                raise Unavailable(store.name, problem)
            outcomes = await store.write(records)
        await remove_entries(
            store,
            [
                key
                for plan, outcome in zip(plans, outcomes, strict=True)
                for key in plan.list_useless(outcome)
            ],
        )
        return outcomes

    def build_entries(self, record: Record) -> list[Put]:
        """Return the entries that a record names, whether they exist or not."""
        return [
            self._build_entry(prefix, rank, record, find_nonce(record, rule))
            for rule, prefix in self._rules
            if (rank := rule.rank(record.value)) is not None
        ]

    def _plan(self, change: Change, nonce: str) -> "_PlannedWrite":
        base = None if change.base is None or change.base.deleted else change.base
        value = None if isinstance(change, Delete) else change.value
        entries: list[Put] = []
        own: list[str] = []
        left: list[str] = []
        kept: dict[str, str] = {}
        for rule, prefix in self._rules:
            before = None if base is None else rule.rank(base.value)
            after = None if value is None else rule.rank(value)
            if base is not None and before is not None:
                named = find_nonce(base, rule)
                if after == before:
                    kept[rule.key] = named
                    if base.format != _FORMAT:
                        # It may have been written without any entry, or a backfill has made it.
                        entries.append(self._build_entry(prefix, before, base, named))
                    continue
                left.append(name_entry(prefix, before, base, named))
            if after is not None:
                entry = self._build_entry(prefix, after, change, nonce)
                entries.append(entry)
                own.append(entry.key)
        if isinstance(change, Delete):
            replaced: Change = msgspec.structs.replace(change, nonce=nonce, format=_FORMAT)
        else:
            replaced = msgspec.structs.replace(
                change, nonce=nonce, format=_FORMAT, value=name_entries(value, kept)
            )
        return _PlannedWrite(replaced, entries, left, own)

    def _build_entry(self, prefix: str, rank: str, record: Change | Record, nonce: str) -> Put:
        key = name_entry(prefix, rank, record, nonce)
        value: dict[str, Json] = {"at": round(self._clock.wall().seconds, 3)}
        if key.startswith(f"{prefix}{rank}{HASHED}"):
            value["id"] = find_id(record)
        return Put(key, value)


class _PlannedWrite(msgspec.Struct, frozen=True):
    change: Change
    entries: list[Put]
    """To be written before."""
    left: list[str]
    """Keys of entries that the record leaves."""
    own: list[str]
    """Keys of entries that no other write has."""

    def list_useless(self, outcome: Outcome) -> list[str]:
        """Return the keys of entries that are certainly dangling after the write."""
        match outcome:
            case Applied():
                return self.left
            case Conflicted():
                return self.own
            case Unknown():
                return []


class Index:
    """Finds the records of one resource by one of its indexes.

    Args:
        store: of entries and records.
        resource: its name.
        data: the prefix of its records.
        rule: what the index orders by.
        components: the clock that dates entries.
    """

    def __init__(
        self, store: Store, resource: str, data: str, rule: IndexRule, components: Components
    ) -> None:
        self.prefix = index_prefix(resource, rule.key)
        self._store = store
        self._data = data
        self._rule = rule
        self._clock = components.clock
        self._corruption_log = CorruptionLog(f"index {rule.key} of {resource}", components.events)

    async def find(
        self, rank: str, *, after: str | None = None, limit: int | None = None
    ) -> list[Record]:
        """Return the records of one rank in the order of their ids.

        Args:
            rank: of the records.
            after: an id; only records with later ones.
            limit: the largest number of records to return; all by default.
        """
        found: list[Record] = []
        async for page in self.iterate(rank, after=after, limit=limit):
            found += page
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    async def iterate(
        self, rank: str, *, after: str | None = None, limit: int | None = None
    ) -> AsyncIterator[list[Record]]:
        """Yield pages of the records of one rank in the order of their ids.

        Args:
            rank: of the records.
            after: an id; only records with later ones.
            limit: how many the caller needs, as far as it knows.
        """
        start = f"{self.prefix}{rank}"
        until = start + AFTER_IDS
        size = _PAGE if limit is None else max(1, min(limit, _PAGE))
        position: str | None = start
        if after is not None and not await self._list_keys(start, start + PLAIN, 1):
            position = f"{start}{PLAIN}{skip_id(rank, after)}"
        while position is not None:
            page = await self.list_entries(position, until, size)
            entries, position = page.entries, page.next
            # The caller may need few of these: a filter can drop most.
            size = min(2 * size, _PAGE)
            if entries and entries[0].key.startswith(start + HASHED):
                # The names are not in the order of the ids: read all of them first.
                while position is not None:
                    page = await self.list_entries(position, until, _PAGE)
                    entries, position = [*entries, *page.entries], page.next
                entries.sort(key=lambda entry: entry.id.encode())
            records = await self.match([e for e in entries if _is_after(e.id, after)])
            current = [record for record in records if record is not None]
            if current:
                # A record that leaves and returns has a second entry, perhaps on the next page.
                after = find_id(current[-1])
            yield current

    async def list_entries(self, after: str, until: str, limit: int) -> "EntryPage":
        """Return the entries between two keys, both excluded."""
        keys = await self._list_keys(after, until, limit)
        return EntryPage(await self._parse(keys), keys[-1] if len(keys) == limit else None)

    async def _list_keys(self, after: str, until: str, limit: int) -> list[str]:
        heads = await self._store.heads(self.prefix, after=after, until=until, limit=limit)
        return [head.key for head in heads]

    async def list_due(self, until: str, limit: int, *, after: str = "") -> "EntryPage":
        """Return the entries from the start of the index up to and including a rank."""
        return await self.list_entries(after, f"{self.prefix}{until}{AFTER_IDS}", limit)

    async def match(self, entries: Sequence[IndexEntry]) -> list[Record | None]:
        """Read the records of entries; None where the record does not name the entry.

        Entries that are dangling for good are removed.
        """
        keys = [self._data + escape(entry.id) for entry in entries]
        unique = list(dict.fromkeys(keys))
        records = await read_each(self._store, unique, self._corruption_log.report)
        current: list[Record | None] = []
        dangling: list[tuple[IndexEntry, Record | None]] = []
        for entry, key in zip(entries, keys, strict=True):
            record = records.get(key)
            if record is not None and self._names(record, entry):
                current.append(record)
            else:
                current.append(None)
                if key in records:
                    dangling.append((entry, record))
        await self._remove_dead(dangling)
        return current

    def _names(self, record: Record, entry: IndexEntry) -> bool:
        """Whether a record names an entry."""
        return (
            not record.deleted
            and find_nonce(record, self._rule) == entry.nonce
            and self._rule.rank(record.value) == entry.rank
        )

    async def _parse(self, keys: Sequence[str]) -> list[IndexEntry]:
        """Read what the keys of entries say; the ids of hashed ones are in their values."""
        names = {key: parse_name(key[len(self.prefix) :]) for key in keys}
        hashed = [key for key, name in names.items() if name and name.group(2) == HASHED]
        values = await read_each(self._store, hashed, self._corruption_log.report)
        return self._corruption_log.read_all(
            lambda key: decode_entry(key, names[key], values.get(key)), names
        )

    async def _remove_dead(self, dangling: Sequence[tuple[IndexEntry, Record | None]]) -> None:
        """Remove entries whose write has happened, or can no longer arrive."""
        dead: list[str] = []
        unsure: list[str] = []
        for entry, record in dangling:
            happened = record is not None and record.remembers(entry.nonce)
            (dead if happened else unsure).append(entry.key)
        now = self._clock.wall().seconds
        entries = await read_each(self._store, unsure, self._corruption_log.report)
        dead += [
            key
            for key, entry in entries.items()
            if entry is not None and now - read_time(entry) > BURIAL_AGE
        ]
        await remove_entries(self._store, dead)


def _keep_format(change: Change) -> Change:
    """Return a change that keeps the format of the record that it replaces, if it is known."""
    if change.base is None or change.base.format != _FORMAT:
        return change
    return msgspec.structs.replace(change, format=_FORMAT)


def _is_after(id: str, after: str | None) -> bool:
    return after is None or id.encode() > after.encode()
