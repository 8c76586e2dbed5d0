"""Sweeps of expired records do the same on every store, whoever dies or interferes meanwhile."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from decimal import Decimal
from functools import partial
from operator import methodcaller
from typing import Any

import msgspec
import pytest
from store_locations import StoreLocation

from jobsync import (
    Conflict,
    Database,
    Document,
    Event,
    NotFound,
    Resource,
    Store,
    Unavailable,
)
from jobsync.components import NONCE_LENGTH
from jobsync.coordination.fleet_clock import MAX_SKEW
from jobsync.core.attributes import parse
from jobsync.core.expiry import ExpiryRule
from jobsync.database import backfill
from jobsync.database.archive import ARCHIVING
from jobsync.stores.contract import TRAIL_LENGTH, Change, Outcome, Put, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.metered import Meter, MeteredStore
from jobsync.ttl.callback import ExpiryCallback
from jobsync.ttl.sweep import ResourceSweep, SweepCounts, SweepListener

START = 1_700_000_000.0
SCHEMA = parse({"n": "number", "expires_at": "number"})
HARD = ExpiryRule()
SOFT = ExpiryRule(on_expire="soft-delete", delete_field="deleted_at")
ARCHIVE = ExpiryRule(on_expire="archive", archive_resource="old")
KEEP_ID = msgspec.structs.replace(ARCHIVE, keep_original_id=True)
CHAINED = ExpiryRule(field="archived_at", on_expire="archive", archive_resource="older")
CALLBACK = ExpiryRule(on_expire="callback")
RULES = [HARD, SOFT, ARCHIVE, KEEP_ID, CALLBACK]
IDS = ["hard", "soft", "archive", "keep-id", "callback"]


class Crashed(BaseException):
    """The process has died."""


class HookedStore(StoreDecorator):
    """Calls a function before each batch of writes, and can die after some changes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.before_write: Callable[[], Awaitable[object]] | None = None
        self.left: int | None = None
        """How many changes are applied before the crash; None for no crash."""
        self.unknown_at: int | None = None
        """How many writes are answered before one whose outcome is not told."""
        self.replies = True
        """Whether the reply to the last change arrives before the crash."""

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write, up to the crash."""
        if (hook := self.before_write) is not None:
            self.before_write = None
            await hook()
        if self.unknown_at is not None:
            self.unknown_at -= 1
            if self.unknown_at < 0:
                self.unknown_at = None
                if not self.replies:
                    await self.inner.write(changes)
                return [Unknown("no reply") for _ in changes]
        if self.left is None:
            return await self.inner.write(changes)
        left, self.left = self.left, max(0, self.left - len(changes))
        if left >= len(changes):
            return await self.inner.write(changes)
        if part := changes[: left + (not self.replies)]:
            await self.inner.write(part)
        raise Crashed


class Stage:
    """A resource whose records expire, and sweeps of it at any time."""

    def __init__(self, database: Database, sessions: Resource) -> None:
        self.database = database
        self.sessions = sessions
        self.now = START
        self.expired: list[str] = []
        self.errors: list[tuple[str | None, str]] = []
        self.verdicts: dict[str, Any] = {}
        self.vetoed_by = ""
        """The record whose callback finds the clock to be wrong."""
        self.is_vetoed = False

    def get_now(self) -> float:
        """Return the time, unless it is not known."""
        if self.is_vetoed:
            raise Unavailable("the fleet's time", "the clock is wrong")
        return self.now

    def judge(self, record: Document, _: Resource) -> Any:
        """Decide as the test says; delete by default."""
        self.is_vetoed = self.is_vetoed or record.id == self.vetoed_by
        return self.verdicts.get(record.id, True)

    async def sweep(self, batch_size: int = 100) -> SweepCounts:
        """Sweep once."""
        counts = SweepCounts()
        listener = SweepListener(
            lambda record, *_: self.expired.append(record.id),
            lambda record_id, problem: self.errors.append((record_id, problem)),
        )
        callback = ExpiryCallback(self.judge)
        sweep = ResourceSweep(self.sessions, callback, self.get_now, batch_size, listener, counts)
        await sweep.run()
        return counts

    async def insert(self, *expiries: float) -> None:
        """Insert records named by their numbers, which expire so long after the start."""
        await self.sessions.insert_many(
            [{"id": f"r{i}", "n": i, "expires_at": START + at} for i, at in enumerate(expiries)]
        )

    async def count_entries(self) -> int:
        """Return how many index entries there are."""
        (index,) = self.sessions.definition.indexes
        prefix = self.sessions.records.open_index(index).prefix
        return len(await self.database.store.heads(prefix, limit=10_000))

    async def list_live(self) -> list[str]:
        """Return the records that were not deleted or marked."""
        return [d.id for d in await self.sessions.list() if d.get("deleted_at") is None]

    async def list_archived(self) -> list[str]:
        """Return the original ids of what is in the archive."""
        if "old" not in self.database.resources:
            await self.database.create_resource("old")
        return sorted(d.original_id for d in await self.database.resources.old.list())


@pytest.fixture
async def hooked(location: StoreLocation) -> AsyncIterator[HookedStore]:
    """A store that can interfere and die."""
    store = await location.open()
    yield HookedStore(store)
    await store.close()


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a backfill at once."""
    for delay in ("BUILD_DELAY", "LATE_BUILD_DELAY"):
        monkeypatch.setattr(backfill, delay, 0.0)


