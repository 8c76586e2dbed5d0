"""The history of scheduled jobs: firings with their results, and gaps.

    schedule/<namespace>/run/<name>/<instant>    a firing, and later its result

Instants in keys count down, so that the newest firing comes first in a listing. A firing's
record can be created once: it proves that its instant was fired.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.job_state import ActiveRun, Gap, RunStatus
from jobsync.core.keys import escape
from jobsync.scheduler.executor import ActionOutcome
from jobsync.scheduler.results import describe_result
from jobsync.stores.contract import Put, Record, Store, find_applied
from jobsync.stores.corruption_log import CorruptionLog, convert_record
from jobsync.stores.paging import head_pages

__all__ = ["HistoryEntry", "JobHistory", "build_entry", "describe_end"]

_COUNTED_PAGE = 10_000
"""Entries that are counted with one request."""
_COUNT_DOWN = str.maketrans("0123456789abcdef", "fedcba9876543210")
_LATEST = 10**11 - 1
"""The latest instant that a key can hold: the year 5138."""


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A firing, or a gap of instants that were not fired."""

    job_name: str = ""
    """Not stored: it is part of the key."""
    cursor: str = ""
    """Not stored: pass it as `after` to read on."""
    status: RunStatus
    id: str = ""
    scheduled_time: float
    """When it was due; the last one's time in a gap."""
    is_manual: bool = False
    owner: str = ""
    """The session that runs it."""
    worker_id: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    duration: float | None = None
    attempts: int = 0
    resumed: int = 0
    result: Json = None
    error: str = ""
    reason: str = ""
    """Why the instants of a gap were not fired."""
    first: float | None = None
    """The first instant of a gap."""
    count: int = 1
    """How many instants it stands for."""
    is_counted: bool = True
    """Whether that is exact."""


