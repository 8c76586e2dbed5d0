"""Answers of earlier reads in place of requests, in a database that has a cache.

Guarantees: an answer that is given again is what the store would return, as far as writes of this
database are concerned, whichever code makes them and however reads and writes overlap. Other
writers are not noticed; the cache forgets an answer after a while.

How: the store of a database reports every write before it is sent. From then until its end no
answer that it may change is given or kept; nor is one that was asked for earlier and arrives
later. A write that may still arrive after its end, because it was cancelled or its outcome is
unknown, counts as under way for as long as a request can be delayed.

Nothing that decides reads through a cache: no write, no storage of a plugin, no message.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol, TypeVar, cast

import msgspec

from jobsync.coordination.session import count_forks
from jobsync.core.clock import Clock, Mono
from jobsync.database.keyspace import Keyspace
from jobsync.errors import Fenced, Invalid, NewerFormat, Unavailable
from jobsync.stores.contract import LATEST_ARRIVAL, Change, Outcome, Record, Store, Unknown
from jobsync.stores.decorator import StoreDecorator

__all__ = ["CachedReads", "ReadCache", "ReadGuard", "WatchedStore"]

_MAX_DEPTH = 40
"""Of arguments; a filter has less."""

T = TypeVar("T")


class ReadCache(Protocol):
    """Where answers are kept. A request is a record's key, or a listing with its arguments."""

    def covers(self, prefix: str) -> bool:
        """Whether it keeps answers about the records under a prefix."""
        ...

    def find(self, prefix: str, request: object, now: Mono) -> Any:
        """Return a copy of an answer that is young enough; None if there is none."""
        ...

    def keep(self, prefix: str, request: object, answer: object, asked_at: Mono) -> None:
        """Keep a copy of an answer, which is as old as its question."""
        ...

    def forget(self, prefix: str, keys: Collection[str]) -> None:
        """Forget the listings of a prefix, and these records."""
        ...

    def clear(self, prefix: str | None = None) -> None:
        """Forget all about a prefix, or everything."""
        ...


class _OpenRead:
    """A read whose answer has not arrived."""

    __slots__ = ("asked_at", "is_outdated", "keys", "prefix")

    def __init__(self, prefix: str, keys: frozenset[str] | None, asked_at: Mono) -> None:
        self.prefix = prefix
        self.keys = keys
        """The records that it asks for; None for a listing."""
        self.asked_at = asked_at
        self.is_outdated = False


