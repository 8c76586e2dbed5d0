"""The simulated fleet of a queue, and the checks of its handlers.

Each process has its own database and queue, as a user's process has; the rows are those of an
SQLite database in the world. `jobsync.testing` checks the messages. This module checks, as it
happens, what only handlers show: a handler starts with a claim that stands, runs only while it may
trust its claim, and reads what was pushed.
"""

import asyncio
import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jobsync import JobsyncError
from jobsync.core.messages import Cancel, Snooze
from jobsync.errors import Invalid, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.context import Context
from jobsync.queue.events import MessageCompleted
from jobsync.testing import (
    NodeDatabase,
    RecordingQueue,
    RowStore,
    check_answers,
    check_drained,
    check_messages,
)
from jobsync.testing.invariants import Violation, fail, is_defect, require
from jobsync.testing.world import Node, Occurrence, World

__all__ = ["BEAT", "TIMEOUT", "QueueFleet", "QueueProcess"]

BEAT, TIMEOUT = 5.0, 15.0
FOR_EVER = 1e9


class QueueProcess:
    """One simulated process.

    Attributes:
        node: the node that it runs on.
        handling: the contexts of running handlers, by message and delivery.
        queue: its queue, once it runs.
    """

    def __init__(
        self, fleet: "QueueFleet", node: Node, options: Mapping[str, Any], *, is_idle: bool
    ) -> None:
        self.fleet = fleet
        self.node = node
        self.handling: dict[tuple[str, int], Context] = {}
        self.queue: RecordingQueue | None = None
        self._options = options
        self._is_idle = is_idle

    async def work(self) -> None:
        """Handle messages until cancelled, or until the database has failed."""
        database = NodeDatabase(self.node, self.fleet.store)
        async with database:
            database.events.on(MessageCompleted.name, self.fleet.check_completion)
            queue = RecordingQueue(resource="letters", on_message=self.handle, **self._options)
            if self._is_idle:
                queue.pause()
            self.queue = await database.use_plugin(queue)
            await self._wait(database)

    async def push(self, batches: Callable[[], Iterator["Batch"]]) -> None:
        """Push one batch after the other, and handle nothing."""
        options = {k: v for k, v in self._options.items() if k in _SESSION_OPTIONS}
        async with NodeDatabase(self.node, self.fleet.store) as database:
            self.queue = await database.use_plugin(RecordingQueue(resource="letters", **options))
            for batch in batches():
                await self.node.clock.sleep(batch.pause)
                try:
                    names = await self.queue.enqueue_many(batch.data, **batch.options)
                    self.fleet.acknowledged += names
                except (Misconfigured, OutcomeUnknown, Unavailable):
                    self.fleet.world.note(self.node.name, "push failed")
            await self._wait(database)

    async def _wait(self, database: NodeDatabase) -> None:
        while True:
            await self.node.clock.sleep(BEAT)
            # Raises the error that made it fail.
            assert database.store is not None

    async def handle(self, task: Any, context: Context) -> Any:
        """Handle a message as its kind demands."""
        fleet, key = self.fleet, (context.id, context.epoch)
        fleet.record_start(self, task, context)
        self.handling[key] = context
        try:
            result = await self._act(task, context)
        finally:
            self.handling.pop(key, None)
        fleet.record_end(self, context)
        return result

    async def _act(self, task: Any, context: Context) -> Any:
        clock, seconds, times = self.node.clock, task["seconds"], task["times"]
        match task["kind"]:
            case "kill":
                await clock.sleep(seconds)
                self.fleet.kill(self.node)
                await clock.sleep(FOR_EVER)
            case "hang":
                await clock.sleep(FOR_EVER)
            case "fail" if context.epoch <= times:
                await clock.sleep(seconds)
                raise ValueError("as its kind demands")
            case "snooze" if context.epoch <= times:
                return Snooze(seconds)
            case "cancel":
                return Cancel("as its kind demands")
            case "creep" if context.epoch > 1:
                # The first handler is quick; later ones are slow.
                await clock.sleep(seconds * times)
            case "nudge":
                for _ in range(times):
                    await clock.sleep(seconds)
                    await context.extend(seconds)
            case "ack" | "nack" | "extend":
                await self._act_on_claim(task, context)
            case _:
                await clock.sleep(seconds)
        return None

    async def _act_on_claim(self, task: Any, context: Context) -> None:
        """Settle the message, or extend its claim, in the handler itself."""
        clock, seconds = self.node.clock, task["seconds"]
        await clock.sleep(seconds / 2)
        match task["kind"]:
            case "ack":
                self.fleet.record_end(self, context)
                await context.ack()
            case "nack" if context.attempt <= task["times"]:
                await context.nack("as its kind demands")
            case "extend":
                await context.extend(2 * seconds)
                if context.attempt <= task["times"]:
                    raise ValueError("as its kind demands")
                await clock.sleep(5 * seconds)
        await clock.sleep(seconds)

    @property
    def is_awake(self) -> bool:
        """Whether it runs, and was not resumed at this very moment."""
        node, world = self.node, self.node.world
        is_running = node.is_alive and node.host().is_running
        return is_running and self.fleet.resumed.get(node.name) != world.loop.time()


