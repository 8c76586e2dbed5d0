"""What the callers of a store were told, so that it can be held against what happened."""

from collections.abc import Sequence

from jobsync.errors import Fenced, Invalid, Misconfigured, NewerFormat, Unavailable
from jobsync.stores.contract import Change, Outcome, Record, Store, StoreDecorator
from jobsync.stores.record_codec import stamp
from jobsync.testing.nodes import Node

__all__ = ["ToldStore"]

_NOTHING_WRITTEN = (Fenced, Invalid, Misconfigured, NewerFormat, Unavailable)


class ToldStore(StoreDecorator):
    """Notes the answer to each read and each write, and since when the caller had waited.

    A caller that dies waiting was told nothing, and nothing is noted.

    Args:
        node: whose calls they are.
        inner: who answers.
    """

    def __init__(self, node: Node, inner: Store) -> None:
        super().__init__(inner)
        self._node = node
        self._world = node.world
        self._ids = node.components.ids

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records, and note which versions came back."""
        since = len(self._world.history)
        records = await self.inner.get_many(keys, tombstones=tombstones)
        found = [None if record is None else record.nonce for record in records]
        self._note("read", since, keys=list(keys), nonces=found, tombstones=tombstones)
        return records

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, and note what each came to."""
        since = len(self._world.history)
        changes = stamp(changes, self._ids)
        try:
            outcomes = await self.inner.write(changes)
        except _NOTHING_WRITTEN:
            self._tell(since, changes, ["Refused"] * len(changes))
            raise
        self._tell(since, changes, [type(outcome).__name__ for outcome in outcomes])
        return outcomes

    def _tell(self, since: int, changes: Sequence[Change], outcomes: list[str]) -> None:
        for change, outcome in zip(changes, outcomes, strict=True):
            base = None if change.base is None else change.base.nonce
            self._note(
                "told", since, key=change.key, nonce=change.nonce, base=base, outcome=outcome
            )

    def _note(self, what: str, since: int, **facts: object) -> None:
        self._world.note(self._node.name, what, since=since, **facts)
