"""Help is fast, complete and correct, for the command line and for each command."""

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
"""Seconds of CPU that help may take."""
_HEAVY = ("asyncio", "sqlite3", "http", "psycopg", "obstore")
_OURS = ("coordination", "stores", "database", "queue", "jobs")


def _walk() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command, groups included, with the words that run it."""
    pending: list[tuple[tuple[str, ...], click.Command]]
    pending = [((name,), _load(name)) for name in main._COMMANDS]
    while pending:
        words, command = pending.pop()
        yield words, command
        if isinstance(command, click.Group):
            pending += [((*words, name), child) for name, child in command.commands.items()]


def _load(name: str) -> click.Command:
    module, _ = main._COMMANDS[name]
    command: click.Command = getattr(import_module(f"jobsync.cli.{module}"), name)
    return command


COMMANDS = dict(sorted(_walk()))


def test_help_and_version() -> None:
    """The help lists every command and the exit codes."""
    text = _run("--help")
    assert all(f"  {name} " in text for name in main._COMMANDS)
    assert "3 unhealthy" in text
    assert _run("--version").startswith("jobsync")


def _run(*words: str) -> str:
    return subprocess.run([*JOBSYNC, *words], capture_output=True, text=True, check=True).stdout


def test_every_command_has_json_and_every_option_has_a_variable() -> None:
    """In all commands and subcommands; the help shows the variables."""
    variables = set[str]()
    for words, command in COMMANDS.items():
        if isinstance(command, click.Group):
            continue
        # A hidden one is not for people.
        params = command.params
        options = [item for item in params if isinstance(item, click.Option) and not item.hidden]
        if words != ("work",):
            assert any("--json" in option.opts for option in options), words
        for option in options:
            if option.opts == ["--yes"]:
                # A variable that is set once would disarm every later purge.
                assert not option.envvar, words
                assert not option.allow_from_autoenv, words
                continue
            assert option.envvar, (words, option.opts)
            assert option.show_envvar, (words, option.opts)
        variables.update(name for param in command.params for name in _list_variables(param))
    # So that none of them is reported as a mistyped setting of a plugin.
    own = {name.removeprefix("JOBSYNC_") for name in variables if name.startswith("JOBSYNC_")}
    assert own - {"URL", "QUEUE_MAX_ATTEMPTS"} == COMMAND_LINE


def test_every_command_and_every_option_is_explained() -> None:
    """None is left to be guessed from its name."""
    for words, command in COMMANDS.items():
        assert (command.help or "").strip(), words
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help, (words, option.opts)


def _list_variables(parameter: click.Parameter) -> list[str]:
    names = parameter.envvar
    return [names] if isinstance(names, str) else list(names or ())


def test_help_loads_no_command() -> None:
    """The list of commands loads neither a command nor a module that commands need."""
    loaded = _list_loaded([("--help",)])
    ours = {name for name in loaded if name.startswith("jobsync.")}
    commands = {"jobsync.cli", "jobsync.cli.options", "jobsync.cli.main"}
    assert ours == {*commands, "jobsync.errors", "jobsync.safe_text"}
    assert not loaded & {"msgspec", *_HEAVY}


def test_the_help_of_a_command_loads_no_heavy_module() -> None:
    """Neither asyncio, a driver or a store, nor the packages above them."""
    loaded = _list_loaded([(*words, "--help") for words in COMMANDS])
    assert not loaded & {*_HEAVY, *(f"jobsync.{part}" for part in _OURS)}


def _list_loaded(lines: list[tuple[str, ...]]) -> set[str]:
    """Return the modules that one process has loaded after running all these commands."""
    code = (
        "import sys, jobsync.cli.main as main\n"
        f"for words in {lines!r}:\n"
        "    try: main.cli(words)\n"
        "    except SystemExit as error: assert error.code == 0, words\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_takes_little_cpu(full_scale: bool, proof: Any) -> None:
    """Less than a user notices; `make prove-operate` measures it."""
    if not full_scale:
        pytest.skip("CPU time is measured at full scale only")
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
    """Return the CPU seconds of a process that prints its help."""
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
