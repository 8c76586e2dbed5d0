"""The SQL face of a fleet on SQLite: the views of PostgreSQL, each in its table's file.

Records are in one file, sessions and roles in the other; a view sees its own file alone. So
each file has the views of what it holds, and a connection of this library, which opens both,
adds one of its own that joins them: `node`, with heartbeats. Times of heartbeats are counted
from the machine's start, which is known to such a connection and to no other program.

Instants are text in UTC, dates are text; SQLite knows no others. DELETE means what it means on
PostgreSQL.
"""

from jobsync.jobs.job_keys import JobKeys
from jobsync.jobs.sql_views.relations import (
    FACE_VERSION,
    MARK,
    Relation,
    find_version,
)
from jobsync.stores.contract import TRAIL_LENGTH
from jobsync.stores.sqlite.user_connection import SqliteConnection

__all__ = ["install", "join_files", "views_sql"]

_INSTANT = "strftime('%Y-%m-%d %H:%M:%f', {seconds}, 'unixepoch')"
_BELOW = """
jobsync_record.key > '{place}/{fleet}/' AND jobsync_record.key < '{place}/{fleet}0'
AND jobsync_record.value IS NOT NULL
""".strip()


def _instant(seconds: str) -> str:
    return _INSTANT.replace("{seconds}", seconds)


def _below(place: str) -> str:
    return _BELOW.replace("{place}", place)


_NODE = f"""
CREATE VIEW {{app}}node AS -- {{mark}}
SELECT value ->> 'name' AS name, {_instant("value ->> 'created'")} AS created_on,
  value ->> 'stage' AS stage, value ->> 'is_observer' AS is_observer, value ->> 'host' AS host,
  value ->> 'pid' AS pid, value ->> 'incarnation' AS incarnation,
  value ->> 'applied' AS token_version
FROM jobsync_record WHERE {_below("node")} AND value ->> 'stage' <> 'left'
"""

_TOKEN = """
CREATE VIEW {app}token AS -- {mark}
WITH RECURSIVE plan AS MATERIALIZED (
  SELECT value AS plan FROM jobsync_record
  WHERE key = 'assignment/{fleet}' AND value IS NOT NULL
), holders AS MATERIALIZED (
  SELECT h.key AS place, h.value AS holder FROM plan, json_each(plan, '$.holders') AS h
), nodes AS MATERIALIZED (
  SELECT n.key + 1 AS place, n.value ->> 'name' AS name FROM plan, json_each(plan, '$.nodes') AS n
), runs AS MATERIALIZED (
  SELECT s.value AS start, h.holder,
    coalesce(lead(s.value) OVER (ORDER BY s.key), plan ->> 'total') AS stop
  FROM plan, json_each(plan, '$.starts') AS s JOIN holders AS h ON h.place = s.key
), tokens (token, stop, holder) AS (
  SELECT start, stop, holder FROM runs WHERE holder > 0
  UNION ALL SELECT token + 1, stop, holder FROM tokens WHERE token + 1 < stop
), begun AS MATERIALIZED (
  SELECT m.key AS move, s.key AS place, s.value AS start
  FROM plan, json_each(plan, '$.moves') AS m, json_each(m.value, '$.starts') AS s
), counted AS MATERIALIZED (
  SELECT m.key AS move, c.key AS place, c.value AS count
  FROM plan, json_each(plan, '$.moves') AS m, json_each(m.value, '$.counts') AS c
), moves (token, left) AS (
  SELECT start, count FROM begun JOIN counted USING (move, place)
  UNION ALL SELECT token + 1, left - 1 FROM moves WHERE left > 1
)
SELECT token AS token_id, name AS node, (SELECT plan ->> 'number' FROM plan) AS version
FROM tokens JOIN nodes ON nodes.place = tokens.holder
WHERE token NOT IN (SELECT token FROM moves)
"""

