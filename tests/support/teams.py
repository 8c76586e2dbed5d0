"""Nodes of one fleet in this process, and a way to wait until they have settled."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jobsync import Components, CoordinationConfig, Event, Job

__all__ = ["Team", "gather"]

_PATIENCE = 30.0
_EVENTS = "jobs:*"


class Team:
    """Jobs on one store, each with threads of its own.

    Args:
        url: the store.
        stack: ends what is begun here.
    """

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self.events: list[Event] = []
        self._stack = stack
        self._news = threading.Condition()

    def add(self, name: str, *, settings: dict[str, Any] | None = None, **options: Any) -> Job:
        """Enter one more job."""
        return self._stack.enter_context(self.make(name, settings=settings, **options))

    def make(self, name: str, *, settings: dict[str, Any] | None = None, **options: Any) -> Job:
        """Give a job that is not entered."""
        components = Components.system()
        components.events.on(_EVENTS, self._hear)
        config = CoordinationConfig(
            **{
                "total_tokens": 60,
                "heartbeat_interval_sec": 1,
                "heartbeat_timeout_sec": 4,
                **(settings or {}),
            }
        )
        return Job(
            name,
            "test",
            coordination_config=config,
            url=self.url,
            components=components,
            **{"wait_on_enter": 20, **options},
        )

    def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until something is so; whatever the nodes do wakes us."""
        with self._news:
            assert self._news.wait_for(predicate, _PATIENCE), "it did not come to pass"

    def count(self, kind: type[Event]) -> int:
        """Give how many events of a kind were told."""
        return sum(isinstance(event, kind) for event in self.events)

    def _hear(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()


@contextmanager
def gather(url: str, *names: str, **settings: Any) -> Iterator[Team]:
    """Give a team of nodes that are there and have their shares."""
    with ExitStack() as stack:
        team = Team(url, stack)
        jobs = [team.add(name, settings=settings) for name in names]
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60 or not jobs)
        yield team
