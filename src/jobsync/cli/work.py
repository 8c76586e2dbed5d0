"""`jobsync work`: runs what is attached to a database, until told to stop."""

import asyncio
import importlib
import inspect
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import click

from jobsync.cli.logs import Format, start_logging
from jobsync.cli.probes import read_address, serving
from jobsync.cli.pulse import Pulse
from jobsync.cli.render import paint
from jobsync.cli.shift import Shift
from jobsync.core.names import closest
from jobsync.database.database import Database
from jobsync.errors import Invalid

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
    address = None if http is None else read_address(http)
    found = _load(target)
    start_logging(log_format, log_level)

    async def run() -> tuple[Shift, int]:
        database = await _make(target, found)
        pulse = Pulse(database.components.clock, database.unready)
        with ExitStack() as stack:
            probes = None if address is None else stack.enter_context(serving(address, pulse))
            if log_format == "text":
                _greet(target, database, probes)
            shift = Shift(database, pulse, grace=grace, heartbeat=heartbeat_file)
            return shift, await shift.work()

    shift, status = asyncio.run(run())
    shift.end(status)


def _load(target: str) -> object:
    """Import what TARGET names.

    Raises:
        Invalid: there is nothing of the kind, with what is there instead.
    """
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise Invalid("TARGET", target, "is no module:attribute", "name it as in tasks:db")
    # As `python -m` does: what is in the working directory can be imported.
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise Invalid("TARGET", target, f"there is no module {error.name}", "check it") from None
    thing = getattr(found, attribute, None)
    if isinstance(thing, Database) or callable(thing):
        return thing
    there = [name for name, each in vars(found).items() if isinstance(each, Database)]
    hint = closest(attribute, there) or ", ".join(there)
    fix = f"did you mean {module}:{hint}?" if hint else f"make one in {module}: db = Database(…)"
    raise Invalid("TARGET", target, "is no Database", fix)


async def _make(target: str, found: object) -> Database:
    """Give the database that was named, or that a function makes.

    Raises:
        Invalid: it makes something else.
    """
    made = found if isinstance(found, Database) or not callable(found) else found()
    if inspect.isawaitable(made):
        made = await made
    if not isinstance(made, Database):
        raise Invalid("TARGET", target, f"gives {type(made).__name__}", "return a Database")
    return made


def _greet(target: str, database: Database, probes: str | None) -> None:
    """Say what is about to run."""
    lines = {
        "store": database.place,
        "plugins": ", ".join(sorted(database.plugins)) or "none",
        **({"probes": probes} if probes else {}),
    }
    click.echo(paint(f"jobsync {version('jobsync-fleet')}: {target}", bold=True), err=True)
    for name, value in lines.items():
        click.echo(f"  {name:8} {value}", err=True)
