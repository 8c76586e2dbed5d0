"""Coordinator plugins: one instance in the whole fleet does the central work."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from servers import Locate
from waiting import until

from jobsync import CoordinatorPlugin, Database, Event, Invalid
from jobsync.coordination.session import HookFailure
from jobsync.status.sessions import read_cluster_status

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.2,
    "worker_timeout": 1,
    "coordinator_work_interval": 0.05,
}


class Sweeper(CoordinatorPlugin):
    """Records which hooks are called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**QUICK, **options})
        self.calls: list[str] = []
        self.worked = asyncio.Event()

    async def on_become_coordinator(self) -> None:
        self.calls.append("become")

    async def on_stop_being_coordinator(self) -> None:
        self.calls.append("stop")

    async def coordinator_work(self) -> None:
        self.calls.append("work")
        self.worked.set()


class Clock(Sweeper):
    """Another kind of work."""


class Failing(Sweeper):
    """Raises in its work."""

    async def coordinator_work(self) -> None:
        await super().coordinator_work()
        raise ValueError("broken")


async def test_one_of_two_instances_leads_and_the_other_succeeds_it() -> None:
    """When the first stops in order, the second leads, in a later epoch."""
    async with Database("memory://two") as one, Database("memory://two") as two:
        first, second = Sweeper(), Sweeper()
        received: list[Event] = []
        second.on("coord:coordinator-elected", received.append)
        second.on("plg:sweeper:coordinator-promoted", received.append)
        await one.use_plugin(first)
        await first.worked.wait()
        await two.use_plugin(second)
        assert await second.ensure_coordinator() == first.worker_id
        assert (first.is_coordinator, second.is_coordinator) == (True, False)
        assert [peer.worker_id for peer in await second.members()] == [
            first.worker_id,
            second.worker_id,
        ]
        leader = first.worker_id
        await first.stop()
        assert first.calls[0] == "become"
        assert first.calls[-1] == "stop"
        await second.worked.wait()
        assert second.is_coordinator
        elected = [event["worker_id"] for event in received if event.name.startswith("coord:")]
        assert elected == [leader, second.worker_id]
        assert [event["epoch"] for event in received if event.name.startswith("plg:")] == [2]


async def test_each_kind_of_work_has_its_own_coordinator() -> None:
    """In a mixed fleet: one process has a sweeper, one a clock, a third both."""
    databases = [Database("memory://unlike") for _ in range(3)]
    for database in databases:
        await database.connect()
    sweepers = [await databases[n].use_plugin(Sweeper()) for n in (0, 2)]
    clocks = [await databases[n].use_plugin(Clock()) for n in (1, 2)]
    for kind in (sweepers, clocks):
        await until(lambda kind=kind: any(plugin.worked.is_set() for plugin in kind))  # type: ignore[misc]
        assert sum(plugin.is_coordinator for plugin in kind) == 1
    await databases[0].disconnect()
    await databases[1].disconnect()
    await until(lambda: sweepers[1].is_coordinator and clocks[1].is_coordinator)
    await databases[2].disconnect()


async def test_plugins_of_a_database_share_one_session() -> None:
    """Three plugins, one worker; they stop in any order, some twice; the last ends the session."""
    async with Database("memory://share") as db, Database("memory://share") as other:
        watcher = await other.use_plugin(Sweeper())
        plugins = [Sweeper(namespace="a"), Clock(), Failing()]
        for plugin in plugins:
            await db.use_plugin(plugin)
            await plugin.worked.wait()
        assert len({plugin.worker_id for plugin in plugins}) == 1
        sessions = await watcher.database.store.scan("session/", where={"state": "live"})
        assert len(sessions) == 2
        for plugin in (plugins[1], plugins[0], plugins[1], plugins[2], plugins[0]):
            await plugin.stop()
            assert not plugin.is_coordinator
        sessions = await watcher.database.store.scan("session/", where={"state": "live"})
        assert len(sessions) == 1
        await plugins[0].start()
        await until(lambda: plugins[0].is_coordinator)


