"""A slice of the recorded histories: one case of each story that is quick and not run elsewhere.

A refactoring must leave them equal. If the behaviour changes on purpose, record all of them anew
in the same commit; see `histories`. `make histories` compares all of them.
"""

import job_stories
import outcome_stories
import pages_queue_stories
import place_stories
import pytest
import queue_stories
import record_stories
import schedule_stories
import task_stories
from histories import (
    HOW_TO_RECORD,
    describe_differences,
    hash_case,
    hash_history,
    list_runs,
    load_recorded,
)

from jobsync.testing import Occurrence

pytestmark = pytest.mark.usefixtures("without_logs")

SLOW = {
    "elections.run_suspends",
    "elections.test_a_clean_release_hands_over_within_a_heartbeat",
    "elections.test_without_faults_the_leader_changes_once_at_most",
    "idle.test_what_an_idle_node_asks_for_does_not_grow_with_the_fleet",
    "nasty.test_a_store_that_refuses_gets_few_requests",
    "nasty.test_a_work_can_be_stopped_at_any_moment",
    "nasty.test_all_die_and_others_start_a_week_later",
    "nasty.test_clocks_beyond_the_assumption_break_no_record",
    "nasty.test_clocks_that_drift_kill_nobody",
    "scenarios.a_heartbeat_at_the_last_moment",
    "scenarios.a_duplicated_heartbeat",
    "scenarios.a_slow_clock_cut_off",
    "scenarios.short_outages",
    "scenarios.slow_checks",
    "pages.stormy",
    "pages.stormy_with_suspends",
    "places.stormy_places",
    "places.stormy_places_with_suspends",
    "queue.stormy_with_suspends",
    "records.stormy",
    "records.stormy_with_suspends",
    "schedule.stormy",
    "schedule.stormy_with_suspends",
    "sessions.test_a_calm_hour_kills_nobody",
}
"""Runs that take too long to be repeated here."""

ELSEWHERE = {
    *(f"queue.{story.__name__}" for story in queue_stories.STORIES),
    *(f"pages.{story.__name__}" for story in pages_queue_stories.STORIES),
    *(f"outcomes.{story.__name__}" for story in outcome_stories.STORIES),
    *(f"tasks.{story.__name__}" for story in task_stories.STORIES),
    *(f"places.{story.__name__}" for story in place_stories.STORIES),
    *(f"jobs.{story.__name__}" for story in job_stories.STORIES),
    *(f"records.{story.__name__}" for story in record_stories.STORIES),
    *(f"schedule.{story.__name__}" for story in schedule_stories.STORIES),
}
"""Stories that their own tests, such as `test_queue`, compare while they run them."""

KINDS = sorted({name.partition(".")[0] for name in load_recorded()})


@pytest.mark.parametrize("kind", KINDS)
def test_histories_are_as_recorded(kind: str) -> None:
    """The first case of each story and test has its recorded history."""
    recorded, found = {}, {}
    for name, cases in load_recorded().items():
        if name.startswith(f"{kind}.") and name not in SLOW | ELSEWHERE and name in list_runs():
            case = next(iter(cases))
            recorded[name] = {case: cases[case]}
            found[name] = {case: hash_case(name, case)}
    lines = "\n".join(describe_differences(recorded, found))
    assert not lines, f"{HOW_TO_RECORD}\n{lines}"


def test_every_story_is_recorded() -> None:
    """A story that is renamed is recorded under its new name, without a change of its hashes."""
    stories = {name for name, run in list_runs().items() if not hasattr(run, "sets")}
    assert stories <= load_recorded().keys()
    assert load_recorded().keys() <= list_runs().keys()
    assert load_recorded().keys() >= SLOW


def test_names_do_not_count() -> None:
    """Words of the simulation change no half of a hash, stored names one, steps both."""

    def split(node: str, what: str, key: str, **details: object) -> tuple[bytes, bytes]:
        details = {"key": key, "value": {key: 1}, **details}
        digest = hash_history([Occurrence(1.5, node, what, details)] * 2)
        return digest[:32], digest[32:]

    steps, stored = split("a", "commit", "role", outcome="Applied", error="Unavailable")
    assert split("b", "write", "role", outcome="Done", error="Gone") == (steps, stored)
    other_steps, other_stored = split("a", "commit", "lead", outcome="Applied", error="Gone")
    assert other_steps == steps
    assert other_stored != stored
    later = split("a", "commit", "role", outcome="Applied", error="Unavailable", at=2.5)
    assert later[0] != steps
    assert later[1] != stored
