"""Elections in a rough world: one leads, epochs grow, and nobody writes who was replaced.

And in a quiet one: how soon somebody leads, how seldom that changes, and what everybody hears.
"""

import asyncio
import os
import subprocess
import sys
from typing import Any

import fleets
import pytest
from fleets import HOUR, SETTINGS, TIMING, DearStore, Fleet, Worker, run_storm, run_suspends
from waiting import until

from jobsync.coordination.coordinator import Coordinator
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.errors import Invalid, NotFound
from jobsync.stores.memory import MemoryStore
from jobsync.testing.network import Weather

SEEDS = range(12)
SUSPENDS = range(100, 104)
SLOW = 1.06
"""What a duration by the slowest clock takes, with the way to the store."""
SHORT = CoordinatorSettings(
    heartbeat_interval=5, worker_timeout=15, min_epoch_duration=20, max_epoch_duration=60
)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_breaks_in_a_storm(seed: int) -> None:
    """Through a stormy hour, with clocks that differ by up to 10 %, every promise holds.

    Sessions die and leaders change in it, so that the checks have something to see.
    """
    fleet = run_storm(seed)
    assert fleet.verdict == []
    assert fleet.deaths > 20
    assert len(terms(fleet)) > 20


def test_what_dies_in_silence_is_noticed() -> None:
    """A fleet is judged by what nobody in it heard of, too."""
    fleet = Fleet(1)

    async def die() -> None:
        raise RuntimeError("unheard")

    async def story() -> None:
        fleet.start_all()
        fleet.workers[0].run(die())
        await asyncio.sleep(TIMING.timeout)

    fleet.world.run(story)
    assert [each for each in fleet.verdict if "unheard" in each.detail] != []


@pytest.mark.parametrize("seed", SUSPENDS)
def test_the_store_knows_better_where_clocks_stand_still(seed: int) -> None:
    """Suspended nodes may believe too long; no write of theirs is accepted late."""
    assert run_suspends(seed).verdict == []


def test_a_storm_is_the_same_under_any_hash_seed() -> None:
    """The same seed, in processes that hash differently, gives the same history."""
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(fleets.__file__)!r}); "  # noqa: PTH120
        "from fleets import run_storm; print(run_storm(0).world.fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "12345")
    }
    assert len(prints) == 1


def terms(fleet: Fleet) -> list[tuple[float, str]]:
    """Give the terms that a fleet has seen: when each began, and whose it was."""
    return [(each.at, each.node) for each in fleet.world.history if each.what == "gained"]


def one(workers: list[Worker]) -> Worker:
    """Give the one there is."""
    (worker,) = workers
    return worker


def oldest(fleet: Fleet) -> Worker:
    """Give the worker that sorts before all others."""
    return min(fleet.workers, key=name_of)


def name_of(worker: Worker) -> str:
    """Give a worker's id."""
    assert worker.membership is not None
    return worker.membership.worker_id


def others(fleet: Fleet) -> list[Worker]:
    """Give those who do not lead."""
    return [worker for worker in fleet.workers if not worker.held]


# How soon and how seldom.


@pytest.mark.parametrize("store", [MemoryStore, DearStore])
@pytest.mark.parametrize("seed", [70, 71])
def test_one_leads_two_timeouts_and_a_beat_after_all_is_well(
    seed: int, store: type[MemoryStore]
) -> None:
    """However it came about: outages, and half of the fleet killed with its leader."""
    fleet = Fleet(seed, size=6, store=store)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        for strike in range(4):
            leader = one(fleet.leaders())
            if strike % 2:
                for worker in [leader, *others(fleet)[:2]]:
                    fleet.replace(worker)
            for link in fleet.links:
                link.requests_pass = False
            await asyncio.sleep(fleet.world.dice.uniform(0, 120))
            for link in fleet.links:
                link.requests_pass = True
            await asyncio.sleep(SLOW * (2 * TIMING.timeout + TIMING.heartbeat))
            fleet.judge_rest()

    fleet.tell(story)


