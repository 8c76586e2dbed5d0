"""Claims of several nodes on one store, with a clock that the test moves."""

import asyncio
from collections.abc import Sequence
from datetime import date
from typing import Any, cast

from chance import FakeClock, SeededRandomness

from jobsync import Components, Membership, Unavailable
from jobsync.core.clock import Wall
from jobsync.events import Events
from jobsync.jobs.claims import Claims
from jobsync.jobs.foreign_claims import ClaimRules
from jobsync.jobs.job_keys import JobKeys
from jobsync.stores.contract import Change, Outcome, Record, Store, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

__all__ = ["DAY", "MEMORY", "RECLAIM_AFTER", "TOKEN", "ClaimNodes", "FaultyStore", "claim"]

RECLAIM_AFTER = 60.0
MEMORY = 30.0
DAY = date(2026, 1, 5)
TOKEN = 7


class FakeMembership:
    """A membership with a set of dead sessions, and of those whose processes have ended."""

    def __init__(
        self,
        store: Store,
        components: Components,
        incarnation: str,
        dead: set[str],
        ended: set[str],
    ) -> None:
        self.store = store
        self.components = components
        self.incarnation = incarnation
        self.dead = dead
        self.ended = ended
        self._watched: frozenset[str] = frozenset()

    def watch(self, _: str, incarnations: set[str]) -> None:
        self._watched = frozenset(incarnations)

    def watched(self, _: str) -> frozenset[str]:
        return self._watched

    def is_dead(self, incarnation: str) -> bool:
        return incarnation in self.dead & self._watched

    def has_process_ended(self, incarnation: str) -> bool:
        return incarnation in self.ended


class FaultyStore(StoreDecorator):
    """A store that can lose replies, not answer, block writes, or have no clock."""

    is_unavailable = False
    has_no_clock = False
    lose_replies = 0
    gate: asyncio.Event | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.is_unavailable:
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
        if self.is_unavailable:
            raise Unavailable(self.name, "silent")
        return await self.inner.get_many(keys, tombstones=tombstones)

    async def now(self) -> Wall | None:
        return None if self.has_no_clock else await self.inner.now()


class ClaimNodes:
    """Creates nodes on one store, with one clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.components = Components(
            clock=self.clock, randomness=SeededRandomness(1), events=Events()
        )
        self.store = FaultyStore(MemoryStore(components=self.components))
        self.dead: set[str] = set()
        self.ended: set[str] = set()

    def node(self, name: str, **options: Any) -> Claims:
        """Create a node; its session has the same name."""
        settings = {
            "reclaim_after": RECLAIM_AFTER,
            "handover_memory": MEMORY,
            "once_per_date": False,
        } | options
        membership = cast(
            "Membership", FakeMembership(self.store, self.components, name, self.dead, self.ended)
        )
        keys = JobKeys("sync_")
        return Claims(membership, keys, DAY, name, lambda _: TOKEN, ClaimRules(**settings))

    def pass_time(self, seconds: float) -> None:
        self.clock.mono_seconds += seconds
        self.clock.wall_seconds += seconds

    async def state(self, task: str) -> tuple[str, str, int] | None:
        """Return a claim's state, node and run from the store."""
        found = {claim.task: claim for claim in await self.node("reader").list_all()}
        claim = found.get(task)
        return None if claim is None else (claim.state, claim.node, claim.run)


async def claim(node: Claims, *tasks: str, may_run: bool = True) -> dict[str, str]:
    """Claim tasks; return those that were not claimed."""
    return await node.add(dict.fromkeys(tasks, TOKEN), 1, lambda *_: may_run)
