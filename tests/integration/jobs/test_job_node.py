"""Nodes of one fleet, from joining to leaving."""

from job_nodes import SETTINGS, StartNode
from waiting import until

from jobsync import Store
from jobsync.jobs.job_keys import JobKeys


async def test_the_history_says_why_tokens_moved(start_node: StartNode, store: Store) -> None:
    """First all tokens are assigned, then a node joins, then one leaves."""
    first = await start_node("a")
    second = await start_node("b")
    await second.stop(30)
    lines = [entry.value for entry in await store.read(JobKeys(SETTINGS.fleet).rebalances)]
    reasons = [
        (line["trigger_reason"], line["nodes_before"], line["nodes_after"], line["tokens_moved"])
        for line in lines
    ]
    assert reasons == [
        ("initial_distribution", 0, 1, 20),
        ("membership_change", 1, 2, 10),
        ("membership_change", 2, 1, 10),
    ]
    assert {line["leader_node"] for line in lines} == {"a"}
    assert first.tokens == frozenset(range(20))


async def test_an_observer_waits_for_no_node_and_owns_nothing(start_node: StartNode) -> None:
    """It is ready before any other node has joined."""
    observer = await start_node("watcher", is_observer=True)
    assert observer.tokens == frozenset()
    worker = await start_node("a")
    assert len(worker.tokens) == 20


async def test_a_node_that_retires_claims_nothing_more_and_hands_over(
    start_node: StartNode,
) -> None:
    """It finishes its running task; another node soon owns everything else."""
    first, second = await start_node("a"), await start_node("b")
    mine = [str(number) for number in range(100) if first.can_claim(str(number))]
    assert await first.claim([mine[0]]) == {}
    first.retire()
    assert not any(first.can_claim(task) for task in mine)
    await until(lambda: len(second.tokens) == 20)
    assert first.tokens == frozenset()
    assert await first.finish([mine[0]]) == {}
    assert not second.can_claim(mine[0])
    assert second.can_claim(mine[1])
