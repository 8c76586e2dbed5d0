"""A TTL plugin in a real process: who sweeps, by which clock, and what it refuses."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from servers import Locate
from waiting import until

from jobsync import (
    Components,
    Database,
    Event,
    Invalid,
    NotFound,
    Resource,
    TTLPlugin,
    Unavailable,
)
from jobsync.core.clock import SystemClock, Wall
from jobsync.core.expiry import ExpiryRule
from jobsync.database import backfill
from jobsync.stores.contract import Applied, Put

SESSION = {"user": "string", "expires_at": "number"}
FAST: dict[str, Any] = {"heartbeat_interval": 0.5, "worker_timeout": 2.0, "skip_cold_start": True}
CALM: dict[str, Any] = {**FAST, "heartbeat_interval": 10.0, "worker_timeout": 60.0}
"""However slow the machine is, a term lasts as long as the test."""


class WrongClock(SystemClock):
    """A clock whose time of day is wrong."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def wall(self) -> Wall:
        """Return a wrong time."""
        return super().wall() + self.ahead


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store of each kind."""
    return locate(request.param)


@pytest.fixture
async def db(url: str) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(url) as db:
        yield db


def build(*, ahead: float = 0.0) -> Components:
    """Return components whose clock may be wrong."""
    system = Components.system()
    return Components(clock=WrongClock(ahead), randomness=system.randomness, events=system.events)


def rows(*offsets: float) -> list[dict[str, Any]]:
    """Return sessions that expire so many seconds from now, named by their numbers."""
    now = time.time()
    return [{"id": f"r{i}", "expires_at": now + at} for i, at in enumerate(offsets)]


async def test_the_coordinator_alone_sweeps_and_another_takes_over(url: str) -> None:
    """As in the documents: plugins are added before the connection, resources come later."""
    plugins: list[TTLPlugin] = []
    databases: list[Database] = []
    completed: list[Event] = []
    for _ in range(2):
        database = Database(url)
        ttl = TTLPlugin(
            resources=["sessions"], enable_coordinator=True, cleanup_interval=0.2, **FAST
        )
        ttl.on("plg:ttl:cleanup-completed", completed.append)
        await database.use_plugin(ttl)
        await database.connect()
        databases.append(database)
        plugins.append(ttl)
    sessions = await databases[1].create_resource(name="sessions", attributes=SESSION)
    await sessions.insert_many(rows(-5, -1, 3600))
    await until(lambda: sum(e["deleted"] for e in completed) == 2, "the expired ones are gone")
    assert await sessions.list_ids() == ["r2"]
    (leader,) = (ttl for ttl in plugins if ttl.is_coordinator)
    (other,) = (ttl for ttl in plugins if ttl is not leader)
    assert leader.stats()["total_deleted"] == 2
    assert other.stats()["total_scans"] == 0
    await databases[plugins.index(leader)].disconnect()
    last = databases[plugins.index(other)]
    await last.resource("sessions").insert({"id": "late", "expires_at": 1})
    await until(lambda: other.stats()["total_deleted"] == 1, "the other one sweeps")
    assert await last.resource("sessions").list_ids() == ["r2"]
    await last.disconnect()


async def test_without_an_election_every_process_sweeps(url: str) -> None:
    """For a single instance."""
    async with Database(url) as database:
        sessions = await database.create_resource("sessions", SESSION)
        await sessions.insert_many(rows(-1, 3600))
        ttl = TTLPlugin(
            resources=["sessions"], default_ttl=60, enable_coordinator=False, cleanup_interval=0.1
        )
        await database.use_plugin(ttl)
        await sessions.insert({"id": "new", "expires_at": 5})
        await until(lambda: ttl.stats()["total_deleted"] == 1, "it is gone")
        assert await sessions.exists("r1")


async def test_records_that_existed_before_are_found_after_the_backfill(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has to be written again."""
    for delay in ("BUILD_DELAY", "LATE_BUILD_DELAY"):
        monkeypatch.setattr(backfill, delay, 0.1)
    async with Database(url) as database:
        sessions = await database.create_resource("sessions", SESSION)
        await sessions.insert_many(rows(-1, -2, 3600))
        ttl = TTLPlugin(resources=["sessions"], cleanup_interval=0.2, **FAST)
        await database.use_plugin(ttl)
        await until(lambda: ttl.stats()["total_deleted"] == 2, "the old ones are gone")
        assert await sessions.list_ids() == ["r2"]


