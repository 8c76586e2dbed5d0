"""Each change of a page does what it says, may be applied again, and loses nothing."""

from typing import Any

import msgspec
import pytest

from jobsync.core.messages import Transition
from jobsync.queue.backend import NewMessage, Receipt, Settlement
from jobsync.queue.pages import changes, message_changes
from jobsync.queue.pages.changes import Claimant, Targets
from jobsync.queue.pages.message_changes import CancelAnswer
from jobsync.queue.pages.page import MAX_PUSH_BYTES, PageMark, PageMessage, QueuePage
from jobsync.queue.pages.results import find_result_problem
from jobsync.queue.single_message import ProgressReport, StoredResult

NOW = 1_000.0
TARGETS = Targets("dead/d", lambda due: f"0/{due:.0f}")


def push(*ids: str, **options: Any) -> QueuePage:
    """Return a new page."""
    options = {"max_attempts": 4, **options}
    return changes.new_page(
        "birth", [NewMessage(id=name, value={"n": name}, **options) for name in ids], NOW
    )


def claim(
    page: QueuePage, name: str = "c1", limit: int = 10, **options: Any
) -> tuple[QueuePage, list[str]]:
    """Claim messages; return the page and their ids."""
    claimant = Claimant(
        id=name, session=f"session of {name}", visibility=30.0, limit=limit, **options
    )
    after, found = changes.claim(page, claimant, NOW)
    return after, [each.id for each in found]


def settle(
    page: QueuePage, name: str, claim_id: str, move: Transition, **how: Any
) -> tuple[QueuePage, bool]:
    """Settle one claim."""
    settlement = Settlement(receipt=Receipt(name, 1, claim_id), move=move, **how)
    after, (answer,) = changes.settle(page, [(settlement, claim_id)], NOW, TARGETS)
    return after, answer


def find(page: QueuePage, name: str) -> PageMessage:
    """Return a message of a page."""
    return next(each for each in page.messages if each.id == name)


def test_a_claim_takes_what_waited_first_and_is_found_again() -> None:
    """A second application, after a lost reply, returns the same messages and writes nothing."""
    page, _ = claim(push("a", "b", "c"), "old", 1)
    page, _ = settle(page, "a", "old", "retry")
    # "a" waited, so it is before "b"; within the page they keep their order.
    page, found = claim(page, "c1", 2)
    assert found == ["a", "b"]
    assert claim(page, "c1", 2) == (page, ["a", "b"])
    assert claim(page, "c2")[1] == ["c"]


def test_a_message_that_waited_comes_before_older_ones_that_are_ready() -> None:
    """A claim of fewer than there are leaves the newest of those that have not waited."""
    delayed = [
        NewMessage(id=name, value=1, max_attempts=4, delay=delay)
        for name, delay in (("a", 0.0), ("b", 0.0), ("c", 5.0), ("d", 500.0))
    ]
    claimant = Claimant(id="c1", session="s", visibility=30.0, limit=2)
    page = changes.new_page("birth", delayed, NOW)
    after, found = changes.claim(page, claimant, NOW + 10)
    assert [each.id for each in found] == ["a", "c"]
    assert claim(after, "c2")[1] == ["b"]


def test_only_due_messages_of_the_requested_kind_are_claimed() -> None:
    """By delay, by task, and suspects apart from others."""
    page = push("a", delay=50)
    assert claim(page) == (page, [])
    page = push("a", task="x")
    assert claim(page, tasks=frozenset({"y"}))[1] == []
    assert claim(page)[1] == []
    known = frozenset({"x"})
    assert claim(page, tasks=known)[1] == ["a"]
    page, _ = changes.end_claims(claim(page, tasks=known)[0], lambda _: True, NOW, TARGETS)
    assert claim(page, tasks=known)[1] == []
    assert claim(page, suspects=True)[1] == []
    assert claim(page, suspects=True, tasks=known)[1] == ["a"]


