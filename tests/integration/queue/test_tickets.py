"""The coordinator of a queue in pages: tickets, the deputy, and what workers do without them."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from queue_locations import PagesQueues
from store_locations import MemoryLocation
from waiting import until

from jobsync import Database, Event, Fenced, Invalid, QueuePlugin, Record, Store, Term, Unavailable
from jobsync.queue.backend import EndedClaim, Message, NewMessage, Settlement
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.bell import FOLLOW_UP, READ_INTERVAL
from jobsync.queue.pages.dispatcher import _is_news
from jobsync.queue.pages.page import PageMark, name_page
from jobsync.queue.pages.tickets import Ticket, WatchDuty
from jobsync.queue.settings import QueueOrder
from jobsync.stores.contract import Head, Outcome, Put
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.settling import SettlingStore

KEY = "ticket/mails"
_numbers = itertools.count()


class CountingStore(StoreDecorator):
    """A store that bills, and counts requests by kind and by what they are about."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.is_billed = True
        self.requests: Counter[str] = Counter()
        self.is_down = False
        """Whether it does not answer reads."""
        # As in a process of its own, which notifies nobody else.
        self.name += f"-{next(_numbers)}"

    async def get_many(self, keys: Any, *, tombstones: bool = False) -> list[Record | None]:
        self.requests.update(f"GET {key.partition('/')[0]}" for key in keys)
        if self.is_down:
            raise Unavailable(self.name, "a test says so")
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def write(self, changes: Any) -> list[Outcome]:
        self.requests.update(f"PUT {change.key.partition('/')[0]}" for change in changes)
        return await self.inner.write(changes)

    async def heads(self, prefix: str, **options: Any) -> list[Head]:
        self.requests[f"LIST {prefix.partition('/')[0]}"] += 1
        if self.is_down:
            raise Unavailable(self.name, "a test says so")
        return await self.inner.heads(prefix, **options)


class StubFleet:
    """What a process knows of the others, as a test says."""

    dispatch_interval = 0.0

    def __init__(self, process: "Process") -> None:
        self._process = process
        self.term: Term | None = None
        self.epoch: int | None = None
        self.living: frozenset[str] = frozenset()
        self.workers: list[str] = []
        self.veto = ""
        self.published: list[int] = []
        self.ended: list[EndedClaim] = []
        self.failures: list[Exception] = []

    @property
    def incarnation(self) -> str:
        return self._process.session

    async def list_workers(self) -> list[str]:
        return self.workers

    async def change(self) -> None:
        await asyncio.sleep(0)

    async def find_clock_veto(self) -> str:
        return self.veto

    def on_published(self, count: int) -> None:
        self.published.append(count)

    def on_ended(self, ended: list[EndedClaim]) -> None:
        self.ended += ended

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)


class Process:
    """A process of a queue: its backend, and what it knows of the others."""

    def __init__(
        self, fleet: "Fleet", session: str, store: CountingStore, order: QueueOrder
    ) -> None:
        self.session = session
        self.store = store
        self.events: list[Event] = []
        self._clock = fleet.location.clock
        components = fleet.location.components()
        components.events.on("store:*", self.events.append)
        self.settling = SettlingStore(store, components)
        self.backend = PagesBackend(self.settling, "mails", components, order=order)
        self.fleet = StubFleet(self)
        self.backend.join(self.fleet)
        self.components = components

    @property
    def requests(self) -> Counter[str]:
        """The requests since the last time."""
        found, self.store.requests = self.store.requests, Counter()
        return found

    async def push(self, *values: Any, delay: float = 0.0) -> None:
        """Push messages, in one page."""
        await self.backend.push(
            [
                NewMessage(id=f"id-{value}", value={"n": value}, max_attempts=4, delay=delay)
                for value in values
            ]
        )

    async def claim(self, limit: int = 10, **options: Any) -> list[str]:
        """Claim messages; return their ids."""
        return [each.id for each in await self.claim_messages(limit, **options)]

    async def claim_messages(self, limit: int = 10, **options: Any) -> list[Message]:
        """Claim messages."""
        claimed = await self.backend.claim(limit, session=self.session, visibility=30, **options)
        return claimed.messages

    async def listen(self) -> None:
        """Read the bell, when it is time."""
        self._clock.ahead += READ_INTERVAL
        await self.backend.wait(0.01)

    async def coordinate(self) -> None:
        """Do the coordinator's work that is due."""
        assert self.fleet.term is not None
        await self.backend._dispatcher._work(self.fleet, self.fleet.term)


