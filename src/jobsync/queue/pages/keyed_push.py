"""Pushes of messages with keys to queues in pages: the record of the key first, then the page.

A new key costs a read of its record, its write, and the page. If another message holds the key, a
read of the record and one of its page. See `keys` for what happens if a push stops half-way.

A push whose page may or may not have been created is remembered. While its message is pending, the
key protects itself. But the message may have arrived unnoticed, and be finished when the key is
pushed again.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from jobsync.components import Components
from jobsync.core.clock import Mono, Seconds
from jobsync.core.codec import Json
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Corrupt, OutcomeUnknown, Unavailable
from jobsync.queue.backend import NewMessage
from jobsync.queue.pages import changes, key_changes
from jobsync.queue.pages.changes import SHORT_DELAY
from jobsync.queue.pages.control import QueueControl
from jobsync.queue.pages.keys import FoundKey, KeyRecord, PageKeys
from jobsync.queue.pages.moves import PageMoves
from jobsync.queue.pages.page import (
    LIVE_LANE,
    KeyHold,
    QueuePage,
    read_due,
    read_priority,
)
from jobsync.queue.pages.page_store import PageStore

__all__ = ["KeyedPush"]

_MAX_TRIES = 50
_MAX_KEYS = 1_000
"""Keys whose pushes are in doubt."""
_MAX_DOUBTS = 4
"""Pushes in doubt of one key."""
_TOLERANCE: Seconds = 1.0
"""Seconds by which the name of a page may be later than its message."""
_BACKOFF = ExponentialBackoff(first=0.02, longest=0.5)


class _DoubtfulPush(NamedTuple):
    """A message that may or may not have arrived."""

    id: str
    value: Json
    place: str
    birth: str


class KeyedPush:
    """Such pushes of this process to one queue.

    Args:
        pages: the pages.
        keys: their keys.
        control: the record of the queue.
        moves: finishes moves.
        components: time, randomness and ids.
        announce: tells workers of a page in which there is something to claim.
    """

    def __init__(
        self,
        pages: PageStore,
        keys: PageKeys,
        control: QueueControl,
        moves: PageMoves,
        components: Components,
        announce: Callable[[str], Awaitable[None]],
    ) -> None:
        self._pages = pages
        self._keys = keys
        self._control = control
        self._moves = moves
        self._clock = components.clock
        self._randomness = components.randomness
        self._ids = components.ids
        self._announce = announce
        self._doubtful: dict[str, tuple[_DoubtfulPush, ...]] = {}
        """By the latest keys."""

    async def push(self, message: NewMessage, key: str) -> Mapping[str, str]:
        """Add a message, unless another one holds its key; return that one's id, by its own.

        Raises:
            OutcomeUnknown: it may or may not have been added, or replaced another one.
            Unavailable: nothing was added or replaced.
        """
        try:
            holders = await self._push(message, key)
        except Corrupt as error:
            # It may have been damaged on its way only. Nothing is written before it is read.
            fix = "if this goes on, remove what cannot be understood"
            raise Unavailable(self._pages.topic, str(error), fix) from error
        # The key is certainly held from now on.
        self._doubtful.pop(key, None)
        return holders

    async def _push(self, message: NewMessage, key: str) -> Mapping[str, str]:
        await self._register()
        former = await self._find_arrived(message, key)
        if former:
            return {message.id: former}
        name = self._keys.name(key)
        for attempt in range(_MAX_TRIES):
            if attempt:
                await _BACKOFF.sleep(attempt, self._clock, self._randomness)
            found = await self._keys.find(name)
            holder = await (
                self._finish(name, found, message, key)
                if found.is_unborn
                else self._begin(name, found, message, key)
            )
            if holder is not None:
                return {message.id: holder} if holder else {}
        raise Unavailable(self._pages.topic, f"others use the key {key!r} all the time")

    async def _begin(self, name: str, found: FoundKey, message: NewMessage, key: str) -> str | None:
        """Add a message, or return who holds its key; None if others were faster."""
        holder = await self._find_holder(found, message)
        if holder == "" and not await self._add(name, found, message, key):
            return None
        return holder

    async def _finish(
        self, name: str, found: FoundKey, message: NewMessage, key: str
    ) -> str | None:
        """Likewise, if another push has taken the key, and its page is not there."""
        if not await self._keys.is_current(found):
            return None
        if self._fits(found.place, message):
            return "" if await self._create(found.entry, found.read, message, key) else None
        is_barred = await self._settle(self._keys.bar(found))
        return await self._begin(name, found, message, key) if is_barred else None

    async def _register(self) -> None:
        try:
            await self._control.register_keys()
        except OutcomeUnknown as error:
            raise Unavailable(self._pages.topic, error.detail) from error

    async def _settle(self, work: Awaitable[bool]) -> bool:
        """Do what adds no message, whether or not that is known to be done."""
        try:
            return await work
        except OutcomeUnknown as error:
            raise Unavailable(self._pages.topic, error.detail) from error

    def _fits(self, place: str, message: NewMessage) -> bool:
        """Whether a message can be in the page at a place that another push has chosen."""
        now, named = self._clock.wall().seconds, read_due(place.rpartition("/")[2]) or 0.0
        due = now + message.find_delay(now)
        is_found_in_time = named <= due + _TOLERANCE and due <= max(now, named) + SHORT_DELAY
        return is_found_in_time and read_priority(place) == message.priority

    async def _find_holder(self, found: FoundKey, message: NewMessage) -> str | None:
        """Return who holds a key; empty if it is free now, None if that must be looked at again."""
        entry, page, now = found.entry, found.page, self._clock.wall().seconds
        if entry is None:
            return ""
        is_held = found.is_held(now)
        if is_held and not message.replace:
            return found.holder
        pending = None
        if page is not None and entry.place and key_changes.has_key(page, entry.token):
            pending = key_changes.find_pending(page)
        if pending is None:
            return ""
        if pending.move:
            await self._moves.finish(found.place)
            return None
        if is_held and pending.state != "claimed":
            return await self._replace(found, entry, message)
        return await self._release(found, entry, replaces=message.replace)

    async def _replace(self, found: FoundKey, entry: KeyRecord, message: NewMessage) -> str | None:
        """Replace the message that holds a key; None if somebody else has changed it."""
        place = found.place
        due = self._clock.wall().seconds + message.find_delay(self._clock.wall().seconds)
        target = self._pages.name_new(LIVE_LANE, due, read_priority(place))

        def change(page: QueuePage) -> tuple[QueuePage, bool | None]:
            now, named = self._clock.wall().seconds, read_due(place.rpartition("/")[2]) or 0.0
            return key_changes.replace_content(page, entry.token, message, now, named, target)

        if not await self._pages.apply(place, change):
            return None
        await self._moves.follow_up(place)
        await self._announce(place)
        return found.holder

    async def _release(self, found: FoundKey, entry: KeyRecord, *, replaces: bool) -> str | None:
        """Take the key from a pending message; None if somebody else has changed it."""

        def change(page: QueuePage) -> tuple[QueuePage, bool | None]:
            now = self._clock.wall().seconds
            return key_changes.release(page, entry.token, now, replaces=replaces)

        async def apply() -> bool:
            return bool(await self._pages.apply(found.place, change))

        return "" if await self._settle(apply()) else None

    async def _add(self, name: str, found: FoundKey, message: NewMessage, key: str) -> bool:
        """Write that a message holds a key, then its page; False means that others were faster."""
        now = self._clock.wall().seconds
        (token,) = self._ids.nonces(1)
        due = now + message.find_delay(now)
        place = self._pages.name_new(LIVE_LANE, due, message.priority)
        entry = KeyRecord(key=key, id=message.id, token=token, place=place)
        sent = self._clock.mono()
        if not await self._settle(self._keys.take(name, found.record, entry)):
            return False
        return await self._create(entry, sent, message, key)

    async def _create(
        self, entry: KeyRecord | None, since: Mono, message: NewMessage, key: str
    ) -> bool:
        """Create the page that a record names; False means that it is there, or that it is late."""
        if entry is None or not self._keys.is_in_time(since):
            return False
        now, place = self._clock.wall().seconds, entry.place
        (birth,) = self._ids.nonces(1)
        until = None if message.key_ttl is None else now + message.key_ttl
        hold = KeyHold(key=key, token=entry.token, id=message.id, until=until)
        page = changes.replace(changes.new_page(birth, [message], now), key_hold=hold)
        try:
            is_created = await self._pages.create(place, page)
        except OutcomeUnknown:
            self._remember(key, _DoubtfulPush(message.id, message.value, place, birth))
            raise
        if is_created:
            await self._announce(place)
        return is_created

    def _remember(self, key: str, push: _DoubtfulPush) -> None:
        self._doubtful[key] = (*self._doubtful.get(key, ())[-_MAX_DOUBTS + 1 :], push)
        while len(self._doubtful) > _MAX_KEYS:
            del self._doubtful[next(iter(self._doubtful))]

    async def _find_arrived(self, message: NewMessage, key: str) -> str:
        """Return the message of a push in doubt that is repeated and has arrived; empty without."""
        for push in self._doubtful.get(key, ()):
            # One that replaces must be handled, even if its content is the same.
            if message.replace or push.value != message.value:
                continue
            opened = await self._pages.read_current(push.place)
            if opened is not None and opened.page.birth == push.birth:
                return push.id
        return ""
