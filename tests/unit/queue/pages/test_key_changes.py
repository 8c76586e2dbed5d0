"""A page says whether its message holds a key, and each change of that is one write."""

from typing import Any, cast

import msgspec
import pytest

from jobsync.queue.backend import Failure, NewMessage
from jobsync.queue.pages import changes, key_changes
from jobsync.queue.pages.page import KeyHold, PageClaim, PageMessage, PageState, QueuePage

NOW = 1000.0
replace = msgspec.structs.replace


def page(state: PageState = "ready", move: str = "", **hold: Any) -> QueuePage:
    """Return the page of a message with a key."""
    message = PageMessage(
        id="m", state=state, move=move, claim="c" if state == "claimed" else "", deliveries=2
    )
    claims = (PageClaim(id="c", session="w", at=NOW),) if state == "claimed" else ()
    key_hold = KeyHold(key="k", token="t", **hold)
    return QueuePage(birth="b", messages=(message,), claims=claims, key_hold=key_hold)


@pytest.mark.parametrize(
    ("state", "hold", "is_held"),
    [
        ("ready", {}, True),
        ("waiting", {}, True),
        ("claimed", {}, True),
        ("completed", {}, False),
        ("moved", {}, False),
        ("ready", {"is_released": True}, False),
        ("completed", {"until": NOW + 1}, True),
        ("ready", {"until": NOW}, False),
    ],
)
def test_a_key_is_held_while_its_message_is_pending_or_for_its_time(
    state: PageState, hold: dict[str, Any], *, is_held: bool
) -> None:
    """Whichever of the two was asked for; not after it was released."""
    assert key_changes.is_held(page(state, **hold), NOW) is is_held


def test_a_page_without_messages_holds_its_key_only_for_a_time() -> None:
    """The message was purged, or the page was barred."""
    assert not key_changes.is_held(replace(page(), messages=()), NOW)
    assert key_changes.is_held(replace(page(until=NOW + 1), messages=()), NOW)


@pytest.mark.parametrize(
    ("found", "replaces", "is_released"),
    [
        (page(until=NOW - 1), False, True),
        (page("claimed"), True, True),
        (page("claimed"), False, None),
        (page("ready"), True, None),
        (page("completed"), True, None),
        (page(until=NOW + 1), False, None),
        (page(until=NOW - 1, next="0/x"), False, None),
        (page(until=NOW - 1, is_released=True), False, None),
    ],
)
def test_a_key_is_released_if_its_time_is_over_or_its_message_cannot_be_replaced(
    found: QueuePage, *, replaces: bool, is_released: bool | None
) -> None:
    """Otherwise somebody has changed the page, and nothing is written."""
    after, answer = key_changes.release(found, "t", NOW, replaces=replaces)
    assert answer is is_released
    assert (after is found) is (answer is None)
    if answer:
        assert not key_changes.is_held(after, NOW)
        assert key_changes.release(found, "other", NOW, replaces=replaces) == (found, None)


CONTENT = NewMessage(
    id="n", value=7, max_attempts=9, timeout=3.0, task="t", delay=5.0, key="k", key_ttl=20.0
)


def test_a_replaced_message_has_the_new_content_and_all_its_attempts() -> None:
    """It keeps its id, and its key for the new time."""
    after, answer = key_changes.replace_content(page(), "t", CONTENT, NOW, NOW, "0/x")
    assert answer is True
    (message,) = after.messages
    assert (message.id, message.value, message.timeout, message.max_attempts) == ("m", 7, 3.0, 9)
    assert message.task == "t"
    assert (message.state, message.due, message.attempts, message.move) == ("waiting", 1005, 0, "")
    assert after.key_hold == KeyHold(key="k", token="t", until=NOW + 20)


@pytest.mark.parametrize(
    "found",
    [
        page("claimed"),
        page("completed"),
        page("waiting", move="0/y"),
        page(until=NOW),
        page(is_released=True),
        page(next="0/y"),
    ],
)
def test_what_is_claimed_moves_or_lost_its_key_is_not_replaced(found: QueuePage) -> None:
    """It must be looked at again; nothing is written."""
    assert key_changes.replace_content(found, "t", CONTENT, NOW, NOW, "0/x") == (found, None)


@pytest.mark.parametrize(
    ("due", "delay", "moves"),
    [(NOW, 0.0, False), (NOW, 60.0, False), (NOW, 61.0, True), (NOW + 9, 5.0, True)],
)
def test_a_replaced_message_moves_if_its_page_would_be_looked_at_too_late_or_for_too_long(
    due: float, delay: float, *, moves: bool
) -> None:
    """The name of a page says when to look at it first."""
    content = replace(CONTENT, delay=delay)
    after, _ = key_changes.replace_content(page(), "t", content, NOW, due, "0/x")
    assert after.messages[0].move == ("0/x" if moves else "")


