"""Where the settings of a `Job` come from.

For each setting the first source wins:

    0. the `url` of a `Job`
    1. `coordination_config`, if the setting was given there
    2. `config.sync.coordination.*` and `config.sync.sql.*`: a module, an object or a dict
    3. the environment: `SYNC_*` and `SYNC_SQL_*`
    4. the default

A mistyped name or a wrong value is never ignored: the error names its source and, if possible,
the name that was meant. A server without a database, or the reverse, is refused if any part of
the address is in a config or in the environment: what is missing would differ between machines.
"""

from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

from jobsync.core.secrets import MASK
from jobsync.errors import Invalid, Misconfigured, closest_name
from jobsync.jobs.coordination_config import ADDRESS, CoordinationConfig
from jobsync.setting_fields import Origin, fields
from jobsync.settings import Layer, Resolved, combine

__all__ = ["resolve_coordination"]

_SQL = frozenset({"url", *ADDRESS, "appname", "timezone", "profile"})
_SQL_NAMES = {**{name: name for name in _SQL}, "passwd": "password"}
_COORDINATION_NAMES = {
    field.name: field.name for field in fields(CoordinationConfig) if field.name not in _SQL
}
_SHORT_VARIABLES = {
    "enabled": "SYNC_COORDINATION_ENABLED",
    "password": "SYNC_SQL_PASSWD",
    "lock_orphan_warning_hours": "SYNC_LOCK_ORPHAN_WARNING",
    "rebalance_check_interval_sec": "SYNC_REBALANCE_INTERVAL",
    "dead_node_check_interval_sec": "SYNC_DEAD_NODE_INTERVAL",
    "token_refresh_initial_interval_sec": "SYNC_TOKEN_REFRESH_INITIAL",
    "token_refresh_steady_interval_sec": "SYNC_TOKEN_REFRESH_STEADY",
}


def _variable(name: str) -> str:
    if name in _SHORT_VARIABLES:
        return _SHORT_VARIABLES[name]
    return f"SYNC_{'SQL_' if name in _SQL else ''}{name.removesuffix('_sec').upper()}"


_VARIABLES = {field.name: _variable(field.name) for field in fields(CoordinationConfig)}
_OTHER_VARIABLES = {
    "dbname": "SYNC_SQL_DATABASE",
    "user": "SYNC_SQL_USERNAME",
    "password": "SYNC_SQL_PASSWORD",
}
"""Names of the original that are accepted beside ours."""

_LIBPQ_VARIABLES = {
    "host": ("PGHOST", "PGHOSTADDR", "PGSERVICE"),
    "dbname": ("PGDATABASE", "PGSERVICE"),
}
"""The settings without which an address is half, and the variables from which libpq takes them."""


def resolve_coordination(
    coordination_config: CoordinationConfig | None = None,
    config: Any = None,
    environ: Mapping[str, str] | None = None,
    url: str | None = None,
) -> Resolved[CoordinationConfig]:
    """Return the value and the origin of each setting.

    Args:
        coordination_config: settings in code.
        config: an object or module with `sync.coordination.*` and `sync.sql.*`.
        environ: the environment.
        url: the store; has precedence over all sources.

    Raises:
        Invalid: an argument has the wrong type.
        Misconfigured: the config or the environment has an unknown name or a wrong value, or
            names half a database; names the source.
    """
    layers = [
        {} if url is None else {"url": (Origin("code"), url)},
        _read_explicit(coordination_config),
        _read_config(config),
        _read_environ(environ or {}),
    ]
    found = combine(CoordinationConfig, _hide_other_kind(layers))
    _check_address(found, environ or {})
    return found


def _check_address(found: Resolved[CoordinationConfig], environ: Mapping[str, str]) -> None:
    """Refuse half an address that a config or the environment contributes to."""
    origins = {name: found.origin(name) for name in sorted(ADDRESS)}
    outside = [o for o in origins.values() if o.kind in ("config", "environment")]
    for name, variables in _LIBPQ_VARIABLES.items():
        is_set = origins[name].kind != "default" or any(map(environ.get, variables))
        if outside and not is_set:
            is_config = outside[0].kind == "config"
            place = f"config.sync.sql.{name}" if is_config else _VARIABLES[name]
            whole = "config.sync.sql.url" if is_config else _VARIABLES["url"]
            raise Misconfigured(
                place,
                None,
                f"must be set, because {outside[0].where} is",
                f"set host and dbname, or {whole} instead",
            )


