"""The storage of a plugin while others write to it, or time passes, between a read and a write."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Database, Events, Invalid, PluginStorage
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.memory import MemoryStore


class RacingStore(MemoryStore):
    """Lets others do something just before a write of a plugin's value arrives."""

    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if changes[0].key.startswith("plugin/") and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return await super().write(changes)


class Stage:
    """Two processes with a storage each."""

    def __init__(self, clock: FakeClock) -> None:
        components = Components(clock=clock, randomness=SeededRandomness(3), events=Events())
        self.store = RacingStore(components=components)
        self.databases = [Database(connection=self.store, components=components) for _ in range(2)]

    async def open(self) -> list[PluginStorage]:
        """Return their storages."""
        return [(await each.connect()).open_storage("sample") for each in self.databases]

    async def close(self) -> None:
        """End both."""
        for each in self.databases:
            await each.disconnect()


Verb = Callable[[PluginStorage], Awaitable[Any]]


@pytest.mark.parametrize(
    ("age", "verb", "rival", "result", "value", "expires_in"),
    [
        # A number that was there, and has expired or was deleted before the write.
        (0, lambda one: one.increment("n", 5), lambda two: two.delete("n"), 5, 5, None),
        (0, lambda one: one.increment("n", 5), lambda two: two.set("n", 1), 6, 6, None),
        (0, lambda one: one.increment("n", 5), lambda two: two.set("n", 1, ttl=60), 6, 6, 60),
        (30, lambda one: one.increment("n", 5), lambda two: two.set("n", 1, ttl=60), 6, 6, 60),
        # Of two that delete a value, one is told that there was one.
        (0, lambda one: one.delete("n"), lambda two: two.delete("n"), False, None, None),
        (0, lambda one: one.delete("n"), lambda two: two.set("n", 1), True, None, None),
        (30, lambda one: one.delete("n"), lambda two: two.delete("n"), False, None, None),
        (30, lambda one: one.delete("n"), lambda two: two.set("n", 1), True, None, None),
        # What has expired is absent and can be swept, unless it was renewed.
        (30, lambda one: one.set_if_absent("n", 5), lambda two: two.set("n", 1), None, 1, None),
        (30, lambda one: one.sweep(), lambda two: two.set("n", 1, ttl=60), 0, 1, 60),
        (30, lambda one: one.sweep(), lambda two: two.set("n", 1), 0, 1, None),
        (30, lambda one: one.sweep(), lambda two: two.sweep(), 0, None, None),
    ],
)
async def test_whoever_comes_first_counts(
    clock: FakeClock,
    age: float,
    verb: Verb,
    rival: Verb,
    result: Any,
    value: Any,
    expires_in: float | None,
) -> None:
    """What is returned is what was done, not what was to be done."""
    stage = Stage(clock)
    one, two = await stage.open()
    await one.set("n", 10, ttl=30)
    await clock.sleep(age)
    stage.store.meanwhile = lambda: rival(two)
    start = clock.wall_seconds
    assert await verb(one) == result
    found = await one.read("n")
    assert (None if found is None else found.value) == value
    if found is not None:
        assert found.expires_at == (None if expires_in is None else start + expires_in)
    await stage.close()


async def test_a_number_that_expires_while_it_is_incremented_starts_at_0(clock: FakeClock) -> None:
    """The sum is that of the value that was replaced."""
    stage = Stage(clock)
    one, two = await stage.open()
    await one.set("n", 10, ttl=30)

    async def meanwhile() -> None:
        await two.increment("n")
        await clock.sleep(60)

    stage.store.meanwhile = meanwhile
    assert await one.increment("n", 5) == 5
    assert await one.get("n") == 5
    await stage.close()


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [
        (None, None),
        (0.5, 0.5),
        (90, 90.0),
        (timedelta(minutes=1), 60.0),
        (timedelta(days=2, milliseconds=500), 172_800.5),
    ],
)
async def test_every_way_to_set_a_value_keeps_its_time_to_live(
    clock: FakeClock, ttl: Any, seconds: float | None
) -> None:
    """Also where a value was before."""
    stage = Stage(clock)
    one, _ = await stage.open()
    expected = None if seconds is None else clock.wall_seconds + seconds

    async def check(version: str | None) -> str:
        found = await one.read("key")
        assert found is not None
        assert version == found.version
        assert found.expires_at == expected
        return found.version

    await check(await one.set_if_absent("key", 1, ttl=ttl))
    version = await check(await one.set("key", 2, ttl=ttl))
    await check(await one.set_if_version("key", 3, version, ttl=ttl))
    await one.delete("key")
    await check(await one.set_if_absent("key", 4, ttl=ttl))
    assert await one.get("key") == 4
    await stage.close()


@pytest.mark.parametrize("wrong", [5, None, b"key", ["key"]])
async def test_every_key_is_text(clock: FakeClock, wrong: Any) -> None:
    """It is refused before anything is asked or written."""
    stage = Stage(clock)
    one, _ = await stage.open()
    calls: list[Awaitable[object]] = [
        one.get(wrong),
        one.read(wrong),
        one.set(wrong, 1),
        one.set_if_absent(wrong, 1),
        one.set_if_version(wrong, 1, "v"),
        one.increment(wrong),
        one.delete(wrong),
        one.list(wrong),
        one.lock(wrong).__aenter__(),
    ]
    for call in calls:
        with pytest.raises(Invalid, match="key must be text"):
            await call
    assert await one.list() == []
    await stage.close()
