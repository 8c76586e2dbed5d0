"""What operators do with jobs, over a store in memory."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec
import pytest
from chance import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync.components import Components
from jobsync.core.clock import Wall
from jobsync.core.firing import next_instant
from jobsync.core.job_state import (
    ActiveRun,
    Gap,
    JobDefinition,
    JobPause,
    JobState,
    LastRun,
    RunStatus,
    Statistics,
)
from jobsync.errors import Invalid, NotFound
from jobsync.scheduler.history import build_entry
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.operations import JobOperations, build_status
from jobsync.stores.contract import Change, Head, Outcome, Record
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

NOON = 1_800_014_400.0
"""The time of the server, which is noon in UTC."""


class ObjectServer(StoreDecorator):
    """Has no clock that can be asked for; listings tell when a record was written."""

    tells_times = True
    times: Mapping[str, float] = {}
    """When records were written, by key; the others at noon."""
    meanwhile: Callable[[], Awaitable[object]] | None = None
    """What somebody else does before the next write of a job arrives."""

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.meanwhile is not None and any("/job/" in change.key for change in changes):
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return await super().write(changes)

    async def now(self) -> Wall | None:
        return None

    async def heads(self, prefix: str, **options: Any) -> list[Head]:
        heads = await super().heads(prefix, **options)
        if not self.tells_times:
            return heads
        return [
            msgspec.structs.replace(head, written_at=self.times.get(head.key, NOON))
            for head in heads
        ]


class Desk:
    """An operator's machine, whose clock may be wrong."""

    def __init__(self, ahead: float) -> None:
        self.machine = FakeClock()
        self.machine.wall_seconds = NOON + ahead
        components = msgspec.structs.replace(Components.system(), clock=self.machine)
        self.store = ObjectServer(MemoryStore(components=components))
        self.jobs = JobStore(lambda: self.store, "default", components)
        self.operations = JobOperations(self.jobs, components, "operator")

    async def add(self, **fields: Any) -> None:
        """Store a job that fires every hour, and was last decided at noon."""
        definition = JobDefinition(schedule="@hourly")
        state = JobState(definition=definition, defined_by="", last=int(NOON), **fields)
        await self.jobs.create_many({"job": state})

    async def read(self) -> JobState:
        """Return the job's state."""
        state = await self.operations.read_state("job")
        assert state is not None
        return state


@pytest.mark.parametrize("ahead", [-86_400.0, -40.0, 0.0, 40.0, 86_400.0])
async def test_a_change_goes_by_the_servers_clock(ahead: float) -> None:
    """Found: an edit from a machine whose clock is a day ahead skipped a day of instants."""
    desk = Desk(ahead)
    await desk.add()
    assert await desk.operations.edit("job", {"schedule": "*/5 * * * *"})
    state = await desk.read()
    assert state.last == pytest.approx(NOON, abs=2)
    assert state.gaps == ()


async def test_a_pause_that_ends_skips_nothing_of_the_future() -> None:
    """Only what was due while it was paused."""
    desk = Desk(3 * 3600.0)
    await desk.add(pause=JobPause(at=NOON))
    assert await desk.operations.resume("job")
    state = await desk.read()
    assert state.last == pytest.approx(NOON, abs=2)
    assert state.statistics.skipped == 0


@pytest.mark.parametrize("reason", [None, 5, ["a"], ValueError("x"), "a\0b", "\ud800"])
async def test_a_reason_is_text(reason: Any) -> None:
    """Found: another one made the job's record unreadable, for ever."""
    desk = Desk(0.0)
    await desk.add()
    with pytest.raises(Invalid, match="reason must"):
        await desk.operations.pause("job", reason)
    assert (await desk.read()).pause is None


class Name(str):
    """A text that is no plain one."""

    __slots__ = ()


