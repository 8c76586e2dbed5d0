"""What a sweep does and tells about each record, where not all of them have the same fate."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from waiting import until

from jobsync import Database, Event, Invalid, Resource, TTLPlugin
from jobsync.stores.contract import Change, Delete, Outcome, Put, Unknown
from jobsync.ttl.callback import ExpiryCallback

CALM: dict[str, Any] = {
    "heartbeat_interval": 10.0,
    "worker_timeout": 60.0,
    "skip_cold_start": True,
    "cleanup_interval": 3600,
    "batch_size": 100,
}
FATES = ("gone", "renewed", "removed", "unknown", "refused", "gone too")
"""What becomes of the records, which have these ids."""

ORDERS = [FATES, FATES[::-1], (*FATES[2:], *FATES[:2])]
SOFT = {"field": "at", "on_expire": "soft-delete", "delete_field": "left_at"}
ARCHIVE = {"field": "at", "on_expire": "archive", "archive_resource": "old"}
COUNTS = ("expired", "deleted", "soft_deleted", "archived", "kept", "errors")


class Stage:
    """Sweeps of one resource, and everything that is told about them.

    The first write of a sweep gives each record the fate of its name.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.told: list[Event] = []

    async def open(self, rule: dict[str, Any]) -> None:
        """Begin to govern the resource, which has one record for each fate soon."""
        self.ttl = TTLPlugin(resources={"notes": rule}, **CALM)
        await self.database.use_plugin(self.ttl)
        await until(lambda: self.ttl.stats()["total_scans"] == 1, "the first sweep is over")
        self.notes: Resource = await self.database.create_resource("notes", {"at": "number"})

    async def sweep(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Sweep, and return the result. Each record of a name has its fate in the first write."""
        write, settled = self.notes.records.write, set[str]()

        async def write_by_fate(changes: Sequence[Change]) -> list[Outcome]:
            ids = [_id_of(change) for change in changes]
            if "refused" in ids:
                raise Invalid("at", "…", "is refused", "nothing helps")
            fresh = [each for each in ids if each not in settled]
            settled.update(fresh)
            if "renewed" in fresh:
                await self.notes.update("renewed", {"at": 9e9})
            if "removed" in fresh:
                await self.notes.delete("removed")
            lost = [each for each in changes if _id_of(each) == "unknown"]
            done = iter(await write([each for each in changes if each not in lost]))
            return [Unknown("no reply") if each in lost else next(done) for each in changes]

        with monkeypatch.context() as patched:
            patched.setattr(self.notes.records, "write", write_by_fate)
            self.listen()
            return await self.ttl.run_cleanup()

    def listen(self) -> None:
        """Note what is told from now on."""
        self.told.clear()
        self.database.events.on("plg:ttl:*", self.told.append)
        self.database.events.on("resource:*", self.told.append)

    def ids(self, name: str, *, but: str = "") -> list[str]:
        """Return the ids in the events of a name about the resource."""
        events = [each for each in self.told if each.name == name and each["resource"] == "notes"]
        return sorted(found for each in events for found in each["ids"] if found != but)

    def expired(self) -> list[tuple[str, str, float, bool]]:
        """Return what was told about each record that was dealt with."""
        fields = ("record_id", "on_expire", "expired_at", "is_kept")
        told = [each for each in self.told if each.name == "plg:ttl:record-expired"]
        return sorted(tuple(each[field] for field in fields) for each in told)

    def errors(self) -> list[tuple[str | None, str]]:
        """Return what was told about each record that could not be dealt with."""
        told = [each for each in self.told if each.name == "plg:ttl:cleanup-error"]
        return sorted((each["record_id"], each["error"]) for each in told)


def _id_of(change: Change) -> str:
    key = change.base.key if change.base is not None else change.key
    return key.rpartition("/")[2].replace("!20", " ")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """A stage on a store in memory."""
    async with Database("memory://") as database:
        yield Stage(database)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strategy", ["hard-delete", "soft-delete", "archive", "callback"])
async def test_each_record_is_counted_and_told_by_its_own_fate(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, strategy: str, order: Sequence[str]
) -> None:
    """One that was renewed or removed meanwhile is in no event, no count and no error."""
    rules: dict[str, dict[str, Any]] = {
        "hard-delete": {"field": "at"},
        "soft-delete": SOFT,
        "archive": ARCHIVE,
        "callback": {"field": "at", "on_expire": "callback", "callback": lambda *_: True},
    }
    await stage.open(rules[strategy])
    at = {name: 100.0 + place for place, name in enumerate(order)}
    await stage.notes.insert_many([{"id": name, "at": at[name]} for name in order])
    result = await stage.sweep(monkeypatch)
    done = ["gone", "gone too"]
    field = {"soft-delete": "soft_deleted", "archive": "archived"}.get(strategy, "deleted")
    expected = {**dict.fromkeys(COUNTS, 0), field: 2, "expired": 2, "errors": 2}
    assert {name: getattr(result, name) for name in COUNTS} == expected
    stats = stage.ttl.stats()
    assert {name: stats[f"total_{name}"] for name in COUNTS} == expected
    assert stage.expired() == [(name, strategy, at[name], False) for name in done]
    refused, unknown = stage.errors()
    assert (refused[0], unknown[0]) == ("refused", "unknown")
    assert "is refused" in refused[1]
    assert unknown[1] == "its outcome is unknown: no reply"
    left = {each.id: each for each in await stage.notes.list()}
    stays = {"renewed", "unknown", "refused"}
    if strategy == "soft-delete":
        assert stage.ids("resource:deleted", but="removed") == []
        assert stage.ids("resource:updated", but="renewed") == done
        assert left.keys() == {*stays, *done}
        assert {name for name, each in left.items() if each.get("left_at")} == {*done}
    else:
        assert stage.ids("resource:deleted", but="removed") == done
        assert stage.ids("resource:updated", but="renewed") == []
        assert left.keys() == stays
    if strategy == "archive":
        copies = await stage.database.resources["old"].list()
        assert sorted((each.original_id, each.at) for each in copies) == [
            (name, at[name]) for name in done
        ]
    assert {name: left[name].at for name in stays} == {
        name: 9e9 if name == "renewed" else at[name] for name in stays
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kept", [(), ("gone",), ("renewed", "unknown"), ("gone", "refused")])
async def test_what_a_callback_keeps_is_told_and_its_fate_is_that_of_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kept: Sequence[str], order: Sequence[str]
) -> None:
    """Nothing that it keeps is written; what it raises concerns one record alone."""

    async def decide(record: Any, _: Resource) -> bool:
        if record.id == "gone too":
            raise ValueError("no")
        return record.id not in kept

    await stage.open({"field": "at", "on_expire": "callback", "callback": decide})
    at = {name: 100.0 + place for place, name in enumerate(order)}
    await stage.notes.insert_many([{"id": name, "at": at[name]} for name in order])
    result = await stage.sweep(monkeypatch)
    deleted = [name for name in ("gone",) if name not in kept]
    failed = [name for name in ("unknown", "refused") if name not in kept]
    assert (result.deleted, result.kept, result.errors) == (
        len(deleted),
        len(kept),
        len(failed) + 1,
    )
    assert result.expired == len(deleted) + len(kept)
    told = [*((name, True) for name in kept), *((name, False) for name in deleted)]
    assert stage.expired() == sorted(
        (name, "callback", at[name], is_kept) for name, is_kept in told
    )
    assert [name for name, _ in stage.errors()] == sorted([*failed, "gone too"])
    assert stage.ids("resource:deleted", but="removed") == deleted
    left = await stage.notes.list_ids()
    assert sorted(left) == sorted({*order} - {*deleted, "removed"})


@pytest.mark.parametrize("step", ["copy", "delete"])
@pytest.mark.parametrize("order", ORDERS)
async def test_a_move_is_counted_if_this_sweep_has_completed_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, step: str, order: Sequence[str]
) -> None:
    """Not if another process has, and not if nobody knows; the next sweep completes the rest."""
    await stage.open(ARCHIVE)
    at = {name: 100.0 + place for place, name in enumerate(order)}
    await stage.notes.insert_many([{"id": name, "at": at[name]} for name in order])
    old = stage.database.resources["old"]
    source, target = stage.notes.records.write, old.records.write
    others = {"removed", "renewed"} if step == "delete" else set[str]()

    async def write(changes: Sequence[Change]) -> list[Outcome]:
        if not all(isinstance(each, Delete) for each in changes):
            return await source(changes)
        # Another process completes these in this moment.
        await source([each for each in changes if _id_of(each) in others])
        return await write_but(source, changes, [_id_of(each) for each in changes])

    async def write_copies(changes: Sequence[Change]) -> list[Outcome]:
        ids = [str(each.value["original_id"]) for each in changes if isinstance(each, Put)]
        return await write_but(target, changes, ids)

    async def write_but(real: Any, changes: Sequence[Change], ids: list[str]) -> list[Outcome]:
        kept = [each for each, name in zip(changes, ids, strict=True) if name != "unknown"]
        done = iter(await real(kept))
        return [Unknown("no reply") if name == "unknown" else next(done) for name in ids]

    with monkeypatch.context() as patched:
        if step == "delete":
            patched.setattr(stage.notes.records, "write", write)
        else:
            patched.setattr(old.records, "write", write_copies)
        stage.listen()
        result = await stage.ttl.run_cleanup()
    moved = sorted({*order} - others - {"unknown"})
    expected = {**dict.fromkeys(COUNTS, 0), "archived": len(moved), "expired": len(moved)}
    assert {name: getattr(result, name) for name in COUNTS} == {**expected, "errors": 1}
    assert stage.expired() == [(name, "archive", at[name], False) for name in moved]
    assert stage.errors() == [("unknown", "its move is not complete")]
    assert stage.ids("resource:deleted") == moved
    assert await stage.notes.count() <= 1
    rest = await stage.ttl.run_cleanup()
    assert (rest.archived, rest.errors) == (1, 0)
    assert stage.expired()[-1:] == [("unknown", "archive", at["unknown"], False)]
    assert await stage.notes.count() == 0
    assert sorted((each.original_id, each.at) for each in await old.list()) == sorted(at.items())


@pytest.mark.parametrize("attributes", [None, {"expires_at": "number"}])
@pytest.mark.parametrize("exists", [True, False])
async def test_a_resource_is_awaited_until_it_says_by_what_its_records_expire(
    stage: Stage, attributes: dict[str, Any] | None, *, exists: bool
) -> None:
    """One that exists and that nobody has described is reported as one that does not exist."""
    stage.ttl = TTLPlugin(resources=["notes"], **CALM)
    await stage.database.use_plugin(stage.ttl)
    await until(lambda: stage.ttl.stats()["total_scans"] == 1, "the first sweep is over")
    if exists:
        await stage.database.create_resource("notes", attributes)
    stage.listen()
    for _ in range(3):
        await stage.ttl.run_cleanup()
    awaited = [each["resource"] for each in stage.told if each.name == "plg:ttl:resource-missing"]
    assert awaited == ([] if exists and attributes else ["notes"])


@pytest.mark.parametrize("taken", [(), ("a",), ("a", "c"), ("a", "b", "c", "d")])
async def test_moves_to_several_archives_are_completed_together(
    stage: Stage, taken: Sequence[str]
) -> None:
    """Whatever ids the archives have used since the marks: each copy is in its own archive."""
    notes = await stage.database.create_resource("notes", {"at": "number"})
    archives = {"old": ("a", "b"), "older": ("c", "d")}
    moves = notes.records.moves
    await notes.insert_many([{"id": name} for name in "abcd"])
    for archive, names in archives.items():
        found = await notes.records.keyspace.get_many(names)
        plan = await moves.plan([each for each in found if each], archive, 9.0, keep_id=True)
        await notes.records.write([each for each in plan if isinstance(each, Put)])
        used = stage.database.resources[archive]
        await used.insert_many([{"id": name, "at": 5} for name in names if name in taken])
    marked = [each for each in await notes.records.keyspace.get_many("abcd") if each]
    result = await moves.complete(marked)
    assert sorted(each.value["id"] for each in result.archived) == [*"abcd"]
    assert result.unsure == []
    assert await notes.list_ids() == []
    for archive, names in archives.items():
        stored = await stage.database.resources[archive].list()
        copies = {each.original_id: each for each in stored if "original_id" in each}
        assert sorted(copies) == [*names]
        # A copy has the id of its record, unless somebody else has it there.
        assert [name for name in names if copies[name].id == name] == [
            name for name in names if name not in taken
        ]
        assert len(stored) == len(names) + len([name for name in names if name in taken])


async def test_a_mark_is_a_change_of_its_record(stage: Stage) -> None:
    """As by an update: who lists what has changed lately finds it."""
    await stage.open(SOFT)
    schema = {"at": "number", "left_at": "number"}
    notes = await stage.database.create_resource("notes", schema)
    before = await notes.insert({"id": "a", "at": 1.0})
    clock = stage.database.components.clock
    await until(lambda: clock.wall().seconds > before["_updated_at"] + 0.001, "it is later")
    assert (await stage.ttl.run_cleanup()).soft_deleted == 1
    after = await notes.get("a")
    assert after is not None
    assert after["_updated_at"] == round(after["left_at"], 3) > before["_updated_at"]
    assert after["_created_at"] == before["_created_at"]


async def test_totals_are_those_of_all_sweeps(stage: Stage) -> None:
    """And not of the last one."""
    await stage.open({"field": "at"})
    for number, total in ((1, 1), (2, 3), (0, 3)):
        await stage.notes.insert_many([{"at": 1.0} for _ in range(number)])
        assert (await stage.ttl.run_cleanup()).deleted == number
        stats = stage.ttl.stats()
        assert (stats["total_deleted"], stats["total_expired"]) == (total, total)
    assert stage.ttl.stats()["total_scans"] == 4


@pytest.mark.parametrize(("has_room", "asked"), [(True, 6), (False, 2)])
async def test_a_sweep_ends_when_nobody_can_be_asked_any_more(
    monkeypatch: pytest.MonkeyPatch, has_room: bool, asked: int
) -> None:
    """It does not go on to read a million records of which each is only an error."""
    monkeypatch.setattr(ExpiryCallback, "has_room", has_room)
    rule = {"field": "at", "on_expire": "callback", "callback": lambda *_: False}
    async with Database("memory://") as database:
        ttl = TTLPlugin(resources={"notes": rule}, **{**CALM, "batch_size": 2})
        await database.use_plugin(ttl)
        await until(lambda: ttl.stats()["total_scans"] == 1, "the first sweep is over")
        notes = await database.create_resource("notes", {"at": "number"})
        await notes.insert_many([{"at": 1.0} for _ in range(6)])
        done = await ttl.run_cleanup()
    assert (done.kept, done.errors) == ((asked, 0) if has_room else (0, asked))
