"""Writes that a replaced coordinator cannot make.

A singleton is a record that only the coordinator writes. Promise: once a term has touched
it, no write of an earlier term is accepted, however late it arrives and whatever its sender
believes. It rests on the store alone: a write names the very version that it replaces, and
a version keeps the highest epoch that wrote it.

How: before a term acts on a singleton it seals it, which is a write of the same value with
its own epoch, creating what is absent. From then on an earlier term's write finds its base
gone, reads again, and sees the higher epoch.
"""

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from jobsync.core.codec import Json
from jobsync.core.ids import Ids
from jobsync.errors import Fenced
from jobsync.stores.contract import Applied, Put, Record, Store, Unknown, unwrap

__all__ = ["Term"]

_REMEMBERED = 1000
"""How many of its own writes a term recognises; only the latest of each record matters."""


class Term:
    """A time in office, and the writes that it allows.

    Args:
        store: where singletons are.
        epoch: its number, higher than that of every earlier term; 0 without an election,
            where whatever epoch stands is kept.
        lasts: says whether it still does; asks the clock.
        ids: mark this term's own writes.
        replaced: called with the epoch that stands in this term's way, if one does.
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
        self._marks: deque[str] = deque(maxlen=_REMEMBERED)

    def __repr__(self) -> str:
        return f"Term(epoch={self.epoch}, lasts={self.lasts})"

    @property
    def lasts(self) -> bool:
        """Whether this worker still leads. Asks the clock each time."""
        return self._lasts()

    async def get(self, key: str) -> Json:
        """Read a singleton, sealed for this term; None if nothing was ever put there.

        Raises:
            Fenced: this term is over.
            OutcomeUnknown: nobody can say whether it is sealed; call again.
        """
        return (await self._seal(key)).value

    async def put(self, key: str, value: Json) -> None:
        """Write a singleton.

        Raises:
            Fenced: this term is over; nothing was written.
            OutcomeUnknown: nobody can say whether it was; assume neither.
        """
        base = self._sealed.get(key) or await self._seal(key)
        while not await self._write(base.replace(value, epoch=self.epoch or None)):
            # Another task of this very term was first.
            base = await self._seal(key)

    async def seal(self, keys: Iterable[str]) -> None:
        """Shut earlier terms out of singletons.

        Raises:
            Fenced: this term is over.
            OutcomeUnknown: nobody can say whether they are sealed; call again.
        """
        for key in keys:
            await self._seal(key)

    async def _seal(self, key: str) -> Record:
        """Read a singleton; write this term's epoch into it where a lower one stands."""
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
        """Say whether another term has sealed a record.

        An epoch that equals ours is not always ours: where the role's record was lost before
        anything was sealed, two terms may have the same. The one that sealed first stays.
        """
        if self.epoch == 0:
            return False
        is_same = found.epoch == self.epoch and found.nonce not in self._marks
        return found.epoch > self.epoch or is_same

    async def _write(self, change: Put) -> bool:
        """Send a change while the term lasts; say whether it was applied."""
        if not self.lasts:
            raise Fenced(change.key, self.epoch)
        self._sealed.pop(change.key, None)
        (mark,) = self._ids.nonces(1)
        self._marks.append(mark)
        (outcome,) = await self._store.write([msgspec.structs.replace(change, nonce=mark)])
        match outcome:
            case Applied(record):
                self._sealed[change.key] = record
                return True
            case Unknown():
                unwrap(outcome, change.key)
        return False
