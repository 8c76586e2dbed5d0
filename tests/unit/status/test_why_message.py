"""What a message is said to wait for."""

from typing import Any

import pytest

from jobsync.queue.backend import Failure, MessageInfo, Pause
from jobsync.status.queues import MessageStatus, QueueStatus, QueueWorkerStatus
from jobsync.status.why import explain_message

NOW = 1000.0


def worker(**facts: Any) -> QueueWorkerStatus:
    """Make a worker that lives and has nothing to do, but for some facts."""
    usual: dict[str, Any] = {
        "worker_id": "worker-1",
        "state": "live",
        "concurrency": 3,
        "claims": 0,
        "is_paused": False,
        "heard": 2.0,
        "timeout": 15.0,
        "host": "here",
        "pid": 42,
        "incarnation": "worker-1.a",
    }
    return QueueWorkerStatus(**{**usual, **facts})


def seen(
    *workers: QueueWorkerStatus,
    pause: Pause | None = None,
    holder: QueueWorkerStatus | None = None,
    **facts: Any,
) -> MessageStatus:
    """Make what was seen of a message that is ready, but for some facts."""
    usual: dict[str, Any] = {
        "queue": "default/tasks",
        "id": "m",
        "state": "ready",
        "value": {"id": "m"},
        "attempts": 0,
        "deliveries": 0,
        "max_attempts": 4,
        "errors": (),
        "session": "",
        "is_suspect": False,
        "enqueued": 900.0,
        "due": None,
        "claimed": None,
        "finished": None,
        "seen": NOW,
        "cursor": "1",
    }
    message = MessageInfo(**{**usual, **facts})
    queue = QueueStatus(
        name="default/tasks",
        counts={"ready": 5, "waiting": 2},
        oldest=900.0,
        pause=pause,
        workers=list(workers),
    )
    return MessageStatus(message=message, queue=queue, holder=holder)


def held(
    holder: QueueWorkerStatus | None, *others: QueueWorkerStatus, due: float = 1020.0
) -> MessageStatus:
    """Make what was seen of a message that is claimed."""
    workers = [*others, *([holder] if holder else [])]
    return seen(
        *workers,
        holder=holder,
        state="claimed",
        session="worker-1.a",
        attempts=2,
        claimed=980.0,
        due=due,
    )


FAILED = (Failure(1, "ValueError: no\n  File x", 950.0), Failure(2, "KeyError: 'k'", 970.0))
DEAD: dict[str, Any] = {"state": "dead", "attempts": 4, "errors": FAILED, "finished": 990.0}


@pytest.mark.parametrize(
    ("message", "code", "told", "since", "until"),
    [
        (
            seen(state="waiting", due=1060.0),
            "not-due",
            "not due yet",
            900.0,
            1060.0,
        ),
        (
            seen(state="waiting", due=1004.0, attempts=2, errors=FAILED),
            "retrying",
            "attempt 2 of 4 failed, and it is tried again: KeyError: 'k'",
            970.0,
            1004.0,
        ),
        (
            seen(worker(), pause=Pause(800.0, "a deployment")),
            "paused",
            "default/tasks is paused (a deployment)",
            800.0,
            None,
        ),
        (
            held(worker()),
            "claimed",
            "worker-1 has it in hand, as attempt 2 of 4",
            980.0,
            None,
        ),
        (
            held(worker(state="silent", heard=20.0), worker(worker_id="worker-2")),
            "owner-silent",
            "worker-1 has it in hand and is silent for too long: the other workers take it",
            980.0,
            1020.0,
        ),
        (
            held(worker(state="dead", heard=3.0), worker(worker_id="worker-2")),
            "owner-dead",
            "the other workers take it back",
            997.0,
            1020.0,
        ),
        (
            held(worker(state="dead", heard=3.0)),
            "owner-dead",
            "nobody works on default/tasks who could take it",
            997.0,
            None,
        ),
        (held(None), "owner-dead", "worker-1 had it in hand and is dead", None, None),
        (held(worker(), due=999.0), "lapsed", "has not renewed its claim", 999.0, None),
        (seen(), "no-worker", "nobody is at work on default/tasks", 900.0, None),
        (seen(worker(state="silent")), "no-worker", "nobody is at work", 900.0, None),
        (seen(worker(concurrency=None)), "no-worker", "nobody is at work", 900.0, None),
        (seen(worker(is_paused=True)), "no-worker", "all 1 workers are paused", 900.0, None),
        (
            seen(worker(claims=3), worker(claims=9)),
            "busy",
            "one of 7 that wait, and all 2 workers have their hands full",
            900.0,
            None,
        ),
        (seen(worker(claims=3), worker()), "next", "claims it at its next look", 900.0, None),
        (
            seen(worker(), state="waiting", due=990.0, is_suspect=True),
            "suspect",
            "its worker died with it in hand",
            990.0,
            None,
        ),
        (seen(worker(), is_readable=False), "unreadable", "is not JSON", None, None),
        (
            seen(**DEAD),
            "dead",
            "a dead letter, after attempt 4 of 4: KeyError: 'k'",
            990.0,
            None,
        ),
        (
            seen(**{**DEAD, "value": "{broken", "is_readable": False}),
            "corrupt",
            "set aside as corrupt",
            990.0,
            None,
        ),
        (seen(state="completed", finished=990.0), "completed", "completed", 990.0, None),
        (seen(state="cancelled", finished=990.0), "cancelled", "cancelled it", 990.0, None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_reason_is_the_one_that_holds_a_message_up(
    message: MessageStatus, code: str, told: str, since: float | None, until: float | None
) -> None:
    """Its own state first, then its time, then its queue, then who could claim it."""
    reason = explain_message(message)
    assert reason.code == code
    assert told in reason.text
    assert (reason.since, reason.until) == (since, until)
