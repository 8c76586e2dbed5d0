"""Which nodes live, and since when this one has not been heard of."""

import asyncio
import datetime as dt

from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.jobs.job_node import JobNode
from jobsync.jobs.local_node import NodeInfo
from jobsync.jobs.registration import NodeRecord
from jobsync.stores.contract import Record

__all__ = ["Health"]


class Health:
    """Looks at the nodes of a fleet.

    Args:
        crew: this node.
    """

    def __init__(self, crew: JobNode) -> None:
        self._crew = crew

    async def active(self) -> list[NodeInfo]:
        """Give the nodes that live, the oldest first."""
        return [info for info, is_alive in await self._look() if is_alive]

    async def dead(self) -> list[NodeInfo]:
        """Give the nodes that have left or died."""
        return [info for info, is_alive in await self._look() if not is_alive]

    def last_heartbeat(self) -> dt.datetime | None:
        """Give when the beat was sent that this node's trust rests on."""
        membership = self._crew.membership
        timing, left = membership.timing, membership.trust_left
        if left <= 0:
            return None
        sent = timing.timeout - timing.margin - left
        return _instant(membership.components.clock.wall().seconds - sent)

    async def _look(self) -> list[tuple[NodeInfo, bool]]:
        store = self._crew.membership.store
        nodes = sorted(await self._crew.nodes(), key=lambda node: node.incarnation)
        keys = [f"{SESSIONS}{node.incarnation}" for node in nodes]
        sessions = await store.get_many(keys) if keys else []
        heard = await asyncio.gather(*map(self._heard, sessions))
        found = []
        for node, session, last in zip(nodes, sessions, heard, strict=True):
            is_alive = session is not None and read_session_record(session).state == "live"
            info = self._describe(node) | {"last_heartbeat": last}
            found.append((info, is_alive and node.stage != "left"))
        return found

    async def _heard(self, session: Record | None) -> dt.datetime | None:
        """Give when a session last wrote, where the store has a clock to tell by."""
        if session is None:
            return None
        age = await self._crew.membership.store.age(session)
        return None if age is None else _instant(self._crew.claims.now - age)

    def _describe(self, node: NodeRecord) -> NodeInfo:
        leader = self._crew.leader
        return {
            "name": node.name,
            "created_on": _instant(node.created),
            "host": node.host,
            "pid": node.pid,
            "stage": node.stage,
            "is_leader": leader is not None and node.incarnation.startswith(f"{leader}."),
        }


def _instant(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
