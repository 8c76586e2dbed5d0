"""Ends the claims of workers that have died, whoever has written down their death.

Every worker is a warden for all the others: whoever notes a death ends the claims at once, but
may not have this queue, or may die of the same cause. While nobody has claimed anything it
asks for nothing.
"""

from collections.abc import Callable

from jobsync.coordination.membership import Membership
from jobsync.core.clock import Clock, Mono
from jobsync.errors import Unavailable
from jobsync.queue.backend import EndedClaim, QueueBackend

__all__ = ["Reaper"]

_SHORTEST_REST = 1.0
"""Seconds between looks, however much happens."""


class Reaper:
    """One worker's watch over the claims of a queue.

    Args:
        port: where the messages are.
        membership: tells who is dead.
        clock: this machine's.
        ended: told of the claims that were ended.
        failed: told that the store did not answer.
    """

    def __init__(
        self,
        port: QueueBackend,
        membership: Membership,
        clock: Clock,
        ended: Callable[[list[EndedClaim]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.is_quiet = True
        """Whether, as far as is known, nobody has claimed anything."""
        self._port = port
        self._membership = membership
        self._clock = clock
        self._ended = ended
        self._failed = failed
        self._purpose = f"queue {port.queue}"

    async def run(self) -> None:
        """Watch until cancelled."""
        looked = Mono(float("-inf"))
        try:
            while True:
                await self._membership.change(self._membership.timing.heartbeat)
                if not self.is_quiet and self._clock.mono() - looked >= _SHORTEST_REST:
                    looked = self._clock.mono()
                    await self._look()
        finally:
            self._membership.watch(self._purpose, ())

    async def _look(self) -> None:
        membership = self._membership
        try:
            others = {*await self._port.list_holders()} - {membership.incarnation}
            membership.watch(self._purpose, others)
            dead = {each for each in others if membership.is_dead(each)}
            if dead:
                self._ended(await self._port.end_claims(dead))
        except Unavailable as error:
            self._failed(error)
