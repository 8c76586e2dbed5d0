"""From a store to the port of a queue that fits it."""

from jobsync.components import Components
from jobsync.errors import Misconfigured
from jobsync.queue.port import QueuePort
from jobsync.queue.rows_sqlite import SqliteRows
from jobsync.stores.contract import Store
from jobsync.stores.sql.access import PostgresAccess, SqliteAccess

__all__ = ["open_port"]


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
            raise Misconfigured(
                "url", store.name, "cannot keep queues yet", "use sqlite:/// or postgresql://"
            )
