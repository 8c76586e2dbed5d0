"""What is decided about a job, from its state, the time and who is alive."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync.core.firing import (
    MAX_LATENESS,
    MAX_RESUMES,
    Advance,
    advance,
    drop_noted,
    drop_run,
    due_time,
    finish,
    next_due,
    start_manually,
    withdraw,
)
from jobsync.core.gaps import OVERLAPPED
from jobsync.core.job_changes import add_request, define, edit, pause, remove, resume
from jobsync.core.job_state import (
    ActiveRun,
    Gap,
    JobDefinition,
    JobPause,
    JobState,
    RunRequest,
    RunStatus,
    Statistics,
    find_schedule,
)

NOON = 1_800_014_400
"""An instant at a whole minute."""
MINUTE = 60
_numbers = itertools.count()


def job(last: int = NOON, **options: Any) -> JobState:
    """Return a job that is due every minute, unless the options say otherwise."""
    definition = JobDefinition(**{"schedule": "* * * * *", **options})
    return JobState(definition=definition, defined_by="worker-1", generation=1, last=last)


def step(
    state: JobState,
    now: float,
    *,
    owner: str = "me",
    is_orphan: Callable[[ActiveRun], bool] = lambda _: False,
    was_on_duty: bool = False,
    room: int = 1,
) -> Advance:
    """Advance a job."""
    return advance(
        "job",
        state,
        now,
        owner=owner,
        new_id=lambda: f"run-{next(_numbers)}",
        is_orphan=is_orphan,
        late_reason="late",
        was_on_duty=was_on_duty,
        room=room,
    )


def start(state: JobState, now: float) -> tuple[JobState, ActiveRun]:
    """Advance a job of which one run is due."""
    result = step(state, now)
    (run,) = result.starts
    return result.state, run


def test_nothing_is_due_before_the_first_instant() -> None:
    """A job that is defined at noon has nothing to do with noon itself."""
    state = job()
    assert step(state, NOON + MINUTE - 0.001) == Advance(state)
    assert next_due("job", state) == NOON + MINUTE


def test_an_instant_is_fired_once() -> None:
    """The same time, or an earlier one, starts nothing more."""
    state, run = start(job(), NOON + MINUTE)
    assert (run.instant, run.owner) == (NOON + MINUTE, "me")
    ended = finish("job", state, run, "success", NOON + MINUTE + 1)
    assert ended is not None
    assert step(ended, NOON + MINUTE + 1).starts == ()
    assert step(ended, NOON + 1).starts == ()
    assert ended.statistics.runs == ended.statistics.successes == 1


@pytest.mark.parametrize(("misfire", "kept"), [("skip", 0), ("last", 1), ("all", 3)])
def test_instants_that_passed_are_fired_as_the_job_says(misfire: str, kept: int) -> None:
    """The rest is one gap."""
    state = job(schedule="0 * * * *", misfire=misfire, max_catch_up=3)
    after = step(state, NOON + 10 * 3600 + MAX_LATENESS + 1).state
    assert len(after.running) + len(after.queued) == kept
    (gap,) = after.gaps
    assert (gap.kind, gap.reason, gap.count) == ("missed", "late", 10 - kept)
    assert after.last == NOON + 10 * 3600


def test_an_instant_that_is_a_little_late_is_fired() -> None:
    """Even if misfires are skipped: an election takes a moment."""
    state = job(schedule="0 * * * *", misfire="skip")
    assert step(state, NOON + 3600 + MAX_LATENESS).starts


def test_three_years_are_one_gap_and_a_bounded_catch_up() -> None:
    """However many instants there were."""
    state = job(schedule="* * * * * *", misfire="all", max_catch_up=5)
    now = NOON + 3 * 365 * 86_400
    after = step(state, now).state
    assert [run.instant for run in after.running] + list(after.queued) == [*range(now - 4, now + 1)]
    (gap,) = after.gaps
    assert (gap.first, gap.last) == (NOON + 1, now - 5)
    assert (gap.count, gap.is_counted) == (1000, False)


@pytest.mark.parametrize("instants", [1, 2, 999, 1000, 1001, 5000])
def test_a_gap_counts_up_to_a_thousand_instants(instants: int) -> None:
    """Exactly, unless there are more. The instant after them is fired."""
    (gap,) = step(job(schedule="* * * * * *"), NOON + instants + 1).state.gaps
    assert (gap.first, gap.last) == (NOON + 1, NOON + instants)
    assert (gap.count, gap.is_counted) == (min(instants, 1000), instants <= 1000)


def test_overlapping_instants_are_skipped_without_a_write() -> None:
    """Nothing changes until the run ends; then they are one gap."""
    state, run = start(job(), NOON + MINUTE)
    assert step(state, NOON + 5 * MINUTE).state == state
    ended = finish("job", state, run, "success", NOON + 5 * MINUTE + 1)
    assert ended is not None
    (gap,) = ended.gaps
    assert (gap.first, gap.last, gap.count) == (NOON + 2 * MINUTE, NOON + 5 * MINUTE, 4)
    assert (gap.kind, gap.reason) == ("skipped", OVERLAPPED)


def test_the_statistics_are_those_of_all_runs_and_the_latest_durations() -> None:
    """However they end, and whenever that is noted; lost ones have no duration."""
    state, ends = job(schedule="* * * * * *"), list[tuple[RunStatus, float]]()
    for number in range(1, 121):
        status: RunStatus = ("success", "error", "timeout", "lost")[number * number % 7 % 4]
        now = NOON + 10 * number
        state, run = start(state, now)
        seconds = number / 8
        ended = finish("job", state, run, status, now + 9, f"e{number}", ended_at=now + seconds)
        assert ended is not None
        state = ended
        ends.append((status, seconds))
        found = state.statistics
        successes = sum(status == "success" for status, _ in ends)
        assert (found.runs, found.successes) == (number, successes)
        assert found.failures == number - successes
        durations = [seconds for status, seconds in ends if status != "lost"]
        assert found.durations == tuple(round(each, 3) for each in durations[-50:])
        assert found.last_run is not None
        assert (found.last_run.id, found.last_run.status) == (run.id, status)
        assert (found.last_run.started_at, found.last_run.ended_at) == (now, now + seconds)
        assert found.last_run.error == f"e{number}"
        if status == "success":
            assert found.last_success == now + seconds
        else:
            assert found.last_failure == now + seconds


def test_overlapping_instants_wait_in_order() -> None:
    """Each is fired when the one before has ended."""
    state, run = start(job(overlap="queue"), NOON + MINUTE)
    state = step(state, NOON + 3 * MINUTE).state
    assert state.queued == (NOON + 2 * MINUTE, NOON + 3 * MINUTE)
    for number in (2, 3):
        ended = finish("job", state, run, "error", NOON + 3 * MINUTE + number)
        assert ended is not None
        state, run = start(ended, NOON + 3 * MINUTE + number)
        assert run.instant == NOON + number * MINUTE
    assert state.gaps == ()


@pytest.mark.parametrize("looks", [[200], [50, 200], [101, 102, 200], [*range(2, 201)]])
def test_only_so_many_instants_wait(looks: list[int]) -> None:
    """The rest is skipped, with the reason, however often somebody looks meanwhile."""
    state, _ = start(job(overlap="queue"), NOON + MINUTE)
    for minutes in looks:
        state = step(state, NOON + minutes * MINUTE).state
        assert state.last == NOON + minutes * MINUTE
    assert state.queued == tuple(NOON + number * MINUTE for number in range(2, 102))
    assert sum(gap.count for gap in state.gaps) == state.statistics.skipped == 99
    assert {(gap.kind, gap.reason) for gap in state.gaps} == {
        ("skipped", "100 runs were waiting already")
    }


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 1002])
def test_a_gap_is_counted_up_to_a_thousand(count: int) -> None:
    """Exactly, or it says that there are more; its ends are exact."""
    after, run = start(job(), NOON + (count + 1) * MINUTE)
    assert run.instant == NOON + (count + 1) * MINUTE
    (gap,) = after.gaps
    assert (gap.first, gap.last) == (NOON + MINUTE, NOON + count * MINUTE)
    assert (gap.count, gap.is_counted) == (min(count, 1000), count <= 1000)
    assert after.statistics.missed == gap.count


def test_the_durations_are_those_of_the_latest_runs() -> None:
    """Fifty of them, the newest last; a lost run has none."""
    state = job()
    for number in range(1, 61):
        state, run = start(state, NOON + number * MINUTE)
        ended = finish("job", state, run, "success", NOON + number * MINUTE + number / 4)
        assert ended is not None
        state = ended
        assert state.statistics.durations == tuple(n / 4 for n in range(1, number + 1))[-50:]
    state, run = start(state, NOON + 61 * MINUTE)
    lost = step(
        msgspec.structs.replace(
            state, running=(msgspec.structs.replace(run, resumed=MAX_RESUMES),)
        ),
        NOON + 61 * MINUTE + 5,
        is_orphan=bool,
    )
    assert lost.state.statistics.durations == tuple(n / 4 for n in range(11, 61))
    assert lost.state.statistics.runs == 61


def test_overlapping_instants_may_run_beside_each_other() -> None:
    """If the job says so."""
    state, first = start(job(overlap="allow"), NOON + MINUTE)
    state, second = start(state, NOON + 2 * MINUTE)
    assert [run.instant for run in state.running] == [first.instant, second.instant]


def test_a_run_is_resumed_only_so_often() -> None:
    """A job may be what kills its processes."""
    state, run = start(job(), NOON + MINUTE)
    for number in range(1, MAX_RESUMES + 1):
        result = step(state, NOON + MINUTE + number, owner=f"heir-{number}", is_orphan=bool)
        (run,) = result.starts
        assert (run.resumed, run.owner, run.instant) == (number, f"heir-{number}", NOON + MINUTE)
        state = result.state
        assert len(state.running) == 1
    result = step(state, NOON + MINUTE + 10, is_orphan=bool)
    assert result.lost == (run,)
    assert result.state.statistics.failures == 1


def test_runs_that_are_given_up_one_after_another_are_all_noted() -> None:
    """Each stays until the history says so, whoever gives up the next."""
    runs = tuple(run_of(number, is_manual=True) for number in range(1, 4))
    state = msgspec.structs.replace(job(NOON + 9 * MINUTE, overlap="allow"), running=runs)
    for number, run in enumerate(runs, 1):
        result = step(state, NOON + 9 * MINUTE + 1, is_orphan=run.__eq__)
        state = result.state
        assert result.lost == (run,)
        assert (state.lost, state.running) == (runs[:number], runs[number:])
        assert state.statistics.failures == number


def test_only_the_owner_ends_a_run() -> None:
    """A process that was believed dead comes too late."""
    state, run = start(job(), NOON + MINUTE)
    taken = step(state, NOON + MINUTE + 1, owner="heir", is_orphan=bool)
    assert finish("job", taken.state, run, "success", NOON + MINUTE + 2) is None
    (heir,) = taken.starts
    assert finish("job", taken.state, heir, "success", NOON + MINUTE + 2) is not None


def test_a_manual_run_is_not_resumed() -> None:
    """Whoever waited for it is gone."""
    run = ActiveRun(id="by-hand", instant=NOON, owner="me", started_at=NOON, is_manual=True)
    state = start_manually(job(), run, NOON)
    assert state is not None
    result = step(state, NOON + 1, is_orphan=bool)
    assert (result.starts, result.lost) == ((), (run,))
    assert result.state.last == state.last


@pytest.mark.parametrize(
    ("overlap", "running", "requests"), [("skip", 1, 0), ("allow", 2, 0), ("queue", 1, 1)]
)
def test_a_manual_run_obeys_the_overlap(overlap: str, running: int, requests: int) -> None:
    """Like any other; with `queue` it waits in line, and once."""
    state, run = start(job(overlap=overlap), NOON + MINUTE)
    by_hand = msgspec.structs.replace(run, id="by-hand", is_manual=True)
    changed = start_manually(state, by_hand, NOON + MINUTE) or state
    assert (len(changed.running), len(changed.requests)) == (running, requests)
    if requests:
        assert start_manually(changed, by_hand, NOON + MINUTE) is None
    assert withdraw(changed, "by-hand").requests == ()


def test_those_in_line_start_in_order_and_before_instants_that_wait() -> None:
    """One that does not take its turn holds up the next ones for some seconds only."""
    state, run = start(job(overlap="queue"), NOON + MINUTE)
    waiting = [
        msgspec.structs.replace(run, id=f"by-hand-{n}", owner=f"other-{n}", is_manual=True)
        for n in range(2)
    ]
    for each in waiting:
        state = start_manually(state, each, NOON + MINUTE) or state
    state = step(state, NOON + 3 * MINUTE).state
    assert len(state.queued) == 2
    end = NOON + 3 * MINUTE
    ended = finish("job", state, run, "success", end)
    assert ended is not None
    assert step(ended, end + 1).starts == ()
    first, second = (start_manually(ended, each, end + 1) for each in waiting)
    assert first is not None
    assert [each.id for each in first.running] == ["by-hand-0"]
    assert [request.id for request in first.requests] == ["by-hand-1"]
    assert second is None
    assert start_manually(ended, waiting[1], end + 3) is not None
    assert step(ended, end + 5).starts == ()
    (instant,) = step(ended, end + 6).starts
    assert not instant.is_manual
    assert step(ended, end + 1, is_orphan=bool).state.requests == ()


def test_each_place_in_line_has_its_turn_three_seconds_after_the_one_before() -> None:
    """To the second, for those that wait themselves as for the instants behind them."""
    state, run = start(job(overlap="queue"), NOON + MINUTE)
    waiting = [
        msgspec.structs.replace(run, id=f"by-hand-{n}", owner=f"other-{n}", is_manual=True)
        for n in range(4)
    ]
    for each in waiting:
        state = start_manually(state, each, NOON + MINUTE) or state
    end = NOON + 2 * MINUTE
    ended = finish("job", step(state, end).state, run, "success", end)
    assert ended is not None
    assert len(ended.queued) == 1
    for place, each in enumerate(waiting):
        for late in (-0.5, 0.0):
            now = end + 3 * place + late
            assert (start_manually(ended, each, now) is not None) == (late == 0.0 or place == 0)
    assert step(ended, end + 11.5).starts == ()
    assert len(step(ended, end + 12).starts) == 1


def test_a_request_is_run_even_if_the_job_is_paused() -> None:
    """It is an operator's wish, too."""
    state = pause(job(), JobPause(at=NOON))
    assert state is not None
    state, run = start(add_request(state, RunRequest(id="wish", at=NOON + 0.5)), NOON + 1)
    assert (run.id, run.is_manual, state.requests) == ("wish", True, ())


