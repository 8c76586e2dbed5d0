"""How the command line shows values to people, and reads what they write."""

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import click
import pytest

from jobsync.cli.render import (
    Column,
    Table,
    ago,
    format_time,
    paint,
    show_facts,
    show_rows,
    show_tables,
)
from jobsync.cli.schedules import _read_since
from jobsync.components import Components


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


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 s ago"),
        (-0.5, "in 0.5 s"),
        (119.9, "119.9 s ago"),
        (120, "2 min ago"),
        (2 * 3600 - 1, "120 min ago"),
        (2 * 3600, "2 h ago"),
        (2 * 86_400 - 1, "48 h ago"),
        (-2 * 86_400, "in 2 d"),
        (None, "-"),
    ],
)
def test_a_duration_is_shown_in_one_unit(seconds: object, shown: str) -> None:
    """The next larger one from two of it on; what is to come is told apart."""
    assert ago(seconds) == shown


@contextmanager
def in_zone(zone: str) -> Iterator[None]:
    """Set the time zone of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "text", "utc"),
    [
        ("UTC", "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("Asia/Tokyo", "2026-01-31", datetime(2026, 1, 30, 15, tzinfo=UTC)),
        ("Asia/Tokyo", "2026-01-31T18:00", datetime(2026, 1, 31, 9, tzinfo=UTC)),
        ("America/New_York", "2026-07-31T18:00", datetime(2026, 7, 31, 22, tzinfo=UTC)),
        ("Asia/Tokyo", "2026-01-31T18:00+01:00", datetime(2026, 1, 31, 17, tzinfo=UTC)),
    ],
)
def test_a_time_without_a_zone_is_local(zone: str, text: str, utc: datetime) -> None:
    """In `--since` as in what is shown."""
    with in_zone(zone):
        since = _read_since(text)
        assert since == utc.timestamp()
        if "+" not in text:
            assert format_time(since).startswith(text.replace("T", " "))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("90m", 5400), ("2h", 7200), ("2d", 172_800), ("0s", 0)]
)
def test_a_span_is_so_long_ago(text: str, seconds: float) -> None:
    """In each unit."""
    now = Components.system().clock.wall().seconds
    assert _read_since(text) == pytest.approx(now - seconds, abs=60)


def test_a_narrow_terminal_leaves_out_spare_columns_from_the_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, and only as many as it must, and says which; the others stay."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    names = ["first", "spare_one", "second", "spare_two", "spare_three"]
    columns = [Column(name, spare=name.startswith("spare")) for name in names]
    seen: list[list[str]] = []
    for width in range(80, 19, -1):
        monkeypatch.setenv("COLUMNS", str(width))
        show_rows(columns, [dict.fromkeys(names, "x" * 9)], as_json=False)
        header, _, *rest = capsys.readouterr().out.splitlines()
        header = header.strip()
        shown = [part.replace(" ", "_") for part in re.split(" {2,}", header)]
        missing = ", ".join(name.replace("_", " ") for name in names if name not in shown)
        if "second" in shown:
            hint = f"not shown, for want of width: {missing}"
            assert " ".join(map(str.strip, rest)) == (hint if missing else "")
        if shown not in seen:
            seen.append(shown)
        assert len(header) <= width
    assert seen[:4] == [names, names[:-1], names[:3], ["first", "second"]]


VALUES: list[tuple[object, str, str]] = [
    (None, "", "-"),
    ("", "", "-"),
    ((), "", "-"),
    ([], "", "-"),
    (0, "0", "0"),
    (0.0, "0.0", "0.0"),
    (False, "no", "no"),
    (True, "yes", "yes"),
    (["a", None, True], "a, , yes", "a, , yes"),
    ({"a": [1]}, '{"a":[1]}', '{"a":[1]}'),
    ("two\nlines\tand tabs", "two lines and tabs", "two lines and tabs"),
]


@pytest.mark.parametrize(("value", "in_pipe", "on_terminal"), VALUES)
def test_each_value_has_one_line_and_one_cell(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    value: object,
    in_pipe: str,
    on_terminal: str,
) -> None:
    """In a pipe what is unknown is empty; people see a dash. JSON has the value itself."""
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [{"a_b": value, "last": "x"}]
    show_rows(["a_b", "last"], rows, as_json=False)
    assert capsys.readouterr().out == f"a_b\tlast\n{in_pipe}\tx\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show_rows(["a_b", "last"], rows, as_json=False)
    header, line = capsys.readouterr().out.splitlines()
    assert re.split(" {2,}", header.strip()) == ["a b", "last"]
    assert line.strip().split("  ")[0] == on_terminal
    show_rows(["a_b"], rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(rows))


@pytest.mark.parametrize(
    ("length", "width", "shown"),
    [(30, 30, "x" * 30), (31, 30, f"{'x' * 29}…"), (90, 30, f"{'x' * 29}…")],
)
def test_a_long_value_is_cut_to_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    width: int,
    shown: str,
) -> None:
    """With an ellipsis at its end, within the width."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    show_rows([Column("text", long=True)], [{"text": "x" * length}], as_json=False)
    assert capsys.readouterr().out.splitlines()[1] == shown


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"NO_COLOR": "yes"}, {"TERM": "dumb"}])
def test_colours_can_be_refused(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    """By any text in the one variable, and by a terminal that has none."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.setenv(name, "")
    assert paint("a", bold=True) == click.style("a", bold=True)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert paint("a", bold=True) == "a"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("counts", [(0, 0), (0, 1), (1, 1)])
def test_tables_without_any_row_name_the_store(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int, int],
    is_terminal: bool,
) -> None:
    """Apart from the tables; one that is empty beside others is no reason to doubt the store."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("jobsync.cli.render.named_store", lambda: "sqlite:///a.db")
    tables = {
        f"table {number}": Table(["a"], [{"a": "x"}] * count) for number, count in enumerate(counts)
    }
    show_tables(tables, as_json=False)
    printed = capsys.readouterr()
    assert printed.err == ("" if any(counts) else "none in sqlite:///a.db\n")
    mark = "" if is_terminal else "# "
    expected = []
    for number, count in enumerate(counts):
        empty = ["  none"] if is_terminal else ["a"]
        rows = ["a", "x"] if count else empty
        expected += [*([""] if number else []), f"{mark}table {number}", *rows]
    assert printed.out.splitlines() == expected
    show_tables(tables, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        title: [{"a": "x"}] * count for title, count in zip(tables, counts, strict=True)
    }


@pytest.mark.parametrize("columns", range(24, 120))
def test_lines_end_between_words_only(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and names stay whole, in the title and in the facts, at any width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    text = "message 01a1e741-acaa-79ce-addb-ff8a9d94c379 of mail-server is corrupt\tand stays so"
    show_facts(text, [("why", text), ("empty", "")])
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines).split() == [*text.split(), "why", *text.split(), "empty"]
    assert all(len(line) <= columns or len(line.split()[-1]) > 30 for line in lines)


def test_every_line_of_a_fact_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the first one, with its own indentation: it may be a trace."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    show_facts("title", [("error", "ValueError\n  File x\n    line 3\n\nend"), ("after", "all")])
    indent = " " * 11
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "  error    ValueError",
        f"{indent}  File x",
        f"{indent}    line 3",
        indent,
        f"{indent}end",
        "  after    all",
    ]


