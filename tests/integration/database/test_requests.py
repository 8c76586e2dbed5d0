"""The requests that verbs of a resource make on S3, counted in front of a real server."""

from collections.abc import Awaitable
from typing import Any
from urllib.parse import urlsplit

from chance import FakeClock
from proxy import Proxy

from jobsync import Components, Database, Events
from jobsync.core.clock import SystemRandomness


async def test_insert_and_get_are_one_request_each(bucket_url: str) -> None:
    """An update is two: a read of the current version, and the write."""
    parts = urlsplit(bucket_url)
    with Proxy(parts.hostname or "", parts.port or 0) as proxy:

        async def cost(verb: Awaitable[object]) -> int:
            before = proxy.requests
            await verb
            return proxy.requests - before

        url = bucket_url.replace(f":{parts.port}/", f":{proxy.port}/")
        async with Database(url) as database:
            tasks = await database.create_resource("tasks", {"n": "number"})
            assert await cost(tasks.insert({"id": "a", "n": 1})) == 1
            assert await cost(tasks.get("a")) == 1
            assert await cost(tasks.exists("a")) == 1
            assert await cost(tasks.update("a", {"n": 2})) == 2
            assert await cost(tasks.insert_many([{"n": n} for n in range(10)])) == 10
            assert await cost(tasks.count()) == 1


async def test_a_partition_costs_a_listing_and_its_records(bucket_url: str) -> None:
    """Others are not read. An entry is one request more for each partition and insert."""
    parts = urlsplit(bucket_url)
    with Proxy(parts.hostname or "", parts.port or 0) as proxy:

        async def cost(verb: Awaitable[object]) -> int:
            before = proxy.requests
            await verb
            return proxy.requests - before

        url = bucket_url.replace(f":{parts.port}/", f":{proxy.port}/")
        clock = FakeClock()
        components = Components(clock=clock, randomness=SystemRandomness(), events=Events())
        async with Database(url, components=components) as database:
            plain = await database.create_resource("plain")
            tasks = await database.create_resource("tasks", partitions={"by_n": "n"})
            assert await cost(tasks.insert({"id": "a", "n": 1})) == 2
            assert await cost(tasks.insert_many([{"n": n % 2} for n in range(20)])) == 40
            chosen: Any = {"partition": "by_n", "partition_values": {"n": 1}}
            assert await cost(tasks.list(**chosen)) == 1 + 11
            assert await cost(tasks.query({"n": 1})) == 1 + 11
            assert await cost(tasks.count({"n": 1})) == 1 + 11
            assert await cost(tasks.query({"n": 7})) == 1
            # A read, and the write: the entry stays. Then a new entry, and the old one goes.
            assert await cost(tasks.update("a", {"more": 1})) == 2
            assert await cost(tasks.update("a", {"n": 2})) == 4
            assert await cost(tasks.delete("a")) == 3
            assert await cost(plain.insert({"id": "a"})) == 1
            # A definition that is older than half a minute is read again.
            clock.mono_seconds += 31
            assert await cost(plain.insert({"id": "b"})) == 2
            assert await cost(tasks.query({"n": 7})) == 2
            assert await cost(plain.insert({"id": "c"})) == 1
            assert await cost(tasks.query({"n": 7})) == 1
