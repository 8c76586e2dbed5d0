"""`jobsync why`: what a task waits for."""

import datetime as dt

import click
import msgspec

from jobsync.cli.asking import app_option, ask_fleet, date_option, json_option, url_option
from jobsync.cli.render import moment, show_rows
from jobsync.jobs.reasons import Reason, explain_task
from jobsync.jobs.survey import FleetSurvey, TaskSeen

__all__ = ["why"]


@click.command()
@click.argument("task")
@url_option
@app_option
@date_option
@json_option
def why(task: str, url: str | None, app: str, day: dt.date, *, as_json: bool) -> None:
    """Say what TASK waits for, or what became of it."""

    async def look(fleet: FleetSurvey) -> TaskSeen:
        return await fleet.task(task, day)

    seen = ask_fleet(url, app, look)
    reason = explain_task(seen)
    if as_json:
        show_rows((), [_facts(seen, reason)], as_json=True)
        return
    click.echo(f"{seen.task_id}: {reason.text}")
    for name, value in _details(seen):
        click.echo(f"  {name:8} {value}")


def _facts(seen: TaskSeen, reason: Reason) -> dict[str, object]:
    facts: dict[str, object] = msgspec.to_builtins(seen)
    return {"code": reason.code, "reason": reason.text, **facts}


def _details(seen: TaskSeen) -> list[tuple[str, str]]:
    details = [("token", str(seen.token)), ("owner", seen.owner or "nobody")]
    if seen.claim is not None:
        claim = seen.claim
        details.append(("claim", f"{claim.state} on {claim.node} since {moment(claim.started)}"))
    for pin in seen.pins:
        match = f"{pin.in_force} is in force" if pin.in_force else "nobody matches"
        details.append(("pin", f"{', '.join(pin.patterns)} by {pin.created_by}: {match}"))
    return details
