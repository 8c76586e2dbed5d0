"""Run the tests against stored mutants of the source, and print which were not noticed.

python tests/mutants/run.py                       all (make mutants)
python tests/mutants/run.py queue stores          those of two packages (ARGS="queue stores")
python tests/mutants/run.py some-name --show      one, with what pytest printed
python tests/mutants/run.py --at-least 90         fail if fewer than 90 % are caught
python tests/mutants/run.py --list                names, and the promises that they break

Before a step of tests runs with mutants, it runs without, and must pass. A step that takes three
times as long with a mutant, and half a minute more, counts as a failure.
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

import msgspec

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import proofs  # noqa: E402 - found by the line above
from mutant_workspace import StepRun, Verdict, Workspace  # noqa: E402 - likewise
from source_mutants import (  # noqa: E402 - likewise
    MutantGroup,
    OutdatedMutant,
    SourceMutant,
    Step,
    load_groups,
)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

UNMUTATED_LIMIT = 600.0
TAIL = 60


class Trial(msgspec.Struct, kw_only=True, eq=False):
    """A mutant, and what the tests have said about it so far.

    Attributes:
        group: its package.
        mutant: the mutant.
        steps: the tests to run.
        verdict: what they say.
        by: the test that caught it, or what is broken.
        seconds: how long its tests took.
    """

    group: str
    mutant: SourceMutant
    steps: tuple[Step, ...]
    verdict: Verdict = "survived"
    by: str = ""
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """Return the package and the name."""
        return f"{self.group}, {self.mutant.name}"


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
        self._limits: dict[Step, float] = {}

    def run_unmutated(self, steps: Iterable[Step]) -> Iterator[tuple[Step, StepRun]]:
        """Run steps that have not run yet without a mutant.

        How long one takes limits its later runs.
        """

        def run(workspace: Workspace, step: Step) -> StepRun:
            return workspace.run(step, UNMUTATED_LIMIT)

        new = [step for step in dict.fromkeys(steps) if step not in self._limits]
        for step, done in self._run_all(new, run):
            self._limits[step] = 30 + 3 * done.seconds
            yield step, done

    def run_mutated(self, trials: list[Trial], depth: int) -> Iterator[tuple[Trial, StepRun]]:
        """Run one step of each trial, the first being number 0."""

        def run(workspace: Workspace, trial: Trial) -> StepRun:
            step = trial.steps[depth]
            with workspace.with_mutant(trial.mutant):
                return workspace.run(step, self._limits[step])

        return self._run_all(trials, run)

    def stop(self) -> None:
        """End all tests, and wait until they have ended."""
        for workspace in self._workspaces:
            workspace.stop()
        for workspace in [self._free.get() for _ in self._workspaces]:
            self._free.put(workspace)

    def _run_all(
        self, items: list[Item], run: Callable[[Workspace, Item], Answer]
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
def open_runner(jobs: int) -> Iterator[Runner]:
    """Copy the working tree for each job; remove the copies at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        place.chmod(0o755)  # a PostgreSQL server of the tests may run as another user
        runner = Runner([Workspace(place / str(number)) for number in range(jobs)])
        try:
            yield runner
        finally:
            runner.stop()


def select(groups: list[MutantGroup], words: list[str]) -> list[Trial]:
    """Return the mutants that words name, by package or by name; all without words.

    Raises:
        ValueError: a word names nothing.
    """
    everything = [
        Trial(group=group.name, mutant=mutant, steps=group.steps_of(mutant))
        for group in groups
        for mutant in group.mutants
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
        "source mutants",
        seconds=round(seconds),
        packages=count(trials),
        survived=[trial.mutant.name for trial in by_verdict["survived"]],
        caught={trial.mutant.name: trial.by for trial in by_verdict["caught"]},
    )


def run_all(runner: Runner, trials: list[Trial], progress: Progress, *, shows: bool) -> None:
    """Run the first step of all mutants, then the second of those that survived it, and so on."""
    deepest = max(len(trial.steps) for trial in trials)
    for depth in range(deepest):
        left = [each for each in trials if each.verdict == "survived" and depth < len(each.steps)]
        progress.tell(
            f"step {depth + 1} of {deepest}: {len(left)} of {len(trials)} mutants are left"
        )
        for step, done in runner.run_unmutated(trial.steps[depth] for trial in left):
            is_good = done.exit_code == 0
            word = "pass" if is_good else "FAIL"
            progress.tell(f"without a mutant {word} in {done.seconds:.0f} s: {' '.join(step)}")
            if not is_good:
                print(tail(done.output))
                for trial in left:
                    if trial.steps[depth] == step:
                        trial.verdict, trial.by = "broken", "the tests fail without it"
        left = [trial for trial in left if trial.verdict == "survived"]
        for trial, done in runner.run_mutated(left, depth):
            trial.verdict, trial.by = done.judge()
            trial.seconds += done.seconds
            word = "passes" if trial.verdict == "survived" else trial.verdict
            progress.tell(f"{word} in {done.seconds:.0f} s: {trial.title} {trial.by}")
            if trial.verdict == "broken" or (shows and trial.verdict == "caught"):
                print(tail(done.output))


def tail(output: str) -> str:
    """Return the last lines of what pytest printed."""
    return "\n".join(f"    {line}" for line in output.splitlines()[-TAIL:])


def main() -> int:
    """Run the selected mutants; return 1 if too few are caught, or something is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="package or mutant")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--at-least", type=float, default=0, help="percentage that must be caught")
    parser.add_argument("--show", action="store_true", help="print what pytest printed")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    options = parser.parse_args()
    # A stop is orderly: it ends the tests, and removes the copies.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trials = select(load_groups(), options.words)
        check_all_apply(trials)
    except (OutdatedMutant, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.list:
        for trial in trials:
            print(f"{trial.group:14}{trial.mutant.name}\n{'':14}{trial.mutant.breaks}")
        return 0
    progress = Progress()
    try:
        with open_runner(options.jobs) as runner:
            run_all(runner, trials, progress, shows=options.show)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left running", file=sys.stderr)
        return 128 + signal.SIGINT
    print_scores(trials)
    caught = sum(trial.verdict == "caught" for trial in trials)
    print(f"\n{caught} of {len(trials)} caught in {progress.seconds / 60:.0f} minutes")
    is_broken = any(trial.verdict == "broken" for trial in trials)
    if not options.words and not is_broken:
        record(trials, progress.seconds)
    return int(is_broken or 100 * caught < options.at_least * len(trials))


if __name__ == "__main__":
    sys.exit(main())
