"""The statements on jobsync's tables in one PostgreSQL schema. Each is one transaction.

Every name is qualified, because a pooler may hand each statement to another session, with
another search path. Time is `clock_timestamp()`: `now()` stands still in a transaction.
"""

from collections.abc import Sequence
from typing import Self

import msgspec

__all__ = ["Statements", "as_array", "quote_name"]

_encode = msgspec.json.Encoder().encode

_GET = """
SELECT key, value, seq, epoch, format, trail FROM {schema}.jobsync_record WHERE key = %s
"""
_GET_MANY = """
SELECT key, value, seq, epoch, format, trail FROM {schema}.jobsync_record
WHERE key = ANY (%s::text[])
"""
_AGE = """
SELECT extract(epoch FROM clock_timestamp() - written)::float8 FROM {schema}.jobsync_record
WHERE key = %s AND seq = %s AND trail = %s
"""
# One level only: nothing but the last segment may follow the prefix.
_HEADS = """
SELECT key, trail FROM {schema}.jobsync_record
WHERE key > %s AND key < %s AND strpos(substr(key, %s), '/') = 0 AND value IS NOT NULL
ORDER BY key LIMIT %s
"""
_SCAN = """
SELECT key, value, seq, epoch, format, trail FROM {schema}.jobsync_record
WHERE key > %s AND key < %s AND strpos(substr(key, %s), '/') = 0 AND value IS NOT NULL
AND {where} ORDER BY key LIMIT %s
"""

_CREATE = """
INSERT INTO {schema}.jobsync_record (value, seq, epoch, format, trail, key)
VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING RETURNING key
"""
_REPLACE = """
UPDATE {schema}.jobsync_record
SET value = %s, seq = %s, epoch = %s, format = %s, trail = %s, written = clock_timestamp()
WHERE key = %s AND seq = %s AND trail = %s RETURNING key
"""
# Creations come first, in the order given; then rows are locked by key. So among writers
# nobody waits in a circle. An UPDATE alone would take them in whatever order is cheapest.
_WRITE = """
WITH given AS (
  SELECT * FROM unnest(
    %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::integer[], %s::text[],
    %s::bigint[], %s::text[]
  ) AS t (key, value, seq, epoch, format, trail, base_seq, base_trail)
), created AS (
  INSERT INTO {schema}.jobsync_record (key, value, seq, epoch, format, trail)
  SELECT key, value, seq, epoch, format, trail FROM given WHERE base_seq IS NULL
  ON CONFLICT DO NOTHING RETURNING key
), locked AS (
  SELECT g.* FROM given AS g JOIN {schema}.jobsync_record AS r
  ON r.key = g.key AND r.seq = g.base_seq AND r.trail = g.base_trail
  ORDER BY r.key FOR UPDATE OF r
), replaced AS (
  UPDATE {schema}.jobsync_record AS r
  SET value = g.value, seq = g.seq, epoch = g.epoch, format = g.format, trail = g.trail,
      written = clock_timestamp()
  FROM locked AS g WHERE r.key = g.key AND r.seq = g.base_seq AND r.trail = g.base_trail
  RETURNING r.key
), done AS (
  SELECT key FROM created UNION ALL SELECT key FROM replaced
)
SELECT key FROM done
"""
_BURY = """
WITH old AS MATERIALIZED (
  SELECT key FROM {schema}.jobsync_record
  WHERE key > %s AND key < %s AND strpos(substr(key, %s), '/') = 0 AND dead
  AND written < (SELECT clock_timestamp() - %s * interval '1 second')
  ORDER BY key LIMIT %s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_record AS r USING old WHERE r.key = old.key RETURNING 1
)
SELECT count(*) FROM gone
"""

_APPEND = """
WITH done AS (
  INSERT INTO {schema}.jobsync_entry (stream, id, value)
  SELECT %s, id, value FROM unnest(%s::text[], %s::text[]) AS t (id, value)
  ON CONFLICT DO NOTHING RETURNING 1
)
"""
_READ = """
SELECT id, stream, value FROM {schema}.jobsync_entry
WHERE stream = %s AND id > %s AND {where} ORDER BY id LIMIT %s
"""
# In a sub-select, so that it is asked once and the index is used. Ids begin with the
# milliseconds of their writer's clock, in 13 digits.
_DROP = """
WITH gone AS (
  DELETE FROM {schema}.jobsync_record WHERE key = ANY(%s::text[]) RETURNING 1
)
SELECT count(*) FROM gone
"""

_DISCARD = """
WITH gone AS (
  DELETE FROM {schema}.jobsync_entry WHERE stream = %s AND id < (
    SELECT to_char(
      greatest(floor((extract(epoch FROM clock_timestamp()) - %s::float8) * 1000), 0),
      'FM0000000000000'
    )
  ) RETURNING 1
)
SELECT count(*) FROM gone
"""

# How a statement ends that tells others of what it did.
_LOUDLY = ", pg_notify(%s, %s)"
_LOUDLY_IF_DONE = """
UNION ALL SELECT pg_notify(%s, topic)::text FROM unnest(%s::text[]) AS t (topic)
WHERE EXISTS (SELECT 1 FROM done)
"""
_LOUDLY_ONCE = "SELECT pg_notify(%s, %s) FROM done LIMIT 1"
_QUIETLY = "SELECT count(*) FROM done"


class Statements(msgspec.Struct, frozen=True, kw_only=True):
    """Every statement by name. The loud ones notify, if they changed anything."""

    get: str
    get_many: str
    age: str
    heads: str
    scan: str
    create: str
    create_loudly: str
    replace: str
    replace_loudly: str
    write: str
    write_loudly: str
    bury: str
    drop: str
    append: str
    append_loudly: str
    read: str
    discard: str

    @classmethod
    def within(cls, schema: str) -> Self:
        """Give the statements for a schema, whose name is already quoted."""
        texts = {
            "get": _GET,
            "get_many": _GET_MANY,
            "age": _AGE,
            "heads": _HEADS,
            "scan": _SCAN,
            "create": _CREATE,
            "create_loudly": _CREATE + _LOUDLY,
            "replace": _REPLACE,
            "replace_loudly": _REPLACE + _LOUDLY,
            "write": _WRITE,
            "write_loudly": _WRITE + _LOUDLY_IF_DONE,
            "bury": _BURY,
            "drop": _DROP,
            "append": _APPEND + _QUIETLY,
            "append_loudly": _APPEND + _LOUDLY_ONCE,
            "read": _READ,
            "discard": _DISCARD,
        }
        # A name may hold the sign that marks parameters.
        name = schema.replace("%", "%%")
        return cls(**{key: text.replace("{schema}", name) for key, text in texts.items()})


def quote_name(name: str) -> str:
    """Give a name as SQL takes it, whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def as_array(items: Sequence[str | int | float | None]) -> str:
    """Give an array as SQL writes it, at a tenth of what psycopg takes for it.

    It is JSON's but for the brackets, as long as no text holds a control character: names
    hold none, and JSON texts have them escaped.
    """
    return f"{{{_encode(items)[1:-1].decode()}}}"
