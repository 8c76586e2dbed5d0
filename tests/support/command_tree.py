"""The `jobsync` commands, each with the context that click gives it when it runs."""

from collections.abc import Iterator

import click

__all__ = ["list_commands", "open_context"]


def open_context(command: click.Command, parent: click.Context | None = None) -> click.Context:
    """Return a context of a command.

    With its settings: a command keeps the help option that its first context has asked for, so one
    without them would take `-h` from the commands of this process.
    """
    return click.Context(command, parent, command.name, **command.context_settings)


def list_commands(context: click.Context, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield a command and those below it, each after its words."""
    command = context.command
    yield words, command
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            child = command.get_command(context, name)
            assert child is not None
            yield from list_commands(open_context(child, context), f"{words} {name}".strip())
