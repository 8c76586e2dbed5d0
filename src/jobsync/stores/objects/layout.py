"""Names and contents of the objects in a bucket.

Names::

    <prefix>/r3/user/by-name/ann                     a record: r and its depth, then its key
    <prefix>/h2/history/a/<batch>-<entries>          a batch of entries: h and the stream's depth

The depth keeps every folder to one kind of object: beside the objects of one level there is
never a deeper folder. So listing a level is listing a folder, objects below it cost nothing,
and the order is the byte order of the names even on servers that list in tree order. A batch's
name has the number of its entries, so that a listing shows what to read and what was discarded.

Contents: a record is a JSON array of the trail of nonces, seq, epoch, format, and the value's
own text byte for byte. A tombstone is the same without a value::

    ["k3JQ…  8xT1…",2,0,1,{"name":"Ann"}]
    ["Zw0p…  k3JQ…  8xT1…",3,0,1]

A tombstone is always shorter than 256 bytes; a live record never is, because it is padded with
blanks. So a listing, which shows sizes, tells them apart without reading them. It shows a record's
mark in the same way: the size of a marked object, divided by 16, leaves its mark. A batch is a JSON
array of the values of its entries.
"""

import re
from collections.abc import Sequence

import msgspec

from jobsync.core.codec import MAX_INTEGER, decode
from jobsync.core.keys import MAX_KEY, check_key
from jobsync.errors import Corrupt, Invalid
from jobsync.stores.contract import MAX_MARK, Record
from jobsync.stores.record_codec import MAX_FORMAT, EncodedEntry, is_trail

__all__ = [
    "LIVE_SIZE",
    "BatchName",
    "ObjectNames",
    "decode_batch",
    "decode_object",
    "encode_batch",
    "encode_object",
    "is_segment",
    "is_tombstone",
    "read_mark",
]

LIVE_SIZE = 256
"""The size in bytes from which an object is a live record and not a tombstone."""

_LEAST_SIZE = 22
"""The size in bytes of the smallest tombstone."""

_MAX_NAME = 1024  # bytes, S3's limit
_is_batch_name = re.compile(r"([0-9]{13}-[0-9a-f]{12})-([0-9]{5})").fullmatch


class BatchName(msgspec.Struct, frozen=True):
    """The name of a batch's object."""

    batch: str
    size: int
    """How many entries the batch has."""

    def __str__(self) -> str:
        return f"{self.batch}-{self.size:05d}"

    @classmethod
    def parse(cls, text: str) -> "BatchName | None":
        """Parse the last segment of an object's name; None if it does not name a batch."""
        found = _is_batch_name(text)
        return cls(found.group(1), int(found.group(2))) if found else None


class ObjectNames:
    """Builds the names of objects.

    Args:
        prefix: jobsync's part of the bucket, without a slash at its end.
    """

    def __init__(self, prefix: str) -> None:
        self._root = f"{prefix}/" if prefix else ""
        longest = f"{self._root}h8//{BatchName('0' * 26, 0)}"
        self._max_stream = min(MAX_KEY, _MAX_NAME - len(longest))

    def of_record(self, key: str) -> str:
        """Return the name of a record's object."""
        return f"{self._root}r{key.count('/') + 1}/{key}"

    def folder_of_level(self, prefix: str) -> str:
        """Return the folder of the records under a prefix, with a slash at its end."""
        return self.of_record(prefix)

    def folder_of_stream(self, stream: str) -> str:
        """Return the folder of a history, with a slash at its end."""
        return f"{self._root}h{stream.count('/') + 1}/{stream}/"

    def check_stream(self, stream: str) -> None:
        """Check that a history's name leaves room for the names of its batches.

        Raises:
            Invalid: states what is wrong with the name.
        """
        check_key(stream, "stream", room=self._max_stream)


def is_segment(name: str) -> bool:
    """Whether a name can be the last segment of a key; if not, jobsync did not write it."""
    try:
        check_key(name)
    except Invalid:
        return False
    return "/" not in name


class _RecordObject(msgspec.Struct, frozen=True, array_like=True):
    trail: str
    seq: int
    epoch: int
    format: int
    value: msgspec.Raw = msgspec.Raw()


_decode_record_object = msgspec.json.Decoder(_RecordObject).decode
_split_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


def encode_object(record: Record, text: str | None, mark: int = 0) -> bytes:
    """Return the content of a record's object; without a value's text, that of a tombstone.

    Args:
        record: the record.
        text: its value as JSON.
        mark: what a listing shows of it; 0 for nothing.

    Raises:
        Invalid: a number is too large, or the nonce is malformed: its tombstone could be
            mistaken for a live record.
    """
    if not is_trail(record.trail):
        raise Invalid("nonce", record.nonce, "must be a nonce", "let the store generate it")
    _check_number("seq", record.seq, MAX_INTEGER)
    _check_number("epoch", record.epoch, MAX_INTEGER)
    _check_number("format", record.format, MAX_FORMAT)
    head = f'["{record.trail}",{record.seq},{record.epoch},{record.format}'
    if text is None:
        return f"{head}]".encode()
    content = f"{head},{text}]".encode().ljust(LIVE_SIZE)
    if mark:
        _check_number("mark", mark, MAX_MARK)
        content += b" " * ((mark - len(content)) % (MAX_MARK + 1))
    return content


def is_tombstone(size: int) -> bool:
    """Whether an object of this size is a tombstone, if this library wrote it.

    What is even smaller was written by somebody else: it is listed, and found to be unreadable.
    """
    return _LEAST_SIZE <= size < LIVE_SIZE


def read_mark(size: int) -> int:
    """Return the mark of a record whose object has this size."""
    return size % (MAX_MARK + 1) if size >= LIVE_SIZE else 0


def _check_number(field: str, number: int, highest: int) -> None:
    if not 0 <= number <= highest:
        raise Invalid(field, number, f"must be between 0 and {highest:,}", "use a smaller number")


def decode_object(key: str, content: bytes, version: str) -> Record:
    """Return the record of an object.

    Raises:
        Corrupt: no version of this library wrote this.
    """
    try:
        found = _decode_record_object(content)
    except _UNREADABLE as error:
        raise Corrupt(key, f"not a record ({error})") from error
    data = bytes(found.value)
    if not is_trail(found.trail):
        raise Corrupt(key, f"its trail is {found.trail!r}")
    if bool(data) is not (len(content) >= LIVE_SIZE):
        raise Corrupt(key, f"a {'value' if data else 'tombstone'} in {len(content)} bytes")
    return Record(
        key,
        decode(data, key) if data else None,
        version,
        found.seq,
        found.epoch,
        found.format,
        found.trail,
        not data,
    )


def encode_batch(entries: Sequence[EncodedEntry]) -> bytes:
    """Return the content of a batch's object."""
    return b"[%b]" % b",".join(entry.data for entry in entries)


def decode_batch(key: str, content: bytes, size: int) -> list[bytes]:
    """Return the texts of the values in a batch.

    Raises:
        Corrupt: it is not an array of `size` values, the number in the object's name.
    """
    try:
        values = _split_array(content)
    except _UNREADABLE as error:
        raise Corrupt(key, f"not a batch of entries ({error})") from error
    if len(values) != size:
        raise Corrupt(key, f"{len(values)} entries where its name says {size}")
    return [bytes(value) for value in values]
