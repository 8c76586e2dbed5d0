"""A pin holds on the node that registers it when registering returns."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


class Decisions:
    """The decisions of all leaders, which a test can stop."""

    def __init__(self) -> None:
        self.are_stopped = False
        self.under_way = 0
        self.changed = threading.Condition()

    def add(self, number: int) -> None:
        """Count a decision that begins or ends."""
        with self.changed:
            self.under_way += number
            self.changed.notify_all()


decisions = Decisions()


@pytest.fixture(autouse=True)
def noted_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count decisions from the start: one that is under way may read pins later."""
    rebalance = Rebalancer._rebalance

    async def decide(self: Rebalancer, term: Any, plan: Any, *, is_notified: bool) -> Any:
        decisions.add(1)
        try:
            if decisions.are_stopped and plan is not None:
                return plan
            return await rebalance(self, term, plan, is_notified=is_notified)
        finally:
            decisions.add(-1)

    monkeypatch.setattr(Rebalancer, "_rebalance", decide)


@contextmanager
def no_decisions() -> Iterator[None]:
    """Make leaders go on with the assignment that they have.

    They decide again in the end: nodes that leave wait until others have their tokens.
    """
    decisions.are_stopped = True
    try:
        with decisions.changed:
            assert decisions.changed.wait_for(lambda: not decisions.under_way, 60)
        yield
    finally:
        decisions.are_stopped = False


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
        job = jobs[0]
        with no_decisions():
            team.until(lambda: len({job.token_version for job in jobs}) == 1)
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
