"""What is reported of a message when its claim ends: its progress is over, and it counts once."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync import Event
from jobsync.core.messages import Cancel, Completed, Failed, Returned, Snooze
from jobsync.queue import events
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


LEVELS: dict[int, list[type[Event]]] = {
    logging.ERROR: [events.MessageDead, events.MessageBuried, events.DelaysVetoed],
    logging.WARNING: [
        events.MessageRetried,
        events.MessageLost,
        events.ResultDropped,
        events.HandlerOverran,
        events.NewerMessages,
        events.CronUnscheduled,
        events.TaskUnknown,
        events.QueueError,
    ],
    logging.INFO: [events.MessageRecovered],
}


def test_what_somebody_should_look_at_is_logged_as_a_problem() -> None:
    """A dead letter as an error, and each failed attempt once; nothing else is."""
    kinds = {
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind.__name__[0] != "_"
    } - {Event}
    shown = {kind: level for level, kinds in LEVELS.items() for kind in kinds}
    assert {kind: kind.level for kind in kinds} == {
        kind: shown.get(kind, logging.DEBUG) for kind in kinds
    }
    assert kinds >= {*shown, events.AttemptError}


def test_events_of_a_queue_have_the_names_of_the_documents_too() -> None:
    """Those of a queue on S3, and what ends in the same way is heard by the same name."""
    for kind in vars(events).values():
        if isinstance(kind, type) and issubclass(kind, Event) and hasattr(kind, "name"):
            other = kind.name.replace("plg:queue:", "plg:s3-queue:")
            assert other in kind.aliases
    assert events.MessageBuried.name == events.MessageRecovered.name
    assert events.AttemptError.name == events.QueueError.name
    assert "plg:queue:message:complete" in events.MessageCompleted.aliases
