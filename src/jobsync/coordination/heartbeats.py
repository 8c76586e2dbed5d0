"""The heartbeats of one worker. Each renews its session and tells others what it publishes.

A lost session is replaced by a new one. An outage of the store is waited out, and reported once.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from jobsync.coordination.clock_skew import ClockComparison
from jobsync.coordination.events import HeartbeatLate, SessionLost, StoreSilent, WorkerHeartbeat
from jobsync.coordination.runner import Wakeup
from jobsync.coordination.session import (
    FAILING,
    SESSIONS,
    WITHHELD,
    HookFailure,
    Session,
    SessionOwner,
)
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.errors import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import Head

__all__ = ["OUTAGE_ERRORS", "Heartbeats"]

OUTAGE_ERRORS = (Unavailable, Misconfigured, OutcomeUnknown)
"""What a store may raise during an outage; a burst of refusals counts as one."""


class Heartbeats:
    """Keeps the session of a worker alive.

    Args:
        owner: the worker.
        list_roles: returns the roles that this worker is a candidate for.
        list_held: returns the roles that it holds, each with its epoch.
        on_lost: called when the session is lost.
        on_replaced: called with the session that replaces it.

    Attributes:
        session: the current session.
        withheld: why this worker stands back from roles.
        clock_comparison: of this machine's clock with the server's.
    """

    def __init__(
        self,
        owner: SessionOwner,
        *,
        list_roles: Callable[[], Iterable[str]],
        list_held: Callable[[], dict[str, int]],
        on_lost: Callable[[], object],
        on_replaced: Callable[[Session], object],
    ) -> None:
        self._owner = owner
        self._clock = owner.components.clock
        self._events = owner.components.events
        self._timing = owner.timing
        self._worker = owner.worker
        self._facts = dict(owner.facts)
        self._list_roles = list_roles
        self._list_held = list_held
        self._on_lost = on_lost
        self._on_replaced = on_replaced
        self._failing: dict[str, HookFailure] = {}
        self.withheld: dict[str, str] = {}
        self.clock_comparison = ClockComparison(self._clock)
        self._wakeup = Wakeup(self._clock, self._timing.heartbeat / 100)
        self._is_outage_reported = False
        self._answered_at = Mono(float("-inf"))
        """When the store last answered a heartbeat."""
        self.session = Session(owner)

    async def run(self) -> None:
        """Send heartbeats until this is cancelled."""
        while True:
            started = self._clock.mono()
            try:
                await self._send()
            except OUTAGE_ERRORS as error:
                self.report_outage(error, started)
            await self._wakeup.wait(started + self._timing.heartbeat)

    def send_now(self) -> None:
        """Send a heartbeat at once."""
        self._wakeup.set()

    def publish(self, facts: Mapping[str, Json]) -> None:
        """Publish facts for other workers, with a heartbeat at once."""
        self._facts |= facts
        self.send_now()

    def publish_failure(self, role: str, failure: HookFailure | None) -> None:
        """Publish that a hook raises, or that none does, with the next heartbeat."""
        self._failing.pop(role, None)
        if failure is not None:
            self._failing[role] = failure

    async def watch_lag(self) -> None:
        """Warn when this thread wakes up late, whether or not a heartbeat is under way."""
        timeout = self._timing.timeout
        while True:
            # Separate from the heartbeats: a slow store does not make this thread late.
            due = self._clock.mono() + self._timing.heartbeat
            await self._clock.sleep(self._timing.heartbeat)
            lag = self._clock.mono() - due
            if lag > timeout / 10:
                late = HeartbeatLate(worker_id=self._worker, lag=lag, worker_timeout=timeout)
                self._events.emit(late)

    def report_outage(self, error: Exception, asked_at: Mono) -> None:
        """Report that requests fail since a time, unless the store has answered others since."""
        if not self._is_outage_reported and asked_at >= self._answered_at:
            self._is_outage_reported = True
            self._events.emit(StoreSilent(worker_id=self._worker, reason=str(error)))

    async def measure_clock(self) -> None:
        """List the own session alone, unless a leader's listing told its time lately.

        Raises:
            Unavailable: the store does not answer.
        """
        age = self.clock_comparison.age
        if age is None or age > 2 * self._timing.timeout:
            key = f"{SESSIONS}{self.session.incarnation}"
            self.note_listed(await self._owner.store.heads(SESSIONS, after=key[:-1], limit=1))

    def note_listed(self, heads: Iterable[Head]) -> None:
        """Compare this machine's clock with the server's time of our last heartbeat."""
        key = f"{SESSIONS}{self.session.incarnation}"
        own = next((head for head in heads if head.key == key), None)
        self.clock_comparison.note_listed(own, self.session.writes)

    async def _send(self) -> None:
        """Renew the session, or replace it if it is lost."""
        session = self.session
        session.works = self._list_works()
        session.holds = self._list_held()
        session.facts = self._list_facts()
        state, heartbeats = session.state, session.heartbeats
        if await session.heartbeat() == "lost":
            if state == "live":
                lost = SessionLost(worker_id=self._worker, incarnation=session.incarnation)
                self._events.emit(lost)
                self._on_lost()
            await self._replace_session()
        elif session.heartbeats > heartbeats:
            self.clock_comparison.note_writes(session.writes)
            self._is_outage_reported, self._answered_at = False, self._clock.mono()
            timestamp = self._clock.wall().seconds
            self._events.emit(WorkerHeartbeat(worker_id=self._worker, timestamp=timestamp))

    def _list_works(self) -> tuple[str, ...]:
        """Return the roles that this worker is a candidate for, and does not stand back from."""
        return tuple(sorted(set(self._list_roles()) - self.withheld.keys()))

    def _list_facts(self) -> dict[str, Json]:
        """Return what a session publishes now."""
        facts = self._facts.copy()
        if self._failing:
            facts[FAILING] = msgspec.to_builtins(self._failing)
        if self.withheld:
            facts[WITHHELD] = self.withheld.copy()
        return facts

    async def _replace_session(self) -> None:
        """Open a new session in place of a lost one."""
        session = Session(self._owner)
        session.facts = self._list_facts()
        session.works = self._list_works()
        await session.open()
        self.session = session
        self._on_replaced(session)
