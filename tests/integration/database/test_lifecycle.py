"""Coordinator plugins can be started and stopped from anywhere, also from their own hooks."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from jobsync import CoordinatorPlugin, Database, Event, Invalid
from jobsync.stores.memory import MemoryStore

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.2,
    "worker_timeout": 1,
    "coordinator_work_interval": 0.01,
}


class Sweeper(CoordinatorPlugin):
    """Records which hooks are called, and runs the functions given for some of them."""

    def __init__(self, **hooks: Callable[["Sweeper"], Awaitable[object]]) -> None:
        super().__init__(**QUICK)
        self.calls: list[str] = []
        self.worked = asyncio.Event()
        self._hooks_to_run = hooks

    async def on_start(self) -> None:
        await self._record("start")

    async def on_become_coordinator(self) -> None:
        await self._record("become")

    async def coordinator_work(self) -> None:
        self.worked.set()
        await self._record("work")

    async def on_stop_being_coordinator(self) -> None:
        await self._record("resign")

    async def on_stop(self) -> None:
        await self._record("stop")

    async def _record(self, hook: str) -> None:
        if hook in self._hooks_to_run:
            await self._hooks_to_run[hook](self)
        if self.calls[-1:] != [hook]:
            self.calls.append(hook)


COMPLETE = ["start", "become", "work", "resign", "stop"]


async def test_concurrent_starts_take_effect_once() -> None:
    """The plugin starts once and leads once."""
    store = MemoryStore()
    database = Database(connection=store)
    plugin = await database.use_plugin(Sweeper())
    async with asyncio.timeout(30), database:
        for _ in range(3):
            await plugin.stop()
            plugin.worked.clear()
            await asyncio.gather(plugin.start(), database.use_plugin(plugin), plugin.start())
            await plugin.worked.wait()
            assert plugin.is_running
            assert plugin.is_coordinator


@pytest.mark.parametrize("turns", range(6))
async def test_a_stop_during_a_start_stops_the_plugin(turns: int) -> None:
    """At any point of the start: afterwards nothing runs, and there is no session."""
    async with asyncio.timeout(30), Database(connection=MemoryStore()) as database:
        plugin = await database.use_plugin(Sweeper())
        await plugin.stop()
        starting = asyncio.ensure_future(plugin.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await plugin.stop()
        await starting
        await plugin.stop()
        assert (plugin.is_running, plugin.is_coordinator) == (False, False)
        assert await database.store.scan("session/", where={"state": "live"}) == []


@pytest.mark.parametrize("turns", range(0, 40, 4))
async def test_a_start_that_is_cancelled_leaves_nothing_behind(turns: int) -> None:
    """At any point: nothing runs, and the plugin can be started again."""
    async with asyncio.timeout(30), Database(connection=MemoryStore()) as database:
        plugin = await database.use_plugin(Sweeper())
        await plugin.stop()
        plugin.worked.clear()
        starting = asyncio.ensure_future(plugin.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await plugin.stop()
        assert (plugin.is_running, plugin.is_coordinator) == (False, False)
        await plugin.start()
        await plugin.worked.wait()


async def test_concurrent_stops_take_effect_once() -> None:
    """When any of them returns, all work has ended; the hooks ran once and in order."""
    database = await Database("memory://").connect()
    plugin = await database.use_plugin(Sweeper())
    await plugin.worked.wait()

    async def stop() -> None:
        await plugin.stop()
        assert plugin.calls == COMPLETE

    async def disconnect() -> None:
        await database.disconnect()
        assert plugin.calls == COMPLETE
        with pytest.raises(Invalid, match="is not connected"):
            assert database.store is None

    async with asyncio.timeout(30):
        await asyncio.gather(stop(), stop(), disconnect(), stop(), disconnect())
    assert not database.is_connected


async def _stop(plugin: Sweeper) -> None:
    await plugin.stop()


async def _disconnect(plugin: Sweeper) -> None:
    await plugin.database.disconnect()


@pytest.mark.parametrize("end", [_stop, _disconnect])
@pytest.mark.parametrize("hook", ["become", "work"])
async def test_a_hook_may_stop_its_plugin_while_it_leads(
    hook: str, end: Callable[[Sweeper], Awaitable[None]]
) -> None:
    """The hook is not cancelled; only the hook that ends the term follows."""
    database = await Database("memory://").connect()
    resigned = asyncio.Event()

    async def resign(_: Sweeper) -> None:
        resigned.set()

    plugin = await database.use_plugin(Sweeper(**{hook: end}, resign=resign))
    async with asyncio.timeout(30):
        await resigned.wait()
        assert plugin.calls[-3:] == ["stop", hook, "resign"]
        assert not plugin.is_running
        assert database.is_connected is (end is _stop)
        await database.disconnect()


async def test_a_new_term_begins_after_the_old_one_has_ended() -> None:
    """Also if its own work has stopped the plugin and takes long to return."""
    stopped, over = asyncio.Event(), asyncio.Event()

    async def end_slowly(plugin: Sweeper) -> None:
        if not stopped.is_set():
            await plugin.stop()
            stopped.set()
            await over.wait()

    async with asyncio.timeout(30), Database("memory://") as database:
        plugin = await database.use_plugin(Sweeper(work=end_slowly))
        await stopped.wait()
        plugin.worked.clear()
        starting = asyncio.ensure_future(plugin.start())
        await until(lambda: plugin.calls[-1] == "start", "it is started again")
        over.set()
        await starting
        await plugin.worked.wait()
        assert plugin.calls[:6] == ["start", "become", "stop", "start", "work", "resign"]


@pytest.mark.parametrize("end", [_stop, _disconnect])
@pytest.mark.parametrize("hook", ["resign", "stop"])
async def test_stop_hooks_may_call_stop(
    hook: str, end: Callable[[Sweeper], Awaitable[None]]
) -> None:
    """The stop is already under way: they return at once and do not wait for themselves."""
    database = await Database("memory://").connect()
    plugin = await database.use_plugin(Sweeper(**{hook: end}))
    await plugin.worked.wait()
    async with asyncio.timeout(30):
        await database.disconnect()
    assert plugin.calls == COMPLETE
    await database.connect()
    plugin.worked.clear()
    await plugin.worked.wait()
    async with asyncio.timeout(30):
        await plugin.stop()
        await database.disconnect()
    assert not database.is_connected


async def test_a_hook_that_calls_the_opposite_is_refused() -> None:
    """It would wait for itself for ever."""

    async def restart(plugin: Sweeper) -> None:
        with pytest.raises(
            Invalid, match=r"plugin cannot start in a hook of stop \(got 'sweeper'\)"
        ):
            await plugin.start()

    async def give_up(plugin: Sweeper) -> None:
        with pytest.raises(Invalid, match="database cannot disconnect in a hook of connect"):
            await plugin.database.disconnect()
        with pytest.raises(Invalid, match="plugin cannot stop in a hook of start"):
            await plugin.stop()

    database = Database("memory://")
    plugin = await database.use_plugin(Sweeper(start=give_up, resign=restart, stop=restart))
    async with asyncio.timeout(30), database:
        await plugin.worked.wait()
    assert plugin.calls == COMPLETE


async def test_a_cancelled_stop_leaves_nothing_running() -> None:
    """Work that ignores cancellation is abandoned; the session ends, and the other leads."""
    stuck, freed = asyncio.Event(), asyncio.Event()

    async def ignore_cancellation(_: Sweeper) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stuck.set()
            await freed.wait()
            raise

    async with asyncio.timeout(30), Database("memory://patience") as other:
        database = await Database("memory://patience").connect()
        plugin = await database.use_plugin(Sweeper(work=ignore_cancellation))
        await plugin.worked.wait()
        waiting = await other.use_plugin(Sweeper())
        stopping = asyncio.ensure_future(plugin.stop())
        await stuck.wait()
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()
        assert (plugin.is_running, plugin.is_coordinator) == (False, False)
        await waiting.worked.wait()
        await database.disconnect()
        freed.set()


@pytest.mark.parametrize("hook", ["work", "resign"])
@pytest.mark.parametrize("has_neighbour", [False, True])
async def test_a_cancelled_stop_ends_the_hook_that_it_waits_for(
    hook: str, *, has_neighbour: bool
) -> None:
    """Also if another plugin keeps the session, which goes on, and so does the other's work."""
    reached, ended = asyncio.Event(), asyncio.Event()

    async def linger(plugin: Sweeper) -> None:
        if hook == "work" and plugin.is_coordinator:
            # It leads until the stop, and then cleans up for as long as it may.
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                reached.set()
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with asyncio.timeout(30), Database(connection=MemoryStore()) as database:
        neighbour = Sweeper()
        if has_neighbour:
            await database.use_plugin(neighbour, "neighbour")
        plugin = await database.use_plugin(Sweeper(**{hook: linger}))
        await plugin.worked.wait()
        stopping = asyncio.ensure_future(plugin.stop())
        await reached.wait()
        assert not ended.is_set()
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()
        await ended.wait()
        assert (plugin.is_running, plugin.is_coordinator) == (False, False)
        live = await database.store.scan("session/", where={"state": "live"})
        assert len(live) == has_neighbour
        if has_neighbour:
            neighbour.worked.clear()
            await neighbour.worked.wait()


