"""A second opinion on cron: reads expressions and clocks by itself, minute by minute.

It shares nothing with `jobsync.core.cron` or its library. It walks through real time, looks at the
local clock of each minute, and applies the documented rule:

- minute and hour both fixed: a local time fires when the clock first reaches or passes it;
- otherwise: a minute fires if the clock shows a matching time.

It is slow, and right only where zones change at whole minutes: from 1973 on.
"""

from calendar import monthrange
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

__all__ = ["Clock", "Matcher", "find_changes", "list_firings"]

MINUTE = 60
DAY = 86400
MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


def _number(text: str) -> int:
    if text in MONTHS:
        return MONTHS.index(text) + 1
    return WEEKDAYS.index(text) if text in WEEKDAYS else int(text)


def _list_values(field: str, low: int, high: int) -> set[int]:
    """Return the numbers that a field means; parts with letters or `#` mean none."""
    values: set[int] = set()
    for part in field.split(","):
        if part in {"L", "LW"} or "#" in part or (part[-1] == "L" and part[:-1].isdigit()):
            continue
        body, _, step = part.partition("/")
        if body == "*":
            first, last = low, high
        elif "-" in body:
            first, last = (_number(end) for end in body.split("-"))
        else:
            first = _number(body)
            last = high if step else first
        values |= set(range(first, last + 1, int(step or 1)))
    return values


class Matcher:
    """An expression of five or six fields, asked about one local minute at a time."""

    def __init__(self, text: str) -> None:
        fields = text.upper().split()
        second = fields.pop(0) if len(fields) == 6 else "0"
        minute, hour, self._day, month, self._weekday = fields
        self.is_fixed = minute[0] != "*" and hour[0] != "*"
        self.seconds = sorted(_list_values(second, 0, 59))
        self._minutes = _list_values(minute, 0, 59)
        self._hours = _list_values(hour, 0, 23)
        self._days = _list_values(self._day, 1, 31)
        self._months = _list_values(month, 1, 12)
        self._weekdays = {value % 7 for value in _list_values(self._weekday, 0, 7)}
        self.matches_day = cache(self._matches_day)

    def matches(self, shown: datetime) -> bool:
        """Whether a local minute matches."""
        return (
            shown.minute in self._minutes
            and shown.hour in self._hours
            and self.matches_day(shown.year, shown.month, shown.day)
        )

    def _matches_day(self, year: int, month: int, day: int) -> bool:
        is_day, is_weekday = self._fits_month(year, month, day), self._fits_week(year, month, day)
        if self._day[0] == "*" or self._weekday[0] == "*":
            return month in self._months and is_day and is_weekday
        return month in self._months and (is_day or is_weekday)

    def _fits_month(self, year: int, month: int, day: int) -> bool:
        length = monthrange(year, month)[1]
        work = [
            d for d in range(1, length + 1) if datetime(year, month, d, tzinfo=UTC).weekday() < 5
        ]
        parts = self._day.split(",")
        return (
            day in self._days
            or ("L" in parts and day == length)
            or ("LW" in parts and day == work[-1])
        )

    def _fits_week(self, year: int, month: int, day: int) -> bool:
        weekday = datetime(year, month, day, tzinfo=UTC).isoweekday() % 7
        if weekday in self._weekdays:
            return True
        for part in self._weekday.split(","):
            name, _, nth = part.partition("#")
            if nth and _number(name) % 7 == weekday and (day - 1) // 7 + 1 == int(nth):
                return True
            if part[-1] == "L" and int(part[:-1]) % 7 == weekday:
                return day + 7 > monthrange(year, month)[1]
        return False


class Clock:
    """What a zone's clock shows in each minute from `start` to `end`, and two days before."""

    def __init__(self, zone: ZoneInfo, start: int, end: int) -> None:
        self.start = start
        first = (start - 2 * DAY) // MINUTE * MINUTE
        self.minutes = [
            (instant, datetime.fromtimestamp(instant, zone).replace(tzinfo=None, fold=0))
            for instant in range(first, end, MINUTE)
        ]
        self.end = end


def list_firings(text: str, clock: Clock) -> list[int]:
    """Return the instants from `clock.start` to before `clock.end`."""
    matcher = Matcher(text)
    minutes = _list_reached(matcher, clock) if matcher.is_fixed else _list_shown(matcher, clock)
    found = (minute + second for minute in minutes for second in matcher.seconds)
    return [instant for instant in found if clock.start <= instant < clock.end]


def _list_shown(matcher: Matcher, clock: Clock) -> Iterator[int]:
    return (instant for instant, shown in clock.minutes if matcher.matches(shown))


def _list_reached(matcher: Matcher, clock: Clock) -> Iterator[int]:
    latest = clock.minutes[0][1] - timedelta(minutes=1)
    for instant, shown in clock.minutes:
        reached = []
        while latest < shown:
            latest += timedelta(minutes=1)
            reached.append(latest)
        if any(matcher.matches(minute) for minute in reached):
            yield instant


def find_changes(zone: ZoneInfo, start: int, end: int) -> Iterable[tuple[int, timedelta]]:
    """Return when the clock is changed, to the minute, and by how much."""

    def look(instant: int) -> timedelta:
        offset = datetime.fromtimestamp(instant, zone).utcoffset()
        assert offset is not None
        return offset

    before = look(start)
    for day in range(start + DAY, end + DAY, DAY):
        if (after := look(day)) != before:
            minutes = range(day - DAY, day + 1, MINUTE)
            yield next(minute for minute in minutes if look(minute) != before), after - before
            before = after
