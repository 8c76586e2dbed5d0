"""Who does which task on which date: exclusive while it is done, by the store's word alone.

Promises: of several nodes that claim a task at once, one gets it. What is running elsewhere
is refused until its owner's session is dead, and for a while longer. A claim is finished by
whoever made it and by nobody else; a late one is refused and reported. A task that was done
may be done again on the same date, as a new run.

    (none) ──▶ running ──▶ done | failed ──▶ running (the next run)
                  └── its owner is dead: abandoned, which is not written but derived ──▶ running

A claim whose write is unknown is closed before anything else: the same name is written as
failed, which takes it or finds our own.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono
from jobsync.errors import Corrupt, JobsyncError, OutcomeUnknown, Unavailable
from jobsync.jobs.places import Places
from jobsync.stores.contract import Applied, Conflicted, Put, Record, Store, Unknown
from jobsync.stores.witness import Witness

__all__ = ["Claim", "ClaimLost", "ClaimState", "Claims", "read_claim"]

ClaimState: TypeAlias = Literal["running", "done", "failed"]

_PAGE = 5000


class ClaimLost(JobsyncError):
    """The task is another node's, or this node may not claim now. Do not do it."""

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(task_id, reason)
        self.task_id = task_id
        self.reason = reason

    def __str__(self) -> str:
        return f"task {self.task_id!r} was not claimed: {self.reason}; do not do it here"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One task on one date."""

    task: str
    token: int
    date: str
    node: str
    owner: str
    """The incarnation that claimed it."""
    number: int
    """The assignment under which it did."""
    run: int
    """Counts how often the task was claimed on this date."""
    state: ClaimState
    started: float
    """When, by the store's clock where it has one."""
    ended: float | None = None


def read_claim(record: Record) -> Claim:
    """Understand a claim's record.

    Raises:
        Corrupt: it is not what any version of this library wrote.
    """
    try:
        return msgspec.convert(record.value, Claim)
    except msgspec.ValidationError as error:
        raise Corrupt(record.key, str(error)) from error


class _Refusal(msgspec.Struct, frozen=True):
    """Why a task is not this node's to do, for now."""

    owner: str
    until: Mono | None
    """None: until its owner is dead."""


