"""Every setting of the guide and of the newer release: checks and the four sources."""

import copy
import math
import pickle
import re
from dataclasses import asdict, fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Invalid, Misconfigured
from jobsync.core.secrets import Secret
from jobsync.core.trust import Timing
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.jobs.config import _VARIABLES, resolve_coordination
from jobsync.jobs.coordination_config import ADDRESS as _ADDRESS
from jobsync.jobs.coordination_config import CoordinationConfig

ROOT = Path(__file__).parents[3]
SQL = Timing(heartbeat=5, timeout=15)
OBJECTS = Timing(heartbeat=30, timeout=90)


def test_defaults_are_those_of_the_guide() -> None:
    """Or of the newer release, if the guide has none."""
    config = CoordinationConfig()
    guide = {
        "enabled": True,
        "total_tokens": 10_000,
        "heartbeat_interval_sec": 5,
        "heartbeat_timeout_sec": 15,
        "rebalance_check_interval_sec": 30,
        "dead_node_check_interval_sec": 10,
        "token_refresh_initial_interval_sec": 5,
        "token_refresh_steady_interval_sec": 30,
        "locks_enabled": True,
        "leader_lock_timeout_sec": 30,
        "health_check_interval_sec": 30,
    }
    newer = {
        "minimum_nodes": 1,
        "token_distribution_timeout_sec": 60,
        "stale_leader_lock_age_sec": 300,
        "stale_rebalance_lock_age_sec": 300,
        "appname": "sync_",
        "hash_function": "md5",
    }
    assert {name: getattr(config, name) for name in guide | newer} == guide | newer


