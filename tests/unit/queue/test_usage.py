"""The estimate of what a queue on S3 costs."""

from typing import Any

import pytest

from jobsync import Invalid, QueuePlugin
from jobsync.queue.usage import RequestCounts, estimate_usage

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


PLAIN: dict[str, float] = {
    "messages_per_day": 0,
    "messages_per_page": 1,
    "seconds_per_page": 0,
    "heartbeat": 30.0,
    "visibility": 30.0,
    "days": 1,
}
BEATS: list[tuple[int, float, RequestCounts]] = [
    (1, 10, RequestCounts(puts=8_640 + 288, gets=1_065.6, lists=9_072)),
    (1, 60, RequestCounts(puts=1_440 + 288, gets=1_065.6, lists=1_512)),
    (3, 10, RequestCounts(puts=3 * 8_640 + 288, gets=1_065.6 + 2 * 9_072, lists=9_072)),
]


@pytest.mark.parametrize(("workers", "heartbeat", "sessions"), BEATS)
def test_sessions_cost_by_their_heartbeat(
    workers: int, heartbeat: float, sessions: RequestCounts
) -> None:
    """Which is that of the queue's own coordination; the visibility timeout has no part in it."""
    for visibility in (30.0, 300.0):
        options: Any = {**PLAIN, "heartbeat": heartbeat, "visibility": visibility}
        found = estimate_usage(workers=workers, **options).sessions
        assert (found.puts, found.gets, found.lists) == pytest.approx(
            (sessions.puts, sessions.gets, sessions.lists)
        )


@pytest.mark.parametrize(
    ("seconds", "visibility", "renewals"),
    [(9, 30, 0), (10, 30, 1), (19, 30, 1), (20, 30, 2), (19, 60, 0), (20, 60, 1), (100, 3, 100)],
)
def test_a_page_is_renewed_each_third_of_the_visibility_timeout(
    seconds: float, visibility: float, renewals: int
) -> None:
    """While its messages are handled; three writes and three reads come with each page besides."""
    options: Any = {**PLAIN, "messages_per_day": 50, "messages_per_page": 5, "heartbeat": 7.0}
    options |= {"seconds_per_page": seconds, "visibility": visibility}
    found = estimate_usage(workers=1, **options).pages
    assert (found.puts, found.gets, found.lists) == (10 * (3 + renewals), 30, 0)


@pytest.mark.parametrize("visibility", [30.0, 90.0])
@pytest.mark.parametrize("seconds", [0.0, 864.0, 8_640.0, 86_400.0])
def test_claims_are_watched_at_most_all_day(seconds: float, visibility: float) -> None:
    """By two workers, of a hundred pages: they list each third of the visibility timeout."""
    options: Any = {**PLAIN, "messages_per_day": 100, "visibility": visibility}
    alone, watched = (
        [
            estimate_usage(workers=workers, **{**options, "seconds_per_page": each}).looking
            for each in (0.0, seconds)
        ]
        for workers in (1, 2)
    )
    interval = visibility / 3
    watching = min(100 * seconds, 86_400.0) / interval
    looks = 2 * 100
    # A listing that is made for another reason is one less by the clock.
    for (before, after), own in ((alone, 0), (watched, 2)):
        by_clock = max(0.0, 1_440 - looks - watching) - (1_440 - looks)
        assert after.lists - before.lists == pytest.approx(own * watching + by_clock)
        assert after.gets - before.gets == own * 100 * (seconds // interval)


async def test_the_estimate_of_a_queue_has_its_own_settings() -> None:
    """Its visibility timeout and its heartbeat, which differ from the defaults."""
    queue = QueuePlugin(resource="tasks", visibility_timeout=90.0, heartbeat_interval=12.0)
    found = queue.estimate_usage(workers=2, messages_per_day=10, seconds_per_page=61, days=1)
    assert found.pages.puts == 10 * (3 + 2)
    assert found.sessions.puts == pytest.approx(2 * 86_400 / 12 + 288)


@pytest.mark.parametrize(
    ("name", "largest"),
    [("messages_per_day", 1e12), ("messages_per_page", 1e12), ("days", 1e12)],
)
def test_the_largest_numbers_are_estimated(name: str, largest: float) -> None:
    """And a page may be a part of one: messages are an average."""
    options: Any = {"workers": 1, "messages_per_day": 1, name: largest}
    assert QUEUE.estimate_usage(**options).dollars > 0
    found = QUEUE.estimate_usage(workers=1, messages_per_day=1, messages_per_page=4, days=1)
    assert found.pages.gets == pytest.approx(0.75)
