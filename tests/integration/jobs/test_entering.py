"""What a node has when it is entered, and what it takes from others before."""

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from servers import Locate
from teams import Team, start_team
from waiting import until

from jobsync import Components, CoordinationConfig, Event, Job
from jobsync.jobs.events import NoTokens, TokensChanged

FEW = CoordinationConfig(total_tokens=10)


@pytest.fixture(params=["sqlite", "postgres"])
def sql(request: pytest.FixtureRequest, locate: Locate) -> str:
    """The URL of an empty SQL store."""
    return locate(request.param)


def collect(events: list[Event], name: str) -> Components:
    """Return components that collect the events of one name."""
    components = Components.system()
    components.events.on(name, events.append)
    return components


@pytest.mark.parametrize("wait", [0, 0.001, 120])
def test_a_lone_node_has_all_tokens_when_it_is_entered(url: str, wait: float) -> None:
    """However short `wait_on_enter` is: it waits for others, and here are none."""
    warnings: list[Event] = []
    for _ in range(3):
        components = collect(warnings, NoTokens.name)
        with Job(
            "a", "s", coordination_config=FEW, url=url, wait_on_enter=wait, components=components
        ) as job:
            assert len(job.my_tokens) == 10
            assert job.can_claim_task("x")
    assert warnings == []


def test_entering_without_tokens_warns(sql: str) -> None:
    """The event has the reason and the fix; the tokens come as soon as others give them up."""
    warnings: list[Event] = []
    components = collect(warnings, NoTokens.name)
    may_give_up = threading.Event()

    async def block_soon() -> None:
        asyncio.get_running_loop().call_soon(may_give_up.wait)

    with (
        Job("a", "s", coordination_config=FEW, url=sql) as first,
        ExitStack() as exit_stack,
    ):
        exit_stack.callback(may_give_up.set)
        first._call(block_soon())
        second = exit_stack.enter_context(
            Job("b", "s", coordination_config=FEW, url=sql, wait_on_enter=0, components=components)
        )
        (warning,) = warnings
        assert isinstance(warning, NoTokens)
        assert warning.node == "b"
        assert warning.reason == "no other node gave it tokens within wait_on_enter=0 s"
        assert warning.fix.startswith("raise wait_on_enter")
        may_give_up.set()
        second._call(until(lambda: len(second.my_tokens) == len(first.my_tokens) == 5))


def test_a_node_beyond_the_number_of_tokens_is_warned(memory: str) -> None:
    """It has its share, which is nothing."""
    warnings: list[Event] = []
    one = CoordinationConfig(total_tokens=1)
    components = collect(warnings, NoTokens.name)
    with (
        Job("a", "s", coordination_config=one, url=memory),
        Job("b", "s", coordination_config=one, url=memory, components=components),
        Job("c", "s", coordination_config=one, url=memory, observer=True, components=components),
    ):
        (warning,) = warnings
        assert isinstance(warning, NoTokens)
        assert warning.reason == "2 nodes share total_tokens=1"


def enter_in_vain(team: Team, **options: Any) -> None:
    """Enter a job that waits for more nodes than there are."""
    job = team.make("waiting", settings={"minimum_nodes": 3}, **options)
    with pytest.raises(TimeoutError, match="2 of minimum_nodes=3 joined within"):
        job.__enter__()


def test_a_node_that_waits_for_others_takes_no_tokens(sql: str) -> None:
    """Those that work keep all of theirs until it is entered, also if it never is."""
    with start_team(sql, "worker") as team:
        before = len(team.events)
        enter_in_vain(team, wait_on_enter=2.5)
        changes = [event for event in team.events[before:] if isinstance(event, TokensChanged)]
        assert not [event for event in changes if event.added or event.removed]


def test_nodes_that_wait_for_each_other_are_entered_together(sql: str) -> None:
    """The one that was there before shares its tokens with them then."""
    with start_team(sql, "worker") as team:
        jobs = [team.make(name, settings={"minimum_nodes": 3}) for name in ("a", "b")]
        threads = [threading.Thread(target=job.__enter__) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        try:
            assert [len(job.my_tokens) for job in jobs] == [20, 20]
        finally:
            for job in jobs:
                job.__exit__(None, None, None)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_node_s_own_exit_is_no_rebalance(sql: str, *, is_stopped: bool) -> None:
    """Another node takes over; `on_rebalance` is called for what others do, and not for this."""
    calls: list[Any] = []
    removed: list[int] = []
    with start_team(sql, "stays") as team:
        job = team.make(
            "leaves",
            on_rebalance=calls.append,
            on_tokens_removed=lambda tokens: removed.append(len(tokens)),
        )
        with job:
            assert len(job.my_tokens) == 30
            if is_stopped:
                job.stop()
                team.until(lambda: not job.my_tokens)
        assert sum(removed) == 30
        assert all(event.tokens_removed == 0 for event in calls)
        assert sum(event.tokens_added for event in calls) == 30
