"""What every queue backend guarantees. A new backend is another case of `location`."""

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from queue_locations import (
    PagesQueues,
    PostgresQueues,
    QueueLocation,
    SqliteQueues,
    find_empty_location,
)

from jobsync import Components, Event, Invalid, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.core.messages import FINISHED, LIVE, REVOKED, MessageState, Transition
from jobsync.queue.backend import (
    MAX_MESSAGE,
    ClaimResult,
    Message,
    NewMessage,
    QueueBackend,
    Receipt,
    Settlement,
)
from jobsync.queue.results import build_result
from jobsync.queue.single_message import ProgressReport, StoredResult

ME, OTHER = "worker-1.a", "worker-2.b"
TASKS = ["", "a", "b"]
"""The tasks of a random walk's messages; some have none."""

_WHOLE = "a page is understood or set aside as a whole, see tests/integration/queue/test_pages.py"
_IDS = "no page knows the ids in others: they are unique because `Ids` makes them so"
_STEPS = "redriven page by page, see tests/integration/queue/test_pages.py"
_HOUR = "finished with their page, after an hour, see tests/integration/queue/test_pages.py"
PAGES_DIFFER = {
    "test_unreadable_messages_are_buried": _WHOLE,
    "test_impossible_messages_are_buried": _WHOLE,
    "test_a_full_counter_fails_neither_a_settlement_nor_the_end_of_a_claim": _WHOLE,
    "test_a_counter_beyond_its_end_fails_no_claim": _WHOLE,
    "test_of_very_many_errors_the_latest_are_kept": "see tests/unit/queue/pages/test_changes.py",
    "test_unreadable_errors_hide_no_message": _WHOLE,
    "test_a_message_that_is_never_due_fails_no_claim": _WHOLE,
    "test_a_message_that_was_always_due_is_claimed": _WHOLE,
    "test_messages_of_newer_code_are_left_alone": _WHOLE,
    "test_an_old_queue_of_newer_messages_is_idle": _WHOLE,
    "test_a_claim_returns_whether_there_may_be_more": _WHOLE,
    "test_an_id_that_exists_is_refused": _IDS,
    "test_an_id_that_waits_is_in_use": _IDS,
    "test_a_message_that_dies_again_is_not_redriven_again": _STEPS,
    "test_dead_letters_come_back_in_the_order_in_which_they_died": _STEPS,
    "test_a_redrive_that_fails_halfway_says_so": _STEPS,
    "test_messages_finished_long_ago_are_removed": _HOUR,
    "test_each_message_of_a_claim_is_recorded_separately": _HOUR,
    "test_results_are_forgotten_with_their_messages": _HOUR,
    "test_all_old_results_are_forgotten_a_part_at_a_time": _HOUR,
    "test_progress_of_dead_processes_is_forgotten_after_a_day": _HOUR,
    "test_progress_has_the_time_of_its_latest_report": "there are no rows to let be older",
    "test_messages_of_newer_code_are_not_changed_from_outside": _WHOLE,
    "test_a_push_in_doubt_has_arrived_if_any_of_its_messages_is_there": "a page names its push",
}
"""Tests that state the ways of a database, and why pages do it in another way.

Besides, a write of pages whose request or reply was lost is sent again until its outcome is known,
where a database raises an error; `heals` is true there. And a push of pages is smaller.
"""

PUSHES = pytest.mark.parametrize("before", [0, 60, 450], ids=["one", "many", "in parts"])
"""A push of one message, and of so many that a backend may have another way for them."""


def heals(location: QueueLocation) -> bool:
    """Whether a lost request is sent again by the store itself."""
    return isinstance(location, PagesQueues)


@pytest.fixture(params=["sqlite", "postgres", "memory", "s3"])
def empty_location(request: pytest.FixtureRequest, tmp_path: Path) -> QueueLocation:
    """An empty database or store for each backend."""
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
    """The backend of an empty queue."""
    return await location.open("emails")


def new_messages(*values: Any, **options: Any) -> list[NewMessage]:
    """Return messages whose ids are their values."""
    options = {"max_attempts": 4, **options}
    return [NewMessage(id=f"id-{value}", value={"n": value}, **options) for value in values]


def nest(depth: int) -> Any:
    """Return a value of so many arrays within each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def claim(backend: QueueBackend, limit: int = 10, **options: Any) -> list[Message]:
    """Claim as `ME` for a minute by default."""
    claimed = await backend.claim(limit, **{"session": ME, "visibility": 60, **options})
    return claimed.messages


async def take(backend: QueueBackend, limit: int = 10, **options: Any) -> Message:
    """Claim the only message."""
    (message,) = await claim(backend, limit, **options)
    return message


def values(messages: list[Message]) -> list[Any]:
    """Return the values of messages."""
    return [message.value["n"] for message in messages]


async def settle(
    backend: QueueBackend, receipt: Receipt, move: Transition = "complete", **how: Any
) -> bool:
    """Settle one claim."""
    (done,) = await backend.settle([Settlement(receipt=receipt, move=move, **how)])
    return done


async def test_what_is_pushed_is_claimed_in_order_and_completed_for_good(
    backend: QueueBackend,
) -> None:
    """Two batches, three claims; afterwards only the count is left."""
    await backend.push(new_messages(1, 2, 3))
    await backend.push(new_messages(4, 5))
    assert values(await claim(backend, 2)) == [1, 2]
    rest = await claim(backend, 2) + await claim(backend, 2)
    assert values(rest) == [3, 4, 5]
    assert await claim(backend) == []
    assert await backend.count() == {"claimed": 5}
    done = await backend.settle(
        [Settlement(receipt=each.receipt, move="complete") for each in rest]
    )
    assert done == [True] * 3
    assert await backend.count() == {"claimed": 2, "completed": 3}


@PUSHES
async def test_a_message_arrives_as_it_was(backend: QueueBackend, before: int) -> None:
    """Every kind of JSON, every script, and escaped control characters."""
    value: Any = {
        "text": 'a"b\\n\\u0041\n\t☃ 𝄞 {x}, %s \\N \\.',
        "deep": [1, -2.5, True, None, {"": []}],
        "e": "",
    }
    special = NewMessage(id="x\\t", value=value, max_attempts=7, timeout=1.5, task="a'{b}\\c")
    await backend.push([*new_messages(*range(before)), special])
    *others, message = await claim(backend, before + 1, tasks=["", "a'{b}\\c"])
    assert values(others) == [*range(before)]
    assert {(each.id, each.timeout) for each in others} == {
        (f"id-{n}", None) for n in range(before)
    }
    assert message.value == value
    assert (message.id, message.attempt, message.max_attempts) == ("x\\t", 1, 7)
    assert (message.timeout, message.is_suspect, message.task) == (1.5, False, "a'{b}\\c")
    assert {each.task for each in others} <= {""}
    assert message.enqueued == pytest.approx(Components.system().clock.wall().seconds, abs=60)


async def test_queues_are_separate(location: QueueLocation, backend: QueueBackend) -> None:
    """Also if one queue's name is a prefix of the other's."""
    other = await location.open("emails2")
    await backend.push(new_messages(1))
    await other.push(new_messages(2))
    assert values(await claim(other)) == [2]
    assert values(await claim(backend)) == [1]
    assert await other.purge([*LIVE, *FINISHED]) == 1
    assert await backend.count() == {"claimed": 1}


SWEEPS: dict[str, Callable[[QueueBackend], Awaitable[object]]] = {
    "purge": lambda backend: backend.purge([*LIVE, *FINISHED]),
    "forget": lambda backend: asyncio.gather(
        *(backend.forget(state, older_than=1) for state in FINISHED)
    ),
    "forget keys": lambda backend: backend.forget_keys(after="", limit=10),
    "end claims": lambda backend: backend.end_claims({ME}),
    "redrive": lambda backend: backend.redrive(),
    "pause": lambda backend: backend.pause(),
    "resume": lambda backend: backend.resume(),
}


@pytest.mark.parametrize("sweep", SWEEPS)
async def test_what_is_done_to_a_queue_leaves_others_as_they_are(
    location: QueueLocation, sweep: str
) -> None:
    """Messages in every state, with their results, progress and keys."""
    queues = {name: await location.open(name) for name in ("emails", "letters")}
    for name, backend in queues.items():
        batch = new_messages(*(f"{name}-{n}" for n in range(5)))
        keyed = new_messages(f"{name}-keyed", key="k", key_ttl=1.0)
        for messages in (batch, keyed, new_messages(f"{name}-later", delay=10_000)):
            await backend.push(messages)
        done, dead, cancelled, claimed = await claim(backend, 4, visibility=10_000)
        await settle(backend, done.receipt, result=StoredResult("[1]"))
        await settle(backend, dead.receipt, "bury", error="boom")
        await settle(backend, cancelled.receipt, "cancel")
        await backend.report_progress([ProgressReport(claimed.receipt, 0.5, "half")])
        await backend.extend([claimed.receipt], 10_000)
    if sweep == "resume":
        await asyncio.gather(*(backend.pause() for backend in queues.values()))
    location.advance(100)

    async def show() -> list[Any]:
        infos = [await queues["emails"].get(f"id-emails-{n}") for n in (*range(5), "later")]
        contents = (await location.open_directory().read_contents())["emails"]
        return [
            contents.counts,
            contents.pause,
            *(each and (each.state, each.result, each.progress, each.errors) for each in infos),
        ]

    before = await show()
    await SWEEPS[sweep](queues["letters"])
    assert await show() == before
    if not heals(location):
        # A key of the same name was not removed with that of the other queue.
        assert (await queues["emails"].forget_keys(after="", limit=10)).removed == 1


@PUSHES
async def test_a_push_is_all_or_nothing(backend: QueueBackend, before: int) -> None:
    """If the library refuses a message of the batch, or if there is one twice."""
    bad = NewMessage(id="y", value={1, 2}, max_attempts=1)
    with pytest.raises(Invalid, match="message"):
        await backend.push([*new_messages(1, *range(10, 10 + before)), bad])
    with pytest.raises(Exception, match=r"(?i)unique"):
        await backend.push(new_messages(*range(before), 1001, 1002, 1001))
    assert await backend.count() == {}


async def test_an_id_that_exists_is_refused(backend: QueueBackend) -> None:
    """By the database, with the whole batch."""
    await backend.push(new_messages(3))
    with pytest.raises(Exception, match=r"(?i)unique"):
        await backend.push(new_messages(1, 2, 3))
    assert await backend.count() == {"ready": 1}


@pytest.mark.parametrize("size", [MAX_MESSAGE, MAX_MESSAGE + 1])
async def test_a_message_has_at_most_256_kilobytes(backend: QueueBackend, size: int) -> None:
    """One byte more is refused, and the error says what to do instead."""
    message = NewMessage(id="big", value="x" * (size - 2), max_attempts=1)
    if size > MAX_MESSAGE:
        with pytest.raises(Invalid, match="Store large content elsewhere"):
            await backend.push([message])
        assert await backend.count() == {}
    else:
        await backend.push([message])
        assert (await take(backend)).value == message.value


async def test_too_large_a_batch_is_refused(backend: QueueBackend) -> None:
    """An empty batch does nothing."""
    await backend.push([])
    with pytest.raises(Invalid, match=r"10,001 messages.*Push in parts"):
        await backend.push(new_messages(*range(10_001)))
    assert await backend.settle([]) == []


async def test_concurrent_claims_get_each_message_once(location: QueueLocation) -> None:
    """Several backends claim at once: every message is claimed exactly once."""
    backends = [await location.open("emails") for _ in range(4)]
    await backends[0].push(new_messages(*range(200)))

    async def drain(backend: QueueBackend, session: str) -> list[str]:
        found = []
        while messages := await claim(backend, 7, session=session):
            found += [message.id for message in messages]
        return found

    found = await asyncio.gather(*(drain(backend, f"w{n}") for n, backend in enumerate(backends)))
    assert sorted(itertools.chain(*found)) == sorted(
        message.id for message in new_messages(*range(200))
    )


@PUSHES
async def test_a_delayed_message_is_not_claimed_before_its_time(
    location: QueueLocation, backend: QueueBackend, before: int
) -> None:
    """A claim that finds nothing returns when to try again."""
    numbers = [*range(before), 1001]
    await backend.push(new_messages(*numbers, delay=100))
    claimed = await backend.claim(10, session=ME, visibility=60)
    assert claimed.messages == []
    assert claimed.next == claimed.due == pytest.approx(100, abs=30)
    assert claimed.lapse is None
    location.advance(60)
    assert await claim(backend) == []
    location.advance(60)
    assert sorted(values(await claim(backend, 1_000))) == numbers


@PUSHES
async def test_a_message_for_a_time_is_not_claimed_before_it(
    location: QueueLocation, backend: QueueBackend, before: int
) -> None:
    """One whose time has passed is ready at once."""
    now = Components.system().clock.wall().seconds
    numbers = [*range(before), 1001]
    await backend.push(new_messages(*numbers, at=now + 100))
    await backend.push(new_messages(2001, at=now - 100))
    claimed = await backend.claim(10, session=ME, visibility=60)
    assert values(claimed.messages) == [2001]
    assert claimed.due == pytest.approx(100, abs=30)
    location.advance(60)
    assert await claim(backend) == []
    location.advance(60)
    assert sorted(values(await claim(backend, 1_000))) == numbers


async def test_messages_that_waited_go_first(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A failed message is not placed behind all newer ones."""
    await backend.push(new_messages(1))
    assert await settle(backend, (await take(backend)).receipt, "retry", delay=1, error="boom")
    await backend.push(new_messages(2, 3))
    location.advance(2)
    assert values(await claim(backend, 1)) == [1]
    assert values(await claim(backend)) == [2, 3]


