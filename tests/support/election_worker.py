"""A candidate as a process of its own: it coordinates roles while elected, and reports all of it.

While elected it makes fenced writes; each counts up from the one that it replaces. When a term
is over it goes on trying, like a worker that has not noticed the end, until the store refuses it.

Run by `election_processes`. SIGTERM makes it leave.
"""

import asyncio
import logging
import os
import signal
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from worker_protocol import FactWriter, WorkerOptions, read_options, read_orders

from jobsync import Components
from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.membership import Membership
from jobsync.coordination.term import Term
from jobsync.errors import Fenced, JobsyncError, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.events import Event

__all__ = ["REPORT_INTERVAL", "CandidateOptions", "now", "silence_logs"]

REPORT_INTERVAL = 0.1
"""Seconds between two reports of what a worker believes."""

now = time.monotonic


class CandidateOptions(WorkerOptions, frozen=True, kw_only=True):
    """The options of a candidate."""

    roles: tuple[str, ...]
    settings: dict[str, Any]
    """Of its membership."""
    shutdown: str = ""
    """How it ends on SIGTERM, if it knows several ways."""


class Candidate:
    """The candidate of this process."""

    def __init__(self, options: CandidateOptions) -> None:
        self._options = options
        self._report = FactWriter(options.facts, options.name).report
        self._components = Components.system()
        self._components.events.on("*", self._report_event)
        self._coordinators: dict[str, Coordinator] = {}
        self._ended_terms: dict[str, Term] = {}
        self._leaving = asyncio.Event()
        self._membership: Membership

    async def run(self) -> None:
        """Be a candidate, and coordinate when elected, until told to leave."""
        orders = await read_orders()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leaving.set)
        self._report("started")
        await orders.readline()
        self._membership = await self._join()
        for number, role in enumerate(self._options.roles):
            # One role seals its key at the start of a term, the other at its first write.
            governs = [_singleton(role)] if number == 0 else []
            self._coordinators[role] = await self._membership.coordinate(
                role, self._hooks(role), governs=governs
            )
        self._report("joined", worker=self._membership.worker_id)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._obey(orders)),
                group.create_task(self._report_beliefs()),
                group.create_task(self._write_in_ended_terms()),
            ]
            await self._leaving.wait()
            for task in tasks:
                task.cancel()
        self._report("leaves")
        await self._membership.leave()
        self._report("left")

    async def _join(self) -> Membership:
        while True:
            try:
                return await Membership.join(
                    self._options.url, self._components, **self._options.settings
                )
            except Unavailable as error:
                self._report("unavailable", error=str(error))

    def _report_event(self, event: Event) -> None:
        self._report(event.name, **msgspec.to_builtins(event))

    async def _report_beliefs(self) -> None:
        """Report again and again who coordinates, as far as this process knows."""
        while True:
            asked_at = now()
            terms = {role: each.term for role, each in self._coordinators.items()}
            epochs = {role: term and term.epoch for role, term in terms.items()}
            tasks = [each._task for each in self._coordinators.values()]
            self._report(
                "believes",
                asked_at=asked_at,
                incarnation=self._membership.incarnation,
                epochs=epochs,
                dead_tasks=sum(task is None or task.done() for task in tasks),
            )
            await asyncio.sleep(REPORT_INTERVAL)

    def _hooks(self, role: str) -> Hooks:
        async def become(term: Term) -> None:
            self._report("gained", role=role, epoch=term.epoch)

        async def work_once(term: Term) -> None:
            await self._write(role, term)

        async def stop(term: Term) -> None:
            self._report("lost", role=role, epoch=term.epoch)
            # It keeps all that it remembers, except that it has ended.
            term._lasts = lambda: True
            self._ended_terms[role] = term

        return Hooks(on_become=become, work=work_once, on_stop=stop)

    async def _write(self, role: str, term: Term) -> bool:
        """Write a singleton once; return whether the store has refused the term."""
        key = _singleton(role)
        try:
            # What the term wrote last, however stale; else what is stored.
            sealed = term._sealed.get(key)
            before = (await term.get(key) if sealed is None else sealed.value) or {"count": 0}
            write = {
                "role": role,
                "epoch": term.epoch,
                "by": self._membership.worker_id,
                "count": before["count"] + 1,
            }
            # Reported first: if the process is killed, nobody knows the outcome.
            self._report("writes", **write)
            await term.put(key, write)
            self._report("wrote", **write)
        except Fenced as fenced:
            self._report(
                "refused", role=role, epoch=term.epoch, by_store=fenced.current is not None
            )
            return True
        except (Unavailable, OutcomeUnknown, Misconfigured) as error:
            self._report("unavailable", error=str(error))
        return False

    async def _write_in_ended_terms(self) -> None:
        """Write as if ended terms still lasted."""
        while True:
            for role, term in list(self._ended_terms.items()):
                if await self._write(role, term) and self._ended_terms.get(role) is term:
                    del self._ended_terms[role]
            await asyncio.sleep(REPORT_INTERVAL)

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        """Carry out orders, one after the other."""
        while line := await orders.readline():
            order, *arguments = line.decode().split()
            actions: dict[str, Callable[..., Awaitable[None]]] = {
                "block": self._block,
                "hold-gil": self._hold_gil,
                "fork": self._fork,
            }
            self._report("order begun", order=order)
            await actions[order](*map(float, arguments))
            self._report("order done", order=order)

    async def _block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the fault itself

    async def _hold_gil(self, seconds: float) -> None:
        """Compute in C without releasing the GIL, for at least that long in one call."""
        size, took = 1_000_000, 0.0
        while took < seconds:
            begun = now()
            sum(range(size))
            took, size = now() - begun, 2 * size

    async def _fork(self) -> None:
        """Fork; the child reports what it can do with what it inherited."""
        with warnings.catch_warnings():
            # Python 3.12 and later warn of forks while threads run, which is the point here.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            # The child must never go on as a second copy of this process.
            try:
                asyncio.run(self._run_child())
            except BaseException as error:  # noqa: BLE001 - reported, and the parent's test fails
                self._report("child failed", error=repr(error))
            finally:
                os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)

    async def _run_child(self) -> None:
        for role, coordinator in self._coordinators.items():
            inherited = coordinator._term
            assert inherited is not None
            self._report(
                "child inherits",
                is_coordinator=coordinator.is_coordinator,
                has_term=coordinator.term is not None,
                is_trusted=self._membership.is_trusted,
                put=await _catch_error(inherited.put(_singleton(role), "stolen")),
                fresh_put=await _catch_error(inherited.put("single/fresh", "stolen")),
                coordinate=await _catch_error(self._membership.coordinate("more")),
            )
        try:
            async with asyncio.timeout(30):
                joined = await Membership.join(self._options.url, **self._options.settings)
                peers = [peer.incarnation for peer in await joined.members()]
                self._report("child joined", incarnation=joined.incarnation, peers=peers)
                await joined.leave()
        except Misconfigured as error:
            self._report("child refused", error=str(error))


async def _catch_error(call: Awaitable[object]) -> str:
    """Return the name of the error that a call raises."""
    try:
        await call
    except JobsyncError as error:
        return type(error).__name__
    return "none"


def _singleton(role: str) -> str:
    return f"single/{role}"


def silence_logs() -> None:
    """Keep from standard error what is reported as a fact; the rest is an unexpected complaint."""
    logging.getLogger("jobsync").addHandler(logging.NullHandler())
    # Work that is cancelled with its term closes its connection; the pool would warn of that.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


if __name__ == "__main__":
    silence_logs()
    asyncio.run(Candidate(read_options(CandidateOptions)).run())
