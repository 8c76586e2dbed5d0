"""CPU time of the same work done in two ways, side by side.

CPU time, not wall time: machines are shared, and the time of a disk's sync is not ours. Both ways
take turns in many short rounds, and a ratio is the median of the rounds' ratios, so that other load
on the machine affects both alike.
"""

import statistics
import time
from collections.abc import Awaitable, Callable

import msgspec
from benchmarks.table import show_progress
from benchmarks.work import BATCH, Work

__all__ = ["Figures", "Scale", "measure"]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done."""

    rounds: int
    hops: int
    """Single operations in a round."""
    batches: int
    """Batches of a hundred rows in a round."""


class Figures(msgspec.Struct, frozen=True):
    """CPU microseconds of one operation, or of one row of a batch."""

    bare: float
    ours: float
    ratio: float


async def measure(label: str, bare: Work, ours: Work, scale: Scale) -> dict[str, Figures]:
    """Return the median figures of each kind of work."""
    hops, batches = scale.hops, scale.batches
    plan = {"put": hops, "get": hops, "create": batches, "replace": batches}
    spent: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in plan}
    # One round more: the first warms up.
    for number in range(scale.rounds + 1):
        show_progress(f"{label}: round {number} of {scale.rounds}")
        for name, count in plan.items():
            for way in (0, 1) if number % 2 else (1, 0):
                work = getattr((bare, ours)[way], name)
                spent[name][way].append(await _cpu(work, count))
    rows = {"put": hops, "get": hops, "create": batches * BATCH, "replace": batches * BATCH}
    return {name: _summarise(*ways, rows[name]) for name, ways in spent.items()}


def _summarise(bare: list[float], ours: list[float], rows: int) -> Figures:
    ratios = [our / their for their, our in zip(bare[1:], ours[1:], strict=True)]
    a, b = (statistics.median(way[1:]) / rows * 1e6 for way in (bare, ours))
    return Figures(a, b, statistics.median(ratios))


async def _cpu(work: Callable[[int], Awaitable[None]], count: int) -> float:
    begun = time.process_time()
    await work(count)
    return time.process_time() - begun
