"""How scheduled jobs, their next instants and their history are shown."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec
import pytest

from jobsync.cli.schedule_tables import show_end, show_history, show_instants, show_jobs
from jobsync.core.firing import next_instant
from jobsync.core.job_state import JobDefinition, JobPause, JobState, LastRun, Statistics
from jobsync.scheduler.history import HistoryEntry
from jobsync.scheduler.operations import build_status
from jobsync.status.schedules import ScheduledJobStatus, SchedulerStatus

NOW = 1_800_000_000
"""Friday, 2027-01-15 08:00 UTC."""
Capture: TypeAlias = pytest.CaptureFixture[str]
SCHEDULER = SchedulerStatus(
    namespace="default",
    workers=("w1",),
    leader="w1",
    independent=(),
    withheld={},
    failing=None,
    vacant_since=None,
)


def status(namespace: str = "default", **fields: Any) -> ScheduledJobStatus:
    """Return the status of a daily job that has run once."""
    definition = JobDefinition(schedule="0 9 * * *", timezone="Europe/Berlin", description="Cleans")
    run = LastRun(id="r", instant=NOW, status="error", started_at=NOW, ended_at=NOW + 2.5)
    statistics = Statistics(runs=1, failures=1, durations=(2.5,), last_run=run)
    state = JobState(
        **{
            "definition": definition,
            "defined_by": "w1",
            "last": NOW,
            "statistics": statistics,
            **fields,
        }
    )
    following = next_instant(state)
    return ScheduledJobStatus(
        namespace=namespace,
        name="cleanup",
        job=build_status("cleanup", state, NOW + 60, following),
        overlap="skip",
        is_removed=False,
        is_disabled_by_code=False,
        due=following,
        last_duration=2.5,
        requests=(),
        workers=("w1",),
        owners={},
        gap=None,
        busy=0,
        scheduler=SCHEDULER,
        seen=NOW + 60.0,
    )


@pytest.fixture(autouse=True)
def wide_terminal() -> Iterator[None]:
    """Show everything, in the zone of Tokyo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        patch.setenv("COLUMNS", "400")
        patch.setenv("NO_COLOR", "1")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(params=["terminal", "pipe", "json"])
def way(request: pytest.FixtureRequest) -> str:
    """How a command prints."""
    return str(request.param)


def show(way: str, function: Callable[..., None], *arguments: Any) -> None:
    """Print as a command does, on a terminal or in a pipe; JSON is the same on a terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: way != "pipe", raising=False)
        function(*arguments, as_json=way == "json")


def test_jobs_are_shown_with_all_that_is_known(way: str, capsys: Capture) -> None:
    """People see the next time in the job's zone, programs see Unix seconds."""
    show(way, show_jobs, [status()])
    printed = capsys.readouterr().out
    if way == "json":
        (row,) = json.loads(printed)
        assert (row["namespace"], row["job"], row["fires"]) == (
            *("default", "cleanup", "At 09:00 every day"),
        )
        assert (row["next_fire"], row["last"], row["last_duration"]) == (NOW + 86_400, "error", 2.5)
        assert (row["marks"], row["workers"], row["runs"], row["p50"]) == ([], ["w1"], 1, 2.5)
        assert len(row["next_runs"]) == 5
        return
    header, line = printed.splitlines()
    if way == "pipe":
        row = dict(zip(header.split("\t"), line.split("\t"), strict=True))
        assert (row["next_fire"], row["last_run"], row["last_duration"]) == (
            *(f"{NOW + 86_400}.0", str(NOW), "2.5"),
        )
        assert "namespace" not in row
        return
    for text in ("2027-01-16 09:00 CET", "At 09:00 every day", "error", "2.5 s", "Europe/Berlin"):
        assert text in line
    assert line.split()[-2:] == ["Cleans", "-"]


