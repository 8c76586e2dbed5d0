"""How long completed messages are remembered: who decides it, and from when on."""

from types import SimpleNamespace
from typing import Any

import pytest
from chance import FakeClock

from jobsync.queue.completed_ttl import CompletedTtl
from jobsync.queue.settings import LONGEST_RETENTION

OWN = 300.0


def build_database(*ttls: float | None) -> Any:
    """Return a database whose plugins say so."""
    plugins = {
        f"plugin-{number}": SimpleNamespace(completed_message_ttl=ttl)
        for number, ttl in enumerate(ttls)
    }
    return SimpleNamespace(components=SimpleNamespace(clock=FakeClock()), plugins=plugins)


@pytest.mark.parametrize(
    ("ttls", "found"),
    [
        ((), OWN),
        ((None, None), OWN),
        ((0.0,), 0.0),
        ((50.0, None), 50.0),
        ((50.0, 700.0, 60.0), 700.0),
        ((700.0, 50.0), 700.0),
        ((LONGEST_RETENTION + 1, 50.0), LONGEST_RETENTION),
    ],
)
def test_the_longest_time_that_a_plugin_says_counts(
    ttls: tuple[float | None, ...], found: float
) -> None:
    """Unless the queue's own was passed or configured."""
    database = build_database(*ttls)
    assert CompletedTtl(OWN, is_explicit=False).find(database) == found
    assert CompletedTtl(OWN, is_explicit=True).find(database) == OWN


def test_without_a_database_its_own_time_counts_and_nothing_is_decided() -> None:
    """The queue is not started."""
    for is_explicit in (False, True):
        ttl = CompletedTtl(OWN, is_explicit=is_explicit)
        assert ttl.find(None) == OWN
        assert ttl.find_decided() is None


@pytest.mark.parametrize("is_again", [False, True])
def test_plugins_have_a_few_seconds_to_decide(*, is_again: bool) -> None:
    """After each start: what was kept so far is not removed before they can say so."""
    ttl, database = CompletedTtl(OWN, is_explicit=False), build_database()
    clock = database.components.clock
    ttl.start(database)
    if is_again:
        clock.mono_seconds += 100.0
        ttl.start(database)
    assert ttl.find_decided() is None
    clock.mono_seconds += 3.9
    assert ttl.find_decided() is None
    clock.mono_seconds += 0.1
    assert ttl.find_decided() == OWN
    database.plugins["late"] = SimpleNamespace(completed_message_ttl=700.0)
    assert ttl.find_decided() == 700.0


@pytest.mark.parametrize(("is_explicit", "ttls", "found"), [(True, (), OWN), (False, (9.0,), 9.0)])
def test_what_is_known_is_decided_at_once(
    *, is_explicit: bool, ttls: tuple[float, ...], found: float
) -> None:
    """Nobody is waited for."""
    ttl = CompletedTtl(OWN, is_explicit=is_explicit)
    ttl.start(build_database(*ttls))
    assert ttl.find_decided() == found
