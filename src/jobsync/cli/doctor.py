"""`jobsync doctor`: checks that a store opens, can be written, and keeps the store contract."""

from __future__ import annotations

import sys
from itertools import zip_longest
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import (
    UNHEALTHY,
    chosen_app,
    describe_target,
    find_missing_file,
    json_option,
    option,
    url_argument,
)
from jobsync.cli.render import Column, paint, show_rows
from jobsync.errors import Invalid, JobsyncError, Misconfigured, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobsync.components import Components
    from jobsync.core.codec import Json
    from jobsync.core.urls import StoreUrl
    from jobsync.stores.contract import Store
    from jobsync.stores.probe import Finding, ProbeVerdict

__all__ = ["doctor"]

_OPENED = "the store can be opened"
_CLOCKS = "clocks agree"
_CLOCK = "clock/"
"""Where a record is written to learn the time of a store that has no clock."""


@click.command()
@url_argument
@option(
    "--config",
    "is_config",
    is_flag=True,
    envvar="JOBSYNC_CONFIG",
    help="Print each setting, its value and where it comes from, and open no store.",
)
@json_option
def doctor(url: str | None, *, is_config: bool, as_json: bool) -> None:
    """Check that the store at URL provides everything that jobsync needs.

    Writes under keys of its own and removes them afterwards; creates no SQLite file. If the store
    passes, the verdict of an earlier probe that is stored there is renewed. Exits with 0 if every
    check passes and with 3 otherwise.
    """
    if is_config:
        columns = ("setting", Column("value", long=True), "origin", "variable")
        show_rows(columns, _list_settings(url), as_json=as_json)
        return
    import asyncio

    parsed, origin = describe_target(url)
    findings = asyncio.run(_examine(parsed))
    ok = all(finding.ok for finding in findings)
    if not as_json and sys.stdout.isatty():
        click.echo(f"{parsed} ({origin})\n")
        _show(findings)
    else:
        rows = [msgspec.to_builtins(finding) for finding in findings]
        show_rows(["check", "ok", "detail", "fix"], rows, as_json=as_json)
    raise SystemExit(0 if ok else UNHEALTHY)


def _list_settings(url: str | None) -> list[dict[str, object]]:
    """Return every setting that the environment and files can set, with its origin.

    Raises:
        Invalid, Misconfigured: one of them is wrong.
    """
    import os
    from importlib import import_module
    from pathlib import Path

    from jobsync.setting_fields import fields, show_field
    from jobsync.settings import Sources, StoreSettings, name_variable, resolve, sections

    for package in ("cache.plugin", "coordination", "queue", "scheduler", "ttl"):
        # Registers its settings.
        name = package if "." in package else f"{package}.settings"
        import_module(f"jobsync.{name}")
    sources = Sources.load(os.environ, Path.cwd())
    source = _find_source()
    given = {"url": url} if source and url is not None else {}
    rows: list[dict[str, object]] = []
    for section, kinds in sorted(sections().items()):
        for kind in kinds:
            found = resolve(kind, given if kind is StoreSettings else {}, sources, section=section)
            rows += [
                {
                    "setting": ".".join(filter(None, (section, field.name))),
                    "value": show_field(field, getattr(found.value, field.name)),
                    "origin": source if field.name in given else str(found.origin(field.name)),
                    "variable": name_variable(section, field.name),
                }
                for field in fields(kind)
            ]
    return rows


def _find_source() -> str:
    """Return what on the command line has named the store; nothing if the settings have."""
    context = click.get_current_context()
    if context.get_parameter_source("url") is click.core.ParameterSource.COMMANDLINE:
        return "command line"
    app = chosen_app()
    return f"code of {app}" if app else ""


async def _examine(url: StoreUrl) -> list[Finding]:
    from jobsync.components import Components
    from jobsync.stores.opening import open_unjudged
    from jobsync.stores.probe import Finding, probe, renew_verdict

    if missing := find_missing_file(url):
        fix = "correct the path, or start a worker or a program, which creates the file"
        return [Finding(_OPENED, ok=False, detail=f"there is no file {missing}", fix=fix)]
    components = Components.system()
    try:
        store = await open_unjudged(url, components)
    except JobsyncError as error:
        return [_failure(_OPENED, error)]
    opened = Finding(_OPENED, ok=True, detail=store.name)
    try:
        findings = await probe(store, components)
        if await store.now() is None:
            clocks = await _compare_clocks(store, components)
            findings = [clocks if each.check == clocks.check else each for each in findings]
        if all(finding.ok for finding in findings):
            findings += _compare_verdict(await renew_verdict(store, findings, components), store)
    except JobsyncError as error:
        return [opened, _failure("the store can be written", error)]
    finally:
        await store.close()
    if not all(finding.ok for finding in findings):
        # What the store is good for besides is no comfort.
        return [opened, *findings]
    return [opened, *findings, *_describe_traits(store.traits), _describe_queues(store)]


async def _compare_clocks(store: Store, components: Components) -> Finding:
    """Compare this machine's clock with that of an object store, whose workers must agree.

    Raises:
        Unavailable: the store does not answer.
    """
    from jobsync.coordination.clock_skew import measure_time
    from jobsync.coordination.fleet_clock import MAX_SKEW
    from jobsync.stores.probe import Finding

    theirs = await measure_time(store, _CLOCK, components)
    skew = components.clock.wall().seconds - theirs
    direction = "ahead" if skew > 0 else "behind"
    detail = f"this machine is {abs(skew):.0f} s {direction}"
    if abs(skew) <= MAX_SKEW:
        return Finding(_CLOCKS, ok=True, detail=detail)
    detail += ": it fires no schedules, claims no delayed messages and removes no expired records"
    return Finding(_CLOCKS, ok=False, detail=detail, fix="synchronise its clock, such as by NTP")


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
            return Finding(check, ok=False, detail=f"{error.field} {error.problem}", fix=error.fix)
        case Unavailable():
            return Finding(check, ok=False, detail=error.reason, fix=error.fix)
        case _:
            return Finding(check, ok=False, detail=str(error))


def _show(findings: list[Finding]) -> None:
    for finding, following in zip_longest(findings, findings[1:]):
        mark = paint("pass", fg="green") if finding.ok else paint("FAIL", fg="red")
        click.echo(f"  {mark}  {finding.check}" + (f": {finding.detail}" if finding.detail else ""))
        # One fix for several failures is shown below the last of them.
        if finding.fix and (following is None or following.fix != finding.fix):
            click.echo(f"        fix: {finding.fix}")
    failed = {finding.check for finding in findings if not finding.ok}
    if failed == {_CLOCKS}:
        click.echo("\njobsync can use this store, but not with the clock of this machine")
    else:
        broken = "jobsync cannot use this store as it is"
        click.echo(f"\n{broken if failed else 'all checks passed'}")
