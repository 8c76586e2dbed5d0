"""A node with `enabled=False`: it owns every task, and records them if a database is named."""

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chance import FakeClock
from claim_nodes import FaultyStore

from jobsync import (
    ClaimLost,
    Components,
    CoordinationConfig,
    Job,
    Misconfigured,
    Unavailable,
    open_store,
)
from jobsync.core.assignment import HASH_FUNCTIONS, token_maker
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing
from jobsync.errors import OutcomeUnknown
from jobsync.jobs import foreign_claims, job_lifecycle, local_node
from jobsync.jobs.foreign_claims import Claim, ClaimState
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.local_node import LocalNode, StoredRecords
from jobsync.jobs.registration import NodeInfo
from jobsync.stores.contract import Change, Outcome, Store, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

DAY = date(2026, 1, 5)
ALONE = CoordinationConfig(enabled=False, total_tokens=10)
FLEET = CoordinationConfig(total_tokens=10)
KEYS = JobKeys("sync_")

_numbers = itertools.count()


def alone(url: str | None, **options: Any) -> Job:
    """Create a node without a fleet."""
    return Job("alone", "s", date=DAY, url=url, **{"coordination_config": ALONE} | options)


def ids(lines: list[dict[str, Any]]) -> list[str]:
    """Return the ids of the described tasks, sorted."""
    return sorted(line["task_id"] for line in lines)


def test_audits_are_kept_in_the_database(url: str) -> None:
    """They are there for this node, for its next run, and for a fleet."""
    with alone(url) as job:
        assert job.my_tokens == set(range(10))
        for number in range(3):
            job.add_task(number)
        assert ids(job.incomplete_tasks()) == ["0", "1", "2"]
        job.write_audit()
        with job.task("block"):
            pass
        with pytest.raises(ZeroDivisionError), job.task("failed"):
            raise ZeroDivisionError
        assert ids(job.get_audit()) == ["0", "1", "2", "block"]
        assert [line["state"] for line in job.incomplete_tasks()] == ["failed"]
        job.add_task("at the end")
    done = ["0", "1", "2", "at the end", "block"]
    with alone(url) as job:
        assert ids(job.get_audit()) == done
    with Job("fleet", "s", date=DAY, url=url, coordination_config=FLEET) as node:
        audit = node.get_audit()
        assert ids(audit) == done
        assert {line["node"] for line in audit} == {"alone"}
        now = datetime.now(UTC)
        assert all(abs(line["created_on"] - now) < timedelta(minutes=5) for line in audit)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_guide_s_views_show_the_audits(kind: str, locate: Any) -> None:
    """As in its legacy mode."""
    with alone(locate(kind)) as job:
        job.add_tasks(["a", "b"])
        job.write_audit()
        query = "SELECT item, node FROM sync_audit ORDER BY item"
        rows = [tuple(row) for row in job._cn.execute(query).fetchall()]
        assert rows == [("a", "alone"), ("b", "alone")]


