"""Elections in a rough world: one leads, epochs grow, and nobody writes who was replaced."""

import os
import subprocess
import sys

import fleets
import pytest
from fleets import Fleet, run_storm, run_suspends

SEEDS = range(12)
SUSPENDS = range(100, 104)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_breaks_in_a_storm(seed: int) -> None:
    """Through a stormy hour, with clocks that differ by up to 10 %, every promise holds."""
    assert run_storm(seed).verdict == []


@pytest.mark.parametrize("seed", SUSPENDS)
def test_the_store_knows_better_where_clocks_stand_still(seed: int) -> None:
    """Suspended nodes may believe too long; no write of theirs is accepted late."""
    assert run_suspends(seed).verdict == []


def test_a_storm_is_the_same_under_any_hash_seed() -> None:
    """The same seed, in processes that hash differently, gives the same history."""
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(fleets.__file__)!r}); "  # noqa: PTH120
        "from fleets import run_storm; print(run_storm(0).world.fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "12345")
    }
    assert len(prints) == 1


def test_the_storms_kill() -> None:
    """Over some seeds sessions die and leaders change, so that the checks have something to see."""
    fleets = [run_storm(seed) for seed in range(3)]
    assert sum(fleet.deaths for fleet in fleets) > 20
    assert sum(terms(fleet) for fleet in fleets) > 20


def terms(fleet: Fleet) -> int:
    """Count the terms that a fleet has seen."""
    return len([each for each in fleet.world.history if each.what == "gained"])
