"""What is reported of a message when its claim ends: its progress is over, and it counts once."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync.core.messages import Cancel, Completed, Failed, Returned, Snooze
from jobsync.queue.backend import Message, Receipt
from jobsync.queue.in_flight import Delivery
from jobsync.queue.progress import ProgressWriter
from jobsync.queue.reporter import QueueReporter, ReportingQueue


def build_message(attempt: int) -> Message:
    """Return an attempt of a message that has two."""
    return Message(
        receipt=Receipt("id-1", attempt, "claim-1"),
        value={"id": "id-1"},
        attempt=attempt,
        max_attempts=2,
        timeout=None,
        is_suspect=False,
        enqueued=0.0,
    )


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize(
    ("verdict", "attempt", "counted", "callback"),
    [
        (Completed({"n": 1}), 1, "completed", ("complete", {"n": 1})),
        (Failed("no"), 1, "retried", ("error", "no")),
        (Failed("no", ValueError("mine")), 2, "dead", ("error", "mine")),
        (Cancel("stale"), 1, "cancelled", None),
        (Returned(), 1, "returned", None),
        (Snooze(5), 2, "returned", None),
        ("lost", 1, "lost", None),
    ],
)
def test_the_end_of_a_claim_is_counted_and_ends_its_progress(
    verdict: Any, attempt: int, counted: str, callback: Any, *, is_used: bool
) -> None:
    """However it ends; the user's function gets the result, or the error."""
    called: list[Any] = []
    ended: list[str] = []
    queue = SimpleNamespace(
        queue="mails", emit=lambda _: None, events=SimpleNamespace(has_listener=lambda _: False)
    )
    progress = SimpleNamespace(is_used=is_used, end=ended.append)
    reporter = QueueReporter(
        cast("ReportingQueue", queue),
        lambda _, result: called.append(("complete", result)),
        lambda error, _: called.append(("error", str(error))),
        None,
        cast("ProgressWriter", progress),
    )
    message = build_message(attempt)
    if verdict == "lost":
        reporter.on_lost(message, "its claim has ended")
    else:
        delivery = Delivery("id-1", message, {"id": "id-1"}, "me", cast("Any", 0.0))
        assert reporter.on_settled(delivery, verdict, 0.0) is None
    assert reporter.counters == {counted: 1}
    assert called == ([] if callback is None else [callback])
    assert ended == (["id-1"] if is_used else [])
