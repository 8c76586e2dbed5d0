"""Real processes that push and handle, and are killed, frozen and stopped meanwhile.

What is asserted is order, counts and what the store says. Times are figures, and judged at
full scale only: a machine that starves a process for longer than its timeout makes others do
its work, and rightly so.
"""

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from depot import Depot, Hand, Handling, judge
from proxy import Proxy
from servers import PostgresServer
from waiting import now, until

from jobsync import Database, QueuePlugin

SEED = 20261115
WORKERS, PRODUCERS = 4, 2
TIMING = {"heartbeat_interval": 1, "worker_timeout": 4, "visibility_timeout": 4, "grace": 2}
_LONGEST = 1800.0
"""Seconds after which a storm is given up, at any scale."""
_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which database."""
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    name = f"chaos_{next(_numbers)}_{int(time.time())}"
    return str(request.getfixturevalue("postgres").create_database(name))


class Storm:
    """Strikes workers, by a seed; keeps their number."""

    def __init__(self, depot: Depot, seed: int) -> None:
        self.strikes = {"kill": 0, "pause": 0, "stop": 0}
        self._depot = depot
        self._dice = random.Random(seed)

    async def rage(self, is_over: Callable[[], bool], orders: dict[str, Any]) -> None:
        """Strike once a second until it is over; end with everybody there and getting on."""
        kinds = itertools.cycle(self._dice.sample(sorted(self.strikes), len(self.strikes)))
        async with asyncio.timeout(_LONGEST), asyncio.TaskGroup() as group:
            while not is_over():
                standing = {fact.who for fact in self._depot.told("stands")}
                victims = [
                    hand
                    for hand in self._depot.everybody
                    if hand.runs
                    and not hand.is_frozen
                    and hand.name in standing
                    and hand.name.startswith("handle")
                ]
                if len(victims) > 1:
                    kind, victim = next(kinds), self._dice.choice(victims)
                    self.strikes[kind] += 1
                    group.create_task(self._strike(kind, victim, orders))
                await asyncio.sleep(1)

    async def _strike(self, kind: str, victim: Hand, orders: dict[str, Any]) -> None:
        match kind:
            case "kill":
                victim.strike(signal.SIGKILL)
                self._depot.hire(**orders)
            case "pause":
                victim.is_frozen = True
                victim.strike(signal.SIGSTOP)
                await asyncio.sleep(self._dice.uniform(0.5, 6))
                victim.strike(signal.SIGCONT)
                victim.is_frozen = False
            case "stop":
                victim.is_frozen = True
                victim.strike(signal.SIGTERM)
                assert await victim.ended() == 0, victim.complaints
                self._depot.hire(**orders)


async def test_nothing_is_lost_in_a_storm(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any, request: Any
) -> None:
    """All is handled, and twice only where a claim had ended.

    Workers are killed, frozen and stopped; a server is restarted, and drops replies.
    """
    server = request.getfixturevalue("postgres") if kind == "postgres" else None
    messages = 20_000 if full_scale else 2_000
    seed = int(time.time()) if full_scale else SEED
    begun = now()
    async with Depot(url, tmp_path / "words", concurrency=10, **TIMING) as depot:
        with Network(url, server) as (near, disturb):
            orders: dict[str, Any] = {"seconds": 0.002 if full_scale else 0.02, "url": near}
            await depot.start(WORKERS, **orders)
            producers = [
                depot.hire("push", messages=messages // PRODUCERS, url=near)
                for _ in range(PRODUCERS)
            ]
            storm = Storm(depot, seed)

            def is_over() -> bool:
                disturb()
                assert all(producer.process.poll() in {None, 0} for producer in producers)
                handled = {fact.id for fact in depot.told("ends it")}
                done = not any(producer.runs for producer in producers)
                return done and len(handled) >= messages * 9 // 10

            await storm.rage(is_over, orders)
            await depot.drained()
            survivors = [hand for hand in depot.everybody if hand.runs]
            # One that was hired at the last moment does not hear signals before it stands.
            await depot.stand(survivors)
        finished = await depot.look("completed", "dead")
        counts = judge(depot, finished)
        for hand in survivors:
            hand.strike(signal.SIGTERM)
        assert {await hand.ended() for hand in survivors} == {0}
        depot.check_exits()
    assert counts["acknowledged"] + counts["perhaps"] >= messages
    assert storm.strikes["kill"] > 0
    proof.record(
        "queue storm", kind=kind, seed=seed, seconds=round(now() - begun), **storm.strikes, **counts
    )


class Network:
    """A way to a server that fails now and then: a reply each second, and all each 7 seconds.

    A file has no such way.
    """

    def __init__(self, url: str, server: PostgresServer | None) -> None:
        self._url = url
        self._server = server
        self._proxy: Proxy | None = None
        self._moments = itertools.count(1)
        self._next = now() + 1

    def __enter__(self) -> tuple[str, Callable[[], None]]:
        if self._url.startswith("sqlite"):
            return self._url, lambda: None
        port = int(self._url.partition("127.0.0.1:")[2].partition("/")[0])
        self._proxy = Proxy("127.0.0.1", port).start()
        return self._url.replace(f":{port}/", f":{self._proxy.port}/"), self._disturb

    def __exit__(self, *_: object) -> None:
        if self._proxy is not None:
            self._proxy.stop()

    def _disturb(self) -> None:
        assert self._proxy is not None
        assert self._server is not None
        if now() < self._next:
            return
        self._next = now() + 1
        if next(self._moments) % 7 == 3 and self._server.is_ours:
            self._server.restart()
        else:
            self._proxy.drop_reply()


POISON = ("raise", "hang", "kill")
POISON_TIMING = {"heartbeat_interval": 0.5, "worker_timeout": 2, "visibility_timeout": 2}


async def test_poison_is_set_aside_and_nobody_else_loses_an_attempt(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """What raises, hangs or kills its process dies by count; all others are at their first."""
    if kind == "sqlite" and not full_scale:
        pytest.skip("at full scale; the port's part is in the conformance suite")
    depot = Depot(url, tmp_path / "words", concurrency=5, max_attempts=2, **POISON_TIMING)
    async with depot, Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", max_attempts=2))
        for number, poison in enumerate(POISON):
            await queue.enqueue({"n": number, "by": "test", "kind": poison}, timeout=0.5)
            await queue.enqueue_many(
                [{"n": 100 + n, "by": "test", "kind": "plain"} for n in range(10)]
            )
        await depot.start(2, seconds=0.05)
        begun = now()
        # Finished ones alone: between two counts a message may go from one state to the other.
        while await queue.count("completed") + await queue.count("dead") < 30 + len(POISON):
            assert now() - begun < 120
            for hand in depot.everybody:
                if not hand.runs and hand.killed is None:
                    # It has killed itself; whatever runs it starts it again.
                    hand.killed = now()
                    depot.hire(seconds=0.05)
            await asyncio.sleep(0.05)
        dead = {each.value["kind"]: each for each in await queue.dead_letters()}
        assert {name: each.attempts for name, each in dead.items()} == dict.fromkeys(POISON, 2)
        assert await queue.count("completed") == 30
    plain = [fact for fact in depot.told("begins") if fact["kind"] == "plain"]
    assert {fact["attempt"] for fact in plain} == {1}
    assert len([hand for hand in depot.everybody if hand.killed]) >= dead["kill"].attempts
    proof.record("poison", kind=kind, seconds=round(now() - begun), deaths=len(depot.everybody) - 2)


async def test_a_deployment_spends_no_attempt(url: str, tmp_path: Path) -> None:
    """SIGTERM, with handlers at work and messages claimed ahead: the next one has all anew."""
    timing = {**TIMING, "grace": 0.2}
    depot = Depot(url, tmp_path / "words", concurrency=3, prefetch=5, **timing)
    async with depot, Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        await queue.enqueue_many(
            [{"n": n, "by": "test", "kind": "plain"} for n in range(20)], max_attempts=1
        )
        (old,) = await depot.start(1, seconds=3600)
        await until(lambda: len(depot.told("begins")) == 3, "three are at work")
        await depot.start(1, seconds=0)
        old.strike(signal.SIGTERM)
        assert await old.ended() == 0, old.complaints
        await depot.drained()
        assert await queue.count("completed") == 20
    assert {fact["attempt"] for fact in depot.told("begins")} == {1}
    assert len({fact.id for fact in depot.told("ends it")}) == 20


async def nth_begin(depot: Depot, message: int, count: int) -> Handling:
    """Wait until a message has begun so often; give the last of these facts."""

    def begins() -> list[Handling]:
        return [fact for fact in depot.told("begins") if fact["n"] == message]

    await until(lambda: len(begins()) >= count, f"message {message} begins {count} times")
    return begins()[count - 1]


async def test_a_killed_workers_message_starts_again_elsewhere(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """With the defaults within 21 s: the timeout, a beat and a second."""
    if kind == "postgres" and not full_scale:
        pytest.skip("at full scale; the storm kills workers there too")
    timing = {} if full_scale else TIMING
    timeout, beat = (15, 5) if full_scale else (4, 1)
    took = []
    for number in range(5 if full_scale else 1):
        place = f"{url}{number}" if kind == "sqlite" else f"{url}?schema=round_{number}"
        # The first that stands leads: the leader's death and the other's are both tried.
        async with Depot(place, tmp_path / str(number), **timing) as depot, Database(place) as db:
            hands = await depot.start(2, seconds=3600)
            queue = await db.use_plugin(QueuePlugin(resource="tasks"))
            await queue.enqueue({"n": number, "by": "test", "kind": "plain"})
            first = await nth_begin(depot, number, 1)
            (victim,) = (hand for hand in hands if hand.name == first.who)
            victim.strike(signal.SIGKILL)
            again = await nth_begin(depot, number, 2)
            assert again.who != first.who
            took.append(again.at - (victim.killed or 0.0))
    if full_scale:
        assert max(took) <= timeout + beat + 1, took
    proof.record("killed worker", kind=kind, seconds=[round(each, 1) for each in took])
