"""What queues on databases do with the answers of their statements: who hears, what is repeated."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from sql_queue_stage import AWAY, ENDS, LOST, TOPIC, WRONG, SqlStage
from waiting import until

from jobsync import Invalid, OutcomeUnknown
from jobsync.core.messages import Transition
from jobsync.errors import JobsyncError
from jobsync.queue.backend import (
    ClaimResult,
    EndedClaim,
    Message,
    NewMessage,
    Receipt,
    Settlement,
)
from jobsync.queue.limits import QueueLimits
from jobsync.queue.single_message import ProgressReport, StoredResult
from jobsync.queue.sql.common import ClaimedRows, ClaimRequest, SqlBackend


def settlement(move: Transition = "complete", id: str = "a", **how: Any) -> Settlement:
    """Return how a claim ends."""
    return Settlement(receipt=Receipt(id, 1, "c"), move=move, **how)


ENDED = EndedClaim(id="a", state="waiting", attempt=1, session="s")
FREEING = QueueLimits(tasks={"t": QueueLimits(max_concurrency=1)})
URGENT = [NewMessage(id="a", value=1, max_attempts=4, priority=1)]
RESULT = StoredResult("1")
MISSING = StoredResult(None, "too large")


def settle(*settlements: Settlement) -> Callable[[SqlBackend], Any]:
    """Return a call that ends claims."""
    return lambda to: to.settle(settlements or [settlement()])


WAKES: dict[str, tuple[Callable[[], SqlStage], Callable[[SqlBackend], Any], list[str]]] = {
    "completed": (lambda: SqlStage(settle={"a"}), settle(), []),
    "completed with a result": (
        lambda: SqlStage(settle={"a"}),
        settle(settlement(result=RESULT)),
        [ENDS],
    ),
    "completed with a missing one": (
        lambda: SqlStage(settle={"a"}),
        settle(settlement(result=MISSING)),
        [ENDS],
    ),
    "a result beside others": (
        lambda: SqlStage(settle={"a", "b"}),
        settle(settlement(), settlement(id="b", result=RESULT)),
        [ENDS],
    ),
    "completed where claims are counted": (
        lambda: SqlStage(FREEING, settle={"a"}),
        settle(),
        [TOPIC],
    ),
    "completed where starts are counted": (
        lambda: SqlStage(QueueLimits(rate=1.0), settle={"a"}),
        settle(),
        [],
    ),
    "retried": (lambda: SqlStage(settle={"a"}), settle(settlement("retry")), [TOPIC]),
    "retried later": (lambda: SqlStage(settle={"a"}), settle(settlement("retry", delay=5.0)), []),
    "released": (lambda: SqlStage(settle={"a"}), settle(settlement("release")), [TOPIC]),
    "buried": (lambda: SqlStage(settle={"a"}), settle(settlement("bury")), []),
    "released beside others": (
        lambda: SqlStage(settle={"a", "b", "c"}),
        settle(settlement(), settlement("release", "b"), settlement("snooze", "c", delay=9.0)),
        [TOPIC],
    ),
    "no settlement": (lambda: SqlStage(FREEING), lambda to: to.settle([]), []),
    "claims ended": (lambda: SqlStage(end_claims=[[ENDED]]), lambda to: to.end_claims(), [TOPIC]),
    "no claim ended": (lambda: SqlStage(end_claims=[[]]), lambda to: to.end_claims(["s"]), []),
    "redriven": (lambda: SqlStage(redrive=1), lambda to: to.redrive(["a"]), [TOPIC]),
    "none redriven": (lambda: SqlStage(redrive=0), lambda to: to.redrive(), [TOPIC]),
    "a redrive in doubt": (lambda: SqlStage(redrive=LOST), lambda to: to.redrive(), [TOPIC]),
    "purged": (lambda: SqlStage(purge=2), lambda to: to.purge(["dead"]), [TOPIC]),
    "none purged": (lambda: SqlStage(purge=0), lambda to: to.purge(["dead"]), []),
    "paused": (lambda: SqlStage(pause=True), lambda to: to.pause("why"), []),
    "resumed": (lambda: SqlStage(resume=True), lambda to: to.resume(), [TOPIC]),
    "resumed again": (lambda: SqlStage(resume=False), lambda to: to.resume(), [TOPIC]),
    "a resume in doubt": (lambda: SqlStage(resume=LOST), lambda to: to.resume(), [TOPIC]),
    "cancelled": (lambda: SqlStage(cancel=(1, "")), lambda to: to.cancel("a"), [ENDS]),
    "not cancelled": (lambda: SqlStage(cancel=None, find=[[]]), lambda to: to.cancel("a"), []),
    "deleted": (lambda: SqlStage(delete=True), lambda to: to.delete("a"), [ENDS]),
    "not deleted": (lambda: SqlStage(delete=False, find=[[]]), lambda to: to.delete("a"), []),
    "run now": (lambda: SqlStage(run_now=True), lambda to: to.run_now("a"), [TOPIC]),
    "not run now": (lambda: SqlStage(run_now=False), lambda to: to.run_now("a"), []),
    "placed": (lambda: SqlStage(place={}), lambda to: to.push(URGENT), [TOPIC]),
    "placed in doubt": (
        lambda: SqlStage(place=LOST, exists=False, find_holders={}),
        lambda to: to.push(URGENT),
        [TOPIC],
    ),
    "forgotten": (lambda: SqlStage(forget=5), lambda to: to.forget("dead", older_than=1), []),
    "extended": (
        lambda: SqlStage(extend=[[True]]),
        lambda to: to.extend([Receipt("a", 1, "c")], 9),
        [],
    ),
}
"""What the database answers, what is called, and who is woken."""


@pytest.mark.parametrize("name", WAKES)
async def test_who_may_go_on_is_told(name: str) -> None:
    """Workers if there may be something to claim, waiters if a message may have ended."""
    build, call, woken = WAKES[name]
    stage = build()
    with suppress(OutcomeUnknown):
        await call(stage.backend)
    assert stage.access.woken == woken


async def test_ends_are_announced_exactly_while_somebody_waits_for_one() -> None:
    """Of several who wait until the last has gone, also if they were cancelled."""
    stage = SqlStage(settle={"a"})
    waiters = [asyncio.ensure_future(stage.backend.wait_for_end(7.0)) for _ in range(2)]
    await until(lambda: len(stage.access.waits) == 2, "both wait")
    assert stage.access.waits == [(ENDS, 7.0)] * 2
    woken = []
    for waiter in [*waiters, None]:
        await stage.backend.settle([settlement()])
        woken.append(len(stage.access.woken))
        if waiter is not None:
            waiter.cancel()
            with suppress(asyncio.CancelledError):
                await waiter
    assert woken == [1, 2, 2]
    assert set(stage.access.woken) == {ENDS}


async def test_workers_wait_for_their_own_queue() -> None:
    """For as long as they ask."""
    stage = SqlStage()
    stage.access.is_over.set()
    await stage.backend.wait(3.0)
    assert stage.access.waits == [(TOPIC, 3.0)]


@pytest.mark.parametrize("answered", [set(), {"b"}, {"a", "c"}, {"a", "b", "c", "x"}])
async def test_each_settlement_has_its_own_answer(answered: set[str]) -> None:
    """In the order of the settlements; the database says which were not stale."""
    stage = SqlStage(settle=answered)
    batch = [settlement(id=name) for name in "cab"]
    assert await stage.backend.settle(batch) == [name in answered for name in "cab"]
    assert stage.list_asked("settle") == [[batch]]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([AWAY], AWAY),
        ([WRONG], WRONG),
        ([LOST, {"a"}], None),
        ([LOST, LOST, AWAY, WRONG, LOST, {"a"}], None),
        ([LOST, AWAY], LOST),
        ([LOST, WRONG], LOST),
        ([LOST], LOST),
    ],
)
async def test_a_settlement_that_may_have_arrived_is_sent_until_an_answer(
    answers: list[Any], expected: JobsyncError | None
) -> None:
    """The same batch, for half a minute; before that an error says that nothing was done."""
    stage = SqlStage(settle=[*answers])
    batch = [settlement(), settlement("bury", "b")]
    begin = stage.clock.mono_seconds
    if expected is None:
        assert await stage.backend.settle(batch) == [True, False]
        assert len(stage.list_asked("settle")) == len(answers)
    else:
        with pytest.raises(type(expected)) as raised:
            await stage.backend.settle(batch)
        assert raised.value is expected
        took = stage.clock.mono_seconds - begin
        assert (30 <= took < 36) if expected is LOST else took == 0
        assert stage.access.woken == []
    assert all(asked == [batch] for asked in stage.list_asked("settle"))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("sent", "exists", "expected"),
    [
        (None, False, None),
        (LOST, True, None),
        (LOST, False, LOST),
        (LOST, AWAY, LOST),
        (LOST, OutcomeUnknown("emails", "too"), LOST),
        (AWAY, True, AWAY),
        (WRONG, True, WRONG),
    ],
)
async def test_a_push_in_doubt_is_looked_for_and_never_sent_again(
    sent: Any, exists: Any, expected: JobsyncError | None, count: int
) -> None:
    """By all its ids; a look that fails says nothing about it."""
    stage = SqlStage(push=sent, exists=exists)
    messages = [NewMessage(id=f"id-{n}", value=n, max_attempts=4) for n in range(count)]
    if expected is None:
        assert await stage.backend.push(messages) == {}
    else:
        with pytest.raises(type(expected)) as raised:
            await stage.backend.push(messages)
        # A shared push raises an error of its own for each of those who share it.
        assert str(raised.value) == str(expected)
    assert len(stage.list_asked("push")) == 1
    looks = [[[each.id for each in messages]]] if sent is LOST else []
    assert stage.list_asked("exists") == looks


@pytest.mark.parametrize("how", ["push", "push_within"])
async def test_nothing_is_sent_for_no_message(how: str) -> None:
    """Nor for no receipt and no report; a wrong number is refused all the same."""
    stage = SqlStage()
    if how == "push":
        assert await stage.backend.push([]) == {}
    else:
        assert await stage.backend.push_within(object(), []) == {}
    assert await stage.backend.extend([], 5) == []
    with pytest.raises(Invalid, match="seconds"):
        await stage.backend.extend([], 0)
    await stage.backend.report_progress([])
    await stage.backend.clear_progress([])
    assert stage.asked == []


async def test_progress_of_each_message_is_sent() -> None:
    """All reports at once, and the ids of those that are over as a list."""
    stage = SqlStage()
    reports = [ProgressReport(Receipt(name, 1, "c"), 0.5, "half") for name in "ab"]
    await stage.backend.report_progress(reports)
    await stage.backend.clear_progress({"a": 1, "b": 2})
    assert stage.asked == [("_report_progress", reports), ("_clear_progress", ["a", "b"])]
    stage = SqlStage(extend=[[True, False]])
    receipts = [each.receipt for each in reports]
    assert await stage.backend.extend(receipts, 7.5) == [True, False]
    assert stage.asked == [("_extend", receipts, 7.5)]


ROWS: dict[str, tuple[Any, ...]] = {
    "a": ("a", '{"n": 1}', 3, 1, 7, 2.5, True, 5.0, "send"),
    "broken": ("broken", "{", 4, 1, 7, None, False, 6.0, ""),
    "impossible": ("impossible", "1", 5, 6, 7, None, False, 7.0, ""),
    "b": ("b", "2", 6, 0, 8, None, False, 8.0, ""),
}


@pytest.mark.parametrize("settled", [set[str](), LOST, AWAY, WRONG])
@pytest.mark.parametrize("names", [["a", "b"], [*ROWS], ["broken"], []])
async def test_what_is_unreadable_is_buried_and_hides_no_other(
    names: Sequence[str], settled: Any
) -> None:
    """With its own receipt and error, and reported; if that fails the next claim does it."""
    found = ClaimedRows([ROWS[name] for name in names], True, 4.0, 9.0, True)
    stage = SqlStage(claim=found, settle=settled)
    claimed = await stage.backend.claim(9, session="me", visibility=60.0)
    (request,) = stage.list_asked("claim")[0]
    receipts = {name: Receipt(name, ROWS[name][2], request.claim) for name in names}
    readable = {
        "a": Message(
            receipt=Receipt("a", 3, request.claim),
            value={"n": 1},
            attempt=2,
            max_attempts=7,
            timeout=2.5,
            is_suspect=True,
            enqueued=5.0,
            task="send",
        ),
        "b": Message(
            receipt=Receipt("b", 6, request.claim),
            value=2,
            attempt=6,
            max_attempts=8,
            timeout=None,
            is_suspect=False,
            enqueued=8.0,
        ),
    }
    messages = [readable[name] for name in names if name in readable]
    assert claimed == ClaimResult(messages, True, 4.0, 9.0, True)
    damaged = [name for name in names if name not in readable]
    buried = stage.list_asked("settle")
    assert len(buried) == (1 if damaged else 0)
    for (batch,) in buried:
        assert [(each.receipt, each.move) for each in batch] == [
            (receipts[name], "bury") for name in damaged
        ]
        assert all(f"message {each.receipt.id}" in each.error for each in batch)
    assert len(stage.told) == len(damaged)


@pytest.mark.parametrize(
    ("tasks", "named", "is_plain"),
    [
        (None, (), True),
        ([], (), False),
        ([""], (), True),
        (["b", "a", "b"], ("a", "b"), False),
        ({"b", "", "a"}, ("a", "b"), True),
    ],
)
@pytest.mark.parametrize("suspects", [False, True])
async def test_a_claim_asks_for_what_its_caller_wants(
    tasks: Any, named: tuple[str, ...], *, is_plain: bool, suspects: bool
) -> None:
    """By a nonce of its own; more than the limit is never asked for."""
    stage = SqlStage(claim=ClaimedRows([], suspects, None, 2.0, False))
    for _ in range(2):
        found = await stage.backend.claim(
            5, session="me", visibility=60.0, suspects=suspects, tasks=tasks, at_most=50
        )
        assert found == ClaimResult([], suspects, None, 2.0, False)
    requests = [request for (request,) in stage.list_asked("claim")]
    assert len({each.claim for each in requests}) == 2
    for each in requests:
        assert each == ClaimRequest(5, each.claim, "me", 60.0, suspects, named, is_plain)


@pytest.mark.parametrize(
    ("dues", "next"),
    [
        ((None, None), None),
        ((0.0, 3.0), 0.0),
        ((3.0, 0.0), 0.0),
        ((None, 5.0), 5.0),
        ((5.0, None), 5.0),
    ],
)
def test_the_next_change_is_the_earlier_of_both(
    dues: tuple[float | None, float | None], next: float | None
) -> None:
    """The end of a delay or a lapse; now counts, and none is none."""
    assert ClaimResult([], False, *dues, False).next == next
    for limit in (1.0, 4.0):
        rows = ClaimedRows([], True, dues[0], dues[1], True)
        due = limit if dues[0] is None else min(dues[0], limit)
        assert rows.limit_due(limit) == ClaimedRows([], True, due, dues[1], True, limit)


@pytest.mark.parametrize(
    ("move", "target", "is_returned"),
    [
        ("complete", "completed", False),
        ("cancel", "cancelled", False),
        ("retry", "waiting", False),
        ("bury", "dead", False),
        ("release", "waiting", True),
        ("snooze", "waiting", True),
    ],
)
def test_a_settlement_says_where_its_message_goes(
    move: Transition, target: str, *, is_returned: bool
) -> None:
    """And whether the delivery is no attempt: a failure is one, a return is none."""
    found = settlement(move)
    assert (found.target, found.is_returned) == (target, is_returned)
