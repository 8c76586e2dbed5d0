"""Fenced writes: whoever was replaced is refused, and whoever is refused steps down."""

import asyncio

import pytest
from chance import FakeClock, SeededRandomness
from fleets import SINGLETON, TIMING, Fleet

from jobsync import Components, Events, Fenced, Term
from jobsync.stores.memory import MemoryStore


def term_of(store: MemoryStore, components: Components, epoch: int, refused: list[int]) -> Term:
    """Give a term that believes to last."""
    return Term(store, epoch, lambda: True, components.ids, refused.append)


@pytest.mark.parametrize("later", [1, 2])
async def test_who_seals_first_keeps_out_the_others(clock: FakeClock, later: int) -> None:
    """Of two terms of one epoch, as after the loss of a role's record, one can write."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store = MemoryStore(components=components)
    refused: list[int] = []
    first = term_of(store, components, 1, refused)
    second = term_of(store, components, later, [])
    if later == 1:
        first, second = second, first
    await second.put("single/x", "second")
    with pytest.raises(Fenced):
        await first.put("single/x", "first")
    with pytest.raises(Fenced):
        await first.get("single/x")
    await second.put("single/x", "again")
    assert await second.get("single/x") == "again"
    record = await store.get("single/x")
    assert record is not None
    assert record.epoch == later


def test_a_coordinator_whose_writes_are_refused_steps_down_and_leads_anew() -> None:
    """It takes the role under an epoch above the one that stood in its way."""
    fleet = Fleet(5, size=1)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        record = await fleet.store.get(f"{SINGLETON}-work")
        assert record is not None
        await fleet.store.put(record, {"epoch": 7, "count": 0}, epoch=7)
        await asyncio.sleep(4 * TIMING.timeout)
        fleet.judge_rest()
        record = await fleet.store.get(f"{SINGLETON}-work")
        assert record is not None
        assert record.epoch == record.value["epoch"] == 8
        assert fleet.workers[0].held == {"work": 8}

    fleet.world.run(story)
    assert fleet.violations == []
