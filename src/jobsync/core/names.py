"""Did you mean …? The nearest known name to one that was mistyped."""

import difflib
from collections.abc import Iterable

__all__ = ["closest"]


def closest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Give the known name that is most likely meant, if any is near; 1 is the same name."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return found[0] if found else None