async def open_stage(database: Database, rule: ExpiryRule, name: str = "sessions") -> Stage:
    """Define a resource with a rule."""
    return Stage(database, await database.define_resource(name, SCHEMA, rules=[rule]))


@pytest.mark.parametrize("rule", RULES, ids=IDS)
async def test_records_that_expire_one_per_second_are_gone_after_the_next_sweep(
    hooked: HookedStore, rule: ExpiryRule
) -> None:
    """Each of 60, and no other: none is left for ever, and none goes early."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, rule)
        await stage.insert(*range(60))
        total = SweepCounts()
        for second in (-1, 0, 7, 14, 14.5, 40, 59):
            stage.now = START + second
            total.add(await stage.sweep(batch_size=7))
            left = [f"r{i}" for i in range(60) if i > second]
            assert sorted(await stage.list_live()) == sorted(left)
            assert await stage.count_entries() == len(left)
        assert total.expired == 60
        assert sorted(stage.expired) == sorted(f"r{i}" for i in range(60))
        assert len(await stage.list_archived()) == (60 if rule.archive_resource else 0)
        assert stage.errors == []


@pytest.mark.parametrize("rule", RULES, ids=IDS)
async def test_a_record_that_is_renewed_during_the_sweep_survives(
    hooked: HookedStore, rule: ExpiryRule
) -> None:
    """The sweep has read it as expired, and removes only that version."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, rule)
        await stage.insert(0, 0, 0)

        async def renew() -> None:
            await stage.sessions.update("r1", {"expires_at": START + 60})

        hooked.before_write = renew
        counts = await stage.sweep()
        assert counts.expired == 2
        assert counts.errors == 0
        assert await stage.list_live() == ["r1"]
        assert await stage.list_archived() == (["r0", "r2"] if rule.archive_resource else [])
        stage.now += 60
        assert (await stage.sweep()).expired == 1
        assert await stage.list_live() == []
        assert await stage.count_entries() == 0


async def test_a_time_of_another_type_expires_as_the_stored_number(hooked: HookedStore) -> None:
    """A Decimal is stored as a number, and the record expires by that number."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, HARD)
        await stage.sessions.insert({"id": "r0", "expires_at": Decimal(START)})
        await stage.sessions.insert({"id": "r1", "expires_at": Decimal(START + 1)})
        assert (await stage.sweep()).deleted == 1
        assert await stage.list_live() == ["r1"]


async def test_everything_that_expired_during_an_outage_is_caught_up(hooked: HookedStore) -> None:
    """In one sweep, in batches."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, HARD)
        await stage.insert(*(-i * 400 for i in range(216)), 1, 2)
        counts = await stage.sweep(batch_size=25)
        assert counts.deleted == 216
        assert await stage.sessions.count() == 2
        assert await stage.count_entries() == 2


@pytest.mark.parametrize("rule", [ARCHIVE, KEEP_ID], ids=["archive", "keep-id"])
@pytest.mark.parametrize("replies", [True, False], ids=["before", "after"])
async def test_an_archive_under_a_crash_at_any_write_has_one_copy_and_never_none(
    hooked: HookedStore, rule: ExpiryRule, *, replies: bool
) -> None:
    """The next sweep completes what was begun."""
    hooked.replies = replies
    crashes = 0
    for changes in range(100):
        name, archive = f"sessions{changes}", f"old{changes}"
        rule = msgspec.structs.replace(rule, archive_resource=archive)
        async with Database(connection=hooked) as database:
            stage = await open_stage(database, rule, name)
            await database.create_resource(archive)
            await stage.insert(0, 0, 60)
            hooked.left = changes
            try:
                await stage.sweep()
            except Crashed:
                crashes += 1
            is_complete = hooked.left > 0
            hooked.left = None
        async with Database(connection=hooked) as database:
            stage = await open_stage(database, rule, name)
            archived = await database.resources[archive].list()
            copies = [record.original_id for record in archived]
            assert len(copies) == len(set(copies))
            assert {*copies, *await stage.list_live()} == {"r0", "r1", "r2"}
            await stage.sweep()
            assert await stage.list_live() == ["r2"]
            assert await stage.count_entries() == 1
            archived = await database.resources[archive].list()
            assert sorted(record.original_id for record in archived) == ["r0", "r1"]
            assert sorted(record.n for record in archived) == [0, 1]
            for record in archived:
                assert (record.id == record.original_id) is rule.keep_original_id
        if is_complete:
            break
    assert crashes == 6