# LIKE takes no notice of case here; GLOB does. A pattern of one is made into one of the
# other, with what is escaped put aside meanwhile.
_steps = (
    (r"'\\'", "char(1)"),
    (r"'\%'", "char(2)"),
    (r"'\_'", "char(3)"),
    (r"'\'", "''"),
    ("'['", "'[[]'"),
    ("'*'", "'[*]'"),
    ("'?'", "'[?]'"),
    ("'%'", "'*'"),
    ("'_'", "'?'"),
    ("char(1)", r"'\'"),
    ("char(2)", "'%'"),
    ("char(3)", "'_'"),
)


def _glob(pattern: str) -> str:
    for old, new in _steps:
        pattern = f"replace({pattern}, {old}, {new})"
    return pattern


_LOCK = f"""
CREATE VIEW {{app}}lock AS -- {{mark}}
WITH plan AS MATERIALIZED (
  SELECT value AS plan FROM jobsync_record
  WHERE key = 'assignment/{{fleet}}' AND value IS NOT NULL
), members AS MATERIALIZED (
  SELECT n.value ->> 'name' AS name FROM plan, json_each(plan, '$.nodes') AS n
), patterns AS MATERIALIZED (
  SELECT DISTINCT p.value AS pattern, {_glob("p.value")} AS glob
  FROM jobsync_record, json_each(jobsync_record.value, '$.batches') AS b,
    json_each(b.value, '$.patterns') AS p
  WHERE {_below("pin")}
), matched AS MATERIALIZED (
  SELECT pattern, glob, EXISTS (SELECT 1 FROM members WHERE name GLOB glob) AS matches
  FROM patterns
), batches AS MATERIALIZED (
  SELECT row_number() OVER () AS number, b.value AS batch,
    jobsync_record.value ->> 'created_by' AS created_by, coalesce((
      SELECT p.value FROM json_each(b.value, '$.patterns') AS p JOIN matched ON pattern = p.value
      WHERE matches ORDER BY p.key LIMIT 1
    ), b.value ->> '$.patterns[0]') AS pattern
  FROM jobsync_record, json_each(jobsync_record.value, '$.batches') AS b
  WHERE {_below("pin")}
), exceptions AS MATERIALIZED (
  SELECT r.value AS exceptions FROM (
    SELECT 'exceptions/{{fleet}}/' || (plan ->> 'exceptions') AS first FROM plan
    WHERE plan ->> 'exceptions' <> ''
  ) JOIN jobsync_record AS r
  ON r.value IS NOT NULL AND (r.key = first OR (r.key > first || '.' AND r.key < first || '/'))
), places AS MATERIALIZED (
  SELECT n.key + 1 AS place, n.value ->> 'name' AS name
  FROM (SELECT exceptions FROM exceptions LIMIT 1), json_each(exceptions, '$.nodes') AS n
), apart AS MATERIALIZED (
  SELECT e.value ->> 0 AS task, e.value ->> 1 AS token,
    CASE WHEN e.value ->> 4 = 0 THEN (SELECT name FROM places WHERE place = e.value ->> 2) END
      AS node
  FROM exceptions, json_each(exceptions, '$.tasks') AS e
), held AS MATERIALIZED (
  SELECT token_id, node FROM {{app}}token
), said AS MATERIALIZED (
  -- Without the batch itself, which would be copied for each of its tasks.
  SELECT number, created_by, pattern, batch -> '$.patterns' AS patterns,
    batch ->> 'reason' AS reason, batch ->> 'created_at' AS created_at,
    batch ->> 'expires_at' AS expires_at
  FROM batches
), tasks AS MATERIALIZED (
  SELECT number, t.key AS place, t.value AS task FROM batches, json_each(batch, '$.tasks') AS t
), tokens AS MATERIALIZED (
  SELECT number, t.key AS place, t.value AS token FROM batches, json_each(batch, '$.tokens') AS t
), pins AS MATERIALIZED (
  SELECT said.*, task, token
  FROM tasks JOIN tokens USING (number, place) JOIN said USING (number)
), owned AS (
  SELECT pins.*, apart.task IS NOT NULL AS is_apart,
    CASE WHEN apart.task IS NULL THEN held.node ELSE apart.node END AS node
  FROM pins LEFT JOIN apart ON apart.task = pins.task LEFT JOIN held ON held.token_id = pins.token
), judged AS (
  SELECT owned.*, coalesce(node GLOB glob, 0) AS fits,
    max(coalesce(node GLOB glob, 0)) OVER (PARTITION BY task) AS served
  FROM owned JOIN matched ON matched.pattern = owned.pattern
)
SELECT CASE WHEN NOT is_apart AND (fits OR NOT served) THEN token END AS token_id,
  task AS task_id, pattern AS node_pattern, patterns AS node_patterns, reason,
  {_instant("created_at")} AS created_at, created_by, {_instant("expires_at")} AS expires_at,
  node, token AS task_token
FROM judged
"""

