"""How a write changes a page: claim, renew, settle, lapse, move, purge. Pure.

Each function takes a page and returns the next one with what was done. If nothing changes, it
returns the page itself, and nothing is written. All of them may be applied again to a later version
of the page after a conflict, or after a write whose outcome is unknown: a claim is recognised by
its id, and a settlement by the mark that it leaves.

A message that waits longer than `SHORT_DELAY`, and one that is dead, cancelled or redriven, leaves
its page. The change that decides it names the target; `build_target` and `finish_move` do the
rest. While a message moves nothing else happens to it, so everybody builds the same target.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from jobsync.core.messages import (
    LAPSED,
    SPARED,
    TRANSITIONS,
    MessageState,
    Transition,
    decide_lapse,
    shorten_error,
)
from jobsync.queue.backend import EndedClaim, Failure, NewMessage, Settlement
from jobsync.queue.pages.page import NO_TASK, PageClaim, PageMessage, PageState, QueuePage
from jobsync.queue.pages.results import keep_result, limit_results

__all__ = [
    "SHORT_DELAY",
    "Claimant",
    "Targets",
    "apply_ends",
    "begin_redrive",
    "build_failure",
    "build_target",
    "claim",
    "end_claims",
    "extend",
    "find_outlook",
    "finish_move",
    "mark_settled",
    "move_to",
    "new_page",
    "purge",
    "settle",
    "with_messages",
]

SHORT_DELAY = 60.0
"""Seconds that a message may wait in its page; a longer delay moves it to a page of its own."""

_MAX_MARKS = 4
_MAX_ERRORS = 64 * 1024
"""The most characters of all errors in a page, each of which may need six bytes. If there are more,
each message keeps its last error, shortened."""

T = TypeVar("T")
IsOver: TypeAlias = Callable[[PageMessage], bool]
"""Whether the claim of a message has lapsed, or its session is dead."""

replace = msgspec.structs.replace


class Claimant(msgspec.Struct, frozen=True, kw_only=True):
    """Who claims, and what."""

    id: str
    """The nonce of the claim."""
    session: str
    visibility: float
    limit: int
    suspects: bool = False
    tasks: frozenset[str] = NO_TASK

    def wants(self, message: PageMessage) -> bool:
        """Whether a message is of the requested kind."""
        return message.task in self.tasks and message.is_suspect == self.suspects


class Targets(msgspec.Struct, frozen=True):
    """Where the messages go that leave a page by one change, each as `lane/name`."""

    dead: str
    later: Callable[[float], str]
    """Takes the time of day at which the first message is due."""


class Outlook(msgspec.Struct, frozen=True):
    """What there is to claim in a page, now and later."""

    ready: int
    suspects: int
    due: float | None
    """When the next delay ends; None if none does."""
    others: int = 0
    """How many messages of other tasks are not finished."""


def new_page(birth: str, new_messages: Sequence[NewMessage], now: float) -> QueuePage:
    """Return a page with new messages, as pushed at that time of day."""
    return QueuePage(
        birth=birth,
        messages=tuple(
            PageMessage(
                id=each.id,
                value=each.value,
                max_attempts=each.max_attempts,
                enqueued=now,
                timeout=each.timeout,
                task=each.task,
                state="waiting" if (delay := each.find_delay(now)) > 0 else "ready",
                due=now + delay if delay > 0 else 0.0,
            )
            for each in new_messages
        ),
    )


def find_outlook(page: QueuePage, now: float, tasks: frozenset[str]) -> Outlook:
    """Return what there is to claim for these tasks."""
    ready = suspects = others = 0
    due: float | None = None
    for each in page.messages:
        if each.task not in tasks:
            others += each.state in {"ready", "waiting"}
            continue
        if each.is_claimable(now):
            suspects += each.is_suspect
            ready += not each.is_suspect
        elif each.state == "waiting" and not each.move:
            due = each.due if due is None else min(due, each.due)
    return Outlook(ready, suspects, due, others)


def claim(page: QueuePage, claimant: Claimant, now: float) -> tuple[QueuePage, list[PageMessage]]:
    """Claim messages: first those that waited, then the others in order.

    A claim that is in the page already is returned again: the reply of the request was lost.
    """
    if any(each.id == claimant.id for each in page.claims):
        return page, [each for each in page.messages if _has_claim(each, claimant.id)]
    places = [
        place
        for place, each in enumerate(page.messages)
        if each.is_claimable(now) and claimant.wants(each)
    ]
    places.sort(key=lambda place: page.messages[place].state != "waiting")
    chosen = sorted(places[: claimant.limit])
    if not chosen:
        return page, []
    claimed = {
        place: replace(
            page.messages[place],
            state="claimed",
            deliveries=page.messages[place].deliveries + 1,
            claim=claimant.id,
            renewal=0,
            hold=claimant.visibility,
        )
        for place in chosen
    }
    entry = PageClaim(id=claimant.id, session=claimant.session, at=now)
    after = with_messages(page, claimed, claims=(*page.claims, entry))
    return after, list(claimed.values())


def extend(
    page: QueuePage,
    receipts: Collection[tuple[str, str]],
    visibility: float,
    find_left: Callable[[PageMessage], float],
) -> tuple[QueuePage, list[bool]]:
    """Renew claims, each as message and claim; False means that the receipt is stale.

    Args:
        page: the page.
        receipts: the messages with their claims.
        visibility: seconds for which the claims hold from now on.
        find_left: returns how many seconds a claim holds without this: it is never shortened.
    """
    places = _find_places(page, [name for name, _ in receipts])
    numbers = {each.id: each.renewals + 1 for each in page.claims}
    renewed: set[str] = set()
    changed: dict[int, PageMessage] = {}
    answers = []
    for name, claim_id in receipts:
        place = places.get(name)
        each = None if place is None else page.messages[place]
        stands = each is not None and _has_claim(each, claim_id)
        if place is not None and each is not None and stands:
            hold = max(visibility, find_left(each))
            changed[place] = replace(each, renewal=numbers[claim_id], hold=hold)
            renewed.add(claim_id)
        answers.append(stands)
    claims = tuple(
        replace(each, renewals=numbers[each.id]) if each.id in renewed else each
        for each in page.claims
    )
    return with_messages(page, changed, claims=claims), answers


def settle(
    page: QueuePage, settlements: Sequence[tuple[Settlement, str]], now: float, targets: Targets
) -> tuple[QueuePage, list[bool]]:
    """End claims; False means that the receipt is stale.

    Args:
        page: the page.
        settlements: how each claim ends, with the id of the claim.
        now: the time of day.
        targets: where messages go that do not stay in the page.
    """
    places = _find_places(page, [each.receipt.id for each, _ in settlements])
    changed: dict[int, PageMessage] = {}
    answers = []
    for settlement, claim_id in settlements:
        place = places.get(settlement.receipt.id)
        each = None if place is None else page.messages[place]
        if place is None or each is None:
            answers.append(False)
        elif f"{claim_id}:{settlement.move}" in each.marks.split(" "):
            answers.append(True)
        elif not _has_claim(each, claim_id):
            answers.append(False)
        else:
            changed[place] = _settle(page, each, settlement, now)
            answers.append(True)
    after = apply_ends(page, changed, now, targets)
    if any(settlement.result is not None for settlement, _ in settlements):
        after = limit_results(after, {page.messages[place].id for place in changed})
    return after, answers


def _settle(
    page: QueuePage, message: PageMessage, settlement: Settlement, now: float
) -> PageMessage:
    step = TRANSITIONS[settlement.move]
    errors = message.errors
    if settlement.error:
        errors = (*errors, build_failure(page, message, settlement.error, now))
    settled = replace(
        move_to(message, step.target, now, settlement.delay),
        returned=message.returned + step.returns,
        is_suspect=False,
        errors=errors,
        marks=mark_settled(message, settlement.move),
    )
    return settled if settlement.result is None else keep_result(settled, settlement.result)


def end_claims(
    page: QueuePage, is_over: IsOver, now: float, targets: Targets
) -> tuple[QueuePage, list[EndedClaim]]:
    """End the claims that have lapsed: each message becomes a suspect, or a dead letter."""
    changed: dict[int, PageMessage] = {}
    ended = []
    for place, each in enumerate(page.messages):
        if each.state == "claimed" and not each.move and is_over(each):
            transition = decide_lapse(
                is_suspect=each.is_suspect,
                attempts=each.attempts,
                max_attempts=each.max_attempts,
            )
            step = TRANSITIONS[transition]
            error = SPARED if step.returns else LAPSED
            changed[place] = replace(
                move_to(each, step.target, now, 0.0),
                returned=each.returned + step.returns,
                is_suspect=True,
                errors=(*each.errors, build_failure(page, each, error, now)),
            )
            session = page.find_session(each.claim)
            ended.append(
                EndedClaim(id=each.id, state=step.target, attempt=each.attempts, session=session)
            )
    return apply_ends(page, changed, now, targets), ended


def begin_redrive(
    page: QueuePage, ids: Collection[str] | None, limit: int, target: str
) -> tuple[QueuePage, int]:
    """Begin to move dead letters back, with all their attempts; return how many.

    Without ids, all dead letters; cancelled messages only by id.
    """
    changed: dict[int, PageMessage] = {}
    for place, each in enumerate(page.messages):
        is_wanted = each.state == "dead" if ids is None else each.id in ids
        is_kept = each.state in {"dead", "cancelled"} and not each.move
        if is_wanted and is_kept and len(changed) < limit:
            changed[place] = replace(
                each,
                state="waiting",
                due=0.0,
                returned=each.deliveries,
                is_suspect=False,
                claim="",
                finished=0.0,
                move=target,
            )
    return with_messages(page, changed), len(changed)


def build_target(page: QueuePage, target: str, birth: str) -> QueuePage:
    """Return the page that a move creates."""
    moved = [each for each in page.messages if each.move == target]
    claims = {each.claim for each in moved}
    return QueuePage(
        birth=birth,
        messages=tuple(replace(each, move="") for each in moved),
        claims=tuple(each for each in page.claims if each.id in claims),
        key_hold=page.pass_key(target),
    )


def finish_move(page: QueuePage, target: str) -> QueuePage:
    """Forget the messages that are in the target now."""
    changed = {
        place: PageMessage(id=each.id, state="moved", marks=each.marks)
        for place, each in enumerate(page.messages)
        if each.move == target
    }
    if not changed:
        return page
    return replace(with_messages(page, changed), key_hold=page.leave_key(target))


def purge(page: QueuePage, is_unwanted: Callable[[PageMessage], bool]) -> tuple[QueuePage, int]:
    """Remove messages for good; return how many. Those that move stay."""
    kept = tuple(
        each
        for each in page.messages
        if each.move or each.state == "moved" or not is_unwanted(each)
    )
    count = len(page.messages) - len(kept)
    return (_prune(replace(page, messages=kept)) if count else page), count


def _has_claim(message: PageMessage, claim_id: str) -> bool:
    return message.state == "claimed" and message.claim == claim_id and not message.move


def move_to(message: PageMessage, state: MessageState, now: float, delay: float) -> PageMessage:
    """Return a message whose claim ends, in its next state."""
    if message.progress is not None:
        message = replace(message, progress=None, progress_note="", progress_at=0.0)
    if state == "waiting":
        # Without a delay, at once: on a clock that is behind, `now` may be far in the future.
        due = now + delay if delay > 0 else 0.0
        return replace(message, state="waiting", due=due, claim="", renewal=0, hold=0.0)
    assert state != "blocked"  # noqa: S101 - pages have no groups
    next_state: PageState = state
    value = None if state == "completed" else message.value
    return replace(
        message, state=next_state, value=value, finished=now, due=0.0, renewal=0, hold=0.0
    )


def _place_moves(
    changed: Mapping[int, PageMessage], now: float, targets: Targets
) -> dict[int, PageMessage]:
    """Return the messages with the target of each that does not stay in its page."""
    dues = [
        each.due
        for each in changed.values()
        if each.state == "waiting" and each.due > now + SHORT_DELAY
    ]
    later = targets.later(min(dues)) if dues else ""

    def place(each: PageMessage) -> PageMessage:
        if each.state in {"dead", "cancelled"}:
            return replace(each, move=targets.dead)
        if each.state == "waiting" and each.due > now + SHORT_DELAY:
            return replace(each, move=later)
        return each

    return {number: place(each) for number, each in changed.items()}


def apply_ends(
    page: QueuePage, changed: Mapping[int, PageMessage], now: float, targets: Targets
) -> QueuePage:
    """Return a page with messages that have ended or wait again, some of which leave it."""
    if not changed:
        return page
    return _prune(_shorten_errors(with_messages(page, _place_moves(changed, now, targets))))


def mark_settled(message: PageMessage, move: Transition) -> str:
    """Return the marks of a message after its claim has ended."""
    marks = f"{message.claim}:{move} {message.marks}".split(" ")[:_MAX_MARKS]
    return " ".join(marks).strip()


def build_failure(page: QueuePage, message: PageMessage, error: str, now: float) -> Failure:
    """Return an error of a message as it is stored."""
    session = page.find_session(message.claim)
    return Failure(attempt=message.attempts, error=shorten_error(error), at=now, session=session)


def _shorten_errors(page: QueuePage) -> QueuePage:
    """Keep only the last error of each message if there are too many to store."""
    size = sum(len(failure.error) for each in page.messages for failure in each.errors)
    if size <= _MAX_ERRORS:
        return page
    most = _MAX_ERRORS // max(1, sum(bool(each.errors) for each in page.messages))
    return replace(
        page,
        messages=tuple(
            replace(
                each,
                errors=tuple(
                    replace(failure, error=failure.error[:most]) for failure in each.errors[-1:]
                ),
            )
            for each in page.messages
        ),
    )


def _find_places(page: QueuePage, ids: Collection[str]) -> dict[str, int]:
    wanted = set(ids)
    return {each.id: place for place, each in enumerate(page.messages) if each.id in wanted}


def with_messages(
    page: QueuePage,
    changed: Mapping[int, PageMessage],
    *,
    claims: tuple[PageClaim, ...] | None = None,
) -> QueuePage:
    """Return a page with other messages at some places."""
    if not changed:
        return page
    messages = list(page.messages)
    for place, message in changed.items():
        messages[place] = message
    return replace(page, messages=tuple(messages), claims=page.claims if claims is None else claims)


def _prune(page: QueuePage) -> QueuePage:
    """Forget claims that no message names."""
    named = {each.claim for each in page.messages}
    kept = tuple(each for each in page.claims if each.id in named)
    return page if len(kept) == len(page.claims) else replace(page, claims=kept)
