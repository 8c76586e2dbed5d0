"""Three processes drain a queue in one SQLite file; the leader is killed. Nothing is lost.

Run it with `python examples/drain.py`.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from jobsync import Database, Document, QueuePlugin

WORKERS = 3
MESSAGES = 1000
TIMING: dict[str, Any] = {"heartbeat_interval": 1, "worker_timeout": 4}


async def handle(_: Document) -> None:
    """Simulate work that takes a moment."""
    await asyncio.sleep(0.01)


async def work(url: str) -> None:
    """Handle messages until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with Database(url) as db:
        await db.use_plugin(QueuePlugin(resource="emails", on_message=handle, **TIMING))
        await stopping.wait()


def run_child(url: str) -> None:
    """Run one worker."""
    asyncio.run(work(url))


async def find_leader(queue: QueuePlugin) -> tuple[str, int]:
    """Wait until a worker leads; return its name and its process."""
    while True:
        for member in await queue.members():
            if member.holds:
                return member.worker_id, int(member.facts["pid"])
        await asyncio.sleep(0.05)


async def watch(url: str, workers: Sequence[BaseProcess]) -> bool:
    """Enqueue, kill the leader, wait until nothing is left; return whether nothing was lost."""
    async with Database(url) as db:
        # This process only observes: it is not a candidate.
        queue = await db.use_plugin(QueuePlugin(resource="emails", enable_coordinator=False))
        await queue.enqueue_many([{"to": f"user-{n}@example.com"} for n in range(MESSAGES)])
        for worker in workers:
            worker.start()
        done = 0
        while done < MESSAGES // 4:
            await asyncio.sleep(0.05)
            done = await queue.count("completed")
        name, process = await find_leader(queue)
        os.kill(process, signal.SIGKILL)
        print(f"killed the leader {name} at {done} of {MESSAGES}")
        while left := await queue.count("pending") + await queue.count("processing"):
            print(f"  {await queue.count('completed')} done, {left} left")
            await asyncio.sleep(0.25)
        counts = {state: await queue.count(state) for state in ("completed", "dead", "all")}
        again = sum(
            message.deliveries > 1 for message in await queue.browse("completed", limit=MESSAGES)
        )
    print(f"the store has {counts['completed']} completed, {counts['dead']} dead")
    print(f"{again} were delivered again, because their worker died")
    lost = MESSAGES - counts["completed"]
    print("no message lost" if not lost else f"LOST {lost} MESSAGES")
    return not lost and counts["all"] == MESSAGES


def main() -> int:
    """Run the processes; return 0 if nothing was lost."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'demo.db'}"
        print(f"{WORKERS} processes drain {MESSAGES} messages from one SQLite file")
        workers = [spawn.Process(target=run_child, args=(url,)) for _ in range(WORKERS)]
        try:
            is_complete = asyncio.run(watch(url, workers))
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
                worker.join()
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
