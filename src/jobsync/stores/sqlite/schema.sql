-- The tables of an SQLite store.
--
-- Values are JSON and need no migration. Tables have a version: the blocks that start with `v3_`
-- bring a file from version 2 to 3. A step only adds, so that older code keeps working beside
-- newer code. Version 7 is the exception: it moves claims to a table of their own, and code that does
-- not know that table refuses to connect.

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

-- name: v7_claim
-- Claims: one row for each batch that was claimed, with all its messages in order. `outcomes` has a
-- letter for each message:
--   o open, c completed, f completed and forgotten, x cancelled, r retried, d buried, b released,
--   s snoozed, l ended because it lapsed or its session died, p purged, v cancelled from outside
-- When no message is open the row is closed and its payloads are removed. It stays as the record of
-- the completed messages, and answers settlements that are repeated.
CREATE TABLE jobsync_claim (
  number    INTEGER PRIMARY KEY,
  claim     TEXT    NOT NULL UNIQUE,      -- nonce
  queue     TEXT    NOT NULL,
  session   TEXT    NOT NULL,             -- the session that has claimed them
  claimed   REAL    NOT NULL,             -- Unix seconds
  due       REAL    NOT NULL,             -- when the first open message lapses: seconds since boot
  boot      INTEGER NOT NULL,             -- the boot that `due` counts from
  suspect   INTEGER NOT NULL,             -- whether it is a claim of suspects
  format    INTEGER NOT NULL DEFAULT 1,   -- the highest format of its messages
  open      INTEGER NOT NULL,             -- how many are open
  completed INTEGER NOT NULL DEFAULT 0,   -- how many are recorded as completed
  closed    REAL,                         -- Unix seconds; NULL while a message is open
  finished  REAL,                         -- when the latest of them was completed: Unix seconds
  low       TEXT    NOT NULL,             -- the least of the ids
  high      TEXT    NOT NULL,             -- the greatest of the ids
  outcomes  TEXT    NOT NULL,
  messages  TEXT    NOT NULL,             -- JSON: for each an array of id, position, deliveries,
                                          -- returned, max_attempts, timeout, enqueued, task, and
                                          -- where its payload starts and how many bytes it has
  errors    TEXT,                         -- JSON: the errors of each; NULL if there are none
  dues      TEXT,                         -- JSON: when each lapses; NULL if all do at `due`
  times     TEXT,                         -- JSON: when each was completed; NULL if all were at
                                          -- `finished`
  payloads  BLOB                          -- one after the other; NULL if they are large, or closed
) STRICT;

-- name: v7_claim_payload
-- The payloads of open claims if they are large: apart, so that settling a few messages of a claim does
-- not write the payloads of all again.
CREATE TABLE jobsync_claim_payload (
  number   INTEGER PRIMARY KEY,
  payloads BLOB    NOT NULL
) STRICT;

-- name: v7_claim_open
-- Open claims of a queue, the one that lapses first in front.
CREATE INDEX jobsync_claim_open ON jobsync_claim (queue, due) WHERE open > 0;

-- name: v7_claim_completed
-- Claims of a queue with completed messages, oldest first.
CREATE INDEX jobsync_claim_completed ON jobsync_claim (queue, finished, claimed, completed)
WHERE completed > 0;

-- name: v7_claim_times
-- Claims of a queue whose messages were completed at different times, the first one in front.
CREATE INDEX jobsync_claim_times ON jobsync_claim (queue, claimed)
WHERE completed > 0 AND times IS NOT NULL;

-- name: v7_claim_answers
-- Closed claims of a queue that only answer settlements.
CREATE INDEX jobsync_claim_answers ON jobsync_claim (queue, closed)
WHERE completed = 0 AND closed IS NOT NULL;

-- name: v7_claim_id
-- Finds claims of one message by its id.
CREATE INDEX jobsync_claim_id ON jobsync_claim (low) WHERE low = high;

-- name: v7_claim_ids
-- Finds claims of many messages by id. Ids sort by time, so the ids of a claim are close together.
CREATE INDEX jobsync_claim_ids ON jobsync_claim (high, low) WHERE low < high;

