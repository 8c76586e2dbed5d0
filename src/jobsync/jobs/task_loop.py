"""Goes through a list of tasks until none is left undone, here or elsewhere.

Exact, and by no clock. A list that is given as such is done once on the job's date, each
task by whoever has it. A function that gives what is pending is asked anew for each round,
and what it names may have been done while it was asked: a task that is done already is done
again only if the very same completion stood there before the function was asked. If it did
not, the function is asked once more; what it names still is pending again.

The walk itself waits for the store and never for the caller. Whoever drives it reads the
source in his own time and place: `steps` does so for those who block.
"""

from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from jobsync.core.clock import Clock
from jobsync.errors import Invalid, OutcomeUnknown, Unavailable
from jobsync.jobs.claims import ClaimState
from jobsync.jobs.task import Task, to_task

__all__ = ["RunAndWait", "Source", "TaskLoop", "steps"]

Source: TypeAlias = Callable[[], Iterable[Task | object]] | Iterable[Task | object]

_TROUBLE = (Unavailable, OutcomeUnknown)
_SHORTEST_PAUSE = 0.5
"""Seconds to wait after the first round in which nothing could be done here."""


class TaskLoopNode(Protocol):
    """A node, as far as a walk needs one."""

    failure: BaseException | None
    is_retiring: bool

    @property
    def pace(self) -> float:
        """The most seconds between rounds that come to nothing: each look is paid for."""
        ...

    def can_claim(self, task: str) -> bool:
        """Say whether a task is this node's to do now."""
        ...

    async def claim(
        self, tasks: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Claim tasks; give those that were not, with the reason."""
        ...

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """End tasks."""
        ...

    async def done(self, tasks: Collection[str]) -> dict[str, str]:
        """Give those tasks that are done, each with the mark of its completion."""
        ...


class RunAndWait(Protocol):
    """Runs a coroutine elsewhere and waits for it."""

    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any:
        """Wait for it."""
        ...


class TaskLoop:
    """One walk through a list.

    Call `read` and `begin` for each round, `next` until it gives None; then the next round,
    until `begin` says that nothing is left.

    Args:
        node: whose tasks they may be.
        clock: paces rounds in which nothing can be done.
        source: the tasks, or a function that gives those that are pending.
        in_blocks: the tasks in hand, which only their own ends mark; is kept up to date.
    """

    def __init__(
        self, node: TaskLoopNode, clock: Clock, source: Source, in_blocks: set[str] | None = None
    ) -> None:
        self._node = node
        self._clock = clock
        # Read once: a list may be a generator, which gives its tasks only once.
        self._source = source if callable(source) else list(map(to_task, source))
        self._in_blocks = set() if in_blocks is None else in_blocks
        self._pause = _SHORTEST_PAUSE
        self._done: dict[str, str] = {}
        """What was done when last looked, each with the mark of its completion."""
        self._round: Iterator[Task] = iter(())
        self._in_hand: Task | None = None
        self._has_given = False

    def read(self) -> list[Task]:
        """Ask the source. Runs the user's code, so call it where that belongs."""
        return list(map(to_task, self._source())) if callable(self._source) else self._source

    async def begin(self, listed: Sequence[Task]) -> bool:
        """Begin a round with what the source has just given; say whether to go on.

        It is over when nothing is left undone, or when the node was told to stop. Waits while
        the store does not answer.

        Raises:
            Unavailable: the node has failed.
        """
        self._check()
        if self._node.is_retiring:
            return False
        if callable(self._source):
            before, self._done = self._done, await self._look(listed)
            is_old = {task for task, mark in self._done.items() if before.get(task) == mark}
            undone = [t for t in listed if t.text not in self._done or t.text in is_old]
            # Done while the source was asked, or long ago: the next answer tells.
            is_over = not undone and not self._done
        else:
            left = [task for task in listed if task.text not in self._done]
            self._done |= await self._look(left)
            undone = [task for task in left if task.text not in self._done]
            is_over = not undone
        self._round, self._has_given = iter(undone), False
        return not is_over

    async def next(self) -> Task | None:
        """End the task in hand as done, and claim the next one; None when the round is over.

        Waits while the store does not answer; whatever it asked meanwhile stays true.
        """
        await self._end_as_done()
        known = self._done if callable(self._source) else {}
        try:
            for task in self._round:
                if self._node.is_retiring:
                    return None
                if self._node.can_claim(task.text) and await self._claim(task.text, known):
                    self._in_hand, self._has_given = task, True
                    return task
        except _TROUBLE:
            self._check()
        await self._rest()
        return None

    async def fail(self) -> None:
        """End the task in hand as failed: others may do it."""
        task, self._in_hand = self._in_hand, None
        if task is not None:
            try:
                await self._node.finish([task.text], "failed")
            finally:
                self._in_blocks.discard(task.text)

    async def _claim(self, task: str, known: Mapping[str, str]) -> bool:
        """Claim a task; say whether it is ours."""
        # Before the claim: nobody else may mark it from the moment that it is made.
        self._in_blocks.add(task)
        is_claimed = False
        try:
            is_claimed = not await self._node.claim([task], known)
        finally:
            if not is_claimed:
                self._in_blocks.discard(task)
        return is_claimed

    async def _end_as_done(self) -> None:
        task, self._in_hand = self._in_hand, None
        if task is None:
            return
        try:
            while not await self._is_ended(task):
                await self._clock.sleep(_SHORTEST_PAUSE)
        finally:
            self._in_blocks.discard(task.text)

    async def _is_ended(self, task: Task) -> bool:
        try:
            await self._node.finish([task.text])
        except _TROUBLE:
            self._check()
            return False
        return True

    async def _look(self, tasks: Sequence[Task]) -> dict[str, str]:
        while True:
            try:
                return await self._node.done([task.text for task in tasks])
            except _TROUBLE:
                self._check()
                await self._clock.sleep(_SHORTEST_PAUSE)

    def _check(self) -> None:
        """Wait for nothing that will never come.

        Raises:
            Unavailable: the node has failed.
        """
        if self._node.failure is not None:
            raise Unavailable("the node", "has failed", "enter again") from self._node.failure

    async def _rest(self) -> None:
        """Wait before the next round, the longer the more often nothing could be done."""
        if self._has_given:
            self._pause = _SHORTEST_PAUSE
            return
        left = self._pause
        while left > 0 and not self._node.is_retiring:
            await self._clock.sleep(min(left, _SHORTEST_PAUSE))
            left -= _SHORTEST_PAUSE
        self._pause = min(2 * self._pause, self._node.pace)


def steps(walk: TaskLoop, call: RunAndWait) -> Generator[Task, None, None]:
    """Give the tasks of a walk to one who blocks, each claimed; a loop left early fails one."""
    while call(walk.begin(walk.read())):
        while (task := call(walk.next())) is not None:
            try:
                yield task
            except BaseException:
                # Invalid: the loop was left together with the job, and so were its claims.
                with suppress(*_TROUBLE, Invalid):
                    call(walk.fail())
                raise
