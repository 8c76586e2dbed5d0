"""Indexes find every record written through them, whenever its writer died."""

from collections.abc import Sequence
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness
from store_locations import StoreLocation

from jobsync import Applied, Components, Events, Invalid, OutcomeUnknown, Put, Record, Store
from jobsync.database.index import Index
from jobsync.stores.contract import BURIAL_AGE, Change, Outcome, StoreDecorator, Unknown


def rank_of(value: Any) -> str | None:
    """Order by `end`."""
    end: str | None = value.get("end")
    return end


@pytest.fixture
def components(clock: FakeClock) -> Components:
    """Components with a clock that the test controls."""
    return Components(clock=clock, randomness=SeededRandomness(5), events=Events())


@pytest.fixture
def index(store: Store, components: Components) -> Index:
    """An index without entries."""
    return Index(store, "things/end", rank_of, components)


async def put(index: Index, name: str, end: str | None, base: Record | None = None) -> Record:
    """Write one record through an index."""
    value = {"end": end} if end is not None else {}
    (outcome,) = await index.write([Put(f"data/things/{name}", value, base)])
    assert isinstance(outcome, Applied)
    return outcome.record


def names(records: list[Record]) -> list[str]:
    """Return the names of records."""
    return [record.key.rpartition("/")[2] for record in records]


async def entries(store: Store) -> int:
    """Count entries, including dangling ones."""
    return len(await store.heads("index/things/end/"))


async def test_records_are_found_in_the_order_of_the_index(index: Index) -> None:
    """By rank, not by name, up to and including a bound; records without a rank are left out."""
    for name, end in [("a", "3"), ("b", "1"), ("c", None), ("d", "2"), ("e", "2 b"), ("f", "2-b")]:
        await put(index, name, end)
    assert names(await index.find()) == ["b", "d", "e", "f", "a"]
    assert names(await index.find(until="2")) == ["b", "d"]
    assert names(await index.find(limit=3)) == ["b", "d", "e"]


async def test_a_record_whose_rank_changes_is_found_only_at_the_new_rank(
    index: Index, store: Store
) -> None:
    """The old entry is skipped, and swept at once: its write is known to have arrived."""
    record = await put(index, "a", "1")
    record = await put(index, "a", "9", record)
    await put(index, "b", "5")
    assert names(await index.find()) == ["b", "a"]
    assert names(await index.find(until="5")) == ["b"]
    assert await entries(store) == 3
    assert await index.sweep() == 1
    assert names(await index.find()) == ["b", "a"]
    await put(index, "a", "1", record)
    assert names(await index.find()) == ["a", "b"]


async def test_a_record_that_keeps_its_rank_needs_no_new_entry(index: Index, store: Store) -> None:
    """Rewriting a record costs one write."""
    record = await put(index, "a", "1")
    await put(index, "a", "1", record)
    assert await entries(store) == 1
    assert names(await index.find()) == ["a"]


async def test_a_record_that_returns_to_a_rank_is_found_once(index: Index) -> None:
    """Although two entries point to it."""
    record = await put(index, "a", "1")
    record = await put(index, "a", "2", record)
    await put(index, "a", "1", record)
    assert names(await index.find()) == ["a"]


async def test_a_deleted_record_is_not_found(index: Index, store: Store) -> None:
    """The next sweep removes its entry; a record created again gets a new one."""
    record = await put(index, "a", "1")
    tombstone = await store.delete(record)
    assert await index.find() == []
    assert await index.sweep() == 1
    await put(index, "a", "1", tombstone)
    assert names(await index.find()) == ["a"]


class CrashingStore(StoreDecorator):
    """Raises at its n-th write, as if the process died."""

    def __init__(self, inner: Store, writes: int) -> None:
        super().__init__(inner)
        self._left = writes

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write, or raise."""
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return await super().write(changes)


@pytest.mark.parametrize("writes", range(4))
async def test_a_crash_at_any_write_leaves_every_record_findable(
    location: StoreLocation, components: Components, clock: FakeClock, writes: int
) -> None:
    """Entries are written first: there may be one too many, never one too few."""
    store = await location.open()
    index = Index(CrashingStore(store, writes), "things/end", rank_of, components)
    try:
        record = await put(index, "a", "1")
        await put(index, "a", "2", record)
    except KeyboardInterrupt:
        pass
    index = Index(store, "things/end", rank_of, components)
    for _ in range(2):
        stored = await store.scan("data/things/")
        assert names(await index.find()) == names(stored)
        ranks = {record.value["end"] for record in stored}
        assert ranks == {0: set(), 1: set(), 2: {"1"}, 3: {"1"}, 4: {"2"}}[writes]
        # An hour later all dangling entries are swept, and nothing else.
        await clock.sleep(BURIAL_AGE + 1)
        await index.sweep()
        assert await entries(store) == len(stored)
    await store.close()


@pytest.mark.parametrize("rank", [None, "0"], ids=["absent", "elsewhere"])
async def test_entries_of_writes_that_may_still_arrive_are_not_swept(
    index: Index, store: Store, clock: FakeClock, components: Components, rank: str | None
) -> None:
    """A dangling entry stays for an hour: its record's write may be under way."""
    base = None if rank is None else await put(index, "a", rank)
    delayed: list[Sequence[Change]] = []

    class SlowStore(StoreDecorator):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if changes[0].key.startswith("data/"):
                delayed.append(changes)
                return [Unknown("lost") for _ in changes]
            return await super().write(changes)

    await Index(SlowStore(store), "things/end", rank_of, components).write(
        [Put("data/things/a", {"end": "1"}, base)]
    )
    await clock.sleep(900)
    assert [record.value["end"] for record in await index.find()] == ([] if base is None else ["0"])
    assert await index.sweep() == 0
    await store.write(delayed[0])
    assert [record.value["end"] for record in await index.find()] == ["1"]
    await clock.sleep(BURIAL_AGE)
    assert await index.sweep() == (0 if base is None else 1)
    assert names(await index.find()) == ["a"]


async def test_no_record_is_written_if_the_outcome_of_its_entry_is_unknown(
    store: Store, components: Components
) -> None:
    """A record without an entry would never be found."""

    class UnknownStore(StoreDecorator):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            return [Unknown("lost") for _ in changes]

    index = Index(UnknownStore(store), "things/end", rank_of, components)
    with pytest.raises(OutcomeUnknown, match="index/things/end/"):
        await index.write([Put("data/things/a", {"end": "1"})])
    assert await store.get("data/things/a") is None


async def test_long_ranks_are_refused_and_unreadable_entries_set_aside(
    index: Index, store: Store, components: Components
) -> None:
    """A rank that is too long writes nothing; an unreadable entry is reported and left."""
    emitted: list[Any] = []
    components.events.on("store:record-set-aside", emitted.append)
    with pytest.raises(Invalid, match="rank must have at most"):
        await put(index, "a", "x" * 190)
    await store.create("index/things/end/strange", 5)
    await put(index, "b", "1")
    assert names(await index.find()) == ["b"]
    assert await index.sweep(older_than=-1) == 0
    assert [event.key for event in emitted] == ["index/things/end/strange"]
