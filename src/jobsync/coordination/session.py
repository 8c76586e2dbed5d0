"""A session: the only lease there is.

Promises, for clocks whose rates differ by at most 5 % and that count through a suspend:
while a session trusts itself nobody has called it dead. When the assumption fails the
session may believe too long; what it then writes is refused by the store, because its
record reads `dead` and its versions are stale.

A beat is a write in place of the session's own last one. Death is a write too, in place
of the version that an observer watched for the whole timeout: one of the two wins. Only a
record that reads `dead`, or is gone, means that the session is lost; then everything it
held is void, and the process comes back as a new incarnation. A forked child holds nothing.
"""

import os
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, Invalid, Misconfigured, Unavailable
from jobsync.stores.contract import Applied, Conflicted, Put, Record, Store
from jobsync.stores.settling import SettlingStore

__all__ = ["SESSIONS", "Session", "SessionRecord", "SessionState", "read_session_record"]

SESSIONS = "session/"
"""Where sessions are."""

_REMEMBERED = 32

_forks = 0
"""How many forks lie between this process and the one that loaded this module."""


def _count_fork() -> None:
    # Counted, because asking for the process's number is a system call: too slow for a
    # question that is asked for each task of a list.
    global _forks  # noqa: PLW0603 - a fact about the process
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

