"""Claims that no caller runs, and that have landed or may still land. They are closed as failed.

The write that closes a claim has the same key and base. It takes the key, or it finds that the
claim has landed.
"""

from collections.abc import Mapping

from jobsync.errors import Unavailable
from jobsync.jobs.store_clock import StoreClock
from jobsync.stores.contract import Applied, Put, Record, Store, Unknown
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = ["UnclosedClaims"]


class UnclosedClaims:
    """The claims of one node that must be closed before it claims anything else.

    Args:
        store: holds the claims.
        store_clock: dates their ends.
        corruption_log: reports records that cannot be read.
    """

    def __init__(
        self, store: Store, store_clock: StoreClock, corruption_log: CorruptionLog
    ) -> None:
        self._store = store
        self._store_clock = store_clock
        self._corruption_log = corruption_log
        self._changes: dict[str, Put] = {}
        """What was written for each task, or may still be."""

    def __bool__(self) -> bool:
        return bool(self._changes)

    def add(self, changes: Mapping[str, Put]) -> None:
        """Remember claims to close: what was written for each task."""
        self._changes |= changes

    async def close(self) -> None:
        """Close claims that no caller runs, so that none lands or stays open unnoticed.

        Raises:
            Unavailable: not all could be closed; call again.
        """
        while self._changes:
            closing = dict(self._changes)
            keys = [change.key for change in closing.values()]
            found = await read_each(self._store, keys, self._corruption_log.report)
            changes: dict[str, Put] = {}
            for task, change in closing.items():
                if change.key not in found:
                    raise Unavailable(self._store.name, "a claim could not be read")
                if (closed := self._build_write(change, found[change.key])) is None:
                    self._changes.pop(task, None)
                else:
                    changes[task] = closed
            outcomes = await self._store.write(list(changes.values())) if changes else []
            for task, outcome in zip(changes, outcomes, strict=True):
                if isinstance(outcome, Applied):
                    self._changes.pop(task, None)
                elif isinstance(outcome, Unknown):
                    raise Unavailable(self._store.name, "a claim could not be closed")

    def _build_write(self, change: Put, found: Record | None) -> Put | None:
        """Return the write that closes a claim; None if it can no longer land."""
        failed = {**change.value, "state": "failed", "ended": self._store_clock.now}
        if found is not None and found.value == change.value:
            return found.replace(failed)
        base = change.base
        version = None if found is None else found.version
        is_pending = version == (None if base is None else base.version)
        # Takes the key, so that the claim can no longer land; or finds that it has landed.
        return Put(change.key, failed, base) if is_pending else None
