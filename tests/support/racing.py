"""Races between real processes: all wait at a barrier, then write the same record."""

import asyncio
import multiprocessing
import multiprocessing.synchronize
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

from jobsync import Applied, Conflict, Conflicted, Put, Store, open_store

__all__ = ["Start", "connect_at_once", "create", "increment", "race"]

PROCESSES = 4
TASKS = 4
RACERS = PROCESSES * TASKS
INCREMENTS = 2
TIMEOUT = 120.0

Start: TypeAlias = Callable[[], None]
"""Waits until every process is at the barrier."""

Runner: TypeAlias = Callable[[str, str, int, Start], Awaitable[Any]]
"""What one process does in one round, given a URL, a key, its number, and the barrier."""


def race(
    runner: Runner,
    rounds: Sequence[tuple[str, str]],
    progress: Callable[[str], None],
    count: int = PROCESSES,
) -> Iterator[list[Any]]:
    """Run a round for each URL and key in so many processes, and yield their results.

    Raises:
        AssertionError: a process raised; has its traceback.
    """
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(count)
    results: Any = spawn.Queue()
    processes = [
        spawn.Process(
            target=_run, args=(runner, list(rounds), number, barrier, results), daemon=True
        )
        for number in range(count)
    ]
    for process in processes:
        process.start()
    try:
        # A process may send its next result before a slow one has sent that of this round.
        received: dict[int, list[Any]] = {i: [] for i in range(len(rounds))}
        for i in range(len(rounds)):
            while len(received[i]) < count:
                index, error, result = results.get(timeout=TIMEOUT)
                assert not error, error
                received[index].append(result)
            if i % 20 == 19:
                progress(f"{runner.__name__}: {i + 1} of {len(rounds)} rounds")
            yield received[i]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _run(
    runner: Runner,
    rounds: list[tuple[str, str]],
    number: int,
    barrier: multiprocessing.synchronize.Barrier,
    results: Any,
) -> None:
    async def run() -> None:
        for i, (url, key) in enumerate(rounds):
            results.put((i, "", await runner(url, key, number, lambda: _wait(barrier))))

    try:
        asyncio.run(run())
    except BaseException:  # noqa: BLE001 - sent to the parent, which fails with it
        barrier.abort()
        results.put((0, traceback.format_exc(), None))


def _wait(barrier: multiprocessing.synchronize.Barrier) -> None:
    barrier.wait(TIMEOUT)


async def create(url: str, key: str, number: int, start: Start) -> list[str]:
    """Create one record from several tasks; return the names of those that won."""
    store = await open_store(url)
    names = [f"{number}.{task}" for task in range(TASKS)]
    start()
    outcomes = await asyncio.gather(*(store.write([Put(key, name)]) for name in names))
    await store.close()
    assert all(type(outcome) in {Applied, Conflicted} for (outcome,) in outcomes)
    return [
        name
        for name, (outcome,) in zip(names, outcomes, strict=True)
        if isinstance(outcome, Applied)
    ]


async def increment(url: str, key: str, number: int, start: Start) -> int:
    """Increment one record from several tasks; return how much they added."""
    del number
    store = await open_store(url)
    start()
    await asyncio.gather(*(_add(store, key) for _ in range(TASKS)))
    await store.close()
    return TASKS * INCREMENTS


async def _add(store: Store, key: str) -> None:
    for _ in range(INCREMENTS):
        while True:
            record = await store.get(key)
            try:
                if record is None:
                    await store.create(key, 1)
                else:
                    await store.put(record, record.value + 1)
            except Conflict:
                continue
            break


async def connect_at_once(url: str, key: str, number: int, start: Start) -> str:
    """Make the first connection to one store from all processes, and write."""
    start()
    store = await open_store(url)
    record = await store.create(f"{key}-{number}", number)
    await store.close()
    return record.key
