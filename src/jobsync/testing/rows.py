"""Rows in a simulated world: a real database, which runs statements when the world says so.

`SqliteRows` is an SQLite database in this process, without threads. Other databases extend
`SharedRows` and `RowLink`, which have what all of them share.

Every transaction runs as a whole at one moment of the world's time, so that a seed repeats it.
Triggers of the database report which rows a commit has changed, whichever statement did it. Each
changed message is recorded in the history, in commit order, as the commit has left it.

A node reaches the rows over a link. A transaction travels like any request: it may be refused, come
late, be executed while its reply is lost, or arrive twice. Notifications get lost with replies, and
do not pass a cut.
"""

import hashlib
import itertools
import sqlite3
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jobsync.core.clock import Clock
from jobsync.errors import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import LocalNotifier, MemoryStore
from jobsync.stores.sql import Parameters, SqlAccess, SqliteAccess
from jobsync.stores.sqlite.file import SQLITE_STEPS
from jobsync.testing.world import World

if TYPE_CHECKING:
    from jobsync.testing.network import Link

__all__ = [
    "CURRENT_CALL",
    "BackendCall",
    "RowLink",
    "RowStore",
    "SharedRows",
    "SqliteRows",
    "digest",
]

T = TypeVar("T")

_REPEATABLE = {"settle", "extend", "end_claims", "redrive", "purge", "forget"}
"""The calls of a queue backend that are safe to send again."""


class BackendCall(NamedTuple):
    """The call of a queue backend that a transaction belongs to."""

    position: int
    """The position of the request in the history."""
    name: str


CURRENT_CALL: ContextVar[BackendCall | None] = ContextVar("CURRENT_CALL", default=None)
"""Set during the calls of a `RecordingBackend`."""

_MESSAGE_COLUMNS = """
'jobsync_message', new.id, new.queue, new.state, new.payload, new.deliveries, new.returned,
new.max_attempts, new.suspect, new.claim, new.session, new.due, new.boot, new.wakes,
new.trail, new.errors
"""
_FINISHED_COLUMNS = """
'jobsync_finished', new.id, new.queue, new.state, new.payload, new.deliveries, new.returned,
new.max_attempts, 0, '', new.session, new.finished, 0, NULL, new.trail, new.errors
"""
_TRIGGERS = tuple(
    f"CREATE TEMP TRIGGER record_{table}_{event} AFTER {event} ON {table} "
    f"BEGIN SELECT jobsync_record_change({row}); END"
    for table, row in (
        ("jobsync_message", _MESSAGE_COLUMNS),
        ("jobsync_finished", _FINISHED_COLUMNS),
    )
    for event in ("INSERT", "UPDATE")
) + tuple(
    f"CREATE TEMP TRIGGER record_{table}_DELETE AFTER DELETE ON {table} "
    f"BEGIN SELECT jobsync_record_change('{table}', old.id); END"
    for table in ("jobsync_message", "jobsync_finished")
)


class _TableRow(NamedTuple):
    """A message as stored in one of the tables."""

    queue: str
    state: str
    payload: str | None
    deliveries: int
    returned: int
    max_attempts: int
    suspect: int
    claim: str
    session: str
    due: float
    boot: int
    wakes: float | None
    trail: str
    errors: str


class SharedRows(SqlAccess):
    """The database that all nodes share. Its clock is that of the world.

    Args:
        world: provides the time, and the history in which commits are recorded.

    Attributes:
        clock: its clock.
        notifier: wakes the callers that wait for a topic.
        counts_by_wall: whether delays and claims end by the wall clock, so that setting it moves
            them; else by the time since boot.
    """

    counts_by_wall: bool

    def __init__(self, world: World) -> None:
        self.clock = world.components.clock
        self.notifier = LocalNotifier()
        self._world = world
        self._tables: defaultdict[str, dict[str, _TableRow]] = defaultdict(dict)

    @abstractmethod
    def connect(self, link: "Link", node: str) -> "RowLink":
        """Return the access of a node, over its link."""

    @abstractmethod
    def damage(self, name: str, payload: str) -> None:
        """Overwrite the payload of a message, in a transaction that belongs to no node."""

    def wake(self, topic: str) -> None:
        """Wake the callers that wait for a topic."""
        self.notifier.wake([topic])

    async def wait(self, topic: str, timeout: float) -> None:
        """Wait; return early if the topic is woken."""
        await self.notifier.wait(topic, timeout)

    def _read_time(self) -> Mapping[str, float]:
        """Return the time of a commit: by the wall clock, and since which boot."""
        clock = self.clock
        return {"wall": clock.wall().seconds, "mono": clock.mono().seconds, "boot": clock.boot()}

    def _record_changes(self, changes: Iterable[Sequence[Any]], node: str) -> None:
        """Record the new state of each message that a commit has changed.

        Args:
            changes: the table, the id, and the columns of `_TableRow`, or none after a deletion.
            node: the node that has sent the transaction.
        """
        ids: dict[str, None] = {}
        for table, name, *columns in changes:
            ids[name] = None
            if columns:
                self._tables[table][name] = _TableRow(*columns)
            else:
                self._tables[table].pop(name, None)
        call = CURRENT_CALL.get()
        request = None if call is None else call.position
        now = self._read_time()
        for name in ids:
            found = [rows[name] for rows in self._tables.values() if name in rows]
            self._world.note(node, "row", request=request, id=name, now=now, **_describe(found))