def test_a_database_in_the_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is named."""
    monkeypatch.setenv("JOBSYNC_URL", f"sqlite:///{tmp_path}/jobs.db")
    with alone(None) as job:
        job.add_task("x")
    with alone(None) as job:
        assert ids(job.get_audit()) == ["x"]


def test_without_a_database_nothing_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node owns everything and records nothing, not even in its working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBSYNC_URL", raising=False)
    with alone(None) as job:
        assert job.am_i_healthy()
        assert job.am_i_leader()
        assert not job._coordination_enabled
        assert [node.name for node in job.get_active_nodes()] == ["alone"]
        assert job.get_dead_nodes() == []
        assert job.health_ready()[1] == 200
        for number in range(3):
            assert job.can_claim_task(number)
            job.add_task(number)
        job.write_audit()
        with job.task("x"):
            pass
        assert [task.id for task in job.tasks(["y", "z"])] == ["y", "z"]
        assert len(job.add_tasks(range(5))) == 5
        assert job.get_audit() == job.incomplete_tasks() == []
        assert job.forget(older_than_days=1)["claims"] == 0
        status = job.get_coordination_status()
        assert status["enabled"] is status["coordination_enabled"] is False
        assert status["my_tokens"] == status["token_count"] == 10
        job.stop()
        assert not job.can_claim_task(1)
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_does_not_answer_is_an_error() -> None:
    """Audits are not lost without notice."""
    with pytest.raises((Unavailable, Misconfigured)):
        alone("postgresql://nobody@127.0.0.1:1/none").__enter__()


def test_once_per_date_holds_across_runs(url: str) -> None:
    """A task that is recorded as done is refused; without the option it is a new run."""
    with alone(url) as job:
        job.add_tasks(["a", "b"])
    with alone(url, once_per_date=True) as job:
        assert [task.text for task in job.add_tasks(["a", "b", "c"])] == ["c"]
        assert not job.can_claim_task("a")
    with alone(url) as job:
        job.add_task("a")
        job.write_audit()
        assert {line["task_id"]: line["run"] for line in job.get_audit()} == {
            "a": 2,
            "b": 1,
            "c": 1,
        }


@pytest.mark.parametrize("config", [ALONE, FLEET])
def test_an_observer_claims_nothing(memory: str, config: CoordinationConfig) -> None:
    """With or without a fleet; it reads what others have done, and removes what is old."""
    with alone(memory) as job:
        job.add_task("x")
    with Job(
        "watcher", "s", date=DAY, url=memory, coordination_config=config, observer=True
    ) as job:
        assert job.my_tokens == set()
        assert job.health_ready() == ({"status": "ready", "node": "watcher", "token_count": 0}, 200)
        assert not job.can_claim_task("y")
        for claim in (job.add_task, job.set_claim, lambda task: job.task(task).__enter__()):
            with pytest.raises(ClaimLost):
                claim("y")
        assert job.add_tasks(["y", "z"]) == []
        assert list(job.tasks(["x"])) == []
        assert ids(job.get_audit()) == ["x"]
        assert job.incomplete_tasks() == []
        assert job.forget(older_than_days=1)["claims"] == 0


@pytest.mark.parametrize("config", [ALONE, FLEET])
@pytest.mark.parametrize("other", [ALONE, FLEET])
def test_with_once_per_date_a_node_knows_at_its_start_what_is_done(
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    config: CoordinationConfig,
    other: CoordinationConfig,
) -> None:
    """By whichever node, and however much: the documented loop needs no request to find out."""
    monkeypatch.setattr(foreign_claims, "CLAIM_PAGE", 2)
    done = list("abcde")
    with Job("other", "s", date=DAY, url=memory, coordination_config=other) as job:
        job.add_tasks(done)
        job.write_audit()
        with suppress(ZeroDivisionError), job.task("failed"):
            raise ZeroDivisionError
    with Job(
        "one", "s", date=DAY, url=memory, coordination_config=config, once_per_date=True
    ) as job:
        for task in (tasks := [*done, "failed", "new"]):
            if job.can_claim_task(task):
                job.add_task(task)
        assert sorted(job._entered_node.running) == ["failed", "new"]
        job.write_audit()
        assert not any(map(job.can_claim_task, tasks))


def test_a_loop_over_a_list_continues_where_the_last_run_stopped(memory: str) -> None:
    """What is recorded as done is not done again."""
    with alone(memory) as job:
        for task in job.tasks(["1", "2", "3"]):
            if task.text == "2":
                break
    with alone(memory) as job:
        assert [task.text for task in job.tasks(["1", "2", "3"])] == ["2", "3"]


def test_a_fleet_with_other_settings_finds_the_audits(url: str) -> None:
    """It joins while the node without a fleet works: that one belongs to no fleet."""
    other = CoordinationConfig(enabled=False, total_tokens=7, hash_function="sha256")
    with alone(url, coordination_config=other) as job:
        job.add_tasks(range(20))
        with Job("fleet", "elsewhere", date=DAY, url=url, coordination_config=FLEET) as node:
            job.write_audit()
            done = node._call(node._entered_node.find_done([str(number) for number in range(20)]))
    assert len(done) == 20


def test_a_task_that_a_fleet_is_doing_is_not_recorded(memory: str) -> None:
    """Only its owner may end it; the refusal is reported."""
    components = Components.system()
    refused: list[Any] = []
    components.events.on("jobs:audit-refused", refused.append)
    with Job("fleet", "s", date=DAY, url=memory, coordination_config=FLEET) as node:
        node.add_task("x")
        with alone(memory, components=components) as job:
            job.add_tasks(["x", "y"])
            job.write_audit()
        node.write_audit()
        assert {line["task_id"]: line["node"] for line in node.get_audit()} == {
            "x": "fleet",
            "y": "alone",
        }
    assert [(event.task_id, event.reason) for event in refused] == [("x", "fleet is doing it")]


async def test_old_records_can_be_removed(store: Store) -> None:
    """As those of a fleet: the date is recorded while nodes work on it."""
    records = StoredRecords(store, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    await records.start()
    await records.add({"x": Mono(0.0)}, "done")
    used = await store.get(KEYS.work_date(DAY))
    assert used is not None
    assert (await records.forget(1)).claims == 0
    stale = await store.put(used, {"used": 0.0})
    # Another node has started long ago, and still works on it.
    other = StoredRecords(store, Components.system(), KEYS, DAY, "other", lambda _: 0)
    await other.add({"y": Mono(0.0)}, "done")
    assert (await records.forget(1)).claims == 0
    renewed = await store.get(KEYS.work_date(DAY))
    assert renewed is not None
    assert renewed.value["used"] >= used.value["used"]
    assert stale.version != renewed.version
    await store.put(renewed, {"used": 0.0})
    assert (await records.forget(1)).claims == 2
    assert await records.list_all({}) == []


class LosesReply(StoreDecorator):
    """A store that loses the reply to its first write, or the write itself."""

    is_applied: bool | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes, or not."""
        is_applied, self.is_applied = self.is_applied, None
        if is_applied is False:
            return [Unknown("lost") for _ in changes]
        outcomes = await self.inner.write(changes)
        return outcomes if is_applied is None else [Unknown("lost") for _ in changes]


