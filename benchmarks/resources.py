"""The cost of `insert_many` over a bare `unnest` insert on PostgreSQL, as a ratio in one run.

All insert the same columns into the same table, one batch a statement, and take turns. Ours starts
from records: it validates each by a schema, draws ids, dates and nonces, writes JSON, finds ids
that exist, and returns documents. The bare inserts check nothing and return nothing:

- from records: builds the same columns from the same records, JSON included, and passes lists to
  psycopg, as hand-written code would.
- lists: the columns exist already, as lists. The budget is about this one.
- text: the columns exist already, as the text that goes to the server. Code that starts from
  records cannot reach this bound: it leaves Python nothing to do.

Wall time, because the server counts too: the rate is what a user sees.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from psycopg import AsyncConnection

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks.table import show_progress
from servers import PostgresServer

from jobsync import Components, Database

LEAST = 0.5
ATTRIBUTES = {
    "user_id": "string|required",
    "expires_at": "number|required",
    "active": "boolean|default:true",
    "tags": "array|items:string",
    "device": {"os": "string|required", "version": "number"},
}
INSERT = """
INSERT INTO jobsync_record (key, value, seq, epoch, format, trail)
SELECT * FROM unnest(
  %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::integer[], %s::text[]
)
"""


class Spent(msgspec.Struct):
    """Seconds that one way took, round by round."""

    name: str
    wall: list[float] = []
    cpu: list[float] = []


def make_record(number: int) -> dict[str, Any]:
    """Return a typical record."""
    return {
        "user_id": f"user-{number}",
        "expires_at": 1_700_000_000 + number,
        "tags": ["a", "b"],
        "device": {"os": "linux", "version": 6.1},
    }


def columns(records: Sequence[dict[str, Any]], resource: str) -> tuple[list[Any], ...]:
    """Return the columns of records, as they are stored."""
    ids = Components.system().ids
    count = len(records)
    names = ids.records(count)
    values = [
        {"id": name, **record, "active": True, "_created_at": 1.5e9, "_updated_at": 1.5e9}
        for record, name in zip(records, names, strict=True)
    ]
    texts = [msgspec.json.encode(value).decode() for value in values]
    keys = [f"data/{resource}/{name}" for name in names]
    return (keys, texts, [1] * count, [0] * count, [1] * count, ids.nonces(count))


async def measure(spent: Spent, work: Callable[[], Awaitable[object]]) -> None:
    """Time one round."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    spent.wall.append(time.perf_counter() - wall)
    spent.cpu.append(time.process_time() - cpu)


async def run(count: int, rounds: int) -> float:
    """Measure in turns; print the figures, and return the ratio of the rates."""
    made, lists, texts = Spent("bare, from records"), Spent("bare, lists"), Spent("bare, text")
    ours = Spent("insert_many")
    with PostgresServer() as server:
        url = server.create_database("bench")
        async with (
            Database(url) as database,
            await AsyncConnection.connect(url, autocommit=True) as connection,
        ):
            sessions = await database.create_resource("sessions", ATTRIBUTES)

            async def make_and_insert(records: Sequence[dict[str, Any]]) -> None:
                await connection.execute(INSERT, columns(records, "made"))

            # One round more: the first warms up.
            for number in range(rounds + 1):
                show_progress(f"round {number} of {rounds}")
                records = [make_record(n) for n in range(count)]
                as_lists = columns(records, "lists")
                as_texts = tuple(map(_as_text, columns(records, "texts")))
                work: list[tuple[Spent, Any]] = [
                    (made, partial(make_and_insert, records)),
                    (lists, partial(connection.execute, INSERT, as_lists)),
                    (texts, partial(connection.execute, INSERT, as_texts)),
                    (ours, partial(sessions.insert_many, records)),
                ]
                for turn in range(len(work)):
                    await measure(*work[(number + turn) % len(work)])
    show_progress("")
    print(f"insert_many of {count:,} on PostgreSQL, median of {rounds} rounds\n")
    print(f"{'':20}{'records/s':>12}{'CPU µs a record':>18}{'ours is':>10}")
    for spent in (ours, made, lists, texts):
        wall, cpu = statistics.median(spent.wall[1:]), statistics.median(spent.cpu[1:])
        share = _compare(spent, ours)
        print(f"{spent.name:20}{count / wall:12,.0f}{cpu / count * 1e6:18.1f}{share:10.2f}")
    ratio = _compare(lists, ours)
    print(f"\n{ratio:.2f} of the bare rate with lists, at least {LEAST:.2f}")
    return ratio


def _compare(other: Spent, ours: Spent) -> float:
    """Return our rate as a share of another's: the median of the rounds' shares."""
    return statistics.median(a / b for a, b in zip(other.wall[1:], ours.wall[1:], strict=True))


def _as_text(column: list[Any]) -> str:
    """Return an array as SQL writes it: JSON with other brackets."""
    return f"{{{msgspec.json.encode(column)[1:-1].decode()}}}"


def main() -> int:
    """Measure, and compare with the budget."""
    parser = argparse.ArgumentParser(description="insert_many over a bare unnest insert")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    is_within = asyncio.run(run(arguments.records, arguments.rounds)) >= LEAST
    print("within budget" if is_within else "OVER BUDGET")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
