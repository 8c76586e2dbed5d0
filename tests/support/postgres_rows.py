"""Rows of a simulated world on a real PostgreSQL server.

The server runs the statements of the library as they are, each as a whole and at the moment of the
world's time at which the network delivers it. Its time is the world's: `clock_timestamp()` is found
in the schema of the world before the server's own, and returns a setting that is set before each
statement. So a seed repeats a history here too. Statements do not run at the same time, except
beside a `UserTransaction`.

Triggers report changed rows as notices, which arrive with the reply. Notifications are the server's
own: the connection receives what it has sent itself.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
import psycopg
from postgres_servers import PostgresServer
from psycopg import Connection, Notify, errors
from psycopg.rows import TupleRow

from jobsync.core.clock import Mono
from jobsync.core.urls import PostgresUrl, parse_url
from jobsync.errors import Corrupt, OutcomeUnknown
from jobsync.queue.backend import Receipt
from jobsync.queue.sql.postgres_places import run_steps_blocking
from jobsync.queue.sql.postgres_transactions import PostgresTransactions
from jobsync.queue.transaction_backend import TransactionBackend
from jobsync.stores.postgres.connection import statement_error
from jobsync.stores.postgres.schema import POSTGRES_STEPS
from jobsync.stores.sql import Parameters, PostgresAccess, Steps, fill_in
from jobsync.testing.network import Link
from jobsync.testing.rows import RowLink, SharedRows
from jobsync.testing.sqlite_rows import RowStore
from jobsync.testing.world import World

__all__ = ["PostgresRows", "UserTransaction", "opened_rows", "use_database"]

T = TypeVar("T")

_CHANNEL = "world"
_PREPARE_AFTER = 5
"""As in the store: frequent statements are planned once."""
_COOLDOWN = 0.05
"""Seconds within which a process notifies a topic once, as in the store."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_SETTINGS = """
SET search_path = {schema}, pg_catalog;
SET synchronous_commit = off;
SET jit = off;
SET lock_timeout = '10s';
LISTEN {channel}
"""

# Nobody vacuums or analyzes the tables: the order of equal rows depends on the seed only.
#
# A claim is one row, so its trigger reports each message in it that the commit has changed, with
# the letter of its outcome; and each open one, because an extension may leave its deadline alone.
_WORLD = """
CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql
AS $$ SELECT current_setting('jobsync.now')::timestamptz $$;
{tables};
ALTER TABLE jobsync_message SET (autovacuum_enabled = false);
ALTER TABLE jobsync_claim SET (autovacuum_enabled = false);
ALTER TABLE jobsync_finished SET (autovacuum_enabled = false);
CREATE FUNCTION record_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF tg_op = 'DELETE' THEN
    RAISE NOTICE '%', json_build_array(tg_table_name, old.id);
  ELSIF tg_table_name = 'jobsync_message' THEN
    RAISE NOTICE '%', json_build_array(
      tg_table_name, new.id, '', '', new.queue, new.state, new.payload, new.deliveries,
      new.returned, new.max_attempts, new.suspect::integer, '', '',
      extract(epoch FROM new.due)::float8, new.errors
    );
  ELSE
    RAISE NOTICE '%', json_build_array(
      tg_table_name, new.id, '', '', new.queue, new.state, new.payload, new.deliveries,
      new.returned, new.max_attempts, 0, '', new.session,
      extract(epoch FROM new.finished)::float8, new.errors
    );
  END IF;
  RETURN NULL;
END $$;
CREATE FUNCTION list_places(c jobsync_claim) RETURNS TABLE (
  place bigint, id text, outcome text, payload text, deliveries integer, returned integer,
  max_attempts integer, errors text, due timestamptz
) LANGUAGE sql AS $$
  SELECT place, id, outcome, CASE outcome WHEN 'o' THEN payload END, deliveries,
    coalesce(returned, 0), max_attempts, coalesce(errors, ''),
    CASE outcome WHEN 'o' THEN coalesce(due, c.due) ELSE finished END
  FROM unnest(
    c.ids, string_to_array(c.outcomes, NULL), c.payloads, c.deliveries, c.returned,
    c.max_attempts, c.errors, c.dues, c.finished
  ) WITH ORDINALITY AS p (
    id, outcome, payload, deliveries, returned, max_attempts, errors, due, finished, place
  )