def test_what_was_due_in_a_pause_is_skipped() -> None:
    """One gap, which says who paused it."""
    state = pause(job(), JobPause(at=NOON, by="ann", reason="migration"))
    assert state is not None
    assert step(state, NOON + 5 * MINUTE).state == state
    assert next_due("job", state) is None
    assert pause(state, JobPause(at=NOON + 1)) is None
    state = resume(state, NOON + 5 * MINUTE + 1)
    assert state is not None
    (gap,) = state.gaps
    assert (gap.count, gap.reason) == (5, "it was paused by ann: migration")
    assert resume(state, NOON + 6 * MINUTE) is None
    assert step(state, NOON + 5 * MINUTE + 2).starts == ()
    assert step(state, NOON + 6 * MINUTE).starts


def test_a_job_that_is_disabled_in_code_can_be_enabled() -> None:
    """Until the code changes."""
    state = job(enabled=False)
    assert not state.is_active
    enabled = resume(state, NOON + 1)
    assert enabled is not None
    assert enabled.is_active
    again = define(
        enabled, JobDefinition(schedule="@hourly", enabled=False), "worker-2", 2, NOON + 2
    )
    assert again is not None
    assert not again.is_active


def test_a_new_schedule_fires_nothing_of_the_past() -> None:
    """Neither by an edit nor by new code."""
    state = job(schedule="0 0 1 1 *")
    now = NOON + 30 * MINUTE + 1
    edited = edit(state, {"schedule": "* * * * *"}, now)
    assert edited is not None
    assert step(edited, now).starts == ()
    assert next_due("job", edited) == NOON + 31 * MINUTE
    defined = define(state, JobDefinition(schedule="* * * * *"), "worker-2", 2, now)
    assert defined is not None
    assert step(defined, now).starts == ()
    assert edit(edited, {"schedule": "0 0 1 1 *"}, now) is not None
    assert edit(edited, {"schedule": "* * * * *"}, now) is None


