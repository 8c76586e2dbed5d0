"""The arguments of a job: where settings come from, and which values are refused."""

import datetime as dt
import math
import re
import threading
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from servers import PostgresServer
from waiting import until

from jobsync import (
    ClaimLost,
    Components,
    CoordinationConfig,
    Invalid,
    Job,
    Misconfigured,
    RebalanceEvent,
    Task,
)
from jobsync.core.clock import Mono, SystemClock, Wall
from jobsync.core.urls import PostgresUrl, parse_url

DAY = date(2026, 1, 5)
FEW = CoordinationConfig(total_tokens=10)


def settings(**values: Any) -> SimpleNamespace:
    """Create a config module like the guide's."""
    return SimpleNamespace(sync=SimpleNamespace(coordination=SimpleNamespace(**values)))


# Where settings come from


def test_explicit_settings_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """`coordination_config`, then `config`, then the environment, then the default."""
    monkeypatch.setenv("SYNC_TOTAL_TOKENS", "30")
    monkeypatch.setenv("SYNC_HEARTBEAT_INTERVAL", "3")
    config = settings(total_tokens=20, minimum_nodes=2)
    job = Job("a", "s", config, coordination_config=CoordinationConfig(total_tokens=10))
    assert job.settings.total_tokens == 10
    assert job.settings.minimum_nodes == 2
    assert job.settings.heartbeat_interval_sec == 3
    assert job.settings.heartbeat_timeout_sec == 15
    assert Job("a", "s", config).settings.total_tokens == 20
    assert Job("a", "s").settings.total_tokens == 30


def test_url_has_precedence_over_everything(memory: str) -> None:
    """Also over a server in the settings."""
    elsewhere = CoordinationConfig(host="nowhere.invalid", dbname="x", total_tokens=10)
    with Job("a", "s", coordination_config=elsewhere, url=memory) as job:
        assert len(job.my_tokens) == 10


@pytest.fixture
def warned() -> tuple[Components, list[Any]]:
    """Components, and the warnings about the store that are emitted with them."""
    components = Components.system()
    events: list[Any] = []
    components.events.on("jobs:default-store", events.append)
    return components, events


def test_entering_without_a_database_says_which_file_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    warned: tuple[Components, list[Any]],
) -> None:
    """As a warning, with the absolute path: a node in another directory uses another file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)
    components, events = warned
    with Job("a", "s", coordination_config=FEW, components=components):
        pass
    (event,) = events
    assert event.path == str(tmp_path / "jobsync.db")
    assert Path(event.path).exists()
    (line,) = [record for record in caplog.records if "jobs:default-store" in record.getMessage()]
    assert line.levelname == "WARNING"
    assert event.path in line.getMessage()
    assert "SYNC_SQL_URL" in line.getMessage()


@pytest.mark.parametrize("source", ["argument", "code", "config", "SYNC_SQL_URL", "JOBSYNC_URL"])
def test_a_named_database_causes_no_warning(
    source: str,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    warned: tuple[Components, list[Any]],
) -> None:
    """Whichever setting names it."""
    components, events = warned
    named: dict[str, dict[str, Any]] = {
        "argument": {"url": memory},
        "code": {"coordination_config": CoordinationConfig(url=memory)},
        "config": {"config": {"sync": {"sql": {"url": memory}}}},
    }
    if source.isupper():
        monkeypatch.setenv(source, memory)
    with Job("a", "s", components=components, **named.get(source, {})):
        pass
    assert events == []


def test_half_a_database_is_refused_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """In a config and in the environment, unless `url` replaces it."""
    for variable in ("PGHOST", "PGHOSTADDR", "PGDATABASE", "PGSERVICE"):
        monkeypatch.delenv(variable, raising=False)
    half = SimpleNamespace(sync=SimpleNamespace(sql=SimpleNamespace(host="db", user="u")))
    with pytest.raises(Misconfigured, match=r"config\.sync\.sql\.dbname must be set, because"):
        Job("a", "s", half)
    monkeypatch.setenv("SYNC_SQL_DATABASE", "jobs")
    with pytest.raises(Misconfigured, match="SYNC_SQL_HOST must be set, because SYNC_SQL_DATABASE"):
        Job("a", "s")
    assert Job("a", "s", half, url=memory).settings.url == memory


def test_the_original_s_variables_name_a_server(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside ours."""
    found = parse_url(postgres.url)
    assert isinstance(found, PostgresUrl)
    monkeypatch.setenv("SYNC_SQL_HOST", found.host)
    monkeypatch.setenv("SYNC_SQL_PORT", str(found.port or ""))
    monkeypatch.setenv("SYNC_SQL_DATABASE", found.database)
    monkeypatch.setenv("SYNC_SQL_USERNAME", found.user)
    if found.password is not None:
        monkeypatch.setenv("SYNC_SQL_PASSWORD", found.password.reveal())
    few = CoordinationConfig(total_tokens=10, appname="original_")
    with Job("a", "s", coordination_config=few) as job:
        assert len(job.my_tokens) == 10
        assert job._cn.execute("SELECT current_database()").fetchone()[0] == found.database


