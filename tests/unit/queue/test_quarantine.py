"""When a worker claims a suspect, and how long other messages wait for it."""

from typing import Any, cast

from jobsync import Components
from jobsync.core.clock import Clock, Mono
from jobsync.queue.in_flight import Delivery
from jobsync.queue.reaper import Quarantine

SUSPECT, OTHER = cast("Delivery", object()), cast("Delivery", object())


class ManualClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def mono(self) -> Mono:
        """Return the time."""
        return Mono(self.seconds)


def build() -> tuple[Quarantine, ManualClock]:
    """Return a quarantine of ten seconds, and its clock."""
    clock: Any = ManualClock()
    return Quarantine(cast("Clock", clock), 10.0), clock


def test_without_suspects_nothing_waits() -> None:
    """Whatever is in flight."""
    quarantine, _ = build()
    assert not quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 0


def test_a_suspect_is_claimed_once_nothing_is_in_flight() -> None:
    """Until then nothing else is claimed, for a while."""
    quarantine, clock = build()
    quarantine.notice()
    assert quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 10
    assert quarantine.wait(is_free=True) == 0
    clock.seconds = 4
    quarantine.notice()
    assert quarantine.wait(is_free=False) == 6
    clock.seconds = 10
    assert quarantine.wait(is_free=False) == 0
    assert quarantine.is_wanted


def test_nothing_is_claimed_while_a_suspect_runs() -> None:
    """Nor another suspect; afterwards claims continue."""
    quarantine, clock = build()
    quarantine.notice()
    quarantine.start(SUSPECT)
    quarantine.notice()
    assert not quarantine.is_wanted
    clock.seconds = 9
    assert quarantine.wait(is_free=False) == 1
    quarantine.release(OTHER)
    assert quarantine.wait(is_free=False) == 1
    quarantine.release(SUSPECT)
    assert quarantine.wait(is_free=False) == 0


def test_a_long_suspect_does_not_block_others() -> None:
    """After a while others are claimed beside it, and the next suspect may start."""
    quarantine, clock = build()
    quarantine.start(SUSPECT)
    clock.seconds = 10
    assert quarantine.wait(is_free=False) == 0
    quarantine.notice()
    assert quarantine.is_wanted


def test_a_suspect_that_another_worker_claimed_is_forgotten() -> None:
    """Nothing waits for it any longer."""
    quarantine, _ = build()
    quarantine.notice()
    quarantine.start(None)
    assert not quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 0


def test_a_quarantine_accepts_any_clock() -> None:
    """Also the machine's clock."""
    quarantine = Quarantine(Components.system().clock, 0.0)
    quarantine.notice()
    assert quarantine.wait(is_free=False) == 0
