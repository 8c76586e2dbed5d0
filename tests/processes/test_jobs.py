"""Real processes that share tasks, and join, leave, are killed and are frozen meanwhile.

The tests assert order, counts and what the store holds. Times are only recorded.
"""

import asyncio
import itertools
import signal
import statistics
from pathlib import Path
from typing import Any, Literal

import pytest
from job_processes import JobProcesses, check_tasks
from job_worker import Loop
from processes import WorkerProcess
from servers import Locate
from waiting import now, until

WORKERS = 3
SETTINGS = {
    "heartbeat_interval_sec": 1,
    "heartbeat_timeout_sec": 4,
    "reclaim_after": 8,
}
FROZEN = 12.0
"""Seconds for which a process is frozen: three times its timeout."""

Incident = Literal["join", "leave", "kill", "freeze"]


async def cause(nodes: JobProcesses, incident: Incident) -> dict[str, float]:
    """Cause an incident at the last worker; return when which worker was interrupted."""
    victim = nodes.workers[-1]
    match incident:
        case "join":
            victim.order("go")
        case "leave":
            victim.stop()
        case "kill":
            return {victim.name: victim.kill()}
        case "freeze":
            interruption = {victim.name: victim.freeze()}
            await asyncio.sleep(FROZEN)
            victim.thaw()
            return interruption
    return {}