async def leave_marked(
    hooked: HookedStore,
    rule: ExpiryRule,
    *,
    is_copied: bool,
    count: int = 1,
    due: float = START,
) -> None:
    """Die in the middle of moving one record, or several at once, by a clock that says `due`."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, rule)
        stage.now = due
        await stage.list_archived()
        await stage.insert(*[due - START] * count)
        entries = len(database.resources.old.definition.indexes)
        hooked.left = 2 + entries if is_copied else count
        with pytest.raises(Crashed):
            await stage.sweep()
        hooked.left = None
        record = await database.store.get("data/sessions/r0")
        assert record is not None
        assert ARCHIVING in record.value
        # Only this library knows of it.
        document = await stage.sessions.get("r0")
        assert document is not None
        assert ARCHIVING not in document


@pytest.mark.parametrize("is_copied", [False, True], ids=["marked", "copied"])
@pytest.mark.parametrize(
    "verb", ["update", "replace", "upsert", "insert", "insert_many", "delete", "delete_many"]
)
async def test_a_writer_that_meets_a_marked_record_completes_the_move_first(
    hooked: HookedStore, verb: str, *, is_copied: bool
) -> None:
    """For the writer the record is gone; nothing that it writes is lost later."""
    await leave_marked(hooked, ARCHIVE, is_copied=is_copied)
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, ARCHIVE)
        sessions = stage.sessions
        new = {"id": "r0", "n": 7, "expires_at": START + 60}
        match verb:
            case "update":
                with pytest.raises(NotFound):
                    await sessions.update("r0", {"n": 7})
            case "replace":
                with pytest.raises(NotFound):
                    await sessions.replace("r0", new)
            case "upsert":
                await sessions.upsert(new)
            case "insert":
                await sessions.insert(new)
            case "insert_many":
                await sessions.insert_many([new])
            case "delete":
                assert not await sessions.delete("r0")
            case "delete_many":
                assert await sessions.delete_many(["r0"]) == 0
        has_new = verb in {"upsert", "insert", "insert_many"}
        await stage.sweep()
        assert await stage.list_live() == (["r0"] if has_new else [])
        assert await stage.list_archived() == ["r0"]
        (copy,) = await database.resources.old.list()
        assert copy.n == 0


async def test_a_copy_that_was_deleted_is_not_made_again(hooked: HookedStore) -> None:
    """Its tombstone tells that it was there."""
    await leave_marked(hooked, ARCHIVE, is_copied=True)
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, ARCHIVE)
        assert await database.resources.old.delete_all() == 1
        await stage.sweep()
        assert await stage.list_live() == []
        assert await stage.list_archived() == []


@pytest.mark.parametrize(
    "meanwhile", ["deleted", "moved on", "changed", "changed often", "described"]
)
@pytest.mark.parametrize("rule", [ARCHIVE, KEEP_ID], ids=["archive", "keep-id"])
async def test_a_copy_that_has_changed_since_the_crash_is_not_made_again(
    hooked: HookedStore, rule: ExpiryRule, meanwhile: str, no_delay: None
) -> None:
    """What is there, or was deleted, remembers by which write it was made."""
    await leave_marked(hooked, rule, is_copied=True)
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, rule)
        old = database.resources.old
        inserted: list[Any] = []
        (copy,) = await old.list()
        match meanwhile:
            case "deleted":
                await old.delete(copy.id)
            case "moved on":
                await database.define_resource("old", rules=[CHAINED])
                await database.backfill("old")
                assert (await Stage(database, old).sweep()).archived == 1
            case "changed":
                await old.update(copy.id, {"archived_at": 5, "original_id": "x"})
            case "changed often":
                for n in range(TRAIL_LENGTH + 1):
                    await old.update(copy.id, {"n": n})
            case "described":
                await database.create_resource("old", {"archived_at": "datetime"})
        copies = await old.count()
        database.on("resource:inserted", inserted.append)
        await stage.sweep()
        assert await stage.list_live() == []
        assert inserted == []
        assert await old.count() == copies == (meanwhile not in {"deleted", "moved on"})


async def test_each_copy_whose_id_was_taken_since_the_mark_gets_one_of_its_own(
    hooked: HookedStore,
) -> None:
    """Somebody else has used the ids of all of them, or of some, in the archive meanwhile."""
    await leave_marked(hooked, KEEP_ID, is_copied=False, count=4)
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, KEEP_ID)
        old = database.resources.old
        taken = [{"id": name, "original_id": "", "n": 9} for name in ("r0", "r1", "r3")]
        await old.insert_many(taken)
        assert (await stage.sweep()).archived == 4
        assert await stage.list_live() == []
        assert await stage.list_archived() == ["", "", "", "r0", "r1", "r2", "r3"]
        copies = {each.original_id: each for each in await old.list() if each.original_id}
        assert {name: copy.n for name, copy in copies.items()} == {
            "r0": 0,
            "r1": 1,
            "r2": 2,
            "r3": 3,
        }
        assert [name for name, copy in copies.items() if copy.id == name] == ["r2"]


@pytest.mark.parametrize("rule", [ARCHIVE, KEEP_ID], ids=["archive", "keep-id"])
async def test_a_copy_keeps_its_index_entries_when_the_move_is_completed(
    hooked: HookedStore, rule: ExpiryRule
) -> None:
    """The second attempt to create it conflicts, and has written the same entries."""
    async with Database(connection=hooked) as database:
        old = await database.define_resource("old", rules=[CHAINED])
    await leave_marked(hooked, rule, is_copied=True)
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, rule)
        await stage.sweep()
        assert await stage.list_live() == []
        old = database.resource("old")
        assert (await Stage(database, old).sweep()).archived == 1
        assert await old.list() == []


RETRIED = {
    "longer": ExpiryRule(ttl=1e6, on_expire="archive", archive_resource="old"),
    "elsewhere": ExpiryRule(field="never", on_expire="archive", archive_resource="older"),
    "deleted": HARD,
    "marked": ExpiryRule(field="n", on_expire="soft-delete", delete_field="deleted_at"),
    "asked": CALLBACK,
}
"""Rules that replace one by which a move has begun."""


@pytest.mark.parametrize("is_copied", [False, True], ids=["marked", "copied"])
@pytest.mark.parametrize("changed", RETRIED)
async def test_a_move_is_completed_though_its_rule_has_changed(
    hooked: HookedStore, changed: str, *, is_copied: bool, no_delay: None
) -> None:
    """To the archive where it was going; the record never stays in both places."""
    await leave_marked(hooked, ARCHIVE, is_copied=is_copied)
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, RETRIED[changed])
        stage.verdicts["r0"] = False
        await database.backfill("sessions")
        counts = await stage.sweep()
        assert (counts.archived, counts.expired, stage.errors) == (1, 1, [])
        assert await stage.sessions.list() == []
        assert await stage.list_archived() == ["r0"]
        assert await stage.count_entries() == 0


ARCHIVES: dict[str, dict[str, str] | None] = {
    "dropped": None,
    "with a required field": {"reason": "string|required"},
    "with another type": {"n": "string"},
    "with a stamp of another type": {"archived_at": "datetime", "original_id": "number"},
}
"""Schemas of an archive that was replaced after a move to it has begun."""


@pytest.mark.parametrize("is_copied", [False, True], ids=["marked", "copied"])
@pytest.mark.parametrize("met_by", ["sweep", "writer"])
@pytest.mark.parametrize("archive", ARCHIVES)
async def test_a_move_is_completed_though_its_archive_has_changed(
    hooked: HookedStore, archive: str, met_by: str, *, is_copied: bool
) -> None:
    """The record is not lost, and holds up neither its writers nor the sweep of others."""
    await leave_marked(hooked, ARCHIVE, is_copied=is_copied)
    async with Database(connection=hooked) as database:
        await database.drop_resource("old")
        if (schema := ARCHIVES[archive]) is not None:
            await database.create_resource("old", schema)
        stage = await open_stage(database, ARCHIVE)
        if met_by == "writer":
            with pytest.raises(NotFound):
                await stage.sessions.update("r0", {"n": 7})
        # The archive may refuse this one, and then it stays.
        await stage.sessions.insert({"id": "r1", "n": 1, "expires_at": START})
        await stage.sweep()
        assert await stage.list_live() == ([] if schema is None else ["r1"])
        # A copy that had been made was dropped with its archive.
        assert ("r0" in await stage.list_archived()) is not is_copied


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "meanwhile"])
@pytest.mark.parametrize("is_copied", [False, True], ids=["marked", "copied"])
async def test_a_move_is_completed_though_its_rule_is_dropped(
    hooked: HookedStore, *, is_copied: bool, is_late: bool, no_delay: None
) -> None:
    """At once; if a sweep has begun it while the rule was dropped, before its index goes."""
    await leave_marked(hooked, ARCHIVE, is_copied=is_copied)
    async with Database(connection=hooked) as database:
        stage = Stage(database, database.resource("sessions"))
        await stage.sessions.insert({"id": "r1", "expires_at": START + 60})
        if is_late:
            (state,) = stage.sessions.definition.indexes
            await database._registry.change("sessions", methodcaller("remove_index", state.key))
        else:
            await database.drop_expiry("sessions")
            assert await stage.list_live() == ["r1"]
        await database.backfill("sessions")
        assert await stage.list_live() == ["r1"]
        assert await stage.list_archived() == ["r0"]


async def test_a_move_by_a_clock_that_is_ahead_is_completed_before_its_rule_is_dropped(
    hooked: HookedStore, no_delay: None
) -> None:
    """Though its record is not due yet by another clock of the fleet."""
    await leave_marked(hooked, ARCHIVE, is_copied=False, due=int(time.time()) + MAX_SKEW - 2)
    async with Database(connection=hooked) as database:
        stage = Stage(database, database.resource("sessions"))
        await database.drop_expiry("sessions")
        assert await stage.list_live() == []
        assert await stage.list_archived() == ["r0"]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
async def test_all_moves_are_completed_before_their_rule_is_dropped(
    hooked: HookedStore, monkeypatch: pytest.MonkeyPatch, count: int, no_delay: None
) -> None:
    """Page by page, however many a sweep has begun."""
    monkeypatch.setattr(backfill, "_PAGE", 2)
    await leave_marked(hooked, ARCHIVE, is_copied=False, count=count)
    async with Database(connection=hooked) as database:
        stage = Stage(database, database.resource("sessions"))
        await database.drop_expiry("sessions")
        assert await stage.list_live() == []
        assert sorted(await stage.list_archived()) == [f"r{n}" for n in range(count)]


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_an_id_that_the_archive_has_used_is_not_used_again(
    hooked: HookedStore, *, is_deleted: bool
) -> None:
    """Both lives of a record are in the archive, and each copy names its original."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, KEEP_ID)
        for n in range(2):
            await stage.sessions.insert({"id": "r0", "n": n, "expires_at": START})
            assert (await stage.sweep()).archived == 1
            if is_deleted and n == 0:
                assert await database.resources.old.delete("r0")
        copies = await database.resources.old.list()
        assert sorted(copy.n for copy in copies) == ([1] if is_deleted else [0, 1])
        assert {copy.original_id for copy in copies} == {"r0"}


