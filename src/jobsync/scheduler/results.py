"""Results of actions as JSON, for records and events.

An action may return anything. A result that JSON can hold is stored as it is, up to 16 KB. Of any
other one, a short description is stored. Describing it never raises and never takes long, whatever
the result's own methods do.
"""

import reprlib
from typing import Any

from jobsync.core.codec import Json, decode, encode
from jobsync.safe_text import safe_repr

__all__ = ["describe_result"]

_MAX_SIZE = 16 * 1024
"""The largest result that is stored as it is, in bytes of JSON."""
_MAX_WIDTH = 1000
"""Characters of a description."""
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_UNKNOWN = "a result that cannot be described"


def describe_result(result: object) -> Json:
    """Return a result as JSON; a short description if it is not JSON, or too large."""
    for describe in (_to_json, _shorten):
        try:
            return describe(result)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001, S112 - a result's own methods may raise anything
            continue
    return _UNKNOWN


def _to_json(result: Any) -> Json:
    """Return a small result as JSON. A large one is not encoded just to find out.

    Raises:
        ValueError: it is too large.
        Invalid: it is too large, or is not JSON.
    """
    left, items = _MAX_SIZE, [result]
    while items:
        item = items.pop()
        # Of these types only: others may do anything.
        if type(item) in {list, tuple, dict}:
            left -= len(item)
            items.extend((*item, *item.values()) if type(item) is dict else item)
        elif type(item) is str:
            left -= len(item)
        if left < 0:
            raise ValueError("it is too large")
    return decode(encode(result, "result", limit=_MAX_SIZE), "result")


def _shorten(result: object) -> str:
    if type(result) not in _CONTAINERS:
        return safe_repr(result, _MAX_WIDTH)
    text = _short_repr.repr(result)
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 1]}…"


class _ShortRepr(reprlib.Repr):
    """Describes containers by their first items, whatever those do."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 20

    def repr1(self, x: Any, level: int) -> str:
        """Return a container's first items, or the description of anything else."""
        if type(x) in _CONTAINERS:
            return super().repr1(x, level)
        return safe_repr(x)


_short_repr = _ShortRepr()