class Fleet:
    """A coordinator with followers, on one store."""

    def __init__(self, location: PagesQueues) -> None:
        self.location = location
        self.processes: list[Process] = []

    async def start(self, session: str, order: QueueOrder = "fifo") -> Process:
        """Start a process."""
        store = CountingStore(await self.location.location.open(self.location.components()))
        process = Process(self, session, store, order)
        self.processes.append(process)
        self.location._backends.append(process.backend)
        return process

    def elect(self, leader: Process, epoch: int) -> None:
        """Make a process the coordinator, as all others know."""
        for process in self.processes:
            process.fleet.epoch, process.fleet.term = epoch, None
        leader.fleet.term = Term(leader.settling, epoch, lambda: True, leader.components.ids)
        leader.fleet.workers = [each.session for each in self.processes if each is not leader]
        leader.fleet.living = frozenset(each.session for each in self.processes)

    async def pass_time(self, seconds: float) -> None:
        """Advance time, in which the coordinator works."""
        for _ in range(int(seconds)):
            self.location.clock.ahead += 1
            for process in self.processes:
                if process.fleet.term is not None:
                    await process.coordinate()

    async def read_ticket(self) -> Ticket | None:
        """Return the ticket as it is stored."""
        record = await (await self.location.location.open()).get(KEY)
        if record is None or record.value is None:
            return None
        return msgspec.convert(record.value, Ticket)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """A coordinator, a deputy, a follower and a producer, after all is quiet."""
    location = PagesQueues(MemoryLocation())
    fleet = Fleet(location)
    for session in ("leader", "deputy", "follower", "producer"):
        await fleet.start(session)
    leader, deputy, follower, _ = fleet.processes
    fleet.elect(leader, 1)
    leader.fleet.workers = ["deputy", "follower"]
    await leader.coordinate()
    for worker in (deputy, follower):
        assert await worker.claim() == []
    location.clock.ahead += READ_INTERVAL + 1
    for process in fleet.processes:
        _ = process.requests
    yield fleet
    await location.close()


async def test_a_worker_uses_the_ticket_in_place_of_a_listing(fleet: Fleet) -> None:
    """It has the names and versions of the pages, and the number of the ring."""
    leader, _, follower, producer = fleet.processes
    await producer.push(1)
    await leader.listen()
    await leader.coordinate()
    assert leader.fleet.published[-1] == 1
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    requests = follower.requests
    assert (requests["GET ticket"], requests["LIST page"]) == (1, 0)
    assert (requests["GET page"], requests["PUT page"]) == (1, 1)


async def test_a_ticket_that_is_older_than_the_ring_is_not_used(fleet: Fleet) -> None:
    """The bell rings, and the coordinator has not heard it yet: the worker lists."""
    leader, _, follower, producer = fleet.processes
    await producer.push(1)
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    assert follower.requests["LIST page"] == 1
    ticket = await fleet.read_ticket()
    assert ticket is not None
    assert ticket.bell == leader.backend._finder.plan.number == 0


async def test_a_ticket_that_may_lack_silent_pushes_is_followed_by_another_look(
    fleet: Fleet,
) -> None:
    """A push within two seconds of a ring is in the ticket of the coordinator's second listing."""
    leader, _, follower, producer = fleet.processes
    await producer.push(1)
    await leader.listen()
    await leader.coordinate()
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    await producer.push(2)
    ticket = await fleet.read_ticket()
    assert ticket is not None
    assert not ticket.is_settled
    fleet.location.clock.ahead += FOLLOW_UP + 0.1
    await leader.coordinate()
    _ = follower.requests
    assert await follower.claim() == ["id-2"]
    requests = follower.requests
    assert (requests["GET ticket"], requests["LIST page"]) == (1, 0)
    # Nothing is missing in that ticket: nobody looks again.
    fleet.location.clock.ahead += FOLLOW_UP + 0.1
    assert await follower.claim() == []
    assert follower.requests == Counter()


