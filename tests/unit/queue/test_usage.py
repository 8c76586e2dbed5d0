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
        {"workers": True},
        {"messages_per_day": -1},
        {"messages_per_day": 1.1e12},
        {"messages_per_day": float("nan")},
        {"messages_per_day": True},
        {"messages_per_day": "5"},
        {"messages_per_page": 0},
        {"messages_per_page": -1},
        {"seconds_per_page": -1},
        {"days": 0},
        {"days": None},
    ],
)
def test_impossible_numbers_are_refused(wrong: dict[str, Any]) -> None:
    """With the name of the argument."""
    with pytest.raises(Invalid, match=next(iter(wrong))):
        QUEUE.estimate_usage(**{"workers": 1, "messages_per_day": 1, **wrong})


ESTIMATES: list[tuple[int, float, float, dict[str, RequestCounts]]] = [
    (
        1,
        0,
        0,
        {
            "sessions": RequestCounts(puts=3_168, gets=1_065.6, lists=3_024),
            "bell": RequestCounts(gets=86_400 / 4.75),
            "looking": RequestCounts(lists=480 + 48),
            "pages": RequestCounts(),
        },
    ),
    (
        2,
        100,
        25,
        {
            "sessions": RequestCounts(puts=2 * 2_880 + 288, gets=4_089.6, lists=3_024),
            "bell": RequestCounts(puts=100, gets=2 * 86_400 / 4.75),
            "looking": RequestCounts(
                gets=2 * 100 * 2, lists=2 * 200 + 2 * 250 + 1440 - 200 - 250 + 432 + 288
            ),
            "pages": RequestCounts(puts=500, gets=300),
        },
    ),
    (
        3,
        100,
        25,
        {
            "sessions": RequestCounts(puts=3 * 2_880 + 288, gets=7_113.6, lists=3_024),
            "bell": RequestCounts(puts=100, gets=3 * 86_400 / 4.75),
            "looking": RequestCounts(
                puts=200,
                gets=2 * 200 + 2 * 100 * 2,
                lists=200 + 2 * 100 + 2 * 250 + 1440 - 200 - 250 + 432 + 2 * 24,
            ),
            "pages": RequestCounts(puts=500, gets=300),
        },
    ),
    (
        1,
        1e6,
        0,
        {
            "sessions": RequestCounts(puts=3_168, gets=1_065.6, lists=3_024),
            "bell": RequestCounts(puts=43_200, gets=86_400 / 4.75),
            "looking": RequestCounts(lists=2 * 86_400 / 4.75 + 432),
            "pages": RequestCounts(puts=3e6, gets=3e6),
        },
    ),
]
"""For workers, messages in a day and seconds of a page: the requests of each part in a day."""


@pytest.mark.parametrize("days", [1.0, 30.0])
@pytest.mark.parametrize(("workers", "messages", "seconds", "parts"), ESTIMATES)
def test_each_part_of_an_estimate_has_its_requests(
    workers: int, messages: float, seconds: float, parts: dict[str, RequestCounts], days: float
) -> None:
    """By the guide's formula: two workers watch claims, and for three of them there is a ticket."""
    found = QUEUE.estimate_usage(
        workers=workers, messages_per_day=messages, seconds_per_page=seconds, days=days
    )
    assert found.days == days
    for name, counts in parts.items():
        part = getattr(found, name)
        for kind in RequestCounts.__struct_fields__:
            expected = getattr(counts, kind) * days
            assert getattr(part, kind) == pytest.approx(expected), (name, kind)
            total = sum(getattr(getattr(found, each), kind) for each in parts)
            assert getattr(found.total, kind) == pytest.approx(total)
