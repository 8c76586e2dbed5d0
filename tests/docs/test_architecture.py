"""The guide to the code names files that exist, and every package."""

import re
from pathlib import Path

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


def test_every_package_is_described() -> None:
    """The table of packages is complete."""
    packages = {each.parent.name for each in (ROOT / "src" / "jobsync").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `([a-z]+)` \|", PAGE, flags=re.MULTILINE))


def test_the_glossary_is_short_and_sorted() -> None:
    """At most 40 words need an explanation."""
    words = re.findall(r"^\| ([a-z][^|]*) \|", GLOSSARY, flags=re.MULTILINE)[1:]
    assert len(words) <= 40
    assert words == sorted(words)