async def test_a_plugin_that_is_started_again_is_as_in_its_first_use() -> None:
    """It hears of each election once, and one cleanup runs, however often a session was opened."""
    async with Database("memory://again") as db:
        sweeper = Sweeper(skip_cold_start=True)
        heard: list[str] = []
        for name in ("coord:coordinator-promoted", "plg:sweeper:coordinator-promoted"):
            sweeper.on(name, lambda event: heard.append(event.name))
        await db.use_plugin(sweeper)
        for use in range(1, 4):
            await sweeper.worked.wait()
            assert heard == ["coord:coordinator-promoted", "plg:sweeper:coordinator-promoted"] * use
            running = db._get_connection().supervisor.list_running()
            assert sorted(running) == ["cleanup", "session"]
            await sweeper.stop()
            sweeper.worked.clear()
            await sweeper.start()


async def test_work_that_raises_is_reported_and_continues() -> None:
    """An error in user code becomes an event; the database and the term go on."""
    async with Database("memory://") as db:
        failures: list[Event] = []
        db.events.on("jobsync:handler-failed", failures.append)
        failing = await db.use_plugin(Failing())
        await until(lambda: failing.calls.count("work") > 2)
        assert failing.is_coordinator
        assert failures[0]["error"] == "ValueError: broken"


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_another_instance_leads_after_a_database_has_failed(
    locate: Locate, kind: str
) -> None:
    """It gives up its role and ends its session at once; its process and its loop live on.

    Found: it went on to send heartbeats, so its role was never free.
    """
    url = locate(kind)
    # Only the end of the session frees the role in time, not its timeout.
    patient = {"heartbeat_interval": 100, "worker_timeout": 400}
    failing, other = Database(url), Database(url)
    first, second = Sweeper(**patient), Sweeper(**patient)
    failed: list[Event] = []
    failing.on("db:failed", failed.append)

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def is_alone() -> bool:
        return [peer.worker_id for peer in await second.members()] == [second.worker_id]

    await failing.use_plugin(first)
    await failing.connect()
    await first.worked.wait()
    async with other:
        await other.use_plugin(second)
        failing.run_in_background(fail, "failing")
        await asyncio.wait_for(second.worked.wait(), 20)
        assert second.is_coordinator
        assert not first.is_coordinator
        await until(lambda: first.calls[-1] == "stop")
        assert first.calls.count("stop") == 1
        assert [event["error"] for event in failed] == ["ZeroDivisionError: a bug"]
        # The role is free a moment before the session ends; its timeout would take 400 s.
        await until(is_alone, "the session has ended")
        await failing.disconnect()
        assert first.calls.count("stop") == 1


async def test_work_without_an_election_ends_when_the_database_fails() -> None:
    """Otherwise it would go on and raise at every call."""

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    database = await Database("memory://alone").connect()
    sweeper = await database.use_plugin(Sweeper(enable_coordinator=False))
    await sweeper.worked.wait()
    database.run_in_background(fail, "failing")
    await until(lambda: sweeper.calls[-1] == "stop")
    assert not sweeper.is_coordinator
    await database.disconnect()
    assert sweeper.calls.count("stop") == 1


class Flaky(Sweeper):
    """Raises in its work until it is repaired."""

    is_broken = True

    async def coordinator_work(self) -> None:
        await super().coordinator_work()
        if self.is_broken:
            raise ValueError("broken\nin two lines")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_work_that_raises_is_visible_to_everybody_until_it_succeeds(
    locate: Locate, kind: str
) -> None:
    """In the status that `jobsync cluster` prints. Found: only the leader's own process knew."""
    url = locate(kind)
    async with Database(url) as database, Database(url) as other:
        plugin = await database.use_plugin(Flaky(skip_cold_start=True))

        async def read_failure() -> HookFailure | None:
            status = await read_cluster_status(other.store, other.components)
            return next((role.failing for role in status.roles), None)

        async def is_failing() -> bool:
            failure = await read_failure()
            return failure is not None and failure.times > 1

        await until(is_failing)
        failure = await read_failure()
        assert failure is not None
        assert failure.callback == "coordinator_work"
        assert failure.error == "ValueError: broken\nin two lines"
        plugin.is_broken = False
        await until(lambda: _is_none(read_failure()))
        assert plugin.is_coordinator


