-- Statements on the messages in a PostgreSQL schema. Each is one transaction for a batch. See
-- postgres.py. {schema} is the quoted name of the schema.
--
-- A claim moves messages from `jobsync_message` into one row of `jobsync_claim`, and skips rows that
-- others have locked, so it never waits. It does not read below `floor`, the lowest position that was
-- ready, nor before `since`, when every due message had been claimed. Behind these, an index has only
-- entries of deleted rows, which stay as long as the oldest transaction of the whole server lasts.
--
-- A statement that ends claims has three parts: `claims` locks their rows, `places` has each of their
-- messages as this statement leaves it, and the fragment `end_places` writes that. The letters of
-- outcomes are explained in the schema.
--
-- What ends the head of a group is a transaction of several statements: see postgres_places.py.

-- fragment: is_open
-- Whether the queue is not paused. Evaluated once in a statement.
NOT EXISTS (SELECT 1 FROM {schema}.jobsync_pause WHERE queue = %(queue)s)

-- fragment: is_known
-- Whether this code understands a message. Messages of newer code are only counted and shown.
format <= 3

-- fragment: shown_state
-- The state of a message, for display.
CASE state WHEN 'ranked' THEN 'ready' WHEN 'task_ready' THEN 'ready' WHEN 'task_ranked' THEN 'ready'
  WHEN 'task_waiting' THEN 'waiting' ELSE state END

-- fragment: lane
-- The start of the states of a message: those with a task are apart, so that a claim never reads the
-- messages of tasks that its caller does not know.
CASE WHEN task = '' THEN '' ELSE 'task_' END

-- fragment: next_delivery
-- The number of the next delivery. A counter at its end stays there; the message is then set aside.
CASE WHEN deliveries < 2147483647 THEN deliveries + 1 ELSE deliveries END

-- fragment: attempt
-- The number of the current attempt, whatever somebody has written into the counters.
greatest(0, least(2147483647, p.deliveries::bigint - p.returned))

-- fragment: now
-- The time. Evaluated once in a statement, so that an index can be used.
(SELECT clock_timestamp())

-- fragment: earliest
-- The earliest time at which a claim looks for due messages. A full scan has no `since`.
coalesce({now} - %(since)s::float8 * interval '1 second', '-infinity')

-- fragment: in_claim
-- The messages of the claim `c`. If arrays have different lengths because somebody has changed them,
-- a missing item is read as one that fails no statement.
CROSS JOIN LATERAL (
  SELECT place, id, coalesce(outcome, 'o') AS outcome, coalesce(position, 0) AS position,
    coalesce(payload, '') AS payload, coalesce(deliveries, 0) AS deliveries,
    coalesce(returned, 0) AS returned, coalesce(max_attempts, 1) AS max_attempts, timeout,
    coalesce(errors, '') AS errors, coalesce(enqueued, c.claimed) AS enqueued,
    coalesce(task, '') AS task, coalesce(due, c.due) AS due, finished,
    coalesce(priority, 0::smallint) AS priority, group_name
  FROM unnest(
    c.ids, string_to_array(c.outcomes, NULL), c.positions, c.payloads, c.deliveries, c.returned,
    c.max_attempts, c.timeouts, c.errors, c.enqueued, c.tasks, c.dues, c.finished, c.priorities,
    c.groups
  ) WITH ORDINALITY AS u (
    id, outcome, position, payload, deliveries, returned, max_attempts, timeout, errors, enqueued,
    task, due, finished, priority, group_name, place
  )
) AS p

-- fragment: kept_errors
-- The errors of a message so far. Of very many the latest are kept, from the start of a line: each new
-- one rewrites the row, and a row has an end.
CASE WHEN length(p.errors) > 400000
  THEN substr(right(p.errors, 200000), strpos(right(p.errors, 200000), E'\n') + 1)
  ELSE p.errors END

-- fragment: error_line
-- One line of JSON for the errors of a message.
json_build_object(
  'attempt', {attempt}, 'error', g.error::json,
  'at', extract(epoch FROM clock_timestamp())::float8, 'session', c.session
)::text || E'\n'

-- fragment: end_places
-- Write the outcomes of `places`: messages that wait again, finished ones, and the rows of the claims.
-- The errors of a completed message stay in the claim's row. A claim is closed when the latest of its
-- messages was completed, also if the clock was set back since.
put AS (
  INSERT INTO {schema}.jobsync_message (
    id, position, queue, state, due, payload, deliveries, returned, max_attempts, timeout, suspect,
    errors, enqueued, format, task, priority, group_name
  )
  SELECT id, position, queue, {lane} || state, next_due, payload, deliveries, next_returned,
    max_attempts, timeout, is_suspect, next_errors, enqueued, format, task, priority, group_name
  FROM places WHERE is_ended AND state = 'waiting' AND id IS NOT NULL ORDER BY place
  -- Only if somebody has written the same id twice.
  ON CONFLICT (id) DO NOTHING
), kept AS (
  INSERT INTO {schema}.jobsync_finished (
    id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, errors,
    enqueued, format, task, priority, group_name
  )
  SELECT id, queue, state, payload, deliveries, returned, max_attempts, timeout, session,
    next_errors, enqueued, format, task, priority, group_name
  FROM places WHERE is_ended AND state IN ('cancelled', 'dead') AND id IS NOT NULL
  ON CONFLICT (id) DO NOTHING
), ended AS (
  SELECT claim, string_agg(outcome, '' ORDER BY place) AS outcomes,
    count(*) FILTER (WHERE outcome = 'o') AS open,
    count(*) FILTER (WHERE outcome = 'c') AS completed, min(due) FILTER (WHERE outcome = 'o') AS due,
    array_agg(finished ORDER BY place) AS finished,
    max(finished) FILTER (WHERE outcome = 'c') AS latest,
    CASE WHEN bool_or(is_ended AND outcome = 'c' AND errors <> next_errors)
      THEN array_agg(CASE WHEN outcome = 'c' THEN next_errors ELSE errors END ORDER BY place)
    END AS errors
  FROM places GROUP BY claim HAVING bool_or(is_ended)
), written AS (
  UPDATE {schema}.jobsync_claim AS c
  SET outcomes = e.outcomes, open = e.open, completed = e.completed, finished = e.finished,
    errors = coalesce(e.errors, c.errors), due = coalesce(e.due, c.due),
    closed = CASE WHEN e.open = 0 THEN greatest(e.latest, clock_timestamp()) END,
    payloads = CASE WHEN e.open > 0 THEN c.payloads END
  FROM ended AS e WHERE c.claim = e.claim
)

-- fragment: waiting
-- A message that is not claimed, for display.
queue, id, {shown_state}, payload, deliveries, returned, max_attempts, errors, '', suspect,
extract(epoch FROM enqueued)::float8,
CASE WHEN state IN ('waiting', 'task_waiting') THEN extract(epoch FROM due)::float8 END,
NULL::float8, NULL::float8,
extract(epoch FROM clock_timestamp())::float8, format, priority, group_name, task, position::text

-- fragment: claimed
-- A claimed message, for display.
c.queue, p.id, 'claimed', p.payload, p.deliveries, p.returned, p.max_attempts, p.errors, c.session,
c.is_suspect, extract(epoch FROM p.enqueued)::float8, extract(epoch FROM p.due)::float8,
extract(epoch FROM c.claimed)::float8, NULL::float8,
extract(epoch FROM clock_timestamp())::float8, c.format, p.priority, p.group_name, p.task,
p.position::text

-- fragment: completed
-- A completed message in the row of its claim, for display.
c.queue, p.id, 'completed', NULL::text, p.deliveries, p.returned, p.max_attempts, p.errors,
c.session, false, extract(epoch FROM p.enqueued)::float8, NULL::float8, NULL::float8,
extract(epoch FROM p.finished)::float8, extract(epoch FROM clock_timestamp())::float8, c.format,
p.priority, p.group_name, p.task, extract(epoch FROM p.finished)::text || ' ' || p.id

-- fragment: finished
-- A finished message, for display.
queue, id, state, payload, deliveries, returned, max_attempts, errors, session, false,
extract(epoch FROM enqueued)::float8, NULL::float8, NULL::float8,
extract(epoch FROM finished)::float8, extract(epoch FROM clock_timestamp())::float8, format,
priority, group_name, task, extract(epoch FROM finished)::text || ' ' || id

-- fragment: after_time
-- The time of the cursor for finished messages.
'epoch'::timestamptz
  + coalesce(nullif(split_part(%(after)s, ' ', 1), ''), '0')::numeric * interval '1 second'

