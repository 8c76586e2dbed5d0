"""The instants at which a cron expression fires in a time zone, forwards and backwards.

When the clocks change:

- An expression whose minute and hour are both fixed (neither field starts with `*`) fires once for
  each local time: when the clock first reaches or passes it. A time that is skipped in spring
  fires right after the skip; a time that occurs twice in autumn fires the first time only.
  Several skipped times are one firing.
- Any other expression follows elapsed time. It fires whenever the clock shows a matching time:
  in both of the repeated hours, and not at times that are skipped.

Both rules are the same with five and with six fields: a seconds field gives the seconds within
each minute that fires. In Berlin, where 02:00 to 03:00 is skipped in spring and occurs twice in
autumn, `30 2 * * *` fires at 03:00 in spring and at the first 02:30 in autumn; `*/15 * * * *`
fires every 15 minutes of real time on both days. In UTC the rules do not differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo

from cronsim import CronSim

__all__ = ["SEARCH_SECONDS", "FiringTimes", "find_times"]

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - local times have no zone until it is applied
_SECOND = timedelta(seconds=1)
_MINUTE = 60
_DAY = 86_400

SEARCH_SECONDS = 50 * 366 * _DAY
"""A search ends after this time. The rarest day, a 29 February on a given weekday, comes at
least every 40 years."""


class FiringTimes(Protocol):
    """The instants of a schedule. Both searches may look outside of the valid instants."""

    def first_from(self, instant: int) -> int | None:
        """Return the first instant that is at or after the given one."""

    def last_until(self, instant: int) -> int | None:
        """Return the last instant that is at or before the given one."""


def find_times(fields: Sequence[str], zone: ZoneInfo) -> FiringTimes:
    """Return the instants of a valid expression, given as its six fields."""
    second, *minutes = fields
    if zone.key == "UTC":
        return _UtcTimes(" ".join(fields))
    if minutes[0].startswith("*") or minutes[1].startswith("*"):
        return _ShownTimes(" ".join(fields), zone)
    return _ReachedTimes(" ".join(minutes), _list_seconds(second), zone)


def _list_seconds(second: str) -> tuple[int, ...]:
    """Return the seconds within a minute that a field means."""
    found = []
    for wall in _walls_from(f"{second} * * * * *", 0):
        if wall >= _MINUTE:
            break
        found.append(wall)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _UtcTimes:
    """The matching times in UTC, whose clock is never changed."""

    expression: str

    def first_from(self, instant: int) -> int | None:
        return next(_walls_from(self.expression, instant), None)

    def last_until(self, instant: int) -> int | None:
        return next(_walls_until(self.expression, instant), None)


@dataclass(frozen=True, slots=True)
class _ShownTimes:
    """The instants at which the clock shows a matching time: none if skipped, two if repeated.

    Searches go through stretches of at most a day in which the zone's offset stays the same, and
    leap over the days in which no local time matches. They rely on two facts: an offset does not
    change and change back within a day, and it never changes by more than a day.
    """

    expression: str
    zone: ZoneInfo

    def first_from(self, instant: int) -> int | None:
        end = instant + SEARCH_SECONDS
        while instant <= end:
            offset = _offset(self.zone, instant)
            wall = next(_walls_from(self.expression, instant + offset), None)
            if wall is None:
                return None
            found = wall - offset
            checked = min(found, instant + _DAY)
            if _offset(self.zone, checked) != offset:
                instant = _find_change(self.zone, instant, checked)
            elif checked == found:
                return found
            else:
                instant = max(checked, found - 2 * _DAY)
        return None

    def last_until(self, instant: int) -> int | None:
        end = instant - SEARCH_SECONDS
        while instant >= end:
            offset = _offset(self.zone, instant)
            wall = next(_walls_until(self.expression, instant + offset), None)
            if wall is None:
                return None
            found = wall - offset
            checked = max(found, instant - _DAY)
            if _offset(self.zone, checked) != offset:
                instant = _find_change(self.zone, checked, instant) - 1
            elif checked == found:
                return found
            else:
                instant = min(checked, found + 2 * _DAY)
        return None


@dataclass(frozen=True, slots=True)
class _ReachedTimes:
    """The instants at which the clock first reaches or passes a matching minute, plus seconds.

    Later minutes are never reached earlier, and two that are not reached at once are reached at
    least a minute apart. So the first one that fits ends a search.
    """

    minutes: str
    seconds: tuple[int, ...]
    zone: ZoneInfo

    def first_from(self, instant: int) -> int | None:
        # Two minutes earlier: skipped times are due for a minute after the skip.
        before = instant - 2 * _MINUTE
        wall = before + _offset(self.zone, before)
        for minute in _walls_from(self.minutes, wall - wall % _MINUTE):
            reached = self._find_reached(minute)
            for second in self.seconds:
                if reached + second >= instant:
                    return reached + second
        return None

    def last_until(self, instant: int) -> int | None:
        # In a repeated hour, times that the clock shows again have been reached before.
        shown = datetime.fromtimestamp(instant, self.zone).replace(fold=0)
        for minute in _walls_until(self.minutes, instant + _read_offset(shown)):
            reached = self._find_reached(minute)
            for second in reversed(self.seconds):
                if reached + second <= instant:
                    return reached + second
        return None

    def _find_reached(self, wall: int) -> int:
        """Return when the clock first shows a local time, or the first minute after its skip."""
        before = _read_offset((_EPOCH + wall * _SECOND).replace(tzinfo=self.zone))
        instant = wall - before
        after = _offset(self.zone, instant)
        if after == before:
            return instant
        change = _find_change(self.zone, wall - after, instant)
        return change + -(change + after) % _MINUTE


def _walls_from(expression: str, wall: int) -> Iterator[int]:
    """Iterate over the local times that match, ascending, in seconds; the given one included."""
    for found in CronSim(expression, _EPOCH + (wall - 1) * _SECOND):
        yield (found - _EPOCH) // _SECOND


def _walls_until(expression: str, wall: int) -> Iterator[int]:
    """Iterate over the local times that match, descending, in seconds; the given one included."""
    for found in CronSim(expression, _EPOCH + (wall + 1) * _SECOND, reverse=True):
        yield (found - _EPOCH) // _SECOND


def _offset(zone: ZoneInfo, instant: int) -> int:
    """Return how many seconds local time is ahead of UTC."""
    return _read_offset(datetime.fromtimestamp(instant, zone))


def _read_offset(moment: datetime) -> int:
    offset = moment.utcoffset()
    assert offset is not None, "the moment has a zone"  # noqa: S101 - for the type checker
    return offset // _SECOND


def _find_change(zone: ZoneInfo, start: int, end: int) -> int:
    """Return the first instant after `start` with another offset, of which `end` is one."""
    offset = _offset(zone, start)
    while end - start > 1:
        middle = (start + end) // 2
        if _offset(zone, middle) == offset:
            start = middle
        else:
            end = middle
    return end
