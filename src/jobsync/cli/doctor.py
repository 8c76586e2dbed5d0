"""`jobsync doctor`: checks that a store opens, can be written, and keeps the store contract."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import UNHEALTHY, json_option, url_argument
from jobsync.cli.render import paint, show_rows
from jobsync.errors import Invalid, JobsyncError, Misconfigured, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobsync.core.codec import Json
    from jobsync.core.urls import StoreUrl
    from jobsync.stores.contract import Store
    from jobsync.stores.probe import Finding, ProbeVerdict

__all__ = ["doctor"]


@click.command()
@url_argument
@json_option
def doctor(url: str | None, *, as_json: bool) -> None:
    """Check that the store at URL provides everything that jobsync needs.

    Writes under keys of its own and removes them afterwards. If the store passes, the verdict of
    an earlier probe that is stored there is renewed. Exits with 0 if every check passes and with 3
    otherwise.
    """
    import asyncio

    from jobsync.stores.opening import read_url

    parsed = read_url(url)
    findings = asyncio.run(_examine(parsed))
    ok = all(finding.ok for finding in findings)
    if not as_json and sys.stdout.isatty():
        _show(parsed, findings, ok=ok)
    else:
        rows = [msgspec.to_builtins(finding) for finding in findings]
        show_rows(["check", "ok", "detail", "fix"], rows, as_json=as_json)
    raise SystemExit(0 if ok else UNHEALTHY)


async def _examine(url: StoreUrl) -> list[Finding]:
    from jobsync.components import Components
    from jobsync.stores.opening import open_unjudged
    from jobsync.stores.probe import Finding, probe, renew_verdict

    components = Components.system()
    try:
        store = await open_unjudged(url, components)
    except JobsyncError as error:
        return [_failure("the store can be opened", error)]
    opened = Finding("the store can be opened", ok=True, detail=store.name)
    try:
        findings = await probe(store, components)
        if all(finding.ok for finding in findings):
            findings += _compare_verdict(await renew_verdict(store, findings, components), store)
    except JobsyncError as error:
        return [opened, _failure("the store can be written", error)]
    finally:
        await store.close()
    return [opened, *findings, *_describe_traits(store.traits), _describe_queues(store)]


def _compare_verdict(replaced: ProbeVerdict | None, store: Store) -> list[Finding]:
    """Return what the stored verdict, which has been replaced, said about the server's traits."""
    from jobsync.stores.probe import Finding

    if replaced is None or replaced.traits == store.traits:
        return []
    detail = "it had other traits of this server, and was corrected"
    fix = "restart the workers, which use the traits that they found when they connected"
    return [Finding("the stored verdict", ok=True, detail=detail, fix=fix)]


def _describe_traits(traits: Mapping[str, Json]) -> list[Finding]:
    """Return the properties of a server that are worth knowing and no reason to fail."""
    from jobsync.stores.probe import Finding

    found = []
    if traits.get("bare_etags"):
        found.append(Finding("ETags", ok=True, detail="this server compares ETags without quotes"))
    if traits.get("conditional_delete") is False:
        detail = (
            "this server ignores conditions on DELETE, so that tombstones remain and use storage"
        )
        found.append(Finding("burial", ok=True, detail=detail))
    return found


def _describe_queues(store: Store) -> Finding:
    """Return how queues are stored there: every store that passes the checks has them."""
    from jobsync.stores.probe import Finding

    way = (
        "yes" if store.sql is not None else "yes, in pages: what they cost is in the documentation"
    )
    return Finding("queues", ok=True, detail=way)


def _failure(check: str, error: JobsyncError) -> Finding:
    from jobsync.stores.probe import Finding

    match error:
        case Invalid() | Misconfigured():
            return Finding(check, ok=False, detail=error.problem, fix=error.fix)
        case Unavailable():
            return Finding(check, ok=False, detail=error.reason, fix=error.fix)
        case _:
            return Finding(check, ok=False, detail=str(error))


def _show(url: StoreUrl, findings: list[Finding], *, ok: bool) -> None:
    click.echo(f"{url}\n")
    for finding in findings:
        mark = paint("pass", fg="green") if finding.ok else paint("FAIL", fg="red")
        click.echo(f"  {mark}  {finding.check}" + (f": {finding.detail}" if finding.detail else ""))
        if finding.fix:
            click.echo(f"        fix: {finding.fix}")
    click.echo("\nall checks passed" if ok else "\njobsync cannot use this store as it is")
