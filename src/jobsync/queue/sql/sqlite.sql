-- Statements on the messages in an SQLite file. The statements of one batch run in one transaction.
-- See sqlite.py.

-- fragment: is_known
-- Whether this code understands a message. Messages of newer code are only counted and shown.
format <= 1

-- fragment: is_wanted
-- Whether the caller wants messages of this task.
(:tasks IS NULL OR task IN (SELECT value FROM json_each(:tasks)))

-- fragment: next_delivery
-- The number of the next delivery. A counter at its end stays there; the message is then set aside.
CASE WHEN deliveries < 2147483647 THEN deliveries + 1 ELSE deliveries END

-- fragment: attempt
-- The number of the current attempt, whatever somebody has written into the counters.
min(max(deliveries - returned, 0), 2147483647)

-- fragment: message
-- A claimed message. The payload is read as bytes: text that is not UTF-8 would fail the query, not
-- only its own row.
position, id, CAST(payload AS BLOB), {next_delivery}, returned, max_attempts, timeout, suspect,
enqueued

-- fragment: is_open
-- Whether the queue is not paused.
NOT EXISTS (SELECT 1 FROM jobsync_pause WHERE queue = :queue)

-- fragment: is_due
-- Whether a delay that counts from this boot is over.
boot = :boot AND wakes <= :mono

-- fragment: is_delayed
-- Whether a delay that counts from this boot is not over.
boot = :boot AND wakes > :mono

-- fragment: foreign_delays
-- Delays that count from another boot, or that older code has written. Three ranges of an index.
SELECT position FROM jobsync_message
WHERE queue = :queue AND state = 'waiting' AND suspect IN (0, 1) AND boot < :boot AND {is_known}
UNION ALL
SELECT position FROM jobsync_message
WHERE queue = :queue AND state = 'waiting' AND suspect IN (0, 1) AND boot > :boot AND {is_known}
UNION ALL
SELECT position FROM jobsync_message
WHERE queue = :queue AND state = 'waiting' AND suspect IN (0, 1) AND boot = :boot
AND wakes IS NULL AND {is_known}

-- fragment: error_line
-- One line of JSON for the errors of a message, if there is an error.
CASE WHEN :error IS NOT NULL THEN json_object(
  'attempt', {attempt}, 'error', json(:error), 'at', :now, 'session', session
) || char(10) ELSE '' END

-- fragment: kept_errors
-- The errors of a message so far. Of very many the latest are kept, from the start of a line: each new
-- one rewrites the row, and a row has an end.
CASE WHEN length(errors) > 400000
  THEN substr(substr(errors, -200000), instr(substr(errors, -200000), char(10)) + 1)
  ELSE errors END

-- fragment: is_of_claim
-- The messages that one claim still holds.
id IN (SELECT value FROM json_each(:ids)) AND claim = :claim AND state = 'claimed'

-- fragment: live
-- A message that is not finished, for display. Claims and delays are counted from boot; people read
-- wall time.
queue, id, state, CAST(payload AS BLOB), deliveries, returned, max_attempts, errors, session,
suspect, enqueued,
CASE state WHEN 'waiting' THEN
  CASE WHEN boot = :delay_boot AND wakes IS NOT NULL THEN :now + wakes - :delay_now ELSE due END
WHEN 'claimed' THEN
  CASE WHEN boot = :boot THEN :now + due - :mono ELSE :now END
END,
CASE state WHEN 'claimed' THEN claimed END, NULL, :now, format,
CAST(position AS TEXT)

-- fragment: finished
-- A finished message, for display. The caller builds the cursor.
queue, id, state, CAST(payload AS BLOB), deliveries, returned, max_attempts, errors, session,
0, enqueued, NULL, NULL, finished, :now, format

-- name: push
-- Add a message.
INSERT INTO jobsync_message (
  queue, id, state, due, boot, wakes, payload, max_attempts, timeout, enqueued, task
)
VALUES (
  :queue, :id, :state, :due, :boot, :wakes, :payload, :max_attempts, :timeout, :now, :task
);

-- name: exists
-- Whether any of these messages exists, finished or not. A push is one transaction, so one message
-- proves all.
SELECT EXISTS (
  SELECT 1 FROM jobsync_message WHERE id IN (SELECT value FROM json_each(:ids))
) OR EXISTS (
  SELECT 1 FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids))
);

