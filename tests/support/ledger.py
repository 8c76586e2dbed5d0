"""What processes tell of themselves, a line for each fact in a file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["Fact", "Ledger"]


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
