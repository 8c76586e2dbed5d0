"""The nodes of a fleet: how a process takes a node's name, and which nodes are alive.

One live process at a time holds a name. Its record says which session holds the name, at which
stage the node is, and the highest assignment that it has applied. A process takes a name by
replacing the record that it has read, and only after the previous holder has left or its
session is dead; so the second of two processes with one name waits or is refused. If the record
is deleted, the live process that holds the name writes it again.
"""

import asyncio
import datetime as dt
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from jobsync.coordination.membership import Membership
from jobsync.coordination.role import worker_of
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.clock import Mono, to_datetime
from jobsync.core.codec import Json
from jobsync.core.keys import KeySegment
from jobsync.errors import Conflict, Corrupt, Misconfigured
from jobsync.jobs.events import NameAwaited, NodeRestored
from jobsync.stores.contract import Record
from jobsync.stores.corruption_log import convert_record

if TYPE_CHECKING:
    from jobsync.jobs.job_node import JobNode

__all__ = [
    "NameTaken",
    "NodeInfo",
    "NodeList",
    "NodeRecord",
    "Registration",
    "Stage",
    "find_candidates",
    "read_node_record",
]

Stage: TypeAlias = Literal["joining", "ready", "leaving", "left"]

_POLL_INTERVAL = 1.0


class NodeInfo(dict[str, Any]):
    """A node, readable as `node["name"]` and as `node.name`.

    Keys: name, created_on, last_heartbeat, host, pid, stage, is_leader.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a node has no {name!r}; it has {', '.join(self)}") from None


class NameTaken(Misconfigured):
    """Another live process has this name."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its name, and the session that holds it."""

    name: str
    incarnation: KeySegment
    stage: Stage
    applied: int
    """The highest assignment whose revocations this node has carried out."""
    is_observer: bool
    """Whether it takes no tokens."""
    created: float
    """When it joined, by the store's clock where it has one."""
    host: str
    pid: int
    fleet: dict[str, Json] = {}
    """Its values of the settings that all nodes share."""
    reclaim_after: float | None = None
    """Seconds that it waits after a node's death before it starts that node's tasks again."""
    reclaim_ended_after: float = 0.0
    """Likewise, if the process of that node had ended."""
    minimum_nodes: int = 0
    """While it is joining: it waits for this many nodes, itself included; 0 if it is not yet
    prepared to own tokens."""


def read_node_record(record: Record) -> NodeRecord:
    """Decode a node's record.

    Raises:
        Corrupt: no version of this library wrote this.
    """
    return convert_record(record, NodeRecord)


def find_candidates(nodes: Iterable[NodeRecord], dead: Collection[str]) -> list[NodeRecord]:
    """Return the nodes that own tokens, or would if enough others had joined."""
    return [
        node
        for node in nodes
        if (node.stage == "ready" or (node.stage == "joining" and node.minimum_nodes))
        and not node.is_observer
        and node.incarnation not in dead
    ]


