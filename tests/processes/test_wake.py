"""A wait on PostgreSQL ends when another process commits."""

import asyncio
import statistics
import subprocess
import sys
import time
from typing import Any

import servers
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


def start_writer(url: str) -> "subprocess.Popen[str]":
    """Start the other process."""
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def wake_once(store: Store, writer: "subprocess.Popen[str]") -> float:
    """Wait until the other process's commit is heard of; give the milliseconds since it."""
    assert writer.stdin is not None
    assert writer.stdout is not None
    waiting = asyncio.create_task(store.wait("wake/", 60))
    async with asyncio.timeout(30):
        # A wait that had not begun may miss a commit; it hears one of these.
        while not waiting.done():
            writer.stdin.write("go\n")
            writer.stdin.flush()
            await asyncio.to_thread(writer.stdout.readline)
            await asyncio.wait([waiting], timeout=0.2)
    woken = time.time()
    record = await store.get("wake/x")
    assert record is not None
    return float(woken - record.value) * 1000


async def test_a_commit_of_another_process_ends_a_wait(
    postgres: servers.PostgresServer, full_scale: bool, proof: Any
) -> None:
    """Each wait of a minute ends by a commit elsewhere; a full run keeps how soon."""
    url = f"{postgres.url}?schema=wake"
    store = await open_store(url)
    with start_writer(url) as writer:

        async def is_there() -> bool:
            return await store.get("wake/x") is not None

        await until(is_there, "the other process has written")
        delays = [await wake_once(store, writer) for _ in range(100 if full_scale else 5)]
        writer.communicate()
    await store.close()
    assert writer.returncode == 0
    figures = {"median_ms": round(statistics.median(delays), 1), "worst_ms": round(max(delays), 1)}
    proof.record("wake across processes", url="postgres", waits=len(delays), **figures)
