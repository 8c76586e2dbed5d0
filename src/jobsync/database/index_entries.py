"""The entries of indexes: how they are named, and how a record names those that it has.

An entry is a record without content, whose key says all; see `jobsync.database.index`.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from jobsync.components import NONCE_LENGTH
from jobsync.core.codec import Json
from jobsync.core.keys import MAX_SEGMENT, escape, unescape
from jobsync.database.index_notes import remove_notes
from jobsync.errors import Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import Change, Put, Record, Store, Unknown
from jobsync.stores.paging import drop_all

__all__ = [
    "AFTER_IDS",
    "ENTRIES",
    "HASHED",
    "INDEXES",
    "PLAIN",
    "IndexEntry",
    "IndexRule",
    "decode_entry",
    "find_id",
    "find_nonce",
    "index_prefix",
    "name_entries",
    "name_entry",
    "parse_name",
    "read_time",
    "remove_entries",
    "remove_index",
    "skip_id",
    "write_entries",
]

INDEXES = "index/"
"""The prefix of entries; each index of a resource has a level below it."""

ENTRIES = "_entries"
"""The field of a record with the nonces of the entries that are older than its last write."""

# Ranks and escaped ids contain none of these. A hash sorts before the ids, so that whoever lists
# a rank learns first whether the order of the names is the order of the ids.
HASHED = "!00"
PLAIN = "!01"
AFTER_IDS = "!02"
_END = "!00"
_AFTER_NONCES = "~"

_HASH_LENGTH = 40
parse_name = re.compile(
    rf"(.*?)({HASHED}|{PLAIN})(.+){_END}(.{{{NONCE_LENGTH}}})", re.DOTALL
).fullmatch


class IndexRule(Protocol):
    """What an index orders by."""

    @property
    def key(self) -> str:
        """The name of the index."""
        ...

    def rank(self, document: Json) -> str | None:
        """Return the rank of a document, as a part of a key; None to leave it out."""
        ...


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry that was read."""

    key: str
    rank: str
    id: str
    """Of the record."""
    nonce: str


def index_prefix(resource: str, index: str) -> str:
    """Return the prefix of the entries of an index."""
    return f"{INDEXES}{resource}/{index}/"


def name_entry(prefix: str, rank: str, record: Change | Record, nonce: str) -> str:
    """Return the key of an entry of a record."""
    segment = record.key.rpartition("/")[2]
    if len(segment) <= _id_room(rank):
        return f"{prefix}{rank}{PLAIN}{segment}{_END}{nonce}"
    return f"{prefix}{rank}{HASHED}{_hash(segment)}{_END}{nonce}"


def _id_room(rank: str) -> int:
    return MAX_SEGMENT - len(rank) - len(PLAIN) - len(_END) - NONCE_LENGTH


def skip_id(rank: str, id: str) -> str:
    """Return what sorts after the entries of an id, and before those of later ids."""
    segment = escape(id)
    room = _id_room(rank)
    return f"{segment}{_END}{_AFTER_NONCES}" if len(segment) <= room else segment[:room]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]


def find_id(record: Change | Record) -> str:
    """Return the id of a record."""
    return unescape(record.key.rpartition("/")[2])


def find_nonce(record: Record, rule: IndexRule) -> str:
    """Return the nonce of the entry that a record names in an index."""
    kept = record.value.get(ENTRIES) if isinstance(record.value, dict) else None
    nonce = kept.get(rule.key) if isinstance(kept, dict) else None
    return nonce if isinstance(nonce, str) else record.nonce


def name_entries(value: Json, kept: Mapping[str, str]) -> Json:
    """Return a document that names the entries that it keeps."""
    rest = {name: field for name, field in value.items() if name != ENTRIES}
    return {**rest, ENTRIES: dict(kept)} if kept else rest


def decode_entry(key: str, name: re.Match[str] | None, value: Record | None) -> IndexEntry | None:
    """Return the entry with this key; None if its value is needed, and cannot be read.

    Raises:
        Corrupt: it is not an entry.
    """
    if name is None:
        raise Corrupt(key, "not the name of an index entry")
    rank, mark, segment, nonce = name.groups()
    if mark == PLAIN:
        return IndexEntry(key, rank, unescape(segment), nonce)
    if value is None:
        return None
    found = value.value.get("id") if isinstance(value.value, dict) else None
    if not isinstance(found, str):
        raise Corrupt(key, "an index entry without the id of its record")
    return IndexEntry(key, rank, found, nonce)


def read_time(entry: Record) -> float:
    """Return when an entry was written; the distant past if it does not say."""
    at = entry.value.get("at") if isinstance(entry.value, dict) else None
    return at if isinstance(at, int | float) else 0.0


async def remove_index(store: Store, resource: str, key: str) -> None:
    """Remove all entries of an index, and the notes on its backfill."""
    await drop_all(store, index_prefix(resource, key))
    await remove_notes(store, key)


async def remove_entries(store: Store, keys: Sequence[str]) -> None:
    """Remove entries that no record names. What cannot be removed now is found again."""
    if keys:
        try:
            await store.drop(keys)
        except (Unavailable, Misconfigured, OutcomeUnknown):
            # They are dangling, and harmless; this process may have no right to remove.
            return


async def write_entries(store: Store, entries: Sequence[Put]) -> None:
    """Write entries, before their records.

    Raises:
        Unavailable: some may not have been written.
    """
    outcomes = await store.write(entries) if entries else []
    for entry, outcome in zip(entries, outcomes, strict=True):
        # A conflict can only be with an equal entry: the key says all.
        if isinstance(outcome, Unknown):
            raise Unavailable(store.name, f"the index entry {entry.key}: {outcome.reason}")
