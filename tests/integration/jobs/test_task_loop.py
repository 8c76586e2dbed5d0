"""Task loops: each task is done once; a task that is pending again is done again."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from chance import FakeClock
from claim_nodes import TOKEN, ClaimNodes

from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.jobs.local_node import LocalNode
from jobsync.jobs.task import Task
from jobsync.jobs.task_loop import Source, TaskLoop, run_blocking


class OwningNode:
    """A node that owns every task."""

    def __init__(self, nodes: ClaimNodes, name: str) -> None:
        self.claims = nodes.node(name)
        self.failure: BaseException | None = None
        self.is_retiring = False
        self.is_able = True
        self.poll_interval = 5.0

    def can_claim(self, task: str) -> bool:
        return self.is_able and not self.claims.is_refused(task)

    async def claim(self, tasks: Any, known: Any = None) -> dict[str, str]:
        return await self.claims.add(dict.fromkeys(tasks, TOKEN), 1, lambda *_: True, known)

    async def finish(self, tasks: Any, state: Any = "done") -> dict[str, str]:
        return await self.claims.finish(tasks, state)

    async def find_done(self, tasks: Any) -> dict[str, str]:
        return await self.claims.find_done(tasks)


@pytest.fixture
def nodes() -> ClaimNodes:
    """A store and a clock."""
    return ClaimNodes()


def run(work: Any) -> Any:
    """Run a coroutine that does not really wait."""
    try:
        while True:
            work.send(None)
    except StopIteration as done:
        return done.value


class RecoveringClock(FakeClock):
    """Makes the store available again after a number of sleeps."""

    def __init__(self, nodes: ClaimNodes, sleeps: int) -> None:
        super().__init__()
        self.nodes = nodes
        self.sleeps = sleeps

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        self.sleeps -= 1
        if self.sleeps == 0:
            self.nodes.store.is_unavailable = False


def loop(node: Any, source: Source, clock: FakeClock | None = None) -> Iterator[Task]:
    """Loop like a blocking caller."""
    return run_blocking(TaskLoop(node, clock or FakeClock(), source), run)


def state(nodes: ClaimNodes, task: str) -> str:
    """Return the stored state of a task."""
    return run(nodes.state(task))[0]  # type: ignore[no-any-return]


def names(tasks: Iterator[Task]) -> list[str]:
    """Return the ids of the tasks that are yielded."""
    return [task.text for task in tasks]


def test_each_task_of_a_list_is_done_once(nodes: ClaimNodes) -> None:
    """A later loop finds nothing to do."""
    assert names(loop(OwningNode(nodes, "a"), [1, "2", Task(3)])) == ["1", "2", "3"]
    assert names(loop(OwningNode(nodes, "b"), [1, 2, 3])) == []
    assert names(loop(OwningNode(nodes, "a"), [1, 2, 3])) == []


def test_a_task_is_done_when_the_next_is_requested(nodes: ClaimNodes) -> None:
    """Until then it is recorded as running."""
    node = OwningNode(nodes, "a")
    tasks = loop(node, [1, 2])
    next(tasks)
    assert state(nodes, "1") == "running"
    next(tasks)
    assert state(nodes, "1") == "done"


@pytest.mark.parametrize("is_function", [False, True])
def test_a_loop_left_early_fails_its_task(nodes: ClaimNodes, is_function: bool) -> None:
    """Another node may do it at once."""
    node = OwningNode(nodes, "a")
    tasks = loop(node, (lambda: [1]) if is_function else [1])
    next(tasks)
    tasks.close()  # type: ignore[attr-defined]
    assert state(nodes, "1") == "failed"
    assert names(loop(OwningNode(nodes, "b"), [1])) == ["1"]


@pytest.mark.parametrize(
    "error", [None, Unavailable("store", "silent"), OutcomeUnknown("x", "lost"), KeyError("x")]
)
@pytest.mark.parametrize("end", ["the next is requested", "the loop is left", "it is not claimed"])
def test_a_task_is_in_the_hands_of_its_loop_until_it_has_ended(
    nodes: ClaimNodes, monkeypatch: pytest.MonkeyPatch, end: str, error: Exception | None
) -> None:
    """However that goes: a task that is kept there could not be marked in any other way.

    What another thread has in its hands stays there.
    """
    node = OwningNode(nodes, "a")
    elsewhere = object()
    in_blocks: dict[object, str] = {elsewhere: "1"}
    tasks = run_blocking(TaskLoop(node, FakeClock(), [1, 2], in_blocks), run)
    seen: list[list[str]] = []

    async def fail(*_: Any) -> dict[str, str]:
        seen.append(sorted(in_blocks.values()))
        monkeypatch.undo()
        if error is not None:
            raise error
        return {"1": "another node was first"}

    if end == "it is not claimed":
        monkeypatch.setattr(node, "claim", fail)
    else:
        assert next(tasks).text == "1"
        assert sorted(in_blocks.values()) == ["1", "1"]
        monkeypatch.setattr(node, "finish", fail)
    raises = not (error is None or isinstance(error, Unavailable | OutcomeUnknown))
    with pytest.raises(KeyError) if raises else nullcontext():
        if end == "the loop is left":
            tasks.close()
        else:
            # What was not claimed is left to the next round; so is what follows an outage.
            in_work = next(tasks).text
            assert sorted(in_blocks.values()) == ["1", in_work]
            tasks.close()
    assert seen == [["1", "1"]]
    assert in_blocks == {elsewhere: "1"}


def test_a_function_is_called_until_it_returns_nothing(nodes: ClaimNodes) -> None:
    """A task that it returns again is done in another round."""
    pending = [["1"], ["1", "2"], []]
    node = OwningNode(nodes, "a")
    tasks = []
    for task in loop(node, lambda: pending[0]):
        tasks.append(task.text)
        if len(tasks) in (1, 3):
            pending.pop(0)
    assert tasks == ["1", "2", "1"]


def test_a_task_that_is_pending_again_is_done_again(nodes: ClaimNodes) -> None:
    """A completion recorded before the function was called does not count."""
    node = OwningNode(nodes, "a")
    assert names(loop(node, ["1"])) == ["1"]
    pending = ["1"]
    tasks = []
    for task in loop(node, lambda: list(pending)):
        tasks.append(task.text)
        pending.clear()
    assert tasks == ["1"]


@pytest.mark.parametrize(("calls", "done"), [(0, []), (2, ["1"])], ids=["first", "again"])
def test_a_task_done_during_the_call_is_not_done_again(
    nodes: ClaimNodes, calls: int, done: list[str]
) -> None:
    """Without clocks: time does not pass here. Also if it was done, and seen as done, before."""
    slow, quick = OwningNode(nodes, "a"), OwningNode(nodes, "b")
    answers = iter([*[["1"]] * calls, ["1"], []])
    called = iter(range(calls + 2))

    def list_pending() -> list[str]:
        if next(called) == calls:
            # Another node does it after the list was made and before it is returned.
            assert run(quick.claim(["1"], run(quick.find_done(["1"])))) == {}
            assert run(quick.finish(["1"])) == {}
        return next(answers)

    assert names(loop(slow, list_pending)) == done


def test_a_task_done_by_another_node_during_a_round_is_skipped(nodes: ClaimNodes) -> None:
    """The store decides, at each claim."""
    slow, quick = OwningNode(nodes, "a"), OwningNode(nodes, "b")
    tasks = loop(slow, ["1", "2"])
    assert next(tasks).text == "1"
    assert run(quick.claim(["2"])) == {}
    run(quick.finish(["2"]))
    assert names(tasks) == []


def test_rounds_without_work_are_further_and_further_apart(nodes: ClaimNodes) -> None:
    """Up to the node's interval; after a round with work they begin anew."""
    node, clock = OwningNode(nodes, "a"), FakeClock()
    tasks = TaskLoop(node, clock, lambda: ["1"])
    pauses = [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.5]
    for pause in pauses:
        node.is_able = not pause
        # Twice: what is done is pending again if it was done before the list was read.
        for _ in range(2):
            assert run(tasks.start_round(tasks.read()))
        if node.is_able:
            assert run(tasks.next()).text == "1"
        before = clock.mono_seconds
        assert run(tasks.next()) is None
        assert clock.mono_seconds - before == pause


