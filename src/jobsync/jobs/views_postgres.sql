-- Views of a fleet on PostgreSQL. See sql_views.py.
--
-- {schema}   the schema of the store, quoted
-- {app}      the prefix of the relations' names
-- {fleet}    the fleet's name, as it stands in keys
-- {channel}  the channel of notifications
-- {trail}    the length of a record's trail
-- {most}     the largest number of tokens

-- name: node
-- Nodes that have not left, with heartbeats.
CREATE OR REPLACE VIEW {schema}.{app}node AS
WITH nodes AS (
  SELECT n.*, r.written AS told, s.written AS heard,
    (s.life #>> '{timing,timeout}')::float8 * interval '1 second' AS timeout,
    coalesce(s.life ->> 'state' = 'live', false) AS lives,
    coalesce(n.incarnation = (
      SELECT value::jsonb ->> 'owner' FROM {schema}.jobsync_record WHERE key = 'role/{fleet}/jobs'
    ), false) AS leads
  FROM {schema}.jobsync_record AS r
  CROSS JOIN LATERAL jsonb_to_record(r.value::jsonb) AS n (
    name text, incarnation text, stage text, applied bigint, is_observer boolean,
    created float8, host text, pid integer
  )
  LEFT JOIN LATERAL (
    SELECT written, value::jsonb AS life FROM {schema}.jobsync_record
    WHERE key = 'session/' || n.incarnation AND value IS NOT NULL
  ) AS s ON true
  WHERE r.key > 'node/{fleet}/' AND r.key < 'node/{fleet}0' AND r.value IS NOT NULL
  AND n.stage <> 'left'
), ordered AS (
  SELECT *, lives AND leads AS is_leader, to_timestamp(created) AS joined,
    min(to_timestamp(created)) FILTER (WHERE lives AND NOT leads) OVER () AS eldest
  FROM nodes
)
SELECT
  name,
  -- The leader is shown as the oldest node: that is how the guide finds it.
  CASE WHEN is_leader THEN least(joined, eldest - interval '1 microsecond') ELSE joined END
    AS created_on,
  -- A death is written after a silence of one timeout. A query may see what was written a moment
  -- after it began: then no time has passed since.
  least(
    CASE WHEN lives THEN heard ELSE coalesce(heard - timeout, told) END, statement_timestamp()
  ) AS last_heartbeat,
  CASE WHEN lives AND heard > clock_timestamp() - timeout THEN 'ACTIVE' ELSE 'DEAD' END AS status,
  stage, is_leader, is_observer, host, pid, incarnation, applied AS token_version
FROM ordered;

-- name: leader
-- The leader and its term.
CREATE OR REPLACE VIEW {schema}.{app}leader AS
SELECT n.name AS node, role.owner AS incarnation, role.epoch,
  to_timestamp(role.since) AS since, to_timestamp(role.until) AS until
FROM {schema}.jobsync_record AS r
CROSS JOIN LATERAL jsonb_to_record(r.value::jsonb) AS role (
  owner text, epoch bigint, since float8, until float8
)
JOIN {schema}.{app}node AS n ON n.incarnation = role.owner AND n.is_leader
WHERE r.key = 'role/{fleet}/jobs' AND r.value IS NOT NULL;

-- name: token
-- Tokens and their owners. A token that moves from one node to another has no row.
CREATE OR REPLACE VIEW {schema}.{app}token AS
WITH plan AS MATERIALIZED (
  SELECT value::jsonb AS plan, written FROM {schema}.jobsync_record
  WHERE key = 'assignment/{fleet}' AND value IS NOT NULL
), runs AS (
  SELECT start::integer, holder::integer, written, (plan ->> 'number')::bigint AS number,
    coalesce(lead(start::integer) OVER (ORDER BY place), (plan ->> 'total')::integer) - 1 AS last,
    plan #>> ARRAY['nodes', (holder::integer - 1)::text, 'name'] AS node
  FROM plan, ROWS FROM (
    jsonb_array_elements_text(plan -> 'starts'), jsonb_array_elements_text(plan -> 'holders')
  ) WITH ORDINALITY AS run (start, holder, place)
), moving AS (
  SELECT generate_series(start::integer, start::integer + count::integer - 1) AS token
  FROM plan, jsonb_array_elements(plan -> 'moves') AS move, ROWS FROM (
    jsonb_array_elements_text(move -> 'starts'), jsonb_array_elements_text(move -> 'counts')
  ) AS run (start, count)
  -- The most that there can be: keeps the planner from expecting millions of rows.
  LIMIT {most}
)
SELECT token_id, node, written AS assigned_at, number AS version
FROM runs, generate_series(start, last) AS token_id
WHERE holder > 0 AND NOT EXISTS (SELECT 1 FROM moving WHERE token = token_id);

-- name: lock
-- Pins in force, one row each, with the pattern that counts. The guide compares it with the
-- node that owns `token_id`; so `token_id` is empty where the token does not decide: where the
-- task does not follow its token, and where another pin of the task is satisfied. A pin that
-- several nodes have made ends with the last of them: `expires_at` is the same in their rows.
CREATE OR REPLACE VIEW {schema}.{app}lock AS
WITH plan AS MATERIALIZED (
  SELECT value::jsonb AS plan FROM {schema}.jobsync_record
  WHERE key = 'assignment/{fleet}' AND value IS NOT NULL
), members AS MATERIALIZED (
  SELECT member ->> 'name' AS name FROM plan, jsonb_array_elements(plan -> 'nodes') AS member
), batches AS MATERIALIZED (
  SELECT sheet.created_by, batch.*, coalesce((
    SELECT pattern FROM jsonb_array_elements_text(batch.patterns) WITH ORDINALITY
      AS t (pattern, place)
    WHERE EXISTS (SELECT 1 FROM members WHERE name LIKE pattern) ORDER BY place LIMIT 1
  ), batch.patterns ->> 0) AS pattern
  FROM {schema}.jobsync_record AS r
  CROSS JOIN LATERAL jsonb_to_record(r.value::jsonb) AS sheet (created_by text, batches jsonb)
  CROSS JOIN LATERAL jsonb_to_recordset(sheet.batches) AS batch (
    patterns jsonb, reason text, created_at float8, expires_at float8, tasks jsonb, tokens jsonb
  )
  WHERE r.key > 'pin/{fleet}/' AND r.key < 'pin/{fleet}0' AND r.value IS NOT NULL
), apart AS MATERIALIZED (
  SELECT (exempt ->> 0) COLLATE "C" AS task,
  CASE WHEN exempt ->> 2 <> '0' AND exempt ->> 4 = '0' THEN
    exceptions #>> ARRAY['nodes', ((exempt ->> 2)::integer - 1)::text, 'name']
  END AS node
  FROM (
    SELECT r.value::jsonb AS exceptions
    FROM plan, LATERAL concat('exceptions/{fleet}/', plan ->> 'exceptions') AS first
    JOIN {schema}.jobsync_record AS r
    ON r.value IS NOT NULL AND (r.key = first OR (r.key > first || '.' AND r.key < first || '/'))
    WHERE plan ->> 'exceptions' <> ''
  ) AS found, jsonb_array_elements(exceptions -> 'tasks') AS exempt
), pins AS (
  SELECT batches.*, pinned.task, token::integer AS token, apart.task IS NOT NULL AS is_apart,
    CASE WHEN apart.task IS NULL THEN held.node ELSE apart.node END AS node
  FROM batches CROSS JOIN ROWS FROM (
    jsonb_array_elements_text(tasks), jsonb_array_elements_text(tokens)
  ) AS pinned (task, token)
  LEFT JOIN apart ON apart.task = pinned.task COLLATE "C"
  LEFT JOIN {schema}.{app}token AS held ON held.token_id = token::integer
), judged AS (
  SELECT *, node LIKE pattern AS fits,
    bool_or(node LIKE pattern) OVER (PARTITION BY task COLLATE "C") AS served
  FROM pins
)
SELECT
  CASE WHEN NOT is_apart AND (fits OR served IS NOT TRUE) THEN token END AS token_id,
  task AS task_id, pattern AS node_pattern, patterns AS node_patterns, reason,
  to_timestamp(created_at) AS created_at, created_by,
  to_timestamp(CASE WHEN count(expires_at) OVER same = count(*) OVER same
    THEN max(expires_at) OVER same END) AS expires_at,
  node, token AS task_token
FROM judged WINDOW same AS (PARTITION BY task COLLATE "C", patterns, reason COLLATE "C");

-- name: rebalance
-- History of rebalances.
CREATE OR REPLACE VIEW {schema}.{app}rebalance AS
SELECT e.id, to_timestamp(left(e.id, 13)::bigint / 1000.0) AS triggered_at, line.*
FROM {schema}.jobsync_entry AS e
CROSS JOIN LATERAL jsonb_to_record(e.value::jsonb) AS line (
  trigger_reason text, leader_node text, nodes_before integer, nodes_after integer,
  tokens_moved integer, duration_ms float8
)
WHERE e.stream = 'history/{fleet}/rebalance';

-- name: claim
-- Claims of all dates. A task that is done under another date than the day on which it
-- started is in the audit of its date only: the guide joins a day's claims with that day's audit,
-- and would call it incomplete.
CREATE OR REPLACE VIEW {schema}.{app}claim AS
SELECT node, task AS item, task AS task_id, to_timestamp(started) AS created_on, claim.date,
  state, run, token AS token_id, owner AS incarnation
FROM {schema}.jobsync_record AS r
CROSS JOIN LATERAL jsonb_to_record(r.value::jsonb) AS claim (
  node text, task text, started float8, date date, state text, run integer, token integer,
  owner text
)
WHERE r.key > 'claim/{fleet}/' AND r.key < 'claim/{fleet}0' AND r.value IS NOT NULL
AND NOT (state = 'done' AND claim.date <> to_timestamp(started)::date);

-- name: audit
-- Finished tasks.
CREATE OR REPLACE VIEW {schema}.{app}audit AS
SELECT to_timestamp(ended) AS created_on, node, task AS item, task AS task_id, claim.date, run,
  to_timestamp(started) AS started_on
FROM {schema}.jobsync_record AS r
CROSS JOIN LATERAL jsonb_to_record(r.value::jsonb) AS claim (
  node text, task text, started float8, ended float8, date date, state text, run integer
)
WHERE r.key > 'claim/{fleet}/' AND r.key < 'claim/{fleet}0' AND r.value IS NOT NULL
AND state = 'done';

-- name: unfinished
-- Claims that are not done, unless the task was done later.
CREATE OR REPLACE VIEW {schema}.{app}unfinished AS
SELECT * FROM {schema}.{app}claim AS claim WHERE state <> 'done' AND NOT EXISTS (
  SELECT 1 FROM {schema}.{app}audit AS audit
  WHERE audit.item = claim.item AND audit.created_on > claim.created_on
);

-- name: unpinned
-- Rows that a DELETE on the lock view has collected. They are removed together, because one sheet
-- holds thousands of pins. No other transaction sees them: they are gone when the statement ends.
CREATE TABLE IF NOT EXISTS {schema}.jobsync_unpinned (
  created_by text NOT NULL, task text NOT NULL, patterns jsonb NOT NULL
);

-- name: replace
-- Write a record as the library does: a new version with its own mark, and a notification.
CREATE OR REPLACE FUNCTION {schema}.jobsync_replace(changed text, document text, topic text)
RETURNS void LANGUAGE sql AS $$
  UPDATE {schema}.jobsync_record SET value = document, seq = seq + 1, written = clock_timestamp(),
    trail = left(left(md5(gen_random_uuid()::text), 12) || ' ' || trail, {trail})
  WHERE key = changed;
  SELECT pg_notify('{channel}', topic);
$$;

-- name: delete_node
-- Delete a node's record.
CREATE OR REPLACE FUNCTION {schema}.{app}delete_node() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE gone text;
BEGIN
  SELECT key INTO gone FROM {schema}.jobsync_record
  WHERE key > 'node/{fleet}/' AND key < 'node/{fleet}0'
  AND value::jsonb ->> 'incarnation' = OLD.incarnation FOR UPDATE;
  IF NOT FOUND THEN RETURN NULL; END IF;
  PERFORM {schema}.jobsync_replace(gone, NULL, 'node/{fleet}/');
  -- All nodes check, so that one that is alive finds its record missing.
  PERFORM pg_notify('{channel}', 'assignment/');
  RETURN OLD;
END $$;

-- name: delete_token
-- Ask the leader to assign the tokens again.
CREATE OR REPLACE FUNCTION {schema}.{app}delete_token() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_LEVEL = 'ROW' THEN RETURN OLD; END IF;
  -- A write too, for leaders that receive no notifications and poll for writes.
  INSERT INTO {schema}.jobsync_record (key, value, seq, epoch, format, trail)
  VALUES ('ask/{fleet}', '{"for": "reassignment"}', 1, 0, 1,
    left(md5(gen_random_uuid()::text), 12))
  ON CONFLICT DO NOTHING;
  PERFORM {schema}.jobsync_replace('ask/{fleet}', '{"for": "reassignment"}', 'node/{fleet}/');
  RETURN NULL;
END $$;

-- name: delete_rebalance
-- Delete a line of the history.
CREATE OR REPLACE FUNCTION {schema}.{app}delete_rebalance() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM {schema}.jobsync_entry WHERE stream = 'history/{fleet}/rebalance' AND id = OLD.id;
  RETURN OLD;
END $$;

-- name: delete_lock
-- Delete pins: collect the rows, then edit each sheet once.
CREATE OR REPLACE FUNCTION {schema}.{app}delete_lock() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE sheet record; kept jsonb;
BEGIN
  IF TG_LEVEL = 'ROW' THEN
    INSERT INTO {schema}.jobsync_unpinned VALUES (OLD.created_by, OLD.task_id, OLD.node_patterns);
    RETURN OLD;
  END IF;
  FOR sheet IN
    SELECT key, value::jsonb AS pins FROM {schema}.jobsync_record
    WHERE key > 'pin/{fleet}/' AND key < 'pin/{fleet}0'
    AND value::jsonb ->> 'created_by' IN (SELECT created_by FROM {schema}.jobsync_unpinned)
    ORDER BY key FOR UPDATE
  LOOP
    SELECT jsonb_agg(
      jsonb_set(jsonb_set(batch, '{tasks}', tasks), '{tokens}', tokens) ORDER BY place
    ) INTO kept
    FROM jsonb_array_elements(sheet.pins -> 'batches') WITH ORDINALITY AS t (batch, place)
    CROSS JOIN LATERAL (
      SELECT jsonb_agg(task ORDER BY n) AS tasks, jsonb_agg(token ORDER BY n) AS tokens
      FROM ROWS FROM (
        jsonb_array_elements(batch -> 'tasks'), jsonb_array_elements(batch -> 'tokens')
      ) WITH ORDINALITY AS pin (task, token, n)
      WHERE task #>> '{}' NOT IN (
        SELECT gone.task FROM {schema}.jobsync_unpinned AS gone
        WHERE gone.created_by = sheet.pins ->> 'created_by' AND gone.patterns = batch -> 'patterns'
      )
    ) AS rest WHERE tasks IS NOT NULL;
    PERFORM {schema}.jobsync_replace(
      sheet.key, jsonb_set(sheet.pins, '{batches}', kept)::text, 'pin/{fleet}/'
    );
  END LOOP;
  DELETE FROM {schema}.jobsync_unpinned;
  RETURN NULL;
END $$;

-- name: drop_trigger
-- Runs before `trigger`, so that the views can be installed again.
DROP TRIGGER IF EXISTS {app}delete_{each} ON {schema}.{app}{view};

-- name: trigger
-- Call a function for each deleted row, or once after the statement.
CREATE TRIGGER {app}delete_{each} {when} DELETE ON {schema}.{app}{view} FOR EACH {each}
EXECUTE FUNCTION {schema}.{app}delete_{view}();

-- name: comment
-- Mark a view with its version.
COMMENT ON VIEW {schema}.{app}{view} IS '{mark}';

-- name: relations
-- Relations whose names begin with the prefix, and the comments of views.
SELECT c.relname, CASE WHEN c.relkind = 'v' THEN obj_description(c.oid, 'pg_class') END
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname LIKE %s ESCAPE '~';

-- name: grant
-- Rights of a role that uses the views.
GRANT SELECT ON {names} TO {role};
GRANT DELETE ON {deletable} TO {role};
GRANT SELECT, INSERT, DELETE ON {schema}.jobsync_unpinned TO {role};
