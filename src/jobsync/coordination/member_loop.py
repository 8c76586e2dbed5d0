"""One worker's background loop: it sends heartbeats, watches other sessions and runs elections.

It runs wherever its host puts it. It waits out an outage of the store. Any other error ends it,
and is raised to the waiter.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from jobsync.coordination.election import Election
from jobsync.coordination.events import ElectionHalted, MemberFailed, WorkerDied, WorkerHeartbeat
from jobsync.coordination.heartbeats import OUTAGE_ERRORS, Heartbeats
from jobsync.coordination.observer import Candidates, Observer
from jobsync.coordination.role import CHECK_FRACTION, ROLES, worker_of
from jobsync.coordination.runner import Wakeup, first_of
from jobsync.coordination.session import SESSIONS, Session, SessionOwner, SessionRecord
from jobsync.coordination.settings import ElectionSettings
from jobsync.coordination.succession import REQUESTS
from jobsync.core.clock import Mono
from jobsync.errors import Corrupt, NewerFormat
from jobsync.safe_text import format_error
from jobsync.stores.contract import Record
from jobsync.stores.corruption_log import CorruptionLog, read_each
from jobsync.stores.settling import SettlingStore

__all__ = ["MemberLoop"]

_WAIT_TIMEOUT = 3600.0

_PROCESS_INTERVAL = 0.5
"""Seconds between two looks at the processes of this machine; these send no requests."""


class MemberLoop:
    """A session and the elections that depend on it. All calls but `run` go through its host.

    Args:
        owner: the worker; its store is for this loop alone.
        changed: called when something may have changed for waiters on the home loop.
    """

    def __init__(self, owner: SessionOwner, changed: Callable[[], object]) -> None:
        store, components, timing = owner.store, owner.components, owner.timing
        self.elections: dict[str, Election] = {}
        self.watched: frozenset[str] = frozenset()
        """The sessions whose end a caller in this process waits for."""
        self.has_ended = False
        """Whether `run` has ended, cleanly or by an error."""
        self.seen: Mapping[str, SessionRecord] = {}
        """The latest records of the sessions that lead this worker, or that it watches."""
        self._store = store
        self._settled = SettlingStore(store, components, deadline=timing.heartbeat)
        self._components = components
        self._clock = components.clock
        self._events = components.events
        self._timing = timing
        self._worker = owner.worker
        self._changed = changed
        self._corruption_log = CorruptionLog(store.name, components.events)
        self._closing: list[Election] = []
        """Closed elections whose role a late write may still give to this worker."""
        self._observer = Observer(self._settled, components, timing)
        self._check_now = Wakeup(components.clock, timing.heartbeat / 100)
        self._roles_changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._heartbeats_seen: dict[str, int] = {}
        self._reported: tuple[object, ...] = ()
        """The state when `changed` was last called."""
        self.heartbeats = Heartbeats(
            owner,
            list_roles=self.elections.keys,
            list_held=self._held_epochs,
            on_lost=changed,
            on_replaced=self._use_session,
        )

    @property
    def session(self) -> Session:
        """The current session; a new one replaces it when it is lost."""
        return self.heartbeats.session

    async def open(self) -> None:
        """Write the record of the first session.

        Raises:
            Unavailable: the store does not answer.
        """
        await self.session.open()

    async def run(self) -> None:
        """Run until `stop` is called, then release everything and end the session."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.heartbeats.run()),
                    group.create_task(self._run_checks()),
                    group.create_task(self.heartbeats.watch_lag()),
                ]
                if not self._store.is_billed:
                    tasks.append(group.create_task(self._listen_for_changes()))
                if self._observer.can_see_processes:
                    tasks.append(group.create_task(self._watch_processes()))
                try:
                    await self._stopping.wait()
                finally:
                    for task in tasks:
                        task.cancel()
            await self._leave()
        except Exception as error:
            self._events.emit(MemberFailed(worker_id=self._worker, error=format_error(error)))
            raise
        finally:
            self.has_ended = True
            self.session.abandon()
            self._changed()

    def add_candidacy(
        self, role: str, settings: ElectionSettings, governs: Iterable[str]
    ) -> Election:
        """Become a candidate for a role."""
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
        # The new election also handles what an earlier candidacy left behind.
        self._closing = [each for each in self._closing if each.name != role]
        self.refresh()
        self._roles_changed.set()
        return election

    async def withdraw(self, role: str) -> None:
        """Stop being a candidate for a role, and release it."""
        election = self.elections.get(role)
        if election is not None:
            self.drop_candidacy(election)
            with suppress(*OUTAGE_ERRORS):
                await election.release("stopped")
            self.refresh()
            self._changed()

    async def step_down(self, role: str, epoch: int, current: int) -> None:
        """Release a term that another epoch has replaced."""
        election = self.elections.get(role)
        if election is not None:
            with suppress(*OUTAGE_ERRORS):
                await election.step_down(epoch, current)
            self.refresh()
            self._changed()

    def drop_candidacy(self, election: Election) -> None:
        """Stop being a candidate; the next check gives up the role if we have it."""
        if self.elections.get(election.name) is election:
            del self.elections[election.name]
            self.heartbeats.withheld.pop(election.name, None)
            election.close()
            self._closing.append(election)
            self.refresh()

    def publish_withheld(self, role: str, reason: str) -> None:
        """Publish why this worker stands back from a role, or that it does not, at once."""
        self.heartbeats.withheld.pop(role, None)
        if reason:
            self.heartbeats.withheld[role] = reason
        self.refresh()

    def is_dead(self, incarnation: str) -> bool:
        """Whether a watched session is known to be dead."""
        return self._observer.is_dead(incarnation)

    def has_process_ended(self, incarnation: str) -> bool:
        """Whether a watched session is dead because its process has ended."""
        return self._observer.has_process_ended(incarnation)

    @property
    def living(self) -> frozenset[str]:
        """The live sessions; complete as of the last check while this worker leads."""
        return self._observer.living | {self.session.incarnation}

    def check(self) -> None:
        """Run a check at once."""
        self._check_now.set()

    def refresh(self) -> None:
        """Send a heartbeat and run a check at once."""
        self.heartbeats.send_now()
        self._check_now.set()

    def stop(self) -> None:
        """Make `run` end."""
        self._stopping.set()

    def _use_session(self, session: Session) -> None:
        """Go on with a session that replaces a lost one."""
        for election in (*self.elections.values(), *self._closing):
            election.replace_session(session)
        self._check_now.set()

    async def _watch_processes(self) -> None:
        """Check at once when the process of a watched session on this machine has ended."""
        ended: set[str] = set()
        while True:
            await self._clock.sleep(_PROCESS_INTERVAL)
            before, ended = ended, self._observer.list_ended()
            # Once for each: if its death cannot be written now, the next regular check tries again.
            if ended - before:
                self._check_now.set()

    def _held_epochs(self) -> dict[str, int]:
        return {
            role: term.epoch
            for role, election in self.elections.items()
            if (term := election.held_term) is not None
        }

    async def _run_checks(self) -> None:
        while True:
            started = since = self._clock.mono()
            try:
                await self._check()
            except OUTAGE_ERRORS as error:
                self.heartbeats.report_outage(error, started)
                since = self._clock.mono()
            self._report_changes()
            await self._check_now.wait(self._next_check(started, since))

    def _next_check(self, started: Mono, since: Mono) -> Mono:
        """Return when to check again: in a heartbeat interval, or when something falls due.

        The last check missed what fell due while it ran, so that is due now.
        """
        interval = self._timing.heartbeat * (CHECK_FRACTION if self._must_poll_roles else 1.0)
        moments = [self._observer.next_expiry(since)]
        moments += [election.next_change(since) for election in self.elections.values()]
        return min([started + interval, *(each for each in moments if each is not None)])

    @property
    def _must_poll_roles(self) -> bool:
        """Whether a release comes without a notification, and must be found in an interval."""
        # Also while this worker leads something else.
        elections = self.elections.values()
        return self._store.is_billed and any(each.held_term is None for each in elections)

    async def _check(self) -> None:
        """Read what the elections depend on, and step each of them."""
        elections = [*self.elections.values(), *self._closing]
        owners = {owner for each in elections if (owner := each.owner) is not None}
        held = self._held_epochs()
        # A leader checks all sessions anyway.
        if not held:
            owners |= self.watched
        owners.discard(self.session.incarnation)
        found = await self._read(elections, owners)
        candidates = Candidates(self._settled, self._corruption_log.report)
        for election in elections:
            await self._step(election, found, candidates)
        self._closing = [each for each in self._closing if not each.is_clear]
        holds = self._held_epochs()
        if holds != held:
            # Before all other sessions are checked: nobody needs to wait for that.
            self._report_changes()
            if self._must_poll_roles:
                # The worker that has just released one role may be releasing the next.
                self._check_now.set()
        if holds:
            await self._check_all_sessions(owners)
        else:
            self._observer.watch_only(owners)

    async def _read(
        self, elections: Iterable[Election], owners: set[str]
    ) -> dict[str, Record | None]:
        """Read the sessions of owners, then the roles that these no longer list.

        If a role has another owner by now, its session is read too, and added to `owners`: its
        silence counts from the check that finds it, not from the next one.
        """
        keys = [key for each in elections for key in each.keys_to_read()]
        found, living = await self._read_sessions(owners, keys)
        await self._declare_dead()
        # At once, whoever wrote the death: what it held may be taken now, not an interval later.
        living = {
            incarnation: record
            for incarnation, record in living.items()
            if not self._observer.is_dead(incarnation)
        }
        keys = [key for each in elections for key in each.keys_to_read_unless_led(living)]
        found |= await read_each(self._settled, keys, self._corruption_log.report)
        new = {owner for each in elections if (owner := each.owner_in(found)) is not None}
        new -= {*owners, self.session.incarnation}
        if new:
            owners |= new
            living |= (await self._read_sessions(new))[1]
        self._report_heartbeats(living)
        self.seen = living
        return found

    async def _read_sessions(
        self, owners: Iterable[str], keys: Iterable[str] = ()
    ) -> tuple[dict[str, Record | None], dict[str, SessionRecord]]:
        """Read the sessions of owners and other keys; return all that was read, and who lives."""
        sessions = {owner: f"{SESSIONS}{owner}" for owner in sorted(owners)}
        report = self._corruption_log.report
        found = await read_each(self._settled, [*sessions.values(), *keys], report)
        living = self._observer.update(
            {owner: found[key] for owner, key in sessions.items() if key in found}
        )
        return found, living

    async def _step(
        self, election: Election, found: Mapping[str, Record | None], candidates: Candidates
    ) -> None:
        try:
            await election.step(found, self.seen, candidates)
            election.halt_reason = ""
        except (Corrupt, NewerFormat) as error:
            if election.halt_reason != str(error):
                election.halt_reason = str(error)
                self._events.emit(ElectionHalted(role=election.name, reason=str(error)))

    async def _check_all_sessions(self, owners: Iterable[str]) -> None:
        """Do what a leader does for all: declare sessions dead, and remove old records."""
        listed = await self._observer.check_all(self.watched - {self.session.incarnation})
        self.heartbeats.note_listed(listed)
        await self._declare_dead()
        await self._observer.remove_long_dead({*owners, *self.watched})

    async def _declare_dead(self) -> None:
        """Write the death of expired sessions, and emit an event for each death written."""
        for incarnation in await self._observer.declare_dead():
            self._events.emit(WorkerDied(worker_id=worker_of(incarnation), incarnation=incarnation))

    def _report_heartbeats(self, living: Mapping[str, SessionRecord]) -> None:
        """Emit the heartbeats of leaders; they were read anyway."""
        timestamp = self._clock.wall().seconds
        for record in living.values():
            if self._heartbeats_seen.get(record.worker) != record.beat:
                self._events.emit(WorkerHeartbeat(worker_id=record.worker, timestamp=timestamp))
        self._heartbeats_seen = {record.worker: record.beat for record in living.values()}

    def _report_changes(self) -> None:
        """Publish what this worker holds with a heartbeat, and notify the home loop."""
        if self._held_epochs() != self.session.holds:
            self.heartbeats.send_now()
        elections = [
            (each.held_term, each.leading_term, each.role) for each in self.elections.values()
        ]
        seen = {
            incarnation: (record.works, record.holds, record.facts)
            for incarnation, record in self.seen.items()
        }
        # Some may have been dead when they were first read.
        dead = frozenset(filter(self._observer.is_dead, self.watched))
        state = (elections, seen, self._observer.living, dead, self.session.incarnation)
        if state != self._reported:
            self._reported = state
            self._changed()

    async def _listen_for_changes(self) -> None:
        """Check at once when a role changes, where the store sends notifications."""
        while True:
            # Usually all roles of a worker are in one namespace.
            namespaces = {role.partition("/")[0] for role in self.elections}
            self._roles_changed.clear()
            if not namespaces:
                await self._roles_changed.wait()
                continue
            topics = [f"{kind}{each}/" for each in sorted(namespaces) for kind in (ROLES, REQUESTS)]
            waits = map(self._wait_for_change, topics)
            await first_of(*waits, self._roles_changed.wait(), self._check_while_listening())

    async def _check_while_listening(self) -> None:
        """Check at once, and then wait for ever.

        Started after the waits for changes: what changes before they notice it is found here.
        """
        for election in self.elections.values():
            election.mark_stale()
        self._check_now.set()
        await asyncio.Event().wait()

    async def _wait_for_change(self, topic: str) -> None:
        """Wait for a notification; during an outage, return after a heartbeat interval."""
        try:
            await self._settled.wait(topic, _WAIT_TIMEOUT)
        except OUTAGE_ERRORS:
            await self._clock.sleep(self._timing.heartbeat)

    async def _leave(self) -> None:
        """Release all roles, then end the session; without this, others would have to time out."""
        for role in list(self.elections):
            await self.withdraw(role)
        with suppress(*OUTAGE_ERRORS, Corrupt):
            await self.session.end()
