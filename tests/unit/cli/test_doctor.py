"""What `doctor` finds out without a server: settings, clocks, and the tables of a file."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from jobsync import Components, Database
from jobsync.cli import doctor as module
from jobsync.cli import schema as schema_module
from jobsync.cli.doctor import doctor
from jobsync.cli.schema import schema
from jobsync.core.clock import Wall
from jobsync.core.codec import Json
from jobsync.core.urls import parse_url
from jobsync.errors import Invalid, JobsyncError, Misconfigured, NotFound, Unavailable
from jobsync.stores.contract import Store
from jobsync.stores.memory import MemoryStore
from jobsync.stores.probe import Finding


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, with no variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ([], {}, ("'sqlite:///jobsync.db'", "default")),
        ([], {"JOBSYNC_URL": "postgresql://u:pw@h/d"}, ("***", "environment JOBSYNC_URL")),
        (["memory://x"], {"JOBSYNC_URL": "memory://y"}, ("'memory://x'", "command line")),
    ],
)
def test_each_setting_is_shown_with_its_origin(
    tmp_path: Path, words: list[str], environ: dict[str, str], expected: tuple[str, str]
) -> None:
    """Of all sections, without secrets; no store is opened."""
    (tmp_path / "jobsync.toml").write_text("[queue]\nconcurrency = 9\n")
    done = CliRunner(env=environ).invoke(doctor, ["--config", "--json", *words])
    assert done.exit_code == 0, done.exception
    rows = {row["setting"]: row for row in json.loads(done.stdout)}
    value, origin = expected
    assert value in rows["url"]["value"]
    assert (rows["url"]["origin"], rows["url"]["variable"]) == (origin, "JOBSYNC_URL")
    assert rows["queue.concurrency"] == {
        "setting": "queue.concurrency",
        "value": "9",
        "origin": "file jobsync.toml queue.concurrency",
        "variable": "JOBSYNC_QUEUE_CONCURRENCY",
    }
    assert {"cache.ttl", "scheduler.timezone", "ttl.batch_size", "heartbeat_interval"} <= {*rows}
    assert "pw" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["jobsync.toml"]


@pytest.mark.parametrize(("skew", "ok"), [(1.0, True), (25.0, True), (-400.0, False)])
async def test_a_wrong_clock_is_named(
    monkeypatch: pytest.MonkeyPatch, skew: float, ok: bool
) -> None:
    """On an object store, where it decides what is due, with what follows from it."""

    async def measure_time(_: object, __: str, components: Components) -> float:
        return components.clock.wall().seconds - skew

    monkeypatch.setattr("jobsync.coordination.clock_skew.measure_time", measure_time)
    found = await module._compare_clocks(MemoryStore(), Components.system())
    assert (found.check, found.ok, bool(found.fix)) == ("clocks agree", ok, not ok)
    assert f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}" in found.detail


class Closing(MemoryStore):
    """A store that tells whether it was closed."""

    is_closed = False

    async def close(self) -> None:
        """Note it."""
        self.is_closed = True
        await super().close()


@pytest.mark.parametrize("case", ["good", "bad", "unwritable", "renewal"])
async def test_a_store_is_closed_whatever_is_found(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Its verdict is renewed only if it passes; what else it is good for is shown only then."""
    store = Closing()
    checks = [Finding("a name is created once", ok=case != "bad", detail="", fix="mend it")]
    renewed: list[list[Finding]] = []

    async def open_unjudged(*_: object) -> Store:
        return store

    async def probe(*_: object) -> list[Finding]:
        if case == "unwritable":
            raise Unavailable("the store", "read-only", "grant it")
        return [*checks]

    async def renew(_: object, findings: list[Finding], __: object) -> None:
        renewed.append([*findings])
        if case == "renewal":
            raise Unavailable("the store", "gone", "wait")

    monkeypatch.setattr("jobsync.stores.opening.open_unjudged", open_unjudged)
    monkeypatch.setattr("jobsync.stores.probe.probe", probe)
    monkeypatch.setattr("jobsync.stores.probe.renew_verdict", renew)
    opened, *found = await module._examine(parse_url("memory://"))
    assert (opened.check, opened.ok, opened.detail) == ("the store can be opened", True, store.name)
    assert store.is_closed
    assert renewed == ([checks] if case in {"good", "renewal"} else [])
    failures = {"unwritable": ("read-only", "grant it"), "renewal": ("gone", "wait")}
    if case in failures:
        detail, fix = failures[case]
        assert found == [Finding("the store can be written", ok=False, detail=detail, fix=fix)]
    else:
        assert found[:1] == checks
        assert [each.check for each in found[1:]] == (["queues"] if case == "good" else [])


