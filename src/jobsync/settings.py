"""Settings: every one has one value and one known origin.

The first source that has a setting wins, setting by setting: the code, the environment
(`JOBSYNC_POLL`, or `JOBSYNC_QUEUE_POLL` for the section `queue`), `jobsync.toml`,
`[tool.jobsync]` in `pyproject.toml`, and the default. `None` in code and an empty variable count
as absent.

A mistyped name or a wrong value is never skipped: the error states where it is and what was
probably meant. No secret is ever shown.

A settings type is a frozen, keyword-only struct whose docstrings give the reasons for its
defaults; `CoordinationConfig` is a frozen dataclass. `@in_section` registers a type, so that
mistyped names can be recognised.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from jobsync.core.urls import parse_url
from jobsync.errors import Invalid, Misconfigured, closest_name
from jobsync.setting_fields import (
    Origin,
    convert_value,
    decapitalise,
    describe_wrong_value,
    fields,
    mask_unknown,
    show_field,
    show_settings,
)

__all__ = [
    "COMMAND_LINE",
    "Layer",
    "Resolved",
    "Settings",
    "Sources",
    "StoreSettings",
    "check_given",
    "combine",
    "in_section",
    "name_variable",
    "resolve",
    "sections",
]

T = TypeVar("T")

_PREFIX = "JOBSYNC_"
COMMAND_LINE = frozenset(
    {
        *("AFTER", "APP", "APPNAME", "CHECK", "COMMAND", "CONCURRENCY", "CONFIG", "COUNT"),
        *("DATE", "DELAY", "DEMO_KEEP", "DEMO_SECONDS", "DEMO_URL", "DEMO_WORKERS"),
        *("GRACE", "GROUP", "HEARTBEAT_FILE", "HTTP", "JOB", "JSON"),
        *("KEY", "LIMIT", "LIVE", "LOG_FORMAT", "LOG_LEVEL", "MAX_AGE", "NAMESPACE"),
        *("NEW_SCHEDULE", "NEW_TIMEZONE", "PRIORITY", "PROCESSES", "QUEUE", "QUEUES"),
        *("REASON", "SINCE", "STATE", "STATUS", "TABLES_ONLY", "TARGET", "TASK", "TIMEOUT"),
        *("WHERE",),
    }
)
"""Variables of the command line, which are not settings: they occur in shared environments."""

# A service named "jobsync" makes Kubernetes set these in every pod beside it.
_is_service_name = re.compile(
    r"JOBSYNC_(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT(?:_\d+_(?:TCP|UDP|SCTP).*)?)"
).fullmatch
_is_service_value = re.compile(r"(?:tcp|udp|sctp)://.*").fullmatch
_split_toml_error = re.compile(r"(.*) \(at (.*)\)", re.DOTALL).fullmatch


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of settings types. Its repr shows no secret."""

    def __repr__(self) -> str:
        return show_settings(self)


_sections: dict[str, tuple[type[Any], ...]] = {}


def in_section(section: str) -> Callable[[type[T]], type[T]]:
    """Register a settings type under a section; the section "" is the top level."""

    def register(kind: type[T]) -> type[T]:
        _sections[section] = (*_sections.get(section, ()), kind)
        return kind

    return register


def sections() -> Mapping[str, tuple[type[Any], ...]]:
    """Return the known sections, each with the settings types that share it."""
    return dict(_sections)


@in_section("")
class StoreSettings(Settings, frozen=True, kw_only=True):
    """The store to use.

    Attributes:
        url: a file in the working directory by default. It needs no server and survives
            a restart, and every process started in that directory shares it.
    """

    url: str = "sqlite:///jobsync.db"

    def __post_init__(self) -> None:
        parse_url(self.url)


Layer: TypeAlias = Mapping[str, tuple[Origin, Any]]
"""The settings of one source by name, each with its origin."""


