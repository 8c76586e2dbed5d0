"""The states of scheduled jobs as this process last saw them, and the only way to change them.

A change is a conditional write over the state that was seen: of two processes that decide about a
job at once, one succeeds, and the other decides again from what it reads then. So a firing costs
no read while no other process changes the job.
"""

import asyncio
from collections.abc import Callable, Mapping
from weakref import WeakValueDictionary

from jobsync.core.firing import drop_noted, explain_loss
from jobsync.core.job_state import Gap, JobState
from jobsync.errors import Corrupt, NewerFormat, OutcomeUnknown
from jobsync.scheduler.job_store import JobStore, StoredJob

__all__ = ["JobCache"]


class JobCache:
    """The states of jobs as this process last saw them, and the only place that changes them.

    Args:
        jobs: where they are stored.
        on_gap: called with a job's name and each gap that is now in its history.
    """

    def __init__(self, jobs: JobStore, on_gap: Callable[[str, Gap], object]) -> None:
        self.jobs = jobs
        self._on_gap = on_gap
        self.known: dict[str, StoredJob] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of the jobs that are being changed."""
        self._unsure: set[str] = set()
        """Jobs with a write that may have been applied, or may still be."""

    def keep(self, stored: Mapping[str, StoredJob]) -> None:
        """Remember states that were read, unless newer ones are known."""
        for name, job in stored.items():
            known = self.known.get(name)
            if known is None or known.record.seq < job.record.seq:
                self.known[name] = job

    def is_unsure(self, name: str) -> bool:
        """Whether a write of this process to a job's state has an unknown outcome."""
        return name in self._unsure

    def suspect(self, name: str) -> None:
        """Note that a dead process's write to a job's state may still arrive.

        The next `update` reads the state, and writes it even if it leaves it as it is. That
        refuses the other write, which names an older version.
        """
        self.known.pop(name, None)
        self._unsure.add(name)

    def forget(self, name: str) -> None:
        """Forget a job that no longer exists."""
        self.known.pop(name, None)
        self._unsure.discard(name)

    async def read(self, name: str) -> StoredJob | None:
        """Read a job's state again."""
        stored = await self.jobs.read(name)
        if stored is None:
            self.known.pop(name, None)
        else:
            self.keep({name: stored})
        return self.known.get(name)

    async def update(
        self, name: str, decide: Callable[[JobState], JobState | None]
    ) -> StoredJob | None:
        """Change a state; read it again if another process has changed it.

        A write with an unknown outcome is closed before this returns: what is stored then cannot be
        replaced by it any more.

        Args:
            name: the job's.
            decide: returns the new state, or None to leave it. Called again after a conflict, and
                after a write with an unknown outcome: it must recognise its own change.

        Returns:
            The state that is stored now; None if there is none.

        Raises:
            Unavailable: the store does not answer; nothing was changed, unless `is_unsure`.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            stored = self.known.get(name)
            while True:
                if stored is None:
                    stored = await self.read(name)
                    if stored is None:
                        return None
                state = decide(stored.state)
                if state is None:
                    state = stored.state
                if state == stored.state and name not in self._unsure:
                    return stored
                try:
                    stored = await self.jobs.replace(name, stored.record, state)
                except OutcomeUnknown:
                    self._unsure.add(name)
                    stored = None
                if stored is not None:
                    self._unsure.discard(name)
                    self.known[name] = stored
                    return stored
                # Another process was faster, or nobody knows.
                self.known.pop(name, None)

    async def write_history(self, name: str, now: float) -> None:
        """Write the gaps and the lost runs of a job into its history, then forget them.

        They stay in the state until they are in the history, wherever a process dies.
        """
        stored = self.known.get(name)
        if stored is None or not (stored.state.gaps or stored.state.lost):
            return
        gaps, lost = stored.state.gaps, stored.state.lost
        for gap in gaps:
            if await self.jobs.history.write_gap(name, gap):
                self._on_gap(name, gap)
        for run in lost:
            try:
                await self.jobs.history.write_loss(name, run, explain_loss(run), now)
            except (Corrupt, NewerFormat) as error:
                # Nobody can say so in a record that cannot be read.
                self.jobs.report(name, error)
        await self.update(name, lambda state: drop_noted(state, gaps, lost))
