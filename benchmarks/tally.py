"""The number of requests that each call sends, counted by a proxy."""

import asyncio
from collections.abc import Awaitable
from urllib.parse import urlsplit

from benchmarks.work import BATCH, VALUE
from proxy import Proxy

from jobsync import Put, open_store

__all__ = ["tally"]

_PAUSE = 0.2
"""Seconds until the notifications of the previous call have passed."""


async def tally(url: str) -> dict[str, int]:
    """Count the requests of each call."""
    parts = urlsplit(url)
    counts: dict[str, int] = {}
    with Proxy(parts.hostname or "", parts.port or 0) as proxy:

        async def count(name: str, call: Awaitable[object]) -> None:
            await asyncio.sleep(_PAUSE)
            before = proxy.requests
            await call
            counts[name] = proxy.requests - before

        store = await open_store(url.replace(f":{parts.port}/", f":{proxy.port}/"))
        record = await store.create("tally/one/x", VALUE)
        await count("put", store.put(record, VALUE))
        await count("get", store.get("tally/one/x"))
        changes = [Put(f"tally/many/{i:03d}", VALUE) for i in range(BATCH)]
        await count(f"write({BATCH})", store.write(changes))
        await count(f"heads({BATCH})", store.heads("tally/many/", limit=BATCH))
        await count(f"scan({BATCH})", store.scan("tally/many/", limit=BATCH))
        await count(f"append({BATCH})", store.append("tally/line", [VALUE] * BATCH))
        await store.close()
    return counts