class ReadGuard:
    """Knows which writes of a database are under way, and so which answers may be kept.

    Args:
        clock: measures the age of answers.
    """

    def __init__(self, clock: Clock) -> None:
        self.cache: ReadCache | None = None
        self._forks = count_forks()
        self._clock = clock
        self._open: set[_OpenRead] = set()
        self._writes: Counter[str] = Counter()
        """How many writes of each key are under way."""
        self._late: dict[str, Mono] = {}
        """Keys with a write that may still arrive, and until when."""
        self._unwatched = 0
        """How many writes are under way that began without a cache."""

    def attach(self, cache: ReadCache) -> None:
        """Use a cache from now on.

        Raises:
            Invalid: there is another one.
        """
        if self.cache not in (None, cache):
            fix = "use one CachePlugin, with resources=[...] for some resources only"
            raise Invalid("plugin", "cache", "is the second cache of this database", fix)
        self.cache = cache
        self._forks = count_forks()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked since the cache was attached."""
        return count_forks() != self._forks

    def detach(self) -> None:
        """Use no cache from now on."""
        self.clear()
        self.cache = None

    def clear(self, prefix: str | None = None) -> None:
        """Forget all about a prefix, or everything; also what is being read."""
        if self.cache is not None:
            self.cache.clear(prefix)
        for read in self._open:
            if prefix is None or read.prefix == prefix:
                read.is_outdated = True

    def begin_write(self, keys: Iterable[str]) -> frozenset[str] | None:
        """Forget these records, and keep nothing about them until `end_write` of the result."""
        if self.cache is None:
            self._unwatched += 1
            return None
        written = frozenset(keys)
        self._forget(self.cache, written)
        self._writes.update(written)
        return written

    def end_write(self, written: frozenset[str] | None) -> None:
        """End what `begin_write` has begun."""
        if written is None:
            self._unwatched -= 1
            return
        for key in written:
            self._writes[key] -= 1
            if not self._writes[key]:
                del self._writes[key]

    def expect_late(self, keys: Iterable[str]) -> None:
        """Keep no answers about these records for as long as a request can be delayed."""
        now = self._clock.mono()
        self._late = {key: until for key, until in self._late.items() if until > now}
        self._late.update(dict.fromkeys(keys, now + LATEST_ARRIVAL))

    def find(self, cache: ReadCache, prefix: str, request: object) -> Any:
        """Return a kept answer, or None."""
        return cache.find(prefix, request, self._clock.mono())

    @contextmanager
    def read(self, prefix: str, keys: frozenset[str] | None) -> Iterator[_OpenRead]:
        """Ask the store meanwhile, for these records or for a listing."""
        opened = _OpenRead(prefix, keys, self._clock.mono())
        opened.is_outdated = self._unwatched > 0 or self._is_in_doubt(opened)
        self._open.add(opened)
        try:
            yield opened
        finally:
            self._open.discard(opened)

    def keep(self, read: _OpenRead, request: object, answer: object) -> None:
        """Keep an answer, unless a write may have changed it."""
        if self.cache is not None and not read.is_outdated:
            self.cache.keep(read.prefix, request, answer, read.asked_at)

    def _forget(self, cache: ReadCache, keys: frozenset[str]) -> None:
        prefixes = {_prefix_of(key) for key in keys}
        for prefix in prefixes:
            if cache.covers(prefix):
                cache.forget(prefix, keys)
        for read in self._open:
            if read.prefix in prefixes and (read.keys is None or not read.keys.isdisjoint(keys)):
                read.is_outdated = True

    def _is_in_doubt(self, read: _OpenRead) -> bool:
        """Whether a write that concerns a read is under way, or may still arrive."""
        now = read.asked_at
        if read.keys is not None:
            return any(key in self._writes or self._is_late(key, now) for key in read.keys)
        doubtful = (*self._writes, *(key for key in self._late if self._is_late(key, now)))
        return any(_prefix_of(key) == read.prefix for key in doubtful)

    def _is_late(self, key: str, now: Mono) -> bool:
        return key in self._late and self._late[key] > now


def _prefix_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


class WatchedStore(StoreDecorator):
    """A store that reports its writes to a guard.

    Args:
        inner: the store that does the work.
        guard: what it reports to.
    """

    def __init__(self, inner: Store, guard: ReadGuard) -> None:
        super().__init__(inner)
        self._guard = guard

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read records by key."""
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes."""
        written = self._guard.begin_write(change.key for change in changes)
        try:
            outcomes = await self.inner.write(changes)
            if Unknown in map(type, outcomes):
                self._guard.expect_late([change.key for change in changes])
        except (Invalid, Fenced, NewerFormat, Unavailable):
            # Nothing was written.
            raise
        except BaseException:
            self._guard.expect_late([change.key for change in changes])
            raise
        finally:
            self._guard.end_write(written)
        return outcomes

    async def drop(self, keys: Sequence[str]) -> None:
        """Remove records unconditionally."""
        written = self._guard.begin_write(keys)
        try:
            await self.inner.drop(keys)
        except BaseException:
            self._guard.expect_late(keys)
            raise
        finally:
            self._guard.end_write(written)


class CachedReads:
    """The reads of one resource: from the cache, if there is one and it has the answer.

    Args:
        keyspace: where the records are.
        guard: of the database; one without a cache, for records that are never cached.
    """

    def __init__(self, keyspace: Keyspace, guard: ReadGuard) -> None:
        self._keyspace = keyspace
        self._prefix = keyspace.prefix
        self._guard = guard

    async def get(self, name: str) -> Record | None:
        """Read one record."""
        if self._find_cache() is None:
            return await self._keyspace.get(name)
        (record,) = await self.get_many([name])
        return record

    async def get_many(self, names: Sequence[str]) -> list[Record | None]:
        """Read records in the order of their names; a name may occur twice."""
        cache = self._find_cache()
        if cache is None:
            return await self._keyspace.get_many(names)
        keys = {name: self._keyspace.key(name) for name in names}
        found = {name: self._guard.find(cache, self._prefix, key) for name, key in keys.items()}
        missing = [name for name, record in found.items() if record is None]
        if missing:
            with self._guard.read(self._prefix, frozenset(keys[name] for name in missing)) as read:
                records = await self._keyspace.get_many(missing)
                for name, record in zip(missing, records, strict=True):
                    found[name] = record
                    # Of what does not exist nothing is kept: another process may create it.
                    if record is not None:
                        self._guard.keep(read, keys[name], record)
        return [found[name] for name in names]

    async def answer(self, read: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Return what a function that lists records returns for some arguments."""
        cache = self._find_cache()
        frozen = None if cache is None else _freeze(arguments)
        if cache is None or frozen is None:
            return await read(*arguments)
        request = (read.__name__, frozen)
        kept: T | None = self._guard.find(cache, self._prefix, request)
        if kept is not None:
            return kept
        with self._guard.read(self._prefix, None) as opened:
            answer = await read(*arguments)
            self._guard.keep(opened, request, answer)
        return answer

    @contextmanager
    def changing(self, names: Iterable[str]) -> Iterator[None]:
        """Keep no answers about these records meanwhile, even if nothing is written.

        A write that finds out that a record differs from what was kept raises a conflict. Its
        caller reads again, and must not get the same answer.
        """
        written = self._guard.begin_write(map(self._keyspace.key, names))
        try:
            yield
        finally:
            self._guard.end_write(written)

    def clear(self) -> None:
        """Forget all about this resource."""
        self._guard.clear(self._prefix)

    def _find_cache(self) -> ReadCache | None:
        """Return the cache, if it has to do with this resource.

        Raises:
            the error that makes the store unusable.
        """
        cache = self._guard.cache
        if cache is None or not cache.covers(self._prefix) or self._guard.is_forked:
            # A forked child asks the store, which refuses it as it does without a cache.
            return None
        # A database that has failed answers nothing, not even from the cache.
        _ = self._keyspace.store
        return cache


def _freeze(value: object, depth: int = 0) -> object:
    """Return a value that equals another one only if both mean the same; None if in doubt."""
    kind = type(value)
    if kind in {str, int, float, bool, type(None)}:
        # With its type: 1, 1.0 and True are equal, and do not mean the same.
        return (kind, value)
    parts: Iterable[Any]
    if isinstance(value, msgspec.Struct):
        parts = msgspec.structs.astuple(value)
    elif type(value) is dict:
        parts = chain.from_iterable(value.items())
    elif type(value) in {list, tuple}:
        parts = cast("Iterable[Any]", value)
    else:
        return None
    if depth == _MAX_DEPTH:
        return None
    frozen = tuple(_freeze(part, depth + 1) for part in parts)
    return None if None in frozen else (kind, frozen)
