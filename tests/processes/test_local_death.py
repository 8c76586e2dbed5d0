"""Real processes that are killed, and others on the same machine that know it at once.

At small scale the timeouts are an hour: what happens within a test cannot be explained by them.
At full scale the defaults are used, and times are asserted. A process that stands still, or that
runs in another namespace, is dead by its timeout alone.
"""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from election_processes import CandidateProcess, ElectionProcesses
from job_processes import JobProcesses
from processes import OTHER_NAMESPACE, WorkerProcess, can_unshare
from psycopg import AsyncConnection
from queue_processes import QueueProcesses
from servers import Locate
from waiting import now, until
from worker_protocol import Fact

from jobsync import Database, QueuePlugin, open_store
from jobsync.coordination.session import SESSIONS
from jobsync.core.trust import Timing
from jobsync.processes import SystemProcesses
from jobsync.queue.opening import open_backend
from jobsync.queue.sql.postgres import PostgresBackend

HOUR = 3600.0
PROMISED = 2.0
"""Seconds from a kill to the next start, on the same machine."""
BUSY = 4
"""How many messages a worker has in hand."""
TIMING = Timing(heartbeat=0.5, timeout=4)
"""For deaths that only the timeout tells."""

pytestmark = pytest.mark.skipif(
    SystemProcesses().identify() is None, reason="only Linux tells enough about processes"
)


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of database."""
    return str(request.param)


def summarise(seconds: list[float]) -> dict[str, Any]:
    """Return the figures of a run."""
    return {
        "times": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
        "worst_s": round(max(seconds), 2),
    }


def read_state(worker: WorkerProcess) -> str:
    """Return the letter of the state of a process; empty if there is none."""
    try:
        text = Path(f"/proc/{worker.process.pid}/stat").read_text()
    except FileNotFoundError:
        return ""
    return text.rpartition(")")[2].split()[0]


# Messages


async def push(url: str, messages: range) -> None:
    """Push messages, and leave: this process must not be the one that notices a death."""
    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        await queue.enqueue_many([{"n": n, "by": "test", "kind": "plain"} for n in messages])


async def nth_starts(processes: QueueProcesses, messages: range, count: int) -> list[Fact]:
    """Wait until each message was begun so often; return the last of these facts of each."""

    def starts(message: int) -> list[Fact]:
        return [fact for fact in processes.facts("begun") if fact["n"] == message]

    def has_begun() -> bool:
        return all(len(starts(message)) >= count for message in messages)

    await until(has_begun, f"messages {messages} begin {count} times")
    return [starts(message)[count - 1] for message in messages]


async def test_a_killed_workers_messages_are_started_again_at_once(
    kind: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """By one that is started after the kill, and by one that waits beside it.

    Every other time the parent of the killed process does not wait for it, so that a zombie stays.
    """
    settings: dict[str, Any] = {}
    if not full_scale:
        settings = {"worker_timeout": HOUR, "visibility_timeout": HOUR}
    took: dict[str, list[float]] = {"restarted": [], "beside": []}
    url = locate(kind)
    processes = QueueProcesses(url, tmp_path / "facts", concurrency=BUSY, **settings)
    async with processes:
        for number in range(100 if full_scale else 2):
            heir = "beside" if number % 2 else "restarted"
            messages = range(number * BUSY, (number + 1) * BUSY)
            (victim,) = await processes.start(1, seconds=HOUR)
            await push(url, messages)
            first = await nth_starts(processes, messages, 1)
            assert {fact.who for fact in first} == {victim.name}
            workers = await processes.start(1) if heir == "beside" else []
            killed = victim.kill()
            if number % 4 < 2:
                victim.process.wait()
            workers = workers or [processes.add()]
            again = await nth_starts(processes, messages, 2)
            took[heir] += [fact.at - killed for fact in again]
            # A zombie until somebody asks for its status.
            assert read_state(victim) == ("" if number % 4 < 2 else "Z")
            await processes.drained()
            await processes.reported("joined", workers)
            workers[0].stop()
            assert await workers[0].ended() == 0, workers[0].log
            proof.tell(f"{kind}, {heir}: {max(took[heir][-BUSY:]):.2f} s after the kill")
        processes.check_exits()
    for heir, seconds in took.items():
        proof.record("messages of a killed worker", url=kind, heir=heir, **summarise(seconds))
        assert not full_scale or max(seconds) <= PROMISED, (heir, sorted(seconds)[-10:])


@pytest.mark.parametrize("heir", ["beside", "restarted"])
async def test_messages_do_not_wait_for_a_beat_if_a_stranger_records_the_death(
    heir: str, locate: Locate, tmp_path: Path
) -> None:
    """The leader of other work declares the worker dead, and knows nothing of its queue."""
    url = locate("sqlite")
    rare = {"heartbeat_interval": HOUR / 4, "worker_timeout": HOUR, "visibility_timeout": HOUR}
    processes = QueueProcesses(url, tmp_path / "queue", concurrency=BUSY, **rare)
    election = ElectionProcesses(url, tmp_path / "other", Timing(heartbeat=1, timeout=HOUR), ["a"])
    async with processes, election:
        (stranger,) = await elect(election, [])
        (victim,) = await processes.start(1, seconds=HOUR)
        joined = now()
        await push(url, range(BUSY))
        await nth_starts(processes, range(BUSY), 1)
        await until(lambda: stranger.count_heartbeats(joined, now()) > 1, "it has seen the victim")
        if heir == "beside":
            await processes.start(1)
        victim.kill()
        if heir == "restarted":
            await until(lambda: stranger.facts("coord:worker-died"), "it has recorded the death")
            processes.add()
        await nth_starts(processes, range(BUSY), 2)
        processes.check_exits()


async def claim_within(connection: AsyncConnection[Any], url: str, worker: str) -> str:
    """Push and claim messages for a worker in an open transaction; return its session's key."""
    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))
        keys = [record.key for record in await db.store.scan(SESSIONS, limit=10)]
        (session,) = (key for key in keys if key.startswith(f"{SESSIONS}{worker}."))
        messages = [{"n": n, "by": "test", "kind": "plain"} for n in range(BUSY)]
        await queue.enqueue_many(messages, connection=connection)
        backend = open_backend(db.store, queue.queue, db.components)
        assert isinstance(backend, PostgresBackend)
        claim = {
            "queue": queue.queue,
            "claim": "late",
            "session": session.removeprefix(SESSIONS),
            "visibility": HOUR,
            "limit": BUSY,
            "suspects": False,
            "floor": 0,
            "since": None,
            "tasks": None,
            "max_bytes": 2**20,
        }
        claimed = await (await connection.execute(backend._sql["claim"], claim)).fetchall()
        assert len(claimed) == BUSY
    return session


