"""`jobsync tokens`, `pins` and `jobs`: nodes that share tasks, seen from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from jobsync.cli.options import (
    app_option,
    ask,
    date_option,
    json_option,
    url_option,
)
from jobsync.cli.render import Column, Table, ago, moment, show_rows, show_tables

if TYPE_CHECKING:
    import datetime as dt

    from jobsync.components import Components
    from jobsync.jobs.foreign_claims import Claim
    from jobsync.status.jobs import FleetStatus
    from jobsync.stores.contract import Store

__all__ = ["jobs", "pins", "tokens"]

T = TypeVar("T")

_NODES = ("node", "state", "leads", "tokens", Column("heard", ago), "host", "pid")
_CLAIMS = ("task_id", "token", "node", "state", "run", Column("started", moment))


@click.command()
@url_option
@app_option
@json_option
def tokens(url: str | None, app: str, *, as_json: bool) -> None:
    """Show the nodes of a fleet, and how many tokens each one has."""

    async def look(fleet: FleetStatus) -> FleetStatus:
        return fleet

    fleet = _ask_fleet(url, app, look)
    nodes = [msgspec.structs.asdict(node) for node in fleet.nodes()]
    shares = [
        {"assignment": fleet.number, **msgspec.structs.asdict(share)} for share in fleet.shares()
    ]
    columns = ("assignment", "node", "tokens", "incoming", "outgoing", "pinned")
    tables = {"nodes": Table(_NODES, nodes), "shares": Table(columns, shares)}
    show_tables(tables, as_json=as_json)


@click.command()
@url_option
@app_option
@json_option
def pins(url: str | None, app: str, *, as_json: bool) -> None:
    """Show the pins of a fleet: which task must run where, and whether anybody matches."""
    columns = (
        "task_id",
        "token",
        "patterns",
        Column("in_force", lambda pattern: str(pattern or "nobody matches")),
        "reason",
        "created_by",
        Column("expires", moment),
    )
    found = _ask_fleet(url, app, lambda fleet: fleet.pins())
    show_rows(columns, [msgspec.structs.asdict(pin) for pin in found], as_json=as_json)


@click.group()
def jobs() -> None:
    """Show what a fleet has done on a date, and what it has not finished."""


@jobs.command()
@url_option
@app_option
@date_option
@json_option
def audits(url: str | None, app: str, day: dt.date, *, as_json: bool) -> None:
    """Show the tasks that are done."""
    found = _ask_fleet(url, app, lambda fleet: fleet.claims(day))
    _show_claims([claim for claim in found if claim.state == "done"], as_json=as_json)


@jobs.command()
@url_option
@app_option
@date_option
@json_option
def incomplete(url: str | None, app: str, day: dt.date, *, as_json: bool) -> None:
    """Show the tasks that were begun and are not done: running, failed or abandoned."""
    found = _ask_fleet(url, app, lambda fleet: fleet.claims(day))
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
    show_rows((*_CLAIMS, Column("ended", moment)), rows, as_json=as_json)


def _ask_fleet(url: str | None, app: str, question: Callable[[FleetStatus], Awaitable[T]]) -> T:
    """Put a question about nodes that share tasks.

    Raises:
        NotFound: nobody has ever shared tasks under this name.
    """
    from jobsync.status.jobs import read_fleet_status

    async def put(store: Store, components: Components) -> T:
        return await question(await read_fleet_status(store, components, app))

    return ask(url, put)
