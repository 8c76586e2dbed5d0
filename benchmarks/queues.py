"""The cost of the queue over the same durable work sent bare, as ratios in one run.

Wall time, because disk and server count too: the rate is what a user sees. Ours and bare take turns
in one process on the same tables, and a ratio is the median of the rounds' ratios, so that other
load on the machine affects both alike.
"""

import argparse
import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks.queues_bare import Bare, BarePostgres, BareSqlite, rate
from benchmarks.queues_listener import BareListener
from benchmarks.table import Row, print_rows, show_progress
from proxy import Proxy
from queue_processes import QueueProcesses
from servers import PostgresServer
from waiting import until

from jobsync import Database, Document, QueuePlugin

ROUNDS = 7
PUSHES = 40
_IDLE = 0.2
"""Seconds after which every worker is idle again."""


class Bench(msgspec.Struct, frozen=True):
    """One database, used in both ways."""

    url: str
    bare: Bare


class Recipient(msgspec.Struct):
    """An argument of a typical task."""

    to: str
    retry: bool


def payload(number: int) -> dict[str, Any]:
    """Return a typical message."""
    return {"type": "send-email", "data": {"to": f"user-{number}@example.com", "retry": False}}


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[QueuePlugin]:
    """Open a queue on a database."""
    async with Database(url) as database:
        yield await database.use_plugin(QueuePlugin(resource="tasks", **options))


async def fill(url: str, count: int, task: str = "") -> float:
    """Push messages in batches; return the rate."""
    async with opened(url) as queue:
        messages = [payload(number) for number in range(count)]
        begun = time.perf_counter()
        for start in range(0, count, 10_000):
            await queue.enqueue_many(messages[start : start + 10_000], task=task)
        return rate(count, begun)


async def drain(url: str, count: int, task: str = "") -> float:
    """Handle all messages, ten at once, until the last one is settled; return the rate."""
    seen = 0

    async def handle(_: Document) -> None:
        nonlocal seen
        seen += 1

    async def send(type: str, data: Recipient) -> None:
        nonlocal seen
        assert type
        seen += not data.retry

    async with opened(url, concurrency=10) as queue:
        begun = time.perf_counter()
        if task:
            queue.task(name=task)(send)
        else:
            queue.handler(handle)
        while queue.stats()["completed"] < count:  # noqa: ASYNC110 - listening would cost more
            await asyncio.sleep(0.002)
        found = rate(count, begun)
        assert seen == count
        return found


async def compare_drains(bench: Bench, count: int) -> Row:
    """Drain both ways, in turns."""
    pairs = []
    for number in range(ROUNDS):
        show_progress(f"drain: round {number} of {ROUNDS}")
        await fill(bench.url, count)
        ours = await drain(bench.url, count)
        await fill(bench.url, count)
        begun = time.perf_counter()
        assert bench.bare.drain() == count
        pairs.append((rate(count, begun), ours))
    return _compare_rates("drain, concurrency 10", pairs, 0.25)


async def compare_tasks(bench: Bench, count: int) -> Row:
    """Drain messages of a task, whose arguments are decoded, and plain ones, in turns."""
    pairs = []
    for number in range(ROUNDS):
        show_progress(f"tasks: round {number} of {ROUNDS}")
        await fill(bench.url, count)
        plain = await drain(bench.url, count)
        await fill(bench.url, count, task="send")
        pairs.append((plain, await drain(bench.url, count, task="send")))
    row = _compare_rates("drain of a task", pairs, 1 / 1.15)
    return msgspec.structs.replace(row, text=row.text.replace("bare", "a plain handler"))


