"""Dead workers: their claims are ended, and the messages that may have killed them run alone."""

from jobsync.coordination.membership import Membership
from jobsync.core.clock import Clock, Mono
from jobsync.core.keys import is_segment
from jobsync.errors import Unavailable
from jobsync.queue.backend import QueueBackend
from jobsync.queue.in_flight import Delivery, WorkerListener

__all__ = ["Quarantine", "Reaper"]

_SHORTEST_PERIOD = 1.0
"""Seconds between two checks, however much happens."""


class Reaper:
    """Ends the claims of dead workers in a queue.

    Every worker runs one. The process that records a death ends the claims at once, but it may
    not have this queue, or may die of the same cause. A claim of the dead worker may even follow
    its death, if the request was under way; so the claims are looked at again an interval later.
    While there are no claims, the reaper sends no requests.

    Args:
        backend: where the messages are stored.
        membership: knows which sessions are dead.
        clock: this machine's clock.
        listener: the worker.
    """

    def __init__(
        self, backend: QueueBackend, membership: Membership, clock: Clock, listener: WorkerListener
    ) -> None:
        self.is_quiet = False
        """Whether, as far as is known, there are no claims. At first nothing is known."""
        self._backend = backend
        self._membership = membership
        self._clock = clock
        self._listener = listener
        self._purpose = f"queue {backend.queue}"
        self._others: set[str] = set()
        """The other sessions that had claims when these were last looked at, and lived."""
        self._again: Mono | None = None
        """When to check even if there seem to be no claims."""

    def look_again(self) -> None:
        """Check in an interval, for a claim of a dead worker that is still under way."""
        self._again = self._clock.mono() + self._membership.timing.heartbeat

    async def run(self) -> None:
        """Check until cancelled."""
        last_check = Mono(float("-inf"))
        try:
            while True:
                now = self._clock.mono()
                is_due = self._again is not None and now >= self._again
                # A death is not a reason to wait, however soon after a check it becomes known.
                is_due = is_due or any(map(self._membership.is_dead, self._others))
                if is_due or (not self.is_quiet and now - last_check >= _SHORTEST_PERIOD):
                    last_check, self._again = now, None
                    await self._end_dead_claims()
                await self._membership.change(self._membership.timing.heartbeat)
        finally:
            self._membership.watch(self._purpose, ())

    async def _end_dead_claims(self) -> None:
        membership = self._membership
        try:
            holders = await self._backend.list_holders()
            # The claim of no session, in a damaged row, lapses after its visibility.
            others = {*filter(is_segment, holders)} - {membership.incarnation}
            membership.watch(self._purpose, others)
            dead = {session for session in others if membership.is_dead(session)}
            self._others = others - dead
            if dead:
                self.look_again()
                self._listener.on_ended(await self._backend.end_claims(dead))
        except Unavailable as error:
            self._listener.on_failure(error)


class Quarantine:
    """Decides when a worker claims a suspect, and what else it claims meanwhile.

    A message whose worker died is a suspect: it may have killed it. A worker has one suspect at a
    time, claims it when nothing else is in flight, and claims nothing else while it runs. So if the
    worker dies, the suspect is the only possible cause.

    Both waits are limited, so that one long handler does not stop all others: after `patience`
    seconds a suspect is claimed beside other messages, and others are claimed beside it. If the
    worker dies then, the suspect still spends an attempt and the others do not.

    Args:
        clock: this machine's clock.
        patience: seconds to wait until a suspect can run alone, and to leave it alone then.
    """

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock = clock
        self._patience = patience
        self._suspect: Delivery | None = None
        self._until: Mono | None = None
        """Until when other messages wait: for the suspect to start, or to end."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is a suspect to claim as soon as possible."""
        return self._suspect is None and self._until is not None

    def notice(self) -> None:
        """Record that there are suspects."""
        if self._suspect is None and self._until is None:
            self._until = self._clock.mono() + self._patience

    def start(self, suspect: Delivery | None) -> None:
        """Record that a suspect was claimed, or that there was none left."""
        self._suspect = suspect
        self._until = None if suspect is None else self._clock.mono() + self._patience

    def release(self, delivery: Delivery) -> None:
        """Record that a message has ended, which may be the suspect."""
        if self._suspect is delivery:
            self.start(None)

    def wait(self, *, is_free: bool) -> float:
        """Return the seconds for which nothing may be claimed, unless something changes.

        Args:
            is_free: whether the worker has nothing in flight.
        """
        if self._until is None or is_free:
            return 0.0
        left = self._until - self._clock.mono()
        if left <= 0 and self._suspect is not None:
            # It has killed no worker so far: the next suspect may be claimed.
            self.start(None)
        return max(0.0, left)
