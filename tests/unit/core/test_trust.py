"""Trust windows: who may believe what, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobsync import Invalid
from jobsync.core.clock import Mono
from jobsync.core.trust import Timing, Watch

TIMING = Timing(beat=5, timeout=15)


@pytest.mark.parametrize(
    ("beat", "timeout", "message"),
    [
        (
            30_000,
            90_000,
            r"heartbeat_interval durations are seconds \(got 30000\)\. Did you mean 30\?",
        ),
        (5, 14, r"worker_timeout is less than three beats of 5 s \(got 14\)\. Give at least 15"),
        (0, 15, "heartbeat_interval .*got 0"),
        (0.05, 0.2, "leaves less than two beats after the margin"),
    ],
)
def test_timings_that_do_not_fit_are_refused(beat: float, timeout: float, message: str) -> None:
    """The error names the number to change."""
    with pytest.raises(Invalid, match=message):
        Timing(beat=beat, timeout=timeout)


@given(
    st.floats(0.5, 1000),
    st.floats(0.95, 1.05),
    st.floats(0.95, 1.05),
    st.floats(0, 100),
)
def test_trust_ends_before_death(
    beat: float, holder_rate: float, observer_rate: float, delay: float
) -> None:
    """For any clock rates within 5 % and any delay, the holder stops first."""
    timing = Timing(beat=beat, timeout=3 * beat)
    trusted_for = timing.trusted_until(Mono(0)).seconds / holder_rate
    dead_after = delay + timing.timeout / observer_rate
    assert trusted_for < dead_after


def test_a_version_expires_only_after_the_whole_timeout() -> None:
    """Looks at every beat that show one version add up; a new version starts anew."""
    watch = Watch("a", Mono(0), Mono(0))
    for at in (5, 10, 14.9):
        watch = watch.look("a", Mono(at), TIMING)
        assert not watch.expired(TIMING.timeout)
    assert watch.look("a", Mono(15), TIMING).expired(TIMING.timeout)
    assert not watch.look("b", Mono(15), TIMING).expired(TIMING.timeout)


def test_absence_is_a_version_like_any_other() -> None:
    """What is not there is watched for the whole timeout too."""
    watch = Watch(None, Mono(0), Mono(0))
    for at in (8, 15):
        watch = watch.look(None, Mono(at), TIMING)
    assert watch.expired(TIMING.timeout)


def test_an_observer_that_was_blind_starts_again() -> None:
    """An outage of the store kills nobody."""
    watch = Watch("a", Mono(0), Mono(0)).look("a", Mono(600), TIMING)
    assert not watch.expired(TIMING.timeout)
    assert watch.since == Mono(600)
