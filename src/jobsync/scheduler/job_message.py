"""The message that a scheduled job enqueues at each instant, in place of an action.

    jobs={"nightly": {"schedule": "0 3 * * *", "enqueue": {"resource": "reports", "data": {…}}}}

The queue is one of the same database, found through its resource: this package knows no queue. The
message's key is the job and the instant, so that a run which is resumed enqueues nothing again.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jobsync.database.database import Database
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.errors import Invalid, closest_name
from jobsync.scheduler.context import JobContext
from jobsync.user_code import await_result, check_no_generator, is_coroutine_function

__all__ = ["JobMessage", "build_key", "parse_message"]

_RESERVED = ("connection", "key", "key_ttl", "replace")
"""Options of `Resource.enqueue` that a job does not choose."""

_KEY_TTL = 86_400.0
"""Seconds for which a run that is resumed enqueues nothing again. A run is resumed within minutes
of its process's death, or when the first process is started again."""

_LONGEST_KEY = 200
"""The most bytes of a key."""

_EXAMPLE = 'write enqueue={"resource": "reports", "data": {…}}'


class JobMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a job enqueues."""

    resource: str
    data: Mapping[str, Any] | Callable[..., Any]
    """The message, or a function of the instant that returns it."""
    namespace: str | None = None
    """That of the queue, if the resource has several."""
    options: Mapping[str, Any] = {}
    """As of `Resource.enqueue`."""

    @property
    def queue(self) -> str:
        """The queue, as [NAMESPACE/]RESOURCE."""
        return "/".join(filter(None, (self.namespace, self.resource)))

    def check(self, job: str, database: Database) -> None:
        """Check that messages can be enqueued in this process; enqueue none.

        Raises:
            Invalid: the resource has no queue here, or several, or an option or the data is wrong.
        """
        field = f"jobs.{job}.enqueue"
        if self.resource not in database.resources:
            raise self._build_no_queue(field)
        resource, data = database.resources[self.resource], self.data
        try:
            resource.check_messages(
                () if callable(data) else (data,), namespace=self.namespace, **self.options
            )
        except Invalid as error:
            if error.field == "resource":
                raise self._build_no_queue(field) from error
            problem = Invalid(f"{field}.{error.field}", error.value, error.problem, error.fix)
            raise problem from error

    def _build_no_queue(self, field: str) -> Invalid:
        """Return the error of a resource that has no queue in this process yet."""
        fix = f"add QueuePlugin(resource={self.resource!r}) to the plugins before the scheduler"
        return Invalid(f"{field}.resource", self.resource, "has no queue in this process", fix)

    def build_action(self) -> Callable[..., Any]:
        """Return an action that enqueues the message, and returns the message's id.

        A plain function for the data runs on a thread.
        """
        data = self.data
        if not callable(data):
            return self._build_sender(lambda _: data)
        if is_coroutine_function(data):
            return self._build_sender(data)

        def find_and_send(database: Database, context: JobContext) -> Any:
            return self._send(database, context, data(context.scheduled_at))

        return find_and_send

    def _build_sender(self, find_data: Callable[..., Any]) -> Callable[..., Any]:
        async def send(database: Database, context: JobContext) -> str:
            return await self._send(database, context, find_data(context.scheduled_at))

        return send

    async def _send(self, database: Database, context: JobContext, found: Any) -> str:
        data = await await_result(found)
        # A task may have options of its own, which replace a message: one of a run is never.
        own = {"key": build_key(context), "key_ttl": _KEY_TTL, "replace": False}
        options = {**self.options, **own}
        resource = database.resource(self.resource)
        return await resource.enqueue(data, namespace=self.namespace, **options)


def build_key(context: JobContext) -> str:
    """Return what identifies the message of a run: the scheduler, the job and the instant.

    Runs by hand may begin in the same second; each has an id.
    """
    scheduler = getattr(context.scheduler, "namespace", "")
    instant = context.execution_id if context.is_manual else int(context.scheduled_time)
    key = f"{scheduler}/{context.job_name}@{instant}"
    if len(key.encode()) > _LONGEST_KEY or not key.isprintable():
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return key


def parse_message(job: object, given: object) -> JobMessage:
    """Return the checked message of a job.

    Raises:
        Invalid: names the field, the value and the fix.
    """
    field = f"jobs.{job}.enqueue"
    if not isinstance(given, Mapping):
        raise Invalid(field, given, "must be a dict", _EXAMPLE)
    options = dict(given)
    _check_names(field, options)
    resource, data = options.pop("resource", None), options.pop("data", None)
    namespace = options.pop("namespace", None)
    if not isinstance(resource, str) or not resource:
        problem = "must be the name of the queue's resource"
        raise Invalid(f"{field}.resource", resource, problem, _EXAMPLE)
    if namespace is not None and not isinstance(namespace, str):
        raise Invalid(f"{field}.namespace", namespace, "must be text", "use str(...)")
    _check_data(f"{field}.data", data)
    return JobMessage(resource=resource, data=data, namespace=namespace, options=options)


def _check_names(field: str, options: Mapping[Any, Any]) -> None:
    chosen = [name for name in EnqueueOptions.__annotations__ if name not in _RESERVED]
    known = ("resource", "data", "namespace", *chosen)
    for name, value in options.items():
        if name not in known:
            hint = closest_name(str(name), known)
            fix = f"did you mean {hint}?" if hint else f"use {', '.join(known)}"
            raise Invalid(f"{field}.{name}", value, "is not an option", fix)


def _check_data(field: str, data: object) -> None:
    if isinstance(data, Mapping):
        return
    if not callable(data):
        fix = "pass the message, or a function of the instant that returns it"
        raise Invalid(field, data, "must be a dict or a function", fix)
    check_no_generator(field, data)
    try:
        inspect.signature(data).bind(None)
    except TypeError as error:
        fix = "write lambda at: {…}"
        raise Invalid(field, data, "must take one argument: the instant", fix) from error
    except ValueError:
        # Some functions do not tell what they take.
        return