def _read_explicit(config: CoordinationConfig | None) -> Layer:
    if config is None:
        return {}
    if not isinstance(config, CoordinationConfig):
        raise Invalid(
            "coordination_config",
            type(config).__name__,
            "is not a CoordinationConfig",
            "write CoordinationConfig(total_tokens=…)",
        )
    return {name: (Origin("code"), getattr(config, name)) for name in config.given}


def _read_config(config: Any) -> Layer:
    if config is ...:
        raise Invalid("config", ..., "is not a config", "pass a module, an object or None")
    sync = _get(config, "sync")
    return {
        **_read_part(_get(sync, "coordination"), "sync.coordination", _COORDINATION_NAMES),
        **_read_part(_get(sync, "sql"), "sync.sql", _SQL_NAMES),
    }


def _read_part(part: Any, path: str, names: Mapping[str, str]) -> Layer:
    """Read one part of a config. `names` maps the names that it may have to settings."""
    layer: dict[str, tuple[Origin, Any]] = {}
    for name, value in _attributes(part, names).items():
        if name not in names:
            # Not shown: it may be a secret.
            raise Misconfigured(
                f"config.{path}.{name}", MASK, "is not a setting", _hint(name, names)
            )
        _add(layer, names[name], Origin("config", f"config.{path}.{name}"), value)
    return layer


def _add(layer: dict[str, tuple[Origin, Any]], name: str, origin: Origin, value: Any) -> None:
    """Add a setting to a layer, unless the layer has it under another name already.

    Raises:
        Misconfigured: it has another value there.
    """
    first, known = layer.setdefault(name, (origin, value))
    if known != value:
        # Not shown: it may be a secret.
        problem = f"differs from {first.where}, which is the same setting"
        raise Misconfigured(origin.where, MASK, problem, "keep one of the two")


def _hint(name: str, names: Collection[str]) -> str:
    hint = closest_name(name, names)
    return f"did you mean {hint}?" if hint else f"use one of {', '.join(sorted(names))}"


def _get(holder: Any, name: str) -> Any:
    # Items first: some settings objects create an attribute when it is read.
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _attributes(part: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a module, an object or a dict, known or not."""
    if isinstance(part, Mapping):
        found = dict(part)
    else:
        known = {name: getattr(part, name, None) for name in names}
        found = {**known, **getattr(part, "__dict__", {})}
    return {name: value for name, value in found.items() if _is_setting(name, value)}


def _is_setting(name: str, value: Any) -> bool:
    """Whether an attribute is a setting: not private, not a function or module, not empty."""
    if str(name).startswith("_") or isinstance(value, ModuleType) or callable(value):
        return False
    return value is not None and not (isinstance(value, Mapping) and not value)


def _read_environ(environ: Mapping[str, str]) -> Layer:
    known = [*_VARIABLES.values(), *_OTHER_VARIABLES.values()]
    for variable in sorted(environ.keys() - known):
        # Other programs may use the prefix too: only close misspellings of ours are refused.
        ours = variable.startswith("SYNC_")
        if ours and (hint := closest_name(variable, known, likeness=0.9)):
            raise Misconfigured(variable, MASK, "is not a setting", f"did you mean {hint}?")
    layer: dict[str, tuple[Origin, Any]] = {}
    for name, variable in (*_VARIABLES.items(), *_OTHER_VARIABLES.items()):
        if text := environ.get(variable):
            _add(layer, name, Origin("environment", variable), text)
    return layer


def _hide_other_kind(layers: Iterable[Layer]) -> list[Layer]:
    """Treat a URL and its parts as one setting: the first source hides the other kind."""
    visible: list[Layer] = []
    hidden: frozenset[str] = frozenset()
    for layer in layers:
        left = {name: found for name, found in layer.items() if name not in hidden}
        visible.append(left)
        if "url" in left:
            hidden |= ADDRESS
        elif left.keys() & ADDRESS:
            hidden |= {"url"}
    return visible