def test_a_narrow_list_of_jobs_leaves_the_queue_out_first(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time zone is still shown, and the next time has its zone at any width."""
    monkeypatch.setenv("COLUMNS", "110")
    paused = status(pause=JobPause(at=5.0))
    show("terminal", show_jobs, [status(), paused])
    header, line, other, hint = capsys.readouterr().out.splitlines()
    assert "timezone" in header
    assert "2027-01-16 09:00 CET" in line
    assert "2027" not in other
    assert hint.endswith("queue")
    assert "timezone" not in hint


def test_the_namespace_is_shown_if_there_are_several(capsys: Capture) -> None:
    """Otherwise two jobs of one name could not be told apart."""
    show_jobs([status("billing"), status()], as_json=False)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("namespace\tjob\t")
    assert [line.split("\t")[0] for line in lines] == ["billing", "default"]
    show_jobs([status("billing"), status("billing")], as_json=False)
    assert capsys.readouterr().out.startswith("job\t")


@pytest.mark.parametrize("pause", [None, JobPause(at=5.0)])
@pytest.mark.parametrize("count", [1, 3])
def test_instants_are_shown_in_both_zones(
    way: str, count: int, pause: JobPause | None, capsys: Capture
) -> None:
    """From now on, as many as asked for; a job that does not fire is told so apart."""
    show(way, show_instants, status(pause=pause), count)
    printed = capsys.readouterr()
    instants = [NOW + 86_400 * number for number in range(1, count + 1)]
    local = [f"2027-01-{15 + number} 09:00:00+01:00" for number in range(1, count + 1)]
    if way == "json":
        assert json.loads(printed.out) == [
            {"at": at, "in_its_zone": text} for at, text in zip(instants, local, strict=True)
        ]
    elif way == "pipe":
        rows = [f"{at}\t{text}" for at, text in zip(instants, local, strict=True)]
        assert printed.out.splitlines() == ["at\tin_its_zone", *rows]
    else:
        title, _, *lines = printed.out.splitlines()
        assert title == "cleanup: At 09:00 every day (0 9 * * *), Europe/Berlin"
        assert lines == [
            f"{text}  2027-01-{16 + number} 17:00 JST" for number, text in enumerate(local)
        ]
    note = "jobsync: cleanup does not fire now: paused\n"
    assert printed.err == ("" if pause is None else note)


@pytest.mark.parametrize(
    ("schedule", "timezone", "shown"),
    [
        ("0 9 * * *", "UTC", "2027-01-15 09:00 UTC"),
        ("30 0 9 * * *", "Asia/Tokyo", "2027-01-16 09:00:30 JST"),
        ("0 0 9 * * *", "America/New_York", "2027-01-15 09:00 EST"),
        ("0 0 29 2 *", "UTC", "2028-02-29 00:00 UTC"),
    ],
)
def test_the_next_instant_is_in_the_zone_of_the_job(
    schedule: str, timezone: str, shown: str, capsys: Capture
) -> None:
    """With seconds where it has some."""
    definition = JobDefinition(schedule=schedule, timezone=timezone)
    show("terminal", show_jobs, [status(definition=definition)])
    header, line = capsys.readouterr().out.splitlines()
    place = header.index("next fire")
    assert re.split(" {2,}", line[place:])[0] == shown


def test_a_job_that_is_special_and_fires_is_not_said_to_be_paused(capsys: Capture) -> None:
    """Such as one that was edited, or that no process has."""
    edited = msgspec.structs.replace(status(edits={"retries": 3}), workers=())
    assert edited.marks == ("edited", "no process")
    show_instants(edited, 1, as_json=False)
    assert capsys.readouterr().err == ""


ENTRIES: list[tuple[dict[str, Any], str, str]] = [
    ({"status": "success", "result": {"n": 3}, "duration": 0.0425}, '{"n":3}', "42.5 ms"),
    ({"status": "success", "duration": 75.25}, "", "75.2 s"),
    *(
        ({"status": "success", "result": result, "duration": 0.0}, text, "0 ms")
        for result, text in ((0, "0"), (False, "false"), ("", '""'), ([], "[]"))
    ),
    (
        {"status": "error", "error": "ValueError: no\n  File x", "duration": 1.0},
        "ValueError: no",
        "1 s",
    ),
    ({"status": "lost", "error": "its process has ended"}, "its process has ended", "-"),
    ({"status": "running"}, "", "-"),
    ({"status": "missed", "first": NOW, "reason": "nobody led"}, "nobody led", "-"),
    (
        {"status": "skipped", "first": NOW - 3600, "count": 2, "reason": "it was paused"},
        "2 instants from 2027-01-15 16:00 JST to 2027-01-15 17:00 JST skipped: it was paused",
        "-",
    ),
]


@pytest.mark.parametrize(("fields", "detail", "duration"), ENTRIES)
def test_an_entry_of_the_history_is_shown(
    way: str, fields: dict[str, Any], detail: str, duration: str, capsys: Capture
) -> None:
    """With its result, the first line of its error, or why it was not run."""
    entry = HistoryEntry(job_name="cleanup", scheduled_time=NOW, worker_id="w1", **fields)
    show(way, show_history, [("default", entry)])
    printed = capsys.readouterr().out
    if way == "json":
        (row,) = json.loads(printed)
        expected = {"namespace": "default", **msgspec.structs.asdict(entry), "detail": detail}
        assert row == expected
        return
    header, line = printed.splitlines()
    if way == "pipe":
        row = dict(zip(header.split("\t"), line.split("\t"), strict=True))
        assert (row["scheduled_time"], row["status"], row["detail"]) == (
            *(str(NOW), fields["status"], detail),
        )
    else:
        shown = ["2027-01-15 17:00 JST", "cleanup", fields["status"], duration, detail or "-"]
        assert line.split("  ")[0] == shown[0]
        position = 0
        for text in shown:
            position = line.index(text, position)


@pytest.mark.parametrize(("fields", "detail", "duration"), ENTRIES[:8])
@pytest.mark.parametrize("worker", ["w1", ""])
def test_the_end_of_a_run_is_shown(
    way: str, worker: str, fields: dict[str, Any], detail: str, duration: str, capsys: Capture
) -> None:
    """People see the whole error."""
    entry = HistoryEntry(
        job_name="cleanup", id="r", scheduled_time=NOW, attempts=2, worker_id=worker, **fields
    )
    show(way, show_end, "default", entry)
    printed = capsys.readouterr().out
    if way == "json":
        assert json.loads(printed)[0]["detail"] == detail
    elif way == "pipe":
        header, line = printed.splitlines()
        row = dict(zip(header.split("\t"), line.split("\t"), strict=True))
        assert (row["job_name"], row["status"], row["attempts"], row["worker_id"], row["id"]) == (
            *("cleanup", fields["status"], "2", worker, "r"),
        )
        assert row["detail"] == detail
    else:
        title, *facts = printed.splitlines()
        assert title == f"cleanup: {fields['status']}"
        found = [" ".join(fact.split()) for fact in facts]
        assert found[:3] == [f"duration {duration}", "attempts 2", f"worker {worker or 'none'}"]
        rest = []
        if "error" in fields:
            first, *more = fields["error"].splitlines()
            rest = [f"error {first}", *(line.strip() for line in more)]
        elif detail:
            rest = [f"result {detail}"]
        assert found[3:] == rest
