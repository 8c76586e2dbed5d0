"""What becomes of writes whose reply was lost."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chance import SeededRandomness

from jobsync import (
    Applied,
    Components,
    Conflicted,
    Events,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Record,
    Store,
    Unavailable,
    Unknown,
)
from jobsync.stores.contract import TRAIL_LENGTH, Change, Outcome
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.faulty import Faults, FaultyStore
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore, judge


class Recording(StoreDecorator):
    """Keeps the nonces of what was applied, in commit order."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.nonces: list[str] = []
        self.sent = 0
        self.when_read: Callable[[], None] | None = None

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        if self.when_read:
            self.when_read()
        return await super().get_many(keys, tombstones=tombstones)

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        self.sent += 1
        outcomes = await super().write(changes)
        self.nonces += [o.record.nonce for o in outcomes if isinstance(o, Applied)]
        return outcomes


class World:
    """A store behind a bad network, followed up."""

    def __init__(self, clock: Any, seed: int, faults: Faults, deadline: float = 30) -> None:
        components = Components(clock=clock, randomness=SeededRandomness(seed), events=Events())
        self.truth = Recording(MemoryStore(components=components))
        self.network = FaultyStore(self.truth, components, faults)
        self.store = SettlingStore(self.network, components, deadline)

    def strike(self, faults: Faults) -> None:
        """Let faults happen until somebody reads."""
        self.network.faults = faults
        self.truth.when_read = self._heal

    def _heal(self) -> None:
        self.network.faults = Faults()


def record(seq: int, trail: str, *, deleted: bool = False) -> Record:
    """Make a record by hand."""
    return Record("n", None, trail[:12], seq, 0, 1, trail, deleted)


A, B, C = "A" * 12, "B" * 12, "C" * 12
LONG = " ".join(f"{i:012d}" for i in range(TRAIL_LENGTH))


@pytest.mark.parametrize(
    ("base", "current", "verdict"),
    [
        (None, None, "pending"),
        (None, record(1, A), "applied"),
        (None, record(3, f"{C} {B} {A}", deleted=True), "applied"),
        (None, record(1, B), "conflicted"),
        (None, record(TRAIL_LENGTH, LONG), "conflicted"),
        (None, record(TRAIL_LENGTH + 1, LONG), "unknowable"),
        (record(1, B), record(1, B), "pending"),
        (record(1, B), record(2, f"{A} {B}"), "applied"),
        (record(1, B), record(3, f"{C} {A} {B}"), "applied"),
        (record(1, B), record(2, f"{C} {B}"), "conflicted"),
        (record(1, B), record(1 + TRAIL_LENGTH, LONG), "conflicted"),
        (record(1, B), record(2 + TRAIL_LENGTH, LONG), "unknowable"),
        (record(1, B), None, "unknowable"),
        (record(5, B), record(1, C), "unknowable"),
    ],
)
def test_the_record_tells(base: Record | None, current: Record | None, verdict: str) -> None:
    """A write of nonce A is judged by the trail, as far as that reaches."""
    assert judge(base, A, current) == verdict


async def test_a_lost_reply_is_settled_as_applied(clock: Any) -> None:
    """The record is there with my nonce: applied, and sent only once."""
    world = World(clock, 1, Faults())
    world.strike(Faults(lost=1))
    (outcome,) = await world.store.write([Put("n", 1)])
    assert isinstance(outcome, Applied)
    assert world.truth.nonces == [outcome.record.nonce]
    assert world.truth.sent == 1


async def test_a_lost_reply_to_an_overwritten_write_is_settled_as_applied(clock: Any) -> None:
    """Somebody else wrote on top before I looked: still applied, and not again."""
    world = World(clock, 1, Faults())
    base = await world.store.create("n", 1)
    mine = Put("n", 2, base, nonce=A)
    await world.truth.write([mine])
    mine_as_written = await world.truth.get("n")
    assert mine_as_written is not None
    await world.truth.put(mine_as_written, 3)
    settled = await world.store._settle({"n": mine}, clock.mono() + 30)
    outcome = settled["n"]
    assert isinstance(outcome, Applied)
    assert (outcome.record.value, outcome.record.seq, outcome.record.nonce) == (2, 2, A)
    assert await world.store.write([outcome.record.replace(9)]) == [Conflicted()]


