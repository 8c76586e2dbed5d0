"""Names in the source tree: one name has one meaning, and a small module has a reason."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import jobsync

ROOT = Path(jobsync.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
MIN_LINES = 60
REASON = "On its own because"


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _list_types(tree: ast.Module) -> list[str]:
    """Return the names of classes and type aliases at all levels, private ones included."""
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                names.append(name)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if ast.unparse(annotation).endswith("TypeAlias"):
                    names.append(name)
    return names


def test_no_type_shares_its_name_with_another() -> None:
    """A class or type alias name occurs once in the source tree."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for name in _list_types(_parse(path)):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_types_are_found() -> None:
    """The search sees nested and private classes, and aliases."""
    tree = ast.parse("class A:\n    class _B: ...\nC: TypeAlias = int\nd: int = 1\n")
    assert _list_types(tree) == ["A", "C", "_B"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_small_module_states_its_reason(path: Path) -> None:
    """A module under 60 lines belongs in its one user, unless its docstring has the reason."""
    if path.stem in {"__init__", "__main__"}:
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    doc = (ast.get_docstring(_parse(path)) or "").splitlines()
    has_reason = any(line.startswith(REASON) for line in doc)
    assert len(lines) >= MIN_LINES or has_reason, (
        f"{len(lines)} lines: move it into its user, or add a paragraph '{REASON} …'"
    )
