"""Fleets of workers that keep sessions and watch each other, in a simulated world."""

import asyncio
import contextlib
from collections.abc import Sequence

from jobsync import Unavailable
from jobsync.coordination.election import Election, Term
from jobsync.coordination.observer import Observer
from jobsync.coordination.session import Session
from jobsync.core.trust import Timing
from jobsync.stores.contract import Applied, Change, Outcome
from jobsync.stores.memory import MemoryStore
from jobsync.stores.settling import SettlingStore
from jobsync.testing.network import CALM, Link, Weather
from jobsync.testing.world import Node, World

__all__ = ["HOUR", "TIMING", "Fleet", "run_storm"]

TIMING = Timing(beat=5, timeout=15)
HOUR = 3600.0


class Fleet:
    """Workers that keep sessions and watch each other."""

    def __init__(self, seed: int, *, size: int = 4) -> None:
        self.world = World(seed)
        self.sessions: dict[str, Session] = {}
        self.elections: list[Election] = []
        self.violations: list[str] = []
        self.deaths = 0
        self.releases = 0.0
        """How often a leader gives up its role of its own accord."""
        self.links: list[WatchedLink] = []
        self.nodes: list[Node] = []
        self._store = MemoryStore(components=self.world.node("store").components)
        for number in range(size):
            rate = self.world.dice.uniform(0.951, 1.049)
            node = self.world.node(f"node-{number}", rate=rate)
            self.nodes.append(node)
            self.links.append(WatchedLink(self.world, node, self._store))
            self.links[-1].fleet = self

    def start(self) -> None:
        """Let every node keep a session and watch the others."""
        for node, link in zip(self.nodes, self.links, strict=True):
            node.run(self._live(node, link))
            node.run(self._observe(node, link))

    async def _live(self, node: Node, link: Link) -> None:
        worker = node.components.ids.worker()
        while True:
            session = Session(link, node.components, TIMING, worker)
            try:
                await session.open()
            except Unavailable:
                await node.clock.sleep(TIMING.beat)
                continue
            self.sessions[session.incarnation] = session
            await self._serve(node, link, session)

    async def _serve(self, node: Node, link: Link, session: Session) -> None:
        """Beat and stand for election until the session is lost."""
        settled = SettlingStore(link, node.components, deadline=TIMING.beat)
        election = Election(settled, node.components, TIMING, session, "fleet", "work")
        self.elections.append(election)
        while await session.beat() == "live":
            with contextlib.suppress(Unavailable):
                await election.step()
            if self.world.dice.random() < self.releases:
                with contextlib.suppress(Unavailable):
                    await election.release()
            await node.clock.sleep(TIMING.beat)
        self.elections.remove(election)

    async def _observe(self, node: Node, link: Link) -> None:
        observer = Observer(link, node.components, TIMING)
        while True:
            with contextlib.suppress(Unavailable):
                await observer.look()
            await node.clock.sleep(TIMING.beat)

    @property
    def leaders(self) -> list[Term]:
        """The terms that their holders believe in, at this moment."""
        return [term for election in self.elections if (term := election.term) is not None]

    def judge(self, change: Change) -> None:
        """Look, at the moment of a commit, at what everybody believes."""
        if len(self.leaders) > 1:
            self.violations.append(f"several lead: {self.leaders}")
        value = getattr(change, "value", None) or {}
        if value.get("state") != "dead":
            return
        self.deaths += 1
        session = self.sessions.get(change.key.removeprefix("session/"))
        if session is not None and session.trusted:
            self.violations.append(f"{change.key} trusts itself and was called dead")


class WatchedLink(Link):
    """A link whose commits are judged as they happen."""

    fleet: Fleet

    async def _commit(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes = await super()._commit(changes)
        for change, outcome in zip(changes, outcomes, strict=True):
            if isinstance(outcome, Applied):
                self.fleet.judge(change)
        return outcomes


async def storm(fleet: Fleet) -> None:
    """Change the weather and strike nodes, for an hour."""
    world = fleet.world
    end = world.loop.time() + HOUR
    while world.loop.time() < end:
        at = world.dice.randrange(len(fleet.nodes))
        node, link = fleet.nodes[at], fleet.links[at]
        chance = world.dice.choice([0.0, 0.1, 0.4])
        link.weather = Weather(
            slow=chance, refused=chance, undecided=chance, lost=chance, late=chance, doubled=chance
        )
        match world.dice.randrange(5):
            case 0:
                node.pause()
            case 1:
                link.requests_pass = False
            case 2:
                link.replies_pass = False
            case _:
                pass
        await asyncio.sleep(world.dice.uniform(0, 60))
        node.resume()
        link.requests_pass = link.replies_pass = True


def run_storm(seed: int) -> Fleet:
    """Run a fleet through a stormy hour, then let it rest."""
    fleet = Fleet(seed)
    fleet.releases = fleet.world.dice.choice([0.0, 0.01])

    async def story() -> None:
        fleet.start()
        await storm(fleet)
        for link in fleet.links:
            link.weather = CALM
        fleet.releases = 0.0
        await asyncio.sleep(20 * TIMING.timeout)

    fleet.world.run(story)
    return fleet
