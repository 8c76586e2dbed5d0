"""Which nodes of a fleet own tokens, and when the leader reads the pins."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from jobsync.core.assignment import NodeRef, Plan
from jobsync.core.handover import assign
from jobsync.jobs.rebalancer import Rebalancer, _find_members
from jobsync.jobs.registration import NodeRecord, find_candidates


def node(name: str, **changes: Any) -> NodeRecord:
    """Return a node that is ready, unless the changes say otherwise."""
    fields = {"stage": "ready", "is_observer": False, "minimum_nodes": 0, **changes}
    return NodeRecord(
        name=name, incarnation=f"{name}.1", applied=0, created=0.0, host="", pid=1, **fields
    )


@pytest.mark.parametrize("stage", ["joining", "ready", "leaving", "left"])
@pytest.mark.parametrize("minimum", [0, 2])
@pytest.mark.parametrize("is_observer", [False, True])
@pytest.mark.parametrize("is_dead", [False, True])
def test_candidates_are_ready_or_wait_for_others(
    stage: Any, minimum: int, is_observer: bool, is_dead: bool
) -> None:
    """One that joins counts once it is prepared to own tokens; the others never do."""
    one = node("a", stage=stage, minimum_nodes=minimum, is_observer=is_observer)
    found = find_candidates([one, node("b")], {"a.1"} if is_dead else set())
    takes_part = stage == "ready" or (stage == "joining" and minimum > 0)
    is_candidate = takes_part and not is_observer and not is_dead
    assert [each.name for each in found] == (["a", "b"] if is_candidate else ["b"])


@pytest.mark.parametrize("known", ["", "a", "ab"])
def test_a_node_owns_tokens_once_enough_have_joined(known: str) -> None:
    """As soon as there are as many as it waits for, and from then on; 0 waits for nobody."""
    before = assign(Plan.empty(12), [NodeRef(f"{name}.1", name) for name in known])
    for minimums in itertools.product([0, 1, 2, 3, 4], repeat=3):
        waits = dict(zip("abc", minimums, strict=True))
        nodes = [
            node(name, stage="joining" if minimum else "ready", minimum_nodes=minimum)
            for name, minimum in waits.items()
        ]
        found = {ref.name for ref in _find_members(before, find_candidates(nodes, ()))}
        enough = {name for name, minimum in waits.items() if minimum <= len(nodes)}
        assert found == enough | {*known}, minimums


@pytest.mark.parametrize(
    ("is_billed", "valid_for", "must_read", "reads"),
    [
        # Changes are reported: in a quiet fleet every other round reads.
        (False, 60.0, False, [True, False, True, False, True]),
        (False, 60.0, True, [True] * 5),
        # One has expired by now.
        (False, 0.0, False, [True] * 5),
        # Nobody reports changes.
        (True, 60.0, False, [True] * 5),
    ],
)
async def test_pins_are_read_in_each_round_unless_changes_are_reported(
    is_billed: bool, valid_for: float, must_read: bool, reads: list[bool]
) -> None:
    """And in each round that is to decide anew."""
    count = 0

    async def read_pins() -> list[int]:
        nonlocal count
        count += 1
        return [count]

    leader: Any = SimpleNamespace(
        _store=SimpleNamespace(is_billed=is_billed),
        _pins_valid_for=lambda: valid_for,
        _pins=None,
        _read_pins=read_pins,
    )
    found = []
    for _ in reads:
        before = count
        pins: Any = await Rebalancer._get_pins(leader, must_read=must_read)
        assert pins == [count]
        found.append(count > before)
    assert found == reads
