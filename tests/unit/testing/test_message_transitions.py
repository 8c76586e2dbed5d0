"""Which rows of messages are of one commit."""

from typing import Any

import pytest

from jobsync.testing.message_transitions import list_commits
from jobsync.testing.world import Occurrence


def row(name: str, *, at: float = 1.0, node: str = "a", request: int | None = None) -> Occurrence:
    """Return the row of a message as a commit has left it."""
    details: dict[str, Any] = {"id": name, "state": "ready", "request": request}
    return Occurrence(at, node, "row", details)


OTHER = Occurrence(1.0, "a", "note")


@pytest.mark.parametrize(
    ("history", "commits"),
    [
        ([], []),
        ([row("x"), row("y"), row("z")], ["xyz"]),
        # A message is in a commit once.
        ([row("x"), row("x")], ["x", "x"]),
        ([row("x"), row("y"), row("x"), row("y")], ["xy", "xy"]),
        ([row("x"), row("y"), row("y"), row("x")], ["xy", "yx"]),
        # One commit is at one time, of one node and of one request, without anything between.
        ([row("x"), row("y", at=2.0)], ["x", "y"]),
        ([row("x"), row("y", node="b")], ["x", "y"]),
        ([OTHER, row("x", request=0), row("y")], ["x", "y"]),
        ([row("x"), OTHER, row("y")], ["x", "y"]),
    ],
)
def test_rows_of_one_commit_are_together(history: list[Occurrence], commits: list[str]) -> None:
    """In the order in which they were written."""
    found = ["".join(step.after["id"] for step in commit) for commit in list_commits(history)]
    assert found == commits