async def compare_singles(bench: Bench, count: int) -> Row:
    """Push one by one both ways, in turns."""
    pairs, spent = [], []
    text = msgspec.json.encode(payload(1)).decode()
    async with opened(bench.url) as queue:
        tasks = queue.database.resources.tasks
        for number in range(ROUNDS):
            show_progress(f"enqueue: round {number} of {ROUNDS}")
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                bench.bare.push(text)
            bare, bare_cpu = rate(count, begun), time.process_time() - cpu
            begun, cpu = time.perf_counter(), time.process_time()
            for each in range(count):
                await tasks.enqueue(payload(each))
            pairs.append((bare, rate(count, begun)))
            spent.append((time.process_time() - cpu - bare_cpu) / count * 1e6)
        await queue.purge()
    if isinstance(bench.bare, BarePostgres):
        return _compare_rates("single enqueue", pairs, 0.6)
    extra = statistics.median(spent)
    row = _compare_rates("single enqueue", pairs, 0.0)
    return msgspec.structs.replace(
        row,
        text=f"{row.text}, +{extra:.0f} µs of CPU",
        budget="at most +250 µs",
        is_within=extra <= 250,
        value=extra,
        bare=0.0,
        better="lower",
    )


async def compare_bulks(bench: Bench, count: int) -> Row:
    """Push a batch, and COPY one into the same table, in turns."""
    assert isinstance(bench.bare, BarePostgres)
    messages = [payload(number) for number in range(count)]
    texts = [msgspec.json.encode(each).decode() for each in messages]
    pairs = []
    async with opened(bench.url) as queue:
        for number in range(ROUNDS):
            show_progress(f"bulk: round {number} of {ROUNDS}")
            begun = time.perf_counter()
            bench.bare.copy(texts)
            bare = rate(count, begun)
            begun = time.perf_counter()
            await queue.enqueue_many(messages)
            pairs.append((bare, rate(count, begun)))
            await queue.purge()
    return _compare_rates(f"enqueue_many of {count:,}, bare: COPY", pairs, 0.3)


async def measure_latency(bench: Bench, *, apart: bool) -> Row:
    """Measure the time from a push until an idle worker begins, here or in another process."""
    is_postgres = isinstance(bench.bare, BarePostgres)
    most = 10.0 if is_postgres or not apart else 100.0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        begins = _begin_apart(bench.url, folder) if apart else _begin_here(bench.url)
        listener = None
        if apart and is_postgres:
            listener = stack.enter_context(closing(BareListener(bench.url)))
        async with begins as begun, opened(bench.url) as queue:
            bare, took = [], []
            for number in range(PUSHES):
                show_progress(f"latency: {number} of {PUSHES}")
                if listener is not None:
                    await asyncio.sleep(_IDLE)
                    bare.append(1000 * await asyncio.to_thread(listener.push))
                await asyncio.sleep(_IDLE)
                sent = time.monotonic()
                await queue.enqueue({"n": number, "by": "bench", "kind": "plain"})
                took.append(1000 * (await begun(number) - sent))
    median, bare_median = statistics.median(took), statistics.median(bare or [0.0])
    over = f", {median / bare_median:.1f}x of bare ({bare_median:.1f} ms)" if bare else ""
    p95 = statistics.quantiles(took, n=20)[-1]
    return Row(
        label=f"enqueue to start, {'across processes' if apart else 'in process'}",
        text=f"{median:.1f} ms{over}, p95 {p95:.1f} ms",
        budget=f"p50 under {most:g} ms",
        is_within=median < most,
        value=median,
        bare=bare_median,
        better="lower",
    )


Begun = Callable[[int], Awaitable[float]]
"""Waits until a message begins; returns when."""


@asynccontextmanager
async def _begin_here(url: str) -> AsyncIterator[Begun]:
    begun: asyncio.Queue[float] = asyncio.Queue()

    async def handle(_: Document) -> None:
        begun.put_nowait(time.monotonic())

    async with opened(url, on_message=handle):
        yield lambda _: begun.get()


@asynccontextmanager
async def _begin_apart(url: str, folder: Path) -> AsyncIterator[Begun]:
    async with QueueProcesses(url, folder) as processes:
        await processes.start(1)

        async def begun(number: int) -> float:
            await until(lambda: len(processes.facts("begun")) > number, "it begins")
            return processes.facts("begun")[number].at

        yield begun


