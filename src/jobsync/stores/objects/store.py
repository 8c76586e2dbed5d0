"""The object store: for fleets that share nothing but an S3 bucket.

Each record is one object; a change is one conditional PUT, and of several based on one
version the server applies one. The version is the object's ETag, and the nonce in the object
makes every ETag differ. A batch of history entries is one object that is created once.

Cost: a get, a change and a batch of entries are one request each; `heads` is one for each
thousand names in its range; `scan` and `read` add one for each object that they read.

Assumes what the probe checks: conditions are honoured, and a listing shows what was written
before it. A bucket is never created. Tombstones of keys that may be used again are removed only
where the server honours a condition on DELETE; elsewhere they stay, and cost storage and their
share of each listing. The age of a tombstone is by the server's clock, as the latest time seen,
so it is removed late rather than early.

Waiting ends early for writes of this process; writes of other processes are found by polling.
"""

import asyncio
from collections.abc import Sequence
from typing import Self

import msgspec

from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.filters import parse
from jobsync.core.keys import check_key, check_prefix, parent
from jobsync.core.urls import ObjectsUrl
from jobsync.errors import Corrupt, JobsyncError, OutcomeUnknown
from jobsync.stores.contract import (
    BURIAL_AGE,
    Applied,
    Change,
    Conflicted,
    Entry,
    Head,
    Outcome,
    Put,
    Record,
    Store,
    Unknown,
    Where,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.memory import LocalNotifier
from jobsync.stores.objects.bucket import (
    MAX_OBJECT,
    Bucket,
    ListedObject,
    ObjectListing,
    StoredObject,
    ThreadGroup,
)
from jobsync.stores.objects.errors import FailedRequest
from jobsync.stores.objects.layout import (
    LIVE_SIZE,
    BatchName,
    ObjectNames,
    decode_batch,
    decode_object,
    encode_batch,
    encode_object,
    is_segment,
    is_tombstone,
    read_mark,
)
from jobsync.stores.record_codec import (
    build_records,
    check_after,
    decode_entry,
    encode_entries,
    first_id_at,
)
from jobsync.stores.scan import Row, check_age, check_limit, check_listing, collect
from jobsync.stores.threads import gather_results

__all__ = ["ObjectsStore"]

_HEARTBEAT_PREFIXES = ("session/", "role/", "request/")
_READ_AHEAD = 32
"""Objects read at once with a filter, when it is unknown how many will match."""
_PAGE = 1000


class ObjectsStore(Store):
    """Records in a bucket. Create it with `connect`."""

    is_billed = True

    def __init__(
        self, url: ObjectsUrl, bucket: Bucket, components: Components, *, conditional_delete: bool
    ) -> None:
        self.name = bucket.name
        self._bucket = bucket
        self._names = ObjectNames(url.prefix)
        self.set_quirks(bare_etags=bucket.bare_etags, conditional_delete=conditional_delete)
        self._clock = components.clock
        self._ids = components.ids
        self._corruption_log = CorruptionLog(self.name, components.events)
        self._notifier = LocalNotifier.at(
            f"{url.provider}://{url.endpoint}/{url.bucket}/{url.prefix}"
        )

    @classmethod
    async def connect(
        cls,
        url: ObjectsUrl,
        components: Components | None = None,
        *,
        bare_etags: bool = False,
        conditional_delete: bool = False,
    ) -> Self:
        """Open an existing bucket; one listing checks that it exists and may be read.

        Args:
            url: the bucket and the credentials.
            components: time, randomness and events; this machine's by default.
            bare_etags: whether the server compares ETags without their quotes.
            conditional_delete: whether it honours a condition on DELETE.

        Raises:
            Misconfigured: it cannot be used as a store, with the reason and the fix.
            Unavailable: it does not answer.
        """
        components = components or Components.system()
        bucket = Bucket(url, bare_etags=bare_etags)
        store = cls(url, bucket, components, conditional_delete=conditional_delete)
        try:
            await store._list_level("session/").take(1, lambda item: item)
        except BaseException:
            bucket.close()
            raise
        return store

    def set_quirks(self, *, bare_etags: bool, conditional_delete: bool) -> None:
        """Set how the server treats conditions, for all later requests."""
        self._bucket.bare_etags = bare_etags
        self._conditional_delete = conditional_delete
        self.traits = {"bare_etags": bare_etags, "conditional_delete": conditional_delete}

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key, all at once."""
        for key in keys:
            check_key(key)
        records = [
            None if found is None else _decode(key, found)
            for key, found in zip(keys, await self._get_objects(keys), strict=True)
        ]
        return [
            None if record is None or (record.deleted and not tombstones) else record
            for record in records
        ]

    async def _get_objects(self, keys: Sequence[str]) -> list[StoredObject | None]:
        return await gather_results(
            [self._bucket.get(self._names.of_record(key), _thread_group(key)) for key in keys]
        )

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, each with its own request, all at once."""
        records, texts = build_records(changes, self._ids)
        marks = [change.mark if isinstance(change, Put) else 0 for change in changes]
        contents = [*map(encode_object, records, texts, marks)]
        replies = await gather_results([*map(self._send, changes, contents)])
        self._raise_if_all_rejected(replies)
        outcomes = [*map(_outcome, changes, records, replies)]
        self._notifier.wake(
            {parent(outcome.record.key) for outcome in outcomes if isinstance(outcome, Applied)}
        )
        return outcomes

    def _send(self, change: Change, content: bytes) -> asyncio.Future[str | FailedRequest]:
        key = change.key
        version = None if change.base is None else change.base.version
        return self._bucket.put(self._names.of_record(key), content, version, _thread_group(key))

    def _raise_if_all_rejected(self, replies: Sequence[str | FailedRequest]) -> None:
        """Raise only if nothing at all was written; else each change has its outcome."""
        rejected = [
            reply for reply in replies if isinstance(reply, FailedRequest) and reply.is_rejected
        ]
        if rejected and len(rejected) == len(replies):
            raise self._bucket.to_error(rejected[0])

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        """List keys and versions: one request for each thousand keys; none beyond `until`."""
        check_listing(prefix, after, limit, until)
        if until and until <= after:
            return []

        def pick(item: ListedObject) -> Head | None:
            if not _is_live(item):
                return None
            written_at, mark = item.modified.timestamp(), read_mark(item.size)
            return Head(prefix + item.name, item.etag, written_at, mark)

        return await self._list_level(prefix, after, until).take(limit, pick)

    def _list_level(self, prefix: str, after: str = "", until: str = "") -> ObjectListing:
        folder = self._names.folder_of_level(prefix)
        return self._bucket.list_folder(
            folder,
            _thread_group(prefix),
            after=after.removeprefix(prefix),
            until=until.removeprefix(prefix),
        )

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records: one request for each thousand keys and one for each record."""
        check_listing(prefix, after, limit)
        filter_ = parse(where)
        listing = self._list_level(prefix, after)

        def pick(item: ListedObject) -> str | None:
            return prefix + item.name if _is_live(item) else None

        async def fetch(_: str, page: int) -> list[Row]:
            rows: list[Row] = []
            # Records deleted since they were listed leave gaps; a short page would mean the end.
            while len(rows) < page and (keys := await listing.take(page - len(rows), pick)):
                objects = await self._get_objects(keys)
                rows += [
                    (key, found)
                    for key, found in zip(keys, objects, strict=True)
                    if found and not is_tombstone(found.size)
                ]
            return rows

        return await collect(
            fetch,
            _decode,
            self._corruption_log.report,
            after=after,
            limit=limit,
            where=filter_,
            read_ahead=_READ_AHEAD,
        )

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Append entries to a history, as one object. A resend must have the same entries."""
        self._names.check_stream(stream)
        batch = batch or self._ids.batch()
        encoded = encode_entries(entries, batch)
        if not encoded:
            return
        name = f"{self._names.folder_of_stream(stream)}{BatchName(batch, len(encoded))}"
        reply = await self._bucket.put(name, encode_batch(encoded), None, "work")
        # A conflict is with an earlier copy: nobody else uses this name.
        if isinstance(reply, FailedRequest) and not reply.is_conflict:
            raise self._to_error(stream, reply)
        self._notifier.wake([stream])

    def _to_error(self, place: str, failure: FailedRequest) -> JobsyncError:
        if failure.is_rejected:
            return self._bucket.to_error(failure)
        return OutcomeUnknown(place, str(failure))

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read entries: one request for each thousand batches and one for each batch read."""
        self._names.check_stream(stream)
        check_after(after)
        check_limit(limit)
        filter_ = parse(where)
        after_batch, _, after_index = after.rpartition("-")
        folder = self._names.folder_of_stream(stream)
        # The batch of that entry may have more entries: start just before it.
        listing = self._bucket.list_folder(folder, "work", after=after_batch[:-1])

        def count_left(name: BatchName) -> int:
            return name.size - (int(after_index) + 1 if name.batch == after_batch else 0)

        def pick(item: ListedObject) -> BatchName | None:
            name = BatchName.parse(item.name)
            return name if name and name.batch >= after_batch and count_left(name) > 0 else None

        async def fetch(_: str, limit: int) -> list[Row]:
            rows: list[Row] = []
            while len(rows) < limit and (
                names := await (
                    listing.take(_READ_AHEAD, pick)
                    if where
                    else listing.take(limit - len(rows), pick, count_left)
                )
            ):
                objects = await gather_results(
                    [self._bucket.get(f"{folder}{name}", "work") for name in names]
                )
                for name, found in zip(names, objects, strict=True):
                    rows += _entry_rows(stream, name, found, after)
            return rows

        return await collect(
            fetch,
            _decode_entry,
            self._corruption_log.report,
            after=after,
            limit=limit,
            where=filter_,
            read_ahead=_READ_AHEAD,
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Delete old entries of a history: two requests for each thousand batches."""
        check_age(older_than)
        self._names.check_stream(stream)
        end = first_id_at(self._clock.wall() + -older_than)
        folder = self._names.folder_of_stream(stream)
        listing = self._bucket.list_folder(folder, "work")
        deleted = 0
        while names := await listing.take(_PAGE, lambda item: BatchName.parse(item.name)):
            old = [name for name in names if name.batch < end]
            if old and (failure := await self._bucket.delete([f"{folder}{name}" for name in old])):
                raise self._to_error(stream, failure)
            deleted += sum(name.size for name in old)
            if len(old) < len(names):
                break
        return deleted

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones, where the server honours a condition on DELETE; else none."""
        check_prefix(prefix)
        check_limit(limit)
        check_age(older_than)
        if not self._conditional_delete:
            return 0

        def pick(item: ListedObject) -> ListedObject | None:
            age = (self._bucket.latest_seen - item.modified).total_seconds()
            is_old = item.size < LIVE_SIZE and age > older_than
            return item if is_old and is_segment(item.name) else None

        old = await self._list_level(prefix).take(limit, pick)
        tombstones = await self._find_tombstones([prefix + item.name for item in old])
        folder = self._names.folder_of_level(prefix)
        failures = await self._bucket.delete_unchanged(
            [(folder + item.name, item.etag) for item in old if prefix + item.name in tombstones]
        )
        for failure in failures:
            # Somebody has re-created the record, or removed the tombstone.
            if failure and not (failure.is_conflict or failure.is_absent):
                raise self._to_error(prefix, failure)
        return failures.count(None)

    async def erase_unchanged(self, record: Record) -> bool:
        """Delete one object if it still has that version; return whether the server did.

        Raises:
            Misconfigured: the server does not allow it.
            OutcomeUnknown: no definite answer came.
        """
        name = self._names.of_record(record.key)
        (failure,) = await self._bucket.delete_unchanged([(name, record.version)])
        if failure and not failure.is_refused:
            raise self._to_error(record.key, failure)
        return failure is None

    async def _find_tombstones(self, keys: Sequence[str]) -> set[str]:
        """Return the keys that are tombstones; small objects that are corrupt are reported."""
        tombstones = set()
        for key, found in zip(keys, await self._get_objects(keys), strict=True):
            try:
                if found and _decode(key, found).deleted:
                    tombstones.add(key)
            except Corrupt as corrupt:
                self._corruption_log.report(corrupt)
        return tombstones

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records unconditionally, a thousand in a request."""
        for key in keys:
            check_key(key)
        if not keys:
            return
        failure = await self._bucket.delete([self._names.of_record(key) for key in keys])
        if failure:
            raise self._to_error(keys[0], failure)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if this process changed something there. Makes no request."""
        await self._notifier.wait(topic, timeout)

    async def close(self) -> None:
        """End the threads; requests in flight end by themselves."""
        self._bucket.close()


def _thread_group(key: str) -> ThreadGroup:
    return "heartbeats" if key.startswith(_HEARTBEAT_PREFIXES) else "work"


def _is_live(item: ListedObject) -> bool:
    return not is_tombstone(item.size) and is_segment(item.name)


def _outcome(change: Change, record: Record, reply: str | FailedRequest) -> Outcome:
    if isinstance(reply, str):
        return Applied(msgspec.structs.replace(record, version=reply))
    # A name that is missing is a reason to refuse a replacement, but not a create.
    is_conflict = reply.is_conflict or (reply.is_absent and change.base is not None)
    return Conflicted() if is_conflict else Unknown(str(reply))


def _decode(key: str, found: StoredObject) -> Record:
    return decode_object(key, _content(key, found), found.etag)


def _content(key: str, found: StoredObject) -> bytes:
    if found.data is None:
        raise Corrupt(key, f"{found.size:,} bytes, more than the {MAX_OBJECT:,} that are read")
    return found.data


def _entry_rows(stream: str, name: BatchName, found: StoredObject | None, after: str) -> list[Row]:
    """Return the entries of a batch after an id; for a corrupt batch, the error."""
    if found is None:
        return []
    try:
        key = f"{stream}#{name.batch}"
        values = decode_batch(key, _content(key, found), name.size)
    except Corrupt as corrupt:
        return [(name.batch, stream, corrupt)]
    ids = [f"{name.batch}-{i:05d}" for i in range(name.size)]
    return [
        (entry_id, stream, value)
        for entry_id, value in zip(ids, values, strict=True)
        if entry_id > after
    ]


def _decode_entry(entry_id: str, stream: str, data: bytes | Corrupt) -> Entry:
    if isinstance(data, Corrupt):
        raise data
    return decode_entry(entry_id, stream, data)