@pytest.mark.parametrize(("store", "beats"), [(MemoryStore, 0.3), (DearStore, 1.0)])
@pytest.mark.parametrize("seed", [70, 71, 72])
def test_a_clean_release_hands_over_within_a_beat(
    seed: int, store: type[MemoryStore], beats: float
) -> None:
    """A worker that stops is followed by the oldest that is left, at once where that is told.

    Found: who was told while it read the role believed what it had read, for one more beat.
    """
    fleet = Fleet(seed, store=store)
    for link in fleet.links:
        link.weather = Weather(latency=0.1)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        for _ in range(20):
            leader = one(fleet.leaders())
            # Then they read the role, for some other reason, while it is given up.
            await fleet.overwrite("request/default/other", {})
            await asyncio.sleep(fleet.world.dice.uniform(0, 0.2))
            leader.stop()
            assert leader.life is not None
            await leader.life
            await asyncio.sleep(beats * TIMING.heartbeat)
            assert one(fleet.leaders()) is not leader
            fleet.follow(leader)
            await asyncio.sleep(fleet.world.dice.uniform(60, 70))

    fleet.tell(story)


@pytest.mark.parametrize("seed", range(70, 76))
def test_who_is_dead_is_followed_as_soon_as_that_is_written(seed: int) -> None:
    """Whoever writes it tells those to whom it gives way.

    Found: an older worker heard of it a beat later, when it looked for itself.
    """
    fleet = Fleet(seed, size=6)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        for _ in range(4):
            leader = one(fleet.leaders())
            deaths = fleet.deaths
            fleet.replace(leader)
            await until(lambda deaths=deaths: fleet.deaths > deaths, interval=0.1)  # type: ignore[misc]
            await asyncio.sleep(0.1 * TIMING.heartbeat)
            assert one(fleet.leaders()) is oldest(fleet)

    fleet.tell(story)


