"""Producers and workers of one queue, each a real process, and the check of what they did."""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import queue_worker
from processes import ProcessGroup, WorkerProcess
from waiting import TIMEOUT, now
from worker_protocol import Fact

from jobsync import Database, QueuePlugin
from jobsync.core.messages import LIVE
from jobsync.queue.backend import MessageInfo
from jobsync.queue.opening import open_backend

__all__ = ["QueueProcesses", "check_messages"]


class QueueProcesses(ProcessGroup[WorkerProcess]):
    """Producers and workers of one queue."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        super().__init__(folder, WorkerProcess)
        self.url = url
        self.settings = {"completed_ttl": 36_000.0, "skip_cold_start": True, **settings}

    async def start(self, count: int, **options: Any) -> list[WorkerProcess]:
        """Start workers; return when they have joined."""
        workers = [self.add(**options) for _ in range(count)]
        await self.reported("joined", workers)
        return workers

    def add(self, mode: queue_worker.Mode = "handle", **options: Any) -> WorkerProcess:
        """Start a process without waiting for it."""
        options = {"url": self.url, "settings": self.settings, **options}
        return self.launch(queue_worker.__file__, mode, mode=mode, **options)

    async def read_messages(self, *states: Any) -> dict[str, MessageInfo]:
        """Read the messages of some states from the store, by id."""
        found: dict[str, MessageInfo] = {}
        async with Database(self.url) as db:
            queue = await db.use_plugin(QueuePlugin(resource="tasks", **self.settings))
            for state in states:
                after = ""
                while page := await queue.browse(state, after=after, limit=1000):
                    found |= {message.id: message for message in page}
                    after = page[-1].cursor
        return found

    async def drained(self, timeout: float = TIMEOUT) -> None:
        """Wait until nothing is left to handle."""
        async with Database(self.url) as db:
            queue = await db.use_plugin(QueuePlugin(resource="tasks", **self.settings))
            deadline = now() + timeout
            backend = open_backend(db.store, queue.queue, db.components)
            # In one read: between two a message may go from one state to the other.
            while left := {*await backend.count()} & {*LIVE}:
                assert now() < deadline, f"messages are left: {left}"
                await asyncio.sleep(0.1)


def check_messages(processes: QueueProcesses, finished: Mapping[str, MessageInfo]) -> Counter[str]:
    """Check what happened to messages that were all handled; return the counts.

    Raises:
        AssertionError: a message is lost, was never pushed, or was handled twice without a reason.
    """
    acknowledged = {
        name: (fact.who, number)
        for fact in processes.facts("acknowledged")
        for name, number in fact["ids"].items()
    }
    unknown = processes.facts("unknown")
    perhaps = {(fact.who, number) for fact in unknown for number in fact["numbers"]}
    lost = acknowledged.keys() - finished.keys()
    assert not lost, f"{len(lost)} were lost: {sorted(lost)[:5]}"
    begun: dict[str, list[Fact]] = defaultdict(list)
    for fact in processes.facts("begun"):
        origin = (fact["by"], fact["n"])
        assert acknowledged.get(fact["id"], origin) == origin, f"{fact} is not what was pushed"
        assert fact["id"] in acknowledged or origin in perhaps, f"{fact} was never pushed"
        begun[fact["id"]].append(fact)
    assert begun.keys() >= acknowledged.keys()
    repeats = [_count_repeats(processes, facts) for facts in begun.values()]
    return Counter(
        acknowledged=len(acknowledged),
        perhaps=len(perhaps),
        finished=len(finished),
        again=sum(repeats),
    )


def _count_repeats(processes: QueueProcesses, begun: Iterable[Fact]) -> int:
    """Count how often a message was handled again; each time its claim must have ended."""
    ordered = sorted(begun, key=lambda fact: fact["epoch"])
    epochs = [fact["epoch"] for fact in ordered]
    assert len(epochs) == len(set(epochs)), f"one delivery was handled twice: {ordered}"
    for before, after in itertools.pairwise(ordered):
        assert _has_ended(processes, before, after), f"handled again: {before} {after}"
    return len(ordered) - 1


def _has_ended(processes: QueueProcesses, before: Fact, after: Fact) -> bool:
    """Whether a claim was returned, lost, or its process killed, before the next one began."""
    (worker,) = (each for each in processes.workers if each.name == before.who)
    if worker.killed_at is not None and before.at <= worker.killed_at <= after.at:
        return True
    ends = {"message-returned", "message-retry", "message-recovered", "message-lost"}
    return any(f["id"] == before["id"] and f.at >= before.at for f in processes.facts(*ends))
