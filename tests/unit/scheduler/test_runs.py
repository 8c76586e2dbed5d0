"""Runs of one process, from a state that says "running" to a result in the history."""

import asyncio
import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock, SeededRandomness
from waiting import until

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, JobDefinition, JobState, RunStatus
from jobsync.errors import Unavailable
from jobsync.events import Events
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.executor import ActionExecutor
from jobsync.scheduler.history import HistoryEntry, build_entry
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.runs import KnownJob, Runs
from jobsync.scheduler.settings import JobOptions
from jobsync.stores.contract import Applied, Change, Outcome, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.user_code import UserThreads

DEFINITION = JobDefinition(schedule="@yearly", overlap="allow")
RUN = ActiveRun(id="run", instant=60, owner="me.1", started_at=60.0)


class FaultyStore(StoreDecorator):
    """Treats its next writes as it is told, and the later ones as usual."""

    faults: Sequence[str] = ()
    late: Sequence[Sequence[Change]] = ()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        fault, *self.faults = self.faults or [""]
        if fault == "refused":
            raise Unavailable("the store", "it does not answer", "wait")
        if fault == "late":
            # It arrives when everything is over.
            self.late = [*self.late, changes]
            return [Unknown("no answer") for _ in changes]
        outcomes = await super().write(changes)
        return [Unknown("no answer") for _ in changes] if fault == "lost" else outcomes

    async def arrive(self) -> None:
        """Deliver what is late; all of it has to be refused."""
        for changes in self.late:
            outcomes = await self.inner.write(changes)
            assert not any(isinstance(outcome, Applied) for outcome in outcomes)


class Stage:
    """A process with a job, of which some runs are recorded as its own."""

    def __init__(self, limit: int = 5) -> None:
        components = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())
        self.store = FaultyStore(MemoryStore(components=components))
        self.jobs = JobStore(lambda: self.store, "default", components)
        self.cache = JobCache(self.jobs, lambda *_: None)
        self.membership = SimpleNamespace(
            incarnation="me.1",
            worker_id="me",
            is_trusted=True,
            has_ended=False,
            timing=SimpleNamespace(heartbeat=5.0),
        )
        self.told: list[tuple[str, str]] = []
        self.acted: list[str] = []
        self.go_on: asyncio.Event | None = None
        self.is_stubborn = False
        """Whether actions go on although they are cancelled."""
        listener = SimpleNamespace(
            on_start=lambda run, _: self.told.append(("start", run.id)),
            on_end=lambda run, *_: self.told.append(("end", run.id)),
            on_lost=lambda _, run, reason: self.told.append((reason, run.id)),
            on_attempt=lambda _: None,
            on_overrun=lambda *_: None,
            on_bug=lambda error: self.told.append(("bug", repr(error))),
        )
        self.seconds, self.compared = 100.0, 0
        self.clock = SimpleNamespace(
            now=lambda: self.seconds,
            estimate=lambda: self.seconds,
            latest=100.0,
            refresh=self._compare_clocks,
        )
        executor = ActionExecutor(self._act, components=components, threads=UserThreads())
        options = JobOptions(definition=DEFINITION, action=self._act)
        self.job = KnownJob("job", options, executor)
        build = self._build
        clock = self.clock
        parts: Any = (self.cache, self.membership, clock, components, listener, build, limit, {})
        self.runs = Runs(*cast("Any", parts))

    async def _compare_clocks(self) -> None:
        self.compared += 1
        self.seconds = self.clock.latest

    async def _act(self, _: Any, context: JobContext) -> str:
        self.acted.append(context.execution_id)
        while self.go_on is not None and not self.go_on.is_set():
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                if not self.is_stubborn:
                    raise
        return f"result of {context.execution_id}"

    def _build(self, _: Any, __: Any, run: ActiveRun, data: Any) -> JobContext:
        at = datetime.fromtimestamp(run.instant, UTC)
        return JobContext(job_name="job", execution_id=run.id, scheduled_at=at, data=data)

    async def start(
        self, *runs: ActiveRun, definition: JobDefinition = DEFINITION
    ) -> "list[asyncio.Task[Any]]":
        """Record runs as running, and start them."""
        state = JobState(definition=definition, defined_by="", last=100, running=runs)
        await self.jobs.create_many({"job": state})
        stored = await self.cache.read("job")
        assert stored is not None
        return [self.runs.start(self.job, stored, run) for run in runs]

    async def read(self) -> JobState:
        """Return the stored state."""
        stored = await self.jobs.read("job")
        assert stored is not None
        return stored.state

    async def read_entries(self) -> list[HistoryEntry]:
        """Return the history."""
        return await self.jobs.history.list_entries("job")


