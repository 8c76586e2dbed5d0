"""`jobsync cluster`, `tokens`, `pins` and `jobs`: the live workers, their roles and their tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from jobsync.cli.options import (
    SuggestingGroup,
    appname_option,
    date_option,
    json_option,
    now,
    run_on_store,
    url_option,
)
from jobsync.cli.render import (
    Column,
    Table,
    ago,
    format_ages,
    format_time,
    show_rows,
    show_tables,
)

if TYPE_CHECKING:
    import datetime as dt

    from jobsync.components import Components
    from jobsync.jobs.foreign_claims import Claim
    from jobsync.status.jobs import FleetStatus
    from jobsync.stores.contract import Store

__all__ = ["cluster", "jobs", "pins", "tokens"]

T = TypeVar("T")

_MEMBERS = (
    "worker_id",
    "state",
    Column("heard", ago),
    Column("host", spare=True),
    "pid",
    "leads",
    Column("works", spare=True),
    Column("version", spare=True),
)
_ROLES = (
    "namespace",
    "work",
    "state",
    "epoch",
    "leader",
    "candidates",
    Column("since", format_time, spare=True),
    Column("until", format_time, spare=True),
)
_NODES = ("node", "state", "leads", "tokens", Column("heard", ago), "host", "pid")
_SHARES = ("assignment", "node", "tokens", "incoming", "outgoing", "pinned")
_PINS = (
    "task_id",
    "token",
    "patterns",
    Column("in_force", lambda pattern: str(pattern or "no match")),
    "reason",
    "created_by",
    Column("expires", format_time),
)
_CLAIMS = (
    "task_id",
    "token",
    "node",
    "state",
    "run",
    Column("started", format_time),
    Column("ended", format_time),
)


@click.command()
@url_option
@json_option
def cluster(url: str | None, *, as_json: bool) -> None:
    """Show workers, the leader of each role, what its work raises, and past terms.

    A worker is live, silent (its heartbeats are missing), ended (it was stopped in order) or dead.
    A role is led, vacant (nobody leads it), or silent (its leader is).
    """
    from jobsync.status.sessions import read_cluster_status

    status = run_on_store(url, read_cluster_status)
    members = [
        {
            "worker_id": session.worker_id,
            "state": "ended" if session.has_left else session.state,
            "heard": session.heard,
            "host": session.facts.get("host"),
            "pid": session.facts.get("pid"),
            "version": session.facts.get("version"),
            # What a dead one led is vacant, or led by another.
            "leads": () if session.state == "dead" else session.leads,
            "works": () if session.has_left else session.works,
        }
        for session in status.sessions
    ]
    roles = [msgspec.structs.asdict(role) for role in status.roles]
    terms = [
        {"work": f"{role.namespace}/{role.work}", **msgspec.structs.asdict(term)}
        for role in status.roles
        for term in role.past
    ]
    failing = [
        {
            "work": f"{role.namespace}/{role.work}",
            "leader": role.leader,
            **msgspec.structs.asdict(role.failing),
        }
        for role in status.roles
        if role.failing is not None
    ]
    withheld = [
        {"work": f"{role.namespace}/{role.work}", "worker": worker, "reason": reason}
        for role in status.roles
        for worker, reason in role.withheld.items()
    ]
    for role in roles:
        # Shown in tables of their own.
        del role["past"], role["failing"], role["withheld"]
    ages = format_ages(now())
    times = (Column("ended", ages), Column("since", format_time, spare=True))
    error = (Column("at", ages), Column("leader", spare=True), Column("error", long=True))
    tables = {
        "members": Table(_MEMBERS, members),
        "roles": Table(_ROLES, roles),
        "failing": Table(("work", "callback", "times", *error), failing),
        "withheld": Table(("work", "worker", Column("reason", long=True)), withheld),
        "terms": Table(("work", "epoch", "worker", "why", *times), terms),
    }
    show_tables(tables, as_json=as_json)


@click.command()
@url_option
@appname_option
@json_option
def tokens(url: str | None, appname: str, *, as_json: bool) -> None:
    """Show the nodes of a fleet and how many tokens each of them owns."""

    async def read(fleet: FleetStatus) -> FleetStatus:
        return fleet

    fleet = _read_fleet(url, appname, read)
    nodes = [msgspec.structs.asdict(node) for node in fleet.nodes()]
    shares = [
        {"assignment": fleet.number, **msgspec.structs.asdict(share)} for share in fleet.shares()
    ]
    tables = {"nodes": Table(_NODES, nodes), "shares": Table(_SHARES, shares)}
    show_tables(tables, as_json=as_json)


@click.command()
@url_option
@appname_option
@json_option
def pins(url: str | None, appname: str, *, as_json: bool) -> None:
    """Show the pins of a fleet: which nodes a task may run on, and whether one matches."""
    found = _read_fleet(url, appname, lambda fleet: fleet.pins())
    show_rows(_PINS, [msgspec.structs.asdict(pin) for pin in found], as_json=as_json)


@click.group(cls=SuggestingGroup)
def jobs() -> None:
    """Show the tasks of a date that are done, and those that are not."""


@jobs.command()
@url_option
@appname_option
@date_option
@json_option
def audits(url: str | None, appname: str, day: dt.date, *, as_json: bool) -> None:
    """Show the tasks that are done."""
    found = _read_fleet(url, appname, lambda fleet: fleet.claims(day))
    _show_claims([claim for claim in found if claim.state == "done"], as_json=as_json)


@jobs.command()
@url_option
@appname_option
@date_option
@json_option
def incomplete(url: str | None, appname: str, day: dt.date, *, as_json: bool) -> None:
    """Show the tasks that were started and are not done: running, failed or abandoned."""
    found = _read_fleet(url, appname, lambda fleet: fleet.claims(day))
    _show_claims([claim for claim in found if claim.state != "done"], as_json=as_json)


def _show_claims(claims: list[Claim], *, as_json: bool) -> None:
    rows = [
        {
            "task_id": claim.task,
            "token": claim.token,
            "node": claim.node,
            "state": claim.state,
            "run": claim.run,
            "started": claim.started,
            "ended": claim.ended,
        }
        for claim in claims
    ]
    show_rows(_CLAIMS, rows, as_json=as_json)


def _read_fleet(url: str | None, appname: str, read: Callable[[FleetStatus], Awaitable[T]]) -> T:
    """Read from the status of a fleet whose nodes share tasks.

    Raises:
        NotFound: no fleet of this name has ever shared tasks.
    """
    from jobsync.status.jobs import read_fleet_status

    async def run(store: Store, components: Components) -> T:
        return await read(await read_fleet_status(store, components, appname))

    return run_on_store(url, run)
