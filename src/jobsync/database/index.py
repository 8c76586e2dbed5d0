"""Indexes: find records by something other than their names, such as expiry or a field.

Guarantees: a record that was written through an index is found by it, whenever its writer died.
Every lookup reads the record again, so an outdated entry finds nothing.

How: the entry is written before the record. Its key ends in the nonce of the record's write, so
it is never used again and the entry can be removed without a tombstone. An entry whose record
has another rank, or does not exist, is dangling: it is skipped, and removed once the write that
it announces can no longer arrive. That is known at once if the record remembers that write;
otherwise it takes an hour (`BURIAL_AGE`) by the clocks of writer and sweeper, which must agree
within 45 minutes.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

import msgspec

from jobsync.components import NONCE_LENGTH, Components
from jobsync.core.codec import Json
from jobsync.core.keys import MAX_SEGMENT, escape
from jobsync.errors import Corrupt, Invalid, OutcomeUnknown
from jobsync.stores.contract import BURIAL_AGE, Outcome, Put, Record, Store, Unknown
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["INDEXES", "Index", "IndexEntry", "RankOf"]

INDEXES = "index/"
"""The prefix of entries; each resource and index has a level below it."""

_MARK = "!00"
"""Between rank and nonce. No rank contains the byte 0, so a rank sorts before longer ones."""

_MAX_RANK = MAX_SEGMENT - len(_MARK) - NONCE_LENGTH
_PAGE = 1000

RankOf: TypeAlias = Callable[[Json], str | None]
"""Returns the rank of a document in the order of an index; None to leave it out."""


class IndexEntry(msgspec.Struct, frozen=True):
    """One entry that was read."""

    key: str
    rank: str
    nonce: str
    record: str
    """The key of its record."""
    at: float
    """When it was written, by its writer's clock."""


class Index:
    """One index of the records under one prefix.

    Args:
        store: of entries and records; its writes are settled.
        name: such as `sessions/expiry`.
        rank_of: what it orders by.
        components: the clock that dates entries, and the randomness of nonces.
    """

    def __init__(self, store: Store, name: str, rank_of: RankOf, components: Components) -> None:
        self.prefix = f"{INDEXES}{name}/"
        self._store = store
        self._rank_of = rank_of
        self._clock = components.clock
        self._ids = components.ids
        self._corruption_log = CorruptionLog(f"index {name}", components.events)

    async def write(self, changes: Sequence[Put]) -> list[Outcome]:
        """Write records, each after its entry. A record that keeps its rank needs no new entry.

        Raises:
            Invalid: a rank is too long; nothing was written.
            OutcomeUnknown: an entry may or may not have been written; no record was.
            Unavailable: no record was written.
        """
        puts = [
            msgspec.structs.replace(change, nonce=nonce)
            for change, nonce in zip(changes, self._ids.nonces(len(changes)), strict=True)
        ]
        entries = [entry for change in puts if (entry := self._build_entry(change))]
        if entries:
            outcomes = await self._store.write(entries)
            for entry, outcome in zip(entries, outcomes, strict=True):
                # A conflict can only be with an earlier copy of this write: the key is unique.
                if isinstance(outcome, Unknown):
                    raise OutcomeUnknown(entry.key, outcome.reason)
        return await self._store.write(puts)

    async def find(self, *, until: str | None = None, limit: int | None = None) -> list[Record]:
        """Return records in the order of the index, each once, up to and including a rank."""
        found: dict[str, Record] = {}
        async for entries, records in self._iterate(until):
            for entry, record in zip(entries, records, strict=True):
                if record is not None and self._is_current(entry, record):
                    found.setdefault(record.key, record)
                    if len(found) == limit:
                        return list(found.values())
        return list(found.values())

    async def sweep(self, *, until: str | None = None, older_than: float = BURIAL_AGE) -> int:
        """Remove entries that are dangling for good; return how many."""
        swept = 0
        async for entries, records in self._iterate(until):
            dead = [
                entry.key
                for entry, record in zip(entries, records, strict=True)
                if self._is_dead(entry, record, older_than)
            ]
            await self._store.drop(dead)
            swept += len(dead)
        return swept

    def _build_entry(self, change: Put) -> Put | None:
        rank = self._rank_of(change.value)
        base = change.base
        if rank is None or (base and not base.deleted and self._rank_of(base.value) == rank):
            return None
        if len(segment := escape(rank, "rank")) > _MAX_RANK:
            raise Invalid(
                "rank", rank, f"must have at most {_MAX_RANK} characters", "index something shorter"
            )
        document = {"record": change.key, "rank": rank, "at": self._clock.wall().seconds}
        return Put(f"{self.prefix}{segment}{_MARK}{change.nonce}", document)

    async def _iterate(
        self, until: str | None
    ) -> AsyncIterator[tuple[list[IndexEntry], list[Record | None]]]:
        """Yield pages of entries with their records or tombstones."""
        end = None if until is None else f"{self.prefix}{escape(until, 'rank')}{_MARK}~"
        after = ""
        while True:
            page = await self._store.scan(self.prefix, after=after, limit=_PAGE)
            entries = [
                entry
                for record in page
                if (end is None or record.key <= end) and (entry := self._decode(record))
            ]
            keys = list(dict.fromkeys(entry.record for entry in entries))
            found = dict(zip(keys, await self._store.get_many(keys, tombstones=True), strict=True))
            yield entries, [found[entry.record] for entry in entries]
            if len(page) < _PAGE or (end is not None and page[-1].key > end):
                return
            after = page[-1].key

    def _decode(self, record: Record) -> IndexEntry | None:
        try:
            value = record.value
            nonce = record.key[-NONCE_LENGTH:]
            return IndexEntry(record.key, value["rank"], nonce, value["record"], value["at"])
        except (TypeError, KeyError):
            self._corruption_log.report(Corrupt(record.key, "not an index entry"))
            return None

    def _is_current(self, entry: IndexEntry, record: Record) -> bool:
        return not record.deleted and self._rank_of(record.value) == entry.rank

    def _is_dead(self, entry: IndexEntry, record: Record | None, older_than: float) -> bool:
        """Whether an entry is dangling, and its record's write can no longer arrive."""
        if record is not None:
            if self._is_current(entry, record):
                return False
            if record.remembers(entry.nonce):
                return True
        return self._clock.wall().seconds - entry.at > older_than
