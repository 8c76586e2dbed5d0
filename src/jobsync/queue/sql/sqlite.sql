-- Statements on the messages in an SQLite file. The statements of one batch run in one transaction.
-- See sqlite.py, and for the rows of claims sqlite_claims.py. The letters of outcomes are explained in
-- the schema.

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

-- fragment: message
-- A message to claim. Payload and errors are read as bytes: text that is not UTF-8 would fail the
-- query, not only its own row.
position, id, CAST(payload AS BLOB), {next_delivery}, returned, max_attempts, timeout, suspect,
enqueued, task, CAST(errors AS BLOB), priority, group_name, format, wakes

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

-- fragment: foreign_task_delays
-- Likewise, of messages of tasks.
SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
WHERE m.queue = :queue AND m.state = 'task_waiting' AND m.task = t.value AND m.suspect IN (0, 1)
AND m.boot < :boot AND {is_known}
UNION ALL
SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
WHERE m.queue = :queue AND m.state = 'task_waiting' AND m.task = t.value AND m.suspect IN (0, 1)
AND m.boot > :boot AND {is_known}
UNION ALL
SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
WHERE m.queue = :queue AND m.state = 'task_waiting' AND m.task = t.value AND m.suspect IN (0, 1)
AND m.boot = :boot AND m.wakes IS NULL AND {is_known}

-- fragment: rest
-- What is left of a delay that does not count from this boot: as the wall clock says, and no more than
-- it was requested. Older code has not stored that.
max(0, min(due - :now, coalesce(
  delay,
  CASE WHEN due > coalesce(claimed, enqueued) THEN due - coalesce(claimed, enqueued)
    ELSE due - :now END
)))

-- fragment: waiting
-- A message that is not claimed, for display. Delays are counted from boot; people read wall time.
queue, id, {shown_state}, CAST(payload AS BLOB), deliveries, returned, max_attempts, errors, '',
suspect, enqueued,
CASE WHEN state IN ('waiting', 'task_waiting') THEN
  CASE WHEN boot = :delay_boot AND wakes IS NOT NULL THEN :now + wakes - :delay_now ELSE due END
END, NULL, NULL, :now, format, priority, group_name, task, CAST(position AS TEXT)

-- fragment: in_claim
-- Claims `c` and their messages `m`. What somebody has overwritten fails no other claim.
jobsync_claim AS c CROSS JOIN json_each(
  CASE WHEN json_valid(c.messages) THEN c.messages ELSE '[]' END
) AS m

-- fragment: item
-- The array of a message `m`.
CASE m.type WHEN 'array' THEN m.value ELSE '[]' END

-- fragment: item_id
-- The id of a message `m`.
json_extract({item}, '$[0]')

-- fragment: outcome
-- How a message `m` was settled.
coalesce(nullif(substr(c.outcomes, m.key + 1, 1), ''), 'o')

-- fragment: counters
-- The counters and errors of a message `m`, for display.
coalesce(json_extract({item}, '$[2]'), 0), coalesce(json_extract({item}, '$[3]'), 0),
coalesce(json_extract({item}, '$[4]'), 1),
CASE WHEN json_valid(c.errors) THEN coalesce(json_extract(c.errors, '$[' || m.key || ']'), '')
  ELSE '' END

-- fragment: item_enqueued
-- When a message `m` was pushed.
coalesce(json_extract({item}, '$[6]'), c.claimed)

-- fragment: item_payload
-- The payload of a message `m`.
coalesce(CAST(substr(
  coalesce(c.payloads, (SELECT payloads FROM jobsync_claim_payload WHERE number = c.number)),
  json_extract({item}, '$[8]') + 1, json_extract({item}, '$[9]')
) AS BLOB), x'')

-- fragment: item_due
-- When the claim of a message `m` lapses.
coalesce(CASE WHEN json_valid(c.dues) THEN json_extract(c.dues, '$[' || m.key || ']') END, c.due)

-- fragment: item_finished
-- When a message `m` was completed.
coalesce(CASE WHEN json_valid(c.times) THEN json_extract(c.times, '$[' || m.key || ']') END,
  c.finished)

-- fragment: item_place
-- The priority, the group and the task of a message `m`.
coalesce(json_extract({item}, '$[10]'), 0), json_extract({item}, '$[11]'),
coalesce(json_extract({item}, '$[7]'), '')

-- fragment: claimed
-- A claimed message, for display. Claims are counted from boot; people read wall time.
c.queue, {item_id}, 'claimed', {item_payload}, {counters}, c.session, c.suspect, {item_enqueued},
CASE WHEN c.boot = :boot THEN :now + {item_due} - :mono ELSE :now END, c.claimed, NULL, :now,
c.format, {item_place}, CAST(json_extract({item}, '$[1]') AS TEXT)

-- fragment: completed
-- A completed message, for display. The caller builds the cursor.
c.queue, {item_id}, 'completed', NULL, {counters}, c.session, 0, {item_enqueued}, NULL, NULL,
{item_finished}, :now, c.format, {item_place}

-- fragment: finished
-- A cancelled message or a dead letter, for display, or one that older code has completed. The caller
-- builds the cursor.
queue, id, state, CAST(payload AS BLOB), deliveries, returned, max_attempts, errors, session,
0, enqueued, NULL, NULL, finished, :now, format, priority, group_name, task

