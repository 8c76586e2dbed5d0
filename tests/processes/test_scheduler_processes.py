"""Real processes with the same scheduled jobs, that are killed and frozen; some have wrong clocks.

Each instant must be in the history once: as a run, or in a gap with its reason.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scheduler_processes import (
    SchedulerProcess,
    SchedulerProcesses,
    check_history,
    check_runs,
)
from scheduler_worker import JOBS
from servers import Locate
from waiting import now, until

SEED = 20261116
TIMING = {"heartbeat_interval": 0.5, "worker_timeout": 3.0, "grace": 5.0}
SKEWS = (0.0, 90.0, -90.0, 0.0, 0.0)
TRUSTED = 30.0
"""Seconds by which a clock may be wrong that is not known to be."""
STRIKE_INTERVAL = 2.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on all stores at full scale, and on two that judge the time differently otherwise."""
    if "kind" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--scale") == "full"
        metafunc.parametrize(
            "kind", ["sqlite", "postgres", "s3"] if is_full else ["postgres", "s3"]
        )


class Storm:
    """Strikes processes, by a seed, and counts the strikes. The one that fires is struck most."""

    def __init__(self, processes: SchedulerProcesses, seed: int) -> None:
        self.strikes = {"kill": 0, "freeze": 0}
        self._processes = processes
        self._dice = random.Random(seed)

    async def rage(self, is_over: Callable[[], bool]) -> None:
        """Strike until it is over; end with all processes there and running."""
        kinds = itertools.cycle(self.strikes)
        async with asyncio.TaskGroup() as group:
            while not is_over():
                await asyncio.sleep(STRIKE_INTERVAL)
                victims = [
                    worker
                    for worker in self._processes.running
                    if not worker.is_ending and worker.has_reported("joined")
                ]
                if len(victims) > 2:
                    kind, victim = next(kinds), self._choose(victims)
                    self.strikes[kind] += 1
                    group.create_task(self._strike(kind, victim))

    def _choose(self, victims: list[SchedulerProcess]) -> SchedulerProcess:
        begun = self._processes.facts("begun")
        if begun and self._dice.random() < 0.7:
            for victim in victims:
                if victim.name == begun[-1].who:
                    return victim
        return self._dice.choice(victims)

    async def _strike(self, kind: str, victim: SchedulerProcess) -> None:
        if kind == "kill":
            victim.kill()
            self._processes.add(victim.skew)
        else:
            victim.freeze()
            await asyncio.sleep(self._dice.uniform(0.5, 5))
            victim.thaw()


async def test_each_instant_fires_once_in_a_storm(
    kind: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Each second fires once or is in a gap with its reason; no policy of overlaps is broken.

    Five processes are killed and frozen. On a server two of them have clocks that are wrong by
    90 seconds; all processes on one file share the machine's clock.
    """
    seconds, seed = (120.0, int(time.time())) if full_scale else (8.0, SEED)
    skews = (0.0,) * 5 if kind == "sqlite" else SKEWS
    begun = now()
    async with SchedulerProcesses(locate(kind), tmp_path / "facts", **TIMING) as processes:
        await processes.start(skews)
        await until(lambda: processes.facts("begun"), "a job has run")
        storm = Storm(processes, seed)
        ends_at = now() + seconds
        proof.tell(f"{kind}: {seconds:g} s, seed {seed}")
        await storm.rage(lambda: now() >= ends_at)
        survivors = processes.alive
        await processes.reported("joined", survivors)
        calm = now()
        await until(
            lambda: {f["job"] for f in processes.facts("ended") if f.at > calm} == {*JOBS},
            "all jobs go on after the storm",
        )
        for worker in survivors:
            worker.stop()
        assert {await worker.ended() for worker in survivors} == {0}
        processes.check_exits()
        history = await processes.read_history()
        counts = check_history(history) + check_runs(processes, history)
        early = [f["instant"] - f["real_time"] for f in processes.facts("begun")]
        vetoed = {processes.find(f.who).skew for f in processes.facts("clock-vetoed")}
    assert max(early) < (TRUSTED if kind == "s3" else 0.05)
    assert 0.0 not in vetoed
    assert storm.strikes["kill"] > 0
    proof.record(
        "scheduler storm",
        url=kind,
        seed=seed,
        seconds=round(now() - begun),
        earliest_s=round(max(early), 3),
        **storm.strikes,
        **counts,
    )
