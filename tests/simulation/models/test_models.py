"""Small models hold in every state, and fail when their protocol is broken.

`pytest -s tests/simulation/models` prints the number of states, and the shortest trace to a
violation for every mutation.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import bell_model
import key_model
import page_model
import pytest
import role_model
import session_model
import settling_model
from explorer import Model, Report, Step, TooLarge, explore


class Case(NamedTuple):
    """A model in one of its scenes."""

    build: Callable[[Any], Model[Any]]
    scene: Any
    name: str


HOLDING = [
    Case(model, scene, f"{model.__name__}, {world}")
    for model, worlds in (
        (settling_model.SettlingModel, settling_model.WORLDS),
        (session_model.SessionModel, session_model.WORLDS),
        (role_model.RoleModel, role_model.WORLDS),
        (page_model.PageModel, page_model.WORLDS),
        (bell_model.BellModel, bell_model.WORLDS),
        (key_model.KeyModel, key_model.WORLDS),
    )
    for world, scene in worlds.items()
]
BROKEN = [
    Case(mutation, module.WORLDS[world], f"{mutation.__name__}, {world}")
    for module in (settling_model, session_model, role_model, page_model, bell_model, key_model)
    for mutation, world in module.MUTATIONS.items()
]


def find(case: Case) -> Report:
    """Explore a model and print the result."""
    report = explore(case.build(case.scene))
    sys.stdout.write(f"\n{case.name}: {report}\n")
    return report


@pytest.mark.parametrize("case", HOLDING, ids=lambda case: case.name)
def test_a_protocol_holds(case: Case) -> None:
    """No reachable state violates an invariant or is a dead end."""
    report = find(case)
    assert report.violation is None, report


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_protocol_is_found(case: Case) -> None:
    """The mutation breaks it: without it the model holds in the same scene."""
    report = find(case)
    assert report.violation
    assert len(report.trace) > 0


Jugs = tuple[int, int]


class PouringWater(Model[Jugs]):
    """Jugs of 3 and 5 litres and a well: the shortest trace to 4 litres is known."""

    def starts(self) -> Iterator[Jugs]:
        yield 0, 0

    def steps(self, state: Jugs) -> Iterator[Step[Jugs]]:
        small, large = state
        yield Step("fill the small one", (3, large))
        yield Step("fill the large one", (small, 5))
        yield Step("empty the small one", (0, large))
        yield Step("empty the large one", (small, 0))
        poured = min(small, 5 - large)
        yield Step("pour the small one into the large one", (small - poured, large + poured))
        poured = min(large, 3 - small)
        yield Step("pour the large one into the small one", (small + poured, large - poured))

    def find_violation(self, state: Jugs) -> str | None:
        return "there are 4 litres" if 4 in state else None


class Harmless(PouringWater):
    """No state is a violation."""

    def find_violation(self, state: Jugs) -> str | None:
        return None


class SpilledOnce(Harmless):
    """Once both are full, every step is a fault."""

    def steps(self, state: Jugs) -> Iterator[Step[Jugs]]:
        for what, after, _ in super().steps(state):
            yield Step(what, after, is_fault=state == (3, 5))

    def is_goal(self, state: Jugs) -> bool:
        return state == (0, 0)


def test_the_explorer_finds_a_shortest_trace() -> None:
    """It takes six steps to 4 litres, and no fewer."""
    report = explore(PouringWater())
    assert report.violation == "there are 4 litres"
    assert report.trace == (
        "fill the large one",
        "pour the large one into the small one",
        "empty the small one",
        "pour the large one into the small one",
        "fill the large one",
        "pour the large one into the small one",
    )
    assert "6. pour the large one into the small one" in str(report)


def test_the_explorer_visits_every_state() -> None:
    """One of the two jugs is always full or empty: 16 of the 24 fillings."""
    report = explore(Harmless())
    assert (report.states, report.violation, report.trace) == (16, None, ())


def test_the_explorer_finds_a_dead_end() -> None:
    """A state that only a fault leads out of is a dead end."""
    report = explore(SpilledOnce())
    assert report.violation == "dead end"
    assert sorted(report.trace) == ["fill the large one", "fill the small one"]


def test_the_explorer_refuses_too_many_states() -> None:
    """A model with too many states is an error, not a pass."""
    with pytest.raises(TooLarge, match="more than 15 states"):
        explore(Harmless(), most=15)
