"""`jobsync doctor`: does this store keep the contract?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import UNHEALTHY, json_option
from jobsync.cli.render import paint, show_rows

if TYPE_CHECKING:
    from jobsync.core.urls import StoreUrl
    from jobsync.stores.probe import Finding

__all__ = ["doctor"]


@click.command()
@click.argument("url", required=False, envvar="JOBSYNC_URL")
@json_option
def doctor(url: str | None, *, as_json: bool) -> None:
    """Probe the store at URL for everything that jobsync needs of it.

    Writes under a name of its own and removes it again. Exits with 0 if all is well and
    with 3 if not.
    """
    import asyncio

    from jobsync.cli.examination import examine
    from jobsync.stores.opening import read_url

    found = read_url(url)
    findings = asyncio.run(examine(found))
    ok = all(finding.ok for finding in findings)
    if not as_json and sys.stdout.isatty():
        _show(found, findings, ok=ok)
    else:
        rows = [msgspec.to_builtins(finding) for finding in findings]
        show_rows(["check", "ok", "detail", "fix"], rows, as_json=as_json)
    raise SystemExit(0 if ok else UNHEALTHY)


def _show(url: StoreUrl, findings: list[Finding], *, ok: bool) -> None:
    click.echo(f"{url}\n")
    for finding in findings:
        mark = paint("pass", fg="green") if finding.ok else paint("FAIL", fg="red")
        click.echo(f"  {mark}  {finding.check}" + (f": {finding.detail}" if finding.detail else ""))
        if finding.fix:
            click.echo(f"        fix: {finding.fix}")
    click.echo("\nall is well" if ok else "\nthis store cannot be used as it is")
