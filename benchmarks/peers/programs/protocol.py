"""What a program of a peer does when it is asked, and how it answers.

    PROGRAM ROLE URL COUNT VARIANT

Each role answers with lines of JSON on standard output:

- `prepare`: create the tables.
- `fill`: enqueue COUNT messages in batches of 1,000, and answer how long that took.
- `singles`: enqueue COUNT messages one by one, by 100 callers at once, and answer how long.
- `drain`: handle COUNT messages that are there, and answer the time from the start of the first
  handler until the last message is settled in the database.
- `work`: answer when each handler starts, until standard input ends.
- `push`: enqueue a message for each line of standard input, and answer when the call began.

This file runs in the environments of all peers: it imports only what comes with Python. Times are
those of the clock that all processes of a machine share.
"""

import asyncio
import contextlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any

__all__ = ["Message", "OnStart", "PeerProgram"]

BATCH = 1_000
CALLERS = 100
_POLL = 0.001
"""Seconds between looks whether the last settlement has arrived."""

Message = dict[str, Any]
OnStart = Callable[[], None]


class PeerProgram(ABC):
    """A queue that is compared.

    Args:
        url: its database.
        variant: how it is configured, if there is more than one way.
    """

    def __init__(self, url: str, variant: str) -> None:
        self.url = url
        self.variant = variant

    @abstractmethod
    async def prepare(self) -> None:
        """Create the tables."""

    @abstractmethod
    def opened(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Connect."""

    @abstractmethod
    async def enqueue_many(self, messages: list[Message]) -> None:
        """Enqueue a batch in the best way that the peer has."""

    @abstractmethod
    async def enqueue(self, message: Message) -> None:
        """Enqueue one message."""

    @abstractmethod
    async def work(self, on_start: OnStart) -> None:
        """Handle messages until cancelled. Each handler calls `on_start`, and does nothing else."""

    @abstractmethod
    async def is_drained(self, count: int) -> bool:
        """Whether all messages are settled, which were `count`."""

    @classmethod
    def main(cls) -> None:
        """Do what the command line asks for."""
        role, url, count, variant = sys.argv[1:5]
        asyncio.run(_ROLES[role](cls(url, variant), int(count)))


class _Stopwatch:
    """The time and the CPU time of this process since `start`."""

    def __init__(self) -> None:
        self._started = self._cpu = 0.0

    def start(self) -> None:
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def answer(self) -> None:
        seconds = time.perf_counter() - self._started
        _answer({"seconds": seconds, "cpu": time.process_time() - self._cpu})


async def _prepare(peer: PeerProgram, _: int) -> None:
    await peer.prepare()
    _answer({})


async def _fill(peer: PeerProgram, count: int) -> None:
    messages = [_build_message(number) for number in range(count)]
    watch = _Stopwatch()
    async with peer.opened():
        watch.start()
        for start in range(0, count, BATCH):
            await peer.enqueue_many(messages[start : start + BATCH])
        watch.answer()


async def _singles(peer: PeerProgram, count: int) -> None:
    watch = _Stopwatch()

    async def call(caller: int) -> None:
        for number in range(caller, count, CALLERS):
            await peer.enqueue(_build_message(number))

    async with peer.opened():
        # Connections are opened on demand: not part of the measurement.
        await asyncio.gather(*(peer.enqueue(_build_message(-1)) for _ in range(CALLERS)))
        watch.start()
        await asyncio.gather(*(call(caller) for caller in range(CALLERS)))
        watch.answer()


async def _drain(peer: PeerProgram, count: int) -> None:
    loop, watch = asyncio.get_running_loop(), _Stopwatch()
    have_started = asyncio.Event()
    started = 0

    def on_start() -> None:
        nonlocal started
        started += 1
        if started == 1:
            watch.start()
        if started == count:
            loop.call_soon_threadsafe(have_started.set)

    async with peer.opened(), _working(peer, on_start):
        await have_started.wait()
        while not await peer.is_drained(count):  # noqa: ASYNC110 - no peer says so
            await asyncio.sleep(_POLL)
        watch.answer()
    assert started == count, f"{started} handlers started for {count} messages"


async def _work(peer: PeerProgram, _: int) -> None:
    async with peer.opened(), _working(peer, lambda: _answer({"at": time.monotonic()})):
        await asyncio.to_thread(sys.stdin.read)


async def _push(peer: PeerProgram, _: int) -> None:
    async with peer.opened():
        _answer({})
        while await asyncio.to_thread(sys.stdin.readline):
            began = time.monotonic()
            await peer.enqueue(_build_message(0))
            _answer({"at": began})


@contextlib.asynccontextmanager
async def _working(peer: PeerProgram, on_start: OnStart) -> AsyncIterator[None]:
    worker = asyncio.create_task(peer.work(on_start))
    worker.add_done_callback(_raise_failure)
    try:
        yield
    finally:
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker


def _raise_failure(worker: "asyncio.Task[None]") -> None:
    """End the program if its worker fails: nobody else would notice."""
    if not worker.cancelled() and (error := worker.exception()):
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _build_message(number: int) -> Message:
    return {"to": f"user-{number}@example.com", "retry": False}


def _answer(answer: dict[str, float]) -> None:
    print(json.dumps(answer), flush=True)


_ROLES = {
    "prepare": _prepare,
    "fill": _fill,
    "singles": _singles,
    "drain": _drain,
    "work": _work,
    "push": _push,
}
