"""How nodes share their tasks: every setting of a `Job`, checked when it is written.

It remembers which settings were given, so that those left to their defaults can come from
elsewhere (see `sources`) or be chosen to suit the store. Passwords are shown nowhere.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec.structs import fields

from jobsync.core.assignment import HashFunction, check_total
from jobsync.core.secrets import MASK, Secret
from jobsync.core.trust import Timing
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.errors import Invalid, Misconfigured, closest_name
from jobsync.settings import Layer, Origin, Resolved, Settings, check_given, combine

__all__ = [
    "ADDRESS",
    "CoordinationConfig",
    "check_neighbours",
    "resolve_coordination",
    "usual_reclaim_delay",
]


_BEATS = ("heartbeat_interval_sec", "heartbeat_timeout_sec")
_LONGEST_BEAT = 3600.0
_DURATIONS = (
    *_BEATS,
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
"""The settings that together stand for a `url`."""

_MAX_PORT = 65535

_is_prefix = re.compile("[a-z_][a-z0-9_]{0,39}").fullmatch


class _Explicit(msgspec.StructMeta):
    """Makes structs that check what they are given, and remember which fields that was."""

    def __call__(cls: Any, **given: Any) -> Any:  # noqa: N805  # of a metaclass
        values = check_given(cls, given)
        made = super().__call__(**values)
        made.__dict__["_given"] = frozenset(values)
        made.check_together()
        return made


class CoordinationConfig(Settings, frozen=True, kw_only=True, dict=True, metaclass=_Explicit):
    """How nodes share their tasks. Durations are seconds, as numbers or `timedelta`.

    Nodes of one fleet must agree on `total_tokens` and `hash_function`.

    Attributes:
        enabled: False makes this node the only one: it owns every task and touches no store.
        total_tokens: how finely tasks are shared out. Many times the number of nodes, so that
            shares are even; 10,000 suit fleets of up to a hundred nodes.
        hash_function: how a task finds its token. `md5` is the guide's; the newer release of
            the original has `double_sha256`.
        minimum_nodes: a job is not entered before this many nodes are there.
        heartbeat_interval_sec: how often a node says that it lives. Where it is not given, 5
            on SQL and 30 on objects, where every beat is billed.
        heartbeat_timeout_sec: after how long a silence a node is dead. At least three beats,
            so that one lost beat kills nobody. Where it is not given, 15 on SQL, 90 on objects.
        reclaim_after: how long after a node's death what it had in hand may be started
            again. At least a minute and four timeouts by default: its last task may still be
            running.
        handover_memory: how long after a hand-over a node refuses what another has just
            finished.
        locks_enabled: False refuses new pins and ignores those there are.
        rebalance_check_interval_sec: the leader compares plan and fleet at least this often,
            whether or not it is told of a change.
        dead_node_check_interval_sec: accepted and unused. The leader looks at every beat.
        token_refresh_initial_interval_sec: accepted and unused. A node hears of a new plan
            within a beat.
        token_refresh_steady_interval_sec: a node looks for a new plan at least this often,
            whether or not it is told of one.
        leader_lock_timeout_sec: accepted and unused. Leadership ends with the leader's session,
            after `heartbeat_timeout_sec`.
        health_check_interval_sec: accepted and unused. Health is looked at when it is asked for.
        token_distribution_timeout_sec: accepted and unused. `wait_on_enter` is the bound.
        stale_leader_lock_age_sec: accepted and unused. A dead leader is replaced at once.
        stale_rebalance_lock_age_sec: accepted and unused. A rebalance is one write and holds
            no lock.
        lock_orphan_warning_hours: accepted and unused. Pins outlive whoever made them.
        url: the store. Instead of the five below.
        host: of a PostgreSQL server; what is left out of these five is left to libpq.
        port: its port.
        dbname: the database.
        user: who connects.
        password: their password.
        appname: what the names of tables and views begin with.
        timezone: the zone in which `job.connection` speaks; the process's own by default.
        profile: accepted and unused.
    """

    enabled: bool = True
    total_tokens: int = 10_000
    hash_function: HashFunction = "md5"
    minimum_nodes: int = 1
    heartbeat_interval_sec: float = 5
    heartbeat_timeout_sec: float = 15
    reclaim_after: float | None = None
    handover_memory: float = 60
    locks_enabled: bool = True
    rebalance_check_interval_sec: float = 30
    dead_node_check_interval_sec: float = 10
    token_refresh_initial_interval_sec: float = 5
    token_refresh_steady_interval_sec: float = 30
    leader_lock_timeout_sec: float = 30
    health_check_interval_sec: float = 30
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

    def __post_init__(self) -> None:
        check_total(self.total_tokens)
        if self.minimum_nodes < 1:
            raise Invalid("minimum_nodes", self.minimum_nodes, "is less than 1", "give 1 or more")
        for name in _DURATIONS:
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                raise Invalid(name, seconds, "is not above 0", "give a number of seconds")
        for name in _BEATS:
            if (seconds := getattr(self, name)) > _LONGEST_BEAT:
                fix = f"did you mean {seconds / 1000:g}?"
                raise Invalid(name, seconds, "durations are seconds", fix)
        self._check_names()

    def _check_names(self) -> None:
        if self.url is not None:
            parse_url(self.url)
        if self.port is not None and not 1 <= self.port <= _MAX_PORT:
            raise Invalid("port", self.port, "is no port", f"give 1 to {_MAX_PORT}")
        if not _is_prefix(self.appname):
            raise Invalid(
                "appname",
                self.appname,
                "cannot begin the name of a table",
                "use at most 40 lower-case letters, digits and _: sync_",
            )
        if self.timezone is not None:
            _check_zone(self.timezone)

    def check_together(self) -> None:
        """Refuse settings that do not fit each other, as far as both were given.

        Raises:
            Invalid: says which of them to change.
        """
        if self.given >= {*_BEATS}:
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
        """The settings that somebody gave, as opposed to those left to their defaults."""
        # A copy made by `replace` does not remember: then whatever differs was given.
        differing = (f.name for f in fields(self) if getattr(self, f.name) != f.default)
        found: frozenset[str] | None = self.__dict__.get("_given")
        return frozenset(differing) if found is None else found

    def timing(self, usual: Timing) -> Timing:
        """Give the beat and the timeout: what was given, and otherwise what the store suits.

        Raises:
            Invalid: they do not fit together; says which number to change.
        """
        interval, timeout = (name in self.given for name in _BEATS)
        return _make_timing(
            self.heartbeat_interval_sec if interval else usual.heartbeat,
            self.heartbeat_timeout_sec if timeout else usual.timeout,
        )

    def reclaim_delay(self, timing: Timing) -> float:
        """Give how long after a node's death its unfinished tasks may be started again."""
        return self.reclaim_after or usual_reclaim_delay(timing.timeout)

    def reveal_url(self) -> str | None:
        """Give the whole URL of the store, password included, if anything names a store.

        Call it where the URL is used, and keep the result nowhere.
        """
        if self.url is not None or not self.given & ADDRESS:
            return self.url
        place = PostgresUrl(
            user=self.user or "",
            password=Secret(self.password) if self.password else None,
            host=self.host or "",
            port=self.port,
            database=self.dbname or "",
        )
        return place.reveal()


