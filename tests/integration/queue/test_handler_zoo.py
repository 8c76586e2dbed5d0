"""Handlers of every kind, in every situation: what becomes of their messages and their slots."""

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from handlers import COROUTINES, FUNCTIONS, GENERATORS, SHAPES, HandlerCase, Scene, Situation
from servers import Locate
from waiting import until

from jobsync import Context, Database, Document, Event, Invalid, QueuePlugin
from jobsync.queue import handler_slots, shutdown, worker
from jobsync.queue.in_flight import InFlight
from jobsync.queue.opening import open_backend
from jobsync.queue.reaper import Quarantine

CASES = {"coroutines": COROUTINES, "functions": FUNCTIONS, "shapes": SHAPES}
OUTCOMES = {
    "plg:queue:message-completed": "completed",
    "plg:queue:message-retry": "failed",
    "plg:queue:message-dead": "dead",
    "plg:queue:message-cancelled": "cancelled",
    "plg:queue:message-returned": "returned",
    "plg:queue:message-lost": "lost",
}
FINAL = {"completed", "cancelled", "dead"}
OPTIONS: dict[str, Any] = {"backoff": lambda _: 0.0, "poll_interval": 0.2}
TIMEOUT = 0.15
PATIENCE = 60.0
"""Seconds after which a message has waited in vain."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, locate: Locate) -> str:
    """A fresh store on each database."""
    return locate(request.param)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less long for handlers that never end, and longer for those that end soon."""
    monkeypatch.setattr(handler_slots, "_CANCEL_TIME", 2.0)
    for module in (shutdown, worker):
        monkeypatch.setattr(module, "LAST_MOMENTS", 4.0)


@pytest.fixture
async def go_on() -> AsyncIterator[threading.Event]:
    """Set before the event loop is closed, which would wait for handlers for ever."""
    event = threading.Event()
    yield event
    event.set()


