"""How a write changes one message of a page from outside: cancel, delete, run now, progress. Pure.

As in `changes`, each function returns the next page with what was done, and may be applied again to
a later version of the page.
"""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from jobsync.core.messages import LIVE, REVOKED
from jobsync.queue.backend import EndedClaim
from jobsync.queue.message import Receipt
from jobsync.queue.pages.changes import (
    Targets,
    apply_ends,
    build_failure,
    mark_settled,
    move_to,
    purge,
    with_messages,
)
from jobsync.queue.pages.page import PageMessage, QueuePage
from jobsync.queue.single_message import Deletion, ProgressReport

__all__ = [
    "CancelAnswer",
    "cancel",
    "delete",
    "find_claim",
    "find_message",
    "note_progress",
    "run_now",
]


class CancelAnswer(NamedTuple):
    """What became of a request to cancel a message."""

    is_here: bool
    """Whether the message is in the page."""
    ended: EndedClaim | None = None


def find_claim(receipt: Receipt) -> tuple[str, str]:
    """Return the message and the claim of a receipt, as the page names them."""
    return receipt.id, receipt.claim.partition("@")[0]


def find_message(page: QueuePage, name: str) -> tuple[int, PageMessage] | None:
    """Return a message that is in a page and does not leave it, with its place."""
    for place, each in enumerate(page.messages):
        if each.id == name and each.state != "moved" and not each.move:
            return place, each
    return None


def cancel(
    page: QueuePage, name: str, now: float, targets: Targets
) -> tuple[QueuePage, CancelAnswer]:
    """Cancel a message that is not finished; end its claim if it is claimed."""
    found = find_message(page, name)
    if found is None:
        return page, CancelAnswer(is_here=False)
    place, message = found
    if message.state not in LIVE:
        return page, CancelAnswer(is_here=True)
    is_claimed = message.state == "claimed"
    cancelled = msgspec.structs.replace(
        move_to(message, "cancelled", now, 0.0),
        is_suspect=False,
        errors=(*message.errors, build_failure(page, message, REVOKED, now)),
        marks=mark_settled(message, "revoke") if is_claimed else message.marks,
    )
    session = page.find_session(message.claim) if is_claimed else ""
    ended = EndedClaim(id=name, state="cancelled", attempt=message.attempts, session=session)
    return apply_ends(page, {place: cancelled}, now, targets), CancelAnswer(
        is_here=True, ended=ended
    )


def delete(page: QueuePage, name: str) -> tuple[QueuePage, Deletion]:
    """Remove a message for good, unless it is claimed."""
    found = find_message(page, name)
    if found is None:
        return page, "absent"
    if found[1].state == "claimed":
        return page, "claimed"
    after, _ = purge(page, lambda each: each.id == name)
    return after, "deleted"


def run_now(page: QueuePage, name: str, now: float, target: str) -> tuple[QueuePage, bool | None]:
    """Move a message that waits to a page of its own that is due now.

    The name of a page says when its first message is due: nobody looks at it earlier.

    Returns:
        The page, and whether the message waited; None if it is not in the page.
    """
    found = find_message(page, name)
    if found is None:
        return page, None
    place, message = found
    if message.state != "waiting" or message.due <= now:
        return page, False
    moved = msgspec.structs.replace(message, due=0.0, move=target)
    return with_messages(page, {place: moved}), True


def note_progress(page: QueuePage, reports: Collection[ProgressReport], now: float) -> QueuePage:
    """Store how far handlers are, if their claims stand."""
    latest = {find_claim(each.receipt): each for each in reports}
    changed = {}
    for place, each in enumerate(page.messages):
        report = latest.get((each.id, each.claim))
        if report is not None and each.state == "claimed" and not each.move:
            changed[place] = msgspec.structs.replace(
                each, progress=report.progress, progress_note=report.note, progress_at=now
            )
    return with_messages(page, changed)
