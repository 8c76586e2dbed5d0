"""Fires jobs: sleeps until the next instant of all jobs on duty, and decides what is due.

The coordinator has all jobs on duty that its code has. A job that its code lacks is on duty in the
oldest process that has it. Two processes that have a job on duty at once are harmless: a start is
a conditional write of the job's state.

A coordinator notes how far it got (`Progress`), so that its successor reads only the jobs that
were due since, that still ran, or that an operator has changed.
"""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import msgspec

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import Wakeup
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.coordination.term import Term
from jobsync.core.clock import Mono
from jobsync.core.firing import Advance, add_request, advance, next_due
from jobsync.core.job_state import ActiveRun, JobState, RunRequest, find_schedule
from jobsync.errors import Corrupt, Fenced, NewerFormat, OutcomeUnknown, Unavailable
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import Edits, JobStore, Progress, StoredJob
from jobsync.scheduler.runs import KnownJob, Runs

__all__ = ["FiringLoop"]

_LONGEST_WAIT = 3600.0
_GRAIN = 0.005
_RETRY = 1.0
"""Seconds until a job is looked at again whose store did not answer."""
_AT_START = "run_on_start"
"""Who asks for a run that follows the start of a fleet."""
_CHUNK = 500
"""Schedules that are computed before other tasks get a turn."""


class _Assignment(NamedTuple):
    """Jobs that are to be on duty."""

    names: frozenset[str]
    term: Term | None
    code: str