_REBALANCE = f"""
CREATE VIEW {{app}}rebalance AS -- {{mark}}
SELECT id, {_instant("substr(id, 1, 13) / 1000.0")} AS triggered_at,
  value ->> 'trigger_reason' AS trigger_reason, value ->> 'leader_node' AS leader_node,
  value ->> 'nodes_before' AS nodes_before, value ->> 'nodes_after' AS nodes_after,
  value ->> 'tokens_moved' AS tokens_moved, value ->> 'duration_ms' AS duration_ms
FROM jobsync_entry WHERE stream = 'history/{{fleet}}/rebalance'
"""

# What is done under another date than the day it was begun on is in the audit of its date
# alone: the guide joins a day's claims with that day's audit, and would call it incomplete.
_CLAIM = f"""
CREATE VIEW {{app}}claim AS -- {{mark}}
SELECT value ->> 'node' AS node, value ->> 'task' AS item, value ->> 'task' AS task_id,
  {_instant("value ->> 'started'")} AS created_on, value ->> 'date' AS date,
  value ->> 'state' AS state, value ->> 'run' AS run, value ->> 'token' AS token_id,
  value ->> 'owner' AS incarnation
FROM jobsync_record WHERE {_below("claim")} AND NOT (
  value ->> 'state' = 'done'
  AND value ->> 'date' <> date(value ->> 'started', 'unixepoch', 'localtime')
)
"""

_AUDIT = f"""
CREATE VIEW {{app}}audit AS -- {{mark}}
SELECT {_instant("value ->> 'ended'")} AS created_on, value ->> 'node' AS node,
  value ->> 'task' AS item, value ->> 'task' AS task_id, value ->> 'date' AS date,
  value ->> 'run' AS run, {_instant("value ->> 'started'")} AS started_on
FROM jobsync_record WHERE {_below("claim")} AND value ->> 'state' = 'done'
"""

_UNFINISHED = """
CREATE VIEW {app}unfinished AS -- {mark}
SELECT claim.* FROM {app}claim AS claim WHERE state <> 'done' AND NOT EXISTS (
  SELECT 1 FROM {app}audit AS audit
  WHERE audit.item = claim.item AND audit.created_on > claim.created_on
)
"""

_MESSAGE = f"""
CREATE VIEW {{app}}message AS -- {{mark}}
SELECT queue, id, state, deliveries - returned AS attempts, max_attempts,
  CASE state WHEN 'claimed' THEN session END AS incarnation, {_instant("enqueued")} AS enqueued_on,
  CASE state WHEN 'waiting' THEN {_instant("due")} END AS due_on,
  CASE state WHEN 'claimed' THEN {_instant("claimed")} END AS claimed_on,
  NULL AS finished_on, errors, payload
FROM jobsync_message
UNION ALL
SELECT queue, id, state, deliveries - returned, max_attempts, session, {_instant("enqueued")},
  NULL, NULL, {_instant("finished")}, errors, payload
FROM jobsync_finished
"""

