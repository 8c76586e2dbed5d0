"""Tests that only run at full scale. On its own because it is a table.

Each takes long, and at small scale a sibling tells nearly the same: the same test on another store,
or a story of the same kind. Of the mutants that simulated worlds must notice, a third runs.
"""

import zlib

__all__ = ["is_left_out"]

_TESTS = {
    "tests/conformance/test_partition_crashes.py": (
        "test_a_crash_at_any_write_leaves_each_record_in_its_partitions[s3-separate",
        "test_a_backfill_that_dies_at_any_write_is_completed_by_another_process[s3-separate",
    ),
    "tests/docs/test_migration.py": (
        "test_the_page_leads_there[1.1]",
        "test_the_page_leads_back[1.1]",
    ),
    "tests/integration/cli/test_shutdown.py": (
        "test_a_process_ends_whatever_its_handler_does[postgres-",
    ),
    "tests/integration/jobs/test_pins.py": (
        "test_more_waiting_tasks_than_one_document_holds[postgres-190]",
        "test_more_waiting_tasks_than_one_document_holds[s3-190]",
    ),
    "tests/integration/queue/test_handler_zoo.py": (
        "test_a_handler_after_its_claim_was_lost[postgres-",
        "test_a_handler_after_its_timeout[postgres-",
        "test_a_handler_during_a_stop[postgres-",
    ),
    "tests/integration/mutants/test_mutant_workspace.py": ("test_tests_that_do_not_end_are_ended",),
    "tests/integration/queue/test_pages.py": ("test_workers_seldom_take_the_same_page",),
    "tests/integration/queue/test_page_costs.py": (
        "test_a_message_costs_a_fraction_of_a_request[50 ms-hundred]",
    ),
    "tests/integration/queue/test_idle.py": (
        "test_an_idle_worker_sends_only_heartbeats_and_liveness_checks[postgresql]",
    ),
    "tests/integration/queue/test_queue_plugin.py": (
        "test_a_process_works_on_several_queues[s3]",
        "test_listeners_under_the_documents_names[s3]",
    ),
    "tests/integration/queue/test_single_messages.py": (
        "test_another_process_cancels_delays_and_deletes[s3]",
        "test_another_process_cancels_delays_and_deletes[postgres]",
        "test_wrong_arguments_are_refused_and_a_pause_holds[s3]",
        "test_claims_are_returned_when_their_process_stops[s3]",
        "test_progress_is_stored_and_shown[s3]",
    ),
    "tests/processes/test_election.py": (
        "test_no_stale_write_is_accepted_in_a_storm[postgres]",
        "test_no_stale_write_is_accepted_in_a_storm[s3]",
    ),
    "tests/processes/test_jobs.py": ("test_no_task_is_done_twice_or_never[postgres-printed-join]",),
    "tests/processes/test_plugins.py": (
        "test_a_signal_may_come_at_any_moment_of_the_start[postgres-",
    ),
    "tests/processes/test_queue.py": (
        "test_effects_in_transactions_happen_once_in_a_storm[sqlite]",
    ),
    "tests/processes/test_queue_places.py": (
        "test_groups_are_never_overtaken[sqlite]",
        "test_one_key_makes_one_message[sqlite]",
        "test_one_key_makes_one_message[s3]",
        "test_limits_are_back_after_all_that_held_them_were_killed[sqlite]",
        "test_a_limit_holds_for_all_processes_while_some_are_killed[sqlite]",
    ),
    "tests/processes/test_races.py": (
        "test_all_may_connect_first[postgres]",
        "test_no_increment_is_lost[postgres]",
        "test_no_increment_is_lost[s3]",
    ),
    "tests/processes/test_scheduler_processes.py": (
        "test_each_instant_fires_once_in_a_storm[postgres]",
        "test_each_instant_fires_once_in_a_storm[s3]",
    ),
    "tests/processes/test_supervisor.py": ("test_two_processes_compute_faster_than_one",),
    "tests/seeds/test_guide_in_order.py": (
        "test_all_blocks_run_in_order_on_one_database[postgres]",
    ),
    "tests/simulation/models/test_models.py": (
        "test_a_protocol_holds[PageModel, an outage]",
        "test_a_protocol_holds[RoleModel, a long election]",
        "test_a_protocol_holds[RoleModel, actors that return]",
    ),
    "tests/simulation/test_mutants.py": ("test_the_real_protocol_survives_all_killers",),
    "tests/simulation/test_queue.py": (
        "test_storms[400]",
        "test_storms_in_which_clocks_stop[1]",
    ),
    "tests/simulation/test_queue_mutants.py": (
        "test_the_killers_find_nothing_in_the_real_protocol",
        "test_the_world_notices[returns_what_cancels_itself]",
    ),
    "tests/simulation/test_queue_on_pages.py": (
        "test_the_world_notices[does_not_know_what_is_due]",
    ),
    "tests/simulation/test_queue_on_postgres.py": (
        "test_a_story_repeats",
        "test_stories[commits_late]",
        "test_stories[effects_of_the_killed]",
        "test_stories[effects_that_take_too_long]",
        "test_stories[groups_in_bad_weather]",
        "test_stories[groups_of_poison]",
        "test_stories[late]",
        "test_stories[messages]",
        "test_stories[newest_first]",
        "test_stories[slow]",
        "test_the_world_notices[ends_what_is_to_be_kept]",
        "test_the_world_notices[releases_groups_of_those_that_fail]",
        "test_the_world_notices[removes_keys_that_are_held]",
    ),
    "tests/simulation/test_queue_places.py": ("test_a_storm_in_which_clocks_stop",),
    "tests/simulation/test_records.py": ("test_a_story_repeats",),
    "tests/simulation/test_schedule.py": ("test_a_story_repeats",),
    "tests/simulation/test_schedule_mutants.py": (
        "test_the_killers_find_nothing_in_the_real_scheduler",
    ),
}
"""By file; a name may be the start of several."""

_STARTS = tuple(f"{file}::{name}" for file, names in _TESTS.items() for name in names)
_MUTANTS = ("test_the_world_notices", "test_the_world_detects_the_mutant", "test_the_world_catches")


def is_left_out(test: str) -> bool:
    """Whether the test with this id only runs at full scale."""
    is_mutant = test.partition("::")[2].startswith(_MUTANTS)
    return test.startswith(_STARTS) or (is_mutant and zlib.crc32(test.encode()) % 3 != 0)
