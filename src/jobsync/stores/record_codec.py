"""From a change to what is stored, and back from what is stored to a record.

Both directions are the same for every store: a change whose base is in hand determines
the whole next record, so all that a store decides is whether the base is still there.
"""

import re
from collections.abc import Sequence

import msgspec

from jobsync.core.codec import MAX_INTEGER, decode, encode_all
from jobsync.core.ids import NONCE_LENGTH, Ids
from jobsync.core.keys import check_key
from jobsync.errors import Corrupt, Fenced, Invalid, JobsyncError, NewerFormat
from jobsync.stores.contract import TRAIL_LENGTH, Change, Put, Record
from jobsync.stores.history import Line

__all__ = [
    "LIVE_SIZE",
    "MAX_FORMAT",
    "draft",
    "revive",
    "stamp",
    "unwrap",
    "unwrap_lines",
    "wrap",
    "wrap_lines",
]


MAX_FORMAT = 999_999_999
"""The highest format of a value."""

_is_nonce = re.compile(rf"[A-Za-z0-9_-]{{{NONCE_LENGTH}}}").fullmatch
_is_trail = re.compile(
    rf"[A-Za-z0-9_-]{{{NONCE_LENGTH}}}(?: [A-Za-z0-9_-]{{{NONCE_LENGTH}}}){{0,{TRAIL_LENGTH - 1}}}"
).fullmatch
_TRAIL_WIDTH = TRAIL_LENGTH * (NONCE_LENGTH + 1) - 1


def stamp(changes: Sequence[Change], ids: Ids) -> Sequence[Change]:
    """Give a nonce to every change that has none."""
    if all(change.nonce for change in changes):
        return changes
    return [
        change if change.nonce else msgspec.structs.replace(change, nonce=fresh)
        for change, fresh in zip(changes, ids.nonces(len(changes)), strict=True)
    ]


def draft(changes: Sequence[Change], ids: Ids) -> tuple[list[Record], list[str | None]]:
    """Check a batch; give the record that each change leaves, and the JSON text of its value.

    A tombstone has no text.

    Raises:
        Invalid: a key or a value cannot be stored, or a record is changed twice.
        Fenced: the base was written by a later term than the change's.
        NewerFormat: the base was written in a later format than the change's.
    """
    fresh = iter(ids.nonces([change.nonce for change in changes].count("")))
    records = [
        _follow(change, _check_nonce(change) if change.nonce else next(fresh)) for change in changes
    ]
    if len({record.key for record in records}) < len(records):
        raise Invalid(
            "changes",
            sorted(record.key for record in records),
            "change one record twice",
            "send them one after the other",
        )
    texts = encode_all([record.value for record in records])
    return records, [
        None if record.deleted else text for record, text in zip(records, texts, strict=True)
    ]


def _check_nonce(change: Change) -> str:
    """Give the nonce that a change came with, if it may be believed."""
    nonce, base = change.nonce, change.base
    if not _is_nonce(nonce):
        raise Invalid("nonce", nonce, "is not a nonce", "leave it to the store")
    if base is not None and nonce in base.trail:
        raise Invalid("nonce", nonce, "marks a write that this one is based on", "draw another")
    return nonce


def _follow(change: Change, nonce: str) -> Record:
    """Give the record that a change leaves."""
    base, key = change.base, change.key
    if change.epoch is not None or change.format != 1:
        _check_numbers(change)
    if base is None:
        check_key(key)
        seq, epoch, trail = 1, change.epoch or 0, nonce
    else:
        epoch = base.epoch if change.epoch is None else change.epoch
        if base.key != key or base.epoch > epoch or base.format > change.format:
            raise _refuse(change, base)
        seq, trail = base.seq + 1, f"{nonce} {base.trail}"[:_TRAIL_WIDTH]
    if isinstance(change, Put):
        return Record(key, change.value, nonce, seq, epoch, change.format, trail)
    return Record(key, None, nonce, seq, epoch, change.format, trail, deleted=True)


def _check_numbers(change: Change) -> None:
    if not 0 <= (change.epoch or 0) <= MAX_INTEGER:
        raise Invalid("epoch", change.epoch, "is not between 0 and 2⁵³", "count terms from 1")
    if not 1 <= change.format <= MAX_FORMAT:
        raise Invalid("format", change.format, f"is not between 1 and {MAX_FORMAT:,}", "count up")