@pytest.mark.parametrize("damaged", ["a", "b", "c"])
async def test_a_resource_that_cannot_be_swept_stops_none_of_the_others(
    db: Database, damaged: str
) -> None:
    """It is reported, wherever it is in the order. Newer code has defined it again."""
    names = ["a", "b", "c"]
    ttl = TTLPlugin(resources=names, enable_coordinator=False, cleanup_interval=3600)
    swept: list[Event] = []
    failed: list[Event] = []
    ttl.on("plg:ttl:cleanup-completed", swept.append)
    ttl.on("plg:ttl:cleanup-error", failed.append)
    for name in names:
        await db.create_resource(name, attributes=SESSION)
    await db.use_plugin(ttl)
    await until(lambda: bool(swept))
    for name in names:
        await db.resources[name].insert_many(rows(-10, 3600))
    definition = await db.store.get(f"resource/{damaged}")
    assert definition is not None
    newer = Put(definition.key, definition.value, definition, format=99)
    (outcome,) = await db.store.write([newer])
    assert isinstance(outcome, Applied)
    await ttl.run_cleanup()
    left = {name: len(await db.store.heads(f"data/{name}/")) for name in names}
    assert left == {name: 2 if name == damaged else 1 for name in names}
    assert {event["resource"] for event in failed} == {damaged}


async def test_cleaning_one_resource_leaves_the_others_alone(db: Database) -> None:
    """What has expired elsewhere stays, and is found later."""
    ttl = TTLPlugin(resources=["a", "b"], default_ttl=60, cleanup_interval=3600, **FAST)
    await db.use_plugin(ttl)
    await wait_for_first_sweep(ttl)
    resources = [await db.create_resource(name, SESSION) for name in "ab"]
    for resource in resources:
        await resource.insert_many(rows(-1, 3600))
    result = await ttl.cleanup_resource("a")
    assert (result.deleted, result.resources) == (1, ("a",))
    assert [await resource.count() for resource in resources] == [1, 2]
    assert (await ttl.run_cleanup()).deleted == 1
    assert [await resource.count() for resource in resources] == [1, 1]
    with pytest.raises(NotFound, match="Known: a, b"):
        await ttl.cleanup_resource("c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": "expire_at"}, "Did you mean expires_at"),
        ({"field": "live"}, "cannot hold a time"),
        ({"ttl": 5, "on_expire": "soft-delete", "delete_field": "gone"}, "which is strict"),
        ({"ttl": 5, "on_expire": "archive", "archive_resource": "old"}, "has no archived_at"),
    ],
)
async def test_what_does_not_fit_the_schema_is_refused_and_nothing_is_written(
    db: Database, options: dict[str, Any], message: str
) -> None:
    """Whether the resource exists before the plugin or comes later."""
    schema = {**SESSION, "live": "boolean"}
    sessions = await db.create_resource("sessions", schema, strict=True)
    await db.create_resource("old", SESSION, strict=True)
    await sessions.insert_many(rows(-1))
    before = sessions.definition
    fine = {"other": {"ttl": 1}}
    with pytest.raises(Invalid, match=message):
        await db.use_plugin(TTLPlugin(resources={**fine, "sessions": options}, **FAST))
    assert await db.list_resources() == ["old", "sessions"]
    assert db.resource("sessions").definition == before
    assert await sessions.count() == 1


async def wait_for_first_sweep(ttl: TTLPlugin) -> None:
    """Wait for the sweep of a new coordinator: it deals with records that a test looks for."""
    await until(lambda: ttl.stats()["total_scans"] == 1, "the first sweep is over")


def archive(source: str, target: str, **options: Any) -> TTLPlugin:
    """Return a plugin that archives the records of one resource."""
    rule = {"field": "at", "on_expire": "archive", "archive_resource": target}
    return TTLPlugin(resources={source: rule}, cleanup_interval=3600, **options, **FAST)


