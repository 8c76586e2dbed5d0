"""Blocks of the source: which ran, and in which a mutant shows."""

import ast
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
from source_blocks import Block, SourceIndex, find_changed_lines, mark_blocks
from source_mutants import SourceMutant

MODULE = '''"""A module."""

from __future__ import annotations

LIMIT = 5
_TWICE = 2 * LIMIT
SQL = load_sql(__file__, "queries.sql")


class Box:
    """A class."""

    size: int = 3

    def grow(self, more):
        """Return a size."""
        if more:
            # More than before.
            return self.size + more
        elif more is None:
            raise KeyError
        for each in ():
            print(each)
        return _TWICE


def run(connection):
    try:
        return connection(SQL["read"])
    except OSError:
        return None
    finally:
        print("end")


def unrelated():
    return LIMITS
'''

QUERIES = """-- fragment: is_live
value IS NOT NULL

-- name: read
SELECT value FROM record WHERE {is_live};

-- name: unused
SELECT 1;
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one module and its SQL."""
    folder = tmp_path / "src" / "pack"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(MODULE, encoding="utf-8")
    (folder / "queries.sql").write_text(QUERIES, encoding="utf-8")
    return tmp_path


def _build_mutant(old: str, new: str, file: str) -> SourceMutant:
    return SourceMutant(
        name="a-name", breaks="A promise.", file=f"src/pack/{file}", old=old, new=new
    )


def _find(root: Path, old: str, new: str, file: str = "module.py") -> list[tuple[str, str]]:
    """Return the functions in which a mutant shows, and the first lines of its blocks."""
    mutant = _build_mutant(old, new, file)
    lines = MODULE.splitlines()
    found = sorted(SourceIndex(root).find(mutant), key=lambda block: block.first)
    return [(block.scope, lines[block.first - 1].strip()) for block in found]


def _run(more: object, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Run a method of the instrumented module; return the blocks that ran, not those of import."""
    memory = types.ModuleType("ran_blocks")
    tree = ast.parse(MODULE)
    blocks = mark_blocks(tree, "module.py", base=7)
    ran = memory.ran = bytearray(7 + len(blocks))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ran_blocks", memory)
    space: dict[str, object] = {"__name__": "module", "__file__": "", "load_sql": lambda *_: {}}
    exec(compile(tree, "module.py", "exec", dont_inherit=True), space)
    assert space["__doc__"] == "A module."
    box = space["Box"]
    assert isinstance(box, type)
    assert box.grow.__doc__ == "Return a size."  # type: ignore[attr-defined]
    ran[:] = bytes(len(ran))
    with pytest.raises(KeyError) if more is None else nullcontext() as raised:
        box().grow(more)
    if raised is not None:
        # Positions stay those of the file.
        assert MODULE.splitlines()[raised.traceback[-1].lineno].strip() == "raise KeyError"
    assert not any(ran[:7])
    return [block for number, block in enumerate(blocks, start=7) if ran[number]]


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        (1, ["if more:", "return self.size + more"]),
        (None, ["if more:", "elif more is None:", "raise KeyError"]),
        (0, ["if more:", "elif more is None:", "for each in ():", "return _TWICE"]),
    ],
)
def test_a_block_that_runs_is_recorded(
    more: object, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each branch, and what follows a statement with statements inside, is a block."""
    found = _run(more, monkeypatch)
    assert [MODULE.splitlines()[block.first - 1].strip() for block in found] == lines
    assert {block.scope for block in found} == {"Box.grow"}


def test_blocks_have_keys_of_their_own() -> None:
    """Recordings name blocks by them."""
    blocks = mark_blocks(ast.parse(MODULE), "module.py")
    assert len({block.key for block in blocks}) == len(blocks)
    functions = {block.scope for block in blocks if not block.runs_at_import}
    assert functions == {"Box.grow", "run", "unrelated"}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        pytest.param(
            "# More than before.\n            return",
            "print()\n            return",
            [("Box.grow", "return self.size + more")],
            id="comment",
        ),
        pytest.param("+ more", "- more", [("Box.grow", "return self.size + more")], id="branch"),
        pytest.param(
            "elif more is", "elif more is not", [("Box.grow", "elif more is None:")], id="elif"
        ),
        pytest.param('    print("end")\n', "    pass\n", [("run", 'print("end")')], id="finally"),
        pytest.param("LIMIT = 5", "LIMIT = 6", [("Box.grow", "return _TWICE")], id="constant"),
        pytest.param(
            "size: int = 3", "size: int = 4", [("Box.grow", "return self.size + more")], id="field"
        ),
        pytest.param(
            "def unrelated():", "def unrelated(a):", [("unrelated", "return LIMITS")], id="header"
        ),
    ],
)
def test_a_mutant_shows_where_its_code_runs_or_its_constant_is_used(
    root: Path, old: str, new: str, found: list[tuple[str, str]]
) -> None:
    """Not in all tests that import the module."""
    assert _find(root, old, new) == found


def test_a_mutated_statement_shows_where_it_is_used(root: Path) -> None:
    """Directly, or by a part that is inserted; if no code names it, in the modules that load it."""
    used = [("run", 'return connection(SQL["read"])')]
    assert _find(root, "FROM record", "FROM records", "queries.sql") == used
    assert _find(root, "IS NOT NULL", "IS NULL", "queries.sql") == used
    everywhere = _find(root, "SELECT 1", "SELECT 2", "queries.sql")
    assert {scope for scope, _ in everywhere} == {"Box.grow", "run", "unrelated"}


@pytest.mark.parametrize(
    ("new", "lines"),
    [("a\nB\nc\n", {2}), ("a\nc\n", {2}), ("a\nb\nx\nc\n", {2, 3}), ("a\nb\nc\nx\n", {3})],
)
def test_only_lines_that_differ_have_changed(new: str, lines: set[int]) -> None:
    """Where lines were added, those around them stand for them."""
    assert find_changed_lines("a\nb\nc\n", new) == lines


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("LIMIT = 5", "LIMIT = 6", {"LIMIT"}),
        ("_TWICE = 2 * LIMIT", "_TWICE = LIMIT", {"_TWICE"}),
        ("size: int = 3", "size: int = 4", {"Box"}),
        ("def run(connection):", "def run(connection=None):", {"run"}),
        ("return LIMITS", "return None", set()),
    ],
)
def test_what_runs_at_import_is_known_by_its_name(
    root: Path, old: str, new: str, names: set[str]
) -> None:
    """A constant, the class around it, or a function whose first line changes."""
    index = SourceIndex(root)
    assert index.find_names(_build_mutant(old, new, "module.py")) == names
    assert index.find_names(_build_mutant("SELECT 1", "SELECT 2", "queries.sql")) == set()
