"""Messages that are pushed in parts: what became of each is known."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync.errors import Incomplete, OutcomeUnknown, Unavailable
from jobsync.queue import enqueue
from jobsync.queue.backend import NewMessage
from jobsync.queue.enqueue import build_messages, enqueue_messages

ERRORS = (OutcomeUnknown("queue", "reply lost"), Unavailable("queue", "down"))


class Backend:
    """Refuses one of the parts that are pushed to it."""

    queue = "default/tasks"

    def __init__(self, refused: int, error: Exception) -> None:
        self.parts: list[list[str]] = []
        self.held: set[str] = set()
        self._refused = refused
        self._error = error

    def split(self, new_messages: Sequence[NewMessage]) -> list[Sequence[NewMessage]]:
        """Return parts of ten."""
        return [new_messages[n : n + 10] for n in range(0, len(new_messages), 10)]

    async def push(self, new_messages: Sequence[NewMessage]) -> dict[str, str]:
        """Push a part."""
        self.parts.append([message.id for message in new_messages])
        if len(self.parts) > self._refused:
            raise self._error
        return {name: f"holder of {name}" for name in self.parts[-1] if name in self.held}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("refused", [1, 2])
async def test_each_message_is_in_one_list(
    monkeypatch: pytest.MonkeyPatch, refused: int, error: Exception
) -> None:
    """Written, unknown or not sent, in order, and nothing is sent after a part that was refused."""
    ids = [f"id-{number:02}" for number in range(25)]
    backend = Backend(refused, error)
    monkeypatch.setattr(enqueue, "open_backend", lambda *_: backend)
    new_messages = [NewMessage(id=name, value={}, max_attempts=1) for name in ids]
    monkeypatch.setattr(enqueue, "build_messages", lambda *_, **__: new_messages)
    components = SimpleNamespace(ids=SimpleNamespace(records=lambda _: ids))
    database = SimpleNamespace(components=components, resource=lambda _: None, store=None)
    with pytest.raises(Incomplete) as caught:
        await enqueue_messages(cast("Any", database), "tasks", [{}] * 25, max_attempts=1)
    found = caught.value
    assert [*found.written, *found.unknown, *found.unsent] == ids
    assert [*found.written] == [name for part in backend.parts[:-1] for name in part]
    is_unknown = isinstance(error, OutcomeUnknown)
    assert [*found.unknown] == (backend.parts[-1] if is_unknown else [])
    assert len(backend.parts) == refused + 1


@pytest.mark.parametrize("held", [[], [3], [12], [24], [0, 9, 10, 24]])
async def test_a_message_that_was_not_added_has_the_id_of_the_one_that_holds_its_key(
    monkeypatch: pytest.MonkeyPatch, held: list[int]
) -> None:
    """In whichever part it was pushed."""
    ids = [f"id-{number:02}" for number in range(25)]
    backend = Backend(3, ERRORS[0])
    backend.held = {ids[number] for number in held}
    monkeypatch.setattr(enqueue, "open_backend", lambda *_: backend)
    new_messages = [NewMessage(id=name, value={}, max_attempts=1) for name in ids]
    monkeypatch.setattr(enqueue, "build_messages", lambda *_, **__: new_messages)
    components = SimpleNamespace(ids=SimpleNamespace(records=lambda _: ids))
    database = SimpleNamespace(components=components, resource=lambda _: None, store=None)
    found = await enqueue_messages(cast("Any", database), "tasks", [{}] * 25)
    assert [len(part) for part in backend.parts] == [10, 10, 5]
    assert found == [
        f"holder of {name}" if number in held else name for number, name in enumerate(ids)
    ]


NOW = datetime(2027, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.0, None, None, 4)),
        ({"delay": 5}, (5.0, None, None, 4)),
        ({"delay": timedelta(days=1, seconds=5)}, (86_405.0, None, None, 4)),
        ({"delay": timedelta(milliseconds=1500)}, (1.5, None, None, 4)),
        ({"at": NOW}, (0.0, NOW.timestamp(), None, 4)),
        ({"at": NOW - timedelta(days=9)}, (0.0, NOW.timestamp() - 9 * 86_400, None, 4)),
        (
            {"at": NOW.replace(tzinfo=timezone(timedelta(hours=2)))},
            (0.0, NOW.timestamp() - 7200, None, 4),
        ),
        ({"at": NOW, "delay": 0}, (0.0, NOW.timestamp(), None, 4)),
        ({"at": None, "delay": 5}, (5.0, None, None, 4)),
        ({"timeout": 7}, (0.0, None, 7.0, 4)),
        ({"timeout": None}, (0.0, None, None, 4)),
        ({"max_attempts": 9}, (0.0, None, None, 9)),
        ({"max_attempts": None}, (0.0, None, None, 4)),
    ],
)
def test_options_are_those_of_each_message(options: Any, expected: tuple[Any, ...]) -> None:
    """In seconds, whichever way a time was written."""
    records = SimpleNamespace(now=NOW.timestamp)
    resource: Any = SimpleNamespace(records=records, validate=lambda data, _: data)
    messages = build_messages(resource, [{"n": 1}, {"n": 2}], ["a", "b"], options, 4)
    assert [(each.id, each.value) for each in messages] == [("a", {"n": 1}), ("b", {"n": 2})]
    for each in messages:
        assert (each.delay, each.at, each.timeout, each.max_attempts) == expected