EVERY_RUN = list(
    itertools.product(
        ("postgres", "sqlite"), ("printed", "tasks"), ("join", "leave", "kill", "freeze")
    )
)
A_FEW = [("postgres", "printed", "join"), ("sqlite", "tasks", "kill")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run all stores, loops and incidents at full scale, and two of them otherwise."""
    if "event" in metafunc.fixturenames:
        full = metafunc.config.getoption("--scale") == "full"
        runs = EVERY_RUN if full else A_FEW
        metafunc.parametrize(("kind", "loop", "event"), runs)


@pytest.fixture(params=["postgres", "sqlite"])
def store(request: pytest.FixtureRequest) -> str:
    """Return the kind of store."""
    return str(request.param)


async def test_no_task_is_done_twice_or_never(
    kind: str,
    loop: Loop,
    event: Incident,
    locate: Locate,
    tmp_path: Path,
    full_scale: bool,
    proof: Any,
) -> None:
    """A worker joins, leaves, is killed or frozen: each task is done once, and is audited."""
    count, seconds = (3000, 0.005) if full_scale else (300, 0.02)
    async with JobProcesses(
        locate(kind), tmp_path, loop, tasks=count, seconds=seconds, settings=SETTINGS
    ) as nodes:
        workers = await nodes.start(WORKERS)
        joining = await nodes.prepare(event == "join")
        await until(lambda: bool(nodes.facts("begun")), "a worker does a task")
        begun = nodes.facts("begun")[0].at
        if full_scale:
            await asyncio.sleep(begun + 3 - now())
        else:
            await until(lambda: len(nodes.facts("ended")) > count / 10, "some are done")
        interruptions = await cause(nodes, event)
        for worker in [*workers, *joining]:
            status = await worker.ended()
            assert status == (-signal.SIGKILL if worker.killed_at else 0), worker.log
        report = check_tasks(nodes.tasks, nodes.facts(), interruptions, loop)
        done, incomplete = await asyncio.to_thread(nodes.read_audit)
        took = nodes.facts("ended")[-1].at - begun
        figures = {
            "took_s": round(took, 1),
            "twice": len(report.twice),
            "never": len(report.never),
            "again": report.again,
            "audited": len(done),
            "incomplete": len(incomplete),
            "lost": len(nodes.facts("lost")),
            "refused": len(nodes.facts("jobs:audit-refused")),
        }
        proof.tell(f"{kind} {loop} {event}: {figures}")
        assert (report.twice, report.never, report.overlapping) == ([], [], [])
        assert len(report.again) <= len(interruptions)
        if loop == "tasks":
            assert set(done) == set(nodes.tasks)
            assert incomplete == {}
        else:
            assert done.keys() | incomplete.keys() == set(nodes.tasks)
        assert nodes.find_failures() == []
    proof.record("tasks shared", url=kind, loop=loop, event=event, tasks=count, **figures)


# How soon


def summarise(seconds: list[float]) -> dict[str, Any]:
    """Return the figures of a run."""
    return {
        "times": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
        "worst_s": round(max(seconds), 2),
    }


async def stop_all(workers: list[WorkerProcess]) -> None:
    """Stop workers in good order."""
    for worker in workers:
        worker.stop()
    for worker in workers:
        assert await worker.ended() == 0, worker.log


async def start_sharing(nodes: JobProcesses, count: int) -> list[WorkerProcess]:
    """Start workers; return when they share all tasks."""
    workers = await nodes.start(count)
    await nodes.reported("ready", workers)
    await nodes.shared(workers)
    return workers


def last_change(workers: list[WorkerProcess]) -> float:
    """Return when the tokens of workers changed for the last time."""
    return max(worker.last("jobs:tokens-changed").at for worker in workers)


async def test_nodes_that_start_at_once_on_an_empty_store_are_all_ready(
    store: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """After one starts alone, or three together, every task has exactly one owner."""
    for count in (1, WORKERS):
        took: list[float] = []
        for number in range(20 if full_scale else 2):
            folder = tmp_path / f"{count}-{number}"
            async with JobProcesses(locate(store), folder, "idle", tasks=300) as nodes:
                workers = await start_sharing(nodes, count)
                took.append(max(w.last("ready").at - w.last("enters").at for w in workers))
                await stop_all(workers)
                assert nodes.find_failures() == []
            proof.tell(f"{store}: {count} at once, start {number}: {took[-1]:.2f} s")
        proof.record("ready on an empty store", url=store, nodes=count, **summarise(took))


async def test_shares_change_hands_without_waiting_for_a_poll(
    store: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """When a node joins or leaves, the others yield and take over at once."""
    joined: list[float] = []
    left: list[float] = []
    async with JobProcesses(locate(store), tmp_path, "idle", tasks=300) as nodes:
        staying = await start_sharing(nodes, 2)
        for number in range(10 if full_scale else 1):
            (guest,) = await nodes.start(1)
            await nodes.reported("ready", [guest])
            await nodes.shared([*staying, guest], since=now())
            joined.append(guest.last("ready").at - guest.last("jobs:node-joined").at)
            leaving = guest.stop()
            await nodes.shared(staying, since=leaving)
            left.append(last_change(staying) - leaving)
            assert await guest.ended() == 0, guest.log
            proof.tell(f"{store}, {number}: joined {joined[-1]:.2f} s, left {left[-1]:.2f} s")
        await stop_all(staying)
        assert nodes.facts("coord:worker-died") == []
        assert nodes.find_failures() == []
    proof.record("hand-over on join", url=store, **summarise(joined))
    proof.record("hand-over on leave", url=store, **summarise(left))


async def test_what_a_killed_node_had_is_soon_the_others(
    store: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Its tokens are assigned to the survivors once it is declared dead."""
    took: list[float] = []
    settings: dict[str, Any] = {} if full_scale else SETTINGS
    for number in range(5 if full_scale else 1):
        folder = tmp_path / str(number)
        async with JobProcesses(
            locate(store), folder, "idle", tasks=300, settings=settings
        ) as nodes:
            workers = await start_sharing(nodes, WORKERS)
            # The leader one time, a follower the next.
            killed = workers.pop(number % WORKERS).kill()
            await nodes.shared(workers, since=killed)
            took.append(last_change(workers) - killed)
            await stop_all(workers)
            assert nodes.find_failures() == []
        proof.tell(f"{store}: {took[-1]:.1f} s after the kill")
    proof.record("hand-over after SIGKILL", url=store, **summarise(took))


async def test_a_node_that_was_frozen_claims_nothing_before_it_has_come_back(
    store: str, locate: Locate, tmp_path: Path
) -> None:
    """It wakes up with all its tokens, and may claim nothing: its session has timed out."""
    async with JobProcesses(locate(store), tmp_path, "idle", tasks=300, settings=SETTINGS) as nodes:
        workers = await start_sharing(nodes, 2)
        frozen, other = workers
        await nodes.shared([other], since=nodes.freeze(frozen))
        woken = frozen.thaw()
        await nodes.shared(workers, since=woken)
        back = frozen.last("jobs:node-joined").at
        assert back > woken
        facts = frozen.facts("may claim")
        early = [fact for fact in facts if fact["asked_at"] > woken and fact.at < back]
        assert [fact["tasks"] for fact in early if fact["tasks"]] == []
        await stop_all(workers)
        assert nodes.find_failures() == []