def test_an_outage_only_delays(nodes: ClaimNodes) -> None:
    """Both the end of a task and the claim of the next are retried."""
    node = OwningNode(nodes, "a")
    tasks = loop(node, ["1", "2"], RecoveringClock(nodes, 5))
    next(tasks)
    nodes.store.is_unavailable = True
    assert next(tasks).text == "2"
    assert not nodes.store.is_unavailable
    assert state(nodes, "1") == "done"
    assert names(tasks) == []


def test_a_failed_node_ends_the_loop(nodes: ClaimNodes) -> None:
    """Otherwise it would wait forever."""
    node = OwningNode(nodes, "a")
    tasks = loop(node, ["1", "2"])
    next(tasks)
    nodes.store.is_unavailable = True
    node.failure = RuntimeError("broken")
    with pytest.raises(Unavailable, match="has failed"):
        next(tasks)


def test_a_local_node_does_everything_once() -> None:
    """A node without a fleet follows the same rules."""
    alone = LocalNode(10, lambda _: TOKEN, FakeClock())
    assert names(loop(alone, [1, 2])) == ["1", "2"]
    assert names(loop(alone, [1, 2, 3])) == ["3"]
    pending = [1]
    tasks = []
    for task in loop(alone, lambda: list(pending)):
        tasks.append(task.text)
        pending.clear()
    assert tasks == ["1"]


def test_on_a_local_node_a_task_runs_once_at_a_time() -> None:
    """Not twice at once; again later, unless `once_per_date` is set."""
    alone = LocalNode(10, lambda _: TOKEN, FakeClock())
    assert run(alone.claim(["1"])) == {}
    assert not alone.can_claim("1")
    assert run(alone.claim(["1", "2"])) == {"1": "this node does it already"}
    run(alone.finish(["1", "2"]))
    assert alone.can_claim("1")
    once = LocalNode(10, lambda _: TOKEN, FakeClock(), once_per_date=True)
    run(once.claim(["1"]))
    run(once.finish(["1"]))
    assert not once.can_claim("1")
    assert run(once.claim(["1"])) == {"1": "it is done"}


def test_a_retiring_node_ends_the_loop(nodes: ClaimNodes) -> None:
    """After the current task, which is done; other nodes do the rest."""
    node = OwningNode(nodes, "a")
    tasks = loop(node, ["1", "2"])
    next(tasks)
    node.is_retiring = True
    assert names(tasks) == []
    assert state(nodes, "1") == "done"
    assert names(loop(OwningNode(nodes, "b"), ["1", "2"])) == ["2"]
