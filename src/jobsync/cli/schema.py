"""`jobsync schema`: what an administrator must prepare, and the least rights that do."""

import click
import msgspec

from jobsync.core.urls import MemoryUrl, ObjectsUrl, PostgresUrl, SqliteUrl
from jobsync.errors import Misconfigured
from jobsync.stores.opening import read_url, require
from jobsync.stores.sql.schema import SQLITE_STEPS

__all__ = ["schema"]


@click.command()
@click.argument("url", required=False, envvar="JOBSYNC_URL")
def schema(url: str | None) -> None:
    """Print the tables and the least-privilege role, or the policy, for the store at URL.

    Nothing is changed. With this in place jobsync needs no right to create anything.
    """
    match read_url(url):
        case PostgresUrl() as found:
            require("postgresql", "psycopg", "postgres")
            from jobsync.stores.postgrestables import schema_sql  # noqa: PLC0415 - an extra

            click.echo(schema_sql(found))
        case ObjectsUrl() as found:
            click.echo(msgspec.json.format(msgspec.json.encode(_policy(found)), indent=2).decode())
        case SqliteUrl():
            click.echo("\n".join(f"{text.strip()};" for step in SQLITE_STEPS for text in step))
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