async def test_failures_are_counted_and_stored(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A dead letter has its payload and every error, whatever their text."""
    await backend.push(new_messages(1, max_attempts=2))
    first = await take(backend)
    nasty = 'Traceback:\n\t"x" \0 \ud800 %s {} \\ \x85 \u2028 \u2029 \x1c \x0b \r'
    assert await settle(backend, first.receipt, "retry", error=nasty)
    second = await take(backend)
    assert (second.attempt, second.receipt.deliveries) == (2, 2)
    assert await settle(backend, second.receipt, "bury", error="again")
    assert await backend.count() == {"dead": 1}
    (dead,) = await backend.browse("dead")
    assert dead.value == {"n": 1}
    assert (dead.attempts, dead.deliveries, dead.max_attempts) == (2, 2, 2)
    assert [(each.attempt, each.session) for each in dead.errors] == [(1, ME), (2, ME)]
    assert dead.errors[0].error == nasty.replace("\0", "\\0").replace("\ud800", "?")
    assert dead.errors[1].error == "again"
    assert dead.errors[0].at == pytest.approx(Components.system().clock.wall().seconds, abs=60)


@pytest.mark.parametrize("returned", [set(), {"id-0"}, {"id-1"}, {"id-0", "id-1"}])
async def test_messages_that_were_returned_and_others_are_claimed_together(
    backend: QueueBackend, returned: set[str]
) -> None:
    """Each has its own number of attempts, while it is claimed and afterwards."""
    await backend.push(new_messages(0, 1))
    for message in await claim(backend):
        move: Transition = "release" if message.id in returned else "retry"
        assert await settle(backend, message.receipt, move)
    expected = {name: 1 if name in returned else 2 for name in ("id-0", "id-1")}
    again = {message.id: message for message in await claim(backend)}
    assert {name: message.attempt for name, message in again.items()} == expected
    assert {info.id: info.attempts for info in await backend.browse("claimed")} == expected
    await backend.settle(
        [Settlement(receipt=each.receipt, move="bury", error="no") for each in again.values()]
    )
    assert {info.id: info.attempts for info in await backend.browse("dead")} == expected


@pytest.mark.parametrize("move", ["release", "snooze"])
async def test_returned_messages_spend_no_attempt(backend: QueueBackend, move: Transition) -> None:
    """Deliveries grow, attempts do not; no error is stored."""
    await backend.push(new_messages(1))
    for deliveries in (1, 2, 3):
        message = await take(backend)
        assert (message.attempt, message.receipt.deliveries) == (1, deliveries)
        assert await settle(backend, message.receipt, move)
    (kept,) = await backend.browse("waiting")
    assert (kept.attempts, kept.deliveries, kept.errors) == (0, 3, ())
    assert await settle(backend, (await take(backend)).receipt, "retry", error="boom")
    (failed,) = await backend.browse("waiting")
    assert [each.attempt for each in failed.errors] == [1]


@pytest.mark.parametrize("move", ["complete", "cancel", "retry", "bury", "release", "snooze"])
async def test_a_stale_receipt_settles_and_extends_nothing(
    location: QueueLocation, backend: QueueBackend, move: Transition
) -> None:
    """After a claim was ended, the message belongs to its next claim."""
    await backend.push(new_messages(1))
    stale = (await take(backend)).receipt
    location.advance(61)
    await backend.end_claims()
    current = await take(backend, session=OTHER, suspects=True)
    assert await backend.extend([stale], 1000) == [False]
    assert await settle(backend, stale, move, error="late") is False
    assert await backend.list_holders() == [OTHER]
    assert await backend.extend([current.receipt], 60) == [True]
    assert await settle(backend, current.receipt)
    assert await settle(backend, stale, move, error="later") is False
    assert await backend.count() == {"completed": 1}


async def test_a_receipt_settles_once(backend: QueueBackend) -> None:
    """The same again changes nothing and succeeds; anything else is refused."""
    await backend.push(new_messages(1, 2))
    one, two = await claim(backend)
    for _ in range(2):
        assert await settle(backend, one.receipt)
        assert await settle(backend, two.receipt, "retry", delay=50, error="boom")
    assert await settle(backend, one.receipt, "bury") is False
    assert await settle(backend, two.receipt) is False
    assert await backend.extend([one.receipt, two.receipt], 60) == [False, False]
    (waiting,) = await backend.browse("waiting")
    assert len(waiting.errors) == 1
    assert await backend.count() == {"completed": 1, "waiting": 1}


async def test_the_same_settlement_is_known_after_the_message_moved_on(
    backend: QueueBackend,
) -> None:
    """A late repeat gets the right answer even if others have finished the message since."""
    await backend.push(new_messages(1))
    first = await take(backend)
    await settle(backend, first.receipt, "release")
    second = await take(backend, session=OTHER)
    assert await settle(backend, first.receipt, "release") is True
    assert await backend.list_holders() == [OTHER]
    await settle(backend, second.receipt, "bury", error="boom")
    assert await settle(backend, first.receipt, "release") is True
    await backend.redrive()
    assert await settle(backend, second.receipt, "bury", error="boom") is True
    assert await backend.count() == {"waiting": 1}


async def test_a_guessed_receipt_is_refused(backend: QueueBackend) -> None:
    """For an unknown message or claim, also if the message is unclaimed."""
    await backend.push(new_messages(1))
    for guess in (Receipt("id-1", 0, ""), Receipt("id-1", 1, "x"), Receipt("nobody", 1, "x")):
        assert await settle(backend, guess) is False
        assert await backend.extend([guess], 60) == [False]
    assert await backend.count() == {"ready": 1}


async def test_each_settlement_of_a_batch_is_checked_separately(backend: QueueBackend) -> None:
    """Different ends in one batch; a stale one affects no other; each message occurs once."""
    await backend.push(new_messages(1, 2, 3, 4, 5))
    messages = await claim(backend)
    moves: list[Transition] = ["complete", "retry", "bury", "cancel", "release"]
    batch = [
        Settlement(receipt=each.receipt, move=move)
        for each, move in zip(messages, moves, strict=True)
    ]
    stale = Settlement(receipt=Receipt("gone", 1, "x"), move="complete")
    assert await backend.settle([*batch[:2], stale, *batch[2:]]) == [True, True, False, *[True] * 3]
    expected = {"completed": 1, "waiting": 2, "dead": 1, "cancelled": 1}
    assert await backend.count() == expected
    with pytest.raises(Invalid, match="contain a message twice"):
        await backend.settle([batch[0], batch[0]])


def test_a_settlement_must_end_a_claim() -> None:
    """A receipt cannot claim or redrive."""
    with pytest.raises(Invalid, match=r"does not settle a claim .*Use one of complete"):
        Settlement(receipt=Receipt("x", 1, "c"), move="redrive")


async def test_a_claim_stands_while_it_is_extended(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """However long its handler takes; a long extension is not shortened later."""
    await backend.push(new_messages(1))
    message = await take(backend)
    for _ in range(4):
        location.advance(50)
        assert await backend.extend([message.receipt], 60) == [True]
        assert await backend.end_claims() == []
    assert await backend.extend([message.receipt], 1000) == [True]
    assert await backend.extend([message.receipt], 60) == [True]
    location.advance(900)
    assert await backend.end_claims() == []
    assert await settle(backend, message.receipt)


async def test_a_late_claim_stands_until_somebody_ends_it(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """If a settlement and an expiry coincide, one of them wins."""
    await backend.push(new_messages(1, 2))
    one, two = await claim(backend)
    location.advance(61)
    assert await settle(backend, one.receipt)
    (ended,) = await backend.end_claims()
    assert ended.id == two.id
    assert await settle(backend, two.receipt) is False
    assert await backend.count() == {"completed": 1, "waiting": 1}


async def test_ending_claims_keeps_those_in_flight(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A worker with an unanswered settlement does not end that claim itself."""
    await backend.push(new_messages(1, 2))
    one, two = await claim(backend)
    location.advance(61)
    (ended,) = await backend.end_claims(keep=[one.id])
    assert ended.id == two.id
    assert await settle(backend, one.receipt)


async def test_a_claim_that_lapsed_makes_a_suspect(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """It is claimed only as a suspect, and is a normal message after a settlement."""
    await backend.push(new_messages(1))
    await take(backend)
    location.advance(61)
    (ended,) = await backend.end_claims()
    assert (ended.id, ended.state, ended.attempt, ended.session) == ("id-1", "waiting", 1, ME)
    await backend.push(new_messages(2))
    claimed = await backend.claim(10, session=ME, visibility=60)
    assert (values(claimed.messages), claimed.suspects) == ([2], True)
    suspect = await take(backend, suspects=True)
    assert (suspect.value, suspect.attempt, suspect.is_suspect) == ({"n": 1}, 1, True)
    assert not (await backend.claim(1, session=ME, visibility=60)).suspects
    await settle(backend, suspect.receipt, "release")
    cleared = await take(backend)
    assert (cleared.id, cleared.is_suspect) == ("id-1", False)


async def test_a_dead_session_ends_its_claims_and_no_others(backend: QueueBackend) -> None:
    """Long before they lapse."""
    await backend.push(new_messages(1, 2, 3))
    await claim(backend, 2)
    living = await take(backend, session=OTHER)
    assert await backend.list_holders() == [ME, OTHER]
    ended = await backend.end_claims({ME})
    assert sorted((each.id, each.session) for each in ended) == [("id-1", ME), ("id-2", ME)]
    assert await backend.list_holders() == [OTHER]
    assert await backend.end_claims({ME}) == []
    assert await settle(backend, living.receipt)


@pytest.mark.parametrize("delay", [0.0, 600.0])
@pytest.mark.parametrize("move", ["complete", "cancel", "retry", "bury", "release", "snooze"])
async def test_a_session_whose_claims_are_settled_holds_none(
    backend: QueueBackend, move: Transition, delay: float
) -> None:
    """However the last of them is settled, and while others have claims of the same batch."""
    await backend.push(new_messages(1, 2, 3))
    mine = await claim(backend, 2)
    other = await take(backend, session=OTHER)
    for number, message in enumerate(mine):
        assert await backend.list_holders() == [ME, OTHER], number
        how = {"delay": delay} if move in {"retry", "release", "snooze"} else {}
        assert await settle(backend, message.receipt, move, **how)
    assert await backend.list_holders() == [OTHER]
    assert await settle(backend, other.receipt)
    assert await backend.list_holders() == []


async def test_deaths_of_workers_are_counted_too(backend: QueueBackend) -> None:
    """A message that kills every worker is a dead letter when no attempts are left.

    The first death proves nothing: it may have been another's fault. From then on it is alone.
    """
    await backend.push(new_messages(1, max_attempts=3))
    for attempt, suspects in ((1, False), (1, True), (2, True), (3, True)):
        message = await take(backend, suspects=suspects)
        assert message.attempt == attempt
        (ended,) = await backend.end_claims({ME})
        assert ended.state == ("dead" if attempt == 3 else "waiting")
    assert await claim(backend, suspects=True) == []
    (dead,) = await backend.browse("dead")
    assert (dead.attempts, dead.deliveries) == (3, 4)
    assert [each.attempt for each in dead.errors] == [1, 1, 2, 3]
    assert "no attempt is spent" in dead.errors[0].error
    assert all("nobody settled it" in each.error for each in dead.errors)
    assert dead.value == {"n": 1}


async def test_messages_in_flight_with_a_dead_worker_spend_no_attempt(
    backend: QueueBackend,
) -> None:
    """Not even their last one; after a settlement they are normal messages again."""
    await backend.push(new_messages(1, 2, 3, max_attempts=1))
    await claim(backend)
    ended = await backend.end_claims({ME})
    assert [(each.state, each.attempt) for each in ended] == [("waiting", 1)] * 3
    for _ in range(3):
        suspect = await take(backend, 1, suspects=True)
        assert (suspect.attempt, suspect.receipt.deliveries) == (1, 2)
        assert await settle(backend, suspect.receipt)
    assert await backend.count() == {"completed": 3}


async def test_an_empty_claim_returns_when_a_claim_lapses(backend: QueueBackend) -> None:
    """So that the caller can end it then."""
    await backend.push(new_messages(1))
    assert (await backend.claim(0, session=ME, visibility=60)).next is None
    await take(backend, visibility=100)
    claimed = await backend.claim(10, session=OTHER, visibility=60)
    assert claimed.next == claimed.lapse == pytest.approx(100, abs=30)


async def test_dead_letters_can_be_redriven(backend: QueueBackend) -> None:
    """With all attempts; old errors and deliveries are kept."""
    await backend.push(new_messages(1, 2, 3, max_attempts=1))
    for message in await claim(backend):
        await settle(backend, message.receipt, "bury", error="boom")
    assert await backend.redrive(["id-2", "nobody"]) == 1
    assert await backend.redrive(limit=1) == 1
    assert await backend.redrive() == 1
    assert await backend.redrive() == 0
    again = await claim(backend)
    assert sorted(values(again)) == [1, 2, 3]
    assert {(each.attempt, each.receipt.deliveries) for each in again} == {(1, 2)}
    assert await settle(backend, again[0].receipt, "bury", error="still")
    (dead,) = await backend.browse("dead")
    assert [each.error for each in dead.errors] == ["boom", "still"]


@pytest.mark.parametrize(
    "fate",
    ["retry", "release", "snooze", "lapse", "redrive", "cancel", "revoke", "revoke waiting"],
)
async def test_a_message_keeps_what_it_was_enqueued_with(
    location: QueueLocation, backend: QueueBackend, fate: str
) -> None:
    """Its content, its time, its timeout and its attempts, whatever happens to it, twice."""
    await backend.push(new_messages(1, max_attempts=9, timeout=77.5))
    first = message = await take(backend)
    for _ in range(2):
        match fate:
            case "redrive" | "cancel":
                await settle(backend, message.receipt, "bury" if fate == "redrive" else "cancel")
                assert await backend.redrive([message.id]) == 1
            case "revoke" | "revoke waiting":
                if fate == "revoke waiting":
                    await settle(backend, message.receipt, "release")
                assert await backend.cancel(message.id) is not None
                assert await backend.redrive([message.id]) == 1
            case "lapse":
                location.advance(100)
                assert len(await backend.end_claims()) == 1
            case _:
                await settle(backend, message.receipt, fate)  # type: ignore[arg-type]
        message = await take(backend, suspects=fate == "lapse")
        for field in ("id", "value", "timeout", "max_attempts"):
            assert getattr(message, field) == getattr(first, field)
        # Time was moved by moving what is stored.
        moved = 100 if fate == "lapse" else 0
        assert first.enqueued - 2 * moved - 1 <= message.enqueued <= first.enqueued


async def push_all(backend: QueueBackend, batch: list[NewMessage], size: int = 1_000) -> None:
    """Push messages in parts that every backend takes."""
    for start in range(0, len(batch), size):
        await backend.push(batch[start : start + size])


async def bury(backend: QueueBackend, count: int) -> list[str]:
    """Make dead letters; return their ids."""
    await push_all(backend, new_messages(*range(count)))
    messages = await claim(backend, count)
    await backend.settle([Settlement(receipt=each.receipt, move="bury") for each in messages])
    return [message.id for message in messages]


async def test_a_redriven_message_is_not_suspect_any_more(backend: QueueBackend) -> None:
    """It died with its workers; now it is handled beside others again."""
    await backend.push(new_messages(1, max_attempts=1))
    await take(backend)
    await backend.end_claims([ME])
    await take(backend, suspects=True)
    (ended,) = await backend.end_claims([ME])
    assert ended.state == "dead"
    assert await backend.redrive() == 1
    assert not (await take(backend)).is_suspect


async def test_dead_letters_come_back_in_the_order_in_which_they_died(
    backend: QueueBackend,
) -> None:
    """Not in that of their ids; those that are named, too."""
    await backend.push(new_messages(1, 2, 3))
    for names in (None, ["id-2", "id-1", "id-3"]):
        messages = {message.id: message for message in await claim(backend)}
        for name in ("id-3", "id-1", "id-2"):
            assert await settle(backend, messages[name].receipt, "bury")
        assert await backend.redrive(names) == 3
        again = await claim(backend)
        assert values(again) == [3, 1, 2]
        for message in again:
            await settle(backend, message.receipt, "release")


async def test_all_dead_letters_are_redriven(backend: QueueBackend) -> None:
    """However many there are; `limit` is the most of them, the oldest first."""
    ids = await bury(backend, 2_345)
    assert await backend.redrive(limit=1_040) == 1_040
    left = {each.id for each in await backend.browse("dead", limit=5_000)}
    assert {each.id for each in await claim(backend, 5_000)} == {*ids} - left
    assert await backend.redrive() == 1_305
    assert await backend.count() == {"claimed": 1_040, "waiting": 1_305}


async def test_all_named_dead_letters_are_redriven(backend: QueueBackend) -> None:
    """However many are named, and once if one is named twice; `limit` holds here too."""
    ids = await bury(backend, 2_345)
    assert await backend.redrive([*ids[:1_500], *ids[:10], "nobody"]) == 1_500
    assert await backend.redrive(ids[1_500:], limit=5) == 5
    assert await backend.redrive([]) == 0
    assert await backend.count() == {"dead": 840, "waiting": 1_505}


async def test_a_message_that_dies_again_is_not_redriven_again(
    backend: QueueBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a call would last as long as workers fail quickly."""
    await bury(backend, 2_345)
    redrive = type(backend)._redrive  # type: ignore[attr-defined]

    async def redrive_and_fail(self: Any, ids: Any, limit: int) -> int:
        count: int = await redrive(self, ids, limit)
        again = [Settlement(receipt=each.receipt, move="bury") for each in await claim(self, limit)]
        await self.settle(again)
        return count

    monkeypatch.setattr(type(backend), "_redrive", redrive_and_fail)
    assert 2_345 <= await backend.redrive() <= 3_345
    assert await backend.count() == {"dead": 2_345}


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("emails", "the network is down"),
        Misconfigured("url", "postgresql://", "may not write", "grant it"),
    ],
    ids=["unavailable", "misconfigured"],
)
async def test_a_redrive_that_fails_halfway_says_so(
    location: QueueLocation,
    backend: QueueBackend,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The error itself would mean that nothing was done."""
    await bury(backend, 1_500)
    redrive = type(backend)._redrive  # type: ignore[attr-defined]
    answers = iter([None, error])

    async def fail(self: Any, ids: Any, limit: int) -> int:
        if (answer := next(answers)) is not None:
            raise answer
        return int(await redrive(self, ids, limit))

    monkeypatch.setattr(type(backend), "_redrive", fail)
    with pytest.raises(OutcomeUnknown, match="1,000 messages were queued again before"):
        await backend.redrive()
    monkeypatch.undo()
    assert await backend.redrive() == 500
    location.faults.lost_replies = 1
    with pytest.raises(OutcomeUnknown):
        await backend.redrive()


WRONG: list[tuple[str, Any]] = [
    ("after", lambda it: it.browse("ready", after="abc")),
    ("after", lambda it: it.browse("ready", after="-1")),
    ("after", lambda it: it.browse("ready", after="9" * 19)),
    ("after", lambda it: it.browse("waiting", after="1.5 x")),
    ("after", lambda it: it.browse("claimed", after="1\0")),
    ("after", lambda it: it.browse("dead", after="abc")),
    ("after", lambda it: it.browse("dead", after="1e300 x")),
    ("after", lambda it: it.browse("dead", after="9999999999999 x")),
    ("after", lambda it: it.browse("dead", after="nan x")),
    ("after", lambda it: it.browse("dead", after="1 \0")),
    ("after", lambda it: it.browse("completed", after="1 \ud800")),
    ("after", lambda it: it.browse("ready", after=None)),
    ("after", lambda it: it.browse("ready", after=7)),
    ("limit", lambda it: it.browse("ready", limit=-1)),
    ("limit", lambda it: it.browse("ready", limit=0)),
    ("limit", lambda it: it.browse("ready", limit="10")),
    ("limit", lambda it: it.browse("ready", limit=10**20)),
    ("state", lambda it: it.browse("redy")),
    ("state", lambda it: it.browse(["ready"])),
    ("state", lambda it: it.browse("dead\0")),
    ("state", lambda it: it.purge(["pending"])),
    ("states", lambda it: it.purge("dead")),
    ("ids", lambda it: it.redrive("id-1")),
    ("ids", lambda it: it.redrive(5)),
    ("ids", lambda it: it.redrive([5])),
    ("ids", lambda it: it.redrive(["id-1", "a\0b"])),
    ("ids", lambda it: it.redrive(["a\nb"])),
    ("ids", lambda it: it.redrive(["\ud800"])),
    ("limit", lambda it: it.redrive(limit=-1)),
    ("limit", lambda it: it.redrive(limit=2.5)),
    ("limit", lambda it: it.forget("dead", older_than=1, limit=-1)),
    ("older_than", lambda it: it.forget("dead", older_than=1e300)),
    ("older_than", lambda it: it.forget("dead", older_than=float("nan"))),
    ("reason", lambda it: it.pause("why\0")),
    ("reason", lambda it: it.pause("\ud800")),
    ("reason", lambda it: it.pause(None)),
    ("seconds", lambda it: it.extend([Receipt("id-1", 1, "x")], 1e300)),
    ("seconds", lambda it: it.extend([Receipt("id-1", 1, "x")], float("nan"))),
    ("seconds", lambda it: it.extend([Receipt("id-1", 1, "x")], "60")),
]


async def test_wrong_arguments_are_refused_before_anything_is_sent(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """The error names the argument, its value and the fix, and is the same on every backend."""
    await backend.push(new_messages(1))
    location.faults.lost_requests = 1
    for number, (field, call) in enumerate(WRONG):
        with pytest.raises(Invalid) as refused:
            await call(backend)
        assert (number, refused.value.field) == (number, field)
        assert refused.value.fix
    location.faults.lost_requests = 0
    assert await backend.count() == {"ready": 1}


async def test_cancelled_messages_are_redriven_only_by_id(backend: QueueBackend) -> None:
    """Completed messages never are."""
    await backend.push(new_messages(1, 2))
    one, two = await claim(backend)
    await settle(backend, one.receipt, "cancel", error="not needed")
    await settle(backend, two.receipt)
    assert await backend.redrive() == 0
    assert await backend.redrive(["id-2"]) == 0
    assert await backend.redrive(["id-1"]) == 1
    assert await backend.count() == {"waiting": 1, "completed": 1}


async def test_browsing_is_paged(backend: QueueBackend) -> None:
    """The oldest first, each message once, in every state."""
    await backend.push(new_messages(*range(7)))
    await backend.push(new_messages(*range(10, 15), delay=100))
    messages = await claim(backend, 5)
    await backend.settle([Settlement(receipt=each.receipt, move="bury") for each in messages[:3]])
    for state, expected in {
        "ready": [5, 6],
        "waiting": [10, 11, 12, 13, 14],
        "claimed": [3, 4],
        "dead": [0, 1, 2],
    }.items():
        found: list[Any] = []
        after = ""
        while page := await backend.browse(state, after=after, limit=2):  # type: ignore[arg-type]
            found += [kept.value["n"] for kept in page]
            after = page[-1].cursor
        assert found == expected
    (kept, _) = await backend.browse("claimed")
    assert (kept.session, kept.attempts) == (ME, 1)


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize(
    ("move", "state"), [("complete", "completed"), ("cancel", "cancelled"), ("bury", "dead")]
)
async def test_messages_that_ended_at_the_same_time_are_listed_in_pages(
    backend: QueueBackend, move: Transition, state: MessageState, limit: int
) -> None:
    """Those of one batch: a page that ends among them is followed by the rest."""
    await backend.push(new_messages(*range(5)))
    messages = await claim(backend)
    batch = [Settlement(receipt=each.receipt, move=move) for each in messages]
    assert await backend.settle(batch) == [True] * 5
    found, after = list[str](), ""
    while page := await backend.browse(state, after=after, limit=limit):
        assert len(page) <= limit
        found += [each.id for each in page]
        after = page[-1].cursor
    assert sorted(found) == [each.id for each in messages]


async def test_browsing_shows_times(location: QueueLocation, backend: QueueBackend) -> None:
    """The ends of delays and claims, and when messages were claimed and finished."""
    await backend.push(new_messages(1, 2))
    await backend.push(new_messages(3, delay=100))
    done, _ = await claim(backend, visibility=50)
    await settle(backend, done.receipt, "bury")
    (waiting,) = await backend.browse("waiting")
    (claimed,) = await backend.browse("claimed")
    (dead,) = await backend.browse("dead")
    assert waiting.due == pytest.approx(waiting.enqueued + 100, abs=10)
    assert (waiting.claimed, waiting.finished) == (None, None)
    assert claimed.claimed is not None
    assert claimed.due == pytest.approx(claimed.claimed + 50, abs=10)
    assert claimed.enqueued <= claimed.claimed <= claimed.seen
    assert dead.finished is not None
    assert dead.enqueued <= dead.finished <= dead.seen
    assert (dead.due, dead.claimed) == (None, None)
    location.advance(60)
    (late,) = await backend.browse("claimed")
    assert late.due is not None
    assert late.due < late.seen


async def pass_time(location: QueueLocation) -> None:
    """Wait for a moment, by whichever clock messages have their times."""
    await asyncio.sleep(0.05)
    if isinstance(location, PagesQueues):
        location.clock.ahead += 0.05


@pytest.mark.parametrize(("move", "state"), [("bury", "dead"), ("cancel", "cancelled")])
async def test_each_time_is_that_of_its_own_change(
    location: QueueLocation, backend: QueueBackend, move: Transition, state: MessageState
) -> None:
    """The push, the claim, each error and the end of one message, which all differ."""
    await backend.push(new_messages(1))
    await pass_time(location)
    first = await take(backend)
    (claimed,) = await backend.browse("claimed")
    assert claimed.claimed is not None
    await pass_time(location)
    await settle(backend, first.receipt, "retry", error="one")
    await pass_time(location)
    await settle(backend, (await take(backend)).receipt, move, error="two")
    (ended,) = await backend.browse(state)
    assert ended.finished is not None
    assert ended.enqueued == pytest.approx(claimed.enqueued, rel=0, abs=0.001)
    one, two = ended.errors
    times = [ended.enqueued, claimed.claimed, one.at, two.at]
    assert all(after - before > 0.02 for before, after in itertools.pairwise(times)), times
    assert ended.finished - one.at > 0.02


async def test_each_message_shows_when_its_own_claim_lapses(backend: QueueBackend) -> None:
    """One of a batch was extended, and the others were not."""
    await backend.push(new_messages(0, 1, 2))
    _, second, _ = await claim(backend, visibility=100)
    assert await backend.extend([second.receipt], 5_000) == [True]
    left = [each.due - each.seen for each in await backend.browse("claimed") if each.due]
    assert [round(seconds, -3) for seconds in left] == [0, 5_000, 0]


async def test_a_claim_that_was_closed_lately_answers(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Although what was completed in it is forgotten: that was long before its end."""
    await backend.push(new_messages(0, 1))
    early, late = await claim(backend, visibility=1000)
    assert await settle(backend, early.receipt)
    location.advance(500)
    assert await settle(backend, late.receipt, "bury")
    # Pages remember what was completed for an hour.
    is_kept = isinstance(location, PagesQueues)
    assert await backend.forget("completed", older_than=400) == (0 if is_kept else 1)
    assert await settle(backend, late.receipt, "bury") is True
    assert await settle(backend, early.receipt) is True


@pytest.mark.parametrize("count", [1, 2])
async def test_a_settlement_is_answered_although_its_messages_are_forgotten_early(
    location: QueueLocation, backend: QueueBackend, count: int
) -> None:
    """Whose reply was lost: whoever repeats it is told that it was made, for minutes."""
    await backend.push(new_messages(*range(count)))
    batch = [
        Settlement(receipt=each.receipt, move="complete")
        for each in await claim(backend, visibility=1000)
    ]
    assert await backend.settle(batch) == [True] * count
    location.advance(100)
    # Pages remember what was completed for an hour.
    is_kept = isinstance(location, PagesQueues)
    assert await backend.forget("completed", older_than=50) == (0 if is_kept else count)
    assert await backend.settle(batch) == [True] * count


async def test_completed_messages_keep_no_payload(backend: QueueBackend) -> None:
    """Only that they were completed, and by which session."""
    await backend.push(new_messages(1))
    await settle(backend, (await take(backend)).receipt)
    (kept,) = await backend.browse("completed")
    assert (kept.id, kept.value, kept.session, kept.attempts) == ("id-1", None, ME, 1)


async def test_messages_finished_long_ago_are_removed(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Nothing newer, nothing in another state, nothing unfinished."""
    await backend.push(new_messages(1, 2, 3))
    one, two, _ = await claim(backend)
    await settle(backend, one.receipt)
    await settle(backend, two.receipt, "bury")
    assert await backend.forget("completed", older_than=100) == 0
    location.advance(101)
    assert await backend.forget("completed", older_than=100) == 1
    assert await backend.count() == {"claimed": 1, "dead": 1}
    with pytest.raises(Invalid, match=r"is not finished .*Use one of completed"):
        await backend.forget("ready", older_than=1)


async def test_purging_removes_messages_in_the_given_states(backend: QueueBackend) -> None:
    """The receipt of a purged message is stale."""
    await backend.push(new_messages(1, 2, 3))
    one, two = await claim(backend, 2)
    await settle(backend, one.receipt, "bury")
    assert await backend.purge(["ready", "claimed"]) == 2
    assert await settle(backend, two.receipt) is False
    assert await backend.count() == {"dead": 1}


async def test_unreadable_messages_are_buried(location: QueueLocation) -> None:
    """Reported once, stored unchanged among the dead letters; the others are delivered."""
    components = Components.system()
    reported: list[Event] = []
    components.events.on("store:record-set-aside", reported.append)
    backend = await location.open("emails", components)
    await backend.push(new_messages(1, 2, 3))
    location.damage("id-2", '{"n": 2')
    assert values(await claim(backend)) == [1, 3]
    (dead,) = await backend.browse("dead")
    assert (dead.id, dead.value) == ("id-2", '{"n": 2')
    assert "not JSON" in dead.errors[0].error
    assert [event["key"] for event in reported] == ["message id-2"]


MAX_COUNT = 2**31 - 1

IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "deliveries at their end": {"deliveries": MAX_COUNT},
    "returned more often than delivered": {"returned": MAX_COUNT},
    "a negative number of returns": {"returned": -1},
    "negative deliveries": {"deliveries": -5},
    "both counters at their ends": {"deliveries": MAX_COUNT, "returned": -MAX_COUNT - 1},
    "a timeout that is no time": {"timeout": -1.0},
    "an endless timeout": {"timeout": float("inf")},
    "a timeout of 1e300 s": {"timeout": 1e300},
}


@pytest.mark.parametrize("columns", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
async def test_impossible_messages_are_buried(
    location: QueueLocation, columns: dict[str, Any]
) -> None:
    """One row fails no claim: it is set aside with the reason, and the others are delivered."""
    components = Components.system()
    reported: list[Event] = []
    components.events.on("store:record-set-aside", reported.append)
    backend = await location.open("emails", components)
    await backend.push(new_messages(1, 2, 3))
    location.overwrite("jobsync_message", "id-2", **columns)
    assert values(await claim(backend)) == [1, 3]
    (dead,) = await backend.browse("dead")
    assert (dead.id, dead.value) == ("id-2", {"n": 2})
    ((field, *_),) = [columns]
    assert field in dead.errors[0].error
    assert [event["key"] for event in reported] == ["message id-2"]


@pytest.mark.parametrize("column", ["deliveries", "returned"])
async def test_a_full_counter_fails_neither_a_settlement_nor_the_end_of_a_claim(
    location: QueueLocation, backend: QueueBackend, column: str
) -> None:
    """Whatever ends the claim of such a row, the other rows of the batch are not affected."""
    await backend.push(new_messages(1, 2, 3, 4))
    one, two, three, _ = await claim(backend)
    for name in ("id-1", "id-2", "id-3", "id-4"):
        location.overwrite("jobsync_message", name, **{column: MAX_COUNT})
    batch = [
        Settlement(receipt=one.receipt, move="release"),
        Settlement(receipt=two.receipt, move="retry", error="boom"),
        Settlement(receipt=three.receipt, move="bury", error="boom"),
    ]
    assert await backend.settle(batch) == [True, True, True]
    (ended,) = await backend.end_claims({ME})
    assert ended.id == "id-4"
    assert await claim(backend) == []
    assert await claim(backend, suspects=True) == []
    assert await backend.count() == {"dead": 4}


async def test_a_counter_beyond_its_end_fails_no_claim(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """SQLite's integers are larger, and so are the counters that somebody can write there."""
    if not isinstance(location, SqliteQueues):
        pytest.skip("a column of PostgreSQL holds no such number")
    await backend.push(new_messages(1, 2))
    location.overwrite("jobsync_message", "id-1", deliveries=2**63 - 1, returned=-1)
    assert values(await claim(backend)) == [2]
    (dead,) = await backend.browse("dead")
    assert dead.deliveries == 2**63 - 1


async def test_of_very_many_errors_the_latest_are_kept(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A message that is tried for ever does not become a row that nobody can write."""
    await backend.push(new_messages(1, 2, max_attempts=1_000_000))
    old = [{"attempt": n, "error": "é" * 1_500, "at": 1.0, "session": ME} for n in range(300)]
    lines = "".join(msgspec.json.encode(line).decode() + "\n" for line in old)
    for name in ("id-1", "id-2"):
        location.overwrite("jobsync_message", name, errors=lines)
    one, two = await claim(backend)
    assert await settle(backend, one.receipt, "retry", error="again")
    assert await settle(backend, two.receipt, "bury", error="again")
    for state in ("waiting", "dead"):
        (kept,) = await backend.browse(state)
        assert 100 < len(kept.errors) < 200
        assert [each.error for each in kept.errors][-2:] == ["é" * 1_500, "again"]
        assert [each.attempt for each in kept.errors][-2:] == [299, 1]


@pytest.mark.parametrize("hours", [0, 1, 100])
async def test_what_waits_is_found_however_long_ago_it_was_due(
    location: QueueLocation, backend: QueueBackend, hours: int
) -> None:
    """Suspects and others, also by a worker that has just looked at everything."""
    await backend.push(new_messages(1, 2))
    one, two = await claim(backend, session="gone")
    await settle(backend, two.receipt, "retry", delay=50)
    assert [ended.id for ended in await backend.end_claims(["gone"])] == [one.id]
    assert await claim(backend) == []
    location.advance(3600 * hours + 51)
    (suspect,) = await claim(backend, suspects=True)
    assert (suspect.id, suspect.is_suspect) == (one.id, True)
    deadline = asyncio.get_running_loop().time() + 60
    while not (found := await claim(backend)):
        assert asyncio.get_running_loop().time() < deadline
        await backend.wait(0.05)
    assert [message.id for message in found] == [two.id]


async def test_concurrent_pushes_share_a_transaction_and_its_outcome(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Each message is pushed once; a lost request concerns all that it had, and nobody else."""

    def push(first: int) -> "asyncio.Future[list[Mapping[str, str] | BaseException]]":
        pushes = [backend.push(new_messages(first + number)) for number in range(40)]
        return asyncio.gather(*pushes, return_exceptions=True)

    assert await push(1) == [{}] * 40
    location.faults.lost_replies = 1
    assert await push(41) == [{}] * 40
    pushes = push(81)
    # The first one is on its way; the others wait for it.
    await asyncio.sleep(0)
    location.faults.lost_requests = 1
    first, *others = await pushes
    assert first == {}
    expected = dict if heals(location) else OutcomeUnknown
    assert [type(outcome) for outcome in others] == [expected] * 39
    last = 120 if heals(location) else 81
    assert sorted(values(await claim(backend, 1000))) == list(range(1, last + 1))


@pytest.mark.parametrize("state", ["ready", "claimed", "completed", "dead"])
@pytest.mark.parametrize("left", [1, 2, 3])
async def test_a_push_in_doubt_has_arrived_if_any_of_its_messages_is_there(
    location: QueueLocation, backend: QueueBackend, left: int, state: str
) -> None:
    """It was all or nothing, and others may have deleted the rest before anybody looks."""
    other = await location.open("emails")

    async def act_meanwhile() -> None:
        for number in {1, 2, 3} - {left}:
            assert await other.delete(f"id-{number}") == "deleted"
        if state != "ready":
            message = await take(other)
            if state != "claimed":
                move: Transition = "complete" if state == "completed" else "bury"
                assert await settle(other, message.receipt, move)

    location.faults.lost_replies = 1
    location.faults.meanwhile = act_meanwhile
    await backend.push(new_messages(1, 2, 3))
    assert await backend.count() == {state: 1}


async def test_unreadable_errors_hide_no_message(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """They are shown as text beside the readable ones, and a page is not taken for the last."""
    await backend.push(new_messages(*range(1, 6)))
    line = msgspec.json.encode({"attempt": 1, "error": "boom"}).decode()
    location.overwrite("jobsync_message", "id-2", errors=f"{line}\nby hand\n")
    (first, second) = await backend.browse("ready", limit=2)
    assert [(each.attempt, each.error) for each in second.errors] == [(1, "boom"), (0, "by hand")]
    assert len(await backend.browse("ready", after=second.cursor, limit=3)) == 3
    assert first.errors == ()
    directory = location.open_directory()
    assert len(await directory.list("emails", "queue", after="", limit=2)) == 2
    assert [each.id for each in await directory.find(["id-2"])] == ["id-2"]


async def test_a_message_that_is_never_due_fails_no_claim(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Somebody parked it: it waits, and so does a claim whose end is infinitely far away."""
    await backend.push(new_messages(1, 2, 3))
    await take(backend, 1)
    endless = float("inf") if isinstance(location, SqliteQueues) else "infinity"
    location.overwrite("jobsync_message", "id-1", due=endless)
    location.overwrite("jobsync_message", "id-2", state="waiting", due=endless)
    assert values(await claim(backend)) == [3]
    assert await backend.end_claims() == []
    assert await backend.count() == {"claimed": 2, "waiting": 1}


async def test_a_message_that_was_always_due_is_claimed(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """However far back somebody has set its time; and a claim that ended so long ago is ended."""
    await backend.push(new_messages(1))
    await backend.push(new_messages(2, delay=100))
    await take(backend)
    if isinstance(location, SqliteQueues):
        location.overwrite("jobsync_message", "id-1", due=float("-inf"))
        location.overwrite("jobsync_message", "id-2", wakes=float("-inf"))
    else:
        location.overwrite("jobsync_message", "id-1", due="-infinity")
        location.overwrite("jobsync_message", "id-2", due="-infinity")
    # Another one, which looks at all messages first.
    other = await location.open(backend.queue)
    assert values(await claim(other)) == [2]
    assert [each.id for each in await backend.end_claims()] == ["id-1"]
    assert await backend.count() == {"claimed": 1, "waiting": 1}


async def test_messages_of_newer_code_are_left_alone(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Neither claimed, ended, redriven, purged nor forgotten; but counted, shown and reported."""
    await backend.push(new_messages(1, 2, 3, 4, 5))
    await backend.push(new_messages(6, 7, delay=10))
    lapsed, dead, *_ = await claim(backend, 2)
    assert await settle(backend, dead.receipt, "bury", error="boom")
    location.overwrite("jobsync_finished", "id-2", format=99)
    for name in ("id-1", "id-3", "id-4", "id-6"):
        location.overwrite("jobsync_message", name, format=99)
    location.advance(100)
    found = await backend.claim(10, session=OTHER, visibility=60)
    assert values(found.messages) == [5, 7]
    assert (found.suspects, found.due) == (False, None)
    assert found.lapse is None or found.lapse > 0
    assert await backend.list_holders() == [OTHER]
    assert await backend.end_claims({ME}) == []
    assert await backend.redrive() == await backend.redrive(["id-2"]) == 0
    assert await backend.purge([*LIVE, *FINISHED]) == 2
    assert await backend.forget("dead", older_than=1) == 0
    assert await backend.count() == {"claimed": 1, "ready": 2, "waiting": 1, "dead": 1}
    assert await backend.find_newer() == {99: 4}
    (shown,) = await backend.browse("waiting")
    assert (shown.id, shown.format) == ("id-6", 99)
    location.overwrite("jobsync_message", "id-1", format=1)
    assert [each.id for each in await backend.end_claims()] == [lapsed.id]


@pytest.mark.parametrize("options", [{}, {"task": "a"}, {"priority": 3}], ids=str)
async def test_no_message_of_this_code_is_newer(
    backend: QueueBackend, options: dict[str, Any]
) -> None:
    """Neither before it is claimed nor while it is; a task and a priority are known."""
    await backend.push(new_messages(1, 2, **options))
    await take(backend, 1, tasks=["", "a"])
    assert await backend.find_newer() == {}


async def test_an_old_queue_of_newer_messages_is_idle(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A worker that has nothing else to do waits, and does not poll for them."""
    await backend.push(new_messages(1))
    await backend.push(new_messages(2, delay=5))
    await take(backend)
    location.overwrite("jobsync_message", "id-1", format=99)
    location.overwrite("jobsync_message", "id-2", format=99)
    for _ in range(2):
        assert (await backend.claim(10, session=ME, visibility=60)).next is None
        location.advance(100)
    assert (await backend.claim(10, session=ME, visibility=60, suspects=True)).next is None


async def test_each_message_of_a_claim_is_settled_separately(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A message completed before, and one whose claim was ended, affect no other."""
    await backend.push(new_messages(1, 2, 3, 4))
    before, ended, *others = await claim(backend)
    assert await settle(backend, before.receipt)
    location.advance(1000)
    kept = [each.id for each in others]
    assert [each.id for each in await backend.end_claims(keep=kept)] == [ended.id]
    batch = [Settlement(receipt=each.receipt, move="complete") for each in (before, ended, *others)]
    assert await backend.settle(batch) == [True, False, True, True]
    assert await backend.count() == {"completed": 3, "waiting": 1}


async def test_a_claim_returns_whether_there_may_be_more(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Fewer than requested are all; unreadable messages count as found."""
    await backend.push(new_messages(1, 2, 3))
    location.damage("id-1", "{")
    location.damage("id-2", "{")
    first = await backend.claim(2, session="s", visibility=60)
    assert (values(first.messages), first.more) == ([], True)
    second = await backend.claim(2, session="s", visibility=60)
    assert (values(second.messages), second.more) == ([3], False)


@PUSHES
async def test_a_push_wakes_waiters(
    location: QueueLocation, backend: QueueBackend, before: int
) -> None:
    """In another process or this one; without a push the wait times out."""
    other = await location.open("emails")
    await backend.wait(0.01)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        waiting = group.create_task(other.wait(3600))
        while not waiting.done():
            await backend.push(new_messages(*itertools.islice(_fresh, before + 1)))
            await asyncio.wait([waiting], timeout=0.2)


_fresh = iter(range(1000, 10**9))


@PUSHES
async def test_a_push_whose_reply_was_lost_is_found(
    location: QueueLocation, backend: QueueBackend, before: int
) -> None:
    """A missing one may still arrive: its outcome is unknown, and it is not sent again."""
    first, second = [*range(before), 1001], [*range(2000, 2000 + before), 3001]
    location.faults.lost_replies = 1
    await backend.push(new_messages(*first))
    location.faults.lost_requests = 1
    if heals(location):
        await backend.push(new_messages(*second))
        assert values(await claim(backend, 1_000)) == [*first, *second]
        return
    with pytest.raises(OutcomeUnknown):
        await backend.push(new_messages(*second))
    assert values(await claim(backend, 1_000)) == first


@pytest.mark.parametrize("move", ["complete", "retry", "release"])
async def test_a_settlement_whose_reply_was_lost_is_not_stale(
    location: QueueLocation, backend: QueueBackend, move: Transition
) -> None:
    """It is sent again, is found to be done, and nothing happens twice."""
    await backend.push(new_messages(1))
    message = await take(backend)
    location.faults.lost_replies = 2
    assert await settle(backend, message.receipt, move, error="boom", delay=60)
    location.faults.lost_requests = 2
    assert await settle(backend, message.receipt, move, error="boom", delay=60)
    for kept in await backend.browse("waiting"):
        assert len(kept.errors) == 1
        assert kept.deliveries == 1


async def test_a_claim_whose_reply_was_lost_is_found_or_lapses(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Nothing is lost, and nothing is claimed twice."""
    await backend.push(new_messages(1, 2))
    location.faults.lost_replies = 1
    try:
        messages = await claim(backend)
    except Unavailable:
        assert isinstance(location, SqliteQueues)
        assert await backend.count() == {"claimed": 2}
    else:
        assert values(messages) == [1, 2]
        assert await backend.extend([each.receipt for each in messages], 60) == [True, True]
    if not heals(location):
        location.faults.lost_requests = 1
        with pytest.raises(Unavailable):
            await claim(backend)
    assert await claim(backend) == []


class Model:
    """A model of the messages of a queue, from the guarantees alone."""

    def __init__(self) -> None:
        self.live: dict[str, Receipt | None] = {}
        """The session that has claimed each message, if any."""
        self.deliveries: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.suspects: set[str] = set()
        self.finished: dict[str, str] = {}
        self.stale: list[Receipt] = []

    def attempts(self, name: str) -> int:
        """Return the attempts of a message."""
        return self.deliveries[name] - self.returned[name]

    def take(self, claimed: ClaimResult, *, suspects: bool) -> None:
        """Check a claim."""
        for message in claimed.messages:
            assert self.live[message.id] is None, "claimed by two"
            assert (message.id in self.suspects) is suspects
            self.deliveries[message.id] += 1
            assert message.receipt.deliveries == self.deliveries[message.id]
            assert message.attempt == self.attempts(message.id)
            self.live[message.id] = message.receipt

    def end(self, name: str, *, finished: str = "", returned: bool = False) -> None:
        """Record how a claim ended."""
        receipt = self.live[name]
        assert receipt is not None
        self.stale.append(receipt)
        self.live[name] = None
        self.returned[name] += returned
        self.suspects.discard(name)
        if finished:
            del self.live[name]
            self.finished[name] = finished


ENDS: dict[Transition, tuple[str, bool]] = {
    "complete": ("completed", False),
    "cancel": ("cancelled", False),
    "bury": ("dead", False),
    "retry": ("", False),
    "release": ("", True),
    "snooze": ("", True),
}


class Walk:
    """Random steps, each checked against the model."""

    def __init__(self, location: QueueLocation, backends: list[QueueBackend], seed: int) -> None:
        self.model = Model()
        self._place = location
        self._ports = backends
        self._rng = random.Random(seed)
        self._fresh = itertools.count()

    async def step(self) -> None:
        """Take a random step."""
        steps = [self.push, self.claim, self.claim, self.settle, self.settle, self.look]
        await self._rng.choice([*steps, self.be_stale, self.die])(self._rng.choice(self._ports))

    async def push(self, backend: QueueBackend) -> None:
        count = self._rng.randint(1, 5)
        batch = [
            NewMessage(
                id=f"m{next(self._fresh)}", value=n, max_attempts=3, task=self._rng.choice(TASKS)
            )
            for n in range(count)
        ]
        await backend.push(batch)
        self.model.live |= {letter.id: None for letter in batch}

    async def claim(self, backend: QueueBackend) -> None:
        suspects = self._rng.random() < 0.4
        session = self._rng.choice([ME, OTHER])
        limit = self._rng.randint(1, 6)
        tasks = self._rng.sample(TASKS, self._rng.randint(1, len(TASKS)))
        claimed = await backend.claim(
            limit, session=session, visibility=600, suspects=suspects, tasks=tasks
        )
        assert {each.task for each in claimed.messages} <= {*tasks}
        self.model.take(claimed, suspects=suspects)

    async def settle(self, backend: QueueBackend) -> None:
        claimed = [receipt for receipt in self.model.live.values() if receipt is not None]
        batch = [
            Settlement(receipt=each, move=self._rng.choice(list(ENDS)), error="boom")
            for each in self._rng.sample(claimed, min(len(claimed), self._rng.randint(1, 4)))
        ]
        self._place.faults.lost_replies = int(self._rng.random() < 0.1)
        assert all(await backend.settle(batch))
        self._place.faults.lost_replies = 0
        for each in batch:
            finished, returned = ENDS[each.move]
            self.model.end(each.receipt.id, finished=finished, returned=returned)

    async def be_stale(self, backend: QueueBackend) -> None:
        for receipt in self._rng.sample(self.model.stale, min(len(self.model.stale), 2)):
            wrong = msgspec.structs.replace(receipt, claim=receipt.claim[::-1])
            assert await backend.extend([receipt, wrong], 60) == [False, False]
            assert await settle(backend, wrong) is False

    async def die(self, backend: QueueBackend) -> None:
        session = self._rng.choice([ME, OTHER])
        for ended in await backend.end_claims({session}):
            assert ended.session == session
            alone = ended.id in self.model.suspects
            spent = alone and self.model.attempts(ended.id) >= 3
            assert ended.state == ("dead" if spent else "waiting")
            self.model.end(ended.id, finished="dead" if spent else "", returned=not alone)
            if not spent:
                self.model.suspects.add(ended.id)

    async def look(self, backend: QueueBackend) -> None:
        counts = await backend.count()
        live = self.model.live.values()
        assert sum(counts.get(state, 0) for state in LIVE) == len(live)
        assert counts.get("claimed", 0) == sum(receipt is not None for receipt in live)
        finished = Counter(self.model.finished.values())
        assert {state: counts.get(state, 0) for state in FINISHED} == {
            state: finished[state] for state in FINISHED
        }


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_walk_keeps_every_guarantee(location: QueueLocation, seed: int) -> None:
    """Two backends, with lost replies: no message is lost, doubled or miscounted."""
    walk = Walk(location, [await location.open("walk") for _ in range(2)], seed)
    for _ in range(150):
        await walk.step()
    backend = await location.open("walk")
    await drain(backend, walk.model)
    await walk.look(backend)
    assert walk.model.live == {}


async def drain(backend: QueueBackend, model: Model) -> None:
    """Complete all remaining messages."""
    for name in [name for name, receipt in model.live.items() if receipt is not None]:
        receipt = model.live[name]
        assert receipt is not None
        assert await settle(backend, receipt)
        model.end(name, finished="completed")
    for suspects in (False, True):
        while True:
            claimed = await backend.claim(
                50, session=ME, visibility=60, suspects=suspects, tasks=TASKS
            )
            model.take(claimed, suspects=suspects)
            for message in claimed.messages:
                assert await settle(backend, message.receipt)
                model.end(message.id, finished="completed")
            if not claimed.messages:
                break


async def test_only_messages_of_the_requested_tasks_are_claimed(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """New ones, those that waited, and suspects; other claims still get the others."""
    await backend.push(new_messages(1, 2, task="a"))
    await backend.push(new_messages(3, 4, task="b"))
    await backend.push(new_messages(5))
    await backend.push(new_messages(6, task="b", delay=50))
    assert values(await claim(backend, tasks=[])) == []
    assert values(await claim(backend, tasks=["x"])) == []
    (waiting, lapsed) = await claim(backend, 2, tasks=["b"])
    assert values([waiting, lapsed]) == [3, 4]
    assert await settle(backend, waiting.receipt, "retry", delay=30)
    assert [each.id for each in await backend.end_claims({ME})] == [lapsed.id]
    found = await backend.claim(10, session=ME, visibility=60, tasks={"a"})
    assert (values(found.messages), found.suspects, found.due) == ([1, 2], False, None)
    found = await backend.claim(10, session=ME, visibility=60, tasks={"b"})
    assert (found.messages, found.suspects) == ([], True)
    assert found.due == pytest.approx(30, abs=10)
    assert values(await claim(backend, suspects=True, tasks=["a", ""])) == []
    assert values(await claim(backend, suspects=True, tasks=["b"])) == [4]
    location.advance(31)
    assert values(await claim(backend)) == [5]
    assert values(await claim(backend, tasks=["", "a"])) == []
    assert values(await claim(backend, tasks=["b"])) == [3]
    location.advance(20)
    assert values(await claim(backend, tasks=["", "b"])) == [6]


async def test_messages_of_several_tasks_are_claimed_in_order(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """With those without a task; first those that waited. All of them are counted and shown."""
    for number, task in enumerate(["a", "", "b", "a", "", "c"]):
        await backend.push(new_messages(number, task=task))
    await backend.push(new_messages(6, task="b", delay=20))
    assert await backend.count() == {"ready": 6, "waiting": 1}
    shown = [*await backend.browse("ready"), *await backend.browse("waiting")]
    assert [each.task for each in shown] == ["a", "", "b", "a", "", "c", "b"]
    known = ["a", "b", "", "x"]
    assert values(await claim(backend, 2, tasks=known)) == [0, 1]
    location.advance(21)
    later = [2, 3, 4, 6] if isinstance(location, PagesQueues) else [2, 6, 3, 4]
    assert values(await claim(backend, 2, tasks=known)) == later[:2]
    assert values(await claim(backend, tasks=known)) == later[2:]
    assert values(await claim(backend, tasks=known)) == []
    assert [each.task for each in await backend.browse("claimed")] == ["a", "", "b", "a", "", "b"]
    assert await backend.purge(["ready", "waiting"]) == 1
    assert await backend.count() == {"claimed": 6}


@pytest.mark.parametrize("fate", ["retry", "lapse", "bury"])
async def test_a_message_keeps_its_task(
    location: QueueLocation, backend: QueueBackend, fate: str
) -> None:
    """Whatever happens to it."""
    await backend.push(new_messages(1, task="a"))
    message = await take(backend, tasks=["a"])
    assert message.task == "a"
    match fate:
        case "lapse":
            await backend.end_claims({ME})
        case _:
            await settle(backend, message.receipt, fate)  # type: ignore[arg-type]
            await backend.redrive()
    assert await claim(backend, tasks=["b", ""], suspects=fate == "lapse") == []
    again = await take(backend, tasks=["a"], suspects=fate == "lapse")
    assert (again.id, again.task) == (message.id, "a")


async def test_large_messages_are_all_delivered(backend: QueueBackend) -> None:
    """A claim may have fewer than there are: then it says that there are more."""
    text = "x" * (MAX_MESSAGE - 100)
    batch = [NewMessage(id=f"{n:02}", value=text, max_attempts=4) for n in range(40)]
    await push_all(backend, batch, 10)
    found: list[str] = []
    while len(found) < 40:
        claimed = await backend.claim(40, session=ME, visibility=60)
        assert claimed.messages
        found += [each.id for each in claimed.messages]
        assert claimed.more or len(found) == 40
    assert found == [each.id for each in batch]


async def test_an_id_that_waits_is_in_use(backend: QueueBackend) -> None:
    """A push of the same message is refused as a whole, alone or among others."""
    await backend.push(new_messages(*range(1, 5)))
    one, two = await claim(backend, 2)
    assert await settle(backend, one.receipt, "retry")
    assert await settle(backend, two.receipt, "release")
    with pytest.raises(Exception, match=r"(?i)unique"):
        await backend.push(new_messages(3))
    with pytest.raises(Exception, match=r"(?i)unique"):
        await backend.push(new_messages(7, 1, 8))
    assert await backend.count() == {"ready": 2, "waiting": 2}


async def test_each_message_of_a_claim_is_recorded_separately(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """With its own time and errors; each is forgotten in its own time, and not redelivered."""
    await backend.push(new_messages(1))
    assert await settle(backend, (await take(backend)).receipt, "retry", error="boom")
    await backend.push(new_messages(2, 3))
    one, two, three = await claim(backend, visibility=1000)
    assert await settle(backend, one.receipt)
    location.advance(100)
    assert await settle(backend, two.receipt)
    first, second = await backend.browse("completed")
    assert (first.id, second.id) == (one.id, two.id)
    assert [each.error for each in first.errors] == ["boom"]
    assert (second.errors, first.deliveries, second.deliveries) == ((), 2, 1)
    assert first.finished is not None
    assert second.finished == pytest.approx(first.finished + 100, abs=30)
    (rest,) = await backend.browse("completed", after=first.cursor)
    assert rest.id == two.id
    assert await backend.forget("completed", older_than=60) == 1
    assert await settle(backend, three.receipt)
    location.advance(50)
    assert await backend.forget("completed", older_than=60) == 0
    location.advance(20)
    assert await backend.forget("completed", older_than=60) == 2
    assert await backend.count() == {}


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_completed_messages_are_listed_in_pages(
    location: QueueLocation, backend: QueueBackend, limit: int
) -> None:
    """By the time of their end, whichever claims they were in, and however these end."""
    dice = random.Random(limit)
    waiting, held, order = 40, list[Message](), list[str]()
    await backend.push(new_messages(*range(waiting)))
    while waiting or held:
        if waiting and dice.random() < 0.4:
            claimed = await claim(backend, dice.choice((1, 2, 4)), visibility=1000)
            waiting -= len(claimed)
            held += claimed
        elif held:
            message = held.pop(dice.randrange(min(len(held), 6)))
            move: Transition = dice.choice(("complete", "complete", "bury"))
            assert await settle(backend, message.receipt, move)
            order += [message.id] if move == "complete" else []
            location.advance(1)
    found: list[str] = []
    after = ""
    while page := await backend.browse("completed", after=after, limit=limit):
        found += [each.id for each in page]
        after = page[-1].cursor
    assert found == order


async def test_a_claim_that_is_closed_late_hides_no_completed_message(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """What was completed before it was closed is listed before, and what came later after it."""
    await backend.push(new_messages(*range(5)))
    early, buried = await claim(backend, 2, visibility=1000)
    second, slow = await take(backend, 1), await take(backend, 1, visibility=1000)
    for message in (early, second):
        assert await settle(backend, message.receipt)
        location.advance(1)
    assert await settle(backend, buried.receipt, "bury")
    location.advance(1)
    quick = await take(backend, 1)
    for message in (quick, slow):
        location.advance(1)
        assert await settle(backend, message.receipt)
    found, after = list[str](), ""
    while page := await backend.browse("completed", after=after, limit=1):
        found.append(page[0].id)
        after = page[0].cursor
    assert found == [each.id for each in (early, second, quick, slow)]


@pytest.mark.parametrize("task", ["", "a"])
async def test_a_paused_queue_delivers_nothing(
    location: QueueLocation, backend: QueueBackend, task: str
) -> None:
    """No ready, due or suspect messages; those in flight continue."""
    other, beside = await location.open("emails"), await location.open("beside")
    wanted = None if task == "" else [task]
    await backend.push(new_messages(1, 2, 3, task=task))
    await beside.push(new_messages(9))
    kept, lapsed = await claim(backend, 2, tasks=wanted)
    location.advance(61)
    assert await backend.extend([kept.receipt], 600) == [True]
    assert [each.id for each in await backend.end_claims()] == [lapsed.id]
    assert await other.pause("a deployment") is True
    for _ in range(2):
        claimed = await backend.claim(10, session=ME, visibility=60, tasks=wanted)
        assert (claimed.messages, claimed.suspects) == ([], False)
    assert await claim(backend, 1, suspects=True, tasks=wanted) == []
    assert await backend.count() == {"claimed": 1, "ready": 1, "waiting": 1}
    assert await settle(backend, kept.receipt)
    assert values(await claim(beside)) == [9]
    assert await backend.resume() is True
    assert values(await claim(backend, suspects=True, tasks=wanted)) == [2]
    assert values(await claim(backend, tasks=wanted)) == [3]


async def test_pausing_or_resuming_again_changes_nothing(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """So a request can be repeated after a lost reply; the first reason stays."""
    assert await backend.resume() is False
    assert await backend.pause("first") is True
    (content,) = (await location.open_directory().read_contents()).values()
    assert await backend.pause("second") is False
    (again,) = (await location.open_directory().read_contents()).values()
    assert content.pause == again.pause
    assert content.pause is not None
    assert content.pause.reason == "first"
    location.faults.lost_replies = 1
    if heals(location):
        assert await backend.resume() is True
    else:
        with pytest.raises(OutcomeUnknown):
            await backend.resume()
    assert await backend.resume() is False
    assert await location.open_directory().read_contents() == {}


async def test_resuming_wakes_waiters(location: QueueLocation, backend: QueueBackend) -> None:
    """Long before their timeout, from any backend."""
    other = await location.open("emails")
    await backend.push(new_messages(1))
    await backend.pause()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        waiting = group.create_task(backend.wait(3600))
        while not waiting.done():
            await other.pause()
            await other.resume()
            await asyncio.sleep(0.05)
    assert values(await claim(backend)) == [1]


async def test_a_directory_lists_every_queue(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """With the messages in each state, their sessions, and the age of the oldest."""
    beside = await location.open("beside")
    await backend.push(new_messages(0, 1, 2, 3, 4))
    await pass_time(location)
    await backend.push(new_messages(5, delay=100))
    mine, *_ = await claim(backend, 3)
    await claim(backend, 1, session=OTHER)
    await settle(backend, mine.receipt)
    await beside.push(new_messages(6))
    await settle(beside, (await take(beside)).receipt, "bury")
    found = await location.open_directory().read_contents()
    assert list(found) == ["beside", "emails"]
    emails = found["emails"]
    assert emails.counts == {"ready": 1, "waiting": 1, "claimed": 3, "completed": 1}
    assert emails.claims == {ME: 2, OTHER: 1}
    (ready,), (waiting,) = await backend.browse("ready"), await backend.browse("waiting")
    assert emails.oldest == pytest.approx(ready.enqueued, rel=0, abs=0.01)
    assert waiting.enqueued - ready.enqueued > 0.02
    assert (found["beside"].counts, found["beside"].oldest) == ({"dead": 1}, None)


async def test_a_directory_finds_messages_in_any_queue(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Live or finished, as `browse` shows them; unreadable ones are shown as text."""
    beside = await location.open("beside")
    await backend.push(new_messages(1, 2))
    await beside.push(new_messages(3))
    await settle(beside, (await take(beside)).receipt, "bury", error="no")
    if not heals(location):
        location.damage("id-2", "{broken")
    found = {
        kept.id: kept for kept in await location.open_directory().find(["id-1", "id-2", "id-3"])
    }
    assert {name: kept.queue for name, kept in found.items()} == {
        "id-1": "emails",
        "id-2": "emails",
        "id-3": "beside",
    }
    (ready, _) = await backend.browse("ready")
    assert msgspec.structs.replace(found["id-1"], seen=ready.seen) == ready
    if not heals(location):
        assert (found["id-2"].value, found["id-2"].is_readable) == ("{broken", False)
    assert [each.error for each in found["id-3"].errors] == ["no"]
    assert await location.open_directory().find(["id-4", "id\0", "id\n", "\ud800"]) == []
    with pytest.raises(Invalid, match="after must not contain NUL"):
        await location.open_directory().list("emails", "queue", after="\0", limit=1)


@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_a_directory_lists_the_messages_of_a_queue_page_by_page(
    location: QueueLocation, backend: QueueBackend, limit: int
) -> None:
    """By id, each once: claimed and others; dead letters apart; nothing of another queue."""
    beside, directory = await location.open("beside"), location.open_directory()
    for queue, parity in ((backend, 0), (beside, 1)):
        await queue.push(new_messages(*range(parity, 16, 2)))
        for message in (await claim(queue, 5))[:3]:
            await settle(queue, message.receipt, "bury")
        await settle(queue, (await take(queue, 1)).receipt)
    expected = {"dead": ["id-0", "id-2", "id-4"], "queue": ["id-12", "id-14", "id-6", "id-8"]}
    for part in ("dead", "queue"):
        found, after = list[str](), ""
        while page := await directory.list("emails", part, after=after, limit=limit):
            found += [each.id for each in page]
            after = page[-1].id
        assert found == expected[part]


@pytest.mark.parametrize("state", ["ready", "waiting", "claimed", "completed", "dead"])
async def test_a_queue_changes_only_its_own_messages(
    location: QueueLocation, backend: QueueBackend, state: str
) -> None:
    """Whoever names those of another changes nothing."""
    other = await location.open("letters")
    await backend.push(new_messages(1, delay=60 if state == "waiting" else 0))
    if state not in {"ready", "waiting"}:
        message = await take(backend)
        if state != "claimed":
            move: Transition = "complete" if state == "completed" else "bury"
            await settle(backend, message.receipt, move)
    assert await other.cancel("id-1") is None
    assert await other.delete("id-1") == "absent"
    assert not await other.run_now("id-1")
    assert await other.redrive(["id-1"]) == 0
    assert await other.purge([*LIVE, *FINISHED]) == 0
    assert await backend.count() == {state: 1}


async def test_one_message_is_shown_in_each_state(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """With its own queue only; an unknown id is no error."""
    await backend.push(new_messages(1, 2, 3, 4, 5))
    await backend.push(new_messages(6, delay=60))
    other = await location.open("letters")
    assert await other.get("id-1") is None
    assert await backend.get("id-99") is None
    claimed = await claim(backend, 4)
    moves: list[Transition] = ["complete", "bury", "cancel", "retry"]
    for message, move in zip(claimed, moves, strict=True):
        await settle(backend, message.receipt, move, delay=30)
    states = {}
    for number in range(1, 7):
        info = await backend.get(f"id-{number}")
        assert info is not None
        assert (info.id, info.queue) == (f"id-{number}", "emails")
        states[number] = info.state
    assert states == {
        1: "completed",
        2: "dead",
        3: "cancelled",
        4: "waiting",
        5: "ready",
        6: "waiting",
    }


@pytest.mark.parametrize("delay", [0, 60, 600])
async def test_a_message_that_is_not_claimed_is_cancelled(
    location: QueueLocation, backend: QueueBackend, delay: float
) -> None:
    """Nobody claims it any more; it is shown, says why, and is redriven by id with its payload."""
    await backend.push(new_messages(1, delay=delay))
    await backend.push(new_messages(2))
    ended = await backend.cancel("id-1")
    assert ended is not None
    assert (ended.id, ended.state, ended.attempt, ended.session) == ("id-1", "cancelled", 0, "")
    assert await backend.cancel("id-1") is None
    assert await backend.cancel("id-99") is None
    location.advance(700)
    assert values(await claim(backend)) == [2]
    assert await backend.cancel("id-2") is not None
    kept = await backend.browse("cancelled")
    assert [(info.id, info.value, info.errors[-1].error) for info in kept] == [
        ("id-1", {"n": 1}, REVOKED),
        ("id-2", {"n": 2}, REVOKED),
    ]
    assert await backend.redrive(["id-1"]) == 1
    message = await take(backend)
    assert (message.value, message.attempt, message.receipt.deliveries) == ({"n": 1}, 1, 1)


@pytest.mark.parametrize("move", ["complete", "cancel", "retry"])
async def test_the_claim_of_a_cancelled_message_has_ended(
    backend: QueueBackend, move: Transition
) -> None:
    """Its receipt is stale; the other messages of the claim are not touched."""
    await backend.push(new_messages(1, 2, 3))
    one, two, three = await claim(backend)
    await settle(backend, one.receipt)
    ended = await backend.cancel("id-2")
    assert ended is not None
    assert (ended.attempt, ended.session) == (1, ME)
    assert await backend.extend([two.receipt, three.receipt], 60) == [False, True]
    assert not await settle(backend, two.receipt, move, delay=5)
    assert await settle(backend, three.receipt, move, delay=5)
    info = await backend.get("id-2")
    assert info is not None
    assert (info.state, info.value, info.attempts, info.deliveries) == ("cancelled", {"n": 2}, 1, 1)
    assert [failure.error for failure in info.errors] == [REVOKED]
    assert await backend.cancel("id-1") is None
    assert await backend.redrive(["id-2"]) == 1
    message = await take(backend)
    assert (message.id, message.attempt, message.receipt.deliveries) == ("id-2", 1, 2)
    assert not await settle(backend, two.receipt)
    assert await settle(backend, message.receipt)


async def test_a_cancelled_suspect_is_no_suspect_when_it_is_redriven(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """It has done nothing since."""
    await backend.push(new_messages(1))
    await claim(backend)
    await backend.end_claims([ME])
    assert await backend.cancel("id-1") is not None
    assert await backend.redrive(["id-1"]) == 1
    assert (await take(backend)).id == "id-1"


async def test_a_message_is_deleted_unless_it_is_claimed(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """In every other state, and for good; the claim of a completed one still answers."""
    await backend.push(new_messages(1, 2, 3, 4, 5))
    await backend.push(new_messages(6, delay=600))
    done, dead, cancelled, claimed = await claim(backend, 4)
    result = StoredResult('{"rows": 3}')
    await settle(backend, done.receipt, result=result)
    await settle(backend, dead.receipt, "bury", error="boom")
    await settle(backend, cancelled.receipt, "cancel")
    deleted = {number: await backend.delete(f"id-{number}") for number in (1, 2, 3, 4, 5, 6, 7)}
    assert deleted == {
        **dict.fromkeys((1, 2, 3, 5, 6), "deleted"),
        4: "claimed",
        7: "absent",
    }
    assert await backend.count() == {"claimed": 1}
    assert await backend.delete("id-1") == "absent"
    assert await backend.get("id-1") is None
    assert await settle(backend, claimed.receipt)
    location.advance(700)
    assert await claim(backend) == []
    if isinstance(location, PostgresQueues | SqliteQueues):
        assert location.execute("SELECT count(*) FROM {}.jobsync_result")[0][0] == 0


async def test_a_delay_is_ended_from_outside(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A delay of a push, short or long, and a pause after a failure; nothing else changes."""
    for number, delay in ((1, 30), (2, 600)):
        await backend.push(new_messages(number, delay=delay))
    await backend.push(new_messages(3))
    failed = await take(backend)
    await settle(backend, failed.receipt, "retry", delay=300, error="boom")
    assert await claim(backend) == []
    for number in (1, 2, 3):
        assert await backend.run_now(f"id-{number}")
    claimed = {message.id: message.attempt for message in await claim(backend)}
    assert claimed == {"id-1": 1, "id-2": 1, "id-3": 2}
    await backend.push(new_messages(4))
    for name in ("id-1", "id-4", "id-99"):
        assert not await backend.run_now(name)
    assert values([await take(backend)]) == [4]


async def test_a_waiting_worker_hears_of_an_ended_delay(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """It need not poll."""
    await backend.push(new_messages(1, delay=60))
    await claim(backend)
    waiting = asyncio.create_task(backend.wait(60))
    await asyncio.sleep(0)
    assert await backend.run_now("id-1")
    async with asyncio.timeout(10):
        await waiting
    assert (await take(backend)).id == "id-1"


@pytest.mark.parametrize("call", ["cancel", "cancel claimed", "delete", "run_now"])
async def test_an_operation_whose_reply_was_lost_is_not_done_twice(
    location: QueueLocation, backend: QueueBackend, call: str
) -> None:
    """Pages send it again; a database says that the outcome is unknown, and it is done."""
    is_claimed = call == "cancel claimed"
    await backend.push(new_messages(1, delay=0 if is_claimed else 60))
    if is_claimed:
        await take(backend)
    operate = getattr(backend, call.partition(" ")[0])
    # A claimed message is looked for among the others first.
    location.faults.lost_replies = 1
    if heals(location) or (is_claimed and isinstance(location, PostgresQueues)):
        with contextlib.suppress(OutcomeUnknown):
            await operate("id-1")
    else:
        with pytest.raises(OutcomeUnknown):
            await operate("id-1")
    await operate("id-1")
    info = await backend.get("id-1")
    if call == "delete":
        assert info is None
    elif call == "run_now":
        assert (await take(backend)).attempt == 1
    else:
        assert info is not None
        assert (info.state, len(info.errors)) == ("cancelled", 1)


async def test_progress_is_shown_while_its_claim_lasts(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """The latest one; with the next renewal where requests are billed. No later claim shows it."""
    await backend.push(new_messages(1, 2))
    one, two = await claim(backend)
    for progress, note in ((0.2, ""), (0.4, 'rows "400" of \\ 1.000 für Ämter')):
        await backend.report_progress([ProgressReport(one.receipt, progress, note)])
    await backend.extend([one.receipt, two.receipt], 60)
    info, other = await backend.get("id-1"), await backend.get("id-2")
    assert info is not None
    assert other is not None
    assert (info.progress, info.progress_note) == (0.4, 'rows "400" of \\ 1.000 für Ämter')
    assert info.progress_at is not None
    assert abs(info.progress_at - info.seen) < 60
    assert other.progress is None
    (found,) = await location.open_directory().find(["id-1"])
    assert found.progress == 0.4
    await settle(backend, one.receipt, "retry", error="boom")
    again = await take(backend)
    # A late report of the claim before.
    await backend.report_progress([ProgressReport(one.receipt, 0.9, "")])
    await backend.extend([again.receipt], 60)
    info = await backend.get("id-1")
    assert info is not None
    assert (info.state, info.progress, info.progress_note) == ("claimed", None, "")
    await backend.report_progress([ProgressReport(again.receipt, 0.1, "")])
    await backend.report_progress([ProgressReport(one.receipt, 0.9, "")])
    await backend.extend([again.receipt], 60)
    info = await backend.get("id-1")
    assert info is not None
    assert info.progress == 0.1
    await settle(backend, again.receipt)
    await backend.clear_progress(["id-1"])
    info = await backend.get("id-1")
    assert info is not None
    assert (info.state, info.progress) == ("completed", None)


async def test_a_result_is_kept_with_its_completed_message(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Beside messages without one, and with the reason if it could not be kept."""
    await backend.push(new_messages(1, 2, 3, 4))
    messages = await claim(backend)
    value = {"rows": [1, 2.5, None, 'Zeile \n \\ " für'], "ok": True}
    results = [
        StoredResult(msgspec.json.encode(value).decode()),
        None,
        StoredResult(None, "it is too large"),
        StoredResult("0"),
    ]
    settlements = [
        Settlement(receipt=message.receipt, move="complete", result=result)
        for message, result in zip(messages, results, strict=True)
    ]
    assert await backend.settle(settlements) == [True] * 4
    assert await backend.settle(settlements) == [True] * 4
    found = {}
    for number in range(1, 5):
        info = await backend.get(f"id-{number}")
        assert info is not None
        assert info.state == "completed"
        found[number] = (info.result, info.result_problem)
    assert found == {1: (value, ""), 2: (None, ""), 3: (None, "it is too large"), 4: (0, "")}


async def test_the_deepest_result_that_a_backend_allows_is_kept(backend: QueueBackend) -> None:
    """A page has it within its messages; one that is nested deeper is refused before it is sent."""
    deepest = nest(backend.max_depth)
    await backend.push(new_messages(1))
    result = build_result(deepest, backend.max_result, backend.max_depth)
    assert await settle(backend, (await take(backend)).receipt, result=result)
    info = await backend.get("id-1")
    assert info is not None
    assert (info.result, info.result_problem) == (deepest, "")
    assert build_result([deepest], backend.max_result, backend.max_depth).problem


async def test_a_value_that_is_nested_too_deeply_fails_no_push_beside_it(
    backend: QueueBackend,
) -> None:
    """Pushes of one process are sent together; only the one with the fault raises."""
    deep = NewMessage(id="id-2", value=nest(65), max_attempts=4)
    limit = NewMessage(id="id-3", value=nest(backend.max_depth), max_attempts=4)
    batches = [new_messages(1), [deep], [limit], new_messages(4)]
    first, refused, *rest = await asyncio.gather(
        *map(backend.push, batches), return_exceptions=True
    )
    assert [type(each) for each in (first, refused, *rest)] == [dict, Invalid, dict, dict]
    assert [each.receipt.id for each in await claim(backend)] == ["id-1", "id-3", "id-4"]


async def test_only_the_claim_that_completes_a_message_leaves_its_result(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A stale one does not, nor does a settlement whose reply was lost change it."""
    await backend.push(new_messages(1))
    stale = await take(backend)
    await backend.end_claims([ME])
    message = await take(backend, suspects=True)
    assert not await settle(backend, stale.receipt, result=StoredResult('"stale"'))
    location.faults.lost_replies = 2
    assert await settle(backend, message.receipt, result=StoredResult('"right"'))
    assert not await settle(backend, stale.receipt, result=StoredResult('"stale"'))
    info = await backend.get("id-1")
    assert info is not None
    assert info.result == "right"


async def test_settlements_with_and_without_results_share_a_batch(backend: QueueBackend) -> None:
    """Some of them fail, others return something, and all are settled."""
    await backend.push(new_messages(1, 2, 3))
    one, two, three = await claim(backend)
    batch = [
        Settlement(receipt=one.receipt, move="retry", delay=60, error="boom"),
        Settlement(receipt=two.receipt, move="complete", result=StoredResult("[2]")),
        Settlement(receipt=three.receipt, move="complete"),
    ]
    assert await backend.settle(batch) == [True] * 3
    assert await backend.count() == {"waiting": 1, "completed": 2}
    info = await backend.get("id-2")
    assert info is not None
    assert info.result == [2]


async def test_a_purge_of_other_messages_leaves_results(backend: QueueBackend) -> None:
    """What a completed message returned is shown as long as the message is."""
    await backend.push(new_messages(1, 2))
    one, two = await claim(backend)
    done = Settlement(receipt=one.receipt, move="complete", result=StoredResult("7"))
    assert await backend.settle([done]) == [True]
    assert await settle(backend, two.receipt, "bury")
    assert await backend.purge(["dead"]) == 1
    kept = await backend.get(one.id)
    assert kept is not None
    assert kept.result == 7


@pytest.mark.parametrize("way", ["purge", "delete"])
async def test_results_are_removed_with_their_messages(
    location: QueueLocation, backend: QueueBackend, way: str
) -> None:
    """Nobody can ask for them any more; those of other queues stay."""
    other = await location.open("letters")
    for each, name in ((backend, "a"), (other, "b")):
        await each.push(new_messages(name))
        message = await take(each)
        assert await settle(each, message.receipt, result=StoredResult("7"))
    if way == "purge":
        assert await backend.purge(["completed"]) == 1
    else:
        assert await backend.delete("id-a") == "deleted"
    assert await backend.get("id-a") is None
    kept = await other.get("id-b")
    assert kept is not None
    assert kept.result == 7
    if isinstance(location, PostgresQueues | SqliteQueues):
        assert location.execute("SELECT id FROM {}.jobsync_result") == [("id-b",)]


async def test_results_are_forgotten_with_their_messages(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Not earlier, and not later."""
    await backend.push(new_messages(1))
    message = await take(backend)
    await settle(backend, message.receipt, result=StoredResult("[1]"))
    location.advance(100)
    assert await backend.forget("completed", older_than=200) == 0
    info = await backend.get("id-1")
    assert info is not None
    assert info.result == [1]
    location.advance(200)
    assert await backend.forget("completed", older_than=200) == 1
    assert await backend.get("id-1") is None
    assert isinstance(location, PostgresQueues | SqliteQueues)
    assert location.execute("SELECT count(*) FROM {}.jobsync_result")[0][0] == 0


async def test_all_old_results_are_forgotten_a_part_at_a_time(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """When the last of the messages is forgotten, so are all results."""
    await backend.push(new_messages(*range(7)))
    for _ in range(7):
        message = await take(backend, 1)
        await settle(backend, message.receipt, result=StoredResult("[1]"))
    location.advance(200)
    assert [await backend.forget("completed", older_than=100, limit=2) for _ in range(4)] == [
        *[2, 2, 2, 1]
    ]
    assert isinstance(location, PostgresQueues | SqliteQueues)
    assert location.execute("SELECT count(*) FROM {}.jobsync_result")[0][0] == 0


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_results_stay_with_messages_that_are_forgotten_later(
    location: QueueLocation, backend: QueueBackend, limit: int
) -> None:
    """Also if they are old: otherwise they would look as if they had returned nothing."""
    await backend.push(new_messages(*range(4)))
    for number in range(4):
        message = await take(backend, 1)
        result = StoredResult("[1]") if number == 3 else None
        assert await settle(backend, message.receipt, result=result)
    location.advance(200)
    # Pages remember what was completed for an hour.
    is_kept = isinstance(location, PagesQueues)
    assert await backend.forget("completed", older_than=100, limit=limit) == (
        0 if is_kept else limit
    )
    info = await backend.get("id-3")
    assert info is not None
    assert info.result == [1]


async def test_progress_stays_when_old_messages_are_forgotten(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """A handler that reports now and then is not one of a dead process."""
    await backend.push(new_messages(1, 2))
    done, running = await claim(backend, visibility=1000)
    await settle(backend, done.receipt)
    await backend.report_progress([ProgressReport(running.receipt, 0.5, "half")])
    await backend.extend([running.receipt], 1000)
    location.advance(1)
    await backend.forget("completed", older_than=0)
    info = await backend.get("id-2")
    assert info is not None
    assert (info.progress, info.progress_note) == (0.5, "half")


def age_progress(location: PostgresQueues | SqliteQueues, seconds: float, *ids: str) -> None:
    """Make reports about messages older."""
    by = f"interval '{seconds} s'" if isinstance(location, PostgresQueues) else seconds
    names = ", ".join(f"'{name}'" for name in ids)
    location.execute(
        f"UPDATE {{}}.jobsync_progress SET reported = reported - {by}"
        f" WHERE id IN ({names}) RETURNING 1"
    )


async def test_progress_has_the_time_of_its_latest_report(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """People see from it whether a handler still works."""
    assert isinstance(location, PostgresQueues | SqliteQueues)
    await backend.push(new_messages(1))
    message = await take(backend)
    await backend.report_progress([ProgressReport(message.receipt, 0.5, "half")])
    age_progress(location, 5000, "id-1")
    for age, progress, note in ((5000, 0.5, "half"), (0, 0.5, ""), (0, 0.7, "more")):
        if not age:
            await backend.report_progress([ProgressReport(message.receipt, progress, note)])
        info = await backend.get("id-1")
        assert info is not None
        assert info.progress_at is not None
        assert info.seen - info.progress_at == pytest.approx(age, abs=60)
        assert (info.progress, info.progress_note) == (progress, note)


@pytest.mark.parametrize("older_than", [0, 2 * 86_400])
async def test_progress_of_dead_processes_is_forgotten_after_a_day(
    location: QueueLocation, older_than: float
) -> None:
    """Or with completed messages, if these are kept for longer; and in its own queue only."""
    assert isinstance(location, PostgresQueues | SqliteQueues)
    ages = [23, 25, 47, 49]
    queues = {name: await location.open(name) for name in ("emails", "letters")}
    for name, backend in queues.items():
        await backend.push(new_messages(*(f"{name}-{age}" for age in ages)))
        for message in await claim(backend):
            await backend.report_progress([ProgressReport(message.receipt, 0.5, "")])
    for age in ages:
        age_progress(location, 3600 * age, f"id-emails-{age}", f"id-letters-{age}")
    await queues["letters"].forget("completed", older_than=older_than)
    left = location.execute("SELECT id FROM {}.jobsync_progress")
    kept = [age for age in ages if age <= max(24, older_than / 3600)]
    assert {name for (name,) in left} == {
        *(f"id-emails-{age}" for age in ages),
        *(f"id-letters-{age}" for age in kept),
    }


async def test_those_who_wait_for_an_end_are_woken_by_a_result(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Of another backend, too; a store that does not tell returns after the time."""
    other = await location.open("emails")
    await backend.push(new_messages(1))
    message = await take(backend)
    is_told = not heals(location)
    waiting = asyncio.create_task(other.wait_for_end(60 if is_told else 0.01))
    await asyncio.sleep(0.05)
    await settle(backend, message.receipt, result=StoredResult("[1]"))
    async with asyncio.timeout(20):
        await waiting


@pytest.mark.parametrize("state", ["ready", "waiting", "claimed", "completed", "dead", "cancelled"])
async def test_messages_of_newer_code_are_not_changed_from_outside(
    location: QueueLocation, backend: QueueBackend, state: str
) -> None:
    """In whatever state they are: nobody here knows what else that would have to change."""
    await backend.push(new_messages(1, delay=60 if state == "waiting" else 0))
    table = "jobsync_finished" if state in {"dead", "cancelled"} else "jobsync_message"
    if state not in {"ready", "waiting"}:
        message = await take(backend)
        moves: dict[str, Transition] = {"completed": "complete", "dead": "bury"}
        if state != "claimed":
            await settle(backend, message.receipt, moves.get(state, "cancel"))
    if state == "completed":
        assert isinstance(location, SqliteQueues | PostgresQueues)
        location.execute("UPDATE {}.jobsync_claim SET format = 99 RETURNING 1")
    else:
        location.overwrite(table, "id-1", format=99)
    location.advance(1000 if state != "waiting" else 1)
    assert await backend.cancel("id-1") is None
    assert await backend.delete("id-1") == ("claimed" if state == "claimed" else "absent")
    assert not await backend.run_now("id-1")
    assert await backend.redrive(["id-1"]) == 0
    assert await backend.purge([*LIVE, *FINISHED]) == 0
    if state in FINISHED:
        assert await backend.forget(state, older_than=0) == 0
    info = await backend.get("id-1")
    assert info is not None
    assert (info.state, info.format) == (state, 99)
    assert await backend.count() == {state: 1}
    unfinished = {99: 1} if state in LIVE else {}
    assert await backend.find_newer() == unfinished


async def test_a_message_that_is_cancelled_while_others_handle_it_ends_once(
    location: QueueLocation, backend: QueueBackend
) -> None:
    """Either its handler or the cancel is told that it ended the message, and never both."""
    other = await location.open("emails")
    await backend.push(new_messages(*range(40)))
    settled: set[str] = set()

    async def work() -> None:
        for number in range(30):
            messages = await claim(backend, 4)
            moves: list[Transition] = ["complete", "release"] if number < 15 else ["complete"]
            answers = await backend.settle(
                [
                    Settlement(receipt=each.receipt, move=moves[place % len(moves)])
                    for place, each in enumerate(messages)
                ]
            )
            for place, (each, is_settled) in enumerate(zip(messages, answers, strict=True)):
                if is_settled and moves[place % len(moves)] == "complete":
                    settled.add(each.id)

    async def cancel() -> set[str]:
        order = random.Random(7).sample(range(40), 20)
        return {f"id-{n}" for n in order if await other.cancel(f"id-{n}") is not None}

    _, cancelled = await asyncio.gather(work(), cancel())
    assert settled.isdisjoint(cancelled)
    assert len(settled) + len(cancelled) == 40
    counts = await backend.count()
    assert (counts.get("completed", 0), counts.get("cancelled", 0)) == (
        len(settled),
        len(cancelled),
    )
