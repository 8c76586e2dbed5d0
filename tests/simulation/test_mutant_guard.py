"""A mutant is caught only by the invariant that it breaks, never because it crashes."""

from collections.abc import Callable

import job_stories
import pytest
import queue_stories
import record_stories
import scenarios
from mutants import catches

from jobsync.coordination.election import Election
from jobsync.coordination.observer import Observer
from jobsync.database.archive import ArchiveMoves
from jobsync.database.backfill import Backfill
from jobsync.database.index import IndexedWriter
from jobsync.jobs.claims import Claims
from jobsync.jobs.owned_tokens import OwnedTokens
from jobsync.queue.completer import Completer
from jobsync.queue.in_flight import InFlight
from jobsync.testing import INVARIANTS, Violation, run_story
from jobsync.testing.stories import Story
from jobsync.ttl.sweep import ResourceSweep

pytestmark = pytest.mark.usefixtures("without_logs")

Run = Callable[[], list[Violation]]


def run_once(story: Story) -> Run:
    """Return a run of a story with one seed."""
    return lambda: run_story(story, 0).violations


@pytest.mark.parametrize(
    ("part", "method", "run"),
    [
        (InFlight, "add", run_once(queue_stories.settled_late)),
        (Completer, "_settle", run_once(queue_stories.settled_late)),
        (Claims, "_end", run_once(job_stories.suspend)),
        (OwnedTokens, "_give_up", run_once(job_stories.join)),
        (IndexedWriter, "_plan", run_once(record_stories.races)),
        (Backfill, "_build", run_once(record_stories.adds_partitions)),
        (ResourceSweep, "_handle", run_once(record_stories.renews)),
        (ArchiveMoves, "complete", run_once(record_stories.renews)),
        (Observer, "is_dead", scenarios.a_kill),
        (Election, "release", scenarios.a_clean_stop),
    ],
    ids=lambda each: each if isinstance(each, str) else getattr(each, "__name__", ""),
)
def test_a_defect_catches_no_mutant(
    part: type, method: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing attribute deep in the protocol is reported as a crash, not as an invariant."""

    def fail(*_: object, **__: object) -> None:
        raise AttributeError("was renamed")

    monkeypatch.setattr(part, method, fail)
    violations = run()
    assert "crash" in {each.invariant for each in violations}
    assert [each for each in INVARIANTS if catches(violations, each)] == []


def test_another_invariant_is_not_enough() -> None:
    """The recorded id must be among those found."""
    found = [Violation("Q4", "claimed twice"), Violation("QL3", "not drained")]
    assert catches(found, "Q4")
    assert catches(found, "QL3")
    assert not catches(found, "Q5")
    assert not catches([*found, Violation("crash", "AttributeError")], "Q4")
    assert not catches([], "Q4")
