"""Where messages stand in a queue: orders, groups and keys."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import msgspec
import pytest
from queue_locations import (
    PostgresQueues,
    QueueLocation,
    SqliteQueues,
    find_empty_location,
)

from jobsync import Components, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.core.messages import MessageState, Transition
from jobsync.queue.backend import (
    Message,
    MessageInfo,
    NewMessage,
    QueueBackend,
    QueuePart,
    Settlement,
)
from jobsync.queue.limits import QueueLimits
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.settings import QueueOrder
from jobsync.queue.single_message import ProgressReport, StoredResult
from jobsync.queue.sql.common import SqlBackend
from jobsync.queue.sql.placed_push import PlacedPush

ME, OTHER = "worker-1.a", "worker-2.b"
ENDS: Sequence[Transition] = ("complete", "cancel", "bury")
RETURNS: Sequence[Transition] = ("retry", "release", "snooze")


_GROUPS = "the names of pages are in the order of the producers' clocks: there are no groups"
_LIMITS = "no two claims are one after the other: there are no limits"
_PUSH = "another way to push, see tests/integration/queue/test_page_keys.py"
_SQL = "there are neither transactions nor notifications"
PAGES_DIFFER = {
    "test_a_group_has_messages_of_several_tasks": _GROUPS,
    "test_one_message_of_a_group_is_in_work_at_a_time_and_in_order": _GROUPS,
    "test_the_next_of_a_group_comes_when_the_head_is_finished": _GROUPS,
    "test_a_head_whose_worker_died_blocks_its_group_until_it_is_dead": _GROUPS,
    "test_a_delayed_head_blocks_its_group": _GROUPS,
    "test_a_group_is_used_again_after_it_was_empty": _GROUPS,
    "test_dead_letters_go_to_the_end_of_their_group": _GROUPS,
    "test_a_message_that_was_blocked_lets_none_pass_its_head": _GROUPS,
    "test_the_next_of_a_group_comes_when_its_head_is_taken_away": _GROUPS,
    "test_groups_of_queues_are_their_own": _GROUPS,
    "test_a_purge_ends_a_head_once": _GROUPS,
    "test_a_purge_leaves_no_group_without_a_head": _GROUPS,
    "test_the_limit_of_a_task_holds_for_all_its_messages": _LIMITS,
    "test_a_lost_reply_to_a_settlement_advances_a_group_once": _GROUPS,
    "test_who_has_not_seen_the_claims_settles_groups_and_others_together": _GROUPS,
    "test_a_batch_that_is_settled_in_part_is_in_doubt": _GROUPS,
    "test_groups_of_random_histories_are_never_overtaken": _GROUPS,
    "test_a_replaced_message_of_a_group_stays_in_its_place": _GROUPS,
    "test_what_is_shown_says_where_a_message_stands": _GROUPS,
    "test_all_ways_to_show_a_message_agree": _GROUPS,
    "test_several_messages_of_a_group_may_be_in_work": _GROUPS,
    "test_redriven_messages_of_a_group_keep_its_limit": _GROUPS,
    "test_a_lower_limit_of_groups_counts_those_in_work": _GROUPS,
    "test_as_many_follow_as_heads_of_a_group_end_together": _GROUPS,
    "test_whichever_head_is_taken_away_the_next_comes": _GROUPS,
    "test_a_rate_counts_on_after_its_clock_has_changed": _LIMITS,
    "test_a_transaction_in_doubt_reads_what_became_of_its_message": _SQL,
    "test_a_result_is_announced_to_those_who_wait_elsewhere": _SQL,
    "test_other_content_is_not_a_push_repeated": _PUSH,
    "test_what_replaces_a_push_in_doubt_is_handled": _PUSH,
    "test_no_more_messages_are_claimed_than_the_queue_allows": _LIMITS,
    "test_whoever_waits_for_a_limit_is_woken_when_there_is_room": _LIMITS,
    "test_limits_of_queues_are_their_own": _LIMITS,
    "test_a_full_queue_says_what_else_there_is": _LIMITS,
    "test_what_only_a_limit_holds_back_is_known": _LIMITS,
    "test_what_comes_back_may_be_held_back_by_a_limit": _LIMITS,
    "test_messages_are_claimed_at_the_rate_of_the_queue": _LIMITS,
    "test_both_limits_hold": _LIMITS,
    "test_no_more_messages_of_a_task_are_claimed_than_it_allows": _LIMITS,
    "test_claims_of_a_task_at_the_same_time_count_each_other": _LIMITS,
    "test_messages_of_a_task_are_claimed_at_its_rate": _LIMITS,
    "test_limits_of_tasks_hold_in_random_histories": _LIMITS,
    "test_who_pushes_a_key_again_finds_its_finished_message": _PUSH,
    "test_a_push_stays_in_doubt_if_nobody_can_say_who_holds_its_key": _PUSH,
    "test_what_others_do_meanwhile_makes_no_push_in_doubt_lie": _PUSH,
    "test_a_message_with_a_place_is_of_a_newer_format": _PUSH,
}
"""Tests of what only databases have, and why pages do not.

