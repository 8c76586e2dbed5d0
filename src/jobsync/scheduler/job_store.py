"""The stored states of scheduled jobs, and all else that is stored of a scheduler.

    schedule/<namespace>                         exists, so that namespaces can be listed
    schedule/<namespace>/job/<name>              a job's state, see `core.job_state`
    schedule/<namespace>/run/<name>/<instant>    a firing, and later its result
    schedule/<namespace>/code/<digest>           the jobs of one version of the code
    schedule/<namespace>/defined                 the version whose definitions are stored
    schedule/<namespace>/progress                how far the leader has decided all jobs
    schedule/<namespace>/edits/latest            the jobs that operators have changed
    schedule/<namespace>/clock/<id>              written and removed, to learn the store's time

Firings are read and written by `scheduler.history`, versions of the code by
`scheduler.code_versions`, and edits by `scheduler.edits`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from jobsync.components import Components
from jobsync.coordination.clock_skew import measure_time
from jobsync.core.codec import Json
from jobsync.core.job_state import ActiveRun, JobDefinition, JobState, find_schedule
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.errors import Corrupt, Invalid, JobsyncError, NewerFormat
from jobsync.scheduler.code_versions import CodeVersions
from jobsync.scheduler.edits import JobEdits
from jobsync.scheduler.history import JobHistory
from jobsync.stores.contract import Put, Record, Store, find_applied
from jobsync.stores.corruption_log import CorruptionLog, convert_record, read_existing
from jobsync.stores.paging import head_pages, scan_pages, split_pages

__all__ = ["SCHEDULES", "JobStore", "Progress", "StoredJob", "list_namespaces"]

SCHEDULES = "schedule/"
"""The prefix of everything about scheduled jobs; each namespace has a level below it."""


class StoredJob(NamedTuple):
    """A job's state with the record that it was read from."""

    record: Record
    state: JobState


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a leader got, for its successor."""

    until: int = 0
    """Every instant up to here is decided, and its run has ended, except for `open`."""
    open: tuple[str, ...] = ()
    """The jobs of which this is not so."""
    code: str = ""
    """The digest of the jobs that this is said of."""
    at: float = 0.0
    fleet: tuple[str, ...] = ()
    """The sessions that were alive."""


async def list_namespaces(store: Store) -> list[str]:
    """Return the namespaces that have, or had, a scheduler."""
    return [key.removeprefix(SCHEDULES) for key in await _list_keys(store, SCHEDULES)]


async def _list_keys(store: Store, prefix: str) -> list[str]:
    return [head.key async for heads in head_pages(store, prefix) for head in heads]


class JobStore:
    """Reads and writes scheduled jobs of one namespace.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        namespace: of the scheduler.
        components: the clock, randomness and events.

    Attributes:
        history: the firings and gaps of the jobs.
        code: the versions of the code that have defined jobs.
        edits: which jobs were changed lately.
    """

    def __init__(
        self, get_store: Callable[[], Store], namespace: str, components: Components
    ) -> None:
        self.prefix = f"{SCHEDULES}{namespace}/"
        self.progress_key = f"{self.prefix}progress"
        self._components = components

        def below(level: str) -> Keyspace:
            return Keyspace(get_store, self.prefix + level, components, f"schedule/{namespace}")

        self._jobs = below("job/")
        self.history = JobHistory(get_store, self.prefix, components)
        self.code = CodeVersions(below(""), below("code/"), self.report_note)
        self.edits = JobEdits(below("edits/"), components.clock, self.report_note)

    @property
    def store(self) -> Store:
        """The store, if it can be used."""
        return self._jobs.store

    async def read(self, name: str) -> StoredJob | None:
        """Read a job's state.

        Raises:
            Corrupt: it is there and cannot be read.
        """
        record = await self._jobs.get(name)
        return None if record is None else self._decode(record)

    async def read_many(self, names: Sequence[str]) -> dict[str, StoredJob]:
        """Read the states of those that exist and can be read; others are reported."""
        found: dict[str, StoredJob] = {}
        for part in split_pages(names):
            page = {self._jobs.key(name): name for name in part}
            records = await read_existing(self.store, list(page), self._corruption_log.report)
            for key, record in records.items():
                if (stored := self._corruption_log.read(self._decode, record)) is not None:
                    found[page[key]] = stored
        return found

    async def list_names(self) -> list[str]:
        """Return the names of all jobs, also of those that were removed; reads no state."""
        return [self._jobs.name(key) for key in await _list_keys(self.store, self._jobs.prefix)]

    async def read_all(self) -> dict[str, StoredJob]:
        """Read all states that can be read, by name; others are reported."""
        found: dict[str, StoredJob] = {}
        async for records in scan_pages(self.store, self._jobs.prefix):
            for record in records:
                if (stored := self._corruption_log.read(self._decode, record)) is not None:
                    found[self._jobs.name(record.key)] = stored
        return found

    @property
    def prefixes(self) -> list[str]:
        """Where records are created and deleted, and leave tombstones."""
        return [self._jobs.prefix, self.code.prefix]

    async def measure_time(self) -> float:
        """Return the store's time, in Unix seconds.

        Raises:
            Unavailable, OutcomeUnknown: the store does not answer.
        """
        return await measure_time(self.store, f"{self.prefix}clock/", self._components)

    async def create_many(self, states: Mapping[str, JobState]) -> set[str]:
        """Write states of jobs that have none; return the names of those that had none.

        Raises:
            OutcomeUnknown: one may have been written, may still be, or never.
        """
        names, created = sorted(states), set[str]()
        for page in split_pages(names):
            puts = [Put(self._jobs.key(name), msgspec.to_builtins(states[name])) for name in page]
            outcomes = await self.store.write(puts)
            for name, put, outcome in zip(page, puts, outcomes, strict=True):
                if find_applied(outcome, put.key) is not None:
                    created.add(name)
        return created

    async def replace(self, name: str, base: Record, state: JobState) -> StoredJob | None:
        """Write a state in place of the one that was read; None if that one is replaced.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        (outcome,) = await self.store.write([base.replace(msgspec.to_builtins(state))])
        record = find_applied(outcome, self._jobs.title(name))
        return None if record is None else StoredJob(record, state)

    async def change(
        self, name: str, decide: Callable[[JobState | None], JobState | None]
    ) -> StoredJob | None:
        """Change a state as `decide` says, which returns None to leave it.

        Returns:
            The state that is stored now; None if there is none.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """

        def choose(current: Record | None) -> Json | Disposition:
            state = decide(None if current is None else self._decode(current).state)
            return Disposition.KEEP if state is None else msgspec.to_builtins(state)

        record = await self._jobs.change(name, choose)
        return None if record is None else self._decode(record)

    def decode_progress(self, value: Json) -> Progress:
        """Return how far the last leader got; not at all, if that cannot be read."""
        try:
            return Progress() if value is None else msgspec.convert(value, Progress)
        except msgspec.ValidationError as error:
            self._corruption_log.report(Corrupt(self.progress_key, str(error)))
            return Progress()

    def report(self, name: str, error: JobsyncError) -> None:
        """Report a job that cannot be read or written, once."""
        text = str(error)
        if isinstance(error, Invalid):
            # Without the size, which differs each time.
            text = f"its state cannot be written: {error.field} {error.problem}"
        self._corruption_log.report(Corrupt(self._jobs.key(name), text))

    def report_note(self, error: Corrupt | NewerFormat) -> None:
        """Report a record that is not a job's and cannot be read, once."""
        self._corruption_log.report(
            error if isinstance(error, Corrupt) else Corrupt(self.prefix, str(error))
        )

    async def prune(self, name: str, *, keep: int, oldest: float) -> int:
        """Remove old history of a job: beyond a count, and older than an instant.

        The records of runs that go on are kept: they prove that their instants were fired.
        """

        async def list_running() -> Sequence[ActiveRun]:
            stored = await self.read(name)
            return () if stored is None else (*stored.state.running, *stored.state.lost)

        return await self.history.prune(name, list_running, keep=keep, oldest=oldest)

    async def forget(self, base: Record) -> bool:
        """Remove a job's state; return False if it was changed since it was read.

        Raises:
            OutcomeUnknown: it may have been removed, may still be, or never.
        """
        (outcome,) = await self.store.write([base.delete()])
        return find_applied(outcome, base.key) is not None

    def _decode(self, record: Record) -> StoredJob:
        """Return a job's state.

        Raises:
            Corrupt: it is not one, or this process does not understand its schedule or zone, which
                newer code or newer zone data may have defined.
        """
        state = convert_record(record, JobState)
        try:
            if state.edits:
                fields = {**msgspec.to_builtins(state.definition), **state.edits}
                msgspec.convert(fields, JobDefinition)
            find_schedule(state)
        except (Invalid, TypeError, msgspec.ValidationError) as error:
            raise Corrupt(record.key, f"not understood here: {error}") from error
        return StoredJob(record, state)

    @cached_property
    def _corruption_log(self) -> CorruptionLog:
        return CorruptionLog(self.store.name, self._components.events)
