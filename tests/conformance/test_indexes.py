"""Indexes find every record that was written through them, once, and only where it belongs."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness
from store_locations import StoreLocation

from jobsync import (
    Applied,
    Components,
    Events,
    Invalid,
    NewerFormat,
    OutcomeUnknown,
    Put,
    Record,
    Store,
    Unavailable,
)
from jobsync.components import NONCE_LENGTH
from jobsync.core.codec import Json
from jobsync.core.keys import MAX_SEGMENT, escape
from jobsync.database.index import Index, IndexedWriter
from jobsync.database.index_entries import ENTRIES, index_prefix, remove_index, write_entries
from jobsync.stores.contract import (
    BURIAL_AGE,
    TRAIL_LENGTH,
    Change,
    Conflicted,
    Delete,
    Outcome,
    Unknown,
)
from jobsync.stores.decorator import StoreDecorator

DATA = "data/things/"


class RankRule:
    """An index by the field `rank`."""

    key = "by_rank.1"

    def rank(self, document: Json) -> str | None:
        """Return the field, if it is text."""
        rank = document.get("rank") if isinstance(document, dict) else None
        return rank if isinstance(rank, str) else None


class SeparateStore(StoreDecorator):
    """A store whose batches are not atomic."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_atomic = False


class Things:
    """A resource with one index: writes and finds its records."""

    def __init__(self, store: Store, components: Components) -> None:
        self.store = store
        self.components = components
        self.index = self.open_index()

    def open_index(self) -> Index:
        return Index(self.store, "things", DATA, RankRule(), self.components)

    async def write(self, *changes: Change, store: Store | None = None) -> list[Outcome]:
        writer = IndexedWriter("things", [RankRule()], self.components)
        return await writer.write(store or self.store, changes)

    async def put(self, id: str, rank: str | None, base: Record | None = None) -> Record:
        """Write one record; without a rank it is in no place of the index."""
        (outcome,) = await self.write(Put(DATA + escape(id), {"id": id, "rank": rank}, base))
        assert isinstance(outcome, Applied)
        return outcome.record

    async def delete(self, base: Record) -> Record:
        (outcome,) = await self.write(Delete(base))
        assert isinstance(outcome, Applied)
        return outcome.record

    async def find(self, rank: str, **options: Any) -> list[str]:
        """Return the ids of the records of a rank."""
        return [record.value["id"] for record in await self.index.find(rank, **options)]

    async def entries(self) -> list[str]:
        """Return the names of all entries, including dangling ones."""
        prefix = index_prefix("things", RankRule.key)
        return [head.key.removeprefix(prefix) for head in await self.store.heads(prefix)]


@pytest.fixture
def components(clock: FakeClock) -> Components:
    """Components with a clock that the test controls."""
    return Components(clock=clock, randomness=SeededRandomness(5), events=Events())


@pytest.fixture(params=["together", "separate"])
def things(request: pytest.FixtureRequest, store: Store, components: Components) -> Things:
    """A resource whose entries are written with or before its records."""
    return Things(store if request.param == "together" else SeparateStore(store), components)


async def test_records_are_found_by_rank_in_the_order_of_their_ids(things: Things) -> None:
    """Only those of that rank, also if another rank begins alike; some have none."""
    for name, rank in [("b", "1"), ("é", "1"), ("a/b", "1"), ("c", "11"), ("d", None), ("B", "1")]:
        await things.put(name, rank)
    assert await things.find("1") == ["B", "a/b", "b", "é"]
    assert await things.find("11") == ["c"]
    assert await things.find("0") == []
    assert await things.find("1", limit=2) == ["B", "a/b"]
    assert await things.find("1", after="a/b") == ["b", "é"]
    assert await things.find("1", after="a/b", limit=1) == ["b"]
    assert len(await things.entries()) == 5


async def test_an_entry_is_stored_before_its_record(store: Store, components: Components) -> None:
    """Where a batch is not atomic: a record without an entry would never be found."""
    written: list[str] = []

    class NotedStore(SeparateStore):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            written.extend(change.key.split("/")[0] for change in changes)
            return await super().write(changes)

    things = Things(NotedStore(store), components)
    record = await things.put("a", "1")
    await things.put("a", "2", record)
    assert written == ["index", "data", "index", "data"]


async def test_a_record_that_keeps_its_rank_keeps_its_entry(things: Things) -> None:
    """However often it is written; it names the entry, which other fields do not show."""
    record = await things.put("a", "1")
    before = await things.entries()
    for _ in range(TRAIL_LENGTH + 2):
        record = await things.put("a", "1", record)
        assert await things.find("1") == ["a"]
    assert await things.entries() == before
    assert list(record.value[ENTRIES]) == [RankRule.key]