class LosesSomeReplies(StoreDecorator):
    """A store that loses the replies to changes of some keys, once."""

    lost: Collection[str] = ()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes."""
        lost, self.lost = self.lost, ()
        outcomes = await self.inner.write(changes)
        return [
            Unknown("lost") if change.key in lost else outcome
            for change, outcome in zip(changes, outcomes, strict=True)
        ]


class Overtaken(StoreDecorator):
    """A store in which another writer is first, once."""

    overtake: Callable[[], Awaitable[object]] | None = None

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        """Apply changes after those of the other writer."""
        overtake, self.overtake = self.overtake, None
        if overtake is not None:
            await overtake()
        return await self.inner.write(changes)


@pytest.mark.parametrize("session", [None, "live", "dead"])
@pytest.mark.parametrize("state", ["running", "done", "failed"])
async def test_an_end_replaces_all_but_the_claims_of_live_nodes(
    store: Store, state: ClaimState, session: str | None
) -> None:
    """Only those go on; the others are earlier runs."""
    found = Claim(
        task="x",
        token=0,
        date=DAY.isoformat(),
        node="fleet",
        owner="w.1",
        number=3,
        run=4,
        state=state,
        started=1.0,
    )
    await store.create(KEYS.claim(DAY, "x"), msgspec.to_builtins(found))
    if session is not None:
        timing = msgspec.to_builtins(Timing(heartbeat=5.0, timeout=15.0))
        record = {"worker": "w", "state": session, "beat": 1, "timing": timing}
        await store.create("session/w.1", record)
    records = StoredRecords(store, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    is_refused = (state, session) == ("running", "live")
    refused = await records.add({"x": Components.system().clock.mono()}, "done")
    assert refused == ({"x": "fleet is doing it"} if is_refused else {})
    (claim,) = await records.list_all({})
    assert (claim.node, claim.run, claim.state) == (
        ("fleet", 4, "running") if is_refused else ("alone", 5, "done")
    )


@pytest.mark.parametrize("is_applied", [True, False])
async def test_an_unknown_outcome_is_recorded_once(store: Store, is_applied: bool) -> None:
    """The caller ends the task again; if the first write had landed, it is not repeated."""
    unreliable = LosesReply(store)
    records = StoredRecords(unreliable, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    await records.start()
    node = LocalNode(10, lambda _: 0, FakeClock(), records)
    assert await node.claim(["a", "b"]) == {}
    unreliable.is_applied = is_applied
    with pytest.raises(OutcomeUnknown):
        await node.finish(["a", "b"])
    assert node.running == ["a", "b"]
    assert await node.finish(["a", "b"]) == {}
    assert node.running == []
    found = {(claim.task, claim.run, claim.state) for claim in await node.list_claims()}
    assert found == {("a", 1, "done"), ("b", 1, "done")}


@pytest.mark.parametrize("loses_replies", [False, True])
@pytest.mark.parametrize("states", list(itertools.product(["done", "failed"], repeat=3)))
async def test_every_end_of_a_task_is_recorded(
    store: Store, states: tuple[ClaimState, ...], *, loses_replies: bool
) -> None:
    """A task that is pending again is done again; the record has the latest end."""
    unreliable = LosesReply(store)
    records = StoredRecords(unreliable, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    await records.start()
    node = LocalNode(10, lambda _: 0, FakeClock(), records)
    for run, state in enumerate(states, 1):
        assert await node.claim(["a"]) == {}
        (claim,) = await node.list_claims()
        assert (claim.run, claim.state, claim.ended) == (run, "running", None)
        if loses_replies:
            unreliable.is_applied = True
            with pytest.raises(OutcomeUnknown):
                await node.finish(["a"], state)
        assert await node.finish(["a"], state) == {}
        (claim,) = await node.list_claims()
        assert (claim.run, claim.state) == (run, state)
        assert ("a" in await node.find_done(["a"])) is (state == "done")


async def test_a_record_that_another_node_writes_meanwhile_is_an_earlier_run(store: Store) -> None:
    """A conflict is resolved by reading again."""
    components = Components.system()
    first = StoredRecords(store, components, KEYS, DAY, "one", lambda _: 0)
    await first.start()
    overtaken = Overtaken(store)
    second = StoredRecords(overtaken, components, KEYS, DAY, "two", lambda _: 0)
    now = components.clock.mono()
    overtaken.overtake = lambda: first.add({"a": now}, "done")
    assert await second.add({"a": now}, "done") == {}
    (claim,) = await second.list_all({})
    assert (claim.node, claim.run) == ("two", 2)


async def test_a_record_has_the_times_of_its_task() -> None:
    """Its start and its end by the clock of the store or machine; while it runs, its start."""
    clock = FakeClock()
    components = msgspec.structs.replace(Components.system(), clock=clock)
    store = MemoryStore(f"local-{next(_numbers)}", components)
    records = StoredRecords(store, components, KEYS, DAY, "alone", lambda _: 3)
    node = LocalNode(10, lambda _: 3, clock, records)
    first = clock.wall_seconds
    await node.claim(["a"])
    await clock.sleep(20)
    await node.claim(["b"])
    await clock.sleep(5)
    await node.finish(["a"])
    await clock.sleep(7)
    found = {claim.task: claim for claim in await node.list_claims()}
    owner = found["a"].owner
    known: dict[str, Any] = {
        "token": 3,
        "date": "2026-01-05",
        "node": "alone",
        "owner": owner,
        "number": 0,
    }
    assert found == {
        "a": Claim(task="a", run=1, state="done", started=first, ended=first + 25, **known),
        "b": Claim(task="b", run=1, state="running", started=first + 20, **known),
    }


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_task_that_is_done_can_be_claimed_by_its_state(
    store: Store, *, is_stored: bool
) -> None:
    """With `once_per_date` only one that failed; a loop refuses what was done since it looked."""
    records = StoredRecords(store, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    for once_per_date in (False, True):
        node = LocalNode(
            10,
            lambda _: 0,
            FakeClock(),
            records if is_stored else None,
            once_per_date=once_per_date,
        )
        tasks = [f"{once_per_date} failed", f"{once_per_date} done"]
        await node.claim(tasks)
        assert await node.claim(tasks) == dict.fromkeys(tasks, "this node does it already")
        await node.finish(tasks[:1], "failed")
        await node.finish(tasks[1:], "done")
        assert list(map(node.can_claim, tasks)) == [True, not once_per_date]
        assert list(await node.find_done(tasks)) == tasks[1:]
        lost = {tasks[1]: "it is done"} if once_per_date else {}
        assert await node.claim(tasks) == lost
        await node.finish(tasks, "failed")


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_loop_refuses_what_was_done_since_it_looked(
    store: Store, *, is_stored: bool
) -> None:
    """For the first time, or again."""
    records = StoredRecords(store, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, FakeClock(), records if is_stored else None)
    for _ in range(3):
        known = await node.find_done(["a"])
        assert await node.claim(["a"], known) == {}
        assert await node.claim(["a"], known) == {"a": "this node does it already"}
        await node.finish(["a"])
        assert await node.claim(["a"], known) == {"a": "it is done"}


async def test_a_task_whose_end_was_refused_is_not_done(store: Store) -> None:
    """It no longer runs here, and may be claimed again even with `once_per_date`."""
    records = StoredRecords(store, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, FakeClock(), records, once_per_date=True)
    await node.claim(["x", "y"])
    await store.create(KEYS.claim(DAY, "x"), {"damaged": True})
    assert await node.finish(["x", "y"]) == {"x": "its record cannot be read"}
    assert (node.running, node.can_claim("x"), node.can_claim("y")) == ([], True, False)


async def test_an_end_whose_outcome_is_unknown_hides_no_other(store: Store) -> None:
    """The error counts those that are unknown; the next attempt records each once."""
    unreliable = LosesSomeReplies(store)
    records = StoredRecords(unreliable, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    await records.start()
    node = LocalNode(10, lambda _: 0, FakeClock(), records)
    tasks = ["a", "b", "c"]
    await node.claim(tasks)
    unreliable.lost = [KEYS.claim(DAY, task) for task in ("a", "c")]
    with pytest.raises(OutcomeUnknown, match="2 tasks"):
        await node.finish(tasks)
    await node.finish(tasks)
    assert [(claim.task, claim.run) for claim in await records.list_all({})] == [
        ("a", 1),
        ("b", 1),
        ("c", 1),
    ]


@pytest.mark.parametrize("first", list(itertools.permutations("abc")))
@pytest.mark.parametrize("again", list(itertools.permutations("abc")))
async def test_ends_that_are_in_doubt_at_once_are_each_recorded_once(
    store: Store, first: Sequence[str], again: Sequence[str]
) -> None:
    """In whatever order the tasks are ended, and ended again."""
    unreliable = LosesReply(store)
    records = StoredRecords(unreliable, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, FakeClock(), records)
    for run in (1, 2):
        await node.claim("abc")
        for task in first:
            unreliable.is_applied = True
            with pytest.raises(OutcomeUnknown):
                await node.finish([task])
        for task in again:
            assert await node.finish([task]) == {}
        assert node.running == []
        found = [(claim.task, claim.run) for claim in await node.list_claims()]
        assert found == [("a", run), ("b", run), ("c", run)]


@pytest.mark.parametrize("seed", range(20))
async def test_each_run_of_a_task_is_counted_once_whatever_becomes_of_its_writes(
    store: Store, seed: int
) -> None:
    """Whichever tasks are ended together, and however often the outcome is not known."""
    chance = random.Random(seed)
    unreliable = LosesReply(store)
    records = StoredRecords(unreliable, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, FakeClock(), records)
    ended: Counter[str] = Counter()
    for _ in range(60):
        tasks = chance.sample("abcd", chance.randint(1, 4))
        if chance.random() < 0.4:
            await node.claim(tasks)
            continue
        running = {*tasks} & {*node.running}
        unreliable.is_applied = chance.choice([None, True, False])
        try:
            assert await node.finish(tasks) == {}
        except OutcomeUnknown:
            assert running <= {*node.running}
        else:
            ended.update(running)
        unreliable.is_applied = None
    ended.update(node.running)
    await node.finish(node.running)
    assert {claim.task: claim.run for claim in await node.list_claims()} == ended


@pytest.mark.parametrize("hash_function", HASH_FUNCTIONS)
@pytest.mark.parametrize("total", [1, 1000])
async def test_the_token_of_a_task_is_the_same_wherever_a_node_alone_tells_it(
    store: Store, memory: str, hash_function: Any, total: int
) -> None:
    """For its caller, for its claim, and as a fleet with these settings computes it."""
    settings = CoordinationConfig(enabled=False, total_tokens=total, hash_function=hash_function)
    tasks = [f"task-{number}" for number in range(20)]
    expected = dict(zip(tasks, map(token_maker(total, hash_function), tasks), strict=True))

    def run() -> None:
        with alone(memory, coordination_config=settings) as job:
            assert {task: job.task_to_token(task) for task in tasks} == expected
            assert job.my_tokens == set(range(total))
            job.add_tasks(tasks)

    await asyncio.to_thread(run)
    claims = await StoredRecords(
        store, Components.system(), KEYS, DAY, "alone", lambda _: -1
    ).list_all({})
    assert {claim.task: claim.token for claim in claims} == expected


def test_a_node_alone_describes_itself(memory: str) -> None:
    """As the only node, and the leader."""
    with alone(memory) as job:
        (node,) = job.nodes
        assert node == NodeInfo(
            name="alone",
            created_on=None,
            last_heartbeat=None,
            host="",
            pid=os.getpid(),
            stage="ready",
            is_leader=True,
        )


async def test_more_tasks_than_one_request_reads_are_all_recorded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And found again, a second time too; one that is damaged hides no other."""
    for module in (local_node, foreign_claims):
        monkeypatch.setattr(module, "CLAIM_PAGE", 2)
    records = StoredRecords(store, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, FakeClock(), records)
    tasks = list("abcde")
    await store.create(KEYS.claim(DAY, "a"), {"damaged": True})
    for run in (1, 2):
        assert await node.claim(tasks) == {}
        assert await node.finish(tasks) == {"a": "its record cannot be read"}
        found = await node.list_claims()
        assert [(claim.task, claim.run) for claim in found] == [(task, run) for task in "bcde"]
        assert sorted(await node.find_done(tasks)) == list("bcde")


