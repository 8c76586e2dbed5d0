"""`jobsync schema`: prints the tables or the policy that a store needs, or checks its tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import UNHEALTHY, appname_option, json_option, option, url_argument
from jobsync.cli.render import show_facts, show_rows
from jobsync.errors import Misconfigured

if TYPE_CHECKING:
    from jobsync.core.urls import ObjectsUrl, StoreUrl
    from jobsync.jobs.job_keys import JobKeys

__all__ = ["schema"]

_ROLE = "jobsync_writer"
"""The role that the script of the tables creates."""


@click.command()
@url_argument
@appname_option
@option(
    "--check",
    "is_check",
    is_flag=True,
    envvar="JOBSYNC_CHECK",
    help="Compare the version of the tables that are there with the one that this code needs.",
)
@option(
    "--tables-only",
    is_flag=True,
    envvar="JOBSYNC_TABLES_ONLY",
    help="Leave out the views of a fleet.",
)
@json_option
def schema(
    url: str | None, appname: str, *, is_check: bool, tables_only: bool, as_json: bool
) -> None:
    """Print the tables and the least-privilege role, or the IAM policy, for the store at URL.

    Includes the views of one fleet. Changes nothing. Once an administrator has applied it, jobsync
    needs no right to create anything.

    With --check, nothing is printed but what the store has. Exits with 3 if it lacks something.
    """
    from jobsync.jobs.coordination_config import CoordinationConfig
    from jobsync.jobs.job_keys import JobKeys
    from jobsync.stores.opening import read_url

    store_url = read_url(url)
    if is_check:
        _check(store_url, as_json=as_json)
    keys = None if tables_only else JobKeys(CoordinationConfig(appname=appname).appname)
    text = _build_schema(store_url, keys)
    if as_json:
        show_rows(["schema"], [{"schema": text}], as_json=True)
    else:
        click.echo(text)


def _check(url: StoreUrl, *, as_json: bool) -> None:
    """Print the version of the tables, and end the command."""
    found, needed, fix = _compare_versions(url)
    if found == needed:
        state, fix = "current", ""
    elif found > needed:
        state, fix = "newer", "nothing to do: newer code has added to them"
    else:
        state = "outdated" if found else "missing"
    row = {"tables": state, "version": found, "needed": needed, "fix": fix}
    if as_json or not sys.stdout.isatty():
        show_rows(list(row), [row], as_json=as_json)
    else:
        facts = [("version", str(found)), ("needed", str(needed))]
        show_facts(f"{url}: the tables are {state}", [*facts, *([("fix", fix)] if fix else [])])
    raise SystemExit(UNHEALTHY if found < needed else 0)


def _compare_versions(url: StoreUrl) -> tuple[int, int, str]:
    """Return the version of the tables that are there, that of this code, and what creates them.

    The first is 0 if there are none.
    """
    from jobsync.core.urls import PostgresUrl, SqliteUrl
    from jobsync.stores.opening import require
    from jobsync.stores.sqlite.file import SQLITE_STEPS, read_tables_version

    match url:
        case PostgresUrl():
            require("postgresql", "psycopg", "postgres")
            from jobsync.stores.postgres import schema as postgres

            place, found = postgres.read_tables_version(url)
            fix = f"{postgres.find_fix(url, place)}, or start a worker"
            return found, len(postgres.POSTGRES_STEPS), fix
        case SqliteUrl():
            return (
                read_tables_version(url.path),
                len(SQLITE_STEPS),
                "start a worker: it creates them",
            )
    raise Misconfigured("url", str(url), "has no tables", "run `jobsync doctor` to check it")


def _build_schema(url: StoreUrl, keys: JobKeys | None) -> str:
    from jobsync.core.urls import MemoryUrl, ObjectsUrl, PostgresUrl, SqliteUrl
    from jobsync.jobs.sql_views import postgres_views_sql, sqlite_views_sql
    from jobsync.stores.opening import require
    from jobsync.stores.sqlite.file import SQLITE_STEPS

    match url:
        case PostgresUrl():
            require("postgresql", "psycopg", "postgres")
            from jobsync.stores.postgres.schema import DEFAULT_SCHEMA, POSTGRES_STEPS, schema_sql

            schema = url.schema or DEFAULT_SCHEMA
            views = "" if keys is None else postgres_views_sql(schema, keys, _ROLE)
            head = _build_head(
                url,
                f"Creates version {len(POSTGRES_STEPS)} of its tables in the schema {schema}, and",
                f"a role, {_ROLE}, that may only read and write them.",
                "Run it as an owner of the database, or as a superuser: psql -f FILE",
                "It may be run again, also to upgrade.",
            )
            return f"{head}{schema_sql(url)}" + (f"\nBEGIN;\n{views}COMMIT;" if views else "")
        case ObjectsUrl():
            return msgspec.json.format(msgspec.json.encode(_build_policy(url)), indent=2).decode()
        case SqliteUrl():
            tables = "\n".join(f"{text.strip()};" for step in SQLITE_STEPS for text in step)
            head = _build_head(
                url,
                f"Shows version {len(SQLITE_STEPS)} of its tables, which the first process creates",
                "by itself: a file needs no administrator.",
            )
            return f"{head}{tables}\n" + ("" if keys is None else sqlite_views_sql(keys))
        case MemoryUrl():
            raise Misconfigured("url", str(url), "needs no schema", "skip this step")


def _build_head(url: StoreUrl, *lines: str) -> str:
    """Return comments that say what a script is, for who has to apply it."""
    from importlib.metadata import version

    first = f"The schema of jobsync {version('jobsync-fleet')} for {url}"
    return "".join(f"-- {line}\n" for line in (first, *lines))


def _build_policy(url: ObjectsUrl) -> dict[str, object]:
    """Return an IAM policy that allows what jobsync does, on its own part of the bucket."""
    if url.provider != "s3":
        raise Misconfigured(
            "url", str(url), "has no IAM policy", "allow reading, writing, listing and deleting"
        )
    bucket = f"arn:aws:s3:::{url.bucket}"
    pattern = f"{url.prefix}/*" if url.prefix else "*"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": [bucket],
                "Condition": {"StringLike": {"s3:prefix": [pattern]}},
            },
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
                "Resource": [f"{bucket}/{pattern}"],
            },
        ],
    }
