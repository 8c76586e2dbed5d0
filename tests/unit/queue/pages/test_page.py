"""A page is read strictly, and shows in a listing what there is to do in it."""

from typing import Any

import msgspec
import pytest

from jobsync import Corrupt
from jobsync.core.arguments import LONGEST_DELAY
from jobsync.core.codec import MAX_VALUE
from jobsync.queue.backend import Failure
from jobsync.queue.pages.page import (
    MAX_MESSAGES,
    MAX_PUSH_BYTES,
    KeyHold,
    PageClaim,
    PageMark,
    PageMessage,
    QueuePage,
    encode_page,
    find_format,
    keep_class,
    name_page,
    read_due,
    read_page,
    read_priority,
)
from jobsync.queue.pages.results import find_result_problem, keep_result, limit_results
from jobsync.queue.single_message import StoredResult

NONCE = "abc-_0123456"


def page(*messages: PageMessage, claims: tuple[PageClaim, ...] = ()) -> QueuePage:
    """Return a page with these messages."""
    return QueuePage(birth=NONCE, messages=messages, claims=claims)


def test_names_sort_by_due_time_and_say_it() -> None:
    """On every server, with the byte order of names."""
    times = [0.0, 1.5, 999.0, 1_700_000_000.25, 1_700_000_001.0, 9e9]
    names = [name_page(time, NONCE) for time in times]
    assert names == sorted(names)
    assert [read_due(name) for name in names] == times


def test_names_of_urgent_pages_sort_first_and_say_it() -> None:
    """Before all times, in each of the ten classes; a target gets the class of its source."""
    names = [f"0/{name_page(9e9 - each, NONCE, each)}" for each in range(5, -5, -1)]
    assert names == sorted(names)
    assert [read_priority(name) for name in names] == [*range(5, -5, -1)]
    plain = f"dead/{name_page(5.0, NONCE)}"
    assert keep_class(names[0], plain) == f"dead/{name_page(5.0, NONCE, 5)}"
    assert [find_format(each, page()) for each in (plain, names[0])] == [1, 2]


@pytest.mark.parametrize("name", ["", "readme", "5123", f"5170000000000x{NONCE}", f"{NONCE}!"])
def test_other_names_are_not_pages(name: str) -> None:
    """Somebody put another object there."""
    assert read_due(name) is None


def test_a_page_reads_back_as_it_was() -> None:
    """With every field of a message that was claimed, failed and is claimed again."""
    claim = PageClaim(id="c", session="w", at=5.0)
    message = PageMessage(
        id="m", value={"n": 1}, state="claimed", claim="c", deliveries=2, returned=1, hold=30.0
    )
    written = page(message, PageMessage(id="n", value=None), claims=(claim,))
    assert read_page("k", msgspec.to_builtins(written)) == written


