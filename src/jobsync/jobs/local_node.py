"""A node without a fleet, which owns every task, and the records of the tasks that it has ended.

Guarantees: a task runs once at a time on this node. If a database is named, the end of each task
is recorded there, beside the claims of fleets, before `finish` returns; so audits and the SQL
views show it, and later nodes of any kind find it done. Otherwise the ends are known only to this
process. A task that failed is never marked as done later, also if its end cannot be recorded at
first. Nothing keeps other nodes from doing the same tasks. A task that a live node of a fleet
is doing is not recorded, and an event reports it: only a claim's owner may end it. An observer
owns nothing.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date
from typing import Protocol

import msgspec

from jobsync.components import Components
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.clock import Clock, Mono
from jobsync.core.codec import Json
from jobsync.errors import OutcomeUnknown
from jobsync.jobs.events import AuditRefused
from jobsync.jobs.foreign_claims import (
    CLAIM_PAGE,
    Claim,
    ClaimState,
    find_done,
    read_claim,
    scan_claims,
)
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.registration import NodeInfo
from jobsync.jobs.retention import Forgotten, WorkDate, forget
from jobsync.jobs.store_clock import StoreClock
from jobsync.stores.contract import Applied, Put, Record, Store, Unknown
from jobsync.stores.corruption_log import CorruptionLog, read_each
from jobsync.stores.paging import split_pages

__all__ = ["LocalNode", "LocalRecords", "MemoryRecords", "StoredRecords", "describe_local_node"]


class LocalRecords(Protocol):
    """The ends of a local node's tasks."""

    async def start(self) -> None:
        """Start to record."""
        ...

    async def find_done(self, tasks: Collection[str]) -> dict[str, str]:
        """Return which tasks are done, each with the version of its completion."""
        ...

    async def list_done(self) -> set[str]:
        """Return all tasks that are done."""
        ...

    async def add(self, tasks: Mapping[str, Mono], state: ClaimState) -> dict[str, str]:
        """Record the end of tasks, each with its start; return those that were refused."""
        ...

    async def list_all(self, running: Mapping[str, Mono]) -> list[Claim]:
        """Return what is recorded, with the tasks that run now."""
        ...

    async def forget(self, days: float) -> Forgotten:
        """Remove old records."""
        ...

    async def close(self) -> None:
        """Close the store."""
        ...


