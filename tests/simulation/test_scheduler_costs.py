"""What scheduled jobs cost: requests to the store and timers, counted in the simulated world."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import pytest
from fleets import BilledStore
from waiting import until

from jobsync.scheduler.plugin import SchedulerPlugin
from jobsync.stores.memory import MemoryStore
from jobsync.stores.metered import Meter, MeteredStore, Tariff
from jobsync.testing.databases import NodeDatabase
from jobsync.testing.loop import SimulatedLoop
from jobsync.testing.nodes import Node
from jobsync.testing.world import Occurrence, World

HOUR = 3600.0
MANY = 10_000
TARIFF = Tariff({"get": (0, 1), "write": (0, 1), "scan": (1, 1)})
"""As a bucket counts requests."""
DUE = 7
"""Jobs that are due once a day."""


class CountedDatabase(NodeDatabase):
    """A database whose requests are counted, without those of its session."""

    def __init__(self, node: Node, shared: MemoryStore) -> None:
        super().__init__(node, shared)
        self.meter = Meter(TARIFF if shared.is_billed else Tariff())
        store = cast("Any", self.store_target.target)
        self.store_target.target = MeteredStore(store, self.meter, node.clock)


class Machines:
    """Machines with the same jobs on one store, and what is written there."""

    def __init__(self, store: type[MemoryStore], jobs: dict[str, str], **options: Any) -> None:
        self.world = World(7)
        self.store = store(components=self.world.components)
        self.runs: list[tuple[str, float]] = []
        self.commits: Counter[str] = Counter()
        self.jobs = dict(jobs)
        self._options = options
        self.world.watch(self._count_commit)

    def _count_commit(self, occurrence: Occurrence) -> list[str]:
        key = str(occurrence.details.get("key", ""))
        if occurrence.what == "commit" and key.startswith("schedule/default/"):
            self.commits[key.split("/")[2]] += 1
        return []

    @property
    def now(self) -> float:
        """The time of day."""
        return self.world.components.clock.wall().seconds

    async def start(self, name: str) -> tuple[CountedDatabase, SchedulerPlugin]:
        """Start a machine."""
        node = self.world.node(name)

        def act(_: Any, context: Any) -> None:
            self.runs.append((context.job_name, context.scheduled_time))

        async def run() -> tuple[CountedDatabase, SchedulerPlugin]:
            plugin = SchedulerPlugin(
                jobs={
                    job: {"schedule": schedule, "action": act, **self._options}
                    for job, schedule in self.jobs.items()
                }
            )
            database = CountedDatabase(node, self.store)
            await database.use_plugin(plugin)
            await database.connect()
            return database, plugin

        return await node.run(run())


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_a_firing_is_four_writes(store: type[MemoryStore]) -> None:
    """Its start and its end, in the state and in the history; progress is noted once a beat."""
    machines = Machines(store, {"often": "* * * * *", "rarely": "*/10 * * * *"})

    async def story() -> None:
        _, plugin = await machines.start("a")
        await until(lambda: plugin.is_coordinator, "it leads", HOUR, interval=1)
        await asyncio.sleep(60)
        machines.commits.clear()
        machines.runs.clear()
        await asyncio.sleep(HOUR)
        firings = len(machines.runs)
        assert firings == 66
        assert machines.commits["job"] + machines.commits["run"] == 4 * firings
        beats = HOUR / plugin._get_membership().timing.heartbeat
        assert machines.commits.pop("progress") <= min(beats, 60) + 1
        assert {*machines.commits} == {"job", "run"}

    machines.world.run(story)


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_a_run_by_hand_is_one_more_write_at_first(store: type[MemoryStore]) -> None:
    """It tells the coordinator where to look if this process dies, also in later runs."""
    machines = Machines(store, {"rarely": "0 0 29 2 *"})

    async def story() -> None:
        await machines.start("a")
        _, plugin = await machines.start("b")
        await asyncio.sleep(120)
        machines.commits.clear()
        for runs in range(1, 4):
            await machines.world.nodes["b"].run(plugin.run_job("rarely"))
            assert machines.commits["job"] + machines.commits["run"] == 4 * runs
        assert machines.commits["edits"] == 1
        await asyncio.sleep(HOUR)
        assert {*machines.commits} == {"job", "run", "edits"}

    machines.world.run(story)


class IdleCosts(NamedTuple):
    """What jobs cost of which almost none is ever due."""

    requests: int
    """In an hour in which none is due."""
    timers_set: int
    """In that hour."""
    timers: int
    """What is waited for at its end."""
    second_start: int
    """Requests of a process that starts with jobs that are stored."""
    taken_over: int
    """Records that a successor reads until it has fired the few that are due."""


def count_costs(count: int) -> IdleCosts:
    """Return the costs of so many jobs that are never due, and of a few that are once a day."""
    machines = Machines(BilledStore, {})
    hour = (datetime.fromtimestamp(machines.now, UTC).hour + 3) % 24
    machines.jobs |= {f"job-{n:05d}": "0 0 29 2 *" for n in range(count)}
    machines.jobs |= {f"due-{n}": f"0 {hour} * * *" for n in range(DUE)}

    async def story() -> IdleCosts:
        first, leader = await machines.start("a")
        await until(lambda: leader.is_coordinator, "it leads", HOUR, interval=1)
        await asyncio.sleep(60)
        loop = cast("SimulatedLoop", asyncio.get_running_loop())
        requests, timers_set = first.meter.requests, loop._timer_count
        await asyncio.sleep(HOUR)
        requests, timers_set = first.meter.requests - requests, loop._timer_count - timers_set
        timers = sum(not call.is_cancelled for _, _, call in loop._timers)
        second, follower = await machines.start("b")
        second_start = second.meter.requests
        await follower.disable_job("job-00000")
        await asyncio.sleep(60)
        assert machines.runs == []
        read = second.meter["get"].items
        machines.world.nodes["a"].kill()
        await until(lambda: len(machines.runs) == DUE, "its successor fires", 4 * HOUR, interval=1)
        taken_over = second.meter["get"].items - read
        assert second.meter["scan"].items == 0
        return IdleCosts(requests, timers_set, timers, second_start, taken_over)

    return machines.world.run(story)


def test_jobs_that_are_not_due_cost_nothing() -> None:
    """10,000 jobs cost what one costs: the same requests, timers, starts and take-overs."""
    one, many = count_costs(1), count_costs(MANY)
    # One for each heartbeat of 30 seconds: whether an operator has changed something.
    assert many.requests == one.requests <= HOUR / 30 + 1
    # Of the session and the store at that moment, and one of all jobs.
    assert many.timers == pytest.approx(one.timers, abs=2)
    assert many.timers_set == pytest.approx(one.timers_set, rel=0.02)
    assert many.second_start == one.second_start <= 8
    # Each job that is due, the paused one, and for up to three hours one in each heartbeat.
    assert many.taken_over == pytest.approx(one.taken_over, abs=5)
    assert many.taken_over <= DUE + 10 + 3 * HOUR / 30


def test_a_changed_definition_is_one_write() -> None:
    """Of many jobs a deployment changes one: the others are read, and left as they are."""
    machines = Machines(BilledStore, {f"job-{n:03d}": "0 0 29 2 *" for n in range(300)})

    async def story() -> None:
        await machines.start("a")
        machines.commits.clear()
        machines.jobs["job-007"] = "0 0 28 2 *"
        database, _ = await machines.start("b")
        assert machines.commits == {"job": 1, "code": 1, "defined": 2, "edits": 1}
        assert database.meter["get"].items <= 300 + 10

    machines.world.run(story)
