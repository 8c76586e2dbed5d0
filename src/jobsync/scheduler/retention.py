"""When the old history of a job is removed.

Old entries are removed after every 10 runs of a job, or after a tenth of its limit if that is more,
but after 50 at the latest; and after as many gaps. So the history exceeds its limit by less than
that many runs and gaps. What is older than the retention is also removed by the first run a day
after the last removal. A removal costs some requests: it does not follow each run.

Runs are counted in the job's state, whichever process runs them. Each process that sees so many
more than at its last removal removes what is old. It does so too at the first run that it sees,
unless that is the job's: the process before may have ended instead. Gaps are counted by each
process for itself. A removal that the store did not answer, or for which the time was not known, is
tried again after a pause.
"""

import asyncio
import math
from collections import Counter

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.heartbeats import OUTAGE_ERRORS
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Corrupt, NewerFormat, Unavailable
from jobsync.scheduler.job_store import JobStore

__all__ = ["HistoryRetention"]

_BACKOFF = ExponentialBackoff(first=0.5, longest=30.0)
_LEAST_EXCESS = 10
_MOST_EXCESS = 50
_DAY = 86_400.0


class HistoryRetention:
    """Removes old history of the jobs that run here.

    Args:
        jobs: where it is stored.
        clock: the time by which it is old.
        components: the clock and the randomness of pauses.
        keep: how many entries of each job are kept.
        max_age: for how many seconds.
    """

    def __init__(
        self,
        jobs: JobStore,
        clock: FleetClock,
        components: Components,
        *,
        keep: int,
        max_age: float,
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._components = components
        self._keep = keep
        self._max_age = max_age
        self._excess = min(_MOST_EXCESS, max(_LEAST_EXCESS, keep // 10))
        self._gaps: Counter[str] = Counter()
        self._pruned: dict[str, tuple[float, int]] = {}
        """When each job was pruned here, and how many runs it had had then."""
        self._due: asyncio.Queue[str] = asyncio.Queue()

    def note_run(self, name: str, runs: int) -> None:
        """Prune a job soon if it is time, after one of its runs.

        Args:
            name: the job's.
            runs: how many it has had.
        """
        now = self._clock.now()
        first = (now if runs <= 1 else -math.inf, 0)
        pruned_at, pruned_runs = self._pruned.setdefault(name, first)
        if runs - pruned_runs >= self._excess or now - pruned_at >= _DAY:
            self._pruned[name] = (now, runs)
            self._due.put_nowait(name)

    def note_gap(self, name: str) -> None:
        """Prune a job soon if it is time, after one more gap."""
        self._gaps[name] += 1
        if self._gaps[name] % self._excess == 0:
            self._due.put_nowait(name)

    async def run(self) -> None:
        """Prune jobs when it is time, until cancelled."""
        failures = 0
        while True:
            name = await self._due.get()
            try:
                await self.prune(name)
            except OUTAGE_ERRORS:
                # Its next ten runs may be years away.
                self._due.put_nowait(name)
                failures += 1
                await _BACKOFF.sleep(failures, self._components.clock, self._components.randomness)
            except (Corrupt, NewerFormat) as error:
                self._jobs.report(name, error)
            else:
                failures = 0

    def forget(self, name: str) -> None:
        """Forget what is known of a job that no longer exists."""
        self._pruned.pop(name, None)
        self._gaps.pop(name, None)

    async def prune(self, name: str) -> int:
        """Remove the old history of one job; return how many entries.

        Raises:
            Unavailable: the store does not answer, or the clock that decides what is old may be
                wrong.
        """
        if self._clock.veto:
            # A process that neither fires nor runs a job does not compare the clocks.
            await self._clock.refresh()
        if veto := self._clock.veto:
            raise Unavailable("the fleet's time", veto, "correct the clock, or try again later")
        oldest = self._clock.now() - self._max_age
        return await self._jobs.prune(name, keep=self._keep, oldest=oldest)
