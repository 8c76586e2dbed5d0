"""A connection to a PostgreSQL store for people's own SQL: psycopg's, ready to use.

Every statement is a transaction of its own, or part of the block of `transaction()`. It
speaks in the time zone that it is given, and finds jobsync's views without their schema's
name. Behind a pooler that gives each transaction another session only the zone is sure.
"""

from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from jobsync.core.urls import PostgresUrl
from jobsync.errors import Misconfigured
from jobsync.stores.postgres.errors import explain, explain_refusal

__all__ = ["connect_postgres"]

_DEFAULTS: dict[str, str | int] = {"connect_timeout": 5, "fallback_application_name": "jobsync"}
# The views look dear to the planner, and compiling them takes longer than running them.
_SET_ZONE = "SELECT set_config('TimeZone', %s, false), set_config('jit', 'off', false)"
_SET_PATH = """
SELECT set_config(
  'search_path', concat_ws(', ', quote_ident(%s), nullif(current_setting('search_path'), '')), false
)
"""


def connect_postgres(url: PostgresUrl, zone: str) -> psycopg.Connection[Any]:
    """Connect, and speak in a time zone.

    Raises:
        Misconfigured: the server refuses us, or does not know the zone.
        Unavailable: it cannot be reached.
    """
    given = {name for name, _ in url.params}
    rest = {name: value for name, value in _DEFAULTS.items() if name not in given}
    try:
        connection = psycopg.connect(
            make_conninfo(url.reveal(), client_encoding="utf8", **rest), autocommit=True
        )
    except psycopg.Error as error:
        # Without its cause, which may quote a secret.
        raise explain_refusal(url, error) from None
    try:
        connection.execute(_SET_ZONE, [zone])
        if url.schema:
            connection.execute(_SET_PATH, [url.schema])
    except psycopg.errors.InvalidParameterValue as error:
        connection.close()
        raise Misconfigured(
            "timezone", zone, "is unknown to the server", "name one, such as Europe/Berlin"
        ) from error
    except psycopg.Error as error:
        connection.close()
        raise explain(url, error) from error
    return connection
