"""The simulated fleet of a queue, and the checks of its handlers.

Each process has its own database and queue, as a user's process has; the rows are those of a real
database in the world, which is SQLite unless `OPEN_STORE` says otherwise. `jobsync.testing` checks
the messages. This module checks, as it happens, what only handlers show: a handler starts with a
claim that stands, runs only while it may trust its claim, knows when that has ended, and reads what
was pushed. It also checks how processes stop: in time, whatever their handlers do.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from jobsync import JobsyncError
from jobsync.core.messages import Cancel, Snooze
from jobsync.database.connection import DisconnectIncomplete
from jobsync.database.plugin import Plugin
from jobsync.errors import Invalid, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.queue.context import BlockingContext, Context
from jobsync.queue.events import (
    MessageCancelled,
    MessageCompleted,
    MessageDead,
    MessageLost,
    MessageRetried,
    MessageReturned,
)
from jobsync.testing import (
    NodeDatabase,
    PagedStore,
    RecordingQueue,
    RowStore,
    check_answers,
    check_drained,
    check_effects,
    check_limits,
    check_messages,
    check_places,
    check_results,
)
from jobsync.testing.invariants import Violation, fail, is_defect, require
from jobsync.testing.loop import block
from jobsync.testing.world import Node, Occurrence, World

__all__ = [
    "BEAT",
    "LETTERS",
    "OPEN_STORE",
    "PARCELS",
    "TIMEOUT",
    "Batch",
    "Chore",
    "QueueFleet",
    "QueueProcess",
]

BEAT, TIMEOUT = 5.0, 15.0
FOR_EVER = 1e9
LETTERS, PARCELS = "letters", "parcels"
"""The resources with queues. Most fleets have only the first one."""
OPEN_STORE: ContextVar[Callable[[World], RowStore | PagedStore]] = ContextVar(
    "OPEN_STORE", default=RowStore
)
"""Opens the store of a fleet. `postgres_rows` and `pages_queue_stories` have others."""
STOP_TIME = 2.0
"""Seconds after the grace period in which a process must have stopped."""
_FASTEST = 1.05
"""The rate of the fastest clock."""


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
        self.handling: dict[tuple[str, int], Context | BlockingContext] = {}
        self.started: Counter[str] = Counter()
        """How many handlers of each message have started."""
        self.queue: RecordingQueue | None = None
        self.stopping_since: float | None = None
        """When it was first told to stop."""
        self.stopped_at: float | None = None
        self._database: NodeDatabase | None = None
        self._reported: Counter[str] = Counter()
        """How often each message was reported as settled or lost."""
        self._options = options
        self._is_idle = is_idle

    async def work(self) -> None:
        """Handle messages until cancelled or disconnected, or until the database has failed."""
        fleet = self.fleet
        database = self._database = _WatchedDatabase(self, fleet.store)
        handler = self.handle_on_a_thread if fleet.uses_threads else self.handle
        async with database:
            database.events.on(MessageLost.name, self._record_report)
            for event in _SETTLED_BY:
                database.events.on(event, self._record_report)
            database.events.on(DisconnectIncomplete.name, self._check_left_behind)
            if fleet.has_stubborn_hooks:
                database.events.on(MessageCompleted.name, self._listen)
                await database.use_plugin(_StubbornPlugin(self), alias="stubborn")
            for resource in fleet.resources:
                tasks = fleet.tasks.get(self.node.name, ())
                plain = None if tasks else handler
                queue = RecordingQueue(resource=resource, on_message=plain, **self._options)
                for name in tasks:
                    queue.task(name=name)(self._run_task)
                if self._is_idle:
                    queue.pause()
                await database.use_plugin(queue)
                self.queue = self.queue or queue
            await self._wait(database)

    async def push(self, batches: Callable[[], Iterator["Batch"]]) -> None:
        """Push one batch after the other, and handle nothing."""
        options = {k: v for k, v in self._options.items() if k in _PRODUCER_OPTIONS}
        async with _WatchedDatabase(self, self.fleet.store) as database:
            queues = {
                resource: await database.use_plugin(RecordingQueue(resource=resource, **options))
                for resource in self.fleet.resources
            }
            self.queue = queues[LETTERS]
            for batch in batches():
                await self.node.clock.sleep(batch.pause)
                await self._send(queues[batch.resource], batch)
            await self._wait(database)

    async def _send(self, queue: RecordingQueue, batch: "Batch") -> None:
        """Send a batch; again, if it may be sent again."""
        for number in range(batch.tries):
            if number:
                await self.node.clock.sleep(1.0)
            try:
                self.fleet.acknowledged += await batch.send(queue)
            except (Misconfigured, OutcomeUnknown, Unavailable):
                self.fleet.world.note(self.node.name, "push failed")
            else:
                return

    async def _wait(self, database: NodeDatabase) -> None:
        while self.stopping_since is None:
            await self.node.clock.sleep(BEAT)
            if self.stopping_since is None:
                # Raises the error that made it fail.
                assert database.store is not None

    def record_stop(self) -> None:
        """Record that it was told to stop, and check later that it has stopped."""
        if self.stopping_since is None:
            loop = self.node.world.loop
            self.stopping_since = loop.time()
            grace = 30.0 if self.queue is None else self.queue.settings.grace
            seconds = (grace + STOP_TIME) * _FASTEST
            loop.call_outside(seconds, self._check_stopped, seconds)

    def record_end_of_stop(self) -> None:
        """Record that it has stopped, and check that all its handlers were accounted for."""
        self.stopped_at = self.node.world.loop.time()
        if self._has_stopped_undisturbed():
            self._check_accounts()

    def _check_accounts(self) -> None:
        """Check that handlers that still run know of the end, and that all were reported."""
        unaware = [key for key in self.handling if self.is_unaware(*key)]
        unreported = dict(self.started - self._reported)
        for found, what in ((unaware, "not told"), (unreported, "not reported")):
            if found:
                detail = f"{self.node.name} has stopped, and these were {what}: {found}"
                self.node.world.violations.append(Violation("Q23", detail))

    def _has_stopped_undisturbed(self) -> bool:
        """Whether nothing has kept it from running since it was told to stop."""
        since, disturbed = self.stopping_since, self.fleet.disturbed.get(self.node.name, -1.0)
        return self.is_awake and since is not None and disturbed < since

    def _record_report(self, event: MessageLost | MessageCompleted) -> None:
        # The processes of a node have one list of listeners, in which former ones stay.
        if self.fleet.find_process(self.node.name) is self:
            self._reported[event.message_id] += 1
            self.fleet.check_report(event)

    def _check_stopped(self, seconds: float) -> None:
        if self.stopped_at is None and self._has_stopped_undisturbed():
            found = f"{self.node.name}: has not stopped within {seconds:.1f} s"
            self.node.world.violations.append(Violation("Q21", found))

    def _check_left_behind(self, event: DisconnectIncomplete) -> None:
        """Check that only user code still runs."""
        parts = [text for text in event.running if not (": " in text or text in _USER_CODE)]
        if parts:
            found = f"{self.node.name} has stopped, and {parts} still run"
            self.node.world.violations.append(Violation("Q22", found))

    async def _listen(self, _: MessageCompleted) -> None:
        """Do not end before the process does."""
        await self.sleep_stubbornly(FOR_EVER)

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

    async def _run_task(
        self, context: Context, kind: str, seconds: float, times: int, number: int
    ) -> Any:
        """Handle a message of a task as its kind demands."""
        message = {"kind": kind, "seconds": seconds, "times": times, "number": number}
        return await self.handle(message, context)

    def handle_on_a_thread(self, task: Any, context: BlockingContext) -> Any:
        """Handle a message in a plain function, as its kind demands."""
        fleet, key, rate = self.fleet, (context.id, context.epoch), self.node.clock.rate
        fleet.record_start(self, task, context)
        self.handling[key] = context
        try:
            left = task["seconds"]
            while task["kind"] == "listen" and left > 0:
                block(min(left, _LOOK) / rate)
                left -= _LOOK
                if context.lost:
                    if task["number"] % 4 == 0:
                        # Half-way, which must not count as its end.
                        return None
                    raise ValueError("nothing counts any more")
            block(max(0.0, left) / rate)
            if task["kind"] == "fail" and context.epoch <= task["times"]:
                raise ValueError("as its kind demands")
            result = self._build_result(task, context) if "answer" in task["kind"] else None
        finally:
            self.handling.pop(key, None)
        fleet.record_end(self, context)
        return result

    async def _act(self, task: Any, context: Context) -> Any:
        clock, seconds, times = self.node.clock, task["seconds"], task["times"]
        match task["kind"]:
            case "fail" if context.epoch <= times:
                await clock.sleep(seconds)
                raise ValueError("as its kind demands")
            case "snooze" if context.epoch <= times:
                return Snooze(seconds)
            case "cancel":
                return Cancel("as its kind demands")
            case "kill" | "hang" | "stubborn" | "sulk" | "cancel itself" | "disconnect":
                await self._misbehave(task, context)
            case "creep" if context.epoch > 1:
                # The first handler is quick; later ones are slow.
                await clock.sleep(seconds * times)
            case "nudge":
                for _ in range(times):
                    await clock.sleep(seconds)
                    await context.extend(seconds)
            case "ack" | "nack" | "extend":
                await self._act_on_claim(task, context)
            case "transact" | "answer" | "answer by ack":
                return await self._leave_something(task, context)
            case _:
                await clock.sleep(seconds)
        return None

    async def _misbehave(self, task: Any, context: Context) -> None:
        """Treat a cancellation, or the process, as its kind demands."""
        clock, seconds = self.node.clock, task["seconds"]
        match task["kind"]:
            case "kill":
                await clock.sleep(seconds)
                self.fleet.kill(self.node)
                await clock.sleep(FOR_EVER)
            case "hang":
                await clock.sleep(FOR_EVER)
            case "stubborn":
                await self.sleep_stubbornly(seconds)
            case "sulk":
                try:
                    await clock.sleep(seconds)
                except asyncio.CancelledError:
                    raise ValueError("was cancelled") from None
            case "cancel itself":
                await clock.sleep(seconds)
                await _cancel_current_task()
            case "disconnect" if context.epoch <= task["times"]:
                await clock.sleep(seconds)
                assert self._database is not None
                await self._database.disconnect()
                await clock.sleep(seconds)

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

    async def _leave_something(self, task: Any, context: Context) -> Any:
        """Write something in the transaction that completes the message, or return something."""
        is_writing = task["kind"] == "transact"
        async with context.transaction() if is_writing else nullcontext():
            await self.node.clock.sleep(task["seconds"])
            if context.attempt <= task["times"]:
                raise ValueError("as its kind demands")
            if is_writing:
                self.fleet.record_end(self, context)
                # From here on the database decides, and the handler only waits for it.
                self.handling.pop((context.id, context.epoch), None)
                return None
        result = self._build_result(task, context)
        if task["kind"] == "answer by ack":
            self.fleet.record_end(self, context)
            await context.ack(result)
            return "what comes after"
        return result

    def _build_result(self, task: Any, context: Context | BlockingContext) -> Any:
        """Return what a handler returns, and record that it does."""
        result = {"number": task["number"], "epoch": context.epoch}
        details = {"id": context.id, "epoch": context.epoch, "value": result}
        self.fleet.world.note(self.node.name, "returned", **details)
        return result

    def is_unaware(self, name: str, deliveries: int) -> bool:
        """Whether a handler runs and cannot know that its claim has ended."""
        context = self.handling.get((name, deliveries))
        if isinstance(context, BlockingContext):
            # Reading its `lost` would count as if the function had read it.
            context = context._context
        if context is None or context.lost or not self.is_awake:
            return False
        return not context.is_settled

    async def sleep_stubbornly(self, seconds: float) -> None:
        """Sleep, whoever cancels this."""
        clock = self.node.clock
        end = clock.mono() + seconds
        while (left := end - clock.mono()) > _ROUNDING:
            with suppress(asyncio.CancelledError):
                await clock.sleep(left)

    @property
    def is_awake(self) -> bool:
        """Whether it runs, and was not resumed at this very moment."""
        node, world = self.node, self.node.world
        is_running = node.is_alive and node.host().is_running
        return is_running and self.fleet.resumed.get(node.name) != world.loop.time()


async def _cancel_current_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


class _WatchedDatabase(NodeDatabase):
    """A database that records when it is disconnected, and checks how long that takes."""

    def __init__(self, process: QueueProcess, store: RowStore | PagedStore) -> None:
        super().__init__(process.node, store)
        self._process = process

    async def _disconnect(self, within: float | None) -> None:
        self._process.record_stop()
        await super()._disconnect(within)
        self._process.record_end_of_stop()


class _StubbornPlugin(Plugin):
    """A plugin whose hook does not end."""

    def __init__(self, process: QueueProcess) -> None:
        super().__init__()
        self._process = process

    async def on_stop(self) -> None:
        await self._process.sleep_stubbornly(FOR_EVER)


_UNANNOUNCED = 300.0 * _FASTEST
_KEPT = {"completed_ttl": 300.0}
"""How long finished messages are kept by default."""
_LIVE = ("ready", "waiting", "blocked", "claimed")
_ROUNDING = 1e-6
"""Seconds that are too short to pass on a simulated clock."""
_LOOK = 0.2
"""Seconds after which a plain function looks whether it should stop."""
_SETTLED_BY: Mapping[str, Sequence[str]] = {
    MessageCompleted.name: ("complete",),
    MessageCancelled.name: ("cancel", "revoke"),
    MessageDead.name: ("bury",),
    MessageRetried.name: ("retry",),
    MessageReturned.name: ("release", "snooze"),
}
"""The settlements that each event reports."""
_USER_CODE = ("jobsync listener", "stubborn")
"""The names of user code besides handlers, which are named by their plugins."""
_PRODUCER_OPTIONS = {
    "heartbeat_interval",
    "worker_timeout",
    "skip_cold_start",
    "order",
    "group_concurrency",
    "completed_ttl",
    "dead_ttl",
}
"""Those that a producer needs, which may lead the queue."""


class Batch:
    """A batch of messages to push.

    Args:
        data: the messages.
        pause: seconds to wait before.
        resource: the resource with the queue.
        tries: how often it is sent until it is acknowledged. Only with keys may it be repeated.
        options: for `enqueue_many`.
    """

    def __init__(
        self,
        data: Sequence[Mapping[str, Any]],
        pause: float = 0.0,
        resource: str = LETTERS,
        tries: int = 1,
        **options: Any,
    ) -> None:
        self.data = data
        self.tries = tries
        self.resource = resource
        self.pause = pause
        self.options = options

    async def send(self, queue: RecordingQueue) -> list[str]:
        """Push the messages; return their ids."""
        return await queue.enqueue_many(self.data, **self.options)


class Chore(Batch):
    """What an operator does between two batches.

    Args:
        act: does it.
        pause: seconds to wait before.
    """

    def __init__(
        self, act: Callable[[RecordingQueue], Coroutine[Any, Any, object]], pause: float = 0.0
    ) -> None:
        super().__init__((), pause)
        self._act = act

    async def send(self, queue: RecordingQueue) -> list[str]:
        """Do it."""
        await self._act(queue)
        return []


class QueueFleet:
    """A queue, its processes, and the checks of their handlers.

    Args:
        world: the simulated world.
        trusts_clocks: whether clocks keep running. If machines are suspended, a handler may trust
            its claim for too long, and only what the database accepts counts.
        uses_threads: whether the handler is a plain function.
        has_stubborn_hooks: whether a listener and a hook of a plugin never end.
        resources: the resources with queues.
        options: for the queues.
    """

    def __init__(
        self,
        world: World,
        *,
        trusts_clocks: bool = True,
        uses_threads: bool = False,
        has_stubborn_hooks: bool = False,
        resources: Sequence[str] = (LETTERS,),
        **options: Any,
    ) -> None:
        self.tasks: dict[str, Sequence[str]] = {}
        """The tasks that processes know, by their names; others handle messages without a task."""
        self.uses_threads = uses_threads
        self.has_stubborn_hooks = has_stubborn_hooks
        self.resources = resources
        self.world = world
        self.store = OPEN_STORE.get()(world)
        self.unannounced = _UNANNOUNCED if self.store.is_billed else 0.0
        """Seconds within which messages are found whose producer could not announce them."""
        self.processes: list[QueueProcess] = []
        self.started: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.resumed: dict[str, float] = {}
        self.disturbed: dict[str, float] = {}
        """When each process was last kept from running."""
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
        self.order = options.get("order", "fifo")
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._live: set[str] = set()
        self._read: dict[str, Mapping[str, Any]] = {}
        """The messages that handlers have read."""
        self._pushed: dict[str, float] = {}
        self._due: dict[str, float] = {}
        """When the delay of each message ends, as it was pushed."""
        self._done: dict[str, float] = {}
        self._settled: Counter[tuple[str, str]] = Counter()
        """How often each message was settled in each way."""
        self._reported: Counter[tuple[str, str]] = Counter()
        """How often each message was reported by each event."""
        self._handlers: dict[tuple[str, int], QueueProcess] = {}
        """The process whose handler got each delivery."""
        world.expect(check_messages, check_answers, check_places, check_limits)
        world.expect(check_effects, check_results)
        world.watch(self._watch)

    def find_orphan_bound(self, after_death: float) -> float:
        """Return the seconds within which the claims of a session that has ended are ended.

        Args:
            after_death: the bound where anybody can ask who has claims. On an object store others
                may have to watch them, for as long as they hold, from the next listing on.
        """
        visibility = float(self._options.get("visibility_timeout", 30.0))
        return after_death + (1.5 * _FASTEST * visibility if self.store.is_billed else 0.0)

    def distrust_clocks(self) -> None:
        """Count only what the database accepts from now on, as after a suspend."""
        self._trusts_clocks = False

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
        assert isinstance(self.store, RowStore)
        self.store.damage(name, payload)

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

    def record_start(
        self, process: QueueProcess, task: Any, context: Context | BlockingContext
    ) -> None:
        """Check a handler that starts."""
        world, row = self.world, self._rows.get(context.id)
        self._handlers[context.id, context.epoch] = process
        world.violations += self._find_unaware_handlers(context.id, context.epoch)
        world.note(process.node.name, "begin", id=context.id, epoch=context.epoch)
        self.started[context.id] += 1
        process.started[context.id] += 1
        self._read[context.id] = dict(task)
        if self._sent.get(task["number"], {}).items() - dict(task).items():
            found = f"{context.id}: was handled, but is not what was sent: {task}"
            world.violations.append(Violation("Q2", found))
        is_claimed = row is not None and row["state"] == "claimed"
        stands = is_claimed and row is not None and row["deliveries"] == context.epoch
        is_revoked = row is not None and ":revoke" in row.get("trail", "").partition(" ")[0]
        if not (stands or is_revoked) and self._trusts_clocks and process.is_awake:
            found = f"{context.id}: a handler started without a claim: {row}"
            world.violations.append(Violation("Q14", found))

    def record_end(self, process: QueueProcess, context: Context | BlockingContext) -> None:
        """Record that a handler has ended."""
        self.finished[context.id] += 1
        self.world.note(process.node.name, "end", id=context.id, epoch=context.epoch)

    def check_report(self, event: MessageLost | MessageCompleted) -> None:
        """Check that a message was settled as often as workers report it."""
        key = (event.message_id, event.name)
        self._reported[key] += 1
        moves = _SETTLED_BY.get(event.name)
        settled = sum(self._settled[event.message_id, move] for move in moves or ())
        if moves is not None and self._reported[key] > settled:
            found = f"{event.name} {self._reported[key]} times, settled so {settled} times"
            self.world.violations.append(Violation("Q15", f"{event.message_id}: {found}"))

    def expect_drained(self) -> None:
        """Check the end: everything is handled, and nothing completed without a handler."""
        self.world.violations += check_drained(self.world.history)
        self.world.violations += [
            Violation("Q1", f"{name}: completed, and no handler ended")
            for name, row in self._rows.items()
            if row["state"] == "completed" and not self.finished[name]
        ]
        effects = {done.details["id"] for done in self.world.history if done.what == "effect"}
        self.world.violations += [
            Violation("Q29", f"{name}: completed, and its handler's writes are not there")
            for name, row in self._rows.items()
            if row["state"] == "completed" and self._read.get(name, {}).get("kind") == "transact"
            if name not in effects and not self.uses_threads
        ]

    def count_states(self) -> dict[str, int]:
        """Count the messages in each state."""
        return dict(Counter(row["state"] for row in self._rows.values()))

    def list_kinds(self, state: str) -> list[str]:
        """Return the kinds of the messages in a state."""
        return [
            self._read[name]["kind"] for name, row in self._rows.items() if row["state"] == state
        ]

    def get_kind(self, name: str) -> str:
        """Return the kind of a message that was handled."""
        return str(self._read[name]["kind"])

    def expect_handled_once(self) -> None:
        """Check that no handler ran twice."""
        twice = {name: count for name, count in self.started.items() if count > 1}
        require(not twice, "Q16", f"started more than once: {twice}")

    def expect_unclaimed(self, since: float) -> None:
        """Check that no message was claimed after this time of the world."""
        history = self.world.history
        claims = [
            done
            for done in history
            if done.what == "row" and done.at > since and done.details["state"] == "claimed"
            if history[done.details["request"]].details["call"] == "claim"
        ]
        require(not claims, "Q25", f"claimed although the queue was paused: {claims}")

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

    def expect_on_time(self, seconds: float) -> None:
        """Check that every message was finished within this many seconds after its delay."""
        late = {
            name: self._done[name] - due
            for name, due in self._due.items()
            if self._done[name] - due > seconds
        }
        require(not late, "QL5", f"took longer than {seconds:g} s after their delays: {late}")

    def expect_newest_first(self, seconds: float) -> None:
        """Check that no message began while a later one was there for this many seconds."""
        left = dict(self._pushed)
        for done in self.world.history:
            if done.what == "begin" and (pushed := left.pop(done.details["id"], None)) is not None:
                later = [name for name, at in left.items() if pushed < at < done.at - seconds]
                require(not later, "Q26", f"{done} began before {later}")

    def expect_urgent_first(self, seconds: float) -> None:
        """Check that no message began while a more urgent one was there for this many seconds."""
        priorities = {
            message[0]: message[4].get("priority", 0) if message[4:] else 0
            for done in self.world.history
            if done.what == "request"
            for message in done.details.get("messages", ())
        }
        left = dict(self._pushed)
        for done in self.world.history:
            name = done.details.get("id", "")
            if done.what == "begin" and left.pop(name, None) is not None:
                urgent = [
                    other
                    for other, at in left.items()
                    if priorities[other] > priorities[name] and at < done.at - seconds
                ]
                require(not urgent, "Q26", f"{done} began before {urgent}")

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

    def _watch(self, done: Occurrence) -> Iterator[Violation]:
        match done.what:
            case "resume" | "unblock":
                self.resumed[done.node] = done.at
                self.disturbed[done.node] = done.at
            case "pause" | "suspend" | "block":
                self.disturbed[done.node] = done.at
            case "request":
                yield from self._check_request(done)
            case "row":
                yield from self._check_row(done)

    def _check_request(self, done: Occurrence) -> Iterator[Violation]:
        """Check that a process that stops claims nothing more, and then sends nothing."""
        process = self.find_process(done.node)
        is_claim = done.details["call"] == "claim"
        since = process.stopping_since if is_claim else process.stopped_at
        disturbed = self.disturbed.get(done.node, -1.0)
        if process.node.is_alive and since is not None and disturbed < since < done.at:
            yield Violation("Q22", f"{done.node} stopped at {since:.3f} s, and sent {done}")

    def _check_row(self, done: Occurrence) -> Iterator[Violation]:
        facts = done.details
        before = self._rows.get(facts["id"])
        self._rows[facts["id"]] = facts
        if before is not None and facts["state"] == "gone":
            yield from self._check_removal(done, before)
        self._record_state(facts, is_new=before is None, at=done.at)
        if before is None or before["state"] != "claimed":
            return
        if facts.get("claim") == before["claim"]:
            return
        delivery = (facts["id"], before["deliveries"])
        trail = facts.get("trail", "")
        move = trail.partition(" ")[0].rpartition(":")[2]
        if trail == before["trail"]:
            self.lapsed[facts["id"]] += 1
        else:
            self._settled[facts["id"], move or "complete"] += 1
        if trail != before["trail"] and move == "release":
            handler = self._handlers.get(delivery)
            if handler is not None and handler.stopping_since is None:
                found = f"{facts['id']}: returned by {handler.node.name}, which does not stop"
                yield Violation("Q20", found)
        if move != "revoke":
            # Of a cancel from outside its handler hears at the next renewal.
            yield from self._find_stale_handlers(*delivery)

    def _check_removal(self, done: Occurrence, before: Mapping[str, Any]) -> Iterator[Violation]:
        """Check that a finished message was kept for its time, unless somebody purges it."""
        request = done.details["request"]
        call = None if request is None else self.world.history[request].details["call"]
        field = "completed_ttl" if before["state"] == "completed" else "dead_ttl"
        least = self._options.get(field, _KEPT.get(field, FOR_EVER))
        # By the database's clock, which may have been set. `due` is the end of a finished message.
        age = done.details.get("age", done.details["now"]["wall"] - before["due"])
        if call == "forget" and age < least:
            found = f"{done.details['id']}: {before['state']}, removed after {age:.1f} s"
            yield Violation("Q24", found)

    def _record_state(self, facts: Mapping[str, Any], *, is_new: bool, at: float) -> None:
        name, state = facts["id"], facts["state"]
        if state in _LIVE:
            self._live.add(name)
        else:
            self._live.discard(name)
        if is_new:
            self._pushed[name] = at
            self._due[name] = at + max(0.0, facts["due"] - facts["now"]["wall"])
        elif state in ("completed", "cancelled", "dead"):
            self._done[name] = at

    def _find_stale_handlers(self, name: str, deliveries: int) -> Iterator[Violation]:
        """Find handlers that do not know that their message's claim was ended."""
        for process in self.processes if self._trusts_clocks else ():
            if process.is_unaware(name, deliveries):
                found = f"{name}: its claim ended while {process.node.name} handled it"
                yield Violation("Q14", found)

    def _find_unaware_handlers(self, name: str, deliveries: int) -> Iterator[Violation]:
        """Find handlers of earlier deliveries that do not know that their claims have ended."""
        for process in self.processes if self._trusts_clocks else ():
            for other, earlier in process.handling:
                if other == name and earlier < deliveries and process.is_unaware(name, earlier):
                    found = f"{name}: delivered again while {process.node.name} handled it"
                    yield Violation("Q19", found)
