"""The workers of a queue in one process: the one in the background, and those of `drain`."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chance import FakeClock

from jobsync.events import Event
from jobsync.queue import local_workers
from jobsync.queue.backend import QueueBackend
from jobsync.queue.local_workers import LocalWorkers
from jobsync.queue.worker import Worker
from jobsync.queue.worker_status import WorkerStatus

BACKEND = cast("QueueBackend", None)


class FakeWorker:
    """Runs until it is told to end, and then for as long as a test wants."""

    is_stuck = is_waiting_for_callbacks = is_paused = False
    silence = 0.0
    running = 0

    def __init__(self, *, quota: int | None, until_empty: bool) -> None:
        self.quota = quota
        self.until_empty = until_empty
        self.handled = 0
        self.user_code: list[str] = []
        self.calls: list[Any] = []
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.may_end = asyncio.Event()
        self._told = asyncio.Event()

    async def run(self) -> None:
        self.started.set()
        await self._told.wait()
        await self.may_end.wait()
        self.ended.set()

    def stop(self, within: float | None) -> None:
        self.calls.append(("stop", within))
        self._told.set()

    def finish(self) -> None:
        self.calls.append("finish")
        self._told.set()

    def wake(self) -> None:
        self.calls.append("wake")

    def look_for_late_claims(self) -> None:
        self.calls.append("look")

    async def confirm(self, name: str) -> None:
        self.calls.append(("confirm", name))


class Surroundings:
    """A plugin around its workers."""

    queue, worker_id = "default/tasks", "worker-1"

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.is_running = True
        self.time_left = 9.0
        self.workers: list[FakeWorker] = []
        self.built = asyncio.Event()
        self.published: list[WorkerStatus | None] = []
        self.events: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.local = LocalWorkers(
            cast("Any", self), 3, cast("Any", self.build), self.published.append
        )

    @property
    def database(self) -> Any:
        return SimpleNamespace(
            components=SimpleNamespace(clock=self.clock), time_left=self.time_left
        )

    def build(self, *, quota: int | None = None, until_empty: bool = False) -> Worker:
        worker = FakeWorker(quota=quota, until_empty=until_empty)
        self.workers.append(worker)
        self.built.set()
        return cast("Worker", worker)

    def run_in_background(self, work: Callable[[], Awaitable[None]], _: str) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(work())
        self.tasks.append(task)
        return task

    def emit(self, event: Event) -> None:
        self.events.append(event.name.rpartition("-")[2])

    async def start(self) -> FakeWorker:
        """Start the worker in the background."""
        self.local.start()
        await self.workers[-1].started.wait()
        return self.workers[-1]

    async def drain(
        self, max_messages: int | None = None, deadline: float | None = None
    ) -> tuple["asyncio.Task[int]", FakeWorker]:
        """Start to drain; return that, and its worker."""
        self.built.clear()
        draining = asyncio.ensure_future(
            self.local.drain(
                BACKEND, max_messages=max_messages, deadline=deadline, check=lambda: None
            )
        )
        self.tasks.append(draining)
        await self.built.wait()
        await self.workers[-1].started.wait()
        return draining, self.workers[-1]

    async def end(self) -> None:
        """End all that runs."""
        for worker in self.workers:
            worker.may_end.set()
        await self.local.stop()
        for worker in self.workers:
            worker.finish()
        await asyncio.gather(*self.tasks)


def finish(worker: FakeWorker, handled: int = 0) -> None:
    """End a worker, which has handled some messages."""
    worker.handled += handled
    worker.may_end.set()
    worker.finish()


@pytest.fixture
def within_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calls of `drain` those of handlers: the worker in the background runs on."""
    monkeypatch.setattr(local_workers, "find_calling_worker", lambda _: object())


@pytest.mark.usefixtures("within_a_handler")
async def test_a_stop_waits_for_every_worker() -> None:
    """For that of a drain as for the one in the background; each has the time that is left."""
    around = Surroundings()
    background = await around.start()
    draining, drained = await around.drain()
    stopping = asyncio.ensure_future(around.local.stop())
    background.may_end.set()
    await background.ended.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not stopping.done()
    drained.may_end.set()
    await stopping
    assert drained.ended.is_set()
    assert ("stop", 9.0) in drained.calls
    assert ("stop", 9.0) in background.calls
    assert await draining == 0


@pytest.mark.usefixtures("within_a_handler")
async def test_what_concerns_all_claims_reaches_every_worker() -> None:
    """A cancelled message may be in a drain, and a dead process may have any."""
    around = Surroundings()
    background = await around.start()
    _, drained = await around.drain()
    await around.local.confirm("id-1")
    around.local.look_for_late_claims()
    for worker in (drained, background):
        assert [call for call in worker.calls if call != "wake"] == [("confirm", "id-1"), "look"]
    await around.end()


async def test_a_drain_that_waits_is_stopped_although_another_one_has_begun() -> None:
    """It runs no handler at the moment, and claims the next message otherwise."""
    around = Surroundings()
    drains = [await around.drain() for _ in range(3)]
    around.local.prepare_stop()
    assert [worker.calls for _, worker in drains] == [[("stop", 9.0)]] * 3
    await around.end()


async def test_a_worker_is_forgotten_when_nothing_of_it_runs() -> None:
    """However many drains there are; one whose handlers run on is known until they end."""
    around = Surroundings()
    for number in range(3):
        draining, worker = await around.drain()
        worker.user_code = ["the handler of message id-1"] if number == 0 else []
        finish(worker, number)
        assert await draining == number
    assert around.local.user_code == ["the handler of message id-1"]
    around.workers[0].user_code = []
    _, last = await around.drain()
    assert {*map(id, around.local._all)} == {id(last)}
    assert around.local.user_code == []
    await around.end()


