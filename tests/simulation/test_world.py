"""The simulated world: what it can do to a node, and that it does the same each time."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from contextvars import Context
from typing import Any

import pytest

from jobsync import OutcomeUnknown, Put, Unavailable
from jobsync.stores.contract import Change, Outcome
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.invariants import check_commits, check_told
from jobsync.testing.loop import Stuck
from jobsync.testing.network import Link, Weather
from jobsync.testing.world import Node, Occurrence, World


def test_a_year_passes_in_no_time() -> None:
    """Sleeping costs nothing; the clock says that it took a year."""
    world = World(1)

    async def story() -> float:
        node = world.node("a")
        begun = node.clock.mono()
        await node.run(node.clock.sleep(365 * 86_400))
        return node.clock.mono() - begun

    assert world.run(story) == pytest.approx(365 * 86_400)


def test_a_killed_node_stops_at_its_await() -> None:
    """Nothing of it runs any more, not even its finally clauses."""
    world = World(1)
    done: list[str] = []

    async def work(node: Node) -> None:
        try:
            while True:
                await node.clock.sleep(1)
                done.append("tick")
        finally:
            done.append("finally")

    async def story() -> None:
        node = world.node("a")
        node.run(work(node))
        await asyncio.sleep(3.5)
        node.kill()
        await asyncio.sleep(100)

    world.run(story)
    assert done == ["tick"] * 3


def test_a_paused_node_goes_on_where_it_stopped() -> None:
    """Its clock has gone on; what was due meanwhile happens at once."""
    world = World(1)

    async def work(node: Node) -> float:
        begun = node.clock.mono()
        await node.clock.sleep(1)
        return node.clock.mono() - begun

    async def story() -> float:
        node = world.node("a")
        working = node.run(work(node))
        await asyncio.sleep(0.5)
        node.pause()
        await asyncio.sleep(60)
        assert not working.done()
        node.resume()
        return await working

    assert world.run(story) == pytest.approx(60.5)


def test_a_suspended_node_does_not_know_that_time_passed() -> None:
    """Its clock stood still too: by it, one second was one second."""
    world = World(1)

    async def work(node: Node) -> float:
        begun = node.clock.mono()
        await node.clock.sleep(1)
        return node.clock.mono() - begun

    async def story() -> tuple[float, float]:
        node = world.node("a")
        working = node.run(work(node))
        await asyncio.sleep(0.5)
        node.suspend()
        await asyncio.sleep(60)
        node.resume()
        return await working, world.loop.time()

    felt, passed = world.run(story)
    assert felt == pytest.approx(1)
    assert passed == pytest.approx(61)


def test_clocks_differ() -> None:
    """A fast clock gains, a skewed one is off, and sleeping goes by one's own."""
    world = World(1)

    async def story() -> None:
        fast, slow = world.node("fast", rate=1.1), world.node("slow", rate=0.9, skew=30)
        await asyncio.gather(fast.run(fast.clock.sleep(110)), slow.run(slow.clock.sleep(90)))
        assert world.loop.time() == pytest.approx(100)
        assert fast.clock.wall() - slow.clock.wall() == pytest.approx(20 - 30)

    world.run(story)


def test_a_wait_for_what_cannot_come_is_found() -> None:
    """A world in which nothing will ever happen again says so."""

    async def story() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck):
        World(1).run(story)


def test_a_failed_journey_ends_the_world() -> None:
    """What goes wrong outside every node is not lost."""
    world = World(1)
    heard: list[Any] = []
    world.loop.set_exception_handler(lambda _, context: heard.append(context["exception"]))

    async def fail() -> None:
        raise ValueError("on the way")

    async def story() -> None:

        world.start(fail(), Context())
        await asyncio.sleep(1)

    world.run(story)
    assert [str(error) for error in heard] == ["on the way"]


ROUGH = Weather(slow=0.05, refused=0.1, undecided=0.1, lost=0.15, late=0.1, doubled=0.1, late_by=60)


