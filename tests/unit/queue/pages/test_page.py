"""A page is read strictly, and shows in a listing what there is to do in it."""

from typing import Any

import msgspec
import pytest

from jobsync import Corrupt
from jobsync.core.codec import MAX_VALUE
from jobsync.queue.backend import Failure
from jobsync.queue.pages.page import (
    MAX_MESSAGES,
    MAX_PUSH_BYTES,
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
from jobsync.queue.pages.results import limit_results

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
