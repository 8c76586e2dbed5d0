"""Which processes run the runs of jobs, and whether they are alive.

A run whose process has died is an orphan: the process that fires the job resumes it or gives it
up. A session that this process does not see is looked up in the store before its runs count as
orphans, because what a process sees may be incomplete.
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet

from jobsync.coordination.membership import Membership
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.job_state import ActiveRun, JobState
from jobsync.scheduler.job_cache import JobCache
from jobsync.scheduler.runs import Runs

__all__ = ["RunOwners"]


class RunOwners:
    """The processes of runs.

    Args:
        cache: the states of jobs.
        runs: those of this process.
        membership: this process's session, and what it sees of others.
    """

    def __init__(self, cache: JobCache, runs: Runs, membership: Membership) -> None:
        self._cache = cache
        self._runs = runs
        self._membership = membership

    def is_orphan(self, run: ActiveRun, gone: Collection[str]) -> bool:
        """Whether nobody runs a run any more.

        Args:
            run: is in a stored state.
            gone: sessions that are known to have ended.
        """
        if run.owner == self._membership.incarnation:
            return not self._runs.has(run.id)
        return not run.owner or run.owner in gone or self._membership.is_dead(run.owner)

    async def find_gone(self, state: JobState) -> set[str]:
        """Return the owners of runs whose sessions have ended."""
        owners = {run.owner for run in state.running} | {each.owner for each in state.requests}
        return await self.find_ended(owners - {""})

    async def find_ended(self, sessions: Collection[str]) -> set[str]:
        """Return those sessions that have ended."""
        others = sorted({*sessions} - {self._membership.incarnation} - self._membership.living)
        ended = {session for session in others if self._membership.is_dead(session)}
        unsure = [session for session in others if session not in ended]
        if not unsure:
            return ended
        store = self._cache.jobs.store
        records = await store.get_many([f"{SESSIONS}{session}" for session in unsure])
        return ended | {
            session
            for session, record in zip(unsure, records, strict=True)
            if record is None or read_session_record(record).state != "live"
        }

    async def has_orphans(self, state: JobState) -> bool:
        """Whether a job's state has a run whose process has died."""
        gone = await self.find_gone(state)
        return any(self.is_orphan(run, gone) for run in state.running)

    def list_orphaned(self) -> Iterator[str]:
        """Iterate over the jobs with a run that nobody runs any more, as far as is known."""
        for name, stored in self._cache.known.items():
            for run in stored.state.running:
                if self.is_orphan(run, ()):
                    yield name

    def watch(self, names: AbstractSet[str], announced: Mapping[str, Collection[str]]) -> None:
        """Watch the processes that run these jobs, so that a death is noticed at once.

        Args:
            names: of the jobs.
            announced: jobs that processes may run by hand, by session.
        """
        owners = {
            run.owner
            for name in names
            if (stored := self._cache.known.get(name)) is not None
            for run in stored.state.running
        }
        owners |= {session for session, jobs in announced.items() if not names.isdisjoint(jobs)}
        others = owners - {self._membership.incarnation, ""}
        self._membership.watch(f"schedule {self._cache.jobs.prefix}", others)