def test_a_renewal_never_shortens_a_claim() -> None:
    """It counts up, so that observers start again."""
    page, _ = claim(push("a", "b"))
    page, answers = changes.extend(page, [("a", "c1"), ("b", "cX"), ("z", "c1")], 30, lambda _: 99)
    assert answers == [True, False, False]
    assert (find(page, "a").renewal, find(page, "a").hold) == (1, 99)
    assert find(page, "b").renewal == 0


@pytest.mark.parametrize("move", ["complete", "cancel", "retry", "bury", "release", "snooze"])
def test_a_settlement_is_recognised_and_others_are_stale(move: Transition) -> None:
    """However the claim ends; the page does not change again."""
    page, _ = claim(push("a", "b"))
    after, answer = settle(page, "a", "c1", move)
    assert answer
    assert settle(after, "a", "c1", move) == (after, True)
    other: Transition = "complete" if move != "complete" else "bury"
    assert settle(after, "a", "c1", other) == (after, False)
    assert settle(after, "a", "cX", move) == (after, False)
    assert settle(after, "nobody", "c1", move) == (after, False)
    assert find(after, "b") == find(page, "b")


def test_a_finished_page_keeps_no_payload() -> None:
    """Ids, attempts, session and marks are left."""
    page, _ = claim(push("a"))
    page, _ = settle(page, "a", "c1", "complete")
    assert page.find_mark(NOW) is PageMark.DONE
    assert find(page, "a").value is None
    assert page.find_session(find(page, "a").claim) == "session of c1"
    page, count = changes.purge(page, lambda each: each.state == "completed")
    assert (page.messages, page.claims, count) == ((), (), 1)


MOVES: dict[str, tuple[Transition, float, str]] = {
    "dead": ("bury", 0, "dead/d"),
    "cancelled": ("cancel", 0, "dead/d"),
    "a long delay": ("snooze", 61, "0/1061"),
}


@pytest.mark.parametrize(("move", "delay", "target"), MOVES.values(), ids=MOVES)
def test_a_move_copies_first_and_forgets_then(move: Transition, delay: float, target: str) -> None:
    """Meanwhile nothing else happens to the message; its page answers for it afterwards."""
    page, _ = claim(push("a", "b"))
    page, _ = settle(page, "a", "c1", move, delay=delay, error="boom")
    assert page.targets == [target]
    assert page.find_mark(NOW) is PageMark.MOVING
    assert changes.end_claims(page, lambda each: each.id == "a", NOW, TARGETS) == (page, [])
    assert changes.purge(page, lambda each: each.id == "a") == (page, 0)
    assert claim(page, "c2", suspects=False)[1] == []
    copy = changes.build_target(page, target, "birth 2")
    assert [each.id for each in copy.messages] == ["a"]
    assert copy.messages[0].value == {"n": "a"}
    assert copy.messages[0].errors[0].session == "session of c1"
    assert copy.targets == []
    rest = changes.finish_move(page, target)
    assert (find(rest, "a").state, find(rest, "a").value) == ("moved", None)
    assert changes.finish_move(rest, target) is rest
    assert settle(rest, "a", "c1", move, delay=delay, error="boom") == (rest, True)
    assert find(rest, "b").state == "claimed"


def test_a_short_delay_stays_in_the_page() -> None:
    """A retry within a minute costs no further request."""
    page, _ = claim(push("a"))
    page, _ = settle(page, "a", "c1", "retry", delay=60, error="boom")
    assert (page.targets, find(page, "a").due) == ([], NOW + 60)
    assert page.find_mark(NOW) is PageMark.WAITING


def test_one_change_has_one_target_for_each_lane() -> None:
    """Named for the first message that is due there."""
    page, _ = claim(push("a", "b", "c", "d"))
    ends = [("a", "retry", 300.0), ("b", "retry", 200.0), ("c", "bury", 0.0), ("d", "cancel", 0.0)]
    batch = [
        (Settlement(receipt=Receipt(name, 1, "c1"), move=move, delay=delay), "c1")  # type: ignore[arg-type]
        for name, move, delay in ends
    ]
    page, answers = changes.settle(page, batch, NOW, TARGETS)
    assert answers == [True] * 4
    assert page.targets == ["0/1200", "dead/d"]
    half = changes.finish_move(page, "dead/d")
    assert half.targets == ["0/1200"]
    assert [each.state for each in half.messages] == ["waiting", "waiting", "moved", "moved"]
    assert half.messages[0].value == {"n": "a"}


