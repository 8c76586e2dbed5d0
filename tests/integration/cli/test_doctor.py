"""`jobsync doctor` and `jobsync schema`, run as a user runs them."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
import servers
from proxy import Proxy
from terminal import jobsync

from jobsync import Components
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.objects.quirks import Quirks
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.probe import VERDICT_KEY


def findings(run: subprocess.CompletedProcess[str]) -> dict[str, bool]:
    """Read what `--json` printed."""
    return {row["check"]: row["ok"] for row in json.loads(run.stdout)}


CHECKS = {
    "the store can be opened",
    "a name is created once",
    "a stale version is refused",
    "equal content is a new version",
    "of many creators one wins",
    "a listing shows what was written",
    "a deleted name stays deleted",
    "clocks agree",
    "queues",
}


def test_a_file_passes_every_check(tmp_path: Path) -> None:
    """SQLite passes, and is not created; in a pipe, columns are separated by tabs."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    missing = jobsync("doctor", "--json", url)
    assert missing.returncode == 3
    (finding,) = json.loads(missing.stdout)
    assert finding["detail"] == f"there is no file {tmp_path / 'jobs.db'}"
    assert finding["fix"]
    assert not [*tmp_path.iterdir()]
    (tmp_path / "jobs.db").touch()
    run = jobsync("doctor", url)
    assert run.returncode == 0, run.stderr
    header, *rows = [line.split("\t") for line in run.stdout.splitlines()]
    assert header == ["check", "ok", "detail", "fix"]
    assert {row[0] for row in rows} == CHECKS
    assert {row[1] for row in rows} == {"yes"}


def test_postgresql_passes_and_is_left_unchanged(postgres: servers.PostgresServer) -> None:
    """Every check passes, and no record remains."""
    url = f"{postgres.url}?schema=doctored"
    run = jobsync("doctor", "--json", url)
    assert run.returncode == 0, run.stdout
    assert set(findings(run)) == CHECKS
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute("SELECT count(*) FROM doctored.jobsync_record").fetchone()
    assert row == (0,)


def test_a_bucket_passes_every_check(bucket_url: str) -> None:
    """Every check passes, and the secret is not shown."""
    run = jobsync("doctor", "--json", bucket_url)
    assert run.returncode == 0, run.stdout
    assert set(findings(run)) >= CHECKS
    assert "testsecret123" not in run.stdout + run.stderr


def test_a_false_verdict_is_corrected(bucket_url: str, quirks: Quirks) -> None:
    """What is stored is not relied on: the server's traits are found out again."""
    traits = {
        "bare_etags": not quirks.bare_etags,
        "conditional_delete": not quirks.conditional_delete,
    }

    async def read_or_keep(verdict: dict[str, object] | None = None) -> Any:
        url = parse_url(bucket_url)
        assert isinstance(url, ObjectsUrl)
        store = await ObjectsStore.connect(url)
        record = await store.get(VERDICT_KEY)
        if verdict is not None:
            record = await store.create(VERDICT_KEY, verdict)
        await store.close()
        return record and record.value

    first = jobsync("doctor", "--json", bucket_url)
    assert "the stored verdict" not in findings(first)
    assert asyncio.run(read_or_keep()) is None
    now = Components.system().clock.wall().seconds
    false = {"at": now, "passed": [], "traits": traits, "revision": 1}
    asyncio.run(read_or_keep(false))
    run = jobsync("doctor", "--json", bucket_url)
    assert run.returncode == 0, run.stdout
    assert findings(run)["the stored verdict"]
    kept = asyncio.run(read_or_keep())
    assert Quirks.from_traits(kept["traits"]) == quirks
    assert kept["passed"]
    again = jobsync("doctor", "--json", bucket_url)
    assert "the stored verdict" not in findings(again)