-- fragment: after
-- The cursor for finished messages, as time and id.
({after_time}, split_part(%(after)s, ' ', 2))

-- fragment: forget_before
-- The time before which finished messages are removed.
{now} - %(older_than)s * interval '1 second'

-- fragment: old_claims
-- The claims with completed messages that were closed long ago: whole claims, until there are as many
-- messages as requested.
SELECT claim FROM (
  SELECT claim, sum(completed) OVER (ORDER BY closed, claim) - completed AS completed_before
  FROM (
    SELECT claim, closed, completed FROM {schema}.jobsync_claim
    WHERE queue = %(queue)s AND closed < {forget_before} AND completed > 0 AND {is_known}
    ORDER BY closed LIMIT %(limit)s
  ) AS c
) AS c WHERE completed_before < %(limit)s

-- fragment: has_any_id
-- Whether a claim has any of these ids.
high >= %(low)s AND low <= %(high)s AND ids && %(ids)s::text[]

-- fragment: push_many
-- Add messages in order. Their ids are new: nobody sends a message again.
WITH done AS (
  INSERT INTO {schema}.jobsync_message
    (queue, id, state, due, payload, max_attempts, timeout, task, format)
  SELECT %(queue)s, id, {lane}
    || CASE WHEN delay > 0 OR to_timestamp(at) > clock_timestamp() THEN 'waiting' ELSE 'ready' END,
    coalesce(to_timestamp(at), clock_timestamp() + delay * interval '1 second'), payload,
    max_attempts, timeout, task, CASE WHEN task = '' THEN 1 ELSE 3 END
  FROM unnest(
    %(ids)s::text[], %(payloads)s::text[], %(delays)s::float8[], %(times)s::float8[],
    %(max_attempts)s::integer[], %(timeouts)s::float8[], %(tasks)s::text[]
  ) WITH ORDINALITY AS t (id, payload, delay, at, max_attempts, timeout, task, place)
  ORDER BY place RETURNING 1
)

-- fragment: insert_one
-- Add one message, in a form that is planned only once.
INSERT INTO {schema}.jobsync_message
  (queue, id, state, due, payload, max_attempts, timeout, task, format)
VALUES (
  %(queue)s, %(id)s, %(lane)s::text ||
  CASE WHEN %(delay)s > 0 OR to_timestamp(%(at)s::float8) > clock_timestamp()
    THEN 'waiting' ELSE 'ready' END,
  coalesce(
    to_timestamp(%(at)s::float8), clock_timestamp() + %(delay)s * interval '1 second'
  ), %(payload)s, %(max_attempts)s, %(timeout)s, %(task)s, %(format)s
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

-- name: copy
-- Add many new messages without a delay: half the cost of an INSERT. The server stores many at a time
-- because no column is left to a default that is evaluated for each row, as that of `enqueued` is.
COPY {schema}.jobsync_message
  (queue, id, state, due, enqueued, payload, max_attempts, timeout, task, format) FROM STDIN;

-- name: exists
-- Whether any of these messages exists, finished or not. A push is one transaction, so one message
-- proves all.
SELECT EXISTS (SELECT 1 FROM {schema}.jobsync_message WHERE id = ANY (%(ids)s::text[]))
    OR EXISTS (
      SELECT 1 FROM {schema}.jobsync_claim
      WHERE closed IS NULL AND {has_any_id}
    )
    OR EXISTS (SELECT 1 FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[]))
    OR EXISTS (
      SELECT 1 FROM {schema}.jobsync_claim
      WHERE closed IS NOT NULL AND {has_any_id}
    );

-- name: claim
-- Claim due messages: those that waited, then new ones in their order. A claim ends early if its
-- messages are large. Each row starts with the lowest position that was ready, how many messages were
-- found, whether there are suspects to claim, the seconds until the next delay ends and the next claim
-- lapses, and whether messages have groups; it has no message if nothing was claimed.
WITH {late}, {fresh}, found AS (
  SELECT place, sum(size) OVER (ROWS UNBOUNDED PRECEDING) - size AS size_before
  FROM (SELECT place, size FROM late UNION ALL SELECT place, size FROM fresh) AS f
), taken AS (
  DELETE FROM {schema}.jobsync_message
  -- They are locked: no other transaction moves them meanwhile.
  WHERE ctid = ANY (ARRAY (SELECT place FROM found WHERE size_before < %(max_bytes)s))
  RETURNING position, id, payload, {next_delivery} AS deliveries, returned, max_attempts, timeout,
    errors, enqueued, task, format, priority, group_name
), written AS (
  INSERT INTO {schema}.jobsync_claim (
    claim, queue, session, claimed, due, is_suspect, open, low, high, outcomes, ids, positions,
    payloads, deliveries, returned, max_attempts, timeouts, errors, enqueued, tasks, format,
    priorities, groups
  )
  SELECT %(claim)s, %(queue)s, %(session)s, clock_timestamp(),
    clock_timestamp() + %(visibility)s * interval '1 second', %(suspects)s, count(*), min(id),
    max(id), repeat('o', count(*)::integer), array_agg(id), array_agg(position), array_agg(payload),
    array_agg(deliveries), CASE WHEN bool_or(returned <> 0) THEN array_agg(returned) END,
    array_agg(max_attempts), CASE WHEN bool_or(timeout IS NOT NULL) THEN array_agg(timeout) END,
    CASE WHEN bool_or(errors <> '') THEN array_agg(errors) END, array_agg(enqueued),
    CASE WHEN bool_or(task <> '') THEN array_agg(task) END, max(format),
    -- Of plain messages these are not even looked at.
    CASE WHEN max(format) > 1 THEN (
      SELECT CASE WHEN bool_or(priority <> 0) THEN array_agg(priority ORDER BY {sorting}) END FROM taken
    ) END,
    CASE WHEN max(format) > 1 THEN (
      SELECT CASE WHEN bool_or(group_name IS NOT NULL) THEN array_agg(group_name ORDER BY {sorting}) END
      FROM taken
    ) END
  FROM (SELECT * FROM taken ORDER BY {sorting}) AS t HAVING count(*) > 0
), rest AS (
  SELECT {summary},
    -- Not the difference of two times: a time may be infinite, and the difference may not.
    extract(epoch FROM {next_due})::float8 - extract(epoch FROM clock_timestamp())::float8 AS due,
    extract(epoch FROM (
      SELECT due FROM {schema}.jobsync_claim
      WHERE queue = %(queue)s AND closed IS NULL AND due >= {earliest} AND {is_known}
      ORDER BY due LIMIT 1
    ))::float8 - extract(epoch FROM clock_timestamp())::float8 AS lapse,
    EXISTS (SELECT 1 FROM taken WHERE group_name IS NOT NULL) AS has_groups
)
SELECT rest.*, id, payload, deliveries, returned, max_attempts, timeout, %(suspects)s,
  extract(epoch FROM enqueued)::float8, task
FROM rest LEFT JOIN taken ON true ORDER BY {sorting};

-- fragment: size
-- The size of a message.
octet_length(payload) + octet_length(errors) AS size

-- name: claim_late
-- The parts of `claim` for messages without a task. First, those that have waited.
late AS MATERIALIZED (
  SELECT ctid AS place, {size} FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'waiting' AND suspect = %(suspects)s AND due <= {now}
  AND due >= {earliest} AND {is_known} AND {is_open} {late_filter}
  ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
);

-- name: claim_summary
-- Likewise, the lowest position, how many were found, and whether there are suspects.
(SELECT min(position) FROM plain) AS lowest, (SELECT count(*) FROM found) AS found,
EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'waiting' AND suspect AND due <= {now}
  AND due >= {earliest} AND {is_known} AND {is_open}
) AS suspects;

-- name: claim_next_due
-- Likewise, when the next delay ends.
least(
  (SELECT due FROM {schema}.jobsync_message
   WHERE queue = %(queue)s AND state = 'waiting' AND NOT suspect AND {is_later}
   AND {is_known} ORDER BY due LIMIT 1),
  (SELECT due FROM {schema}.jobsync_message
   WHERE queue = %(queue)s AND state = 'waiting' AND suspect AND due > {now}
   AND {is_known} ORDER BY due LIMIT 1)
);

-- fragment: candidate
-- What a claim looks at first of a message.
ctid AS place, {size}, position

-- fragment: is_claimable
-- Whether a ready message may be claimed.
queue = %(queue)s AND NOT %(suspects)s AND {is_known} AND {is_open}

