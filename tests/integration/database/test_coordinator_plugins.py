"""Plugins of which one instance in the whole fleet does the central work."""

import asyncio
from typing import Any

import pytest
from waiting import until

from jobsync import CoordinatorPlugin, Database, Event, Invalid

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.2,
    "worker_timeout": 1,
    "coordinator_work_interval": 0.05,
}


class Sweeper(CoordinatorPlugin):
    """Notes what it is asked to do."""

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


class Clumsy(Sweeper):
    """Fails at whatever it does."""

    async def coordinator_work(self) -> None:
        await super().coordinator_work()
        raise ValueError("clumsy")


async def test_one_of_two_instances_leads_and_the_other_follows_it() -> None:
    """When the first stops in good order, the second leads, in a later epoch."""
    async with Database("memory://two") as one, Database("memory://two") as two:
        first, second = Sweeper(), Sweeper()
        heard: list[Event] = []
        second.on("coord:coordinator-elected", heard.append)
        second.on("plg:sweeper:coordinator-promoted", heard.append)
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
        elected = [event["worker_id"] for event in heard if event.name.startswith("coord:")]
        assert elected == [leader, second.worker_id]
        assert [event["epoch"] for event in heard if event.name.startswith("plg:")] == [2]


async def test_each_kind_of_work_has_its_coordinator() -> None:
    """Unlike processes: one can sweep, one can tell the time, a third can do both."""
    databases = [Database("memory://unlike") for _ in range(3)]
    for database in databases:
        await database.connect()
    sweepers = [await databases[n].use_plugin(Sweeper()) for n in (0, 2)]
    clocks = [await databases[n].use_plugin(Clock()) for n in (1, 2)]
    for kind in (sweepers, clocks):
        await until(lambda kind=kind: any(each.worked.is_set() for each in kind))  # type: ignore[misc]
        assert sum(each.is_coordinator for each in kind) == 1
    await databases[0].disconnect()
    await databases[1].disconnect()
    await until(lambda: sweepers[1].is_coordinator and clocks[1].is_coordinator)
    await databases[2].disconnect()


async def test_plugins_of_a_database_share_one_session() -> None:
    """Three plugins, one worker; they stop in any order, twice; the last one ends the session."""
    async with Database("memory://share") as db, Database("memory://share") as other:
        watcher = await other.use_plugin(Sweeper())
        plugins = [Sweeper(namespace="a"), Clock(), Clumsy()]
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


async def test_work_that_raises_is_told_and_goes_on() -> None:
    """User code that fails is an event; the database and the term go on."""
    async with Database("memory://") as db:
        failures: list[Event] = []
        db.events.on("jobsync:handler-failed", failures.append)
        clumsy = await db.use_plugin(Clumsy())
        await until(lambda: clumsy.calls.count("work") > 2)
        assert clumsy.is_coordinator
        assert failures[0]["error"] == "ValueError: clumsy"


async def test_without_a_coordinator_every_instance_works() -> None:
    """Told that it is the only one, it leads at once and for as long as it runs."""
    async with Database("memory://solo") as db, Database("memory://solo") as other:
        alone = [await each.use_plugin(Sweeper(enable_coordinator=False)) for each in (db, other)]
        for plugin in alone:
            await plugin.worked.wait()
            assert plugin.is_coordinator


async def test_plugins_that_would_beat_at_two_paces_are_refused() -> None:
    """The error names the option, what there is, and the fix."""
    async with Database("memory://") as db:
        await db.use_plugin(Sweeper())
        with pytest.raises(
            Invalid, match=r"heartbeat_interval must be 0.2.*session.*\(got 0.3\)\. Give all"
        ):
            await db.use_plugin(Clock(heartbeat_interval=0.3))


def test_an_unknown_option_is_refused() -> None:
    """With a guess at what was meant."""
    with pytest.raises(Invalid, match="Did you mean worker_timeout"):
        Sweeper(worker_timeouts=3)


async def test_classes_that_share_a_slug_are_one_kind() -> None:
    """A class may refine another, or be defined anew, and stand for the same work."""

    class _Careful(Sweeper):
        slug = "sweeper"

    class _PickyPlugin(CoordinatorPlugin):
        pass

    assert _PickyPlugin.slug == "picky"
    async with Database("memory://kind") as one, Database("memory://kind") as two:
        first = await one.use_plugin(Sweeper())
        await first.worked.wait()
        second = _Careful()
        heard: list[Event] = []
        second.on("plg:sweeper:coordinator-elected", heard.append)
        await two.use_plugin(second)
        assert await second.ensure_coordinator() == first.worker_id
        await until(lambda: bool(heard))
        assert heard[0]["worker_id"] == first.worker_id
        assert not second.is_coordinator
