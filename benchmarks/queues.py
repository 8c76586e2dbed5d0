"""What the queue costs over the same durable work sent bare, as ratios in one run.

Wall time, because the disk's part and the server's count: the rate is what a user sees. Ours
and bare take turns in one process on the same tables, and a ratio is the median of the
rounds' own ratios, so that what else goes on in the machine meets both alike.
"""

import argparse
import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks.queues_bare import Bare, BarePostgres, BareSqlite, rate
from benchmarks.queues_listener import BareListener
from benchmarks.rounds import tell
from proxy import Proxy
from queue_processes import QueueProcesses
from servers import PostgresServer
from waiting import until

from jobsync import Database, Document, QueuePlugin

ROUNDS = 7
PUSHES = 40
_IDLE = 0.2
"""Seconds after which everybody is idle again."""


class Bench(msgspec.Struct, frozen=True):
    """One database, reached in both ways."""

    url: str
    bare: Bare


class Verdict(msgspec.Struct, frozen=True):
    """What was measured, and how it compares with its budget."""

    what: str
    bare: str
    ours: str
    text: str
    kept: bool


def payload(number: int) -> dict[str, Any]:
    """Give a message such as people have."""
    return {"type": "send-email", "data": {"to": f"user-{number}@example.com", "retry": False}}


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[QueuePlugin]:
    """Open a queue on a database."""
    async with Database(url) as database:
        yield await database.use_plugin(QueuePlugin(resource="tasks", **options))


async def fill(url: str, count: int) -> float:
    """Push messages, in batches; give the rate."""
    async with opened(url) as queue:
        messages = [payload(number) for number in range(count)]
        begun = time.perf_counter()
        for start in range(0, count, 10_000):
            await queue.enqueue_many(messages[start : start + 10_000])
        return rate(count, begun)


async def drain(url: str, count: int) -> float:
    """Handle all messages, ten at once; give the rate, until the store knows of the last."""
    seen = 0

    async def handle(_: Document) -> None:
        nonlocal seen
        seen += 1

    async with opened(url, concurrency=10) as queue:
        begun = time.perf_counter()
        queue.handler(handle)
        while queue.stats()["completed"] < count:  # noqa: ASYNC110 - listening would cost more
            await asyncio.sleep(0.002)
        found = rate(count, begun)
        assert seen == count
        return found


async def compare_drains(bench: Bench, count: int) -> Verdict:
    """Drain in both ways, in turn."""
    pairs = []
    for number in range(ROUNDS):
        tell(f"drain: round {number} of {ROUNDS}")
        await fill(bench.url, count)
        ours = await drain(bench.url, count)
        await fill(bench.url, count)
        begun = time.perf_counter()
        assert bench.bare.drain() == count
        pairs.append((rate(count, begun), ours))
    return _judge_rates("drain, concurrency 10", pairs, 0.25)


async def compare_singles(bench: Bench, count: int) -> Verdict:
    """Push one by one in both ways, in turn."""
    pairs, spent = [], []
    text = msgspec.json.encode(payload(1)).decode()
    async with opened(bench.url) as queue:
        tasks = queue.database.resources.tasks
        for number in range(ROUNDS):
            tell(f"enqueue: round {number} of {ROUNDS}")
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
        return _judge_rates("single enqueue", pairs, 0.6)
    extra = statistics.median(spent)
    verdict = _judge_rates("single enqueue", pairs, 0.0)
    return msgspec.structs.replace(
        verdict, text=f"+{extra:.0f} µs of CPU, at most +250 µs", kept=extra <= 250
    )


async def compare_bulks(bench: Bench, count: int) -> Verdict:
    """Push a batch, and COPY one into the same table, in turn."""
    assert isinstance(bench.bare, BarePostgres)
    messages = [payload(number) for number in range(count)]
    texts = [msgspec.json.encode(each).decode() for each in messages]
    pairs = []
    async with opened(bench.url) as queue:
        for number in range(ROUNDS):
            tell(f"bulk: round {number} of {ROUNDS}")
            begun = time.perf_counter()
            bench.bare.copy(texts)
            bare = rate(count, begun)
            begun = time.perf_counter()
            await queue.enqueue_many(messages)
            pairs.append((bare, rate(count, begun)))
            await queue.purge()
    return _judge_rates(f"enqueue_many of {count:,}, bare: COPY", pairs, 0.3)


