"""Schedules: which instants a text such as `0 3 * * *` means in a time zone.

A schedule is pure: the same text, zone and instant give the same answer in every process. Instants
are whole Unix seconds, from 0 to the year 9894.

    0 3 * * *            five fields: minute, hour, day of month, month, day of week
    */10 * * * * *       six fields: the second comes first
    0 9 * JAN-MAR MON    names; 0 and 7 are both Sunday
    0 0 L * *            the last day of the month; LW: its last weekday (Monday to Friday)
    0 9 * * MON#1        the first Monday of the month; 5L: its last Friday
    @daily               also @hourly, @midnight, @weekly, @monthly, @yearly and @annually
    @every 1h30m         multiples of this time since the Unix epoch; the zone has no effect

If both the day of month and the day of week are restricted, a day that matches either of them
matches. If one of the two fields starts with `*`, a day must match both. What happens when the
clocks change is in `core.cron_times`.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import NoReturn
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from jobsync.core.cron_times import SEARCH_SECONDS, FiringTimes, find_times
from jobsync.errors import Invalid, closest_name

__all__ = ["Schedule"]

_PRESETS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_EXAMPLES = "use five fields such as '0 3 * * *', six with seconds first, @daily or @every 90s"
_EVERY = "use whole hours, minutes and seconds, such as @every 90s or @every 1h30m"
_ZONE_EXAMPLES = "use a name such as UTC or Europe/Berlin"

_LISTS = "also *, */2, ascending ranges and lists with commas"
_FIELDS = (
    ("second", 60, f"use 0 to 59, {_LISTS}"),
    ("minute", 60, f"use 0 to 59, {_LISTS}"),
    ("hour", 24, f"use 0 to 23, {_LISTS}"),
    ("day of month", 31, f"use 1 to 31, L or LW, {_LISTS}"),
    ("month", 12, f"use 1 to 12 or JAN to DEC, {_LISTS}"),
    ("day of week", 7, f"use 0 to 7, SUN to SAT, MON#1 or 5L, {_LISTS}"),
)
"""Each field's name, the number of its values, and what to write in it."""

_MIN_FIELDS, _MAX_FIELDS = 5, 6
_MAX_TEXT = 500
_MAX_ZONE = 100

_SEARCH_START = datetime(2000, 1, 1)  # noqa: DTZ001 - local times have no zone until it is applied
_MINUTE = 60
_HOUR = 3600
_LAST = 7930 * 365 * 86_400
"""The last instant, in the year 9894: a search from it stays within what `datetime` can hold."""

_read_every = re.compile(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,10})s)?", re.ASCII).fullmatch
_find_step = re.compile(r"/(\d+)", re.ASCII).findall
_read_stepped_range = re.compile(r"(\w+)-(\w+)/0*[1-9]\d*", re.ASCII).fullmatch
_find_halves = re.compile(r"\b([Ee])very second (?=second|minute|hour|day|month)")
_find_ordinals = re.compile(r"\b(\d*?[02-9])([123])th\b")
_ENDINGS = {"1": "st", "2": "nd", "3": "rd"}


