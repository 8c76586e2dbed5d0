"""`jobsync`: one command with a word for each thing to do."""

import sys

import click

from jobsync.cli.doctor import doctor
from jobsync.cli.schema import schema
from jobsync.errors import Invalid, JobsyncError

__all__ = ["main"]

_FAILED, _USAGE = 1, 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jobsync-fleet", prog_name="jobsync")
def cli() -> None:
    """Coordinate a fleet of workers on the storage you already have.

    Exit codes: 0 all is well, 1 failed, 2 wrong usage, 3 unhealthy.
    """


cli.add_command(doctor)
cli.add_command(schema)


def main() -> None:
    """Run the command line; an error is one line, with the fix."""
    try:
        cli(auto_envvar_prefix="JOBSYNC")
    except JobsyncError as error:
        click.echo(f"jobsync: {error}", err=True)
        sys.exit(_USAGE if isinstance(error, Invalid) else _FAILED)
