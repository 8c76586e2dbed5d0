-- Statements on the messages in a PostgreSQL schema. Each is one transaction for a batch. See
-- postgres.py. {schema} is the quoted name of the schema.
--
-- A claim skips rows that others have locked and never waits. It does not read below `floor`, the
-- lowest position that was ready, nor before `since`, when every due message had been claimed. Behind
-- these, an index has only entries of deleted rows, which stay as long as the oldest transaction of
-- the whole server lasts.

-- fragment: is_open
-- Whether the queue is not paused. Evaluated once in a statement.
NOT EXISTS (SELECT 1 FROM {schema}.jobsync_pause WHERE queue = %(queue)s)

-- fragment: is_known
-- Whether this code understands a message. Messages of newer code are only counted and shown.
format <= 1

-- fragment: next_delivery
-- The number of the next delivery. A counter at its end stays there; the message is then set aside.
CASE WHEN deliveries < 2147483647 THEN deliveries + 1 ELSE deliveries END

-- fragment: attempt
-- The number of the current attempt, whatever somebody has written into the counters.
greatest(0, least(2147483647, m.deliveries::bigint - m.returned))

-- fragment: now
-- The time. Evaluated once in a statement, so that an index can be used.
(SELECT clock_timestamp())

-- fragment: earliest
-- The earliest time at which a claim looks for due messages. A full scan has no `since`.
coalesce({now} - %(since)s::float8 * interval '1 second', '-infinity')

-- fragment: message
-- A claimed message.
id, payload, deliveries, returned, max_attempts, timeout, suspect,
extract(epoch FROM enqueued)::float8

-- fragment: kept_errors
-- The errors of a message so far. Of very many the latest are kept, from the start of a line: each new
-- one rewrites the row, and a row has an end.
CASE WHEN length(m.errors) > 400000
  THEN substr(right(m.errors, 200000), strpos(right(m.errors, 200000), E'\n') + 1)
  ELSE m.errors END

-- fragment: finish
-- Move the rows of `gone` to the finished messages. Completed messages keep no payload.
INSERT INTO {schema}.jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, trail, errors,
  enqueued, format
)
SELECT id, queue, target, CASE WHEN target <> 'completed' THEN payload END, deliveries, returned,
  max_attempts, timeout, session, left(concat_ws(' ', mark, trail), 120),
  {kept_errors} || coalesce(line, ''), enqueued, format
FROM gone AS m

-- fragment: error_line
-- One line of JSON for the errors of a message, if there is an error.
CASE WHEN g.error IS NOT NULL THEN json_build_object(
  'attempt', {attempt}, 'error', g.error::json,
  'at', extract(epoch FROM clock_timestamp())::float8, 'session', m.session
)::text || E'\n' END

-- fragment: live
-- A message that is not finished, for display.
queue, id, state, payload, deliveries, returned, max_attempts, errors, session, suspect,
extract(epoch FROM enqueued)::float8,
CASE WHEN state <> 'ready' THEN extract(epoch FROM due)::float8 END,
CASE WHEN state = 'claimed' THEN extract(epoch FROM claimed)::float8 END,
NULL::float8, extract(epoch FROM clock_timestamp())::float8, format, position::text

-- fragment: finished
-- A finished message, for display.
queue, id, state, payload, deliveries, returned, max_attempts, errors, session, false,
extract(epoch FROM enqueued)::float8, NULL::float8, NULL::float8,
extract(epoch FROM finished)::float8, extract(epoch FROM clock_timestamp())::float8, format,
extract(epoch FROM finished)::text || ' ' || id

-- fragment: push_many
-- Add messages in order.
WITH done AS (
  INSERT INTO {schema}.jobsync_message (queue, id, state, due, payload, max_attempts, timeout)
  SELECT %(queue)s, id, CASE WHEN delay > 0 THEN 'waiting' ELSE 'ready' END,
    clock_timestamp() + delay * interval '1 second', payload, max_attempts, timeout
  FROM unnest(
    %(ids)s::text[], %(payloads)s::text[], %(delays)s::float8[], %(max_attempts)s::integer[],
    %(timeouts)s::float8[]
  ) WITH ORDINALITY AS t (id, payload, delay, max_attempts, timeout, place)
  ORDER BY place RETURNING 1
)

