"""How the queue is compared with its peers."""

from collections.abc import Mapping

import pytest
from benchmarks.peers.contenders import BARE, GRAPHILE, OURS, REASONS, TUNED, Part
from benchmarks.peers.report import Figure, Results, Setting, render

SETTING = Setting(rounds=3, postgres="15", python="3.11", cores=2, load=(0.1, 0.2))


def measured(figures: Mapping[tuple[Part, str], list[float]]) -> Results:
    """Build results of the rounds' figures."""
    results = Results()
    for (part, name), values in figures.items():
        for value in values:
            results.add(part, name, Figure(value))
    return results


def postgres(drain: float = 40.0, bulk: float = 90.0) -> Results:
    """Build results that meet all targets, unless a figure is given."""
    return measured(
        {
            ("drain", OURS): [10, 10, 10],
            ("drain", TUNED): [drain, drain, drain],
            ("drain", GRAPHILE): [30, 30, 30],
            ("drain", BARE): [60, 60, 60],
            ("bulk", OURS): [bulk, bulk, bulk],
            ("bulk", GRAPHILE): [20, 20, 20],
            ("bulk", "pg-boss"): [25, 25, 25],
            ("bulk", BARE): [100, 100, 100],
        }
    )


def sqlite(start: float = 4.0) -> Results:
    """Build results that meet all targets, unless a figure is given."""
    return measured({("drain", OURS): [5], ("drain", BARE): [10], ("starts", OURS): [start]})


def test_a_ratio_is_that_of_rounds_and_not_of_medians() -> None:
    """A round under load slows both, and its ratio stays."""
    results = measured({("drain", OURS): [20, 2, 30], ("drain", BARE): [40, 4, 20]})
    assert results.compare("drain", OURS, BARE) == 0.5
    assert results.find("drain", OURS) == 20


def test_less_time_is_better() -> None:
    """Of starts the shortest is the best, and a ratio above 1 means that ours is shorter."""
    results = measured({("starts", OURS): [2], ("starts", BARE): [4], ("starts", GRAPHILE): [1]})
    assert results.compare("starts", OURS, BARE) == 2
    assert results.list_names("starts") == [GRAPHILE, OURS, BARE]


def test_all_targets_are_met() -> None:
    """Then the page says so of each, with the ratio; peers are compared with the best of ours."""
    text, is_met = render({"PostgreSQL": postgres(), "SQLite": sqlite()}, SETTING)
    assert is_met
    assert f"| PostgreSQL drain ({TUNED}) ≥ 1.1x {GRAPHILE} | 1.33x (1.33 to 1.33) | met |" in text
    assert "| bulk enqueue (jobsync) ≥ 3x pg-boss | 3.60x (3.60 to 3.60) | met |" in text
    assert "missed" not in text


@pytest.mark.parametrize(
    ("on_postgres", "on_sqlite"),
    [
        (postgres(drain=32), sqlite()),
        (postgres(bulk=74), sqlite()),
        (postgres(), sqlite(start=5.1)),
    ],
)
def test_one_target_is_missed(on_postgres: Results, on_sqlite: Results) -> None:
    """The page says which, and the command fails."""
    text, is_met = render({"PostgreSQL": on_postgres, "SQLite": on_sqlite}, SETTING)
    assert not is_met
    assert text.count("**missed**") == 1


def test_a_faster_peer_stays_with_the_reason() -> None:
    """Rows above the best of ours are explained, and only those."""
    text, _ = render({"PostgreSQL": postgres(), "SQLite": sqlite()}, SETTING)
    assert f"- PostgreSQL, drain, {BARE}: {REASONS['PostgreSQL', 'drain', BARE]}" in text
    assert f"- PostgreSQL, drain, {GRAPHILE}" not in text


def test_a_part_that_was_not_measured_is_left_out() -> None:
    """One kind of database alone has its own targets."""
    text, is_met = render({"PostgreSQL": Results(), "SQLite": sqlite()}, SETTING)
    assert is_met
    assert "## PostgreSQL" not in text
