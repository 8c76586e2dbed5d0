"""Is this tree slower than another commit? Runs the benchmarks of both in alternating pairs.

Each checkout runs its own `benchmarks/` with its own `src`, in the packages of this environment:
what `make bench-queue` and `make bench-jobs` run. Base runs once more at the end, so that even one
pair shows how much base differs from itself.

A row's figure is the ratio over the same work sent bare, where the benchmark measures that: load
of the machine changes both alike. The spread of a row is the change between two consecutive runs
of base that nine of ten such changes do not exceed. A row is worse, or better, if the medians of
base and head differ by more than the spread. Exits with 1 if a row is worse.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import Better, Row

__all__ = ["Comparison", "Reading", "compare", "parse_text"]

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("assignment", "pins", "jobs", "queues")
QUICK = {"jobs": ["--only", "work"], "queues": ["--quick"]}
"""Options that leave out the idle measurements, which take minutes."""

_LAUNCH = """
import importlib
import sys

script, rounds, skips_idle, *options = sys.argv[1:]
benchmark = importlib.import_module(f"benchmarks.{script}")

async def skip(bench):
    return benchmark.Verdict("", "", "", "", True)

if rounds != "0":
    benchmark.ROUNDS = int(rounds)
if skips_idle == "True":
    benchmark.count_idle = skip
sys.argv[1:] = options
sys.exit(benchmark.main())
"""
"""Runs a benchmark of any commit, also of one whose queues have no --quick."""


class Reading(msgspec.Struct, frozen=True):
    """One figure of one run."""

    figure: float
    better: Better
    resolution: float = 0.0
    """The share of the figure that printing may have rounded away."""


Run: TypeAlias = dict[str, Reading]
"""The readings of one run, by the labels of their rows."""


class Comparison(msgspec.Struct, frozen=True):
    """What all runs of both checkouts say about one row."""

    label: str
    base: float
    head: float
    spread: float
    better: Better

    @property
    def ratio(self) -> float:
        """Head over base."""
        return self.head / self.base if self.base else float(self.head != 0) + 1

    @property
    def verdict(self) -> str:
        """Whether head is worse or better than base differs from itself."""
        gain = self.ratio if self.better == "higher" else 1 / self.ratio
        if gain * (1 + self.spread) < 1:
            return "worse beyond the spread"
        return "better" if gain > 1 + self.spread else "same"


def compare(base: Sequence[Run], head: Sequence[Run]) -> Iterator[Comparison]:
    """Compare each row that both checkouts have."""
    for label in base[0]:
        if label in head[0]:
            readings = [run[label] for run in base]
            figures = [reading.figure for reading in readings]
            changes = [
                max(pair) / min(pair) - 1 if min(pair) else float(max(pair) > 0)
                for pair in itertools.pairwise(figures)
            ]
            spread = _quantile(changes, 0.9) + max(reading.resolution for reading in readings)
            ours = statistics.median(run[label].figure for run in head)
            yield Comparison(label, statistics.median(figures), ours, spread, readings[0].better)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    index = share * (len(ordered) - 1)
    low, high = ordered[int(index)], ordered[min(int(index) + 1, len(ordered) - 1)]
    return low + (high - low) * (index - int(index))


# What benchmarks print


def parse_json(text: str) -> Run:
    """Read the output of --json."""
    rows = (msgspec.json.decode(line, type=Row) for line in text.splitlines())
    return {
        row.label: Reading(row.value / row.bare if row.bare else row.value, row.better)
        for row in rows
    }


_N = r"-?[\d,]+(?:\.\d+)?"
_LABEL = r"(?P<label>\S.*?) {2,}"
_TEXTS: list[tuple[Better, str]] = [
    ("higher", rf"{_LABEL}(?P<value>{_N}) a second, \S+x of .*\((?P<bare>{_N})\)"),
    ("higher", rf"{_LABEL}(?P<value>{_N}) a second of CPU"),
    ("lower", rf"{_LABEL}(?P<value>{_N}) statements a minute"),
    ("lower", rf"{_LABEL}(?P<value>{_N}) s until"),
    ("lower", rf"{_LABEL}{_N}/s +{_N}/s +\+(?P<value>{_N}) µs of CPU"),
    ("higher", rf"{_LABEL}(?P<bare>{_N})/s +(?P<value>{_N})/s"),
    ("lower", rf"{_LABEL}(?:(?P<bare>{_N}) ms +)?(?P<value>{_N}) ms\b"),
    ("lower", rf"{_LABEL}(?P<value>{_N}) +a minute"),
]


def parse_text(text: str) -> Run:
    """Read the tables of commits whose benchmarks have no --json."""
    run: Run = {}
    prefix = ""
    for line in text.splitlines():
        if heading := re.match(r"(\w+): median of", line):
            prefix = f"{heading[1]}: "
        for better, pattern in _TEXTS:
            if found := re.match(pattern, line):
                fields = found.groupdict()
                value, lost = _read_number(fields["value"])
                bare, bare_lost = _read_number(fields.get("bare") or "1")
                if not fields.get("bare"):
                    bare_lost = 0.0
                run[prefix + fields["label"]] = Reading(value / bare, better, lost + bare_lost)
                break
    return run


def _read_number(text: str) -> tuple[float, float]:
    """Return a number, and the share of it that its last digit stands for."""
    number = float(text.replace(",", ""))
    unit = 10.0 ** -len(text.partition(".")[2])
    return number, unit / abs(number) if number else 1.0


# How benchmarks run


def run_benchmarks(checkout: Path, scripts: Sequence[str], *, quick: bool, rounds: int) -> Run:
    """Run the benchmarks of a checkout with its own sources; return its readings.

    Raises:
        SystemExit: a benchmark failed.
    """
    run: Run = {}
    has_json = (checkout / "benchmarks" / "table.py").exists()
    for script in scripts:
        skips_idle = quick and script == "queues" and not has_json
        options = QUICK.get(script, []) if quick and not skips_idle else []
        options = [*options, *(["--json"] if has_json else [])]
        command = ["-c", _LAUNCH, script, str(rounds), str(skips_idle), *options]
        paths = os.pathsep.join(map(str, (checkout / "src", checkout)))
        done = subprocess.run(
            [sys.executable, *command],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        rows = (parse_json if has_json else parse_text)(done.stdout)
        # One that is over its budget exits with 1, too, and is none of our business.
        if not rows or "Traceback" in done.stderr:
            sys.exit(f"{script} of {checkout} failed with {done.returncode}:\n{done.stderr}")
        run |= rows
    return run


@contextmanager
def check_out(reference: str) -> Iterator[Path]:
    """Check a commit out into a temporary worktree."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        checkout = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", checkout, reference], check=True)
        try:
            yield checkout
        finally:
            subprocess.run([*git, "remove", "--force", checkout], check=True)


