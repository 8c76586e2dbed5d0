"""Lines of history.

Each is named by time, writer and place in its batch, so that sending a batch again adds
nothing.
"""

import re
from collections.abc import Sequence

import msgspec

from jobsync.core.clock import Wall
from jobsync.core.codec import MAX_VALUE, Json, decode, encode
from jobsync.core.keys import check_key
from jobsync.errors import Corrupt, Invalid
from jobsync.stores.contract import Entry

__all__ = ["Line", "check_after", "check_stream", "entry_of", "first_id", "lines_of"]

_MAX_LINES = 10_000
_is_batch = re.compile(r"[0-9]{13}-[0-9a-f]{12}").fullmatch
_is_id = re.compile(r"([0-9]{13})-[0-9a-f]{12}-[0-9]{5}").fullmatch


class Line(msgspec.Struct, frozen=True):
    """An entry, ready to be stored."""

    id: str
    data: bytes


def check_stream(stream: str) -> None:
    """Refuse a history's name that some store could not keep.

    Raises:
        Invalid: names what is wrong with it.
    """
    check_key(stream, "stream")


def check_after(after: str) -> None:
    """Refuse a position that is not the id of an entry.

    Raises:
        Invalid: names it.
    """
    if after and not _is_id(after):
        raise Invalid("after", after, "is not the id of an entry", "pass the last entry's id")


def lines_of(entries: Sequence[Json], batch: str) -> list[Line]:
    """Name and encode the entries of one batch.

    Raises:
        Invalid: one is not JSON, or together they are too many or too large.
    """
    if not _is_batch(batch):
        raise Invalid("batch", batch, "is not the name of a batch", "use Ids.batch()")
    if len(entries) > _MAX_LINES:
        raise Invalid(
            "entries", f"{len(entries)} entries", f"are over {_MAX_LINES:,}", "append in parts"
        )
    lines = [
        Line(f"{batch}-{i:05d}", encode(entry, f"entries[{i}]")) for i, entry in enumerate(entries)
    ]
    size = sum(len(line.data) for line in lines)
    if size > MAX_VALUE:
        raise Invalid("entries", f"{size:,} bytes", f"are over {MAX_VALUE:,}", "append in parts")
    return lines


def entry_of(line_id: str, stream: str, data: bytes | str) -> Entry:
    """Make an entry of what is stored.

    Raises:
        Corrupt: it is not what any version of this library wrote.
    """
    named = _is_id(line_id)
    if named is None:
        raise Corrupt(f"{stream}#{line_id}", "its name is not that of an entry")
    at = Wall(int(named.group(1)) / 1000)
    return Entry(stream, line_id, at, decode(data, f"{stream}#{line_id}"))


def first_id(at: Wall) -> str:
    """Give what sorts before every id of that moment and after all earlier ones."""
    return f"{int(at.seconds * 1000):013d}"
