"""A look at a fleet from outside: who lives, who leads what. Joins nothing, writes nothing.

What is shown stood in the store a moment ago. Where the store has a clock, a session that
has not been heard of for its timeout is told as silent: somebody will call it dead.
"""

import asyncio
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.role import ROLES, PastTerm, read_role, worker_of
from jobsync.coordination.session import SESSIONS, SessionRecord, read_session_record
from jobsync.core.codec import Json
from jobsync.core.keys import unescape
from jobsync.errors import Corrupt, NewerFormat
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each

__all__ = [
    "ClusterStatus",
    "RoleStatus",
    "SessionCondition",
    "SessionStatus",
    "read_cluster_status",
]

_MOST = 10_000

SessionCondition: TypeAlias = Literal["live", "silent", "dead"]


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a worker."""

    worker_id: str
    incarnation: str
    state: SessionCondition
    heard: float | None
    """Seconds since it last wrote; None where the store has no clock to tell by."""
    timeout: float
    """Seconds of silence after which it is called dead."""
    works: tuple[str, ...]
    """What it stands for, as namespace/work."""
    leads: tuple[str, ...]
    facts: dict[str, Json]


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work, and who leads it."""

    namespace: str
    work: str
    state: Literal["led", "vacant", "unreadable"]
    """Vacant: released, or its owner is dead, and nobody has taken it yet."""
    epoch: int = 0
    leader: str | None = None
    candidates: int
    """How many live sessions stand for it."""
    since: float | None = None
    until: float | None = None
    past: tuple[PastTerm, ...] = ()
    """Its latest terms that are over."""


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to see."""

    sessions: list[SessionStatus]
    roles: list[RoleStatus]


async def read_cluster_status(store: Store, components: Components) -> ClusterStatus:
    """Look at all sessions, and at the roles that any of them stands for.

    What cannot be understood is reported as `store:record-set-aside`.

    Raises:
        Unavailable: the store does not answer.
    """
    witness = CorruptionLog(store.name, components.events)
    records = await store.scan(SESSIONS, limit=_MOST)
    ages = await asyncio.gather(*map(store.age, records))
    lives: dict[str, SessionRecord] = {}
    sessions = []
    for record, age in zip(records, ages, strict=True):
        incarnation = record.key.removeprefix(SESSIONS)
        try:
            life = lives[incarnation] = read_session_record(record)
        except Corrupt as corrupt:
            witness.report(corrupt)
        else:
            sessions.append(_see_session(incarnation, life, age))
    names = sorted({name for life in lives.values() for name in (*life.works, *life.holds)})
    found = await read_each(store, [f"{ROLES}{name}" for name in names], witness.report)
    roles = [_see_role(name, found, lives) for name in names]
    return ClusterStatus(sessions=sessions, roles=[role for role in roles if role is not None])


def _see_session(incarnation: str, life: SessionRecord, age: float | None) -> SessionStatus:
    return SessionStatus(
        worker_id=life.worker,
        incarnation=incarnation,
        state=_judge(life, age),
        heard=age,
        timeout=life.timing.timeout,
        works=tuple(map(_readable, life.works)),
        leads=tuple(map(_readable, sorted(life.holds))),
        facts=life.facts,
    )


def _judge(life: SessionRecord, age: float | None) -> SessionCondition:
    if life.state == "dead":
        return "dead"
    return "silent" if age is not None and age > life.timing.timeout else "live"


def _see_role(
    name: str, found: Mapping[str, Record | None], lives: Mapping[str, SessionRecord]
) -> RoleStatus | None:
    """Describe a role; None where nobody has ever held it."""
    namespace, work = map(unescape, name.split("/"))
    alive = {each: life for each, life in lives.items() if life.state == "live"}
    seen = RoleStatus(
        namespace=namespace,
        work=work,
        state="unreadable",
        candidates=sum(name in life.works for life in alive.values()),
    )
    try:
        role = read_role(found[f"{ROLES}{name}"])
    except (KeyError, Corrupt, NewerFormat):
        return seen
    if role is None:
        return None
    owner = role.owner if role.owner in alive else None
    return msgspec.structs.replace(
        seen,
        state="vacant" if owner is None else "led",
        epoch=role.epoch,
        leader=None if owner is None else worker_of(owner),
        since=role.since,
        until=role.until,
        past=role.past,
    )


def _readable(name: str) -> str:
    """Give a role's name as people write it, instead of as keys have it."""
    return "/".join(map(unescape, name.split("/")))
