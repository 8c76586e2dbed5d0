"""Damaged records of a fleet: its nodes go on, leave them alone, and use them once repaired."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from job_nodes import SETTINGS, StartNode
from msgspec.structs import replace
from teams import start_team
from waiting import until

from jobsync import Components, Job, JobsyncError, Membership, Store
from jobsync.core import plan_documents
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.core.pins import Pin
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.registration import NodeList
from jobsync.status.jobs import read_fleet_status
from jobsync.stores.contract import Put, Record

KEYS = JobKeys(SETTINGS.fleet)
DAY = SETTINGS.day
LEADER, OTHER, THIRD = "a", "b", "c"
TOKEN = 7
"""The token of the pinned tasks."""
GONE = object()
"""In place of a damaged record: it was deleted."""
WRONG_FIELDS: list[Json] = [None, 5, [], [None], {"z": 1}]
WRONG_RECORDS: list[Any] = [{}, [], [None], None, 5, "x", {"z": 1}, GONE]
WORDS = {"hash_function", "stage", "state", "date", "exceptions"}
"""The fields with a text that has a meaning."""
NAMES_A_KEY = {"exceptions", "incarnation", "owner", "changing"}
"""The fields with a text that is a part of another key."""
INTERVAL = 0.001


class HurriedClock:
    """The clock of a node that soon tries again what has failed."""

    def __init__(self, node: JobNode) -> None:
        self._clock = node._clock

    def mono(self) -> Mono:
        """Return the time since the machine was started."""
        return self._clock.mono()

    async def sleep(self, _: float) -> None:
        """Wait for a moment."""
        await asyncio.sleep(INTERVAL)


class Fleet:
    """Two nodes that share tasks, two of which do not follow their token, and one that joins."""

    def __init__(self, store: Store, leader: JobNode, other: JobNode, third: JobNode) -> None:
        self.store = store
        self.leader, self.other, self.third = leader, other, third
        self.problems: list[str] = []
        self.claimed = ""
        pinned = itertools.islice(filter(self._is_pinned, map(str, itertools.count())), 4)
        owners = itertools.cycle([LEADER, OTHER])
        self.pins = [self.pin(task, node) for task, node in zip(pinned, owners, strict=False)]
        self.others = itertools.filterfalse(self._is_pinned, map(str, itertools.count()))

    def _is_pinned(self, task: str) -> bool:
        return self.leader.token(task) == TOKEN

    def pin(self, task: str, node: str) -> Pin:
        """Return a pin of a task to a node, made by the other one."""
        creator = OTHER if node == LEADER else LEADER
        return Pin(task=task, token=self.leader.token(task), patterns=(node,), created_by=creator)

    async def add_pins(self, pins: list[Pin]) -> None:
        """Pin tasks to nodes, and wait until those may do them."""
        for pin in pins:
            await self.leader.pins.add(pin.created_by, [pin])
        for pin in pins:
            node = self.leader if pin.patterns == (LEADER,) else self.other
            await until(lambda node=node, task=pin.task: node.can_claim(task))  # type: ignore[misc]

    async def find(self, kind: str) -> Record:
        """Return the record of a kind."""
        (plan,) = await self.store.get_many([KEYS.assignment])
        assert plan is not None
        keys = {
            "assignment": KEYS.assignment,
            "exceptions": KEYS.exceptions(plan.value["exceptions"]),
            "a part of them": KEYS.exceptions(f"{plan.value['exceptions']}.1"),
            "settings": KEYS.settings,
            "the leader's node": KEYS.node(LEADER),
            "another node": KEYS.node(OTHER),
            "a joining node": KEYS.node(THIRD),
            "date": KEYS.work_date(DAY),
            "claim": KEYS.claim(DAY, self.claimed),
            "pins": KEYS.pins_of(LEADER),
        }
        (record,) = await self.store.get_many([keys[kind]])
        assert record is not None, keys[kind]
        return record

    async def overwrite(self, key: str, value: Any) -> None:
        """Replace a record by hand."""
        (record,) = await self.store.get_many([key], tombstones=True)
        if value is GONE:
            await self.store.drop([key])
            return
        await self.store.write([Put(key, value, record)])

    async def pass_loops(self, *nodes: JobNode) -> None:
        """Run the loop of each node once from its start."""
        nodes = nodes or (self.leader, self.other)
        for _ in range(2):
            for node in nodes:
                node._wakeup.set()
            await until(
                lambda: all(node.failure or not node._wakeup.is_set() for node in nodes),
                interval=INTERVAL,
            )
        assert [node.failure for node in nodes if node.failure] == []

    async def claim_next(self, node: JobNode) -> str:
        """Claim a task for the first time; return it."""
        task = next(self.others)
        await until(lambda: node.tokens, interval=INTERVAL)
        while not node.can_claim(task):
            task = next(self.others)
        assert await node.claim([task]) == {}
        return task

    async def call_each(self) -> None:
        """Call everything, and note what raises another error than is promised."""
        leader, other, task = self.leader, self.other, self.claimed
        again = next((t for t in itertools.islice(self.others, 20) if other.can_claim(t)), "x")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "claim": lambda: other.claim([again]),
            "claim again": lambda: leader.claim([task]),
            "claim as known": lambda: other.claim([task, again], known={}),
            "finish": lambda: leader.finish([task]),
            "fail": lambda: other.finish([again], "failed"),
            "list_claims": other.list_claims,
            "find_done": lambda: other.find_done([task, again]),
            "count_joined": other.count_joined,
            "nodes.active": NodeList(other).active,
            "nodes.dead": NodeList(other).dead,
            "pins.list_active": other.pins.list_active,
            "pins.add to own": lambda: leader.pins.add(LEADER, self.pins[1:2]),
            "pins.add to other": lambda: other.pins.add(OTHER, self.pins[:1]),
            "pins.remove_expired": other.pins.remove_expired,
            "withhold_pinned": lambda: other.withhold_pinned({self.pins[0].task: TOKEN}),
            "forget": lambda: other.forget(1),
            "read_fleet_status": self.read_status,
            "enter": lambda: self.third.enter(0),
        }
        for name, call in calls.items():
            try:
                async with asyncio.timeout(10):
                    await call()
            except JobsyncError:
                pass
            except Exception as error:  # noqa: BLE001 - noted
                self.problems.append(f"{name} raised {error!r}")
        for node in (leader, other):
            if node.failure is not None:
                self.problems.append(f"{node.settings.node} has failed: {node.failure!r}")

    async def read_status(self) -> set[str]:
        """Read all that people are shown; return the nodes."""
        status = await read_fleet_status(self.store, Components.system(), SETTINGS.fleet)
        nodes = {node.node for node in status.nodes()}
        status.shares()
        await status.pins()
        await status.claims(DAY)
        for task in (self.claimed, self.pins[0].task):
            await status.task(task, DAY)
        return nodes

    async def check_that_it_works(self) -> None:
        """Both nodes claim and finish, a third one may join, and all of it is shown."""
        done = [await self.claim_next(node) for node in (self.leader, self.other)]
        assert await self.leader.finish(done[:1]) == await self.other.finish(done[1:]) == {}
        assert set(await self.other.find_done(done)) == set(done)
        await self.third.enter(0)
        assert await self.read_status() == {LEADER, OTHER, THIRD}


@pytest.fixture
async def fleet(
    memory: str, store: Store, start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    """A fleet on a store in memory whose exceptions take more than one record."""
    monkeypatch.setattr(plan_documents, "_MAX_TASKS", 1)
    nodes = [await start_node(name) for name in (LEADER, OTHER)]
    for node in nodes:
        node._clock = node._rebalancer._clock = HurriedClock(node)  # type: ignore[assignment]
    membership = await Membership.join(memory, heartbeat_interval=0.2, skip_cold_start=True)
    third = JobNode(membership, replace(SETTINGS, node=THIRD))
    fleet = Fleet(store, nodes[0], nodes[1], third)
    await fleet.add_pins(fleet.pins)
    await third.enter(0)
    yield fleet
    await membership.leave()


def damage(value: dict[str, Json]) -> Iterator[Any]:
    """Return records of the wrong shape: as a whole, without a field, with a wrong field."""
    yield from WRONG_RECORDS
    turns = itertools.cycle(WRONG_FIELDS)
    no_segments = itertools.cycle(["a//b", "..", "x" * 300])
    for field, right in value.items():
        yield {other: value[other] for other in value if other != field}
        wrong = [w for w in (next(turns), next(turns)) if w == [None] or type(w) is not type(right)]
        # Of the right type: a word that is none of those known, a time that no calendar has.
        wrong += ["odd"] if field in WORDS else [1e300] if isinstance(right, float) else []
        wrong += [next(no_segments)] * (field in NAMES_A_KEY)
        yield from ({**value, field: other} for other in wrong)


KINDS = [
    "assignment",
    "exceptions",
    "a part of them",
    "settings",
    "the leader's node",
    "another node",
    "a joining node",
    "date",
    "claim",
    "pins",
]


@pytest.mark.parametrize("kind", KINDS)
async def test_no_call_fails_otherwise_by_a_damaged_record(kind: str, fleet: Fleet) -> None:
    """Of any shape; nobody writes a part of it, and it works again once it was put right."""
    fleet.claimed = await fleet.claim_next(fleet.leader)
    for number in itertools.count():
        right = await fleet.find(kind)
        damaged = next(itertools.islice(damage(right.value), number, None), "none")
        if damaged == "none":
            break
        await fleet.overwrite(right.key, damaged)
        await fleet.pass_loops()
        await fleet.call_each()
        await fleet.pass_loops()
        assert fleet.problems == [], damaged
        (found,) = await fleet.store.get_many([right.key])
        if found is not None and found.value != damaged:
            assert found.value.keys() == right.value.keys(), damaged
        await fleet.overwrite(right.key, right.value)
        await fleet.check_that_it_works()
        fleet.claimed = await fleet.claim_next(fleet.leader)
    await fleet.add_pins([fleet.pin(next(fleet.others), name) for name in (OTHER, LEADER)])


# Not that of the leader itself: without a record that tells of its end, its session must time out.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "the leader's node"])
async def test_the_next_leader_works_once_a_damaged_record_was_put_right(
    kind: str, fleet: Fleet
) -> None:
    """It took over while the record was damaged."""
    fleet.claimed = await fleet.claim_next(fleet.leader)
    right = await fleet.find(kind)
    await fleet.overwrite(right.key, {})
    await fleet.leader.stop(0.05)
    await fleet.leader.membership.leave()
    await until(lambda: fleet.other.is_leader)
    await fleet.pass_loops(fleet.other)
    await fleet.overwrite(right.key, right.value)
    await until(lambda: len(fleet.other.tokens) == SETTINGS.total_tokens)
    assert fleet.other.failure is None


CLAIMS: dict[str, tuple[dict[str, Json], datetime | None]] = {
    "a date that is none": ({"date": "odd"}, None),
    "a day that no month has": ({"date": "2026-02-30"}, None),
    "a start that no calendar has": ({"started": 1e300}, datetime(9999, 12, 31, tzinfo=UTC)),
}


@pytest.mark.parametrize(("changes", "shown"), CLAIMS.values(), ids=CLAIMS)
def test_a_list_of_tasks_shows_the_claims_that_can_be_read(
    memory: str, changes: dict[str, Json], shown: datetime | None
) -> None:
    """Those that are done, and those that are not; one that cannot be read hides no other."""
    with start_team(memory) as team:
        job = team.add("a")
        for read, tasks in ((job.incomplete_tasks, ["t", "u"]), (job.get_audit, ["v", "w"])):
            job.add_tasks(tasks)
            if read == job.get_audit:
                job.write_audit()
            damage_claim(job, tasks[0], changes)
            starts = {claim["task_id"]: claim["created_on"] for claim in read()}
            assert tasks[1] in starts
            assert starts.get(tasks[0]) == shown


def damage_claim(job: Job, task: str, changes: dict[str, Json]) -> None:
    """Change fields of a claim by hand."""
    node = job._node
    assert isinstance(node, JobNode)

    async def change() -> None:
        store = node.membership.store
        key = node._keys.claim(node.settings.day, task)
        (record,) = await store.get_many([key])
        assert record is not None
        await store.write([record.replace({**record.value, **changes})])

    job._call(change())
