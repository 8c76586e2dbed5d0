"""Fleets with a queue in a bucket, in the simulated world: what they cost, and how soon they react.

Requests are counted where the server would count them, by the process that sends them. Hours pass
in seconds, so costs by the clock are counted as they are, not extrapolated.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from fleets import BilledStore
from waiting import until

from jobsync import Event, QueuePlugin
from jobsync.queue.usage import RequestCounts
from jobsync.stores.contract import Change, Head, Outcome, Record, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.testing.databases import NodeDatabase
from jobsync.testing.nodes import Node
from jobsync.testing.world import World

MINUTE, HOUR, MONTH = 60.0, 3600.0, 30 * 86_400.0


class Bucket(BilledStore):
    """A store that behaves like a bucket, and whose listings show the marks of records."""

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        return [
            msgspec.structs.replace(head, written_at=self._written_at[head.key])
            for head in await MemoryStore.heads(self, prefix, after=after, until=until, limit=limit)
        ]


class CountedLink(StoreDecorator):
    """What one process sends to a bucket."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests: Counter[str] = Counter()

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self.requests["gets"] += len(keys)
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.requests["puts"] += len(changes)
        return await self.inner.write(changes)

    async def heads(self, prefix: str, **options: Any) -> list[Head]:
        self.requests["lists"] += 1
        return await self.inner.heads(prefix, **options)

    async def scan(self, prefix: str, **options: Any) -> list[Record]:
        found = await self.inner.scan(prefix, **options)
        self.requests.update(lists=1, gets=len(found))
        return found


class WorkerProcess:
    """A process of the fleet."""

    def __init__(self, fleet: "PagesFleet", node: Node) -> None:
        self.node = node
        self.link = CountedLink(fleet.bucket)
        self.started: list[int] = []
        """The messages whose handlers have started here."""
        self._fleet = fleet
        self.queue: QueuePlugin | None = None

    async def start(self, *, handles: bool) -> None:
        """Connect, and handle messages."""
        database = NodeDatabase(self.node, self.link)
        # What wakes the workers of a process does not wake those of another.
        assert isinstance(database.store_target.target, Store)
        database.store_target.target.name += self.node.name
        database.on("plg:queue:tickets-published", self._fleet.published.append)
        self.queue = QueuePlugin(resource="tasks", on_message=self._handle if handles else None)
        await database.use_plugin(self.queue)
        await database.connect()

    async def _handle(self, task: Any) -> None:
        self.started.append(task.n)
        self._fleet.on_started(task.n)
        await asyncio.sleep(self._fleet.handler_seconds)

    @property
    def is_coordinator(self) -> bool:
        """Whether it coordinates the queue."""
        return self.queue is not None and self.queue.is_coordinator

    @property
    def counts(self) -> RequestCounts:
        """The requests since the counters were cleared."""
        return RequestCounts(**self.link.requests)


class PagesFleet:
    """Workers and a producer on one bucket."""

    def __init__(self, workers: int, seconds: float = 0.01) -> None:
        self.world = World(7)
        self.bucket = Bucket(components=self.world.components)
        self.handler_seconds = seconds
        self.published: list[Event] = []
        self.pushed: dict[int, float] = {}
        self.delays: dict[int, float] = {}
        """Seconds from the push of each message until its first handler started."""
        self.workers = [self._build(f"worker-{number}") for number in range(workers)]
        self.producer = self._build("producer")

    def _build(self, name: str) -> WorkerProcess:
        return WorkerProcess(self, self.world.node(name))

    def on_started(self, number: int) -> None:
        """Record that a handler has started."""
        self.delays.setdefault(number, self.now - self.pushed[number])

    @property
    def now(self) -> float:
        """The time of the world."""
        return self.world.loop.time()

    def has_started(self, number: int) -> bool:
        """Whether a worker that lives has started a message's handler."""
        return any(number in worker.started for worker in self.workers)

    @property
    def coordinator(self) -> WorkerProcess:
        """The worker that coordinates."""
        (found,) = [worker for worker in self.workers if worker.is_coordinator]
        return found

    async def push(self, delay: float = 0.0) -> int:
        """Push a message, in a page of its own."""
        queue = self.producer.queue
        assert queue is not None
        number = len(self.pushed)
        self.pushed[number] = self.now
        await self.producer.node.run(queue.enqueue({"n": number}, delay=delay))
        return number

    async def push_every(self, interval: float, seconds: float) -> None:
        """Push a message in each interval, for some time."""
        for _ in range(int(seconds / interval)):
            await self.push()
            await asyncio.sleep(interval)

    def clear(self) -> None:
        """Count requests from now on."""
        for process in (*self.workers, self.producer):
            process.link.requests.clear()

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        """Start all processes, one after the other, let them settle, and run a story."""

        async def run() -> None:
            for worker in self.workers:
                await worker.node.run(worker.start(handles=True))
                await asyncio.sleep(1.3)
            await self.producer.node.run(self.producer.start(handles=False))
            await asyncio.sleep(12 * MINUTE)
            self.clear()
            await story()

        self.world.run(run)
        assert self.world.judge() == []


def test_an_idle_fleet_costs_little() -> None:
    """At most 20 requests a minute for the coordinator, and $0.75 a month for each of ten."""
    fleet = PagesFleet(10)

    async def story() -> None:
        leader = fleet.coordinator
        await asyncio.sleep(HOUR)
        assert leader.is_coordinator
        assert leader.counts.total / HOUR * MINUTE <= 20

    fleet.run(story)
    dollars = [worker.counts.dollars / HOUR * MONTH for worker in fleet.workers]
    assert 0.5 < sum(dollars) / len(dollars) <= 0.75