async def put_before_the_index(things: Things, *names: str) -> list[Record]:
    """Write records of rank 1 without entries, then add these as a backfill does."""
    records = [await things.store.create(DATA + name, {"id": name, "rank": "1"}) for name in names]
    writer = IndexedWriter("things", [RankRule()], things.components)
    for record in records:
        await write_entries(things.store, writer.build_entries(record))
    return records


async def test_a_record_from_before_the_index_keeps_the_entry_of_the_backfill(
    things: Things, components: Components
) -> None:
    """A lookup that has listed the entry, and reads the record after its first update, finds it."""
    records = await put_before_the_index(things, "a", "b")
    before = await things.entries()
    waiting = dict(zip("ab", records, strict=True))

    class BusyStore(StoreDecorator):
        async def get_many(
            self, keys: Sequence[str], *, tombstones: bool = False
        ) -> list[Record | None]:
            while waiting:
                await things.put(*waiting.popitem()[:1], "1", records.pop())
            return await super().get_many(keys, tombstones=tombstones)

    reader = Things(BusyStore(things.store), components)
    assert await reader.find("1") == ["a", "b"]
    assert await things.entries() == before
    assert await things.find("1") == ["a", "b"]


async def test_of_two_writers_of_a_record_from_before_the_index_the_loser_removes_nothing(
    things: Things,
) -> None:
    """Both name the entry that the record has had."""
    (record,) = await put_before_the_index(things, "a")
    await things.store.drop([index_prefix("things", RankRule.key) + (await things.entries())[0]])
    await things.put("a", "1", record)
    (outcome,) = await things.write(Put(record.key, {"id": "a", "rank": "1", "n": 2}, record))
    assert isinstance(outcome, Conflicted)
    assert await things.find("1") == ["a"]


async def test_a_write_keeps_the_nonce_that_its_caller_has_chosen(things: Things) -> None:
    """Its entry ends in it, too."""
    put = Put(DATA + "a", {"id": "a", "rank": "1"}, nonce="n" * NONCE_LENGTH)
    await things.write(put)
    (record,) = await things.index.find("1")
    assert record.nonce == put.nonce


async def test_a_record_that_moves_is_found_only_at_its_new_rank(things: Things) -> None:
    """The entry that it leaves is removed by its writer."""
    record = await things.put("a", "1")
    record = await things.put("a", "2", record)
    assert (await things.find("1"), await things.find("2")) == ([], ["a"])
    record = await things.put("a", None, record)
    assert (await things.find("1"), await things.find("2")) == ([], [])
    assert await things.entries() == []
    record = await things.put("a", "1", record)
    await things.put("a", "1", record)
    assert await things.find("1") == ["a"]
    assert len(await things.entries()) == 1


async def test_a_record_that_returns_to_a_rank_is_found_once(
    things: Things, components: Components
) -> None:
    """Although the entry of its first stay may still be there, as after a crash."""
    record = await things.put("a", "1")
    stay = Things(KeepingStore(things.store), components)
    record = await stay.put("a", "2", record)
    record = await stay.put("a", "1", record)
    assert len(await things.entries()) == 3
    assert await things.find("1") == ["a"]
    # The first entry is known to be dead: the record remembers both writes.
    assert len(await things.entries()) == 2
    assert await things.find("2") == []
    assert len(await things.entries()) == 1
    assert await things.find("1") == ["a"]


class KeepingStore(StoreDecorator):
    """A store whose users die before they remove an entry."""

    async def drop(self, keys: Sequence[str]) -> None:
        """Do nothing."""


async def test_a_deleted_record_is_not_found_and_may_come_back(things: Things) -> None:
    """With a new entry."""
    record = await things.put("a", "1")
    tombstone = await things.delete(record)
    assert (await things.find("1"), await things.entries()) == ([], [])
    await things.put("a", "1", tombstone)
    assert await things.find("1") == ["a"]


async def test_an_entry_of_a_deleted_record_is_removed_by_its_finder(
    things: Things, components: Components
) -> None:
    """If the process that has deleted the record died before."""
    record = await things.put("a", "1")
    tombstone = await Things(KeepingStore(things.store), components).delete(record)
    assert len(await things.entries()) == 1
    assert await things.find("1") == []
    assert await things.entries() == []
    await things.put("a", "1", tombstone)
    assert await things.find("1") == ["a"]