Besides, pages have ten priorities. Messages with different ones, or with keys, are pushed apart,
see `add`. And a lost request is sent again until its outcome is known.
"""


@pytest.fixture(params=["sqlite", "postgres", "memory", "s3"])
def empty_location(request: pytest.FixtureRequest, tmp_path: Path) -> QueueLocation:
    """An empty database or store."""
    name = request.function.__name__
    if request.param in {"memory", "s3"} and name in PAGES_DIFFER:
        pytest.skip(PAGES_DIFFER[name])
    return find_empty_location(request, tmp_path)


@pytest.fixture
async def location(empty_location: QueueLocation) -> AsyncIterator[QueueLocation]:
    """The same, closed after the test."""
    yield empty_location
    await empty_location.close()


@pytest.fixture
async def backend(location: QueueLocation) -> QueueBackend:
    """A backend in the usual order."""
    return await location.open("emails")


def new(value: Any, **options: Any) -> NewMessage:
    """Return a message whose id is its value."""
    return NewMessage(**{"id": f"id-{value}", "value": {"n": value}, "max_attempts": 4, **options})


async def push(backend: QueueBackend, *values: Any, **options: Any) -> None:
    """Push messages together."""
    await backend.push([new(value, **options) for value in values])


async def add(backend: QueueBackend, *new_messages: NewMessage) -> dict[str, str]:
    """Push messages together, or one after the other where they would be in different pages."""
    if not isinstance(backend, PagesBackend):
        return dict(await backend.push(new_messages))
    holders: dict[str, str] = {}
    for message in new_messages:
        holders |= await backend.push([message])
    return holders


async def claim(backend: QueueBackend, limit: int = 10, **options: Any) -> list[Message]:
    """Claim as `ME` for a minute by default."""
    claimed = await backend.claim(limit, **{"session": ME, "visibility": 60, **options})
    return claimed.messages


def values(messages: Sequence[Message]) -> list[Any]:
    """Return the values of messages."""
    return [message.value["n"] for message in messages]


async def settle(
    backend: QueueBackend, messages: Sequence[Message], move: Transition = "complete", **how: Any
) -> None:
    """Settle messages together; all must be accepted."""
    batch = [Settlement(receipt=each.receipt, move=move, **how) for each in messages]
    assert await backend.settle(batch) == [True] * len(messages)


async def drain(backend: QueueBackend, limit: int = 1, **options: Any) -> list[Any]:
    """Claim and complete until nothing is left; return the values in order."""
    found: list[Any] = []
    while messages := await claim(backend, limit, **options):
        found += values(messages)
        await settle(backend, messages)
    return found


PRIORITIES = [0, 3, -3, 3, 4, 0, -3, 5, -4]
ORDERED: dict[QueueOrder, list[int]] = {
    "fifo": [0, 5, 7, 4, 1, 3, 2, 6, 8],
    "lifo": [5, 0, 7, 4, 1, 3, 2, 6, 8],
    "priority": [7, 4, 1, 3, 0, 5, 2, 6, 8],
}
"""Without an order by priority, messages that have one come last: another process pushed them."""


MIXES = pytest.mark.parametrize("tasks", [("",), ("a", "", "b")], ids=["plain", "tasks"])
"""The tasks of messages, in turns; they are in one order."""


@MIXES
@pytest.mark.parametrize("order", ORDERED)
@pytest.mark.parametrize("limit", [1, 2, 4, 20])
async def test_messages_are_claimed_in_the_order_of_the_queue(
    location: QueueLocation, order: QueueOrder, limit: int, tasks: Sequence[str]
) -> None:
    """However many are claimed at once, and none is left out."""
    backend = await location.open("emails", order=order)
    is_wide = not isinstance(backend, PagesBackend)
    priorities = [20 * each if is_wide else each for each in PRIORITIES]
    await add(
        backend,
        *[new(n, priority=each, task=tasks[n % len(tasks)]) for n, each in enumerate(priorities)],
    )
    found = []
    while messages := await claim(backend, limit, tasks=tasks):
        found += values(messages)
    expected = ORDERED[order]
    if order != "priority" and is_wide:
        # One claim has its messages by their age.
        parts = [expected[at : at + limit] for at in range(0, len(expected), limit)]
        expected = [n for part in parts for n in sorted(part, reverse=order == "lifo")]
    assert found == expected


RANKS: dict[QueueOrder, Callable[[int, int], Any]] = {
    "fifo": lambda number, priority: (priority != 0, -priority, number),
    "lifo": lambda number, priority: (priority != 0, -priority, number if priority else -number),
    "priority": lambda number, priority: (-priority, number),
}
"""Where a message stands in each order, likewise."""


@pytest.mark.parametrize("order", RANKS)
async def test_each_task_has_messages_of_every_rank_in_one_order(
    location: QueueLocation, order: QueueOrder
) -> None:
    """One at a time, whichever task has the next one; a message without a task is like others."""
    backend = await location.open("emails", order=order)
    tasks = ("a", "", "b")
    ranked = [*enumerate(each for each in (-2, 3, 0, -1, 0, 4) for _ in tasks)]
    await add(backend, *[new(n, priority=each, task=tasks[n % 3]) for n, each in ranked])
    expected = [n for n, each in sorted(ranked, key=lambda pair: RANKS[order](*pair))]
    assert await drain(backend, tasks=tasks) == expected


@MIXES
@pytest.mark.parametrize("order", RANKS)
async def test_a_suspect_comes_alone_in_every_order(
    location: QueueLocation, order: QueueOrder, tasks: Sequence[str]
) -> None:
    """Others that have waited are claimed without it."""
    backend = await location.open("emails", order=order)
    await add(backend, *[new(n, task=task) for n, task in enumerate(tasks)])
    await claim(backend, tasks=tasks)
    await backend.end_claims({ME})
    await add(backend, *[new(10 + n, task=task, delay=5) for n, task in enumerate(tasks)])
    location.advance(10)
    found = await backend.claim(10, session=ME, visibility=60, tasks=tasks)
    assert sorted(values(found.messages)) == [10 + n for n in range(len(tasks))]
    assert found.suspects
    alone = [await claim(backend, 1, tasks=tasks, suspects=True) for _ in tasks]
    assert sorted(n for each in alone for n in values(each)) == [*range(len(tasks))]


PLACES: dict[str, dict[str, Any]] = {
    "ready": {},
    "high": {"priority": 3},
    "low": {"priority": -3},
    "delayed": {"delay": 5},
    "delayed and high": {"delay": 5, "priority": 3},
}


@MIXES
@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("order", RANKS)
async def test_who_has_found_nothing_finds_what_comes_later(
    location: QueueLocation, order: QueueOrder, options: dict[str, Any], tasks: Sequence[str]
) -> None:
    """Wherever it stands: an idle worker only looks whether there is something to claim."""
    backend = await location.open("emails", order=order)
    for number, task in enumerate(tasks):
        for _ in range(2):
            assert await claim(backend, tasks=tasks) == []
        await add(backend, new(number, task=task, **options))
        location.advance(10)
        assert values(await claim(backend, tasks=tasks)) == [number]


@pytest.mark.parametrize("order", RANKS)
async def test_each_message_of_a_claim_is_found_in_every_order(
    location: QueueLocation, order: QueueOrder
) -> None:
    """By its id, while it is claimed and when it is completed."""
    backend = await location.open("emails", order=order)
    await push(backend, *range(4))
    messages = await claim(backend)
    for state in ("claimed", "completed"):
        found = [await backend.get(each.id) for each in messages]
        assert [info and info.state for info in found] == [state] * 4
        await settle(backend, messages)


@pytest.mark.parametrize(
    "tasks", [("",), ("a", "", "b"), ("a",)], ids=["plain", "tasks", "one task"]
)
@pytest.mark.parametrize("move", RETURNS)
@pytest.mark.parametrize(
    ("order", "is_newest_first", "expected"),
    [
        ("fifo", True, [3, 2, 1, 0]),
        ("fifo", False, [0, 1, 2, 3]),
        ("lifo", True, [3, 2, 1, 0]),
        ("lifo", False, [3, 2, 1, 0]),
        ("priority", True, [3, 1, 2, 0]),
        ("priority", False, [3, 1, 2, 0]),
    ],
)
async def test_a_message_that_comes_back_stands_where_its_order_says(
    location: QueueLocation,
    order: QueueOrder,
    is_newest_first: bool,
    expected: list[int],
    move: Transition,
    tasks: Sequence[str],
) -> None:
    """By the end of its delay, or as new or as urgent as before."""
    backend = await location.open("emails", order=order)
    priorities = [-1, 0, 0, 5] if order == "priority" else [0] * 4
    tasked = [
        new(n, priority=each, task=tasks[n % len(tasks)]) for n, each in enumerate(priorities)
    ]
    await add(backend, *tasked)
    messages = await claim(backend, tasks=tasks)
    messages.sort(key=lambda each: each.id, reverse=is_newest_first)
    for number, message in enumerate(messages):
        await settle(backend, [message], move, delay=number)
    location.advance(10)
    if isinstance(backend, PagesBackend) and order == "fifo":
        # It is in the page in which it was pushed.
        expected = [0, 1, 2, 3]
    assert await drain(backend, tasks=tasks) == expected


@pytest.mark.parametrize("fate", ["bury", "cancel", "revoke", "revoke waiting"])
async def test_a_redriven_message_is_as_urgent_as_before(
    location: QueueLocation, fate: str
) -> None:
    """It stands where its priority says, not behind what was pushed since."""
    backend = await location.open("emails", order="priority")
    await add(backend, *(new(each, priority=each) for each in (-2, 0, 4)))
    messages = await claim(backend)
    if fate in {"bury", "cancel"}:
        await settle(backend, messages, cast("Transition", fate))
    else:
        if fate == "revoke waiting":
            await settle(backend, messages, "release")
        for message in messages:
            assert await backend.cancel(message.id) is not None
    await add(backend, *(new(each, priority=each) for each in (-3, -1, 1, 5)))
    assert await backend.redrive([message.id for message in messages]) == 3
    for message in messages:
        info = await backend.get(message.id)
        assert info is not None
        assert info.priority == message.value["n"]
    assert await drain(backend) == [5, 4, 1, 0, -1, -2, -3]


@MIXES
@pytest.mark.parametrize("loss", ["lost_replies", "lost_requests"])
@pytest.mark.parametrize("order", RANKS)
async def test_a_claim_is_in_order_or_unavailable_whichever_reply_is_lost(
    location: QueueLocation, order: QueueOrder, loss: str, tasks: Sequence[str]
) -> None:
    """It never leaves its caller in doubt, which would end a worker; and nothing is lost by it."""
    backend = await location.open("emails", order=order)
    priorities = [0, 3, -3, 0, 3, 5]
    expected: list[int] = []
    is_over = False
    # First without a loss.
    spared = -1
    while not is_over:
        await add(
            backend,
            *(
                new(n, priority=each, task=tasks[n % len(tasks)])
                for n, each in enumerate(priorities)
            ),
        )
        location.faults.spared = max(0, spared)
        setattr(location.faults, loss, int(spared >= 0))
        try:
            found = values(await claim(backend, tasks=tasks))
        except Unavailable:
            found = []
        expected = expected or found
        is_over = spared >= 0 and bool(getattr(location.faults, loss))
        location.faults.spared = location.faults.lost_replies = location.faults.lost_requests = 0
        left = values(await claim(backend, tasks=tasks))
        assert [found, left] in [[expected, []], [[], expected], [[], []]]
        assert await backend.purge(["claimed"]) == len(priorities)
        spared += 1
    assert spared > 1, "the claim has sent nothing"


@pytest.mark.parametrize("limits", [QueueLimits(), QueueLimits(max_concurrency=1)], ids=str)
async def test_a_group_has_messages_of_several_tasks(
    location: QueueLocation, limits: QueueLimits
) -> None:
    """In one order: one of a task that nobody knows blocks those after it, spending no attempt."""
    backend = await location.open("emails", limits=limits)
    for number, task in enumerate(["a", "", "b", "a"]):
        await push(backend, number, task=task, group="g")
    await push(backend, 4, task="a", group="h", key="k", delay=60)
    assert await drain(backend, tasks=["a", ""]) == [0, 1]
    assert await backend.count() == {"completed": 2, "waiting": 2, "blocked": 1}
    (found,) = [each for each in await backend.browse("waiting") if each.task == "b"]
    assert (found.value, found.deliveries, found.group) == ({"n": 2}, 0, "g")
    assert await drain(backend, tasks=["a", "b"]) == [2, 3]
    await push(backend, 5, task="b", key="k", replace=True)
    assert await drain(backend, tasks=["a", ""]) == []
    assert await drain(backend, tasks=["b"]) == [5]


async def test_one_message_of_a_group_is_in_work_at_a_time_and_in_order(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """The others are blocked, whoever claims and however many; other groups are not."""
    await push(backend, "a1", "a2", "a3", group="a")
    await push(backend, "b1", group="b")
    await push(backend, "plain")
    await push(backend, "a4", group="a")
    other = await location.open("emails")
    first = await claim(backend)
    assert values(first) == ["a1", "b1", "plain"]
    assert await claim(other, session=OTHER) == []
    assert await backend.count() == {"claimed": 3, "blocked": 3}
    await settle(backend, first)
    assert await drain(other, 10) == ["a2", "a3", "a4"]
    assert (await backend.count()).get("blocked", 0) == 0


@pytest.mark.parametrize("move", [*ENDS, *RETURNS])
async def test_the_next_of_a_group_comes_when_the_head_is_finished(
    location: QueueLocation, backend: QueueBackend, move: Transition
) -> None:
    """A head that comes back, at once or later, still blocks its group."""
    await push(backend, 1, 2, group="a")
    await settle(backend, await claim(backend), move, delay=0 if move in ENDS else 5)
    if move in ENDS:
        assert values(await claim(backend)) == [2]
        return
    assert await claim(backend) == []
    location.advance(10)
    messages = await claim(backend)
    assert values(messages) == [1]
    await settle(backend, messages)
    assert values(await claim(backend)) == [2]


async def test_a_head_whose_worker_died_blocks_its_group_until_it_is_dead(
    backend: QueueBackend,
) -> None:
    """It is a suspect first; when it has killed its last worker, the next one comes."""
    await push(backend, 1, 2, group="a", max_attempts=1)
    assert values(await claim(backend)) == [1]
    (ended,) = await backend.end_claims({ME})
    assert ended.state == "waiting"
    assert await claim(backend) == []
    assert values(await claim(backend, suspects=True)) == [1]
    (ended,) = await backend.end_claims({ME})
    assert ended.state == "dead"
    assert values(await claim(backend)) == [2]


async def test_a_delayed_head_blocks_its_group(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """And a delayed message behind it waits for both: its head and its own time."""
    await push(backend, 1, group="a", delay=10)
    await push(backend, 2, group="a", delay=1000)
    await push(backend, 3, group="a")
    assert await claim(backend) == []
    location.advance(20)
    await settle(backend, await claim(backend))
    assert await claim(backend) == []
    assert await backend.count() == {"completed": 1, "waiting": 1, "blocked": 1}
    location.advance(1000)
    assert await drain(backend) == [2, 3]


async def test_a_group_is_used_again_after_it_was_empty(backend: QueueBackend) -> None:
    """Its next message is a head at once."""
    for number in range(3):
        await push(backend, f"{number}-1", f"{number}-2", group="a")
        assert await drain(backend) == [f"{number}-1", f"{number}-2"]


async def test_dead_letters_go_to_the_end_of_their_group(backend: QueueBackend) -> None:
    """In their order, behind what is there."""
    await push(backend, 1, 2, 3, group="a")
    for _ in range(2):
        await settle(backend, await claim(backend), "bury", error="no")
    assert await backend.redrive() == 2
    assert await drain(backend) == [3, 1, 2]
    await push(backend, 4, 5, group="b")
    for _ in range(2):
        await settle(backend, await claim(backend), "bury", error="no")
    assert await backend.redrive() == 2
    assert (await backend.count())["blocked"] == 1
    assert await drain(backend) == [4, 5]


REMOVALS: dict[str, Callable[[QueueBackend], Awaitable[object]]] = {
    "purge": lambda backend: backend.purge(["blocked"]),
    "delete": lambda backend: backend.delete("id-2"),
    "cancel": lambda backend: backend.cancel("id-2"),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
async def test_a_message_that_was_blocked_lets_none_pass_its_head(
    backend: QueueBackend, remove: Callable[[QueueBackend], Awaitable[object]]
) -> None:
    """What comes later waits for the head, although the one in between is gone."""
    await push(backend, 1, 2, group="a")
    head = await claim(backend)
    await remove(backend)
    await push(backend, 3, 4, group="a")
    assert await claim(backend) == []
    await settle(backend, head)
    assert values(await claim(backend)) == [3]


@pytest.mark.parametrize("call", ["cancel", "delete"])
@pytest.mark.parametrize("state", ["ready", "claimed"])
async def test_the_next_of_a_group_comes_when_its_head_is_taken_away(
    backend: QueueBackend, call: str, state: str
) -> None:
    """A claimed message is cancelled, not deleted; a head that comes back is the last."""
    await push(backend, 1, 2, group="a")
    if state == "claimed":
        await claim(backend)
    await getattr(backend, call)("id-1")
    if (call, state) == ("delete", "claimed"):
        assert await claim(backend) == []
        return
    second = await claim(backend)
    assert values(second) == [2]
    assert await backend.redrive(["id-1"]) == (call == "cancel")
    assert await claim(backend) == []
    await settle(backend, second)
    assert values(await claim(backend)) == ([1] if call == "cancel" else [])


@pytest.mark.parametrize("most", [1, 3])
async def test_groups_of_queues_are_their_own(location: QueueLocation, most: int) -> None:
    """What ends in a group of one queue leaves that of another as it is."""
    limits = QueueLimits(group_concurrency=most)
    emails, reports = [await location.open(name, limits=limits) for name in ("emails", "reports")]
    for name, backend in (("emails", emails), ("reports", reports)):
        await push(backend, *[f"{name}-{n}" for n in range(most)], group="a")
    held = await claim(emails)
    await claim(reports)
    await push(reports, "late", group="a")
    heads = [await location.open_directory().find_head(each, "a") for each in ("emails", "reports")]
    assert [head and (head.queue, head.state) for head in heads] == [
        ("emails", "claimed"),
        ("reports", "claimed"),
    ]
    for message in held:
        await settle(emails, [message])
        await push(reports, f"after-{message.id}", group="a")
        assert await claim(reports) == []
    assert await location.open_directory().find_head("emails", "a") is None
    assert (await reports.count())["blocked"] == 1 + most
    await push(emails, "again", group="a")
    assert values(await claim(emails)) == ["again"]


async def test_a_purge_ends_a_head_once(backend: QueueBackend) -> None:
    """That of a claim of which it was settled before has let the next one come already."""
    await add(backend, *[new(f"a{n}", group="a") for n in range(4)], new("b0", group="b"))
    first, _ = await claim(backend)
    await settle(backend, [first])
    assert values(await claim(backend)) == ["a1"]
    assert await backend.purge(["claimed"]) == 2
    assert values(await claim(backend)) == ["a2"]
    assert await claim(backend) == []


@pytest.mark.parametrize("states", [["ready", "waiting"], ["claimed"], ["blocked"]])
async def test_a_purge_leaves_no_group_without_a_head(
    backend: QueueBackend, states: list[Any]
) -> None:
    """What is left of each group is handled, and what is pushed to it later."""
    await push(backend, "a1", "a2", group="a")
    (held,) = await claim(backend)
    await push(backend, "b1", "b2", group="b")
    await push(backend, "c1", "c2", group="c", delay=60)
    purged = await backend.purge(states)
    assert purged == {"ready": 2, "claimed": 1, "blocked": 3}[states[0]]
    if states != ["claimed"]:
        await settle(backend, [held])
    await push(backend, "a3", "b3", group="a")
    left = await drain(backend)
    expected = {
        "ready": ["a2", "b2", "a3", "b3"],
        "claimed": ["a2", "b1", "b2", "a3", "b3"],
        "blocked": ["b1", "a3", "b3"],
    }[states[0]]
    assert sorted(left) == sorted(expected)


async def test_a_lost_reply_to_a_settlement_advances_a_group_once(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """It is sent again, and its answer is the same."""
    await push(backend, 1, 2, 3, group="a")
    for expected in (1, 2, 3):
        messages = await claim(backend)
        assert values(messages) == [expected]
        location.faults.lost_replies = 1
        await settle(backend, messages)
        assert await backend.settle([Settlement(receipt=messages[0].receipt, move="complete")]) == [
            True
        ]
    assert await claim(backend) == []


@pytest.mark.parametrize("move", ["complete", "bury"])
async def test_who_has_not_seen_the_claims_settles_groups_and_others_together(
    location: QueueLocation, backend: QueueBackend, move: Transition
) -> None:
    """All are accepted, and the next one of the group comes; repeated, the answer is the same."""
    await push(backend, "plain")
    claimed = await claim(backend)
    await push(backend, 1, 2, group="a")
    claimed += await claim(backend)
    stranger = await location.open("emails")
    await settle(stranger, claimed, move)
    await settle(stranger, claimed, move)
    assert await drain(backend) == [2]


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("the database", "it is refused"),
        Misconfigured("url", "postgresql://", "may not write", "grant it"),
    ],
    ids=["unavailable", "misconfigured"],
)
@pytest.mark.parametrize("second", ["a group", "no result"])
async def test_a_batch_that_is_settled_in_part_is_in_doubt(
    location: QueueLocation,
    backend: QueueBackend,
    monkeypatch: pytest.MonkeyPatch,
    second: str,
    error: Exception,
) -> None:
    """The first claim is settled, and that with a group or without a result is not."""
    await push(backend, "plain")
    claimed = await claim(backend)
    await push(backend, 1, 2, group="a" if second == "a group" else None)
    claimed += await claim(backend, 1)
    stranger = cast("SqlBackend", await location.open("emails"))
    if not hasattr(stranger, "_settle_groups"):
        pytest.skip("on SQLite one transaction settles all of them")

    async def refuse(_: object) -> None:
        raise error

    name = "_settle_groups" if second == "a group" else "_settle_plain"
    monkeypatch.setattr(stranger, name, refuse)
    first, other = [Settlement(receipt=each.receipt, move="complete") for each in claimed]
    if second == "no result":
        first = msgspec.structs.replace(first, result=StoredResult("7"))
        other = msgspec.structs.replace(other, move="bury", error="no")
    with pytest.raises(OutcomeUnknown):
        await stranger._settle([first, other])
    left: MessageState = "blocked" if second == "a group" else "ready"
    assert await backend.count() == {"completed": 1, "claimed": 1, left: 1}


async def remove(backend: QueueBackend, number: int, claimed: Sequence[int]) -> None:
    """Delete a message, or cancel it if it is claimed or its number is even."""
    name = f"id-{number}"
    if number % 2 == 0:
        assert await backend.cancel(name) is not None
        return
    is_claimed = number in claimed
    assert await backend.delete(name) == ("claimed" if is_claimed else "deleted")
    if is_claimed:
        assert await backend.cancel(name) is not None


async def test_groups_of_random_histories_are_never_overtaken(location: QueueLocation) -> None:
    """A model: what each group has handled is what was pushed to it, in order, each once.

    Except for what somebody has cancelled or deleted meanwhile, wherever it stood.
    """
    randomness = random.Random(7)
    backends = [await location.open("emails", order=order) for order in ("fifo", "lifo")]
    pushed: dict[str, list[int]] = {}
    handled: dict[str, list[int]] = {}
    flying: list[tuple[Message, QueueBackend]] = []
    left: dict[int, str] = {}
    number = 0
    for _ in range(200):
        backend = randomness.choice(backends)
        assert len({left[each.value["n"]] for each, _ in flying}) == len(flying)
        match randomness.choice(["push", "claim", "settle", "settle", "remove"]):
            case "push":
                names = [randomness.choice("abc") for _ in range(randomness.randint(1, 4))]
                batch = []
                for name in names:
                    number += 1
                    pushed.setdefault(name, []).append(number)
                    left[number] = name
                    batch.append(new(number, group=name))
                await backend.push(batch)
            case "claim":
                messages = await claim(backend, randomness.randint(1, 4))
                flying += [(each, backend) for each in messages]
            case "settle" if flying:
                message, owner = flying.pop(randomness.randrange(len(flying)))
                move = randomness.choice([*ENDS, *RETURNS])
                await settle(owner, [message], move)
                if move in ENDS:
                    n = message.value["n"]
                    handled.setdefault(left.pop(n), []).append(n)
            case "remove" if left:
                n = randomness.choice([*left])
                await remove(backend, n, [each.value["n"] for each, _ in flying])
                pushed[left.pop(n)].remove(n)
                flying = [(each, owner) for each, owner in flying if each.value["n"] != n]
    for message, owner in flying:
        await settle(owner, [message], "release")
    for n in await drain(backends[0]):
        handled.setdefault(left.pop(n), []).append(n)
    assert handled == {name: numbers for name, numbers in pushed.items() if numbers}
    assert not left


class KeyModel:
    """Who holds a key, as the documentation says, and what each message contains."""

    def __init__(self) -> None:
        self.now = 0.0
        self.holder = ""
        self.until: float | None = None
        self.contents: dict[str, int] = {}
        """Of the messages that are not finished."""
        self.claimed: dict[str, Message] = {}

    def push(self, number: int, ttl: float | None, *, replaces: bool) -> dict[str, str]:
        """Return what a push must return."""
        is_held = self.holder in self.contents if self.until is None else self.until > self.now
        is_free = self.holder in self.contents and self.holder not in self.claimed
        if is_held and not replaces:
            return {f"id-{number}": self.holder}
        if not (is_held and is_free):
            self.holder = f"id-{number}"
        self.contents[self.holder] = number
        self.until = None if ttl is None else self.now + ttl
        return {} if self.holder == f"id-{number}" else {f"id-{number}": self.holder}


async def test_keys_of_random_histories_are_held_as_long_as_promised(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """With and without a time, replaced or not, whatever becomes of the messages."""
    randomness, model = random.Random(11), KeyModel()
    for number in range(150):
        match randomness.choice(["push", "push", "claim", "settle", "wait"]):
            case "push":
                ttl, replaces = randomness.choice([None, 1000.0]), randomness.random() < 0.5
                message = new(number, key="k", key_ttl=ttl, replace=replaces)
                assert await backend.push([message]) == model.push(number, ttl, replaces=replaces)
            case "claim":
                for each in await claim(backend, 1, visibility=40_000):
                    assert model.contents[each.id] == each.value["n"]
                    model.claimed[each.id] = each
            case "settle" if model.claimed:
                name, each = model.claimed.popitem()
                move = randomness.choice([*ENDS, *RETURNS])
                await settle(backend, [each], move)
                if move in ENDS:
                    del model.contents[name]
            case "wait":
                location.advance(600)
                model.now += 600


async def test_a_key_is_held_while_its_message_is_pending(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Ready, claimed, waiting or suspect: who pushes again is told which message holds the key."""
    assert await backend.push([new(1, key="k")]) == {}
    assert await add(backend, new(2, key="k"), new("else", key="other")) == {"id-2": "id-1"}
    first = [each for each in await claim(backend) if each.id == "id-1"]
    assert await backend.push([new(3, key="k")]) == {"id-3": "id-1"}
    await settle(backend, first, "retry", delay=60)
    assert await backend.push([new(4, key="k")]) == {"id-4": "id-1"}
    location.advance(100)
    (message,) = await claim(backend)
    await settle(backend, [message])
    assert await backend.push([new(5, key="k")]) == {}
    assert await drain(backend) == [5]


