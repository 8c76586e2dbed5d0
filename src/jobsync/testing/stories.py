"""Run stories with many seeds, and reproduce a seed that fails.

A story is a coroutine function of a module that takes a world. A seed that breaks it is reported
with the command that runs the same story with the same seed again.
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
from jobsync.testing.invariants import (
    InvariantBroken,
    Violation,
    check_commits,
    check_replies,
)
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
"""What happens in a world. A function of a module, so that another process can find it."""

WorldRunner: TypeAlias = Callable[[int], "Report"]
"""Runs the world of a seed. A function of a module, so that another process can find it."""

_SHOWN = 10
_HASH_SEEDS = ("0", "1", "12345")


class Report(msgspec.Struct, frozen=True):
    """The result of one world."""

    seed: int
    hours: float
    """Its duration, in its own time."""
    faults: int
    violations: list[Violation]
    fingerprint: str


class SavedSeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A seed that once broke a story."""

    story: str
    """A name for `find_story`."""
    seed: int
    why: str
    """What it revealed, and what fixed it."""


def run_story(story: Story | str, seed: int) -> Report:
    """Run a story in the world of a seed; check the store's contract and the story's own checks.

    An exception that the story raises is a violation too: the one that `require` names, and
    "crash" for any other.

    Args:
        story: the story, or a name for `find_story`.
        seed: the seed of the world.
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
    except Exception as error:  # noqa: BLE001 - a story may raise anything
        raised = [Violation("crash", "".join(traceback.format_exception(error)).rstrip())]
    hours = world.loop.time() / 3600
    return Report(seed, hours, world.faults, raised + world.judge(), world.fingerprint)


def check_story(story: Story, seeds: Iterable[int] = range(20)) -> None:
    """Run a story with each seed.

    Raises:
        AssertionError: a seed broke it; the last line is the command that reproduces it.
        Invalid: another process could not find the story.
    """
    for seed in seeds:
        command = replay_line(story, seed)
        violations = run_story(story, seed).violations
        if violations:
            shown = "\n".join(map(str, violations[:_SHOWN]))
            raise AssertionError(f"seed {seed}, {len(violations)} violations:\n{shown}\n{command}")


def check_repeats(story: Story, seed: int = 0) -> None:
    """Run a story in processes that hash differently; all must have the same history.

    Raises:
        AssertionError: one did not; the story depends on more than its seed.
        Invalid: another process could not find the story.
    """
    expected = run_story(story, seed).fingerprint
    command = [sys.executable, *_build_replay(story, seed)]
    for hash_seed in _HASH_SEEDS:
        environ = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(  # noqa: S603 - this interpreter
            command, env={**os.environ, **environ}, capture_output=True, text=True, check=False
        )
        if expected not in done.stdout:
            raise AssertionError(
                f"seed {seed} has another history under PYTHONHASHSEED={hash_seed}:\n"
                f"{done.stdout}{done.stderr}\n{replay_line(story, seed)}"
            )


def replay_line(story: Story, seed: int) -> str:
    """Return the command that runs a story again.

    Raises:
        Invalid: another process could not find the story.
    """
    paths = os.pathsep.join(_shorten(path) for path in sys.path if _is_local(path))
    command = [_shorten(sys.executable), *_build_replay(story, seed)]
    return (f"PYTHONPATH={shlex.quote(paths)} " if paths else "") + shlex.join(command)


def _build_replay(story: Story, seed: int) -> list[str]:
    """Return the arguments of the interpreter that run a story again."""
    # A negative number would be taken for an option.
    end_of_options = ["--"] if seed < 0 else []
    return ["-m", "jobsync.testing", "replay", *end_of_options, name_of(story), str(seed)]


def name_of(story: Story) -> str:
    """Return the name of a story for `find_story`.

    Raises:
        Invalid: it is not a function of a module.
    """
    name: str = getattr(story, "__qualname__", repr(story))
    if not name.isidentifier():
        raise Invalid("story", name, "is not a function of a module", "define it with async def")
    file = inspect.getsourcefile(story)
    return f"{_shorten(file) if file and Path(file).exists() else story.__module__}:{name}"


def find_story(name: str) -> Story:
    """Find a story by `path/to/file.py:story` or `package.module:story`.

    Raises:
        Invalid: the name is malformed.
        NotFound: the module or the story does not exist.
    """
    location, _, function = name.rpartition(":")
    if not location or not function:
        raise Invalid("story", name, "is not the name of a story", "write path/to/file.py:story")
    is_file = location.endswith(".py")
    module = _load_file(Path(location)) if is_file else _load_module(location)
    story: Story | None = getattr(module, function, None)
    if story is None:
        raise NotFound("story", name)
    return story


def load_seeds(path: str | Path) -> list[SavedSeed]:
    """Read saved seeds from a JSON file.

    Raises:
        Invalid: the file does not contain a list of saved seeds.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[SavedSeed])
    except msgspec.DecodeError as error:
        problem = f"cannot be read: {error}"
        raise Invalid("seeds", str(path), problem, "write story, seed and why") from error


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NotFound("module", name) from error


def _load_file(path: Path) -> ModuleType:
    """Load a file once, with its folder in the path, as `python file.py` does."""
    path = path.resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    if not path.exists():
        raise NotFound("file", str(path))
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _shorten(path: str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _is_local(path: str) -> bool:
    """Whether another process would not have this path in `sys.path` by itself."""
    return Path.cwd() in Path(path).parents and "site-packages" not in path


def run_campaign(
    runner: WorldRunner, *, first_seed: int, hours: float, jobs: int
) -> Iterator[Report]:
    """Run the worlds of consecutive seeds on several cores, for so many simulated hours."""
    simulated = 0.0
    seeds = iter(range(first_seed, first_seed + 1_000_000_000))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pending = [pool.apply_async(runner, (next(seeds),)) for _ in range(2 * jobs)]
        while simulated < hours:
            # In order, so that a campaign with the same first seed is the same each time.
            report = pending.pop(0).get()
            pending.append(pool.apply_async(runner, (next(seeds),)))
            simulated += report.hours
            yield report
        pool.terminate()