async def test_a_worker_lists_after_a_ring_if_the_ticket_is_not_settled_in_time(
    fleet: Fleet,
) -> None:
    """The coordinator may have died after its first listing."""
    leader, _, follower, producer = fleet.processes
    await producer.push(1)
    await leader.listen()
    await leader.coordinate()
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    await producer.push(2)
    fleet.location.clock.ahead += FOLLOW_UP + 0.1
    _ = follower.requests
    assert await follower.claim() == ["id-2"]
    assert follower.requests["LIST page"] == 1


async def test_a_ticket_is_written_on_change_only(fleet: Fleet) -> None:
    """In an hour in which nothing happens the coordinator lists, and nobody writes."""
    leader, _, follower, _ = fleet.processes
    await fleet.pass_time(600)
    _ = leader.requests
    await fleet.pass_time(3600)
    requests = leader.requests
    assert requests["PUT ticket"] == 0
    assert requests["LIST page"] == 3600 / 180
    assert await follower.claim() == []
    assert follower.requests["LIST page"] == 1


@pytest.mark.parametrize("workers", [0, 1, 2])
async def test_a_ticket_is_written_for_two_other_workers(workers: int) -> None:
    """For fewer it costs as much as it saves. One that is not needed any more is withdrawn."""
    location = PagesQueues(MemoryLocation())
    fleet = Fleet(location)
    leader = await fleet.start("leader")
    fleet.elect(leader, 1)
    leader.fleet.workers = [f"worker-{number}" for number in range(workers)]
    await leader.coordinate()
    assert (await fleet.read_ticket() is not None) is (workers == 2)
    assert len(leader.fleet.published) == (workers == 2)
    leader.fleet.workers, leader.fleet.living = ["worker-0"], frozenset({"worker-0"})
    await leader.coordinate()
    assert await fleet.read_ticket() is None
    await location.close()


async def test_a_replaced_coordinator_cannot_publish(fleet: Fleet) -> None:
    """The store refuses its ticket, however late it comes; workers use that of the other."""
    leader, deputy, follower, producer = fleet.processes
    former = leader.fleet.term
    assert former is not None
    fleet.elect(deputy, 2)
    await deputy.coordinate()
    await producer.push(1)
    await leader.listen()
    leader.fleet.term = former
    leader.fleet.workers = ["deputy", "follower"]
    with pytest.raises(Fenced):
        await leader.coordinate()
    record = await (await fleet.location.location.open()).get(KEY)
    assert record is not None
    assert record.epoch == 2
    assert record.value["bell"] == 0
    await follower.listen()
    assert await follower.claim() == ["id-1"]


async def test_the_ticket_of_a_former_coordinator_is_not_used(fleet: Fleet) -> None:
    """Its successor has not published yet: each worker watches and lists for itself."""
    leader, deputy, follower, producer = fleet.processes
    await producer.push(1)
    await leader.listen()
    await leader.coordinate()
    fleet.elect(deputy, 2)
    assert follower.backend._tickets.duty is WatchDuty.ALONE
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    assert follower.requests["LIST page"] == 1


async def test_workers_go_on_without_a_coordinator(fleet: Fleet) -> None:
    """It is dead, and nobody was elected: the others list when the bell rings, and watch."""
    leader, deputy, follower, producer = fleet.processes
    leader.fleet.term = None
    for process in fleet.processes:
        process.fleet.epoch = None
    await producer.push(1, 2)
    await follower.listen()
    assert await follower.claim(1) == ["id-1"]
    await deputy.listen()
    assert await deputy.claim(1) == ["id-2"]
    start, ended = fleet.location.clock.ahead, list[EndedClaim]()
    while not ended:
        claimed = await follower.backend.claim(1, session="follower", visibility=30)
        assert claimed.messages == []
        if claimed.lapse is not None and claimed.lapse <= 0:
            ended = await follower.backend.end_claims(keep=["id-1"])
        fleet.location.clock.ahead += 1
        assert fleet.location.clock.ahead - start < 45
    assert [each.id for each in ended] == ["id-2"]


