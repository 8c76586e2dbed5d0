"""Fires jobs: sleeps until the next instant of all jobs on duty, and decides what is due.

Each job on duty has a time at which it is looked at. When that comes, `scheduler.decider` decides
the job, and the runs that follow are started in this process. Once a heartbeat the loop
compares the clocks, follows what operators have changed, and notes its progress.
"""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.heartbeats import OUTAGE_ERRORS
from jobsync.coordination.membership import Membership
from jobsync.coordination.runner import Wakeup
from jobsync.coordination.term import Term
from jobsync.core.clock import Mono
from jobsync.errors import Corrupt, Fenced, Invalid, NewerFormat
from jobsync.scheduler.decider import JobDecider
from jobsync.scheduler.duty import CHUNK, Duty
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.run_owners import RunOwners
from jobsync.scheduler.runs import KnownJob, Runs

__all__ = ["FiringLoop"]

_LONGEST_WAIT = 3600.0
_GRAIN = 0.005
_OUTDATED = 100
"""Outdated entries of the heap that are left there."""
_RETRY = 1.0
"""Seconds until a job is looked at again whose store did not answer."""


class FiringLoop:
    """Fires the jobs on duty, until it is cancelled.

    Args:
        cache: the states of jobs.
        runs: starts them.
        known: the jobs whose code this process has, by name.
        membership: this process's session.
        clock: the time by which instants are due.
        components: time and ids.
        owners: the processes of runs.
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
        owners: RunOwners,
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
        self._duty = Duty(cache, known, membership, clock, components)
        self._owners = owners
        self._decider = JobDecider(cache, runs, membership, clock, self._duty, owners, restore)
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
        self._checked: set[tuple[str, str]] = set()
        """Sessions that have ended, each with a job in which their runs were looked for."""
        self._elsewhere: set[tuple[str, str]] = set()
        """Likewise, with a job that another process fires."""
        self._veto = ""
        self._wakeup = Wakeup(components.clock, _GRAIN)
        self._beat_wakeup = Wakeup(components.clock, _GRAIN)

    @property
    def duty(self) -> frozenset[str]:
        """The jobs that this process fires."""
        return self._duty.names

    def check_edits(self) -> None:
        """Look soon at what operators have changed."""
        self._beat_wakeup.set()

    def look_at(self, name: str) -> None:
        """Look at one job now, if it is on duty."""
        if name in self._duty.names:
            self._plan(name, 0.0)

    def assign(self, names: Collection[str], term: Term | None, code: str) -> None:
        """Put jobs on duty, in place of those that were. See `Duty.assign`."""
        self._clear()
        self._duty.assign(names, term, code)
        if self._duty.is_assigned:
            self._wakeup.set()

    def add(self, name: str) -> None:
        """Put one more job on duty, if this process leads."""
        self._duty.add(name)
        self.look_at(name)

    def drop(self, name: str) -> None:
        """Take one job off duty. Its run goes on."""
        self._duty.drop(name)
        self._planned.pop(name, None)
        if self._duty.is_assigned:
            # A take-over that goes on is repeated without it.
            self._wakeup.set()

    def drop_all(self) -> None:
        """Take all jobs off duty. Runs that have begun go on."""
        self._duty.drop_all()
        self._clear()

    def _clear(self) -> None:
        """Forget what was planned, and what waits."""
        for names in (self._planned, self._heap, self._waiting, self._delayed, self._undecided):
            names.clear()
        self._checked.clear()
        self._elsewhere.clear()

    async def run(self) -> None:
        """Fire jobs until cancelled."""
        async with asyncio.TaskGroup() as group:
            # Beside it: a slow reply to a heartbeat's requests delays no firing.
            group.create_task(self._beat_forever())
            while True:
                await self._take_over()
                if self._heap:
                    await self._clock.reach(self._heap[0][0])
                self._start_due(group)
                await self._wakeup.wait(self._find_wakeup())

    async def finish_starts(self) -> None:
        """Wait until nothing is being started."""
        if self._advancing:
            await asyncio.wait(list(self._advancing.values()))

    async def _take_over(self) -> None:
        """Put on duty what was assigned since the last call; try again if the store is silent."""
        if not self._duty.is_assigned:
            return
        try:
            await self._check_clock()
            unsettled = await self._duty.take_over()
        except OUTAGE_ERRORS:
            await self._components.clock.sleep(_RETRY)
            self._wakeup.set()
        except (Corrupt, NewerFormat) as error:
            self._jobs.report_note(error)
            await self._components.clock.sleep(self._membership.timing.heartbeat)
            self._wakeup.set()
        except Fenced:
            # Another process leads by now; this one is about to be told.
            self.drop_all()
        else:
            if unsettled is not None:
                await self._plan_all(unsettled)

    async def _plan_all(self, unsettled: Collection[str]) -> None:
        """Plan when to look at each job on duty."""
        for number, name in enumerate(sorted(self._duty.names)):
            is_settled = name not in unsettled
            self._plan(name, self._duty.find_first_look(name, is_settled=is_settled))
            if number % CHUNK == CHUNK - 1:
                await asyncio.sleep(0)
        self._beat_wakeup.set()
        self._wakeup.set()

    def _plan(self, name: str, when: float | None) -> None:
        """Look at a job on duty at a time of the fleet's clock; never, if None."""
        if when is None or name not in self._duty.names:
            self._planned.pop(name, None)
            return
        self._planned[name] = when
        heapq.heappush(self._heap, (when, next(self._numbers), name))
        if len(self._heap) > 2 * len(self._planned) + _OUTDATED:
            self._drop_outdated()
        if self._heap[0][-1] == name:
            self._wakeup.set()

    def _drop_outdated(self) -> None:
        """Remove the entries of the heap that are outdated, and those that occur twice."""
        first = {
            name: (when, number, name)
            for when, number, name in sorted(self._heap, reverse=True)
            if self._planned.get(name) == when
        }
        # In place: the heap may be in use.
        self._heap[:] = sorted(first.values())

    def _find_wakeup(self) -> Mono:
        """Return when to look again."""
        now = self._components.clock.mono()
        wakeup = now + _LONGEST_WAIT
        while self._heap and self._planned.get(self._heap[0][-1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._heap and not self._clock.veto:
            wakeup = min(wakeup, now + self._clock.measure_wait(self._heap[0][0]))
        return wakeup

    def _start_due(self, group: asyncio.TaskGroup) -> None:
        """Look at each job whose time has come, in a task of its own."""
        if self._clock.veto:
            if not self._veto:
                # The clock was set since the last beat, or no beat was yet: the next reports it.
                self._beat_wakeup.set()
            return
        now, due = self._clock.now(), set[str]()
        while self._heap and self._heap[0][0] <= now:
            when, _, name = heapq.heappop(self._heap)
            if self._planned.get(name) != when:
                continue
            del self._planned[name]
            if name in self._advancing:
                # What makes us look may have happened after its decision.
                self._again.add(name)
            else:
                # Behind those that wait already: each of them gets its turn.
                self._waiting[name] = None
                due.add(name)
        while self._waiting and self._runs.room > len(self._advancing):
            name = next(iter(self._waiting))
            del self._waiting[name]
            if name in self._duty.names:
                task = group.create_task(self._advance(name))
                self._advancing[name] = task
                task.add_done_callback(partial(self._on_advanced, name))
        self._delayed |= due & self._waiting.keys()

    def _on_advanced(self, name: str, _: asyncio.Task[None]) -> None:
        self._advancing.pop(name, None)
        if name in self._again:
            self._again.discard(name)
            self.look_at(name)
        self._wakeup.set()

    def on_run_end(self, name: str) -> None:
        """Look at a job whose run has ended, and at one that waited for room."""
        self.look_at(name)
        self._wakeup.set()

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
                is_decided = await self._decider.decide(job, owner, new_id, self._delayed)
            except OUTAGE_ERRORS:
                if not (self._cache.is_unsure(name) and self._is_session(owner)):
                    self._plan(name, self._clock.now() + _RETRY)
                    return
                # What may be recorded as running here has to run here, whoever leads by then.
                await self._components.clock.sleep(_RETRY)
            except (Corrupt, Invalid, NewerFormat) as error:
                # Nothing can be done until the record is repaired, or what it says is shorter.
                self._jobs.report(name, error)
                self._plan(name, self._clock.now() + self._membership.timing.timeout)
                return
            else:
                if is_decided and name in self._duty.names:
                    self._owners.watch(self._duty.names, self._duty.announced)
                    planned = self._planned.get(name)
                    self._plan(name, self._decider.next_look(name) if planned is None else planned)
                self._undecided.discard(name)
                self._delayed.discard(name)
                return

    def _is_session(self, incarnation: str) -> bool:
        """Whether a session is still this process's."""
        return self._membership.incarnation == incarnation and not self._membership.has_ended

    def look_at_orphans(self) -> None:
        """Look at the jobs whose runs have lost their process."""
        for name in self._owners.list_orphaned():
            self.look_at(name)

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
            # A process that stands back for its clock has to notice when that is right again. One
            # that only runs jobs has to know the time when they end.
            if self._duty.names or self._veto or self._runs.names:
                await self._beat()
            is_unknown = bool(self._veto) and not self._clock.is_off
            await self._beat_wakeup.wait(clock.mono() + (min(beat, _RETRY) if is_unknown else beat))

    async def _beat(self) -> None:
        """Do what is done once a heartbeat while jobs are on duty."""
        try:
            await self._check_clock()
            if self._veto or not self._duty.names:
                # No progress is noted by a clock that may be wrong.
                return
            await self._follow_edits()
            await self._duty.write_progress(self._list_open)
            await self._look_for_runs_by_hand()
        except OUTAGE_ERRORS:
            return
        except (Corrupt, NewerFormat) as error:
            # Jobs are fired without what operators note, until that is repaired.
            self._jobs.report_note(error)
        except Fenced:
            # Another process leads by now; this one is about to be told.
            self._duty.end_term()
        self.look_at_orphans()

    async def _follow_edits(self) -> None:
        names = await self._duty.read_edited()
        if names is None:
            self._clear()
            self._duty.assign_again()
            self._wakeup.set()
            return
        for name in names:
            self.look_at(name)

    async def _look_for_runs_by_hand(self) -> None:
        """Look at the jobs on duty that processes may have run by hand before they ended.

        The first look gives their runs up; a later one finds that this is stored.
        """
        duty, announced = (
            self._duty.names,
            {
                session: {name for name in names if (session, name) not in self._elsewhere}
                for session, names in self._duty.announced.items()
            },
        )
        sessions = [session for session, names in announced.items() if names]
        if not sessions:
            return
        self._owners.watch(duty, announced)
        ended = sorted(await self._owners.find_ended(sessions))
        done = await self._find_gone({session: announced[session] - duty for session in ended})
        for session in ended:
            for name in sorted(duty & announced[session]):
                stored = self._cache.known.get(name)
                if (session, name) not in self._checked:
                    # A write that it has sent before its end may still arrive.
                    self._cache.suspect(name)
                    self._checked.add((session, name))
                    self.look_at(name)
                elif self._cache.is_unsure(name) or stored is None or name in self._undecided:
                    continue
                elif any(run.owner == session for run in stored.state.running):
                    self.look_at(name)
                else:
                    done.setdefault(session, set()).add(name)
        if done:
            await self._jobs.edits.forget_announced(done)
            self._checked -= {(session, name) for session in done for name in done[session]}

    async def _find_gone(self, runs: Mapping[str, set[str]]) -> dict[str, set[str]]:
        """Return those jobs that are on duty nowhere, because they were removed.

        Args:
            runs: jobs that are not on duty here, by the ended session that has announced them.
        """
        names = set[str]().union(*runs.values())
        stored = await self._jobs.read_many(sorted(names)) if names else {}
        gone = {
            name
            for name in names
            if name not in stored
            or (stored[name].state.is_removed and not stored[name].state.running)
        }
        # Whoever fires the others looks for their runs.
        fired = {name for name in stored if not stored[name].state.is_removed}
        self._elsewhere |= {(session, name) for session in runs for name in runs[session] & fired}
        return {session: left for session in runs if (left := runs[session] & gone)}

    def _list_open(self, now: float) -> set[str]:
        """Return the jobs on duty that are not decided up to a time."""
        found = {*self._advancing, *self._waiting, *self._undecided, *self._runs.names}
        for name, due in self._planned.items():
            if due - self._duty.assume(name).effective.jitter <= now:
                found.add(name)
        return found
