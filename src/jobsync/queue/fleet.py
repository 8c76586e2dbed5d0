"""What the backend of a queue knows about the other processes of the queue.

A backend needs none of it to be right: the store decides. It needs it to be cheap. Who coordinates
is decided by the election of the queue's plugin; there is no other.
"""

from typing import Protocol

from jobsync.coordination.coordinator import Coordinator
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.coordination.membership import Membership
from jobsync.coordination.term import Term
from jobsync.core.clock import Mono, Seconds
from jobsync.events import Event
from jobsync.queue.backend import EndedClaim
from jobsync.queue.events import DelaysVetoed, TicketsPublished
from jobsync.queue.reporter import QueueReporter
from jobsync.queue.worker_status import read_worker_statuses

__all__ = ["PluginFleet", "QueueFleet", "QueueFleetOwner"]

_CLOCK_CHECK: Seconds = 1.0
"""Seconds between two requests for the time, while it is unknown or wrong."""


class QueueFleet(Protocol):
    """The processes of a queue, as one of them sees them."""

    @property
    def incarnation(self) -> str:
        """The session of this process."""
        ...

    @property
    def dispatch_interval(self) -> Seconds:
        """Seconds between two tickets at least."""
        ...

    @property
    def term(self) -> Term | None:
        """The term in which this process coordinates the queue; None if it does not."""
        ...

    @property
    def epoch(self) -> int | None:
        """The epoch of the coordinator; None if nobody is known to coordinate."""
        ...

    @property
    def living(self) -> frozenset[str]:
        """The live sessions of all processes, as far as this one knows; no request."""
        ...

    async def list_workers(self) -> list[str]:
        """Return the sessions of the other processes that handle messages, the oldest first.

        Raises:
            Unavailable: the store does not answer.
        """
        ...

    async def change(self) -> None:
        """Wait until something may have changed, such as who coordinates."""
        ...

    async def find_clock_veto(self) -> str:
        """Return why this machine's clock must not say that a delay is over; empty if it may."""
        ...

    def on_published(self, count: int) -> None:
        """A ticket with this many pages was published."""
        ...

    def on_ended(self, ended: list[EndedClaim]) -> None:
        """The claims of others were ended."""
        ...

    def on_failure(self, error: Exception) -> None:
        """The store does not answer, or refuses."""
        ...


class QueueFleetOwner(Protocol):
    """The plugin, as its fleet uses it."""

    @property
    def queue(self) -> str:
        """The stored name of the queue."""
        ...

    def emit(self, event: Event) -> None:
        """Emit an event."""
        ...


class PluginFleet(QueueFleet):
    """The processes of a queue, as the session and the election of its plugin show them.

    Args:
        owner: the plugin.
        membership: the session of this process.
        coordinator: the candidacy of this process for the queue.
        reporter: is told what happens.
        dispatch_interval: seconds between two tickets at least.
    """

    def __init__(
        self,
        owner: QueueFleetOwner,
        membership: Membership,
        coordinator: Coordinator,
        reporter: QueueReporter,
        dispatch_interval: Seconds,
    ) -> None:
        self._owner = owner
        self._membership = membership
        self._coordinator = coordinator
        self._reporter = reporter
        self._clock = membership.components.clock
        self._fleet_clock = FleetClock(membership, membership.store, membership.components)
        self._dispatch_interval = dispatch_interval
        self._next_check = Mono(float("-inf"))
        self._veto = ""

    @property
    def incarnation(self) -> str:
        """The session of this process."""
        return self._membership.incarnation

    @property
    def dispatch_interval(self) -> Seconds:
        """Seconds between two tickets at least."""
        return self._dispatch_interval

    @property
    def term(self) -> Term | None:
        """The term in which this process coordinates the queue; None without an election."""
        term = self._coordinator.term
        return None if term is None or term.epoch == 0 else term

    @property
    def epoch(self) -> int | None:
        """The epoch of the coordinator, unless its session is known to be dead."""
        role = self._coordinator.election.role
        if role is None or role.owner is None or self._membership.is_dead(role.owner):
            return None
        return role.epoch

    @property
    def living(self) -> frozenset[str]:
        """The live sessions of all processes."""
        return self._membership.living

    async def list_workers(self) -> list[str]:
        """Return the sessions of the other processes that handle messages: a few requests."""
        return [
            peer.incarnation
            for peer in await self._membership.members()
            if peer.incarnation != self.incarnation
            and self._owner.queue in read_worker_statuses(peer.facts)
        ]

    async def change(self) -> None:
        """Wait for a heartbeat, or for an election."""
        await self._membership.change()

    async def find_clock_veto(self) -> str:
        """Return why this machine's clock must not say that a delay is over.

        It costs a request if the clock was never compared, or is wrong.
        """
        now = self._clock.mono()
        if self._fleet_clock.veto and now >= self._next_check:
            self._next_check = now + _CLOCK_CHECK
            await self._fleet_clock.refresh()
        veto = self._fleet_clock.veto
        if veto != self._veto and (self._fleet_clock.is_off or not veto):
            self._veto = veto
            if veto:
                self._owner.emit(DelaysVetoed(queue=self._owner.queue, reason=veto))
        return veto

    def on_published(self, count: int) -> None:
        """Emit the event."""
        self._owner.emit(
            TicketsPublished(
                queue=self._owner.queue,
                count=count,
                coordinator_id=self._membership.worker_id,
            )
        )

    def on_ended(self, ended: list[EndedClaim]) -> None:
        """Report the claims."""
        self._reporter.on_ended(ended)

    def on_failure(self, error: Exception) -> None:
        """Report the error."""
        self._reporter.on_failure(error)
