"""Jobs of one fleet in this process, and a way to wait for what they do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from waiting import now

from jobsync import Components, CoordinationConfig, Event, Job

__all__ = ["Team", "start_team"]

_TIMEOUT = 30.0
_LOOK_AGAIN = 0.05
_EVENTS = "jobs:*"


class Team:
    """Jobs on one store, each with its own threads.

    Args:
        url: the store.
        stack: leaves the jobs that are entered here.
    """

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self.events: list[Event] = []
        self._stack = stack
        self._event_emitted = threading.Condition()

    def add(self, name: str, *, settings: dict[str, Any] | None = None, **options: Any) -> Job:
        """Create and enter a job."""
        return self._stack.enter_context(self.make(name, settings=settings, **options))

    def make(self, name: str, *, settings: dict[str, Any] | None = None, **options: Any) -> Job:
        """Create a job that is not entered."""
        components = Components.system()
        components.events.on(_EVENTS, self._on_event)
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
        """Wait until the predicate is true. Events wake us, but not every change has one."""
        limit = now() + _TIMEOUT
        with self._event_emitted:
            while not predicate():
                assert now() < limit, "timed out"
                self._event_emitted.wait(_LOOK_AGAIN)

    def count(self, kind: type[Event]) -> int:
        """Return how many events of a kind were emitted."""
        return sum(isinstance(event, kind) for event in self.events)

    def _on_event(self, event: Event) -> None:
        with self._event_emitted:
            self.events.append(event)
            self._event_emitted.notify_all()


@contextmanager
def start_team(url: str, *names: str, **settings: Any) -> Iterator[Team]:
    """Start a team of nodes that have joined and have their tokens."""
    with ExitStack() as stack:
        team = Team(url, stack)
        jobs = [team.add(name, settings=settings) for name in names]
        team.until(lambda: sum(len(job.my_tokens) for job in jobs) == 60 or not jobs)
        yield team
