"""Pushes with keys whose replies were lost, with a database of the test."""

from collections.abc import Mapping, Sequence

import pytest

from jobsync import OutcomeUnknown
from jobsync.queue.backend import NewMessage
from jobsync.queue.sql import placed_push
from jobsync.queue.sql.placed_push import PlacedPush


class Database:
    """Has messages, and loses the next reply if it is told to."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.loses_reply = False
        self.is_blind = False
        """Whether nobody can look into it."""
        self.pushes = PlacedPush(self._place, self._exists, self._find_holders)

    async def push(self, name: str, key: str, payload: str = "1") -> Mapping[str, str]:
        """Push one message."""
        message = NewMessage(id=name, value=payload, max_attempts=4, key=key)
        return await self.pushes.push([message], [payload.encode()])

    async def push_in_doubt(self, name: str, key: str) -> None:
        """Push a message that arrives, which the caller does not learn."""
        self.loses_reply = self.is_blind = True
        with pytest.raises(OutcomeUnknown):
            await self.push(name, key)
        self.loses_reply = self.is_blind = False

    async def _place(
        self, new_messages: Sequence[NewMessage], payloads: Sequence[bytes]
    ) -> Mapping[str, str]:
        assert len(new_messages) == len(payloads)
        self.messages += [each.id for each in new_messages]
        if self.loses_reply:
            raise OutcomeUnknown("queue/emails", "lost")
        return {}

    async def _exists(self, ids: Sequence[str]) -> bool:
        return not self.is_blind and not {*ids}.isdisjoint(self.messages)

    async def _find_holders(self, keys: Sequence[str]) -> Mapping[str, str]:
        del keys
        return {}


async def test_a_push_is_taken_for_one_in_doubt_once() -> None:
    """Then it is known to have arrived, and the same content is another message."""
    database = Database()
    await database.push_in_doubt("a", "k")
    assert await database.push("b", "k") == {"b": "a"}
    assert await database.push("c", "k") == {}
    assert database.messages == ["a", "c"]


async def test_other_content_ends_the_doubt_about_a_key() -> None:
    """It holds the key from then on, whatever has become of the first."""
    database = Database()
    await database.push_in_doubt("a", "k")
    assert await database.push("b", "k", "2") == {}
    assert await database.push("c", "k") == {}
    assert database.messages == ["a", "b", "c"]


async def test_a_later_push_in_doubt_takes_the_place_of_the_one_before() -> None:
    """Who pushes again asks for the later one."""
    database = Database()
    await database.push_in_doubt("a", "k")
    database.messages.clear()
    await database.push_in_doubt("b", "k")
    assert await database.push("c", "k") == {"c": "b"}


async def test_the_latest_doubts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of them; older ones are forgotten."""
    monkeypatch.setattr(placed_push, "_MAX_KEYS", 2)
    database = Database()
    for name in "abc":
        await database.push_in_doubt(name, f"key-{name}")
    found = [await database.push(f"again-{name}", f"key-{name}") for name in "cba"]
    assert found == [{"again-c": "c"}, {"again-b": "b"}, {}]