-- name: adopt
-- Count delays of another boot, and those of older code, from this boot: what the wall clock leaves of
-- them, and no more than they were.
UPDATE jobsync_message
SET boot = :boot, wakes = :mono + max(0, min(
  due - :now,
  CASE WHEN due > coalesce(claimed, enqueued) THEN due - coalesce(claimed, enqueued)
    ELSE due - :now END
))
WHERE position IN (SELECT position FROM ({foreign_delays}) LIMIT :limit);

-- name: select_waiting
-- Select due messages that waited, suspects or others.
SELECT {message} FROM jobsync_message
WHERE queue = :queue AND state = 'waiting' AND suspect = :suspects AND {is_due}
AND {is_known} AND {is_wanted} AND {is_open}
ORDER BY wakes, position LIMIT :limit;

-- name: select_ready
-- Select new messages in their order.
SELECT {message} FROM jobsync_message
WHERE queue = :queue AND state = 'ready' AND {is_known} AND {is_wanted} AND {is_open}
ORDER BY position LIMIT :limit;

-- name: claim
-- Claim the selected messages.
UPDATE jobsync_message
SET state = 'claimed', deliveries = {next_delivery}, claim = :claim, session = :session,
  due = :due, boot = :boot, claimed = :now
WHERE position IN (SELECT value FROM json_each(:positions));

-- name: outlook
-- What there is to do now and later: whether there is anything to claim, whether there are suspects
-- to claim, when the next delays end (of others, of suspects), when the next claim lapses, and whether
-- there are delays of another boot.
SELECT
  {is_open} AND (EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = :suspects AND {is_due}
    AND {is_known} AND {is_wanted}
  ) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM jobsync_message WHERE queue = :queue AND state = 'ready' AND {is_known}
    AND {is_wanted}
  ))),
  {is_open} AND EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 1 AND {is_due}
    AND {is_known} AND {is_wanted}
  ),
  (
    SELECT min(wakes) FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 0 AND {is_delayed}
    AND {is_known} AND {is_wanted}
  ),
  (
    SELECT min(wakes) FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 1 AND {is_delayed}
    AND {is_known} AND {is_wanted}
  ),
  lapses.due, lapses.boot, EXISTS ({foreign_delays})
FROM (SELECT 1) LEFT JOIN (
  SELECT due, boot FROM jobsync_message WHERE queue = :queue AND state = 'claimed'
  AND {is_known} ORDER BY due LIMIT 1
) AS lapses;

-- name: finish
-- Copy one message to the finished ones. Completed messages keep no payload.
INSERT INTO jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, trail, errors,
  enqueued, finished, format, task
)
SELECT id, queue, :target, CASE WHEN :target <> 'completed' THEN payload END, deliveries, returned,
  max_attempts, timeout, session, substr(trim(:mark || ' ' || trail), 1, 120), {kept_errors} || {error_line},
  enqueued, :now, format, task
FROM jobsync_message WHERE id = :id AND claim = :claim AND state = 'claimed';

-- name: delete_live
-- Delete a message after it was copied.
DELETE FROM jobsync_message WHERE id = :id;

-- name: complete
-- Copy the completed messages of one claim to the finished ones. Only completions come in large
-- numbers.
INSERT INTO jobsync_finished (
  id, queue, state, deliveries, returned, max_attempts, timeout, session, trail, errors, enqueued,
  finished, format, task
)
SELECT id, queue, 'completed', deliveries, returned, max_attempts, timeout, session,
  substr(trim(:mark || ' ' || trail), 1, 120), errors, enqueued, :now, format, task
FROM jobsync_message WHERE {is_of_claim};

-- name: delete_completed
-- Delete the messages of one claim after they were copied.
DELETE FROM jobsync_message WHERE {is_of_claim};

-- name: requeue
-- End a claim so that the message waits for its next delivery.
UPDATE jobsync_message
SET state = 'waiting', due = :due, boot = :boot, wakes = :wakes,
  returned = CASE WHEN returned < 2147483647 THEN returned + :back ELSE returned END,
  suspect = :suspect, claim = '', session = '', trail = substr(trim(:mark || ' ' || trail), 1, 120),
  errors = {kept_errors} || {error_line}
WHERE id = :id AND claim = :claim AND state = 'claimed';

-- name: was_settled
-- Whether this claim was settled in this way before.
SELECT EXISTS (SELECT 1 FROM jobsync_message WHERE id = :id AND instr(trail, :mark))
    OR EXISTS (SELECT 1 FROM jobsync_finished WHERE id = :id AND instr(trail, :mark));

-- name: extend
-- Extend a claim; never shorten it.
UPDATE jobsync_message SET due = CASE WHEN boot = :boot THEN max(due, :due) ELSE :due END,
  boot = :boot
