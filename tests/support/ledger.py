"""What processes tell of themselves, a line for each fact in a file, and how to wait for it."""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from jobsync.testing import InvariantBroken, Violation

__all__ = ["PATIENCE", "Fact", "Ledger", "now", "until"]

PATIENCE = 120.0
"""Seconds after which a test gives up; no promise is about it."""

_GLANCE = 0.02

now = time.monotonic


class Fact(msgspec.Struct, frozen=True):
    """What a process told."""

    at: float
    """By the clock that all processes of this machine share."""
    who: str
    what: str
    facts: Mapping[str, Any]

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]


F = TypeVar("F", bound=Fact)


class Ledger(Generic[F]):
    """A file of facts that is read while it grows.

    Args:
        path: the file; it need not be there yet.
        kind: what its lines are taken for.
    """

    def __init__(self, path: Path, kind: type[F]) -> None:
        self.path = path
        self._kind = kind
        self._read = 0
        self._facts: list[F] = []

    def told(self, *what: str) -> list[F]:
        """Give what was told, of some kinds or of all, in the order of the lines."""
        if self.path.exists():
            self._read_on()
        return [fact for fact in self._facts if not what or fact.what in what]

    def _read_on(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._read)
            # The last line may be half written.
            lines, end, _ = file.read().rpartition(b"\n")
        self._read += len(lines) + len(end)
        for line in lines.split(b"\n") if lines else []:
            facts = json.loads(line)
            at, who, what = facts.pop("at"), facts.pop("who", ""), facts.pop("what")
            self._facts.append(self._kind(at, who, what, facts))


async def until(
    holds: Callable[[], object],
    what: str = "it holds",
    patience: float = PATIENCE,
    *,
    glance: float = _GLANCE,
    invariant: str = "",
) -> None:
    """Wait until something holds, by the time of the running loop, which may be virtual.

    Args:
        holds: returns whether it does, at once or as a coroutine.
        what: completes the sentence "waited in vain until".
        patience: seconds to wait at most.
        glance: seconds between two looks.
        invariant: the promise that is broken if it does not come to hold; none by default.

    Raises:
        AssertionError: it did not hold in time; `InvariantBroken` if that is a promise.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience
    while True:
        held = holds()
        if await held if inspect.isawaitable(held) else held:
            return
        if loop.time() >= give_up:
            problem = f"waited {patience:g} s in vain until {what}"
            raise (
                InvariantBroken(Violation(invariant, problem))
                if invariant
                else AssertionError(problem)
            )
        await asyncio.sleep(glance)
