"""Encoding of changes and entries for storage, and decoding of what is stored.

It is the same for every store: a change and its base determine the complete next record, so
a store decides only whether the base is still current. An entry of a history is identified by
time, writer and position in its batch, so that sending a batch again adds nothing.
"""

import re
from collections.abc import Sequence

import msgspec

from jobsync.components import NONCE_LENGTH, Ids
from jobsync.core.clock import Wall
from jobsync.core.codec import MAX_INTEGER, MAX_VALUE, Json, decode, encode, encode_all
from jobsync.core.keys import check_key
from jobsync.errors import Corrupt, Fenced, Invalid, JobsyncError, NewerFormat
from jobsync.stores.contract import TRAIL_LENGTH, Change, Entry, Put, Record

__all__ = [
    "MAX_FORMAT",
    "EncodedEntry",
    "assign_nonces",
    "build_records",
    "check_after",
    "check_stream",
    "decode_entry",
    "decode_record",
    "encode_entries",
    "first_id_at",
    "is_trail",
]


MAX_FORMAT = 999_999_999
"""The highest format of a value: with its nine digits the longest tombstone has 255 bytes."""

_MAX_ENTRIES = 10_000
_is_nonce = re.compile(rf"[A-Za-z0-9_-]{{{NONCE_LENGTH}}}").fullmatch
is_trail = re.compile(
    rf"[A-Za-z0-9_-]{{{NONCE_LENGTH}}}(?: [A-Za-z0-9_-]{{{NONCE_LENGTH}}}){{0,{TRAIL_LENGTH - 1}}}"
).fullmatch
_TRAIL_WIDTH = TRAIL_LENGTH * (NONCE_LENGTH + 1) - 1
_is_batch = re.compile(r"[0-9]{13}-[0-9a-f]{12}").fullmatch
_is_id = re.compile(r"([0-9]{13})-[0-9a-f]{12}-[0-9]{5}").fullmatch


class EncodedEntry(msgspec.Struct, frozen=True):
    """An entry, ready to be stored."""

    id: str
    data: bytes


def assign_nonces(changes: Sequence[Change], ids: Ids) -> Sequence[Change]:
    """Return the changes, with a nonce for each one that has none."""
    if all(change.nonce for change in changes):
        return changes
    return [
        change if change.nonce else msgspec.structs.replace(change, nonce=fresh)
        for change, fresh in zip(changes, ids.nonces(len(changes)), strict=True)
    ]


def build_records(changes: Sequence[Change], ids: Ids) -> tuple[list[Record], list[str | None]]:
    """Check a batch; return the record after each change, and the JSON text of its value.

    A tombstone has no text.

    Raises:
        Invalid: a key or a value cannot be stored, or a record is changed twice.
        Fenced: the base was written by a later term than the change's.
        NewerFormat: the base was written in a later format than the change's.
    """
    fresh = iter(ids.nonces([change.nonce for change in changes].count("")))
    records = [
        _next_record(change, _check_nonce(change) if change.nonce else next(fresh))
        for change in changes
    ]
    if len({record.key for record in records}) < len(records):
        raise Invalid(
            "changes",
            sorted(record.key for record in records),
            "must not change one record twice",
            "send them one after the other",
        )
    texts = encode_all([record.value for record in records])
    return records, [
        None if record.deleted else text.decode()
        for record, text in zip(records, texts, strict=True)
    ]


def _check_nonce(change: Change) -> str:
    nonce, base = change.nonce, change.base
    if not _is_nonce(nonce):
        raise Invalid("nonce", nonce, "must be a nonce", "let the store generate it")
    if base is not None and nonce in base.trail:
        raise Invalid("nonce", nonce, "must not be that of an earlier write", "use a new one")
    return nonce


