"""A worker as a process of its own: it stands for works, leads while elected, and tells of it.

Each fact is a line in a file, dated by the clock that all processes of a machine share; what
was told before a SIGKILL is there after it. While elected the worker makes fenced writes, each
of which counts up from the one that it replaces. When a term is over it goes on trying as one
that has not heard of the end, until the store refuses it.

Run by `electorate`, which says on standard input what to do; SIGTERM lets it leave.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from jobsync import Components
from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.membership import Membership
from jobsync.coordination.term import Term
from jobsync.errors import Fenced, JobsyncError, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.events import Event

__all__ = ["Candidate", "Orders", "Speaker", "listen", "now"]

_GLANCE = 0.1
_TROUBLE = (Unavailable, OutcomeUnknown, Misconfigured)

now = time.monotonic


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate is told at its start."""

    url: str
    words: str
    """The file that it writes its facts to."""
    works: tuple[str, ...]
    options: dict[str, Any]
    """Of its membership."""
    manner: str = ""
    """How it ends when told to, if it knows several."""


class Speaker:
    """Tells facts, as lines of a file."""

    def __init__(self, path: str) -> None:
        self._words = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, what: str, **facts: object) -> None:
        """Tell a fact, at once and for good."""
        os.write(self._words, json.dumps({"at": now(), "what": what, **facts}).encode() + b"\n")


class Candidate:
    """One life of the process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.say = Speaker(orders.words).say
        self._components = Components.system()
        self._components.events.on("*", self._hear)
        self._coordinators: dict[str, Coordinator] = {}
        self._over: dict[str, Term] = {}
        self._leaving = asyncio.Event()
        self._membership: Membership

    async def live(self) -> None:
        """Stand and lead until told to leave."""
        orders = await listen()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leaving.set)
        self.say("ready")
        await orders.readline()
        self._membership = await self._join()
        for number, work in enumerate(self._orders.works):
            # One kind of work seals at the start of a term, the other at its first touch.
            governs = [_singleton(work)] if number == 0 else []
            self._coordinators[work] = await self._membership.coordinate(
                work, self._hooks(work), governs=governs
            )
        self.say("stands", worker=self._membership.worker_id)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._obey(orders)),
                group.create_task(self._tell_beliefs()),
                group.create_task(self._go_on_deluded()),
            ]
            await self._leaving.wait()
            for task in tasks:
                task.cancel()
        self.say("leaves")
        await self._membership.leave()
        self.say("left")

    async def _join(self) -> Membership:
        while True:
            try:
                return await Membership.join(
                    self._orders.url, self._components, **self._orders.options
                )
            except Unavailable as error:
                self.say("trouble", error=str(error))

    def _hear(self, event: Event) -> None:
        self.say(event.name, **msgspec.to_builtins(event))

    async def _tell_beliefs(self) -> None:
        """Say again and again who leads, as far as this process believes."""
        while True:
            begun = now()
            terms = {work: each.term for work, each in self._coordinators.items()}
            epochs = {work: term and term.epoch for work, term in terms.items()}
            tasks = [each._task for each in self._coordinators.values()]
            self.say(
                "believes",
                begun=begun,
                incarnation=self._membership.incarnation,
                epochs=epochs,
                dead_tasks=sum(task is None or task.done() for task in tasks),
            )
            await asyncio.sleep(_GLANCE)

    def _hooks(self, work: str) -> Hooks:
        async def become(term: Term) -> None:
            self.say("gained", work=work, epoch=term.epoch)

        async def work_once(term: Term) -> None:
            await self._write(work, term)

        async def stop(term: Term) -> None:
            self.say("lost", work=work, epoch=term.epoch)
            # With all that it remembers, but for its end.
            term._lasts = lambda: True
            self._over[work] = term

        return Hooks(on_become=become, work=work_once, on_stop=stop)

    async def _write(self, work: str, term: Term) -> bool:
        """Write a singleton once; say whether the store has refused the term."""
        key = _singleton(work)
        try:
            # What the term wrote last, be it ever so stale; else what stands.
            sealed = term._sealed.get(key)
            before = (await term.get(key) if sealed is None else sealed.value) or {"count": 0}
            facts = {
                "work": work,
                "epoch": term.epoch,
                "by": self._membership.worker_id,
                "count": before["count"] + 1,
            }
            # Told before, because nobody knows what becomes of it when the process is killed.
            self.say("writes", **facts)
            await term.put(key, facts)
            self.say("wrote", **facts)
        except Fenced as fenced:
            self.say("refused", work=work, epoch=term.epoch, by_store=fenced.current is not None)
            return True
        except _TROUBLE as error:
            self.say("trouble", error=str(error))
        return False

    async def _go_on_deluded(self) -> None:
        """Write as if terms were not over."""
        while True:
            for work, term in list(self._over.items()):
                if await self._write(work, term) and self._over.get(work) is term:
                    del self._over[work]
            await asyncio.sleep(_GLANCE)

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        """Do what is said, one thing after the other."""
        while line := await orders.readline():
            what, *arguments = line.decode().split()
            doing: dict[str, Callable[..., Awaitable[None]]] = {
                "block": self._block,
                "hold-gil": self._hold_gil,
                "fork": self._fork,
            }
            self.say("begins", order=what)
            await doing[what](*map(float, arguments))
            self.say("did", order=what)

    async def _block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the fault itself

    async def _hold_gil(self, seconds: float) -> None:
        """Compute in C, without letting any other thread run, at least that long in one call."""
        size, took = 1_000_000, 0.0
        while took < seconds:
            begun = now()
            sum(range(size))
            took, size = now() - begun, 2 * size

    async def _fork(self) -> None:
        """Fork, and let the child tell what it can do with what it inherited."""
        child = os.fork()
        if child == 0:
            # Whatever happens, the child must not go on as a second copy of this process.
            try:
                asyncio.run(self._live_as_child())
            except BaseException as error:  # noqa: BLE001 - told, and the parent's test fails
                self.say("child failed", error=repr(error))
            finally:
                os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)

    async def _live_as_child(self) -> None:
        for work, coordinator in self._coordinators.items():
            inherited = coordinator._term
            assert inherited is not None
            self.say(
                "child inherits",
                is_coordinator=coordinator.is_coordinator,
                has_term=coordinator.term is not None,
                is_trusted=self._membership.is_trusted,
                put=await _name_error(inherited.put(_singleton(work), "stolen")),
                fresh_put=await _name_error(inherited.put("single/fresh", "stolen")),
                coordinate=await _name_error(self._membership.coordinate("more")),
            )
        try:
            async with asyncio.timeout(30):
                joined = await Membership.join(self._orders.url, **self._orders.options)
                peers = [peer.incarnation for peer in await joined.members()]
                self.say("child joined", incarnation=joined.incarnation, peers=peers)
                await joined.leave()
        except Misconfigured as error:
            self.say("child refused", error=str(error))


async def _name_error(call: Awaitable[object]) -> str:
    """Give the name of the error that a call raises."""
    try:
        await call
    except JobsyncError as error:
        return type(error).__name__
    return "none"


def _singleton(work: str) -> str:
    return f"single/{work}"


async def listen() -> asyncio.StreamReader:
    """Read standard input without a thread."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


if __name__ == "__main__":
    # Events are told as facts; what else is logged is a complaint, and belongs on stderr.
    logging.getLogger("jobsync").addHandler(logging.NullHandler())
    # Work that is cancelled with its term closes its connection, of which the pool would warn.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    asyncio.run(Candidate(msgspec.json.decode(sys.argv[1], type=Orders)).live())
