"""`jobsync`: the entry point of the command line, and the table of its commands.

The module of a command is loaded when the command runs, so that help and completion are fast.
"""

import sys
from importlib import import_module
from typing import Any

import click

from jobsync.cli.options import FAILED, INTERRUPTED, USAGE, SuggestingGroup
from jobsync.errors import Invalid, JobsyncError

__all__ = ["main"]

_COMMANDS = {
    "cluster": ("cluster", "Show the live workers and which of them leads each role."),
    "demo": ("demo", "Run a fleet of processes, kill its leader, and count what was lost."),
    "doctor": ("doctor", "Check that a store provides everything that jobsync needs."),
    "enqueue": ("messages", "Push messages to a queue."),
    "health": ("health", "Check a `jobsync work` process on this machine."),
    "jobs": ("cluster", "Show the tasks of a date that are done, and those that are not."),
    "messages": ("messages", "Cancel or delete one message, or let it run now."),
    "pins": ("cluster", "Show which tasks are pinned to which nodes."),
    "queues": (
        "queues",
        "Show queues and their messages; pause, purge and redrive queues.",
    ),
    "resources": ("resources", "Show resources and their records."),
    "schedules": ("schedules", "Show scheduled jobs; run, pause, resume and change them."),
    "schema": ("schema", "Print the tables, or the IAM policy, that a store needs; or check them."),
    "sql": ("sql", "Open a SQL shell on the views of a fleet."),
    "tokens": ("cluster", "Show how many tokens each node of a fleet owns."),
    "ttl": ("ttl", "Show which records expire and when; remove expired ones now."),
    "why": ("why", "Explain why a message, a task or a scheduled job is waiting."),
    "work": ("work", "Run the plugins of a database until a signal stops them."),
}
"""The module of each command, and its summary."""


class _LazyGroup(SuggestingGroup):
    """Loads the module of a command when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        del ctx
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command; return None if the name is unknown."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"jobsync.cli.{module}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Load and run a command. One that is interrupted has a code of its own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("jobsync: interrupted", err=True)
            ctx.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jobsync-fleet", prog_name="jobsync")
def cli() -> None:
    """Coordinate a fleet of workers on the storage you already have.

    Exit codes: 0 success, 1 failed, 2 wrong usage, 3 unhealthy, 130 interrupted.
    """


def main() -> None:
    """Run the command line; print an error with its fix, and where it was looked for."""
    try:
        cli(auto_envvar_prefix="JOBSYNC")
    except JobsyncError as error:
        click.echo("\n  ".join([f"jobsync: {error}", *getattr(error, "__notes__", ())]), err=True)
        sys.exit(USAGE if isinstance(error, Invalid) else FAILED)
