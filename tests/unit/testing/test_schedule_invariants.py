"""What commits of a job's state break is found, and what nearly does is not."""

from typing import Any

import pytest
from job_histories import JOB, RUN, START, Jobs, check, due, entry, gap, run, state

from jobsync.core.firing import MAX_RESUMES
from jobsync.core.job_state import ActiveRun, JobState
from jobsync.scheduler.history import HistoryEntry

IDLE = state(1)
BUSY = state(2, running=(run(2),))
GAP_OF_3 = state(3, gaps=(gap(1, 3, count=2),))
WITH_A_QUEUE = state(1, queued=(due(0), due(1)))
WITH_A_RUN = state(1, running=(run(1),))
AGAIN = "K1 is run again; K1 was decided; K2 without a result"
LEFT = "K2 was queued, and is gone"
NEITHER = "K2 neither fired nor recorded"
NO_RESULT = "K2 gone without a result"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (IDLE, BUSY, ""),
        (IDLE, state(0), "K1 went back"),
        (IDLE, state(1), ""),
        (IDLE, state(1, running=(run(1),)), "K1 was decided"),
        (IDLE, state(1, queued=(due(1),)), "K1 was decided"),
        (IDLE, state(1, running=(run(1, is_manual=True),)), ""),
        (state(1, queued=(due(1),)), state(1, running=(run(1),)), ""),
        (BUSY, state(2, running=(run(2, name="again"),)), AGAIN),
        (BUSY, state(3, running=(run(2),), gaps=(gap(2, 3),)), "K1 is in Gap"),
        (BUSY, state(3, running=(run(2),), gaps=(gap(1, 2), gap(3, 3))), "K1 is in Gap"),
        (BUSY, state(3, running=(run(2),), gaps=(gap(3, 3),)), ""),
        (IDLE, state(3, running=(run(3),)), NEITHER),
        (IDLE, state(3, queued=(due(2),), running=(run(3),)), ""),
        (IDLE, state(3, running=(run(3),), gaps=(gap(2, 2),)), ""),
        (IDLE, state(4, running=(run(4),), gaps=(gap(2, 3),)), ""),
        (IDLE, state(4, running=(run(2),), gaps=(gap(3, 3),)), NEITHER),
        (IDLE, state(4, running=(run(4),), gaps=(gap(3, 3),)), NEITHER),
        (IDLE, state(2, gaps=(gap(2, 2, reason=""),)), "K2 has no reason"),
        (IDLE, state(3, gaps=(gap(2, 3, count=3),)), "K2 2 instants are in"),
        (IDLE, state(3, gaps=(gap(2, 3, count=1),)), "K2 2 instants are in"),
        (IDLE, state(3, gaps=(gap(2, 3, count=3, is_counted=False),)), ""),
        (state(3, queued=(due(1), due(3))), GAP_OF_3, ""),
        (state(3, queued=(due(1), due(2))), GAP_OF_3, "K2 3 instants are in"),
        (state(3, queued=(due(2), due(3))), GAP_OF_3, "K2 3 instants are in"),
        (state(1, is_removed=True), state(9), ""),
        (WITH_A_QUEUE, state(1, queued=(due(0),)), LEFT),
        (WITH_A_QUEUE, state(1, queued=(due(0),), gaps=(gap(1, 1),)), ""),
        (WITH_A_QUEUE, state(1, gaps=(gap(1, 1),)), LEFT),
        (state(1, gaps=(gap(0, 1),)), IDLE, "K2 not in the history"),
        (state(1, lost=(run(1),)), IDLE, "K2 its record has no end"),
        (WITH_A_RUN, IDLE, NO_RESULT),
        (state(1, running=(run(1, is_manual=True),)), IDLE, NO_RESULT),
        (state(1, running=(run(1, ""),)), IDLE, NO_RESULT),
        (state(1, running=(run(1, "", is_manual=True),)), IDLE, ""),
        (state(1, running=(run(1, ""),)), state(1, is_removed=True), ""),
        (WITH_A_RUN, state(1, is_removed=True), NO_RESULT),
    ],
)
def test_each_instant_is_decided_once_and_accounted_for(
    before: JobState, after: JobState, expected: str
) -> None:
    """It is fired, queued, or in a gap with a reason; nothing leaves a state for nowhere."""
    check(Jobs(before, after, at=91.0).find(), expected)


