"""A session: one incarnation of a worker, and the only lease there is.

Guarantee, for clocks whose rates differ by at most 5 % and that count through a suspend: while a
session trusts itself, nobody has declared it dead. If the assumption fails, a session may trust
itself for too long; the store then refuses its writes, because its record reads `dead` and its
versions are stale.

A heartbeat replaces the session's own last write. Death is a write too: it replaces the version
that an observer watched for the whole timeout, or that a process wrote which has ended since, so
exactly one of the two is applied. Only a
record that reads `dead`, or is gone, means that the session is lost. Everything it held is then
void, and the process comes back as a new incarnation. A forked child holds nothing.
"""

import os
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.clock_skew import WriteTimes
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, Misconfigured, Unavailable
from jobsync.processes import ProcessIdentity
from jobsync.stores.contract import Applied, Conflicted, Put, Record, Store
from jobsync.stores.corruption_log import convert_record
from jobsync.stores.settling import SettlingStore

__all__ = [
    "FAILING",
    "SESSIONS",
    "WITHHELD",
    "HookFailure",
    "Session",
    "SessionOwner",
    "SessionRecord",
    "SessionState",
    "count_forks",
    "read_hook_failure",
    "read_session_record",
    "read_withheld",
]

SESSIONS = "session/"
"""Key prefix of sessions."""

FAILING = "failing"
"""The fact that lists the hooks which raise, by role."""

WITHHELD = "withheld"
"""The fact that lists the roles from which the worker stands back, each with the reason."""

_MAX_SEND_TIMES = 32
_MAX_WRITE_TIMES = 4

_forks = 0
"""How many forks lie between this process and the one that loaded this module."""


def _count_fork() -> None:
    # Counted, because os.getpid is a system call: too slow for a check that is made for each
    # task of a list.
    global _forks  # noqa: PLW0603 - a fact about the process
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def count_forks() -> int:
    """Return how many forks lie between this process and the one that loaded this module."""
    return _forks


SessionState: TypeAlias = Literal["new", "live", "lost", "ended"]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is stored, for the workers that watch it."""

    worker: str
    state: Literal["live", "dead"]
    beat: int
    """The number of heartbeats so far."""
    timing: Timing
    works: tuple[str, ...] = ()
    """The roles that it is a candidate for."""
    holds: dict[str, int] = {}
    """The roles that it holds, each with its epoch."""
    facts: dict[str, Json] = {}
    """Anything else that its owner publishes: host, process, version."""
    process: ProcessIdentity | msgspec.UnsetType = msgspec.UNSET
    """The process that it lives in, where the system tells: it does not outlive that."""
    ended: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether it is dead because its process has ended; otherwise that may still run."""
    left: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether it has ended by itself; otherwise others have found it dead."""


def read_session_record(record: Record) -> SessionRecord:
    """Return a session's record, decoded.

    Raises:
        Corrupt: neither this nor an earlier version of this library wrote it.
    """
    if record.format > 1:
        raise Corrupt(record.key, f"its format {record.format} is newer than this library")
    return convert_record(record, SessionRecord)


class HookFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A hook of a coordinator that raised when it was last called."""

    callback: str
    error: str
    at: float
    """By its worker's wall clock."""
    times: int
    """How often in a row."""


def read_hook_failure(record: SessionRecord, role: str) -> HookFailure | None:
    """Return what keeps a session from leading a role well; None if all is well, or unknown."""
    failing = record.facts.get(FAILING)
    try:
        return msgspec.convert(failing, dict[str, HookFailure]).get(role) if failing else None
    except msgspec.ValidationError:
        # For people only: another version of this library describes it in other words.
        return None


def read_withheld(record: SessionRecord) -> dict[str, str]:
    """Return the roles from which a session's worker stands back, each with the reason."""
    try:
        return msgspec.convert(record.facts.get(WITHHELD, {}), dict[str, str])
    except msgspec.ValidationError:
        # For people only, likewise.
        return {}


class SessionOwner(msgspec.Struct, frozen=True):
    """A worker, which has one session after the other.

    Attributes:
        store: where its sessions are recorded.
        components: time, randomness and events.
        timing: the heartbeat interval and the timeout.
        worker: its id, the same for all its sessions.
        facts: published for other workers.
    """

    store: Store
    components: Components
    timing: Timing
    worker: str
    facts: Mapping[str, Json] = {}