_LIVE = ("ready", "waiting", "claimed")
_SESSION_OPTIONS = {"heartbeat_interval", "worker_timeout", "skip_cold_start"}


class Batch:
    """A batch of messages to push.

    Args:
        data: the messages.
        pause: seconds to wait before.
        options: for `enqueue_many`.
    """

    def __init__(
        self, data: Sequence[Mapping[str, Any]], pause: float = 0.0, **options: Any
    ) -> None:
        self.data = data
        self.pause = pause
        self.options = options


class QueueFleet:
    """A queue, its processes, and the checks of their handlers.

    Args:
        world: the simulated world.
        trusts_clocks: whether clocks keep running. If machines are suspended, a handler may trust
            its claim for too long, and only what the database accepts counts.
        options: for the queue.
    """

    def __init__(self, world: World, *, trusts_clocks: bool = True, **options: Any) -> None:
        self.world = world
        self.store = RowStore(world)
        self.processes: list[QueueProcess] = []
        self.started: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.resumed: dict[str, float] = {}
        self.acknowledged: list[str] = []
        self.lapsed: Counter[str] = Counter()
        """How often each message's claim was ended, if it was."""
        self._sent: dict[int, Mapping[str, Any]] = {}
        self._numbers = itertools.count()
        self._trusts_clocks = trusts_clocks
        self._options = {
            "heartbeat_interval": BEAT,
            "worker_timeout": TIMEOUT,
            "skip_cold_start": True,
            **options,
        }
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._live: set[str] = set()
        self._read: dict[str, Mapping[str, Any]] = {}
        """The messages that handlers have read."""
        self._pushed: dict[str, float] = {}
        self._done: dict[str, float] = {}
        world.expect(check_messages, check_answers)
        world.watch(self._watch_rows)

    def add_worker(self, name: str, *, is_idle: bool = False) -> Node:
        """Start a process that handles messages, or stays paused."""
        return self._start(name, lambda process: process.work(), is_idle=is_idle)

    def add_producer(self, name: str, batches: Callable[[], Iterator["Batch"]]) -> Node:
        """Start a process that pushes messages."""
        return self._start(name, lambda process: process.push(batches))

    def build_message(self, kind: str, seconds: float = 0.0, times: int = 0) -> Mapping[str, Any]:
        """Return a message to push."""
        number = next(self._numbers)
        message = {"kind": kind, "seconds": seconds, "times": times, "number": number}
        self._sent[number] = message
        return message

    def damage(self, name: str, payload: str) -> None:
        """Overwrite a payload behind the library's back."""

        def work(connection: sqlite3.Connection) -> None:
            row = (payload, name)
            connection.execute("UPDATE jobsync_message SET payload = ? WHERE id = ?", row)

        self.store.rows.commit(work)

    def kill(self, node: Node) -> None:
        """Kill a process, as its handler may do; it is started again after a while."""
        node.kill()
        self.world.start(self._restart_later(node))

    def find_process(self, name: str) -> QueueProcess:
        """Return the latest process with a name."""
        return next(process for process in reversed(self.processes) if process.node.name == name)

    async def wait_until_drained(self, seconds: float) -> None:
        """Wait until nothing is left to handle.

        Raises:
            InvariantBroken: something is left after this many seconds.
        """
        give_up = self.world.loop.time() + seconds
        while left := self.backlog:
            if self.world.loop.time() >= give_up:
                fail("QL3", f"{left} messages left after {seconds:g} s")
            await asyncio.sleep(1)

    @property
    def handled_now(self) -> list[tuple[str, int]]:
        """The messages and deliveries whose handlers run."""
        return [
            key for process in self.processes if process.node.is_alive for key in process.handling
        ]

    @property
    def backlog(self) -> int:
        """How many messages are still to be handled."""
        return len(self._live)

    def record_start(self, process: QueueProcess, task: Any, context: Context) -> None:
        """Check a handler that starts."""
        world, row = self.world, self._rows.get(context.id)
        world.note(process.node.name, "begin", id=context.id, epoch=context.epoch)
        self.started[context.id] += 1
        self._read[context.id] = dict(task)
        if self._sent.get(task["number"], {}).items() - dict(task).items():
            found = f"{context.id}: was handled, but is not what was sent: {task}"
            world.violations.append(Violation("Q2", found))
        is_claimed = row is not None and row["state"] == "claimed"
        stands = is_claimed and row is not None and row["deliveries"] == context.epoch
        if not stands and self._trusts_clocks and process.is_awake:
            found = f"{context.id}: a handler started without a claim: {row}"
            world.violations.append(Violation("Q14", found))

    def record_end(self, process: QueueProcess, context: Context) -> None:
        """Record that a handler has ended."""
        self.finished[context.id] += 1
        self.world.note(process.node.name, "end", id=context.id, epoch=context.epoch)

    def check_completion(self, event: MessageCompleted) -> None:
        """Check that a message is completed when a worker reports it."""
        state = self._rows[event.message_id]["state"]
        if state not in ("completed", "gone"):
            found = f"{event.message_id}: reported as completed, is {state}"
            self.world.violations.append(Violation("Q15", found))

    def expect_drained(self) -> None:
        """Check the end: everything is handled, and nothing completed without a handler."""
        self.world.violations += check_drained(self.world.history)
        self.world.violations += [
            Violation("Q1", f"{name}: completed, and no handler ended")
            for name, row in self._rows.items()
            if row["state"] == "completed" and not self.finished[name]
        ]

    def count_states(self) -> dict[str, int]:
        """Count the messages in each state."""
        return dict(Counter(row["state"] for row in self._rows.values()))

    def list_kinds(self, state: str) -> list[str]:
        """Return the kinds of the messages in a state."""
        return [
            self._read[name]["kind"] for name, row in self._rows.items() if row["state"] == state
        ]

    def expect_handled_once(self) -> None:
        """Check that no handler ran twice."""
        twice = {name: count for name, count in self.started.items() if count > 1}
        require(not twice, "Q16", f"started more than once: {twice}")

    def expect_no_attempt_lost(self, but: Sequence[str] = ()) -> None:
        """Check that every message, except some kinds, was completed with its first attempt."""
        for name, row in self._rows.items():
            if self._read[name]["kind"] not in but:
                spent = row["deliveries"] - row["returned"]
                require((row["state"], spent) == ("completed", 1), "Q6", f"{name}: {row}")

    def expect_soon(self, messages: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Check that these messages were finished within this many seconds of their push."""
        wanted = {message["number"] for message in messages}
        late = {
            name: self._done[name] - pushed
            for name, pushed in self._pushed.items()
            if self._read[name]["number"] in wanted and self._done[name] - pushed > seconds
        }
        require(not late, "QL1", f"took longer than {seconds:g} s: {late}")

    def _start(
        self, name: str, live: Callable[[QueueProcess], Any], *, is_idle: bool = False
    ) -> Node:
        node = self.world.node(name, rate=self.world.dice.uniform(0.951, 1.049))

        async def run(node: Node) -> None:
            """Run; after a failure, start again."""
            while True:
                process = QueueProcess(self, node, self._options, is_idle=is_idle)
                self.processes.append(process)
                try:
                    await live(process)
                except JobsyncError as error:
                    self.world.note(node.name, "gave up", error=str(error))
                    if is_defect(error):
                        self.world.violations.append(Violation("crash", repr(error)))
                    elif isinstance(error, Invalid):
                        found = f"{node.name} died of its own request: {error}"
                        self.world.violations.append(Violation("A1", found))
                await node.clock.sleep(BEAT)

        node.start(run)
        return node

    async def _restart_later(self, node: Node) -> None:
        await asyncio.sleep(self.world.dice.uniform(0, 10))
        if self.world.nodes[node.name] is node:
            node.restart()

    def _watch_rows(self, done: Occurrence) -> Iterator[Violation]:
        if done.what in ("resume", "unblock"):
            self.resumed[done.node] = done.at
        if done.what != "row":
            return
        facts = done.details
        before = self._rows.get(facts["id"])
        self._rows[facts["id"]] = facts
        self._record_state(facts, is_new=before is None, at=done.at)
        if before is None or before["state"] != "claimed":
            return
        if facts.get("claim") != before["claim"] and facts.get("trail") == before["trail"]:
            self.lapsed[facts["id"]] += 1
            yield from self._find_stale_handlers(facts["id"], before["deliveries"])

    def _record_state(self, facts: Mapping[str, Any], *, is_new: bool, at: float) -> None:
        name, state = facts["id"], facts["state"]
        if state in _LIVE:
            self._live.add(name)
        else:
            self._live.discard(name)
        if is_new:
            self._pushed[name] = at
        elif state in ("completed", "cancelled", "dead"):
            self._done[name] = at

    def _find_stale_handlers(self, name: str, deliveries: int) -> Iterator[Violation]:
        """Find processes that still handle a message whose claim was ended."""
        for process in self.processes if self._trusts_clocks else ():
            context = process.handling.get((name, deliveries))
            if context is None or context.lost or context.is_settled:
                continue
            if process.is_awake:
                found = f"{name}: its claim ended while {process.node.name} handled it"
                yield Violation("Q14", found)
