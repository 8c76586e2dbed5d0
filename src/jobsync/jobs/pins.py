"""Pinning tasks to nodes, in the words of a `Job`, where a pin is called a lock.

Promises: what is refused leaves nothing half registered. What a `lock_provider` registers
is written when it returns, in one write together with the removal of this node's earlier
pins, if that was asked for; a provider that raises leaves everything as it was.
"""

import datetime as dt
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol, TypeAlias

from msgspec.structs import replace

from jobsync.core.clock import Wall
from jobsync.core.codec import check_json
from jobsync.core.pins import Pin, check_pattern, pattern_in_force
from jobsync.errors import Invalid, Misconfigured
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.task import Task

__all__ = ["LockInfo", "Pins"]

LockInfo: TypeAlias = dict[str, Any]
"""token_id, task_id, node_pattern, node_patterns, reason, created_at, created_by, expires_at"""

_DAY = 86_400
_SHAPES = (2, 3)


class BlockingCall(Protocol):
    """Runs a coroutine elsewhere and waits for it."""

    def __call__(self, work: Any, /) -> Any:
        """Wait for it."""
        ...


class Pins:
    """What one node does about pins.

    Args:
        node: this node; None, if it has no fleet: then there is nobody to pin a task to.
        call: runs what the node does.
        token_of: gives a task's token.
    """

    def __init__(
        self, node: JobNode | None, call: BlockingCall, token_of: Callable[[str], int]
    ) -> None:
        self._node = node
        self._call = call
        self._token_of = token_of
        self._collected: list[Pin] | None = None

    def provide(self, provider: Callable[[], object] | None, *, replacing: bool) -> None:
        """Let a function register pins, and write them together.

        Args:
            provider: registers them.
            replacing: whether the pins go that this node has made before.
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
        """Pin tasks, given with patterns and, if there is one, a reason.

        Raises:
            Invalid: names what is wrong with which of them; none was registered.
            Misconfigured: `locks_enabled` is False.
        """
        if self._node is not None and not self._node.settings.locks_enabled:
            raise Misconfigured(
                "locks_enabled", False, "pins are switched off", "set it to True on every node"
            )
        lifetime = _check_lifetime(expires_in_days)
        pins = [self._read(place, lock, lifetime) for place, lock in enumerate(locks)]
        if self._collected is not None:
            self._collected += pins
        else:
            self._write(pins, replacing=False)

    def listed(self) -> list[LockInfo]:
        """Give the pins of all nodes that are in force."""
        if self._node is None:
            return []
        names = self._node.names

        @cache
        def find(patterns: tuple[str, ...]) -> str:
            return pattern_in_force(patterns, names) or patterns[0]

        return [_describe(pin, find(pin.patterns)) for pin in self._call(self._node.pins.pins())]

    def remove_by(self, creator: str) -> int:
        """Remove the pins that one node has made; count them."""
        return 0 if self._node is None else self._call(self._node.pins.remove_by(creator))

    def remove_all(self) -> int:
        """Remove all pins; count them."""
        return 0 if self._node is None else self._call(self._node.pins.remove_all())

    def _write(self, pins: Sequence[Pin], *, replacing: bool) -> None:
        node = self._node
        if node is None or not (pins or replacing):
            return

        async def work() -> None:
            now = await node.pins.now()
            dated = [_date(pin, now) for pin in pins]
            await node.pins.add(node.settings.node, dated, replacing=replacing)

        self._call(work())

    def _read(self, place: int, lock: Sequence[Any], lifetime: float | None) -> Pin:
        """Understand one registration. Its times are counted from when it is written."""
        if isinstance(lock, str) or len(lock) not in _SHAPES:
            raise Invalid(f"locks[{place}]", lock, "is no lock", "give (task_id, pattern, reason)")
        task = lock[0].text if isinstance(lock[0], Task) else Task(lock[0]).text
        reason = lock[2] if len(lock) > _SHAPES[0] else None
        if reason is not None:
            check_json(reason := str(reason), "reason")
        return Pin(
            task=task,
            token=self._token_of(task),
            patterns=_read_patterns(lock[1]),
            reason=reason,
            expires_at=lifetime,
        )


def _read_patterns(given: Any) -> tuple[str, ...]:
    patterns = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not patterns:
        raise Invalid("node_patterns", given, "names no node", "give at least one pattern")
    for pattern in patterns:
        _check(pattern)
    return patterns


@lru_cache(maxsize=1024)
def _check(pattern: Hashable) -> None:
    if not isinstance(pattern, str):
        raise Invalid("node_pattern", pattern, "is no pattern", "give text, such as prod-%")
    check_pattern(pattern)
    check_json(pattern, "node_pattern")


def _check_lifetime(days: float | None) -> float | None:
    if days is None:
        return None
    if not 0 < days < math.inf:
        raise Invalid("expires_in_days", days, "is no lifetime", "give days above 0, or None")
    return days * _DAY


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
        "created_at": _instant(pin.created_at),
        "created_by": pin.created_by,
        "expires_at": None if pin.expires_at is None else _instant(pin.expires_at),
    }


def _instant(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
