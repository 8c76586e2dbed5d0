"""A simulated world: runs real code under virtual time, with faults, reproducibly."""

from jobsync.testing import strikes
from jobsync.testing.billed import BilledStore, PagedStore
from jobsync.testing.databases import NodeDatabase, RecordingQueue, SimulatedThread, join
from jobsync.testing.handlers import (
    RecordedBlockingContext,
    RecordedContext,
    assert_enqueued,
    blocking_context,
    context,
)
from jobsync.testing.invariants import (
    INVARIANTS,
    InvariantBroken,
    Violation,
    check_commits,
    check_replies,
    check_roles,
    check_takes,
    require,
)
from jobsync.testing.limit_invariants import check_limits
from jobsync.testing.loop import Stuck
from jobsync.testing.message_answers import check_answers
from jobsync.testing.message_invariants import check_messages
from jobsync.testing.message_liveness import check_drained, check_orphans, check_redelivered
from jobsync.testing.network import Link, connect
from jobsync.testing.nodes import Machine, Node, NodeClock, NodeHost
from jobsync.testing.outcome_invariants import check_effects, check_results
from jobsync.testing.place_invariants import check_places
from jobsync.testing.record_invariants import check_records, find_leftovers, find_overdue
from jobsync.testing.recording import RecordingBackend, RecordingStore
from jobsync.testing.schedule_invariants import check_decided, check_firing, check_resumption
from jobsync.testing.sqlite_rows import RowStore
from jobsync.testing.stories import (
    Report,
    SavedSeed,
    check_repeats,
    check_story,
    find_story,
    load_seeds,
    replay_line,
    run_campaign,
    run_story,
)
from jobsync.testing.strikes import Forecast, draw_forecast, mend, storm
from jobsync.testing.weather import CALM, Weather
from jobsync.testing.world import Occurrence, World

__all__ = [
    "CALM",
    "INVARIANTS",
    "BilledStore",
    "Forecast",
    "InvariantBroken",
    "Link",
    "Machine",
    "Node",
    "NodeClock",
    "NodeDatabase",
    "NodeHost",
    "Occurrence",
    "PagedStore",
    "RecordedBlockingContext",
    "RecordedContext",
    "RecordingBackend",
    "RecordingQueue",
    "RecordingStore",
    "Report",
    "RowStore",
    "SavedSeed",
    "SimulatedThread",
    "Stuck",
    "Violation",
    "Weather",
    "World",
    "assert_enqueued",
    "blocking_context",
    "check_answers",
    "check_commits",
    "check_decided",
    "check_drained",
    "check_effects",
    "check_firing",
    "check_limits",
    "check_messages",
    "check_orphans",
    "check_places",
    "check_records",
    "check_redelivered",
    "check_repeats",
    "check_replies",
    "check_results",
    "check_resumption",
    "check_roles",
    "check_story",
    "check_takes",
    "connect",
    "context",
    "draw_forecast",
    "find_leftovers",
    "find_overdue",
    "find_story",
    "join",
    "load_seeds",
    "mend",
    "replay_line",
    "require",
    "run_campaign",
    "run_story",
    "storm",
    "strikes",
]