def test_a_server_that_ignores_conditions_is_rejected() -> None:
    """Servers such as rclone answer 200 where a condition fails: they cannot be used."""
    with servers.RcloneServer() as server:
        server.create_bucket("tests")
        run = jobsync("doctor", "--json", server.url("tests"))
        assert run.returncode == 3
        found = findings(run)
        assert not found["a name is created once"]
        assert not found["a stale version is refused"]
        program = (
            f"import asyncio, jobsync; asyncio.run(jobsync.open_store({server.url('tests')!r}))"
        )
        opened = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
    assert "Misconfigured" in opened.stderr
    assert "fails the probe: a name is created once" in opened.stderr
    assert "would lose updates" in opened.stderr


def test_an_unreachable_server_is_unhealthy(postgres: servers.PostgresServer) -> None:
    """A closed port is reported, with exit code 3."""
    with Proxy("127.0.0.1", postgres.port) as proxy:
        proxy.refuse()
        run = jobsync("doctor", f"postgresql://me:hush-hush@127.0.0.1:{proxy.port}/x")
    assert run.returncode == 3
    assert "the store can be opened\tno" in run.stdout
    assert "hush-hush" not in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "mysql://me:hush-hush@db/x"], "unknown scheme 'mysql'"),
        (["doctor", "jobs.db"], "Did you mean sqlite:///jobs.db?"),
        (["doctr"], "No such command 'doctr'"),
        (["doctor", "--jsn", "memory://"], "No such option"),
        (["schema", "mysql://me:hush-hush@db/x"], "unknown scheme 'mysql'"),
    ],
)
def test_wrong_usage_is_reported(words: list[str], message: str) -> None:
    """With exit code 2, and the fix on standard error."""
    run = jobsync(*words)
    assert run.returncode == 2
    assert message in run.stderr
    assert "hush-hush" not in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_the_printed_schema_is_enough(postgres: servers.PostgresServer) -> None:
    """Once an administrator has applied it, a role without CREATE rights passes every check."""
    as_admin = postgres.create_database("prepared")
    as_app = f"{postgres.create_role('doctored_app', 'hush-hush', 'prepared')}?schema=app"
    (missing,) = json.loads(jobsync("schema", "--check", "--json", as_app).stdout)
    assert (missing["tables"], missing["version"]) == ("missing", 0)
    refused = jobsync("doctor", as_app)
    assert refused.returncode == 3
    assert "run `jobsync schema URL`" in refused.stdout
    printed = jobsync("schema", as_app)
    assert printed.returncode == 0, printed.stderr
    assert "hush-hush" not in printed.stdout + refused.stdout
    with psycopg.connect(as_admin, autocommit=True) as admin:
        admin.execute(printed.stdout.encode())
    checked = jobsync("schema", "--check", as_app)
    assert (checked.returncode, checked.stdout.splitlines()[1].split("\t")[0]) == (0, "current")
    run = jobsync("doctor", as_app)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_database_that_cannot_be_written_is_named(postgres: servers.PostgresServer) -> None:
    """And what makes it writable."""
    url = postgres.create_database("frozen")
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("ALTER DATABASE frozen SET default_transaction_read_only = on")
    run = jobsync("doctor", "--json", url)
    assert run.returncode == 3
    failed = [row for row in json.loads(run.stdout) if not row["ok"]]
    assert "is read-only" in failed[0]["detail"]
    assert "default_transaction_read_only = off" in failed[0]["fix"]


def test_a_missing_bucket_is_named(s3: servers.S3Server) -> None:
    """And what to do about it."""
    run = jobsync("doctor", "--json", s3.url("no-such-bucket"))
    assert run.returncode == 3
    (finding,) = [row for row in json.loads(run.stdout) if not row["ok"]]
    assert finding["detail"].startswith("url names a bucket that does not exist")
    assert finding["fix"] == "create it, or correct its name"


def test_a_bucket_needs_a_policy() -> None:
    """The policy is limited to the bucket, the prefix, and the actions that jobsync needs."""
    run = jobsync("schema", "s3://KEY:hush-hush@fleet/jobs")
    policy = json.loads(run.stdout)
    actions = {action for rule in policy["Statement"] for action in rule["Action"]}
    assert actions == {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"}
    assert "arn:aws:s3:::fleet/jobs/*" in run.stdout
    assert "hush-hush" not in run.stdout
