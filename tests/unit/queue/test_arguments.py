"""Checks of the arguments of a queue: the error names the argument, its value and the fix."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from jobsync import Invalid, QueuePlugin
from jobsync.core.arguments import check_count, check_days, check_resource_name, check_seconds
from jobsync.queue.arguments import (
    check_cursor,
    check_finished,
    check_ids,
    check_reason,
    check_settled_once,
    check_state,
    check_states,
)
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.settings import QueueSettings, translate

WRONG_NUMBERS: list[Any] = [math.nan, math.inf, "5", None, True, [], 1j]


@pytest.mark.parametrize("value", [0, 0.5, 366 * 86_400])
def test_durations_up_to_a_year_are_accepted(value: Any) -> None:
    """In seconds, whole or not; what is stored is a plain number."""
    for given in (value, type("Derived", (type(value),), {})(value)):
        found = check_seconds("delay", given)
        assert (type(found), found) == (float, value)


@pytest.mark.parametrize("value", [-1, 1e300, *WRONG_NUMBERS])
def test_other_durations_are_refused(value: Any) -> None:
    """Whatever their type."""
    with pytest.raises(Invalid, match=r"delay must be 0 to 366 days, in seconds \(got") as refused:
        check_seconds("delay", value)
    assert refused.value.value is value
    assert str(refused.value).endswith("Pass a number of seconds.")


def test_a_duration_may_have_to_be_more_than_zero() -> None:
    """A handler without time could not run."""
    with pytest.raises(Invalid, match="timeout must be more than 0 to 366 days"):
        check_seconds("timeout", 0, is_zero_allowed=False)


@pytest.mark.parametrize(("days", "least"), [(0.001, 0), (1, 0), (1, 1), (1_000_000, 1)])
def test_a_number_of_days_is_turned_into_seconds(days: float, least: float) -> None:
    """From more than zero, or from the least that makes sense."""
    found = check_days("older_than_days", days, least=least)
    assert type(found) is float
    assert found == pytest.approx(days * 86_400)


@pytest.mark.parametrize(
    ("least", "days"),
    [
        *((0, wrong) for wrong in (0, -1, 1_000_001, *WRONG_NUMBERS)),
        *((1, wrong) for wrong in (0, 0.99, 1_000_001, *WRONG_NUMBERS)),
    ],
)
def test_other_numbers_of_days_are_refused(days: Any, least: float) -> None:
    """The error names both ends, and what was passed."""
    wanted = "1" if least else "more than 0"
    with pytest.raises(Invalid, match=rf"age must be {wanted} to 1,000,000 days \(got") as refused:
        check_days("age", days, least=least)
    assert refused.value.value is days


def test_a_number_may_have_an_upper_limit() -> None:
    """The error names both ends."""
    check_count("limit", 10, least=1)
    for value in (1, 1000):
        check_count("limit", value, least=1, most=1000)
    with pytest.raises(Invalid, match=r"limit must be 1 or more \(got 0\)"):
        check_count("limit", 0, least=1)
    with pytest.raises(Invalid, match=r"limit must be 1 to 1,000 \(got 1001\)"):
        check_count("limit", 1001, least=1, most=1000)
    check_count("limit", 2**53, least=1)
    with pytest.raises(Invalid, match=r"limit must be 1 to 9,007,199,254,740,992 \(got 1000"):
        check_count("limit", 10**400, least=1)


@pytest.mark.parametrize("name", ["a", "Z", "a1", "a_-", "a" * 100])
def test_names_of_resources_are_short_and_plain(name: str) -> None:
    """What is returned is a plain text, whatever the type that was passed."""
    for given in (name, type("Derived", (str,), {})(name)):
        found = check_resource_name("resource", given)
        assert (type(found), found) == (str, name)


@pytest.mark.parametrize(
    "name", ["", "a" * 101, "1a", "_a", "-a", "a b", "a/b", "é", "a\n", 5, None]
)
def test_other_names_of_resources_are_refused(name: Any) -> None:
    """The error has the rule."""
    with pytest.raises(Invalid, match=r"resource must be a valid resource name.*up to 99"):
        check_resource_name("resource", name)


def test_a_mistyped_state_is_recognised() -> None:
    """If it is close to one; otherwise all are listed."""
    with pytest.raises(Invalid, match=r"Did you mean waiting\?"):
        check_state("waitng")
    with pytest.raises(Invalid, match="Use one of ready, waiting"):
        check_state(5)


def test_cursors_are_those_of_their_state() -> None:
    """A cursor of an unfinished message is no position among the finished ones."""
    check_cursor("ready", "")
    check_cursor("ready", "12")
    check_cursor("dead", "1763280000.123456 01ABC")
    for state, after in (("ready", "1763280000.123456 01ABC"), ("dead", "12")):
        with pytest.raises(Invalid, match="Pass the cursor of the last message"):
            check_cursor(state, after)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "last", "beyond"),
    [
        ("ready", str(2**63 - 1), str(2**63)),
        ("claimed", "0", "-1"),
        ("waiting", "12", "1.5"),
        ("dead", "1000000000000 01ABC", "1000000000000.5 01ABC"),
        ("completed", "0 ", "0"),
        ("cancelled", "1763280000.123456 a b", "1763280000.123456 a\nb"),
        ("cancelled", "1763280000 a", "1763280000 a\0b"),
        ("completed", "1763280000.5 ä", "1763280000.5 \ud800"),
        ("blocked", "7", "\u0667"),
        ("ready", "", 12),
        ("dead", "", None),
    ],
)
def test_a_cursor_is_one_that_a_message_can_have(state: Any, last: str, beyond: Any) -> None:
    """A database would fail at others, or take them for the first page."""
    check_cursor(state, last)
    with pytest.raises(Invalid, match=f"after must be the cursor of a message that is {state}"):
        check_cursor(state, beyond)


@pytest.mark.parametrize(
    ("check", "field", "wrong"),
    [
        (check_ids, "ids", "id-1"),
        (check_ids, "ids", 5),
        (check_ids, "ids", ["id-1", "a\nb"]),
        (check_ids, "ids", [5]),
        (check_states, "states", "dead"),
        (check_states, "states", None),
        (check_states, "state", ["dead", "gone"]),
        (check_reason, "reason", 5),
        (check_reason, "reason", None),
        (check_reason, "reason", "a\x00b"),
        (check_reason, "reason", "\ud800"),
        (check_settled_once, "settlements", ["a", "b", "a"]),
        (check_finished, "state", "claimed"),
    ],
)
def test_what_is_not_such_an_argument_is_refused(
    check: Callable[[Any], object], field: str, wrong: Any
) -> None:
    """Text is not a list of letters."""
    with pytest.raises(Invalid) as refused:
        check(wrong)
    assert refused.value.field == field


def test_arguments_may_be_empty() -> None:
    """Nothing is asked for then; a reason need not be given."""
    assert (check_ids([]), check_states([])) == ([], [])
    check_settled_once([])
    check_reason("")


def test_an_id_occurs_once() -> None:
    """In the order in which they were passed, from any iterable."""
    assert check_ids(name for name in ("b", "a", "b")) == ["b", "a"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_retries": "3"}, r"max_retries must be 0 to 999,999 \(got '3'\). Pass a whole"),
        ({"max_retries": -1}, r"max_retries must be 0 to 999,999 \(got -1\)"),
        ({"max_retries": 10**7}, r"max_retries must be 0 to 999,999 \(got 10000000\)"),
        ({"max_attempts": 0}, r"max_attempts must be .* \(got 0\). Use 1 for no retry"),
        ({"max_attempts": 10**7}, r"max_attempts must be .* 1,000,000 \(got 10000000\). Use 1 for"),
        ({"max_attempts": "3"}, r"max_attempts has a wrong value: .* Use a whole number"),
        ({"timeout": "5"}, r"timeout must be more than 0 to 366 days, in seconds \(got '5'\)"),
        ({"timeout": 1e300}, "timeout must be more than 0 to 366 days"),
        ({"completed_ttl": 1e300}, "completed_ttl must be 0 to 10,000 days"),
        ({"dead_ttl": -1}, "dead_ttl must be 0 to 10,000 days"),
    ],
)
def test_wrong_options_of_a_queue_are_refused(options: dict[str, Any], message: str) -> None:
    """When it is created, by their own names."""
    with pytest.raises(Invalid, match=message):
        QueuePlugin(resource="tasks", **options)


DAYS = 86_400.0
LIMITS: list[tuple[str, list[Any], list[Any]]] = [
    ("concurrency", [1, 1000], [0, -1]),
    ("prefetch", [None, 0, 1], [-1]),
    ("visibility_timeout", [0.2, 43_200.0], [0, -1.0, 0.05, 0.199, 43_200.5]),
    ("max_attempts", [1, 1_000_000], [0, 1_000_001]),
    ("max_retries", [None, 0, 999_999], [-1, 1_000_000]),
    ("poll_interval", [0.5, 60.0], [0, -1.0]),
    ("grace", [0.0, 10_000 * DAYS], [-1.0, 10_000 * DAYS + 1]),
    ("completed_ttl", [0.0, 10_000 * DAYS], [-1.0, 10_000 * DAYS + 1]),
    ("dead_ttl", [None, 0.0, 10_000 * DAYS], [-1.0, 10_000 * DAYS + 1]),
    ("max_concurrency", [None, 1], [0, -1]),
    ("rate_limit", [None, "1/second"], ["0/second", "5", ""]),
    ("group_concurrency", [1, 7], [0]),
    ("dispatch_interval", [0.5, 60.0], [0, -1.0]),
    ("ticket_batch_size", [1, 7], [0]),
    ("order", ["fifo", "lifo", "priority"], ["newest", ""]),
]


@pytest.mark.parametrize(("option", "fine", "wrong"), LIMITS, ids=[name for name, _, _ in LIMITS])
def test_an_option_has_its_limits(option: str, fine: list[Any], wrong: list[Any]) -> None:
    """The first and the last values are accepted, the next ones refused by the option's name."""
    for value in fine:
        settings = QueueSettings(**translate({option: value}))
        if option in settings.__struct_fields__:
            assert getattr(settings, option) == value
    for value in wrong:
        with pytest.raises(Invalid, match=f"^{option} "):
            QueueSettings(**translate({option: value}))