-- fragment: numbers
-- The claims that may have any of these ids.
SELECT c.number FROM json_each(:ids) AS g CROSS JOIN jobsync_claim AS c
WHERE c.low = c.high AND c.low = g.value
UNION
SELECT c.number FROM json_each(:ids) AS g CROSS JOIN jobsync_claim AS c
WHERE c.low < c.high AND c.high >= g.value AND c.low <= g.value

-- fragment: payload
-- The payload of a message, from its claim.
CAST(coalesce(substr(coalesce(
  (SELECT payloads FROM jobsync_claim WHERE number = :number),
  (SELECT payloads FROM jobsync_claim_payload WHERE number = :number)
), :start + 1, :size), x'') AS TEXT)

-- fragment: claim_row
-- A claim, as `ClaimRow` reads it.
number, claim, queue, session, claimed, due, boot, suspect, format, closed, finished, outcomes,
CAST(messages AS BLOB), CAST(errors AS BLOB), CAST(dues AS BLOB), CAST(times AS BLOB)

-- name: push
-- Add a message.
INSERT INTO jobsync_message (
  queue, id, state, due, boot, wakes, delay, payload, max_attempts, timeout, enqueued, task, format
)
VALUES (
  :queue, :id, :state, :due, :boot, :wakes, :delay, :payload, :max_attempts, :timeout, :now, :task,
  :format
);

-- name: exists
-- Whether any of these messages exists, finished or not. A push is one transaction, so one message
-- proves all.
SELECT EXISTS (
  SELECT 1 FROM jobsync_message WHERE id IN (SELECT value FROM json_each(:ids))
) OR EXISTS (
  SELECT 1 FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids))
) OR EXISTS (
  SELECT 1 FROM {in_claim}
  WHERE c.number IN ({numbers}) AND {item_id} IN (SELECT value FROM json_each(:ids))
);

-- name: adopt
-- Count delays of another boot, and those of older code, from this boot.
UPDATE jobsync_message
SET boot = :boot, wakes = :mono + {rest}
WHERE position IN (
  SELECT position FROM ({foreign_delays} UNION ALL {foreign_task_delays}) LIMIT :limit
);

-- name: has_waiting
-- Whether any message waits: mostly none does, and this costs less than to select those that are due.
SELECT EXISTS (SELECT 1 FROM jobsync_message WHERE queue = :queue AND state = 'waiting');

-- name: has_waiting_tasks
-- Likewise, any message without a task, or of these tasks.
SELECT EXISTS (SELECT 1 FROM jobsync_message WHERE queue = :queue AND state = 'waiting')
OR EXISTS (
  SELECT 1 FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
  WHERE m.queue = :queue AND m.state = 'task_waiting' AND m.task = t.value
);

-- name: select_waiting
-- Select due messages that waited, suspects or others.
SELECT {message} FROM jobsync_message
WHERE queue = :queue AND state = 'waiting' AND suspect = :suspects AND {is_due}
AND {is_known} AND {is_open}
ORDER BY wakes, position LIMIT :limit;

-- name: select_ready
-- Select ready messages without a priority, the oldest first.
SELECT {message} FROM jobsync_message
WHERE queue = :queue AND state = 'ready' AND {is_known} AND {is_open}
ORDER BY position LIMIT :limit;

-- name: select_newest
-- Likewise, the newest first.
SELECT {message} FROM jobsync_message
WHERE queue = :queue AND state = 'ready' AND {is_known} AND {is_open}
ORDER BY position DESC LIMIT :limit;

-- name: select_high
-- Select ready messages with a priority above 0.
SELECT {message} FROM jobsync_message
WHERE queue = :queue AND state = 'ranked' AND priority > 0 AND {is_known} AND {is_open} ORDER BY priority DESC, position LIMIT :limit;

-- name: select_low
-- Likewise, below 0.
SELECT {message} FROM jobsync_message
WHERE queue = :queue AND state = 'ranked' AND priority < 0 AND {is_known} AND {is_open} ORDER BY priority DESC, position LIMIT :limit;

-- name: select_task_waiting
-- Select due messages of tasks that waited. An index has those of each task apart: the first of each
-- are candidates.
SELECT {message} FROM jobsync_message WHERE position IN (
  SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
  WHERE {is_open} AND m.position IN (
    SELECT position FROM jobsync_message
    WHERE queue = :queue AND state = 'task_waiting' AND task = t.value AND suspect = :suspects
    AND {is_due} AND {is_known} ORDER BY wakes, position LIMIT :limit
  )
  ORDER BY m.wakes, m.position LIMIT :limit
)
ORDER BY wakes, position;

-- name: select_task_ready
-- Select ready messages of tasks without a priority, the oldest first.
SELECT {message} FROM jobsync_message WHERE position IN (
  SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
  WHERE {is_open} AND m.position IN (
    SELECT position FROM jobsync_message
    WHERE queue = :queue AND state = 'task_ready' AND task = t.value AND {is_known}
    ORDER BY position LIMIT :limit
  )
  ORDER BY m.position LIMIT :limit
)
ORDER BY position;

-- name: select_task_newest
-- Likewise, the newest first.
SELECT {message} FROM jobsync_message WHERE position IN (
  SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
  WHERE {is_open} AND m.position IN (
    SELECT position FROM jobsync_message
    WHERE queue = :queue AND state = 'task_ready' AND task = t.value AND {is_known}
    ORDER BY position DESC LIMIT :limit
  )
  ORDER BY m.position DESC LIMIT :limit
)
ORDER BY position DESC;

