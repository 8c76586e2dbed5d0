"""Plugins can be started and stopped by anybody, in any order; each takes effect once."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from jobsync import Database, Event, Invalid, NotFound, Plugin
from jobsync.database.plugin import STOP_TIME


class Ticked(Event, frozen=True, kw_only=True):
    """A user's own event."""

    name = "plg:ticker:ticked"

    count: int


class TickerPlugin(Plugin):
    """Counts in the background, and records which hooks are called."""

    def __init__(self, log: list[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.log = [] if log is None else log
        self.ticks = 0
        self.ticking = asyncio.Event()

    async def on_install(self) -> None:
        self.log.append(f"install {self.name}")
        await self.database.create_resource(f"plg_{self.namespace}_ticks")

    async def on_start(self) -> None:
        self.log.append(f"start {self.name}")
        self.run_in_background(self.tick)

    async def on_stop(self) -> None:
        self.log.append(f"stop {self.name}")

    async def tick(self) -> None:
        while True:
            self.ticks = int(await self.storage.increment("ticks"))
            self.emit(Ticked(count=self.ticks))
            self.ticking.set()
            await asyncio.sleep(0.001)


class S3QueuePlugin(Plugin):
    """A plugin that does nothing."""


class OwnSlugPlugin(Plugin):
    """A plugin with an explicit slug."""

    slug = "own-slug"


def running(*plugins: Plugin) -> list[bool]:
    """Return which of them are running."""
    return [plugin.is_running for plugin in plugins]


async def test_a_plugin_added_before_connect_starts_at_connect() -> None:
    """Not before; disconnect stops it."""
    database = Database("memory://")
    plugin = await database.use_plugin(TickerPlugin())
    assert plugin.log == []
    await database.connect()
    assert running(plugin) == [True]
    assert plugin.log == ["install ticker", "start ticker"]
    await asyncio.wait_for(plugin.ticking.wait(), 10)
    await database.disconnect()
    assert running(plugin) == [False]
    assert plugin.log == ["install ticker", "start ticker", "stop ticker"]


async def test_a_plugin_added_after_connect_starts_at_once() -> None:
    """An explicit `start` afterwards has no effect."""
    async with Database("memory://") as database:
        plugin = await database.use_plugin(TickerPlugin())
        await plugin.start()
        await database.use_plugin(plugin)
        assert plugin.log == ["install ticker", "start ticker"]
        assert "plg_default_ticks" in database.resources


async def test_start_and_stop_take_effect_once() -> None:
    """Repeated, in any order, and concurrently."""
    async with Database("memory://") as database:
        plugin = TickerPlugin()
        await plugin.stop()
        await database.use_plugin(plugin)
        await asyncio.gather(*(plugin.stop() for _ in range(3)))
        await asyncio.gather(*(plugin.start() for _ in range(3)))
        await asyncio.gather(*(plugin.stop() for _ in range(3)))
    assert plugin.log == [
        *("install ticker", "start ticker", "stop ticker", "start ticker", "stop ticker")
    ]


async def test_a_stopped_plugin_runs_nothing() -> None:
    """Its background work has ended when `stop` returns; its events reach its listeners."""
    received: list[Event] = []
    all_received: list[Event] = []
    async with Database("memory://") as database:
        database.on("plg:*", all_received.append)
        one, two = TickerPlugin(), TickerPlugin()
        one.on("plg:ticker:ticked", received.append)
        await database.use_plugin(one, "one")
        await database.use_plugin(two, "two")
        for plugin in (one, two):
            await asyncio.wait_for(plugin.ticking.wait(), 10)
        await one.stop()
        ticks = one.ticks
        two.ticking.clear()
        await asyncio.wait_for(two.ticking.wait(), 10)
        assert one.ticks == ticks
        assert [event["count"] for event in received] == list(range(1, ticks + 1))
        assert len(all_received) > len(received)
        # Each has its own count, under its alias.
        assert await database.open_storage("ticker", "one").get("ticks") == ticks
    with pytest.raises(Invalid, match="is not connected"):
        await one.start()


async def test_the_work_of_a_plugin_goes_on_until_it_has_stopped_it_in_order() -> None:
    """Only what `on_stop` has left is cancelled then."""
    log: list[str] = []

    class DrainingPlugin(Plugin):
        async def on_start(self) -> None:
            self.may_end, self.has_ended = asyncio.Event(), asyncio.Event()
            self.run_in_background(self.drain)
            self.run_in_background(self.go_on)
            await asyncio.sleep(0)

        async def on_stop(self) -> None:
            self.may_end.set()
            await asyncio.wait_for(self.has_ended.wait(), 10)
            log.append("on_stop")

        async def drain(self) -> None:
            await self.may_end.wait()
            log.append("drained")
            self.has_ended.set()

        async def go_on(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                log.append("cancelled")

    async with Database("memory://") as database:
        plugin = await database.use_plugin(DrainingPlugin())
        for _ in range(2):
            log.clear()
            await plugin.stop()
            assert log == ["drained", "on_stop", "cancelled"]
            await plugin.start()


@pytest.mark.parametrize("length", [0, 1, 50, 51])
async def test_names_have_up_to_fifty_characters(length: int) -> None:
    """Those of kinds of plugins, namespaces, aliases and storages."""
    name = ("aB-_0" * 11)[:length]
    database = Database("memory://")
    accepted: list[str] = []
    makers: dict[str, Callable[[], object]] = {
        "slug": lambda: type("AnyPlugin", (Plugin,), {"slug": name}),
        "namespace": lambda: S3QueuePlugin(namespace=name),
        "storage": lambda: database.open_storage(name),
        "namespace of a storage": lambda: database.open_storage("a", name),
    }
    for what, make in makers.items():
        with suppress(Invalid):
            make()
            accepted.append(what)
    with suppress(Invalid):
        assert (await database.use_plugin(S3QueuePlugin(), alias=name)).name == name
        accepted.append("alias")
    assert accepted == ([*makers, "alias"] if 1 <= length <= 50 else [])


async def test_plugins_are_named_by_slug_namespace_or_alias() -> None:
    """Several plugins of one kind need names; the names separate their data."""
    database = Database("memory://")
    plain = await database.use_plugin(S3QueuePlugin())
    spaced = await database.use_plugin(S3QueuePlugin(namespace="emails"))
    aliased = await database.use_plugin(S3QueuePlugin(), "sms")
    both = await database.use_plugin(S3QueuePlugin(namespace="apart"), alias="push")
    own = await database.use_plugin(OwnSlugPlugin())
    names = [(plugin.name, plugin.namespace) for plugin in (plain, spaced, aliased, both, own)]
    assert names == [
        *(("s3-queue", "default"), ("s3-queue-emails", "emails")),
        *(("sms", "sms"), ("push", "apart"), ("own-slug", "default")),
    ]
    assert [*database.plugins] == ["own-slug", "push", "s3-queue", "s3-queue-emails", "sms"]
    assert database.plugins.sms is database.plugins["sms"] is aliased
    with pytest.raises(NotFound, match=r"no plugin 'scheduler'\. Known: own-slug"):
        database.plugins["scheduler"]
    with pytest.raises(Invalid, match="has the name of another plugin"):
        await database.use_plugin(S3QueuePlugin())
    with pytest.raises(Invalid, match=r"alias is taken \(got 'sms'\)"):
        await database.use_plugin(S3QueuePlugin(), "sms")


async def test_plugins_that_cannot_be_added_are_refused() -> None:
    """The error names the fix."""
    one, two = Database("memory://"), Database("memory://")
    with pytest.raises(Invalid, match=r"Call it: .*Plugin\(\)"):
        Database("memory://x", plugins=[S3QueuePlugin])  # type: ignore[list-item]
    with pytest.raises(Invalid, match=r"Inherit jobsync\.Plugin"):
        await one.use_plugin(object())  # type: ignore[type-var]
    plugin = await one.use_plugin(S3QueuePlugin())
    with pytest.raises(Invalid, match="is already attached"):
        await two.use_plugin(plugin)
    assert list(two.plugins) == []
    with pytest.raises(Invalid, match=r"alias .*\(got 'a/b'\)"):
        await one.use_plugin(S3QueuePlugin(), "a/b")
    with pytest.raises(Invalid, match=r"namespace .*\(got ''\)"):
        S3QueuePlugin(namespace="")
    with pytest.raises(Invalid, match=r"slug .*\(got 'my slug'\)"):
        type("OddPlugin", (Plugin,), {"slug": "my slug"})
    with pytest.raises(Invalid, match="is not attached to a database"):
        await S3QueuePlugin().start()


async def test_a_plugin_that_cannot_start_makes_connect_fail() -> None:
    """Plugins that had started are stopped, and nothing is left running."""

    class BrokenPlugin(Plugin):
        broken = True

        async def on_start(self) -> None:
            self.run_in_background(asyncio.Event().wait)  # type: ignore[arg-type]
            if self.broken:
                raise OSError("no such port")

    before = asyncio.all_tasks()
    database = Database("memory://")
    first = await database.use_plugin(TickerPlugin())
    broken = await database.use_plugin(BrokenPlugin())
    with pytest.raises(OSError, match="no such port"):
        await database.connect()
    assert running(first, broken) == [False, False]
    assert asyncio.all_tasks() == before
    broken.broken = False
    async with database:
        assert running(first, broken) == [True, True]


async def test_every_plugin_is_stopped_even_if_another_raises() -> None:
    """The last added is stopped first; the error is raised after all have stopped."""
    log: list[str] = []

    class StubbornPlugin(TickerPlugin):
        async def on_stop(self) -> None:
            await super().on_stop()
            raise OSError("will not")

    database = Database("memory://")
    await database.use_plugin(TickerPlugin(log), "a")
    stubborn = await database.use_plugin(StubbornPlugin(log), "b")
    await database.use_plugin(TickerPlugin(log), "c")
    await database.connect()
    with pytest.raises(OSError, match="will not"):
        await database.disconnect()
    assert log[-3:] == ["stop c", "stop b", "stop a"]
    assert not stubborn.is_running
    assert not database.is_connected


async def test_background_work_may_stop_its_own_plugin() -> None:
    """The work is not cancelled."""
    ended = asyncio.Event()

    class OncePlugin(Plugin):
        async def on_start(self) -> None:
            self.run_in_background(self.work, "once")

        async def work(self) -> None:
            await self.stop()
            ended.set()

    async with Database("memory://") as database:
        plugin = await database.use_plugin(OncePlugin())
        await asyncio.wait_for(ended.wait(), 10)
        assert not plugin.is_running


async def test_a_plugin_that_its_own_user_code_stops_starts_no_new_work_meanwhile() -> None:
    """It is told before the call returns; it stops once that code has ended."""
    events: list[str] = []

    class UserCodePlugin(Plugin):
        runs_caller = False

        def prepare_stop(self) -> None:
            events.append("prepare")

        async def on_stop(self) -> None:
            events.append("stop")

    async with Database("memory://") as database:
        plugin = await database.use_plugin(UserCodePlugin())
        UserCodePlugin.runs_caller = True
        await plugin.stop()
        assert events == ["prepare"]
        UserCodePlugin.runs_caller = False
    assert events[-1] == "stop"


async def test_a_signal_handler_may_stop_everything() -> None:
    """Twice, and concurrently with other callers."""
    loop = asyncio.get_running_loop()
    database = Database("memory://")
    plugin = await database.use_plugin(TickerPlugin())
    await database.connect()
    stopping: list[asyncio.Task[None]] = []
    called = asyncio.Event()

    def handle() -> None:
        stopping.append(loop.create_task(plugin.stop()))
        stopping.append(loop.create_task(database.disconnect()))
        called.set()

    loop.add_signal_handler(signal.SIGUSR1, handle)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(called.wait(), 10)
        await asyncio.gather(*stopping, database.disconnect(), plugin.stop())
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
    assert not plugin.is_running
    assert not database.is_connected


class PatientPlugin(Plugin):
    """Takes some time to stop."""

    def __init__(self, seconds: float) -> None:
        super().__init__(namespace=f"for-{seconds:g}")
        self._seconds = seconds

    @property
    def stop_time(self) -> float:
        """Seconds that it takes."""
        return self._seconds


@pytest.mark.parametrize("times", [*itertools.permutations((1.0, 7.0, 30.0)), (2.0,), ()])
async def test_a_disconnect_leaves_each_plugin_the_time_that_the_slowest_needs(
    times: tuple[float, ...],
) -> None:
    """In whatever order they were added; without plugins it is the default."""
    database = Database("memory://", plugins=[PatientPlugin(seconds) for seconds in times])
    assert database._plugins.stop_time == max(times, default=STOP_TIME)
