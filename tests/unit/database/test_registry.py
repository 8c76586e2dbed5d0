"""Definitions of resources: how old they are, and what a drop leaves that fails."""

import copy
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import (
    Components,
    Database,
    Document,
    Events,
    Invalid,
    Plugin,
    QueuePlugin,
    Unavailable,
)
from jobsync.core.expiry import ExpiryRule
from jobsync.core.partitions import Partition, PartitionField
from jobsync.database.backfill import Backfill
from jobsync.database.definition import Definition, ProcessesDisagree, Rule
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


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", ["a", "b.c", "id", "_created_at", "_updated_at"])
async def test_a_partition_may_be_by_any_field_that_records_have(
    name: str, *, is_known: bool
) -> None:
    """Those that the library adds, too; whether its fields are passed with it or known."""
    fields = {"a": "string", "b": {"c": "number"}}
    async with Database("memory://") as database:
        if is_known:
            await database.create_resource("things", fields)
        things = await database.create_resource(
            "things", None if is_known else fields, partitions={"by": [name]}
        )
        assert things.partitions == {"by": (name,)}
        for wrong in ("d", "_version", "_entries"):
            with pytest.raises(Invalid, match=wrong):
                await database.create_resource("things", partitions={"other": [wrong]})
        assert things.partitions == {"by": (name,)}


@pytest.mark.parametrize("works", [True, False])
async def test_only_a_process_that_works_completes_indexes(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that enqueues, reads and writes defines them, and nothing runs in its background."""
    started: list[str] = []
    monkeypatch.setattr(Backfill, "start", lambda _, name: started.append(name))
    store = MemoryStore()
    async with Database(connection=store) as other:
        await (await other.create_resource("things")).insert({"id": "x", "a": "y"})
    async with Database(connection=store, work=works) as database:
        await database.create_resource("things")
        assert started == []
        things = await database.create_resource("things", partitions={"by": ["a"]})
        assert not things.definition.is_settled
        await database.drop_partition("things", "by")
        # Its entries are to be removed.
        assert things.definition.unsettled_keys
        assert started == (["things"] * 2 if works else [])
        sessions = await database.define_resource("sessions", rules=[ExpiryRule(ttl=60.0)])
        assert sessions.definition.is_settled
        await database.drop_expiry("sessions")
        assert sessions.definition.unsettled_keys
        assert started == (["things", "things", "sessions"] if works else [])
        started.clear()
        monkeypatch.setattr(type(database._registry), "drop", _fail)
        with pytest.raises(Unavailable):
            await database.drop_resource("things")
        assert started == (["things"] if works else [])


class Wanting(Plugin):
    """Wants an index of each resource, as the plugin for expiry does."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def choose_rules(self, definition: Definition) -> list[Rule]:
        del definition
        return [self.rule]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ExpiryRule(ttl=60.0), ExpiryRule(ttl=90.0)),
        (Partition("by", (PartitionField("a"),)), Partition("by", (PartitionField("b"),))),
    ],
)
async def test_processes_whose_plugins_disagree_are_told_so(one: Rule, other: Rule) -> None:
    """As with partitions that a program names itself: each change costs all writers."""
    store = MemoryStore()
    told: list[ProcessesDisagree] = []
    processes = []
    for rule in (one, other):
        process = Database(connection=store, plugins=[Wanting(rule)], work=False)
        process.on("resource:processes-disagree", told.append)
        processes.append(await process.connect())
    for process in processes:
        await process.create_resource("r")
    # It was changed once, which is a deployment.
    assert told == []
    await processes[0].create_resource("r")
    (event,) = told
    assert (event.resource, event.index, event.is_used) == ("r", one.name, True)
    assert (event.rule, event.other) == (str(one), str(other))
    for process in processes:
        await process.disconnect()


async def _fail(*_: object) -> None:
    raise Unavailable("store", "away")


@pytest.mark.parametrize(
    "wrong",
    [
        {"hooks": {"before_inser": print}},
        {"hooks": {"before_insert": 5}},
        {"hooks": []},
        {"partitions": {"by": ["z"]}},
        {"partitions": 5},
        {"type": int, "attributes": None},
        {"attributes": {}, "type": dict},
        {"attributes": {"a": "strin"}},
        {"strict": "yes"},
    ],
)
async def test_a_resource_of_which_one_option_is_wrong_is_not_defined(
    wrong: dict[str, Any],
) -> None:
    """Nothing was written, here or in the store."""
    store = MemoryStore()
    async with Database(connection=store) as database:
        with pytest.raises(Invalid):
            await database.create_resource("things", **{"attributes": {"a": "string"}, **wrong})
        assert [*database.resources] == []
        assert await store.scan("resource/") == []


class _Thing(msgspec.Struct):
    a: str


async def test_a_type_and_attributes_are_never_combined() -> None:
    """Not even with none: that would describe records, too."""
    async with Database("memory://") as database:
        create: Any = database.create_resource
        for attributes in ({}, {"a": "string"}):
            with pytest.raises(Invalid, match="cannot be combined with type"):
                await create("things", attributes, type=_Thing)
        typed = await create("things", type=_Thing)
        # Who asks without the type gets documents, from the same resource.
        plain = database.resource("things")
        assert typed is not plain
        assert (plain.record_type, typed.events, typed._hooks) == (None, plain.events, plain._hooks)
        inserted = await typed.insert(_Thing("x"))
        assert inserted == _Thing("x")
        (found,) = await plain.list()
        assert (type(found), found.a) == (Document, "x")
        assert await database.resource("things", type=_Thing).list() == [_Thing("x")]


@pytest.mark.parametrize("name", ["resources", "plugins"])
async def test_a_copy_of_a_registry_shows_the_same(name: str) -> None:
    """Found: to copy one, or to ask a half-made one for anything, recursed without an end."""
    async with Database("memory://", plugins=[QueuePlugin("mails")]) as database:
        await database.create_resource("notes")
        registry = getattr(database, name)
        again = copy.copy(registry)
        assert [(each, again[each]) for each in again] == [(each, registry[each]) for each in again]
        assert len(again) == len(registry) > 0
        kind: Any = type(registry)
        assert not hasattr(kind.__new__(kind), "notes")
        with pytest.raises(AttributeError, match="has no attribute '_unknown'"):
            _ = registry._unknown