-- name: select_task_high
-- Select ready messages of tasks with a priority above 0.
SELECT {message} FROM jobsync_message WHERE position IN (
  SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
  WHERE {is_open} AND m.position IN (
    SELECT position FROM jobsync_message
    WHERE queue = :queue AND state = 'task_ranked' AND task = t.value AND priority > 0
    AND {is_known} ORDER BY priority DESC, position LIMIT :limit
  )
  ORDER BY m.priority DESC, m.position LIMIT :limit
)
ORDER BY priority DESC, position;

-- name: select_task_low
-- Likewise, below 0.
SELECT {message} FROM jobsync_message WHERE position IN (
  SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
  WHERE {is_open} AND m.position IN (
    SELECT position FROM jobsync_message
    WHERE queue = :queue AND state = 'task_ranked' AND task = t.value AND priority < 0
    AND {is_known} ORDER BY priority DESC, position LIMIT :limit
  )
  ORDER BY m.priority DESC, m.position LIMIT :limit
)
ORDER BY priority DESC, position;

-- name: promote_tasks
-- Let messages of tasks whose delays are over take the places that their order gives them.
UPDATE jobsync_message SET state = CASE WHEN priority = 0 THEN 'task_ready' ELSE 'task_ranked' END
WHERE position IN (
  SELECT m.position FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
  WHERE m.position IN (
    SELECT position FROM jobsync_message
    WHERE queue = :queue AND state = 'task_waiting' AND task = t.value AND suspect = 0
    AND {is_due} AND {is_known} ORDER BY wakes LIMIT :limit
  )
);

-- name: promote
-- Let messages whose delays are over take the places that their order gives them.
UPDATE jobsync_message SET state = CASE WHEN priority = 0 THEN 'ready' ELSE 'ranked' END
WHERE position IN (
  SELECT position FROM jobsync_message
  WHERE queue = :queue AND state = 'waiting' AND suspect = 0 AND {is_due} AND {is_known}
  ORDER BY wakes LIMIT :limit
);

-- name: delete_one
-- Delete a selected message, which its claim has now.
DELETE FROM jobsync_message WHERE position = :position;

-- name: delete_claimed
-- Likewise, many.
DELETE FROM jobsync_message WHERE position IN (SELECT value FROM json_each(:positions));

-- name: insert_claim
-- Add a claim.
INSERT INTO jobsync_claim (
  claim, queue, session, claimed, due, boot, suspect, open, low, high, outcomes, messages, errors,
  payloads, format, grouped
)
VALUES (
  :claim, :queue, :session, :now, :due, :boot, :suspect, :open, :low, :high, :outcomes, :messages,
  :errors, :payloads, :format, :grouped
);

-- name: insert_payloads
-- Add the payloads of a claim if they are large.
INSERT INTO jobsync_claim_payload (number, payloads) VALUES (:number, :payloads);

-- fragment: next_lapse
-- The claim that lapses first.
SELECT due, boot FROM jobsync_claim WHERE queue = :queue AND open > 0 AND {is_known}
ORDER BY due LIMIT 1

-- name: find_next_lapse
-- When the next claim lapses.
{next_lapse};

-- name: outlook
-- What there is to do now and later: whether there is anything to claim, whether there are suspects
-- to claim, when the next delays end (of others, of suspects), when the next claim lapses, and whether
-- there are delays of another boot.
SELECT
  {is_open} AND (EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = :suspects AND {is_due}
    AND {is_known}
  ) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM jobsync_message WHERE queue = :queue AND state = 'ready' AND {is_known}
   
  )) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM jobsync_message WHERE queue = :queue AND state = 'ranked' AND {is_known}
   
  ))),
  {is_open} AND EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 1 AND {is_due}
    AND {is_known}
  ),
  (
    SELECT min(wakes) FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 0 AND {is_delayed}
    AND {is_known}
  ),
  (
    SELECT min(wakes) FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 1 AND {is_delayed}
    AND {is_known}
  ),
  lapses.due, lapses.boot, EXISTS ({foreign_delays})
FROM (SELECT 1) LEFT JOIN ({next_lapse}) AS lapses;

-- name: task_outlook
-- Likewise, for these tasks, and for messages without one if `plain`.
SELECT
  {is_open} AND (EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE :plain AND queue = :queue AND state = 'waiting' AND suspect = :suspects AND {is_due}
    AND {is_known}
  ) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM jobsync_message WHERE :plain AND queue = :queue AND state = 'ready'
    AND {is_known}
  )) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM jobsync_message WHERE :plain AND queue = :queue AND state = 'ranked'
    AND {is_known}
  )) OR EXISTS (
    SELECT 1 FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
    WHERE m.queue = :queue AND m.state = 'task_waiting' AND m.task = t.value
    AND m.suspect = :suspects AND {is_due} AND {is_known}
  ) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
    WHERE m.queue = :queue AND m.state = 'task_ready' AND m.task = t.value AND {is_known}
  )) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
    WHERE m.queue = :queue AND m.state = 'task_ranked' AND m.task = t.value AND {is_known}
  ))),
  {is_open} AND (EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE :plain AND queue = :queue AND state = 'waiting' AND suspect = 1 AND {is_due}
    AND {is_known}
  ) OR EXISTS (
    SELECT 1 FROM json_each(:tasks) AS t CROSS JOIN jobsync_message AS m
    WHERE m.queue = :queue AND m.state = 'task_waiting' AND m.task = t.value AND m.suspect = 1
    AND {is_due} AND {is_known}
  )),
  (
    SELECT min(next) FROM (
      SELECT min(wakes) AS next FROM jobsync_message
      WHERE :plain AND queue = :queue AND state = 'waiting' AND suspect = 0 AND {is_delayed}
      AND {is_known}
      UNION ALL
      SELECT (
        SELECT min(wakes) FROM jobsync_message
        WHERE queue = :queue AND state = 'task_waiting' AND task = t.value AND suspect = 0
        AND {is_delayed} AND {is_known}
      ) FROM json_each(:tasks) AS t
    )
  ),
  (
    SELECT min(next) FROM (
      SELECT min(wakes) AS next FROM jobsync_message
      WHERE :plain AND queue = :queue AND state = 'waiting' AND suspect = 1 AND {is_delayed}
      AND {is_known}
      UNION ALL
      SELECT (
        SELECT min(wakes) FROM jobsync_message
        WHERE queue = :queue AND state = 'task_waiting' AND task = t.value AND suspect = 1
        AND {is_delayed} AND {is_known}
      ) FROM json_each(:tasks) AS t
    )
  ),
  lapses.due, lapses.boot, EXISTS ({foreign_delays} UNION ALL {foreign_task_delays})
