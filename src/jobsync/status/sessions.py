"""Status of a fleet: its sessions, and which of them leads what. Reads only, without joining.

The result is what the store held a moment ago. Where the store has a clock, a session without a
heartbeat for its timeout is reported as silent: an observer will declare it dead. One whose process
was on this machine and has ended is dead, even if nobody is left to record that.
"""

import asyncio
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from jobsync.components import Components
from jobsync.coordination.role import ROLES, PastTerm, read_role, worker_of
from jobsync.coordination.session import (
    SESSIONS,
    HookFailure,
    SessionRecord,
    read_hook_failure,
    read_session_record,
    read_withheld,
)
from jobsync.core.codec import Json
from jobsync.core.keys import unescape
from jobsync.errors import Corrupt, NewerFormat
from jobsync.processes import Processes, has_ended
from jobsync.stores.contract import Record, Store
from jobsync.stores.corruption_log import CorruptionLog, read_each
from jobsync.stores.paging import scan_all

__all__ = [
    "ClusterStatus",
    "RoleStatus",
    "SessionCondition",
    "SessionStatus",
    "read_cluster_status",
]

SessionCondition: TypeAlias = Literal["live", "silent", "dead"]


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a worker."""

    worker_id: str
    incarnation: str
    state: SessionCondition
    heard: float | None
    """Seconds since its last write; None where the store has no clock."""
    timeout: float
    """Seconds without a heartbeat after which it is declared dead."""
    works: tuple[str, ...]
    """The roles that it is a candidate for, as namespace/work."""
    leads: tuple[str, ...]
    facts: dict[str, Json]
    has_ended: bool = False
    """Whether it is dead because its process was seen to have ended."""
    has_left: bool = False
    """Whether it has ended by itself: its process was stopped in order."""


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work, and the worker that leads it."""

    namespace: str
    work: str
    state: Literal["led", "silent", "vacant", "unreadable"]
    """Silent: its leader's heartbeats are missing. Vacant: released, or its owner is dead, and not
    taken yet."""
    epoch: int = 0
    leader: str | None = None
    candidates: int
    """The number of live sessions that are candidates for it."""
    since: float | None = None
    until: float | None = None
    failing: HookFailure | None = None
    """What its leader last raised, if it has not succeeded since."""
    withheld: dict[str, str] = {}
    """The live workers that stand back from it for now, each with the reason."""
    past: tuple[PastTerm, ...] = ()
    """Its latest terms that are over, in order."""


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All sessions of a fleet, and all its roles."""

    sessions: list[SessionStatus]
    roles: list[RoleStatus]


async def read_cluster_status(store: Store, components: Components) -> ClusterStatus:
    """Return all sessions, and the roles that any of them is a candidate for.

    Records that cannot be decoded are reported as `store:record-set-aside`.

    Raises:
        Unavailable: the store does not answer.
    """
    corruption_log = CorruptionLog(store.name, components.events)
    records = await scan_all(store, SESSIONS)
    ages = await asyncio.gather(*map(store.age, records))
    session_records: dict[str, SessionRecord] = {}
    sessions = []
    for record, age in zip(records, ages, strict=True):
        incarnation = record.key.removeprefix(SESSIONS)
        try:
            session_record = session_records[incarnation] = read_session_record(record)
        except Corrupt as corrupt:
            corruption_log.report(corrupt)
        else:
            sessions.append(
                _describe_session(incarnation, session_record, age, components.processes)
            )
    names = sorted(
        {
            name
            for each in session_records.values()
            for name in (*each.works, *each.holds, *_read_role_names(each))
        }
    )
    found = await read_each(store, [f"{ROLES}{name}" for name in names], corruption_log.report)
    conditions = {session.incarnation: session.state for session in sessions}
    roles = [_describe_role(name, found, session_records, conditions) for name in names]
    return ClusterStatus(sessions=sessions, roles=[role for role in roles if role is not None])


def _describe_session(
    incarnation: str, record: SessionRecord, age: float | None, processes: Processes
) -> SessionStatus:
    is_gone = record.ended is True or _is_process_gone(record, processes)
    return SessionStatus(
        worker_id=record.worker,
        incarnation=incarnation,
        state="dead" if is_gone else _find_condition(record, age),
        heard=age,
        timeout=record.timing.timeout,
        works=tuple(map(_format_role, record.works)),
        leads=tuple(map(_format_role, sorted(record.holds))),
        facts=record.facts,
        has_ended=is_gone,
        has_left=record.left is True,
    )


def _is_process_gone(record: SessionRecord, processes: Processes) -> bool:
    """Whether a session that nobody has declared dead was in a process that has ended."""
    process = record.process
    if record.state == "dead" or isinstance(process, msgspec.UnsetType):
        return False
    return has_ended(process, processes)


def _find_condition(record: SessionRecord, age: float | None) -> SessionCondition:
    if record.state == "dead":
        return "dead"
    return "silent" if age is not None and age > record.timing.timeout else "live"


def _describe_role(
    name: str,
    found: Mapping[str, Record | None],
    session_records: Mapping[str, SessionRecord],
    conditions: Mapping[str, SessionCondition],
) -> RoleStatus | None:
    """Return the status of a role; None if nobody has held it or stands back from it."""
    namespace, work = map(unescape, name.split("/"))
    live = {
        incarnation: record
        for incarnation, record in session_records.items()
        if conditions[incarnation] != "dead"
    }
    status = RoleStatus(
        namespace=namespace,
        work=work,
        state="unreadable",
        candidates=sum(
            name in record.works
            for incarnation, record in live.items()
            if conditions[incarnation] == "live"
        ),
        withheld={
            record.worker: reasons[name]
            for record in live.values()
            if name in (reasons := read_withheld(record))
        },
    )
    try:
        role = read_role(found[f"{ROLES}{name}"])
    except (KeyError, Corrupt, NewerFormat):
        return status
    if role is None:
        return msgspec.structs.replace(status, state="vacant") if status.withheld else None
    owner = role.owner if role.owner in live else None
    if owner is None:
        state: Literal["led", "silent", "vacant"] = "vacant"
    else:
        state = "led" if conditions[owner] == "live" else "silent"
    return msgspec.structs.replace(
        status,
        state=state,
        epoch=role.epoch,
        leader=None if owner is None else worker_of(owner),
        since=role.since,
        # A mandate that nobody has ends at no time.
        until=None if owner is None else role.until,
        failing=None if owner is None else read_hook_failure(live[owner], name),
        past=role.past,
    )


def _read_role_names(record: SessionRecord) -> list[str]:
    """Return the roles from which a worker stands back, without those that are no roles."""
    return [name for name in read_withheld(record) if name.count("/") == 1]


def _format_role(name: str) -> str:
    """Return a role's name as people write it, without the escapes of keys."""
    return "/".join(map(unescape, name.split("/")))
