"""Settling of writes whose reply was lost."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from jobsync import (
    Applied,
    Conflicted,
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
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore, judge_write
from jobsync.testing import CALM, Link, Weather, World


class Recording(StoreDecorator):
    """Records the nonces of applied writes, in commit order."""

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


class Scene:
    """A settling store behind a faulty network."""

    def __init__(self, weather: Weather = CALM, *, seed: int = 1, deadline: float = 30) -> None:
        self.world = World(seed)
        node = self.world.node("a")
        self.clock = node.clock
        self.truth = Recording(MemoryStore(components=self.world.components))
        self.network = Link(self.world, node, self.truth, weather)
        self.store = SettlingStore(self.network, node.components, deadline)

    def strike(self, weather: Weather) -> None:
        """Make the network faulty until the next read."""
        self.network.weather = weather
        self.truth.when_read = self.network.mend


Story = Callable[[Scene], Awaitable[None]]


def in_world(
    weather: Weather = CALM, *, seed: int = 1, deadline: float = 30
) -> Callable[[Story], Callable[[], None]]:
    """Turn a story into a test, which runs in its own world."""

    def make(story: Story) -> Callable[[], None]:
        def test() -> None:
            scene = Scene(weather, seed=seed, deadline=deadline)
            scene.world.run(lambda: story(scene))
            assert scene.world.judge() == []

        test.__doc__ = story.__doc__
        return test

    return make


def record(seq: int, trail: str, *, deleted: bool = False) -> Record:
    """Create a record."""
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
def test_the_current_record_decides(
    base: Record | None, current: Record | None, verdict: str
) -> None:
    """A write with nonce A is judged by the trail, as far back as it reaches."""
    assert judge_write(base, A, current) == verdict


@in_world()
async def test_a_lost_reply_is_settled_as_applied(scene: Scene) -> None:
    """The record has the nonce: applied, and sent only once."""
    scene.strike(Weather(lost=1))
    (outcome,) = await scene.store.write([Put("n", 1)])
    assert isinstance(outcome, Applied)
    assert scene.truth.nonces == [outcome.record.nonce]
    assert scene.truth.sent == 1


@in_world()
async def test_a_lost_reply_to_an_overwritten_write_is_settled_as_applied(scene: Scene) -> None:
    """Another writer replaced it before the check: still applied, and not sent again."""
    base = await scene.store.create("n", 1)
    mine = Put("n", 2, base, nonce=A)
    await scene.truth.write([mine])
    mine_as_written = await scene.truth.get("n")
    assert mine_as_written is not None
    await scene.truth.put(mine_as_written, 3)
    settled = await scene.store._settle({"n": mine}, scene.clock.mono() + 30)
    outcome = settled["n"]
    assert isinstance(outcome, Applied)
    assert (outcome.record.value, outcome.record.seq, outcome.record.nonce) == (2, 2, A)
    assert await scene.store.write([outcome.record.replace(9)]) == [Conflicted()]


@in_world(Weather(late=1), seed=2)
async def test_a_late_write_is_applied_once(scene: Scene) -> None:
    """The first copy is still in flight when the second is sent; one of them is applied."""
    writing = asyncio.create_task(scene.store.write([Put("n", 1)]))
    await asyncio.sleep(1)
    scene.network.weather = CALM
    (outcome,) = await writing
    assert isinstance(outcome, Applied)
    assert scene.truth.sent == 1
    await asyncio.sleep(1000)
    assert scene.truth.sent == 2
    assert scene.truth.nonces == [outcome.record.nonce]


@in_world(Weather(lost=1), deadline=10)
async def test_a_write_that_cannot_be_settled_stays_unknown(scene: Scene) -> None:
    """If every reply is lost, the outcome is unknown, after the deadline."""
    begun = scene.clock.mono()
    (outcome,) = await scene.store.write([Put("n", 1)])
    assert outcome == Unknown("not settled within 10 s")
    assert 10 <= scene.clock.mono() - begun <= 15


@in_world(Weather(refused=1))
async def test_a_write_that_was_never_sent_is_unavailable(scene: Scene) -> None:
    """The caller knows that nothing was written."""
    with pytest.raises(Unavailable):
        await scene.store.create("n", 1)
    with pytest.raises(Unavailable):
        await scene.store.append("h", [1])
    assert await scene.truth.get("n") is None


@in_world()
async def test_a_batch_settles_change_by_change(scene: Scene) -> None:
    """Applied, conflicted and lost changes of one batch each get their true outcome."""
    a = await scene.store.create("n/a", 1)
    b = await scene.store.create("n/b", 1)
    await scene.store.put(b, 2)
    scene.strike(Weather(lost=1))
    outcomes = await scene.store.write([a.replace(3), b.replace(3), Put("n/c", 3), Put("n/d", 3)])
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Applied, Conflicted, Applied, Applied]


@in_world(Weather(lost=0.7), seed=3)
async def test_history_is_appended_once(scene: Scene) -> None:
    """Entries whose reply is lost are sent again under the same batch name."""
    for n in range(20):
        await scene.store.append("h", [n])
    assert sorted(entry.value for entry in await scene.truth.read("h")) == list(range(20))
    scene.network.weather = Weather(lost=1)
    with pytest.raises(OutcomeUnknown):
        await scene.store.append("h", ["last"])


@pytest.mark.parametrize("seed", range(30))
def test_no_outcome_is_reported_as_another(seed: int) -> None:
    """Writers race through a faulty network: every reported outcome is true."""
    dice = random.Random(seed)
    weather = Weather(
        lost=dice.choice([0, 0.2, 0.5]),
        unanswered=dice.choice([0, 0.2]),
        late=dice.choice([0, 0.2, 0.5]),
        refused=dice.choice([0, 0.2]),
        undecided=dice.choice([0, 0.2]),
        doubled=dice.choice([0, 0.2]),
        slow=dice.choice([0, 0.5]),
    )
    scene = Scene(weather, seed=seed, deadline=dice.choice([1, 30]))
    outcomes: dict[str, Outcome] = {}

    async def write(writer: int) -> None:
        for n in range(15):
            nonce = f"{writer:04d}{n:08d}"
            try:
                base = await scene.store.get("n", tombstones=True)
                change = Put("n", [writer, n], base, nonce=nonce)
                (outcomes[nonce],) = await scene.store.write([change])
            except Unavailable:
                continue

    async def story() -> None:
        await asyncio.gather(*(write(writer) for writer in range(4)))
        await asyncio.sleep(2 * weather.late_by)
        found = await scene.truth.get("n")
        assert found is not None
        assert found.seq == len(scene.truth.nonces)

    scene.world.run(story)
    applied = scene.truth.nonces
    assert len(set(applied)) == len(applied)
    for nonce, outcome in outcomes.items():
        if isinstance(outcome, Applied):
            assert nonce in applied
        elif isinstance(outcome, Conflicted):
            assert nonce not in applied


@in_world(Weather(lost=1))
async def test_rights_revoked_during_settling_leave_it_unknown(scene: Scene) -> None:
    """A sent write is not reported as never written because a token expired."""

    def expire() -> None:
        raise Misconfigured("url", "s3://…", "was given a token that has expired", "renew it")

    scene.truth.when_read = expire
    (outcome,) = await scene.store.write([Put("n", 1)])
    assert isinstance(outcome, Unknown)
    assert scene.truth.nonces
