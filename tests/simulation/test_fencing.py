"""Fenced writes: a replaced coordinator is refused, and then steps down."""

import asyncio

import pytest
from chance import FakeClock, SeededRandomness
from fleets import SINGLETON, TIMING, Fleet

from jobsync import Components, Events, Fenced, Term
from jobsync.stores.memory import MemoryStore


def term_of(store: MemoryStore, components: Components, epoch: int, refused: list[int]) -> Term:
    """Return a term that always believes to last."""
    return Term(store, epoch, lambda: True, components.ids, refused.append)


@pytest.mark.parametrize("later", [1, 2])
async def test_the_first_term_to_seal_keeps_the_others_out(clock: FakeClock, later: int) -> None:
    """Of two terms with one epoch, as after the loss of a role's record, one can write."""
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


def test_a_fenced_coordinator_steps_down_and_leads_again() -> None:
    """It takes the role again with an epoch above the one that refused it."""
    fleet = Fleet(5, size=1)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        record = await fleet.store.get(f"{SINGLETON}-work")
        assert record is not None
        await fleet.store.put(record, {"epoch": 7, "count": 0}, epoch=7)
        await asyncio.sleep(4 * TIMING.timeout)
        fleet.check_steady()
        record = await fleet.store.get(f"{SINGLETON}-work")
        assert record is not None
        assert record.epoch == record.value["epoch"] == 8
        assert fleet.workers[0].held_epochs == {"work": 8}

    fleet.world.run(story)
    assert fleet.violations == []
