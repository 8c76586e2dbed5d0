"""Runs by hand that wait in line, over a store in memory that does not always answer."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock
from waiting import until

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, JobDefinition, JobState
from jobsync.errors import NotFound, Unavailable
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.manual_runs import ManualRuns
from jobsync.stores.contract import Change, Outcome, Record, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

RUNNING = ActiveRun(id="scheduled", instant=60, owner="other.1", started_at=60.0)


class FaultyStore(StoreDecorator):
    """Answers its next requests as it is told; later ones as usual."""

    faults: list[str]
    """Each is "refused", "lost before" or "lost after": whether the write was applied."""
    meanwhile: Callable[[], object] | None = None
    """Called once, while something is read."""
    place = "/job/"
    """What is read then."""
    gate: asyncio.Event | None = None
    """Holds up that read."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.faults = []

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "refused":
            raise Unavailable("the store", "it does not answer", "wait")
        if fault == "lost before":
            return [Unknown("no answer") for _ in changes]
        outcomes = await super().write(changes)
        return [Unknown("no answer") for _ in changes] if fault else outcomes

    async def get_many(self, keys: Sequence[str], **options: Any) -> list[Record | None]:
        if self.faults and self.faults[0] == "unread":
            del self.faults[0]
            raise Unavailable("the store", "it does not answer", "wait")
        if self.meanwhile is not None and self.place in keys[0]:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
            if self.gate is not None:
                await self.gate.wait()
        return await super().get_many(keys, **options)


class Stage:
    """A process that runs a job by hand, while a run of another process goes on."""

    def __init__(self) -> None:
        components = msgspec.structs.replace(Components.system(), clock=FakeClock())
        self.store = FaultyStore()
        self.jobs = JobStore(lambda: self.store, "default", components)
        self.cache = JobCache(self.jobs, lambda *_: None)
        self.membership = SimpleNamespace(
            incarnation="me.1",
            is_trusted=True,
            has_ended=False,
            timing=SimpleNamespace(heartbeat=5.0),
            change=self._change,
        )
        self.started: list[ActiveRun] = []
        runs = SimpleNamespace(waiting=set(), names=[], start=self._start)
        clock = SimpleNamespace(estimate=lambda: 1000.0)
        owners, loop = SimpleNamespace(), SimpleNamespace(look_at=lambda _: None)
        known = {"job": SimpleNamespace(name="job"), "other": SimpleNamespace(name="other")}
        parts: Any = (self.cache, runs, known, loop, owners, self.membership, clock, components)
        self.manual_runs = ManualRuns(*cast("Any", parts))

    async def _change(self, _: float) -> None:
        """Answer the next heartbeat."""
        await asyncio.sleep(0)
        self.membership.is_trusted = True

    def _start(self, _: Any, __: Any, run: ActiveRun, ___: Any) -> "asyncio.Task[None]":
        self.started.append(run)
        return asyncio.create_task(asyncio.sleep(0))

    async def define(self, *running: ActiveRun) -> None:
        """Store the jobs."""
        definition = JobDefinition(schedule="@yearly", overlap="queue")
        state = JobState(definition=definition, defined_by="", last=0, running=running)
        await self.jobs.create_many({"job": state, "other": state})

    async def read(self) -> JobState:
        """Return the state that is stored."""
        stored = await self.jobs.read("job")
        assert stored is not None
        return stored.state


FAULTS = ["refused", "lost before", "lost after", "unread"]


@pytest.mark.parametrize("first", [*FAULTS, ""])
@pytest.mark.parametrize("second", FAULTS)
async def test_a_run_whose_caller_waits_no_longer_leaves_the_line(first: str, second: str) -> None:
    """Whatever the store answers meanwhile: otherwise it holds up those behind it."""
    stage = Stage()
    await stage.define(RUNNING)
    task = asyncio.create_task(stage.manual_runs.run("job", None))

    async def is_in_line() -> bool:
        return bool((await stage.read()).requests)

    await until(is_in_line, "it is in line", interval=0)
    stage.store.faults = [fault for fault in (first, second) if fault]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stage.manual_runs.stop(60)
    assert stage.store.faults == []
    state = await stage.read()
    assert (state.requests, state.running, stage.started) == ((), (RUNNING,), [])