VIEWS = {
    "node": _NODE,
    "token": _TOKEN,
    "lock": _LOCK,
    "rebalance": _REBALANCE,
    "claim": _CLAIM,
    "audit": _AUDIT,
    "unfinished": _UNFINISHED,
    "message": _MESSAGE,
}
"""In the main file; each after those that it looks into."""

# How the library writes: a new version with a mark of its own.
_WRITE = "seq = seq + 1, trail = substr(lower(hex(randomblob(6))) || ' ' || trail, 1, {trail})"

_DELETE_NODE = f"""
CREATE {{temporary}} TRIGGER {{app}}delete_node INSTEAD OF DELETE ON {{app}}node BEGIN
  UPDATE jobsync_record SET value = NULL, {_WRITE}
  WHERE {_below("node")} AND value ->> 'incarnation' = OLD.incarnation;
END
"""
# Any write makes the leader look.
_DELETE_TOKEN = f"""
CREATE TRIGGER {{app}}delete_token INSTEAD OF DELETE ON {{app}}token BEGIN
  INSERT INTO jobsync_record (key, value, seq, epoch, format, trail, boot, written)
  VALUES ('ask/{{fleet}}', '{{"for":"reassignment"}}', 1, 0, 1, lower(hex(randomblob(6))), 0, 0)
  ON CONFLICT DO UPDATE SET {_WRITE};
END
"""
_DELETE_REBALANCE = """
CREATE TRIGGER {app}delete_rebalance INSTEAD OF DELETE ON {app}rebalance BEGIN
  DELETE FROM jobsync_entry WHERE stream = 'history/{fleet}/rebalance' AND id = OLD.id;
END
"""
_PLACE = """
SELECT '$.batches[' || b.key || '].{list}[' || t.key || ']'
FROM json_each(jobsync_record.value, '$.batches') AS b, json_each(b.value, '$.tasks') AS t
WHERE b.value -> '$.patterns' = OLD.node_patterns AND t.value = OLD.task_id LIMIT 1
"""
_DELETE_LOCK = f"""
CREATE TRIGGER {{app}}delete_lock INSTEAD OF DELETE ON {{app}}lock BEGIN
  UPDATE jobsync_record SET value = coalesce(json_remove(
    value, ({_PLACE.replace("{list}", "tokens")}), ({_PLACE.replace("{list}", "tasks")})
  ), value), {_WRITE}
  WHERE {_below("pin")} AND value ->> 'created_by' = OLD.created_by;
END
"""
_TRIGGERS = {
    "node": _DELETE_NODE,
    "token": _DELETE_TOKEN,
    "rebalance": _DELETE_REBALANCE,
    "lock": _DELETE_LOCK,
}

# Seconds since the machine's start, and which start that was, are all that a session tells.
_SESSION = """
CREATE VIEW {app}session AS -- {mark}
SELECT substr(key, 9) AS incarnation, value ->> 'worker' AS worker_id, value ->> 'state' AS state,
  value ->> 'beat' AS beat, value ->> '$.timing.timeout' AS timeout, boot, written
FROM jobsync_record WHERE key > 'session/' AND key < 'session0' AND value IS NOT NULL
"""
_LEADER = f"""
CREATE VIEW {{app}}leader AS -- {{mark}}
SELECT value ->> 'owner' AS incarnation, value ->> 'epoch' AS epoch,
  {_instant("value ->> 'since'")} AS since, {_instant("value ->> 'until'")} AS until
FROM jobsync_record WHERE key = 'role/{{fleet}}/jobs' AND value ->> 'owner' IS NOT NULL
"""
_VIEWS_OF_SESSIONS = {"session": _SESSION, "leader": _LEADER}

_FILES = {"main": VIEWS, "sessions": _VIEWS_OF_SESSIONS}

