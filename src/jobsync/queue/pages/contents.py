"""What is in the pages of a queue, for people: browse, count and find messages.

Every page that is not in hand is read: a request for each, where requests are billed. A message
that is being moved may be in two pages for a moment; it is shown once.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

import msgspec

from jobsync.core.messages import LIVE, MessageState
from jobsync.errors import Corrupt, Invalid
from jobsync.queue.arguments import check_cursor
from jobsync.queue.backend import MessageInfo
from jobsync.queue.directory import QueueContent
from jobsync.queue.pages.page import (
    DEAD_LANE,
    LIVE_LANE,
    PAGE_FORMAT,
    PageMark,
    PageMessage,
    QueuePage,
    read_page,
    read_priority,
)
from jobsync.queue.pages.page_reader import ListedPage, OpenPage, PageReader
from jobsync.queue.pages.page_store import PageStore
from jobsync.queue.pages.results import find_result_problem
from jobsync.stores.contract import Record

__all__ = [
    "build_content",
    "build_open_info",
    "check_page_cursor",
    "count_newer",
    "find_infos",
    "find_place",
    "read_infos",
    "select_page",
]

_NEAR = 60.0
"""Seconds between the id of a message and the name of its page, if it was never moved."""
_READ_AT_ONCE = 128
_MAX_LOOKS = 3
"""How often to look for a message that leaves its page for one that was not listed."""
_is_dated = re.compile(
    r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
).fullmatch
_is_live_cursor = re.compile(r"[0-9]{14}[A-Za-z0-9_-]{12} [0-9]{4}").fullmatch


async def read_infos(
    pages: PageReader,
    queue: str,
    now: float,
    *,
    lanes: Iterable[str] = (LIVE_LANE, DEAD_LANE),
    left: set[str] | None = None,
) -> list[MessageInfo]:
    """Return all messages of a queue, in the order of their pages.

    Args:
        pages: the pages.
        queue: the queue's name.
        now: the time of day.
        lanes: where to look.
        left: gets the ids of messages that have left a page.

    Raises:
        Unavailable: the store does not answer.
    """
    listed = [page for lane in lanes for page in await pages.list_all(lane)]
    return await _read_listed(pages, queue, now, listed, left)


async def find_infos(
    pages: PageReader, queue: str, now: float, ids: Collection[str]
) -> list[MessageInfo]:
    """Return the messages with these ids, first from the pages of the time in their ids.

    Raises:
        Unavailable: the store does not answer.
    """
    born = [_read_birth(name) for name in ids]
    times = [time for time in born if time is not None]
    if times and len(times) == len(born):
        listed = await pages.list_between(min(times) - _NEAR, max(times) + _NEAR)
        infos = await _read_listed(pages, queue, now, listed)
        found = [info for info in infos if info.id in ids]
        if len(found) == len(set(ids)):
            return found
    found = []
    for _ in range(_MAX_LOOKS):
        left: set[str] = set()
        infos = await read_infos(pages, queue, now, left=left)
        found = [info for info in infos if info.id in ids]
        # What has left its page after the pages were listed may be in one that was not.
        if left.isdisjoint(set(ids).difference(info.id for info in found)):
            break
    return found


async def find_place(pages: PageStore, name: str) -> str | None:
    """Return the page of a message, after its move if it moves; None if it is in none.

    Raises:
        Unavailable: the store does not answer.
    """
    born = _read_birth(name)
    if born is not None:
        place = await _search(pages, name, await pages.list_between(born - _NEAR, born + _NEAR))
        if place:
            return place
    for _ in range(_MAX_LOOKS):
        has_left = False
        for lane in (LIVE_LANE, DEAD_LANE):
            place = await _search(pages, name, await pages.list_all(lane))
            if place:
                return place
            has_left |= place is not None
        if not has_left:
            break
    return None


async def _search(pages: PageStore, name: str, listed: Sequence[ListedPage]) -> str | None:
    """Return the page of a message; empty if it has left one of these, None if it is in none."""
    has_left = False
    for start in range(0, len(listed), _READ_AT_ONCE):
        part = {page.place: page.version for page in listed[start : start + _READ_AT_ONCE]}
        for place, opened in (await pages.read(part)).items():
            found = next((each for each in opened.page.messages if each.id == name), None)
            if found is None:
                continue
            if found.state == "moved":
                has_left = True
                continue
            if found.move:
                await pages.finish_moves(place)
            return found.move or place
    return "" if has_left else None


def build_open_info(
    pages: PageReader,
    queue: str,
    now: float,
    place: str,
    opened: OpenPage,
    found: tuple[int, PageMessage],
) -> MessageInfo:
    """Return a message of a page that was read."""
    position, message = found
    cursor = f"{place.rpartition('/')[2]} {position:04}"
    left = pages.find_left(place, message)
    info = _build_info(queue, opened.page, message, opened.record, now, left, cursor)
    return _with_priority(info, place)


def _with_priority(info: MessageInfo, place: str) -> MessageInfo:
    """Return a message with the priority of its page."""
    priority = read_priority(place)
    return info if not priority else msgspec.structs.replace(info, priority=priority)


def _read_birth(name: str) -> float | None:
    """Return the time in an id of `Ids.records`; None if it has none."""
    found = _is_dated(name)
    return None if found is None else int(found.group(1) + found.group(2), 16) / 1000


async def _read_listed(
    pages: PageReader,
    queue: str,
    now: float,
    listed: Sequence[ListedPage],
    left: set[str] | None = None,
) -> list[MessageInfo]:
    found: dict[str, MessageInfo] = {}
    for start in range(0, len(listed), _READ_AT_ONCE):
        part = listed[start : start + _READ_AT_ONCE]
        opened = await pages.read({page.place: page.version for page in part})
        for listing in part:
            place = listing.place
            record, page = _find_read(pages, place, opened)
            if record is None or page is None:
                continue
            if left is not None:
                left.update(each.id for each in page.messages if each.state == "moved")
            for position, each in enumerate(page.messages):
                if each.state == "moved" or (each.move and each.id in found):
                    continue
                seconds = pages.find_left(place, each)
                cursor = f"{place.rpartition('/')[2]} {position:04}"
                info = _build_info(queue, page, each, record, now, seconds, cursor)
                found[each.id] = _with_priority(info, place)
            if listing.mark is PageMark.DONE:
                pages.forget(place)
    return list(found.values())


def _find_read(
    pages: PageReader, place: str, opened: Mapping[str, OpenPage]
) -> tuple[Record | None, QueuePage | None]:
    """Return a page that was read, or one of newer code as far as this code understands it."""
    if place in opened:
        return opened[place].record, opened[place].page
    record = pages.newer.get(place)
    return record, None if record is None else _read_newer(record)


def _read_newer(record: Record) -> QueuePage | None:
    """Return a page of newer code as far as this code understands it."""
    try:
        return read_page(record.key, record.value)
    except Corrupt:
        return None


def _build_info(
    queue: str,
    page: QueuePage,
    message: PageMessage,
    record: Record,
    now: float,
    left: float,
    cursor: str,
) -> MessageInfo:
    state = cast("MessageState", message.state)
    is_live = state in LIVE
    due: float | None = None
    if state == "waiting":
        due = max(message.due, message.enqueued)
    elif state == "claimed":
        due = now + left
    claimed = next((each.at for each in page.claims if each.id == message.claim), None)
    return MessageInfo(
        queue=queue,
        id=message.id,
        state=state,
        value=message.value,
        attempts=message.attempts,
        deliveries=message.deliveries,
        max_attempts=message.max_attempts,
        errors=message.errors,
        session=page.find_session(message.claim) if message.claim else "",
        is_suspect=message.is_suspect and is_live,
        enqueued=message.enqueued,
        due=due,
        claimed=claimed if state == "claimed" else None,
        finished=None if is_live else message.finished,
        seen=now,
        format=record.format,
        task=message.task,
        progress=message.progress if state == "claimed" else None,
        progress_note=message.progress_note if state == "claimed" else "",
        progress_at=message.progress_at or None,
        result=message.result,
        result_problem=find_result_problem(message),
        cursor=cursor if is_live else f"{message.finished!r} {message.id}",
    )


def check_page_cursor(state: MessageState, after: object) -> None:
    """Check that a position is empty or the cursor of a message in this state."""
    if state not in LIVE:
        check_cursor(state, after)
    elif after != "" and not (isinstance(after, str) and _is_live_cursor(after)):
        problem = f"must be the cursor of a message that is {state}"
        fix = "pass the cursor of the last message that was returned"
        raise Invalid("after", after, problem, fix)


def select_page(
    infos: Iterable[MessageInfo], state: MessageState, after: str, limit: int
) -> list[MessageInfo]:
    """Return the messages in a state after a cursor, the oldest first."""
    chosen = [info for info in infos if info.state == state]
    if state in LIVE:
        chosen = [info for info in chosen if info.cursor > after]
        return sorted(chosen, key=lambda info: info.cursor)[:limit]
    since, _, name = after.partition(" ")
    start = (float(since) if since else -math.inf, name)
    return sorted(
        (info for info in chosen if (info.finished or 0.0, info.id) > start),
        key=lambda info: (info.finished, info.id),
    )[:limit]


def count_newer(infos: Iterable[MessageInfo]) -> dict[int, int]:
    """Count the unfinished messages of newer code by their format."""
    formats = Counter(
        info.format for info in infos if info.format > PAGE_FORMAT and info.state in LIVE
    )
    return dict(sorted(formats.items()))


def build_content(infos: Collection[MessageInfo]) -> QueueContent:
    """Return the summary of a queue."""
    oldest = [info.enqueued for info in infos if info.state in {"ready", "waiting"}]
    return QueueContent(
        counts=dict(Counter(info.state for info in infos)),
        oldest=min(oldest, default=None),
        claims=dict(Counter(info.session for info in infos if info.state == "claimed")),
    )
