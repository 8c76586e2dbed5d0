"""Records: conditional writes, versions, tombstones, epochs, formats."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from store_locations import ObjectsLocation

from jobsync import (
    Applied,
    Components,
    Conflict,
    Conflicted,
    Delete,
    Fenced,
    Invalid,
    NewerFormat,
    Put,
    Store,
)
from jobsync.core.clock import SystemClock, Wall
from jobsync.core.codec import MAX_VALUE
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.contract import TRAIL_LENGTH, Change, Record, unwrap
from jobsync.stores.objects.bucket import Bucket
from jobsync.stores.objects.quirks import Quirks


async def test_a_created_record_is_read_back_completely(store: Store) -> None:
    """The record that was written is read, with its version."""
    made = await store.create("user/ann", {"name": "Ann", "tags": [1, 2.5, None, True]})
    assert await store.get("user/ann") == made
    assert (made.seq, made.epoch, made.format, made.deleted) == (1, 0, 1, False)


@pytest.mark.parametrize("value", [None, True, 0, -1.5, "", "æøå 漢字 🎈", [], {}, {"": {"": []}}])
async def test_every_kind_of_json_survives(store: Store, value: Any) -> None:
    """Any JSON value is read back equal and of the same type."""
    await store.create("value/x", value)
    record = await store.get("value/x")
    assert record is not None
    assert record.value == value
    assert type(record.value) is type(value)


async def test_an_absent_record_is_none(store: Store) -> None:
    """Reading a key that was never used returns None."""
    assert await store.get("user/nobody") is None
    assert await store.get("user/nobody", tombstones=True) is None


async def test_a_key_in_use_cannot_be_created(store: Store) -> None:
    """The second creator gets a conflict and changes nothing."""
    made = await store.create("user/ann", 1)
    with pytest.raises(Conflict, match="user/ann"):
        await store.create("user/ann", 2)
    assert await store.get("user/ann") == made


async def test_a_stale_base_cannot_be_replaced(store: Store) -> None:
    """A write based on an older version gets a conflict and changes nothing."""
    old = await store.create("user/ann", 1)
    new = await store.put(old, 2)
    with pytest.raises(Conflict):
        await store.put(old, 3)
    with pytest.raises(Conflict):
        await store.delete(old)
    assert await store.get("user/ann") == new


async def test_a_removed_record_cannot_be_replaced(store: Store) -> None:
    """A base that was removed is a conflict, not a new record."""
    made = await store.create("user/ann", 1)
    await store.drop(["user/ann"])
    with pytest.raises(Conflict):
        await store.put(made, 2)
    assert await store.get("user/ann", tombstones=True) is None


async def test_each_change_of_a_batch_has_its_own_outcome(store: Store) -> None:
    """Creates, replacements and deletions succeed and fail side by side in one write."""
    first = [await store.create(f"user/{name}", 1) for name in "abcd"]
    a, b, c, d = first
    await store.put(b, 2)
    await store.put(d, 2)
    outcomes = await store.write(
        [
            a.replace(3),
            b.replace(3),
            c.delete(),
            d.delete(),
            Put("user/e", 3),
            Put("user/a2", 3),
            Put("user/f", None),
        ]
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Applied, Conflicted, Applied, Conflicted, Applied, Applied, Applied]
    assert [record.key for record in await store.scan("user/")] == [
        f"user/{name}" for name in ("a", "a2", "b", "d", "e", "f")
    ]
    values = [record and record.value for record in await store.get_many(["user/a", "user/b"])]
    assert values == [3, 2]


async def test_an_outcome_carries_the_next_base(store: Store) -> None:
    """A writer continues from the record that its last write returned, without reading."""
    record = await store.create("n", 0)
    for n in range(1, 5):
        record = await store.put(record, n)
    assert await store.get("n") == record
    assert record.seq == 5


async def test_an_empty_write_does_nothing(store: Store) -> None:
    """An empty batch has no outcomes."""
    assert await store.write([]) == []


async def test_versions_never_repeat(store: Store) -> None:
    """Equal content, delete and re-create: every write has its own version."""
    record = await store.create("n", "same")
    versions = [record.version]
    for _ in range(3):
        record = await store.put(record, "same")
        versions.append(record.version)
        record = await store.delete(record)
        versions.append(record.version)
        record = await store.put(record, "same")
        versions.append(record.version)
    await store.delete(record)
    assert len(set(versions)) == len(versions)


async def test_versions_do_not_repeat_after_a_key_was_dropped(store: Store) -> None:
    """A key that is used again after a drop starts with a new version."""
    first = await store.create("user/ann", 1)
    await store.drop(["user/ann"])
    again = await store.create("user/ann", 1)
    assert again.version != first.version


async def test_a_deleted_record_is_hidden(store: Store) -> None:
    """Readers skip a tombstone; `tombstones=True` returns it."""
    made = await store.create("user/ann", 1)
    tombstone = await store.delete(made)
    assert await store.get("user/ann") is None
    assert await store.heads("user/") == []
    assert await store.scan("user/") == []
    assert await store.get("user/ann", tombstones=True) == tombstone
    assert (tombstone.deleted, tombstone.value, tombstone.seq) == (True, None, 2)


async def test_a_tombstone_is_replaced_only_by_its_version(store: Store) -> None:
    """Creating over a tombstone conflicts; a write based on it re-creates the record."""
    tombstone = await store.delete(await store.create("user/ann", 1))
    with pytest.raises(Conflict):
        await store.create("user/ann", 2)
    back = await store.put(tombstone, 2)
    assert back.seq == 3
    assert await store.get("user/ann") == back


async def test_a_late_copy_of_a_create_does_not_recreate(store: Store) -> None:
    """A create that arrives again after its record was deleted conflicts."""
    create = Put("job/1", "work", nonce="AAAAAAAAAAAA")
    (outcome,) = await store.write([create])
    assert isinstance(outcome, Applied)
    await store.delete(outcome.record)
    assert await store.write([create]) == [Conflicted()]
    assert await store.get("job/1") is None


async def test_a_copy_of_a_write_is_not_applied_twice(store: Store) -> None:
    """The same request again conflicts, and the record remembers that it was applied."""
    made = await store.create("n", 0)
    again = Put("n", 1, made, nonce="BBBBBBBBBBBB")
    assert isinstance((await store.write([again]))[0], Applied)
    assert await store.write([again]) == [Conflicted()]
    record = await store.get("n")
    assert record is not None
    assert record.seq == 2
    assert record.nonce == "BBBBBBBBBBBB"
    assert record.remembers("BBBBBBBBBBBB")
    assert record.remembers(made.nonce)


async def test_a_record_remembers_its_latest_writes(store: Store) -> None:
    """It keeps exactly the last sixteen nonces."""
    record = await store.create("n", 0)
    nonces = [record.nonce]
    for n in range(TRAIL_LENGTH):
        record = await store.put(record, n)
        nonces.append(record.nonce)
    found = await store.get("n")
    assert found is not None
    assert found.trail.split(" ") == nonces[:0:-1]
    assert not found.remembers(nonces[0])


async def test_a_tombstone_keeps_the_nonces(store: Store) -> None:
    """A lost reply can still be settled after the record was deleted."""
    made = await store.create("n", 0)
    await store.delete(made)
    tombstone = await store.get("n", tombstones=True)
    assert tombstone is not None
    assert tombstone.remembers(made.nonce)


async def test_only_old_tombstones_are_buried(store: Store) -> None:
    """Burial removes tombstones past their age under one prefix, and never a live record.

    A server without conditional DELETE keeps them all: nothing else would be safe.
    """
    buries = store.traits.get("conditional_delete", True)
    for key in ("user/a", "user/b", "team/a"):
        await store.delete(await store.create(key, 1))
    await store.create("user/live", 1)
    assert await store.bury("user/") == 0
    assert await store.bury("user/", older_than=-1, limit=1) == (1 if buries else 0)
    assert await store.bury("user/", older_than=-1) == (1 if buries else 0)
    assert await store.bury("user/", older_than=-1) == 0
    assert await store.get("user/live") is not None
    assert await store.get("team/a", tombstones=True) is not None


async def test_a_dropped_key_leaves_nothing(store: Store) -> None:
    """Records and tombstones are removed without a trace; other keys stay."""
    await store.write([Put(key, 0) for key in ("n/1", "n/2", "n/3", "session/1")])
    record = await store.get("n/2")
    assert record is not None
    await store.delete(record)
    await store.drop(["n/1", "n/2", "n/none", "session/1"])
    await store.drop([])
    keys = ["n/1", "n/2", "n/3", "session/1"]
    found = await store.get_many(keys, tombstones=True)
    assert [record and record.key for record in found] == [None, None, "n/3", None]
    await store.create("n/1", 1)


@pytest.mark.parametrize("key", ["n/1", "session/1"])
async def test_a_record_that_was_dropped_and_created_again_is_another_one(
    store: Store, key: str
) -> None:
    """Who has read the one before changes nothing, and learns no age, although both are first."""
    old = await store.create(key, 1)
    await store.drop([key])
    new = await store.create(key, 1)
    assert (old.seq, old.value) == (new.seq, new.value)
    other = await store.create("n/other", 0)
    for stale in (old.replace(2), old.delete()):
        outcomes = await store.write([stale])
        outcomes += await store.write([stale, other.replace(1)])
        assert [type(outcome) for outcome in outcomes] == [Conflicted, Conflicted, Applied]
        other = unwrap(outcomes[-1], other.key)
    assert await store.age(old) is None
    assert await store.get(key) == new


async def test_records_are_read_in_the_order_of_the_keys(store: Store) -> None:
    """Each record is at its key's position, absent and repeated ones too."""
    await store.write([Put("n/1", 1), Put("n/2", 2), Put("session/3", 3)])
    keys = ["n/2", "n/none", "session/3", "n/1", "n/2"]
    found = await store.get_many(keys)
    assert [record and record.value for record in found] == [2, None, 3, 1, 2]
    assert await store.get_many([]) == []