@pytest.mark.parametrize(
    ("stranger", "writes"),
    [
        ({"original_id": "stranger"}, 1),
        # It looks like the copy, and remembers all its writes: none of them was of this move.
        ({"archived_from": "sessions", "original_id": "r0"}, TRAIL_LENGTH),
        # It does not remember all of them, and is the copy of something else.
        ({"archived_from": "others", "original_id": "r0"}, TRAIL_LENGTH + 1),
        ({"archived_from": "sessions", "original_id": "r1"}, TRAIL_LENGTH + 1),
        ({}, TRAIL_LENGTH + 1),
    ],
)
async def test_a_stranger_that_takes_the_id_during_the_move_costs_nothing(
    hooked: HookedStore, stranger: dict[str, str], writes: int
) -> None:
    """The record gets another id in the archive, and both stay."""
    await leave_marked(hooked, KEEP_ID, is_copied=False)
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, KEEP_ID)
        old = database.resources.old
        await old.insert({"id": "r0", **stranger})
        for number in range(1, writes):
            await old.update("r0", {"n": number})
        assert (await stage.sweep()).archived == 1
        assert await stage.list_live() == []
        copies = [copy for copy in await old.list() if copy.id != "r0"]
        assert [(copy.archived_from, copy.original_id) for copy in copies] == [("sessions", "r0")]
        kept = await old.get("r0")
        assert kept is not None
        assert {name: kept[name] for name in stranger} == stranger


