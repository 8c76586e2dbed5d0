"""The jobs that the versions of a fleet's code have, over a store in memory."""

from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from jobsync.components import Components
from jobsync.core.job_state import JobDefinition, JobState
from jobsync.errors import JobsyncError, OutcomeUnknown, Unavailable
from jobsync.scheduler.code_versions import CodeVersions, digest_code
from jobsync.scheduler.edits import JobEdits
from jobsync.scheduler.job_code import JobCode
from jobsync.scheduler.job_store import JobStore
from jobsync.stores.memory import MemoryStore

DAY = 86_400.0
NOW = 1_800_000_000.0
FACT = "schedule default"


class Fleet:
    """A store, and the sessions whose processes are alive."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.jobs = JobStore(lambda: self.store, "default", Components.system())
        self.peers: list[SimpleNamespace] = []
        self.clock = SimpleNamespace(now=lambda: NOW, veto="")
        self.incarnation = self.worker_id = ""

    async def members(self) -> list[SimpleNamespace]:
        """Return the live sessions."""
        return self.peers

    def publish(self, **facts: str) -> None:
        """Add a session."""
        self.peers.append(SimpleNamespace(facts=facts))

    def start(self, generation: int = 0, **schedules: str) -> JobCode:
        """Return the code of a process with some jobs; none by default."""
        parts: Any = (self.jobs, self, self.clock, FACT, lambda _: None, generation)
        known: Any = {
            name: SimpleNamespace(
                options=SimpleNamespace(definition=JobDefinition(schedule=schedule))
            )
            for name, schedule in schedules.items()
        }
        return JobCode(known, *cast("Any", parts))

    async def read_schedules(self) -> dict[str, str]:
        """Return the schedule of each stored job."""
        jobs = await self.jobs.read_all()
        return {name: job.state.definition.schedule for name, job in jobs.items()}

    async def list_code(self) -> list[str]:
        """Return the digests that are stored."""
        found = await self.store.scan("schedule/default/code/")
        return [record.key.rpartition("/")[2] for record in found]


@pytest.fixture
def fleet() -> Fleet:
    """A fleet in which nothing was stored."""
    return Fleet()


async def test_a_version_that_no_process_has_is_forgotten_a_day_later(fleet: Fleet) -> None:
    """Found: each deployment with other jobs left a record for good."""
    for digest, age in {"old": 2 * DAY, "recent": DAY / 2, "live": 9 * DAY}.items():
        await fleet.jobs.code.write(digest, ["job"], NOW - age)
    fleet.publish(**{FACT: "live"})
    code = fleet.start()
    await code.publish()
    await code.forget_old()
    assert await fleet.list_code() == sorted([code.digest, "live", "recent"])


@pytest.mark.parametrize("error", [Unavailable("store", "down"), OutcomeUnknown("key", "lost")])
async def test_a_version_that_could_not_be_stored_is_published_later(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: JobsyncError
) -> None:
    """Its session names it only when it is stored; once it is, nothing is written."""

    async def refuse(*_: Any) -> NoReturn:
        raise error

    code = fleet.start()
    with monkeypatch.context() as patch:
        patch.setattr(CodeVersions, "write", refuse)
        for _ in range(2):
            with pytest.raises(type(error)):
                await code.publish()
            assert fleet.peers == []
    for _ in range(2):
        await code.publish()
        assert [peer.facts for peer in fleet.peers] == [{FACT: code.digest}]
        assert await fleet.list_code() == [code.digest]
    code.change()
    await code.publish()
    assert len(fleet.peers) == 2


async def test_jobs_that_are_added_while_a_version_is_stored_are_published_next(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them: the version under way has them or not, and the last one has all."""
    code, others = fleet.start(a="@daily"), fleet.start(b="@daily", c="@hourly")
    write = CodeVersions.write

    async def write_beside(versions: CodeVersions, *arguments: Any) -> bool:
        if left := others._known.keys() - code._known.keys():
            name = min(left)
            cast("Any", code._known)[name] = others._known[name]
            code.change()
        return await write(versions, *arguments)

    monkeypatch.setattr(CodeVersions, "write", write_beside)
    for jobs in ("a", "ab", "abc", "abc"):
        await code.publish()
        published = fleet.peers[-1].facts[FACT]
        assert await fleet.jobs.code.read(published) == {*jobs}
    assert len(fleet.peers) == 3