class Session:
    """One incarnation of one worker. The owner calls `open`, then `heartbeat` once an interval.

    Its writes are settled for at most one heartbeat interval.

    Attributes:
        heartbeats: how many heartbeats were applied.
        lapses: how often trust ran out and came back; what was held before a lapse is void.
        works: the roles that it is a candidate for; written with the next heartbeat.
        holds: the roles that it holds; likewise.
        facts: likewise.
        writes: its latest writes that are known to be applied, by version.
    """

    def __init__(self, owner: SessionOwner) -> None:
        components, timing = owner.components, owner.timing
        self.state: SessionState = "new"
        self.worker = owner.worker
        self.incarnation = ""
        self.heartbeats = 0
        self.lapses = 0
        self.works: tuple[str, ...] = ()
        self.holds: dict[str, int] = {}
        self.facts = dict(owner.facts)
        self.writes: dict[str, WriteTimes] = {}
        self._store = SettlingStore(owner.store, components, deadline=timing.heartbeat)
        self._clock = components.clock
        self._ids = components.ids
        self._process = components.processes.identify() or msgspec.UNSET
        self._timing = timing
        self._forks = _forks
        self._base: Record | None = None
        self._sent_at: dict[str, Mono] = {}
        self._trusted_until: Mono | None = None

    @property
    def trusted(self) -> bool:
        """Whether what it holds may be acted on now. Reads the clock each time."""
        return self.is_trusted_at(self._clock.mono())

    def is_trusted_at(self, now: Mono) -> bool:
        """Whether what it holds may be acted on, by a time that the caller has just read."""
        # Called for each task of a list, so it only compares where `trust_left` subtracts.
        until = self._trusted_until
        if until is None or self.state != "live" or self._forks != _forks:
            return False
        return now < until

    @property
    def trust_left(self) -> float:
        """Seconds for which it trusts itself if no further heartbeat succeeds."""
        until = self._trusted_until
        if until is None or self.state != "live" or self._forks != _forks:
            return 0.0
        left = until - self._clock.mono()
        return max(0.0, left)

    @property
    def recorded_works(self) -> Collection[str]:
        """The roles that its record, as last written, says that it is a candidate for."""
        base = self._base
        return () if base is None else tuple(base.value["works"])

    async def open(self) -> None:
        """Write the session's record. Returns once it is stored, before it holds anything.

        Raises:
            Unavailable: the store does not answer; call again.
        """
        # A new name for each attempt: a record that lands late has no owner, and dies.
        self.incarnation = self._ids.incarnation(self.worker)
        change = Put(self._key, self._encode(0), nonce=self._new_nonce())
        (outcome,) = await self._store.write([change])
        if not isinstance(outcome, Applied):
            raise Unavailable(self._store.name, "the session could not be recorded")
        self._adopt(outcome.record)
        self.state = "live"

    async def heartbeat(self) -> SessionState:
        """Renew the session in the store, and return its state."""
        base = self._base
        if self.state != "live" or base is None:
            return self.state
        # Fields that newer code has written survive.
        value = {**base.value, **self._encode(base.value["beat"] + 1)}
        change = msgspec.structs.replace(base.replace(value), nonce=self._new_nonce())
        try:
            (outcome,) = await self._store.write([change])
            if isinstance(outcome, Applied):
                self._adopt(outcome.record)
            else:
                await self._resolve_conflict()
        except (Unavailable, Misconfigured):
            # There was no answer; trust runs out by itself.
            return self.state
        except Corrupt:
            # Nobody can write to it again, neither a heartbeat nor a death.
            self.state = "lost"
        return self.state

    async def end(self) -> None:
        """Write the session's end. It holds nothing from the moment this is sent."""
        base, was = self._base, self.state
        self.abandon()
        while was == "live" and base is not None:
            dead = base.replace({**base.value, "state": "dead", "holds": {}, "left": True})
            (outcome,) = await self._store.write([dead])
            # A last heartbeat of our own may have landed meanwhile.
            base = await self._read_own(base) if isinstance(outcome, Conflicted) else None

    def abandon(self) -> None:
        """Hold nothing from now on, without a write; others notice the missing heartbeats."""
        if self.state != "lost":
            self.state = "ended"

    @property
    def _key(self) -> str:
        return f"{SESSIONS}{self.incarnation}"

    def _encode(self, beat: int) -> dict[str, Json]:
        record = SessionRecord(
            worker=self.worker,
            state="live",
            beat=beat,
            timing=self._timing,
            works=self.works,
            holds=self.holds,
            facts=self.facts,
            process=self._process,
        )
        # Through JSON: lists, unlike tuples, are stored as they are.
        return msgspec.json.decode(msgspec.json.encode(record))  # type: ignore[no-any-return]

    def _new_nonce(self) -> str:
        """Return a nonce, and remember when the write that carries it was first sent."""
        (nonce,) = self._ids.nonces(1)
        self._sent_at[nonce] = self._clock.mono()
        while len(self._sent_at) > _MAX_SEND_TIMES:
            del self._sent_at[next(iter(self._sent_at))]
        return nonce

    def _adopt(self, record: Record) -> None:
        """Make a record of ours the base; trust counts from the first send of its write."""
        self._base = record
        sent, before = self._sent_at.get(record.nonce), self._trusted_until
        if sent is None:
            # So late that its send time is forgotten: it becomes the base, but renews nothing.
            return
        self.heartbeats += 1
        self.writes[record.version] = WriteTimes(sent, self._clock.mono())
        while len(self.writes) > _MAX_WRITE_TIMES:
            del self.writes[next(iter(self.writes))]
        until = self._timing.trusted_until(sent)
        if before is not None and before <= self._clock.mono():
            self.lapses += 1
        if before is None or before < until:
            self._trusted_until = until

    async def _read_own(self, base: Record) -> Record | None:
        """Return the session's record, if a heartbeat of ours has replaced the base."""
        current = await self._store.get(self._key)
        if (
            current is None
            or current.version == base.version
            or read_session_record(current).state == "dead"
        ):
            return None
        return current

    async def _resolve_conflict(self) -> None:
        """Read the record that conflicts with a heartbeat: it is lost, or an earlier heartbeat."""
        current = await self._store.get(self._key, tombstones=True)
        if current is None or current.deleted or read_session_record(current).state == "dead":
            self.state = "lost"
        elif self._base is None or current.version != self._base.version:
            # An earlier heartbeat, given up for lost, has landed: only we write `live`.
            self._adopt(current)
