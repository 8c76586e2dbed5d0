"""The rows of claims on SQLite: one row for each batch that was claimed.

A claim moves messages from `jobsync_message` into one row of `jobsync_claim`, which records how
each of them is settled; that answers a settlement whose reply was lost. When all are settled, the
row is the record of the completed ones. Cancelled messages and dead letters are moved to
`jobsync_finished`; the others that are not completed are put back.

All functions here run in a transaction of the caller.
"""

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from jobsync.core.messages import (
    LAPSED,
    SPARED,
    TRANSITIONS,
    Transition,
    decide_lapse,
    shorten_error,
)
from jobsync.errors import Corrupt
from jobsync.queue.backend import PLAIN_FORMAT, EndedClaim, Failure, Settlement
from jobsync.queue.sql.claims import OUTCOMES
from jobsync.queue.sql.common import ClaimRequest
from jobsync.queue.sql.message_rows import keep_latest
from jobsync.queue.sql.sqlite_places import SQL, SqlitePlaces, run_steps, to_json

__all__ = [
    "COMPLETED",
    "FORGOTTEN",
    "OPEN",
    "ClaimRow",
    "Ending",
    "add_failure",
    "complete_claim",
    "end_lapsed",
    "extend_claim",
    "insert_claim",
    "settle_claim",
]

T = TypeVar("T")

OPEN, COMPLETED, FORGOTTEN, _LAPSED = "o", "c", "f", "l"
"""Letters of outcomes. The others are in `OUTCOMES`."""

_MAX_COUNT = 2**31 - 1
"""The end of the counters."""

_MAX_INLINE = 2048
"""The size of payloads up to which they are in the row of their claim."""

_encode = msgspec.json.Encoder().encode


class _ClaimedMessage(msgspec.Struct, array_like=True, gc=False):
    """What does not change of a message while it is claimed."""

    id: str
    position: int
    deliveries: int
    returned: int
    max_attempts: int
    timeout: float | None
    enqueued: float | None
    task: str
    start: int
    """Where its payload starts."""
    size: int
    """How many bytes it has."""
    priority: int = 0
    group: str | None = None

    @property
    def attempt(self) -> int:
        """The number of the current attempt, whatever somebody has written into the counters."""
        return min(max(self.deliveries - self.returned, 0), _MAX_COUNT)