def leave_block(job: Job, fail: Callable[[], None]) -> None:
    """Leave the block of a task by an exception, when the store has failed."""
    with suppress(ZeroDivisionError), job.task("a"):
        fail()
        raise ZeroDivisionError


def leave_loop(job: Job, fail: Callable[[], None]) -> None:
    """Leave a loop in the middle of a task, when the store has failed."""
    tasks = job.tasks(["a"])
    next(tasks)
    fail()
    tasks.close()


@pytest.mark.parametrize("fault", ["is_unavailable", "lose_replies"])
@pytest.mark.parametrize("then", ["end", "audit", "claim", "block", "look"])
@pytest.mark.parametrize("leave", [leave_block, leave_loop])
def test_a_task_that_failed_during_an_outage_is_not_done(
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    leave: Callable[[Job, Callable[[], None]], None],
    then: str,
    fault: str,
) -> None:
    """Whatever follows, its failure is recorded once, before the end of its next run."""
    stores: list[FaultyStore] = []

    async def open_faulty(*arguments: Any) -> Store:
        stores.append(FaultyStore(await open_store(*arguments)))
        return stores[-1]

    monkeypatch.setattr(job_lifecycle, "open_store", open_faulty)
    runs = [(1, "failed")]
    with alone(memory) as job:
        leave(job, lambda: setattr(stores[0], fault, 1))
        if fault == "is_unavailable":
            assert job.can_claim_task("a")
            with pytest.raises(Unavailable):
                job.add_task("a")
            stores[0].is_unavailable = False
        if then == "audit":
            job.write_audit()
        elif then == "claim":
            job.add_task("a")
            runs = [(2, "done")]
        elif then == "block":
            with job.task("b"):
                pass
        elif then == "look":
            assert [line["state"] for line in job.incomplete_tasks()] == ["failed"]
            assert job.get_audit() == []
    with alone(memory) as job:
        lines = [*job.get_audit(), *job.incomplete_tasks()]
        found = [(line["run"], line["state"]) for line in lines if line["task_id"] == "a"]
        assert found == runs


