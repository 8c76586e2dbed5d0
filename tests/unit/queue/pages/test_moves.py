"""What becomes of pages whose messages move: moves are finished, what can be claimed is known."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync import Components, OutcomeUnknown, Unavailable
from jobsync.errors import JobsyncError, Misconfigured
from jobsync.queue.pages.moves import PageMoves
from jobsync.queue.pages.page import (
    PageClaim,
    PageMark,
    PageMessage,
    PageState,
    QueuePage,
    name_page,
)
from jobsync.queue.pages.page_reader import ListedPage

CLOCK = FakeClock()
NOW = CLOCK.wall_seconds
AWAY = Unavailable("emails", "it is away")
ERRORS: list[JobsyncError] = [
    AWAY,
    OutcomeUnknown("emails", "the reply was lost"),
    Misconfigured("url", "x", "is wrong", "change it"),
]


class Pages:
    """Pages of the test, and what the moves do with them."""

    topic = "emails"

    def __init__(self, page: QueuePage | None = None, moved: Sequence[Any] = ()) -> None:
        self.page = page
        self.moved = [*moved]
        """The targets of each finished move, or an error."""
        self.listed: list[ListedPage] = []
        self.dead: dict[str, Any] = {}
        """How many dead letters a page has, or the error of a write."""
        self.done: list[tuple[str, ...]] = []
        self.asked: list[tuple[str, int, str]] = []
        plan = SimpleNamespace(repeat=lambda: self.done.append(("repeat",)))
        finder: Any = SimpleNamespace(
            add=lambda place: self.done.append(("add", place)),
            remove=lambda place: self.done.append(("remove", place)),
            plan=plan,
        )
        components: Any = SimpleNamespace(clock=CLOCK)
        self.moves = PageMoves(cast("Any", self), finder, cast("Components", components))

    def find_open(self, _: str) -> Any:
        """Return the page that is in hand."""
        return None if self.page is None else SimpleNamespace(page=self.page)

    async def finish_moves(self, place: str) -> list[str]:
        """Finish the moves of a page."""
        self.done.append(("finish", place))
        answer = self.moved.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)

    async def list_all(self, lane: str) -> list[ListedPage]:
        """Return the pages of dead letters."""
        assert lane == "dead"
        return self.listed

    def name_new(self, lane: str, due: float, priority: int = 0) -> str:
        """Return the place of a new page."""
        assert due == NOW
        return f"{lane}/{priority}"

    async def apply(self, place: str, change: Any) -> Any:
        """Change a page of dead letters."""
        found = self.dead[place]
        if isinstance(found, BaseException):
            raise found
        if found is None:
            return None
        messages = tuple(PageMessage(id=f"{place}-{n}", state="dead") for n in range(found))
        after, count = change(QueuePage(birth="b", messages=messages))
        self.asked.append((place, count, "".join(after.targets)))
        return count


def build(*messages: tuple[PageState, str, float], suspect: bool = False) -> QueuePage:
    """Return a page with messages in these states, their targets, and when they are due."""
    claims = (PageClaim(id="c", session="w", at=NOW),)
    return QueuePage(
        birth="b",
        messages=tuple(
            PageMessage(id=f"{n}", state=state, move=move, due=due, claim="c", is_suspect=suspect)
            for n, (state, move, due) in enumerate(messages)
        ),
        claims=claims,
    )


FOLLOWED: dict[str, tuple[QueuePage | None, list[tuple[str, ...]]]] = {
    "not in hand": (None, []),
    "ready": (build(("ready", "", 0.0)), [("add", "0/p")]),
    "claimed": (build(("claimed", "", 0.0)), []),
    "partly claimed": (build(("claimed", "", 0.0), ("ready", "", 0.0)), [("add", "0/p")]),
    "waiting": (build(("waiting", "", NOW + 9)), [("add", "0/p")]),
    "waiting beside claims": (
        build(("claimed", "", 0.0), ("waiting", "", NOW + 9)),
        [("add", "0/p")],
    ),
    "suspect": (build(("waiting", "", 0.0), suspect=True), [("add", "0/p")]),
    "done": (build(("completed", "", 0.0), ("moved", "", 0.0)), [("remove", "0/p")]),
    "empty": (build(), [("remove", "0/p")]),
    "moving": (
        build(("dead", "dead/x", 0.0), ("waiting", "0/y", 0.0)),
        [("finish", "0/p"), ("add", "0/a"), ("add", "0/b"), ("add", "0/p")],
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
async def test_a_page_that_was_changed_is_known_while_there_is_something_to_claim(
    name: str,
) -> None:
    """Now or later; its moves are finished first, and their targets are known, too."""
    page, done = FOLLOWED[name]
    pages = Pages(page, [["0/a", "0/b"]])
    await pages.moves.follow_up("0/p")
    assert pages.done == done


@pytest.mark.parametrize("error", ERRORS)
async def test_a_move_that_cannot_be_finished_is_left_to_others(error: JobsyncError) -> None:
    """Its page is listed soon, because it may have more to claim; the change itself was made."""
    pages = Pages(build(("dead", "dead/x", 0.0)), [error])
    await pages.moves.follow_up("0/p")
    assert pages.done == [("finish", "0/p"), ("repeat",), ("add", "0/p")]
    pages = Pages(build(("dead", "dead/x", 0.0)), [ValueError("a bug")])
    with pytest.raises(ValueError, match="a bug"):
        await pages.moves.finish("0/p")


def list_dead(*pages: tuple[float, int, PageMark]) -> list[ListedPage]:
    """Return pages of dead letters: when each is due, its priority and its mark."""
    return [
        ListedPage(f"dead/{name_page(due, f'nonce{n:07}', priority)}", "v", mark, due, None)
        for n, (due, priority, mark) in enumerate(pages)
    ]


LISTED = list_dead(
    (NOW - 5, 5, PageMark.KEPT),
    (NOW - 9, 0, PageMark.KEPT),
    (NOW - 8, 0, PageMark.DONE),
    (NOW - 7, -4, PageMark.MOVING),
    (NOW - 6, 0, PageMark.UNKNOWN),
)
COUNTS = [3, 2, 9, 4, 1]


def place_dead(pages: Pages, **changed: Any) -> None:
    """Put dead letters in their pages; those of some have an error instead, or are gone."""
    pages.listed = LISTED
    pages.dead = {each.place: count for each, count in zip(LISTED, COUNTS, strict=True)}
    pages.dead |= {LISTED[int(number[1:])].place: count for number, count in changed.items()}


@pytest.mark.parametrize(
    ("limit", "moved"),
    [
        (None, [(1, 2), (3, 4), (4, 1), (0, 3)]),
        (10, [(1, 2), (3, 4), (4, 1), (0, 3)]),
        (7, [(1, 2), (3, 4), (4, 1)]),
        (8, [(1, 2), (3, 4), (4, 1), (0, 1)]),
        (5, [(1, 2), (3, 3)]),
        (1, [(1, 1)]),
    ],
)
async def test_the_oldest_dead_letters_are_put_back_first(
    limit: int | None, moved: list[tuple[int, int]]
) -> None:
    """Up to the limit over all pages, each with its own priority; pages that are done are left."""
    pages = Pages()
    place_dead(pages)
    assert await pages.moves.redrive(None, limit) == sum(count for _, count in moved)
    priorities = [5, 0, 0, -4, 0]
    assert pages.asked == [
        (LISTED[number].place, count, f"0/{priorities[number]}") for number, count in moved
    ]


async def test_only_named_dead_letters_are_put_back() -> None:
    """From whichever page has them; a page that is gone has none."""
    pages = Pages()
    place_dead(pages, n4=None)
    chosen = [f"{LISTED[0].place}-2", f"{LISTED[3].place}-0", f"{LISTED[3].place}-1", "other"]
    assert await pages.moves.redrive(chosen, None) == 3
    assert [(place, count) for place, count, _ in pages.asked if count] == [
        (LISTED[3].place, 2),
        (LISTED[0].place, 1),
    ]


@pytest.mark.parametrize("error", [ERRORS[0], ERRORS[2]])
@pytest.mark.parametrize("first", [True, False])
async def test_a_redrive_that_stops_says_what_was_done(error: JobsyncError, *, first: bool) -> None:
    """Nothing, or so many: then the caller must not take it for nothing."""
    pages = Pages()
    place_dead(pages, **{"n1" if first else "n4": error})
    with pytest.raises(type(error) if first else OutcomeUnknown) as raised:
        await pages.moves.redrive(None, None)
    if first:
        assert raised.value is error
    else:
        assert "6 messages were queued again before" in str(raised.value)
        assert raised.value.__cause__ is error


async def test_each_page_of_a_redrive_is_followed_up() -> None:
    """Its messages are where they can be claimed before the call returns."""
    pages = Pages(build(("waiting", "0/y", 0.0)), [["0/a"]] * 4)
    place_dead(pages)
    await pages.moves.redrive(None, None)
    finished = [("finish", LISTED[number].place) for number in (1, 3, 4, 0)]
    assert [each for each in pages.done if each[0] == "finish"] == finished
    assert pages.done.count(("add", "0/a")) == 4
