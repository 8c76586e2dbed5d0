"""One page: messages that were pushed together, their claims, and what a listing shows of it. Pure.

A page is one record, so everything in it changes by one conditional write. Its name says when its
first message is due, and is never used again:

    page/<queue>/<lane>/<class><due><nonce>

The class is a digit for the priority of its messages, 0 for the most urgent ones; a page keeps it
when its messages move on.

The lane `0` has the messages that are handled, the lane `dead` dead letters and cancelled messages.
A message is in one page. To leave it for another lane, or for a later due time, it is moved:
the source names the target (`move`), the target is created, and the source forgets the message.
Whoever finds the first step done does the rest, and the target's name makes sure that it happens
once. See `changes`.

A page whose messages are all finished or moved is *done*. It keeps their ids and how their claims
were settled, so it answers repeated settlements, and refuses a late copy of the request that
created it. It never changes again, and is dropped an hour after its last change at the earliest.

A message with a key has a page of its own, which says for how long the key is held; see `keys`.

Every page shows its `PageMark` in listings, so that nobody reads a page to learn that it is done.
"""

import enum
import math
import re
from typing import Annotated, Literal, TypeAlias

import msgspec

from jobsync.core.arguments import LONGEST_DELAY
from jobsync.core.codec import MAX_DEPTH, MAX_VALUE, Json
from jobsync.core.retry import MAX_ATTEMPTS
from jobsync.errors import Corrupt
from jobsync.queue.backend import MESSAGE_FORMAT, PLAIN_FORMAT, Failure

__all__ = [
    "DEAD_LANE",
    "HIGHEST_PRIORITY",
    "LIVE_LANE",
    "LOWEST_PRIORITY",
    "MAX_MESSAGES",
    "MAX_PAGE_DEPTH",
    "MAX_PUSH_BYTES",
    "NO_TASK",
    "PAGE_FORMAT",
    "PLAIN_CLASS",
    "RESULT_MARK",
    "KeyHold",
    "PageClaim",
    "PageMark",
    "PageMessage",
    "PageState",
    "QueuePage",
    "encode_page",
    "find_format",
    "keep_class",
    "name_page",
    "read_class",
    "read_due",
    "read_page",
    "read_priority",
]

PAGE_FORMAT = MESSAGE_FORMAT
"""The format of pages with tasks, and the highest that this code understands."""

_PLACED_FORMAT = 2
"""The format of pages with a priority or a key, both of which older code would forget."""

NO_TASK = frozenset({""})
"""The tasks of a claim of messages without a task."""

MAX_MESSAGES = 1_000
"""The most messages in a page."""

MAX_PUSH_BYTES = 3 * 1024 * 1024
"""The most bytes of the messages in a new page. Claims and errors are added to it later, and a
record has at most 4 MB."""

MAX_PAGE_DEPTH = MAX_DEPTH - 3
"""How deep values and results may be nested: a page has them in its messages."""

RESULT_MARK = "result"
"""Among the marks of a completed message whose handler returned something."""

LIVE_LANE = "0"
DEAD_LANE = "dead"

_MIDDLE = 5
PLAIN_CLASS = str(_MIDDLE)
"""The class of pages whose messages have no priority."""
HIGHEST_PRIORITY, LOWEST_PRIORITY = _MIDDLE, _MIDDLE - 9
"""A class is one digit, so there are ten priorities."""

_SHORT_ERRORS = (200, 20, 0)
"""To how many characters the last error of each message is cut, if a page is too large."""

_MAX_COUNT = 2**31 - 1
_MAX_TIME = 1e12
_is_name = re.compile(r"[0-9]([0-9]{13})[A-Za-z0-9_-]{12}").fullmatch

PageState: TypeAlias = Literal[
    "ready", "waiting", "claimed", "completed", "cancelled", "dead", "moved"
]
"""The states of messages, and that of a message which is in another page now."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Time: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=_MAX_TIME)]


class PageMark(enum.IntEnum):
    """What a listing shows of a page: the last of these that is true of it."""

    UNKNOWN = 0
    """Not written by this code: it must be read."""
    DONE = 1
    """All is finished or moved: the page never changes again."""
    KEPT = 2
    """There are dead letters or cancelled messages, and nothing else."""
    CLAIMED = 3
    """There are claims."""
    WAITING = 4
    """There are messages that are not due yet: none before the time in the page's name."""
    SUSPECT = 5
    """There are suspects to claim."""
    READY = 6
    """There are messages to claim, and no claims."""
    PARTLY = 7
    """There are messages to claim, and claims."""
    MOVING = 8
    """There are messages whose move is not finished. Nothing hides it: a page to which messages
    are moving must not be dropped."""


class PageClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who claimed messages of a page. Kept while a message of the page names it."""

    id: str
    session: str
    at: _Time
    """Unix seconds, by the clock of the machine that claimed."""
    renewals: _Count = 0
    """The number of its latest renewal. No other renewal of this claim has the same."""


class PageMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message in a page. Times are Unix seconds by the clock of the machine that wrote them."""

    id: str
    value: Json = None
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPTS)] = 4
    enqueued: _Time = 0.0
    timeout: float | None = None
    task: str = ""
    state: PageState = "ready"
    due: _Time = 0.0
    """When it can be claimed, if it waits."""
    deliveries: _Count = 0
    returned: _Count = 0
    is_suspect: bool = False
    claim: str = ""
    """The claim that has it, or had it when it was finished."""
    renewal: _Count = 0
    """The number of the renewal of its claim that it was last part of."""
    hold: _Time = 0.0
    """Seconds without a renewal after which its claim lapses, counted by those who watch it."""
    finished: _Time = 0.0
    errors: tuple[Failure, ...] = ()
    marks: str = ""
    """How its latest claims were settled, the newest first: `claim:move claim:move`."""
    move: str = ""
    """The page that it is moved to, as `lane/name`: its state is already that of its copy there."""
    progress: float | None = None
    """How far its handler is, while it is claimed."""
    progress_note: str = ""
    progress_at: _Time = 0.0
    result: Json = None
    """What its handler returned, if it is completed. The mark `RESULT_MARK` says that there is one:
    code that does not know this field drops it, and keeps the mark."""
    result_problem: str = ""

    def is_claimable(self, now: float) -> bool:
        """Whether it can be claimed at a time of day."""
        return not self.move and (self.state in {"ready", "waiting"}) and self.due <= now

    @property
    def attempts(self) -> int:
        """How many claims count as attempts."""
        return max(self.deliveries - self.returned, 0)


