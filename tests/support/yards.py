"""Claims of several nodes on one store, with a clock that stands still until told."""

import asyncio
from collections.abc import Sequence
from datetime import date
from typing import Any, cast

from chance import FakeClock, SeededRandomness

from jobsync import Components, Membership, Unavailable
from jobsync.core.clock import Wall
from jobsync.events import Events
from jobsync.jobs.claims import Claims
from jobsync.jobs.job_keys import JobKeys
from jobsync.stores.contract import Change, Outcome, Record, StoreDecorator, Unknown
from jobsync.stores.memory import MemoryStore

__all__ = ["DAY", "MEMORY", "RECLAIM_AFTER", "TOKEN", "Fragile", "Yard", "claim"]

RECLAIM_AFTER = 60.0
MEMORY = 30.0
DAY = date(2026, 1, 5)
TOKEN = 7


class Sessions:
    """Stands in for a membership: who this is, and who is dead."""

    def __init__(self, incarnation: str, dead: set[str]) -> None:
        self.incarnation = incarnation
        self.dead = dead
        self._watched: frozenset[str] = frozenset()

    def watch(self, _: str, incarnations: set[str]) -> None:
        self._watched = frozenset(incarnations)

    def watched(self, _: str) -> frozenset[str]:
        return self._watched

    def is_dead(self, incarnation: str) -> bool:
        return incarnation in self.dead & self._watched


class Fragile(StoreDecorator):
    """Loses replies, does not answer, keeps writes waiting, or has no clock, when told to."""

    silent = False
    timeless = False
    lose_replies = 0
    gate: asyncio.Event | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.silent:
            raise Unavailable(self.name, "silent")
        if self.gate is not None:
            await self.gate.wait()
        outcomes = await self.inner.write(changes)
        if self.lose_replies:
            self.lose_replies -= 1
            return [Unknown("lost") for _ in changes]
        return outcomes

    async def get_many(
        self, keys: Sequence[str], *, tombstones: bool = False
    ) -> list[Record | None]:
        if self.silent:
            raise Unavailable(self.name, "silent")
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def now(self) -> Wall | None:
        return None if self.timeless else await self.inner.now()


class Yard:
    """Nodes on one store, with one clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.store = Fragile(MemoryStore(components=self.components))
        self.dead: set[str] = set()

    def node(self, name: str, **options: Any) -> Claims:
        """Make a node; its session is called as it is."""
        chosen = {
            "reclaim_after": RECLAIM_AFTER,
            "handover_memory": MEMORY,
            "once_per_date": False,
        } | options
        sessions = cast("Membership", Sessions(name, self.dead))
        places = JobKeys("sync_")
        return Claims(self.store, self.components, sessions, places, DAY, name, **chosen)

    def pass_time(self, seconds: float) -> None:
        self.clock.mono_seconds += seconds
        self.clock.wall_seconds += seconds

    async def state(self, task: str) -> tuple[str, str, int] | None:
        """Give a claim's state, node and run, as the store has it."""
        found = {each.task: each for each in await self.node("reader").list_all()}
        claim = found.get(task)
        return None if claim is None else (claim.state, claim.node, claim.run)


async def claim(node: Claims, *tasks: str, may_run: bool = True) -> dict[str, str]:
    """Claim tasks; give those that were not."""
    return await node.add(dict.fromkeys(tasks, TOKEN), 1, lambda *_: may_run)
