"""Claims are exclusive, never marked by mistake and never lost."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import pytest
from chance import FakeClock
from claim_nodes import DAY, MEMORY, RECLAIM_AFTER, TOKEN, ClaimNodes, FaultyStore, claim

from jobsync import Corrupt, OutcomeUnknown, Unavailable
from jobsync.core.clock import Wall
from jobsync.jobs import foreign_claims
from jobsync.jobs.claims import Claims
from jobsync.jobs.foreign_claims import ClaimState
from jobsync.jobs.job_keys import JobKeys
from jobsync.stores.contract import Applied, Change, Outcome, Record, Unknown


@pytest.fixture
def nodes() -> ClaimNodes:
    """No nodes yet."""
    return ClaimNodes()


async def test_one_of_several_nodes_gets_a_task(nodes: ClaimNodes) -> None:
    """The second gets the name of the first."""
    first, second = nodes.node("a"), nodes.node("b")
    assert await claim(first, "x") == {}
    assert await claim(second, "x") == {"x": "a is doing it"}
    assert second.is_refused("x")


async def test_one_of_several_calls_of_a_node_gets_a_task(nodes: ClaimNodes) -> None:
    """Two threads of one node that claim one task at once do not both get it."""
    node = nodes.node("a")
    lost = await asyncio.gather(claim(node, "x"), claim(node, "x"))
    assert sorted(lost, key=len) == [{}, {"x": "this node does it already"}]


async def test_a_task_that_failed_elsewhere_can_be_claimed_at_once(nodes: ClaimNodes) -> None:
    """By the node that gains its token."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    await first.finish(["x"], "failed")
    await second.foreign.load({TOKEN}, {})
    assert not second.is_refused("x")
    assert await claim(second, "x") == {}
    assert await nodes.state("x") == ("running", "b", 2)


async def test_a_task_done_around_a_handover_is_refused_for_a_while(nodes: ClaimNodes) -> None:
    """An older list is not done again; a task that is pending again later is."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    await first.finish(["x"], "done")
    await second.foreign.load({TOKEN}, {"ended": {"$gte": nodes.clock.wall_seconds - 1}})
    assert second.is_refused("x")
    nodes.pass_time(MEMORY)
    assert not second.is_refused("x")
    assert await claim(second, "x") == {}


async def test_once_per_date_means_once(nodes: ClaimNodes) -> None:
    """A task that any node has done, however long ago, is refused forever."""
    first, second = nodes.node("a"), nodes.node("b", once_per_date=True)
    await claim(first, "x")
    await first.finish(["x"], "done")
    nodes.pass_time(10 * MEMORY)
    await second.foreign.load({TOKEN}, {"ended": {"$gte": nodes.clock.wall_seconds}})
    assert second.is_refused("x")
    assert await claim(second, "x") != {}


async def test_a_dead_node_s_task_can_be_claimed_after_a_while(nodes: ClaimNodes) -> None:
    """Counted from when the death was known, not from when the task was checked."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    await second.foreign.load({TOKEN}, {})
    nodes.pass_time(1000)
    assert second.is_refused("x")
    nodes.dead.add("a")
    second.foreign.record_deaths()
    nodes.pass_time(RECLAIM_AFTER - 1)
    assert second.is_refused("x")
    nodes.pass_time(1)
    assert not second.is_refused("x")
    assert await claim(second, "x") == {}
    assert await nodes.state("x") == ("running", "b", 2)


async def test_each_death_counts_from_when_it_was_known(nodes: ClaimNodes) -> None:
    """Whatever else is read, or dies, meanwhile."""
    first, third, second = nodes.node("a"), nodes.node("c"), nodes.node("b")
    await claim(first, "x")
    await claim(third, "y")
    await second.foreign.load({TOKEN}, {})
    nodes.dead.add("a")
    second.foreign.record_deaths()
    nodes.pass_time(RECLAIM_AFTER / 2)
    nodes.dead.add("c")
    await second.foreign.load({TOKEN}, {})
    await second.foreign.refresh()
    nodes.pass_time(RECLAIM_AFTER / 2)
    second.foreign.watch_owners()
    assert (second.is_refused("x"), second.is_refused("y")) == (False, True)
    nodes.pass_time(RECLAIM_AFTER / 2)
    assert not second.is_refused("y")


