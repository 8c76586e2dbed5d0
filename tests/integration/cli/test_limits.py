"""`--limit` of every command that has it, with rows that come from several places."""

from pathlib import Path
from typing import Any

import pytest
from command_tree import list_commands, open_context
from terminal import read_json

from jobsync import Components, Database, QueuePlugin
from jobsync.cli.main import cli
from jobsync.core.expiry import ExpiryRule
from jobsync.core.job_state import Gap, JobDefinition, JobState
from jobsync.scheduler.job_store import JobStore
from jobsync.stores.opening import open_store

NOW = int(Components.system().clock.wall().seconds)
COMMANDS = {
    "queues browse": ("letters",),
    "resources query": ("sessions",),
    "schedules history": (),
    "ttl backlog": (),
    "ttl next": (),
}
"""The words that each command needs to show the rows of `seed`."""


async def seed(url: str) -> None:
    """Store rows of two namespaces, resources and jobs, such that those of both are mixed."""
    components = Components.system()
    async with Database(url) as database:
        await database.create_resource("letters")
        queue = QueuePlugin(resource="letters")
        await database.use_plugin(queue)
        await queue.enqueue_many([{"to": str(number)} for number in range(6)])
        for name, offset in (("sessions", 0), ("tokens", 10)):
            resource = await database.define_resource(name, rules=[ExpiryRule()])
            for number in range(3):
                age = 10_000 + 20 * number + offset
                due, next_ = ({"expires_at": NOW + sign * age} for sign in (-1, 1))
                await resource.insert_many([due, next_])
    store = await open_store(url, components)
    try:
        for place, (namespace, job) in enumerate(
            [("billing", "a"), ("billing", "b"), ("default", "a"), ("default", "c")]
        ):
            jobs = JobStore(lambda: store, namespace, components)
            definition = JobDefinition(schedule="@hourly")
            await jobs.create_many({job: JobState(definition=definition, defined_by="", last=NOW)})
            await jobs.code.write("0" * 24, [job], NOW)
            for number in range(3):
                at = NOW - 1000 * number - place
                gap = Gap(first=at, last=at, count=1, reason="an outage")
                assert await jobs.history.write_gap(job, gap)
    finally:
        await store.close()


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A store with at least six rows for each command."""
    place = f"sqlite:///{tmp_path / 'limits.db'}"
    await seed(place)
    return place


def test_all_commands_with_a_limit_are_tested() -> None:
    """A new one must show that it keeps to its limit, too."""
    found = list_commands(open_context(cli))
    limited = {
        words
        for words, command in found
        if any("--limit" in parameter.opts for parameter in command.params)
    }
    assert limited == COMMANDS.keys()


async def test_a_limit_is_the_number_of_first_rows_that_are_shown(url: str) -> None:
    """Wherever they come from: the rest of what the command shows without it is left out."""

    def read(command: str, *words: str) -> list[dict[str, Any]]:
        found = read_json(url, *command.split(), *COMMANDS[command], *words)
        # It has a table of resources too, which is not limited.
        rows = found["records"] if command == "ttl backlog" else found
        return [{**row, "seen": None} for row in rows]  # when it was read

    for command in COMMANDS:
        whole = read(command)
        assert len(whole) >= 6, command
        assert read(command, "--limit", "4") == whole[:4], command