async def test_a_failure_is_recorded_after_an_interruption(store: Store) -> None:
    """As by Ctrl-C, while the store does not answer; the task is not marked as done."""
    faulty = FaultyStore(store)
    records = StoredRecords(faulty, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    await records.start()
    node = LocalNode(10, lambda _: 0, Components.system().clock, records)
    await node.claim(["a"])
    faulty.gate = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await node.finish(["a"], "failed")
    assert node.running == []
    faulty.gate.set()
    assert await node.finish(node.running) == {}
    await node.stop(1)
    (claim,) = await records.list_all({})
    assert (claim.run, claim.state) == (1, "failed")


async def test_a_failure_that_comes_while_others_are_recorded_is_recorded_next(
    store: Store,
) -> None:
    """Its own call was interrupted while it waited for that."""
    faulty = FaultyStore(store)
    records = StoredRecords(faulty, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, Components.system().clock, records)
    await node.claim(["a", "b"])
    faulty.is_unavailable = True
    with pytest.raises(Unavailable):
        await node.finish(["a"], "failed")
    faulty.is_unavailable = False
    faulty.gate = asyncio.Event()
    recording = asyncio.create_task(node.claim(["a"]))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await node.finish(["b"], "failed")
    faulty.gate.set()
    assert await recording == {}
    await node.stop(60)
    states = {claim.task: claim.state for claim in await records.list_all({})}
    assert states == {"a": "failed", "b": "failed"}


@pytest.mark.parametrize("fault", ["", "hangs", "is_unavailable"])
async def test_the_store_of_a_node_is_closed_at_its_end(store: Store, fault: str) -> None:
    """Also if what failed cannot be recorded any more, or not in time; that is told."""
    closed: list[str] = []

    class Closing(FaultyStore):
        async def close(self) -> None:
            closed.append(self.name)

    faulty = Closing(store)
    records = StoredRecords(faulty, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, Components.system().clock, records)
    await node.claim(["a"])
    faulty.is_unavailable = True
    with pytest.raises(Unavailable):
        await node.finish(["a"], "failed")
    faulty.is_unavailable = fault == "is_unavailable"
    faulty.gate = asyncio.Event() if fault == "hangs" else None
    errors = {"hangs": TimeoutError, "is_unavailable": Unavailable}
    with pytest.raises(errors[fault]) if fault else nullcontext():
        await node.stop(0.01 if fault == "hangs" else 60)
    assert len(closed) == 1


@pytest.mark.parametrize("look", ["find_done", "claim"])
async def test_what_was_found_to_be_done_is_offered_no_more(store: Store, look: str) -> None:
    """With `once_per_date`: another process has done it since this one began."""
    nodes = [
        LocalNode(
            10,
            lambda _: 0,
            FakeClock(),
            StoredRecords(store, Components.system(), KEYS, DAY, name, lambda _: 0),
            once_per_date=True,
        )
        for name in ("one", "two")
    ]
    for node in nodes:
        await node.start()
    await nodes[0].claim(["x"])
    await nodes[0].finish(["x"])
    assert nodes[1].can_claim("x")
    assert "x" in await getattr(nodes[1], look)(["x", "y"])
    assert [nodes[1].can_claim(task) for task in ("x", "y")] == [False, look == "find_done"]


async def test_failures_are_recorded_once_by_ends_at_the_same_time(store: Store) -> None:
    """Of which each waits until that has happened."""
    faulty = FaultyStore(store)
    records = StoredRecords(faulty, Components.system(), KEYS, DAY, "alone", lambda _: 0)
    node = LocalNode(10, lambda _: 0, Components.system().clock, records)
    await node.claim(["a", "b", "c"])
    faulty.is_unavailable = True
    with pytest.raises(Unavailable):
        await node.finish(["a"], "failed")
    faulty.is_unavailable = False
    faulty.gate = asyncio.Event()
    ends = [asyncio.create_task(node.finish([task])) for task in ("b", "c")]
    again = asyncio.create_task(node.claim(["a"]))
    await asyncio.sleep(0)
    assert "a" not in node.running
    faulty.gate.set()
    assert await asyncio.gather(*ends, again) == [{}, {}, {}]
    found = [(claim.task, claim.run, claim.state) for claim in await records.list_all({})]
    assert found == [("a", 1, "failed"), ("b", 1, "done"), ("c", 1, "done")]


def test_a_store_whose_date_cannot_be_recorded_is_closed(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of a job that was not entered; it can be entered later."""
    closed: list[str] = []

    class Closing(StoreDecorator):
        async def close(self) -> None:
            closed.append(self.name)
            await self.inner.close()

    async def open_closing(*arguments: Any) -> Store:
        return Closing(await open_store(*arguments))

    async def fail(_: StoredRecords) -> None:
        raise Unavailable("store", "silent")

    monkeypatch.setattr(job_lifecycle, "open_store", open_closing)
    job = alone(memory)
    with monkeypatch.context() as patch:
        patch.setattr(StoredRecords, "start", fail)
        with pytest.raises(Unavailable):
            job.__enter__()
    assert len(closed) == 1
    with job:
        job.add_task("x")
    assert len(closed) == 2
