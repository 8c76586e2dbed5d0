"""Two time lines that do not mix, the machine's own clocks, and pauses between attempts."""

import operator
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from jobsync.core.clock import Clock, Mono, SystemClock, Wall, _read_boot_id, to_datetime


def test_a_difference_is_in_seconds() -> None:
    """Two instants on one line differ by seconds."""
    assert Wall(12.5) - Wall(10.0) == 2.5
    assert Mono(1.0) - Mono(4.0) == -3.0


def test_an_instant_moves_along_its_own_line() -> None:
    """Adding seconds gives an instant of the same kind."""
    later = Mono(1.0) + 2.5
    assert later == Mono(3.5)
    assert type(later) is Mono


@pytest.mark.parametrize(
    "mix", [operator.sub, operator.lt, operator.le, operator.gt, operator.ge, operator.add]
)
def test_wall_and_mono_do_not_mix(mix: Callable[[Any, Any], Any]) -> None:
    """Subtracting, comparing or adding instants of two lines is an error, both ways."""
    with pytest.raises(TypeError):
        mix(Wall(1.0), Mono(1.0))
    with pytest.raises(TypeError):
        mix(Mono(1.0), Wall(1.0))


def test_equal_numbers_on_two_lines_are_not_equal() -> None:
    """The same number of seconds on two lines is not the same instant."""
    wall: Any = Wall(1.0)
    assert wall != Mono(1.0)


def test_instants_of_one_line_have_an_order() -> None:
    """Instants sort from early to late."""
    assert sorted([Mono(3.0), Mono(1.0), Mono(2.0)]) == [Mono(1.0), Mono(2.0), Mono(3.0)]


def test_an_instant_cannot_be_changed() -> None:
    """An instant is immutable."""
    instant: Any = Wall(1.0)
    with pytest.raises(AttributeError):
        instant.seconds = 2.0


def test_the_machine_never_counts_backwards() -> None:
    """Time since boot does not go back between readings."""
    clock = SystemClock()
    readings = [clock.mono() for _ in range(1000)]
    assert readings == sorted(readings)
    assert readings[0] > Mono(0.0)


def test_the_machine_counts_through_a_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease must not stand still meanwhile, where the system has a clock that does not."""
    asked: list[int] = []

    def read(clock: int) -> float:
        asked.append(clock)
        return 7.0

    monkeypatch.setattr(time, "clock_gettime", read)
    assert SystemClock().mono() == Mono(7.0)
    assert asked == [getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)]


def test_the_machine_knows_the_time_of_day() -> None:
    """Wall time is after the day when this was written."""
    assert SystemClock().wall() > Wall(1_700_000_000.0)


def test_a_boot_has_one_id() -> None:
    """The id of this boot is the same for every reader, and fits a SQL integer."""
    boot = SystemClock().boot()
    assert boot == SystemClock().boot()
    assert 0 <= boot < 2**60


def test_boots_have_different_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system's id as many bits are used as a SQL integer holds."""
    file = tmp_path / "boot_id"
    monkeypatch.setattr("jobsync.core.clock._BOOT_ID", file)
    ids = {0: _read_boot_id.__wrapped__()}
    for number in (0xFEDC_BA98_7654_321, 0xFEDC_BA98_7654_320, 0x0EDC_BA98_7654_321):
        text = f"{number:015x}"
        shown = f"{text[:8]}-{text[8:12]}-{text[12:]}0-8000-000000000000\n"
        file.write_text(shown, encoding="ascii")
        ids[number] = _read_boot_id.__wrapped__()
    assert ids == {number: number for number in ids}


async def test_sleeping_moves_a_fake_clock(clock: Clock) -> None:
    """The tests' own clock moves both lines, by exactly what was slept."""
    wall, mono = clock.wall(), clock.mono()
    await clock.sleep(90.0)
    assert (clock.wall() - wall, clock.mono() - mono) == (90.0, 90.0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (-1.5, datetime(1969, 12, 31, 23, 59, 58, 500_000, UTC)),
        (1e9, datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)),
        (253_402_214_399, datetime(9999, 12, 30, 23, 59, 59, tzinfo=UTC)),
        (253_402_214_401, datetime(9999, 12, 31, tzinfo=UTC)),
        (1e300, datetime(9999, 12, 31, tzinfo=UTC)),
        (float("inf"), datetime(9999, 12, 31, tzinfo=UTC)),
        (-62_135_510_401, datetime(1, 1, 2, tzinfo=UTC)),
        (-1e300, datetime(1, 1, 2, tzinfo=UTC)),
    ],
)
def test_every_time_has_a_date(seconds: float, expected: datetime) -> None:
    """That of the first or the last day, if no calendar has it; in every zone."""
    assert to_datetime(seconds) == expected
    for hours in (-23, 23):
        assert to_datetime(seconds).astimezone(timezone(timedelta(hours=hours))) == expected
