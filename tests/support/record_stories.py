"""Stories of records in the simulated world: what happens to processes, indexes and clocks.

`jobsync.testing` checks every commit and every lookup (X1 to X6). Each story lets everything calm
down and looks everything up; some wait until nothing is left over (XL1 to XL3).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from msgspec.structs import replace
from record_fleet import BEAT, EXPIRING, NARROW, TIMEOUT, WIDE, RecordFleet, Setup

from jobsync.database import backfill
from jobsync.database.backfill import BUILD_DELAY, LATE_BUILD_DELAY
from jobsync.testing import Weather, World, draw_forecast, mend, storm, strikes
from jobsync.testing.stories import Story
from jobsync.testing.strikes import STRIKES, Strike

__all__ = [
    "STORIES",
    "adds_partitions",
    "adds_partitions_in_trouble",
    "begins",
    "builds_during_an_outage",
    "builds_in_short_lives",
    "expires",
    "expires_later",
    "kills",
    "lost_replies",
    "pauses",
    "races",
    "redefines",
    "renews",
    "skewed",
    "stormy",
    "stormy_with_suspends",
    "suspends",
]


MINUTE, HOUR = 60.0, 3600.0
WIDE_SETUP = Setup(resources={"items": WIDE})
EXPIRING_SETUP = Setup(resources=dict.fromkeys(EXPIRING, NARROW), has_ttl=True)
OLD_SETUP = Setup(resources={"items": NARROW})
MANY_SETUP = replace(OLD_SETUP, ids=40, pace=4.0)
SLOWEST = HOUR + MINUTE
"""Seconds after which a backfill goes on that was refused."""


def build_delay(fleet: RecordFleet) -> float:
    """Return how many seconds a backfill waits until nobody writes by an older definition."""
    return LATE_BUILD_DELAY if fleet.is_bucket else BUILD_DELAY


def ready_after(fleet: RecordFleet) -> float:
    """Return after how many seconds new indexes are ready and former ones gone, if all goes well.

    Those of a rule are added while those of a partition are built.
    """
    return 3 * build_delay(fleet) + 2 * MINUTE


def slow_down(setup: Setup, fleet: RecordFleet) -> Setup:
    """Do less on a bucket, because more time passes until an index is ready there."""
    return replace(setup, pace=8 * setup.pace) if fleet.is_bucket else setup


@contextmanager
def small_pages() -> Iterator[None]:
    """Make a backfill note its progress after a few records."""
    with mock.patch.object(backfill, "_PAGE", 3):
        yield


async def begins(world: World) -> None:
    """Three processes start at once on an empty store, and write the same records."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    fleet.add_all("abc", WIDE_SETUP)
    await asyncio.sleep(3 * MINUTE)
    await fleet.settle_for_good()


async def races(world: World) -> None:
    """Many users change and find few records, over slow links."""
    slow = Weather(latency=0.5)
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1, weather=slow)
    fleet.add_all("abc", replace(WIDE_SETUP, pace=0.5, users=4, ids=1))
    await asyncio.sleep(2 * MINUTE)
    await fleet.settle()


async def lost_replies(world: World) -> None:
    """Replies get lost, and requests are refused, late, doubled, or decided by nobody."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    nodes = fleet.add_all("abc", WIDE_SETUP)
    await asyncio.sleep(10)
    for node in nodes:
        for link in node.links:
            link.weather = Weather(
                lost=0.1, refused=0.1, unanswered=0.1, undecided=0.1, late=0.1, doubled=0.1
            )
    await asyncio.sleep(5 * MINUTE)
    mend(world)
    await fleet.settle_for_good()


async def expires(world: World) -> None:
    """Four processes write records that expire; one of them leads the sweeps, and all sweep."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    fleet.add_all("abc", replace(EXPIRING_SETUP, keeps_id=world.seed % 3 == 1))
    # A process without the plugin keeps the indexes too, once they are there.
    await asyncio.sleep(BEAT)
    fleet.add("d", replace(EXPIRING_SETUP, has_ttl=False))
    await asyncio.sleep(3 * MINUTE)
    await fleet.settle_for_good()


