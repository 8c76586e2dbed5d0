"""The jobs that this process fires: taken over from the leader before, and left to the next one.

The coordinator has all jobs on duty that its code has. A job that its code lacks is on duty in the
oldest process that has it. Two processes that have a job on duty at once are harmless: a start is
a conditional write of the job's state.

A coordinator notes how far it got (`Progress`), so that its successor reads only the jobs that
were due since, that still ran, or that an operator has changed.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.membership import Membership
from jobsync.coordination.term import Term
from jobsync.core.firing import next_due
from jobsync.core.job_changes import add_request
from jobsync.core.job_state import JobDefinition, JobState, RunRequest, find_schedule
from jobsync.errors import Corrupt, Invalid, NewerFormat
from jobsync.scheduler.edits import Edits
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_store import JobStore, Progress
from jobsync.scheduler.runs import KnownJob

__all__ = ["CHUNK", "Duty"]

CHUNK = 500
"""Schedules that are computed before other tasks get a turn."""
_AT_START = "run_on_start"
"""Who asks for a run that follows the start of a fleet."""


class _Assignment(NamedTuple):
    """Jobs that are to be on duty."""

    names: frozenset[str]
    term: Term | None
    code: str


class Duty:
    """The jobs that this process fires, and how far they are decided.

    `assign` says which they are to be; `take_over` then reads what is needed of them.

    Args:
        cache: the states of jobs.
        known: the jobs whose code this process has, by name.
        membership: this process's session.
        clock: the time by which instants are due.
        components: ids of runs.

    Attributes:
        names: the jobs on duty.
        since: when this process got them, by the fleet's clock.
        is_dirty: whether anything was decided since the progress was written.
    """

    def __init__(
        self,
        cache: JobCache,
        known: Mapping[str, KnownJob],
        membership: Membership,
        clock: FleetClock,
        components: Components,
    ) -> None:
        self.names: frozenset[str] = frozenset()
        self.since = 0.0
        self.is_dirty = False
        self._cache = cache
        self._jobs: JobStore = cache.jobs
        self._known = known
        self._definitions: dict[str, JobDefinition] = {}
        """Of the jobs that were assigned. One may be removed during the take-over."""
        self._membership = membership
        self._clock = clock
        self._components = components
        self._term: Term | None = None
        self._code = ""
        self._assignment: _Assignment | None = None
        self._edits = Edits()
        self._has_asked = False
        """Whether the runs at the start were asked for without an election."""
        self._progress = Progress()
        self._former_fleet = set[str]()
        """What the last leader has noted, until this one has seen who is alive."""

    @property
    def announced(self) -> Mapping[str, tuple[str, ...]]:
        """The jobs that processes may run by hand, by session, as of the last beat."""
        return self._edits.by_hand

    @property
    def is_assigned(self) -> bool:
        """Whether jobs were assigned that are not on duty yet."""
        return self._assignment is not None

    def assign(self, names: Collection[str], term: Term | None, code: str) -> None:
        """Put jobs on duty at the next `take_over`; none are until then.

        Args:
            names: of jobs that this process knows.
            term: in which this process leads; None if it does not.
            code: the digest of this process's code.
        """
        self.drop_all()
        if names or term is not None:
            # A leader without jobs may get some later.
            names = frozenset(name for name in names if name in self._known)
            self._definitions = {name: self._known[name].options.definition for name in names}
            self._assignment = _Assignment(names, term, code)

    def assign_again(self) -> None:
        """Take over the same jobs again at the next `take_over`."""
        self.assign(self.names, self._term, self._code)

    def add(self, name: str) -> None:
        """Put one more job on duty, if this process leads."""
        self._definitions[name] = self._known[name].options.definition
        if self._assignment is not None:
            self._assignment = self._assignment._replace(names=self._assignment.names | {name})
        elif self._term is not None:
            self.names |= {name}

    def drop(self, name: str) -> None:
        """Take one job off duty."""
        self.names -= {name}
        if self._assignment is not None:
            self._assignment = self._assignment._replace(names=self._assignment.names - {name})

    def drop_all(self) -> None:
        """Take all jobs off duty."""
        self.names, self._term, self._assignment = frozenset(), None, None

    def end_term(self) -> None:
        """Note no more progress: another process leads by now."""
        self._term = None

    async def take_over(self) -> set[str] | None:
        """Put the assigned jobs on duty.

        Returns:
            Those that may have something undecided; None if others were assigned meanwhile.

        Raises:
            Fenced: another process leads by now.
            Unavailable, OutcomeUnknown: the store does not answer.
        """
        assignment = self._assignment
        if assignment is None:
            return None
        names, term, code = assignment
        self.since = self._clock.now()
        self._cache.known.clear()
        edits = await self._jobs.edits.read()
        self._edits = edits or Edits()
        self._cache.keep(await self._jobs.read_many(sorted(self._edits.special)))
        unsettled = set(names)
        if term is not None and term.epoch:
            unsettled = await self._find_unsettled(names, term, code)
            if edits is None:
                # Any of them may have been changed.
                unsettled = set(names)
        elif term is not None and not self._has_asked:
            # Without an election nobody notes the fleet: the oldest process asks, once.
            older = {w for w in await self._find_fleet() if w < self._membership.worker_id}
            await self._request_starts(names, term, Progress(fleet=tuple(older)))
            self._has_asked = True
        self._cache.keep(await self._jobs.read_many(sorted(unsettled - {*self._edits.special})))
        if self._assignment != assignment:
            return None
        self.names, self._term, self._code = assignment
        self._assignment = None
        return unsettled

    async def _find_unsettled(self, names: frozenset[str], term: Term, code: str) -> set[str]:
        """Return the jobs that may have something undecided, by what the last leader noted."""
        before = await self._read_progress(term)
        self._progress, self._former_fleet = Progress(), {*before.fleet}
        before = await self._request_starts(names, term, before)
        if (await self._jobs.code.read_defined()).code != code:
            # Another version of the code says when they are due.
            return set(names)
        covered = names if before.code == code else await self._jobs.code.read(before.code)
        unsettled = {*before.open, *(names - covered)}
        for number, name in enumerate(names - unsettled):
            schedule = find_schedule(self.assume(name))
            newest = schedule.latest_until(int(self.since))
            if newest is not None and newest > before.until:
                unsettled.add(name)
            if number % CHUNK == CHUNK - 1:
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
            The progress with the present fleet, which is noted at once, with these jobs: a
            successor asks no more, and starts what is asked for.
        """
        wanted = sorted(filter(self._runs_on_start, names))
        fleet = await self._find_fleet() if wanted else set[str]()
        if not wanted or fleet & {*before.fleet}:
            return before
        for name in wanted:
            (run_id,) = self._components.ids.records(1)
            request = RunRequest(id=run_id, at=self._clock.estimate(), by=_AT_START)
            try:
                await self._cache.update(name, partial(_request_start, request=request))
            except (Corrupt, Invalid, NewerFormat) as error:
                # Its record cannot be changed; the other jobs do not wait for that.
                self._jobs.report(name, error)
        progress = msgspec.structs.replace(
            before, fleet=tuple(sorted(fleet)), open=tuple(sorted({*before.open, *wanted}))
        )
        if term.epoch:
            await term.put(self._jobs.progress_key, msgspec.to_builtins(progress))
        return progress

    def _runs_on_start(self, name: str) -> bool:
        """Whether a job runs when the fleet starts; an operator's change holds."""
        state = self.assume(name)
        return state.is_active and state.effective.run_on_start

    async def _find_fleet(self) -> set[str]:
        """Return the workers that are alive. A worker keeps its id when its session is replaced."""
        return {peer.worker_id for peer in await self._membership.members()}

    def assume(self, name: str) -> JobState:
        """Return a job's state, or what it is if nobody has changed it."""
        stored = self._cache.known.get(name)
        if stored is not None:
            return stored.state
        return JobState(definition=self._definitions[name], defined_by="", last=0)

    def find_first_look(self, name: str, *, is_settled: bool) -> float | None:
        """Return when a job is to be looked at first after the take-over.

        Of a job that was not read because it was settled: at its first instant after this process
        got it, even if that has passed while others were read.
        """
        stored = self._cache.known.get(name)
        if stored is None:
            state = msgspec.structs.replace(self.assume(name), last=int(self.since))
            return next_due(name, state) if is_settled else 0.0
        return 0.0 if stored.state.is_open else next_due(name, stored.state)

    async def read_edited(self) -> list[str] | None:
        """Read the jobs that operators have changed since the last call.

        Returns:
            Their names; None if nobody knows which. If nobody can read it, jobs are fired without
            what operators note.
        """
        edits = await self._jobs.edits.read()
        if edits is None:
            return []
        if edits.revision == self._edits.revision:
            self._edits = edits
            return []
        names = edits.list_since(self._edits.revision)
        if names is None:
            return None
        self._cache.keep(await self._jobs.read_many(names))
        self._edits = edits
        return names

    async def write_progress(self, list_open: Callable[[float], set[str]]) -> None:
        """Note how far all jobs are decided, if that has changed and this process was elected.

        Args:
            list_open: returns the jobs that the firing loop has not decided up to a time.

        Raises:
            Fenced: another process leads by now.
        """
        term = self._term
        if term is None or not term.epoch:
            return
        # Also if no job runs at the start: the next leader may have one.
        living = {incarnation.rpartition(".")[0] for incarnation in self._membership.living}
        fleet = living | self._former_fleet
        if not self.is_dirty and fleet == {*self._progress.fleet}:
            return
        now = self._clock.now()
        open_names = list_open(now)
        for name, stored in self._cache.known.items():
            if stored.state.is_open:
                open_names.add(name)
        self.is_dirty = False
        progress = Progress(
            until=int(now),
            open=tuple(sorted(open_names)),
            code=self._code,
            at=now,
            fleet=tuple(sorted(fleet)),
        )
        try:
            await term.put(self._jobs.progress_key, msgspec.to_builtins(progress))
        except BaseException:
            # So that it is written the next time.
            self.is_dirty = True
            raise
        self._progress = progress
        self._former_fleet = set()


def _request_start(state: JobState, request: RunRequest) -> JobState | None:
    """Return the state with a request for the run at the start, unless it has or needs none."""
    is_wanted = state.is_active and state.effective.run_on_start
    if not is_wanted or any(known.by == request.by for known in state.requests):
        return None
    return add_request(state, request)
