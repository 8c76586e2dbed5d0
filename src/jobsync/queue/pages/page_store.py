"""Changes of the pages of one queue, by one writer for each page.

Guarantees: a change is applied to the page that it saw, or again to a later version of it, or not
at all; its caller learns which, or `OutcomeUnknown`. Changes of one page by callers of this process
wait for each other and share a write, so that a process never conflicts with itself. A page in hand
is changed without a read. Whoever writes a page also ends the lapsed claims of others in it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from jobsync.components import Components
from jobsync.core.clock import Seconds
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Corrupt, JobsyncError, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.backend import EndedClaim
from jobsync.queue.pages import changes
from jobsync.queue.pages.page import (
    DEAD_LANE,
    LIVE_LANE,
    PageMark,
    PageMessage,
    QueuePage,
    encode_page,
    find_format,
    name_page,
    read_priority,
)
from jobsync.queue.pages.page_reader import OpenPage, PageReader
from jobsync.queue.pages.watch import has_lapsed, look
from jobsync.stores.contract import (
    BURIAL_AGE,
    Applied,
    Conflicted,
    Put,
    Record,
    Store,
    Unknown,
)

__all__ = ["PageChange", "PageStore"]

T = TypeVar("T")
PageChange: TypeAlias = Callable[[QueuePage], tuple[QueuePage, T]]
"""Returns the next page and what was done; the same page if nothing is to be done."""

_MAX_CONFLICTS = 20
_NEAR_MILLIS = 10_000
_BACKOFF = ExponentialBackoff(first=0.01, longest=1.0)
_TIME_TO_FINISH: Seconds = 30.0
"""After a page was requested, a move that it shows may be continued for so long. Later the target
may have been consumed and dropped, and must not be created again."""
_MAX_DONE = 50_000
"""The most pages that are remembered as done, some 300 bytes for each."""


class _WaitingChange(Generic[T]):
    """A change that waits for its write."""

    def __init__(self, change: PageChange[T]) -> None:
        self.change = change
        self.result: T | None = None
        self.error: JobsyncError | None = None
        self.is_done = False


class _Writer:
    """The changes of one page that wait, and who writes them."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.pending: list[_WaitingChange[Any]] = []
        self.users = 0