FROM (SELECT 1) LEFT JOIN ({next_lapse}) AS lapses;

-- name: complete_claim
-- Complete all messages of a claim, none of which was settled before. This is the common case, and by
-- far the cheapest one.
UPDATE jobsync_claim
SET outcomes = :outcomes, open = 0, completed = :count, closed = :now, finished = :now, dues = NULL,
  payloads = NULL
WHERE claim = :claim AND outcomes = :unsettled AND completed = 0 AND grouped = 0
RETURNING number;

-- name: delete_payloads
-- Delete the payloads of a claim that is closed, if they are large.
DELETE FROM jobsync_claim_payload WHERE number = :number;

-- name: read_claim
-- The row of a claim.
SELECT {claim_row} FROM jobsync_claim WHERE claim = :claim;

-- name: find_outcome
-- How a message of a claim was settled.
SELECT {outcome} FROM {in_claim} WHERE c.claim = :claim AND {item_id} = :id;

-- name: write_claim
-- Write what has changed in a claim.
UPDATE jobsync_claim
SET outcomes = :outcomes, open = :open, completed = :completed, closed = :closed,
  finished = :finished, due = :due, boot = :boot, errors = :errors, dues = :dues, times = :times,
  payloads = CASE WHEN :open > 0 THEN payloads END
WHERE number = :number;

-- name: put_back
-- End a claim so that the message waits for its next delivery.
INSERT INTO jobsync_message (
  position, id, queue, state, due, boot, wakes, delay, payload, deliveries, returned, max_attempts,
  timeout, suspect, errors, enqueued, format, task, priority, group_name
)
VALUES (
  :position, :id, :queue, CASE WHEN :task = '' THEN 'waiting' ELSE 'task_waiting' END, :due, :boot,
  :wakes, :delay, {payload}, :deliveries,
  CASE WHEN :returned < 2147483647 THEN :returned + :back ELSE :returned END, :max_attempts,
  :timeout, :suspect, :errors, :enqueued, :format, :task, :priority, :group
)
-- Only if somebody has written the same id twice.
ON CONFLICT DO NOTHING;

-- name: finish
-- End a claim so that the message is cancelled or a dead letter.
INSERT INTO jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, trail, errors,
  enqueued, finished, format, task, priority, group_name
)
VALUES (
  :id, :queue, :target, {payload}, :deliveries, :returned, :max_attempts, :timeout, :session, '',
  :errors, :enqueued, :now, :format, :task, :priority, :group
)
ON CONFLICT DO NOTHING;

-- name: has_foreign_claims
-- Whether there are claims of another boot.
SELECT EXISTS (
  SELECT 1 FROM jobsync_claim WHERE queue = :queue AND open > 0 AND {is_known} AND boot <> :boot
);

-- name: find_lapsed
-- Claims that have lapsed, and those of dead sessions.
SELECT {claim_row} FROM jobsync_claim
WHERE queue = :queue AND open > 0 AND {is_known}
AND (boot <> :boot OR due <= :mono OR session IN (SELECT value FROM json_each(:dead)))
ORDER BY due LIMIT :limit;

-- name: abandon
-- Set aside a claim that cannot be read. It stays in the table.
UPDATE jobsync_claim SET open = 0, completed = 0 WHERE number = :number;

-- name: list_holders
-- The sessions that hold claims.
SELECT DISTINCT session FROM jobsync_claim
WHERE queue = :queue AND open > 0 AND {is_known} ORDER BY session;

-- name: browse_live
-- List messages that are not claimed, in their order.
SELECT {waiting} FROM jobsync_message
WHERE queue = :queue AND state IN (SELECT value FROM json_each(:states))
AND position > CAST(:after AS INTEGER)
ORDER BY position LIMIT :limit;

-- name: browse_claimed
-- List claimed messages, in their order.
SELECT {claimed} FROM {in_claim}
WHERE c.queue = :queue AND c.open > 0 AND {outcome} = 'o' AND {item_id} IS NOT NULL
AND json_extract({item}, '$[1]') > CAST(:after AS INTEGER)
ORDER BY json_extract({item}, '$[1]') LIMIT :limit;

