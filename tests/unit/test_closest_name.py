"""The nearest known name to a mistyped one."""

import pytest

from jobsync.errors import closest_name

KNOWN = ("heartbeat_interval", "worker_timeout", "namespace")


@pytest.mark.parametrize(
    ("typed", "intended"),
    [
        ("heartbeat_intervall", "heartbeat_interval"),
        ("hartbeat_interval", "heartbeat_interval"),
        ("workertimeout", "worker_timeout"),
        ("namespace", "namespace"),
    ],
)
def test_a_near_name_is_found(typed: str, intended: str) -> None:
    """A typing error leads to the intended name."""
    assert closest_name(typed, KNOWN) == intended


@pytest.mark.parametrize("typed", ["zebra", "", "x"])
def test_a_far_name_finds_nothing(typed: str) -> None:
    """A dissimilar name gets no suggestion."""
    assert closest_name(typed, KNOWN) is None


def test_the_nearest_of_several_wins() -> None:
    """The most similar of several names is suggested."""
    assert closest_name("$gtt", ("$lte", "$gte", "$gt")) == "$gt"


def test_names_may_come_from_an_iterator() -> None:
    """Known names can be any iterable, read once."""
    assert closest_name("namespac", iter(KNOWN)) == "namespace"


def test_nothing_known_finds_nothing() -> None:
    """Without known names there is no suggestion."""
    assert closest_name("anything", ()) is None


def test_a_name_in_camel_case_finds_its_own_in_snake_case() -> None:
    """Before any that is spelled more alike."""
    assert closest_name("onMessage", ("message", "on_message", "onmessage")) == "on_message"
    assert closest_name("maxEpochDuration", ("max_epoch_duration",)) == "max_epoch_duration"
