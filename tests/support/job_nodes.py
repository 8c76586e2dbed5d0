"""Nodes that share tasks, started on the event loop of a test."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import date
from typing import Any, TypeAlias

import msgspec

from jobsync import Membership
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.node_loop import JobNodeSettings

__all__ = ["SETTINGS", "StartNode", "start_nodes_on"]

SETTINGS = JobNodeSettings(
    fleet="sync_",
    node="",
    site="test",
    day=date(2026, 1, 5),
    total_tokens=20,
    hash_function="md5",
    reclaim_after=60,
    handover_memory=60,
    once_per_date=False,
    is_observer=False,
    rebalance_interval=3600,
    refresh_interval=3600,
)

StartNode: TypeAlias = Callable[..., Awaitable[JobNode]]


def start_nodes_on(url: str, stack: AsyncExitStack) -> StartNode:
    """Return a function that starts nodes, each with its own session, and waits until ready."""

    async def start(name: str, **changes: Any) -> JobNode:
        membership = await Membership.join(
            url, heartbeat_interval=0.2, worker_timeout=5, skip_cold_start=True
        )
        stack.push_async_callback(membership.leave)
        node = JobNode(membership, msgspec.structs.replace(SETTINGS, node=name, **changes))
        stack.push_async_callback(node.stop, 5)
        await node.start(10)
        assert await node.wait_until_ready(30)
        return node

    return start
