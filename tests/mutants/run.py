"""Run the tests against stored mutants of the source, and print which were not noticed.

python tests/mutants/run.py                       all (make mutants)
python tests/mutants/run.py queue stores          those of two packages (ARGS="queue stores")
python tests/mutants/run.py some-name --show      one, with what pytest printed
python tests/mutants/run.py --at-least 90         fail if fewer than 90 % are caught
python tests/mutants/run.py --list                names, and the promises that they break

First every selected step of tests runs on the unmutated source, and must pass. A step that takes
three times as long with a mutant, and half a minute more, counts as a failure.
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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a mutant.

    Attributes:
        group: its package.
        mutant: the mutant.
        verdict: `broken` means that the tests could not run, which says nothing about them.
        by: the test that caught it, or what is broken.
        seconds: how long its tests took.
        output: what the last run of pytest printed.
    """

    group: str
    mutant: SourceMutant
    verdict: Verdict
    by: str = ""
    seconds: float
    output: str

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
        """Run each step once without a mutant. How long it takes limits its later runs."""

        def run(workspace: Workspace, step: Step) -> StepRun:
            return workspace.run(step, UNMUTATED_LIMIT)

        for step, done in self._run_all(list(dict.fromkeys(steps)), run):
            self._limits[step] = 30 + 3 * done.seconds
            yield step, done

    def run_mutants(self, mutants: list[tuple[MutantGroup, SourceMutant]]) -> Iterator[Result]:
        """Run the steps of each mutant until one fails."""

        def run(workspace: Workspace, item: tuple[MutantGroup, SourceMutant]) -> Result:
            group, mutant = item
            with workspace.with_mutant(mutant):
                return self._run_steps(workspace, group, mutant)

        for _, result in self._run_all(mutants, run):
            yield result

    def _run_steps(self, workspace: Workspace, group: MutantGroup, mutant: SourceMutant) -> Result:
        verdict: Verdict = "survived"
        by, output, seconds = "", "", 0.0
        for step in group.steps_of(mutant):
            done = workspace.run(step, self._limits[step])
            verdict, by = done.judge()
            output, seconds = done.output, seconds + done.seconds
            if verdict != "survived":
                break
        return Result(
            group=group.name, mutant=mutant, verdict=verdict, by=by, seconds=seconds, output=output
        )

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
            except BaseException:  # an interrupt too: nothing may be left running
                threads.shutdown(wait=False, cancel_futures=True)
                for workspace in self._workspaces:
                    workspace.stop()
                raise


@contextmanager
def open_runner(jobs: int) -> Iterator[Runner]:
    """Copy the working tree for each job; remove the copies at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        place.chmod(0o755)  # a PostgreSQL server of the tests may run as another user
        yield Runner([Workspace(place / str(number)) for number in range(jobs)])


def select(groups: list[MutantGroup], words: list[str]) -> list[tuple[MutantGroup, SourceMutant]]:
    """Return the mutants that words name, by package or by name; all without words.

    Raises:
        ValueError: a word names nothing.
    """
    everything = [(group, mutant) for group in groups for mutant in group.mutants]
    known = {group.name for group in groups} | {mutant.name for _, mutant in everything}
    for word in words:
        if word not in known:
            raise ValueError(f"no package or mutant is named {word!r}. See --list.")
    return [
        (group, mutant)
        for group, mutant in everything
        if not words or group.name in words or mutant.name in words
    ]


def check_all_apply(mutants: Iterable[tuple[MutantGroup, SourceMutant]]) -> None:
    """Raise `OutdatedMutant` if a mutant does not fit the source any more."""
    for _, mutant in mutants:
        mutant.mutate((ROOT / mutant.file).read_text(encoding="utf-8"))


class Progress:
    """Prints a line for each thing that is done, with the time since the start."""

    def __init__(self, total: int) -> None:
        self._started = time.monotonic()
        self._total = total
        self._done = 0

    @property
    def seconds(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self._started

    def tell(self, text: str) -> None:
        """Print something that is done."""
        self._done += 1
        minutes, seconds = divmod(int(self.seconds), 60)
        print(f"{minutes:3}:{seconds:02}  {self._done:3}/{self._total}  {text}", flush=True)


def print_scores(results: list[Result]) -> None:
    """Print what caught each mutant, those that survived, and a table of the packages."""
    for result in results:
        if result.verdict == "caught":
            print(f"\ncaught: {result.title}\n  {result.by}")
    for result in results:
        if result.verdict != "caught":
            print(f"\n{result.verdict.upper()}: {result.title} {result.by}".rstrip())
            print(f"  {result.mutant.breaks}")
    counts = count(results)
    width = max(map(len, ["package", *counts]))
    print(f"\n{'package':{width}}  caught  survived  broken")
    for name, found in counts.items():
        print(f"{name:{width}}  {found['caught']:6}  {found['survived']:8}  {found['broken']:6}")


def count(results: Iterable[Result]) -> Mapping[str, dict[Verdict, int]]:
    """Return how many mutants of each package had which verdict."""
    counts: defaultdict[str, dict[Verdict, int]] = defaultdict(
        lambda: {"caught": 0, "survived": 0, "broken": 0}
    )
    for result in results:
        counts[result.group][result.verdict] += 1
    return counts


def record(results: list[Result], seconds: float) -> None:
    """Append the scores of a run of all mutants to the proofs."""
    by_verdict = defaultdict(list)
    for result in results:
        by_verdict[result.verdict].append(result)
    proofs.record(
        "source mutants",
        seconds=round(seconds),
        packages=count(results),
        survived=[result.mutant.name for result in by_verdict["survived"]],
        caught={result.mutant.name: result.by for result in by_verdict["caught"]},
    )


def run(
    mutants: list[tuple[MutantGroup, SourceMutant]], options: argparse.Namespace
) -> list[Result]:
    """Run mutants and print the progress; return no results if the tests fail without them."""
    steps = list(
        dict.fromkeys(step for group, mutant in mutants for step in group.steps_of(mutant))
    )
    progress = Progress(len(steps) + len(mutants))
    with open_runner(options.jobs) as runner:
        failures = []
        for step, done in runner.run_unmutated(steps):
            is_good = done.exit_code == 0
            word = "passes" if is_good else "FAILS"
            progress.tell(f"unmutated: {word} in {done.seconds:.0f} s: {' '.join(step)}")
            if not is_good:
                failures.append(done.output)
        if failures:
            print(*(tail(output) for output in failures), sep="\n")
            print("\nThe tests must pass without a mutant.")
            return []
        results = []
        for result in runner.run_mutants(mutants):
            progress.tell(f"{result.verdict} in {result.seconds:.0f} s: {result.title} {result.by}")
            if options.show or result.verdict == "broken":
                print(tail(result.output))
            results.append(result)
    results.sort(key=lambda result: result.title)
    print_scores(results)
    if not options.words and not any(result.verdict == "broken" for result in results):
        record(results, progress.seconds)
    return results


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
        mutants = select(load_groups(), options.words)
        check_all_apply(mutants)
    except (OutdatedMutant, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.list:
        for group, mutant in mutants:
            print(f"{group.name:14}{mutant.name}\n{'':14}{mutant.breaks}")
        return 0
    try:
        results = run(mutants, options)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left running", file=sys.stderr)
        return 128 + signal.SIGINT
    caught = sum(result.verdict == "caught" for result in results)
    if results:
        print(f"\n{caught} of {len(results)} caught")
    is_broken = not results or any(result.verdict == "broken" for result in results)
    return int(is_broken or 100 * caught < options.at_least * len(results))


if __name__ == "__main__":
    sys.exit(main())
