"""The queue on S3 over the same requests sent bare, with 1, 10 and 100 messages in a page.

A bare page is created, read and replaced twice, with bodies of the size that ours have; the bare
loop lists once for a thousand pages, and sends one request after the other. Ours and bare take
turns, and a ratio is the median of the rounds' ratios.

Then four workers share one queue, and their conflicts are counted.
"""

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import msgspec
import obstore
from benchmarks.bare_objects import open_bucket
from benchmarks.table import Row, print_rows, show_progress
from servers import SeaweedServer
from waiting import until

from jobsync import Database, QueuePlugin
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.queue.backend import NewMessage, Settlement
from jobsync.queue.opening import open_backend
from jobsync.stores.contract import Change, Outcome, Store
from jobsync.stores.decorator import StoreDecorator

ROUNDS = 4
MESSAGES = {1: 200, 10: 1_000, 100: 10_000}
"""Messages in a round, by messages in a page."""
LEAST = 0.4
WORKERS, SHARED = 4, 2_000
"""Workers that share a queue, and the messages in it, each in a page of its own."""
MOST_CONFLICTS = 0.05
QUEUE = "default/tasks"


class BarePages:
    """obstore alone, one request after the other."""

    def __init__(self, url: ObjectsUrl) -> None:
        self._folder = f"{url.prefix}/bare/"
        self._bucket = open_bucket(url)

    def push(self, messages: list[dict[str, Any]], number: int) -> None:
        """Create a page."""
        name = f"{self._folder}{number:09d}"
        obstore.put(self._bucket, name, msgspec.json.encode(messages), mode="create")

    def drain(self) -> int:
        """Read, claim and complete page by page; return the number of messages."""
        count = 0
        listed = [each for part in obstore.list(self._bucket, self._folder) for each in part]
        for meta in sorted(listed, key=lambda each: each["path"]):
            found = obstore.get(self._bucket, meta["path"])
            etag = found.meta["e_tag"]
            messages = msgspec.json.decode(found.bytes().to_bytes())
            body = msgspec.json.encode(messages)
            for _ in ("claim", "complete"):
                done = obstore.put(self._bucket, meta["path"], body, mode={"e_tag": etag})
                etag = done["e_tag"]
            count += len(messages)
        obstore.delete(self._bucket, [each["path"] for each in listed])
        return count


def payload(number: int) -> dict[str, Any]:
    """Return a typical message."""
    return {"type": "send-email", "data": {"to": f"user-{number}@example.com", "retry": False}}


async def push_ours(url: str, size: int, count: int) -> float:
    """Push pages of a size; return the seconds."""
    async with Database(url) as db:
        backend = open_backend(db.store, QUEUE, db.components)
        ids = db.components.ids.records(count)
        begun = time.perf_counter()
        for start in range(0, count, size):
            await backend.push(
                [
                    NewMessage(id=name, value={"id": name, **payload(start)}, max_attempts=4)
                    for name in ids[start : start + size]
                ]
            )
        return time.perf_counter() - begun


async def drain_ours(url: str, count: int) -> float:
    """Handle all messages with default settings; return the seconds."""
    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        begun = time.perf_counter()
        queue.handler(_handle)
        await until(lambda: queue.stats()["completed"] == count, timeout=600)
        return time.perf_counter() - begun


async def _handle(_: object) -> None:
    pass


async def compare(server: SeaweedServer, size: int) -> Row:
    """Push and drain both ways, in turns."""
    count, pairs = MESSAGES[size], []
    for number in range(ROUNDS):
        show_progress(f"{size} a page: round {number + 1} of {ROUNDS}")
        url = server.url("bench", f"ours-{size}-{number}")
        ours = await push_ours(url, size, count) + await drain_ours(url, count)
        location = parse_url(server.url("bench", f"bare-{size}-{number}"))
        assert isinstance(location, ObjectsUrl)
        bare, begun = BarePages(location), time.perf_counter()
        for start in range(0, count, size):
            bare.push([payload(start)] * size, start)
        assert bare.drain() == count
        pairs.append((count / (time.perf_counter() - begun), count / ours))
    # The first round warms up.
    ratio = statistics.median(ours / bare for bare, ours in pairs[1:])
    bare_rate, rate = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
    return Row(
        label=f"s3: enqueue and drain, {size} a page",
        text=f"{rate:,.0f} a second, {ratio:.2f}x of bare ({bare_rate:,.0f})",
        budget=f"at least {LEAST:.2f}x",
        is_within=ratio >= LEAST,
        value=rate,
        bare=bare_rate,
        better="higher",
    )


class Contended(StoreDecorator):
    """A store that counts the writes of pages, and those that others have forestalled."""

    def __init__(self, inner: Store, counts: Counter[str]) -> None:
        super().__init__(inner)
        self._counts = counts

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write and count."""
        outcomes = await self.inner.write(changes)
        for change, outcome in zip(changes, outcomes, strict=True):
            if change.key.startswith("page/"):
                self._counts[type(outcome).__name__] += 1
        return outcomes


async def drain_shared(url: str, worker: str, counts: Counter[str]) -> None:
    """Claim and complete messages until there are none."""
    async with Database(url) as db:
        backend = open_backend(Contended(db.store, counts), QUEUE, db.components)
        while counts["handled"] < SHARED:
            claimed = await backend.claim(10, session=worker, visibility=30, at_most=10)
            answers = await backend.settle(
                [Settlement(receipt=each.receipt, move="complete") for each in claimed.messages]
            )
            counts["handled"] += sum(answers)
            if not answers:
                await asyncio.sleep(0.1)


async def count_conflicts(server: SeaweedServer) -> Row:
    """Drain a queue with several workers; compare their conflicts with their claims."""
    show_progress(f"{WORKERS} workers")
    url = server.url("bench", "shared")
    await push_ours(url, 1, SHARED)
    counts: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        for number in range(WORKERS):
            group.create_task(drain_shared(url, f"worker-{number}", counts))
    share = counts["Conflicted"] / SHARED
    return Row(
        label=f"s3: conflicts of {WORKERS} workers on one queue",
        text=f"{share:.1%} of {SHARED:,} claims",
        budget=f"at most {MOST_CONFLICTS:.0%}",
        is_within=share <= MOST_CONFLICTS,
        value=share,
        better="lower",
    )


async def main() -> int:
    """Measure, and compare with the budgets."""
    with SeaweedServer() as server:
        server.create_bucket("bench")
        rows = [await compare(server, size) for size in MESSAGES]
        rows.append(await count_conflicts(server))
    return 0 if print_rows(rows, as_json="--json" in sys.argv) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