class Sources(msgspec.Struct, frozen=True):
    """The sources outside the code: variables, and tables with the file that they are in."""

    environ: Mapping[str, str] = {}
    documents: tuple[tuple[str, dict[str, Any]], ...] = ()

    @classmethod
    def load(cls, environ: Mapping[str, str], directory: Path) -> "Sources":
        """Read the files of a directory; a missing file counts as empty.

        Raises:
            Misconfigured: a file is not TOML; names the file and the line.
        """
        documents = []
        if own := _read_toml(directory / "jobsync.toml"):
            documents.append(("jobsync.toml", own))
        tools = _read_toml(directory / "pyproject.toml").get("tool", {})
        shared = _check_table("pyproject.toml [tool]", tools).get("jobsync", {})
        where = "pyproject.toml [tool.jobsync]"
        if table := _check_table(where, shared):
            documents.append((where, table))
        return cls(dict(environ), tuple(documents))

    def __repr__(self) -> str:
        # The environment of a process holds secrets of other programs as well.
        return f"Sources(documents={[where for where, _ in self.documents]})"


class Resolved(msgspec.Struct, Generic[T], frozen=True):
    """Settings, each with its origin."""

    value: T
    origins: Mapping[str, Origin]

    def origin(self, name: str) -> Origin:
        """Return the origin of a setting."""
        return self.origins[name]

    def explain(self) -> str:
        """Return one line for each setting: name, value and origin. Secrets are masked."""
        return "\n".join(
            f"{f.name} = {show_field(f, getattr(self.value, f.name))}  ({self.origins[f.name]})"
            for f in fields(self.value)
        )

    def __repr__(self) -> str:
        return f"Resolved({type(self.value).__name__}: {'; '.join(self.explain().splitlines())})"


def resolve(
    kind: type[T], given: Mapping[str, Any], sources: Sources, *, section: str = ""
) -> Resolved[T]:
    """Find the value and the origin of each setting.

    Raises:
        Invalid: the code has an unknown name or a wrong value.
        Misconfigured: the environment or a file has; names the variable or the line.
    """
    _check_names(kind, given)
    _check_environ(kind, sources.environ, section)
    tables = [
        (where, _get_table(kind, where, table, section)) for where, table in sources.documents
    ]
    names = [field.name for field in fields(kind)]
    layers = [
        {name: (Origin("code"), value) for name, value in given.items() if value is not None},
        _read_environ(names, sources.environ, section),
        *(_read_table(names, where, table, section) for where, table in tables),
    ]
    for field in fields(kind):
        if field.required and not any(field.name in layer for layer in layers):
            fix = f"pass it, or set {name_variable(section, field.name)}"
            raise Invalid(field.name, None, "is required", fix)
    return combine(kind, layers)


def combine(kind: type[T], layers: Iterable[Layer]) -> Resolved[T]:
    """Return each setting with the value of the first layer that has it, or its default.

    Raises:
        Invalid: the code has a wrong value.
        Misconfigured: another source has; names the place.
    """
    merged: dict[str, tuple[Origin, Any]] = {}
    for layer in layers:
        merged = {**layer, **merged}
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for field in fields(kind):
        origin, value = merged.get(field.name, (Origin("default"), None))
        origins[field.name] = origin
        if origin.kind != "default":
            values[field.name] = convert_value(field, value, origin)
    return Resolved(_build(kind, values, origins), origins)


