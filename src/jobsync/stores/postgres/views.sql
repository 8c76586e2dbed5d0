-- Views of the message tables, which the installer of a fleet's views creates.
--
-- {schema}  the quoted schema
-- {app}     the prefix of the relations' names

-- name: message
-- Messages of all queues. Payloads are text, as written: one that is not JSON must not hide the
-- others.
CREATE OR REPLACE VIEW {schema}.{app}message AS
SELECT queue, id, state, deliveries - returned AS attempts, max_attempts,
  CASE WHEN state = 'claimed' THEN session END AS incarnation, enqueued AS enqueued_on,
  CASE WHEN state = 'waiting' THEN due END AS due_on,
  CASE WHEN state = 'claimed' THEN claimed END AS claimed_on,
  NULL::timestamptz AS finished_on, errors, payload
FROM {schema}.jobsync_message
UNION ALL
SELECT queue, id, state, deliveries - returned, max_attempts, session, enqueued, NULL, NULL,
  finished, errors, payload
FROM {schema}.jobsync_finished;
