"""The limits of a queue: how they are written, and what they allow."""

from unittest.mock import Mock

import pytest

from jobsync import Invalid
from jobsync.queue.limits import Allowance, QueueLimits, Usage, parse_rate
from jobsync.queue.settings import QueueSettings
from jobsync.queue.sql.sqlite_places import SqlitePlaces, run_steps


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1/second", 1.0), ("90/minute", 1.5), ("7200/hour", 2.0), ("86400/day", 1.0)],
)
def test_rates_are_read(text: str, rate: float) -> None:
    """A number of messages in a time; one at once unless a burst is given."""
    assert parse_rate(text, None) == (rate, 1)
    assert parse_rate(text, 5) == (rate, 5)
    assert parse_rate(None, None) == (0.0, 1)


@pytest.mark.parametrize(
    "text", ["", "10", "/minute", "0/minute", "-1/minute", "1.5/minute", "10/week", "10 / minute"]
)
def test_what_is_not_a_rate_is_refused(text: str) -> None:
    """The error shows how to write one."""
    with pytest.raises(Invalid, match="100/minute"):
        QueueSettings(rate_limit=text)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("rate_burst", {"rate_burst": 3}),
        ("rate_burst", {"rate_limit": "1/day", "rate_burst": 0}),
        ("max_concurrency", {"max_concurrency": 0}),
        ("group_concurrency", {"group_concurrency": 0}),
    ],
)
def test_limits_that_allow_nothing_are_refused(field: str, options: dict[str, int]) -> None:
    """So is one without effect."""
    with pytest.raises(Invalid) as refused:
        QueueSettings(**options)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("limits", "claimed", "tokens", "allowed"),
    [
        (QueueLimits(), 10**6, 0.0, 5),
        (QueueLimits(max_concurrency=7), 3, 0.0, 4),
        (QueueLimits(max_concurrency=7), 7, 9.0, 0),
        (QueueLimits(max_concurrency=7), 9, 9.0, 0),
        (QueueLimits(rate=1.0), 10**6, 2.999, 2),
        (QueueLimits(rate=1.0), 0, 3.0 - 1e-12, 3),
        (QueueLimits(rate=1.0), 0, 0.5, 0),
        (QueueLimits(rate=1.0, max_concurrency=7), 6, 3.0, 1),
        (QueueLimits(rate=1.0, max_concurrency=9), 0, 3.0, 3),
    ],
)
def test_the_least_limit_counts(
    limits: QueueLimits, claimed: int, tokens: float, allowed: int
) -> None:
    """And never more than wanted."""
    assert limits.count_allowed(5, claimed=claimed, tokens=tokens) == allowed


def test_the_rate_says_when_there_is_more() -> None:
    """Not before a whole message is allowed."""
    limits = QueueLimits(rate=0.5)
    assert limits.find_wait(0.0) == 2.0
    assert limits.find_wait(0.75) == 0.5
    assert limits.find_wait(1.0) is None
    assert QueueLimits().find_wait(0.0) is None
    assert not QueueLimits(group_concurrency=3).is_limited


@pytest.mark.parametrize("is_task", [False, True])
@pytest.mark.parametrize(
    ("claimed", "is_counting", "is_written"),
    [(0, True, False), (0, False, True), (1, True, True), (1, False, True)],
)
def test_a_claim_that_the_rate_forbids_writes_nothing(
    claimed: int, *, is_counting: bool, is_written: bool, is_task: bool
) -> None:
    """On SQLite every write wakes all who wait, and they would claim and write without end."""
    places = SqlitePlaces("emails", {"now": 0.0, "boot": 1, "mono": 0.0})
    usage = Usage(claimed, claimed + 0.5, is_counting)
    own = QueueLimits(rate=0.5)
    limits = QueueLimits(tasks={"send": own}) if is_task else own
    allowance = Allowance(claimed, ("send",), usage, {"send": usage} if is_task else {})
    steps = places.end_claim(limits, allowance, ["send"] * claimed)
    connection = Mock()
    assert run_steps(connection, steps) == 1.0
    assert connection.cursor().execute.called is is_written


def test_no_more_are_claimed_than_the_tightest_limit_allows() -> None:
    """Which tasks' messages are claimed is not known before; a task without room is left out."""
    usages = {name: Usage(most, 1.0, is_counting=False) for name, most in (("a", 3), ("b", 0))}
    limits = QueueLimits(tasks={name: QueueLimits(max_concurrency=3) for name in usages})
    queue = Usage(9, 1.0, is_counting=False)
    allowance = Allowance.build(queue, usages, ["a", "b", "c"], limits)
    assert (allowance.most, allowance.tasks) == (3, ("a", "c"))
    full = Allowance.build(queue, {"b": usages["b"]}, ["b", "c"], limits)
    assert (full.most, full.tasks) == (9, ("c",))


@pytest.mark.parametrize(
    ("limits", "frees"),
    [
        (QueueLimits(), False),
        (QueueLimits(rate=1.0), False),
        (QueueLimits(group_concurrency=2), False),
        (QueueLimits(max_concurrency=2), True),
        (QueueLimits(tasks={"a": QueueLimits(rate=1.0)}), False),
        (
            QueueLimits(tasks={"a": QueueLimits(rate=1.0), "b": QueueLimits(max_concurrency=1)}),
            True,
        ),
        (QueueLimits(max_concurrency=2, tasks={"a": QueueLimits(rate=1.0)}), True),
    ],
)
def test_the_end_of_a_message_frees_others_if_it_counts_against_a_limit(
    limits: QueueLimits, *, frees: bool
) -> None:
    """That of the queue, or that of any task: who waits for it is told."""
    assert limits.frees_others is frees