async def renews(world: World) -> None:
    """Users renew records when they expire, while several processes sweep all the time."""
    slow = Weather(latency=0.5)
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1, weather=slow, early=0.5)
    names = ("hard", "moved", "asked")
    setup = Setup(
        resources=dict.fromkeys(names, NARROW),
        has_ttl=True,
        pace=0.5,
        users=4,
        ids=2,
        sweeps=0.3,
        lifetime=(0.5, 5.0),
    )
    fleet.add_all("abc", setup)
    await asyncio.sleep(MINUTE)
    await fleet.settle()


async def run_strike(world: World, strike: Strike) -> None:
    """The leader is struck again and again while records expire."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    fleet.add_all("abc", EXPIRING_SETUP)
    for _ in range(4):
        leader = await fleet.wait_for_leader()
        await asyncio.sleep(world.dice.uniform(0, MINUTE))
        await strike([leader.node], world.dice.uniform(0.5, 4) * TIMEOUT)
    await fleet.settle()


async def kills(world: World) -> None:
    """The leader is killed: another one sweeps, and completes what it has begun."""
    await run_strike(world, strikes.kill)


async def pauses(world: World) -> None:
    """The leader is paused: when it wakes, there are several that sweep."""
    await run_strike(world, strikes.pause)


async def suspends(world: World) -> None:
    """The leader's machine is suspended with its clock."""
    await run_strike(world, strikes.suspend)


async def skewed(world: World) -> None:
    """The clock of the first leader is an hour ahead, or behind: nothing that lives is touched."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    skew = world.dice.choice((-HOUR, HOUR))
    idle = replace(EXPIRING_SETUP, is_idle=True)
    fleet.add("b", idle, skew=skew)
    await asyncio.sleep(2 * BEAT)
    fleet.add("a", EXPIRING_SETUP)
    await asyncio.sleep(4 * MINUTE)
    await fleet.settle()


async def expires_later(world: World) -> None:
    """Records exist already when newer code lets them expire."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    setup = replace(EXPIRING_SETUP, resources=dict.fromkeys(("hard", "moved"), NARROW), pace=4.0)
    with small_pages():
        setup = slow_down(setup, fleet)
        fleet.add_all("ab", replace(setup, has_ttl=False))
        await asyncio.sleep(world.dice.uniform(0, 2 * MINUTE))
        fleet.add_all("cd", setup)
        await asyncio.sleep(world.dice.uniform(0, 2 * build_delay(fleet)))
        await strikes.kill([world.nodes["c"]], MINUTE)
        await asyncio.sleep(ready_after(fleet))
        await fleet.settle()


async def adds_partitions(world: World) -> None:
    """Newer code adds partitions while older code writes, which does not know them."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    with small_pages():
        fleet.add_all("abc", slow_down(MANY_SETUP, fleet))
        await asyncio.sleep(world.dice.uniform(MINUTE, 2 * MINUTE))
        fleet.add("d", slow_down(WIDE_SETUP, fleet))
        await fleet.wait_until_ready("items", len(WIDE), ready_after(fleet))
        await asyncio.sleep(world.dice.uniform(0, MINUTE))
        await fleet.settle()


async def builds_during_an_outage(world: World) -> None:
    """The only process that knows of new partitions cannot reach the store for a while."""
    slow = Weather(latency=0.1)
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1, weather=slow)
    with small_pages():
        fleet.add_all("ab", slow_down(MANY_SETUP, fleet))
        await asyncio.sleep(2 * MINUTE)
        builder = fleet.add("c", replace(WIDE_SETUP, is_idle=True))
        await asyncio.sleep(build_delay(fleet) + world.dice.uniform(0, 5))
        # Who was refused waits for long: then the others strike nobody.
        first = [strikes.forbid] * (world.dice.random() < 0.3)
        for strike in (*first, *[strikes.throttle] * 10, strikes.cut, strikes.forbid):
            await strike([builder], world.dice.uniform(0, 2))
            await asyncio.sleep(world.dice.uniform(0, 1))
        fleet.is_quiet = True
        await fleet.wait_until_ready("items", len(WIDE), ready_after(fleet) + SLOWEST)
        await fleet.settle()


async def builds_in_short_lives(world: World) -> None:
    """A process that knows of new partitions never lives for as long as a backfill waits."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    with small_pages():
        fleet.add_all("ab", slow_down(MANY_SETUP, fleet))
        await asyncio.sleep(2 * MINUTE)
        fleet.add("c", replace(WIDE_SETUP, is_idle=True))
        for _ in range(12):
            await asyncio.sleep(world.dice.uniform(0.1, 0.3) * build_delay(fleet))
            await strikes.kill([world.nodes["c"]], world.dice.uniform(0, 5))
        await fleet.wait_until_ready("items", len(WIDE), MINUTE)
        await fleet.settle()


