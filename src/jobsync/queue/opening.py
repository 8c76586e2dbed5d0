"""From a store to the port of a queue that fits it, and to the directory of all its queues."""

from jobsync.components import Components
from jobsync.errors import Misconfigured
from jobsync.queue.directory import Directory, PostgresDirectory, SqliteDirectory
from jobsync.queue.port import QueuePort
from jobsync.queue.rows_sqlite import SqliteRows
from jobsync.stores.contract import Store
from jobsync.stores.sql_access import PostgresAccess, SqliteAccess

__all__ = ["open_directory", "open_port"]


def open_port(store: Store, queue: str, components: Components) -> QueuePort:
    """Give the place of a queue's messages in a store.

    Raises:
        Misconfigured: queues cannot be kept there.
    """
    match store.sql:
        case SqliteAccess() as access:
            return SqliteRows(access, queue, components)
        case PostgresAccess() as access:
            from jobsync.queue.rows_postgres import PostgresRows  # noqa: PLC0415 - an extra

            return PostgresRows(access, queue, components)
        case _:
            raise _refuse(store)


def open_directory(store: Store, components: Components) -> Directory:
    """Give the directory of a store's queues.

    Raises:
        Misconfigured: queues cannot be kept there.
    """
    match store.sql:
        case SqliteAccess() as access:
            return SqliteDirectory(access, components)
        case PostgresAccess() as access:
            return PostgresDirectory(access, components)
        case _:
            raise _refuse(store)


def _refuse(store: Store) -> Misconfigured:
    fix = "use sqlite:/// or postgresql://"
    return Misconfigured("url", store.name, "cannot keep queues yet", fix)
