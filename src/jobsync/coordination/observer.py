"""What a worker knows of the other sessions: it watches them and declares them dead.

An observer measures with its own clock, from the return of the first read that showed a version.
It declares a session dead only if it watched one version, without a gap, for the timeout that the
session itself has announced. Where the store has a clock, that clock must agree. Better evidence
is that the process of a session has ended, which can be seen on the same machine: such a session is
declared dead at once. A record that cannot be decoded is reported once and left alone until it
changes. Followers watch the session that leads them, leaders watch all.

A changed version is a heartbeat, or the death or orderly end of the session. Followers read it. A
leader, which lists versions, reads those of the sessions that somebody waits for.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from jobsync.components import Components
from jobsync.coordination.session import SESSIONS, SessionRecord, read_session_record
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch
from jobsync.errors import Corrupt
from jobsync.processes import ProcessIdentity, has_ended
from jobsync.stores.contract import Applied, Head, Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each
from jobsync.stores.paging import head_all, scan_all

__all__ = ["DEAD_SESSION_TTL", "Candidates", "Observer", "list_live_sessions"]


DEAD_SESSION_TTL = 1200.0
"""Seconds after which a dead session's record is removed, if nothing refers to it.

Longer than any request can be under way: a late copy of the write that opened the session would
bring it back. A later reader finds the record absent, which means the same as dead.
"""

_STILL_FRACTION = 0.9
"""Part of a heartbeat interval for which a version stands still before it is read where requests
cost money: the versions of sessions that live do so rarely."""

_PREFIX_LENGTH = len(SESSIONS)


class _Death(NamedTuple):
    """A death that is written; one value, because other threads read it."""

    at: Mono
    """When it became known here."""
    has_process_ended: bool


class Observer:
    """What one worker knows of the other sessions.

    Args:
        store: where the sessions are.
        components: the clock that measures silence, and events.
        timing: this worker's own: how often it checks.
    """

    def __init__(self, store: Store, components: Components, timing: Timing) -> None:
        self._store = store
        self._clock = components.clock
        self._processes = components.processes
        self._process = self._processes.identify()
        self._timing = timing
        self._watches: dict[str, Watch] = {}
        self._timeouts: dict[str, float] = {}
        self._neighbours: dict[str, ProcessIdentity] = {}
        """The processes of sessions on this machine."""
        self._decoded: dict[str, str] = {}
        """The latest versions that were decoded, by incarnation."""
        self._unreadable: dict[str, str] = {}
        """The versions that are not session records, by incarnation."""
        self._dead: dict[str, _Death] = {}
        self.living: frozenset[str] = frozenset()
        """The sessions that were present and not dead when all were last listed; none while only
        some are watched."""
        self._corruption_log = CorruptionLog(store.name, components.events)

    def is_dead(self, incarnation: str) -> bool:
        """Whether a session's death is written, or its record was absent for a whole timeout."""
        # Called by other threads too, so each fact is looked up once.
        watch = self._watches.get(incarnation)
        is_missing = watch is not None and watch.version is None
        return incarnation in self._dead or (
            is_missing and watch is not None and watch.has_expired(self._timeout(incarnation))
        )

    def has_process_ended(self, incarnation: str) -> bool:
        """Whether the death of a session is written, and its process had ended then."""
        death = self._dead.get(incarnation)
        return death is not None and death.has_process_ended

    def expect(self, incarnation: str, timeout: float) -> None:
        """Remember the timeout of a session whose record may never be seen."""
        self._timeouts.setdefault(incarnation, timeout)

    def update(self, found: Mapping[str, Record | None]) -> dict[str, SessionRecord]:
        """Record the result of a read that has just returned; return the sessions that live."""
        now = self._clock.mono()
        living = {}
        for incarnation, record in found.items():
            if record is None or record.deleted:
                self._watch(incarnation, None, now)
                continue
            session_record = self._decode(incarnation, record)
            if session_record is not None and session_record.state == "live":
                living[incarnation] = session_record
                self._watch(incarnation, record.version, now)
        return living

    def _decode(self, incarnation: str, record: Record) -> SessionRecord | None:
        """Return a session's record and remember its state; None if it cannot be decoded."""
        try:
            session_record = read_session_record(record)
        except Corrupt as corrupt:
            self._corruption_log.report(corrupt)
            self._set_aside(incarnation, record.version)
            return None
        self._timeouts[incarnation] = session_record.timing.timeout
        self._decoded[incarnation] = record.version
        self._note_process(incarnation, session_record.process)
        if session_record.state == "dead":
            self._mark_dead(incarnation, self._clock.mono(), ended=session_record.ended is True)
        return session_record

    def _note_process(self, incarnation: str, process: ProcessIdentity | msgspec.UnsetType) -> None:
        """Remember the process of a session if its end can be seen from here."""
        if self._process is None or process is msgspec.UNSET:
            return
        if process.shares_machine(self._process):
            self._neighbours[incarnation] = process

    def _set_aside(self, incarnation: str, version: str) -> None:
        """Stop watching a record that cannot be decoded; read it again only when it changes."""
        self._unreadable[incarnation] = version
        self._timeouts.pop(incarnation, None)
        self._watches.pop(incarnation, None)

    async def check_all(self, expected: Collection[str] = ()) -> list[Head]:
        """List every session once, and count those expected but not there as missing.

        Those expected are read again when they have changed, for somebody else may have written
        their end; where requests cost money, once the change is not followed by another.
        Returns what was listed.

        Raises:
            Unavailable: the store does not answer; that says nothing about any session.
        """
        heads = await head_all(self._store, SESSIONS)
        now = self._clock.mono()
        seen = {head.key[_PREFIX_LENGTH:]: head.version for head in heads}
        # A record that is gone needs no watch here; the workers that it leads will miss it.
        _keep_only(self._dead, seen.keys())
        for incarnation in self._watches.keys() - seen.keys():
            if self._watches[incarnation].version is not None:
                del self._watches[incarnation]
        for incarnation in sorted(expected):
            if incarnation not in seen:
                self._watch(incarnation, None, now)
        await self._read_unknown(seen)
        # Sorted, so that every run visits them in the same order.
        living = sorted((seen.keys() & self._timeouts.keys()) - self._dead.keys())
        for incarnation in living:
            self._watch(incarnation, seen[incarnation], now)
        self.living = frozenset(living)
        await self._read_changed(sorted(self.living.intersection(expected)), seen, now)
        return heads

    async def _read_changed(
        self, expected: Iterable[str], seen: Mapping[str, str], now: Mono
    ) -> None:
        """Read the sessions whose listed versions were not decoded yet and have stood still."""
        still = _STILL_FRACTION * self._timing.heartbeat if self._store.is_billed else 0.0
        changed = [
            incarnation
            for incarnation in expected
            if self._decoded.get(incarnation) != seen[incarnation]
            and now >= self._watches[incarnation].since + still
        ]
        await self._read(changed, seen)

    async def _read_unknown(self, seen: Mapping[str, str]) -> None:
        """Read the sessions that were not decoded yet, and forget those that are gone."""
        _keep_only(self._timeouts, seen.keys() | self._watches.keys())
        _keep_only(self._neighbours, self._timeouts.keys())
        _keep_only(self._decoded, self._timeouts.keys())
        self._unreadable = {
            incarnation: version
            for incarnation, version in self._unreadable.items()
            if seen.get(incarnation) == version
        }
        unknown = sorted(seen.keys() - self._timeouts.keys() - self._unreadable.keys())
        await self._read(unknown, seen)

    async def _read(self, incarnations: Collection[str], seen: Mapping[str, str]) -> None:
        """Read sessions that were just listed, and set aside those that cannot be decoded."""
        if not incarnations:
            return
        found = await self.read(incarnations)
        self.update(found)
        for incarnation in incarnations:
            if incarnation not in found:
                self._set_aside(incarnation, seen[incarnation])

    async def read(self, incarnations: Iterable[str]) -> dict[str, Record | None]:
        """Read the records of some sessions, without those that cannot be read."""
        keys = [f"{SESSIONS}{incarnation}" for incarnation in incarnations]
        found = await read_each(self._store, keys, self._corruption_log.report)
        return {key.removeprefix(SESSIONS): record for key, record in found.items()}

    def next_expiry(self, since: Mono) -> Mono | None:
        """Return the first moment after `since` at which a watched session may be declared dead."""
        if not self._watches:
            return None
        moments = [
            watch.expires_at(self._timeout(incarnation))
            for incarnation, watch in self._watches.items()
        ]
        return min((moment for moment in moments if moment > since), default=None)

    def watch_only(self, incarnations: AbstractSet[str]) -> None:
        """Stop watching all others."""
        self.living = frozenset()
        for known in (
            self._watches,
            self._timeouts,
            self._neighbours,
            self._decoded,
            self._dead,
        ):
            _keep_only(known, incarnations)

    async def declare_dead(self) -> list[str]:
        """Write the death of sessions that have expired or ended; return their incarnations."""
        expired = [
            incarnation
            for incarnation, watch in self._watches.items()
            if watch.version is not None
            and (self._is_expired(incarnation) or self._is_process_gone(incarnation))
        ]
        return [incarnation for incarnation in expired if await self._declare_dead(incarnation)]

    @property
    def can_see_processes(self) -> bool:
        """Whether this system tells which processes have ended."""
        return self._process is not None

    def list_ended(self) -> set[str]:
        """Return the watched sessions whose processes have ended."""
        watched = self._neighbours.keys() & self._watches.keys()
        return {incarnation for incarnation in watched if self._is_process_gone(incarnation)}

    async def remove_long_dead(self, needed: Collection[str]) -> None:
        """Remove the records of sessions that have been dead for long and are not needed."""
        long_ago = self._clock.mono() + -DEAD_SESSION_TTL
        # Ordered by time of death.
        old = [
            incarnation
            for incarnation, _ in takewhile(lambda item: item[1].at < long_ago, self._dead.items())
            if incarnation not in needed
        ]
        if old:
            await self._store.drop([f"{SESSIONS}{incarnation}" for incarnation in old])
            for incarnation in old:
                del self._dead[incarnation]

    def _watch(self, incarnation: str, version: str | None, now: Mono) -> None:
        watch = self._watches.get(incarnation)
        self._watches[incarnation] = (
            Watch(version, now, now) if watch is None else watch.observe(version, now, self._timing)
        )

    def _mark_dead(self, incarnation: str, now: Mono, *, ended: bool) -> None:
        self.living -= {incarnation}
        self._watches.pop(incarnation, None)
        # The first one stays: nobody writes to the record of a dead session again.
        self._dead.setdefault(incarnation, _Death(now, ended))

    def _timeout(self, incarnation: str) -> float:
        return self._timeouts.get(incarnation, self._timing.timeout)

    def _is_expired(self, incarnation: str) -> bool:
        return self._watches[incarnation].has_expired(self._timeout(incarnation))

    async def _declare_dead(self, incarnation: str) -> bool:
        """Write a session's death in place of the very version that was watched, or not at all.

        If its process has ended, the version may be any: no other will follow, but for one that
        is still under way. What the store refuses is read again at once: the death that another
        observer has written meanwhile counts here too, and nothing else tells of it.
        """
        refused = None
        while True:
            record = (await self.read([incarnation])).get(incarnation)
            watch = self._watches.get(incarnation)
            if record is None or record.deleted or record.version == refused or watch is None:
                return False
            # It may have ended cleanly, or become unreadable, since it was last read.
            session_record = self._decode(incarnation, record)
            if session_record is None or session_record.state == "dead":
                return False
            ended = self._is_process_gone(incarnation)
            if not ended and not await self._has_lasted(record, watch):
                return False
            death = {"state": "dead", "ended": True} if ended else {"state": "dead"}
            (outcome,) = await self._store.write([record.replace({**record.value, **death})])
            if isinstance(outcome, Applied):
                self._mark_dead(incarnation, self._clock.mono(), ended=ended)
                return True
            refused = record.version

    async def _has_lasted(self, record: Record, watch: Watch) -> bool:
        """Whether a version was watched for the whole timeout, also by the store's clock."""
        if record.version != watch.version:
            return False
        age = await self._store.age(record)
        return age is None or age >= self._timeout(record.key.removeprefix(SESSIONS))

    def _is_process_gone(self, incarnation: str) -> bool:
        process = self._neighbours.get(incarnation)
        return process is not None and has_ended(process, self._processes)


