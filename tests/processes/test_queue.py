"""Real processes that push and handle, and are killed, frozen and stopped meanwhile.

The tests assert order, counts and what the store holds. Times are asserted at full scale only: if
the machine starves a process for longer than its timeout, others rightly take over its work.
"""

import asyncio
import itertools
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from processes import OTHER_NAMESPACE, WorkerProcess, can_unshare
from proxy import Proxy
from queue_processes import QueueProcesses, check_messages
from servers import PostgresServer
from waiting import now, until
from worker_protocol import Fact

from jobsync import Database, QueuePlugin

SEED = 20261115
WORKERS, PRODUCERS = 4, 2
TIMING = {"heartbeat_interval": 1, "worker_timeout": 4, "visibility_timeout": 4, "grace": 2}
_LONGEST = 1800.0
"""Seconds after which a storm fails, at any scale."""
_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgres", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of store."""
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty store."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    if kind == "s3":
        return str(request.getfixturevalue("bucket_url"))
    name = f"chaos_{next(_numbers)}_{int(time.time())}"
    return str(request.getfixturevalue("postgres").create_database(name))


class Storm:
    """Strikes workers, by a seed, and counts the strikes."""

    def __init__(self, processes: QueueProcesses, seed: int) -> None:
        self.strikes = {"kill": 0, "pause": 0, "stop": 0}
        self._processes = processes
        self._dice = random.Random(seed)

    async def rage(self, is_over: Callable[[], bool], options: dict[str, Any]) -> None:
        """Strike once a second until it is over; end with all workers there and running."""
        kinds = itertools.cycle(self._dice.sample(sorted(self.strikes), len(self.strikes)))
        async with asyncio.timeout(_LONGEST), asyncio.TaskGroup() as group:
            while not is_over():
                joined = {fact.who for fact in self._processes.facts("joined")}
                victims = [
                    worker
                    for worker in self._processes.running
                    if not worker.is_ending
                    and worker.name in joined
                    and worker.name.startswith("handle")
                ]
                if len(victims) > 1:
                    kind, victim = next(kinds), self._dice.choice(victims)
                    self.strikes[kind] += 1
                    group.create_task(self._strike(kind, victim, options))
                await asyncio.sleep(1)

    async def _strike(self, kind: str, victim: WorkerProcess, options: dict[str, Any]) -> None:
        match kind:
            case "kill":
                victim.kill()
                self._processes.add(**options)
            case "pause":
                victim.freeze()
                await asyncio.sleep(self._dice.uniform(0.5, 6))
                victim.thaw()
            case "stop":
                victim.stop()
                assert await victim.ended() == 0, victim.log
                self._processes.add(**options)