@pytest.mark.parametrize("is_applied", [False, True], ids=["lost request", "lost reply"])
async def test_a_move_with_an_unknown_write_is_reported_and_completed_later(
    hooked: HookedStore, *, is_applied: bool
) -> None:
    """Whichever write it is, also of those that choose another id for the copy."""
    async with Database(connection=hooked) as database:
        for number in range(5):
            stage = await open_stage(database, KEEP_ID, f"sessions{number}")
            await stage.insert(0)
            archive = await database.create_resource("old")
            # The mark, the copy under an id that is taken by then, another mark, the copy, the end.
            hooked.before_write = partial(_take_after_mark, hooked, archive)
            hooked.unknown_at, hooked.replies = number, not is_applied
            counts = await stage.sweep()
            assert (counts.archived, counts.errors, len(stage.errors)) == (0, 1, 1)
            hooked.before_write, hooked.replies = None, True
            await stage.sweep()
            assert await stage.sessions.list_ids() == []
            copies = await archive.query({"archived_from": f"sessions{number}"})
            assert [copy.original_id for copy in copies] == ["r0"]
            await archive.delete_all()
            await database.tidy()
            await hooked.inner.drop(["data/old/r0"])


async def _take_after_mark(hooked: HookedStore, archive: Resource) -> None:
    """Use the id in the archive, as somebody else, once the record is marked."""

    async def take() -> None:
        key = archive.records.keyspace.key("r0")
        await hooked.inner.write([Put(key, {"id": "r0", "by": "a stranger"})])

    hooked.before_write = take


