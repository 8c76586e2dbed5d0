"""Messages as rows of a database: how what was claimed, stored and failed is written and read.

A row that cannot be decoded fails no other: a claimed one is corrupt, of others the text is shown.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from jobsync.core.arguments import LONGEST_DELAY
from jobsync.core.codec import decode, encode_all
from jobsync.core.messages import LONGEST_ERROR, MessageState, shorten_error
from jobsync.errors import Corrupt
from jobsync.queue.backend import (
    MAX_MESSAGE,
    Failure,
    Message,
    MessageInfo,
    NewMessage,
    Receipt,
)
from jobsync.stores.corruption_log import CorruptionLog

__all__ = [
    "ClaimedRow",
    "encode_error",
    "encode_payloads",
    "find_stored_states",
    "keep_latest",
    "read_infos",
    "read_message",
]

_MAX_DELIVERIES = 2**31 - 1
"""The end of the counters. Nothing is delivered so often: somebody has written the number."""


_MAX_ERRORS, _KEPT_ERRORS = 400_000, 200_000
"""The size of a message's errors from which only the latest are kept, and the size of these: each
new one rewrites the row, and a row has an end."""


def encode_payloads(new_messages: Sequence[NewMessage]) -> list[bytes]:
    """Return the contents of messages as JSON.

    Raises:
        Invalid: one is not JSON, or too large.
    """
    return encode_all([each.value for each in new_messages], "message", limit=MAX_MESSAGE)


_decode_failure = msgspec.json.Decoder(Failure).decode
_decode_failures = msgspec.json.Decoder(tuple[Failure, ...]).decode

ClaimedRow: TypeAlias = tuple[str, bytes | str, int, int, int, float | None, bool, float, str]
"""A claimed message: id, payload, deliveries, returned deliveries, most attempts, timeout, whether
it is a suspect, when it was enqueued, and its task."""

_STORED_STATES: Mapping[MessageState, tuple[str, ...]] = {
    "ready": ("ready", "ranked", "task_ready", "task_ranked"),
    "waiting": ("waiting", "task_waiting"),
}
"""The states of messages that are stored in several: with a priority, with a task."""


def encode_error(text: str) -> str:
    """Return an error as JSON, shortened, without characters that a database cannot store."""
    return msgspec.json.encode(shorten_error(text)).decode()


def encode_any_error(text: str) -> str | None:
    """Return an error as JSON; None if there was none."""
    return encode_error(text) if text else None


def keep_latest(errors: str) -> str:
    """Return the errors of a message; of very many the latest, from the start of a line."""
    if len(errors) <= _MAX_ERRORS:
        return errors
    return errors[-_KEPT_ERRORS:].partition("\n")[2]


def read_message(receipt: Receipt, row: ClaimedRow) -> Message:
    """Return a claimed message.

    Raises:
        Corrupt: its payload is not JSON, or its numbers are impossible.
    """
    name, payload, deliveries, returned, max_attempts, timeout, suspect, enqueued, task = row
    if not 0 <= returned < deliveries < _MAX_DELIVERIES:
        detail = f"its deliveries are {deliveries}, of which {returned} count as returned"
        raise Corrupt(f"message {name}", detail)
    if timeout is not None and not 0 < timeout <= LONGEST_DELAY:
        raise Corrupt(f"message {name}", f"its timeout is {timeout} s")
    return Message(
        receipt=receipt,
        value=decode(payload, f"message {name}"),
        attempt=deliveries - returned,
        max_attempts=max_attempts,
        timeout=timeout,
        is_suspect=bool(suspect),
        enqueued=enqueued,
        task=task,
    )


def find_stored_states(states: Collection[MessageState]) -> list[str]:
    """Return the states as they are stored: a message with a priority is `ranked`, not ready."""
    return [stored for state in states for stored in _STORED_STATES.get(state, (state,))]


class _InfoRow(NamedTuple):
    """The row of a message, for display."""

    queue: str
    id: str
    state: MessageState
    payload: bytes | str | None
    deliveries: int
    returned: int
    max_attempts: int
    errors: str
    session: str
    suspect: bool
    enqueued: float
    due: float | None
    claimed: float | None
    finished: float | None
    seen: float
    format: int
    priority: int
    group: str | None
    task: str
    cursor: str
    progress: float | None = None
    progress_note: str | None = None
    progress_at: float | None = None
    result: str | None = None
    result_problem: str | None = None


def read_infos(rows: Sequence[Sequence[Any]], log: CorruptionLog) -> list[MessageInfo]:
    """Return the messages of all rows, so that a short page is the last one.

    What cannot be decoded of a message is shown as text.
    """
    return [_read_info(_InfoRow(*row), log) for row in rows]


def _read_info(row: _InfoRow, log: CorruptionLog) -> MessageInfo:
    value, is_readable = _decode_or_text(row.payload, row.id)
    result, _ = _decode_or_text(row.result, row.id)
    return MessageInfo(
        queue=row.queue,
        id=row.id,
        state=row.state,
        value=value,
        attempts=row.deliveries - row.returned,
        deliveries=row.deliveries,
        max_attempts=row.max_attempts,
        errors=_read_failures(row.errors, row.id, log),
        session=row.session,
        is_suspect=bool(row.suspect),
        enqueued=row.enqueued,
        due=row.due,
        claimed=row.claimed,
        finished=row.finished,
        seen=row.seen,
        is_readable=is_readable,
        format=row.format,
        priority=row.priority,
        group=row.group,
        task=row.task,
        progress=row.progress,
        progress_note=row.progress_note or "",
        progress_at=row.progress_at,
        result=result,
        result_problem=row.result_problem or "",
        cursor=row.cursor,
    )


def _decode_or_text(payload: bytes | str | None, name: str) -> tuple[Any, bool]:
    """Return a payload and True; if it is not JSON, its text and False."""
    if payload is None:
        return None, True
    try:
        return decode(payload, name), True
    except Corrupt:
        text = payload if isinstance(payload, str) else payload.decode(errors="replace")
        return text, False


def _read_failures(text: str, name: str, log: CorruptionLog) -> tuple[Failure, ...]:
    """Return the errors of a message, one of each line; a line that is not JSON as its text."""
    # Not `splitlines`: other characters that end lines may be within the text of an error.
    lines = text.removesuffix("\n").split("\n") if text else []
    try:
        return _decode_failures(f"[{','.join(lines)}]")
    except (msgspec.DecodeError, UnicodeError):
        return tuple(_read_failure(line, name, log) for line in lines)


def _read_failure(line: str, name: str, log: CorruptionLog) -> Failure:
    try:
        return _decode_failure(line)
    except (msgspec.DecodeError, UnicodeError) as error:
        log.report(Corrupt(f"message {name}", f"its errors are not JSON ({error})"))
        return Failure(attempt=0, error=line[:LONGEST_ERROR])
