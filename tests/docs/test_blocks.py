"""Every Python block of the README and the documentation runs as it is printed.

A reader runs the blocks of a page one after the other in one folder, and some of them again.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from page_runner import PageRunner

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {"docs/how-to/migrate-from-the-original.md"}
"""Pages whose blocks belong together and have a test of their own."""
ONCE: set[str] = set()
"""Pages with blocks that do not run after each other in one folder yet."""
_blocks = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_pages() -> dict[str, list[tuple[int, str]]]:
    """Return the blocks of each page, each with its line."""
    found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        text = page.read_text(encoding="utf-8")
        for match in _blocks.finditer(text):
            found[name].append((text.count("\n", 0, match.start()) + 1, match[1]))
    return {name: blocks for name, blocks in found.items() if name not in ELSEWHERE}


BLOCKS = read_pages()


@pytest.fixture(scope="module")
def runner() -> Iterator[PageRunner]:
    """Runs blocks."""
    with PageRunner() as runner:
        yield runner


def run_blocks(runner: PageRunner, page: str, runs: Sequence[tuple[Path, int, str]]) -> None:
    """Run blocks at the same time, each in its folder; fail with what a wrong one prints."""
    results = runner.run([(folder, text) for folder, _, text in runs])
    for (folder, line, _), (code, printed) in zip(runs, results, strict=True):
        assert code == 0, f"{page}:{line} in {folder}\n{printed}"


@pytest.mark.parametrize("page", BLOCKS)
def test_the_blocks_of_a_page_run_alone_in_order_and_again(
    page: str, runner: PageRunner, tmp_path: Path, full_scale: bool
) -> None:
    """A block is a complete program, and no run of any block keeps it from running.

    Each runs in an empty folder. Those that leave files there then run in one folder, in order;
    and at full scale all of these again.
    """
    alone = [(tmp_path / str(line), line, text) for line, text in BLOCKS[page]]
    shared = tmp_path / "shared"
    for folder in (*(folder for folder, _, _ in alone), shared):
        folder.mkdir()
    run_blocks(runner, page, alone)
    storing = [(shared, line, text) for folder, line, text in alone if any(folder.iterdir())]
    for run in [] if page in ONCE else storing * (1 + full_scale):
        run_blocks(runner, page, [run])


def test_blocks_were_found() -> None:
    """The pattern still matches the pages."""
    assert sum(map(len, BLOCKS.values())) >= 80
