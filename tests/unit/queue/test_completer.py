"""When settlements are sent where requests are billed: those of a claim together, and in time."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.events import Events
from jobsync.queue.backend import QueueBackend, Receipt, Settlement
from jobsync.queue.completer import Completer
from jobsync.queue.in_flight import Delivery, WorkerListener

GATHER = 2.0


class Gathering:
    """A completer that gathers settlements, and what it has sent."""

    expects_more = False

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.open_claims: set[str] = set()
        self.answered: list[str] = []
        self._batches: list[list[str]] = []
        self.may_settle = asyncio.Event()
        self.may_settle.set()
        components = Components(clock=self.clock, randomness=SeededRandomness(1), events=Events())
        self.completer = Completer(
            cast("QueueBackend", self), components, cast("WorkerListener", self), gather=GATHER
        )

    def list_open_claims(self) -> set[str]:
        return self.open_claims

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        self._batches.append([f"{it.receipt.claim}:{it.receipt.id}" for it in settlements])
        await self.may_settle.wait()
        return [True] * len(settlements)

    def on_answer(self, delivery: Any, *, is_accepted: bool) -> None:
        assert is_accepted
        self.answered.append("never in flight" if delivery is None else delivery.id)

    def submit(self, claim: str, name: str, *, is_awaited: bool = False) -> None:
        """Submit a settlement, for whose answer somebody waits or not."""
        answer = object() if is_awaited else None
        delivery = cast("Delivery", SimpleNamespace(id=name, answer=answer))
        receipt = Receipt(name, 1, claim)
        self.completer.submit(Settlement(receipt=receipt, move="complete"), delivery)

    async def send(self) -> list[str]:
        """Send what is to be sent now; return it."""
        if not self.completer._find_due():
            return []
        await self.completer._send_batch()
        return sorted(self._batches.pop())


@pytest.fixture
def gathering() -> Gathering:
    """Two claims, each with a message that is still handled."""
    gathering = Gathering()
    gathering.open_claims = {"a", "b"}
    return gathering


async def test_settlements_of_a_claim_wait_for_each_other_for_a_while(
    gathering: Gathering,
) -> None:
    """Counted from the first of them: later ones do not put it off."""
    gathering.submit("a", "1")
    gathering.clock.mono_seconds += GATHER - 0.5
    gathering.submit("a", "2")
    gathering.submit("b", "3")
    assert await gathering.send() == []
    gathering.clock.mono_seconds += 0.5
    assert await gathering.send() == ["a:1", "a:2"]
    assert gathering.answered == ["1", "2"]
    # The next one of that claim has a while of its own again.
    gathering.submit("a", "4")
    gathering.clock.mono_seconds += GATHER - 0.5
    assert await gathering.send() == ["b:3"]
    gathering.clock.mono_seconds += 0.5
    assert await gathering.send() == ["a:4"]


@pytest.mark.parametrize("is_first", [True, False])
async def test_nothing_is_gathered_while_somebody_waits_for_the_answer(
    gathering: Gathering, is_first: bool
) -> None:
    """Be it the first settlement of its claim, or one of several; other claims go on waiting."""
    gathering.submit("b", "1")
    gathering.submit("a", "2", is_awaited=is_first)
    gathering.submit("a", "3", is_awaited=not is_first)
    assert await gathering.send() == ["a:2", "a:3"]
    assert await gathering.send() == []


async def test_the_last_settlement_of_a_claim_waits_for_nothing(gathering: Gathering) -> None:
    """Nor does that of a message that was never in flight, or one after the worker stops."""
    gathering.submit("a", "1")
    gathering.submit("b", "2")
    gathering.open_claims = {"b"}
    assert await gathering.send() == ["a:1"]
    receipt = Receipt("3", 1, "b")
    gathering.completer.submit(Settlement(receipt=receipt, move="bury"), None)
    assert await gathering.send() == ["b:2", "b:3"]
    gathering.submit("b", "4")
    assert await gathering.send() == []
    flushing = asyncio.create_task(gathering.completer.flush())
    await asyncio.sleep(0)
    assert await gathering.send() == ["b:4"]
    gathering.submit("b", "5")
    assert await gathering.send() == ["b:5"]
    flushing.cancel()


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("a", "b")])
async def test_a_message_that_was_claimed_again_is_settled_again_right_after(
    gathering: Gathering, first: str, second: str
) -> None:
    """A batch has one settlement of each message; the other one does not start to gather."""
    gathering.submit(first, "1", is_awaited=True)
    gathering.submit(second, "1", is_awaited=True)
    assert await gathering.send() == [f"{first}:1"]
    assert await gathering.send() == [f"{second}:1"]
    assert await gathering.send() == []


async def settle_down() -> None:
    """Run everything that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_flush_sends_at_once_what_is_gathered(gathering: Gathering) -> None:
    """Nobody else has to submit anything, and no time has to pass."""
    running = asyncio.create_task(gathering.completer.run())
    gathering.submit("a", "1")
    await settle_down()
    assert gathering.answered == []
    flushing = asyncio.create_task(gathering.completer.flush())
    await settle_down()
    assert gathering.answered == ["1"]
    assert flushing.done()
    running.cancel()


@pytest.mark.parametrize("is_urgent", [False, True])
async def test_a_flush_waits_for_what_is_submitted_while_others_are_sent(
    gathering: Gathering, *, is_urgent: bool
) -> None:
    """Until each is answered: the worker ends after it."""
    running = asyncio.create_task(gathering.completer.run())
    gathering.may_settle.clear()
    gathering.submit("a", "1", is_awaited=True)
    await settle_down()
    flushing = asyncio.create_task(gathering.completer.flush())
    await settle_down()
    gathering.submit("b", "2", is_awaited=is_urgent)
    for answered in (["1"], ["1", "2"]):
        assert not flushing.done()
        gathering.may_settle.set()
        gathering.may_settle = asyncio.Event()
        await settle_down()
        assert gathering.answered == answered
    await flushing
    # There is nothing left to wait for.
    await gathering.completer.flush()
    running.cancel()