def test_all_options_have_limits() -> None:
    """But for a switch, and for the burst of a rate."""
    named = {name for name, _, _ in LIMITS}
    assert {*QueueSettings.__struct_fields__} - named == {"auto_acknowledge", "rate_burst"}


def test_the_limits_of_a_queue_are_those_of_its_options() -> None:
    """Each of them; and without options there are none."""
    assert QueueSettings().limits == NO_LIMITS
    settings = QueueSettings(
        max_concurrency=7, rate_limit="90/minute", rate_burst=5, group_concurrency=3
    )
    assert settings.limits == QueueLimits(max_concurrency=7, rate=1.5, burst=5, group_concurrency=3)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("onMessage", "on_message"), ("onError", "on_error"), ("maxRetries", "max_retries")],
)
def test_a_name_as_in_javascript_gets_ours(name: str, meant: str) -> None:
    """Of settings, of their other names and of arguments."""
    options: dict[str, Any] = {name: print}
    with pytest.raises(Invalid, match=rf"{name} is not an option .* Did you mean {meant}\?"):
        QueuePlugin("emails", **options)


def test_an_option_that_is_like_no_other_gets_the_list_of_all() -> None:
    """Its own and those of every plugin with a session, sorted."""
    options: dict[str, Any] = {"qqqqqqqq": 1}
    with pytest.raises(Invalid) as caught:
        QueuePlugin("emails", **options)
    fix = caught.value.fix
    assert fix.startswith("use one of ")
    listed = fix.removeprefix("use one of ").split(", ")
    assert {"max_attempts", "worker_timeout"} < set(listed)
    assert listed == sorted(listed)