@pytest.mark.parametrize("beats", [0, 3])
async def test_a_claim_that_commits_after_the_death_is_found_without_a_timeout(
    beats: int, locate: Locate, tmp_path: Path, full_scale: bool
) -> None:
    """The server had the killed client's statement, and finishes it when the death is written."""
    if beats and not full_scale:
        pytest.skip("at full scale")
    url, beat = locate("postgres"), 1.0
    rare = {"heartbeat_interval": beat, "worker_timeout": HOUR, "visibility_timeout": HOUR}
    processes = QueueProcesses(url, tmp_path, concurrency=BUSY, **rare)
    own = await AsyncConnection.connect(url.partition("?")[0])
    async with processes, own:
        (victim,) = await processes.start(1)
        await processes.start(1)
        session = await claim_within(own, url, victim.last("joined")["worker"])
        victim.kill()
        store = await open_store(url)

        async def is_dead() -> bool:
            record = await store.get(session)
            return record is not None and record.value["state"] == "dead"

        await until(is_dead, "the death is written")
        await store.close()
        # Later than anybody looks for it on purpose.
        await asyncio.sleep(beats * beat)
        await own.commit()
        await nth_starts(processes, range(BUSY), 1)


# Tasks


async def restart_node(nodes: JobProcesses, *, reap: bool) -> tuple[float, float]:
    """Kill a node that does a task, and start one of its name.

    Returns the seconds from the kill until the new one has entered, and has started the task.
    """
    (victim,) = await nodes.start(1, node="worker", seconds=HOUR)
    await until(lambda: nodes.facts("begun"), "a task runs")
    killed = victim.kill()
    if reap:
        victim.process.wait()
    (heir,) = await nodes.start(1, node="worker", seconds=0.0)
    assert await heir.ended() == 0, heir.log
    (running,) = victim.facts("begun")
    begun = {fact["task"]: fact.at for fact in heir.facts("begun")}
    assert sorted(begun) == nodes.tasks
    assert nodes.find_failures() == []
    return heir.last("ready").at - killed, begun[running["task"]] - killed


