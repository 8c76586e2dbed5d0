"""What module:name may refer to, and what is said of a program that fails."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jobsync import Database, Invalid, Misconfigured, sync
from jobsync.cli.target import find_url, load_target
from jobsync.stores.memory import MemoryStore

URL = "memory://of-the-app"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty program."""
    module = ModuleType("some_app")
    monkeypatch.setitem(sys.modules, "some_app", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


async def create() -> Database:
    """Return a database later."""
    return Database(URL)


def create_default() -> Database:
    """Return the database of the settings."""
    return Database()


async def create_blocking() -> sync.Database:
    """Return one for blocking callers later."""
    return sync.Database(URL)


@pytest.mark.parametrize(
    ("target", "url"),
    [
        (Database(URL), URL),
        (Database(), None),
        (sync.Database(URL), URL),
        (lambda: Database(URL), URL),
        (create_default, None),
        (lambda: sync.Database(URL), URL),
        (lambda url=URL: Database(url), URL),
        (create, URL),
        (create_blocking, URL),
    ],
)
def test_each_way_to_get_a_database_has_its_url(app: ModuleType, target: Any, url: str) -> None:
    """Itself, or what a function returns, at once or later; without a URL, that of the settings."""
    app.db = target  # type: ignore[attr-defined]
    assert find_url("some_app:db", "--app") == url


def fail() -> Database:
    """Fail."""
    raise LookupError("no settings")


@pytest.mark.parametrize(
    ("target", "kind", "problem"),
    [
        (Database, Invalid, "is not a Database"),
        (int, Invalid, "is not a Database"),
        (lambda one: one, Invalid, "is a function with arguments, not a Database"),
        (lambda: 5, Invalid, "returns int"),
        (lambda: None, Invalid, "returns NoneType"),
        (lambda: Database(connection=MemoryStore("x")), Invalid, "is a database on an open store"),
        # It is written in C, and does not tell what it takes.
        (max, Misconfigured, "raised an error: TypeError: max expected"),
        (fail, Misconfigured, "raised an error: LookupError: no settings"),
    ],
)
@pytest.mark.parametrize("field", ["--app", "TARGET"])
def test_an_error_names_what_was_passed(
    app: ModuleType, field: str, target: object, kind: type[Exception], problem: str
) -> None:
    """An option or an argument, whenever it is found out."""
    app.db = target  # type: ignore[attr-defined]
    with pytest.raises(kind) as raised:
        find_url("some_app:db", field)
    assert str(raised.value).startswith(f"{field} {problem}")
    assert "some_app:db" in str(raised.value)


SETTINGS = """
def read(name):
    value = {}[name]
    return value
"""
USES = """
from broken_settings import read

def db():
    return find(1)

def find(depth):
    return read("url") if depth == 0 else find(depth - 1)
"""


@pytest.mark.parametrize(
    ("program", "places"),
    [
        ("def db():\n    return find()\n\ndef find():\n    {}['url']\n", "app:2 app:5"),
        ("def db():\n    return {}['url']\n", "app:2"),
        ("{}['url']\n", "app:1"),
        (USES, "app:5 app:8 app:8 settings:3"),
    ],
)
def test_the_line_to_correct_is_where_it_was_raised(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    places: str,
) -> None:
    """In whichever file it is, not where it was called from; those lines are printed, too."""
    for name, text in (("app", program), ("settings", SETTINGS)):
        (tmp_path / f"broken_{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"broken_{name}", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(Misconfigured) as raised:
        find_url("broken_app:db", "--app")
    trace = re.findall(r'/(\w+\.py)", line (\d+)', capsys.readouterr().err)
    file, line = trace[-1]
    assert raised.value.fix == f"correct {file}, line {line}"
    found = [f"{file.removesuffix('.py').removeprefix('broken_')}:{line}" for file, line in trace]
    assert found == places.split()


@pytest.mark.parametrize("module", ["p\\shop", "p/shop", "..shop", "p.shop.py"])
@pytest.mark.parametrize("load", [load_target, find_url])
def test_a_path_is_refused_as_such(
    app: ModuleType, load: Callable[[str, str], object], module: str
) -> None:
    """With either separator, and with the ending of a file."""
    del app
    with pytest.raises(Invalid, match=r"^--app has the path of a file, not a module"):
        load(f"{module}:db", "--app")
