"""A pin holds on the node that registers it when registering returns."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from servers import Locate
from teams import start_team
from waiting import until

from jobsync import ClaimLost, Job
from jobsync.jobs.rebalancer import Rebalancer


@pytest.fixture(params=["memory", "sqlite", "postgres", "s3"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A store that no other test uses."""
    return locate(request.param)


def find_own(job: Job, count: int = 1) -> list[str]:
    """Return tasks that a node owns."""
    own = (f"t{n}" for n in itertools.count() if job.can_claim_task(f"t{n}"))
    return list(itertools.islice(own, count))


@contextmanager
def no_decisions() -> Iterator[None]:
    """Make leaders go on with the assignment that they have.

    They decide again in the end: nodes that leave wait until others have their tokens.
    """

    async def decide_nothing(_: Rebalancer, term: object, plan: object, **__: object) -> object:
        del term
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rebalancer, "_rebalance", decide_nothing)
        yield


@pytest.mark.parametrize("creator", [0, 1])
def test_a_node_claims_nothing_that_it_has_pinned_elsewhere(url: str, creator: int) -> None:
    """Neither the leader nor another node, from the moment in which registering returns."""
    with start_team(url) as team:
        jobs = [team.add(name) for name in ("a", "b")]
        team.until(lambda: [len(job.my_tokens) for job in jobs] == [30, 30])
        job, other = jobs[creator], jobs[1 - creator]
        for task in find_own(job, 8):
            job.register_task_lock(task, other.node_name)
            assert not job.can_claim_task(task)
            with pytest.raises(ClaimLost):
                job.add_task(task)
        bulk = find_own(job, 8)
        job.register_task_locks_bulk([(task, "nobody") for task in bulk])
        assert not any(map(job.can_claim_task, bulk))
        assert job.add_tasks(bulk) == []


@pytest.mark.parametrize("clearer", [0, 1])
def test_a_pin_that_is_cleared_before_the_leader_acts_ends_here_too(url: str, clearer: int) -> None:
    """The task is done here again, whoever has cleared the pin; no assignment says so."""
    with start_team(url) as team:
        jobs = [team.add(name) for name in ("a", "b")]
        team.until(lambda: [len(job.my_tokens) for job in jobs] == [30, 30])
        team.until(lambda: len({job.token_version for job in jobs}) == 1)
        job = jobs[0]
        with no_decisions():
            (task,) = find_own(job)
            version = job.token_version
            job.register_task_lock(task, "b")
            assert not job.can_claim_task(task)
            assert jobs[clearer].clear_all_locks() == 1
            job._call(until(lambda: job.can_claim_task(task)))
            assert job.token_version == version


def test_a_pin_that_allows_this_node_withholds_nothing(url: str) -> None:
    """Neither its own name, nor a fallback, nor an alternative."""
    with start_team(url, "a", "b") as team:
        job = team.add("c")
        team.until(lambda: len(job.my_tokens) == 20)
        with no_decisions():
            mine, spare, either = find_own(job, 3)
            job.register_lock(mine, "c")
            job.register_lock(spare, ["gone-%", "_"])
            job.register_locks_bulk([(either, "b"), (either, "c")])
            assert all(map(job.can_claim_task, (mine, spare, either)))
