"""The check of runs of real workers: which tasks were done twice, and which only begun again."""

import pytest
from job_processes import TaskReport, check_tasks
from job_worker import Loop
from worker_protocol import Fact

INTERRUPTIONS = {"b": 5.0}


def fact(at: float, who: str, what: str, task: str) -> Fact:
    """Return what a worker reports of a task."""
    return Fact(at, who, what, {"task": task})


def done(at: float, who: str, task: str) -> list[Fact]:
    """Return what a worker reports that does a task."""
    return [fact(at, who, "begun", task), fact(at + 0.5, who, "ended", task)]


def test_what_two_workers_did_is_done_twice() -> None:
    """Also if another worker was interrupted."""
    facts = [*done(1, "a", "x"), *done(2, "b", "x"), *done(3, "b", "y"), *done(6, "a", "z")]
    assert check_tasks(["x", "y", "z"], facts, INTERRUPTIONS, "tasks").twice == ["x"]


def test_what_was_in_flight_may_be_begun_again() -> None:
    """And is listed as such."""
    facts = [fact(4, "b", "begun", "x"), *done(9, "a", "x")]
    assert check_tasks(["x"], facts, INTERRUPTIONS, "printed") == TaskReport(
        twice=[], never=[], again=["x"], overlapping=[]
    )


@pytest.mark.parametrize(("loop", "twice"), [("tasks", []), ("printed", ["x"])])
def test_what_was_done_and_not_marked_is_in_flight_with_tasks(loop: Loop, twice: list[str]) -> None:
    """It is marked when the next one is asked for; other loops have records of their own."""
    facts = [*done(3, "b", "w"), *done(4, "b", "x"), *done(9, "a", "x")]
    assert check_tasks(["w", "x"], facts, INTERRUPTIONS, loop).twice == twice


def test_only_the_last_one_is_in_flight() -> None:
    """The tasks done before it had been marked."""
    facts = [*done(3, "b", "w"), *done(4, "b", "x"), *done(9, "a", "w")]
    assert check_tasks(["w", "x"], facts, INTERRUPTIONS, "tasks").twice == ["w"]