def test_the_newest_process_defines_a_job() -> None:
    """The same definition changes nothing, also not what operators have done."""
    state = pause(job(), JobPause(at=NOON))
    assert state is not None
    other = JobDefinition(schedule="@hourly")
    assert define(state, state.definition, "worker-2", 2, NOON) is None
    assert define(state, other, "worker-9", 0, NOON) is None
    # Processes of one generation start at once: the last one's definition holds.
    for generation in (1, 2):
        defined = define(state, other, "worker-0", generation, NOON)
        assert defined is not None
        assert (defined.pause, defined.definition) == (None, other)
        assert (defined.defined_by, defined.generation) == ("worker-0", generation)


def test_a_removed_job_is_added_again_without_its_past() -> None:
    """What waited becomes a gap; what has begun goes on."""
    state, _ = start(job(overlap="queue"), NOON + MINUTE)
    state = step(state, NOON + 3 * MINUTE).state
    removed = remove(state, NOON + 3 * MINUTE)
    assert removed is not None
    assert remove(removed, NOON + 3 * MINUTE) is None
    assert [gap.count for gap in removed.gaps] == [2]
    assert len(removed.running) == 1
    added = define(removed, state.definition, "worker-2", 2, NOON + 10 * MINUTE)
    assert added is not None
    assert step(added, NOON + 10 * MINUTE).starts == ()


