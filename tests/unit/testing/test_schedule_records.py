"""What the records of runs, their actions and the end of a history break is found."""

from typing import Any

import pytest
from job_histories import JOB, RUN, Jobs, check, due, entry, gap, run, show, state

from jobsync.core.job_state import JobPause, JobState, RunRequest
from jobsync.testing import Occurrence, check_decided, check_resumption

BUSY = state(2, running=(run(2),))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([entry("running")], ""),
        ([entry("running"), entry("running")], ""),
        ([entry("running"), entry("success")], ""),
        ([entry("lost", "r9")], ""),
        ([entry("running", "r9")], "K1 without a decision"),
        ([entry("running"), entry("success", "r9")], "K1 fired as r2 and as r9"),
        ([entry("success"), entry("success")], "K8 was overwritten"),
        ([entry("error"), entry("running")], "K8 was overwritten"),
        ([entry("running", owner="b.1")], "K4 claimed by b.1, and is a.1's"),
        ([entry("success", owner="b.1")], ""),
        ([entry("missed", "r9", first=due(1), scheduled_time=due(2))] * 2, ""),
    ],
)
def test_the_record_of_a_run(records: list[Any], expected: str) -> None:
    """It is of a run that was decided, of its owner, and its result stays."""
    jobs = Jobs(BUSY)
    for each in records:
        jobs.commit(f"{RUN}1", each)
    check(jobs.find(), expected)


def test_a_claim_of_a_run_that_was_released_changes_nothing() -> None:
    """It was on its way when its process released the run."""
    jobs = Jobs(state(2, running=(run(2, ""),)))
    jobs.commit(f"{RUN}1", entry("running", owner="b.1"))
    assert jobs.find() == []


@pytest.mark.parametrize(
    ("status", "after", "keys", "expected"),
    [
        ("running", BUSY, [f"{RUN}1"], "K8 removed while it runs"),
        ("running", BUSY, ["other", f"{RUN}1"], "K8 removed while it runs"),
        ("running", BUSY, [f"{RUN}2", "schedule/main/job/tick"], ""),
        ("success", BUSY, [f"{RUN}1"], ""),
        ("running", state(2, running=(run(2, name="new"),)), [f"{RUN}1"], ""),
        ("running", BUSY, ["schedule/main/run/tock/1"], ""),
    ],
)
def test_old_history_is_removed(
    status: str, after: JobState, keys: list[str], expected: str
) -> None:
    """But not the record of a run that goes on."""
    jobs = Jobs(BUSY)
    jobs.commit(f"{RUN}1", entry(status))
    jobs.commit(JOB, after)
    known = jobs.find()
    jobs.note("drop", keys=keys)
    check([each for each in jobs.find() if each not in known], expected)


def begin(name: str = "r2", session: str = "a.1", attempt: int = 1) -> dict[str, Any]:
    """Return the note of an action that starts."""
    return {"job": "tick", "run": name, "attempt": attempt, "session": session}


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ([begin()], ""),
        ([begin(), begin()], "K8 started twice"),
        ([begin(), begin(attempt=2)], ""),
        ([begin(), begin(session="b.1")], "K8 without a firing record"),
        ([begin("r9")], "K8 without a firing record"),
        ([{"job": "tick", "process": 1}], ""),
    ],
)
def test_an_action_starts_once_after_its_record(begun: list[dict[str, Any]], expected: str) -> None:
    """In a process whose session has claimed the record; each attempt counts."""
    jobs = Jobs(BUSY)
    jobs.commit(f"{RUN}1", entry("running"))
    for details in begun:
        jobs.note("begin", **details)
    check([each.replace("K8: started", "K8 started") for each in jobs.find()], expected)


def test_a_run_that_was_taken_over_starts_again() -> None:
    """In each process that has claimed its record."""
    jobs = Jobs(BUSY)
    jobs.commit(f"{RUN}1", entry("running"))
    jobs.note("begin", **begin())
    jobs.end_session("a.1")
    jobs.commit(JOB, state(2, running=(run(2, "b.1"),)))
    jobs.commit(f"{RUN}1", entry("running", owner="b.1"))
    jobs.note("begin", **begin(session="b.1"))
    assert jobs.find() == []


def end(jobs: Jobs, at: float) -> list[str]:
    """Return what is found at the end, ten seconds before which all should be decided."""
    jobs.at = at
    jobs.note("end")
    return show(check_decided(jobs.history, slack=10.0))


PAUSED = JobPause(at=0.0)
REQUEST = RunRequest(id="q", at=0.0)
LATE, IN_TIME = 31.1, 31.0
"""Seconds from which, and until which, it is late: the state is from 21 seconds."""


@pytest.mark.parametrize(
    ("last", "fields", "expected"),
    [
        (1, {}, f"K2 {due(2)} is undecided"),
        (2, {}, ""),
        (1, {"pause": PAUSED}, ""),
        (1, {"options": {"enabled": False}}, ""),
        (1, {"is_removed": True, "queued": (due(1),), "gaps": (gap(0, 0),)}, ""),
        (1, {"options": {"overlap": "skip"}}, f"K2 {due(2)} is undecided"),
        (2, {"gaps": (gap(0, 0),)}, "K2 not in the history"),
        (2, {"queued": (due(1),)}, "K2 queued and never started"),
        (2, {"queued": (due(1),), "pause": PAUSED}, ""),
        (2, {"requests": (REQUEST,)}, "KL2 asked for and never started"),
    ],
)
def test_everything_is_decided_in_the_end(last: int, fields: dict[str, Any], expected: str) -> None:
    """Instants, gaps, queued ones and requests, unless the job is paused or removed."""
    check(end(Jobs(state(last, **fields)), LATE), expected)
    if not expected.endswith("undecided"):
        check(end(Jobs(state(last, **fields)), IN_TIME), "")


