"""Removal of old claims: a date that is still worked on keeps all of them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest
from chance import FakeClock
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobsync import Components, Invalid, Unavailable
from jobsync.core.codec import Json
from jobsync.core.trust import Timing
from jobsync.events import Events
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord, Stage
from jobsync.jobs.retention import Forgotten, WorkDate, forget, record_date
from jobsync.stores.contract import Change, Outcome, Put, Record, Store
from jobsync.stores.corruption_log import CorruptionLog, RecordSetAside
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

DAY = 86_400.0
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
FIRST = date(2026, 1, 1)

_numbers = itertools.count()


def describe_node(stage: Stage, created: float) -> Json:
    """The record of a node."""
    node = NodeRecord(
        name="n",
        incarnation="w.1",
        stage=stage,
        applied=0,
        is_observer=False,
        created=created,
        host="",
        pid=1,
    )
    return msgspec.to_builtins(node)


def open_log(events: Events | None = None) -> CorruptionLog:
    """The report of what cannot be read."""
    return CorruptionLog("test", events or Events())


@settings(deadline=None)
@example(uses=[(0, 0.0)], days=1, at=1.5)
@example(uses=[(0, 0.0)], days=1, at=2.0)
@example(uses=[(0, 0.9), (1, 0.9)], days=2, at=3.5)
@example(uses=[(0, 5.0), (0, 5.04)], days=1, at=6.02)
@given(
    uses=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 30)), max_size=8),
    days=st.integers(1, 10),
    at=st.floats(0, 40),
)
async def test_a_date_is_forgotten_after_its_last_use(
    uses: list[tuple[int, float]], days: int, at: float
) -> None:
    """However often and in whatever order dates are used; and not before they are over."""
    store = MemoryStore(f"retention-{next(_numbers)}", Components.system())
    keys = JobKeys("app")
    latest: dict[date, float] = {}
    for number, when in sorted(uses, key=lambda use: use[1]):
        day, now = FIRST + timedelta(days=number), START + when * DAY
        await record_date(store, keys, day, now)
        latest[day] = now
        if not await store.heads(keys.claims(day)):
            await store.create(f"{keys.claims(day)}task", {})
    now = START + max([at, *(when for _, when in uses)]) * DAY
    await forget(store, keys, open_log(), now=now, days=days)
    for day, used in latest.items():
        is_kept = bool(await store.heads(keys.claims(day)))
        end = datetime.combine(day, datetime.min.time(), UTC).timestamp() + DAY
        # A node records a use to the hour, and every six hours.
        if now - used < days * DAY or now - end < days * DAY:
            assert is_kept
        if now - used > (days + 7.01 / 24) * DAY and now - end >= days * DAY:
            assert not is_kept


async def test_a_node_records_its_date_every_six_hours() -> None:
    """And at its start: however long it works on a date, the claims are kept."""
    store, keys = MemoryStore(f"retention-{next(_numbers)}", Components.system()), JobKeys("app")
    work_date = WorkDate(store, keys, FIRST, open_log())
    for hours, recorded in ((0, 0), (5.9, 0), (6, 6), (6.1, 6), (11.9, 6), (30, 30), (36.5, 36.5)):
        await work_date.record(START + hours * DAY / 24)
        record = await store.get(keys.work_date(FIRST))
        assert record is not None
        assert record.value == {"used": START + recorded * DAY / 24}


@pytest.mark.parametrize("joined", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("worked", [5.9, 6.0, 11.9, 29.0, 35.9])
async def test_a_date_is_kept_for_days_after_its_last_hour(worked: float, joined: float) -> None:
    """Found: what a node had done in the hours since its last record was forgotten a day later.

    The second node that works on it records less, because the first has recorded the same hour.
    """
    store, keys = MemoryStore(f"retention-{next(_numbers)}", Components.system()), JobKeys("app")
    first, second = (WorkDate(store, keys, FIRST, open_log()) for _ in range(2))
    await first.record(START)
    for minutes in range(int(joined * 60), int(worked * 60) + 1):
        await second.record(START + minutes * 60)
    await store.create(keys.claim(FIRST, "task"), {})
    last = max(START + worked * 3600, START + DAY)
    assert (await forget(store, keys, open_log(), now=last + 1.99 * DAY, days=2)).claims == 0
    assert (await forget(store, keys, open_log(), now=last + 3 * DAY, days=2)).claims == 1


@pytest.mark.parametrize(
    ("hours", "is_recorded"), [(-1.0, False), (0.5, False), (1.0, False), (1.1, True), (23.0, True)]
)
async def test_each_start_is_recorded_to_the_hour(hours: float, is_recorded: bool) -> None:
    """A start within an hour of the last is not; the time never moves back."""
    store, keys = MemoryStore(f"retention-{next(_numbers)}", Components.system()), JobKeys("app")
    later = START + hours * DAY / 24
    await record_date(store, keys, FIRST, START)
    await record_date(store, keys, FIRST, later)
    record = await store.get(keys.work_date(FIRST))
    assert record is not None
    assert record.value == {"used": later if is_recorded else START}


@pytest.mark.parametrize("days", [0.99, 0.0, -1.0, math.nan, math.inf, 1_000_001, True, "5", None])
async def test_less_than_a_day_is_refused(days: Any) -> None:
    """Also what is no number of days at all; and nothing is removed."""
    store, keys = MemoryStore(f"retention-{next(_numbers)}", Components.system()), JobKeys("app")
    await record_date(store, keys, FIRST, START)
    with pytest.raises(Invalid, match="older_than_days"):
        await forget(store, keys, open_log(), now=START + 40 * DAY, days=days)
    assert len(await store.heads(keys.dates)) == 1


async def test_another_form_of_a_date_is_set_aside() -> None:
    """Found: `20260101` was removed as old, and its claims are those of no such date."""
    store, keys = MemoryStore(f"retention-{next(_numbers)}", Components.system()), JobKeys("app")
    await record_date(store, keys, FIRST, START)
    await store.create(f"{keys.dates}20260101", {"used": START})
    done = await forget(store, keys, open_log(), now=START + 40 * DAY, days=30)
    assert done.dates == 1
    assert [head.key for head in await store.heads(keys.dates)] == [f"{keys.dates}20260101"]


class SilentStore(StoreDecorator):
    """Does not answer at first."""

    is_silent = True

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        if self.is_silent:
            raise Unavailable(self.name, "silent")
        return await self.inner.get_many(keys, tombstones=tombstones)


class OvertakenStore(StoreDecorator):
    """Another process writes some records once, just before they are written or deleted here."""

    def __init__(self, inner: Store, overtaken: Mapping[str, Json]) -> None:
        super().__init__(inner)
        self.overtaken = dict(overtaken)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        for change in changes:
            if (value := self.overtaken.pop(change.key, None)) is not None:
                await self.inner.write([Put(change.key, value, change.base)])
        return await self.inner.write(changes)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_start_is_recorded_although_another_node_was_quicker(is_first: bool) -> None:
    """Also the first of a date: the other's clock may be far behind."""
    keys = JobKeys("app")
    inner = MemoryStore(f"retention-{next(_numbers)}", Components.system())
    store = OvertakenStore(inner, {keys.work_date(FIRST): {"used": START + DAY}})
    if not is_first:
        await record_date(inner, keys, FIRST, START)
    await record_date(store, keys, FIRST, START + 2 * DAY)
    record = await store.get(keys.work_date(FIRST))
    assert record is not None
    assert record.value == {"used": START + 2 * DAY}


