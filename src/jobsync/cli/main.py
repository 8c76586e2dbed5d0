"""`jobsync`: one command with a word for each thing to do.

A word's module is loaded when the word is used, so that help and completion are quick.
"""

import sys
from importlib import import_module

import click

from jobsync.cli.options import FAILED, USAGE
from jobsync.errors import Invalid, JobsyncError

__all__ = ["main"]

_COMMANDS = {
    "cluster": ("cluster", "Show who is there, and who leads what."),
    "doctor": ("doctor", "Probe a store for everything that jobsync needs of it."),
    "enqueue": ("enqueue", "Push messages to a queue."),
    "health": ("health", "Ask how a `jobsync work` on this machine is."),
    "jobs": ("jobs", "Show what a fleet has done on a date, and what it has not finished."),
    "pins": ("jobs", "Show which tasks must run where."),
    "queues": ("queues", "Show queues and their messages; pause, resume and purge them."),
    "resources": ("resources", "Show resources and their records."),
    "schema": ("schema", "Print the tables, or the policy, that a store needs."),
    "sql": ("sql", "Open a shell on the SQL views of a fleet."),
    "tokens": ("jobs", "Show which node of a fleet has how many tokens."),
    "why": ("why", "Say what a message or a task waits for."),
    "work": ("work", "Run the plugins of a database until told to stop."),
}
"""Where each word's command is, and what it does."""


class _Words(click.Group):
    """Loads a command when it is asked for by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name all commands."""
        del ctx
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"jobsync.cli.{module}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, loading none."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Words, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jobsync-fleet", prog_name="jobsync")
def cli() -> None:
    """Coordinate a fleet of workers on the storage you already have.

    Exit codes: 0 all is well, 1 failed, 2 wrong usage, 3 unhealthy.
    """


def main() -> None:
    """Run the command line; an error is one line, with the fix."""
    try:
        cli(auto_envvar_prefix="JOBSYNC")
    except JobsyncError as error:
        click.echo(f"jobsync: {error}", err=True)
        sys.exit(USAGE if isinstance(error, Invalid) else FAILED)
