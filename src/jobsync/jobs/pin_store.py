"""Where a fleet's pins are: one sheet for each node that has made some.

Promises: a node's registrations change together, in one write; those of others are never
touched by it. Pins stay when whoever made them dies: they end when they expire, by the
store's clock, or when somebody removes them. What is read is what stood in the store at one
moment for each node.

Reading costs one listing as long as nothing has changed, however many pins there are.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Mono, Wall
from jobsync.core.pins import Pin, in_force, merge, read_sheet, write_sheet
from jobsync.errors import Conflict, Corrupt
from jobsync.jobs.job_keys import JobKeys
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["PinStore"]

_MOST = 10_000
_SHORTEST = 0.01


class _ReadSheet(msgspec.Struct, frozen=True):
    """One node's pins, as they were read."""

    version: str
    pins: list[Pin]


class PinStore:
    """All pins of one fleet.

    Args:
        store: where they are.
        components: the clocks, and a place to tell facts.
        places: the fleet's keys.
        token_of: gives a task's token.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        places: JobKeys,
        token_of: Callable[[str], int],
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._witness = CorruptionLog(store.name, components.events)
        self._places = places
        self._token_of = token_of
        self._sheets: dict[str, _ReadSheet] = {}
        self._ends: Mono | None = None
        self._expired: frozenset[Pin] = frozenset()

    async def now(self) -> Wall:
        """Tell the time of day, by the store's clock where it has one."""
        return await self._store.now() or self._clock.wall()

    async def add(self, creator: str, pins: Sequence[Pin], *, replacing: bool = False) -> None:
        """Register pins of one node, in one write.

        Args:
            creator: the node.
            pins: what it says.
            replacing: whether its earlier pins go.

        Raises:
            OutcomeUnknown: nobody can say whether it happened; call again.
        """
        if pins or replacing:
            await self._edit(creator, lambda old: merge([] if replacing else old, pins))

    async def remove_by(self, creator: str) -> int:
        """Remove all pins of one node; count them."""
        return await self._edit(creator, lambda _: [])

    async def remove_all(self) -> int:
        """Remove the pins of all nodes; count them."""
        creators = {pins[0].created_by for pins in await self._read() if pins}
        return sum([await self.remove_by(creator) for creator in sorted(creators)])

    async def pins(self) -> list[Pin]:
        """Give the pins that are in force now."""
        found = list(chain.from_iterable(await self._read()))
        ends = [pin.expires_at for pin in found if pin.expires_at is not None]
        self._ends, self._expired = None, frozenset()
        if not ends:
            return found
        now = await self.now()
        if later := [end for end in ends if end > now.seconds]:
            self._ends = self._clock.mono() + (min(later) - now.seconds)
        valid = in_force(found, now)
        if len(valid) < len(found):
            self._expired = frozenset(found).difference(valid)
        return valid

    @property
    def left(self) -> float:
        """For how many seconds all pins that were read last stay in force."""
        if self._ends is None:
            return math.inf
        # Not 0: the store's clock may be a little behind ours.
        return max(_SHORTEST, self._ends - self._clock.mono())

    async def sweep(self) -> int:
        """Remove those that had expired when pins were read last; count them."""
        expired, self._expired = self._expired, frozenset()
        edits = [
            await self._edit(creator, lambda old: [pin for pin in old if pin not in expired])
            for creator in sorted({pin.created_by for pin in expired})
        ]
        return sum(edits)

    async def _edit(self, creator: str, edit: Callable[[list[Pin]], Sequence[Pin]]) -> int:
        """Replace one node's pins; count those that are gone."""
        key = self._places.pins_of(creator)
        while True:
            base = await self._store.get(key, tombstones=True)
            old = (
                [] if base is None or base.deleted else read_sheet(base.value, key, self._token_of)
            )
            new = edit(old)
            try:
                await self._write(base, key, creator, new)
            except Conflict:
                continue
            kept = {(pin.task, pin.patterns) for pin in new}
            return sum((pin.task, pin.patterns) not in kept for pin in old)

    async def _write(
        self, base: Record | None, key: str, creator: str, pins: Sequence[Pin]
    ) -> None:
        if pins:
            document = write_sheet(creator, pins)
            if base is None:
                await self._store.create(key, document)
            else:
                await self._store.put(base, document)
        elif base is not None and not base.deleted:
            await self._store.delete(base)

    async def _read(self) -> Iterable[list[Pin]]:
        """Give each node's pins; only what has changed is read."""
        heads = await self._store.heads(self._places.pins, limit=_MOST)
        versions = {head.key: head.version for head in heads}
        known = {key: sheet for key, sheet in self._sheets.items() if key in versions}
        stale = [
            key
            for key, version in versions.items()
            if key not in known or known[key].version != version
        ]
        for record in await self._fetch(stale):
            known[record.key] = _ReadSheet(record.version, self._decode(record))
        self._sheets = known
        return [known[key].pins for key in versions if key in known]

    async def _fetch(self, keys: Sequence[str]) -> list[Record]:
        if not keys:
            return []
        try:
            found = await self._store.get_many(keys)
        except Corrupt:
            # One that cannot be read must not hide the others.
            found = [await self._get(key) for key in keys]
        return [record for record in found if record is not None]

    async def _get(self, key: str) -> Record | None:
        try:
            return await self._store.get(key)
        except Corrupt as corrupt:
            self._witness.report(corrupt)
            return None

    def _decode(self, record: Record) -> list[Pin]:
        try:
            return read_sheet(record.value, record.key, self._token_of)
        except Corrupt as corrupt:
            self._witness.report(corrupt)
            return []