-- name: browse_completed
-- List completed messages, the oldest first: in claims, and those that older code has completed. The
-- first claims that have as many as are listed, and claims that began before they ended, have all of
-- these.
SELECT * FROM (
  SELECT {completed}, '' FROM {in_claim}
  WHERE c.queue = :queue AND c.completed > 0 AND c.finished >= :since
  AND c.claimed <= coalesce((
    SELECT min(finished) FROM (
      SELECT finished, sum(number) OVER (ORDER BY finished ROWS UNBOUNDED PRECEDING) AS total
      FROM (
        -- One of which some were completed earlier may have only one to list.
        SELECT finished, CASE WHEN times IS NULL THEN completed ELSE 1 END AS number
        FROM jobsync_claim WHERE queue = :queue AND completed > 0 AND finished > :since
        ORDER BY finished LIMIT :limit
      )
    ) WHERE total >= :limit
  ), 9e999)
  AND {outcome} = 'c' AND {item_id} IS NOT NULL
  AND ({item_finished}, {item_id}) > (:since, :after)
  UNION ALL
  SELECT * FROM (
    SELECT {finished}, '' FROM jobsync_finished
    WHERE queue = :queue AND state = 'completed' AND (finished, id) > (:since, :after)
    ORDER BY finished, id LIMIT :limit
  )
)
-- By the time and the id.
ORDER BY 14, 2 LIMIT :limit;

-- name: browse_finished
-- List finished messages in a state, the oldest first.
SELECT {finished}, '' FROM jobsync_finished
WHERE queue = :queue AND state = :state AND (finished, id) > (:since, :after)
ORDER BY finished, id LIMIT :limit;

-- name: find
-- Find messages of any queue by id, each with its progress or its result.
WITH found (
  queue, id, state, payload, deliveries, returned, max_attempts, errors, session, suspect, enqueued,
  due, claimed, finished, seen, format, priority, group_name, task, cursor
) AS (
  SELECT {waiting} FROM jobsync_message WHERE id IN (SELECT value FROM json_each(:ids))
  UNION ALL
  SELECT {claimed} FROM {in_claim}
  WHERE c.number IN ({numbers}) AND c.open > 0 AND {outcome} = 'o'
  AND {item_id} IN (SELECT value FROM json_each(:ids))
  UNION ALL
  SELECT {completed}, '' FROM {in_claim}
  WHERE c.number IN ({numbers}) AND c.completed > 0 AND {outcome} = 'c'
  AND {item_id} IN (SELECT value FROM json_each(:ids))
  UNION ALL
  SELECT {finished}, '' FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids))
)
SELECT f.*, t.progress, t.note, t.reported, r.result, r.problem FROM found AS f
LEFT JOIN jobsync_progress AS t
ON t.id = f.id AND t.deliveries = f.deliveries AND f.state = 'claimed'
LEFT JOIN jobsync_result AS r ON r.id = f.id AND f.state = 'completed';

-- name: find_head
-- The head of a group.
SELECT {waiting} FROM jobsync_message
WHERE queue = :queue AND group_name = :group AND state IN (
  'ready', 'ranked', 'waiting', 'task_ready', 'task_ranked', 'task_waiting'
)
UNION ALL
SELECT {claimed} FROM {in_claim}
WHERE c.queue = :queue AND c.open > 0 AND c.grouped > 0 AND {outcome} = 'o'
AND json_extract({item}, '$[11]') = :group
LIMIT 1;

-- name: list_live
-- List the messages of a queue that are not finished, by id.
SELECT * FROM (
  SELECT * FROM (
    SELECT {waiting} FROM jobsync_message
    WHERE queue = :queue AND id > :after ORDER BY id LIMIT :limit
  )
  UNION ALL
  SELECT {claimed} FROM {in_claim}
  WHERE c.queue = :queue AND c.open > 0 AND {outcome} = 'o' AND {item_id} > :after
)
-- By the id.
ORDER BY 2 LIMIT :limit;

-- name: list_dead
-- List the dead letters of a queue, by id.
SELECT {finished}, '' FROM jobsync_finished
WHERE queue = :queue AND state = 'dead' AND id > :after ORDER BY id LIMIT :limit;

-- name: summarize
-- Count the messages of all queues by state and session, with the time of the oldest.
SELECT queue, {shown_state}, '', count(*), min(enqueued) FROM jobsync_message GROUP BY queue, state
UNION ALL
SELECT queue, 'claimed', session, sum(open), min(claimed) FROM jobsync_claim
WHERE open > 0 GROUP BY queue, session
UNION ALL
SELECT queue, 'completed', '', sum(completed), min(claimed) FROM jobsync_claim
WHERE completed > 0 GROUP BY queue
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
SELECT state, sum(number) FROM (
  SELECT {shown_state} AS state, count(*) AS number FROM jobsync_message
  WHERE queue = :queue GROUP BY jobsync_message.state
  UNION ALL
  SELECT 'claimed', sum(open) FROM jobsync_claim WHERE queue = :queue AND open > 0
  UNION ALL
  SELECT 'completed', sum(completed) FROM jobsync_claim WHERE queue = :queue AND completed > 0
  UNION ALL
  SELECT state, count(*) FROM jobsync_finished WHERE queue = :queue GROUP BY state
) WHERE number > 0 GROUP BY state;

-- name: find_newer
-- Count the messages of newer code by format.
SELECT format, sum(number) FROM (
  SELECT format, count(*) AS number FROM jobsync_message
  WHERE queue = :queue AND format > 3 GROUP BY format
  UNION ALL
  SELECT format, sum(open) FROM jobsync_claim
  WHERE queue = :queue AND open > 0 AND format > 3 GROUP BY format
) GROUP BY format ORDER BY format;