class LocalNode:
    """A node without a fleet. It owns every task, or none.

    Call `start` first.

    Args:
        total: the number of tokens; it owns all, unless it observes.
        token_of: returns a task's token.
        clock: when tasks start.
        records: the ends of its tasks; in memory by default.
        once_per_date: whether a task that is done is never done again.
        is_observer: whether it owns nothing.
    """

    is_leader = True
    poll_interval = 0.1
    failure: BaseException | None = None
    number = 0
    is_trusted = True
    is_connected = True

    def __init__(
        self,
        total: int,
        token_of: Callable[[str], int],
        clock: Clock,
        records: LocalRecords | None = None,
        *,
        once_per_date: bool = False,
        is_observer: bool = False,
    ) -> None:
        self.tokens = frozenset(() if is_observer else range(total))
        self.token = token_of
        self._clock = clock
        self._records = records or MemoryRecords()
        self._once_per_date = once_per_date
        self._running: dict[str, Mono] = {}
        """The tasks that were claimed and not finished, each with its start."""
        self._ending: set[str] = set()
        self._done: set[str] = set()
        self._failed: dict[str, Mono] = {}
        """The tasks that failed, and whose end is not recorded yet, each with its start."""
        self._recording = asyncio.Lock()
        self.is_retiring = False

    @property
    def running(self) -> list[str]:
        """The tasks that were claimed and not finished."""
        return list(self._running)

    async def start(self) -> None:
        """Start to record, and read what is done already, if that is never done again."""
        await self._records.start()
        if self._once_per_date:
            self._done |= await self._records.list_done()

    def can_claim(self, task: str) -> bool:
        """Whether a task may be done now: not while it runs, nor after `retire`."""
        if self.is_retiring or task in self._running or not self.tokens:
            return False
        return not (self._once_per_date and task in self._done)

    def retire(self) -> None:
        """Claim nothing more."""
        self.is_retiring = True

    async def claim(
        self, tasks: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Claim tasks; return those that were not claimed, each with the reason.

        Raises:
            OutcomeUnknown, Unavailable: nothing was claimed, for lack of an answer of the store.
        """
        if not self.tokens:
            return dict.fromkeys(tasks, "an observer claims nothing")
        if not self._failed.keys().isdisjoint(tasks):
            await self._record_failed()
        done: dict[str, str] = {}
        if self._once_per_date or known is not None:
            done = await self.find_done(tasks)
        # No await from here on: another thread may claim the same tasks.
        lost = {task: "this node does it already" for task in tasks if task in self._running}
        for task, version in done.items():
            if self._once_per_date or (known is not None and known.get(task) != version):
                lost.setdefault(task, "it is done")
        self._running |= {task: self._clock.mono() for task in tasks if task not in lost}
        return lost

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """End tasks; return those whose end was refused, each with the reason.

        A task that cannot be recorded as failed now is recorded later. A task that another call is
        ending already is left to that call.

        Raises:
            OutcomeUnknown: some outcomes are unknown; end the tasks again.
            Unavailable: the store does not answer; end the tasks again.
        """
        ended = {t: self._running[t] for t in tasks if t in self._running and t not in self._ending}
        self._ending |= ended.keys()
        try:
            await self._record_failed()
            refused = await self._records.add(ended, state)
        except BaseException:
            # Also if the call is interrupted: what failed must not be marked as done later.
            if state == "failed":
                self._forget_running(ended)
                self._failed |= ended
            raise
        finally:
            self._ending -= ended.keys()
        self._forget_running(ended)
        if state == "done":
            self._done |= ended.keys() - refused.keys()
        return refused

    async def find_done(self, tasks: Collection[str]) -> dict[str, str]:
        """Return which tasks are done, each with the version of its completion."""
        done = await self._records.find_done(tasks)
        self._done |= done.keys()
        return done

    async def list_claims(self) -> list[Claim]:
        """Return what is recorded of the date; nothing without a database."""
        await self._record_failed()
        return await self._records.list_all(self._running)

    async def forget(self, days: float) -> Forgotten:
        """Remove records older than `days` days.

        Raises:
            Invalid: `days` is less than one.
        """
        return await self._records.forget(days)

    async def stop(self, wait: float) -> None:
        """Record what failed, for `wait` seconds at most, and close the store.

        There is no other node to hand over to.
        """
        try:
            async with asyncio.timeout(wait):
                await self._record_failed()
        finally:
            await self._records.close()

    async def _record_failed(self) -> None:
        """Record the tasks that failed when that could not be recorded."""
        if not self._failed:
            return
        # One at a time: two would record an end twice.
        async with self._recording:
            failed = dict(self._failed)
            await self._records.add(failed, "failed")
            for task in failed:
                del self._failed[task]

    def _forget_running(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            del self._running[task]


class MemoryRecords:
    """Counts how often each task was done, in memory."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    async def start(self) -> None:
        """Do nothing."""

    async def find_done(self, tasks: Collection[str]) -> dict[str, str]:
        """Return which tasks are done, each with how often."""
        return {task: str(self._done[task]) for task in tasks if task in self._done}

    async def list_done(self) -> set[str]:
        """Return all tasks that are done."""
        return set(self._done)

    async def add(self, tasks: Mapping[str, Mono], state: ClaimState) -> dict[str, str]:
        """Count tasks that are done; refuse none."""
        if state == "done":
            self._done |= {task: self._done.get(task, 0) + 1 for task in tasks}
        return {}

    async def list_all(self, running: Mapping[str, Mono]) -> list[Claim]:
        """Return nothing: nothing is recorded."""
        del running
        return []

    async def forget(self, days: float) -> Forgotten:
        """Remove nothing."""
        del days
        return Forgotten(dates=0, claims=0, nodes=0, rebalances=0)

    async def close(self) -> None:
        """Do nothing."""


class StoredRecords:
    """Records the ends of tasks in a store, where fleets have their claims.

    Call `start` first.

    Args:
        store: holds the records; closed by `close`.
        components: clocks, ids and events.
        keys: the keys of the fleet that would do these tasks.
        day: the date whose tasks are done.
        node: this node's name.
        token_of: returns a task's token.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        keys: JobKeys,
        day: date,
        node: str,
        token_of: Callable[[str], int],
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._store_clock = StoreClock(store, components.clock)
        self._events = components.events
        self._keys = keys
        self._day = day
        self._node = node
        self._token_of = token_of
        self._owner = components.ids.incarnation(components.ids.worker())
        self._corruption_log = CorruptionLog(store.name, components.events)
        self._work_date = WorkDate(store, keys, day, self._corruption_log)
        self._sent: dict[str, Json] = {}
        """What was last written for each task whose outcome is not known yet."""

    async def start(self) -> None:
        """Record that a node works on the date."""
        await self._work_date.record(await self._store_clock.read())

    async def find_done(self, tasks: Collection[str]) -> dict[str, str]:
        """Return which tasks are done, each with the version of its completion."""
        keys = [self._keys.claim(self._day, task) for task in tasks]
        return await find_done(self._store, keys, self._corruption_log)

    async def list_done(self) -> set[str]:
        """Return all tasks that are done on the date."""
        done = await scan_claims(
            self._store, self._keys, self._day, self._corruption_log, {"state": "done"}
        )
        return {claim.task for claim in done}

    async def add(self, tasks: Mapping[str, Mono], state: ClaimState) -> dict[str, str]:
        """Record the end of tasks, each with its start; return those that were refused.

        Raises:
            OutcomeUnknown: some outcomes are unknown; call again.
            Unavailable: the store does not answer; call again.
        """
        left = dict(tasks)
        refused: dict[str, str] = {}
        while left:
            found = await self._read(left)
            now = await self._store_clock.read()
            await self._work_date.record(now)
            changes: dict[str, Put] = {}
            for task, started in list(left.items()):
                record, sent = found.get(task), self._sent.get(task)
                if record is not None and sent is not None and record.value == sent:
                    del left[task]
                elif reason := await self._find_conflict(task, found):
                    refused[task] = reason
                    del left[task]
                else:
                    since = now - (self._clock.mono() - started)
                    base = self._decode(record)
                    run = 1 if base is None else base.run + 1
                    claim = self._build(task, run, state, since, now)
                    key = self._keys.claim(self._day, task)
                    changes[task] = Put(key, msgspec.to_builtins(claim), record)
            await self._write(changes, left)
        for task, reason in refused.items():
            self._events.emit(AuditRefused(node=self._node, task_id=task, reason=reason))
        for task in tasks:
            self._sent.pop(task, None)
        return refused

    async def list_all(self, running: Mapping[str, Mono]) -> list[Claim]:
        """Return all claims of the date, with the tasks that run here now."""
        found = await scan_claims(self._store, self._keys, self._day, self._corruption_log)
        claims = {claim.task: claim for claim in found}
        now = await self._store_clock.read()
        for task, started in running.items():
            since = now - (self._clock.mono() - started)
            run = claims[task].run + 1 if task in claims else 1
            claims[task] = self._build(task, run, "running", since, None)
        return list(claims.values())

    async def forget(self, days: float) -> Forgotten:
        """Remove records older than `days` days.

        Raises:
            Invalid: `days` is less than one.
        """
        return await forget(
            self._store,
            self._keys,
            self._corruption_log,
            now=await self._store_clock.read(),
            days=days,
        )

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def _write(self, changes: Mapping[str, Put], left: dict[str, Mono]) -> None:
        """Write ends; remove those that are recorded from `left`."""
        if not changes:
            return
        self._sent |= {task: change.value for task, change in changes.items()}
        unknown = 0
        outcomes = await self._store.write(list(changes.values()))
        for task, outcome in zip(changes, outcomes, strict=True):
            if isinstance(outcome, Applied):
                del left[task]
            elif isinstance(outcome, Unknown):
                unknown += 1
        if unknown:
            raise OutcomeUnknown(self._keys.claims(self._day), f"{unknown} tasks")

    async def _read(self, tasks: Collection[str]) -> dict[str, Record | None]:
        """Return the records of tasks; without those that cannot be read."""
        keys = {self._keys.claim(self._day, task): task for task in tasks}
        found: dict[str, Record | None] = {}
        for page in split_pages(list(keys), CLAIM_PAGE):
            read = await read_each(self._store, page, self._corruption_log.report)
            found |= {keys[key]: record for key, record in read.items()}
        return found

    def _decode(self, record: Record | None) -> Claim | None:
        if record is None or record.deleted:
            return None
        return self._corruption_log.read(read_claim, record)

    async def _find_conflict(self, task: str, found: Mapping[str, Record | None]) -> str:
        """Return why the end of a task cannot be recorded; "" if it can."""
        record = found.get(task)
        claim = self._decode(record)
        is_empty = task in found and (record is None or record.deleted)
        if claim is None:
            return "" if is_empty else "its record cannot be read"
        if claim.state != "running":
            return ""
        session = await self._store.get(f"{SESSIONS}{claim.owner}")
        is_alive = session is not None and read_session_record(session).state == "live"
        return f"{claim.node} is doing it" if is_alive else ""

    def _build(
        self,
        task: str,
        run: int,
        state: ClaimState,
        started: float,
        ended: float | None,
    ) -> Claim:
        return Claim(
            task=task,
            token=self._token_of(task),
            date=self._day.isoformat(),
            node=self._node,
            owner=self._owner,
            number=0,
            run=run,
            state=state,
            started=started,
            ended=ended,
        )


def describe_local_node(name: str) -> NodeInfo:
    """Describe a node without a fleet, which is recorded nowhere."""
    return NodeInfo(
        name=name,
        created_on=None,
        last_heartbeat=None,
        host="",
        pid=os.getpid(),
        stage="ready",
        is_leader=True,
    )
