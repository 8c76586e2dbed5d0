"""The options of schedulers and jobs: their defaults, and which values are accepted."""

from datetime import timedelta
from typing import Any

import pytest

from jobsync.core.job_state import JobDefinition
from jobsync.errors import Invalid
from jobsync.scheduler.settings import (
    SchedulerSettings,
    check_changes,
    check_new_name,
    merge_options,
    parse_job,
)

DAY = 86_400
SETTINGS = SchedulerSettings()

JOB_OPTIONS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "timezone": ("UTC", ["Europe/Berlin"], ["Europe/Berlim", "", 5]),
    "description": ("", ["Cleans up."], [5, "\ud800"]),
    "enabled": (True, [False], [0, "no"]),
    "retries": (0, [1, 1000], [-1, 1001, 1.5, "1", True]),
    "timeout": (60.0, [0.001, 366 * DAY, None, timedelta(minutes=2)], [0, -1, 366 * DAY + 1, "5"]),
    "overlap": ("skip", ["queue", "allow"], ["wait", 1]),
    "misfire": ("last", ["skip", "all"], ["first", 1]),
    "max_catch_up": (10, [1, 1000], [0, 1001, 2.0]),
    "jitter": (0.0, [1, DAY, timedelta(hours=1)], [-0.1, DAY + 1, "1", timedelta(days=2)]),
    "run_on_start": (False, [True], [1, "yes"]),
}
"""By name: the default, values that are accepted, and values that are not."""

SCHEDULER_OPTIONS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "timezone": ("UTC", ["Asia/Tokyo"], ["Asia/Tokio"]),
    "max_concurrent_jobs": (5, [1, 10_000], [0, 10_001]),
    "default_timeout": (60.0, [None, 0.5, 366.0 * DAY], [0.0, -1.0, 367.0 * DAY]),
    "default_retries": (0, [1000], [-1, 1001]),
    "history_retention": (30.0 * DAY, [0.0, 10_000.0 * DAY], [-1.0, 10_001.0 * DAY]),
    "history_limit": (1000, [1, 1_000_000], [0, 1_000_001]),
    "grace": (30.0, [0.0], [-1.0]),
}


def parse(settings: SchedulerSettings = SETTINGS, **options: Any) -> JobDefinition:
    """Return the definition of a job with some options."""
    job = {"schedule": "@daily", "action": print, **options}
    return parse_job("job", job, settings).definition


def to_seconds(value: Any) -> Any:
    """Return a duration in seconds, and anything else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def test_all_options_are_tested() -> None:
    """A new one has to say what it accepts, too."""
    # The queue of a job follows from its option `enqueue`.
    assert {*JOB_OPTIONS, "schedule", "queue"} == {*JobDefinition.__struct_fields__}
    assert SCHEDULER_OPTIONS.keys() == {*SchedulerSettings.__struct_fields__}


@pytest.mark.parametrize("field", JOB_OPTIONS)
def test_an_option_of_a_job_has_bounds(field: str) -> None:
    """The same where the code defines it and where an operator changes it."""
    default, accepted, refused = JOB_OPTIONS[field]
    assert getattr(parse(), field) == default
    for value in accepted:
        assert getattr(parse(**{field: value}), field) == to_seconds(value)
        assert check_changes("job", {field: value}) == {field: to_seconds(value)}
    for value in refused:
        for call in (lambda value=value: parse(**{field: value}), None):
            with pytest.raises(Invalid):
                call() if call else check_changes("job", {field: value})


@pytest.mark.parametrize("field", SCHEDULER_OPTIONS)
def test_an_option_of_a_scheduler_has_bounds(field: str) -> None:
    """From the least to the most that is useful."""
    default, accepted, refused = SCHEDULER_OPTIONS[field]
    assert getattr(SETTINGS, field) == default
    for value in accepted:
        assert getattr(SchedulerSettings(**{field: value}), field) == value
    for value in refused:
        with pytest.raises(Invalid):
            SchedulerSettings(**{field: value})


def test_a_job_has_the_defaults_of_its_scheduler() -> None:
    """Unless it says otherwise, also that it has no timeout."""
    settings = SchedulerSettings(timezone="Asia/Tokyo", default_timeout=5.0, default_retries=3)
    found = parse(settings)
    assert (found.timezone, found.timeout, found.retries) == ("Asia/Tokyo", 5.0, 3)
    own = parse(settings, timezone="UTC", timeout=None, retries=0)
    assert (own.timezone, own.timeout, own.retries) == ("UTC", None, 0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "action"),
        ({"action": print}, "schedule"),
        ({"action": print, "schedule": "0 3 * *"}, "schedule"),
        ({"action": print, "schedule": 5}, "schedule"),
        ({"action": print, "schedule": "@daily", "backoff": 5}, "backoff"),
        ({"action": print, "schedule": "@daily", "context": 5}, "context"),
        ({"action": print, "schedule": "@daily", "retrys": 5}, "retrys"),
    ],
)
def test_a_job_that_cannot_run_is_refused(options: dict[str, Any], field: str) -> None:
    """The error names the option."""
    with pytest.raises(Invalid) as raised:
        parse_job("job", options, SETTINGS)
    assert field in raised.value.field
    if field not in {"retrys", "schedule"}:
        with pytest.raises(Invalid):
            # They are not stored, so that nobody can change them.
            check_changes("job", {field: options.get(field)})
    with pytest.raises(Invalid, match="changes are missing"):
        check_changes("job", {})


@pytest.mark.parametrize(
    ("name", "is_accepted"),
    [
        ("a" * 150, True),
        ("a" * 151, False),
        # As they are stored: each of these letters takes six bytes.
        ("ä" * 25, True),
        ("ä" * 26, False),
        ("a b", True),
        ("a\nb", False),
        ("", False),
        (5, False),
        (None, False),
    ],
)
def test_a_name_has_at_most_150_bytes_as_it_is_stored(name: Any, *, is_accepted: bool) -> None:
    """So that it fits into a key, whatever its letters are."""
    if is_accepted:
        assert check_new_name(name) == name
    else:
        with pytest.raises(Invalid, match=r"^name must"):
            check_new_name(name)


@pytest.mark.parametrize(
    ("options", "more", "merged"),
    [
        (None, {}, {}),
        (None, {"retries": 1}, {"retries": 1}),
        ({"retries": 1}, {}, {"retries": 1}),
        ({"retries": 1, "timeout": 5}, {"retries": 2}, {"retries": 2, "timeout": 5}),
        ({}, {"retries": 2}, {"retries": 2}),
        ("retries", {"retries": 2}, "retries"),
    ],
)
def test_what_is_passed_by_name_holds(options: object, more: dict[str, Any], merged: Any) -> None:
    """Above what is in the dict; what is no dict is refused later, as it is."""
    assert merge_options(options, more) == merged
