"""Two processes, one SQLite file, one record that both increment. No update is lost.

Run it with `python examples/increment.py`.
"""

import asyncio
import multiprocessing
import sys
import tempfile
from pathlib import Path

from jobsync import Conflict, open_store

PROCESSES = 2
INCREMENTS = 200


async def increment(url: str) -> int:
    """Add one to the record repeatedly; return how often another process was first."""
    store = await open_store(url)
    conflicts = 0
    done = 0
    while done < INCREMENTS:
        record = await store.get("demo/counter")
        assert record is not None, "the parent process creates it before the children start"
        try:
            await store.put(record, record.value + 1)
        except Conflict:
            conflicts += 1
        else:
            done += 1
            if done % 50 == 0:
                sys.stdout.write(f"  {multiprocessing.current_process().name}: {done} done\n")
    await store.close()
    return conflicts


def run_child(url: str) -> int:
    """Run the increments of one process."""
    return asyncio.run(increment(url))


async def prepare(url: str) -> None:
    """Create the record."""
    store = await open_store(url)
    await store.create("demo/counter", 0)
    await store.close()


async def read(url: str) -> tuple[int, int]:
    """Read the record's value and how often it was written."""
    store = await open_store(url)
    record = await store.get("demo/counter")
    await store.close()
    assert record is not None, "it is never deleted"
    return record.value, record.seq


def main() -> int:
    """Run both processes; return 0 if the record has every increment."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'demo.db'}"
        print(f"{PROCESSES} processes add {INCREMENTS} each to one record in one SQLite file")
        asyncio.run(prepare(url))
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(PROCESSES) as pool:
            conflicts = sum(pool.map(run_child, [url] * PROCESSES))
        value, seq = asyncio.run(read(url))
    expected = PROCESSES * INCREMENTS
    print(f"the record has {value} of {expected}, written {seq - 1} times after its creation")
    print(f"{conflicts} writes came second, were refused, and were made again from a fresh read")
    print("no update lost" if value == expected else f"LOST {expected - value} UPDATES")
    return 0 if value == expected else 1


if __name__ == "__main__":
    sys.exit(main())