async def test_epochs_never_go_back(store: Store) -> None:
    """A writer of an earlier term is refused; one without a term keeps the record's."""
    record = await store.create("role/x", 1, epoch=5)
    with pytest.raises(Fenced) as caught:
        await store.put(record, 2, epoch=4)
    assert (caught.value.epoch, caught.value.current) == (4, 5)
    record = await store.put(record, 3, epoch=6)
    record = await store.put(record, 4)
    assert record.epoch == 6
    tombstone = await store.delete(record)
    assert tombstone.epoch == 6
    with pytest.raises(Fenced):
        await store.put(tombstone, 5, epoch=5)
    assert await store.get("role/x") is None


async def test_a_newer_format_is_read_only(store: Store) -> None:
    """Code of an older format can read the record, but not rewrite or delete it."""
    newer = await store.create("user/ann", {"n": 1}, format=2)
    with pytest.raises(NewerFormat) as caught:
        await store.put(newer, {"n": 2})
    assert (caught.value.found, caught.value.known) == (2, 1)
    with pytest.raises(NewerFormat):
        await store.write([Put("user/bob", 1), newer.delete()])
    assert await store.get("user/ann") == newer
    assert await store.get("user/bob") is None
    assert (await store.put(newer, {"n": 2}, format=2)).format == 2