class KeyHold(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The key that the message of a page holds, or has held. Such a page has no other message."""

    key: str
    token: str
    """Names this hold. The key's record has the same while it is about this message."""
    id: str = ""
    """The message, which may have been removed; empty if the page was barred."""
    until: _Time | None = None
    """The time of day until which the key is held; None for as long as the message is pending."""
    step: _Count = 0
    """How often the message has moved."""
    next: str = ""
    """The page to which the message has moved, if it is still pending there."""
    is_released: bool = False
    """Whether the message has lost its key although it is pending."""


class QueuePage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a page's record."""

    birth: str
    """The nonce of the request that created it. The trail of its record forgets that request."""
    messages: tuple[PageMessage, ...] = ()
    claims: tuple[PageClaim, ...] = ()
    key_hold: KeyHold | None = None

    @property
    def targets(self) -> list[str]:
        """The pages to which messages are being moved."""
        return list(dict.fromkeys(each.move for each in self.messages if each.move))

    def find_mark(self, now: float) -> PageMark:
        """Return what listings show of this page, if it is written at that time of day."""
        marks = {_find_mark(each, now) for each in self.messages}
        if marks >= {PageMark.READY, PageMark.CLAIMED}:
            marks.add(PageMark.PARTLY)
        return max(marks, default=PageMark.DONE)

    def pass_key(self, target: str) -> KeyHold | None:
        """Return the hold of a page to which the message moves; None if it gives up its key."""
        if self.key_hold is None or not target.startswith(f"{LIVE_LANE}/"):
            return None
        return msgspec.structs.replace(self.key_hold, step=self.key_hold.step + 1)

    def leave_key(self, target: str) -> KeyHold | None:
        """Return the hold of this page after its message has moved."""
        if self.key_hold is None or not target.startswith(f"{LIVE_LANE}/"):
            return self.key_hold
        return msgspec.structs.replace(self.key_hold, next=target)

    def find_session(self, claim: str) -> str:
        """Return the session of a claim; empty if the page does not have it."""
        return next((each.session for each in self.claims if each.id == claim), "")


def _find_mark(message: PageMessage, now: float) -> PageMark:
    if message.move:
        return PageMark.MOVING
    match message.state:
        case "ready" | "waiting":
            if message.due > now:
                return PageMark.WAITING
            return PageMark.SUSPECT if message.is_suspect else PageMark.READY
        case "claimed":
            return PageMark.CLAIMED
        case "dead" | "cancelled":
            return PageMark.KEPT
        case _:
            return PageMark.DONE


def name_page(due: float, nonce: str, priority: int = 0) -> str:
    """Return the name of a page whose first message is due at that time of day."""
    return f"{_MIDDLE - priority}{min(max(int(due * 1000), 0), 10**13 - 1):013d}{nonce}"


def read_due(name: str) -> float | None:
    """Return the time in the name of a page; None if it is not such a name."""
    found = _is_name(name)
    return None if found is None else int(found.group(1)) / 1000


def read_class(place: str) -> str:
    """Return the class of the page at a place, which is its lane and its name."""
    return place.rpartition("/")[2][:1]


def read_priority(place: str) -> int:
    """Return the priority of the messages in the page at a place."""
    return _MIDDLE - int(read_class(place))


def keep_class(place: str, target: str) -> str:
    """Return the place of a target with the class of the page that its messages leave."""
    lane, _, name = target.rpartition("/")
    return f"{lane}/{read_class(place)}{name[1:]}"


def find_format(place: str, page: QueuePage) -> int:
    """Return the format of a page: older code leaves alone what it does not understand."""
    if any(each.task for each in page.messages):
        return PAGE_FORMAT
    is_plain = read_class(place) == PLAIN_CLASS and page.key_hold is None
    return PLAIN_FORMAT if is_plain else _PLACED_FORMAT


def encode_page(page: QueuePage) -> tuple[QueuePage, bytes]:
    """Return a page with its JSON text, without notes and errors that do not fit in a record.

    What is left always fits: the values and the results of its messages are limited.
    """
    text = msgspec.json.encode(page)
    if len(text) > MAX_VALUE:
        page = _shorten(page, None)
        text = msgspec.json.encode(page)
    for most in _SHORT_ERRORS:
        if len(text) <= MAX_VALUE:
            break
        page = _shorten(page, most)
        text = msgspec.json.encode(page)
    return page, text


def _shorten(page: QueuePage, most: int | None) -> QueuePage:
    """Return a page without notes; and with the last errors only, cut after so many characters."""

    def shorten(message: PageMessage) -> PageMessage:
        errors = message.errors
        if most is not None:
            errors = tuple(
                msgspec.structs.replace(each, error=each.error[:most])
                for each in (errors[-1:] if most else ())
            )
        return msgspec.structs.replace(message, progress_note="", errors=errors)

    return msgspec.structs.replace(page, messages=tuple(map(shorten, page.messages)))


def read_page(key: str, value: Json) -> QueuePage:
    """Return the page of a record's value.

    Raises:
        Corrupt: no version of this library wrote this, or its numbers are impossible.
    """
    try:
        page = msgspec.convert(value, QueuePage)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Corrupt(key, f"not a page ({error})") from error
    claims = {each.id for each in page.claims}
    ids = set()
    for each in page.messages:
        problem = _find_problem(each, claims)
        if problem or each.id in ids:
            raise Corrupt(key, f"message {each.id}: {problem or 'it is there twice'}")
        ids.add(each.id)
    if page.key_hold is not None and len(ids) > 1:
        raise Corrupt(key, f"{len(ids)} messages hold one key")
    return page


def _find_problem(message: PageMessage, claims: set[str]) -> str:
    """Return what is wrong with a message; empty if nothing is."""
    if not 0 <= message.returned <= message.deliveries < _MAX_COUNT:
        return f"its deliveries are {message.deliveries}, its returned ones {message.returned}"
    if not (math.isfinite(message.due) and math.isfinite(message.hold)):
        return "its times are not finite"
    if message.timeout is not None and not 0 < message.timeout <= LONGEST_DELAY:
        return f"its timeout is {message.timeout} s"
    if message.state == "claimed" and message.claim not in claims:
        return "its claim is not in the page"
    return ""
