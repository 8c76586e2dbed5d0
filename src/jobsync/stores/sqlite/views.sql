-- Views of the message tables, which the installer of a fleet's views creates.
--
-- {app}   the prefix of the relations' names
-- {mark}  the version of the views

-- name: message
-- Messages of all queues.
CREATE VIEW {app}message AS -- {mark}
SELECT queue, id, state, deliveries - returned AS attempts, max_attempts,
  CASE state WHEN 'claimed' THEN session END AS incarnation,
  strftime('%Y-%m-%d %H:%M:%f', enqueued, 'unixepoch') AS enqueued_on,
  CASE state WHEN 'waiting' THEN strftime('%Y-%m-%d %H:%M:%f', due, 'unixepoch') END AS due_on,
  CASE state WHEN 'claimed' THEN strftime('%Y-%m-%d %H:%M:%f', claimed, 'unixepoch') END
    AS claimed_on,
  NULL AS finished_on, errors, payload
FROM jobsync_message
UNION ALL
SELECT queue, id, state, deliveries - returned, max_attempts, session,
  strftime('%Y-%m-%d %H:%M:%f', enqueued, 'unixepoch'),
  NULL, NULL, strftime('%Y-%m-%d %H:%M:%f', finished, 'unixepoch'), errors, payload
FROM jobsync_finished;
