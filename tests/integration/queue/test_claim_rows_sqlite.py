"""A claim on SQLite is one row: rows that somebody has damaged, large ones, and old ones."""

import asyncio
import itertools
import json
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from queue_calls import ME, OTHER, claim, new_messages, settle
from queue_locations import SqliteQueues, list_in_view
from waiting import now, until

from jobsync import Components, Database, Event, QueuePlugin, Unavailable
from jobsync.queue.backend import MAX_MESSAGE, QueueBackend
from jobsync.queue.sql.sqlite_places import SQL

UNREADABLE = {
    "no JSON": "messages = '['",
    "no list": "messages = '{\"a\": 1}'",
    "no arrays": "messages = '[1, \"x\", null]'",
    "too few items": "messages = '[[\"a\"]]'",
    "errors": "errors = '{'",
    "times": "times = '{', outcomes = 'coo', open = 2, completed = 1",
    "deadlines": "dues = '[\"x\"]'",
}
READABLE = {
    "no payloads": "payloads = NULL",
    "too few outcomes": "outcomes = 'o'",
    "too many outcomes": "outcomes = outcomes || 'ooo'",
    "too few deadlines": "dues = '[0]'",
    "too many errors": 'errors = \'["a", "b", "c", "d"]\'',
    "wrong counts": "open = 99, completed = -5",
}


@pytest.fixture
async def location(tmp_path: Path) -> AsyncIterator[SqliteQueues]:
    """An empty file."""
    location = SqliteQueues(tmp_path / "queues.db")
    yield location
    await location.close()


@pytest.fixture
async def backend(location: SqliteQueues) -> QueueBackend:
    """The backend of an empty queue."""
    return await location.open("emails")