-- fragment: ranked_last
-- Messages with a priority come last: another process has pushed them, whose order is by priority.
ranked AS MATERIALIZED (
  SELECT {candidate} FROM {schema}.jobsync_message WHERE {is_claimable} AND state = 'ranked'
  ORDER BY priority DESC, position
  LIMIT (SELECT %(limit)s - count(*) FROM (SELECT FROM late UNION ALL SELECT FROM plain) AS f)
  FOR UPDATE SKIP LOCKED
), fresh AS (SELECT * FROM plain UNION ALL SELECT * FROM ranked);

-- name: claim_fifo
-- The parts of `claim` that depend on the order: how ready messages are chosen.
plain AS MATERIALIZED (
  SELECT {candidate} FROM {schema}.jobsync_message
  WHERE {is_claimable} AND state = 'ready' AND position >= %(floor)s
  ORDER BY position LIMIT (SELECT %(limit)s - count(*) FROM late) FOR UPDATE SKIP LOCKED
), {ranked_last};

-- name: claim_lifo
-- Likewise, the newest first.
plain AS MATERIALIZED (
  SELECT {candidate} FROM {schema}.jobsync_message WHERE {is_claimable} AND state = 'ready'
  ORDER BY position DESC LIMIT (SELECT %(limit)s - count(*) FROM late) FOR UPDATE SKIP LOCKED
), {ranked_last};

-- name: claim_priority
-- Likewise, by priority: those above 0, those without, those below 0.
high AS MATERIALIZED (
  SELECT {candidate} FROM {schema}.jobsync_message
  WHERE {is_claimable} AND state = 'ranked' AND priority > 0
  ORDER BY priority DESC, position LIMIT (SELECT %(limit)s - count(*) FROM late)
  FOR UPDATE SKIP LOCKED
), plain AS MATERIALIZED (
  SELECT {candidate} FROM {schema}.jobsync_message WHERE {is_claimable} AND state = 'ready'
  ORDER BY position
  LIMIT (SELECT %(limit)s - count(*) FROM (SELECT FROM late UNION ALL SELECT FROM high) AS f)
  FOR UPDATE SKIP LOCKED
), low AS MATERIALIZED (
  SELECT {candidate} FROM {schema}.jobsync_message
  WHERE {is_claimable} AND state = 'ranked' AND priority < 0
  ORDER BY priority DESC, position
  LIMIT (
    SELECT %(limit)s - count(*)
    FROM (SELECT FROM late UNION ALL SELECT FROM high UNION ALL SELECT FROM plain) AS f
  )
  FOR UPDATE SKIP LOCKED
), fresh AS (SELECT * FROM high UNION ALL SELECT * FROM plain UNION ALL SELECT * FROM low);

-- fragment: known_tasks
-- The tasks whose messages are claimed. This and the next two are subqueries, so that a plan does not
-- depend on the values: otherwise the server would plan each claim again.
unnest((SELECT %(tasks)s::text[])) AS t (name)

-- fragment: is_plain
-- Whether messages without a task are claimed.
(SELECT %(plain)s::boolean)

-- fragment: most
-- How many messages are claimed at most.
(SELECT %(limit)s::bigint)

-- fragment: locked
-- The candidate `c`, unless another claim has locked it.
CROSS JOIN LATERAL (
  SELECT ctid AS place, {size} FROM {schema}.jobsync_message WHERE ctid = c.place
  FOR UPDATE SKIP LOCKED
) AS m

-- fragment: is_late
-- Whether a message has waited long enough, and is of the kind that is claimed.
queue = %(queue)s AND suspect = %(suspects)s AND due <= {now} AND due >= {earliest} AND {is_known}
AND {is_open}

-- name: claim_tasks_late
-- The parts of `claim` for messages of tasks, and of none if `plain`. An index has those of each task
-- apart. So the first of each task are candidates, and of these the first are locked.
waited AS MATERIALIZED (
  SELECT c.place, c.due FROM {known_tasks} CROSS JOIN LATERAL (
    SELECT ctid AS place, due FROM {schema}.jobsync_message
    WHERE {is_late} AND state = 'task_waiting' AND task = t.name {late_filter}
    ORDER BY due LIMIT {most}
  ) AS c
  UNION ALL (
    SELECT ctid, due FROM {schema}.jobsync_message
    WHERE {is_plain} AND {is_late} AND state = 'waiting' {late_filter}
    ORDER BY due LIMIT {most}
  )
  ORDER BY due
), late AS MATERIALIZED (
  SELECT m.place, m.size FROM waited AS c {locked} LIMIT {most}
);

-- name: claim_tasks_fresh
-- Likewise, those that are ready.
available AS MATERIALIZED (
  SELECT c.place, c.position, c.priority
  FROM {known_tasks} CROSS JOIN LATERAL (
    (
      SELECT ctid AS place, position, priority FROM {schema}.jobsync_message
      WHERE {is_claimable} AND state = 'task_ready' AND task = t.name {floor_filter}
      ORDER BY position {direction} LIMIT {most}
    ) UNION ALL (
      SELECT ctid, position, priority FROM {schema}.jobsync_message
      WHERE {is_claimable} AND state = 'task_ranked' AND task = t.name
      ORDER BY priority DESC, position LIMIT {most}
    )
  ) AS c
  UNION ALL (
    SELECT ctid, position, priority FROM {schema}.jobsync_message
    WHERE {is_plain} AND {is_claimable} AND state = 'ready' {floor_filter}
    ORDER BY position {direction} LIMIT {most}
  )
  UNION ALL (
    SELECT ctid, position, priority FROM {schema}.jobsync_message
    WHERE {is_plain} AND {is_claimable} AND state = 'ranked'
    ORDER BY priority DESC, position LIMIT {most}
  )
), ordered AS MATERIALIZED (
  SELECT place FROM available ORDER BY {candidates}
), fresh AS MATERIALIZED (
  SELECT m.place, m.size FROM ordered AS c {locked}
  LIMIT (SELECT %(limit)s - count(*) FROM late)
);

-- name: claim_tasks_summary
-- Likewise. If there are enough candidates, others may have locked some of them, and there is more.
(SELECT min(position) FROM available WHERE priority = 0) AS lowest,
(
  SELECT CASE WHEN count(*) < %(limit)s THEN (SELECT count(*) FROM found) ELSE %(limit)s END
  FROM (SELECT FROM waited UNION ALL SELECT FROM available) AS c
) AS found,
EXISTS (
  SELECT 1 FROM {known_tasks} CROSS JOIN LATERAL (
    SELECT FROM {schema}.jobsync_message
    WHERE queue = %(queue)s AND state = 'task_waiting' AND task = t.name AND suspect
    AND due <= {now} AND due >= {earliest} AND {is_known} AND {is_open} LIMIT 1
  ) AS m
) OR ({is_plain} AND EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'waiting' AND suspect AND due <= {now}
  AND due >= {earliest} AND {is_known} AND {is_open}
)) AS suspects;

-- name: claim_tasks_next_due
-- Likewise.
least((
  SELECT min(m.due) FROM {known_tasks} CROSS JOIN LATERAL (
    (
      SELECT due FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'task_waiting' AND task = t.name AND NOT suspect
      AND {is_later} AND {is_known} ORDER BY due LIMIT 1
    ) UNION ALL (
      SELECT due FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'task_waiting' AND task = t.name AND suspect
      AND due > {now} AND {is_known} ORDER BY due LIMIT 1
    )
  ) AS m
), (
  SELECT min(due) FROM (
    (
      SELECT due FROM {schema}.jobsync_message
      WHERE {is_plain} AND queue = %(queue)s AND state = 'waiting' AND NOT suspect AND {is_later}
      AND {is_known} ORDER BY due LIMIT 1
    ) UNION ALL (
      SELECT due FROM {schema}.jobsync_message
      WHERE {is_plain} AND queue = %(queue)s AND state = 'waiting' AND suspect AND due > {now}
      AND {is_known} ORDER BY due LIMIT 1
    )
  ) AS m
));

-- name: has_claimable
-- Whether anything could be claimed if there were no limits.
SELECT {is_open} AND (EXISTS (
  SELECT 1 FROM {known_tasks} CROSS JOIN LATERAL (
    (
      SELECT FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'task_ready' AND task = t.name AND {is_known} LIMIT 1
    ) UNION ALL (
      SELECT FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'task_ranked' AND task = t.name AND {is_known} LIMIT 1
    ) UNION ALL (
      SELECT FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'task_waiting' AND task = t.name AND due <= {now}
      AND {is_known} LIMIT 1
    )
  ) AS m
) OR ({is_plain} AND (EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'ready' AND {is_known}
) OR EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'ranked' AND {is_known}
) OR EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'waiting' AND due <= {now} AND {is_known}
))));

