"""Numbers that differ in the last digit, and filters that tell them apart.

A database may compare such numbers inexactly; a store must not. The data is small, so that all of
it can be tried instead of a sample.
"""

import math
from collections.abc import Iterator
from typing import Any

from jobsync import Put, Store
from jobsync.core.filters import matches, parse

__all__ = ["BASES", "find_difference", "list_filters", "list_neighbours"]

BASES = (0, 0.1, 2**53, -(2**53), 1e22, -1e300, 1.7976931348623157e308, 5e-324)
"""Numbers of all sizes, with the largest and the smallest."""

_MOST = 2**53
"""The largest whole number that a document may have."""
_ORDERS = ("$lt", "$lte", "$gt", "$gte")


def list_neighbours(base: float) -> list[float]:
    """Return a number and those beside it, also as whole numbers."""
    near: list[int | float] = [
        base,
        math.nextafter(base, math.inf),
        math.nextafter(base, -math.inf),
    ]
    near += [
        base * (1 + 1e-13),
        base * (1 - 1e-13),
        base * 2,
        -base,
        float(base),
        base - 1,
        base + 1,
    ]
    near = [each for each in near if math.isfinite(each)]
    near += [int(each) for each in near if float(each).is_integer()]
    # Larger whole numbers are not allowed in documents.
    allowed = [each for each in near if type(each) is float or abs(each) <= _MOST]
    return list({repr(each): each for each in allowed}.values())


def list_filters(base: float) -> Iterator[dict[str, Any]]:
    """Yield filters with each order and equality, plain and negated once and twice."""
    for number in list_neighbours(base):
        operands: list[Any] = [{order: number} for order in _ORDERS]
        for operand in (*operands, {"$in": [number, "x"]}):
            yield {"n": operand}
            yield {"n": {"$not": operand}}
            yield {"$not": {"$or": [{"n": {"$not": operand}}, {"n": "x"}]}}


async def find_difference(store: Store, base: float, every: int = 1) -> str:
    """Return the first filter for which a store differs from the reference; empty without one.

    Args:
        store: a store without records under the prefix of this number.
        base: one of `BASES`.
        every: use only every so-manieth filter.
    """
    prefix = f"near/{BASES.index(base)}/"
    documents: list[Any] = [{"n": each} for each in list_neighbours(base)]
    documents += [{"n": -0.0}, {"n": str(base)}, {"n": True}, {"n": None}, {}, {"n": [base]}]
    await store.write([Put(f"{prefix}{i:02d}", each) for i, each in enumerate(documents)])
    for number, where in enumerate(list_filters(base)):
        if number % every:
            continue
        wanted = parse(where)
        expected = [each for each in documents if matches(wanted, each)]
        found = [record.value for record in await store.scan(prefix, where=where)]
        if repr(found) != repr(expected):
            return f"{where} finds {found}, and must find {expected}"
    return ""