async def _is_none(result: Awaitable[object]) -> bool:
    return await result is None


async def test_an_error_is_published_without_a_heartbeat_of_its_own() -> None:
    """A heartbeat costs money on object stores, and work may raise often."""
    async with Database("memory://sparing") as database:
        slow = {"heartbeat_interval": 300, "worker_timeout": 1000}
        plugin = await database.use_plugin(Failing(**slow, coordinator_work_interval=0.001))
        await until(lambda: len(plugin.calls) > 5)

        async def has_published() -> bool:
            (record,) = await database.store.scan("session/")
            return bool(record.value["holds"])

        # It was opened, became a candidate, and publishes its role a moment after it leads.
        await until(has_published)
        (record,) = await database.store.scan("session/")
        before = record.value["beat"]
        await until(lambda: len(plugin.calls) > 50)
        (record,) = await database.store.scan("session/")
        assert record.value["beat"] == before


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, None),
        ({"heartbeat_interval": 0.2, "worker_timeout": 1}, None),
        ({"heartbeat_interval": None, "worker_timeout": None}, None),
        # Each alone, and both: the first that differs is named.
        ({"heartbeat_interval": 0.3}, "heartbeat_interval must be 0.2"),
        ({"worker_timeout": 2}, "worker_timeout must be 1"),
        ({"heartbeat_interval": 0.3, "worker_timeout": 2}, "heartbeat_interval must be 0.2"),
    ],
)
async def test_plugins_that_share_a_session_have_its_timing(
    options: dict[str, Any], refused: str | None
) -> None:
    """Another one is refused, not ignored; it may be the next session's, after the last user."""
    async with Database("memory://") as database:
        first = await database.use_plugin(Sweeper())
        other = Clock(**options)
        if refused is None:
            await database.use_plugin(other)
        else:
            with pytest.raises(Invalid, match=refused):
                await database.use_plugin(other)
            assert not other.is_running
            with pytest.raises(Invalid, match=refused):
                await other.start()
        await first.stop()
        await other.start()
        timing = other._get_membership().timing
        assert timing.heartbeat == (options.get("heartbeat_interval") or 0.2)
        assert timing.timeout == (options.get("worker_timeout") or 1)


async def test_work_that_stopped_its_plugin_ends_before_the_next_term_begins() -> None:
    """However soon the plugin is started again: each life's hooks are called in pairs, in order."""
    may_end, has_stopped = asyncio.Event(), asyncio.Event()

    class _Stopping(Sweeper):
        async def coordinator_work(self) -> None:
            self.calls.append("work")
            await self.stop()
            has_stopped.set()
            await may_end.wait()
            self.calls.append("end")

    async with Database("memory://") as database:
        plugin = await database.use_plugin(_Stopping(heartbeat_interval=5, worker_timeout=60))
        for life in (1, 2, 3):
            await has_stopped.wait()
            assert not plugin.is_running
            starting = asyncio.create_task(plugin.start())
            # Otherwise it ends within a moment, and the next term begins.
            await asyncio.wait([starting], timeout=0.1)
            assert not starting.done()
            lives = ["become", "work", "end", "stop"] * (life - 1)
            assert plugin.calls == [*lives, "become", "work"]
            has_stopped.clear()
            may_end.set()
            await starting
            may_end.clear()
        await has_stopped.wait()
        may_end.set()
    assert plugin.calls == ["become", "work", "end", "stop"] * 4


async def test_a_hook_that_is_not_a_coroutine_function_is_named() -> None:
    """With the fix."""

    class _Plain(CoordinatorPlugin):
        def coordinator_work(self) -> None:  # type: ignore[override]
            pass

    errors: list[str] = []
    async with Database("memory://plain") as database:
        database.on("jobsync:handler-failed", lambda event: errors.append(event["error"]))
        await database.use_plugin(_Plain(**QUICK))
        await until(lambda: len(errors) > 1)
    assert errors[0] == (
        "Invalid: coordinator_work must be a coroutine function (got None). "
        "Define it with `async def`."
    )


