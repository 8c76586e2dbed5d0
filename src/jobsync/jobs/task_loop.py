"""The loop over a list of tasks that runs until all are done, here or on other nodes.

It is exact and does not depend on clocks. The tasks of a list are done once on the job's date,
each by the node that owns it. A function that returns the pending tasks is called again for each
round, and other nodes may finish tasks while it runs: a task that is done already is done again
only if the same completion was recorded before the function was called. Otherwise the function
is called once more; a task that it still returns is pending again.

The loop waits for the store and never for the caller. The caller reads the source on its own
thread: `run_blocking` does this for blocking callers.
"""

from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from typing import Protocol, TypeAlias

from jobsync.core.clock import Clock
from jobsync.errors import Invalid, OutcomeUnknown, Unavailable
from jobsync.jobs.foreign_claims import ClaimState
from jobsync.jobs.task import Task, to_task
from jobsync.loop_calls import BlockingCall

__all__ = ["Source", "TaskLoop", "run_blocking"]

Source: TypeAlias = Callable[[], Iterable[Task | object]] | Iterable[Task | object]

_STORE_ERRORS = (Unavailable, OutcomeUnknown)
_SHORTEST_PAUSE = 0.5
"""Seconds to wait after the first round in which this node could do nothing."""


class TaskLoopNode(Protocol):
    """The part of a node that a task loop uses."""

    failure: BaseException | None
    is_retiring: bool

    @property
    def poll_interval(self) -> float:
        """The most seconds between rounds without work. Polls may be billed."""
        ...

    def can_claim(self, task: str) -> bool:
        """Whether this node may do a task now."""
        ...

    async def claim(
        self, tasks: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Claim tasks; return those that were not claimed, each with the reason."""
        ...

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """End tasks."""
        ...

    async def find_done(self, tasks: Collection[str]) -> dict[str, str]:
        """Return which tasks are done, each with the version of its completion."""
        ...


class TaskLoop:
    """One loop over a list of tasks.

    For each round call `read` and `start_round`, then `next` until it returns None; stop when
    `start_round` returns False.

    Args:
        node: the node that does the tasks.
        clock: for pauses between rounds without work.
        source: the tasks, or a function that returns the pending ones.
        in_blocks: the tasks that only the end of their own block or loop may mark, by that block
            or loop; kept up to date here.
    """

    def __init__(
        self,
        node: TaskLoopNode,
        clock: Clock,
        source: Source,
        in_blocks: dict[object, str] | None = None,
    ) -> None:
        self._node = node
        self._clock = clock
        # Read once: a generator yields its tasks only once.
        self._source = source if callable(source) else list(map(to_task, source))
        self._in_blocks = {} if in_blocks is None else in_blocks
        self._pause = _SHORTEST_PAUSE
        self._done: dict[str, str] = {}
        """The tasks that were done at the last check, each with the version of its completion."""
        self._round: Iterator[Task] = iter(())
        self._current: Task | None = None
        self._has_worked = False

    def read(self) -> list[Task]:
        """Read the source. Runs the user's code, so call it on the user's thread."""
        return list(map(to_task, self._source())) if callable(self._source) else self._source

    async def start_round(self, listed: Sequence[Task]) -> bool:
        """Start a round with the tasks just read; False ends the loop.

        The loop ends when all tasks are done, or when the node is retiring. Waits while the
        store does not answer.

        Raises:
            Unavailable: the node has failed.
        """
        self._check_node()
        if self._node.is_retiring:
            return False
        if callable(self._source):
            before, self._done = self._done, await self._find_done(listed)
            unchanged = {
                task for task, version in self._done.items() if before.get(task) == version
            }
            undone = [t for t in listed if t.text not in self._done or t.text in unchanged]
            # Finished while the source was read, or long ago: the next round tells.
            is_over = not undone and not self._done
        else:
            left = [task for task in listed if task.text not in self._done]
            self._done |= await self._find_done(left)
            undone = [task for task in left if task.text not in self._done]
            is_over = not undone
        self._round, self._has_worked = iter(undone), False
        return not is_over

    async def next(self) -> Task | None:
        """End the current task as done, and claim the next one; None at the end of the round.

        Waits while the store does not answer.
        """
        await self._finish_current()
        known = self._done if callable(self._source) else {}
        try:
            for task in self._round:
                if self._node.is_retiring:
                    return None
                if self._node.can_claim(task.text) and await self._claim(task.text, known):
                    self._current, self._has_worked = task, True
                    return task
        except _STORE_ERRORS:
            self._check_node()
        await self._pause_if_idle()
        return None

    async def fail(self) -> None:
        """End the current task as failed, so that other nodes may do it."""
        task, self._current = self._current, None
        if task is not None:
            try:
                await self._node.finish([task.text], "failed")
            finally:
                self._in_blocks.pop(self, None)

    async def _claim(self, task: str, known: Mapping[str, str]) -> bool:
        """Claim a task; return whether it is ours."""
        # Before the claim: nothing else may mark it once it is claimed.
        self._in_blocks[self] = task
        is_claimed = False
        try:
            is_claimed = not await self._node.claim([task], known)
        finally:
            if not is_claimed:
                self._in_blocks.pop(self, None)
        return is_claimed

    async def _finish_current(self) -> None:
        task, self._current = self._current, None
        if task is None:
            return
        try:
            while not await self._try_finish(task):
                await self._clock.sleep(_SHORTEST_PAUSE)
        finally:
            self._in_blocks.pop(self, None)

    async def _try_finish(self, task: Task) -> bool:
        try:
            await self._node.finish([task.text])
        except _STORE_ERRORS:
            self._check_node()
            return False
        return True

    async def _find_done(self, tasks: Sequence[Task]) -> dict[str, str]:
        while True:
            try:
                return await self._node.find_done([task.text for task in tasks])
            except _STORE_ERRORS:
                self._check_node()
                await self._clock.sleep(_SHORTEST_PAUSE)

    def _check_node(self) -> None:
        """Raise if waiting is useless.

        Raises:
            Unavailable: the node has failed.
        """
        if self._node.failure is not None:
            raise Unavailable("the node", "has failed", "enter again") from self._node.failure

    async def _pause_if_idle(self) -> None:
        """Wait before the next round; longer after each round without work."""
        if self._has_worked:
            self._pause = _SHORTEST_PAUSE
            return
        left = self._pause
        while left > 0 and not self._node.is_retiring:
            await self._clock.sleep(min(left, _SHORTEST_PAUSE))
            left -= _SHORTEST_PAUSE
        self._pause = min(2 * self._pause, self._node.poll_interval)


def run_blocking(loop: TaskLoop, call: BlockingCall) -> Generator[Task, None, None]:
    """Yield the loop's tasks to a blocking caller, each claimed; leaving early fails the last."""
    while call(loop.start_round(loop.read())):
        while (task := call(loop.next())) is not None:
            try:
                yield task
            except BaseException:
                # Invalid: the loop was left together with the job, and so were its claims.
                with suppress(*_STORE_ERRORS, Invalid):
                    call(loop.fail())
                raise