-- name: promote_tasks
-- Let messages of tasks whose delays are over take the places that their order gives them.
WITH late AS MATERIALIZED (
  SELECT c.id FROM unnest(%(tasks)s::text[]) AS t (name) CROSS JOIN LATERAL (
    SELECT id FROM {schema}.jobsync_message
    WHERE queue = %(queue)s AND state = 'task_waiting' AND task = t.name AND NOT suspect
    AND due <= {now} AND {is_known} ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
  ) AS c
)
UPDATE {schema}.jobsync_message AS m
SET state = CASE WHEN m.priority = 0 THEN 'task_ready' ELSE 'task_ranked' END
FROM late WHERE m.id = late.id RETURNING 1;

-- name: promote
-- Let messages whose delays are over take the places that their order gives them.
WITH late AS MATERIALIZED (
  SELECT id FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'waiting' AND NOT suspect AND due <= {now} AND {is_known}
  ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.jobsync_message AS m
SET state = CASE WHEN m.priority = 0 THEN 'ready' ELSE 'ranked' END
FROM late WHERE m.id = late.id RETURNING 1;

-- name: find_claimed
-- The messages of a claim whose reply was lost, in their order there.
SELECT p.id, p.payload, p.deliveries, p.returned, p.max_attempts, p.timeout, c.is_suspect,
  extract(epoch FROM p.enqueued)::float8, p.task
FROM {schema}.jobsync_claim AS c {in_claim}
WHERE c.claim = %(claim)s AND p.outcome = 'o' ORDER BY p.place;

-- fragment: grouped_claims
-- The claims with groups, if they were left alone.
SELECT NULL, claim FROM {schema}.jobsync_claim
WHERE claim = ANY (%(distinct)s::text[]) AND groups IS NOT NULL

-- name: complete_claim
-- Complete all messages of a claim, none of which was settled before. This is the common case, and by
-- far the cheapest one for claims of a few messages.
UPDATE {schema}.jobsync_claim
SET outcomes = repeat('c', open), open = 0, completed = open,
  finished = array_fill(t.time, ARRAY[open]), closed = t.time, payloads = NULL
FROM (SELECT clock_timestamp() AS time) AS t
WHERE claim = %(claim)s AND cardinality(ids) = %(count)s AND outcomes = repeat('o', %(count)s)
AND groups IS NULL
RETURNING 1;

-- fragment: completing
-- Complete messages. It reads no payloads. Claims with groups are left alone.
WITH claims AS MATERIALIZED (
  SELECT claim, ids, outcomes, dues, finished FROM {schema}.jobsync_claim
  WHERE claim = ANY (%(distinct)s::text[]) AND groups IS NULL ORDER BY claim FOR UPDATE
), places AS MATERIALIZED (
  SELECT c.claim, p.place, p.id, p.due, g.id IS NOT NULL AS is_given,
    g.id IS NOT NULL AND p.outcome = 'o' AS is_ended,
    CASE WHEN g.id IS NOT NULL AND p.outcome = 'o' THEN 'c' ELSE p.outcome END AS outcome,
    CASE WHEN g.id IS NOT NULL AND p.outcome = 'o' THEN clock_timestamp() ELSE p.finished END
      AS finished
  FROM claims AS c CROSS JOIN LATERAL (
    SELECT id, coalesce(outcome, 'o') AS outcome, due, finished, place
    FROM unnest(c.ids, string_to_array(c.outcomes, NULL), c.dues, c.finished)
      WITH ORDINALITY AS u (id, outcome, due, finished, place)
  ) AS p
  LEFT JOIN unnest(%(ids)s::text[], %(claims)s::text[]) AS g (id, claim)
  ON g.claim = c.claim AND g.id = p.id
), ended AS (
  SELECT claim, string_agg(outcome, '' ORDER BY place) AS outcomes,
    count(*) FILTER (WHERE outcome = 'o') AS open,
    count(*) FILTER (WHERE outcome = 'c') AS completed, min(due) FILTER (WHERE outcome = 'o') AS due,
    array_agg(finished ORDER BY place) AS finished,
    max(finished) FILTER (WHERE outcome = 'c') AS latest
  FROM places GROUP BY claim HAVING bool_or(is_ended)
), written AS (
  UPDATE {schema}.jobsync_claim AS c
  SET outcomes = e.outcomes, open = e.open, completed = e.completed, finished = e.finished,
    due = coalesce(e.due, c.due),
    closed = CASE WHEN e.open = 0 THEN greatest(e.latest, clock_timestamp()) END,
    payloads = CASE WHEN e.open > 0 THEN c.payloads END
  FROM ended AS e WHERE c.claim = e.claim
)

-- fragment: completed_ids
-- The ids of those that are completed, by this statement or an earlier one; and claims with groups.
SELECT id, NULL FROM places WHERE is_given AND outcome IN ('c', 'f')
UNION ALL {grouped_claims}

-- name: complete
-- Complete messages; return the ids of those that are completed.
{completing}
{completed_ids};

-- name: find_outcome
-- How a message of a claim was settled. A transaction that is about to settle it has ended before.
SELECT coalesce(nullif(substr(outcomes, array_position(ids, %(id)s), 1), ''), 'o')
FROM {schema}.jobsync_claim WHERE claim = %(claim)s AND %(id)s = ANY (ids) FOR UPDATE;

-- name: settle
-- End claims as given; return the ids of the messages whose claims were ended so, by this statement or
-- an earlier one. Claims with groups are left alone and returned, unless the caller settles them; then
-- a head that is finished is returned with its group.
WITH claims AS MATERIALIZED (
  SELECT * FROM {schema}.jobsync_claim
  WHERE claim = ANY (%(distinct)s::text[]) AND (%(with_groups)s OR groups IS NULL)
  ORDER BY claim FOR UPDATE
), places AS MATERIALIZED (
  SELECT c.claim, c.queue, c.session, c.format, p.place, p.id, p.position, p.payload, p.deliveries,
    p.returned, p.max_attempts, p.timeout, p.errors, p.enqueued, p.task, p.due, p.priority,
    p.group_name, g.outcome AS wanted, g.state, false AS is_suspect,
    g.id IS NOT NULL AND p.outcome = 'o' AS is_ended,
    CASE WHEN p.outcome = 'o' THEN coalesce(g.outcome, 'o') ELSE p.outcome END AS outcome,
    CASE WHEN p.outcome = 'o' AND g.id IS NOT NULL THEN clock_timestamp() ELSE p.finished END
      AS finished,
    clock_timestamp() + g.delay * interval '1 second' AS next_due,
    CASE WHEN p.returned < 2147483647 THEN p.returned + g.back ELSE p.returned END
      AS next_returned,
    {kept_errors} || CASE WHEN g.error IS NOT NULL THEN {error_line} ELSE '' END AS next_errors
  FROM claims AS c {in_claim}
  LEFT JOIN unnest(
    %(ids)s::text[], %(claims)s::text[], %(outcomes)s::text[], %(states)s::text[],
    %(delays)s::float8[], %(returns)s::integer[], %(errors)s::text[]
  ) AS g (id, claim, outcome, state, delay, back, error) ON g.claim = c.claim AND g.id = p.id
), {end_places}
SELECT id, CASE WHEN is_ended AND state <> 'waiting' THEN group_name END
FROM places WHERE outcome = wanted OR (outcome = 'f' AND wanted = 'c')
UNION ALL {grouped_claims} AND NOT %(with_groups)s;

-- name: extend
-- Extend claims; never shorten them.
WITH claims AS MATERIALIZED (
  SELECT claim, due, ids, outcomes, dues FROM {schema}.jobsync_claim
  WHERE claim = ANY (%(distinct)s::text[]) ORDER BY claim FOR UPDATE
), places AS MATERIALIZED (
  SELECT c.claim, p.place, p.id, p.is_open, p.is_open AND g.id IS NOT NULL AS is_extended,
    CASE WHEN p.is_open AND g.id IS NOT NULL
      THEN greatest(p.due, {now} + %(visibility)s * interval '1 second') ELSE p.due
    END AS due
  FROM claims AS c CROSS JOIN LATERAL (
    SELECT id, coalesce(outcome, 'o') = 'o' AS is_open, coalesce(due, c.due) AS due, place
    FROM unnest(c.ids, string_to_array(c.outcomes, NULL), c.dues)
      WITH ORDINALITY AS u (id, outcome, due, place)
  ) AS p
  LEFT JOIN unnest(%(ids)s::text[], %(claims)s::text[]) AS g (id, claim)
  ON g.claim = c.claim AND g.id = p.id
), extended AS (
  SELECT claim, min(due) FILTER (WHERE is_open) AS first, max(due) FILTER (WHERE is_open) AS last,
    array_agg(due ORDER BY place) AS dues
  FROM places GROUP BY claim HAVING bool_or(is_extended)
), written AS (
  UPDATE {schema}.jobsync_claim AS c
  SET due = e.first, dues = CASE WHEN e.first < e.last THEN e.dues END
  FROM extended AS e WHERE c.claim = e.claim
)
SELECT id FROM places WHERE is_extended;

-- name: end_claims
-- End the claims that lapsed and those of dead sessions. A message that was a suspect has spent an
-- attempt and may be dead; the others become suspects.
WITH lapsed AS (
  SELECT claim, sum(open) OVER (ORDER BY due, claim) - open AS open_before
  FROM {schema}.jobsync_claim
  WHERE queue = %(queue)s AND closed IS NULL
  AND (due <= {now} OR session = ANY (%(dead)s::text[])) AND {is_known}
), claims AS MATERIALIZED (
  SELECT * FROM {schema}.jobsync_claim
  WHERE claim = ANY (ARRAY (SELECT claim FROM lapsed WHERE open_before < %(limit)s))
  ORDER BY claim FOR UPDATE SKIP LOCKED
), places AS MATERIALIZED (
  SELECT c.claim, c.queue, c.session, c.format, p.place, p.id, p.position, p.payload, p.deliveries,
    p.returned, p.max_attempts, p.timeout, p.errors, p.enqueued, p.task, p.due, p.priority,
    p.group_name, {attempt} AS attempt, true AS is_suspect, g.is_ended,
    CASE WHEN c.is_suspect AND {attempt} >= p.max_attempts THEN 'dead' ELSE 'waiting' END AS state,
    CASE WHEN g.is_ended THEN 'l' ELSE p.outcome END AS outcome,
    CASE WHEN g.is_ended THEN clock_timestamp() ELSE p.finished END AS finished,
    clock_timestamp() AS next_due,
    p.returned + (NOT c.is_suspect AND p.returned < 2147483647)::integer AS next_returned,
    {kept_errors} || {error_line} AS next_errors
  FROM claims AS c {in_claim} CROSS JOIN LATERAL (
    SELECT CASE WHEN c.is_suspect THEN %(lapsed)s ELSE %(spared)s END AS error,
      p.outcome = 'o' AND coalesce(p.id <> ALL (%(keep)s::text[]), true)
        AND (p.due <= {now} OR c.session = ANY (%(dead)s::text[])) AS is_ended
  ) AS g
), {end_places}
SELECT id, state, attempt, session, CASE state WHEN 'dead' THEN group_name END
FROM places WHERE is_ended AND id IS NOT NULL ORDER BY position;

-- name: list_holders
-- The sessions that hold claims.
SELECT DISTINCT session FROM {schema}.jobsync_claim
WHERE queue = %(queue)s AND closed IS NULL AND {is_known} ORDER BY session;

-- name: browse_live
-- List messages that are not claimed, in their order.
SELECT {waiting} FROM {schema}.jobsync_message AS m
WHERE queue = %(queue)s AND state = ANY (%(states)s::text[])
AND m.position > coalesce(nullif(%(after)s, ''), '0')::bigint
ORDER BY m.position LIMIT %(limit)s;

-- name: browse_claimed
-- List claimed messages, in their order.
SELECT {claimed} FROM {schema}.jobsync_claim AS c {in_claim}
WHERE c.queue = %(queue)s AND c.closed IS NULL AND p.outcome = 'o' AND p.id IS NOT NULL
AND p.position > coalesce(nullif(%(after)s, ''), '0')::bigint
ORDER BY p.position LIMIT %(limit)s;

-- name: browse_completed
-- List completed messages, the oldest first: in claims, and those that older code has completed. The
-- first closed claims that have any, one for each message to list, and claims that began before they
-- ended have all that is listed.
SELECT {completed} FROM {schema}.jobsync_claim AS c {in_claim}
WHERE c.queue = %(queue)s AND c.closed >= {after_time} AND c.completed > 0
AND c.claimed <= coalesce((
  SELECT closed FROM {schema}.jobsync_claim AS d
  WHERE queue = %(queue)s AND closed >= {after_time} AND completed > 0 AND EXISTS (
    -- One whose messages were completed earlier than it was closed may have none to list.
    SELECT 1 FROM unnest(d.ids, string_to_array(d.outcomes, NULL), d.finished) AS i (id, outcome, time)
    WHERE i.outcome = 'c' AND i.id IS NOT NULL AND (i.time, i.id) > {after}
  )
  ORDER BY closed OFFSET %(limit)s LIMIT 1
), 'infinity') AND p.outcome = 'c' AND p.id IS NOT NULL AND (p.finished, p.id) > {after}
UNION ALL
SELECT {completed} FROM {schema}.jobsync_claim AS c {in_claim}
WHERE c.queue = %(queue)s AND c.closed IS NULL AND c.completed > 0
AND p.outcome = 'c' AND p.id IS NOT NULL AND (p.finished, p.id) > {after}
UNION ALL (
  SELECT {finished} FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND state = 'completed' AND (finished, id) > {after}
  ORDER BY finished, id LIMIT %(limit)s
)
-- By the time and the id.
ORDER BY 14, 2 LIMIT %(limit)s;

-- name: browse_finished
-- List finished messages in a state, the oldest first.
SELECT {finished} FROM {schema}.jobsync_finished
WHERE queue = %(queue)s AND state = %(state)s AND (finished, id) > {after}
ORDER BY finished, id LIMIT %(limit)s;

-- name: find
-- Find messages of any queue by id, each with its progress or its result.
WITH found (
  queue, id, state, payload, deliveries, returned, max_attempts, errors, session, suspect, enqueued,
  due, claimed, finished, seen, format, priority, group_name, task, cursor
) AS (
  SELECT {waiting} FROM {schema}.jobsync_message WHERE id = ANY (%(ids)s::text[])
  UNION ALL
  SELECT {claimed} FROM unnest(%(ids)s::text[]) AS g (id)
  JOIN {schema}.jobsync_claim AS c ON c.closed IS NULL AND c.high >= g.id AND c.low <= g.id {in_claim}
  WHERE p.id = g.id AND p.outcome = 'o'
  UNION ALL
  SELECT {completed} FROM unnest(%(ids)s::text[]) AS g (id)
  JOIN {schema}.jobsync_claim AS c ON c.closed IS NULL AND c.high >= g.id AND c.low <= g.id {in_claim}
  WHERE p.id = g.id AND p.outcome = 'c'
  UNION ALL
  SELECT {completed} FROM unnest(%(ids)s::text[]) AS g (id)
  JOIN {schema}.jobsync_claim AS c ON c.closed IS NOT NULL AND c.high >= g.id AND c.low <= g.id
  {in_claim}
  WHERE p.id = g.id AND p.outcome = 'c'
  UNION ALL
  SELECT {finished} FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[])
)
SELECT f.*, t.progress, t.note, extract(epoch FROM t.reported)::float8, r.result, r.problem
FROM found AS f
LEFT JOIN {schema}.jobsync_progress AS t
ON t.id = f.id AND t.deliveries = f.deliveries AND f.state = 'claimed'
LEFT JOIN {schema}.jobsync_result AS r ON r.id = f.id AND f.state = 'completed';

