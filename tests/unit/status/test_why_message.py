"""Why a message is waiting."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from jobsync.cli.why import _describe
from jobsync.core.messages import CANCELLED, REVOKED
from jobsync.queue.backend import Failure, MessageInfo
from jobsync.queue.directory import Pause, QueueContent
from jobsync.queue.worker_status import (
    ReportedLimit,
    WorkerStatus,
    build_worker_facts,
    read_worker_statuses,
)
from jobsync.status.queues import MessageStatus, QueuesStatus, QueueStatus, QueueWorkerStatus
from jobsync.status.sessions import SessionStatus
from jobsync.status.why import describe_progress, explain

NOW = 1000.0


def worker(**changes: Any) -> QueueWorkerStatus:
    """Return a live, idle worker with some fields changed."""
    defaults: dict[str, Any] = {
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
    return QueueWorkerStatus(**{**defaults, **changes})


def status(
    *workers: QueueWorkerStatus,
    pause: Pause | None = None,
    holder: QueueWorkerStatus | None = None,
    **changes: Any,
) -> MessageStatus:
    """Return the status of a ready message with some fields changed."""
    defaults: dict[str, Any] = {
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
    message = MessageInfo(**{**defaults, **changes})
    queue = QueueStatus(
        name="default/tasks",
        counts={"ready": 5, "waiting": 2},
        oldest=900.0,
        pause=pause,
        workers=list(workers),
    )
    return MessageStatus(message=message, queue=queue, holder=holder)


def claimed(
    holder: QueueWorkerStatus | None,
    *others: QueueWorkerStatus,
    due: float = 1020.0,
    **changes: Any,
) -> MessageStatus:
    """Return the status of a claimed message."""
    workers = [*others, *([holder] if holder else [])]
    return status(
        *workers,
        holder=holder,
        state="claimed",
        session="worker.eu.a",
        attempts=2,
        claimed=980.0,
        due=due,
        **changes,
    )


FAILED = (Failure(1, "ValueError: no\n  File x", 950.0), Failure(2, "KeyError: 'k'", 970.0))
DEAD: dict[str, Any] = {"state": "dead", "attempts": 4, "errors": FAILED, "finished": 990.0}


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("concurrency", [None, 1, 3])
@pytest.mark.parametrize("claims", [0, 1, 3])
@pytest.mark.parametrize("state", ["live", "silent", "dead"])
def test_the_workers_of_a_queue_report_it_or_have_claims(
    state: Any, claims: int, concurrency: int | None, paused: bool
) -> None:
    """A dead one is listed only while it has claims; only live ones work."""
    reported = None
    if concurrency is not None:
        reported = WorkerStatus(concurrency=concurrency, is_paused=paused)
    session = SessionStatus(
        worker_id="w",
        incarnation="w.1",
        state=state,
        heard=2.0,
        timeout=15.0,
        works=(),
        leads=(),
        facts={"host": "here", "pid": 42, **build_worker_facts("default/tasks", reported)},
    )
    content = QueueContent(counts={"ready": 2}, claims={"w.1": claims} if claims else {})
    found = QueuesStatus(cast("Any", None), {"default/tasks": content}, [session]).queue("tasks")
    is_listed = claims > 0 or (reported is not None and state != "dead")
    assert [each.worker_id for each in found.workers] == (["w"] if is_listed else [])
    for each in found.workers:
        assert (each.claims, each.concurrency, each.host, each.pid) == (
            *(claims, concurrency, "here", 42),
        )
        assert each.works is (state == "live" and reported is not None and not paused)
        assert each.is_busy is (claims >= (concurrency or 0))


@pytest.mark.parametrize("pid", [42, None, "42"])
def test_all_that_a_worker_reports_is_shown(pid: Any) -> None:
    """What its session says of it, and what it reports of this queue and not of another."""
    reported = WorkerStatus(
        concurrency=3,
        is_paused=True,
        tasks=("send", "sort"),
        has_more_tasks=True,
        limits={"send": ReportedLimit(max_concurrency=2)},
    )
    session = SessionStatus(
        worker_id="w",
        incarnation="w.1",
        state="silent",
        heard=20.0,
        timeout=15.0,
        works=(),
        leads=(),
        facts={
            "host": "here",
            "pid": pid,
            **build_worker_facts("default/tasks", reported),
            **build_worker_facts("default/other", WorkerStatus(concurrency=1)),
        },
    )
    found = QueuesStatus(cast("Any", None), {"default/tasks": QueueContent()}, [session])
    tasks, other = found.queue("tasks"), found.queue("other")
    # A queue that has no messages is there because of its workers.
    assert [each.name for each in found.queues()] == ["default/other", "default/tasks"]
    shown = QueueWorkerStatus(
        worker_id="w",
        incarnation="w.1",
        state="silent",
        heard=20.0,
        timeout=15.0,
        host="here",
        pid=42 if pid == 42 else None,
        claims=0,
        **msgspec.structs.asdict(reported),
    )
    assert tasks.workers == [shown]
    changes = msgspec.structs.asdict(WorkerStatus(concurrency=1))
    assert other.workers == [msgspec.structs.replace(shown, **changes)]
    # Not all tasks are listed, so it may have any.
    assert [tasks.workers[0].knows(task) for task in ("send", "new", "")] == [True] * 3
    assert [other.workers[0].knows(task) for task in ("send", "")] == [False, True]


@pytest.mark.parametrize(
    ("message", "facts"),
    [
        (status(), {"attempts": "0 of 4", "state": "ready", "queue": "default/tasks"}),
        (status(attempts=1, deliveries=1), {"attempts": "1 of 4"}),
        (status(attempts=1, deliveries=3), {"attempts": "1 of 4, in 3 deliveries"}),
        (claimed(worker()), {"holder": "worker-1 on here, process 42", "state": "claimed"}),
        (status(task="app.send"), {"task": "app.send"}),
        (
            status(state="completed", finished=990.0, result_problem="it is too large"),
            {"result": "not kept: it is too large"},
        ),
    ],
)
def test_people_see_what_is_worth_knowing(message: MessageStatus, facts: dict[str, str]) -> None:
    """Besides the reason."""
    found = dict(_describe(message))
    assert facts.items() <= found.items()
    assert ("holder" in found) is (message.holder is not None)


@pytest.mark.parametrize(
    ("message", "code", "text", "since", "until"),
    [
        (
            status(state="waiting", due=1060.0),
            "not-due",
            "not due yet",
            900.0,
            1060.0,
        ),
        (
            status(state="waiting", due=1004.0, attempts=2, errors=FAILED),
            "retrying",
            "attempt 2 of 4 failed and will be retried: KeyError: 'k'",
            970.0,
            1004.0,
        ),
        (
            # Redriven: its errors are those of former attempts.
            status(state="waiting", due=1004.0, errors=FAILED),
            "not-due",
            "not due yet",
            900.0,
            1004.0,
        ),
        (
            status(worker(), pause=Pause(800.0, "a deployment")),
            "paused",
            "default/tasks is paused (a deployment)",
            800.0,
            None,
        ),
        (
            claimed(worker()),
            "claimed",
            "worker-1 has claimed it, as attempt 2 of 4",
            980.0,
            None,
        ),
        (
            claimed(worker(), is_suspect=True),
            "claimed",
            "as attempt 2 of 4, alone, because a worker has died with it",
            980.0,
            None,
        ),
        (
            claimed(worker(state="silent", heard=20.0), worker(worker_id="worker-2")),
            "owner-silent",
            "the other workers take it back once it is dead or its claim lapses",
            980.0,
            1020.0,
        ),
        (
            claimed(worker(state="dead", heard=3.0), worker(worker_id="worker-2")),
            "owner-dead",
            "the other workers take it back at their next poll",
            997.0,
            None,
        ),
        (
            claimed(worker(state="dead", heard=3.0)),
            "owner-dead",
            "default/tasks has no worker to take it back",
            997.0,
            None,
        ),
        (claimed(None), "owner-dead", "worker.eu had claimed it and is dead", None, None),
        (claimed(worker(), due=999.0), "lapsed", "has not renewed its claim", 999.0, None),
        (status(), "no-worker", "no worker is active on default/tasks", 900.0, None),
        (status(worker(state="silent")), "no-worker", "no worker is active", 900.0, None),
        (status(worker(concurrency=None)), "no-worker", "no worker is active", 900.0, None),
        (status(worker(is_paused=True)), "no-worker", "all 1 workers are paused", 900.0, None),
        (
            status(worker(claims=3), worker(claims=9)),
            "busy",
            "1 of 7 waiting messages, and all 2 workers are at capacity",
            900.0,
            None,
        ),
        (
            status(worker(), worker(tasks=("a.b", "")), task="a.c"),
            "unknown-task",
            "no live worker knows task a.c",
            900.0,
            None,
        ),
        (
            status(worker(), worker(tasks=("a.c",), is_paused=True), task="a.c"),
            "unknown-task",
            "every live worker that knows task a.c is paused",
            900.0,
            None,
        ),
        (
            status(worker(tasks=("a.c",))),
            "unknown-task",
            "no live worker has a handler for messages without a task",
            900.0,
            None,
        ),
        (
            status(worker(claims=9, tasks=("a.c",)), worker(), task="a.c"),
            "busy",
            "the only worker is at capacity",
            900.0,
            None,
        ),
        (
            status(worker(tasks=(), has_more_tasks=True), task="a.c"),
            "next",
            "claims it at its next poll",
            900.0,
            None,
        ),
        (
            status(worker(claims=3), worker()),
            "next",
            "a message that it handles alone",
            900.0,
            None,
        ),
        (
            status(worker(), state="waiting", due=990.0, is_suspect=True),
            "suspect",
            "its worker died while it was claimed",
            990.0,
            None,
        ),
        (status(worker(), is_readable=False), "unreadable", "is not JSON", None, None),
        (status(worker(), format=99), "newer", "newer code has stored it (format 99)", 900.0, None),
        (
            status(**DEAD),
            "dead",
            "a dead letter, after attempt 4 of 4: KeyError: 'k'",
            990.0,
            None,
        ),
        (
            status(**{**DEAD, "value": "{broken", "is_readable": False}),
            "corrupt",
            "it is corrupt",
            990.0,
            None,
        ),
        (status(state="completed", finished=990.0), "completed", "completed", 990.0, None),
        (
            status(
                state="cancelled",
                finished=990.0,
                errors=(Failure(1, "ValueError", 9.0), Failure(2, f"{CANCELLED}: late\nx", 990.0)),
            ),
            "cancelled",
            "its handler cancelled it: late",
            990.0,
            None,
        ),
        (
            status(state="cancelled", finished=990.0, errors=(Failure(1, "ValueError", 9.0),)),
            "cancelled",
            "its handler cancelled it",
            990.0,
            None,
        ),
        (status(state="cancelled", finished=990.0), "cancelled", "cancelled it", 990.0, None),
        (
            status(state="cancelled", finished=990.0, errors=(Failure(0, REVOKED, 990.0),)),
            "cancelled",
            "it was cancelled from outside",
            990.0,
            None,
        ),
        (
            claimed(worker(), progress=0.4, progress_note="rows 400 of 1,000"),
            "claimed",
            "as attempt 2 of 4: 40% done, rows 400 of 1,000",
            980.0,
            None,
        ),
        (claimed(worker(), progress=7.0), "claimed", "of 4: progress 7", 980.0, None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_first_obstacle_is_the_reason(
    message: MessageStatus, code: str, text: str, since: float | None, until: float | None
) -> None:
    """The state of a message comes first, then its due time, its queue, and the workers."""
    reason = explain(message)
    assert reason.code == code
    assert text in reason.text
    assert (reason.since, reason.until) == (since, until)


@pytest.mark.parametrize(
    ("changes", "words", "until"),
    [
        ({"state": "claimed", "due": 1020.0}, "is being handled", None),
        ({"state": "waiting", "due": 1030.0}, "is waiting", 1030.0),
        ({"state": "ready"}, "is ready", None),
    ],
)
def test_a_blocked_message_names_the_head_of_its_group(
    changes: dict[str, Any], words: str, until: float | None
) -> None:
    """With what that one does, and until when it waits."""
    head = status(worker(), id="head-1", group="customer-7", **changes).message
    blocked = status(worker(), state="blocked", group="customer-7")
    reason = explain(msgspec.structs.replace(blocked, head=head))
    assert reason.code == "blocked"
    assert reason.text == f"it is blocked by head-1, the head of group customer-7, which {words}"
    assert (reason.since, reason.until) == (900.0, until)


def test_a_blocked_message_whose_head_has_just_ended_names_its_group() -> None:
    """Nobody is named who is not there."""
    reason = explain(status(worker(), state="blocked", group="customer-7"))
    assert (reason.code, reason.until) == ("blocked", None)
    assert "group customer-7" in reason.text


@pytest.mark.parametrize(
    ("limits", "claimed", "expected"),
    [
        ({"send": ReportedLimit(max_concurrency=2)}, 2, "max_concurrency=2 of task send, counted"),
        ({"send": ReportedLimit(max_concurrency=2)}, 1, None),
        ({"": ReportedLimit(max_concurrency=2)}, 2, "max_concurrency=2 of queue default/tasks"),
        ({"send": ReportedLimit(rate=1 / 6)}, 0, "rate_limit=10/minute of task send"),
        ({"": ReportedLimit(rate=100.0)}, 0, "rate_limit=100/second of queue default/tasks"),
        ({"other": ReportedLimit(max_concurrency=2, rate=1.0)}, 2, None),
    ],
)
def test_a_limit_that_holds_a_message_back_is_named(
    limits: dict[str, ReportedLimit], claimed: int, expected: str | None
) -> None:
    """As its worker has reported it; one on concurrency only if it is reached."""
    reported = WorkerStatus(concurrency=9, tasks=("send",), limits=limits)
    facts = build_worker_facts("default/tasks", reported)
    (read,) = read_worker_statuses(facts).values()
    able = worker(concurrency=9, tasks=read.tasks, limits=read.limits)
    message = status(able, task="send")
    queue = msgspec.structs.replace(message.queue, counts={"ready": 1, "claimed": claimed})
    reason = explain(msgspec.structs.replace(message, queue=queue))
    assert (reason.code == "limited") == (expected is not None)
    assert (expected or "a worker claims it at its next poll") in reason.text


@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        ({}, True),
        ({"is_paused": True}, False),
        ({"state": "silent"}, False),
        ({"state": "dead"}, False),
        ({"concurrency": None}, False),
    ],
)
def test_only_limits_of_workers_that_claim_are_named(
    changes: dict[str, Any], is_named: bool
) -> None:
    """Another version of the code may have had one that holds no longer."""
    limits = {"": ReportedLimit(rate=5.0), "send": ReportedLimit(max_concurrency=1)}
    queue = status(worker(limits=limits, **changes), worker(limits={})).queue
    queue = msgspec.structs.replace(queue, counts={"claimed": 1})
    named = ["rate_limit=5/second of queue default/tasks", "max_concurrency=1 of task send"]
    assert queue.find_limits("send") == (named if is_named else [])


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (1.0, "1/second"),
        (2.0, "2/second"),
        (2.5, "150/minute"),
        (1 / 60, "1/minute"),
        (7 / 60, "7/minute"),
        (1 / 3600, "1/hour"),
        (1 / 86_400, "1/day"),
        (5 / 86_400, "5/day"),
        (1e-6, "1e-06/second"),
    ],
)
def test_a_rate_is_shown_in_the_unit_in_which_it_is_whole(rate: float, shown: str) -> None:
    """As people write it."""
    queue = status(worker(limits={"": ReportedLimit(rate=rate)})).queue
    assert queue.find_limits("") == [f"rate_limit={shown} of queue default/tasks"]


@pytest.mark.parametrize(
    ("progress", "note", "shown"),
    [
        (0.0, "", "0% done"),
        (0.256, "row 256", "26% done, row 256"),
        (1.0, "", "100% done"),
        (1.5, "", "progress 1.5"),
        (-1.0, "", "progress -1"),
        (400.0, "rows", "progress 400, rows"),
    ],
)
def test_progress_is_a_share_or_a_number(progress: float, note: str, shown: str) -> None:
    """In the reason, and among the facts; none is as good as any other."""
    holder = worker()
    found = claimed(holder, progress=progress, progress_note=note, progress_at=990.0)
    assert describe_progress(progress, note) == shown
    assert explain(found).text.endswith(f": {shown}")
    assert dict(_describe(found))["progress"].endswith(f" {shown}")


@pytest.mark.parametrize("state", ["ready", "waiting", "claimed", "completed", "dead"])
@pytest.mark.parametrize("session", ["w.1", "w.0", ""])
async def test_only_a_claimed_message_has_a_holder(state: Any, session: str) -> None:
    """One that waits or has ended names the session of its last claim, which does other work."""
    message = status(state=state, session=session).message

    async def find(ids: list[str]) -> list[MessageInfo]:
        return [message] if ids == [message.id] else []

    reported = SessionStatus(
        worker_id="w",
        incarnation="w.1",
        state="live",
        heard=2.0,
        timeout=15.0,
        works=(),
        leads=(),
        facts=build_worker_facts("default/tasks", WorkerStatus(concurrency=1)),
    )
    queues = QueuesStatus(cast("Any", SimpleNamespace(find=find)), {}, [reported])
    found = await queues.message("m")
    assert found is not None
    assert (found.holder is not None) is (state == "claimed" and session == "w.1")
    assert await queues.message("other") is None
