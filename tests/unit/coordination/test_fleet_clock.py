"""The time by which something is due, on stores with and without a clock of their own."""

import math
import random
from typing import Any, cast

import msgspec
import pytest
from chance import FakeClock

from jobsync.components import Components
from jobsync.coordination.fleet_clock import FleetClock
from jobsync.core.clock import Wall
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.memory import MemoryStore

START = 1_700_000_000.0
DRIFT = 0.053
"""Seconds by which the time stays behind in each second since the clocks were compared."""


def near(seconds: float) -> Any:
    """Return what equals a time within a millisecond."""
    return pytest.approx(seconds, rel=0, abs=1e-3)


class ServerStore(MemoryStore):
    """A store with a clock of its own, or without one, behind a slow network."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.machine = clock
        self.ahead: float | None = 0.0
        """Seconds that the server is ahead of the true time; None if it has no clock."""
        self.there = self.back = 0.0
        self.error: Exception | None = None
        self.requests = 0

    async def now(self) -> Wall | None:
        """Return the server's time, after the way there and before the way back."""
        self.requests += 1
        if self.error is not None:
            raise self.error
        if self.ahead is None:
            return None
        pass_time(self.machine, self.there)
        now = Wall(true_time(self.machine) + self.ahead)
        pass_time(self.machine, self.back)
        return now


class KnownSkew:
    """A membership that only knows how far the wall clock is ahead of an object store's."""

    def __init__(self) -> None:
        self.clock_skew: float | None = None
        self.measured: float | None = 0.0
        self.requests = 0

    async def measure_clock(self) -> None:
        """Make the skew known."""
        self.requests += 1
        self.clock_skew = self.measured


def pass_time(clock: FakeClock, seconds: float) -> None:
    """Advance both clocks of a machine."""
    clock.mono_seconds += seconds
    clock.wall_seconds += seconds


def true_time(clock: FakeClock) -> float:
    """Return the time, whatever was done to the wall clock."""
    return START + clock.mono_seconds - 1_000.0


class Setting:
    """A fleet clock and everything that it reads."""

    def __init__(self) -> None:
        self.machine = FakeClock()
        components = msgspec.structs.replace(Components.system(), clock=self.machine)
        self.store = ServerStore(self.machine)
        self.membership = KnownSkew()
        self.clock = FleetClock(cast("Any", self.membership), self.store, components)


@pytest.fixture
def setting() -> Setting:
    """A store with a clock, which is right."""
    return Setting()


@pytest.fixture
async def bucket() -> Setting:
    """A store without a clock; the wall clock is right."""
    setting = Setting()
    setting.store.ahead = None
    await setting.clock.refresh()
    return setting


async def test_the_store_decides_and_a_wrong_wall_clock_does_not_matter(setting: Setting) -> None:
    """Neither a wrong one nor one that jumps; and reading the time sends no request."""
    setting.machine.wall_seconds += 92
    setting.store.ahead = 7.0
    await setting.clock.refresh()
    for _ in range(10):
        setting.machine.wall_seconds -= 1000
        pass_time(setting.machine, 3)
        age = setting.machine.mono_seconds - 1_000.0
        assert setting.clock.now() == near(true_time(setting.machine) + 7 - DRIFT * age)
        assert setting.clock.estimate() == near(true_time(setting.machine) + 7)
    assert setting.clock.veto == ""
    assert not setting.clock.is_off
    assert setting.store.requests == 1


async def test_nothing_fires_before_the_stores_time_is_known(setting: Setting) -> None:
    """The clock of this machine is not accused of that."""
    assert setting.clock.veto == "the store's time is not known yet"
    setting.store.error = Unavailable("store", "it does not answer")
    await setting.clock.refresh()
    assert setting.clock.veto == "the store's time is not known yet"
    assert not setting.clock.is_off
    setting.store.error = None
    await setting.clock.refresh()
    assert setting.clock.veto == ""


@pytest.mark.parametrize(
    "error",
    [Unavailable("store", "it does not answer"), Misconfigured("url", "s", "is refused", "allow")],
)
async def test_the_last_comparison_stands_for_a_minute_while_the_store_does_not_answer(
    setting: Setting, error: Exception
) -> None:
    """The monotonic clock carries it on. Later it is a guess, by which nothing is due."""
    setting.store.ahead = 7.0
    await setting.clock.refresh()
    setting.store.error = error
    for seconds, veto in ((60, ""), (540, "the store's time is not known yet")):
        pass_time(setting.machine, seconds)
        await setting.clock.refresh()
        assert setting.clock.veto == veto
        assert not setting.clock.is_off
        assert setting.clock.estimate() == near(true_time(setting.machine) + 7)


