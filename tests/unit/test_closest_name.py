"""A mistyped name is answered with the one that was meant."""

import pytest

from jobsync.errors import closest_name

KNOWN = ("heartbeat_interval", "worker_timeout", "namespace")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("heartbeat_intervall", "heartbeat_interval"),
        ("hartbeat_interval", "heartbeat_interval"),
        ("workertimeout", "worker_timeout"),
        ("namespace", "namespace"),
    ],
)
def test_a_near_name_is_found(typed: str, meant: str) -> None:
    """A slip of the keyboard leads to the name that was meant."""
    assert closest_name(typed, KNOWN) == meant


@pytest.mark.parametrize("typed", ["zebra", "", "x"])
def test_a_far_name_finds_nothing(typed: str) -> None:
    """No guess is better than a wild one."""
    assert closest_name(typed, KNOWN) is None


def test_the_nearest_of_several_wins() -> None:
    """Of two near names the nearer one is given."""
    assert closest_name("$gtt", ("$lte", "$gte", "$gt")) == "$gt"


def test_names_may_come_from_an_iterator() -> None:
    """Known names can be any iterable, read once."""
    assert closest_name("namespac", iter(KNOWN)) == "namespace"


def test_nothing_known_finds_nothing() -> None:
    """Without known names there is no guess."""
    assert closest_name("anything", ()) is None