def test_a_removed_job_is_anybodys_to_define() -> None:
    """Found: a process that was older than the removed definition could not add the job again."""
    newer = define(job(), JobDefinition(schedule="@hourly"), "worker-2", 2, NOON)
    assert newer is not None
    removed = remove(newer, NOON)
    assert removed is not None
    added = define(removed, JobDefinition(schedule="@daily"), "worker-1", 1, NOON)
    assert added is not None
    assert (added.is_removed, added.definition.schedule, added.generation) == (False, "@daily", 1)


@given(hours=st.integers(1, 1000), late=st.integers(0, 3000))
def test_lateness_counts_from_the_time_that_jitter_has_chosen(hours: int, late: int) -> None:
    """With `misfire="skip"`, a delay that jitter has chosen is not taken for lateness."""
    instant = NOON + 3600 * hours
    state = job(last=instant - 1, schedule="0 * * * *", jitter=600.0, misfire="skip")
    due = due_time("job", state.effective, find_schedule(state), instant)
    starts = step(state, due + late).starts
    assert [run.instant for run in starts] == ([instant] if late <= MAX_LATENESS else [])


@given(seconds=st.integers(0, 600), jitter=st.sampled_from([10.0, 30.0, 59.0, 300.0]))
def test_all_that_is_due_is_decided_while_a_newer_instant_waits(
    seconds: int, jitter: float
) -> None:
    """Its jitter holds up no older one; and nothing is decided before its time."""
    state = job(jitter=jitter, misfire="all", overlap="allow", max_catch_up=100)
    now, schedule = NOON + seconds, find_schedule(state)
    instants = schedule.between(NOON, now, 1000)
    due = [i for i in instants if due_time("job", state.effective, schedule, i) <= now]
    after = step(state, now, room=100)
    assert [run.instant for run in after.starts] == due
    assert after.state.last == (due[-1] if due else NOON)