@pytest.mark.parametrize("failures", [1, 3])
async def test_after_an_outage_the_clock_is_as_one_that_saw_none(failures: int) -> None:
    """In all that it answers, for as long as nobody compares the clocks again."""
    settings = struck, spared = Setting(), Setting()
    for setting in settings:
        await setting.clock.refresh()
    struck.store.error = Unavailable("store", "it does not answer")
    for _ in range(failures):
        await struck.clock.refresh()
        for setting in settings:
            pass_time(setting.machine, 5)
    struck.store.error = None
    for setting in settings:
        await setting.clock.refresh()
    for _ in range(20):
        for setting in settings:
            pass_time(setting.machine, 10)
        answers = [
            (
                *(clock.veto, clock.is_off, clock.now(), clock.estimate(), clock.latest),
                *(clock.measured_now(), clock.measure_wait(START + 150)),
            )
            for clock in (struck.clock, spared.clock)
        ]
        assert answers[0] == answers[1]
        assert answers[0][0] == ""


async def test_a_clock_that_ran_fast_during_an_outage_is_corrected_at_once(
    setting: Setting,
) -> None:
    """Found: after hours, instants were fired seconds early, as soon as the store answered."""
    await setting.clock.refresh()
    setting.store.error = Unavailable("store", "it does not answer")
    for _ in range(10):
        pass_time(setting.machine, 1000)
        await setting.clock.refresh()
        setting.clock.now()
    setting.store.ahead = -5.0
    setting.store.error = None
    assert setting.clock.veto
    await setting.clock.refresh()
    assert setting.clock.veto == ""
    assert setting.clock.now() == near(true_time(setting.machine) - 5)


async def test_the_time_is_never_early_and_a_slow_request_moves_nothing(setting: Setting) -> None:
    """The reply may have taken all the time that the request took. What still fits is kept."""
    setting.store.there = setting.store.back = 2.0
    await setting.clock.refresh()
    assert setting.clock.now() == near(true_time(setting.machine) - 2)
    setting.store.there, setting.store.back = 0.0, 20.0
    await setting.clock.refresh()
    assert setting.clock.estimate() == near(true_time(setting.machine) - 2)
    assert setting.clock.now() == near(true_time(setting.machine) - 2 - 20 * DRIFT)
    setting.store.there, setting.store.back = 20.0, 0.0
    await setting.clock.refresh()
    assert setting.clock.now() == near(true_time(setting.machine))


@pytest.mark.parametrize("rate", [0.951, 0.9995, 1.0, 1.0005, 1.049])
async def test_the_time_is_never_ahead_of_the_stores_whatever_the_rate(
    setting: Setting, rate: float
) -> None:
    """Nor does it go back, nor fall behind, however slow requests are and though some fail.

    Nor is the store's time ever later than the latest that is possible.
    """
    dice, machine, true = random.Random(17), setting.machine, [START]

    def pass_true_time(seconds: float) -> None:
        true[0] += seconds
        pass_time(machine, seconds * rate)

    class DriftingStore(ServerStore):
        async def now(self) -> Wall | None:
            pass_true_time(dice.choice([0.001, 0.3, 4.0]) * dice.random())
            if dice.random() < 0.1:
                raise Unavailable("store", "it does not answer")
            now = Wall(true[0])
            pass_true_time(dice.choice([0.001, 0.3, 4.0]) * dice.random())
            return now

    components = msgspec.structs.replace(Components.system(), clock=machine)
    clock = FleetClock(cast("Any", setting.membership), DriftingStore(machine), components)
    while clock.veto:
        await clock.refresh()
    last = 0.0
    for _ in range(5_000):
        pass_true_time(dice.choice([0.01, 5.0, 30.0]) * dice.random())
        if dice.random() < 0.5:
            await clock.refresh()
        for now in (clock.measured_now(), clock.now()):
            assert last <= now <= true[0]
            last = now
        assert abs(clock.estimate() - true[0]) < 30
        assert clock.latest >= true[0] - 1e-6
    await clock.refresh()
    assert true[0] - clock.now() < 10


async def test_the_clocks_are_compared_again_when_that_decides(setting: Setting) -> None:
    """Once for what may be due, and not before; so nothing is late by what clocks may drift."""
    await setting.clock.refresh()
    instant = START + 100
    wait = setting.clock.measure_wait(instant)
    assert wait == pytest.approx(100)
    pass_time(setting.machine, 50)
    await setting.clock.reach(instant)
    assert setting.store.requests == 1
    assert setting.clock.measure_wait(instant) == pytest.approx(50)
    pass_time(setting.machine, 50)
    assert setting.clock.now() < instant
    assert setting.clock.measure_wait(instant) == 0
    await setting.clock.reach(instant)
    assert setting.store.requests == 2
    assert setting.clock.now() == near(instant)
    await setting.clock.reach(instant)
    assert setting.store.requests == 2