@pytest.mark.parametrize("value", [[1, 2], {"bell": -1}, {"bell": 0, "pages": [["x"]]}, "ticket"])
async def test_a_ticket_that_is_not_understood_is_reported_and_not_used(
    fleet: Fleet, value: Any
) -> None:
    """Once; the worker lists."""
    _, _, follower, producer = fleet.processes
    store = await fleet.location.location.open()
    record = await store.get(KEY)
    assert record is not None
    await store.write([Put(KEY, value, record, epoch=1)])
    await producer.push(1)
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    assert [event["key"] for event in follower.events] == [KEY]


async def test_a_ticket_of_newer_code_is_not_used(fleet: Fleet) -> None:
    """Nor reported: it is meant for others."""
    _, _, follower, producer = fleet.processes
    store = await fleet.location.location.open()
    record = await store.get(KEY)
    assert record is not None
    await store.write([Put(KEY, {"bell": 7}, record, epoch=1, format=9)])
    await producer.push(1)
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    assert follower.events == []


async def test_only_the_coordinator_and_the_deputy_watch_claims(fleet: Fleet) -> None:
    """A third worker lists nothing while somebody works, and the claim is ended all the same."""
    leader, deputy, follower, producer = fleet.processes
    other = await fleet.start("other")
    other.fleet.epoch = 1
    await producer.push(1)
    await leader.listen()
    await leader.coordinate()
    for worker in (other, follower, deputy):
        await worker.listen()
        await worker.claim()
    await fleet.pass_time(5)
    for worker in (follower, deputy):
        await worker.claim()
        _ = worker.requests
    start = fleet.location.clock.ahead
    while not leader.fleet.ended:
        await fleet.pass_time(1)
        for worker in (follower, deputy):
            assert await worker.claim() == []
        assert fleet.location.clock.ahead - start < 45
    assert [each.id for each in leader.fleet.ended] == ["id-1"]
    assert follower.requests["LIST page"] == 0
    assert deputy.requests["LIST page"] >= 2
    # The bell has rung for it.
    fleet.location.clock.ahead += READ_INTERVAL
    await follower.listen()
    assert await follower.claim(suspects=True) == ["id-1"]


async def test_a_deputy_that_leaves_is_replaced_although_nothing_else_happens(
    fleet: Fleet,
) -> None:
    """No bell rings and no page is new: the ticket says who watches claims all the same."""
    leader, _, follower, producer = fleet.processes
    other = await fleet.start("other")
    other.fleet.epoch = 1
    leader.fleet.workers = ["deputy", "follower", "other"]
    leader.fleet.living |= {"other"}
    await fleet.pass_time(60)
    before = await fleet.read_ticket()
    assert before is not None
    assert before.deputy == "deputy"
    leader.fleet.workers = ["follower", "other"]
    leader.fleet.living -= {"deputy"}
    await fleet.pass_time(60)
    assert await fleet.read_ticket() == msgspec.structs.replace(before, deputy="follower")
    # It is read with the next ring.
    await producer.push(1)
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    assert follower.backend._tickets.duty is WatchDuty.DEPUTY


PAGES = (("live/p1", "v1", 1), ("live/p2", "v1", 1))
NEWS: list[tuple[str, Any, bool]] = [
    ("bell", 8, True),
    ("is_settled", True, True),
    ("deputy", "somebody", True),
    ("pages", (*PAGES, ("live/p3", "v1", 1)), True),
    ("pages", PAGES[:1], False),
    ("pages", (PAGES[0], ("live/p2", "v2", 3)), False),
    ("has_more", True, False),
    ("frontier", "live/p1", False),
    ("frontiers", ("live/p1",), False),
    ("due", 5.0, False),
]
"""Changes of one field of a ticket, and whether they are published by themselves."""