-- name: find_head
-- The head of a group.
SELECT {waiting} FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND group_name = %(group)s AND state IN (
  'ready', 'ranked', 'waiting', 'task_ready', 'task_ranked', 'task_waiting'
)
UNION ALL
SELECT {claimed} FROM {schema}.jobsync_claim AS c {in_claim}
WHERE c.queue = %(queue)s AND c.closed IS NULL AND c.groups IS NOT NULL AND p.outcome = 'o'
AND p.group_name = %(group)s
LIMIT 1;

-- name: list_live
-- List the messages of a queue that are not finished, by id.
(
  SELECT {waiting} FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND id > %(after)s ORDER BY id LIMIT %(limit)s
) UNION ALL (
  SELECT {claimed} FROM {schema}.jobsync_claim AS c {in_claim}
  WHERE c.queue = %(queue)s AND c.closed IS NULL AND c.high > %(after)s AND p.outcome = 'o'
  AND p.id > %(after)s ORDER BY p.id LIMIT %(limit)s
)
-- By the id.
ORDER BY 2 LIMIT %(limit)s;

-- name: list_dead
-- List the dead letters of a queue, by id.
SELECT {finished} FROM {schema}.jobsync_finished
WHERE queue = %(queue)s AND state = 'dead' AND id > %(after)s ORDER BY id LIMIT %(limit)s;