class Show:
    """One handler in one situation.

    Args:
        case: the handler and its outcomes.
        situation: in which it is shown.
        database: of its queue.
        number: of its resource.
    """

    def __init__(
        self, case: HandlerCase, situation: Situation, database: Database, number: int
    ) -> None:
        self._case = case
        self._situation = situation
        self._database = database
        self._expected = case.expect(situation)
        self._concurrency = {"alone": 1, "company": 3, "stop": 1}.get(situation, 2)
        # Handlers that wait for others may wait in vain once one of them stops the queue.
        grace = 0.2 if situation == "stop" else 1.0 if case.stops else 60.0
        # Only there a claim is left to lapse.
        visibility = 3.0 if situation in {"stop", "loss"} else 60.0
        self._queue = QueuePlugin(
            resource=f"r{number}",
            concurrency=self._concurrency,
            grace=grace,
            visibility_timeout=visibility,
            **OPTIONS,
        )
        self._scene = Scene(situation, self._queue, database)
        self._id = ""
        self._seen: list[tuple[str, int]] = []
        self._next_id = ""
        self._seen_of_next: list[tuple[str, int]] = []
        self._is_left_behind = False

    async def run(self) -> str:
        """Return the outcome."""
        try:
            return await self._run()
        finally:
            self._scene.is_over = True

    async def _run(self) -> str:
        queue, case, scene = self._queue, self._case, self._scene
        queue.on("*", self._note)
        await self._database.use_plugin(queue)
        messages: list[dict[str, Any]] = [{"n": 1}]
        if self._situation == "company":
            messages = [{"group": "before", "size": 2}, {"n": 1}, {"group": "before", "size": 2}]
        elif self._situation == "alone":
            # It is claimed with the first one, and waits for its slot.
            messages.append({"group": "next", "size": 1})
        ids = await queue.enqueue_many(
            messages, timeout=TIMEOUT if self._situation == "timeout" else None
        )
        self._id = ids[messages.index({"n": 1})]
        self._next_id = ids[-1] if self._situation == "alone" else ""
        queue.handler(case.build(scene))
        await self._until(lambda: scene.has_begun, "it begins")
        await self._bring_about()
        if self._expected == "runs":
            return await self._check_running()
        await self._until(lambda: self._seen, "something becomes of its message")
        outcome, _ = self._seen[0]
        await self._restart()
        await self._until(lambda: self._seen[-1][0] in FINAL, "its message is finished")
        if outcome == "lost" and self._situation == "stop":
            outcome = "left behind"
        attempt = 2 if outcome == "failed" else 1
        # A delivery that came just before the handler stopped its queue was returned.
        later = self._skip_returns(self._seen[1:])
        while self._situation == "timeout" and later and later[0] == ("failed", attempt):
            # The event loop was so busy that this attempt took too long as well.
            later, attempt = later[1:], attempt + 1
        assert later == ([] if outcome in FINAL else [("completed", attempt)])
        await self._check_next()
        keeps = await self._check_slots()
        facts = case.facts.get(self._situation)
        if facts is not None:
            assert scene.facts == facts
        return f"{outcome}, keeps its slot" if keeps else outcome

    def _skip_returns(self, seen: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Leave out what a handler that stops its queue may have caused."""
        return [each for each in seen if not (self._case.stops and each[0] == "returned")]

    async def _check_next(self) -> None:
        """Check that the message behind it is completed as if it had been alone."""
        if self._next_id:
            seen = self._seen_of_next
            await self._until(lambda: seen and seen[-1][0] in FINAL, "the next one is finished")
            assert self._skip_returns(seen) == [("completed", 1)]

    async def _bring_about(self) -> None:
        """Bring the situation about."""
        if self._situation == "stop":
            async with asyncio.timeout(PATIENCE):
                await self._queue.stop()
            self._is_left_behind = bool(self._queue.list_running())
        elif self._situation == "loss":
            (claimed,) = await self._queue.browse("claimed")
            database = self._database
            backend = open_backend(database.store, self._queue.queue, database.components)
            assert await backend.end_claims({claimed.session})

    async def _restart(self) -> None:
        """Start the queue again, if the test or the handler has stopped it."""
        if self._case.stops:
            await self._until(lambda: not self._queue.is_running, "its queue has stopped")
            await self._database.connect()
        await self._queue.start()

    async def _check_running(self) -> str:
        assert not self._scene.has_ended
        assert self._seen == []
        assert await self._queue.count("claimed") >= 1
        if self._situation == "company":
            await self._check_slots()
        return "runs"

    async def _check_slots(self) -> bool:
        """Run as many handlers at once as there are slots; return whether one is occupied."""
        keeps = "keeps" in self._expected or self._expected == "runs"
        if keeps:
            assert not self._scene.has_ended
        elif self._situation != "stop":
            await self._until(lambda: self._scene.has_ended, "it ends")
        assert self._is_left_behind is (self._expected == "left behind")
        free = self._concurrency - keeps
        await self._queue.enqueue_many([{"group": "after", "size": free}] * free)
        await self._until(lambda: self._scene.count("after") == free, "every slot is free")
        await self._until(lambda: self._queue.stats()["running"] == keeps, "others have ended")
        return keeps and self._expected != "runs"

    def _note(self, event: Event) -> None:
        if event.name in OUTCOMES:
            seen = {self._id: self._seen, self._next_id: self._seen_of_next}
            seen.get(event["message_id"], []).append((OUTCOMES[event.name], event["attempt"]))

    async def _until(self, holds: Any, what: str) -> None:
        await until(holds, f"{what}; it has seen {self._seen}", PATIENCE)


async def show_all(cases: tuple[HandlerCase, ...], situation: Situation, url: str) -> None:
    """Show handlers, each with its own queue, most of them at once; compare the outcomes."""
    failures: list[Event] = []
    outcomes: dict[str, str] = {}

    async def show(case: HandlerCase, database: Database, number: int) -> None:
        try:
            outcomes[case.name] = await Show(case, situation, database, number).run()
        except Exception as error:  # noqa: BLE001 - shown below, beside the others
            outcomes[case.name] = f"{type(error).__name__}: {error}"

    async with Database(url) as db, asyncio.TaskGroup() as group:
        db.on("db:failed", failures.append)
        for number, case in enumerate(cases):
            if not case.has_own_database:
                group.create_task(show(case, db, number))
    for number, case in enumerate(cases):
        if case.has_own_database:
            async with Database(url) as db:
                db.on("db:failed", failures.append)
                await show(case, db, number)
    assert outcomes == {case.name: case.expect(situation) for case in cases}
    assert failures == []


@pytest.mark.parametrize("kind", CASES)
async def test_a_handler_alone(url: str, kind: str) -> None:
    """However it ends, its message is settled, and its only slot is free for the next one."""
    await show_all(CASES[kind], "alone", url)


@pytest.mark.parametrize("kind", CASES)
async def test_a_handler_in_company(url: str, kind: str) -> None:
    """The handlers beside it end as usual, and afterwards as many run at once as before."""
    await show_all(CASES[kind], "company", url)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("kind", CASES)
async def test_a_handler_during_a_stop(url: str, kind: str) -> None:
    """A stop ends in time, and spends no attempt; what never ends is left behind and listed."""
    await show_all(CASES[kind], "stop", url)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("kind", CASES)
async def test_a_handler_after_its_timeout(url: str, kind: str) -> None:
    """Its attempt has failed, whatever it does then; what never ends keeps its slot."""
    await show_all(CASES[kind], "timeout", url)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("kind", CASES)
async def test_a_handler_after_its_claim_was_lost(url: str, kind: str) -> None:
    """Nothing that it does counts; its message is delivered again, at the same attempt."""
    await show_all(CASES[kind], "loss", url)


async def test_a_handler_is_told_when_its_worker_claims_the_message_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that comes before any renewal has shown that the first claim had ended."""

    async def renew(_: InFlight) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(InFlight, "renew", renew)
    lost: list[Event] = []
    ended: list[int] = []

    async def handle(_: Document, context: Any) -> None:
        try:
            if context.epoch == 1:
                await asyncio.Event().wait()
        finally:
            ended.append(context.epoch)

    queue = QueuePlugin(
        resource="tasks", on_message=handle, concurrency=2, visibility_timeout=30, poll_interval=0.1
    )
    queue.on("plg:queue:message-lost", lost.append)
    async with Database(url) as db:
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1})
        await until(lambda: queue.stats()["running"] == 1, "it begins")
        backend = open_backend(db.store, queue.queue, db.components)
        (claimed,) = await queue.browse("claimed")
        assert await backend.end_claims({claimed.session})
        # A suspect waits for others at most a third of the visibility timeout.
        monkeypatch.setattr(Quarantine, "wait", lambda *_, **__: 0.0)
        await until(lambda: queue.stats()["completed"] == 1, "its message is completed", 20)
        await until(lambda: sorted(ended) == [1, 2], "both handlers have ended", 20)
    assert [event["reason"] for event in lost] == ["its message was claimed again"]