@pytest.mark.parametrize(
    "options",
    [
        {"total_tokens": 50_000, "heartbeat_interval_sec": 3, "heartbeat_timeout_sec": 10},
        {"heartbeat_interval_sec": 3, "heartbeat_timeout_sec": 9},
        {"heartbeat_interval_sec": 10, "heartbeat_timeout_sec": 30},
        {"enabled": False},
        {"heartbeat_interval_sec": timedelta(seconds=10), "heartbeat_timeout_sec": 30},
    ],
)
def test_the_guide_s_configurations_are_accepted(options: dict[str, Any]) -> None:
    """Its profiles for all kinds of fleets, and durations as timedelta."""
    config = CoordinationConfig(**options)
    assert config.given == options.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_tokens": 0}, r"total_tokens must be 1 to 100,000 \(got 0\)"),
        ({"total_tokens": 1.5}, r"total_tokens .* \(got 1.5\)\. Use a whole number"),
        ({"total_tokens": "5"}, r"total_tokens .* \(got '5'\)\. Use a whole number"),
        (
            {"minimum_nodes": 0},
            r"minimum_nodes must be 1 or more \(got 0\)\. Use 1 for a single node",
        ),
        ({"hash_function": "sha1"}, r"hash_function .* \(got 'sha1'\)\. Use 'md5' or 'sha256'"),
        (
            {"heartbeat_interval_sec": 5, "heartbeat_timeout_sec": 14},
            r"heartbeat_timeout_sec must .*three heartbeats.*got 14.0.*Use 15 or more",
        ),
        ({"heartbeat_interval_sec": 0}, r"heartbeat_interval_sec must be above 0 \(got 0.0\)"),
        (
            {"heartbeat_interval_sec": 30_000},
            r"heartbeat_interval_sec must be in seconds \(got 30000.0\)\. Did you mean 30\?",
        ),
        ({"rebalance_check_interval_sec": -1}, "rebalance_check_interval_sec .*got -1.0"),
        ({"health_check_interval_sec": float("nan")}, "health_check_interval_sec must be finite"),
        ({"heartbeat_intervall_sec": 5}, r"Did you mean heartbeat_interval_sec\?"),
        ({"tokens": 5}, "tokens .*is not a setting of CoordinationConfig.*got "),
        ({"port": 0}, r"port must be between 1 and 65535 \(got 0\)"),
        ({"appname": "Sync-"}, "appname .*lower-case letters"),
        ({"appname": 'x"; drop table'}, "appname"),
        (
            {"timezone": "Mars/Base"},
            r"timezone is not a time zone \(got 'Mars/Base'\)\. Use a name such as",
        ),
        *(
            ({"timezone": zone}, "timezone is not a time zone .*Use a name such as")
            for zone in ("", "../UTC", "/etc/localtime", "Europe/\0")
        ),
        *(({"port": port}, "port must be between 1 and 65535") for port in (-1, 65_536)),
        *(({"appname": name}, "appname .*at most 40") for name in ("", "1a", "a" * 41, "a\n", "ä")),
        ({"url": "jobs.db"}, r"Did you mean sqlite:///jobs.db\?"),
        ({"url": "memory://", "host": "h"}, "host is part of the url.*Keep one of the two"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(options: dict[str, Any], message: str) -> None:
    """The error names the setting, the value, and what to write instead."""
    with pytest.raises(Invalid, match=message):
        CoordinationConfig(**options)


@pytest.mark.parametrize(
    "name",
    [
        field.name
        for field in fields(CoordinationConfig)
        if field.name.endswith(("_sec", "_hours"))
        or field.name in ("reclaim_after", "handover_memory")
    ],
)
def test_every_duration_is_above_0(name: str) -> None:
    """Only heartbeats and their timeout have a limit, above which they are in milliseconds."""

    def read(value: Any) -> Any:
        return getattr(CoordinationConfig(**{name: value}), name)

    for wrong in (0, -1, timedelta(0)):
        with pytest.raises(Invalid, match=rf"{name} must be above 0"):
            read(wrong)
    limit = 3600.0 if name.startswith("heartbeat_") else 1e9
    assert (read(limit), read(timedelta(minutes=1))) == (limit, 60)
    if name.startswith("heartbeat_"):
        with pytest.raises(Invalid, match=rf"{name} must be in seconds .*mean 3\.601\?"):
            read(3601)


@pytest.mark.parametrize(
    "options", [{"port": 1}, {"port": 65_535}, {"appname": "a" * 40}, {"appname": "_1"}]
)
def test_the_limits_of_settings_are_allowed(options: dict[str, Any]) -> None:
    """Also the last of them."""
    (name,) = options
    assert getattr(CoordinationConfig(**options), name) == options[name]


def test_settings_cannot_be_changed() -> None:
    """Checked values stay."""
    with pytest.raises(AttributeError):
        CoordinationConfig().total_tokens = 5  # type: ignore[misc]


# Derived values


def test_the_default_heartbeat_suits_the_store() -> None:
    """Given values win; a default that is given counts as given."""
    assert CoordinationConfig().timing(OBJECTS) == OBJECTS
    assert CoordinationConfig().timing(SQL) == SQL
    given = CoordinationConfig(heartbeat_interval_sec=5, heartbeat_timeout_sec=15)
    assert given.timing(OBJECTS) == SQL
    one = CoordinationConfig(heartbeat_interval_sec=20)
    assert one.timing(OBJECTS) == Timing(heartbeat=20, timeout=90)
    with pytest.raises(Invalid, match=r"heartbeat_timeout_sec .*got 15.*Use 60 or more"):
        one.timing(SQL)


def test_reclaiming_waits_for_four_timeouts_and_at_least_a_minute() -> None:
    """Unless `reclaim_after` is set."""
    assert CoordinationConfig().reclaim_delay(SQL) == 60
    assert CoordinationConfig().reclaim_delay(OBJECTS) == 360
    assert CoordinationConfig(reclaim_after=8).reclaim_delay(OBJECTS) == 8


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, None),
        ({"appname": "x_"}, None),
        ({"url": "sqlite:///jobs.db"}, "sqlite:///jobs.db"),
        ({"host": "db"}, "postgresql://db/"),
        ({"dbname": "jobs"}, "postgresql:///jobs"),
        (
            {"host": "db", "port": 6432, "dbname": "j s", "user": "u@x", "password": "p@ss/?#"},
            "postgresql://u%40x:p%40ss%2F%3F%23@db:6432/j%20s",
        ),
        ({"host": "::1", "port": 5432}, "postgresql://[::1]:5432/"),
        ({"host": "/run/postgresql", "dbname": "d"}, "postgresql:///d?host=%2Frun%2Fpostgresql"),
    ],
)
def test_the_address_becomes_a_url(options: dict[str, Any], url: str | None) -> None:
    """Quoted; without an address there is no URL."""
    assert CoordinationConfig(**options).reveal_url() == url


