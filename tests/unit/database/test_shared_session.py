"""The session that a database's plugins share: what becomes of it when its opening fails."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from waiting import until

from jobsync import Components, CoordinatorSettings, Invalid, Membership, Unavailable
from jobsync.coordination.session import SESSIONS
from jobsync.database.shared_session import SharedSession
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

SETTINGS = CoordinatorSettings(heartbeat_interval=0.1, worker_timeout=0.7)


class HeldStore(StoreDecorator):
    """Answers writes only when it is told to."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes = await super().write(changes)
        self.is_asked.set()
        await self.may_answer.wait()
        return outcomes


async def never() -> None:
    """Clean nothing."""


def build(store: HeldStore, run: Callable[..., object]) -> SharedSession:
    """Return a shared session of an open store."""
    return SharedSession(store, None, Components.system(), run, never)


async def check_all_dead(store: HeldStore) -> None:
    """Check that one session was recorded, and that it has ended by itself."""
    (record,) = await store.scan(SESSIONS)
    assert (record.value["state"], record.value["left"]) == ("dead", True)


async def test_a_session_that_is_opened_during_a_disconnect_ends_at_once() -> None:
    """Nobody would end it later; whoever wanted it learns that the database is disconnected."""
    store, works = HeldStore(), list[str]()
    session = build(store, lambda _, name: works.append(name))
    joining = asyncio.ensure_future(session.join(SETTINGS))
    await store.is_asked.wait()
    await session.end()
    store.may_answer.set()
    with pytest.raises(Invalid, match="is not connected"):
        await joining
    await check_all_dead(store)
    assert not works
    with pytest.raises(Invalid, match="is not connected"):
        await session.join(SETTINGS)


@pytest.mark.parametrize("error", [Unavailable("store", "away"), RuntimeError("has failed")])
async def test_a_session_that_cannot_be_watched_ends_at_once(error: Exception) -> None:
    """If the database fails meanwhile; a later user gets another session."""
    store, works = HeldStore(), list[str]()
    store.may_answer.set()
    failures = [error]

    def run(_: Any, name: str) -> None:
        if failures:
            raise failures.pop()
        works.append(name)

    session = build(store, run)
    with pytest.raises(type(error)):
        await session.join(SETTINGS)
    await check_all_dead(store)
    membership = await session.join(SETTINGS)
    assert works == ["session", "cleanup"]
    await session.leave()
    assert membership.has_ended


async def test_the_end_of_what_watches_a_session_ends_it() -> None:
    """A database that fails cancels its work: others take over at once, not after a timeout."""
    store, tasks = HeldStore(), list[asyncio.Task[None]]()
    store.may_answer.set()

    def run(work: Any, name: str) -> None:
        if name == "session":
            tasks.append(asyncio.ensure_future(work()))

    session = build(store, run)
    membership: Membership = await session.join(SETTINGS)
    (task,) = tasks
    await asyncio.sleep(0)
    task.cancel()
    await until(lambda: membership.has_ended, "the session has ended")
    await check_all_dead(store)