# `jobsync_instant` is a function of the connections that have this view.
_JOINED_NODE = f"""
CREATE TEMPORARY VIEW {{app}}node AS
WITH nodes AS (
  SELECT n.*, s.timeout, coalesce(s.state = 'live', 0) AS lives,
    jobsync_instant(s.boot, s.written) AS heard, l.incarnation IS NOT NULL AS leads
  FROM main.{{app}}node AS n
  LEFT JOIN sessions.{{app}}session AS s ON s.incarnation = n.incarnation
  LEFT JOIN sessions.{{app}}leader AS l ON l.incarnation = n.incarnation
), ordered AS (
  SELECT *, lives AND leads AS is_leader,
    min(created_on) FILTER (WHERE lives AND NOT leads) OVER () AS eldest
  FROM nodes
)
SELECT
  name,
  -- Whoever leads is shown as the eldest: that is how the guide finds the leader.
  CASE WHEN is_leader AND eldest <= created_on
    THEN strftime('%Y-%m-%d %H:%M:%f', eldest, '-0.001 seconds') ELSE created_on END AS created_on,
  -- A death is written when a node was silent for the timeout.
  coalesce({_instant("CASE WHEN lives THEN heard ELSE heard - timeout END")}, created_on)
    AS last_heartbeat,
  CASE WHEN lives AND heard > (julianday('now') - 2440587.5) * 86400 - timeout
    THEN 'ACTIVE' ELSE 'DEAD' END AS status,
  stage, is_leader, is_observer, host, pid, incarnation, token_version
FROM ordered
"""
_JOINED_LEADER = """
CREATE TEMPORARY VIEW {app}leader AS
SELECT n.name AS node, l.* FROM {app}node AS n
JOIN sessions.{app}leader AS l ON l.incarnation = n.incarnation WHERE n.is_leader
"""


def install(connection: SqliteConnection, places: JobKeys) -> None:
    """Make the views of a fleet in both files, or bring them up to date, if that is not done.

    Raises:
        Misconfigured: somebody else has a relation of one of these names.
        sqlite3.Error: SQLite refuses it.
    """
    if _version(connection, places) >= FACE_VERSION:
        return
    with connection.transaction():
        if _version(connection, places) < FACE_VERSION:
            for file, views in _FILES.items():
                for view in reversed(views):
                    connection.execute(f"DROP VIEW IF EXISTS {file}.{places.name}{view}")
                for text in views.values():
                    connection.execute(_fill(text.replace(" VIEW ", f" VIEW {file}."), places))
            for text in _TRIGGERS.values():
                connection.execute(_fill(text, places))


def _version(connection: SqliteConnection, places: JobKeys) -> int:
    return min(
        find_version(_find(connection, file, places), views, places)
        for file, views in _FILES.items()
    )


def _find(connection: SqliteConnection, file: str, places: JobKeys) -> list[Relation]:
    rows = connection.execute(
        f"SELECT name, sql FROM {file}.sqlite_master WHERE type IN ('table', 'view')"
        " AND substr(name, 1, length(%s)) = %s",
        [places.name, places.name],
    )
    return [Relation(name, _read_mark(text or "")) for name, text in rows]


def _read_mark(text: str) -> str:
    """Give what stands behind the first line of a view."""
    return text.partition(" AS -- ")[2].partition("\n")[0]


def join_files(connection: SqliteConnection, places: JobKeys) -> None:
    """Make the views that join what is in both files, for one connection."""
    trigger = _DELETE_NODE.replace("{temporary}", "TEMPORARY")
    for text in (_JOINED_NODE, _JOINED_LEADER, trigger):
        connection.execute(_fill(text, places))


def views_sql(places: JobKeys) -> str:
    """Give the SQL of the main file's views."""
    texts = (*VIEWS.values(), *_TRIGGERS.values())
    return "".join(f"{_fill(text, places)};\n" for text in texts)


def _fill(text: str, places: JobKeys) -> str:
    known = {
        "{mark}": MARK,
        "{app}": places.name,
        "{fleet}": places.segment,
        "{trail}": str(TRAIL_LENGTH * 13 - 1),
        "{temporary}": "",
    }
    for name, value in known.items():
        text = text.replace(name, value)
    return text.strip()
