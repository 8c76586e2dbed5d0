"""From a change to what is stored, and back from what is stored to a record.

Both directions are the same for every store: a change whose base is in hand determines
the whole next record, so all that a store decides is whether the base is still there.
"""

from collections.abc import Sequence

import msgspec

from jobsync.core.codec import decode, encode
from jobsync.core.ids import NONCE_LENGTH, Ids
from jobsync.core.keys import check_key
from jobsync.errors import Corrupt, Fenced, Invalid, NewerFormat
from jobsync.stores.contract import TRAIL_LENGTH, Change, Put, Record

__all__ = ["Draft", "draft", "revive", "stamp"]

_TRAIL_WIDTH = TRAIL_LENGTH * (NONCE_LENGTH + 1) - 1


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A change that is ready to be sent."""

    base: Record | None
    record: Record
    """What readers see once it is applied."""
    data: bytes | None
    """The value's JSON text; None on a tombstone."""


def stamp(changes: Sequence[Change], ids: Ids) -> Sequence[Change]:
    """Give a nonce to every change that has none."""
    bare = sum(not change.nonce for change in changes)
    if not bare:
        return changes
    fresh = iter(ids.nonces(bare))
    return [
        change if change.nonce else msgspec.structs.replace(change, nonce=next(fresh))
        for change in changes
    ]


def draft(changes: Sequence[Change], ids: Ids) -> list[Draft]:
    """Check a batch and work out the record that each change leaves.

    Raises:
        Invalid: a key or a value cannot be stored, or a record is changed twice.
        Fenced: the base was written by a later term than the change's.
        NewerFormat: the base was written in a later format than the change's.
    """
    nonces = iter(ids.nonces(len(changes)))
    drafts = [_draft(change, change.nonce or next(nonces)) for change in changes]
    if len({drawn.record.key for drawn in drafts}) < len(drafts):
        raise Invalid(
            "changes",
            sorted(drawn.record.key for drawn in drafts),
            "change one record twice",
            "send them one after the other",
        )
    return drafts


def _draft(change: Change, nonce: str) -> Draft:
    base, key = change.base, change.key
    if base is None:
        check_key(key)
        seq, epoch, trail = 1, change.epoch or 0, nonce
    else:
        epoch = base.epoch if change.epoch is None else change.epoch
        _check_base(key, base, epoch, change.format)
        seq, trail = base.seq + 1, f"{nonce} {base.trail}"[:_TRAIL_WIDTH]
    value, data = (change.value, encode(change.value)) if isinstance(change, Put) else (None, None)
    record = Record(key, value, nonce, seq, epoch, change.format, trail, data is None)
    return Draft(base, record, data)


def _check_base(key: str, base: Record, epoch: int, format: int) -> None:
    if base.key != key:
        raise Invalid("base", base.key, f"is not a version of {key!r}", "read that record first")
    if base.epoch > epoch:
        raise Fenced(key, epoch, base.epoch)
    if base.format > format:
        raise NewerFormat(key, base.format, format)


def revive(
    key: str, data: bytes | str | None, seq: int, epoch: int, format: int, trail: str
) -> Record:
    """Make a record of what is stored.

    Raises:
        Corrupt: it is not what any version of this library wrote.
    """
    if len(trail) < NONCE_LENGTH:
        raise Corrupt(key, f"its trail is {trail!r}")
    value = None if data is None else decode(data, key)
    return Record(key, value, trail[:NONCE_LENGTH], seq, epoch, format, trail, data is None)
