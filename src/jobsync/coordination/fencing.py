"""Writes that a replaced coordinator cannot make.

A singleton is a record that only the coordinator writes. Promise: once a term has touched
it, no write of an earlier term is accepted, however late it arrives and whatever its sender
believes. It rests on the store alone: a write names the very version that it replaces, and
a version keeps the highest epoch that wrote it.

How: before a term acts on a singleton it seals it, which is a write of the same value with
its own epoch, creating what is absent. From then on an earlier term's write finds its base
gone, reads again, and sees the higher epoch.
"""

from collections.abc import Callable, Iterable

from jobsync.core.codec import Json
from jobsync.errors import Fenced
from jobsync.stores.contract import Applied, Put, Record, Store, Unknown, unwrap

__all__ = ["Term"]


class Term:
    """A time in office, and the writes that it allows.

    Args:
        store: where singletons are.
        epoch: its number, higher than that of every earlier term; 0 without an election,
            where whatever epoch stands is kept.
        lasts: says whether it still does; asks the clock.
    """

    def __init__(self, store: Store, epoch: int, lasts: Callable[[], bool]) -> None:
        self.epoch = epoch
        self._store = store
        self._lasts = lasts
        self._sealed: dict[str, Record] = {}

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
            if found is not None and found.epoch > self.epoch > 0:
                raise Fenced(key, self.epoch, found.epoch)
            if found is not None and not found.deleted and self.epoch in {0, found.epoch}:
                self._sealed[key] = found
                return found
            value = None if found is None or found.deleted else found.value
            if await self._write(Put(key, value, found, epoch=self.epoch or None)):
                return self._sealed[key]

    async def _write(self, change: Put) -> bool:
        """Send a change while the term lasts; say whether it was applied."""
        if not self.lasts:
            raise Fenced(change.key, self.epoch)
        self._sealed.pop(change.key, None)
        (outcome,) = await self._store.write([change])
        match outcome:
            case Applied(record):
                self._sealed[change.key] = record
                return True
            case Unknown():
                unwrap(outcome, change.key)
        return False