def test_a_lapse_spares_or_spends_an_attempt() -> None:
    """A suspect that lapses spends one; the last one makes a dead letter."""
    page, _ = claim(push("a", max_attempts=1))
    page, (ended,) = changes.end_claims(page, lambda _: True, NOW, TARGETS)
    assert (ended.state, ended.session) == ("waiting", "session of c1")
    assert (find(page, "a").attempts, find(page, "a").is_suspect) == (0, True)
    page, _ = claim(page, "c2", suspects=True)
    page, (ended,) = changes.end_claims(page, lambda _: True, NOW, TARGETS)
    assert (ended.state, page.targets) == ("dead", ["dead/d"])
    assert len(find(page, "a").errors) == 2


def test_dead_letters_move_back_with_all_attempts() -> None:
    """All of them, or those that are named; cancelled ones only by name."""
    page, _ = claim(push("a", "b", "c"))
    for name, move in (("a", "bury"), ("b", "cancel"), ("c", "bury")):
        page, _ = settle(page, name, "c1", move)  # type: ignore[arg-type]
    dead = changes.build_target(page, "dead/d", "birth 2")
    assert changes.begin_redrive(dead, ["nobody"], 9, "0/t") == (dead, 0)
    by_name, count = changes.begin_redrive(dead, ["b"], 9, "0/t")
    assert (count, by_name.targets) == (1, ["0/t"])
    every, count = changes.begin_redrive(dead, None, 9, "0/t")
    assert count == 2
    back = changes.build_target(every, "0/t", "birth 3")
    assert [(each.id, each.state, each.attempts) for each in back.messages] == [
        ("a", "waiting", 0),
        ("c", "waiting", 0),
    ]
    _, count = changes.begin_redrive(dead, None, 1, "0/t")
    assert count == 1


def test_errors_do_not_outgrow_the_page() -> None:
    """Of too many, each message keeps its last one, shortened."""
    page = push(*(f"m{n}" for n in range(200)))
    for attempt in range(2):
        page, found = claim(page, f"c{attempt}", 1000)
        for name in found:
            page, _ = settle(page, name, f"c{attempt}", "retry", error=f"{attempt}" * 5000)
    size = sum(len(failure.error) for each in page.messages for failure in each.errors)
    assert size <= 64 * 1024
    assert [[each.attempt for each in message.errors] for message in page.messages] == [[2]] * 200
    assert all(each.value for each in page.messages)


def test_errors_are_text_that_can_be_stored() -> None:
    """Whatever the handler raised."""
    page, _ = claim(push("a"))
    page, _ = settle(page, "a", "c1", "retry", error="a\0b\ud800")
    assert find(page, "a").errors[0].error == "a\\0b?"


def test_what_waits_for_no_time_can_be_claimed_on_every_clock() -> None:
    """A machine whose clock is ahead returns a message, or ends its claim: others claim it."""
    page, _ = claim(push("a", "b"))
    page, _ = settle(page, "a", "c1", "release")
    page, _ = changes.end_claims(page, lambda each: each.id == "b", NOW, TARGETS)
    assert all(each.is_claimable(1.0) for each in page.messages)


def test_each_renewal_of_a_claim_has_a_number_of_its_own() -> None:
    """Also after the message with the highest number was settled."""
    page, _ = claim(push("a", "b"))
    numbers = []
    for name in "aab":
        page, _ = changes.extend(page, [(name, "c1")], 30.0, lambda _: 0.0)
        numbers.append(find(page, name).renewal)
        if len(numbers) == 2:
            page, _ = settle(page, "a", "c1", "complete")
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize("is_suspect", [False, True])
@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_cancel_from_outside_is_done_once_and_ends_the_claim(
    *, is_claimed: bool, is_suspect: bool
) -> None:
    """Its mark makes the receipt stale; applied again, it does nothing. It is no suspect then."""
    page = push("a", "b")
    suspect = msgspec.structs.replace(find(page, "a"), is_suspect=is_suspect)
    page = changes.with_messages(page, {0: suspect})
    if is_claimed:
        page, _ = claim(page, suspects=is_suspect)
    after, answer = message_changes.cancel(page, "a", NOW, TARGETS)
    assert answer.ended is not None
    assert answer.ended.session == ("session of c1" if is_claimed else "")
    message = find(after, "a")
    assert (message.state, message.move, len(message.errors)) == ("cancelled", "dead/d", 1)
    assert not message.is_suspect
    assert message_changes.cancel(after, "a", NOW, TARGETS) == (after, CancelAnswer(is_here=False))
    moves: tuple[Transition, ...] = ("complete", "cancel")
    for move in moves:
        assert settle(after, "a", "c1", move) == (after, False)
    assert find(after, "b") == find(page, "b")


