"""Filtered reads in which most rows do not match."""

from typing import Any

from jobsync.core.filters import parse
from jobsync.stores.contract import Record
from jobsync.stores.scan import collect

TRAIL = "AAAAAAAAAAAA"


async def test_a_filter_that_drops_most_rows_needs_few_fetches() -> None:
    """For one match among thousands, rows are still fetched by the hundred."""
    fetched: list[int] = []

    async def fetch(after: str, limit: int) -> list[Any]:
        fetched.append(limit)
        start = int(after or -1) + 1
        return [(f"{i:05d}", {"i": i}) for i in range(start, min(start + limit, 5000))]

    def decode(key: str, value: Any) -> Record:
        return Record(key, value, TRAIL, 1, 0, 1, TRAIL)

    def report(_: Exception) -> None:
        raise AssertionError

    where = parse({"i": {"$gte": 4990}})
    found = await collect(fetch, decode, report, after="", limit=1, where=where)
    assert [record.value["i"] for record in found] == [4990]
    assert len(fetched) <= 20
    fetched.clear()
    await collect(fetch, decode, report, after="", limit=1, where=parse(None))
    assert fetched == [1]
