"""Nodes that share tasks, made on the loop of a test."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import date
from typing import Any, TypeAlias

import msgspec

from jobsync import Membership
from jobsync.jobs.job_node import JobNode, JobNodeSettings

__all__ = ["SETTINGS", "Hire", "hire_on"]

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

Hire: TypeAlias = Callable[..., Awaitable[JobNode]]


def hire_on(url: str, stack: AsyncExitStack) -> Hire:
    """Give what makes nodes that are ready, each with a session of its own."""

    async def hire(node: str, **changes: Any) -> JobNode:
        membership = await Membership.join(
            url, heartbeat_interval=0.2, worker_timeout=5, skip_cold_start=True
        )
        stack.push_async_callback(membership.leave)
        crew = JobNode(membership, msgspec.structs.replace(SETTINGS, node=node, **changes))
        stack.push_async_callback(crew.stop, 5)
        await crew.start(10)
        assert await crew.wait_until_ready(1, 30)
        return crew

    return hire
