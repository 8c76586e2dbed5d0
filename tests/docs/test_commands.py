"""Every command that a page prints exists, with its options."""

import re
from pathlib import Path

import click
import pytest
from command_tree import open_context

from jobsync.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_versions = re.compile(r"^jobsync \d\S*: ", re.MULTILINE)
_commands = re.compile(r"(?:`|^\$ )jobsync ([^`\n|#]+)", re.MULTILINE)


def find_problem(line: str) -> str:
    """Return what is wrong with the words after `jobsync`, or empty text."""
    context = open_context(cli)
    given: set[str] = set()
    for word in re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", line).split():
        command = context.command
        if word.startswith("-"):
            name = word.rstrip(",").partition("=")[0]
            known = {option for each in command.get_params(context) for option in each.opts}
            if name not in known:
                return f"{command.name} has no option {name}"
            given.add(name)
        elif isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]*,?", word):
            child = command.get_command(context, word.rstrip(","))
            if child is None:
                return f"{command.name} has no command {word}"
            context = open_context(child, context)
    command = context.command
    for each in command.get_params(context):
        # A command without any option is only mentioned.
        if given and isinstance(each, click.Option) and each.required and not given & {*each.opts}:
            return f"{command.name} needs {each.opts[0]}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """A reader can type each of them; what follows a comment sign or a pipe does not count."""
    text = page.read_text(encoding="utf-8")
    lines = _commands.findall(text)
    assert not _versions.findall(text), "the banner of a version that a reader may not have"
    problems = {line: find_problem(line) for line in lines}
    assert {line: problem for line, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("queues lisst", "queues has no command lisst"),
        ("work app:db --concurency 3", "work has no option --concurency"),
        ("health --live", "health needs --heartbeat-file"),
        ("queues browse emails --state dead", ""),
    ],
)
def test_wrong_commands_are_found(line: str, problem: str) -> None:
    """A mistyped name is not taken for an argument."""
    assert find_problem(line) == problem
