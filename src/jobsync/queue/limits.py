"""How many messages of a queue or a task are in work at a time, and are claimed in a time.

The limits hold for all processes together. They are counted when messages are claimed, in the order
of the commits, so they are never exceeded. What counts are open claims, and the tokens of a bucket
in the store: nobody holds anything that could be left behind by a process that dies.
"""

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

from jobsync.core.arguments import check_count
from jobsync.errors import Invalid

__all__ = ["NO_LIMITS", "Allowance", "QueueLimits", "Usage", "parse_rate"]

_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_RATE = re.compile(r"(?P<count>[1-9]\d{0,8})/(?P<unit>second|minute|hour|day)")
_NONE = 1_000_000


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one queue, or of one task.

    Attributes:
        max_concurrency: the most messages that are claimed at a time; None for no limit.
        rate: messages a second; 0 for no limit.
        burst: how many messages may be claimed at once after a pause.
        group_concurrency: the most messages of one group that are claimed at a time.
        tasks: the limits of its tasks, by name; of those without limits there are none.
    """

    max_concurrency: int | None = None
    rate: float = 0.0
    burst: int = 1
    group_concurrency: int = 1
    tasks: "Mapping[str, QueueLimits]" = {}

    @property
    def is_limited(self) -> bool:
        """Whether the claims of the queue are counted."""
        return self.max_concurrency is not None or self.rate > 0

    @property
    def frees_others(self) -> bool:
        """Whether the end of a message lets others be claimed."""
        own = (self, *self.tasks.values())
        return any(each.max_concurrency is not None for each in own)

    def find_limited(self, tasks: Iterable[str]) -> list[str]:
        """Return those of some tasks that have limits."""
        return [name for name in tasks if name in self.tasks]

    def count_allowed(self, wanted: int, *, claimed: int, tokens: float) -> int:
        """Return how many messages may be claimed.

        Args:
            wanted: how many the caller wants.
            claimed: how many are claimed.
            tokens: how many the rate allows now.
        """
        room = _NONE if self.max_concurrency is None else self.max_concurrency - claimed
        by_rate = _NONE if not self.rate else math.floor(tokens + 1e-9)
        return max(0, min(wanted, room, by_rate))

    def find_wait(self, tokens: float) -> float | None:
        """Return the seconds until the rate allows to claim a message; None if it does now."""
        return (1.0 - tokens) / self.rate if self.rate and tokens < 1.0 else None


class Usage(msgspec.Struct, frozen=True):
    """What the limits of a queue, or of a task, allow to claim at a time."""

    most: int
    """How many messages."""
    tokens: float
    """How many the rate alone allows."""
    is_counting: bool
    """Whether more tokens come by themselves: they count from a time of the present clock."""


class Allowance(msgspec.Struct, frozen=True):
    """What may be claimed at a time: whichever messages of these tasks, no limit is exceeded."""

    most: int
    """How many messages."""
    tasks: tuple[str, ...]
    """The tasks whose messages may be claimed."""
    queue: Usage
    limited: Mapping[str, Usage] = {}
    """Of the tasks that have limits, and messages to claim, by name."""

    @classmethod
    def build(
        cls, queue: Usage, limited: Mapping[str, Usage], tasks: Iterable[str], limits: QueueLimits
    ) -> "Allowance":
        """Return what may be claimed of some tasks.

        As many messages as the tightest limit allows, of the tasks that have any left: which ones
        are claimed is not known before.
        """
        allowed = {name: usage.most for name, usage in limited.items() if usage.most > 0}
        chosen = [name for name in tasks if name not in limits.tasks or name in allowed]
        return cls(min([queue.most, *allowed.values()]), tuple(chosen), queue, limited)


NO_LIMITS = QueueLimits()


def parse_rate(text: str | None, burst: int | None) -> tuple[float, int]:
    """Return the messages a second of a rate such as "100/minute", and how many at once.

    Raises:
        Invalid: it is not such a text, or the burst is not a number.
    """
    if text is None:
        if burst is not None:
            problem = "has no effect without a rate"
            raise Invalid("rate_burst", burst, problem, 'pass rate_limit="100/minute" too')
        return 0.0, 1
    found = _RATE.fullmatch(str(text))
    if found is None:
        fix = 'write "10/second", "100/minute", "1000/hour" or "5/day"'
        raise Invalid("rate_limit", text, "must be a number of messages in a time", fix)
    if burst is not None:
        check_count("rate_burst", burst, least=1)
    return int(found["count"]) / _UNITS[found["unit"]], burst or 1