async def test_a_task_that_its_live_owner_has_ended_can_be_claimed_again(
    nodes: ClaimNodes,
) -> None:
    """A task that ran elsewhere at a handover is read again."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    await second.foreign.load({TOKEN}, {})
    await first.finish(["x"], "done")
    nodes.pass_time(MEMORY)
    await second.foreign.refresh()
    assert second.is_refused("x")
    nodes.pass_time(MEMORY)
    assert not second.is_refused("x")


@pytest.mark.parametrize(
    ("state", "is_refused"), [("running", True), ("done", True), ("failed", False)]
)
async def test_how_a_task_ended_elsewhere_counts_once_it_is_read_again(
    nodes: ClaimNodes, state: ClaimState, is_refused: bool
) -> None:
    """It ran there at a handover: what failed can be claimed at once, what was done later."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    await second.foreign.load({TOKEN}, {})
    if state != "running":
        await first.finish(["x"], state)
    nodes.pass_time(MEMORY - 1)
    await second.foreign.refresh()
    assert second.is_refused("x")
    nodes.pass_time(1)
    await second.foreign.refresh()
    assert second.is_refused("x") is is_refused
    assert (await claim(second, "x") == {}) is not is_refused


async def test_a_late_end_is_refused(nodes: ClaimNodes) -> None:
    """A node that was declared dead gets an error if another node has its task."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    await second.foreign.load({TOKEN}, {})
    nodes.dead.add("a")
    second.foreign.record_deaths()
    nodes.pass_time(RECLAIM_AFTER)
    await claim(second, "x")
    first.reset()
    assert await first.finish(["x"], "done") == {"x": "b has it by now"}
    assert await nodes.state("x") == ("running", "b", 2)


@pytest.mark.parametrize("state", ["done", "failed"])
@pytest.mark.parametrize("fault", ["", "half"])
async def test_each_late_end_is_reported_once(
    nodes: ClaimNodes, fault: str, state: ClaimState
) -> None:
    """Also if the outcome of another end of the same call is unknown."""
    reported: list[tuple[str, str, str]] = []
    nodes.components.events.on(
        "jobs:audit-refused", lambda e: reported.append((e.node, e.task_id, e.reason))
    )
    nodes.store = store = ScriptedStore(nodes.store.inner)
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x", "y")
    nodes.dead.add("a")
    await second.foreign.load({TOKEN}, {})
    nodes.pass_time(RECLAIM_AFTER)
    assert await claim(second, "x") == {}
    store.script = [fault]
    with pytest.raises(OutcomeUnknown) if fault else nullcontext():
        await first.finish(["x", "y"], state)
    assert reported == [("a", "x", "b has it by now")]
    assert first.running == (["y"] if fault and state == "done" else [])
    assert await first.finish(["x", "y"], state) == {}
    assert len(reported) == 1
    assert await nodes.state("y") == (state, "a", 1)


async def test_an_end_before_another_node_took_over_counts(nodes: ClaimNodes) -> None:
    """A node that lost its session marks its task, unless another node has started it."""
    node = nodes.node("a")
    await claim(node, "x")
    node.reset()
    assert await node.finish(["x"], "done") == {}
    assert await nodes.state("x") == ("done", "a", 1)


async def test_a_session_may_be_lost_during_an_end(nodes: ClaimNodes) -> None:
    """The end counts."""
    node = nodes.node("a")
    await claim(node, "x")
    ending = asyncio.create_task(node.finish(["x"], "done"))
    await asyncio.sleep(0)
    node.reset()
    assert await ending == {}


async def test_a_late_claim_is_not_a_claim(nodes: ClaimNodes) -> None:
    """If trust has expired at the reply, the task must not start and is never marked as done."""
    node = nodes.node("a")
    lost = await claim(node, "x", may_run=False)
    assert lost == {"x": "this node's trust expired before it could start"}
    assert node.running == []
    assert await nodes.state("x") == ("failed", "a", 1)


async def test_a_late_claim_that_cannot_be_closed_is_closed_before_the_next(
    nodes: ClaimNodes,
) -> None:
    """It is not marked as done meanwhile, whatever the store does."""
    node = nodes.node("a")

    def lose_store(*_: object) -> bool:
        nodes.store.is_unavailable = True
        return False

    assert await node.add({"x": TOKEN}, 1, lose_store) != {}
    assert node.running == []
    with pytest.raises(Unavailable):
        await claim(node, "y")
    nodes.store.is_unavailable = False
    assert await claim(node, "y") == {}
    assert await nodes.state("x") == ("failed", "a", 1)


async def test_an_unknown_claim_is_closed(nodes: ClaimNodes) -> None:
    """No node does it or marks it as done, and it can be claimed again."""
    node = nodes.node("a")
    nodes.store.lose_replies = 1
    assert await claim(node, "x") == {}
    assert await nodes.state("x") == ("running", "a", 2)


@pytest.mark.parametrize("sessions", [1, 2])
async def test_a_batch_that_could_not_be_closed_claims_nothing(
    nodes: ClaimNodes, sessions: int
) -> None:
    """The caller gets an error and does none of them; so none is marked as done.

    They are closed before the next claim, also if the node's session was replaced meanwhile.
    """
    node = nodes.node("a")

    class Half(FaultyStore):
        """Loses one of two replies, then becomes unavailable."""

        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if self.is_unavailable:
                raise Unavailable(self.name, "is_unavailable")
            self.is_unavailable = True
            outcomes = await self.inner.write(changes)
            return [outcomes[0], Unknown("lost")]

    node._store = node._unclosed._store = Half(nodes.store.inner)
    with pytest.raises(Unavailable):
        await claim(node, "x", "y")
    assert node.running == []
    node._store = node._unclosed._store = nodes.store
    for _ in range(sessions - 1):
        node.reset()
    assert await claim(node, "z") == {}
    assert await nodes.state("x") == ("failed", "a", 1)
    assert await nodes.state("y") == ("failed", "a", 1)


class ScriptedStore(FaultyStore):
    """Treats its next writes as it is told, and the later ones as usual."""

    script: Sequence[str] = ()
    late: Sequence[Sequence[Change]] = ()
    overtaken: Sequence[Change] = ()

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        if self.overtaken:
            # After what this write goes by was read.
            await self.inner.write(self.overtaken)
            self.overtaken = ()
        fault, *self.script = self.script or [""]
        match fault:
            case "refused":
                raise Unavailable(self.name, "silent")
            case "late":
                # It arrives when everything is over.
                self.late = [*self.late, changes]
                return [Unknown("late") for _ in changes]
            case "just":
                # It arrives just before the next write.
                self.overtaken = changes
                return [Unknown("late") for _ in changes]
            case "half":
                # Of a batch, some replies are lost.
                first, *rest = await self.inner.write(changes)
                return [first, *(Unknown("lost") for _ in rest)]
            case "lost":
                await self.inner.write(changes)
                return [Unknown("lost") for _ in changes]
        return await self.inner.write(changes)

    async def arrive(self) -> None:
        """Deliver what is late; all of it has to be refused."""
        for changes in self.late:
            outcomes = await self.inner.write(changes)
            assert not any(isinstance(outcome, Applied) for outcome in outcomes)


FAULTS = ("", "refused", "lost", "late", "just", "half")


async def check_stored(nodes: ClaimNodes, node: Claims, tasks: Sequence[str]) -> None:
    """Check that the store says "running" of exactly those tasks that a node runs."""
    states = {task: await nodes.state(task) for task in tasks}
    running = {task for task, state in states.items() if state and state[:2] == ("running", "a")}
    assert running == {*node.running}


@pytest.mark.parametrize("script", list(itertools.product(FAULTS, repeat=3)), ids="-".join)
async def test_what_a_node_runs_is_what_it_has_claimed(
    nodes: ClaimNodes, script: tuple[str, ...]
) -> None:
    """Whatever becomes of three requests in a row: no claim is left that nobody runs.

    Of the tasks one is new, one was done by this node and two by another one, so that a call writes
    twice.
    """
    nodes.store = store = ScriptedStore(nodes.store.inner)
    node, other = nodes.node("a"), nodes.node("b")
    tasks = ["own", "other", "new", "failed"]
    await claim(node, "own")
    await node.finish(["own"], "done")
    await claim(other, "other", "failed")
    await other.finish(["other"], "done")
    await other.finish(["failed"], "failed")
    store.script = script
    try:
        lost = await claim(node, *tasks)
    except (Unavailable, OutcomeUnknown):
        assert node.running == []
    else:
        assert {*node.running} == {*tasks} - {*lost}
    store.script = ()
    await node.settle(lambda *_: True)
    await check_stored(nodes, node, tasks)
    await store.arrive()
    await check_stored(nodes, node, tasks)
    assert await claim(node, *(task for task in tasks if task not in node.running)) == {}


@pytest.mark.parametrize("state", ["done", "failed"])
@pytest.mark.parametrize("script", list(itertools.product(FAULTS, repeat=2)), ids="-".join)
async def test_the_end_of_tasks_is_stored_once(
    nodes: ClaimNodes, script: tuple[str, ...], state: ClaimState
) -> None:
    """A failure by itself, a completion by calling again, whatever becomes of two requests."""
    nodes.store = store = ScriptedStore(nodes.store.inner)
    node, tasks = nodes.node("a"), ["x", "y"]
    await claim(node, *tasks)
    store.script = script
    for _ in script:
        try:
            assert await node.finish(tasks, state) == {}
        except (Unavailable, OutcomeUnknown):
            assert state == "done" or node.running == []
        else:
            assert node.running == []
    store.script = ()
    assert await node.finish(tasks, state) == {}
    await node.settle(lambda *_: True)
    await store.arrive()
    assert {await nodes.state(task) for task in tasks} == {(state, "a", 1)}
    assert await claim(node, *tasks) == {}
    assert {await nodes.state(task) for task in tasks} == {("running", "a", 2)}


DONE, OTHER_VERSION = "a has done it meanwhile", {"x": "another version"}


@pytest.mark.parametrize("once_per_date", [False, True])
@pytest.mark.parametrize("known", ["all", "none", "this", "another"])
@pytest.mark.parametrize("state", ["running", "failed", "done"])
async def test_a_claim_that_is_found_in_the_way(
    nodes: ClaimNodes, state: str, known: str, once_per_date: bool
) -> None:
    """By a node that did not know of it: asked twice, the answer is the same."""
    first, second = nodes.node("a"), nodes.node("b", once_per_date=once_per_date)
    await claim(first, "x")
    if state != "running":
        await first.finish(["x"], "done" if state == "done" else "failed")
    versions: dict[str, Mapping[str, str] | None] = {
        "all": None,
        "none": {},
        "this": await second.find_done(["x"]),
        "another": OTHER_VERSION,
    }
    match state, once_per_date:
        case "running", _:
            expected = "a is doing it"
        case "done", True:
            expected = "a has done it on this date"
        case "done", False:
            expected = DONE if known in ("none", "another") else ""
        case _:
            expected = ""
    for _ in range(2 if expected else 1):
        lost = await second.add({"x": TOKEN}, 1, lambda *_: True, versions[known])
        if once_per_date and state == "done" and lost == {"x": "a has just done it"}:
            # It is remembered.
            continue
        assert lost == ({"x": expected} if expected else {})
    assert (second.running == ["x"]) is not bool(expected)


@pytest.mark.parametrize(
    ("change", "run"), [("removed", 1), ("deleted", 1), ("failed", 3), ("done", 3)]
)
async def test_a_task_that_this_node_has_done_can_be_claimed_whatever_became_of_it(
    nodes: ClaimNodes, change: str, run: int
) -> None:
    """Its record was removed since, or another node has done it again."""
    node, other = nodes.node("a"), nodes.node("b")
    key = JobKeys("sync_").claim(DAY, "x")
    await claim(node, "x")
    await node.finish(["x"], "done")
    match change:
        case "removed":
            await nodes.store.drop([key])
        case "deleted":
            record = await nodes.store.get(key)
            assert record is not None
            await nodes.store.delete(record)
        case _:
            await claim(other, "x")
            await other.finish(["x"], "done" if change == "done" else "failed")
    assert await claim(node, "x") == {}
    assert await nodes.state("x") == ("running", "a", run)


async def test_an_unreadable_claim_stops_no_other(nodes: ClaimNodes) -> None:
    """It is refused and left as it is; the others of its batch are claimed."""
    key = JobKeys("sync_").claim(DAY, "x")
    await nodes.store.create(key, {"format": "unknown"})
    node = nodes.node("a")
    assert await claim(node, "x", "y") == {"x": "its record cannot be read"}
    assert node.running == ["y"]


async def test_a_claim_that_is_cancelled_is_closed(nodes: ClaimNodes) -> None:
    """No caller is left to do it, and its outcome is unknown."""
    node = nodes.node("a")
    nodes.store.gate = asyncio.Event()
    claiming = asyncio.create_task(claim(node, "x"))
    await asyncio.sleep(0)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    nodes.store.gate = None
    assert node.running == []
    await node.settle(lambda *_: True)
    assert await nodes.state("x") == ("failed", "a", 1)


async def test_a_claim_not_closed_in_one_session_is_closed_in_the_next(
    nodes: ClaimNodes,
) -> None:
    """Otherwise a claim that landed unnoticed would block its task until its owner's death."""
    node = nodes.node("a")
    nodes.store.lose_replies = 2
    with pytest.raises(Unavailable):
        await claim(node, "x")
    node.reset()
    await node.settle(lambda *_: True)
    assert await nodes.state("x") == ("failed", "a", 1)


