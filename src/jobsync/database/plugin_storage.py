"""What a plugin keeps between runs: values by key, apart from other plugins' and namespaces'.

Every change is conditional in the store: of several who set with one version, or of several
who set what is absent, one does; no increment is lost. A value may have a time to live, by
the clock of the machine that set it: afterwards it reads as absent. That serves to tidy up;
what must never be held by two hangs on a lock, not on a clock.
"""

import math
import os
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

__all__ = ["PLUGINS", "PluginStorage", "Stored"]

LOCKS = "lock/"
"""Where locks are: a level for each kind of plugin and namespace."""

PLUGINS = "plugin/"
"""Where plugins keep what they keep: a level for each kind and namespace."""

_PAGE = 1000

Ttl: TypeAlias = float | timedelta | None
"""Seconds; None is for ever."""

Keys: TypeAlias = list[str]
Records: TypeAlias = list[Record]
"""In the class, `list` is a verb."""


class Stored(msgspec.Struct, frozen=True):
    """A value as it was read."""

    value: Json
    version: str
    """Names this version; see `set_if_version`."""
    expires_at: float | None
    """When it reads as absent, in seconds since 1970."""


class PluginStorage:
    """Values by key.

    Args:
        source: gives the store, or raises what keeps it from being used.
        slug: which kind of plugin.
        namespace: which of that kind.
        components: the clock by which values expire.
        attendance: gives the session that locks hang on.
        run: runs what is left to do later, while the database is connected.
    """

    def __init__(
        self,
        source: Callable[[], Store],
        slug: str,
        namespace: str,
        components: Components,
        attendance: Callable[[], SharedSession],
        run: Callable[[Work, str], object],
    ) -> None:
        prefix = f"{PLUGINS}{slug}/{namespace}/"
        self._shelf = Keyspace(source, prefix, components, f"{slug}/{namespace}")
        self._components = components
        self._clock = components.clock
        self._locks = f"{LOCKS}{slug}/{namespace}/"
        self._attendance = attendance
        self._run = run

    @property
    def level(self) -> str:
        """Where its values are."""
        return self._shelf.prefix

    async def get(self, key: str, default: Json = None) -> Json:
        """Give a value, or the default where there is none. One request."""
        found = await self.read(key)
        return default if found is None else found.value

    async def read(self, key: str) -> Stored | None:
        """Give a value with its version and its end. One request."""
        return self._understand(await self._shelf.get(_check_key(key)))

    async def set(self, key: str, value: Json, *, ttl: Ttl = None) -> str:
        """Set a value, whatever is there; give its version. Two requests."""
        wrapped = self._wrap(value, ttl)
        return (await self._shelf.put(_check_key(key), lambda _: wrapped)).version

    async def set_if_absent(self, key: str, value: Json, *, ttl: Ttl = None) -> str | None:
        """Set a value where there is none; give its version, or None if there was one.

        One request, if there never was one.
        """
        wrapped = self._wrap(value, ttl)
        name = self._shelf.key(_check_key(key))
        (outcome,) = await self._shelf.store.write([Put(name, wrapped)])
        if not isinstance(outcome, Conflicted):
            return unwrap(outcome, self._shelf.title(key)).version
        return await self._set_where(key, wrapped, lambda found: found is None)

    async def set_if_version(
        self, key: str, value: Json, version: str, *, ttl: Ttl = None
    ) -> str | None:
        """Set a value where that version stands; give the new one, or None. Two requests."""
        return await self._set_where(
            _check_key(key),
            self._wrap(value, ttl),
            lambda found: found is not None and found.version == version,
        )

    async def increment(self, key: str, by: float = 1) -> float:
        """Add to a number, which is 0 where there is none; give the sum.

        Its end stays as it is.

        Raises:
            Invalid: the value is no number, or what is added is none.
        """
        _check_number("by", by, "write 1")
        total: float = by

        def decide(current: Record | None) -> Json:
            nonlocal total
            found = self._understand(current)
            if found is None:
                total = by
                return self._wrap(by, None)
            if isinstance(found.value, bool) or not isinstance(found.value, int | float):
                raise Invalid(key, found.value, "is not a number", "set one first")
            total = found.value + by
            return {"value": total, "expires_at": found.expires_at}

        await self._shelf.put(_check_key(key), decide)
        return total

    async def delete(self, key: str) -> bool:
        """Remove a value; say whether there was one."""
        there = False

        def decide(current: Record | None) -> Disposition:
            nonlocal there
            there = self._understand(current) is not None
            return Disposition.REMOVE

        await self._shelf.change(_check_key(key), decide)
        return there

    async def list(self, prefix: str = "") -> Keys:
        """Give the keys that begin so and have a value, in order."""
        _check_key(prefix)
        now = self._clock.wall().seconds
        lasting: Where = {"$or": [{"expires_at": None}, {"expires_at": {"$gt": now}}]}
        keys = [self._shelf.name(record.key) async for record in self._scan(lasting)]
        return [key for key in keys if key.startswith(prefix)]

    @asynccontextmanager
    async def lock(self, name: str, *, timeout: float | None = None) -> AsyncIterator[Lock]:
        """Hold a lock for a block. It hangs on this process's session: a crash frees it.

        Args:
            name: which lock, of this plugin and namespace.
            timeout: seconds to wait for whoever has it; for ever by default.

        Raises:
            TimeoutError: somebody had it for so long.
            Unavailable: the store does not answer.
        """
        key = f"{self._locks}{escape(_check_key(name), 'name')}"
        if timeout is not None:
            _check_number("timeout", timeout, "write 60, or nothing to wait for ever")
        attendance = self._attendance()
        sources = Sources.load(os.environ, Path.cwd())
        settings = resolve(CoordinatorSettings, {}, sources).value
        membership = await attendance.enter(settings, at_any_pace=True)
        try:
            store, components = self._shelf.store, self._components
            async with hold_lock(membership, store, components, key, timeout, self._run) as held:
                yield held
        finally:
            await attendance.leave()

    async def sweep(self) -> int:
        """Remove what has expired; count it. Harmless at any time, for anybody."""
        now = self._clock.wall().seconds
        removed = 0
        page: Records = []
        async for record in self._scan({"expires_at": {"$lte": now}}):
            page.append(record)
            if len(page) == _PAGE:
                removed += await self._remove(page)
                page = []
        return removed + await self._remove(page)

    async def _remove(self, records: Records) -> int:
        # In place of the very version that has expired: one that was renewed stays.
        outcomes = await self._shelf.store.write([record.delete() for record in records])
        return sum(isinstance(outcome, Applied) for outcome in outcomes)

    async def _scan(self, where: Where) -> AsyncIterator[Record]:
        after = ""
        while True:
            records = await self._shelf.store.scan(
                self._shelf.prefix, after=after, limit=_PAGE, where=where
            )
            for record in records:
                yield record
            if len(records) < _PAGE:
                return
            after = records[-1].key

    async def _set_where(
        self, key: str, wrapped: Json, holds: Callable[[Stored | None], bool]
    ) -> str | None:
        held = False

        def decide(current: Record | None) -> Json | Disposition:
            nonlocal held
            held = holds(self._understand(current))
            return wrapped if held else Disposition.KEEP

        left = await self._shelf.change(key, decide)
        return left.version if held and left is not None else None

    def _wrap(self, value: Json, ttl: Ttl) -> Json:
        if ttl is None:
            return {"value": value, "expires_at": None}
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        if not (type(seconds) in {int, float} and 0 < seconds < math.inf):
            raise Invalid("ttl", ttl, "is not a number of seconds above 0", "write 3600")
        return {"value": value, "expires_at": self._clock.wall().seconds + seconds}

    def _understand(self, record: Record | None) -> Stored | None:
        """Read a record; what has expired is absent."""
        if record is None:
            return None
        try:
            value, expires_at = record.value["value"], record.value["expires_at"]
        except (TypeError, KeyError) as error:
            raise Corrupt(record.key, "not what a plugin stores") from error
        if expires_at is not None and expires_at <= self._clock.wall().seconds:
            return None
        return Stored(value, record.version, expires_at)


def _check_key(key: Any) -> str:
    if not isinstance(key, str):
        raise Invalid("key", key, f"{type(key).__name__} is not text", "use str(key)")
    return key


def _check_number(name: str, value: Any, fix: str) -> None:
    if type(value) not in {int, float} or not math.isfinite(value):
        raise Invalid(name, value, "is not a number", fix)