async def adds_partitions_in_trouble(world: World) -> None:
    """Likewise, while processes are killed, cut off and stopped for a while."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    with small_pages():
        fleet.add_all("abc", slow_down(OLD_SETUP, fleet))
        await asyncio.sleep(world.dice.uniform(0, MINUTE))
        fleet.add_all("de"[: world.dice.choice((1, 2))], slow_down(WIDE_SETUP, fleet))
        await asyncio.sleep(world.dice.uniform(0, build_delay(fleet)))
        kinds = tuple(each for each in STRIKES if each is not strikes.step_wall)
        forecast = replace(draw_forecast(world, kinds), every=10.0, lasting=20.0)
        # Nothing may take as long as a backfill waits for older definitions.
        late_by = forecast.weather.late_by if fleet.is_bucket else 20.0
        weather = replace(forecast.weather, corrupt=0.0, late_by=late_by, slow_by=10.0)
        await storm(world, 5 * MINUTE, replace(forecast, weather=weather))
        await fleet.wait_until_ready("items", len(WIDE), ready_after(fleet) + SLOWEST)
        await fleet.settle()


async def redefines(world: World) -> None:
    """Newer code changes what a partition is divided by, while older code reads and writes it."""
    fleet = RecordFleet(world, is_bucket=world.seed % 2 == 1)
    with small_pages():
        former = Setup(resources={"items": {"by_region": ["region", "tier"]}})
        fleet.add_all("abc", former)
        await asyncio.sleep(world.dice.uniform(0, MINUTE))
        for node in fleet.add_all("d", OLD_SETUP):
            await asyncio.sleep(world.dice.uniform(0, MINUTE))
            await strikes.kill([node], 20.0)
        # Long enough for all to know of it.
        await asyncio.sleep(MINUTE)
        fleet.is_quiet = True
        await fleet.wait_until_ready("items", len(NARROW), ready_after(fleet))
        await fleet.settle()


async def run_stormy_time(world: World, kinds: tuple[Strike, ...]) -> None:
    """Run through a storm, and check what comes after it."""
    dice = world.dice
    is_bucket = dice.random() < 0.5
    fleet = RecordFleet(world, is_bucket=is_bucket)
    skews = (0.0, 0.0, -HOUR, HOUR, -600.0, 600.0)
    if is_bucket:
        # Servers of objects refuse requests of a clock that is a quarter of an hour off.
        kinds = tuple(kind for kind in kinds if kind is not strikes.step_wall)
        skews = (0.0, 0.0, -600.0, -20.0, 20.0, 600.0)
    names = dice.sample(("items", *EXPIRING), dice.choice((1, 2, 4)))
    setup = Setup(
        resources=dict.fromkeys(names, dice.choice((NARROW, WIDE))),
        has_ttl=True,
        ids=dice.choice((1, 4, 20)),
        keeps_id=dice.random() < 0.5,
        pace=dice.choice((2.0, 10.0)),
    )
    # One has a good clock; otherwise nothing expires. It defines everything before the storm.
    fleet.add("a", setup)
    await asyncio.sleep(BEAT)
    for name in "bcd"[: dice.choice((0, 1, 2, 3))]:
        has_ttl = dice.random() < 0.7
        fleet.add(name, replace(setup, has_ttl=has_ttl), skew=dice.choice(skews))
    forecast = draw_forecast(world, kinds)
    # A lookup leaves out what arrives damaged.
    weather = replace(forecast.weather, corrupt=0.0)
    await storm(world, 0.3 * HOUR, replace(forecast, weather=weather))
    await fleet.settle_for_good()


async def stormy(world: World) -> None:
    """All strikes under which clocks run on."""
    await run_stormy_time(world, STRIKES)


async def stormy_with_suspends(world: World) -> None:
    """Likewise, and clocks stop at times."""
    await run_stormy_time(world, (*STRIKES, strikes.suspend))


STORIES: tuple[Story, ...] = (
    begins,
    races,
    lost_replies,
    expires,
    renews,
    kills,
    pauses,
    suspends,
    skewed,
    expires_later,
    adds_partitions,
    builds_during_an_outage,
    builds_in_short_lives,
    adds_partitions_in_trouble,
    redefines,
)