texts = st.text(
    st.characters(codec="utf-8", min_codepoint=0x20, exclude_characters="\x7f"),
    min_size=1,
    max_size=9,
)


@given(texts, texts, texts)
def test_any_name_and_password_survives_the_url(user: str, password: str, dbname: str) -> None:
    """They can be read back from the URL."""
    config = CoordinationConfig(host="h", user=user, password=password, dbname=dbname)
    found = parse_url(config.reveal_url() or "")
    assert isinstance(found, PostgresUrl)
    assert (found.user, found.password, found.database) == (user, Secret(password), dbname)


def test_passwords_are_shown_nowhere() -> None:
    """Not in a repr, not in an error, not in an explanation."""
    config = CoordinationConfig(host="h", password="hunter2", port=1)
    sources = resolve_coordination(config)
    shown = f"{config!r} {config} {sources!r} {sources.explain()}"
    with pytest.raises(Invalid) as caught:
        CoordinationConfig(url="memory://", password="hunter2")
    assert "hunter2" not in f"{shown} {caught.value} {caught.value!r}"
    assert "password=***" in repr(config)


# Sources


class Setting(dict[str, Any]):
    """Like libb's: items are attributes, missing ones are created, unless it is locked."""

    locked = False

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            if Setting.locked:
                raise ValueError("This Setting object is locked from editing")
            self[name] = Setting()
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def as_module(coordination: dict[str, Any], sql: dict[str, Any]) -> Any:
    """Return a config module with a locked Setting, as the guide prints it."""
    config = ModuleType("config")
    sync = Setting()
    for part, values in ((sync.coordination, coordination), (sync.sql, sql)):
        part.update(values)
    config.sync = sync  # type: ignore[attr-defined]
    return config


def as_namespace(coordination: dict[str, Any], sql: dict[str, Any]) -> Any:
    """Return objects with attributes."""
    parts = SimpleNamespace(
        coordination=SimpleNamespace(**coordination), sql=SimpleNamespace(**sql)
    )
    return SimpleNamespace(sync=parts)


def as_classes(coordination: dict[str, Any], sql: dict[str, Any]) -> Any:
    """Return classes, with their other attributes."""

    class Config:
        class sync:  # noqa: N801
            pass

    Config.sync.coordination = type("coordination", (), {**coordination, "_own": 1})  # type: ignore[attr-defined]
    Config.sync.sql = type("sql", (), {**sql, "helper": lambda _: None})  # type: ignore[attr-defined]
    return Config


def as_dict(coordination: dict[str, Any], sql: dict[str, Any]) -> Any:
    """Return plain dicts."""
    return {"sync": {"coordination": coordination, "sql": sql}}


SHAPES = [as_module, as_namespace, as_classes, as_dict]
ADDRESS = {"host": "db", "dbname": "jobs", "passwd": "x"}


