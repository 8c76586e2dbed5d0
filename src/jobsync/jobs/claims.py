"""The claims of one node on one date. A task runs on one node at a time; the store decides.

Guarantees: if several nodes claim a task at once, one gets it. A task that runs on another node
is refused until that node's session is dead, and for a while longer. Only the claim's owner
finishes it; a late finish is refused and reported. A task that is done may be done again on the
same date, as a new run.

    (none) ──▶ running ──▶ done | failed ──▶ running (the next run)
                  └── owner is dead: abandoned, which is derived and not written ──▶ running

A claim with an unknown outcome is closed before anything else.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date

import msgspec

from jobsync.coordination.membership import Membership
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.jobs.events import AuditRefused
from jobsync.jobs.foreign_claims import (
    Claim,
    ClaimRules,
    ClaimState,
    ForeignClaims,
    find_done,
    read_claim,
    scan_claims,
)
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.store_clock import StoreClock
from jobsync.jobs.unclosed_claims import UnclosedClaims
from jobsync.stores.contract import Applied, Conflicted, Put, Record, Unknown
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = ["Claims"]

_RUNS_HERE = "this node does it already"


class Claims:
    """One node's claims of one date.

    Args:
        membership: the session that the claims depend on; knows which others are dead.
        keys: the fleet's keys.
        day: the date.
        node: this node's name.
        token_of: returns a task's token.
        rules: when a task may be claimed that another node has claimed.
    """

    def __init__(
        self,
        membership: Membership,
        keys: JobKeys,
        day: date,
        node: str,
        token_of: Callable[[str], int],
        rules: ClaimRules,
    ) -> None:
        store, components = membership.store, membership.components
        self._store = store
        self.store_clock = StoreClock(store, components.clock)
        self._membership = membership
        self._keys = keys
        self._day = day
        self._node = node
        self.handover_memory = rules.handover_memory
        self._once_per_date = rules.once_per_date
        self._events = components.events
        self._corruption_log = CorruptionLog(store.name, components.events)
        self.foreign = ForeignClaims(membership, keys, day, self._corruption_log, token_of, rules)
        self._running: dict[str, Record] = {}
        self._ending: set[str] = set()
        # A task in here can be claimed again without reading its record first.
        self._finished: dict[str, Record] = {}
        self._unclosed = UnclosedClaims(store, self.store_clock, self._corruption_log)
        self._in_flight: dict[str, int] = {}
        self._started = asyncio.Event()
        self._landed = asyncio.Event()

    @property
    def running(self) -> list[str]:
        """The tasks that this node has claimed and not finished, in the order of claiming."""
        return list(self._running)

    def has_claimed(self, task: str) -> bool:
        """Whether this node is claiming a task, runs it, or has finished it."""
        return task in self._in_flight or task in self._running or task in self._finished

    async def wait_until_claiming(self, tasks: Collection[str]) -> None:
        """Wait until this node is claiming all of these tasks, or has claimed them."""
        while not all(map(self.has_claimed, tasks)):
            self._started.clear()
            await self._started.wait()

    def is_refused(self, task: str) -> bool:
        """Whether a task runs already, here or elsewhere, or was just finished elsewhere."""
        if task in self._running or (self._once_per_date and self._has_done(task)):
            return True
        return self.foreign.is_refused(task)

    def _has_done(self, task: str) -> bool:
        record = self._finished.get(task)
        return record is not None and record.value["state"] == "done"

    async def add(
        self,
        tasks: Mapping[str, int],
        number: int,
        may_run: Callable[[str, int], bool],
        known: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Claim tasks; return those that were not claimed, each with the reason.

        Args:
            tasks: each with its token.
            number: the assignment that gives them to this node.
            may_run: called again after the reply: trust may have expired meanwhile.
            known: only these versions of tasks that are done may be done again; all if None.
        """
        lost = {task: _RUNS_HERE for task in tasks if task in self._in_flight}
        lost |= {task: self._explain(task) for task in tasks if self.is_refused(task)}
        if known is not None and not self._once_per_date:
            # Tasks that this node has finished are read again, to see which completion it is.
            for task in tasks:
                self._finished.pop(task, None)
        wanted = {task: token for task, token in tasks.items() if task not in lost}
        with self._claiming(wanted):
            await self._unclosed.close()
            taken: dict[str, Record] = {}
            sent: dict[str, Put] = {}
            try:
                lost |= await self._claim(wanted, number, known, taken, sent)
            except BaseException:
                # The caller will not run them, so they must not be marked as done.
                self._unclosed.add(sent)
                raise
            late = [task for task in taken if not may_run(task, wanted[task])]
            for task, record in taken.items():
                if task not in late:
                    self._running[task] = record
                    self._finished.pop(task, None)
                    self.foreign.forget(task)
            if late:
                self._unclosed.add({task: sent[task] for task in late})
                lost |= dict.fromkeys(late, "this node's trust expired before it could start")
                with suppress(Unavailable):
                    await self._unclosed.close()
        return lost

    async def _claim(
        self,
        wanted: Mapping[str, int],
        number: int,
        known: Mapping[str, str] | None,
        taken: dict[str, Record],
        sent: dict[str, Put],
    ) -> dict[str, str]:
        """Write claims; add those that are ours to `taken`, return the others with reasons.

        Claims that have landed or may still land are in `sent`, also if this is cancelled.
        """
        changes = {task: self._build_claim(task, token, number) for task, token in wanted.items()}
        await self._write(changes, taken, sent)
        conflicted = [task for task in wanted if task not in taken]
        if not conflicted:
            return {}
        changes, refused = await self._resolve_claims(conflicted, wanted, number, known)
        await self._write(changes, taken, sent)
        return refused | {t: "another node was first" for t in changes if t not in taken}

    async def finish(self, tasks: Iterable[str], state: ClaimState) -> dict[str, str]:
        """End tasks of this node; return those whose end was refused, with the reason.

        An event reports each refusal, also if the call fails because of another task.

        A task that cannot be ended as failed now is closed later. A task that another call is
        ending already is left to that call.

        Raises:
            OutcomeUnknown: some outcomes are unknown; those tasks can be ended again.
            Unavailable: the store does not answer; nothing was written.
        """
        bases = {
            task: self._running[task]
            for task in tasks
            if task in self._running and task not in self._ending
        }
        if not bases:
            return {}
        self._ending |= bases.keys()
        try:
            await self.store_clock.refresh()
            return await self._end(bases, state)
        except BaseException:
            # Also if the call is interrupted: what failed must not be marked as done later.
            if state == "failed":
                left = {task: base for task, base in bases.items() if task in self._running}
                self._unclosed.add({t: Put(base.key, base.value) for t, base in left.items()})
                self._forget_running(left)
            raise
        finally:
            self._ending -= bases.keys()

    async def _end(self, bases: Mapping[str, Record], state: ClaimState) -> dict[str, str]:
        changes = [
            base.replace({**base.value, "state": state, "ended": self.store_clock.now})
            for base in bases.values()
        ]
        outcomes = await self._store.write(changes)
        conflicted: dict[str, Record] = {}
        unknown = 0
        for (task, base), outcome in zip(bases.items(), outcomes, strict=True):
            match outcome:
                case Applied(record):
                    self._record_end(task, record)
                case Conflicted():
                    conflicted[task] = base
                case Unknown():
                    unknown += 1
        refused = await self._resolve_ends(conflicted, state)
        if unknown:
            raise OutcomeUnknown(self._keys.claims(self._day), f"{unknown} tasks")
        return refused

    async def _resolve_ends(
        self, conflicted: Mapping[str, Record], state: ClaimState
    ) -> dict[str, str]:
        """Find out whether we or another node was first; return the tasks that others have."""
        keys = {base.key: task for task, base in conflicted.items()}
        found = await read_each(self._store, list(keys), self._corruption_log.report)
        refused: dict[str, str] = {}
        for key, record in found.items():
            task = keys[key]
            ours = read_claim(conflicted[task])
            current = None if record is None or record.deleted else self._read(record)
            is_ours = current is not None and (current.owner, current.run) == (ours.owner, ours.run)
            if record is not None and current is not None and is_ours and current.state == state:
                # An earlier attempt to end it, with an unknown outcome, has landed.
                self._record_end(task, record)
            else:
                refused[task] = f"{'nobody' if current is None else current.node} has it by now"
                self._forget_running([task])
                # Here, because an error of the same call leaves no other chance to.
                refusal = AuditRefused(node=self._node, task_id=task, reason=refused[task])
                self._events.emit(refusal)
        if len(found) < len(keys):
            raise OutcomeUnknown(self._keys.claims(self._day), "a claim could not be read")
        return refused

    def _record_end(self, task: str, record: Record) -> None:
        self._forget_running([task])
        self._finished[task] = record
        self.foreign.forget(task)

    def _forget_running(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            self._running.pop(task, None)

    def reset(self) -> None:
        """Forget what was known in a session that has ended.

        Running tasks stay: their end replaces the claim's record, so the store decides whether
        another node has taken them over. Claims that must still be closed stay too.
        """
        self._finished.clear()
        self.foreign.clear()

    async def settle(self, is_ours: Callable[[str, int], bool]) -> None:
        """Wait until claims of tasks that this node no longer owns have ended and are closed."""
        while True:
            foreign = [t for t, token in self._in_flight.items() if not is_ours(t, token)]
            if not foreign and not self._unclosed:
                return
            if foreign:
                self._landed.clear()
                await self._landed.wait()
            else:
                await self._unclosed.close()

    async def list_all(self) -> list[Claim]:
        """Return all claims of the date."""
        return await scan_claims(self._store, self._keys, self._day, self._corruption_log)

    async def find_done(self, tasks: Iterable[str]) -> dict[str, str]:
        """Return which of these tasks are done, with their versions."""
        keys = [self._keys.claim(self._day, task) for task in tasks]
        return await find_done(self._store, keys, self._corruption_log)

    @contextmanager
    def _claiming(self, tasks: Mapping[str, int]) -> Iterator[None]:
        self._in_flight |= tasks
        self._started.set()
        try:
            yield
        finally:
            for task in tasks:
                self._in_flight.pop(task, None)
            self._landed.set()

    def _build_claim(self, task: str, token: int, number: int, base: Record | None = None) -> Put:
        base = base or self._finished.get(task)
        claim = Claim(
            task=task,
            token=token,
            date=self._day.isoformat(),
            node=self._node,
            owner=self._membership.incarnation,
            number=number,
            run=1 if base is None or base.deleted else read_claim(base).run + 1,
            state="running",
            started=self.store_clock.now,
        )
        key = self._keys.claim(self._day, task)
        return Put(key, msgspec.to_builtins(claim), base)

    async def _write(
        self, changes: Mapping[str, Put], taken: dict[str, Record], sent: dict[str, Put]
    ) -> None:
        """Write claims; add those that are ours to `taken`. Unknown ones are closed."""
        if not changes:
            return
        sent |= changes
        try:
            outcomes = await self._store.write(list(changes.values()))
        except Unavailable:
            # Nothing was written.
            for task in changes:
                del sent[task]
            raise
        for task, outcome in zip(changes, outcomes, strict=True):
            match outcome:
                case Applied(record):
                    taken[task] = record
                case Conflicted():
                    del sent[task]
                case Unknown():
                    self._unclosed.add({task: sent.pop(task)})
        await self._unclosed.close()

    async def _resolve_claims(
        self,
        tasks: Sequence[str],
        tokens: Mapping[str, int],
        number: int,
        known: Mapping[str, str] | None,
    ) -> tuple[dict[str, Put], dict[str, str]]:
        """Read the conflicting records; return the claims that replace them, and the refusals."""
        keys = [self._keys.claim(self._day, task) for task in tasks]
        found = await read_each(self._store, keys, self._corruption_log.report)
        changes: dict[str, Put] = {}
        refused: dict[str, str] = {}
        for task, key in zip(tasks, keys, strict=True):
            self._finished.pop(task, None)
            if key not in found:
                refused[task] = "its record cannot be read"
                continue
            record = found[key]
            if record is None or record.deleted:
                changes[task] = self._build_claim(task, tokens[task], number, record)
                continue
            claim = self._read(record)
            if claim is None:
                refused[task] = "its record cannot be read"
                continue
            if reason := self._find_conflict(record, claim, number, known):
                refused[task] = reason
            else:
                changes[task] = self._build_claim(task, tokens[task], number, record)
        self.foreign.watch_owners()
        return changes, refused

    def _find_conflict(
        self, record: Record, claim: Claim, number: int, known: Mapping[str, str] | None
    ) -> str:
        """Return why a task cannot be claimed in place of the claim that was read; "" if it can."""
        if claim.number > number:
            # That node can have got the task only after our session was declared dead.
            return f"{claim.node} was given it, and this node does not know yet"
        if claim.state == "done" and self._once_per_date:
            self.foreign.remember(claim)
            return f"{claim.node} has done it on this date"
        # A task that we waited for and that has ended was finished just now.
        is_recent = self.foreign.was_running(claim.task)
        self.foreign.remember(claim, finished=is_recent)
        if self.is_refused(claim.task):
            return self._explain(claim.task)
        is_new = known is not None and known.get(claim.task) != record.version
        return f"{claim.node} has done it meanwhile" if claim.state == "done" and is_new else ""

    def _read(self, record: Record) -> Claim | None:
        return self._corruption_log.read(read_claim, record)

    def _explain(self, task: str) -> str:
        if task in self._running:
            return _RUNS_HERE
        if self._once_per_date and self._has_done(task):
            return "this node has done it on this date"
        return self.foreign.explain(task)