@pytest.mark.parametrize("place", ["/edits/", "/job/"])
async def test_a_run_whose_caller_is_cancelled_while_it_is_recorded_leaves_the_line(
    place: str,
) -> None:
    """It is in line only after that: what is under way is waited for."""
    stage = Stage()
    await stage.define(RUNNING)
    task = asyncio.create_task(stage.manual_runs.run("job", None))
    stage.store.place, stage.store.meanwhile = place, task.cancel
    stage.store.gate = asyncio.Event()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(20):
        await asyncio.sleep(0)
    stage.store.gate.set()
    await stage.manual_runs.stop(60)
    state = await stage.read()
    assert (state.requests, state.running, stage.started) == ((), (RUNNING,), [])


async def test_a_run_is_announced_in_each_session_and_for_each_job() -> None:
    """Once: whoever fires the job looks for it if the session ends."""
    stage = Stage()
    await stage.define()
    announced: dict[str, tuple[str, ...]] = {}
    for session, name in [
        *[("me.1", "job"), ("me.1", "job"), ("me.1", "other")],
        *[("me.2", "job"), ("me.2", "other"), ("me.3", "other"), ("me.3", "other")],
    ]:
        stage.membership.incarnation = session
        await stage.manual_runs._announce(name, session)
        before = announced.get(session, ())
        announced[session] = before if name in before else (*before, name)
        edits = await stage.jobs.edits.read()
        assert edits is not None
        assert edits.by_hand == announced


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("lost", ["trust", "session", "both", "all"])
async def test_a_run_is_recorded_by_a_session_that_others_believe_alive(
    lost: str, is_busy: bool
) -> None:
    """Whatever of that is lost while the job is read: nobody would look for its run.

    It is recorded once the process is sure again, in the session that it has then.
    """
    stage = Stage()
    await stage.define(*[RUNNING] * is_busy)
    written: list[str] = []

    def lose() -> None:
        if lost in ("trust", "both"):
            stage.membership.is_trusted = False
        if lost in ("session", "both"):
            stage.membership.incarnation = "me.2"
        stage.membership.has_ended = lost == "all"

    stage.store.meanwhile = lose
    task = asyncio.create_task(stage.manual_runs.run("job", None))
    if lost == "all":
        with pytest.raises(Unavailable, match="it has stopped"):
            await task
        await stage.manual_runs.stop(60)
        assert ((await stage.read()).requests, stage.started) == ((), [])
        return
    owner = "me.1" if lost == "trust" else "me.2"

    async def find_owners() -> list[str]:
        state = await stage.read()
        own = [run.owner for run in state.running if run.is_manual]
        return own + [request.owner for request in state.requests]

    async def is_recorded() -> bool:
        written.extend(await find_owners())
        return bool(written)

    # Not by reading the job, which is what it waits for.
    await until(lambda: stage.store.meanwhile is None, "the job is read", interval=0)
    await until(is_recorded, "it is recorded", interval=0)
    assert {*written} == {owner}
    assert stage.membership.is_trusted
    assert [run.owner for run in stage.started] == ([] if is_busy else [owner])
    task.cancel()
    await asyncio.wait([task])
    await stage.manual_runs.stop(60)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("othr", "There is no job in this process 'othr'. Did you mean other? Known: job, other."),
        ("x", "There is no job in this process 'x'. Known: job, other."),
        ("other", "There is no job 'other'. Known: job."),
    ],
)
async def test_an_unknown_job_is_refused_with_the_closest_name(name: str, answer: str) -> None:
    """And with those that are known; one that was removed is not among them."""
    with pytest.raises(NotFound) as refused:
        await Stage().manual_runs.run(name, None)
    assert str(refused.value) == answer
