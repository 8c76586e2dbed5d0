"""Goes through a list of tasks until none is left undone, here or elsewhere.

Exact, because it knows when it read its list. A function that gives what is pending is
asked anew for each round: what anybody has done since is not done again, however long ago
that was and whoever owns the task by now; what was done before is pending again. A list
that is given as such has no time: each of its tasks is done once on the job's date.
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from jobsync.core.clock import Clock
from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.jobs.alone import Alone
from jobsync.jobs.crew import Crew
from jobsync.jobs.task import Task

__all__ = ["Source", "Walk"]

Source: TypeAlias = Callable[[], Iterable[Task | object]] | Iterable[Task | object]

_PAUSE = 0.5
"""Seconds between rounds in which nothing could be done here."""


class Call(Protocol):
    """Runs a coroutine elsewhere and waits for it."""

    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any:
        """Wait for it."""
        ...


class Walk:
    """One walk through a list.

    Args:
        node: whose tasks they may be.
        call: runs what the node does.
        clock: paces rounds in which nothing can be done.
        source: the tasks, or a function that gives those that are pending.
    """

    def __init__(self, node: Crew | Alone, call: Call, clock: Clock, source: Source) -> None:
        self._node = node
        self._call = call
        self._clock = clock
        # Read once: a list may be a generator, which gives its tasks only once.
        self._source = source if callable(source) else list(source)

    def steps(self) -> Iterator[Task]:
        """Give the tasks that are this node's to do, each claimed; end when told to stop."""
        while not self._is_told_to_stop():
            since = self._call(self._node.store_time()) if callable(self._source) else 0.0
            undone = self._undone(self._read(), since)
            if not undone:
                return
            given = 0
            for task in undone:
                if self._is_told_to_stop():
                    return
                if self._is_ours(task, since):
                    yield from self._give(task)
                    given += 1
            if not given:
                self._call(self._clock.sleep(_PAUSE))

    def _is_told_to_stop(self) -> bool:
        return self._node.is_retiring

    def _is_ours(self, task: Task, since: float) -> bool:
        """Claim a task, unless that is to no avail."""
        if not self._node.can_claim(task.text):
            return False
        return not self._call(self._node.claim([task.text], since))

    def _give(self, task: Task) -> Iterator[Task]:
        """Give one task, and mark it when the next is asked for."""
        try:
            yield task
        except BaseException:
            with suppress(Unavailable, OutcomeUnknown):
                self._call(self._node.finish([task.text], "failed"))
            raise
        self._call(self._node.finish([task.text]))

    def _read(self) -> list[Task]:
        given = self._source() if callable(self._source) else self._source
        return [task if isinstance(task, Task) else Task(task) for task in given]

    def _undone(self, tasks: list[Task], since: float) -> list[Task]:
        """Leave out what somebody has done since the list was read."""
        done = self._call(self._node.done_since([task.text for task in tasks], since))
        return [task for task in tasks if task.text not in done]