@pytest.fixture(autouse=True)
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with an unlocked Setting."""
    monkeypatch.setattr(Setting, "locked", False)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_config_may_be_of_any_kind(shape: Any) -> None:
    """A module, objects, classes or dicts; locked or not."""
    config = shape({"total_tokens": 5000, "enabled": True}, ADDRESS)
    Setting.locked = True
    found = resolve_coordination(config=config)
    assert found.value.total_tokens == 5000
    assert found.value.reveal_url() == "postgresql://:x@db/jobs"
    assert str(found.origin("total_tokens")) == "config config.sync.coordination.total_tokens"
    assert str(found.origin("password")) == "config config.sync.sql.passwd"
    assert str(found.origin("minimum_nodes")) == "default"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_in_a_config_counts_although_it_is_false(shape: Any) -> None:
    """A switch that is off is one, and a number of 0 is checked as any other."""
    config = shape({"enabled": False, "locks_enabled": False}, {})
    found = resolve_coordination(config=config, environ={"SYNC_LOCKS_ENABLED": "yes"})
    assert found.value.given == {"enabled", "locks_enabled"}
    assert not found.value.enabled
    assert not found.value.locks_enabled
    with pytest.raises(Misconfigured, match="minimum_nodes"):
        resolve_coordination(config=shape({"minimum_nodes": 0}, {}))


@pytest.mark.parametrize("config", [None, ModuleType("config"), {}, SimpleNamespace(sync=None)])
def test_a_config_may_be_empty(config: Any) -> None:
    """Then the defaults apply."""
    assert resolve_coordination(config=config).value == CoordinationConfig()


def test_what_was_only_read_from_a_config_is_no_setting() -> None:
    """Other code may have looked, by which a config of some kinds grows; nor are functions."""
    config = as_module({"total_tokens": 500, "helper": print, "_own": 1, "math": math}, {})
    for part, name in (
        (config.sync.coordination, "minimum_nodes"),
        (config.sync.coordination, "no_setting_at_all"),
        (config.sync.sql, "host"),
    ):
        assert getattr(part, name) == {}
    found = resolve_coordination(config=config)
    assert found.value == CoordinationConfig(total_tokens=500)
    assert found.value.given == {"total_tokens"}


def test_reading_does_not_change_a_config() -> None:
    """Even one that creates missing attributes."""
    config = ModuleType("config")
    config.sync = Setting()  # type: ignore[attr-defined]
    assert resolve_coordination(config=config).value == CoordinationConfig()
    assert config.sync == {}


def test_the_first_source_wins_for_each_setting() -> None:
    """Code, config, environment, default; a default that is given counts."""
    environ = {
        "SYNC_TOTAL_TOKENS": "300",
        "SYNC_MINIMUM_NODES": "3",
        "SYNC_REBALANCE_INTERVAL": "33",
        "SYNC_LOCKS_ENABLED": "no",
        "SYNC_TOKEN_REFRESH_STEADY": "",
    }
    config = as_dict({"total_tokens": 200, "minimum_nodes": 2, "health_check_interval_sec": 7}, {})
    found = resolve_coordination(CoordinationConfig(total_tokens=10_000), config, environ)
    value = found.value
    assert (value.total_tokens, value.minimum_nodes) == (10_000, 2)
    assert (value.rebalance_check_interval_sec, value.health_check_interval_sec) == (33, 7)
    assert (value.locks_enabled, value.token_refresh_steady_interval_sec) == (False, 30)
    assert str(found.origin("total_tokens")) == "code"
    assert str(found.origin("locks_enabled")) == "environment SYNC_LOCKS_ENABLED"
    assert value.given == {
        "total_tokens",
        "minimum_nodes",
        "health_check_interval_sec",
        "rebalance_check_interval_sec",
        "locks_enabled",
    }


def test_every_documented_variable_is_read() -> None:
    """The names of the original, and ours in the same style."""
    environ = {
        "SYNC_COORDINATION_ENABLED": "false",
        "SYNC_HEARTBEAT_INTERVAL": "1",
        "SYNC_HEARTBEAT_TIMEOUT": "4",
        "SYNC_DEAD_NODE_INTERVAL": "2",
        "SYNC_TOKEN_REFRESH_INITIAL": "3",
        "SYNC_LOCK_ORPHAN_WARNING": "12",
        "SYNC_LEADER_LOCK_TIMEOUT": "6",
        "SYNC_HEALTH_CHECK_INTERVAL": "7",
        "SYNC_HASH_FUNCTION": "sha256",
        "SYNC_SQL_HOST": "db",
        "SYNC_SQL_PORT": "6432",
        "SYNC_SQL_DBNAME": "jobs",
        "SYNC_SQL_USER": "me",
        "SYNC_SQL_PASSWD": "s3cret",
        "SYNC_SQL_APPNAME": "app_",
        "SYNC_SQL_TIMEZONE": "UTC",
        "SYNC_SQL_PROFILE": "x",
    }
    found = resolve_coordination(environ=environ)
    assert found.value.timing(SQL) == Timing(heartbeat=1, timeout=4)
    assert found.value.reveal_url() == "postgresql://me:s3cret@db:6432/jobs"
    assert {origin.where for origin in found.origins.values() if origin.where} == environ.keys()


def test_text_in_a_config_is_read_like_the_environment() -> None:
    """Config modules pass on what they found there."""
    config = as_dict({"total_tokens": "500", "enabled": "no"}, {**ADDRESS, "port": "6432"})
    value = resolve_coordination(config=config).value
    assert (value.total_tokens, value.enabled, value.port) == (500, False, 6432)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_unknown_name_in_a_config_is_refused(shape: Any) -> None:
    """The error names the source and a suggestion, but not the value."""
    with pytest.raises(Misconfigured) as caught:
        resolve_coordination(config=shape({"total_token": 5}, {}))
    assert caught.value.field == "config.sync.coordination.total_token"
    assert caught.value.fix == "did you mean total_tokens?"
    with pytest.raises(
        Misconfigured, match=r"config.sync.sql.passwrd .*Did you mean passw"
    ) as other:
        resolve_coordination(config=shape({}, {"passwrd": "hunter2"}))
    assert "hunter2" not in f"{other.value}{other.value!r}"


@pytest.mark.parametrize(
    ("environ", "place", "fix"),
    [
        ({"SYNC_TOTAL_TOKEN": "5"}, "SYNC_TOTAL_TOKEN", "did you mean SYNC_TOTAL_TOKENS?"),
        ({"SYNC_SQL_PASSWRD": "hunter2"}, "SYNC_SQL_PASSWRD", "did you mean SYNC_SQL_PASSW"),
        ({"SYNC_TOTAL_TOKENS": "many"}, "SYNC_TOTAL_TOKENS", "use a whole number"),
        ({"SYNC_TOTAL_TOKENS": "0"}, "SYNC_TOTAL_TOKENS", "use 10,000, which suits"),
        (
            {"SYNC_HEARTBEAT_INTERVAL": "5", "SYNC_HEARTBEAT_TIMEOUT": "6"},
            "SYNC_HEARTBEAT_TIMEOUT",
            "use 15 or more, or a shorter heartbeat",
        ),
    ],
)
def test_a_wrong_variable_is_refused(environ: dict[str, str], place: str, fix: str) -> None:
    """The error names the variable, and shows no secret."""
    with pytest.raises(Misconfigured) as caught:
        resolve_coordination(environ=environ)
    assert caught.value.field == place
    assert caught.value.fix.startswith(fix)
    assert "hunter2" not in f"{caught.value}{caught.value!r}"


def test_variables_of_others_are_left_alone() -> None:
    """Other programs may use the prefix."""
    environ = {"SYNC_INTERVAL": "x", "SYNC_GATEWAY_HOST": "x", "RSYNC_TOTAL_TOKENS": "x"}
    assert resolve_coordination(environ=environ).value == CoordinationConfig()


def test_a_url_hides_the_parts_of_later_sources_and_the_reverse() -> None:
    """They are never mixed; a password alone may come from another source."""
    parts = {"SYNC_SQL_HOST": "db", "SYNC_SQL_DBNAME": "jobs", "SYNC_SQL_PASSWD": "x"}
    url = CoordinationConfig(url="memory://")
    assert resolve_coordination(url, None, parts).value.reveal_url() == "memory://"
    host = CoordinationConfig(host="mine")
    assert resolve_coordination(host, None, parts).value.reveal_url() == "postgresql://:x@mine/jobs"
    config = as_dict({}, {"url": "memory://"})
    assert resolve_coordination(host, config).value.reveal_url() == "postgresql://mine/"
    # What is hidden hides nothing itself.
    hidden = resolve_coordination(host, config, parts).value
    assert hidden.reveal_url() == "postgresql://:x@mine/jobs"
    job = resolve_coordination(host, config, parts, "memory://job")
    assert job.value.reveal_url() == "memory://job"
    both = as_dict({}, {"url": "memory://", "host": "db"})
    with pytest.raises(Misconfigured, match=r"config.sync.sql.host is part of the url"):
        resolve_coordination(config=both)


def test_wrong_types_of_config_are_refused() -> None:
    """A dict instead of a CoordinationConfig, or three dots that were left in."""
    with pytest.raises(Invalid, match=r"coordination_config .*got 'dict'"):
        resolve_coordination({"total_tokens": 5})  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"config .*got Ellipsis"):
        resolve_coordination(config=...)


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        (
            {"SYNC_SQL_DATABASE": "d", "SYNC_SQL_USERNAME": "u", "SYNC_SQL_PASSWORD": "p"},
            "postgresql://u:p@db/d",
        ),
        ({"SYNC_SQL_DATABASE": "d", "SYNC_SQL_DBNAME": "d"}, "postgresql://db/d"),
        ({"SYNC_SQL_DATABASE": "d", "SYNC_SQL_DBNAME": ""}, "postgresql://db/d"),
    ],
    ids=["all", "both", "empty"],
)
def test_the_original_s_names_are_read_beside_ours(environ: dict[str, str], url: str) -> None:
    """Both may be set to one value."""
    found = resolve_coordination(environ={"SYNC_SQL_HOST": "db", **environ})
    assert found.value.reveal_url() == url
    assert str(found.origin("dbname")).startswith("environment SYNC_SQL_D")


def test_one_setting_with_two_values_is_refused() -> None:
    """In the environment and in a config; the values are not shown."""
    environ = {"SYNC_SQL_PASSWD": "hunter2", "SYNC_SQL_PASSWORD": "hunter3"}
    with pytest.raises(Misconfigured) as caught:
        resolve_coordination(environ=environ)
    assert caught.value.field == "SYNC_SQL_PASSWORD"
    assert "differs from SYNC_SQL_PASSWD" in str(caught.value)
    with pytest.raises(Misconfigured, match=r"config\.sync\.sql\.pass\w+ differs from") as other:
        resolve_coordination(config=as_dict({}, {"passwd": "hunter2", "password": "hunter3"}))
    assert "hunter" not in f"{caught.value!r}{caught.value}{other.value!r}{other.value}"


@pytest.mark.parametrize(
    ("sql", "environ", "message"),
    [
        ({}, {"SYNC_SQL_HOST": "db"}, "SYNC_SQL_DBNAME must be set, because SYNC_SQL_HOST is"),
        ({}, {"SYNC_SQL_DATABASE": "d"}, "SYNC_SQL_HOST must be set, because SYNC_SQL_DATABASE is"),
        (
            {},
            {"SYNC_SQL_USER": "u", "SYNC_SQL_PASSWD": "hunter2"},
            "SYNC_SQL_HOST must be set, because SYNC_SQL_PASSWD is",
        ),
        (
            {"host": "db", "passwd": "hunter2"},
            {},
            "config.sync.sql.dbname must be set, because config.sync.sql.host is",
        ),
        (
            {"port": 5432},
            {"SYNC_SQL_DBNAME": "d"},
            "SYNC_SQL_HOST must be set, because SYNC_SQL_DBNAME is",
        ),
        *(
            ({}, {"SYNC_SQL_DBNAME": "d", name: ""}, "SYNC_SQL_HOST must be set")
            for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "SYNC_SQL_HOST")
        ),
        *(
            ({}, {"SYNC_SQL_HOST": "db", name: ""}, "SYNC_SQL_DBNAME must be set")
            for name in ("PGDATABASE", "PGSERVICE", "SYNC_SQL_DATABASE")
        ),
        ({}, {"SYNC_SQL_HOST": "db", "PGHOST": "db"}, "SYNC_SQL_DBNAME must be set"),
        ({}, {"SYNC_SQL_DBNAME": "d", "PGDATABASE": "d"}, "SYNC_SQL_HOST must be set"),
    ],
)
def test_half_a_database_is_refused(
    sql: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    """What is missing would come from each machine's own defaults; what is empty is missing."""
    with pytest.raises(Misconfigured) as caught:
        resolve_coordination(config=as_dict({}, sql), environ=environ)
    assert message in str(caught.value)
    assert "Set host and dbname, or " in str(caught.value)
    assert "hunter2" not in f"{caught.value}{caught.value!r}"


