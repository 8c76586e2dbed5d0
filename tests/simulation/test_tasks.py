"""Workers that know different tasks, in the simulated world.

The stories are in `task_stories`. `jobsync.testing` checks every claim (Q31).
"""

from collections.abc import Callable
from typing import Any

import pytest
import task_stories
from histories import compared_with_recorded
from mutants import is_caught
from pages_queue_stories import on_pages
from task_stories import STORIES

from jobsync.queue.sql.sqlite import SqliteBackend
from jobsync.queue.worker import Worker
from jobsync.testing import check_story
from jobsync.testing.stories import Story

pytestmark = pytest.mark.usefixtures("without_logs")

Patch = Callable[[pytest.MonkeyPatch], None]
SEEDS = (0, -1)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories(story: Story) -> None:
    """Each story ends well with every seed, and has its recorded histories."""
    with compared_with_recorded(f"tasks.{story.__name__}", SEEDS):
        check_story(story, SEEDS)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stories_on_an_object_store(story: Story) -> None:
    """Likewise, with the messages in pages."""
    check_story(on_pages(story), [0])


def claims_whatever_there_is(patch: pytest.MonkeyPatch) -> None:
    """A worker claims messages of all tasks that anybody knows."""
    patch.setattr(Worker, "_find_tasks", lambda _: frozenset({task_stories.OLD, task_stories.NEW}))


def claims_the_first_task_only(patch: pytest.MonkeyPatch) -> None:
    """A worker that knows several tasks claims the messages of one."""

    def find(self: Any) -> frozenset[str] | None:
        tasks = was(self)
        return tasks if tasks is None else frozenset(sorted(tasks - {""})[-1:])

    was = Worker._find_tasks
    patch.setattr(Worker, "_find_tasks", find)


def takes_messages_of_all_tasks(patch: pytest.MonkeyPatch) -> None:
    """The database gives a worker messages of tasks that it did not ask for."""

    async def claim(self: Any, limit: int, *, tasks: Any = None, **options: Any) -> Any:
        tasks = tasks and {*tasks, task_stories.NEW}
        return await was(self, limit, tasks=tasks, **options)

    was = SqliteBackend.claim
    patch.setattr(SqliteBackend, "claim", claim)


KILLED: dict[Patch, tuple[Story, str]] = {
    claims_whatever_there_is: (task_stories.deploys, "Q6"),
    claims_the_first_task_only: (task_stories.deploys, "QL3"),
    takes_messages_of_all_tasks: (task_stories.deploys, "Q31"),
}
"""For each mutant a story that catches it, and the invariant that it violates."""


@pytest.mark.parametrize("mutant", KILLED, ids=lambda mutant: mutant.__name__)
def test_the_world_notices(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded story reports a violation of the recorded invariant."""
    story, invariant = KILLED[mutant]
    mutant(monkeypatch)
    assert is_caught(story, invariant)
