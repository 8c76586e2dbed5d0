"""Stories, told with one seed after the other, and found again when one ends badly.

A story is a coroutine function of a module that takes a world. A seed that breaks it is
reported with the one line that tells the same story with the same seed again.
"""

import importlib
import inspect
import multiprocessing
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import msgspec

from jobsync.errors import Invalid, NotFound
from jobsync.testing.invariants import check_commits, check_replies
from jobsync.testing.violations import InvariantBroken, Violation
from jobsync.testing.world import World

__all__ = [
    "Report",
    "SavedSeed",
    "Story",
    "WorldRunner",
    "check_repeats",
    "check_story",
    "find_story",
    "load_seeds",
    "name_of",
    "replay_line",
    "run_campaign",
    "run_story",
]


Story: TypeAlias = Callable[[World], Awaitable[object]]
"""What happens in a world. It stands in a module, where another process can find it."""

_SHOWN = 10
_HASH_SEEDS = ("0", "1", "12345")


class Report(msgspec.Struct, frozen=True):
    """What one world came to."""

    seed: int
    hours: float
    """How long it lasted, in its own time."""
    faults: int
    violations: list[Violation]
    fingerprint: str


class SavedSeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A seed that once broke a story."""

    story: str
    """As `find_story` takes it."""
    seed: int
    why: str
    """What it showed, and what mended it."""


def run_story(story: Story | str, seed: int) -> Report:
    """Let one world happen, and judge it by the store's contract and by what the story expects.

    An exception that the story raises is a violation too: the one that `require` names, and
    "crash" for any other.

    Args:
        story: what happens, or its name as `find_story` takes it.
        seed: decides the rest.
    """
    if isinstance(story, str):
        story = find_story(story)
    world = World(seed)
    world.expect(check_commits, check_replies)
    raised: list[Violation] = []
    try:
        world.run(lambda: story(world))
    except InvariantBroken as broken:
        raised = [broken.violation]
    except Exception as error:  # noqa: BLE001 - a story may raise anything; it is what we look for
        raised = [Violation("crash", "".join(traceback.format_exception(error)).rstrip())]
    hours = world.loop.time() / 3600
    return Report(seed, hours, world.faults, raised + world.judge(), world.fingerprint)


def check_story(story: Story, seeds: Iterable[int] = range(20)) -> None:
    """Tell a story with each seed.

    Raises:
        AssertionError: a seed broke it; the last line is a command that does so again.
        Invalid: the story cannot be found by another process.
    """
    for seed in seeds:
        again = replay_line(story, seed)
        violations = run_story(story, seed).violations
        if violations:
            shown = "\n".join(map(str, violations[:_SHOWN]))
            raise AssertionError(f"seed {seed}, {len(violations)} found:\n{shown}\n{again}")


def check_repeats(story: Story, seed: int = 0) -> None:
    """Tell a story in processes that hash differently: each must come to the same history.

    Raises:
        AssertionError: one did not; the story rests on more than its seed.
        Invalid: the story cannot be found by another process.
    """
    expected = run_story(story, seed).fingerprint
    command = [sys.executable, "-m", "jobsync.testing", "replay", name_of(story), str(seed)]
    for hash_seed in _HASH_SEEDS:
        hashing = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        told = subprocess.run(  # noqa: S603 - this very interpreter
            command, env={**os.environ, **hashing}, capture_output=True, text=True, check=False
        )
        if expected not in told.stdout:
            raise AssertionError(
                f"seed {seed} came to another history under PYTHONHASHSEED={hash_seed}:\n"
                f"{told.stdout}{told.stderr}\n{replay_line(story, seed)}"
            )


def replay_line(story: Story, seed: int) -> str:
    """Give the command that tells a story again.

    Raises:
        Invalid: the story cannot be found by another process.
    """
    places = os.pathsep.join(_short(place) for place in sys.path if _is_ours(place))
    command = [_short(sys.executable), "-m", "jobsync.testing", "replay", name_of(story), str(seed)]
    return (f"PYTHONPATH={shlex.quote(places)} " if places else "") + shlex.join(command)


def name_of(story: Story) -> str:
    """Name a story as `find_story` takes it.

    Raises:
        Invalid: it is not a function of a module.
    """
    name: str = getattr(story, "__qualname__", repr(story))
    if not name.isidentifier():
        raise Invalid("story", name, "is not a function of a module", "define it with async def")
    file = inspect.getsourcefile(story)
    return f"{_short(file) if file and Path(file).exists() else story.__module__}:{name}"


def find_story(name: str) -> Story:
    """Find a story by `path/to/file.py:story` or `package.module:story`.

    Raises:
        Invalid: the name is ill-formed.
        NotFound: there is no such module or story.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise Invalid("story", name, "names no story", "write path/to/file.py:story")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    story: Story | None = getattr(module, function, None)
    if story is None:
        raise NotFound("story", name)
    return story


def load_seeds(path: str | Path) -> list[SavedSeed]:
    """Read seeds that were kept, from a JSON file.

    Raises:
        Invalid: something in it is not a saved seed.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[SavedSeed])
    except msgspec.DecodeError as error:
        raise Invalid("seeds", str(path), str(error), "write story, seed and why") from error


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NotFound("module", name) from error


def _load_file(path: Path) -> ModuleType:
    """Load a file as `python file.py` does, with its folder in the path, but once."""
    path = path.resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    if not path.exists():
        raise NotFound("file", str(path))
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _short(path: str) -> str:
    """Give a path as one writes it here."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _is_ours(place: str) -> bool:
    """Say whether a place of modules is one that another process would not know of."""
    here = Path.cwd()
    return here in Path(place).parents and "site-packages" not in place


# Many worlds: a story told with seed after seed, on several cores, until so many hours passed.


WorldRunner: TypeAlias = Callable[[int], Report]
"""Lets one world happen. Something of a module, so that another process can find it."""


def run_campaign(
    teller: WorldRunner, *, first_seed: int, hours: float, jobs: int
) -> Iterator[Report]:
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
