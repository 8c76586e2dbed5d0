"""Locks: held by one at a time, and never stuck, whatever happens to their holder."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, TypeVar

import pytest
from waiting import until

from jobsync import (
    Components,
    Conflict,
    CoordinatorPlugin,
    Corrupt,
    Database,
    Event,
    Invalid,
    Misconfigured,
    PluginStorage,
    Unavailable,
)
from jobsync.coordination.membership import Membership
from jobsync.database.locks import hold_lock
from jobsync.stores.contract import Change, Outcome, Put, Record, Unknown
from jobsync.stores.memory import MemoryStore

T = TypeVar("T")
Moment: TypeAlias = Literal["unsent", "unanswered", "late"]


class InterruptedStore(MemoryStore):
    """Blocks one request for a lock: before it is sent, before its reply, or applies it late."""

    def __init__(self, moment: Moment) -> None:
        super().__init__()
        self.left = 0
        """Number of requests up to that one."""
        self.rivals = 0
        """Number of writes before each of which somebody else takes the lock and frees it."""
        self.waits = asyncio.Event()
        self.late: asyncio.Task[Any] | None = None
        self._moment = moment

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        ask = super().get_many
        return await self._send(keys[0], lambda: ask(keys, tombstones=tombstones))

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        ask, key = super().write, changes[0].key
        if self.rivals and key.startswith("lock/"):
            self.rivals -= 1
            (found,) = await super().get_many([key], tombstones=True)
            await ask([Put(key, {"owner": None, "mark": ""}, found)])
        return await self._send(key, lambda: ask(changes))

    async def _send(self, key: str, ask: Callable[[], Awaitable[T]]) -> T:
        if key.startswith("lock/"):
            self.left -= 1
            if self.left == 0:
                await self._hang(ask)
        return await ask()

    async def _hang(self, ask: Callable[[], Awaitable[Any]]) -> None:
        if self._moment == "unanswered":
            await ask()
        self.waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            if self._moment == "late":
                self.late = asyncio.ensure_future(_send_late(ask))


async def _send_late(ask: Callable[[], Awaitable[Any]]) -> None:
    await asyncio.sleep(0.01)
    await ask()


@pytest.mark.parametrize("moment", ["unsent", "unanswered", "late"])
@pytest.mark.parametrize(
    ("rivals", "number"), [(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (1, 5), (2, 6)]
)
async def test_a_cancelled_caller_leaves_no_lock_stuck(
    rivals: int, number: int, moment: Moment
) -> None:
    """Whichever request was cancelled, even if that request is applied later.

    Also after attempts at which others were faster.
    """
    store = InterruptedStore(moment)

    async def hold() -> None:
        async with storage.lock("door"):
            pass

    async with Database(connection=store) as db:
        storage = db.open_storage("test")
        # Keeps the session alive, so that its end does not free the lock.
        async with storage.lock("other"):
            store.left, store.rivals = number, rivals
            holding = asyncio.ensure_future(hold())
            await store.waits.wait()
            holding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holding
            if store.late is not None:
                # Before anybody else takes the lock, which would keep it from being applied.
                await store.late
            await _lock_twice(storage)


async def _lock_twice(storage: PluginStorage) -> None:
    for _ in range(2):
        async with asyncio.timeout(10), storage.lock("door") as lock:
            assert lock.lasts


class FailingStore(MemoryStore):
    """Is unavailable for writes of locks while `is_away`."""

    is_away = False

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.is_away and changes[0].key.startswith("lock/"):
            raise Unavailable(self.name, "away")
        return await super().write(changes)


async def test_a_lock_that_cannot_be_released_is_released_later() -> None:
    """The block raises nothing, because its work is done; the next holder waits for the store."""
    store = FailingStore()
    async with Database(connection=store) as db:
        storage = db.open_storage("test")
        emitted: list[Event] = []
        db.on("db:work-postponed", emitted.append)
        async with storage.lock("other"):
            async with storage.lock("door"):
                store.is_away = True
            with pytest.raises(Unavailable):
                async with asyncio.timeout(10), storage.lock("free"):
                    pass
            store.is_away = False
            await _lock_twice(storage)
        assert emitted == [] or emitted[0]["work"].startswith("release lock/test/default/")


class DenyingStore(MemoryStore):
    """Does not say how some writes of locks ended, or denies them."""

    def __init__(self, answer: Literal["unknown", "denied"]) -> None:
        super().__init__()
        self.left = 0
        """How many writes it treats so."""
        self._answer = answer

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.left == 0 or not changes[0].key.startswith("lock/"):
            return await super().write(changes)
        self.left -= 1
        if self._answer == "denied":
            raise Misconfigured("url", self.name, "does not allow this", "allow it")
        return [Unknown("no reply arrived")]


@pytest.mark.parametrize(("answer", "times"), [("unknown", 3), ("denied", 1)])
async def test_a_lock_whose_release_is_in_doubt_is_released_later(
    answer: Literal["unknown", "denied"], times: int
) -> None:
    """Its session lives on, so nothing else frees it; the database does not fail because of it."""
    store = DenyingStore(answer)
    async with Database(connection=store) as db:
        storage = db.open_storage("test")
        async with storage.lock("other"):
            async with storage.lock("door"):
                store.left = times
            await _lock_twice(storage)
            assert store.left == 0


async def test_a_lock_ends_with_its_database() -> None:
    """Disconnecting ends the session of a held lock; the end of the block raises nothing then."""
    async with Database("memory://ends") as other:
        db = await Database("memory://ends").connect()
        async with db.open_storage("test").lock("door") as lock:
            await db.disconnect()
            assert not lock.lasts
            assert await other.store.scan("session/", where={"state": "live"}) == []
        async with asyncio.timeout(30), other.open_storage("test").lock("door"):
            pass


async def end_session(store: MemoryStore, incarnation: str) -> None:
    """Write the death of a session, between two heartbeats of it."""
    while True:
        record = await store.get(f"session/{incarnation}")
        assert record is not None
        with suppress(Conflict):
            await store.put(record, {**record.value, "state": "dead"})
            return


async def test_a_lock_does_not_outlast_the_session_that_took_it() -> None:
    """The process has another session by now, which trusts itself, and does not hold the lock."""
    store = MemoryStore()
    async with Database(connection=store) as db:
        plugin = await db.use_plugin(QuickPlugin(heartbeat_interval=0.05, worker_timeout=60))
        membership = plugin._get_membership()
        async with db.open_storage("test").lock("door") as lock:
            assert lock.lasts
            for _ in range(2):
                before = membership.incarnation
                await end_session(store, before)
                await until(
                    lambda before=before: membership.incarnation != before,  # type: ignore[misc]
                    "it has another session",
                )
                assert membership.is_trusted
                assert not lock.lasts


@pytest.mark.parametrize("losses", [0, 1, 3])
async def test_a_lock_is_taken_by_the_session_that_the_process_has(losses: int) -> None:
    """Also if sessions are lost while it is taken: that of a dead one would hold nothing."""
    membership = SimpleNamespace(incarnation="me.0", is_trusted=True, watch=lambda *_: None)
    membership.is_dead = lambda owner: owner != membership.incarnation

    class LosingStore(MemoryStore):
        """Loses the session of the process right after a lock is written."""

        left = losses

        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            outcomes = await super().write(changes)
            if self.left:
                self.left -= 1
                membership.incarnation = f"me.{losses - self.left}"
            return outcomes

    store = LosingStore()
    parts: Any = (membership, store, Components.system(), "lock/test/default/door", 5.0, None)
    async with asyncio.timeout(10), hold_lock(*parts) as lock:
        (held,) = await store.scan("lock/test/default/")
        assert held.value["owner"] == membership.incarnation == f"me.{losses}"
        assert lock.lasts
        assert lock.fence == held.seq == losses + 1
    (free,) = await store.scan("lock/test/default/")
    assert free.value["owner"] is None


async def test_a_lock_accepts_the_timing_of_the_session() -> None:
    """Whatever the environment says; an invalid timeout is refused."""
    async with Database("memory://") as db:
        await db.use_plugin(QuickPlugin(heartbeat_interval=0.2, worker_timeout=1))
        storage = db.open_storage("test")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JOBSYNC_HEARTBEAT_INTERVAL", "7")
            async with storage.lock("door"):
                pass
        for timeout in ("1", float("nan")):
            with pytest.raises(Invalid, match=r"timeout .*got "):
                async with storage.lock("door", timeout=timeout):  # type: ignore[arg-type]
                    pass


class QuickPlugin(CoordinatorPlugin):
    """Has a session."""


async def test_a_lock_is_held_by_one_at_a_time() -> None:
    """Among several processes and several tasks of one process."""
    inside = 0
    largest = 0
    fences: list[int] = []

    async def work(db: Database) -> None:
        nonlocal inside, largest
        async with db.open_storage("test").lock("door") as lock:
            inside += 1
            largest = max(largest, inside)
            fences.append(lock.fence)
            assert lock.lasts
            await asyncio.sleep(0.01)
            inside -= 1

    async with Database("memory://door") as one, Database("memory://door") as two:
        await asyncio.gather(*(work(db) for db in (one, two) for _ in range(4)))
        async with one.open_storage("test").lock("door"):
            with pytest.raises(TimeoutError, match="is held by worker-"):
                async with two.open_storage("test").lock("door", timeout=0.05):
                    pass
            async with two.open_storage("test", "other").lock("door"):
                pass
    assert largest == 1
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("end", ["return", "error", "timeout", "cancellation", "wrong timeout"])
async def test_the_session_ends_with_the_last_lock_however_it_ends(end: str) -> None:
    """Also if the lock was never taken; then the next one opens another session."""
    name = f"memory://ends-{end.replace(' ', '-')}"
    async with Database(name) as other, Database(name) as db:
        storage = db.open_storage("test")

        async def use() -> None:
            timeout: Any = {"timeout": 0, "wrong timeout": "1"}.get(end)
            async with storage.lock("door", timeout=timeout):
                if end == "error":
                    raise KeyError(end)
                if end == "cancellation":
                    raise asyncio.CancelledError

        async with other.open_storage("test").lock("door" if end == "timeout" else "window"):
            for _ in range(2):
                with suppress(KeyError, TimeoutError, asyncio.CancelledError, Invalid):
                    await use()
                    assert end == "return"
                assert (db.shared_session._count, db.shared_session._membership) == (0, None)


async def test_each_waiting_caller_watches_the_holder_until_it_ends() -> None:
    """Also after another one has given up: the silence of a dead holder would count anew."""
    key = "lock/test/default/door"
    async with await Membership.join("memory://", worker_timeout=900) as membership:
        await membership.store.write([Put(key, {"owner": "other.0", "mark": "its own"})])

        async def wait(timeout: float | None = None) -> None:
            parts: Any = (membership, membership.store, Components.system(), key, timeout, None)
            async with hold_lock(*parts):
                pass

        waiting = [asyncio.ensure_future(wait()) for _ in range(2)]
        await until(lambda: len(membership._watched) == 2, "both watch the holder")
        with pytest.raises(TimeoutError, match=r"is held by other\.0"):
            await wait(0.0)
        assert membership._member.watched == {"other.0"}
        for number, each in enumerate(waiting):
            each.cancel()
            with pytest.raises(asyncio.CancelledError):
                await each
            assert membership._member.watched == {"other.0" for _ in waiting[number + 1 :]}
        assert membership._watched == {}


DAMAGED: dict[str, Any] = {
    "empty": {},
    "list": [],
    "none": None,
    "number": 5,
    "text": "x",
    "no mark": {"owner": None},
    "no owner": {"mark": ""},
    "mark of another type": {"owner": None, "mark": None},
    "owner of another type": {"owner": 5, "mark": ""},
    "owner without a name": {"owner": "", "mark": ""},
    "owner that is no session": {"owner": "a//b", "mark": ""},
    "owner with too long a name": {"owner": "x" * 3000, "mark": ""},
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
async def test_a_lock_with_a_damaged_record_is_refused(damaged: Any) -> None:
    """The error names the record, which is left as it is; once repaired, the lock is held again."""
    key = "lock/test/default/door"
    async with Database(connection=MemoryStore()) as db:
        storage = db.open_storage("test")

        async def overwrite(value: Any) -> None:
            (found,) = await db.store.get_many([key], tombstones=True)
            await db.store.write([Put(key, value, found)])

        async def expect_refusal() -> None:
            with pytest.raises(Corrupt) as caught:
                async with storage.lock("door", timeout=0):
                    pass
            assert caught.value.key == key
            found = await db.store.get(key)
            assert found is not None
            assert found.value == damaged

        await overwrite(damaged)
        await expect_refusal()
        await overwrite({"owner": None, "mark": ""})
        # And if it is damaged while it is held: another holder may have been in its place.
        with pytest.raises(Corrupt, match=key):
            async with storage.lock("door", timeout=0):
                await overwrite(damaged)
        await expect_refusal()
        await overwrite({"owner": None, "mark": ""})
        async with storage.lock("door", timeout=0) as lock:
            assert lock.lasts


_CRASH = """
import asyncio, os, signal, sys
from jobsync import Database

