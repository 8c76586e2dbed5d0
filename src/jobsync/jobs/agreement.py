"""What all nodes of a fleet that live must say alike, and may change together.

Whether pins hold is the leader's to say, and any node may lead. So who would say otherwise
than a node that lives is not let in. A fleet changes it by being stopped and started.
"""

from collections.abc import Awaitable, Callable, Iterable

from jobsync.coordination.membership import Membership
from jobsync.coordination.session import SESSIONS, read_session_record
from jobsync.core.clock import Mono
from jobsync.errors import Misconfigured
from jobsync.jobs.node import Named

__all__ = ["agree_on_locks"]

_PURPOSE = "agreement"
_LOOK_AGAIN = 1.0


async def agree_on_locks(
    membership: Membership,
    list_nodes: Callable[[], Awaitable[Iterable[Named]]],
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
            wait = min(_LOOK_AGAIN, until - clock.mono())
            await membership.store.wait(SESSIONS, wait)
    finally:
        membership.watch(_PURPOSE, ())


async def _lives(membership: Membership, node: Named) -> bool:
    record = await membership.store.get(f"{SESSIONS}{node.incarnation}")
    if record is None:
        return not membership.is_dead(node.incarnation)
    return read_session_record(record).state == "live"
