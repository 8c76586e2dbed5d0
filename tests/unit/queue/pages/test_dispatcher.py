"""The coordinator's part in a queue: in each of its terms it starts anew."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components, OutcomeUnknown, Unavailable
from jobsync.events import Events
from jobsync.queue.backend import EndedClaim
from jobsync.queue.fleet import QueueFleet
from jobsync.queue.pages.dispatcher import Dispatcher, DispatcherHost
from jobsync.queue.pages.finder import PageFinder
from jobsync.queue.pages.tickets import Ticket, TicketReader

SECOND_LOOK = 60.0


class StubTerm:
    """A term that remembers what is written in it."""

    def __init__(self) -> None:
        self.deputies: list[str | None] = []
        """Of each ticket; None for one that was withdrawn."""
        self.error: Exception | None = None

    async def put(self, key: str, value: Any) -> None:
        assert key == "ticket/mails"
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.deputies.append(None if value is None else value["deputy"])


class Surroundings:
    """A process that runs a dispatcher, one round after the other."""

    dispatch_interval = 0.0

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.term: StubTerm | None = None
        self.living: frozenset[str] = frozenset({"me", "a", "b"})
        self.workers = ["a", "b"]
        self.worker_reads = 0
        self.bell = 1
        self.lapsed: list[EndedClaim] = []
        self.done: list[str] = []
        self.failures: list[Exception] = []
        self.waits: list[float] = []
        self._turn, self._rests = asyncio.Event(), asyncio.Event()
        # As a finder.
        self.has_peers = False
        self.unannounced = 0
        self.plan = SimpleNamespace(find_wait=lambda _: 180.0)
        host = DispatcherHost(
            refresh=self.refresh, end_lapsed=self.end_lapsed, ring=self.ring, wait=self.wait
        )
        components = Components(clock=self.clock, randomness=SeededRandomness(1), events=Events())
        self.dispatcher = Dispatcher(
            cast("PageFinder", self),
            cast("TicketReader", SimpleNamespace(key="ticket/mails")),
            host,
            components,
            lambda: 30.0,
        )

    def build_ticket(self, deputy: str) -> Ticket:
        return Ticket(bell=self.bell, deputy=deputy)

    def watch_claims(self) -> float | None:
        return None

    async def refresh(self) -> None:
        self.done.append("refresh")

    async def end_lapsed(self) -> list[EndedClaim]:
        lapsed, self.lapsed = self.lapsed, []
        return lapsed

    async def ring(self) -> None:
        self.done.append("ring")

    async def list_workers(self) -> list[str]:
        self.worker_reads += 1
        return self.workers

    async def change(self) -> None:
        await self.wait(-1.0)

    async def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._rests.set()
        await self._turn.wait()
        self._turn.clear()

    def on_published(self, _: int) -> None:
        self.done.append("publish")

    def on_ended(self, ended: list[EndedClaim]) -> None:
        self.done += [each.id for each in ended]

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)

    async def step(self, seconds: float = 0.0) -> list[str]:
        """Advance time and run a round; return what was done."""
        self.clock.mono_seconds += seconds
        self.done.clear()
        self._rests.clear()
        self._turn.set()
        async with asyncio.timeout(30):
            await self._rests.wait()
        return [*self.done]

    async def elect(self) -> StubTerm:
        """Begin a term, and let a round run."""
        self.term = StubTerm()
        await self.step()
        return self.term

    async def replace(self) -> None:
        """End the term."""
        self.term = None
        await self.step()


@pytest.fixture
async def around() -> AsyncIterator[Surroundings]:
    """A process that is not elected."""
    around = Surroundings()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(around.dispatcher.run(cast("QueueFleet", around)))
        await around._rests.wait()
        yield around
        running.cancel()


async def test_each_term_begins_with_the_workers_of_its_time(around: Surroundings) -> None:
    """They may have changed although the same processes live; in between nothing is known."""
    first = await around.elect()
    assert (first.deputies, around.has_peers) == (["a"], True)
    await around.replace()
    assert not around.has_peers
    around.workers = ["b", "a"]
    second = await around.elect()
    assert (second.deputies, around.has_peers) == (["b"], True)
    await around.replace()
    # Nothing is new, but nobody uses the ticket of an earlier term.
    third = await around.elect()
    assert (third.deputies, around.has_peers) == (["b"], True)
    await around.replace()
    around.workers = []
    fourth = await around.elect()
    assert (fourth.deputies, around.has_peers) == ([], False)
    assert first.deputies == ["a"]


async def test_workers_are_read_after_a_change_and_once_more(around: Surroundings) -> None:
    """A process joins before it says what it handles, and may stop to handle this queue."""
    term = await around.elect()
    assert around.worker_reads == 1
    await around.step(SECOND_LOOK - 1)
    assert around.worker_reads == 1
    around.workers = ["b", "a"]
    await around.step(1)
    assert (around.worker_reads, term.deputies) == (2, ["a", "b"])
    await around.step(10 * SECOND_LOOK)
    assert around.worker_reads == 2
    around.living |= {"c"}
    await around.step()
    assert around.worker_reads == 3
    around.workers = ["c", "b", "a"]
    await around.step(SECOND_LOOK)
    assert (around.worker_reads, term.deputies) == (4, ["a", "b", "c"])
    around.workers = ["c"]
    around.living = frozenset({"me", "c"})
    await around.step()
    assert term.deputies == ["a", "b", "c", None]
    await around.step()
    assert term.deputies == ["a", "b", "c", None]


@pytest.mark.parametrize("error", [OutcomeUnknown("x", "lost"), Unavailable("x", "silent")])
async def test_a_ticket_that_may_not_have_been_written_is_written_again(
    around: Surroundings, error: Exception
) -> None:
    """Also if the one before said the same to the workers."""
    term = await around.elect()
    around.bell, term.error = 2, error
    await around.step(1)
    assert around.failures == [error]
    assert term.deputies == ["a", "a"]
    await around.step(1)
    assert term.deputies == ["a", "a"]


async def test_a_ticket_is_not_written_before_its_interval_is_over(around: Surroundings) -> None:
    """The coordinator works then, if it has nothing else to do until then."""
    around.dispatch_interval = 10.0
    term = await around.elect()
    around.bell = 2
    await around.step(4)
    assert len(term.deputies) == 1
    assert around.waits[-1] == pytest.approx(10.0 - 4.0 - 0.1)
    await around.step(around.waits[-1])
    assert len(term.deputies) == 2


async def test_what_no_ring_announced_is_rung_for_once(around: Surroundings) -> None:
    """And what has lapsed is reported once."""
    await around.elect()
    around.unannounced = 3
    around.lapsed = [EndedClaim(id="id-1", state="waiting", attempt=1, session="gone")]
    assert await around.step() == ["refresh", "id-1", "ring"]
    assert around.unannounced == 0
    assert await around.step() == ["refresh"]
