"""Nasty scenarios: each once broke a coordinator somewhere, or would have broken ours.

All run in the simulated world. None may end a worker, lower an epoch or cause a flood of requests.
"""

import asyncio
import contextlib
import functools
import itertools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest
from fleets import (
    SINGLETON,
    TIMING,
    BilledStore,
    Fleet,
    SeparateNode,
    Worker,
    storm,
    write_singleton,
)

from jobsync.coordination.coordinator import Hooks
from jobsync.coordination.observer import DEAD_SESSION_TTL
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.coordination.term import Term
from jobsync.errors import Corrupt, Fenced, Misconfigured, NewerFormat, Unavailable
from jobsync.stores.memory import MemoryStore
from jobsync.testing.weather import CALM, Weather
from jobsync.testing.world import Node

HEARTBEAT = 1.06 * TIMING.heartbeat
"""A heartbeat interval by the slowest clock, with a request to the store."""
TIMEOUT = 1.06 * TIMING.timeout


def one(workers: list[Worker]) -> Worker:
    """Return the only one."""
    (worker,) = workers
    return worker


def incarnation_of(worker: Worker) -> str:
    """Return the name of a worker's session."""
    assert worker.membership is not None
    return worker.membership.incarnation


def followers(fleet: Fleet) -> list[Worker]:
    """Return the live workers that do not lead."""
    leaders = fleet.leaders()
    return [worker for worker in fleet.workers if worker.node.is_alive and worker not in leaders]


# Not sessions: the wrong type, missing fields, numbers out of range, an invalid timing.
BAD_SESSIONS: list[Any] = [
    "junk",
    [],
    7,
    {},
    {"state": "live"},
    {"worker": "w", "state": "live", "beat": 2**53, "timing": {"beat": 5, "timeout": 1}},
    {"worker": "w", "state": "asleep", "beat": 1, "timing": {"beat": 5, "timeout": 15}},
    {"worker": 3, "state": "live", "beat": "many", "timing": {"beat": 5, "timeout": 15}},
]


@pytest.mark.parametrize("store", [None, BilledStore])
@pytest.mark.parametrize("junk", BAD_SESSIONS, ids=str)
def test_a_corrupt_session_is_left_alone(junk: Any, store: Any) -> None:
    """A follower whose record is corrupt comes back, the others go on, and the record stays.

    Found: a known session was rewritten as dead whatever it had become; a record that was not an
    object, or had an invalid timing, ended every leader in turn.
    """
    fleet = Fleet(11, records_events=True, **({"store": store} if store else {}))

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(120)
        leader, victim = one(fleet.leaders()), followers(fleet)[0]
        key = f"session/{incarnation_of(victim)}"
        await fleet.overwrite(key, junk)
        await asyncio.sleep(4 * TIMEOUT)
        assert one(fleet.leaders()) is leader
        assert incarnation_of(victim) not in key
        record = await fleet.store.get(key)
        assert record is not None
        assert record.value == junk
        reported = [event.key for event in leader.events_named("store:record-set-aside")]
        assert reported == [key]
        before = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        # Heartbeat, check and listing; the work; nothing for the corrupt record.
        assert leader.link.requests - before <= 20 * 1.05 * 6 + 6
        fleet.check_steady()

    fleet.run(story)
    assert fleet.deaths == 0


