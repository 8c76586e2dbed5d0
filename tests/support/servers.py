"""The real servers that tests run on."""

from collections.abc import Callable
from typing import TypeAlias

from base_server import Server, ServerFailed
from ceph_server import CephServer
from postgres_servers import PgBouncer, PostgresServer
from s3_servers import (
    ADMIN,
    READER,
    WRITER,
    WRITERS_BUCKET,
    Identity,
    MinistackServer,
    RcloneServer,
    S3Server,
    SeaweedServer,
)

__all__ = [
    "ADMIN",
    "READER",
    "WRITER",
    "WRITERS_BUCKET",
    "CephServer",
    "Identity",
    "Locate",
    "MinistackServer",
    "PgBouncer",
    "PostgresServer",
    "RcloneServer",
    "S3Server",
    "SeaweedServer",
    "Server",
    "ServerFailed",
]

Locate: TypeAlias = Callable[[str], str]
"""Returns the URL of an empty store of a kind: memory, sqlite, postgres or s3."""
