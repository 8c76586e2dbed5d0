"""Every Python block of the README and the documentation runs as it is printed."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {"docs/how-to/migrate-from-the-original.md"}
"""Pages whose blocks belong together and have a test of their own."""
_blocks = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str]]:
    """Yield each block with the name of its page and its line."""
    for page in PAGES:
        if str(page.relative_to(ROOT)) in ELSEWHERE:
            continue
        text = page.read_text(encoding="utf-8")
        for match in _blocks.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match.group(1)


BLOCKS = dict(blocks())


@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs(name: str, tmp_path: Path) -> None:
    """A block runs to its end in an empty folder, without a warning."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[name]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_blocks_were_found() -> None:
    """The pattern still matches the pages."""
    assert len(BLOCKS) >= 9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_files(page: Path) -> None:
    """Every relative link of a page names a file."""
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    """An example runs to its end and exits with 0."""
    result = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
