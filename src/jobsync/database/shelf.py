"""Records of one level of a store, under names that users choose and may use again.

Every write names what it replaces: the record that was read, a tombstone, or nothing. Who
loses a race reads again and decides again; of those who race, one always gets on.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeAlias, cast

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.keys import escape, unescape
from jobsync.core.retry import backoff_limit
from jobsync.errors import Conflict
from jobsync.stores.contract import Change, Conflicted, Put, Record, Store, unwrap

__all__ = ["Decide", "Shelf", "Verdict"]

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 1.0


class Verdict(Enum):
    """What is to become of a record, other than a new value."""

    KEEP = "leave it as it is"
    REMOVE = "leave a tombstone"


Decide: TypeAlias = Callable[[Record | None], "Json | Verdict"]
"""Given the record that is there, or None, says what should be; raises to leave all as it is."""


class Shelf:
    """Records under one prefix.

    Args:
        source: gives the store, or raises what keeps it from being used.
        prefix: where they are.
        components: the clock and the randomness that spread those who race.
        label: how errors call a record, before its name.
    """

    def __init__(
        self, source: Callable[[], Store], prefix: str, components: Components, label: str
    ) -> None:
        self.prefix = prefix
        self._source = source
        self._label = label
        self._clock = components.clock
        self._randomness = components.randomness

    @property
    def store(self) -> Store:
        """The store, if it can be used."""
        return self._source()

    def key(self, name: str) -> str:
        """Give the key of a record."""
        return self.prefix + escape(name)

    def name(self, key: str) -> str:
        """Give the name of a record."""
        return unescape(key[len(self.prefix) :])

    def title(self, name: str) -> str:
        """Say which record, in an error."""
        return f"{self._label}/{name}"

    async def get(self, name: str) -> Record | None:
        """Read one."""
        return await self.store.get(self.key(name))

    async def get_many(self, names: Sequence[str]) -> list[Record | None]:
        """Read several, in the order of their names; a name may be asked for twice."""
        keys = list(map(self.key, names))
        unlike = list(dict.fromkeys(keys))
        found = dict(zip(unlike, await self.store.get_many(unlike), strict=True)) if keys else {}
        return [found[key] for key in keys]

    async def create(self, name: str, value: Json) -> Record:
        """Write under a name that no record has now: one request, if none ever had it.

        Raises:
            Conflict: there is one.
            OutcomeUnknown: nobody can say.
        """
        (outcome,) = await self.store.write([Put(self.key(name), value)])
        if not isinstance(outcome, Conflicted):
            return unwrap(outcome, self.title(name))

        def decide(current: Record | None) -> Json:
            if current is not None:
                raise Conflict(self.title(name), "there is one already")
            return value

        return await self.put(name, decide)

    async def put(self, name: str, decide: Callable[[Record | None], Json]) -> Record:
        """Change one, by a decision that always comes to a value."""
        return cast("Record", await self.change(name, decide))

    async def change(self, name: str, decide: Decide) -> Record | None:
        """Read one, decide, and write in place of what was read, until nobody is faster.

        Returns:
            What is there then: the new record or tombstone; what was there, if it is kept.

        Raises:
            OutcomeUnknown: nobody can say.
        """
        key = self.key(name)
        attempt = 0
        while True:
            base = await self.store.get(key, tombstones=True)
            current = None if base is None or base.deleted else base
            change = _follow(key, base, decide(current))
            if change is None:
                return current
            (outcome,) = await self.store.write([change])
            if not isinstance(outcome, Conflicted):
                return unwrap(outcome, self.title(name))
            attempt += 1
            await self._rest(attempt)

    async def _rest(self, attempt: int) -> None:
        pause = backoff_limit(attempt, first=_FIRST_PAUSE, most=_LONGEST_PAUSE)
        await self._clock.sleep(self._randomness.uniform(0, pause))


def _follow(key: str, base: Record | None, decided: Json | Verdict) -> Change | None:
    """Give the change that a decision asks for."""
    if decided is Verdict.KEEP:
        return None
    if decided is not Verdict.REMOVE:
        return Put(key, decided, base)
    return None if base is None or base.deleted else base.delete()