-- name: summarize
-- Count the messages of all queues by state and session, with the time of the oldest.
SELECT queue, {shown_state}, '', count(*), extract(epoch FROM min(enqueued))::float8
FROM {schema}.jobsync_message GROUP BY queue, state
UNION ALL
SELECT queue, 'claimed', session, sum(open)::bigint, extract(epoch FROM min(claimed))::float8
FROM {schema}.jobsync_claim WHERE closed IS NULL GROUP BY queue, session
UNION ALL
SELECT queue, 'completed', '', sum(completed)::bigint, extract(epoch FROM min(claimed))::float8
FROM {schema}.jobsync_claim WHERE completed > 0 GROUP BY queue
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
SELECT state, sum(number)::bigint FROM (
  SELECT {shown_state}, count(*) FROM {schema}.jobsync_message
  WHERE queue = %(queue)s GROUP BY state
  UNION ALL
  SELECT 'claimed', sum(open) FROM {schema}.jobsync_claim
  WHERE queue = %(queue)s AND closed IS NULL
  UNION ALL
  SELECT 'completed', sum(completed) FROM {schema}.jobsync_claim
  WHERE queue = %(queue)s AND closed IS NULL
  UNION ALL
  SELECT 'completed', sum(completed) FROM {schema}.jobsync_claim
  WHERE queue = %(queue)s AND closed IS NOT NULL
  UNION ALL
  SELECT state, count(*) FROM {schema}.jobsync_finished WHERE queue = %(queue)s GROUP BY state
) AS counts (state, number) WHERE number > 0 GROUP BY state;

-- name: find_newer
-- Count the messages of newer code by format.
SELECT format, sum(number)::bigint FROM (
  SELECT format, count(*) FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND format > 3 GROUP BY format
  UNION ALL
  SELECT format, sum(open) FROM {schema}.jobsync_claim
  WHERE queue = %(queue)s AND format > 3 AND open > 0 GROUP BY format
) AS counts (format, number) GROUP BY format ORDER BY format;

-- name: choose_dead
-- Choose dead letters to put back, and lock them.
SELECT id, group_name FROM {schema}.jobsync_finished
WHERE queue = %(queue)s AND payload IS NOT NULL AND {is_known}
AND (id = ANY (%(ids)s::text[]) OR (state = 'dead' AND %(all)s))
ORDER BY finished, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED;

-- name: insert_redriven
-- Put dead letters back. Their attempts so far count as returned; deliveries only grow.
INSERT INTO {schema}.jobsync_message (
  id, queue, state, due, payload, deliveries, returned, max_attempts, timeout, errors, enqueued,
  format, task, priority, group_name
)
SELECT id, queue, CASE WHEN id = ANY (%(blocked)s::text[]) THEN 'blocked' ELSE {lane} || 'waiting' END,
  clock_timestamp(), payload, deliveries, deliveries, max_attempts, timeout, errors, enqueued,
  format, task, priority, group_name
FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[]) ORDER BY finished, id RETURNING 1;

-- name: delete_redriven
-- Delete dead letters after they were put back.
DELETE FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[]) RETURNING 1;

-- name: purge
-- Delete messages in these states; return how many, and the group of each head among them. The rows
-- of claims stay: they answer settlements.
WITH live AS (
  DELETE FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = ANY (%(states)s::text[]) AND {is_known}
  RETURNING CASE WHEN state <> 'blocked' THEN group_name END AS group_name
), finished AS (
  DELETE FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND state = ANY (%(states)s::text[]) AND {is_known} RETURNING 1
), claims AS MATERIALIZED (
  SELECT claim, outcomes, groups,
    CASE WHEN 'claimed' = ANY (%(states)s::text[]) THEN open ELSE 0 END AS open,
    CASE WHEN 'completed' = ANY (%(states)s::text[]) THEN completed ELSE 0 END AS completed
  FROM {schema}.jobsync_claim WHERE queue = %(queue)s AND {is_known} AND (open > 0 OR completed > 0)
  ORDER BY claim FOR UPDATE
), written AS (
  UPDATE {schema}.jobsync_claim AS c
  SET outcomes = translate(c.outcomes,
      CASE WHEN g.open > 0 THEN 'o' ELSE '' END || CASE WHEN g.completed > 0 THEN 'c' ELSE '' END,
      CASE WHEN g.open > 0 THEN 'p' ELSE '' END || CASE WHEN g.completed > 0 THEN 'f' ELSE '' END),
    open = c.open - g.open, completed = c.completed - g.completed,
    closed = coalesce(c.closed, CASE WHEN c.open = g.open THEN greatest(
      clock_timestamp(), (SELECT max(time) FROM unnest(c.finished) AS f (time))
    ) END),
    payloads = CASE WHEN c.open > g.open THEN c.payloads END
  FROM claims AS g WHERE c.claim = g.claim AND (g.open > 0 OR g.completed > 0)
), results AS (
  DELETE FROM {schema}.jobsync_result
  WHERE queue = %(queue)s AND 'completed' = ANY (%(states)s::text[])
)
SELECT (SELECT count(*) FROM live) + (SELECT count(*) FROM finished)
  + (SELECT coalesce(sum(open + completed), 0) FROM claims),
  ARRAY (
    SELECT group_name FROM live WHERE group_name IS NOT NULL
    UNION ALL
    SELECT p.group_name FROM claims AS c
    CROSS JOIN LATERAL unnest(string_to_array(c.outcomes, NULL), c.groups) AS p (outcome, group_name)
    WHERE c.open > 0 AND c.groups IS NOT NULL AND p.outcome = 'o' AND p.group_name IS NOT NULL
  );

-- name: forget
-- Delete messages that were finished long ago.
WITH old AS MATERIALIZED (
  SELECT id FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND state = %(state)s AND finished < {forget_before} AND {is_known}
  ORDER BY finished LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_finished AS f USING old WHERE f.id = old.id RETURNING 1
)
SELECT count(*) FROM gone;

-- name: forget_claims
-- Delete claims with completed messages that were closed long ago.
WITH gone AS (
  DELETE FROM {schema}.jobsync_claim WHERE claim IN ({old_claims}) RETURNING completed
)
SELECT coalesce(sum(completed), 0) FROM gone;

-- name: forget_completed
-- Forget completed messages whose claims are too young to be deleted: they still answer settlements.
WITH claims AS MATERIALIZED (
  SELECT claim, completed FROM {schema}.jobsync_claim WHERE claim IN ({old_claims})
  ORDER BY claim FOR UPDATE SKIP LOCKED
), written AS (
  UPDATE {schema}.jobsync_claim AS c SET outcomes = translate(c.outcomes, 'c', 'f'), completed = 0
  FROM claims AS g WHERE c.claim = g.claim
)
SELECT coalesce(sum(completed), 0) FROM claims;

-- name: forget_in_claims
-- Forget messages that were completed long ago in claims that were not closed by then.
WITH claims AS MATERIALIZED (
  SELECT claim, claimed, outcomes, finished FROM {schema}.jobsync_claim
  WHERE claim = ANY (ARRAY (
    SELECT claim FROM {schema}.jobsync_claim
    WHERE queue = %(queue)s AND closed IS NULL AND completed > 0 AND {is_known}
    UNION ALL
    SELECT claim FROM {schema}.jobsync_claim
    WHERE queue = %(queue)s AND closed >= {forget_before} AND claimed < {forget_before}
    AND completed > 0 AND {is_known}
  )) ORDER BY claim FOR UPDATE SKIP LOCKED
), places AS MATERIALIZED (
  SELECT c.claim, p.place, p.outcome,
    p.outcome = 'c' AND coalesce(p.finished, c.claimed) < {forget_before} AS is_old
  FROM claims AS c CROSS JOIN LATERAL unnest(string_to_array(c.outcomes, NULL), c.finished)
    WITH ORDINALITY AS p (outcome, finished, place)
), aged AS (
  SELECT claim, count(*) FILTER (WHERE is_old) AS number,
    string_agg(CASE WHEN is_old THEN 'f' ELSE coalesce(outcome, 'o') END, '' ORDER BY place)
      AS outcomes
  FROM places GROUP BY claim HAVING bool_or(is_old)
), written AS (
  UPDATE {schema}.jobsync_claim AS c
  SET outcomes = a.outcomes, completed = c.completed - a.number
  FROM aged AS a WHERE c.claim = a.claim RETURNING a.number
)
SELECT coalesce(sum(number), 0) FROM written;

