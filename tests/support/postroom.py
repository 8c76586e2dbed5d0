"""Processes that push and handle messages in a simulated world, and what must hold there.

Each clerk is a process with a database and a queue of its own, as a user's would be; the rows
are those of an SQLite database in the world. What becomes of the messages is judged by
`jobsync.testing`; here is judged, as it happens, what only a handler can tell: it begins with a
claim that stands, runs only while it may believe in it, and reads what was pushed.
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

__all__ = ["BEAT", "TIMEOUT", "Clerk", "Postroom"]

BEAT, TIMEOUT = 5.0, 15.0
FOR_EVER = 1e9


class Clerk:
    """One process.

    Attributes:
        node: where it runs.
        handling: the contexts of the messages whose handlers run, by message and delivery.
        queue: its queue, once it runs.
    """

    def __init__(
        self, postroom: "Postroom", node: Node, options: Mapping[str, Any], *, is_idle: bool
    ) -> None:
        self.postroom = postroom
        self.node = node
        self.handling: dict[tuple[str, int], Context] = {}
        self.queue: RecordingQueue | None = None
        self._options = options
        self._is_idle = is_idle

    async def work(self) -> None:
        """Handle messages until cancelled, or until the database has failed."""
        database = NodeDatabase(self.node, self.postroom.store)
        async with database:
            database.events.on(MessageCompleted.name, self.postroom.hear_of_completion)
            queue = RecordingQueue(resource="letters", on_message=self.handle, **self._options)
            if self._is_idle:
                queue.pause()
            self.queue = await database.use_plugin(queue)
            await self._stay(database)

    async def push(self, letters: Callable[[], Iterator["Letters"]]) -> None:
        """Push messages, one batch after the other, and handle none."""
        options = {k: v for k, v in self._options.items() if k in _OF_THE_SESSION}
        async with NodeDatabase(self.node, self.postroom.store) as database:
            self.queue = await database.use_plugin(RecordingQueue(resource="letters", **options))
            for batch in letters():
                await self.node.clock.sleep(batch.pause)
                try:
                    names = await self.queue.enqueue_many(batch.data, **batch.options)
                    self.postroom.acknowledged += names
                except (Misconfigured, OutcomeUnknown, Unavailable):
                    self.postroom.world.note(self.node.name, "push failed")
            await self._stay(database)

    async def _stay(self, database: NodeDatabase) -> None:
        while True:
            await self.node.clock.sleep(BEAT)
            # Raises what has made it fail.
            assert database.store is not None

    async def handle(self, task: Any, context: Context) -> Any:
        """Do what the message says."""
        postroom, key = self.postroom, (context.id, context.epoch)
        postroom.begin(self, task, context)
        self.handling[key] = context
        try:
            result = await self._obey(task, context)
        finally:
            self.handling.pop(key, None)
        postroom.end(self, context)
        return result

    async def _obey(self, task: Any, context: Context) -> Any:
        clock, seconds, times = self.node.clock, task["seconds"], task["times"]
        match task["kind"]:
            case "kill":
                await clock.sleep(seconds)
                self.postroom.kill(self.node)
                await clock.sleep(FOR_EVER)
            case "hang":
                await clock.sleep(FOR_EVER)
            case "fail" if context.epoch <= times:
                await clock.sleep(seconds)
                raise ValueError("as it was told to")
            case "snooze" if context.epoch <= times:
                return Snooze(seconds)
            case "cancel":
                return Cancel("as it was told to")
            case "creep" if context.epoch > 1:
                # The first to handle it is done soon, whoever handles it again is not.
                await clock.sleep(seconds * times)
            case "nudge":
                for _ in range(times):
                    await clock.sleep(seconds)
                    await context.extend(seconds)
            case "ack" | "nack" | "extend":
                await self._speak(task, context)
            case _:
                await clock.sleep(seconds)
        return None

    async def _speak(self, task: Any, context: Context) -> None:
        """Say by itself what is to become of the message, or of its claim."""
        clock, seconds = self.node.clock, task["seconds"]
        await clock.sleep(seconds / 2)
        match task["kind"]:
            case "ack":
                self.postroom.end(self, context)
                await context.ack()
            case "nack" if context.attempt <= task["times"]:
                await context.nack("as it was told to")
            case "extend":
                await context.extend(2 * seconds)
                if context.attempt <= task["times"]:
                    raise ValueError("as it was told to")
                await clock.sleep(5 * seconds)
        await clock.sleep(seconds)

    @property
    def is_awake(self) -> bool:
        """Whether it runs, and has not this very moment begun to run again."""
        node, world = self.node, self.node.world
        is_running = node.is_alive and node.host().is_running
        return is_running and self.postroom.woken.get(node.name) != world.loop.time()


_LIVE = ("ready", "waiting", "claimed")
_OF_THE_SESSION = {"heartbeat_interval", "worker_timeout", "skip_cold_start"}


class Letters:
    """A batch to push.

    Args:
        data: what is pushed.
        pause: seconds to wait before.
        options: of `enqueue_many`.
    """

    def __init__(
        self, data: Sequence[Mapping[str, Any]], pause: float = 0.0, **options: Any
    ) -> None:
        self.data = data
        self.pause = pause
        self.options = options


class Postroom:
    """A queue, the processes on it, and a judge.

    Args:
        world: where.
        trusts_clocks: whether clocks keep their promise; where machines are suspended a handler
            may go on believing, and only what the database accepts counts.
        options: of the queue.
    """

    def __init__(self, world: World, *, trusts_clocks: bool = True, **options: Any) -> None:
        self.world = world
        self.store = RowStore(world)
        self.clerks: list[Clerk] = []
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.woken: dict[str, float] = {}
        self.acknowledged: list[str] = []
        self.lapsed: Counter[str] = Counter()
        """How often each message's claim was ended, of those where it was."""
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
        """What handlers have read."""
        self._pushed: dict[str, float] = {}
        self._done: dict[str, float] = {}
        world.expect(check_messages, check_answers)
        world.watch(self._see)

    def hire(self, name: str, *, is_idle: bool = False) -> Node:
        """Let a process handle messages, or wait to be told so; a restart begins it anew."""
        return self._start(name, lambda clerk: clerk.work(), is_idle=is_idle)

    def send(self, name: str, letters: Callable[[], Iterator["Letters"]]) -> Node:
        """Let a process push messages."""
        return self._start(name, lambda clerk: clerk.push(letters))

    def write(self, kind: str, seconds: float = 0.0, times: int = 0) -> Mapping[str, Any]:
        """Give a message to push."""
        number = next(self._numbers)
        letter = {"kind": kind, "seconds": seconds, "times": times, "number": number}
        self._sent[number] = letter
        return letter

    def damage(self, name: str, payload: str) -> None:
        """Overwrite a payload behind the library's back."""

        def work(connection: sqlite3.Connection) -> None:
            row = (payload, name)
            connection.execute("UPDATE jobsync_message SET payload = ? WHERE id = ?", row)

        self.store.rows.commit(work)

    def kill(self, node: Node) -> None:
        """Kill a process, as its handler may; somebody starts it again after a while."""
        node.kill()
        self.world.start(self._revive(node))

    def clerk(self, name: str) -> Clerk:
        """Give the latest process of a name."""
        return next(clerk for clerk in reversed(self.clerks) if clerk.node.name == name)

    async def until_drained(self, seconds: float) -> None:
        """Wait until nothing is left to handle.

        Raises:
            InvariantBroken: there is, after so many seconds.
        """
        give_up = self.world.loop.time() + seconds
        while left := self.backlog:
            if self.world.loop.time() >= give_up:
                fail("QL3", f"{left} messages left after {seconds:g} s")
            await asyncio.sleep(1)

    @property
    def handled_now(self) -> list[tuple[str, int]]:
        """The messages and deliveries whose handlers run."""
        return [key for clerk in self.clerks if clerk.node.is_alive for key in clerk.handling]

    @property
    def backlog(self) -> int:
        """How many messages are still to be handled."""
        return len(self._live)

    def begin(self, clerk: Clerk, task: Any, context: Context) -> None:
        """Judge a handler that begins."""
        world, row = self.world, self._rows.get(context.id)
        world.note(clerk.node.name, "begin", id=context.id, epoch=context.epoch)
        self.begun[context.id] += 1
        self._read[context.id] = dict(task)
        if self._sent.get(task["number"], {}).items() - dict(task).items():
            found = f"{context.id}: handled, and not what was sent: {task}"
            world.violations.append(Violation("Q2", found))
        is_claimed = row is not None and row["state"] == "claimed"
        stands = is_claimed and row is not None and row["deliveries"] == context.epoch
        if not stands and self._trusts_clocks and clerk.is_awake:
            found = f"{context.id}: a handler began without a claim: {row}"
            world.violations.append(Violation("Q14", found))

    def end(self, clerk: Clerk, context: Context) -> None:
        """Take note of a handler that has come to its end."""
        self.ended[context.id] += 1
        self.world.note(clerk.node.name, "end", id=context.id, epoch=context.epoch)

    def hear_of_completion(self, event: MessageCompleted) -> None:
        """Judge that a message is completed of which a worker says so."""
        state = self._rows[event.message_id]["state"]
        if state not in ("completed", "gone"):
            found = f"{event.message_id}: told completed, is {state}"
            self.world.violations.append(Violation("Q15", found))

    def expect_drained(self) -> None:
        """Judge the end: everything handled, and nothing handled by nobody."""
        self.world.violations += check_drained(self.world.history)
        self.world.violations += [
            Violation("Q1", f"{name}: completed, and no handler came to its end")
            for name, row in self._rows.items()
            if row["state"] == "completed" and not self.ended[name]
        ]

    def count_states(self) -> dict[str, int]:
        """Count the messages in each state."""
        return dict(Counter(row["state"] for row in self._rows.values()))

    def kinds_in(self, state: str) -> list[str]:
        """Give what the messages in a state were told to do."""
        return [
            self._read[name]["kind"] for name, row in self._rows.items() if row["state"] == state
        ]

    def expect_handled_once(self) -> None:
        """Judge that no handler ran twice."""
        twice = {name: count for name, count in self.begun.items() if count > 1}
        require(not twice, "Q16", f"begun more than once: {twice}")

    def expect_no_attempt_lost(self, but: Sequence[str] = ()) -> None:
        """Judge that every message, but for some kinds, was completed with its first attempt."""
        for name, row in self._rows.items():
            if self._read[name]["kind"] not in but:
                spent = row["deliveries"] - row["returned"]
                require((row["state"], spent) == ("completed", 1), "Q6", f"{name}: {row}")

    def expect_soon(self, letters: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Judge that these messages came to their end within so many seconds of their push."""
        wanted = {letter["number"] for letter in letters}
        late = {
            name: self._done[name] - pushed
            for name, pushed in self._pushed.items()
            if self._read[name]["number"] in wanted and self._done[name] - pushed > seconds
        }
        require(not late, "QL1", f"took longer than {seconds:g} s: {late}")

    def _start(self, name: str, live: Callable[[Clerk], Any], *, is_idle: bool = False) -> Node:
        node = self.world.node(name, rate=self.world.dice.uniform(0.951, 1.049))

        async def run(node: Node) -> None:
            """Run, and be started again by whoever looks after processes."""
            while True:
                clerk = Clerk(self, node, self._options, is_idle=is_idle)
                self.clerks.append(clerk)
                try:
                    await live(clerk)
                except JobsyncError as error:
                    self.world.note(node.name, "gave up", error=str(error))
                    if is_defect(error):
                        self.world.violations.append(Violation("crash", repr(error)))
                    elif isinstance(error, Invalid):
                        found = f"{node.name} died of a request of its own: {error}"
                        self.world.violations.append(Violation("A1", found))
                await node.clock.sleep(BEAT)

        node.start(run)
        return node

    async def _revive(self, node: Node) -> None:
        await asyncio.sleep(self.world.dice.uniform(0, 10))
        if self.world.nodes[node.name] is node:
            node.restart()

    def _see(self, done: Occurrence) -> Iterator[Violation]:
        if done.what in ("resume", "unblock"):
            self.woken[done.node] = done.at
        if done.what != "row":
            return
        facts = done.details
        before = self._rows.get(facts["id"])
        self._rows[facts["id"]] = facts
        self._keep_count(facts, is_new=before is None, at=done.at)
        if before is None or before["state"] != "claimed":
            return
        if facts.get("claim") != before["claim"] and facts.get("trail") == before["trail"]:
            self.lapsed[facts["id"]] += 1
            yield from self._find_believers(facts["id"], before["deliveries"])

    def _keep_count(self, facts: Mapping[str, Any], *, is_new: bool, at: float) -> None:
        name, state = facts["id"], facts["state"]
        if state in _LIVE:
            self._live.add(name)
        else:
            self._live.discard(name)
        if is_new:
            self._pushed[name] = at
        elif state in ("completed", "cancelled", "dead"):
            self._done[name] = at

    def _find_believers(self, name: str, deliveries: int) -> Iterator[Violation]:
        """Give the processes that go on handling a message whose claim was ended."""
        for clerk in self.clerks if self._trusts_clocks else ():
            context = clerk.handling.get((name, deliveries))
            if context is None or context.lost or context.is_settled:
                continue
            if clerk.is_awake:
                found = f"{name}: its claim ended while {clerk.node.name} handled it"
                yield Violation("Q14", found)
