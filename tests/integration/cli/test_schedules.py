"""`jobsync schedules`, with a process that fires jobs on the same store."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
import servers
from terminal import JOBSYNC, on_terminal, read_json, read_tsv, run, run_on_terminal
from waiting import TIMEOUT, until
from work_processes import ScheduleProcess

from jobsync import Components
from jobsync.cli.schedules import STATUSES
from jobsync.core.job_state import JobDefinition, JobState, RunStatus
from jobsync.scheduler.job_store import JobStore
from jobsync.stores.opening import open_store

DAY = 86400.0
NOW = Components.system().clock.wall().seconds
FAR = int(NOW / 3600 + 12) % 24
"""An hour of the day that is not near."""
MISSED = {"schedule": f"* * {FAR} * * *", "misfire": "skip"}
"""Due each second of an hour: an outage of two days has thousands of instants."""
JOBS = {
    "daily": {"schedule": "0 3 * * *", "timezone": "Europe/Berlin", "description": "Cleans up."},
    "fail": {"schedule": "@yearly"},
    "hold": {"schedule": "@yearly"},
    "hold-often": {"schedule": "@every 1s"},
    "missed": MISSED,
    "shared": {"schedule": "@yearly"},
    "off": {"schedule": "@yearly", "enabled": False},
}


async def seed(url: str) -> None:
    """Store a job that no process has, one of another namespace, and one after an outage."""
    components = Components.system()
    store = await open_store(url, components)
    try:
        states = {
            ("default", "orphan"): JobDefinition(schedule="@hourly"),
            ("billing", "shared"): JobDefinition(schedule="@daily"),
            ("default", "missed"): JobDefinition(**MISSED, timeout=3600.0),  # type: ignore[arg-type]
        }
        for (namespace, name), definition in states.items():
            last = int(NOW - 2 * DAY)
            state = JobState(definition=definition, defined_by="", last=last)
            jobs = JobStore(lambda: store, namespace, components)
            await jobs.create_many({name: state})
            await jobs.code.write("0" * 24, [name], NOW)
    finally:
        await store.close()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with a process that fires jobs."""
    folder = tmp_path_factory.mktemp("schedules")
    if request.param == "sqlite":
        place = f"sqlite:///{folder / 'fleet.db'}"
    else:
        server: servers.PostgresServer = request.getfixturevalue("postgres")
        place = f"{server.url}?schema={folder.name}"
    asyncio.run(seed(place))
    with ScheduleProcess(place, folder / "worker.log", JOBS) as worker:
        asyncio.run(until(lambda: worker.is_at_work, "it works"))
        asyncio.run(until(lambda: read_code(place, "hold-often") == "overlapping", "it fires"))
        yield place


def read_job(url: str, name: str, namespace: str = "default") -> dict[str, Any]:
    """Return the row of a job in the list."""
    rows = read_json(url, "schedules", "list", "--namespace", namespace)
    (row,) = [each for each in rows if each["job"] == name]
    return dict(row)


def read_code(url: str, name: str) -> str:
    """Return the code of the reason why a job does not fire."""
    (row,) = read_json(url, "schedules", "why", name)
    return str(row["code"])


