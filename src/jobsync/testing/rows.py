"""Rows in a simulated world: a real SQLite database in this process, without threads.

Every transaction runs where it arrives, whole and at one moment of the world's time, so that a
seed repeats it. The database itself tells which rows a commit has changed, by triggers, whatever
statements did it: each message that was touched stands in the history, in commit order, as it
was left.
"""

import hashlib
import itertools
import sqlite3
import weakref
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jobsync.errors import Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.contract import StoreDecorator
from jobsync.stores.memory import LocalNotifier, MemoryStore
from jobsync.stores.sql import Parameters, SqliteAccess
from jobsync.stores.sqlite.file import SQLITE_STEPS
from jobsync.testing.world import World

if TYPE_CHECKING:
    from jobsync.testing.network import Link

__all__ = ["ASKED", "Asked", "RowLink", "RowStore", "SharedRows", "digest"]


T = TypeVar("T")


class Asked(NamedTuple):
    """The question that a transaction answers."""

    place: int
    """Where in the history it stands."""
    call: str
    """What the port was asked to do."""


ASKED: ContextVar[Asked | None] = ContextVar("ASKED", default=None)
"""Set while a port is asked; see `RecordingBackend`."""

_LIVE = """
'jobsync_message', new.id, new.queue, new.state, new.payload, new.deliveries, new.returned,
new.max_attempts, new.suspect, new.claim, new.session, new.due, new.boot, new.trail, new.errors
"""
_DONE = """
'jobsync_finished', new.id, new.queue, new.state, new.payload, new.deliveries, new.returned,
new.max_attempts, 0, '', new.session, new.finished, 0, new.trail, new.errors
"""
_TRIGGERS = tuple(
    f"CREATE TEMP TRIGGER saw_{table}_{event} AFTER {event} ON {table} "
    f"BEGIN SELECT jobsync_saw({row}); END"
    for table, row in (("jobsync_message", _LIVE), ("jobsync_finished", _DONE))
    for event in ("INSERT", "UPDATE")
) + tuple(
    f"CREATE TEMP TRIGGER saw_{table}_DELETE AFTER DELETE ON {table} "
    f"BEGIN SELECT jobsync_saw('{table}', old.id); END"
    for table in ("jobsync_message", "jobsync_finished")
)


class _TableRow(NamedTuple):
    """A message as a table has it."""

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
    trail: str
    errors: str