async def test_of_two_writers_the_loser_leaves_no_entry(things: Things) -> None:
    """Its entry belongs to a write that will not happen."""
    record = await things.put("a", "1")
    await things.put("a", "2", record)
    (outcome,) = await things.write(Put(record.key, {"id": "a", "rank": "3"}, record))
    assert isinstance(outcome, Conflicted)
    assert [name[0] for name in await things.entries()] == ["2"]
    assert await things.find("2") == ["a"]


@pytest.mark.parametrize("rank", [None, "0"], ids=["absent", "elsewhere"])
async def test_an_entry_whose_record_may_still_arrive_is_not_removed(
    store: Store, components: Components, clock: FakeClock, rank: str | None
) -> None:
    """For an hour; then the write cannot arrive any more. Nothing that arrives is missed."""
    things = Things(SeparateStore(store), components)
    base = None if rank is None else await things.put("a", rank)
    delayed: list[Sequence[Change]] = []

    class SlowStore(SeparateStore):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if not changes[0].key.startswith(DATA):
                return await super().write(changes)
            delayed.append(changes)
            return [Unknown("lost") for _ in changes]

    late = Put(DATA + "a", {"id": "a", "rank": "1"}, base)
    (outcome,) = await things.write(late, store=SlowStore(store))
    assert isinstance(outcome, Unknown)
    await clock.sleep(900)
    assert await things.find("1") == []
    assert [name[0] for name in await things.entries()] == ([] if base is None else ["0"]) + ["1"]
    await store.write(delayed[0])
    assert await things.find("1") == ["a"]
    assert await things.find("0") == []
    # The entry that the late write has left is known to be dead.
    assert [name[0] for name in await things.entries()] == ["1"]


async def test_an_entry_whose_record_never_arrived_is_removed_after_an_hour(
    store: Store, components: Components, clock: FakeClock
) -> None:
    """By whoever finds it; not a second earlier."""
    things = Things(SeparateStore(store), components)

    class LosingStore(SeparateStore):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if changes[0].key.startswith(DATA):
                return [Unknown("lost") for _ in changes]
            return await super().write(changes)

    await things.write(Put(DATA + "a", {"id": "a", "rank": "1"}), store=LosingStore(store))
    await clock.sleep(BURIAL_AGE)
    assert await things.find("1") == []
    assert len(await things.entries()) == 1
    await clock.sleep(1)
    assert await things.find("1") == []
    assert await things.entries() == []


async def test_an_entry_that_arrives_late_is_dangling(things: Things, clock: FakeClock) -> None:
    """A copy of the request that created it may bring it back after it was removed."""
    record = await things.put("a", "1")
    (name,) = await things.entries()
    key = index_prefix("things", RankRule.key) + name
    stored = await things.store.get(key)
    assert stored is not None
    record = await things.put("a", "2", record)
    await things.store.create(key, stored.value)
    assert await things.find("1") == []
    assert len(await things.entries()) == 1, "the record remembers that write"
    for _ in range(TRAIL_LENGTH):
        record = await things.put("a", "2", record)
    await things.store.create(key, stored.value)
    await clock.sleep(BURIAL_AGE - 1)
    assert await things.find("1") == []
    assert len(await things.entries()) == 2, "it may belong to a write that is under way"
    await clock.sleep(2)
    assert await things.find("1") == []
    assert await things.find("2") == ["a"]
    assert len(await things.entries()) == 1


async def test_no_record_is_written_if_the_outcome_of_its_entry_is_unknown(
    store: Store, components: Components
) -> None:
    """It may be sent again: the record was certainly not written."""
    unknown: list[int] = []

    class UnknownStore(SeparateStore):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            outcomes = await super().write(changes)
            return [Unknown("lost") if i in unknown else o for i, o in enumerate(outcomes)]

    things = Things(SeparateStore(store), components)
    names = ["a", "b", "c"]
    # Whichever of them it is, and whatever became of the others.
    for lost in ([0], [1], [2], [0, 2], [0, 1, 2]):
        unknown[:] = lost
        changes = [Put(DATA + name, {"id": name, "rank": "1"}) for name in names]
        with pytest.raises(Unavailable, match=r"index/things/by_rank\.1/"):
            await things.write(*changes, store=UnknownStore(store))
        assert await store.get_many([DATA + name for name in names]) == [None] * 3
    for name in names:
        await things.put(name, "1")
    assert await things.find("1") == names


async def test_no_record_is_written_long_after_its_entry(
    store: Store, components: Components, clock: FakeClock
) -> None:
    """A process that stood still between them would write a record whose entry is dead."""

    class StandingStore(SeparateStore):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            outcomes = await super().write(changes)
            await clock.sleep(BURIAL_AGE)
            return outcomes

    things = Things(SeparateStore(store), components)
    with pytest.raises(Unavailable, match="took longer than"):
        await things.write(Put(DATA + "a", {"id": "a", "rank": "1"}), store=StandingStore(store))
    assert await store.get(DATA + "a") is None


