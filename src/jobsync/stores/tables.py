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

_SQLITE_2 = (
    # What is still to be handled. No floor is needed here: what is deleted leaves the index.
    """
CREATE TABLE jobsync_message (
  position     INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of what is ready
  id           TEXT    NOT NULL UNIQUE,
  queue        TEXT    NOT NULL,
  state        TEXT    NOT NULL,            -- ready, waiting, claimed
  due          REAL    NOT NULL,            -- waiting: Unix seconds; claimed: seconds since boot
  boot         INTEGER NOT NULL DEFAULT 0,  -- claimed: which boot of this machine that counts from
  payload      TEXT    NOT NULL,            -- JSON
  deliveries   INTEGER NOT NULL DEFAULT 0,  -- how often it was claimed
  returned     INTEGER NOT NULL DEFAULT 0,  -- how often it was given back
  max_attempts INTEGER NOT NULL,
  timeout      REAL,                        -- seconds for its handler; NULL: the queue's
  suspect      INTEGER NOT NULL DEFAULT 0,  -- whether its last claim lapsed
  claim        TEXT    NOT NULL DEFAULT '', -- nonce of the claim
  session      TEXT    NOT NULL DEFAULT '', -- who has claimed it
  trail        TEXT    NOT NULL DEFAULT '', -- how its latest claims were settled
  errors       TEXT    NOT NULL DEFAULT '', -- JSON, a line for each attempt that failed
  enqueued     REAL    NOT NULL,            -- Unix seconds
  format       INTEGER NOT NULL DEFAULT 1
) STRICT
""",
    "CREATE INDEX jobsync_message_ready ON jobsync_message (queue, position) WHERE state = 'ready'",
    """
CREATE INDEX jobsync_message_waiting ON jobsync_message (queue, suspect, due)
WHERE state = 'waiting'
""",
    "CREATE INDEX jobsync_message_claimed ON jobsync_message (queue, due) WHERE state = 'claimed'",
    """
CREATE TABLE jobsync_finished (
  id           TEXT    NOT NULL PRIMARY KEY,
  queue        TEXT    NOT NULL,
  state        TEXT    NOT NULL,            -- completed, cancelled, dead
  payload      TEXT,                        -- JSON; not kept of what was completed
  deliveries   INTEGER NOT NULL,
  returned     INTEGER NOT NULL,
  max_attempts INTEGER NOT NULL,
  timeout      REAL,
  session      TEXT    NOT NULL,
  trail        TEXT    NOT NULL,
  errors       TEXT    NOT NULL,
  enqueued     REAL    NOT NULL,
  finished     REAL    NOT NULL,            -- Unix seconds
  format       INTEGER NOT NULL
) STRICT, WITHOUT ROWID
""",
    "CREATE INDEX jobsync_finished_state ON jobsync_finished (queue, state, finished, id)",
)

_SQLITE_3 = (
    # Unix seconds: since when somebody has claimed it.
    "ALTER TABLE jobsync_message ADD COLUMN claimed REAL",
    # A row for each queue of which nothing is claimed until somebody removes the row.
    """
CREATE TABLE jobsync_pause (
  queue  TEXT NOT NULL PRIMARY KEY,
  since  REAL NOT NULL,      -- Unix seconds
  reason TEXT NOT NULL       -- for people
) STRICT, WITHOUT ROWID
""",
)

SQLITE_STEPS: tuple[tuple[str, ...], ...] = (_SQLITE_1, _SQLITE_2, _SQLITE_3)
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

_POSTGRES_2 = (
    # What is still to be handled. Only what was just pushed is ready: whatever comes back
    # is waiting, so that who claims need not look again below the lowest position it found.
    """
CREATE TABLE IF NOT EXISTS {schema}.jobsync_message (
  id           text COLLATE "C" NOT NULL PRIMARY KEY,
  position     bigint GENERATED BY DEFAULT AS IDENTITY,  -- the order of what is ready
  queue        text COLLATE "C" NOT NULL,
  state        text COLLATE "C" NOT NULL,         -- ready, waiting, claimed
  due          timestamptz NOT NULL,              -- when a delay is over or a claim lapses
  payload      text NOT NULL,                     -- JSON
  deliveries   integer NOT NULL DEFAULT 0,        -- how often it was claimed
  returned     integer NOT NULL DEFAULT 0,        -- how often it was given back
  max_attempts integer NOT NULL,
  timeout      double precision,                  -- seconds for its handler; NULL: the queue's
  suspect      boolean NOT NULL DEFAULT false,    -- whether its last claim lapsed
  claim        text COLLATE "C" NOT NULL DEFAULT '',  -- nonce of the claim
  session      text COLLATE "C" NOT NULL DEFAULT '',  -- who has claimed it
  trail        text COLLATE "C" NOT NULL DEFAULT '',  -- how its latest claims were settled
  errors       text NOT NULL DEFAULT '',          -- JSON, a line for each attempt that failed
  enqueued     timestamptz NOT NULL DEFAULT clock_timestamp(),
  format       integer NOT NULL DEFAULT 1
)
""",
    """
CREATE INDEX IF NOT EXISTS jobsync_message_ready ON {schema}.jobsync_message (queue, position)
WHERE state = 'ready'
""",
    """
CREATE INDEX IF NOT EXISTS jobsync_message_waiting
ON {schema}.jobsync_message (queue, suspect, due) WHERE state = 'waiting'
""",
    """
CREATE INDEX IF NOT EXISTS jobsync_message_claimed ON {schema}.jobsync_message (queue, due)
WHERE state = 'claimed'
""",
    """
CREATE TABLE IF NOT EXISTS {schema}.jobsync_finished (
  id           text COLLATE "C" NOT NULL PRIMARY KEY,
  queue        text COLLATE "C" NOT NULL,
  state        text COLLATE "C" NOT NULL,         -- completed, cancelled, dead
  payload      text,                              -- JSON; not kept of what was completed
  deliveries   integer NOT NULL,
  returned     integer NOT NULL,
  max_attempts integer NOT NULL,
  timeout      double precision,
  session      text COLLATE "C" NOT NULL,
  trail        text COLLATE "C" NOT NULL,
  errors       text NOT NULL,
  enqueued     timestamptz NOT NULL,
  finished     timestamptz NOT NULL DEFAULT clock_timestamp(),
  format       integer NOT NULL
)
""",
    """
CREATE INDEX IF NOT EXISTS jobsync_finished_state
ON {schema}.jobsync_finished (queue, state, finished, id)
""",
)

_POSTGRES_3 = (
    # Since when somebody has claimed it.
    "ALTER TABLE {schema}.jobsync_message ADD COLUMN IF NOT EXISTS claimed timestamptz",
    # A row for each queue of which nothing is claimed until somebody removes the row.
    """
CREATE TABLE IF NOT EXISTS {schema}.jobsync_pause (
  queue  text COLLATE "C" NOT NULL PRIMARY KEY,
  since  timestamptz NOT NULL DEFAULT clock_timestamp(),
  reason text NOT NULL               -- for people
)
""",
)

POSTGRES_STEPS: tuple[tuple[str, ...], ...] = (_POSTGRES_1, _POSTGRES_2, _POSTGRES_3)
"""Step n brings a schema from version n to n + 1. Safe to repeat, as administrators may."""
