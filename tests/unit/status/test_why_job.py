"""Why a scheduled job does not fire, or when it does."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jobsync.cli.why import _describe
from jobsync.coordination.session import HookFailure
from jobsync.core.firing import next_due, next_instant
from jobsync.core.job_state import (
    ActiveRun,
    Gap,
    JobDefinition,
    JobPause,
    JobState,
    LastRun,
    RunRequest,
    Statistics,
)
from jobsync.scheduler.operations import build_status
from jobsync.status.schedules import ScheduledJobStatus, SchedulerStatus, describe_gap
from jobsync.status.why import explain

NOW = 1_800_000_000
"""A full hour, at which the job was due."""
HOUR = 3600
FOREVER = 7930 * 365 * 86400
"""The end of all schedules."""


def state(**changes: Any) -> JobState:
    """Return the state of a job that was due at NOW, and ran."""
    defaults: dict[str, Any] = {
        "definition": JobDefinition(schedule="@hourly", overlap=changes.pop("overlap", "skip")),
        "defined_by": "w1",
        "last": NOW,
        "statistics": ran_at(NOW),
    }
    return JobState(**{**defaults, **changes})


def ran_at(instant: float) -> Statistics:
    """Return statistics with one run."""
    run = LastRun(
        id="r0", instant=int(instant), status="success", started_at=instant, ended_at=instant + 1
    )
    return Statistics(runs=1, last_run=run)


def run_of(owner: str = "w1.1", **changes: Any) -> tuple[ActiveRun, ...]:
    """Return a run that began a minute after NOW."""
    return (ActiveRun(id="r1", instant=NOW, owner=owner, started_at=NOW + 60, **changes),)


def status(job: JobState, seen: float = NOW + 120, **changes: Any) -> ScheduledJobStatus:
    """Return the status of a job that w1 and w2 have and w1 leads, with some fields changed."""
    scheduler: dict[str, Any] = {
        "namespace": "default",
        "workers": ("w1", "w2"),
        "leader": "w1",
        "independent": (),
        "withheld": {},
        "failing": None,
        "vacant_since": None,
    }
    scheduler |= {name: changes.pop(name) for name in [*scheduler] if name in changes}
    defaults: dict[str, Any] = {
        "workers": scheduler["workers"],
        "owners": {"w1.1": "live"},
        "gap": None,
        "busy": 0,
    }
    return ScheduledJobStatus(
        namespace="default",
        name="cleanup",
        job=build_status("cleanup", job, seen, next_instant(job)),
        overlap=job.effective.overlap,
        is_removed=job.is_removed,
        is_disabled_by_code=not job.definition.enabled,
        due=next_due("cleanup", job),
        last_duration=None,
        requests=job.requests,
        scheduler=SchedulerStatus(**scheduler),
        seen=seen,
        **{**defaults, **changes},
    )


NEXT = "it fires next at 2027-01-15 09:00 UTC"
LATE = NOW + HOUR + 5.0
"""Five seconds after the next instant."""
MISSED = Gap(first=NOW + HOUR, last=NOW + 3 * HOUR, count=3, reason="nobody led")


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    """Show times in UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("jitter", [0.0, 600.0])
@pytest.mark.parametrize("seconds", [-0.5, 0.0, 0.5])
def test_an_instant_is_late_as_soon_as_it_is_due(seconds: float, jitter: float) -> None:
    """Until it is decided; the next one to fire is always to come."""
    job = state(definition=JobDefinition(schedule="@hourly", jitter=jitter))
    due = next_due("cleanup", job)
    assert due is not None
    seen = due + seconds
    shown = status(job, seen=seen)
    assert (shown.is_late, shown.is_due) == (seconds >= 0, seconds >= 0)
    assert shown.next_fire == (NOW + 2 * HOUR if shown.is_late else due)
    assert shown.next_fire > seen
    code = explain(shown).code
    assert code == ("due" if shown.is_late else "scheduled")


