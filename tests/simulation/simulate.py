"""Run fleets through stormy hours with fresh seeds, and print how to repeat a failure.

python tests/simulation/simulate.py --hours 100 --jobs 2      (make simulate HOURS=100 JOBS=2)
python tests/simulation/simulate.py queue --hours 300         workers on a queue (make prove-queue)
python tests/simulation/simulate.py queue-postgres --hours 80 likewise, on PostgreSQL
python tests/simulation/simulate.py queue-pages --hours 150   likewise, on an object store
python tests/simulation/simulate.py queue-places --hours 50   with groups, keys and priorities
python tests/simulation/simulate.py queue-places-postgres     likewise, on PostgreSQL
python tests/simulation/simulate.py queue-places-pages        with keys and priorities, on objects
python tests/simulation/simulate.py schedule --hours 100      schedulers, likewise (WHAT=schedule)
python tests/simulation/simulate.py records --hours 300       records that expire (make prove-ttl)
python tests/simulation/simulate.py stories --hours 200       every story, one after the other
python tests/simulation/simulate.py queue --seed 123          one world, again
"""

import argparse
import logging
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import job_stories  # noqa: E402 - found by the line above
import outcome_stories  # noqa: E402 - likewise
import page_place_stories  # noqa: E402 - likewise
import pages_queue_stories  # noqa: E402 - likewise
import place_stories  # noqa: E402 - likewise
import postgres_queue_stories  # noqa: E402 - likewise
import proofs  # noqa: E402 - likewise
import queue_stories  # noqa: E402 - likewise
import record_stories  # noqa: E402 - likewise
import schedule_stories  # noqa: E402 - likewise
import task_stories  # noqa: E402 - likewise
from fleets import run_neighbours, run_storm, run_suspends  # noqa: E402 - likewise
from servers import PostgresServer  # noqa: E402 - likewise

from jobsync.testing import run_story  # noqa: E402
from jobsync.testing.stories import Report, Story, WorldRunner, run_campaign  # noqa: E402

SERVER = "JOBSYNC_TEST_POSTGRES"
"""Where the processes of a campaign find their server."""


def vary(seed: int) -> int:
    """Return the seed of a world in which all machines differ, for every second one."""
    return -abs(seed) if seed % 2 else seed


def run_election_world(seed: int) -> Report:
    """Run one fleet through a storm and check it."""
    logging.disable(logging.CRITICAL)
    # In every fourth world clocks stand still at times, which voids the trust assumption.
    # In every eighth, workers share a machine.
    kind = abs(seed) % 8
    run = run_suspends if kind % 4 == 3 else run_neighbours if kind == 5 else run_storm
    fleet = run(vary(seed))
    hours = fleet.world.loop.time() / 3600
    return Report(seed, hours, fleet.faults, fleet.all_violations, fleet.world.fingerprint)


def run_storm_world(what: str, seed: int) -> Report:
    """Run the processes of a storm through it, and check the history."""
    logging.disable(logging.CRITICAL)
    stormy, stormy_with_suspends = STORMS[what]
    return run_story(stormy_with_suspends if abs(seed) % 4 == 3 else stormy, vary(seed))


def run_any_story(seed: int) -> Report:
    """Run one of all stories, each in turn, and in every other turn where all machines differ.

    Records expire by clocks that agree, so in their stories machines never differ. A story counts
    as an hour at most: some are about years.
    """
    logging.disable(logging.CRITICAL)
    turn, position = divmod(abs(seed), len(STORIES))
    story = STORIES[position]
    differs = turn % 2 and story not in record_stories.STORIES
    report = run_story(story, -abs(seed) if differs else abs(seed))
    return msgspec.structs.replace(report, seed=seed, hours=min(report.hours, 1.0))


def run_record_world(seed: int) -> Report:
    """Run processes with records through a storm and check the records and their indexes."""
    logging.disable(logging.CRITICAL)
    # In every fourth world clocks stand still at times, and in another an index is added.
    stories = (
        record_stories.stormy,
        record_stories.adds_partitions_in_trouble,
        record_stories.stormy,
        record_stories.stormy_with_suspends,
    )
    return run_story(stories[abs(seed) % 4], seed)


