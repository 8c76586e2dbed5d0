"""A node without a fleet: it owns everything and touches no store."""

import datetime as dt
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jobsync.jobs.claims import Claim, ClaimState
from jobsync.jobs.retention import Forgotten

__all__ = ["LocalNode", "NodeInfo", "describe_alone", "describe_claim"]


class LocalNode:
    """Answers as a node does that nobody shares its tasks with.

    Args:
        total: how many tokens there are; all are its own.
        token_of: gives a task's token.
        once_per_date: whether what was done is never done again.
    """

    is_leader = True
    pace = 0.1
    failure: BaseException | None = None
    number = 0
    is_trusted = True

    def __init__(
        self, total: int, token_of: Callable[[str], int], *, once_per_date: bool = False
    ) -> None:
        self.tokens = frozenset(range(total))
        self.token = token_of
        self._once = once_per_date
        self._running: dict[str, None] = {}
        self._done: dict[str, int] = {}
        """How often each task was done."""
        self.is_retiring = False

    @property
    def running(self) -> list[str]:
        """The tasks that were added and not finished."""
        return list(self._running)

    def can_claim(self, task: str) -> bool:
        """Say yes, until told to stop; not to what is being done, or done if once is enough."""
        if self.is_retiring or task in self._running:
            return False
        return not (self._once and task in self._done)

    def retire(self) -> None:
        """Claim nothing more from now on."""
        self.is_retiring = True

    async def claim(
        self, tasks: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Take note; nobody can be in the way, but one who does it already."""
        lost = {task: "this node does it already" for task in tasks if task in self._running}
        lost |= {task: "it is done" for task in tasks if self._is_refused(task, known)}
        self._running |= dict.fromkeys(task for task in tasks if task not in lost)
        return lost

    async def finish(self, tasks: Iterable[str], state: ClaimState = "done") -> dict[str, str]:
        """Take note of the end."""
        for task in tasks:
            if task in self._running:
                del self._running[task]
                if state == "done":
                    self._done[task] = self._done.get(task, 0) + 1
        return {}

    async def done(self, tasks: Collection[str]) -> dict[str, str]:
        """Give those tasks that are done, each with the mark of its completion."""
        return {task: str(self._done[task]) for task in tasks if task in self._done}

    async def claims_of_date(self) -> list[Claim]:
        """Give nothing: nothing is recorded."""
        return []

    async def forget(self, days: float) -> Forgotten:
        """Nothing is kept."""
        del days
        return Forgotten(dates=0, claims=0, nodes=0, rebalances=0)

    async def stop(self, wait: float) -> None:
        """Nothing is to be handed over."""
        del wait

    def _is_refused(self, task: str, known: Mapping[str, str] | None) -> bool:
        """Say whether a task is done and this completion may not be followed by another."""
        if task not in self._done:
            return False
        return self._once or (known is not None and known.get(task) != str(self._done[task]))


# Claims and nodes as people read them: plain dicts, with the names of the guide.


NodeInfo: TypeAlias = dict[str, Any]
"""name, created_on, last_heartbeat, host, pid, stage, is_leader"""


def describe_claim(claim: Claim) -> dict[str, Any]:
    """Describe a claim; `item` is the guide's name for `task_id`."""
    return {
        "task_id": claim.task,
        "item": claim.task,
        "node": claim.node,
        "state": claim.state,
        "run": claim.run,
        "created_on": dt.datetime.fromtimestamp(claim.started, dt.UTC),
        "date": dt.date.fromisoformat(claim.date),
    }


def describe_alone(name: str) -> NodeInfo:
    """Describe a node that shares nothing with anybody, and is recorded nowhere."""
    facts = {"host": "", "pid": os.getpid(), "stage": "ready", "is_leader": True}
    return {"name": name, "created_on": None, "last_heartbeat": None, **facts}
