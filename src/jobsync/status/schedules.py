"""The status of scheduled jobs, read from the store without joining or writing anything.

It is a snapshot: which jobs exist, how their last runs ended, when they fire next, and which
processes could fire them. No job's code is needed.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from jobsync.components import Components
from jobsync.coordination.session import HookFailure
from jobsync.core.firing import due_time, next_instant
from jobsync.core.job_state import Gap, JobState, RunRequest, find_schedule
from jobsync.errors import Invalid, NotFound, closest_name
from jobsync.scheduler.history import HistoryEntry
from jobsync.scheduler.job_store import JobStore, list_namespaces
from jobsync.scheduler.operations import NEXT_RUNS, JobStatus, build_status
from jobsync.scheduler.plugin import SchedulerPlugin
from jobsync.status.sessions import (
    ClusterStatus,
    RoleStatus,
    SessionCondition,
    SessionStatus,
    read_cluster_status,
)
from jobsync.stores.contract import Store

__all__ = [
    "ScheduledJobStatus",
    "SchedulerStatus",
    "SchedulesStatus",
    "describe_gap",
    "format_instant",
    "read_gap",
    "read_schedules_status",
]

_FACT = "schedule "
"""How the fact begins by which a session tells which jobs its process has."""
_MAX_KNOWN = 20
"""Names that an error lists."""


class SchedulerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that run the scheduler of one namespace."""

    namespace: str
    workers: tuple[str, ...]
    """The live ones."""
    leader: str | None
    independent: tuple[str, ...]
    """Those that fire without an election."""
    withheld: Mapping[str, str]
    """Those that do not lead for now, each with the reason."""
    failing: HookFailure | None
    """What the leader last raised when it took over."""
    vacant_since: float | None
    """When the last term ended, if nobody leads and that is known."""

    @property
    def is_led(self) -> bool:
        """Whether a process fires jobs."""
        return self.leader is not None or bool(self.independent)


class ScheduledJobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job with everything that decides when it fires. Times are Unix seconds."""

    namespace: str
    name: str
    job: JobStatus
    overlap: str
    is_removed: bool
    is_disabled_by_code: bool
    due: float | None
    """When the first undecided instant fires, jitter included; it may be in the past."""
    last_duration: float | None
    """How long the last run took, in seconds."""
    requests: tuple[RunRequest, ...]
    """Runs that operators have asked for and that have not begun."""
    workers: tuple[str, ...]
    """The live processes whose code has the job."""
    owners: Mapping[str, SessionCondition]
    """The sessions of its runs; one that is not there is dead."""
    gap: Gap | None
    """The newest gap in its history, if that was read."""
    busy: int
    """How many other jobs run where it would be fired, if it is due."""
    scheduler: SchedulerStatus
    seen: float
    """The time of this snapshot by the store's clock, or by this machine's."""

    @property
    def is_late(self) -> bool:
        """Whether an instant is due and not decided."""
        return self.due is not None and self.due <= self.seen

    @property
    def is_due(self) -> bool:
        """Whether something waits to be started."""
        return self.is_late or bool(self.job.queued or self.requests)

    @property
    def next_fire(self) -> float | None:
        """When it fires next, jitter included."""
        return self.job.next_run if self.is_late else self.due

    @property
    def marks(self) -> tuple[str, ...]:
        """What is special about it, in a word each."""
        job = self.job
        found = {
            "removed": self.is_removed,
            "paused": job.pause is not None,
            "disabled": job.pause is None and not job.enabled and not self.is_removed,
            "running": job.is_running,
            "queued": bool(job.queued or self.requests),
            "edited": bool(job.edits),
            "no process": not self.workers,
        }
        return tuple(mark for mark, is_so in found.items() if is_so)


class SchedulesStatus:
    """The schedulers of a store, and their jobs. Created by `read_schedules_status`."""

    def __init__(
        self,
        store: Store,
        components: Components,
        cluster: ClusterStatus,
        namespaces: Collection[str],
        seen: float,
    ) -> None:
        self._store = store
        self._components = components
        self._live = [session for session in cluster.sessions if session.state == "live"]
        self._conditions = {each.incarnation: each.state for each in cluster.sessions}
        self._roles = {
            role.namespace: role for role in cluster.roles if role.work == SchedulerPlugin.slug
        }
        self.namespaces = tuple(sorted({*namespaces, *self._list_published()}))
        """The namespaces that have jobs, or processes."""
        self._seen = seen
        self._codes: dict[tuple[str, str], frozenset[str]] = {}
        self._schedulers = {each: self._build_scheduler(each) for each in self.namespaces}

    def _list_published(self) -> Iterable[str]:
        for session in self._live:
            for fact in session.facts:
                if fact.startswith(_FACT):
                    yield fact.removeprefix(_FACT)

    def open(self, namespace: str) -> JobStore:
        """Return the stored jobs of a namespace."""
        return JobStore(lambda: self._store, namespace, self._components)

    def choose(self, namespace: str | None) -> tuple[str, ...]:
        """Return the namespaces to look into: one, or all.

        Raises:
            NotFound: nothing was ever scheduled in that namespace.
        """
        if namespace is None:
            return self.namespaces
        if namespace not in self.namespaces:
            hint = closest_name(namespace, self.namespaces)
            raise NotFound("scheduler", namespace, self.namespaces, hint)
        return (namespace,)

    async def jobs(
        self, namespace: str | None = None, upcoming: int = NEXT_RUNS
    ) -> list[ScheduledJobStatus]:
        """Return all jobs that are not removed, of one namespace or of all, by name.

        Args:
            namespace: of a scheduler.
            upcoming: how many of their next runs are computed.
        """
        return [
            await self._build(space, name, stored.state, upcoming=upcoming)
            for space in self.choose(namespace)
            for name, stored in sorted((await self.open(space).read_all()).items())
            if not stored.state.is_removed
        ]

    async def job(self, name: str, namespace: str | None = None) -> ScheduledJobStatus:
        """Return one job, with its newest gap, even if it was removed.

        Raises:
            NotFound: there is no such job.
            Invalid: several namespaces have it, and none is chosen.
        """
        found: dict[str, JobState] = {}
        for space in self.choose(namespace):
            stored = await self.open(space).read(name)
            if stored is not None:
                found[space] = stored.state
        # One that was removed is meant only if no other is.
        found = {space: state for space, state in found.items() if not state.is_removed} or found
        if not found:
            known = await self._list_names(namespace)
            raise NotFound("job", name, known[:_MAX_KNOWN], closest_name(name, known))
        if len(found) > 1:
            problem = f"must be chosen: {' and '.join(found)} have a job {name!r}"
            raise Invalid("namespace", namespace, problem, f"pass --namespace {min(found)}")
        ((space, state),) = found.items()
        status = await self._build(space, name, state, gap=await self._find_gap(space, name, state))
        if not status.is_due:
            return status
        return msgspec.structs.replace(status, busy=await self._count_busy(space, status))

    async def _list_names(self, namespace: str | None) -> list[str]:
        """Return the names of jobs that are not removed, without what else is known of them."""
        found = [await self.open(space).read_all() for space in self.choose(namespace)]
        return sorted(
            {name for jobs in found for name, job in jobs.items() if not job.state.is_removed}
        )

    def _build_scheduler(self, namespace: str) -> SchedulerStatus:
        role = self._roles.get(namespace)
        withheld = {} if role is None else role.withheld
        role_name = f"{namespace}/{SchedulerPlugin.slug}"
        sessions = [each for each in self._live if f"{_FACT}{namespace}" in each.facts]
        is_led = role is not None and role.leader is not None
        return SchedulerStatus(
            namespace=namespace,
            workers=tuple(session.worker_id for session in sessions),
            leader=None if role is None else role.leader,
            independent=tuple(
                session.worker_id
                for session in sessions
                if role_name not in session.works and session.worker_id not in withheld
            ),
            withheld=withheld,
            failing=None if role is None else role.failing,
            vacant_since=None if is_led else _find_last_end(role),
        )

    async def _build(
        self,
        namespace: str,
        name: str,
        state: JobState,
        gap: Gap | None = None,
        upcoming: int = NEXT_RUNS,
    ) -> ScheduledJobStatus:
        last, following, due = state.statistics.last_run, next_instant(state), None
        if following is not None:
            due = due_time(name, state.effective, find_schedule(state), following)
        return ScheduledJobStatus(
            namespace=namespace,
            name=name,
            job=build_status(name, state, self._seen, following, upcoming),
            overlap=state.effective.overlap,
            is_removed=state.is_removed,
            is_disabled_by_code=not state.definition.enabled,
            due=due,
            last_duration=None if last is None else max(last.ended_at - last.started_at, 0.0),
            requests=state.requests,
            workers=tuple(
                [
                    session.worker_id
                    for session in self._live
                    if name in await self._read_code(namespace, session)
                ]
            ),
            owners={
                run.owner: self._conditions[run.owner]
                for run in state.running
                if run.owner in self._conditions
            },
            gap=gap,
            busy=0,
            scheduler=self._schedulers[namespace],
            seen=self._seen,
        )

    async def _read_code(self, namespace: str, session: SessionStatus) -> frozenset[str]:
        """Return the jobs that a process has."""
        digest = str(session.facts.get(f"{_FACT}{namespace}", ""))
        if (namespace, digest) not in self._codes:
            self._codes[namespace, digest] = await self.open(namespace).code.read(digest)
        return self._codes[namespace, digest]

    async def _find_gap(self, namespace: str, name: str, state: JobState) -> Gap | None:
        """Return the newest gap: of the state, if it is not in the history yet."""
        if state.gaps:
            return state.gaps[-1]
        found = await self.open(namespace).history.list_entries(
            name, statuses=["missed", "skipped"], limit=1
        )
        return read_gap(found[0]) if found else None

    async def _count_busy(self, namespace: str, status: ScheduledJobStatus) -> int:
        """Return how many other jobs run in the process that fires a job."""
        leader = status.scheduler.leader
        firing = {leader} if leader in status.workers else {*status.workers}
        owners = {each.incarnation for each in self._live if each.worker_id in firing}
        return sum(
            any(run.owner in owners for run in stored.state.running)
            for name, stored in (await self.open(namespace).read_all()).items()
            if name != status.name
        )


def _find_last_end(role: RoleStatus | None) -> float | None:
    """Return when a role was released; None if its owner has died, which nobody has noted."""
    if role is None or not role.past:
        return None
    last = role.past[-1]
    return last.ended if last.epoch == role.epoch else None


async def read_schedules_status(store: Store, components: Components) -> SchedulesStatus:
    """Return the schedulers of a store.

    Raises:
        Unavailable: the store does not answer.
    """
    now = await store.now()
    seen = (components.clock.wall() if now is None else now).seconds
    cluster = await read_cluster_status(store, components)
    return SchedulesStatus(store, components, cluster, await list_namespaces(store), seen)


def read_gap(entry: HistoryEntry) -> Gap | None:
    """Return the gap that an entry of the history is about; None if it is a run."""
    match entry.status:
        case "missed" | "skipped" as kind:
            return Gap(
                first=int(entry.scheduled_time if entry.first is None else entry.first),
                last=int(entry.scheduled_time),
                count=entry.count,
                reason=entry.reason,
                kind=kind,
                is_counted=entry.is_counted,
            )
    return None


def describe_gap(gap: Gap) -> str:
    """Return a gap in words, in this process's time zone."""
    if gap.first == gap.last:
        return f"{format_instant(gap.first)} {gap.kind}: {gap.reason}"
    count = f"{gap.count:,}{'' if gap.is_counted else '+'} instants"
    times = f"from {format_instant(gap.first)} to {format_instant(gap.last)}"
    return f"{count} {times} {gap.kind}: {gap.reason}"


def format_instant(seconds: float) -> str:
    """Return a Unix time in this process's time zone, with its name; without :00 seconds."""
    moment = datetime.fromtimestamp(int(seconds), UTC).astimezone()
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z" if moment.second else "%Y-%m-%d %H:%M %Z")