@pytest.mark.parametrize("field", ["original_id", "archived_at", "archived_from"])
async def test_a_move_that_would_overwrite_a_described_field_is_refused(
    db: Database, field: str
) -> None:
    """Whether the resource is described before the plugin starts, or later."""
    message = f"resources.orders.on_expire would overwrite {field}"
    schema = {"at": "number", field: "string"}
    await db.create_resource("orders", schema)
    with pytest.raises(Invalid, match=message):
        await db.use_plugin(archive("orders", "old"), "first")
    assert db.resource("orders").definition.expiry is None
    assert await db.list_resources() == ["orders"]
    await db.use_plugin(archive("later", "old", namespace="two"), "second")
    with pytest.raises(Invalid, match=message.replace("orders", "later")):
        await db.create_resource("later", schema)


async def test_an_archive_may_be_archived_in_turn(db: Database) -> None:
    """Its fields are set anew by each move, though its schema describes some of them."""
    await db.create_resource("year", {"at": "number", "original_id": "string"})
    ttl = TTLPlugin(
        resources={
            "orders": {"field": "at", "on_expire": "archive", "archive_resource": "year"},
            "year": {"field": "at", "on_expire": "archive", "archive_resource": "cold"},
        },
        cleanup_interval=3600,
        **FAST,
    )
    await db.use_plugin(ttl)
    await wait_for_first_sweep(ttl)
    orders = await db.create_resource("orders", {"at": "number"})
    await orders.insert({"id": "a", "at": 1})
    await ttl.cleanup_resource("orders")
    (copy,) = await db.resources.year.list()
    assert (copy.original_id, copy.archived_from) == ("a", "orders")
    await ttl.cleanup_resource("year")
    (last,) = await db.resources.cold.list()
    assert (last.original_id, last.archived_from) == (copy.id, "year")


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_circle_of_archives_through_several_plugins_is_refused(
    url: str, processes: int
) -> None:
    """Records would be moved for ever. What is stored counts, whoever has stored it."""
    async with Database(url) as one, Database(url) as two:
        await one.use_plugin(archive("a", "b", namespace="one"))
        await one.create_resource("a")
        await one.use_plugin(archive("b", "c", namespace="two"), "second")
        await one.create_resource("b")
        last = one if processes == 1 else two
        await last.list_resources()
        with pytest.raises(Invalid, match="moves records in a circle: c to a to b to c"):
            await last.use_plugin(archive("c", "a", namespace="three"), "third")
        assert one.resource("c").definition.expiry is None


async def test_a_sweep_that_is_cancelled_counts_what_it_has_done(locate: Locate) -> None:
    """In the statistics and in the event: what was done is done."""
    asked, completed = asyncio.Event(), list[Event]()

    async def wait(record: Any, _: Resource) -> bool:
        if record.id == "r2":
            asked.set()
            await asyncio.Event().wait()
        return True

    rule = {"on_expire": "callback", "callback": wait}
    ttl = TTLPlugin(resources={"sessions": rule}, batch_size=1, cleanup_interval=3600, **FAST)
    async with Database(locate("memory"), plugins=[ttl]) as database:
        await wait_for_first_sweep(ttl)
        sessions = await database.create_resource("sessions", SESSION)
        await sessions.insert_many(rows(-3, -2, -1))
        ttl.on("plg:ttl:cleanup-completed", completed.append)
        sweep = asyncio.create_task(ttl.run_cleanup())
        await asked.wait()
        sweep.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sweep
        assert (ttl.stats()["total_deleted"], ttl.stats()["total_scans"]) == (2, 2)
        assert [event["deleted"] for event in completed] == [2]


async def test_a_resource_that_comes_later_must_fit(db: Database) -> None:
    """Its creation is refused with the fix, and can be repeated."""
    await db.use_plugin(TTLPlugin(resources={"sessions": {"field": "until"}}, **FAST))
    with pytest.raises(Invalid, match=r"resources\.sessions\.field is not in the schema"):
        await db.create_resource("sessions", SESSION)
    assert await db.list_resources() == []
    sessions = await db.create_resource("sessions", {**SESSION, "until": "datetime"})
    assert sessions.definition.expiry is not None
    assert sessions.definition.is_settled


async def test_a_missing_resource_is_reported_and_found_when_another_process_makes_it(
    url: str,
) -> None:
    """A mistyped name does not go unnoticed."""
    async with Database(url) as database, Database(url) as other:
        missing: list[Event] = []
        ttl = TTLPlugin(resources=["sessions"], cleanup_interval=0.1, **FAST)
        ttl.on("plg:ttl:resource-missing", missing.append)
        await database.use_plugin(ttl)
        await until(lambda: missing, "it is reported")
        await ttl.stop()
        missing.clear()
        await ttl.start()
        await until(lambda: missing, "it is reported again after a start")
        await other.create_resource("sessions", SESSION)
        await until(lambda: "sessions" in database.resources, "it is found")
        await until(lambda: database.resource("sessions").definition.expiry, "it has its rule")
        await database.resource("sessions").insert_many(rows(-1))
        await until(lambda: ttl.stats()["total_deleted"] == 1, "its records expire")
        assert len(missing) == 1