async def test_two_callers_may_end_the_same_task(nodes: ClaimNodes) -> None:
    """The second has nothing to do: it is neither refused nor written twice."""
    node = nodes.node("a")
    await claim(node, "x")
    nodes.store.gate = asyncio.Event()
    both = [asyncio.create_task(node.finish(["x"], "done")) for _ in range(2)]
    await asyncio.sleep(0)
    nodes.store.gate.set()
    assert await asyncio.gather(*both) == [{}, {}]
    assert await nodes.state("x") == ("done", "a", 1)


async def test_an_end_with_an_unknown_outcome_is_found_to_be_ours(nodes: ClaimNodes) -> None:
    """The caller calls again; that the first attempt landed is not a refusal."""
    node = nodes.node("a")
    await claim(node, "x")
    nodes.store.lose_replies = 1
    with pytest.raises(OutcomeUnknown):
        await node.finish(["x"], "done")
    assert node.running == ["x"]
    assert await node.finish(["x"], "done") == {}
    assert node.running == []
    assert await claim(node, "x") == {}


@pytest.mark.parametrize("fault", ["is_unavailable", "lose_replies"])
async def test_a_failed_task_is_never_marked_as_done(nodes: ClaimNodes, fault: str) -> None:
    """A failure that cannot be written now is written later, and not marked by a later end."""
    node = nodes.node("a")
    await claim(node, "x")
    setattr(nodes.store, fault, 1)
    with pytest.raises((Unavailable, OutcomeUnknown)):
        await node.finish(["x"], "failed")
    nodes.store.is_unavailable = False
    assert await node.finish(node.running, "done") == {}
    await node.settle(lambda *_: True)
    assert await nodes.state("x") == ("failed", "a", 1)


