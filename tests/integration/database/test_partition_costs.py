"""What a lookup in a partition reads among many records, counted at the store."""

from typing import Any

import pytest
from servers import Locate

from jobsync import Components, Database, open_store
from jobsync.stores.metered import Meter, MeteredStore

RECORDS = {"sqlite": 100_000, "postgres": 100_000, "s3": 5_000}
"""At full scale."""
MATCHES = {"sqlite": 20, "postgres": 20, "s3": 2_300}
PAGE = 1000


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_a_lookup_reads_what_matches(
    kind: str, locate: Locate, proof: Any, full_scale: bool
) -> None:
    """The names of its entries, a thousand in a listing, and each of its records once.

    That a listing of a range and a read by key touch nothing else, the stores' own tests show.
    """
    count = RECORDS[kind] if full_scale else 400
    matches = MATCHES[kind] if full_scale else 20
    components = Components.system()
    store = await open_store(locate(kind), components)
    meter = Meter()
    metered = MeteredStore(store, meter, components.clock)
    async with Database(connection=metered) as database:
        orders = await database.create_resource("orders", partitions={"by_region": ["region"]})
        step = count // matches
        await orders.insert_many(
            {"id": f"o{n:06}", "region": "eu" if n % step == 0 and n // step < matches else "us"}
            for n in range(count)
        )
        # Read now, so that it is not old during the lookups.
        await orders.records.refresh_definition(0.0)
        meter.stats.clear()
        assert len(await orders.query({"region": "eu"})) == matches
        found = {call: (stats.calls, stats.items) for call, stats in meter.stats.items()}
        proof.record("lookup", kind=kind, records=count, matches=matches, calls=found)
        listings = matches // PAGE + 1
        assert found["heads"] == (listings, matches)
        assert found["get"] == (listings, matches)
        assert set(found) == {"heads", "get"}
        meter.stats.clear()
        assert await orders.count({"region": "none"}) == 0
        assert {call: stats.calls for call, stats in meter.stats.items()} == {"heads": 1}
    await store.close()
