"""How a write changes a page whose message holds a key: replace its content, or release the key.

Pure. As in `changes`, each function returns the next page with what was done, and may be applied
again to a later version of the page.
"""

import msgspec

from jobsync.queue.backend import NewMessage
from jobsync.queue.pages.changes import SHORT_DELAY, with_messages
from jobsync.queue.pages.page import KeyHold, PageMessage, QueuePage

__all__ = ["find_pending", "has_key", "is_held", "release", "replace_content"]

_TOLERANCE = 1.0
"""Seconds by which the name of a page may be later than its message."""
_PENDING = frozenset({"ready", "waiting", "claimed"})


def find_pending(page: QueuePage) -> PageMessage | None:
    """Return the message of a page if it is pending, also while it moves to another time."""
    return next((each for each in page.messages if each.state in _PENDING), None)


def has_key(page: QueuePage, token: str) -> bool:
    """Whether a page is about this hold of a key, and its message has not gone on."""
    hold = page.key_hold
    return hold is not None and hold.token == token and not hold.is_released and not hold.next


def is_held(page: QueuePage, now: float) -> bool:
    """Whether the message of a page holds its key at that time of day."""
    hold = page.key_hold
    if hold is None or hold.is_released:
        return False
    return find_pending(page) is not None if hold.until is None else now < hold.until


def release(
    page: QueuePage, token: str, now: float, *, replaces: bool
) -> tuple[QueuePage, bool | None]:
    """Take the key from a pending message, if its time is over or a worker has the message.

    In that case a push that was to replace it adds another one. Nobody replaces it from now on.

    Returns:
        The page, and whether it was released; None if it must be looked at again.
    """
    message = find_pending(page)
    hold = page.key_hold
    if hold is None or message is None or not has_key(page, token):
        return page, None
    is_over = not is_held(page, now)
    if not is_over and not (replaces and message.state == "claimed" and not message.move):
        return page, None
    return msgspec.structs.replace(page, key_hold=_replace(hold, is_released=True)), True


def replace_content(
    page: QueuePage, token: str, new_message: NewMessage, now: float, due: float, target: str
) -> tuple[QueuePage, bool | None]:
    """Replace the content of the pending message that holds a key; it has all its attempts.

    Args:
        page: its page.
        token: names the hold.
        new_message: the new content.
        now: the time of day.
        due: the time in the name of the page: nobody looks at it earlier.
        target: the place of the message if it cannot stay there.

    Returns:
        The page, and whether it was replaced; None if it must be looked at again.
    """
    message, hold = find_pending(page), page.key_hold
    if hold is None or message is None or not has_key(page, token) or not is_held(page, now):
        return page, None
    if message.state == "claimed" or message.move:
        return page, None
    delay = new_message.find_delay(now)
    ready = now + delay
    is_hidden, is_late = due > ready + _TOLERANCE, ready > max(due, now) + SHORT_DELAY
    replaced = msgspec.structs.replace(
        message,
        value=new_message.value,
        max_attempts=new_message.max_attempts,
        timeout=new_message.timeout,
        task=new_message.task,
        returned=message.deliveries,
        state="waiting",
        due=ready if delay > 0 else 0.0,
        move=target if is_hidden or is_late else "",
    )
    ttl = new_message.key_ttl
    # Its time counts from now.
    hold = _replace(hold, until=None if ttl is None else now + ttl)
    changed = with_messages(page, {page.messages.index(message): replaced})
    return msgspec.structs.replace(changed, key_hold=hold), True


def _replace(hold: KeyHold, **changes: object) -> KeyHold:
    return msgspec.structs.replace(hold, **changes)
