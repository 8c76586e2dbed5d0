"""Queues in pages: what is their own, besides what the conformance suite of backends shows."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, TypeAlias

import msgspec
import pytest
from queue_locations import PagesQueues
from store_locations import MemoryLocation
from waiting import until

from jobsync import (
    Components,
    Corrupt,
    Event,
    Invalid,
    JobsyncError,
    Misconfigured,
    OutcomeUnknown,
    Store,
    Unavailable,
)
from jobsync.core.clock import SystemClock
from jobsync.core.messages import Transition
from jobsync.queue.backend import Message, NewMessage, QueueBackend, Settlement
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.directory import PagesDirectory
from jobsync.queue.pages.page import PageMark, name_page
from jobsync.queue.pages.page_reader import ListedPage
from jobsync.queue.single_message import ProgressReport
from jobsync.stores.contract import Change, Head, Outcome, Put, Record, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.settling import SettlingStore

ME, OTHER = "worker-1.a", "worker-2.b"
_numbers = itertools.count()
_written: dict[str, float] = {}
"""When each key was written last, by the clock of the server."""
LANE, DEAD = "page/mails/0/", "page/mails/dead/"


@pytest.fixture
async def location() -> AsyncIterator[PagesQueues]:
    """An empty store."""
    location = PagesQueues(MemoryLocation())
    yield location
    await location.close()


@pytest.fixture
async def backend(location: PagesQueues) -> PagesBackend:
    """The backend of an empty queue."""
    return await location.open("mails")


def new_messages(*values: Any, **options: Any) -> list[NewMessage]:
    """Return messages whose ids are their values."""
    options = {"max_attempts": 4, **options}
    return [NewMessage(id=f"id-{value}", value={"n": value}, **options) for value in values]


async def claim(backend: QueueBackend, limit: int = 1000, **options: Any) -> list[Message]:
    """Claim as `ME` for 30 seconds by default."""
    claimed = await backend.claim(limit, **{"session": ME, "visibility": 30, **options})
    return claimed.messages


async def settle_all(
    backend: QueueBackend, messages: Sequence[Message], move: Transition = "complete", **how: Any
) -> list[bool]:
    """Settle claims in the same way."""
    return await backend.settle(
        [Settlement(receipt=each.receipt, move=move, **how) for each in messages]
    )


def ids(messages: Sequence[Message]) -> list[str]:
    """Return the ids of messages."""
    return [each.id for each in messages]


class Counting(StoreDecorator):
    """A store that bills: it counts requests as S3 does, and says so.

    Those about pages are counted apart from those that come by the clock, as the bell does.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_billed = True
        self.requests: Counter[str] = Counter()
        self.crash_at: int | None = None
        """Refuse all requests from this one on."""
        self.crash: JobsyncError = Unavailable(inner.name, "this process is dead")
        """How it refuses them."""
        self.damaged = 0
        """How many replies with pages still arrive damaged."""
        self.clock = SystemClock()

    def _count(self, kind: str, key: str, number: int = 1) -> None:
        self.requests[kind if key.startswith("page/") else "other"] += number
        if self.crash_at is not None and self.requests["PUT"] > self.crash_at:
            raise self.crash

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self._count("GET", keys[0], len(keys))
        if self.damaged and keys[0].startswith("page/"):
            self.damaged -= 1
            raise Corrupt(keys[0], "it arrived damaged")
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self._count("PUT", changes[0].key, len(changes))
        await asyncio.sleep(0)
        _written.update((change.key, self.clock.wall().seconds) for change in changes)
        return await self.inner.write(changes)

    async def heads(
        self, prefix: str, *, after: str = "", until: str = "", limit: int = 1000
    ) -> list[Head]:
        self._count("LIST", prefix)
        heads = await self.inner.heads(prefix, after=after, until=until, limit=limit)
        return [msgspec.structs.replace(head, written_at=_written.get(head.key)) for head in heads]


async def open_counting(location: PagesQueues) -> tuple[Counting, PagesBackend]:
    """Open a backend whose requests are counted."""
    components = location.components()
    counting = Counting(await location.location.open(components))
    # As in a process of its own, which notifies nobody else.
    counting.name += f"-{next(_numbers)}"
    counting.clock = location.clock
    backend = PagesBackend(SettlingStore(counting, components), "mails", components)
    location._backends.append(backend)
    return counting, backend


async def read_pages(location: PagesQueues, prefix: str = LANE) -> list[Record]:
    """Return the records of all pages."""
    return await (await location.location.open()).scan(prefix)


@pytest.mark.parametrize("size", [1, 10, 100])
async def test_a_page_costs_four_requests(location: PagesQueues, size: int) -> None:
    """A push, a read, a claim and a settlement, whatever is in it; listings come on top."""
    producer_requests, producer = await open_counting(location)
    worker_requests, worker = await open_counting(location)
    pages = 20
    for page in range(pages):
        await producer.push(new_messages(*range(page * size, (page + 1) * size)))
    handled = 0
    while messages := await claim(worker, 10, at_most=100):
        assert await settle_all(worker, messages) == [True] * len(messages)
        handled += len(messages)
    assert handled == pages * size
    requests = producer_requests.requests + worker_requests.requests
    assert requests["PUT"] == pages * 3
    assert requests["GET"] == pages
    assert requests["LIST"] <= 2


async def test_a_process_need_not_read_what_it_pushed(location: PagesQueues) -> None:
    """Three requests for each page: push, claim, settle."""
    store, backend = await open_counting(location)
    for page in range(10):
        await backend.push(new_messages(page))
    while messages := await claim(backend, 10):
        await settle_all(backend, messages)
    assert store.requests["PUT"] == 3 * 10
    assert store.requests["GET"] == 0


async def test_claims_cost_the_same_however_much_waits(location: PagesQueues) -> None:
    """The first listing shows enough; nobody reads to the end of the lane."""
    costs = []
    for pages in (100, 2_000):
        store = await location.location.open(location.components())
        producer = await location.open("mails")
        await producer._control.register()
        for number in range(pages):
            await producer.push(new_messages(f"{pages}-{number}"))
        counting, worker = await open_counting(location)
        for _ in range(10):
            await settle_all(worker, await claim(worker, 5))
        costs.append(counting.requests)
        await store.close()
    small, large = costs
    assert large["LIST"] <= small["LIST"]
    assert large["GET"] <= small["GET"]
    assert large["PUT"] == small["PUT"]