async def test_a_late_write_is_applied_once(clock: Any) -> None:
    """The first copy is still under way when the second is sent; one of them counts."""
    world = World(clock, 1, Faults())
    world.strike(Faults(late=1))
    (outcome,) = await world.store.write([Put("n", 1)])
    await world.network.land()
    assert isinstance(outcome, Applied)
    assert world.truth.nonces == [outcome.record.nonce]


async def test_what_never_clears_up_stays_unknown(clock: Any) -> None:
    """With every reply lost for good, the answer is unknown, after the deadline."""
    world = World(clock, 1, Faults(lost=1), deadline=10)
    begun = clock.mono()
    (outcome,) = await world.store.write([Put("n", 1)])
    assert outcome == Unknown("not settled within 10 s")
    assert 10 <= clock.mono() - begun <= 14


async def test_a_write_that_was_never_sent_is_unavailable(clock: Any) -> None:
    """The caller knows that nothing was written."""
    world = World(clock, 1, Faults(refused=1))
    with pytest.raises(Unavailable):
        await world.store.create("n", 1)
    with pytest.raises(Unavailable):
        await world.store.append("h", [1])
    world.network.faults = Faults()
    assert await world.store.get("n") is None


async def test_a_batch_settles_change_by_change(clock: Any) -> None:
    """Applied, conflicted and lost ones of one batch each get their true outcome."""
    world = World(clock, 1, Faults())
    a = await world.store.create("n/a", 1)
    b = await world.store.create("n/b", 1)
    await world.store.put(b, 2)
    world.strike(Faults(lost=1))
    outcomes = await world.store.write([a.replace(3), b.replace(3), Put("n/c", 3), Put("n/d", 3)])
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Applied, Conflicted, Applied, Applied]


async def test_history_is_added_once(clock: Any) -> None:
    """Lines whose reply is lost are sent again under the same name."""
    world = World(clock, 3, Faults(lost=0.7))
    for n in range(20):
        await world.store.append("h", [n])
    world.network.faults = Faults()
    assert sorted(entry.value for entry in await world.store.read("h")) == list(range(20))
    world.network.faults = Faults(lost=1)
    with pytest.raises(OutcomeUnknown):
        await world.store.append("h", ["last"])


@pytest.mark.parametrize("seed", range(30))
async def test_no_outcome_is_reported_as_another(clock: Any, seed: int) -> None:
    """Writers race through a bad network: what they are told is what happened."""
    dice = random.Random(seed)
    faults = Faults(
        lost=dice.choice([0, 0.2, 0.5]),
        late=dice.choice([0, 0.2, 0.5]),
        refused=dice.choice([0, 0.2]),
        slow=dice.choice([0, 0.5]),
    )
    world = World(clock, seed, faults, deadline=dice.choice([1, 30]))
    told: dict[str, Outcome] = {}

    async def write(writer: int) -> None:
        for n in range(15):
            nonce = f"{writer:04d}{n:08d}"
            try:
                base = await world.store.get("n", tombstones=True)
                for _ in range(dice.randrange(3)):
                    await asyncio.sleep(0)
                change = Put("n", [writer, n], base, nonce=nonce)
                (told[nonce],) = await world.store.write([change])
            except Unavailable:
                continue

    await asyncio.gather(*(write(writer) for writer in range(4)))
    await world.network.land()
    applied = world.truth.nonces
    assert len(set(applied)) == len(applied)
    for nonce, outcome in told.items():
        if isinstance(outcome, Applied):
            assert nonce in applied
        elif isinstance(outcome, Conflicted):
            assert nonce not in applied
    found = await world.truth.get("n")
    assert found is not None
    assert found.seq == len(applied)


async def test_rights_that_end_while_settling_leave_it_unknown(clock: Any) -> None:
    """A write that was sent is not reported as never written because a token expired."""
    world = World(clock, 1, Faults())

    def expire() -> None:
        raise Misconfigured("url", "s3://…", "was given a token that has expired", "renew it")

    world.truth.when_read = expire
    world.network.faults = Faults(lost=1)
    (outcome,) = await world.store.write([Put("n", 1)])
    assert isinstance(outcome, Unknown)
    assert world.truth.nonces
