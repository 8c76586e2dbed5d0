"""The limits of a queue on a database: how many messages are claimed at a time, and in a time.

Claims are counted after every commit that makes some. A bucket of tokens is counted beside the one
in the database, in real time and by the fastest clock.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from jobsync.testing.invariants import Violation
from jobsync.testing.message_transitions import (
    MessageProblem,
    MessageTransition,
    RowDetails,
    list_commits,
)
from jobsync.testing.world import Occurrence

__all__ = ["check_limits", "find_limits"]

_FASTEST = 1.06
"""The rate of the fastest clock."""
_ROUNDING = 1e-3


def find_limits(history: Sequence[Occurrence]) -> dict[str, RowDetails]:
    """Return the limits of each queue that has any, as its claims have recorded them."""
    return {
        done.details["queue"]: done.details["limits"]
        for done in history
        if done.what == "request" and "limits" in done.details
    }


def check_limits(history: Sequence[Occurrence]) -> list[Violation]:
    """Check that no claim exceeds the limits of its queue.

    Checks what `RecordingBackend` records.
    """
    limits = find_limits(history)
    if not limits:
        return []
    queues = {queue: _Usage(each) for queue, each in limits.items()}
    violations = []
    for commit in list_commits(history):
        queue = str((commit[0].before or commit[0].after).get("queue", ""))
        if queue in queues:
            at = history[commit[0].at].at
            violations += [
                Violation(invariant, f"{problem} at {at:.3f} s")
                for invariant, problem in queues[queue].add(commit, at)
            ]
    return violations


class _Usage:
    """What is claimed in a queue with limits."""

    def __init__(self, limits: RowDetails) -> None:
        self._limits = limits
        self._claimed: set[str] = set()
        self._groups: defaultdict[str, set[str]] = defaultdict(set)
        """The claimed messages of each group."""
        self._tokens = float(limits["burst"])
        self._counted: float | None = None
        """When the tokens were counted."""

    def add(self, commit: Sequence[MessageTransition], at: float) -> Iterator[MessageProblem]:
        """Add a commit; return which limits it exceeds."""
        taken = []
        for step in commit:
            name, is_claimed = step.after["id"], step.after["state"] == "claimed"
            if is_claimed and name not in self._claimed:
                taken.append(step)
            change = set.add if is_claimed else set.discard
            change(self._claimed, name)
            if "group" in step.place:
                change(self._groups[step.place["group"]], name)
        if taken:
            yield from self._check_concurrency(taken)
            yield from self._check_rate(len(taken), at)

    def _check_concurrency(self, taken: Sequence[MessageTransition]) -> Iterator[MessageProblem]:
        most = self._limits["max_concurrency"]
        if most is not None and len(self._claimed) > most:
            yield "Q28", f"{len(self._claimed)} messages are claimed, of {most}"
        most = self._limits["group_concurrency"]
        for group in {step.place.get("group", "") for step in taken} - {""}:
            if len(self._groups[group]) > most:
                yield "Q28", f"{len(self._groups[group])} messages of {group} are claimed"

    def _check_rate(self, taken: int, at: float) -> Iterator[MessageProblem]:
        rate, burst = self._limits["rate"], self._limits["burst"]
        if not rate:
            return
        since = at if self._counted is None else self._counted
        self._tokens = min(burst, self._tokens + (at - since) * rate * _FASTEST) - taken
        self._counted = at
        if self._tokens < -_ROUNDING:
            yield "Q28", f"{taken} messages were claimed, {-self._tokens:.3f} more than {rate:g}/s"
            self._tokens = 0.0