async def test_a_start_that_could_not_be_recorded_is_recorded_by_the_next() -> None:
    """However soon: the hours between two records are counted from what is recorded."""
    keys = JobKeys("app")
    store = SilentStore(MemoryStore(f"retention-{next(_numbers)}", Components.system()))
    work_date = WorkDate(store, keys, FIRST, open_log())
    with pytest.raises(Unavailable):
        await work_date.record(START)
    store.is_silent = False
    await work_date.record(START + 1)
    record = await store.get(keys.work_date(FIRST))
    assert record is not None
    assert record.value == {"used": START + 1}


async def test_a_name_that_is_taken_at_this_moment_is_not_forgotten() -> None:
    """Nor counted; the others are."""
    keys, now = JobKeys("app"), START + 40 * DAY
    old, new = describe_node("left", START), describe_node("ready", now)
    inner = MemoryStore(f"retention-{next(_numbers)}", Components.system())
    for name in ("a", "b", "c"):
        await inner.create(keys.node(name), old)
    store = OvertakenStore(inner, {keys.node("b"): new})
    found = await forget(store, keys, open_log(), now=now, days=10)
    assert found == Forgotten(dates=0, claims=0, nodes=2, rebalances=0)
    assert {r.key: r.value for r in await store.scan(keys.nodes)} == {keys.node("b"): new}


class FailingStore(StoreDecorator):
    """Refuses one of the removals, counted from 0."""

    refused = -1

    async def drop(self, keys: Sequence[str]) -> None:
        self.refused -= 1
        if self.refused == -1:
            raise Unavailable(self.name, "silent")
        await self.inner.drop(keys)


@pytest.mark.parametrize("refused", range(6))
async def test_a_removal_that_was_cut_off_is_completed_by_the_next(refused: int) -> None:
    """No claims are left without the record of their date, by which they would be found."""
    store = FailingStore(MemoryStore(f"retention-{next(_numbers)}", Components.system()))
    keys, days = JobKeys("app"), [FIRST + timedelta(days=number) for number in range(3)]
    for day in days:
        await record_date(store, keys, day, START)
        await store.create(keys.claim(day, "task"), {})
    now = START + 40 * DAY
    store.refused = refused
    with pytest.raises(Unavailable):
        await forget(store, keys, open_log(), now=now, days=10)
    await forget(store, keys, open_log(), now=now, days=10)
    assert [await store.heads(keys.claims(day)) for day in days] == [[], [], []]
    assert await store.heads(keys.dates) == []


