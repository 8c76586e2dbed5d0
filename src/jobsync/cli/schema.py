"""`jobsync schema`: what an administrator must prepare, and the least rights that do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import app_option, json_option
from jobsync.cli.render import show_rows
from jobsync.errors import Misconfigured

if TYPE_CHECKING:
    from jobsync.core.urls import ObjectsUrl, StoreUrl
    from jobsync.jobs.job_keys import JobKeys

__all__ = ["schema"]

_ROLE = "jobsync_writer"
"""Which the tables' own script makes."""


@click.command()
@click.argument("url", required=False, envvar="JOBSYNC_URL")
@app_option
@json_option
def schema(url: str | None, app: str, *, as_json: bool) -> None:
    """Print the tables and the least-privilege role, or the policy, for the store at URL.

    With the views of one fleet. Nothing is changed. With this in place jobsync
    needs no right to create anything.
    """
    from jobsync.jobs.config import CoordinationConfig
    from jobsync.jobs.job_keys import JobKeys
    from jobsync.stores.opening import read_url

    text = _write(read_url(url), JobKeys(CoordinationConfig(appname=app).appname))
    if as_json:
        show_rows(["schema"], [{"schema": text}], as_json=True)
    else:
        click.echo(text)


def _write(url: StoreUrl, places: JobKeys) -> str:
    from jobsync.core.urls import MemoryUrl, ObjectsUrl, PostgresUrl, SqliteUrl
    from jobsync.jobs.sql_views import postgres_views_sql, sqlite_views_sql
    from jobsync.stores.opening import require
    from jobsync.stores.sqlite.file import SQLITE_STEPS

    match url:
        case PostgresUrl():
            require("postgresql", "psycopg", "postgres")
            from jobsync.stores.postgres.schema import schema_sql

            views = postgres_views_sql(url.schema or "public", places, _ROLE)
            return f"{schema_sql(url)}\nBEGIN;\n{views}COMMIT;"
        case ObjectsUrl():
            return msgspec.json.format(msgspec.json.encode(_policy(url)), indent=2).decode()
        case SqliteUrl():
            tables = "\n".join(f"{text.strip()};" for step in SQLITE_STEPS for text in step)
            return f"{tables}\n{sqlite_views_sql(places)}"
        case MemoryUrl():
            raise Misconfigured("url", str(url), "has no schema", "nothing is to be prepared")


def _policy(url: ObjectsUrl) -> dict[str, object]:
    """Give an IAM policy that allows what jobsync does, on its own part of the bucket."""
    if url.provider != "s3":
        raise Misconfigured(
            "url", str(url), "has no IAM policy", "allow reading, writing, listing and deleting"
        )
    bucket = f"arn:aws:s3:::{url.bucket}"
    below = f"{url.prefix}/*" if url.prefix else "*"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": [bucket],
                "Condition": {"StringLike": {"s3:prefix": [below]}},
            },
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
                "Resource": [f"{bucket}/{below}"],
            },
        ],
    }