async def test_texts_and_numbers_of_derived_classes_are_stored_as_plain_ones() -> None:
    """Found: a store could not encode them."""

    class Share(float):
        pass

    desk = Desk(0.0)
    await desk.add()
    await desk.operations.pause("job", Name("too loud"))
    changes = {"schedule": Name("@daily"), "overlap": Name("queue"), "timeout": Share(3.5)}
    assert await desk.operations.edit("job", changes)
    state = await desk.read()
    assert state.pause is not None
    assert state.pause.reason == "too loud"
    assert state.edits == {"schedule": "@daily", "overlap": "queue", "timeout": 3.5}


async def test_what_is_enabled_again_differs_from_its_code_no_more() -> None:
    """Found: enabled=True stayed as an operator's change."""
    desk = Desk(0.0)
    await desk.add()
    assert await desk.operations.edit("job", {"enabled": False})
    assert await desk.operations.resume("job")
    assert (await desk.read()).edits == {}


PAUSE = JobPause(at=NOON)
SLOWER = {"retries": 3}
"""A change by an operator; the code says 0."""


@pytest.mark.parametrize(
    ("fields", "calls", "is_special"),
    [
        ({}, [("pause",)], True),
        ({}, [("edit", SLOWER)], True),
        ({}, [("request_run",)], True),
        ({}, [("remove",)], True),
        # One of them is left, whichever it is, after another one is taken back.
        ({}, [("pause",), ("edit", SLOWER), ("edit", {"retries": 0})], True),
        ({}, [("request_run",), ("edit", SLOWER), ("edit", {"retries": 0})], True),
        ({}, [("pause",), ("edit", SLOWER), ("resume",)], True),
        # Nothing is left.
        ({}, [("pause",), ("resume",)], False),
        ({}, [("edit", SLOWER), ("edit", {"retries": 0})], False),
        ({"pause": PAUSE}, [("resume",)], False),
    ],
)
async def test_a_successor_reads_the_jobs_that_differ_from_their_code(
    fields: dict[str, Any], calls: Sequence[tuple[Any, ...]], is_special: bool
) -> None:
    """A leader that takes over reads no others: each difference alone is a reason to read."""
    desk = Desk(0.0)
    await desk.add(**fields)
    for name, *arguments in calls:
        await getattr(desk.operations, name)("job", *arguments)
    edits = await desk.jobs.edits.read()
    assert edits is not None
    assert edits.special == (("job",) if is_special else ())
    assert edits.list_since(0) == ["job"]


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [
        (("pause",), ("pause",), False),
        (("resume",), ("resume",), False),
        (("edit", SLOWER), ("edit", SLOWER), False),
        (("pause",), ("edit", SLOWER), True),
        (("edit", SLOWER), ("pause",), True),
        (("resume",), ("edit", SLOWER), True),
        (("pause",), ("remove",), None),
        (("resume",), ("remove",), None),
        (("edit", SLOWER), ("remove",), None),
        (("request_run",), ("remove",), None),
    ],
)
async def test_a_change_that_meets_another_one_tells_what_became_of_it(
    first: tuple[Any, ...], second: tuple[Any, ...], answer: bool | None
) -> None:
    """It is decided anew: made, not needed any more (False), or too late (the job is gone)."""
    desk = Desk(0.0)
    await desk.add(pause=PAUSE if first == ("resume",) else None)

    async def change(call: tuple[Any, ...]) -> object:
        name, *arguments = call
        return await getattr(desk.operations, name)("job", *arguments)

    desk.store.meanwhile = lambda: change(second)
    if answer is None:
        with pytest.raises(NotFound):
            await change(first)
        assert (await desk.read()).is_removed
    else:
        assert await change(first) is answer
    edits = await desk.jobs.edits.read()
    assert edits is not None
    # Only what was changed is told.
    assert edits.revision == (2 if answer else 1)


@pytest.mark.parametrize("name", [None, 5, ["job"], b"job"])
async def test_a_name_is_text(name: Any) -> None:
    """Found: TypeError and AttributeError, which name neither argument nor fix."""
    desk = Desk(0.0)
    await desk.add()
    operations = desk.operations
    for call in (operations.status, operations.pause, operations.resume, operations.remove):
        with pytest.raises(Invalid, match="name must be text"):
            await call(name)
    if name is not None:
        with pytest.raises(Invalid, match="name must be text"):
            await operations.history(name)