@pytest.mark.parametrize(
    ("records", "before", "expected"),
    [
        ([entry("running"), entry("success")], BUSY, ""),
        ([entry("running")], BUSY, NO_RESULT),
        ([entry("running"), entry("lost")], state(2, lost=(run(2),)), ""),
        ([entry("running")], state(2, lost=(run(2),)), "K2 its record has no end"),
        ([entry("missed", first=due(1), scheduled_time=due(2))], state(2, gaps=(gap(1, 2),)), ""),
        (
            [entry("missed", first=due(0), scheduled_time=due(2))],
            state(2, gaps=(gap(1, 2),)),
            "K2 not in the history",
        ),
        (
            [entry("missed", first=due(1), scheduled_time=due(1))],
            state(2, gaps=(gap(1, 2),)),
            "K2 not in the history",
        ),
    ],
)
def test_what_is_in_the_history_may_leave_the_state(
    records: list[HistoryEntry], before: JobState, expected: str
) -> None:
    """Runs with their results, lost ones with their ends, and gaps with both of their ends."""
    jobs = Jobs(BUSY)
    for each in records:
        jobs.commit(f"{RUN}1", each)
    jobs.commit(JOB, before)
    known = jobs.find()
    jobs.commit(JOB, state(2))
    check([each for each in jobs.find() if each not in known], expected)


@pytest.mark.parametrize(("takeovers", "expected"), [(MAX_RESUMES - 1, 0), (MAX_RESUMES - 2, 1)])
def test_a_run_is_given_up_after_several_deaths(takeovers: int, expected: int) -> None:
    """Not before; a release by its owner is no death, and a stop of the first one may count."""
    owners = [f"{number}.1" for number in range(takeovers + 1)]
    jobs = Jobs(state(1))
    for owner in owners:
        jobs.commit(JOB, state(2, running=(run(2, owner),)))
        jobs.end_session(owner)
    jobs.commit(JOB, state(2))
    assert len(jobs.find()) == expected, jobs.find()


@pytest.mark.parametrize(
    ("at", "options", "early", "expected"),
    [
        (20.0, {}, 0.0, 0),
        (19.9, {}, 0.0, 1),
        (19.5, {}, 0.5, 0),
        (19.4, {}, 0.5, 1),
        (20.0, {"jitter": 9.0}, 0.0, 1),
        (29.0, {"jitter": 9.0}, 0.0, 0),
    ],
)
def test_nothing_is_fired_before_its_time(
    at: float, options: dict[str, Any], early: float, expected: int
) -> None:
    """By the clock of the server, less what that of a process may be ahead; with the jitter."""
    jobs = Jobs(state(1, options), state(2, options, running=(run(2),)), at=at)
    found = jobs.find(early=early)
    assert [each[:3] for each in found] == ["K3 "] * expected, found


BOTH = (run(1), run(2))


@pytest.mark.parametrize(
    ("overlap", "before", "after", "expected"),
    [
        ("allow", (run(1),), BOTH, 0),
        ("skip", (run(1),), BOTH, 1),
        ("queue", (run(1),), BOTH, 1),
        ("skip", BOTH, BOTH, 0),
        ("skip", (), (run(2),), 0),
    ],
)
def test_runs_overlap_only_where_they_may(
    overlap: str, before: tuple[ActiveRun, ...], after: tuple[ActiveRun, ...], expected: int
) -> None:
    """By the options that held when the second was started."""
    options = {"overlap": overlap}
    last = 2 if before == BOTH else 1
    jobs = Jobs(state(last, options, running=before), state(2, options, running=after))
    found = jobs.find()
    assert [each[:3] for each in found] == ["K4 "] * expected, found