$$;
CREATE FUNCTION record_claim() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE p record;
BEGIN
  IF tg_op = 'DELETE' THEN
    FOR p IN SELECT * FROM list_places(old) AS o WHERE o.outcome IN ('o', 'c') LOOP
      RAISE NOTICE '%', json_build_array(tg_table_name, p.id);
    END LOOP;
    RETURN NULL;
  END IF;
  FOR p IN
    SELECT n.*, o IS DISTINCT FROM n AS is_changed
    FROM list_places(new) AS n LEFT JOIN list_places(old) AS o ON o.place = n.place
    WHERE o IS DISTINCT FROM n OR n.outcome = 'o'
  LOOP
    IF p.outcome IN ('o', 'c') THEN
      RAISE NOTICE '%', json_build_array(
        tg_table_name, p.id, new.claim, CASE WHEN p.is_changed THEN p.outcome END, new.queue,
        CASE p.outcome WHEN 'o' THEN 'claimed' ELSE 'completed' END, p.payload, p.deliveries,
        p.returned, p.max_attempts, (p.outcome = 'o' AND new.is_suspect)::integer,
        CASE p.outcome WHEN 'o' THEN new.claim ELSE '' END, new.session,
        extract(epoch FROM p.due)::float8, p.errors
      );
    ELSE
      RAISE NOTICE '%', json_build_array(tg_table_name, p.id, new.claim, p.outcome);
    END IF;
  END LOOP;
  RETURN NULL;
