"""Runs by hand of dead processes, which whoever fires the job looks for."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, JobDefinition, JobState
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.loop import FiringLoop
from jobsync.stores.memory import MemoryStore

NOW = 1_800_000_060.0
DAILY = JobDefinition(schedule="@daily")
DEAD, LIVING = "dead.1", "living.1"
RUN = ActiveRun(id="run", instant=1, owner=DEAD, started_at=1.0, is_manual=True)


class Stage:
    """A process that fires some of the jobs, and knows which sessions have ended."""

    def __init__(self) -> None:
        components = msgspec.structs.replace(Components.system(), clock=FakeClock())
        self.store = MemoryStore(components=components)
        self.jobs = JobStore(lambda: self.store, "default", components)
        self.cache = JobCache(self.jobs, lambda *_: None)
        names = ("job", "other")
        self.known: dict[str, Any] = {
            name: SimpleNamespace(name=name, options=SimpleNamespace(definition=DAILY))
            for name in names
        }
        membership = SimpleNamespace(
            incarnation="me.1", worker_id="me", timing=SimpleNamespace(heartbeat=5.0, timeout=15.0)
        )
        clock = SimpleNamespace(now=lambda: NOW, veto="", is_off=False, refresh=self._refresh)
        owners = SimpleNamespace(watch=lambda *_: None, find_ended=self._find_ended)
        runs = SimpleNamespace(names=[], room=5)
        hooks = (lambda _: None, self._refresh)
        parts: Any = (self.cache, runs, self.known, membership, clock, components, owners, *hooks)
        self.loop = FiringLoop(*cast("Any", parts))

    async def _refresh(self, *_: Any) -> None:
        return

    async def _find_ended(self, sessions: list[str]) -> set[str]:
        return {DEAD} & {*sessions}

    async def define(self, name: str, **fields: Any) -> None:
        """Store a job."""
        state = JobState(definition=DAILY, defined_by="", last=int(NOW))
        await self.jobs.create_many({name: msgspec.structs.replace(state, **fields)})

    async def fire(self, *names: str) -> None:
        """Put jobs on duty, in place of those that were."""
        self.loop.assign(names, None, "code")
        await self.loop._take_over()
        assert self.loop.duty == {*names}

    async def look(self) -> bool:
        """Look for runs by hand; return whether the job is to be written again."""
        await self.loop._duty.read_edited()
        await self.loop._look_for_runs_by_hand()
        return self.cache.is_unsure("job")

    async def list_announced(self) -> dict[str, tuple[str, ...]]:
        """Return the announcements that are stored."""
        edits = await self.jobs.edits.read()
        assert edits is not None
        return dict(edits.by_hand)


async def test_a_run_by_hand_is_looked_for_by_whoever_fires_its_job_now() -> None:
    """Another process has fired the job before, and may have ended since."""
    stage = Stage()
    for name in ("job", "other"):
        await stage.define(name)
    for session in (DEAD, LIVING):
        await stage.jobs.edits.announce_run(session, "job", ())
    await stage.fire("other")
    for _ in range(2):
        assert not await stage.look()
    await stage.fire("job", "other")
    assert await stage.look()
    assert await stage.list_announced() == {DEAD: ("job",), LIVING: ("job",)}


async def test_a_run_by_hand_is_looked_for_once_in_each_term() -> None:
    """A write of its process may still be under way; the announcement stays until it is refused."""
    stage = Stage()
    await stage.define("job")
    for session in (DEAD, LIVING):
        await stage.jobs.edits.announce_run(session, "job", ())
    for _ in range(2):
        await stage.fire("job")
        for _ in range(2):
            assert await stage.look()
        assert await stage.list_announced() == {DEAD: ("job",), LIVING: ("job",)}
        await stage.cache.update("job", lambda _: None)
        assert not stage.cache.is_unsure("job")
    assert not await stage.look()
    assert await stage.list_announced() == {LIVING: ("job",)}


@pytest.mark.parametrize(
    ("fields", "is_forgotten"),
    [
        (None, True),
        ({}, False),
        ({"running": (RUN,)}, False),
        ({"is_removed": True}, True),
        # It has to be given up first.
        ({"is_removed": True, "running": (RUN,)}, False),
    ],
)
async def test_the_announcement_for_a_job_that_nobody_fires_is_forgotten(
    fields: dict[str, Any] | None, is_forgotten: bool
) -> None:
    """The job is gone, or was removed and nothing of it runs."""
    stage = Stage()
    await stage.define("other")
    if fields is not None:
        await stage.define("job", **fields)
    await stage.jobs.edits.announce_run(DEAD, "job", ())
    await stage.fire("other")
    for _ in range(2):
        await stage.look()
        assert (await stage.list_announced() == {}) is is_forgotten
