"""The options of a queue. Durations are seconds."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from jobsync.coordination.settings import CoordinatorOptions
from jobsync.core.arguments import check_choice, check_count, check_seconds
from jobsync.core.retry import MAX_ATTEMPTS, check_max_attempts
from jobsync.core.trust import check_duration
from jobsync.errors import Invalid
from jobsync.queue.limits import QueueLimits, parse_rate
from jobsync.settings import Settings, in_section

__all__ = ["LONGEST_RETENTION", "QueueOptions", "QueueOrder", "QueueSettings", "translate"]

QueueOrder: TypeAlias = Literal["fifo", "lifo", "priority"]
"""Which messages are claimed first: those that were pushed first, or last, or the most urgent."""

_SHORTEST_VISIBILITY = 0.2
"""A claim is trusted for 50 ms less, and renewed when a third is over: both need time."""
_LONGEST_VISIBILITY = 43_200.0
LONGEST_RETENTION = 10_000 * 86_400.0
_ALIASES = {"workers": "concurrency", "ticket_interval": "dispatch_interval"}


class QueueOptions(CoordinatorOptions, total=False):
    """Options as they are passed to `QueuePlugin`: see `QueueSettings`."""

    concurrency: int
    prefetch: int | None
    visibility_timeout: float
    max_attempts: int
    auto_acknowledge: bool
    poll_interval: float
    grace: float
    completed_ttl: float
    dead_ttl: float | None
    order: QueueOrder
    max_concurrency: int | None
    rate_limit: str | None
    rate_burst: int | None
    group_concurrency: int
    dispatch_interval: float
    ticket_batch_size: int
    workers: int
    """Another name of `concurrency`."""
    max_retries: int | None
    """One less than `max_attempts`."""
    ticket_interval: float
    """Another name of `dispatch_interval`."""


@in_section("queue")
class QueueSettings(Settings, frozen=True, kw_only=True):
    """The options of a queue.

    Attributes:
        concurrency: how many handlers run at once in this process; 3.
        prefetch: how many messages are claimed in advance of those that run; ten times the
            concurrency, up to fifty times if that is 20 ms of measured work, and never more
            than one second of it.
        visibility_timeout: seconds after which other workers may claim a message whose worker
            does not renew its claim; 30, and 0.2 at least. Handlers may take longer: claims are
            renewed.
        max_attempts: how often a message is tried; 4, which is three retries.
        auto_acknowledge: whether returning from the handler completes the message; otherwise
            the handler calls `context.ack()`.
        poll_interval: seconds between polls without notifications; 10, and up to three times
            as long while the queue is empty.
        grace: seconds that handlers have to finish when the queue stops; 30.
        completed_ttl: seconds for which completed messages are remembered; 300, or the
            `default_ttl` of a `TTLPlugin` without resources in the same database.
        dead_ttl: seconds for which dead letters are kept; for ever by default.
        order: "fifo", the oldest messages first; "lifo", the newest; or "priority", those with
            the highest `priority`, and of these the oldest. A message that is tried again comes
            first in "fifo", when its time has come; otherwise it stands where it stood before.
            On S3 and in memory there are ten priorities, from -4 to 5.
        max_concurrency: how many messages all processes together handle at once; no limit by
            default. Messages are not claimed in advance then.
        rate_limit: how many messages all processes together start in a time: "10/second",
            "100/minute", "1000/hour" or "5/day"; no limit by default.
        rate_burst: how many of them may start at once after a pause; 1.
        group_concurrency: how many messages of one group are handled at once; 1, which keeps
            their order.
        dispatch_interval: seconds between two tickets of the coordinator on S3, at least; 2.
            Without effect on a database, which needs no tickets.
        ticket_batch_size: accepted without effect: a ticket names as many pages as there are, up
            to 200.
    """

    concurrency: int = 3
    prefetch: int | None = None
    visibility_timeout: float = 30.0
    max_attempts: int = 4
    auto_acknowledge: bool = True
    poll_interval: float = 10.0
    grace: float = 30.0
    completed_ttl: float = 300.0
    dead_ttl: float | None = None
    order: QueueOrder = "fifo"
    max_concurrency: int | None = None
    rate_limit: str | None = None
    rate_burst: int | None = None
    group_concurrency: int = 1
    dispatch_interval: float = 2.0
    ticket_batch_size: int = 10

    def __post_init__(self) -> None:
        check_max_attempts(self.max_attempts)
        check_choice("order", self.order, get_args(QueueOrder))
        for field in ("concurrency", "ticket_batch_size", "group_concurrency"):
            check_count(field, getattr(self, field), least=1)
        if self.max_concurrency is not None:
            check_count("max_concurrency", self.max_concurrency, least=1)
        parse_rate(self.rate_limit, self.rate_burst)
        if self.prefetch is not None:
            check_count("prefetch", self.prefetch, least=0)
        check_duration("poll_interval", self.poll_interval)
        check_duration("dispatch_interval", self.dispatch_interval)
        _check_visibility(self.visibility_timeout)
        for field in ("grace", "completed_ttl", "dead_ttl"):
            _check_positive(field, getattr(self, field))

    @property
    def limits(self) -> QueueLimits:
        """How many messages are in work at a time, and in which time."""
        rate, burst = parse_rate(self.rate_limit, self.rate_burst)
        return QueueLimits(
            max_concurrency=self.max_concurrency,
            rate=rate,
            burst=burst,
            group_concurrency=self.group_concurrency,
        )


def _check_visibility(value: float) -> None:
    if not _SHORTEST_VISIBILITY <= value <= _LONGEST_VISIBILITY:
        least = f"{_SHORTEST_VISIBILITY:g}"
        is_long = value > _LONGEST_VISIBILITY
        fix = f"did you mean {value / 1000:g}?" if is_long else f"pass {least} or more"
        problem = f"must be in seconds, from {least} to {_LONGEST_VISIBILITY:,.0f}"
        raise Invalid("visibility_timeout", value, problem, fix)


def _check_positive(field: str, value: float | None) -> None:
    if value is not None:
        check_seconds(field, value, most=LONGEST_RETENTION)


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under their canonical names; one that is None counts as not passed.

    Raises:
        Invalid: an option is passed under two names.
    """
    translated = dict(options)
    for alias, name in _ALIASES.items():
        if alias in translated:
            _refuse_both(translated, alias, name)
            value = translated.pop(alias)
            if value is not None:
                translated[name] = value
    if translated.get("max_retries") is not None:
        _refuse_both(translated, "max_retries", "max_attempts")
        check_count("max_retries", translated["max_retries"], least=0, most=MAX_ATTEMPTS - 1)
        translated["max_attempts"] = translated["max_retries"] + 1
    translated.pop("max_retries", None)
    return translated


def _refuse_both(options: Mapping[str, Any], one: str, other: str) -> None:
    if options.get(one) is not None and options.get(other) is not None:
        raise Invalid(one, options[one], f"cannot be passed with {other}", "pass one of the two")
