"""Open one queue, or the directory of all queues, with the code that fits the store.

On its own because it imports every backend, and is imported by all who use one. On databases
messages are rows, see `jobsync.queue.sql`; other stores have them in pages, see
`jobsync.queue.pages`.

On its own because processes with and without the plugin open queues.
"""

from jobsync.components import Components
from jobsync.errors import Invalid
from jobsync.queue.backend import QueueBackend
from jobsync.queue.directory import QueueDirectory
from jobsync.queue.limits import NO_LIMITS, QueueLimits
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.directory import PagesDirectory
from jobsync.queue.settings import QueueOrder
from jobsync.queue.sql.sqlite import SqliteBackend
from jobsync.queue.sql.sqlite_directory import SqliteQueueDirectory
from jobsync.stores.contract import Store
from jobsync.stores.sql import PostgresAccess, SqliteAccess

__all__ = ["check_limits", "open_backend", "open_directory"]


def check_limits(store: Store, limits: QueueLimits) -> None:
    """Check that a store can count claims, if there are limits.

    Raises:
        Invalid: it cannot.
    """
    if store.sql is None and limits != NO_LIMITS:
        problem = "are only possible on a database, where claims are counted one after the other"
        raise Invalid("limits", limits, problem, "leave them out, or use a queue on a database")


def open_backend(
    store: Store,
    queue: str,
    components: Components,
    *,
    order: QueueOrder = "fifo",
    limits: QueueLimits = NO_LIMITS,
) -> QueueBackend:
    """Return the backend of a queue in a store.

    Raises:
        Invalid: the store has no limits.
    """
    check_limits(store, limits)
    match store.sql:
        case SqliteAccess() as access:
            return SqliteBackend(access, queue, components, order, limits)
        case PostgresAccess() as access:
            from jobsync.queue.sql.postgres import PostgresBackend  # noqa: PLC0415 - an extra

            return PostgresBackend(access, queue, components, order, limits)
        case _:
            return PagesBackend(store, queue, components, order=order)


def open_directory(store: Store, components: Components) -> QueueDirectory:
    """Return the directory of a store's queues."""
    match store.sql:
        case SqliteAccess() as access:
            return SqliteQueueDirectory(access, components)
        case PostgresAccess() as access:
            from jobsync.queue.sql.postgres_directory import (  # noqa: PLC0415 - an extra
                PostgresQueueDirectory,
            )

            return PostgresQueueDirectory(access, components)
        case _:
            return PagesDirectory(store, components)
