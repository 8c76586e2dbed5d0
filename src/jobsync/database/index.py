"""Entries that lead to records by something else than their names: by expiry, by a field.

Promises: a record that was written through an index is found by it, whenever its writer
died; what an entry leads to is read anew, so nothing is found that is not so.

How: the entry is written before the record. It ends in the nonce of the record's write, so
that its name is never used again and it can be removed outright. An entry whose record says
something else, or is not there, is dangling: it is skipped, and swept once the write that it
announces can no longer arrive. That is known at once if the record remembers that write;
otherwise it takes an hour (`BURIAL_AGE`) by the clocks of writer and sweeper, which must
agree within 45 minutes.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.ids import NONCE_LENGTH
from jobsync.core.keys import MAX_SEGMENT, escape
from jobsync.errors import Corrupt, Invalid, OutcomeUnknown
from jobsync.stores.contract import BURIAL_AGE, Outcome, Put, Record, Store, Unknown
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["INDEXES", "Index", "IndexEntry", "RankOf"]

INDEXES = "index/"
"""Where entries are: a level for each resource and index."""

_MARK = "!00"
"""Between rank and nonce. No name holds the byte 0, so a rank sorts before what it begins."""

_MAX_RANK = MAX_SEGMENT - len(_MARK) - NONCE_LENGTH
_PAGE = 1000

RankOf: TypeAlias = Callable[[Json], str | None]
"""Gives the place of a document in the order of an index; None if it has none."""


class IndexEntry(msgspec.Struct, frozen=True):
    """One entry, as it was read."""

    key: str
    rank: str
    nonce: str
    record: str
    """The key of the record that it leads to."""
    at: float
    """When it was written, by its writer's clock."""


class Index:
    """One index of the records under one prefix.

    Args:
        store: where entries and records are; its writes are settled.
        name: which index, as in `sessions/expiry`.
        rank_of: what it orders by.
        components: the clock that dates entries, and the randomness of nonces.
    """

    def __init__(self, store: Store, name: str, rank_of: RankOf, components: Components) -> None:
        self.prefix = f"{INDEXES}{name}/"
        self._store = store
        self._rank_of = rank_of
        self._clock = components.clock
        self._ids = components.ids
        self._witness = CorruptionLog(f"index {name}", components.events)

    async def write(self, changes: Sequence[Put]) -> list[Outcome]:
        """Write records, each after its entry. One that keeps its rank needs no new entry.

        Raises:
            Invalid: a rank is too long; nothing was written.
            OutcomeUnknown: of an entry; no record was written.
            Unavailable: no record was written.
        """
        marked = [
            msgspec.structs.replace(change, nonce=nonce)
            for change, nonce in zip(changes, self._ids.nonces(len(changes)), strict=True)
        ]
        entries = [entry for change in marked if (entry := self._announce(change))]
        if entries:
            outcomes = await self._store.write(entries)
            for entry, outcome in zip(entries, outcomes, strict=True):
                # A conflict is with an earlier copy of itself: nobody else has this name.
                if isinstance(outcome, Unknown):
                    raise OutcomeUnknown(entry.key, outcome.reason)
        return await self._store.write(marked)

    async def find(self, *, until: str | None = None, limit: int | None = None) -> list[Record]:
        """Give records in the order of the index, each once, up to and with a rank."""
        found: dict[str, Record] = {}
        async for entries, records in self._walk(until):
            for entry, record in zip(entries, records, strict=True):
                if record is not None and self._is_right(entry, record):
                    found.setdefault(record.key, record)
                    if len(found) == limit:
                        return list(found.values())
        return list(found.values())

    async def sweep(self, *, until: str | None = None, older_than: float = BURIAL_AGE) -> int:
        """Remove entries that lead nowhere and never will; count them."""
        swept = 0
        async for entries, records in self._walk(until):
            gone = [
                entry.key
                for entry, record in zip(entries, records, strict=True)
                if self._is_over(entry, record, older_than)
            ]
            await self._store.drop(gone)
            swept += len(gone)
        return swept

    def _announce(self, change: Put) -> Put | None:
        rank = self._rank_of(change.value)
        base = change.base
        if rank is None or (base and not base.deleted and self._rank_of(base.value) == rank):
            return None
        if len(segment := escape(rank, "rank")) > _MAX_RANK:
            raise Invalid("rank", rank, f"is longer than {_MAX_RANK}", "index something shorter")
        document = {"record": change.key, "rank": rank, "at": self._clock.wall().seconds}
        return Put(f"{self.prefix}{segment}{_MARK}{change.nonce}", document)

    async def _walk(
        self, until: str | None
    ) -> AsyncIterator[tuple[list[IndexEntry], list[Record | None]]]:
        """Give entries with what they lead to, be it a tombstone, a page at a time."""
        end = None if until is None else f"{self.prefix}{escape(until, 'rank')}{_MARK}~"
        after = ""
        while True:
            page = await self._store.scan(self.prefix, after=after, limit=_PAGE)
            entries = [
                entry
                for record in page
                if (end is None or record.key <= end) and (entry := self._understand(record))
            ]
            keys = list(dict.fromkeys(entry.record for entry in entries))
            found = dict(zip(keys, await self._store.get_many(keys, tombstones=True), strict=True))
            yield entries, [found[entry.record] for entry in entries]
            if len(page) < _PAGE or (end is not None and page[-1].key > end):
                return
            after = page[-1].key

    def _understand(self, record: Record) -> IndexEntry | None:
        try:
            value = record.value
            nonce = record.key[-NONCE_LENGTH:]
            return IndexEntry(record.key, value["rank"], nonce, value["record"], value["at"])
        except (TypeError, KeyError):
            self._witness.report(Corrupt(record.key, "not an entry of an index"))
            return None

    def _is_right(self, entry: IndexEntry, record: Record) -> bool:
        return not record.deleted and self._rank_of(record.value) == entry.rank

    def _is_over(self, entry: IndexEntry, record: Record | None, older_than: float) -> bool:
        """Say whether an entry leads nowhere, and its record's write has arrived or died."""
        if record is not None:
            if self._is_right(entry, record):
                return False
            if record.remembers(entry.nonce):
                return True
        return self._clock.wall().seconds - entry.at > older_than
