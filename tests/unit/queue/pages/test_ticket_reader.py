"""What a process does for the others of its queue, and which tickets it uses and looks for."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, Record, Term
from jobsync.events import Events
from jobsync.queue.fleet import QueueFleet
from jobsync.queue.pages.tickets import Ticket, TicketReader, WatchDuty
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

RETRY = 300.0


class CountingStore(StoreDecorator):
    """A store that counts readings."""

    reads = 0

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        self.reads += 1
        return await self.inner.get_many(keys, tombstones=tombstones)


class Reading:
    """A process that reads tickets, and the coordinators who write them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.store = CountingStore(MemoryStore(components=self.components))
        self.reader = TicketReader(self.store, "mails", self.components)
        self.fleet: Any = SimpleNamespace(term=None, epoch=1, incarnation="me")
        self.reader.fleet = cast("QueueFleet", self.fleet)
        self._terms: dict[int, Term] = {}

    async def publish(self, epoch: int, **fields: Any) -> None:
        """Write a ticket as the coordinator with this epoch; withdraw it without fields."""
        ticket = Ticket(**{"bell": 5, **fields}) if fields else None
        if epoch not in self._terms:
            self._terms[epoch] = Term(self.store, epoch, lambda: True, self.components.ids)
        term = self._terms[epoch]
        await term.put(self.reader.key, None if ticket is None else msgspec.to_builtins(ticket))

    def find_duty(self) -> WatchDuty:
        """Return what the process does for the others now."""
        return self.reader.duty

    async def count_reads(self, **wanted: Any) -> int:
        """Look for a ticket; return how many requests that took."""
        before = self.store.reads
        await self.reader.read(0, is_settled=False, **wanted)
        return self.store.reads - before


@pytest.fixture
def reading() -> Reading:
    """A process that has read nothing, under the first coordinator."""
    return Reading()


@pytest.mark.parametrize("epoch", [1, 2, None])
@pytest.mark.parametrize("is_elected", [False, True])
@pytest.mark.parametrize("deputy", [None, "me", "another"])
async def test_the_duty_of_a_process(
    reading: Reading, deputy: str | None, is_elected: bool, epoch: int | None
) -> None:
    """It relies on others only by a ticket of the coordinator that leads now."""
    assert reading.find_duty() is WatchDuty.ALONE
    if deputy is not None:
        await reading.publish(1, deputy=deputy)
        await reading.reader.read(0, is_settled=False)
    reading.fleet.epoch = epoch
    reading.fleet.term = object() if is_elected else None
    expected = WatchDuty.ALONE
    if is_elected:
        expected = WatchDuty.COORDINATOR
    elif deputy is not None and epoch == 1:
        expected = WatchDuty.DEPUTY if deputy == "me" else WatchDuty.FOLLOWER
    assert reading.find_duty() is expected
    reading.reader.fleet = None
    assert reading.find_duty() is WatchDuty.ALONE


async def test_a_ticket_that_is_not_there_is_looked_for_now_and_then(reading: Reading) -> None:
    """Not at each look; but at once if another coordinator leads, who may have written one."""
    assert [await reading.count_reads() for _ in range(3)] == [1, 0, 0]
    reading.fleet.epoch = 2
    assert [await reading.count_reads() for _ in range(3)] == [1, 0, 0]
    reading.clock.mono_seconds += RETRY - 1
    assert await reading.count_reads() == 0
    await reading.publish(2, deputy="me")
    reading.clock.mono_seconds += 1
    assert [await reading.count_reads() for _ in range(3)] == [1, 1, 1]
    assert reading.find_duty() is WatchDuty.DEPUTY
    await reading.publish(2)
    assert [await reading.count_reads() for _ in range(3)] == [1, 0, 0]
    assert reading.find_duty() is WatchDuty.ALONE
    await reading.publish(3, deputy="me")
    reading.fleet.epoch = 3
    assert await reading.count_reads() == 1
    assert reading.find_duty() is WatchDuty.DEPUTY


@pytest.mark.parametrize(
    ("bell", "is_settled", "number", "needs_settled", "is_used"),
    [
        (5, False, 4, False, True),
        (5, False, 5, False, True),
        (5, False, 6, False, False),
        (5, False, 5, True, False),
        (5, True, 5, True, True),
        (5, True, 5, False, True),
        (5, True, 6, True, False),
    ],
)
async def test_a_ticket_is_used_if_it_has_seen_the_latest_ring(
    reading: Reading, bell: int, is_settled: bool, number: int, needs_settled: bool, is_used: bool
) -> None:
    """And the pushes after it, if those are looked for. It tells the duty all the same."""
    await reading.publish(1, bell=bell, is_settled=is_settled, deputy="another")
    found = await reading.reader.read(number, is_settled=needs_settled)
    assert (found is not None) is is_used
    assert reading.find_duty() is WatchDuty.FOLLOWER


@pytest.mark.parametrize("written", [1, 2, 3])
async def test_only_the_ticket_of_the_coordinator_that_leads_is_used(
    reading: Reading, written: int
) -> None:
    """Neither that of a former one, nor that of one of which this process does not know yet."""
    await reading.publish(written, deputy="me")
    reading.fleet.epoch = 2
    found = await reading.reader.read(0, is_settled=False)
    assert (found is not None) is (written == 2)
    assert reading.find_duty() is (WatchDuty.DEPUTY if written == 2 else WatchDuty.ALONE)
    reading.fleet.term = object()
    assert await reading.count_reads() == 0


async def test_a_ticket_that_was_found_is_read_each_time(reading: Reading) -> None:
    """Found: after a coordinator without a ticket, that of the next one was read once only."""
    assert await reading.count_reads() == 1
    assert await reading.count_reads() == 0
    reading.fleet.epoch = 2
    await reading.publish(2, deputy="me")
    for _ in range(3):
        assert await reading.count_reads() == 1
