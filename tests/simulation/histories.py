"""Check that simulated worlds still produce the histories recorded in `histories.json`.

A refactoring leaves every history equal. A change of behaviour changes some of them: record them
anew (`make histories WRITE=1`) in the same commit, so that its diff shows what it has changed.

    make histories                      all of them, in two processes; exits with 1 if any differs
    make histories WRITE=1              record them
    make histories ARGS=queue           those whose names begin with `queue`

`histories.json` has the form name -> {case: hash}. A name is a kind (queue, jobs, elections, ...)
and the name of a function; files may be renamed. A case of a story is a seed, and one of a test is
the number of its set of parameters. To add a seed, write it there with an empty hash and record it.
If you rename a story or a test, rename it there too: its hashes stay.

A hash has two halves of eight digits. The first is of the steps alone: who did what, when, with
which numbers. There, each string is replaced by the order of its first appearance, so it survives
any renaming, that of stored keys and fields included. The second is of what was stored, too.
Neither depends on the words of the simulation: names of nodes, occurrences, their details, calls,
outcomes, and texts of errors.
"""

import argparse
import hashlib
import importlib.util
import inspect
import itertools
import json
import logging
import multiprocessing
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import job_stories  # noqa: E402 - found by the line above
import outcome_stories  # noqa: E402 - likewise
import pages_queue_stories  # noqa: E402 - likewise
import place_stories  # noqa: E402 - likewise
import queue_stories  # noqa: E402 - likewise
import record_stories  # noqa: E402 - likewise
import scenarios  # noqa: E402 - likewise
import schedule_stories  # noqa: E402 - likewise
import task_stories  # noqa: E402 - likewise
from fleets import run_neighbours, run_storm, run_suspends  # noqa: E402 - likewise

from jobsync.testing import Occurrence, World  # noqa: E402

RECORDED = HERE / "histories.json"

Case: TypeAlias = tuple[str, str]
"""A name, and a seed or the number of a set of parameters."""
Hashes: TypeAlias = dict[str, dict[str, str]]

STORIES = {
    "queue": (*queue_stories.STORIES, queue_stories.stormy, queue_stories.stormy_with_suspends),
    "pages": (*pages_queue_stories.STORIES, *pages_queue_stories.STORMS),
    "outcomes": (*outcome_stories.STORIES, *outcome_stories.STORMS),
    "tasks": task_stories.STORIES,
    "places": (*place_stories.STORIES, *place_stories.STORMS),
    "jobs": (*job_stories.STORIES, job_stories.stormy, job_stories.stormy_with_suspends),
    "schedule": (
        *schedule_stories.STORIES,
        schedule_stories.stormy,
        schedule_stories.stormy_with_suspends,
    ),
    "records": (
        *record_stories.STORIES,
        record_stories.stormy,
        record_stories.stormy_with_suspends,
    ),
}
FLEETS = (run_storm, run_suspends, run_neighbours)
STORIES_IN_FILES = {
    "members": ("test_world_members.py", ("blocked", "starved", "cut_off", "rough_hour")),
    "storms": ("test_world_storms.py", ("rough_day",)),
    "stories": ("test_world_stories.py", ("lines_come_once",)),
}
TESTS_IN_FILES = {
    "elections": "test_elections.py",
    "fencing": "test_fencing.py",
    "idle": "test_jobs_budget.py",
    "lifecycles": "test_lifecycles.py",
    "nasty": "test_nasty.py",
    "sessions": "test_sessions.py",
    "successions": "test_successions.py",
}
_NEW_STORY_SEEDS = ("0", "1")
HOW_TO_RECORD = "if the behaviour changes on purpose, run `make histories WRITE=1`:"

_remove_tracebacks = re.compile(rb'\\n  File \\"(?:[^"\\]|\\.)*').sub
"""The rest of an error from its first frame on, as JSON: it depends on where the code is."""

_VOCABULARY = {"call", "outcome"}
"""Details whose values are words of the simulation."""


def hash_history(history: Iterable[Occurrence]) -> bytes:
    """Return a digest of the steps and one of what was stored, see above."""
    nodes, whats, words = _Ordinals(), _Ordinals(), _Ordinals()
    lines = [
        (
            each.at,
            nodes[each.node],
            whats[each.what],
            [_normalise(name, value, words) for name, value in each.details.items()],
        )
        for each in history
    ]
    stored = _remove_tracebacks(b"", msgspec.json.encode(lines, order="sorted"))
    steps = msgspec.json.encode(_strip_names(lines, _Ordinals()))
    return hashlib.sha256(steps).digest() + hashlib.sha256(stored).digest()


