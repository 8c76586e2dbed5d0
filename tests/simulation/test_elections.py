"""Elections in a simulated world: one leads, epochs grow, and replaced leaders write nothing.

Also without faults: how soon a worker leads, how seldom that changes, and the events.
"""

import asyncio
import os
import subprocess
import sys
from typing import Any

import fleets
import pytest
from fleets import (
    HOUR,
    SETTINGS,
    TIMING,
    BilledStore,
    Fleet,
    Worker,
    run_neighbours,
    run_storm,
    run_suspends,
)
from waiting import until

from jobsync.coordination.coordinator import Coordinator
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.errors import Invalid, NotFound
from jobsync.stores.memory import MemoryStore
from jobsync.testing.weather import Weather

SEEDS = range(12)
SUSPENDS = range(100, 104)
AT_FULL_SCALE = "at full scale; the other seeds have the same faults"
SLOW = 1.06
"""Factor for a duration by the slowest clock, with the latency of the store."""
SHORT = CoordinatorSettings(
    heartbeat_interval=5, worker_timeout=15, min_epoch_duration=20, max_epoch_duration=60
)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_breaks_in_a_storm(seed: int, full_scale: bool) -> None:
    """In a stormy hour, with clocks that differ by up to 10 %, every invariant holds.

    Sessions die and leaders change, so the checks have something to check.
    """
    if seed not in SEEDS[:6] and not full_scale:
        pytest.skip(AT_FULL_SCALE)
    fleet = run_storm(seed)
    assert fleet.all_violations == []
    assert fleet.deaths > 20
    assert len(terms(fleet)) > 20


@pytest.mark.parametrize("seed", range(4))
def test_nothing_breaks_where_workers_share_a_machine(seed: int, full_scale: bool) -> None:
    """They see which of them have ended; workers on similar machines do not."""
    if seed not in range(2) and not full_scale:
        pytest.skip(AT_FULL_SCALE)
    fleet = run_neighbours(seed)
    assert fleet.all_violations == []
    assert fleet.deaths > 20


def test_a_task_that_fails_unnoticed_is_reported() -> None:
    """The checks of a fleet include failures that no worker noticed."""
    fleet = Fleet(1)

    async def die() -> None:
        raise RuntimeError("unnoticed")

    async def story() -> None:
        fleet.start_all()
        fleet.workers[0].run(die())
        await asyncio.sleep(TIMING.timeout)

    fleet.world.run(story)
    assert [each for each in fleet.all_violations if "unnoticed" in each.detail] != []


@pytest.mark.parametrize("seed", SUSPENDS)
def test_late_writes_are_refused_where_clocks_stand_still(seed: int, full_scale: bool) -> None:
    """Suspended nodes may trust themselves for too long; the store accepts no late write."""
    if seed not in SUSPENDS[:2] and not full_scale:
        pytest.skip(AT_FULL_SCALE)
    assert run_suspends(seed).all_violations == []


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
    """Return the terms of a fleet: when each began, and on which node."""
    return [(each.at, each.node) for each in fleet.world.history if each.what == "gained"]


def one(workers: list[Worker]) -> Worker:
    """Return the only one."""
    (worker,) = workers
    return worker


def oldest(fleet: Fleet) -> Worker:
    """Return the worker that sorts before all others."""
    return min(fleet.workers, key=id_of)


def id_of(worker: Worker) -> str:
    """Return a worker's id."""
    assert worker.membership is not None
    return worker.membership.worker_id


def others(fleet: Fleet) -> list[Worker]:
    """Return the workers that do not lead."""
    return [worker for worker in fleet.workers if not worker.held_epochs]


# How soon a worker leads, and how seldom that changes.


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
@pytest.mark.parametrize("seed", [70, 71])
def test_one_leads_two_timeouts_and_a_heartbeat_after_the_last_fault(
    seed: int, store: type[MemoryStore]
) -> None:
    """After outages, and after half of the fleet was killed with its leader."""
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
            fleet.check_steady()

    fleet.run(story)


@pytest.mark.parametrize(("store", "intervals"), [(MemoryStore, 0.3), (BilledStore, 1.0)])
@pytest.mark.parametrize("seed", [70, 71, 72])
def test_a_clean_release_hands_over_within_a_heartbeat(
    seed: int, store: type[MemoryStore], intervals: float
) -> None:
    """The oldest remaining worker follows one that stops, at once where the store notifies.

    Found: a worker notified while it read the role relied on that read for another heartbeat.
    """
    fleet = Fleet(seed, store=store)
    for link in fleet.links:
        link.weather = Weather(latency=0.1)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        for _ in range(20):
            leader = one(fleet.leaders())
            # Makes the others read the role, for another reason, while it is released.
            await fleet.overwrite("request/default/other", {})
            await asyncio.sleep(fleet.world.dice.uniform(0, 0.2))
            leader.stop()
            assert leader.task is not None
            await leader.task
            await asyncio.sleep(intervals * TIMING.heartbeat)
            assert one(fleet.leaders()) is not leader
            fleet.restart(leader)
            await asyncio.sleep(fleet.world.dice.uniform(60, 70))

    fleet.run(story)


