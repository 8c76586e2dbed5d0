"""The estimate of what a queue on S3 costs."""

from typing import Any

import pytest

from jobsync import Invalid, QueuePlugin
from jobsync.queue.usage import RequestCounts

QUEUE = QueuePlugin(resource="tasks")


def test_requests_have_amazons_prices() -> None:
    """$5 for a million PUT or LIST, $0.40 for a million GET."""
    counts = RequestCounts(puts=1e6, gets=1e6, lists=1e6)
    assert counts.dollars == pytest.approx(10.40)
    assert counts.total == 3e6


def test_the_parts_of_an_estimate_add_up() -> None:
    """And a year is twelve times a month of thirty days and a bit."""
    month = QUEUE.estimate_usage(workers=4, messages_per_day=1000)
    parts = (month.sessions, month.bell, month.looking, month.pages)
    assert month.dollars == pytest.approx(sum(part.dollars for part in parts))
    year = QUEUE.estimate_usage(workers=4, messages_per_day=1000, days=365)
    assert year.dollars == pytest.approx(month.dollars * 365 / 30)


def test_messages_that_are_pushed_together_cost_less() -> None:
    """The requests for pages are those of a tenth of the pages."""
    alone = QUEUE.estimate_usage(workers=2, messages_per_day=1000)
    together = QUEUE.estimate_usage(workers=2, messages_per_day=1000, messages_per_page=10)
    assert together.pages.total == pytest.approx(alone.pages.total / 10)
    assert together.dollars < alone.dollars


def test_long_handlers_cost_renewals_and_listings() -> None:
    """A renewal every ten seconds, by default; a lone worker watches nobody."""
    short = QUEUE.estimate_usage(workers=5, messages_per_day=100)
    long = QUEUE.estimate_usage(workers=5, messages_per_day=100, seconds_per_page=95)
    assert long.pages.puts - short.pages.puts == 9 * 100 * 30
    assert long.looking.lists > short.looking.lists
    lone = [
        QUEUE.estimate_usage(workers=1, messages_per_day=100, seconds_per_page=seconds)
        for seconds in (0, 95)
    ]
    assert lone[1].looking.lists <= lone[0].looking.lists


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"workers": 1.5},
        {"messages_per_day": -1},
        {"messages_per_page": 0},
        {"seconds_per_page": -1},
        {"days": 0},
    ],
)
def test_impossible_numbers_are_refused(wrong: dict[str, Any]) -> None:
    """With the name of the argument."""
    with pytest.raises(Invalid, match=next(iter(wrong))):
        QUEUE.estimate_usage(**{"workers": 1, "messages_per_day": 1, **wrong})