class Registration:
    """This process's registration under a node's name.

    Args:
        membership: the session that the registration depends on; its store holds the record.
        key: the record's key.
        facts: host and process, for people.
    """

    def __init__(self, membership: Membership, key: str, facts: Mapping[str, Json]) -> None:
        self._store = membership.store
        self._clock = membership.components.clock
        self._events = membership.components.events
        self._membership = membership
        self._key = key
        self._facts = facts
        self._record: Record | None = None

    async def take(self, node: NodeRecord, *, until: Mono) -> None:
        """Take the name; wait for its holder to leave or to die.

        Raises:
            NameTaken: the holder is still alive; names its host and process.
        """
        is_reported = False
        while True:
            base = await self._store.get(self._key, tombstones=True)
            holder = None if base is None or base.deleted else read_node_record(base)
            if holder is None or await self._is_gone(holder):
                try:
                    self._record = await self._write(base, node)
                except Conflict:
                    continue
                self._membership.watch("name", ())
                return
            if self._clock.mono() >= until:
                raise NameTaken(
                    "node_name",
                    node.name,
                    f"is held by the live process {holder.pid} on {holder.host}",
                    "stop that process, or give this one another name",
                )
            if not is_reported:
                is_reported = True
                wait = until - self._clock.mono()
                waiting = NameAwaited(node=node.name, host=holder.host, pid=holder.pid, wait=wait)
                self._events.emit(waiting)
            await self._store.wait(f"{SESSIONS}", min(_POLL_INTERVAL, until - self._clock.mono()))

    async def update(self, **changes: Json) -> NodeRecord:
        """Change fields of the record.

        Raises:
            Conflict: another process has the name.
        """
        while True:
            record = self._record
            if record is None:
                raise Conflict(self._key)
            node = msgspec.structs.replace(read_node_record(record), **changes)
            if node == read_node_record(record):
                return node
            try:
                self._record = await self._write(record, node)
            except Conflict:
                current = await self._store.get(self._key, tombstones=True)
                if current is None or current.deleted:
                    await self._write_again(current, read_node_record(record))
                    continue
                is_ours = read_node_record(current).incarnation == node.incarnation
                self._record = current if is_ours else None
            else:
                return node

    async def restore(self) -> None:
        """Write the record again, if it was deleted and no other process has taken the name."""
        record = self._record
        if record is None:
            return
        try:
            current = await self._store.get(self._key, tombstones=True)
        except Corrupt:
            return
        if current is None or current.deleted:
            await self._write_again(current, read_node_record(record))

    async def _write_again(self, base: Record | None, node: NodeRecord) -> None:
        # If another writer was first, the next update reads what it wrote.
        with suppress(Conflict):
            self._record = await self._write(base, node)
            self._events.emit(NodeRestored(node=node.name))

    async def _write(self, base: Record | None, node: NodeRecord) -> Record:
        if base is None:
            return await self._store.create(self._key, msgspec.to_builtins(node))
        # Fields that newer code has written survive.
        known = {} if base.deleted else base.value
        return await self._store.put(base, {**known, **msgspec.to_builtins(node)})

    async def _is_gone(self, holder: NodeRecord) -> bool:
        # An earlier session of this process: what it owned is void, dead or not.
        is_ours = worker_of(holder.incarnation) == self._membership.worker_id
        if holder.stage == "left" or is_ours:
            return True
        self._membership.watch("name", {holder.incarnation})
        record = await self._store.get(f"{SESSIONS}{holder.incarnation}")
        if record is not None:
            return read_session_record(record).state == "dead"
        return self._membership.is_dead(holder.incarnation)


class NodeList:
    """The nodes of a fleet, live and dead, for people to read.

    Args:
        node: this node.
    """

    def __init__(self, node: "JobNode") -> None:
        self._node = node

    async def active(self) -> list[NodeInfo]:
        """Return the live nodes, the oldest first."""
        return [info for info, is_alive in await self._list() if is_alive]

    async def dead(self) -> list[NodeInfo]:
        """Return the nodes that have left or died."""
        return [info for info, is_alive in await self._list() if not is_alive]

    def last_heartbeat(self) -> dt.datetime | None:
        """Return when the heartbeat was sent that this node's trust is based on."""
        membership = self._node.membership
        timing, left = membership.timing, membership.trust_left
        if left <= 0:
            return None
        sent = timing.timeout - timing.margin - left
        return to_datetime(membership.components.clock.wall().seconds - sent)

    async def _list(self) -> list[tuple[NodeInfo, bool]]:
        store = self._node.membership.store
        nodes = sorted(await self._node.nodes(), key=lambda node: node.incarnation)
        keys = [f"{SESSIONS}{node.incarnation}" for node in nodes]
        sessions = await store.get_many(keys) if keys else []
        heartbeats = await asyncio.gather(*map(self._find_heartbeat, sessions))
        found = []
        for node, session, last in zip(nodes, sessions, heartbeats, strict=True):
            is_alive = session is not None and read_session_record(session).state == "live"
            found.append((self._describe(node, last), is_alive and node.stage != "left"))
        return found

    async def _find_heartbeat(self, session: Record | None) -> dt.datetime | None:
        """Return when a session last wrote, if the store has a clock, and since this boot."""
        store = self._node.membership.store
        while session is not None:
            age = await store.age(session)
            if age is not None:
                now = self._node.claims.store_clock.now
                return to_datetime(now - age) if math.isfinite(age) else None
            # It may just have written. Where reading costs money, there is no clock either.
            newer = None if store.is_billed else await store.get(session.key)
            session = newer if newer and newer.version != session.version else None
        return None

    def _describe(self, node: NodeRecord, last_heartbeat: dt.datetime | None) -> NodeInfo:
        leader = self._node.leader
        return NodeInfo(
            name=node.name,
            created_on=to_datetime(node.created),
            last_heartbeat=last_heartbeat,
            host=node.host,
            pid=node.pid,
            stage=node.stage,
            is_leader=leader is not None and node.incarnation.startswith(f"{leader}."),
        )