@pytest.mark.parametrize("seed", range(70, 76))
def test_a_dead_leader_is_replaced_as_soon_as_its_death_is_written(seed: int) -> None:
    """The worker that declares it dead notifies the candidates that it defers to.

    Found: an older worker noticed it one heartbeat later, at its own check.
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

    fleet.run(story)


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_without_faults_the_leader_changes_once_at_most(store: type[MemoryStore]) -> None:
    """In an hour: to the oldest, at the end of a mandate. An outage costs one more term at most.

    A healthy leader is never deposed: it makes all changes itself.
    """
    fleet = Fleet(74, store=store, records_events=True)

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
            reasons = [event.reason for event in worker.events_named("coord:coordinator-demoted")]
            assert set(reasons) <= {"handed over", "trust lapsed"}

    fleet.run(story)
    assert fleet.deaths == 0


# Requests.


def request(worker: Worker, **options: Any) -> "asyncio.Task[str | None]":
    """Call `ensure_coordinator` on a worker."""
    return worker.run(worker.coordinators["work"].ensure_coordinator(**options))


def test_a_role_remembers_its_latest_terms_and_why_each_ended() -> None:
    """One was stopped, one died, one was paused for too long; at most eight are kept."""
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

    fleet.run(story)
    commits = [each.details for each in fleet.world.history if each.what == "commit"]
    roles = [commit["value"] for commit in commits if commit["key"].startswith("role/")]
    stopped = next(role["past"] for role in roles if role["past"])
    assert [term["why"] for term in stopped] == ["stopped"]
    last = roles[-1]["past"]
    assert [term["why"] for term in last] == ["died"] * 8
    assert [term["epoch"] for term in last] == sorted(term["epoch"] for term in last)
    assert all(term["ended"] > term["since"] for term in last)


def test_without_force_the_leader_stays() -> None:
    """It waits for an election that is under way, and returns the leader."""
    fleet = Fleet(75)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(1)
        requests = [request(worker) for worker in fleet.workers]
        await asyncio.sleep(20)
        leader = one(fleet.leaders())
        assert {await each for each in requests} == {id_of(leader)}
        for _ in range(3):
            assert await request(others(fleet)[0]) == id_of(leader)
        await asyncio.sleep(60)
        assert fleet.leaders() == [leader]

    fleet.run(story)


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_the_desired_worker_leads_next_after_the_minimum_duration(store: type[MemoryStore]) -> None:
    """Asked at once, the leader hands over to the named worker after the minimum duration."""
    fleet = Fleet(76, settings=SHORT, store=store)

    async def story() -> None:
        fleet.start_all()
        # Without notifications a coordinator reads requests every other timeout.
        delay = 2 * TIMING.timeout if fleet.store.is_billed else 0.0
        await asyncio.sleep(10)
        leader = one(fleet.leaders())
        desired = others(fleet)[-1]
        requested = request(others(fleet)[0], force=True, desired_coordinator=id_of(desired))
        assert await requested == id_of(leader)
        await asyncio.sleep(5)
        assert fleet.leaders() == [leader]
        await asyncio.sleep(SLOW * (20 - 15 + 2 * TIMING.heartbeat) + delay)
        assert fleet.leaders() == [desired]

    fleet.run(story)


@pytest.mark.parametrize("age", range(62, 122, 6))
def test_a_leader_hands_over_at_once_in_every_later_mandate(age: float) -> None:
    """The minimum duration counts from the beginning of its term, not of its latest mandate."""
    fleet = Fleet(78, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        first = one(fleet.leaders())
        if first is not oldest(fleet):
            # The oldest worker leads from the end of the first mandate on.
            await until(lambda: fleet.leaders() != [first], "it hands over", interval=1)
        await asyncio.sleep(age)
        leader = one(fleet.leaders())
        await request(leader, force=True)
        await asyncio.sleep(SLOW * TIMING.heartbeat)
        assert one(fleet.leaders()) is not leader

    fleet.run(story)


def test_a_forced_request_without_a_name_elects_another_worker() -> None:
    """Without a name the oldest of the other workers leads next."""
    fleet = Fleet(77, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        leader = one(fleet.leaders())
        await request(leader, force=True)
        await asyncio.sleep(SLOW * TIMING.heartbeat)
        assert one(fleet.leaders()) is not leader

    fleet.run(story)


def test_a_later_request_replaces_an_earlier_one() -> None:
    """Of two workers named before the minimum duration, the one named last leads.

    Found: the second request was dropped, and reported as stored.
    """
    fleet = Fleet(78, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(5)
        first, second = others(fleet)[:2]
        for desired in (first, second):
            await request(first, force=True, desired_coordinator=id_of(desired))
        await asyncio.sleep(SLOW * (20 + TIMING.heartbeat))
        assert fleet.leaders() == [second]

    fleet.run(story)


def test_a_request_that_cannot_be_met_costs_little() -> None:
    """The desired worker has died: the leader leads on, and lists sessions seldom.

    Found: it listed them at every heartbeat, for as long as it led.
    """
    fleet = Fleet(79, settings=SHORT, store=BilledStore)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(10)
        leader, desired = one(fleet.leaders()), others(fleet)[0]
        await request(leader, force=True, desired_coordinator=id_of(desired))
        desired.node.kill()
        await asyncio.sleep(120)
        assert fleet.leaders() == [leader]
        sent = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        # A heartbeat, a check, a listing, two for the work; a few for requests and renewals.
        assert leader.link.requests - sent <= 20 * 1.05 * 5 + 20

    fleet.run(story)


def test_an_unknown_worker_is_not_found_and_the_others_are_listed() -> None:
    """The error lists the workers to choose from."""
    fleet = Fleet(80)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(10)
        with pytest.raises(NotFound) as caught:
            await request(fleet.workers[0], force=True, desired_coordinator="worker-nobody")
        for worker in fleet.workers:
            assert id_of(worker) in str(caught.value)

    fleet.run(story)


# Events.


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_a_mandate_is_renewed_and_ends_with_the_oldest(store: type[MemoryStore]) -> None:
    """A younger worker that led first hands over to an older one, not to a later one."""
    fleet = Fleet(81, size=0, settings=SHORT, store=store, records_events=True)
    older, younger = fleet.add("older", skew=-100.0), fleet.add("younger")

    async def story() -> None:
        fleet.start(younger)
        await asyncio.sleep(90)
        (renewed,) = younger.events_named("coord:coordinator-epoch-renewed")
        assert renewed.worker_id == id_of(younger)
        assert renewed.epoch == younger.held_epochs["work"]
        assert renewed.new_epoch == renewed.until
        assert younger.node.clock.wall().seconds < renewed.until
        fleet.start(older)
        await asyncio.sleep(SLOW * (60 + 2 * TIMING.heartbeat))
        assert fleet.leaders() == [older]
        await asyncio.sleep(200)
        assert fleet.leaders() == [older]
        assert len(older.events_named("coord:coordinator-epoch-renewed")) >= 2

    fleet.run(story)


def test_every_worker_emits_each_leader_once_with_all_fields() -> None:
    """Elected, promoted, demoted and heartbeat, with all fields; a renewal elects nobody."""
    fleet = Fleet(82, settings=SHORT, records_events=True)

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
        names = [id_of(worker) for worker in seen]
        changes = [
            name for name, before in zip(names, ["", *names], strict=False) if name != before
        ]
        last = seen[-1]
        for event in last.events_named("coord:coordinator-elected"):
            assert event.role == "default/work"
            assert event.worker_id in event.active_workers
            assert event["epoch"] == event.epoch
            assert event.until > 1_700_000_000
        assert [e.worker_id for e in last.events_named("coord:coordinator-elected")] == changes
        for worker in seen:
            for gained in worker.events_named("coord:coordinator-promoted"):
                assert gained.worker_id == id_of(worker)
                assert gained.until == pytest.approx(gained.timestamp + 60, abs=10)
            for lost in worker.events_named("coord:coordinator-demoted"):
                assert lost.worker_id == id_of(worker)
                assert lost.reason in {"stopped", "handed over"}
                assert lost.epoch > 0
        heartbeats = last.events_named("coord:worker-heartbeat")
        # Its own heartbeats, and those of its leader.
        assert {event.worker_id for event in heartbeats} >= {id_of(last), names[0]}
        assert all(event.timestamp > 1_700_000_000 for event in heartbeats)

    fleet.run(story)


def test_a_demotion_has_the_end_of_the_renewed_mandate() -> None:
    """Found: it had the end of the first mandate, however often that was renewed."""
    fleet = Fleet(83, size=1, settings=SHORT, records_events=True)

    async def story() -> None:
        (worker,) = fleet.workers
        fleet.start(worker)
        await asyncio.sleep(200)
        worker.stop()
        await asyncio.sleep(10)
        (lost,) = worker.events_named("coord:coordinator-demoted")
        assert lost.until == worker.events_named("coord:coordinator-epoch-renewed")[-1].until
        assert lost.reason == "stopped"

    fleet.run(story)


def test_a_failed_heartbeat_is_not_emitted() -> None:
    """While no request gets through, no renewal of a session is emitted.

    Found: it was emitted for as long as trust lasted, and the outage was reported twice.
    """
    fleet = Fleet(84, size=1, records_events=True)

    async def story() -> None:
        (worker,) = fleet.workers
        fleet.start(worker)
        await asyncio.sleep(30)
        worker.link.weather = Weather(refused=1.0)
        emitted = len(worker.events_named("coord:worker-heartbeat"))
        await asyncio.sleep(60)
        assert len(worker.events_named("coord:worker-heartbeat")) == emitted
        assert len(worker.events_named("coord:store-silent")) == 1

    fleet.run(story)


# Cold start.

COLD = CoordinatorSettings(
    heartbeat_interval=5,
    worker_timeout=15,
    cold_start_observation_window=8,
    cold_start_preparation_delay=3,
)


def phases(worker: Worker) -> list[str]:
    """Return the phases of a worker's cold start."""
    return [event.phase for event in worker.events_named("coord:cold-start-phase-changed")]