-- name: choose_dead
-- Choose dead letters to put back.
SELECT id, group_name FROM jobsync_finished
WHERE queue = :queue AND payload IS NOT NULL AND {is_known} AND (
  id IN (SELECT value FROM json_each(:ids)) OR (:all AND state = 'dead')
)
ORDER BY finished, id LIMIT :limit;

-- name: insert_redriven
-- Put dead letters back. Their attempts so far count as returned; deliveries only grow.
INSERT INTO jobsync_message (
  id, queue, state, due, boot, wakes, delay, payload, deliveries, returned, max_attempts, timeout,
  errors, enqueued, format, task, priority, group_name
)
SELECT id, queue,
  CASE WHEN id IN (SELECT value FROM json_each(:blocked)) THEN 'blocked' ELSE {lane} || 'waiting' END,
  :now, :boot, :mono, 0, payload, deliveries, deliveries, max_attempts, timeout, errors, enqueued,
  format, task, priority, group_name
FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY finished, id RETURNING 1;

-- name: delete_redriven
-- Delete dead letters after they were put back.
DELETE FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids)) RETURNING 1;

-- name: purge_live
-- Delete messages in these states that are not finished; return the group of each head.
DELETE FROM jobsync_message
WHERE queue = :queue AND state IN (SELECT value FROM json_each(:states)) AND {is_known}
RETURNING CASE WHEN state <> 'blocked' THEN group_name END;

-- name: purge_finished
-- Delete finished messages in these states.
DELETE FROM jobsync_finished
WHERE queue = :queue AND state IN (SELECT value FROM json_each(:states)) AND {is_known};

-- name: count_in_claims
-- How many messages of a queue are claimed and completed, without those of newer code.
SELECT coalesce(sum(open), 0), coalesce(sum(completed), 0) FROM jobsync_claim
WHERE queue = :queue AND {is_known} AND (open > 0 OR completed > 0);

-- name: list_claimed_groups
-- The group of each head that is claimed.
SELECT json_extract({item}, '$[11]') FROM {in_claim}
WHERE c.queue = :queue AND c.open > 0 AND c.grouped > 0 AND {is_known} AND {outcome} = 'o'
AND json_extract({item}, '$[11]') IS NOT NULL;

-- name: purge_claimed
-- Purge claimed messages. The rows of claims stay: they answer settlements.
UPDATE jobsync_claim SET outcomes = replace(outcomes, 'o', 'p'), open = 0, closed = :now,
  payloads = NULL
WHERE queue = :queue AND open > 0 AND {is_known} RETURNING number;

-- name: purge_completed
-- Purge completed messages, likewise.
UPDATE jobsync_claim SET outcomes = replace(outcomes, 'c', 'f'), completed = 0
WHERE queue = :queue AND completed > 0 AND {is_known};

-- name: forget
-- Delete messages that were finished long ago.
DELETE FROM jobsync_finished WHERE id IN (
  SELECT id FROM jobsync_finished
  WHERE queue = :queue AND state = :state AND finished < :before AND {is_known}
  ORDER BY finished LIMIT :limit
);

-- name: find_old
-- Claims all of whose completed messages were completed long ago: how many, and whether the claim is
-- too old to be asked about.
SELECT number, completed, open = 0 AND closed < :answered FROM jobsync_claim
WHERE queue = :queue AND completed > 0 AND finished < :before AND {is_known}
ORDER BY finished LIMIT :limit;

-- name: delete_claims
-- Delete claims.
DELETE FROM jobsync_claim WHERE number IN (SELECT value FROM json_each(:numbers));

-- name: forget_in_claims
-- Forget the completed messages of claims that still answer settlements.
UPDATE jobsync_claim SET outcomes = replace(outcomes, 'c', 'f'), completed = 0
WHERE number IN (SELECT value FROM json_each(:numbers));

-- name: find_partly_old
-- Claims of which some messages were completed long ago.
SELECT {claim_row} FROM jobsync_claim
WHERE queue = :queue AND completed > 0 AND times IS NOT NULL AND claimed < :before
AND finished >= :before AND {is_known}
LIMIT :limit;

-- name: forget_answers
-- Delete claims without completed messages that were closed long ago. Nobody repeats their settlements
-- any more.
DELETE FROM jobsync_claim WHERE number IN (
  SELECT number FROM jobsync_claim
  WHERE queue = :queue AND completed = 0 AND closed IS NOT NULL AND closed < :answered
  AND {is_known} ORDER BY closed LIMIT :limit
);

-- name: add_groups
-- Add messages to groups; return how many of these are heads.
INSERT INTO jobsync_group AS g (queue, name, heads, added)
SELECT :queue, n.value, min(c.value, :most_heads), min(c.value, :most_heads)
FROM json_each(:names) AS n JOIN json_each(:numbers) AS c ON c.key = n.key WHERE true
ON CONFLICT (queue, name) DO UPDATE
SET added = max(0, min(:most_heads, g.heads + excluded.heads) - g.heads),
  heads = max(g.heads, min(:most_heads, g.heads + excluded.heads))
RETURNING name, added;

-- name: lock_groups
-- Groups of which heads are finished. A transaction that writes is alone: there is nothing to lock.
SELECT name, heads FROM jobsync_group
WHERE queue = :queue AND name IN (SELECT value FROM json_each(:names));

