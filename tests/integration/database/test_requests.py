"""The requests that verbs of a resource make on S3, counted in front of a real server."""

from collections.abc import Awaitable
from urllib.parse import urlsplit

from proxy import Proxy

from jobsync import Database


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
