"""Real processes that share tasks, and join, leave, are killed and are frozen meanwhile.

What is asserted is order, counts and what the store says. Times are figures.
"""

import asyncio
import itertools
import signal
import statistics
from pathlib import Path
from typing import Any, Literal

import pytest
from labourer import Loop
from servers import Locate
from waiting import now, until
from workshop import Strike, Worker, Workshop, judge

WORKERS = 3
SETTINGS = {
    "heartbeat_interval_sec": 1,
    "heartbeat_timeout_sec": 4,
    "reclaim_after": 8,
}
FROZEN = 12.0
"""Seconds for which a process stands still: three times as long as it may be silent."""

Trouble = Literal["join", "leave", "kill", "freeze"]


async def trouble(workshop: Workshop, kind: Trouble) -> list[Strike]:
    """Let something happen to one worker; give what it was struck by."""
    victim = workshop.everybody[-1]
    match kind:
        case "join":
            victim.begin()
        case "leave":
            victim.strike(signal.SIGTERM)
        case "kill":
            return [victim.strike(signal.SIGKILL)]
        case "freeze":
            strike = victim.strike(signal.SIGSTOP)
            await asyncio.sleep(FROZEN)
            victim.strike(signal.SIGCONT)
            return [strike]
    return []


EVERY_RUN = list(
    itertools.product(
        ("postgres", "sqlite"), ("printed", "tasks"), ("join", "leave", "kill", "freeze")
    )
)
A_FEW = [("postgres", "printed", "join"), ("sqlite", "tasks", "kill")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run all stores, loops and troubles at full scale, and two of them otherwise."""
    if "event" in metafunc.fixturenames:
        full = metafunc.config.getoption("--scale") == "full"
        runs = EVERY_RUN if full else A_FEW
        metafunc.parametrize(("kind", "loop", "event"), runs)


@pytest.fixture(params=["postgres", "sqlite"])
def store(request: pytest.FixtureRequest) -> str:
    """Which kind of store."""
    return str(request.param)


async def test_no_task_is_done_twice_or_never(
    kind: str,
    loop: Loop,
    event: Trouble,
    locate: Locate,
    tmp_path: Path,
    full_scale: bool,
    proof: Any,
) -> None:
    """Whoever joins, leaves, is killed or frozen: each task is done once, and is accounted for."""
    count, seconds = (3000, 0.005) if full_scale else (300, 0.02)
    async with Workshop(
        locate(kind), tmp_path, loop, tasks=count, seconds=seconds, settings=SETTINGS
    ) as workshop:
        workers = await workshop.start(WORKERS)
        joining = await workshop.prepare(event == "join")
        await until(lambda: bool(workshop.deeds("begun")), "somebody works")
        begun = workshop.deeds("begun")[0].at
        if full_scale:
            await asyncio.sleep(begun + 3 - now())
        else:
            await until(lambda: len(workshop.deeds("ended")) > count / 10, "some are done")
        strikes = await trouble(workshop, event)
        for worker in [*workers, *joining]:
            status = await worker.ended()
            assert status == (-signal.SIGKILL if worker.is_doomed else 0), worker.complaints
        report = judge(workshop.tasks, workshop.deeds(), strikes, loop)
        done, incomplete = await asyncio.to_thread(workshop.audit)
        took = workshop.deeds("ended")[-1].at - begun
        figures = {
            "took_s": round(took, 1),
            "twice": len(report.twice),
            "never": len(report.never),
            "again": report.again,
            "audited": len(done),
            "incomplete": len(incomplete),
            "lost": len(workshop.deeds("lost")),
            "refused": len(workshop.deeds("jobs:audit-refused")),
        }
        proof.tell(f"{kind} {loop} {event}: {figures}")
        assert (report.twice, report.never, report.overlapping) == ([], [], [])
        assert len(report.again) <= len(strikes)
        if loop == "tasks":
            assert set(done) == set(workshop.tasks)
            assert incomplete == {}
        else:
            assert done.keys() | incomplete.keys() == set(workshop.tasks)
        assert workshop.complaints() == []
    proof.record("tasks shared", url=kind, loop=loop, event=event, tasks=count, **figures)


# How soon


def summarise(seconds: list[float]) -> dict[str, Any]:
    """Give the figures of a run."""
    return {
        "times": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
        "worst_s": round(max(seconds), 2),
    }


def entered_within(workshop: Workshop, worker: Worker) -> float:
    """Give how long a worker took to enter its job."""
    return workshop.last("ready", worker).at - workshop.last("enters", worker).at


async def retire(workers: list[Worker]) -> None:
    """Let workers leave in good order."""
    for worker in workers:
        worker.strike(signal.SIGTERM)
    for worker in workers:
        assert await worker.ended() == 0, worker.complaints


async def test_nodes_that_start_at_once_on_an_empty_store_are_all_ready(
    store: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """One alone, and three together: each start ends with every task somebody's, once."""
    for count in (1, WORKERS):
        took: list[float] = []
        for number in range(20 if full_scale else 2):
            folder = tmp_path / f"{count}-{number}"
            async with Workshop(locate(store), folder, "idle", tasks=300) as workshop:
                workers = await workshop.start(count)
                await workshop.told("ready", workers)
                await workshop.shared(workers)
                took.append(max(entered_within(workshop, worker) for worker in workers))
                await retire(workers)
                assert workshop.complaints() == []
            proof.tell(f"{store}: {count} at once, start {number}: {took[-1]:.2f} s")
        proof.record("ready on an empty store", url=store, nodes=count, **summarise(took))


async def test_shares_change_hands_without_waiting_for_a_poll(
    store: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """A node joins and leaves: the others give and take at once, with the default intervals."""
    joined: list[float] = []
    left: list[float] = []
    async with Workshop(locate(store), tmp_path, "idle", tasks=300) as workshop:
        staying = await workshop.start(2)
        await workshop.told("ready", staying)
        await workshop.shared(staying)
        for number in range(10 if full_scale else 1):
            (guest,) = await workshop.start(1)
            await workshop.told("ready", [guest])
            await workshop.shared([*staying, guest], since=now())
            named = workshop.last("jobs:node-joined", guest).at
            joined.append(workshop.last("ready", guest).at - named)
            leaving = guest.strike(signal.SIGTERM).at
            await workshop.shared(staying, since=leaving)
            last = max(workshop.last("jobs:tokens-changed", worker).at for worker in staying)
            left.append(last - leaving)
            assert await guest.ended() == 0, guest.complaints
            proof.tell(f"{store}, {number}: joined {joined[-1]:.2f} s, left {left[-1]:.2f} s")
        await retire(staying)
        assert workshop.deeds("coord:worker-died") == []
        assert workshop.complaints() == []
    proof.record("hand-over on join", url=store, **summarise(joined))
    proof.record("hand-over on leave", url=store, **summarise(left))


async def test_what_a_killed_node_had_is_soon_the_others(
    store: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Its tokens are dealt when it is called dead, to the survivors alone."""
    took: list[float] = []
    settings: dict[str, Any] = {} if full_scale else SETTINGS
    for number in range(5 if full_scale else 1):
        folder = tmp_path / str(number)
        async with Workshop(
            locate(store), folder, "idle", tasks=300, settings=settings
        ) as workshop:
            workers = await workshop.start(WORKERS)
            await workshop.told("ready", workers)
            await workshop.shared(workers)
            # The leader one time, a follower the next.
            victim = workers.pop(number % WORKERS)
            killed = victim.strike(signal.SIGKILL).at
            await workshop.shared(workers, since=killed)
            last = max(workshop.last("jobs:tokens-changed", worker).at for worker in workers)
            took.append(last - killed)
            await retire(workers)
            assert workshop.complaints() == []
        proof.tell(f"{store}: {took[-1]:.1f} s after the kill")
    proof.record("hand-over after SIGKILL", url=store, **summarise(took))


async def test_a_node_that_was_frozen_claims_nothing_before_it_has_come_back(
    store: str, locate: Locate, tmp_path: Path
) -> None:
    """It wakes up owning all that it owned, and says no to everything: its time is up."""
    async with Workshop(locate(store), tmp_path, "idle", tasks=300, settings=SETTINGS) as workshop:
        workers = await workshop.start(2)
        await workshop.told("ready", workers)
        await workshop.shared(workers)
        frozen, other = workers
        struck = frozen.strike(signal.SIGSTOP).at
        await workshop.shared([other], since=struck)
        woken = frozen.strike(signal.SIGCONT).at
        await workshop.shared(workers, since=woken)
        back = workshop.last("jobs:node-joined", frozen).at
        assert back > woken
        mine = [deed for deed in workshop.deeds("may claim") if deed.who == frozen.name]
        early = [deed for deed in mine if deed.facts["asked"] > woken and deed.at < back]
        assert [deed.facts["tasks"] for deed in early if deed.facts["tasks"]] == []
        await retire(workers)
        assert workshop.complaints() == []
