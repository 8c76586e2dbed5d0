"""`jobsync resources`: which resources there are, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from jobsync.cli.options import ask_database, json_option, limit_option, url_option
from jobsync.cli.render import Column, moment, show_rows
from jobsync.errors import Invalid, NotFound

if TYPE_CHECKING:
    from jobsync.core.codec import Json
    from jobsync.database.database import Database

__all__ = ["resources"]


@click.group()
def resources() -> None:
    """Show resources and their records."""


@resources.command("list")
@url_option
@json_option
def list_(url: str | None, *, as_json: bool) -> None:
    """Show the resources, with their fields."""
    from jobsync.core.attributes import render

    async def look(database: Database) -> list[dict[str, object]]:
        names = await database.list_resources()
        schemas = {name: database.resource(name).schema for name in names}
        return [
            {"name": name, "strict": schema.strict, "attributes": render(schema.fields)}
            for name, schema in schemas.items()
        ]

    show_rows(["name", "strict", "attributes"], ask_database(url, look), as_json=as_json)


@resources.command()
@click.argument("resource")
@click.argument("id")
@url_option
@json_option
def get(url: str | None, resource: str, id: str, *, as_json: bool) -> None:
    """Show one record of RESOURCE, by its ID."""

    async def look(database: Database) -> dict[str, Json]:
        found = await database.resource(resource).get(id)
        if found is None:
            raise NotFound(f"record of {resource}", id)
        return dict(found)

    record = ask_database(url, look)
    rows = [{"field": name, "value": value} for name, value in record.items()]
    show_rows(["field", "value"], [record] if as_json else rows, as_json=as_json)


@resources.command()
@click.argument("resource")
@click.option(
    "--where",
    default="{}",
    envvar="JOBSYNC_WHERE",
    show_envvar=True,
    help='A filter, as JSON: {"age": {"$gt": 30}}',
)
@limit_option
@url_option
@json_option
def query(url: str | None, resource: str, where: str, limit: int, *, as_json: bool) -> None:
    """Show records of RESOURCE."""
    condition = _read_filter(where)

    async def look(database: Database) -> list[dict[str, Json]]:
        found = await database.resource(resource).query(condition, limit=limit)
        return [dict(record) for record in found]

    rows = ask_database(url, look)
    names = list(dict.fromkeys(name for row in rows for name in row))
    show_rows(
        [_choose_column(name) for name in names],
        [dict.fromkeys(names) | row for row in rows],
        as_json=as_json,
    )


def _choose_column(name: str) -> Column:
    """Give a field's column; what the library adds to records is spare."""
    from jobsync.database.document import CREATED, UPDATED, VERSION

    if name in {CREATED, UPDATED}:
        return Column(name, moment, spare=True)
    return Column(name, spare=name == VERSION)


def _read_filter(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Invalid(
            "--where", text, f"is no filter ({error})", 'give JSON: {"age": 30}'
        ) from None
