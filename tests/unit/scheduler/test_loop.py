"""When jobs are looked at, what is noted of them, and the runs by hand of dead processes."""

import asyncio
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgspec
import pytest
from chance import FakeClock

from jobsync.components import Components
from jobsync.core.job_state import ActiveRun, JobDefinition, JobPause, JobState
from jobsync.errors import Corrupt, Fenced, Invalid, NewerFormat, OutcomeUnknown, Unavailable
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
        self.reports: list[Any] = []
        components.events.on("store:record-set-aside", self.reports.append)
        self.store = MemoryStore(components=components)
        self.jobs = JobStore(lambda: self.store, "default", components)
        self.cache = JobCache(self.jobs, lambda *_: None)
        names = ("job", "other")
        self.known: dict[str, Any] = {
            name: SimpleNamespace(name=name, options=SimpleNamespace(definition=DAILY))
            for name in names
        }
        self.membership = membership = SimpleNamespace(
            incarnation="me.1",
            worker_id="me",
            has_ended=False,
            timing=SimpleNamespace(heartbeat=5.0, timeout=15.0),
        )
        self.clock = clock = SimpleNamespace(
            now=lambda: NOW, veto="", is_off=False, refresh=self._refresh
        )
        self.orphaned: list[str] = []
        owners = SimpleNamespace(
            watch=lambda *_: None,
            find_ended=self._find_ended,
            list_orphaned=lambda: self.orphaned,
        )
        self.runs = runs = SimpleNamespace(names=[], room=5)
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


@pytest.mark.parametrize("how", ["assign", "drop_all"])
async def test_a_new_term_begins_anew(how: str) -> None:
    """What was planned, waited or looked for in the last one says nothing."""
    stage = Stage()
    await stage.define("job")
    await stage.fire("job")
    loop = stage.loop
    assert loop._planned
    for names in (loop._delayed, loop._undecided):
        names.add("job")
    for pairs in (loop._checked, loop._elsewhere):
        pairs.add((DEAD, "job"))
    loop._waiting["job"] = None
    if how == "assign":
        loop.assign(["job"], None, "code")
    else:
        loop.drop_all()
    left = (loop._planned, loop._heap, loop._waiting, loop._delayed, loop._undecided)
    assert not any((*left, loop._checked, loop._elsewhere))


@pytest.mark.parametrize(
    ("jitter", "planned", "where", "is_open"),
    [
        (0.0, NOW + 60, None, False),
        (0.0, NOW, None, True),
        (0.0, None, None, False),
        # Its instant has come, and its own moment has not.
        (30.0, NOW + 30, None, True),
        (30.0, NOW + 30.5, None, False),
        (0.0, NOW + 60, "_advancing", True),
        (0.0, NOW + 60, "_waiting", True),
        (0.0, NOW + 60, "_undecided", True),
        (0.0, NOW + 60, "runs", True),
    ],
)
async def test_a_successor_hears_of_each_job_that_is_not_decided(
    jitter: float, planned: float | None, where: str | None, is_open: bool
) -> None:
    """It is due, is being decided, waits for room, runs, or the store has not answered."""
    stage = Stage()
    definition = msgspec.structs.replace(DAILY, jitter=jitter)
    await stage.define("job", definition=definition, pause=JobPause(at=1.0))
    await stage.fire("job")
    await stage.cache.read("job")
    stage.loop._plan("job", planned)
    if where == "runs":
        stage.runs.names.append("job")
    elif where == "_undecided":
        stage.loop._undecided.add("job")
    elif where is not None:
        getattr(stage.loop, where)["job"] = None
    assert stage.loop._list_open(NOW) == ({"job"} if is_open else set())


