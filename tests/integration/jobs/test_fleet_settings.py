"""The settings that all nodes of a fleet share change when no node is alive, and only then."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from job_nodes import SETTINGS, start_nodes_on
from msgspec.structs import replace
from teams import start_team

from jobsync import ClaimLost, Components, Corrupt, Job, Membership
from jobsync.core.assignment import token_of
from jobsync.core.pins import Pin, write_sheet
from jobsync.jobs.events import SettingsChanged
from jobsync.jobs.fleet_settings import FleetSettings, SettingsDiffer
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.job_node import JobNode
from jobsync.status.jobs import read_fleet_status
from jobsync.stores.contract import Change, Outcome, Record, Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.opening import open_store

OTHER: dict[str, Any] = {"total_tokens": 25, "hash_function": "sha256"}


def test_what_is_done_stays_done(url: str) -> None:
    """Other settings give every task another token, and find its claim all the same."""
    tasks = [f"t{n}" for n in range(100)]
    with start_team(url) as team:
        with team.make("a", once_per_date=True) as job:
            job.add_tasks(tasks[:50])
            job.write_audit()
        with team.make("b", settings=OTHER, once_per_date=True) as job:
            assert len(job.my_tokens) == 25
            assert not any(map(job.can_claim_task, tasks[:50]))
            assert all(map(job.can_claim_task, tasks[50:]))
            assert [task.text for task in job.add_tasks(tasks)] == tasks[50:]
            with pytest.raises(ClaimLost, match="a has"):
                job.add_task("t7")
        with team.make("a", once_per_date=True) as job:
            assert len(job.my_tokens) == 60
            assert job.add_tasks(tasks) == []
            assert len(job.get_audit()) == 100
        changed = [event.changed for event in team.events if isinstance(event, SettingsChanged)]
    assert changed == [OTHER, {"total_tokens": 60, "hash_function": "md5"}]


def test_what_runs_elsewhere_is_not_started(url: str) -> None:
    """The claim of a node that died is respected for its time, whatever its token was."""
    with start_team(url) as team:
        with team.make("a") as job:
            job.add_task("x")
            # As if its process had been killed: nothing is ended.
            job._node.claims._running.clear()  # type: ignore[union-attr]
        with team.make("b", settings={**OTHER, "reclaim_after": 3600}) as job:
            assert not job.can_claim_task("x")
            with pytest.raises(ClaimLost, match="a is doing it"):
                job.add_task("x")


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_pins_follow(url: str) -> None:
    """They hold with other settings, and SQL shows their new tokens."""
    pins = [(f"t{n}", "b") for n in range(30)]
    with start_team(url) as team:
        with team.make("a") as job:
            job.register_task_locks_bulk(pins)
            team.until(lambda: not any(job.can_claim_task(task) for task, _ in pins))
        job, _ = team.add("b", settings=OTHER), team.add("c", settings=OTHER)
        team.until(lambda: all(job.can_claim_task(task) for task, _ in pins))
        rows = _query(job, "SELECT task_id, task_token FROM sync_lock")
        assert rows == {(task, job.task_to_token(task)) for task, _ in pins}


def _query(job: Job, statement: str) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in job.connection.execute(statement).fetchall()}


@pytest.mark.parametrize("total_tokens", [20, 30], ids=["undone", "resumed"])
async def test_an_interrupted_change_is_undone_or_resumed(url: str, total_tokens: int) -> None:
    """The next node replaces the mark of a node that died, with either settings."""
    async with AsyncExitStack() as stack:
        start = start_nodes_on(url, stack)
        node = await start("a")
        await node.stop(5)
        await node.membership.leave()
        settled = await _mark(url, node.membership.incarnation)
        node = await start("b", total_tokens=total_tokens)
        assert node.tokens == frozenset(range(total_tokens))
        record = await node.membership.store.get(JobKeys("sync_").settings)
    assert record is not None
    assert record.value == {**settled, "total_tokens": total_tokens}


async def test_a_live_node_keeps_its_settings_after_an_interrupted_change(url: str) -> None:
    """A node that finds both the mark of a dead one and a live node with the old settings."""
    async with AsyncExitStack() as stack:
        start = start_nodes_on(url, stack)
        node = await start("a")
        gone = await Membership.join(url)
        await gone.leave()
        settled = await _mark(url, gone.incarnation)
        other = await start_unready(url, stack)
        with pytest.raises(SettingsDiffer, match="total_tokens must be 20 as on the live node a"):
            await other.start(0)
        # Nodes like the live one still join.
        await start("c")
        record = await node.membership.store.get(JobKeys("sync_").settings)
    assert record is not None
    assert record.value == settled


@pytest.mark.parametrize(
    ("field", "value"), [("zones", 3), ("zones", None), ("hash_function", "blake7")]
)
async def test_a_setting_of_newer_code_is_named(memory: str, field: str, value: Any) -> None:
    """A fleet may be upgraded node by node: the error names the field and the live node."""
    async with AsyncExitStack() as stack:
        start = start_nodes_on(memory, stack)
        node = await start("a")
        store, keys = node.membership.store, JobKeys("sync_")
        for key, path in ((keys.settings, None), (keys.node("a"), "fleet")):
            record = await store.get(key)
            assert record is not None
            found = record.value if path is None else record.value[path]
            newer = {**found, field: value}
            await store.put(record, newer if path is None else {**record.value, path: newer})
        other = await start_unready(memory, stack, SETTINGS.total_tokens)
        with pytest.raises(
            SettingsDiffer, match=f"{field} must be {value!r} as on the live node a"
        ):
            await other.start(0)
        if field == "hash_function":
            with pytest.raises(Corrupt, match="this code has no hash function 'blake7'"):
                await read_fleet_status(store, Components.system(), SETTINGS.fleet)


async def test_the_settings_of_newer_code_are_replaced_once_its_nodes_have_left(
    memory: str,
) -> None:
    """Also a hash function that this code lacks, and in spite of a mark of a node that died."""
    async with AsyncExitStack() as stack:
        start = start_nodes_on(memory, stack)
        node = await start("a")
        await node.pins.add("a", [Pin(task="t1", token=node.token("t1"), patterns=("a",))])
        await node.stop(5)
        await node.membership.leave()
        newer = {"hash_function": "blake7", "changing": node.membership.incarnation}
        store = node.membership.store
        record = await store.get(JobKeys("sync_").settings)
        assert record is not None
        settled = record.value
        await store.put(record, {**settled, **newer})
        node = await start("a")
        assert await node.claim(["t1"]) == {}
        record = await node.membership.store.get(JobKeys("sync_").settings)
    assert record is not None
    assert record.value == settled


class OvertakenStore(StoreDecorator):
    """A store in which another writer is first, once for each sheet of pins."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.overtaken: set[str] = set()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        for change in changes:
            if change.key not in self.overtaken:
                self.overtaken.add(change.key)
                record = await self.inner.get(change.key)
                assert record is not None
                pins = [
                    Pin(task=f"t{n}", token=token_of(f"t{n}", 20), patterns=("a",)) for n in (1, 2)
                ]
                document = write_sheet(record.value["created_by"], pins)
                await self.inner.write([record.replace(document)])
        return await super().write(changes)


