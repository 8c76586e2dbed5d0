"""The stored state of a scheduled job. Pure; `core.firing` and `core.job_changes` change it.

A job has one state record in the store. An instant is a whole second at which its schedule is
due. `JobState.last` is the newest decided instant and never goes back, so that neither a slow
process, a new leader nor a changed schedule fires an instant twice.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal, TypeAlias

import msgspec

from jobsync.core.codec import Json
from jobsync.core.cron import Schedule
from jobsync.core.keys import OptionalKeySegment

__all__ = [
    "ActiveRun",
    "Gap",
    "Instant",
    "JobDefinition",
    "JobPause",
    "JobState",
    "LastRun",
    "Misfire",
    "Overlap",
    "RunRequest",
    "RunStatus",
    "Statistics",
    "find_schedule",
    "parse_schedule",
]

Instant: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=250_000_000_000)]
"""A whole second since 1970 at which a schedule is due; the last one is in the year 9892."""

Overlap: TypeAlias = Literal["skip", "queue", "allow"]
Misfire: TypeAlias = Literal["skip", "last", "all"]
RunStatus: TypeAlias = Literal[
    "running", "success", "error", "timeout", "lost", "missed", "skipped"
]
"""How a run ended; missed and skipped ones were never started."""


class JobDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a job's code says about it, apart from its action."""

    schedule: str
    timezone: str = "UTC"
    description: str = ""
    enabled: bool = True
    retries: Annotated[int, msgspec.Meta(ge=0)] = 0
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = 60.0
    overlap: Overlap = "skip"
    misfire: Misfire = "last"
    max_catch_up: Annotated[int, msgspec.Meta(ge=1)] = 10
    jitter: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    run_on_start: bool = False
    queue: str = ""
    """The queue that gets a message at each instant; empty for a job with an action."""


class ActiveRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that was started and has not ended."""

    id: str
    instant: Instant
    """When it was due; when it was asked for, if it was started by hand."""
    owner: OptionalKeySegment
    """The session of the process that runs it."""
    started_at: float
    resumed: int = 0
    """How many processes have died while they ran it."""
    is_manual: bool = False


class Gap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Instants in a row that were not fired."""

    first: Instant
    last: Instant
    count: int
    reason: str
    kind: Literal["missed", "skipped"] = "missed"
    """Missed: nobody could fire them. Skipped: they were not to be fired."""
    is_counted: bool = True
    """Whether `count` is exact; otherwise there are more."""


class JobPause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operator's pause."""

    at: float
    by: str = ""
    reason: str = ""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that somebody asked for, and that has not begun."""

    id: str
    at: float
    by: str = ""
    owner: OptionalKeySegment = ""
    """The session that waits to run it itself; empty for whoever fires the job."""


class LastRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the latest run ended."""

    id: str
    instant: int
    status: RunStatus
    started_at: float
    ended_at: float
    error: str = ""


class Statistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a job's instants."""

    runs: int = 0
    successes: int = 0
    failures: int = 0
    missed: int = 0
    skipped: int = 0
    durations: tuple[float, ...] = ()
    """Of the latest runs, in seconds, the newest last."""
    last_run: LastRun | None = None
    last_success: float | None = None
    last_failure: float | None = None


class JobState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored state of one job."""

    definition: JobDefinition
    defined_by: str
    """The worker whose code it is."""
    last: Instant
    """The newest decided instant."""
    edits: Mapping[str, Json] = {}
    """Fields of the definition that an operator has changed."""
    pause: JobPause | None = None
    running: tuple[ActiveRun, ...] = ()
    queued: tuple[Instant, ...] = ()
    """Instants that run when an earlier run has ended."""
    requests: tuple[RunRequest, ...] = ()
    gaps: tuple[Gap, ...] = ()
    """Gaps that are not in the history yet."""
    lost: tuple[ActiveRun, ...] = ()
    """Runs that were given up, which their records in the history do not say yet."""
    statistics: Statistics = Statistics()
    is_removed: bool = False
    generation: int = 0
    """Of the process whose code it is: one that starts later with other code has a higher one."""

    @property
    def effective(self) -> JobDefinition:
        """The definition with the operator's changes."""
        if not self.edits:
            return self.definition
        return msgspec.structs.replace(self.definition, **self.edits)

    @property
    def is_active(self) -> bool:
        """Whether its instants are fired."""
        return self.pause is None and self.effective.enabled and not self.is_removed

    @property
    def is_open(self) -> bool:
        """Whether it has something to do apart from its next instant."""
        return bool(self.running or self.queued or self.requests or self.gaps or self.lost)

    @property
    def is_special(self) -> bool:
        """Whether operators have paused, edited or removed it, or asked for a run."""
        return bool(self.pause or self.edits or self.requests or self.is_removed)

    def find_run(self, run_id: str) -> ActiveRun | None:
        """Return a run that has not ended."""
        return next((run for run in self.running if run.id == run_id), None)


@lru_cache(maxsize=20_000)
def parse_schedule(text: str, timezone: str) -> Schedule:
    """Return a schedule; many jobs have the same one.

    Raises:
        Invalid: it is wrong, or the zone is unknown.
    """
    return Schedule.parse(text, timezone)


def find_schedule(state: JobState) -> Schedule:
    """Return the schedule that holds for a job."""
    definition = state.effective
    return parse_schedule(definition.schedule, definition.timezone)
