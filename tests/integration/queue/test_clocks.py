"""Delays on SQLite when the wall clock is set, and when the machine is rebooted."""

import itertools
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from chance import FakeClock, SeededRandomness

from jobsync import Components
from jobsync.events import Events
from jobsync.queue.backend import Message, NewMessage, QueueBackend, Settlement
from jobsync.queue.opening import open_backend
from jobsync.queue.sql import sqlite
from jobsync.queue.sql.sqlite_places import SQL
from jobsync.stores.sqlite.store import SqliteStore

Start = Callable[[], Awaitable[QueueBackend]]
HOUR, DAY = 3_600.0, 86_400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the queue."""
    return tmp_path / "jobs.db"


@pytest.fixture
async def start(path: Path, clock: FakeClock) -> AsyncIterator["Start"]:
    """Start another process on this machine."""
    seeds = itertools.count()
    async with AsyncExitStack() as stack:

        async def open_queue() -> QueueBackend:
            randomness = SeededRandomness(next(seeds))
            components = Components(clock=clock, randomness=randomness, events=Events())
            store = await SqliteStore.connect(path, components)
            stack.push_async_callback(store.close)
            return open_backend(store, "tasks", components)

        yield open_queue


async def push(backend: QueueBackend, *names: str, delay: float = 0.0, **options: Any) -> None:
    """Push messages."""
    await backend.push(
        [NewMessage(id=name, value={}, max_attempts=4, delay=delay, **options) for name in names]
    )


async def claim(backend: QueueBackend) -> list[Message]:
    """Claim all messages that are due."""
    return (await backend.claim(100, session="me", visibility=10 * DAY)).messages


async def retry(backend: QueueBackend, delay: float) -> None:
    """Fail the only message, to be tried again after a delay."""
    (message,) = await claim(backend)
    retry = Settlement(receipt=message.receipt, move="retry", delay=delay, error="boom")
    assert await backend.settle([retry]) == [True]


async def find_wait(backend: QueueBackend, clock: FakeClock) -> float:
    """Wait as long as claims say, until there is a message; return how long that was."""
    start = clock.mono_seconds
    while True:
        claimed = await backend.claim(100, session="me", visibility=10 * DAY)
        if claimed.messages:
            return clock.mono_seconds - start
        assert claimed.due is not None
        await clock.sleep(max(0.1, claimed.due))


def reboot(clock: FakeClock, *, step: float = 0.0) -> None:
    """Start the machine again after ten seconds, with a wall clock that is wrong by a step."""
    clock.boot_id += 1
    clock.mono_seconds = 5.0
    clock.wall_seconds += 10.0 + step


@pytest.mark.parametrize("step", [-DAY, -HOUR, -1.0, 0.0, 1.0, HOUR, DAY])
@pytest.mark.parametrize("delay", [0.5, 60.0])
async def test_setting_the_wall_clock_changes_no_delay(
    start: "Start", clock: FakeClock, step: float, delay: float
) -> None:
    """Neither of a retry nor of a new message, in this process or another."""
    one, other = await start(), await start()
    await push(one, "a")
    await retry(one, delay)
    await push(one, "b", delay=delay)
    clock.wall_seconds += step
    assert await claim(other) == []
    (waiting, _) = await other.browse("waiting")
    assert waiting.due == pytest.approx(clock.wall_seconds + delay, rel=0, abs=0.01)
    assert await find_wait(other, clock) == pytest.approx(delay, abs=0.11)
    assert await other.count() == {"claimed": 2}


@pytest.mark.parametrize("age", [None, 0.0, DAY])
@pytest.mark.parametrize(
    ("step", "expected"), [(0.0, 50.0), (-20.0, 60.0), (-DAY, 60.0), (30.0, 20.0), (DAY, 0.0)]
)
async def test_after_a_reboot_the_wall_clock_decides_within_the_delay(
    start: "Start", clock: FakeClock, step: float, expected: float, age: float | None
) -> None:
    """It is the only clock that survives. A delay of 60 s never becomes longer.

    Whether it is that of a new message, or of one that is retried at some age.
    """
    before = await start()
    await push(before, "a", delay=60.0 if age is None else 0.0)
    if age is not None:
        await clock.sleep(age)
        await retry(before, 60.0)
    reboot(clock, step=step)
    after = await start()
    assert await find_wait(after, clock) == pytest.approx(expected, abs=0.11)


@pytest.mark.parametrize("boot_id", [1, 999])
@pytest.mark.parametrize("tasks", [(), ("a",), ("", "a")], ids=str)
async def test_after_a_reboot_delays_of_all_messages_go_on(
    start: "Start", clock: FakeClock, tasks: tuple[str, ...], boot_id: int
) -> None:
    """Those of tasks, too. The id of a boot is a random number: it says nothing of the order."""
    clock.boot_id = 500
    before = await start()
    for task in tasks or ("",):
        await push(before, f"of {task}", delay=60.0, task=task)
    reboot(clock)
    clock.boot_id = boot_id
    after = await start()
    wanted: dict[str, Any] = {"session": "me", "visibility": DAY, "tasks": tasks or None}
    for seconds, count in ((49.0, 0), (2.0, len(tasks or ("",)))):
        await clock.sleep(seconds)
        # The second time nothing was found before: it only looks.
        found = [await after.claim(100, **wanted) for _ in range(2)]
        assert sum(len(claimed.messages) for claimed in found) == count


async def fail_after_an_hour(backend: QueueBackend, clock: FakeClock) -> None:
    """A handler takes an hour, and its message is tried again after a minute."""
    await push(backend, "a")
    (message,) = await claim(backend)
    await clock.sleep(HOUR)
    retry = Settlement(receipt=message.receipt, move="retry", delay=60.0, error="boom")
    assert await backend.settle([retry]) == [True]


async def replace_after_an_hour(backend: QueueBackend, clock: FakeClock) -> None:
    """A message that waits is replaced by one that waits for a minute."""
    await push(backend, "a", delay=DAY, key="k")
    await clock.sleep(HOUR)
    await push(backend, "b", delay=60.0, key="k", replace=True)


async def redrive_after_an_hour(backend: QueueBackend, clock: FakeClock) -> None:
    """A dead letter is put back, and waits for nothing."""
    await push(backend, "a")
    (message,) = await claim(backend)
    bury = Settlement(receipt=message.receipt, move="bury", error="boom")
    assert await backend.settle([bury]) == [True]
    await clock.sleep(HOUR)
    assert await backend.redrive() == 1


async def hurry_after_an_hour(backend: QueueBackend, clock: FakeClock) -> None:
    """The delay of a message is ended."""
    await push(backend, "a", delay=DAY)
    await clock.sleep(HOUR)
    assert await backend.run_now("a")


@pytest.mark.parametrize(
    ("begin", "delay"),
    [
        (fail_after_an_hour, 60.0),
        (replace_after_an_hour, 60.0),
        (redrive_after_an_hour, 0.0),
        (hurry_after_an_hour, 0.0),
    ],
)
async def test_after_a_reboot_no_delay_is_longer_than_it_was_requested(
    start: "Start",
    clock: FakeClock,
    begin: Callable[[QueueBackend, FakeClock], Awaitable[None]],
    delay: float,
) -> None:
    """However old the message is, and whatever has happened to it. The clock is far behind.

    Found: it could wait as long as it was old.
    """
    await begin(await start(), clock)
    reboot(clock, step=-DAY)
    assert await find_wait(await start(), clock) == pytest.approx(delay, abs=0.11)


@pytest.mark.parametrize("step", [-DAY, 0.0])
@pytest.mark.parametrize("mono_seconds", [5.0, 2 * DAY])
async def test_after_a_reboot_a_delay_is_ended_from_outside(
    start: "Start", clock: FakeClock, step: float, mono_seconds: float
) -> None:
    """Nobody has claimed since, so it counts from the boot before; it need not be the longer."""
    await push(await start(), "a", delay=DAY)
    reboot(clock, step=step)
    clock.mono_seconds = mono_seconds
    after = await start()
    assert await after.run_now("a")
    assert [message.id for message in await claim(after)] == ["a"]


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_after_a_reboot_the_next_of_a_group_waits_no_longer_than_requested(
    start: "Start", clock: FakeClock, delay: float
) -> None:
    """Found: it waited until the wall clock, which is far behind, said the time of before."""
    before = await start()
    await push(before, "a", group="g")
    await push(before, "b", group="g", delay=delay)
    await clock.sleep(HOUR)
    reboot(clock, step=-DAY)
    after = await start()
    (head,) = await claim(after)
    assert await after.settle([Settlement(receipt=head.receipt, move="complete")]) == [True]
    assert await find_wait(after, clock) == pytest.approx(delay, abs=0.11)


@pytest.mark.parametrize("step", [-DAY, 0.0, DAY])
@pytest.mark.parametrize("is_newer_there", [False, True])
async def test_after_a_reboot_all_claims_have_lapsed(
    start: "Start", clock: FakeClock, step: float, *, is_newer_there: bool
) -> None:
    """Whatever the clocks say: no process of the earlier boot is left.

    A claim that was made since, which lapses earlier by its time, hides none of them.
    """
    before = await start()
    await push(before, "a")
    await clock.sleep(HOUR)
    assert len(await claim(before)) == 1
    reboot(clock, step=step)
    after = await start()
    if is_newer_there:
        await push(after, "b")
        assert len(await claim(await start())) == 1
    for _ in range(2):
        claimed = await after.claim(100, session="other", visibility=10 * DAY)
        assert claimed.lapse is not None
        assert claimed.lapse <= 0
    assert [ended.id for ended in await after.end_claims()] == ["a"]
    left = await after.claim(100, session="other", visibility=10 * DAY)
    assert left.lapse == (10 * DAY if is_newer_there else None)


@pytest.mark.parametrize("step", [-HOUR, -100.0, 0.0, 100.0, HOUR])
async def test_completed_messages_of_one_claim_are_kept_by_their_own_times(
    start: "Start", clock: FakeClock, step: float
) -> None:
    """Also if the wall clock was set between them: none is removed because another one is old."""
    backend = await start()
    await push(backend, "a", "b")
    ended = {}
    for message in await claim(backend):
        done = Settlement(receipt=message.receipt, move="complete")
        assert await backend.settle([done]) == [True]
        ended[message.id] = clock.wall_seconds
        clock.wall_seconds += step
    first, last = min(ended.values()), max(ended.values())
    clock.wall_seconds = first + 60.5
    old = {name for name, at in ended.items() if at == first}
    assert await backend.forget("completed", older_than=60) <= len(old)
    left = {each.id for each in await backend.browse("completed")}
    assert left >= ended.keys() - old
    clock.wall_seconds = last + 60.5
    assert await backend.forget("completed", older_than=60) == len(left)
    assert await backend.browse("completed") == []


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_after_a_reboot_a_renewal_keeps_only_the_messages_that_it_names(
    start: "Start", clock: FakeClock, count: int
) -> None:
    """The others of the same claim have lapsed, however long it was to hold before the reboot."""
    before = await start()
    await push(before, "a", "b", "c")
    messages = await claim(before)
    reboot(clock)
    after = await start()
    kept = messages[:count]
    assert await after.extend([each.receipt for each in kept], HOUR) == [True] * count
    ended = [each.id for each in await after.end_claims()]
    assert ended == [each.id for each in messages[count:]]
    await clock.sleep(HOUR - 1)
    assert await after.end_claims() == []
    await clock.sleep(1)
    assert [each.id for each in await after.end_claims()] == [each.id for each in kept]


async def test_what_is_left_of_a_delay_is_computed_once(start: "Start", clock: FakeClock) -> None:
    """A wall clock that is corrected after the first look changes nothing any more."""
    await push(await start(), "a", delay=60.0)
    reboot(clock)
    after = await start()
    assert await claim(after) == []
    clock.wall_seconds += DAY
    assert await find_wait(await start(), clock) == pytest.approx(50.0, abs=0.11)


async def test_delays_of_older_code_are_honoured(
    start: "Start", clock: FakeClock, path: Path
) -> None:
    """It writes only the wall time, and may run beside this code."""
    backend = await start()
    await push(backend, "a", delay=60.0)
    await push(backend, "b")
    assert [message.id for message in await claim(backend)] == ["b"]
    due = clock.wall_seconds + 30.0
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE jobsync_message SET state = 'waiting', boot = 0, due = ?", [due])
        file.execute("UPDATE jobsync_message SET wakes = NULL WHERE id = 'a'")
    assert await claim(backend) == []
    assert await find_wait(backend, clock) == pytest.approx(30.0, abs=0.11)
    assert await backend.count() == {"claimed": 2}


async def test_a_system_without_an_id_of_its_boot_uses_the_wall_clock(
    start: "Start", clock: FakeClock
) -> None:
    """Its time since boot says nothing after a reboot."""
    clock.boot_id = 0
    backend = await start()
    await push(backend, "a", delay=60.0)
    (waiting,) = await backend.browse("waiting")
    assert waiting.due == clock.wall_seconds + 60.0
    clock.mono_seconds = 0.0
    clock.wall_seconds += 20.0
    assert await find_wait(await start(), clock) == pytest.approx(40.0, abs=0.11)


async def test_many_delays_of_an_earlier_boot_are_adopted_in_parts(
    start: "Start", clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No transaction becomes large; a claim tells that there is more to do."""
    await push(await start(), *(f"m{n}" for n in range(10)), delay=60.0)
    reboot(clock)
    monkeypatch.setattr(sqlite, "MAX_BATCH", 4)
    after = await start()
    waits = [(await after.claim(100, session="me", visibility=60)).due for _ in range(4)]
    assert waits[:2] == [0.0, 0.0]
    assert waits[2:] == [pytest.approx(50.0)] * 2
    await clock.sleep(51.0)
    assert len(await claim(after)) == 10


async def test_a_claim_reads_delays_by_an_index(path: Path, start: "Start") -> None:
    """However many messages wait."""
    await start()
    parameters = dict.fromkeys(("queue", "suspects", "limit", "now", "boot", "mono", "tasks"), 0)
    with closing(sqlite3.connect(path)) as file:
        for name in ("select_waiting", "outlook", "adopt"):
            plan = file.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", parameters).fetchall()
            steps = [row[-1] for row in plan if "jobsync_message" in row[-1]]
            assert steps
            assert not [step for step in steps if step.startswith("SCAN")], name
            delayed = [step for step in steps if "jobsync_message_delayed" in step]
            assert len(delayed) == {"select_waiting": 1, "outlook": 7, "adopt": 3}[name]
