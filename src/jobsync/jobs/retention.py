"""What is kept of the past, and how it is removed.

Promise: a date that anybody has worked on within the given days keeps all its claims, so
that exclusion there is never lost. A record for each date says when a node last began to
work on it; removing goes by that record and by the date itself, whichever is later.
"""

import datetime as dt
from collections.abc import Callable
from contextlib import suppress
from datetime import date

import msgspec

from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.errors import Conflict, Invalid
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord
from jobsync.stores.contract import Record, Store

__all__ = ["Forgotten", "forget", "note_date"]

_DAY = 86_400.0
_PAGE = 1000


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """How many records were removed."""

    dates: int
    claims: int
    nodes: int
    rebalances: int


async def note_date(store: Store, places: JobKeys, day: date, now: float) -> None:
    """Record that somebody begins to work on a date."""
    key = places.work_date(day)
    while True:
        record = await store.get(key)
        with suppress(Conflict):
            if record is None:
                await store.create(key, {"used": now})
            elif record.value["used"] < now - _DAY / 24:
                await store.put(record, {**record.value, "used": now})
            return


async def forget(
    store: Store,
    places: JobKeys,
    read_node: Callable[[Record], NodeRecord | None],
    *,
    now: float,
    days: float,
) -> Forgotten:
    """Remove what is older than so many days.

    Args:
        store: where it is.
        places: the fleet's keys.
        read_node: understands a node's record, or reports it and gives None.
        now: the time of day, by the store's clock where it has one.
        days: one at least, so that nothing of today is touched in any time zone.

    Raises:
        Invalid: that is too short.
    """
    if not days >= 1:
        raise Invalid("older_than_days", days, "is less than a day", "give 1 or more")
    before = now - days * _DAY
    dates = claims = 0
    for day in await _find_dates(store, places, before):
        claims += await _drop_all(store, places.claims(day))
        await store.drop([places.work_date(day)])
        dates += 1
    return Forgotten(
        dates=dates,
        claims=claims,
        nodes=await _forget_nodes(store, places, read_node, before),
        rebalances=await store.discard(places.rebalances, older_than=days * _DAY),
    )


async def _find_dates(store: Store, places: JobKeys, before: float) -> list[date]:
    """Give the dates that are over, and that nobody has begun to work on, since then."""
    last = dt.datetime.fromtimestamp(before, dt.UTC).date()
    found = []
    for record in await store.scan(places.dates, limit=100 * _PAGE):
        day = date.fromisoformat(record.key.removeprefix(places.dates))
        if day < last and record.value["used"] < before:
            found.append(day)
    return found


async def _drop_all(store: Store, prefix: str) -> int:
    count = 0
    while heads := await store.heads(prefix, limit=_PAGE):
        await store.drop([head.key for head in heads])
        count += len(heads)
    return count


async def _forget_nodes(
    store: Store,
    places: JobKeys,
    read_node: Callable[[Record], NodeRecord | None],
    before: float,
) -> int:
    """Delete the records of nodes that came before then, and have left or died."""
    count = 0
    for record in await store.scan(places.nodes, limit=10 * _PAGE):
        node = read_node(record)
        if node is None or node.created >= before or not await _is_gone(store, node):
            continue
        # The name may be taken again at this very moment.
        with suppress(Conflict):
            await store.delete(record)
            count += 1
    return count


async def _is_gone(store: Store, node: NodeRecord) -> bool:
    if node.stage == "left":
        return True
    session = await store.get(f"{SESSIONS}{node.incarnation}")
    return session is None or read_session_record(session).state == "dead"