@pytest.mark.parametrize(
    ("sql", "environ"),
    [
        ({"host": "db"}, {"SYNC_SQL_DBNAME": "jobs"}),
        ({"host": "db"}, {"PGDATABASE": "jobs"}),
        ({"dbname": "jobs"}, {"PGHOST": "db"}),
        ({"dbname": "jobs"}, {"PGHOSTADDR": "127.0.0.1"}),
        ({"user": "u"}, {"PGSERVICE": "jobs"}),
        ({"appname": "app_", "timezone": "UTC"}, {}),
    ],
)
def test_sources_may_complete_each_other(sql: dict[str, Any], environ: dict[str, str]) -> None:
    """Also libpq's own variables; names of tables are no part of an address."""
    resolve_coordination(config=as_dict({}, sql), environ=environ)


def test_half_a_database_does_not_matter_beside_a_url() -> None:
    """The URL replaces it."""
    half = {"SYNC_SQL_HOST": "db"}
    assert resolve_coordination(environ=half, url="memory://").value.url == "memory://"
    assert resolve_coordination(CoordinationConfig(url="memory://"), None, half).value.host is None


# A dataclass, as in the guide


def test_a_config_is_a_dataclass() -> None:
    """`asdict` has all settings and nothing else, and builds an equal config."""
    config = CoordinationConfig(total_tokens=5, host="h", password="p", dbname="d")
    assert is_dataclass(config)
    values = asdict(config)
    assert values.keys() == _VARIABLES.keys()
    assert (values["total_tokens"], values["password"], values["url"]) == (5, "p", None)
    assert CoordinationConfig(**values) == config
    assert len({config, CoordinationConfig(**values)}) == 1
    assert config != CoordinationConfig()