@pytest.mark.parametrize("store", [MemoryStore, DearStore])
def test_in_quiet_the_lead_changes_once_at_most(store: type[MemoryStore]) -> None:
    """For an hour: to the oldest, at the end of a mandate. An outage costs one more term at most.

    A healthy leader is never usurped: the only changes are those that it makes itself.
    """
    fleet = Fleet(74, store=store, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(HOUR)
        assert fleet.leaders() == [oldest(fleet)]
        assert len(terms(fleet)) <= 2
        before = len(terms(fleet))
        for link in fleet.links:
            link.requests_pass = False
        await asyncio.sleep(60)
        for link in fleet.links:
            link.requests_pass = True
        await asyncio.sleep(HOUR)
        assert len(terms(fleet)) == before + 1
        for worker in fleet.workers:
            reasons = [event.reason for event in worker.told("coord:coordinator-demoted")]
            assert set(reasons) <= {"handed over", "trust lapsed"}

    fleet.tell(story)
    assert fleet.deaths == 0


# Who asks for what.


def ask(worker: Worker, **wish: Any) -> "asyncio.Task[str | None]":
    """Ask for a coordinator."""
    return worker.run(worker.coordinators["work"].ensure_coordinator(**wish))


def test_a_role_remembers_its_latest_terms_and_why_each_ended() -> None:
    """One that was stopped, one that died, one that stood still for too long; eight at the most."""
    fleet = Fleet(80)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        leader.stop()
        await asyncio.sleep(30)
        fleet.replace(one(fleet.leaders()))
        await asyncio.sleep(90)
        frozen = one(fleet.leaders())
        frozen.node.pause()
        await asyncio.sleep(90)
        frozen.node.resume()
        await asyncio.sleep(30)
        for _ in range(8):
            fleet.replace(one(fleet.leaders()))
            await asyncio.sleep(90)

    fleet.tell(story)
    commits = [each.details for each in fleet.world.history if each.what == "commit"]
    roles = [commit["value"] for commit in commits if commit["key"].startswith("role/")]
    stopped = next(role["past"] for role in roles if role["past"])
    assert [term["why"] for term in stopped] == ["stopped"]
    last = roles[-1]["past"]
    assert [term["why"] for term in last] == ["died"] * 8
    assert [term["epoch"] for term in last] == sorted(term["epoch"] for term in last)
    assert all(term["ended"] > term["since"] for term in last)


def test_without_force_somebody_leads_and_nothing_changes() -> None:
    """It waits for an election that is under way, and tells who leads."""
    fleet = Fleet(75)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(1)
        asked = [ask(worker) for worker in fleet.workers]
        await asyncio.sleep(20)
        leader = one(fleet.leaders())
        assert {await each for each in asked} == {name_of(leader)}
        for _ in range(3):
            assert await ask(others(fleet)[0]) == name_of(leader)
        await asyncio.sleep(60)
        assert fleet.leaders() == [leader]

    fleet.tell(story)


@pytest.mark.parametrize("store", [MemoryStore, DearStore])
def test_who_is_desired_leads_next_but_not_before_its_time(store: type[MemoryStore]) -> None:
    """Asked at once, the leader hands over after the least time; the one named follows it."""
    fleet = Fleet(76, settings=SHORT, store=store)

    async def story() -> None:
        fleet.start_all()
        # A coordinator on a dear store looks at requests every other timeout.
        patience = 2 * TIMING.timeout if fleet.store.is_billed else 0.0
        await asyncio.sleep(10)
        leader = one(fleet.leaders())
        desired = others(fleet)[-1]
        asked = ask(others(fleet)[0], force=True, desired_coordinator=name_of(desired))
        assert await asked == name_of(leader)
        await asyncio.sleep(5)
        assert fleet.leaders() == [leader]
        await asyncio.sleep(SLOW * (20 - 15 + 2 * TIMING.heartbeat) + patience)
        assert fleet.leaders() == [desired]

    fleet.tell(story)


def test_by_force_alone_anybody_else_leads() -> None:
    """Without a name the oldest of the others follows."""
    fleet = Fleet(77, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        leader = one(fleet.leaders())
        await ask(leader, force=True)
        await asyncio.sleep(SLOW * TIMING.heartbeat)
        assert one(fleet.leaders()) is not leader

    fleet.tell(story)


def test_a_later_wish_replaces_an_earlier_one() -> None:
    """Two workers are named before the time has come: the one that was named last leads.

    Found: the second request was dropped, and told as if it stood.
    """
    fleet = Fleet(78, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(5)
        first, second = others(fleet)[:2]
        for desired in (first, second):
            await ask(first, force=True, desired_coordinator=name_of(desired))
        await asyncio.sleep(SLOW * (20 + TIMING.heartbeat))
        assert fleet.leaders() == [second]

    fleet.tell(story)


def test_a_wish_that_nobody_can_meet_costs_little() -> None:
    """The one that was desired has died: the leader leads on, and lists sessions seldom.

    Found: it listed them at every beat, for as long as it led.
    """
    fleet = Fleet(79, settings=SHORT, store=DearStore)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(10)
        leader, desired = one(fleet.leaders()), others(fleet)[0]
        await ask(leader, force=True, desired_coordinator=name_of(desired))
        desired.node.kill()
        await asyncio.sleep(120)
        assert fleet.leaders() == [leader]
        sent = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        # A beat, a look, a listing, and twice for the work; a few more for requests and renewals.
        assert leader.link.requests - sent <= 20 * 1.05 * 5 + 20

    fleet.tell(story)


def test_an_unknown_worker_is_not_found_and_the_others_are_named() -> None:
    """The error tells whom there is to choose from."""
    fleet = Fleet(80)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(10)
        with pytest.raises(NotFound) as caught:
            await ask(fleet.workers[0], force=True, desired_coordinator="worker-nobody")
        for worker in fleet.workers:
            assert name_of(worker) in str(caught.value)

    fleet.tell(story)


# What everybody hears.


@pytest.mark.parametrize("store", [MemoryStore, DearStore])
def test_a_mandate_is_renewed_and_ends_with_the_oldest(store: type[MemoryStore]) -> None:
    """A younger worker that led first hands over to the oldest, and not to one that came later."""
    fleet = Fleet(81, size=0, settings=SHORT, store=store, listens=True)
    older, younger = fleet.add("older", skew=-100.0), fleet.add("younger")

    async def story() -> None:
        fleet.start(younger)
        await asyncio.sleep(90)
        (renewed,) = younger.told("coord:coordinator-epoch-renewed")
        assert renewed.worker_id == name_of(younger)
        assert renewed.epoch == younger.held["work"]
        assert renewed.new_epoch == renewed.until
        assert younger.node.clock.wall().seconds < renewed.until
        fleet.start(older)
        await asyncio.sleep(SLOW * (60 + 2 * TIMING.heartbeat))
        assert fleet.leaders() == [older]
        await asyncio.sleep(200)
        assert fleet.leaders() == [older]
        assert len(older.told("coord:coordinator-epoch-renewed")) >= 2

    fleet.tell(story)


def test_everybody_hears_of_each_leader_once_and_of_all_there_is_to_know() -> None:
    """Elected, promoted, demoted, and beats, with all their fields; a renewal elects nobody."""
    fleet = Fleet(82, settings=SHORT, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(10)
        seen = [one(fleet.leaders())]
        for _ in range(3):
            await asyncio.sleep(100)
            seen.append(one(fleet.leaders()))
            fleet.leaders()[0].stop()
            await asyncio.sleep(20)
            seen.append(one(fleet.leaders()))
        names = [name_of(worker) for worker in seen]
        changes = [
            name for name, before in zip(names, ["", *names], strict=False) if name != before
        ]
        last = seen[-1]
        for event in last.told("coord:coordinator-elected"):
            assert event.role == "default/work"
            assert event.worker_id in event.active_workers
            assert event["epoch"] == event.epoch
            assert event.until > 1_700_000_000
        assert [e.worker_id for e in last.told("coord:coordinator-elected")] == changes
        for worker in seen:
            for gained in worker.told("coord:coordinator-promoted"):
                assert gained.worker_id == name_of(worker)
                assert gained.until == pytest.approx(gained.timestamp + 60, abs=10)
            for lost in worker.told("coord:coordinator-demoted"):
                assert lost.worker_id == name_of(worker)
                assert lost.reason in {"stopped", "handed over"}
                assert lost.epoch > 0
        beats = last.told("coord:worker-heartbeat")
        # Its own beats, and those of whoever leads it.
        assert {event.worker_id for event in beats} >= {name_of(last), names[0]}
        assert all(event.timestamp > 1_700_000_000 for event in beats)

    fleet.tell(story)


def test_a_demotion_tells_when_the_renewed_mandate_would_have_ended() -> None:
    """Found: it told the end of the first mandate, however often that had been renewed."""
    fleet = Fleet(83, size=1, settings=SHORT, listens=True)

    async def story() -> None:
        (worker,) = fleet.workers
        fleet.start(worker)
        await asyncio.sleep(200)
        worker.stop()
        await asyncio.sleep(10)
        (lost,) = worker.told("coord:coordinator-demoted")
        assert lost.until == worker.told("coord:coordinator-epoch-renewed")[-1].until
        assert lost.reason == "stopped"

    fleet.tell(story)


def test_a_beat_that_failed_is_not_told_of() -> None:
    """While nothing gets through nobody tells that a session was renewed.

    Found: it was told for as long as trust lasted, and the silence of the store twice.
    """
    fleet = Fleet(84, size=1, listens=True)

    async def story() -> None:
        (worker,) = fleet.workers
        fleet.start(worker)
        await asyncio.sleep(30)
        worker.link.weather = Weather(refused=1.0)
        told = len(worker.told("coord:worker-heartbeat"))
        await asyncio.sleep(60)
        assert len(worker.told("coord:worker-heartbeat")) == told
        assert len(worker.told("coord:store-silent")) == 1

    fleet.tell(story)


# How it begins.

COLD = CoordinatorSettings(
    heartbeat_interval=5,
    worker_timeout=15,
    cold_start_observation_window=8,
    cold_start_preparation_delay=3,
)


def phases(worker: Worker) -> list[str]:
    """Give the phases of the cold start that a worker went through."""
    return [event.phase for event in worker.told("coord:cold-start-phase-changed")]


def test_the_first_election_goes_through_all_phases() -> None:
    """They look around, elect, prepare, and only then lead; standing and claiming do not wait."""
    fleet = Fleet(85, settings=COLD, rate=0.0, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(7.9)
        assert fleet.leaders() == []
        assert all(phases(worker) == ["observing"] for worker in fleet.workers)
        assert all(worker.is_trusted for worker in fleet.workers)
        await asyncio.sleep(2)
        elected = one(fleet.leaders())
        assert not coordinator(elected).is_coordinator
        assert phases(elected) == ["observing", "electing", "preparing"]
        await asyncio.sleep(3)
        assert coordinator(elected).is_coordinator
        (gained,) = elected.told("coord:coordinator-promoted")
        assert gained.timestamp == pytest.approx(1_700_000_011, abs=1)
        await asyncio.sleep(TIMING.heartbeat)
        for worker in fleet.workers:
            told = worker.told("coord:cold-start-phase-changed")
            assert [each.phase for each in told] == ["observing", "electing", "preparing", "ready"]
            assert [each.duration for each in told] == sorted(each.duration for each in told)
            assert {each.role for each in told} == {"default/work"}

    fleet.tell(story)


def coordinator(worker: Worker) -> Coordinator:
    """Give a worker's candidacy."""
    return worker.coordinators["work"]


def test_who_finds_a_leader_does_not_look_around() -> None:
    """A worker that comes later is ready at once."""
    fleet = Fleet(86, settings=COLD, listens=True)

    async def story() -> None:
        first, *later = fleet.workers
        fleet.start(first)
        await asyncio.sleep(30)
        for worker in later:
            fleet.start(worker)
        await asyncio.sleep(2)
        for worker in later:
            assert phases(worker) == ["observing", "electing", "preparing", "ready"]

    fleet.tell(story)


def test_a_cold_start_can_be_skipped() -> None:
    """Then somebody leads at once, and the only phase is the last."""
    settings = CoordinatorSettings(
        heartbeat_interval=5,
        worker_timeout=15,
        cold_start_observation_window=8,
        cold_start_preparation_delay=3,
        skip_cold_start=True,
    )
    fleet = Fleet(87, settings=settings, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(TIMING.heartbeat + 1)
        assert coordinator(one(fleet.leaders())).is_coordinator
        assert all(phases(worker) == ["ready"] for worker in fleet.workers)

    fleet.tell(story)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heartbeat_interval": 30_000}, r"heartbeat_interval .*got 30000.*Did you mean 30\?"),
        ({"worker_timeout": 90_000}, r"got 30000.*Did you mean 30\?|Did you mean 90\?"),
        (
            {"heartbeat_interval": 10, "worker_timeout": 20},
            "worker_timeout .*three heartbeats of 10.*got 20",
        ),
        (
            {"cold_start_observation_window": 15_000},
            "observation_window .*got 15000.*Did you mean 15",
        ),
        ({"cold_start_preparation_delay": -1}, "preparation_delay .*got -1.*Give 0 or more"),
        ({"coordinator_work_interval": 0}, "coordinator_work_interval .*got 0.*Give more than 0"),
        (
            {"min_epoch_duration": 400},
            r"must be between 0 and max_epoch_duration=300 \(got 400\)\. Lower it",
        ),
        ({"min_epoch_duration": -1}, "min_epoch_duration .*got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    """The error names the option, and what was probably meant."""
    with pytest.raises(Invalid, match=message):
        CoordinatorSettings(**options)


def test_the_defaults_go_by_the_price_of_the_store() -> None:
    """Beats of 5 s where a request costs nothing; of 30 s, and a cold start, where it costs."""
    cheap, dear = MemoryStore(), DearStore()
    timing = CoordinatorSettings().timing(cheap)
    assert (timing.heartbeat, timing.timeout) == (5, 15)
    timing = CoordinatorSettings().timing(dear)
    assert (timing.heartbeat, timing.timeout) == (30, 90)
    work = CoordinatorSettings().for_store(dear, timing)
    assert (work.cold_start_observation_window, work.cold_start_preparation_delay) == (15, 5)
    work = SETTINGS.for_store(cheap, TIMING)
    assert (work.cold_start_observation_window, work.cold_start_preparation_delay) == (0, 0)
