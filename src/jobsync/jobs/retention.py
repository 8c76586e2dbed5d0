"""Removal of old records: claims of past dates, nodes that are gone, history.

Guarantee: a date that a node has worked on within the given days keeps all its claims, so
exclusion on that date is never lost. A record per date says when a node has last worked on it;
the later of that time and the date itself decides.
"""

import math
from contextlib import suppress
from datetime import date

import msgspec

from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.arguments import check_days
from jobsync.core.clock import to_datetime
from jobsync.errors import Conflict, Corrupt
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeRecord, read_node_record
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, convert_record
from jobsync.stores.paging import drop_all, scan_all

__all__ = ["Forgotten", "WorkDate", "forget", "record_date"]

_DAY = 86_400.0
_HOUR = 3_600.0
_INTERVAL = 6 * _HOUR
"""Seconds after which a node records again that it works on a date."""
_LONGEST_LAG = _INTERVAL + _HOUR
"""Seconds for which a node may have worked on a date since the time that its record has."""


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """How many records were removed."""

    dates: int
    claims: int
    nodes: int
    rebalances: int


class _DateRecord(msgspec.Struct, frozen=True):
    """The record of a date: when a node has last worked on it."""

    used: float


class WorkDate:
    """The date that a node works on.

    Args:
        store: holds the records.
        keys: the fleet's keys.
        day: the date.
        corruption_log: reports a record that cannot be read. The date's claims are kept then.
    """

    def __init__(
        self, store: Store, keys: JobKeys, day: date, corruption_log: CorruptionLog
    ) -> None:
        self._store = store
        self._keys = keys
        self._day = day
        self._corruption_log = corruption_log
        self._recorded = -math.inf

    async def record(self, now: float) -> None:
        """Record that the node works on the date, if some hours have passed since the last time."""
        if now - self._recorded < _INTERVAL:
            return
        try:
            await record_date(self._store, self._keys, self._day, now)
        except Corrupt as corrupt:
            self._corruption_log.report(corrupt)
        self._recorded = now


async def record_date(store: Store, keys: JobKeys, day: date, now: float) -> None:
    """Record that a node works on a date, to the hour.

    Raises:
        Corrupt: the record of the date cannot be read.
    """
    key = keys.work_date(day)
    while True:
        record = await store.get(key)
        with suppress(Conflict):
            if record is None:
                await store.create(key, {"used": now})
            elif _read_use(record) < now - _HOUR:
                await store.put(record, {**record.value, "used": now})
            return


async def forget(
    store: Store,
    keys: JobKeys,
    corruption_log: CorruptionLog,
    *,
    now: float,
    days: float,
) -> Forgotten:
    """Remove records that are older than `days` days.

    Args:
        store: holds the records.
        keys: the fleet's keys.
        corruption_log: reports what cannot be read, which is kept.
        now: the time of day, by the store's clock where it has one.
        days: at least one, so that nothing of today is removed in any time zone.

    Raises:
        Invalid: `days` is less than one, or over a million.
    """
    age = check_days("older_than_days", days, least=1.0)
    before = now - age
    dates = claims = 0
    for day in await _find_dates(store, keys, corruption_log, before):
        claims += await drop_all(store, keys.claims(day))
        await store.drop([keys.work_date(day)])
        dates += 1
    return Forgotten(
        dates=dates,
        claims=claims,
        nodes=await _forget_nodes(store, keys, corruption_log, before),
        rebalances=await store.discard(keys.rebalances, older_than=age),
    )


async def _find_dates(
    store: Store, keys: JobKeys, corruption_log: CorruptionLog, before: float
) -> list[date]:
    """Return the dates that ended before then, and that no node has worked on since."""
    last = to_datetime(before).date()

    def read(record: Record) -> tuple[date, float]:
        return _read_day(record, keys), _read_use(record)

    records = await scan_all(store, keys.dates)
    uses = corruption_log.read_all(read, records)
    return [day for day, used in uses if day < last and used < before - _LONGEST_LAG]


def _read_day(record: Record, keys: JobKeys) -> date:
    text = record.key.removeprefix(keys.dates)
    try:
        day = date.fromisoformat(text)
    except ValueError as error:
        raise Corrupt(record.key, str(error)) from error
    if day.isoformat() != text:
        # Another form of a date, which has a record and claims under this one.
        raise Corrupt(record.key, f"a date is written as {day}")
    return day


def _read_use(record: Record) -> float:
    """Return when a node has last worked on the date of a record."""
    return convert_record(record, _DateRecord).used


async def _forget_nodes(
    store: Store,
    keys: JobKeys,
    corruption_log: CorruptionLog,
    before: float,
) -> int:
    """Delete the records of nodes that joined before then and have left or died."""
    count = 0
    for record in await scan_all(store, keys.nodes):
        node = corruption_log.read(read_node_record, record)
        if node is None or node.created >= before or not await _is_gone(store, node):
            continue
        # A process may take the name again at this moment.
        with suppress(Conflict):
            await store.delete(record)
            count += 1
    return count


async def _is_gone(store: Store, node: NodeRecord) -> bool:
    if node.stage == "left":
        return True
    session = await store.get(f"{SESSIONS}{node.incarnation}")
    return session is None or read_session_record(session).state == "dead"