async def test_unknown_fields_survive_a_rewrite(store: Store) -> None:
    """Code that edits the decoded document keeps unknown fields."""
    await store.create("user/ann", {"n": 1, "of-the-future": {"x": [1]}})
    record = await store.get("user/ann")
    assert record is not None
    record.value["n"] += 1
    await store.put(record, record.value)
    found = await store.get("user/ann")
    assert found is not None
    assert found.value == {"n": 2, "of-the-future": {"x": [1]}}


async def test_callers_cannot_change_stored_values(store: Store) -> None:
    """Changing a value after writing or reading it does not change the stored one."""
    value = {"list": [1]}
    await store.create("n", value)
    value["list"].append(2)
    record = await store.get("n")
    assert record is not None
    record.value["list"].append(3)
    again = await store.get("n")
    assert again is not None
    assert again.value == {"list": [1]}


async def test_the_largest_value_fits_and_a_larger_one_is_refused(store: Store) -> None:
    """Four megabytes of JSON are the limit, to the byte."""
    record = await store.create("n", "x" * (MAX_VALUE - 2))
    with pytest.raises(Invalid, match="must be at most 4,194,304 bytes"):
        await store.put(record, "x" * (MAX_VALUE - 1))
    found = await store.get("n")
    assert found is not None
    assert found.version == record.version


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Put("a/../b", 1), "'..'"),
        (Put("a\0b", 1), "must not contain"),
        (Put("a//b", 1), "empty segment"),
        (Put("x" * 201, 1), "at most 200"),
        (Put("/".join("abcdefghi"), 1), "at most 8"),
        (Put("/".join(["x" * 200] * 4), 1), "at most 700"),
        (Put("ok", float("nan")), r"value .*\(got nan\)"),
        (Put("ok", {"a": [b"x"]}), r"value\.a\[0\] .*\(got b'x'\)"),
        (Put("ok", {"a": 2**53 + 1}), r"value\.a .*\(got 9007199254740993\)"),
        (Put("ok", {1: 2}), "must have text as keys"),
        (Put("ok", "\ud800"), "lone surrogate"),
        (Put("ok", "a\0"), "NUL"),
        (Put("ok", 1, epoch=-1), r"epoch .*\(got -1\)"),
        (Put("ok", 1, epoch=2**63), r"epoch .*\(got 9223372036854775808\)"),
        (Put("ok", 1, format=0), r"format .*\(got 0\)"),
        (Put("ok", 1, format=2**31), r"format .*\(got 2147483648\)"),
        (Put("ok", 1, nonce="x"), r"nonce .*\(got 'x'\)"),
        (Put("ok", 1, nonce='A"AAAAAAAAAA'), "must be a nonce"),
    ],
)
async def test_a_bad_change_writes_nothing(store: Store, bad: Put, message: str) -> None:
    """The error has the field, the value and the fix; the valid changes are not written either."""
    with pytest.raises(Invalid, match=message):
        await store.write([Put("good", 1), bad])
    assert await store.get("good") is None


