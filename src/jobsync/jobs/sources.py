"""Where the settings of a `Job` come from: the first place that gives one wins.

Setting by setting:

    1. `coordination_config`, as far as it was written out
    2. `config.sync.coordination.*` and `config.sync.sql.*`: a module, an object or a dict
    3. the environment: `SYNC_*` and `SYNC_SQL_*`
    4. the default

A mistyped name or a wrong value is never skipped: the error names where it stands and what
was probably meant.
"""

from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

from msgspec.structs import fields

from jobsync.core.secrets import MASK
from jobsync.errors import Invalid, Misconfigured, closest_name
from jobsync.jobs.config import ADDRESS, CoordinationConfig
from jobsync.settings import Layer, Origin, Resolved, combine

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


def resolve_coordination(
    coordination_config: CoordinationConfig | None = None,
    config: Any = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved[CoordinationConfig]:
    """Find the value and the origin of each setting.

    Raises:
        Invalid: an argument is not what it has to be.
        Misconfigured: the config or the environment gives an unknown name or a wrong value;
            names the place.
    """
    layers = [
        _read_explicit(coordination_config),
        _read_config(config),
        _read_environ(environ or {}),
    ]
    return combine(CoordinationConfig, _without_rivals(layers))


def _read_explicit(given: CoordinationConfig | None) -> Layer:
    if given is None:
        return {}
    if not isinstance(given, CoordinationConfig):
        raise Invalid(
            "coordination_config",
            type(given).__name__,
            "is not a CoordinationConfig",
            "write CoordinationConfig(total_tokens=…)",
        )
    return {name: (Origin("code"), getattr(given, name)) for name in given.given}


def _read_config(config: Any) -> Layer:
    if config is ...:
        raise Invalid("config", ..., "names no settings", "pass a module, an object or None")
    sync = _get(config, "sync")
    return {
        **_read_part(_get(sync, "coordination"), "sync.coordination", _COORDINATION_NAMES),
        **_read_part(_get(sync, "sql"), "sync.sql", _SQL_NAMES),
    }


def _read_part(part: Any, place: str, names: Mapping[str, str]) -> Layer:
    """Read one part of a config; the names that it may have lead to those of the settings."""
    layer = {}
    for name, value in _attributes(part, names).items():
        if name not in names:
            # Not shown: nothing says that it holds no secret.
            raise Misconfigured(
                f"config.{place}.{name}", MASK, "is not a setting", _hint(name, names)
            )
        layer[names[name]] = (Origin("config", f"config.{place}.{name}"), value)
    return layer


def _hint(name: str, names: Collection[str]) -> str:
    hint = closest_name(name, names)
    return f"did you mean {hint}?" if hint else f"use one of {', '.join(sorted(names))}"


def _get(holder: Any, name: str) -> Any:
    # Items first: some settings objects make an attribute by looking for it.
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _attributes(part: Any, names: Iterable[str]) -> dict[str, Any]:
    """Give the settings of a module, an object or a dict, known or not."""
    if isinstance(part, Mapping):
        found = dict(part)
    else:
        known = {name: getattr(part, name, None) for name in names}
        found = {**known, **getattr(part, "__dict__", {})}
    return {name: value for name, value in found.items() if _is_setting(name, value)}


def _is_setting(name: str, value: Any) -> bool:
    """Tell settings from what else a module or a class holds, and from what is empty."""
    if str(name).startswith("_") or isinstance(value, ModuleType) or callable(value):
        return False
    return value is not None and not (isinstance(value, Mapping) and not value)


def _read_environ(environ: Mapping[str, str]) -> Layer:
    known = list(_VARIABLES.values())
    for variable in sorted(environ.keys() - known):
        # Others may use the prefix too: only what is all but one of ours is refused.
        ours = variable.startswith("SYNC_")
        if ours and (hint := closest_name(variable, known, likeness=0.9)):
            raise Misconfigured(variable, MASK, "is not a setting", f"did you mean {hint}?")
    return {
        name: (Origin("environment", variable), text)
        for name, variable in _VARIABLES.items()
        if (text := environ.get(variable))
    }


def _without_rivals(layers: Iterable[Layer]) -> list[Layer]:
    """Let a URL and its parts be one setting: what stands first hides the other kind."""
    kept: list[Layer] = []
    hidden: frozenset[str] = frozenset()
    for layer in layers:
        left = {name: found for name, found in layer.items() if name not in hidden}
        kept.append(left)
        if "url" in left:
            hidden |= ADDRESS
        elif left.keys() & ADDRESS:
            hidden |= {"url"}
    return kept
