"""Help is there at once, whole and true: of the command line and of each command."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click
import pytest
from terminal import JOBSYNC

from jobsync.cli import main
from jobsync.settings import COMMAND_LINE

_LIMIT = 0.150
"""Seconds of CPU within which help is there."""
_HEAVY = ("asyncio", "sqlite3", "http", "psycopg", "obstore")
_OURS = ("coordination", "stores", "database", "queue", "jobs")


def _walk() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Give every command by its words, groups too."""
    pending: list[tuple[tuple[str, ...], click.Command]]
    pending = [((name,), _load(name)) for name in main._COMMANDS]
    while pending:
        words, command = pending.pop()
        yield words, command
        if isinstance(command, click.Group):
            pending += [((*words, name), each) for name, each in command.commands.items()]


def _load(name: str) -> click.Command:
    module, _ = main._COMMANDS[name]
    command: click.Command = getattr(import_module(f"jobsync.cli.{module}"), name)
    return command


COMMANDS = dict(sorted(_walk()))


def test_help_and_version() -> None:
    """The help names every command and the exit codes."""
    text = _run("--help")
    assert all(f"  {name} " in text for name in main._COMMANDS)
    assert "3 unhealthy" in text
    assert _run("--version").startswith("jobsync")


def _run(*words: str) -> str:
    return subprocess.run([*JOBSYNC, *words], capture_output=True, text=True, check=True).stdout


def test_every_command_has_json_and_every_option_a_variable() -> None:
    """As the help shows, of each command and of those below it."""
    variables = set[str]()
    for words, command in COMMANDS.items():
        if isinstance(command, click.Group):
            continue
        options = [each for each in command.params if isinstance(each, click.Option)]
        if words != ("work",):
            assert any("--json" in each.opts for each in options), words
        for option in options:
            assert option.envvar, (words, option.opts)
            assert option.show_envvar, (words, option.opts)
        variables.update(name for each in command.params for name in _name_variables(each))
    # So that none of them is taken for a mistyped setting where a plugin is made.
    own = {name.removeprefix("JOBSYNC_") for name in variables if name.startswith("JOBSYNC_")}
    assert own - {"URL", "QUEUE_MAX_ATTEMPTS"} == COMMAND_LINE


def _name_variables(parameter: click.Parameter) -> list[str]:
    given = parameter.envvar
    return [given] if isinstance(given, str) else list(given or ())


def test_help_loads_nothing_that_it_need_not() -> None:
    """The list of commands loads none of them, not even what they are made of."""
    loaded = _name_loaded([("--help",)])
    ours = {name for name in loaded if name.startswith("jobsync.")}
    assert ours == {"jobsync.cli", "jobsync.cli.options", "jobsync.cli.main", "jobsync.errors"}
    assert not loaded & {"msgspec", *_HEAVY}


def test_the_help_of_commands_loads_nothing_that_they_need_only_when_they_run() -> None:
    """No loop, no driver, no store and nothing that stands on one: help must be there at once."""
    loaded = _name_loaded([(*words, "--help") for words in COMMANDS])
    assert not loaded & {*_HEAVY, *(f"jobsync.{part}" for part in _OURS)}


def _name_loaded(lines: list[tuple[str, ...]]) -> set[str]:
    """Name the modules that one process has loaded after all these commands."""
    code = (
        "import sys, jobsync.cli.main as main\n"
        f"for words in {lines!r}:\n"
        "    try: main.cli(words)\n"
        "    except SystemExit as left: assert left.code == 0, words\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_takes_little_cpu(full_scale: bool, proof: Any) -> None:
    """Less than people notice; measured by `make prove-operate`."""
    if not full_scale:
        pytest.skip("seconds are measured at full scale")
    taken = {words: _measure(*words) for words in ((), *COMMANDS)}
    slowest = max(taken, key=taken.__getitem__)
    proof.record(
        "CPU of --help",
        commands=len(taken),
        median=round(sorted(taken.values())[len(taken) // 2], 3),
        worst=round(taken[slowest], 3),
        slowest=" ".join(slowest),
    )
    assert taken[slowest] < _LIMIT, slowest


def _measure(*words: str) -> float:
    """Give the CPU seconds of one process that shows its help."""
    line = [*JOBSYNC, *words, "--help"]
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
        child = os.posix_spawn(
            line[0],
            line,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1)],
        )
    _, status, used = os.wait4(child, 0)
    assert status == 0, words
    return used.ru_utime + used.ru_stime
