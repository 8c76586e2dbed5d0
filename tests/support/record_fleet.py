"""A simulated fleet of processes that write, find and expire records.

Each process has its own database, as a user's process has. The records are in a store whose
batches are atomic, like a database, or in one where every record is written on its own, like a
bucket. `jobsync.testing` checks the commits and what the processes note.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec
from fleets import BilledStore
from waiting import until

from jobsync.coordination.fleet_clock import MAX_SKEW
from jobsync.database.backfill import BUILD_DELAY
from jobsync.database.definition import Definition
from jobsync.database.document import Document
from jobsync.database.registry import DEFINITIONS
from jobsync.database.resource import Resource
from jobsync.errors import (
    Conflict,
    Corrupt,
    Incomplete,
    JobsyncError,
    Misconfigured,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from jobsync.stores.contract import BURIAL_AGE
from jobsync.stores.memory import MemoryStore
from jobsync.testing import CALM, NodeDatabase, Weather
from jobsync.testing.invariants import Violation, is_defect
from jobsync.testing.record_invariants import check_records, find_leftovers, find_overdue
from jobsync.testing.world import Node, World
from jobsync.ttl.plugin import TTLPlugin

__all__ = ["NARROW", "REGIONS", "WIDE", "BucketStore", "RecordFleet", "RecordProcess", "Setup"]

REGIONS = ("eu", "us", "ap")
TIERS = (1, 2)
NARROW: Mapping[str, Any] = {"by_region": ["region"]}
WIDE: Mapping[str, Any] = {**NARROW, "by_tier": ["tier"], "by_both": ["region", "tier"]}

MINUTE = 60.0
RESTART = 5.0
"""Seconds after which a process that has failed is started again."""
BEAT, TIMEOUT = 5.0, 15.0
INTERVAL = 20.0
"""Seconds between two sweeps."""
SWEPT = TIMEOUT + 2 * BEAT + 2 * INTERVAL + 10.0
"""Seconds after which all is gone that has expired, if all goes well: a leader may have died."""

EXPIRING: Mapping[str, Mapping[str, Any]] = {
    "hard": {"field": "expires_at"},
    "soft": {"ttl": 60.0, "on_expire": "soft-delete"},
    "moved": {"field": "expires_at", "on_expire": "archive", "archive_resource": "attic"},
    "asked": {"field": "expires_at", "on_expire": "callback"},
}
"""How the records of each resource expire, as a TTL plugin gets it. The writer's clock decides when
a record was created."""

_REFUSALS = (Conflict, Corrupt, Misconfigured, NotFound, Unavailable)
"""Errors of verbs that have written nothing."""


class BucketStore(BilledStore):
    """A store that writes each record of a batch on its own."""

    is_atomic = False


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the code of a process says, and does."""

    resources: Mapping[str, Mapping[str, Any] | None]
    """The partitions of each resource; None if it does not define any."""
    pace: float = 2.0
    """Seconds between two deeds, at most."""
    users: int = 1
    """How many do something at the same time."""
    ids: int = 8
    """How many ids there are of each kind, for each resource."""
    is_idle: bool = False
    """Whether it writes nothing."""
    has_ttl: bool = False
    """Whether it has a TTL plugin for those of its resources that expire."""
    keeps_id: bool = False
    """Whether an archived record keeps its id."""
    sweeps: float = 0.1
    """How often a process sweeps by itself, instead of another deed, if it can."""
    lifetime: tuple[float, float] = (1.0, 200.0)
    """Seconds after which records expire, at least and at most."""


