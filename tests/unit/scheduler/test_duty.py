"""What a leader reads of the jobs that it takes over, by what its predecessor has noted."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
import pytest

from jobsync.components import Components
from jobsync.coordination.term import Term
from jobsync.core.job_state import ActiveRun, JobDefinition, JobPause, JobState
from jobsync.errors import JobsyncError, OutcomeUnknown, Unavailable
from jobsync.scheduler.duty import Duty
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_code import JobCode
from jobsync.scheduler.job_store import JobStore, Progress
from jobsync.scheduler.operations import JobOperations
from jobsync.stores.memory import MemoryStore

NOW = 1_800_000_060
"""A minute after a full hour."""
HOURLY = JobDefinition(schedule="@hourly")
DAILY = JobDefinition(schedule="@daily")
ON_START = msgspec.structs.replace(DAILY, run_on_start=True)
RUN = ActiveRun(id="run", instant=1, owner="dead.1", started_at=1.0)


class Succession:
    """A leader that has all jobs of the code "new", and takes over from another one."""

    def __init__(self) -> None:
        components = Components.system()
        self.store = MemoryStore(components=components)
        self.jobs = JobStore(lambda: self.store, "default", components)
        self.definitions: dict[str, JobDefinition] = {}
        self.states: dict[str, JobState] = {}
        self.term = Term(self.store, 2, lambda: True, components.ids)
        self.workers = ["w"]
        """Those that are alive."""
        self.seen = ["w"]
        """Those of them that the last check of the leader has seen."""
        self._components = components

    def add(self, name: str, definition: JobDefinition, **fields: Any) -> None:
        """Add a job that is decided until now, unless the fields say otherwise."""
        defaults = {"definition": definition, "defined_by": "", "last": NOW}
        self.definitions[name] = definition
        self.states[name] = JobState(**{**defaults, **fields})

    async def take_over(self, progress: Progress | None, *special: str) -> set[str]:
        """Return the jobs that the successor looks at at once."""
        await self.jobs.create_many(self.states)
        await self.jobs.code.write("new", self.definitions, 0.0)
        await self.jobs.code.write("old", set(self.definitions) - {"added"}, 0.0)
        generation = await self.jobs.code.begin_generation()
        assert generation is not None
        await self.jobs.code.write_defined("new", generation)
        if special:
            await self.jobs.edits.note(dict.fromkeys(special, True))
        if progress is not None:
            await self.term.put(self.jobs.progress_key, msgspec.to_builtins(progress))
        duty = self.open_duty()
        unsettled = await duty.take_over()
        assert unsettled is not None
        looks = {
            name: duty.find_first_look(name, is_settled=name not in unsettled)
            for name in self.definitions
        }
        return {name for name, when in looks.items() if when is not None and when <= NOW}

    def open_duty(self) -> Duty:
        """Return the duty of a leader that is about to take over."""
        known = {
            name: SimpleNamespace(options=SimpleNamespace(definition=definition))
            for name, definition in self.definitions.items()
        }
        membership = FleetMembership(self)
        clock = SimpleNamespace(now=lambda: float(NOW), estimate=lambda: float(NOW))
        parts: Any = (
            JobCache(self.jobs, lambda *_: None),
            known,
            membership,
            clock,
            self._components,
        )
        duty = Duty(*cast("Any", parts))
        duty.assign(known, self.term, "new")
        return duty


class FleetMembership:
    """The session of worker `w`, which leads."""

    worker_id = "w"

    def __init__(self, succession: Succession) -> None:
        self._succession = succession

    @property
    def living(self) -> frozenset[str]:
        """The live sessions, as of the last check."""
        return frozenset(f"{name}.1" for name in self._succession.seen)

    async def members(self) -> list[Any]:
        """Read who is alive."""
        return [SimpleNamespace(worker_id=name) for name in self._succession.workers]


NOTED = Progress(until=NOW, code="new")


@pytest.mark.parametrize(
    ("progress", "changes", "special", "found"),
    [
        (NOTED, {}, (), set()),
        (NOTED, {"last": NOW - 7200}, (), set()),
        (msgspec.structs.replace(NOTED, until=NOW - 61), {"last": NOW - 61}, (), {"hourly"}),
        (msgspec.structs.replace(NOTED, until=NOW - 60), {}, (), set()),
        (msgspec.structs.replace(NOTED, open=("daily",)), {"running": (RUN,)}, (), {"daily"}),
        (NOTED, {"running": (RUN,)}, ("daily",), {"daily"}),
        (NOTED, {"queued": (1,)}, ("added",), {"added"}),
        (msgspec.structs.replace(NOTED, code="old"), {"running": (RUN,)}, (), {"added"}),
        (None, {"running": (RUN,)}, (), {"daily", "added", "hourly"}),
        (
            msgspec.structs.replace(NOTED, code="gone"),
            {"queued": (1,)},
            (),
            {"daily", "added", "hourly"},
        ),
    ],
    ids=["settled", "noted", "due", "at", "open", "edited", "queued", "lacked", "first", "unknown"],
)
async def test_a_successor_looks_at_what_its_predecessor_left_undecided(
    progress: Progress | None, changes: dict[str, Any], special: tuple[str, ...], found: set[str]
) -> None:
    """Was due since, was open, was changed by operators, or was not in the other's code.

    All jobs are in the same state. Those that the note covers are not read.
    """
    succession = Succession()
    for name, definition in (("hourly", HOURLY), ("daily", DAILY), ("added", DAILY)):
        succession.add(name, definition, **changes)
    assert await succession.take_over(progress, *special) == found


async def test_a_successor_that_cannot_read_what_operators_changed_looks_at_all_jobs() -> None:
    """Any of them may have been paused, or asked to run, since its predecessor's note."""
    succession = Succession()
    for name in ("hourly", "daily"):
        succession.add(name, DAILY, queued=(1,))
    await succession.store.create("schedule/default/edits/latest", {"revision": "many"})
    assert await succession.take_over(NOTED) == {"hourly", "daily"}


