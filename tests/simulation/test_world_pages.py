"""The log of pages: rows of the messages that a commit changed, and what must hold for pages."""

from collections.abc import Callable
from typing import Any

import pytest

from jobsync.testing import World, check_messages
from jobsync.testing.pages import PageLog

SOURCE, TARGET = "page/q/0/source", "page/q/0/target"
HOUR = 3600.0


class Pages:
    """A log whose commits are written by hand."""

    def __init__(self) -> None:
        self.world = World(0)
        self.time = 0.0
        self.log = PageLog(self.world, lambda: self.time)
        self.commits = 0

    def commit(self, key: str, *messages: dict[str, Any]) -> None:
        """Record the commit of a page."""
        self.commits += 1
        value = {"birth": "b", "messages": messages, "claims": [{"id": "c", "session": "s"}]}
        self.world.note("a", "commit", key=key, nonce=f"n{self.commits}", value=value)

    def drop(self, key: str) -> None:
        """Record that a page was dropped."""
        self.world.note("a", "drop", keys=[key])

    @property
    def found(self) -> list[str]:
        """The ids of the violations."""
        return [each.invariant for each in self.world.violations]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The ids and states of the rows."""
        history = self.world.history
        return [(e.details["id"], e.details["state"]) for e in history if e.what == "row"]


def done(name: str) -> dict[str, Any]:
    """Return a message that is completed."""
    return {"id": name, "state": "completed", "finished": 1.0, "value": None}


def claimed(name: str) -> dict[str, Any]:
    """Return a message that is claimed."""
    return {"id": name, "state": "claimed", "claim": "c", "hold": 30.0, "deliveries": 1}


def waiting(name: str, **fields: Any) -> dict[str, Any]:
    """Return a message that waits."""
    return {"id": name, "state": "waiting", "due": 5.0, **fields}


def test_one_commit_moves_several_messages() -> None:
    """Each that has changed has a row, and no other."""
    pages = Pages()
    pages.commit(SOURCE, {"id": "x"}, {"id": "y"}, {"id": "z"})
    pages.commit(SOURCE, claimed("x"), claimed("y"), {"id": "z"})
    pages.commit(SOURCE, done("x"), claimed("y"), {"id": "z"})
    assert pages.rows == [
        *(("x", "ready"), ("y", "ready"), ("z", "ready")),
        *(("x", "claimed"), ("y", "claimed")),
        ("x", "completed"),
    ]
    assert pages.found == []


def test_a_move_is_one_change() -> None:
    """A message counts as what the move makes of it; its copy says nothing new."""
    pages = Pages()
    pages.commit(SOURCE, claimed("x"))
    pages.commit(SOURCE, waiting("x", move="0/target"))
    assert pages.log.list_moving() == [SOURCE]
    pages.commit(TARGET, waiting("x"))
    pages.commit(SOURCE, {"id": "x", "state": "moved"})
    assert pages.log.find("x") == TARGET
    assert pages.rows == [("x", "claimed"), ("x", "waiting")]
    pages.time = HOUR
    pages.drop(SOURCE)
    assert pages.rows[2:] == []
    assert (pages.found, pages.log.list_moving()) == ([], [])


def come_back(pages: Pages) -> None:
    """A dropped page is created again."""
    pages.commit(SOURCE, done("x"))
    pages.time = HOUR
    pages.drop(SOURCE)
    pages.commit(SOURCE, done("x"))


def be_in_two_pages(pages: Pages) -> None:
    """A message is in two pages, and neither moves it."""
    pages.commit(SOURCE, waiting("x"))
    pages.commit(TARGET, waiting("x"))


def revive(pages: Pages) -> None:
    """A page that is done has something to handle again."""
    pages.commit(SOURCE, done("x"))
    pages.commit(SOURCE, waiting("x"))


def drop_what_moves(pages: Pages) -> None:
    """A page is dropped before the target of its move exists."""
    pages.commit(SOURCE, waiting("x", move="0/target"))
    pages.time = HOUR
    pages.drop(SOURCE)


def drop_early(pages: Pages) -> None:
    """A page is dropped while a copy of its creation may still arrive."""
    pages.commit(SOURCE, done("x"))
    pages.time = HOUR / 2
    pages.drop(SOURCE)


@pytest.mark.parametrize(
    ("break_it", "invariant"),
    [
        (come_back, "P1"),
        (be_in_two_pages, "P2"),
        (revive, "P3"),
        (drop_what_moves, "P4"),
        (drop_early, "P5"),
    ],
)
def test_the_log_notices(break_it: Callable[[Pages], None], invariant: str) -> None:
    """Each way to break the pages is reported by name."""
    pages = Pages()
    break_it(pages)
    assert pages.found == [invariant]


def test_a_message_that_is_gone_is_missed() -> None:
    """A claimed message vanishes from its page."""
    pages = Pages()
    pages.commit(SOURCE, {"id": "x"}, {"id": "y"})
    pages.commit(SOURCE, claimed("x"), {"id": "y"})
    pages.commit(SOURCE, {"id": "y"})
    assert [each.invariant for each in check_messages(pages.world.history)] == ["Q1"]