async def test_nobody_asks_without_end_while_the_store_is_silent(setting: Setting) -> None:
    """Then the least possible time decides, which comes a little later."""
    await setting.clock.refresh()
    setting.store.error = Unavailable("store", "it does not answer")
    pass_time(setting.machine, 50)
    instant = true_time(setting.machine) - 0.01
    await setting.clock.reach(instant)
    assert setting.store.requests == 2
    for _ in range(30):
        wait = setting.clock.measure_wait(instant)
        if not wait:
            break
        pass_time(setting.machine, wait)
        await setting.clock.reach(instant)
    assert setting.store.requests == 2
    assert setting.clock.now() >= instant
    assert true_time(setting.machine) - instant < 3


async def test_an_error_of_a_slow_first_request_is_corrected_by_the_next(setting: Setting) -> None:
    """All of the first one's time was spent on the way back."""
    setting.store.back = 20.0
    await setting.clock.refresh()
    assert setting.clock.now() == near(true_time(setting.machine) - 20)
    setting.store.back = 0.0
    await setting.clock.refresh()
    assert setting.clock.now() == near(true_time(setting.machine))


async def test_a_server_that_is_set_forward_is_followed_at_once(setting: Setting) -> None:
    """The instants between are late."""
    await setting.clock.refresh()
    assert setting.clock.now() == near(true_time(setting.machine))
    setting.store.ahead = 3600.0
    await setting.clock.refresh()
    assert setting.clock.now() == near(true_time(setting.machine) + 3600)


@pytest.mark.parametrize("step", [1.0, 60.0, 3600.0])
async def test_after_a_step_back_the_time_goes_on_at_half_speed(
    setting: Setting, step: float
) -> None:
    """It never goes back, never stands still, and agrees after twice the step."""
    setting.store.ahead = step
    await setting.clock.refresh()
    last = setting.clock.now()
    setting.store.ahead = 0.0
    beats = 40
    for _ in range(beats):
        pass_time(setting.machine, 2 * step / beats)
        await setting.clock.refresh()
        now = setting.clock.now()
        assert now - last >= 0.999 * step / beats
        last = now
    assert last == near(true_time(setting.machine))
    pass_time(setting.machine, 10)
    assert setting.clock.now() == near(true_time(setting.machine) - 10 * DRIFT)


async def test_on_objects_the_wall_clock_decides_while_it_agrees(bucket: Setting) -> None:
    """Up to 30 seconds in either direction; the store is asked once only whether it has a clock."""
    for skew in (0.0, 30.0, -30.0):
        bucket.membership.clock_skew = bucket.membership.measured = skew
        await bucket.clock.refresh()
        pass_time(bucket.machine, 60)
        assert bucket.clock.veto == ""
        assert bucket.clock.now() == bucket.machine.wall_seconds
    assert bucket.store.requests == 1


@pytest.mark.parametrize(
    ("skew", "difference", "there"),
    [(92.4, "92 s ahead of", "22:11:48"), (-31.0, "31 s behind", "22:13:51")],
)
async def test_a_clock_that_disagrees_is_vetoed_until_it_agrees_again(
    bucket: Setting, skew: float, difference: str, there: str
) -> None:
    """The sentence has both times, and stays the same; 25 seconds count as agreement."""
    sentence = (
        f"this machine's clock is {difference} the object store's "
        f"(2023-11-14 22:13:20 UTC here, 2023-11-14 {there} UTC there)"
    )
    bucket.membership.clock_skew = skew
    assert (bucket.clock.veto, bucket.clock.is_off) == (sentence, True)
    pass_time(bucket.machine, 5)
    for later in (2 * skew, 29.0, -29.0):
        bucket.membership.clock_skew = later
        assert bucket.clock.veto == sentence
    bucket.membership.clock_skew = 25.0
    assert (bucket.clock.veto, bucket.clock.is_off) == ("", False)
    bucket.membership.clock_skew = 29.0
    assert bucket.clock.veto == ""


async def test_on_objects_nothing_fires_before_the_comparison(setting: Setting) -> None:
    """A heartbeat is under way: its time is known at the next refresh."""
    setting.store.ahead = setting.membership.measured = None
    await setting.clock.refresh()
    assert setting.clock.veto == "the store's time is not known yet"
    assert not setting.clock.is_off
    setting.membership.measured = 0.0
    await setting.clock.refresh()
    assert setting.clock.veto == ""
    assert setting.membership.requests == 2