async def test_a_missing_resource_is_reported_at_the_second_sweep_and_never_again() -> None:
    """Each by itself, in each life of the plugin: later sweeps would say the same."""
    async with Database("memory://missing") as database:
        missing: list[str] = []
        ttl = TTLPlugin(resources=["a", "b"], default_ttl=5, cleanup_interval=3600, **CALM)
        ttl.on("plg:ttl:resource-missing", lambda event: missing.append(event["resource"]))
        await database.use_plugin(ttl)
        for life in (1, 2):
            await until(lambda life=life: ttl.stats()["total_scans"] == 5 * life - 4, "it sweeps")  # type: ignore[misc]
            assert missing == []
            await ttl.cleanup_resource("a")
            assert missing == ["a"]
            await ttl.run_cleanup()
            assert missing == ["a", "b"]
            for _ in range(2):
                await ttl.run_cleanup()
            assert missing == ["a", "b"]
            missing.clear()
            await ttl.stop()
            if life == 1:
                await ttl.start()


async def test_events_tell_what_has_expired(db: Database) -> None:
    """One for each record, and one for the sweep."""
    seen: list[Event] = []
    ttl = TTLPlugin(resources=["sessions"], cleanup_interval=3600, **FAST)
    await db.use_plugin(ttl)
    await wait_for_first_sweep(ttl)
    sessions = await db.create_resource("sessions", SESSION)
    await sessions.insert_many([{"id": "a", "expires_at": 5}, {"id": "b"}])
    db.events.on("plg:ttl:*", seen.append)
    result = await ttl.run_cleanup()
    started, expired, completed = seen
    assert (started.name, started["resources"]) == ("plg:ttl:cleanup-started", ("sessions",))
    assert (expired["resource"], expired["record_id"], expired["expired_at"]) == (
        "sessions",
        "a",
        5,
    )
    assert completed == result
    assert (result.deleted, result.expired, result.errors) == (1, 1, 0)
    assert result.duration >= 0
    stats = ttl.stats()
    assert (stats["total_scans"], stats["total_expired"], stats["total_deleted"]) == (2, 1, 1)
    assert stats["last_scan_duration"] == result.duration


async def test_errors_are_reported_one_by_one_up_to_ten(db: Database) -> None:
    """And the rest together, so that a broken callback does not flood the log."""
    errors: list[Event] = []

    def fail(*_: Any) -> bool:
        raise ValueError("no")

    rule = {"on_expire": "callback", "callback": fail}
    ttl = TTLPlugin(resources={"sessions": rule}, cleanup_interval=3600, **FAST)
    await db.use_plugin(ttl)
    await wait_for_first_sweep(ttl)
    sessions = await db.create_resource("sessions", SESSION)
    await sessions.insert_many(rows(*([-1] * 15)))
    ttl.on("plg:ttl:cleanup-error", errors.append)
    result = await ttl.run_cleanup()
    assert (result.errors, result.expired) == (15, 0)
    assert [e["record_id"] is None for e in errors] == [False] * 10 + [True]
    assert "ValueError: no" in errors[0]["error"]
    assert errors[-1]["error"] == "5 more records failed"
    assert await sessions.count() == 15


async def test_a_sweep_that_is_cancelled_tells_how_many_records_have_failed(
    locate: Locate,
) -> None:
    """Those that were not reported one by one are reported together all the same."""
    asked, errors = asyncio.Event(), list[Event]()

    async def fail_or_wait(record: Any, _: Resource) -> bool:
        if record.id == "r12":
            asked.set()
            await asyncio.Event().wait()
        raise ValueError("no")

    rule = {"on_expire": "callback", "callback": fail_or_wait}
    ttl = TTLPlugin(resources={"sessions": rule}, batch_size=6, cleanup_interval=3600, **FAST)
    async with Database(locate("memory"), plugins=[ttl]) as database:
        await wait_for_first_sweep(ttl)
        sessions = await database.create_resource("sessions", SESSION)
        await sessions.insert_many(rows(*range(-20, -5)))
        ttl.on("plg:ttl:cleanup-error", errors.append)
        sweep = asyncio.create_task(ttl.run_cleanup())
        await asked.wait()
        sweep.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sweep
        assert [event["record_id"] for event in errors[:10]] == [f"r{n}" for n in range(10)]
        assert [event["error"] for event in errors[10:]] == ["2 more records failed"]


