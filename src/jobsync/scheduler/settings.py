"""The options of a scheduler and of its jobs. Durations are seconds."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, get_args

import msgspec

from jobsync.coordination.settings import CoordinatorOptions
from jobsync.core.arguments import check_choice, check_count, check_seconds
from jobsync.core.codec import check_text
from jobsync.core.cron import Schedule
from jobsync.core.job_state import JobDefinition, Misfire, Overlap, parse_schedule
from jobsync.core.keys import escape
from jobsync.errors import Invalid, closest_name
from jobsync.safe_text import format_error, safe_name
from jobsync.scheduler.job_message import JobMessage, parse_message
from jobsync.settings import Settings, in_section
from jobsync.user_functions import is_for_task

__all__ = [
    "JobOptions",
    "SchedulerOptions",
    "SchedulerSettings",
    "check_changes",
    "check_lookup_name",
    "check_new_name",
    "check_plain_text",
    "check_schedule_given",
    "merge_options",
    "parse_job",
    "read_dict",
]

_LONGEST_RETENTION = 10_000 * 86_400.0
_MAX_RETRIES = 1000
_MAX_NAME = 150
_ENQUEUE_RETRIES = 3
"""Of a job that enqueues a message: to repeat that is harmless."""
_OWN_OPTIONS = ("action", "enqueue", "backoff", "context")
"""Options that are not part of the stored definition."""
_STORED_OPTIONS = tuple(name for name in JobDefinition.__struct_fields__ if name != "queue")


class SchedulerOptions(CoordinatorOptions, total=False):
    """Options as they are passed to `SchedulerPlugin`: see `SchedulerSettings`."""

    timezone: str
    max_concurrent_jobs: int
    default_timeout: float | None
    default_retries: int
    history_retention: float
    history_limit: int
    grace: float


@in_section("scheduler")
class SchedulerSettings(Settings, frozen=True, kw_only=True):
    """The options of a scheduler.

    Attributes:
        timezone: of jobs that name none; UTC.
        max_concurrent_jobs: how many jobs run at once in this process; 5. What is due beyond
            that waits for one to end.
        default_timeout: seconds that one attempt of a job may take; 60.
        default_retries: how often a failed job is tried again; 0.
        history_retention: seconds for which runs and gaps are remembered; 30 days.
        history_limit: how many runs and gaps of each job are remembered; 1,000.
        grace: seconds that actions have to finish when the scheduler stops; 30.
    """

    timezone: str = "UTC"
    max_concurrent_jobs: int = 5
    default_timeout: float | None = 60.0
    default_retries: int = 0
    history_retention: float = 30 * 86_400.0
    history_limit: int = 1000
    grace: float = 30.0

    def __post_init__(self) -> None:
        Schedule.parse("@daily", self.timezone)
        check_count("max_concurrent_jobs", self.max_concurrent_jobs, least=1, most=10_000)
        check_count("default_retries", self.default_retries, least=0, most=_MAX_RETRIES)
        check_count("history_limit", self.history_limit, least=1, most=1_000_000)
        if self.default_timeout is not None:
            check_seconds("default_timeout", self.default_timeout, is_zero_allowed=False)
        check_seconds("history_retention", self.history_retention, most=_LONGEST_RETENTION)
        check_seconds("grace", self.grace, most=_LONGEST_RETENTION)


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its code describes it."""

    definition: JobDefinition
    action: Callable[..., Any]
    enqueue: JobMessage | None = None
    """What the action enqueues, if it does only that."""
    backoff: Callable[[int], float] | None = None
    context: Mapping[str, Any] = {}


def parse_job(name: object, options: object, settings: SchedulerSettings) -> JobOptions:
    """Return a checked job.

    Raises:
        Invalid: names the field, the value and the fix.
    """
    check_new_name(name)
    if not isinstance(options, Mapping):
        fix = 'write {"schedule": "0 3 * * *", "action": function}'
        raise Invalid(f"jobs.{name}", options, "must be a dict of options", fix)
    _check_known(name, options, (*_STORED_OPTIONS, *_OWN_OPTIONS))
    action: Any = options.get("action")
    enqueue = options.get("enqueue")
    if action is None and enqueue is None:
        fix = "pass action=function, or enqueue={…}"
        raise Invalid(f"jobs.{name}.action", None, "is missing: the job would do nothing", fix)
    if action is not None and enqueue is not None:
        fix = "pass one of them"
        raise Invalid(f"jobs.{name}.enqueue", enqueue, "cannot be combined with an action", fix)
    if options.get("schedule") is None:
        fix = 'write schedule="0 3 * * *"'
        raise Invalid(f"jobs.{name}.schedule", None, "is missing", fix)
    context = read_dict(f"jobs.{name}.context", options.get("context"))
    backoff = options.get("backoff")
    if backoff is not None and not callable(backoff):
        fix = "pass a function of the number of failures"
        raise Invalid(f"jobs.{name}.backoff", backoff, "must be a function", fix)
    stored = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    stored.setdefault("timezone", settings.timezone)
    stored.setdefault("timeout", settings.default_timeout)
    message = None if enqueue is None else parse_message(name, enqueue)
    if message is None:
        stored.setdefault("retries", settings.default_retries)
    else:
        stored.setdefault("retries", max(settings.default_retries, _ENQUEUE_RETRIES))
        stored["queue"] = message.queue
        action = message.build_action()
    return JobOptions(
        definition=_build_definition(stored),
        action=action,
        enqueue=message,
        backoff=backoff,
        context=context,
    )


