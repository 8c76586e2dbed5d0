"""The order in which test files run."""

from types import SimpleNamespace
from typing import Any

from file_order import take_turns


def order(*names: str) -> list[str]:
    """Return the ids of tests in the order in which they run."""
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    return [item.nodeid for item in take_turns(items)]


def test_files_that_compute_are_spread_among_those_that_wait() -> None:
    """Short files are last."""
    waiting = [f"tests/docs/test_{n}.py::test" for n in range(4)]
    computing = [f"tests/simulation/test_{n}.py::test" for n in range(2)]
    short = ["tests/unit/test_0.py::test"]
    expected = [waiting[0], computing[0], *waiting[1:3], computing[1], waiting[3], *short]
    assert order(*short, *computing, *waiting) == expected


def test_no_test_is_lost_if_a_file_is_named_twice() -> None:
    """Found: only the tests that were named last ran."""
    first, second, third = "tests/a.py::one", "tests/b.py::two", "tests/a.py::three"
    assert order(first, second, third) == [first, third, second]
