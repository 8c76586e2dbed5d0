"""What a store costs over its bare driver, as ratios within one run.

CPU time, not wall time: machines are shared, and a disk's sync says nothing about us.
Each round runs bare and ours one after the other; the median of the rounds is shown.
"""

import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from jobsync import Put, Record, open_store
from jobsync.stores.sqlite import _CREATE, _GET, _REPLACE, SqliteStore

ROUNDS = 15
HOPS = 200
BATCH = 100
VALUE = {"name": "ann", "n": 1, "ok": True, "score": 1.5, "tags": ["a", "b"], "more": {"k": None}}
TEXT = '{"name":"ann","n":1,"ok":true,"score":1.5,"tags":["a","b"],"more":{"k":null}}'
TRAIL = "AAAAAAAAAAAA"


async def cpu(work: Callable[[], Awaitable[object]]) -> float:
    """Give the CPU seconds of this process that some work takes."""
    begun = time.process_time()
    await work()
    return time.process_time() - begun


class Bare:
    """The same statements, sent by sqlite3 alone."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous=FULL")
        self._number = 0

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _keys(self, count: int) -> list[str]:
        self._number += 1
        return [f"bare/{self._number:06d}/{i:06d}" for i in range(count)]

    def _transact(self, statement: str, rows: list[tuple[object, ...]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        cursor = self._connection.cursor()
        for row in rows:
            cursor.execute(statement, row)
        self._connection.execute("COMMIT")

    async def put(self) -> None:
        """Replace one row again and again."""
        (key,) = self._keys(1)
        self._transact(_CREATE, [(TEXT, 1, 0, 1, TRAIL, 1, 1.0, key)])
        for seq in range(1, HOPS):
            self._transact(_REPLACE, [(TEXT, seq + 1, 0, 1, TRAIL, 1, 1.0, key, seq, TRAIL)])

    async def get(self) -> None:
        """Read one row again and again."""
        for _ in range(HOPS):
            self._connection.execute(_GET, ['["ours/one"]']).fetchall()

    async def create_batches(self) -> None:
        """Insert rows, a batch a transaction."""
        for _ in range(HOPS // 10):
            rows: list[tuple[object, ...]] = [
                (TEXT, 1, 0, 1, TRAIL, 1, 1.0, key) for key in self._keys(BATCH)
            ]
            self._transact(_CREATE, rows)

    async def replace_batches(self) -> None:
        """Update rows, a batch a transaction."""
        keys = self._keys(BATCH)
        self._transact(_CREATE, [(TEXT, 1, 0, 1, TRAIL, 1, 1.0, key) for key in keys])
        for seq in range(1, HOPS // 10):
            row = (TEXT, seq + 1, 0, 1, TRAIL, 1, 1.0)
            self._transact(_REPLACE, [(*row, key, seq, TRAIL) for key in keys])


class Ours:
    """The same work through the store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._number = 0

    def _prefix(self) -> str:
        self._number += 1
        return f"ours/{self._number:06d}"

    async def put(self) -> None:
        """Replace one record again and again."""
        record = await self._store.create(f"{self._prefix()}/000000", VALUE)
        for _ in range(1, HOPS):
            record = await self._store.put(record, VALUE)

    async def get(self) -> None:
        """Read one record again and again."""
        for _ in range(HOPS):
            await self._store.get("ours/one")

    async def create_batches(self) -> None:
        """Create records, a batch a write."""
        for _ in range(HOPS // 10):
            prefix = self._prefix()
            await self._store.write([Put(f"{prefix}/{i:06d}", VALUE) for i in range(BATCH)])

    async def replace_batches(self) -> None:
        """Replace records, a batch a write."""
        prefix = self._prefix()
        changes = [Put(f"{prefix}/{i:06d}", VALUE) for i in range(BATCH)]
        for _ in range(HOPS // 10):
            outcomes = await self._store.write(changes)
            records: list[Record] = [outcome.record for outcome in outcomes]  # type: ignore[union-attr]
            changes = [record.replace(VALUE) for record in records]


async def measure(path: Path) -> dict[str, tuple[float, float]]:
    """Give the median CPU seconds of each kind of work, bare and ours."""
    store = await open_store(f"sqlite:///{path}")
    assert isinstance(store, SqliteStore)
    await store.create("ours/one", VALUE)
    names = ["put", "get", "create_batches", "replace_batches"]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    with closing(Bare(path)) as bare:
        ours = Ours(store)
        for i in range(ROUNDS + 1):
            for name in names:
                pair = (await cpu(getattr(bare, name)), await cpu(getattr(ours, name)))
                if i:  # the first round warms up
                    times[name][0].append(pair[0])
                    times[name][1].append(pair[1])
            if sys.stderr.isatty():
                sys.stderr.write(f"\rround {i} of {ROUNDS} ")
    await store.close()
    return {name: (statistics.median(a), statistics.median(b)) for name, (a, b) in times.items()}


def main() -> int:
    """Measure, and judge by the budget."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder) / "bench.db"))
    ok = True
    print(f"sqlite, median of {ROUNDS} rounds, CPU time\n")
    print(f"{'':24}{'bare':>10}{'ours':>10}{'':4}budget")
    for name in ("put", "get"):
        bare, ours = (seconds / HOPS * 1e6 for seconds in found[name])
        ok &= ours - bare <= 150
        print(f"{name:24}{bare:8.1f}µs{ours:8.1f}µs    +{ours - bare:.0f}µs a hop, at most +150µs")
    for name in ("create_batches", "replace_batches"):
        bare, ours = (seconds / (HOPS // 10) / BATCH * 1e6 for seconds in found[name])
        ok &= ours / bare <= 1.5
        label = f"{name.split('_', maxsplit=1)[0]}, a row of {BATCH}"
        print(f"{label:24}{bare:8.1f}µs{ours:8.1f}µs    {ours / bare:.2f}x, at most 1.50x")
    print("\nwithin budget" if ok else "\nOVER BUDGET")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
