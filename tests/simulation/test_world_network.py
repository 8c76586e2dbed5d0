"""The link to the store: each fault has its effect, and no other."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from jobsync import (
    Applied,
    Conflicted,
    Corrupt,
    Event,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Store,
    Unavailable,
    Unknown,
)
from jobsync.stores.memory import MemoryStore
from jobsync.testing import Link, Weather, World, connect

T = TypeVar("T")
Story = Callable[[World, Link], Awaitable[T]]


def run(story: Story[T], weather: Weather | None = None, seed: int = 1) -> T:
    """Run a story with one node and one link."""
    world = World(seed)

    async def start() -> T:
        store = MemoryStore(components=world.components)
        link = Link(world, world.node("a"), store, weather or Weather())
        return await story(world, link)

    result = world.run(start)
    assert world.judge() == []
    return result


async def is_stored(link: Link, key: str = "n") -> bool:
    """Whether the store has the record; read without the link."""
    return await link.inner.get(key) is not None


def test_a_calm_link_only_takes_time() -> None:
    """Each call has the result of the store, and is recorded if it changes something."""

    async def story(world: World, link: Link) -> None:
        record = await link.create("n/1", 1)
        assert await link.get("n/1") == record
        assert [head.key for head in await link.heads("n/")] == ["n/1"]
        assert await link.scan("n/") == [record]
        await link.append("h", [1])
        assert [entry.value for entry in await link.read("h")] == [1]
        assert await link.now() is not None
        assert await link.write([record.delete()]) != [Conflicted()]
        assert await link.bury("n/", older_than=-1) == 1
        await link.drop(["n/1"])
        assert await link.discard("h", older_than=-10) == 1
        await link.close()
        assert 0 < world.loop.time() < 0.3
        assert link.faults == world.faults == 0
        assert [each.what for each in world.history] == ["commit", "commit", "bury", "drop"]

    run(story)


def test_a_refused_request_is_not_executed() -> None:
    """The sender gets an error, and nothing was written."""

    async def story(world: World, link: Link) -> None:
        with pytest.raises(Unavailable):
            await link.create("n", 1)
        await asyncio.sleep(1000)
        assert not await is_stored(link)
        assert link.faults == world.faults == 1

    run(story, Weather(refused=1))


@pytest.mark.parametrize(("weather", "waited"), [(Weather(lost=1), 0), (Weather(unanswered=1), 5)])
def test_a_lost_reply_hides_what_happened(weather: Weather, waited: float) -> None:
    """An error or no reply: either way it was executed, and the outcome is unknown."""

    async def story(world: World, link: Link) -> None:
        (outcome,) = await link.write([Put("n", 1)])
        assert isinstance(outcome, Unknown)
        assert world.loop.time() == pytest.approx(waited, abs=0.1)
        assert await is_stored(link)
        with pytest.raises(Unavailable):
            await link.get("n")
        for call in (link.append("h", [1]), link.drop(["n"])):
            with pytest.raises(OutcomeUnknown):
                await call
        assert len(await link.inner.read("h")) == 1

    run(story, weather)


def test_an_undecided_write_is_not_executed() -> None:
    """409: the outcome is unknown to the sender, and nothing was written."""

    async def story(world: World, link: Link) -> None:
        (outcome,) = await link.write([Put("n", 1)])
        assert isinstance(outcome, Unknown)
        await asyncio.sleep(1000)
        assert not await is_stored(link)

    run(story, Weather(undecided=1))


def test_a_late_request_arrives_after_its_sender_gave_up() -> None:
    """Not even the death of the sender cancels it."""

    async def story(world: World, link: Link) -> None:
        sending = world.nodes["a"].run(link.write([Put("n", 1)]))
        await asyncio.sleep(1)
        world.nodes["a"].kill()
        assert not await is_stored(link)
        await asyncio.sleep(1000)
        assert not sending.done()
        assert await is_stored(link)

    run(story, Weather(late=1), seed=2)


def test_a_slow_request_may_still_get_its_reply() -> None:
    """If the sender has not given up yet."""

    async def story(world: World, link: Link) -> None:
        assert isinstance((await link.write([Put("n", 1)]))[0], Applied)
        assert world.loop.time() > 0.1

    run(story, Weather(slow=1, slow_by=4))


@pytest.mark.parametrize("seed", range(5))
def test_a_doubled_request_counts_once(seed: int) -> None:
    """Both copies are the same: one copy of a write conflicts, one of an append adds nothing."""

    async def story(world: World, link: Link) -> None:
        record = await link.create("n", 1)
        await link.put(record, 2)
        await link.append("h", [1, 2])
        await asyncio.sleep(1000)
        found = await link.inner.get("n")
        assert found is not None
        assert (found.seq, found.value) == (2, 2)
        assert [entry.value for entry in await link.inner.read("h")] == [1, 2]
        assert link.faults == 3

    run(story, Weather(doubled=1), seed)


def test_a_damaged_record_is_not_reported_as_missing() -> None:
    """A read fails; a listing leaves the record out and emits an event."""

    async def story(world: World, link: Link) -> None:
        events: list[Event] = []
        world.nodes["a"].components.events.on("store:record-set-aside", events.append)
        for n in range(3):
            await link.create(f"n/{n}", n)
        await link.append("h", [1, 2])
        with pytest.raises(Corrupt):
            await link.get("n/0")
        assert len(await link.scan("n/")) == 2
        assert len(await link.read("h")) == 1
        assert len(events) == 2
        # A full page is not the last one, and must not look like it.
        assert len(await link.scan("n/", limit=3)) == 3

    run(story, Weather(corrupt=1))


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_batch_arrives_at_one_moment_only_where_it_is_atomic(is_atomic: bool) -> None:
    """Elsewhere each change has a request and a fate of its own."""

    async def story(world: World, link: Link) -> tuple[set[float], set[type]]:
        link.is_atomic = is_atomic
        outcomes = await link.write([Put(f"n/{number}", number) for number in range(20)])
        return {each.at for each in world.history}, {type(outcome) for outcome in outcomes}

    times, outcomes = run(story)
    assert (len(times) > 1, outcomes) == (not is_atomic, {Applied})
    _, outcomes = run(story, Weather(refused=0.5, undecided=0.2), seed=2)
    assert outcomes == ({Applied} if is_atomic else {Applied, Unknown})


def test_a_batch_of_which_all_are_refused_is_refused() -> None:
    """As if it were one request: nothing was written."""

    async def story(_: World, link: Link) -> None:
        link.is_atomic = False
        with pytest.raises(Unavailable):
            await link.write([Put("n/1", 1), Put("n/2", 2)])
        assert not await is_stored(link, "n/1")

    run(story, Weather(refused=1.0))


def test_a_throttled_link_refuses_everything() -> None:
    """Until the throttling ends."""

    async def story(world: World, link: Link) -> None:
        link.throttled = True
        for _ in range(3):
            with pytest.raises(Unavailable, match="SlowDown"):
                await link.get("n")
        link.throttled = False
        assert await link.get("n") is None

    run(story)


def test_a_forbidden_link_is_misconfigured() -> None:
    """Like a store that lacks permissions; nothing was written."""

    async def story(world: World, link: Link) -> None:
        link.forbidden = True
        with pytest.raises(Misconfigured, match="403"):
            await link.create("n", 1)
        assert not await is_stored(link)
        link.mend()
        await link.create("n", 1)

    run(story)


def test_a_cut_link_gives_no_reply() -> None:
    """Requests do not arrive, or replies do not."""

    async def story(world: World, link: Link) -> None:
        link.requests_pass = False
        assert isinstance((await link.write([Put("n", 1)]))[0], Unknown)
        assert not await is_stored(link)
        link.requests_pass, link.replies_pass = True, False
        assert isinstance((await link.write([Put("n", 1)]))[0], Unknown)
        assert await is_stored(link)
        link.replies_pass = True
        assert await link.get("n") is not None

    run(story)


def test_a_notification_does_not_pass_a_cut() -> None:
    """Behind a cut, a wait for a change lasts until its timeout."""

    async def wait(world: World, link: Link) -> float:
        start = world.loop.time()
        waiting = asyncio.create_task(link.wait("n/", 30))
        await asyncio.sleep(1)
        await link.inner.create(f"n/{world.loop.time():g}", 1)
        await waiting
        return world.loop.time() - start

    async def story(world: World, link: Link) -> tuple[float, float, float]:
        free = await wait(world, link)
        link.replies_pass = False
        cut = await wait(world, link)
        link.replies_pass, link.weather = True, Weather(lost=1)
        return free, cut, await wait(world, link)

    assert run(story) == pytest.approx((1, 30, 30))


def test_an_error_of_the_store_reaches_the_sender() -> None:
    """Even if the request arrives twice."""

    async def story(world: World, link: Link) -> None:
        with pytest.raises(Exception, match="key"):
            await link.get("//")
        await asyncio.sleep(1000)

    run(story, Weather(doubled=1))


def test_a_node_connects_to_a_store_that_settles() -> None:
    """The outcome of every write is settled, and the replies are recorded."""
    world = World(1)

    async def work(store: Store) -> None:
        for n in range(30):
            await store.create(f"n/{n}", n)
            assert await store.get(f"n/{n}") is not None

    async def story() -> None:
        node = world.node("a")
        shared = MemoryStore(components=world.components)
        await node.run(work(connect(node, shared, Weather(undecided=0.3))))

    world.run(story)
    assert world.faults > 5
    outcomes = [each.details["outcome"] for each in world.history if each.what == "reply"]
    assert outcomes == ["Applied"] * 30
    assert sum(each.what == "read" for each in world.history) == 30