def test_progress_belongs_to_its_claim_and_ends_with_it() -> None:
    """A report of another claim changes nothing."""
    page, _ = claim(push("a"))
    stale = ProgressReport(Receipt("a", 1, "c0@0/x"), 0.9, "")
    assert message_changes.note_progress(page, [stale], NOW) is page
    report = ProgressReport(Receipt("a", 1, "c1@0/x"), 0.4, "rows")
    page = message_changes.note_progress(page, [report], NOW)
    assert (find(page, "a").progress, find(page, "a").progress_note) == (0.4, "rows")
    moves: tuple[Transition, ...] = ("retry", "complete", "bury")
    for move in moves:
        after, _ = settle(page, "a", "c1", move)
        message = find(after, "a")
        assert (message.progress, message.progress_note, message.progress_at) == (None, "", 0.0)


def test_results_that_fill_a_page_are_not_kept() -> None:
    """The messages are completed, and say why; what was there before stays."""
    large = "x" * (MAX_PUSH_BYTES // 3)
    page = changes.new_page(
        "birth",
        [NewMessage(id=name, value={"n": large}, max_attempts=4) for name in ("a", "b")]
        + [NewMessage(id=name, value={}, max_attempts=4) for name in ("c", "d", "e")],
        NOW,
    )
    page, _ = claim(page)
    page, _ = settle(page, "c", "c1", "complete", result=StoredResult(f'"{"y" * 1000}"'))
    page, done = settle(page, "d", "c1", "complete", result=StoredResult(f'"{large}"'))
    assert done
    assert find(page, "c").result == "y" * 1000
    assert (find(page, "d").state, find(page, "d").result) == ("completed", None)
    assert "more than 3,145,728 bytes" in find_result_problem(find(page, "d"))
    # Code that does not know results drops them, and keeps the marks.
    dropped = msgspec.structs.replace(find(page, "c"), result=None)
    assert "older code" in find_result_problem(dropped)
    page, _ = settle(page, "e", "c1", "complete")
    assert find_result_problem(find(page, "e")) == ""


def test_the_latest_settlements_of_a_message_are_recognised() -> None:
    """However often it was claimed; those long ago are forgotten."""
    page = push("a", max_attempts=20)
    for number in range(8):
        page, found = claim(page, f"c{number}")
        assert found == ["a"]
        page, is_settled = settle(page, "a", f"c{number}", "retry", error="no")
        assert is_settled
    recognised = [settle(page, "a", f"c{number}", "retry") for number in range(8)]
    assert recognised == [(page, number >= 4) for number in range(8)]


@pytest.mark.parametrize(("move", "delay"), [("bury", 0.0), ("snooze", 600.0)])
def test_a_purge_leaves_what_moves_to_its_new_page(move: Transition, delay: float) -> None:
    """Whatever is to be removed: everybody builds the same target."""
    page, _ = claim(push("a", "b"))
    page, _ = settle(page, "a", "c1", move, delay=delay, error="no")
    after, count = changes.purge(page, lambda _: True)
    assert ([each.id for each in after.messages], count) == (["a"], 1)
    (target,) = after.targets
    assert changes.build_target(after, target, "birth") == changes.build_target(
        page, target, "birth"
    )
    done = changes.finish_move(after, target)
    assert changes.purge(done, lambda _: True) == (done, 0)
