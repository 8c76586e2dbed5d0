"""Nasty scenarios: each a story that once broke a coordinator somewhere, or would have ours.

All of them run in the simulated world, and none may lose its workers, its epochs or its calm.
"""

import asyncio
import contextlib
import functools
import itertools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest
from fleets import SINGLETON, TIMING, Apart, DearStore, Fleet, Worker, keep_books, storm

from jobsync.coordination.coordinator import Hooks
from jobsync.coordination.observer import DEAD_SESSION_TTL
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.coordination.term import Term
from jobsync.errors import Corrupt, Fenced, Misconfigured, NewerFormat, Unavailable
from jobsync.stores.memory import MemoryStore
from jobsync.testing.network import CALM, Weather
from jobsync.testing.world import Node

BEATS = 1.06 * TIMING.heartbeat
"""A beat by the slowest clock, and the way to the store and back."""
TIMEOUTS = 1.06 * TIMING.timeout


def one(workers: list[Worker]) -> Worker:
    """Give the one there is."""
    (worker,) = workers
    return worker


def incarnation_of(worker: Worker) -> str:
    """Give the name of a worker's session."""
    assert worker.membership is not None
    return worker.membership.incarnation


def followers(fleet: Fleet) -> list[Worker]:
    """Give the workers that live and do not lead."""
    leaders = fleet.leaders()
    return [worker for worker in fleet.workers if worker.node.is_alive and worker not in leaders]


# What is no session: of the wrong type, without fields, of numbers that nobody counts to, with
# a timing that nobody may have.
NO_SESSIONS: list[Any] = [
    "junk",
    [],
    7,
    {},
    {"state": "live"},
    {"worker": "w", "state": "live", "beat": 2**53, "timing": {"beat": 5, "timeout": 1}},
    {"worker": "w", "state": "asleep", "beat": 1, "timing": {"beat": 5, "timeout": 15}},
    {"worker": 3, "state": "live", "beat": "many", "timing": {"beat": 5, "timeout": 15}},
]


@pytest.mark.parametrize("store", [None, DearStore])
@pytest.mark.parametrize("junk", NO_SESSIONS, ids=str)
def test_a_corrupt_session_is_left_alone(junk: Any, store: Any) -> None:
    """A follower's record is spoilt: it comes back, the others go on, and the junk stays as it is.

    Found: a session known before was rewritten as dead whatever it had become; a record that
    was no object, or whose timing no worker may have, ended every leader in turn.
    """
    fleet = Fleet(11, listens=True, **({"store": store} if store else {}))

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(120)
        leader, victim = one(fleet.leaders()), followers(fleet)[0]
        key = f"session/{incarnation_of(victim)}"
        await fleet.overwrite(key, junk)
        await asyncio.sleep(4 * TIMEOUTS)
        assert one(fleet.leaders()) is leader
        assert incarnation_of(victim) not in key
        record = await fleet.store.get(key)
        assert record is not None
        assert record.value == junk
        aside = [event.key for event in leader.told("store:record-set-aside")]
        assert aside == [key]
        before = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        # Beat, look and list; what the work does; nothing for the junk.
        assert leader.link.requests - before <= 20 * 1.05 * 6 + 6
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 0


