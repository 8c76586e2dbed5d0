"""Store decorators: the counts of a metered store."""

from typing import Any

import pytest
from chance import SeededRandomness

from jobsync import Components, Conflict, Events, Put, Unavailable
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import Meter, MeteredStore, Tariff
from jobsync.testing import Link, Weather, World

PRICED = Tariff(
    requests={"write": (0, 1), "get": (0, 1), "scan": (1, 1)},
    dollars={"write": (0, 5e-6), "get": (0, 4e-7), "scan": (5e-6, 4e-7)},
)


@pytest.fixture
def components(clock: Any) -> Components:
    """A fixed clock and repeatable randomness."""
    return Components(clock=clock, randomness=SeededRandomness(1), events=Events())


async def test_calls_items_and_outcomes_are_counted(components: Components) -> None:
    """Every call is counted with its items; conflicts separately."""
    meter = Meter()
    store = MeteredStore(MemoryStore(), meter, components.clock)
    await store.write([Put("n/1", 1), Put("n/2", 2)])
    with pytest.raises(Conflict):
        await store.create("n/1", 1)
    await store.get_many(["n/1", "n/2", "n/3"])
    await store.heads("n/")
    await store.scan("n/")
    await store.append("h", [1, 2, 3])
    await store.read("h")
    await store.wait("n/", 0)
    counts = {call: (tally.calls, tally.items) for call, tally in meter.stats.items()}
    assert counts == {
        "write": (2, 3),
        "get": (1, 3),
        "heads": (1, 2),
        "scan": (1, 2),
        "append": (1, 3),
        "read": (1, 3),
    }
    assert meter["write"].conflicts == 1
    assert meter.requests == 7
    assert meter.dollars == 0


async def test_a_tariff_prices_requests(components: Components) -> None:
    """On objects a batch is one request for each item, and a scan is one more."""
    meter = Meter(PRICED)
    store = MeteredStore(MemoryStore(), meter, components.clock)
    await store.write([Put(f"n/{i}", i) for i in range(10)])
    await store.scan("n/")
    await store.get("n/1")
    assert {call: tally.requests for call, tally in meter.stats.items()} == {
        "write": 10,
        "scan": 11,
        "get": 1,
    }
    assert meter.dollars == pytest.approx(10 * 5e-6 + (5e-6 + 10 * 4e-7) + 4e-7)


def test_failures_and_time_are_counted() -> None:
    """A call that raises is counted too, and so is the duration of a slow one."""
    world, meter = World(1), Meter()

    async def story() -> None:
        node = world.node("a")
        link = Link(world, node, MemoryStore(), Weather(slow=1, slow_by=4))
        store = MeteredStore(link, meter, node.clock)
        await store.get("n")
        link.throttled = True
        with pytest.raises(Unavailable):
            await store.get("n")

    world.run(story)
    assert (meter["get"].calls, meter["get"].errors) == (2, 1)
    assert 0.1 < meter["get"].seconds < 5