async def test_what_the_archive_refuses_stays_and_stops_no_other(hooked: HookedStore) -> None:
    """It is checked before the record is marked."""
    async with Database(connection=hooked) as database:
        await database.create_resource("old", {"n": "number|required|min:1"})
        stage = await open_stage(database, ARCHIVE)
        await stage.insert(0, 0, 0)
        counts = await stage.sweep()
        assert (counts.archived, counts.errors) == (2, 1)
        ((record_id, problem),) = stage.errors
        assert record_id == "r0"
        assert problem.startswith("cannot be archived: old: n")
        record = await database.store.get("data/sessions/r0")
        assert record is not None
        assert ARCHIVING not in record.value


async def test_an_archive_that_another_process_has_dropped_is_defined_again(
    hooked: HookedStore, location: StoreLocation
) -> None:
    """Copies in a resource without a definition would be seen by nobody."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, ARCHIVE)
        await stage.insert(0)
        assert (await stage.sweep()).archived == 1
        other = await location.open()
        async with Database(connection=other) as stranger:
            await stranger.drop_resource("old")
            # As after half a minute.
            database.resources.old.records.distrust_definition()
            await stage.insert(0)
            assert (await stage.sweep()).archived == 1
            assert "old" in await stranger.list_resources()
            assert [copy.original_id for copy in await stranger.resources.old.list()] == ["r0"]
        await other.close()


async def test_a_soft_deleted_record_stays_and_expires_only_once(hooked: HookedStore) -> None:
    """It is marked with the time, as its schema holds it; its other fields are as they were."""
    schema = parse({"expires_at": "number", "gone": "datetime", "is_deleted": "boolean"})
    rule = msgspec.structs.replace(SOFT, delete_field="gone")
    async with Database(connection=hooked) as database:
        sessions = await database.define_resource("sessions", schema, rules=[rule])
        stage = Stage(database, sessions)
        await sessions.insert({"id": "a", "expires_at": START, "note": "x"})
        assert (await stage.sweep()).soft_deleted == 1
        found = await sessions.get("a")
        assert found is not None
        assert (found.gone, found.is_deleted) == ("2023-11-14T22:13:20.000+00:00", True)
        assert (found.note, found.expires_at) == ("x", START)
        assert (await stage.sweep()).expired == 0
        # Restored with a later expiry, it expires again.
        await sessions.update("a", {"gone": None, "expires_at": START + 5})
        stage.now += 5
        assert (await stage.sweep()).soft_deleted == 1


@pytest.mark.parametrize(
    ("kind", "mark"), [("boolean", True), ("json", True), ("string", "true"), (None, None)]
)
async def test_a_soft_delete_marks_a_record_as_the_schema_holds_it(
    hooked: HookedStore, kind: str | None, mark: object
) -> None:
    """Its field is_deleted, if the schema has one."""
    fields = {"expires_at": "number"} | ({} if kind is None else {"is_deleted": kind})
    async with Database(connection=hooked) as database:
        sessions = await database.define_resource("sessions", parse(fields), rules=[SOFT])
        stage = Stage(database, sessions)
        await sessions.insert_many([{"id": name, "expires_at": START} for name in "ab"])
        assert (await stage.sweep()).soft_deleted == 2
        for record in await sessions.list():
            assert record.get("is_deleted") == mark
            assert record.get("deleted_at")


async def test_a_callback_decides_about_each_record(hooked: HookedStore) -> None:
    """False keeps it until it is asked again; nonsense keeps it too and is reported."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, CALLBACK)
        await stage.insert(0, 0, 0, 0)
        stage.verdicts = {"r1": False, "r2": "yes"}
        for deleted in (2, 0):
            counts = await stage.sweep(batch_size=1)
            assert (counts.deleted, counts.kept, counts.errors) == (deleted, 1, 1)
            assert await stage.list_live() == ["r1", "r2"]
        assert {record_id for record_id, _ in stage.errors} == {"r2"}
        stage.verdicts = {}
        assert (await stage.sweep(batch_size=1)).deleted == 2


