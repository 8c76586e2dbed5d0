"""The reaper: when a worker looks for the claims of dead ones, and when it sends nothing."""

import asyncio
from collections.abc import AsyncIterator, Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync import Unavailable
from jobsync.coordination.membership import Membership
from jobsync.queue.backend import EndedClaim, QueueBackend
from jobsync.queue.in_flight import WorkerListener
from jobsync.queue.reaper import Reaper

HEARTBEAT = 5.0


class Surroundings:
    """A queue, a session and a worker around a reaper, which runs one round after the other."""

    incarnation = "me"
    timing = SimpleNamespace(heartbeat=HEARTBEAT)
    queue = "mails"

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.holders: set[str] = set()
        self.dead: set[str] = set()
        self.watched: set[str] = set()
        self.looks = 0
        self.ended: list[set[str]] = []
        self.failures: list[Exception] = []
        self.fails: str | None = None
        """Which request is not answered."""
        self._turn = asyncio.Event()
        self._waits = asyncio.Event()
        self.reaper = Reaper(
            cast("QueueBackend", self),
            cast("Membership", self),
            self.clock,
            cast("WorkerListener", self),
        )

    def watch(self, purpose: str, sessions: Collection[str]) -> None:
        assert purpose == "queue mails"
        self.watched = {*sessions}

    def is_dead(self, session: str) -> bool:
        return session in self.dead & self.watched

    async def change(self, _: float) -> None:
        self._waits.set()
        await self._turn.wait()
        self._turn.clear()

    async def list_holders(self) -> list[str]:
        self.looks += 1
        if self.fails == "list":
            raise Unavailable("queue", "a test says so")
        return [*self.holders]

    async def end_claims(self, dead: Collection[str]) -> list[EndedClaim]:
        if self.fails == "end":
            raise Unavailable("queue", "a test says so")
        self.ended.append({*dead})
        self.holders -= {*dead}
        return []

    def on_ended(self, _: Any) -> None:
        return

    def on_failure(self, error: Exception) -> None:
        self.failures.append(error)

    async def step(self, seconds: float) -> int:
        """Advance time and run a round; return how often it has looked."""
        before = self.looks
        self.clock.mono_seconds += seconds
        self._waits.clear()
        self._turn.set()
        async with asyncio.timeout(30):
            await self._waits.wait()
        return self.looks - before


@pytest.fixture
async def around() -> AsyncIterator[Surroundings]:
    """A reaper that has looked once: nobody has claims."""
    around = Surroundings()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(around.reaper.run())
        await around._waits.wait()
        assert around.looks == 1
        yield around
        around.watched.add("somebody")
        running.cancel()
    assert around.watched == set()


@pytest.mark.parametrize("damaged", ["", "a//b", "..", "x" * 300])
async def test_the_claim_of_no_session_hides_no_other(around: Surroundings, damaged: str) -> None:
    """Found: a holder in a damaged row, which no key can name, ended the work of the session."""
    around.holders = {damaged, "gone"}
    await around.step(1)
    assert around.watched == {"gone"}
    around.dead = {"gone", damaged}
    await around.step(1)
    assert around.ended == [{"gone"}]


async def test_claims_are_looked_at_once_a_second_at_most_and_never_without_any(
    around: Surroundings,
) -> None:
    """A worker that has learned that there are no claims sends nothing until it claims again."""
    assert [await around.step(0.5) for _ in range(5)] == [0, 1, 0, 1, 0]
    around.reaper.is_quiet = True
    assert [await around.step(10) for _ in range(5)] == [0] * 5
    around.reaper.is_quiet = False
    assert await around.step(0) == 1


@pytest.mark.parametrize("failing", [None, "list", "end"])
async def test_a_death_is_acted_on_at_once_and_looked_after_once_more(
    around: Surroundings, failing: str | None
) -> None:
    """A claim of the dead one may still be under way; after that, the reaper is quiet again.

    While the store does not answer, each round tries again.
    """
    around.holders = {"me", "other", "third"}
    assert await around.step(1) == 1
    assert around.watched == {"other", "third"}
    around.reaper.is_quiet = True
    around.dead = {"other"}
    around.fails = failing
    assert await around.step(0.1) == 1
    if failing is not None:
        assert around.ended == []
        assert len(around.failures) == 1
        around.fails = None
        # Known again after a look, or an interval after the one that has found it.
        assert await around.step(0.1 if failing == "list" else HEARTBEAT) == 1
    assert around.ended == [{"other"}]
    assert [await around.step(HEARTBEAT / 2) for _ in range(2)] == [0, 1]
    assert [await around.step(HEARTBEAT) for _ in range(4)] == [0] * 4
    assert around.ended == [{"other"}]


async def test_claims_that_follow_a_death_are_ended_too(around: Surroundings) -> None:
    """Another process may have told of the death, and ended the claims that there were."""
    around.reaper.is_quiet = True
    assert await around.step(10) == 0
    around.reaper.look_again()
    around.holders, around.dead = {"late"}, {"late"}
    assert [await around.step(HEARTBEAT - 1), await around.step(1)] == [0, 1]
    assert around.ended == [{"late"}]
    around.holders = {"late"}
    assert [await around.step(HEARTBEAT - 1), await around.step(1)] == [0, 1]
    assert around.ended == [{"late"}, {"late"}]
