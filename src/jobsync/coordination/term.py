"""Fenced writes: writes that a replaced coordinator cannot make.

A singleton is a record that only the coordinator writes. Guarantee: once a term has touched it,
no write of an earlier term is accepted, however late it arrives and whatever its sender believes.
This depends on the store alone: a write names the version that it replaces, and a version keeps
the highest epoch that wrote it.

Before a term acts on a singleton it seals it: it writes the same value with its own epoch, and
creates the record if it is absent. A write of an earlier term then finds its base replaced, reads
again, and sees the higher epoch.
"""

from collections.abc import Callable, Iterable

from jobsync.components import Ids
from jobsync.core.codec import Json
from jobsync.errors import Fenced
from jobsync.stores.contract import Applied, Put, Record, Store, Unknown, unwrap

__all__ = ["Term"]


class Term:
    """A period of leadership, and its fenced writes.

    Args:
        store: where singletons are.
        epoch: its number, higher than that of every earlier term; 0 without an election, where
            the stored epoch is kept.
        lasts: returns whether it still lasts; reads the clock.
        ids: nonces that mark this term's seals.
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
        """The latest version of each singleton that this term has written, or read as its own."""
        self._open_seals: dict[str, set[str]] = {}
        """By key, the nonces of seals of which none is known to be written: any may be."""

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
            before = self._sealed.get(key)
            found = await self._store.get(key, tombstones=True)
            if self._sealed.get(key) is not before:
                # Another task of this term has written it meanwhile: this may be older.
                continue
            if before is not None and (found is None or found.seq < before.seq):
                # Somebody has removed what we wrote.
                del self._sealed[key]
            if found is not None and self._is_foreign(found):
                self._replaced(found.epoch)
                raise Fenced(key, self.epoch, found.epoch)
            if found is not None and not found.deleted and self.epoch in {0, found.epoch}:
                return self._keep(found)
            value = None if found is None or found.deleted else found.value
            (nonce,) = self._ids.nonces(1)
            self._open_seals.setdefault(key, set()).add(nonce)
            if await self._write(Put(key, value, found, epoch=self.epoch or None, nonce=nonce)):
                return self._sealed[key]

    def _is_foreign(self, found: Record) -> bool:
        """Whether another term has sealed a record.

        An equal epoch is not always ours: if the role's record was lost before anything was
        sealed, two terms may have the same one. The term that sealed first keeps the record.

        Ours descends from the latest version that we know, by one write at most: a further write
        needs a base that a task of this term has read, or was told.
        """
        if self.epoch == 0 or found.epoch < self.epoch:
            return False
        known = self._sealed.get(found.key)
        marks = self._open_seals.get(found.key, ()) if known is None else (known.nonce,)
        return found.epoch > self.epoch or not any(map(found.remembers, marks))

    def _keep(self, record: Record) -> Record:
        """Remember a version as the latest, unless a later one is known; return the record."""
        known = self._sealed.get(record.key)
        if known is None or known.seq < record.seq:
            self._sealed[record.key] = record
        self._open_seals.pop(record.key, None)
        return record

    async def _write(self, change: Put) -> bool:
        """Send a change while the term lasts; return whether it was applied."""
        if not self.lasts:
            raise Fenced(change.key, self.epoch)
        (outcome,) = await self._store.write([change])
        match outcome:
            case Applied(record):
                self._keep(record)
                return True
            case Unknown():
                unwrap(outcome, change.key)
        return False
