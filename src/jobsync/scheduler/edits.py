"""Which scheduled jobs operators have changed, and which run by hand: one record for all leaders.

    schedule/<namespace>/edits/latest

A leader fires jobs from memory. Once a heartbeat it reads this record, and looks again only at the
jobs that it names.
"""

from collections.abc import Callable, Container, Mapping

import msgspec

from jobsync.core.clock import Clock
from jobsync.core.codec import Json
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.errors import Corrupt, NewerFormat
from jobsync.stores.contract import Record
from jobsync.stores.corruption_log import convert_record

__all__ = ["Edits", "JobEdits"]

_LATEST = "latest"
_MAX_RECENT = 500
"""Changes that leaders can follow one by one; after more, they look at all jobs."""
_MAX_ANNOUNCED = 20
"""Jobs of a process that may run by hand without another announcement."""


class Edits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which jobs differ from their code, and which were changed lately."""

    revision: int = 0
    special: tuple[str, ...] = ()
    """The jobs that operators have paused, edited or asked to run."""
    recent: tuple[tuple[int, str], ...] = ()
    """The latest changes with their revisions, the newest last."""
    by_hand: Mapping[str, tuple[str, ...]] = {}
    """The jobs that a process runs by hand, has run or is about to run, by its session."""

    def list_since(self, revision: int) -> list[str] | None:
        """Return the jobs that were changed after a revision; None if that is not known."""
        known = self.recent[0][0] - 1 if self.recent else self.revision
        if revision < known:
            return None
        return sorted({name for number, name in self.recent if number > revision})


class JobEdits:
    """Reads and writes which jobs of one namespace were changed.

    Args:
        records: where the record is, apart from others: only edits wake those who wait for edits.
        clock: this machine's.
        report: called with the error if the record cannot be read.
    """

    def __init__(
        self, records: Keyspace, clock: Clock, report: Callable[[Corrupt | NewerFormat], object]
    ) -> None:
        self.prefix = records.prefix
        self._records = records
        self._clock = clock
        self._report = report

    async def read(self) -> Edits | None:
        """Read which jobs differ from their code; None, and a report, if that cannot be read."""
        try:
            record = await self._records.get(_LATEST)
            return Edits() if record is None else convert_record(record, Edits)
        except (Corrupt, NewerFormat) as error:
            self._report(error)
            return None

    async def note(self, names: Mapping[str, bool | None]) -> None:
        """Write for leaders which jobs were changed.

        If the record cannot be read, that is reported. Leaders notice a change also when they next
        look at the job.

        Args:
            names: of the jobs, each with whether it differs from its code now; None if that has
                not changed.
        """

        def decide(edits: Edits) -> Edits:
            told = {name for name, is_special in names.items() if is_special is not None}
            special = {*edits.special} - told | {name for name in names if names[name]}
            revision = edits.revision + 1
            recent = (*edits.recent, *((revision, name) for name in names))
            if len(recent) > _MAX_RECENT:
                # Whole revisions: one that is cut in two would look complete.
                cut = recent[-_MAX_RECENT - 1][0]
                recent = tuple(each for each in recent if each[0] > cut)
            return Edits(
                revision=revision,
                special=tuple(sorted(special)),
                recent=recent,
                by_hand=edits.by_hand,
            )

        await self._change(decide)

    async def announce_run(
        self, session: str, name: str, running: Container[str]
    ) -> tuple[str, ...]:
        """Write for leaders that a process is about to run a job by hand, before it does.

        If the process dies, whoever fires the job looks for its run. A job stays announced, so
        that its next run costs nothing, until the process has announced 20 others.

        Args:
            session: of the process.
            name: the job's.
            running: the jobs that the process runs, which stay announced.

        Returns:
            The jobs that are announced now, for this process.
        """
        announced: tuple[str, ...] = (name,)

        def decide(edits: Edits) -> Edits:
            nonlocal announced
            others = [each for each in edits.by_hand.get(session, ()) if each != name]
            idle = [each for each in others if each not in running]
            dropped = {*idle[: max(len(idle) + 1 - _MAX_ANNOUNCED, 0)]}
            announced = (*(each for each in others if each not in dropped), name)
            by_hand = {**edits.by_hand, session: announced}
            return msgspec.structs.replace(edits, by_hand=by_hand)

        await self._change(decide)
        return announced

    async def forget_announced(self, checked: Mapping[str, Container[str]]) -> None:
        """Remove announcements of runs by hand.

        Args:
            checked: jobs by session. The session has ended, and its runs were given up.
        """

        def decide(edits: Edits) -> Edits:
            left = {
                session: tuple(name for name in names if name not in checked.get(session, ()))
                for session, names in edits.by_hand.items()
            }
            by_hand = {session: names for session, names in left.items() if names}
            return msgspec.structs.replace(edits, by_hand=by_hand)

        await self._change(decide)

    async def _change(self, decide: Callable[[Edits], Edits]) -> None:
        """Change the edits; a record that this process does not understand is reported."""

        def choose(current: Record | None) -> Json | Disposition:
            before = Edits() if current is None else self._repair(current)
            after = decide(before)
            return Disposition.KEEP if after == before else msgspec.to_builtins(after)

        try:
            await self._records.change(_LATEST, choose)
        except (Corrupt, NewerFormat) as error:
            self._report(error)

    def _repair(self, current: Record) -> Edits:
        """Return the edits before a change; if they are damaged, ones that nobody has followed."""
        try:
            return convert_record(current, Edits)
        except Corrupt as error:
            self._report(error)
            return Edits(revision=int(self._clock.wall().seconds * 1000))