@pytest.mark.parametrize("action", ["stop", "disconnect"])
async def test_a_callback_may_stop_its_own_plugin(url: str, action: str) -> None:
    """It does not wait for itself."""
    database = Database(url)
    called: list[str] = []

    async def end(record: Any, _: Resource) -> bool:
        called.append(record.id)
        await (ttl.stop() if action == "stop" else database.disconnect())
        return True

    rule = {"on_expire": "callback", "callback": end}
    ttl = TTLPlugin(resources={"sessions": rule}, cleanup_interval=0.1, **FAST)
    await database.use_plugin(ttl)
    await database.connect()
    sessions = await database.create_resource("sessions", SESSION)
    await sessions.insert_many(rows(-1))
    await until(lambda: called and not ttl.is_running, "it has stopped")
    await database.disconnect()
    assert called == ["r0"]


@pytest.mark.parametrize("action", ["stop", "disconnect"])
async def test_a_sweep_that_is_cut_short_by_the_end_says_so(locate: Locate, action: str) -> None:
    """Its result would count what it has not looked at as done."""
    database = Database(locate("memory"))
    asked, answer = asyncio.Event(), asyncio.Event()

    async def wait(*_: Any) -> bool:
        asked.set()
        await answer.wait()
        return True

    rule = {"on_expire": "callback", "callback": wait}
    ttl = TTLPlugin(resources={"sessions": rule, "others": {"ttl": 5}}, **FAST)
    await database.use_plugin(ttl)
    await database.connect()
    await wait_for_first_sweep(ttl)
    sessions = await database.create_resource("sessions", SESSION)
    await sessions.insert_many(rows(-1))
    sweep = asyncio.create_task(ttl.run_cleanup())
    await asked.wait()
    await (ttl.stop() if action == "stop" else database.disconnect())
    answer.set()
    with pytest.raises(Unavailable, match="it was stopped during the sweep"):
        await sweep
    await database.disconnect()


async def test_a_callback_cannot_start_a_sweep(locate: Locate) -> None:
    """It would wait for its own end; the error reaches it at once."""
    errors: list[str] = []

    async def sweep_again(*_: Any) -> bool:
        try:
            await ttl.run_cleanup()
        except Invalid as error:
            errors.append(str(error))
        return True

    rule = {"on_expire": "callback", "callback": sweep_again}
    ttl = TTLPlugin(resources={"sessions": rule}, cleanup_interval=3600, **FAST)
    async with Database(locate("memory"), plugins=[ttl]) as database:
        await wait_for_first_sweep(ttl)
        sessions = await database.create_resource("sessions", SESSION)
        await sessions.insert_many(rows(-1))
        assert (await ttl.run_cleanup()).deleted == 1
    (problem,) = errors
    assert problem.startswith("callback cannot start a sweep")


async def test_a_plugin_that_is_not_running_says_so(db: Database) -> None:
    """Instead of doing nothing."""
    ttl = TTLPlugin(resources=["sessions"], default_ttl=5, **FAST)
    with pytest.raises(Invalid):
        await ttl.run_cleanup()
    await db.use_plugin(ttl)
    await ttl.stop()
    with pytest.raises(Invalid, match="is not running"):
        await ttl.run_cleanup()


