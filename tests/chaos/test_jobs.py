"""Real processes that share tasks, and join, leave, are killed and are frozen meanwhile.

What is asserted is order, counts and what the store says. Times are figures.
"""

import asyncio
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
from labourer import Loop
from workshop import Strike, Workshop, judge, now, until

WORKERS = 3
SETTINGS = {
    "heartbeat_interval_sec": 1,
    "heartbeat_timeout_sec": 4,
    "reclaim_after": 8,
}
FROZEN = 12.0
"""Seconds for which a process stands still: three times as long as it may be silent."""

Trouble = Literal["join", "leave", "kill", "freeze"]
Locate: TypeAlias = Callable[[str], str]
_numbers = itertools.count()


@pytest.fixture
def locate(request: pytest.FixtureRequest, tmp_path: Path) -> Locate:
    """Gives the URL of an empty place of a kind."""

    def find(kind: str) -> str:
        number = next(_numbers)
        if kind == "sqlite":
            return f"sqlite:///{tmp_path / f'{number}.db'}"
        return f"{request.getfixturevalue('postgres').url}?schema=jobs_{number}"

    return find


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
        report = judge(workshop.tasks, workshop.deeds(), strikes)
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