@pytest.mark.parametrize("damage", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_claim_that_cannot_be_read_is_set_aside(
    location: SqliteQueues, damage: str
) -> None:
    """It is reported, it stays in the table, and it affects no other claim."""
    components = Components.system()
    reported: list[Event] = []
    components.events.on("store:record-set-aside", reported.append)
    backend = await location.open("emails", components)
    await backend.push(new_messages(*"abcdef"))
    damaged, whole = await claim(backend, 3), await claim(backend, 3, session=OTHER)
    nonce = damaged[0].receipt.claim
    location.execute(f"UPDATE {{}}.jobsync_claim SET {damage} WHERE claim = :nonce", nonce=nonce)
    assert {info.id for info in await backend.browse("claimed")} >= set("def")
    directory = location.open_directory()
    assert {each.id for each in await directory.find("abcdef")} >= set("def")
    assert len(await directory.list("emails", "queue", after="", limit=10)) >= 3
    in_view = list_in_view(location)
    assert {in_view[name][2] for name in "def"} == {"claimed"}
    receipts = [each.receipt for each in (*damaged, *whole)]
    assert await backend.extend(receipts, 60) == [False] * 3 + [True] * 3
    assert await settle(backend, [damaged[0], whole[0]], "retry") == [False, True]
    assert await backend.cancel("a") is None
    assert await backend.delete("a") != "deleted"
    assert {each.id for each in await backend.end_claims({ME, OTHER})} == {"e", "f"}
    assert await backend.count() == {"waiting": 3}
    assert {event["key"] for event in reported} == {f"claim {nonce}"}
    await backend.forget("completed", older_than=0)
    query = "SELECT 1 FROM {}.jobsync_claim WHERE claim = :nonce"
    assert location.execute(query, nonce=nonce) == [(1,)]


@pytest.mark.parametrize("damage", READABLE.values(), ids=READABLE)
async def test_a_damaged_claim_is_ended(
    location: SqliteQueues, backend: QueueBackend, damage: str
) -> None:
    """What is missing in its row is read as something that fails no statement."""
    await backend.push(new_messages(*"abc"))
    messages = await claim(backend)
    location.execute(f"UPDATE {{}}.jobsync_claim SET {damage}")
    await backend.browse("claimed")
    list_in_view(location)
    await backend.extend([each.receipt for each in messages], 60)
    assert await settle(backend, messages[:1], "complete") == [True]
    list_in_view(location)
    ended = await backend.end_claims({ME})
    assert [each.id for each in ended] == ["b", "c"]
    assert await backend.count() == {"completed": 1, "waiting": 2}


async def test_a_damaged_claim_keeps_no_other_from_being_forgotten(
    location: SqliteQueues, backend: QueueBackend
) -> None:
    """Of claims whose messages were completed one after the other."""
    await backend.push(new_messages(*"abcd"))
    claims = [await claim(backend, 2, visibility=1000) for _ in range(2)]
    for messages in zip(*claims, strict=True):
        await settle(backend, [*messages], "complete")
        location.advance(100)
    location.execute("UPDATE jobsync_claim SET errors = '{' WHERE low = 'a'")
    assert await backend.forget("completed", older_than=150) == 1
    assert "c" not in {each.id for each in await backend.browse("completed")}


async def test_errors_count_for_the_size_of_a_claim(
    location: SqliteQueues, backend: QueueBackend
) -> None:
    """They are in its row, too."""
    await backend.push(new_messages(*(f"{n:02}" for n in range(12))))
    location.execute("UPDATE jobsync_message SET errors = :text", text="x" * 2**20)
    first = await backend.claim(100, session=ME, visibility=60)
    assert (len(first.messages), first.more) == (8, True)


@pytest.mark.parametrize("priorities", [(0,), (1, 0), (1, 0, -1)], ids=str)
async def test_a_claim_is_limited_in_bytes(
    location: SqliteQueues, priorities: tuple[int, ...]
) -> None:
    """To eight megabytes, however many are requested; one message is always claimed."""
    backend = await location.open("emails", order="priority")
    text = "x" * (MAX_MESSAGE - 2)
    for number in range(40):
        priority = priorities[number % len(priorities)]
        await backend.push(new_messages(f"{number:02}", value=text, priority=priority))
    first = await backend.claim(100, session=ME, visibility=60)
    assert (len(first.messages), first.more) == (32, True)
    second = await backend.claim(100, session=ME, visibility=60)
    assert (len(second.messages), second.more) == (8, False)


@pytest.mark.parametrize("size", [1, 10_000])
async def test_payloads_are_dropped_when_all_are_settled(
    location: SqliteQueues, backend: QueueBackend, size: int
) -> None:
    """And not before, small or large; how each was settled stays."""
    await backend.push(new_messages("a", "b", "c", value="é" * size))
    one, two, three = await claim(backend)
    query = """
    SELECT outcomes, open, completed, closed IS NULL, payloads IS NOT NULL OR EXISTS (
      SELECT 1 FROM {}.jobsync_claim_payload AS p WHERE p.number = c.number
    ) FROM {}.jobsync_claim AS c
    """
    await settle(backend, [two], "complete")
    await settle(backend, [one], "snooze")
    assert location.execute(query) == [("sco", 1, 1, 1, 1)]
    (shown,) = await backend.browse("claimed")
    assert shown.value == "é" * size
    await settle(backend, [three], "bury")
    assert location.execute(query) == [("scd", 0, 1, 0, 0)]
    (dead,), (again,) = await backend.browse("dead"), await claim(backend)
    assert dead.value == again.value == "é" * size


@pytest.mark.parametrize("size", [1, 10_000])
async def test_a_purge_drops_the_payloads_of_all_claims(
    location: SqliteQueues, backend: QueueBackend, size: int
) -> None:
    """Of several claims, small or large; nothing of them stays in the file."""
    await backend.push(new_messages(*"abc", value="x" * size))
    for _ in range(3):
        await claim(backend, 1)
    assert await backend.purge(["claimed"]) == 3
    assert location.execute("SELECT payloads FROM {}.jobsync_claim") == [(None,)] * 3
    assert location.execute("SELECT count(*) FROM {}.jobsync_claim_payload") == [(0,)]


async def test_each_message_has_its_own_time_of_completion(
    location: SqliteQueues, backend: QueueBackend
) -> None:
    """By it messages are listed, page by page, and forgotten, also while the claim is open."""
    await backend.push(new_messages(*"abcd"))
    messages = await claim(backend)
    for message in messages[:3]:
        await settle(backend, [message], "complete")
        location.advance(100)
    listed, cursor = [], ""
    while page := await backend.browse("completed", after=cursor, limit=1):
        listed += page
        cursor = page[-1].cursor
    assert [each.id for each in listed] == ["a", "b", "c"]
    times = [each.finished for each in listed]
    assert all(b - a > 50 for a, b in itertools.pairwise(times) if a and b)
    assert await backend.forget("completed", older_than=150) == 2
    assert [each.id for each in await backend.browse("completed")] == ["c"]
    assert await settle(backend, messages, "complete") == [True] * 4


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("find_lapsed", "jobsync_claim_open"),
        ("find_next_lapse", "jobsync_claim_open"),
        ("find_old", "jobsync_claim_completed"),
        ("find_partly_old", "jobsync_claim_times"),
        ("forget_answers", "jobsync_claim_answers"),
        ("browse_claimed", "jobsync_claim_open"),
        ("browse_completed", "jobsync_claim_completed"),
        ("find", "jobsync_claim_ids"),
        ("find", "jobsync_claim_id "),
        ("count", "jobsync_claim_completed"),
    ],
)
async def test_statements_use_an_index(
    location: SqliteQueues, backend: QueueBackend, name: str, index: str
) -> None:
    """However many claims are kept; no statement reads all of them."""
    del backend
    names = ("queue", "boot", "mono", "now", "limit", "before", "answered", "after", "since")
    values = {**dict.fromkeys((*names, "delay_boot", "delay_now"), 1), "dead": "[]"}
    rows = location.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", **values, ids=json.dumps(["a"]))
    steps = [row[-1] for row in rows]
    assert [step for step in steps if index in f"{step} "], steps
    assert not [step for step in steps if step in {"SCAN c", "SCAN jobsync_claim"}]


