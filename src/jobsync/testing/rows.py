"""Rows in a simulated world: a real database, which runs statements when the world says so.

`SharedRows` and `RowLink` have what all databases share; `sqlite_rows` has one of them.

Every transaction runs as a whole at one moment of the world's time, so that a seed repeats it.
Triggers of the database report which rows a commit has changed, whichever statement did it. Each
changed message is recorded in the history, in commit order, as the commit has left it.

A node reaches the rows over a link. A transaction travels like any request: it may be refused, come
late, be executed while its reply is lost, or arrive twice. Notifications get lost with replies, and
do not pass a cut.
"""

import hashlib
import itertools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jobsync.errors import OutcomeUnknown, Unavailable
from jobsync.queue.backend import Receipt
from jobsync.queue.sql.claims import OUTCOMES
from jobsync.queue.transaction_backend import TransactionBackend
from jobsync.stores.memory import LocalNotifier
from jobsync.stores.sql import SqlAccess
from jobsync.testing.world import World

if TYPE_CHECKING:
    from jobsync.testing.network import Link

__all__ = [
    "CURRENT_CALL",
    "BackendCall",
    "RowLink",
    "SharedRows",
    "digest",
    "name_current_call",
]

T = TypeVar("T")

_REPEATABLE = {"settle", "extend", "end_claims", "redrive", "purge", "forget", "forget_keys"}
"""The calls of a queue backend that are safe to send again."""


_SHOWN = {
    "ranked": "ready",
    "task_ready": "ready",
    "task_ranked": "ready",
    "task_waiting": "waiting",
}


class BackendCall(NamedTuple):
    """The call of a queue backend that a transaction belongs to."""

    position: int
    """The position of the request in the history."""
    name: str


CURRENT_CALL: ContextVar[BackendCall | None] = ContextVar("CURRENT_CALL", default=None)
"""Set during the calls of a `RecordingBackend`."""


def name_current_call() -> str:
    """Return the name of the queue backend's call that is under way; empty without."""
    call = CURRENT_CALL.get()
    return "" if call is None else call.name


_MOVES = {**{letter: move for move, letter in OUTCOMES.items()}, "v": "revoke"}


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
    errors: str
    trail: str
    """How its latest claim was settled: the row of that claim says it."""


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
        self._trails: dict[str, str] = {}

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

    def record_effect(self, node: str, receipt: Receipt) -> None:
        """Record what a handler has written, in the commit that has just completed its message."""
        self._world.note(node, "effect", id=receipt.id, epoch=receipt.deliveries)

    def _read_time(self) -> Mapping[str, float]:
        """Return the time of a commit: by the wall clock, and since which boot."""
        clock = self.clock
        return {"wall": clock.wall().seconds, "mono": clock.mono().seconds, "boot": clock.boot()}

    def _record_changes(self, changes: Iterable[Sequence[Any]], node: str) -> None:
        """Record the new state of each message that a commit has changed.

        Args:
            changes: the table and the id; the claim and the letter of its outcome, or None for the
                letter if the row of the claim was written and the message in it is as before; and
                the columns of `_TableRow` but for the trail. Without columns, the message is not in
                that table any more.
            node: the node that has sent the transaction.
        """
        found = [change for change in changes if self._is_change(*change)]
        for _, name, *details in found:
            if details and (move := _MOVES.get(details[1])):
                self._trails[name] = f"{details[0]}:{move}"
        ids: dict[str, None] = {}
        for table, name, *details in found:
            ids[name] = None
            if columns := details[2:]:
                trail = self._trails.get(name, "")
                self._tables[table][name] = _TableRow._make([*columns, trail])
            else:
                self._tables[table].pop(name, None)
        call = CURRENT_CALL.get()
        request = None if call is None else call.position
        now = self._read_time()
        for name in ids:
            rows = [rows[name] for rows in self._tables.values() if name in rows]
            self._world.note(node, "row", request=request, id=name, now=now, **_describe(rows))

    def _is_change(
        self, _: str, name: str, claim: str = "", outcome: str | None = "", *__: object
    ) -> bool:
        """Whether a message was changed, or its claim was extended by a call that names it."""
        if outcome is not None:
            return True
        call = CURRENT_CALL.get()
        if call is None or call.name != "extend":
            return False
        receipts = self._world.history[call.position].details["receipts"]
        return [name, claim] in [receipt[:2] for receipt in receipts]


async def _do_nothing() -> None:
    """Execute a request that changes nothing."""


def _describe(found: list[_TableRow]) -> dict[str, Any]:
    """Describe a message for the history: gone, in one table, or wrongly in both."""
    if len(found) != 1:
        return {"state": "both" if found else "gone"}
    (row,) = found
    details = row._asdict()
    # So they are stored with a priority, or with a task. Nobody is shown that.
    details["state"] = _SHOWN.get(row.state, row.state)
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

    async def begin(self) -> None:
        """Reach the database, as the first statement of a handler's transaction does.

        Raises:
            Unavailable: no reply arrived.
        """
        try:
            await self._link.around("begin", 0, _do_nothing)
        except OutcomeUnknown as unknown:
            raise Unavailable(self._link.name, unknown.detail) from None

    async def complete_and_commit(self, transactions: TransactionBackend, receipt: Receipt) -> bool:
        """Complete a message and commit what its handler has written, when the request arrives.

        Returns False if the claim has ended: nothing is committed.

        Raises:
            OutcomeUnknown: no reply arrived.
        """

        def commit() -> bool:
            is_completed = self.complete(transactions, receipt)
            if is_completed:
                self._shared.record_effect(self.node, receipt)
            return is_completed

        return await self.transact(commit, receipt.id)

    @abstractmethod
    def complete(self, transactions: TransactionBackend, receipt: Receipt) -> bool:
        """Complete a message in one transaction; False if its claim has ended."""

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
