"""Open one queue, or the directory of all queues, with the code that fits the store.

On databases messages are rows, see `jobsync.queue.sql`; other stores have them in pages, see
`jobsync.queue.pages`.

On its own because processes with and without the plugin open queues.
"""

from jobsync.components import Components
from jobsync.errors import Invalid
from jobsync.queue.backend import QueueBackend
from jobsync.queue.directory import QueueDirectory
from jobsync.queue.pages.backend import PagesBackend
from jobsync.queue.pages.directory import PagesDirectory
from jobsync.queue.settings import QueueOrder
from jobsync.queue.sql.sqlite import SqliteBackend
from jobsync.queue.sql.sqlite_reading import SqliteQueueDirectory
from jobsync.stores.contract import Store
from jobsync.stores.sql import PostgresAccess, SqliteAccess

__all__ = ["open_backend", "open_directory"]


def open_backend(
    store: Store, queue: str, components: Components, *, order: QueueOrder = "fifo"
) -> QueueBackend:
    """Return the backend of a queue in a store.

    Raises:
        Invalid: the store does not have this order.
    """
    if store.sql is not None and order != "fifo":
        problem = "is not possible on a database: its claims take the oldest rows"
        raise Invalid("order", order, problem, 'use "fifo", or a queue on S3')
    match store.sql:
        case SqliteAccess() as access:
            return SqliteBackend(access, queue, components)
        case PostgresAccess() as access:
            from jobsync.queue.sql.postgres import PostgresBackend  # noqa: PLC0415 - an extra

            return PostgresBackend(access, queue, components)
        case _:
            return PagesBackend(store, queue, components, order=order)


def open_directory(store: Store, components: Components) -> QueueDirectory:
    """Return the directory of a store's queues."""
    match store.sql:
        case SqliteAccess() as access:
            return SqliteQueueDirectory(access, components)
        case PostgresAccess() as access:
            from jobsync.queue.sql.postgres import (  # noqa: PLC0415 - an extra
                PostgresQueueDirectory,
            )

            return PostgresQueueDirectory(access, components)
        case _:
            return PagesDirectory(store, components)
