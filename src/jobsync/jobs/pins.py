"""Pins of tasks to nodes: the store that holds them, and a `Job`'s interface, which says "lock".

Each node that has created pins has one sheet, a record with all of them. Guarantees: a node's
pins change together, in one write, and never touch those of others. Pins outlive their creator:
they end when they expire, by the store's clock, or when they are removed. Each sheet is read as
it was in the store at one moment. Reading costs one listing as long as nothing has changed,
however many pins there are.

A refused registration leaves nothing half registered. The pins of a `lock_provider` are written
when it returns, in one write together with the removal of this node's earlier pins, if that was
requested; a provider that raises changes nothing. When a registration returns, its node claims
nothing that is now pinned to others.
"""

import math
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec.structs import replace

from jobsync.components import Components
from jobsync.core.arguments import check_days
from jobsync.core.clock import Mono, Wall, to_datetime
from jobsync.core.codec import check_json
from jobsync.core.pins import (
    Pin,
    check_pattern,
    in_force,
    merge,
    pattern_in_force,
    read_sheet,
    write_sheet,
)
from jobsync.errors import Conflict, Invalid, Misconfigured
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.task import Task
from jobsync.loop_calls import BlockingCall
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_existing
from jobsync.stores.paging import head_all

if TYPE_CHECKING:
    from jobsync.jobs.job_node import JobNode

__all__ = ["LockInfo", "PinStore", "Pins"]

LockInfo: TypeAlias = dict[str, Any]
"""token_id, task_id, node_pattern, node_patterns, reason, created_at, created_by, expires_at"""

_SHORTEST_VALIDITY = 0.01
_LOCK_LENGTHS = (2, 3)


class _Sheet(msgspec.Struct, frozen=True):
    """One node's pins, and the version of the record that they were read from."""

    version: str
    pins: list[Pin]


class PinStore:
    """All pins of one fleet.

    Args:
        store: holds the sheets.
        components: the clocks and the event emitter.
        keys: the fleet's keys.
        token_of: returns a task's token.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        keys: JobKeys,
        token_of: Callable[[str], int],
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._corruption_log = CorruptionLog(store.name, components.events)
        self._keys = keys
        self._token_of = token_of
        self._sheets: dict[str, _Sheet] = {}
        self._next_expiry: Mono | None = None
        self._expired: frozenset[Pin] = frozenset()

    async def now(self) -> Wall:
        """Return the time of day, by the store's clock where it has one."""
        return await self._store.now() or self._clock.wall()

    async def add(self, creator: str, pins: Sequence[Pin], *, replacing: bool = False) -> None:
        """Register pins of one node, in one write.

        Args:
            creator: the node.
            pins: its new pins.
            replacing: whether its earlier pins are removed.

        Raises:
            OutcomeUnknown: the write may have happened or not; call again.
        """
        if pins or replacing:
            await self._edit(creator, lambda old: merge([] if replacing else old, pins))

    async def remove_by(self, creator: str) -> int:
        """Remove all pins of one node; return how many."""
        return await self._edit(creator, lambda _: [])

    async def remove_all(self) -> int:
        """Remove the pins of all nodes; return how many."""
        creators = {pins[0].created_by for pins in await self._read_sheets() if pins}
        return sum([await self.remove_by(creator) for creator in sorted(creators)])

    async def list_active(self) -> list[Pin]:
        """Return the pins that are in force now."""
        found = list(chain.from_iterable(await self._read_sheets()))
        ends = [pin.expires_at for pin in found if pin.expires_at is not None]
        self._next_expiry, self._expired = None, frozenset()
        if not ends:
            return found
        now = await self.now()
        if later := [end for end in ends if end > now.seconds]:
            self._next_expiry = self._clock.mono() + (min(later) - now.seconds)
        valid = in_force(found, now)
        if len(valid) < len(found):
            self._expired = frozenset(found).difference(valid)
        return valid

    @property
    def valid_for(self) -> float:
        """For how many seconds all pins that were read last stay in force."""
        if self._next_expiry is None:
            return math.inf
        # Not 0: the store's clock may be a little behind ours.
        return max(_SHORTEST_VALIDITY, self._next_expiry - self._clock.mono())

    async def remove_expired(self) -> int:
        """Remove the pins that had expired at the last `list_active`; return how many."""
        expired, self._expired = self._expired, frozenset()
        edits = [
            await self._edit(creator, lambda old: [pin for pin in old if pin not in expired])
            for creator in sorted({pin.created_by for pin in expired})
        ]
        return sum(edits)

    async def _edit(self, creator: str, edit: Callable[[list[Pin]], Sequence[Pin]]) -> int:
        """Replace one node's pins; return how many were removed."""
        key = self._keys.pins_of(creator)
        while True:
            base = await self._store.get(key, tombstones=True)
            old = (
                [] if base is None or base.deleted else read_sheet(base.value, key, self._token_of)
            )
            new = edit(old)
            try:
                await self._write(base, key, creator, new)
            except Conflict:
                continue
            remaining = {(pin.task, pin.patterns) for pin in new}
            return sum((pin.task, pin.patterns) not in remaining for pin in old)

    async def _write(
        self, base: Record | None, key: str, creator: str, pins: Sequence[Pin]
    ) -> None:
        if pins:
            document = write_sheet(creator, pins)
            if base is None:
                await self._store.create(key, document)
            else:
                await self._store.put(base, document)
        elif base is not None and not base.deleted:
            await self._store.delete(base)

    async def _read_sheets(self) -> Iterable[list[Pin]]:
        """Return each node's pins; reads only the sheets that have changed."""
        heads = await head_all(self._store, self._keys.pins)
        versions = {head.key: head.version for head in heads}
        known = {key: sheet for key, sheet in self._sheets.items() if key in versions}
        stale = [
            key
            for key, version in versions.items()
            if key not in known or known[key].version != version
        ]
        # One sheet that cannot be read must not hide the others.
        found = await read_existing(self._store, stale, self._corruption_log.report)
        for key, record in found.items():
            known[key] = _Sheet(record.version, self._decode(record))
        self._sheets = known
        return [known[key].pins for key in versions if key in known]

    def _decode(self, record: Record) -> list[Pin]:
        def decode(record: Record) -> list[Pin]:
            return read_sheet(record.value, record.key, self._token_of)

        return self._corruption_log.read(decode, record) or []