def test_a_removed_job_forgets_what_was_asked_for() -> None:
    """A job that is added again later does not run for an old request."""
    asked = add_request(job(), RunRequest(id="run-1", at=NOON, by="me"))
    assert asked is not None
    removed = remove(asked, NOON)
    assert removed is not None
    assert removed.requests == ()
    added = define(removed, JobDefinition(schedule="@yearly"), "worker-2", 2, NOON + 1)
    assert added is not None
    assert step(added, NOON + 2).starts == ()


def test_jitter_is_the_same_in_every_process() -> None:
    """And never reaches the next instant."""
    state = job(jitter=300.0)
    schedule = find_schedule(state)
    times = [due_time("job", state.definition, schedule, NOON + n * MINUTE) for n in range(50)]
    assert times == sorted(times)
    assert all(n * MINUTE <= t - NOON <= (n + 1) * MINUTE for n, t in enumerate(times))
    assert times[1] != due_time("other", state.definition, schedule, NOON + MINUTE)
    soon = job(jitter=30.0)
    due = next_due("job", soon)
    assert due is not None
    assert step(soon, due - 0.01).starts == ()
    assert step(soon, due).starts


class JobWalk:
    """A job to which anything may happen, and what became of its instants."""

    def __init__(self, **options: Any) -> None:
        self.state = job(**options)
        self.now = float(NOON)
        self.fired: list[int] = []
        self.unknown: list[int] = []
        """Instants that passed while the job was removed."""
        self._made = 0

    def move(self, move: str) -> None:
        """Do one thing; check what must always hold."""
        before = self.state
        changed = self._change(move)
        if changed is None:
            return
        self.state = changed
        assert changed.last >= before.last
        overlap = before.effective.overlap, changed.effective.overlap
        assert "allow" in overlap or len(changed.running) <= 1
        assert len(changed.queued) <= 100
        assert not (changed.queued and not changed.is_active)
        assert not (changed.requests and changed.is_removed)
        if before.is_removed:
            schedule = find_schedule(before)
            self.unknown += schedule.between(before.last, changed.last, 10_000)

    def _change(self, move: str) -> JobState | None:
        state, now = self.state, self.now
        self._made += 1
        match move:
            case "advance" | "advance after a death":
                result = step(state, now, is_orphan=lambda _: move != "advance", room=2)
                # A run that is resumed was fired before.
                new = [run for run in result.starts if not run.resumed and not run.is_manual]
                self.fired += [run.instant for run in new]
                return result.state
            case "edit":
                return edit(state, {"retries": int(now) % 7}, now)
            case "define":
                definition = msgspec.structs.replace(state.definition, retries=self._made)
                return define(state, definition, "worker-2", state.generation + 1, now)
            case "define what is there":
                return define(state, state.definition, "worker-2", state.generation + 1, now)
            case "finish" if state.running:
                return finish("job", state, state.running[0], "success", now)
            case "pause":
                return pause(state, JobPause(at=now))
            case "resume":
                return resume(state, now)
            case "remove":
                return remove(state, now)
            case "request" if not state.is_removed:
                return add_request(state, RunRequest(id=f"wish-{self._made}", at=now))
            case _:
                return None


