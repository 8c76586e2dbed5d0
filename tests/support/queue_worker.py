"""A process that enqueues messages, or handles them, and reports it.

Run by `queue_processes`. SIGTERM makes it stop in good order.
"""

import asyncio
import os
import signal
import sqlite3
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal

import msgspec
from worker_protocol import FactWriter, WorkerOptions, read_options

from jobsync import Context, Database, Document, Event, OutcomeUnknown, QueuePlugin, Unavailable
from jobsync.database.enqueue_calls import EnqueueOptions

__all__ = ["Mode", "QueueOptions"]

Mode = Literal["push", "handle"]
EVENTS = ("message-lost", "message-returned", "message-retry", "message-recovered", "message-dead")


class QueueOptions(WorkerOptions, frozen=True, kw_only=True):
    """The options of a producer or a worker."""

    mode: Mode
    settings: dict[str, Any]
    """Of the queue."""
    messages: int = 0
    """How many to push."""
    groups: int = 0
    """Into how many groups of its own a producer pushes; 0 for none."""
    tasks: tuple[str, ...] = ()
    """The tasks that a worker knows, or whose messages a producer pushes; none for plain ones."""
    flaky: int = 0
    """Every so many-th message fails at its first attempt; 0 for none."""
    seconds: float = 0.0
    """How long handling takes."""
    has_effects: bool = False
    """Whether the handler inserts the message's id into the table `effects`, in a transaction."""


class QueueWorker:
    """The producer or worker of this process."""

    def __init__(self, options: QueueOptions) -> None:
        self._options = options
        self._report = FactWriter(options.facts, options.name).report
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Push everything, or handle messages until told to stop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        async with AsyncExitStack() as stack:
            queue = await self._connect(stack)
            self._report("joined", worker=queue.worker_id)
            if self._options.mode == "push":
                await self._push(queue)
            else:
                await self._stopping.wait()
        self._report("left")

    async def _connect(self, stack: AsyncExitStack) -> QueuePlugin:
        """Connect; retry when the store does not answer, as a process manager would."""
        while True:
            is_plain = self._options.mode == "handle" and not self._options.tasks
            handler = self._handle if is_plain else None
            queue = QueuePlugin(resource="tasks", on_message=handler, **self._options.settings)
            for task in self._options.tasks if self._options.mode == "handle" else ():
                queue.task(name=task)(self._run_task)
            for name in EVENTS:
                queue.on(f"plg:queue:{name}", self._report_event)
            try:
                await stack.enter_async_context(Database(self._options.url, plugins=[queue]))
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(0.1)
                continue
            return queue

    def _report_event(self, event: Event) -> None:
        details = msgspec.to_builtins(event)
        self._report(event.name.rpartition(":")[2], id=details.pop("message_id"), **details)

    async def _push(self, queue: QueuePlugin) -> None:
        """Push all, in batches of one to twenty; push again what surely did not arrive."""
        left = list(range(self._options.messages))
        size = 1
        while left and not self._stopping.is_set():
            batch, size = left[:size], size % 20 + 1
            data = [self._build(n) for n in batch]
            tasks = self._options.tasks
            options: EnqueueOptions = {"task": tasks[size % len(tasks)]} if tasks else {}
            if self._options.groups:
                options["group"] = self._find_group
            try:
                ids = await queue.enqueue_many(data, **options)
            except Unavailable:
                await asyncio.sleep(0.1)
                continue
            except OutcomeUnknown:
                self._report("unknown", numbers=batch)
            else:
                self._report("acknowledged", ids=dict(zip(ids, batch, strict=True)))
            left = left[len(batch) :]
            await asyncio.sleep(0)

    def _build(self, n: int) -> dict[str, Any]:
        flaky = self._options.flaky
        kind = "flaky" if flaky and n % flaky == 0 else "plain"
        return {"n": n, "by": self._options.name, "kind": kind}

    def _find_group(self, message: Mapping[str, Any]) -> str:
        return f"{self._options.name}-{message['n'] % self._options.groups}"

    async def _handle(self, message: Document, context: Context) -> None:
        await self._run_task(context, message.n, message.by, message.kind)

    async def _run_task(self, context: Context, n: int, by: str, kind: str) -> None:
        delivery = {"id": context.id, "epoch": context.epoch, "attempt": context.attempt}
        self._report("begun", kind=kind, n=n, by=by, **delivery)
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("boom")
            case "flaky" if context.attempt == 1:
                raise ValueError("at first")
            case "hang":
                await asyncio.sleep(3600)
            case _ if self._options.has_effects:
                await self._write_effect(context)
            case _:
                await asyncio.sleep(self._options.seconds)
        self._report("ended", **delivery)

    async def _write_effect(self, context: Context) -> None:
        async with context.transaction() as connection:
            if isinstance(connection, sqlite3.Connection):
                connection.execute("INSERT INTO effects VALUES (?)", [context.id])
            else:
                await connection.execute("INSERT INTO effects VALUES (%s)", [context.id])
            await asyncio.sleep(self._options.seconds)


if __name__ == "__main__":
    asyncio.run(QueueWorker(read_options(QueueOptions)).run())
