"""The statements on messages in one PostgreSQL schema. Each is one transaction, for a batch.

Whoever claims leaves out what others hold a lock on, and never waits. It need not look below
`floor`, the lowest position that was ready, nor before `since`, when all that was due had
been taken: behind those, an index has nothing but entries of rows that are gone, which stay
as long as the oldest transaction of the whole server lasts.
"""

from typing import Self

import msgspec

__all__ = ["MessageStatements"]

_OPEN = "NOT EXISTS (SELECT 1 FROM {schema}.jobsync_pause WHERE queue = %(queue)s)"
"""Asked once in a statement: while a queue is paused, nothing of it is claimed."""

_NOW = "(SELECT clock_timestamp())"
"""Asked once in a statement, so that an index can be used."""

_PUSH = """
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
"""
# One message alone, in a form that is planned once for all.
_PUSH_ONE = """
INSERT INTO {schema}.jobsync_message (queue, id, state, due, payload, max_attempts, timeout)
VALUES (
  %(queue)s, %(id)s, CASE WHEN %(delay)s > 0 THEN 'waiting' ELSE 'ready' END,
  clock_timestamp() + %(delay)s * interval '1 second', %(payload)s, %(max_attempts)s, %(timeout)s
) RETURNING 1
"""
_QUIETLY = "SELECT count(*) FROM done"
_LOUDLY = "SELECT pg_notify(%(channel)s, %(topic)s) FROM done LIMIT 1"
# Of a push that is one transaction, one message tells of all.
_PUSHED = """
SELECT EXISTS (SELECT 1 FROM {schema}.jobsync_message WHERE id = ANY (%(ids)s::text[]))
    OR EXISTS (SELECT 1 FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[]))
"""

_MESSAGE = """
id, payload, deliveries, returned, max_attempts, timeout, suspect,
extract(epoch FROM enqueued)::float8
"""
_CLAIM = """
WITH late AS MATERIALIZED (
  SELECT ctid AS place FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'waiting' AND suspect = %(suspects)s AND due <= {now}
  AND due >= {now} - %(since)s * interval '1 second' AND {open}
  ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), fresh AS MATERIALIZED (
  SELECT ctid AS place, position FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'ready' AND position >= %(floor)s AND NOT %(suspects)s
  AND {open}
  ORDER BY position LIMIT (SELECT %(limit)s - count(*) FROM late) FOR UPDATE SKIP LOCKED
), taken AS (
  UPDATE {schema}.jobsync_message
  SET state = 'claimed', deliveries = deliveries + 1, claim = %(claim)s, session = %(session)s,
    due = clock_timestamp() + %(visibility)s * interval '1 second', claimed = clock_timestamp()
  -- They are locked: nobody moves them meanwhile.
  WHERE ctid = ANY (ARRAY (SELECT place FROM late UNION ALL SELECT place FROM fresh))
  RETURNING position, {message}
), rest AS (
  SELECT (SELECT min(position) FROM fresh) AS lowest,
    EXISTS (
      SELECT 1 FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'waiting' AND suspect AND due <= {now}
      AND due >= {now} - %(since)s * interval '1 second' AND {open}
    ) AS suspects,
    extract(epoch FROM least(
      (SELECT due FROM {schema}.jobsync_message
       WHERE queue = %(queue)s AND state = 'waiting' AND NOT suspect AND due > {now}
       ORDER BY due LIMIT 1),
      (SELECT due FROM {schema}.jobsync_message
       WHERE queue = %(queue)s AND state = 'waiting' AND suspect AND due > {now}
       ORDER BY due LIMIT 1)
    ) - clock_timestamp())::float8 AS due,
    extract(epoch FROM (
      SELECT due FROM {schema}.jobsync_message
      WHERE queue = %(queue)s AND state = 'claimed'
      AND due >= {now} - %(since)s * interval '1 second'
      ORDER BY due LIMIT 1
    ) - clock_timestamp())::float8 AS lapse
)
SELECT rest.*, taken.* FROM rest LEFT JOIN taken ON true ORDER BY taken.position
"""
_CLAIMED = """
SELECT position, {message} FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND state = 'claimed' AND claim = %(claim)s ORDER BY position
"""

