"""Going through a list: each task once, and what is pending again, again."""

from collections.abc import Iterator
from typing import Any

import pytest
from chance import FakeClock
from claim_nodes import TOKEN, ClaimNodes

from jobsync.errors import Unavailable
from jobsync.jobs.job_session import LocalNode
from jobsync.jobs.task import Task
from jobsync.jobs.task_loop import Source, TaskLoop, run_blocking


class Walking:
    """A node that owns everything that it is asked for."""

    def __init__(self, nodes: ClaimNodes, name: str) -> None:
        self.claims = nodes.node(name)
        self.failure: BaseException | None = None
        self.is_retiring = False
        self.poll_interval = 5.0

    def can_claim(self, task: str) -> bool:
        return not self.claims.is_refused(task)

    async def claim(self, tasks: Any, known: Any = None) -> dict[str, str]:
        return await self.claims.add(dict.fromkeys(tasks, TOKEN), 1, lambda *_: True, known)

    async def finish(self, tasks: Any, state: Any = "done") -> dict[str, str]:
        return await self.claims.finish(tasks, state)

    async def find_done(self, tasks: Any) -> dict[str, str]:
        return await self.claims.find_done(dict.fromkeys(tasks, TOKEN))


@pytest.fixture
def nodes() -> ClaimNodes:
    """Where the nodes are."""
    return ClaimNodes()


def run(work: Any) -> Any:
    """Run a coroutine that waits for nothing real."""
    try:
        while True:
            work.send(None)
    except StopIteration as done:
        return done.value


class Dawn(FakeClock):
    """Lets the store speak again after so many sleeps."""

    def __init__(self, nodes: ClaimNodes, nights: int) -> None:
        super().__init__()
        self.nodes = nodes
        self.nights = nights

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        self.nights -= 1
        if self.nights == 0:
            self.nodes.store.is_unavailable = False


def walk(node: Any, source: Source, clock: FakeClock | None = None) -> Iterator[Task]:
    """Walk as a blocking caller does."""
    return run_blocking(TaskLoop(node, clock or FakeClock(), source), run)


def state(nodes: ClaimNodes, task: str) -> str:
    """Give the state of a task, as the store has it."""
    return run(nodes.state(task))[0]  # type: ignore[no-any-return]


def names(tasks: Iterator[Task]) -> list[str]:
    """Give what is walked through."""
    return [task.text for task in tasks]


def test_each_task_of_a_list_is_given_once_and_done(nodes: ClaimNodes) -> None:
    """Whoever comes later finds nothing to do."""
    assert names(walk(Walking(nodes, "a"), [1, "2", Task(3)])) == ["1", "2", "3"]
    assert names(walk(Walking(nodes, "b"), [1, 2, 3])) == []
    assert names(walk(Walking(nodes, "a"), [1, 2, 3])) == []


def test_a_task_is_done_when_the_next_is_asked_for(nodes: ClaimNodes) -> None:
    """Until then it runs; so what is done and what is recorded are one."""
    node = Walking(nodes, "a")
    given = walk(node, [1, 2])
    next(given)
    assert state(nodes, "1") == "running"
    next(given)
    assert state(nodes, "1") == "done"


@pytest.mark.parametrize("asks_anew", [False, True])
def test_a_loop_left_early_fails_its_task(nodes: ClaimNodes, asks_anew: bool) -> None:
    """Another may do it at once."""
    node = Walking(nodes, "a")
    given = walk(node, (lambda: [1]) if asks_anew else [1])
    next(given)
    given.close()  # type: ignore[attr-defined]
    assert state(nodes, "1") == "failed"
    assert names(walk(Walking(nodes, "b"), [1])) == ["1"]


def test_a_function_is_asked_until_it_names_nothing(nodes: ClaimNodes) -> None:
    """What it names anew is done in another round."""
    pending = [["1"], ["1", "2"], []]
    node = Walking(nodes, "a")
    given = []
    for task in walk(node, lambda: pending[0]):
        given.append(task.text)
        if len(given) in (1, 3):
            pending.pop(0)
    assert given == ["1", "2", "1"]