async def count_idle(bench: Bench, seconds: float = 60.0) -> Row:
    """Count the statements of an idle worker that leads, in a minute."""
    if isinstance(bench.bare, BarePostgres):
        port = int(bench.url.partition("127.0.0.1:")[2].partition("/")[0])
        with Proxy("127.0.0.1", port) as proxy:
            url = bench.url.replace(f":{port}/", f":{proxy.port}/")
            count = await _count_idle(url, lambda: proxy.requests, seconds)
    else:
        counter = _StatementCounter()
        with counter:
            count = await _count_idle(bench.url, lambda: counter.statements, seconds)
    return Row(
        label="statements of an idle worker",
        text=f"{count:.0f} a minute",
        budget="at most 45",
        is_within=count <= 45,
        value=count,
        better="lower",
    )


async def _count_idle(url: str, counted: Callable[[], int], seconds: float) -> float:
    async def handle(_: Document) -> None:
        raise AssertionError("nothing was pushed")

    async with opened(url, on_message=handle):
        # By then it is elected, has cleaned up, and its statements are prepared.
        await asyncio.sleep(40)
        before = counted()
        show_progress(f"idle: {seconds:g} s")
        await asyncio.sleep(seconds)
        return (counted() - before) * 60 / seconds


class _StatementCounter:
    """Counts all statements of connections that are opened in its context."""

    def __init__(self) -> None:
        self.statements = 0
        self._connect = sqlite3.connect

    def __enter__(self) -> None:
        def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = self._connect(*arguments, **options)
            connection.set_trace_callback(self._count)
            return connection

        sqlite3.connect = connect  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        sqlite3.connect = self._connect

    def _count(self, _: str) -> None:
        self.statements += 1


def _compare_rates(label: str, pairs: list[tuple[float, float]], least: float) -> Row:
    # The first round warms up.
    pairs = pairs[1:]
    ratio = statistics.median(ours / bare for bare, ours in pairs)
    bare, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
    return Row(
        label=label,
        text=f"{ours:,.0f} a second, {ratio:.2f}x of bare ({bare:,.0f})",
        budget=f"at least {least:.2f}x",
        is_within=ratio >= least,
        value=ours,
        bare=bare,
        better="higher",
    )


@asynccontextmanager
async def on_sqlite() -> AsyncIterator[Bench]:
    """Create a file, and open it bare too."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.db"
        url = f"sqlite:///{path}"
        await fill(url, 1)
        bare = BareSqlite(path)
        bare.drain()
        yield Bench(url, bare)
        bare.close()


@asynccontextmanager
async def on_postgres() -> AsyncIterator[Bench]:
    """Start a server, and connect to it bare too."""
    with PostgresServer() as server:
        url = server.create_database("bench")
        await fill(url, 1)
        bare = BarePostgres(url)
        bare.drain()
        yield Bench(url, bare)
        bare.close()


Part = Callable[[Bench], Awaitable[Row]]


async def measure(name: str, count: int, *, quick: bool) -> list[Row]:
    """Measure one database."""
    parts: list[Part] = [
        lambda bench: compare_drains(bench, count),
        lambda bench: compare_tasks(bench, count),
        lambda bench: compare_singles(bench, 200),
    ]
    if name == "postgres":
        parts.append(lambda bench: compare_bulks(bench, 10_000))
    parts += [
        lambda bench: measure_latency(bench, apart=False),
        lambda bench: measure_latency(bench, apart=True),
    ]
    if not quick:
        parts.append(count_idle)
    async with on_postgres() if name == "postgres" else on_sqlite() as bench:
        rows = [await part(bench) for part in parts]
    return [msgspec.structs.replace(row, label=f"{name}: {row.label}") for row in rows]


def main() -> int:
    """Measure, and compare with the budgets."""
    parser = argparse.ArgumentParser(description="the queue over the same work sent bare")
    parser.add_argument("--only", choices=("sqlite", "postgres"), help="this database alone")
    parser.add_argument("--messages", type=int, default=5000, help="in a round of draining")
    parser.add_argument("--quick", action="store_true", help="leave out the idle measurement")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    options = parser.parse_args()
    names = [options.only] if options.only else ["sqlite", "postgres"]
    rows = (
        row
        for name in names
        for row in asyncio.run(measure(name, options.messages, quick=options.quick))
    )
    return 0 if print_rows(rows, as_json=options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
