"""`jobsync why`: what a message or a task waits for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from jobsync.cli.options import (
    FAILED,
    app_option,
    ask,
    date_option,
    json_option,
    now,
    url_option,
)
from jobsync.cli.render import ago, moment, show_facts, show_rows

if TYPE_CHECKING:
    import datetime as dt

    from jobsync.status.why import Reason

__all__ = ["why"]


@click.command()
@click.argument("name", metavar="MESSAGE|TASK")
@url_option
@app_option
@date_option
@json_option
def why(name: str, url: str | None, app: str, day: dt.date, *, as_json: bool) -> None:
    """Say what a message, by its id, or a task waits for, or what became of it."""
    from jobsync.cli.explanation import explain, look_for

    seen = ask(url, lambda store, components: look_for(store, components, name, app, day))
    reason, details = explain(seen)
    row = {"name": name, "code": reason.code, "reason": reason.text, **_times(reason)}
    if as_json or not sys.stdout.isatty():
        facts: dict[str, object] = {} if seen is None else msgspec.to_builtins(seen)
        show_rows(list(row), [{**row, **facts} if as_json else row], as_json=as_json)
    else:
        show_facts(f"{name}: {reason.text}", [*_date(reason), *details])
    raise SystemExit(FAILED if seen is None else 0)


def _times(reason: Reason) -> dict[str, float | None]:
    return {"since": reason.since, "until": reason.until}


def _date(reason: Reason) -> list[tuple[str, str]]:
    times = {name: at for name, at in _times(reason).items() if at is not None}
    return [(name, f"{moment(at)} ({ago(now() - at)})") for name, at in times.items()]
