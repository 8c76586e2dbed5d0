"""What a plugin stores between runs: values by key, separate for each plugin and namespace.

Every change is conditional in the store: of several writers that set the same version, or an
absent key, one succeeds; no increment is lost. A value may have a time to live, by the clock of
the machine that set it, after which it reads as absent. That is for cleaning up only: what two
processes must never hold at once needs a lock, not a clock.
"""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.codec import Json
from jobsync.core.keys import escape
from jobsync.database.home_loop import HomeLoop, on_home_loop
from jobsync.database.keyspace import Disposition, Keyspace
from jobsync.database.locks import Lock, hold_lock
from jobsync.database.shared_session import SharedSession
from jobsync.database.supervisor import Work
from jobsync.errors import Corrupt, Invalid
from jobsync.settings import Sources, resolve
from jobsync.stores.contract import (
    Applied,
    Conflicted,
    Put,
    Record,
    Store,
    Where,
    unwrap,
)
from jobsync.stores.paging import scan_pages

__all__ = ["PLUGINS", "PluginStorage", "StoredValue"]

LOCKS = "lock/"
"""The prefix of locks; each kind of plugin and namespace has a level below it."""

PLUGINS = "plugin/"
"""The prefix of values; each kind of plugin and namespace has a level below it."""

Ttl: TypeAlias = float | timedelta | None
"""Seconds; None for no limit."""

# In the class, `list` is a verb.
_Keys: TypeAlias = list[str]
_Records: TypeAlias = list[Record]

_LARGEST = sys.float_info.max
"""A whole number may be larger, and then it cannot be added to a time."""


class StoredValue(msgspec.Struct, frozen=True):
    """A value that was read."""

    value: Json
    version: str
    """Identifies this version; see `set_if_version`."""
    expires_at: float | None
    """When it reads as absent, in seconds since 1970."""


