"""The driver's connection behind whatever a caller holds, so that a push joins its transaction.

SQLAlchemy's connections lead to it by `driver_connection`; it need not be installed here.
"""

from typing import Any

from jobsync.errors import Invalid

__all__ = ["driver_of", "refuse"]


def driver_of(connection: object) -> object:
    """Give the connection that the database's driver made."""
    held: Any = connection
    # An asynchronous connection of SQLAlchemy's has a plain one inside.
    held = getattr(held, "sync_connection", None) or held
    if not hasattr(held, "driver_connection"):
        inside = getattr(held, "connection", None)
        held = inside if hasattr(inside, "driver_connection") else held
    return getattr(held, "driver_connection", held)


def refuse(connection: object, problem: str, fix: str) -> Invalid:
    """Say why a transaction cannot be joined."""
    kind = type(connection)
    return Invalid("connection", f"{kind.__module__}.{kind.__qualname__}", problem, fix)
