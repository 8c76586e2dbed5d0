"""Every page is in the navigation of the site, and every link leads to a page and a heading."""

import posixpath
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from site_pages import OUTSIDE, translate_links

ROOT = Path(__file__).parents[2]
PAGES = [*OUTSIDE, *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))]
_blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_spans = re.compile(r"`[^`\n]*`")
_links = re.compile(r"\]\(([^)\s]+)\)")


def read_links(file: str) -> list[str]:
    """Return the links of a file to others of the repository; those in code do not count."""
    text = _spans.sub("", _blocks.sub("", (ROOT / file).read_text(encoding="utf-8")))
    return [link for link in _links.findall(text) if ":" not in link]


@cache
def find_anchors(file: str) -> frozenset[str]:
    """Return the anchors of the headings of a file, as GitHub and the site have them."""
    text = _blocks.sub("", (ROOT / file).read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower())
        .strip()
        .replace(" ", "-")
        for title in titles
    )


@pytest.mark.parametrize("file", PAGES)
def test_links_lead_to_files_and_headings(file: str) -> None:
    """A file that was moved, or a heading that was renamed, is renamed in links too."""
    wrong = []
    for link in read_links(file):
        name, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), name)) if name else file
        if not (ROOT / target).exists() or (anchor and anchor not in find_anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_once_in_the_navigation() -> None:
    """`make docs` shows it; a page that no reader can reach is missed here."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = Counter(re.findall(r"^ *- (?:[^:\n]+: )?(\S+\.md)$", navigation, re.MULTILINE))
    assert listed == Counter(OUTSIDE.get(file, file.removeprefix("docs/")) for file in PAGES)


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/tutorial.md#b)", "[a](tutorial.md#b)"),
        ("index.md", "[a](CHANGELOG.md)", "[a](changelog.md)"),
        ("tests.md", "[a](../docs/how-to/queue.md)", "[a](how-to/queue.md)"),
        ("how-to/queue.md", "[a](../../CHANGELOG.md#b)", "[a](../changelog.md#b)"),
        ("how-to/queue.md", "[a](../reference/queue.md)", "[a](../reference/queue.md)"),
        ("how-to/queue.md", "[a](#b), [c](https://d.org/e.md)", "[a](#b), [c](https://d.org/e.md)"),
    ],
)
def test_links_to_files_outside_the_pages_are_translated(
    page: str, text: str, expected: str
) -> None:
    """The site shows README, changelog and contributing beside the pages of `docs/`."""
    assert translate_links(text, page) == expected
