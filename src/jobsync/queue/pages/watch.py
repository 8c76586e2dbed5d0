"""When a claim has lapsed, seen by those who look at its page. Pure.

A store without a clock cannot say how old a claim is. So an observer counts on its own clock: a
claim has lapsed when it saw the same renewal of it for as long as it holds. It counts for each
claim, because other claims of the page may be renewed and change its version. It counts from the
first look, which is never earlier than the renewal; so a holder that counts from the moment when it
sent the renewal stops before.

An observer that could not look for half that time counts again: the store was away, and holders
had no chance to renew either. That does not apply to claims of its own process: what it still uses
it renews or keeps, and nobody else may be there to end what it has lost.

A listing is a look too: the same version has the same claims. So a page is read only when its
version has stood still for a while, or if it has had claims for as long, whoever changes it.
"""

from collections.abc import Collection, Iterable

import msgspec

from jobsync.core.clock import Mono, Seconds
from jobsync.queue.pages.page import PageMessage, QueuePage

__all__ = ["Sighting", "find_lapse", "find_left", "has_lapsed", "look", "look_inside"]


class _SeenRenewal(msgspec.Struct, frozen=True, gc=False):
    claim: str
    renewal: int
    session: str
    since: Mono
    """When it was first seen."""


class Sighting(msgspec.Struct, frozen=True, gc=False):
    """What an observer has seen of one page."""

    version: str
    first: Mono
    """When this version was first seen."""
    since: Mono
    """Likewise, or when the latest count began."""
    looked: Mono
    """When it was last seen."""
    renewals: tuple[_SeenRenewal, ...] | None = None
    """The renewals in it; None until it is read."""


def look(
    seen: Sighting | None,
    version: str,
    now: Mono,
    longest_gap: Seconds,
    own: Collection[str] = (),
) -> Sighting:
    """Return the sighting after a listing has shown a page's version.

    Args:
        seen: what was seen before.
        version: the page's version.
        now: when the listing was answered.
        longest_gap: seconds after which counting starts again.
        own: the sessions of the observer's process, whose claims are counted on.
    """
    if seen is None:
        return Sighting(version, now, now, now)
    if now - seen.looked > longest_gap:
        return _restart(seen, version, now, own)
    if seen.version == version:
        return msgspec.structs.replace(seen, looked=now)
    # What was seen of the earlier version counts for the claims that are still in this one.
    return Sighting(version, now, now, now, seen.renewals)


def _restart(seen: Sighting, version: str, now: Mono, own: Collection[str]) -> Sighting:
    first = seen.first if seen.version == version else now
    if seen.renewals is None:
        return Sighting(version, first, now, now)
    again = tuple(
        each if each.session in own else msgspec.structs.replace(each, since=now)
        for each in seen.renewals
    )
    return Sighting(version, first, now, now, again)


def look_inside(seen: Sighting, page: QueuePage) -> Sighting:
    """Return the sighting after its version of the page was read or written."""
    known = {(each.claim, each.renewal): each.since for each in seen.renewals or ()}
    found = {(each.claim, each.renewal) for each in _list_claimed(page)}
    renewals = tuple(
        _SeenRenewal(
            claim, renewal, page.find_session(claim), known.get((claim, renewal), seen.since)
        )
        for claim, renewal in sorted(found)
    )
    return msgspec.structs.replace(seen, renewals=renewals)


def find_left(seen: Sighting | None, message: PageMessage, now: Mono) -> Seconds:
    """Return how many seconds a claim still holds; all of them if it was never seen."""
    for each in (seen.renewals if seen is not None else None) or ():
        if (each.claim, each.renewal) == (message.claim, message.renewal):
            return message.hold - (now - each.since)
    return message.hold


def has_lapsed(seen: Sighting | None, message: PageMessage, now: Mono) -> bool:
    """Whether a claim was seen without a renewal for as long as it holds."""
    return find_left(seen, message, now) <= 0


def find_lapse(seen: Sighting | None, page: QueuePage, now: Mono) -> Seconds | None:
    """Return the seconds until the first claim of a page lapses; None if it has no claims."""
    return min((find_left(seen, each, now) for each in _list_claimed(page)), default=None)


def _list_claimed(page: QueuePage) -> Iterable[PageMessage]:
    return (each for each in page.messages if each.state == "claimed" and not each.move)
