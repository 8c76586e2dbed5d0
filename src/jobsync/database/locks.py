"""Locks that a crash cannot leave stuck, because they depend on their holder's session.

Guarantees: at most one of several callers holds a lock. It becomes free when its holder releases
it, or when the holder's session is dead, by a write; no clock decides. A caller that is cancelled
or loses the store while it acquires or releases a lock leaves it free too, though later. A holder
whose session no longer trusts itself must not act on it: check `lasts`, or pass `fence`, which
grows with every holder, to what the lock protects.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.core.keys import KeySegment, parent
from jobsync.database.supervisor import Work
from jobsync.errors import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import Conflicted, Outcome, Put, Record, Store, unwrap
from jobsync.stores.corruption_log import convert_record

__all__ = ["Lock", "hold_lock"]

_POLL = 1.0


class _Holder(msgspec.Struct, frozen=True):
    """Who holds a lock: a session, and which of its attempts."""

    owner: KeySegment | None
    mark: str


_NOBODY = _Holder(owner=None, mark="")


class Lock:
    """A lock that is or was held.

    Args:
        membership: with the session that it depends on.
        record: of the lock, as it was acquired.
    """

    def __init__(self, membership: Membership, record: Record) -> None:
        self._membership = membership
        self._incarnation = _read_holder(record).owner
        self.fence = record.seq
        """A number above that of every earlier holder."""

    @property
    def lasts(self) -> bool:
        """Whether the lock is certainly held now, by the clock at each call."""
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
        membership: with the session that it depends on.
        store: with the lock's record.
        components: time, and the randomness of its mark.
        key: of the lock's record.
        timeout: seconds to wait for its holder; None for no limit.
        run: runs the release in the background, if it cannot be done at once.

    Raises:
        Corrupt: the lock's record cannot be read.
        TimeoutError: others held it for that long.
        Unavailable: the store does not answer.
    """
    attempt = _Attempt(membership, store, components, key)
    try:
        yield Lock(membership, await attempt.acquire(timeout))
    finally:
        try:
            await attempt.release()
        except (Misconfigured, OutcomeUnknown, Unavailable):
            # The session may live on for long: others must not wait for its end.
            run(attempt.release_in_background, f"release {key}")
        except asyncio.CancelledError:
            run(attempt.release_in_background, f"release {key}")
            raise


class _Attempt:
    """One attempt to hold a lock, from the first read until it is released.

    Whatever raises or is cancelled in between, after `release` no lock is left that depends on a
    live session and has no holder that knows of it.
    """

    def __init__(
        self, membership: Membership, store: Store, components: Components, key: str
    ) -> None:
        self._membership = membership
        self._store = store
        self._clock = components.clock
        self._key = key
        # Distinguishes this attempt from others of the same session.
        (self._mark,) = components.ids.nonces(1)
        # Its own, too: another attempt that ends must not end what this one watches.
        self._purpose = f"{key} {self._mark}"
        self._based_on: Record | None = None
        self._has_written = False
        self._held: Record | None = None

    async def acquire(self, timeout: float | None) -> Record:
        """Wait until the lock is free, and take it."""
        deadline = None if timeout is None else self._clock.mono() + timeout
        try:
            while True:
                found = await self._read()
                holder = _read_holder(found)
                owner, is_mine = holder.owner, holder.mark == self._mark
                if found is not None and is_mine and owner == self._membership.incarnation:
                    self._held = found
                    return found
                if owner is None or is_mine or self._membership.is_dead(owner):
                    # Read again, whatever the outcome: an unknown write may still be applied.
                    await self._take(found)
                    continue
                self._membership.watch(self._purpose, {owner})
                left = _POLL if deadline is None else deadline - self._clock.mono()
                if left <= 0:
                    raise TimeoutError(f"the lock {self._key!r} is held by {owner}")
                await self._store.wait(parent(self._key), min(left, _POLL))
        finally:
            self._membership.watch(self._purpose, ())

    async def release(self) -> None:
        """Release the lock, and make sure that this attempt cannot acquire it later.

        Raises:
            Misconfigured, OutcomeUnknown, Unavailable: it may still be held; call it again.
        """
        while self._has_written:
            found, self._held = self._held or await self._read(), None
            # An unanswered write of ours may still be applied to what it was based on.
            if not (self._is_mine(found) or _is_same(found, self._based_on)):
                break
            outcome = await self._write(_NOBODY, found)
            if not isinstance(outcome, Conflicted):
                unwrap(outcome, self._key)
                break
        self._has_written = False

    async def release_in_background(self) -> None:
        """Release the lock.

        Raises:
            Unavailable: it may still be held; call it again.
        """
        try:
            await self.release()
        except OutcomeUnknown as unknown:
            raise Unavailable(self._store.name, unknown.detail) from unknown

    async def _read(self) -> Record | None:
        return await self._store.get(self._key, tombstones=True)

    async def _take(self, found: Record | None) -> None:
        self._based_on, self._has_written = found, True
        await self._write(_Holder(owner=self._membership.incarnation, mark=self._mark), found)

    async def _write(self, holder: _Holder, found: Record | None) -> Outcome:
        (outcome,) = await self._store.write([Put(self._key, msgspec.to_builtins(holder), found)])
        return outcome

    def _is_mine(self, found: Record | None) -> bool:
        return _read_holder(found).mark == self._mark


def _read_holder(found: Record | None) -> _Holder:
    """Return who holds the lock of a record, if there is one.

    Raises:
        Corrupt: no version of this library wrote the record.
    """
    return _NOBODY if found is None or found.deleted else convert_record(found, _Holder)


def _is_same(one: Record | None, other: Record | None) -> bool:
    return (one and one.version) == (other and other.version)