def test_a_server_may_be_given_in_parts(postgres: PostgresServer) -> None:
    """As in the newer release."""
    place = re.match(r"postgresql://(\w+)(?::(\w+))?@([\w.]+):(\d+)/(\w+)", postgres.url)
    assert place is not None
    user, password, host, port, dbname = place.groups()
    parts: dict[str, Any] = {"user": user, "password": password, "host": host, "port": int(port)}
    config = CoordinationConfig(
        dbname=dbname,
        appname="parts_",
        total_tokens=10,
        **{name: value for name, value in parts.items() if value},
    )
    with Job("a", config) as job:
        assert len(job.my_tokens) == 10


def test_the_argument_orders_of_both_releases_work(memory: str) -> None:
    """The guide passes site and config; the newer release the configuration, then the date."""
    older = Job("a", "s", None, DAY, 120, 0, False, None, False, FEW)
    newer = Job("a", FEW, DAY)
    assert (older.settings.total_tokens, newer.settings.total_tokens) == (10, 10)
    assert (older.date, newer.date) == (DAY, DAY)
    assert (older.site, newer.site) == ("s", "")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (DAY, DAY),
        (datetime(2026, 1, 5, 23, 59, tzinfo=dt.UTC), DAY),
        (None, datetime.now().astimezone().date()),
    ],
    ids=["date", "datetime", "today"],
)
def test_the_date(value: Any, found: date) -> None:
    """A date, the date of a datetime, or today in this process's time zone."""
    assert Job("a", "s", date=value).date - found <= timedelta(days=1)
    if value:
        assert Job("a", "s", date=value).date == found


# Refused values


async def _await(_: object) -> None:
    pass


