"""What a message costs on S3: requests counted at the server, not by our own meter."""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import servers
from proxy import Proxy
from waiting import now, until

from jobsync import Database, QueuePlugin
from jobsync.queue.backend import NewMessage, Settlement
from jobsync.queue.opening import open_backend
from jobsync.queue.usage import RequestCounts

QUEUE = "default/tasks"
_read_request = re.compile(rb"([A-Z]+) (\S+) HTTP").match


class RequestCounter:
    """Counts the requests that pass a proxy, by their verb and what they are about."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, data: bytes) -> bytes:
        found = _read_request(data)
        if found is not None:
            verb, path = found.group(1).decode(), found.group(2).decode()
            kind = "LIST" if "list-type" in path else verb
            topic = "page" if "page%2F" in path or "/page/" in path else "other"
            self.counts[f"{topic} {kind}"] += 1
        return data

    @property
    def pages(self) -> int:
        """How many requests were about pages."""
        return sum(count for name, count in self.counts.items() if name.startswith("page"))


@pytest.fixture
def proxy(s3: servers.S3Server) -> Iterator[Proxy]:
    """A proxy before the S3 server."""
    with Proxy("127.0.0.1", s3.port) as proxy:
        yield proxy


@pytest.fixture
def counted_url(bucket_url: str, s3: servers.S3Server, proxy: Proxy) -> str:
    """The URL of an empty prefix, through the proxy."""
    return bucket_url.replace(f":{s3.port}/", f":{proxy.port}/")


@pytest.fixture
async def db(counted_url: str) -> AsyncIterator[Database]:
    """A connected database."""
    async with Database(counted_url) as db:
        yield db


@pytest.mark.parametrize(
    ("size", "most"), [(1, 4.2), (10, 0.5), (100, 0.05)], ids=["alone", "ten", "hundred"]
)
@pytest.mark.parametrize("seconds", [0, 0.005, 0.05], ids=["0 ms", "5 ms", "50 ms"])
async def test_a_message_costs_a_fraction_of_a_request(
    counted_url: str,
    db: Database,
    proxy: Proxy,
    full_scale: bool,
    proof: Any,
    size: int,
    most: float,
    seconds: float,
) -> None:
    """In a busy queue, with default settings, whatever the handlers take.

    Until its page is done: an hour later its drop reads the page once more.
    """
    number = 20_000 if full_scale else {1: 50, 10: 250, 100: 1000}[size]
    begun = now()
    counter = RequestCounter()
    proxy.rewrite(counter)
    producer = open_backend(db.store, QUEUE, db.components)
    ids = db.components.ids.records(number)
    for start in range(0, number, size):
        await producer.push(_build_messages(ids[start : start + size]))
    handled = 0

    async def handle(_: object) -> None:
        nonlocal handled
        await asyncio.sleep(seconds)
        handled += 1

    async with Database(counted_url) as consumer:
        queue = QueuePlugin(resource="tasks", on_message=handle)
        await consumer.use_plugin(queue)
        await until(
            lambda: queue.stats()["completed"] == number, timeout=280 * (5 if full_scale else 1)
        )
    cost = counter.pages / number
    figures = {"seconds": round(now() - begun), "requests": dict(sorted(counter.counts.items()))}
    proof.record("cost of a message", size=size, handler=seconds, cost=round(cost, 4), **figures)
    assert handled == number
    assert cost <= most


async def test_claims_cost_the_same_among_a_million_messages(
    counted_url: str, proxy: Proxy, full_scale: bool
) -> None:
    """In 10,000 pages as in 100: the first listing shows enough."""
    if not full_scale:
        pytest.skip("at full scale; among 2,000 pages in memory in test_pages.py")
    costs = []
    for pages in (100, 10_000):
        async with Database(f"{counted_url}-{pages}") as db, asyncio.TaskGroup() as group:
            # Each has one push at a time: those of one producer would share pages.
            for _ in range(20):
                group.create_task(_push_pages(db, pages // 20))
        counter = RequestCounter()
        proxy.rewrite(counter)
        async with Database(f"{counted_url}-{pages}") as db:
            worker = open_backend(db.store, QUEUE, db.components)
            for _ in range(50):
                claimed = await worker.claim(100, session="worker", visibility=60)
                assert len(claimed.messages) == 100
                receipts = [message.receipt for message in claimed.messages]
                assert all(
                    await worker.settle(
                        [Settlement(receipt=each, move="complete") for each in receipts]
                    )
                )
        costs.append(counter.pages)
        sys.stdout.write(f"\n{pages:,} pages: {dict(counter.counts)}\n")
    few, many = costs
    assert many <= few


async def test_the_estimate_of_pages_is_right_at_a_server(
    counted_url: str, proxy: Proxy, full_scale: bool
) -> None:
    """Within a tenth: the requests for pages until they are done."""
    counter = RequestCounter()
    proxy.rewrite(counter)
    pages = 200 if full_scale else 30
    async with Database(counted_url) as producing, Database(counted_url) as consuming:
        producer = await producing.use_plugin(QueuePlugin(resource="tasks"))
        for _ in range(pages):
            await producer.enqueue_many([{"n": n} for n in range(10)])
        queue = QueuePlugin(resource="tasks", on_message=lambda _: None)
        await consuming.use_plugin(queue)
        await until(lambda: queue.stats()["completed"] == 10 * pages)
        estimate = queue.estimate_usage(
            workers=1, messages_per_day=10 * pages, messages_per_page=10, days=1
        )
    found = RequestCounts(
        puts=counter.counts["page PUT"],
        # Its drop an hour later reads a page once more, and a claim may read whether there is a
        # pause.
        gets=counter.counts["page GET"] + 2 * pages,
    )
    assert estimate.pages.puts == pytest.approx(found.puts, rel=0.1)
    assert estimate.pages.gets == pytest.approx(found.gets, rel=0.1)
    assert estimate.pages.dollars == pytest.approx(found.dollars, rel=0.1)


async def test_an_idle_coordinator_sends_at_most_twenty_requests_a_minute(
    counted_url: str, proxy: Proxy, full_scale: bool
) -> None:
    """With default options, counted in two real minutes."""
    if not full_scale:
        pytest.skip("at full scale; test_pages_fleet.py counts an hour of simulated time")
    counter = RequestCounter()
    proxy.rewrite(counter)
    async with Database(counted_url) as database:
        queue = QueuePlugin(resource="tasks", on_message=lambda _: None)
        await database.use_plugin(queue)
        await until(lambda: queue.is_coordinator)
        await asyncio.sleep(20)
        counter.counts.clear()
        await asyncio.sleep(120)
        assert counter.counts.total() <= 2 * 20


async def _push_pages(db: Database, pages: int) -> None:
    producer = open_backend(db.store, QUEUE, db.components)
    for _ in range(pages):
        await producer.push(_build_messages(db.components.ids.records(100)))


def _build_messages(ids: list[str]) -> list[NewMessage]:
    return [NewMessage(id=name, value={"id": name}, max_attempts=4) for name in ids]
