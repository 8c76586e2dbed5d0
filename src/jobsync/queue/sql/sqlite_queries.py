"""The statements on messages in an SQLite file. Those of one batch run in one transaction."""

__all__ = [
    "BROWSE_FINISHED",
    "BROWSE_LIVE",
    "CLAIM",
    "COMPLETE",
    "COUNT",
    "EXTEND",
    "FIND",
    "FIND_LAPSED",
    "FINISH",
    "FORGET",
    "HOLDERS",
    "LATE",
    "LIST_DEAD",
    "LIST_LIVE",
    "LOOK",
    "OUTLOOK",
    "PAUSE",
    "PAUSES",
    "PURGE_FINISHED",
    "PURGE_LIVE",
    "PUSH",
    "PUSHED",
    "PUT_BACK",
    "READY",
    "REDRIVE",
    "REMOVE",
    "REMOVE_COMPLETED",
    "REMOVE_FINISHED",
    "RESUME",
    "SETTLED",
]

PUSH = """
INSERT INTO jobsync_message (queue, id, state, due, payload, max_attempts, timeout, enqueued)
VALUES (:queue, :id, :state, :due, :payload, :max_attempts, :timeout, :now)
"""
# Of a push that is one transaction, one message tells of all.
PUSHED = """
SELECT EXISTS (
  SELECT 1 FROM jobsync_message WHERE id IN (SELECT value FROM json_each(:ids))
) OR EXISTS (
  SELECT 1 FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids))
)
"""

# As bytes: text that is not UTF-8 would fail the whole query, not its own row.
_MESSAGE = """
position, id, CAST(payload AS BLOB), deliveries + 1, returned, max_attempts, timeout, suspect,
enqueued
"""
_OPEN = "NOT EXISTS (SELECT 1 FROM jobsync_pause WHERE queue = :queue)"
LATE = f"""
SELECT {_MESSAGE} FROM jobsync_message
WHERE queue = :queue AND state = 'waiting' AND suspect = :suspects AND due <= :now AND {_OPEN}
ORDER BY due, position LIMIT :limit
"""  # noqa: S608 - this file's own constants
READY = f"""
SELECT {_MESSAGE} FROM jobsync_message
WHERE queue = :queue AND state = 'ready' AND {_OPEN} ORDER BY position LIMIT :limit
"""  # noqa: S608 - likewise
CLAIM = """
UPDATE jobsync_message
SET state = 'claimed', deliveries = deliveries + 1, claim = :claim, session = :session,
  due = :due, boot = :boot, claimed = :now
WHERE position IN (SELECT value FROM json_each(:positions))
"""
# What there is to do, now and later.
OUTLOOK = f"""
SELECT
  {_OPEN} AND (EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = :suspects AND due <= :now
  ) OR (NOT :suspects AND EXISTS (
    SELECT 1 FROM jobsync_message WHERE queue = :queue AND state = 'ready'
  ))),
  {_OPEN} AND EXISTS (
    SELECT 1 FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 1 AND due <= :now
  ),
  (
    SELECT min(due) FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 0 AND due > :now
  ),
  (
    SELECT min(due) FROM jobsync_message
    WHERE queue = :queue AND state = 'waiting' AND suspect = 1 AND due > :now
  ),
  lapses.due, lapses.boot
FROM (SELECT 1) LEFT JOIN (
  SELECT due, boot FROM jobsync_message WHERE queue = :queue AND state = 'claimed'
  ORDER BY due LIMIT 1
) AS lapses
"""  # noqa: S608 - likewise

_LINE = """
CASE WHEN :error IS NOT NULL THEN json_object(
  'attempt', deliveries - returned, 'error', json(:error), 'at', :now, 'session', session
) || char(10) ELSE '' END
"""
FINISH = f"""
INSERT INTO jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, trail, errors,
  enqueued, finished, format
)
SELECT id, queue, :target, CASE WHEN :target <> 'completed' THEN payload END, deliveries, returned,
  max_attempts, timeout, session, substr(trim(:mark || ' ' || trail), 1, 120), errors || {_LINE},
  enqueued, :now, format
FROM jobsync_message WHERE id = :id AND claim = :claim AND state = 'claimed'
"""  # noqa: S608 - likewise
REMOVE = "DELETE FROM jobsync_message WHERE id = :id"
# Many of one claim at once, of what went well: the only end that comes in large numbers.
_OF_CLAIM = "id IN (SELECT value FROM json_each(:ids)) AND claim = :claim AND state = 'claimed'"
COMPLETE = f"""
INSERT INTO jobsync_finished (
  id, queue, state, deliveries, returned, max_attempts, timeout, session, trail, errors, enqueued,
  finished, format
)
SELECT id, queue, 'completed', deliveries, returned, max_attempts, timeout, session,
  substr(trim(:mark || ' ' || trail), 1, 120), errors, enqueued, :now, format
FROM jobsync_message WHERE {_OF_CLAIM}
"""  # noqa: S608 - likewise
REMOVE_COMPLETED = f"DELETE FROM jobsync_message WHERE {_OF_CLAIM}"  # noqa: S608 - likewise
PUT_BACK = f"""
UPDATE jobsync_message
SET state = 'waiting', due = :due, boot = 0, returned = returned + :back, suspect = :suspect,
  claim = '', session = '', trail = substr(trim(:mark || ' ' || trail), 1, 120),
  errors = errors || {_LINE}
WHERE id = :id AND claim = :claim AND state = 'claimed'
"""  # noqa: S608 - likewise
SETTLED = """
SELECT EXISTS (SELECT 1 FROM jobsync_message WHERE id = :id AND instr(trail, :mark))
    OR EXISTS (SELECT 1 FROM jobsync_finished WHERE id = :id AND instr(trail, :mark))
"""
EXTEND = """
UPDATE jobsync_message SET due = CASE WHEN boot = :boot THEN max(due, :due) ELSE :due END,
  boot = :boot
WHERE id = :id AND claim = :claim AND state = 'claimed'
"""
# Who held a claim of an earlier boot is gone with it.
FIND_LAPSED = """
SELECT id, claim, deliveries - returned, max_attempts, suspect, session FROM jobsync_message
WHERE queue = :queue AND state = 'claimed' AND (
  boot <> :boot OR due <= :mono OR session IN (SELECT value FROM json_each(:dead))
) AND id NOT IN (SELECT value FROM json_each(:keep))
ORDER BY due LIMIT :limit
"""
HOLDERS = """
SELECT DISTINCT session FROM jobsync_message
WHERE queue = :queue AND state = 'claimed' ORDER BY session
"""

