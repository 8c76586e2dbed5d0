"""Did you mean …? The nearest known name to one that was mistyped."""

import difflib
from collections.abc import Iterable

__all__ = ["closest"]


def closest(name: str, known: Iterable[str]) -> str | None:
    """Give the known name that is most likely meant, if any is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
