"""Fenced writes: writes that a replaced coordinator cannot make.

A singleton is a record that only the coordinator writes. Guarantee: once a term has touched it,
no write of an earlier term is accepted, however late it arrives and whatever its sender believes.
This depends on the store alone: a write names the version that it replaces, and a version keeps
the highest epoch that wrote it.

Before a term acts on a singleton it seals it: it writes the same value with its own epoch, and
creates the record if it is absent. A write of an earlier term then finds its base replaced, reads
again, and sees the higher epoch.
"""

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from jobsync.components import Ids
from jobsync.core.codec import Json
from jobsync.errors import Fenced
from jobsync.stores.contract import Applied, Put, Record, Store, Unknown, unwrap

__all__ = ["Term"]

_MAX_NONCES = 1000
"""How many of its own writes a term recognises; only the latest of each record matters."""


class Term:
    """A period of leadership, and its fenced writes.

    Args:
        store: where singletons are.
        epoch: its number, higher than that of every earlier term; 0 without an election, where
            the stored epoch is kept.
        lasts: returns whether it still lasts; reads the clock.
        ids: nonces that mark this term's own writes.
        replaced: called with the higher epoch when this term turns out to be replaced.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        lasts: Callable[[], bool],
        ids: Ids,
        replaced: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.epoch = epoch
        self._store = store
        self._lasts = lasts
        self._ids = ids
        self._replaced = replaced
        self._sealed: dict[str, Record] = {}
        self._nonces: deque[str] = deque(maxlen=_MAX_NONCES)

    def __repr__(self) -> str:
        return f"Term(epoch={self.epoch}, lasts={self.lasts})"

    @property
    def lasts(self) -> bool:
        """Whether this worker still leads. Reads the clock each time."""
        return self._lasts()

    async def get(self, key: str) -> Json:
        """Read a singleton and seal it for this term; None if nothing was ever written to it.

        Raises:
            Fenced: this term is over.
            OutcomeUnknown: the seal may or may not be written; call again.
        """
        return (await self._seal(key)).value

    async def put(self, key: str, value: Json) -> None:
        """Write a singleton.

        Raises:
            Fenced: this term is over; nothing was written.
            OutcomeUnknown: the value may or may not be written; assume neither.
        """
        base = self._sealed.get(key) or await self._seal(key)
        while not await self._write(base.replace(value, epoch=self.epoch or None)):
            # Another task of this term was first.
            base = await self._seal(key)

    async def seal(self, keys: Iterable[str]) -> None:
        """Seal singletons against the writes of earlier terms.

        Raises:
            Fenced: this term is over.
            OutcomeUnknown: a seal may or may not be written; call again.
        """
        for key in keys:
            await self._seal(key)

    async def _seal(self, key: str) -> Record:
        """Read a singleton; write this term's epoch to it if it has a lower one."""
        while True:
            found = await self._store.get(key, tombstones=True)
            if found is not None and self._is_foreign(found):
                self._replaced(found.epoch)
                raise Fenced(key, self.epoch, found.epoch)
            if found is not None and not found.deleted and self.epoch in {0, found.epoch}:
                self._sealed[key] = found
                return found
            value = None if found is None or found.deleted else found.value
            if await self._write(Put(key, value, found, epoch=self.epoch or None)):
                return self._sealed[key]

    def _is_foreign(self, found: Record) -> bool:
        """Whether another term has sealed a record.

        An equal epoch is not always ours: if the role's record was lost before anything was
        sealed, two terms may have the same one. The term that sealed first keeps the record.
        """
        if self.epoch == 0:
            return False
        is_twin = found.epoch == self.epoch and found.nonce not in self._nonces
        return found.epoch > self.epoch or is_twin

    async def _write(self, change: Put) -> bool:
        """Send a change while the term lasts; return whether it was applied."""
        if not self.lasts:
            raise Fenced(change.key, self.epoch)
        self._sealed.pop(change.key, None)
        (nonce,) = self._ids.nonces(1)
        self._nonces.append(nonce)
        (outcome,) = await self._store.write([msgspec.structs.replace(change, nonce=nonce)])
        match outcome:
            case Applied(record):
                self._sealed[change.key] = record
                return True
            case Unknown():
                unwrap(outcome, change.key)
        return False