@dataclass(frozen=True, slots=True)
class Schedule:
    """The instants at which a job is due. Made by `parse`; equal by text and time zone.

    Attributes:
        text: the expression, with single spaces.
        timezone: the name of the zone in which the expression is read.
    """

    text: str
    timezone: str
    _firings: FiringTimes = field(compare=False, repr=False)
    _zone: ZoneInfo = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str, timezone: str = "UTC") -> "Schedule":
        """Return the schedule of an expression, read in a time zone.

        Raises:
            Invalid: `schedule` or `timezone` is wrong, or the schedule never fires.
        """
        text = _check_text("schedule", text, _MAX_TEXT, _EXAMPLES)
        zone = _find_zone(_check_text("timezone", timezone, _MAX_ZONE, _ZONE_EXAMPLES))
        return cls(text, zone.key, _parse_firings(text, zone), zone)

    def next_after(self, instant: int) -> int | None:
        """Return the first instant after the given one; None only at the end of time."""
        start = max(instant + 1, 0)
        if start > _LAST:
            return None
        found = self._firings.first_from(start)
        return found if found is not None and found <= _LAST else None

    def latest_until(self, instant: int) -> int | None:
        """Return the last instant that is not after the given one; None if it would be before 0."""
        if instant < 0:
            return None
        found = self._firings.last_until(min(instant, _LAST))
        return found if found is not None and found >= 0 else None

    def between(self, after: int, until: int, limit: int) -> list[int]:
        """Return the first `limit` instants that are after `after` and not after `until`."""
        found: list[int] = []
        latest = self.next_after(after)
        while latest is not None and latest <= until and len(found) < limit:
            found.append(latest)
            latest = self.next_after(latest)
        return found

    def newest_between(self, after: int, until: int, limit: int) -> list[int]:
        """Return the last `limit` instants after `after` and not after `until`, oldest first."""
        found: list[int] = []
        earliest = self.latest_until(until)
        while earliest is not None and earliest > after and len(found) < limit:
            found.append(earliest)
            earliest = self.latest_until(earliest - 1)
        return found[::-1]

    def in_words(self) -> str:
        """Return the schedule as a phrase for people, without its zone."""
        if isinstance(self._firings, _Intervals):
            return f"Every {_describe_seconds(self._firings.seconds)}"
        return _describe_expression(_PRESETS.get(self.text.lower(), self.text))

    def in_zone(self, instant: int) -> datetime:
        """Return an instant as local time of the schedule's zone."""
        return datetime.fromtimestamp(instant, self._zone)


