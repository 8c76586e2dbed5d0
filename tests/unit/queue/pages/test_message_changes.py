"""One message of a page is cancelled, deleted, run now or told about; all others stay."""

from typing import Any

import msgspec
import pytest

from jobsync.core.messages import REVOKED
from jobsync.queue.backend import EndedClaim, Failure, Receipt
from jobsync.queue.pages import changes, message_changes
from jobsync.queue.pages.changes import Targets
from jobsync.queue.pages.message_changes import CancelAnswer
from jobsync.queue.pages.page import PageClaim, PageMessage, PageState, QueuePage
from jobsync.queue.pages.results import find_result_problem, keep_result, limit_results
from jobsync.queue.single_message import ProgressReport, StoredResult

NOW = 1_000.0
TARGETS = Targets("dead/d", lambda due: f"0/{due:.0f}")
CLAIMS = (
    PageClaim(id="c1", session="w1", at=NOW - 9),
    PageClaim(id="c2", session="w2", at=NOW - 8),
)
FAILED = (Failure(1, "first", NOW - 7, "w0"), Failure(2, "second", NOW - 6, "w9"))
replace = msgspec.structs.replace


def build(name: str, state: PageState, **changed: Any) -> PageMessage:
    """Return a message whose fields differ from the defaults and from each other."""
    fields: dict[str, Any] = {
        "value": {"n": name},
        "max_attempts": 6,
        "enqueued": NOW - 20,
        "timeout": 11.0,
        "task": "t",
        "deliveries": 5,
        "returned": 2,
        "errors": FAILED,
        "marks": "c0:retry",
    }
    return PageMessage(id=name, state=state, **{**fields, **changed})


HELD: dict[str, Any] = {"claim": "c2", "renewal": 3, "hold": 30.0}
MESSAGES: dict[str, PageMessage] = {
    "ready": build("ready", "ready"),
    "due": build("due", "waiting", due=NOW),
    "waiting": build("waiting", "waiting", due=NOW + 1),
    "suspect": build("suspect", "waiting", is_suspect=True, claim="c1"),
    "claimed": build("claimed", "claimed", **HELD),
    "reported": build(
        "reported", "claimed", **HELD, progress=0.5, progress_note="half", progress_at=NOW - 1
    ),
    "completed": build("completed", "completed", value=None, claim="c1", finished=NOW - 2),
    "dead": build("dead", "dead", claim="c1", finished=NOW - 2),
    "cancelled": build("cancelled", "cancelled", claim="c1", finished=NOW - 2),
    "leaving": build("leaving", "waiting", due=NOW + 99, move="0/x"),
    "dying": build("dying", "dead", claim="c1", finished=NOW - 2, move="dead/x"),
    "moved": PageMessage(id="moved", state="moved", marks="c1:bury"),
}
"""A message in each state."""

PAGE = QueuePage(birth="b", messages=tuple(MESSAGES.values()), claims=CLAIMS)
GONE = {"leaving", "dying", "moved", "nobody"}
"""Those that are not in this page, or leave it: they are looked for elsewhere."""
NAMES = [*MESSAGES, "nobody"]


