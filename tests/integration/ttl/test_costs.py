"""What a sweep costs among many records, and what a lookup in a partition costs, counted."""

from typing import Any

import pytest
from servers import Locate

from jobsync import Components, Database, Resource, open_store
from jobsync.core.expiry import ExpiryRule
from jobsync.stores.metered import Meter, MeteredStore
from jobsync.ttl.sweep import ResourceSweep, SweepCounts, SweepListener

NOW = 2_000_000_000.0
BATCH = 100
INSERTED_AT_ONCE = 10_000
RECORDS = {"sqlite": 1_000_000, "postgres": 1_000_000, "s3": 100_000}
"""At full scale."""


async def fill(resource: Resource, count: int, expired: int, proof: Any) -> None:
    """Insert records, of which some have expired, spread among the others."""
    step = count // expired
    for start in range(0, count, INSERTED_AT_ONCE):
        await resource.insert_many(
            {"id": f"r{n:07}", "expires_at": NOW - 1 if n % step == 0 else NOW + n}
            for n in range(start, min(start + INSERTED_AT_ONCE, count))
        )
        proof.tell(f"{start + INSERTED_AT_ONCE:,} of {count:,} records inserted")


async def sweep(resource: Resource) -> SweepCounts:
    """Sweep once; every record must be dealt with."""
    counts = SweepCounts()

    def fail(record: str | None, problem: str) -> None:
        raise AssertionError(f"{record}: {problem}")

    listener = SweepListener(lambda *_: None, fail)
    await ResourceSweep(resource, None, lambda: NOW, BATCH, listener, counts).run()
    return counts


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_a_sweep_reads_in_proportion_to_what_has_expired(
    kind: str, locate: Locate, proof: Any, full_scale: bool
) -> None:
    """However many records live beside them. With nothing due it is one listing."""
    count = RECORDS[kind] if full_scale else 600
    expired = 1000 if full_scale else 150
    components = Components.system()
    store = await open_store(locate(kind), components)
    meter = Meter()
    metered = MeteredStore(store, meter, components.clock)
    async with Database(connection=metered) as database:
        rule = ExpiryRule(field="expires_at")
        resource = await database.define_resource("sessions", rules=[rule])
        await fill(resource, count, expired, proof)
        meter.stats.clear()
        assert (await sweep(resource)).deleted == expired
        found = {call: (stats.calls, stats.items) for call, stats in meter.stats.items()}
        proof.record("sweep", kind=kind, records=count, expired=expired, calls=found)
        # One read of each record, and one of the definition.
        assert found["get"][1] <= expired + 1
        assert found["heads"] == (expired // BATCH + 1, expired)
        assert found["write"][1] == expired
        assert found["drop"][1] == expired
        assert set(found) == {"get", "heads", "write", "drop"}
        meter.stats.clear()
        assert (await sweep(resource)).expired == 0
        assert {call: stats.calls for call, stats in meter.stats.items()} == {"heads": 1}
        assert await resource.count() == count - expired
    await store.close()
