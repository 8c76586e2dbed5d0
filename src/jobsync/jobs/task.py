"""What a node works on: anything with an id that reads the same on every node."""

import datetime as dt
from collections.abc import Hashable
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.errors import Invalid

__all__ = ["Task", "check_callables", "read_date", "read_name", "read_seconds", "to_task"]


_PLAIN = (str, int)

_LONGEST_NUMBER = 1000
"""In digits: Python refuses to read numbers of more than a few thousand."""


class Task(msgspec.Struct, frozen=True, eq=False):
    """A task. Known by the text of its id: `Task(1)` and `Task("1")` are one.

    Sorts by id: whole numbers by their size, before all other ids by their text.

    Args:
        id: a name, a number, or any value whose text is the same on every node.
        name: for people.

    Raises:
        Invalid: the id cannot stand for the same task on every node.
    """

    id: Any
    name: str | None = None

    def __post_init__(self) -> None:
        if type(self.id) not in _PLAIN:
            _check_kind(self.id)
        _check_text(self.text)

    @property
    def text(self) -> str:
        """What the task is known by."""
        return str(self.id)

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Task) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __lt__(self, other: object) -> bool:
        return self._rank < other._rank if isinstance(other, Task) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self._rank <= other._rank if isinstance(other, Task) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self._rank > other._rank if isinstance(other, Task) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self._rank >= other._rank if isinstance(other, Task) else NotImplemented

    @property
    def _rank(self) -> tuple[int, int, str]:
        text = self.text
        return (0, int(text), "") if _is_whole(text) else (1, 0, text)


def to_task(given: object) -> Task:
    """Give a task as it is, or that of an id.

    Raises:
        Invalid: the id cannot stand for the same task on every node.
    """
    return given if isinstance(given, Task) else Task(given)


def _is_whole(text: str) -> bool:
    """Say whether this is a whole number's own text; 007 and ½ are not, and are names."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _LONGEST_NUMBER:
        return False
    return text == "0" or (text != "-0" and not digits.startswith("0"))


def _check_kind(id: Any) -> None:
    """Refuse what has another text, or none, in another process."""
    kind: Any = type(id)
    if id is None or id is ...:
        raise Invalid("id", id, "names no task", "give a name or a number")
    if not isinstance(id, Hashable):
        raise Invalid("id", id, f"{kind.__name__} can change", "use a name, a number or a tuple")
    if isinstance(id, frozenset):
        raise Invalid("id", id, "has no order that all nodes share", "use tuple(sorted(id))")
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        fix = f"give {kind.__name__} a __str__, or pass a name or a number"
        raise Invalid("id", id, "reads differently on every node", fix)


def _check_text(text: str) -> None:
    if not text:
        raise Invalid("id", text, "is empty", "give a name or a number")
    if text.isascii() and "\0" not in text:
        return
    if "\0" in text:
        raise Invalid("id", text, "contains NUL", "remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid("id", text, "contains a lone surrogate", "decode it properly") from None


# What a `Job` is given, checked one by one; what cannot be taken is refused with the fix.


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
