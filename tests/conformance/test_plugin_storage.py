"""Plugin storage: conditional writes, separate namespaces, values that expire."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness
from store_locations import StoreLocation

from jobsync import Components, Corrupt, Database, Events, Invalid, PluginStorage


@pytest.fixture
async def database(location: StoreLocation, clock: FakeClock) -> AsyncIterator[Database]:
    """A database with a clock that the test controls."""
    components = Components(clock=clock, randomness=SeededRandomness(7), events=Events())
    store = await location.open()
    async with Database(connection=store, components=components) as database:
        yield database
    await store.close()


@pytest.fixture
def storage(database: Database) -> PluginStorage:
    """A storage without values."""
    return database.open_storage("queue")


async def test_a_value_that_was_set_is_read_back(storage: PluginStorage) -> None:
    """Any JSON value; a key that was never set reads as the default."""
    for value in (1, "a", [1, {"b": None}], {"value": 1}, False):
        await storage.set("key/with slash", value)
        assert await storage.get("key/with slash") == value
    await storage.set("null", None)
    assert await storage.get("null", "default") is None
    assert await storage.get("nothing") is None
    assert await storage.get("nothing", 5) == 5
    assert await storage.delete("null") is True
    assert await storage.delete("null") is False
    assert await storage.get("null", 5) == 5


async def test_plugins_and_namespaces_are_separate(database: Database) -> None:
    """The same key of another plugin or namespace is another value."""
    storages = [
        database.open_storage(slug, namespace)
        for slug in ("queue", "ttl")
        for namespace in ("default", "emails")
    ]
    for number, storage in enumerate(storages):
        await storage.set("key", number)
    assert [await storage.get("key") for storage in storages] == [0, 1, 2, 3]
    assert [await storage.list() for storage in storages] == [["key"]] * 4
    with pytest.raises(Invalid, match=r"namespace .*\(got 'a/b'\)"):
        database.open_storage("queue", "a/b")


async def test_one_of_many_sets_an_absent_key(storage: PluginStorage) -> None:
    """Also if the key had a value that was deleted."""
    for _ in range(2):
        versions = await asyncio.gather(*(storage.set_if_absent("lock", n) for n in range(5)))
        (winner,) = [n for n, version in enumerate(versions) if version is not None]
        assert await storage.get("lock") == winner
        await storage.delete("lock")


async def test_set_if_version_replaces_only_that_version(storage: PluginStorage) -> None:
    """With an outdated version nothing is set."""
    first = await storage.set("key", 1)
    second = await storage.set_if_version("key", 2, first)
    assert second is not None
    assert await storage.set_if_version("key", 9, first) is None
    assert await storage.set_if_version("nothing", 9, first) is None
    found = await storage.read("key")
    assert found is not None
    assert (found.value, found.version) == (2, second)


async def test_no_increment_is_lost(storage: PluginStorage) -> None:
    """Concurrent increments all count."""
    sums = await asyncio.gather(*(storage.increment("n") for _ in range(6)))
    assert sorted(sums) == [1, 2, 3, 4, 5, 6]
    assert await storage.increment("n", by=-2.5) == 3.5
    await storage.set("text", "x")
    with pytest.raises(Invalid, match=r"text is not a number \(got 'x'\)"):
        await storage.increment("text")
    for by in ("1", float("nan"), True):
        with pytest.raises(Invalid, match="by must be a number"):
            await storage.increment("n", by=by)  # type: ignore[arg-type]


async def test_only_a_number_is_added_to_a_number(storage: PluginStorage) -> None:
    """Neither a truth value nor a text counts as one; what was stored stays."""
    for value in (True, False, "1", None, [1], {"value": 1}):
        await storage.set("key", value, ttl=60)
        before = await storage.read("key")
        with pytest.raises(Invalid, match="is not a number"):
            await storage.increment("key")
        assert await storage.read("key") == before
        with pytest.raises(Invalid, match="by must be a number"):
            await storage.increment("other", value)  # type: ignore[arg-type]
    assert await storage.list() == ["key"]


async def test_an_expired_value_is_absent(storage: PluginStorage, clock: FakeClock) -> None:
    """It is neither read nor listed, and its key is free."""
    await storage.set("short", 1, ttl=10)
    await storage.set("long", 2, ttl=timedelta(minutes=1))
    await storage.set("ever", 3)
    assert await storage.increment("short") == 2
    await clock.sleep(10)
    assert await storage.get("short") is None
    assert await storage.list() == ["ever", "long"]
    assert await storage.delete("short") is False
    await storage.set("short", 1, ttl=10)
    await clock.sleep(10)
    version = await storage.set_if_absent("short", 4)
    assert version is not None
    assert await storage.get("short") == 4
    assert await storage.set_if_absent("ever", 4) is None
    assert await storage.increment("other") == 1


async def test_a_ttl_is_a_duration_in_any_form(storage: PluginStorage, clock: FakeClock) -> None:
    """Seconds or a timedelta, for every verb that sets a value."""
    for ttl, seconds in (
        (10, 10.0),
        (2.5, 2.5),
        (timedelta(seconds=10), 10.0),
        (timedelta(days=2, seconds=3), 172_803.0),
        (timedelta(milliseconds=1500), 1.5),
    ):
        await storage.delete("key")
        version = await storage.set_if_absent("key", 0, ttl=ttl)
        found = [await storage.read("key")]
        assert version is not None
        await storage.set_if_version("key", 1, version, ttl=ttl)
        found.append(await storage.read("key"))
        await storage.set("key", 2, ttl=ttl)
        found.append(await storage.read("key"))
        ends = [value and (value.value, value.expires_at) for value in found]
        assert ends == [(n, clock.wall().seconds + seconds) for n in range(3)]


async def test_a_sweep_removes_only_expired_values(
    storage: PluginStorage, clock: FakeClock, location: StoreLocation
) -> None:
    """A value that was renewed stays."""
    for n in range(5):
        await storage.set(f"k{n}", n, ttl=10)
    await storage.set("k1", 1, ttl=100)
    await storage.set("k2", 2)
    assert await storage.sweep() == 0
    await clock.sleep(10)
    assert await storage.sweep() == 3
    assert await storage.sweep() == 0
    assert await storage.list() == ["k1", "k2"]
    assert location.read_value("plugin/queue/default/k0") is None


async def test_keys_are_listed_by_prefix_in_order(storage: PluginStorage) -> None:
    """Whatever characters they contain."""
    for key in ("job:b", "job:a", "jo", "other", "job:é"):
        await storage.set(key, 0)
    assert await storage.list("job:") == ["job:a", "job:b", "job:é"]
    assert len(await storage.list()) == 5


@pytest.mark.parametrize("ttl", [0, -1, "10", True, float("nan"), float("inf")])
async def test_a_ttl_must_be_a_number_of_seconds(storage: PluginStorage, ttl: Any) -> None:
    """Anything else is refused before anything is written."""
    with pytest.raises(Invalid, match="ttl must be a number"):
        await storage.set("key", 1, ttl=ttl)
    with pytest.raises(Invalid, match=r"key must be text \(got 5\)"):
        await storage.get(5)  # type: ignore[arg-type]


DAMAGED = [
    [],
    {},
    "x",
    5,
    None,
    {"value": 1},
    {"expires_at": None},
    {"value": 1, "expires_at": "soon"},
    {"value": 1, "expires_at": [0]},
    {"value": 1, "expires_at": True},
]
VERBS: dict[str, Callable[[PluginStorage], Awaitable[object]]] = {
    "get": lambda storage: storage.get("key"),
    "read": lambda storage: storage.read("key"),
    "set_if_absent": lambda storage: storage.set_if_absent("key", 2),
    "set_if_version": lambda storage: storage.set_if_version("key", 2, "1"),
    "increment": lambda storage: storage.increment("key"),
    "delete": lambda storage: storage.delete("key"),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_record_that_is_not_a_plugins_value_is_corrupt(
    verb: str, storage: PluginStorage, location: StoreLocation
) -> None:
    """It is reported, not overwritten, except by who sets it whatever it was."""
    key = "plugin/queue/default/key"
    await storage.set("other", 1)
    for value in DAMAGED:
        await storage.set("key", 1)
        location.corrupt(key, json.dumps(value))
        with pytest.raises(Corrupt, match="not a plugin's value") as caught:
            await VERBS[verb](storage)
        assert caught.value.key == key
        found = await storage._keyspace.store.get(key)
        assert found is not None
        assert found.value == value
        assert "other" in await storage.list()
        await storage.sweep()
    await storage.set("key", 3)
    assert await storage.get("key") == 3