@pytest.mark.parametrize(
    ("values", "is_right"),
    [([1, 20], True), ([1, None], False), ([True, False], False), (["1", "20"], False)],
)
def test_numbers_are_aligned_at_their_last_digit(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    values: list[object],
    is_right: bool,
) -> None:
    """In a column of nothing else; its header is, too."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    show_rows(["_how_many", "x"], [{"_how_many": each, "x": "y"} for each in values], as_json=False)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "how many  x"
    assert {line.startswith(" ") for line in lines} == {is_right}


def test_a_long_column_is_cut_before_others_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 20 characters; then those that are spare go, and then it is cut further."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    columns = [Column("name"), Column("text", long=True), Column("more", spare=True)]
    row = {"name": "n" * 10, "text": "t" * 60, "more": "m" * 10}
    seen: dict[int, tuple[int, int, int]] = {}
    for width in (90, 84, 83, 60, 44, 43, 32, 31, 20):
        monkeypatch.setenv("COLUMNS", str(width))
        show_rows(columns, [row], as_json=False)
        line = capsys.readouterr().out.splitlines()[1]
        assert len(line) <= width
        counts = [line.count(letter) for letter in "ntm"]
        seen[width] = (counts[0], counts[1] + line.count("…"), counts[2])
    assert seen == {
        90: (10, 60, 10),
        84: (10, 60, 10),
        83: (10, 59, 10),
        60: (10, 36, 10),
        44: (10, 20, 10),
        43: (10, 31, 0),
        32: (10, 20, 0),
        31: (10, 19, 0),
        20: (10, 8, 0),
    }