-- fragment: insert_one
-- Add one message, in a form that is planned only once.
INSERT INTO {schema}.jobsync_message (queue, id, state, due, payload, max_attempts, timeout)
VALUES (
  %(queue)s, %(id)s, CASE WHEN %(delay)s > 0 THEN 'waiting' ELSE 'ready' END,
  clock_timestamp() + %(delay)s * interval '1 second', %(payload)s, %(max_attempts)s, %(timeout)s
) RETURNING 1

-- fragment: notify
-- Notify the listeners of a topic.
SELECT pg_notify(%(channel)s, %(topic)s) FROM done LIMIT 1

-- name: push
-- Add messages.
{push_many}
SELECT count(*) FROM done;

-- name: push_and_notify
-- Add messages and notify listeners.
{push_many}
{notify};

-- name: push_one
-- Add one message.
{insert_one};

-- name: push_one_and_notify
-- Add one message and notify listeners.
WITH done AS (
{insert_one}
) {notify};

-- name: exists
-- Whether any of these messages exists, finished or not. A push is one transaction, so one message
-- proves all.
SELECT EXISTS (SELECT 1 FROM {schema}.jobsync_message WHERE id = ANY (%(ids)s::text[]))
    OR EXISTS (SELECT 1 FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[]));

-- name: claim
-- Claim due messages: those that waited, then new ones in their order. Each row starts with the
-- lowest position that was ready, whether there are suspects to claim, and the seconds until the next
-- delay ends and the next claim lapses; it has no message if nothing was claimed.
WITH late AS MATERIALIZED (
  SELECT ctid AS place FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'waiting' AND suspect = %(suspects)s AND due <= {now}
  AND due >= {earliest} AND {is_known} AND {is_open}
  ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), fresh AS MATERIALIZED (
  SELECT ctid AS place, position FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'ready' AND position >= %(floor)s AND NOT %(suspects)s
  AND {is_known} AND {is_open}
  ORDER BY position LIMIT (SELECT %(limit)s - count(*) FROM late) FOR UPDATE SKIP LOCKED
), taken AS (
  UPDATE {schema}.jobsync_message
  SET state = 'claimed', deliveries = {next_delivery}, claim = %(claim)s,
    session = %(session)s,
    due = clock_timestamp() + %(visibility)s * interval '1 second', claimed = clock_timestamp()
  -- They are locked: no other transaction moves them meanwhile.
  WHERE ctid = ANY (ARRAY (SELECT place FROM late UNION ALL SELECT place FROM fresh))
  RETURNING position, {message}
), rest AS (
  SELECT (SELECT min(position) FROM fresh) AS lowest,
    EXISTS (
      SELECT 1 FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'waiting' AND suspect AND due <= {now}
      AND due >= {earliest} AND {is_known} AND {is_open}
    ) AS suspects,
    -- Not the difference of two times: a time may be infinite, and the difference may not.
    extract(epoch FROM least(
      (SELECT due FROM {schema}.jobsync_message
       WHERE queue = %(queue)s AND state = 'waiting' AND NOT suspect AND due > {now}
       AND {is_known} ORDER BY due LIMIT 1),
      (SELECT due FROM {schema}.jobsync_message
       WHERE queue = %(queue)s AND state = 'waiting' AND suspect AND due > {now}
       AND {is_known} ORDER BY due LIMIT 1)
    ))::float8 - extract(epoch FROM clock_timestamp())::float8 AS due,
    extract(epoch FROM (
      SELECT due FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'claimed'
      AND due >= {earliest} AND {is_known}
      ORDER BY due LIMIT 1
    ))::float8 - extract(epoch FROM clock_timestamp())::float8 AS lapse
)
SELECT rest.*, taken.* FROM rest LEFT JOIN taken ON true ORDER BY taken.position;

-- name: find_claimed
-- The messages of a claim whose reply was lost.
SELECT position, {message} FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND state = 'claimed' AND claim = %(claim)s ORDER BY position;