END $$;
CREATE TRIGGER record_change AFTER INSERT OR UPDATE OR DELETE ON jobsync_message
FOR EACH ROW EXECUTE FUNCTION record_change();
CREATE TRIGGER record_change AFTER INSERT OR UPDATE OR DELETE ON jobsync_claim
FOR EACH ROW EXECUTE FUNCTION record_claim();
CREATE TRIGGER record_change AFTER INSERT OR UPDATE OR DELETE ON jobsync_finished
FOR EACH ROW EXECUTE FUNCTION record_change()
"""
_DAMAGE = """
WITH waiting AS (
  UPDATE {schema}.jobsync_message SET payload = %(payload)s WHERE id = %(id)s
)
UPDATE {schema}.jobsync_claim SET payloads[array_position(ids, %(id)s)] = %(payload)s
WHERE substr(outcomes, array_position(ids, %(id)s), 1) = 'o'
"""
_SET_TIME = "SELECT set_config('jobsync.now', %s, false)"

_decode = msgspec.json.Decoder(list[Any]).decode
_numbers = itertools.count()
_urls: list[str] = []
"""The database to use, if there is one."""


class _Session:
    """A connection that collects the changes and the notifications of its own statements."""

    def __init__(self, url: str, schema: str, read_micros: Callable[[], int]) -> None:
        self.changes: list[list[Any]] = []
        self.topics: list[str] = []
        self.connection = psycopg.connect(url, autocommit=True, prepare_threshold=_PREPARE_AFTER)
        self.execute_script(fill_in(_SETTINGS, {"schema": schema, "channel": _CHANNEL}))
        self.connection.add_notice_handler(self._on_notice)
        self.connection.add_notify_handler(self._on_notify)
        self._read_micros = read_micros
        self._set_cursor = self.connection.cursor()
        self._cursor = self.connection.cursor()

    def set_time(self) -> None:
        """Set the server's time to that of the world."""
        now = _EPOCH + timedelta(microseconds=self._read_micros())
        self._set_cursor.execute(_SET_TIME, [now.isoformat()])

    def run(self, statement: str, parameters: Parameters) -> list[TupleRow]:
        """Run a statement at the world's time; return its rows."""
        self.changes.clear()
        self.topics.clear()
        self.set_time()
        cursor = self._cursor.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []

    def run_steps(self, steps: Steps[T]) -> T:
        """Run statements in one transaction at the world's time; return their result."""
        self.changes.clear()
        self.topics.clear()
        self.set_time()
        with self.connection.transaction():
            return run_steps_blocking(self.connection, steps)

    def copy(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        """Add rows at the world's time, and notify."""
        self.changes.clear()
        self.topics.clear()
        self.set_time()
        with self.connection.transaction(), self._cursor.copy(statement.encode()) as copy:
            for part in rows:
                copy.write(part)
        self.connection.execute("SELECT pg_notify(%s, %s)", [_CHANNEL, topic])

    def execute_script(self, script: str) -> None:
        """Run statements without parameters."""
        self.connection.execute(script.encode())

    def _on_notice(self, notice: errors.Diagnostic) -> None:
        self.changes.append(_decode(notice.message_primary or ""))

    def _on_notify(self, notification: Notify) -> None:
        # What others send arrives at any time.
        if notification.pid == self.connection.info.backend_pid:
            self.topics.append(notification.payload)


class PostgresRows(SharedRows, PostgresAccess):
    """The tables of a world in a schema of their own, until `close`.

    Args:
        world: provides the time, and the history in which commits are recorded.
        url: the database.
    """

    counts_by_wall = True
    channel = _CHANNEL

    def __init__(self, world: World, url: str) -> None:
        super().__init__(world)
        self.schema = f"world_{os.getpid()}_{next(_numbers)}"
        self._url = url
        self._session = self._open_session()
        steps = [statement for step in POSTGRES_STEPS for statement in step]
        tables = fill_in(";\n".join(steps), {"schema": self.schema})
        self._session.execute_script(f"CREATE SCHEMA {self.schema}")
        self._session.execute_script(fill_in(_WORLD, {"tables": tables}))

    def close(self) -> None:
        """Remove the schema and close the connection."""
        connection = self._session.connection
        with connection:
            connection.execute(
                f"SET client_min_messages = error; DROP SCHEMA {self.schema} CASCADE"
            )

    def connect(self, link: Link, node: str) -> "_PostgresLink":
        """Return the access of a node, over its link."""
        return _PostgresLink(link, self, node)

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Run a statement that belongs to no node."""
        return self.commit(statement, parameters, place)

    async def run_steps(self, build: Callable[[], Steps[T]], place: str) -> T:
        """Run statements that belong to no node, in one transaction."""
        return self.commit_steps(build, place)

    def commit_steps(self, build: Callable[[], Steps[T]], place: str, node: str = "") -> T:
        """Run statements in one transaction, and record what it has changed; raises as `commit`."""
        try:
            result = self._session.run_steps(build())
        except psycopg.Error as error:
            raise self._to_error(error, place) from error
        self._publish(self._session, node)
        return result

    async def run_and_notify(
        self, statement: str, notifying: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement that belongs to no node, and notify."""
        del statement
        notification = {"channel": self.channel, "topic": topic}
        return self.commit(notifying, {**parameters, **notification}, topic)

    async def copy_and_notify(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        """Add rows for no node, and notify."""
        self.copy(statement, rows, topic)

    def copy(self, statement: str, rows: Iterable[bytes], topic: str, node: str = "") -> None:
        """Add rows, record the messages, and notify; raises as `commit`."""
        try:
            self._session.copy(statement, rows, topic)
        except psycopg.Error as error:
            raise self._to_error(error, topic) from error
        self._publish(self._session, node)

    def commit(
        self, statement: str, parameters: Parameters, place: str, node: str = ""
    ) -> list[Any]:
        """Run a statement, record which messages it has changed, and wake waiting callers.

        Args:
            statement: the statement, which is one transaction.
            parameters: its parameters.
            place: what an error names.
            node: the node that has sent it.

        Raises:
            Corrupt, Misconfigured, Unavailable: the server rejects it; nothing was done.
        """
        session = self._session
        try:
            rows = session.run(statement, parameters)
        except psycopg.Error as error:
            raise self._to_error(error, place) from error
        self._publish(session, node)
        return rows

    def damage(self, name: str, payload: str) -> None:
        """Overwrite the payload of a message, in a transaction that belongs to no node."""
        statement = fill_in(_DAMAGE, {"schema": self.schema})
        self.commit(statement, {"payload": payload, "id": name}, name)

    @contextmanager
    def begin(self, node: str) -> Iterator["UserTransaction"]:
        """Begin a transaction beside those of the library; it is rolled back unless committed.

        Args:
            node: the node that begins it.
        """
        session = self._open_session()
        with closing(session.connection):
            session.execute_script("BEGIN")
            yield UserTransaction(session, partial(self._publish, session, node))

    def _open_session(self) -> _Session:
        return _Session(self._url, self.schema, self._read_micros)

    def _publish(self, session: _Session, node: str) -> None:
        """Record the changes of a commit, and wake those whom it notifies."""
        if session.changes:
            # The plan decides in which order one statement changes rows.
            changes = sorted(session.changes, key=_get_id)
            self._record_changes([_to_change(*change) for change in changes], node)
        if session.topics:
            self.notifier.wake(session.topics)

    def _read_micros(self) -> int:
        """Return the time as the server knows it: in microseconds."""
        return round(self.clock.wall().seconds * 1e6)

    def _read_time(self) -> Mapping[str, float]:
        # The server knows one time only.
        seconds = self._read_micros() / 1e6
        return {"wall": seconds, "mono": seconds, "boot": 0}

    def _to_error(self, error: psycopg.Error, place: str) -> Exception:
        """Return the error as the store's pool would raise it."""
        if error.sqlstate is None:
            return error  # psycopg's own, or the server is gone: the test has failed
        if isinstance(error, psycopg.DataError) or error.sqlstate == "54001":
            return Corrupt(place, str(error))
        url = parse_url(self._url)
        assert isinstance(url, PostgresUrl)
        return statement_error(url, error)


class UserTransaction:
    """A transaction of user code that lasts for some of the world's time.

    Its statements must wait for no lock that the library has, and the other way round.
    """

    def __init__(self, session: _Session, publish: Callable[[], None]) -> None:
        self._session = session
        self._publish = publish

    @property
    def connection(self) -> Connection[TupleRow]:
        """Its connection, at the world's time; for `enqueue(..., connection=)`."""
        self._session.set_time()
        return self._session.connection

    def commit(self) -> None:
        """Commit, record what it has changed, and wake waiting callers."""
        self._session.set_time()
        self._session.execute_script("COMMIT")
        self._publish()


class _PostgresLink(RowLink, PostgresAccess):
    """Access to the tables over a link."""

    def __init__(self, link: Link, rows: PostgresRows, node: str) -> None:
        super().__init__(link, rows, node)
        self.schema = rows.schema
        self.channel = rows.channel
        self._rows = rows
        self._cooldown_ends: dict[str, Mono] = {}

    def complete(self, transactions: TransactionBackend, receipt: Receipt) -> bool:
        """Complete a message in one transaction."""
        assert isinstance(transactions, PostgresTransactions)
        return self._rows.commit_steps(
            lambda: transactions.complete(receipt), receipt.id, self.node
        )

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Run a statement when the request arrives."""
        commit = partial(self._rows.commit, statement, parameters, place, self.node)
        return await self.transact(commit, place)

    async def run_steps(self, build: Callable[[], Steps[T]], place: str) -> T:
        """Run statements in one transaction when the request arrives."""
        commit = partial(self._rows.commit_steps, build, place, self.node)
        return await self.transact(commit, place)

    async def run_and_notify(
        self, statement: str, notifying: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement and wake those who wait for the topic, at once or soon."""
        now = self.clock.mono()
        if now >= self._cooldown_ends.get(topic, now):
            self._cooldown_ends[topic] = now + _COOLDOWN
            notification = {"channel": self.channel, "topic": topic}
            return await self.run(notifying, {**parameters, **notification}, topic)
        try:
            rows = await self.run(statement, parameters, topic)
        except OutcomeUnknown:
            self.wake(topic)
            raise
        self.wake(topic)
        return rows

    async def copy_and_notify(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        """Add rows when the request arrives, and notify."""
        commit = partial(self._rows.copy, statement, rows, topic, self.node)
        await self.transact(commit, topic)


def _to_change(*change: Any) -> Sequence[Any]:
    """Return a change as `_record_changes` takes it: rows here have neither a boot nor `wakes`."""
    *first, errors = change
    return change if len(change) <= 4 else (*first, 0, None, errors)


def _get_id(change: Sequence[Any]) -> str:
    return str(change[1])


@contextmanager
def opened_rows() -> Iterator[Callable[[World], RowStore]]:
    """Return what opens a store with rows on PostgreSQL; at the end they are removed."""
    opened: list[PostgresRows] = []

    def open_store(world: World) -> RowStore:
        opened.append(PostgresRows(world, _urls[-1] if _urls else _create_database()))
        return RowStore(world, opened[-1])

    try:
        yield open_store
    finally:
        for rows in opened:
            rows.close()


@contextmanager
def use_database(url: str) -> Iterator[None]:
    """Use a database for all worlds meanwhile. No other process should use it.

    Without this, each process creates one: on a server of its own, or on that in
    JOBSYNC_TEST_POSTGRES.
    """
    _urls.append(url)
    try:
        yield
    finally:
        _urls.remove(url)


@cache
def _create_database() -> str:
    """Create a database for this process; the server removes it when it stops."""
    # Others would keep dead rows from being removed at once, and so change the order of equal ones.
    return PostgresServer().start().create_database(f"worlds_{os.getpid()}")
