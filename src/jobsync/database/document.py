"""Documents: the records of a resource as users read them, and the verbs that read them.

A read returns records in the order of their ids, filtered and sorted. Filters are pushed down to
the store: SQL drops what cannot match, and every record that is returned has passed the
reference matcher. Records that cannot be decoded are reported and left out.

A sort field is written as in a filter, with dots; a leading minus reverses the order. Values of
different types sort by type: missing, null, false and true, numbers, text by code point, then
everything else, which has no order of its own. Documents that tie keep the order of their ids.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core import filters
from jobsync.core.codec import Json
from jobsync.core.filters import All, AnyOf, Compare, Equals, Exists, Filter, Not, Path
from jobsync.database.archive import ARCHIVING
from jobsync.database.definition import IndexState
from jobsync.database.hooks import HookedVerbs
from jobsync.database.index import ENTRIES, Index
from jobsync.database.keyspace import Keyspace
from jobsync.database.read_cache import CachedReads, ReadGuard
from jobsync.errors import Corrupt, Invalid, closest_name, safe_repr
from jobsync.events import Events
from jobsync.stores.contract import Record, Where
from jobsync.stores.corruption_log import CorruptionLog

__all__ = [
    "CREATED",
    "LIBRARY_FIELDS",
    "UPDATED",
    "VERSION",
    "Document",
    "IndexRetired",
    "Lookup",
    "Page",
    "ReadableResource",
    "Selection",
    "SortKey",
    "as_list",
    "check_id",
    "parse_sort",
    "read_value",
    "sort_documents",
]

CREATED = "_created_at"
UPDATED = "_updated_at"
VERSION = "_version"

LIBRARY_FIELDS = frozenset({CREATED, UPDATED, VERSION})
"""The fields that the library adds to a record. They are ignored in what users write."""

_INTERNAL_FIELDS = frozenset({ARCHIVING, ENTRIES})
"""Fields of a stored record that its readers do not see."""

_RECORD_PAGE = 1000
_HEAD_PAGE = 10_000
_MAX_PAGE = 100_000

T = TypeVar("T")
M = TypeVar("M", bound=Mapping[str, Any])


def read_value(record: Record) -> dict[str, Json]:
    """Return the stored fields of a record, without its version.

    Raises:
        Corrupt: it is not a document.
    """
    value = record.value
    if not (isinstance(value, dict) and isinstance(value.get("id"), str)):
        raise Corrupt(record.key, "a record is an object with an id")
    return value


class Document(Mapping[str, Json]):
    """One version of a record, readable as `d.user_id` and as `d["user_id"]`; read-only.

    Besides the record's own fields it has `id`; `_version`, which identifies this version;
    `_created_at` and `_updated_at`, in seconds since 1970 by the writer's clock. A field with
    the name of a mapping's method (`items`, `keys`, `get`) is read as an item.

    Args:
        record: the stored record.

    Raises:
        Corrupt: it is not a document.
    """

    __slots__ = ("_record",)

    _record: Record

    def __init__(self, record: Record) -> None:
        read_value(record)
        object.__setattr__(self, "_record", record)

    def __getitem__(self, name: str) -> Json:
        if name == VERSION:
            return self._record.version
        if name not in self:
            raise KeyError(self._explain_missing(name))
        return self._record.value[name]

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes. While unpickling there is no record yet.
        if name == "_record" or name not in self:
            raise AttributeError(name if name == "_record" else self._explain_missing(name))
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}={safe_repr(value)}: documents are read-only; use update")

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._record.value if name not in _INTERNAL_FIELDS)
        yield VERSION

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        if name in _INTERNAL_FIELDS:
            return False
        return name == VERSION or name in self._record.value

    def __reduce__(self) -> tuple[Any, ...]:
        return (Document, (self._record,))

    def __repr__(self) -> str:
        return f"Document({dict(self)})"

    def _explain_missing(self, name: object) -> str:
        hint = closest_name(str(name), self)
        return f"the record has no {name!r}" + (f"; did you mean {hint}?" if hint else "")


class SortKey(msgspec.Struct, frozen=True):
    """One field to sort by."""

    path: Path
    descending: bool = False


def parse_sort(sort: str | Sequence[str] | None) -> tuple[SortKey, ...]:
    """Parse `"name"`, `"-name"` or a list of such fields.

    Raises:
        Invalid: one of them is not a field name.
    """
    if sort is None:
        return ()
    return tuple(map(_parse_sort_key, sort if isinstance(sort, list | tuple) else [sort]))


def _parse_sort_key(name: Any) -> SortKey:
    path = tuple(name.removeprefix("-").split(".")) if isinstance(name, str) else ()
    if not path or "" in path:
        fix = "write 'name', '-name' or 'address.city'"
        raise Invalid("sort", name, "must be a field name", fix)
    return SortKey(path, name.startswith("-"))


def sort_documents(documents: Iterable[M], keys: Sequence[SortKey]) -> list[M]:
    """Return documents sorted by some of their fields."""
    result = list(documents)
    # From the last key to the first: a stable sort keeps the order of the later keys.
    for key in reversed(keys):
        result.sort(key=partial(_rank, key.path), reverse=key.descending)
    return result


def _rank(path: Path, document: Json) -> tuple[int, Any]:
    for step in path:
        if not isinstance(document, Mapping) or step not in document:
            return (0, 0)
        document = document[step]
    match document:
        case None:
            return (1, 0)
        case bool():
            return (2, document)
        case int() | float():
            return (3, document)
        case str():
            return (4, document)
        case _:
            return (5, 0)


class Page(msgspec.Struct, frozen=True):
    """A page of records, and where the next one begins."""

    items: list[Document]
    next: str | None
    """Pass it as `after`; None at the end."""


# In the class, `list` is a verb.
Documents: TypeAlias = list[Document]
Names: TypeAlias = list[str]
Records: TypeAlias = list[Record]
PartitionValues: TypeAlias = Mapping[str, Json] | None


class Selection(msgspec.Struct, frozen=True):
    """Which records to read."""

    where: Where
    partition: str | None = None
    partition_values: PartitionValues = None


class Lookup(msgspec.Struct, frozen=True):
    """Where in an index the selected records are."""

    state: IndexState
    index: Index | None
    """None while it is being built."""
    rank: str

    def has(self, record: Record) -> bool:
        """Whether a record belongs there."""
        return self.state.rank(record.value) == self.rank


class IndexRetired(Exception):
    """The index in use was replaced meanwhile, so that some records may be missing."""


class ReadableResource(HookedVerbs):
    """The reading half of a resource.

    Args:
        keyspace: where the records are.
        components: the events that receive this resource's events.
        guard: what knows the database's cache; without it nothing is cached.
    """

    def __init__(
        self, keyspace: Keyspace, components: Components, guard: ReadGuard | None = None
    ) -> None:
        events = Events()
        events.join(components.events)
        super().__init__(events)
        self._keyspace = keyspace
        self._reads = CachedReads(keyspace, guard or ReadGuard(components.clock))
        self._corruption_log = CorruptionLog(keyspace.prefix.rstrip("/"), components.events)

    async def get(self, id: str) -> Document | None:
        """Read a record; None if there is none."""
        return await self._run_verb("get", id, self._get)

    async def exists(self, id: str) -> bool:
        """Whether there is a record with this id."""

        async def work(id: str) -> bool:
            return await self._reads.get(check_id(id)) is not None

        return await self._run_verb("exists", id, work)

    async def get_many(self, ids: Iterable[str]) -> list[Document | None]:
        """Read records in the order of the given ids; None where there is none."""
        inputs = await self._hooks.before_all("get", as_list("ids", ids))
        records = await self._reads.get_many(list(map(check_id, inputs)))
        found = [None if record is None else Document(record) for record in records]
        await self._hooks.after_all("get", found)
        return found

    async def list(
        self,
        *,
        limit: int | None = None,
        offset: int = 0,
        partition: str | None = None,
        partition_values: PartitionValues = None,
    ) -> Documents:
        """Return records in the order of their ids; all of them by default.

        Args:
            limit: the largest number of records to return.
            offset: how many records to skip first.
            partition: the name of a partition, to return the records of one.
            partition_values: of its fields, such as `{"region": "eu"}`.
        """

        async def work(where: Where) -> Documents:
            chosen = Selection(where, partition, partition_values)
            return await self._reads.answer(self._find, chosen, None, limit, offset)

        return await self._run_verb("list", None, work)

    async def list_ids(self, *, limit: int | None = None, offset: int = 0) -> Names:
        """Return ids in order, without reading the records."""

        async def work(_: None) -> Names:
            return await self._reads.answer(self._find_ids, limit, offset)

        return await self._run_verb("list_ids", None, work)

    async def count(
        self,
        filter: Where = None,
        *,
        partition: str | None = None,
        partition_values: PartitionValues = None,
    ) -> int:
        """Count the records that match; without a filter, all of them by their keys alone.

        Args:
            filter: as in `query`.
            partition: the name of a partition, to count the records of one.
            partition_values: of its fields, such as `{"region": "eu"}`.
        """

        async def work(where: Where) -> int:
            chosen = Selection(where, partition, partition_values)
            return await self._reads.answer(self._count, chosen)

        return await self._run_verb("count", filter, work)

    async def page(
        self,
        filter: Where = None,
        *,
        size: int = 100,
        after: str | None = None,
        partition: str | None = None,
        partition_values: PartitionValues = None,
    ) -> Page:
        """Return a page of records in the order of their ids, and where the next one begins.

        A page costs the same wherever it is; concurrent inserts and deletes do not shift it.

        Args:
            filter: as in `query`.
            size: the largest number of records to return.
            after: the `next` of the page before.
            partition: the name of a partition, to read the records of one.
            partition_values: of its fields, such as `{"region": "eu"}`.
        """

        async def work(where: Where) -> Page:
            chosen = Selection(where, partition, partition_values)
            return await self._reads.answer(self._read_page, chosen, size, after)

        return await self._run_verb("page", filter, work)

    async def query(
        self,
        filter: Where = None,
        *,
        sort: str | Sequence[str] | None = None,
        limit: int | None = None,
        offset: int = 0,
        partition: str | None = None,
        partition_values: PartitionValues = None,
    ) -> Documents:
        """Return the records that match a filter.

        Args:
            filter: such as `{"expires_at": {"$lt": now}, "active": True}`. If it has a value
                for each field of a partition, only that partition is read; otherwise SQL
                stores let the database drop what cannot match.
            sort: a field, `-field` to reverse, or a list; by id without it. With it all
                matches are read, whatever the limit.
            limit: the largest number of records to return.
            offset: how many records to skip first.
            partition: the name of a partition, to search the records of one.
            partition_values: of its fields, such as `{"region": "eu"}`.
        """

        async def work(where: Where) -> Documents:
            chosen = Selection(where, partition, partition_values)
            return await self._reads.answer(self._find, chosen, sort, limit, offset)

        return await self._run_verb("query", filter, work)

    async def __aiter__(self) -> AsyncIterator[Document]:
        """Iterate over all records in the order of their ids, a page at a time."""
        async for document in self._iterate():
            yield document

    async def _get(self, id: str) -> Document | None:
        record = await self._reads.get(check_id(id))
        return None if record is None else Document(record)

    async def _exists(self, id: str) -> bool:
        return await self._keyspace.get(check_id(id)) is not None

    async def _choose_index(self, selection: "Selection") -> "Lookup | None":
        """Return the index entries that lead to the selected records; None to read all records.

        Raises:
            Invalid: there is no such partition.
        """
        if selection.partition is not None:
            raise Invalid("partition", selection.partition, "does not exist", "use a filter")
        return None

    async def _check_index(self, lookup: "Lookup") -> None:
        """Check that an index had all records until now.

        Raises:
            IndexRetired: it may have lost some.
        """
        del lookup

    async def _iterate(self) -> AsyncIterator[Document]:
        async for records in self._stream(Selection(None)):
            for document in self._corruption_log.read_all(Document, records):
                yield document

    async def _stream(
        self, selection: "Selection", *, after: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Records]:
        """Yield pages of the selected records in the order of their ids.

        Raises:
            IndexRetired: some may be missing.
        """
        _check_filter(selection.where)
        lookup = await self._choose_index(selection)
        if lookup is None:
            pages = self._scan_all(selection.where, after, limit)
        else:
            pages = self._follow(lookup, selection.where, after, limit)
        left = limit
        async for records in pages:
            yield records if left is None else records[:left]
            left = None if left is None else left - len(records)
            if left is not None and left <= 0:
                break
        if lookup is not None:
            await self._check_index(lookup)

    async def _scan_all(
        self, where: Where, after: str | None, limit: int | None
    ) -> AsyncIterator[Records]:
        start = "" if after is None else self._keyspace.key(after)
        size = _RECORD_PAGE if limit is None else min(limit, _RECORD_PAGE)
        while size:
            records = await self._scan(where, start, size)
            yield records
            if len(records) < size:
                return
            start = records[-1].key

    async def _follow(
        self, lookup: "Lookup", where: Where, after: str | None, limit: int | None
    ) -> AsyncIterator[Records]:
        if lookup.index is None:
            async for records in self._scan_all(where, after, None):
                yield [record for record in records if lookup.has(record)]
            return
        parsed = filters.parse(where)
        async for records in lookup.index.iterate(lookup.rank, after=after, limit=limit):
            yield [record for record in records if filters.matches(parsed, record.value)]

    async def _read(
        self, selection: "Selection", *, after: str | None = None, limit: int | None = None
    ) -> Records:
        """Return the selected records in the order of their ids."""
        while True:
            try:
                return [
                    record
                    async for records in self._stream(selection, after=after, limit=limit)
                    for record in records
                ]
            except IndexRetired:
                continue

    async def _find(
        self,
        selection: "Selection",
        sort: str | Sequence[str] | None,
        limit: int | None,
        offset: int,
    ) -> Documents:
        keys = parse_sort(sort)
        end = _check_range(limit, offset)
        # To sort, all matches have to be read.
        records = await self._read(selection, limit=None if keys else end)
        found = self._corruption_log.read_all(Document, records)
        return sort_documents(found, keys)[offset:end]

    async def _find_ids(self, limit: int | None = None, offset: int = 0) -> Names:
        keys = await self._find_keys(_check_range(limit, offset))
        return [self._keyspace.name(key) for key in keys[offset:]]

    async def _count(self, selection: "Selection") -> int:
        if not selection.where and selection == Selection(selection.where):
            return len(await self._find_keys(None))
        while True:
            try:
                return sum([len(records) async for records in self._stream(selection)])
            except IndexRetired:
                continue

    async def _read_page(self, selection: "Selection", size: int, after: str | None) -> Page:
        if type(size) is not int or not 0 < size <= _MAX_PAGE:
            raise Invalid("size", size, f"must be between 1 and {_MAX_PAGE:,}", "read page by page")
        if not (after is None or isinstance(after, str)):
            raise Invalid("after", after, "must be an id", "pass the `next` of the page before")
        records = await self._read(selection, after=after, limit=size)
        has_more = len(records) == size
        return Page(
            self._corruption_log.read_all(Document, records),
            self._keyspace.name(records[-1].key) if has_more else None,
        )

    async def _find_keys(self, end: int | None) -> Names:
        keys: Names = []
        while end is None or len(keys) < end:
            size = _HEAD_PAGE if end is None else min(end - len(keys), _HEAD_PAGE)
            heads = await self._keyspace.store.heads(
                self._keyspace.prefix, after=keys[-1] if keys else "", limit=size
            )
            keys += [head.key for head in heads]
            if len(heads) < size:
                break
        return keys

    async def _scan(self, where: Where, after: str, size: int) -> Records:
        return await self._keyspace.store.scan(
            self._keyspace.prefix, after=after, limit=size, where=where
        )


def check_id(id: Any) -> str:
    """Return an id if it is text.

    Raises:
        Invalid: it is not.
    """
    if not isinstance(id, str):
        raise Invalid("id", id, "must be text", "use str(id)")
    return id


def as_list(name: str, items: Iterable[T]) -> Sequence[T]:
    """Return several items as a list.

    Raises:
        Invalid: it is a single text or record, or not iterable.
    """
    if isinstance(items, str | Mapping) or not isinstance(items, Iterable):
        raise Invalid(name, items, "must be a list", "write [...]")
    return items if isinstance(items, list) else list(items)


def _check_range(limit: int | None, offset: int) -> int | None:
    """Return the position after the last requested record."""
    for name, number in (("limit", limit), ("offset", offset)):
        if number is not None and (type(number) is not int or number < 0):
            raise Invalid(name, number, "must be 0 or more", "pass a whole number")
    return None if limit is None else offset + limit


def _check_filter(where: Where) -> None:
    """Refuse filters by version, which the store keeps outside the document."""
    if where and _mentions(filters.parse(where), VERSION):
        fix = "get the record and compare"
        raise Invalid("filter", VERSION, "cannot use this field", fix)


def _mentions(where: Filter, name: str) -> bool:
    match where:
        case All(parts) | AnyOf(parts):
            return any(_mentions(part, name) for part in parts)
        case Not(part):
            return _mentions(part, name)
        case Equals(path) | Compare(path) | Exists(path):
            return path[0] == name
