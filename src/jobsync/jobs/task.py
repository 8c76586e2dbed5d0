"""What a node works on: anything with an id that reads the same on every node."""

from collections.abc import Hashable
from typing import Any

import msgspec

from jobsync.errors import Invalid

__all__ = ["Task", "to_task"]

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
