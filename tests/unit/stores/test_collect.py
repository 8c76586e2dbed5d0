"""Filtered reads: which rows are asked for, and which are returned, page by page."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jobsync import Corrupt, Invalid, Record
from jobsync.core.filters import parse
from jobsync.stores.scan import Row, check_age, check_limit, check_listing, collect

NONCE = "A" * 12


class Rows:
    """Rows of a database: those with an odd value match; some cannot be decoded.

    Args:
        text: a row each: "y" matches, "n" does not, "x" is corrupt.
    """

    def __init__(self, text: str) -> None:
        self._rows: list[Row] = [(f"n/{i:02}", kind) for i, kind in enumerate(text)]
        self.asked: list[tuple[str, int]] = []
        self.reported: list[str] = []

    async def fetch(self, after: str, page: int) -> Sequence[Row]:
        """Return rows in order."""
        self.asked.append((after, page))
        return [row for row in self._rows if row[0] > after][:page]

    def decode(self, key: str, kind: str) -> Record:
        """Decode a row."""
        if kind == "x":
            raise Corrupt(key, "damaged")
        return Record(key, {"odd": kind == "y"}, NONCE, 1, 0, 1, NONCE)

    def report(self, corrupt: Corrupt) -> None:
        """Note what was skipped."""
        self.reported.append(corrupt.key[2:])


async def read(rows: Rows, where: dict[str, Any] | None, **options: Any) -> list[str]:
    """Return the numbers of the rows that are found."""
    found = await collect(rows.fetch, rows.decode, rows.report, where=parse(where), **options)
    return [record.key[2:] for record in found]


@pytest.mark.parametrize(
    ("text", "where", "after", "limit", "found", "reported", "asked"),
    [
        # Without a filter a page is what is asked for.
        ("", None, "", 2, [], [], [("", 2)]),
        ("yn", None, "", 3, ["00", "01"], [], [("", 3)]),
        ("yny", None, "", 3, ["00", "01", "02"], [], [("", 3)]),
        ("ynyn", None, "n/00", 2, ["01", "02"], [], [("n/00", 2)]),
        # Corrupt rows take no place: more are read, after the last row of any kind.
        ("xyx", None, "", 3, ["01"], ["00", "02"], [("", 3), ("n/02", 3)]),
        ("xxxy", None, "", 1, ["03"], ["00", "01", "02"], None),
        ("yxny", None, "", 2, ["00", "02"], ["01"], [("", 2), ("n/01", 2)]),
        ("yyx", None, "", 2, ["00", "01"], [], [("", 2)]),
        ("xx", None, "", 2, [], ["00", "01"], [("", 2), ("n/01", 2)]),
        # With a filter at least three rows are read at once, and no more are returned than asked.
        ("", {"odd": True}, "", 1, [], [], [("", 3)]),
        ("nny", {"odd": True}, "", 1, ["02"], [], [("", 3)]),
        ("nnny", {"odd": True}, "", 1, ["03"], [], [("", 3), ("n/02", 3)]),
        ("yyyy", {"odd": True}, "", 2, ["00", "01"], [], [("", 3)]),
        ("nyyyyy", {"odd": True}, "", 5, ["01", "02", "03", "04", "05"], [], None),
        ("ynxyny", {"odd": True}, "n/00", 2, ["03", "05"], ["02"], [("n/00", 3), ("n/03", 3)]),
        ("nxnxny", {"odd": True}, "", 4, ["05"], ["01", "03"], [("", 4), ("n/03", 4)]),
        ("nnnnnn", {"odd": True}, "", 1, [], [], [("", 3), ("n/02", 3), ("n/05", 3)]),
        ("yynn", {"odd": False}, "", 2, ["02", "03"], [], [("", 3), ("n/02", 3)]),
    ],
)
async def test_rows_are_read_until_enough_match(
    text: str,
    where: dict[str, Any] | None,
    after: str,
    limit: int,
    found: list[str],
    reported: list[str],
    asked: list[tuple[str, int]] | None,
) -> None:
    """Each once, in order, with no more requests than needed; none after the last short page."""
    rows = Rows(text)
    assert await read(rows, where, after=after, limit=limit, read_ahead=3) == found
    assert rows.reported == reported
    assert asked is None or rows.asked == asked


async def test_many_rows_are_read_at_once_if_a_filter_may_drop_most() -> None:
    """Or as many as are wanted, if that is more."""
    for where, limit, page in (
        (None, 1, 1),
        (None, 1000, 1000),
        ({"odd": True}, 1, 256),
        ({"odd": True}, 256, 256),
        ({"odd": True}, 1000, 1000),
    ):
        rows = Rows("yn")
        await read(rows, where, after="", limit=limit)
        assert rows.asked == [("", page)]


@pytest.mark.parametrize(
    ("options", "field", "value", "fix"),
    [
        ({"prefix": "n"}, "prefix", "n", None),
        ({"limit": 0}, "limit", 0, "read page by page"),
        ({"limit": 100_001}, "limit", 100_001, "read page by page"),
        ({"after": "m/a"}, "after", "m/a", "pass the last key of the previous page"),
        ({"after": "n"}, "after", "n", "pass the last key of the previous page"),
        ({"after": "n//a"}, "after", "n//a", None),
        (
            {"until": "o/a"},
            "until",
            "o/a",
            "leave it out to list to the end of the level",
        ),
        ({"until": "n/ a"}, "until", "n/ a", None),
        ({"after": "m/a", "until": "o/a"}, "after", "m/a", None),
        ({"after": "n/a", "until": "m/b"}, "until", "m/b", None),
    ],
)
def test_a_wrong_argument_of_a_listing_is_named(
    options: dict[str, Any], field: str, value: object, fix: str | None
) -> None:
    """Of several the first; with its own value and its own fix."""
    arguments = {"prefix": "n/", "after": "", "limit": 7, "until": "", **options}
    with pytest.raises(Invalid) as caught:
        check_listing(**arguments)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert fix is None or caught.value.fix == fix
    assert fix is None or field == "limit" or caught.value.problem == "must be under 'n/'"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"after": "n/a"},
        {"until": "n/a"},
        {"after": "n/a", "until": "n/b"},
        {"after": "n/b", "until": "n/a"},
        {"after": "n/a/b"},
        {"limit": 100_000},
    ],
)
def test_every_range_under_a_prefix_can_be_listed(options: dict[str, Any]) -> None:
    """Also an empty one."""
    check_listing(**{"prefix": "n/", "after": "", "limit": 1, **options})


def test_numbers_of_a_listing_that_are_refused_are_shown() -> None:
    """With the field that they were given for."""
    cases: list[tuple[Callable[[Any], None], float, str]] = [
        (check_limit, 0, "limit"),
        (check_limit, True, "limit"),
        (check_age, 2e9, "older_than"),
        (check_age, float("-inf"), "older_than"),
    ]
    for check, value, field in cases:
        with pytest.raises(Invalid) as caught:
            check(value)
        assert (caught.value.field, caught.value.value) == (field, value)
