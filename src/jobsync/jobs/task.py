"""Tasks, and checks of the arguments of a `Job`."""

import datetime as dt
import inspect
import math
import sys
from collections.abc import Hashable
from typing import Any

from jobsync.components import Components
from jobsync.errors import Invalid
from jobsync.user_functions import check_function

__all__ = ["Task", "check_callables", "read_date", "read_name", "read_seconds", "to_task"]


_PLAIN = (str, int)
_set = object.__setattr__

_MAX_DIGITS = 1000
"""Python refuses to parse numbers of more than a few thousand digits."""


class Task:
    """A task, identified by the text of its id: `Task(1)` and `Task("1")` are equal.

    Sorts by id: integers by value, before all other ids by text. The id cannot be changed. A
    subclass may have an `__init__` of its own and further attributes.

    Args:
        id: a name, a number, or any value whose text is the same on every node.
        name: for people.

    Raises:
        Invalid: the id may not identify the same task on every node.
    """

    __slots__ = ("id", "name")
    __match_args__ = ("id", "name")

    id: Any
    name: str | None

    def __init__(self, id: Any, name: str | None = None) -> None:
        # Not `self.id = id`: tasks are created for whole lists, and this takes half the time.
        _check_id(id)
        _set(self, "id", id)
        _set(self, "name", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "id":
            if hasattr(self, "id"):
                raise AttributeError("the id of a task cannot be changed")
            _check_id(value)
        _set(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "id":
            raise AttributeError("the id of a task cannot be removed")
        super().__delattr__(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, name={self.name!r})"

    @property
    def text(self) -> str:
        """The text that identifies the task."""
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
        return (0, int(text), "") if _is_integer(text) else (1, 0, text)


def to_task(value: object) -> Task:
    """Return a task as it is, or the task with an id.

    Raises:
        Invalid: the id may not identify the same task on every node.
    """
    return value if isinstance(value, Task) else Task(value)


def _is_integer(text: str) -> bool:
    """Whether a text is the canonical form of an integer; 007 and ½ are names."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MAX_DIGITS:
        return False
    return text == "0" or (text != "-0" and not digits.startswith("0"))


def _check_id(id: Any) -> None:
    """Refuse an id that may not identify the same task on every node."""
    if type(id) not in _PLAIN:
        _check_kind(id)
    _check_text(str(id))


def _check_kind(id: Any) -> None:
    """Refuse an id whose text may differ in another process."""
    kind: Any = type(id)
    if id is None or id is ...:
        raise Invalid("id", id, "is not an id", "pass a name or a number")
    if not isinstance(id, Hashable):
        raise Invalid(
            "id", id, f"is a {kind.__name__}, which can change", "use a name, a number or a tuple"
        )
    if isinstance(id, frozenset):
        raise Invalid(
            "id", id, "iterates in a different order on each node", "use tuple(sorted(id))"
        )
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        fix = f"give {kind.__name__} a __str__, or pass a name or a number"
        raise Invalid("id", id, "has a different str() on each node", fix)


def _check_text(text: str) -> None:
    if not text:
        raise Invalid("id", text, "is empty", "pass a name or a number")
    if text.isascii() and "\0" not in text:
        return
    if "\0" in text:
        raise Invalid("id", text, "contains NUL", "remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid("id", text, "contains a lone surrogate", "decode it properly") from None


def read_date(value: dt.date | dt.datetime | None, components: Components) -> dt.date:
    """Return the date; today in the process's time zone if None.

    Raises:
        Invalid: the value is not a date.
    """
    if value is None:
        now = dt.datetime.fromtimestamp(components.clock.wall().seconds, dt.UTC)
        return now.astimezone().date()
    if isinstance(value, dt.datetime):
        return value.date()
    if isinstance(value, dt.date):
        return value
    raise Invalid("date", value, "is not a date", "pass a datetime.date")


def read_name(field: str, value: object) -> str:
    """Return a name.

    Raises:
        Invalid: it is empty or not text.
    """
    if isinstance(value, str) and value:
        return value
    raise Invalid(field, value, "must be a text that is not empty", "pass a name")


def read_seconds(field: str, value: object) -> float:
    """Return a duration in seconds.

    Raises:
        Invalid: it is not a number, negative, or larger than any float.
    """
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else value
    if isinstance(seconds, int | float) and (
        0 <= seconds <= sys.float_info.max or seconds == math.inf
    ):
        return seconds
    raise Invalid(field, value, "is not a duration", "pass seconds, 0 or more")


def check_callables(**arguments: object) -> None:
    """Check that arguments are plain functions or None.

    Raises:
        Invalid: one is not; names the argument.
    """
    for field, value in arguments.items():
        if value is None:
            continue
        check_function(field, value, "pass a function")
        if inspect.iscoroutinefunction(value):
            problem = "is a coroutine function, which nobody awaits"
            raise Invalid(field, value, problem, "pass a plain function")
