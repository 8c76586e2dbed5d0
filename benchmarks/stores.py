"""What a store costs over its bare driver, as ratios within one run.

Ours is what a user gets from `open_store`, on whatever cores the system gives it. Bare is
the same statement or request: on SQLite with parameters that are ready-made, on PostgreSQL
with lists that psycopg turns into arrays, on S3 with bodies made by msgspec.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks.bare_objects import BareObjects
from benchmarks.bare_postgres import BarePostgres
from benchmarks.bare_sqlite import BareSqlite
from benchmarks.rounds import Figures, Scale, measure
from benchmarks.table import show_progress
from benchmarks.tally import tally
from benchmarks.work import BATCH, Ours, Work
from servers import PostgresServer, SeaweedServer

from jobsync import open_store
from jobsync.core.urls import ObjectsUrl, parse_url

_MOST_A_ROW = 1.5


class Ways(msgspec.Struct, frozen=True):
    """Both ways to do the work on one server."""

    url: str
    bare: Work
    ours: Work


class Verdict(msgspec.Struct, frozen=True):
    """How something measured compares with its budget."""

    text: str
    kept: bool


class Part(msgspec.Struct, frozen=True):
    """One store: how to get at it, how much is done, and what it may cost."""

    open: Callable[[AsyncExitStack], Awaitable[Ways]]
    scale: Scale
    judge_hop: Callable[[Figures], Verdict]
    requests: Mapping[str, int] | None = None
    """The most that each call may send; None where there is no server."""


async def open_sqlite(stack: AsyncExitStack) -> Ways:
    """Make a file and open it twice."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bench.db"
    url = f"sqlite:///{path}"
    store = await open_store(url)
    stack.push_async_callback(store.close)
    bare = BareSqlite(path)
    stack.callback(bare.close)
    return Ways(url, bare, Ours(store))


async def open_postgres(stack: AsyncExitStack) -> Ways:
    """Start a server and connect to it twice."""
    url = stack.enter_context(PostgresServer()).create_database("bench")
    store = await open_store(url)
    stack.push_async_callback(store.close)
    bare = await BarePostgres.connect(url)
    stack.push_async_callback(bare.close)
    return Ways(url, bare, Ours(store))


async def open_s3(stack: AsyncExitStack) -> Ways:
    """Start a server and open a bucket twice."""
    server = stack.enter_context(SeaweedServer())
    server.create_bucket("bench")
    url = server.url("bench")
    store = await open_store(url)
    stack.push_async_callback(store.close)
    place = parse_url(url, {})
    assert isinstance(place, ObjectsUrl)
    bare = BareObjects(place, bare_etags=bool(store.traits["bare_etags"]))
    stack.callback(bare.close)
    return Ways(url, bare, Ours(store))


def judge_extra(figures: Figures) -> Verdict:
    """Judge what a hop to a thread adds."""
    extra = figures.ours - figures.bare
    return Verdict(f"+{extra:.0f}µs a hop, at most +150µs", extra <= 150)


def judge_ratio(figures: Figures, most: float = 2.5) -> Verdict:
    """Judge how many times as much it is."""
    ratio = round(figures.ratio, 2)
    return Verdict(f"{ratio:.2f}x, at most {most:.2f}x", ratio <= most)


_ONE_EACH = dict.fromkeys(("put", "get", "write(100)", "heads(100)", "scan(100)", "append(100)"), 1)

PARTS = {
    "sqlite": Part(open_sqlite, Scale(rounds=81, hops=60, batches=6), judge_extra),
    "postgres": Part(
        open_postgres, Scale(rounds=61, hops=40, batches=4), judge_ratio, requests=_ONE_EACH
    ),
    "s3": Part(
        open_s3,
        Scale(rounds=25, hops=20, batches=2),
        judge_ratio,
        requests=_ONE_EACH | {"write(100)": 100, "scan(100)": 101},
    ),
}


async def run(name: str) -> bool:
    """Measure one store and print its table; say whether it is within its budget."""
    part = PARTS[name]
    show_progress(f"{name}: starting")
    async with AsyncExitStack() as stack:
        ways = await part.open(stack)
        figures = await measure(name, ways.bare, ways.ours, part.scale)
        counts = {} if part.requests is None else await tally(ways.url)
    show_progress("")
    print(f"{name}: CPU time, median of {part.scale.rounds} rounds\n")
    print(f"{'':24}{'bare':>10}{'ours':>10}{'':4}budget")
    kept = True
    for label, found, verdict in _judge(part, figures):
        kept &= verdict.kept
        mark = "" if verdict.kept else "  OVER"
        print(f"{label:24}{found.bare:8.1f}µs{found.ours:8.1f}µs    {verdict.text}{mark}")
    for call, count in counts.items():
        most = (part.requests or {})[call]
        kept &= count <= most
        mark = "" if count <= most else "  OVER"
        print(f"{call + ', requests':24}{'':10}{count:10}    at most {most}{mark}")
    print()
    return kept


def _judge(part: Part, figures: Mapping[str, Figures]) -> Iterator[tuple[str, Figures, Verdict]]:
    for name in ("put", "get"):
        yield name, figures[name], part.judge_hop(figures[name])
    for name in ("create", "replace"):
        yield f"{name}, a row of {BATCH}", figures[name], judge_ratio(figures[name], _MOST_A_ROW)


def main() -> int:
    """Measure, and judge by the budgets."""
    parser = argparse.ArgumentParser(description="CPU time of stores over their bare drivers")
    parser.add_argument("--only", choices=PARTS, help="measure this store alone")
    only = parser.parse_args().only
    # Each in a loop of its own, so that nothing of one is left in the next.
    kept = [asyncio.run(run(name)) for name in ([only] if only else PARTS)]
    print("within budget" if all(kept) else "OVER BUDGET")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