@pytest.mark.parametrize(("max_messages", "quota"), [(None, None), (10, 6), (4, 0)])
async def test_a_drain_counts_what_the_background_finishes_meanwhile(
    max_messages: int | None, quota: int | None
) -> None:
    """Not what it had handled before; then the background goes on, with a new worker."""
    around = Surroundings()
    background = await around.start()
    background.handled = 100
    finish(background, 4)
    background.handled = 100

    def stop(within: float | None) -> None:
        background.calls.append(("stop", within))
        background.handled += 4

    cast("Any", background).stop = stop
    draining, worker = await around.drain(max_messages)
    assert (worker.quota, worker.until_empty) == (quota, True)
    finish(worker, 3)
    assert await draining == 7
    assert len(around.workers) == 3
    assert around.events == ["started", "stopped", "started"]
    assert [status is None for status in around.published] == [False, True, False]
    await around.end()


@pytest.mark.parametrize(("deadline", "spent", "left"), [(5.0, 2.0, 3.0), (5.0, 0.0, 5.0)])
async def test_the_time_of_a_drain_counts_from_its_call(
    monkeypatch: pytest.MonkeyPatch, deadline: float, spent: float, left: float
) -> None:
    """Not only from when the worker in the background has stopped."""
    around = Surroundings()
    timers: list[float] = []
    loop = asyncio.get_running_loop()
    background = await around.start()

    def stop(_: float | None) -> None:
        around.clock.mono_seconds += spent
        finish(background)

    cast("Any", background).stop = stop
    timer = SimpleNamespace(cancel=lambda: timers.append(-1.0))

    def call_later(seconds: float, callback: Callable[[], None]) -> Any:
        timers.append(seconds)
        assert callback == around.workers[-1].finish
        return timer

    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_later", call_later)
        draining, worker = await around.drain(deadline=deadline)
        finish(worker)
        await draining
    assert timers == [pytest.approx(left), -1.0]
    await around.end()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
async def test_the_background_goes_on_after_the_last_of_several_drains(
    order: tuple[int, ...],
) -> None:
    """Whichever that is: until then it would run handlers beside theirs."""
    around = Surroundings()
    finish(await around.start())
    drains = [await around.drain() for _ in range(3)]
    for number in order:
        assert len(around.workers) == 4
        draining, worker = drains[number]
        finish(worker)
        await draining
    assert len(around.workers) == 5
    assert around.events == ["started", "stopped", "started"]
    # One that begins when the others have ended stops it again.
    finish(around.workers[-1])
    draining, worker = await around.drain()
    finish(worker)
    await draining
    assert around.events == ["started", "stopped"] * 2 + ["started"]
    await around.end()


@pytest.mark.parametrize("has_background", [True, False])
async def test_a_handler_that_is_added_during_a_drain_starts_nothing_beside_it(
    *, has_background: bool
) -> None:
    """The background starts after the drain, also if it did not run before."""
    around = Surroundings()
    if has_background:
        finish(await around.start())
    draining, worker = await around.drain()
    started = len(around.workers)
    around.local.start()
    assert len(around.workers) == started
    finish(worker)
    await draining
    assert len(around.workers) == started + 1
    assert around.events[-1] == "started"
    await around.end()


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_drain_starts_the_background_again_unless_the_queue_stops(
    *, is_running: bool
) -> None:
    """Also if the drain fails."""
    around = Surroundings()
    finish(await around.start())

    def refuse() -> None:
        around.is_running = is_running
        raise ValueError("it was stopped")

    with pytest.raises(ValueError, match="stopped"):
        await around.local.drain(BACKEND, max_messages=None, deadline=None, check=refuse)
    assert len(around.workers) == 1 + is_running
    await around.end()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"silence": 10.0}, ""),
        ({"silence": 10.1}, "the store has not answered its claims for 10 s"),
        ({"is_waiting_for_callbacks": True}, "too many callbacks of finished messages"),
    ],
)
async def test_a_worker_that_claims_nothing_says_why(changes: dict[str, Any], reason: str) -> None:
    """A silence that is shorter than the session's timeout is nothing special."""
    around = Surroundings()
    assert around.local.describe_wait(10.0) == ""
    worker = await around.start()
    for name, value in changes.items():
        setattr(worker, name, value)
    found = around.local.describe_wait(10.0)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    await around.end()


async def test_a_pause_holds_for_workers_that_start_later() -> None:
    """And is published each time, until it ends."""
    around = Surroundings()
    around.local.pause(is_paused=True)
    assert around.published == []
    worker = await around.start()
    paused = [worker.is_paused]
    around.local.pause(is_paused=False)
    assert [*paused, worker.is_paused] == [True, False]
    assert worker.calls.count("wake") == 2
    assert [status and status.is_paused for status in around.published] == [True, False]
    await around.end()


async def test_news_reach_the_worker_in_the_background() -> None:
    """Of messages that were pushed here, while there is one: no store has to tell it."""
    around = Surroundings()
    around.local.wake()
    worker = await around.start()
    before = worker.calls.count("wake")
    around.local.wake()
    assert worker.calls.count("wake") == before + 1
    await around.end()
    around.local.wake()
    assert worker.calls.count("wake") == before + 1
