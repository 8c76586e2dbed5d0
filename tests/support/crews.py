"""Nodes that share tasks in a simulated world, and what must hold there."""

import asyncio
import contextlib
from collections import Counter
from datetime import date

from fleets import SETTINGS

from jobsync import Membership, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.coordination.runner import SameLoop
from jobsync.jobs.crew import Crew, CrewSettings
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.network import Link
from jobsync.testing.world import Node, World

__all__ = ["CrewWorld"]

DAY = date(2026, 1, 5)


class Hand:
    """One process that works through a list of tasks."""

    def __init__(self, world: "CrewWorld", node: Node, link: Link) -> None:
        self.world = world
        self.node = node
        self.link = link
        self.crew: Crew | None = None
        self.told_to_stop = asyncio.Event()

    async def live(self) -> None:
        """Join, work until nothing is left undone or told to stop, leave."""
        components = self.node.components
        settled = SettlingStore(self.link, components)
        membership = Membership(settled, components, SETTINGS, open_own=self._open, host=SameLoop())
        try:
            await membership.start()
            self.crew = crew = Crew(membership, self.world.settings(self.node.name))
            await crew.start(60)
            await crew.ready(1, 60)
            while not self.told_to_stop.is_set():
                if not await self._pass(crew):
                    await self.node.clock.sleep(1)
            await crew.stop(30)
            await membership.leave()
        except (Unavailable, OutcomeUnknown, Misconfigured) as error:
            self.world.note(self.node.name, "gave up", error=str(error))

    async def _pass(self, crew: Crew) -> int:
        """Go once through the list as it is now, as the guide's loop does."""
        todo = self.world.pending()
        done = 0
        for task in todo:
            if self.told_to_stop.is_set():
                break
            if not crew.can_claim(task):
                continue
            try:
                if await crew.claim([task]):
                    continue
            except (Unavailable, OutcomeUnknown):
                continue
            self.world.begin(self.node.name, task)
            await self.node.clock.sleep(self.world.world.dice.uniform(0, 0.2))
            self.world.end(self.node.name, task)
            done += 1
        with contextlib.suppress(Unavailable, OutcomeUnknown):
            await crew.finish(list(crew.claims.running))
        return done

    async def _open(self) -> Link:
        return self.link


class CrewWorld:
    """A list of tasks, and nodes that do them."""

    def __init__(self, seed: int, tasks: int) -> None:
        self.world = World(seed)
        self.store = MemoryStore(components=self.world.node("store").components)
        self.tasks = [f"task-{n}" for n in range(tasks)]
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.by: dict[str, list[str]] = {}
        self.hands: list[Hand] = []
        self.violations: list[str] = []

    def settings(self, name: str) -> CrewSettings:
        return CrewSettings(
            fleet="sync_",
            node=name,
            site="test",
            day=DAY,
            total_tokens=100,
            hash_function="md5",
            reclaim_after=60,
            handover_memory=60,
            once_per_date=False,
            is_observer=False,
            rebalance_interval=30,
            refresh_interval=30,
        )

    def add(self, name: str) -> Hand:
        node = self.world.node(name, rate=self.world.dice.uniform(0.951, 1.049))
        hand = Hand(self, node, Link(self.world, node, self.store))
        self.hands.append(hand)
        node.run(hand.live())
        return hand

    def pending(self) -> list[str]:
        return [task for task in self.tasks if not self.ended[task]]

    def note(self, node: str, what: str, **details: object) -> None:
        self.world.note(node, what, **details)

    def begin(self, node: str, task: str) -> None:
        self.begun[task] += 1
        self.by.setdefault(task, []).append(node)
        self.note(node, "begin", task=task)

    def end(self, node: str, task: str) -> None:
        self.ended[task] += 1
        self.note(node, "end", task=task)

    def owners(self, token: int) -> list[str]:
        return [
            hand.node.name
            for hand in self.hands
            if hand.node.is_alive and hand.crew is not None and hand.crew.holding.owns("x", token)
        ]