def test_a_corrupt_session_of_the_leader_costs_one_term() -> None:
    """The leader's own record is spoilt: it comes back with a new session and a higher epoch."""
    fleet = Fleet(12, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        epoch = leader.held["work"]
        await fleet.overwrite(f"session/{incarnation_of(leader)}", "junk")
        await asyncio.sleep(2 * TIMEOUTS)
        assert one(fleet.leaders()) is leader
        assert leader.held["work"] == epoch + 1
        assert len(leader.told("coord:session-lost")) == 1
        fleet.judge_rest()

    fleet.tell(story)


@pytest.mark.parametrize("mend", ["drop", "bury", "repair"])
def test_a_dead_leader_whose_record_is_spoilt_is_replaced_once_it_is_mended(mend: str) -> None:
    """Nobody calls dead what cannot be read; when a person has mended it, somebody leads.

    Found: a session that was unreadable once was never given up again, mended or gone.
    """
    fleet = Fleet(13, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        key = f"session/{incarnation_of(leader)}"
        whole = await fleet.store.get(key)
        assert whole is not None
        leader.node.kill()
        await fleet.overwrite(key, ["junk"])
        await asyncio.sleep(4 * TIMEOUTS)
        assert fleet.leaders() == []
        match mend:
            case "drop":
                await fleet.store.drop([key])
            case "bury":
                spoilt = await fleet.store.get(key)
                assert spoilt is not None
                await fleet.operator.write([spoilt.delete()])
            case _:
                await fleet.overwrite(key, whole.value)
        await asyncio.sleep(2 * TIMEOUTS + BEATS)
        assert one(fleet.leaders()) is not leader

    fleet.tell(story)


def test_a_session_that_cannot_even_be_read_disturbs_nobody() -> None:
    """Bytes that are no JSON, under a follower's name: told once, read once, left alone."""
    fleet = Fleet(14, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader, victim = one(fleet.leaders()), followers(fleet)[0]
        victim.node.kill()
        fleet.garble(f"session/{incarnation_of(victim)}")
        await asyncio.sleep(4 * TIMEOUTS)
        assert len(leader.told("store:record-set-aside")) == 1
        before = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        assert leader.link.requests - before <= 20 * 1.05 * 6 + 6
        fleet.judge_rest()

    fleet.tell(story)


def test_a_session_of_a_newer_format_is_neither_called_dead_nor_rewritten() -> None:
    """An older worker leaves alone what a newer one wrote, and does not fall over it.

    Found: an observer that tried to write the death of one ended, and each of its successors.
    """
    fleet = Fleet(15, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        victim = followers(fleet)[0]
        key = f"session/{incarnation_of(victim)}"
        record = await fleet.store.get(key)
        assert record is not None
        victim.node.kill()
        await fleet.overwrite(key, record.value, format=2)
        await asyncio.sleep(4 * TIMEOUTS)
        after = await fleet.store.get(key)
        assert after is not None
        assert (after.format, after.value) == (2, record.value)
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 0


def test_who_ended_in_good_order_is_not_called_dead_again() -> None:
    """A clean stop is one write, and no worker tells that another died.

    Found: whoever led watched the ended session for a timeout, and wrote its death once more.
    """
    fleet = Fleet(16, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        followers(fleet)[0].stop()
        await asyncio.sleep(6 * TIMEOUTS)
        assert [each.told("coord:worker-died") for each in fleet.workers] == [[]] * 4
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 1


ROLE = "role/default/work"
REQUEST = "request/default/work"

# What is no role: of the wrong type, without fields, of numbers that nobody counts to, with
# owners that can be no sessions, or of an epoch that its record is beyond.
NO_ROLES: list[Any] = [
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


@pytest.mark.parametrize("junk", NO_ROLES, ids=str)
def test_a_corrupt_role_is_told_of_and_left_alone(junk: Any) -> None:
    """It is told once by everybody, costs no requests to speak of, and all is well when mended.

    Found: an owner that is no name for a session, or an epoch that has no next, ended every
    worker that read it, with all the other work that it did.
    """
    fleet = Fleet(21, listens=True, works=("work", "other"))

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        whole = await fleet.store.get(ROLE)
        assert whole is not None
        spoilt = {**whole.value, **junk} if junk and isinstance(junk, dict) else junk
        await fleet.overwrite(ROLE, spoilt)
        await asyncio.sleep(20)
        before = [each.link.requests for each in fleet.workers]
        await asyncio.sleep(20 * TIMING.heartbeat)
        for worker, sent in zip(fleet.workers, before, strict=True):
            assert len(worker.told("coord:election-halted")) == 1
            # Beat and look, and twice what a leader does besides.
            assert worker.link.requests - sent <= 20 * 1.05 * 8
        record = await fleet.store.get(ROLE)
        assert record is not None
        assert record.value == spoilt
        assert len(fleet.leaders("other")) == 1
        # Nobody took it, and who has it keeps it.
        assert fleet.leaders() == [leader]
        await fleet.overwrite(ROLE, whole.value)
        await asyncio.sleep(TIMEOUTS)
        fleet.judge_rest()
        assert fleet.leaders() == [leader]
        leader.node.kill()
        await asyncio.sleep(2 * TIMEOUTS)
        assert one(fleet.leaders()) is not leader

    fleet.world.run(story)
    # The person's own writes took the epoch where no worker would.
    assert [each for each in fleet.verdict if "epoch decreased" not in each.detail] == []


def test_a_role_of_a_newer_format_is_neither_taken_nor_rewritten() -> None:
    """Its owner is dead, and still: a newer version may mean something else by all this."""
    fleet = Fleet(22, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        whole = await fleet.store.get(ROLE)
        assert whole is not None
        leader.node.kill()
        await fleet.overwrite(ROLE, whole.value, format=2)
        await asyncio.sleep(4 * TIMEOUTS)
        assert fleet.leaders() == []
        after = await fleet.store.get(ROLE)
        assert after is not None
        assert (after.format, after.value) == (2, whole.value)
        for worker in followers(fleet):
            assert len(worker.told("coord:election-halted")) == 1

    fleet.tell(story)


def test_facts_of_other_versions_survive() -> None:
    """Unknown fields of a session and of a role are kept; optional ones may be missing."""
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
        renewed, beaten = await fleet.store.get(ROLE), await fleet.store.get(key)
        assert renewed is not None
        assert beaten is not None
        assert renewed.value["colour"] == "green"
        assert renewed.value["until"] > role.value["until"]
        assert beaten.value["mood"] == "good"
        assert beaten.value["beat"] > session.value["beat"]
        fleet.judge_rest()

    fleet.tell(story)


SHORT = CoordinatorSettings(
    heartbeat_interval=5, worker_timeout=15, min_epoch_duration=20, max_epoch_duration=60
)


@pytest.mark.parametrize("junk", ["junk", {}, {"epoch": 2**53, "by": "me"}, {"epoch": 1, "by": 3}])
def test_a_corrupt_request_is_ignored_and_replaced(junk: Any) -> None:
    """The mandate is renewed as ever, and the next request is met.

    Found: it halted the election, so that the mandate was never renewed, and was in the way
    of every later request.
    """
    fleet = Fleet(24, listens=True, settings=SHORT)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(15)
        leader = one(fleet.leaders())
        await fleet.overwrite(REQUEST, junk)
        await asyncio.sleep(90)
        assert fleet.leaders() == [leader]
        assert leader.told("coord:coordinator-epoch-renewed")
        other = followers(fleet)[0]
        assert other.membership is not None
        await other.run(
            other.coordinators["work"].ensure_coordinator(
                force=True, desired_coordinator=other.membership.worker_id
            )
        )
        await asyncio.sleep(2 * BEATS)
        assert fleet.leaders() == [other]
        assert all(worker.told("coord:election-halted") == [] for worker in fleet.workers)

    fleet.tell(story)


def test_who_died_before_the_first_election_is_waited_for_once() -> None:
    """An older session of which nothing but its record is left costs one beat, not the election.

    Found: where no role was there yet, the wait for an older worker began anew at every look.
    """
    fleet = Fleet(25, store=DearStore)

    async def story() -> None:
        first, *others = fleet.workers
        fleet.start(first)
        await asyncio.sleep(1)
        first.node.kill()
        for worker in others:
            fleet.start(worker)
        await asyncio.sleep(TIMING.heartbeat / 2 + 3 * BEATS)
        fleet.judge_rest()

    fleet.tell(story)


def test_a_role_that_was_removed_is_taken_again_above_its_epoch() -> None:
    """An operator deletes it while it is held: nobody else comes to lead, and no epoch twice."""
    fleet = Fleet(26)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        for removal in ("delete", "drop"):
            epoch = leader.held["work"]
            record = await fleet.store.get(ROLE)
            assert record is not None
            if removal == "delete":
                await fleet.operator.write([record.delete()])
            else:
                await fleet.store.drop([ROLE])
            await asyncio.sleep(4 * TIMEOUTS)
            leader = one(fleet.leaders())
            assert leader.held["work"] > epoch
        fleet.judge_rest()

    fleet.world.run(story)
    # What was dropped begins a new chain; all else holds.
    assert [
        each for each in fleet.verdict if not each.detail.startswith(f"{ROLE}: a write is")
    ] == []


def test_epochs_do_not_restart_after_everything_did() -> None:
    """The role is removed while nobody runs: what it governs still knows the highest epoch."""
    fleet = Fleet(27)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(120)
        epoch = one(fleet.leaders()).held["work"]
        for worker in list(fleet.workers):
            worker.node.kill()
        await fleet.store.drop([ROLE])
        for worker in list(fleet.workers):
            fleet.follow(worker)
        await asyncio.sleep(3 * TIMEOUTS)
        assert one(fleet.leaders()).held["work"] > epoch

    fleet.world.run(story)
    assert [
        each for each in fleet.verdict if not each.detail.startswith(f"{ROLE}: a write is")
    ] == []


def test_a_store_that_went_back_in_time_halts_the_election() -> None:
    """Restored from an older copy: nobody who remembers leads, and everybody says so."""
    fleet = Fleet(28, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        slots = dict(fleet.store._data.records)
        former = one(fleet.leaders())
        former.node.kill()
        await asyncio.sleep(3 * TIMEOUTS)
        assert one(fleet.leaders()) is not former
        fleet.store._data.records |= {ROLE: slots[ROLE]}
        await asyncio.sleep(3 * TIMEOUTS)
        assert fleet.leaders() == []
        halted = [worker for worker in followers(fleet) if worker.told("coord:election-halted")]
        assert halted
        for worker in halted:
            (event,) = worker.told("coord:election-halted")
            assert "restored from an older copy" in event.reason
        await asyncio.sleep(10 * TIMEOUTS)
        assert fleet.leaders() == []

    fleet.world.run(story)


def test_a_take_that_lands_after_the_work_was_stopped_blocks_nobody() -> None:
    """A worker that stands no longer, and whose session lives on, gives up what it gets late.

    Found: the role then named a session that lived and did not hold it, for ever.
    """
    fleet = Fleet(31, size=0, works=("work", "other"))
    late, other = fleet.add("late"), fleet.add("other", ("work",))

    async def story() -> None:
        late.link.delays = (ROLE, 40.0)
        fleet.start(late)
        await asyncio.sleep(12)
        await late.run(late.coordinators.pop("work").stop())
        late.works = ("other",)
        await asyncio.sleep(60)
        late.link.delays = None
        fleet.start(other)
        await asyncio.sleep(2 * TIMEOUTS)
        assert fleet.leaders() == [other]
        fleet.judge_rest()

    fleet.tell(story)


@pytest.mark.parametrize("latency", [0.01, 2.0])
def test_a_work_can_be_stopped_at_any_moment(latency: float) -> None:
    """Whenever one of two works is stopped, somebody else comes to lead it.

    Found: a take that was under way meanwhile was nobody's to give up.
    """
    for moment in range(40):
        fleet = Fleet(3200 + moment, size=0, works=("work", "other"), store=DearStore)
        first, second = fleet.add("first"), fleet.add("second", ("work",))

        async def story(
            fleet: Fleet = fleet, first: Worker = first, second: Worker = second, at: int = moment
        ) -> None:
            first.link.weather = Weather(latency=latency)
            fleet.start(first)
            # Opened, looked around for half a beat, looked, listed, taken: six ways or more.
            await asyncio.sleep(at * (2.5 / 20 + 10 * latency / 40))
            fleet.start(second)
            first.works = ("other",)
            if "work" in first.coordinators:
                await first.run(first.coordinators.pop("work").stop())
            first.link.weather = CALM
            await asyncio.sleep(4 * TIMEOUTS)
            assert fleet.leaders() == [second]

        fleet.tell(story)


def hang(*_: object) -> Awaitable[None]:
    """Wait for what never comes."""
    return asyncio.get_running_loop().create_future()


async def hang_on(*_: object) -> None:
    """Wait for what never comes, and do not even let go when told to."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await hang()


async def fail(*_: object) -> None:
    """Raise."""
    raise ValueError("user code")


async def give_up(*_: object) -> None:
    """Raise what a task raises that waits for another, cancelled one."""
    raise asyncio.CancelledError


@pytest.mark.parametrize("hooks", [{"on_stop": hang}, {"work": hang_on}, {"on_become": hang_on}])
def test_hooks_that_never_return_keep_nobody_else_from_leading(hooks: Any) -> None:
    """The term is over by the clock, whatever hooks do; whoever is free to lead then leads.

    Found: after a lapse the role still named the session whose hook hung, and that one lived.
    """
    hung: list[Worker] = []

    def make(worker: Worker, work: str) -> Hooks:
        if not hung or worker is hung[0]:
            hung.append(worker)
            return Hooks(**hooks)
        return keep_books(worker, work)

    fleet = Fleet(33, hooks=make)

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
        await asyncio.sleep(2 * TIMEOUTS + BEATS)
        assert one(fleet.leaders()) is not first
        assert first.is_trusted

    fleet.tell(story)


@pytest.mark.parametrize("broken", [fail, give_up])
def test_hooks_that_raise_are_told_of_and_called_again(broken: Any) -> None:
    """Whatever they raise, cancellation too, the term goes on and every call comes.

    Found: a hook that raised the cancellation of something that it had waited for ended the
    work of that term, or all leading, in silence.
    """
    calls: list[str] = []

    def make(_: Worker, __: str) -> Hooks:
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

    fleet = Fleet(34, size=1, hooks=make, listens=True)

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
        assert len(worker.told("jobsync:handler-failed")) == len(calls)

    fleet.tell(story)
    assert calls.count("become") == 2
    assert calls.count("stop") == 1
    assert calls.count("work") > 8


def test_a_blocked_home_does_not_cost_the_lead() -> None:
    """User code blocks its loop for three timeouts: the session beats on elsewhere."""
    fleet = Fleet(35, rate=0.0)
    threads: dict[Worker, Node] = {}

    def host(worker: Worker) -> Apart:
        thread = threads[worker] = fleet.world.node(f"{worker.node.name}-thread")
        return Apart(thread)

    fleet.host = host

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        epoch = leader.held["work"]
        leader.node.pause()
        await asyncio.sleep(3 * TIMING.timeout)
        assert leader.held == {"work": epoch}
        leader.node.resume()
        await asyncio.sleep(60)
        assert leader.held == {"work": epoch}
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 0


def test_rights_that_are_gone_for_a_while_cost_the_lead_and_nothing_else() -> None:
    """Ten minutes of 403 for all: they step down on time, ask seldom, and come back."""
    fleet = Fleet(36, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        for link in fleet.links:
            link.refusal = Misconfigured("url", "…", "access was denied", "check the rights")
        await asyncio.sleep(TIMEOUTS)
        assert fleet.leaders() == []
        before = [link.requests for link in fleet.links]
        await asyncio.sleep(600)
        for link, sent in zip(fleet.links, before, strict=True):
            # A beat and a look, and nobody leads.
            assert link.requests - sent <= 2 * 1.05 * 600 / TIMING.heartbeat + 4
            link.refusal = None
        await asyncio.sleep(2 * TIMEOUTS)
        fleet.judge_rest()
        for worker in fleet.workers:
            assert len(worker.told("coord:store-silent")) == 1

    fleet.tell(story)
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
    """The leader tries again until it can, seldom, and then works.

    Found: anything but silence of the store ended the leader's task, and it held the role on
    without ever working.
    """
    fleet = Fleet(37)

    async def story() -> None:
        for link in fleet.links:
            link.refusal, link.refused = refusal, SINGLETON
        fleet.start_all()
        await asyncio.sleep(30)
        leader = one(fleet.leaders())
        sent = leader.link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        assert leader.link.requests - sent <= 20 * 1.05 * 6
        for link in fleet.links:
            link.refusal = None
        await asyncio.sleep(3 * BEATS)
        written = await fleet.store.get(f"{SINGLETON}-work")
        assert written is not None
        assert written.value["epoch"] == leader.held["work"]

    fleet.tell(story)


def test_a_store_that_stops_telling_of_changes_ends_nobody() -> None:
    """Waiting for a change fails, again and again: it was a hint, and looking goes on.

    Found: the error came in a group, which nothing caught, and the member ended.
    """
    fleet = Fleet(38)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(30)
        for link in fleet.links:
            link.is_deaf = True
        # What is written now ends the waits that are under way.
        leader = one(fleet.leaders())
        leader.stop()
        await asyncio.sleep(120)
        fleet.judge_rest()
        before = fleet.workers[-1].link.requests
        await asyncio.sleep(20 * TIMING.heartbeat)
        assert fleet.workers[-1].link.requests - before <= 20 * 1.05 * 7

    fleet.tell(story)


@types.coroutine
def cancelled_at(work: Coroutine[Any, Any, Any], moment: int) -> Generator[Any, Any, bool]:
    """Run a coroutine, and cancel it at one of its awaits; say whether it had finished before."""
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
        except BaseException as error:  # noqa: BLE001 - handed on to whom it is for
            step = functools.partial(work.throw, error)
        else:
            step = lambda: work.send(None)  # noqa: E731 - as above
    raise AssertionError


async def cancel_each(fleet: Fleet, make: Callable[[], Coroutine[Any, Any, Any]], at: int) -> bool:
    """Cancel something at an await, unless it ends before; say whether it did."""
    worker = fleet.workers[0]

    async def attempt() -> bool:
        try:
            return await cancelled_at(make(), at)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            return False

    return await worker.run(attempt())


def try_every_await(story: Callable[[Fleet, Worker, int], Awaitable[bool]]) -> int:
    """Tell a story with a cancellation at its first await, its second, and so on; count them."""
    for at in itertools.count():
        fleet = Fleet(4000 + at, size=2, store=DearStore if at % 2 else MemoryStore)

        async def tell(fleet: Fleet = fleet, at: int = at) -> bool:
            return await story(fleet, fleet.workers[0], at)

        is_over = fleet.world.run(tell)
        assert fleet.verdict == []
        if is_over:
            return at
    raise AssertionError


async def expect_silence(fleet: Fleet, worker: Worker) -> None:
    """Check that nothing of a worker lives on, and that the other one leads."""
    await asyncio.sleep(4 * TIMEOUTS)
    sent = worker.link.requests
    await asyncio.sleep(4 * TIMEOUTS)
    assert worker.link.requests == sent
    assert fleet.leaders() == [fleet.workers[1]]


def test_a_start_can_be_cancelled_at_any_await() -> None:
    """Whoever did not get his membership has none: nothing beats on without an owner.

    Found: the session of a cancelled start beat for ever.
    """

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        fleet.start(fleet.workers[1])
        membership = worker.make_membership()
        if await cancel_each(fleet, membership.start, at):
            await worker.run(membership.leave())
            return True
        await expect_silence(fleet, worker)
        return False

    assert try_every_await(story) >= 1


def test_a_candidacy_can_be_cancelled_at_any_await() -> None:
    """Whoever did not get his coordinator does not stand, and keeps nobody from leading.

    Found: the member stood on, took the role and did nothing with it.
    """

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        membership = worker.membership = worker.make_membership()
        await worker.run(membership.start())
        is_over = await cancel_each(fleet, lambda: membership.coordinate("work"), at)
        fleet.start(fleet.workers[1])
        await asyncio.sleep(4 * TIMEOUTS)
        if not is_over:
            assert fleet.leaders() == [fleet.workers[1]]
            await worker.run(membership.coordinate("work"))
        await worker.run(membership.leave())
        await expect_silence(fleet, worker)
        return is_over

    assert try_every_await(story) >= 1


def test_a_stop_can_be_cancelled_at_any_await() -> None:
    """Whoever began to stop has stopped, and may say so again."""

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        fleet.start(worker)
        await asyncio.sleep(30)
        fleet.start(fleet.workers[1])
        await asyncio.sleep(30)
        coordinator = worker.coordinators["work"]
        assert coordinator.is_coordinator
        is_over = await cancel_each(fleet, coordinator.stop, at)
        await asyncio.sleep(4 * TIMEOUTS)
        assert fleet.leaders() == [fleet.workers[1]]
        await worker.run(coordinator.stop())
        return is_over

    assert try_every_await(story) >= 2


def test_a_farewell_can_be_cancelled_at_any_await() -> None:
    """Whoever loses patience while leaving has left all the same.

    Found: a session went on whose owner had stopped waiting for a hook.
    """

    async def story(fleet: Fleet, worker: Worker, at: int) -> bool:
        membership = worker.membership = worker.make_membership()
        await worker.run(membership.start())
        await worker.run(worker.stand("work"))
        await worker.run(worker.stand("other"))
        await asyncio.sleep(30)
        fleet.start(fleet.workers[1])
        await asyncio.sleep(30)
        assert worker.coordinators["work"].is_coordinator
        is_over = await cancel_each(fleet, membership.leave, at)
        await expect_silence(fleet, worker)
        return is_over

    assert try_every_await(story) >= 3


LEDGER = f"{SINGLETON}-work"


async def read_ledger(fleet: Fleet) -> Any:
    """Give what the coordinators have written last."""
    record = await fleet.store.get(LEDGER)
    assert record is not None
    return record.value


def term_of(worker: Worker) -> Term:
    """Give the term that a worker leads in."""
    term = worker.coordinators["work"].term
    assert term is not None
    return term


async def await_successor(fleet: Fleet, leader: Worker) -> Worker:
    """Wait until another worker leads, and has written."""
    await asyncio.sleep(2 * TIMEOUTS + 2 * BEATS)
    successor = one([worker for worker in fleet.leaders() if worker is not leader])
    assert (await read_ledger(fleet))["epoch"] == successor.held["work"]
    return successor


@pytest.mark.parametrize("stroke", ["pause", "suspend"])
def test_a_leader_that_slept_through_its_replacement_writes_nothing(stroke: str) -> None:
    """Stopped between check and act, for ten minutes; suspended, it even believes on.

    What it then writes is refused: its successor has sealed what it would replace.
    """
    fleet = Fleet(51, rate=0.0, trusts_clocks=stroke == "pause")

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(62)
        leader = one(fleet.leaders())
        term = term_of(leader)
        getattr(leader.node, stroke)()
        successor = await await_successor(fleet, leader)
        await asyncio.sleep(600)
        leader.node.resume()
        assert term.lasts == (stroke == "suspend")
        with pytest.raises(Fenced):
            await leader.run(term.put(LEDGER, {"epoch": term.epoch, "count": -1}))
        await asyncio.sleep(2 * TIMEOUTS)
        assert (await read_ledger(fleet))["epoch"] == successor.held["work"]
        assert not term.lasts
        fleet.judge_rest()

    fleet.tell(story)


def test_a_beat_whose_reply_is_lost_is_no_beat() -> None:
    """Requests pass and replies do not: the leader steps down in time, and comes back as another.

    Its beats were applied, and its death is written in place of the last of them.
    """
    fleet = Fleet(52, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        before = incarnation_of(leader)
        leader.link.replies_pass = False
        await asyncio.sleep(TIMING.timeout)
        assert leader.held == {}
        await await_successor(fleet, leader)
        leader.link.replies_pass = True
        await asyncio.sleep(2 * TIMEOUTS)
        assert incarnation_of(leader) != before
        fleet.judge_rest()

    fleet.tell(story)


def test_a_write_that_lands_after_its_sender_left_is_refused() -> None:
    """Sent, given up, the role released, and 25 seconds later it arrives: too late."""
    fleet = Fleet(53)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(62)
        leader = one(fleet.leaders())
        epoch = leader.held["work"]
        leader.link.delays = (SINGLETON, 25.0)
        await asyncio.sleep(2 * BEATS)
        leader.stop()
        await asyncio.sleep(60)
        (successor,) = fleet.leaders()
        assert successor.held["work"] > epoch
        assert (await read_ledger(fleet))["epoch"] == successor.held["work"]

    fleet.tell(story)


def test_two_memberships_of_one_process_are_two_workers() -> None:
    """They have names of their own; one of them leads, and the other after it."""
    fleet = Fleet(54, size=1)

    async def story() -> None:
        (worker,) = fleet.workers
        first, second = worker.make_membership(), worker.make_membership()
        assert first.worker_id != second.worker_id
        coordinators = []
        for membership in (first, second):
            await worker.run(membership.start())
            coordinators.append(await worker.run(membership.coordinate("work")))
        await asyncio.sleep(30)
        assert [each.is_coordinator for each in coordinators] == [True, False]
        await worker.run(first.leave())
        await asyncio.sleep(BEATS)
        assert [each.is_coordinator for each in coordinators] == [False, True]
        await worker.run(second.leave())

    fleet.tell(story)


@pytest.mark.parametrize("step", [-3600.0, 86_400.0, -86_400.0])
def test_steps_of_the_wall_clock_change_nothing(step: float) -> None:
    """Half of the fleet is put right by an hour or a day: nobody dies and the same one leads."""
    fleet = Fleet(55, size=6)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        held = leader.held
        for worker in (leader, *fleet.workers[:3]):
            worker.node.clock.skew += step
        await asyncio.sleep(120)
        assert fleet.leaders() == [leader]
        assert leader.held == held
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 0


@pytest.mark.parametrize("rate", [0.0005, 0.049])
def test_clocks_that_drift_kill_nobody(rate: float) -> None:
    """Slewed by NTP, or off by the 5 % that is promised: a quiet hour stays quiet."""
    fleet = Fleet(56, rate=rate)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(3600)
        fleet.judge_rest()

    fleet.tell(story)
    assert fleet.deaths == 0


def test_clocks_that_break_the_promise_break_no_record() -> None:
    """Off by 15 %: two may believe to lead, and no write of an earlier term is accepted."""
    fleet = Fleet(57, rate=0.15, trusts_clocks=False)

    async def story() -> None:
        fleet.start_all()
        await storm(fleet)
        for link in fleet.links:
            link.weather = CALM
        await asyncio.sleep(20 * TIMEOUTS)
        fleet.judge_rest()

    fleet.tell(story)


def test_a_storm_of_refusals_is_met_with_few_requests() -> None:
    """Fifty workers, and a store that refuses nine of ten requests for ten minutes.

    Nobody asks more often than it would in peace, and somebody leads soon after.
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
            # A beat and a look; the few that got through may have led, and worked.
            assert worker.link.requests - sent <= 5 * 1.05 * 600 / TIMING.heartbeat
        for link in fleet.links:
            link.weather = CALM
        await asyncio.sleep(2 * TIMEOUTS + BEATS)
        fleet.judge_rest()

    fleet.tell(story)


@pytest.mark.parametrize("store", [MemoryStore, DearStore])
def test_all_start_at_once_and_elect_once(store: type[MemoryStore]) -> None:
    """Twenty workers on an empty store: one takes the role, once, and all hear of the same one."""
    fleet = Fleet(60, size=20, store=store, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(2 * TIMEOUTS)
        fleet.judge_rest()
        heard = {
            (event.worker_id, event.epoch)
            for worker in fleet.workers
            for event in worker.told("coord:coordinator-elected")
        }
        assert len(heard) == 1

    fleet.tell(story)


def test_all_die_and_others_start_a_week_later() -> None:
    """Sessions of the long dead stand in nobody's way, and are tidied up."""
    fleet = Fleet(61)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        epoch = one(fleet.leaders()).held["work"]
        for worker in list(fleet.workers):
            worker.node.kill()
        await asyncio.sleep(7 * 86_400)
        for worker in list(fleet.workers):
            fleet.follow(worker)
        await asyncio.sleep(2 * TIMEOUTS + BEATS)
        assert one(fleet.leaders()).held["work"] == epoch + 1
        fleet.judge_rest()
        # Whoever leads counts anew; the oldest may have come to lead after a mandate.
        await asyncio.sleep(1.06 * (DEAD_SESSION_TTL + 600))
        assert len(await fleet.store.heads("session/")) == len(fleet.workers)

    fleet.tell(story)


@pytest.mark.parametrize("period", [TIMING.heartbeat, TIMING.heartbeat / 2])
def test_a_way_that_flaps_at_the_beat_changes_little(period: float) -> None:
    """The leader's way is open for one beat and shut for the next, for ten minutes.

    It loses the lead at most a few times, never without stepping down first, and one leads after.
    """
    fleet = Fleet(62, listens=True)

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        for number in range(int(600 / period)):
            leader.link.requests_pass = bool(number % 2)
            await asyncio.sleep(period)
        leader.link.requests_pass = True
        await asyncio.sleep(2 * TIMEOUTS)
        fleet.judge_rest()
        changes = followers(fleet)[0].told("coord:coordinator-elected")
        assert len(changes) <= 4

    fleet.tell(story)


def test_a_take_whose_reply_was_lost_is_taken_anew() -> None:
    """The database died in the commit of a take: the role names a worker that does not know it.

    It finds itself there, and takes the role once more, with the next epoch.
    """
    fleet = Fleet(63, size=1)

    async def story() -> None:
        (worker,) = fleet.workers
        worker.link.delays, worker.link.slow_replies = (ROLE, 0.5), 6.0
        fleet.start(worker)
        await asyncio.sleep(20)
        assert worker.held == {}
        found = await fleet.store.get(ROLE)
        assert found is not None
        assert found.value["owner"] == incarnation_of(worker)
        worker.link.delays, worker.link.slow_replies = None, 0.0
        await asyncio.sleep(TIMEOUTS)
        assert worker.held["work"] > found.value["epoch"]

    fleet.tell(story)


def test_a_role_that_cannot_even_be_read_disturbs_nothing_else() -> None:
    """Bytes that are no JSON: who leads goes on, nobody else does, and other work is led."""
    fleet = Fleet(64, listens=True, works=("work", "other"))

    async def story() -> None:
        fleet.start_all()
        await asyncio.sleep(60)
        leader = one(fleet.leaders())
        slot = fleet.store._data.records[ROLE]
        fleet.garble(ROLE)
        fleet.store._data.notifier.wake(["role/default/"])
        await asyncio.sleep(60)
        before = [link.requests for link in fleet.links]
        await asyncio.sleep(20 * TIMING.heartbeat)
        for worker, sent in zip(fleet.workers, before, strict=True):
            assert len(worker.told("store:record-set-aside")) == 1
            assert worker.link.requests - sent <= 20 * 1.05 * 11
        assert fleet.leaders() == [leader]
        assert len(fleet.leaders("other")) == 1
        fleet.store._data.records[ROLE] = slot
        leader.node.kill()
        await asyncio.sleep(2 * TIMEOUTS)
        fleet.judge_rest()

    fleet.tell(story)