async def test_a_handlers_connection_may_return_anything(
    location: SqliteQueues, backend: QueueBackend, tmp_path: Path
) -> None:
    """What its factories make of rows and texts does not concern the claims."""
    del location
    await backend.push(new_messages("a", "b"))
    messages = await claim(backend)
    assert backend.transactions is not None
    with closing(sqlite3.connect(tmp_path / "queues.db", check_same_thread=False)) as own:
        own.row_factory, own.text_factory = lambda *_: {}, bytes
        for message in messages:
            assert await backend.transactions.complete_within(own, message.receipt)
        own.commit()
    assert await backend.count() == {"completed": 2}


async def test_a_damaged_claim_hides_no_message_of_another(
    location: SqliteQueues, backend: QueueBackend
) -> None:
    """Although its ids are before and after that of the message."""
    await backend.push(new_messages("a", "c"))
    assert len(await claim(backend)) == 2
    await backend.push(new_messages("b"))
    assert len(await claim(backend)) == 1
    location.execute("UPDATE jobsync_claim SET errors = '{' WHERE low = 'a'")
    assert await backend.cancel("b") is not None
    assert await backend.cancel("a") is None


async def test_a_transaction_writes_only_into_the_file_of_its_queue(
    backend: QueueBackend, tmp_path: Path
) -> None:
    """It makes no new one in the place of one that was removed."""
    path = tmp_path / "queues.db"
    path.rename(path.with_suffix(".moved"))
    transactions: Any = backend.transactions
    with pytest.raises(Unavailable, match="no transaction could begin"):
        await transactions.begin(600.0, is_blocking=False)
    assert not path.exists()
    path.with_suffix(".moved").rename(path)
    opened = transactions._open()
    opened.end_guard()
    assert opened.execute("PRAGMA synchronous").fetchone() == (2,)
    opened.close()


async def test_a_transaction_that_was_cut_ends_its_turn(backend: QueueBackend) -> None:
    """The next one does not wait until its handler has noticed."""
    transactions: Any = backend.transactions
    async with asyncio.timeout(60):
        first = await transactions.begin(600.0, is_blocking=False)
        first.stop_timer()
        first.cut()
        second = await transactions.begin(600.0, is_blocking=False)
        second.stop_timer()
        await first.close()
        # The end of the first is not that of the second's turn.
        third = asyncio.create_task(transactions.begin(600.0, is_blocking=False))
        await asyncio.sleep(0)
        assert not third.done()
        await second.close()
        last = await third
        last.stop_timer()
        await last.close()


async def test_a_transaction_that_could_not_begin_ends_its_turn(
    backend: QueueBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one begins, also after a caller that did not wait for its own."""
    transactions: Any = backend.transactions
    is_begun, may_begin = threading.Event(), threading.Event()
    begin = transactions._begin

    def fail(_: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    def begin_late(connection: sqlite3.Connection) -> None:
        begin(connection)
        is_begun.set()
        may_begin.wait()

    async with asyncio.timeout(60):
        with monkeypatch.context() as patch:
            patch.setattr(transactions, "_begin", fail)
            with pytest.raises(Unavailable, match="no transaction could begin"):
                await transactions.begin(600.0, is_blocking=False)
            patch.setattr(transactions, "_begin", begin_late)
            unwanted = asyncio.create_task(transactions.begin(600.0, is_blocking=False))
            assert await asyncio.to_thread(is_begun.wait, 30)
            unwanted.cancel()
            may_begin.set()
            with pytest.raises(asyncio.CancelledError):
                await unwanted
        opened = await transactions.begin(600.0, is_blocking=False)
        opened.stop_timer()
        await opened.close()
        await backend.push(new_messages("a"))


async def test_a_claim_that_cannot_be_ended_is_looked_at_now_and_then(
    location: SqliteQueues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its count says that something is open, and its outcomes that nothing is.

    Found: a worker claimed again and again, as fast as it could.
    """
    backend = await location.open("default/emails")
    await backend.push(new_messages("a", "b"))
    assert len(await claim(backend, session=OTHER)) == 2
    location.execute("UPDATE jobsync_claim SET outcomes = 'cc', due = 1")
    queue = QueuePlugin("emails", on_message=lambda _: None)
    async with Database(f"sqlite:///{tmp_path / 'queues.db'}", plugins=[queue]):
        worker, times = queue._get_backend(), []
        end_claims = worker.end_claims

        async def count(*args: Any, **options: Any) -> Any:
            times.append(now())
            return await end_claims(*args, **options)

        monkeypatch.setattr(worker, "end_claims", count)
        await until(lambda: len(times) >= 6, "it looks again")
    # At the start there are other reasons to look, too.
    assert times[5] - times[0] > 1