def _refuse(change: Change, base: Record) -> JobsyncError:
    """Say why a change may not follow its base."""
    key, epoch = change.key, change.epoch
    if base.key != key:
        return Invalid("base", base.key, f"is not a version of {key!r}", "read that record first")
    if epoch is not None and base.epoch > epoch:
        return Fenced(key, epoch, base.epoch)
    return NewerFormat(key, base.format, change.format)


def revive(
    key: str, data: bytes | str | None, seq: int, epoch: int, format: int, trail: str
) -> Record:
    """Make a record of what is stored.

    Raises:
        Corrupt: it is not what any version of this library wrote.
    """
    if not _is_trail(trail):
        raise Corrupt(key, f"its trail is {trail!r}")
    if not (0 < seq <= MAX_INTEGER and 0 <= epoch <= MAX_INTEGER and 0 < format <= MAX_FORMAT):
        raise Corrupt(key, f"its numbers are {seq}, {epoch}, {format}")
    value = None if data is None else decode(data, key)
    return Record(key, value, trail[:NONCE_LENGTH], seq, epoch, format, trail, data is None)


# A record as the bytes of one object, and back.
#
# An object is a JSON array: the trail of nonces, seq, epoch, format, and the value's own
# text byte for byte. A tombstone is the same without a value.
#
#     `["k3JQ…  8xT1…",2,0,1,{"name":"Ann"}]`
#     `["Zw0p…  k3JQ…  8xT1…",3,0,1]`
#
# A tombstone is always shorter than 256 bytes and a live record never is, being padded with
# blanks. So a listing, which shows sizes, tells them apart without reading them.


LIVE_SIZE = 256
"""The size in bytes from which on an object is a live record."""

"""The highest format: with its nine digits the longest tombstone has 255 bytes."""

_NONCE = rf"[A-Za-z0-9_-]{{{NONCE_LENGTH}}}"


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    trail: str
    seq: int
    epoch: int
    format: int
    value: msgspec.Raw = msgspec.Raw()


_open = msgspec.json.Decoder(_Envelope).decode
_split = msgspec.json.Decoder(list[msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


def wrap(record: Record, text: str | None) -> bytes:
    """Give the object of a record; without a value's text, that of a tombstone.

    Raises:
        Invalid: a number is too large, or the nonce is none: its tombstone might not be
            told from a live record.
    """
    if not _is_trail(record.trail):
        raise Invalid("nonce", record.nonce, "is not a nonce", "leave it to the store")
    _check("seq", record.seq, MAX_INTEGER)
    _check("epoch", record.epoch, MAX_INTEGER)
    _check("format", record.format, MAX_FORMAT)
    head = f'["{record.trail}",{record.seq},{record.epoch},{record.format}'
    return f"{head}]".encode() if text is None else f"{head},{text}]".encode().ljust(LIVE_SIZE)


def _check(field: str, number: int, highest: int) -> None:
    if not 0 <= number <= highest:
        raise Invalid(field, number, f"is not between 0 and {highest:,}", "use a smaller number")


def unwrap(key: str, body: bytes, version: str) -> Record:
    """Give the record that an object holds.

    Raises:
        Corrupt: it is not what any version of this library wrote.
    """
    try:
        envelope = _open(body)
    except _UNREADABLE as error:
        raise Corrupt(key, f"not a record ({error})") from error
    data = bytes(envelope.value)
    if not _is_trail(envelope.trail):
        raise Corrupt(key, f"its trail is {envelope.trail!r}")
    if bool(data) is not (len(body) >= LIVE_SIZE):
        raise Corrupt(key, f"a {'value' if data else 'tombstone'} in {len(body)} bytes")
    return Record(
        key,
        decode(data, key) if data else None,
        version,
        envelope.seq,
        envelope.epoch,
        envelope.format,
        envelope.trail,
        not data,
    )


def wrap_lines(lines: Sequence[Line]) -> bytes:
    """Give the object of a batch of lines: a JSON array of their values."""
    return b"[%b]" % b",".join(line.data for line in lines)


def unwrap_lines(key: str, body: bytes, expected: int) -> list[bytes]:
    """Give the texts of the values in a batch.

    Raises:
        Corrupt: they are not the lines that its name tells.
    """
    try:
        values = _split(body)
    except _UNREADABLE as error:
        raise Corrupt(key, f"not a batch of lines ({error})") from error
    if len(values) != expected:
        raise Corrupt(key, f"{len(values)} lines where its name says {expected}")
    return [bytes(value) for value in values]
