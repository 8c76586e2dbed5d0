"""Elections in a rough world: one leads, epochs grow, and nobody writes who was replaced."""

import pytest
from fleets import Fleet, run_storm

SEEDS = range(15)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_breaks_in_a_storm(seed: int) -> None:
    """Through a stormy hour, with clocks that differ by up to 10 %, every promise holds."""
    assert run_storm(seed).verdict == []


def test_the_storms_kill() -> None:
    """Over some seeds sessions die and leaders change, so that the checks have something to see."""
    fleets = [run_storm(seed) for seed in range(3)]
    assert sum(fleet.deaths for fleet in fleets) > 20
    assert sum(terms(fleet) for fleet in fleets) > 20


def terms(fleet: Fleet) -> int:
    """Count the terms that a fleet has seen."""
    return len([each for each in fleet.world.history if each.what == "gained"])