@pytest.mark.parametrize("obstacle", ["claimed", "waiting", "damaged"])
async def test_one_page_does_not_hide_those_beyond_a_thousand(
    location: PagesQueues, obstacle: str
) -> None:
    """Claimed for long, waiting for its next attempt, or not a page: all others are handled."""
    counting, producer = await open_counting(location)
    if obstacle == "damaged":
        await counting.write([Put(f"{LANE}{NAME}", [1, 2, 3], mark=PageMark.READY)])
    else:
        await producer.push(new_messages("first"))
        first = await claim(producer, 1, session=OTHER)
        if obstacle == "waiting":
            await settle_all(producer, first, "retry", delay=50, error="as it is")
    for number in range(1_010):
        await producer.push(new_messages(number))
    # Everything is old enough for the frontier.
    location.clock.ahead += 20
    _, worker = await open_counting(location)
    handled = 0
    while messages := await claim(worker, 337):
        assert all(await settle_all(worker, messages))
        handled += len(messages)
    assert handled == 1_010


async def test_a_claim_looks_beyond_the_pages_of_many_others(location: PagesQueues) -> None:
    """However many of the first pages are claimed."""
    _, producer = await open_counting(location)
    for number in range(410):
        await producer.push(new_messages(number))
    _, other = await open_counting(location)
    assert len(await claim(other, 400, session=OTHER)) == 400
    _, worker = await open_counting(location)
    assert ids(await claim(worker, 20)) == [f"id-{number}" for number in range(400, 410)]


@pytest.mark.parametrize("accepted", [1, 3])
@pytest.mark.parametrize(
    "error",
    [Unavailable("store", "away"), Misconfigured("url", "s3://", "is forbidden", "allow it")],
    ids=["away", "forbidden"],
)
async def test_a_claim_that_fails_halfway_returns_what_it_has(
    location: PagesQueues, accepted: int, error: JobsyncError
) -> None:
    """Nothing waits until it lapses; the next claim reports that the store does not answer."""
    _, producer = await open_counting(location)
    for number in range(5):
        await producer.push(new_messages(number))
    requests, worker = await open_counting(location)
    requests.crash_at, requests.crash = accepted, error
    claimed = await worker.claim(10, session=ME, visibility=30)
    assert len(claimed.messages) == accepted
    assert claimed.more
    with pytest.raises(type(error)):
        await claim(worker)
    requests.crash_at = None
    found = [*claimed.messages, *await claim(worker)]
    assert sorted(ids(found)) == [f"id-{number}" for number in range(5)]


async def test_a_partial_claim_leaves_the_rest_to_others(location: PagesQueues) -> None:
    """Both hold claims of one page; each settles its own."""
    one, other = await location.open("mails"), await location.open("mails")
    await one.push(new_messages(1, 2, 3))
    mine = await claim(one, 2)
    theirs = await claim(other, 5, session=OTHER)
    assert (ids(mine), ids(theirs)) == (["id-1", "id-2"], ["id-3"])
    assert await settle_all(one, mine) == [True, True]
    assert await settle_all(other, theirs) == [True]
    (page,) = await read_pages(location)
    assert [each["state"] for each in page.value["messages"]] == ["completed"] * 3


async def test_a_claim_that_nobody_renews_lapses_beside_one_that_is_renewed(
    location: PagesQueues,
) -> None:
    """The renewals keep the page changing; whoever writes them ends the dead claim, too."""
    one, other = await location.open("mails"), await location.open("mails")
    await one.push(new_messages(1, 2))
    (dead,) = await claim(one, 1)
    (living,) = await claim(other, 1, session=OTHER)
    for _ in range(4):
        location.clock.ahead += 10
        assert await other.extend([living.receipt], 30) == [True]
    (ended,) = await other.end_claims(keep=[living.id])
    assert (ended.id, ended.session) == (dead.id, ME)
    assert await settle_all(one, [dead]) == [False]
    assert await settle_all(other, [living]) == [True]


async def test_an_outage_alone_ends_no_claim(location: PagesQueues) -> None:
    """Whoever looks first after it gives the others the time to renew."""
    one, other = await location.open("mails"), await location.open("mails")
    await one.push(new_messages(1))
    (message,) = await claim(one)
    assert await claim(other, session=OTHER) == []
    location.clock.ahead += 40
    assert await other.end_claims() == []
    assert await one.extend([message.receipt], 30) == [True]
    location.advance(20)
    assert await other.end_claims() == []
    assert await settle_all(one, [message]) == [True]


async def test_a_killed_worker_is_noticed_by_listing(location: PagesQueues) -> None:
    """In 45 seconds with defaults, by a worker that only polls as its claims tell it to."""
    one, other = await location.open("mails"), await location.open("mails")
    await one.push(new_messages(1))
    (message,) = await claim(one)
    start = location.clock.ahead
    found: list[Message] = []
    while not found:
        claimed = await other.claim(1, session=OTHER, visibility=30, suspects=True)
        found = claimed.messages
        if claimed.lapse is not None and claimed.lapse <= 0:
            assert [each.id for each in await other.end_claims()] == [message.id]
        elif not found:
            assert claimed.next is not None
            location.clock.ahead += claimed.next
        assert location.clock.ahead - start < 45
    assert found[0].is_suspect


async def spoil(location: PagesQueues, prefix: str, name: str, value: Any, **fields: Any) -> None:
    """Put a record where pages are, without the library."""
    store = await location.location.open()
    await store.write([Put(f"{prefix}{name}", value, **fields)])


NAME = "51700000000000AAAAAAAAAAAA"
ODD: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "another object": ("README", {"hello": 1}, {}),
    "no page": (NAME, [1, 2, 3], {}),
    "a page with impossible numbers": (
        NAME,
        {"birth": "x", "messages": [{"id": "a", "deliveries": -5}]},
        {"mark": PageMark.READY},
    ),
    "a page without its claims": (
        NAME,
        {"birth": "x", "messages": [{"id": "a", "state": "claimed", "claim": "c"}]},
        {"mark": PageMark.PARTLY},
    ),
}


@pytest.mark.parametrize(("name", "value", "fields"), ODD.values(), ids=ODD)
async def test_what_is_not_a_page_is_set_aside(
    location: PagesQueues, name: str, value: Any, fields: dict[str, Any]
) -> None:
    """Reported once, never changed; the others are delivered, counted and shown."""
    components = Components.system()
    reported: list[Event] = []
    components.events.on("store:record-set-aside", reported.append)
    backend = await location.open("mails", components)
    await spoil(location, LANE, name, value, **fields)
    await backend.push(new_messages(1, 2))
    messages = await claim(backend)
    assert ids(messages) == ["id-1", "id-2"]
    assert await backend.count() == {"claimed": 2}
    assert await backend.end_claims({ME}) != []
    assert len(await claim(backend, suspects=True)) == 2
    assert [event["key"] for event in reported] == [f"{LANE}{name}"]
    (left, *_) = [each for each in await read_pages(location) if each.key.endswith(name)]
    assert left.value == value


