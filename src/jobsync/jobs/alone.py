"""A node without a fleet: it owns everything and touches no store."""

from collections.abc import Callable, Collection, Iterable, Sequence

from jobsync.jobs.claims import Claim, ClaimState

__all__ = ["Alone"]


class Alone:
    """Answers as a node does that nobody shares its tasks with.

    Args:
        total: how many tokens there are; all are its own.
        token_of: gives a task's token.
    """

    is_leader = True
    failure: BaseException | None = None
    number = 0
    is_trusted = True

    def __init__(self, total: int, token_of: Callable[[str], int]) -> None:
        self.tokens = frozenset(range(total))
        self.token = token_of
        self._running: dict[str, None] = {}
        self._done: set[str] = set()
        self.is_retiring = False

    @property
    def running(self) -> list[str]:
        """The tasks that were added and not finished."""
        return list(self._running)

    def can_claim(self, task: str) -> bool:
        """Say yes, until told to stop."""
        del task
        return not self.is_retiring

    def retire(self) -> None:
        """Claim nothing more from now on."""
        self.is_retiring = True

    async def claim(self, tasks: Sequence[str], since: float | None = None) -> dict[str, str]:
        """Take note; nobody can be in the way."""
        del since
        self._running |= dict.fromkeys(tasks)
        return {}

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """Take note of the end."""
        for task in tasks:
            self._running.pop(task, None)
            if state == "done":
                self._done.add(task)
        return {}

    async def done_since(self, tasks: Collection[str], since: float) -> set[str]:
        """Give those that were done; time does not matter to one who is alone."""
        del since
        return self._done & set(tasks)

    async def store_time(self) -> float:
        """Give any time."""
        return 0.0

    async def claims_of_date(self) -> list[Claim]:
        """Give nothing: nothing is recorded."""
        return []

    async def stop(self, wait: float) -> None:
        """Nothing is to be handed over."""
        del wait
