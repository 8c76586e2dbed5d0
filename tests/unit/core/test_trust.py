"""Trust windows: how long a session may trust itself, and when it may be declared dead."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Invalid
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch, check_duration

TIMING = Timing(heartbeat=5, timeout=15)


@pytest.mark.parametrize(
    ("heartbeat", "timeout", "message"),
    [
        (
            30_000,
            90_000,
            r"heartbeat_interval must be a number of seconds.*got 30000\)\. Did you mean 30\?",
        ),
        (
            5,
            14,
            r"worker_timeout must be at least three heartbeats of 5 s \(got 14\)\. Use 15 or more",
        ),
        (0, 15, r"heartbeat_interval must .*more than 0.*got 0"),
        (1201, 3600, r"heartbeat_interval must .*at most 1200 \(got 1201\)"),
        (1500, 3600, r"heartbeat_interval must .*at most 1200 \(got 1500\)\. Did you mean 1\.5\?"),
        (1200, 3601, r"worker_timeout must .*at most 3600 \(got 3601\)"),
        (0.05, 0.2, "must leave two heartbeats after the margin"),
    ],
)
def test_timings_that_do_not_fit_are_refused(
    heartbeat: float, timeout: float, message: str
) -> None:
    """The error names the number to change, and never suggests what is refused as well."""
    with pytest.raises(Invalid, match=message):
        Timing(heartbeat=heartbeat, timeout=timeout)


@pytest.mark.parametrize(
    ("value", "least", "is_valid"),
    [
        (None, None, True),
        (None, 0.0, True),
        (0.0, None, False),
        (0.0, 0.0, True),
        (-0.5, 0.0, False),
        (0.001, None, True),
        (3600.0, None, True),
        (3600.0, 0.0, True),
        (3600.001, None, False),
        (3600.001, 0.0, False),
        (math.nan, None, False),
        (math.nan, 0.0, False),
    ],
)
def test_a_duration_is_at_most_an_hour(
    value: float | None, least: float | None, *, is_valid: bool
) -> None:
    """Exactly an hour is one; nothing is one only where that is said."""
    if is_valid:
        check_duration("work_interval", value, least=least)
    else:
        with pytest.raises(Invalid, match="work_interval"):
            check_duration("work_interval", value, least=least)


@pytest.mark.parametrize("heartbeat", [0.01, 0.05, 0.1, 0.15, 0.3, 0.7, 1.1])
def test_what_the_error_of_a_timeout_suggests_is_accepted(heartbeat: float) -> None:
    """Found: 0.3 was refused with the fix to use 0.3."""
    least = 3 * heartbeat - 0.001
    while True:
        try:
            Timing(heartbeat=heartbeat, timeout=least)
            break
        except Invalid as error:
            (suggested,) = re.findall(r"Use (\S+) or more", str(error))
            assert float(suggested) > least
            least = float(suggested)


def test_the_longest_and_the_tightest_timings_are_accepted() -> None:
    """Three heartbeats, an hour, and two heartbeats with the margin, to the digit."""
    for heartbeat, timeout in [(1200, 3600), (5, 15), (0.125, 0.5), (1.0, 3600)]:
        assert Timing(heartbeat=heartbeat, timeout=timeout).timeout == timeout


@given(
    st.floats(0.5, 1000),
    st.floats(0.95, 1.05),
    st.floats(0.95, 1.05),
    st.floats(0, 100),
)
def test_trust_ends_before_death(
    heartbeat: float, session_rate: float, observer_rate: float, delay: float
) -> None:
    """For any clock rates within 5 % and any delay, the session stops first."""
    timing = Timing(heartbeat=heartbeat, timeout=3 * heartbeat)
    trusted_for = timing.trusted_until(Mono(0)).seconds / session_rate
    dead_after = delay + timing.timeout / observer_rate
    assert trusted_for < dead_after


def test_a_version_expires_only_after_the_full_timeout() -> None:
    """Reads at every heartbeat that show one version add up; a new version starts anew."""
    watch = Watch("a", Mono(0), Mono(0))
    for at in (5, 10, 14.9):
        watch = watch.observe("a", Mono(at), TIMING)
        assert not watch.has_expired(TIMING.timeout)
    assert watch.observe("a", Mono(15), TIMING).has_expired(TIMING.timeout)
    assert not watch.observe("b", Mono(15), TIMING).has_expired(TIMING.timeout)


def test_absence_is_a_version_like_any_other() -> None:
    """An absent session is watched for the full timeout too."""
    watch = Watch(None, Mono(0), Mono(0))
    for at in (8, 15):
        watch = watch.observe(None, Mono(at), TIMING)
    assert watch.has_expired(TIMING.timeout)


@pytest.mark.parametrize("gap", [0.1, 9.9, 10])
def test_two_heartbeats_without_a_read_are_no_gap(gap: float) -> None:
    """One that is lost costs nothing: what was seen before it counts."""
    watch = Watch("a", Mono(0), Mono(0)).observe("a", Mono(gap), TIMING)
    assert watch == Watch("a", Mono(0), Mono(gap))
    assert watch.observe("a", Mono(gap + 9), TIMING).has_expired(gap + 9)


@pytest.mark.parametrize("outage", [10.1, 12, 14.9, 15, 20, 600])
@pytest.mark.parametrize("before", [0, 4, 14])
def test_an_observer_that_was_blind_starts_again(before: float, outage: float) -> None:
    """An outage of the store makes no session dead, however short it is and whenever it begins."""
    watch = Watch("a", Mono(0), Mono(0))
    for at in range(0, int(before) + 1, 2):
        watch = watch.observe("a", Mono(at), TIMING)
    end = watch.last_read + outage
    watch = watch.observe("a", end, TIMING)
    assert not watch.has_expired(TIMING.timeout)
    assert watch.since == end
