"""Fenced writes: a replaced coordinator is refused, and then steps down."""

import asyncio
from collections.abc import Sequence

import pytest
from chance import FakeClock, SeededRandomness
from fleets import SINGLETON, TIMING, Fleet

from jobsync import Components, Events, Fenced, OutcomeUnknown, Term
from jobsync.stores.contract import Change, Outcome, Record, Unknown
from jobsync.stores.memory import MemoryStore


def term_of(store: MemoryStore, components: Components, epoch: int, refused: list[int]) -> Term:
    """Return a term that always believes to last."""
    return Term(store, epoch, lambda: True, components.ids, refused.append)


@pytest.mark.parametrize("later", [1, 2])
async def test_the_first_term_to_seal_keeps_the_others_out(clock: FakeClock, later: int) -> None:
    """Of two terms with one epoch, as after the loss of a role's record, one can write."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store = MemoryStore(components=components)
    refused: list[int] = []
    first = term_of(store, components, 1, refused)
    second = term_of(store, components, later, [])
    if later == 1:
        first, second = second, first
    await second.put("single/x", "second")
    with pytest.raises(Fenced):
        await first.put("single/x", "first")
    with pytest.raises(Fenced):
        await first.get("single/x")
    await second.put("single/x", "again")
    assert await second.get("single/x") == "again"
    record = await store.get("single/x")
    assert record is not None
    assert record.epoch == later


class LosingReplies(MemoryStore):
    """A store that applies every write; as many replies as set are lost."""

    lost_replies = 0

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write, and perhaps lose the reply."""
        outcomes = await super().write(changes)
        if self.lost_replies:
            self.lost_replies -= 1
            return [Unknown("no reply") for _ in changes]
        return outcomes


async def test_a_term_recognises_a_write_whose_reply_was_lost(clock: FakeClock) -> None:
    """Be it the seal or a later write; a twin's record is still refused."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store = LosingReplies(components=components)
    term, twin = (term_of(store, components, 1, []) for _ in range(2))
    store.lost_replies = 1
    with pytest.raises(OutcomeUnknown):
        await term.get("single/x")
    assert await term.get("single/x") is None
    store.lost_replies = 1
    with pytest.raises(OutcomeUnknown):
        await term.put("single/x", 1)
    await term.put("single/x", 2)
    assert await term.get("single/x") == 2
    with pytest.raises(Fenced):
        await twin.get("single/x")


async def test_a_removed_record_belongs_to_the_first_to_seal_it_again(clock: FakeClock) -> None:
    """The term that had sealed it before is refused, and writes elsewhere as before."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store = MemoryStore(components=components)
    term, twin = (term_of(store, components, 1, []) for _ in range(2))
    for count in range(3):
        await term.put("single/x", count)
        await term.put("single/y", count)
    await store.drop(["single/x", "single/y"])
    await twin.put("single/x", "twin")
    with pytest.raises(Fenced):
        await term.put("single/x", "late")
    assert await term.get("single/y") is None
    await term.put("single/y", "again")


class HeldReply(MemoryStore):
    """A store that holds back the reply to a read or a write until it is told to send it."""

    held_call = ""

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        """Read, and hold back the reply if so configured."""
        records = await super().get_many(keys, tombstones=tombstones)
        await self._hold("read")
        return records

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Write, and hold back the reply if so configured."""
        outcomes = await super().write(changes)
        await self._hold("write")
        return outcomes

    async def _hold(self, call: str) -> None:
        if self.held_call == call:
            self.held_call, self.reply = "", asyncio.Event()
            await self.reply.wait()


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_a_slow_read_of_a_term_that_writes_is_not_another_terms(
    clock: FakeClock, *, is_sealed: bool
) -> None:
    """One task reads; before the reply arrives, another has written more than records remember."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store, refused = HeldReply(components=components), list[int]()
    term = term_of(store, components, 1, refused)
    if is_sealed:
        await term.put("single/x", 0)
    store.held_call = "read"
    slow = asyncio.create_task(term.get("single/x"))
    await asyncio.sleep(0)
    for count in range(20):
        await term.put("single/x", count)
    store.reply.set()
    assert await slow == 19
    assert refused == []


async def test_a_slow_reply_to_a_write_of_a_term_does_not_end_it(clock: FakeClock) -> None:
    """One task writes; before it learns this, another has written more than records remember."""
    components = Components(clock=clock, randomness=SeededRandomness(1), events=Events())
    store, refused = HeldReply(components=components), list[int]()
    term = term_of(store, components, 1, refused)
    await term.put("single/x", 0)
    store.held_call = "write"
    slow = asyncio.create_task(term.put("single/x", "slow"))
    await asyncio.sleep(0)
    for count in range(20):
        await term.put("single/x", count)
    store.reply.set()
    await slow
    assert await term.get("single/x") == 19
    await term.put("single/x", 20)
    assert refused == []


def test_a_fenced_coordinator_steps_down_and_leads_again() -> None:
    """It takes the role again with an epoch above the one that refused it."""
    fleet = Fleet(5, size=1)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        record = await fleet.store.get(f"{SINGLETON}-work")
        assert record is not None
        await fleet.store.put(record, {"epoch": 7, "count": 0}, epoch=7)
        await asyncio.sleep(4 * TIMING.timeout)
        fleet.check_steady()
        record = await fleet.store.get(f"{SINGLETON}-work")
        assert record is not None
        assert record.epoch == record.value["epoch"] == 8
        assert fleet.workers[0].held_epochs == {"work": 8}

    fleet.world.run(story)
    assert fleet.violations == []
