"""Listings of a fleet's records are complete, however many there are."""

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from job_nodes import StartNode

from jobsync import Components, Store
from jobsync.coordination.observer import Observer, list_live_sessions
from jobsync.core.assignment import token_maker
from jobsync.core.codec import Json
from jobsync.core.pins import Pin, read_sheet, write_sheet
from jobsync.core.trust import Timing
from jobsync.jobs.fleet_settings import FleetSettings
from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.pins import PinStore
from jobsync.jobs.registration import NodeRecord
from jobsync.status.jobs import read_fleet_status
from jobsync.status.sessions import read_cluster_status
from jobsync.stores.contract import Put
from jobsync.stores.corruption_log import CorruptionLog

COUNT = 10_001
KEYS = JobKeys("sync_")
TIMING = Timing(heartbeat=5.0, timeout=15.0)
components = Components.system()
token_of = token_maker(20)


async def fill(store: Store, key_of: Callable[[int], str], value_of: Callable[[int], Json]) -> None:
    """Create records."""
    await store.write([Put(key_of(number), value_of(number)) for number in range(COUNT)])


def describe_left(number: int) -> Json:
    """The record of a node that has left."""
    node = NodeRecord(
        name=f"a{number:05}",
        incarnation=f"a{number:05}.1",
        stage="left",
        applied=0,
        is_observer=False,
        created=0.0,
        host="",
        pid=1,
    )
    return msgspec.to_builtins(node)


async def fill_sessions(store: Store) -> None:
    """Many sessions, of which the last lives."""
    await fill(
        store,
        lambda number: f"session/w{number:05}.1",
        lambda number: {
            "worker": f"w{number:05}",
            "state": "live" if number == COUNT - 1 else "dead",
            "beat": 1,
            "timing": msgspec.to_builtins(TIMING),
        },
    )


async def fill_pins(store: Store) -> None:
    """Many nodes that have each pinned a task."""

    def write(number: int) -> Json:
        task = f"t{number:05}"
        pin = Pin(task=task, token=token_of(task), patterns=("a",))
        return write_sheet(f"a{number:05}", [pin])

    await fill(store, lambda number: KEYS.pins_of(f"a{number:05}"), write)


async def test_a_node_has_its_tokens_however_many_have_left(
    store: Store, start_node: StartNode
) -> None:
    """Their records stay until they are forgotten, also where each process has its own name."""
    await fill(store, lambda number: KEYS.node(f"a{number:05}"), describe_left)
    first, second = await start_node("b"), await start_node("c")
    assert second.tokens
    assert first.tokens | second.tokens == set(range(20))
    assert {node.name for node in await first.nodes()} >= {"b", "c"}
    status = await read_fleet_status(store, components, "sync_")
    assert {node.node for node in status.nodes()} >= {"b", "c"}
    forgotten = await first.forget(1)
    assert forgotten.nodes == COUNT


async def list_observed(store: Store) -> Sequence[str]:
    """The live sessions that a worker watches."""
    observer = Observer(store, components, TIMING)
    assert len(await observer.check_all()) == COUNT
    return sorted(observer.living)


async def list_live(store: Store) -> Sequence[str]:
    """The live sessions of which a term's holder knows."""
    found = await list_live_sessions(store, CorruptionLog(store.name, components.events).report)
    return list(found)


async def list_in_status(store: Store) -> Sequence[str]:
    """The live sessions that a command shows."""
    status = await read_cluster_status(store, components)
    assert len(status.sessions) == COUNT
    return [session.incarnation for session in status.sessions if session.state == "live"]


@pytest.mark.parametrize("listed", [list_observed, list_live, list_in_status])
async def test_a_session_is_seen_behind_many_others(
    store: Store, listed: Callable[[Store], Awaitable[Sequence[str]]]
) -> None:
    """The others are dead and not yet removed."""
    await fill_sessions(store)
    assert await listed(store) == [f"w{COUNT - 1:05}.1"]


async def test_every_pin_counts(store: Store) -> None:
    """However many nodes have pinned tasks."""
    await fill_pins(store)
    pins = PinStore(store, components, KEYS, token_of)
    assert len(await pins.list_active()) == COUNT


async def test_every_pin_follows_a_change_of_the_settings(store: Store) -> None:
    """It has the token of its task by the new ones."""
    await fill_pins(store)
    values = {"total_tokens": 977, "hash_function": "sha256"}
    membership: Any = SimpleNamespace(store=store, components=components)
    settings = FleetSettings(membership, KEYS, "a", values, cast("Any", None))
    await settings._rewrite_pins(values)
    last = await store.get(KEYS.pins_of(f"a{COUNT - 1:05}"))
    assert last is not None
    (batch,) = last.value["batches"]
    assert batch["tokens"] == [token_maker(977, "sha256")(f"t{COUNT - 1:05}")]
    assert read_sheet(last.value, last.key, token_of)
