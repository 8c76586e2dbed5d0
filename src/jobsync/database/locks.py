"""Locks that a crash cannot leave stuck: they hang on the session of whoever holds them.

Promises: of several who ask for a lock one has it. It is free again when its holder gives
it back, or when the holder's session is dead, by a write; no clock decides. Whoever is
cancelled while it takes a lock or gives it back, or loses the store then, leaves it free as
well, though later. A holder whose session no longer trusts itself must not act on it: ask
`lasts`, or carry `fence`, which grows with every holder, into what the lock protects.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.keys import parent
from jobsync.database.supervisor import Work
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.stores.contract import Conflicted, Put, Record, Store, unwrap

__all__ = ["Lock", "hold_lock"]

_LOOK_AGAIN = 1.0
_FREE = {"owner": None, "mark": ""}


class Lock:
    """A lock that is held, or was.

    Args:
        membership: whose session it hangs on.
        record: how it stands in the store.
    """

    def __init__(self, membership: Membership, record: Record) -> None:
        self._membership = membership
        self._incarnation = record.value["owner"]
        self.fence = record.seq
        """Higher than that of every earlier holder."""

    @property
    def lasts(self) -> bool:
        """Whether it may be acted on now. Asks the clock each time."""
        membership = self._membership
        return membership.is_trusted and membership.incarnation == self._incarnation


@asynccontextmanager
async def hold_lock(
    membership: Membership,
    store: Store,
    components: Components,
    key: str,
    timeout: float | None,
    run: Callable[[Work, str], object],
) -> AsyncIterator[Lock]:
    """Hold a lock for a block.

    Args:
        membership: whose session it hangs on.
        store: where it is.
        components: time, and the randomness of its mark.
        key: which one.
        timeout: seconds to wait for whoever has it; None is for ever.
        run: runs what gives it back later, if that cannot be done at once.

    Raises:
        TimeoutError: others had it for so many seconds.
        Unavailable: the store does not answer.
    """
    attempt = _Attempt(membership, store, components, key)
    try:
        yield Lock(membership, await attempt.succeed(timeout))
    finally:
        try:
            await attempt.undo()
        except (OutcomeUnknown, Unavailable):
            # The session may live for long: somebody must see to it that others get on.
            run(attempt.undo, f"give back {key}")
        except asyncio.CancelledError:
            run(attempt.undo, f"give back {key}")
            raise


class _Attempt:
    """One wish to have a lock: from the first look until it is given back, or can no more be had.

    Whatever raises or is cancelled on the way, `undo` leaves no lock behind that hangs on a
    session which lives, and that nobody knows to have.
    """

    def __init__(
        self, membership: Membership, store: Store, components: Components, key: str
    ) -> None:
        self._membership = membership
        self._store = store
        self._clock = components.clock
        self._key = key
        # Tells this very attempt from others of the same session.
        (self._mark,) = components.ids.nonces(1)
        self._based_on: Record | None = None
        self._has_written = False
        self._held: Record | None = None

    async def succeed(self, timeout: float | None) -> Record:
        """Wait for it, and take it."""
        give_up = None if timeout is None else self._clock.mono() + timeout
        try:
            while True:
                found = await self._look()
                owner = _owner(found)
                is_mine = self._is_mine(found)
                if found is not None and is_mine and owner == self._membership.incarnation:
                    self._held = found
                    return found
                if owner is None or is_mine or self._membership.is_dead(owner):
                    # Looked at again, whatever becomes of it: an unknown write may yet land.
                    await self._take(found)
                    continue
                self._membership.watch(self._key, {owner})
                left = _LOOK_AGAIN if give_up is None else give_up - self._clock.mono()
                if left <= 0:
                    raise TimeoutError(f"the lock {self._key!r} is held by {owner}")
                await self._store.wait(parent(self._key), min(left, _LOOK_AGAIN))
        finally:
            self._membership.watch(self._key, ())

    async def undo(self) -> None:
        """Have it no longer, and never again.

        Raises:
            OutcomeUnknown, Unavailable: nobody can say; do it again.
        """
        while self._has_written:
            found, self._held = self._held or await self._look(), None
            # A write of ours that was not heard of may still land on what it was based on.
            if not (self._is_mine(found) or _is_same(found, self._based_on)):
                break
            (outcome,) = await self._store.write([Put(self._key, _FREE, found)])
            if not isinstance(outcome, Conflicted):
                unwrap(outcome, self._key)
                break
        self._has_written = False

    async def _look(self) -> Record | None:
        return await self._store.get(self._key, tombstones=True)

    async def _take(self, found: Record | None) -> None:
        self._based_on, self._has_written = found, True
        value = {"owner": self._membership.incarnation, "mark": self._mark}
        await self._store.write([Put(self._key, value, found)])

    def _is_mine(self, found: Record | None) -> bool:
        return found is not None and not found.deleted and found.value["mark"] == self._mark


def _owner(found: Record | None) -> str | None:
    return None if found is None or found.deleted else found.value["owner"]


def _is_same(one: Record | None, other: Record | None) -> bool:
    return (one and one.version) == (other and other.version)
