-- The statements of the PostgreSQL store on records and history. Each is one transaction.
--
-- Every name is qualified, because a pooler may run each statement in another session, with
-- another search path. Time is `clock_timestamp()`: `now()` stands still in a transaction.
-- A statement `…_and_notify` also notifies, if it changed anything.

-- fragment: columns
key, value, seq, epoch, format, trail

-- fragment: on_level
-- One level only: nothing but the last segment may follow the prefix.
key > %s AND key < %s AND strpos(substr(key, %s), '/') = 0

-- name: get
-- Read one record.
SELECT {columns} FROM {schema}.jobsync_record WHERE key = %s;

-- name: get_many
-- Read several records.
SELECT {columns} FROM {schema}.jobsync_record
WHERE key = ANY (%s::text[]);

-- name: age
-- Read for how many seconds a version has been current.
SELECT extract(epoch FROM clock_timestamp() - written)::float8 FROM {schema}.jobsync_record
WHERE key = %s AND seq = %s AND trail = %s;

-- name: heads
-- List keys and versions of one level.
SELECT key, trail FROM {schema}.jobsync_record
WHERE {on_level} AND value IS NOT NULL
ORDER BY key LIMIT %s;

-- name: scan
-- List records of one level.
SELECT {columns} FROM {schema}.jobsync_record
WHERE {on_level} AND value IS NOT NULL
AND {where} ORDER BY key LIMIT %s;

-- fragment: create_record
INSERT INTO {schema}.jobsync_record (value, seq, epoch, format, trail, key)
VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING RETURNING key

-- name: create
-- Create a record, unless the key is in use.
{create_record};

-- name: create_and_notify
{create_record}, pg_notify(%s, %s);

-- fragment: replace_record
UPDATE {schema}.jobsync_record
SET value = %s, seq = %s, epoch = %s, format = %s, trail = %s, written = clock_timestamp()
WHERE key = %s AND seq = %s AND trail = %s RETURNING key

-- name: replace
-- Replace a record, if it is still the version that was read.
{replace_record};

-- name: replace_and_notify
{replace_record}, pg_notify(%s, %s);

-- fragment: write_records
-- Creations come first, in the order given; then rows are locked by key. So writers never wait for
-- each other in a circle. An UPDATE alone would lock them in whatever order is cheapest.
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

-- name: write
-- Create and replace several records; return the keys of those that were written.
{write_records};

-- name: write_and_notify
{write_records}
UNION ALL SELECT pg_notify(%s, topic)::text FROM unnest(%s::text[]) AS t (topic)
WHERE EXISTS (SELECT 1 FROM done);

-- name: bury
-- Remove old tombstones.
WITH old AS MATERIALIZED (
  SELECT key FROM {schema}.jobsync_record
  WHERE {on_level} AND dead
  AND written < (SELECT clock_timestamp() - %s * interval '1 second')
  ORDER BY key LIMIT %s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_record AS r USING old WHERE r.key = old.key RETURNING 1
)
SELECT count(*) FROM gone;

-- name: drop
-- Remove records unconditionally.
WITH gone AS (
  DELETE FROM {schema}.jobsync_record WHERE key = ANY(%s::text[]) RETURNING 1
)
SELECT count(*) FROM gone;

-- fragment: append_entries
WITH done AS (
  INSERT INTO {schema}.jobsync_entry (stream, id, value)
  SELECT %s, id, value FROM unnest(%s::text[], %s::text[]) AS t (id, value)
  ON CONFLICT DO NOTHING RETURNING 1
)

-- name: append
-- Append entries to a history; those that are already there are left as they are.
{append_entries}
SELECT count(*) FROM done;

-- name: append_and_notify
{append_entries}
SELECT pg_notify(%s, %s) FROM done LIMIT 1;

-- name: read
-- Read entries of a history.
SELECT id, stream, value FROM {schema}.jobsync_entry
WHERE stream = %s AND id > %s AND {where} ORDER BY id LIMIT %s;

-- name: discard
-- Delete old entries of a history. The time is in a sub-select, so that it is read once and the
-- index is used. Ids begin with the milliseconds of their writer's clock, in 13 digits.
WITH gone AS (
  DELETE FROM {schema}.jobsync_entry WHERE stream = %s AND id < (
    SELECT to_char(
      greatest(floor((extract(epoch FROM clock_timestamp()) - %s::float8) * 1000), 0),
      'FM0000000000000'
    )
  ) RETURNING 1
)
SELECT count(*) FROM gone;