@pytest.mark.parametrize(
    "faults", list(itertools.product(["", "refused", "lost", "late"], repeat=3)), ids="-".join
)
async def test_a_run_has_one_result_whatever_becomes_of_its_requests(
    faults: tuple[str, ...],
) -> None:
    """Its record, its result and its end in the state are each written until that is known."""
    stage = Stage()
    (task,) = await stage.start(RUN)
    stage.store.faults = faults
    outcome = await task
    assert (outcome.status, outcome.result) == ("success", "result of run")
    assert stage.told == [("start", "run"), ("end", "run")]
    assert stage.acted == ["run"]
    for _ in range(2):
        state = await stage.read()
        assert (state.running, state.statistics.runs, state.statistics.successes) == ((), 1, 1)
        (entry,) = await stage.read_entries()
        assert (entry.id, entry.status, entry.result) == ("run", "success", "result of run")
        assert (entry.owner, entry.worker_id, entry.ended_at) == ("me.1", "me", 100.0)
        stage.store.faults = ()
        await stage.store.arrive()


@pytest.mark.parametrize(
    ("found", "resumed", "acts", "told", "is_counted"),
    [
        # Its process had begun, and died.
        (("run", "running", 0), 1, True, "end", True),
        (("run", "running", 1), 1, True, "end", True),
        # Another process has resumed it since.
        (("run", "running", 2), 1, False, "another process has taken it over", False),
        # Its process had stored the result, and died before it could say so.
        (("run", "success", 0), 1, False, "", True),
        (("run", "error", 0), 1, False, "", True),
        (("run", "lost", 0), 1, False, "", True),
        (("another", "success", 0), 0, False, "its instant was fired before", False),
        (("another", "running", 0), 0, False, "its instant was fired before", False),
    ],
)
async def test_a_run_begins_by_what_its_record_says(
    found: tuple[str, RunStatus, int], resumed: int, acts: bool, told: str, is_counted: bool
) -> None:
    """Each instant is fired once; a result is kept, and only corrects the state."""
    stage = Stage()
    run_id, status, before = found
    earlier = msgspec.structs.replace(RUN, id=run_id, owner="dead.1", resumed=before)
    await stage.jobs.history.create_entry("job", earlier, build_entry(earlier, status))
    (task,) = await stage.start(msgspec.structs.replace(RUN, resumed=resumed))
    outcome = await task
    assert (outcome is not None) is acts
    assert bool(stage.acted) is acts
    assert stage.told == ([("start", "run")] if acts else []) + ([(told, "run")] if told else [])
    (entry,) = await stage.read_entries()
    assert (entry.id, entry.status) == (run_id, "success" if acts else status)
    state = await stage.read()
    is_taken = told.startswith("another process")
    assert bool(state.running) is is_taken
    assert state.statistics.runs == int(is_counted)
    if is_counted:
        assert state.statistics.last_run is not None
        assert state.statistics.last_run.status == entry.status


async def test_runs_by_hand_are_beside_the_limit() -> None:
    """Only scheduled ones take room, until they have ended."""
    stage = Stage(limit=3)
    stage.go_on = asyncio.Event()
    scheduled = [msgspec.structs.replace(RUN, id=f"s{n}", instant=60 + n) for n in range(2)]
    manual = [msgspec.structs.replace(RUN, id=f"m{n}", is_manual=True) for n in range(4)]
    assert (stage.runs.room, len(stage.runs), stage.runs.names) == (3, 0, [])
    tasks = await stage.start(*scheduled, *manual)
    assert (stage.runs.room, len(stage.runs), stage.runs.names) == (1, 6, ["job"] * 6)
    assert all(stage.runs.has(run.id) for run in (*scheduled, *manual))
    stage.go_on.set()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert (stage.runs.room, len(stage.runs), stage.runs.names) == (3, 0, [])
    assert not any(stage.runs.has(run.id) for run in (*scheduled, *manual))
    assert (await stage.read()).running == ()
    assert len(await stage.read_entries()) == 6


