"""`jobsync work`: runs the plugins of a database until a signal stops them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobsync.cli.options import option
from jobsync.cli.render import paint

if TYPE_CHECKING:
    from jobsync.database.database import Database

__all__ = ["work"]


@click.command()
@click.argument("target", envvar="JOBSYNC_TARGET")
@option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    envvar="JOBSYNC_GRACE",
    show_default=True,
    help="Seconds to finish after SIGTERM; handlers get most of them.",
)
@option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    envvar="JOBSYNC_LOG_FORMAT",
    show_default=True,
    help="Format of the log.",
)
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="JOBSYNC_LOG_LEVEL",
    show_default=True,
    help="Lowest level that is logged.",
)
@option(
    "--http",
    metavar="[HOST:]PORT",
    envvar="JOBSYNC_HTTP",
    help="Serve /livez, /readyz, /health/live and /health/ready at this address.",
)
@option(
    "--heartbeat-file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="JOBSYNC_HEARTBEAT_FILE",
    help="Write the health of the process to this file once per second, for `jobsync health`.",
)
def work(
    target: str,
    grace: float,
    log_format: str,
    log_level: str,
    http: str | None,
    heartbeat_file: Path | None,
) -> None:
    """Run the plugins of TARGET: module:name of a Database, or of a function that returns one.

    SIGTERM and SIGINT let everything finish within --grace seconds; a second signal stops the
    process immediately. Exits with 1 if something failed.
    """
    import asyncio

    from jobsync.cli.health import HealthState, parse_address
    from jobsync.cli.probes import serve_probes
    from jobsync.cli.worker_process import (
        WorkerProcess,
        create_database,
        load_target,
        start_logging,
    )
    from jobsync.core.arguments import check_seconds

    check_seconds("--grace", grace)
    address = None if http is None else parse_address(http)
    loaded = load_target(target)
    start_logging(log_format, log_level)

    async def run() -> int:
        database = await create_database(target, loaded)
        health = HealthState(database.components.clock, database.unready)
        with ExitStack() as stack:
            probes = None if address is None else stack.enter_context(serve_probes(address, health))
            if log_format == "text":
                _print_banner(target, database, probes)
            process = WorkerProcess(database, health, grace=grace, heartbeat_file=heartbeat_file)
            signals.enter_context(process.watch_signals())
            return await process.run()

    # Signals are received until the process ends, also while the event loop is closed.
    with ExitStack() as signals:
        raise SystemExit(asyncio.run(run()))


def _print_banner(target: str, database: Database, probes: str | None) -> None:
    from importlib.metadata import version

    lines = {
        "store": database.store_name,
        "plugins": ", ".join(sorted(database.plugins)) or "none",
        **({"probes": probes} if probes else {}),
    }
    click.echo(paint(f"jobsync {version('jobsync-fleet')}: {target}", bold=True), err=True)
    for name, value in lines.items():
        click.echo(f"  {name:8} {value}", err=True)