@on_home_loop
class PluginStorage:
    """Values by key, of one kind of plugin in one namespace.

    Args:
        get_store: returns the store, or raises why it cannot be used.
        slug: the kind of plugin.
        namespace: of the plugin.
        components: the clock by which values expire.
        get_session: returns the session that locks depend on.
        run: runs work in the background while the database is connected.
        home_loop: the event loop of the database.
    """

    def __init__(
        self,
        get_store: Callable[[], Store],
        slug: str,
        namespace: str,
        components: Components,
        get_session: Callable[[], SharedSession],
        run: Callable[[Work, str], object],
        home_loop: HomeLoop,
    ) -> None:
        self.home_loop = home_loop
        prefix = f"{PLUGINS}{slug}/{namespace}/"
        self._keyspace = Keyspace(get_store, prefix, components, f"{slug}/{namespace}")
        self._components = components
        self._clock = components.clock
        self._lock_prefix = f"{LOCKS}{slug}/{namespace}/"
        self._get_session = get_session
        self._run = run

    @property
    def prefix(self) -> str:
        """The prefix of its values."""
        return self._keyspace.prefix

    async def get(self, key: str, default: Json = None) -> Json:
        """Return a value, or the default if there is none. One request."""
        found = await self.read(key)
        return default if found is None else found.value

    async def read(self, key: str) -> StoredValue | None:
        """Return a value with its version and expiry. One request."""
        return self._decode(await self._keyspace.get(_check_key(key)))

    async def set(self, key: str, value: Json, *, ttl: Ttl = None) -> str:
        """Set a value unconditionally; return its version. Two requests."""
        wrapped = self._wrap(value, ttl)
        return (await self._keyspace.put(_check_key(key), lambda _: wrapped)).version

    async def set_if_absent(self, key: str, value: Json, *, ttl: Ttl = None) -> str | None:
        """Set a value if there is none; return its version, or None if there was one.

        One request, if the key was never used.
        """
        wrapped = self._wrap(value, ttl)
        name = self._keyspace.key(_check_key(key))
        (outcome,) = await self._keyspace.store.write([Put(name, wrapped)])
        if not isinstance(outcome, Conflicted):
            return unwrap(outcome, self._keyspace.title(key)).version
        return await self._set_if(key, wrapped, lambda found: found is None)

    async def set_if_version(
        self, key: str, value: Json, version: str, *, ttl: Ttl = None
    ) -> str | None:
        """Replace this version of a value; return the new version, or None. Two requests."""
        return await self._set_if(
            _check_key(key),
            self._wrap(value, ttl),
            lambda found: found is not None and found.version == version,
        )

    async def increment(self, key: str, by: float = 1) -> float:
        """Add to a number, which starts at 0; return the sum. Its expiry does not change.

        Raises:
            Invalid: the value or the summand is not a number.
        """
        _check_number("by", by, "write 1")
        total: float = by

        def decide(current: Record | None) -> Json:
            nonlocal total
            found = self._decode(current)
            if found is None:
                total = by
                return self._wrap(by, None)
            if isinstance(found.value, bool) or not isinstance(found.value, int | float):
                raise Invalid(key, found.value, "is not a number", "set one first")
            total = found.value + by
            return {"value": total, "expires_at": found.expires_at}

        await self._keyspace.put(_check_key(key), decide)
        return total

    async def delete(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        existed = False

        def decide(current: Record | None) -> Disposition:
            nonlocal existed
            existed = self._decode(current) is not None
            return Disposition.REMOVE

        await self._keyspace.change(_check_key(key), decide)
        return existed

    async def list(self, prefix: str = "") -> _Keys:
        """Return the keys with this prefix that have a value, in order."""
        _check_key(prefix)
        now = self._clock.wall().seconds
        unexpired: Where = {"$or": [{"expires_at": None}, {"expires_at": {"$gt": now}}]}
        pages = self._scan(unexpired)
        keys = [self._keyspace.name(record.key) async for records in pages for record in records]
        return [key for key in keys if key.startswith(prefix)]

    @asynccontextmanager
    async def lock(self, name: str, *, timeout: float | None = None) -> AsyncIterator[Lock]:
        """Hold a lock for a block. It depends on this process's session: a crash frees it.

        Args:
            name: of the lock, in this plugin and namespace.
            timeout: seconds to wait for its holder; no limit by default.

        Raises:
            TimeoutError: others held it for that long.
            Unavailable: the store does not answer.
        """
        key = f"{self._lock_prefix}{escape(_check_key(name), 'name')}"
        if timeout is not None:
            _check_number("timeout", timeout, "write 60, or None to wait without a limit")
        session = self._get_session()
        sources = Sources.load(os.environ, Path.cwd())
        settings = resolve(CoordinatorSettings, {}, sources).value
        membership = await session.join(settings, accept_other_timing=True)
        try:
            store, components = self._keyspace.store, self._components
            async with hold_lock(membership, store, components, key, timeout, self._run) as lock:
                yield lock
        finally:
            await session.leave()

    async def sweep(self) -> int:
        """Remove expired values; return how many. Safe at any time, in any process."""
        now = self._clock.wall().seconds
        expired = self._scan({"expires_at": {"$lte": now}})
        return sum([await self._remove(records) async for records in expired])

    async def _remove(self, records: _Records) -> int:
        # Deletes exactly the version that has expired: a renewed value stays.
        outcomes = await self._keyspace.store.write([record.delete() for record in records])
        return sum(isinstance(outcome, Applied) for outcome in outcomes)

    def _scan(self, where: Where) -> AsyncIterator[_Records]:
        return scan_pages(self._keyspace.store, self._keyspace.prefix, where=where)

    async def _set_if(
        self, key: str, wrapped: Json, condition: Callable[[StoredValue | None], bool]
    ) -> str | None:
        is_met = False

        def decide(current: Record | None) -> Json | Disposition:
            nonlocal is_met
            is_met = condition(self._decode(current))
            return wrapped if is_met else Disposition.KEEP

        record = await self._keyspace.change(key, decide)
        return record.version if is_met and record is not None else None

    def _wrap(self, value: Json, ttl: Ttl) -> Json:
        if ttl is None:
            return {"value": value, "expires_at": None}
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        if not (type(seconds) in {int, float} and 0 < seconds <= _LARGEST):
            raise Invalid("ttl", ttl, "must be a number of seconds above 0", "write 3600")
        return {"value": value, "expires_at": self._clock.wall().seconds + seconds}

    def _decode(self, record: Record | None) -> StoredValue | None:
        """Return the value of a record; None if it has expired."""
        if record is None:
            return None
        try:
            value, expires_at = record.value["value"], record.value["expires_at"]
        except (TypeError, KeyError) as error:
            raise Corrupt(record.key, "not a plugin's value") from error
        if not (expires_at is None or type(expires_at) in {int, float}):
            raise Corrupt(record.key, "not a plugin's value")
        if expires_at is not None and expires_at <= self._clock.wall().seconds:
            return None
        return StoredValue(value, record.version, expires_at)


def _check_key(key: Any) -> str:
    if not isinstance(key, str):
        raise Invalid("key", key, "must be text", "use str(key)")
    return key


def _check_number(name: str, value: Any, fix: str) -> None:
    if type(value) not in {int, float} or not abs(value) <= _LARGEST:
        raise Invalid(name, value, "must be a number", fix)