@pytest.mark.parametrize(("field", "value", "is_news"), NEWS)
def test_a_change_of_one_field_is_published_if_workers_look_for_it(
    field: str, value: Any, *, is_news: bool
) -> None:
    """What they see when they look anyway is not."""
    ticket = Ticket(bell=7, pages=PAGES, deputy="deputy")
    assert _is_news(ticket, msgspec.structs.replace(ticket, **{field: value})) is is_news
    assert {each for each, _, _ in NEWS} == {*Ticket.__struct_fields__}


async def test_a_page_that_is_claimed_long_after_its_ring_is_watched(fleet: Fleet) -> None:
    """All workers were busy. Whoever claims at last rings no bell."""
    leader, _, follower, producer = fleet.processes
    await producer.push(1)
    await leader.listen()
    await fleet.pass_time(12)
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    start = fleet.location.clock.ahead
    while not leader.fleet.ended:
        await fleet.pass_time(1)
        assert fleet.location.clock.ahead - start < 45


async def test_the_deputy_ends_claims_if_the_coordinator_does_not(fleet: Fleet) -> None:
    """The coordinator and a worker died together, and nobody has noticed yet."""
    leader, deputy, follower, producer = fleet.processes
    await producer.push(1)
    await leader.listen()
    await leader.coordinate()
    leader.fleet.term = None
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    await deputy.listen()
    start, ended = fleet.location.clock.ahead, list[EndedClaim]()
    while not ended:
        claimed = await deputy.backend.claim(1, session="deputy", visibility=30)
        assert claimed.messages == []
        if claimed.lapse is not None and claimed.lapse <= 0:
            ended = await deputy.backend.end_claims()
        fleet.location.clock.ahead += 1
        assert fleet.location.clock.ahead - start < 45
    assert [each.session for each in ended] == ["follower"]


async def test_a_ticket_does_not_keep_the_deputy_from_watching(fleet: Fleet) -> None:
    """It names no pages that are claimed. The coordinator dies after it has published one."""
    leader, deputy, follower, producer = fleet.processes
    await producer.push(1)
    await follower.listen()
    assert await follower.claim() == ["id-1"]
    await deputy.listen()
    assert await deputy.claim() == []
    start, ended = fleet.location.clock.ahead, list[EndedClaim]()
    while not ended:
        claimed = await deputy.backend.claim(1, session="deputy", visibility=30)
        if claimed.lapse is not None and claimed.lapse <= 0:
            ended = await deputy.backend.end_claims()
        fleet.location.clock.ahead += 1
        if fleet.location.clock.ahead - start == 5:
            await producer.push(2)
            await leader.listen()
            await leader.coordinate()
            await deputy.listen()
            leader.fleet.term = None
        assert fleet.location.clock.ahead - start < 45
    assert [each.session for each in ended] == ["follower"]


async def test_a_delayed_page_is_watched_when_its_delay_is_over(fleet: Fleet) -> None:
    """Whoever claims it rings no bell: the coordinator looks by itself."""
    leader, deputy, follower, producer = fleet.processes
    await producer.push(1, delay=100)
    for process in (leader, follower, deputy):
        await process.listen()
    await leader.coordinate()
    assert await follower.claim() == []
    ticket = await fleet.read_ticket()
    assert ticket is not None
    assert ticket.due == pytest.approx(fleet.location.clock.wall().seconds + 90, abs=15)
    await fleet.pass_time(10)
    _ = (leader.requests, follower.requests)
    await fleet.pass_time(50)
    # Nobody can have claimed it, so nobody watches it.
    assert leader.requests["LIST page"] <= 1
    await fleet.pass_time(40)
    assert await follower.claim() == ["id-1"]
    assert follower.requests["LIST page"] == 0
    start = fleet.location.clock.ahead
    while not leader.fleet.ended:
        await fleet.pass_time(1)
        assert fleet.location.clock.ahead - start < 45