async def test_the_count_of_starts_never_goes_back(fleet: Fleet) -> None:
    """Whatever is written in between: the higher count's definitions hold."""
    code, highest = fleet.jobs.code, 0
    for step in ("begin", "clear", "begin", "write", "clear", "clear", "begin", "write", "begin"):
        if step == "begin":
            generation = await code.begin_generation()
            assert generation == highest + 1
            highest = generation
        elif step == "clear":
            await code.clear_defined()
        else:
            await code.write_defined("outdated", highest - 1)
            assert (await code.read_defined()).code == ""
            await code.write_defined("newest", highest)
        defined = await code.read_defined()
        assert defined.generation == highest
        assert defined.code == ("newest" if step == "write" else "")


@pytest.mark.parametrize(
    ("starts", "holds", "generations"),
    [
        # Each letter is a process, which starts with its own code; small ones are restarts of the
        # plugin within the process.
        ("A", "@daily", [1]),
        ("AB", "@hourly", [1, 2]),
        ("ABa", "@hourly", [1, 2, 1]),
        ("ABab", "@hourly", [1, 2, 1, 2]),
        ("ABA", "@daily", [1, 2, 3]),
        ("ABAb", "@daily", [1, 2, 3, 2]),
        # The same code: nothing is defined, and the count of its start stays.
        ("AA", "@daily", [1, 1]),
        ("ABCa", "@daily", [1, 2, 3, 1]),
        ("ABCab", "@daily", [1, 2, 3, 1, 2]),
    ],
)
async def test_the_definition_of_the_process_that_started_last_holds(
    fleet: Fleet, starts: str, holds: str, generations: list[int]
) -> None:
    """A restart within a process is no start, however often it happens and whatever is stored."""
    schedules = {"A": "@daily", "B": "@hourly", "C": "@daily"}
    begun: dict[str, int] = {}
    found = []
    for letter in starts:
        name = letter.upper()
        code = fleet.start(0 if letter.isupper() else begun[name], job=schedules[name])
        await code.register_all()
        begun[name] = code.generation
        found.append(code.generation)
    assert found == generations
    assert await fleet.read_schedules() == {"job": holds}
    stored = await fleet.jobs.read("job")
    assert stored is not None
    assert stored.state.generation == max(generations)
    defined = await fleet.jobs.code.read_defined()
    newest = fleet.start(job=holds)
    await newest.publish()
    assert defined.code == newest.digest


@pytest.mark.parametrize("newer", ["", "a", "b", "c", "ab", "abc"])
async def test_a_version_is_noted_as_stored_only_if_all_its_definitions_hold(
    fleet: Fleet, newer: str
) -> None:
    """Whichever of them a later process has replaced: the next process defines its own."""
    await fleet.start(0, **dict.fromkeys("abc", "@weekly")).define(list("abc"))
    late = fleet.start(1, **dict.fromkeys("abc", "@daily"))
    await fleet.jobs.code.begin_generation()
    await fleet.start(2, **dict.fromkeys(newer, "@hourly")).define(list(newer))
    assert await late.define(list("abc")) is (not newer)
    assert await fleet.read_schedules() == {
        name: "@hourly" if name in newer else "@daily" for name in "abc"
    }
    await late.register_all()
    defined = await fleet.jobs.code.read_defined()
    assert (defined.code == late.digest) is (not newer)