class SharedRows(SqliteAccess):
    """The database that all nodes share. Its clock is the world's own.

    Args:
        world: whose time it goes by, and whose history tells of each commit.
    """

    def __init__(self, world: World) -> None:
        self.clock = world.components.clock
        self.topics = LocalNotifier()
        self._world = world
        self._touched: list[tuple[Any, ...]] = []
        self._tables: dict[str, dict[str, _TableRow]] = {
            "jobsync_message": {},
            "jobsync_finished": {},
        }
        self._connection = _open(self._touched)
        weakref.finalize(self, self._connection.close)

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return self._connection.execute(query, parameters).fetchall()

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction, on nobody's behalf."""
        del place
        return self.commit(work)

    def commit(self, work: Callable[[sqlite3.Connection], T], node: str = "") -> T:
        """Run work in one transaction, and note which messages it has changed.

        Args:
            work: what to do.
            node: whose transaction it is.

        Raises:
            Misconfigured: the database refuses it; nothing was done.
        """
        connection = self._connection
        self._touched.clear()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise Misconfigured("url", "rows", str(error), "look at the statement") from error
        finally:
            if connection.in_transaction:
                self._touched.clear()
                connection.execute("ROLLBACK")
        if self._touched:
            self._note(node)
        return result

    def wake(self, topic: str) -> None:
        """Let those who wait look."""
        self.topics.wake([topic])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken."""
        await self.topics.wait(topic, timeout)

    def _note(self, node: str) -> None:
        """Write down what has become of each message that was touched."""
        ids: dict[str, None] = {}
        for table, name, *columns in self._touched:
            ids[name] = None
            if columns:
                self._tables[table][name] = _TableRow(*columns)
            else:
                self._tables[table].pop(name, None)
        asked, clock = ASKED.get(), self.clock
        place = None if asked is None else asked.place
        moment = {"wall": clock.wall().seconds, "mono": clock.mono().seconds, "boot": clock.boot()}
        for name in ids:
            found = [rows[name] for rows in self._tables.values() if name in rows]
            self._world.note(node, "row", request=place, id=name, now=moment, **_describe(found))


class RowStore(StoreDecorator):
    """What all nodes share: records in memory, and rows beside them.

    Args:
        world: whose time and chance it goes by.
    """

    def __init__(self, world: World) -> None:
        super().__init__(MemoryStore(components=world.components))
        self.rows = SharedRows(world)

    @property
    def sql(self) -> SharedRows:
        """The way to the rows, without a way in between."""
        return self.rows


def _open(touched: list[tuple[Any, ...]]) -> sqlite3.Connection:
    """Make a database that writes down, in a list, which rows it touches."""

    def see(*row: Any) -> None:
        touched.append(row)

    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    for statement in (each for step in SQLITE_STEPS for each in step):
        connection.execute(statement)
    connection.create_function("jobsync_saw", -1, see)
    for trigger in _TRIGGERS:
        connection.execute(trigger)
    return connection


def _describe(found: list[_TableRow]) -> dict[str, Any]:
    """Give a message as the history has it: gone, in one table, or wrongly in both."""
    if len(found) != 1:
        return {"state": "both" if found else "gone"}
    (row,) = found
    facts = row._asdict()
    facts["payload"] = None if row.payload is None else digest(row.payload)
    facts["errors"] = row.errors.count("\n")
    return facts


@lru_cache(maxsize=10_000)
def digest(payload: str) -> str:
    """Give what tells one payload from another, however long they are."""
    return hashlib.blake2b(payload.encode(), digest_size=8).hexdigest()


# A node's way to the rows of a simulated world, with all that happens on a link.
#
# A transaction travels as any request does: it may be refused, come late, be carried out with
# its reply lost, or arrive twice. Hints get lost with replies, and do not pass a cut.


R = TypeVar("R")

_REPEATABLE = {"settle", "extend", "end_claims", "redrive", "purge", "forget"}
"""What a port promises to be safe to send again."""


class RowLink(SqliteAccess):
    """The rows, at the end of a link.

    Args:
        link: the way.
        rows: what lies at its end, with the store's clock.
        node: who sends.
    """

    def __init__(self, link: "Link", rows: SharedRows, node: str) -> None:
        self.clock = rows.clock
        self._link = link
        self._rows = rows
        self._node = node

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return await self._link.around("rows", 0, lambda: self._rows.read(query, parameters))

    async def write(self, work: Callable[[sqlite3.Connection], R], place: str) -> R:
        """Run work in one transaction, wherever and whenever it arrives.

        Raises:
            OutcomeUnknown: no answer came, or none that says what was done.
        """
        # It arrives in nobody's context, and answers this question all the same.
        context, asked = copy_context(), ASKED.get()
        # No driver sends a transaction twice. What a port may repeat arrives twice none the less.
        may_repeat = asked is not None and asked.call in _REPEATABLE
        arrivals = itertools.count()

        async def arrive() -> R:
            if next(arrivals) and not may_repeat:
                raise Unavailable(place, "it was sent once")
            return context.copy().run(self._rows.commit, work, self._node)

        try:
            return await self._link.around("transact", 0, arrive)
        except OutcomeUnknown as unknown:
            raise OutcomeUnknown(place, unknown.detail) from None

    def wake(self, topic: str) -> None:
        """Let those who wait look, if the hint passes."""
        if self._link.lets_hint_pass():
            self._rows.wake(topic)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken, and the hint passes."""
        give_up = self.clock.mono() + timeout
        while (left := give_up - self.clock.mono()) > 0:
            if await self._rows.topics.wait(topic, left) and self._link.lets_hint_pass():
                return