def check_others(after: QueuePage, name: str) -> PageMessage | None:
    """Check that one message of the page has changed at most; return it."""
    left = {each.id: each for each in after.messages}
    for other in set(MESSAGES) - {name}:
        assert left[other] == MESSAGES[other]
    assert (after.birth, after.key_hold) == (PAGE.birth, PAGE.key_hold)
    return left.get(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_cancelled_message_keeps_what_it_had_and_says_why(name: str) -> None:
    """Its errors before, its value and its counts; a mark makes the receipt of its claim stale."""
    after, answer = message_changes.cancel(PAGE, name, NOW, TARGETS)
    if name in GONE or name in {"completed", "dead", "cancelled"}:
        assert (after, answer) == (PAGE, CancelAnswer(is_here=name not in GONE))
        assert answer.is_here is (name not in GONE)
        return
    before = MESSAGES[name]
    held = name in {"claimed", "reported"}
    session = {"c1": "w1", "c2": "w2", "": ""}[before.claim]
    assert check_others(after, name) == replace(
        before,
        state="cancelled",
        is_suspect=False,
        due=0.0,
        renewal=0,
        hold=0.0,
        finished=NOW,
        errors=(*FAILED, Failure(3, REVOKED, NOW, session)),
        marks="c2:revoke c0:retry" if held else "c0:retry",
        progress=None,
        progress_note="",
        progress_at=0.0,
        move="dead/d",
    )
    ended = EndedClaim(id=name, state="cancelled", attempt=3, session="w2" if held else "")
    assert answer == CancelAnswer(is_here=True, ended=ended)


@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_deleted_alone_unless_it_is_claimed_or_elsewhere(name: str) -> None:
    """In whatever state it is; nothing of the page changes otherwise."""
    after, answer = message_changes.delete(PAGE, name)
    if name in GONE:
        assert (after, answer) == (PAGE, "absent")
    elif name in {"claimed", "reported"}:
        assert (after, answer) == (PAGE, "claimed")
    else:
        assert answer == "deleted"
        assert check_others(after, name) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_message_runs_now_only_if_it_waits(name: str) -> None:
    """It moves to a page that is due; what is due already stays, with all others."""
    after, answer = message_changes.run_now(PAGE, name, NOW, "0/now")
    if name == "waiting":
        assert answer is True
        expected = replace(MESSAGES[name], due=0.0, move="0/now")
        assert check_others(after, name) == expected
        # Who has the page in hand finds nothing to claim in it: all build the same target.
        assert not expected.is_claimable(NOW + 10)
    else:
        assert (after, answer) == (PAGE, None if name in GONE else False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("claim", ["c1", "c2"])
def test_progress_is_noted_for_the_message_that_the_claim_has(name: str, claim: str) -> None:
    """Of two reports, the last; the time is that of the write."""
    reports = [
        ProgressReport(Receipt(name, 5, f"{claim}@0/p"), progress, note)
        for progress, note in ((0.75, "early"), (0.25, "late"))
    ]
    after = message_changes.note_progress(PAGE, reports, NOW)
    if name in {"claimed", "reported"} and claim == "c2":
        assert check_others(after, name) == replace(
            MESSAGES[name], progress=0.25, progress_note="late", progress_at=NOW
        )
    else:
        assert after == PAGE


def test_each_report_of_a_batch_is_noted_with_its_own_message() -> None:
    """However many claims and stale reports there are beside it."""
    receipts = [Receipt("reported", 5, "c2@0/p"), Receipt("claimed", 5, "c1@0/p")]
    reports = [
        ProgressReport(each, n / 10, f"{n}")
        for n, each in enumerate([*receipts, Receipt("claimed", 5, "c2@0/p")], 1)
    ]
    after = message_changes.note_progress(PAGE, reports, NOW)
    shown = {each.id: each.progress_note for each in after.messages if each.progress is not None}
    assert shown == {"claimed": "3", "reported": "1"}


@pytest.mark.parametrize("marks", ["c1:complete", "c1:complete c0:retry c9:release"])
@pytest.mark.parametrize(
    ("stored", "result", "problem"),
    [
        (StoredResult('{"n": 1}'), {"n": 1}, ""),
        (StoredResult("0"), 0, ""),
        (StoredResult(None, "too large"), None, "too large"),
        (StoredResult('"kept"', "shortened"), "kept", "shortened"),
    ],
)
def test_a_result_is_kept_with_its_mark_beside_the_others(
    marks: str, stored: StoredResult, result: Any, problem: str
) -> None:
    """The settlement is still the latest, and those before it are recognised."""
    done = build("m", "completed", value=None, marks=marks)
    kept = keep_result(done, stored)
    first, *rest = marks.split(" ")
    assert kept == replace(
        done, result=result, result_problem=problem, marks=" ".join([first, "result", *rest])
    )
    assert find_result_problem(kept) == problem


@pytest.mark.parametrize(
    ("result", "marks", "problem"),
    [
        (None, "c1:complete result", "a process with older code has dropped it"),
        (None, "c1:complete result c0:retry", "a process with older code has dropped it"),
        (7, "c1:complete result", ""),
        (0, "c1:complete result", ""),
        (None, "c1:complete", ""),
        (None, "resulting:complete", ""),
        (None, "", ""),
    ],
)
def test_a_result_is_missing_only_if_there_was_one(result: Any, marks: str, problem: str) -> None:
    """As the marks of the message say, word by word."""
    message = build("m", "completed", value=None, result=result, marks=marks)
    assert find_result_problem(message) == problem


@pytest.mark.parametrize(
    ("most", "ids", "dropped"),
    [
        (40, "abc", ""),
        (39, "abc", "c"),
        (30, "abc", "c"),
        (29, "abc", "bc"),
        (10, "abc", "abc"),
        (0, "abc", "abc"),
        (29, "ab", "ab"),
        (29, "c", "c"),
        (39, "a", "a"),
        (39, "", ""),
        (39, "v", ""),
    ],
)
def test_the_last_of_the_new_results_are_dropped_until_the_page_fits(
    monkeypatch: pytest.MonkeyPatch, most: int, ids: str, dropped: str
) -> None:
    """As few as possible; values and older results count, and stay. Why is said for each."""
    monkeypatch.setattr("jobsync.queue.pages.results.MAX_PUSH_BYTES", most)
    monkeypatch.setattr("jobsync.queue.pages.results._FULL", "the page is full")
    ten = "x" * 8
    waits = build("v", "ready", value=ten)
    done = [build(name, "completed", value=None, result=ten) for name in "abc"]
    page = QueuePage(birth="b", messages=(done[0], waits, *done[1:]), claims=CLAIMS)
    after = limit_results(page, set(ids))
    expected = [
        replace(each, result=None, result_problem="the page is full")
        if each.id in dropped
        else each
        for each in page.messages
    ]
    assert after == replace(page, messages=tuple(expected))


def test_a_message_that_was_told_to_run_now_is_claimed_from_its_new_page() -> None:
    """At once, on a machine whose clock is behind too."""
    page, _ = message_changes.run_now(PAGE, "waiting", NOW, "0/now")
    (moved,) = changes.build_target(page, "0/now", "b2").messages
    assert moved == replace(MESSAGES["waiting"], due=0.0)
    assert moved.is_claimable(1.0)