def _keep_only(known: dict[str, Any], incarnations: AbstractSet[str]) -> None:
    # Almost always there are no others, and this costs less than the difference.
    if known.keys() <= incarnations:
        return
    for incarnation in known.keys() - incarnations:
        del known[incarnation]


class Candidates:
    """The live sessions, by the roles that they are candidates for.

    Reads the store at the first call and keeps the result, so that one pass over several
    elections lists the sessions at most once. A session that cannot be decoded is reported, and
    is a candidate for nothing.

    Args:
        store: where the sessions are.
        report: called with each record that cannot be decoded.
    """

    def __init__(self, store: Store, report: Callable[[Corrupt], object]) -> None:
        self._store = store
        self._report = report
        self._works: dict[str, tuple[str, ...]] | None = None

    async def list_for(self, role: str) -> list[str]:
        """Return the live incarnations that are candidates for a role, in order.

        Raises:
            Unavailable: the store does not answer.
        """
        if self._works is None:
            found = await list_live_sessions(self._store, self._report)
            self._works = {incarnation: record.works for incarnation, record in found.items()}
        return [incarnation for incarnation, works in self._works.items() if role in works]


async def list_live_sessions(
    store: Store, report: Callable[[Corrupt], object]
) -> dict[str, SessionRecord]:
    """Return the live sessions, the oldest first. What cannot be decoded is reported."""
    found = {}
    for record in await scan_all(store, SESSIONS):
        # In an old fleet most are dead; these need not be decoded.
        if isinstance(record.value, dict) and record.value.get("state") == "dead":
            continue
        try:
            session_record = read_session_record(record)
        except Corrupt as corrupt:
            report(corrupt)
            continue
        if session_record.state == "live":
            found[record.key.removeprefix(SESSIONS)] = session_record
    return found
