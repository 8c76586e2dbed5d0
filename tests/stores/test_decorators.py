"""Stores around stores: what is counted, and what goes wrong on purpose."""

from typing import Any

import pytest
from chance import SeededRandomness

from jobsync import (
    Applied,
    Components,
    Conflict,
    Events,
    OutcomeUnknown,
    Put,
    Unavailable,
    Unknown,
)
from jobsync.stores.faulty import Faults, FaultyStore
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import Meter, MeteredStore, Tariff

PRICED = Tariff(
    requests={"write": (0, 1), "get": (0, 1), "scan": (1, 1)},
    dollars={"write": (0, 5e-6), "get": (0, 4e-7), "scan": (5e-6, 4e-7)},
)


@pytest.fixture
def components(clock: Any) -> Components:
    """Time that stands still and dice that repeat."""
    return Components(clock=clock, randomness=SeededRandomness(1), events=Events())


async def test_calls_items_and_outcomes_are_counted(components: Components) -> None:
    """Every call is counted with its items; conflicts apart."""
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
    counts = {call: (tally.calls, tally.items) for call, tally in meter.tallies.items()}
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
    """On objects a batch is a request for each item, and a scan one more."""
    meter = Meter(PRICED)
    store = MeteredStore(MemoryStore(), meter, components.clock)
    await store.write([Put(f"n/{i}", i) for i in range(10)])
    await store.scan("n/")
    await store.get("n/1")
    assert {call: tally.requests for call, tally in meter.tallies.items()} == {
        "write": 10,
        "scan": 11,
        "get": 1,
    }
    assert meter.dollars == pytest.approx(10 * 5e-6 + (5e-6 + 10 * 4e-7) + 4e-7)


async def test_failures_and_time_are_counted(components: Components) -> None:
    """A call that raises is a call, and a slow one takes its time."""
    meter = Meter()
    slow = FaultyStore(MemoryStore(), components, Faults(slow=1, delay=10))
    store = MeteredStore(slow, meter, components.clock)
    await store.get("n")
    slow.faults = Faults(refused=1)
    with pytest.raises(Unavailable):
        await store.get("n")
    assert (meter["get"].calls, meter["get"].errors) == (2, 1)
    assert 0 < meter["get"].seconds <= 10


async def test_a_refused_write_does_not_happen(components: Components) -> None:
    """The request never arrives, and the caller knows."""
    store = FaultyStore(MemoryStore(), components, Faults(refused=1))
    with pytest.raises(Unavailable):
        await store.create("n", 1)
    assert await store.inner.get("n") is None
    assert store.injected == 1


async def test_a_lost_reply_hides_what_happened(components: Components) -> None:
    """The write is applied and reported as unknown; a reader gets nothing."""
    store = FaultyStore(MemoryStore(), components, Faults(lost=1))
    assert isinstance((await store.write([Put("n", 1)]))[0], Unknown)
    assert await store.inner.get("n") is not None
    with pytest.raises(Unavailable):
        await store.get("n")
    with pytest.raises(OutcomeUnknown):
        await store.append("h", [1])
    assert len(await store.inner.read("h")) == 1


async def test_a_late_write_lands_later(components: Components) -> None:
    """The caller has given up; the very same request arrives afterwards, once."""
    store = FaultyStore(MemoryStore(), components, Faults(late=1))
    late = Put("n", 1, nonce="AAAAAAAAAAAA")
    assert isinstance((await store.write([late]))[0], Unknown)
    assert await store.inner.get("n") is None
    await store.land()
    await store.land()
    record = await store.inner.get("n")
    assert record is not None
    assert (record.nonce, record.seq) == ("AAAAAAAAAAAA", 1)


async def test_late_writes_land_by_themselves(components: Components) -> None:
    """Some later call finds that the request has arrived."""
    store = FaultyStore(MemoryStore(), components, Faults(late=1))
    await store.write([Put("n", 1)])
    store.faults = Faults()
    found = [await store.get("n") for _ in range(20)]
    assert found[-1] is not None


async def test_a_seed_repeats_its_faults(clock: Any) -> None:
    """Equal seeds draw equal faults; other seeds draw others."""

    async def run(seed: int) -> list[bool]:
        components = Components(clock=clock, randomness=SeededRandomness(seed), events=Events())
        store = FaultyStore(MemoryStore(), components, Faults(lost=0.5))
        outcomes = [(await store.write([Put(f"n/{i}", i)]))[0] for i in range(40)]
        return [isinstance(outcome, Applied) for outcome in outcomes]

    assert await run(1) == await run(1)
    assert await run(1) != await run(2)