_decode_messages = msgspec.json.Decoder(list[_ClaimedMessage]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_times = msgspec.json.Decoder(list[float | None]).decode


class Ending(NamedTuple):
    """How the claim of one message ends."""

    outcome: str
    move: Transition
    error: str
    delay: float = 0.0
    is_suspect: bool = False


class ClaimRow(msgspec.Struct):
    """The row of a claim; what a transaction changes is stored by `write`."""

    number: int
    claim: str
    queue: str
    session: str
    claimed: float
    due: float
    boot: int
    is_suspect: bool
    format: int
    closed: float | None
    finished: float | None
    outcomes: list[str]
    messages: list[_ClaimedMessage]
    errors: list[str]
    dues: list[float]
    times: list[float | None]
    freed: list[str] = []
    """The groups whose heads have ended."""

    @classmethod
    def read(cls, row: Sequence[Any]) -> "ClaimRow":
        """Return the claim of a row.

        Raises:
            Corrupt: it cannot be decoded.
        """
        *facts, closed, finished, outcomes, messages, errors, dues, times = row
        number, claim, queue, session, claimed, due, boot, suspect, form = facts
        try:
            found = _decode_messages(messages)
            texts = [] if errors is None else _decode_texts(errors)
            own_dues = [] if dues is None else _decode_times(dues)
            own_times = [] if times is None else _decode_times(times)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise Corrupt(f"claim {claim}", f"it cannot be decoded ({error})") from error
        count = len(found)
        letters = _pad([*outcomes], count, OPEN)
        return cls(
            number,
            claim,
            queue,
            session,
            claimed,
            due,
            boot,
            bool(suspect),
            form,
            closed,
            finished,
            letters,
            found,
            _pad(texts, count, ""),
            [due if each is None else each for each in _pad(own_dues, count, None)],
            [
                None if letter != COMPLETED else finished if each is None else each
                for letter, each in zip(letters, _pad(own_times, count, None), strict=True)
            ],
        )

    def end(
        self,
        connection: sqlite3.Connection,
        place: int,
        ending: Ending,
        time: Mapping[str, float],
    ) -> None:
        """End the claim of one message, and move it to where it belongs now."""
        message, step = self.messages[place], TRANSITIONS[ending.move]
        self.outcomes[place] = ending.outcome
        self.closed = time["now"]
        if message.group is not None and step.target != "waiting":
            self.freed.append(message.group)
        errors = self.errors[place]
        if ending.error:
            errors = add_failure(errors, message.attempt, ending.error, time["now"], self.session)
        if step.target == "completed":
            self.times[place] = time["now"]
            # The wall clock may have been set back since another one was completed.
            self.finished = max(time["now"], self.finished or time["now"])
            self.errors[place] = errors
            return
        parameters = {
            **msgspec.structs.asdict(message),
            "number": self.number,
            "queue": self.queue,
            "session": self.session,
            "format": self.format,
            "enqueued": self.claimed if message.enqueued is None else message.enqueued,
            "errors": errors,
            "target": step.target,
            "due": time["now"] + ending.delay,
            "wakes": time["mono"] + ending.delay,
            "delay": ending.delay,
            "back": step.returns,
            "suspect": ending.is_suspect,
            **time,
        }
        name = "put_back" if step.target == "waiting" else "finish"
        connection.execute(SQL[name], parameters)

    def write(self, connection: sqlite3.Connection) -> None:
        """Store what has changed. Without open messages the claim is closed."""
        places = [*zip(self.outcomes, self.dues, self.times, strict=True)]
        dues = [due for letter, due, _ in places if letter == OPEN]
        times = [time for letter, _, time in places if letter == COMPLETED]
        is_uniform = all(time == self.finished for time in times)
        parameters = {
            "number": self.number,
            "outcomes": "".join(self.outcomes),
            "open": len(dues),
            "completed": len(times),
            "closed": None if dues else self.closed,
            "finished": self.finished,
            "due": min(dues, default=self.due),
            "boot": self.boot,
            "errors": to_json(self.errors) if any(self.errors) else None,
            "dues": to_json(self.dues) if len({*dues}) > 1 else None,
            "times": None if is_uniform else to_json(self.times),
        }
        connection.execute(SQL["write_claim"], parameters)
        if not dues:
            connection.execute(SQL["delete_payloads"], {"number": self.number})


def insert_claim(
    connection: sqlite3.Connection,
    request: ClaimRequest,
    rows: Sequence[Sequence[Any]],
    values: Mapping[str, Any],
) -> None:
    """Move messages into the row of a claim.

    Args:
        connection: the connection, in a transaction.
        request: what the caller has requested.
        rows: the messages, as the statement `select_ready` returns them.
        values: `queue`, `now`, and `due` and `boot` of the claim.
    """
    messages, start = [], 0
    highest = max([row[13] for row in rows])
    # Plain messages have neither a priority nor a group.
    end = 11 if highest == PLAIN_FORMAT else 13
    for row in rows:
        size = len(row[2])
        messages.append((row[1], row[0], *row[3:7], row[8], row[9], start, size, *row[11:end]))
        start += size
    ids = [row[1] for row in rows]
    payloads = b"".join([row[2] for row in rows])
    is_large = start > _MAX_INLINE
    parameters = {
        **values,
        "claim": request.claim,
        "session": request.session,
        "suspect": any(row[7] for row in rows),
        "open": len(rows),
        "low": min(ids),
        "high": max(ids),
        "outcomes": OPEN * len(rows),
        "messages": to_json(messages),
        "errors": None,
        "payloads": None if is_large else payloads,
        "format": highest,
        "grouped": highest > PLAIN_FORMAT and any(row[12] is not None for row in rows),
    }
    if any(row[10] for row in rows):
        parameters["errors"] = to_json([row[10].decode(errors="replace") for row in rows])
    if len(rows) == 1:
        connection.execute(SQL["delete_one"], {"position": rows[0][0]})
    else:
        connection.execute(SQL["delete_claimed"], {"positions": to_json([row[0] for row in rows])})
    number = connection.execute(SQL["insert_claim"], parameters).lastrowid
    if is_large:
        connection.execute(SQL["insert_payloads"], {"number": number, "payloads": payloads})


def complete_claim(connection: sqlite3.Connection, claim: str, count: int, now: float) -> bool:
    """Complete all messages of a claim; False means that nothing was done."""
    parameters = {
        "claim": claim,
        "count": count,
        "outcomes": COMPLETED * count,
        "unsettled": OPEN * count,
        "now": now,
    }
    row = connection.execute(SQL["complete_claim"], parameters).fetchone()
    if row is not None:
        connection.execute(SQL["delete_payloads"], {"number": row[0]})
    return row is not None


def settle_claim(
    connection: sqlite3.Connection,
    claim: str,
    settlements: Sequence[Settlement],
    time: Mapping[str, float],
    most_heads: int = 1,
) -> set[str]:
    """Settle messages of a claim; return the ids of those settled so, now or before.

    Raises:
        Corrupt: the claim cannot be decoded.
    """
    if (row := _find_claim(connection, claim)) is None:
        return set()
    places = {message.id: place for place, message in enumerate(row.messages)}
    settled, is_changed = set(), False
    for settlement in settlements:
        name, wanted = settlement.receipt.id, OUTCOMES[settlement.move]
        if (place := places.get(name)) is None:
            continue
        outcome = row.outcomes[place]
        if outcome == OPEN:
            ending = Ending(wanted, settlement.move, settlement.error, settlement.delay)
            row.end(connection, place, ending, time)
            if settlement.result is not None:
                _insert_result(connection, row.queue, settlement, time["now"])
            is_changed = True
        elif outcome != wanted and (outcome, wanted) != (FORGOTTEN, COMPLETED):
            continue
        settled.add(name)
    if is_changed:
        row.write(connection)
        run_steps(connection, SqlitePlaces(row.queue, time, most_heads).release(row.freed))
    return settled


def extend_claim(
    connection: sqlite3.Connection, claim: str, ids: Collection[str], since_boot: tuple[int, float]
) -> set[str]:
    """Extend open messages of a claim; never shorten it. Return the ids of those extended.

    Args:
        connection: the connection, in a transaction.
        claim: the claim.
        ids: the messages.
        since_boot: when they lapse: a boot, and seconds since it.

    Raises:
        Corrupt: the claim cannot be decoded.
    """
    boot, due = since_boot
    if (row := _find_claim(connection, claim)) is None:
        return set()
    chosen = [
        place
        for place, (message, outcome) in enumerate(zip(row.messages, row.outcomes, strict=True))
        if message.id in ids and outcome == OPEN
    ]
    if not chosen:
        return set()
    if row.boot != boot:
        # The others have lapsed.
        row.boot, row.dues = boot, [0.0] * len(row.dues)
    for place in chosen:
        row.dues[place] = max(row.dues[place], due)
    row.write(connection)
    return {row.messages[place].id for place in chosen}


def end_lapsed(
    connection: sqlite3.Connection,
    found: Sequence[Any],
    keep: Collection[str],
    dead: Collection[str],
    time: Mapping[str, float],
    most_heads: int = 1,
) -> list[EndedClaim]:
    """End what has lapsed of a claim, or all of it if its session is dead.

    Args:
        connection: the connection, in a transaction.
        found: the row of the claim.
        keep: messages whose claims are not ended.
        dead: the dead sessions.
        time: the time, for claims (`since`, `since_boot`) and for delays.
        most_heads: how many messages of a group may be in work at a time.

    Raises:
        Corrupt: the claim cannot be decoded.
    """
    row = ClaimRow.read(found)
    is_over = row.session in dead or row.boot != time["since_boot"]
    ended = []
    for place, message in enumerate(row.messages):
        if row.outcomes[place] != OPEN or message.id in keep:
            continue
        if not (is_over or row.dues[place] <= time["since"]):
            continue
        move = decide_lapse(
            is_suspect=row.is_suspect, attempts=message.attempt, max_attempts=message.max_attempts
        )
        error = SPARED if TRANSITIONS[move].returns else LAPSED
        row.end(connection, place, Ending(_LAPSED, move, error, is_suspect=True), time)
        ended.append(
            EndedClaim(
                id=message.id,
                state=TRANSITIONS[move].target,
                attempt=message.attempt,
                session=row.session,
            )
        )
    if ended:
        row.write(connection)
        run_steps(connection, SqlitePlaces(row.queue, time, most_heads).release(row.freed))
    return ended


def _find_claim(connection: sqlite3.Connection, claim: str) -> ClaimRow | None:
    row = connection.execute(SQL["read_claim"], {"claim": claim}).fetchone()
    return None if row is None else ClaimRow.read(row)


def _pad(items: list[T], count: int, default: T) -> list[T]:
    """Return as many items as there are messages, whatever somebody has written."""
    return [*items[:count], *[default] * (count - len(items))]


def _insert_result(
    connection: sqlite3.Connection, queue: str, settlement: Settlement, now: float
) -> None:
    result = settlement.result
    if result is not None and settlement.move == "complete":
        row = {"id": settlement.receipt.id, "queue": queue, "now": now}
        row |= {"result": result.text, "problem": result.problem}
        connection.execute(SQL["insert_result"], row)


def add_failure(errors: str, attempt: int, error: str, now: float, session: str) -> str:
    """Return the errors of a message with one more."""
    failure = Failure(attempt, shorten_error(error), now, session)
    return f"{keep_latest(errors)}{_encode(failure).decode()}\n"
