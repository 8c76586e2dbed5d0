"""The settings of a `Job`, checked when they are created, and where they come from.

A config remembers which settings were given, so that the others can come from elsewhere or be
chosen to suit the store. Passwords are never shown. For each setting the first source wins:

    0. the `url` of a `Job`
    1. `coordination_config`, if the setting was given there
    2. `config.sync.coordination.*` and `config.sync.sql.*`: a module, an object or a dict
    3. the environment: `SYNC_*` and `SYNC_SQL_*`
    4. the default

A mistyped name or a wrong value is never ignored: the error names its source and, if possible,
the name that was meant. A server without a database, or the reverse, is refused if any part of
the address is in a config or in the environment: what is missing would differ between machines.
"""

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass
from functools import cache, wraps
from importlib import metadata
from types import ModuleType
from typing import Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from jobsync.core.assignment import HashFunction, check_total
from jobsync.core.secrets import MASK, Secret
from jobsync.core.trust import Timing
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.errors import Invalid, Misconfigured, closest_name
from jobsync.settings import (
    Layer,
    Origin,
    Resolved,
    check_given,
    combine,
    fields,
    show_settings,
)

__all__ = [
    "ADDRESS",
    "CoordinationConfig",
    "check_no_other_jobsync",
    "default_reclaim_delay",
    "resolve_coordination",
]


_TIMING = ("heartbeat_interval_sec", "heartbeat_timeout_sec")
_MAX_TIMING = 3600.0
_DURATIONS = (
    *_TIMING,
    "rebalance_check_interval_sec",
    "dead_node_check_interval_sec",
    "token_refresh_initial_interval_sec",
    "token_refresh_steady_interval_sec",
    "leader_lock_timeout_sec",
    "health_check_interval_sec",
    "token_distribution_timeout_sec",
    "stale_leader_lock_age_sec",
    "stale_rebalance_lock_age_sec",
    "lock_orphan_warning_hours",
    "reclaim_after",
    "handover_memory",
)

ADDRESS = frozenset({"host", "port", "dbname", "user", "password"})
"""The settings that together replace a `url`."""

_MAX_PORT = 65535

_is_prefix = re.compile("[a-z_][a-z0-9_]{0,39}").fullmatch


C = TypeVar("C")


def _remembering(kind: type[C]) -> type[C]:
    """Make a dataclass check its arguments and remember in `_given` which of them were given."""
    create: Any = kind.__init__
    signature = inspect.signature(create)
    defaults = {field.name: field.default for field in fields(kind)}

    @wraps(create)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        copied: frozenset[str] | None = named.pop("_given", None)
        if len(arguments) > len(defaults):
            raise TypeError(f"{kind.__name__} takes at most {len(defaults)} arguments")
        positional = dict(zip(defaults, arguments, strict=False))
        if twice := sorted(positional.keys() & named.keys()):
            raise TypeError(f"{kind.__name__} got {twice[0]} twice")
        values = check_given(kind, positional | named)
        if copied is None:
            given = frozenset(values)
        else:
            # `dataclasses.replace` passes every value, and what was given to the original.
            differing = {name for name, value in values.items() if value != defaults[name]}
            given = copied.intersection(values) | differing
        create(self, **values, _given=given)

    public = [p for p in signature.parameters.values() if p.name != "_given"]
    init.__signature__ = signature.replace(parameters=public)  # type: ignore[attr-defined]
    kind.__init__ = init  # type: ignore[method-assign]
    return kind