def run_pairs(
    pairs: int, run_base: Callable[[], Run], run_head: Callable[[], Run]
) -> tuple[list[Run], list[Run]]:
    """Run base and head in alternating order, and base once more."""
    runs: dict[str, list[Run]] = {"base": [], "head": []}
    calls = {"base": run_base, "head": run_head}
    for number in range(pairs + 1):
        order = ("base", "head") if number % 2 == 0 else ("head", "base")
        for name in order if number < pairs else ("base",):
            begun = time.monotonic()
            runs[name].append(calls[name]())
            took = time.monotonic() - begun
            pair = f"pair {number + 1} of {pairs}" if number < pairs else "once more"
            print(f"{pair}: {name} took {took:.0f} s", file=sys.stderr, flush=True)
    return runs["base"], runs["head"]


def main() -> int:
    """Run the pairs, and print one table."""
    parser = argparse.ArgumentParser(description="compare the benchmarks of two checkouts")
    parser.add_argument("base", help="the commit to compare this tree with")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="leave out the idle measurements")
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds in a run; their own by default"
    )
    parser.add_argument("--only", choices=SCRIPTS, action="append", help="these benchmarks alone")
    options = parser.parse_args()
    scripts = options.only or SCRIPTS
    with check_out(options.base) as checkout:
        base, head = run_pairs(
            options.pairs,
            lambda: run_benchmarks(checkout, scripts, quick=options.quick, rounds=options.rounds),
            lambda: run_benchmarks(ROOT, scripts, quick=options.quick, rounds=options.rounds),
        )
    rows = list(compare(base, head))
    print(f"{'':44}{'base':>12}{'head':>12}{'ratio':>8}{'spread':>8}")
    for row in rows:
        figures = f"{row.base:12,.3f}{row.head:12,.3f}{row.ratio:8.2f}{row.spread:8.0%}"
        print(f"{row.label:44}{figures}  {row.verdict}")
    for label in sorted(base[0].keys() ^ head[0].keys()):
        print(f"{label:44}only in {'base' if label in base[0] else 'head'}")
    worse = sum(row.verdict.startswith("worse") for row in rows)
    print(f"{worse} of {len(rows)} rows are worse beyond the spread")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