def test_the_url_of_a_program_has_the_program_for_its_origin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings that its code does not give come from elsewhere."""
    app = ModuleType("some_app")
    app.db = Database("memory://of-the-app")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_app", app)
    monkeypatch.setattr(sys, "path", list(sys.path))
    environ = {"JOBSYNC_URL": "memory://other"}
    words = ["--config", "--json", "--app", "some_app:db"]
    done = CliRunner(env=environ).invoke(doctor, words)
    rows = {row["setting"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)}
    assert rows["url"] == ("'memory://of-the-app'", "code of some_app:db")
    assert rows["queue.concurrency"][1] == "default"


@pytest.mark.parametrize("traits", [{}, {"bare_etags": True}])
@pytest.mark.parametrize("former", [None, {}, {"bare_etags": True}])
def test_a_verdict_with_other_traits_was_corrected(
    monkeypatch: pytest.MonkeyPatch, traits: dict[str, Json], former: dict[str, Json] | None
) -> None:
    """Then workers have to be restarted; the same traits need nothing."""
    store = MemoryStore()
    monkeypatch.setattr(MemoryStore, "traits", traits)
    replaced = None if former is None else SimpleNamespace(traits=former)
    found = module._compare_verdict(cast("Any", replaced), store)
    is_corrected = former is not None and former != traits
    assert [(each.check, each.ok, bool(each.fix)) for each in found] == (
        [("the stored verdict", True, True)] if is_corrected else []
    )


@pytest.mark.parametrize(
    ("traits", "checks"),
    [
        ({}, []),
        ({"bare_etags": False, "conditional_delete": True}, []),
        ({"bare_etags": True, "conditional_delete": None}, ["ETags"]),
        ({"conditional_delete": False}, ["burial"]),
        ({"bare_etags": True, "conditional_delete": False}, ["ETags", "burial"]),
    ],
)
def test_what_is_special_of_a_server_is_no_failure(
    traits: dict[str, Json], checks: list[str]
) -> None:
    """What is not known is not said."""
    found = module._describe_traits(traits)
    assert [each.check for each in found] == checks
    assert all(each.ok and not each.fix for each in found)


@pytest.mark.parametrize(
    ("error", "detail", "fix"),
    [
        (Invalid("url", "x", "is no URL", "write one"), "url is no URL", "write one"),
        (Misconfigured("url", "x", "is no URL", "write one"), "url is no URL", "write one"),
        (Unavailable("the store", "refused", "start it"), "refused", "start it"),
        (NotFound("bucket", "b"), "There is no bucket 'b'.", ""),
    ],
)
def test_each_error_of_a_store_has_its_detail_and_its_fix(
    error: JobsyncError, detail: str, fix: str
) -> None:
    """Whatever its class."""
    assert module._failure("it opens", error) == Finding(
        "it opens", ok=False, detail=detail, fix=fix
    )


@pytest.mark.parametrize(
    ("found", "state", "code"),
    [(0, "missing", 3), (2, "outdated", 3), (3, "current", 0), (4, "newer", 0)],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_newer_tables_are_no_fault(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: int,
    state: str,
    code: int,
    is_terminal: bool,
) -> None:
    """Older ones are; what to do about them is told in any form."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(schema_module, "_compare_versions", lambda _: (found, 3, "start a worker"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    fix = {"current": "", "newer": "nothing to do: newer code has added to them"}.get(
        state, "start a worker"
    )
    for as_json in (False, True):
        with pytest.raises(SystemExit) as ended:
            schema_module._check(parse_url("sqlite:///jobs.db"), as_json=as_json)
        assert ended.value.code == code
        printed = capsys.readouterr().out
        if as_json:
            row = {"tables": state, "version": found, "needed": 3, "fix": fix}
            assert json.loads(printed) == [row]
        elif is_terminal:
            title, *facts = printed.splitlines()
            assert title == f"sqlite:///jobs.db: the tables are {state}"
            expected = {"version": str(found), "needed": "3", **({"fix": fix} if fix else {})}
            assert dict(fact.strip().split(maxsplit=1) for fact in facts) == expected
        else:
            assert printed.splitlines()[1].split("\t") == [state, str(found), "3", fix]