async def test_what_a_store_refuses_leaves_no_entries(things: Things) -> None:
    """Neither the refused record's nor those of others in the batch."""
    base = await things.store.create(DATA + "z", {"id": "z"}, format=9)
    good = Put(DATA + "a", {"id": "a", "rank": "1"})
    with pytest.raises(Invalid, match="finite"):
        await things.write(good, Put(DATA + "b", {"rank": "1", "n": float("nan")}))
    with pytest.raises(NewerFormat):
        await things.write(good, Put(DATA + "z", {"id": "z", "rank": "1"}, base))
    assert await things.entries() == []
    assert await things.find("1") == []


LONG = [f"{letter}{'x' * 150}{digit}" for letter in "ac" for digit in "12"]
"""Ids that do not fit into the key of an entry of a long rank."""


@pytest.mark.parametrize("count", [1, 2, 3, 100])
async def test_long_ids_are_found_in_order_page_by_page(things: Things, count: int) -> None:
    """Their entries have a hash in place of the id, and sort apart from the others."""
    rank = "r" * 80
    ids = ["a", "b", "c", "d", *LONG]
    for name in ids:
        await things.put(name, rank)
    assert any("!00" in name[80:83] for name in await things.entries())
    found: list[str] = []
    while page := await things.find(rank, after=found[-1] if found else None, limit=count):
        found += page
    assert found == sorted(ids)


async def test_long_ids_move_and_go_as_others(things: Things) -> None:
    """The rank decides whether an id is long."""
    rank = "r" * 80
    record = await things.put(LONG[0], rank)
    record = await things.put(LONG[0], "s", record)
    assert (await things.find(rank), await things.find("s")) == ([], [LONG[0]])
    record = await things.put(LONG[0], rank, record)
    assert (await things.find(rank), await things.find("s")) == ([LONG[0]], [])
    await things.delete(record)
    assert await things.entries() == []


async def test_ids_that_just_fit_are_skipped_exactly(things: Things) -> None:
    """Pages go on after ids around the limit, and after ids that are nobody's."""
    rank = "r" * 80
    room = MAX_SEGMENT - len(rank) - 18
    ids = sorted(["x" * (room + extra) for extra in (-1, 0, 1)] + ["x" * (room - 1) + "y", "y"])
    for name in ids:
        await things.put(name, rank)
    for after in [*ids, "x" * 199, "x", "z", "x" * room + "!"]:
        assert await things.find(rank, after=after) == [name for name in ids if name > after]
    short = Things(things.store, things.components)
    for name in ["a", "a\x01", "a!", "a\x01\x02"]:
        await short.put(name, "s")
    for after, rest in [("a", 3), ("a\x01", 2), ("a\x01\x02", 1), ("a!", 0), ("a\x00x"[:1], 3)]:
        assert len(await short.find("s", after=after)) == rest


async def test_entries_that_cannot_be_read_are_reported_and_left(
    location: StoreLocation, things: Things
) -> None:
    """Odd names and damaged values of long ids; all other records are found, on every page."""
    reported: list[str] = []
    things.components.events.on("store:record-set-aside", lambda event: reported.append(event.key))
    rank = "r" * 80
    for name in ["b", "d", *LONG]:
        await things.put(name, rank)
    hashed = [name for name in await things.entries() if name[80:83] == "!00"]
    prefix = index_prefix("things", RankRule.key)
    damaged = [prefix + hashed[0], prefix + hashed[1]]
    lost = set()
    for key, text in zip(damaged, ['{"at": 1}', "{broken"], strict=True):
        entry = await things.store.get(key)
        assert entry is not None
        lost.add(entry.value["id"])
        location.corrupt(key, text)
    odd = f"{prefix}{rank}!01strange"
    await things.store.create(odd, 5)
    ids = sorted({"b", "d", *LONG} - lost)
    things.index = things.open_index()
    assert await things.find(rank) == ids
    for i, after in enumerate(ids):
        assert await things.find(rank, after=after, limit=1) == ids[i + 1 : i + 2]
    assert {*damaged, odd} <= set(reported)
    assert {head.key for head in await things.store.heads(prefix)} >= {*damaged, odd}


