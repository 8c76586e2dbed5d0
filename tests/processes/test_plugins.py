"""Real processes with plugins of their own: killed, stopped, interrupted as they start.

The tests assert order, counts and what the store holds. Nothing promises a time.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import plugin_worker
import pytest
from election_processes import CandidateProcess, ElectionProcesses, check_beliefs
from servers import Locate
from waiting import until

from jobsync import Record, open_store
from jobsync.coordination.session import SESSIONS
from jobsync.core.trust import Timing

TIMING = Timing(heartbeat=1, timeout=4)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """Return an empty store."""
    return locate(request.param)


@pytest.fixture
def fleet(url: str, tmp_path: Path) -> ElectionProcesses:
    """Return a group without processes yet."""
    return ElectionProcesses(
        url, tmp_path / "facts", TIMING, plugin_worker.ROLES, plugin_worker.__file__
    )


async def find_sessions(url: str) -> list[Record]:
    """Return the live sessions, as far as the store knows."""
    store = await open_store(url)
    found = await store.scan(SESSIONS, where={"state": "live"})
    await store.close()
    return found


def heard(candidate: CandidateProcess, role: str, event: str) -> list[str]:
    """Return the workers that events of a plugin were about, in order."""
    name = f"plg:{role}:coordinator-{event}"
    facts = (fact for fact in candidate.facts("hears") if fact["plugin"] == role)
    return [fact["worker_id"] for fact in facts if fact["event"] == name]


def has_heard(candidate: CandidateProcess, role: str, leader: CandidateProcess) -> bool:
    """Whether the latest election that a plugin knows of is this leader's."""
    return heard(candidate, role, "elected")[-1:] == [leader.worker_id]


def has_done_more(candidate: CandidateProcess, role: str, before: int) -> bool:
    """Whether a plugin was called again since."""
    return any(f["done"] > before for f in candidate.facts("works") if f["role"] == role)


def check_events(fleet: ElectionProcesses, candidates: Iterable[CandidateProcess]) -> None:
    """Check that plugins get the events of their own role only, and their own promotions."""
    for candidate in candidates:
        for fact in candidate.facts("hears"):
            assert fact["event"].startswith(f"plg:{fact['plugin']}:")
            assert fact["role"] == f"default/{fact['plugin']}"
        for role in fleet.roles:
            promoted = [f for f in fleet.promotions(role) if f["worker_id"] == candidate.worker_id]
            assert heard(candidate, role, "promoted") == [fact["worker_id"] for fact in promoted]
            assert set(heard(candidate, role, "promoted")) <= {candidate.worker_id}


async def test_each_role_has_one_coordinator_in_a_fleet_of_unlike_processes(
    fleet: ElectionProcesses, url: str
) -> None:
    """Three plugins in one process, two in the others: when a leader is killed, another leads."""
    unlike = [
        plugin_worker.ROLES,
        ("archive", "billing"),
        ("billing", "cleanup"),
        ("cleanup", "archive"),
    ]
    async with fleet:
        for roles in unlike:
            await fleet.reported("joined", await fleet.start(1, roles))
        leaders = await fleet.leaders()
        # The oldest can do everything.
        assert set(leaders.values()) == {fleet.workers[0]}
        for killed in range(2):
            victim = leaders["billing"]
            survivors = [each for each in fleet.running if each is not victim]
            victim.kill()
            await victim.ended()
            leaders = await fleet.leaders()
            for role, leader in leaders.items():
                assert leader in survivors
                assert role in leader.roles
            for candidate in survivors:
                for role in candidate.roles:
                    await until(
                        partial(has_heard, candidate, role, leaders[role]),
                        f"{candidate} knows who leads {role} after {killed + 1} deaths",
                    )
        # Of four, two are left, and neither can do everything.
        assert len(set(leaders.values())) == 2
        for role in fleet.roles:
            leader = leaders[role]
            # Its work begins a moment after its election is known.
            await until(partial(has_done_more, leader, role, 0), f"{role} is done")
            before = [f["done"] for f in leader.facts("works") if f["role"] == role][-1]
            if role != "cleanup":
                await until(
                    partial(has_done_more, leader, role, before),
                    f"{role} goes on, though it may raise",
                )
        check_events(fleet, fleet.running)
        survivors = fleet.running
        for candidate in survivors:
            candidate.stop()
        assert [await each.ended() for each in survivors] == [0, 0]
        assert await find_sessions(url) == []
        for role in fleet.roles:
            assert check_beliefs(fleet.facts(), role) == []
        failures = fleet.facts("jobsync:handler-failed")
        assert {fact["event"] for fact in failures} == {"default/billing"}
        assert {fact["error"] for fact in failures} == {"ValueError: no money"}
        assert [each.log for each in fleet.workers] == [""] * 4


@pytest.mark.parametrize("shutdown", plugin_worker.SHUTDOWNS)
async def test_a_signal_ends_everything_in_good_order(
    fleet: ElectionProcesses, url: str, shutdown: str
) -> None:
    """Whatever its handler stops, in any order and repeatedly: exit 0, and no session is left."""
    async with fleet:
        candidate = fleet.prepare(shutdown=shutdown)
        await fleet.release([candidate])
        await fleet.leaders()
        await until(
            lambda: {f["role"] for f in candidate.facts("works")} == set(plugin_worker.ROLES),
            "all plugins have worked",
        )
        candidate.stop()
        assert await candidate.ended() == 0, candidate.log
        assert await find_sessions(url) == []
        # Where a handler raises SystemExit all tasks are cancelled, and with them the terms.
        expected = ["stops"] if shutdown == "exit" else ["lost", "stops"]
        for role in fleet.roles:
            ends = [f.what for f in candidate.facts("lost", "stops") if f["role"] == role]
            assert ends == expected
            (end, *_) = [f for f in candidate.facts(expected[0]) if f["role"] == role]
            assert all(f.at < end.at for f in candidate.facts("works") if f["role"] == role)
        assert len(candidate.facts("db:disconnected")) == 1
        assert candidate.log == ""


@pytest.mark.parametrize("shutdown", plugin_worker.SHUTDOWNS)
async def test_a_signal_may_come_at_any_moment_of_the_start(
    fleet: ElectionProcesses, url: str, shutdown: str, full_scale: bool
) -> None:
    """Whatever has begun is ended: exit 0; and where a handler lets it end, no session is left."""
    moments = ["started", "db:plugin-started", "gained"]
    async with fleet:
        for moment in moments * (10 if full_scale else 1):
            candidate = fleet.prepare(shutdown=shutdown)
            await fleet.release([candidate])
            await until(partial(candidate.has_reported, moment), moment)
            candidate.stop()
            assert await candidate.ended() == 0, (moment, candidate.log)
            if shutdown != "exit":
                # There asyncio cancels a connect under way, complains of it, and waits for
                # nothing: a session that was being made ends by its timeout.
                assert candidate.log == ""
                gained = {fact["role"] for fact in candidate.facts("gained")}
                assert {fact["role"] for fact in candidate.facts("lost")} == gained
                assert await find_sessions(url) == []
