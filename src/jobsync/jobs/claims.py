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
from contextlib import contextmanager, suppress
from datetime import date
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.errors import Corrupt, OutcomeUnknown, Unavailable
from jobsync.jobs.job_keys import JobKeys
from jobsync.stores.contract import Applied, Conflicted, Put, Record, Store, Unknown
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = ["Claim", "ClaimState", "Claims", "read_claim"]

ClaimState: TypeAlias = Literal["running", "done", "failed"]

_PAGE = 5000
_CLOCK_HOLDS = 60.0
"""Seconds after which the store is asked again for the time, where it matters."""
_HERE = "this node does it already"


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

    key: str
    node: str
    owner: str
    until: Mono | None
    """None: until its owner is dead, or is seen to be done with it."""


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
        places: JobKeys,
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
        self._witness = CorruptionLog(store.name, components.events)
        self._running: dict[str, Record] = {}
        self._ending: set[str] = set()
        # What is done can be claimed again without reading it first.
        self._finished: dict[str, Record] = {}
        self._refused: dict[str, _Refusal] = {}
        self._died: dict[str, Mono] = {}
        self._unclosed: dict[str, Put] = {}
        self._in_flight: dict[str, int] = {}
        self._started = asyncio.Event()
        self._landed = asyncio.Event()
        self._time: float | None = None
        """The store's time of day, when it was last asked."""
        self._asked = components.clock.mono()
        self._refreshed = components.clock.mono()

    async def set_clock(self) -> None:
        """Learn what time it is by the store's clock, where it has one.

        Raises:
            Unavailable: the store does not answer; what was known still holds.
        """
        now = await self._store.now()
        self._asked = self._clock.mono()
        self._time = None if now is None else now.seconds

    @property
    def now(self) -> float:
        """The time of day, by the store's clock where it has one.

        Counted on from when it was last asked, so that a step of our own wall clock is nothing.
        """
        if self._time is None:
            return self._clock.wall().seconds
        return self._time + (self._clock.mono() - self._asked)

    @property
    def has_clock(self) -> bool:
        """Whether `now` is the store's time, which is the same for all nodes."""
        return self._time is not None

    @property
    def running(self) -> list[str]:
        """The tasks that this node has claimed and not finished, in the order of claiming."""
        return list(self._running)

    def knows(self, task: str) -> bool:
        """Say whether this node is claiming a task, does it, or has done it."""
        return task in self._in_flight or task in self._running or task in self._finished

    async def begun(self, tasks: Collection[str]) -> None:
        """Wait until claims of tasks are under way."""
        while not all(map(self.knows, tasks)):
            self._started.clear()
            await self._started.wait()

    def refuses(self, task: str) -> bool:
        """Say whether a task runs already, here or elsewhere, or was just finished elsewhere."""
        if task in self._running or (self._once and self._has_done(task)):
            return True
        refusal = self._refused.get(task)
        return refusal is not None and not self._is_over(refusal)

    def _has_done(self, task: str) -> bool:
        record = self._finished.get(task)
        return record is not None and record.value["state"] == "done"

    async def load(self, tokens: Collection[int], recent: Mapping[str, Json]) -> None:
        """Learn what others do, or have just done, of tokens that are gained.

        Args:
            tokens: which.
            recent: what claims must be like to have ended just now, as a filter.
        """
        done = {"state": "done", **({} if self._once else recent)}
        wanted = {"$or": [{"state": "running"}, done]}
        after = ""
        while True:
            records = await self._store.scan(
                self._places.claims(self._day), after=after, limit=_PAGE, where=wanted
            )
            for record in records:
                if (claim := self._read(record)) is not None:
                    self._take_in(claim, tokens)
            if len(records) < _PAGE:
                break
            after = records[-1].key
        self._watch()

    def note_deaths(self) -> None:
        """Remember, by our own clock, since when the owners of what runs elsewhere are dead."""
        for owner in self._membership.watched("claims"):
            if owner not in self._died and self._membership.is_dead(owner):
                self._died[owner] = self._clock.mono()

    async def refresh(self) -> None:
        """Look again, now and then, at what ran elsewhere: it may be over, and its owner live."""
        now = self._clock.mono()
        if now - self._refreshed < self.memory:
            return
        self._refreshed = now
        keys = [each.key for each in self._refused.values() if each.until is None]
        for at in range(0, len(keys), _PAGE):
            page = keys[at : at + _PAGE]
            found = await read_each(self._store, page, self._witness.report)
            for record in found.values():
                claim = None if record is None or record.deleted else self._read(record)
                if claim is not None and claim.state != "running":
                    self._take_in(claim, {claim.token})
        self._watch()

    async def add(
        self,
        tasks: Mapping[str, int],
        number: int,
        may_run: Callable[[str, int], bool],
        known: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Claim tasks, given with their tokens; give those that were not, with the reason.

        Args:
            tasks: each with its token.
            number: the assignment that makes them ours.
            may_run: asked again after the reply: trust may have run out meanwhile.
            known: of what is done, only these versions may be done again; all, if None.
        """
        lost = {task: _HERE for task in tasks if task in self._in_flight}
        lost |= {task: self._why(task) for task in tasks if self.refuses(task)}
        if known is not None and not self._once:
            # What this node itself has done is read again, to see which completion it is.
            for task in tasks:
                self._finished.pop(task, None)
        wanted = {task: token for task, token in tasks.items() if task not in lost}
        with self._flying(wanted):
            await self._close()
            taken: dict[str, Record] = {}
            sent: dict[str, Put] = {}
            try:
                lost |= await self._take(wanted, number, known, taken, sent)
            except BaseException:
                # Who asked will not do them: they are not ours to mark as done.
                self._unclosed |= sent
                raise
            late = [task for task in taken if not may_run(task, wanted[task])]
            for task, record in taken.items():
                if task not in late:
                    self._running[task] = record
                    self._finished.pop(task, None)
                    self._refused.pop(task, None)
            if late:
                self._unclosed |= {task: sent[task] for task in late}
                lost |= dict.fromkeys(late, "this node's time was up before it could begin")
                with suppress(Unavailable):
                    await self._close()
        return lost

    async def _take(
        self,
        wanted: Mapping[str, int],
        number: int,
        known: Mapping[str, str] | None,
        taken: dict[str, Record],
        sent: dict[str, Put],
    ) -> dict[str, str]:
        """Write claims; add those that are ours to `taken`, give the reasons of the others.

        Those that may have landed, or may yet, are in `sent`, also if this is cancelled.
        """
        changes = {task: self._draft(task, token, number) for task, token in wanted.items()}
        await self._send(changes, taken, sent)
        again = [task for task in wanted if task not in taken]
        if not again:
            return {}
        changes, refused = await self._look_again(again, wanted, number, known)
        await self._send(changes, taken, sent)
        return refused | {t: "another node was first" for t in changes if t not in taken}

    async def finish(self, tasks: Iterable[str], state: ClaimState) -> dict[str, str]:
        """End tasks of this node; give those whose end was refused, with the reason.

        What cannot be ended as failed now is closed later. What somebody else here is ending
        already is left to him.

        Raises:
            OutcomeUnknown: nobody can say of some; they stay as they are, and may be ended again.
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
            if self._clock.mono() - self._asked > _CLOCK_HOLDS:
                await self.set_clock()
            return await self._end(bases, state)
        except (Unavailable, OutcomeUnknown):
            if state == "failed":
                left = {task: base for task, base in bases.items() if task in self._running}
                self._unclosed |= {t: Put(base.key, base.value) for t, base in left.items()}
                self._forget_running(left)
            raise
        finally:
            self._ending -= bases.keys()

    async def _end(self, bases: Mapping[str, Record], state: ClaimState) -> dict[str, str]:
        changes = [
            base.replace({**base.value, "state": state, "ended": self.now})
            for base in bases.values()
        ]
        outcomes = await self._store.write(changes)
        conflicted: dict[str, Record] = {}
        unknown = 0
        for (task, base), outcome in zip(bases.items(), outcomes, strict=True):
            match outcome:
                case Applied(record):
                    self._take_as_ended(task, record)
                case Conflicted():
                    conflicted[task] = base
                case Unknown():
                    unknown += 1
        refused = await self._find_out(conflicted, state)
        if unknown:
            raise OutcomeUnknown(self._places.claims(self._day), f"{unknown} tasks")
        return refused

    async def _find_out(
        self, conflicted: Mapping[str, Record], state: ClaimState
    ) -> dict[str, str]:
        """Find out who was first to end tasks or to take them; give those that others took."""
        keys = {base.key: task for task, base in conflicted.items()}
        found = await read_each(self._store, list(keys), self._witness.report)
        refused: dict[str, str] = {}
        for key, record in found.items():
            task = keys[key]
            ours = read_claim(conflicted[task])
            there = None if record is None or record.deleted else self._read(record)
            is_ours = there is not None and (there.owner, there.run) == (ours.owner, ours.run)
            if record is not None and there is not None and is_ours and there.state == state:
                # An earlier attempt to end it, of which nobody knew, has landed.
                self._take_as_ended(task, record)
            else:
                refused[task] = f"{'nobody' if there is None else there.node} has it by now"
                self._forget_running([task])
        if len(found) < len(keys):
            raise OutcomeUnknown(self._places.claims(self._day), "a claim could not be read")
        return refused

    def _take_as_ended(self, task: str, record: Record) -> None:
        self._forget_running([task])
        self._finished[task] = record
        self._refused.pop(task, None)

    def _forget_running(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            self._running.pop(task, None)

    def abandon(self) -> None:
        """Forget what was known in a session that is no more.

        What runs is kept: its end is a write in place of the claim, so whether somebody has
        taken it over is the store's to say. So is what has yet to be closed.
        """
        self._finished.clear()
        self._refused.clear()

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
            found += self._witness.read_all(read_claim, records)
            if len(records) < _PAGE:
                return found
            after = records[-1].key

    async def done(self, tasks: Mapping[str, int]) -> dict[str, str]:
        """Give those tasks, given with their tokens, that are done, with their versions."""
        keys = [self._places.claim(self._day, token, task) for task, token in tasks.items()]
        done = {}
        for at in range(0, len(keys), _PAGE):
            page = keys[at : at + _PAGE]
            found = await read_each(self._store, page, self._witness.report)
            for record in found.values():
                claim = None if record is None or record.deleted else self._read(record)
                if record is not None and claim is not None and claim.state == "done":
                    done[claim.task] = record.version
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
        self._started.set()
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

    async def _send(
        self, changes: Mapping[str, Put], taken: dict[str, Record], sent: dict[str, Put]
    ) -> None:
        """Write claims; add those that are ours. Of unknown ones nothing is believed."""
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
                    self._unclosed[task] = sent.pop(task)
        await self._close()

    async def _close(self) -> None:
        """Close claims that nobody does, so that none lands, or stays, with nobody knowing.

        Raises:
            Unavailable: they could not all be closed; call again.
        """
        while self._unclosed:
            closing = dict(self._unclosed)
            keys = [change.key for change in closing.values()]
            found = await read_each(self._store, keys, self._witness.report)
            changes: dict[str, Put] = {}
            for task, change in closing.items():
                if change.key not in found:
                    raise Unavailable(self._store.name, "a claim could not be read")
                if (closed := self._closed(change, found[change.key])) is None:
                    self._unclosed.pop(task, None)
                else:
                    changes[task] = closed
            outcomes = await self._store.write(list(changes.values())) if changes else []
            for task, outcome in zip(changes, outcomes, strict=True):
                if isinstance(outcome, Applied):
                    self._unclosed.pop(task, None)
                elif isinstance(outcome, Unknown):
                    raise Unavailable(self._store.name, "a claim could not be closed")

    def _closed(self, change: Put, found: Record | None) -> Put | None:
        """Give the write that closes a claim; None if it has come to nothing by itself."""
        failed = {**change.value, "state": "failed", "ended": self.now}
        if found is not None and found.value == change.value:
            return found.replace(failed)
        base = change.base
        there = None if found is None else found.version
        is_pending = there == (None if base is None else base.version)
        # Takes the name, so that the claim cannot land any more; or finds that it has landed.
        return Put(change.key, failed, base) if is_pending else None

    async def _look_again(
        self,
        tasks: Sequence[str],
        tokens: Mapping[str, int],
        number: int,
        known: Mapping[str, str] | None,
    ) -> tuple[dict[str, Put], dict[str, str]]:
        """Read what stood in the way; give the claims to make in its place, and the refusals."""
        keys = [self._places.claim(self._day, tokens[task], task) for task in tasks]
        found = await read_each(self._store, keys, self._witness.report)
        changes: dict[str, Put] = {}
        refused: dict[str, str] = {}
        for task, key in zip(tasks, keys, strict=True):
            self._finished.pop(task, None)
            if key not in found:
                refused[task] = "its record cannot be read"
                continue
            record = found[key]
            if record is None or record.deleted:
                changes[task] = self._draft(task, tokens[task], number, record)
                continue
            claim = self._read(record)
            if claim is None:
                refused[task] = "its record cannot be read"
                continue
            if why := self._stands_in_the_way(record, claim, number, known):
                refused[task] = why
            else:
                changes[task] = self._draft(task, tokens[task], number, record)
        self._watch()
        return changes, refused

    def _stands_in_the_way(
        self, record: Record, claim: Claim, number: int, known: Mapping[str, str] | None
    ) -> str:
        """Say why a task cannot be claimed in place of a claim that was found; "" if it can."""
        if claim.number > number:
            # Whoever was given the task since cannot have got it without our death.
            return f"{claim.node} was given it, and this node does not know yet"
        if claim.state == "done" and self._once:
            self._take_in(claim, {claim.token})
            return f"{claim.node} has done it on this date"
        before = self._refused.get(claim.task)
        # What was waited for to end, or to be given up, and has ended, was done just now.
        is_recent = before is not None and before.until is None
        self._take_in(claim, {claim.token}, finished=is_recent)
        if self.refuses(claim.task):
            return self._why(claim.task)
        is_news = known is not None and known.get(claim.task) != record.version
        return f"{claim.node} has done it meanwhile" if claim.state == "done" and is_news else ""

    def _take_in(self, claim: Claim, tokens: Collection[int], *, finished: bool = True) -> None:
        """Remember what another node does or did with a task of these tokens."""
        if claim.token not in tokens or claim.owner == self._membership.incarnation:
            return
        key = self._places.claim(self._day, claim.token, claim.task)
        until = Mono(math.inf) if self._once else self._clock.mono() + self.memory
        if claim.state == "running":
            self._refused[claim.task] = _Refusal(key, claim.node, claim.owner, None)
        elif claim.state == "done" and (self._once or finished):
            self._refused[claim.task] = _Refusal(key, claim.node, claim.owner, until)
        else:
            self._refused.pop(claim.task, None)

    def _read(self, record: Record) -> Claim | None:
        return self._witness.read(read_claim, record)

    def _is_over(self, refusal: _Refusal) -> bool:
        now = self._clock.mono()
        if refusal.until is not None:
            return now >= refusal.until
        died = self._died.get(refusal.owner)
        return died is not None and now - died >= self._reclaim_after

    def _why(self, task: str) -> str:
        if task in self._running:
            return _HERE
        if self._once and self._has_done(task):
            return "this node has done it on this date"
        refusal = self._refused[task]
        what = "is doing it" if refusal.until is None else "has just done it"
        return f"{refusal.node} {what}"

    def _watch(self) -> None:
        """Watch the owners of what runs elsewhere: their death makes it ours to do."""
        owners = {each.owner for each in self._refused.values() if each.until is None}
        self._membership.watch("claims", owners)
        self._died = {owner: at for owner, at in self._died.items() if owner in owners}
        self.note_deaths()