async def test_a_failure_that_is_interrupted_is_never_marked_as_done(nodes: ClaimNodes) -> None:
    """As by Ctrl-C, while the store does not answer."""
    node = nodes.node("a")
    await claim(node, "x")
    nodes.store.gate = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await node.finish(["x"], "failed")
    nodes.store.gate.set()
    assert await node.finish(node.running, "done") == {}
    await node.settle(lambda *_: True)
    assert await nodes.state("x") == ("failed", "a", 1)


async def test_once_per_date_applies_to_own_tasks_too(nodes: ClaimNodes) -> None:
    """However they are claimed; a failed task was not done."""
    node = nodes.node("a", once_per_date=True)
    await claim(node, "x", "y")
    await node.finish(["x"], "done")
    await node.finish(["y"], "failed")
    refused = {"x": "this node has done it on this date"}
    assert await claim(node, "x") == refused
    done = await node.find_done(["x"])
    assert await node.add({"x": TOKEN}, 1, lambda *_: True, done) == refused
    node.reset()
    assert await node.add({"x": TOKEN}, 1, lambda *_: True, done) != {}
    assert await claim(node, "y") == {}


async def test_a_task_done_at_the_last_moment_is_not_done_again(nodes: ClaimNodes) -> None:
    """A node that waits for an abandoned task finds it done."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    await second.foreign.load([TOKEN], {})
    nodes.dead.add("a")
    second.foreign.record_deaths()
    nodes.pass_time(RECLAIM_AFTER)
    assert not second.is_refused("x")
    await first.finish(["x"], "done")
    assert await claim(second, "x") == {"x": "a has just done it"}
    assert second.is_refused("x")


async def test_a_node_with_an_old_assignment_does_not_repeat_its_successor_s_task(
    nodes: ClaimNodes,
) -> None:
    """A machine that slept with its clock still trusts an old assignment; the store refuses."""
    first, second = nodes.node("a"), nodes.node("b")
    assert await second.add({"x": TOKEN}, 5, lambda *_: True) == {}
    await second.finish(["x"], "done")
    refused = await first.add({"x": TOKEN}, 4, lambda *_: True)
    assert refused == {"x": "b was given it, and this node does not know yet"}
    assert await first.add({"x": TOKEN}, 5, lambda *_: True) == {}


async def test_a_step_of_the_wall_clock_does_not_change_claim_times(nodes: ClaimNodes) -> None:
    """Time of day comes from the store, and is extrapolated with the monotonic clock."""
    node, served = nodes.node("a"), FakeClock()
    reads = 0

    async def now() -> Wall:
        nonlocal reads
        reads += 1
        return served.wall()

    nodes.store.now = now  # type: ignore[method-assign]
    await node.store_clock.read()
    await claim(node, "x")
    nodes.clock.wall_seconds -= 86_400
    nodes.pass_time(30)
    await served.sleep(30)
    await node.finish(["x"], "done")
    (found,) = await node.list_all()
    assert found.ended == served.wall_seconds
    assert reads == 1
    await claim(node, "y")
    nodes.pass_time(31)
    await node.finish(["y"], "done")
    assert reads == 2


@pytest.mark.parametrize("once_per_date", [False, True])
@pytest.mark.parametrize("state", ["running", "done", "failed"])
async def test_a_refused_task_says_who_does_or_did_it(
    nodes: ClaimNodes, state: ClaimState, once_per_date: bool
) -> None:
    """What failed is refused by nobody."""
    first, second = nodes.node("a"), nodes.node("b", once_per_date=once_per_date)
    await claim(first, "x")
    if state != "running":
        await first.finish(["x"], state)
    await second.foreign.load({TOKEN}, {"ended": {"$gte": nodes.clock.wall_seconds - 1}})
    assert second.foreign.was_running("x") is (state == "running")
    assert second.foreign.is_refused("x") is (state != "failed")
    if state != "failed":
        told = {"running": "a is doing it", "done": "a has just done it"}[state]
        assert second.foreign.explain("x") == told
    nodes.pass_time(10 * MEMORY)
    is_refused = {"running": True, "done": once_per_date, "failed": False}[state]
    assert second.foreign.is_refused("x") is is_refused


@pytest.mark.parametrize("state", ["done", "failed"])
async def test_a_new_session_goes_by_what_it_reads_itself(
    nodes: ClaimNodes, state: ClaimState
) -> None:
    """Who has ended a task meanwhile keeps nobody from it."""
    first, second = nodes.node("a"), nodes.node("b")
    await claim(first, "x")
    recent = {"ended": {"$gte": nodes.clock.wall_seconds - 1}}
    await second.foreign.load({TOKEN}, recent)
    assert second.is_refused("x")
    await first.finish(["x"], state)
    second.reset()
    assert not second.is_refused("x")
    await second.foreign.load({TOKEN}, recent)
    assert second.is_refused("x") is (state == "done")


async def test_what_ran_elsewhere_is_read_again_now_and_then(nodes: ClaimNodes) -> None:
    """Only what still ran, and no more often than tasks are remembered; then nobody is watched."""
    first, third, second = nodes.node("a"), nodes.node("c"), nodes.node("b")
    await claim(first, "x", "y")
    await claim(third, "z")
    await third.finish(["z"], "done")
    await second.foreign.load({TOKEN}, {"ended": {"$gte": nodes.clock.wall_seconds - 1}})
    reads: list[list[str]] = []
    get_many = nodes.store.get_many

    async def watch(keys: Sequence[str], *, tombstones: bool = False) -> list[Record | None]:
        reads.append([key.rpartition("/")[2] for key in keys])
        return await get_many(keys, tombstones=tombstones)

    nodes.store.get_many = watch  # type: ignore[method-assign]
    await first.finish(["x"], "failed")
    reads.clear()
    for _ in range(4):
        nodes.pass_time(MEMORY / 2)
        await second.foreign.refresh()
    assert reads == [["x", "y"], ["y"]]
    await first.finish(["y"], "failed")
    reads.clear()
    watched = second.foreign._membership.watched
    assert watched("claims") == {"a"}
    nodes.pass_time(MEMORY)
    await second.foreign.refresh()
    assert (reads, watched("claims")) == ([["y"]], frozenset())


async def test_claims_are_found_by_the_token_of_today(nodes: ClaimNodes) -> None:
    """The one in a claim may be of earlier settings."""
    first, second = nodes.node("a"), nodes.node("b")
    await first.add({"x": TOKEN + 1}, 1, lambda *_: True)
    await second.foreign.load({TOKEN + 1}, {})
    assert not second.is_refused("x")
    await second.foreign.load({TOKEN}, {})
    assert second.is_refused("x")


async def test_a_claim_that_is_closed_has_the_time_of_its_end(nodes: ClaimNodes) -> None:
    """Whether it had landed, or is kept from landing."""
    for task, fault in (("landed", "lost"), ("late", "late")):
        nodes.store = store = ScriptedStore(nodes.store.inner)
        node = nodes.node("a")
        store.script = [fault, "refused"]
        started = nodes.clock.wall_seconds
        with pytest.raises(Unavailable):
            await claim(node, task)
        nodes.pass_time(40)
        await node.settle(lambda *_: True)
        found = {each.task: each for each in await node.list_all()}[task]
        assert (found.state, found.run, found.started) == ("failed", 1, started)
        assert found.ended == nodes.clock.wall_seconds


async def test_a_claim_that_cannot_be_read_stays_to_be_closed(nodes: ClaimNodes) -> None:
    """Nothing else is claimed meanwhile; the others are closed with it once it can be."""
    nodes.store = store = ScriptedStore(nodes.store.inner)
    node = nodes.node("a")
    store.script = ["lost", "refused"]
    with pytest.raises(Unavailable):
        await claim(node, "x", "y")
    read = store.get_many

    reads = itertools.count()

    async def damage(keys: Sequence[str], *, tombstones: bool = False) -> list[Record | None]:
        assert next(reads) < 50, "it reads again and again"
        if any(key.endswith("/x") for key in keys):
            raise Corrupt(next(key for key in keys if key.endswith("/x")), "damaged")
        return await read(keys, tombstones=tombstones)

    store.get_many = damage  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(Unavailable, match="a claim could not be read"):
            await claim(node, "z")
        assert node.running == []
    store.get_many = read  # type: ignore[method-assign]
    assert await claim(node, "z") == {}
    assert {await nodes.state(task) for task in "xy"} == {("failed", "a", 1)}


async def test_more_claims_than_one_request_reads_are_all_known(
    nodes: ClaimNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When tokens are gained, and when they are read again."""
    monkeypatch.setattr(foreign_claims, "CLAIM_PAGE", 2)
    first, second = nodes.node("a"), nodes.node("b")
    tasks = list("abcde")
    await claim(first, *tasks)
    await second.foreign.load({TOKEN}, {})
    assert [task for task in tasks if second.is_refused(task)] == tasks
    await first.finish(tasks, "done")
    assert sorted(await second.find_done(tasks)) == tasks
    nodes.pass_time(MEMORY)
    await second.foreign.refresh()
    assert not any(second.foreign.was_running(task) for task in tasks)
    nodes.pass_time(MEMORY)
    assert not any(second.is_refused(task) for task in tasks)


