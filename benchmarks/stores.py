"""The cost of a store over its bare driver, as ratios within one run.

Ours is what a user gets from `open_store`, on all cores. Bare is the same statement or request: on
SQLite with prepared parameters, on PostgreSQL with lists that psycopg turns into arrays, on S3 with
bodies encoded by msgspec.
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


class Budget(msgspec.Struct, frozen=True):
    """A budget, and whether a figure is within it."""

    text: str
    is_within: bool


class Part(msgspec.Struct, frozen=True):
    """One store: how to open it, how much to measure, and its budget."""

    open: Callable[[AsyncExitStack], Awaitable[Ways]]
    scale: Scale
    check_hop: Callable[[Figures], Budget]
    requests: Mapping[str, int] | None = None
    """The most requests that each call may send; None where there is no server."""


async def open_sqlite(stack: AsyncExitStack) -> Ways:
    """Create a file and open it twice."""
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
    location = parse_url(url, {})
    assert isinstance(location, ObjectsUrl)
    bare = BareObjects(location, bare_etags=bool(store.traits["bare_etags"]))
    stack.callback(bare.close)
    return Ways(url, bare, Ours(store))


def check_extra(figures: Figures) -> Budget:
    """Check what a hop to a thread adds."""
    extra = figures.ours - figures.bare
    return Budget(f"+{extra:.0f}µs a hop, at most +150µs", extra <= 150)


def check_ratio(figures: Figures, most: float = 2.5) -> Budget:
    """Check the ratio of ours over bare."""
    ratio = round(figures.ratio, 2)
    return Budget(f"{ratio:.2f}x, at most {most:.2f}x", ratio <= most)


_ONE_EACH = dict.fromkeys(("put", "get", "write(100)", "heads(100)", "scan(100)", "append(100)"), 1)

PARTS = {
    "sqlite": Part(open_sqlite, Scale(rounds=81, hops=60, batches=6), check_extra),
    "postgres": Part(
        open_postgres, Scale(rounds=61, hops=40, batches=4), check_ratio, requests=_ONE_EACH
    ),
    "s3": Part(
        open_s3,
        Scale(rounds=25, hops=20, batches=2),
        check_ratio,
        requests=_ONE_EACH | {"write(100)": 100, "scan(100)": 101},
    ),
}


async def run(name: str) -> bool:
    """Measure one store and print its table; return whether it is within its budget."""
    part = PARTS[name]
    show_progress(f"{name}: starting")
    async with AsyncExitStack() as stack:
        ways = await part.open(stack)
        figures = await measure(name, ways.bare, ways.ours, part.scale)
        counts = {} if part.requests is None else await tally(ways.url)
    show_progress("")
    print(f"{name}: CPU time, median of {part.scale.rounds} rounds\n")
    print(f"{'':24}{'bare':>10}{'ours':>10}{'':4}budget")
    is_within = True
    for label, found, budget in _check(part, figures):
        is_within &= budget.is_within
        mark = "" if budget.is_within else "  OVER"
        print(f"{label:24}{found.bare:8.1f}µs{found.ours:8.1f}µs    {budget.text}{mark}")
    for call, count in counts.items():
        most = (part.requests or {})[call]
        is_within &= count <= most
        mark = "" if count <= most else "  OVER"
        print(f"{call + ', requests':24}{'':10}{count:10}    at most {most}{mark}")
    print()
    return is_within


def _check(part: Part, figures: Mapping[str, Figures]) -> Iterator[tuple[str, Figures, Budget]]:
    for name in ("put", "get"):
        yield name, figures[name], part.check_hop(figures[name])
    for name in ("create", "replace"):
        yield f"{name}, a row of {BATCH}", figures[name], check_ratio(figures[name], _MOST_A_ROW)


def main() -> int:
    """Measure, and compare with the budgets."""
    parser = argparse.ArgumentParser(description="CPU time of stores over their bare drivers")
    parser.add_argument("--only", choices=PARTS, help="measure this store alone")
    only = parser.parse_args().only
    # Each in its own loop, so that nothing of one is left in the next.
    results = [asyncio.run(run(name)) for name in ([only] if only else PARTS)]
    print("within budget" if all(results) else "OVER BUDGET")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