@pytest.mark.parametrize(
    "wrong",
    [{"status": 5}, {"status": [5]}, {"status": []}, {"since": "2026"}, {"since": float("nan")}],
)
async def test_a_wrong_question_about_the_history_is_refused(wrong: dict[str, Any]) -> None:
    """Found: TypeError, in a group if all jobs were asked for."""
    desk = Desk(0.0)
    await desk.add()
    with pytest.raises(Invalid):
        await desk.operations.history(**wrong)
    with pytest.raises(Invalid, match="after must be text"):
        await desk.operations.history("job", after=5)  # type: ignore[arg-type]


async def test_a_request_and_a_pause_say_who_and_when_by_the_servers_time() -> None:
    """The run is in the history at that time."""
    desk = Desk(-7200.0)
    await desk.add()
    request = await desk.operations.request_run("job")
    assert (request.by, request.owner) == ("operator", "")
    assert request.at == pytest.approx(NOON, abs=2)
    for reason in ("too loud", ""):
        assert await desk.operations.pause("job", reason)
        pause = (await desk.read()).pause
        assert pause is not None
        assert (pause.by, pause.reason) == ("operator", reason)
        assert pause.at == pytest.approx(NOON, abs=2)
        assert await desk.operations.resume("job")
    assert (await desk.read()).requests == (request,)


async def test_a_measurement_leaves_nothing() -> None:
    """It removes its record and those of processes that died, not those of others that measure."""
    desk = Desk(0.0)
    prefix = "schedule/default/clock/"
    for name in ("died", "measures"):
        await desk.store.create(f"{prefix}{name}", {})
    desk.store.times = {f"{prefix}died": NOON - 7200}
    assert await desk.jobs.measure_time() == pytest.approx(NOON, abs=2)
    assert [head.key for head in await desk.store.heads(prefix)] == [f"{prefix}measures"]


async def test_without_any_time_of_the_server_this_machines_counts() -> None:
    """As for reading: there is nothing else to go by."""
    desk = Desk(500.0)
    desk.store.tells_times = False
    assert await desk.jobs.measure_time() == pytest.approx(NOON + 500, abs=2)


