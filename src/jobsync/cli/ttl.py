"""`jobsync ttl`: shows which records expire and when, and deals with expired ones now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from jobsync.cli.options import (
    FAILED,
    SuggestingGroup,
    json_option,
    limit_option,
    run_on_database,
    run_on_store,
    url_option,
)
from jobsync.cli.render import Column, Table, format_ages, format_time, show_rows, show_tables
from jobsync.errors import Invalid, Unavailable

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.database.database import Database
    from jobsync.status.ttl import ExpiringRecord, ExpiryStatus, TTLStatus
    from jobsync.stores.contract import Store

__all__ = ["sweep_resources", "ttl"]

T = TypeVar("T")

_RECORDS = ("resource", Column("expires_at", format_time), "id")
_BATCH = 500
_CLOCK = "clock/"
"""Where a record is written to learn the time of a store that has no clock."""
_NEEDS_CALLBACK = "a callback decides"


class _ListingGroup(SuggestingGroup):
    """A group whose command is `list` if none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments, of `list` if they begin with an option that is not --help."""
        is_own = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_own else ["list", *args])


@click.group(cls=_ListingGroup)
def ttl() -> None:
    """Show which records expire and when; remove expired ones now.

    Without a command, `list`. RESOURCE is the name of a resource; without it, all whose records
    expire.
    """


@ttl.command("list")
@url_option
@json_option
def list_(url: str | None, *, as_json: bool) -> None:
    """Show the resources whose records expire: by what rule, how many are due, and the next one.

    Counts up to 1,000 that are due. A rule that was added to existing records is shown with its
    progress until it knows all of them.
    """
    found = _run_on_ttl(url, lambda status: status.resources())
    show_rows(_build_columns(found), [_summarise(each) for each in found], as_json=as_json)


@ttl.command()
@click.argument("resource", required=False)
@limit_option
@url_option
@json_option
def backlog(url: str | None, resource: str | None, limit: int, *, as_json: bool) -> None:
    """Show how many records are due and not removed yet, and those that expired first."""

    async def read(status: TTLStatus) -> tuple[list[ExpiryStatus], list[ExpiringRecord]]:
        return await status.resources(resource), await status.due(resource, limit)

    found, records = _run_on_ttl(url, read)
    tables = {
        "backlog": Table(_build_columns(found), [_summarise(each) for each in found]),
        "records": Table(_RECORDS, [msgspec.structs.asdict(each) for each in records]),
    }
    show_tables(tables, as_json=as_json)


@ttl.command("next")
@click.argument("resource", required=False)
@limit_option
@url_option
@json_option
def next_(url: str | None, resource: str | None, limit: int, *, as_json: bool) -> None:
    """Show the records that expire next."""
    records = _run_on_ttl(url, lambda status: status.next(resource, limit))
    show_rows(_RECORDS, [msgspec.structs.asdict(each) for each in records], as_json=as_json)


@ttl.command()
@click.argument("resource", required=False)
@url_option
@json_option
def run(url: str | None, resource: str | None, *, as_json: bool) -> None:
    """Delete, mark or archive what has expired, now and in this process.

    By the rules that are stored with the resources. Where a callback decides, nothing is done: only
    the processes of the fleet have it. Exits with 1 if a record could not be handled.
    """

    async def sweep(database: Database) -> list[dict[str, object]]:
        return await sweep_resources(database, resource)

    rows = run_on_database(url, sweep)
    columns = (
        "resource",
        "deleted",
        "soft_deleted",
        "archived",
        "errors",
        Column("note", spare=True),
    )
    show_rows(columns, rows, as_json=as_json)
    if any(row["errors"] for row in rows):
        raise SystemExit(FAILED)


async def sweep_resources(database: Database, chosen: str | None) -> list[dict[str, object]]:
    """Deal with what has expired in one resource, or in all; return what was done.

    Raises:
        Invalid: a callback would have to be asked.
        NotFound: there is no such resource.
        Unavailable: the time is not known.
    """
    from jobsync.status.ttl import read_ttl_status

    store, components = database.store, database.components
    found = await (await read_ttl_status(store, components)).resources(chosen)
    if chosen is not None and found[0].rule.on_expire == "callback":
        fix = "call cleanup_resource of its TTLPlugin in a process that has the callback"
        raise Invalid("RESOURCE", chosen, f"cannot be cleaned here: {_NEEDS_CALLBACK}", fix)
    get_now = await _measure_clock(store, components)
    return [await _sweep_one(database, status, get_now) for status in found]


async def _sweep_one(
    database: Database, status: ExpiryStatus, get_now: Callable[[], float]
) -> dict[str, object]:
    """Deal with the expired records of one resource; return what was done."""
    from jobsync.ttl.sweep import ResourceSweep, SweepCounts, SweepListener

    def on_error(record_id: str | None, problem: str) -> None:
        place = status.resource if record_id is None else f"{status.resource} {record_id!r}"
        click.echo(f"jobsync: {place}: {problem}", err=True)

    counts = SweepCounts()
    is_skipped = status.rule.on_expire == "callback"
    if not is_skipped:
        resource = database.resource(status.resource)
        listener = SweepListener(on_expired=lambda *_: None, on_error=on_error)
        await ResourceSweep(resource, None, get_now, _BATCH, listener, counts).run()
    return {
        "resource": status.resource,
        **msgspec.structs.asdict(counts),
        "note": f"skipped: {_NEEDS_CALLBACK}" if is_skipped else None,
    }


async def _measure_clock(store: Store, components: Components) -> Callable[[], float]:
    """Return a function that returns the store's time.

    Raises:
        Unavailable: the store has no clock, and this machine's is wrong.
    """
    from jobsync.coordination.clock_skew import measure_time
    from jobsync.coordination.fleet_clock import MAX_SKEW

    clock = components.clock
    has_clock = await store.now() is not None
    offset = await measure_time(store, _CLOCK, components) - clock.mono().seconds
    skew = clock.wall().seconds - clock.mono().seconds - offset
    if not has_clock and abs(skew) > MAX_SKEW:
        direction = "ahead of" if skew > 0 else "behind"
        problem = f"this machine's clock is {abs(skew):.0f} s {direction} the object store's"
        raise Unavailable("the time", problem, "correct the clock, then run it again")
    return lambda: clock.mono().seconds + offset


def _run_on_ttl(url: str | None, work: Callable[[TTLStatus], Awaitable[T]]) -> T:
    """Run a coroutine function on the expiries of a store."""
    from jobsync.status.ttl import read_ttl_status

    async def run(store: Store, components: Components) -> T:
        return await work(await read_ttl_status(store, components))

    return run_on_store(url, run)


def _build_columns(found: list[ExpiryStatus]) -> tuple[Column | str, ...]:
    # By the clock that decides what is due.
    age = format_ages(found[0].seen if found else 0.0)
    return (
        "resource",
        Column("due", _format_due),
        Column("oldest_due", age),
        Column("next_expiry", age),
        Column("rule", long=True),
        "progress",
    )


def _summarise(status: ExpiryStatus) -> dict[str, object]:
    from jobsync.status.ttl import describe_rule

    return {
        "resource": status.resource,
        "due": status.backlog,
        "is_counted": status.is_counted,
        "oldest_due": status.oldest_due,
        "next_expiry": status.next_expiry,
        "rule": describe_rule(status.rule),
        "on_expire": status.rule.on_expire,
        "is_ready": status.index.state.is_ready,
        "progress": status.index.progress,
    }


def _format_due(count: object) -> str:
    from jobsync.status.ttl import MAX_COUNTED

    return f"{count:,}{'+' if count >= MAX_COUNTED else ''}" if isinstance(count, int) else "-"