WRONG: dict[str, dict[str, Any]] = {
    "too many deliveries": {"deliveries": 2**31 - 1},
    "more returns than deliveries": {"returned": 1},
    "negative deliveries": {"deliveries": -1},
    "no attempts": {"max_attempts": 0},
    "a timeout that is no time": {"timeout": -1.0},
    "no timeout": {"timeout": 0.0},
    "a timeout of more than a year": {"timeout": LONGEST_DELAY + 1},
    "an endless timeout": {"timeout": 1e300},
    "a due time beyond all times": {"due": 1e300},
    "an unknown state": {"state": "lost"},
    "a claim that is not there": {"state": "claimed", "claim": "gone"},
    "no id": {"id": None},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_impossible_pages_are_refused(fields: dict[str, Any]) -> None:
    """As a whole: one message cannot be trusted if another one is impossible."""
    value = {"birth": NONCE, "messages": [{"id": "a"}, {"id": "m", "value": 1, **fields}]}
    with pytest.raises(Corrupt):
        read_page("k", value)


@pytest.mark.parametrize("value", [None, 7, [], {}, {"birth": 5}, {"birth": "x", "messages": 3}])
def test_what_is_not_a_page_is_refused(value: Any) -> None:
    """Whatever JSON it is."""
    with pytest.raises(Corrupt, match="not a page"):
        read_page("k", value)


def test_a_message_is_in_a_page_once() -> None:
    """Two of them could not be settled apart."""
    with pytest.raises(Corrupt, match="twice"):
        read_page("k", {"birth": NONCE, "messages": [{"id": "a"}, {"id": "a"}]})


MARKS: dict[PageMark, PageMessage] = {
    PageMark.DONE: PageMessage(id="m", state="completed"),
    PageMark.KEPT: PageMessage(id="m", state="dead"),
    PageMark.CLAIMED: PageMessage(id="m", state="claimed", claim="c"),
    PageMark.WAITING: PageMessage(id="m", state="waiting", due=20.0),
    PageMark.SUSPECT: PageMessage(id="m", state="waiting", due=5.0, is_suspect=True),
    PageMark.READY: PageMessage(id="m", state="waiting", due=5.0),
    PageMark.MOVING: PageMessage(id="m", state="waiting", due=90.0, move="0/x"),
}


@pytest.mark.parametrize("mark", MARKS)
def test_the_mark_is_the_most_urgent_fact(mark: PageMark) -> None:
    """Whatever else is in the page, in whatever order; a move is never hidden."""
    hidden = {PageMark.CLAIMED} if mark is PageMark.READY else set()
    others = [each for other, each in MARKS.items() if other <= mark and other not in hidden]
    assert page(*others).find_mark(10.0) is mark
    assert page(*reversed(others)).find_mark(10.0) is mark


def test_claims_beside_messages_to_claim_are_shown() -> None:
    """Whoever looks for claims need not read pages that nobody has touched."""
    mixed = page(MARKS[PageMark.READY], MARKS[PageMark.CLAIMED], MARKS[PageMark.DONE])
    assert mixed.find_mark(10.0) is PageMark.PARTLY


def test_a_message_can_be_claimed_from_its_time_on() -> None:
    """A listing shows the same."""
    message = PageMessage(id="m", state="waiting", due=20.0)
    for now, can_be in ((19.999, False), (20.0, True), (21.0, True)):
        assert message.is_claimable(now) is can_be
        mark = PageMark.READY if can_be else PageMark.WAITING
        assert page(message).find_mark(now) is mark


@pytest.mark.parametrize(
    ("state", "move", "can_be"),
    [
        ("ready", "", True),
        ("waiting", "", True),
        ("waiting", "0/x", False),
        ("claimed", "", False),
        ("completed", "", False),
        ("cancelled", "", False),
        ("dead", "", False),
        ("moved", "", False),
    ],
)
def test_only_messages_that_wait_can_be_claimed(state: Any, move: str, can_be: bool) -> None:
    """Not one that is on its way to another page."""
    assert PageMessage(id="m", state=state, move=move).is_claimable(10.0) is can_be


@pytest.mark.parametrize(
    ("deliveries", "returned", "attempts"), [(0, 0, 0), (3, 0, 3), (3, 2, 1), (3, 3, 0), (1, 2, 0)]
)
def test_deliveries_that_were_returned_are_no_attempts(
    deliveries: int, returned: int, attempts: int
) -> None:
    """Whatever somebody has written there, they are never negative."""
    message = PageMessage(id="m", deliveries=deliveries, returned=returned)
    assert message.attempts == attempts


def test_a_key_is_passed_on_among_messages_that_are_handled() -> None:
    """A dead letter gives it up; the page that it leaves says where it is."""
    hold = KeyHold(key="k", token="t", id="m", until=5.0, step=3)
    source = QueuePage(birth=NONCE, key_hold=hold)
    assert source.pass_key("0/x") == msgspec.structs.replace(hold, step=4)
    assert source.leave_key("0/x") == msgspec.structs.replace(hold, next="0/x")
    assert source.pass_key("dead/x") is None
    assert source.leave_key("dead/x") == hold
    assert page().pass_key("0/x") is page().leave_key("0/x") is None


KEYED = QueuePage(birth=NONCE, key_hold=KeyHold(key="k", token="t"))
WITH_TASK = page(PageMessage(id="m"), PageMessage(id="n", task="send"))


@pytest.mark.parametrize(
    ("priority", "content", "format"),
    [
        (0, page(), 1),
        (1, page(), 2),
        (-4, page(), 2),
        (0, KEYED, 2),
        (1, KEYED, 2),
        (0, WITH_TASK, 3),
        (1, WITH_TASK, 3),
    ],
)
def test_older_code_leaves_alone_what_it_would_forget(
    priority: int, content: QueuePage, format: int
) -> None:
    """A priority, a key or a task, each alone."""
    assert find_format(f"0/{name_page(5.0, NONCE, priority)}", content) == format


def test_the_last_of_the_errors_that_do_not_fit_is_kept() -> None:
    """As long as there is room for, of each message."""
    errors = tuple(Failure(attempt=number, error=f"{number}" * 1000) for number in (1, 2, 3))
    messages = [PageMessage(id=f"{number}", errors=errors) for number in range(1_400)]
    stored, text = encode_page(page(*messages))
    assert len(text) <= MAX_VALUE
    kept = (Failure(attempt=3, error="3" * 200),)
    assert {each.errors for each in stored.messages} == {kept}
    assert encode_page(page(*messages[:100]))[0] == page(*messages[:100])


@pytest.mark.parametrize(
    ("marks", "result", "problem", "found"),
    [
        ("c:complete", None, "", ""),
        ("c:complete result", "x", "", ""),
        ("c:complete result", 0, "", ""),
        ("c:complete result", None, "too large", "too large"),
        ("c:complete result", None, "", "a process with older code has dropped it"),
        ("result-1:complete", None, "", ""),
    ],
)
def test_why_a_message_has_no_result(marks: str, result: Any, problem: str, found: str) -> None:
    """Only if its handler returned one. The name of a claim says nothing."""
    message = PageMessage(id="m", marks=marks, result=result, result_problem=problem)
    assert find_result_problem(message) == found


def test_a_result_keeps_how_earlier_claims_were_settled() -> None:
    """They still answer repeated settlements."""
    message = PageMessage(id="m", state="completed", marks="c:complete b:retry a:snooze")
    kept = keep_result(message, StoredResult("[1]", "why"))
    assert kept == msgspec.structs.replace(
        message, result=[1], result_problem="why", marks="c:complete result b:retry a:snooze"
    )
    assert keep_result(message, StoredResult(None, "why")).result is None


def test_an_empty_page_is_done() -> None:
    """All of its messages were purged."""
    assert page().find_mark(10.0) is PageMark.DONE


@pytest.mark.parametrize(
    ("errors", "note", "kept"),
    [
        pytest.param(1, "\U0001f40c" * 200, ["x" * 20], id="notes"),
        pytest.param(50, "", ["x" * 20], id="many errors"),
        pytest.param(1, "", ["x" * 20], id="all that fits"),
    ],
)
def test_a_full_page_is_stored_without_what_is_only_for_people(
    errors: int, note: str, kept: list[str]
) -> None:
    """Else nobody could claim or settle its messages any more."""
    failure = Failure(attempt=1, error="x" * 20, at=1_700_000_000.0, session="w" * 40)
    full = page(
        *(
            PageMessage(
                id=f"{number:036}",
                value="x" * (MAX_PUSH_BYTES // MAX_MESSAGES),
                task="t" * 200,
                state="claimed",
                claim=f"{number:012}",
                errors=(failure,) * errors,
                progress=0.5,
                progress_note=note,
            )
            for number in range(MAX_MESSAGES)
        ),
        claims=tuple(
            PageClaim(id=f"{number:012}", session="w" * 40, at=1_700_000_000.0)
            for number in range(MAX_MESSAGES)
        ),
    )
    stored, text = encode_page(full)
    assert len(text) <= MAX_VALUE
    assert msgspec.json.decode(text, type=QueuePage) == stored
    assert [[each.error for each in message.errors] for message in stored.messages] == [
        kept
    ] * MAX_MESSAGES
    bare = {"errors": (), "progress_note": ""}
    assert [msgspec.structs.replace(each, **bare) for each in stored.messages] == [
        msgspec.structs.replace(each, **bare) for each in full.messages
    ]


def test_of_results_that_do_not_fit_the_last_are_dropped() -> None:
    """As many as needed: the others are kept."""
    text = "x" * (MAX_PUSH_BYTES // 2 - 10)
    done = [PageMessage(id=name, state="completed", result=text) for name in "abc"]
    kept = limit_results(page(*done), "abc")
    assert [each.result for each in kept.messages] == [text, text, None]
    assert "more than" in kept.messages[2].result_problem


@pytest.mark.parametrize(
    ("size", "ids", "kept"),
    [
        (MAX_PUSH_BYTES // 2, "ab", "ab"),
        (MAX_PUSH_BYTES // 2 + 1, "ab", "a"),
        (MAX_PUSH_BYTES // 2 + 1, "a", "b"),
        (MAX_PUSH_BYTES, "ab", "a"),
        (MAX_PUSH_BYTES + 1, "ab", ""),
        (MAX_PUSH_BYTES, "", "ab"),
    ],
)
def test_results_have_room_for_so_many_bytes_together(size: int, ids: str, kept: str) -> None:
    """Only those of this settlement are dropped: others were promised to be kept."""
    done = [PageMessage(id=name, state="completed", result="x" * (size - 2)) for name in "ab"]
    found = limit_results(page(*done), ids)
    assert "".join(each.id for each in found.messages if each.result is not None) == kept
    assert "".join(each.id for each in found.messages if not each.result_problem) == kept
