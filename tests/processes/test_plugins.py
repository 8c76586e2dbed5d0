"""Real processes with plugins of their own: killed, told to stop, interrupted as they start.

What is asserted is order, counts and what the store says; times are nobody's promise.
"""

import itertools
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import plugger
import pytest
from electorate import Citizen, Electorate, check_beliefs
from servers import Locate
from waiting import until

from jobsync import Record, open_store
from jobsync.coordination.session import SESSIONS
from jobsync.core.trust import Timing

TIMING = Timing(beat=1, timeout=4)
_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """An empty place."""
    return locate(request.param)


@pytest.fixture
def fleet(url: str, tmp_path: Path) -> Electorate:
    """Nobody yet."""
    return Electorate(url, tmp_path / "words", TIMING, plugger.WORKS, plugger.__file__)


async def find_sessions(url: str) -> list[Record]:
    """Give the sessions that live, as far as the store knows."""
    store = await open_store(url)
    found = await store.scan(SESSIONS, where={"state": "live"})
    await store.close()
    return found


def heard(citizen: Citizen, work: str, fact: str) -> list[str]:
    """Give whom a plugin of a process was told of, in order."""
    name = f"plg:{work}:coordinator-{fact}"
    words = (word for word in citizen.words("hears") if word["work"] == work)
    return [word["worker_id"] for word in words if word["event"] == name]


def has_heard(citizen: Citizen, work: str, leader: Citizen) -> bool:
    """Say whether the latest that a plugin was told of is this one."""
    return heard(citizen, work, "elected")[-1:] == [leader.worker]


def has_done_more(citizen: Citizen, work: str, before: int) -> bool:
    """Say whether a plugin was called again since."""
    return any(w["done"] > before for w in citizen.words("works") if w["work"] == work)


def check_hearsay(fleet: Electorate, citizens: Iterable[Citizen]) -> None:
    """Check that plugins tell of their own kind of work alone, the promoted of themselves."""
    for citizen in citizens:
        for word in citizen.words("hears"):
            assert word["event"].startswith(f"plg:{word['work']}:")
            assert word["role"] == f"default/{word['work']}"
        for work in fleet.works:
            promoted = [w for w in fleet.promotions(work) if w["worker_id"] == citizen.worker]
            assert heard(citizen, work, "promoted") == [word["worker_id"] for word in promoted]
            assert set(heard(citizen, work, "promoted")) <= {citizen.worker}


async def test_each_kind_of_work_has_one_coordinator_in_a_fleet_of_unlike_processes(
    fleet: Electorate, url: str
) -> None:
    """Three plugins in one process, two in the others: kill whoever leads, and another does."""
    unlike = [plugger.WORKS, ("archive", "billing"), ("billing", "cleanup"), ("cleanup", "archive")]
    async with fleet:
        for works in unlike:
            await fleet.standing(await fleet.let_go([fleet.prepare(works)]))
        leaders = await fleet.leaders()
        # The oldest can do everything.
        assert set(leaders.values()) == {fleet.everybody[0]}
        for killed in range(2):
            victim = leaders["billing"]
            survivors = [each for each in fleet.running if each is not victim]
            victim.strike(signal.SIGKILL)
            await victim.ended()
            leaders = await fleet.leaders()
            for work, leader in leaders.items():
                assert leader in survivors
                assert work in leader.works
            for citizen in survivors:
                for work in citizen.works:
                    await until(
                        partial(has_heard, citizen, work, leaders[work]),
                        f"{citizen} has heard who leads {work} after {killed + 1} deaths",
                    )
        # Of four, two are left, and of these no one can do everything.
        assert len(set(leaders.values())) == 2
        for work in fleet.works:
            leader = leaders[work]
            before = [w["done"] for w in leader.words("works") if w["work"] == work][-1]
            if work != "cleanup":
                await until(
                    partial(has_done_more, leader, work, before),
                    f"{work} goes on, though it may raise",
                )
        check_hearsay(fleet, fleet.running)
        survivors = fleet.running
        for citizen in survivors:
            citizen.strike(signal.SIGTERM)
        assert [await each.ended() for each in survivors] == [0, 0]
        assert await find_sessions(url) == []
        for work in fleet.works:
            assert check_beliefs(fleet.told(), work) == []
        failures = fleet.told("jobsync:handler-failed")
        assert {word["event"] for word in failures} == {"default/billing"}
        assert {word["error"] for word in failures} == {"ValueError: no money"}
        assert [each.complaints for each in fleet.everybody] == [""] * 4


@pytest.mark.parametrize("manner", plugger.MANNERS)
async def test_a_signal_ends_everything_in_good_order(
    fleet: Electorate, url: str, manner: str
) -> None:
    """Whatever its handler stops, in whatever order and how often: exit 0, and no session."""
    async with fleet:
        citizen = fleet.prepare(manner=manner)
        await fleet.let_go([citizen])
        await fleet.leaders()
        await until(
            lambda: {word["work"] for word in citizen.words("works")} == set(plugger.WORKS),
            "all plugins have worked",
        )
        citizen.strike(signal.SIGTERM)
        assert await citizen.ended() == 0, citizen.complaints
        assert await find_sessions(url) == []
        # Where a handler raises SystemExit all tasks are cancelled, and with them the terms.
        expected = ["stops"] if manner == "exit" else ["lost", "stops"]
        for work in fleet.works:
            ends = [w.what for w in citizen.words("lost", "stops") if w["work"] == work]
            assert ends == expected
            (end, *_) = [w for w in citizen.words(expected[0]) if w["work"] == work]
            assert all(w.at < end.at for w in citizen.words("works") if w["work"] == work)
        assert len(citizen.words("db:disconnected")) == 1
        assert citizen.complaints == ""


@pytest.mark.parametrize("manner", plugger.MANNERS)
async def test_a_signal_may_come_at_any_moment_of_the_start(
    fleet: Electorate, url: str, manner: str, full_scale: bool
) -> None:
    """Whatever has begun is ended: exit 0; and where a handler lets it end, no session."""
    moments = ["ready", "db:plugin-started", "gained"]
    async with fleet:
        for moment in moments * (10 if full_scale else 1):
            citizen = fleet.prepare(manner=manner)
            await fleet.let_go([citizen])
            await until(partial(citizen.said, moment), moment)
            citizen.strike(signal.SIGTERM)
            assert await citizen.ended() == 0, (moment, citizen.complaints)
            if manner != "exit":
                # There asyncio cancels what connects, complains of it, and waits for nothing: a
                # session that was on its way is dead by its silence.
                assert citizen.complaints == ""
                gained = {word["work"] for word in citizen.words("gained")}
                assert {word["work"] for word in citizen.words("lost")} == gained
                assert await find_sessions(url) == []