def test_what_is_pending_again_is_done_again(nodes: ClaimNodes) -> None:
    """A completion that stood there before the function was asked does not count."""
    node = Walking(nodes, "a")
    assert names(walk(node, ["1"])) == ["1"]
    pending = ["1"]
    given = []
    for task in walk(node, lambda: list(pending)):
        given.append(task.text)
        pending.clear()
    assert given == ["1"]


def test_what_was_done_while_the_function_was_asked_is_not_done_again(nodes: ClaimNodes) -> None:
    """Whatever clocks say: here time stands still."""
    slow, quick = Walking(nodes, "a"), Walking(nodes, "b")
    answers = iter([["1"], []])

    def ask() -> list[str]:
        answer = next(answers)
        if answer:
            # Done by another, after the list was made and before it arrives.
            assert names(walk(quick, ["1"])) == ["1"]
        return answer

    assert names(walk(slow, ask)) == []


def test_what_is_done_by_another_in_the_middle_of_a_round_is_left_out(nodes: ClaimNodes) -> None:
    """The store decides, at each claim."""
    slow, quick = Walking(nodes, "a"), Walking(nodes, "b")
    given = walk(slow, ["1", "2"])
    assert next(given).text == "1"
    assert run(quick.claim(["2"])) == {}
    run(quick.finish(["2"]))
    assert names(given) == []


def test_an_outage_is_waited_out(nodes: ClaimNodes) -> None:
    """Neither the end of a task nor the claim of the next is given up."""
    node = Walking(nodes, "a")
    given = walk(node, ["1", "2"], Dawn(nodes, 5))
    next(given)
    nodes.store.is_unavailable = True
    assert next(given).text == "2"
    assert not nodes.store.is_unavailable
    assert state(nodes, "1") == "done"
    assert names(given) == []


def test_a_node_that_failed_ends_the_walk(nodes: ClaimNodes) -> None:
    """It would wait for ever."""
    node = Walking(nodes, "a")
    given = walk(node, ["1", "2"])
    next(given)
    nodes.store.is_unavailable = True
    node.failure = RuntimeError("broken")
    with pytest.raises(Unavailable, match="has failed"):
        next(given)


def test_alone_a_walk_does_everything_once() -> None:
    """A node without a fleet goes by the same rules."""
    alone = LocalNode(10, lambda _: TOKEN)
    assert names(walk(alone, [1, 2])) == ["1", "2"]
    assert names(walk(alone, [1, 2, 3])) == ["3"]
    pending = [1]
    given = []
    for task in walk(alone, lambda: list(pending)):
        given.append(task.text)
        pending.clear()
    assert given == ["1"]


def test_alone_a_task_is_done_by_one_at_a_time() -> None:
    """Not twice at once; again later, unless once a date was asked for."""
    alone = LocalNode(10, lambda _: TOKEN)
    assert run(alone.claim(["1"])) == {}
    assert not alone.can_claim("1")
    assert run(alone.claim(["1", "2"])) == {"1": "this node does it already"}
    run(alone.finish(["1", "2"]))
    assert alone.can_claim("1")
    once = LocalNode(10, lambda _: TOKEN, once_per_date=True)
    run(once.claim(["1"]))
    run(once.finish(["1"]))
    assert not once.can_claim("1")
    assert run(once.claim(["1"])) == {"1": "it is done"}


def test_a_node_that_is_told_to_stop_ends_the_walk(nodes: ClaimNodes) -> None:
    """After the task in hand, which is done; the rest is for others."""
    node = Walking(nodes, "a")
    given = walk(node, ["1", "2"])
    next(given)
    node.is_retiring = True
    assert names(given) == []
    assert state(nodes, "1") == "done"
    assert names(walk(Walking(nodes, "b"), ["1", "2"])) == ["2"]