async def test_a_plugin_added_during_a_disconnect_starts_at_the_next_connect() -> None:
    """It never runs in a database that is not connected."""
    late = Sweeper()

    async def add(plugin: Sweeper) -> None:
        await plugin.database.use_plugin(late, "late")

    database = await Database("memory://").connect()
    await database.use_plugin(Sweeper(stop=add))
    async with asyncio.timeout(30):
        await database.disconnect()
        assert not late.is_running
        async with database:
            await late.worked.wait()


async def test_a_process_may_change_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session uses the store that was connected, whatever directory is current."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOBSYNC_URL", "sqlite:///here.db")
    async with Database() as database:
        os.chdir("elsewhere")
        monkeypatch.setenv("JOBSYNC_URL", "sqlite:///there.db")
        plugin = await database.use_plugin(Sweeper())
        await plugin.worked.wait()
        assert [peer.worker_id for peer in await plugin.members()] == [plugin.worker_id]
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_a_session_that_ends_by_an_error_fails_the_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No plugin keeps running without its session."""
    failed = asyncio.Event()
    emitted: list[Event] = []

    def record(event: Event) -> None:
        emitted.append(event)
        failed.set()

    database = await Database("memory://").connect()
    database.on("db:failed", record)
    plugin = await database.use_plugin(Sweeper())
    await plugin.worked.wait()
    monkeypatch.setattr("jobsync.coordination.member_loop.MemberLoop._check", _divide_by_zero)
    async with asyncio.timeout(30):
        await failed.wait()
    assert emitted[0]["error"] == "ZeroDivisionError: a bug"
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await database.list_resources()
    with pytest.raises(ExceptionGroup):
        await database.disconnect()
    assert not database.is_connected


async def _divide_by_zero(_: object) -> None:
    raise ZeroDivisionError("a bug")