class FiringLoop:
    """Fires the jobs on duty, until it is cancelled.

    Args:
        cache: the states of jobs.
        runs: starts them.
        known: the jobs whose code this process has, by name.
        membership: this process's session.
        clock: the time by which instants are due.
        components: time and ids.
        on_veto: called with the reason when this machine's clock is wrong, and with "" when it is
            right again.
        restore: stores the definition of a job again whose state is gone.
    """

    def __init__(
        self,
        cache: JobCache,
        runs: Runs,
        known: Mapping[str, KnownJob],
        membership: Membership,
        clock: FleetClock,
        components: Components,
        on_veto: Callable[[str], object],
        restore: Callable[[str], Awaitable[object]],
    ) -> None:
        self._cache = cache
        self._jobs: JobStore = cache.jobs
        self._runs = runs
        self._known = known
        self._membership = membership
        self._clock = clock
        self._components = components
        self._on_veto = on_veto
        self._restore = restore
        self._duty: frozenset[str] = frozenset()
        self._term: Term | None = None
        self._assignment: _Assignment | None = None
        self._since = 0.0
        """When this process got its jobs on duty, by the fleet's clock."""
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        """Of the entries: of jobs that are due at once, the first one asked for is first."""
        self._planned: dict[str, float] = {}
        """When each job is to be looked at; other entries of the heap are outdated."""
        self._advancing: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        """Jobs that are to be looked at again, once they have advanced."""
        self._waiting: dict[str, None] = {}
        """Jobs that are due and wait for a run to end, the longest first."""
        self._delayed: set[str] = set()
        """Jobs that have waited for a run to end, and are not decided since."""
        self._undecided: set[str] = set()
        """Jobs that were looked at without an answer from the store."""
        self._edits = Edits()
        self._starts: set[str] = set()
        """The jobs that run when the fleet starts."""
        self._progress = Progress()
        self._code = ""
        self._is_dirty = False
        """Whether anything was decided since the progress was written."""
        self._veto = ""
        self._wakeup = Wakeup(components.clock, _GRAIN)
        self._beat_wakeup = Wakeup(components.clock, _GRAIN)

    @property
    def duty(self) -> frozenset[str]:
        """The jobs that this process fires."""
        return self._duty

    def check_edits(self) -> None:
        """Look soon at what operators have changed."""
        self._beat_wakeup.set()

    def look_at(self, name: str) -> None:
        """Look at one job now, if it is on duty."""
        if name in self._duty:
            self._plan(name, 0.0)

    def assign(self, names: Collection[str], term: Term | None, code: str) -> None:
        """Put jobs on duty, in place of those that were.

        Args:
            names: of jobs that this process knows.
            term: in which this process leads; None if it does not.
            code: the digest of this process's code.
        """
        self.drop()
        if names or term is not None:
            # A leader without jobs may get some later.
            self._assignment = _Assignment(frozenset(names), term, code)
            self._wakeup.set()

    def add(self, name: str) -> None:
        """Put one more job on duty, if any are."""
        if self._assignment is not None:
            self._assignment = self._assignment._replace(names=self._assignment.names | {name})
        elif self._term is not None:
            self._duty |= {name}
            if self._runs_on_start(name):
                self._starts.add(name)
            self._plan(name, 0.0)

    def drop(self, name: str | None = None) -> None:
        """Take one job off duty, or all. Runs that have begun go on."""
        if name is not None:
            self._duty -= {name}
            self._planned.pop(name, None)
            return
        self._duty, self._term, self._assignment = frozenset(), None, None
        for names in (self._planned, self._heap, self._waiting, self._delayed, self._undecided):
            names.clear()

    async def run(self) -> None:
        """Fire jobs until cancelled."""
        async with asyncio.TaskGroup() as group:
            # Beside it: a slow reply to a heartbeat's requests delays no firing.
            group.create_task(self._beat_forever())
            while True:
                await self._begin_assigned_duty()
                self._start_due(group)
                await self._wakeup.wait(self._find_wakeup())

    async def finish_starts(self) -> None:
        """Wait until nothing is being started."""
        if self._advancing:
            await asyncio.wait(list(self._advancing.values()))

    async def _begin_assigned_duty(self) -> None:
        """Put on duty what was assigned since the last call; try again if the store is silent."""
        if (assignment := self._assignment) is None:
            return
        try:
            await self._begin_duty(*assignment)
        except (Unavailable, OutcomeUnknown):
            await self._components.clock.sleep(_RETRY)
            self._wakeup.set()
        except (Corrupt, NewerFormat) as error:
            self._jobs.report_note(error)
            await self._components.clock.sleep(self._membership.timing.heartbeat)
            self._wakeup.set()
        except Fenced:
            # Another process leads by now; this one is about to be told.
            self.drop()

    async def _begin_duty(self, names: frozenset[str], term: Term | None, code: str) -> None:
        """Read what is needed of jobs that are assigned, and plan when to look at each."""
        await self._check_clock()
        self._since = self._clock.now()
        self._cache.known.clear()
        edits = await self._jobs.read_edits()
        self._edits = edits or Edits()
        self._starts = {name for name in names if self._runs_on_start(name)}
        unsettled = set(names)
        if term is not None and term.epoch:
            unsettled = await self._find_unsettled(names, term, code)
            if edits is None:
                # Any of them may have been changed.
                unsettled = set(names)
        elif term is not None:
            # Without an election nobody notes the fleet: the oldest process asks.
            older = {w for w in await self._find_fleet() if w < self._membership.worker_id}
            await self._request_starts(names, term, Progress(fleet=tuple(older)))
        self._cache.keep(await self._jobs.read_many(sorted(unsettled | {*self._edits.special})))
        if self._assignment != (names, term, code):
            return
        self._duty, self._term, self._assignment, self._code = names, term, None, code
        for number, name in enumerate(sorted(names)):
            self._plan(name, self._first_look(name, is_settled=name not in unsettled))
            if number % _CHUNK == _CHUNK - 1:
                await asyncio.sleep(0)
        self._beat_wakeup.set()
        self._wakeup.set()

    async def _find_unsettled(self, names: frozenset[str], term: Term, code: str) -> set[str]:
        """Return the jobs that may have something undecided, by what the last leader noted."""
        before = await self._read_progress(term)
        self._progress = Progress()
        before = await self._request_starts(names, term, before)
        if await self._jobs.read_defined() != code:
            # Another version of the code says when they are due.
            return set(names)
        covered = names if before.code == code else await self._jobs.read_code(before.code)
        unsettled = {*before.open, *(names - covered)}
        for number, name in enumerate(names - unsettled):
            schedule = find_schedule(self._assume(name))
            newest = schedule.latest_until(int(self._since))
            if newest is not None and newest > before.until:
                unsettled.add(name)
            if number % _CHUNK == _CHUNK - 1:
                await asyncio.sleep(0)
        return unsettled & names

    async def _read_progress(self, term: Term) -> Progress:
        """Read how far the last leader got; not at all, if that cannot be read."""
        try:
            return self._jobs.decode_progress(await term.get(self._jobs.progress_key))
        except (Corrupt, NewerFormat) as error:
            self._jobs.report_note(error)
            return Progress()

    async def _request_starts(
        self, names: Collection[str], term: Term, before: Progress
    ) -> Progress:
        """Ask for the runs that follow the start of a fleet, if all of the last one are gone.

        Returns:
            The progress with the present fleet, which is noted at once: a successor asks no more.
        """
        wanted = sorted(self._starts & {*names})
        fleet = await self._find_fleet() if wanted else set[str]()
        if not wanted or fleet & {*before.fleet}:
            return before
        for name in wanted:
            (run_id,) = self._components.ids.records(1)
            request = RunRequest(id=run_id, at=self._clock.now(), by=_AT_START)
            await self._cache.update(name, partial(_request_start, request=request))
        progress = msgspec.structs.replace(before, fleet=tuple(sorted(fleet)))
        if term.epoch:
            await term.put(self._jobs.progress_key, msgspec.to_builtins(progress))
        return progress

    def _runs_on_start(self, name: str) -> bool:
        return self._known[name].options.definition.run_on_start

    def _assume(self, name: str) -> JobState:
        """Return a job's state, or what it is if nobody has changed it."""
        stored = self._cache.known.get(name)
        if stored is not None:
            return stored.state
        return JobState(definition=self._known[name].options.definition, defined_by="", last=0)

    def _first_look(self, name: str, *, is_settled: bool) -> float | None:
        """Return when a job is to be looked at first.

        Of a job that was not read because it was settled: at its first instant after this process
        got it, even if that has passed while others were read.
        """
        stored = self._cache.known.get(name)
        if stored is None:
            state = msgspec.structs.replace(self._assume(name), last=int(self._since))
            return next_due(name, state) if is_settled else 0.0
        state = stored.state
        if state.running or state.queued or state.requests or state.gaps:
            return 0.0
        return next_due(name, state)

    def _plan(self, name: str, when: float | None) -> None:
        """Look at a job on duty at a time of the fleet's clock; never, if None."""
        if when is None or name not in self._duty:
            self._planned.pop(name, None)
            return
        self._planned[name] = when
        heapq.heappush(self._heap, (when, next(self._numbers), name))
        if self._heap[0][-1] == name:
            self._wakeup.set()

    def _find_wakeup(self) -> Mono:
        """Return when to look again."""
        now = self._components.clock.mono()
        wakeup = now + _LONGEST_WAIT
        while self._heap and self._planned.get(self._heap[0][-1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._heap and not self._clock.veto:
            wakeup = min(wakeup, now + max(0.0, self._heap[0][0] - self._clock.now()))
        return wakeup

    def _start_due(self, group: asyncio.TaskGroup) -> None:
        """Look at each job whose time has come, in a task of its own."""
        if self._clock.veto:
            if not self._veto:
                # The clock was set since the last beat, or no beat was yet: the next reports it.
                self._beat_wakeup.set()
            return
        now = self._clock.now()
        while self._heap and self._heap[0][0] <= now:
            when, _, name = heapq.heappop(self._heap)
            if self._planned.get(name) != when:
                continue
            del self._planned[name]
            if name in self._advancing:
                # What makes us look may have happened after its decision.
                self._again.add(name)
                continue
            if self._runs.room <= len(self._advancing):
                self._waiting[name] = None
                self._delayed.add(name)
                continue
            task = group.create_task(self._advance(name))
            self._advancing[name] = task
            task.add_done_callback(partial(self._on_advanced, name))

    def _on_advanced(self, name: str, _: asyncio.Task[None]) -> None:
        self._advancing.pop(name, None)
        self._look_at_waiting()
        if name in self._again:
            self._again.discard(name)
            self.look_at(name)

    def on_run_end(self, name: str) -> None:
        """Look at those jobs that waited for room, and then at one whose run has ended."""
        self._look_at_waiting()
        self.look_at(name)

    def _look_at_waiting(self) -> None:
        """Look at the jobs that wait for room: there may be some now."""
        waiting, self._waiting = self._waiting, {}
        for name in waiting:
            self.look_at(name)

    async def _advance(self, name: str) -> None:
        """Decide one job, and start what is to be started."""
        job = self._known.get(name)
        if job is None:
            # It was removed meanwhile.
            return
        self._undecided.add(name)
        owner = self._membership.incarnation
        (new_id,) = self._components.ids.records(1)
        while True:
            try:
                await self._advance_once(job, owner, new_id)
            except (Unavailable, OutcomeUnknown):
                if not (self._cache.is_unsure(name) and self._is_session(owner)):
                    self._plan(name, self._clock.now() + _RETRY)
                    return
                # What may be recorded as running here has to run here, whoever leads by then.
                await self._components.clock.sleep(_RETRY)
            except (Corrupt, NewerFormat) as error:
                # Nothing can be done until the record is repaired.
                self._jobs.report(name, error)
                self._plan(name, self._clock.now() + self._membership.timing.timeout)
                return
            else:
                self._undecided.discard(name)
                self._delayed.discard(name)
                return

    def _is_session(self, incarnation: str) -> bool:
        """Whether a session is still this process's."""
        return self._membership.incarnation == incarnation and not self._membership.has_ended

    async def _advance_once(self, job: KnownJob, owner: str, new_id: str) -> None:
        """Write what `advance` decides about a job, and start what that says.

        Args:
            job: which one.
            owner: the session that starts it.
            new_id: of the run that would start. A repeated call recognises what an earlier one has
                written, if the reply was lost.

        Raises:
            Unavailable, OutcomeUnknown: the store does not answer, or the session is not current.
        """
        name, now = job.name, self._clock.now()
        decided: list[Advance] = []
        gone: set[str] = set()

        def decide(state: JobState) -> JobState | None:
            mine = state.find_run(new_id)
            if mine is not None or name not in self._duty:
                decided[:] = [Advance(state, () if mine is None else (mine,))]
                return None
            result = advance(
                name,
                state,
                now,
                owner=owner,
                new_id=lambda: new_id,
                is_orphan=lambda run: self._is_orphan(run, gone),
                late_reason=self._explain_lateness(name, state),
            )
            decided[:] = [result]
            return result.state

        cached = await self._read_current(name, owner)
        if cached is None:
            return
        gone |= await self._find_gone(cached.state)
        if not self._membership.is_trusted:
            # Others may believe this process dead: they would resume at once what it starts.
            raise Unavailable("the session", "it is not current", "wait for the store")
        stored = await self._cache.update(name, decide)
        if stored is None:
            return
        (result,) = decided
        self._is_dirty = True
        for run in result.starts:
            self._runs.start(job, stored, run)
        for run in result.lost:
            reason = "its process has ended" if run.is_manual else "its processes ended too often"
            await self._runs.record_loss(name, run, reason)
        await self._cache.write_gaps(name)
        if name in self._duty:
            self._watch_owners()
            self._plan(name, self._next_look(name))

    async def _read_current(self, name: str, owner: str) -> StoredJob | None:
        """Return a job's state; from memory, if only this process can have changed it."""
        cached = self._cache.known.get(name)
        if cached is None or any(run.owner != owner for run in cached.state.running):
            # Its process may have ended a run without our knowing.
            cached = await self._cache.read(name)
        if cached is None and name in self._duty:
            # Somebody has removed the record by hand.
            await self._restore(name)
            cached = await self._cache.read(name)
        return cached

    def _next_look(self, name: str) -> float | None:
        """Return when a job that was decided is to be looked at again; None for never."""
        stored = self._cache.known.get(name)
        if stored is None or name in self._planned:
            # Without a state: another task has found it outdated.
            return self._planned.get(name, 0.0)
        state, now = stored.state, self._clock.now()
        is_elsewhere = any(run.owner != self._membership.incarnation for run in state.running)
        if state.running and state.effective.overlap == "skip":
            if not is_elsewhere:
                # Its end makes us look.
                return None
            state = msgspec.structs.replace(state, last=max(state.last, int(now)))
        due = next_due(name, state)
        if not (state.requests or (state.queued and state.is_active)):
            return due
        if not state.running or state.effective.overlap == "allow":
            return 0.0
        if not is_elsewhere:
            return due
        # Nobody tells us of the end that they wait for.
        later = now + self._membership.timing.heartbeat
        return later if due is None else min(due, later)

    def _is_orphan(self, run: ActiveRun, gone: Collection[str]) -> bool:
        """Whether nobody runs a run any more.

        Args:
            run: is in a stored state.
            gone: sessions that are known to have ended.
        """
        if run.owner == self._membership.incarnation:
            return not self._runs.has(run.id)
        return not run.owner or run.owner in gone or self._membership.is_dead(run.owner)

    async def _find_gone(self, state: JobState) -> set[str]:
        """Return the owners of runs whose sessions have ended."""
        owners = {run.owner for run in state.running} - {self._membership.incarnation, ""}
        unsure = [
            owner
            for owner in sorted(owners)
            if owner not in self._membership.living and not self._membership.is_dead(owner)
        ]
        if not unsure:
            return set()
        records = await self._jobs.store.get_many([f"{SESSIONS}{owner}" for owner in unsure])
        return {
            owner
            for owner, record in zip(unsure, records, strict=True)
            if record is None or read_session_record(record).state != "live"
        }

    def _watch_owners(self) -> None:
        """Watch the processes that run jobs on duty, so that a death is noticed at once."""
        own = self._membership.incarnation
        owners = {
            run.owner
            for name in self._duty
            if (stored := self._cache.known.get(name)) is not None
            for run in stored.state.running
        }
        self._membership.watch(f"schedule {self._jobs.prefix}", owners - {own, ""})

    def look_at_orphans(self) -> None:
        """Look at the jobs whose runs have lost their process."""
        for name, stored in self._cache.known.items():
            for run in stored.state.running:
                if run.owner and self._membership.is_dead(run.owner):
                    self.look_at(name)

    async def has_orphans(self, state: JobState) -> bool:
        """Whether a job's state has a run whose process has died."""
        gone = await self._find_gone(state)
        return any(self._is_orphan(run, gone) for run in state.running)

    def _explain_lateness(self, name: str, state: JobState) -> str:
        """Return why instants after the last decided one were not fired in time."""
        if state.last < self._since:
            return f"no process fired it until {_format(self._since)}"
        if name in self._delayed:
            return "as many jobs as max_concurrent_jobs allows were running"
        return "this process or the store was too slow"

    async def _check_clock(self) -> None:
        await self._clock.refresh()
        veto, self._veto = self._veto, self._clock.veto
        if veto != self._veto:
            # A time that is merely unknown yet is no reason to let another process lead.
            self._on_veto(self._veto if self._clock.is_off else "")
        self._wakeup.set()

    async def _beat_forever(self) -> None:
        clock, beat = self._components.clock, self._membership.timing.heartbeat
        while True:
            # A process that stands back for its clock has to notice when that is right again.
            if self._duty or self._veto:
                await self._beat()
            is_unknown = bool(self._veto) and not self._clock.is_off
            await self._beat_wakeup.wait(clock.mono() + (min(beat, _RETRY) if is_unknown else beat))

    async def _beat(self) -> None:
        """Do what is done once a heartbeat while jobs are on duty."""
        try:
            await self._check_clock()
            if self._veto or not self._duty:
                # No progress is noted by a clock that may be wrong.
                return
            await self._follow_edits()
            await self._write_progress()
        except (Unavailable, OutcomeUnknown):
            return
        except (Corrupt, NewerFormat) as error:
            # Jobs are fired without what operators note, until that is repaired.
            self._jobs.report_note(error)
        except Fenced:
            # Another process leads by now; this one is about to be told.
            self._term = None
        self.look_at_orphans()

    async def _follow_edits(self) -> None:
        edits = await self._jobs.read_edits()
        if edits is None or edits.revision == self._edits.revision:
            # If nobody can read it, jobs are fired without what operators note.
            return
        names = edits.list_since(self._edits.revision)
        if names is None:
            self.assign(self._duty, self._term, self._code)
            return
        self._cache.keep(await self._jobs.read_many(names))
        self._edits = edits
        for name in names:
            self.look_at(name)

    async def _write_progress(self) -> None:
        """Note how far all jobs are decided, if that has changed."""
        term = self._term
        if term is None or not term.epoch:
            return
        fleet = await self._find_fleet() if self._starts & self._duty else set[str]()
        if not self._is_dirty and fleet == {*self._progress.fleet}:
            return
        now = self._clock.now()
        open_names = {*self._advancing, *self._waiting, *self._undecided, *self._runs.names}
        for name, stored in self._cache.known.items():
            state = stored.state
            if state.running or state.queued or state.requests or state.gaps:
                open_names.add(name)
        for name, due in self._planned.items():
            if due - self._assume(name).effective.jitter <= now:
                open_names.add(name)
        self._is_dirty = False
        progress = Progress(
            until=int(now),
            open=tuple(sorted(open_names)),
            code=self._code,
            at=now,
            fleet=tuple(sorted(fleet)),
        )
        await term.put(self._jobs.progress_key, msgspec.to_builtins(progress))
        self._progress = progress

    async def _find_fleet(self) -> set[str]:
        """Return the workers that are alive. A worker keeps its id when its session is replaced."""
        return {peer.worker_id for peer in await self._membership.members()}


def _request_start(state: JobState, request: RunRequest) -> JobState | None:
    """Return the state with a request for the run at the start, unless there is one."""
    if any(known.by == request.by for known in state.requests):
        return None
    return add_request(state, request)


def _format(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
