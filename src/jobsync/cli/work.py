"""`jobsync work`: runs what is attached to a database, until told to stop."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobsync.cli.render import paint

if TYPE_CHECKING:
    from jobsync.cli.logs import Format
    from jobsync.cli.worker_process import WorkerProcess
    from jobsync.database.database import Database

__all__ = ["work"]


@click.command()
@click.argument("target", envvar="JOBSYNC_TARGET")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    envvar="JOBSYNC_GRACE",
    show_envvar=True,
    show_default=True,
    help="Seconds after SIGTERM in which all must end; handlers have three quarters of them.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    envvar="JOBSYNC_LOG_FORMAT",
    show_envvar=True,
    show_default=True,
    help="How facts are printed.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="JOBSYNC_LOG_LEVEL",
    show_envvar=True,
    show_default=True,
    help="Which facts are printed.",
)
@click.option(
    "--http",
    metavar="[HOST:]PORT",
    envvar="JOBSYNC_HTTP",
    show_envvar=True,
    help="Answer /livez, /readyz, /health/live and /health/ready there.",
)
@click.option(
    "--heartbeat-file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="JOBSYNC_HEARTBEAT_FILE",
    show_envvar=True,
    help="Write once a second how this process is, for `jobsync health`.",
)
def work(
    target: str,
    grace: float,
    log_format: Format,
    log_level: str,
    http: str | None,
    heartbeat_file: Path | None,
) -> None:
    """Run the plugins of TARGET: a Database, or a function that makes one, as module:name.

    SIGTERM and SIGINT let everything finish, for the time of --grace; a second one stops at
    once. Exits with 1 if something failed.
    """
    import asyncio

    from jobsync.cli.health_state import HealthState
    from jobsync.cli.logs import start_logging
    from jobsync.cli.probes import read_address, serving
    from jobsync.cli.target import load, make
    from jobsync.cli.worker_process import WorkerProcess

    address = None if http is None else read_address(http)
    found = load(target)
    start_logging(log_format, log_level)

    async def run() -> tuple[WorkerProcess, int]:
        database = await make(target, found)
        pulse = HealthState(database.components.clock, database.unready)
        with ExitStack() as stack:
            probes = None if address is None else stack.enter_context(serving(address, pulse))
            if log_format == "text":
                _greet(target, database, probes)
            shift = WorkerProcess(database, pulse, grace=grace, heartbeat=heartbeat_file)
            return shift, await shift.work()

    shift, status = asyncio.run(run())
    shift.end(status)


def _greet(target: str, database: Database, probes: str | None) -> None:
    """Say what is about to run."""
    from importlib.metadata import version

    lines = {
        "store": database.store_name,
        "plugins": ", ".join(sorted(database.plugins)) or "none",
        **({"probes": probes} if probes else {}),
    }
    click.echo(paint(f"jobsync {version('jobsync-fleet')}: {target}", bold=True), err=True)
    for name, value in lines.items():
        click.echo(f"  {name:8} {value}", err=True)