async def test_nothing_is_removed_after_the_clock_turned_out_to_be_wrong(
    hooked: HookedStore,
) -> None:
    """Not even what a callback has condemned meanwhile; the next sweep asks again."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, CALLBACK)
        await stage.insert(0, 0, 0)
        stage.vetoed_by = "r1"
        with pytest.raises(Unavailable, match="the fleet's time"):
            await stage.sweep()
        assert await stage.list_live() == ["r0", "r1", "r2"]
        assert stage.expired == []
        stage.vetoed_by, stage.is_vetoed = "", False
        assert (await stage.sweep()).deleted == 3


async def test_one_record_that_cannot_be_read_stops_no_other(
    hooked: HookedStore, location: StoreLocation
) -> None:
    """It stays where it is."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, HARD)
        await stage.insert(0, 0, 0)
        location.corrupt("data/sessions/r1", "not JSON")
        assert (await stage.sweep()).deleted == 2
        assert location.read_value("data/sessions/r1") == "not JSON"


async def test_a_record_of_newer_code_stops_no_other(hooked: HookedStore) -> None:
    """It is reported and stays."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, HARD)
        await stage.insert(0, 0, 0)
        record = await database.store.get("data/sessions/r1")
        assert record is not None
        value = {
            **record.value,
            "_entries": {stage.sessions.definition.indexes[0].key: record.nonce},
        }
        await database.store.put(record, value, format=99)
        assert (await stage.sweep()).deleted == 2
        assert await stage.list_live() == ["r1"]
        assert [record_id for record_id, _ in stage.errors] == ["r1"]


async def test_a_process_that_knows_nothing_of_expiry_writes_the_entries(
    hooked: HookedStore, location: StoreLocation
) -> None:
    """The rule stands in the definition. So records of any writer expire."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, HARD)
        other = await location.open()
        async with Database(connection=other) as stranger:
            sessions = stranger.resource("sessions")
            await sessions.insert({"id": "a", "expires_at": START})
            await sessions.insert_many([{"id": "b", "expires_at": START + 60}, {"id": "c"}])
            await sessions.update("c", {"expires_at": START})
        await other.close()
        assert (await stage.sweep()).deleted == 2
        assert await stage.list_live() == ["b"]


async def test_a_rule_that_another_process_has_changed_is_followed(
    hooked: HookedStore, location: StoreLocation
) -> None:
    """A record that lives by the stored rule is not removed by an outdated one."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, HARD)
        await stage.insert(0, 0)
        other = await location.open()
        async with Database(connection=other) as stranger:
            rule = ExpiryRule(field="n")
            sessions = await stranger.define_resource("sessions", rules=[rule])
            await sessions.insert({"id": "new", "n": 1, "expires_at": START + 99})
            assert (await stage.sweep()).deleted == 1
        await other.close()
        assert await stage.list_live() == ["r0", "r1"]


SAME_TIMES = [
    pytest.param(before, after, id=f"{IDS[RULES.index(before)]}-{IDS[RULES.index(after)]}")
    for before, after in itertools.permutations([HARD, ARCHIVE, KEEP_ID, CALLBACK], 2)
]
"""Changes of a rule that leave the times, and so the index, as they are."""


@pytest.mark.parametrize(("before", "after"), SAME_TIMES)
async def test_what_happens_to_a_record_is_what_the_stored_rule_says(
    hooked: HookedStore, location: StoreLocation, before: ExpiryRule, after: ExpiryRule
) -> None:
    """Another process has changed it, and this one has not read that yet.

    Found: nothing noticed if records were deleted by the old rule that the new one archives.
    """
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, before)
        stage.verdicts = {"r1": False}
        await stage.insert(0, 0)
        other = await location.open()
        async with Database(connection=other) as stranger:
            await stranger.define_resource("sessions", rules=[after])
            counts = await stage.sweep()
        await other.close()
        is_archive, is_asked = after.on_expire == "archive", after is CALLBACK
        assert counts == SweepCounts(
            deleted=1 if is_asked else 2 * (after is HARD),
            archived=2 if is_archive else 0,
            kept=1 if is_asked else 0,
        )
        assert await stage.list_live() == (["r1"] if is_asked else [])
        archived = await database.resource("old").list() if is_archive else []
        names = ["r0", "r1"] if is_archive else []
        assert sorted(document.original_id for document in archived) == names
        if after is KEEP_ID:
            assert sorted(document.id for document in archived) == names


async def test_a_sweep_reads_in_proportion_to_what_is_due(
    hooked: HookedStore, location: StoreLocation
) -> None:
    """One listing if nothing is due; otherwise one more per batch, and the records that are due."""
    meter = Meter()
    store = await location.open()
    async with Database(connection=store) as database:
        metered = MeteredStore(hooked, meter, database.components.clock)
        async with Database(connection=metered) as counted:
            stage = await open_stage(counted, HARD)
            await stage.insert(*([60] * 150), *([0] * 30))
            stage.now = START - 1
            meter.stats.clear()
            await stage.sweep()
            calls = {call: stats.calls for call, stats in meter.stats.items()}
            assert calls == {"heads": 1}
            stage.now = START
            meter.stats.clear()
            assert (await stage.sweep(batch_size=10)).deleted == 30
            assert meter["heads"].calls == 4
            # The records, and the definition once.
            assert meter["get"].items == 31
            assert meter["write"].calls == 3
            assert meter["write"].items == 30
            assert meter["drop"].calls == 3
            assert meter["scan"].calls == 0
    await store.close()


async def test_events_of_the_resource_tell_what_a_sweep_has_done(hooked: HookedStore) -> None:
    """Hooks do not run: they belong to the verbs of users."""
    async with Database(connection=hooked) as database:
        seen: list[tuple[str, str, tuple[str, ...]]] = []
        hooks: list[object] = []

        def note(event: Event) -> None:
            seen.append((event.name, event["resource"], tuple(sorted(event["ids"]))))

        for rule, name in ((HARD, "hard"), (SOFT, "soft"), (ARCHIVE, "moved")):
            stage = await open_stage(database, rule, name)
            stage.sessions.add_hooks({"before_delete": hooks.append, "before_update": hooks.append})
            await stage.insert(0, 0)
            database.events.on("resource:*", note)
            await stage.sweep()
            database.events.off("resource:*", note)
        assert ("resource:deleted", "hard", ("r0", "r1")) in seen
        assert ("resource:updated", "soft", ("r0", "r1")) in seen
        assert ("resource:deleted", "moved", ("r0", "r1")) in seen
        copies = [
            len(ids) for kind, where, ids in seen if (kind, where) == ("resource:inserted", "old")
        ]
        assert copies == [2]
        assert len(seen) == 4
        assert hooks == []


async def test_a_changed_record_conflicts_with_its_user_and_not_with_the_sweep(
    hooked: HookedStore,
) -> None:
    """A user who has read a record before its soft-delete gets a conflict."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, SOFT)
        await stage.insert(0)
        found = await stage.sessions.get("r0")
        assert found is not None
        await stage.sweep()
        with pytest.raises(Conflict):
            await stage.sessions.update("r0", {"n": 5}, if_version=found._version)