SessionState: TypeAlias = Literal["new", "live", "lost", "ended"]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a session tells of itself, to those who watch it."""

    worker: str
    state: Literal["live", "dead"]
    beat: int
    """Counts its beats."""
    timing: Timing
    works: tuple[str, ...] = ()
    """The roles that it stands for."""
    holds: dict[str, int] = {}
    """The roles that it holds, each with its epoch."""
    facts: dict[str, Json] = {}
    """What else its owner wants known: host, process, version."""


def read_session_record(record: Record) -> SessionRecord:
    """Understand a session's record.

    Raises:
        Corrupt: it is not what this or an earlier version of this library wrote.
    """
    if record.format > 1:
        raise Corrupt(record.key, f"its format, {record.format}, is newer than this library")
    try:
        return msgspec.convert(record.value, SessionRecord)
    except (msgspec.ValidationError, Invalid) as error:
        raise Corrupt(record.key, str(error)) from error


def _let_die(record: Record) -> Put:
    return record.replace({**record.value, "state": "dead", "holds": {}})


class Session:
    """One incarnation of one worker. The owner calls `open`, then `beat` once a beat.

    Args:
        store: where it is recorded; its writes are settled for one beat at most.
        components: time, randomness and events.
        timing: the beat and the timeout.
        worker: the worker's id, the same for all its incarnations.
        facts: what others may want to know.

    Attributes:
        beats: how many beats were applied.
        lapses: how often trust ran out and came back; what was held before is void.
        works: the roles that it stands for; told at the next beat.
        holds: the roles that it holds; likewise.
        facts: likewise.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        timing: Timing,
        worker: str,
        facts: Mapping[str, Json] | None = None,
    ) -> None:
        self.state: SessionState = "new"
        self.worker = worker
        self.incarnation = ""
        self.beats = 0
        self.lapses = 0
        self.works: tuple[str, ...] = ()
        self.holds: dict[str, int] = {}
        self.facts = dict(facts or {})
        self._store = SettlingStore(store, components, deadline=timing.beat)
        self._clock = components.clock
        self._ids = components.ids
        self._timing = timing
        self._forks = _forks
        self._base: Record | None = None
        self._sent: dict[str, Mono] = {}
        self._trusted_until: Mono | None = None

    @property
    def trusted(self) -> bool:
        """Whether what it holds may be acted on now. Asks the clock each time."""
        # Asked for each task of a list: it compares, where `trust_left` counts.
        until = self._trusted_until
        if until is None or self.state != "live" or self._forks != _forks:
            return False
        return self._clock.mono() < until

    @property
    def trust_left(self) -> float:
        """For how many seconds it trusts itself if no further beat succeeds."""
        until = self._trusted_until
        if until is None or self.state != "live" or self._forks != _forks:
            return 0.0
        left = until - self._clock.mono()
        return max(0.0, left)

    async def open(self) -> None:
        """Record the session, and know that it is there, before it holds anything.

        Raises:
            Unavailable: the store does not answer; call again.
        """
        # A name of its own for each attempt: one that lands late is nobody's, and dies.
        self.incarnation = self._ids.incarnation(self.worker)
        change = Put(self._key, self._document(0), nonce=self._mark())
        (outcome,) = await self._store.write([change])
        if not isinstance(outcome, Applied):
            raise Unavailable(self._store.name, "the session could not be recorded")
        self._take(outcome.record)
        self.state = "live"

    async def beat(self) -> SessionState:
        """Tell the store that the session lives; give the state that it is in."""
        base = self._base
        if self.state != "live" or base is None:
            return self.state
        # Facts of newer code in the record survive.
        document = {**base.value, **self._document(base.value["beat"] + 1)}
        change = msgspec.structs.replace(base.replace(document), nonce=self._mark())
        try:
            (outcome,) = await self._store.write([change])
            if isinstance(outcome, Applied):
                self._take(outcome.record)
            else:
                await self._look()
        except (Unavailable, Misconfigured):
            # Nothing was heard; trust runs out by itself.
            return self.state
        except Corrupt:
            # Nobody can write to it again, be it a beat or a death.
            self.state = "lost"
        return self.state

    async def end(self) -> None:
        """Leave in good order: from the moment this is sent, the session holds nothing."""
        base, was = self._base, self.state
        self.abandon()
        while was == "live" and base is not None:
            (outcome,) = await self._store.write([_let_die(base)])
            # A last beat of our own may have landed meanwhile.
            base = await self._find_own(base) if isinstance(outcome, Conflicted) else None

    def abandon(self) -> None:
        """Hold nothing from now on; others will find out by its silence."""
        if self.state != "lost":
            self.state = "ended"

    @property
    def _key(self) -> str:
        return f"{SESSIONS}{self.incarnation}"

    def _document(self, beat: int) -> dict[str, Json]:
        life = SessionRecord(
            worker=self.worker,
            state="live",
            beat=beat,
            timing=self._timing,
            works=self.works,
            holds=self.holds,
            facts=self.facts,
        )
        # Through text: lists, unlike tuples, are encoded without a second look.
        return msgspec.json.decode(msgspec.json.encode(life))  # type: ignore[no-any-return]

    def _mark(self) -> str:
        """Draw a nonce, and remember when the write that bears it was first sent."""
        (nonce,) = self._ids.nonces(1)
        self._sent[nonce] = self._clock.mono()
        while len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return nonce

    def _take(self, record: Record) -> None:
        """Go on from a record of ours; trust counts from the first send of its write."""
        self._base = record
        sent, before = self._sent.get(record.nonce), self._trusted_until
        if sent is None:
            # So late that it is forgotten when it was sent: a base for the next, and no more.
            return
        self.beats += 1
        until = self._timing.trusted_until(sent)
        if before is not None and before <= self._clock.mono():
            self.lapses += 1
        if before is None or before < until:
            self._trusted_until = until

    async def _find_own(self, base: Record) -> Record | None:
        """Give the session's record, if a beat of ours has put it in place of another."""
        current = await self._store.get(self._key)
        if (
            current is None
            or current.version == base.version
            or read_session_record(current).state == "dead"
        ):
            return None
        return current

    async def _look(self) -> None:
        """Find out what stands in the way of a beat."""
        current = await self._store.get(self._key, tombstones=True)
        if current is None or current.deleted or read_session_record(current).state == "dead":
            self.state = "lost"
        elif self._base is None or current.version != self._base.version:
            # An earlier beat, given up for lost, has landed after all: nobody else lets us live.
            self._take(current)
