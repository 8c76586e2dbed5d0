"""Mutants of the source: small deliberate bugs, stored as an old and a new text of one file.

`tests/mutants/collection/` has one file for each package.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = [
    "COLLECTION",
    "MutantGroup",
    "OutdatedMutant",
    "SourceMutant",
    "load_group",
    "load_groups",
]

COLLECTION = Path(__file__).parents[1] / "mutants" / "collection"


class OutdatedMutant(Exception):
    """The old text of a mutant does not occur exactly once in its file."""


class SourceMutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small bug.

    Attributes:
        name: says what the mutated code does, in words joined by hyphens.
        breaks: the promise that it breaks, in one sentence.
        file: the source file, from the root of the repository.
        old: a text that occurs exactly once in that file.
        new: what stands there instead.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str

    def mutate(self, source: str) -> str:
        """Return the source with the bug.

        Raises:
            OutdatedMutant: the old text does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise OutdatedMutant(
                f"{self.name}: the old text must occur once in {self.file} (got {count} times). "
                "Adapt the mutant to the code."
            )
        return source.replace(self.old, self.new)


class MutantGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mutants of a file, which has the name of a package.

    Attributes:
        name: of the file.
        mutants: in the order of the file.
    """

    name: str
    mutants: tuple[SourceMutant, ...]


def load_groups(folder: Path = COLLECTION) -> list[MutantGroup]:
    """Return all stored mutants.

    Raises:
        ValueError: a file has unknown or missing fields, or a name is used twice.
    """
    groups = [load_group(path) for path in sorted(folder.glob("*.toml"))]
    _check_names(mutant.name for group in groups for mutant in group.mutants)
    return groups


def load_group(path: Path) -> MutantGroup:
    """Return the mutants of one file.

    Raises:
        ValueError: it has unknown or missing fields, or is not TOML.
    """
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return msgspec.convert({"name": path.stem, **content}, MutantGroup)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _check_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"name must be unique (got {name!r} twice). Rename one.")
        seen.add(name)
