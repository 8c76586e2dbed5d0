"""The guide to the code names files that exist, and every package."""

import ast
import re
from pathlib import Path

import pytest

from jobsync.stores.sql import load_sql

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def test_every_file_named_exists() -> None:
    """A file that was moved is moved in the guide too."""
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|\.sql|\.md|/))`", PAGE))
    missing = [
        name
        for name in named
        if not (ROOT / "src/jobsync" / name).exists() and not (ROOT / name).exists()
    ]
    assert named
    assert missing == []


@pytest.mark.parametrize(
    ("title", "most"), [("A message", 13), ("A heartbeat", 6), ("A task claim", 9)]
)
def test_a_walk_is_short_and_leads_through_code_that_exists(title: str, most: int) -> None:
    """Each file has the functions that the walk names, and there are not too many files."""
    section = PAGE.partition(f"### {title}\n")[2].partition("\n### ")[0]
    walk = re.findall(r"^\| `([a-z_/]+\.[a-z]+)` \| ([^|]+) \|", section, flags=re.MULTILINE)
    assert 0 < len(walk) <= most
    assert re.search(rf"\b{len(walk)} files:", section)
    for file, functions in walk:
        named = set(re.findall(r"`([^`]+)`", functions))
        assert named
        assert named <= _list_functions(ROOT / "src/jobsync" / file)


def _list_functions(path: Path) -> set[str]:
    """Return the functions, methods or statements of a file."""
    if path.suffix == ".sql":
        return set(load_sql(str(path), path.name))
    module = ast.parse(path.read_text())
    classes = [each for each in module.body if isinstance(each, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {each.name for each in module.body if isinstance(each, kinds)} | {
        f"{owner.name}.{each.name}"
        for owner in classes
        for each in owner.body
        if isinstance(each, kinds)
    }


def test_every_package_is_described() -> None:
    """The table of packages is complete."""
    packages = {each.parent.name for each in (ROOT / "src" / "jobsync").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `([a-z]+)` \|", PAGE, flags=re.MULTILINE))


def test_the_glossary_is_short_and_sorted() -> None:
    """At most 40 words need an explanation."""
    words = re.findall(r"^\| ([a-z][^|]*) \|", GLOSSARY, flags=re.MULTILINE)[1:]
    assert len(words) <= 40
    assert words == sorted(words)