@pytest.mark.parametrize(
    ("end", "was", "now", "expected"),
    [
        ("", "a.1", "b.1", 1),
        ("", "a.1", "a.1", 0),
        ("", "a.1", "", 0),
        ("", "", "b.1", 0),
        ("dead a.1", "a.1", "b.1", 0),
        ("dead b.1", "a.1", "b.1", 1),
        ("live a.1", "a.1", "b.1", 1),
        ("deleted a.1", "a.1", "b.1", 0),
        ("drop a.1", "a.1", "b.1", 0),
        ("drop b.1", "a.1", "b.1", 1),
    ],
)
def test_a_run_changes_hands_after_its_owner_has_ended(
    end: str, was: str, now: str, expected: int
) -> None:
    """Or when it was released."""
    jobs = Jobs(state(2, running=(run(2, was),)))
    how, _, name = end.partition(" ")
    if how == "drop":
        jobs.note("drop", keys=["other", f"session/{name}"])
    elif how:
        value = {"state": "dead" if how == "dead" else "live"}
        jobs.commit(f"session/{name}", value, deleted=how == "deleted")
    jobs.commit(JOB, state(2, running=(run(2, now),)))
    assert [each[:3] for each in jobs.find()] == ["K4 "] * expected


@pytest.mark.parametrize(
    ("options", "running", "fired", "at", "expected"),
    [
        ({"max_catch_up": 2}, (), (2, 3), 91.0, 0),
        ({"max_catch_up": 2}, (), (2, 3, 4), 91.0, 1),
        ({"misfire": "last"}, (), (2,), 91.0, 0),
        ({"misfire": "last"}, (), (2, 3), 91.0, 1),
        ({"misfire": "skip"}, (), (2,), 81.5, 0),
        ({"misfire": "skip"}, (), (2,), 81.6, 1),
        ({"misfire": "skip"}, (), (2, 3), 41.0, 1),
        ({"misfire": "last"}, (run(1),), (2, 3), 91.0, 1),
        ({"misfire": "last", "overlap": "queue"}, (run(1),), (2, 3), 91.0, 0),
        ({"misfire": "last", "overlap": "queue"}, (), (2, 3), 91.0, 1),
    ],
)
def test_late_instants_are_fired_only_as_many_as_the_job_allows(
    options: dict[str, Any],
    running: tuple[ActiveRun, ...],
    fired: tuple[int, ...],
    at: float,
    expected: int,
) -> None:
    """Unless they wait behind a run that goes on."""
    queued = tuple(due(number) for number in fired)
    before = state(1, options, running=running)
    jobs = Jobs(before, state(fired[-1], options, running=running, queued=queued), at=at)
    found = jobs.find()
    assert [each[:3] for each in found] == ["K6 "] * expected, found


EVERY_5 = {"schedule": "*/5 * * * * *"}


@pytest.mark.parametrize(
    ("asked", "options", "last", "expected"),
    [
        ([], EVERY_5, 1, 0),
        ([("a", 10, 10.9)], EVERY_5, 1, 0),
        ([("a", 10, 11.0)], EVERY_5, 1, 1),
        ([("a", 10, 99.0), ("a", 11, 10.9)], EVERY_5, 1, 0),
        ([("b", 10, 99.0)], EVERY_5, 1, 0),
        ([("a", 10, 99.0)], {}, 1, 0),
        ([("a", 10, 99.0)], {"timezone": "Asia/Tokyo"}, 1, 1),
        ([("a", -879, 99.0)], EVERY_5, 1, 1),
        ([("a", -880, 99.0)], EVERY_5, 1, 0),
        ([("a", 10, 99.0), ("a", 11, None)], EVERY_5, 1, 0),
        ([("a", 10, 99.0), ("b", 11, None)], EVERY_5, 1, 1),
    ],
)
def test_a_changed_schedule_begins_after_the_change(
    asked: list[tuple[str, float, float | None]],
    options: dict[str, Any],
    last: int,
    expected: int,
) -> None:
    """By the clock of the process that has asked for it and was not answered yet."""
    jobs = Jobs(state(last))
    for node, jobs.at, time in asked:
        if time is None:
            jobs.note("answered", node)
        else:
            jobs.note("asked", node, time=START + time)
    jobs.at = 21.0
    jobs.commit(JOB, state(last, options))
    assert [each[:3] for each in jobs.find()] == ["K7 "] * expected


def test_a_change_of_the_schedule_fires_nothing() -> None:
    """Not even what was due before."""
    jobs = Jobs(state(1), state(2, EVERY_5, running=(run(2),)))
    assert [each[:32] for each in jobs.find()] == ["K7 a change of the schedule has "]