async def test_a_leader_whose_clock_is_ahead_removes_nothing_that_lives(locate: Locate) -> None:
    """On objects it hands over and says why; a process with a right clock does the work."""
    url = locate("s3")
    vetoes: list[Event] = []
    async with (
        Database(url, components=build(ahead=3600)) as wrong,
        Database(url, components=build()) as right,
    ):
        options: dict[str, Any] = {"resources": ["sessions"], "cleanup_interval": 0.2, **FAST}
        bad = TTLPlugin(**options)
        bad.on("plg:ttl:clock-vetoed", vetoes.append)
        await wrong.use_plugin(bad)
        sessions = await wrong.create_resource("sessions", SESSION)
        await sessions.insert_many(rows(-1, 1800, 7200))
        await until(lambda: vetoes and not bad.is_coordinator, "it stands back")
        assert "s ahead of the object store's" in vetoes[0]["reason"]
        with pytest.raises(Unavailable, match="ahead of the object store's"):
            await bad.run_cleanup()
        assert await sessions.list_ids() == ["r0", "r1", "r2"]
        good = TTLPlugin(**options)
        await right.use_plugin(good)
        await until(lambda: good.stats()["total_deleted"] == 1, "the other one sweeps")
        assert await sessions.list_ids() == ["r1", "r2"]
        assert bad.stats()["total_expired"] == 0
        # Corrected, it may lead again.
        await good.stop()
        clock = wrong.components.clock
        assert isinstance(clock, WrongClock)
        clock.ahead = 0.0
        await sessions.insert({"id": "r3", "expires_at": 1})
        await until(lambda: bad.stats()["total_deleted"] == 1, "it sweeps again")
        assert await sessions.list_ids() == ["r1", "r2"]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0], ids=["ahead", "behind"])
async def test_expiry_follows_a_clock_that_was_wrong_and_is_set_right(
    url: str, ahead: float
) -> None:
    """At once, on every store: what lives stays, and what has expired goes."""
    components = build(ahead=ahead)
    async with Database(url, components=components) as database:
        ttl = await database.use_plugin(TTLPlugin(resources=["sessions"], **FAST))
        sessions = await database.create_resource("sessions", SESSION)
        # Objects refuse to be swept by a wrong clock.
        with suppress(Unavailable):
            await ttl.run_cleanup()
        assert isinstance(components.clock, WrongClock)
        components.clock.ahead = 0.0
        await sessions.insert_many(rows(-60, 1800))

        async def is_swept() -> bool:
            with suppress(Unavailable):
                await ttl.run_cleanup()
            return not await sessions.exists("r0")

        await until(is_swept, "the expired one is gone")
        assert await sessions.list_ids() == ["r1"]


async def test_the_servers_clock_decides_where_there_is_one(locate: Locate) -> None:
    """A wrong clock of this machine removes nothing early on PostgreSQL, and stops nothing."""
    async with Database(locate("postgres"), components=build(ahead=3600)) as database:
        ttl = TTLPlugin(resources=["sessions"], cleanup_interval=0.2, **FAST)
        await database.use_plugin(ttl)
        sessions = await database.create_resource("sessions", SESSION)
        await sessions.insert_many(rows(-1, 1800))
        await until(lambda: ttl.stats()["total_deleted"] == 1, "the expired one is gone")
        assert await sessions.list_ids() == ["r1"]


async def test_a_sweep_is_made_each_interval_and_at_once_when_elected(db: Database) -> None:
    """Not less often because a sweep takes its time, and not more often."""
    starts: list[float] = []
    ttl = TTLPlugin(resources=["sessions"], default_ttl=5, cleanup_interval=0.3, **FAST)
    ttl.on("plg:ttl:cleanup-started", lambda _: starts.append(asyncio.get_running_loop().time()))
    await db.use_plugin(ttl)
    await until(lambda: len(starts) >= 4, "four sweeps have begun")
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert min(gaps) >= 0.25


async def test_sweeps_are_as_frequent_as_asked_for_whatever_the_heartbeat() -> None:
    """A fleet with rare heartbeats, which cost money on objects, has frequent sweeps too."""
    rare: dict[str, Any] = {**CALM, "heartbeat_interval": 600.0, "worker_timeout": 3600.0}
    async with Database("memory://frequent") as database:
        ttl = TTLPlugin(resources=["sessions"], default_ttl=5, cleanup_interval=0.1, **rare)
        starts: list[Event] = []
        ttl.on("plg:ttl:cleanup-started", starts.append)
        await database.use_plugin(ttl)
        await until(lambda: len(starts) >= 3, "three sweeps have begun")