-- name: set_heads
-- Record how many heads groups have.
UPDATE jobsync_group AS g SET heads = n.number
FROM (
  SELECT n.value AS name, c.value AS number
  FROM json_each(:names) AS n JOIN json_each(:numbers) AS c ON c.key = n.key
) AS n
WHERE g.queue = :queue AND g.name = n.name;

-- name: unblock
-- Let the next message of each of these groups be a head; return the groups. A delay counts from when
-- it was pushed.
UPDATE jobsync_message
SET state = {lane} || 'waiting', due = max(due, :now), wakes = CASE
    WHEN boot = :boot AND wakes IS NOT NULL THEN max(wakes, :mono)
    ELSE :mono + {rest} END, boot = :boot
WHERE position IN (
  SELECT (
    SELECT m.position FROM jobsync_message AS m
    WHERE m.queue = :queue AND m.group_name = g.value AND m.state = 'blocked'
    ORDER BY m.position LIMIT 1
  )
  FROM json_each(:names) AS g
) RETURNING group_name;

-- name: remove_groups
-- Remove groups without messages.
DELETE FROM jobsync_group
WHERE queue = :queue AND name IN (SELECT value FROM json_each(:names)) RETURNING 1;

-- name: insert_placed
-- Add messages in order, each in its state.
INSERT INTO jobsync_message (
  queue, enqueued, id, state, due, delay, boot, wakes, payload, max_attempts, timeout, task, format,
  priority, group_name
)
SELECT :queue, :now, json_extract(value, '$[0]'), json_extract(value, '$[1]'),
  :now + json_extract(value, '$[2]'), json_extract(value, '$[2]'), :boot,
  :mono + json_extract(value, '$[2]'), json_extract(value, '$[3]'), json_extract(value, '$[4]'),
  json_extract(value, '$[5]'), json_extract(value, '$[6]'), json_extract(value, '$[7]'),
  json_extract(value, '$[8]'), json_extract(value, '$[9]')
FROM json_each(:rows) ORDER BY key;

-- name: hold_keys
-- Hold keys for new messages, unless others hold them; return who holds each, and until when. (`IS NOT
-- NULL` is always true there, at least in SQLite 3.40.)
INSERT INTO jobsync_key AS k (queue, key, id, held_until)
SELECT :queue, json_extract(value, '$[0]'), json_extract(value, '$[1]'),
  :now + json_extract(value, '$[2]')
FROM json_each(:holders) WHERE true
ON CONFLICT (queue, key) DO UPDATE
SET id = CASE WHEN k.held_until <= :now THEN excluded.id ELSE k.id END,
  held_until = CASE WHEN k.held_until <= :now THEN excluded.held_until ELSE k.held_until END
RETURNING key, id, held_until;

-- name: take_keys
-- Hold keys for other messages than before.
INSERT INTO jobsync_key (queue, key, id, held_until)
SELECT :queue, json_extract(value, '$[0]'), json_extract(value, '$[1]'),
  :now + json_extract(value, '$[2]')
FROM json_each(:holders) WHERE true
ON CONFLICT (queue, key) DO UPDATE SET id = excluded.id, held_until = excluded.held_until;

-- name: find_holders
-- Who holds these keys.
SELECT key, id FROM jobsync_key
WHERE queue = :queue AND key IN (SELECT value FROM json_each(:keys));

-- name: find_pending
-- The messages of these that are not finished.
SELECT id FROM jobsync_message WHERE id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT {item_id} FROM {in_claim}
WHERE c.number IN ({numbers}) AND c.open > 0 AND {outcome} = 'o'
AND {item_id} IN (SELECT value FROM json_each(:ids));

-- name: replace
-- Replace a message that nobody has claimed. Attempts with the content before count as returned.
UPDATE jobsync_message
SET payload = :payload, max_attempts = :max_attempts, returned = deliveries, timeout = :timeout,
  due = :due, boot = :boot, wakes = :wakes, delay = :delay, task = :task,
  format = max(format, :format),
  state = CASE state WHEN 'blocked' THEN 'blocked' ELSE :lane || 'waiting' END
WHERE id = :holder AND {is_known} RETURNING 1;

-- name: see_keys
-- Keys after a key, and whether somebody may hold each: of a claim of several messages, some may be
-- completed.
SELECT key, CASE WHEN held_until IS NOT NULL THEN held_until > :now ELSE EXISTS (
    SELECT 1 FROM jobsync_message AS m WHERE m.id = k.id
  ) OR EXISTS (
    SELECT 1 FROM jobsync_claim AS c WHERE c.open > 0 AND c.low = c.high AND c.low = k.id
  ) OR EXISTS (
    SELECT 1 FROM jobsync_claim AS c
    WHERE c.open > 0 AND c.low < c.high AND c.high >= k.id AND c.low <= k.id
  ) END
FROM jobsync_key AS k WHERE queue = :queue AND key > :after ORDER BY key LIMIT :limit;

-- name: delete_keys
-- Remove keys.
DELETE FROM jobsync_key WHERE queue = :queue AND key IN (SELECT value FROM json_each(:keys));

-- name: lock_limit
-- Begin to count the rate of a queue. A transaction that writes is alone: there is nothing to lock.
INSERT INTO jobsync_limit (queue, tokens, boot, refilled) VALUES (:queue, :burst, :boot, :mono)
ON CONFLICT DO NOTHING;