class PageStore(PageReader):
    """The pages of a queue, to change them.

    Args:
        store: where they are stored.
        queue: the queue's name.
        components: time, randomness and events.
    """

    def __init__(self, store: Store, queue: str, components: Components) -> None:
        super().__init__(store, queue, components)
        self.ended: list[EndedClaim] = []
        """Claims of others that were ended beside other changes, and not reported yet."""
        self._randomness = components.randomness
        self._ids = components.ids
        self._writers: dict[str, _Writer] = {}
        self._last_millis = 0
        self._done: dict[str, tuple[str, int]] = {}
        """Pages that this process has finished: their versions, and how many are completed."""

    def name_new(self, lane: str, due: float, priority: int = 0) -> str:
        """Return the place of a new page. Pages of one process sort in the order of their birth."""
        millis = int(due * 1000)
        if lane == LIVE_LANE and due <= self._clock.wall().seconds:
            # Unless the clock has stepped back: then the order is lost.
            is_near = self._last_millis - millis < _NEAR_MILLIS
            millis = max(millis, self._last_millis + 1) if is_near else millis
            self._last_millis = millis
        (nonce,) = self._ids.nonces(1)
        return f"{lane}/{name_page(millis / 1000, nonce, priority)}"

    def build_targets(self, place: str) -> changes.Targets:
        """Return places for the messages that leave a page now: they keep their priority."""
        (nonce,) = self._ids.nonces(1)
        priority = read_priority(place)
        dead = f"{DEAD_LANE}/{name_page(self._clock.wall().seconds, nonce, priority)}"
        return changes.Targets(dead, lambda due: f"{LIVE_LANE}/{name_page(due, nonce, priority)}")

    async def create(self, place: str, page: QueuePage) -> bool:
        """Create a page under a name of its own; False means that the name is in use.

        Raises:
            OutcomeUnknown: it may exist, or come to exist.
            Unavailable: it was not created.
        """
        put, page = self._build_put(place, page, None)
        sent = self._clock.mono()
        (outcome,) = await self._store.write([put])
        match outcome:
            case Applied(record):
                self._keep(place, record, page, sent)
                return True
            case Conflicted():
                return False
            case Unknown(reason):
                # The trail of a page that was written often does not reach back to its birth.
                try:
                    found = await self._read_current(place)
                except (Misconfigured, Unavailable) as error:
                    raise OutcomeUnknown(self.topic, reason) from error
                if found is not None and found.page.birth == page.birth:
                    return True
                raise OutcomeUnknown(self.topic, reason)

    async def apply(self, place: str, change: PageChange[T]) -> T | None:
        """PageChange a page; None means that the page is gone or cannot be used.

        Raises:
            OutcomeUnknown: it may or may not have been changed; the same change may be repeated.
            Unavailable: it was not changed.
        """
        writer = self._writers.setdefault(place, _Writer())
        writer.users += 1
        pending = _WaitingChange(change)
        writer.pending.append(pending)
        try:
            async with writer.lock:
                if not pending.is_done:
                    await self._commit(place, writer)
        finally:
            if pending in writer.pending:
                writer.pending.remove(pending)
            writer.users -= 1
            if not writer.users:
                self._writers.pop(place, None)
        if pending.error is not None:
            raise pending.error
        return pending.result

    async def _commit(self, place: str, writer: _Writer) -> None:
        """Apply all changes that wait, with one write."""
        batch, writer.pending = writer.pending, []
        try:
            await self._write_until_decided(place, batch)
        except JobsyncError as error:
            self._open.pop(place, None)
            for pending in batch:
                pending.error, pending.is_done = error, True
        except BaseException:
            # The caller that writes was cancelled. The others apply their changes again.
            self._open.pop(place, None)
            writer.pending = batch + writer.pending
            raise

    async def _write_until_decided(self, place: str, batch: list[_WaitingChange[Any]]) -> None:
        opened = self.find_open(place)
        is_current = False
        for attempt in range(_MAX_CONFLICTS):
            await self._pause(attempt)
            if opened is None:
                opened = await self._read_current(place)
                is_current = True
            if opened is None:
                _finish(batch, [None] * len(batch))
                return
            page, results, ended = self._apply_all(place, opened, batch)
            if page is opened.page:
                if is_current:
                    _finish(batch, results)
                    return
                opened = None
                continue
            put, page = self._build_put(place, page, opened.record)
            sent = self._clock.mono()
            (outcome,) = await self._store.write([put])
            match outcome:
                case Applied(record):
                    self._keep(place, record, page, sent)
                    # One that holds a key is read before it is dropped.
                    if put.mark == PageMark.DONE and page.key_hold is None:
                        self._remember_done(place, record.version, page)
                    self.ended += ended
                    _finish(batch, results)
                    return
                case Conflicted():
                    opened = None
                case Unknown(reason):
                    raise OutcomeUnknown(self.topic, reason)
        raise Unavailable(self.topic, "others change the same messages all the time")

    def _remember_done(self, place: str, version: str, page: QueuePage) -> None:
        completed = sum(each.state == "completed" for each in page.messages)
        self._done[place] = (version, completed)
        if len(self._done) > _MAX_DONE:
            del self._done[next(iter(self._done))]

    def count_done(self, place: str, version: str) -> int | None:
        """Return how many messages of a page are completed, if this process has finished it."""
        done = self._done.get(place)
        return done[1] if done is not None and done[0] == version else None

    async def read_current(self, place: str) -> OpenPage | None:
        """Read a page as it is now; None means that there is none.

        Raises:
            Corrupt: it cannot be understood.
            Unavailable: the store does not answer.
        """
        opened = await self._read_current(place)
        if opened is None and (place in self.newer or self._is_set_aside(place)):
            raise Corrupt(f"{self._prefix}{place}", "not a page that this code understands")
        return opened

    async def _read_current(self, place: str) -> OpenPage | None:
        """Read a page as it is now; again if it is damaged, perhaps only on its way here."""
        for attempt in range(_MAX_CONFLICTS):
            await self._pause(attempt)
            opened = (await self.read({place: None})).get(place)
            if opened is not None or place not in self._damaged:
                return opened
        return None

    async def _pause(self, attempt: int) -> None:
        if attempt > 1:
            await _BACKOFF.sleep(attempt - 1, self._clock, self._randomness)

    def _apply_all(
        self, place: str, opened: OpenPage, batch: Iterable[_WaitingChange[Any]]
    ) -> tuple[QueuePage, list[Any], list[EndedClaim]]:
        """Return the page after all changes, their results, and the claims that lapsed besides."""
        page = opened.page
        results = []
        for waiting in batch:
            page, result = waiting.change(page)
            results.append(result)
        if page is opened.page:
            return page, results, []
        now, targets = self._clock.wall().seconds, self.build_targets(place)
        page, ended = changes.end_claims(page, self.judge(place, page), now, targets)
        return page, results, ended

    def judge(
        self,
        place: str,
        page: QueuePage,
        dead: Collection[str] = (),
        keep: Collection[str] = (),
        *,
        includes_own: bool = False,
        age: Seconds = 0.0,
    ) -> Callable[[PageMessage], bool]:
        """Return whether the claim of a message is over: it lapsed, or its session is dead.

        Args:
            place: the page's.
            page: the page.
            dead: sessions that are dead.
            keep: messages whose claims are not over.
            includes_own: whether the claims of this process may be over, too.
            age: for how long the page has not changed, by the server's clock. Claims that nobody
                renewed for an hour are over, even if nobody has watched them for so long.
        """
        now = self._clock.mono()
        opened, seen = self._open.get(place), self._sightings.get(place)
        if opened is not None:
            # Not kept: whether this version is still current is shown by the write that follows.
            seen = look(seen, opened.record.version, now, self.visibility / 2, self.sessions)
        sessions = {each.id: each.session for each in page.claims}

        def is_over(message: PageMessage) -> bool:
            session = sessions.get(message.claim, "")
            if message.id in keep:
                return False
            if session in dead or (session in self.sessions and not includes_own):
                return session in dead
            is_old = age > max(BURIAL_AGE, message.hold)
            return is_old or has_lapsed(seen, message, now)

        return is_over

    def _build_put(self, place: str, page: QueuePage, base: Record | None) -> tuple[Put, QueuePage]:
        """Return the write of a page, and the page as it is stored."""
        mark = page.find_mark(self._clock.wall().seconds)
        page, text = encode_page(page)
        # Not `to_builtins`, which keeps tuples: a store checks those one by one, at great cost.
        value = msgspec.json.decode(text)
        nonce = page.birth if base is None else ""
        key = f"{self._prefix}{place}"
        # A record's format only grows.
        form = max(find_format(place, page), 0 if base is None else base.format)
        return Put(key, value, base, format=form, nonce=nonce, mark=mark), page

    async def finish_moves(self, place: str) -> list[str]:
        """Finish the moves out of a page, which this process or another has begun.

        Returns:
            Where the messages are now.

        Raises:
            OutcomeUnknown, Unavailable: whoever reads the page next finishes them.
        """
        opened = self.find_open(place)
        if opened is None or not opened.page.targets:
            opened = await self._read_current(place)
        if opened is None:
            return []
        targets = opened.page.targets
        for target in targets:
            (birth,) = self._ids.nonces(1)
            copy = changes.build_target(opened.page, target, birth)
            if self._clock.mono() - opened.read > _TIME_TO_FINISH:
                self._open.pop(place, None)
                return []
            # A page that is there already, whatever has become of it, is the copy.
            await self.create(target, copy)
            await self.apply(place, _finishing(target))
        return targets

    def list_holders(self) -> set[str]:
        """Return the sessions with claims in the pages in hand."""
        return {
            page.find_session(each.claim)
            for _, page, _ in self._open.values()
            for each in page.messages
            if each.state == "claimed" and not each.move
        }

    async def drop(self, places: Collection[str]) -> None:
        """Remove pages that are done.

        Raises:
            OutcomeUnknown, Unavailable: some may still be there; calling again is safe.
        """
        await self._store.drop([f"{self._prefix}{place}" for place in places])
        for place in places:
            self.forget(place)
            self._done.pop(place, None)


def _finishing(target: str) -> PageChange[bool]:
    def change(page: QueuePage) -> tuple[QueuePage, bool]:
        return changes.finish_move(page, target), True

    return change


def _finish(batch: Iterable[_WaitingChange[Any]], results: Iterable[Any]) -> None:
    for pending, result in zip(batch, results, strict=True):
        pending.result, pending.is_done = result, True
