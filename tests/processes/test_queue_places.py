"""Orders, groups, keys and limits hold among real processes that are killed and frozen."""

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import OTHER_NAMESPACE, can_unshare
from proxy import Proxy
from queue_processes import QueueProcesses, check_messages
from racing import Start, race
from waiting import now, until
from worker_protocol import Fact

from jobsync import Database, OutcomeUnknown, QueuePlugin, Unavailable

TIMING = {"heartbeat_interval": 1, "worker_timeout": 4, "visibility_timeout": 4, "grace": 2}
GROUPS = 8
TASKS = 4
PRODUCERS = 8
FAULTS = 3
"""How often each fault happens to requests with a key."""
_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    if request.param == "s3":
        return str(request.getfixturevalue("bucket_url"))
    name = f"places_{next(_numbers)}_{int(time.time())}"
    return str(request.getfixturevalue("postgres").create_database(name))


async def kill_some(processes: QueueProcesses, done: int, *, freezes: bool, **options: Any) -> None:
    """Kill or freeze a worker each second until so many messages were handled."""
    dice = random.Random(11)
    while len({fact["id"] for fact in processes.facts("ended")}) < done:
        joined = {fact.who for fact in processes.facts("joined")}
        victims = [each for each in processes.running if each.name in joined and each.is_alive]
        victims = [each for each in victims if each.name.startswith("handle")]
        if len(victims) > 1:
            victim = dice.choice(victims)
            if freezes and dice.random() < 0.5:
                victim.freeze()
                await asyncio.sleep(dice.uniform(0.5, 6))
                victim.thaw()
            else:
                victim.kill()
                processes.add(**options)
        await asyncio.sleep(1)