-- name: forget_answers
-- Delete claims without completed messages that were closed long ago. Nobody repeats their settlements
-- any more.
WITH old AS MATERIALIZED (
  SELECT claim FROM {schema}.jobsync_claim
  WHERE queue = %(queue)s AND closed < {forget_before} AND completed = 0 AND {is_known}
  ORDER BY closed LIMIT %(limit)s
), gone AS (
  DELETE FROM {schema}.jobsync_claim AS c USING old WHERE c.claim = old.claim RETURNING 1
)
SELECT count(*) FROM gone;

-- name: add_groups
-- Lock groups to which messages are added; return how many of these are heads.
INSERT INTO {schema}.jobsync_group AS g (queue, name, heads, added)
SELECT %(queue)s, name, least(number, %(most_heads)s), least(number, %(most_heads)s)
FROM unnest(%(names)s::text[], %(numbers)s::integer[]) AS n (name, number) ORDER BY name
ON CONFLICT (queue, name) DO UPDATE
SET added = greatest(0, least(%(most_heads)s, g.heads + excluded.heads) - g.heads),
  heads = greatest(g.heads, least(%(most_heads)s, g.heads + excluded.heads))
RETURNING name, added;

-- name: lock_groups
-- Lock groups of which heads are finished. The next statement sees all messages that others have added.
SELECT name, heads FROM {schema}.jobsync_group
WHERE queue = %(queue)s AND name = ANY (%(names)s::text[]) ORDER BY name FOR UPDATE;

-- name: set_heads
-- Record how many heads groups have.
UPDATE {schema}.jobsync_group AS g SET heads = n.number
FROM unnest(%(names)s::text[], %(numbers)s::integer[]) AS n (name, number)
WHERE g.queue = %(queue)s AND g.name = n.name RETURNING 1;

-- name: unblock
-- Let the next message of each of these groups be a head; return the groups.
UPDATE {schema}.jobsync_message AS m
SET state = {lane} || 'waiting', due = greatest(m.due, clock_timestamp())
FROM unnest(%(names)s::text[]) AS g (name) CROSS JOIN LATERAL (
  SELECT id FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND group_name = g.name AND state = 'blocked'
  ORDER BY position LIMIT 1
) AS next
WHERE m.id = next.id RETURNING m.group_name;

-- name: remove_groups
-- Remove groups without messages.
DELETE FROM {schema}.jobsync_group
WHERE queue = %(queue)s AND name = ANY (%(names)s::text[]) RETURNING 1;

-- name: insert_placed
-- Add messages in order, each in its state.
INSERT INTO {schema}.jobsync_message (
  queue, id, state, due, payload, max_attempts, timeout, task, format, priority, group_name
)
SELECT %(queue)s, id,
  CASE WHEN is_blocked THEN 'blocked'
    WHEN delay > 0 OR to_timestamp(at) > clock_timestamp() THEN {lane} || 'waiting'
    WHEN priority <> 0 THEN {lane} || 'ranked' ELSE {lane} || 'ready' END,
  coalesce(to_timestamp(at), clock_timestamp() + delay * interval '1 second'), payload,
  max_attempts, timeout, task, format, priority, group_name
FROM unnest(
  %(ids)s::text[], %(payloads)s::text[], %(delays)s::float8[], %(times)s::float8[],
  %(max_attempts)s::integer[], %(timeouts)s::float8[], %(tasks)s::text[], %(formats)s::integer[],
  %(priorities)s::smallint[], %(groups)s::text[], %(blocked)s::boolean[]
) WITH ORDINALITY AS t (
  id, payload, delay, at, max_attempts, timeout, task, format, priority, group_name, is_blocked,
  place
) ORDER BY place RETURNING 1;

-- name: hold_keys
-- Hold keys for new messages, unless others hold them; return who holds each, and until when.
-- Each row is locked.
INSERT INTO {schema}.jobsync_key AS k (queue, key, id, held_until)
SELECT %(queue)s, key, id, clock_timestamp() + ttl * interval '1 second'
FROM unnest(%(keys)s::text[], %(ids)s::text[], %(ttls)s::float8[]) AS n (key, id, ttl) ORDER BY key
ON CONFLICT (queue, key) DO UPDATE
SET id = CASE WHEN k.held_until <= clock_timestamp() THEN excluded.id ELSE k.id END,
  held_until = CASE WHEN k.held_until <= clock_timestamp() THEN excluded.held_until
    ELSE k.held_until END
RETURNING key, id, held_until;

-- name: take_keys
-- Hold keys for other messages than before.
UPDATE {schema}.jobsync_key AS k
SET id = n.id, held_until = clock_timestamp() + n.ttl * interval '1 second'
FROM unnest(%(keys)s::text[], %(ids)s::text[], %(ttls)s::float8[]) AS n (key, id, ttl)
WHERE k.queue = %(queue)s AND k.key = n.key RETURNING 1;

-- name: find_holders
-- Who holds these keys.
SELECT key, id FROM {schema}.jobsync_key
WHERE queue = %(queue)s AND key = ANY (%(keys)s::text[]);

-- name: notify_topic
-- Notify the listeners of a topic.
SELECT pg_notify(%(channel)s, %(topic)s);

-- name: find_pending
-- The messages of these that are not finished.
SELECT id FROM {schema}.jobsync_message WHERE id = ANY (%(ids)s::text[])
UNION ALL
SELECT p.id FROM {schema}.jobsync_claim AS c
CROSS JOIN LATERAL unnest(c.ids, string_to_array(c.outcomes, NULL)) AS p (id, outcome)
WHERE c.closed IS NULL AND {has_any_id} AND p.outcome = 'o' AND p.id = ANY (%(ids)s::text[]);

-- name: replace
-- Replace a message that nobody has claimed. Attempts with the content before count as returned.
UPDATE {schema}.jobsync_message
SET payload = %(payload)s, max_attempts = %(max_attempts)s, returned = deliveries,
  timeout = %(timeout)s, task = %(task)s, format = greatest(format, %(format)s),
  state = CASE state WHEN 'blocked' THEN 'blocked' ELSE %(lane)s::text || 'waiting' END,
  due = coalesce(
    to_timestamp(%(at)s::float8), clock_timestamp() + %(delay)s * interval '1 second'
  )
WHERE id = %(holder)s AND {is_known} RETURNING 1;

-- name: forget_keys
-- Remove keys that nobody holds: look at some after a key, and return the last of them. A key that
-- was taken over meanwhile has another id or another time.
WITH seen AS MATERIALIZED (
  SELECT key, id, held_until FROM {schema}.jobsync_key
  WHERE queue = %(queue)s AND key > %(after)s ORDER BY key LIMIT %(limit)s
), gone AS (
  DELETE FROM {schema}.jobsync_key AS k USING seen AS s
  WHERE k.queue = %(queue)s AND k.key = s.key AND k.id = s.id
  AND k.held_until IS NOT DISTINCT FROM s.held_until AND CASE
    WHEN s.held_until IS NOT NULL THEN s.held_until <= clock_timestamp()
    ELSE NOT EXISTS (SELECT 1 FROM {schema}.jobsync_message AS m WHERE m.id = s.id)
      AND NOT EXISTS (
        SELECT 1 FROM {schema}.jobsync_claim AS c
        WHERE c.closed IS NULL AND c.high >= s.id AND c.low <= s.id
        AND substr(c.outcomes, array_position(c.ids, s.id), 1) = 'o'
      )
  END RETURNING 1
)
SELECT coalesce(max(key), ''), (SELECT count(*) FROM gone), count(*) FROM seen;

-- name: lock_limit
-- Lock the limits of a queue: from here on, claims are counted one after the other.
INSERT INTO {schema}.jobsync_limit AS l (queue, tokens, refilled)
VALUES (%(queue)s, %(burst)s, clock_timestamp())
ON CONFLICT (queue) DO UPDATE SET queue = l.queue RETURNING 1;

-- name: read_usage
-- How many messages of a queue are claimed, how many its rate allows to claim now, and whether that
-- grows by itself.
SELECT (
    SELECT coalesce(sum(open), 0)::bigint FROM {schema}.jobsync_claim
    WHERE queue = %(queue)s AND closed IS NULL
  ), least(%(burst)s, tokens + %(rate)s * greatest(0,
    extract(epoch FROM clock_timestamp() - refilled)::float8)), refilled <= clock_timestamp()
FROM {schema}.jobsync_limit WHERE queue = %(queue)s;