def start_run(url: str, name: str) -> subprocess.Popen[str]:
    """Start a command that runs a job, and wait until the run has begun."""
    environ = os.environ | {"JOBSYNC_URL": url}
    command = subprocess.Popen(
        [*JOBSYNC, "schedules", "run", name],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    while "running on" not in (line := command.stderr.readline()):
        assert line, "the command has ended"
    return command


def test_jobs_are_listed_for_people_and_for_programs(url: str) -> None:
    """With their schedule in words, what became of them, and what is special."""
    rows = {row["job"]: row for row in read_json(url, "schedules", "list")}
    assert rows.keys() == {*JOBS, "orphan"}
    daily = rows["daily"]
    assert (daily["fires"], daily["schedule"]) == ("At 03:00 every day", "0 3 * * *")
    assert (daily["timezone"], daily["description"]) == ("Europe/Berlin", "Cleans up.")
    assert daily["next_fire"] == daily["next_runs"][0]
    assert (daily["marks"], len(daily["workers"])) == ([], 1)
    assert rows["hold-often"]["marks"] == ["running"]
    assert (rows["off"]["marks"], rows["off"]["next_fire"]) == (["disabled"], None)
    # The seeded job's code is in no process.
    assert (rows["orphan"]["marks"], rows["orphan"]["workers"]) == (["no process"], [])
    printed = read_tsv(run(url, "schedules", "list").stdout)
    assert len(printed) == len(JOBS) + 2
    assert [row["namespace"] for row in printed].count("billing") == 1
    for columns in (80, 160):
        lines = on_terminal(url, columns, "schedules", "list", "--namespace", "default")
        assert max(map(len, lines)) <= columns
        (line,) = [line for line in lines if line.startswith("daily")]
        assert "At 03:00" in line


def test_times_are_in_the_zone_of_the_viewer(url: str) -> None:
    """And named by it."""
    environ = os.environ | {"JOBSYNC_URL": url, "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [*JOBSYNC, "schedules", "why", "daily"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "11:00 JST" in done.stdout or "10:00 JST" in done.stdout


def test_the_next_instants_are_shown_in_both_zones(url: str) -> None:
    """As many as asked for, also of a job that does not fire now."""
    found = read_json(url, "schedules", "next", "daily", "-n", "3")
    assert len(found) == 3
    assert all(row["in_its_zone"].partition(" ")[2].startswith("03:00:00+0") for row in found)
    assert [row["at"] for row in found] == read_job(url, "daily")["next_runs"][:3]
    lines = on_terminal(url, 80, "schedules", "next", "daily")
    assert lines[0] == "daily: At 03:00 every day (0 3 * * *), Europe/Berlin"
    assert (lines[1].split(), len(lines)) == (["in", "its", "zone", "in", "yours"], 7)
    off = run(url, "schedules", "next", "off")
    assert len(read_tsv(off.stdout)) == 5
    assert "off does not fire now: disabled" in off.stderr


def test_a_run_is_done_by_the_fleet_and_its_result_printed(url: str) -> None:
    """The exit code tells whether it succeeded; a pause does not stop it."""
    run(url, "schedules", "pause", "daily")
    done = run(url, "schedules", "run", "daily")
    assert done.returncode == 0, done.stderr
    (row,) = read_tsv(done.stdout)
    assert (row["job_name"], row["status"], row["detail"]) == ("daily", "success", '{"removed":3}')
    assert "daily: waiting for a process to start it" in done.stderr
    assert read_json(url, "schedules", "history", "daily")[0]["is_manual"]
    status, lines = run_on_terminal(url, 80, "schedules", "run", "daily")
    assert status == 0
    assert "daily: success" in lines
    assert any(line.split() == ["result", '{"removed":3}'] for line in lines)
    run(url, "schedules", "resume", "daily")
    failed = run(url, "schedules", "run", "fail", "--json")
    (entry,) = json.loads(failed.stdout)
    assert (failed.returncode, entry["status"]) == (1, "error")
    assert entry["error"].startswith("ValueError: no such table")
    assert read_job(url, "fail")["last"] == "error"


def test_a_run_that_no_process_can_do_is_refused_at_once(url: str) -> None:
    """Nothing is requested."""
    done = run(url, "schedules", "run", "orphan")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the only process lacks its code. Start a process whose code has" in done.stderr
    assert "queued" not in read_job(url, "orphan")["marks"]


def test_an_interrupted_command_leaves_its_run_alone(url: str) -> None:
    """It says so; another one waits for its turn, and gives up after its timeout."""
    with start_run(url, "hold") as command:
        command.send_signal(signal.SIGINT)
        _, rest = command.communicate(timeout=TIMEOUT)
    assert command.returncode == 130
    assert rest == (
        "jobsync: stopped waiting. The run goes on: see `jobsync schedules history hold`.\n"
    )
    (entry,) = read_json(url, "schedules", "history", "hold")
    assert entry["status"] == "running"
    assert read_code(url, "hold") == "running"
    late = run(url, "schedules", "run", "hold", "--timeout", "1.5")
    assert (late.returncode, late.stdout) == (1, "")
    assert "hold: waiting: the run that began at" in late.stderr
    assert "no end after 1.5 s. The run stays requested" in late.stderr
    assert read_job(url, "hold")["marks"] == ["running", "queued"]
    assert read_code(url, "hold") == "overlapping"


def test_a_paused_job_tells_who_paused_it_and_why(url: str) -> None:
    """Until it is resumed; pausing it again changes nothing."""
    words = ("schedules", "pause", "shared", "--namespace", "default")
    (first,) = read_json(url, *words, "--reason", "a migration")
    assert first == {"namespace": "default", "job": "shared", "what": "paused"}
    assert read_tsv(run(url, *words).stdout)[0]["what"] == "already paused"
    assert read_job(url, "shared")["marks"] == ["paused"]
    assert read_job(url, "shared", "billing")["marks"] == ["no process"]
    why = ("schedules", "why", "shared", "--namespace", "default")
    (row,) = read_json(url, *why)
    assert row["code"] == "paused"
    assert row["reason"].startswith("it was paused by ")
    assert row["reason"].endswith(": a migration")
    assert row["since"] > NOW
    assert "shared: it was paused by" in on_terminal(url, 160, *why)[0]
    resume = ("schedules", "resume", "shared", "--namespace", "default")
    assert read_json(url, *resume)[0]["what"] == "resumed"
    assert read_json(url, *resume)[0]["what"] == "not paused"


def test_a_job_is_changed_until_its_code_changes(url: str) -> None:
    """Its schedule and its zone."""
    words = ("schedules", "update", "daily", "--schedule", "30 4 * * *", "--timezone", "Asia/Tokyo")
    assert read_json(url, *words)[0]["what"] == "updated"
    assert read_json(url, *words)[0]["what"] == "unchanged"
    job = read_job(url, "daily")
    assert (job["fires"], job["timezone"]) == ("At 04:30 every day", "Asia/Tokyo")
    assert job["marks"] == ["edited"]
    text = "\n".join(on_terminal(url, 160, "schedules", "why", "daily"))
    assert "schedule=30 4 * * *, timezone=Asia/Tokyo, until its code changes" in text
    back = ("--schedule", "0 3 * * *", "--timezone", "Europe/Berlin")
    assert read_json(url, "schedules", "update", "daily", *back)[0]["what"] == "updated"
    assert read_job(url, "daily")["marks"] == []


def test_what_was_missed_is_in_the_history_in_words(url: str) -> None:
    """One line for thousands of instants, and the reason."""
    (row,) = read_tsv(run(url, "schedules", "history", "missed").stdout)
    assert row["status"] == "missed"
    assert row["detail"].startswith("1,000+ instants from ")
    assert "missed: no process fired it until" in row["detail"]
    (why,) = read_json(url, "schedules", "why", "missed")
    assert why["code"] == "missed"
    assert row["detail"] in why["reason"]
    assert why["until"] > NOW


def test_the_general_commands_know_jobs(url: str) -> None:
    """`why` explains them, and `cluster` shows who leads them."""
    assert read_json(url, "why", "hold-often")[0]["code"] == "overlapping"
    several = run(url, "why", "shared")
    assert (several.returncode, several.stdout) == (2, "")
    assert "Run: jobsync schedules why shared --namespace …" in several.stderr
    (role,) = read_json(url, "cluster")["roles"]
    assert (role["namespace"], role["work"], role["state"]) == ("default", "scheduler", "led")


def test_the_history_is_filtered_and_paged(url: str) -> None:
    """By job, status and time, newest first; a cursor leads to the next page."""
    for name in ("fail", "daily", "daily", "daily"):
        run(url, "schedules", "run", name)
    whole = read_json(url, "schedules", "history", "daily")
    assert len(whole) >= 3
    times = [entry["scheduled_time"] for entry in whole]
    assert times == sorted(times, reverse=True)
    first = read_json(url, "schedules", "history", "daily", "--limit", "2")
    after = ("--limit", "2", "--after", first[-1]["cursor"])
    second = read_json(url, "schedules", "history", "daily", *after)
    assert [entry["id"] for entry in first + second] == [entry["id"] for entry in whole[:4]]
    mixed = read_json(url, "schedules", "history", "--status", "error", "--status", "running")
    assert {entry["job_name"] for entry in mixed} <= {"fail", "hold", "hold-often"}
    assert {entry["status"] for entry in mixed} == {"error", "running"}
    recent = read_json(url, "schedules", "history", "daily", "--since", "1h")
    assert recent == whole
    assert read_json(url, "schedules", "history", "daily", "--since", "2099-01-31") == []
    lines = on_terminal(url, 80, "schedules", "history", "daily")
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(whole) + 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["why", "dayly"], 1, "no job 'dayly'. Did you mean daily?"),
        (["pause", "daily", "--namespace", "biling"], 1, "'biling'. Did you mean billing?"),
        (["pause", "shared"], 2, "namespace must be chosen: billing and default have a job"),
        (["history", "dayly"], 1, "no job 'dayly'"),
        (["history", "daily", "--since", "soon"], 2, "--since is neither a duration nor a time"),
        (["history", "--after", "x"], 2, "after needs a job"),
        (["history", "--status", "good"], 2, "'--status'"),
        (["next", "daily", "-n", "0"], 2, "'-n'"),
        (["run", "daily", "--timeout", "0"], 2, "'--timeout'"),
        (["update", "daily"], 2, "--schedule is missing, and so is --timezone"),
        (["update", "daily", "--schedule", "0 3 * *"], 2, "has 4 fields instead of 5 or 6"),
        (["update", "daily", "--timezone", "Europe/Berlim"], 2, "Did you mean Europe/Berlin?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_reported(url: str, words: list[str], status: int, message: str) -> None:
    """With the option, the value and the fix, in one line on standard error."""
    done = run(url, "schedules", *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_fleet_without_processes_is_reported(tmp_path: Path) -> None:
    """Once the last one is dead, also while a command waits; the history can still be read."""
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    jobs = {"daily": JOBS["daily"], "hold": JOBS["hold"]}
    with ScheduleProcess(url, tmp_path / "worker.log", jobs) as worker:
        await until(lambda: worker.is_at_work, "it works")
        assert run(url, "schedules", "run", "daily").returncode == 0
        with start_run(url, "hold") as command:
            worker.kill()
            _, rest = command.communicate(timeout=TIMEOUT)
    assert command.returncode == 1
    assert "no live process runs the scheduler default. Start a process" in rest
    assert "and run it again" in rest
    assert read_code(url, "daily") == "no-process"
    row, _ = read_json(url, "schedules", "list")
    assert (row["marks"], row["last"]) == (["no process"], "success")
    done = run(url, "schedules", "run", "daily")
    assert done.returncode == 1
    assert "no live process runs the scheduler default" in done.stderr
    assert len(read_json(url, "schedules", "history", "daily")) == 1


async def test_a_run_whose_process_dies_is_lost(tmp_path: Path) -> None:
    """The rest of the fleet says so; nobody runs it again."""
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                ScheduleProcess(url, tmp_path / f"{name}.log", {"hold": JOBS["hold"]})
            )
            for name in ("first", "second")
        ]
        await until(lambda: all(worker.is_at_work for worker in workers), "they work")
        with start_run(url, "hold") as command:
            (run_now,) = read_json(url, "schedules", "list")[0]["running"]
            members = read_json(url, "cluster")["members"]
            (pid,) = [
                member["pid"]
                for member in members
                if run_now["owner"].startswith(member["worker_id"])
            ]
            (owner,) = [worker for worker in workers if worker.process.pid == pid]
            owner.kill()
            printed, _ = command.communicate(timeout=TIMEOUT)
        assert command.returncode == 1
        assert read_tsv(printed)[0]["status"] == "lost"
        (entry,) = read_json(url, "schedules", "history", "hold")
        assert entry["status"] == "lost"
        assert read_job(url, "hold")["marks"] == []


async def test_objects_keep_schedules_too(bucket_url: str, tmp_path: Path) -> None:
    """A process reads what operators change once a heartbeat."""
    jobs = {"daily": JOBS["daily"], "off": JOBS["off"]}
    with ScheduleProcess(bucket_url, tmp_path / "worker.log", jobs) as worker:
        await until(lambda: worker.is_at_work, "it works")
        await until(lambda: read_code(bucket_url, "daily") == "scheduled", "it leads")
        done = run(bucket_url, "schedules", "run", "daily")
        assert done.returncode == 0, done.stderr
        assert read_tsv(done.stdout)[0]["status"] == "success"
        assert read_json(bucket_url, "schedules", "pause", "daily")[0]["what"] == "paused"
        rows = read_json(bucket_url, "schedules", "list")
        assert [row["marks"] for row in rows] == [["paused"], ["disabled"]]
        assert len(read_json(bucket_url, "schedules", "history")) == 1


def test_every_status_can_be_chosen() -> None:
    """The command line has a copy of the list."""
    assert get_args(RunStatus) == STATUSES


def test_a_store_without_jobs_has_none(tmp_path: Path) -> None:
    """Reading creates no file."""
    missing = run(f"sqlite:///{tmp_path / 'none.db'}", "schedules", "list")
    assert "refers to a missing file" in missing.stderr
    assert not (tmp_path / "none.db").exists()
    assert read_json("memory://", "schedules", "list") == []
    done = run("memory://", "schedules", "why", "daily")
    place = "  Looked in memory:// (from JOBSYNC_URL).\n"
    assert (done.returncode, done.stderr) == (1, f"jobsync: There is no job 'daily'.\n{place}")