def test_a_message_that_moves_takes_its_key_along_unless_it_is_finished() -> None:
    """The source says where it is, so that it is found there."""
    moving = page("waiting", move="0/x", until=NOW + 9)
    target = changes.build_target(moving, "0/x", "b2")
    assert target.key_hold == KeyHold(key="k", token="t", until=NOW + 9, step=1)
    source = changes.finish_move(moving, "0/x")
    assert source.key_hold == KeyHold(key="k", token="t", until=NOW + 9, next="0/x")
    assert changes.finish_move(source, "0/x") is source
    dying = page("dead", move="dead/x", until=NOW + 9)
    assert changes.build_target(dying, "dead/x", "b2").key_hold is None
    assert changes.finish_move(dying, "dead/x").key_hold == dying.key_hold


@pytest.mark.parametrize("state", ["ready", "waiting"])
@pytest.mark.parametrize(("until", "ttl"), [(None, None), (NOW + 9, None), (None, 5.0), (1e9, 5.0)])
def test_a_replaced_message_keeps_all_else_that_is_its_own(
    state: PageState, until: float | None, ttl: float | None
) -> None:
    """When it was pushed, its errors and deliveries; the key is held as the new push says."""
    before = PageMessage(
        id="m",
        value="old",
        max_attempts=6,
        enqueued=NOW - 50,
        timeout=11.0,
        task="old",
        state=state,
        deliveries=5,
        returned=2,
        errors=(Failure(3, "boom", NOW - 9, "w"),),
        marks="c:retry",
    )
    hold = KeyHold(key="k", token="t", id="m", until=until, step=3)
    found = QueuePage(birth="b", messages=(before,), key_hold=hold)
    content = NewMessage(id="n", value=7, max_attempts=9, key="k", key_ttl=ttl)
    after, answer = key_changes.replace_content(found, "t", content, NOW, NOW, "0/x")
    assert answer is True
    expected = replace(
        before, value=7, max_attempts=9, timeout=None, task="", state="waiting", returned=5
    )
    kept = replace(hold, until=None if ttl is None else NOW + ttl)
    assert after == replace(found, messages=(expected,), key_hold=kept)
    # On a clock that is behind, too: it waits for no time.
    assert expected.is_claimable(1.0)


@pytest.mark.parametrize(
    ("due", "when", "ready", "moves"),
    [
        (NOW - 500, {"delay": 60.0}, NOW + 60, False),
        (NOW - 500, {"delay": 61.0}, NOW + 61, True),
        (NOW + 30, {"delay": 90.0}, NOW + 90, False),
        (NOW + 30, {"delay": 91.0}, NOW + 91, True),
        (NOW + 30, {"delay": 29.0}, NOW + 29, False),
        (NOW + 30, {"delay": 28.0}, NOW + 28, True),
        (NOW + 30, {}, 0.0, True),
        (NOW + 1, {}, 0.0, False),
        (NOW, {"at": NOW + 60}, NOW + 60, False),
        (NOW, {"at": NOW + 61}, NOW + 61, True),
        (NOW + 30, {"at": NOW + 30}, NOW + 30, False),
        (NOW, {"at": NOW - 5}, 0.0, False),
        (NOW + 30, {"at": NOW - 5}, 0.0, True),
        (NOW, {"at": 0.0, "delay": 99.0}, 0.0, False),
    ],
)
def test_a_replaced_message_is_due_when_the_new_push_says(
    due: float, when: dict[str, float], ready: float, *, moves: bool
) -> None:
    """By a delay or a time of day, the latter if there are both.

    It moves if its page is looked at over a second later or a minute earlier than that. A page
    that is due is looked at now.
    """
    content = NewMessage(id="n", value=7, max_attempts=9, key="k", **cast("Any", when))
    after, _ = key_changes.replace_content(page("waiting"), "t", content, NOW, due, "0/x")
    (message,) = after.messages
    assert (message.due, message.move) == (ready, "0/x" if moves else "")


@pytest.mark.parametrize("state", ["ready", "waiting", "claimed", "completed", "dead", "cancelled"])
@pytest.mark.parametrize(
    "hold",
    [
        {},
        {"until": NOW - 1},
        {"until": NOW},
        {"until": NOW + 1},
        {"is_released": True},
        {"next": "0/y"},
        {"until": NOW - 1, "next": "0/y"},
        {"until": NOW + 1, "is_released": True},
    ],
)
def test_a_released_key_leaves_all_else_in_its_page(state: PageState, hold: dict[str, Any]) -> None:
    """The message, its claim and for how long the key was asked for; only a pending one has it."""
    for replaces in (False, True):
        found = page(state, **hold)
        after, answer = key_changes.release(found, "t", NOW, replaces=replaces)
        is_over = hold.get("until", NOW + 1) <= NOW
        is_taken = replaces and state == "claimed"
        is_pending = state in {"ready", "waiting", "claimed"}
        if is_pending and (is_over or is_taken) and not {"is_released", "next"} & {*hold}:
            assert answer is True
            assert found.key_hold is not None
            assert after == replace(found, key_hold=replace(found.key_hold, is_released=True))
        else:
            assert (after, answer) == (found, None)
