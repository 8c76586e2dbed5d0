"""The outcome of a batch that is written in parts, whatever becomes of each part."""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast, get_args

import msgspec
import pytest
from chance import FakeClock

from jobsync import Components, Database, Event, Incomplete, Put, Unavailable
from jobsync.database import keyspace as keyspace_module
from jobsync.database.keyspace import BatchResult, Keyspace, create_many, remove_many
from jobsync.stores.contract import Change, Outcome, Record, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

Fate: TypeAlias = Literal["applied", "lost request", "lost reply", "refused", "unreadable"]
"""What becomes of a part."""

NAMES = ["a", "b", "c"]

_numbers = itertools.count()


class FatefulStore(StoreDecorator):
    """A store that does with each write what the test says, and with reads likewise."""

    def __init__(self, inner: MemoryStore, fates: Sequence[Fate]) -> None:
        super().__init__(inner)
        self._fates = list(fates)
        self.may_have_written = False

    @property
    def _fate(self) -> Fate:
        return self._fates[0] if self._fates else "applied"

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        if self._fate == "unreadable":
            raise Unavailable("store", "a read was refused")
        return await super().get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        fate = self._fate
        del self._fates[:1]
        if fate in {"refused", "unreadable"}:
            raise Unavailable("store", "a write was refused")
        self.may_have_written = True
        if fate == "lost request":
            return [Unknown("no reply")] * len(changes)
        outcomes = await super().write(changes)
        return [Unknown("no reply")] * len(changes) if fate == "lost reply" else outcomes


@pytest.fixture(autouse=True)
def one_record_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write each record in a part of its own."""
    monkeypatch.setattr(keyspace_module, "_MAX_RECORDS", 1)


async def check_batch(fates: Sequence[Fate], *, removes: bool) -> None:
    """Write a batch; compare what it says with what was written."""
    inner = MemoryStore(f"batches-{next(_numbers)}", Components.system())
    keyspace = Keyspace(lambda: inner, "data/things/", Components.system(), "things")
    if removes:
        await create_many(keyspace, dict.fromkeys(NAMES, 1))
    store = FatefulStore(inner, fates)
    keyspace = Keyspace(lambda: store, "data/things/", Components.system(), "things")
    try:
        result = await (
            remove_many(keyspace, NAMES)
            if removes
            else create_many(keyspace, dict.fromkeys(NAMES, 1))
        )
    except Unavailable:
        assert not store.may_have_written
        result = BatchResult(unsent=NAMES)
    told = [*result.written, *result.unchanged, *result.unknown, *result.unsent]
    assert sorted(told) == NAMES
    for name in NAMES:
        record = await inner.get(f"data/things/{name}")
        is_done = (record is None) == removes
        assert is_done or name not in result.written
        assert not is_done or name not in result.unsent
    # What may have happened is not called undone.
    unsure = [name for name, fate in zip(NAMES, fates, strict=True) if fate.startswith("lost")]
    assert [*result.unknown] == [name for name in unsure if name not in result.unsent]
    assert (result.cause is not None) == bool(result.unsent and store.may_have_written)


class LimitedStore(MemoryStore):
    """Is away after so many writes of records."""

    left = 100

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if changes[0].key.startswith("data/"):
            self.left -= 1
            if self.left < 0:
                raise Unavailable("store", "a write was refused")
        return await super().write(changes)


@pytest.mark.parametrize("verb", ["insert", "delete", "delete all"])
async def test_all_learn_what_a_batch_has_done_before_it_failed(
    verb: Literal["insert", "delete", "delete all"],
) -> None:
    """Listeners and hooks, which there are none of for `delete_all`: its effect stays."""
    store = LimitedStore()
    async with Database(connection=store) as database:
        things = await database.create_resource("things")
        if verb != "insert":
            await things.insert_many([{"id": name} for name in NAMES])
        events: list[Event] = []
        results: list[Any] = []
        database.on("resource:*", events.append)
        for hooked in ("insert", "delete"):
            things.after(hooked, results.append)
        store.left = 2
        records = [{"id": name} for name in NAMES]
        verbs: dict[str, Callable[[], Awaitable[object]]] = {
            "insert": lambda: things.insert_many(records),
            "delete": lambda: things.delete_many(NAMES),
            "delete all": things.delete_all,
        }
        with pytest.raises(Incomplete) as raised:
            await verbs[verb]()
        assert (raised.value.written, raised.value.unsent) == (("a", "b"), ("c",))
        assert (raised.value.conflicts, raised.value.unknown) == ((), ())
        # Why the rest was not sent.
        assert isinstance(raised.value.__cause__, Unavailable)
        assert [event["ids"] for event in events] == [("a", "b")]
        told = [each["id"] for each in results] if verb == "insert" else results
        expected = {"insert": ["a", "b"], "delete": [True, True, False], "delete all": []}
        assert told == expected[verb]


class LosingStore(MemoryStore):
    """Somebody else writes first, so many times."""

    rivals = 0

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.rivals:
            self.rivals -= 1
            found = await self.get(changes[0].key, tombstones=True)
            await super().write([Put(changes[0].key, self.rivals, found)])
        return await super().write(changes)


async def test_a_writer_that_loses_again_and_again_waits_longer_each_time() -> None:
    """The next write begins with the shortest pause."""
    pauses: list[float] = []

    class NotingClock(FakeClock):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)

    highest = SimpleNamespace(uniform=lambda _, high: high)
    components = msgspec.structs.replace(
        Components.system(), clock=NotingClock(), randomness=cast("Any", highest)
    )
    store = LosingStore()
    keyspace = Keyspace(lambda: store, "data/things/", components, "things")
    for _ in range(2):
        pauses.clear()
        store.rivals = 9
        record = await keyspace.put("a", lambda _: "mine")
        assert record.value == "mine"
        assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]


@pytest.mark.parametrize("removes", [False, True], ids=["insert", "delete"])
async def test_a_batch_reports_what_became_of_each_record(*, removes: bool) -> None:
    """Unavailable means that nothing was written. Otherwise each name is in one list."""
    for fates in itertools.product(get_args(Fate), repeat=len(NAMES)):
        try:
            await check_batch(fates, removes=removes)
        except AssertionError as error:
            error.add_note(f"the parts were {', '.join(fates)}")
            raise
