"""A record as the bytes of one object, and back.

An object is a JSON array: the trail of nonces, seq, epoch, format, and the value's own
text byte for byte. A tombstone is the same without a value.

    ["k3JQ…  8xT1…",2,0,1,{"name":"Ann"}]
    ["Zw0p…  k3JQ…  8xT1…",3,0,1]

A tombstone is always shorter than 256 bytes and a live record never is, being padded with
blanks. So a listing, which shows sizes, tells them apart without reading them.
"""

import re
from collections.abc import Sequence

import msgspec

from jobsync.core.codec import MAX_INTEGER, decode
from jobsync.core.ids import NONCE_LENGTH
from jobsync.errors import Corrupt, Invalid
from jobsync.stores.contract import TRAIL_LENGTH, Record
from jobsync.stores.lines import Line

__all__ = ["LIVE_SIZE", "MAX_FORMAT", "unwrap", "unwrap_lines", "wrap", "wrap_lines"]

LIVE_SIZE = 256
"""The size in bytes from which on an object is a live record."""

MAX_FORMAT = 999_999_999
"""The highest format: with its nine digits the longest tombstone has 255 bytes."""

_NONCE = rf"[A-Za-z0-9_-]{{{NONCE_LENGTH}}}"
_is_trail = re.compile(rf"{_NONCE}(?: {_NONCE}){{0,{TRAIL_LENGTH - 1}}}").fullmatch


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