-- name: v7_move_claims
-- Give each message that older code has claimed a claim of its own.
INSERT INTO jobsync_claim (
  claim, queue, session, claimed, due, boot, suspect, format, open, low, high, outcomes, messages,
  errors, payloads
)
SELECT claim || ':' || id, queue, session, coalesce(claimed, enqueued), due, boot, suspect, format,
  1, id, id, 'o', json_array(json_array(
    id, position, deliveries, returned, max_attempts, timeout, enqueued, task, 0,
    length(CAST(payload AS BLOB))
  )), CASE WHEN errors <> '' THEN json_array(errors) END, CAST(payload AS BLOB)
FROM jobsync_message WHERE state = 'claimed' ORDER BY position;

-- name: v7_delete_claimed
-- There are no claimed messages in this table any more.
DELETE FROM jobsync_message WHERE state = 'claimed';

-- name: v7_drop_message_claimed
-- Likewise.
DROP INDEX jobsync_message_claimed;

-- name: v7_drop_message_waiting
-- Only older code read it.
DROP INDEX jobsync_message_waiting;

-- name: v7_drop_message_claim
-- Without this column older code that is connected cannot claim. The column `session` stays, because
-- a view may show it; nothing reads it.
ALTER TABLE jobsync_message DROP COLUMN claim;

-- name: v7_drop_message_trail
-- Claims record how they were settled.
ALTER TABLE jobsync_message DROP COLUMN trail;

-- name: v8_message_priority
-- The priority of a message. A message with one, or with a group, is of format 2, so that older code
-- leaves it alone. If it is ready, it is stored as `ranked`.
ALTER TABLE jobsync_message ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;

-- name: v8_message_group
-- The group of a message. One that waits for those before it in its group is stored as `blocked`.
ALTER TABLE jobsync_message ADD COLUMN group_name TEXT;

-- name: v8_finished_priority
-- Likewise.
ALTER TABLE jobsync_finished ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;

-- name: v8_finished_group
-- Likewise.
ALTER TABLE jobsync_finished ADD COLUMN group_name TEXT;

-- name: v8_claim_grouped
-- Whether a message of the claim has a group. From here on `messages` may have priority and group at
-- the end of an array.
ALTER TABLE jobsync_claim ADD COLUMN grouped INTEGER NOT NULL DEFAULT 0;

-- name: v8_message_ranked
-- Ready messages of a queue with a priority, in order.
CREATE INDEX jobsync_message_ranked ON jobsync_message (queue, priority DESC, position)
WHERE state = 'ranked';

-- name: v8_message_grouped
-- The messages of a group: its head, and those that wait for it, in order.
CREATE INDEX jobsync_message_grouped ON jobsync_message (queue, group_name, state, position)
WHERE group_name IS NOT NULL;

-- name: v8_group
-- Groups with a head: a message that is ready, waiting or claimed.
CREATE TABLE jobsync_group (
  queue TEXT    NOT NULL,
  name  TEXT    NOT NULL,
  heads INTEGER NOT NULL,    -- how many there are; one, if order is kept
  added INTEGER NOT NULL,    -- how many the latest push has added
  PRIMARY KEY (queue, name)
) STRICT, WITHOUT ROWID;

-- name: v8_limit
-- The rate at which messages of a queue are claimed.
CREATE TABLE jobsync_limit (
  queue    TEXT    NOT NULL PRIMARY KEY,
  tokens   REAL    NOT NULL, -- how many messages may be claimed
  boot     INTEGER NOT NULL, -- the boot that `refilled` counts from
  refilled REAL    NOT NULL  -- when that was so: seconds since that boot
) STRICT, WITHOUT ROWID;

-- name: v8_key
-- Which message holds a key: until a time, or while it is pending. A row of a message that is not
-- pending any more holds nothing, and is removed some time later.
CREATE TABLE jobsync_key (
  queue      TEXT NOT NULL,
  key        TEXT NOT NULL,
  id         TEXT NOT NULL,
  held_until REAL,           -- Unix seconds; NULL: while it is pending
  PRIMARY KEY (queue, key)
) STRICT, WITHOUT ROWID;

-- name: v8_key_id
-- Finds the key of a message.
CREATE INDEX jobsync_key_id ON jobsync_key (id);