async def test_a_page_that_is_not_json_is_set_aside(location: PagesQueues) -> None:
    """Somebody cut it off; the others are delivered, and nobody reads it again and again."""
    await (await location.open("mails")).push(new_messages(1))
    (page,) = await read_pages(location)
    location.location.corrupt(page.key, '{"birth": "x", "mess')
    counting, backend = await open_counting(location)
    await backend.push(new_messages(2, 3))
    assert ids(await claim(backend)) == ["id-2", "id-3"]
    before = counting.requests["GET"]
    for _ in range(5):
        location.clock.ahead += 11
        assert await claim(backend) == []
    assert counting.requests["GET"] == before
    assert await backend.count() == {"claimed": 2}


async def test_a_directory_names_the_unreadable_pages_of_all_queues(location: PagesQueues) -> None:
    """Whichever was read last; what can be read is counted."""
    names = ["letters", "mails", "sms"]
    for name in names:
        await (await location.open(name)).push(new_messages(1))
    damaged = [
        page.key for name in names[:2] for page in await read_pages(location, f"page/{name}/0/")
    ]
    for key in damaged:
        location.location.corrupt(key, '{"birth": "x", "mess')
    directory = location.open_directory()
    assert isinstance(directory, PagesDirectory)
    assert [*(await directory.read_contents())] == ["sms"]
    assert sorted(directory.set_aside) == sorted(damaged)
    assert len(damaged) == 2


@pytest.mark.parametrize("times", [1, 2])
async def test_a_page_that_arrives_damaged_is_read_again(location: PagesQueues, times: int) -> None:
    """At once, and if that fails a minute later."""
    await (await location.open("mails")).push(new_messages(1))
    counting, backend = await open_counting(location)
    counting.damaged = times
    found = ids(await claim(backend))
    assert found == (["id-1"] if times == 1 else [])
    location.clock.ahead += 61
    assert found + ids(await claim(backend)) == ["id-1"]


async def test_pages_of_newer_code_are_left_alone(location: PagesQueues) -> None:
    """Neither claimed, purged nor counted as lost; but shown, and reported by their format."""
    backend = await location.open("mails")
    await backend.push(new_messages(1))
    newer = {"birth": "x", "messages": [{"id": "new", "value": 7}], "colour": "red"}
    await spoil(location, LANE, NAME, newer, format=99, mark=PageMark.READY)
    assert ids(await claim(backend)) == ["id-1"]
    assert await backend.find_newer() == {99: 1}
    assert await backend.purge(["ready"]) == 0
    assert await backend.count() == {"claimed": 1, "ready": 1}
    (shown,) = await backend.browse("ready")
    assert (shown.id, shown.value, shown.format) == ("new", 7, 99)
    (kept, _) = await read_pages(location)
    assert (kept.value, kept.format) == (newer, 99)


MOVES: dict[str, tuple[Transition, float, str]] = {
    "dead": ("bury", 0.0, "dead"),
    "later": ("snooze", 300.0, "waiting"),
}