# How a message leaves for the table of what is finished.
_FINISH = """
INSERT INTO {schema}.jobsync_finished (
  id, queue, state, payload, deliveries, returned, max_attempts, timeout, session, trail, errors,
  enqueued, format
)
SELECT id, queue, target, CASE WHEN target <> 'completed' THEN payload END, deliveries, returned,
  max_attempts, timeout, session, left(concat_ws(' ', mark, trail), 120),
  errors || coalesce(line, ''), enqueued, format
FROM gone
"""
_LINE = """
CASE WHEN {error} IS NOT NULL THEN json_build_object(
  'attempt', m.deliveries - m.returned, 'error', {error}::json,
  'at', extract(epoch FROM clock_timestamp())::float8, 'session', m.session
)::text || E'\\n' END
"""
_SETTLE = """
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
  RETURNING m.*, g.target, g.mark, {line} AS line
), kept AS (
  {finish}
), put AS (
  UPDATE {schema}.jobsync_message AS m
  SET state = 'waiting', due = clock_timestamp() + g.delay * interval '1 second',
    returned = m.returned + g.back, suspect = false, claim = '', session = '',
    trail = left(concat_ws(' ', g.mark, m.trail), 120), errors = m.errors || coalesce({line}, '')
  FROM locked AS g
  WHERE m.id = g.id AND m.claim = g.claim AND m.state = 'claimed' AND g.target = 'waiting'
  RETURNING m.id
)
SELECT id FROM gone UNION ALL SELECT id FROM put
"""
# Which of these claims have been settled, in these very ways, before.
_SETTLED = """
SELECT g.id FROM unnest(%(ids)s::text[], %(marks)s::text[]) AS g (id, mark)
WHERE EXISTS (
  SELECT 1 FROM {schema}.jobsync_message AS m WHERE m.id = g.id AND strpos(m.trail, g.mark) > 0
) OR EXISTS (
  SELECT 1 FROM {schema}.jobsync_finished AS m WHERE m.id = g.id AND strpos(m.trail, g.mark) > 0
)
"""
_EXTEND = """
UPDATE {schema}.jobsync_message AS m
SET due = greatest(m.due, clock_timestamp() + %(visibility)s * interval '1 second')
FROM unnest(%(ids)s::text[], %(claims)s::text[]) AS g (id, claim)
WHERE m.id = g.id AND m.claim = g.claim AND m.state = 'claimed' RETURNING m.id
"""
_END_CLAIMS = """
WITH ended AS MATERIALIZED (
  SELECT id, session, deliveries - returned AS attempt, suspect,
    suspect AND deliveries - returned >= max_attempts AS spent,
    CASE WHEN suspect THEN %(lapsed)s ELSE %(spared)s END AS error
  FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = 'claimed'
  AND (due <= {now} OR session = ANY (%(dead)s::text[])) AND id <> ALL (%(keep)s::text[])
  ORDER BY due LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_message AS m USING ended AS g
  WHERE m.id = g.id AND g.spent
  RETURNING m.*, 'dead' AS target, NULL AS mark, {line} AS line
), kept AS (
  {finish}
), put AS (
  UPDATE {schema}.jobsync_message AS m
  SET state = 'waiting', due = clock_timestamp(), returned = m.returned + (NOT g.suspect)::integer,
    suspect = true, claim = '', session = '', errors = m.errors || {line}
  FROM ended AS g WHERE m.id = g.id AND NOT g.spent
)
SELECT id, CASE WHEN spent THEN 'dead' ELSE 'waiting' END, attempt, session FROM ended
"""
_HOLDERS = """
SELECT DISTINCT session FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND state = 'claimed' ORDER BY session
"""

