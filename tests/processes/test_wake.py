"""A wait on PostgreSQL ends when another process commits."""

import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import servers
from processes import WorkerProcess
from waiting import until

from jobsync import Store, open_store

_WRITER = """
import asyncio, sys, time
from jobsync import open_store

async def main():
    store = await open_store(sys.argv[1])
    record = await store.create("wake/x", 0)
    for line in sys.stdin:
        record = await store.put(record, time.time())
        print(record.seq, flush=True)
    await store.close()

asyncio.run(main())
"""


async def wake_once(store: Store, writer: WorkerProcess) -> float:
    """Wait until a commit of the writer ends a wait; return the milliseconds in between."""
    assert writer.process.stdout is not None
    waiting = asyncio.create_task(store.wait("wake/", 60))
    async with asyncio.timeout(30):
        # A wait that has not begun yet may miss a commit; it notices a later one.
        while not waiting.done():
            writer.order("go")
            await asyncio.to_thread(writer.process.stdout.readline)
            await asyncio.wait([waiting], timeout=0.2)
    woken = time.time()
    record = await store.get("wake/x")
    assert record is not None
    return float(woken - record.value) * 1000


async def test_a_commit_of_another_process_ends_a_wait(
    postgres: servers.PostgresServer, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Each wait of a minute ends by a commit elsewhere; a full run records how soon."""
    url = f"{postgres.url}?schema=wake"
    store = await open_store(url)
    command = [sys.executable, "-c", _WRITER, url]
    with WorkerProcess("writer", command, tmp_path / "log", stdout=subprocess.PIPE) as writer:

        async def is_written() -> bool:
            return await store.get("wake/x") is not None

        await until(is_written, "the other process has written")
        delays = [await wake_once(store, writer) for _ in range(100 if full_scale else 5)]
        writer.process.communicate()
        assert await writer.ended() == 0, writer.log
    await store.close()
    figures = {"median_ms": round(statistics.median(delays), 1), "worst_ms": round(max(delays), 1)}
    proof.record("wake across processes", url="postgres", waits=len(delays), **figures)
