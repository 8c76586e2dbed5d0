"""Scheduled jobs on machines whose clocks are wrong, on stores with and without a clock."""

import asyncio
from typing import Any

import pytest
from fleets import BilledStore
from waiting import until

from jobsync.scheduler.plugin import SchedulerPlugin
from jobsync.stores.memory import MemoryStore
from jobsync.testing.databases import NodeDatabase
from jobsync.testing.world import Occurrence, World

PERIOD = 10
BEAT, TIMEOUT = 5.0, 15.0


class Machines:
    """Machines that run the same job every ten seconds, each with a clock of its own.

    Args:
        store: what they share.
        skews: the errors of their clocks in seconds.
    """

    def __init__(self, store: type[MemoryStore], skews: dict[str, float]) -> None:
        self.world = World(300)
        self.store = store(components=self.world.components)
        self.fired: list[tuple[str, float, float]] = []
        """Machine, scheduled time and true time of each run."""
        self.plugins: dict[str, SchedulerPlugin] = {}
        self.vetoes: list[tuple[str, str]] = []
        for name, skew in skews.items():
            self.world.node(name, skew=skew)
        self.world.watch(self._check_progress)

    def _check_progress(self, occurrence: Occurrence) -> list[str]:
        """Check that nothing is noted as decided before its time: a successor would skip it."""
        key = str(occurrence.details.get("key"))
        if occurrence.what != "commit" or not key.endswith("/progress"):
            return []
        until = (occurrence.details["value"] or {}).get("until", 0)
        now = self.world.components.clock.wall().seconds
        return [] if until <= now + 1 else [f"decided until {until} at {now}"]

    async def start(self, name: str) -> None:
        """Start a machine."""
        node = self.world.nodes[name]

        async def action(_: Any, context: Any) -> None:
            now = self.world.components.clock.wall().seconds
            self.fired.append((name, float(context.scheduled_time), now))

        async def run() -> None:
            plugin = SchedulerPlugin(
                jobs={"tick": {"schedule": f"@every {PERIOD}s", "action": action}},
                heartbeat_interval=BEAT,
                worker_timeout=TIMEOUT,
            )
            database = NodeDatabase(node, self.store)
            database.on(
                "plg:scheduler:clock-vetoed",
                lambda event: self.vetoes.append((name, event.reason)),
            )
            await database.use_plugin(plugin)
            await database.connect()
            self.plugins[name] = plugin

        await node.run(run())

    @property
    def leaders(self) -> list[str]:
        """The machines that lead now."""
        return [name for name, plugin in self.plugins.items() if plugin.is_coordinator]

    def check(self) -> None:
        """Check that no instant fired twice or early, and that almost all were in time."""
        instants = [instant for _, instant, _ in self.fired]
        assert len(instants) == len({*instants})
        assert all(instant % PERIOD == 0 for instant in instants)
        assert all(now >= instant - 1 for _, instant, now in self.fired)


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_a_clock_that_is_set_wrong_fires_nothing_early(store: type[MemoryStore]) -> None:
    """On a bucket the leader stands back until its clock is right; on SQL it does not matter."""
    machines = Machines(store, {"a": 0.0, "b": 0.0, "c": 0.0})

    async def story() -> None:
        for name in ("a", "b", "c"):
            await machines.start(name)
        await until(lambda: machines.leaders and machines.fired, "a run")
        (first,) = machines.leaders
        # While a run ends, which decides what was due meanwhile, and which the next beat notes.
        runs = len(machines.fired)
        await until(lambda: len(machines.fired) > runs, "another run", interval=0.001)
        clock = machines.world.nodes[first].clock
        clock.step_wall(92)
        await asyncio.sleep(4 * TIMEOUT)
        if store is MemoryStore:
            assert machines.leaders == [first]
            assert machines.vetoes == []
        else:
            assert len(machines.leaders) == 1
            assert machines.leaders != [first]
            ((vetoed, reason),) = machines.vetoes
            assert vetoed == first
            assert "s ahead of the object store's (" in reason
        clock.step_wall(-92)
        await asyncio.sleep(4 * TIMEOUT)
        coordinator = machines.plugins[first]._coordinator
        assert coordinator is not None
        assert coordinator.withheld == ""
        assert len(machines.leaders) == 1
        machines.check()
        assert len(machines.fired) >= 10

    machines.world.run(story)
    assert machines.world.judge() == []


@pytest.mark.parametrize("skew", [-92.0, 92.0])
def test_a_machine_that_starts_with_a_wrong_clock_never_fires(skew: float) -> None:
    """Also if it is alone at first: nobody leads, and it shows why."""
    machines = Machines(BilledStore, {"off": skew, "right": 0.0})

    async def story() -> None:
        await machines.start("off")
        await asyncio.sleep(4 * TIMEOUT)
        assert machines.leaders == []
        assert [name for name, _ in machines.vetoes] == ["off"]
        await machines.start("right")
        await asyncio.sleep(8 * TIMEOUT)
        assert machines.leaders == ["right"]
        assert {name for name, _, _ in machines.fired} == {"right"}
        machines.check()

    machines.world.run(story)
    assert machines.world.judge() == []


@pytest.mark.parametrize("skew", [-92.0, 92.0])
def test_the_history_has_the_times_of_the_fleet(skew: float) -> None:
    """Found: a run had the times of its machine's clock, and its job's status others."""
    machines = Machines(MemoryStore, {"off": skew})

    async def story() -> None:
        await machines.start("off")
        await until(lambda: machines.leaders, "it leads")
        plugin, node = machines.plugins["off"], machines.world.nodes["off"]
        before = machines.world.components.clock.wall().seconds
        await node.run(plugin.run_job("tick"))
        after = machines.world.components.clock.wall().seconds
        (entry,) = [each for each in await node.run(plugin.job_history("tick")) if each.is_manual]
        assert entry.started_at is not None
        assert entry.ended_at is not None
        assert before - 1 <= entry.started_at <= entry.ended_at <= after + 1

    machines.world.run(story)