async def test_a_killed_node_is_followed_at_once_by_one_of_its_name(
    kind: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Its successor enters, and starts the task that was running; others it does too."""
    settings = {} if full_scale else {"heartbeat_timeout_sec": HOUR}
    took = []
    for number in range(100 if full_scale else 1):
        folder = tmp_path / str(number)
        async with JobProcesses(locate(kind), folder, "tasks", tasks=3, settings=settings) as nodes:
            took.append(await restart_node(nodes, reap=number % 2 == 0))
        proof.tell(f"{kind}: entered {took[-1][0]:.2f} s, started {took[-1][1]:.2f} s after a kill")
    entered, started = map(list, zip(*took, strict=True))
    proof.record("a killed node enters again", url=kind, **summarise(entered))
    proof.record("tasks of a killed node", url=kind, **summarise(started))
    assert not full_scale or max(started) <= PROMISED, sorted(started)[-10:]


async def test_a_killed_nodes_task_waits_as_long_as_its_users_say(
    locate: Locate, tmp_path: Path
) -> None:
    """What it has started may outlive its process, which was seen to have ended."""
    delay = 2.5
    settings = {"heartbeat_timeout_sec": HOUR, "reclaim_after": delay}
    async with JobProcesses(
        locate("sqlite"), tmp_path, "tasks", tasks=3, settings=settings
    ) as nodes:
        _, started = await restart_node(nodes, reap=True)
    assert started >= delay


# Leaders


async def elect(election: ElectionProcesses, *within: Sequence[str]) -> list[CandidateProcess]:
    """Start a candidate within each command; the first leads. Return them all."""
    candidates = []
    for command in within:
        candidates += await election.release([election.prepare(within=command)])
        await election.reported("joined", candidates)
        assert await election.leaders() == dict.fromkeys(election.roles, candidates[0])
    return candidates


async def kill_leader(election: ElectionProcesses) -> float:
    """Kill a leader; return the seconds until its follower leads."""
    leader, follower = await elect(election, [], [])
    killed = leader.kill()
    await until(lambda: len(election.promotions("one")) == 2, "another leads")
    promoted = election.promotions("one")[-1]
    assert promoted["worker_id"] == follower.worker_id
    (death,) = follower.facts("coord:worker-died")
    assert death["worker_id"] == leader.worker_id
    assert election.find_silent_failures() == []
    return promoted.at - killed


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "s3"])
async def test_a_killed_leader_is_followed_at_once(
    kind: str, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Its follower declares it dead and leads: within seconds, or a heartbeat on objects."""
    if kind == "postgres" and not full_scale:
        pytest.skip("at full scale; leaders of its queues and jobs are killed there too")
    beat = (30.0 if full_scale else 4.0) if kind == "s3" else 5.0
    timing = Timing(heartbeat=beat, timeout=3 * beat if full_scale else HOUR)
    took = []
    for number in range(10 if full_scale else 1):
        folder = tmp_path / str(number)
        async with ElectionProcesses(locate(kind), folder, timing, ["one"]) as election:
            took.append(await kill_leader(election))
        proof.tell(f"{kind}: {took[-1]:.2f} s after the kill")
    proof.record("killed leader on the same machine", url=kind, **summarise(took))
    limit = beat if kind == "s3" else PROMISED
    assert not full_scale or max(took) <= limit, sorted(took)


# By the timeout alone


async def check_timeout_alone(
    election: ElectionProcesses, victim: CandidateProcess, strike: Callable[[], float]
) -> float:
    """Strike a worker; check that it is dead no earlier than its timeout. Return the seconds."""
    begun = now()
    await until(lambda: victim.count_heartbeats(begun, now()) > 0, f"{victim} has a heartbeat")
    assert election.facts("coord:worker-died") == []
    struck = strike()
    await until(lambda: election.facts("coord:worker-died"), f"{victim} is declared dead")
    death = election.facts("coord:worker-died")[0]
    assert death["worker_id"] == victim.worker_id
    beats = [
        beat.at
        for beat in victim.facts("coord:worker-heartbeat")
        if beat["worker_id"] == victim.worker_id and beat.at < death.at
    ]
    # A heartbeat is reported a moment after the others can see it.
    assert death.at - beats[-1] >= TIMING.timeout - TIMING.heartbeat / 2
    return death.at - struck


async def freeze_one(election: ElectionProcesses, number: int) -> float:
    """Freeze the leader or its follower beyond the timeout; return the seconds until its death."""
    pair = await elect(election, [], [])
    victim = pair[number]
    took = await check_timeout_alone(election, victim, victim.freeze)
    thawed = victim.thaw()
    await until(lambda: victim.count_heartbeats(thawed, now()) > 0, "it is back in a new session")
    assert election.find_silent_failures() == []
    return took


async def test_a_process_that_stands_still_is_dead_by_its_timeout_alone(
    locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Leaders and followers that are frozen for longer than their timeout, and go on then."""
    took = []
    for number in range(20 if full_scale else 1):
        url = locate("postgres" if number % 2 else "sqlite")
        async with ElectionProcesses(url, tmp_path / str(number), TIMING, ["one"]) as election:
            took.append(await freeze_one(election, number // 2 % 2))
        proof.tell(f"frozen: dead {took[-1]:.2f} s later")
    proof.record("frozen process", timeout=TIMING.timeout, **summarise(took))


async def kill_elsewhere(
    election: ElectionProcesses, victim: Sequence[str], other: Sequence[str], *, is_leader: bool
) -> float:
    """Kill one of two processes that share no namespace; return the seconds until its death."""
    pair = await elect(election, *((victim, other) if is_leader else (other, victim)))
    begun = now()

    def is_well() -> bool:
        return all(each.count_heartbeats(begun, now()) >= 3 for each in pair)

    await until(is_well, "each has seen the other one for a while")
    target = pair[0 if is_leader else 1]
    took = await check_timeout_alone(election, target, target.kill)
    assert election.find_silent_failures() == []
    return took


@pytest.mark.parametrize("mounts", [True, False], ids=["own /proc", "/proc of the parent"])
async def test_a_death_in_another_namespace_is_known_by_the_timeout_alone(
    mounts: bool, locate: Locate, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Each process in a namespace of its own has the number 1, as another process has here."""
    if not can_unshare():
        pytest.skip("unshare --pid is not permitted here")
    if not mounts and not full_scale:
        pytest.skip("at full scale; tests/unit/test_processes.py has a /proc of others")
    inside = OTHER_NAMESPACE if mounts else OTHER_NAMESPACE[:-1]
    cases = list(itertools.product([(inside, inside), (inside, []), ([], inside)], [True, False]))
    took = []
    for number, ((victim, other), is_leader) in enumerate(cases if full_scale else cases[:1]):
        folder = tmp_path / str(number)
        async with ElectionProcesses(locate("sqlite"), folder, TIMING, ["one"]) as election:
            took.append(await kill_elsewhere(election, victim, other, is_leader=is_leader))
        proof.tell(f"killed in another namespace: dead {took[-1]:.2f} s later")
    proof.record("killed across namespaces", own_proc=mounts, **summarise(took))