-- name: settle
-- End claims as given; return the ids of the messages whose claims were ended.
WITH given AS (
  SELECT * FROM unnest(
    %(ids)s::text[], %(claims)s::text[], %(targets)s::text[], %(marks)s::text[],
    %(delays)s::float8[], %(returns)s::integer[], %(errors)s::text[]
  ) AS t (id, claim, target, mark, delay, back, error)
), locked AS MATERIALIZED (
  SELECT g.* FROM given AS g JOIN {schema}.jobsync_message AS m
  ON m.id = g.id AND m.claim = g.claim AND m.state = 'claimed'
  ORDER BY m.id FOR UPDATE OF m
), gone AS (
  DELETE FROM {schema}.jobsync_message AS m USING locked AS g
  WHERE m.id = g.id AND m.claim = g.claim AND m.state = 'claimed' AND g.target <> 'waiting'
  RETURNING m.*, g.target, g.mark, {error_line} AS line
), kept AS (
  {finish}
), put AS (
  UPDATE {schema}.jobsync_message AS m
  SET state = 'waiting', due = clock_timestamp() + g.delay * interval '1 second',
    returned = CASE WHEN m.returned < 2147483647 THEN m.returned + g.back ELSE m.returned END,
    suspect = false, claim = '', session = '',
    trail = left(concat_ws(' ', g.mark, m.trail), 120), errors = {kept_errors} || coalesce({error_line}, '')
  FROM locked AS g
  WHERE m.id = g.id AND m.claim = g.claim AND m.state = 'claimed' AND g.target = 'waiting'
  RETURNING m.id
)
SELECT id FROM gone UNION ALL SELECT id FROM put;

-- name: was_settled
-- Which of these claims were settled in these ways before.
SELECT g.id FROM unnest(%(ids)s::text[], %(marks)s::text[]) AS g (id, mark)
WHERE EXISTS (
  SELECT 1 FROM {schema}.jobsync_message AS m WHERE m.id = g.id AND strpos(m.trail, g.mark) > 0
) OR EXISTS (
  SELECT 1 FROM {schema}.jobsync_finished AS m WHERE m.id = g.id AND strpos(m.trail, g.mark) > 0
);

-- name: extend
-- Extend claims; never shorten them.
UPDATE {schema}.jobsync_message AS m
SET due = greatest(m.due, clock_timestamp() + %(visibility)s * interval '1 second')
FROM unnest(%(ids)s::text[], %(claims)s::text[]) AS g (id, claim)
WHERE m.id = g.id AND m.claim = g.claim AND m.state = 'claimed' RETURNING m.id;

-- name: end_claims
-- End the claims that lapsed and those of dead sessions. A message that was a suspect has spent an
-- attempt and may be dead; the others become suspects.
WITH ended AS MATERIALIZED (
  SELECT id, session, {attempt} AS attempt, suspect,
    suspect AND {attempt} >= max_attempts AS spent,
    CASE WHEN suspect THEN %(lapsed)s ELSE %(spared)s END AS error
  FROM {schema}.jobsync_message AS m
  WHERE queue = %(queue)s AND state = 'claimed'
  AND (due <= {now} OR session = ANY (%(dead)s::text[])) AND id <> ALL (%(keep)s::text[])
  AND {is_known}
  ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_message AS m USING ended AS g
  WHERE m.id = g.id AND g.spent
  RETURNING m.*, 'dead' AS target, NULL AS mark, {error_line} AS line
), kept AS (
  {finish}
), put AS (
  UPDATE {schema}.jobsync_message AS m
  SET state = 'waiting', due = clock_timestamp(), suspect = true,
    returned = m.returned + (NOT g.suspect AND m.returned < 2147483647)::integer,
    claim = '', session = '', errors = {kept_errors} || {error_line}
  FROM ended AS g WHERE m.id = g.id AND NOT g.spent
)
SELECT id, CASE WHEN spent THEN 'dead' ELSE 'waiting' END, attempt, session FROM ended;

-- name: list_holders
-- The sessions that hold claims.
SELECT DISTINCT session FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND state = 'claimed' AND {is_known} ORDER BY session;

-- name: browse_live
-- List messages in a state, in their order.
SELECT {live} FROM {schema}.jobsync_message AS m
WHERE queue = %(queue)s AND state = %(state)s
AND m.position > coalesce(nullif(%(after)s, ''), '0')::bigint
ORDER BY m.position LIMIT %(limit)s;