class RecordProcess:
    """One simulated process.

    Attributes:
        node: the node that it runs on.
        database: its database, once it is connected.
        ttl: its TTL plugin, if it has one.
    """

    def __init__(self, fleet: "RecordFleet", node: Node, setup: Setup) -> None:
        self.fleet = fleet
        self.node = node
        self.database: NodeDatabase | None = None
        self.ttl: TTLPlugin | None = None
        self._setup = setup
        self._dice = fleet.world.dice

    async def work(self) -> None:
        """Write and find records until cancelled, or until the database has failed."""
        fleet, setup = self.fleet, self._setup
        async with NodeDatabase(self.node, fleet.store, fleet.weather) as database:
            if setup.has_ttl and EXPIRING.keys() & setup.resources.keys():
                # Before the resources, so that the rules are in their first definitions.
                self.ttl = self._build_plugin()
                await database.use_plugin(self.ttl)
            for name, partitions in setup.resources.items():
                await database.create_resource(name, partitions=partitions)
            self.database = database
            async with asyncio.TaskGroup() as group:
                for _ in range(setup.users):
                    group.create_task(self._act_now_and_then(database))

    async def _act_now_and_then(self, database: NodeDatabase) -> None:
        fleet, setup = self.fleet, self._setup
        while True:
            # Raises the error that made it fail.
            assert database.store is not None
            is_idle = setup.is_idle or fleet.is_quiet
            pace = MINUTE if is_idle else setup.pace
            await self.node.clock.sleep(self._dice.uniform(0, pace))
            if not is_idle:
                name = self._dice.choice(list(setup.resources))
                await self.act(database.resource(name))

    @property
    def is_coordinator(self) -> bool:
        """Whether it leads the sweeps now."""
        return self.node.is_alive and self.ttl is not None and self.ttl.is_coordinator

    def _build_plugin(self) -> TTLPlugin:
        resources = {
            name: dict(EXPIRING[name]) for name in self._setup.resources if name in EXPIRING
        }
        if "asked" in resources:
            resources["asked"]["callback"] = self._decide
        if "moved" in resources:
            resources["moved"]["keep_original_id"] = self._setup.keeps_id
        return TTLPlugin(
            resources=resources,
            cleanup_interval=INTERVAL,
            batch_size=3,
            heartbeat_interval=BEAT,
            worker_timeout=TIMEOUT,
            skip_cold_start=True,
        )

    async def _decide(self, record: Document, resource: Resource) -> bool:
        """Whether to delete an expired record: every second one."""
        mark = record["mark"]
        verdict = int(mark.rpartition("-")[2]) % 2 == 0
        self.fleet.world.note(
            self.node.name,
            "expiring",
            resource=resource.name,
            id=record["id"],
            mark=mark,
            verdict=verdict,
        )
        await self.node.clock.sleep(self._dice.uniform(0, 2))
        return verdict

    async def act(self, resource: Resource) -> None:
        """Do something that users do."""
        if self.ttl is not None and self._dice.random() < self._setup.sweeps:
            await self._run([], self.ttl.run_cleanup())
            return
        deeds: Sequence[Callable[[Resource], Awaitable[None]]] = (
            self.insert,
            self.insert,
            self.insert_many,
            self.update,
            self.update,
            self.upsert,
            self.replace,
            self.delete,
            self.find,
            self.find,
        )
        await self._dice.choice(deeds)(resource)

    async def insert(self, resource: Resource) -> None:
        """Insert a record under an id that may be taken."""
        record = self._draw_record()
        await self._run([record["mark"]], resource.insert(record))

    async def insert_many(self, resource: Resource) -> None:
        """Insert records at once."""
        records = {record["id"]: record for record in (self._draw_record() for _ in range(3))}
        marks = [record["mark"] for record in records.values()]
        try:
            await self._run(marks, resource.insert_many(records.values()))
        except Incomplete as error:
            known = dict.fromkeys(error.written, "written")
            known |= dict.fromkeys(error.unknown, "unknown")
            self._note_verb(marks, [known.get(each, "unwritten") for each in records])

    async def update(self, resource: Resource) -> None:
        """Move a record to another partition, renew it, or both."""
        record = self._draw_record()
        names = self._dice.choice((("region",), ("expires_at",), ("tier",), ("region", "tier")))
        changes = {name: record[name] for name in ("mark", *names)}
        await self._run([record["mark"]], resource.update(record["id"], changes))

    async def upsert(self, resource: Resource) -> None:
        """Write a record, whether there is one or not."""
        record = self._draw_record()
        await self._run([record["mark"]], resource.upsert(record))

    async def replace(self, resource: Resource) -> None:
        """Replace a record; sometimes by one that is in no partition and does not expire."""
        record = self._draw_record()
        if self._dice.random() < 0.2:
            record = {name: record[name] for name in ("id", "mark")}
        await self._run([record["mark"]], resource.replace(record["id"], record))

    async def delete(self, resource: Resource) -> None:
        """Delete one of the records that users delete."""
        name = f"d{self._dice.randrange(self._setup.ids)}"
        self.fleet.world.note(self.node.name, "deleting", resource=resource.name, id=name)
        await self._run([], resource.delete(name))

    async def find(self, resource: Resource) -> None:
        """Read a partition, by its name or by a filter."""
        fields: dict[str, Any] = {"region": self._dice.choice(REGIONS)}
        if self._dice.random() < 0.5:
            fields["tier"] = self._dice.choice(TIERS)
        await self.look_up(resource, fields)

    async def look_up(self, resource: Resource, fields: Mapping[str, Any]) -> bool:
        """Read the records with these values, and note what was found."""
        world = self.fleet.world
        since = len(world.history)
        found: list[Document] | None = await self._run([], resource.query(dict(fields)))
        if found is None:
            return False
        pairs = [(each["id"], each._record.nonce) for each in found]
        world.note(
            self.node.name,
            "lookup",
            resource=resource.name,
            fields=dict(fields),
            since=since,
            found=pairs,
        )
        return True

    def _draw_record(self) -> dict[str, Any]:
        dice = self._dice
        kind = dice.choice("kd")
        return {
            "id": f"{kind}{dice.randrange(self._setup.ids)}",
            "region": dice.choice(REGIONS),
            "tier": dice.choice(TIERS),
            "expires_at": round(self.fleet.true_time + dice.uniform(*self._setup.lifetime), 3),
            "mark": f"mark-{next(self.fleet.marks)}",
        }

    async def _run(self, marks: Sequence[str], verb: Awaitable[Any]) -> Any:
        """Run a verb, and note what it says about the records that it should write."""
        try:
            result = await verb
        except OutcomeUnknown:
            self._note_verb(marks, ["unknown"] * len(marks))
        except _REFUSALS:
            self._note_verb(marks, ["unwritten"] * len(marks))
        else:
            self._note_verb(marks, ["written"] * len(marks))
            return result
        return None

    def _note_verb(self, marks: Sequence[str], outcomes: Sequence[str]) -> None:
        if marks:
            self.fleet.world.note(
                self.node.name, "verb", marks=list(marks), outcomes=list(outcomes)
            )


