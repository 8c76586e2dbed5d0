-- The tables of an SQLite store.
--
-- Values are JSON and need no migration. Tables have a version: the blocks that start with `v3_`
-- bring a file from version 2 to 3. A step only adds, so that older code keeps working beside
-- newer code.

-- name: v1_record
-- Records: one row for each key, tombstones included.
CREATE TABLE jobsync_record (
  key     TEXT    NOT NULL PRIMARY KEY,
  value   TEXT,              -- JSON; NULL marks a tombstone
  seq     INTEGER NOT NULL,  -- counts the writes to this key
  epoch   INTEGER NOT NULL,  -- the highest term that wrote it
  format  INTEGER NOT NULL,  -- of the value
  trail   TEXT    NOT NULL,  -- nonces of the latest writes, newest first
  boot    INTEGER NOT NULL,  -- the boot of this machine that `written` counts from
  written REAL    NOT NULL   -- seconds since that boot
) STRICT;

-- name: v1_record_tombstone
-- Finds tombstones to remove.
CREATE INDEX jobsync_record_tombstone ON jobsync_record (key) WHERE value IS NULL;

-- name: v1_entry
-- Histories.
CREATE TABLE jobsync_entry (
  stream TEXT NOT NULL,
  id     TEXT NOT NULL,      -- time, writer, position in the batch
  value  TEXT NOT NULL,      -- JSON
  PRIMARY KEY (stream, id)
) STRICT, WITHOUT ROWID;

-- name: v2_message
-- Messages that are not finished. Unlike in PostgreSQL, deleted rows leave the indexes at once, so
-- a claim needs no lowest position to start from.
CREATE TABLE jobsync_message (
  position     INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of ready messages
  id           TEXT    NOT NULL UNIQUE,
  queue        TEXT    NOT NULL,
  state        TEXT    NOT NULL,            -- ready, waiting, claimed
  due          REAL    NOT NULL,            -- waiting: Unix seconds; claimed: seconds since boot
  boot         INTEGER NOT NULL DEFAULT 0,  -- claimed: the boot that `due` counts from
  payload      TEXT    NOT NULL,            -- JSON
  deliveries   INTEGER NOT NULL DEFAULT 0,  -- how often it was claimed
  returned     INTEGER NOT NULL DEFAULT 0,  -- how often it was given back
  max_attempts INTEGER NOT NULL,
  timeout      REAL,                        -- seconds for its handler; NULL: the queue's
  suspect      INTEGER NOT NULL DEFAULT 0,  -- whether its last claim lapsed
  claim        TEXT    NOT NULL DEFAULT '', -- nonce of the claim
  session      TEXT    NOT NULL DEFAULT '', -- the session that has claimed it
  trail        TEXT    NOT NULL DEFAULT '', -- how its latest claims were settled
  errors       TEXT    NOT NULL DEFAULT '', -- JSON, one line for each failed attempt
  enqueued     REAL    NOT NULL,            -- Unix seconds
  format       INTEGER NOT NULL DEFAULT 1
) STRICT;

-- name: v2_message_ready
-- Ready messages of a queue, in order.
CREATE INDEX jobsync_message_ready ON jobsync_message (queue, position) WHERE state = 'ready';

-- name: v2_message_waiting
-- Delayed messages of a queue; suspects apart.
CREATE INDEX jobsync_message_waiting ON jobsync_message (queue, suspect, due)
WHERE state = 'waiting';

-- name: v2_message_claimed
-- Claims of a queue, the one that lapses first in front.
CREATE INDEX jobsync_message_claimed ON jobsync_message (queue, due) WHERE state = 'claimed';

-- name: v2_finished
-- Messages that are finished.
CREATE TABLE jobsync_finished (
  id           TEXT    NOT NULL PRIMARY KEY,
  queue        TEXT    NOT NULL,
  state        TEXT    NOT NULL,            -- completed, cancelled, dead
  payload      TEXT,                        -- JSON; NULL if completed
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
) STRICT, WITHOUT ROWID;

-- name: v2_finished_state
-- Finished messages of a queue by state, oldest first.
CREATE INDEX jobsync_finished_state ON jobsync_finished (queue, state, finished, id);

-- name: v3_message_claimed_at
-- When the message was claimed, in Unix seconds.
ALTER TABLE jobsync_message ADD COLUMN claimed REAL;

-- name: v3_pause
-- A row for each paused queue: none of its messages is claimed until the row is removed.
CREATE TABLE jobsync_pause (
  queue  TEXT NOT NULL PRIMARY KEY,
  since  REAL NOT NULL,      -- Unix seconds
  reason TEXT NOT NULL       -- for people
) STRICT, WITHOUT ROWID;

-- name: v4_message_newer
-- Messages of newer code, which this code leaves alone: it counts them.
CREATE INDEX jobsync_message_newer ON jobsync_message (queue, format) WHERE format > 1;

-- name: v5_message_wakes
-- When a delay ends, in seconds since the boot that `boot` names, because the wall clock may be set.
-- `due` is the same by the wall clock, for people, for older code, and after a reboot.
ALTER TABLE jobsync_message ADD COLUMN wakes REAL;

-- name: v5_message_delayed
-- Delayed messages of a queue by boot; suspects apart.
CREATE INDEX jobsync_message_delayed ON jobsync_message (queue, suspect, boot, wakes)
WHERE state = 'waiting';

-- name: v6_message_task
-- The name of the task that handles the message; empty for the queue's only handler.
ALTER TABLE jobsync_message ADD COLUMN task TEXT NOT NULL DEFAULT '';

-- name: v6_finished_task
-- Likewise.
ALTER TABLE jobsync_finished ADD COLUMN task TEXT NOT NULL DEFAULT '';
