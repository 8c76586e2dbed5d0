"""How the benchmarks of two checkouts are compared."""

import pytest
from benchmarks.compare import Comparison, Reading, Run, compare, parse_json, parse_text
from benchmarks.table import Better

OLD_TABLES = """
sqlite: median of 6 rounds

                                            bare        ours    budget
drain, concurrency 10                   40,000/s    12,000/s    0.30x, at least 0.25x
single enqueue                           9,000/s     3,000/s    +210 µs of CPU, at most +250 µs
enqueue to start, in process                          2.5 ms    p50 under 10 ms; p95 4.1 ms
enqueue to start, across processes        2.0 ms      5.0 ms    p50 under 10 ms; 2.5x; p95 9 ms
statements of an idle worker                              36    a minute, at most 45
"""


def test_the_tables_of_older_commits_are_read() -> None:
    """A figure is over bare where bare was measured."""
    run = parse_text(OLD_TABLES)
    assert {label: (each.figure, each.better) for label, each in run.items()} == {
        "sqlite: drain, concurrency 10": (0.3, "higher"),
        "sqlite: single enqueue": (210.0, "lower"),
        "sqlite: enqueue to start, in process": (2.5, "lower"),
        "sqlite: enqueue to start, across processes": (2.5, "lower"),
        "sqlite: statements of an idle worker": (36.0, "lower"),
    }
    assert run["sqlite: enqueue to start, in process"].resolution == pytest.approx(0.1 / 2.5)


@pytest.mark.parametrize(
    ("line", "figure"),
    [
        ("can_claim_task        600,000 a second of CPU      at least 400,000", 600_000),
        ("add_task     1,500 a second, 0.75x of INSERT and commit (2,000)   at least 0.50x", 0.75),
        ("idle leader           24 statements a minute       at most 30", 24),
        (
            "rebalance: pins go        0.42 s until all of 50,000 tokens are owned   at most 5 s",
            0.42,
        ),
        ("record: two patterns: one node's         6.1 ms                  1,000 tokens", 6.1),
    ],
)
def test_the_rows_of_all_benchmarks_are_read(line: str, figure: float) -> None:
    """Each prints its rows in its own way."""
    (reading,) = parse_text(line).values()
    assert reading.figure == figure


def test_json_rows_are_read() -> None:
    """With the same figures as the tables of older commits."""
    text = '{"label": "drain", "text": "", "value": 12.0, "bare": 40.0, "better": "higher"}\n'
    assert parse_json(text) == {"drain": Reading(0.3, "higher")}


def runs(better: Better, *figures: float) -> list[Run]:
    """Return runs with one row."""
    return [{"row": Reading(figure, better)} for figure in figures]


@pytest.mark.parametrize(
    ("better", "head", "verdict"),
    [
        ("higher", 85.0, "worse beyond the spread"),
        ("higher", 95.0, "same"),
        ("higher", 115.0, "better"),
        ("lower", 115.0, "worse beyond the spread"),
        ("lower", 95.0, "same"),
        ("lower", 85.0, "better"),
    ],
)
def test_a_row_is_worse_beyond_what_base_differs_from_itself(
    better: Better, head: float, verdict: str
) -> None:
    """Here base changes by ten percent from run to run."""
    base = runs(better, 100.0, 110.0, 100.0, 110.0, 100.0)
    (comparison,) = compare(base, runs(better, head, head, head))
    assert comparison.spread == pytest.approx(0.1)
    assert comparison.verdict == verdict


def test_what_printing_rounds_away_is_not_worse() -> None:
    """A table that says 0.1 ms may mean 0.14 ms."""
    base = [{"row": Reading(0.1, "lower", resolution=1.0)}] * 3
    (comparison,) = compare(base, runs("lower", 0.14))
    assert comparison == Comparison("row", 0.1, 0.14, 1.0, "lower")
    assert comparison.verdict == "same"