@pytest.mark.parametrize("lost", ["definition", "note"])
async def test_leaders_are_told_of_a_new_definition_whose_reply_was_lost(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """When it is stored again, once: it is stored already, and leaders go by what is noted."""
    await fleet.start(1, job="@daily").define(["job"])
    change = JobStore.change

    async def lose(jobs: Any, *of: Any) -> NoReturn:
        if lost == "definition":
            await change(jobs, *of)
        raise OutcomeUnknown("key", "lost")

    code = fleet.start(2, job="@hourly")
    with monkeypatch.context() as patch:
        part, name = (JobStore, "change") if lost == "definition" else (JobEdits, "note")
        patch.setattr(part, name, lose)
        with pytest.raises(OutcomeUnknown):
            await code.define(["job"])
    assert await fleet.read_schedules() == {"job": "@hourly"}
    for _ in range(2):
        assert await code.define(["job"])
        edits = await fleet.jobs.edits.read()
        assert edits is not None
        assert edits.recent == ((1, "job"),)


@pytest.mark.parametrize(
    ("leader", "older", "found"),
    [
        ("abc", [], ""),
        ("ab", [], "c"),
        ("", [], "abc"),
        (None, [], "abc"),
        ("a", ["bc"], ""),
        ("a", ["b"], "c"),
        ("a", ["b", "c"], ""),
        ("a", ["", None], "bc"),
    ],
)
async def test_the_oldest_process_that_has_a_job_fires_what_the_coordinator_lacks(
    fleet: Fleet, leader: str | None, older: list[str | None], found: str
) -> None:
    """Each process by its published code; one that has published none has no jobs."""

    async def publish(jobs: str | None) -> SimpleNamespace:
        if jobs is None:
            return SimpleNamespace(incarnation="silent", facts={})
        await fleet.jobs.code.write(f"code-{jobs}", jobs, NOW)
        return SimpleNamespace(incarnation=f"has-{jobs}", facts={FACT: f"code-{jobs}"})

    code = fleet.start()
    known: Any = {
        name: SimpleNamespace(options=SimpleNamespace(definition=JobDefinition(schedule="@daily")))
        for name in "abc"
    }
    code._known = known
    await code.publish()
    own = SimpleNamespace(incarnation="me", facts={FACT: code.digest})
    fleet.incarnation = own.incarnation
    candidates = [*[await publish(jobs) for jobs in older], own, await publish("abc")]

    async def list_candidates() -> list[Any]:
        return candidates

    coordinator: Any = await publish(leader)
    for _ in range(2):
        assert await code.find_lacking(coordinator, list_candidates) == {*found}
    # One that is not a candidate itself fires nothing.
    candidates = []
    assert await code.find_lacking(coordinator, list_candidates) == set()


@pytest.mark.parametrize("generations", [{}, {"a": 7}, {"a": 7, "b": 2}, {"other": 9}])
async def test_if_nobody_can_count_a_start_is_above_those_of_its_jobs(
    fleet: Fleet, generations: dict[str, int]
) -> None:
    """The record of the count is damaged; jobs that this process has not are not read."""
    for name, generation in generations.items():
        definition = JobDefinition(schedule="@daily")
        state = JobState(definition=definition, defined_by="", last=0, generation=generation)
        await fleet.jobs.create_many({name: state})
    await fleet.store.create("schedule/default/defined", {"generation": "many"})
    code = fleet.start()
    code._known = cast("Any", dict.fromkeys("ab"))
    own = [generation for name, generation in generations.items() if name in "ab"]
    assert await code._begin_generation() == 1 + max(own, default=0)


async def test_a_version_that_comes_back_is_kept(fleet: Fleet) -> None:
    """A process publishes it again before its session can name it."""
    code = fleet.start()
    await code.publish()
    digest, fleet.peers = code.digest, []
    await fleet.jobs.code.forget((), NOW + 2 * DAY, digest)
    assert await fleet.list_code() == []
    assert await fleet.jobs.code.write(digest, ["job"], NOW + 2 * DAY)
    assert await fleet.jobs.code.read(digest) == {"job"}
    assert not await fleet.jobs.code.write(digest, ["job"], NOW + 4 * DAY)
    assert await fleet.jobs.code.forget((), NOW + 4 * DAY, digest) == 0


async def test_a_process_that_adds_no_version_looks_for_none(fleet: Fleet) -> None:
    """Only who adds a record removes others, so that restarts cost nothing."""
    await fleet.start().publish()
    await fleet.jobs.code.write("old", ["job"], NOW - 2 * DAY)
    code = fleet.start()
    await code.publish()
    await code.forget_old()
    assert "old" in await fleet.list_code()


async def test_nothing_is_forgotten_by_a_clock_that_may_be_wrong(fleet: Fleet) -> None:
    """A version that was just published would seem old. It is done once the clock is right."""
    await fleet.jobs.code.write("old", ["job"], NOW - 2 * DAY)
    code, fleet.clock.veto = fleet.start(), "it is a year ahead"
    await code.publish()
    await code.forget_old()
    assert "old" in await fleet.list_code()
    fleet.clock.veto = ""
    await code.forget_old()
    assert "old" not in await fleet.list_code()


async def test_a_hundred_versions_at_most_are_forgotten_at_once(fleet: Fleet) -> None:
    """A fleet that has collected many gets rid of them over some deployments."""
    for number in range(150):
        await fleet.jobs.code.write(f"{number:03}", [], NOW - 2 * DAY)
    assert await fleet.jobs.code.forget((), NOW, "070") == 100
    assert await fleet.jobs.code.forget((), NOW, "070") == 50


async def test_versions_are_forgotten_however_many_are_too_young(fleet: Fleet) -> None:
    """Found: only the first hundred were looked at; others stayed if those were young."""
    definition = JobDefinition(schedule="@daily")
    versions = [digest_code({str(number): definition}) for number in range(9)]
    old = max(versions)
    for number, digest in enumerate(sorted(versions)):
        await fleet.jobs.code.write(digest, [], NOW - (2 * DAY if digest == old else number))
    young = [f"{number:03}" for number in range(300)]
    for digest in young:
        await fleet.jobs.code.write(digest, [], NOW)
    forgotten = [await fleet.jobs.code.forget((), NOW, digest) for digest in versions]
    assert sum(forgotten) == 1
    assert set(await fleet.list_code()) == {*young, *versions} - {old}


@pytest.mark.parametrize(
    ("age", "is_written"),
    [(0.0, False), (DAY / 2 - 1, False), (DAY / 2, True), (DAY - 1, True), (3 * DAY, True)],
)
async def test_a_version_is_published_again_after_half_a_day(
    fleet: Fleet, age: float, is_written: bool
) -> None:
    """So that it is never a day old while its process has not told it yet."""
    await fleet.jobs.code.write("code", ["job"], NOW - age)
    assert not await fleet.jobs.code.write("code", ["job"], NOW)
    record = await fleet.store.get("schedule/default/code/code")
    assert record is not None
    assert record.value["at"] == (NOW if is_written else NOW - age)


async def test_a_job_that_was_just_added_is_not_taken_for_one_of_the_coordinators(
    fleet: Fleet,
) -> None:
    """Both had the same code before. Until it is published, this process fires the job."""
    code = fleet.start(a="@daily")
    await code.publish()
    leader: Any = SimpleNamespace(incarnation="leader", facts={FACT: code.digest})
    own = SimpleNamespace(incarnation="me", facts={FACT: code.digest})
    fleet.incarnation = own.incarnation

    async def list_candidates() -> list[Any]:
        return [own]

    known: Any = code._known
    for added, lacking in (("", set()), ("b", {"b"}), ("c", {"b", "c"})):
        if added:
            known[added] = known["a"]
            code.change()
        for _ in range(2):
            assert await code.find_lacking(leader, list_candidates) == lacking
        await code.publish()
        assert await code.find_lacking(leader, list_candidates) == lacking


async def test_a_new_version_makes_room_although_a_known_one_follows(fleet: Fleet) -> None:
    """A job is added and removed again before old versions are looked for."""
    await fleet.start(a="@daily").publish()
    await fleet.jobs.code.write("old", ["job"], NOW - 2 * DAY)
    code = fleet.start(a="@daily", b="@daily")
    await code.publish()
    known: Any = code._known
    del known["b"]
    code.change()
    await code.publish()
    await code.forget_old()
    assert "old" not in await fleet.list_code()


async def test_the_own_version_is_kept_before_its_session_tells_it(fleet: Fleet) -> None:
    """However long it takes until old versions are looked for."""
    code, fleet.clock.veto = fleet.start(a="@daily"), "the time is not known yet"
    await code.publish()
    fleet.peers.clear()
    fleet.clock.veto, fleet.clock.now = "", lambda: NOW + 2 * DAY
    await fleet.jobs.code.write("old", ["job"], NOW)
    await code.forget_old()
    assert await fleet.list_code() == [code.digest]


async def test_only_versions_of_live_processes_are_remembered(fleet: Fleet) -> None:
    """Each job that is added or removed makes a version. Jobs in use are those of all processes."""
    code = fleet.start(a="@daily")
    fleet.incarnation = "me"
    await code.publish()
    fleet.peers = [SimpleNamespace(incarnation="me", facts={FACT: "outdated"})]
    assert await code.list_used() == {"a"}
    for number in range(3):
        jobs = {f"job{number}", "shared"}
        await fleet.jobs.code.write(f"code{number}", jobs, NOW)
        other = SimpleNamespace(incarnation=f"other{number}", facts={FACT: f"code{number}"})
        fleet.peers[1:] = [other, SimpleNamespace(incarnation="silent", facts={})]
        for _ in range(2):
            assert await code.list_used() == {"a", *jobs}
        assert {*code._others} <= {f"code{number}", ""}