-- name: v8_result
-- What handlers returned, if it was not None. A row belongs to a completed message.
CREATE TABLE jobsync_result (
  id       TEXT NOT NULL PRIMARY KEY,
  queue    TEXT NOT NULL,
  result   TEXT,             -- JSON; NULL if it was not kept
  problem  TEXT NOT NULL,    -- why it was not kept
  finished REAL NOT NULL     -- Unix seconds
) STRICT, WITHOUT ROWID;

-- name: v8_result_finished
-- Results of a queue, oldest first.
CREATE INDEX jobsync_result_finished ON jobsync_result (queue, finished);

-- name: v8_progress
-- How far handlers are, if they have reported it. A row is about one delivery of a message.
CREATE TABLE jobsync_progress (
  id         TEXT    NOT NULL PRIMARY KEY,
  queue      TEXT    NOT NULL,
  deliveries INTEGER NOT NULL,
  progress   REAL    NOT NULL,
  note       TEXT    NOT NULL,
  reported   REAL    NOT NULL  -- Unix seconds
) STRICT, WITHOUT ROWID;

-- name: v9_message_task_ready
-- Ready messages of a task, in order. A message with a task is of format 3, so that older code leaves
-- it alone, and its states are stored as `task_ready`, `task_ranked` and `task_waiting`: so a claim
-- reads neither messages of tasks that its worker does not know, nor these for messages without one.
CREATE INDEX jobsync_message_task_ready ON jobsync_message (queue, task, position)
WHERE state = 'task_ready';

-- name: v9_message_task_ranked
-- Likewise, with a priority.
CREATE INDEX jobsync_message_task_ranked
ON jobsync_message (queue, task, priority DESC, position) WHERE state = 'task_ranked';

-- name: v9_message_task_delayed
-- Likewise, delayed ones by boot; suspects apart.
CREATE INDEX jobsync_message_task_delayed ON jobsync_message (queue, task, suspect, boot, wakes)
WHERE state = 'task_waiting';

-- name: v9_message_task_states
-- Messages that were stored with a task before.
UPDATE jobsync_message SET state = 'task_' || state, format = max(format, 3)
WHERE task <> '' AND state IN ('ready', 'ranked', 'waiting');

-- name: v9_message_newer
-- Messages of newer code. The index of before had all messages with a priority, a group or a task.
CREATE INDEX jobsync_message_newest ON jobsync_message (queue, format) WHERE format > 3;

-- name: v9_drop_message_newer
-- Only older code read it, now and then.
DROP INDEX jobsync_message_newer;

-- name: v10_message_delay
-- How long a message waits from when that was decided, in seconds: what a reboot makes of the delay is
-- no longer. NULL if older code has decided it.
ALTER TABLE jobsync_message ADD COLUMN delay REAL;

-- name: create_version_table
-- Create the table that has the version of the tables, and the oldest version that code must know to
-- use them.
CREATE TABLE IF NOT EXISTS jobsync_schema (
  version     INTEGER NOT NULL,
  oldest_code INTEGER NOT NULL DEFAULT 0
) STRICT;

-- name: has_oldest_code
-- Check that this table is not one of before version 7.
SELECT 1 FROM pragma_table_info('jobsync_schema') WHERE name = 'oldest_code';

-- name: add_oldest_code
-- Bring it up to date.
ALTER TABLE jobsync_schema ADD COLUMN oldest_code INTEGER NOT NULL DEFAULT 0;

-- name: read_version
-- Read both versions.
SELECT version, oldest_code FROM jobsync_schema;

-- name: insert_version
-- Start with version 0.
INSERT INTO jobsync_schema (version) VALUES (0);

-- name: try_to_write
-- Change nothing, but fail now, not at the first write, if the file cannot be written.
UPDATE jobsync_schema SET oldest_code = oldest_code;

-- name: raise_version
-- Record the new version of the tables.
UPDATE jobsync_schema SET version = :version, oldest_code = max(oldest_code, 7);

-- name: refuse_older_code
-- Code that knows version 6 at most does not read `oldest_code`. When it connects, it sets the version
-- to what it is.
CREATE TRIGGER IF NOT EXISTS jobsync_schema_refuse BEFORE UPDATE OF version ON jobsync_schema
WHEN NEW.version = OLD.version
BEGIN
  SELECT RAISE(ABORT, 'its tables are of newer code: upgrade jobsync in this process');
END;
