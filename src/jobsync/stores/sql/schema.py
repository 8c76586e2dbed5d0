"""The tables that SQL stores keep, and how they are brought up to date.

Values are JSON and need no migration. Tables have a version; a step to the next one only
adds, so that older code goes on working beside newer.
"""

__all__ = ["POSTGRES_STEPS", "SQLITE_STEPS"]

_SQLITE_1 = (
    """
CREATE TABLE jobsync_record (
  key     TEXT    NOT NULL PRIMARY KEY,
  value   TEXT,              -- JSON; NULL marks a tombstone
  seq     INTEGER NOT NULL,  -- counts the writes to this name
  epoch   INTEGER NOT NULL,  -- the highest term that wrote it
  format  INTEGER NOT NULL,  -- of the value
  trail   TEXT    NOT NULL,  -- nonces of the latest writes, newest first
  boot    INTEGER NOT NULL,  -- which boot of this machine `written` counts from
  written REAL    NOT NULL   -- seconds since that boot
) STRICT
""",
    "CREATE INDEX jobsync_record_tombstone ON jobsync_record (key) WHERE value IS NULL",
    """
CREATE TABLE jobsync_entry (
  stream TEXT NOT NULL,
  id     TEXT NOT NULL,      -- time, writer, place in the batch
  value  TEXT NOT NULL,      -- JSON
  PRIMARY KEY (stream, id)
) STRICT, WITHOUT ROWID
""",
)

SQLITE_STEPS: tuple[tuple[str, ...], ...] = (_SQLITE_1,)
"""Step n brings a file from schema version n to n + 1."""

_POSTGRES_1 = (
    # Text and not jsonb, which would rewrite 1.0 and 1e22. Room is left on each page, so
    # that a heartbeat rewrites its row in place.
    """
CREATE TABLE IF NOT EXISTS {schema}.jobsync_record (
  key     text COLLATE "C" NOT NULL PRIMARY KEY,
  value   text,              -- JSON; NULL marks a tombstone
  seq     bigint  NOT NULL,  -- counts the writes to this name
  epoch   bigint  NOT NULL,  -- the highest term that wrote it
  format  integer NOT NULL,  -- of the value
  trail   text COLLATE "C" NOT NULL,  -- nonces of the latest writes, newest first
  written timestamptz NOT NULL DEFAULT clock_timestamp(),
  dead    boolean NOT NULL GENERATED ALWAYS AS (value IS NULL) STORED
) WITH (fillfactor = 80)
""",
    # On `dead`: an index that looked at `value` would move the row at each write.
    """
CREATE INDEX IF NOT EXISTS jobsync_record_tombstone ON {schema}.jobsync_record (key) WHERE dead
""",
    """
CREATE TABLE IF NOT EXISTS {schema}.jobsync_entry (
  stream text COLLATE "C" NOT NULL,
  id     text COLLATE "C" NOT NULL,  -- time, writer, place in the batch
  value  text NOT NULL,              -- JSON
  PRIMARY KEY (stream, id)
)
""",
)

POSTGRES_STEPS: tuple[tuple[str, ...], ...] = (_POSTGRES_1,)
"""Step n brings a schema from version n to n + 1. Safe to repeat, as administrators may."""