def test_a_corrupt_session_of_the_leader_costs_one_term() -> None:
    """A leader whose record is corrupt comes back with a new session and a higher epoch."""
    fleet = Fleet(12, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        epoch = leader.held_epochs["work"]
        await fleet.overwrite(f"session/{incarnation_of(leader)}", "junk")
        await asyncio.sleep(2 * TIMEOUT)
        assert one(fleet.leaders()) is leader
        assert leader.held_epochs["work"] == epoch + 1
        assert len(leader.events_named("coord:session-lost")) == 1
        fleet.check_steady()

    fleet.run(story)


@pytest.mark.parametrize("repair", ["drop", "delete", "restore"])
def test_a_dead_leader_with_a_corrupt_record_is_replaced_after_the_repair(repair: str) -> None:
    """An unreadable session is not declared dead; once a person repairs it, a worker leads.

    Found: a session that was once unreadable was never declared dead, even if repaired or gone.
    """
    fleet = Fleet(13, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        key = f"session/{incarnation_of(leader)}"
        intact = await fleet.store.get(key)
        assert intact is not None
        leader.node.kill()
        await fleet.overwrite(key, ["junk"])
        await asyncio.sleep(4 * TIMEOUT)
        assert fleet.leaders() == []
        match repair:
            case "drop":
                await fleet.store.drop([key])
            case "delete":
                corrupt = await fleet.store.get(key)
                assert corrupt is not None
                await fleet.operator.write([corrupt.delete()])
            case _:
                await fleet.overwrite(key, intact.value)
        await asyncio.sleep(2 * TIMEOUT + HEARTBEAT)
        assert one(fleet.leaders()) is not leader

    fleet.run(story)


def test_a_session_that_the_store_cannot_read_disturbs_nobody() -> None:
    """A follower's record that is not JSON is reported once, read once and left alone."""
    fleet = Fleet(14, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader, victim = one(fleet.leaders()), followers(fleet)[0]
        victim.node.kill()
        fleet.corrupt(f"session/{incarnation_of(victim)}")
        await asyncio.sleep(4 * TIMEOUT)
        assert len(leader.events_named("store:record-set-aside")) == 1
        before = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        assert leader.link.requests - before <= 20 * 1.05 * 6 + 6
        fleet.check_steady()

    fleet.run(story)


def test_a_session_of_a_newer_format_is_neither_declared_dead_nor_rewritten() -> None:
    """An older version leaves alone what a newer one wrote, and goes on.

    Found: an observer that tried to declare one dead ended, and so did each of its successors.
    """
    fleet = Fleet(15, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        victim = followers(fleet)[0]
        key = f"session/{incarnation_of(victim)}"
        record = await fleet.store.get(key)
        assert record is not None
        victim.node.kill()
        await fleet.overwrite(key, record.value, format=2)
        await asyncio.sleep(4 * TIMEOUT)
        after = await fleet.store.get(key)
        assert after is not None
        assert (after.format, after.value) == (2, record.value)
        fleet.check_steady()

    fleet.run(story)
    assert fleet.deaths == 0


def test_a_session_that_ended_cleanly_is_not_declared_dead_again() -> None:
    """A clean stop is one write, and no worker reports a death.

    Found: the leader watched the ended session for a timeout, and wrote its death once more.
    """
    fleet = Fleet(16, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        followers(fleet)[0].stop()
        await asyncio.sleep(6 * TIMEOUT)
        assert [each.events_named("coord:worker-died") for each in fleet.workers] == [[]] * 4
        fleet.check_steady()

    fleet.run(story)
    assert fleet.deaths == 1


ROLE = "role/default/work"
REQUEST = "request/default/work"

# Not roles: the wrong type, missing fields, numbers out of range, owners that are not session
# names, an epoch below that of the record.
BAD_ROLES: list[Any] = [
    "junk",
    {},
    {"epoch": 2**53},
    {"epoch": -1},
    {"epoch": "seven"},
    {"epoch": 0},
    {"owner": "../../etc/passwd"},
    {"owner": ""},
    {"owner": 3},
    {"timeout": -5},
    {"successor": "a b"},
]


@pytest.mark.parametrize("junk", BAD_ROLES, ids=str)
def test_a_corrupt_role_is_reported_and_left_alone(junk: Any) -> None:
    """Every worker reports it once, it costs few requests, and a repair resolves it.

    Found: an owner that is not a session name, or an epoch without a next one, ended every worker
    that read it, with all its other work.
    """
    fleet = Fleet(21, records_events=True, works=("work", "other"))

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        intact = await fleet.store.get(ROLE)
        assert intact is not None
        corrupt = {**intact.value, **junk} if junk and isinstance(junk, dict) else junk
        await fleet.overwrite(ROLE, corrupt)
        await asyncio.sleep(20)
        before = [each.link.requests for each in fleet.workers]
        await asyncio.sleep(20 * TIMING.heartbeat)
        for worker, sent in zip(fleet.workers, before, strict=True):
            assert len(worker.events_named("coord:election-halted")) == 1
            # Heartbeat and check, and a leader's requests for two works.
            assert worker.link.requests - sent <= 20 * 1.05 * 8
        record = await fleet.store.get(ROLE)
        assert record is not None
        assert record.value == corrupt
        assert len(fleet.leaders("other")) == 1
        # Nobody took it, and its holder keeps it.
        assert fleet.leaders() == [leader]
        await fleet.overwrite(ROLE, intact.value)
        await asyncio.sleep(TIMEOUT)
        fleet.check_steady()
        assert fleet.leaders() == [leader]
        leader.node.kill()
        await asyncio.sleep(2 * TIMEOUT)
        assert one(fleet.leaders()) is not leader

    fleet.world.run(story)
    # Only the operator's own writes lowered the epoch.
    assert [each for each in fleet.all_violations if "epoch decreased" not in each.detail] == []


def test_a_role_of_a_newer_format_is_neither_taken_nor_rewritten() -> None:
    """Even if its owner is dead: a newer version may give the record another meaning."""
    fleet = Fleet(22, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        intact = await fleet.store.get(ROLE)
        assert intact is not None
        leader.node.kill()
        await fleet.overwrite(ROLE, intact.value, format=2)
        await asyncio.sleep(4 * TIMEOUT)
        assert fleet.leaders() == []
        after = await fleet.store.get(ROLE)
        assert after is not None
        assert (after.format, after.value) == (2, intact.value)
        for worker in followers(fleet):
            assert len(worker.events_named("coord:election-halted")) == 1

    fleet.run(story)


def test_fields_of_other_versions_survive() -> None:
    """Unknown fields of a session and a role are kept; optional ones may be missing."""
    fleet = Fleet(23, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        leader = one(fleet.leaders())
        role = await fleet.store.get(ROLE)
        assert role is not None
        older = {name: role.value[name] for name in ("epoch", "owner", "since", "until", "timeout")}
        await fleet.overwrite(ROLE, {**older, "colour": "green"})
        key = f"session/{incarnation_of(leader)}"
        session = await fleet.store.get(key)
        assert session is not None
        oldest = {name: session.value[name] for name in ("worker", "state", "beat", "timing")}
        await fleet.overwrite(key, {**oldest, "mood": "good"})
        await asyncio.sleep(300)
        renewed, session_after = await fleet.store.get(ROLE), await fleet.store.get(key)
        assert renewed is not None
        assert session_after is not None
        assert renewed.value["colour"] == "green"
        assert renewed.value["until"] > role.value["until"]
        assert session_after.value["mood"] == "good"
        assert session_after.value["beat"] > session.value["beat"]
        fleet.check_steady()

    fleet.run(story)


SHORT = CoordinatorSettings(
    heartbeat_interval=5, worker_timeout=15, min_epoch_duration=20, max_epoch_duration=60
)


@pytest.mark.parametrize("junk", ["junk", {}, {"epoch": 2**53, "by": "me"}, {"epoch": 1, "by": 3}])
def test_a_corrupt_request_is_ignored_and_replaced(junk: Any) -> None:
    """The mandate is renewed as usual, and the next request is met.

    Found: it halted the election, so the mandate was never renewed, and blocked every later
    request.
    """
    fleet = Fleet(24, records_events=True, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(15)
        leader = one(fleet.leaders())
        await fleet.overwrite(REQUEST, junk)
        await asyncio.sleep(90)
        assert fleet.leaders() == [leader]
        assert leader.events_named("coord:coordinator-epoch-renewed")
        other = followers(fleet)[0]
        assert other.membership is not None
        await other.run(
            other.coordinators["work"].ensure_coordinator(
                force=True, desired_coordinator=other.membership.worker_id
            )
        )
        await asyncio.sleep(2 * HEARTBEAT)
        assert fleet.leaders() == [other]
        assert all(worker.events_named("coord:election-halted") == [] for worker in fleet.workers)

    fleet.run(story)


def test_a_worker_that_died_before_the_first_election_is_waited_for_once() -> None:
    """A dead older session whose record remains costs one heartbeat, not the election.

    Found: while there was no role yet, the wait for an older worker restarted at every check.
    """
    fleet = Fleet(25, store=BilledStore)

    async def story() -> None:
        first, *others = fleet.workers
        fleet.start(first)
        await asyncio.sleep(1)
        first.node.kill()
        for worker in others:
            fleet.start(worker)
        await asyncio.sleep(TIMING.heartbeat / 2 + 3 * HEARTBEAT)
        fleet.check_steady()

    fleet.run(story)


def test_a_role_that_was_removed_is_taken_again_above_its_epoch() -> None:
    """An operator deletes it while it is held: no second leader, and no epoch twice."""
    fleet = Fleet(26)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        for removal in ("delete", "drop"):
            epoch = leader.held_epochs["work"]
            record = await fleet.store.get(ROLE)
            assert record is not None
            if removal == "delete":
                await fleet.operator.write([record.delete()])
            else:
                await fleet.store.drop([ROLE])
            await asyncio.sleep(4 * TIMEOUT)
            leader = one(fleet.leaders())
            assert leader.held_epochs["work"] > epoch
        fleet.check_steady()

    fleet.world.run(story)
    # The dropped record starts a new chain; everything else holds.
    assert [
        each for each in fleet.all_violations if not each.detail.startswith(f"{ROLE}: a write is")
    ] == []


def test_epochs_do_not_restart_when_all_workers_restart() -> None:
    """The role is removed while no worker runs: its singletons keep the highest epoch."""
    fleet = Fleet(27)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(120)
        epoch = one(fleet.leaders()).held_epochs["work"]
        for worker in list(fleet.workers):
            worker.node.kill()
        await fleet.store.drop([ROLE])
        for worker in list(fleet.workers):
            fleet.restart(worker)
        await asyncio.sleep(3 * TIMEOUT)
        assert one(fleet.leaders()).held_epochs["work"] > epoch

    fleet.world.run(story)
    assert [
        each for each in fleet.all_violations if not each.detail.startswith(f"{ROLE}: a write is")
    ] == []


def test_a_store_restored_from_an_older_copy_halts_the_election() -> None:
    """No worker that has seen a higher epoch leads, and each reports it."""
    fleet = Fleet(28, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        slots = dict(fleet.store._data.records)
        former = one(fleet.leaders())
        former.node.kill()
        await asyncio.sleep(3 * TIMEOUT)
        assert one(fleet.leaders()) is not former
        fleet.store._data.records |= {ROLE: slots[ROLE]}
        await asyncio.sleep(3 * TIMEOUT)
        assert fleet.leaders() == []
        halted = [
            worker for worker in followers(fleet) if worker.events_named("coord:election-halted")
        ]
        assert halted
        for worker in halted:
            (event,) = worker.events_named("coord:election-halted")
            assert "restored from an older copy" in event.reason
        await asyncio.sleep(10 * TIMEOUT)
        assert fleet.leaders() == []

    fleet.world.run(story)


def test_a_take_that_lands_after_the_work_was_stopped_blocks_nobody() -> None:
    """A worker that has withdrawn, and whose session lives on, gives up a role that it gets late.

    Found: the role named a live session that did not hold it, forever.
    """
    fleet = Fleet(31, size=0, works=("work", "other"))
    late, other = fleet.add("late"), fleet.add("other", ("work",))

    async def story() -> None:
        late.link.delayed_writes = (ROLE, 40.0)
        fleet.start(late)
        await asyncio.sleep(12)
        await late.run(late.coordinators.pop("work").stop())
        late.works = ("other",)
        await asyncio.sleep(60)
        late.link.delayed_writes = None
        fleet.start(other)
        await asyncio.sleep(2 * TIMEOUT)
        assert fleet.leaders() == [other]
        fleet.check_steady()

    fleet.run(story)


@pytest.mark.parametrize("latency", [0.01, 2.0])
def test_a_work_can_be_stopped_at_any_moment(latency: float) -> None:
    """Whenever one of two works is stopped, another worker comes to lead it.

    Found: nobody gave up a role whose take was under way meanwhile.
    """
    for moment in range(40):
        fleet = Fleet(3200 + moment, size=0, works=("work", "other"), store=BilledStore)
        first, second = fleet.add("first"), fleet.add("second", ("work",))

        async def story(
            fleet: Fleet = fleet, first: Worker = first, second: Worker = second, at: int = moment
        ) -> None:
            first.link.weather = Weather(latency=latency)
            fleet.start(first)
            # Open, half an interval of cold start, check, list, take: six requests or more.
            await asyncio.sleep(at * (2.5 / 20 + 10 * latency / 40))
            fleet.start(second)
            first.works = ("other",)
            if "work" in first.coordinators:
                await first.run(first.coordinators.pop("work").stop())
            first.link.weather = CALM
            await asyncio.sleep(4 * TIMEOUT)
            assert fleet.leaders() == [second]

        fleet.run(story)


def hang(*_: object) -> Awaitable[None]:
    """Wait forever."""
    return asyncio.get_running_loop().create_future()


async def hang_on(*_: object) -> None:
    """Wait forever, even when cancelled."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await hang()


async def fail(*_: object) -> None:
    """Raise."""
    raise ValueError("user code")


async def raise_cancelled(*_: object) -> None:
    """Raise as a task does that waits for a cancelled one."""
    raise asyncio.CancelledError


@pytest.mark.parametrize("hooks", [{"on_stop": hang}, {"work": hang_on}, {"on_become": hang_on}])
def test_hooks_that_never_return_do_not_block_other_leaders(hooks: Any) -> None:
    """The clock ends the term, whatever hooks do; then another worker leads.

    Found: after a lapse the role still named the live session whose hook hung.
    """
    hung: list[Worker] = []

    def build_hooks(worker: Worker, work: str) -> Hooks:
        if not hung or worker is hung[0]:
            hung.append(worker)
            return Hooks(**hooks)
        return write_singleton(worker, work)

    fleet = Fleet(33, hooks=build_hooks)

    async def story() -> None:
        first, *others = fleet.workers
        fleet.start(first)
        await asyncio.sleep(30)
        for worker in others:
            fleet.start(worker)
        await asyncio.sleep(30)
        assert fleet.leaders() == [first]
        for link in fleet.links:
            link.requests_pass = False
        await asyncio.sleep(60)
        assert fleet.leaders() == []
        for link in fleet.links:
            link.requests_pass = True
        await asyncio.sleep(2 * TIMEOUT + HEARTBEAT)
        assert one(fleet.leaders()) is not first
        assert first.is_trusted

    fleet.run(story)


@pytest.mark.parametrize("broken", [fail, raise_cancelled])
def test_hooks_that_raise_are_reported_and_called_again(broken: Any) -> None:
    """Whatever they raise, even a cancellation, the term goes on and every call comes.

    Found: a hook that raised the cancellation of something it awaited silently ended the work of
    that term, or all leading.
    """
    calls: list[str] = []

    def build_hooks(_: Worker, __: str) -> Hooks:
        async def become(term: Term) -> None:
            calls.append("become")
            await broken(term)

        async def work(term: Term) -> None:
            calls.append("work")
            await broken(term)

        async def stop(term: Term) -> None:
            calls.append("stop")
            await broken(term)

        return Hooks(on_become=become, work=work, on_stop=stop)

    fleet = Fleet(34, size=1, hooks=build_hooks, records_events=True)

    async def story() -> None:
        (worker,) = fleet.workers
        fleet.start(worker)
        await asyncio.sleep(30)
        for link in fleet.links:
            link.requests_pass = False
        await asyncio.sleep(30)
        for link in fleet.links:
            link.requests_pass = True
        await asyncio.sleep(30)
        assert len(worker.events_named("jobsync:handler-failed")) == len(calls)

    fleet.run(story)
    assert calls.count("become") == 2
    assert calls.count("stop") == 1
    assert calls.count("work") > 8


def test_a_blocked_home_loop_does_not_cost_the_lead() -> None:
    """User code blocks its loop for three timeouts: the heartbeats go on elsewhere."""
    fleet = Fleet(35, rate=0.0)
    threads: dict[Worker, Node] = {}

    def host(worker: Worker) -> SeparateNode:
        thread = threads[worker] = fleet.world.node(f"{worker.node.name}-thread")
        return SeparateNode(thread)

    fleet.host = host

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        epoch = leader.held_epochs["work"]
        leader.node.pause()
        await asyncio.sleep(3 * TIMING.timeout)
        assert leader.held_epochs == {"work": epoch}
        leader.node.resume()
        await asyncio.sleep(60)
        assert leader.held_epochs == {"work": epoch}
        fleet.check_steady()

    fleet.run(story)
    assert fleet.deaths == 0


def test_access_denied_for_a_while_costs_the_lead_and_nothing_else() -> None:
    """After ten minutes of 403 for all, leaders step down in time, and all come back."""
    fleet = Fleet(36, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        for link in fleet.links:
            link.refusal = Misconfigured("url", "…", "access was denied", "check the rights")
        await asyncio.sleep(TIMEOUT)
        assert fleet.leaders() == []
        before = [link.requests for link in fleet.links]
        await asyncio.sleep(600)
        for link, sent in zip(fleet.links, before, strict=True):
            # A heartbeat and a check, and nobody leads.
            assert link.requests - sent <= 2 * 1.05 * 600 / TIMING.heartbeat + 4
            link.refusal = None
        await asyncio.sleep(2 * TIMEOUT)
        fleet.check_steady()
        for worker in fleet.workers:
            assert len(worker.events_named("coord:store-silent")) == 1

    fleet.run(story)
    assert fleet.deaths == 0


@pytest.mark.parametrize(
    "refusal",
    [
        Misconfigured("url", "…", "access was denied", "check the rights"),
        Unavailable("store", "busy"),
        Corrupt("single/ledger-work", "torn"),
        NewerFormat("single/ledger-work", 2, 1),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_singleton_that_cannot_be_sealed_yet_is_sealed_later(refusal: Exception) -> None:
    """The leader retries, seldom, until it can seal; then it works.

    Found: any error but an outage ended the leader's task, and it kept the role without working.
    """
    fleet = Fleet(37)

    async def story() -> None:
        for link in fleet.links:
            link.refusal, link.refused_prefix = refusal, SINGLETON
        fleet.start_all()
        await asyncio.sleep(30)
        leader = one(fleet.leaders())
        sent = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        assert leader.link.requests - sent <= 20 * 1.05 * 6
        for link in fleet.links:
            link.refusal = None
        await asyncio.sleep(3 * HEARTBEAT)
        written = await fleet.store.get(f"{SINGLETON}-work")
        assert written is not None
        assert written.value["epoch"] == leader.held_epochs["work"]

    fleet.run(story)


def test_terms_that_could_not_be_sealed_end_without_a_hook() -> None:
    """Before and after terms that could; `on_stop` follows `on_become`, term by term."""
    fleet = Fleet(38, size=1)
    refusal = Unavailable("store", "busy")

    async def story() -> None:
        (worker,) = fleet.workers
        worker.link.refusal, worker.link.refused_prefix = refusal, SINGLETON
        fleet.start_all()
        await asyncio.sleep(1)
        for can_seal in (False, True, False, False, True, False):
            worker.link.refusal = None if can_seal else refusal
            worker.coordinators["work"].stand()
            await asyncio.sleep(3 * HEARTBEAT)
            assert fleet.leaders() == [worker]
            worker.coordinators["work"].withhold("the next term begins")
            await asyncio.sleep(3 * HEARTBEAT)
            assert fleet.leaders() == []
        assert [what for _, what, _ in worker.hooks] == ["gained", "lost"] * 2

    fleet.run(story)


def test_a_store_whose_notifications_fail_ends_nobody() -> None:
    """Waiting for a change fails repeatedly: it is only a hint, and checks go on.

    Found: the error came in a group, which nothing caught, and the member ended.
    """
    fleet = Fleet(38)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        for link in fleet.links:
            link.fails_waits = True
        # This write ends the waits that are under way.
        leader = one(fleet.leaders())
        leader.stop()
        await asyncio.sleep(120)
        fleet.check_steady()
        before = fleet.workers[-1].link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        assert fleet.workers[-1].link.requests - before <= 20 * 1.05 * 7

    fleet.run(story)


@types.coroutine
def cancelled_at(work: Coroutine[Any, Any, Any], moment: int) -> Generator[Any, Any, bool]:
    """Run a coroutine and cancel it at one await; return whether it finished before."""
    step: Callable[[], Any] = lambda: work.send(None)  # noqa: E731 - replaced below
    for number in itertools.count():
        try:
            awaited = step()
        except StopIteration:
            return True
        if number == moment:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 - passed on to the coroutine
            step = functools.partial(work.throw, error)
        else:
            step = lambda: work.send(None)  # noqa: E731 - as above
    raise AssertionError


async def cancel_at(fleet: Fleet, start: Callable[[], Coroutine[Any, Any, Any]], at: int) -> bool:
    """Cancel a coroutine at an await; return whether it finished before."""
    worker = fleet.workers[0]

    async def attempt() -> bool:
        try:
            return await cancelled_at(start(), at)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return False

    return await worker.run(attempt())


def try_every_await(story: Callable[[Fleet, Worker, int], Awaitable[bool]]) -> int:
    """Run a story with a cancellation at its first await, its second, and so on; count them."""
    for at in itertools.count():
        fleet = Fleet(4000 + at, size=2, store=BilledStore if at % 2 else MemoryStore)

        async def run(fleet: Fleet = fleet, at: int = at) -> bool:
            return await story(fleet, fleet.workers[0], at)

        is_over = fleet.world.run(run)
        assert fleet.all_violations == []
        if is_over:
            return at
    raise AssertionError


async def check_gone(fleet: Fleet, worker: Worker) -> None:
    """Check that a worker sends nothing any more, and that the other one leads."""
    await asyncio.sleep(4 * TIMEOUT)
    sent = worker.link.requests
    await asyncio.sleep(4 * TIMEOUT)
    assert worker.link.requests == sent
    assert fleet.leaders() == [fleet.workers[1]]


def test_a_start_can_be_cancelled_at_any_await() -> None:
    """A cancelled start leaves no membership: no heartbeat goes on without an owner.

    Found: the session of a cancelled start sent heartbeats forever.
    """

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        fleet.start(fleet.workers[1])
        membership = worker.build_membership()
        if await cancel_at(fleet, membership.start, at):
            await worker.run(membership.leave())
            return True
        await check_gone(fleet, worker)
        return False

    assert try_every_await(story) >= 1


def test_a_candidacy_can_be_cancelled_at_any_await() -> None:
    """A cancelled candidacy leaves no candidate, and blocks no other leader.

    Found: the member stayed a candidate, took the role and did nothing with it.
    """

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        membership = worker.membership = worker.build_membership()
        await worker.run(membership.start())
        is_over = await cancel_at(fleet, lambda: membership.coordinate("work"), at)
        fleet.start(fleet.workers[1])
        await asyncio.sleep(4 * TIMEOUT)
        if not is_over:
            assert fleet.leaders() == [fleet.workers[1]]
            await worker.run(membership.coordinate("work"))
        await worker.run(membership.leave())
        await check_gone(fleet, worker)
        return is_over

    assert try_every_await(story) >= 1


def test_a_stop_can_be_cancelled_at_any_await() -> None:
    """A cancelled stop has stopped all the same, and may be repeated."""

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        fleet.start(worker)
        await asyncio.sleep(30)
        fleet.start(fleet.workers[1])
        await asyncio.sleep(30)
        coordinator = worker.coordinators["work"]
        assert coordinator.is_coordinator
        is_over = await cancel_at(fleet, coordinator.stop, at)
        await asyncio.sleep(4 * TIMEOUT)
        assert fleet.leaders() == [fleet.workers[1]]
        await worker.run(coordinator.stop())
        return is_over

    assert try_every_await(story) >= 2


def test_a_leave_can_be_cancelled_at_any_await() -> None:
    """A cancelled leave has left all the same.

    Found: a session went on after its owner had stopped waiting for a hook.
    """

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        membership = worker.membership = worker.build_membership()
        await worker.run(membership.start())
        await worker.run(worker.coordinate("work"))
        await worker.run(worker.coordinate("other"))
        await asyncio.sleep(30)
        fleet.start(fleet.workers[1])
        await asyncio.sleep(30)
        assert worker.coordinators["work"].is_coordinator
        is_over = await cancel_at(fleet, membership.leave, at)
        await check_gone(fleet, worker)
        return is_over

    assert try_every_await(story) >= 3


LEDGER = f"{SINGLETON}-work"


async def read_ledger(fleet: Fleet) -> Any:
    """Return what the coordinators have written last."""
    record = await fleet.store.get(LEDGER)
    assert record is not None
    return record.value


def term_of(worker: Worker) -> Term:
    """Return a worker's current term."""
    term = worker.coordinators["work"].term
    assert term is not None
    return term


async def await_successor(fleet: Fleet, leader: Worker) -> Worker:
    """Wait until another worker leads, and has written."""
    await asyncio.sleep(2 * TIMEOUT + 2 * HEARTBEAT)
    successor = one([worker for worker in fleet.leaders() if worker is not leader])
    assert (await read_ledger(fleet))["epoch"] == successor.held_epochs["work"]
    return successor


@pytest.mark.parametrize("strike", ["pause", "suspend"])
def test_a_leader_that_was_paused_during_its_replacement_writes_nothing(strike: str) -> None:
    """Paused between check and write for ten minutes; after a suspend it even trusts itself.

    Its write is refused: its successor has sealed the record.
    """
    fleet = Fleet(51, rate=0.0, trusts_clocks=strike == "pause")

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(62)
        leader = one(fleet.leaders())
        term = term_of(leader)
        getattr(leader.node, strike)()
        successor = await await_successor(fleet, leader)
        await asyncio.sleep(600)
        leader.node.resume()
        assert term.lasts == (strike == "suspend")
        with pytest.raises(Fenced):
            await leader.run(term.put(LEDGER, {"epoch": term.epoch, "count": -1}))
        await asyncio.sleep(2 * TIMEOUT)
        assert (await read_ledger(fleet))["epoch"] == successor.held_epochs["work"]
        assert not term.lasts
        fleet.check_steady()

    fleet.run(story)


def test_a_heartbeat_without_a_reply_does_not_count() -> None:
    """Requests pass and replies do not: the leader steps down in time, and joins again.

    Its heartbeats were applied, and its death replaces the last of them.
    """
    fleet = Fleet(52, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        before = incarnation_of(leader)
        leader.link.replies_pass = False
        await asyncio.sleep(TIMING.timeout)
        assert leader.held_epochs == {}
        await await_successor(fleet, leader)
        leader.link.replies_pass = True
        await asyncio.sleep(2 * TIMEOUT)
        assert incarnation_of(leader) != before
        fleet.check_steady()

    fleet.run(story)


def test_a_write_that_lands_after_its_sender_left_is_refused() -> None:
    """Its sender gave up and released the role; it arrives 25 seconds later, too late."""
    fleet = Fleet(53)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(62)
        leader = one(fleet.leaders())
        epoch = leader.held_epochs["work"]
        leader.link.delayed_writes = (SINGLETON, 25.0)
        await asyncio.sleep(2 * HEARTBEAT)
        leader.stop()
        await asyncio.sleep(60)
        (successor,) = fleet.leaders()
        assert successor.held_epochs["work"] > epoch
        assert (await read_ledger(fleet))["epoch"] == successor.held_epochs["work"]

    fleet.run(story)


def test_two_memberships_of_one_process_are_two_workers() -> None:
    """They have different ids; one of them leads, and then the other."""
    fleet = Fleet(54, size=1)

    async def story() -> None:
        (worker,) = fleet.workers
        first, second = worker.build_membership(), worker.build_membership()
        assert first.worker_id != second.worker_id
        coordinators = []
        for membership in (first, second):
            await worker.run(membership.start())
            coordinators.append(await worker.run(membership.coordinate("work")))
        await asyncio.sleep(30)
        assert [each.is_coordinator for each in coordinators] == [True, False]
        await worker.run(first.leave())
        await asyncio.sleep(HEARTBEAT)
        assert [each.is_coordinator for each in coordinators] == [False, True]
        await worker.run(second.leave())

    fleet.run(story)


@pytest.mark.parametrize("step", [-3600.0, 86_400.0, -86_400.0])
def test_steps_of_the_wall_clock_change_nothing(step: float) -> None:
    """Half of the clocks step by an hour or a day: nobody dies, and the leader stays."""
    fleet = Fleet(55, size=6)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        held = leader.held_epochs
        for worker in (leader, *fleet.workers[:3]):
            worker.node.clock.skew += step
        await asyncio.sleep(120)
        assert fleet.leaders() == [leader]
        assert leader.held_epochs == held
        fleet.check_steady()

    fleet.run(story)
    assert fleet.deaths == 0


@pytest.mark.parametrize("rate", [0.0005, 0.049])
def test_clocks_that_drift_kill_nobody(rate: float) -> None:
    """Slewed by NTP, or off by the assumed 5 %: nothing happens in an hour."""
    fleet = Fleet(56, rate=rate)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(3600)
        fleet.check_steady()

    fleet.run(story)
    assert fleet.deaths == 0


def test_clocks_beyond_the_assumption_break_no_record() -> None:
    """Off by 15 %: two may believe to lead, but no write of an earlier term is accepted."""
    fleet = Fleet(57, rate=0.15, trusts_clocks=False)

    async def story() -> None:
        fleet.start_all()
        await storm(fleet)
        for link in fleet.links:
            link.weather = CALM
        await asyncio.sleep(20 * TIMEOUT)
        fleet.check_steady()

    fleet.run(story)


def test_a_store_that_refuses_gets_few_requests() -> None:
    """The store refuses nine of ten requests of fifty workers for ten minutes.

    No worker sends more requests than usual, and one leads soon after.
    """
    fleet = Fleet(59, size=50)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        before = {worker: worker.link.requests for worker in fleet.workers}
        for link in fleet.links:
            link.weather = Weather(refused=0.9)
        await asyncio.sleep(600)
        for worker, sent in before.items():
            # A heartbeat and a check; the few that got through may have led and worked.
            assert worker.link.requests - sent <= 5 * 1.05 * 600 / TIMING.heartbeat
        for link in fleet.links:
            link.weather = CALM
        await asyncio.sleep(2 * TIMEOUT + HEARTBEAT)
        fleet.check_steady()

    fleet.run(story)


@pytest.mark.parametrize("store", [MemoryStore, BilledStore])
def test_all_start_at_once_and_elect_once(store: type[MemoryStore]) -> None:
    """Twenty workers on an empty store: one takes the role, once, and all see the same one."""
    fleet = Fleet(60, size=20, store=store, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(2 * TIMEOUT)
        fleet.check_steady()
        elected = {
            (event.worker_id, event.epoch)
            for worker in fleet.workers
            for event in worker.events_named("coord:coordinator-elected")
        }
        assert len(elected) == 1

    fleet.run(story)


def test_all_die_and_others_start_a_week_later() -> None:
    """Sessions that died long ago block nobody, and are removed."""
    fleet = Fleet(61)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        epoch = one(fleet.leaders()).held_epochs["work"]
        for worker in list(fleet.workers):
            worker.node.kill()
        await asyncio.sleep(7 * 86_400)
        for worker in list(fleet.workers):
            fleet.restart(worker)
        await asyncio.sleep(2 * TIMEOUT + HEARTBEAT)
        assert one(fleet.leaders()).held_epochs["work"] == epoch + 1
        fleet.check_steady()
        # Each leader counts from its own start; the oldest may lead after a mandate.
        await asyncio.sleep(1.06 * (DEAD_SESSION_TTL + 600))
        assert len(await fleet.store.heads("session/")) == len(fleet.workers)

    fleet.run(story)


@pytest.mark.parametrize("period", [TIMING.heartbeat, TIMING.heartbeat / 2])
def test_a_link_that_flaps_at_the_heartbeat_changes_little(period: float) -> None:
    """The leader's link is open for one heartbeat and closed for the next, for ten minutes.

    It loses the lead at most a few times, always steps down first, and one leads afterwards.
    """
    fleet = Fleet(62, records_events=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        for number in range(int(600 / period)):
            leader.link.requests_pass = bool(number % 2)
            await asyncio.sleep(period)
        leader.link.requests_pass = True
        await asyncio.sleep(2 * TIMEOUT)
        fleet.check_steady()
        changes = followers(fleet)[0].events_named("coord:coordinator-elected")
        assert len(changes) <= 4

    fleet.run(story)


def test_a_take_whose_reply_was_lost_is_repeated() -> None:
    """The database died in the commit of a take: the role names a worker that does not know it.

    That worker finds its name there, and takes the role again with the next epoch.
    """
    fleet = Fleet(63, size=1)

    async def story() -> None:
        (worker,) = fleet.workers
        worker.link.delayed_writes, worker.link.slow_replies = (ROLE, 0.5), 6.0
        fleet.start(worker)
        await asyncio.sleep(20)
        assert worker.held_epochs == {}
        found = await fleet.store.get(ROLE)
        assert found is not None
        assert found.value["owner"] == incarnation_of(worker)
        worker.link.delayed_writes, worker.link.slow_replies = None, 0.0
        await asyncio.sleep(TIMEOUT)
        assert worker.held_epochs["work"] > found.value["epoch"]

    fleet.run(story)


def test_a_role_that_the_store_cannot_read_disturbs_nothing_else() -> None:
    """A role that is not JSON: its leader goes on, nobody else leads it, other work is led."""
    fleet = Fleet(64, records_events=True, works=("work", "other"))

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        slot = fleet.store._data.records[ROLE]
        fleet.corrupt(ROLE)
        fleet.store._data.notifier.wake(["role/default/"])
        await asyncio.sleep(60)
        before = [link.requests for link in fleet.links]
        await asyncio.sleep(20 * TIMING.heartbeat)
        for worker, sent in zip(fleet.workers, before, strict=True):
            assert len(worker.events_named("store:record-set-aside")) == 1
            assert worker.link.requests - sent <= 20 * 1.05 * 11
        assert fleet.leaders() == [leader]
        assert len(fleet.leaders("other")) == 1
        fleet.store._data.records[ROLE] = slot
        leader.node.kill()
        await asyncio.sleep(2 * TIMEOUT)
        fleet.check_steady()

    fleet.run(story)