@pytest.mark.parametrize("runs_on_start", [False, True])
async def test_progress_is_noted_when_any_part_of_it_has_changed(runs_on_start: bool) -> None:
    """What is decided, or who is alive: by that a successor knows whether the fleet has restarted.

    Also if none of its own jobs runs at the start of a fleet: the successor may have one.
    """
    succession = Succession()
    succession.add("job", msgspec.structs.replace(DAILY, run_on_start=runs_on_start))
    await succession.take_over(NOTED)
    duty = succession.open_duty()
    await duty.take_over()

    async def note() -> Progress | None:
        """Return what is noted by one more beat; None if nothing is written."""
        before = await succession.store.get(succession.jobs.progress_key)
        await duty.write_progress(lambda _: set())
        after = await succession.store.get(succession.jobs.progress_key)
        assert before is not None
        assert after is not None
        is_written = before.version != after.version
        return msgspec.convert(after.value, Progress) if is_written else None

    await note()
    assert await note() is None
    for workers in (["a", "w"], ["a"], ["b", "w"]):
        # Nothing was decided meanwhile.
        succession.workers = succession.seen = workers
        noted = await note()
        assert noted is not None
        assert noted.fleet == tuple(workers)
        assert await note() is None
    # Nobody has come or gone meanwhile.
    duty.is_dirty = True
    noted = await note()
    assert noted is not None
    assert noted.fleet == ("b", "w")
    assert await note() is None


async def test_a_leader_that_has_not_seen_the_fleet_yet_notes_that_of_the_last_one() -> None:
    """If it ended now, its successor would take the others for a new fleet."""
    succession = Succession()
    succession.add("job", ON_START)
    succession.workers = ["a", "b", "w"]
    before = msgspec.structs.replace(NOTED, fleet=("a", "b", "dead"))
    await succession.take_over(before)
    duty = succession.open_duty()
    await duty.take_over()

    async def note() -> list[str]:
        await duty.write_progress(lambda _: set())
        noted = await succession.store.get(succession.jobs.progress_key)
        assert noted is not None
        return list(noted.value["fleet"])

    assert await note() == ["a", "b", "dead", "w"]
    succession.seen = ["a", "b", "w"]
    assert await note() == ["a", "b", "w"]