_LIVE = """
queue, id, state, payload, deliveries, returned, max_attempts, errors, session, suspect,
extract(epoch FROM enqueued)::float8,
CASE WHEN state <> 'ready' THEN extract(epoch FROM due)::float8 END,
CASE WHEN state = 'claimed' THEN extract(epoch FROM claimed)::float8 END,
NULL::float8, extract(epoch FROM clock_timestamp())::float8, position::text
"""
_FINISHED = """
queue, id, state, payload, deliveries, returned, max_attempts, errors, session, false,
extract(epoch FROM enqueued)::float8, NULL::float8, NULL::float8,
extract(epoch FROM finished)::float8, extract(epoch FROM clock_timestamp())::float8,
extract(epoch FROM finished)::text || ' ' || id
"""
_BROWSE_LIVE = """
SELECT {live} FROM {schema}.jobsync_message AS m
WHERE queue = %(queue)s AND state = %(state)s
AND m.position > coalesce(nullif(%(after)s, ''), '0')::bigint
ORDER BY m.position LIMIT %(limit)s
"""
_BROWSE_FINISHED = """
SELECT {finished} FROM {schema}.jobsync_finished
WHERE queue = %(queue)s AND state = %(state)s
AND (finished, id) > (
  'epoch'::timestamptz
    + coalesce(nullif(split_part(%(after)s, ' ', 1), ''), '0')::numeric * interval '1 second',
  split_part(%(after)s, ' ', 2)
)
ORDER BY finished, id LIMIT %(limit)s
"""
_FIND = """
SELECT {live} FROM {schema}.jobsync_message WHERE id = ANY (%(ids)s::text[])
UNION ALL
SELECT {finished} FROM {schema}.jobsync_finished WHERE id = ANY (%(ids)s::text[])
"""
_LIST_LIVE = """
SELECT {live} FROM {schema}.jobsync_message
WHERE queue = %(queue)s AND id > %(after)s ORDER BY id LIMIT %(limit)s
"""
_LIST_DEAD = """
SELECT {finished} FROM {schema}.jobsync_finished
WHERE queue = %(queue)s AND state = 'dead' AND id > %(after)s ORDER BY id LIMIT %(limit)s
"""
# Of all queues: how many messages are in which state, in whose hands, and how old.
_LOOK = """
SELECT queue, state, session, count(*), extract(epoch FROM min(enqueued))::float8
FROM {schema}.jobsync_message GROUP BY queue, state, session
UNION ALL
SELECT queue, state, '', count(*), extract(epoch FROM min(enqueued))::float8
FROM {schema}.jobsync_finished GROUP BY queue, state
"""
_PAUSES = "SELECT queue, extract(epoch FROM since)::float8, reason FROM {schema}.jobsync_pause"
_PAUSE = """
INSERT INTO {schema}.jobsync_pause (queue, reason) VALUES (%(queue)s, %(reason)s)
ON CONFLICT (queue) DO NOTHING RETURNING 1
"""
_RESUME = "DELETE FROM {schema}.jobsync_pause WHERE queue = %(queue)s RETURNING 1"
_COUNT = """
SELECT state, count(*) FROM {schema}.jobsync_message WHERE queue = %(queue)s GROUP BY state
UNION ALL
SELECT state, count(*) FROM {schema}.jobsync_finished WHERE queue = %(queue)s GROUP BY state
"""
# The attempts so far count as given back. Deliveries only grow.
_REDRIVE = """
WITH chosen AS MATERIALIZED (
  SELECT id FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND payload IS NOT NULL
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
SELECT count(*) FROM done
"""
_PURGE = """
WITH live AS (
  DELETE FROM {schema}.jobsync_message
  WHERE queue = %(queue)s AND state = ANY (%(states)s::text[]) RETURNING 1
), finished AS (
  DELETE FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND state = ANY (%(states)s::text[]) RETURNING 1
)
SELECT (SELECT count(*) FROM live) + (SELECT count(*) FROM finished)
"""
_FORGET = """
WITH old AS MATERIALIZED (
  SELECT id FROM {schema}.jobsync_finished
  WHERE queue = %(queue)s AND state = %(state)s
  AND finished < {now} - %(older_than)s * interval '1 second'
  ORDER BY finished LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {schema}.jobsync_finished AS f USING old WHERE f.id = old.id RETURNING 1
)
SELECT count(*) FROM gone
"""


class MessageStatements(msgspec.Struct, frozen=True, kw_only=True):
    """Every statement by name."""

    push: str
    push_loudly: str
    push_one: str
    push_one_loudly: str
    pushed: str
    claim: str
    claimed: str
    settle: str
    settled: str
    extend: str
    end_claims: str
    holders: str
    browse_live: str
    browse_finished: str
    find: str
    list_live: str
    list_dead: str
    look: str
    pauses: str
    pause: str
    resume: str
    count: str
    redrive: str
    purge: str
    forget: str

    @classmethod
    def within(cls, schema: str) -> Self:
        """Give the statements for a schema, whose name is already quoted."""
        texts = {
            "push": _PUSH + _QUIETLY,
            "push_loudly": _PUSH + _LOUDLY,
            "push_one": _PUSH_ONE,
            "push_one_loudly": f"WITH done AS ({_PUSH_ONE}) {_LOUDLY}",
            "pushed": _PUSHED,
            "claim": _CLAIM,
            "claimed": _CLAIMED,
            "settle": _SETTLE,
            "settled": _SETTLED,
            "extend": _EXTEND,
            "end_claims": _END_CLAIMS,
            "holders": _HOLDERS,
            "browse_live": _BROWSE_LIVE,
            "browse_finished": _BROWSE_FINISHED,
            "find": _FIND,
            "list_live": _LIST_LIVE,
            "list_dead": _LIST_DEAD,
            "look": _LOOK,
            "pauses": _PAUSES,
            "pause": _PAUSE,
            "resume": _RESUME,
            "count": _COUNT,
            "redrive": _REDRIVE,
            "purge": _PURGE,
            "forget": _FORGET,
        }
        parts = {
            "{finish}": _FINISH,
            "{line}": _LINE.replace("{error}", "g.error"),
            "{message}": _MESSAGE,
            "{live}": _LIVE,
            "{finished}": _FINISHED,
            "{open}": _OPEN,
            "{now}": _NOW,
            # A name may hold the sign that marks parameters. Last: it may hold anything.
            "{schema}": schema.replace("%", "%%"),
        }
        return cls(**{name: _fill(text, parts) for name, text in texts.items()})


def _fill(text: str, parts: dict[str, str]) -> str:
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text