@pytest.mark.parametrize("rule", RULES, ids=IDS)
async def test_two_sweeps_at_once_deal_with_each_record_once(
    location: StoreLocation, rule: ExpiryRule
) -> None:
    """Two leaders are harmless: one of them removes a record, and the archive has one copy."""
    stores = [await location.open() for _ in range(2)]
    async with Database(connection=stores[0]) as one, Database(connection=stores[1]) as other:
        stages = [await open_stage(database, rule) for database in (one, other)]
        await stages[0].list_archived()
        await stages[0].insert(*[0] * 40, 60)
        counts = await asyncio.gather(*(stage.sweep(batch_size=8) for stage in stages))
        assert sum(each.expired for each in counts) == 40
        assert [each.errors for each in counts] == [0, 0]
        assert sorted(stages[0].expired + stages[1].expired) == sorted(f"r{i}" for i in range(40))
        assert await stages[0].list_live() == ["r40"]
        assert len(await stages[0].list_archived()) == (40 if rule.archive_resource else 0)
        assert await stages[0].count_entries() == 1
    for store in stores:
        await store.close()


async def test_the_largest_batch_is_possible(hooked: HookedStore) -> None:
    """One listing, one read, one write, one removal of entries."""
    count = 300 if hooked.is_billed else 10_000
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, SOFT)
        await stage.insert(*[0] * count)
        assert (await stage.sweep(batch_size=10_000)).soft_deleted == count
        assert await stage.count_entries() == 0


async def test_entries_that_lead_nowhere_are_removed_when_they_can_no_longer_be_needed(
    hooked: HookedStore,
) -> None:
    """An hour after they were written: until then their record may still arrive."""
    async with Database(connection=hooked) as database:
        stage = await open_stage(database, HARD)
        await stage.insert(60)
        (index,) = stage.sessions.definition.indexes
        prefix = stage.sessions.records.open_index(index).prefix
        (head,) = await database.store.heads(prefix)
        rank, _, rest = head.key.removeprefix(prefix).partition("!")
        due = f"{int(rank) - 60_000:015}"
        now = database.components.clock.wall().seconds
        for age, letter in ((3700, "A"), (60, "B")):
            key = f"{prefix}{due}!{rest[:-NONCE_LENGTH]}{letter * NONCE_LENGTH}"
            await database.store.create(key, {"at": now - age})
        assert (await stage.sweep()).expired == 0
        assert await stage.list_live() == ["r0"]
        left = [head.key[-1] for head in await database.store.heads(prefix)]
        assert left == ["B", head.key[-1]]