MOVES = (
    *("advance", "advance after a death", "edit", "define", "define what is there", "finish"),
    *("pause", "resume", "remove", "request"),
)


@settings(max_examples=80, deadline=None)
@given(
    overlap=st.sampled_from(["skip", "queue", "allow"]),
    misfire=st.sampled_from(["skip", "last", "all"]),
    moves=st.lists(st.tuples(st.integers(-150, 300), st.sampled_from(MOVES)), max_size=25),
)
def test_every_instant_is_decided_once(
    overlap: str, misfire: str, moves: list[tuple[int, str]]
) -> None:
    """Whatever happens in whatever order: fired, waiting, in one gap, or not decided yet.

    The clock may be set back, and a job may be removed and added again: nothing is fired twice.
    """
    walk = JobWalk(overlap=overlap, misfire=misfire, max_catch_up=3)
    for seconds, move in moves:
        walk.now += seconds
        walk.move(move)
    state = walk.state
    decided = [*walk.fired, *state.queued, *walk.unknown]
    in_gaps = 0
    for gap in state.gaps:
        instants = find_schedule(state).between(gap.first - 1, gap.last, 10_000)
        in_gaps += len(instants)
        decided += instants
    expected = find_schedule(state).between(NOON, state.last, 10_000)
    assert sorted(decided) == expected
    assert state.statistics.missed + state.statistics.skipped == in_gaps


