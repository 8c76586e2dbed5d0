"""A simulated fleet of schedulers, whose actions note what they do.

Each process has its own database and `SchedulerPlugin`, as a user's process has. The records are
in a store with a clock, like a database, or in one without, like a bucket. `jobsync.testing`
checks the records and the notes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fleets import BilledStore
from waiting import until

from jobsync.coordination.fleet_clock import MAX_SKEW
from jobsync.errors import JobsyncError
from jobsync.scheduler.context import JobContext
from jobsync.scheduler.plugin import SchedulerPlugin
from jobsync.stores.memory import MemoryStore
from jobsync.testing import CALM, NodeDatabase, Weather
from jobsync.testing.invariants import Violation, is_defect
from jobsync.testing.loop import block
from jobsync.testing.nodes import Machine
from jobsync.testing.schedule_invariants import check_decided, check_firing, check_resumption
from jobsync.testing.world import Node, World

__all__ = ["BEAT", "JOBS", "TIMEOUT", "ScheduleFleet", "SchedulerProcess"]

BEAT, TIMEOUT = 5.0, 15.0
SLACK = 60.0
"""Seconds before the end of a story for which things may still be under way."""

JOBS: Mapping[str, Mapping[str, Any]] = {
    "tick": {"schedule": "* * * * * *", "seconds": 0.3},
    "queue": {"schedule": "*/10 * * * * *", "seconds": 12.0, "overlap": "queue"},
    "allow": {"schedule": "*/10 * * * * *", "seconds": 25.0, "overlap": "allow"},
    "minute": {"schedule": "* * * * *", "seconds": 20.0},
    "all": {"schedule": "*/15 * * * * *", "seconds": 1.0, "misfire": "all", "max_catch_up": 3},
    "timely": {"schedule": "*/20 * * * * *", "seconds": 5.0, "misfire": "skip"},
    "jitter": {"schedule": "*/30 * * * * *", "seconds": 1.0, "jitter": 20.0},
    "fails": {"schedule": "@every 25s", "seconds": 1.0, "fails": 0.5, "retries": 1},
    "hangs": {"schedule": "@every 45s", "seconds": 60.0, "timeout": 4.0},
    "blocks": {"schedule": "@every 50s", "seconds": 3.0, "is_function": True},
}
"""The options of jobs, and what their actions do: how many seconds they take, how often they fail,
and whether they are plain functions."""

_DEEDS = ("seconds", "at_least", "fails", "is_function")


class SchedulerProcess:
    """One simulated process.

    Attributes:
        node: the node that it runs on.
        scheduler: its plugin, once it has started.
    """

    def __init__(
        self,
        fleet: "ScheduleFleet",
        node: Node,
        jobs: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        self.fleet = fleet
        self.node = node
        self.scheduler: SchedulerPlugin | None = None
        self._jobs = jobs
        self._options = options
        self._acting: Counter[str] = Counter()
        """How many attempts of each run are under way."""

    async def work(self) -> None:
        """Fire and run jobs until cancelled, or until the database has failed."""
        fleet, node = self.fleet, self.node
        async with NodeDatabase(node, fleet.store, fleet.weather) as database:
            jobs = {name: self._build_job(name, job) for name, job in self._jobs.items()}
            scheduler = SchedulerPlugin(jobs=jobs, **self._options)
            fleet.note_asked(node)
            await database.use_plugin(scheduler)
            fleet.world.note(node.name, "answered")
            self.scheduler = scheduler
            while True:
                await node.clock.sleep(BEAT)
                # Raises the error that made it fail.
                assert database.store is not None

    @property
    def is_coordinator(self) -> bool:
        """Whether it leads now."""
        is_started = self.node.is_alive and self.scheduler is not None
        return is_started and self.scheduler is not None and self.scheduler.is_coordinator

    def _build_job(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        options = {key: value for key, value in job.items() if key not in _DEEDS}
        return {**options, "action": self._build_action(name, job)}

    def _build_action(self, name: str, job: Mapping[str, Any]) -> Callable[..., Any]:
        seconds, fails = job.get("seconds", 0.1), job.get("fails", 0.0)
        at_least = job.get("at_least", 0.0)
        dice = self.fleet.world.dice

        async def act(_: object, context: JobContext) -> str:
            with self._perform(name, context):
                await self.node.clock.sleep(dice.uniform(at_least, seconds))
                if dice.random() < fails:
                    raise ValueError("as its options demand")
            return context.execution_id

        def act_on_a_thread(_: object, context: JobContext) -> None:
            with self._perform(name, context):
                block(dice.uniform(at_least, seconds))

        # Errors tell where they were raised; a history must not depend on where this file is.
        act.__code__ = act.__code__.replace(co_filename="<action>", co_firstlineno=1)
        return act_on_a_thread if job.get("is_function") else act

    @contextmanager
    def _perform(self, name: str, context: JobContext) -> Iterator[None]:
        """Note an attempt, and check that no other one of its run is under way here."""
        run = context.execution_id
        if run in self._acting:
            found = f"{self.node.name} runs an attempt of {name} while another one runs"
            self.fleet.world.violations.append(Violation("K5", found))
        self._acting[run] += 1
        self._note(name, "begin", context)
        try:
            yield
            self._note(name, "end", context)
        finally:
            self._acting -= Counter([run])

    def _note(self, name: str, what: str, context: JobContext) -> None:
        assert self.scheduler is not None or context.scheduler is not None
        self.fleet.world.note(
            self.node.name,
            what,
            job=name,
            run=context.execution_id,
            attempt=context.attempt,
            session=context.scheduler._get_membership().incarnation,
        )


class ScheduleFleet:
    """Processes with schedulers, and the store that they share.

    Args:
        world: the simulated world.
        has_clock: whether the store has a clock, as a database has; otherwise it is a bucket.
        weather: the faults of all links.
        early: seconds by which a process may misjudge the clock of a store that has one.
        options: for all schedulers.
    """

    def __init__(
        self,
        world: World,
        *,
        has_clock: bool = True,
        weather: Weather = CALM,
        early: float = 0.0,
        **options: Any,
    ) -> None:
        self.world = world
        self.has_clock = has_clock
        kind = MemoryStore if has_clock else BilledStore
        self.store = kind(components=world.components)
        if not has_clock:
            # A machine whose clock is further off does not fire.
            world.largest_skew = MAX_SKEW / 2
        self.weather = weather
        self.processes: list[SchedulerProcess] = []
        self._options = {
            "heartbeat_interval": BEAT,
            "worker_timeout": TIMEOUT,
            "skip_cold_start": True,
            "max_concurrent_jobs": 20,
            "grace": 5.0,
            **options,
        }
        allowed = early if has_clock else MAX_SKEW + 1.0
        world.expect(lambda history: check_firing(history, early=allowed))

    def add(
        self,
        name: str,
        jobs: Mapping[str, Mapping[str, Any]] = JOBS,
        *,
        skew: float = 0.0,
        machine: Machine | None = None,
        **options: Any,
    ) -> Node:
        """Start a process with its own clock; a restart starts it again."""
        rate = self.world.dice.uniform(0.9995, 1.0005)
        node = self.world.node(name, rate=rate, skew=skew, machine=machine)
        chosen = {**self._options, **options}

        async def run(node: Node) -> None:
            """Run; after a failure, start again."""
            while True:
                process = SchedulerProcess(self, node, jobs, chosen)
                self.processes.append(process)
                try:
                    await process.work()
                except JobsyncError as error:
                    self._record_failure(process, error)
                await node.clock.sleep(BEAT)

        node.start(run)
        return node

    def add_all(self, names: str, jobs: Mapping[str, Mapping[str, Any]] = JOBS) -> list[Node]:
        """Start processes that have the same jobs."""
        return [self.add(name, jobs) for name in names]

    def find_process(self, name: str) -> SchedulerProcess:
        """Return the latest process with a name."""
        return next(each for each in reversed(self.processes) if each.node.name == name)

    @property
    def leaders(self) -> list[SchedulerProcess]:
        """The processes that lead now."""
        return [process for process in self.processes if process.is_coordinator]

    @property
    def started(self) -> list[SchedulerProcess]:
        """The processes that live, and whose schedulers have started."""
        return [each for each in self.processes if each.node.is_alive and each.scheduler]

    async def wait_for_leader(self) -> SchedulerProcess:
        """Wait until there is a leader, and return it."""
        await until(lambda: self.leaders, "there is a leader", interval=0.1)
        return self.leaders[0]

    def note_asked(self, node: Node) -> None:
        """Note that a process begins to change schedules, and the earliest time of the change.

        Without a clock of the store, a definition goes by the process's clock, and an operator's
        change by the times of a listing.
        """
        time = self.world.components.clock.wall().seconds
        if not self.has_clock:
            time = min(time, node.clock.wall().seconds)
        self.world.note(node.name, "asked", time=time)

    async def operate(
        self, process: SchedulerProcess, name: str, deed: str, **options: Any
    ) -> None:
        """Change a job from a process, as an operator does; what the store refuses is given up."""
        assert process.scheduler is not None
        if deed == "request":
            # What `jobsync schedules run` does.
            call = process.scheduler._get_parts().operations.request_run
        else:
            call = getattr(process.scheduler, f"{deed}_job")
        self.note_asked(process.node)
        try:
            await process.node.run(call(name, **options))
        except JobsyncError as error:
            self.world.note(process.node.name, "gave up", error=str(error))
        else:
            self.world.note(process.node.name, "answered")

    async def run_by_hand(
        self, process: SchedulerProcess, name: str, patience: float | None = None
    ) -> None:
        """Run a job by hand from a process, whose caller may be cancelled.

        Args:
            process: where it runs.
            name: the job's.
            patience: seconds after which the caller is cancelled.
        """
        assert process.scheduler is not None
        world, node = self.world, process.node
        task = node.run(process.scheduler.run_job(name))
        task.add_done_callback(lambda _: world.note(node.name, "ran by hand", job=name))
        await asyncio.wait([task], timeout=patience)
        if not task.done() and node.is_alive:
            task.cancel()
        elif task.done() and not task.cancelled():
            error = task.exception()
            expected = JobsyncError | TimeoutError | ValueError
            if error is not None and not isinstance(error, expected):
                world.violations.append(Violation("crash", repr(error)))

    async def settle(self, seconds: float = 2 * SLACK) -> None:
        """Wait in calm weather, and check that everything is decided and executed."""
        await asyncio.sleep(seconds)
        self.world.note("", "settled")
        self.world.violations += check_decided(self.world.history, slack=SLACK)

    def expect_resumption(self, since: float, within: float, job: str = "tick") -> None:
        """Check that firing has resumed in time."""
        self.world.violations += check_resumption(
            self.world.history, job, since=since, within=within
        )

    def count_runs(self, job: str) -> int:
        """Count the firing records of a job."""
        keys = {
            each.details["key"]
            for each in self.world.history
            if each.what == "commit" and f"/run/{job}/" in each.details["key"]
        }
        return len([key for key in keys if "-gap-" not in key])

    def count_attempts(self, job: str) -> int:
        """Count the starts of a job's action."""
        return sum(
            each.what == "begin" and each.details["job"] == job for each in self.world.history
        )

    def list_statuses(self, job: str) -> list[str]:
        """Return the latest status of each run of a job."""
        statuses = {
            each.details["key"]: each.details["value"]["status"]
            for each in self.world.history
            if each.what == "commit" and f"/run/{job}/" in each.details["key"]
        }
        return [status for key, status in sorted(statuses.items()) if "-gap-" not in key]

    def list_gaps(self, job: str) -> list[Mapping[str, Any]]:
        """Return the gaps in the history of a job, in the order of their commits."""
        return [
            each.details["value"]
            for each in self.world.history
            if each.what == "commit"
            and f"/run/{job}/" in each.details["key"]
            and "-gap-" in each.details["key"]
        ]

    def _record_failure(self, process: SchedulerProcess, error: JobsyncError) -> None:
        world, node = self.world, process.node
        world.note(node.name, "gave up", error=str(error))
        if is_defect(error):
            world.violations.append(Violation("crash", repr(error)))
        elif process.scheduler is not None:
            found = f"{node.name} has failed after its start: {error!r}"
            world.violations.append(Violation("A1", found))