async def test_nothing_is_lost_in_a_storm(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any, request: Any
) -> None:
    """All messages are handled, and twice only if a claim had ended.

    Workers are killed, frozen and stopped; a server is restarted, and drops replies.
    """
    server = request.getfixturevalue("postgres") if kind == "postgres" else None
    # At least five seconds, and so a strike of each kind.
    messages, seconds = (20_000, 0.002) if full_scale else (800, 0.25)
    seed = int(time.time()) if full_scale else SEED
    begun = now()
    async with QueueProcesses(url, tmp_path / "facts", concurrency=10, **TIMING) as processes:
        with Network(url, server) as (proxied, disturb):
            options: dict[str, Any] = {"seconds": seconds, "url": proxied}
            await processes.start(WORKERS, **options)
            producers = [
                processes.add("push", messages=messages // PRODUCERS, url=proxied)
                for _ in range(PRODUCERS)
            ]
            storm = Storm(processes, seed)

            def is_over() -> bool:
                disturb()
                assert all(producer.process.poll() in {None, 0} for producer in producers)
                handled = {fact["id"] for fact in processes.facts("ended")}
                done = not any(producer.is_alive for producer in producers)
                return done and len(handled) >= messages * 9 // 10

            await storm.rage(is_over, options)
            await processes.drained()
            survivors = processes.alive
            # One that was started at the last moment handles signals only after it has joined.
            await processes.reported("joined", survivors)
        finished = await processes.read_messages("completed", "dead")
        counts = check_messages(processes, finished)
        for worker in survivors:
            worker.stop()
        assert {await worker.ended() for worker in survivors} == {0}
        processes.check_exits()
    assert counts["acknowledged"] + counts["perhaps"] >= messages
    assert storm.strikes["kill"] > 0
    proof.record(
        "queue storm", kind=kind, seed=seed, seconds=round(now() - begun), **storm.strikes, **counts
    )


class Network:
    """A proxy to a server that loses a reply each second, and restarts the server every 7 seconds.

    A file needs none, and an S3 server is not restarted.

    Args:
        url: the store.
        server: what to restart.
        loses_commits: whether it loses COMMITs and their replies besides.
    """

    def __init__(
        self, url: str, server: PostgresServer | None, *, loses_commits: bool = False
    ) -> None:
        self._url = url
        self._server = server
        self._loses_commits = loses_commits
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
        if now() < self._next:
            return
        self._next = now() + 1
        server, moment = self._server, next(self._moments)
        if moment % 7 == 3 and server is not None and server.is_ours:
            server.restart()
        elif self._loses_commits and moment % 3:
            # One at a time: at the end of a storm there are few.
            self._proxy.pass_through()
            lose = self._proxy.drop_reply if moment % 3 == 1 else self._proxy.drop_request
            lose(1, is_commit)
        else:
            self._proxy.drop_reply()


def is_commit(request: bytes) -> bool:
    """Whether a request is the COMMIT of a handler's transaction."""
    return b"COMMIT\0" in request


EFFECT_SECONDS = {"sqlite": (0.02, 0.0), "postgres": (0.1, 0.01)}
"""How long a transaction takes, at small and at full scale. In a file one follows the other."""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_effects_in_transactions_happen_once_in_a_storm(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any, request: Any
) -> None:
    """Each message has one effect: none is doubled, and none is missing.

    Workers are killed, frozen and stopped; a server is restarted, and COMMITs are lost.
    """
    server = request.getfixturevalue("postgres") if kind == "postgres" else None
    messages = 20_000 if full_scale else 200
    seed = int(time.time()) if full_scale else SEED
    effects, begun = EffectTable(url), now()
    # Enough attempts for all that is lost.
    settings = {**TIMING, "concurrency": 10, "max_attempts": 100}
    async with QueueProcesses(url, tmp_path / "facts", **settings) as processes:
        with Network(url, server, loses_commits=True) as (proxied, disturb):
            seconds = EFFECT_SECONDS[kind][full_scale]
            options: dict[str, Any] = {"seconds": seconds, "url": proxied, "has_effects": True}
            await processes.drained()
            effects.create()
            await processes.start(WORKERS, **options)
            producer = processes.add("push", messages=messages, url=proxied)
            storm = Storm(processes, seed)

            def is_over() -> bool:
                disturb()
                assert producer.process.poll() in {None, 0}
                return not producer.is_alive and effects.count() >= messages * 9 // 10

            await storm.rage(is_over, options)
            await processes.drained()
            survivors = processes.alive
            await processes.reported("joined", survivors)
        finished = await processes.read_messages("completed")
        counts = check_messages(processes, finished)
        for worker in survivors:
            worker.stop()
        assert {await worker.ended() for worker in survivors} == {0}
        processes.check_exits()
    written = effects.read()
    counts["doubled"] = len(written) - len({*written})
    counts["missing"] = len(finished.keys() - {*written})
    assert (counts["doubled"], counts["missing"]) == (0, 0)
    assert {*written} == finished.keys()
    assert counts["acknowledged"] + counts["perhaps"] >= messages
    assert storm.strikes["kill"] > 0
    proof.record(
        "queue effects",
        kind=kind,
        seed=seed,
        seconds=round(now() - begun),
        **storm.strikes,
        **counts,
    )


class EffectTable:
    """The table `effects` in the database of a queue."""

    def __init__(self, url: str) -> None:
        self._url = url

    def create(self) -> None:
        """Create it. A message that is handled twice could be in it twice."""
        self._run("CREATE TABLE effects (id text)")

    def count(self) -> int:
        """Count the rows."""
        return int(self._run("SELECT count(*) FROM effects")[0][0])

    def read(self) -> list[str]:
        """Return the ids of the messages."""
        return [name for (name,) in self._run("SELECT id FROM effects")]

    def _run(self, statement: str) -> list[Any]:
        if self._url.startswith("sqlite"):
            with closing(sqlite3.connect(self._url.removeprefix("sqlite:///"), 60)) as file:
                return file.execute(statement).fetchall()
        for _ in range(100):
            # The server may be restarting.
            with (
                suppress(psycopg.OperationalError),
                psycopg.connect(self._url, autocommit=True) as connection,
            ):
                cursor = connection.execute(statement.encode())
                return cursor.fetchall() if cursor.description else []
            time.sleep(0.1)
        raise AssertionError("the server does not answer")


POISON = ("raise", "hang", "kill")
POISON_TIMING = {"heartbeat_interval": 0.5, "worker_timeout": 2, "visibility_timeout": 2}


async def test_poison_is_set_aside_and_nobody_else_loses_an_attempt(
    url: str, kind: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Messages that raise, hang or kill their process die by count; all others need one attempt."""
    if kind != "postgres" and not full_scale:
        pytest.skip("at full scale; the backend's part is in the conformance suite")
    settings = {"concurrency": 5, "max_attempts": 2, **POISON_TIMING}
    processes = QueueProcesses(url, tmp_path / "facts", **settings)
    async with processes, Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", max_attempts=2))
        for number, poison in enumerate(POISON):
            await queue.enqueue({"n": number, "by": "test", "kind": poison}, timeout=0.5)
            await queue.enqueue_many(
                [{"n": 100 + n, "by": "test", "kind": "plain"} for n in range(10)]
            )
        await processes.start(2, seconds=0.05)
        begun = now()
        # Finished ones alone: between two counts a message may go from one state to the other.
        while await queue.count("completed") + await queue.count("dead") < 30 + len(POISON):
            assert now() - begun < 120
            for worker in list(processes.workers):
                if not worker.is_alive and worker.killed_at is None:
                    # It has killed itself; a process manager would start it again.
                    worker.killed_at = now()
                    processes.add(seconds=0.05)
            await asyncio.sleep(0.05)
        dead = {each.value["kind"]: each for each in await queue.dead_letters()}
        assert {name: each.attempts for name, each in dead.items()} == dict.fromkeys(POISON, 2)
        assert await queue.count("completed") == 30
    plain = [fact for fact in processes.facts("begun") if fact["kind"] == "plain"]
    assert {fact["attempt"] for fact in plain} == {1}
    assert len([each for each in processes.workers if each.killed_at]) >= dead["kill"].attempts
    deaths = len(processes.workers) - 2
    proof.record("poison", kind=kind, seconds=round(now() - begun), deaths=deaths)


async def test_a_deployment_spends_no_attempt(url: str, tmp_path: Path) -> None:
    """SIGTERM, with handlers at work and messages prefetched: the next worker has all of them."""
    timing = {**TIMING, "grace": 0.2}
    processes = QueueProcesses(url, tmp_path / "facts", concurrency=3, prefetch=5, **timing)
    async with processes, Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        await queue.enqueue_many(
            [{"n": n, "by": "test", "kind": "plain"} for n in range(20)], max_attempts=1
        )
        (old,) = await processes.start(1, seconds=3600)
        await until(lambda: len(processes.facts("begun")) == 3, "three are at work")
        await processes.start(1, seconds=0)
        old.stop()
        assert await old.ended() == 0, old.log
        await processes.drained()
        assert await queue.count("completed") == 20
    assert {fact["attempt"] for fact in processes.facts("begun")} == {1}
    assert len({fact["id"] for fact in processes.facts("ended")}) == 20


async def nth_start(processes: QueueProcesses, message: int, count: int) -> Fact:
    """Wait until a message was begun so often; return the last of these facts."""

    def starts() -> list[Fact]:
        return [fact for fact in processes.facts("begun") if fact["n"] == message]

    await until(lambda: len(starts()) >= count, f"message {message} begins {count} times")
    return starts()[count - 1]


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "unseen"])
async def test_a_killed_workers_message_starts_again_elsewhere(
    url: str, kind: str, is_seen: bool, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """With the defaults within 21 s: the timeout, a heartbeat and a second. On S3 within 45 s.

    A death is seen on the same machine. One in another namespace is not, as on another machine.
    """
    if (kind == "postgres" or not is_seen) and not full_scale:
        pytest.skip("at full scale; the storm kills workers there too")
    if not (is_seen or can_unshare()):
        pytest.skip("unshare --pid is not permitted here")
    timing = {} if full_scale else TIMING
    took = []
    for number in range(5 if full_scale else 1):
        fresh = f"{url}?schema=round_{number}" if kind == "postgres" else f"{url}{number}"
        # The first that joins leads: the leader's death and the other's are both tried.
        processes = QueueProcesses(fresh, tmp_path / str(number), **timing)
        async with processes, Database(fresh) as db:
            within = () if is_seen else OTHER_NAMESPACE
            workers = await processes.start(2, seconds=3600, within=within)
            queue = await db.use_plugin(QueuePlugin(resource="tasks"))
            await queue.enqueue({"n": number, "by": "test", "kind": "plain"})
            first = await nth_start(processes, number, 1)
            (victim,) = (worker for worker in workers if worker.name == first.who)
            killed = victim.kill()
            again = await nth_start(processes, number, 2)
            assert again.who != first.who
            took.append(again.at - killed)
            proof.tell(f"{kind}, {first.who} was killed: {took[-1]:.1f} s")
    if full_scale:
        assert max(took) <= (45 if kind == "s3" else 21), took
    figures = [round(each, 1) for each in took]
    proof.record("killed worker", kind=kind, is_seen=is_seen, seconds=figures)