def _next_record(change: Change, nonce: str) -> Record:
    base, key = change.base, change.key
    if change.epoch is not None or change.format != 1:
        _check_numbers(change)
    if base is None:
        check_key(key)
        seq, epoch, trail = 1, change.epoch or 0, nonce
    else:
        epoch = base.epoch if change.epoch is None else change.epoch
        if base.key != key or base.epoch > epoch or base.format > change.format:
            raise _refusal(change, base)
        seq, trail = base.seq + 1, f"{nonce} {base.trail}"[:_TRAIL_WIDTH]
    if isinstance(change, Put):
        return Record(key, change.value, nonce, seq, epoch, change.format, trail)
    return Record(key, None, nonce, seq, epoch, change.format, trail, deleted=True)


def _check_numbers(change: Change) -> None:
    if not 0 <= (change.epoch or 0) <= MAX_INTEGER:
        raise Invalid("epoch", change.epoch, "must be between 0 and 2⁵³", "count terms from 1")
    if not 1 <= change.format <= MAX_FORMAT:
        raise Invalid("format", change.format, f"must be between 1 and {MAX_FORMAT:,}", "count up")


def _refusal(change: Change, base: Record) -> JobsyncError:
    """Return the reason why a change may not follow its base."""
    key, epoch = change.key, change.epoch
    if base.key != key:
        return Invalid("base", base.key, f"must be a version of {key!r}", "read that record first")
    if epoch is not None and base.epoch > epoch:
        return Fenced(key, epoch, base.epoch)
    return NewerFormat(key, base.format, change.format)


def decode_record(
    key: str, data: bytes | str | None, seq: int, epoch: int, format: int, trail: str
) -> Record:
    """Return the record of stored columns.

    Raises:
        Corrupt: no version of this library wrote this.
    """
    if not is_trail(trail):
        raise Corrupt(key, f"its trail is {trail!r}")
    if not (0 < seq <= MAX_INTEGER and 0 <= epoch <= MAX_INTEGER and 0 < format <= MAX_FORMAT):
        raise Corrupt(key, f"its numbers are {seq}, {epoch}, {format}")
    value = None if data is None else decode(data, key)
    return Record(key, value, trail[:NONCE_LENGTH], seq, epoch, format, trail, data is None)


def check_stream(stream: str) -> None:
    """Check that every store can keep a history with this name.

    Raises:
        Invalid: states what is wrong with the name.
    """
    check_key(stream, "stream")


def check_after(after: str) -> None:
    """Check that a position is empty or the id of an entry.

    Raises:
        Invalid: it is neither.
    """
    if after and not _is_id(after):
        raise Invalid("after", after, "must be the id of an entry", "pass the last entry's id")


def encode_entries(entries: Sequence[Json], batch: str) -> list[EncodedEntry]:
    """Encode the entries of one batch, each with its id.

    Raises:
        Invalid: one is not JSON, or together they are too many or too large.
    """
    if not _is_batch(batch):
        raise Invalid("batch", batch, "must be the name of a batch", "use Ids.batch()")
    if len(entries) > _MAX_ENTRIES:
        raise Invalid(
            "entries", len(entries), f"must have at most {_MAX_ENTRIES:,} items", "append in parts"
        )
    encoded = [
        EncodedEntry(f"{batch}-{i:05d}", encode(entry, f"entries[{i}]"))
        for i, entry in enumerate(entries)
    ]
    size = sum(len(entry.data) for entry in encoded)
    if size > MAX_VALUE:
        raise Invalid(
            "entries",
            f"{size:,} bytes",
            f"must have at most {MAX_VALUE:,} bytes",
            "append in parts",
        )
    return encoded


def decode_entry(entry_id: str, stream: str, data: bytes | str) -> Entry:
    """Return the entry of stored columns.

    Raises:
        Corrupt: no version of this library wrote this.
    """
    found = _is_id(entry_id)
    if found is None:
        raise Corrupt(f"{stream}#{entry_id}", "its id is not that of an entry")
    at = Wall(int(found.group(1)) / 1000)
    return Entry(stream, entry_id, at, decode(data, f"{stream}#{entry_id}"))


def first_id_at(at: Wall) -> str:
    """Return what sorts before every id of that moment and after all earlier ids."""
    return f"{int(at.seconds * 1000):013d}"
