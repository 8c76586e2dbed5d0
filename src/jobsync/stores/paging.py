"""Reading in order, page by page, until enough items pass the filter.

Stores may return too many rows for a filter, never too few: the reference matcher has
the last word here, so that every store gives the same answer.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from jobsync.core.codec import Json
from jobsync.core.filters import All, Filter, matches
from jobsync.core.keys import check_key, check_prefix
from jobsync.errors import Corrupt, Invalid

__all__ = ["Row", "check_age", "check_page", "check_span", "collect"]

_MAX_LIMIT = 100_000
_MAX_AGE = 1e9
_READ_AHEAD = 256
"""How many rows are read at least where a filter may drop most of them."""

Row = tuple[str, *tuple[Any, ...]]
"""What a store fetched: the name to go on after, then whatever it decodes."""


class _Item(Protocol):
    @property
    def value(self) -> Json: ...


Item = TypeVar("Item", bound=_Item)


def check_page(limit: int) -> None:
    """Refuse a page size that makes no sense.

    Raises:
        Invalid: names the limit.
    """
    if type(limit) is not int or not 1 <= limit <= _MAX_LIMIT:
        raise Invalid("limit", limit, f"is not between 1 and {_MAX_LIMIT:,}", "ask page by page")


def check_age(older_than: float) -> None:
    """Refuse an age that is no number of seconds.

    Raises:
        Invalid: names it.
    """
    if not -_MAX_AGE <= older_than <= _MAX_AGE:
        raise Invalid("older_than", older_than, "is not a number of seconds", "write 3600.0")


def check_span(prefix: str, after: str, limit: int) -> None:
    """Refuse a listing that could not be answered.

    Raises:
        Invalid: names the argument.
    """
    check_prefix(prefix)
    check_page(limit)
    if after:
        check_key(after, "after")
        if not after.startswith(prefix):
            raise Invalid(
                "after", after, f"is not under {prefix!r}", "pass the last key of the page before"
            )


async def collect(
    fetch: Callable[[str, int], Awaitable[Sequence[Row]]],
    decode: Callable[..., Item],
    report: Callable[[Corrupt], None],
    *,
    after: str,
    limit: int,
    where: Filter,
    ahead: int = _READ_AHEAD,
) -> list[Item]:
    """Fetch rows and decode them until `limit` of them match or none are left."""
    found: list[Item] = []
    everything = where == All(())
    page = limit if everything else max(limit, ahead)
    while True:
        rows = await fetch(after, page)
        for row in rows:
            try:
                item = decode(*row)
            except Corrupt as corrupt:
                report(corrupt)
                continue
            if everything or matches(where, item.value):
                found.append(item)
                if len(found) == limit:
                    return found
        if len(rows) < page:
            return found
        after = rows[-1][0]