WHERE id = :id AND claim = :claim AND state = 'claimed';

-- name: find_lapsed
-- Find the claims that lapsed, those of dead sessions, and those of an earlier boot, whose holders
-- ended with it.
SELECT id, claim, {attempt}, max_attempts, suspect, session FROM jobsync_message
WHERE queue = :queue AND state = 'claimed' AND (
  boot <> :boot OR due <= :mono OR session IN (SELECT value FROM json_each(:dead))
) AND id NOT IN (SELECT value FROM json_each(:keep)) AND {is_known}
ORDER BY due LIMIT :limit;

-- name: list_holders
-- The sessions that hold claims.
SELECT DISTINCT session FROM jobsync_message
WHERE queue = :queue AND state = 'claimed' AND {is_known} ORDER BY session;

-- name: browse_live
-- List messages in a state, in their order.
SELECT {live} FROM jobsync_message
WHERE queue = :queue AND state = :state AND position > CAST(:after AS INTEGER)
ORDER BY position LIMIT :limit;

-- name: browse_finished
-- List finished messages in a state, the oldest first.
SELECT {finished}, '' FROM jobsync_finished
WHERE queue = :queue AND state = :state AND (finished, id) > (:since, :after)
ORDER BY finished, id LIMIT :limit;

-- name: find
-- Find messages of any queue by id.
SELECT {live} FROM jobsync_message WHERE id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT {finished}, '' FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids));

-- name: list_live
-- List the messages of a queue that are not finished, by id.
SELECT {live} FROM jobsync_message
WHERE queue = :queue AND id > :after ORDER BY id LIMIT :limit;

-- name: list_dead
-- List the dead letters of a queue, by id.
SELECT {finished}, '' FROM jobsync_finished
WHERE queue = :queue AND state = 'dead' AND id > :after ORDER BY id LIMIT :limit;

-- name: summarize
-- Count the messages of all queues by state and session, with the time of the oldest.
SELECT queue, state, session, count(*), min(enqueued) FROM jobsync_message
GROUP BY queue, state, session
UNION ALL
SELECT queue, state, '', count(*), min(enqueued) FROM jobsync_finished GROUP BY queue, state;

-- name: list_pauses
-- The queues that are paused.
SELECT queue, since, reason FROM jobsync_pause;

-- name: pause
-- Pause a queue, unless it is paused.
INSERT INTO jobsync_pause (queue, since, reason) VALUES (:queue, :now, :reason)
ON CONFLICT (queue) DO NOTHING;

-- name: resume
-- Resume a queue.
DELETE FROM jobsync_pause WHERE queue = :queue;

-- name: count
-- Count the messages of a queue by state.
SELECT state, count(*) FROM jobsync_message WHERE queue = :queue GROUP BY state
UNION ALL
SELECT state, count(*) FROM jobsync_finished WHERE queue = :queue GROUP BY state;

-- name: find_newer
-- Count the messages of newer code by format.
SELECT format, count(*) FROM jobsync_message
WHERE queue = :queue AND format > 1 GROUP BY format ORDER BY format;

-- name: redrive
-- Put dead letters back. Their attempts so far count as returned; deliveries only grow.
INSERT INTO jobsync_message (
  id, queue, state, due, boot, wakes, payload, deliveries, returned, max_attempts, timeout, trail,
  errors, enqueued, format, task
)
SELECT id, queue, 'waiting', :now, :boot, :mono, payload, deliveries, deliveries, max_attempts,
  timeout, trail, errors, enqueued, format, task
FROM jobsync_finished
WHERE queue = :queue AND payload IS NOT NULL AND {is_known} AND (
  id IN (SELECT value FROM json_each(:ids)) OR (:all AND state = 'dead')
)
ORDER BY finished, id LIMIT :limit
RETURNING id;

-- name: delete_finished
-- Delete finished messages after they were put back.
DELETE FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids));

-- name: purge_live
-- Delete messages in these states that are not finished.
DELETE FROM jobsync_message
WHERE queue = :queue AND state IN (SELECT value FROM json_each(:states)) AND {is_known};

-- name: purge_finished
-- Delete finished messages in these states.
DELETE FROM jobsync_finished
WHERE queue = :queue AND state IN (SELECT value FROM json_each(:states)) AND {is_known};

-- name: forget
-- Delete messages that were finished long ago.
DELETE FROM jobsync_finished WHERE id IN (
  SELECT id FROM jobsync_finished
  WHERE queue = :queue AND state = :state AND finished < :before AND {is_known}
  ORDER BY finished LIMIT :limit
);
