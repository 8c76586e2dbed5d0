"""Records in a bucket: for fleets that share nothing but an object store.

Each record is one object; a change is one conditional PUT, and of several based on one
version the server carries out one. The version is the object's ETag, and the nonce in the
object makes every ETag differ. A batch of history is one object that is created once.

What it costs: a get, a change, a batch of lines are one request each; `heads` is one for
each thousand names; `scan` and `read` add one for each object that they read.

Assumes what the probe proves: conditions are honoured, a listing shows what was written
before. A bucket is never created. Tombstones of names that may be used again are removed
only where the server honours a condition on DELETE; elsewhere they stay, which costs
their storage and their share of each listing. Tombstones grow old by the server's clock,
of which only the latest moment seen is trusted: burial is late rather than early.

Waiting ends early for what this process writes; across processes, polling is the truth.
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
    Record,
    Store,
    Unknown,
    Where,
)
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.history import check_after, entry_of, first_id, lines_of
from jobsync.stores.local_notify import LocalNotifier
from jobsync.stores.metered import Tariff
from jobsync.stores.objects.bucket import (
    MAX_OBJECT,
    Body,
    Bucket,
    Lane,
    Listed,
    ObjectListing,
)
from jobsync.stores.objects.errors import Refusal
from jobsync.stores.objects.layout import BatchName, Naming, is_segment
from jobsync.stores.paging import Row, check_age, check_page, check_span, collect
from jobsync.stores.record_codec import (
    LIVE_SIZE,
    draft,
    unwrap,
    unwrap_lines,
    wrap,
    wrap_lines,
)
from jobsync.stores.threads import together

__all__ = ["S3_TARIFF", "ObjectsStore"]

_WRITE = _LIST = 5e-6
_READ = 0.4e-6

S3_TARIFF = Tariff(
    requests={"get": (0, 1), "write": (0, 1), "scan": (1, 1), "read": (1, 1), "bury": (1, 2)},
    dollars={
        "get": (0, _READ),
        "write": (0, _WRITE),
        "heads": (_WRITE, 0),
        "scan": (_WRITE, _READ),
        "append": (_WRITE, 0),
        "read": (_WRITE, _READ),
        "discard": (_WRITE, 0),
        "bury": (_WRITE, _READ),
    },
)
"""What Amazon takes in its cheapest regions, where a listing costs as much as a write.

