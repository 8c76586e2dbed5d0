"""Histories of records, built by hand: commits of records, entries and definitions, and notes."""

from typing import Any

import msgspec

from jobsync.core.expiry import ExpiryRule
from jobsync.core.partitions import Partition, PartitionField
from jobsync.database.definition import IndexState
from jobsync.testing import Occurrence
from jobsync.testing.nodes import WORLD_START
from jobsync.testing.record_invariants import check_records

__all__ = ["BY_COLOR", "EXPIRY", "Records", "by_color", "expiring", "time"]

BY_COLOR, EXPIRY = "by_color-1", "expiry-1"
"""The names of indexes in the store."""


def by_color(key: str = BY_COLOR, *, is_ready: bool = True) -> IndexState:
    """Return an index by a field."""
    rule = Partition("by_color", (PartitionField("color"),))
    return IndexState(key, rule, is_ready=is_ready)


def expiring(
    on_expire: Any = "hard-delete", *, is_ready: bool = False, **options: Any
) -> IndexState:
    """Return the index of the expiry; entries are required only where it is ready."""
    return IndexState(EXPIRY, ExpiryRule(on_expire=on_expire, **options), is_ready=is_ready)


def time(at: float) -> float:
    """Return the wall time of a moment of the world."""
    return WORLD_START + at


class Records:
    """The resource "mails", and others."""

    def __init__(self, *indexes: IndexState) -> None:
        self.history: list[Occurrence] = []
        self.at = 0.0
        self.define(*indexes)

    def note(self, what: str, node: str = "a", **details: Any) -> int:
        """Append an occurrence; return its position."""
        self.history.append(Occurrence(self.at, node, what, details))
        return len(self.history) - 1

    def define(self, *indexes: IndexState, title: str = "mails") -> None:
        """Store the indexes of a resource."""
        value = {"indexes": msgspec.to_builtins(indexes)}
        self._commit(f"resource/{title}", value, "definition")

    def write(
        self, name: str, nonce: str, title: str = "mails", node: str = "a", **value: Any
    ) -> None:
        """Write a record, with its nonce as mark unless another one is given."""
        self._commit(f"data/{title}/{name}", {"mark": nonce, **value}, nonce, node=node)

    def remove(self, name: str, nonce: str = "gone", title: str = "mails", node: str = "a") -> None:
        """Delete a record."""
        self._commit(f"data/{title}/{name}", None, nonce, is_deleted=True, node=node)

    def add(self, name: str, rank: str, nonce: str, index: str = BY_COLOR) -> None:
        """Add an entry to an index."""
        self._commit(self.key(name, rank, nonce, index), {"at": time(self.at)}, "entry")

    def drop(self, *keys: str) -> None:
        """Drop records or entries."""
        self.note("drop", keys=list(keys))

    @staticmethod
    def key(name: str, rank: str, nonce: str, index: str = BY_COLOR) -> str:
        """Return the key of an entry."""
        return f"index/mails/{index}/{rank}!01{name}!00{nonce}"

    def find(self, **options: Any) -> list[str]:
        """Return what is found: the ids and problems."""
        return [str(each) for each in check_records(self.history, **options)]

    def _commit(
        self, key: str, value: Any, nonce: str, *, is_deleted: bool = False, node: str = "a"
    ) -> None:
        self.note("commit", node, key=key, value=value, nonce=nonce, deleted=is_deleted)
