"""Run the tests against mutants of the source, and print which were not noticed.

python tests/mutants/run.py                       all that are stored (make mutants)
python tests/mutants/run.py queue stores          those of two packages (ARGS="queue stores")
python tests/mutants/run.py some-name --show      one, with what pytest printed
python tests/mutants/run.py --file new.toml       those of a file anywhere
python tests/mutants/run.py --at-least 90         fail if fewer than 90 % are caught
python tests/mutants/run.py --list                names, and the promises that they break

A mutant runs against the tests that run the mutated code, whatever they are named: the quickest
and most specific first, until one fails. Which these are is recorded beforehand, by running each
test file once (up to half an hour); later only test files that have changed are recorded. A test
that has caught a mutant in the last recorded run of all comes first.
"""

import argparse
import queue
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import proofs  # noqa: E402 - found by the line above
from block_recordings import (  # noqa: E402 - likewise
    Recordings,
    find_test_files,
    group_files,
)
from mutant_trials import Judge, Trial  # noqa: E402 - likewise
from mutant_workspace import (  # noqa: E402 - likewise
    TESTS_LEFT_OUT,
    PytestRun,
    Verdict,
    Workspace,
)
from source_blocks import SourceIndex  # noqa: E402 - likewise
from source_mutants import (  # noqa: E402 - likewise
    MutantGroup,
    OutdatedMutant,
    load_group,
    load_groups,
)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

RECORDINGS = ROOT / ".cache" / "mutants"
RECORDING_LIMIT = 1200.0
TAIL = 60
WHAT = "source mutants"
"""What its runs are named among the proofs."""


class Progress:
    """Prints a line for each thing that is done, with the time since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self._started

    def tell(self, text: str) -> None:
        """Print something that is done."""
        minutes, seconds = divmod(int(self.seconds), 60)
        print(f"{minutes:3}:{seconds:02}  {text}".rstrip(), flush=True)


class Runner:
    """Runs tests in several copies of the working tree at once.

    Args:
        workspaces: the copies. Each has one mutant at a time.
    """

    def __init__(self, workspaces: list[Workspace]) -> None:
        self._workspaces = workspaces
        self._free: queue.SimpleQueue[Workspace] = queue.SimpleQueue()
        for workspace in workspaces:
            self._free.put(workspace)

    def stop(self) -> None:
        """End all tests, and wait until they have ended."""
        for workspace in self._workspaces:
            workspace.stop()
        for workspace in [self._free.get() for _ in self._workspaces]:
            self._free.put(workspace)

    def run_all(
        self, items: Iterable[Item], run: Callable[[Workspace, Item], Answer]
    ) -> Iterator[tuple[Item, Answer]]:
        """Run something for each item in a free workspace; yield the answers as they come."""

        def run_one(item: Item) -> Answer:
            workspace = self._free.get()
            try:
                return run(workspace, item)
            finally:
                self._free.put(workspace)

        with ThreadPoolExecutor(len(self._workspaces)) as threads:
            futures = {threads.submit(run_one, item): item for item in items}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:  # an interrupt too
                threads.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise


@contextmanager
def open_runner(jobs: int, recorded: SourceIndex | None = None) -> Iterator[Runner]:
    """Copy the working tree for each job; remove the copies at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        place.chmod(0o755)  # a PostgreSQL server of the tests may run as another user
        runner = Runner([Workspace(place / str(number), recorded) for number in range(jobs)])
        try:
            yield runner
        finally:
            runner.stop()


def record_tests(
    recordings: Recordings, source: SourceIndex, files: list[str], jobs: int, progress: Progress
) -> None:
    """Run test files, and save which blocks of the source each of their tests runs."""

    def run(workspace: Workspace, group: list[str]) -> PytestRun:
        return workspace.run(group, RECORDING_LIMIT)

    progress.tell(f"recording which code the tests of {len(files)} files run")
    done_files = 0
    with open_runner(jobs, source) as runner:
        for group, done in runner.run_all(group_files(files), run):
            is_whole = done.exit_code in {0, 1}
            if is_whole:
                recordings.save(source, group, done.recorded)
            done_files += len(group)
            failed = [fact["test"] for fact in done.recorded if not fact["passed"]]
            progress.tell(
                f"{done_files} of {len(files)} files: {len(done.recorded)} tests in "
                f"{done.seconds:.0f} s, {Path(group[0]).parent if group[1:] else group[0]}"
            )
            if not is_whole:
                print(f"        ended with {done.exit_code}, and is left out\n{tail(done.output)}")
            for test in {*done.failed} & {*failed}:
                print(f"        FAILS without a mutant, and is left out: {test}")


def select(groups: list[MutantGroup], words: list[str]) -> list[Trial]:
    """Return the mutants that words name, by package or by name; all without words.

    Raises:
        ValueError: a word names nothing.
    """
    everything = [
        Trial(group=group.name, mutant=mutant) for group in groups for mutant in group.mutants
    ]
    known = {name for trial in everything for name in (trial.group, trial.mutant.name)}
    for word in words:
        if word not in known:
            raise ValueError(f"no package or mutant is named {word!r}. See --list.")
    return [
        trial
        for trial in everything
        if not words or trial.group in words or trial.mutant.name in words
    ]


def check_all_apply(trials: Iterable[Trial]) -> None:
    """Raise `OutdatedMutant` if a mutant does not fit the source any more."""
    for trial in trials:
        trial.mutant.mutate((ROOT / trial.mutant.file).read_text(encoding="utf-8"))


