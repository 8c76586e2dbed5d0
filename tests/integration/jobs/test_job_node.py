"""Nodes of one fleet, from joining to leaving."""

from hiring import SETTINGS, Hire
from waiting import until

from jobsync import Store
from jobsync.jobs.job_keys import JobKeys


async def test_the_history_says_why_tokens_moved(hire: Hire, store: Store) -> None:
    """First everything is dealt, then a node joins, then one leaves."""
    first = await hire("a")
    second = await hire("b")
    await second.stop(30)
    lines = [entry.value for entry in await store.read(JobKeys(SETTINGS.fleet).rebalances)]
    told = [
        (line["trigger_reason"], line["nodes_before"], line["nodes_after"], line["tokens_moved"])
        for line in lines
    ]
    assert told == [
        ("initial_distribution", 0, 1, 20),
        ("membership_change", 1, 2, 10),
        ("membership_change", 2, 1, 10),
    ]
    assert {line["leader_node"] for line in lines} == {"a"}
    assert first.tokens == frozenset(range(20))


async def test_an_observer_waits_for_nobody_and_takes_nothing(hire: Hire) -> None:
    """It is ready before there is anybody else."""
    observer = await hire("watcher", is_observer=True)
    assert observer.tokens == frozenset()
    worker = await hire("a")
    assert len(worker.tokens) == 20


async def test_a_node_that_retires_claims_nothing_more_and_hands_over(hire: Hire) -> None:
    """What it runs it finishes; everything else is soon another's."""
    first, second = await hire("a"), await hire("b")
    mine = [str(number) for number in range(100) if first.can_claim(str(number))]
    assert await first.claim([mine[0]]) == {}
    first.retire()
    assert not any(first.can_claim(task) for task in mine)
    await until(lambda: len(second.tokens) == 20)
    assert first.tokens == frozenset()
    assert await first.finish([mine[0]]) == {}
    assert not second.can_claim(mine[0])
    assert second.can_claim(mine[1])