@pytest.mark.parametrize("state", ["running", "done"])
async def test_own_claims_are_not_those_of_others(nodes: ClaimNodes, state: ClaimState) -> None:
    """When this node gains the token of a task that it does, or has done since it joined."""
    node = nodes.node("a")
    await claim(node, "x")
    if state == "done":
        await node.finish(["x"], "done")
    await node.foreign.load({TOKEN}, {})
    assert not node.foreign.is_refused("x")
    assert not node.foreign.was_running("x")


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("ended_after", [0.0, 20.0, 90.0])
async def test_how_a_process_ended_decides_how_long_its_tasks_wait(
    nodes: ClaimNodes, ended_after: float, has_ended: bool
) -> None:
    """One that may still do them has longer, unless it was set otherwise."""
    first, second = nodes.node("a"), nodes.node("b", reclaim_ended_after=ended_after)
    await claim(first, "x")
    await second.foreign.load({TOKEN}, {})
    nodes.dead.add("a")
    if has_ended:
        nodes.ended.add("a")
    second.foreign.record_deaths()
    delay = ended_after if has_ended else RECLAIM_AFTER
    for passed in (delay - 1, 1):
        assert second.is_refused("x") is (delay > 0)
        nodes.pass_time(max(0.0, passed))
    assert not second.is_refused("x")
