"""`jobsync ttl`: shows which records expire and when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from jobsync.cli.options import json_option, limit_option, run_on_store, url_option
from jobsync.cli.render import Column, Table, format_ages, format_time, show_rows, show_tables

if TYPE_CHECKING:
    from jobsync.components import Components
    from jobsync.status.ttl import ExpiringRecord, ExpiryStatus, TTLStatus
    from jobsync.stores.contract import Store

__all__ = ["ttl"]

T = TypeVar("T")

_RECORDS = ("resource", Column("expires_at", format_time), "id")


class _ListingGroup(click.Group):
    """A group whose command is `list` if none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments, of `list` if they begin with an option that is not --help."""
        is_own = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_own else ["list", *args])


@click.group(cls=_ListingGroup)
def ttl() -> None:
    """Show which records expire and when.

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
