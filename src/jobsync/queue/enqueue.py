"""Builds new messages, checked by their resource's schema, and pushes them.

Nothing is pushed unless everything is valid. A process without the queue's plugin, such as a
command, can push too.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobsync.core.arguments import check_seconds
from jobsync.core.codec import Json
from jobsync.core.retry import check_max_attempts
from jobsync.database.database import Database
from jobsync.database.document import as_list
from jobsync.database.plugin import check_plugin_name
from jobsync.database.resource import Resource
from jobsync.errors import Incomplete, Invalid, OutcomeUnknown, Unavailable
from jobsync.queue.backend import DEFAULT_NAMESPACE, NewMessage, QueueBackend, name_queue
from jobsync.queue.settings import QueueSettings
from jobsync.queue.sql import open_backend
from jobsync.settings import Sources, resolve

__all__ = ["build_messages", "enqueue_messages"]


def build_messages(
    resource: Resource,
    data: Sequence[Mapping[str, Json]],
    ids: Sequence[str],
    *,
    delay: float,
    timeout: float | None,
    max_attempts: int,
) -> list[NewMessage]:
    """Return messages with these ids.

    Raises:
        InvalidRecord: some data violates the resource's schema; lists every field.
        Invalid: an option is wrong.
    """
    _check_options(delay, timeout, max_attempts)
    documents = resource.validate(data, ids)
    return [
        NewMessage(id=name, value=value, delay=delay, timeout=timeout, max_attempts=max_attempts)
        for name, value in zip(ids, documents, strict=True)
    ]


async def enqueue_messages(
    database: Database,
    queue: str,
    data: Sequence[Mapping[str, Json]],
    *,
    delay: float = 0.0,
    timeout: float | None = None,
    max_attempts: int | None = None,
) -> list[str]:
    """Push messages to a queue that this process need not have; return their ids.

    Up to 10,000 messages are pushed all or none, and up to 1,000 where the store has no SQL; more
    are pushed in parts of that size.

    Args:
        database: the queue's database, connected.
        queue: as [NAMESPACE/]RESOURCE.
        data: the messages.
        delay: seconds before which they are not handled.
        timeout: seconds that a handler may take; the queue's by default.
        max_attempts: how often each is tried; by default from this process's settings.

    Raises:
        NotFound: there is no such resource; the error lists those that exist.
        Invalid: something is wrong; nothing was pushed.
        Incomplete: some parts were pushed and others not; the error lists them.
    """
    data = as_list("data", data)
    namespace, name = _parse_name(queue)
    if max_attempts is None:
        sources = Sources.load(os.environ, Path.cwd())
        max_attempts = resolve(QueueSettings, {}, sources, section="queue").value.max_attempts
    components = database.components
    new_messages = build_messages(
        database.resource(name),
        data,
        components.ids.records(len(data)),
        delay=delay,
        timeout=timeout,
        max_attempts=max_attempts,
    )
    backend = open_backend(database.store, name_queue(namespace, name), components)
    for start in range(0, len(new_messages), backend.max_push):
        await _push_part(backend, new_messages, start)
    return [message.id for message in new_messages]


def _parse_name(text: str) -> tuple[str, str]:
    """Return the namespace and the resource of [NAMESPACE/]RESOURCE."""
    namespace, _, resource = text.rpartition("/")
    if not resource or "/" in namespace:
        fix = "write tasks, or emails/tasks"
        raise Invalid("queue", text, "must be [NAMESPACE/]RESOURCE", fix)
    return check_plugin_name("namespace", namespace or DEFAULT_NAMESPACE), resource


async def _push_part(backend: QueueBackend, new_messages: Sequence[NewMessage], start: int) -> None:
    size = backend.max_push
    try:
        await backend.push(new_messages[start : start + size])
    except (OutcomeUnknown, Unavailable) as error:
        if not start:
            raise
        ids = [message.id for message in new_messages]
        is_unknown = isinstance(error, OutcomeUnknown)
        raise Incomplete(
            backend.queue,
            written=ids[:start],
            unknown=ids[start : start + size] if is_unknown else (),
            unsent=ids[start + size if is_unknown else start :],
        ) from error


def _check_options(delay: float, timeout: float | None, max_attempts: int) -> None:
    check_seconds("delay", delay)
    if timeout is not None:
        check_seconds("timeout", timeout, is_zero_allowed=False)
    check_max_attempts(max_attempts)