@_remembering
@dataclass(frozen=True, repr=False)
class CoordinationConfig:
    """How nodes share tasks: a dataclass. Durations are in seconds, as numbers or `timedelta`.

    Nodes of one fleet must agree on `total_tokens` and `hash_function`. Positional arguments are
    in the guide's order. In a copy made by `dataclasses.replace` those settings count as given
    that were given to the original, and those that differ from their defaults.

    Attributes:
        enabled: False makes this node the only one: it owns every task. If a database is named,
            finished tasks are recorded there; otherwise nothing is.
        total_tokens: into how many parts tasks are divided. Many times the number of nodes, so
            that shares are even; 10,000 suits fleets of up to a hundred nodes.
        hash_function: maps a task to its token. `md5` is the guide's; the newer release of the
            original has `double_sha256`.
        minimum_nodes: a job is not entered before this many nodes have joined.
        heartbeat_interval_sec: how often a node sends a heartbeat. If not given, 5 on SQL and
            30 on objects, where every heartbeat is billed.
        heartbeat_timeout_sec: after how much silence a node is dead. At least three heartbeats,
            so that a node survives one lost heartbeat. If not given, 15 on SQL, 90 on objects.
        reclaim_after: how long after a node's death its running tasks may be started again.
            By default four timeouts and at least a minute, because its last task may still be
            running; and no time if a node on the same machine has seen that its process ended.
        handover_memory: how long after a handover a node refuses tasks that another node has
            just finished.
        locks_enabled: False refuses new pins and ignores existing ones.
        rebalance_check_interval_sec: the leader compares plan and fleet at least this often,
            even if no change is reported.
        dead_node_check_interval_sec: accepted and unused. The leader checks at every heartbeat.
        token_refresh_initial_interval_sec: accepted and unused. A node receives a new plan
            within a heartbeat.
        token_refresh_steady_interval_sec: a node checks for a new plan at least this often,
            even if no change is reported.
        leader_lock_timeout_sec: accepted and unused. Leadership ends with the leader's session,
            after `heartbeat_timeout_sec`.
        health_check_interval_sec: accepted and unused. Health is checked when it is requested.
        token_distribution_timeout_sec: accepted and unused. `wait_on_enter` is the bound.
        stale_leader_lock_age_sec: accepted and unused. A dead leader is replaced at once.
        stale_rebalance_lock_age_sec: accepted and unused. A rebalance is one write and holds
            no lock.
        lock_orphan_warning_hours: accepted and unused. Pins outlive their creator.
        url: the store. Replaces the five settings below.
        host: of a PostgreSQL server; libpq's defaults apply to those of the five not given.
        port: its port.
        dbname: the database.
        user: the user who connects.
        password: the user's password.
        appname: the prefix of the names of tables and views.
        timezone: the time zone of `job.connection`; the process's own by default.
        profile: accepted and unused.
    """

    enabled: bool = True
    total_tokens: int = 10_000
    heartbeat_interval_sec: float = 5
    heartbeat_timeout_sec: float = 15
    rebalance_check_interval_sec: float = 30
    dead_node_check_interval_sec: float = 10
    token_refresh_initial_interval_sec: float = 5
    token_refresh_steady_interval_sec: float = 30
    locks_enabled: bool = True
    leader_lock_timeout_sec: float = 30
    health_check_interval_sec: float = 30
    # The guide's end here.
    hash_function: HashFunction = "md5"
    minimum_nodes: int = 1
    reclaim_after: float | None = None
    handover_memory: float = 60
    token_distribution_timeout_sec: float = 60
    stale_leader_lock_age_sec: float = 300
    stale_rebalance_lock_age_sec: float = 300
    lock_orphan_warning_hours: float = 24
    url: str | None = None
    host: str | None = None
    port: int | None = None
    dbname: str | None = None
    user: str | None = None
    password: str | None = None
    appname: str = "sync_"
    timezone: str | None = None
    profile: str | None = None
    _given: InitVar[frozenset[str] | None] = None

    def __post_init__(self, _given: frozenset[str] | None) -> None:
        # An attribute too, so that `dataclasses.replace` passes it on.
        object.__setattr__(self, "_given", _given)
        check_total(self.total_tokens)
        if self.minimum_nodes < 1:
            raise Invalid(
                "minimum_nodes", self.minimum_nodes, "must be 1 or more", "use 1 for a single node"
            )
        for name in _DURATIONS:
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                raise Invalid(name, seconds, "must be above 0", "pass a number of seconds")
        for name in _TIMING:
            if (seconds := getattr(self, name)) > _MAX_TIMING:
                fix = f"did you mean {seconds / 1000:g}?"
                raise Invalid(name, seconds, "must be in seconds", fix)
        self._check_names()
        self._check_together()

    def __repr__(self) -> str:
        return show_settings(self)

    def _check_names(self) -> None:
        if self.url is not None:
            parse_url(self.url)
        if self.port is not None and not 1 <= self.port <= _MAX_PORT:
            raise Invalid(
                "port", self.port, f"must be between 1 and {_MAX_PORT}", "pass a TCP port"
            )
        if not _is_prefix(self.appname):
            raise Invalid(
                "appname",
                self.appname,
                "cannot be a prefix of table names",
                "use at most 40 lower-case letters, digits and _: sync_",
            )
        if self.timezone is not None:
            _check_zone(self.timezone)

    def _check_together(self) -> None:
        """Check that the given settings are consistent with each other."""
        if self.given >= {*_TIMING}:
            _make_timing(self.heartbeat_interval_sec, self.heartbeat_timeout_sec)
        parts = sorted(self.given & ADDRESS)
        if "url" in self.given and parts:
            raise Invalid(
                parts[0],
                MASK,
                "is part of the url, which is given too",
                "keep one of the two",
            )

    @property
    def given(self) -> frozenset[str]:
        """The settings that were given, as opposed to those that have their defaults."""
        found: frozenset[str] = self.__dict__["_given"]
        return found

    def timing(self, usual: Timing) -> Timing:
        """Return the heartbeat interval and the timeout: those given, else those of the store.

        Raises:
            Invalid: they are not consistent; says which number to change.
        """
        interval, timeout = (name in self.given for name in _TIMING)
        return _make_timing(
            self.heartbeat_interval_sec if interval else usual.heartbeat,
            self.heartbeat_timeout_sec if timeout else usual.timeout,
        )

    def reclaim_delay(self, timing: Timing) -> float:
        """Return how long after a node's death its unfinished tasks may be started again."""
        return self.reclaim_after or default_reclaim_delay(timing.timeout)

    def reveal_url(self) -> str | None:
        """Return the URL of the store with the password; None if no setting names a store.

        Call it where the URL is used, and do not store the result.
        """
        if self.url is not None or not self.given & ADDRESS:
            return self.url
        url = PostgresUrl(
            user=self.user or "",
            password=Secret(self.password) if self.password else None,
            host=self.host or "",
            port=self.port,
            database=self.dbname or "",
        )
        return url.reveal()


def default_reclaim_delay(timeout: float) -> float:
    """Return how long after a node's death its tasks wait, if `reclaim_after` is not set."""
    return max(60.0, 4 * timeout)


def _make_timing(beat: float, timeout: float) -> Timing:
    """Build a timing; errors use the names of these settings."""
    try:
        return Timing(heartbeat=beat, timeout=timeout)
    except Invalid as error:
        name = _TIMING[error.field == "worker_timeout"]
        raise Invalid(name, error.value, error.problem, error.fix) from None


def _check_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        fix = "use a name such as Europe/Berlin or UTC"
        raise Invalid("timezone", name, "is not a time zone", fix) from None


_OTHER_DISTRIBUTION = "jobsync"


@cache
def check_no_other_jobsync() -> None:
    """Check that the distribution `jobsync`, whose package has the same name, is not installed.

    Raises:
        Misconfigured: it is installed; gives the command that repairs this.
    """
    try:
        version = metadata.version(_OTHER_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    raise Misconfigured(
        "installed",
        f"{_OTHER_DISTRIBUTION} {version}",
        "is another library, whose files and those of jobsync-fleet overwrite each other",
        "run: pip uninstall -y jobsync && pip install --force-reinstall jobsync-fleet",
    )


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