async def test_one_record_is_not_changed_twice_in_a_batch(store: Store) -> None:
    """Two changes to one key in one write are refused."""
    made = await store.create("n", 1)
    with pytest.raises(Invalid, match="must not change one record twice"):
        await store.write([made.replace(2), made.delete()])
    with pytest.raises(Invalid, match="must be a version of"):
        await store.write([Put("m", 1, base=made)])
    assert await store.get("n") == made


async def test_a_nonce_is_used_once(store: Store) -> None:
    """A write with the nonce of an earlier one is refused: they could not be told apart."""
    made = await store.create("n", 1)
    last = await store.put(await store.put(made, 2), 3)
    for nonce in last.trail.split(" "):
        for change in (Put("n", 4, last, nonce=nonce), Delete(last, nonce=nonce)):
            with pytest.raises(Invalid, match="must not be that of an earlier write"):
                await store.write([change])
    assert made.nonce in last.trail
    assert await store.get("n") == last


@pytest.mark.parametrize("older_than", [float("inf"), float("nan"), 1e300])
async def test_an_age_is_a_number_of_seconds(store: Store, older_than: float) -> None:
    """Other numbers are refused."""
    with pytest.raises(Invalid, match="older_than"):
        await store.bury("n/", older_than=older_than)
    with pytest.raises(Invalid, match="older_than"):
        await store.discard("n", older_than=older_than)


async def test_of_many_creators_one_wins(store: Store) -> None:
    """Concurrent creates of one key have exactly one winner."""
    outcomes = await asyncio.gather(*(store.write([Put("lock", i)]) for i in range(20)))
    winners = [i for i, (outcome,) in enumerate(outcomes) if isinstance(outcome, Applied)]
    record = await store.get("lock")
    assert record is not None
    assert winners == [record.value]


