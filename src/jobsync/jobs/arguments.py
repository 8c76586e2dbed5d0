"""What a `Job` is given, checked one by one; what cannot be taken is refused with the fix."""

import datetime as dt

from jobsync.components import Components
from jobsync.errors import Invalid

__all__ = ["check_callables", "read_date", "read_name", "read_seconds"]


def read_date(given: dt.date | dt.datetime | None, components: Components) -> dt.date:
    """Give the date; today in the process's own zone, if none was given.

    Raises:
        Invalid: it is none.
    """
    if given is None:
        now = dt.datetime.fromtimestamp(components.clock.wall().seconds, dt.UTC)
        return now.astimezone().date()
    if isinstance(given, dt.datetime):
        return given.date()
    if isinstance(given, dt.date):
        return given
    raise Invalid("date", given, "is no date", "give a datetime.date")


def read_name(field: str, value: object) -> str:
    """Give a name.

    Raises:
        Invalid: it is empty, or no text.
    """
    if isinstance(value, str) and value:
        return value
    raise Invalid(field, value, "is no name", "give some text")


def read_seconds(field: str, value: object) -> float:
    """Give a duration in seconds.

    Raises:
        Invalid: it is none.
    """
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else value
    if isinstance(seconds, int | float) and seconds >= 0:
        return seconds
    raise Invalid(field, value, "is no duration", "give seconds, 0 or more")


def check_callables(**given: object) -> None:
    """Refuse what is to be called and cannot be.

    Raises:
        Invalid: names the argument.
    """
    for field, value in given.items():
        if value is not None and not callable(value):
            raise Invalid(field, value, "cannot be called", "give a function")