class RecordFleet:
    """Processes with records, and the store that they share.

    Args:
        world: the simulated world.
        is_bucket: whether the store writes each record on its own, and has no clock.
        weather: the faults of all links.
        early: seconds by which a process may misjudge the time; by default as much as it may be off
            on a store without a clock, and none on another.
    """

    def __init__(
        self,
        world: World,
        *,
        is_bucket: bool = False,
        weather: Weather = CALM,
        early: float | None = None,
    ) -> None:
        self.world = world
        self.is_bucket = is_bucket
        kind = BucketStore if is_bucket else MemoryStore
        self.store = kind(components=world.components)
        self.weather = weather
        self.processes: list[RecordProcess] = []
        self.setups: dict[str, Setup] = {}
        """Of the nodes, by name."""
        self.marks = count(1)
        self.is_quiet = False
        """Whether users do nothing more."""
        allowed = early or (MAX_SKEW + 1.0 if is_bucket else 0.0)
        world.expect(lambda history: check_records(history, early=allowed))

    @property
    def true_time(self) -> float:
        """The time of the world, in Unix seconds."""
        return self.world.components.clock.wall().seconds

    def add(self, name: str, setup: Setup, *, skew: float = 0.0) -> Node:
        """Start a process with its own clock; a restart starts it again."""
        rate = self.world.dice.uniform(0.9995, 1.0005)
        node = self.world.node(name, rate=rate, skew=skew)
        self.setups[name] = setup

        async def run(node: Node) -> None:
            """Run; after a failure, start again."""
            while True:
                process = RecordProcess(self, node, setup)
                self.processes.append(process)
                try:
                    await process.work()
                except* JobsyncError as errors:
                    self._record_failure(process, _find_first(errors))
                await node.clock.sleep(RESTART)

        node.start(run)
        return node

    def add_all(self, names: str, setup: Setup) -> list[Node]:
        """Start processes with the same code."""
        return [self.add(name, setup) for name in names]

    def find_process(self, name: str) -> RecordProcess:
        """Return the latest process with a name."""
        return next(each for each in reversed(self.processes) if each.node.name == name)

    async def read_definition(self, resource: str) -> Definition:
        """Return the stored definition of a resource; an empty one if there is none."""
        record = await self.store.get(f"{DEFINITIONS}{resource}")
        return Definition(resource) if record is None else Definition.read(record)

    async def wait_until_ready(self, resource: str, indexes: int, within: float) -> None:
        """Wait until a resource has so many indexes, all of them ready."""

        async def is_ready() -> bool:
            found = await self.read_definition(resource)
            return len(found.indexes) == indexes and found.is_settled

        what = f"{resource} has {indexes} indexes that are ready"
        await until(is_ready, what, within, interval=1.0, invariant="XL3")

    async def look_up_everything(self) -> None:
        """Read each partition from a process that starts now."""
        node = self.world.node(f"reader-{len(self.world.nodes)}")
        process = RecordProcess(self, node, Setup(resources={}))

        async def read() -> None:
            async with NodeDatabase(node, self.store) as database:
                for name in await self._list_resources():
                    for fields in _list_partitions():
                        await process.look_up(database.resource(name), fields)

        await node.run(read())
        del self.world.nodes[node.name]

    async def settle(self) -> None:
        """Wait in calm weather until all is swept, and look everything up."""
        self.is_quiet = True
        self._correct_clocks()
        await asyncio.sleep(2 * SWEPT)
        await self.look_up_everything()
        self.world.note("", "settled")
        self.world.violations += find_overdue(self.world.history, slack=SWEPT)

    async def settle_for_good(self) -> None:
        """Likewise; then stop all until nothing can arrive any more, and find what is left over."""
        await self.settle()
        nodes = [self.world.nodes[name] for name in self.setups]
        for node in nodes:
            await node.stop()
        await asyncio.sleep(BURIAL_AGE + 15 * MINUTE)
        for node in nodes:
            node.restart()
        await asyncio.sleep(SWEPT)
        await self.look_up_everything()
        self.world.note("", "settled")
        self.world.violations += find_leftovers(self.world.history, slack=BUILD_DELAY)

    def _correct_clocks(self) -> None:
        """Set all clocks right, as a time server does."""
        for name in self.setups:
            clock = self.world.nodes[name].clock
            clock.rate = 1.0
            clock.step_wall(self.true_time - clock.wall().seconds)

    async def _list_resources(self) -> list[str]:
        heads = await self.store.heads(DEFINITIONS)
        return [head.key.removeprefix(DEFINITIONS) for head in heads]

    @property
    def leaders(self) -> list[RecordProcess]:
        """The processes that lead the sweeps now."""
        return [process for process in self.processes if process.is_coordinator]

    async def wait_for_leader(self) -> RecordProcess:
        """Wait until there is a leader, and return it."""
        await until(lambda: self.leaders, "there is a leader", interval=0.1)
        return self.leaders[0]

    def _record_failure(self, process: RecordProcess, error: JobsyncError) -> None:
        world, node = self.world, process.node
        world.note(node.name, "gave up", error=str(error))
        if is_defect(error):
            world.violations.append(Violation("crash", repr(error)))
        elif process.database is not None:
            found = f"{node.name} has failed after its start: {error!r}"
            world.violations.append(Violation("A1", found))


def _find_first(errors: ExceptionGroup[JobsyncError]) -> JobsyncError:
    """Return the first of several errors."""
    first = errors.exceptions[0]
    return _find_first(first) if isinstance(first, ExceptionGroup) else first


def _list_partitions() -> Iterator[dict[str, Any]]:
    """Yield the values of all partitions."""
    for region in REGIONS:
        yield {"region": region}
        yield from ({"region": region, "tier": tier} for tier in TIERS)
    yield from ({"tier": tier} for tier in TIERS)