async def measure_latency(bench: Bench, *, apart: bool) -> Verdict:
    """Push to an idle worker, here or in another process; give the time until it begins."""
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
                tell(f"latency: {number} of {PUSHES}")
                if listener is not None:
                    await asyncio.sleep(_IDLE)
                    bare.append(1000 * await asyncio.to_thread(listener.push))
                await asyncio.sleep(_IDLE)
                sent = time.monotonic()
                await queue.enqueue({"n": number, "by": "bench", "kind": "plain"})
                took.append(1000 * (await begun(number) - sent))
    median = statistics.median(took)
    over = f"{median / statistics.median(bare):.1f}x; " if bare else ""
    where = "across processes" if apart else "in process"
    return Verdict(
        f"enqueue to start, {where}",
        f"{statistics.median(bare):.1f} ms" if bare else "",
        f"{median:.1f} ms",
        f"p50 under {most:g} ms; {over}p95 {statistics.quantiles(took, n=20)[-1]:.1f} ms",
        median < most,
    )


Begun = Callable[[int], Awaitable[float]]
"""Waits until a message begins; gives when that was."""


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


async def count_idle(bench: Bench, seconds: float = 60.0) -> Verdict:
    """Count what an idle worker that leads asks of its database in a minute."""
    if isinstance(bench.bare, BarePostgres):
        port = int(bench.url.partition("127.0.0.1:")[2].partition("/")[0])
        with Proxy("127.0.0.1", port) as proxy:
            url = bench.url.replace(f":{port}/", f":{proxy.port}/")
            count = await _count_idle(url, lambda: proxy.requests, seconds)
    else:
        traced = _Traced()
        with traced:
            count = await _count_idle(bench.url, lambda: traced.statements, seconds)
    return Verdict(
        "statements of an idle worker", "", f"{count:.0f}", "a minute, at most 45", count <= 45
    )


async def _count_idle(url: str, counted: Callable[[], int], seconds: float) -> float:
    async def handle(_: Document) -> None:
        raise AssertionError("nothing was pushed")

    async with opened(url, on_message=handle):
        # It is elected, has tidied up, and has its statements prepared by then.
        await asyncio.sleep(40)
        before = counted()
        tell(f"idle: {seconds:g} s")
        await asyncio.sleep(seconds)
        return (counted() - before) * 60 / seconds


class _Traced:
    """Counts the statements of connections that are made meanwhile, each and every one."""

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


def _judge_rates(what: str, pairs: list[tuple[float, float]], least: float) -> Verdict:
    # The first round warms up.
    pairs = pairs[1:]
    ratio = statistics.median(ours / bare for bare, ours in pairs)
    bare, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
    return Verdict(
        what,
        f"{bare:,.0f}/s",
        f"{ours:,.0f}/s",
        f"{ratio:.2f}x, at least {least:.2f}x",
        ratio >= least,
    )


@asynccontextmanager
async def on_sqlite() -> AsyncIterator[Bench]:
    """Make a file, and open it bare too."""
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


Part = Callable[[Bench], Awaitable[Verdict]]


async def run(name: str, count: int) -> bool:
    """Measure one database, and print its table; say whether it is within its budgets."""
    parts: list[Part] = [
        lambda bench: compare_drains(bench, count),
        lambda bench: compare_singles(bench, 200),
    ]
    if name == "postgres":
        parts.append(lambda bench: compare_bulks(bench, 10_000))
    parts += [
        lambda bench: measure_latency(bench, apart=False),
        lambda bench: measure_latency(bench, apart=True),
        count_idle,
    ]
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(
            on_postgres() if name == "postgres" else on_sqlite()
        )
        verdicts = [await part(bench) for part in parts]
    tell("")
    print(f"{name}: median of {ROUNDS - 1} rounds\n")
    print(f"{'':36}{'bare':>12}{'ours':>12}    budget")
    for each in verdicts:
        mark = "" if each.kept else "  OVER"
        print(f"{each.what:36}{each.bare:>12}{each.ours:>12}    {each.text}{mark}")
    print()
    return all(each.kept for each in verdicts)


def main() -> int:
    """Measure, and judge by the budgets."""
    parser = argparse.ArgumentParser(description="the queue over the same work sent bare")
    parser.add_argument("--only", choices=("sqlite", "postgres"), help="this database alone")
    parser.add_argument("--messages", type=int, default=5000, help="in a round of draining")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else ["sqlite", "postgres"]
    kept = [asyncio.run(run(name, arguments.messages)) for name in names]
    print("within budget" if all(kept) else "OVER BUDGET")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
