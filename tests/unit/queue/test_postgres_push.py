"""New messages as PostgreSQL takes them: each column of each message, whatever its characters."""

from typing import Any

import msgspec
import pytest

from jobsync.core.codec import Json
from jobsync.errors import Invalid
from jobsync.queue.backend import NewMessage
from jobsync.queue.sql import postgres_push
from jobsync.queue.sql.message_rows import encode_payloads
from jobsync.queue.sql.postgres_push import CopyRows, build_parameters
from jobsync.stores.sql import as_array

VALUES: list[Json] = [{"n": 1}, "a\\b\tc\nd", "ä\u2028", None, [0.5, True], r"\N"]
MESSAGES = [
    NewMessage(
        id=f"id\\{n}",
        value=value,
        max_attempts=n + 2,
        timeout=None if n % 2 else n + 0.5,
        task=["", "send", "a\\b"][n % 3],
    )
    for n, value in enumerate(VALUES)
]
PLACES: list[tuple[float, float | None]] = [(0, None), (7, None), (0, 99.5), (7, 99.5)]


def read_rows(rows: CopyRows) -> list[list[str | None]]:
    """Return the columns of rows as the server reads the text of a COPY."""

    def unescape(text: str) -> str | None:
        if text == r"\N":
            return None
        parts = text.split("\\\\")
        assert not any("\\" in part.replace("\\t", "").replace("\\n", "") for part in parts)
        return "\\".join(part.replace("\\t", "\t").replace("\\n", "\n") for part in parts)

    text = b"".join(rows).decode()
    assert text.endswith("\n")
    return [[unescape(each) for each in line.split("\t")] for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("part", [1, 2, 5, 200])
@pytest.mark.parametrize("is_encoded", [False, True])
def test_rows_have_all_columns_of_their_messages(
    monkeypatch: pytest.MonkeyPatch, part: int, *, is_encoded: bool
) -> None:
    """In order, in parts, and again when they are sent again."""
    monkeypatch.setattr(postgres_push, "_PART", part)
    payloads = encode_payloads(MESSAGES) if is_encoded else None
    rows = CopyRows("a\\mails", MESSAGES, payloads)
    expected = [
        [
            "a\\mails",
            each.id,
            f"{each.lane}ready",
            "epoch",
            "now",
            msgspec.json.encode(each.value).decode(),
            str(each.max_attempts),
            None if each.timeout is None else str(each.timeout),
            each.task,
            str(each.format),
        ]
        for each in MESSAGES
    ]
    for _ in range(2):
        assert len([*rows]) == -(-len(MESSAGES) // part)
        assert read_rows(rows) == expected


def test_payloads_that_were_encoded_before_are_sent_as_they_are() -> None:
    """Each with its own message."""
    rows = CopyRows("mails", MESSAGES[:3], [b"1", b"2", b"3"])
    assert [columns[5] for columns in read_rows(rows)] == ["1", "2", "3"]


def test_a_value_that_cannot_be_stored_ends_the_rows() -> None:
    """The push fails as a whole."""
    wrong = msgspec.structs.replace(MESSAGES[0], value=float("nan"))
    with pytest.raises(Invalid):
        [*CopyRows("mails", [*MESSAGES, wrong])]


@pytest.mark.parametrize(("delay", "at"), PLACES)
@pytest.mark.parametrize("message", MESSAGES[:2])
def test_one_message_is_sent_with_all_that_it_has(
    message: NewMessage, delay: float, at: float | None
) -> None:
    """By name; a delay is a number with a fraction, as the statement expects."""
    placed = msgspec.structs.replace(message, delay=delay, at=at)
    found = build_parameters("mails", [placed], [b"[1]"])
    assert found == {
        "queue": "mails",
        "id": message.id,
        "payload": "[1]",
        "delay": float(delay),
        "at": at,
        "max_attempts": message.max_attempts,
        "timeout": message.timeout,
        "task": message.task,
        "lane": message.lane,
        "format": message.format,
    }
    assert type(found["delay"]) is float


def test_many_messages_are_sent_in_columns() -> None:
    """Each has its own value in each of them."""
    messages = [
        msgspec.structs.replace(each, delay=n, at=None if n < 3 else n + 0.25)
        for n, each in enumerate(MESSAGES)
    ]
    payloads = encode_payloads(messages)
    columns: dict[str, list[Any]] = {
        "ids": [each.id for each in messages],
        "payloads": [each.decode() for each in payloads],
        "delays": [float(n) for n in range(len(messages))],
        "times": [None, None, None, 3.25, 4.25, 5.25],
        "max_attempts": [2, 3, 4, 5, 6, 7],
        "timeouts": [0.5, None, 2.5, None, 4.5, None],
        "tasks": ["", "send", "a\\b", "", "send", "a\\b"],
    }
    arrays = {name: as_array(values) for name, values in columns.items()}
    assert build_parameters("mails", messages, payloads) == {"queue": "mails", **arrays}