class _Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("facts", "beats", "pause"),
    [
        ({}, 0, 5.0),
        ({"duty": True}, 1, 5.0),
        # It has to know the time when they end.
        ({"runs": True}, 1, 5.0),
        # It has to notice when its clock is right again.
        ({"veto": "it is ahead", "is_off": True}, 1, 5.0),
        ({"veto": "not known yet"}, 1, 1.0),
        ({"veto": "not known yet", "heartbeat": 0.5}, 1, 0.5),
        ({"duty": True, "runs": True, "heartbeat": 0.5}, 1, 0.5),
    ],
)
async def test_what_is_done_once_a_heartbeat_is_done_while_it_is_needed(
    facts: dict[str, Any], beats: int, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time that is not known yet is asked for each second."""
    stage = Stage()
    await stage.define("job")
    if "duty" in facts:
        await stage.fire("job")
    if "runs" in facts:
        stage.runs.names.append("job")
    stage.membership.timing.heartbeat = facts.get("heartbeat", 5.0)
    stage.clock.is_off = facts.get("is_off", False)
    stage.loop._veto = facts.get("veto", "")
    clock, done, waits = stage.loop._components.clock, [], []

    async def beat() -> None:
        done.append("beat")

    async def wait(until: Any) -> None:
        waits.append(until - clock.mono())
        raise _Stop

    monkeypatch.setattr(stage.loop, "_beat", beat)
    monkeypatch.setattr(stage.loop, "_beat_wakeup", SimpleNamespace(wait=wait))
    with pytest.raises(_Stop):
        await stage.loop._beat_forever()
    assert (len(done), waits) == (beats, [pytest.approx(pause)])


@pytest.mark.parametrize(
    ("error", "reported", "has_term", "looks"),
    [
        (None, 0, True, True),
        (Unavailable("memory", "silent"), 0, True, False),
        (OutcomeUnknown("key", "lost"), 0, True, False),
        (Corrupt("schedule/default/edits/latest", "no edits"), 1, True, True),
        (NewerFormat("schedule/default/edits/latest", 9, 1), 1, True, True),
        (Fenced("term", 1), 0, False, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_a_heartbeat_that_fails_ends_only_what_it_must(
    error: Exception | None,
    reported: int,
    has_term: bool,
    looks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs that lost their process are looked at, although another one may lead by now."""
    stage = Stage()
    await stage.define("job")
    await stage.fire("job")
    ended: list[str] = []

    async def read_edited() -> list[str]:
        if error is not None:
            raise error
        return []

    async def write_progress(_: Any) -> None:
        return

    monkeypatch.setattr(stage.loop._duty, "read_edited", read_edited)
    monkeypatch.setattr(stage.loop._duty, "write_progress", write_progress)
    monkeypatch.setattr(stage.loop._duty, "end_term", lambda: ended.append("term"))
    stage.orphaned.append("job")
    await stage.loop._beat()
    assert len(stage.reports) == reported
    assert ended == ([] if has_term else ["term"])
    assert (stage.loop._planned["job"] == 0.0) is looks


@pytest.mark.parametrize(
    ("error", "seconds", "is_undecided", "reported"),
    [
        (None, 7.0, False, 0),
        (Unavailable("memory", "silent"), 1.0, True, 0),
        (OutcomeUnknown("key", "lost"), 1.0, True, 0),
        (Corrupt("key", "no state"), 15.0, True, 1),
        (NewerFormat("key", 9, 1), 15.0, True, 1),
        (Invalid("value", "x", "is too large", "shorten it"), 15.0, True, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_a_job_that_could_not_be_decided_is_looked_at_again(
    error: Exception | None,
    seconds: float,
    is_undecided: bool,
    reported: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a second if the store is silent; after the timeout if its record cannot be used."""
    stage = Stage()
    await stage.define("job")
    await stage.fire("job")
    stage.loop._plan("job", None)
    stage.loop._delayed.add("job")

    async def decide(*_: Any) -> bool:
        if error is not None:
            raise error
        return True

    decider = SimpleNamespace(decide=decide, next_look=lambda _: NOW + 7.0)
    monkeypatch.setattr(stage.loop, "_decider", decider)
    await stage.loop._advance("job")
    assert stage.loop._planned == {"job": NOW + seconds}
    assert ("job" in stage.loop._undecided) is is_undecided
    assert ("job" in stage.loop._delayed) is is_undecided
    assert len(stage.reports) == reported


@pytest.mark.parametrize(
    ("room", "advancing", "waiting"),
    [
        (0, [], ["a", "b", "c"]),
        (1, ["a"], ["b", "c"]),
        (2, ["a", "b"], ["c"]),
        (3, ["a", "b", "c"], []),
    ],
)
async def test_no_more_jobs_are_started_than_there_is_room_for(
    room: int, advancing: list[str], waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are being started count; the others wait in their order."""
    stage = Stage()
    for name in ("a", "b", "c"):
        await stage.define(name)
        stage.known[name] = stage.known["job"]
    await stage.fire("a", "b", "c")
    stage.runs.room = room

    async def advance(_: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(stage.loop, "_advance", advance)
    for name in ("a", "b", "c"):
        stage.loop._plan(name, 0.0)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            stage.loop._start_due(group)
        assert [*stage.loop._advancing] == advancing
        assert [*stage.loop._waiting] == waiting
        assert stage.loop._delayed == {*waiting}
        for task in stage.loop._advancing.values():
            task.cancel()


@pytest.mark.parametrize(
    ("error", "pause", "reported", "is_assigned"),
    [
        (Unavailable("memory", "silent"), 1.0, 0, True),
        (OutcomeUnknown("key", "lost"), 1.0, 0, True),
        (Corrupt("schedule/default/progress", "no progress"), 5.0, 1, True),
        (NewerFormat("schedule/default/progress", 9, 1), 5.0, 1, True),
        (Fenced("term", 1), None, 0, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_a_take_over_that_fails_is_repeated_unless_another_process_leads(
    error: Exception,
    pause: float | None,
    reported: int,
    is_assigned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a second if the store is silent; after a heartbeat if a record cannot be used."""
    stage = Stage()
    await stage.define("job")
    sleeps: list[float] = []

    async def fail() -> NoReturn:
        loop._wakeup._is_set = False
        raise error

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    loop = stage.loop
    loop.assign(["job"], None, "code")
    with monkeypatch.context() as patch:
        patch.setattr(loop._duty, "take_over", fail)
        patch.setattr(loop._components.clock, "sleep", sleep)
        await loop._take_over()
    assert sleeps == ([] if pause is None else [pause])
    assert len(stage.reports) == reported
    # It looks again at once.
    assert loop._wakeup._is_set is is_assigned
    assert loop._duty.is_assigned is is_assigned
    await loop._take_over()
    assert loop.duty == ({"job"} if is_assigned else set())


async def test_a_job_that_is_dropped_is_not_looked_at() -> None:
    """The others are; and what is asked for later changes nothing."""
    stage = Stage()
    for name in ("job", "other"):
        await stage.define(name)
    await stage.fire("job", "other")
    stage.loop.drop("job")
    assert {*stage.loop._planned} == {"other"}
    stage.loop.look_at("job")
    stage.loop._plan("job", 0.0)
    assert {*stage.loop._planned} == {"other"}
    assert stage.loop.duty == {"other"}


@pytest.mark.parametrize(
    ("asked", "is_decided", "planned"),
    [
        (False, True, NOW + 7.0),
        # Its run has ended meanwhile, say.
        (True, True, 0.0),
        (False, False, None),
        (True, False, 0.0),
    ],
)
async def test_a_look_that_is_asked_for_during_a_decision_is_not_lost(
    asked: bool, is_decided: bool, planned: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes us look may have happened after what was decided."""
    stage = Stage()
    await stage.define("job")
    await stage.fire("job")
    stage.loop._plan("job", None)

    async def decide(*_: Any) -> bool:
        if asked:
            stage.loop.look_at("job")
        return is_decided

    decider = SimpleNamespace(decide=decide, next_look=lambda _: NOW + 7.0)
    monkeypatch.setattr(stage.loop, "_decider", decider)
    await stage.loop._advance("job")
    assert stage.loop._planned.get("job") == planned
    assert not stage.loop._undecided


@pytest.mark.parametrize(
    ("is_unsure", "ends", "attempts"),
    [(False, None, 1), (True, None, 3), (True, "session", 1), (True, "incarnation", 1)],
)
async def test_what_may_be_recorded_as_running_here_is_settled_before_anything_else(
    is_unsure: bool, ends: str | None, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as this process has the session that it was recorded with."""
    stage = Stage()
    await stage.define("job")
    await stage.fire("job")
    tried: list[str] = []

    async def decide(_: Any, owner: str, new_id: str, *__: Any) -> bool:
        tried.append(f"{owner} {new_id}")
        if len(tried) == 3:
            return True
        if is_unsure:
            stage.cache.suspect("job")
        if ends == "session":
            stage.membership.has_ended = True
        elif ends == "incarnation":
            stage.membership.incarnation = "me.2"
        raise OutcomeUnknown("key", "lost")

    decider = SimpleNamespace(decide=decide, next_look=lambda _: NOW + 7.0)
    monkeypatch.setattr(stage.loop, "_decider", decider)
    await stage.loop._advance("job")
    assert len(tried) == attempts
    # The same run each time.
    assert len({*tried}) == 1


async def test_a_job_that_is_looked_at_while_it_is_decided_is_decided_once_more() -> None:
    """Once, however often it was asked for."""
    stage = Stage()
    await stage.define("job")
    await stage.fire("job")
    loop = stage.loop
    loop._advancing["job"] = cast("Any", None)
    for _ in range(2):
        loop.look_at("job")
        loop._start_due(cast("Any", None))
    assert loop._again == {"job"}
    assert "job" not in loop._planned
    for is_planned in (True, False):
        loop._plan("job", None)
        loop._on_advanced("job", cast("Any", None))
        assert (loop._planned.get("job") == 0.0) is is_planned
        assert not loop._advancing
        assert not loop._again


@pytest.mark.parametrize(
    ("is_undecided", "running", "is_forgotten"),
    [(False, (), True), (True, (), False), (False, (RUN,), False)],
)
async def test_the_announcement_of_a_run_is_forgotten_once_its_job_is_decided(
    is_undecided: bool, running: tuple[ActiveRun, ...], is_forgotten: bool
) -> None:
    """The store may not have answered yet; and a run that is still there is given up first."""
    stage = Stage()
    await stage.define("job", running=running)
    await stage.jobs.edits.announce_run(DEAD, "job", ())
    await stage.fire("job")
    assert await stage.look()
    await stage.cache.update("job", lambda _: None)
    if is_undecided:
        stage.loop._undecided.add("job")
    await stage.look()
    assert (await stage.list_announced() == {}) is is_forgotten