@pytest.mark.parametrize(("prefix", "pattern"), [("", "*"), ("/jobs/a", "jobs/a/*")])
def test_the_policy_allows_what_is_needed_and_no_more(prefix: str, pattern: str) -> None:
    """Below the prefix alone, and not for others that begin alike."""
    policy = json.loads(CliRunner().invoke(schema, [f"s3://bucket{prefix}"]).stdout)
    listing, objects = policy["Statement"]
    assert listing == {
        "Effect": "Allow",
        "Action": ["s3:ListBucket"],
        "Resource": ["arn:aws:s3:::bucket"],
        "Condition": {"StringLike": {"s3:prefix": [pattern]}},
    }
    assert objects == {
        "Effect": "Allow",
        "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
        "Resource": [f"arn:aws:s3:::bucket/{pattern}"],
    }


def test_the_tables_of_a_file_are_checked(tmp_path: Path) -> None:
    """Without writing to it; the script is for people who have to apply it."""
    (tmp_path / "jobs.db").touch()
    done = CliRunner().invoke(schema, ["--check", "--json", "sqlite:///jobs.db"])
    (row,) = json.loads(done.stdout)
    assert (done.exit_code, row["tables"], row["version"]) == (3, "missing", 0)
    assert not (tmp_path / "jobs.db").stat().st_size
    missing = CliRunner().invoke(schema, ["--check", "sqlite:///none.db"])
    assert "cannot be read" in str(missing.exception)
    whole = CliRunner().invoke(schema, ["sqlite:///jobs.db"]).stdout
    assert whole.startswith("-- The schema of jobsync ")
    tables = CliRunner().invoke(schema, ["sqlite:///jobs.db", "--tables-only"]).stdout
    assert "CREATE TABLE jobsync_record" in tables
    assert "CREATE VIEW" in whole
    assert "CREATE VIEW" not in tables


@pytest.mark.parametrize(
    ("failed", "fixes", "last"),
    [
        ((), 0, "all checks passed"),
        (("a name is created once", "a stale version is refused"), 1, "cannot use this store"),
        (("clocks agree",), 1, "but not with the clock of this machine"),
        (("a name is created once", "clocks agree"), 1, "cannot use this store"),
    ],
)
def test_one_fix_for_several_failures_is_shown_once(
    capsys: pytest.CaptureFixture[str], failed: tuple[str, ...], fixes: int, last: str
) -> None:
    """The last line says whether it is the store or the clock."""
    findings = [Finding(check, ok=False, detail="no", fix="mend it") for check in failed]
    module._show([Finding("it opens", ok=True), *findings])
    shown = capsys.readouterr().out
    assert shown.count("fix: mend it") == fixes
    assert last in shown.splitlines()[-1]