def test_a_lone_worker_costs_at_most_twenty_requests_a_minute() -> None:
    """It is the coordinator, too."""
    fleet = PagesFleet(1)

    async def story() -> None:
        await asyncio.sleep(HOUR)

    fleet.run(story)
    (worker,) = fleet.workers
    assert worker.counts.total / HOUR * MINUTE <= 20


@pytest.mark.parametrize("workers", [1, 4])
def test_a_message_of_another_process_starts_within_five_seconds(workers: int) -> None:
    """Also one that is pushed just after a ring, and announced by none of its own."""
    fleet = PagesFleet(workers)

    async def story() -> None:
        for number in range(60):
            await fleet.push()
            await asyncio.sleep(0.07 * (number % 28))
            await fleet.push()
            await asyncio.sleep(10 + 0.37 * number)

    fleet.run(story)
    assert fleet.delays.keys() == fleet.pushed.keys()
    assert max(fleet.delays.values()) < 5


def test_tickets_save_listings_of_many_workers() -> None:
    """With a message a minute, ten workers would list 21 times for each; so they do about 12."""
    fleet = PagesFleet(10)

    async def story() -> None:
        await fleet.push_every(MINUTE, 10 * MINUTE)
        leader = fleet.coordinator.queue
        assert leader is not None
        assert {event["coordinator_id"] for event in fleet.published} == {leader.worker_id}

    fleet.run(story)
    lists = sum(worker.counts.lists for worker in fleet.workers)
    sessions = 10 * 2.2
    assert lists - sessions <= 14 * len(fleet.pushed)
    assert 2 * len(fleet.pushed) <= len(fleet.published) <= 3 * len(fleet.pushed)
    assert {event["queue"] for event in fleet.published} == {"default/tasks"}


def test_a_killed_worker_is_replaced_within_45_seconds() -> None:
    """The coordinator and the deputy watch for all, and the bell rings for what they end."""
    fleet = PagesFleet(6, seconds=100.0)

    async def story() -> None:
        for _ in range(4):
            number = await fleet.push()
            await until(partial(fleet.has_started, number), timeout=10, interval=0.1)
            (owner,) = [worker for worker in fleet.workers if number in worker.started]
            await asyncio.sleep(33.0 + number)
            if owner.is_coordinator:
                await asyncio.sleep(100.0)
                continue
            owner.node.kill()
            fleet.workers.remove(owner)
            killed = fleet.now
            await until(partial(fleet.has_started, number), timeout=60, interval=0.1)
            assert fleet.now - killed <= 45
            await asyncio.sleep(150.0)

    fleet.run(story)


def test_a_machine_whose_clock_is_wrong_leaves_delayed_messages_to_others() -> None:
    """An hour ahead, it would start them an hour early. It says so, and handles all others."""
    fleet = PagesFleet(1)
    wrong = WorkerProcess(fleet, fleet.world.node("wrong", skew=HOUR))
    vetoes: list[Event] = []

    async def story() -> None:
        wrong.node.components.events.on("plg:queue:clock-vetoed", vetoes.append)
        await wrong.node.run(wrong.start(handles=True))
        (right,) = fleet.workers
        await asyncio.sleep(MINUTE)
        delayed = await fleet.push(delay=10 * MINUTE)
        await asyncio.sleep(9 * MINUTE)
        assert delayed not in fleet.delays
        assert [event["queue"] for event in vetoes] == ["default/tasks"]
        await asyncio.sleep(2 * MINUTE)
        assert right.started == [delayed]
        assert fleet.delays[delayed] == pytest.approx(10 * MINUTE, abs=1)
        right.node.kill()
        other = await fleet.push()
        await asyncio.sleep(MINUTE)
        assert wrong.started == [other]

    fleet.run(story)


def test_workers_go_on_when_the_coordinator_is_killed() -> None:
    """They list when the bell rings, until another one is elected and publishes tickets."""
    fleet = PagesFleet(5)

    async def story() -> None:
        await fleet.push_every(20, 2 * MINUTE)
        former = fleet.coordinator
        former.node.kill()
        fleet.workers.remove(former)
        fleet.published.clear()
        await fleet.push_every(7, 10 * MINUTE)
        assert fleet.coordinator is not former
        assert fleet.published

    fleet.run(story)
    assert fleet.delays.keys() == fleet.pushed.keys()
    assert max(fleet.delays.values()) < 5


@pytest.mark.parametrize(
    ("workers", "interval", "seconds"),
    [(1, 60, 0.01), (2, 60, 0.01), (10, 60, 0.01), (10, 10, 0.01), (10, 120, 100.0), (4, 3, 0.01)],
)
def test_the_estimate_of_costs_is_right(
    workers: int, interval: float, seconds: float, full_scale: bool
) -> None:
    """Within a fifth, in dollars and in requests."""
    if not full_scale and (workers, interval) not in {(1, 60), (10, 120)}:
        pytest.skip("at full scale")
    fleet = PagesFleet(workers, seconds)
    duration = 10 * MINUTE

    async def story() -> None:
        await fleet.push_every(interval, duration)

    fleet.run(story)
    counted = RequestCounts()
    for worker in fleet.workers:
        counted += worker.counts
    queue = fleet.workers[0].queue
    assert queue is not None
    estimate = queue.estimate_usage(
        workers=workers,
        messages_per_day=86_400 / interval,
        seconds_per_page=seconds,
        days=duration / 86_400,
    )
    # What the producer sends: a page and a ring for each message, and its session.
    counted += RequestCounts(puts=2.0 * len(fleet.pushed))
    assert estimate.total.total == pytest.approx(counted.total, rel=0.2)
    assert estimate.dollars == pytest.approx(counted.dollars, rel=0.2)