class Idle(CoordinatorPlugin):
    """Overrides nothing."""


class Misspelt(CoordinatorPlugin):
    """Almost overrides a hook."""

    async def coordinater_work(self) -> None:
        raise NotImplementedError


class Listening(CoordinatorPlugin):
    """Has no work of its own, and a hook."""

    async def on_become_coordinator(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "fixes"),
    [
        (Idle, ["override coordinator_work"]),
        (Misspelt, ["rename coordinater_work to coordinator_work"]),
        (Listening, []),
        (Sweeper, []),
    ],
)
async def test_a_plugin_that_would_lead_idly_is_reported_when_it_starts(
    kind: type[CoordinatorPlugin], fixes: list[str]
) -> None:
    """Found: it was elected, and did nothing."""
    emitted: list[Event] = []
    async with Database("memory://idle") as database:
        database.on("db:plugin-without-work", emitted.append)
        await database.use_plugin(kind())
    assert [event["fix"] for event in emitted] == fixes


async def test_without_elections_every_instance_works() -> None:
    """With `enable_coordinator=False` an instance leads from start to stop."""
    async with Database("memory://solo") as db, Database("memory://solo") as other:
        alone = [
            await database.use_plugin(Sweeper(enable_coordinator=False)) for database in (db, other)
        ]
        for plugin in alone:
            await plugin.worked.wait()
            assert plugin.is_coordinator


async def test_plugins_with_different_heartbeats_are_refused() -> None:
    """The error names the option, the current value and the fix."""
    async with Database("memory://") as db:
        await db.use_plugin(Sweeper())
        with pytest.raises(
            Invalid, match=r"heartbeat_interval must be 0.2.*session.*\(got 0.3\)\. Pass the same"
        ):
            await db.use_plugin(Clock(heartbeat_interval=0.3))


def test_an_unknown_option_is_refused() -> None:
    """The error suggests the closest option."""
    with pytest.raises(Invalid, match="Did you mean worker_timeout"):
        Sweeper(worker_timeouts=3)


class Keeper(Sweeper):
    """Notes the epochs of what it governs when it begins to lead, and whether it may write."""

    governs = ("single/first", "single/second")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sealed: list[int] = []
        self.epoch = 0

    async def on_become_coordinator(self) -> None:
        records = await self.database.store.get_many(self.governs, tombstones=True)
        assert self.term is not None
        self.epoch = self.term.epoch
        self.sealed = [-1 if record is None else record.epoch for record in records]
        await super().on_become_coordinator()


async def test_what_a_plugin_governs_is_sealed_before_its_first_hook() -> None:
    """All its records, in each term, so that no earlier coordinator can write them."""
    async with Database("memory://") as db:
        keeper = await db.use_plugin(Keeper())
        for epoch in (1, 2):
            await until(lambda epoch=epoch: keeper.epoch == epoch and keeper.is_coordinator)  # type: ignore[misc]
            assert keeper.sealed == [epoch, epoch]
            await keeper.stop()
            await keeper.start()


async def test_classes_that_share_a_slug_are_one_kind() -> None:
    """A subclass with its parent's slug is a candidate for the same work."""

    class _CarefulSweeper(Sweeper):
        slug = "sweeper"

    class _PickyPlugin(CoordinatorPlugin):
        pass

    assert _PickyPlugin.slug == "picky"
    async with Database("memory://kind") as one, Database("memory://kind") as two:
        first = await one.use_plugin(Sweeper())
        await first.worked.wait()
        second = _CarefulSweeper()
        received: list[Event] = []
        second.on("plg:sweeper:coordinator-elected", received.append)
        await two.use_plugin(second)
        assert await second.ensure_coordinator() == first.worker_id
        await until(lambda: bool(received))
        assert received[0]["worker_id"] == first.worker_id
        assert not second.is_coordinator
