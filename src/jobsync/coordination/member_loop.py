"""One worker's life among the others: it beats, it watches, it stands for election.

Runs wherever its host puts it. A lost session is followed by a new one; an outage of the
store is waited out, told once. Anything else that goes wrong ends the member, and whoever
waits for it hears why.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from jobsync.components import Components
from jobsync.coordination.election import CHECK_FRACTION, Election
from jobsync.coordination.events import (
    ElectionHalted,
    HeartbeatLate,
    MemberFailed,
    SessionLost,
    StoreSilent,
    WorkerDied,
    WorkerHeartbeat,
)
from jobsync.coordination.observer import Candidates, Observer
from jobsync.coordination.role import REQUESTS, ROLES, worker_of
from jobsync.coordination.runner import Wakeup, first_of
from jobsync.coordination.session import SESSIONS, Session, SessionRecord
from jobsync.coordination.settings import WorkSettings
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.trust import Timing
from jobsync.errors import Corrupt, Misconfigured, NewerFormat, OutcomeUnknown, Unavailable
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each
from jobsync.stores.settling import SettlingStore

__all__ = ["MemberLoop"]

_TROUBLE = (Unavailable, Misconfigured, OutcomeUnknown)
"""What the store may say during an outage; a burst of refusals counts as one."""

_LONG = 3600.0


class MemberLoop:
    """A session, and the elections that stand on it. All calls but `run` go through its host.

    Args:
        store: what it beats in, for it alone.
        components: time, randomness and events.
        timing: the beat and the timeout.
        worker: its name, the same for all its sessions.
        facts: what others may want to know of this process.
        changed: called whenever something may be different for those who wait at home.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        timing: Timing,
        worker: str,
        facts: Mapping[str, Json],
        changed: Callable[[], object],
    ) -> None:
        self.elections: dict[str, Election] = {}
        self.watched: frozenset[str] = frozenset()
        """Sessions that somebody here wants to know the end of."""
        self.has_ended = False
        """Whether it lives no more, be it in good order or by an error."""
        self.seen: Mapping[str, SessionRecord] = {}
        """What those who lead this worker, and those watched, told of themselves last."""
        self._store = store
        self._settled = SettlingStore(store, components, deadline=timing.beat)
        self._components = components
        self._clock = components.clock
        self._events = components.events
        self._timing = timing
        self._worker = worker
        self._facts = dict(facts)
        self._changed = changed
        self._witness = CorruptionLog(store.name, components.events)
        self._leaving: list[Election] = []
        """Elections that this worker stands in no longer, but may yet be given the role of."""
        self._observer = Observer(self._settled, components, timing)
        self._beat_now = Wakeup(components.clock, timing.beat / 100)
        self._look_now = Wakeup(components.clock, timing.beat / 100)
        self._listen_again = asyncio.Event()
        self._stopping = asyncio.Event()
        self._is_silent = False
        self._beats_seen: dict[str, int] = {}
        self._known: tuple[object, ...] = ()
        """What those at home were told to look at last."""
        self.session = self._make_session()

    async def open(self) -> None:
        """Record the first session.

        Raises:
            Unavailable: the store does not answer.
        """
        await self.session.open()

    async def run(self) -> None:
        """Live until told to stop, then leave in good order."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._beat_for_ever()),
                    group.create_task(self._watch_for_ever()),
                    group.create_task(self._feel_lag_for_ever()),
                ]
                if not self._store.is_billed:
                    tasks.append(group.create_task(self._listen_for_ever()))
                try:
                    await self._stopping.wait()
                finally:
                    for task in tasks:
                        task.cancel()
            await self._leave()
        except Exception as error:
            self._events.emit(MemberFailed(worker_id=self._worker, error=repr(error)))
            raise
        finally:
            self.has_ended = True
            self.session.abandon()
            self._changed()

    def stand(self, role: str, settings: WorkSettings, governs: Iterable[str]) -> Election:
        """Take part in the election for a role."""
        election = Election(
            self._settled,
            self._components,
            self._timing,
            self._observer,
            self.session,
            role,
            settings,
            governs,
        )
        self.elections[role] = election
        # Whatever an earlier candidacy here left behind is the new one's to find.
        self._leaving = [each for each in self._leaving if each.name != role]
        self.refresh()
        self._listen_again.set()
        return election

    async def withdraw(self, role: str) -> None:
        """Take part no longer; give up what is held."""
        election = self.elections.get(role)
        if election is not None:
            self.drop_out(election)
            with suppress(*_TROUBLE):
                await election.release("stopped")
            self.refresh()
            self._changed()

    async def step_down(self, role: str, epoch: int, current: int) -> None:
        """Give up a term that another epoch stands in the way of."""
        election = self.elections.get(role)
        if election is not None:
            with suppress(*_TROUBLE):
                await election.step_down(epoch, current)
            self.refresh()
            self._changed()

    def drop_out(self, election: Election) -> None:
        """Take part no longer; what was given to us is given up at the next look."""
        if self.elections.get(election.name) is election:
            del self.elections[election.name]
            election.close()
            self._leaving.append(election)
            self.refresh()

    def publish(self, facts: Mapping[str, Json]) -> None:
        """Tell others something, with a beat at once."""
        self._facts |= facts
        self.session.facts |= facts
        self._beat_now.set()

    def is_dead(self, incarnation: str) -> bool:
        """Say whether a session that is watched is dead, as far as is known here."""
        return self._observer.is_dead(incarnation)

    @property
    def living(self) -> frozenset[str]:
        """The sessions that live, as the last look of a leader showed them."""
        return self._observer.living | {self.session.incarnation}

    def refresh(self) -> None:
        """Beat and look at once, to tell and to learn what has changed."""
        self._beat_now.set()
        self._look_now.set()

    def stop(self) -> None:
        """Leave."""
        self._stopping.set()

    def _make_session(self) -> Session:
        return Session(self._store, self._components, self._timing, self._worker, self._facts)

    async def _come_back(self) -> None:
        """Open a session in place of a lost one."""
        session = self._make_session()
        session.works = tuple(sorted(self.elections))
        await session.open()
        self.session = session
        for election in (*self.elections.values(), *self._leaving):
            election.join(session)
        self._look_now.set()

    async def _beat_for_ever(self) -> None:
        while True:
            begun = self._clock.mono()
            try:
                await self._beat()
            except _TROUBLE as trouble:
                self._note_silence(trouble)
            await self._beat_now.wait(begun + self._timing.beat)

    async def _feel_lag_for_ever(self) -> None:
        """Warn when this thread gets up late, be a beat under way or not."""
        timeout = self._timing.timeout
        while True:
            # Apart from the beats: a slow store is no fault of this thread's.
            due = self._clock.mono() + self._timing.beat
            await self._clock.sleep(self._timing.beat)
            lag = self._clock.mono() - due
            if lag > timeout / 10:
                late = HeartbeatLate(worker_id=self._worker, lag=lag, worker_timeout=timeout)
                self._events.emit(late)

    async def _beat(self) -> None:
        """Renew the session, or open another in place of a lost one."""
        session = self.session
        session.works = tuple(sorted(self.elections))
        session.holds = self._holds()
        was, beats = session.state, session.beats
        if await session.beat() == "lost":
            if was == "live":
                lost = SessionLost(worker_id=self._worker, incarnation=session.incarnation)
                self._events.emit(lost)
                self._changed()
            await self._come_back()
        elif session.beats > beats:
            self._is_silent = False
            timestamp = self._clock.wall().seconds
            self._events.emit(WorkerHeartbeat(worker_id=self._worker, timestamp=timestamp))

    def _holds(self) -> dict[str, int]:
        return {
            role: held.epoch
            for role, election in self.elections.items()
            if (held := election.held) is not None
        }

    async def _watch_for_ever(self) -> None:
        while True:
            begun = seen = self._clock.mono()
            try:
                await self._look()
            except _TROUBLE as trouble:
                self._note_silence(trouble)
                seen = self._clock.mono()
            self._tell_of_changes()
            await self._look_now.wait(self._next_look(begun, seen))

    def _next_look(self, begun: Mono, seen: Mono) -> Mono:
        """Look again in a beat, or when something is due to happen by itself.

        What fell due while the last look was under way was missed by it: that is due now.
        """
        due = begun + self._timing.beat * (CHECK_FRACTION if self._must_find_out else 1.0)
        moments = [self._observer.next_expiry(seen)]
        moments += [election.next_change(seen) for election in self.elections.values()]
        return min([due, *(each for each in moments if each is not None)])

    @property
    def _must_find_out(self) -> bool:
        """Whether a role may be given up without anybody telling: it must be found in a beat."""
        # Also by one who leads something else.
        return self._store.is_billed and any(each.held is None for each in self.elections.values())

    async def _look(self) -> None:
        """Read what the elections depend on, and go on from there."""
        elections = [*self.elections.values(), *self._leaving]
        owners = {owner for each in elections if (owner := each.owner) is not None}
        held = self._holds()
        # A leader looks at all sessions anyway.
        if not held:
            owners |= self.watched
        owners.discard(self.session.incarnation)
        found = await self._read(elections, owners)
        roll = Candidates(self._settled, self._witness.report)
        for election in elections:
            await self._step(election, found, roll)
        self._leaving = [each for each in self._leaving if not each.is_clear]
        holds = self._holds()
        if holds != held:
            # Nobody needs to wait until all others were looked at.
            self._tell_of_changes()
            if self._must_find_out:
                # Who has just given up one role may be giving up the next.
                self._look_now.set()
        if holds:
            await self._watch_over_all(owners)
        else:
            self._observer.watch_only(owners)

    async def _read(
        self, elections: Iterable[Election], owners: Iterable[str]
    ) -> dict[str, Record | None]:
        """Read the sessions of owners, then the roles that these no longer tell of."""
        sessions = {owner: f"{SESSIONS}{owner}" for owner in sorted(owners)}
        wanted = [key for election in elections for key in election.wanted()]
        found = await read_each(self._settled, [*sessions.values(), *wanted], self._witness.report)
        living = self._observer.take_in(
            {each: found[key] for each, key in sessions.items() if key in found}
        )
        self._tell_of_beats(living)
        for incarnation in await self._declare_dead():
            # At once: what it held may be taken now, not a beat later.
            living.pop(incarnation, None)
        self.seen = living
        doubted = [key for election in elections for key in election.wanted_without(living)]
        return found | await read_each(self._settled, doubted, self._witness.report)

    async def _step(
        self, election: Election, found: Mapping[str, Record | None], roll: Candidates
    ) -> None:
        try:
            await election.step(found, self.seen, roll)
            election.halted_by = ""
        except (Corrupt, NewerFormat) as error:
            if election.halted_by != str(error):
                election.halted_by = str(error)
                self._events.emit(ElectionHalted(role=election.name, reason=str(error)))

    async def _watch_over_all(self, owners: Iterable[str]) -> None:
        """Do what a leader does for everybody: find who died, and tidy up after the dead."""
        await self._observer.look_at_all(self.watched - {self.session.incarnation})
        await self._declare_dead()
        await self._observer.forget_long_dead({*owners, *self.watched})

    async def _declare_dead(self) -> list[str]:
        """Write down who died, and tell of it; give the incarnations."""
        died = await self._observer.declare_dead()
        for incarnation in died:
            self._events.emit(WorkerDied(worker_id=worker_of(incarnation), incarnation=incarnation))
        return died

    def _tell_of_beats(self, living: Mapping[str, SessionRecord]) -> None:
        """Tell of the leaders' beats, which were seen at no further cost."""
        timestamp = self._clock.wall().seconds
        for life in living.values():
            if self._beats_seen.get(life.worker) != life.beat:
                self._events.emit(WorkerHeartbeat(worker_id=life.worker, timestamp=timestamp))
        self._beats_seen = {life.worker: life.beat for life in living.values()}

    def _tell_of_changes(self) -> None:
        """Let others know soon what this worker holds now, and those at home too."""
        if self._holds() != self.session.holds:
            self._beat_now.set()
        elections = [(each.held, each.leading, each.role) for each in self.elections.values()]
        told = {each: (life.works, life.holds, life.facts) for each, life in self.seen.items()}
        known = (elections, told, self._observer.living, self.session.incarnation)
        if known != self._known:
            self._known = known
            self._changed()

    async def _listen_for_ever(self) -> None:
        """Look at once when a role changes, where the store can tell."""
        while True:
            # One namespace for all roles of a worker is what there usually is.
            namespaces = {role.partition("/")[0] for role in self.elections}
            self._listen_again.clear()
            if not namespaces:
                await self._listen_again.wait()
                continue
            await self._hear(namespaces)
            for election in self.elections.values():
                election.doubt()
            self._look_now.set()

    async def _hear(self, namespaces: Iterable[str]) -> None:
        """Return when a role of a namespace may have changed, or others are of interest."""
        topics = [f"{kind}{each}/" for each in sorted(namespaces) for kind in (ROLES, REQUESTS)]
        await first_of(*map(self._wait_for_change, topics), self._listen_again.wait())

    async def _wait_for_change(self, topic: str) -> None:
        """Wait for a hint; a store that gives none is asked anew after a beat."""
        try:
            await self._settled.wait(topic, _LONG)
        except _TROUBLE:
            await self._clock.sleep(self._timing.beat)

    def _note_silence(self, trouble: Exception) -> None:
        if not self._is_silent:
            self._is_silent = True
            self._events.emit(StoreSilent(worker_id=self._worker, reason=str(trouble)))

    async def _leave(self) -> None:
        """Give up what is held, then the session itself; silence says the same, but later."""
        for role in list(self.elections):
            await self.withdraw(role)
        with suppress(*_TROUBLE, Corrupt):
            await self.session.end()
