"""Builds new messages, checked by their resource's schema, and pushes them.

Nothing is pushed unless everything is valid. A process without the queue's plugin, such as a
command, can push too.
"""

import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Unpack

from jobsync.core.arguments import LONGEST_DELAY, check_seconds
from jobsync.core.codec import Json
from jobsync.core.retry import check_max_attempts
from jobsync.database.database import Database
from jobsync.database.document import as_list
from jobsync.database.enqueue_calls import EnqueueOptions
from jobsync.database.plugin import check_plugin_name
from jobsync.database.resource import Resource
from jobsync.errors import (
    Incomplete,
    Invalid,
    OutcomeUnknown,
    Unavailable,
    closest_name,
    plain_text,
)
from jobsync.queue.backend import DEFAULT_NAMESPACE, NewMessage, QueueBackend, name_queue
from jobsync.queue.opening import open_backend
from jobsync.queue.placing import PLACING_OPTIONS, place_messages
from jobsync.queue.settings import QueueSettings
from jobsync.settings import Sources, resolve

__all__ = ["build_messages", "check_task_name", "check_when", "enqueue_messages"]

_LONGEST_TASK = 200
"""The most bytes of a task's name."""


def build_messages(
    resource: Resource,
    data: Sequence[Mapping[str, Json]],
    ids: Sequence[str],
    options: EnqueueOptions,
    max_attempts: int,
) -> list[NewMessage]:
    """Return messages with these ids, which are tried so often unless an option says otherwise.

    Messages of a task have the arguments of its function, whatever the resource's schema says.

    Raises:
        InvalidRecord: some data violates the resource's schema; lists every field.
        Invalid: an option is unknown or wrong.
    """
    _check_names(options)
    delay, at = _read_delay(options), _read_time(options, resource.records.now())
    timeout = options.get("timeout")
    if timeout is not None:
        timeout = check_seconds("timeout", timeout, is_zero_allowed=False)
    attempts = options.get("max_attempts")
    attempts = max_attempts if attempts is None else attempts
    check_max_attempts(attempts)
    task = options.get("task", "")
    values: Sequence[Json]
    if task == "":
        values = resource.validate(data, ids)
    else:
        task = check_task_name("task", task)
        values = _copy(data)
    new_messages = [
        NewMessage(
            id=name,
            value=value,
            delay=delay,
            at=at,
            timeout=timeout,
            max_attempts=attempts,
            task=task,
        )
        for name, value in zip(ids, values, strict=True)
    ]
    if options.keys() & PLACING_OPTIONS:
        return place_messages(new_messages, options)
    return new_messages


def _copy(data: Sequence[Any]) -> list[dict[str, Json]]:
    """Return the arguments of a task's messages."""
    for each in data:
        if not isinstance(each, Mapping):
            problem = "must be a dict with the arguments by name"
            raise Invalid("data", each, problem, 'write {"to": "user@example.com"}')
    return [dict(each) for each in data]


def check_task_name(field: str, name: object) -> str:
    """Return the name of a task as a plain text.

    Raises:
        Invalid: it is not a short text of printable characters.
    """
    text = plain_text(name)
    if not text or not text.isprintable():
        fix = "pass a text such as emails.send"
        raise Invalid(field, name, "must be a text of printable characters", fix)
    if len(text.encode()) > _LONGEST_TASK:
        problem = f"must be {_LONGEST_TASK} bytes or less"
        raise Invalid(field, name, problem, "pass a shorter name: @queue.task(name=...)")
    return text


async def enqueue_messages(
    database: Database,
    queue: str,
    data: Sequence[Mapping[str, Json]],
    **options: Unpack[EnqueueOptions],
) -> list[str]:
    """Push messages to a queue that this process need not have; return their ids.

    Up to 10,000 messages are pushed all or none; where the store has no SQL, up to 1,000 that have
    3 MB together. More are pushed in parts, once all have been checked.

    Args:
        database: the queue's database, connected.
        queue: as [NAMESPACE/]RESOURCE.
        data: the messages.
        options: as of `Resource.enqueue`, without a connection. How often a message is tried is
            read from this process's settings by default.

    Raises:
        NotFound: there is no such resource; the error lists those that exist.
        Invalid: something is wrong; nothing was pushed.
        Incomplete: some parts were pushed and others not; the error lists them.
    """
    data = as_list("data", data)
    namespace, name = _parse_name(queue)
    sources, components = Sources.load(os.environ, Path.cwd()), database.components
    settings = resolve(QueueSettings, {}, sources, section="queue").value
    ids = components.ids.records(len(data))
    resource = database.resource(name)
    new_messages = build_messages(resource, data, ids, options, settings.max_attempts)
    backend = open_backend(database.store, name_queue(namespace, name), components)
    holders: dict[str, str] = {}
    start = 0
    # All are checked before the first is sent.
    for part in backend.split(new_messages):
        holders |= await _push_part(backend, part, ids, start)
        start += len(part)
    return [holders.get(name, name) for name in ids]


def _parse_name(text: str) -> tuple[str, str]:
    """Return the namespace and the resource of [NAMESPACE/]RESOURCE."""
    namespace, _, resource = text.rpartition("/")
    if not resource or "/" in namespace:
        fix = "write tasks, or emails/tasks"
        raise Invalid("queue", text, "must be [NAMESPACE/]RESOURCE", fix)
    return check_plugin_name("namespace", namespace or DEFAULT_NAMESPACE), resource


async def _push_part(
    backend: QueueBackend, part: Sequence[NewMessage], ids: Sequence[str], start: int
) -> Mapping[str, str]:
    """Push a part of the messages with these ids, before which so many were pushed."""
    try:
        return await backend.push(part)
    except (OutcomeUnknown, Unavailable) as error:
        if not start:
            raise
        size, is_unknown = len(part), isinstance(error, OutcomeUnknown)
        raise Incomplete(
            backend.queue,
            written=ids[:start],
            unknown=ids[start : start + size] if is_unknown else (),
            unsent=ids[start + size if is_unknown else start :],
        ) from error


def _check_names(options: EnqueueOptions) -> None:
    known = EnqueueOptions.__annotations__
    for name, value in options.items():
        if name not in known:
            hint = closest_name(name, known)
            fix = f"did you mean {hint}?" if hint else f"use {', '.join(known)}"
            raise Invalid(name, value, "is not an option of enqueue", fix)


def check_when(options: EnqueueOptions) -> None:
    """Check the delay and the time of messages, before there are any.

    Raises:
        Invalid: one is wrong, or both are set.
    """
    _read_delay(options)
    _read_time(options, math.inf)


def _read_delay(options: EnqueueOptions) -> float:
    delay = options.get("delay", 0.0)
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    return check_seconds("delay", seconds)


def _read_time(options: EnqueueOptions, now: float) -> float | None:
    """Return the time of day at which messages can be handled; None if no option says it."""
    at: object = options.get("at")
    if at is None:
        return None
    if not isinstance(at, datetime) or at.utcoffset() is None:
        fix = "write datetime(2027, 1, 31, 12, tzinfo=ZoneInfo('Europe/Berlin'))"
        raise Invalid("at", at, "must be a datetime with a time zone", fix)
    if options.get("delay"):
        raise Invalid("at", at, "cannot be combined with delay", "pass one of them")
    if at.timestamp() - now > LONGEST_DELAY:
        days = LONGEST_DELAY / 86_400
        raise Invalid("at", at, f"must be within {days:.0f} days", "enqueue the message later")
    return at.timestamp()
