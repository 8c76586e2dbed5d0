"""Removal of old claims: a date that is still worked on keeps all of them."""

import itertools
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobsync import Components, Unavailable
from jobsync.core.trust import Timing
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord, Stage, read_node_record
from jobsync.jobs.retention import WorkDate, forget, record_date
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

DAY = 86_400.0
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
FIRST = date(2026, 1, 1)

_numbers = itertools.count()


@settings(deadline=None)
@example(uses=[(0, 0.0)], days=1, at=1.5)
@example(uses=[(0, 0.0)], days=1, at=2.0)
@example(uses=[(0, 0.9), (1, 0.9)], days=2, at=3.5)
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
    await forget(store, keys, lambda _: None, now=now, days=days)
    for day, used in latest.items():
        is_kept = bool(await store.heads(keys.claims(day)))
        end = datetime.combine(day, datetime.min.time(), UTC).timestamp() + DAY
        # A use is recorded to the hour.
        if now - used < days * DAY or now - end < days * DAY:
            assert is_kept
        if now - used > (days + 1.01 / 24) * DAY and now - end >= days * DAY:
            assert not is_kept


async def test_a_node_records_its_date_every_six_hours() -> None:
    """And at its start: however long it works on a date, the claims are kept."""
    store, keys = MemoryStore(f"retention-{next(_numbers)}", Components.system()), JobKeys("app")
    work_date = WorkDate(store, keys, FIRST)
    for hours, recorded in ((0, 0), (5.9, 0), (6, 6), (6.1, 6), (11.9, 6), (30, 30), (36.5, 36.5)):
        await work_date.record(START + hours * DAY / 24)
        record = await store.get(keys.work_date(FIRST))
        assert record is not None
        assert record.value == {"used": START + recorded * DAY / 24}


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
        await forget(store, keys, lambda _: None, now=now, days=10)
    await forget(store, keys, lambda _: None, now=now, days=10)
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
    node = NodeRecord(
        name="n",
        incarnation="w.1",
        stage=stage,
        applied=0,
        is_observer=False,
        created=now - age * DAY,
        host="",
        pid=1,
    )
    await store.create(keys.node("n"), msgspec.to_builtins(node))
    await store.create(keys.node("damaged"), {})
    if session is not None:
        timing = msgspec.to_builtins(Timing(heartbeat=5.0, timeout=15.0))
        record = {"worker": "w", "state": session, "beat": 1, "timing": timing}
        await store.create("session/w.1", record)
    log = CorruptionLog("test", Components.system().events)
    found = await forget(
        store, keys, lambda record: log.read(read_node_record, record), now=now, days=10
    )
    is_forgotten = age > 10 and (stage == "left" or session != "live")
    left = [head.key.rpartition("/")[2] for head in await store.heads(keys.nodes)]
    assert (found.nodes, left) == (int(is_forgotten), ["damaged", *([] if is_forgotten else ["n"])])
