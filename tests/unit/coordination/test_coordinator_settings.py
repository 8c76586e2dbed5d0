"""Heartbeats and timeouts by what was passed, and by what requests cost."""

import itertools

import pytest
from fleets import BilledStore

from jobsync import CoordinatorSettings, Invalid
from jobsync.core.trust import Timing
from jobsync.stores.memory import MemoryStore

BEATS = (None, 0.5, 5.0, 20.0)
TIMEOUTS = (None, 1.5, 15.0, 60.0, 90.0, 600.0)


@pytest.mark.parametrize(("beat", "timeout"), [*itertools.product(BEATS, TIMEOUTS)])
@pytest.mark.parametrize(("store", "default"), [(MemoryStore, 5.0), (BilledStore, 30.0)])
def test_what_was_not_passed_follows_from_the_rest(
    beat: float | None, timeout: float | None, store: type[MemoryStore], default: float
) -> None:
    """A heartbeat is never rarer than by default, unless it was passed; a timeout is three."""
    if beat is not None and timeout is not None and timeout < 3 * beat:
        return
    settings = CoordinatorSettings(heartbeat_interval=beat, worker_timeout=timeout)
    timing = settings.timing(store())
    chosen = beat or min(default, (timeout or 3600.0) / 3)
    assert timing == Timing(heartbeat=chosen, timeout=timeout or 3 * chosen)
    waits = settings.for_store(store(), timing)
    wait = timing.heartbeat if store is BilledStore else 0.0
    assert waits.cold_start_observation_window == wait / 2
    assert waits.cold_start_preparation_delay == wait / 6


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_what_was_passed_counts_on_every_store(store: type[MemoryStore]) -> None:
    """Also a wait of 0."""
    for window, delay in itertools.product((0.0, 1.0), repeat=2):
        settings = CoordinatorSettings(
            cold_start_observation_window=window,
            cold_start_preparation_delay=delay,
            skip_cold_start=bool(window),
            min_epoch_duration=delay,
            max_epoch_duration=7.0,
        )
        chosen = settings.for_store(store(), settings.timing(store()))
        assert chosen.cold_start_observation_window == window
        assert chosen.cold_start_preparation_delay == delay
        assert chosen.skip_cold_start is bool(window)
        assert (chosen.min_epoch_duration, chosen.max_epoch_duration) == (delay, 7.0)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("cold_start_observation_window", wrong) for wrong in (-0.1, 3600.1, 5000)),
        *(("cold_start_preparation_delay", wrong) for wrong in (-0.1, 3600.1, 5000)),
        *(("coordinator_work_interval", wrong) for wrong in (-0.1, 0.0, 3600.1, 5000)),
        *(("heartbeat_interval", wrong) for wrong in (-0.1, 0.0, 1200.1, 5000)),
        *(("worker_timeout", wrong) for wrong in (-0.1, 0.0, 3600.1, 15_000)),
    ],
)
def test_each_duration_is_checked_though_no_other_was_passed(field: str, wrong: float) -> None:
    """Found: a timeout of 0 was refused as a wrong heartbeat, which nobody had passed."""
    with pytest.raises(Invalid, match="must be a number of seconds") as caught:
        CoordinatorSettings(**{field: wrong})  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == (field, wrong)
    hour = {"heartbeat_interval": 1200.0}.get(field, 3600.0)
    assert getattr(CoordinatorSettings(**{field: hour}), field) == hour  # type: ignore[arg-type]


def test_a_mandate_in_milliseconds_is_refused() -> None:
    """The error has the number of seconds that was meant."""
    with pytest.raises(Invalid, match=r"max_epoch_duration must be .* seconds.* mean 300\?"):
        CoordinatorSettings(max_epoch_duration=300_000)
    assert CoordinatorSettings(max_epoch_duration=86_400).max_epoch_duration == 86_400


def test_the_shortest_mandate_may_be_as_long_as_the_longest() -> None:
    """Or none; neither negative nor longer."""
    for least, most in ((0.0, 0.0), (0.0, 7.0), (7.0, 7.0), (86_400.0, 86_400.0)):
        settings = CoordinatorSettings(min_epoch_duration=least, max_epoch_duration=most)
        assert (settings.min_epoch_duration, settings.max_epoch_duration) == (least, most)
    for least, most in ((-1.0, 7.0), (7.1, 7.0)):
        with pytest.raises(Invalid, match=r"min_epoch_duration must be between 0 and .*=7 "):
            CoordinatorSettings(min_epoch_duration=least, max_epoch_duration=most)
