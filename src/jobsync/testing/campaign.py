"""Many worlds: a story told with seed after seed, on several cores, until so many hours passed."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import TypeAlias

from jobsync.testing.stories import Report

__all__ = ["Report", "Teller", "run_campaign"]

Teller: TypeAlias = Callable[[int], Report]
"""Lets one world happen. Something of a module, so that another process can find it."""


def run_campaign(teller: Teller, *, first_seed: int, hours: float, jobs: int) -> Iterator[Report]:
    """Tell a story with one seed after the other; end after so many simulated hours."""
    told = 0.0
    seeds = iter(range(first_seed, first_seed + 1_000_000_000))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        under_way = [pool.apply_async(teller, (next(seeds),)) for _ in range(2 * jobs)]
        while told < hours:
            # In order, so that a campaign of one first seed is the same each time.
            report = under_way.pop(0).get()
            under_way.append(pool.apply_async(teller, (next(seeds),)))
            told += report.hours
            yield report
        pool.terminate()
