"""The way to the store: each fault is what it says, and no other."""

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


def happen(story: Story[T], weather: Weather | None = None, seed: int = 1) -> T:
    """Let a story happen to one node with one link."""
    world = World(seed)

    async def tell() -> T:
        store = MemoryStore(components=world.components)
        link = Link(world, world.node("a"), store, weather or Weather())
        return await story(world, link)

    told = world.run(tell)
    assert world.judge() == []
    return told


async def landed(link: Link, key: str = "n") -> bool:
    """Look at what is stored, past the link."""
    return await link.inner.get(key) is not None


def test_a_calm_link_only_takes_time() -> None:
    """Each call does what the store does, and is noted if it changes something."""

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

    happen(story)


def test_a_refused_request_does_not_arrive() -> None:
    """The sender hears of it, and nothing was written."""

    async def story(world: World, link: Link) -> None:
        with pytest.raises(Unavailable):
            await link.create("n", 1)
        await asyncio.sleep(1000)
        assert not await landed(link)
        assert link.faults == world.faults == 1

    happen(story, Weather(refused=1))


@pytest.mark.parametrize(("weather", "waited"), [(Weather(lost=1), 0), (Weather(unanswered=1), 5)])
def test_a_lost_reply_hides_what_happened(weather: Weather, waited: float) -> None:
    """An error, or silence: either way it was carried out, and nobody may say that it was not."""

    async def story(world: World, link: Link) -> None:
        (outcome,) = await link.write([Put("n", 1)])
        assert isinstance(outcome, Unknown)
        assert world.loop.time() == pytest.approx(waited, abs=0.1)
        assert await landed(link)
        with pytest.raises(Unavailable):
            await link.get("n")
        for call in (link.append("h", [1]), link.drop(["n"])):
            with pytest.raises(OutcomeUnknown):
                await call
        assert len(await link.inner.read("h")) == 1

    happen(story, weather)


def test_what_is_undecided_did_not_happen() -> None:
    """409: the sender cannot know, and nothing was carried out."""

    async def story(world: World, link: Link) -> None:
        (outcome,) = await link.write([Put("n", 1)])
        assert isinstance(outcome, Unknown)
        await asyncio.sleep(1000)
        assert not await landed(link)

    happen(story, Weather(undecided=1))


def test_a_late_request_lands_after_its_sender_gave_up() -> None:
    """Nobody can call it back, not even death."""

    async def story(world: World, link: Link) -> None:
        sending = world.nodes["a"].run(link.write([Put("n", 1)]))
        await asyncio.sleep(1)
        world.nodes["a"].kill()
        assert not await landed(link)
        await asyncio.sleep(1000)
        assert not sending.done()
        assert await landed(link)

    happen(story, Weather(late=1), seed=2)


def test_a_slow_request_may_still_be_answered() -> None:
    """Within patience it is only slow."""

    async def story(world: World, link: Link) -> None:
        assert isinstance((await link.write([Put("n", 1)]))[0], Applied)
        assert world.loop.time() > 0.1

    happen(story, Weather(slow=1, slow_by=4))


@pytest.mark.parametrize("seed", range(5))
def test_a_doubled_request_counts_once(seed: int) -> None:
    """Both copies are the same: of a write one is refused, of lines one adds nothing."""

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

    happen(story, Weather(doubled=1), seed)


def test_damage_is_not_mistaken_for_absence() -> None:
    """A read says that it failed; a listing leaves the record out and tells of it."""

    async def story(world: World, link: Link) -> None:
        heard: list[Event] = []
        world.nodes["a"].components.events.on("store:record-set-aside", heard.append)
        for n in range(3):
            await link.create(f"n/{n}", n)
        await link.append("h", [1, 2])
        with pytest.raises(Corrupt):
            await link.get("n/0")
        assert len(await link.scan("n/")) == 2
        assert len(await link.read("h")) == 1
        assert len(heard) == 2
        # A page that is full is not the last, and must not look like it.
        assert len(await link.scan("n/", limit=3)) == 3

    happen(story, Weather(corrupt=1))


def test_a_throttled_link_refuses_everything() -> None:
    """For as long as it lasts; then all is as before."""

    async def story(world: World, link: Link) -> None:
        link.throttled = True
        for _ in range(3):
            with pytest.raises(Unavailable, match="SlowDown"):
                await link.get("n")
        link.throttled = False
        assert await link.get("n") is None

    happen(story)


def test_a_forbidden_link_is_misconfigured() -> None:
    """As a store is whose rights were taken away; nothing was written."""

    async def story(world: World, link: Link) -> None:
        link.forbidden = True
        with pytest.raises(Misconfigured, match="403"):
            await link.create("n", 1)
        assert not await landed(link)
        link.mend()
        await link.create("n", 1)

    happen(story)


def test_a_cut_is_silence() -> None:
    """Requests do not arrive; or they do, and replies do not."""

    async def story(world: World, link: Link) -> None:
        link.requests_pass = False
        assert isinstance((await link.write([Put("n", 1)]))[0], Unknown)
        assert not await landed(link)
        link.requests_pass, link.replies_pass = True, False
        assert isinstance((await link.write([Put("n", 1)]))[0], Unknown)
        assert await landed(link)
        link.replies_pass = True
        assert await link.get("n") is not None

    happen(story)


def test_a_hint_does_not_pass_a_cut() -> None:
    """Whoever waits for a change behind a cut waits to the end."""

    async def wait(world: World, link: Link) -> float:
        begun = world.loop.time()
        waiting = asyncio.create_task(link.wait("n/", 30))
        await asyncio.sleep(1)
        await link.inner.create(f"n/{world.loop.time():g}", 1)
        await waiting
        return world.loop.time() - begun

    async def story(world: World, link: Link) -> tuple[float, float, float]:
        free = await wait(world, link)
        link.replies_pass = False
        cut = await wait(world, link)
        link.replies_pass, link.weather = True, Weather(lost=1)
        return free, cut, await wait(world, link)

    assert happen(story) == pytest.approx((1, 30, 30))


def test_a_call_that_is_refused_by_the_store_is_refused() -> None:
    """What the store raises reaches the sender, of a doubled request too."""

    async def story(world: World, link: Link) -> None:
        with pytest.raises(Exception, match="key"):
            await link.get("//")
        await asyncio.sleep(1000)

    happen(story, Weather(doubled=1))


def test_a_node_connects_to_a_store_that_settles() -> None:
    """What its code sees is a store whose writes end, and whose answers are noted."""
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
    told = [each.details["outcome"] for each in world.history if each.what == "reply"]
    assert told == ["Applied"] * 30
    assert sum(each.what == "read" for each in world.history) == 30
