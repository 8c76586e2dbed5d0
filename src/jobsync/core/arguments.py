"""Checks of numbers and names that callers pass, made before anything is sent.

A driver's error neither names the argument nor says what to do instead, and some wrong arguments
cause none: SQLite takes a negative limit for no limit. Each function here raises `Invalid`, which
names the argument, its value and the fix.

On its own because queues, schedulers and the command line check the same things.
"""

import re
from collections.abc import Iterable
from typing import TypeGuard

from jobsync.core.clock import Seconds
from jobsync.errors import Invalid, closest_name, plain_text

__all__ = [
    "LONGEST_DELAY",
    "check_choice",
    "check_count",
    "check_days",
    "check_resource_name",
    "check_seconds",
]

_DAY: Seconds = 86_400.0

LONGEST_DELAY: Seconds = 366 * _DAY
"""The longest delay or timeout that is accepted."""

_LARGEST_COUNT = 2**53
"""Larger whole numbers are not exact as JSON numbers, or no floats at all."""

_MOST_DAYS = 1_000_000
"""So that the time that many days before or after today has a date in every database."""

_is_resource_name = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}").fullmatch


def check_count(field: str, value: object, *, least: int, most: int | None = None) -> None:
    """Check a whole number; without `most` it must be one that every store can hold."""
    largest = _LARGEST_COUNT if most is None else most
    if type(value) is not int or not least <= value <= largest:
        has_bound = most is not None or (type(value) is int and value > largest)
        wanted = f"{least} to {largest:,}" if has_bound else f"{least} or more"
        raise Invalid(field, value, f"must be {wanted}", "pass a whole number")


def check_choice(
    field: str, value: object, choices: Iterable[str], problem: str = "is unknown"
) -> str:
    """Check one of several words; return it as a plain text."""
    known, text = list(choices), plain_text(value)
    if text is not None and text in known:
        return text
    hint = closest_name(text, known)
    fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(known)}"
    raise Invalid(field, value, problem, fix)


def check_seconds(
    field: str, value: object, *, is_zero_allowed: bool = True, most: Seconds = LONGEST_DELAY
) -> Seconds:
    """Check a duration, by default 0 to 366 days; return it as a plain number."""
    if _is_number(value) and 0 <= value <= most and (value or is_zero_allowed):
        return float(value)
    wanted = "0" if is_zero_allowed else "more than 0"
    limit = f"{most:g} seconds" if most < _DAY else f"{most / _DAY:,.0f} days, in seconds"
    problem = f"must be {wanted} to {limit}"
    raise Invalid(field, value, problem, "pass a number of seconds")


def check_days(field: str, value: object, *, least: float = 0.0) -> Seconds:
    """Check a number of days, above 0 and up to a million; return it in seconds."""
    if _is_number(value) and value > 0 and least <= value <= _MOST_DAYS:
        return float(value * _DAY)
    wanted = f"{least:g}" if least else "more than 0"
    problem = f"must be {wanted} to {_MOST_DAYS:,} days"
    raise Invalid(field, value, problem, "pass a number of days")


def check_resource_name(field: str, value: object) -> str:
    """Check the name of a resource; return it as a plain text."""
    text = plain_text(value)
    if text is None or not _is_resource_name(text):
        fix = "use a letter, then up to 99 letters, digits, _ and -"
        raise Invalid(field, value, "must be a valid resource name", fix)
    return text


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