async def test_each_term_begins_with_a_sweep() -> None:
    """Also those of a process that has led before, however long the interval is."""
    async with Database("memory://terms") as database:
        ttl = TTLPlugin(resources=["sessions"], default_ttl=5, cleanup_interval=3600, **FAST)
        starts: list[Event] = []
        ttl.on("plg:ttl:cleanup-started", starts.append)
        await database.use_plugin(ttl)
        for term in (1, 2, 3):
            await until(lambda term=term: len(starts) == term, "a sweep has begun")  # type: ignore[misc]
            assert ttl._coordinator is not None
            ttl._coordinator.withhold("the next term begins")
            await until(lambda: not ttl.is_coordinator, "its term is over")
            ttl._coordinator.stand()


async def test_a_wrong_clock_is_a_reason_to_stand_back_in_each_life_of_the_plugin() -> None:
    """Found wrong, it hands the role over and says so, once; found right again, it stands."""
    async with Database("memory://lives") as database:
        vetoes: list[str] = []
        ttl = TTLPlugin(resources=["sessions"], default_ttl=5, cleanup_interval=3600, **CALM)
        ttl.on("plg:ttl:clock-vetoed", lambda event: vetoes.append(event["reason"]))
        await database.use_plugin(ttl)
        wrong, more, right = (
            SimpleNamespace(veto=veto, is_off=bool(veto)) for veto in ("ahead", "far ahead", "")
        )
        for life in ("first", "second", "third"):
            coordinator = ttl._coordinator
            assert coordinator is not None
            assert coordinator.withheld == "", life
            # The last one is wrong at the end of each life.
            for clock in (wrong, wrong, more, right, right, wrong):
                ttl._check_veto(cast("Any", clock))
                assert bool(coordinator.withheld) is clock.is_off, life
            assert vetoes == ["ahead", "far ahead", "ahead"], life
            vetoes.clear()
            await ttl.stop()
            await ttl.start()


@pytest.mark.parametrize("is_off", [False, True])
async def test_a_sweep_that_finds_the_clock_wrong_hands_the_role_over_at_once(
    is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a heartbeat later; a time that is only not known yet is no reason."""

    async def refresh() -> None:
        """Leave it as it is."""

    async with Database("memory://handover") as database:
        vetoes: list[str] = []
        ttl = TTLPlugin(resources=["sessions"], default_ttl=5, cleanup_interval=3600, **CALM)
        ttl.on("plg:ttl:clock-vetoed", lambda event: vetoes.append(event["reason"]))
        await database.use_plugin(ttl)
        await wait_for_first_sweep(ttl)
        clock = SimpleNamespace(
            veto="why", is_off=is_off, measured_now=lambda: 0.0, refresh=refresh
        )
        with monkeypatch.context() as patch:
            patch.setattr(ttl, "_fleet_clock", clock)
            with pytest.raises(Unavailable, match="why"):
                ttl._get_now()
        coordinator = ttl._coordinator
        assert coordinator is not None
        assert (vetoes, coordinator.withheld) == ((["why"], "why") if is_off else ([], ""))


async def test_options_of_other_plugins_are_refused() -> None:
    """With what to pass instead."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"resource": "a"}, "Did you mean resources"),
        ({"interval": 5, "resources": ["a"]}, "is not an option of a TTL plugin"),
        ({"coordinator_work_interval": 5, "resources": ["a"]}, "Pass cleanup_interval"),
        ({}, "nothing would expire"),
    ]
    for options, message in refused:
        with pytest.raises(Invalid, match=message):
            TTLPlugin(**options)


async def test_a_resource_that_nobody_describes_expires_by_the_default(db: Database) -> None:
    """If it is described later with `expires_at`, that counts from then on."""
    ttl = TTLPlugin(resources=["notes"], default_ttl=3600, cleanup_interval=3600, **FAST)
    await db.use_plugin(ttl)
    await wait_for_first_sweep(ttl)
    notes = await db.create_resource("notes")
    assert notes.definition.expiry == ExpiryRule(ttl=3600)
    await db.create_resource("notes", SESSION)
    assert notes.definition.expiry == ExpiryRule()
    await notes.insert_many(rows(-1, 60))
    assert (await ttl.run_cleanup()).deleted == 1


async def test_two_plugins_do_not_govern_one_resource_differently(db: Database) -> None:
    """They would replace each other's index again and again."""
    await db.use_plugin(TTLPlugin(resources={"a": {"ttl": 5}}, **FAST))
    await db.use_plugin(TTLPlugin(resources={"a": {"ttl": 6}}, **FAST), "other")
    with pytest.raises(Invalid, match="has a different expiry in another plugin"):
        await db.create_resource("a")