async def test_records_that_cannot_be_read_are_reported_and_keep_their_entries(
    location: StoreLocation, things: Things, clock: FakeClock
) -> None:
    """Others of the page are found. Nothing is removed, so that it can be repaired by hand."""
    reported: list[str] = []
    things.components.events.on("store:record-set-aside", lambda event: reported.append(event.key))
    for name in "abcde":
        await things.put(name, "1")
    location.corrupt(DATA + "c", "{broken")
    await clock.sleep(2 * BURIAL_AGE)
    assert await things.find("1") == ["a", "b", "d", "e"]
    assert DATA + "c" in reported
    assert len(await things.entries()) == 5


async def test_a_record_that_returns_between_two_pages_is_found_once(things: Things) -> None:
    """Its second entry may be on the page after its first."""
    for name in "abcd":
        await things.put(name, "1")
    found: list[str] = []
    async for page in things.index.iterate("1", limit=1):
        found += [record.value["id"] for record in page]
        for latest in page:
            record = latest
            for _ in range(4):
                # Nonces are random: one of these entries sorts after the one that was read.
                moved = await things.put(record.value["id"], "2", record)
                record = await things.put(record.value["id"], "1", moved)
    assert found == list("abcd")


async def test_a_record_that_stays_is_found_whatever_happens_around_it(things: Things) -> None:
    """Rewrites, moves of others and dangling entries while pages are read."""
    records = {name: await things.put(name, "1") for name in "abcdefgh"}
    found: list[str] = []
    async for page in things.index.iterate("1", limit=1):
        found += [record.value["id"] for record in page]
        for name in "bdfh":
            records[name] = await things.put(name, "1", records[name])
        for name in "ac":
            rank = "2" if records[name].value["rank"] == "1" else "1"
            records[name] = await things.put(name, rank, records[name])
    assert [name for name in found if name in "bdefgh"] == list("bdefgh")
    assert len(set(found)) == len(found)


async def test_batches_have_an_outcome_each(things: Things) -> None:
    """Some conflict; the others are found, and only one entry each is left."""
    taken = await things.put("b", "1")
    changes = [Put(f"{DATA}{name}", {"id": name, "rank": "2"}) for name in "abc"]
    outcomes = await things.write(*changes)
    assert [type(outcome) for outcome in outcomes] == [Applied, Conflicted, Applied]
    assert (await things.find("1"), await things.find("2")) == (["b"], ["a", "c"])
    assert len(await things.entries()) == 3
    assert taken.value["rank"] == "1"


@pytest.mark.parametrize("error", [Unavailable, OutcomeUnknown])
async def test_a_writer_that_cannot_remove_still_writes(
    things: Things, error: Callable[[str, str], Exception]
) -> None:
    """Entries that stay are dangling, and harmless."""

    class ForbiddenStore(StoreDecorator):
        async def drop(self, keys: Sequence[str]) -> None:
            raise error(self.name, f"cannot remove {keys}")

    record = await things.put("a", "1")
    store = ForbiddenStore(things.store)
    (outcome,) = await things.write(Put(record.key, {"id": "a", "rank": "2"}, record), store=store)
    assert isinstance(outcome, Applied)
    assert (await things.find("1"), await things.find("2")) == ([], ["a"])


async def test_entries_can_be_built_again(things: Things) -> None:
    """The entries that records name, under the same keys: twice does no harm."""
    records = [await things.put(name, "1") for name in "abc"]
    records[1] = await things.put("b", "1", records[1])
    before = await things.entries()
    writer = IndexedWriter("things", [RankRule()], things.components)
    entries = list(itertools.chain.from_iterable(map(writer.build_entries, records)))
    await write_entries(things.store, entries)
    assert await things.entries() == before
    await things.store.drop([entry.key for entry in entries])
    assert await things.find("1") == []
    await write_entries(things.store, entries)
    assert await things.entries() == before
    assert await things.find("1") == list("abc")


async def test_a_whole_index_can_be_removed(things: Things) -> None:
    """With all its entries, and no others."""
    for name in "abc":
        await things.put(name, "1")
    await things.store.create("index/things/other.1/x", {})
    await remove_index(things.store, "things", RankRule.key)
    assert await things.entries() == []
    assert await things.store.get("index/things/other.1/x") is not None


async def test_a_changed_set_of_indexes_stops_a_write_between_entries_and_records(
    store: Store, components: Components
) -> None:
    """The record would lack the entries of an index that was added meanwhile."""

    class Outdated(Exception):
        pass

    async def refuse() -> None:
        raise Outdated

    confirm: Callable[[], Any] = refuse
    writer = IndexedWriter("things", [RankRule()], components, confirm)
    with pytest.raises(Outdated):
        await writer.write(SeparateStore(store), [Put(DATA + "a", {"id": "a", "rank": "1"})])
    assert await store.get(DATA + "a") is None