async def test_a_page_that_no_ring_announced_is_found_within_a_minute(fleet: Fleet) -> None:
    """Its producer died before it rang. The coordinator rings, and others read the ticket."""
    leader, _, follower, producer = fleet.processes
    await producer.push(0)
    for worker in (leader, follower):
        await worker.listen()
    await leader.coordinate()
    (first,) = await follower.claim_messages()
    await follower.backend.settle([Settlement(receipt=first.receipt, move="complete")])
    await fleet.pass_time(10)
    now = fleet.location.clock.wall().seconds
    page = {"birth": "x" * 12, "messages": [{"id": "id-1", "value": {"n": 1}}]}
    store = await fleet.location.location.open()
    key = f"page/mails/0/{name_page(now, 'A' * 12)}"
    await store.write([Put(key, page, mark=PageMark.READY)])
    await fleet.pass_time(60)
    await follower.listen()
    _ = follower.requests
    assert await follower.claim() == ["id-1"]
    assert follower.requests["LIST page"] == 0


@pytest.mark.parametrize("finds_first", ["worker", "dispatcher"])
async def test_the_coordinator_rings_for_what_its_own_worker_finds(
    fleet: Fleet, finds_first: str
) -> None:
    """Both of them list, and share what they find."""
    leader, _, follower, _ = fleet.processes
    await fleet.pass_time(120)
    now = fleet.location.clock.wall().seconds
    page = {"birth": "x" * 12, "messages": [{"id": "id-1", "value": {"n": 1}}]}
    store = await fleet.location.location.open()
    await store.write([Put(f"page/mails/0/{name_page(now, 'A' * 12)}", page, mark=PageMark.READY)])
    fleet.location.clock.ahead += 180
    if finds_first == "worker":
        assert await leader.claim(0) == []
    await leader.coordinate()
    await follower.listen()
    assert await follower.claim() == ["id-1"]


async def test_the_coordinator_survives_an_outage(fleet: Fleet) -> None:
    """Whatever it does when the store is away, it goes on afterwards, and says so once a try."""
    leader, _, _, producer = fleet.processes
    leader.fleet.published.clear()
    leader.store.is_down = True
    fleet.location.clock.ahead += 180
    running = asyncio.ensure_future(leader.backend.coordinate())
    await until(lambda: leader.fleet.failures)
    assert {type(failure) for failure in leader.fleet.failures} == {Unavailable}
    leader.store.is_down = False
    await producer.push(1)
    fleet.location.clock.ahead += READ_INTERVAL
    await until(lambda: leader.fleet.published)
    assert not running.done()
    # The bell, too, may be out of reach, while it waits.
    leader.fleet.failures.clear()
    leader.store.is_down = True
    fleet.location.clock.ahead += READ_INTERVAL
    await until(lambda: leader.fleet.failures)
    assert not running.done()
    running.cancel()


async def test_a_page_before_the_frontier_is_found_within_a_minute(fleet: Fleet) -> None:
    """It is from a machine with a slow clock, or more urgent than what was done before."""
    leader, _, follower, producer = fleet.processes
    before = fleet.location.clock.wall().seconds - 5
    for number in range(3):
        await producer.push(number)
        fleet.location.clock.ahead += READ_INTERVAL + 1
        for worker in (leader, follower):
            await worker.listen()
        await leader.coordinate()
        (message,) = await follower.claim_messages()
        await follower.backend.settle([Settlement(receipt=message.receipt, move="complete")])
    await fleet.pass_time(70)
    assert leader.backend._finder._frontiers["5"] > f"0/{name_page(before, '')}"
    page = {"birth": "x" * 12, "messages": [{"id": "id-9", "value": {"n": 9}}]}
    store = await fleet.location.location.open()
    key = f"page/mails/0/{name_page(before, 'A' * 12)}"
    await store.write([Put(key, page, mark=PageMark.READY)])
    await fleet.pass_time(60)
    await follower.listen()
    assert await follower.claim() == ["id-9"]


async def test_a_ring_is_not_forgotten_while_the_store_is_away(fleet: Fleet) -> None:
    """The listing that it causes fails, and is repeated."""
    _, _, follower, producer = fleet.processes
    await producer.push(1)
    await follower.listen()
    follower.store.is_down = True
    with pytest.raises(Unavailable):
        await follower.claim()
    follower.store.is_down = False
    assert await follower.claim() == ["id-1"]