@pytest.mark.parametrize("failed", [[], ["first"], ["first", "second"]])
@pytest.mark.parametrize("form", ["terminal", "pipe", "json"])
def test_one_check_that_fails_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, form: str, failed: list[str]
) -> None:
    """Whichever it is; people see the store, and programs what was checked alone."""
    findings = [
        Finding("first", ok="first" not in failed, detail="the detail", fix="mend it"),
        Finding("second", ok="second" not in failed),
    ]

    async def examine(_: object) -> list[Finding]:
        return findings

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(module, "_examine", examine)
    terminal = SimpleNamespace(isatty=lambda: form == "terminal")
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdout=terminal))
    done = CliRunner().invoke(doctor, ["memory://x", *(["--json"] if form == "json" else [])])
    assert done.exit_code == (3 if failed else 0), done.exception
    rows = [
        {"check": "first", "ok": "first" not in failed, "detail": "the detail", "fix": "mend it"},
        {"check": "second", "ok": "second" not in failed, "detail": "", "fix": ""},
    ]
    if form == "json":
        assert json.loads(done.stdout) == rows
    elif form == "pipe":
        words: dict[object, object] = {True: "yes", False: "no"}
        cells = [[words.get(cell, cell) for cell in row.values()] for row in rows]
        assert [line.split("\t") for line in done.stdout.splitlines()] == [[*rows[0]], *cells]
    else:
        title, empty, *lines = done.stdout.splitlines()
        assert (title, empty) == ("memory://x (from the command line)", "")
        marks = {name: "FAIL" if name in failed else "pass" for name in ("first", "second")}
        assert lines[:3] == [
            f"  {marks['first']}  first: the detail",
            "        fix: mend it",
            f"  {marks['second']}  second",
        ]


async def test_a_missing_file_is_not_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path is probably wrong; no store is opened."""
    monkeypatch.setattr("jobsync.stores.opening.open_unjudged", None)
    (found,) = await module._examine(parse_url(f"sqlite:///{tmp_path}/none.db"))
    assert (found.check, found.ok) == ("the store can be opened", False)
    assert found.detail == f"there is no file {tmp_path}/none.db"
    assert found.fix.startswith("correct the path, or ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_clock", [False, True])
@pytest.mark.parametrize("is_wrong", [False, True])
async def test_clocks_are_compared_in_place_of_the_probe_where_the_store_has_none(
    monkeypatch: pytest.MonkeyPatch, has_clock: bool, is_wrong: bool
) -> None:
    """A clock that is wrong fails the store, whose verdict is then not renewed."""
    names = ("a name is created once", "clocks agree", "a stale version is refused")
    findings = [Finding(name, ok=True, detail="by the probe") for name in names]
    store, renewed = Closing(), list[object]()

    async def return_(value: object) -> Any:
        return value

    def renew(*arguments: object) -> Any:
        renewed.append(arguments)
        return return_(None)

    clocks = Finding("clocks agree", ok=not is_wrong, detail="compared")
    monkeypatch.setattr("jobsync.stores.opening.open_unjudged", lambda *_: return_(store))
    monkeypatch.setattr("jobsync.stores.probe.probe", lambda *_: return_([*findings]))
    monkeypatch.setattr("jobsync.stores.probe.renew_verdict", renew)
    monkeypatch.setattr(store, "now", lambda: return_(Wall(1.0) if has_clock else None))
    monkeypatch.setattr(module, "_compare_clocks", lambda *_: return_(clocks))
    _, *found = await module._examine(parse_url("memory://"))
    expected = [findings[0], findings[1] if has_clock else clocks, findings[2]]
    assert found[:3] == expected
    assert bool(renewed) is (has_clock or not is_wrong)
    assert [each.check for each in found[3:]] == (["queues"] if renewed else [])


@pytest.mark.parametrize(("sql", "way"), [(None, "yes, in pages: "), (object(), "yes")])
def test_a_store_has_queues_in_its_own_way(sql: object, way: str) -> None:
    """In tables, or in pages, whose costs are told."""
    found = module._describe_queues(cast("Any", SimpleNamespace(sql=sql, traits={})))
    assert (found.check, found.ok) == ("queues", True)
    assert found.detail.startswith(way)
    assert (found.detail == "yes") is (sql is not None)
