"""Describe the public interface as text: names of `jobsync`, events, commands.

Annotations, docstrings, modules and classes of events are left out: they may change.

python tests/support/public_api.py      rewrites tests/unit/public_api.txt (make api)
"""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from command_tree import list_commands, open_context

import jobsync
from jobsync.cli.main import cli
from jobsync.events import known_events

__all__ = ["RECORDED", "describe"]

RECORDED = Path(__file__).parents[1] / "unit" / "public_api.txt"
_HEAD = "# The public interface of jobsync. Written by `make api`; compared by test_public.py.\n"
_PROTOCOLS = {
    "__aenter__",
    "__aiter__",
    "__await__",
    "__call__",
    "__contains__",
    "__enter__",
    "__getattr__",
    "__getitem__",
    "__iter__",
    "__len__",
}


def describe() -> str:
    """Return the description, sorted, with one fact on item line."""
    for module in pkgutil.walk_packages(jobsync.__path__, "jobsync."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    parts = [_HEAD]
    for name in jobsync.__all__:
        thing = getattr(jobsync, name)
        lines = _describe_class(name, thing) if isinstance(thing, type) else [_call(name, thing)]
        parts.append("\n".join(lines) + "\n")
    parts.append("\n".join(_describe_events()) + "\n")
    parts.append("\n".join(_describe_commands()) + "\n")
    return "\n".join(parts)


def _describe_class(name: str, kind: type) -> Iterator[str]:
    if kind.__name__ != name:
        yield f"{name} = {kind.__name__}"
        return
    public = {getattr(jobsync, item) for item in jobsync.__all__}
    bases = [
        base.__name__
        for base in kind.__mro__[1:-1]
        if base in public or base.__module__ in {"builtins", "collections.abc"}
    ]
    yield f"class {name}({', '.join(bases)})"
    if inspect.getattr_static(kind, "__init__") not in {Exception.__init__, dict.__init__}:
        yield f"    {_call('__init__', kind)}"
    ours = [base for base in kind.__mro__ if base.__module__.startswith("jobsync")]
    protocols = {name for base in ours for name in vars(base)} & _PROTOCOLS
    if protocols:
        yield f"    supports {', '.join(sorted(protocols))}"
    members = {item for base in ours for item in (*vars(base), *_find_attributes(base))}
    for member in sorted(item for item in members if not item.startswith("_")):
        yield f"    {_describe_member(kind, member)}"


def _describe_member(kind: type, name: str) -> str:
    member = inspect.getattr_static(kind, name, None)
    if isinstance(member, property):
        return f"{name}: property"
    if isinstance(member, classmethod | staticmethod):
        return f"{type(member).__name__} {_call(name, getattr(kind, name))}"
    if inspect.isfunction(member):
        return _call(name, member)
    if member is None or inspect.ismemberdescriptor(member):
        return f"{name}: attribute"
    return f"{name}: attribute = {_show(member)}"


def _find_attributes(kind: type) -> set[str]:
    """Return the attributes that methods of a class assign to `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _call(name: str, function: Any) -> str:
    parameters = [
        item.replace(annotation=inspect.Parameter.empty, default=_default(item.default))
        for item in inspect.signature(function).parameters.values()
    ]
    actual = inspect.unwrap(function)
    is_async = inspect.iscoroutinefunction(actual) or inspect.isasyncgenfunction(actual)
    text = str(inspect.Signature(parameters))
    return f"{'async ' if is_async else ''}{name}{text}"


class _Text:
    """A default with the repr of its choice."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(value: Any) -> Any:
    return value if value is inspect.Parameter.empty else _Text(_show(value))


def _show(value: Any) -> str:
    """Return the repr of a plain value, or "..." for any other."""
    if isinstance(value, tuple):
        return f"({', '.join(_show(item) for item in value)})"
    is_plain = value is None or isinstance(value, bool | int | float | str | list | dict)
    return repr(value) if is_plain else "..."


def _describe_events() -> Iterator[str]:
    for name, kind in known_events().items():
        if kind.__module__.startswith("jobsync."):
            aliases = f", also {', '.join(kind.aliases)}" if kind.aliases else ""
            yield f"event {name}{aliases}, level {kind.level}"
            for field in sorted(msgspec.structs.fields(kind), key=lambda field: field.name):
                default = "" if field.required else f" = {_show(field.default)}"
                yield f"    {field.name}{default}"


def _describe_commands() -> Iterator[str]:
    for words, command in list_commands(open_context(cli), "jobsync"):
        yield from _describe_command(words, command)


def _describe_command(path: str, command: click.Command) -> Iterator[str]:
    yield f"command {path}"
    arguments = [item for item in command.params if isinstance(item, click.Argument)]
    options = [item for item in command.params if isinstance(item, click.Option)]
    # The order of arguments counts, that of options does not.
    for parameter in (*arguments, *sorted(options, key=_names)):
        facts = [parameter.param_type_name, _names(parameter), parameter.type.name]
        if isinstance(parameter.type, click.Choice):
            facts.append(f"of {'|'.join(str(item) for item in parameter.type.choices)}")
        if isinstance(parameter.type, click.IntRange | click.FloatRange):
            facts.append(f"from {parameter.type.min} to {parameter.type.max}")
        facts += [
            flag
            for flag in ("required", "multiple", "is_flag", "count", "hidden")
            if getattr(parameter, flag, False)
        ]
        if parameter.nargs != 1:
            facts.append(f"nargs={parameter.nargs}")
        if parameter.envvar:
            facts.append(f"envvar={parameter.envvar}")
        default = parameter.to_info_dict().get("default")
        if default is not None:
            facts.append(f"default={_show(default)}")
        yield f"    {' '.join(facts)}"


def _names(parameter: click.Parameter) -> str:
    return "/".join([*parameter.opts, *parameter.secondary_opts])


if __name__ == "__main__":
    RECORDED.write_text(describe(), encoding="utf-8")