class Told(SettlingStore):
    """Notes what a writer was told."""

    world: World
    node: Node

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes = await super().write(changes)
        for change, outcome in zip(changes, outcomes, strict=True):
            kind = type(outcome).__name__
            self.world.note(self.node.name, "told", nonce=change.nonce, outcome=kind)
        return outcomes


async def count(node: Node, store: Told, times: int) -> None:
    """Add to one of three records, again and again."""
    for n in range(times):
        key = f"n/{n % 3}"
        (nonce,) = node.components.ids.nonces(1)
        try:
            base = await store.get(key, tombstones=True)
            value = 1 if base is None or base.deleted else base.value + 1
            await store.write([Put(key, value, base, nonce=nonce)])
            await store.append("history", [nonce])
        except (Unavailable, OutcomeUnknown):
            pass
        await node.clock.sleep(1)


async def live(world: World) -> None:
    """Let four nodes write through rough weather while they are struck."""
    store = MemoryStore(components=world.node("store").components)
    for number in range(4):
        node = world.node(f"node-{number}", rate=world.dice.uniform(0.95, 1.05))
        link = Link(world, node, store, ROUGH)
        told = Told(link, node.components)
        told.world, told.node = world, node
        node.run(count(node, told, 40))
        world.start(trouble(world, node, link), Context())
    await asyncio.sleep(2000)


async def trouble(world: World, node: Node, link: Link) -> None:
    """Pause, suspend, cut off and at last perhaps kill a node."""
    for _ in range(3):
        await asyncio.sleep(world.dice.uniform(0, 60))
        match world.dice.randrange(4):
            case 0:
                node.pause()
            case 1:
                node.suspend()
            case 2:
                link.requests_pass = False
            case _:
                link.replies_pass = False
        await asyncio.sleep(world.dice.uniform(0, 30))
        node.resume()
        link.requests_pass = link.replies_pass = True
    if world.dice.random() < 0.5:
        node.kill()


def simulate(seed: int) -> World:
    """Run one world."""
    world = World(seed)
    world.run(lambda: live(world))
    return world


@pytest.mark.parametrize("seed", range(25))
def test_the_contract_holds_in_any_weather(seed: int) -> None:
    """Every key is one chain of versions, and every writer was told the truth."""
    history = simulate(seed).history
    assert check_commits(history) == []
    assert check_told(history) == []


def test_the_weather_was_rough() -> None:
    """Over the seeds all kinds of outcomes occurred, so that the checks had something to see."""
    outcomes = [
        each.details["outcome"]
        for seed in range(5)
        for each in simulate(seed).history
        if each.what == "told"
    ]
    assert outcomes.count("Applied") > 100
    assert outcomes.count("Conflicted") > 10


def test_broken_histories_are_found() -> None:
    """The checkers see what they are there to see."""

    def commit(seq: int, nonce: str, base: str | None, epoch: int = 0) -> Occurrence:
        facts = {"key": "n", "seq": seq, "nonce": nonce, "base": base, "epoch": epoch}
        return Occurrence(0.0, "a", "commit", facts)

    def told(nonce: str, outcome: str) -> Occurrence:
        return Occurrence(0.0, "a", "told", {"nonce": nonce, "outcome": outcome})

    good = [commit(1, "A", None), commit(2, "B", "A")]
    assert check_commits(good) == []
    assert len(check_commits([*good, commit(3, "C", "A")])) == 1
    assert len(check_commits([*good, commit(3, "A", "B")])) == 1
    assert len(check_commits([commit(1, "A", None, 2), commit(2, "B", "A", 1)])) == 1
    assert check_told([*good, told("A", "Applied"), told("C", "Conflicted")]) == []
    assert len(check_told([*good, told("C", "Applied"), told("B", "Conflicted")])) == 2
    assert check_told([*good, told("B", "Unknown"), told("C", "Unknown")]) == []


def test_a_seed_gives_one_history_under_any_hash_seed() -> None:
    """The same seed, in processes that hash differently, gives the same history."""
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); "  # noqa: PTH120
        "import test_world; print(test_world.simulate(7).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "12345")
    }
    assert len(prints) == 1
    assert simulate(8).fingerprint + "\n" not in prints