def test_the_first_election_goes_through_all_phases() -> None:
    """Workers observe, elect, prepare, and only then lead; their sessions do not wait."""
    fleet = Fleet(85, settings=COLD, rate=0.0, records_events=True)

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
        (gained,) = elected.events_named("coord:coordinator-promoted")
        assert gained.timestamp == pytest.approx(1_700_000_011, abs=1)
        await asyncio.sleep(TIMING.heartbeat)
        for worker in fleet.workers:
            events = worker.events_named("coord:cold-start-phase-changed")
            assert [each.phase for each in events] == [
                "observing",
                "electing",
                "preparing",
                "ready",
            ]
            assert [each.duration for each in events] == sorted(each.duration for each in events)
            assert {each.role for each in events} == {"default/work"}

    fleet.run(story)


def coordinator(worker: Worker) -> Coordinator:
    """Return a worker's coordinator."""
    return worker.coordinators["work"]


def test_a_worker_that_finds_a_leader_skips_the_cold_start() -> None:
    """A worker that joins later is ready at once."""
    fleet = Fleet(86, settings=COLD, records_events=True)

    async def story() -> None:
        first, *later = fleet.workers
        fleet.start(first)
        await asyncio.sleep(30)
        for worker in later:
            fleet.start(worker)
        await asyncio.sleep(2)
        for worker in later:
            assert phases(worker) == ["observing", "electing", "preparing", "ready"]

    fleet.run(story)


