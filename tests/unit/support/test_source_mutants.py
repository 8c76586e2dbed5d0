"""The stored mutants fit the source, and a run of the tests is judged rightly."""

import ast
import re
from pathlib import Path

import pytest
from mutant_workspace import PytestRun, Verdict
from source_mutants import COLLECTION, OutdatedMutant, SourceMutant, load_group, load_groups

from jobsync.stores.sql import load_sql

ROOT = COLLECTION.parents[2]
GROUPS = load_groups()
MUTANTS = [mutant for group in GROUPS for mutant in group.mutants]


def _build(old: str, new: str = "new") -> SourceMutant:
    return SourceMutant(name="some", breaks="A promise.", file="some.py", old=old, new=new)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_stored_mutant_applies_and_can_be_loaded(mutant: SourceMutant, tmp_path: Path) -> None:
    """Its old text occurs once, it changes something, and Python or our loader reads the result."""
    path = ROOT / mutant.file
    source = path.read_text(encoding="utf-8")
    mutated = mutant.mutate(source)
    assert mutated != source
    if path.suffix == ".sql":
        (tmp_path / path.name).write_text(mutated, encoding="utf-8")
        found = load_sql(str(tmp_path / "module.py"), path.name)
        assert found.keys() == load_sql(str(path), path.name).keys()
    else:
        compile(mutated, mutant.file, "exec", dont_inherit=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_stored_mutant_describes_itself(mutant: SourceMutant) -> None:
    """It has words joined by hyphens for a name, and one sentence with the promise."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", mutant.name)
    assert re.fullmatch(r"[A-Z`][^\n]*\.", mutant.breaks)
    assert mutant.file.startswith("src/jobsync/")


def test_no_two_stored_mutants_are_the_same() -> None:
    """Each would count twice."""
    found: dict[tuple[str, str], str] = {}
    for mutant in MUTANTS:
        mutated = mutant.mutate((ROOT / mutant.file).read_text(encoding="utf-8"))
        meaning = ast.dump(ast.parse(mutated)) if mutant.file.endswith(".py") else mutated
        same = found.setdefault((mutant.file, meaning), mutant.name)
        assert same == mutant.name


@pytest.mark.parametrize("source", ["", "one old, two old"])
def test_an_old_text_that_does_not_occur_once_is_outdated(source: str) -> None:
    """A mutant whose code has changed is an error, not a survivor."""
    with pytest.raises(OutdatedMutant, match="must occur once"):
        _build("old").mutate(source)


def test_a_mutant_replaces_its_text_only() -> None:
    """The rest of the source stays."""
    assert _build(" < ", " <= ").mutate("if a < b:\n    c()\n") == "if a <= b:\n    c()\n"


_GROUP = """
[[mutants]]
name = "{name}"
breaks = "A promise."
file = "src/jobsync/events.py"
{old} = "a"
new = "b"
"""


def test_a_name_is_used_once(tmp_path: Path) -> None:
    """Names select mutants and are recorded."""
    for package in ("one", "two"):
        text = _GROUP.format(name="the-same", old="old")
        (tmp_path / f"{package}.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="'the-same' twice"):
        load_groups(tmp_path)


def test_a_misspelled_field_is_refused(tmp_path: Path) -> None:
    """The error names the file and the field."""
    (tmp_path / "one.toml").write_text(_GROUP.format(name="a-name", old="odl"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"one\.toml.*`odl`"):
        load_groups(tmp_path)


def test_a_file_anywhere_can_be_loaded(tmp_path: Path) -> None:
    """New mutants are tried before they are stored."""
    path = tmp_path / "new.toml"
    path.write_text(_GROUP.format(name="a-name", old="old"), encoding="utf-8")
    group = load_group(path)
    assert (group.name, [mutant.name for mutant in group.mutants]) == ("new", ["a-name"])


@pytest.mark.parametrize(
    ("run", "verdict", "by"),
    [
        (PytestRun(exit_code=0, seconds=1, started=("a::b",)), "survived", ""),
        (PytestRun(exit_code=1, seconds=1, started=("a::b",), failed=("a::b",)), "caught", "a::b"),
        (PytestRun(exit_code=124, seconds=1, started=("a::b",)), "caught", "a::b (did not end)"),
        (PytestRun(exit_code=-9, seconds=1, started=("a::b",)), "caught", "a::b (exit code -9)"),
        (PytestRun(exit_code=2, seconds=1, not_collected=("a",)), "broken", "a cannot be imported"),
        (PytestRun(exit_code=3, seconds=1, started=("a::b",)), "broken", "pytest ended with 3"),
        (PytestRun(exit_code=5, seconds=1), "broken", "pytest ended with 5"),
        (PytestRun(exit_code=124, seconds=1), "broken", "pytest ended with 124"),
    ],
)
def test_a_mutant_is_caught_only_by_a_test(run: PytestRun, verdict: Verdict, by: str) -> None:
    """Tests that could not begin say nothing about a mutant."""
    assert run.judge() == (verdict, by)