class Claims:
    """What one node knows and does about the claims of one date.

    Args:
        store: where claims are.
        components: the clocks.
        membership: whose session the claims hang on, and who knows which others are dead.
        places: the fleet's keys.
        day: which date.
        node: this node's name.
        reclaim_after: seconds between an owner's death and the next claim of its tasks.
        handover_memory: seconds for which what others finished around a hand-over is refused.
        once_per_date: whether what was done is never done again on the same date.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        membership: Membership,
        places: Places,
        day: date,
        node: str,
        *,
        reclaim_after: float,
        handover_memory: float,
        once_per_date: bool,
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._membership = membership
        self._places = places
        self._day = day
        self._node = node
        self._reclaim_after = reclaim_after
        self.memory = handover_memory
        self._once = once_per_date
        self._witness = Witness(store.name, components.events)
        self._running: dict[str, Record] = {}
        # What is done can be claimed again without reading it first.
        self._finished: dict[str, Record] = {}
        self._refused: dict[str, _Refusal] = {}
        self._died: dict[str, Mono] = {}
        self._unclosed: dict[str, Put] = {}
        self._in_flight: dict[str, int] = {}
        self._landed = asyncio.Event()
        self._offset = 0.0

    async def set_clock(self) -> None:
        """Learn by how much the store's clock differs from ours."""
        now = await self._store.now()
        if now is not None:
            self._offset = now - self._clock.wall()

    @property
    def now(self) -> float:
        """The time of day, by the store's clock where it has one."""
        return self._clock.wall().seconds + self._offset

    @property
    def running(self) -> list[str]:
        """The tasks that this node has claimed and not finished, in the order of claiming."""
        return list(self._running)

    def refuses(self, task: str) -> bool:
        """Say whether a task runs already, here or elsewhere, or was just finished elsewhere."""
        if task in self._running or (self._once and task in self._finished):
            return True
        refusal = self._refused.get(task)
        return refusal is not None and not self._is_over(refusal)

    async def load(self, tokens: Collection[int], since: float) -> None:
        """Learn what others do, or have finished since some time, of tokens that are gained."""
        wanted = {"$or": [{"state": "running"}, {"ended": {"$gte": since}}]}
        after = ""
        while True:
            records = await self._store.scan(
                self._places.claims(self._day), after=after, limit=_PAGE, where=wanted
            )
            for record in records:
                self._take_in(record, tokens)
            if len(records) < _PAGE:
                break
            after = records[-1].key
        self._watch()

    async def add(
        self,
        tasks: Mapping[str, int],
        number: int,
        may_run: Callable[[str, int], bool],
        since: float = math.inf,
    ) -> dict[str, str]:
        """Claim tasks, given with their tokens; give those that were not, with the reason.

        Args:
            tasks: each with its token.
            number: the assignment that makes them ours.
            may_run: asked again after the reply: trust may have run out meanwhile.
            since: what was done since then, by the store's clock, is not done again.
        """
        lost = {task: self._why(task) for task in tasks if self.refuses(task)}
        if since < math.inf:
            # What this node itself has done is read again, to see when.
            self._finished = {t: r for t, r in self._finished.items() if t not in tasks}
        wanted = {task: token for task, token in tasks.items() if task not in lost}
        with self._flying(wanted):
            await self._close()
            changes = {task: self._draft(task, token, number) for task, token in wanted.items()}
            taken = await self._send(changes)
            again = [task for task in wanted if task not in taken]
            if again:
                changes, refused = await self._look_again(again, wanted, number, since)
                lost |= refused
                taken |= await self._send(changes)
                lost |= {t: "another node was first" for t in changes if t not in taken}
            late = [task for task in taken if not may_run(task, wanted[task])]
            self._running |= taken
            for task in taken:
                self._finished.pop(task, None)
                self._refused.pop(task, None)
            if late:
                await self.finish(late, "failed")
                lost |= dict.fromkeys(late, "this node's time was up before it could begin")
        return lost

    async def finish(self, tasks: Iterable[str], state: ClaimState) -> dict[str, str]:
        """End tasks of this node; give those whose end was refused, with the reason.

        Raises:
            OutcomeUnknown: nobody can say of some; they stay as they are, and may be ended again.
            Unavailable: the store does not answer; nothing was written.
        """
        ended = self.now
        bases = {task: self._running[task] for task in tasks if task in self._running}
        changes = [
            base.replace({**base.value, "state": state, "ended": ended}) for base in bases.values()
        ]
        outcomes = await self._store.write(changes)
        refused: dict[str, str] = {}
        unknown = 0
        for task, outcome in zip(bases, outcomes, strict=True):
            match outcome:
                case Applied(record):
                    del self._running[task]
                    self._finished[task] = record
                case Conflicted():
                    del self._running[task]
                    refused[task] = "another node has it by now"
                case Unknown():
                    unknown += 1
        if unknown:
            raise OutcomeUnknown(self._places.claims(self._day), f"{unknown} tasks")
        return refused

    def abandon(self) -> None:
        """Forget everything: the session that claimed it is no more."""
        self._running.clear()
        self._finished.clear()
        self._refused.clear()
        self._unclosed.clear()

    async def settle(self, is_ours: Callable[[str, int], bool]) -> None:
        """Wait until no claim is under way for what is no longer ours, and all are closed."""
        while True:
            foreign = [t for t, token in self._in_flight.items() if not is_ours(t, token)]
            if not foreign and not self._unclosed:
                return
            if foreign:
                self._landed.clear()
                await self._landed.wait()
            else:
                await self._close()

    async def scan(self) -> list[Claim]:
        """Give all claims of the date."""
        found: list[Claim] = []
        after = ""
        while True:
            records = await self._store.scan(
                self._places.claims(self._day), after=after, limit=_PAGE
            )
            found += [claim for record in records if (claim := self._read(record)) is not None]
            if len(records) < _PAGE:
                return found
            after = records[-1].key

    async def done_since(self, tasks: Mapping[str, int], since: float) -> set[str]:
        """Give those tasks, given with their tokens, that were done since then."""
        keys = [self._places.claim(self._day, token, task) for task, token in tasks.items()]
        done = set()
        for at in range(0, len(keys), _PAGE):
            for record in await self._store.get_many(keys[at : at + _PAGE]):
                claim = None if record is None else self._read(record)
                if claim is not None and claim.state == "done" and (claim.ended or 0.0) >= since:
                    done.add(claim.task)
        return done

    def is_abandoned(self, claim: Claim) -> bool:
        """Say whether a claim runs in the records only: its owner is dead."""
        owner = claim.owner
        if claim.state != "running" or owner == self._membership.incarnation:
            return False
        return self._membership.is_dead(owner)

    @contextmanager
    def _flying(self, tasks: Mapping[str, int]) -> Iterator[None]:
        self._in_flight |= tasks
        try:
            yield
        finally:
            for task in tasks:
                self._in_flight.pop(task, None)
            self._landed.set()

    def _draft(self, task: str, token: int, number: int, base: Record | None = None) -> Put:
        base = base or self._finished.get(task)
        claim = Claim(
            task=task,
            token=token,
            date=self._day.isoformat(),
            node=self._node,
            owner=self._membership.incarnation,
            number=number,
            run=1 if base is None else read_claim(base).run + 1,
            state="running",
            started=self.now,
        )
        key = self._places.claim(self._day, token, task)
        return Put(key, msgspec.to_builtins(claim), base)

    async def _send(self, changes: Mapping[str, Put]) -> dict[str, Record]:
        """Write claims; give those that are ours. Of unknown ones nothing is believed."""
        if not changes:
            return {}
        outcomes = await self._store.write(list(changes.values()))
        taken = {}
        for (task, change), outcome in zip(changes.items(), outcomes, strict=True):
            match outcome:
                case Applied(record):
                    taken[task] = record
                case Unknown():
                    self._unclosed[task] = change
        if self._unclosed:
            await self._close()
        return taken

    async def _close(self) -> None:
        """Close claims whose writes are unknown, so that none lands with nobody knowing."""
        for task, change in list(self._unclosed.items()):
            failed = {**change.value, "state": "failed", "ended": self.now}
            (outcome,) = await self._store.write([Put(change.key, failed, change.base)])
            if isinstance(outcome, Conflicted):
                found = await self._store.get(change.key)
                if found is not None and found.value == change.value:
                    (outcome,) = await self._store.write([found.replace(failed)])
            if isinstance(outcome, Unknown):
                raise Unavailable(self._store.name, "a claim could not be closed")
            self._unclosed.pop(task, None)

    async def _look_again(
        self, tasks: Sequence[str], tokens: Mapping[str, int], number: int, since: float
    ) -> tuple[dict[str, Put], dict[str, str]]:
        """Read what stood in the way; give the claims to make in its place, and the refusals."""
        keys = [self._places.claim(self._day, tokens[task], task) for task in tasks]
        found = await self._store.get_many(keys, tombstones=True)
        changes: dict[str, Put] = {}
        refused: dict[str, str] = {}
        for task, record in zip(tasks, found, strict=True):
            self._finished.pop(task, None)
            if record is None or record.deleted:
                changes[task] = self._draft(task, tokens[task], number, record)
                continue
            self._take_in(record, {tokens[task]}, finished=False)
            claim = read_claim(record)
            if self.refuses(task):
                refused[task] = self._why(task)
            elif claim.state == "done" and (claim.ended or 0.0) >= since:
                refused[task] = f"{claim.node} has done it meanwhile"
            else:
                changes[task] = self._draft(task, tokens[task], number, record)
        self._watch()
        return changes, refused

    def _take_in(self, record: Record, tokens: Collection[int], *, finished: bool = True) -> None:
        """Remember what another node does or did with a task of these tokens."""
        claim = self._read(record)
        if claim is None or claim.token not in tokens:
            return
        if claim.owner == self._membership.incarnation:
            return
        if claim.state == "running":
            self._refused[claim.task] = _Refusal(claim.owner, None)
        elif claim.state == "done" and self._once:
            self._refused[claim.task] = _Refusal(claim.owner, Mono(math.inf))
        elif finished:
            until = self._clock.mono() + self.memory
            self._refused[claim.task] = _Refusal(claim.owner, until)
        else:
            self._refused.pop(claim.task, None)

    def _read(self, record: Record) -> Claim | None:
        try:
            return read_claim(record)
        except Corrupt as corrupt:
            self._witness.report(corrupt)
            return None

    def _is_over(self, refusal: _Refusal) -> bool:
        now = self._clock.mono()
        if refusal.until is not None:
            return now >= refusal.until
        if not self._membership.is_dead(refusal.owner):
            return False
        # On our own clock, from when we first knew.
        return now - self._died.setdefault(refusal.owner, now) >= self._reclaim_after

    def _why(self, task: str) -> str:
        if task in self._running:
            return "this node does it already"
        if task in self._finished:
            return "this node has done it on this date"
        refusal = self._refused[task]
        what = "is doing it" if refusal.until is None else "has just done it"
        return f"{refusal.owner} {what}"

    def _watch(self) -> None:
        """Watch the owners of what runs elsewhere: their death makes it ours to do."""
        owners = {each.owner for each in self._refused.values() if each.until is None}
        self._membership.watch("claims", owners)