@dataclass(frozen=True, slots=True)
class _Intervals:
    """Multiples of a number of seconds."""

    seconds: int

    def first_from(self, instant: int) -> int:
        return -(-instant // self.seconds) * self.seconds

    def last_until(self, instant: int) -> int:
        return instant // self.seconds * self.seconds


def _check_text(name: str, value: object, limit: int, fix: str) -> str:
    """Return a text with single spaces."""
    if not isinstance(value, str):
        raise Invalid(name, value, "must be text", fix)
    if len(value) > limit:
        raise Invalid(name, value, f"must have at most {limit} characters", fix)
    if not (text := " ".join(value.split())):
        raise Invalid(name, value, "must not be empty", fix)
    return text


def _parse_firings(text: str, zone: ZoneInfo) -> FiringTimes:
    if text.startswith("@") and text.lower() not in _PRESETS:
        return _Intervals(_parse_every(text))
    expression = _PRESETS.get(text.lower(), text)
    fields = expression.split()
    if not _MIN_FIELDS <= len(fields) <= _MAX_FIELDS or "=" in fields[0]:
        _refuse_count(text, fields)
    fields = [*["0"] * (_MAX_FIELDS - len(fields)), *fields]
    _check_steps(text, fields)
    fields = [_simplify(index, value) for index, value in enumerate(fields)]
    _check_fires(text, fields)
    return find_times(fields, zone)


def _refuse_count(text: str, fields: list[str]) -> NoReturn:
    if "=" in fields[0]:
        raise Invalid("schedule", text, "must not set a variable", "use the option timezone")
    count = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
    raise Invalid("schedule", text, f"has {count} instead of 5 or 6", _EXAMPLES)


def _check_steps(text: str, fields: list[str]) -> None:
    """Refuse steps such as `*/90` minutes, which would silently mean every hour."""
    for value, (name, size, _) in zip(fields, _FIELDS, strict=True):
        for step in _find_step(value):
            if int(step) > size:
                problem = f"has the step {step} in its {name} {value!r}, which has {size} values"
                raise Invalid("schedule", text, problem, "use a smaller step, or @every 90m")


def _check_fires(text: str, fields: list[str]) -> None:
    """Refuse an expression that has an error or matches no day.

    Every kind of year occurs in the 50 years from 2000: what does not fire then, never does.
    """
    try:
        next(CronSim(" ".join(fields), _SEARCH_START))
    except CronSimError:
        for index, (value, (name, _, fix)) in enumerate(zip(fields, _FIELDS, strict=True)):
            if not _is_accepted(index, value):
                problem = f"must have a valid {name}, not {value!r}"
                raise Invalid("schedule", text, problem, fix) from None
    except StopIteration:
        pass
    else:
        return
    day, month, weekday = fields[3:]
    problem = f"never fires: no day has day of month {day}, month {month} and day of week {weekday}"
    raise Invalid("schedule", text, problem, "use a day that occurs; L is the last of each month")


def _simplify(index: int, value: str) -> str:
    """Return a field with `5-5/10` as `5`. The library reads it as `5/10`: 5, 15, 25 and so on."""
    parts = value.split(",")
    for place, part in enumerate(parts):
        if found := _read_stepped_range(part):
            first, last = found.groups()
            # Only a range of one value is accepted both ways.
            if all(_is_accepted(index, both) for both in (f"{first}-{last}", f"{last}-{first}")):
                parts[place] = first
    return ",".join(parts)


def _is_accepted(index: int, value: str) -> bool:
    """Whether one field of an expression has no error."""
    fields = ["*"] * _MAX_FIELDS
    fields[index] = value
    try:
        CronSim(" ".join(fields), _SEARCH_START)
    except CronSimError:
        return False
    return True


def _parse_every(text: str) -> int:
    """Return the seconds of `@every 1h30m`."""
    name, _, duration = text.partition(" ")
    if name.lower() == "@reboot":
        fix = "use run_on_start=True, with a schedule for the runs after it"
        raise Invalid("schedule", text, "cannot be @reboot: a fleet has no start of its own", fix)
    if name.lower() != "@every":
        known = closest_name(name.lower(), [*_PRESETS, "@every"])
        fix = f"did you mean {known}?" if known else f"use {', '.join(_PRESETS)} or @every 90s"
        raise Invalid("schedule", text, "is not a known preset", fix)
    found = _read_every(duration)
    if not duration or found is None:
        raise Invalid("schedule", text, "has a duration that cannot be read", _EVERY)
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    total = hours * _HOUR + minutes * _MINUTE + seconds
    if not 1 <= total <= SEARCH_SECONDS:
        raise Invalid("schedule", text, "must be 1 second to 50 years", _EVERY)
    return total


@lru_cache(maxsize=20_000)
def _describe_expression(text: str) -> str:
    """Return an expression in words: those of the library, where they are right."""
    rule = CronSim(text, _SEARCH_START)
    is_either = not rule.day_and
    weekdays = {day % 7 for day in rule.weekdays if isinstance(day, int)}
    if is_either and (len(rule.days) == _FIELDS[3][1] or len(weekdays) == _FIELDS[5][1]):
        # The library leaves out a field with all values, and "1-31 * MON" would be Mondays.
        *times, _, month, _ = text.split()
        rule = CronSim(" ".join([*times, "*", month, "*"]), _SEARCH_START)
    words = rule.explain()
    if is_either:
        words = words.replace(" and on ", " or on ")
    # The library writes "every second second", "21th" and "31th".
    words = _find_halves.sub(r"\1very other ", words)
    return _find_ordinals.sub(lambda m: f"{m[1]}{m[2]}{_ENDINGS[m[2]]}", words)


def _describe_seconds(seconds: int) -> str:
    """Return a duration in words: "90 seconds", "hour", "1 hour and 30 minutes"."""
    if seconds < 2 * _MINUTE and seconds != _MINUTE:
        units = {"second": seconds}
    else:
        units = {
            "hour": seconds // _HOUR,
            "minute": seconds // _MINUTE % 60,
            "second": seconds % 60,
        }
    parts = [f"{n} {unit}{'s' * (n != 1)}" for unit, n in units.items() if n]
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last.removeprefix("1 ")


def _find_zone(name: str) -> ZoneInfo:
    # Files beside the zones: the machine's own zone, and copies that count leap seconds.
    is_zone = name != "localtime" and not name.startswith(("posix/", "right/"))
    try:
        if is_zone:
            return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        pass
    # Abbreviations and offsets get no suggestion: MST is not PST, Etc/GMT+2 is behind UTC.
    zones = {zone.lower(): zone for zone in available_timezones() - {"localtime"}}
    places = {key: zone for key, zone in zones.items() if "/" in key and not key.startswith("etc/")}
    cities = {key.rpartition("/")[2]: zone for key, zone in places.items()}
    wanted = name.lower().replace(" ", "_")
    close = wanted if wanted in zones else closest_name(wanted, [*places, *cities], likeness=0.8)
    fix = f"did you mean {zones.get(close) or cities[close]}?" if close else _ZONE_EXAMPLES
    raise Invalid("timezone", name, "is not a known time zone", fix)
