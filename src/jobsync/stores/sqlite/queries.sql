-- The statements of the SQLite store on records and history.

-- fragment: value
-- As bytes: text that is not UTF-8 would fail the whole query, not only its own row.
CAST(value AS BLOB)

-- fragment: columns
key, {value}, seq, epoch, format, trail

-- fragment: on_level
-- One level only: nothing but the last segment may follow the prefix.
key > ? AND key < ? AND instr(substr(key, ?), '/') = 0

-- name: get
-- Read records by key.
SELECT {columns} FROM jobsync_record WHERE key IN (SELECT value FROM json_each(?));

-- name: heads
-- List keys and versions of one level.
SELECT key, trail FROM jobsync_record WHERE {on_level} AND value IS NOT NULL
ORDER BY key LIMIT ?;

-- name: scan
-- List records of one level.
SELECT {columns} FROM jobsync_record WHERE {on_level} AND value IS NOT NULL AND {where}
ORDER BY key LIMIT ?;

-- name: create
-- Create a record, unless the key is in use.
INSERT INTO jobsync_record (value, seq, epoch, format, trail, boot, written, key)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- name: replace
-- Replace a record, if it is still the version that was read.
UPDATE jobsync_record SET value = ?, seq = ?, epoch = ?, format = ?, trail = ?, boot = ?,
written = ? WHERE key = ? AND seq = ? AND trail = ?;

-- name: written
-- Read when a version was written.
SELECT boot, written FROM jobsync_record WHERE key = ? AND seq = ? AND trail = ?;

-- name: bury
-- Remove old tombstones. One of an earlier boot is older than any request still in flight.
DELETE FROM jobsync_record WHERE key IN (SELECT key FROM jobsync_record WHERE {on_level}
AND value IS NULL AND (boot <> ? OR written > ? OR written < ?) LIMIT ?);

-- name: drop
-- Remove records unconditionally.
DELETE FROM jobsync_record WHERE key IN (SELECT value FROM json_each(?));

-- name: append
-- Append an entry to a history; an entry that is already there is left as it is.
INSERT INTO jobsync_entry (stream, id, value) VALUES (?, ?, ?) ON CONFLICT DO NOTHING;

-- name: read
-- Read entries of a history.
SELECT id, stream, {value} FROM jobsync_entry WHERE stream = ? AND id > ? AND {where}
ORDER BY id LIMIT ?;

-- name: discard
-- Delete the entries of a history before an id.
DELETE FROM jobsync_entry WHERE stream = ? AND id < ?;
