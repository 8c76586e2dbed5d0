"""From a store to the port of a queue that fits it, and to the directory of all its queues."""

from jobsync.components import Components
from jobsync.errors import Misconfigured
from jobsync.queue.backend import QueueBackend
from jobsync.queue.sql.directory import (
    PostgresQueueDirectory,
    QueueDirectory,
    SqliteQueueDirectory,
)
from jobsync.queue.sql.sqlite import SqliteBackend
from jobsync.stores.contract import Store
from jobsync.stores.sql import PostgresAccess, SqliteAccess

__all__ = ["open_backend", "open_directory"]


def open_backend(store: Store, queue: str, components: Components) -> QueueBackend:
    """Give the place of a queue's messages in a store.

    Raises:
        Misconfigured: queues cannot be kept there.
    """
    match store.sql:
        case SqliteAccess() as access:
            return SqliteBackend(access, queue, components)
        case PostgresAccess() as access:
            from jobsync.queue.sql.postgres import PostgresBackend  # noqa: PLC0415 - an extra

            return PostgresBackend(access, queue, components)
        case _:
            raise _refuse(store)


def open_directory(store: Store, components: Components) -> QueueDirectory:
    """Give the directory of a store's queues.

    Raises:
        Misconfigured: queues cannot be kept there.
    """
    match store.sql:
        case SqliteAccess() as access:
            return SqliteQueueDirectory(access, components)
        case PostgresAccess() as access:
            return PostgresQueueDirectory(access, components)
        case _:
            raise _refuse(store)


def _refuse(store: Store) -> Misconfigured:
    fix = "use sqlite:/// or postgresql://"
    return Misconfigured("url", store.name, "cannot keep queues yet", fix)
