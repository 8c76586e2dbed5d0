"""Where records and histories lie in a bucket.

    <prefix>/r3/user/by-name/ann                     a record: r and its depth, then its key
    <prefix>/h2/history/a/<batch>-<lines>            a batch of lines: h and the stream's depth

The depth keeps every folder to one kind of thing: beside the objects of one level there is
never a deeper folder. So listing a level is listing a folder, nothing below it is paid for,
and the order is that of the names' bytes even on servers that list in tree order.

A batch's name tells how many lines are in it, so that listing tells what to read and what
was discarded.
"""

import re

import msgspec

from jobsync.core.keys import MAX_KEY, check_key
from jobsync.errors import Invalid

__all__ = ["BatchName", "Naming", "is_segment"]

_MAX_NAME = 1024  # What S3 takes, in bytes.
_is_batch_name = re.compile(r"([0-9]{13}-[0-9a-f]{12})-([0-9]{5})").fullmatch


class BatchName(msgspec.Struct, frozen=True):
    """A batch of lines, as its object's name tells."""

    batch: str
    lines: int

    def __str__(self) -> str:
        return f"{self.batch}-{self.lines:05d}"

    @classmethod
    def parse(cls, text: str) -> "BatchName | None":
        """Read the last segment of an object's name; None if it names no batch."""
        found = _is_batch_name(text)
        return cls(found.group(1), int(found.group(2))) if found else None


class Naming:
    """Gives objects their names.

    Args:
        prefix: the part of the bucket that is ours, without a slash at its end.
    """

    def __init__(self, prefix: str) -> None:
        self._root = f"{prefix}/" if prefix else ""
        longest = f"{self._root}h8//{BatchName('0' * 26, 0)}"
        self._room = min(MAX_KEY, _MAX_NAME - len(longest))

    def record(self, key: str) -> str:
        """Name the object of a record."""
        return f"{self._root}r{key.count('/') + 1}/{key}"

    def level(self, prefix: str) -> str:
        """Name the folder of the records that a prefix lists, with a slash at its end."""
        return self.record(prefix)

    def stream(self, stream: str) -> str:
        """Name the folder of a history, with a slash at its end."""
        return f"{self._root}h{stream.count('/') + 1}/{stream}/"

    def check_stream(self, stream: str) -> None:
        """Refuse a history's name that leaves no room for the names of its batches.

        Raises:
            Invalid: names what is wrong with it.
        """
        check_key(stream, "stream", room=self._room)


def is_segment(name: str) -> bool:
    """Say whether a name can be a key's last segment; if not, others have put it there."""
    try:
        check_key(name)
    except Invalid:
        return False
    return "/" not in name