async def test_a_leader_follows_each_part_of_what_operators_note() -> None:
    """An announced run changes no revision, and is known by the next beat all the same."""
    succession = Succession()
    succession.add("job", DAILY)
    await succession.take_over(NOTED)
    duty, edits = succession.open_duty(), succession.jobs.edits
    await duty.take_over()
    assert await duty.read_edited() == []
    await edits.announce_run("s.1", "job", ())
    assert await duty.read_edited() == []
    assert duty.announced == {"s.1": ("job",)}
    await edits.note({"job": True})
    assert await duty.read_edited() == ["job"]
    assert await duty.read_edited() == []
    await edits.announce_run("s.2", "job", ())
    await edits.forget_announced({"s.1": {"job"}})
    assert await duty.read_edited() == []
    assert duty.announced == {"s.2": ("job",)}
    await edits.note({"job": False, "another": None})
    assert await duty.read_edited() == ["another", "job"]
    assert duty.announced == {"s.2": ("job",)}


CHANGES_BEFORE: dict[str, tuple[str, ...]] = {
    "a request": ("request",),
    "a request, and a pause that has ended": ("request", "pause", "resume"),
    "a request, and a new definition": ("request", "define"),
    "a pause": ("pause",),
    "a pause, and a new definition": ("pause", "define"),
    "a pause that has ended": ("pause", "resume"),
    "a new definition": ("define",),
}
"""What operators and deployments do while nobody leads."""


@pytest.mark.parametrize("what", CHANGES_BEFORE)
async def test_a_successor_reads_a_job_that_differs_in_any_way_from_its_code(what: str) -> None:
    """Found: a run that was asked for was forgotten by a resume, and by a new definition."""
    succession = Succession()
    succession.add("daily", DAILY)
    await succession.jobs.create_many(succession.states)
    operations = JobOperations(succession.jobs, succession._components, "operator")
    for step in CHANGES_BEFORE[what]:
        match step:
            case "request":
                await operations.request_run("daily")
            case "pause":
                assert await operations.pause("daily", "why")
            case "resume":
                assert await operations.resume("daily")
            case _:
                await deploy(succession, JobDefinition(schedule="@daily", retries=3))
    stored = (await succession.jobs.read_many(["daily"]))["daily"].state
    edits = await succession.jobs.edits.read()
    assert edits is not None
    assert ("daily" in edits.special) is stored.is_special
    assert stored.is_special is bool(stored.requests or stored.pause)


async def deploy(succession: Succession, definition: JobDefinition) -> None:
    """Store another definition of a job, as a process with other code does."""
    known: Any = {"daily": SimpleNamespace(options=SimpleNamespace(definition=definition))}
    clock = SimpleNamespace(now=lambda: float(NOW), veto="")
    membership = SimpleNamespace(worker_id="w", incarnation="w.1")
    parts: Any = (succession.jobs, membership, clock, "schedule default", lambda _: None, 5)
    assert await JobCode(known, *parts).define(["daily"])


async def test_changes_of_operators_that_could_not_be_read_are_read_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once: an operator's run is started at the next beat, not when the job is due."""
    succession = Succession()
    succession.add("job", DAILY)
    await succession.take_over(NOTED)
    duty = succession.open_duty()
    await duty.take_over()
    await succession.jobs.edits.note({"job": True})
    down = AsyncMock(side_effect=Unavailable("store", "down"))
    with monkeypatch.context() as patch:
        patch.setattr(succession.jobs, "read_many", down)
        with pytest.raises(Unavailable):
            await duty.read_edited()
    assert [await duty.read_edited(), await duty.read_edited()] == [["job"], []]


@pytest.mark.parametrize("error", [None, Unavailable("store", "down"), OutcomeUnknown("key")])
async def test_what_is_decided_while_progress_is_noted_is_in_the_next_note(
    monkeypatch: pytest.MonkeyPatch, error: JobsyncError | None
) -> None:
    """So is what could not be noted: a successor would look at all that was due since."""
    succession = Succession()
    succession.add("job", DAILY)
    await succession.take_over(NOTED)
    duty = succession.open_duty()
    await duty.take_over()
    # The first note would be repeated for the fleet's sake.
    await duty.write_progress(lambda _: set())
    put = Term.put

    async def decide_meanwhile(*arguments: Any) -> None:
        if error is not None:
            raise error
        await put(*arguments)
        duty.is_dirty = True

    duty.is_dirty = True
    with monkeypatch.context() as patch:
        patch.setattr(Term, "put", decide_meanwhile)
        with nullcontext() if error is None else pytest.raises(type(error)):
            await duty.write_progress(lambda _: {"first"})
    await duty.write_progress(lambda _: {"second"})
    await duty.write_progress(lambda _: {"third"})
    noted = await succession.store.get(succession.jobs.progress_key)
    assert noted is not None
    assert noted.value["open"] == ["second"]