class SqliteRows(SharedRows, SqliteAccess):
    """An SQLite database in the memory of this process.

    Args:
        world: provides the time, and the history in which commits are recorded.
    """

    counts_by_wall = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._changes: list[tuple[Any, ...]] = []
        self._connection = _open(self._changes)
        weakref.finalize(self, self._connection.close)

    def connect(self, link: "Link", node: str) -> "RowLink":
        """Return the access of a node, over its link."""
        return _SqliteLink(link, self, node)

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return self._connection.execute(query, parameters).fetchall()

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction that belongs to no node."""
        del place
        return self.commit(work)

    def commit(self, work: Callable[[sqlite3.Connection], T], node: str = "") -> T:
        """Run work in one transaction, and record which messages it has changed.

        Args:
            work: runs the statements.
            node: the node that has sent it.

        Raises:
            Misconfigured: the database rejects it; nothing was done.
        """
        connection = self._connection
        self._changes.clear()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            problem = f"rejected a statement: {error}"
            raise Misconfigured("url", "rows", problem, "correct the statement") from error
        finally:
            if connection.in_transaction:
                self._changes.clear()
                connection.execute("ROLLBACK")
        if self._changes:
            self._record_changes(self._changes, node)
        return result

    def damage(self, name: str, payload: str) -> None:
        """Overwrite the payload of a message, in a transaction that belongs to no node."""

        def work(connection: sqlite3.Connection) -> None:
            row = (payload, name)
            connection.execute("UPDATE jobsync_message SET payload = ? WHERE id = ?", row)

        self.commit(work)


class RowStore(StoreDecorator):
    """The store that all nodes share: records in memory, and rows beside them.

    Args:
        world: provides the time and the randomness.
        rows: the database with the rows; by default SQLite, in memory.
    """

    def __init__(self, world: World, rows: SharedRows | None = None) -> None:
        super().__init__(MemoryStore(components=world.components))
        self.rows = SqliteRows(world) if rows is None else rows

    @property
    def sql(self) -> SharedRows:
        """Direct access to the rows, without a link."""
        return self.rows

    @property
    def clock(self) -> Clock:
        """The clock of the database; may be replaced by one after a reboot."""
        return self.rows.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self.rows.clock = clock

    @property
    def counts_by_wall(self) -> bool:
        """Whether setting its wall clock moves the ends of delays and claims."""
        return self.rows.counts_by_wall

    def damage(self, name: str, payload: str) -> None:
        """Overwrite the payload of a message behind the library's back."""
        self.rows.damage(name, payload)


def _open(changes: list[tuple[Any, ...]]) -> sqlite3.Connection:
    """Open a database that appends each changed row to a list."""

    def record_change(*row: Any) -> None:
        changes.append(row)

    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    for step in SQLITE_STEPS:
        for statement in step:
            connection.execute(statement)
    connection.create_function("jobsync_record_change", -1, record_change)
    for trigger in _TRIGGERS:
        connection.execute(trigger)
    return connection


def _describe(found: list[_TableRow]) -> dict[str, Any]:
    """Describe a message for the history: gone, in one table, or wrongly in both."""
    if len(found) != 1:
        return {"state": "both" if found else "gone"}
    (row,) = found
    details = row._asdict()
    details["payload"] = None if row.payload is None else digest(row.payload)
    details["errors"] = row.errors.count("\n")
    return details


@lru_cache(maxsize=10_000)
def digest(payload: str) -> str:
    """Return a short hash of a payload."""
    return hashlib.blake2b(payload.encode(), digest_size=8).hexdigest()


class RowLink(SqlAccess):
    """Access to the rows over a link.

    Args:
        link: the link.
        rows: the rows, with the clock of the store.
        node: the node that sends.
    """

    def __init__(self, link: "Link", rows: SharedRows, node: str) -> None:
        self.clock = rows.clock
        self.node = node
        self._link = link
        self._shared = rows

    async def transact(self, commit: Callable[[], T], place: str) -> T:
        """Run a transaction when the request arrives.

        Args:
            commit: runs it, as a whole.
            place: what an unknown outcome names.

        Raises:
            OutcomeUnknown: no reply arrived, or an error that does not say what was done.
        """
        # The request is executed outside of this context, and still belongs to this call.
        context, call = copy_context(), CURRENT_CALL.get()
        # No driver sends a transaction twice. Calls that are safe to repeat still arrive twice.
        may_repeat = call is not None and call.name in _REPEATABLE
        arrivals = itertools.count()

        async def execute() -> T:
            if next(arrivals) and not may_repeat:
                raise Unavailable(place, "it was sent once")
            return context.copy().run(commit)

        try:
            await self._link.withhold("" if call is None else call.name)
            return await self._link.around("transact", 0, execute)
        except OutcomeUnknown as unknown:
            raise OutcomeUnknown(place, unknown.detail) from None

    def wake(self, topic: str) -> None:
        """Wake the callers that wait for a topic, if the notification passes."""
        if self._link.passes_notification():
            self._shared.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        """Wait; return early if the topic is woken and the notification passes."""
        deadline = self.clock.mono() + timeout
        while (left := deadline - self.clock.mono()) > 0:
            if await self._shared.notifier.wait(topic, left) and self._link.passes_notification():
                return


class _SqliteLink(RowLink, SqliteAccess):
    """Access to an SQLite database over a link."""

    def __init__(self, link: "Link", rows: SqliteRows, node: str) -> None:
        super().__init__(link, rows, node)
        self._rows = rows

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return await self._link.around("rows", 0, lambda: self._rows.read(query, parameters))

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction when the request arrives."""
        return await self.transact(lambda: self._rows.commit(work, self.node), place)
