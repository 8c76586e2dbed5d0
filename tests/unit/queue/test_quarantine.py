"""When a worker takes a suspect, and how long others wait for it."""

from typing import Any, cast

from jobsync import Components
from jobsync.core.clock import Clock, Mono
from jobsync.queue.in_flight import Delivery
from jobsync.queue.reaper import Quarantine

SUSPECT, OTHER = cast("Delivery", object()), cast("Delivery", object())


class Still:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def mono(self) -> Mono:
        """Tell the time."""
        return Mono(self.seconds)


def make() -> tuple[Quarantine, Still]:
    """Make a quarantine of ten seconds."""
    clock: Any = Still()
    return Quarantine(cast("Clock", clock), 10.0), clock


def test_without_suspects_nobody_waits() -> None:
    """Whatever is in hand."""
    quarantine, _ = make()
    assert not quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 0


def test_a_suspect_is_taken_once_nothing_is_in_hand() -> None:
    """Until then nothing else is claimed, for a while."""
    quarantine, clock = make()
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
    """Nor another suspect; afterwards everything goes on."""
    quarantine, clock = make()
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


def test_a_suspect_that_takes_long_holds_nobody_up() -> None:
    """After a while others are claimed beside it, and the next suspect may have its turn."""
    quarantine, clock = make()
    quarantine.start(SUSPECT)
    clock.seconds = 10
    assert quarantine.wait(is_free=False) == 0
    quarantine.notice()
    assert quarantine.is_wanted


def test_a_suspect_that_another_worker_took_is_forgotten() -> None:
    """Nobody waits for it any longer."""
    quarantine, _ = make()
    quarantine.notice()
    quarantine.start(None)
    assert not quarantine.is_wanted
    assert quarantine.wait(is_free=False) == 0


def test_the_clock_of_a_quarantine_is_any_clock() -> None:
    """The machine's own, too."""
    quarantine = Quarantine(Components.system().clock, 0.0)
    quarantine.notice()
    assert quarantine.wait(is_free=False) == 0
