"""What priorities, groups and keys cost: pushing and draining with them, over plain messages.

All kinds take turns in one process on one database, and a ratio is the median of the rounds'
ratios, so that other load on the machine affects all alike.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from benchmarks.queues import on_postgres, on_sqlite, opened, payload
from benchmarks.queues_bare import rate
from benchmarks.table import Row, print_rows, show_progress

from jobsync import Document

ROUNDS = 5
LEAST = 0.5
_BATCH = 1_000


class Kind(msgspec.Struct, frozen=True):
    """Messages that are placed in one way."""

    label: str
    options: dict[str, Any] = {}
    """Of the queue."""
    place: Callable[[int], dict[str, Any]] = lambda _: {}
    """Returns the options of a message, by the number of its batch."""


PLAIN = Kind("plain")
PLACED = (
    Kind("priorities", {"order": "priority"}, lambda batch: {"priority": batch % 10}),
    Kind("groups of 5", {}, lambda _: {"group": lambda each: f"customer-{each['number'] // 5}"}),
    Kind("keys", {}, lambda _: {"key": lambda each: f"mail-{each['number']}"}),
)


class Rates(msgspec.Struct, frozen=True):
    """Messages a second."""

    push: float
    drain: float

    @property
    def both(self) -> float:
        """Pushed and drained, one after the other."""
        return 1 / (1 / self.push + 1 / self.drain)


async def measure(url: str, kind: Kind, count: int) -> Rates:
    """Push messages in batches, and handle them, ten at once."""

    async def handle(_: Document) -> None:
        pass

    messages = [{**payload(number), "number": number} for number in range(count)]
    async with opened(url, concurrency=10, **kind.options) as queue:
        begun = time.perf_counter()
        for start in range(0, count, _BATCH):
            await queue.enqueue_many(
                messages[start : start + _BATCH], **kind.place(start // _BATCH)
            )
        push = rate(count, begun)
        begun = time.perf_counter()
        queue.handler(handle)
        while queue.stats()["completed"] < count:  # noqa: ASYNC110 - listening would cost more
            await asyncio.sleep(0.002)
        drain = rate(count, begun)
    return Rates(push, drain)


async def compare(name: str, count: int) -> list[Row]:
    """Measure all kinds on one database, in turns."""
    rounds: list[dict[str, Rates]] = []
    async with on_postgres() if name == "postgres" else on_sqlite() as bench:
        for number in range(ROUNDS + 1):
            show_progress(f"{name}: round {number} of {ROUNDS}")
            rounds.append(
                {kind.label: await measure(bench.url, kind, count) for kind in (PLAIN, *PLACED)}
            )
    # The first round warms up.
    return [_judge(name, kind.label, rounds[1:]) for kind in PLACED]


def _judge(name: str, label: str, rounds: list[dict[str, Rates]]) -> Row:
    def find_ratio(read: Callable[[Rates], float]) -> float:
        return statistics.median(read(each[label]) / read(each[PLAIN.label]) for each in rounds)

    both = find_ratio(lambda each: each.both)
    push, drain = find_ratio(lambda each: each.push), find_ratio(lambda each: each.drain)
    rates = statistics.median(each[label].both for each in rounds)
    return Row(
        label=f"{name}: {label}",
        text=f"{rates:,.0f} a second, {both:.2f}x of plain (push {push:.2f}x, drain {drain:.2f}x)",
        budget=f"at least {LEAST:.2f}x",
        is_within=both >= LEAST,
        value=rates,
        bare=rates / both,
        better="higher",
    )


def main() -> int:
    """Measure, and compare with the budget."""
    parser = argparse.ArgumentParser(description="placed messages over plain ones")
    parser.add_argument("--only", choices=("sqlite", "postgres"), help="this database alone")
    parser.add_argument("--messages", type=int, default=5000, help="in a round")
    options = parser.parse_args()
    names = [options.only] if options.only else ["sqlite", "postgres"]

    def list_rows() -> Iterator[Row]:
        for name in names:
            yield from asyncio.run(compare(name, options.messages))

    return 0 if print_rows(list_rows(), as_json=False) else 1


if __name__ == "__main__":
    sys.exit(main())
