"""A node's name, which one live process at a time holds.

The record says who holds it, what it is ready for, and the highest assignment that it has
applied. Taking it is a write in place of what was read, and only from a process that has
left or whose session is dead; so of two processes of one name one waits, or is refused. A
record that somebody deletes is written again by the process that holds the name and lives.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.membership import Membership
from jobsync.coordination.role import worker_of
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.clock import Mono
from jobsync.core.codec import Json
from jobsync.errors import Conflict, Corrupt, Misconfigured
from jobsync.jobs.events import NodeRestored
from jobsync.stores.contract import Record, Store

__all__ = ["NameTaken", "NodeRecord", "Registration", "Stage", "agree_on_locks", "read_node_record"]


Stage: TypeAlias = Literal["joining", "ready", "leaving", "left"]

_LOOK_AGAIN = 1.0


class NameTaken(Misconfigured):
    """Another process of this name lives."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a node's name."""

    name: str
    incarnation: str
    stage: Stage
    applied: int
    """The highest assignment whose revocations this node has carried out."""
    is_observer: bool
    """Whether it takes no tokens."""
    created: float
    """When it joined, by the store's clock where it has one."""
    host: str
    pid: int
    locks_enabled: bool = True
    """Whether pins hold, as far as it leads."""
    reclaim_after: float | None = None
    """Seconds after another's death before which it does not start that one's tasks again."""


def read_node_record(record: Record) -> NodeRecord:
    """Understand a node's record.

    Raises:
        Corrupt: it is not what any version of this library wrote.
    """
    try:
        return msgspec.convert(record.value, NodeRecord)
    except msgspec.ValidationError as error:
        raise Corrupt(record.key, str(error)) from error


class Registration:
    """This process's hold on a name.

    Args:
        store: where it is recorded.
        components: the clock that bounds waiting, and a place to tell facts.
        membership: whose session the hold hangs on.
        key: where the record is.
        facts: host and process, for people.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        membership: Membership,
        key: str,
        facts: Mapping[str, Json],
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._events = components.events
        self._membership = membership
        self._key = key
        self._facts = facts
        self._record: Record | None = None

    async def take(self, named: NodeRecord, *, until: Mono) -> None:
        """Hold the name from now on; wait for the one who holds it to leave or to die.

        Raises:
            NameTaken: it lives on; names its host and process.
        """
        while True:
            base = await self._store.get(self._key, tombstones=True)
            holder = None if base is None or base.deleted else read_node_record(base)
            if holder is None or await self._is_gone(holder):
                try:
                    self._record = await self._write(base, named)
                except Conflict:
                    continue
                self._membership.watch("name", ())
                return
            if self._clock.mono() >= until:
                raise NameTaken(
                    "node_name",
                    named.name,
                    f"is held by process {holder.pid} on {holder.host}, which lives",
                    "stop that process, or give this one another name",
                )
            await self._store.wait(f"{SESSIONS}", min(_LOOK_AGAIN, until - self._clock.mono()))

    async def tell(self, **changes: Json) -> NodeRecord:
        """Change what the record says.

        Raises:
            Conflict: the name is another's.
        """
        while True:
            record = self._record
            if record is None:
                raise Conflict(self._key)
            named = msgspec.structs.replace(read_node_record(record), **changes)
            if named == read_node_record(record):
                return named
            try:
                self._record = await self._write(record, named)
            except Conflict:
                current = await self._store.get(self._key, tombstones=True)
                if current is None or current.deleted:
                    await self._put_back(current, read_node_record(record))
                    continue
                mine = read_node_record(current).incarnation == named.incarnation
                self._record = current if mine else None
            else:
                return named

    async def restore(self) -> None:
        """Write the record again, if somebody has deleted it and nobody has the name by now."""
        record = self._record
        if record is None:
            return
        try:
            current = await self._store.get(self._key, tombstones=True)
        except Corrupt:
            return
        if current is None or current.deleted:
            await self._put_back(current, read_node_record(record))

    async def _put_back(self, base: Record | None, named: NodeRecord) -> None:
        # Whoever was first: what stands there is looked at when there is more to tell.
        with suppress(Conflict):
            self._record = await self._write(base, named)
            self._events.emit(NodeRestored(node=named.name))

    async def _write(self, base: Record | None, named: NodeRecord) -> Record:
        if base is None:
            return await self._store.create(self._key, msgspec.to_builtins(named))
        # Facts of newer code in the record survive.
        known = {} if base.deleted else base.value
        return await self._store.put(base, {**known, **msgspec.to_builtins(named)})

    async def _is_gone(self, holder: NodeRecord) -> bool:
        # An earlier session of this very process: what it had is void, dead or not.
        is_ours = worker_of(holder.incarnation) == self._membership.worker_id
        if holder.stage == "left" or is_ours:
            return True
        self._membership.watch("name", {holder.incarnation})
        record = await self._store.get(f"{SESSIONS}{holder.incarnation}")
        if record is not None:
            return read_session_record(record).state == "dead"
        return self._membership.is_dead(holder.incarnation)


# What all nodes of a fleet that live must say alike, and may change together.
#
# Whether pins hold is the leader's to say, and any node may lead. So who would say otherwise
# than a node that lives is not let in. A fleet changes it by being stopped and started.


_PURPOSE = "agreement"
_AGREEMENT_POLL = 1.0


async def agree_on_locks(
    membership: Membership,
    list_nodes: Callable[[], Awaitable[Iterable[NodeRecord]]],
    name: str,
    *,
    enabled: bool,
    until: Mono,
) -> None:
    """Wait until no other node lives that says otherwise of `locks_enabled`.

    Args:
        membership: who knows which sessions are dead.
        list_nodes: gives the nodes of the fleet.
        name: this node's.
        enabled: what this node says.
        until: how long to wait.

    Raises:
        Misconfigured: one lives on; names it.
    """
    clock = membership.components.clock
    try:
        while True:
            others = [
                node
                for node in await list_nodes()
                if node.locks_enabled != enabled and node.stage != "left" and node.name != name
            ]
            membership.watch(_PURPOSE, {node.incarnation for node in others})
            living = [node for node in others if await _lives(membership, node)]
            if not living:
                return
            if clock.mono() >= until:
                raise Misconfigured(
                    "locks_enabled",
                    enabled,
                    f"the node {living[0].name}, which lives, has {not enabled}",
                    "give the same on every node, or stop the others first",
                )
            wait = min(_AGREEMENT_POLL, until - clock.mono())
            await membership.store.wait(SESSIONS, wait)
    finally:
        membership.watch(_PURPOSE, ())


async def _lives(membership: Membership, node: NodeRecord) -> bool:
    record = await membership.store.get(f"{SESSIONS}{node.incarnation}")
    if record is None:
        return not membership.is_dead(node.incarnation)
    return read_session_record(record).state == "live"
