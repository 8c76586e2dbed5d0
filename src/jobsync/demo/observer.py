"""What the store says about the demo: who leads, what waits, what was done."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from jobsync.core.messages import LIVE
from jobsync.database.database import Database
from jobsync.demo import worker
from jobsync.demo.fleet import DemoFleet
from jobsync.errors import NotFound, OutcomeUnknown, Unavailable
from jobsync.queue.backend import MessageInfo
from jobsync.queue.opening import open_backend
from jobsync.scheduler.history import HistoryEntry
from jobsync.status.jobs import read_fleet_status
from jobsync.status.sessions import read_cluster_status

__all__ = ["DemoObserver", "DemoSnapshot"]

_PAGE = 1000
_ROLE = "scheduler"
"""The role whose leader is shown. All roles have the same one, unless a process is frozen."""


class DemoSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The demo at one moment."""

    leader: str | None
    """The worker that leads, by its name in the demo."""
    epoch: int
    states: Mapping[str, str]
    """The state of each worker's session."""
    tokens: Mapping[str, int]
    """How many tokens each worker owns."""
    waiting: int
    done: int
    firings: int
    records: int
    """How many records have not expired."""


class DemoObserver:
    """Reads the store, and enqueues. It is no worker and no candidate. Use it with `async with`.

    Attributes:
        sent: the ids of the mails whose enqueue was acknowledged.
        next_number: the number of the next mail.
        added: how many records were added.
    """

    def __init__(self, url: str, fleet: DemoFleet) -> None:
        self.sent: list[str] = []
        self.next_number = 0
        self.added = 0
        self._fleet = fleet
        self._queue = worker.build_queue(enable_coordinator=False)
        self._scheduler = worker.build_scheduler(enable_coordinator=False)
        self._database = Database(url, plugins=[self._queue, self._scheduler])
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._database)
        database = self._database
        self._backend = open_backend(database.store, self._queue.queue, database.components)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def send(self, numbers: Sequence[int]) -> None:
        """Enqueue mails. Those that may or may not have arrived are not counted."""
        data: list[dict[str, Any]] = [{"number": number} for number in numbers]
        try:
            self.sent += await self._queue.enqueue_many(data, task="send")
        except Unavailable:
            return
        except OutcomeUnknown:
            self.next_number += len(numbers)
            return
        self.next_number += len(numbers)

    async def add_record(self, seconds: float) -> None:
        """Add a record that expires after so many seconds."""
        now = self._database.components.clock.wall().seconds
        sessions = self._database.resources[worker.SESSIONS]
        await sessions.insert({"user": "ann", "expires_at": now + seconds})
        self.added += 1

    async def read(self) -> DemoSnapshot:
        """Read the store."""
        store, components = self._database.store, self._database.components
        cluster = await read_cluster_status(store, components)
        role = next((each for each in cluster.roles if each.work == _ROLE), None)
        names = {
            session.worker_id: found.name
            for session in cluster.sessions
            if (found := self._fleet.find(session.facts.get("pid"))) is not None
        }
        states = {
            names[session.worker_id]: session.state
            for session in cluster.sessions
            if session.worker_id in names and any(_ROLE in work for work in session.works)
        }
        leader = names.get(role.leader or "") if role is not None else None
        counts = await self._backend.count()
        jobs = {job.name: job for job in await self._scheduler.list_jobs()}
        return DemoSnapshot(
            leader=leader if role is not None and role.state == "led" else None,
            epoch=0 if role is None else role.epoch,
            states=states,
            tokens=await self._read_tokens(),
            waiting=sum(counts.get(state, 0) for state in LIVE),
            done=counts.get("completed", 0),
            firings=jobs[worker.CLOCK_JOB].successes if worker.CLOCK_JOB in jobs else 0,
            records=await self._count_records(),
        )

    async def _count_records(self) -> int:
        """Count the records that have not expired; the first worker creates their resource."""
        resources = self._database.resources
        if worker.SESSIONS not in resources:
            await self._database.list_resources()
        return await resources[worker.SESSIONS].count() if worker.SESSIONS in resources else 0

    async def stop_clock(self) -> None:
        """Disable the scheduled job: its history is complete."""
        await self._scheduler.disable_job(worker.CLOCK_JOB, "the demo is over")

    async def read_finished(self) -> list[MessageInfo]:
        """Return all completed messages."""
        found: list[MessageInfo] = []
        after = ""
        while page := await self._queue.browse("completed", after=after, limit=_PAGE):
            found += page
            after = page[-1].cursor
        return found

    async def read_completions(self) -> list[str]:
        """Return the messages of all completions that the store has accepted, as they came."""
        found: list[str] = []
        after = ""
        while page := await self._database.store.read(worker.COMPLETIONS, after=after, limit=_PAGE):
            found += [str(entry.value) for entry in page]
            after = page[-1].id
        return found

    async def read_firings(self) -> list[HistoryEntry]:
        """Return the history of the scheduled job, the oldest first."""
        found: list[HistoryEntry] = []
        after = ""
        while page := await self._scheduler.job_history(worker.CLOCK_JOB, after=after, limit=_PAGE):
            found += page
            after = page[-1].cursor
        return found[::-1]

    async def _read_tokens(self) -> dict[str, int]:
        try:
            fleet = await read_fleet_status(
                self._database.store, self._database.components, worker.FLEET
            )
        except NotFound:
            # The first worker has not joined yet.
            return {}
        return {share.node: share.tokens for share in fleet.shares()}
