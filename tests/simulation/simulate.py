"""Runs fleets through stormy hours with fresh seeds; shows progress; says how to repeat a failure.

python tests/simulation/simulate.py --hours 100 --jobs 2      (make simulate HOURS=100 JOBS=2)
python tests/simulation/simulate.py queue --hours 300         workers on a queue (make prove-queue)
python tests/simulation/simulate.py queue --seed 123          one world, again
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import queue_stories  # noqa: E402 - found by the line above
from fleets import run_storm, run_suspends  # noqa: E402 - likewise

from jobsync.testing import run_story  # noqa: E402
from jobsync.testing.stories import Report, WorldRunner, run_campaign  # noqa: E402


def tell_of_elections(seed: int) -> Report:
    """Let one fleet live through a storm, and judge it."""
    # What it logs is what is expected in a storm.
    logging.disable(logging.CRITICAL)
    # In every fourth world clocks stand still at times, which no session survives in trust.
    fleet = run_suspends(seed) if seed % 4 == 3 else run_storm(seed)
    hours = fleet.world.loop.time() / 3600
    return Report(seed, hours, fleet.faults, fleet.verdict, fleet.world.fingerprint)


def tell_of_a_queue(seed: int) -> Report:
    """Let workers and producers live through a storm, and judge what became of the messages."""
    logging.disable(logging.CRITICAL)
    return run_story(
        queue_stories.stormy_with_suspends if seed % 4 == 3 else queue_stories.stormy, seed
    )


TELLERS: dict[str, WorldRunner] = {"elections": tell_of_elections, "queue": tell_of_a_queue}


def main() -> int:
    """Run a campaign, or one world."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=TELLERS, nargs="?", default="elections")
    options.add_argument("--hours", type=float, default=10)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--seed", type=int)
    given = options.parse_args()
    if given.seed is not None:
        report = TELLERS[given.what](given.seed)
        found = [str(each) for each in report.violations]
        print(*found or ["no violation"], report.fingerprint, sep="\n")
        return 1 if report.violations else 0
    return campaign(given.what, given.hours, given.jobs)


def campaign(what: str, hours: float, jobs: int) -> int:
    """Run fresh seeds until so many simulated hours have passed."""
    first_seed = int(time.time())
    begun = time.monotonic()
    told, faults, worlds = 0.0, 0, 0
    for report in run_campaign(TELLERS[what], first_seed=first_seed, hours=hours, jobs=jobs):
        told, faults, worlds = told + report.hours, faults + report.faults, worlds + 1
        if report.violations:
            print(f"\nseed {report.seed}: {report.violations[0]}")
            print(f"repeat it: python tests/simulation/simulate.py {what} --seed {report.seed}")
            return 1
        rate = told / (time.monotonic() - begun)
        line = f"\r{told:.0f} of {hours:g} h, {rate:.1f} h/s, {faults:,} faults, no violation "
        print(line, end="" if sys.stdout.isatty() else "\n" if worlds % 20 == 0 else "", flush=True)
    # By CPU time, loading and judging included: what else the machine does has no part in it.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rate = round(told / (used.ru_utime + used.ru_stime), 2)
    keep(
        what,
        first_seed=first_seed,
        worlds=worlds,
        hours=round(told, 1),
        faults=faults,
        violations=0,
        hours_per_cpu_second=rate,
    )
    print(f"\n{told:.1f} simulated hours, {worlds} worlds, {faults:,} faults: no violation")
    print(f"{rate:g} simulated hours a CPU second")
    return 0


def keep(what: str, **figures: float) -> None:
    """Add the figures to the proofs, with the commit that they were shown for."""
    line = {"at": int(time.time()), "commit": describe_commit(), "what": what, **figures}
    with (ROOT / "proof" / "runs.jsonl").open("a", encoding="utf-8") as runs:
        runs.write(json.dumps(line) + "\n")


def describe_commit() -> str:
    """Name the commit that is at work; what runs have left in the proof makes it no other."""

    def ask(*question: str) -> str:
        told = subprocess.run(
            ["git", *question], capture_output=True, text=True, check=True, cwd=ROOT
        )
        return told.stdout

    changed = ask("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)proof")
    return ask("describe", "--always").strip() + ("-dirty" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