def test_a_cold_start_can_be_skipped() -> None:
    """Then a worker leads at once, and the only phase is the last."""
    settings = CoordinatorSettings(
        heartbeat_interval=5,
        worker_timeout=15,
        cold_start_observation_window=8,
        cold_start_preparation_delay=3,
        skip_cold_start=True,
    )
    fleet = Fleet(87, settings=settings, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(TIMING.heartbeat + 1)
        assert coordinator(one(fleet.leaders())).is_coordinator
        assert all(phases(worker) == ["ready"] for worker in fleet.workers)

    fleet.run(story)


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
        ({"cold_start_preparation_delay": -1}, "preparation_delay .*got -1.*Use 0 or more"),
        ({"coordinator_work_interval": 0}, "coordinator_work_interval .*got 0.*Use more than 0"),
        (
            {"min_epoch_duration": 400},
            r"must be between 0 and max_epoch_duration=300 \(got 400\)\. Lower it",
        ),
        ({"min_epoch_duration": -1}, "min_epoch_duration .*got -1"),
    ],
)
def test_invalid_options_are_refused(options: Any, message: str) -> None:
    """The error names the option and the probable intention."""
    with pytest.raises(Invalid, match=message):
        CoordinatorSettings(**options)


def test_the_defaults_depend_on_the_store() -> None:
    """A heartbeat every 5 s where requests are free; every 30 s, and a cold start, elsewhere."""
    free, billed = MemoryStore(), BilledStore()
    timing = CoordinatorSettings().timing(free)
    assert (timing.heartbeat, timing.timeout) == (5, 15)
    timing = CoordinatorSettings().timing(billed)
    assert (timing.heartbeat, timing.timeout) == (30, 90)
    work = CoordinatorSettings().for_store(billed, timing)
    assert (work.cold_start_observation_window, work.cold_start_preparation_delay) == (15, 5)
    work = SETTINGS.for_store(free, TIMING)
    assert (work.cold_start_observation_window, work.cold_start_preparation_delay) == (0, 0)
