"""Rows in a simulated world on SQLite: a database in this process, without threads.

The messages of a claim are in one row, so a change of that row is recorded for each message in it.
"""

import sqlite3
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from jobsync.core.clock import Clock
from jobsync.errors import Misconfigured
from jobsync.queue.backend import Receipt
from jobsync.queue.sql.sqlite_transactions import SqliteTransactions
from jobsync.queue.transaction_backend import TransactionBackend
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore
from jobsync.stores.sql import Parameters, SqliteAccess
from jobsync.stores.sqlite.file import SQLITE_STEPS
from jobsync.testing.rows import RowLink, SharedRows
from jobsync.testing.world import World

if TYPE_CHECKING:
    from jobsync.testing.network import Link

__all__ = ["RowStore", "SqliteRows"]

T = TypeVar("T")

_MESSAGE_COLUMNS = """
'jobsync_message', new.id, '', '', new.queue, new.state, new.payload, new.deliveries, new.returned,
new.max_attempts, new.suspect, '', '', new.due, new.boot, new.wakes, new.errors
"""
_FINISHED_COLUMNS = """
'jobsync_finished', new.id, '', '', new.queue, new.state, new.payload, new.deliveries, new.returned,
new.max_attempts, 0, '', new.session, new.finished, 0, NULL, new.errors
"""
_CLAIM_COLUMNS = "'jobsync_claim', new.number"
_TRIGGERS = tuple(
    f"CREATE TEMP TRIGGER record_{table}_{event} AFTER {event} ON {table} "
    f"BEGIN SELECT jobsync_record_change({row}); END"
    for table, row in (
        ("jobsync_message", _MESSAGE_COLUMNS),
        ("jobsync_finished", _FINISHED_COLUMNS),
        ("jobsync_claim", _CLAIM_COLUMNS),
    )
    for event in ("INSERT", "UPDATE")
) + tuple(
    f"CREATE TEMP TRIGGER record_{table}_DELETE AFTER DELETE ON {table} "
    f"BEGIN SELECT jobsync_record_change('{table}', old.{name}); END"
    for table, name in (
        ("jobsync_message", "id"),
        ("jobsync_finished", "id"),
        ("jobsync_claim", "number"),
    )
)
_READ_CLAIM = """
SELECT c.claim, c.queue, c.session, c.suspect, c.boot, c.due, c.finished, c.outcomes, c.messages,
  c.errors, c.dues, c.times, coalesce(c.payloads, p.payloads, x'')
FROM jobsync_claim AS c LEFT JOIN jobsync_claim_payload AS p ON p.number = c.number
WHERE c.number = ?
"""
_DAMAGE_CLAIMED = """
UPDATE jobsync_claim AS c
SET payloads = CAST(f.payloads || :payload AS BLOB), messages = json_set(
  c.messages, f.fullkey || '[8]', length(f.payloads), f.fullkey || '[9]',
  length(CAST(:payload AS BLOB))
)
FROM (
  SELECT o.number, m.fullkey, coalesce(o.payloads, l.payloads) AS payloads
  FROM jobsync_claim AS o CROSS JOIN json_each(o.messages) AS m
  LEFT JOIN jobsync_claim_payload AS l ON l.number = o.number
  WHERE json_extract(m.value, '$[0]') = :id AND substr(o.outcomes, m.key + 1, 1) = 'o'
) AS f
WHERE f.number = c.number
"""


class SqliteRows(SharedRows, SqliteAccess):
    """An SQLite database in the memory of this process.

    Args:
        world: provides the time, and the history in which commits are recorded.
    """

    counts_by_wall = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._changes: list[tuple[Any, ...]] = []
        self._claims: dict[int, dict[str, tuple[Any, ...]]] = {}
        """The messages of each claim, as the latest commit has left them."""
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
            self._record_changes([*self._read_changes()], node)
        return result

    def _read_changes(self) -> Iterator[Sequence[Any]]:
        """Return the changes of a commit, with those of each message in the row of a claim."""
        numbers = dict.fromkeys(row[1] for row in self._changes if row[0] == "jobsync_claim")
        yield from (row for row in self._changes if row[0] != "jobsync_claim")
        for number in numbers:
            row = self._connection.execute(_READ_CLAIM, [number]).fetchone()
            before = self._claims.pop(number, {})
            if row is None:
                for name, (outcome, *_) in before.items():
                    if outcome in {"o", "c"}:
                        yield "jobsync_claim", name
                continue
            self._claims[number] = places = dict(_list_places(*row))
            for name, place in places.items():
                outcome, *columns = place
                is_changed = before.get(name) != place
                if is_changed or outcome == "o":
                    letter = outcome if is_changed else None
                    yield "jobsync_claim", name, row[0], letter, *columns

    def damage(self, name: str, payload: str) -> None:
        """Overwrite the payload of a message, in a transaction that belongs to no node."""

        def work(connection: sqlite3.Connection) -> None:
            row = {"payload": payload, "id": name}
            connection.execute("UPDATE jobsync_message SET payload = :payload WHERE id = :id", row)
            connection.execute(_DAMAGE_CLAIMED, row)

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


def _list_places(
    claim: str,
    queue: str,
    session: str,
    suspect: int,
    boot: int,
    due: float,
    finished: float | None,
    outcomes: str,
    messages: str,
    errors: str | None,
    dues: str | None,
    times: str | None,
    payloads: bytes,
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Return the id, the outcome and the columns of each message in the row of a claim."""
    items = msgspec.json.decode(messages)
    nothing = [None] * len(items)
    texts = msgspec.json.decode(errors) if errors else nothing
    own_dues = msgspec.json.decode(dues) if dues else nothing
    own_times = msgspec.json.decode(times) if times else nothing
    for place, (item, outcome) in enumerate(zip(items, outcomes, strict=True)):
        name, _, deliveries, returned, max_attempts, _, _, _, start, size, *_ = item
        counters, lines = (deliveries, returned, max_attempts), texts[place] or ""
        if outcome == "o":
            payload = payloads[start : start + size].decode()
            lapses = own_dues[place] or due
            facts = (suspect, claim, session, lapses, boot, None, lines)
            yield name, (outcome, queue, "claimed", payload, *counters, *facts)
        elif outcome == "c":
            facts = (0, "", session, own_times[place] or finished, 0, None, lines)
            yield name, (outcome, queue, "completed", None, *counters, *facts)
        else:
            yield name, (outcome,)


class _SqliteLink(RowLink, SqliteAccess):
    """Access to an SQLite database over a link."""

    def __init__(self, link: "Link", rows: SqliteRows, node: str) -> None:
        super().__init__(link, rows, node)
        self._rows = rows

    @property
    def has_user_transactions(self) -> bool:
        """Whether users can write on connections of their own: `transactions` simulates them."""
        return True

    def complete(self, transactions: TransactionBackend, receipt: Receipt) -> bool:
        """Complete a message in one transaction."""
        complete = cast("SqliteTransactions", transactions).complete
        return self._rows.commit(lambda each: complete(each, receipt), self.node)

    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""
        return await self._link.around("rows", 0, lambda: self._rows.read(query, parameters))

    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction when the request arrives."""
        return await self.transact(lambda: self._rows.commit(work, self.node), place)
