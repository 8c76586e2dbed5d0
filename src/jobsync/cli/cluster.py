"""`jobsync cluster`: who is there, and who leads what."""

import click
import msgspec

from jobsync.cli.options import ask, json_option, now, url_option
from jobsync.cli.render import Column, Table, ages, ago, moment, show_tables

__all__ = ["cluster"]

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
    Column("since", moment, spare=True),
    Column("until", moment, spare=True),
)


@click.command()
@url_option
@json_option
def cluster(url: str | None, *, as_json: bool) -> None:
    """Show the workers that live or died lately, who leads each kind of work, and who did."""
    from jobsync.status.sessions import read_cluster_status

    seen = ask(url, read_cluster_status)
    members = [
        {
            "worker_id": session.worker_id,
            "state": session.state,
            "heard": session.heard,
            "host": session.facts.get("host"),
            "pid": session.facts.get("pid"),
            "version": session.facts.get("version"),
            "leads": session.leads,
            "works": session.works,
        }
        for session in seen.sessions
    ]
    roles = [msgspec.structs.asdict(role) for role in seen.roles]
    terms = [
        {"work": f"{role.namespace}/{role.work}", **msgspec.structs.asdict(term)}
        for role in seen.roles
        for term in role.past
    ]
    for role in roles:
        # They have a table of their own.
        del role["past"]
    ended = ages(now())
    times = (Column("ended", ended), Column("since", moment, spare=True))
    tables = {
        "members": Table(_MEMBERS, members),
        "roles": Table(_ROLES, roles),
        "terms": Table(("work", "epoch", "worker", "why", *times), terms),
    }
    show_tables(tables, as_json=as_json)
