"""How runs of real workers are judged: what was done twice, and what was only begun again."""

import pytest
from labourer import Loop
from workshop import Deed, Report, Strike, judge

STRUCK = [Strike("b", 5.0)]


def tell(*deeds: tuple[float, str, str, str]) -> list[Deed]:
    """Make deeds of (time, worker, what, task)."""
    return [Deed(at, who, what, {"task": task}) for at, who, what, task in deeds]


def done(at: float, who: str, task: str) -> list[Deed]:
    """Let a worker do a task."""
    return tell((at, who, "begun", task), (at + 0.5, who, "ended", task))


def test_what_two_did_is_done_twice() -> None:
    """Whoever else was struck."""
    deeds = [*done(1, "a", "x"), *done(2, "b", "x"), *done(3, "b", "y"), *done(6, "a", "z")]
    assert judge(["x", "y", "z"], deeds, STRUCK, "tasks").twice == ["x"]


def test_what_was_in_hand_may_be_begun_again() -> None:
    """And is listed as such."""
    deeds = [*tell((4, "b", "begun", "x")), *done(9, "a", "x")]
    assert judge(["x"], deeds, STRUCK, "printed") == Report(
        twice=[], never=[], again=["x"], overlapping=[]
    )


@pytest.mark.parametrize(("loop", "twice"), [("tasks", []), ("printed", ["x"])])
def test_what_was_done_and_not_marked_is_in_hand_by_tasks(loop: Loop, twice: list[str]) -> None:
    """It is marked when the next one is asked for; other loops have records of their own."""
    deeds = [*done(3, "b", "w"), *done(4, "b", "x"), *done(9, "a", "x")]
    assert judge(["w", "x"], deeds, STRUCK, loop).twice == twice


def test_only_the_last_one_is_in_hand() -> None:
    """What was done before that had been marked."""
    deeds = [*done(3, "b", "w"), *done(4, "b", "x"), *done(9, "a", "w")]
    assert judge(["w", "x"], deeds, STRUCK, "tasks").twice == ["w"]
