"""Which workers have stopped by themselves, and which have died."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from jobsync import Components, Database, QueuePlugin
from jobsync.cli import cluster as module
from jobsync.coordination.session import SESSIONS
from jobsync.status.sessions import ClusterStatus, read_cluster_status
from jobsync.stores.memory import MemoryStore


async def _read_ends() -> ClusterStatus:
    """Return the status of a worker that has stopped, and of others that ended in other ways."""
    store = MemoryStore()
    database = Database(connection=store, plugins=[QueuePlugin("emails", on_message=print)])
    async with database:
        (record,) = await store.scan(SESSIONS)
    facts = record.value["facts"]
    idle = {**record.value, "state": "dead", "works": [], "holds": {}, "facts": {"host": "h"}}
    ends: dict[str, dict[str, Any]] = {
        "led": {"holds": {"default/queue-emails": 1}},
        "stood": {"works": ["default/queue-emails"]},
        "claimed": {"facts": {**facts, "queue:default/emails": {"concurrency": 3}}},
        "vanished": {"ended": True},
    }
    for name, changes in ends.items():
        await store.create(f"{SESSIONS}{name}.1", {**idle, "worker": name, **changes})
    return await read_cluster_status(store, Components.system())


async def test_a_worker_that_stops_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed was still a candidate, led, published something, or has just vanished."""
    status = await _read_ends()
    left = {session.worker_id: session.has_left for session in status.sessions}
    stopped = [worker for worker, has_left in left.items() if has_left]
    assert [worker for worker in left if worker not in stopped] == [
        *("claimed", "led", "stood", "vanished")
    ]
    assert len(stopped) == 1
    monkeypatch.setattr(module, "run_on_store", lambda _, __: status)
    shown = json.loads(CliRunner().invoke(module.cluster, ["--json"]).stdout)["members"]
    assert {row["worker_id"]: (row["state"], row["leads"]) for row in shown} == {
        worker: ("ended" if worker in stopped else "dead", []) for worker in left
    }
