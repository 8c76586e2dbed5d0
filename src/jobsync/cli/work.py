"""`jobsync work`: runs the plugins of a database until a signal stops them."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobsync.cli.options import DurationType, WholeNumberType, option
from jobsync.cli.render import paint

if TYPE_CHECKING:
    from jobsync.database.database import Database

__all__ = ["work"]

_LAST_PORT = 65535


@click.command()
@click.argument("target", envvar="JOBSYNC_TARGET")
@option(
    "--grace",
    type=DurationType(),
    default=30.0,
    envvar="JOBSYNC_GRACE",
    show_default=True,
    help="Seconds to finish after SIGTERM, or such as 2m; handlers get most of them.",
)
@option(
    "--log-format",
    type=click.Choice(["text", "json"], case_sensitive=False),
    default="text",
    envvar="JOBSYNC_LOG_FORMAT",
    show_default=True,
    help="Format of the log.",
)
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
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
@option(
    "--queues",
    metavar="NAMES",
    envvar="JOBSYNC_QUEUES",
    help="Handle only the messages of these queues, separated by commas.",
)
@option(
    "--concurrency",
    type=WholeNumberType(1),
    envvar="JOBSYNC_CONCURRENCY",
    help="Handlers of each queue that run at once; by default what the queue says.",
)
@option(
    "--processes",
    type=WholeNumberType(1, 1000),
    default=1,
    envvar="JOBSYNC_PROCESSES",
    show_default=True,
    help="Worker processes to run; those that fail are started again.",
)
@click.option("--supervised", hidden=True, help="NUMBER:DESCRIPTOR of one of several processes.")
def work(
    target: str,
    grace: float,
    log_format: str,
    log_level: str,
    http: str | None,
    heartbeat_file: Path | None,
    queues: str | None,
    concurrency: int | None,
    processes: int,
    supervised: str | None,
) -> None:
    """Run the plugins of TARGET: module:name of a Database, or of a function that returns one.

    SIGTERM and SIGINT let everything finish within --grace seconds; a second signal,
    half a second later or more, stops the process immediately. Exits with 1 if something failed.

    With --processes, the first one has the port of --http, the next one the port after it, and
    so on; to the name of the --heartbeat-file its number is added, from 0.
    """
    import asyncio

    from jobsync.cli.health import HealthState, parse_address, write_heartbeat
    from jobsync.cli.probes import serve_probes
    from jobsync.cli.process_supervisor import SupervisorLink
    from jobsync.cli.target import create_database, load_target
    from jobsync.cli.worker_log import start_logging
    from jobsync.cli.worker_plan import check_work, choose_work, warn_of_other_store
    from jobsync.cli.worker_process import WorkerProcess
    from jobsync.core.arguments import check_seconds
    from jobsync.errors import Invalid

    check_seconds("--grace", grace)
    address = None if http is None else parse_address(http)
    if address is not None and address[1] and address[1] + processes - 1 > _LAST_PORT:
        problem = f"leaves no port for each of {processes} processes"
        fix = f"use a port up to {_LAST_PORT - processes + 1}, or 0 for any"
        raise Invalid("--http", http, problem, fix)
    if processes > 1 and supervised is None:
        start_logging(log_format, log_level)
        raise SystemExit(_supervise(processes, grace))
    link, number, is_first = None, None, True
    if supervised is not None:
        number, descriptor = map(int, supervised.split(":"))
        link, is_first = SupervisorLink(descriptor), number == 0
        # Port 0 stands for any port.
        address = address and (address[0], address[1] and address[1] + number)
        file = heartbeat_file
        heartbeat_file = file and file.with_name(f"{file.name}.{number}")
    loaded = load_target(target)
    start_logging(log_format, log_level, number)

    async def run() -> int:
        database = await create_database(target, loaded)
        choose_work(database, queues, concurrency)
        check_work(target, database)
        health = HealthState(database.components.clock, database.unready)
        if heartbeat_file is not None:
            # Refused now if it cannot be written: probes would never see this process.
            write_heartbeat(heartbeat_file, health.ready(), database.components.clock.wall())
        with ExitStack() as stack:
            probes = None if address is None else stack.enter_context(serve_probes(address, health))
            if is_first and log_format == "json":
                _log_plan(target, database, probes)
            elif is_first:
                _print_plan(target, database, probes, is_alone=link is None)
            if is_first:
                warn_of_other_store(database, os.environ)
            process = WorkerProcess(
                database, health, grace=grace, heartbeat_file=heartbeat_file, link=link
            )
            signals.enter_context(process.watch_signals())
            return await process.run()

    # Signals are received until the process ends, also while the event loop is closed.
    with ExitStack() as signals:
        raise SystemExit(asyncio.run(run()))


def _supervise(processes: int, grace: float) -> int:
    """Run several processes with the options of this command; return the exit code."""
    from jobsync.cli.process_supervisor import ProcessSupervisor
    from jobsync.components import Components

    given = dict(click.get_current_context().params)
    target = given.pop("target")
    words = ["work", target]
    for name in sorted(given.keys() - {"processes", "supervised"}):
        if given[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(given[name])]

    def build_command(number: int, descriptor: int) -> list[str]:
        warnings = [f"-W{option}" for option in sys.warnoptions]
        process = ["--supervised", f"{number}:{descriptor}"]
        return [sys.executable, *warnings, "-m", "jobsync", *words, *process]

    if given["log_format"] == "text":
        _print_banner(target, processes=str(processes), queues=given["queues"])
    return ProcessSupervisor(build_command, processes, grace, Components.system()).run()


def _print_plan(target: str, database: Database, probes: str | None, *, is_alone: bool) -> None:
    """Print what this process is going to do; one of several, what each of them is."""
    from jobsync.cli.worker_plan import describe_store, describe_work

    store, origin = describe_store(database)
    facts = {"store": f"{store} ({origin})", "runs": "\n".join(describe_work(database))}
    if is_alone:
        _print_banner(target, **facts, probes=probes)
    else:
        # The supervisor, which does not load the program, has printed the banner.
        for name, text in facts.items():
            for line in text.splitlines():
                logging.getLogger("jobsync.work").info("%s %s", name, line)


def _log_plan(target: str, database: Database, probes: str | None) -> None:
    """Log what this process is going to do, or each of several, as fields of one line."""
    from jobsync.cli.worker_log import log_facts
    from jobsync.cli.worker_plan import describe_store, describe_work

    store, origin = describe_store(database)
    facts = {"target": target, "store": store, "origin": origin, "runs": [*describe_work(database)]}
    log_facts("worker starting", {**facts, **({"probes": probes} if probes else {})})


def _print_banner(target: str, **facts: str | None) -> None:
    from importlib.metadata import version

    click.echo(paint(f"jobsync {version('jobsync-fleet')}: {target}", bold=True), err=True)
    for name, value in facts.items():
        for index, line in enumerate((value or "").splitlines()):
            click.echo(f"  {'' if index else name:8} {line}", err=True)
