-- Views of the message tables, which the installer of a fleet's views creates.
--
-- {app}   the prefix of the relations' names
-- {mark}  the version of the views

-- name: message
-- Messages of all queues. A claim that somebody has overwritten hides no other.
CREATE VIEW {app}message AS -- {mark}
SELECT queue, id, CASE state WHEN 'ranked' THEN 'ready' WHEN 'task_ready' THEN 'ready'
    WHEN 'task_ranked' THEN 'ready' WHEN 'task_waiting' THEN 'waiting' ELSE state END AS state,
  deliveries - returned AS attempts, max_attempts, NULL AS incarnation,
  strftime('%Y-%m-%d %H:%M:%f', enqueued, 'unixepoch') AS enqueued_on,
  CASE WHEN state IN ('waiting', 'task_waiting')
    THEN strftime('%Y-%m-%d %H:%M:%f', due, 'unixepoch') END AS due_on,
  NULL AS claimed_on, NULL AS finished_on, errors, payload, task
FROM jobsync_message
UNION ALL
SELECT c.queue, json_extract(m.value, '$[0]'),
  CASE substr(c.outcomes, m.key + 1, 1) WHEN 'o' THEN 'claimed' ELSE 'completed' END,
  json_extract(m.value, '$[2]') - json_extract(m.value, '$[3]'), json_extract(m.value, '$[4]'),
  c.session, strftime('%Y-%m-%d %H:%M:%f', json_extract(m.value, '$[6]'), 'unixepoch'), NULL,
  CASE substr(c.outcomes, m.key + 1, 1) WHEN 'o'
    THEN strftime('%Y-%m-%d %H:%M:%f', c.claimed, 'unixepoch') END,
  CASE substr(c.outcomes, m.key + 1, 1) WHEN 'c' THEN strftime(
    '%Y-%m-%d %H:%M:%f', coalesce(
      CASE WHEN json_valid(c.times) THEN json_extract(c.times, '$[' || m.key || ']') END, c.finished
    ), 'unixepoch'
  ) END,
  CASE WHEN json_valid(c.errors) THEN coalesce(json_extract(c.errors, '$[' || m.key || ']'), '')
    ELSE '' END,
  CASE substr(c.outcomes, m.key + 1, 1) WHEN 'o' THEN CAST(substr(
    coalesce(c.payloads, (SELECT payloads FROM jobsync_claim_payload WHERE number = c.number)),
    json_extract(m.value, '$[8]') + 1, json_extract(m.value, '$[9]')
  ) AS TEXT) END, coalesce(json_extract(m.value, '$[7]'), '')
FROM jobsync_claim AS c CROSS JOIN json_each(
  CASE WHEN json_valid(c.messages) THEN c.messages ELSE '[]' END
) AS m
WHERE (c.open > 0 OR c.completed > 0) AND m.type = 'array'
AND substr(c.outcomes, m.key + 1, 1) IN ('o', 'c')
UNION ALL
SELECT queue, id, state, deliveries - returned, max_attempts, session,
  strftime('%Y-%m-%d %H:%M:%f', enqueued, 'unixepoch'),
  NULL, NULL, strftime('%Y-%m-%d %H:%M:%f', finished, 'unixepoch'), errors, payload, task
FROM jobsync_finished;
