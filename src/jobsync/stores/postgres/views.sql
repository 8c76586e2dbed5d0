-- Views of the message tables, which the installer of a fleet's views creates.
--
-- {schema}  the quoted schema
-- {app}     the prefix of the relations' names

-- name: message
-- Messages of all queues. A claim that somebody has overwritten hides no other; payloads are text,
-- as written, because one may not be JSON.
CREATE OR REPLACE VIEW {schema}.{app}message AS
SELECT queue, id, CASE state WHEN 'ranked' THEN 'ready' WHEN 'task_ready' THEN 'ready'
    WHEN 'task_ranked' THEN 'ready' WHEN 'task_waiting' THEN 'waiting' ELSE state END AS state,
  deliveries - returned AS attempts, max_attempts,
  NULL::text COLLATE "C" AS incarnation, enqueued AS enqueued_on,
  CASE WHEN state IN ('waiting', 'task_waiting') THEN due END AS due_on,
  NULL::timestamptz AS claimed_on, NULL::timestamptz AS finished_on, errors, payload, task
FROM {schema}.jobsync_message
UNION ALL
SELECT c.queue, p.id, CASE p.outcome WHEN 'o' THEN 'claimed' ELSE 'completed' END,
  greatest(
    0, least(2147483647, coalesce(p.deliveries, 0)::bigint - coalesce(p.returned, 0))
  )::integer,
  p.max_attempts, c.session, p.enqueued, NULL,
  CASE p.outcome WHEN 'o' THEN c.claimed END, p.finished, coalesce(p.errors, ''),
  CASE p.outcome WHEN 'o' THEN p.payload END, coalesce(p.task, '')
FROM {schema}.jobsync_claim AS c
CROSS JOIN LATERAL unnest(
  c.ids, string_to_array(c.outcomes, NULL), c.payloads, c.deliveries, c.returned, c.max_attempts,
  c.errors, c.enqueued, c.finished, c.tasks
) AS p (
  id, outcome, payload, deliveries, returned, max_attempts, errors, enqueued, finished, task
)
WHERE (c.open > 0 OR c.completed > 0) AND p.outcome IN ('o', 'c')
UNION ALL
SELECT queue, id, state, deliveries - returned, max_attempts, session, enqueued, NULL, NULL,
  finished, errors, payload, task
FROM {schema}.jobsync_finished;
