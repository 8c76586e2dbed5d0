"""The settings of a `Job`, checked when they are created.

A config remembers which settings were given, so that the others can come from elsewhere or be
chosen to suit the store. Passwords are never shown.
"""

import inspect
import re
from dataclasses import InitVar, dataclass
from functools import wraps
from typing import Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from jobsync.core.assignment import HashFunction, check_total
from jobsync.core.secrets import MASK, Secret
from jobsync.core.trust import Timing
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.errors import Invalid
from jobsync.setting_fields import fields, show_settings
from jobsync.settings import check_given

__all__ = ["ADDRESS", "CoordinationConfig", "default_reclaim_delay"]

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
