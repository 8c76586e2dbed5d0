"""Schedules where clocks change: every zone's changes, against an oracle that walks each minute."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
from cron_oracle import Clock, find_changes, list_firings

from jobsync.core.cron import Schedule

DAY = 86400
START = int(datetime(2025, 1, 1, tzinfo=UTC).timestamp())
END = int(datetime(2036, 1, 1, tzinfo=UTC).timestamp())
SAMPLE_END = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
SAMPLE = {
    "Africa/Cairo": "at midnight in spring",
    "Africa/Casablanca": "around Ramadan",
    "America/Havana": "midnight occurs twice",
    "America/New_York": "at 02:00",
    "America/Santiago": "south, at midnight",
    "Antarctica/Troll": "by two hours",
    "Asia/Beirut": "the last hour of a day occurs twice",
    "Australia/Lord_Howe": "by half an hour",
    "Europe/Berlin": "at 02:00 and 03:00",
    "Pacific/Chatham": "an odd offset",
}
EXPRESSIONS = (
    "30 1 * * *",
    "30 2 * * *",
    "*/15 * * * *",
    "0 0 * * *",
    "45 23 * * *",
    "0 * * * *",
    "10,40 0-3 * * *",
    "20 30 2 * * *",
    "5,50 * 2 * * *",
)


def test_each_change_of_each_zone(full_scale: bool, proof: Any) -> None:
    """Three days around a change of the clock have the firings of the documented rule."""
    zones, end = (_list_distinct(), END) if full_scale else (list(SAMPLE), SAMPLE_END)
    changes = 0
    for name in zones:
        found = list(find_changes(ZoneInfo(name), START, end))
        for change, _ in found:
            _compare(name, change - 36 * 3600, change + 36 * 3600)
        changes += len(found)
        proof.tell(f"{name}: {len(found)} changes")
    assert changes >= (len(zones) if full_scale else 2 * len(SAMPLE))
    proof.record("schedules at clock changes", zones=len(zones), changes=changes)


def _list_distinct() -> list[str]:
    """Return one zone of all that change at the same instants by the same time."""
    names: dict[tuple[tuple[int, timedelta], ...], str] = {}
    for name in sorted(available_timezones() - {"localtime"}):
        if found := tuple(find_changes(ZoneInfo(name), START, END)):
            # The local time matters as well: 02:30 may or may not be skipped.
            local = datetime.fromtimestamp(found[0][0], ZoneInfo(name)).utcoffset()
            assert local is not None
            names.setdefault(((0, local), *found), name)
    return list(names.values())


def _compare(zone: str, start: int, end: int) -> None:
    clock = Clock(ZoneInfo(zone), start, end)
    for text in EXPRESSIONS:
        schedule = Schedule.parse(text, zone)
        wanted = list_firings(text, clock)
        count = len(wanted) + 1
        found = schedule.between(start - 1, end - 1, count)
        assert found == wanted, f"{text} in {zone} from {start}"
        found = schedule.newest_between(start - 1, end - 1, count)
        assert found == wanted, f"{text} in {zone}, backwards, from {start}"


def test_changes_are_rare_and_small(full_scale: bool) -> None:
    """A search relies on it: two changes are over a day apart, and none is by more than a day."""
    zones, end = (_list_distinct(), END) if full_scale else (list(SAMPLE), SAMPLE_END)
    for name in zones:
        zone = ZoneInfo(name)
        seen = [
            (instant, datetime.fromtimestamp(instant, zone).utcoffset() or timedelta())
            for instant in range(START, end, 1800)
        ]
        changes = [(now, new - old) for (_, old), (now, new) in pairwise(seen) if new != old]
        assert len(changes) >= 1
        assert all(abs(size) <= timedelta(days=1) for _, size in changes)
        assert all(later - earlier > DAY + 1800 for (earlier, _), (later, _) in pairwise(changes))


def _list_local(text: str, zone: str, day: datetime) -> list[str]:
    start = int(day.timestamp())
    schedule = Schedule.parse(text, zone)
    found = schedule.between(start, start + 23 * 3600, 200)
    return [f"{schedule.in_zone(instant):%H:%M:%S%z}" for instant in found]


SPRING = datetime(2026, 3, 28, 23, 30, tzinfo=UTC)
AUTUMN = datetime(2026, 10, 24, 22, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "spring", "autumn"),
    [
        ("30 1 * * *", ["01:30:00+0100"], ["01:30:00+0200"]),
        ("30 2 * * *", ["03:00:00+0200"], ["02:30:00+0200"]),
        ("20 30 2 * * *", ["03:00:20+0200"], ["02:30:20+0200"]),
        (
            "0,40 10,50 2 * * *",
            ["03:00:00+0200", "03:00:40+0200"],
            [f"02:{m}:{s}+0200" for m in (10, 50) for s in ("00", "40")],
        ),
        ("0 2,3 * * *", ["03:00:00+0200"], ["02:00:00+0200", "03:00:00+0100"]),
        ("*/30 2 * * *", [], [f"02:{m}:00+0{z}00" for z in "21" for m in ("00", "30")]),
    ],
)
def test_berlin(text: str, spring: list[str], autumn: list[str]) -> None:
    """The examples of the documentation, and their neighbours."""
    assert _list_local(text, "Europe/Berlin", SPRING) == spring
    assert _list_local(text, "Europe/Berlin", AUTUMN) == autumn


def test_elapsed_time_has_no_hole() -> None:
    """An expression with wildcards fires at the same distance on the days of a change."""
    for start in (SPRING, AUTUMN):
        first = int(start.timestamp())
        found = Schedule.parse("*/15 * * * *", "Europe/Berlin").between(first, first + DAY, 200)
        assert {later - earlier for earlier, later in pairwise(found)} == {900}


def test_a_time_that_is_shown_again_was_reached_before() -> None:
    """In the second of two repeated hours, the latest firing is the last one of the first hour."""
    start = int(datetime(2026, 10, 25, tzinfo=UTC).timestamp())
    schedule = Schedule.parse("10,50 30,50 2 * * *", "Europe/Berlin")
    first = [start + minute * 60 + second for minute in (30, 50) for second in (10, 50)]
    for instant in range(start + 3600, start + 7200, 300):
        assert schedule.latest_until(instant) == first[-1]
        assert schedule.newest_between(start, instant, 9) == first
        assert schedule.next_after(instant) == first[0] + DAY + 3600


def test_a_rare_time_that_occurs_twice() -> None:
    """A search that leaps over months still finds both hours of a day, from both sides."""
    schedule = Schedule.parse("*/30 2 25 10 *", "Europe/Berlin")
    start = int(datetime(2026, 10, 25, tzinfo=UTC).timestamp())
    wanted = [start + 1800 * step for step in range(4)]
    for days in (1, 2, 3, 30, 200, 300):
        before, after = start - days * DAY, start + days * DAY
        assert schedule.between(before, after, 9) == wanted
        assert schedule.newest_between(before, after, 9) == wanted
        assert schedule.next_after(before) == wanted[0]
        assert schedule.latest_until(after) == wanted[-1]


def test_a_skip_that_ends_within_a_minute() -> None:
    """Liberia skipped 00:00:00 to 00:44:30: what was due fires at the next whole minute."""
    start = int(datetime(1972, 1, 7, 0, 45, tzinfo=UTC).timestamp())
    schedule = Schedule.parse("20 5,44 0 7 1 *", "Africa/Monrovia")
    assert schedule.in_zone(start - 31).isoformat() == "1972-01-06T23:59:59-00:44:30"
    assert schedule.between(start - DAY, start + DAY, 9) == [start + 20]
    assert schedule.newest_between(start - DAY, start + DAY, 9) == [start + 20]


@pytest.mark.parametrize("second", [0, 29, 30, 59])
def test_a_skip_that_ends_within_a_minute_is_found_until_its_last_second(second: int) -> None:
    """The search may begin at any moment before the firing, long after the skip."""
    start = int(datetime(1972, 1, 7, 0, 45, tzinfo=UTC).timestamp())
    schedule = Schedule.parse(f"{second} 5 0 7 1 *", "Africa/Monrovia")
    due = start + second
    for instant in (start - 31, start - 1, due - 1):
        assert schedule.next_after(instant) == due
    assert schedule.next_after(due) != due
    assert schedule.latest_until(due) == due
    assert schedule.latest_until(due - 1) != due


def test_a_day_that_was_skipped() -> None:
    """Samoa skipped 30 December 2011: a fixed time of it fires at the midnight that follows."""
    midnight = int(datetime(2011, 12, 30, 10, tzinfo=UTC).timestamp())
    fixed = Schedule.parse("0 12 30 12 *", "Pacific/Apia")
    assert fixed.in_zone(midnight).isoformat() == "2011-12-31T00:00:00+14:00"
    assert fixed.between(midnight - DAY, midnight + DAY, 9) == [midnight]
    shown = Schedule.parse("*/10 12 30 12 *", "Pacific/Apia")
    assert shown.between(midnight - DAY, midnight + DAY, 9) == []
    assert shown.newest_between(midnight - DAY, midnight + DAY, 9) == []