class _Ordinals(dict[Any, int]):
    """Numbers things in the order of their first lookup."""

    def __missing__(self, thing: Any) -> int:
        return self.setdefault(thing, len(self))


def _normalise(name: str, value: Any, words: _Ordinals) -> Any:
    if name == "error":
        # A class counts by its order of appearance, a text not at all.
        return words[value] if value.isidentifier() else True
    return words[value] if name in _VOCABULARY else value


def _strip_names(value: Any, strings: _Ordinals) -> Any:
    """Replace strings by numbers and mappings by their values."""
    if isinstance(value, str):
        return [strings[value]]
    if isinstance(value, dict):
        values = [_strip_names(each, strings) for each in value.values()]
        # A mapping from data to times was filled in any order.
        return sorted(values) if all(isinstance(each, float) for each in values) else values
    if isinstance(value, list | tuple):
        return [_strip_names(each, strings) for each in value]
    return value


@contextmanager
def recorded_worlds() -> Iterator[list[bytes]]:
    """Collect the digest of the history of every world that runs meanwhile."""
    digests: list[bytes] = []
    run = World.run

    def record(world: World, story: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return run(world, story)
        finally:
            digests.append(hash_history(world.history))

    with mock.patch.object(World, "run", record):
        yield digests


def hash_case(name: str, case: str) -> str:
    """Run a case; return its hash, or nothing if it runs no world."""
    with recorded_worlds() as digests:
        list_runs()[name](case)
    return _combine(digests)


@contextmanager
def compared_with_recorded(name: str, seeds: Iterable[int]) -> Iterator[None]:
    """Check that a story, which runs once with each seed meanwhile, has its recorded histories.

    Raises:
        AssertionError: a history differs; seeds that are not recorded do not count.
    """
    recorded = load_recorded().get(name, {})
    with recorded_worlds() as digests:
        yield
    ran = zip(map(str, seeds), digests, strict=True)
    found = {case: _combine([digest]) for case, digest in ran if case in recorded}
    expected = {case: recorded[case] for case in found}
    lines = "\n".join(describe_differences({name: expected}, {name: found}))
    assert not lines, f"{HOW_TO_RECORD}\n{lines}"


def _combine(digests: list[bytes]) -> str:
    if not digests:
        return ""
    size = hashlib.sha256().digest_size
    halves = (b"".join(each[:size] for each in digests), b"".join(each[size:] for each in digests))
    return "".join(hashlib.sha256(half).hexdigest()[:8] for half in halves)


def list_cases(recorded: Hashes) -> list[Case]:
    """List all cases: of a story the seeds that are recorded, of a test all parameters."""
    cases = []
    for name, run in list_runs().items():
        numbers = [str(number) for number in range(len(getattr(run, "sets", ())))]
        seeds = list(recorded.get(name, _NEW_STORY_SEEDS))
        cases += [(name, case) for case in numbers or seeds]
    return cases


def load_recorded() -> Hashes:
    """Read the recorded hashes."""
    hashes: Hashes = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return hashes


@cache
def list_runs() -> dict[str, Callable[[str], object]]:
    """Return what runs a case, by name."""
    runs: dict[str, Callable[[str], object]] = {}
    for kind, stories in STORIES.items():
        runs |= {f"{kind}.{story.__name__}": partial(_run_story, story) for story in stories}
    for kind, (file, names) in STORIES_IN_FILES.items():
        module = _load(file)
        runs |= {f"{kind}.{name}": partial(_run_story, getattr(module, name)) for name in names}
    for fleet in FLEETS:
        runs[f"elections.{fleet.__name__}"] = partial(_run_fleet, fleet)
    for name in scenarios.__all__:
        if name.islower():
            runs[f"scenarios.{name}"] = _Parametrized(getattr(scenarios, name), [{}])
    for kind, file in TESTS_IN_FILES.items():
        for name, test in vars(_load(file)).items():
            if name.startswith("test_") and not _runs_fleet(test):
                sets = _find_parameters(test)
                runs |= {f"{kind}.{name}": _Parametrized(test, sets)} if sets else {}
    return runs


class _Parametrized:
    """Calls a test with one of its sets of parameters."""

    def __init__(self, test: Callable[..., object], sets: list[dict[str, Any]]) -> None:
        self.sets = sets
        self._test = test

    def __call__(self, case: str) -> object:
        return self._test(**self.sets[int(case)])


def _run_story(story: Callable[[World], Awaitable[object]], seed: str) -> None:
    world = World(int(seed))
    world.run(lambda: story(world))


def _run_fleet(run: Callable[[int], object], seed: str) -> None:
    run(int(seed))


def _runs_fleet(test: Any) -> bool:
    """Whether a test runs a fleet that is recorded by its own name."""
    return any(fleet.__name__ in test.__code__.co_names for fleet in FLEETS)


def _find_parameters(test: Any) -> list[dict[str, Any]]:
    """Return the sets of parameters of a test; none if it is async or takes fixtures."""
    code = test.__code__
    wanted = set(code.co_varnames[: code.co_argcount])
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = names.split(",") if isinstance(names, str) else names
            rows = [value if len(names) > 1 else (value,) for value in values]
            axes.append([dict(zip(names, row, strict=True)) for row in rows])
            wanted -= set(names)
    if wanted or inspect.iscoroutinefunction(test):
        return []
    return [
        {name: value for part in parts for name, value in part.items()}
        for parts in itertools.product(*axes)
    ]


@cache
def _load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"histories_{Path(file).stem}", HERE / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _hash_in_pool(case: Case) -> tuple[Case, str]:
    # A storm logs expected warnings.
    logging.disable(logging.CRITICAL)
    try:
        return case, hash_case(*case)
    except Exception as error:  # noqa: BLE001 - shown, as a difference
        return case, f"raised {error!r}"


def compute(cases: list[Case], jobs: int) -> Hashes:
    """Run cases in several processes; show progress."""
    hashes: Hashes = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = pool.imap_unordered(_hash_in_pool, cases)
        for count, ((name, case), value) in enumerate(found, start=1):
            if value:
                hashes.setdefault(name, {})[case] = value
            if sys.stdout.isatty() or count % 50 == 0 or count == len(cases):
                end = "\r" if sys.stdout.isatty() and count < len(cases) else "\n"
                print(f"{count} of {len(cases)} histories", end=end, flush=True)
    return hashes


def describe_differences(recorded: Hashes, found: Hashes) -> list[str]:
    """Describe what differs, one line a case; a renamed story is one line."""
    lines = []
    gone = {name for name in recorded if name not in found}
    for name, cases in sorted(found.items()):
        if name not in recorded:
            old = next((each for each in sorted(gone) if _overlap(recorded[each], cases)), "")
            gone.discard(old)
            lines.append(f"{name}: {f'rename {old} in {RECORDED.name}' if old else 'is new'}")
            continue
        before = recorded[name]
        changed = [each for each in {**before, **cases} if before.get(each) != cases.get(each)]
        lines += [
            f"{name} {each}: {_compare(before.get(each), cases.get(each))}" for each in changed
        ]
    return lines + [f"{name}: is recorded and does not exist" for name in sorted(gone)]


def _overlap(some: dict[str, str], others: dict[str, str]) -> bool:
    return bool(some.items() & others.items())


def _compare(before: str | None, after: str | None) -> str:
    if not before or not after or len(before) != len(after):
        return f"{before or 'not recorded'} -> {after}"
    is_same = before[:8] == after[:8]
    what = "the same steps store other names or values" if is_same else "other steps"
    return f"{what}: {before} -> {after}"


def main() -> int:
    """Compare all histories with the recorded ones, or record them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("prefix", nargs="?", default="")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--write", action="store_true")
    arguments = options.parse_args()
    recorded = load_recorded()
    cases = [case for case in list_cases(recorded) if case[0].startswith(arguments.prefix)]
    found = compute(cases, arguments.jobs)
    chosen = {name: v for name, v in recorded.items() if name.startswith(arguments.prefix)}
    lines = describe_differences(chosen, found)
    print("\n".join(lines or [f"all {sum(map(len, found.values()))} histories are as recorded"]))
    has_failed = any("raised " in value for each in found.values() for value in each.values())
    if arguments.write and not has_failed:
        others = {name: v for name, v in recorded.items() if name not in chosen}
        merged = {
            name: {case: each[case] for case in sorted(each, key=int)}
            for name, each in sorted({**others, **found}.items())
        }
        RECORDED.write_text(json.dumps(merged, indent=1) + "\n")
        return 0
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