def _yield(_: object) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"node_name": ""}, "node_name must be a text that is not empty (got '')"),
        ({"node_name": 7}, "node_name must be a text that is not empty (got 7)"),
        ({"site": ""}, "site must be a text that is not empty (got '')"),
        ({"date": "2026-01-05"}, "is not a date (got '2026-01-05'). Pass a datetime.date"),
        ({"wait_on_enter": -1}, "wait_on_enter is not a duration (got -1)"),
        ({"wait_on_exit": "5"}, "wait_on_exit is not a duration (got '5')"),
        ({"wait_on_enter": 10**400}, "wait_on_enter is not a duration (got 1000"),
        ({"wait_on_exit": math.nan}, "wait_on_exit is not a duration (got nan)"),
        ({"on_rebalance": 1}, "on_rebalance must be callable (got 1)"),
        ({"lock_provider": "x"}, "lock_provider must be callable (got 'x')"),
        (
            {"on_tokens_added": _await},
            "on_tokens_added is a coroutine function, which",
        ),
        ({"lock_provider": _yield}, "lock_provider is a generator, which nobody runs"),
        ({"coordination_config": {}}, "is not a CoordinationConfig"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_wrong_arguments_are_refused_with_the_fix(options: dict[str, Any], problem: str) -> None:
    """Before a store is opened."""
    with pytest.raises(Invalid) as refused:
        Job(**{"node_name": "a", "site": "s"} | options)
    assert problem in str(refused.value)


def test_a_mistyped_setting_is_refused_with_a_suggestion() -> None:
    """In code and in a config."""
    with pytest.raises(Invalid, match="Did you mean total_tokens"):
        CoordinationConfig(totl_tokens=5)  # type: ignore[call-arg]
    with pytest.raises(Misconfigured, match=r"config\.sync\.coordination\.totl_tokens.*Did you"):
        Job("a", "s", settings(totl_tokens=5))


def test_impossible_settings_are_refused_with_the_fix() -> None:
    """No tokens, and a timeout of less than three heartbeats."""
    with pytest.raises(Invalid, match=r"total_tokens must be 1 to 100,000"):
        CoordinationConfig(total_tokens=0)
    with pytest.raises(
        Invalid, match=r"heartbeat_timeout_sec .*three heartbeats.*got 10.*15 or more"
    ):
        CoordinationConfig(heartbeat_interval_sec=5, heartbeat_timeout_sec=10)


def test_a_heartbeat_too_long_for_the_store_s_timeout_is_refused(memory: str) -> None:
    """Only one of the two was given: the error names the job's setting."""
    slow = CoordinationConfig(heartbeat_interval_sec=10)
    with (
        pytest.raises(Invalid, match=r"heartbeat_timeout_sec .*got 15.*Use 30 or more"),
        Job("a", "s", coordination_config=slow, url=memory),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"site": "staging"},
            r"site must be 'production' as on the live node a \(got 'staging'\)",
        ),
        (
            {"coordination_config": CoordinationConfig(total_tokens=20)},
            r"total_tokens must be 10 as on the live node a \(got 20\)\. Use the same",
        ),
        (
            {"coordination_config": CoordinationConfig(total_tokens=10, hash_function="sha256")},
            r"hash_function must be 'md5' as on the live node a \(got 'sha256'\)",
        ),
    ],
    ids=["site", "total_tokens", "hash_function"],
)
def test_a_node_that_disagrees_with_the_fleet_is_refused(
    url: str, options: dict[str, Any], problem: str
) -> None:
    """While another node is alive, which the error names; afterwards the settings change."""
    chosen: dict[str, Any] = {"node_name": "b", "site": "production", "wait_on_enter": 0.2}
    chosen |= {"coordination_config": FEW} | options
    with (
        Job("a", "production", coordination_config=FEW, url=url),
        pytest.raises(Misconfigured, match=problem),
    ):
        Job(**chosen, url=url).__enter__()
    with Job(**chosen | {"wait_on_enter": 30}, url=url) as job:
        assert len(job.my_tokens) == job.settings.total_tokens


def test_another_appname_is_another_fleet(memory: str) -> None:
    """It may have other settings, and owns everything."""
    other = CoordinationConfig(total_tokens=20, appname="other_")
    with (
        Job("a", "production", coordination_config=FEW, url=memory) as first,
        Job("a", "staging", coordination_config=other, url=memory) as second,
    ):
        assert (len(first.my_tokens), len(second.my_tokens)) == (10, 20)
        first.add_task("x")
        second.add_task("x")


def test_two_nodes_with_one_name_are_refused(url: str) -> None:
    """The second waits, then the error names the holder; it may join when the first has left."""
    with (
        Job("a", "s", coordination_config=FEW, url=url),
        pytest.raises(Misconfigured, match=r"held by the live process \d+ on .+got 'a'.+Stop"),
        Job("a", "s", coordination_config=FEW, url=url, wait_on_enter=0.2),
    ):
        pass
    with Job("a", "s", coordination_config=FEW, url=url) as job:
        assert len(job.my_tokens) == 10


@pytest.mark.parametrize(
    "bad", [None, [1], {}, "", "a\0b", object()], ids=lambda bad: type(bad).__name__
)
def test_invalid_task_ids_are_refused(memory: str, bad: object) -> None:
    """By every method that takes a task."""
    with Job("a", "s", coordination_config=FEW, url=memory) as job:
        for call in (job.can_claim_task, job.add_task, job.task_to_token):
            with pytest.raises(Invalid):
                call(bad)
        with pytest.raises(Invalid):
            job.add_tasks([bad])


