"""`jobsync schema`: what an administrator must prepare, and the least rights that do."""

import click
import msgspec

from jobsync.cli.asking import app_option
from jobsync.core.urls import MemoryUrl, ObjectsUrl, PostgresUrl, SqliteUrl
from jobsync.errors import Misconfigured
from jobsync.jobs import sqliteviews
from jobsync.jobs.config import CoordinationConfig
from jobsync.jobs.places import Places
from jobsync.stores.opening import read_url, require
from jobsync.stores.sql.schema import SQLITE_STEPS

__all__ = ["schema"]

_ROLE = "jobsync_writer"
"""Which the tables' own script makes."""


@click.command()
@click.argument("url", required=False, envvar="JOBSYNC_URL")
@app_option
def schema(url: str | None, app: str) -> None:
    """Print the tables and the least-privilege role, or the policy, for the store at URL.

    With the views of one fleet. Nothing is changed. With this in place jobsync
    needs no right to create anything.
    """
    places = Places(CoordinationConfig(appname=app).appname)
    match read_url(url):
        case PostgresUrl() as found:
            require("postgresql", "psycopg", "postgres")
            from jobsync.jobs.postgresviews import views_sql  # noqa: PLC0415 - an extra
            from jobsync.stores.postgrestables import schema_sql  # noqa: PLC0415 - likewise

            click.echo(schema_sql(found))
            click.echo(f"BEGIN;\n{views_sql(found.schema or 'public', places, _ROLE)}COMMIT;")
        case ObjectsUrl() as found:
            click.echo(msgspec.json.format(msgspec.json.encode(_policy(found)), indent=2).decode())
        case SqliteUrl():
            click.echo("\n".join(f"{text.strip()};" for step in SQLITE_STEPS for text in step))
            click.echo(sqliteviews.views_sql(places))
        case MemoryUrl() as found:
            raise Misconfigured("url", str(found), "has no schema", "nothing is to be prepared")


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
