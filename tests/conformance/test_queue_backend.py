"""What every queue port promises. A new kind is one more case of `place`."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from queue_places import PostgresQueues, QueuePlace, SqliteQueues

from jobsync import Components, Event, Invalid, OutcomeUnknown, Unavailable
from jobsync.core.messages import FINISHED, LIVE, Transition
from jobsync.queue.backend import (
    MAX_MESSAGE,
    ClaimResult,
    Message,
    NewMessage,
    QueueBackend,
    Receipt,
    Settlement,
)

ME, OTHER = "worker-1.a", "worker-2.b"


@pytest.fixture(params=["sqlite", "postgres"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[QueuePlace]:
    """A fresh place on each kind of port."""
    place: QueuePlace
    if request.param == "sqlite":
        place = SqliteQueues(tmp_path / "jobs.db")
    else:
        place = PostgresQueues(request.getfixturevalue("postgres").url)
    yield place
    await place.close()


@pytest.fixture
async def port(place: QueuePlace) -> QueueBackend:
    """A port to an empty queue."""
    return await place.open("emails")


def letters(*values: Any, **options: Any) -> list[NewMessage]:
    """Make messages that are named by what they hold."""
    options = {"max_attempts": 4, **options}
    return [NewMessage(id=f"id-{value}", value={"n": value}, **options) for value in values]


async def claim(port: QueueBackend, limit: int = 10, **options: Any) -> list[Message]:
    """Claim as `ME`, for a minute, unless told otherwise."""
    claimed = await port.claim(limit, **{"session": ME, "visibility": 60, **options})
    return claimed.messages


async def take(port: QueueBackend, limit: int = 10, **options: Any) -> Message:
    """Claim the one message that there is."""
    (message,) = await claim(port, limit, **options)
    return message


def values(messages: list[Message]) -> list[Any]:
    """Give what messages hold."""
    return [message.value["n"] for message in messages]


async def settle(
    port: QueueBackend, receipt: Receipt, move: Transition = "complete", **how: Any
) -> bool:
    """Settle one claim."""
    (done,) = await port.settle([Settlement(receipt=receipt, move=move, **how)])
    return done


async def test_what_is_pushed_is_claimed_in_order_and_completed_for_good(
    port: QueueBackend,
) -> None:
    """Two batches, three claims; afterwards nothing is left but the count."""
    await port.push(letters(1, 2, 3))
    await port.push(letters(4, 5))
    assert values(await claim(port, 2)) == [1, 2]
    rest = await claim(port, 2) + await claim(port, 2)
    assert values(rest) == [3, 4, 5]
    assert await claim(port) == []
    assert await port.count() == {"claimed": 5}
    done = await port.settle([Settlement(receipt=each.receipt, move="complete") for each in rest])
    assert done == [True] * 3
    assert await port.count() == {"claimed": 2, "completed": 3}


async def test_a_message_arrives_as_it_was(port: QueueBackend) -> None:
    """Every kind of JSON, every script, and what only looks like a control character."""
    value: Any = {
        "text": 'a"b\\n\\u0041\n\t☃ 𝄞 {x}, %s',
        "deep": [1, -2.5, True, None, {"": []}],
        "e": "",
    }
    await port.push([NewMessage(id="x", value=value, max_attempts=7, timeout=1.5)])
    message = await take(port)
    assert message.value == value
    assert (message.id, message.attempt, message.max_attempts) == ("x", 1, 7)
    assert (message.timeout, message.is_suspect) == (1.5, False)
    assert message.enqueued == pytest.approx(Components.system().clock.wall().seconds, abs=60)


async def test_queues_are_apart(place: QueuePlace, port: QueueBackend) -> None:
    """Also where one queue's name begins as the other's does."""
    other = await place.open("emails2")
    await port.push(letters(1))
    await other.push(letters(2))
    assert values(await claim(other)) == [2]
    assert values(await claim(port)) == [1]
    assert await other.purge([*LIVE, *FINISHED]) == 1
    assert await port.count() == {"claimed": 1}


async def test_a_push_is_all_or_nothing(port: QueueBackend) -> None:
    """Whether the library refuses one of a batch, or the database does."""
    with pytest.raises(Invalid, match="message"):
        await port.push([*letters(1), NewMessage(id="y", value={1, 2}, max_attempts=1)])
    await port.push(letters(3))
    with pytest.raises(Exception, match=r"(?i)unique"):
        await port.push(letters(1, 2, 3))
    assert await port.count() == {"ready": 1}


@pytest.mark.parametrize("size", [MAX_MESSAGE, MAX_MESSAGE + 1])
async def test_a_message_has_at_most_256_kilobytes(port: QueueBackend, size: int) -> None:
    """One byte more is refused, with what to do instead."""
    letter = NewMessage(id="big", value="x" * (size - 2), max_attempts=1)
    if size > MAX_MESSAGE:
        with pytest.raises(Invalid, match="Store large content elsewhere"):
            await port.push([letter])
        assert await port.count() == {}
    else:
        await port.push([letter])
        assert (await take(port)).value == letter.value


async def test_too_large_a_batch_is_refused(port: QueueBackend) -> None:
    """And an empty one is nothing."""
    await port.push([])
    with pytest.raises(Invalid, match=r"10,001 messages.*Push in parts"):
        await port.push(letters(*range(10_001)))
    assert await port.settle([]) == []


async def test_of_many_who_claim_one_has_each_message(place: QueuePlace) -> None:
    """Several ports at once: every message is claimed exactly once."""
    ports = [await place.open("emails") for _ in range(4)]
    await ports[0].push(letters(*range(200)))

    async def drain(port: QueueBackend, session: str) -> list[str]:
        found = []
        while messages := await claim(port, 7, session=session):
            found += [message.id for message in messages]
        return found

    found = await asyncio.gather(*(drain(port, f"w{n}") for n, port in enumerate(ports)))
    assert sorted(itertools.chain(*found)) == sorted(letter.id for letter in letters(*range(200)))


async def test_a_delayed_message_is_not_claimed_before_its_time(
    place: QueuePlace, port: QueueBackend
) -> None:
    """And whoever finds nothing is told when to come again."""
    await port.push(letters(1, delay=100))
    claimed = await port.claim(10, session=ME, visibility=60)
    assert claimed.messages == []
    assert claimed.next == claimed.due == pytest.approx(100, abs=30)
    assert claimed.lapse is None
    place.let_pass(60)
    assert await claim(port) == []
    place.let_pass(60)
    assert values(await claim(port)) == [1]


async def test_whoever_has_waited_goes_first(place: QueuePlace, port: QueueBackend) -> None:
    """What failed before is not put behind everything that came since."""
    await port.push(letters(1))
    assert await settle(port, (await take(port)).receipt, "retry", delay=1, error="boom")
    await port.push(letters(2, 3))
    place.let_pass(2)
    assert values(await claim(port, 1)) == [1]
    assert values(await claim(port)) == [2, 3]


async def test_failures_are_counted_and_kept(place: QueuePlace, port: QueueBackend) -> None:
    """A dead letter has its payload and every error, whatever stands in them."""
    await port.push(letters(1, max_attempts=2))
    first = await take(port)
    nasty = 'Traceback:\n\t"x" \0 \ud800 %s {} \\'
    assert await settle(port, first.receipt, "retry", error=nasty)
    second = await take(port)
    assert (second.attempt, second.receipt.deliveries) == (2, 2)
    assert await settle(port, second.receipt, "bury", error="again")
    assert await port.count() == {"dead": 1}
    (dead,) = await port.browse("dead")
    assert dead.value == {"n": 1}
    assert (dead.attempts, dead.deliveries, dead.max_attempts) == (2, 2, 2)
    assert [(each.attempt, each.session) for each in dead.errors] == [(1, ME), (2, ME)]
    assert dead.errors[0].error == 'Traceback:\n\t"x" \\0 ? %s {} \\'
    assert dead.errors[1].error == "again"
    assert dead.errors[0].at == pytest.approx(Components.system().clock.wall().seconds, abs=60)


@pytest.mark.parametrize("move", ["release", "snooze"])
async def test_what_is_given_back_spends_no_attempt(port: QueueBackend, move: Transition) -> None:
    """Deliveries grow, attempts do not; no error is kept."""
    await port.push(letters(1))
    for deliveries in (1, 2, 3):
        message = await take(port)
        assert (message.attempt, message.receipt.deliveries) == (1, deliveries)
        assert await settle(port, message.receipt, move)
    (kept,) = await port.browse("waiting")
    assert (kept.attempts, kept.deliveries, kept.errors) == (0, 3, ())


@pytest.mark.parametrize("move", ["complete", "cancel", "retry", "bury", "release", "snooze"])
async def test_a_stale_receipt_settles_and_extends_nothing(
    place: QueuePlace, port: QueueBackend, move: Transition
) -> None:
    """Once its claim was ended, whoever has the message now keeps it."""
    await port.push(letters(1))
    stale = (await take(port)).receipt
    place.let_pass(61)
    await port.end_claims()
    current = await take(port, session=OTHER, suspects=True)
    assert await port.extend([stale], 1000) == [False]
    assert await settle(port, stale, move, error="late") is False
    assert await port.list_holders() == [OTHER]
    assert await port.extend([current.receipt], 60) == [True]
    assert await settle(port, current.receipt)
    assert await settle(port, stale, move, error="later") is False
    assert await port.count() == {"completed": 1}


async def test_a_receipt_settles_once(port: QueueBackend) -> None:
    """The same again changes nothing and is no error; anything else is refused."""
    await port.push(letters(1, 2))
    one, two = await claim(port)
    for _ in range(2):
        assert await settle(port, one.receipt)
        assert await settle(port, two.receipt, "retry", delay=50, error="boom")
    assert await settle(port, one.receipt, "bury") is False
    assert await settle(port, two.receipt) is False
    assert await port.extend([one.receipt, two.receipt], 60) == [False, False]
    (waiting,) = await port.browse("waiting")
    assert len(waiting.errors) == 1
    assert await port.count() == {"completed": 1, "waiting": 1}


async def test_the_same_settlement_is_known_after_the_message_moved_on(port: QueueBackend) -> None:
    """A late repeat tells the truth even if others have claimed and finished it since."""
    await port.push(letters(1))
    first = await take(port)
    await settle(port, first.receipt, "release")
    second = await take(port, session=OTHER)
    assert await settle(port, first.receipt, "release") is True
    assert await port.list_holders() == [OTHER]
    await settle(port, second.receipt, "bury", error="boom")
    assert await settle(port, first.receipt, "release") is True
    await port.redrive()
    assert await settle(port, second.receipt, "bury", error="boom") is True
    assert await port.count() == {"waiting": 1}


async def test_a_receipt_of_a_guess_is_worth_nothing(port: QueueBackend) -> None:
    """Neither an unknown message nor an unknown claim, also where nobody has claimed it."""
    await port.push(letters(1))
    for guess in (Receipt("id-1", 0, ""), Receipt("id-1", 1, "x"), Receipt("nobody", 1, "x")):
        assert await settle(port, guess) is False
        assert await port.extend([guess], 60) == [False]
    assert await port.count() == {"ready": 1}


async def test_a_batch_is_judged_one_by_one(port: QueueBackend) -> None:
    """Different ends in one batch; a stale one spoils nothing; one message comes once."""
    await port.push(letters(1, 2, 3, 4, 5))
    messages = await claim(port)
    moves: list[Transition] = ["complete", "retry", "bury", "cancel", "release"]
    batch = [
        Settlement(receipt=each.receipt, move=move)
        for each, move in zip(messages, moves, strict=True)
    ]
    stale = Settlement(receipt=Receipt("gone", 1, "x"), move="complete")
    assert await port.settle([*batch[:2], stale, *batch[2:]]) == [True, True, False, *[True] * 3]
    expected = {"completed": 1, "waiting": 2, "dead": 1, "cancelled": 1}
    assert await port.count() == expected
    with pytest.raises(Invalid, match="contain a message twice"):
        await port.settle([batch[0], batch[0]])


def test_only_what_ends_a_claim_settles() -> None:
    """Nobody claims or redrives by a receipt."""
    with pytest.raises(Invalid, match=r"does not settle a claim .*Use one of complete"):
        Settlement(receipt=Receipt("x", 1, "c"), move="redrive")


async def test_a_claim_holds_while_it_is_extended(place: QueuePlace, port: QueueBackend) -> None:
    """However long its handler takes; what is extended for long is not cut short later."""
    await port.push(letters(1))
    message = await take(port)
    for _ in range(4):
        place.let_pass(50)
        assert await port.extend([message.receipt], 60) == [True]
        assert await port.end_claims() == []
    assert await port.extend([message.receipt], 1000) == [True]
    assert await port.extend([message.receipt], 60) == [True]
    place.let_pass(900)
    assert await port.end_claims() == []
    assert await settle(port, message.receipt)


async def test_a_late_claim_stands_until_somebody_ends_it(
    place: QueuePlace, port: QueueBackend
) -> None:
    """Acknowledgement and expiry at the same instant: one of the two wins."""
    await port.push(letters(1, 2))
    one, two = await claim(port)
    place.let_pass(61)
    assert await settle(port, one.receipt)
    (ended,) = await port.end_claims()
    assert ended.id == two.id
    assert await settle(port, two.receipt) is False
    assert await port.count() == {"completed": 1, "waiting": 1}


async def test_who_ends_claims_keeps_its_own(place: QueuePlace, port: QueueBackend) -> None:
    """A worker whose settlement is on its way does not end the claim itself."""
    await port.push(letters(1, 2))
    one, two = await claim(port)
    place.let_pass(61)
    (ended,) = await port.end_claims(keep=[one.id])
    assert ended.id == two.id
    assert await settle(port, one.receipt)


async def test_a_claim_that_lapsed_makes_a_suspect(place: QueuePlace, port: QueueBackend) -> None:
    """Claimed only by who asks for suspects; cleared by whoever settles it."""
    await port.push(letters(1))
    await take(port)
    place.let_pass(61)
    (ended,) = await port.end_claims()
    assert (ended.id, ended.state, ended.attempt, ended.session) == ("id-1", "waiting", 1, ME)
    await port.push(letters(2))
    claimed = await port.claim(10, session=ME, visibility=60)
    assert (values(claimed.messages), claimed.suspects) == ([2], True)
    suspect = await take(port, suspects=True)
    assert (suspect.value, suspect.attempt, suspect.is_suspect) == ({"n": 1}, 1, True)
    assert not (await port.claim(1, session=ME, visibility=60)).suspects
    await settle(port, suspect.receipt, "release")
    cleared = await take(port)
    assert (cleared.id, cleared.is_suspect) == ("id-1", False)


async def test_a_dead_session_ends_its_claims_and_no_others(port: QueueBackend) -> None:
    """Long before they lapse by themselves."""
    await port.push(letters(1, 2, 3))
    await claim(port, 2)
    living = await take(port, session=OTHER)
    assert await port.list_holders() == [ME, OTHER]
    ended = await port.end_claims({ME})
    assert sorted((each.id, each.session) for each in ended) == [("id-1", ME), ("id-2", ME)]
    assert await port.list_holders() == [OTHER]
    assert await port.end_claims({ME}) == []
    assert await settle(port, living.receipt)


async def test_deaths_of_workers_are_counted_too(port: QueueBackend) -> None:
    """A message that kills every worker is a dead letter when its attempts are spent.

    The first death proves nothing: it may have been another's fault. From then on it is alone.
    """
    await port.push(letters(1, max_attempts=3))
    for attempt, suspects in ((1, False), (1, True), (2, True), (3, True)):
        message = await take(port, suspects=suspects)
        assert message.attempt == attempt
        (ended,) = await port.end_claims({ME})
        assert ended.state == ("dead" if attempt == 3 else "waiting")
    assert await claim(port, suspects=True) == []
    (dead,) = await port.browse("dead")
    assert (dead.attempts, dead.deliveries) == (3, 4)
    assert [each.attempt for each in dead.errors] == [1, 1, 2, 3]
    assert "no attempt is spent" in dead.errors[0].error
    assert all("nobody settled it" in each.error for each in dead.errors)
    assert dead.value == {"n": 1}


async def test_who_was_there_when_a_worker_died_has_lost_no_attempt(port: QueueBackend) -> None:
    """Not even the last one it had; and once it was settled, it is like any other again."""
    await port.push(letters(1, 2, 3, max_attempts=1))
    await claim(port)
    ended = await port.end_claims({ME})
    assert [(each.state, each.attempt) for each in ended] == [("waiting", 1)] * 3
    for _ in range(3):
        suspect = await take(port, 1, suspects=True)
        assert (suspect.attempt, suspect.receipt.deliveries) == (1, 2)
        assert await settle(port, suspect.receipt)
    assert await port.count() == {"completed": 3}


async def test_whoever_finds_nothing_is_told_when_a_claim_lapses(port: QueueBackend) -> None:
    """So that it can come and end it."""
    await port.push(letters(1))
    assert (await port.claim(0, session=ME, visibility=60)).next is None
    await take(port, visibility=100)
    claimed = await port.claim(10, session=OTHER, visibility=60)
    assert claimed.next == claimed.lapse == pytest.approx(100, abs=30)


async def test_dead_letters_get_a_new_life(port: QueueBackend) -> None:
    """All attempts again, the old errors kept, deliveries not forgotten."""
    await port.push(letters(1, 2, 3, max_attempts=1))
    for message in await claim(port):
        await settle(port, message.receipt, "bury", error="boom")
    assert await port.redrive(["id-2", "nobody"]) == 1
    assert await port.redrive(limit=1) == 1
    assert await port.redrive() == 1
    assert await port.redrive() == 0
    again = await claim(port)
    assert sorted(values(again)) == [1, 2, 3]
    assert {(each.attempt, each.receipt.deliveries) for each in again} == {(1, 2)}
    assert await settle(port, again[0].receipt, "bury", error="still")
    (dead,) = await port.browse("dead")
    assert [each.error for each in dead.errors] == ["boom", "still"]


async def test_what_was_cancelled_comes_back_only_by_name(port: QueueBackend) -> None:
    """And what was completed never."""
    await port.push(letters(1, 2))
    one, two = await claim(port)
    await settle(port, one.receipt, "cancel", error="not needed")
    await settle(port, two.receipt)
    assert await port.redrive() == 0
    assert await port.redrive(["id-2"]) == 0
    assert await port.redrive(["id-1"]) == 1
    assert await port.count() == {"waiting": 1, "completed": 1}


async def test_looking_goes_page_by_page(port: QueueBackend) -> None:
    """The oldest first, each once, in every state."""
    await port.push(letters(*range(7)))
    await port.push(letters(*range(10, 15), delay=100))
    messages = await claim(port, 5)
    await port.settle([Settlement(receipt=each.receipt, move="bury") for each in messages[:3]])
    for state, expected in {
        "ready": [5, 6],
        "waiting": [10, 11, 12, 13, 14],
        "claimed": [3, 4],
        "dead": [0, 1, 2],
    }.items():
        found: list[Any] = []
        after = ""
        while page := await port.browse(state, after=after, limit=2):  # type: ignore[arg-type]
            found += [kept.value["n"] for kept in page]
            after = page[-1].cursor
        assert found == expected
    (kept, _) = await port.browse("claimed")
    assert (kept.session, kept.attempts) == (ME, 1)


async def test_a_look_tells_when(place: QueuePlace, port: QueueBackend) -> None:
    """When a pause is over, since when a claim stands and when it lapses, when it was over."""
    await port.push(letters(1, 2))
    await port.push(letters(3, delay=100))
    done, _ = await claim(port, visibility=50)
    await settle(port, done.receipt, "bury")
    (waiting,) = await port.browse("waiting")
    (claimed,) = await port.browse("claimed")
    (dead,) = await port.browse("dead")
    assert waiting.due == pytest.approx(waiting.enqueued + 100, abs=10)
    assert (waiting.claimed, waiting.finished) == (None, None)
    assert claimed.claimed is not None
    assert claimed.due == pytest.approx(claimed.claimed + 50, abs=10)
    assert claimed.enqueued <= claimed.claimed <= claimed.seen
    assert dead.finished is not None
    assert dead.enqueued <= dead.finished <= dead.seen
    assert (dead.due, dead.claimed) == (None, None)
    place.let_pass(60)
    (late,) = await port.browse("claimed")
    assert late.due is not None
    assert late.due < late.seen


async def test_of_what_was_completed_no_payload_is_kept(port: QueueBackend) -> None:
    """Enough to know that it was, and by whom."""
    await port.push(letters(1))
    await settle(port, (await take(port)).receipt)
    (kept,) = await port.browse("completed")
    assert (kept.id, kept.value, kept.session, kept.attempts) == ("id-1", None, ME, 1)


async def test_what_was_finished_long_ago_is_forgotten(
    place: QueuePlace, port: QueueBackend
) -> None:
    """Nothing younger, nothing in another state, nothing that is still to be handled."""
    await port.push(letters(1, 2, 3))
    one, two, _ = await claim(port)
    await settle(port, one.receipt)
    await settle(port, two.receipt, "bury")
    assert await port.forget("completed", older_than=100) == 0
    place.let_pass(101)
    assert await port.forget("completed", older_than=100) == 1
    assert await port.count() == {"claimed": 1, "dead": 1}
    with pytest.raises(Invalid, match=r"is not finished .*Use one of completed"):
        await port.forget("ready", older_than=1)


async def test_purging_removes_what_it_is_told(port: QueueBackend) -> None:
    """A receipt of what was purged is stale."""
    await port.push(letters(1, 2, 3))
    one, two = await claim(port, 2)
    await settle(port, one.receipt, "bury")
    assert await port.purge(["ready", "claimed"]) == 2
    assert await settle(port, two.receipt) is False
    assert await port.count() == {"dead": 1}


async def test_what_cannot_be_read_is_set_aside(place: QueuePlace) -> None:
    """Reported once, kept as it is among the dead letters; the others flow."""
    components = Components.system()
    told: list[Event] = []
    components.events.on("store:record-set-aside", told.append)
    port = await place.open("emails", components)
    await port.push(letters(1, 2, 3))
    place.damage("id-2", '{"n": 2')
    assert values(await claim(port)) == [1, 3]
    (dead,) = await port.browse("dead")
    assert (dead.id, dead.value) == ("id-2", '{"n": 2')
    assert "not JSON" in dead.errors[0].error
    assert [event["key"] for event in told] == ["message id-2"]


async def test_of_one_claim_each_message_is_settled_by_itself(
    place: QueuePlace, port: QueueBackend
) -> None:
    """One that was completed before, and one whose claim was ended, spoil nothing."""
    await port.push(letters(1, 2, 3, 4))
    before, ended, *others = await claim(port)
    assert await settle(port, before.receipt)
    place.let_pass(1000)
    kept = [each.id for each in others]
    assert [each.id for each in await port.end_claims(keep=kept)] == [ended.id]
    batch = [Settlement(receipt=each.receipt, move="complete") for each in (before, ended, *others)]
    assert await port.settle(batch) == [True, False, True, True]
    assert await port.count() == {"completed": 3, "waiting": 1}


async def test_a_claim_says_whether_there_may_be_more(
    place: QueuePlace, port: QueueBackend
) -> None:
    """Fewer than were asked for are all; what cannot be read was found, too."""
    await port.push(letters(1, 2, 3))
    place.damage("id-1", "{")
    place.damage("id-2", "{")
    first = await port.claim(2, session="s", visibility=60)
    assert (values(first.messages), first.more) == ([], True)
    second = await port.claim(2, session="s", visibility=60)
    assert (values(second.messages), second.more) == ([3], False)


async def test_a_push_wakes_who_waits(place: QueuePlace, port: QueueBackend) -> None:
    """In another process or this one; whoever waits in vain goes on all the same."""
    other = await place.open("emails")
    await port.wait(0.01)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        waiting = group.create_task(other.wait(3600))
        while not waiting.done():
            await port.push(letters(next(_fresh)))
            await asyncio.wait([waiting], timeout=0.2)


_fresh = iter(range(1000, 10**9))


async def test_a_push_whose_reply_was_lost_is_found(place: QueuePlace, port: QueueBackend) -> None:
    """One that is not there may yet arrive: nobody can say, and it is not sent again."""
    place.trouble.lost_replies = 1
    await port.push(letters(1))
    place.trouble.lost_requests = 1
    with pytest.raises(OutcomeUnknown):
        await port.push(letters(2))
    assert values(await claim(port)) == [1]


@pytest.mark.parametrize("move", ["complete", "retry", "release"])
async def test_a_settlement_whose_reply_was_lost_is_not_stale(
    place: QueuePlace, port: QueueBackend, move: Transition
) -> None:
    """It is sent again, finds itself done, and nothing is done twice."""
    await port.push(letters(1))
    message = await take(port)
    place.trouble.lost_replies = 2
    assert await settle(port, message.receipt, move, error="boom", delay=60)
    place.trouble.lost_requests = 2
    assert await settle(port, message.receipt, move, error="boom", delay=60)
    for kept in await port.browse("waiting"):
        assert len(kept.errors) == 1
        assert kept.deliveries == 1


async def test_a_claim_whose_reply_was_lost_is_in_hand_or_lapses(
    place: QueuePlace, port: QueueBackend
) -> None:
    """Nothing is lost and nothing is claimed by two."""
    await port.push(letters(1, 2))
    place.trouble.lost_replies = 1
    try:
        messages = await claim(port)
    except Unavailable:
        assert isinstance(place, SqliteQueues)
        assert await port.count() == {"claimed": 2}
    else:
        assert values(messages) == [1, 2]
        assert await port.extend([each.receipt for each in messages], 60) == [True, True]
    place.trouble.lost_requests = 1
    with pytest.raises(Unavailable):
        await claim(port)
    assert await claim(port) == []


class Model:
    """What the messages of a queue must look like, by the promises alone."""

    def __init__(self) -> None:
        self.live: dict[str, Receipt | None] = {}
        """Whoever has claimed each, if anybody."""
        self.deliveries: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.suspects: set[str] = set()
        self.finished: dict[str, str] = {}
        self.stale: list[Receipt] = []

    def attempts(self, name: str) -> int:
        """Count what was tried."""
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
        """Note how a claim ended."""
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
    """Steps at random, each checked against the model."""

    def __init__(self, place: QueuePlace, ports: list[QueueBackend], seed: int) -> None:
        self.model = Model()
        self._place = place
        self._ports = ports
        self._rng = random.Random(seed)
        self._fresh = itertools.count()

    async def step(self) -> None:
        """Do something."""
        steps = [self.push, self.claim, self.claim, self.settle, self.settle, self.look]
        await self._rng.choice([*steps, self.be_stale, self.die])(self._rng.choice(self._ports))

    async def push(self, port: QueueBackend) -> None:
        count = self._rng.randint(1, 5)
        batch = [
            NewMessage(id=f"m{next(self._fresh)}", value=n, max_attempts=3) for n in range(count)
        ]
        await port.push(batch)
        self.model.live |= {letter.id: None for letter in batch}

    async def claim(self, port: QueueBackend) -> None:
        suspects = self._rng.random() < 0.4
        session = self._rng.choice([ME, OTHER])
        limit = self._rng.randint(1, 6)
        claimed = await port.claim(limit, session=session, visibility=600, suspects=suspects)
        self.model.take(claimed, suspects=suspects)

    async def settle(self, port: QueueBackend) -> None:
        held = [receipt for receipt in self.model.live.values() if receipt is not None]
        batch = [
            Settlement(receipt=each, move=self._rng.choice(list(ENDS)), error="boom")
            for each in self._rng.sample(held, min(len(held), self._rng.randint(1, 4)))
        ]
        self._place.trouble.lost_replies = int(self._rng.random() < 0.1)
        assert all(await port.settle(batch))
        self._place.trouble.lost_replies = 0
        for each in batch:
            finished, returned = ENDS[each.move]
            self.model.end(each.receipt.id, finished=finished, returned=returned)

    async def be_stale(self, port: QueueBackend) -> None:
        for receipt in self._rng.sample(self.model.stale, min(len(self.model.stale), 2)):
            wrong = msgspec.structs.replace(receipt, claim=receipt.claim[::-1])
            assert await port.extend([receipt, wrong], 60) == [False, False]
            assert await settle(port, wrong) is False

    async def die(self, port: QueueBackend) -> None:
        session = self._rng.choice([ME, OTHER])
        for ended in await port.end_claims({session}):
            assert ended.session == session
            alone = ended.id in self.model.suspects
            spent = alone and self.model.attempts(ended.id) >= 3
            assert ended.state == ("dead" if spent else "waiting")
            self.model.end(ended.id, finished="dead" if spent else "", returned=not alone)
            if not spent:
                self.model.suspects.add(ended.id)

    async def look(self, port: QueueBackend) -> None:
        counts = await port.count()
        live = self.model.live.values()
        assert sum(counts.get(state, 0) for state in LIVE) == len(live)
        assert counts.get("claimed", 0) == sum(receipt is not None for receipt in live)
        finished = Counter(self.model.finished.values())
        assert {state: counts.get(state, 0) for state in FINISHED} == {
            state: finished[state] for state in FINISHED
        }


@pytest.mark.parametrize("seed", range(4))
async def test_a_long_walk_keeps_every_promise(place: QueuePlace, seed: int) -> None:
    """At random, by two ports, with lost replies: no message is lost, doubled or miscounted."""
    walk = Walk(place, [await place.open("walk") for _ in range(2)], seed)
    for _ in range(150):
        await walk.step()
    port = await place.open("walk")
    await drain(port, walk.model)
    await walk.look(port)
    assert walk.model.live == {}


async def drain(port: QueueBackend, model: Model) -> None:
    """Complete everything that is left."""
    for name in [name for name, receipt in model.live.items() if receipt is not None]:
        receipt = model.live[name]
        assert receipt is not None
        assert await settle(port, receipt)
        model.end(name, finished="completed")
    for suspects in (False, True):
        while True:
            claimed = await port.claim(50, session=ME, visibility=60, suspects=suspects)
            model.take(claimed, suspects=suspects)
            for message in claimed.messages:
                assert await settle(port, message.receipt)
                model.end(message.id, finished="completed")
            if not claimed.messages:
                break


async def test_while_a_queue_is_paused_nobody_claims(place: QueuePlace, port: QueueBackend) -> None:
    """Neither what is ready nor what is due nor suspects; what is in hand goes on."""
    other, beside = await place.open("emails"), await place.open("beside")
    await port.push(letters(1, 2, 3))
    await beside.push(letters(9))
    held, lapsed = await claim(port, 2)
    place.let_pass(61)
    assert await port.extend([held.receipt], 600) == [True]
    assert [each.id for each in await port.end_claims()] == [lapsed.id]
    assert await other.pause("a deployment") is True
    claimed = await port.claim(10, session=ME, visibility=60)
    assert (claimed.messages, claimed.suspects) == ([], False)
    assert await claim(port, 1, suspects=True) == []
    assert await port.count() == {"claimed": 1, "ready": 1, "waiting": 1}
    assert await settle(port, held.receipt)
    assert values(await claim(beside)) == [9]
    assert await port.resume() is True
    assert values(await claim(port, suspects=True)) == [2]
    assert values(await claim(port)) == [3]


async def test_to_pause_or_resume_again_changes_nothing(
    place: QueuePlace, port: QueueBackend
) -> None:
    """So that a lost reply is followed up by the same request; the first reason stands."""
    assert await port.resume() is False
    assert await port.pause("first") is True
    (content,) = (await place.open_directory().read_contents()).values()
    assert await port.pause("second") is False
    (again,) = (await place.open_directory().read_contents()).values()
    assert content.pause == again.pause
    assert content.pause is not None
    assert content.pause.reason == "first"
    place.trouble.lost_replies = 1
    with pytest.raises(Unavailable):
        await port.resume()
    assert await port.resume() is False
    assert await place.open_directory().read_contents() == {}


async def test_who_waits_hears_that_a_queue_is_resumed(
    place: QueuePlace, port: QueueBackend
) -> None:
    """Long before it would look by itself, whoever has resumed it."""
    other = await place.open("emails")
    await port.push(letters(1))
    await port.pause()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        waiting = group.create_task(port.wait(3600))
        while not waiting.done():
            await other.pause()
            await other.resume()
            await asyncio.sleep(0.05)
    assert values(await claim(port)) == [1]


async def test_a_directory_knows_every_queue(place: QueuePlace, port: QueueBackend) -> None:
    """How many messages are in which state, who has them, and how old the oldest is."""
    beside = await place.open("beside")
    await port.push(letters(1, 2, 3, 4))
    await port.push(letters(5, delay=100))
    mine, _ = await claim(port, 2)
    await claim(port, 1, session=OTHER)
    await settle(port, mine.receipt)
    await beside.push(letters(6))
    await settle(beside, (await take(beside)).receipt, "bury")
    found = await place.open_directory().read_contents()
    assert list(found) == ["beside", "emails"]
    emails = found["emails"]
    assert emails.counts == {"ready": 1, "waiting": 1, "claimed": 2, "completed": 1}
    assert emails.claims == {ME: 1, OTHER: 1}
    (ready,) = await port.browse("ready")
    assert emails.oldest == pytest.approx(ready.enqueued)
    assert (found["beside"].counts, found["beside"].oldest) == ({"dead": 1}, None)


async def test_a_directory_finds_messages_in_any_queue(
    place: QueuePlace, port: QueueBackend
) -> None:
    """Live or finished, as `browse` would show them; what cannot be read is shown as text."""
    beside = await place.open("beside")
    await port.push(letters(1, 2))
    await beside.push(letters(3))
    await settle(beside, (await take(beside)).receipt, "bury", error="no")
    place.damage("id-2", "{broken")
    found = {kept.id: kept for kept in await place.open_directory().find(["id-1", "id-2", "id-3"])}
    assert {name: kept.queue for name, kept in found.items()} == {
        "id-1": "emails",
        "id-2": "emails",
        "id-3": "beside",
    }
    (ready, _) = await port.browse("ready")
    assert msgspec.structs.replace(found["id-1"], seen=ready.seen) == ready
    assert (found["id-2"].value, found["id-2"].is_readable) == ("{broken", False)
    assert [each.error for each in found["id-3"].errors] == ["no"]
    assert await place.open_directory().find(["id-4"]) == []
