"""Removal of old claims: a date that is still worked on keeps all of them."""

import itertools
from datetime import UTC, date, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync import Components
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.retention import forget, record_date
from jobsync.stores.memory import MemoryStore

DAY = 86_400.0
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
FIRST = date(2026, 1, 1)

_numbers = itertools.count()


@settings(deadline=None)
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
        if now - used < (days - 1 / 24) * DAY or now - end < (days - 1) * DAY:
            assert is_kept
        if now - used > (days + 1 / 24) * DAY and now - end > days * DAY:
            assert not is_kept