@pytest.mark.parametrize("how", ["replaced", "ended"])
async def test_a_run_of_a_lost_session_has_no_result(how: str) -> None:
    """Whoever has it by now stores one; it is cancelled here."""
    stage = Stage()
    stage.go_on = asyncio.Event()
    (task,) = await stage.start(RUN)
    await until(lambda: stage.acted, "it acts", interval=0)
    stage.runs.cancel_lost()
    assert not task.cancelling()
    if how == "replaced":
        stage.membership.incarnation = "me.2"
    else:
        stage.membership.has_ended = True
    stage.runs.cancel_lost()
    await asyncio.wait([task])
    assert task.cancelled()
    assert stage.told == [("start", "run"), ("it was cancelled", "run")]
    assert (await stage.read()).running == (RUN,)
    (entry,) = await stage.read_entries()
    assert entry.status == "running"


@pytest.mark.parametrize(
    ("record", "in_state", "is_ours"),
    [
        # Nobody has changed anything, or the record alone was written again.
        ({}, {}, True),
        ({"attempts": 1}, {}, True),
        # Another process has the run, or the instant: any of the two tells.
        ({"owner": "other.1"}, {}, False),
        ({"id": "another"}, {}, False),
        ({"owner": "other.1", "resumed": 1}, {"owner": "other.1", "resumed": 1}, False),
        # Somebody has removed the record: the state tells.
        (None, {}, True),
        (None, {"owner": "other.1"}, False),
        (None, {"owner": ""}, False),
        (None, None, False),
    ],
)
async def test_a_result_is_stored_by_the_process_that_has_the_run(
    record: dict[str, Any] | None, in_state: dict[str, Any] | None, is_ours: bool
) -> None:
    """By its record; where that is gone, by the job's state. Otherwise it counts for nothing."""
    stage = Stage()
    stage.go_on = asyncio.Event()
    (task,) = await stage.start(RUN)
    await until(lambda: stage.acted, "it acts", interval=0)
    history = stage.jobs.history
    found = await history.read("job", RUN)
    assert found is not None
    changed = None if record is None else msgspec.structs.replace(found[1], **record)
    if changed is None:
        await stage.store.drop([found[0].key])
    elif changed != found[1]:
        await history.write(found[0], changed)
    running = () if in_state is None else (msgspec.structs.replace(RUN, **in_state),)
    await stage.jobs.change(
        "job", lambda state: state and msgspec.structs.replace(state, running=running)
    )
    stage.go_on.set()
    outcome = await task
    assert (outcome is not None) is is_ours
    end = "end" if is_ours else "another process has taken it over"
    assert stage.told == [("start", "run"), (end, "run")]
    entries = await stage.read_entries()
    if is_ours:
        assert [entry.status for entry in entries] == ["success"]
    else:
        assert [(entry.id, entry.owner, entry.status) for entry in entries] == (
            [] if changed is None else [(changed.id, changed.owner, "running")]
        )
    state = await stage.read()
    assert state.running == (() if is_ours else running)
    assert state.statistics.runs == int(is_ours)


@pytest.mark.parametrize(
    ("in_state", "is_released"),
    [
        ({}, True),
        ({"owner": "other.1", "resumed": 1}, False),
        ({"owner": "me.2"}, False),
        ({"id": "another"}, False),
    ],
)
async def test_a_run_is_released_by_the_session_that_has_it(
    in_state: dict[str, Any], is_released: bool
) -> None:
    """Found free, it is resumed at once: one that another session has would run twice."""
    stage = Stage()
    beside = msgspec.structs.replace(RUN, id="beside", instant=61)
    current = msgspec.structs.replace(RUN, **in_state)
    state = JobState(definition=DEFINITION, defined_by="", last=100, running=(beside, current))
    await stage.jobs.create_many({"job": state})
    await stage.runs.release(stage.job, RUN)
    owner = "" if is_released else current.owner
    after = msgspec.structs.replace(current, owner=owner)
    assert (await stage.read()).running == (beside, after)
    # Its session may go on, and tells nobody that the run is free.
    edits = await stage.jobs.edits.read()
    assert edits is not None
    assert (edits.list_since(0), edits.special) == (["job"], ())


