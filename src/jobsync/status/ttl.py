"""Which records expire and when, read from the indexes without joining or writing anything.

It is a snapshot, and counts entries of the indexes, not records: a process that died during a write
may have left an entry too many, which the next sweep removes. Nothing but the names of entries is
read, so the cost does not depend on the number of records.

What is due is judged by the store's clock. An object store has none; there it is this machine's.
"""

import msgspec

from jobsync.components import Components
from jobsync.core.expiry import RANK_LENGTH, ExpiryRule, rank_of_time
from jobsync.database.index import EntryPage, Index
from jobsync.database.resource_records import DATA
from jobsync.errors import NotFound, closest_name
from jobsync.status.resources import IndexStatus, ResourceStatus, read_resources_status
from jobsync.stores.contract import Store

__all__ = [
    "MAX_COUNTED",
    "ExpiringRecord",
    "ExpiryStatus",
    "TTLStatus",
    "describe_rule",
    "read_ttl_status",
]

MAX_COUNTED = 1000
"""How many entries are counted at most: one listing on objects."""

_LAST_RANK = "9" * RANK_LENGTH
_UNITS = {"d": 86_400, "h": 3600, "min": 60}


class ExpiringRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record and when it expires."""

    resource: str
    id: str
    expires_at: float
    """In Unix seconds."""


class ExpiryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The expiry of one resource. Times are Unix seconds."""

    resource: str
    rule: ExpiryRule
    backlog: int
    """How many records are due, as far as they were counted."""
    is_counted: bool
    """Whether all of them were counted."""
    oldest_due: float | None
    """When the first of them expired."""
    next_expiry: float | None
    """When the first of the others expires."""
    index: IndexStatus[ExpiryRule]
    """While it is being built, records that are not in it yet are not counted."""
    seen: float
    """The time of this snapshot."""


class TTLStatus:
    """The resources whose records expire. Created by `read_ttl_status`."""

    def __init__(
        self, store: Store, components: Components, found: list[ResourceStatus], seen: float
    ) -> None:
        self._store = store
        self._components = components
        self._indexes = {
            each.definition.name: each.expiry for each in found if each.expiry is not None
        }
        self._seen = seen
        self._rank = rank_of_time(seen)

    def choose(self, resource: str | None) -> list[str]:
        """Return the names of the resources to look at: one, or all.

        Raises:
            NotFound: there is no such resource, or its records do not expire.
        """
        if resource is None:
            return sorted(self._indexes)
        if resource not in self._indexes:
            hint = closest_name(resource, self._indexes)
            raise NotFound("resource with an expiry", resource, sorted(self._indexes), hint)
        return [resource]

    async def resources(self, resource: str | None = None) -> list[ExpiryStatus]:
        """Return the expiry of one resource or of all, by name."""
        return [await self._read(name) for name in self.choose(resource)]

    async def due(self, resource: str | None, limit: int) -> list[ExpiringRecord]:
        """Return the records that are due, the one that expired first at the top."""
        found: list[ExpiringRecord] = []
        for name in self.choose(resource):
            found += _list_records(name, await self._list_due(name, limit))
        return sorted(found, key=_by_time)[:limit]

    async def next(self, resource: str | None, limit: int) -> list[ExpiringRecord]:
        """Return the records that expire next, the first one at the top."""
        found: list[ExpiringRecord] = []
        for name in self.choose(resource):
            found += _list_records(name, await self._list_next(name, limit))
        return sorted(found, key=_by_time)[:limit]

    async def _read(self, name: str) -> ExpiryStatus:
        due = await self._list_due(name, MAX_COUNTED)
        later = await self._list_next(name, 1)
        index = self._indexes[name]
        return ExpiryStatus(
            resource=name,
            rule=index.rule,
            backlog=len(due.entries),
            is_counted=due.next is None,
            oldest_due=_read_rank(due.entries[0].rank) if due.entries else None,
            next_expiry=_read_rank(later.entries[0].rank) if later.entries else None,
            index=index,
            seen=self._seen,
        )

    async def _list_due(self, name: str, limit: int) -> EntryPage:
        return await self._open(name).list_due(self._rank, limit)

    async def _list_next(self, name: str, limit: int) -> EntryPage:
        index = self._open(name)
        # Names of entries are longer than their ranks, so this is before those of the rank.
        start = f"{index.prefix}{int(self._rank) + 1:0{RANK_LENGTH}}"
        return await index.list_due(_LAST_RANK, limit, after=start)

    def _open(self, name: str) -> Index:
        state = self._indexes[name].state
        return Index(self._store, name, f"{DATA}{name}/", state, self._components)


async def read_ttl_status(store: Store, components: Components) -> TTLStatus:
    """Return the resources of a store whose records expire.

    Raises:
        Unavailable: the store does not answer.
    """
    now = await store.now()
    seen = (components.clock.wall() if now is None else now).seconds
    return TTLStatus(store, components, await read_resources_status(store, components), seen)


def describe_rule(rule: ExpiryRule) -> str:
    """Return a rule in words: `30 d after last_seen, then deleted`."""
    when = f"at {rule.field}" if rule.ttl is None else f"{_format(rule.ttl)} after {rule.field}"
    match rule.on_expire:
        case "hard-delete":
            return f"{when}, then deleted"
        case "soft-delete":
            return f"{when}, then marked in {rule.delete_field}"
        case "archive":
            return f"{when}, then moved to {rule.archive_resource}"
        case "callback":
            return f"{when}, then a callback decides"


def _format(seconds: float) -> str:
    for unit, length in _UNITS.items():
        if seconds % length == 0:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,g} s"


def _list_records(resource: str, page: EntryPage) -> list[ExpiringRecord]:
    return [
        ExpiringRecord(resource=resource, id=entry.id, expires_at=_read_rank(entry.rank))
        for entry in page.entries
    ]


def _by_time(record: ExpiringRecord) -> tuple[float, str, str]:
    return record.expires_at, record.resource, record.id


def _read_rank(rank: str) -> float:
    return int(rank) / 1000