async def test_no_increment_is_lost(store: Store) -> None:
    """Concurrent read-change-write loops all count."""

    async def increment() -> None:
        while True:
            record = await store.get("n")
            assert record is not None
            try:
                await store.put(record, record.value + 1)
            except Conflict:
                continue
            return

    await store.create("n", 0)
    await asyncio.gather(*(increment() for _ in range(10)))
    record = await store.get("n")
    assert record is not None
    assert (record.value, record.seq) == (10, 11)


async def test_two_stores_on_one_location_see_each_other(store: Store, location: Any) -> None:
    """One reads what the other writes, and can replace it."""
    other = await location.open()
    made = await store.create("n", 1)
    found = await other.get("n")
    assert found == made
    await other.put(found, 2)
    with pytest.raises(Conflict):
        await store.put(made, 3)
    await other.close()


async def test_a_version_has_an_age_if_the_store_has_a_clock(store: Store) -> None:
    """It grows while the version is current; a replaced version has none."""
    first = await store.create("a", 1)
    age = await store.age(first)
    assert age is None if store.is_billed else age is not None and 0 <= age < 60
    later = await store.age(first)
    assert later is None if age is None else later is not None and later >= age
    second = await store.put(first, 2)
    assert await store.age(first) is None
    assert (await store.age(second) is None) == store.is_billed


async def test_every_write_begins_a_new_age(store: Store) -> None:
    """Alone or in a batch, of a record or a tombstone; what was there before does not count."""
    if store.is_billed:
        assert await store.age(await store.create("a", 1)) is None
        return
    clock = Components.system().clock
    versions = [await store.create(key, 1) for key in ("a", "b", "c")]
    steps: list[Callable[[Record], Change]] = [lambda r: r.replace(2), lambda r: r.delete()]
    for change in (*steps, lambda r: r.replace(3), *steps):
        await asyncio.sleep(0.1)
        start = clock.mono()
        one, *rest = map(change, versions)
        outcomes = [*await store.write([one]), *await store.write(rest)]
        versions = [outcome.record for outcome in outcomes if isinstance(outcome, Applied)]
        assert len(versions) == 3
        for version in versions:
            age = await store.age(version)
            assert age is not None
            assert 0 <= age <= clock.mono() - start


class SkewedClock(SystemClock):
    """The clock of a machine whose wall time is wrong."""

    def __init__(self, skew: float) -> None:
        super().__init__()
        self._skew = skew

    def wall(self) -> Wall:
        return super().wall() + self._skew


async def find_burial_error(location: Any, skew: float) -> str:
    """Bury tombstones from a machine whose wall time is wrong; return what went wrong."""
    components = msgspec.structs.replace(Components.system(), clock=SkewedClock(skew))
    store = await location.open(components)
    made = await store.create(f"skewed/{skew:g}", 1)
    await store.delete(made)
    too_many = await store.bury("skewed/", older_than=3600.0)
    enough = await store.bury("skewed/", older_than=-3600.0)
    left = await store.get(made.key, tombstones=True)
    await store.close()
    if too_many:
        return "a tombstone that was just written was removed as old"
    return f"a tombstone that is old enough was not removed: {left}" if enough != 1 else ""


@pytest.mark.parametrize("skew", [-86_400.0, 86_400.0])
async def test_tombstones_age_by_the_clock_of_the_store(location: Any, skew: float) -> None:
    """A wrong clock of this machine neither removes a tombstone too early nor keeps it."""
    if not getattr(location, "_conditional_delete", True):
        pytest.skip("this server cannot remove tombstones safely, so none are removed")
    assert await find_burial_error(location, skew) == ""


async def test_a_tombstone_that_ages_by_this_machines_clock_is_noticed(
    bucket_url: str, quirks: Quirks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant compares the server's times with those of this machine."""
    url = parse_url(bucket_url)
    assert isinstance(url, ObjectsUrl)
    location = ObjectsLocation(url, bare_etags=quirks.bare_etags)
    ahead = datetime.now(UTC) + timedelta(days=1)
    seen = property(lambda _: ahead, lambda *_: None)
    monkeypatch.setattr(Bucket, "latest_seen", seen, raising=False)
    found = await find_burial_error(location, 86_400.0)
    assert found == "a tombstone that was just written was removed as old"