def list_gaps(state: JobState | None) -> list[tuple[int, int, str]]:
    """Return the gaps of a job: first and last minute after noon, and the reason."""
    assert state is not None
    assert sum(gap.count for gap in state.gaps) == state.statistics.skipped
    return [((g.first - NOON) // MINUTE, (g.last - NOON) // MINUTE, g.reason) for g in state.gaps]


@pytest.mark.parametrize(
    ("misfire", "max_catch_up", "most"), [("all", 10, 100), ("all", 1000, 1000), ("all", 101, 101)]
)
def test_only_so_many_instants_wait_for_room(misfire: str, max_catch_up: int, most: int) -> None:
    """Found: with `overlap="allow"` the state grew until it could not be written any more."""
    state = job(schedule="* * * * * *", overlap="allow", misfire=misfire, max_catch_up=max_catch_up)
    for number in range(1, 60):
        state = step(state, NOON + 50 * number, room=number % 2).state
        assert len(state.queued) <= most
    full = {gap.reason for gap in state.gaps if gap.kind == "skipped"}
    assert full == {f"{most:,} runs were waiting already"}
    instants = [*(run.instant for run in state.running), *state.queued]
    assert instants == sorted(instants)


@pytest.mark.parametrize("misfire", ["last", "skip", "all"])
def test_a_state_with_too_many_waiting_instants_recovers(misfire: str) -> None:
    """Whatever has written it: the oldest run, the rest is a gap.

    Only what `misfire="all"` fires at once may be more than usual.
    """
    max_catch_up = 50 if misfire == "all" else 300
    state = msgspec.structs.replace(
        job(NOON + 500 * MINUTE, overlap="queue", misfire=misfire, max_catch_up=max_catch_up),
        queued=tuple(NOON + number * MINUTE for number in range(1, 501)),
    )
    after, run = start(state, NOON + 500 * MINUTE + 1)
    assert (run.instant, len(after.queued)) == (NOON + MINUTE, 99)
    assert list_gaps(after) == [(101, 500, "100 runs were waiting already")]


def wait_behind(overlap: str) -> JobState:
    """Return a job of which one run goes on; with `overlap="queue"`, 2 and 3 wait."""
    state, _ = start(job(overlap=overlap), NOON + MINUTE)
    return step(state, NOON + 3 * MINUTE).state


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_a_change_fires_nothing_that_waits(overlap: str) -> None:
    """Found: it was fired after the change. What came during a run was skipped for that run."""
    state, now = wait_behind(overlap), NOON + 5 * MINUTE + 1
    for change, changed in {
        "the job was changed": edit(state, {"schedule": "@yearly"}, now),
        "the job was removed": remove(state, now),
        "the job was defined anew": define(
            state, JobDefinition(schedule="@daily"), "worker-2", 2, now
        ),
    }.items():
        assert changed is not None
        assert (changed.queued, changed.last) == ((), int(now))
        if overlap == "queue":
            assert list_gaps(changed) == [(2, 3, change), (4, 5, change)]
        elif change != "the job was defined anew":
            assert list_gaps(changed) == [(2, 5, OVERLAPPED)]
        (run,) = changed.running
        ended = finish("job", changed, run, "success", now + 1)
        assert ended is not None
        assert step(ended, now + 1).starts == ()


def test_a_pause_fires_nothing_that_waits() -> None:
    """Neither while it lasts nor after it."""
    paused = pause(wait_behind("queue"), JobPause(at=NOON + 3 * MINUTE + 1, by="ann"))
    assert paused is not None
    assert (paused.queued, list_gaps(paused)) == ((), [(2, 3, "it was paused by ann")])
    resumed = resume(paused, NOON + 5 * MINUTE + 1)
    assert list_gaps(resumed)[1:] == [(4, 5, "it was paused by ann")]


def test_what_came_during_a_run_before_a_pause_was_skipped_for_the_run() -> None:
    """Found: the pause was named as the reason. What came during the pause is another gap."""
    state, run = start(job(), NOON + MINUTE)
    paused = pause(state, JobPause(at=NOON + 3 * MINUTE + 1))
    assert paused is not None
    ended = finish("job", paused, run, "success", NOON + 4 * MINUTE)
    assert ended is not None
    resumed = resume(ended, NOON + 6 * MINUTE + 1)
    assert list_gaps(resumed) == [(2, 3, OVERLAPPED), (4, 6, "it was paused")]


@pytest.mark.parametrize("overlap", ["skip", "queue", "allow"])
@pytest.mark.parametrize("is_disabled", [False, True])
@pytest.mark.parametrize("change", ["edit", "remove", "define", "resume"])
def test_what_came_in_a_pause_was_skipped_for_it_whatever_runs_and_ends_it(
    change: str, overlap: str, *, is_disabled: bool
) -> None:
    """A run that began before the pause is not the reason, also if it has not ended."""
    state, _ = start(job(overlap=overlap), NOON + MINUTE)
    began = NOON + MINUTE + 1
    stopped = (
        edit(state, {"enabled": False}, began) if is_disabled else pause(state, JobPause(at=began))
    )
    assert stopped is not None
    now = NOON + 4 * MINUTE + 1
    match change:
        case "edit":
            changed = edit(stopped, {"description": "new"}, now)
        case "remove":
            changed = remove(stopped, now)
        case "define":
            newer = msgspec.structs.replace(stopped.definition, description="new")
            changed = define(stopped, newer, "worker-2", 2, now)
        case _:
            changed = resume(stopped, now)
    reason = "it was disabled" if is_disabled else "it was paused"
    assert list_gaps(changed) == [(2, 4, reason)]


def test_a_gap_has_only_instants_in_a_row() -> None:
    """What waits may have gaps between."""
    queued = tuple(NOON + number * MINUTE for number in (1, 2, 4, 6, 7))
    state = msgspec.structs.replace(job(NOON + 7 * MINUTE, overlap="queue"), queued=queued)
    reason = "the job was removed"
    removed = remove(state, NOON + 7 * MINUTE)
    assert list_gaps(removed) == [(1, 2, reason), (4, 4, reason), (6, 7, reason)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_dead_run_held_up_was_skipped_for_it(is_lost: bool) -> None:
    """Found: a process that stood by was blamed to be too slow, without an election.

    It saw each instant, and did not fire it because of a run. That its process had died was known
    only later. A process that was not there has missed them instead.
    """
    state, _ = start(job(), NOON + MINUTE)
    if is_lost:
        runs = tuple(msgspec.structs.replace(run, resumed=MAX_RESUMES) for run in state.running)
        state = msgspec.structs.replace(state, running=runs)
    now = NOON + 5 * MINUTE
    assert step(state, now, owner="heir").state == state
    found = step(state, now, owner="heir", is_orphan=bool, was_on_duty=True)
    missed = step(state, now, owner="heir", is_orphan=bool)
    count = 3 if is_lost else 4
    (gap,) = found.state.gaps
    assert (gap.count, gap.kind, gap.reason) == (count, "skipped", OVERLAPPED)
    (gap,) = missed.state.gaps
    assert (gap.count, gap.kind, gap.reason) == (count, "missed", "late")
    assert len(found.starts) == len(missed.starts) == 1


def run_of(number: int, owner: str = "gone", **options: Any) -> ActiveRun:
    """Return a run that was started by another process."""
    instant = NOON + number * MINUTE
    return ActiveRun(id=f"r{number}", instant=instant, owner=owner, started_at=instant, **options)


@pytest.mark.parametrize("room", range(5))
def test_runs_of_dead_processes_are_resumed_as_far_as_there_is_room(room: int) -> None:
    """The oldest first; the others stay as they are, for those who have room."""
    runs = tuple(run_of(number) for number in range(1, 4))
    state = msgspec.structs.replace(job(NOON + 3 * MINUTE, overlap="allow"), running=runs)
    result = step(state, NOON + 3 * MINUTE + 1, is_orphan=bool, room=room)
    resumed = [msgspec.structs.replace(run, owner="me", resumed=1) for run in runs[:room]]
    assert result.starts == tuple(resumed)
    assert result.state.running == (*resumed, *runs[room:])
    assert result.lost == ()


@pytest.mark.parametrize("change", ["finish", "drop"])
def test_only_its_owner_ends_or_drops_a_run(change: str) -> None:
    """One of another owner, or one that is not there, changes nothing; others stay."""
    mine, other, heirs = run_of(1, "me"), run_of(2, "me"), run_of(3, "heir")
    state = msgspec.structs.replace(job(overlap="allow"), running=(mine, other, heirs))

    def end(run: ActiveRun) -> JobState | None:
        if change == "drop":
            return drop_run(state, run)
        return finish("job", state, run, "success", NOON + 5 * MINUTE)

    assert end(msgspec.structs.replace(heirs, owner="me")) is None
    assert end(run_of(4, "me")) is None
    ended = end(mine)
    assert ended is not None
    assert ended.running == (other, heirs)
    assert ended.statistics.runs == (change == "finish")


def test_what_is_in_the_history_is_forgotten_and_nothing_else() -> None:
    """Gaps and lost runs that came meanwhile stay."""
    state = job(schedule="0 * * * *")
    gaps: tuple[Gap, ...] = ()
    for hours in (5, 10):
        state = step(state, NOON + hours * 3600 + 1).state
        state = msgspec.structs.replace(state, running=())
    lost = (run_of(1), run_of(2))
    state = msgspec.structs.replace(state, lost=lost)
    first, second = gaps = state.gaps
    assert drop_noted(state, [], []) == state
    for noted_gaps, noted_runs in (([first], []), ([], [lost[1]]), ([second], [lost[0]])):
        left = drop_noted(state, noted_gaps, noted_runs)
        assert left.gaps == tuple(gap for gap in gaps if gap not in noted_gaps)
        assert left.lost == tuple(run for run in lost if run not in noted_runs)
    assert drop_noted(state, gaps, lost) == msgspec.structs.replace(state, gaps=(), lost=())


def test_a_run_that_was_asked_for_twice_is_one() -> None:
    """Before it starts, while it runs, and beside others."""
    wish, other = (RunRequest(id=name, at=NOON + 0.5, by="ann") for name in ("wish", "other"))
    asked = add_request(add_request(job(), wish), other)
    assert asked.requests == (wish, other)
    assert add_request(add_request(asked, other), wish) == asked
    started, run = start(asked, NOON + 1)
    assert (run.id, started.requests) == ("wish", (other,))
    assert add_request(started, wish) == started


def test_a_change_back_to_what_the_code_says_is_no_change() -> None:
    """Nothing of it stays; the other changes do."""
    state = edit(job(retries=2), {"retries": 5, "timeout": 9.0}, NOON)
    assert state is not None
    assert state.edits == {"retries": 5, "timeout": 9.0}
    back = edit(state, {"retries": 2}, NOON)
    assert back is not None
    assert (back.edits, back.effective.retries) == ({"timeout": 9.0}, 2)
    assert edit(back, {"retries": 2}, NOON) is None
    disabled = edit(back, {"enabled": False}, NOON)
    assert disabled is not None
    resumed = resume(disabled, NOON)
    assert resumed is not None
    assert resumed.edits == {"timeout": 9.0}


@pytest.mark.parametrize(
    ("fields", "is_open", "is_special"),
    [
        ({}, False, False),
        ({"last": NOON + MINUTE, "statistics": Statistics(runs=1)}, False, False),
        ({"running": (run_of(1),)}, True, False),
        ({"queued": (NOON,)}, True, False),
        ({"gaps": (Gap(first=NOON, last=NOON, count=1, reason="late"),)}, True, False),
        ({"lost": (run_of(1),)}, True, False),
        ({"requests": (RunRequest(id="wish", at=NOON),)}, True, True),
        ({"pause": JobPause(at=NOON)}, False, True),
        ({"edits": {"retries": 1}}, False, True),
        ({"is_removed": True}, False, True),
    ],
)
def test_a_state_is_open_or_special_by_each_of_its_parts(
    fields: dict[str, Any], is_open: bool, is_special: bool
) -> None:
    """By the one a successor knows what is left to do, by the other what operators have changed."""
    state = msgspec.structs.replace(job(), **fields)
    assert (state.is_open, state.is_special) == (is_open, is_special)