@pytest.mark.parametrize("age", [9.9, 10.1, 30.0])
@pytest.mark.parametrize("session", [None, "live", "dead"])
@pytest.mark.parametrize("stage", ["joining", "ready", "leaving", "left"])
async def test_a_node_is_forgotten_if_it_joined_before_and_is_gone(
    stage: Stage, session: str | None, age: float
) -> None:
    """It has left, or its session is dead or removed; a damaged record is left alone."""
    store = MemoryStore(f"retention-{next(_numbers)}", Components.system())
    keys, now = JobKeys("app"), START + 40 * DAY
    await store.create(keys.node("n"), describe_node(stage, now - age * DAY))
    await store.create(keys.node("damaged"), {})
    if session is not None:
        timing = msgspec.to_builtins(Timing(heartbeat=5.0, timeout=15.0))
        record = {"worker": "w", "state": session, "beat": 1, "timing": timing}
        await store.create("session/w.1", record)
    found = await forget(store, keys, open_log(), now=now, days=10)
    is_forgotten = age > 10 and (stage == "left" or session != "live")
    left = [head.key.rpartition("/")[2] for head in await store.heads(keys.nodes)]
    assert (found.nodes, left) == (int(is_forgotten), ["damaged", *([] if is_forgotten else ["n"])])


DAMAGED_DATES = {
    "no time": {},
    "a text": {"used": "yesterday"},
    "no time at all": {"used": None},
    "a list": [START],
    "nothing": None,
}


@pytest.mark.parametrize("damaged", DAMAGED_DATES.values(), ids=DAMAGED_DATES)
async def test_a_date_whose_record_cannot_be_read_keeps_its_claims(damaged: Json) -> None:
    """A node works on it all the same; it is reported, left as it is, and hides no other."""
    store = MemoryStore(f"retention-{next(_numbers)}", Components.system())
    keys, events = JobKeys("app"), Events()
    reported: list[str] = []

    @events.on(RecordSetAside.name)
    def report(event: RecordSetAside) -> None:
        reported.append(event.key)

    days = [FIRST + timedelta(days=number) for number in range(3)]
    for day in days:
        await store.create(keys.claim(day, "task"), {})
    await store.create(keys.work_date(days[1]), damaged)
    await store.create(f"{keys.dates}odd", {"used": START})
    for day in days:
        work_date = WorkDate(store, keys, day, open_log(events))
        await work_date.record(START)
        await work_date.record(START + 1)
    assert reported == [keys.work_date(days[1])]
    found = await forget(store, keys, open_log(events), now=START + 40 * DAY, days=10)
    assert (found.dates, found.claims) == (2, 2)
    assert reported[1:] == [keys.work_date(days[1]), f"{keys.dates}odd"]
    assert [head.key for head in await store.heads(keys.dates)] == reported[1:]
    kept = await store.get(keys.work_date(days[1]))
    assert kept is not None
    assert kept.value == damaged
    assert len(await store.heads(keys.claims(days[1]))) == 1


async def test_what_is_forgotten_is_counted_by_kind_for_one_fleet() -> None:
    """Each kind by its own age; what other fleets have is kept."""
    clock = FakeClock()
    clock.wall_seconds = START
    components = msgspec.structs.replace(Components.system(), clock=clock)
    store = MemoryStore(f"retention-{next(_numbers)}", components)
    fleets = JobKeys("app"), JobKeys("other")
    for keys in fleets:
        for number in range(2):
            day = FIRST + timedelta(days=number)
            await record_date(store, keys, day, START)
            for task in ("a", "b", "c"):
                await store.create(keys.claim(day, task), {})
        for number in range(3):
            await store.create(keys.node(f"n{number}"), describe_node("left", START))
        await store.append(keys.rebalances, [{}, {}, {}, {}])
    for age, expected in (
        (9.9, Forgotten(dates=0, claims=0, nodes=0, rebalances=0)),
        (13.0, Forgotten(dates=2, claims=6, nodes=3, rebalances=4)),
        (14.0, Forgotten(dates=0, claims=0, nodes=0, rebalances=0)),
    ):
        clock.wall_seconds = START + age * DAY
        found = await forget(store, fleets[0], open_log(), now=clock.wall_seconds, days=10)
        assert found == expected
    left = fleets[1]
    assert [len(await store.heads(left.claims(FIRST))), len(await store.heads(left.nodes))] == [
        3,
        3,
    ]
    assert [len(await store.heads(left.dates)), len(await store.read(left.rebalances))] == [2, 4]
