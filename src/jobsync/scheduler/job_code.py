"""The jobs that this process's code has: as they are defined in the store, and in other processes.

The code owns a job's definition. Where processes of a rolling deploy differ, the definition of the
one holds that started last. A process that starts with changed code begins a generation, which is
counted in the store: no machine's clock decides. Every session publishes a digest of its process's
definitions, and the store keeps which jobs belong to a digest, so that a process knows what its
coordinator's code lacks.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.membership import Membership, Peer
from jobsync.coordination.session import SessionRecord
from jobsync.core.job_changes import define
from jobsync.core.job_state import JobDefinition, JobState
from jobsync.errors import Corrupt, NewerFormat
from jobsync.events import Event
from jobsync.scheduler import events
from jobsync.scheduler.code_versions import digest_code
from jobsync.scheduler.job_store import JobStore
from jobsync.scheduler.runs import KnownJob

__all__ = ["JobCode"]


class JobCode:
    """The jobs of this process's code.

    Args:
        known: the jobs, by name.
        jobs: where they are stored.
        membership: this process's session.
        clock: the time by which definitions count.
        fact: the session's fact that tells which jobs its process has.
        emit: emits an event.
        generation: that of this process, if it has started before; a restart within a process is
            no newer code.

    Attributes:
        digest: identifies the definitions, as they were last published.
        generation: orders processes by their starts; 0 before the first.
    """

    def __init__(
        self,
        known: Mapping[str, KnownJob],
        jobs: JobStore,
        membership: Membership,
        clock: FleetClock,
        fact: str,
        emit: Callable[[Event], object],
        generation: int = 0,
    ) -> None:
        self.digest = ""
        self.generation = generation
        self._known = known
        self._jobs = jobs
        self._membership = membership
        self._clock = clock
        self._fact = fact
        self._emit = emit
        self._is_stale = True
        self._is_new = False
        """Whether this process has stored a version of the code that was unknown."""
        self._others: dict[str, frozenset[str]] = {}
        """The jobs of other versions of the code, by digest."""
        self._unnoted = set[str]()
        """Jobs that may have been defined anew, which leaders are not told yet."""

    def change(self) -> None:
        """Publish the digest again, soon: jobs were added or removed."""
        self._is_stale = True

    async def publish(self) -> None:
        """Publish which jobs this process has, if that has changed."""
        if not self._is_stale:
            return
        definitions = {name: job.options.definition for name, job in self._known.items()}
        self.digest = digest_code(definitions)
        self._is_stale = False
        try:
            now = self._clock.now()
            self._is_new |= await self._jobs.code.write(self.digest, definitions, now)
        except BaseException:
            # So that it is written the next time.
            self._is_stale = True
            raise
        self._membership.publish(**{self._fact: self.digest})

    async def forget_old(self) -> None:
        """Remove versions of the code that no process has any more, after adding one."""
        if not self._is_new or self._clock.veto:
            return
        members = await self._membership.members()
        used = set(map(self._find_digest, members))
        await self._jobs.code.forget({*used, self.digest}, self._clock.now(), self.digest)
        self._is_new = False

    async def register_all(self) -> None:
        """Store the definitions of all jobs, unless newer ones are stored."""
        await self.publish()
        defined = await self._jobs.code.read_defined()
        if defined.code == self.digest:
            self.generation = self.generation or defined.generation
            return
        self.generation = self.generation or await self._begin_generation()
        if await self.define(list(self._known)):
            await self._jobs.code.write_defined(self.digest, self.generation)

    async def _begin_generation(self) -> int:
        """Return a number above those of all processes that have defined jobs before."""
        generation = await self._jobs.code.begin_generation()
        if generation is None:
            # Nobody can count: it is above those of the jobs that this process defines.
            stored = await self._jobs.read_many(list(self._known))
            generation = 1 + max((job.state.generation for job in stored.values()), default=0)
        return generation

    async def define(self, names: Sequence[str]) -> bool:
        """Store definitions; return whether they hold: none of the stored ones is newer.

        A job whose record cannot be read is reported and left as it is. The others are stored.
        """
        worker, now, is_current = self._membership.worker_id, self._clock.now(), True
        definitions = {name: self._known[name].options.definition for name in names}
        stored = await self._jobs.read_many(names)
        missing = {
            name: define(None, definition, worker, self.generation, now)
            for name, definition in definitions.items()
            if name not in stored
        }
        created = await self._jobs.create_many(
            {name: state for name, state in missing.items() if state is not None}
        )
        replaced: dict[str, bool] = {}
        for name, definition in definitions.items():
            if name in created:
                self._emit(events.JobAdded(job_name=name))
            elif (
                name in missing or name in self._unnoted or _differs(stored[name].state, definition)
            ):
                is_noted = name not in self._unnoted
                # Before the write, whose reply may be lost: the next call finds nothing to change.
                self._unnoted.add(name)
                try:
                    after, is_changed = await self._redefine(name, definition, worker, now)
                except (Corrupt, NewerFormat) as error:
                    self._jobs.report(name, error)
                    after, is_changed = None, False
                is_current = is_current and after is not None and after.definition == definition
                if after is not None and (is_changed or not is_noted):
                    replaced[name] = after.is_special
        if replaced:
            await self._jobs.edits.note(replaced)
        self._unnoted.difference_update(names)
        return is_current

    async def find_lacking(
        self, leader: SessionRecord, list_candidates: Callable[[], Awaitable[Sequence[Peer]]]
    ) -> frozenset[str]:
        """Return the jobs that this process fires, because its coordinator's code lacks them.

        Args:
            leader: the coordinator's session.
            list_candidates: returns the candidates for its role, the oldest first.
        """
        lacking = frozenset(self._known) - await self.read(self._find_digest(leader))
        if not lacking:
            return lacking
        for peer in await list_candidates():
            if peer.incarnation == self._membership.incarnation:
                return lacking
            # An older process goes first.
            lacking -= await self.read(self._find_digest(peer))
        return frozenset()

    async def list_used(self) -> frozenset[str]:
        """Return the jobs that any live process has."""
        # Of this one, its session may not tell the latest yet.
        own = self._membership.incarnation
        others = [peer for peer in await self._membership.members() if peer.incarnation != own]
        digests = set(map(self._find_digest, others))
        used = frozenset(self._known).union(
            *[await self.read(digest) for digest in sorted(digests)]
        )
        # Each job that is added or removed makes a version.
        self._others = {digest: self._others[digest] for digest in digests & self._others.keys()}
        return used

    async def read(self, digest: str) -> frozenset[str]:
        """Return the jobs of a version of the code."""
        if digest == self.digest and not self._is_stale:
            return frozenset(self._known)
        if digest not in self._others:
            self._others[digest] = await self._jobs.code.read(digest)
        return self._others[digest]

    def _find_digest(self, session: Peer | SessionRecord) -> str:
        """Return the digest that a process has published; empty, if none."""
        return str(session.facts.get(self._fact, ""))

    async def _redefine(
        self, name: str, definition: JobDefinition, worker: str, now: float
    ) -> tuple[JobState | None, bool]:
        """Replace a stored definition, unless it is newer.

        Returns:
            What is stored now, and whether anything was changed.
        """
        before: list[JobState] = []

        def decide(state: JobState | None) -> JobState | None:
            before[:] = [] if state is None else [state]
            return define(state, definition, worker, self.generation, now)

        stored = await self._jobs.change(name, decide)
        if stored is None or not before:
            return stored.state if stored else None, stored is not None
        if before[0].definition != definition:
            differing = _find_differences(before[0].definition, definition)
            by = stored.state.defined_by
            self._emit(events.JobDefinitionReplaced(job_name=name, fields=differing, by=by))
        return stored.state, stored.state != before[0]


def _differs(state: JobState, definition: JobDefinition) -> bool:
    return state.is_removed or state.definition != definition


def _find_differences(one: JobDefinition, other: JobDefinition) -> tuple[str, ...]:
    return tuple(
        field
        for field in JobDefinition.__struct_fields__
        if getattr(one, field) != getattr(other, field)
    )
