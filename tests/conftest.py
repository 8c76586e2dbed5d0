"""Time and randomness that tests hold in their hands."""

import json
import random
import subprocess
import time
from typing import Any

import pytest

from jobsync.core.clock import Mono, Wall
from jobsync.core.ids import Ids


class FakeClock:
    """A clock that stands still until it is told, or until somebody sleeps."""

    def __init__(self) -> None:
        self.wall_seconds = 1_700_000_000.0
        self.mono_seconds = 1_000.0
        self.boot_id = 1

    def wall(self) -> Wall:
        """Tell what `wall_seconds` says."""
        return Wall(self.wall_seconds)

    def mono(self) -> Mono:
        """Tell what `mono_seconds` says."""
        return Mono(self.mono_seconds)

    def boot(self) -> int:
        """Tell what `boot_id` says."""
        return self.boot_id

    async def sleep(self, seconds: float) -> None:
        """Move both lines on, without waiting."""
        self.wall_seconds += seconds
        self.mono_seconds += seconds


class SeededRandomness:
    """The same draws in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, count: int) -> bytes:
        """Draw the next bytes."""
        return self._random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        """Draw the next number."""
        return self._random.uniform(low, high)


@pytest.fixture
def clock() -> FakeClock:
    """Time that passes only when somebody sleeps."""
    return FakeClock()


@pytest.fixture
def ids(clock: FakeClock) -> Ids:
    """Names that are the same in every run, dated by `clock`."""
    return Ids(clock, SeededRandomness(1))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make prove-…` ask for an issue's full figures."""
    parser.addoption("--scale", choices=["small", "full"], default="small")


@pytest.fixture(scope="session")
def full_scale(request: pytest.FixtureRequest) -> bool:
    """Whether this run proves the full figures."""
    return bool(request.config.getoption("--scale") == "full")


@pytest.fixture(scope="session")
def rounds(full_scale: bool) -> int:  # noqa: FBT001 - a fixture, not a flag
    """How often a race is run."""
    return 200 if full_scale else 20


class Proof:
    """Tells how a long run gets on, and keeps its figures if it is a full one."""

    def __init__(self, config: pytest.Config, *, kept: bool) -> None:
        self._writer = config.get_terminal_writer()
        self._path = config.rootpath / "proof" / "runs.jsonl"
        self._kept = kept

    def tell(self, text: str) -> None:
        """Show progress."""
        if self._kept:
            self._writer.line(f"  {text}")

    def record(self, what: str, **figures: Any) -> None:
        """Keep what was shown, with the commit that showed it."""
        if not self._kept:
            return
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        ).stdout.strip()
        line = {"at": int(time.time()), "commit": commit, "what": what, **figures}
        with self._path.open("a", encoding="utf-8") as runs:
            runs.write(json.dumps(line) + "\n")


@pytest.fixture
def proof(request: pytest.FixtureRequest, full_scale: bool) -> Proof:  # noqa: FBT001 - a fixture, not a flag
    """Where a test leaves the figures of a full run."""
    return Proof(request.config, kept=full_scale)