def test_a_decorator_with_parentheses_says_so() -> None:
    """Instead of an error about a missing argument."""
    with pytest.raises(Invalid, match=r"Write @queue\.handler, without parentheses"):
        QueuePlugin("emails").handler()  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"workers": 5}, {"concurrency": 5}),
        ({"ticket_interval": 3.0}, {"dispatch_interval": 3.0}),
        ({"workers": None, "concurrency": 5}, {"concurrency": 5}),
        ({"dispatch_interval": 2.0, "ticket_interval": None}, {"dispatch_interval": 2.0}),
        ({"workers": None}, {}),
        ({"max_retries": 0}, {"max_attempts": 1}),
        ({"max_retries": 3}, {"max_attempts": 4}),
        ({"max_retries": None}, {}),
        ({"max_retries": None, "max_attempts": 2}, {"max_attempts": 2}),
        ({"max_retries": 2, "max_attempts": None}, {"max_attempts": 3}),
        ({"max_retries": 0, "max_attempts": 2}, "max_retries cannot be passed with max_attempts"),
        ({"max_retries": 3, "max_attempts": 4}, "max_retries cannot be passed with max_attempts"),
        ({"workers": 3, "concurrency": 3}, "workers cannot be passed with concurrency"),
        ({"workers": 0, "concurrency": 3}, "workers cannot be passed with concurrency"),
        ({"ticket_interval": 0.0, "dispatch_interval": 1.0}, "cannot be passed with dispatch"),
    ],
)
def test_an_option_is_passed_under_one_of_its_names(options: Any, expected: Any) -> None:
    """Also if one of the values is zero; one that is None was not passed."""
    if isinstance(expected, dict):
        assert translate(options) == expected
    else:
        with pytest.raises(Invalid, match=expected):
            translate(options)
