"""Write the parts of the reference that are in the code: settings, and events with their payloads.

`make api` runs it. What a page says about an option or an event is its docstring.
"""

import ast
import importlib
import inspect
import logging
import pkgutil
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import jobsync
from jobsync.events import Event, known_events
from jobsync.setting_fields import fields
from jobsync.settings import sections

__all__ = ["PAGES", "render_events", "render_settings"]

_REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
_MARK = "<!-- `make api` writes what follows, from the docstrings. -->\n"
_WORDS: dict[Any, str] = {
    str: "text",
    int: "number",
    float: "number",
    bool: "true or false",
    type(None): "none",
    dict: "object",
}
_FAMILIES = {
    "coord": "Sessions and elections",
    "db": "Databases",
    "resource": "Records",
    "plg:queue": "Queues",
    "plg:scheduler": "Schedulers",
    "plg:ttl": "Expiry",
    "jobs": "Jobs",
    "store": "Stores",
    "jobsync": "Your own code",
}
_SECTIONS = {
    "": ("Store and coordination", "../how-to/coordinate.md#options"),
    "queue": ("Queues", "queue.md#options"),
    "scheduler": ("Schedulers", "scheduler.md#options-of-a-scheduler"),
    "ttl": ("Expiry", "ttl.md#options"),
    "cache": ("Caches", "cache.md#options"),
}
_SETTINGS_INTRO = """\
# Settings

Every option that has a variable, with its default. An argument in code wins over the variable,
the variable over `jobsync.toml`, and that over `[tool.jobsync]` in `pyproject.toml`:
[how to configure](../how-to/configure.md). Durations are seconds. Where the default is `None`, the
meaning says what applies.

The settings of a `Job` have [a page of their own](coordination-config.md).
"""


def render_settings() -> str:
    """Return the page of settings."""
    _import_all()
    parts = [_SETTINGS_INTRO, _MARK]
    for section, (title, link) in _SECTIONS.items():
        table = f", table `[{section}]` of `jobsync.toml`" if section else ""
        parts.append(f"## {title}\n\n[More about them]({link}){table}.\n")
        rows = ["| option | default | variable | meaning |", "|---|---|---|---|"]
        for kind in sections()[section]:
            meanings = _read_attributes(kind)
            rows += [
                f"| `{field.name}` | `{_show_default(field.default)}` | "
                f"`{'_'.join(['JOBSYNC', *filter(None, [section]), field.name]).upper()}` | "
                f"{meanings[field.name]} |"
                for field in fields(kind)
            ]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def render_events() -> str:
    """Return the page of events: its introduction as it is, then the tables."""
    page = (_REFERENCE / "events.md").read_text(encoding="utf-8")
    parts = [page.partition(_MARK)[0].rstrip() + "\n", _MARK]
    events = _list_events()
    for family, title in _FAMILIES.items():
        rows = [
            f"| {names} | {_describe_payload(kind)} | {_describe(kind)} |"
            for kind, names in events
            if kind.name.startswith(f"{family}:")
        ]
        header = "| event | payload | meaning |\n|---|---|---|\n"
        parts.append(f"## {title}\n\n{header}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


PAGES = {
    _REFERENCE / "settings.md": render_settings,
    _REFERENCE / "events.md": render_events,
}
"""How each page is made."""


def _import_all() -> None:
    """Import every module: what it defines is known then."""
    for module in pkgutil.walk_packages(jobsync.__path__, "jobsync."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _show_default(value: object) -> str:
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)


def _read_attributes(kind: type[Any]) -> dict[str, str]:
    """Return what the docstring of a settings type says about each field."""
    section = inspect.getdoc(kind).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(section), re.MULTILINE)
    return {name: _start_large(" ".join(text.split())) for name, text in entries}


def _start_large(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_events() -> list[tuple[type[Event], str]]:
    """Return the events of the library, each with its names, in the order of the source."""
    _import_all()
    kinds = {
        kind
        for name, kind in known_events().items()
        if kind.__module__.startswith("jobsync.") and name == kind.name
    }
    ordered = sorted(kinds, key=lambda kind: (kind.__module__, _find_line(kind), kind.name))
    return [(kind, "<br>".join(f"`{name}`" for name in _list_names(kind))) for kind in ordered]


def _list_names(kind: type[Event]) -> list[str]:
    # The page says once that all events of a queue have these.
    others = [name for name in kind.aliases if not name.startswith("plg:s3-queue:")]
    return [kind.name, *others]


def _find_line(kind: type[Any]) -> int:
    try:
        return inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return 0


def _describe(kind: type[Event]) -> str:
    """Return the docstring of an event in one line, and its level if it is logged as a problem."""
    text = " ".join((inspect.getdoc(kind) or "").split())
    level = logging.getLevelName(kind.level).lower()
    return f"{text} Logged as {level}." if kind.level >= logging.WARNING else text


def _describe_payload(kind: type[Event]) -> str:
    notes = {name: note for each in reversed(kind.__mro__) for name, note in _read_notes(each)}
    hints = get_type_hints(kind)
    described = []
    for name in kind.__struct_fields__:
        note = notes.get(name, "")
        words = _describe_type(hints[name])
        described.append(f"`{name}`: {words}{f'; {note}' if note else ''}")
    return "<br>".join(described)


def _read_notes(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield each field of a class that has a docstring below it."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(note))),
            ):
                text = " ".join(note.split()).removesuffix(".")
                yield name, text[:1].lower() + text[1:]


def _describe_type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is ClassVar or hint is Any or hint is object:
        return "any value"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(each) for each in arguments)
    if origin in (tuple, list):
        return f"list of {_describe_type(arguments[0])}"
    if origin is dict:
        return "object"
    if hasattr(hint, "__metadata__"):
        return _describe_type(arguments[0])
    return _WORDS.get(hint) or str(getattr(hint, "__name__", hint))


def main() -> None:
    """Write the pages."""
    for page, render in PAGES.items():
        page.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