async def main():
    db = await Database(sys.argv[1]).connect()
    async with db.open_storage("test").lock("door"):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_crash_leaves_no_lock_stuck(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Once the session of the killed process is dead, the next caller gets the lock."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path / 'locks.db'}"
    else:
        url = f"{request.getfixturevalue('postgres').url}?schema=locks"
    monkeypatch.setenv("JOBSYNC_HEARTBEAT_INTERVAL", "0.3")
    monkeypatch.setenv("JOBSYNC_WORKER_TIMEOUT", "1")
    crashing = await asyncio.create_subprocess_exec(sys.executable, "-c", _CRASH, url)
    assert await crashing.wait() == -signal.SIGKILL
    async with Database(url) as db:
        store = db.store
        (held,) = await store.scan("lock/test/default/")
        async with asyncio.timeout(30), db.open_storage("test").lock("door") as lock:
            assert lock.fence > held.seq
            dead = await store.get(f"session/{held.value['owner']}")
            assert dead is not None
            assert dead.value["state"] == "dead"


async def test_no_session_is_opened_during_a_disconnect() -> None:
    """Work that is cancelled by a disconnect cannot take a lock, and leaves no session."""
    refused: list[Exception] = []
    store = MemoryStore()
    started = asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            with pytest.raises(Invalid, match="is not connected") as caught:
                async with db.open_storage("test").lock("door"):
                    pass
            refused.append(caught.value)

    async with Database(connection=store) as db:
        db.run_in_background(work, "work")
        await started.wait()
    assert len(refused) == 1
    assert await store.scan("session/") == []