def print_scores(trials: list[Trial]) -> None:
    """Print what caught each mutant, those that survived, and a table of the packages."""
    for trial in trials:
        if trial.verdict == "caught":
            print(f"\ncaught: {trial.title}\n  {trial.by}")
    for trial in trials:
        if trial.verdict != "caught":
            print(f"\n{trial.verdict.upper()}: {trial.title} {trial.by}".rstrip())
            print(f"  {trial.mutant.breaks}")
    counts = count(trials)
    width = max(map(len, ["package", *counts]))
    print(f"\n{'package':{width}}  caught  survived  broken")
    for name, found in counts.items():
        print(f"{name:{width}}  {found['caught']:6}  {found['survived']:8}  {found['broken']:6}")


def count(trials: Iterable[Trial]) -> Mapping[str, dict[Verdict, int]]:
    """Return how many mutants of each package had which verdict."""
    counts: defaultdict[str, dict[Verdict, int]] = defaultdict(
        lambda: {"caught": 0, "survived": 0, "broken": 0}
    )
    for trial in trials:
        counts[trial.group][trial.verdict] += 1
    return counts


def record(trials: list[Trial], seconds: float) -> None:
    """Append the scores of a run of all mutants to the proofs."""
    by_verdict = defaultdict(list)
    for trial in trials:
        by_verdict[trial.verdict].append(trial)
    proofs.record(
        WHAT,
        seconds=round(seconds),
        packages=count(trials),
        survived=[trial.mutant.name for trial in by_verdict["survived"]],
        caught={trial.mutant.name: trial.by for trial in by_verdict["caught"]},
    )


def run_all(
    runner: Runner, trials: list[Trial], judge: Judge, progress: Progress, *, shows: bool
) -> None:
    """Run the tests of all mutants."""
    started = progress.seconds
    for number, (trial, _) in enumerate(runner.run_all(trials, judge.judge), start=1):
        left = (progress.seconds - started) / number * (len(trials) - number) / 60
        progress.tell(
            f"{number} of {len(trials)}, {left:.0f} min left: {trial.verdict} in "
            f"{trial.seconds:.0f} s: {trial.title} {trial.by}"
        )
        for test in trial.unreliable:
            print(f"        does not fail each time, or fails without it too: {test}")
        if trial.verdict == "broken" or (shows and trial.verdict == "caught"):
            print(tail(trial.output))


def tail(output: str) -> str:
    """Return the last lines of what pytest printed."""
    return "\n".join(f"    {line}" for line in output.splitlines()[-TAIL:])


def choose_tests(trials: list[Trial], progress: Progress, *, jobs: int, anew: bool) -> None:
    """Record what is missing, and give each mutant the tests that run its code."""
    source = SourceIndex(ROOT)
    recordings = Recordings(RECORDINGS, ROOT)
    files = [file for file in find_test_files(ROOT) if Path(file).name not in TESTS_LEFT_OUT]
    missing = recordings.find_missing(files)
    if anew or missing:
        record_tests(recordings, source, files if anew else missing, jobs, progress)
    if outdated := recordings.count_outdated(source):
        progress.tell(
            f"{outdated} test files were recorded with another source: tests of code that is new "
            "since are chosen by function or file. Use --record for exact ones."
        )
    caught = proofs.find_last(WHAT).get("caught", {})
    for trial in trials:
        names = source.find_names(trial.mutant)
        trial.tests = recordings.choose(source.find(trial.mutant), names)
        trial.begin_with(caught.get(trial.mutant.name, ""))


def main() -> int:
    """Run the selected mutants; return 1 if too few are caught, or something is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="package or mutant")
    parser.add_argument("--jobs", type=int, default=4, help="how many at a time")
    parser.add_argument("--at-least", type=float, default=0, help="percentage that must be caught")
    parser.add_argument("--seconds", type=float, default=900, help="of tests for one mutant")
    parser.add_argument("--file", type=Path, help="mutants of this file instead of those stored")
    parser.add_argument("--record", action="store_true", help="record all tests anew")
    parser.add_argument("--show", action="store_true", help="print what pytest printed")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    options = parser.parse_args()
    # A stop is orderly: it ends the tests, and removes the copies.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        groups = [load_group(options.file)] if options.file else load_groups()
        trials = select(groups, options.words)
        check_all_apply(trials)
    except (OSError, OutdatedMutant, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.list:
        for trial in trials:
            print(f"{trial.group:14}{trial.mutant.name}\n{'':14}{trial.mutant.breaks}")
        return 0
    progress = Progress()
    try:
        choose_tests(trials, progress, jobs=options.jobs, anew=options.record)
        with open_runner(options.jobs) as runner:
            run_all(runner, trials, Judge(options.seconds), progress, shows=options.show)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left running", file=sys.stderr)
        return 128 + signal.SIGINT
    print_scores(trials)
    caught = sum(trial.verdict == "caught" for trial in trials)
    print(f"\n{caught} of {len(trials)} caught in {progress.seconds / 60:.0f} minutes")
    is_broken = any(trial.verdict == "broken" for trial in trials)
    if not (options.words or options.file or is_broken):
        record(trials, progress.seconds)
    return int(is_broken or 100 * caught < options.at_least * len(trials))


if __name__ == "__main__":
    sys.exit(main())