async def test_pins_that_are_written_during_a_change_follow_too() -> None:
    """Their writer computed the tokens by the settings before."""
    components = Components.system()
    inner, keys = MemoryStore(components=components), JobKeys("sync_")
    for node in ("a", "b", "c"):
        pin = Pin(task="t1", token=token_of("t1", 20), patterns=("a",))
        await inner.create(keys.pins_of(node), write_sheet(node, [pin]))
    store = OvertakenStore(inner)
    membership: Any = SimpleNamespace(store=store, components=components)
    values = {"total_tokens": 977, "hash_function": "sha256"}
    settings = FleetSettings(membership, keys, "a", values, cast("Any", None))
    await settings._rewrite_pins(values)
    assert len(store.overtaken) == 3
    expected = [token_of(task, 977, "sha256") for task in ("t1", "t2")]
    for record in await inner.scan(keys.pins):
        (batch,) = record.value["batches"]
        assert (batch["tasks"], batch["tokens"]) == (["t1", "t2"], expected)


async def start_unready(url: str, stack: AsyncExitStack, total_tokens: int = 30) -> Any:
    """Return a node, by default with other settings, that is not started."""
    membership = await Membership.join(url, heartbeat_interval=0.2, worker_timeout=5)
    stack.push_async_callback(membership.leave)
    return JobNode(membership, replace(SETTINGS, node="other", total_tokens=total_tokens))


async def _mark(url: str, session: str) -> dict[str, Any]:
    """Write that a session, which is dead, changes the settings; return them."""
    store = await open_store(url)
    try:
        record = await store.get(JobKeys("sync_").settings)
        assert isinstance(record, Record)
        await store.put(record, {**record.value, "changing": session})
    finally:
        await store.close()
    return dict(record.value)