@pytest.mark.parametrize(("at", "expected"), [(29.9, ""), (30.0, f"K2 {due(2)} is undecided")])
def test_an_instant_may_be_undecided_for_a_moment(at: float, expected: str) -> None:
    """Until the slack is over."""
    check(end(Jobs(state(1), at=5.0), at), expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"queued": (due(1),)}, ""),
        ({"requests": (REQUEST,)}, ""),
        ({"gaps": (gap(0, 0),)}, "K2 not in the history"),
        ({"last": 1, "options": {"overlap": "skip"}}, ""),
        ({"last": 1}, f"K2 {due(2)} is undecided"),
    ],
)
def test_what_waits_for_a_run_is_not_late(fields: dict[str, Any], expected: str) -> None:
    """The run goes on in the process that has it."""
    jobs = Jobs(state(**{"last": 2, "running": (run(0),), **fields}))
    jobs.note("begin", **begin("r0"))
    check(end(jobs, LATE), expected)


@pytest.mark.parametrize(
    ("begun", "is_dead", "at", "expected"),
    [
        (True, False, LATE, ""),
        (False, False, LATE, "KL2 nobody executes"),
        (False, False, IN_TIME, ""),
        (True, True, LATE, "KL2 nobody executes"),
        (True, True, IN_TIME, ""),
    ],
)
def test_a_run_is_executed(at: float, expected: str, *, begun: bool, is_dead: bool) -> None:
    """Its action begins within the slack, and it goes on only in a live process."""
    jobs = Jobs(BUSY)
    if begun:
        jobs.note("begin", **begin())
    if is_dead:
        jobs.end_session("a.1")
    check(end(jobs, at), expected)


@pytest.mark.parametrize(
    ("owner", "taken_at", "expected"),
    [("a.1", 25.0, 1), ("b.1", 25.0, 0), ("b.1", 20.0, 1)],
)
def test_a_run_that_changes_hands_has_time_again(
    owner: str, taken_at: float, expected: int
) -> None:
    """From the moment at which its new owner has it."""
    jobs = Jobs(BUSY, at=5.0)
    jobs.at = taken_at
    jobs.commit(JOB, state(2, running=(run(2, owner),)))
    found = [each for each in end(jobs, 31.0) if "nobody executes" in each]
    assert len(found) == expected


@pytest.mark.parametrize(
    ("begun", "status", "at", "expected"),
    [
        (True, "success", LATE, ""),
        (False, "success", LATE, "KL2 its action never"),
        (True, "running", LATE, "KL3 has no result"),
        (True, "running", IN_TIME, ""),
        (True, "lost", LATE, ""),
    ],
)
def test_a_run_that_is_over(status: str, at: float, expected: str, *, begun: bool) -> None:
    """It was executed, and its record has an end."""
    jobs = Jobs(BUSY)
    if begun:
        jobs.note("begin", **begin())
    jobs.commit(f"{RUN}1", entry(status))
    jobs.commit(JOB, state(2))
    check(end(jobs, at), expected)


def test_a_run_that_goes_on_has_no_result_yet() -> None:
    """Its record says so, rightly."""
    jobs = Jobs(BUSY)
    jobs.commit(f"{RUN}1", entry("running"))
    jobs.note("begin", **begin())
    check(end(jobs, LATE), "")


@pytest.mark.parametrize("key", ["schedule/main/leader/tick", "data/job/tick", "n", "role/a/job"])
def test_other_records_are_not_checked(key: str) -> None:
    """Whatever they contain."""
    jobs = Jobs(state(2))
    jobs.commit(key, {"anything": 1})
    jobs.note("drop", keys=[key])
    jobs.note("reply", key=JOB, outcome="Applied")
    check(end(jobs, LATE), "")
    check(jobs.find(), "")


def test_a_record_of_a_job_without_a_state_is_no_job() -> None:
    """Its state was never stored, so nothing is due."""
    jobs = Jobs()
    jobs.commit(f"{RUN}1", entry("running"))
    check(end(jobs, LATE), "")


def fire(at: float, job: str = "tick", status: str = "running") -> Occurrence:
    """Return the commit of a firing record."""
    key = f"schedule/main/run/{job}/1"
    return Occurrence(at, "a", "commit", {"key": key, "value": {"status": status}})


@pytest.mark.parametrize(
    ("fired", "expected"),
    [
        ([fire(35.0)], 0),
        ([fire(35.1)], 1),
        ([fire(30.0)], 0),
        ([fire(29.9)], 1),
        ([fire(31.0, job="tock")], 1),
        ([fire(31.0, status="success")], 1),
        ([fire(31.0, status="missed"), fire(32.0)], 0),
        ([fire(29.0), fire(34.0), fire(90.0)], 0),
        ([], 1),
    ],
)
def test_a_job_is_fired_soon_after_an_outage(fired: list[Occurrence], expected: int) -> None:
    """A firing of this job, not before the end of the outage, and within the bound."""
    other = Occurrence(31.0, "a", "begin", {"status": "running"})
    found = check_resumption([other, *fired], "tick", since=30.0, within=5.0)
    assert [each.invariant for each in found] == ["KL1"] * expected
