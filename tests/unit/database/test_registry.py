"""Definitions of resources: how old they are, and what a drop leaves that fails."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Database, Events, Unavailable
from jobsync.database.registry import list_dropped_indexes
from jobsync.database.resource_records import DEFINITION_AGE
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

T = TypeVar("T")


class SlowStore(StoreDecorator):
    """A store whose replies take a while."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MemoryStore())
        self._clock = clock
        self.delay = 0.0

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        del call, sent
        result = await work()
        self._clock.mono_seconds += self.delay
        return result


READS: dict[str, Callable[[Database], Awaitable[Any]]] = {
    "list": lambda database: database.list_resources(),
    "define": lambda database: database.create_resource("things"),
    "change": lambda database: database._registry.change("things", lambda now: now),
    "reload": lambda database: database.resources["things"].records.reload(),
    "refresh": lambda database: database.resources["things"].records.refresh_definition(0.0),
}


@pytest.mark.parametrize("read", READS)
async def test_a_definition_is_as_old_as_the_question(clock: FakeClock, read: str) -> None:
    """Not as its answer: another process may have added an index while that was under way."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store = SlowStore(clock)
    async with Database(connection=store, components=components) as database:
        things = await database.create_resource("things")
        clock.mono_seconds += 100 * DEFINITION_AGE
        asked_at = clock.mono_seconds
        store.delay = DEFINITION_AGE / 8
        await READS[read](database)
        store.delay = 0.0
        for age, is_current in ((DEFINITION_AGE, True), (DEFINITION_AGE + 0.5, False)):
            clock.mono_seconds = asked_at + age
            assert things.records.is_definition_current == is_current


class FailingStore(MemoryStore):
    """Cannot list records while it is away."""

    is_away = False

    async def heads(self, prefix: str, **options: Any) -> Any:
        if self.is_away and prefix.startswith("data/"):
            raise Unavailable(self.name, "away")
        return await super().heads(prefix, **options)


async def test_a_drop_that_fails_has_noted_which_indexes_there_are() -> None:
    """A cleanup removes what is left of them, whoever completes the drop."""
    store = FailingStore()
    async with Database(connection=store) as database:
        things = await database.create_resource("things", partitions={"by_a": ["a"]})
        keys = list(things.definition.index_keys)
        store.is_away = True
        with pytest.raises(Unavailable):
            await database.drop_resource("things")
        store.is_away = False
        notes = await database._registry.read_dropped()
        assert {name: list_dropped_indexes(note) for name, note in notes.items()} == {
            "things": keys
        }