async def test_a_vetoed_clock_does_not_hold_up_the_time_after_its_correction(
    bucket: Setting,
) -> None:
    """Meanwhile the time is the store's, as far as it is known, for runs that end."""
    before = bucket.clock.now()
    bucket.machine.wall_seconds += 3600
    bucket.membership.clock_skew = 3598.0
    assert bucket.clock.now() == before + 2
    bucket.machine.wall_seconds -= 3600
    bucket.membership.clock_skew = 0.0
    pass_time(bucket.machine, 10)
    assert bucket.clock.now() == near(before + 10)
    bucket.machine.wall_seconds -= 3600
    bucket.membership.clock_skew = -3598.0
    assert bucket.clock.now() == near(before + 10)


async def test_a_small_step_back_of_the_wall_clock_is_passed_at_half_speed(bucket: Setting) -> None:
    """It stays within what is tolerated."""
    before = bucket.clock.now()
    bucket.machine.wall_seconds -= 20
    assert bucket.clock.now() == before
    pass_time(bucket.machine, 20)
    assert bucket.clock.now() == near(before + 10)
    pass_time(bucket.machine, 20)
    assert bucket.clock.now() == near(before + 20)
    assert bucket.clock.now() == near(bucket.machine.wall_seconds)


async def test_in_memory_the_wall_clock_decides_without_a_veto() -> None:
    """There is no server whose time could differ."""
    machine = FakeClock()
    components = msgspec.structs.replace(Components.system(), clock=machine)
    store = MemoryStore(components=components)
    clock = FleetClock(cast("Any", KnownSkew()), store, components)
    await clock.refresh()
    pass_time(machine, 5)
    assert clock.veto == ""
    assert clock.estimate() == near(machine.wall_seconds)
    await clock.refresh()
    assert clock.now() == near(machine.wall_seconds)


async def test_the_measured_time_follows_a_store_that_is_set_back_at_once(setting: Setting) -> None:
    """So that no record is removed early. The time of schedules goes on, more slowly."""
    setting.store.ahead = 3600.0
    await setting.clock.refresh()
    ahead = setting.clock.now()
    setting.store.ahead = 0.0
    await setting.clock.refresh()
    pass_time(setting.machine, 10)
    assert setting.clock.measured_now() == near(true_time(setting.machine) - 10 * DRIFT)
    assert setting.clock.now() == near(ahead + 5)


async def test_the_measured_time_under_a_veto_is_the_servers(bucket: Setting) -> None:
    """A guess, which nothing may be removed by."""
    bucket.membership.measured = 3600.0
    bucket.machine.wall_seconds += 3600
    await bucket.clock.refresh()
    assert bucket.clock.is_off
    assert bucket.clock.measured_now() == near(true_time(bucket.machine))


@pytest.mark.parametrize("kind", ["clock", "no clock"])
@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_to_clocks_only_a_time_that_was_in_force_holds_up_the_next(
    setting: Setting, seed: int, kind: str
) -> None:
    """Clocks are set forth and back, compared in time, late or never; guesses leave no trace."""
    dice, steps = random.Random(seed), [-4000.0, -100.0, -20.0, 20.0, 100.0, 4000.0]
    setting.store.ahead = 0.0 if kind == "clock" else None
    setting.membership.measured = None
    in_force: list[tuple[float, float]] = []
    """Each time that was not vetoed, and the monotonic time then."""
    for _ in range(60):
        match dice.choice(["step", "right", "known", "unknown", "refresh", "refresh", "wait"]):
            case "step" if setting.store.ahead is not None:
                setting.store.ahead += dice.choice(steps)
            case "step":
                setting.machine.wall_seconds += dice.choice(steps)
            case "right":
                setting.machine.wall_seconds = true_time(setting.machine)
                setting.store.error = None
            case "known":
                skew = setting.machine.wall_seconds - true_time(setting.machine)
                setting.membership.clock_skew = setting.membership.measured = skew
            case "unknown":
                setting.store.error = Unavailable("store", "it does not answer")
            case "refresh":
                await setting.clock.refresh()
            case _:
                pass_time(setting.machine, dice.choice([1, 30, 300]))
        now, mono = setting.clock.now(), setting.machine.mono_seconds
        held_up = max((then + (mono - at) / 2 for then, at in in_force), default=-math.inf)
        assert now == near(max(setting.clock.measured_now(), held_up))
        if not setting.clock.veto:
            in_force.append((now, mono))
    assert in_force