-- name: use_tokens
-- Record how many more messages the rate allows to claim.
UPDATE {schema}.jobsync_limit SET tokens = %(tokens)s, refilled = clock_timestamp()
WHERE queue = %(queue)s RETURNING 1;

-- name: read_task_usage
-- Of the tasks that have messages to claim, now or later: how many are claimed, how many the rate
-- allowed when they were counted last, and the seconds since then.
SELECT t.name, (
    SELECT count(*) FROM {schema}.jobsync_claim AS c
    CROSS JOIN LATERAL unnest(c.tasks, string_to_array(c.outcomes, NULL)) AS m (task, outcome)
    WHERE c.queue = %(queue)s AND c.closed IS NULL AND m.task = t.name
    AND coalesce(m.outcome, 'o') = 'o'
  ), l.tokens, extract(epoch FROM clock_timestamp() - l.refilled)::float8
FROM unnest(%(names)s::text[]) AS t (name)
LEFT JOIN {schema}.jobsync_limit AS l ON l.queue = %(queue)s || '#' || t.name
WHERE EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'task_ready' AND task = t.name
) OR EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'task_ranked' AND task = t.name
) OR EXISTS (
  SELECT 1 FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'task_waiting' AND task = t.name
);

-- name: use_task_tokens
-- Record how many more messages the rates of tasks allow to claim.
INSERT INTO {schema}.jobsync_limit (queue, tokens, refilled)
SELECT %(queue)s || '#' || t.name, t.tokens, clock_timestamp()
FROM unnest(%(names)s::text[], %(numbers)s::float8[]) AS t (name, tokens)
ON CONFLICT (queue) DO UPDATE SET tokens = excluded.tokens, refilled = excluded.refilled
RETURNING 1;

-- name: complete_with_results
-- Complete messages and keep what their handlers returned; return the ids of those that are completed.
{completing}, results AS (
  INSERT INTO {schema}.jobsync_result (id, queue, result, problem, finished)
  SELECT p.id, %(queue)s, g.result, g.problem, p.finished FROM places AS p
  JOIN unnest(%(ids)s::text[], %(results)s::text[], %(problems)s::text[])
    AS g (id, result, problem) ON g.id = p.id
  WHERE p.is_ended AND (g.result IS NOT NULL OR g.problem <> '') ORDER BY p.id
  ON CONFLICT (id) DO UPDATE
  SET result = excluded.result, problem = excluded.problem, finished = excluded.finished
)
{completed_ids};

-- name: insert_results
-- Keep what the handlers of messages returned that were completed by the statement before.
INSERT INTO {schema}.jobsync_result (id, queue, result, problem, finished)
SELECT id, %(queue)s, result, problem, clock_timestamp()
FROM unnest(%(ids)s::text[], %(results)s::text[], %(problems)s::text[]) AS g (id, result, problem)
WHERE id = ANY (%(settled)s::text[]) AND (result IS NOT NULL OR problem <> '') ORDER BY id
ON CONFLICT (id) DO UPDATE
SET result = excluded.result, problem = excluded.problem, finished = excluded.finished RETURNING 1;

-- name: forget_results
-- Delete the results of messages that were completed long ago.
WITH old AS MATERIALIZED (
  SELECT id FROM {schema}.jobsync_result WHERE queue = %(queue)s AND finished < {forget_before}
  ORDER BY finished LIMIT %(limit)s
), gone AS (
  DELETE FROM {schema}.jobsync_result AS r USING old WHERE r.id = old.id RETURNING 1
)
SELECT count(*) FROM gone;

-- name: report_progress
-- Store how far handlers are. A late report of an earlier delivery changes nothing.
INSERT INTO {schema}.jobsync_progress AS t (id, queue, deliveries, progress, note, reported)
SELECT id, %(queue)s, deliveries, progress, note, clock_timestamp()
FROM unnest(
  %(ids)s::text[], %(deliveries)s::integer[], %(progress)s::float8[], %(notes)s::text[]
) AS g (id, deliveries, progress, note) ORDER BY id
ON CONFLICT (id) DO UPDATE
SET deliveries = excluded.deliveries, progress = excluded.progress, note = excluded.note,
  reported = excluded.reported
WHERE t.deliveries <= excluded.deliveries RETURNING 1;

-- name: clear_progress
-- Delete what was reported about messages.
DELETE FROM {schema}.jobsync_progress WHERE id = ANY (%(ids)s::text[]) RETURNING 1;

-- name: forget_progress
-- Delete what was reported long ago: its process has died since.
DELETE FROM {schema}.jobsync_progress WHERE queue = %(queue)s AND reported < {forget_before}
RETURNING 1;

-- name: cancel_waiting
-- Cancel a message that is not claimed.
WITH gone AS (
  DELETE FROM {schema}.jobsync_message
  WHERE id = %(id)s AND queue = %(queue)s AND {is_known} RETURNING *
), cancelled AS (
  SELECT p.*, {attempt} AS attempt, {kept_errors} || {error_line} AS next_errors
  FROM gone AS p, (SELECT %(error)s AS error) AS g, (SELECT '' AS session) AS c
), kept AS (
  INSERT INTO {schema}.jobsync_finished (
    id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, errors,
    enqueued, format, task, priority, group_name
  )
  SELECT id, queue, 'cancelled', payload, deliveries, returned, max_attempts, timeout, '',
    next_errors, enqueued, format, task, priority, group_name
  FROM cancelled ON CONFLICT (id) DO NOTHING
)
SELECT attempt, '', CASE WHEN state <> 'blocked' THEN group_name END FROM cancelled;

-- name: cancel_claimed
-- Cancel a claimed message: end its claim.
WITH claims AS MATERIALIZED (
  SELECT * FROM {schema}.jobsync_claim
  WHERE queue = %(queue)s AND closed IS NULL AND high >= %(id)s AND low <= %(id)s
  AND %(id)s = ANY (ids) AND {is_known} ORDER BY claim FOR UPDATE
), places AS MATERIALIZED (
  SELECT c.claim, c.queue, c.session, c.format, p.place, p.id, p.position, p.payload, p.deliveries,
    p.returned, p.max_attempts, p.timeout, p.errors, p.enqueued, p.task, p.due, p.priority,
    p.group_name, {attempt} AS attempt, false AS is_suspect, g.is_ended, 'cancelled' AS state,
    CASE WHEN g.is_ended THEN 'v' ELSE p.outcome END AS outcome,
    CASE WHEN g.is_ended THEN clock_timestamp() ELSE p.finished END AS finished,
    clock_timestamp() AS next_due, p.returned AS next_returned,
    {kept_errors} || {error_line} AS next_errors
  FROM claims AS c {in_claim} CROSS JOIN LATERAL (
    SELECT %(error)s AS error, coalesce(p.outcome = 'o' AND p.id = %(id)s, false) AS is_ended
  ) AS g
), {end_places}
SELECT attempt, session, group_name FROM places WHERE is_ended;

-- name: delete_waiting
-- Delete a message that is not claimed.
DELETE FROM {schema}.jobsync_message
WHERE id = %(id)s AND queue = %(queue)s AND {is_known}
RETURNING CASE WHEN state <> 'blocked' THEN group_name END;

-- name: delete_finished
-- Delete a finished message, and its result. The row of its claim stays: it answers settlements.
WITH gone AS (
  DELETE FROM {schema}.jobsync_finished
  WHERE id = %(id)s AND queue = %(queue)s AND {is_known} RETURNING 1
), forgotten AS (
  UPDATE {schema}.jobsync_claim
  SET outcomes = overlay(outcomes PLACING 'f' FROM array_position(ids, %(id)s)),
    completed = completed - 1
  WHERE claim = ANY (ARRAY (
    SELECT claim FROM {schema}.jobsync_claim
    WHERE closed IS NULL AND high >= %(id)s AND low <= %(id)s
    UNION ALL
    SELECT claim FROM {schema}.jobsync_claim
    WHERE closed IS NOT NULL AND high >= %(id)s AND low <= %(id)s
  )) AND queue = %(queue)s AND {is_known} AND %(id)s = ANY (ids)
  AND substr(outcomes, array_position(ids, %(id)s), 1) = 'c'
  RETURNING 1
), results AS (
  DELETE FROM {schema}.jobsync_result WHERE id = %(id)s AND queue = %(queue)s
)
SELECT 1 FROM gone UNION ALL SELECT 1 FROM forgotten;

-- name: run_now
-- End the delay of a message.
UPDATE {schema}.jobsync_message SET due = clock_timestamp()
WHERE id = %(id)s AND queue = %(queue)s AND state IN ('waiting', 'task_waiting')
AND due > {now} AND {is_known}
RETURNING 1;