-- name: read_usage
-- How many messages of a queue are claimed, how many its rate allows to claim now, and whether that
-- grows by itself.
SELECT (SELECT coalesce(sum(open), 0) FROM jobsync_claim WHERE queue = :queue AND open > 0),
  min(:burst, tokens + CASE boot WHEN :boot THEN :rate * max(0, :mono - refilled) ELSE 0 END),
  boot = :boot AND refilled <= :mono
FROM jobsync_limit WHERE queue = :queue;

-- name: use_tokens
-- Record how many more messages the rate allows to claim.
UPDATE jobsync_limit SET tokens = :tokens, boot = :boot, refilled = :mono WHERE queue = :queue;

-- name: read_task_usage
-- Of the tasks that have messages to claim, now or later: how many are claimed, how many the rate
-- allowed when they were counted last, and the seconds since then.
SELECT t.value, (
    SELECT count(*) FROM {in_claim} WHERE c.queue = :queue AND c.open > 0
    AND json_extract({item}, '$[7]') = t.value AND {outcome} = 'o'
  ), l.tokens, CASE l.boot WHEN :boot THEN :mono - l.refilled END
FROM json_each(:names) AS t LEFT JOIN jobsync_limit AS l ON l.queue = :queue || '#' || t.value
WHERE EXISTS (
  SELECT 1 FROM jobsync_message
  WHERE queue = :queue AND state = 'task_ready' AND task = t.value
) OR EXISTS (
  SELECT 1 FROM jobsync_message
  WHERE queue = :queue AND state = 'task_ranked' AND task = t.value
) OR EXISTS (
  SELECT 1 FROM jobsync_message
  WHERE queue = :queue AND state = 'task_waiting' AND task = t.value
);

-- name: use_task_tokens
-- Record how many more messages the rates of tasks allow to claim.
INSERT INTO jobsync_limit (queue, tokens, boot, refilled)
SELECT :queue || '#' || t.value, n.value, :boot, :mono
FROM json_each(:names) AS t JOIN json_each(:numbers) AS n ON n.key = t.key WHERE true
ON CONFLICT (queue) DO UPDATE
SET tokens = excluded.tokens, boot = excluded.boot, refilled = excluded.refilled;

-- name: insert_result
-- Keep what the handler of a completed message returned.
INSERT INTO jobsync_result (id, queue, result, problem, finished)
VALUES (:id, :queue, :result, :problem, :now)
ON CONFLICT (id) DO UPDATE
SET result = excluded.result, problem = excluded.problem, finished = excluded.finished;

-- name: forget_results
-- Delete the results of messages that were completed long ago.
DELETE FROM jobsync_result WHERE id IN (
  SELECT id FROM jobsync_result WHERE queue = :queue AND finished < :before
  ORDER BY finished LIMIT :limit
);

-- name: delete_results
-- Delete all results of a queue.
DELETE FROM jobsync_result WHERE queue = :queue;

-- name: report_progress
-- Store how far a handler is. A late report of an earlier delivery changes nothing.
INSERT INTO jobsync_progress (id, queue, deliveries, progress, note, reported)
VALUES (:id, :queue, :deliveries, :progress, :note, :now)
ON CONFLICT (id) DO UPDATE
SET deliveries = excluded.deliveries, progress = excluded.progress, note = excluded.note,
  reported = excluded.reported
WHERE deliveries <= excluded.deliveries;

-- name: clear_progress
-- Delete what was reported about messages.
DELETE FROM jobsync_progress WHERE id IN (SELECT value FROM json_each(:ids));

-- name: forget_progress
-- Delete what was reported long ago: its process has died since.
DELETE FROM jobsync_progress WHERE queue = :queue AND reported < :before;

-- name: read_waiting
-- The counters and the errors of a message that is not claimed.
SELECT deliveries, returned, CAST(errors AS BLOB) FROM jobsync_message
WHERE id = :id AND queue = :queue AND {is_known};

-- name: cancel_waiting
-- Record that a message which is not claimed was cancelled.
INSERT INTO jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, trail, errors,
  enqueued, finished, format, task, priority, group_name
)
SELECT id, queue, 'cancelled', payload, deliveries, returned, max_attempts, timeout, '', '', :errors,
  enqueued, :now, format, task, priority, group_name
FROM jobsync_message WHERE id = :id
ON CONFLICT DO NOTHING;

-- name: delete_waiting
-- Delete a message that is not claimed.
DELETE FROM jobsync_message WHERE id = :id AND queue = :queue AND {is_known}
RETURNING CASE WHEN state <> 'blocked' THEN group_name END;

-- name: delete_finished_message
-- Delete a dead letter or a cancelled message.
DELETE FROM jobsync_finished WHERE id = :id AND queue = :queue AND {is_known};

-- name: find_claims
-- The claims of a queue that may have one of these ids, open or with completed messages.
SELECT {claim_row} FROM jobsync_claim
WHERE number IN ({numbers}) AND queue = :queue AND (open > 0 OR completed > 0) AND {is_known};

-- name: delete_result
-- Delete the result of a message.
DELETE FROM jobsync_result WHERE id = :id AND queue = :queue;

-- name: run_now
-- End the delay of a message.
UPDATE jobsync_message SET due = :now, boot = :boot, wakes = :mono, delay = 0
WHERE id = :id AND queue = :queue AND state IN ('waiting', 'task_waiting')
AND (boot <> :boot OR wakes IS NULL OR wakes > :mono) AND {is_known};
