"""How the command line shows values to people."""

import re

import pytest

from jobsync.cli.render import format_time


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (1_700_000_000, r"2023-11-1[45] .*"),
        (1_700_000_000_000, "after the year 9999"),
        (253_402_300_799.9, "(9999-12-31|after the year 9999).*"),
        (1e300, "after the year 9999"),
        (-1e12, "before the year 1"),
        (None, "-"),
    ],
)
def test_any_number_of_seconds_is_shown(seconds: object, shown: str) -> None:
    """Also one that no calendar has, such as milliseconds by mistake."""
    assert re.fullmatch(shown, format_time(seconds))
