"""The page of handlers has the tables that the tests of handlers check."""

from pathlib import Path

import pytest
from handlers import COROUTINES, FUNCTIONS, SHAPES, HandlerCase, render_table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "handlers.md"
TABLES = {
    "a coroutine that": COROUTINES,
    "a function that": FUNCTIONS,
    "a handler": SHAPES,
}


@pytest.mark.parametrize("first", TABLES)
def test_the_page_has_the_outcomes_of_the_tests(first: str) -> None:
    """Copy the table from this failure to the page if an outcome changes on purpose."""
    cases: tuple[HandlerCase, ...] = TABLES[first]
    assert f"\n{render_table(cases, first)}\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("first", TABLES)
def test_no_handler_is_shown_twice(first: str) -> None:
    """Each row has its own name."""
    names = [case.name for case in TABLES[first]]
    assert len(set(names)) == len(names)
