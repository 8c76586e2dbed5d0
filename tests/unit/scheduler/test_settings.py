"""The options of schedulers and jobs: their defaults, and which values are accepted."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from jobsync.core.job_state import JobDefinition
from jobsync.errors import Invalid
from jobsync.scheduler.job_message import JobMessage
from jobsync.scheduler.settings import (
    SchedulerSettings,
    check_changes,
    check_new_name,
    check_plain_text,
    merge_options,
    parse_job,
    read_dict,
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
    "grace": (30.0, [0.0, 10_000.0 * DAY], [-1.0, 10_001.0 * DAY]),
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


@pytest.mark.parametrize(("default", "stored"), [(0, 3), (3, 3), (5, 5)])
@pytest.mark.parametrize("own", [None, 0, 1, 9])
@pytest.mark.parametrize("namespace", [None, "eu"])
def test_a_job_that_enqueues_is_repeated_three_times_or_as_often_as_others(
    default: int, stored: int, own: int | None, namespace: str | None
) -> None:
    """Unless it says how often; its queue is known by its full name, and is no option."""
    settings = SchedulerSettings(default_retries=default)
    message = {"resource": "reports", "data": {"size": 3}, "namespace": namespace, "delay": 5}
    given = {"schedule": "@daily", "enqueue": message} | ({} if own is None else {"retries": own})
    found = parse_job("job", given, settings)
    assert found.definition.retries == (stored if own is None else own)
    assert found.definition.queue == ("eu/reports" if namespace else "reports")
    assert found.enqueue == JobMessage(
        resource="reports", data={"size": 3}, namespace=namespace, options={"delay": 5}
    )
    assert parse(settings, retries=1).queue == JobDefinition(schedule="@daily").queue
    for wrong in ({**given, "action": print}, {**given, "queue": "reports"}):
        with pytest.raises(Invalid, match=r"^jobs\.job\.(enqueue|queue) "):
            parse_job("job", wrong, settings)


class Text(str):
    """A text with more than a store keeps."""

    __slots__ = ("more",)

    def __str__(self) -> str:
        return "something else"


class Number(float):
    """A number with more than a store keeps."""

    __slots__ = ("more",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", Text("@hourly")),
        ("timezone", Text("Europe/Berlin")),
        ("description", Text("Cleans up.")),
        ("overlap", Text("queue")),
        ("misfire", Text("all")),
        ("timeout", Number(5.5)),
        ("jitter", Number(2.5)),
    ],
)
def test_an_option_is_stored_as_plain_text_or_as_a_plain_number(field: str, value: Any) -> None:
    """Whatever class it has: what is compared with it later was read from a store."""
    plain = {Text: str, Number: float}[type(value)]
    for found in (getattr(parse(**{field: value}), field), check_changes("job", {field: value})):
        kept = found[field] if isinstance(found, dict) else found
        assert type(kept) is plain
        assert kept == plain.__add__(value, plain())


def test_a_name_is_plain_text() -> None:
    """Whatever class it has, and whatever that says of itself."""
    for found in (check_new_name(Text("job")), check_plain_text("by", Text("job"))):
        assert type(found) is str
        assert found == "job"
    for wrong in (5, None, b"job", "\ud800"):
        with pytest.raises(Invalid, match=r"^by "):
            check_plain_text("by", wrong)


def test_a_dict_is_read_once() -> None:
    """Who passes it may change it afterwards: a job keeps what it was given."""
    given = {"size": 3}
    job = {"schedule": "@daily", "action": print, "context": given}
    found = (read_dict("context", given), parse_job("job", job, SETTINGS).context)
    given["size"] = 4
    assert found == ({"size": 3}, {"size": 3})
    assert read_dict("context", None) == {}


class Broken(dict[str, Any]):
    """A dict that cannot be read."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(size=3)
        self.error = error

    def keys(self) -> Any:
        """Raise the error."""
        raise self.error

    __iter__ = keys


@pytest.mark.parametrize("error", [LookupError("gone"), StopIteration()])
def test_a_dict_that_cannot_be_read_is_refused(error: BaseException) -> None:
    """Whatever reading it raises, unless that is meant for who reads it."""
    with pytest.raises(Invalid, match=r"^context cannot be read") as raised:
        read_dict("context", Broken(error))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_a_dict_swallows_no_cancellation(kind: type[BaseException]) -> None:
    """Nor the end of the program: neither says anything of the dict."""
    error = kind()
    with pytest.raises(kind) as raised:
        read_dict("context", Broken(error))
    assert raised.value is error


@pytest.mark.parametrize(
    ("option", "fix"),
    [("retrys", "did you mean retries"), ("qqqqqqqq", "use one of schedule")],
)
def test_an_option_that_is_not_one_gets_a_suggestion(option: str, fix: str) -> None:
    """Where the code defines a job and where an operator changes it."""
    for call in (lambda: parse(SETTINGS, **{option: 1}), lambda: check_changes("job", {option: 1})):
        with pytest.raises(Invalid) as raised:
            call()
        assert raised.value.field == f"jobs.job.{option}"
        assert raised.value.fix.startswith(fix)
