"""Locks that a crash cannot leave stuck: they hang on the session of whoever holds them.

Promises: of several who ask for a lock one has it. It is free again when its holder gives
it back, or when the holder's session is dead, by a write; no clock decides. A holder whose
session no longer trusts itself must not act on it: ask `lasts`, or carry `fence`, which
grows with every holder, into what the lock protects.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.keys import parent
from jobsync.errors import Conflict, OutcomeUnknown, Unavailable
from jobsync.stores.contract import Put, Record, Store

__all__ = ["Lock", "hold_lock"]

_LOOK_AGAIN = 1.0


class Lock:
    """A lock that is held, or was.

    Args:
        membership: whose session it hangs on.
        record: how it stands in the store.
    """

    def __init__(self, membership: Membership, record: Record) -> None:
        self._membership = membership
        self._incarnation = membership.incarnation
        self.fence = record.seq
        """Higher than that of every earlier holder."""

    @property
    def lasts(self) -> bool:
        """Whether it may be acted on now. Asks the clock each time."""
        membership = self._membership
        return membership.is_trusted and membership.incarnation == self._incarnation


@asynccontextmanager
async def hold_lock(
    membership: Membership, store: Store, components: Components, key: str, timeout: float | None
) -> AsyncIterator[Lock]:
    """Hold a lock for a block.

    Raises:
        TimeoutError: others had it for so many seconds.
        Unavailable: the store does not answer.
    """
    record = await _acquire(membership, store, components, key, timeout)
    try:
        yield Lock(membership, record)
    finally:
        # What cannot be given back is free when the session ends.
        with suppress(Conflict, OutcomeUnknown, Unavailable):
            await store.put(record, {"owner": None, "mark": ""})


async def _acquire(
    membership: Membership, store: Store, components: Components, key: str, timeout: float | None
) -> Record:
    clock = components.clock
    give_up = None if timeout is None else clock.mono() + timeout
    # Tells this very attempt from others of the same session.
    (mark,) = components.ids.nonces(1)
    try:
        while True:
            found = await store.get(key, tombstones=True)
            owner = None if found is None or found.deleted else found.value["owner"]
            if found is not None and owner is not None and found.value["mark"] == mark:
                return found
            if owner is None or membership.is_dead(owner):
                # Looked at again, whatever becomes of it: an unknown write may yet land.
                await store.write(
                    [Put(key, {"owner": membership.incarnation, "mark": mark}, found)]
                )
                continue
            membership.watch(key, {owner})
            left = _LOOK_AGAIN if give_up is None else give_up - clock.mono()
            if left <= 0:
                raise TimeoutError(f"the lock {key!r} is held by {owner}")
            await store.wait(parent(key), min(left, _LOOK_AGAIN))
    finally:
        membership.watch(key, ())
