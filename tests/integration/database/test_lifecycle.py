"""Coordinator plugins start and stop by anybody's wish, also by their own, and nothing hangs."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jobsync import CoordinatorPlugin, Database, Event, Invalid
from jobsync.stores.memory import MemoryStore

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.2,
    "worker_timeout": 1,
    "coordinator_work_interval": 0.01,
}


class Sweeper(CoordinatorPlugin):
    """Notes what it is asked to do, and does what it is told at one of its hooks."""

    def __init__(self, **hooks: Callable[["Sweeper"], Awaitable[object]]) -> None:
        super().__init__(**QUICK)
        self.calls: list[str] = []
        self.worked = asyncio.Event()
        self._at = hooks

    async def on_start(self) -> None:
        await self._note("start")

    async def on_become_coordinator(self) -> None:
        await self._note("become")

    async def coordinator_work(self) -> None:
        self.worked.set()
        await self._note("work")

    async def on_stop_being_coordinator(self) -> None:
        await self._note("cease")

    async def on_stop(self) -> None:
        await self._note("stop")

    async def _note(self, hook: str) -> None:
        if hook in self._at:
            await self._at[hook](self)
        if self.calls[-1:] != [hook]:
            self.calls.append(hook)


WHOLE = ["start", "become", "work", "cease", "stop"]


async def test_many_may_start_it_at_one_time() -> None:
    """It starts once, and leads once."""
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
async def test_stopping_what_is_about_to_start_stops_it(turns: int) -> None:
    """Whenever it comes: afterwards nothing runs, and there is no session."""
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
    """Wherever it was: nothing runs, and it can be started again."""
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


async def test_many_may_stop_it_at_one_time() -> None:
    """Each that returns finds all its work over; the hooks came once and in order."""
    database = await Database("memory://").connect()
    plugin = await database.use_plugin(Sweeper())
    await plugin.worked.wait()

    async def stop() -> None:
        await plugin.stop()
        assert plugin.calls == WHOLE

    async with asyncio.timeout(30):
        await asyncio.gather(stop(), stop(), database.disconnect(), stop(), database.disconnect())
    assert not database.is_connected


async def _stop(plugin: Sweeper) -> None:
    await plugin.stop()


async def _disconnect(plugin: Sweeper) -> None:
    await plugin.database.disconnect()


@pytest.mark.parametrize("end", [_stop, _disconnect])
@pytest.mark.parametrize("hook", ["become", "work"])
async def test_it_may_end_itself_while_it_leads(
    hook: str, end: Callable[[Sweeper], Awaitable[None]]
) -> None:
    """The hook goes on to its own end, and nothing comes after it but the end of its term."""
    database = await Database("memory://").connect()
    ceased = asyncio.Event()

    async def cease(_: Sweeper) -> None:
        ceased.set()

    plugin = await database.use_plugin(Sweeper(**{hook: end}, cease=cease))
    async with asyncio.timeout(30):
        await ceased.wait()
        assert plugin.calls[-3:] == ["stop", hook, "cease"]
        assert not plugin.is_running
        assert database.is_connected is (end is _stop)
        await database.disconnect()


async def test_a_new_term_begins_after_the_old_one_is_wound_up() -> None:
    """Also where its own work has stopped it, and takes its time to end."""
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
        await asyncio.sleep(0.1)
        over.set()
        await starting
        await plugin.worked.wait()
        assert plugin.calls[:6] == ["start", "become", "stop", "start", "work", "cease"]


@pytest.mark.parametrize("end", [_stop, _disconnect])
@pytest.mark.parametrize("hook", ["cease", "stop"])
async def test_hooks_of_the_end_may_ask_for_the_end(
    hook: str, end: Callable[[Sweeper], Awaitable[None]]
) -> None:
    """What they ask for is under way: they do not wait for themselves."""
    database = await Database("memory://").connect()
    plugin = await database.use_plugin(Sweeper(**{hook: end}))
    await plugin.worked.wait()
    async with asyncio.timeout(30):
        await database.disconnect()
    assert plugin.calls == WHOLE
    await database.connect()
    plugin.worked.clear()
    await plugin.worked.wait()
    async with asyncio.timeout(30):
        await plugin.stop()
        await database.disconnect()
    assert not database.is_connected


async def test_a_hook_that_asks_for_the_opposite_is_refused() -> None:
    """It would wait for itself."""

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
    plugin = await database.use_plugin(Sweeper(start=give_up, cease=restart, stop=restart))
    async with asyncio.timeout(30), database:
        await plugin.worked.wait()
    assert plugin.calls == WHOLE


async def test_whoever_loses_patience_with_a_stop_leaves_nothing_running() -> None:
    """Work that does not let go is left alone; the session ends, and the other leads."""
    stuck, freed = asyncio.Event(), asyncio.Event()

    async def cling(_: Sweeper) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stuck.set()
            await freed.wait()
            raise

    async with asyncio.timeout(30), Database("memory://patience") as other:
        database = await Database("memory://patience").connect()
        plugin = await database.use_plugin(Sweeper(work=cling))
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


async def test_a_plugin_that_comes_while_all_ends_waits_for_the_next_connect() -> None:
    """It is never left running in a database that is not connected."""
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
    """The session goes to the store that was connected, wherever the process is by then."""
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
    """Nobody goes on believing that he takes part."""
    failed = asyncio.Event()
    told: list[Event] = []

    def hear(event: Event) -> None:
        told.append(event)
        failed.set()

    database = await Database("memory://").connect()
    database.on("db:failed", hear)
    plugin = await database.use_plugin(Sweeper())
    await plugin.worked.wait()
    monkeypatch.setattr("jobsync.coordination.member_loop.MemberLoop._check", _divide_by_zero)
    async with asyncio.timeout(30):
        await failed.wait()
    assert told[0]["error"] == "ZeroDivisionError: a bug"
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await database.list_resources()
    with pytest.raises(ExceptionGroup):
        await database.disconnect()
    assert not database.is_connected


async def _divide_by_zero(_: object) -> None:
    raise ZeroDivisionError("a bug")
