"""How messages get in: checked by their resource's schema, then pushed.

Nothing is pushed unless all of it is right. Who has no plugin of a queue, such as a command,
can post to it all the same.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobsync.core.codec import Json
from jobsync.database.database import Database
from jobsync.database.plugin import check_plugin_name
from jobsync.database.resource import Resource
from jobsync.errors import Incomplete, Invalid, OutcomeUnknown, Unavailable
from jobsync.queue.backend import DEFAULT_NAMESPACE, NewMessage, QueueBackend, name_queue
from jobsync.queue.settings import QueueSettings
from jobsync.queue.sql import open_backend
from jobsync.queue.sql.common import MAX_BATCH
from jobsync.settings import Sources, resolve

__all__ = ["build_messages", "enqueue_messages"]

_LONGEST_DELAY = 366 * 86_400.0
_MOST_ATTEMPTS = 1_000_000


def build_messages(
    resource: Resource,
    data: Sequence[Mapping[str, Json]],
    ids: Sequence[str],
    *,
    delay: float,
    timeout: float | None,
    max_attempts: int,
) -> list[NewMessage]:
    """Make messages of data, each under an id.

    Raises:
        InvalidRecord: some break the resource's schema; lists every field.
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
    """Push messages to a queue that this process need not have; give their ids.

    Up to 10,000 are pushed all or none, more in parts of so many.

    Args:
        database: where the queue is, connected.
        queue: as [NAMESPACE/]RESOURCE.
        data: the messages.
        delay: seconds before which nobody handles them.
        timeout: seconds that a handler may take; the queue's by default.
        max_attempts: how often each is tried; by default what this process's settings say.

    Raises:
        NotFound: there is no such resource; names those that there are.
        Invalid: something is wrong; nothing was pushed.
        Incomplete: some parts were pushed, and others not; tells which.
    """
    namespace, name = _read_name(queue)
    if max_attempts is None:
        sources = Sources.load(os.environ, Path.cwd())
        max_attempts = resolve(QueueSettings, {}, sources, section="queue").value.max_attempts
    components = database.components
    letters = build_messages(
        database.resource(name),
        data,
        components.ids.records(len(data)),
        delay=delay,
        timeout=timeout,
        max_attempts=max_attempts,
    )
    port = open_backend(database.store, name_queue(namespace, name), components)
    for start in range(0, len(letters), MAX_BATCH):
        await _push_part(port, letters, start)
    return [letter.id for letter in letters]


def _read_name(text: str) -> tuple[str, str]:
    """Understand [NAMESPACE/]RESOURCE."""
    namespace, _, resource = text.rpartition("/")
    if not resource or "/" in namespace:
        raise Invalid("queue", text, "is no queue's name", "write tasks, or emails/tasks")
    return check_plugin_name("namespace", namespace or DEFAULT_NAMESPACE), resource


async def _push_part(port: QueueBackend, letters: Sequence[NewMessage], start: int) -> None:
    try:
        await port.push(letters[start : start + MAX_BATCH])
    except (OutcomeUnknown, Unavailable) as error:
        if not start:
            raise
        ids = [letter.id for letter in letters]
        is_unknown = isinstance(error, OutcomeUnknown)
        raise Incomplete(
            port.queue,
            written=ids[:start],
            unknown=ids[start : start + MAX_BATCH] if is_unknown else (),
            unsent=ids[start + MAX_BATCH if is_unknown else start :],
        ) from error


def _check_options(delay: float, timeout: float | None, max_attempts: int) -> None:
    if not 0 <= delay <= _LONGEST_DELAY:
        raise Invalid("delay", delay, "is no duration", "give seconds, 0 to 366 days")
    if timeout is not None and not 0 < timeout <= _LONGEST_DELAY:
        raise Invalid("timeout", timeout, "is no duration", "give seconds, up to 366 days")
    if not 1 <= max_attempts <= _MOST_ATTEMPTS:
        raise Invalid("max_attempts", max_attempts, "is no count", "give 1 to 1,000,000")
