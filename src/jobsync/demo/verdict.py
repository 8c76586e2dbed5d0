"""The verdict of the demo, counted from the store and not from what the workers say."""

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from jobsync.demo.worker import PERIOD, TOKENS
from jobsync.queue.backend import MessageInfo
from jobsync.scheduler.history import HistoryEntry

__all__ = ["DemoVerdict", "judge"]


class DemoVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the store holds when all is over."""

    enqueued: int
    handled: int
    lost: int
    doubled: int
    """Mails with two accepted completions."""
    again: int
    """Mails whose worker died or froze, so that another one started them again."""
    instants: int
    """The instants between the first and the last firing."""
    firings: int
    missed: int
    fired_twice: int
    records: int
    left: int
    """Records that should have expired and are still there."""
    tokens: int
    """How many tokens have an owner."""
    vacancy: float
    """The most seconds without a leader."""
    failures: int
    """Workers that ended by themselves."""

    @property
    def is_good(self) -> bool:
        """Whether all promises were kept."""
        broken = (self.lost, self.doubled, self.missed, self.fired_twice, self.left, self.failures)
        return not any(broken) and self.tokens == TOKENS

    def describe(self) -> list[tuple[str, str, bool]]:
        """Return lines for the viewer: what, the figures, and whether that is good."""
        mails = f"{self.enqueued} enqueued, {self.handled} handled, {self.lost} lost"
        fired = f"{self.firings} firings for {self.instants} instants"
        return [
            ("mails", f"{mails}, {self.doubled} doubled", not (self.lost or self.doubled)),
            ("started again", f"{self.again}, because their worker died or froze", True),
            (
                "schedule",
                f"{fired}, {self.missed} missed, {self.fired_twice} fired twice",
                not (self.missed or self.fired_twice),
            ),
            ("records", f"{self.records} added, {self.left} left to expire", not self.left),
            ("tokens", f"{self.tokens} of {TOKENS} have an owner", self.tokens == TOKENS),
            ("without a leader", f"{self.vacancy:.1f} s at most", True),
            *([("failed workers", str(self.failures), False)] if self.failures else []),
        ]


def judge(
    sent: Collection[str],
    finished: Sequence[MessageInfo],
    completions: Sequence[str],
    firings: Sequence[HistoryEntry],
    *,
    records: int,
    left: int,
    tokens: int,
    vacancy: float,
    failures: int,
) -> DemoVerdict:
    """Compare what was asked for with what the store holds.

    Args:
        sent: the ids of the mails whose enqueue was acknowledged.
        finished: the completed messages.
        completions: the ids of all accepted completions.
        firings: the history of the scheduled job.
        records: how many records were added.
        left: how many of them have not expired.
        tokens: how many tokens have an owner.
        vacancy: the most seconds without a leader.
        failures: how many workers ended by themselves.
    """
    fired = Counter(round(entry.scheduled_time) for entry in firings for _ in range(entry.count))
    gaps = sum(entry.count for entry in firings if entry.status == "missed")
    instants = round((max(fired) - min(fired)) / PERIOD) + 1 if fired else 0
    return DemoVerdict(
        enqueued=len(sent),
        handled=len(finished),
        lost=len({*sent} - {message.id for message in finished}),
        doubled=len(completions) - len({*completions}),
        again=sum(message.deliveries > 1 for message in finished),
        instants=instants,
        firings=sum(fired.values()),
        missed=gaps + max(0, instants - len(fired)),
        fired_twice=sum(count - 1 for count in fired.values()),
        records=records,
        left=left,
        tokens=tokens,
        vacancy=vacancy,
        failures=failures,
    )
