"""Messages as records: which ones a view has, in pages, by filters and by ids."""

from collections.abc import Collection, Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest

from jobsync.core.keys import escape
from jobsync.queue import message_records
from jobsync.queue.backend import MessageInfo, QueuePart
from jobsync.queue.message import Failure
from jobsync.queue.message_records import MessageRecords

PREFIX = "record/"


def build_info(name: str, **facts: Any) -> MessageInfo:
    """Return a message of the queue."""
    known: dict[str, Any] = dict.fromkeys(("due", "claimed", "finished"))
    known |= {
        "queue": "default/tasks",
        "id": name,
        "state": "ready",
        "value": {"n": int(name[-2:])},
    }
    known |= {"attempts": 1, "deliveries": 2, "max_attempts": 4, "errors": (), "session": ""}
    known |= {"is_suspect": False, "enqueued": 1.0, "seen": 2.0, "cursor": name}
    return MessageInfo(**(known | facts))


class Directory:
    """A few messages, which it lists by id."""

    def __init__(self, infos: Sequence[MessageInfo]) -> None:
        self._infos = infos
        self.pages = 0

    async def find(self, ids: Collection[str]) -> list[MessageInfo]:
        return [info for info in self._infos if info.id in ids]

    async def list(
        self, queue: str, part: QueuePart, *, after: str, limit: int
    ) -> list[MessageInfo]:
        assert (queue, part) == ("default/tasks", "queue")
        self.pages += 1
        return [info for info in self._infos if info.id > after][:limit]


def build_view(
    monkeypatch: pytest.MonkeyPatch, *infos: MessageInfo, part: QueuePart = "queue"
) -> tuple[MessageRecords, Directory]:
    """Return the view of a queue."""
    directory = Directory(infos)
    monkeypatch.setattr(message_records, "open_directory", lambda *_: directory)
    store, components = cast("Any", Mock()), cast("Any", None)
    return MessageRecords(store, components, "default/tasks", part), directory


def key(name: str) -> str:
    """Return the key of a record."""
    return f"{PREFIX}{escape(name)}"


NAMES = [f"id {number:02}" for number in range(10)]


@pytest.mark.parametrize(
    ("where", "after", "limit", "found"),
    [
        (None, "", 100, NAMES),
        (None, "", 4, NAMES[:4]),
        (None, NAMES[3], 4, NAMES[4:8]),
        (None, NAMES[-1], 4, []),
        ({"data.n": {"$gte": 7}}, "", 3, NAMES[7:]),
        ({"data.n": {"$gte": 7}}, "", 2, NAMES[7:9]),
        ({"data.n": {"$gte": 7}}, NAMES[8], 2, NAMES[9:]),
        ({"data.n": {"$in": [0, 5, 9]}}, "", 2, [NAMES[0], NAMES[5]]),
        ({"data.n": 77}, "", 3, []),
    ],
)
async def test_a_listing_has_all_messages_that_match(
    monkeypatch: pytest.MonkeyPatch, where: Any, after: str, limit: int, found: list[str]
) -> None:
    """However many pages without any are between them, and never more than asked for."""
    view, _ = build_view(monkeypatch, *map(build_info, NAMES))
    start = key(after) if after else ""
    records = await view.scan(PREFIX, after=start, limit=limit, where=where)
    assert [record.key for record in records] == [key(name) for name in found]


@pytest.mark.parametrize(("size", "pages"), [(9, 1), (10, 2), (11, 2)])
async def test_a_listing_ends_with_a_page_that_is_not_full(
    monkeypatch: pytest.MonkeyPatch, size: int, pages: int
) -> None:
    """Nothing is asked for after it, nor when enough were found."""
    infos = [build_info(f"id {number:02}") for number in range(size)]
    view, directory = build_view(monkeypatch, *infos)
    assert len(await view.scan(PREFIX, limit=10)) == min(size, 10)
    assert directory.pages == 1
    await view.scan(PREFIX, limit=10, where={"data.n": 77})
    assert directory.pages == 1 + pages


@pytest.mark.parametrize(
    ("after", "until", "found"),
    [
        ("", "", NAMES),
        ("", NAMES[3], NAMES[:3]),
        (NAMES[1], NAMES[3], NAMES[2:3]),
        (NAMES[2], NAMES[3], []),
        (NAMES[7], "", NAMES[8:]),
    ],
)
async def test_a_range_is_between_its_ends(
    monkeypatch: pytest.MonkeyPatch, after: str, until: str, found: list[str]
) -> None:
    """Without both of them."""
    view, _ = build_view(monkeypatch, *map(build_info, NAMES))
    ends: dict[str, Any] = {
        name: key(end) for name, end in (("after", after), ("until", until)) if end
    }
    heads = await view.heads(PREFIX, **ends)
    assert [head.key for head in heads] == [key(name) for name in found]


STATES: list[Any] = ["ready", "waiting", "blocked", "claimed", "completed", "dead", "cancelled"]


@pytest.mark.parametrize(
    ("part", "found"), [("queue", STATES[:4]), ("dead", ["dead"])], ids=["queue", "dead"]
)
async def test_a_view_has_the_messages_of_its_queue_and_part(
    monkeypatch: pytest.MonkeyPatch, part: QueuePart, found: list[str]
) -> None:
    """By id too; the others are not there, in the order of the keys."""
    infos = [build_info(f"{state} 01", state=state) for state in STATES]
    strange = build_info(f"{found[0]} 02", state=found[0], queue="emails/tasks")
    view, _ = build_view(monkeypatch, *reversed(infos), strange, part=part)
    keys = [key(info.id) for info in (strange, *infos)]
    records = await view.get_many([*keys, key("absent 01")])
    assert [None if record is None else record.value["status"] for record in records] == [
        None,
        *(state if state in found else None for state in STATES),
        None,
    ]
    assert [record.key for record in records if record] == [key(f"{state} 01") for state in found]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"state": "waiting"}),
        ({}, {"deliveries": 3}),
        ({"state": "claimed"}, {"state": "claimed", "deliveries": 3}),
    ],
)
async def test_a_change_of_the_state_or_a_delivery_is_another_version(
    monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Each alone."""
    versions = set()
    for facts in (one, other):
        view, _ = build_view(monkeypatch, build_info("id 01", **facts))
        (head,) = await view.heads(PREFIX)
        versions.add(head.version)
    assert len(versions) == 2


async def test_the_last_error_of_a_message_is_shown_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are there too; a message without any has none."""
    errors = (Failure(1, "first"), Failure(2, "last"))
    view, _ = build_view(monkeypatch, build_info("id 01", errors=errors), build_info("id 02"))
    failed, fresh = await view.scan(PREFIX)
    assert failed.value["error"] == "last"
    assert [each["error"] for each in failed.value["errors"]] == ["first", "last"]
    assert (fresh.value["error"], [*fresh.value["errors"]]) == (None, [])
    assert fresh.value["claimed_by"] is None