@pytest.mark.parametrize("opened", [set(), {"daily"}, {"daily", "hourly"}])
async def test_a_successor_looks_at_what_the_note_before_leaves_open(opened: set[str]) -> None:
    """And at nothing else that was due until then: 10,000 jobs are not read for one."""
    succession = Succession()
    for name, definition in (("daily", DAILY), ("hourly", HOURLY)):
        succession.add(name, definition)
    await succession.take_over(None)
    leader = succession.open_duty()
    assert await leader.take_over() == {"daily", "hourly"}
    leader.is_dirty = True
    await leader.write_progress(lambda now: {*opened} if now == NOW else set())
    assert await succession.open_duty().take_over() == opened


PAUSE = JobPause(at=1.0, by="ann", reason="it deletes things")


@pytest.mark.parametrize(
    ("definition", "changes", "is_asked_for"),
    [
        (ON_START, {}, True),
        (DAILY, {}, False),
        # Found: what operators had changed was ignored.
        (ON_START, {"pause": PAUSE}, False),
        (ON_START, {"edits": {"run_on_start": False}}, False),
        (DAILY, {"edits": {"run_on_start": True}}, True),
        (DAILY, {"edits": {"run_on_start": True}, "pause": PAUSE}, False),
        (msgspec.structs.replace(ON_START, enabled=False), {}, False),
        (msgspec.structs.replace(ON_START, enabled=False), {"edits": {"enabled": True}}, True),
        (ON_START, {"edits": {"enabled": False}}, False),
        (ON_START, {"edits": {"retries": 3}}, True),
    ],
)
async def test_a_job_runs_at_the_start_if_it_is_fired_at_all(
    definition: JobDefinition, changes: dict[str, Any], is_asked_for: bool
) -> None:
    """By what holds now: its code, and what operators have changed. A successor looks at it."""
    succession = Succession()
    succession.add("job", definition, **changes)
    succession.add("other", DAILY)
    special = ["job"] if changes else []
    before = Progress(until=NOW, code="new", fleet=("dead",))
    found = await succession.take_over(before, *special)
    stored = await succession.jobs.read("job")
    assert stored is not None
    assert [each.by for each in stored.state.requests] == ["run_on_start"] * is_asked_for
    assert ("job" in found) is is_asked_for
    noted = await succession.store.get(succession.jobs.progress_key)
    assert noted is not None
    assert noted.value.get("open", []) == (["job"] if is_asked_for else [])


@pytest.mark.parametrize("damaged", [{"definition": 1}, "nothing"])
async def test_one_job_that_cannot_be_read_keeps_no_other_from_its_start(damaged: Any) -> None:
    """Found: nothing was fired in the whole fleet until its record was repaired."""
    succession = Succession()
    for name in ("a", "b", "c"):
        succession.add(name, ON_START)
    del succession.states["b"]
    await succession.store.create(f"{succession.jobs.prefix}job/b", damaged)
    found = await succession.take_over(Progress(until=NOW, code="new", fleet=("dead",)))
    assert found >= {"a", "c"}
    stored = await succession.jobs.read_many(["a", "c"])
    assert [len(each.state.requests) for each in stored.values()] == [1, 1]


async def test_a_job_that_was_added_later_does_not_run_after_an_election() -> None:
    """It runs at the start of the fleet: as long as one of those lives that were noted, it is."""
    succession = Succession()
    succession.add("first", DAILY)
    await succession.take_over(NOTED)
    duty = succession.open_duty()
    await duty.take_over()
    succession.states.clear()
    succession.add("later", msgspec.structs.replace(DAILY, run_on_start=True))
    await succession.jobs.create_many(succession.states)
    parts: Any = duty
    parts._known["later"] = SimpleNamespace(
        options=SimpleNamespace(definition=succession.definitions["later"])
    )
    duty.add("later")
    assert duty.names == {"first", "later"}
    await duty.write_progress(lambda _: set())
    for workers, requests in ((["w"], 0), (["new"], 1)):
        succession.workers = workers
        await succession.open_duty().take_over()
        stored = await succession.jobs.read("later")
        assert stored is not None
        assert len(stored.state.requests) == requests
