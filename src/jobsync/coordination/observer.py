"""Who watches sessions, and writes down their death.

An observer counts on its own clock, from the return of the first read that showed a
version. It never calls dead what it did not watch, without a gap, for the whole timeout
that the session itself has announced; and where the store has a clock, that one must agree.
A record that it does not understand is reported and left alone, until it changes.
Whoever needs a session dead watches it: followers the one that leads them, leaders all.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import takewhile
from typing import Any

from jobsync.components import Components
from jobsync.coordination.session import SESSIONS, SessionRecord, read_session_record
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch
from jobsync.errors import Corrupt
from jobsync.stores.contract import Applied, Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = ["MOURNING", "Candidates", "Observer"]


MOURNING = 1200.0
"""Seconds after which a dead session's record goes, if nobody names it any more.

Longer than any request is under way: a late copy of the one that opened the session would
bring it back. Whoever asks for it later finds it absent, which is as good as dead.
"""

_MOST = 10_000
"""How many sessions are watched at the most."""

_NAMED_FROM = len(SESSIONS)
"""Where a session's own name begins in its key."""


class Observer:
    """What one worker knows of the others' sessions.

    Args:
        store: where the sessions are.
        components: the clock that counts.
        timing: this worker's own: how often it looks.
    """

    def __init__(self, store: Store, components: Components, timing: Timing) -> None:
        self._store = store
        self._clock = components.clock
        self._timing = timing
        self._watches: dict[str, Watch] = {}
        self._timeouts: dict[str, float] = {}
        self._puzzling: dict[str, str] = {}
        """The versions that are no sessions', by incarnation."""
        self._dead: dict[str, Mono] = {}
        self.living: frozenset[str] = frozenset()
        """Who was there and not dead, at the last look at all."""
        self._witness = CorruptionLog(store.name, components.events)

    def is_dead(self, incarnation: str) -> bool:
        """Say whether a session's death is written, or it was missed for a whole timeout."""
        # Asked by other threads too, so each thing is looked up once.
        watch = self._watches.get(incarnation)
        is_missed = watch is not None and watch.version is None
        return incarnation in self._dead or (
            is_missed and watch is not None and watch.expired(self._timeout(incarnation))
        )

    def expect(self, incarnation: str, timeout: float) -> None:
        """Take note of the timeout of a session that may never be seen."""
        self._timeouts.setdefault(incarnation, timeout)

    def take_in(self, found: Mapping[str, Record | None]) -> dict[str, SessionRecord]:
        """Take in what a read that has just returned showed of some sessions; give who lives."""
        now = self._clock.mono()
        living = {}
        for incarnation, record in found.items():
            if record is None or record.deleted:
                self._look(incarnation, None, now)
                continue
            life = self._understand(incarnation, record)
            if life is not None and life.state == "live":
                living[incarnation] = life
                self._look(incarnation, record.version, now)
        return living

    def _understand(self, incarnation: str, record: Record) -> SessionRecord | None:
        """Take in what a session tells; None if that is nothing that it can have told."""
        try:
            life = read_session_record(record)
        except Corrupt as corrupt:
            self._witness.report(corrupt)
            self._set_aside(incarnation, record.version)
            return None
        self._timeouts[incarnation] = life.timing.timeout
        if life.state == "dead":
            self._bury(incarnation, self._clock.mono())
        return life

    def _set_aside(self, incarnation: str, version: str) -> None:
        """Watch no more what cannot be understood, and do not read it again as it is."""
        self._puzzling[incarnation] = version
        self._timeouts.pop(incarnation, None)
        self._watches.pop(incarnation, None)

    async def look_at_all(self, expected: Collection[str] = ()) -> None:
        """Look at every session once, and miss those that are expected and not there.

        Raises:
            Unavailable: the store does not answer; nothing is concluded from that.
        """
        heads = await self._store.heads(SESSIONS, limit=_MOST)
        now = self._clock.mono()
        seen = {head.key[_NAMED_FROM:]: head.version for head in heads}
        # What is not there any more needs no watching; whom it leads will miss it, by name.
        _keep(self._dead, seen.keys())
        for each in self._watches.keys() - seen.keys():
            if self._watches[each].version is not None:
                del self._watches[each]
        for incarnation in sorted(expected):
            if incarnation not in seen:
                self._look(incarnation, None, now)
        await self._get_to_know(seen)
        # Sorted, so that every run goes through them in one order.
        living = sorted((seen.keys() & self._timeouts.keys()) - self._dead.keys())
        for incarnation in living:
            self._look(incarnation, seen[incarnation], now)
        self.living = frozenset(living)

    async def _get_to_know(self, seen: Mapping[str, str]) -> None:
        """Read the sessions that were not understood yet, and forget those that are gone."""
        _keep(self._timeouts, seen.keys() | self._watches.keys())
        self._puzzling = {each: v for each, v in self._puzzling.items() if seen.get(each) == v}
        unknown = sorted(seen.keys() - self._timeouts.keys() - self._puzzling.keys())
        if not unknown:
            return
        found = await self.read(unknown)
        self.take_in(found)
        for incarnation in unknown:
            if incarnation not in found:
                self._set_aside(incarnation, seen[incarnation])

    async def read(self, incarnations: Iterable[str]) -> dict[str, Record | None]:
        """Read some sessions; leave out what is not a session's record."""
        keys = [f"{SESSIONS}{each}" for each in incarnations]
        found = await read_each(self._store, keys, self._witness.report)
        return {key.removeprefix(SESSIONS): record for key, record in found.items()}

    def next_expiry(self, since: Mono) -> Mono | None:
        """Give the first moment, after some time, when one of those watched may be called dead."""
        if not self._watches:
            return None
        moments = [watch.expires(self._timeout(each)) for each, watch in self._watches.items()]
        return min((moment for moment in moments if moment > since), default=None)

    def watch_only(self, incarnations: AbstractSet[str]) -> None:
        """Stop watching all others."""
        for known in (self._watches, self._timeouts, self._dead):
            _keep(known, incarnations)

    async def declare_dead(self) -> list[str]:
        """Write down the death of those that have expired; give the incarnations."""
        expired = [
            each
            for each, watch in self._watches.items()
            if watch.version is not None and self._is_expired(each)
        ]
        return [each for each in expired if await self._declare_dead(each)]

    async def forget_long_dead(self, needed: Collection[str]) -> None:
        """Remove the records of those that have been dead for long and that nobody names."""
        long_ago = self._clock.mono() + -MOURNING
        # Those who died first were written down first.
        old = [
            incarnation
            for incarnation, _ in takewhile(lambda each: each[1] < long_ago, self._dead.items())
            if incarnation not in needed
        ]
        if old:
            await self._store.drop([f"{SESSIONS}{each}" for each in old])
            for incarnation in old:
                del self._dead[incarnation]

    def _look(self, incarnation: str, version: str | None, now: Mono) -> None:
        watch = self._watches.get(incarnation)
        self._watches[incarnation] = (
            Watch(version, now, now) if watch is None else watch.look(version, now, self._timing)
        )

    def _bury(self, incarnation: str, now: Mono) -> None:
        self.living -= {incarnation}
        self._watches.pop(incarnation, None)
        self._dead.setdefault(incarnation, now)

    def _timeout(self, incarnation: str) -> float:
        return self._timeouts.get(incarnation, self._timing.timeout)

    def _is_expired(self, incarnation: str) -> bool:
        return self._watches[incarnation].expired(self._timeout(incarnation))

    async def _declare_dead(self, incarnation: str) -> bool:
        """Replace the very version that was watched, or nothing."""
        record = (await self.read([incarnation])).get(incarnation)
        watch = self._watches.get(incarnation)
        if record is None or record.deleted or watch is None or record.version != watch.version:
            return False
        # It may have ended in good order, or become something else, since it was read.
        life = self._understand(incarnation, record)
        if life is None or life.state == "dead":
            return False
        age = await self._store.age(record)
        if age is not None and age < self._timeout(incarnation):
            return False
        (outcome,) = await self._store.write([record.replace({**record.value, "state": "dead"})])
        if isinstance(outcome, Applied):
            self._bury(incarnation, self._clock.mono())
            return True
        return False


