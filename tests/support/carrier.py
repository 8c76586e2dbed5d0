"""A process that pushes messages, or handles them, and tells of it.

Each fact is a line in a file that all processes append to, dated by the clock that all
processes of a machine share; what was told before a SIGKILL is there after it. SIGTERM lets it
stop in good order. Run by `depot`.
"""

import asyncio
import json
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from typing import Any, Literal

import msgspec

from jobsync import Context, Database, Document, Event, OutcomeUnknown, QueuePlugin, Unavailable

__all__ = ["Carrier", "Orders", "Role"]

Role = Literal["push", "handle"]
TOLD = ("message-lost", "message-returned", "message-retry", "message-recovered", "message-dead")


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told at its start."""

    url: str
    name: str
    ledger: str
    role: Role
    messages: int = 0
    """How many to push."""
    seconds: float = 0.0
    """What handling takes."""
    options: dict[str, Any] = {}
    """Of the queue."""


class Carrier:
    """One life of the process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._ledger = os.open(orders.ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stopping = asyncio.Event()

    def say(self, what: str, **facts: object) -> None:
        """Tell a fact, at once and for good."""
        line = {"at": time.monotonic(), "who": self._orders.name, "what": what, **facts}
        os.write(self._ledger, json.dumps(line).encode() + b"\n")

    async def live(self) -> None:
        """Do what the orders say, until it is done or told to stop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        async with AsyncExitStack() as stack:
            queue = await self._stand(stack)
            self.say("stands", worker=queue.worker_id)
            if self._orders.role == "push":
                await self._push(queue)
            else:
                await self._stopping.wait()
        self.say("ends")

    async def _stand(self, stack: AsyncExitStack) -> QueuePlugin:
        """Connect; a store that does not answer is tried again, as a process manager would."""
        while True:
            handler = self._handle if self._orders.role == "handle" else None
            queue = QueuePlugin(resource="tasks", on_message=handler, **self._orders.options)
            for fact in TOLD:
                queue.on(f"plg:queue:{fact}", self._hear)
            try:
                await stack.enter_async_context(Database(self._orders.url, plugins=[queue]))
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(0.1)
                continue
            return queue

    def _hear(self, event: Event) -> None:
        facts = msgspec.to_builtins(event)
        self.say(event.name.rpartition(":")[2], id=facts.pop("message_id"), **facts)

    async def _push(self, queue: QueuePlugin) -> None:
        """Push all, in batches of one to twenty; what did not arrive for sure is pushed again."""
        left = list(range(self._orders.messages))
        size = 1
        while left and not self._stopping.is_set():
            batch, size = left[:size], size % 20 + 1
            data = [{"n": n, "by": self._orders.name, "kind": "plain"} for n in batch]
            try:
                ids = await queue.enqueue_many(data)
            except Unavailable:
                await asyncio.sleep(0.1)
                continue
            except OutcomeUnknown:
                self.say("unknown", numbers=batch)
            else:
                self.say("acknowledged", ids=dict(zip(ids, batch, strict=True)))
            left = left[len(batch) :]
            await asyncio.sleep(0)

    async def _handle(self, task: Document, context: Context) -> None:
        about = {"id": context.id, "epoch": context.epoch, "attempt": context.attempt}
        self.say("begins", kind=task.kind, n=task.n, by=task.by, **about)
        match task.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("boom")
            case "hang":
                await asyncio.sleep(3600)
            case _:
                await asyncio.sleep(self._orders.seconds)
        self.say("ends it", **about)


if __name__ == "__main__":
    asyncio.run(Carrier(msgspec.json.decode(sys.argv[1], type=Orders)).live())