Deletes are free. The listing of a scan is priced as one more read.
"""

_BEATS = ("session/", "role/", "request/")
# With a filter nobody knows how many will match: so many are read at once, and no more.
_READ_AHEAD = 32
_PAGE = 1000


class ObjectsStore(Store):
    """Records in a bucket. Make it with `connect`."""

    is_billed = True

    def __init__(
        self, url: ObjectsUrl, bucket: Bucket, components: Components, *, conditional_delete: bool
    ) -> None:
        self.name = bucket.name
        self._bucket = bucket
        self._naming = Naming(url.prefix)
        self._conditional_delete = conditional_delete
        self.traits = {
            "bare_etags": bucket.bare_etags,
            "conditional_delete": conditional_delete,
        }
        self._clock = components.clock
        self._ids = components.ids
        self._witness = CorruptionLog(self.name, components.events)
        self._topics = LocalNotifier.at(
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
        """Open a bucket that is there: one listing proves it, and that we may look.

        Args:
            url: where it is.
            components: time, randomness and events; this machine's by default.
            bare_etags: whether the server compares ETags without their quotes.
            conditional_delete: whether it honours a condition on DELETE.

        Raises:
            Misconfigured: it cannot serve as a store, with the reason and the fix.
            Unavailable: it does not answer.
        """
        components = components or Components.system()
        bucket = Bucket(url, bare_etags=bare_etags)
        store = cls(url, bucket, components, conditional_delete=conditional_delete)
        try:
            await store._level("session/").take(1, lambda one: one)
        except BaseException:
            bucket.close()
            raise
        return store

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by name, all at once."""
        for key in keys:
            check_key(key)
        records = [
            None if body is None else _revive(key, body)
            for key, body in zip(keys, await self._bodies(keys), strict=True)
        ]
        return [
            None if record is None or (record.deleted and not tombstones) else record
            for record in records
        ]

    async def _bodies(self, keys: Sequence[str]) -> list[Body | None]:
        return await together(
            [self._bucket.get(self._naming.record(key), _lane(key)) for key in keys]
        )

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make changes, each by a request of its own, all at once."""
        records, texts = draft(changes, self._ids)
        bodies = [*map(wrap, records, texts)]
        replies = await together([*map(self._send, changes, bodies)])
        self._raise_if_certain(replies)
        outcomes = [*map(_judge, records, replies)]
        self._topics.wake(
            {parent(done.record.key) for done in outcomes if isinstance(done, Applied)}
        )
        return outcomes

    def _send(self, change: Change, body: bytes) -> asyncio.Future[str | Refusal]:
        key = change.key
        version = None if change.base is None else change.base.version
        return self._bucket.put(self._naming.record(key), body, version, _lane(key))

    def _raise_if_certain(self, replies: Sequence[str | Refusal]) -> None:
        """Raise only if nothing at all was written; else each change has its outcome."""
        refusals = [reply for reply in replies if isinstance(reply, Refusal) and reply.harmless]
        if refusals and len(refusals) == len(replies):
            raise self._bucket.explain(refusals[0])

    async def heads(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Head]:
        """List names and versions: one request for each thousand names."""
        check_span(prefix, after, limit)

        def pick(one: Listed) -> Head | None:
            return Head(prefix + one.name, one.etag) if _is_live(one) else None

        return await self._level(prefix, after).take(limit, pick)

    def _level(self, prefix: str, after: str = "") -> ObjectListing:
        folder = self._naming.level(prefix)
        return self._bucket.browse(folder, _lane(prefix), after=after.removeprefix(prefix))

    async def scan(
        self, prefix: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Record]:
        """List records: one request for each thousand names and one for each record."""
        check_span(prefix, after, limit)
        wanted = parse(where)
        listing = self._level(prefix, after)

        def pick(one: Listed) -> str | None:
            return prefix + one.name if _is_live(one) else None

        async def fetch(_: str, page: int) -> list[Row]:
            rows: list[Row] = []
            # What vanished since it was listed leaves a gap; a short page would mean the end.
            while len(rows) < page and (keys := await listing.take(page - len(rows), pick)):
                bodies = await self._bodies(keys)
                rows += [(key, body) for key, body in zip(keys, bodies, strict=True) if body]
            return rows

        return await collect(
            fetch,
            _revive,
            self._witness.report,
            after=after,
            limit=limit,
            where=wanted,
            ahead=_READ_AHEAD,
        )

    async def append(self, stream: str, entries: Sequence[Json], *, batch: str = "") -> None:
        """Add lines to a history, as one object. Sent again, it must have the same lines."""
        self._naming.check_stream(stream)
        batch = batch or self._ids.batch()
        lines = lines_of(entries, batch)
        if not lines:
            return
        name = f"{self._naming.stream(stream)}{BatchName(batch, len(lines))}"
        reply = await self._bucket.put(name, wrap_lines(lines), None, "work")
        # A conflict is with ourselves: nobody else has this name.
        if isinstance(reply, Refusal) and not reply.conflict:
            raise self._trouble(stream, reply)
        self._topics.wake([stream])

    def _trouble(self, place: str, refusal: Refusal) -> JobsyncError:
        if refusal.harmless:
            return self._bucket.explain(refusal)
        return OutcomeUnknown(place, str(refusal))

    async def read(
        self, stream: str, *, after: str = "", limit: int = 1000, where: Where = None
    ) -> list[Entry]:
        """Read history: one request for each thousand batches and one for each that is read."""
        self._naming.check_stream(stream)
        check_after(after)
        check_page(limit)
        wanted = parse(where)
        begun, _, seen = after.rpartition("-")
        folder = self._naming.stream(stream)
        # The batch of that line may have more of them: go on just before it.
        listing = self._bucket.browse(folder, "work", after=begun[:-1])

        def left(name: BatchName) -> int:
            return name.lines - (int(seen) + 1 if name.batch == begun else 0)

        def pick(one: Listed) -> BatchName | None:
            name = BatchName.parse(one.name)
            return name if name and name.batch >= begun and left(name) > 0 else None

        async def fetch(_: str, limit: int) -> list[Row]:
            rows: list[Row] = []
            while len(rows) < limit and (
                names := await (
                    listing.take(_READ_AHEAD, pick)
                    if where
                    else listing.take(limit - len(rows), pick, left)
                )
            ):
                bodies = await together(
                    [self._bucket.get(f"{folder}{name}", "work") for name in names]
                )
                for name, body in zip(names, bodies, strict=True):
                    rows += _lines(stream, name, body, after)
            return rows

        return await collect(
            fetch,
            _entry,
            self._witness.report,
            after=after,
            limit=limit,
            where=wanted,
            ahead=_READ_AHEAD,
        )

    async def discard(self, stream: str, *, older_than: float) -> int:
        """Forget old lines of a history: two requests for each thousand batches."""
        check_age(older_than)
        self._naming.check_stream(stream)
        end = first_id(self._clock.wall() + -older_than)
        folder = self._naming.stream(stream)
        listing = self._bucket.browse(folder, "work")
        gone = 0
        while names := await listing.take(_PAGE, lambda one: BatchName.parse(one.name)):
            old = [name for name in names if name.batch < end]
            if old and (refusal := await self._bucket.delete([f"{folder}{name}" for name in old])):
                raise self._trouble(stream, refusal)
            gone += sum(name.lines for name in old)
            if len(old) < len(names):
                break
        return gone

    async def bury(self, prefix: str, *, older_than: float = BURIAL_AGE, limit: int = 1000) -> int:
        """Remove old tombstones, where the server honours a condition on DELETE; else none."""
        check_prefix(prefix)
        check_page(limit)
        check_age(older_than)
        if not self._conditional_delete:
            return 0

        def pick(one: Listed) -> Listed | None:
            age = (self._bucket.newest - one.modified).total_seconds()
            old = one.size < LIVE_SIZE and age > older_than
            return one if old and is_segment(one.name) else None

        doomed = await self._level(prefix).take(limit, pick)
        readable = await self._readable_tombstones([prefix + one.name for one in doomed])
        folder = self._naming.level(prefix)
        refusals = await self._bucket.delete_unchanged(
            [(folder + one.name, one.etag) for one in doomed if prefix + one.name in readable]
        )
        for refusal in refusals:
            # A conflict: somebody brought the record back, or buried it, in the meantime.
            if refusal and not refusal.conflict:
                raise self._trouble(prefix, refusal)
        return refusals.count(None)

    async def erase_unchanged(self, record: Record) -> bool:
        """Delete one object if it still has that version; say whether the server did."""
        name = self._naming.record(record.key)
        (refusal,) = await self._bucket.delete_unchanged([(name, record.version)])
        return refusal is None

    async def _readable_tombstones(self, keys: Sequence[str]) -> set[str]:
        """Tell tombstones from what is as small and nobody understands: that stays."""
        found = set()
        for key, body in zip(keys, await self._bodies(keys), strict=True):
            try:
                if body and _revive(key, body).deleted:
                    found.add(key)
            except Corrupt as corrupt:
                self._witness.report(corrupt)
        return found

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records for good, a thousand in a request."""
        for key in keys:
            check_key(key)
        if not keys:
            return
        refusal = await self._bucket.delete([self._naming.record(key) for key in keys])
        if refusal:
            raise self._trouble(keys[0], refusal)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if this process changed something there. Asks the server nothing."""
        await self._topics.wait(topic, timeout)

    async def close(self) -> None:
        """Let go of the threads; requests under way end by themselves."""
        self._bucket.close()


def _lane(key: str) -> Lane:
    return "beats" if key.startswith(_BEATS) else "work"


def _is_live(one: Listed) -> bool:
    return one.size >= LIVE_SIZE and is_segment(one.name)


def _judge(record: Record, reply: str | Refusal) -> Outcome:
    """Say what became of the change that would leave a record."""
    if isinstance(reply, str):
        return Applied(msgspec.structs.replace(record, version=reply))
    return Conflicted() if reply.conflict else Unknown(str(reply))


def _revive(key: str, body: Body) -> Record:
    return unwrap(key, _data(key, body), body.etag)


def _data(key: str, body: Body) -> bytes:
    if body.data is None:
        raise Corrupt(key, f"{body.size:,} bytes, where {MAX_OBJECT:,} are the most ever read")
    return body.data


def _lines(stream: str, name: BatchName, body: Body | None, after: str) -> list[Row]:
    """Give the lines of a batch behind an id; for a batch that cannot be read, the reason."""
    if body is None:
        return []
    try:
        key = f"{stream}#{name.batch}"
        values = unwrap_lines(key, _data(key, body), name.lines)
    except Corrupt as corrupt:
        return [(name.batch, stream, corrupt)]
    ids = [f"{name.batch}-{i:05d}" for i in range(name.lines)]
    return [
        (line_id, stream, value)
        for line_id, value in zip(ids, values, strict=True)
        if line_id > after
    ]


def _entry(line_id: str, stream: str, data: bytes | Corrupt) -> Entry:
    if isinstance(data, Corrupt):
        raise data
    return entry_of(line_id, stream, data)
