"""The resources of a store and their indexes, read without joining or writing anything.

It is a snapshot: what records look like, by what they can be found, and how far an index is that
was added to existing records.
"""

from typing import Generic, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core.expiry import ExpiryRule
from jobsync.core.partitions import Partition
from jobsync.database.backfill import count_done
from jobsync.database.definition import Definition, IndexState, Rule
from jobsync.database.registry import DEFINITIONS
from jobsync.stores.contract import Store
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.paging import scan_pages

__all__ = ["IndexStatus", "ResourceStatus", "read_resources_status"]


R = TypeVar("R", bound=Rule)


class IndexStatus(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """One index of a resource."""

    rule: R
    state: IndexState
    done: int | None
    """How many records a backfill has looked at; None if it has not begun, or is complete."""

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        if self.state.is_ready:
            return "ready"
        return "not begun" if self.done is None else f"{self.done:,} records done"


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One resource."""

    definition: Definition
    partitions: tuple[IndexStatus[Partition], ...]
    expiry: IndexStatus[ExpiryRule] | None
    """The index of expiries; None if its records do not expire."""


async def read_resources_status(store: Store, components: Components) -> list[ResourceStatus]:
    """Return all resources by name; definitions that cannot be decoded are reported.

    Reads the definitions, and one record for each index that is being built.

    Raises:
        Unavailable: the store does not answer.
    """
    corruption_log = CorruptionLog("resources", components.events)
    found: list[ResourceStatus] = []
    async for records in scan_pages(store, DEFINITIONS):
        definitions = corruption_log.read_all(Definition.read, records)
        found += [await _read_indexes(store, definition) for definition in definitions]
    return found


async def _read_indexes(store: Store, definition: Definition) -> ResourceStatus:
    partitions: list[IndexStatus[Partition]] = []
    expiry: IndexStatus[ExpiryRule] | None = None
    for state in definition.indexes:
        done = None if state.is_ready else await count_done(store, state)
        match state.rule:
            case Partition() as rule:
                partitions.append(IndexStatus(rule=rule, state=state, done=done))
            case ExpiryRule() as rule:
                expiry = IndexStatus(rule=rule, state=state, done=done)
    return ResourceStatus(definition=definition, partitions=tuple(partitions), expiry=expiry)
