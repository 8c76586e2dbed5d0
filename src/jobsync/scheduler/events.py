"""The events of a scheduler: what happens to its jobs."""

import logging
from typing import ClassVar

from jobsync.core.codec import Json
from jobsync.events import Event

__all__ = [
    "ClockVetoed",
    "JobAdded",
    "JobCompleted",
    "JobDefinitionReplaced",
    "JobDisabled",
    "JobEnabled",
    "JobExecuted",
    "JobFailed",
    "JobLost",
    "JobMissed",
    "JobOverran",
    "JobRemoved",
    "JobResumed",
    "JobSkipped",
    "JobStarted",
    "JobUpdated",
]


class _JobEvent(Event, frozen=True, kw_only=True):
    job_name: str

    @property
    def job_id(self) -> str:
        """The same as `job_name`."""
        return self.job_name

    def __getitem__(self, field: str) -> object:
        return super().__getitem__("job_name" if field == "job_id" else field)


class _RunEvent(_JobEvent, frozen=True, kw_only=True):
    execution_id: str
    scheduled_time: float
    """When it was due, in seconds since 1970."""


class JobStarted(_RunEvent, frozen=True, kw_only=True):
    """A run has begun: its instant is recorded as fired."""

    name: ClassVar[str] = "plg:scheduler:job-started"
    aliases: ClassVar[tuple[str, ...]] = ("jobStarted", "plg:scheduler:job-start")

    is_manual: bool = False


class JobCompleted(_RunEvent, frozen=True, kw_only=True):
    """A run has succeeded, and the store has recorded it."""

    name: ClassVar[str] = "plg:scheduler:job-completed"
    aliases: ClassVar[tuple[str, ...]] = ("jobCompleted", "plg:scheduler:job-complete")

    result: Json
    duration: float
    """Seconds."""
    attempts: int


class JobFailed(_RunEvent, frozen=True, kw_only=True):
    """An attempt has failed; `final` is whether it was the last one."""

    name: ClassVar[str] = "plg:scheduler:job-failed"
    aliases: ClassVar[tuple[str, ...]] = ("jobFailed", "plg:scheduler:job-error")
    level: ClassVar[int] = logging.WARNING

    error: str
    attempts: int
    final: bool


class JobExecuted(_RunEvent, frozen=True, kw_only=True):
    """A run has ended, whatever its result."""

    name: ClassVar[str] = "plg:scheduler:job-executed"

    status: str
    """success, error or timeout."""
    result: Json
    duration: float
    attempts: int
    error: str = ""


class JobOverran(_RunEvent, frozen=True, kw_only=True):
    """An action goes on after its timeout; its next attempt waits for its end."""

    name: ClassVar[str] = "plg:scheduler:job-overran"
    aliases: ClassVar[tuple[str, ...]] = ("plg:scheduler:job-timeout",)
    level: ClassVar[int] = logging.WARNING

    duration: float


class JobResumed(_RunEvent, frozen=True, kw_only=True):
    """The process that ran a job has died; this process runs it again, for the same instant."""

    name: ClassVar[str] = "plg:scheduler:job-resumed"
    level: ClassVar[int] = logging.WARNING

    resumed: int
    """How many processes have died while they ran it."""


class JobLost(_RunEvent, frozen=True, kw_only=True):
    """What a run did no longer counts, or it was given up."""

    name: ClassVar[str] = "plg:scheduler:job-lost"
    level: ClassVar[int] = logging.WARNING

    reason: str


class _GapEvent(_JobEvent, frozen=True, kw_only=True):
    first: float
    """The first instant, in seconds since 1970."""
    last: float
    count: int
    reason: str


class JobMissed(_GapEvent, frozen=True, kw_only=True):
    """Instants passed that nobody could fire."""

    name: ClassVar[str] = "plg:scheduler:job-missed"
    level: ClassVar[int] = logging.WARNING


class JobSkipped(_GapEvent, frozen=True, kw_only=True):
    """Instants passed that were not to be fired: the job was paused, or still ran."""

    name: ClassVar[str] = "plg:scheduler:job-skipped"
    level: ClassVar[int] = logging.INFO


class JobAdded(_JobEvent, frozen=True, kw_only=True):
    """A job was stored for the first time."""

    name: ClassVar[str] = "plg:scheduler:job-added"


class JobRemoved(_JobEvent, frozen=True, kw_only=True):
    """A job was removed."""

    name: ClassVar[str] = "plg:scheduler:job-removed"
    level: ClassVar[int] = logging.INFO


class JobUpdated(_JobEvent, frozen=True, kw_only=True):
    """An operator has changed a job."""

    name: ClassVar[str] = "plg:scheduler:job-updated"
    level: ClassVar[int] = logging.INFO

    changes: tuple[str, ...]
    """The fields that differ from the code's."""


class JobEnabled(_JobEvent, frozen=True, kw_only=True):
    """A job is fired again."""

    name: ClassVar[str] = "plg:scheduler:job-enabled"
    level: ClassVar[int] = logging.INFO


class JobDisabled(_JobEvent, frozen=True, kw_only=True):
    """A job is no longer fired."""

    name: ClassVar[str] = "plg:scheduler:job-disabled"
    level: ClassVar[int] = logging.INFO

    reason: str


class JobDefinitionReplaced(_JobEvent, frozen=True, kw_only=True):
    """Two versions of the code define a job differently; the newest process's holds."""

    name: ClassVar[str] = "plg:scheduler:job-definition-replaced"
    level: ClassVar[int] = logging.WARNING

    fields: tuple[str, ...]
    """What differs."""
    by: str
    """The worker whose definition holds."""


class ClockVetoed(Event, frozen=True, kw_only=True):
    """This process fires nothing: its clock cannot be right."""

    name: ClassVar[str] = "plg:scheduler:clock-vetoed"
    level: ClassVar[int] = logging.ERROR

    reason: str