def check_given(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values from code in their fields' types, without those that are None.

    Raises:
        Invalid: a name is unknown, or a value is wrong.
    """
    _check_names(kind, given)
    known = {field.name: field for field in fields(kind)}
    present = {name: value for name, value in given.items() if value is not None}
    return {
        name: convert_value(known[name], value, Origin("code")) for name, value in present.items()
    }


def _read_environ(names: Iterable[str], environ: Mapping[str, str], section: str) -> Layer:
    variables = {name: name_variable(section, name) for name in names}
    return {
        name: (Origin("environment", variable), text)
        for name, variable in variables.items()
        if (text := environ.get(variable)) and not _is_service_value(text)
    }


def _read_table(names: Iterable[str], where: str, table: Mapping[str, Any], section: str) -> Layer:
    return {
        name: (Origin("file", _place(where, section, name)), table[name])
        for name in names
        if name in table
    }


def _build(kind: type[T], values: dict[str, Any], origins: Mapping[str, Origin]) -> T:
    """Create the struct; an error of its own checks is reported for the value's origin."""
    try:
        return kind(**values)
    except Invalid as error:
        field = next((f for f in fields(kind) if f.name == error.field), None)
        if field is None:
            raise
        # The error of a URL is redacted already, and redacting twice changes nothing.
        origin = origins[field.name]
        wrong = describe_wrong_value(field, error.value, origin, error.problem, error.fix)
    raise wrong


def name_variable(section: str, name: str) -> str:
    """Return the environment variable of a setting."""
    return _PREFIX + "_".join(filter(None, (section, name))).upper()


def _place(where: str, section: str, name: str) -> str:
    return f"{where} {section}.{name}" if section else f"{where} {name}"


def _names(kind: type[Any], section: str) -> list[str]:
    """Return the names in a section: those of this type first, then of the others."""
    kinds = (kind, *_sections.get(section, ()))
    return list(dict.fromkeys(field.name for k in kinds for field in fields(k)))


def _suggest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    hint = closest_name(name, names)
    return f"did you mean {hint}?" if hint else f"use one of {', '.join(sorted(names))}"


def _check_names(kind: type[Any], given: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(kind)]
    for name, value in given.items():
        if name not in known:
            shown = mask_unknown(name, value, known)
            problem = f"is not a setting of {kind.__name__}"
            raise Invalid(name, shown, problem, _suggest(name, known))


def _check_environ(kind: type[Any], environ: Mapping[str, str], section: str) -> None:
    """Check for variables with mistyped names. Other programs may use our prefix too."""
    # Without the prefix: it would make any two of our names look alike.
    known = [
        name_variable(other, name).removeprefix(_PREFIX)
        for other in {*_sections, section}
        for name in (_names(kind, other) if other == section else _registered(other))
    ]
    for variable in sorted(environ):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in known or _is_foreign(variable):
            continue
        if hint := closest_name(name, known):
            shown = mask_unknown(name, environ[variable], known)
            fix = f"did you mean {_PREFIX}{hint}?"
            raise Misconfigured(variable, shown, "is not a setting", fix)


def _registered(section: str) -> list[str]:
    return [field.name for kind in _sections[section] for field in fields(kind)]


def _is_foreign(variable: str) -> bool:
    return (
        variable.removeprefix(_PREFIX) in COMMAND_LINE
        or variable.startswith(f"{_PREFIX}TEST_")
        or bool(_is_service_name(variable))
    )


def _get_table(
    kind: type[Any], where: str, table: Mapping[str, Any], section: str
) -> Mapping[str, Any]:
    """Return a section's table of a document, after checking its names."""
    if section:
        table = _check_table(f"{where} {section}", table.get(section, {}))
    names = _names(kind, section)
    tables = () if section else tuple(filter(None, _sections))
    for name, value in table.items():
        place = _place(where, section, name)
        if name in names:
            continue
        if name in tables:
            _check_table(place, value)
        elif isinstance(value, dict):
            fix = _suggest(name, tables or names)
            raise Misconfigured(place, "a table", "is not a section", fix)
        else:
            shown = mask_unknown(name, value, names)
            raise Misconfigured(place, shown, "is not a setting", _suggest(name, names))
    return table


def _check_table(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        # The table of a file that it is in, if any, and its own name.
        name = ".".join(part.strip("[]") for part in place.split(" ")[1:])
        # The value is not shown: it may hold a secret.
        raise Misconfigured(place, type(value).__name__, "must be a table", f"write [{name}]")
    return value


# Every database and plugin reads the same file; what is read is not changed.
_parse_toml = lru_cache(maxsize=4)(tomllib.loads)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return _parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        parts = _split_toml_error(str(error))
        problem, place = parts.groups() if parts else (str(error), "")
        problem, fix = f"is not TOML: {decapitalise(problem)}", f"correct that line of {path}"
    except UnicodeDecodeError as error:
        problem, place, fix = "is not UTF-8", f"byte {error.start}", f"save {path} as UTF-8"
    except OSError as error:
        problem, place, fix = f"cannot be read: {error.strerror}", str(path), "repair or remove it"
    # Not raised within `except`: the error would carry all of the file as its context.
    raise Misconfigured(path.name, place, problem, fix)