# What a claim counts from is the boot; people go by the wall clock.
_LIVE = """
queue, id, state, CAST(payload AS BLOB), deliveries, returned, max_attempts, errors, session,
suspect, enqueued,
CASE state WHEN 'waiting' THEN due WHEN 'claimed' THEN
  CASE WHEN boot = :boot THEN :now + due - :mono ELSE :now END
END,
CASE state WHEN 'claimed' THEN claimed END, NULL, :now, CAST(position AS TEXT)
"""
_FINISHED = """
queue, id, state, CAST(payload AS BLOB), deliveries, returned, max_attempts, errors, session,
0, enqueued, NULL, NULL, finished, :now
"""
BROWSE_LIVE = f"""
SELECT {_LIVE} FROM jobsync_message
WHERE queue = :queue AND state = :state AND position > CAST(:after AS INTEGER)
ORDER BY position LIMIT :limit
"""  # noqa: S608 - likewise
BROWSE_FINISHED = f"""
SELECT {_FINISHED}, '' FROM jobsync_finished
WHERE queue = :queue AND state = :state AND (finished, id) > (:since, :after)
ORDER BY finished, id LIMIT :limit
"""  # noqa: S608 - likewise
FIND = f"""
SELECT {_LIVE} FROM jobsync_message WHERE id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT {_FINISHED}, '' FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids))
"""  # noqa: S608 - likewise
LIST_LIVE = f"""
SELECT {_LIVE} FROM jobsync_message
WHERE queue = :queue AND id > :after ORDER BY id LIMIT :limit
"""  # noqa: S608 - likewise
LIST_DEAD = f"""
SELECT {_FINISHED}, '' FROM jobsync_finished
WHERE queue = :queue AND state = 'dead' AND id > :after ORDER BY id LIMIT :limit
"""  # noqa: S608 - likewise
# Of all queues: how many messages are in which state, in whose hands, and how old.
LOOK = """
SELECT queue, state, session, count(*), min(enqueued) FROM jobsync_message
GROUP BY queue, state, session
UNION ALL
SELECT queue, state, '', count(*), min(enqueued) FROM jobsync_finished GROUP BY queue, state
"""
PAUSES = "SELECT queue, since, reason FROM jobsync_pause"
PAUSE = """
INSERT INTO jobsync_pause (queue, since, reason) VALUES (:queue, :now, :reason)
ON CONFLICT (queue) DO NOTHING
"""
RESUME = "DELETE FROM jobsync_pause WHERE queue = :queue"
COUNT = """
SELECT state, count(*) FROM jobsync_message WHERE queue = :queue GROUP BY state
UNION ALL
SELECT state, count(*) FROM jobsync_finished WHERE queue = :queue GROUP BY state
"""
# The attempts so far count as given back. Deliveries only grow.
REDRIVE = """
INSERT INTO jobsync_message (
  id, queue, state, due, payload, deliveries, returned, max_attempts, timeout, trail, errors,
  enqueued, format
)
SELECT id, queue, 'waiting', :now, payload, deliveries, deliveries, max_attempts, timeout, trail,
  errors, enqueued, format
FROM jobsync_finished
WHERE queue = :queue AND payload IS NOT NULL AND (
  id IN (SELECT value FROM json_each(:ids)) OR (:all AND state = 'dead')
)
ORDER BY finished, id LIMIT :limit
RETURNING id
"""
REMOVE_FINISHED = "DELETE FROM jobsync_finished WHERE id IN (SELECT value FROM json_each(:ids))"
PURGE_LIVE = """
DELETE FROM jobsync_message
WHERE queue = :queue AND state IN (SELECT value FROM json_each(:states))
"""
PURGE_FINISHED = """
DELETE FROM jobsync_finished
WHERE queue = :queue AND state IN (SELECT value FROM json_each(:states))
"""
FORGET = """
DELETE FROM jobsync_finished WHERE id IN (
  SELECT id FROM jobsync_finished
  WHERE queue = :queue AND state = :state AND finished < :before ORDER BY finished LIMIT :limit
)
"""
