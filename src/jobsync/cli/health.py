"""`jobsync health`: asks a working process on this machine how it is, by its heartbeat file."""

from pathlib import Path

import click

from jobsync.cli.health_state import read_heartbeat
from jobsync.cli.options import UNHEALTHY, json_option, now
from jobsync.cli.render import show_rows

__all__ = ["health"]


@click.command()
@click.option(
    "--live/--ready",
    "is_live",
    default=False,
    envvar="JOBSYNC_LIVE",
    show_envvar=True,
    help="Whether it runs, or whether it can work now, which is the default.",
)
@click.option(
    "--heartbeat-file",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    envvar="JOBSYNC_HEARTBEAT_FILE",
    show_envvar=True,
    help="The file that `jobsync work` writes.",
)
@click.option(
    "--max-age",
    type=click.FloatRange(min=1),
    default=15.0,
    envvar="JOBSYNC_MAX_AGE",
    show_envvar=True,
    show_default=True,
    help="Seconds after which a file that nobody writes counts as left behind.",
)
@json_option
def health(heartbeat_file: Path, max_age: float, *, is_live: bool, as_json: bool) -> None:
    """Ask how a `jobsync work` on this machine is. Exits with 3 if it is not well."""
    beat = read_heartbeat(heartbeat_file)
    if beat is None:
        reasons = [f"there is no {heartbeat_file}: nothing has begun to work"]
    else:
        age = now() - beat.at
        late = [f"not heard of for {age:.0f} s"] if age > max_age else []
        reasons = late or ([] if is_live else beat.reasons)
    status = ("alive" if is_live else "ready") if not reasons else "not well"
    pid = None if beat is None else beat.pid
    row = {"status": status, "pid": pid, "reasons": reasons}
    show_rows(["status", "pid", "reasons"], [row], as_json=as_json)
    raise SystemExit(UNHEALTHY if reasons else 0)
