"""Notes on indexes that are built or removed: how far that is, and since when it is known.

Notes are removed with the work that they are about. A process may still write one afterwards, and
die: a note whose index is settled, or gone, means nothing, and the cleanup removes it after an
hour. They are removed by tombstones, because another process may write them again.
"""

from collections.abc import Sequence

from jobsync.components import Components
from jobsync.coordination.clock_skew import list_with_probe
from jobsync.stores.contract import Conflicted, Record, Store, unwrap

__all__ = [
    "BACKFILLS",
    "NOTES",
    "find_noted_index",
    "list_old_notes",
    "measure_ages",
    "progress_key",
    "remove_notes",
    "since_key",
]

BACKFILLS = "backfill/"
"""The prefix of what backfills note."""

NOTES = f"{BACKFILLS}note/"
"""The prefix of notes on indexes that are built or removed. One level, so that one listing shows
which were deleted."""

_PROBES = f"{NOTES}0probe-"
"""How the keys of records begin that are written to learn the time. Names of indexes begin with a
letter, so these are listed first."""

_RESOLUTION = 1.0
"""Seconds: an object store tells the times of writes without a fraction."""

_OLD = 3600.0
"""Seconds. A backfill that runs writes its note again with each page of records."""

_PAGE = 1000


def progress_key(index: str) -> str:
    """Return the key of the note on how far the backfill of an index is."""
    return f"{NOTES}{index}.progress"


def since_key(index: str) -> str:
    """Return the key of the note on since when processes may disagree about an index."""
    return f"{NOTES}{index}.since"


def find_noted_index(note: Record) -> str:
    """Return the key of the index that a note is about."""
    return note.key.removeprefix(NOTES).rpartition(".")[0]


async def remove_notes(store: Store, index: str) -> None:
    """Remove the notes on an index."""
    keys = [progress_key(index), since_key(index)]
    while notes := [note for note in await store.get_many(keys) if note]:
        for note, outcome in zip(
            notes, await store.write([note.delete() for note in notes]), strict=True
        ):
            if not isinstance(outcome, Conflicted):
                unwrap(outcome, note.key)


async def list_old_notes(store: Store, components: Components) -> list[Record]:
    """Return the notes that nobody has written for an hour."""
    notes = await store.scan(NOTES, limit=_PAGE)
    ages = await measure_ages(store, notes, components)
    return [note for note, age in zip(notes, ages, strict=True) if age > _OLD]


async def measure_ages(
    store: Store, notes: Sequence[Record], components: Components
) -> list[float]:
    """Return for how many seconds notes have been there, at least, by the store's clock."""
    ages = [await store.age(note) for note in notes]
    if None not in ages:
        return [age or 0.0 for age in ages]
    listing = await list_with_probe(store, _PROBES, components)
    now, heads = listing.now, listing.heads
    written = [heads[note.key].written_at if note.key in heads else None for note in notes]
    return [
        0.0 if now is None or at is None else max(0.0, now - at - _RESOLUTION) for at in written
    ]