def _keep(known: dict[str, Any], incarnations: AbstractSet[str]) -> None:
    """Forget what is known of all others."""
    # Almost always there are none, and this costs less than taking the difference.
    if known.keys() <= incarnations:
        return
    for each in known.keys() - incarnations:
        del known[each]


# Who lives and stands for what, listed once for everybody who asks during one look.
#
# It stood so in the store a moment ago. A session that cannot be understood stands for nothing,
# and is reported.


_MAX_SESSIONS = 10_000
"""How many sessions are looked at in an election at the most."""


class Candidates:
    """The sessions that live, by what they stand for. Costs nothing until it is asked.

    Args:
        store: where the sessions are.
        report: hears of what cannot be understood.
    """

    def __init__(self, store: Store, report: Callable[[Corrupt], object]) -> None:
        self._store = store
        self._report = report
        self._works: dict[str, tuple[str, ...]] | None = None

    async def standing_for(self, role: str) -> list[str]:
        """Give the incarnations that live and stand for a role, in order.

        Raises:
            Unavailable: the store does not answer.
        """
        if self._works is None:
            self._works = await self._list()
        return [each for each, works in self._works.items() if role in works]

    async def _list(self) -> dict[str, tuple[str, ...]]:
        found = {}
        for record in await self._store.scan(SESSIONS, limit=_MAX_SESSIONS):
            # Most are dead, in a fleet that has seen much, and need no further understanding.
            if isinstance(record.value, dict) and record.value.get("state") == "dead":
                continue
            try:
                life = read_session_record(record)
            except Corrupt as corrupt:
                self._report(corrupt)
                continue
            if life.state == "live":
                found[record.key.removeprefix(SESSIONS)] = life.works
        return found