@pytest.mark.parametrize(("move", "delay", "state"), MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("writes", range(4))
async def test_a_move_survives_a_crash_at_every_write(
    location: PagesQueues, writes: int, move: Transition, delay: float, state: str
) -> None:
    """The message is in one place for all who read, and the next worker finishes the move."""
    counting, dying = await open_counting(location)
    await dying.push(new_messages(1, 2))
    one, two = await claim(dying)
    counting.crash_at = counting.requests["PUT"] + writes
    try:
        answers = await settle_all(dying, [one], move, delay=delay, error="boom")
    except Unavailable:
        answers = [False]
    assert answers == [writes > 0]
    backend = await location.open("mails")
    expected = {"claimed": 1, state: 1} if writes else {"claimed": 2}
    assert await backend.count() == expected
    if not writes:
        return
    # Somebody who looks for a while sees that the move was given up.
    for _ in range(3):
        assert await claim(backend, session=OTHER) == []
        location.advance(6)
        await backend.end_claims(keep=[two.id])
    assert await backend.count() == expected
    (source, *rest) = await read_pages(location)
    states = {each["id"]: each.get("state", "ready") for each in source.value["messages"]}
    assert states == {"id-1": "moved", "id-2": "claimed"}
    copies = [*rest, *await read_pages(location, DEAD)]
    assert [each["id"] for page in copies for each in page.value["messages"]] == ["id-1"]
    assert await settle_all(backend, [one], move, delay=delay, error="boom") == [True]
    if state == "dead":
        assert await backend.redrive() == 1
    location.advance(300)
    (again,) = await claim(backend)
    assert (again.id, again.value, again.receipt.deliveries) == ("id-1", {"n": 1}, 2)
    assert await settle_all(backend, [again, two]) == [True, True]
    assert await backend.count() == {"completed": 2}


async def test_what_stays_in_a_page_is_found_although_a_move_out_of_it_failed(
    location: PagesQueues,
) -> None:
    """When the store answers again, and not at the next listing, minutes later."""
    counting, worker = await open_counting(location)
    await worker.push(new_messages(1, 2))
    first, second = await claim(worker)
    assert await claim(worker) == []
    counting.crash_at = counting.requests["PUT"] + 2
    moves: list[tuple[Message, Transition]] = [(first, "bury"), (second, "retry")]
    settlements = [
        Settlement(receipt=each.receipt, move=move, delay=1, error="as it is")
        for each, move in moves
    ]
    assert await worker.settle(settlements) == [True, True]
    counting.crash_at = None
    location.clock.ahead += 2
    assert ids(await claim(worker)) == [second.id]


async def test_a_move_is_not_continued_long_after_it_was_read(location: PagesQueues) -> None:
    """The target may have been consumed and dropped since: whoever goes on reads again first."""
    counting, dying = await open_counting(location)
    await dying.push(new_messages(1))
    counting.crash_at = counting.requests["PUT"] + 2
    assert await settle_all(dying, await claim(dying), "bury") == [True]
    counting.crash_at = None
    (page,) = await read_pages(location)
    place = page.key.removeprefix("page/mails/")
    before = counting.requests["PUT"]
    location.clock.ahead += 3_600
    assert await dying._pages.finish_moves(place) == []
    assert counting.requests["PUT"] == before
    assert await dying._pages.finish_moves(place) != []
    assert await dying.count() == {"dead": 1}


@pytest.mark.parametrize("writes", range(4))
async def test_a_redrive_survives_a_crash_at_every_write(
    location: PagesQueues, writes: int
) -> None:
    """Each dead letter is among the dead or in the queue, never in both or in neither."""
    counting, dying = await open_counting(location)
    await dying.push(new_messages(1, 2))
    await settle_all(dying, await claim(dying), "bury")
    counting.crash_at = counting.requests["PUT"] + writes
    try:
        count = await dying.redrive()
    except Unavailable:
        count = 0
    assert count == (2 if writes else 0)
    backend = await location.open("mails")
    assert await backend.count() == ({"waiting": 2} if writes else {"dead": 2})
    # Whoever removes what is done finishes moves first.
    location.advance(4_000)
    for _ in range(2):
        await backend.forget("dead", older_than=10_000)
    assert await backend.redrive() == (0 if writes else 2)
    assert sorted(ids(await claim(backend))) == ["id-1", "id-2"]


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_message_that_moves_while_it_is_looked_for_is_found(
    location: PagesQueues, *, is_dead: bool, is_cancelled: bool
) -> None:
    """Its source was listed and its target was not: whoever waits for a result must not give up."""
    counting, backend = await open_counting(location)
    _, other = await open_counting(location)
    await other.push(new_messages(1, delay=1_000))
    if is_dead:
        await other.run_now("id-1")
        await settle_all(other, await claim(other), "bury")
    heads, moves = counting.heads, [other.redrive if is_dead else lambda: other.run_now("id-1")]

    async def move_after(prefix: str, **options: Any) -> list[Head]:
        found = await heads(prefix, **options)
        if moves and prefix == (DEAD if is_dead or not is_cancelled else LANE):
            await moves.pop()()
        return found

    counting.heads = move_after  # type: ignore[method-assign]
    if is_cancelled:
        assert await backend.cancel("id-1") is not None
        assert await other.count() == {"cancelled": 1}
    else:
        info = await backend.get("id-1")
        assert info is not None
        assert info.state == "waiting"
    assert not moves


async def test_foreign_objects_among_the_pages_hide_no_message(location: PagesQueues) -> None:
    """However many: the listing goes on after them."""
    store = await location.location.open()
    backend = await location.open("mails")
    (name,) = location.components().ids.records(1)
    await backend.push([NewMessage(id=name, value=1, max_attempts=4)])
    (page,) = await read_pages(location)
    for number in range(2_000):
        await store.create(f"{page.key}-{number:04}", {})
    info = await backend.get(name)
    assert info is not None
    assert ids(await claim(backend)) == [name]


CRASHES = pytest.mark.parametrize(
    "crash",
    [Unavailable("store", "away"), Misconfigured("url", "s3://", "is forbidden", "allow it")],
    ids=["unavailable", "misconfigured"],
)
"""What the store answers from some request on."""


@CRASHES
async def test_a_redrive_that_fails_halfway_says_so(
    location: PagesQueues, crash: JobsyncError
) -> None:
    """`Unavailable` would mean that nothing was done."""
    counting, backend = await open_counting(location)
    counting.crash = crash
    for name in (1, 2):
        await backend.push(new_messages(name))
        await settle_all(backend, await claim(backend), "bury")
    counting.crash_at = counting.requests["PUT"] + 3
    with pytest.raises(OutcomeUnknown, match="1 messages were queued again before"):
        await backend.redrive()
    counting.crash_at = None
    assert await backend.redrive() == 1
    assert await backend.count() == {"waiting": 2}


@CRASHES
async def test_a_purge_that_fails_halfway_says_so(
    location: PagesQueues, crash: JobsyncError
) -> None:
    """`Unavailable` would mean that nothing was removed."""
    counting, backend = await open_counting(location)
    counting.crash = crash
    for name in (1, 2):
        await backend.push(new_messages(name))
    counting.crash_at = counting.requests["PUT"]
    with pytest.raises(type(crash)):
        await backend.purge(["ready"])
    counting.crash_at = counting.requests["PUT"] + 1
    with pytest.raises(OutcomeUnknown, match="1 messages were removed before"):
        await backend.purge(["ready"])
    counting.crash_at = None
    assert await backend.purge(["ready"]) == 1


async def test_done_pages_go_after_an_hour_and_not_while_a_move_is_open(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """Until then they answer for their messages, and refuse a late copy of their creation."""
    await backend.push(new_messages(1, 2))
    messages = await claim(backend)
    await settle_all(backend, messages)
    await backend.push(new_messages(3))
    location.advance(3_500)
    assert await backend.forget("completed", older_than=60) == 0
    assert await settle_all(backend, messages) == [True, True]
    counting, dying = await open_counting(location)
    (third,) = await claim(dying)
    counting.crash_at = counting.requests["PUT"] + 1
    assert await settle_all(dying, [third], "bury") == [True]
    location.advance(200)
    # This call finds the open move, and finishes it.
    assert await backend.forget("completed", older_than=60) == 0
    assert await backend.forget("completed", older_than=60) == 2
    assert await settle_all(backend, messages) == [False, False]
    assert await backend.count() == {"dead": 1}
    assert await backend.forget("dead", older_than=60) == 1
    assert await backend.count() == {}


async def test_a_redriven_message_is_remembered_while_its_move_is_open(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """Whoever finishes a move out of the dead letters finds its target, also after an hour."""
    counting, dying = await open_counting(location)
    await dying.push(new_messages(1))
    await settle_all(dying, await claim(dying), "bury")
    counting.crash_at = counting.requests["PUT"] + 2
    assert await dying.redrive() == 1
    await settle_all(backend, await claim(backend))
    location.advance(3_700)
    assert await backend.forget("completed", older_than=60) == 0
    assert await backend.forget("completed", older_than=60) == 1
    assert await backend.redrive() == 0
    assert await backend.count() == {}


async def test_a_late_copy_of_a_push_does_not_bring_it_back(
    location: PagesQueues, backend: PagesBackend
) -> None:
    """The done page has the same name."""
    store = await location.location.open()
    await backend.push(new_messages(1))
    (page,) = await read_pages(location)
    await settle_all(backend, await claim(backend))
    (outcome,) = await store.write([Put(page.key, page.value, nonce=page.nonce)])
    assert not isinstance(outcome, Unknown)
    assert await claim(backend) == []
    assert await backend.count() == {"completed": 1}


async def test_a_push_is_recognised_after_many_writes_to_its_page(location: PagesQueues) -> None:
    """Its nonce has left the trail of the record; the page remembers its birth."""
    components = location.components()
    store = await location.location.open(components)
    worker = await location.open("mails")

    class Slow(StoreDecorator):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            outcomes = await self.inner.write(changes)
            if changes[0].key.startswith(LANE):
                (message,) = await claim(worker)
                for _ in range(20):
                    assert await worker.extend([message.receipt], 30) == [True]
                return [Unknown("the reply was lost") for _ in outcomes]
            return outcomes

    producer = PagesBackend(SettlingStore(Slow(store), components), "mails", components)
    await producer.push(new_messages(1))
    assert await worker.count() == {"claimed": 1}


async def test_changes_of_one_page_share_a_write(location: PagesQueues) -> None:
    """A process does not conflict with itself, however many callers settle at once."""
    store, backend = await open_counting(location)
    await backend.push(new_messages(*range(20)))
    messages = await claim(backend)
    before = store.requests["PUT"]
    await asyncio.gather(*(settle_all(backend, [message]) for message in messages))
    assert store.requests["PUT"] - before <= 2
    assert await backend.count() == {"completed": 20}


async def test_a_cancelled_caller_takes_nothing_from_others(location: PagesQueues) -> None:
    """Whoever wrote for two is cancelled; the other one writes itself."""
    components = location.components()
    gates = [asyncio.Event() for _ in range(3)]
    writes: list[asyncio.Event] = []

    class Gated(StoreDecorator):
        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if "claim" in str(changes[0].value if isinstance(changes[0], Put) else ""):
                writes.append(gates[len(writes)])
                await writes[-1].wait()
            return await self.inner.write(changes)

    store = await location.location.open(components)
    claimer = await location.open("mails")
    backend = PagesBackend(Gated(store), "mails", components)
    await claimer.push(new_messages(1, 2, 3))
    first, second, third = (
        asyncio.create_task(settle_all(backend, [each])) for each in await claim(claimer)
    )
    await until(lambda: len(writes) == 1, "the first caller writes, and the others wait")
    gates[0].set()
    await until(lambda: len(writes) == 2, "the second caller writes for both")
    second.cancel()
    gates[1].set()
    gates[2].set()
    assert await first == [True]
    assert await third == [True]
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_a_pause_on_a_billed_store_waits_for_those_who_rely_on_their_reading(
    location: PagesQueues,
) -> None:
    """They read the record every five seconds; no claim that begins afterwards gets anything."""
    store, worker = await open_counting(location)
    await worker.push(new_messages(1, 2))
    assert len(await claim(worker, 1)) == 1
    before = store.requests["other"]
    _, operator = await open_counting(location)
    start = location.clock.ahead
    assert await operator.pause("a deployment") is True
    assert location.clock.ahead - start > 5
    assert await claim(worker, 1) == []
    assert store.requests["other"] == before + 1
    # Whoever paused it first may not have waited, because it was killed.
    start = location.clock.ahead
    assert await (await open_counting(location))[1].pause() is False
    assert location.clock.ahead - start > 5
    assert await operator.resume() is True


async def test_workers_seldom_take_the_same_page(location: PagesQueues) -> None:
    """Once they know of each other, each takes its own; conflicts are under 5% of claims."""
    producer = await location.open("mails")
    for number in range(1_000):
        await producer.push(new_messages(number))

    class Conflicts(StoreDecorator):
        count = 0

        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            await asyncio.sleep(0)
            outcomes = await self.inner.write(changes)
            Conflicts.count += sum(type(each).__name__ == "Conflicted" for each in outcomes)
            return outcomes

    handled: Counter[str] = Counter()

    async def work(session: str) -> None:
        components = location.components()
        store = Conflicts(await location.location.open(components))
        backend = PagesBackend(store, "mails", components)
        has_more = True
        while has_more:
            claimed = await backend.claim(1, session=session, visibility=30)
            handled.update(ids(claimed.messages))
            await settle_all(backend, claimed.messages)
            has_more = claimed.more

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(work(f"worker-{number}"))
    assert len(handled) == 1_000
    assert set(handled.values()) == {1}
    assert Conflicts.count < 0.05 * 1_000


async def test_a_transaction_cannot_be_joined(backend: PagesBackend) -> None:
    """The error says what to use instead."""
    with pytest.raises(Invalid, match=r"not in a SQL database.*Leave it out"):
        await backend.push_within(object(), new_messages(1))


async def test_a_push_has_at_most_three_megabytes(backend: PagesBackend) -> None:
    """Refused as a whole, before anything is sent."""
    large = [NewMessage(id=f"{n}", value="x" * 250_000, max_attempts=1) for n in range(13)]
    with pytest.raises(Invalid, match="Push in parts"):
        await backend.push(large)
    assert await backend.count() == {}
    await backend.push(large[:12])
    assert await backend.count() == {"ready": 12}


async def test_the_bell_tells_other_processes_of_new_messages(
    location: PagesQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile an idle worker reads the bell, and neither lists nor reads anything else."""
    monkeypatch.setattr("jobsync.queue.pages.bell.READ_INTERVAL", 0.001)
    # Whoever listens to the bell several times in a wait ends it by the clock.
    location.clock._is_still = False
    _, producer = await open_counting(location)
    counting, worker = await open_counting(location)
    assert await claim(worker) == []
    before = counting.requests.copy()
    for _ in range(5):
        location.clock.ahead += 20
        await worker.wait(0.01)
        assert await claim(worker) == []
    assert counting.requests - before == Counter(other=(counting.requests - before)["other"])
    await producer.push(new_messages(1))
    await worker.wait(60)
    (message,) = await claim(worker)
    # A push within two seconds rings no more; whoever heard the bell looks once more.
    await producer.push(new_messages(2))
    claimed = await worker.claim(10, session=ME, visibility=30)
    assert (ids(claimed.messages), claimed.due is not None) in [([], True), (["id-2"], True)]
    location.clock.ahead += 3
    found = claimed.messages or await claim(worker)
    assert ids(found) == ["id-2"]
    assert await settle_all(worker, [message, *found]) == [True, True]


async def test_a_lost_ring_delays_a_message_and_no_more(location: PagesQueues) -> None:
    """Pages are listed every five minutes, whatever the bell says."""
    _, worker = await open_counting(location)
    assert await claim(worker) == []
    await (await location.open("mails")).push(new_messages(1))
    location.clock.ahead += 4
    assert await claim(worker) == []
    location.clock.ahead += 300
    assert ids(await claim(worker)) == ["id-1"]


async def test_a_broken_bell_stops_nobody(location: PagesQueues) -> None:
    """It is only a hint."""
    await spoil(location, "bell/", "queues", ["not", "numbers"])
    _, producer = await open_counting(location)
    await producer.push(new_messages(1))
    assert ids(await claim(producer)) == ["id-1"]


async def test_a_claim_that_nobody_renewed_for_an_hour_is_ended_at_first_sight(
    location: PagesQueues,
) -> None:
    """One-shot runs live too short to watch a claim; the age of its page is the server's."""
    _, first = await open_counting(location)
    await first.push(new_messages(1))
    (message,) = await claim(first)
    location.clock.ahead += 3_500
    _, second = await open_counting(location)
    assert (await second.claim(1, session=OTHER, visibility=30)).lapse != 0
    assert await second.end_claims() == []
    location.clock.ahead += 200
    counting, third = await open_counting(location)
    await counting.write([Put("session/somebody", {})])
    claimed = await third.claim(1, session=OTHER, visibility=30)
    assert claimed.lapse == 0
    assert [each.id for each in await third.end_claims()] == [message.id]
    assert ids(await claim(third, suspects=True)) == [message.id]


@pytest.mark.parametrize("pages", [10, 70])
async def test_a_claim_in_a_page_that_others_change_is_seen_to_lapse(
    location: PagesQueues, pages: int
) -> None:
    """However many pages before it are renewed: 32 are read at a time, and each has its turn.

    Found: the first 32 were read again and again, and a page behind them never.
    """
    _, busy = await open_counting(location)
    _, killed = await open_counting(location)
    _, watcher = await open_counting(location)
    for page in range(pages):
        await busy.push(new_messages(page))
        location.clock.ahead += 1
    held: list[Message] = []
    while len(held) < pages:
        held += await claim(busy, pages - len(held))
    looks = 5 + -(-pages // 32)
    await busy.push(new_messages("lost", *(f"of-others-{look}" for look in range(looks))))
    location.clock.ahead += 1
    assert ids(await claim(killed, 1, session="worker-3.c")) == ["id-lost"]
    ended: list[str] = []
    for look in range(looks):
        location.clock.ahead += 10
        assert all(await busy.extend([each.receipt for each in held], 30))
        # A process that sees the page only once.
        _, peer = await open_counting(location)
        taken = await claim(peer, 1, session=f"worker-4{look}.p")
        assert ids(taken) == [f"id-of-others-{look}"]
        assert await settle_all(peer, taken) == [True]
        await watcher.claim(0, session=OTHER, visibility=30)
        ended += [each.id for each in await watcher.end_claims()]
    assert ended == ["id-lost"]


async def test_pages_whose_names_are_late_are_found_by_a_machine_whose_clock_is_ahead(
    location: PagesQueues,
) -> None:
    """What is passed over counts from the server's time, with the same margin for slow pushes."""
    server = location.clock.wall().seconds
    names = {seconds: f"0/{name_page(server - seconds, 'x')}" for seconds in (60, 20, 5)}
    done = [ListedPage(names[s], "1", PageMark.DONE, server - s, server) for s in names]
    _, worker = await open_counting(location)
    for ahead in (0, 25):
        location.clock.ahead = ahead
        worker._finder._advance_frontiers(done)
        assert worker._finder._frontiers == {"5": names[20]}


async def test_a_long_claim_is_not_ended_after_an_hour(location: PagesQueues) -> None:
    """It holds for as long as its worker said, whatever else is in its page."""
    _, first = await open_counting(location)
    await first.push(new_messages(1, 2))
    (_, done) = await claim(first, visibility=7_200)
    assert await settle_all(first, [done]) == [True]
    location.clock.ahead += 4_000
    counting, second = await open_counting(location)
    await counting.write([Put("session/somebody", {})])
    assert (await second.claim(1, session=OTHER, visibility=30)).lapse != 0
    assert await second.end_claims() == []


async def test_a_long_claim_is_not_ended_with_a_short_one_of_the_same_page(
    location: PagesQueues,
) -> None:
    """Although nobody has written the page for an hour."""
    _, first = await open_counting(location)
    await first.push(new_messages(1, 2))
    await claim(first, 1, visibility=7_200)
    (short,) = await claim(first, 1, visibility=30)
    location.clock.ahead += 4_000
    counting, second = await open_counting(location)
    await counting.write([Put("session/somebody", {})])
    ended = []
    for _ in range(4):
        await second.claim(1, session=OTHER, visibility=30)
        ended += await second.end_claims()
        location.clock.ahead += 12
    assert [each.id for each in ended] == [short.id]
    # Nobody looks at once, again and again, for what does not lapse yet.
    assert (await second.claim(0, session=OTHER, visibility=30)).lapse != 0


async def test_done_pages_of_a_billed_store_go_by_the_servers_clock(
    location: PagesQueues,
) -> None:
    """What only looks like a done page is read first, reported, and never deleted.

    Pages that others finished are read, too. Its own are not.
    """
    counting, backend = await open_counting(location)
    _, other = await open_counting(location)
    await other.push(new_messages(3))
    await settle_all(other, await claim(other))
    await backend.push(new_messages(1, 2))
    await settle_all(backend, await claim(backend))
    await counting.write([Put(f"{LANE}{NAME}", [1, 2, 3], mark=PageMark.DONE)])
    location.clock.ahead += 3_700
    assert await backend.forget("completed", older_than=60) == 0
    location.clock.ahead += 700
    await counting.write([Put("session/somebody", {})])
    before = counting.requests["GET"]
    assert await backend.forget("completed", older_than=60) == 3
    assert counting.requests["GET"] - before == 2
    (left,) = await read_pages(location)
    assert left.value == [1, 2, 3]


async def test_a_page_that_was_overwritten_after_it_was_done_is_kept(
    location: PagesQueues,
) -> None:
    """Whoever has finished a page drops the version that it knows, or reads it again."""
    counting, backend = await open_counting(location)
    await backend.push(new_messages(1))
    await settle_all(backend, await claim(backend))
    (done,) = await read_pages(location)
    await counting.write([Put(done.key, [1, 2, 3], done, mark=PageMark.DONE)])
    location.clock.ahead += 4_000
    await counting.write([Put("session/somebody", {})])
    assert await backend.forget("completed", older_than=60) == 0
    (left,) = await read_pages(location)
    assert left.value == [1, 2, 3]


async def test_a_queue_without_finished_pages_is_not_searched_for_them(
    location: PagesQueues,
) -> None:
    """For an hour: what is done from now on is not old enough before."""
    store, backend = await open_counting(location)
    await backend.push(new_messages(1))
    for _ in range(6):
        assert await backend.forget("completed", older_than=300) == 0
        location.clock.ahead += 599
    assert store.requests["LIST"] == 2
    await settle_all(backend, await claim(backend))
    location.clock.ahead += 3601
    assert await backend.forget("completed", older_than=300) == 0
    location.clock.ahead += 3601
    other, _ = await open_counting(location)
    await other.write([Put("session/latest", {})])
    assert await backend.forget("completed", older_than=300) == 1


async def test_a_record_of_a_queue_that_cannot_be_read_stops_claims_and_no_worker(
    location: PagesQueues,
) -> None:
    """Nobody knows whether there is a pause; resuming writes the record anew."""
    backend = await location.open("mails")
    await backend.push(new_messages(1))
    store = await location.location.open(location.components())
    record = await store.get("queue/mails")
    assert record is not None
    await store.put(record, {"since": "yesterday"})
    location.advance(10)
    with pytest.raises(Unavailable, match=r"not the record of a queue.*queues resume"):
        await claim(backend, 1)
    await (await location.open("mails")).push(new_messages(2))
    assert await backend.resume() is True
    assert len(await claim(backend, 2)) == 2
    await store.close()


async def read_bell(location: PagesQueues) -> int:
    """Return how often the bell of the queue was rung."""
    record = await (await location.location.open()).get("bell/queues")
    return 0 if record is None else record.value["mails"]


async def finish(backend: PagesBackend, move: Transition = "bury") -> None:
    """Claim and settle all messages of a queue."""
    await settle_all(backend, await claim(backend), move, error="no")


async def lapse(backend: PagesBackend, location: PagesQueues) -> None:
    """Lose a claim, and end it."""
    assert len(await claim(backend)) == 1
    location.advance(31)
    assert len(await backend.end_claims()) == 1


async def redrive_halfway(backend: PagesBackend) -> None:
    """Redrive dead letters, of which some cannot be moved."""

    async def fail(ids: Collection[str] | None, limit: int | None) -> int:
        del ids, limit
        raise OutcomeUnknown("the store", "1 message was queued again before")

    backend._moves.redrive = fail  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        await backend.redrive()


Act: TypeAlias = Callable[[PagesBackend, PagesQueues], Awaitable[Any]]
ANNOUNCED: dict[str, tuple[Act | None, Act]] = {
    "a push": (None, lambda one, _: one.push(new_messages(2))),
    "a push with a delay": (None, lambda one, _: one.push(new_messages(2, delay=5.0))),
    "a push with a key": (None, lambda one, _: one.push(new_messages(2, key="l"))),
    "a push that replaces": (
        lambda other, _: other.push(new_messages(2, key="k")),
        lambda one, _: one.push(new_messages(3, key="k", replace=True)),
    ),
    "a retry": (None, lambda one, _: finish(one, "retry")),
    "the end of a session": (
        lambda other, _: claim(other, session=OTHER),
        lambda one, _: one.end_claims({OTHER}),
    ),
    "a lapse": (None, lapse),
    "a redrive": (lambda other, _: finish(other), lambda one, _: one.redrive()),
    "a redrive that fails halfway": (
        lambda other, _: finish(other),
        lambda one, _: redrive_halfway(one),
    ),
    "the end of a delay": (
        lambda other, _: other.push(new_messages(2, delay=500.0)),
        lambda one, _: one.run_now("id-2"),
    ),
    "the end of a pause": (lambda other, _: other.pause(), lambda one, _: one.resume()),
}


@pytest.mark.parametrize(("before", "act"), ANNOUNCED.values(), ids=ANNOUNCED)
async def test_what_can_be_claimed_again_is_announced_to_other_processes(
    location: PagesQueues, before: Act | None, act: Act
) -> None:
    """By a ring of the process that has brought it about."""
    _, other = await open_counting(location)
    await other.push(new_messages(1))
    if before is not None:
        await before(other, location)
    _, one = await open_counting(location)
    rung = await read_bell(location)
    await act(one, location)
    assert await read_bell(location) == rung + 1


@pytest.mark.parametrize("is_dead", [True, False])
async def test_claims_that_ended_are_reported_although_another_page_failed(
    location: PagesQueues, *, is_dead: bool
) -> None:
    """By the next call, each of them once."""
    counting, one = await open_counting(location)
    _, other = await open_counting(location)
    for number in range(3):
        await other.push(new_messages(number))
    session = OTHER if is_dead else ME
    assert len(await claim(other if is_dead else one, session=session)) == 3
    if not is_dead:
        location.advance(31)
    dead = {OTHER} if is_dead else ()
    counting.crash_at = counting.requests["PUT"] + 1
    with pytest.raises(Unavailable):
        await one.end_claims(dead)
    counting.crash_at = None
    ended = await one.end_claims(dead)
    assert sorted(each.id for each in ended) == ["id-0", "id-1", "id-2"]
    assert await one.end_claims(dead) == []


@pytest.mark.parametrize("beside", ["a delay", "a suspect", "something ready", "nothing"])
async def test_all_claims_of_a_dead_session_are_ended_whatever_is_beside_them(
    location: PagesQueues, beside: str
) -> None:
    """By a process that has seen none of the pages."""
    _, producer = await open_counting(location)
    await producer.push(new_messages(1, 2))
    first = await claim(producer, 1 if beside == "something ready" else 2, session=OTHER)
    if beside == "a delay":
        assert all(await settle_all(producer, first[1:], "retry", delay=50, error="no"))
    elif beside == "a suspect":
        assert len(await producer.end_claims({OTHER})) == 2
        assert len(await claim(producer, 1, session=OTHER, suspects=True)) == 1
    elif beside == "nothing":
        assert all(await settle_all(producer, first[1:]))
    _, one = await open_counting(location)
    assert [each.id for each in await one.end_claims({OTHER})] == ["id-1"]


async def test_a_claim_of_whole_pages_splits_only_its_first_and_has_no_more_than_it_may(
    location: PagesQueues,
) -> None:
    """One after the other at first, several at once when their size is known."""
    _, producer = await open_counting(location)
    _, worker = await open_counting(location)
    for page in range(10):
        await producer.push(new_messages(*(f"{page}-{number}" for number in range(3))))
    sizes = [len(await claim(worker, 7, at_most=8)) for _ in range(3)]
    assert sizes == [6, 6, 6]
    assert len(await claim(worker, 2, at_most=2)) == 2
    assert len(await claim(worker, 7)) == 7
    assert len(await claim(worker, 7, at_most=8)) == 3


@pytest.mark.parametrize("is_paused", [False, True])
async def test_suspects_of_a_paused_queue_are_not_announced(
    location: PagesQueues, *, is_paused: bool
) -> None:
    """A worker that looked for them at once would find none, again and again."""
    _, producer = await open_counting(location)
    await producer.push(new_messages(1))
    await claim(producer, session=OTHER)
    await producer.end_claims({OTHER})
    if is_paused:
        await producer.pause()
    _, worker = await open_counting(location)
    claimed = await worker.claim(1, session=ME, visibility=30)
    assert (claimed.messages, claimed.suspects) == ([], not is_paused)


async def test_what_lapsed_beside_a_claim_is_among_the_dead_letters_at_once(
    location: PagesQueues,
) -> None:
    """Whoever writes the page finishes the move that its write has begun."""
    _, killed = await open_counting(location)
    await killed.push(new_messages(1, 2, max_attempts=1))
    await claim(killed, 1, session=OTHER)
    await killed.end_claims({OTHER})
    assert ids(await claim(killed, 1, session=OTHER, suspects=True)) == ["id-1"]
    _, one = await open_counting(location)
    await one.claim(0, session=ME, visibility=30)
    await one._pages.read(dict.fromkeys(one._finder._known))
    location.advance(31)
    assert ids(await claim(one)) == ["id-2"]
    (dead,) = await read_pages(location, DEAD)
    assert [each["id"] for each in dead.value["messages"]] == ["id-1"]
    (source,) = await read_pages(location)
    assert [each.get("state") for each in source.value["messages"]] == ["moved", "claimed"]


@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize(
    "error",
    [Unavailable("store", "away"), Misconfigured("url", "s3://", "is forbidden", "allow it")],
    ids=["away", "forbidden"],
)
async def test_settlements_that_were_made_in_part_are_in_doubt(
    location: PagesQueues, accepted: int, error: JobsyncError
) -> None:
    """`Unavailable` would mean that none was made; all of them may be repeated."""
    counting, worker = await open_counting(location)
    for number in range(2):
        await worker.push(new_messages(number))
    messages = await claim(worker)
    counting.crash_at, counting.crash = counting.requests["PUT"] + accepted, error
    if accepted < 2:
        with pytest.raises(OutcomeUnknown if accepted else type(error)):
            await settle_all(worker, messages)
    counting.crash_at = None
    assert await settle_all(worker, messages) == [True, True]


async def test_progress_waits_for_a_renewal_that_succeeds(location: PagesQueues) -> None:
    """What was reported while one was under way is stored with the next."""
    counting, worker = await open_counting(location)
    await worker.push(new_messages(1))
    (message,) = await claim(worker)

    async def report(progress: float) -> None:
        await worker.report_progress([ProgressReport(message.receipt, progress, "")])

    async def find() -> float | None:
        info = await worker.get("id-1")
        assert info is not None
        return info.progress

    await report(0.1)
    counting.crash_at = counting.requests["PUT"]
    with pytest.raises(Unavailable):
        await worker.extend([message.receipt], 30)
    counting.crash_at = None
    write = counting.write

    async def report_meanwhile(changes: Sequence[Change]) -> list[Outcome]:
        await report(0.2)
        return await write(changes)

    counting.write = report_meanwhile  # type: ignore[method-assign]
    assert await worker.extend([message.receipt], 30) == [True]
    counting.write = write  # type: ignore[method-assign]
    assert await find() == 0.1
    assert await worker.extend([message.receipt], 30) == [True]
    assert await find() == 0.2


async def test_progress_of_others_is_stored_after_a_settlement(location: PagesQueues) -> None:
    """What waits for the next renewal is forgotten of the settled message alone."""
    _, worker = await open_counting(location)
    await worker.push(new_messages(1, 2, 3))
    messages = await claim(worker)
    await worker.report_progress([ProgressReport(each.receipt, 0.5, "") for each in messages])
    await settle_all(worker, messages[:1])
    await worker.clear_progress(["id-1"])
    assert await worker.extend([each.receipt for each in messages[1:]], 30) == [True, True]
    found = [await worker.get(f"id-{number}") for number in (1, 2, 3)]
    assert [info and info.progress for info in found] == [None, 0.5, 0.5]


async def test_a_message_is_shown_as_it_is_where_it_has_moved_to(location: PagesQueues) -> None:
    """Also while the page that it leaves does not know that it has arrived."""
    counting, dying = await open_counting(location)
    await dying.push(new_messages(1))
    await settle_all(dying, await claim(dying), "bury", error="no")
    (dead,) = await dying.browse("dead")
    assert dead.session == ME
    counting.crash_at = counting.requests["PUT"] + 2
    assert await dying.redrive() == 1
    _, worker = await open_counting(location)
    (waiting,) = await worker.browse("waiting")
    assert (waiting.session, waiting.due) == ("", waiting.enqueued)
    assert ids(await claim(worker)) == ["id-1"]
    assert await worker.count() == {"claimed": 1}


async def test_a_cancelled_message_is_with_the_finished_ones_at_once(
    location: PagesQueues,
) -> None:
    """No other process has to finish its move."""
    _, backend = await open_counting(location)
    await backend.push(new_messages(1, 2))
    assert await backend.cancel("id-1") is not None
    (kept,) = await read_pages(location, DEAD)
    assert [each["id"] for each in kept.value["messages"]] == ["id-1"]


async def test_what_is_completed_and_what_is_dead_is_removed_each_in_its_time(
    location: PagesQueues,
) -> None:
    """A search for one does not put off that for the other."""
    counting, backend = await open_counting(location)
    await backend.push(new_messages(1))
    await finish(backend, "complete")
    await backend.push(new_messages(2))
    await finish(backend)
    location.clock.ahead += 4_000
    await counting.write([Put("session/somebody", {})])
    assert await backend.forget("completed", older_than=60) == 1
    assert await backend.forget("dead", older_than=60) == 1
    assert await backend.forget("dead", older_than=60) == 0


MOVED_HERE: dict[str, tuple[dict[str, Any], Act]] = {
    "a redrive": ({}, lambda one, _: one.redrive()),
    "the end of a delay": ({"delay": 500.0}, lambda one, _: one.run_now("id-1")),
    "a push that replaces": (
        {"delay": 500.0},
        lambda one, _: one.push(new_messages(2, key="k", replace=True)),
    ),
}


@pytest.mark.parametrize(("options", "act"), MOVED_HERE.values(), ids=MOVED_HERE)
async def test_what_a_process_has_moved_it_claims_at_once(
    location: PagesQueues, options: dict[str, Any], act: Act
) -> None:
    """Without a listing: it knows the page to which the message has moved."""
    counting, one = await open_counting(location)
    await one.push(new_messages(1, key="k", **options))
    if not options:
        await finish(one)
    location.clock.ahead += 10
    assert await claim(one) == []
    listings = counting.requests["LIST"]
    await act(one, location)
    looked = counting.requests["LIST"] - listings
    assert ids(await claim(one)) == ["id-1"]
    assert counting.requests["LIST"] - listings == looked


@pytest.mark.parametrize(("later", "removed"), [(3_599, 0), (3_601, 1)])
async def test_a_dead_letter_is_removed_as_soon_as_it_is_old_enough(
    location: PagesQueues, backend: PagesBackend, later: float, removed: int
) -> None:
    """Counted from its end."""
    await backend.push(new_messages(1))
    location.advance(5_000)
    await finish(backend)
    location.advance(later)
    assert await backend.forget("dead", older_than=3_600) == removed


@pytest.mark.parametrize(("state", "move"), [("completed", "complete"), ("dead", "bury")])
async def test_what_is_left_after_a_full_part_is_removed_without_a_wait(
    location: PagesQueues, state: Any, move: Transition
) -> None:
    """Where a search is billed, the next one waits only after it has found no more."""
    counting, backend = await open_counting(location)
    for number in range(3):
        await backend.push(new_messages(number))
        await finish(backend, move)
    location.clock.ahead += 4_000
    await counting.write([Put("session/somebody", {})])
    removed = [await backend.forget(state, older_than=60, limit=1) for _ in range(4)]
    assert removed == [1, 1, 1, 0]
    before = counting.requests["LIST"]
    assert await backend.forget(state, older_than=60, limit=1) == 0
    assert counting.requests["LIST"] == before
