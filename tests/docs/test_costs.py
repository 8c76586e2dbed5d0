"""The requests that the how-to pages promise on S3, counted by its tariff."""

import re
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from jobsync import Components, Database, QueuePlugin, TTLPlugin
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import S3_TARIFF, Meter, MeteredStore

HOUR = 3600.0


class MeteredDatabase:
    """A database whose requests are counted."""

    def __init__(self) -> None:
        self.meter = Meter(S3_TARIFF)
        store = MeteredStore(MemoryStore(), self.meter, Components.system().clock)
        self.database = Database(connection=store)

    async def cost(self, verb: Awaitable[Any]) -> int:
        """Return the requests of a verb."""
        before = self.meter.requests
        await verb
        return self.meter.requests - before


@pytest.fixture
async def metered() -> AsyncIterator[MeteredDatabase]:
    """An empty database."""
    metered = MeteredDatabase()
    async with metered.database:
        yield metered


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_the_costs_of_partitions(metered: MeteredDatabase, count: int) -> None:
    """As in the table of `docs/how-to/find-records.md`."""
    fields = [f"f{number}" for number in range(count)]
    orders = await metered.database.create_resource(
        "orders", partitions={f"by_{field}": [field] for field in fields}
    )
    record = {"id": "a", "other": 1, **dict.fromkeys(fields, "x")}
    assert await metered.cost(orders.insert(record)) == 1 + count
    assert await metered.cost(orders.update("a", {"other": 2})) == 2
    for changed in range(1, count + 1):
        changes = dict.fromkeys(fields[:changed], f"y{changed}")
        assert await metered.cost(orders.update("a", changes)) == 3 + changed
    assert await metered.cost(orders.delete("a")) == (3 if count else 2)


async def test_the_cost_of_reading_a_partition(metered: MeteredDatabase) -> None:
    """A listing, and its records; what else the resource has does not matter."""
    orders = await metered.database.create_resource("orders", partitions={"by_region": ["region"]})
    await orders.insert_many([{"region": "eu" if n < 10 else "us"} for n in range(50)])
    europe = {"region": "eu"}
    assert await metered.cost(orders.query(europe)) == 1 + 10
    assert await metered.cost(orders.query(europe, limit=4)) == 1 + 4
    assert await metered.cost(orders.page(europe, size=4)) == 1 + 4
    assert await metered.cost(orders.count(europe)) == 1 + 10


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 2),
        ({"on_expire": "soft-delete"}, 2),
        ({"on_expire": "archive", "archive_resource": "old"}, 4),
    ],
    ids=["hard-delete", "soft-delete", "archive"],
)
async def test_the_costs_of_expiry(
    metered: MeteredDatabase, options: dict[str, Any], each: int
) -> None:
    """As in the table of `docs/how-to/expire-records.md`."""
    ttl = TTLPlugin(
        resources={"sessions": {"field": "expires_at", **options}},
        cleanup_interval=HOUR,
        # Nothing else makes requests meanwhile: no heartbeat, and no sweep but the first one.
        heartbeat_interval=HOUR / 4,
        worker_timeout=HOUR,
    )
    await metered.database.use_plugin(ttl)
    sessions = await metered.database.create_resource("sessions")
    await until(lambda: ttl.stats()["total_scans"] == 1)
    await ttl.cleanup_resource("sessions")
    now = time.time()
    assert await metered.cost(sessions.insert({"id": "a", "expires_at": now + HOUR})) == 2
    assert await metered.cost(sessions.update("a", {"user": "ann"})) == 2
    assert await metered.cost(sessions.update("a", {"expires_at": now + 2 * HOUR})) == 4
    assert await metered.cost(ttl.run_cleanup()) == 1
    await sessions.insert_many([{"expires_at": now - 1} for _ in range(50)])
    assert await metered.cost(ttl.run_cleanup()) == 50 * each + 3


def test_the_costs_of_queues() -> None:
    """The table of `docs/how-to/queues-on-s3.md` is what `estimate_usage` says."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "queues-on-s3.md"
    rows = re.findall(r"^\| (\d+) \| ([\d.]+(?: \| [\d.]+){4}) \|$", page.read_text(), re.MULTILINE)
    assert len(rows) == 4
    queue = QueuePlugin(resource="tasks")
    loads = [(0, 1), (1_440, 1), (14_400, 1), (100_000, 1), (1_000_000, 100)]
    for workers, figures in rows:
        estimates = [
            queue.estimate_usage(
                workers=int(workers), messages_per_day=messages, messages_per_page=size
            )
            for messages, size in loads
        ]
        assert figures.split(" | ") == [f"{each.dollars:.2f}" for each in estimates]