def test_arguments_may_be_positional() -> None:
    """In the order of the guide's table, and checked like named ones."""
    guide = (True, 5000, 10, 30, 60, 20, 2, 60, True, 60, 60)
    config = CoordinationConfig(*guide)
    names = [field.name for field in fields(CoordinationConfig)]
    assert names[: len(guide)] == [
        "enabled",
        "total_tokens",
        "heartbeat_interval_sec",
        "heartbeat_timeout_sec",
        "rebalance_check_interval_sec",
        "dead_node_check_interval_sec",
        "token_refresh_initial_interval_sec",
        "token_refresh_steady_interval_sec",
        "locks_enabled",
        "leader_lock_timeout_sec",
        "health_check_interval_sec",
    ]
    assert tuple(asdict(config).values())[: len(guide)] == guide
    assert config.given == set(names[: len(guide)])
    with pytest.raises(Invalid, match=r"total_tokens must be 1 to 100,000 \(got 0\)"):
        CoordinationConfig(True, 0)
    with pytest.raises(TypeError, match="got enabled twice"):
        CoordinationConfig(True, enabled=True)  # type: ignore[misc]
    with pytest.raises(TypeError, match=f"at most {len(names)} arguments"):
        CoordinationConfig(*[None] * (len(names) + 1))  # type: ignore[arg-type]