class JobHistory:
    """The firings and gaps of the jobs of one namespace.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        prefix: of the namespace.
        components: the events that report what cannot be read.
    """

    def __init__(self, get_store: Callable[[], Store], prefix: str, components: Components) -> None:
        self._get_store = get_store
        self._prefix = prefix
        self._components = components

    async def create(self, name: str, run: ActiveRun, worker: str) -> Record | None:
        """Record that an instant is fired; None if it was fired before.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        return await self.create_entry(name, run, build_entry(run, "running", worker_id=worker))

    async def create_entry(self, name: str, run: ActiveRun, entry: HistoryEntry) -> Record | None:
        """Create the record of a firing with any status; None if there is one.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        key = self.run_key(name, run)
        (outcome,) = await self._get_store().write([Put(key, msgspec.to_builtins(entry))])
        return find_applied(outcome, key)

    async def read(self, name: str, run: ActiveRun) -> tuple[Record, HistoryEntry] | None:
        """Read the record of a firing."""
        record = await self._get_store().get(self.run_key(name, run))
        return None if record is None else (record, convert_record(record, HistoryEntry))

    async def write(self, base: Record, entry: HistoryEntry) -> Record | None:
        """Write a firing's record again; None if somebody else has.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        stored = msgspec.structs.replace(entry, job_name="", cursor="")
        (outcome,) = await self._get_store().write([base.replace(msgspec.to_builtins(stored))])
        return find_applied(outcome, base.key)

    async def write_loss(self, name: str, run: ActiveRun, reason: str, now: float) -> None:
        """Write into the record of a run that it was given up, unless it has a result.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        while True:
            found = await self.read(name, run)
            if found is None:
                # Its process had not begun. A late start finds this record, and does not begin.
                entry = build_entry(run, "lost", ended_at=now, error=reason)
                written = await self.create_entry(name, run, entry)
            elif found[1].id != run.id or found[1].status != "running":
                return
            else:
                entry = msgspec.structs.replace(found[1], status="lost", ended_at=now, error=reason)
                written = await self.write(found[0], entry)
            if written is not None:
                return

    async def write_gap(self, name: str, gap: Gap) -> bool:
        """Add a gap to the history, once; return whether it is new there."""
        entry = HistoryEntry(
            status=gap.kind,
            scheduled_time=gap.last,
            first=gap.first,
            count=gap.count,
            is_counted=gap.is_counted,
            reason=gap.reason,
        )
        key = f"{self._run_prefix(name)}{_invert(gap.last)}-gap-{gap.first}"
        (outcome,) = await self._get_store().write([Put(key, msgspec.to_builtins(entry))])
        return find_applied(outcome, key) is not None

    async def list_entries(
        self,
        name: str,
        *,
        statuses: Sequence[str] = (),
        since: float | None = None,
        limit: int = 50,
        after: str = "",
    ) -> list[HistoryEntry]:
        """Return a job's firings and gaps, the newest first."""
        where: dict[str, Any] | None = {"status": {"$in": list(statuses)}} if statuses else None
        prefix = self._run_prefix(name)
        records = await self._get_store().scan(
            prefix, after=f"{prefix}{after}" if after else "", limit=limit, where=where
        )
        entries = []
        for record in records:
            entry = self._corruption_log.read(_read_entry, record)
            if entry is None:
                continue
            if since is not None and entry.scheduled_time < since:
                break
            cursor = record.key.removeprefix(prefix)
            entries.append(msgspec.structs.replace(entry, job_name=name, cursor=cursor))
        return entries

    async def prune(
        self,
        name: str,
        list_running: Callable[[], Awaitable[Sequence[ActiveRun]]],
        *,
        keep: int,
        oldest: float,
    ) -> int:
        """Remove old firings and gaps of a job: beyond a count, and older than an instant.

        Args:
            name: the job's.
            list_running: reads the runs that go on, whose records are kept. It is called after
                the records were listed: a run is in the state before it has a record, so that
                none of those that begin meanwhile is among the listed ones.
            keep: how many entries are kept.
            oldest: the instant.
        """
        prefix = self._run_prefix(name)
        # The earlier of the two cuts: keys count down.
        cut = f"{prefix}{_invert(int(oldest))}"
        newest = await self._find_key(prefix, keep)
        if newest is not None:
            cut = min(cut, newest)
        removed = 0
        async for old in head_pages(self._get_store(), prefix, after=cut):
            kept = {self.run_key(name, run) for run in await list_running()}
            keys = [head.key for head in old if head.key not in kept]
            await self._get_store().drop(keys)
            removed += len(keys)
        return removed

    async def _find_key(self, prefix: str, position: int) -> str | None:
        """Return the key at a position, counted from 1; "" for 0, None if there are fewer."""
        key, count = "", 0
        pages = head_pages(self._get_store(), prefix, size=_COUNTED_PAGE, limit=position)
        async for heads in pages:
            key, count = heads[-1].key, count + len(heads)
        return key if count == position else None

    def run_key(self, name: str, run: ActiveRun) -> str:
        """Return the key of a firing. One instant has one key, unless it was fired by hand."""
        # Several runs by hand may have one instant: their ids count down as well.
        suffix = f"-{run.id.translate(_COUNT_DOWN)}" if run.is_manual else ""
        return f"{self._run_prefix(name)}{_invert(run.instant)}{suffix}"

    def _run_prefix(self, name: str) -> str:
        return f"{self._prefix}run/{escape(name)}/"

    @cached_property
    def _corruption_log(self) -> CorruptionLog:
        return CorruptionLog(self._get_store().name, self._components.events)


def build_entry(run: ActiveRun, status: RunStatus, **fields: Any) -> HistoryEntry:
    """Return the record of a firing, with more fields or others than those of the run."""
    entry = HistoryEntry(
        status=status,
        id=run.id,
        scheduled_time=run.instant,
        is_manual=run.is_manual,
        owner=run.owner,
        started_at=run.started_at,
        resumed=run.resumed,
    )
    return msgspec.structs.replace(entry, **fields)


def describe_end(run: ActiveRun, worker: str, outcome: ActionOutcome, at: float) -> HistoryEntry:
    """Return the entry of a run whose action has ended at a time."""
    return build_entry(
        run,
        outcome.status,
        worker_id=worker,
        started_at=at - outcome.duration,
        ended_at=at,
        duration=outcome.duration,
        attempts=outcome.attempts,
        result=describe_result(outcome.result),
        error=outcome.error,
    )


def _invert(instant: int) -> str:
    return f"{_LATEST - instant:011d}"


def _read_entry(record: Record) -> HistoryEntry:
    return convert_record(record, HistoryEntry)
