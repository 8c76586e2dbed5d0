"""`jobsync doctor`: does this store keep the contract?"""

import asyncio
import sys
from collections.abc import Mapping

import click
import msgspec

from jobsync.cli.asking import json_option
from jobsync.cli.render import paint, show_rows
from jobsync.components import Components
from jobsync.core.codec import Json
from jobsync.core.urls import StoreUrl
from jobsync.errors import Invalid, JobsyncError, Misconfigured, Unavailable
from jobsync.stores.opening import open_bare, read_url
from jobsync.stores.probe import Finding, probe
from jobsync.stores.settling import SettlingStore

__all__ = ["UNHEALTHY", "doctor"]

UNHEALTHY = 3
"""The exit code of a store, or a fleet, that is not well."""


@click.command()
@click.argument("url", required=False, envvar="JOBSYNC_URL")
@json_option
def doctor(url: str | None, *, as_json: bool) -> None:
    """Probe the store at URL for everything that jobsync needs of it.

    Writes under a name of its own and removes it again. Exits with 0 if all is well and
    with 3 if not.
    """
    found = read_url(url)
    findings = asyncio.run(_examine(found))
    ok = all(finding.ok for finding in findings)
    if not as_json and sys.stdout.isatty():
        _show(found, findings, ok=ok)
    else:
        rows = [msgspec.to_builtins(finding) for finding in findings]
        show_rows(["check", "ok", "detail", "fix"], rows, as_json=as_json)
    raise SystemExit(0 if ok else UNHEALTHY)


async def _examine(url: StoreUrl) -> list[Finding]:
    components = Components.system()
    try:
        store = await open_bare(url, components)
    except JobsyncError as error:
        return [_failure("the store can be opened", error)]
    opened = Finding("the store can be opened", ok=True, detail=store.name)
    try:
        findings = await probe(SettlingStore(store, components), components)
    except JobsyncError as error:
        return [opened, _failure("the store can be written", error)]
    finally:
        await store.close()
    return [opened, *findings, *_describe(store.traits)]


def _describe(traits: Mapping[str, Json]) -> list[Finding]:
    """Tell what is no fault and still worth knowing."""
    found = []
    if traits.get("bare_etags"):
        found.append(Finding("ETags", ok=True, detail="this server compares them without quotes"))
    if traits.get("conditional_delete") is False:
        detail = "this server ignores conditions on DELETE: tombstones stay and cost their storage"
        found.append(Finding("burial", ok=True, detail=detail))
    return found


def _show(url: StoreUrl, findings: list[Finding], *, ok: bool) -> None:
    click.echo(f"{url}\n")
    for finding in findings:
        mark = paint("pass", fg="green") if finding.ok else paint("FAIL", fg="red")
        click.echo(f"  {mark}  {finding.check}" + (f": {finding.detail}" if finding.detail else ""))
        if finding.fix:
            click.echo(f"        fix: {finding.fix}")
    click.echo("\nall is well" if ok else "\nthis store cannot be used as it is")


def _failure(check: str, error: JobsyncError) -> Finding:
    match error:
        case Invalid() | Misconfigured():
            return Finding(check, ok=False, detail=error.problem, fix=error.fix)
        case Unavailable():
            return Finding(check, ok=False, detail=error.reason, fix=error.fix)
        case _:
            return Finding(check, ok=False, detail=str(error))