INTERRUPTED = """
import asyncio, sys
from jobsync import Database, QueuePlugin

async def handle(_):
    raise KeyboardInterrupt

async def main():
    async with Database(sys.argv[1]) as db:
        queue = await db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        await queue.enqueue({"n": 1})
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_an_interrupted_coroutine_ends_the_program(url: str) -> None:
    """As Ctrl-C does; its message is delivered again at the same attempt."""
    attempts: list[int] = []

    async def handle(_: Document, context: Any) -> None:
        attempts.append(context.attempt)

    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED, url, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await program.communicate()
    assert b"KeyboardInterrupt" in errors
    assert program.returncode == -signal.SIGINT or program.returncode == 128 + signal.SIGINT
    queue = QueuePlugin(resource="tasks", on_message=handle)
    async with Database(url) as db:
        await db.use_plugin(queue)
        await until(lambda: queue.stats()["completed"] == 1, "its message is completed")
    assert attempts == [1]


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_refused(name: str) -> None:
    """When they are registered: nobody would run them."""
    with pytest.raises(Invalid, match="is a generator, which nobody runs"):
        QueuePlugin(resource="tasks", on_message=GENERATORS[name])


async def test_a_handler_may_disconnect_while_its_queue_stops(url: str) -> None:
    """The disconnect waits for the handler, as the stop does; its message is completed."""
    begun = asyncio.Event()

    async def handle(_: Document) -> None:
        begun.set()
        await until(lambda: not queue.is_running, "the queue stops")
        await db.disconnect()
        await db.disconnect()
        await asyncio.sleep(0.3)

    queue = QueuePlugin(resource="tasks", on_message=handle)
    async with Database(url) as db:
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1})
        await begun.wait()
        await queue.stop()
        await until(lambda: not db.is_connected, "the database disconnects")
        await db.connect()
        assert await queue.count("completed") == 1


async def test_a_worker_without_a_free_slot_claims_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    """It returns what it has prefetched, so that others can handle it, and is not ready."""
    monkeypatch.setattr(handler_slots, "_CANCEL_TIME", 0.3)
    handled: list[int] = []

    async def ignore(task: Document) -> None:
        while task.kind == "bad" and not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def handle(task: Document) -> None:
        handled.append(task.n)

    queue = QueuePlugin(resource="tasks", concurrency=2, prefetch=10, max_attempts=1)
    async with Database(url) as db, Database(url) as other_db:
        await db.use_plugin(queue)
        await queue.enqueue_many([{"kind": "bad"}] * 2, timeout=0.1)
        await queue.enqueue_many([{"kind": "good", "n": n} for n in range(5)])
        queue.handler(ignore)
        await until(lambda: queue.stats()["dead"] == 2)
        await until(lambda: "every slot is occupied" in queue.unready(), "it is not ready")
        assert db.stuck()
        other = await other_db.use_plugin(QueuePlugin(resource="tasks", on_message=handle))
        await until(lambda: other.stats()["completed"] == 5, "another worker handles the others")
        assert queue.stats()["completed"] == 0
        go_on.set()
        await until(lambda: queue.unready() == "", "it is ready again")


async def test_a_disconnect_lists_what_it_leaves_behind(url: str, go_on: threading.Event) -> None:
    """It returns in time, and names the messages whose handlers run on."""
    begun: list[int] = []
    incomplete: list[Event] = []

    def never_return(task: Document) -> None:
        begun.append(task.n)
        assert go_on.wait(120)

    async def never_end(task: Document) -> None:
        begun.append(task.n)
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    blocking = QueuePlugin(resource="blocking", on_message=never_return, grace=0.2)
    ignoring = QueuePlugin(resource="ignoring", on_message=never_end, grace=0.2)
    db = Database(url, plugins=[blocking, ignoring])
    db.on("db:disconnect-incomplete", incomplete.append)
    await db.connect()
    ids = [await queue.enqueue({"n": 1}) for queue in (blocking, ignoring)]
    await until(lambda: len(begun) == 2, "both have begun")
    async with asyncio.timeout(60):
        await db.disconnect()
    go_on.set()
    (event,) = incomplete
    running = [text for text in event["running"] if "handler" in text]
    assert running == [
        f"{queue.name}: the handler of message {name}"
        for queue, name in zip((blocking, ignoring), ids, strict=True)
    ]


@pytest.mark.parametrize("takes_context", [True, False])
async def test_a_function_that_does_not_know_of_a_stop_completes_its_message(
    url: str, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event, *, takes_context: bool
) -> None:
    """It has not looked at its context, or has none: it has done all of its work."""
    monkeypatch.setattr(shutdown, "LAST_MOMENTS", 120.0)
    begun = threading.Event()

    def handle(_: Document) -> None:
        begun.set()
        assert go_on.wait(60)

    def handle_with_context(task: Document, context: Context) -> None:
        handle(task)
        assert context.attempt == 1

    function = handle_with_context if takes_context else handle
    queue = QueuePlugin(resource="tasks", on_message=function, grace=0.1)
    async with Database(url) as db:
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1})
        await until(begun.is_set, "it begins")
        asyncio.get_running_loop().call_later(0.3, go_on.set)
        await queue.stop()
        assert await queue.count("completed") == 1


async def test_callbacks_that_do_not_end_stop_the_claims(url: str) -> None:
    """Once 1,000 of them run, nothing more is claimed, and the queue is not ready."""
    go_on = asyncio.Event()

    async def wait(*_: object) -> None:
        await go_on.wait()

    async def handle(_: Document) -> None:
        pass

    queue = QueuePlugin(resource="tasks", on_complete=wait, grace=0.2)
    async with Database(url) as db:
        await db.use_plugin(queue)
        await queue.enqueue_many([{"n": n} for n in range(3000)])
        queue.handler(handle)
        await until(lambda: "callbacks" in queue.unready(), "it is not ready")
        await until(lambda: queue.stats()["running"] == 0, "its handlers have ended")
        assert await queue.count("pending") >= 1000
        go_on.set()
        await until(lambda: queue.stats()["completed"] == 3000, "it goes on")
        assert queue.unready() == ""


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_callback_has_the_timeout_of_a_handler(
    url: str, go_on: threading.Event, *, is_async: bool
) -> None:
    """It is cancelled, or left on its thread, and reported; the message stays completed."""
    failed: list[Event] = []

    async def wait_on_the_loop(*_: object) -> None:
        await asyncio.Event().wait()

    def wait_on_a_thread(*_: object) -> None:
        assert go_on.wait(60)

    wait = wait_on_the_loop if is_async else wait_on_a_thread

    async def handle(_: Document) -> None:
        pass

    queue = QueuePlugin(resource="tasks", on_message=handle, on_complete=wait, timeout=0.1)
    async with Database(url) as db:
        db.on("jobsync:handler-failed", failed.append)
        await db.use_plugin(queue)
        await queue.enqueue({"n": 1})
        await until(lambda: bool(failed), "it is reported")
        assert "TimeoutError" in failed[0]["error"]
        assert await queue.count("completed") == 1
        go_on.set()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_callback_that_never_ends_does_not_delay_a_disconnect(
    url: str, go_on: threading.Event, *, is_async: bool
) -> None:
    """It is left behind, and listed."""
    called: list[Any] = []
    incomplete: list[Event] = []

    async def ignore(*_: object) -> None:
        called.append(1)
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    def block(*_: object) -> None:
        called.append(1)
        assert go_on.wait(60)

    async def handle(_: Document) -> None:
        pass

    callback = ignore if is_async else block
    queue = QueuePlugin(resource="tasks", on_message=handle, on_complete=callback, grace=0.2)
    db = Database(url, plugins=[queue])
    db.on("db:disconnect-incomplete", incomplete.append)
    await db.connect()
    await queue.enqueue({"n": 1})
    await until(lambda: bool(called), "it is called")
    async with asyncio.timeout(60):
        await db.disconnect()
    go_on.set()
    assert [event["running"] for event in incomplete] == [(f"{queue.name}: callbacks",)]