@pytest.mark.parametrize("move", ENDS)
async def test_a_key_is_free_when_its_message_is_finished(
    backend: QueueBackend, move: Transition
) -> None:
    """However it ended; the message of the next use holds it again."""
    for number in range(3):
        assert await backend.push([new(number, key="k")]) == {}
        assert await backend.push([new(f"{number}b", key="k")]) == {f"id-{number}b": f"id-{number}"}
        await settle(backend, await claim(backend), move)


async def test_a_key_is_held_for_its_time_whatever_becomes_of_the_message(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """After that it is free, even if its message is pending."""
    assert await backend.push([new(1, key="k", key_ttl=3600.0)]) == {}
    await settle(backend, await claim(backend))
    assert await backend.push([new(2, key="k")]) == {"id-2": "id-1"}
    location.advance(3601)
    assert await backend.push([new(3, key="k", key_ttl=10.0)]) == {}
    location.advance(11)
    assert await backend.push([new(4, key="k")]) == {}
    assert await drain(backend) == [3, 4]


async def test_keys_of_queues_are_their_own(location: QueueLocation) -> None:
    """The same key may be held in each queue, and a group of the same name blocks no other."""
    emails, reports = await location.open("emails"), await location.open("reports")
    group = None if isinstance(emails, PagesBackend) else "a"
    for backend, number in ((emails, 1), (reports, 2)):
        assert await backend.push([new(number, key="k", group=group)]) == {}
        await claim(backend)


async def test_a_message_is_replaced_until_it_is_claimed(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """The one that holds the key has the new content and the new delay, and keeps its id."""
    assert await backend.push([new(1, key="k", delay=50)]) == {}
    assert await backend.push([new(2, key="k", delay=70, replace=True)]) == {"id-2": "id-1"}
    location.advance(60)
    assert await claim(backend) == []
    location.advance(20)
    (message,) = await claim(backend)
    assert (message.id, message.value["n"]) == ("id-1", 2)
    assert await backend.push([new(3, key="k", replace=True)]) == {}
    assert await backend.push([new(4, key="k")]) == {"id-4": "id-3"}
    await settle(backend, [message])
    assert await backend.push([new(5, key="k")]) == {"id-5": "id-3"}
    assert await drain(backend) == [3]


PLACED: dict[str, dict[str, Any]] = {
    "plain": {},
    "priority": {"priority": 3},
    "key": {"key": "k"},
    "replacement": {"key": "k", "replace": True},
    "group": {"group": "a"},
    "all": {"group": "a", "priority": 3, "key": "k"},
}


@pytest.mark.parametrize("task", ["", "send"])
@pytest.mark.parametrize("time", ["at", "delay"])
@pytest.mark.parametrize("place", PLACED)
async def test_a_message_with_a_place_is_delivered_as_it_was_pushed(
    location: QueueLocation, backend: QueueBackend, place: str, time: str, task: str
) -> None:
    """Not before its time, with its own timeout, attempts and task."""
    if "group" in PLACED[place] and isinstance(backend, PagesBackend):
        pytest.skip(_GROUPS)
    if place == "replacement":
        await push(backend, 1, key="k", timeout=9.0, max_attempts=2)
    now = Components.system().clock.wall().seconds
    when = {"at": now + 100} if time == "at" else {"delay": 100.0}
    options = {"timeout": 7.5, "max_attempts": 3, "task": task}
    await backend.push([new(2, **PLACED[place], **when, **options)])
    wanted: dict[str, Any] = {"tasks": ["", "send"]}
    claimed = await backend.claim(10, session=ME, visibility=60, **wanted)
    assert claimed.messages == []
    assert claimed.due == pytest.approx(100, abs=30)
    location.advance(60)
    assert await claim(backend, **wanted) == []
    location.advance(70)
    (message,) = await claim(backend, **wanted)
    assert message.id == ("id-1" if place == "replacement" else "id-2")
    assert (message.value, message.attempt, message.is_suspect) == ({"n": 2}, 1, False)
    assert {name: getattr(message, name) for name in options} == options


@pytest.mark.parametrize("place", PLACED)
async def test_who_has_lost_a_message_leaves_no_result_and_no_error(
    location: QueueLocation, backend: QueueBackend, place: str
) -> None:
    """Only what the one returns who completes it is kept."""
    if "group" in PLACED[place] and isinstance(backend, PagesBackend):
        pytest.skip(_GROUPS)
    await push(backend, 1, **PLACED[place])
    (lost,) = await claim(backend)
    await backend.end_claims([ME])
    (taken,) = await claim(backend, session=OTHER, suspects=True)
    late = Settlement(
        receipt=lost.receipt, move="complete", result=StoredResult('"late"'), error="late"
    )
    assert await backend.settle([late]) == [False]
    await settle(backend, [taken])
    info = await backend.get("id-1")
    assert info is not None
    assert (info.state, info.result, info.result_problem) == ("completed", None, "")
    assert [each.error for each in info.errors if "late" in each.error] == []


@pytest.mark.parametrize("place", PLACED)
async def test_a_message_may_be_completed_with_an_error(backend: QueueBackend, place: str) -> None:
    """It is kept, also if others of the batch have none."""
    if "group" in PLACED[place] and isinstance(backend, PagesBackend):
        pytest.skip(_GROUPS)
    await push(backend, 1, **PLACED[place])
    await push(backend, 2)
    first, second = await claim(backend)
    assert await backend.settle(
        [
            Settlement(receipt=first.receipt, move="complete", error="almost"),
            Settlement(receipt=second.receipt, move="complete"),
        ]
    ) == [True, True]
    info = await backend.get(first.id)
    assert info is not None
    assert info.state == "completed"
    assert [(each.error, each.attempt, each.session) for each in info.errors] == [("almost", 1, ME)]
    info = await backend.get(second.id)
    assert info is not None
    assert (info.state, info.errors) == ("completed", ())


async def test_a_replaced_message_has_all_its_attempts(backend: QueueBackend) -> None:
    """What the content before has spent does not count, however few the new one has."""
    await push(backend, 1, key="k")
    await settle(backend, await claim(backend), "retry", error="failed")
    renewed = new(2, key="k", replace=True, max_attempts=1)
    assert await backend.push([renewed]) == {"id-2": "id-1"}
    (message,) = await claim(backend)
    assert (message.value["n"], message.attempt, message.max_attempts) == (2, 1, 1)


@pytest.mark.parametrize("replaces", [False, True])
async def test_the_time_of_a_key_counts_from_its_push_whatever_the_delay(
    location: QueueLocation, backend: QueueBackend, *, replaces: bool
) -> None:
    """Of the first push, and of one that replaces it."""
    if replaces:
        assert await backend.push([new(1, key="k", key_ttl=5000, delay=60)]) == {}
    pushed = new(2, key="k", key_ttl=500, delay=400, replace=replaces)
    assert await backend.push([pushed]) == ({"id-2": "id-1"} if replaces else {})
    location.advance(450)
    assert await backend.push([new(3, key="k")]) != {}
    location.advance(100)
    assert await backend.push([new(4, key="k")]) == {}


async def test_a_replaced_message_of_a_group_stays_in_its_place(backend: QueueBackend) -> None:
    """A blocked one stays blocked."""
    await push(backend, 1, group="a")
    assert await backend.push([new(2, group="a", key="k")]) == {}
    assert await backend.push([new(3, group="a", key="k", replace=True)]) == {"id-3": "id-2"}
    assert (await backend.count())["blocked"] == 1
    # Older code still leaves it alone.
    assert await backend.push([new(4, key="k", replace=True)]) == {"id-4": "id-2"}
    (blocked,) = await backend.browse("blocked")
    assert (blocked.group, blocked.format) == ("a", 2)
    assert await drain(backend) == [1, 4]


async def refuse(*_: object) -> None:
    """Fail as a database that cannot be reached."""
    raise Unavailable("the database", "it is refused")


@pytest.mark.parametrize("is_request_lost", [True, False])
async def test_who_pushes_a_key_again_in_doubt_pushes_nothing_twice(
    location: QueueLocation, backend: QueueBackend, *, is_request_lost: bool
) -> None:
    """A lost reply is found out; after a lost request the caller pushes again."""
    heals = isinstance(backend, PagesBackend)
    if is_request_lost and heals:
        location.faults.lost_requests = 1
        assert await backend.push([new(1, key="k")]) == {}
    elif is_request_lost:
        location.faults.lost_requests = 1
        with pytest.raises(OutcomeUnknown):
            await backend.push([new(1, key="k")])
    else:
        location.faults.lost_replies = 1
        assert await backend.push([new(1, key="k")]) == {}
    again = await backend.push([new(2, key="k")])
    assert again == ({} if is_request_lost and not heals else {"id-2": "id-1"})
    assert len(await drain(backend)) == 1


async def finish_in_doubt(
    location: QueueLocation,
    backend: QueueBackend,
    monkeypatch: pytest.MonkeyPatch,
    move: Transition | Literal["cancel it from outside"] = "complete",
) -> QueueBackend:
    """Push a message whose outcome is unknown, and finish it; return who has finished it."""

    async def finds_out_nothing(*_: object) -> None:
        return None

    location.faults.lost_replies = 1
    monkeypatch.setattr(PlacedPush, "_look_up", finds_out_nothing)
    with pytest.raises(OutcomeUnknown):
        await backend.push([new(1, key="k")])
    other = await location.open("emails")
    if move == "cancel it from outside":
        assert await other.cancel("id-1") is not None
    else:
        await settle(other, await claim(other), move)
    return other


@pytest.mark.parametrize("move", [*ENDS, "cancel it from outside"])
async def test_who_pushes_a_key_again_finds_its_finished_message(
    location: QueueLocation,
    backend: QueueBackend,
    monkeypatch: pytest.MonkeyPatch,
    move: Transition,
) -> None:
    """The first push has arrived unnoticed, and its message was finished before the others."""
    other = await finish_in_doubt(location, backend, monkeypatch, move)
    repeated = msgspec.structs.replace(new(1, key="k"), id="id-2")
    # Who asks meanwhile learns nothing, and is no reason to forget the doubt.
    placed_push: Any = cast("SqlBackend", backend)._placed_push
    for name in ("_exists", "_place"):
        with monkeypatch.context() as patch:
            patch.setattr(placed_push, name, refuse)
            with pytest.raises(Unavailable):
                await backend.push([msgspec.structs.replace(repeated, id="id-0"), new(9)])
    pushed = await backend.push([repeated, new(3, key="l")])
    assert pushed == {"id-2": "id-1"}
    assert await drain(other) == [3]
    assert await backend.push([new(4, key="k")]) == {}
    assert await drain(other) == [4]
    # If nothing is left to push, there is no request that could fail.
    location.faults.lost_replies = 1
    with pytest.raises(OutcomeUnknown):
        await backend.push([new(5, key="m")])
    monkeypatch.setattr(placed_push, "_place", refuse)
    again = msgspec.structs.replace(new(5, key="m"), id="id-6")
    assert await backend.push([again]) == {"id-6": "id-5"}


@pytest.mark.parametrize("number", [1, 2])
async def test_what_replaces_a_push_in_doubt_is_handled(
    location: QueueLocation, backend: QueueBackend, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Even if its content is that of the first, which has arrived and is finished."""
    other = await finish_in_doubt(location, backend, monkeypatch)
    replacing = msgspec.structs.replace(new(number, key="k", replace=True), id="id-2")
    assert await backend.push([replacing]) == {}
    assert await drain(other) == [number]


async def test_other_content_is_not_a_push_repeated(
    location: QueueLocation, backend: QueueBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push in doubt has arrived and is finished: another message with its key is added."""
    other = await finish_in_doubt(location, backend, monkeypatch)
    assert await backend.push([new(2, key="k")]) == {}
    assert await drain(other) == [2]


async def test_a_lost_reply_says_who_holds_the_keys(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Of a batch, some were added and others not; another queue has the same keys."""
    await backend.push([new(1, key="one")])
    other = await location.open("another")
    names = iter("abcd")

    async def hold_in_another_queue() -> None:
        for key in ("one", "two"):
            await add(other, new(next(names), key=key))

    await hold_in_another_queue()
    location.faults.meanwhile = hold_in_another_queue
    location.faults.lost_replies = 1
    assert await add(backend, new(2, key="one"), new(3, key="two")) == {"id-2": "id-1"}
    assert await drain(backend) == [1, 3]


async def test_a_push_stays_in_doubt_if_nobody_can_say_who_holds_its_key(
    location: QueueLocation, backend: QueueBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not reported as refused: its message is there."""
    monkeypatch.setattr(cast("SqlBackend", backend)._placed_push, "_find_holders", refuse)
    location.faults.lost_replies = 1
    with pytest.raises(OutcomeUnknown):
        await backend.push([new(1, key="k")])
    assert await drain(backend) == [1]


@pytest.mark.parametrize("is_key_removed", [True, False])
async def test_what_others_do_meanwhile_makes_no_push_in_doubt_lie(
    location: QueueLocation,
    backend: QueueBackend,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_key_removed: bool,
) -> None:
    """Who was added is not taken for a later holder of its key, nor who was not for added."""

    async def find(keys: Sequence[str]) -> Any:
        assert await drain(backend) == [1, 3]
        if is_key_removed:
            await backend.forget_keys(after="", limit=10)
        else:
            await push(backend, 4, key="two")
        return await was(keys)

    placed_push = cast("SqlBackend", backend)._placed_push
    was = placed_push._find_holders
    monkeypatch.setattr(placed_push, "_find_holders", find)
    await backend.push([new(1, key="one")])
    location.faults.lost_replies = 1
    batch = [new(2, key="one"), new(3, key="two")]
    if is_key_removed:
        with pytest.raises(OutcomeUnknown):
            await backend.push(batch)
    else:
        assert await backend.push(batch) == {"id-2": "id-1"}


async def test_keys_that_nobody_holds_are_removed(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A part at a time, in order; those that are held stay held."""
    for number in range(5):
        await backend.push([new(number, key=f"key-{number}")])
    await backend.push([new("timed", key="timed", key_ttl=100.0)])
    messages = [message for _ in range(6) for message in await claim(backend, 1)]
    gone = [each for each in messages if each.id in {"id-0", "id-3", "id-timed"}]
    await settle(backend, gone)
    seen, last = [], ""
    while not (found := await backend.forget_keys(after=last, limit=2)).is_end:
        last = found.last
        seen.append(found.removed)
    assert (sum(seen) + found.removed, len(seen)) == (2, 3)
    assert await backend.push([new("again", key="key-1")]) == {"id-again": "id-1"}
    assert await backend.push([new("late", key="timed")]) == {"id-late": "id-timed"}
    # On S3 they are looked at once a day.
    location.advance(100_000)
    assert (await backend.forget_keys(after="", limit=10)).removed == 1


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_keys_of_messages_that_are_claimed_together_stay_held(
    backend: QueueBackend, count: int
) -> None:
    """Those of the first and of the last of a claim, too, until each is settled."""
    names = [f"key-{number}" for number in range(count)]
    for name in names:
        await backend.push([new(name, key=name)])
    messages: list[Message] = []
    while len(messages) < count:
        messages += await claim(backend, count)
    assert (await backend.forget_keys(after="", limit=10)).removed == 0
    for name in names:
        assert await backend.push([new(f"again-{name}", key=name)]) == {
            f"id-again-{name}": f"id-{name}"
        }
    await settle(backend, messages)
    for name in names:
        assert await backend.push([new(f"again-{name}", key=name)]) == {}


async def test_a_message_with_a_place_is_of_a_newer_format(location: QueueLocation) -> None:
    """So that older code leaves it alone, also while it is claimed."""
    backend = await location.open("emails", Components.system(), "priority")
    await backend.push([new(1, priority=3), new(2, group="a"), new(3), new(4, key="k")])
    formats = {each.id: each.format for each in await backend.browse("ready")}
    assert formats == {"id-1": 2, "id-2": 2, "id-3": 1, "id-4": 1}
    await claim(backend)
    assert {each.format for each in await backend.browse("claimed")} == {2}


async def test_what_is_shown_says_where_a_message_stands(location: QueueLocation) -> None:
    """In every state; and which message blocks a group."""
    backend = await location.open("emails", Components.system(), "priority")
    await backend.push([new(n, priority=7, group="a") for n in range(4)])
    directory = location.open_directory()
    head = await directory.find_head("emails", "a")
    assert head is not None
    assert (head.id, head.state) == ("id-0", "ready")
    messages = await claim(backend)
    head = await directory.find_head("emails", "a")
    assert head is not None
    assert (head.id, head.state) == ("id-0", "claimed")
    await settle(backend, messages)
    await settle(backend, await claim(backend), "bury", error="no")
    await settle(backend, await claim(backend), "retry", delay=50)
    states = {}
    for state in ("completed", "dead", "waiting", "blocked"):
        (info,) = await backend.browse(state)
        states[info.id] = (info.state, info.priority, info.group)
    assert states == {
        "id-0": ("completed", 7, "a"),
        "id-1": ("dead", 7, "a"),
        "id-2": ("waiting", 7, "a"),
        "id-3": ("blocked", 7, "a"),
    }
    assert await directory.find_head("emails", "b") is None


SHOWN: dict[MessageState, dict[str, Any]] = {
    "waiting": {"attempts": 1, "deliveries": 1, "due": 50.0, "errors": [("no", 1, ME)]},
    "claimed": {
        "attempts": 1,
        "deliveries": 1,
        "session": ME,
        "due": 60.0,
        "claimed": 0.0,
        "progress": 0.5,
        "progress_note": "half",
        "progress_at": 0.0,
    },
    "completed": {
        "attempts": 1,
        "deliveries": 1,
        "value": None,
        "session": ME,
        "finished": 0.0,
        "result": [5],
        "result_problem": "why",
    },
    "dead": {
        "attempts": 1,
        "deliveries": 1,
        "session": ME,
        "finished": 0.0,
        "errors": [("no", 1, ME)],
    },
    "ready": {},
    "cancelled": {"finished": 0.0, "errors": [("it was cancelled from outside", 0, "")]},
    "blocked": {"group": "of ready"},
}
"""What is shown of a message in each state, besides what was pushed. Times count from now."""

TIMES = {"enqueued", "due", "claimed", "finished", "seen", "progress_at"}
ALONE = {"progress": None, "progress_note": "", "progress_at": None, "result": None}
"""What is shown only of a message that is found by its id, in no listing."""


def describe(info: MessageInfo, now: float) -> dict[str, Any]:
    """Return what is shown of a message, but for its cursor; times count from now."""
    found = {name: getattr(info, name) for name in info.__struct_fields__ if name != "cursor"}
    for name in TIMES:
        found[name] = None if found[name] is None else pytest.approx(found[name] - now, abs=25)
    found["errors"] = [(each.error, each.attempt, each.session) for each in info.errors]
    return found


@pytest.mark.parametrize("task", ["", "send"])
async def test_all_ways_to_show_a_message_agree(
    location: QueueLocation, backend: QueueBackend, task: str
) -> None:
    """By its id, in the listing of its state, and in the directory: with each of its facts."""
    options: dict[str, Any] = {"priority": 3, "task": task, "max_attempts": 7}
    first: list[MessageState] = ["waiting", "claimed", "completed", "dead"]
    await backend.push([new(state, group=f"of {state}", **options) for state in first])
    taken = {each.value["n"]: each.receipt for each in await claim(backend, tasks=[task])}
    result = StoredResult("[5]", "why")
    assert (
        await backend.settle(
            [
                Settlement(receipt=taken["waiting"], move="retry", delay=50, error="no"),
                Settlement(receipt=taken["completed"], move="complete", result=result),
                Settlement(receipt=taken["dead"], move="bury", error="no"),
            ]
        )
        == [True] * 3
    )
    await backend.report_progress(
        [ProgressReport(receipt=taken["claimed"], progress=0.5, note="half")]
    )
    for state, name in (("ready", "ready"), ("cancelled", "cancelled"), ("blocked", "ready")):
        await push(backend, state, group=f"of {name}", **options)
    assert await backend.cancel("id-cancelled") is not None
    now, directory = Components.system().clock.wall().seconds, location.open_directory()
    parts: list[QueuePart] = ["queue", "dead"]
    listed = {
        each.id: each
        for part in parts
        for each in await directory.list("emails", part, after="", limit=100)
    }
    for state, facts in SHOWN.items():
        name = f"id-{state}"
        expected = {
            **dict.fromkeys(("due", "claimed", "finished")),
            "queue": "emails",
            "id": name,
            "state": state,
            "value": {"n": state},
            "attempts": 0,
            "deliveries": 0,
            "max_attempts": 7,
            "errors": [],
            "session": "",
            "is_suspect": False,
            "enqueued": 0.0,
            "seen": 0.0,
            "is_readable": True,
            "format": 3 if task else 2,
            "priority": 3,
            "group": f"of {state}",
            "task": task,
            **ALONE,
            "result_problem": "",
            **facts,
        }
        bare = {**expected, **ALONE, "result_problem": ""}
        (browsed,) = await backend.browse(state)
        assert describe(browsed, now) == bare
        alone = await backend.get(name)
        assert alone is not None
        assert describe(alone, now) == expected
        (found,) = await directory.find([name])
        assert describe(found, now) == expected
        if state not in {"completed", "cancelled"}:
            assert describe(listed.pop(name), now) == bare
        head = await directory.find_head("emails", f"of {state}")
        if state in {"ready", "waiting", "claimed"}:
            assert head is not None
            assert describe(head, now) == bare
        else:
            assert head is None
        assert await directory.find_head("letters", f"of {state}") is None
    assert listed == {}


async def test_a_directory_lists_dead_letters_by_id_whenever_they_died(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """So that no page leaves any out."""
    await push(backend, 1, 2, 3)
    messages = {each.value["n"]: each for each in await claim(backend)}
    for number in (3, 1, 2):
        await settle(backend, [messages[number]], "bury", error="no")
    directory, found = location.open_directory(), list[str]()
    for _ in range(3):
        after = found[-1] if found else ""
        found += [each.id for each in await directory.list("emails", "dead", after=after, limit=1)]
    assert found == ["id-1", "id-2", "id-3"]


class LimitMessages(Protocol):
    """Returns limits of the messages of task `send`, which are all that a queue has."""

    def __call__(self, **limits: Any) -> QueueLimits: ...


def limit_queue(**limits: Any) -> QueueLimits:
    """Limit all messages of a queue."""
    return QueueLimits(**limits)


def limit_task(**limits: Any) -> QueueLimits:
    """Limit one task of a queue."""
    return QueueLimits(tasks={"send": QueueLimits(**limits)})


OF_QUEUE_OR_TASK = pytest.mark.parametrize("limit", [limit_queue, limit_task])


@pytest.mark.parametrize("most", [1, 3])
async def test_no_more_messages_are_claimed_than_the_queue_allows(
    location: QueueLocation, most: int
) -> None:
    """By all processes together; a slot is free when a message is settled or its worker is dead."""
    limits = QueueLimits(max_concurrency=most)
    mine, other = [await location.open("emails", limits=limits) for _ in range(2)]
    await push(mine, *range(10))
    first = await claim(mine, 2)
    found = await other.claim(5, session=OTHER, visibility=60)
    second = found.messages
    assert len(first) + len(second) == most
    assert not found.more
    assert await claim(mine) == []
    for move in ("complete", "retry", "bury"):
        await settle(mine, first[:1], move)
        first = [*first[1:], *await claim(mine, 1)]
        assert len(first) + len(second) == most
        assert await claim(other) == []
    await mine.end_claims({ME, OTHER})
    suspects = await mine.claim(5, session=ME, visibility=60, suspects=True)
    assert len(suspects.messages) == most
    assert await claim(other) == []


@OF_QUEUE_OR_TASK
@pytest.mark.parametrize("end", ["complete", "retry", "bury", "cancel", "lapse"])
async def test_whoever_waits_for_a_limit_is_woken_when_there_is_room(
    location: QueueLocation, monkeypatch: pytest.MonkeyPatch, end: str, limit: LimitMessages
) -> None:
    """Found: not by a cancelled message on PostgreSQL; others claimed at their next poll."""
    backend = await location.open("emails", limits=limit(max_concurrency=1))
    await push(backend, 1, 2, task="send")
    first = await claim(backend, tasks=["send"])
    assert len(first) == 1
    woken: list[str] = []
    monkeypatch.setattr(cast("SqlBackend", backend)._notifications, "wake", woken.append)
    match end:
        case "cancel":
            assert await backend.cancel(first[0].receipt.id) is not None
        case "lapse":
            await backend.end_claims({ME})
        case _:
            await settle(backend, first, cast("Transition", end))
    assert "queue/emails" in woken


ONE_AT_A_TIME = QueueLimits(max_concurrency=1)
ONE_AN_HOUR = QueueLimits(rate=1 / 3600, burst=1)


@pytest.mark.parametrize(
    "limits",
    [
        ONE_AT_A_TIME,
        ONE_AN_HOUR,
        QueueLimits(tasks={"send": ONE_AT_A_TIME}),
        QueueLimits(tasks={"send": ONE_AN_HOUR}),
    ],
    ids=["queue", "rate", "task", "rate of a task"],
)
async def test_limits_of_queues_are_their_own(location: QueueLocation, limits: QueueLimits) -> None:
    """Also those of tasks with the same name."""
    queues = [await location.open(name, limits=limits) for name in ("emails", "letters")]
    for number, backend in enumerate(queues):
        await push(backend, f"{number}-a", f"{number}-b", task="send")
    for number, backend in enumerate(queues):
        assert values(await claim(backend, tasks=["send"])) == [f"{number}-a"]
    for backend in queues:
        assert await claim(backend, tasks=["send"]) == []


@pytest.mark.parametrize(
    "limits", [QueueLimits(max_concurrency=1), QueueLimits(rate=0.02, burst=2)]
)
async def test_a_full_queue_says_what_else_there_is(
    location: QueueLocation, limits: QueueLimits
) -> None:
    """When the next claim lapses, and that there is nothing to claim now, suspects included."""
    backend = await location.open("emails", limits=limits)
    await push(backend, 1, 2)
    await claim(backend, 1)
    await backend.end_claims({ME})
    head = await claim(backend, 1)
    assert values(head) == [2]
    for suspects in (True, False, True, False):
        found = await backend.claim(5, session=ME, visibility=60, suspects=suspects)
        assert (found.messages, found.more, found.suspects) == ([], False, False)
        assert found.lapse is not None
        assert 50 < found.lapse <= 60
    await settle(backend, head)
    location.advance(60)
    assert (await backend.claim(5, session=ME, visibility=60)).suspects
    assert values(await claim(backend, suspects=True)) == [1]


@pytest.mark.parametrize("order", ["fifo", "priority"])
@pytest.mark.parametrize(
    ("how", "tasks", "is_held_back"),
    [
        ({}, None, True),
        ({}, ["", "send"], True),
        ({}, ["send"], False),
        ({"task": "send"}, ["send", "other"], True),
        ({"task": "send"}, ["", "other"], False),
        ({"task": "send"}, None, False),
        ({"priority": 3}, [""], True),
        ({"priority": 3, "task": "send"}, ["send"], True),
        # Its delay is over in a minute.
        ({"delay": 60.0}, None, False),
        ({"delay": 60.0, "task": "send"}, ["send"], False),
    ],
)
async def test_what_only_a_limit_holds_back_is_known(
    location: QueueLocation,
    how: dict[str, Any],
    tasks: list[str] | None,
    order: QueueOrder,
    *,
    is_held_back: bool,
) -> None:
    """What could be claimed now by who knows the task: not what is delayed, claimed or paused."""
    backend = await location.open("emails", order=order, limits=QueueLimits(rate=0.0001))
    await push(backend, 1, task="first")
    await push(backend, 2, **how)
    assert values(await claim(backend, tasks=["first"])) == [1]
    assert not await backend.has_claimable(["first"])
    assert await backend.has_claimable(tasks) is is_held_back
    location.advance(60)
    assert await backend.has_claimable(tasks) is (is_held_back or "delay" in how)
    await backend.pause("a pause")
    assert not await backend.has_claimable(tasks)


@pytest.mark.parametrize("task", ["", "send"])
@pytest.mark.parametrize("is_dead", [True, False])
async def test_what_comes_back_may_be_held_back_by_a_limit(
    location: QueueLocation, task: str, *, is_dead: bool
) -> None:
    """A retry, and the message of a dead worker."""
    backend = await location.open("emails", limits=QueueLimits(rate=0.0001))
    await push(backend, 1, task=task)
    messages = await claim(backend, tasks=[task])
    assert not await backend.has_claimable([task])
    await (backend.end_claims({ME}) if is_dead else settle(backend, messages, "retry"))
    assert await backend.has_claimable([task])
    assert await claim(backend, tasks=[task]) == []


@OF_QUEUE_OR_TASK
@pytest.mark.parametrize("burst", [1, 4])
async def test_messages_are_claimed_at_the_rate_of_the_queue(
    location: QueueLocation, burst: int, limit: LimitMessages
) -> None:
    """By all processes together, whatever becomes of the messages; after a pause, a burst."""
    limits = limit(rate=0.1, burst=burst)
    mine, other = [await location.open("emails", limits=limits) for _ in range(2)]
    await push(mine, *range(20), task="send")
    messages = await claim(mine, tasks=["send"])
    assert len(messages) == burst
    await settle(mine, messages, "release")
    found = await other.claim(5, session=OTHER, visibility=60, tasks=["send"])
    assert found.messages == []
    assert found.due is not None
    assert 5 < found.due <= 10
    location.advance(25)
    assert len(await claim(other, tasks=["send"])) == min(2, burst)
    location.advance(1000)
    assert len(await claim(mine, tasks=["send"])) == burst
    assert await claim(other, tasks=["send"]) == []


@OF_QUEUE_OR_TASK
@pytest.mark.parametrize("kind", ["another boot", "a later time"])
async def test_a_rate_counts_on_after_its_clock_has_changed(
    location: QueueLocation, kind: str, limit: LimitMessages
) -> None:
    """The machine was started again, or the server's clock set back: nobody waits for that."""
    backend = await location.open("emails", limits=limit(rate=0.1))
    assert isinstance(location, SqliteQueues | PostgresQueues)
    change = "refilled = '2999-01-01'"
    if isinstance(location, SqliteQueues):
        # Without an id of the boot, a time of an earlier one may be later than now.
        change = "boot = boot + 1" if kind == "another boot" else "refilled = refilled + 1e9"
    await push(backend, *range(5), task="send")
    assert len(await claim(backend, tasks=["send"])) == 1
    for _ in range(2):
        location.execute(f"UPDATE {{}}.jobsync_limit SET {change}")
        assert await claim(backend, tasks=["send"]) == []
        location.advance(12)
        assert len(await claim(backend, tasks=["send"])) == 1


@OF_QUEUE_OR_TASK
async def test_both_limits_hold(location: QueueLocation, limit: LimitMessages) -> None:
    """What one of them forbids uses up nothing of the other."""
    backend = await location.open("emails", limits=limit(max_concurrency=2, rate=0.001, burst=3))
    await push(backend, *range(10), task="send")
    first = await claim(backend, tasks=["send"])
    assert len(first) == 2
    await settle(backend, first)
    assert len(await claim(backend, tasks=["send"])) == 1
    assert await claim(backend, tasks=["send"]) == []


TASKS = ("", "a", "b", "c")


async def claim_tasks(backend: QueueBackend, limit: int = 5, session: str = ME) -> list[Any]:
    """Claim messages of these tasks, and of none, until there are no more; return them."""
    messages: list[Any] = []
    while True:
        wanted = limit - len(messages)
        found = await backend.claim(wanted, session=session, visibility=60, tasks=TASKS)
        messages += found.messages
        if not found.more or len(messages) == limit:
            return messages


def count_tasks(messages: Sequence[Message]) -> dict[str, int]:
    """Return how many messages each task has."""
    return dict(Counter(each.task for each in messages))


async def test_no_more_messages_of_a_task_are_claimed_than_it_allows(
    location: QueueLocation,
) -> None:
    """By all processes together, in the order of all tasks; others do not wait for it."""
    limits = QueueLimits(tasks={"a": QueueLimits(max_concurrency=2)})
    mine, other = [await location.open("emails", limits=limits) for _ in range(2)]
    for number, task in enumerate("aabaac"):
        await push(mine, number, task=task)
    await push(mine, "plain")
    first = await claim_tasks(mine, 1)
    second = await claim_tasks(other, 9, OTHER)
    assert values([*first, *second]) == [0, 1, 2, 5, "plain"]
    for move in ("complete", "retry", "bury"):
        await settle(mine, first[:1], move)
        first = [*first[1:], *await claim_tasks(mine, 9)]
        assert count_tasks([*first, *second])["a"] == 2
        assert await claim_tasks(other, 9) == []
    await mine.end_claims({ME, OTHER})
    # What dead workers had claimed is claimed alone, and counts too.
    found = [
        (await mine.claim(1, session=ME, visibility=60, suspects=True, tasks=TASKS)).messages
        for _ in range(6)
    ]
    assert count_tasks([each for messages in found for each in messages])["a"] == 2
    assert "a" not in count_tasks(await claim_tasks(other, 9))


@pytest.mark.parametrize(
    "options", [{}, {"priority": 4}, {"priority": -4}, {"delay": 5}, {"group": "g"}], ids=str
)
@pytest.mark.parametrize("order", RANKS)
async def test_the_limit_of_a_task_holds_for_all_its_messages(
    location: QueueLocation, order: QueueOrder, options: dict[str, Any]
) -> None:
    """Wherever they stand; of a claim of several, each that is settled frees a place."""
    limits = QueueLimits(tasks={"a": QueueLimits(max_concurrency=2)}, group_concurrency=9)
    backend = await location.open("emails", order=order, limits=limits)
    await push(backend, *range(5), task="a", **options)
    location.advance(10)
    held = await claim(backend, tasks=["a"])
    assert len(held) == 2
    assert await claim(backend, tasks=["a"]) == []
    await settle(backend, held[:1])
    assert len(await claim(backend, tasks=["a"])) == 1
    assert await claim(backend, tasks=["a"]) == []


async def test_claims_of_a_task_at_the_same_time_count_each_other(location: QueueLocation) -> None:
    """Each waits until those before it are committed."""
    limits = QueueLimits(tasks={"a": QueueLimits(max_concurrency=3)})
    backends = [await location.open("emails", limits=limits) for _ in range(6)]
    await push(backends[0], *range(12), task="a")
    found = await asyncio.gather(*[claim_tasks(each, 2) for each in backends])
    assert sum(map(len, found)) == 3


async def test_messages_of_a_task_are_claimed_at_its_rate(location: QueueLocation) -> None:
    """By all processes together; who claims nothing hears when there is more."""
    limits = QueueLimits(
        tasks={"a": QueueLimits(rate=0.1, burst=2), "b": QueueLimits(rate=0.01, max_concurrency=9)}
    )
    mine, other = [await location.open("emails", limits=limits) for _ in range(2)]
    for task in "aaaaaabbcc":
        await push(mine, f"{task}-{random.random()}", task=task)
    claimed = await claim_tasks(mine, 9)
    assert count_tasks(claimed) == {"a": 2, "b": 1, "c": 2}
    await settle(mine, claimed)
    found = await other.claim(5, session=OTHER, visibility=60, tasks=TASKS)
    assert (found.messages, found.more) == ([], False)
    assert found.due is not None
    assert 5 < found.due <= 10
    location.advance(11)
    assert count_tasks(await claim_tasks(other)) == {"a": 1}
    location.advance(100)
    assert count_tasks(await claim_tasks(mine)) == {"a": 2, "b": 1}
    location.advance(100)
    # Without messages, the rate of a task keeps nobody awake.
    last = await mine.claim(5, session=ME, visibility=60, tasks=["b"])
    assert (last.messages, last.due) == ([], None)
    await push(mine, "later", task="b", delay=5)
    last = await mine.claim(5, session=ME, visibility=60, tasks=["b"])
    (later,) = await mine.browse("waiting")
    assert last.due is not None
    assert later.due is not None
    assert later.due - later.seen <= last.due <= 5
    location.advance(6)
    assert count_tasks(await claim_tasks(mine)) == {"a": 1, "b": 1}


@pytest.mark.parametrize("order", ["fifo", "priority"])
async def test_limits_of_tasks_hold_in_random_histories(
    location: QueueLocation, order: QueueOrder
) -> None:
    """Beside that of the queue; and whatever may be claimed is."""
    own = {"a": 1, "b": 2}
    limits = QueueLimits(
        max_concurrency=5,
        tasks={name: QueueLimits(max_concurrency=most) for name, most in own.items()},
    )
    backend = await location.open("emails", order=order, limits=limits)
    chance, held, waiting = random.Random(3), [], Counter[str]()
    for number in range(60):
        task = chance.choice(TASKS)
        await push(backend, number, task=task)
        waiting[task] += 1
        if chance.random() < 0.6:
            claimed = await claim_tasks(backend, chance.randrange(1, 7))
            held += claimed
            waiting.subtract(each.task for each in claimed)
        counts = Counter(each.task for each in held)
        assert len(held) <= 5
        assert all(counts[name] <= most for name, most in own.items())
        if chance.random() < 0.5 and held:
            await settle(backend, [held.pop(chance.randrange(len(held)))])
    while claimed := await claim_tasks(backend):
        held += claimed
        waiting.subtract(each.task for each in claimed)
        await settle(backend, held)
        held = []
    assert waiting.total() == 0


@pytest.mark.parametrize("most", [2, 3])
async def test_several_messages_of_a_group_may_be_in_work(
    location: QueueLocation, most: int
) -> None:
    """As many as the queue says, the oldest first, and never more, whatever becomes of them."""
    limits = QueueLimits(group_concurrency=most)
    backend = await location.open("emails", limits=limits)
    await push(backend, *range(6), group="a")
    await push(backend, "b", group="b")
    flying = await claim(backend)
    assert values(flying) == [*range(most), "b"]
    for move in ("complete", "bury", "retry", "cancel"):
        await settle(backend, [flying.pop(0)], move)
        flying += await claim(backend)
        assert sum(each.value["n"] != "b" for each in flying) == most
    await settle(backend, flying)
    left = await claim(backend)
    await settle(backend, left)
    assert sorted([*await drain(backend)], key=str) == []
    assert set((await backend.count()).keys()) <= {"completed", "dead", "cancelled"}
    await push(backend, "again-1", "again-2", "again-3", "again-4", group="a")
    assert len(await claim(backend)) == most


@pytest.mark.parametrize("call", ["cancel", "delete", "purge"])
async def test_whichever_head_is_taken_away_the_next_comes(
    location: QueueLocation, call: str
) -> None:
    """A message of a task or none, with a priority or none, that waits or is ready."""
    backend = await location.open("emails")
    kinds = [(task, rank, delay) for task in ("", "a") for rank in (0, 3) for delay in (0, 60)]
    for number, (task, rank, delay) in enumerate(kinds):
        group = f"group-{number}"
        head = new(f"head-{number}", task=task, priority=rank, delay=delay, group=group)
        await backend.push([head, new(number, group=group)])
    if call == "purge":
        assert await backend.purge(["ready", "waiting"]) == len(kinds)
    else:
        for number in range(len(kinds)):
            assert await getattr(backend, call)(f"id-head-{number}")
    found = await claim(backend, 20, tasks=["", "a"])
    assert sorted(values(found)) == [*range(len(kinds))]


@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize("call", ["settle", "settle a mix", "purge", "cancel", "end claims"])
async def test_as_many_follow_as_heads_of_a_group_end_together(
    location: QueueLocation, call: str, most: int
) -> None:
    """Each place is free again, also of a batch in which other groups have ends."""
    backend = await location.open("emails", limits=QueueLimits(group_concurrency=most))
    await push(backend, *[f"a{n}" for n in range(2 * most + 1)], group="a", max_attempts=1)
    await push(backend, "b0", "b1", group="b", max_attempts=1)
    if call == "end claims":
        for suspects in (False, True):
            await claim(backend, suspects=suspects)
            await backend.end_claims({ME})
    else:
        heads = [each for each in await claim(backend) if each.value["n"][0] == "a"]
        match call:
            case "settle":
                await settle(backend, heads)
            case "settle a mix":
                moves: Sequence[Transition] = ("bury", "complete", "cancel")
                batch = [
                    Settlement(receipt=each.receipt, move=move)
                    for each, move in zip(heads, moves, strict=False)
                ]
                assert all(await backend.settle(batch))
            case "purge":
                await backend.purge(["claimed"])
            case _:
                for each in heads:
                    await backend.cancel(each.id)
    following = [each for each in values(await claim(backend)) if each[0] == "a"]
    assert following == [f"a{n}" for n in range(most, 2 * most)]


async def test_a_lower_limit_of_groups_counts_those_in_work(location: QueueLocation) -> None:
    """Processes are deployed with it while messages are in work; pushes and dead letters come."""
    old, backend = [
        await location.open("emails", limits=QueueLimits(group_concurrency=most)) for most in (3, 1)
    ]
    await push(old, 1, group="a")
    await settle(old, await claim(old), "bury", error="no")
    await push(old, 2, 3, 4, group="a")
    flying = await claim(old)
    assert values(flying) == [2, 3, 4]
    await push(backend, 5, group="a")
    assert await backend.redrive() == 1
    while flying:
        assert values(await claim(backend)) == []
        await settle(backend, [flying.pop()])
    for expected in (5, 1):
        one = await claim(backend)
        assert values(one) == [expected]
        await settle(backend, one)


async def test_redriven_messages_of_a_group_keep_its_limit(location: QueueLocation) -> None:
    """Also beside those that are in work."""
    backend = await location.open("emails", limits=QueueLimits(group_concurrency=2))
    await push(backend, 1, 2, 3, group="a")
    await settle(backend, await claim(backend), "bury", error="no")
    assert await backend.redrive() == 2
    assert values(await claim(backend)) == [3, 1]


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        ("", "open"),
        ("complete", "completed"),
        ("forget", "completed"),
        ("retry", "ended"),
        ("bury", "ended"),
        ("revoke", "ended"),
        ("lapse", "ended"),
    ],
)
@pytest.mark.parametrize("group", [None, "a"])
async def test_a_transaction_in_doubt_reads_what_became_of_its_message(
    backend: QueueBackend, ending: str, outcome: str, group: str | None
) -> None:
    """Whoever has ended its claim, and also if the completed message is forgotten by then."""
    await push(backend, 1, group=group)
    messages = await claim(backend)
    match ending:
        case "complete" | "retry" | "bury":
            await settle(backend, messages, cast("Transition", ending))
        case "forget":
            await settle(backend, messages)
            assert await backend.delete("id-1") == "deleted"
        case "revoke":
            assert await backend.cancel("id-1") is not None
        case "lapse":
            await backend.end_claims({ME})
    transactions = backend.transactions
    assert transactions is not None
    assert await transactions.read_outcome(messages[0].receipt) == outcome


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_result_is_announced_to_those_who_wait_elsewhere(
    backend: QueueBackend, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """In other processes, whom nobody here knows. Without a result nobody is woken for nothing."""
    woken: list[str] = []
    notifications = cast("SqlBackend", backend)._notifications
    await push(backend, 1)
    messages = await claim(backend)
    monkeypatch.setattr(notifications, "wake", woken.append)
    await settle(backend, messages, result=StoredResult("7") if is_kept else None)
    assert woken == (["queue/emails/ends"] if is_kept else [])