class Pins:
    """One node's interface to pins.

    Args:
        node: this node; None if it has no fleet, and so no node to pin a task to.
        call: runs the node's coroutines.
        token_of: returns a task's token.
    """

    def __init__(
        self, node: "JobNode | None", call: BlockingCall, token_of: Callable[[str], int]
    ) -> None:
        self._node = node
        self._call = call
        self._token_of = token_of
        self._collected: list[Pin] | None = None

    def provide(self, provider: Callable[[], object] | None, *, replacing: bool) -> None:
        """Call a function that registers pins, and write them together.

        Args:
            provider: registers the pins.
            replacing: whether this node's earlier pins are removed.
        """
        collected: list[Pin] = []
        self._collected = collected
        try:
            if provider is not None:
                provider()
        finally:
            self._collected = None
        self._write(collected, replacing=replacing)

    def register(self, locks: Iterable[Sequence[Any]], expires_in_days: float | None) -> None:
        """Pin tasks, each given with its patterns and optionally a reason.

        Raises:
            Invalid: one of them is not valid; none was registered.
            Misconfigured: `locks_enabled` is False.
        """
        if self._node is not None and not self._node.settings.locks_enabled:
            raise Misconfigured(
                "locks_enabled", False, "switches pins off", "set it to True on every node"
            )
        lifetime = _check_lifetime(expires_in_days)
        pins = [self._read(index, lock, lifetime) for index, lock in enumerate(locks)]
        if self._collected is not None:
            self._collected += pins
        else:
            self._write(pins, replacing=False)

    def list_active(self) -> list[LockInfo]:
        """Return the pins of all nodes that are in force."""
        if self._node is None:
            return []
        names = self._node.names

        @cache
        def find(patterns: tuple[str, ...]) -> str:
            return pattern_in_force(patterns, names) or patterns[0]

        pins = self._call(self._node.pins.list_active())
        return [_describe(pin, find(pin.patterns)) for pin in pins]

    def remove_by(self, creator: str) -> int:
        """Remove the pins that one node has created; return how many."""
        node = self._node
        return 0 if node is None else self._remove(node, node.pins.remove_by(creator))

    def remove_all(self) -> int:
        """Remove all pins; return how many."""
        node = self._node
        return 0 if node is None else self._remove(node, node.pins.remove_all())

    def _remove(self, node: "JobNode", removing: Coroutine[Any, Any, int]) -> int:
        async def work() -> int:
            removed = await removing
            node.review_soon()
            return removed

        return int(self._call(work()))

    def _write(self, pins: Sequence[Pin], *, replacing: bool) -> None:
        node = self._node
        if node is None or not (pins or replacing):
            return

        async def work() -> None:
            now = await node.pins.now()
            dated = [_date(pin, now) for pin in pins]
            await node.pins.add(node.settings.node, dated, replacing=replacing)
            await node.withhold_pinned({pin.task: pin.token for pin in pins})

        self._call(work())

    def _read(self, index: int, lock: Sequence[Any], lifetime: float | None) -> Pin:
        """Read one registration. Its times are set when it is written."""
        if isinstance(lock, str) or len(lock) not in _LOCK_LENGTHS:
            raise Invalid(
                f"locks[{index}]", lock, "is not a lock", "pass (task_id, pattern, reason)"
            )
        task = lock[0].text if isinstance(lock[0], Task) else Task(lock[0]).text
        reason = lock[2] if len(lock) > _LOCK_LENGTHS[0] else None
        if reason is not None:
            check_json(reason := str(reason), "reason")
        return Pin(
            task=task,
            token=self._token_of(task),
            patterns=_read_patterns(lock[1]),
            reason=reason,
            expires_at=lifetime,
        )


def _read_patterns(value: Any) -> tuple[str, ...]:
    patterns = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not patterns:
        raise Invalid("node_patterns", value, "is empty", "pass at least one pattern")
    for pattern in patterns:
        _check_pattern(pattern)
    return patterns


@lru_cache(maxsize=1024)
def _check_pattern(pattern: Hashable) -> None:
    if not isinstance(pattern, str):
        raise Invalid("node_pattern", pattern, "is not text", "pass a pattern such as prod-%")
    check_pattern(pattern)
    check_json(pattern, "node_pattern")


def _check_lifetime(days: float | None) -> float | None:
    return None if days is None else check_days("expires_in_days", days)


def _date(pin: Pin, now: Wall) -> Pin:
    lifetime = pin.expires_at
    expires = None if lifetime is None else now.seconds + lifetime
    return replace(pin, created_at=now.seconds, expires_at=expires)


def _describe(pin: Pin, pattern: str) -> LockInfo:
    return {
        "token_id": pin.token,
        "task_id": pin.task,
        "node_pattern": pattern,
        "node_patterns": list(pin.patterns),
        "reason": pin.reason,
        "created_at": to_datetime(pin.created_at),
        "created_by": pin.created_by,
        "expires_at": None if pin.expires_at is None else to_datetime(pin.expires_at),
    }
