"""What the site has that is not in `docs/`: README, changelog, guides, and what draws diagrams.

A hook of MkDocs (`mkdocs.yml`). The files are shown where they are: nothing is copied, and their
links, which are relative to the repository, lead to the pages of the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
    "src/jobsync/coordination/README.md": "coordination.md",
}
"""The page of each file outside `docs/`."""

MERMAID = ROOT / ".venv-docs" / "package" / "dist" / "mermaid.min.js"
"""Draws the diagrams, if npm could fetch it: so the site makes no requests to other servers."""

_INSIDE = {page: file for file, page in OUTSIDE.items()}
_links = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside `docs/` to the site."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - only the build has it

    for file, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    if MERMAID.exists():
        files.append(File.generated(config, MERMAID.name, abs_src_path=str(MERMAID)))
        config["extra_javascript"].append(MERMAID.name)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links that lead to pages of the site."""
    return translate_links(markdown, page.file.src_uri)


def translate_links(text: str, page: str) -> str:
    """Return a text whose links from and to files outside `docs/` are those of the site."""
    source = _INSIDE.get(page, f"docs/{page}")

    def translate(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        inside = OUTSIDE.get(target, target.removeprefix("docs/"))
        if inside == target:
            return link[0]
        return link[1] + posixpath.relpath(inside, posixpath.dirname(page) or ".") + link[3]

    return _links.sub(translate, text)
