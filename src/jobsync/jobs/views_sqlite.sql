-- Views of a fleet on SQLite. See sql_views.py.
--
-- {app}        the prefix of the relations' names
-- {fleet}      the fleet's name, as it stands in keys
-- {mark}       the version of the views
-- {trail}      the length of a record's trail
-- {temporary}  TEMPORARY for the trigger of a connection's own view, else empty

-- fragment: is_node
-- Records of nodes.
jobsync_record.key > 'node/{fleet}/' AND jobsync_record.key < 'node/{fleet}0'
AND jobsync_record.value IS NOT NULL

-- fragment: is_pin
-- Records of pins.
jobsync_record.key > 'pin/{fleet}/' AND jobsync_record.key < 'pin/{fleet}0'
AND jobsync_record.value IS NOT NULL

-- fragment: is_claim
-- Records of claims.
jobsync_record.key > 'claim/{fleet}/' AND jobsync_record.key < 'claim/{fleet}0'
AND jobsync_record.value IS NOT NULL

-- fragment: glob
-- The pattern `p.value` of LIKE as a pattern of GLOB: LIKE ignores case here, GLOB does not.
-- Escaped characters are replaced by control characters meanwhile.
replace(replace(replace(replace(replace(replace(replace(
replace(replace(replace(replace(replace(p.value
  , '\\', char(1)), '\%', char(2)), '\_', char(3)), '\', '')
  , '[', '[[]'), '*', '[*]'), '?', '[?]'), '%', '*')
  , '_', '?'), char(1), '\'), char(2), '%'), char(3), '_')

-- fragment: next_version
-- Write a record as the library does: a new version with its own mark.
seq = seq + 1, trail = substr(lower(hex(randomblob(6))) || ' ' || trail, 1, {trail})

-- fragment: token_path
-- Where a pin's token is in its sheet.
SELECT '$.batches[' || b.key || '].tokens[' || t.key || ']'
FROM json_each(jobsync_record.value, '$.batches') AS b, json_each(b.value, '$.tasks') AS t
WHERE b.value -> '$.patterns' = OLD.node_patterns AND t.value = OLD.task_id LIMIT 1

-- fragment: task_path
-- Where a pin's task is in its sheet.
SELECT '$.batches[' || b.key || '].tasks[' || t.key || ']'
FROM json_each(jobsync_record.value, '$.batches') AS b, json_each(b.value, '$.tasks') AS t
WHERE b.value -> '$.patterns' = OLD.node_patterns AND t.value = OLD.task_id LIMIT 1

-- name: node
-- Nodes that have not left. Heartbeats are in the other file; see joined_node.
CREATE VIEW {app}node AS -- {mark}
SELECT value ->> 'name' AS name,
  strftime('%Y-%m-%d %H:%M:%f', value ->> 'created', 'unixepoch') AS created_on,
  value ->> 'stage' AS stage, value ->> 'is_observer' AS is_observer, value ->> 'host' AS host,
  value ->> 'pid' AS pid, value ->> 'incarnation' AS incarnation,
  value ->> 'applied' AS token_version
FROM jobsync_record WHERE {is_node} AND value ->> 'stage' <> 'left';

-- name: token
-- Tokens and their owners. A token that moves from one node to another has no row.
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
WHERE token NOT IN (SELECT token FROM moves);

-- name: lock
-- Pins in force, one row each, with the pattern that counts. The guide compares it with the
-- node that owns `token_id`; so `token_id` is empty where the token does not decide: where the
-- task does not follow its token, and where another pin of the task is satisfied. A pin that
-- several nodes have made ends with the last of them: `expires_at` is the same in their rows.
CREATE VIEW {app}lock AS -- {mark}
WITH plan AS MATERIALIZED (
  SELECT value AS plan FROM jobsync_record
  WHERE key = 'assignment/{fleet}' AND value IS NOT NULL
), members AS MATERIALIZED (
  SELECT n.value ->> 'name' AS name FROM plan, json_each(plan, '$.nodes') AS n
), patterns AS MATERIALIZED (
  SELECT DISTINCT p.value AS pattern, {glob} AS glob
  FROM jobsync_record, json_each(jobsync_record.value, '$.batches') AS b,
    json_each(b.value, '$.patterns') AS p
  WHERE {is_pin}
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
  WHERE {is_pin}
), exceptions AS MATERIALIZED (
  SELECT r.value AS exceptions FROM (
    SELECT 'exceptions/{fleet}/' || (plan ->> 'exceptions') AS first FROM plan
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
  SELECT token_id, node FROM {app}token
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
  strftime('%Y-%m-%d %H:%M:%f', created_at, 'unixepoch') AS created_at, created_by,
  strftime('%Y-%m-%d %H:%M:%f', CASE WHEN count(expires_at) OVER same = count(*) OVER same
    THEN max(expires_at) OVER same END, 'unixepoch') AS expires_at,
  node, token AS task_token
FROM judged WINDOW same AS (PARTITION BY task, patterns, reason);

-- name: rebalance
-- History of rebalances.
CREATE VIEW {app}rebalance AS -- {mark}
SELECT id, strftime('%Y-%m-%d %H:%M:%f', substr(id, 1, 13) / 1000.0, 'unixepoch') AS triggered_at,
  value ->> 'trigger_reason' AS trigger_reason, value ->> 'leader_node' AS leader_node,
  value ->> 'nodes_before' AS nodes_before, value ->> 'nodes_after' AS nodes_after,
  value ->> 'tokens_moved' AS tokens_moved, value ->> 'duration_ms' AS duration_ms
FROM jobsync_entry WHERE stream = 'history/{fleet}/rebalance';

-- name: claim
-- Claims of all dates. A task that is done under another date than the day on which it
-- started is in the audit of its date only: the guide joins a day's claims with that day's audit,
-- and would call it incomplete.
CREATE VIEW {app}claim AS -- {mark}
SELECT value ->> 'node' AS node, value ->> 'task' AS item, value ->> 'task' AS task_id,
  strftime('%Y-%m-%d %H:%M:%f', value ->> 'started', 'unixepoch') AS created_on,
  value ->> 'date' AS date,
  value ->> 'state' AS state, value ->> 'run' AS run, value ->> 'token' AS token_id,
  value ->> 'owner' AS incarnation
FROM jobsync_record WHERE {is_claim} AND NOT (
  value ->> 'state' = 'done'
  AND value ->> 'date' <> date(value ->> 'started', 'unixepoch', 'localtime')
);

-- name: audit
-- Finished tasks.
CREATE VIEW {app}audit AS -- {mark}
SELECT strftime('%Y-%m-%d %H:%M:%f', value ->> 'ended', 'unixepoch') AS created_on,
  value ->> 'node' AS node,
  value ->> 'task' AS item, value ->> 'task' AS task_id, value ->> 'date' AS date,
  value ->> 'run' AS run,
  strftime('%Y-%m-%d %H:%M:%f', value ->> 'started', 'unixepoch') AS started_on
FROM jobsync_record WHERE {is_claim} AND value ->> 'state' = 'done';

-- name: unfinished
-- Claims that are not done, unless the task was done later.
CREATE VIEW {app}unfinished AS -- {mark}
SELECT claim.* FROM {app}claim AS claim WHERE state <> 'done' AND NOT EXISTS (
  SELECT 1 FROM {app}audit AS audit
  WHERE audit.item = claim.item AND audit.created_on > claim.created_on
);

-- name: delete_node
-- Delete a node's record.
CREATE {temporary} TRIGGER {app}delete_node INSTEAD OF DELETE ON {app}node BEGIN
  UPDATE jobsync_record SET value = NULL, {next_version}
  WHERE {is_node} AND value ->> 'incarnation' = OLD.incarnation;
END;

-- name: delete_token
-- Ask the leader to assign the tokens again: any write makes it check.
CREATE TRIGGER {app}delete_token INSTEAD OF DELETE ON {app}token BEGIN
  INSERT INTO jobsync_record (key, value, seq, epoch, format, trail, boot, written)
  VALUES ('ask/{fleet}', '{"for":"reassignment"}', 1, 0, 1, lower(hex(randomblob(6))), 0, 0)
  ON CONFLICT DO UPDATE SET {next_version};
END;

-- name: delete_rebalance
-- Delete a line of the history.
CREATE TRIGGER {app}delete_rebalance INSTEAD OF DELETE ON {app}rebalance BEGIN
  DELETE FROM jobsync_entry WHERE stream = 'history/{fleet}/rebalance' AND id = OLD.id;
END;

-- name: delete_lock
-- Delete a pin.
CREATE TRIGGER {app}delete_lock INSTEAD OF DELETE ON {app}lock BEGIN
  UPDATE jobsync_record SET value = coalesce(json_remove(
    value, ({token_path}), ({task_path})
  ), value), {next_version}
  WHERE {is_pin} AND value ->> 'created_by' = OLD.created_by;
END;

-- name: session
-- Sessions, in the file of sessions. Their times are seconds since the start of the machine
-- (`written`), and which start that was (`boot`).
CREATE VIEW {app}session AS -- {mark}
SELECT substr(key, 9) AS incarnation, value ->> 'worker' AS worker_id, value ->> 'state' AS state,
  value ->> 'beat' AS beat, value ->> '$.timing.timeout' AS timeout, boot, written
FROM jobsync_record WHERE key > 'session/' AND key < 'session0' AND value IS NOT NULL;

-- name: leader
-- The leader's term, in the file of sessions.
CREATE VIEW {app}leader AS -- {mark}
SELECT value ->> 'owner' AS incarnation, value ->> 'epoch' AS epoch,
  strftime('%Y-%m-%d %H:%M:%f', value ->> 'since', 'unixepoch') AS since,
  strftime('%Y-%m-%d %H:%M:%f', value ->> 'until', 'unixepoch') AS until
FROM jobsync_record WHERE key = 'role/{fleet}/jobs' AND value ->> 'owner' IS NOT NULL;

-- name: joined_node
-- Nodes with heartbeats, from both files. `jobsync_instant` is a function of the connections that
-- have this view.
CREATE TEMPORARY VIEW {app}node AS
WITH nodes AS (
  SELECT n.*, s.timeout, coalesce(s.state = 'live', 0) AS lives,
    jobsync_instant(s.boot, s.written) AS heard, l.incarnation IS NOT NULL AS leads
  FROM main.{app}node AS n
  LEFT JOIN sessions.{app}session AS s ON s.incarnation = n.incarnation
  LEFT JOIN sessions.{app}leader AS l ON l.incarnation = n.incarnation
), ordered AS (
  SELECT *, lives AND leads AS is_leader,
    min(created_on) FILTER (WHERE lives AND NOT leads) OVER () AS eldest
  FROM nodes
)
SELECT
  name,
  -- The leader is shown as the oldest node: that is how the guide finds it.
  CASE WHEN is_leader AND eldest <= created_on
    THEN strftime('%Y-%m-%d %H:%M:%f', eldest, '-0.001 seconds') ELSE created_on END AS created_on,
  -- A death is written after a silence of one timeout.
  coalesce(strftime(
    '%Y-%m-%d %H:%M:%f', CASE WHEN lives THEN heard ELSE heard - timeout END, 'unixepoch'
  ), created_on) AS last_heartbeat,
  CASE WHEN lives AND heard > (julianday('now') - 2440587.5) * 86400 - timeout
    THEN 'ACTIVE' ELSE 'DEAD' END AS status,
  stage, is_leader, is_observer, host, pid, incarnation, token_version
FROM ordered;

-- name: joined_leader
-- The leader by name, from both files.
CREATE TEMPORARY VIEW {app}leader AS
SELECT n.name AS node, l.* FROM {app}node AS n
JOIN sessions.{app}leader AS l ON l.incarnation = n.incarnation WHERE n.is_leader;