async def test_groups_are_never_overtaken(
    url: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Four workers, failing heads, kills and freezes: no message starts before an earlier one.

    Of each group, handlers start in the order in which its messages were pushed, and a message is
    only started again before the next one is.
    """
    messages = 5_000 if full_scale else 300
    async with QueueProcesses(url, tmp_path / "facts", concurrency=5, **TIMING) as processes:
        options: dict[str, Any] = {"seconds": 0.005 if full_scale else 0.02}
        await processes.start(4, **options)
        producers = [
            processes.add("push", messages=messages // 2, groups=GROUPS, flaky=25) for _ in range(2)
        ]
        await kill_some(processes, messages * 9 // 10, freezes=True, **options)
        await until(lambda: not any(each.is_alive for each in producers), "all is pushed", 600)
        await processes.drained(600)
        finished = await processes.read_messages("completed", "dead")
        counts = check_messages(processes, finished)
        begun = sorted(processes.facts("begun"), key=lambda fact: fact.at)
    inversions = count_inversions(begun)
    assert inversions == 0
    proof.record("groups in order", messages=messages, again=counts["again"], inversions=inversions)


def count_inversions(begun: list[Fact]) -> int:
    """Count the handlers that started after one of a later message of the same group."""
    last: dict[tuple[str, int], int] = defaultdict(int)
    inversions = 0
    for fact in begun:
        group = (fact["by"], fact["n"] % GROUPS)
        inversions += fact["n"] < last[group]
        last[group] = max(last[group], fact["n"])
    return inversions


async def test_one_worker_handles_messages_in_the_order_in_which_they_came(
    url: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Of one producer, one at a time: no inversion."""
    messages = 5_000 if full_scale else 500
    async with QueueProcesses(url, tmp_path / "facts", concurrency=1, **TIMING) as processes:
        await processes.start(1)
        producer = processes.add("push", messages=messages)
        await until(lambda: not producer.is_alive, "all is pushed", 600)
        await processes.drained(600)
        begun = [fact["n"] for fact in processes.facts("begun")]
    assert begun == sorted(begun)
    assert len(begun) == messages
    proof.record("one worker in order", messages=messages, inversions=0)


async def enqueue_key(url: str, key: str, number: int, start: Start) -> list[str]:
    """Enqueue one key from several tasks at once, again while that is in doubt; return the ids."""
    del number
    async with Database(url) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks"))

        async def enqueue(task: int) -> str:
            while True:
                try:
                    return await queue.enqueue({"n": task}, key=key)
                except (OutcomeUnknown, Unavailable):
                    await asyncio.sleep(0.05)

        start()
        return await asyncio.gather(*(enqueue(task) for task in range(TASKS)))


def _has(key: bytes, request: bytes) -> bool:
    return key in request


@contextmanager
def lose_what_has(keys: Sequence[str], url: str) -> Iterator[tuple[str, Proxy | None]]:
    """Lose some requests with each key, some of their replies, and hold one back. A file has none.

    Yields:
        The URL on which this happens, and what holds requests back.
    """
    if url.startswith("sqlite"):
        yield url, None
        return
    port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
    with Proxy("127.0.0.1", port) as proxy:
        for key in keys:
            faults = (proxy.drop_reply, proxy.hold_request, proxy.drop_request)
            for fault in faults * FAULTS:
                fault(when=partial(_has, key.encode()))
        yield url.replace(f":{port}/", f":{proxy.port}/"), proxy


@pytest.mark.parametrize("url", ["sqlite", "postgres", "s3"], indirect=True)
def test_one_key_makes_one_message(url: str, full_scale: bool, proof: Any) -> None:
    """However many processes enqueue it at once, all get the id of the same message.

    Replies are lost, and requests; one of each key arrives after everything else.
    """
    keys = [f"key-{number}." for number in range(20 if full_scale else 2)]
    names: set[str] = set()
    with lose_what_has(keys, url) as (proxied, proxy):
        for results in race(enqueue_key, [(proxied, key) for key in keys], print, PRODUCERS):
            ids = {name for result in results for name in result}
            assert len(ids) == 1
            names |= ids
        if proxy:
            assert proxy.faults > len(keys)
            proxy.release()
    assert len(names) == len(keys)

    async def count() -> int:
        async with Database(url) as db:
            queue = await db.use_plugin(QueuePlugin(resource="tasks"))
            return await queue.count()

    assert asyncio.run(count()) == len(keys)
    faults = proxy.faults if proxy else 0
    proof.record("one key", keys=len(keys), processes=PRODUCERS, faults=faults)


async def test_a_limit_holds_for_all_processes_while_some_are_killed(
    url: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """No more handlers run at once than the queue allows, and no slot is lost with its process."""
    messages, most = (2_000 if full_scale else 120), 3
    settings = {**TIMING, "concurrency": 5, "max_concurrency": most}
    async with QueueProcesses(url, tmp_path / "facts", **settings) as processes:
        options: dict[str, Any] = {"seconds": 0.05}
        await processes.start(4, **options)
        producer = processes.add("push", messages=messages)
        await kill_some(processes, messages // 2, freezes=False, **options)
        await until(lambda: not producer.is_alive, "all is pushed", 600)
        await processes.drained(600)
        finished = await processes.read_messages("completed", "dead")
        check_messages(processes, finished)
        highest = max(count_running(processes))
    assert 1 < highest <= most
    proof.record("limited handlers", messages=messages, most=most, seen=highest)


async def test_limits_are_back_after_all_that_held_them_were_killed(
    url: str, tmp_path: Path, full_scale: bool, proof: Any
) -> None:
    """Slots and the rate go to other processes in time, and are never exceeded.

    Nothing on this machine sees the death: the timeout has to pass.
    """
    messages, most, rate = (200 if full_scale else 50), 3, 20
    settings: dict[str, Any] = {**TIMING, "concurrency": 5, "max_concurrency": most}
    settings |= {"rate_limit": f"{rate}/second", "rate_burst": most}
    async with QueueProcesses(url, tmp_path / "facts", **settings) as processes:
        within = OTHER_NAMESPACE if can_unshare() else ()
        holders = await processes.start(2, seconds=3600, within=within)
        pushed = now()
        producer = processes.add("push", messages=messages)
        await until(lambda: len(processes.facts("begun")) == most, "all slots are in use")
        others = await processes.start(2, seconds=0.05)
        await until(lambda: not producer.is_alive, "all is pushed")
        assert len(processes.facts("begun")) == most
        killed = max(holder.kill() for holder in holders)
        await processes.drained()
        check_messages(processes, await processes.read_messages("completed", "dead"))
        highest = max(count_running(processes))
    names = {each.name for each in others}
    begun = sorted(fact.at for fact in processes.facts("begun"))
    assert highest == most
    assert all(n <= most + rate * (at - pushed) for n, at in enumerate(begun, 1))
    if full_scale:
        # As many as the rate allows in half a second, and more than those of the first moment.
        later = sorted(fact.at for fact in processes.facts("begun") if fact.who in names)
        pairs = zip(later, later[rate // 2 :], strict=False)
        back = next(start for start, end in pairs if end - start < 1)
        assert back - killed <= TIMING["worker_timeout"] + 2 * TIMING["heartbeat_interval"]
        proof.record("limits after deaths", most=most, rate=rate, seconds=round(back - killed, 1))


def count_running(processes: QueueProcesses) -> Iterator[int]:
    """Yield how many handlers run, each time that one starts."""
    # What ends with a process is free from then on, before we know that the signal was sent.
    killed = {each.name: each.kill_began_at for each in processes.workers}
    ends = {(fact.who, fact["id"], fact["epoch"]): fact.at for fact in processes.facts("ended")}
    changes: Counter[tuple[float, int]] = Counter()
    for fact in processes.facts("begun"):
        changes[fact.at, 1] += 1
        end = ends.get((fact.who, fact["id"], fact["epoch"])) or killed[fact.who]
        if end is not None:
            changes[end, 0] += 1
    running = 0
    # What has ended is counted before what begins at the same time.
    for (_, is_begin), number in sorted(changes.items()):
        running += number if is_begin else -number
        yield running