# Behaviour


def test_entering_waits_for_minimum_nodes(memory: str) -> None:
    """Too few in time is an error with their number; enough nodes enter together."""
    two = CoordinationConfig(total_tokens=10, minimum_nodes=2)
    with (
        pytest.raises(
            TimeoutError, match=r"1 of minimum_nodes=2 joined within wait_on_enter=0\.3 s"
        ),
        Job("a", "s", coordination_config=two, url=memory, wait_on_enter=timedelta(seconds=0.3)),
    ):
        pass
    counts = []

    def enter(name: str) -> None:
        with Job(name, "s", coordination_config=two, url=memory) as job:
            counts.append(len(job.my_tokens))
            barrier.wait(60)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=enter, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [5, 5]


class _Watched(SystemClock):
    """A clock that adds the time that waits have taken."""

    passed = 0.0

    def mono(self) -> Mono:
        return super().mono() + self.passed


def test_wait_on_enter_bounds_all_that_entering_waits_for(memory: str) -> None:
    """Time spent waiting for the name is not spent again waiting for other nodes."""
    clock = _Watched()
    slow = msgspec.structs.replace(Components.system(), clock=clock)
    two = CoordinationConfig(total_tokens=10, minimum_nodes=2)

    def spend(_: Job) -> None:
        clock.passed += 1000.0

    job = Job("a", "s", coordination_config=two, url=memory, components=slow, lock_provider=spend)
    with pytest.raises(TimeoutError, match=r"1 of minimum_nodes=2 joined within wait_on_enter=120"):
        job.__enter__()


def test_the_lock_provider_is_called_before_anything_is_owned(memory: str) -> None:
    """It gets the job, which has joined."""
    seen = []

    def provide(job: Job) -> None:
        seen.append((job.node_name, job.my_tokens, job.date))

    with Job("a", "s", None, DAY, url=memory, coordination_config=FEW, lock_provider=provide):
        pass
    assert seen == [("a", set(), DAY)]


def test_callbacks_are_called_in_order(memory: str) -> None:
    """With the tokens gained, the tokens given up, and the event."""
    calls: list[tuple[str, Any]] = []
    removed = threading.Event()

    def remove(tokens: frozenset[int]) -> None:
        calls.append(("removed", len(tokens)))
        removed.set()

    first = Job(
        "a",
        "s",
        coordination_config=FEW,
        url=memory,
        on_rebalance=lambda event: calls.append(("rebalance", event)),
        on_tokens_added=lambda tokens: calls.append(("added", len(tokens))),
        on_tokens_removed=remove,
    )
    with first:
        with Job("b", "s", coordination_config=FEW, url=memory):
            assert removed.wait(60)
        first.stop()
    assert calls[:2] == [
        ("added", 10),
        ("rebalance", RebalanceEvent(True, 1, 10, 0)),
    ]
    assert ("removed", 5) in calls
    kinds = [event for kind, event in calls if kind == "rebalance"]
    assert [event.tokens_removed for event in kinds[:2]] == [0, 5]
    assert [event.is_initial for event in kinds[:2]] == [True, False]


def test_nothing_follows_a_date_that_is_the_third_argument() -> None:
    """The newer release has wait_on_enter there; here it would be lost."""
    assert Job("a", FEW, DAY).date == DAY
    with pytest.raises(Invalid, match="by name"):
        Job("a", FEW, DAY, 60)  # type: ignore[arg-type]


def test_the_first_tokens_of_a_node_are_marked(memory: str) -> None:
    """Also those of a node that joins a fleet, whose assignment has a number already."""
    events: list[RebalanceEvent] = []
    joined = Job("b", "s", coordination_config=FEW, url=memory, on_rebalance=events.append)
    with Job("a", "s", coordination_config=FEW, url=memory), joined:
        assert len(joined.my_tokens) == 5
    assert [event.is_initial for event in events if event.tokens_added] == [True]
    assert events[0].token_version > 1


