"""The stored side of scheduled jobs: states, history, progress and edits.

    schedule/<namespace>                         exists, so that namespaces can be listed
    schedule/<namespace>/job/<name>              a job's state, see `core.job_state`
    schedule/<namespace>/run/<name>/<instant>    a firing, and later its result
    schedule/<namespace>/code/<digest>           the jobs of one version of the code
    schedule/<namespace>/progress                how far the leader has decided all jobs
    schedule/<namespace>/edits/latest            the jobs that operators have changed
    schedule/<namespace>/clock/<id>              written and removed, to learn the store's time

Firings are read and written by `scheduler.history`.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.coordination.clock_skew import measure_time
from jobsync.core.codec import Json
from jobsync.core.job_state import (
    ActiveRun,
    JobDefinition,
    JobState,
    find_schedule,
)
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.errors import Corrupt, Invalid, JobsyncError, NewerFormat, OutcomeUnknown
from jobsync.scheduler.history import JobHistory, convert_record
from jobsync.stores.contract import Applied, Conflicted, Outcome, Put, Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = [
    "SCHEDULES",
    "Defined",
    "Edits",
    "JobStore",
    "Progress",
    "StoredJob",
    "digest_code",
    "list_namespaces",
]

SCHEDULES = "schedule/"
"""The prefix of everything about scheduled jobs; each namespace has a level below it."""

_PAGE = 1000
_LATEST_EDITS = "latest"
_CODE_AGE = 86_400.0
"""Seconds after which a version of the code is forgotten that no process has."""
_MAX_FORGOTTEN = 100
_MAX_RECENT = 500
"""Changes that leaders can follow one by one; after more, they look at all jobs."""
_MAX_ANNOUNCED = 20
"""Jobs of a process that may run by hand without another announcement."""


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


class _Code(msgspec.Struct, frozen=True):
    """The jobs of one version of the code."""

    names: tuple[str, ...]
    at: float = 0.0
    """When a process has published it; again at most every half a day."""


class Defined(msgspec.Struct, frozen=True):
    """The version of the code whose definitions are stored."""

    code: str = ""
    """Its digest; empty while they are being replaced."""
    generation: int = 0
    """How many processes have started with another version than the stored one."""


_Note = TypeVar("_Note", _Code, Defined)


def digest_code(definitions: Mapping[str, JobDefinition]) -> str:
    """Return an id of a set of definitions."""
    encoded = msgspec.json.encode(sorted(definitions.items()))
    return hashlib.sha256(encoded).hexdigest()[:24]


async def list_namespaces(store: Store) -> list[str]:
    """Return the namespaces that have, or had, a scheduler."""
    found: list[str] = []
    after = ""
    while heads := await store.heads(SCHEDULES, after=after, limit=_PAGE):
        found += [head.key.removeprefix(SCHEDULES) for head in heads]
        after = heads[-1].key
    return found


class JobStore:
    """Reads and writes scheduled jobs of one namespace.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        namespace: of the scheduler.
        components: the clock, randomness and events.

    Attributes:
        history: the firings and gaps of the jobs.
    """

    def __init__(
        self, get_store: Callable[[], Store], namespace: str, components: Components
    ) -> None:
        self.prefix = f"{SCHEDULES}{namespace}/"
        self.progress_key = f"{self.prefix}progress"
        self.edits_prefix = f"{self.prefix}edits/"
        self._jobs = Keyspace(get_store, f"{self.prefix}job/", components, f"schedule/{namespace}")
        # Apart from the others, so that only edits wake those who wait for edits.
        self._edits = Keyspace(get_store, self.edits_prefix, components, f"schedule/{namespace}")
        self._notes = Keyspace(get_store, self.prefix, components, f"schedule/{namespace}")
        self._code = Keyspace(get_store, f"{self.prefix}code/", components, f"schedule/{namespace}")
        self._components = components
        self.history = JobHistory(get_store, self.prefix, components)

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
        for start in range(0, len(names), _PAGE):
            page = {self._jobs.key(name): name for name in names[start : start + _PAGE]}
            records = await read_each(self.store, list(page), self._corruption_log.report)
            for key, record in records.items():
                if record is None or record.deleted:
                    continue
                if (stored := self._corruption_log.read(self._decode, record)) is not None:
                    found[page[key]] = stored
        return found

    async def list_names(self) -> list[str]:
        """Return the names of all jobs, also of those that were removed; reads no state."""
        found: list[str] = []
        after = ""
        while heads := await self.store.heads(self._jobs.prefix, after=after, limit=_PAGE):
            found += [self._jobs.name(head.key) for head in heads]
            after = heads[-1].key
        return found

    async def read_all(self) -> dict[str, StoredJob]:
        """Read all states that can be read, by name; others are reported."""
        found = {}
        async for record in self._scan(self._jobs.prefix):
            if (stored := self._corruption_log.read(self._decode, record)) is not None:
                found[self._jobs.name(record.key)] = stored
        return found

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
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            puts = [Put(self._jobs.key(name), msgspec.to_builtins(states[name])) for name in page]
            outcomes = await self.store.write(puts)
            for name, put, outcome in zip(page, puts, outcomes, strict=True):
                _check_known(put.key, outcome)
                if isinstance(outcome, Applied):
                    created.add(name)
        return created

    async def replace(self, name: str, base: Record, state: JobState) -> StoredJob | None:
        """Write a state in place of the one that was read; None if that one is replaced.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        (outcome,) = await self.store.write([base.replace(msgspec.to_builtins(state))])
        match outcome:
            case Applied(record):
                return StoredJob(record, state)
            case Conflicted():
                return None
        raise OutcomeUnknown(self._jobs.title(name), outcome.reason)

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

    async def read_edits(self) -> Edits | None:
        """Read which jobs differ from their code; None, and a report, if that cannot be read."""
        try:
            record = await self._edits.get(_LATEST_EDITS)
            return Edits() if record is None else convert_record(record, Edits)
        except (Corrupt, NewerFormat) as error:
            self.report_note(error)
            return None

    async def note_edits(self, names: Mapping[str, bool | None]) -> None:
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
            recent = (*edits.recent, *((revision, name) for name in names))[-_MAX_RECENT:]
            if len(names) > _MAX_RECENT:
                # Too many: nobody can tell which.
                recent = ()
            return Edits(
                revision=revision,
                special=tuple(sorted(special)),
                recent=recent,
                by_hand=edits.by_hand,
            )

        await self._change_edits(decide)

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

        await self._change_edits(decide)
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

        await self._change_edits(decide)

    async def _change_edits(self, decide: Callable[[Edits], Edits]) -> None:
        """Change the edits; a record that this process does not understand is reported."""

        def choose(current: Record | None) -> Json | Disposition:
            before = Edits() if current is None else self._read_edits_again(current)
            after = decide(before)
            return Disposition.KEEP if after == before else msgspec.to_builtins(after)

        try:
            await self._edits.change(_LATEST_EDITS, choose)
        except (Corrupt, NewerFormat) as error:
            self.report_note(error)

    def _read_edits_again(self, current: Record) -> Edits:
        """Return the edits before a change; if they are damaged, ones that nobody has followed."""
        try:
            edits: Edits = convert_record(current, Edits)
        except Corrupt as error:
            self.report_note(error)
            return Edits(revision=int(self._components.clock.wall().seconds * 1000))
        return edits

    async def read_code(self, digest: str) -> frozenset[str]:
        """Read which jobs a version of the code has; none, if nobody knows."""
        if not digest:
            return frozenset()
        code = await self._read_note(f"code/{digest}", _Code)
        return frozenset() if code is None else frozenset(code.names)

    async def write_code(self, digest: str, names: Iterable[str], now: float) -> bool:
        """Write which jobs a version of the code has, unless that was written lately.

        Returns:
            Whether it was not known before.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        key = self._code.key(digest)
        try:
            base = await self.store.get(key, tombstones=True)
        except (Corrupt, NewerFormat) as error:
            self.report_note(error)
            return False
        is_stored = base is not None and not base.deleted
        before = self._corruption_log.read(_read_code, base) if base and is_stored else None
        if before is not None and before.at > now - _CODE_AGE / 2:
            return False
        puts = [Put(key, msgspec.to_builtins(_Code(tuple(sorted(names)), at=now)), base)]
        if not is_stored:
            # So that the namespace can be listed.
            puts.append(Put(self.prefix.removesuffix("/"), {}))
        for put, outcome in zip(puts, await self.store.write(puts), strict=True):
            # One that was written meanwhile says the same.
            _check_known(put.key, outcome)
        return not is_stored

    async def forget_code(self, used: Container[str], now: float) -> int:
        """Remove versions of the code that no process has and that were published a day ago.

        A process publishes its version before its session names it, and publishes an old one
        again: what is removed here is named by nobody. At most 100 are removed.

        Args:
            used: the digests that live sessions name.
            now: the time by which they were published.

        Returns:
            How many were removed.
        """
        heads = await self.store.heads(self._code.prefix, limit=_PAGE)
        unused = [head.key for head in heads if self._code.name(head.key) not in used]
        records = await read_each(self.store, unused[:_MAX_FORGOTTEN], self._corruption_log.report)
        old = [
            record.delete()
            for record in records.values()
            if record is not None
            and not record.deleted
            and (code := self._corruption_log.read(_read_code, record)) is not None
            and code.at < now - _CODE_AGE
        ]
        outcomes = await self.store.write(old) if old else []
        if unused:
            await self.store.bury(self._code.prefix)
        return sum(isinstance(outcome, Applied) for outcome in outcomes)

    async def read_defined(self) -> Defined:
        """Read which version of the code has its definitions stored; none, if nobody knows."""
        return await self._read_note("defined", Defined) or Defined()

    async def begin_generation(self) -> int | None:
        """Note that definitions are about to be replaced.

        Returns:
            A number above those of all processes that have called this before; None, and a
            report, if the record is damaged.

        Raises:
            OutcomeUnknown: it may have been written, may still be, or never.
        """
        return await self._change_defined(lambda before: Defined("", before.generation + 1))

    async def write_defined(self, digest: str, generation: int) -> None:
        """Write that the definitions of a version are stored, unless a later process has begun."""
        await self._change_defined(
            lambda before: Defined(digest, generation) if generation == before.generation else None
        )

    async def clear_defined(self) -> None:
        """Write that the stored definitions are no version's: the next process defines its own."""
        await self._change_defined(lambda before: Defined("", before.generation))

    async def _change_defined(self, decide: Callable[[Defined], Defined | None]) -> int | None:
        """Change the record, unless it is damaged; return the generation that it has then."""
        generation = 0

        def choose(current: Record | None) -> Json | Disposition:
            nonlocal generation
            before = Defined() if current is None else convert_record(current, Defined)
            after = decide(before)
            generation = (after or before).generation
            return Disposition.KEEP if after is None else msgspec.to_builtins(after)

        try:
            await self._notes.change("defined", choose)
        except (Corrupt, NewerFormat) as error:
            self.report_note(error)
            return None
        return generation

    async def _read_note(self, name: str, kind: type[_Note]) -> _Note | None:
        """Read a record that only saves work; one that cannot be read is reported, and is none."""
        try:
            record = await self.store.get(f"{self.prefix}{name}")
            return None if record is None else convert_record(record, kind)
        except (Corrupt, NewerFormat) as error:
            self.report_note(error)
            return None

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
        _check_known(base.key, outcome)
        await self.store.bury(self._jobs.prefix)
        return isinstance(outcome, Applied)

    async def _scan(self, prefix: str) -> AsyncIterator[Record]:
        after = ""
        while True:
            records = await self.store.scan(prefix, after=after, limit=_PAGE)
            for record in records:
                yield record
            if len(records) < _PAGE:
                return
            after = records[-1].key

    def _decode(self, record: Record) -> StoredJob:
        """Return a job's state.

        Raises:
            Corrupt: it is not one, or this process does not understand its schedule or zone, which
                newer code or newer zone data may have defined.
        """
        state: JobState = convert_record(record, JobState)
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


def _read_code(record: Record) -> _Code:
    code: _Code = convert_record(record, _Code)
    return code


def _check_known(key: str, outcome: Outcome) -> None:
    """Check that a record is there, whoever has created it.

    Raises:
        OutcomeUnknown: it may have been written, may still be, or never.
    """
    if not isinstance(outcome, Applied | Conflicted):
        raise OutcomeUnknown(key, outcome.reason)