@pytest.mark.parametrize(
    ("found", "code", "text"),
    [
        (status(state()), "scheduled", NEXT),
        (status(state(is_removed=True)), "removed", "it was removed"),
        (
            status(state(pause=JobPause(at=5.0, by="ann", reason="a move"))),
            "paused",
            "it was paused by ann: a move",
        ),
        (status(state(pause=JobPause(at=5.0))), "paused", "it was paused"),
        (status(state(edits={"enabled": False})), "disabled", "it is disabled by an operator"),
        (
            status(state(definition=JobDefinition(schedule="@hourly", enabled=False))),
            "disabled",
            "it is disabled in its code",
        ),
        (
            status(state(), seen=LATE, workers=(), leader=None),
            "no-process",
            "no live process runs the scheduler default",
        ),
        (
            status(state(), leader=None, vacant_since=9.0),
            "no-coordinator",
            "no process is the coordinator",
        ),
        (
            status(state(), leader=None, withheld={"w1": "its clock is 90 s behind"}),
            "vetoed",
            "w1 stands back: its clock is 90 s behind",
        ),
        (status(state(), leader=None, independent=("w1", "w2")), "scheduled", NEXT),
        (
            status(state(running=run_of())),
            "running",
            f"the run that began at 2027-01-15 08:01 UTC on w1 has not ended; {NEXT}",
        ),
        (
            status(state(running=run_of()), seen=LATE),
            "overlapping",
            "on w1 has not ended, so what is due meanwhile is skipped",
        ),
        (
            status(state(running=run_of(), queued=(NOW + HOUR,), overlap="queue")),
            "overlapping",
            "has not ended, and what is due waits for it",
        ),
        (
            status(state(running=run_of(), requests=(RunRequest(id="q", at=NOW),))),
            "overlapping",
            "has not ended, and what is due waits for it",
        ),
        (
            status(state(running=run_of("w3.1"))),
            "owner-dead",
            "w3 ran it and is dead: another process resumes the run",
        ),
        (
            status(state(running=run_of("w3.1", is_manual=True))),
            "owner-dead",
            "w3 ran it and is dead: another process gives the run up",
        ),
        (
            status(state(running=run_of()), owners={"w1.1": "silent"}),
            "owner-silent",
            "w1 ran it and sends no heartbeats",
        ),
        (
            status(state(running=run_of(), overlap="allow"), seen=LATE),
            "due",
            "it is due: w1 starts it",
        ),
        (status(state(), seen=LATE), "due", "it is due: w1 starts it"),
        (
            status(state(), seen=LATE, busy=5),
            "waiting",
            "it is due, and waits for room if max_concurrent_jobs is reached: 5 other jobs run on",
        ),
        (
            status(
                state(),
                seen=LATE,
                failing=HookFailure(callback="on_become", error="KeyError: 1\n…", at=1.0, times=2),
            ),
            "failing",
            "w1 cannot lead: on_become raises KeyError: 1",
        ),
        (
            status(state(last=NOW + 3 * HOUR), seen=NOW + 3 * HOUR + 60, gap=MISSED),
            "missed",
            "2027-01-15 11:00 UTC missed: nobody led; it fires next at 2027-01-15 12:00 UTC",
        ),
        (
            # It has run since.
            status(
                state(last=NOW + 4 * HOUR, statistics=ran_at(NOW + 4 * HOUR)),
                seen=NOW + 4 * HOUR + 60,
                gap=MISSED,
            ),
            "scheduled",
            "it fires next at 2027-01-15 13:00 UTC",
        ),
        (
            status(state(last=FOREVER), seen=FOREVER + 1.0),
            "never",
            "its schedule is never due again",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_the_reason_is_the_first_that_keeps_a_job_from_firing(
    found: ScheduledJobStatus, code: str, text: str
) -> None:
    """A code for programs and a text for people."""
    reason = explain(found)
    assert reason.code == code
    assert text in reason.text


@pytest.mark.parametrize(
    ("found", "marks"),
    [
        (state(), ()),
        (state(is_removed=True), ("removed",)),
        (state(pause=JobPause(at=5.0)), ("paused",)),
        (state(pause=JobPause(at=5.0), edits={"enabled": False}), ("paused", "edited")),
        (state(edits={"enabled": False}), ("disabled", "edited")),
        (state(definition=JobDefinition(schedule="@hourly", enabled=False)), ("disabled",)),
        (state(running=run_of()), ("running",)),
        (state(running=run_of(), queued=(NOW,)), ("running", "queued")),
        (state(requests=(RunRequest(id="q", at=NOW),)), ("queued",)),
        (state(edits={"retries": 3}, is_removed=True), ("removed", "edited")),
    ],
)
def test_a_job_is_marked_with_what_is_special(found: JobState, marks: tuple[str, ...]) -> None:
    """In this order, and with "no process" at the end if none has its code."""
    assert status(found).marks == marks
    assert msgspec.structs.replace(status(found), workers=()).marks == (*marks, "no process")


def failed_at(instant: float) -> Statistics:
    """Return statistics with one run that has failed."""
    run = LastRun(
        id="r0",
        instant=int(instant),
        status="error",
        started_at=instant,
        ended_at=instant + 1,
        error="ValueError: no",
    )
    return Statistics(runs=1, failures=1, last_run=run)


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        (
            status(state()),
            {
                "schedule": "At the start of every hour (@hourly), UTC",
                "last run": "2027-01-15 08:00 UTC success",
                "next": "2027-01-15 09:00 UTC",
                "leader": "w1",
                "its code": "on w1, w2",
            },
        ),
        (
            status(state(statistics=failed_at(NOW))),
            {"last run": "2027-01-15 08:00 UTC error: ValueError: no"},
        ),
        (
            status(state(edits={"retries": 3, "enabled": False})),
            {"edited": "retries=3, enabled=False, until its code changes", "next": None},
        ),
        (status(state(statistics=Statistics())), {"last run": None, "last gap": None}),
        (
            status(state(), gap=msgspec.structs.replace(MISSED, first=MISSED.last, count=1)),
            {"last gap": "2027-01-15 11:00 UTC missed: nobody led"},
        ),
        (
            status(state(), leader=None, withheld={"w2": "its clock is wrong"}),
            {"leader": "none", "withheld": "w2: its clock is wrong"},
        ),
        (msgspec.structs.replace(status(state()), workers=()), {"its code": "nowhere"}),
    ],
)
def test_people_see_what_is_worth_knowing_of_a_job(
    found: ScheduledJobStatus, facts: dict[str, str | None]
) -> None:
    """Besides the reason; what does not apply is left out."""
    shown = dict(_describe(found))
    assert {name: shown.get(name) for name in facts} == facts


def test_code_that_no_process_has_is_told_apart_from_no_process() -> None:
    """The scheduler runs, but in processes with other jobs."""
    found = msgspec.structs.replace(status(state()), workers=())
    assert explain(found).text == "all 2 processes lack its code"


def test_times_are_those_of_the_reason() -> None:
    """Since when it applies, and until when, if that is known."""
    paused = explain(status(state(pause=JobPause(at=5.0))))
    assert (paused.since, paused.until) == (5.0, None)
    late = explain(status(state(), seen=LATE))
    assert (late.since, late.until) == (NOW + HOUR, None)
    assert explain(status(state())).until == NOW + HOUR
    vacant = explain(status(state(), leader=None, vacant_since=9.0))
    assert vacant.since == 9.0


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("no-process", {"workers": (), "leader": None}),
        ("no-code", {"lacks": True}),
        ("due", {}),
        ("waiting", {"busy": 1}),
        ("failing", {"failing": HookFailure(callback="on_become", error="no", at=1.0, times=1)}),
    ],
)
@pytest.mark.parametrize(
    ("waits", "seen", "since"),
    [
        ({}, LATE, NOW + HOUR),
        ({"requests": (RunRequest(id="q", at=NOW + 30.5),)}, NOW + 60, NOW + 30.5),
        ({"requests": (RunRequest(id="q", at=NOW + 30.5),)}, LATE, NOW + 30.5),
        ({"queued": (NOW - HOUR, NOW), "overlap": "queue"}, NOW + 60, NOW - HOUR),
    ],
    ids=["late", "asked for", "both", "queued"],
)
def test_what_waits_has_waited_since_it_was_due(
    code: str, changes: dict[str, Any], waits: dict[str, Any], seen: float, since: float
) -> None:
    """Or since it was asked for. Found: the next instant was named, which is yet to come."""
    found = status(
        state(**waits), seen, **{key: value for key, value in changes.items() if key != "lacks"}
    )
    if changes.get("lacks"):
        found = msgspec.structs.replace(found, workers=())
    reason = explain(found)
    assert (reason.code, reason.since) == (code, since)
    idle = msgspec.structs.replace(status(state()), workers=())
    assert explain(idle).since is None


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (MISSED, "3 instants from 2027-01-15 09:00 UTC to 2027-01-15 11:00 UTC missed: nobody led"),
        (
            Gap(first=NOW + 1, last=NOW + 1, count=1, reason="paused", kind="skipped"),
            "2027-01-15 08:00:01 UTC skipped: paused",
        ),
        (
            Gap(first=0, last=NOW, count=1000, reason="nobody led", is_counted=False),
            "1,000+ instants from 1970-01-01 00:00 UTC to 2027-01-15 08:00 UTC missed: nobody led",
        ),
    ],
)
def test_a_gap_is_described_in_words(gap: Gap, words: str) -> None:
    """With how many instants it stands for, its bounds and the reason."""
    assert describe_gap(gap) == words