def test_on_rebalance_may_take_nothing_and_may_fail(memory: str) -> None:
    """It is called without an argument; an exception becomes an event."""
    calls = []
    failed: list[Any] = []
    components = Components.system()
    components.events.on("jobsync:handler-failed", failed.append)

    def count() -> None:
        calls.append(1)
        raise ValueError("no luck")

    with Job(
        "a", "s", coordination_config=FEW, url=memory, on_rebalance=count, components=components
    ):
        pass
    assert calls
    assert failed[0].error == "ValueError: no luck"


def test_many_threads_get_each_task_once(url: str) -> None:
    """All check the same tasks; each is claimed by one thread."""
    got: list[str] = []
    lost: list[str] = []
    start = threading.Barrier(6)

    def work(job: Job) -> None:
        start.wait()
        for number in range(8):
            try:
                job.add_task(number)
            except ClaimLost as error:
                lost.append(error.task_id)
            else:
                got.append(str(number))

    with Job("a", "s", coordination_config=FEW, url=url) as job:
        threads = [threading.Thread(target=work, args=(job,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(got) == [str(number) for number in range(8)]
        assert len(lost) == 5 * 8
        job.write_audit()
        assert len(job.get_audit()) == 8


def test_set_claim_accepts_one_or_several(memory: str) -> None:
    """As in the newer release."""
    with Job("a", "s", coordination_config=FEW, url=memory) as job:
        job.set_claim("x")
        job.set_claim([1, Task(2)])
        assert job.get_coordination_status()["running_tasks"] == ["x", "1", "2"]


@pytest.mark.parametrize("enabled", [True, False], ids=["fleet", "alone"])
def test_set_claim_accepts_a_task_twice(url: str, enabled: bool) -> None:
    """It is claimed once, and so are the tasks after it."""
    settings = CoordinationConfig(total_tokens=10, enabled=enabled)
    with Job("a", "s", coordination_config=settings, url=url) as job:
        job.set_claim([1, 2, 3, 2, "1", 4])
        assert job.get_coordination_status()["running_tasks"] == ["1", "2", "3", "4"]
        with pytest.raises(ClaimLost, match="'4' was not claimed: this node does it already"):
            job.set_claim([5, 4, 6])
        assert job.get_coordination_status()["running_tasks"][4:] == ["5", "6"]


def test_set_claim_claims_nothing_if_a_task_is_refused(memory: str) -> None:
    """The tasks before it are not claimed."""
    with Job("a", "s", coordination_config=FEW, url=memory) as job:
        with pytest.raises(Invalid):
            job.set_claim([1, 2, ...])
        assert job.get_coordination_status()["running_tasks"] == []


class _Wrong(SystemClock):
    """A machine whose time of day is five minutes off."""

    def wall(self) -> Wall:
        return super().wall() + 300.0


def test_a_node_with_a_wrong_wall_clock_works_like_the_others(postgres: PostgresServer) -> None:
    """It joins, gets tokens, refuses tasks just done elsewhere, and dates claims correctly."""
    url = f"{postgres.url}?schema=jobs_clock"
    wrong = msgspec.structs.replace(Components.system(), clock=_Wrong())
    few = CoordinationConfig(total_tokens=100)
    with Job("right", "s", coordination_config=few, url=url, date=DAY) as right:
        with Job("wrong", "s", coordination_config=few, url=url, date=DAY, components=wrong) as job:
            assert len(job.my_tokens) == 50
            mine = [n for n in range(100) if job.can_claim_task(n)]
            theirs = [n for n in range(100) if right.can_claim_task(n)]
            assert sorted(mine + theirs) == list(range(100))
            job.add_tasks(mine[:5])
            job.write_audit()
            right.add_tasks(theirs[:5])
            right.write_audit()
            times = [line["created_on"] for line in job.get_audit()]
            assert max(times) - min(times) < timedelta(minutes=1)
        right._call(until(lambda: len(right.my_tokens) == 100))
        assert not any(right.can_claim_task(n) for n in mine[:5])
        assert all(right.can_claim_task(n) for n in mine[5:])