-- name: browse_finished
-- List finished messages in a state, the oldest first.
SELECT {finished} FROM {schema}.jobsync_finished
WHERE queue = %(queue)s AND state = %(state)s
AND (finished, id) > (
  'epoch'::timestamptz
    + coalesce(nullif(split_part(%(after)s, ' ', 1), ''), '0')::numeric * interval '1 second',
  split_part(%(after)s, ' ', 2)
)
ORDER BY finished, id LIMIT %(limit)s;

-- name: find
-- Find messages of any queue by id.
SELECT {live} FROM {schema}.jobsync_message WHERE id = ANY (%(ids)s::text[])
UNION ALL
SELECT {finished} FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[]);

-- name: list_live
-- List the messages of a queue that are not finished, by id.
SELECT {live} FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND id > %(after)s ORDER BY id LIMIT %(limit)s;

-- name: list_dead
-- List the dead letters of a queue, by id.
SELECT {finished} FROM {schema}.jobsync_finished
WHERE queue = %(queue)s AND state = 'dead' AND id > %(after)s ORDER BY id LIMIT %(limit)s;

-- name: summarize
-- Count the messages of all queues by state and session, with the time of the oldest.
SELECT queue, state, session, count(*), extract(epoch FROM min(enqueued))::float8
FROM {schema}.jobsync_message GROUP BY queue, state, session
UNION ALL
SELECT queue, state, '', count(*), extract(epoch FROM min(enqueued))::float8
FROM {schema}.jobsync_finished GROUP BY queue, state;

-- name: list_pauses
-- The queues that are paused.
SELECT queue, extract(epoch FROM since)::float8, reason FROM {schema}.jobsync_pause;

-- name: pause
-- Pause a queue, unless it is paused.
INSERT INTO {schema}.jobsync_pause (queue, reason) VALUES (%(queue)s, %(reason)s)
ON CONFLICT (queue) DO NOTHING RETURNING 1;

-- name: resume
-- Resume a queue.
DELETE FROM {schema}.jobsync_pause WHERE queue = %(queue)s RETURNING 1;

-- name: count
-- Count the messages of a queue by state.
SELECT state, count(*) FROM {schema}.jobsync_message WHERE queue = %(queue)s GROUP BY state
UNION ALL
SELECT state, count(*) FROM {schema}.jobsync_finished WHERE queue = %(queue)s GROUP BY state;

-- name: find_newer
-- Count the messages of newer code by format.
SELECT format, count(*) FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND format > 1 GROUP BY format ORDER BY format;

-- name: redrive
-- Put dead letters back. Their attempts so far count as returned; deliveries only grow.
WITH chosen AS MATERIALIZED (
  SELECT id FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND payload IS NOT NULL AND {is_known}
  AND (id = ANY (%(ids)s::text[]) OR (state = 'dead' AND %(all)s))
  ORDER BY finished, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_finished AS f USING chosen WHERE f.id = chosen.id RETURNING f.*
), done AS (
  INSERT INTO {schema}.jobsync_message (
    id, queue, state, due, payload, deliveries, returned, max_attempts, timeout, trail, errors,
    enqueued, format
  )
  SELECT id, queue, 'waiting', clock_timestamp(), payload, deliveries, deliveries, max_attempts,
    timeout, trail, errors, enqueued, format
  FROM gone RETURNING 1
)
SELECT count(*) FROM done;

-- name: purge
-- Delete messages in these states.
WITH live AS (
  DELETE FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = ANY (%(states)s::text[]) AND {is_known} RETURNING 1
), finished AS (
  DELETE FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND state = ANY (%(states)s::text[]) AND {is_known} RETURNING 1
)
SELECT (SELECT count(*) FROM live) + (SELECT count(*) FROM finished);

-- name: forget
-- Delete messages that were finished long ago.
WITH old AS MATERIALIZED (
  SELECT id FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND state = %(state)s
  AND finished < {now} - %(older_than)s * interval '1 second' AND {is_known}
  ORDER BY finished LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_finished AS f USING old WHERE f.id = old.id RETURNING 1
)
SELECT count(*) FROM gone;
