"""Forgets jobs that were removed from the fleet, so that their records do not add up.

A removed job keeps its record while its history is kept, and while the code of a live process has
the job: a process whose code has it would otherwise store it again. Then the record, its history
and the note for leaders are removed. A job that was never due is forgotten at once.
"""

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.core.clock import Mono
from jobsync.core.firing import give_up
from jobsync.core.job_state import JobState, Statistics
from jobsync.errors import Corrupt, Invalid, NewerFormat
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.job_code import JobCode
from jobsync.scheduler.retention import HistoryRetention
from jobsync.scheduler.run_owners import RunOwners

__all__ = ["RemovedJobs"]

_PAUSE = 600.0
"""Seconds from one look to the next."""
_MAX_FORGOTTEN = 100
"""Jobs that are forgotten by one look."""


class RemovedJobs:
    """The removed jobs that a leader has seen.

    Args:
        cache: the states of jobs.
        code: the jobs that processes have.
        owners: the processes of runs.
        retention: of the history.
        clock: the time by which they were removed.
        components: the clock of pauses.
        max_age: seconds for which the history is kept.
    """

    def __init__(
        self,
        cache: JobCache,
        code: JobCode,
        owners: RunOwners,
        retention: HistoryRetention,
        clock: FleetClock,
        components: Components,
        *,
        max_age: float,
    ) -> None:
        self._cache = cache
        self._code = code
        self._owners = owners
        self._retention = retention
        self._clock = clock
        self._components = components
        self._max_age = max_age
        self._next: Mono | None = None
        self._unnoted: set[str] = set()
        """Jobs that are forgotten, which leaders are not told yet."""

    async def forget_some(self) -> None:
        """Forget those that are to be forgotten, now and then. Costs nothing if there are none.

        Raises:
            Unavailable, OutcomeUnknown: the store does not answer.
        """
        mono = self._components.clock.mono()
        if self._clock.veto or (self._next is not None and mono < self._next):
            return
        found = [
            name
            for name, stored in self._cache.known.items()
            if stored.state.is_removed and (stored.state.is_open or self._is_over(stored.state))
        ]
        if not (found or self._unnoted):
            return
        self._next = mono + _PAUSE
        used = await self._code.list_used()
        for name in [name for name in found if name not in used][:_MAX_FORGOTTEN]:
            try:
                await self._forget(name)
            except (Corrupt, Invalid, NewerFormat) as error:
                self._cache.jobs.report(name, error)
        if self._unnoted:
            await self._cache.jobs.edits.note(dict.fromkeys(sorted(self._unnoted), False))
            self._unnoted.clear()

    async def _forget(self, name: str) -> None:
        """Write what is left of a job into its history, then forget it if it is time."""
        now, jobs = self._clock.now(), self._cache.jobs
        await self._give_up_orphans(name)
        await self._cache.write_history(name, now)
        stored = await self._cache.read(name)
        if stored is None:
            self._unnoted.add(name)
            return
        state = stored.state
        if not state.is_removed or state.is_open or not self._is_over(state):
            return
        await jobs.prune(name, keep=0, oldest=now)
        if await jobs.forget(stored.record):
            self._cache.forget(name)
            self._retention.forget(name)
            self._unnoted.add(name)

    async def _give_up_orphans(self, name: str) -> None:
        """Abandon the runs of dead processes of a job, which is on duty nowhere."""
        stored = await self._cache.read(name)
        gone = set() if stored is None else await self._owners.find_gone(stored.state)

        def decide(state: JobState) -> JobState | None:
            if not state.is_removed:
                return None
            return give_up(state, self._clock.now(), lambda run: self._owners.is_orphan(run, gone))

        await self._cache.update(name, decide)

    def _is_over(self, state: JobState) -> bool:
        """Whether nothing is left to know of a removed job: its last instant is its removal."""
        is_old = state.last < self._clock.now() - self._max_age
        return not state.is_open and (is_old or state.statistics == Statistics())