@pytest.mark.parametrize("how", ["it acts", "it waits for its turn", "its action is left behind"])
async def test_a_run_is_of_this_process_until_nothing_of_it_is_left(how: str) -> None:
    """Taken for an orphan before, it would be resumed beside its own action."""
    stage = Stage()
    stage.go_on, stage.is_stubborn = asyncio.Event(), True
    assert not stage.runs.has(RUN.id)
    if how == "it waits for its turn":
        stage.runs.waiting.add(RUN.id)
    else:
        (task,) = await stage.start(RUN)
        await until(lambda: stage.acted, "it acts", interval=0)
        if how == "its action is left behind":
            stage.job.executor._grace = 0.0
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0)
            assert len(stage.runs) == 0
            assert (await stage.read()).running == (RUN,)
    assert stage.runs.has(RUN.id)
    assert not stage.runs.has("another")
    stage.runs.waiting.clear()
    stage.go_on.set()
    await until(lambda: not stage.runs.has(RUN.id), "it is over", interval=0)


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_run_that_is_resumed_in_the_next_session_is_known_until_it_ends(
    is_noticed: bool,
) -> None:
    """The end of the cancelled one is not that of the other: an orphan would run twice."""
    stage = Stage()
    stage.go_on = asyncio.Event()
    (first,) = await stage.start(RUN)
    await until(lambda: stage.acted, "it acts", interval=0)
    stage.membership.incarnation = "me.2"
    resumed = msgspec.structs.replace(RUN, owner="me.2", resumed=1)
    await stage.jobs.change(
        "job", lambda state: state and msgspec.structs.replace(state, running=(resumed,))
    )
    stored = await stage.cache.read("job")
    assert stored is not None
    if is_noticed:
        stage.runs.cancel_lost()
    second = stage.runs.start(stage.job, stored, resumed)
    await asyncio.wait([first])
    assert first.cancelled()
    await asyncio.sleep(0)
    assert (stage.runs.has(RUN.id), len(stage.runs), stage.runs.room) == (True, 1, 4)
    stage.runs.cancel_lost()
    stage.go_on.set()
    assert await second is not None
    await asyncio.sleep(0)
    assert (stage.runs.has(RUN.id), len(stage.runs)) == (False, 0)


async def test_a_run_that_is_resumed_in_the_next_session_waits_for_its_action() -> None:
    """Found: the action of the former session went on, and the same run acted beside it."""
    stage = Stage()
    stage.go_on, stage.is_stubborn = asyncio.Event(), True
    (first,) = await stage.start(RUN)
    await until(lambda: stage.acted, "it acts", interval=0)
    stage.membership.incarnation = "me.2"
    stored = await stage.cache.read("job")
    assert stored is not None
    resumed = msgspec.structs.replace(RUN, owner="me.2", resumed=1)
    second = stage.runs.start(stage.job, stored, resumed)
    for _ in range(100):
        await asyncio.sleep(0)
    (entry,) = await stage.read_entries()
    assert (entry.owner, stage.acted, stage.told) == ("me.2", ["run"], [("start", "run")])
    stage.go_on.set()
    assert await second is not None
    assert first.cancelled()
    assert stage.acted == ["run", "run"]
    told = ["start", "it was cancelled", "start", "end"]
    assert stage.told == [(each, "run") for each in told]


@pytest.mark.parametrize(
    ("now", "latest", "compared", "skipped"),
    [
        (110.0, 115.0, 0, 0),
        # Only a comparison tells whether an instant has come.
        (119.0, 121.0, 1, 1),
        (125.0, 181.0, 1, 2),
        (125.0, 130.0, 0, 1),
    ],
)
async def test_what_was_due_during_a_run_is_found_by_the_compared_clocks(
    now: float, latest: float, compared: int, skipped: int
) -> None:
    """A process that fires nothing has not compared them for long."""
    stage = Stage()
    stage.seconds, stage.clock.latest = now, latest
    (task,) = await stage.start(RUN, definition=JobDefinition(schedule="@every 60s"))
    assert await task is not None
    state = await stage.read()
    assert (stage.compared, state.statistics.skipped, state.running) == (compared, skipped, ())
    assert state.last == (60 + 60 * skipped if skipped else 100)