def usual_reclaim_delay(timeout: float) -> float:
    """Give how long after a node's death its tasks rest, where nobody has said otherwise."""
    return max(60.0, 4 * timeout)


def _make_timing(beat: float, timeout: float) -> Timing:
    """Make a timing; what is wrong with it is said in the names of the settings."""
    try:
        return Timing(heartbeat=beat, timeout=timeout)
    except Invalid as error:
        name = _BEATS[error.field == "worker_timeout"]
        raise Invalid(name, error.value, error.problem, error.fix) from None


def _check_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        fix = "use a name such as Europe/Berlin or UTC"
        raise Invalid("timezone", name, "is no time zone", fix) from None


# Another library of the same name, installed in the same place, is found before it does harm.


_OTHER = "jobsync"


@cache
def check_neighbours() -> None:
    """Refuse to work beside the distribution `jobsync`, which has a package of our name.

    Raises:
        Misconfigured: it is installed; gives the line that helps.
    """
    try:
        version = metadata.version(_OTHER)
    except metadata.PackageNotFoundError:
        return
    raise Misconfigured(
        "installed",
        f"{_OTHER} {version}",
        "is another library, whose files and those of jobsync-fleet overwrite each other",
        "run: pip uninstall -y jobsync && pip install --force-reinstall jobsync-fleet",
    )


# Where the settings of a `Job` come from: the first place that gives one wins.
#
# Setting by setting:
#
#     1. `coordination_config`, as far as it was written out
#     2. `config.sync.coordination.*` and `config.sync.sql.*`: a module, an object or a dict
#     3. the environment: `SYNC_*` and `SYNC_SQL_*`
#     4. the default
#
# A mistyped name or a wrong value is never skipped: the error names where it stands and what
# was probably meant.


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