async def test_a_ring_of_its_own_makes_no_process_list(fleet: Fleet) -> None:
    """It knows what it has pushed; only the rings of others are news."""
    leader, _, _, producer = fleet.processes
    await leader.push(1)
    fleet.location.clock.ahead += READ_INTERVAL + 1
    await leader.listen()
    await leader.coordinate()
    assert leader.requests["LIST page"] == 0
    ticket = await fleet.read_ticket()
    assert ticket is not None
    assert (ticket.bell, len(ticket.pages)) == (1, 1)
    await producer.push(2)
    fleet.location.clock.ahead += READ_INTERVAL + 1
    await leader.listen()
    await leader.coordinate()
    assert leader.requests["LIST page"] == 1


async def test_a_ring_of_its_own_does_not_hide_that_of_another_process(fleet: Fleet) -> None:
    """A process that rings after another has not heard that one yet."""
    leader, _, follower, producer = fleet.processes
    await producer.push(1)
    await leader.push(2)
    await leader.listen()
    await leader.coordinate()
    await follower.listen()
    assert sorted(await follower.claim()) == ["id-1", "id-2"]
    ticket = await fleet.read_ticket()
    assert ticket is not None
    assert (ticket.bell, len(ticket.pages)) == (2, 2)


async def test_pushes_of_its_own_do_not_keep_a_process_from_the_bell(fleet: Fleet) -> None:
    """Each wakes its worker at once; the bell is read in its turn all the same."""
    _, _, follower, producer = fleet.processes
    await producer.push(1)
    for number in range(2, 8):
        waiting = asyncio.ensure_future(follower.backend.wait(60))
        await asyncio.sleep(0)
        await follower.push(number)
        await waiting
        fleet.location.clock.ahead += 1
        if "id-1" in await follower.claim(1):
            break
    else:
        pytest.fail("the message of the other process was not found")


async def test_a_machine_whose_clock_is_wrong_claims_no_delayed_messages(fleet: Fleet) -> None:
    """It claims the others; once its clock is right it claims them, too."""
    _, _, follower, producer = fleet.processes
    await producer.push(1, delay=100)
    await producer.push(2)
    follower.fleet.veto = "this clock is an hour ahead"
    fleet.location.clock.ahead += 3600
    await follower.listen()
    assert await follower.claim() == ["id-2"]
    fleet.location.clock.ahead += FOLLOW_UP
    claimed = await follower.backend.claim(10, session="follower", visibility=30)
    assert (claimed.messages, claimed.due, claimed.more) == ([], 5.0, False)
    follower.fleet.veto = ""
    assert await follower.claim() == ["id-1"]


@pytest.mark.parametrize("order", ["fifo", "lifo"])
async def test_the_order_of_a_queue(order: QueueOrder) -> None:
    """By pages. A delayed page does not come before its time, nor hide others."""
    location = PagesQueues(MemoryLocation())
    fleet = Fleet(location)
    producer, worker = await fleet.start("producer"), await fleet.start("worker", order)
    for number in range(4):
        location.clock.ahead += 1
        await producer.push(f"{number}-a", f"{number}-b")
    for number in range(300):
        await producer.push(f"later-{number}", delay=1000)
    found = await worker.claim(2)
    ticket = worker.backend._finder.build_ticket("")
    assert [mark for _, _, mark in ticket.pages].count(PageMark.READY) == 3
    found += [name for _ in range(3) for name in await worker.claim(2)]
    numbers = (0, 1, 2, 3) if order == "fifo" else (3, 2, 1, 0)
    assert found == [f"id-{number}-{letter}" for number in numbers for letter in "ab"]
    await location.close()


async def test_what_only_a_database_has_is_refused() -> None:
    """With the reason, before anything is done."""
    async with Database("memory://") as database:
        with pytest.raises(Invalid, match="database") as refused:
            await database.use_plugin(QueuePlugin(resource="tasks", max_concurrency=3))
    assert refused.value.field == "limits"
    with pytest.raises(Invalid, match="fifo"):
        QueuePlugin(resource="tasks", order="newest")  # type: ignore[call-overload]
