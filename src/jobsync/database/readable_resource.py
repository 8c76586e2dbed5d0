"""The reading half of a resource: its verbs that return records.

A read returns records in the order of their ids, filtered and sorted. Records that cannot be
decoded are reported and left out.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Generic, TypeAlias, cast

import msgspec

from jobsync.components import Components
from jobsync.database.document import (
    Document,
    RecordT,
    as_list,
    check_id,
    parse_sort,
    sort_documents,
)
from jobsync.database.home_loop import HomeLoop, on_home_loop
from jobsync.database.hooks import HookedVerbs
from jobsync.database.record_types import RecordType
from jobsync.database.resource_records import PartitionValues, ResourceRecords, Selection
from jobsync.errors import Invalid
from jobsync.stores.contract import Where
from jobsync.stores.corruption_log import CorruptionLog

__all__ = ["Page", "ReadableResource"]

_MAX_PAGE = 100_000


class Page(msgspec.Struct, Generic[RecordT], frozen=True):
    """A page of records, and where the next one begins."""

    items: list[RecordT]
    next: str | None
    """Pass it as `after`; None at the end."""


# In the class, `list` is a verb.
Records: TypeAlias = list[RecordT]
Names: TypeAlias = list[str]


@on_home_loop
class ReadableResource(HookedVerbs, Generic[RecordT]):
    """The reading half of a resource.

    Args:
        records: as they are stored.
        components: the events that receive reports of damaged records.
        home_loop: the event loop of the database.

    Attributes:
        record_type: what records are read as; without it they are documents.
    """

    def __init__(
        self, records: ResourceRecords, components: Components, home_loop: HomeLoop
    ) -> None:
        super().__init__(records.events)
        self.home_loop = home_loop
        self.records = records
        self._corruption_log = CorruptionLog(records.keyspace.prefix.rstrip("/"), components.events)
        self.record_type: RecordType[RecordT] | None = None

    async def get(self, id: str) -> RecordT | None:
        """Read a record; None if there is none."""
        found = await self._run_verb("get", id, self._get)
        return None if found is None else self._read(found)

    async def exists(self, id: str) -> bool:
        """Whether there is a record with this id."""

        async def work(id: str) -> bool:
            return await self.records.reads.get(check_id(id)) is not None

        return await self._run_verb("exists", id, work)

    async def get_many(self, ids: Iterable[str]) -> list[RecordT | None]:
        """Read records in the order of the given ids; None where there is none."""
        inputs = await self._hooks.before_all("get", as_list("ids", ids))
        records = await self.records.reads.get_many(list(map(check_id, inputs)))
        found = [None if record is None else Document(record) for record in records]
        await self._hooks.after_all("get", found)
        return [None if document is None else self._read(document) for document in found]

    async def list(
        self,
        *,
        limit: int | None = None,
        offset: int = 0,
        partition: str | None = None,
        partition_values: PartitionValues = None,
    ) -> Records[RecordT]:
        """Return records in the order of their ids; all of them by default.

        Args:
            limit: the largest number of records to return.
            offset: how many records to skip first.
            partition: the name of a partition, to return the records of one.
            partition_values: of its fields, such as `{"region": "eu"}`.
        """

        async def work(where: Where) -> Records[Document]:
            chosen = Selection(where, partition, partition_values)
            return await self.records.reads.answer(self._find, chosen, None, limit, offset)

        return self._read_all(await self._run_verb("list", None, work))

    async def list_ids(self, *, limit: int | None = None, offset: int = 0) -> Names:
        """Return ids in order, without reading the records."""

        async def work(_: None) -> Names:
            return await self.records.reads.answer(self._find_ids, limit, offset)

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
            return await self.records.reads.answer(self.records.count, chosen)

        return await self._run_verb("count", filter, work)

    async def page(
        self,
        filter: Where = None,
        *,
        size: int = 100,
        after: str | None = None,
        partition: str | None = None,
        partition_values: PartitionValues = None,
    ) -> Page[RecordT]:
        """Return a page of records in the order of their ids, and where the next one begins.

        A page costs the same wherever it is; concurrent inserts and deletes do not shift it.

        Args:
            filter: as in `query`.
            size: the largest number of records to return.
            after: the `next` of the page before.
            partition: the name of a partition, to read the records of one.
            partition_values: of its fields, such as `{"region": "eu"}`.
        """

        async def work(where: Where) -> Page[Document]:
            chosen = Selection(where, partition, partition_values)
            return await self.records.reads.answer(self._read_page, chosen, size, after)

        page = await self._run_verb("page", filter, work)
        return Page(self._read_all(page.items), page.next)

    async def query(
        self,
        filter: Where = None,
        *,
        sort: str | Sequence[str] | None = None,
        limit: int | None = None,
        offset: int = 0,
        partition: str | None = None,
        partition_values: PartitionValues = None,
    ) -> Records[RecordT]:
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

        async def work(where: Where) -> Records[Document]:
            chosen = Selection(where, partition, partition_values)
            return await self.records.reads.answer(self._find, chosen, sort, limit, offset)

        return self._read_all(await self._run_verb("query", filter, work))

    def __aiter__(self) -> AsyncIterator[RecordT]:
        """Iterate over all records in the order of their ids, a page at a time."""
        return self.home_loop.iterate(self._iterate())

    async def _get(self, id: str) -> Document | None:
        record = await self.records.reads.get(check_id(id))
        return None if record is None else Document(record)

    async def _exists(self, id: str) -> bool:
        return await self.records.keyspace.get(check_id(id)) is not None

    async def _iterate(self) -> AsyncGenerator[RecordT]:
        async for records in self.records.stream(Selection(None)):
            documents = self._corruption_log.read_all(Document, records)
            for each in self._read_all(documents):
                yield each

    def _read(self, document: Document) -> RecordT:
        """Return a document as what the resource's records are read as.

        Raises:
            Corrupt: it is not of their type.
        """
        if self.record_type is None:
            return cast("RecordT", document)
        return self.record_type.read(self.records.keyspace.key(document["id"]), document)

    def _read_all(self, documents: Records[Document]) -> Records[RecordT]:
        """Return documents likewise; those that are not of their type are reported and left out."""
        if self.record_type is None:
            return cast("Records[RecordT]", documents)
        return self._corruption_log.read_all(self._read, documents)

    async def _find(
        self,
        selection: Selection,
        sort: str | Sequence[str] | None,
        limit: int | None,
        offset: int,
    ) -> Records[Document]:
        keys = parse_sort(sort)
        end = _check_range(limit, offset)
        # To sort, all matches have to be read.
        records = await self.records.read(selection, limit=None if keys else end)
        found = self._corruption_log.read_all(Document, records)
        return sort_documents(found, keys)[offset:end]

    async def _find_ids(self, limit: int | None = None, offset: int = 0) -> Names:
        keys = await self.records.find_keys(_check_range(limit, offset))
        return [self.records.keyspace.name(key) for key in keys[offset:]]

    async def _read_page(
        self, selection: Selection, size: int, after: str | None
    ) -> Page[Document]:
        if type(size) is not int or not 0 < size <= _MAX_PAGE:
            raise Invalid("size", size, f"must be between 1 and {_MAX_PAGE:,}", "read page by page")
        if not (after is None or isinstance(after, str)):
            raise Invalid("after", after, "must be an id", "pass the `next` of the page before")
        records = await self.records.read(selection, after=after, limit=size)
        has_more = len(records) == size
        return Page(
            self._corruption_log.read_all(Document, records),
            self.records.keyspace.name(records[-1].key) if has_more else None,
        )


def _check_range(limit: int | None, offset: int) -> int | None:
    """Return the position after the last requested record."""
    for name, number in (("limit", limit), ("offset", offset)):
        if number is not None and (type(number) is not int or number < 0):
            raise Invalid(name, number, "must be 0 or more", "pass a whole number")
    return None if limit is None else offset + limit
