"""Messages that are pushed in parts: what became of each is known."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobsync.errors import Incomplete, OutcomeUnknown, Unavailable
from jobsync.queue import enqueue
from jobsync.queue.backend import NewMessage
from jobsync.queue.enqueue import enqueue_messages

ERRORS = (OutcomeUnknown("queue", "reply lost"), Unavailable("queue", "down"))


class Backend:
    """Refuses one of the parts that are pushed to it."""

    queue = "default/tasks"
    max_push = 10

    def __init__(self, refused: int, error: Exception) -> None:
        self.parts: list[list[str]] = []
        self._refused = refused
        self._error = error

    async def push(self, new_messages: Sequence[NewMessage]) -> dict[str, str]:
        """Push a part."""
        self.parts.append([message.id for message in new_messages])
        if len(self.parts) > self._refused:
            raise self._error
        return {}


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
