"""What `insert_many` costs over a bare `unnest` insert on PostgreSQL, as a ratio in one run.

All insert the same columns into the same table, a batch a statement, and take turns. Ours
starts from records: it checks every one by a schema, draws ids, dates and nonces, writes
JSON, finds ids that are taken, and gives back documents. The bare inserts check nothing and
give nothing back:

- from records: the same columns are made of the same records, JSON included, and given to
  psycopg as lists, as anybody would by hand.
- lists: the columns are there already, as lists. Ours is judged by this one.
- text: the columns are there already, as the very text that goes to the server. A bound
  that nobody reaches who starts from records: it leaves Python nothing to do.

Wall time, because the server's part counts: the rate is what a user sees.
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


def record(number: int) -> dict[str, Any]:
    """Give a record such as people have."""
    return {
        "user_id": f"user-{number}",
        "expires_at": 1_700_000_000 + number,
        "tags": ["a", "b"],
        "device": {"os": "linux", "version": 6.1},
    }


def columns(records: Sequence[dict[str, Any]], place: str) -> tuple[list[Any], ...]:
    """Make the columns of records, as they stand in the table."""
    ids = Components.system().ids
    count = len(records)
    names = ids.records(count)
    values = [
        {"id": name, **given, "active": True, "_created_at": 1.5e9, "_updated_at": 1.5e9}
        for given, name in zip(records, names, strict=True)
    ]
    texts = [msgspec.json.encode(value).decode() for value in values]
    keys = [f"data/{place}/{name}" for name in names]
    return (keys, texts, [1] * count, [0] * count, [1] * count, ids.nonces(count))


async def measure(spent: Spent, work: Callable[[], Awaitable[object]]) -> None:
    """Time one round."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    spent.wall.append(time.perf_counter() - wall)
    spent.cpu.append(time.process_time() - cpu)


async def run(count: int, rounds: int) -> float:
    """Take turns; print the figures, and give the ratio of the rates."""
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
                given = [record(n) for n in range(count)]
                as_lists = columns(given, "lists")
                as_texts = tuple(map(_as_text, columns(given, "texts")))
                work: list[tuple[Spent, Any]] = [
                    (made, partial(make_and_insert, given)),
                    (lists, partial(connection.execute, INSERT, as_lists)),
                    (texts, partial(connection.execute, INSERT, as_texts)),
                    (ours, partial(sessions.insert_many, given)),
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
    """Give our rate as a share of another's: the median of the rounds' own."""
    return statistics.median(a / b for a, b in zip(other.wall[1:], ours.wall[1:], strict=True))


def _as_text(column: list[Any]) -> str:
    """Give an array as SQL writes it: JSON's form but for the brackets."""
    return f"{{{msgspec.json.encode(column)[1:-1].decode()}}}"


def main() -> int:
    """Measure, and judge by the budget."""
    parser = argparse.ArgumentParser(description="insert_many over a bare unnest insert")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    kept = asyncio.run(run(arguments.records, arguments.rounds)) >= LEAST
    print("within budget" if kept else "OVER BUDGET")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