@settings(deadline=None)
@given(durations=st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_so_many_of_the_latest_runs_took_at_most_so_long(durations: list[float]) -> None:
    """The smallest duration of which that is so: of half of them, and of 95 %."""
    state = JobState(
        definition=JobDefinition(schedule="@daily"),
        defined_by="",
        last=0,
        statistics=Statistics(durations=tuple(durations)),
    )
    status = build_status("job", state, NOON, None)
    for share, found in ((0.5, status.p50), (0.95, status.p95)):
        assert found in durations
        assert sum(each <= found for each in durations) >= share * len(durations)
        assert sum(each < found for each in durations) < share * len(durations)


@pytest.mark.parametrize("seconds", [-0.5, 0.0, 0.5, 3599.5, 3600.0, 3600.5])
@pytest.mark.parametrize("last", [NOON - 7200, NOON - 3600, NOON])
def test_the_next_runs_are_to_come(last: float, seconds: float) -> None:
    """Of a job that is up to date, and of one that is late."""
    definition = JobDefinition(schedule="@hourly")
    state = JobState(definition=definition, defined_by="", last=int(last))
    now = NOON + seconds
    found = build_status("job", state, now, next_instant(state))
    first = NOON + 3600 * ((max(now, last) - NOON) // 3600 + 1)
    assert found.next_runs == tuple(first + 3600 * number for number in range(5))
    assert found.next_run == first


CHOICES: tuple[str | Sequence[str] | None, ...] = (None, "success", "missed", ["error", "lost"])


async def test_the_history_is_what_a_listing_of_all_entries_shows() -> None:
    """For each status, time, limit and cursor: from the newest to the oldest."""
    desk = Desk(0.0)
    statuses: list[RunStatus] = ["success", "error", "success", "lost", "running"]
    await desk.add()
    for number, status in enumerate(statuses):
        run = ActiveRun(id=f"r{number}", instant=int(NOON) + number, owner="w", started_at=1.0)
        await desk.jobs.history.create_entry("job", run, build_entry(run, status))
    gap = Gap(first=1, last=int(NOON) + 10, count=2, reason="late")
    await desk.jobs.history.write_gap("job", gap)
    whole = await desk.operations.history("job")
    assert [each.scheduled_time - NOON for each in whole] == [10, 4, 3, 2, 1, 0]
    assert [each.status for each in whole] == ["missed", *statuses[::-1]]
    times = (None, NOON - 1, NOON + 2, NOON + 2.5, NOON + 10, NOON + 11)
    starts = [*enumerate(["", *(each.cursor for each in whole)])]
    for choice, since, limit, (start, after) in itertools.product(
        CHOICES, times, (1, 2, 6, 7), starts
    ):
        wanted = [choice] if isinstance(choice, str) else choice
        chosen = [
            each
            for each in whole[start:]
            if (not wanted or each.status in wanted)
            and (since is None or each.scheduled_time >= since)
        ]
        found = await desk.operations.history(
            "job", status=choice, since=since, limit=limit, after=after
        )
        assert found == chosen[:limit], (choice, since, limit, start)


class CrowdedStore(StoreDecorator):
    """Notes how many scans are under way at once."""

    under_way = most = 0

    async def scan(self, prefix: str, **options: Any) -> list[Record]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return await super().scan(prefix, **options)


async def test_the_history_of_many_jobs_is_read_at_once_in_small_groups() -> None:
    """Found: jobs were read one after the other. The newest of all come first."""
    components = Components.system()
    store = CrowdedStore(MemoryStore(components=components))
    jobs = JobStore(lambda: store, "default", components)
    state = JobState(definition=JobDefinition(schedule="@hourly"), defined_by="", last=0)
    names = [f"job{number:02}" for number in range(40)]
    await jobs.create_many(dict.fromkeys(names, state))
    for number, name in enumerate(names):
        for hour in range(3):
            instant = int(NOON) + 3600 * hour + number
            gap = Gap(first=instant, last=instant, count=1, reason="late")
            await jobs.history.write_gap(name, gap)
    operations = JobOperations(jobs, components, "operator")
    newest = await operations.history(limit=50)
    assert [entry.job_name for entry in newest] == names[::-1] + names[:-11:-1]
    assert [entry.scheduled_time for entry in newest[:2]] == [NOON + 7239, NOON + 7238]
    assert 1 < store.most <= 16
    assert await operations.history(limit=5, since=NOON + 7300) == []


@pytest.mark.parametrize("seed", range(12))
async def test_the_history_of_all_jobs_is_the_newest_of_what_each_job_has(seed: int) -> None:
    """Whatever the number of jobs, of entries of a job, the limit, the time and the statuses.

    Found: nobody noticed if the entries of the first sixteen jobs decided how far back the others
    were read, although there were fewer of them than the limit.
    """
    chance = random.Random(seed)
    desk = Desk(0.0)
    state = JobState(definition=JobDefinition(schedule="@hourly"), defined_by="", last=0)
    names = [f"job{number:02}" for number in range(chance.choice((1, 15, 16, 17, 33, 50)))]
    await desk.jobs.create_many(dict.fromkeys(names, state))
    for name in names:
        # Jobs of one batch may be idle for long while those of another one are busy.
        start = int(NOON) + 50 * chance.randrange(4)
        for instant in chance.sample(range(start, start + 60), chance.choice((0, 0, 1, 2, 9))):
            run = ActiveRun(id=f"{name}-{instant}", instant=instant, owner="w", started_at=1.0)
            entry = build_entry(run, chance.choice(get_args(RunStatus)))
            await desk.jobs.history.create_entry(name, run, entry)
    whole = [entry for name in names for entry in await desk.operations.history(name, limit=10_000)]
    whole.sort(key=lambda entry: (-entry.scheduled_time, entry.job_name))
    for choice, since, limit in itertools.product(
        (None, "success", ["missed", "lost"]),
        (None, NOON + 40, NOON + 120),
        (1, 16, len(whole) - 1, len(whole), len(whole) + 1, 10_000),
    ):
        wanted = get_args(RunStatus) if choice is None else choice
        expected = [
            entry
            for entry in whole
            if entry.status in wanted and (since is None or entry.scheduled_time >= since)
        ]
        found = await desk.operations.history(status=choice, since=since, limit=max(limit, 1))
        assert found == expected[: max(limit, 1)], (choice, since, limit)


def test_the_status_of_a_job_has_all_that_is_known_of_it() -> None:
    """As it holds now, with an operator's changes."""
    run = ActiveRun(id="r9", instant=int(NOON), owner="w.1", started_at=NOON + 1)
    last = LastRun(
        id="r8",
        instant=int(NOON) - 3600,
        status="timeout",
        started_at=NOON - 3590,
        ended_at=NOON - 3530,
        error="it took long",
    )
    numbers = Statistics(
        runs=8,
        successes=6,
        failures=2,
        missed=3,
        skipped=4,
        durations=(4.0, 1.0, 3.0, 2.0),
        last_run=last,
        last_success=NOON - 7200,
        last_failure=NOON - 3530,
    )
    definition = JobDefinition(
        schedule="@daily", timezone="Europe/Berlin", description="Cleans up.", queue="mails"
    )
    state = JobState(
        definition=definition,
        defined_by="w7",
        last=int(NOON),
        edits={"schedule": "0 * * * *", "timezone": "UTC"},
        pause=JobPause(at=NOON, by="me", reason="too loud"),
        running=(run,),
        queued=(int(NOON) + 60, int(NOON) + 120),
        statistics=numbers,
    )
    status = build_status("job", state, NOON, int(NOON) + 3600, upcoming=2)
    assert msgspec.structs.asdict(status) == {
        "name": "job",
        "schedule": "0 * * * *",
        "timezone": "UTC",
        "in_words": "At the start of every hour",
        "description": "Cleans up.",
        "queue": "mails",
        "enabled": False,
        "pause": state.pause,
        "edits": state.edits,
        "running": (run,),
        "queued": state.queued,
        "last_run": NOON - 3590,
        "last_status": "timeout",
        "last_error": "it took long",
        "last_success": NOON - 7200,
        "last_failure": NOON - 3530,
        "next_run": NOON + 3600,
        "next_runs": (NOON + 3600, NOON + 7200),
        "runs": 8,
        "successes": 6,
        "failures": 2,
        "missed": 3,
        "skipped": 4,
        "success_rate": 0.75,
        "p50": 2.0,
        "p95": 4.0,
        "defined_by": "w7",
    }
    assert status.is_running
    assert all(status[name] == value for name, value in msgspec.structs.asdict(status).items())


def test_the_status_of_a_job_that_never_ran_is_empty() -> None:
    """There is no rate, and no duration."""
    state = JobState(definition=JobDefinition(schedule="@daily"), defined_by="w7", last=0)
    status = build_status("job", state, NOON, None)
    assert (status.enabled, status.is_running, status.running, status.queued) == (
        True,
        False,
        (),
        (),
    )
    assert (status.last_run, status.last_status, status.last_error) == (None, "", "")
    assert (status.last_success, status.last_failure, status.success_rate) == (None, None, None)
    assert (status.next_run, status.next_runs, status.p50, status.p95) == (None, (), None, None)


async def test_an_unknown_job_is_told_with_those_that_exist() -> None:
    """Up to 20 of them, and the nearest name; removed ones are not there."""
    desk = Desk(0.0)
    state = JobState(definition=JobDefinition(schedule="@hourly"), defined_by="", last=int(NOON))
    names = [f"job{number:02}" for number in range(23)]
    await desk.jobs.create_many(dict.fromkeys(names, state))
    for name in ("job00", "job22"):
        await desk.operations.remove(name)
    calls: Sequence[Callable[[str], Awaitable[object]]] = (
        desk.operations.status,
        desk.operations.pause,
        desk.operations.resume,
        lambda name: desk.operations.edit(name, SLOWER),
        desk.operations.remove,
        desk.operations.request_run,
    )
    for call in calls:
        for name, hint in (("job22", "job21"), ("jobb07", "job07"), ("zzz", None)):
            with pytest.raises(NotFound) as caught:
                await call(name)
            error = caught.value
            assert (error.kind, error.name, error.known) == ("job", name, tuple(names[1:21]))
            assert (error.hint is None) is (hint is None)
            assert error.hint not in {"job00", "job22"}
    assert [each.name for each in await desk.operations.list_jobs()] == names[1:22]


async def test_the_history_of_a_removed_job_stays() -> None:
    """Alone, and among those of all jobs."""
    desk = Desk(0.0)
    await desk.add()
    gap = Gap(first=60, last=60, count=1, reason="late")
    await desk.jobs.history.write_gap("job", gap)
    await desk.operations.remove("job")
    (entry,) = await desk.operations.history("job")
    assert (entry.job_name, entry.scheduled_time) == ("job", 60)
    assert await desk.operations.history() == [entry]
    with pytest.raises(NotFound):
        await desk.operations.history("other")


async def test_a_removed_job_is_added_again_by_the_next_start_of_its_code() -> None:
    """The version of the code is not taken for defined any more; one that is refused stays."""
    desk = Desk(0.0)
    await desk.add()
    for _ in range(3):
        await desk.jobs.code.begin_generation()
    await desk.jobs.code.write_defined("c1", 3)
    with pytest.raises(NotFound):
        await desk.operations.remove("other")
    assert (await desk.jobs.code.read_defined()).code == "c1"
    await desk.operations.remove("job")
    defined = await desk.jobs.code.read_defined()
    assert (defined.code, defined.generation) == ("", 3)


async def test_entries_of_one_instant_are_in_the_order_of_their_jobs() -> None:
    """However many jobs are read at once."""
    desk = Desk(0.0)
    state = JobState(definition=JobDefinition(schedule="@hourly"), defined_by="", last=0)
    names = [f"job{number:02}" for number in range(40)]
    await desk.jobs.create_many(dict.fromkeys(names, state))
    gap = Gap(first=60, last=60, count=1, reason="late")
    for name in names:
        await desk.jobs.history.write_gap(name, gap)
    late = msgspec.structs.replace(gap, first=120, last=120)
    await desk.jobs.history.write_gap("job39", late)
    for limit in (1, 2, 20, 40, 41, 50):
        found = await desk.operations.history(limit=limit)
        assert [each.job_name for each in found] == ["job39", *names][:limit]


@pytest.mark.parametrize(
    ("options", "is_accepted"),
    [
        ({"limit": 1}, True),
        ({"limit": 10_000}, True),
        ({"limit": 0}, False),
        ({"limit": 10_001}, False),
        ({"limit": True}, False),
        ({"since": 0}, True),
        ({"since": -1.5}, True),
        ({"since": 1e12}, True),
        ({"since": -1e12}, True),
        ({"since": 1.1e12}, False),
        ({"since": -(10**400)}, False),
        ({"since": float("inf")}, False),
        ({"since": True}, False),
        ({"status": "running"}, True),
        ({"status": ("lost", "skipped")}, True),
        ({"status": "done"}, False),
        ({"status": ["lost", "done"]}, False),
        ({"job": "job", "after": "00000000001"}, True),
        ({"job": "job", "after": "00000000001-gap-5"}, True),
        ({"job": "job", "after": "0000000001"}, False),
        ({"job": "job", "after": "00000000001x"}, False),
        ({"after": "00000000001"}, False),
    ],
)
async def test_a_question_about_the_history_has_bounds(
    options: dict[str, Any], is_accepted: bool
) -> None:
    """From the least to the most that is useful."""
    desk = Desk(0.0)
    await desk.add()
    if is_accepted:
        assert await desk.operations.history(**options) == []
    else:
        with pytest.raises(Invalid) as caught:
            await desk.operations.history(**options)
        assert caught.value.field in options