STORMS: dict[str, Sequence[Story]] = {
    "queue": (queue_stories.stormy, queue_stories.stormy_with_suspends),
    "queue-postgres": postgres_queue_stories.STORMS,
    "queue-places": place_stories.STORMS,
    "queue-places-postgres": postgres_queue_stories.PLACE_STORMS,
    "queue-places-pages": page_place_stories.STORMS,
    "queue-pages": pages_queue_stories.STORMS,
    "queue-outcomes": outcome_stories.STORMS,
    "queue-outcomes-postgres": postgres_queue_stories.OUTCOME_STORMS,
    "schedule": (schedule_stories.stormy, schedule_stories.stormy_with_suspends),
}
"""A storm in which clocks keep running, and one in which they stand still at times."""
STORIES: Sequence[Story] = (
    *queue_stories.STORIES,
    *pages_queue_stories.STORIES,
    *outcome_stories.STORIES,
    *place_stories.STORIES,
    *page_place_stories.STORIES,
    *task_stories.STORIES,
    *job_stories.STORIES,
    *schedule_stories.STORIES,
    *record_stories.STORIES,
)
RUNNERS: dict[str, WorldRunner] = {
    "stories": run_any_story,
    "elections": run_election_world,
    "records": run_record_world,
    **{name: partial(run_storm_world, name) for name in STORMS},
}


def main() -> int:
    """Run a campaign, or one world."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=RUNNERS, nargs="?", default="elections")
    options.add_argument("--hours", type=float, default=10)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--seed", type=int)
    arguments = options.parse_args()
    if arguments.seed is not None:
        report = RUNNERS[arguments.what](arguments.seed)
        found = [str(each) for each in report.violations]
        print(*found or ["no violation"], report.fingerprint, sep="\n")
        return 1 if report.violations else 0
    return campaign(arguments.what, arguments.hours, arguments.jobs)


@contextmanager
def serve(what: str) -> Iterator[None]:
    """Start the server that the worlds of all processes share, if they need one."""
    if not what.endswith("-postgres"):
        yield
        return
    # One of our own: processes that are terminated remove nothing from it.
    os.environ.pop(SERVER, None)
    with PostgresServer() as server:
        os.environ[SERVER] = server.url
        yield


def campaign(what: str, hours: float, jobs: int) -> int:
    """Run fresh seeds until that many simulated hours have passed."""
    first_seed = int(time.time())
    with serve(what):
        totals = run_worlds(what, first_seed, hours, jobs)
    if totals is None:
        return 1
    simulated, faults, worlds = totals
    # CPU time, with imports, checks and the server: independent of what else the machine does.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rate = round(simulated / (used.ru_utime + used.ru_stime), 2)
    proofs.record(
        what,
        first_seed=first_seed,
        worlds=worlds,
        hours=round(simulated, 1),
        faults=faults,
        violations=0,
        hours_per_cpu_second=rate,
    )
    print(f"\n{simulated:.1f} simulated hours, {worlds} worlds, {faults:,} faults: no violation")
    print(f"{rate:g} simulated hours a CPU second")
    return 0


def run_worlds(
    what: str, first_seed: int, hours: float, jobs: int
) -> tuple[float, int, int] | None:
    """Run worlds and print the progress; return hours, faults and worlds, or None if one fails."""
    started = time.monotonic()
    simulated, faults, worlds = 0.0, 0, 0
    for report in run_campaign(RUNNERS[what], first_seed=first_seed, hours=hours, jobs=jobs):
        simulated, faults, worlds = simulated + report.hours, faults + report.faults, worlds + 1
        if report.violations:
            print(f"\nseed {report.seed}: {report.violations[0]}")
            print(f"repeat it: python tests/simulation/simulate.py {what} --seed {report.seed}")
            return None
        rate = simulated / (time.monotonic() - started)
        line = f"\r{simulated:.0f} of {hours:g} h, {rate:.1f} h/s, {faults:,} faults, no violation "
        print(line, end="" if sys.stdout.isatty() else "\n" if worlds % 20 == 0 else "", flush=True)
    return simulated, faults, worlds


if __name__ == "__main__":
    sys.exit(main())
