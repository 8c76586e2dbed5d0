"""Pushes of messages with priorities, groups and keys, and what becomes of them if a reply is lost.

A key whose push had an unknown outcome is remembered. While its message is pending a key protects
itself. But the message may have arrived unnoticed, and be finished when the key is pushed again. If
the content is the same, too, that is the push repeated, and nothing is added. Other content is
another message.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jobsync.errors import JobsyncError, OutcomeUnknown
from jobsync.queue.backend import NewMessage

__all__ = ["PlacedPush"]

_MAX_KEYS = 1_000

Place: TypeAlias = Callable[[Sequence[NewMessage], Sequence[bytes]], Awaitable[Mapping[str, str]]]


class _Doubt(NamedTuple):
    """A message that may or may not have arrived."""

    id: str
    payload: bytes


class PlacedPush:
    """Such pushes of this process to one queue.

    Args:
        place: adds messages; returns who holds the keys of others.
        exists: returns whether any of these messages exists, finished or not.
        find_holders: returns the ids of the messages that hold keys.
    """

    def __init__(
        self,
        place: Place,
        exists: Callable[[Sequence[str]], Awaitable[bool]],
        find_holders: Callable[[Sequence[str]], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._place = place
        self._exists = exists
        self._find_holders = find_holders
        self._doubtful: dict[str, _Doubt] = {}
        """By the latest keys."""

    async def push(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        """Add messages where they belong; if the reply is lost, look what has become of them."""
        arrived = await self._find_arrived(new_messages, payloads)
        pushed = new_messages
        if arrived:
            pairs = zip(new_messages, payloads, strict=True)
            left = [(message, payload) for message, payload in pairs if message.id not in arrived]
            new_messages, payloads = [each for each, _ in left], [each for _, each in left]
        try:
            holders = await self._place(new_messages, payloads) if new_messages else {}
        except OutcomeUnknown as unknown:
            try:
                found = await self._look_up(new_messages)
            except JobsyncError:
                # A failed check says nothing about the push.
                found = None
            if found is None:
                self._remember(new_messages, payloads)
                raise unknown from None
            holders = found
        self._settle_doubts(pushed)
        return {**arrived, **holders}

    async def _look_up(self, new_messages: Sequence[NewMessage]) -> Mapping[str, str] | None:
        """Return who holds the keys of messages that were not added; None if that is not known."""
        if not await self._exists([message.id for message in new_messages]):
            return None
        keyed = {message.key: message.id for message in new_messages if message.key is not None}
        found = await self._find_holders(list(keyed)) if keyed else {}
        holders: dict[str, str] = {}
        for key, name in keyed.items():
            # Others may hold the key of a message that was added and has been handled since.
            if found.get(key) != name and not await self._exists([name]):
                if key not in found:
                    return None
                holders[name] = found[key]
        return holders

    def _remember(self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]) -> None:
        self._doubtful |= {
            message.key: _Doubt(message.id, payload)
            for message, payload in zip(new_messages, payloads, strict=True)
            if message.key is not None
        }
        while len(self._doubtful) > _MAX_KEYS:
            del self._doubtful[next(iter(self._doubtful))]

    def _settle_doubts(self, new_messages: Sequence[NewMessage]) -> None:
        """Forget doubts about keys that are certainly held from now on."""
        if self._doubtful:
            for message in new_messages:
                self._doubtful.pop(message.key or "", None)

    async def _find_arrived(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        """Return the messages that have arrived before, by the ids of the new ones."""
        if not self._doubtful:
            return {}
        arrived: dict[str, str] = {}
        for message, payload in zip(new_messages, payloads, strict=True):
            former = self._doubtful.get(message.key) if message.key is not None else None
            # One that replaces must be handled, even if its content is the same.
            if former is None or message.replace or former.payload != payload:
                continue
            if await self._exists([former.id]):
                arrived[message.id] = former.id
        return arrived
