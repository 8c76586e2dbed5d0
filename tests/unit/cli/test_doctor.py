"""What `doctor` finds out without a server: settings, clocks, and the tables of a file."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobsync import Components
from jobsync.cli import doctor as module
from jobsync.cli.doctor import doctor
from jobsync.cli.schema import schema
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