def test_a_changed_copy_keeps_given_settings() -> None:
    """Those of the original that still have a value, and those that differ from the default."""
    config = CoordinationConfig(total_tokens=5, heartbeat_interval_sec=5, host="h")
    changed = replace(config, minimum_nodes=2, host=None)
    assert (changed.total_tokens, changed.minimum_nodes, changed.host) == (5, 2, None)
    assert changed.given == {"total_tokens", "heartbeat_interval_sec", "minimum_nodes"}
    assert replace(CoordinationConfig(), total_tokens=5).timing(OBJECTS) == OBJECTS
    assert replace(config, host=None, url="memory://").reveal_url() == "memory://"
    with pytest.raises(Invalid, match="Did you mean total_tokens"):
        replace(config, totl_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(Invalid, match="host is part of the url"):
        replace(config, url="memory://")


def test_copies_are_equal_and_remember() -> None:
    """Made by `copy` and by `pickle`."""
    config = CoordinationConfig(heartbeat_interval_sec=5)
    for made in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert made == config
        assert made.given == {"heartbeat_interval_sec"}


# Documentation


def test_unused_settings_are_documented_as_unused() -> None:
    """In the class and on its page: exactly those that nothing reads."""
    source = "".join(
        path.read_text()
        for path in (ROOT / "src" / "jobsync").rglob("*.py")
        if path.name != "config.py"
    )
    used_here = {*_ADDRESS, "url", "reclaim_after"}
    unused = {
        name
        for name in _VARIABLES
        if f"settings.{name}" not in source
        and name not in used_here
        and name not in {"heartbeat_interval_sec", "heartbeat_timeout_sec"}
    }
    doc = CoordinationConfig.__doc__ or ""
    assert set(re.findall(r"^ +(\w+): accepted and unused", doc, re.MULTILINE)) == unused
    page = (ROOT / "docs" / "reference" / "coordination-config.md").read_text()
    section = page.partition("## Accepted and unused\n")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == unused


def test_every_setting_is_documented() -> None:
    """With its default and its variable, once."""
    page = ROOT / "docs" / "reference" / "coordination-config.md"
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| `(\w+)` \|", page.read_text(), re.MULTILINE)
    known = [(f.name, repr(f.default), _VARIABLES[f.name]) for f in fields(CoordinationConfig)]
    assert sorted(rows) == sorted(known)