def check_changes(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked changes of a definition.

    Raises:
        Invalid: names the field, the value and the fix.
    """
    _check_known(name, changes, _STORED_OPTIONS)
    if not changes:
        raise Invalid("changes", {}, "are missing", "pass schedule=, timezone=, retries= or others")
    checked = _build_definition({"schedule": "@daily", **changes})
    return {field: getattr(checked, field) for field in changes}


def check_schedule_given(schedule: object) -> None:
    """Raise if a decorator is used without a schedule, so that it gets the function instead."""
    if callable(schedule):
        fix = 'write @scheduler.job("0 3 * * *")'
        raise Invalid("schedule", safe_name(schedule), "is a function, not a schedule", fix)


def check_new_name(name: object) -> str:
    """Return the name of a new job, without what a derived class adds to it.

    Raises:
        Invalid: it is not text that can be part of a key.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise Invalid("name", name, "must be printable text", 'write "daily_cleanup"')
    if len(escape(name, "name")) > _MAX_NAME:
        raise Invalid("name", name, f"must be at most {_MAX_NAME} bytes long", "shorten it")
    return str.__str__(name)


def check_lookup_name(name: object) -> None:
    """Check the name of a job that is looked for.

    Raises:
        Invalid: it is not text.
    """
    if not isinstance(name, str):
        raise Invalid("name", name, "must be text", 'write "daily_cleanup"')


def read_dict(field: str, value: object) -> dict[str, Any]:
    """Return a copy of a user's dict, which may be None. It is read once, whatever it does.

    Raises:
        Invalid: it is not a dict, or cannot be read.
    """
    try:
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return dict(value)
    except BaseException as error:
        if is_for_task(error):
            raise
        problem = f"cannot be read: {format_error(error)}"
        raise Invalid(field, type(value), problem, "pass a dict") from error
    raise Invalid(field, value, "must be a dict", "write {...}")


def check_plain_text(field: str, value: object) -> str:
    """Return a text, without what a derived class adds to it.

    Raises:
        Invalid: it is not text, or cannot be stored.
    """
    if not isinstance(value, str):
        raise Invalid(field, value, "must be text", "use str(...)")
    text = str.__str__(value)
    check_text(text, field)
    return text


def _check_known(name: object, options: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            hint = closest_name(str(option), known)
            fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(known)}"
            raise Invalid(f"jobs.{name}.{option}", options[option], "is not an option", fix)


def _build_definition(given: Mapping[str, Any]) -> JobDefinition:
    fields = {field: _to_plain(value) for field, value in given.items()}
    schedule, timezone = fields["schedule"], fields.get("timezone", "UTC")
    if not isinstance(schedule, str) or not isinstance(timezone, str):
        # It says what is wrong.
        Schedule.parse(schedule, timezone)
    parse_schedule(schedule, timezone)
    for field in ("timeout", "jitter"):
        if isinstance(fields.get(field), timedelta):
            fields[field] = fields[field].total_seconds()
    check_choice("overlap", fields.get("overlap", "skip"), get_args(Overlap))
    check_choice("misfire", fields.get("misfire", "last"), get_args(Misfire))
    for field in ("enabled", "run_on_start"):
        if not isinstance(fields.get(field, True), bool):
            raise Invalid(field, fields[field], "must be True or False", "write True")
    description = fields.get("description", "")
    if not isinstance(description, str):
        raise Invalid("description", description, "must be text", "use str(...)")
    check_text(description, "description")
    check_count("retries", fields.get("retries", 0), least=0, most=_MAX_RETRIES)
    check_count("max_catch_up", fields.get("max_catch_up", 1), least=1, most=_MAX_RETRIES)
    if fields.get("timeout") is not None:
        check_seconds("timeout", fields["timeout"], is_zero_allowed=False)
    check_seconds("jitter", fields.get("jitter", 0.0), most=86_400.0)
    return JobDefinition(**fields)


def _to_plain(value: Any) -> Any:
    """Return a text or a number without what a derived class adds: a store keeps only that."""
    if isinstance(value, str):
        return str.__str__(value)
    return float.__float__(value) if isinstance(value, float) else value


def merge_options(options: object, more: Mapping[str, Any]) -> object:
    """Return the options of a job that are passed in a dict and by name."""
    if options is None:
        return more
    return {**options, **more} if isinstance(options, Mapping) else options
