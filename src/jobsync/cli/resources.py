"""`jobsync resources`: lists resources and shows their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from jobsync.cli.options import (
    SuggestingGroup,
    json_option,
    limit_option,
    option,
    run_on_database,
    run_on_store,
    url_option,
)
from jobsync.cli.render import Column, format_time, show_rows
from jobsync.errors import Invalid, NotFound

if TYPE_CHECKING:
    from jobsync.core.codec import Json
    from jobsync.database.database import Database
    from jobsync.status.resources import ResourceStatus

__all__ = ["resources"]


@click.group(cls=SuggestingGroup)
def resources() -> None:
    """Show resources and their records."""


@resources.command("list")
@url_option
@json_option
def list_(url: str | None, *, as_json: bool) -> None:
    """Show the resources, their fields, and the partitions by which records are found.

    A partition that was added to existing records is shown with its progress until it is ready.
    """
    from jobsync.status.resources import read_resources_status

    found = run_on_store(url, read_resources_status)
    columns = (
        "name",
        "strict",
        Column("attributes", long=True),
        Column("partitions", _format_partitions, long=True),
    )
    show_rows(columns, [_summarise(resource) for resource in found], as_json=as_json)


@resources.command()
@click.argument("resource")
@click.argument("id")
@url_option
@json_option
def get(url: str | None, resource: str, id: str, *, as_json: bool) -> None:
    """Show the record of RESOURCE with this ID."""

    async def read(database: Database) -> dict[str, Json]:
        found = await database.resource(resource).get(id)
        if found is None:
            raise NotFound(f"record of {resource}", id)
        return dict(found)

    record = run_on_database(url, read)
    rows = [{"field": name, "value": value} for name, value in record.items()]
    show_rows(["field", "value"], [record] if as_json else rows, as_json=as_json)


@resources.command()
@click.argument("resource")
@option(
    "--where",
    default="{}",
    envvar="JOBSYNC_WHERE",
    help='A filter as JSON: {"age": {"$gt": 30}}',
)
@limit_option
@url_option
@json_option
def query(url: str | None, resource: str, where: str, limit: int, *, as_json: bool) -> None:
    """Show records of RESOURCE."""
    condition = _parse_filter(where)

    async def read(database: Database) -> list[dict[str, Json]]:
        found = await database.resource(resource).query(condition, limit=limit)
        return [dict(record) for record in found]

    rows = run_on_database(url, read)
    names = list(dict.fromkeys(name for row in rows for name in row))
    show_rows(
        [_build_column(name) for name in names],
        [dict.fromkeys(names) | row for row in rows],
        as_json=as_json,
    )


def _summarise(resource: ResourceStatus) -> dict[str, object]:
    from jobsync.core.attributes import render

    schema = resource.definition.schema
    return {
        "name": resource.definition.name,
        "strict": schema.strict,
        "attributes": render(schema.fields),
        "partitions": {
            index.rule.name: {
                "fields": {field.name: field.type for field in index.rule.fields},
                "is_ready": index.state.is_ready,
                "progress": index.progress,
            }
            for index in resource.partitions
        },
    }


def _format_partitions(found: object) -> str:
    """Return partitions as `by_region (region), by_day (placed): building, 500 records done`."""
    if not isinstance(found, dict):
        return "-"
    texts = [
        f"{name} ({', '.join(partition['fields'])})"
        + ("" if partition["is_ready"] else f": building, {partition['progress']}")
        for name, partition in found.items()
    ]
    return ", ".join(texts) or "-"


def _build_column(name: str) -> Column:
    """Return the column of a field; fields that the library adds to records are spare."""
    from jobsync.database.document import CREATED, UPDATED, VERSION

    if name in {CREATED, UPDATED}:
        return Column(name, format_time, spare=True)
    return Column(name, spare=name == VERSION)


def _parse_filter(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        fix = 'pass JSON such as {"age": 30}'
        raise Invalid("--where", text, f"is not a filter: {error}", fix) from None
