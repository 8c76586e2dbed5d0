"""A claim on PostgreSQL is one row: rows that somebody has damaged, large ones, and old ones."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from queue_calls import ME, OTHER, claim, new_messages, settle
from queue_locations import PostgresQueues, list_in_view
from servers import PostgresServer

from jobsync.core.messages import FINISHED, LIVE, Transition
from jobsync.queue.backend import MAX_MESSAGE, NewMessage, QueueBackend, Settlement
from jobsync.queue.single_message import StoredResult
from jobsync.queue.sql.postgres import PostgresBackend

DAMAGES = {
    "no payloads": "payloads = NULL",
    "too few payloads": "payloads = payloads[1:1]",
    "no deliveries": "deliveries = NULL",
    "too few returned": "returned = ARRAY[0]",
    "too many errors": "errors = ARRAY['a', 'b', 'c', 'd', 'e', 'f']",
    "no attempts": "max_attempts = ARRAY[]::integer[]",
    "no times": "enqueued = NULL, positions = NULL",
    "too few outcomes": "outcomes = 'o'",
    "no outcomes": "outcomes = ''",
    "too many outcomes": "outcomes = outcomes || 'ooo'",
    "unknown outcomes": "outcomes = 'o' || '?' || 'o'",
    "too few deadlines": "dues = ARRAY[now() - interval '1 hour']",
    "too many deadlines": "dues = array_fill(now(), ARRAY[9])",
    "an id twice": "ids[2] = ids[1]",
    "an empty id": "ids[2] = NULL",
    "no ids": "ids = ARRAY[]::text[]",
    "wrong counts": "open = 99, completed = -5",
    "tables in arrays": "deliveries = ARRAY[[1, 2], [3, 4]], payloads = ARRAY[['a'], ['b']]",
    "impossible deliveries": "deliveries = ARRAY[2147483647, -1, 0]",
    "impossible counters": "deliveries = ARRAY[2147483647, 1, 1], returned = ARRAY[-9, 7, -1]",
}


@pytest.fixture
async def location(postgres: PostgresServer) -> AsyncIterator[PostgresQueues]:
    """An empty schema."""
    location = PostgresQueues(postgres.url)
    yield location
    await location.close()


@pytest.fixture
async def backend(location: PostgresQueues) -> QueueBackend:
    """The backend of an empty queue."""
    return await location.open("emails")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_claim_affects_no_other(
    location: PostgresQueues, backend: QueueBackend, damage: str
) -> None:
    """It can be shown, extended, settled, cancelled and ended, with others, and it is closed."""
    await backend.push(new_messages(*"abcdef"))
    damaged, whole = await claim(backend, 3), await claim(backend, 3, session=OTHER)
    nonce = damaged[0].receipt.claim
    location.execute(f"UPDATE {{}}.jobsync_claim SET {damage} WHERE claim = %(nonce)s", nonce=nonce)
    directory = location.open_directory()
    shown = {info.id: info for info in await backend.browse("claimed")}
    assert set("def") <= set(shown)
    assert {each.id for each in await directory.find("abcdef")} >= set("def")
    assert len(await directory.list("emails", "queue", after="", limit=10)) >= 3
    in_view = list_in_view(location)
    assert {in_view[name][2] for name in "def"} == {"claimed"}
    await directory.read_contents()
    await backend.count()
    receipts = [each.receipt for each in (*damaged, *whole)]
    assert (await backend.extend(receipts, 60))[3:] == [True] * 3
    assert await settle(backend, whole[:1], "complete") == [True]
    answers = await settle(backend, [damaged[0], whole[1]], "retry")
    assert answers[1] is True
    await settle(backend, damaged[1:2], "complete")
    for name in "abc":
        await backend.get(name)
        await backend.delete(name)
    await backend.cancel("c")
    ended = await backend.end_claims({ME, OTHER})
    assert whole[2].id in [each.id for each in ended]
    assert (await backend.count()).get("claimed", 0) == 0
    for suspects in (False, True):
        again = await claim(backend, suspects=suspects)
        assert all(await settle(backend, again, "complete"))
    states = {info.id: info.state for state in FINISHED for info in await backend.browse(state)}
    assert {states[name] for name in "def"} == {"completed"}
    assert not [state for state in LIVE if await backend.browse(state)]


async def test_handlers_that_return_nothing_settle_a_whole_claim_in_one_update(
    backend: QueueBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a result they are completed by one statement, too."""
    statements: list[str] = []
    run = PostgresBackend._run

    async def record(self: PostgresBackend, name: str, parameters: Any) -> list[Any]:
        statements.append(name)
        return await run(self, name, parameters)

    monkeypatch.setattr(PostgresBackend, "_run", record)
    await backend.push(new_messages(*"abcd"))
    first, second = await claim(backend, 2), await claim(backend, 2)
    statements.clear()
    assert await settle(backend, first, "complete") == [True, True]
    assert statements == ["complete_claim"]
    statements.clear()
    batch = [
        Settlement(receipt=second[0].receipt, move="complete"),
        Settlement(receipt=second[1].receipt, move="complete", result=StoredResult("1")),
    ]
    assert await backend.settle(batch) == [True, True]
    assert statements == ["complete_with_results"]


async def test_a_claim_is_limited_in_bytes(backend: QueueBackend) -> None:
    """To eight megabytes, however many are requested; one message is always claimed."""
    text = "x" * (MAX_MESSAGE - 2)
    batch = [NewMessage(id=f"{n:02}", value=text, max_attempts=4) for n in range(40)]
    await backend.push(batch)
    first = await backend.claim(100, session=ME, visibility=60)
    assert (len(first.messages), first.more) == (32, True)
    second = await backend.claim(100, session=ME, visibility=60)
    assert (len(second.messages), second.more) == (8, False)


async def test_the_payloads_of_a_claim_are_dropped_when_all_are_settled(
    location: PostgresQueues, backend: QueueBackend
) -> None:
    """And not before; how each was settled stays."""
    await backend.push(new_messages("a", "b", "c"))
    one, two, three = await claim(backend)
    query = (
        "SELECT outcomes, payloads IS NULL, closed IS NULL, open, completed FROM {}.jobsync_claim"
    )
    await settle(backend, [two], "complete")
    await settle(backend, [one], "snooze")
    assert location.execute(query) == [("sco", False, True, 1, 1)]
    await settle(backend, [three], "bury")
    assert location.execute(query) == [("scd", True, False, 0, 1)]


async def test_settlements_of_one_claim_do_not_disturb_each_other(
    location: PostgresQueues,
) -> None:
    """Many at once, in different ways, by several processes: each is recorded, and none twice."""
    backends = [await location.open("emails") for _ in range(4)]
    names = [f"{n:03}" for n in range(240)]
    await backends[0].push(new_messages(*names))
    messages = await claim(backends[0], 240)
    moves: tuple[Transition, ...] = ("complete", "complete", "retry", "bury", "release", "cancel")
    groups = [messages[start : start + 5] for start in range(0, 240, 5)]
    settlements = [
        settle(backends[(number + copy) % 4], group, moves[number % 6])
        for number, group in enumerate(groups)
        # Each is sent twice at once.
        for copy in range(2)
    ]
    extensions = [backends[n].extend([each.receipt for each in messages], 60) for n in range(4)]
    ends = [backends[n].end_claims({"nobody"}) for n in range(4)]
    answers, *_ = await asyncio.gather(
        asyncio.gather(*settlements), asyncio.gather(*extensions), asyncio.gather(*ends)
    )
    assert answers == [[True] * 5] * 96
    assert await backends[0].count() == {
        "completed": 80,
        "waiting": 80,
        "dead": 40,
        "cancelled": 40,
    }
    rows = location.execute("SELECT open, completed, closed IS NULL FROM {}.jobsync_claim")
    assert rows == [(0, 80, False)]


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
async def test_many_claim_settle_and_end_at_once(postgres: PostgresServer, level: str) -> None:
    """Every message is completed, by exactly one accepted settlement, whatever comes between."""
    escaped = level.replace(" ", r"\ ")
    options = quote(f"-c default_transaction_isolation={escaped}")
    location = PostgresQueues(f"{postgres.url}?options={options}")
    backends = [await location.open("emails") for _ in range(4)]
    assert location.execute("SHOW default_transaction_isolation") == [(level,)]
    names = [f"{n:04}" for n in range(600)]
    await backends[0].push(new_messages(*names, max_attempts=1_000))
    accepted: Counter[str] = Counter()

    async def work(number: int) -> None:
        backend, chance = backends[number % 4], random.Random(number)
        session = f"worker-{number}"
        while len(accepted) < len(names):
            limit, suspects = chance.choice([1, 3, 20]), chance.random() < 0.4
            found = await claim(backend, limit, session=session, suspects=suspects)
            chance.shuffle(found)
            half = len(found) // 2
            await backend.extend([each.receipt for each in found[half:]], 60)
            moves: list[Transition] = [chance.choice(["complete", "retry"]) for _ in range(2)]
            parts = (found[:half], found[half:])
            answers = await asyncio.gather(*map(settle, [backend] * 2, parts, moves))
            for part, move, answer in zip(parts, moves, answers, strict=True):
                if move == "complete":
                    accepted.update(
                        each.id for each, done in zip(part, answer, strict=True) if done
                    )

    async def disturb() -> None:
        chance = random.Random(0)
        while len(accepted) < len(names):
            await backends[0].end_claims({f"worker-{chance.randrange(8)}"})
            await asyncio.sleep(0.01)

    async with asyncio.timeout(120):
        await asyncio.gather(*(work(number) for number in range(8)), disturb())
    assert accepted == Counter(names)
    assert await backends[0].count() == {"completed": len(names)}
    await location.close()


async def test_old_suspects_are_found_one_after_the_other(
    backend: QueueBackend, location: PostgresQueues
) -> None:
    """Found: a claim after a suspect's looked at the last two minutes only, and saw no others."""
    await backend.push(new_messages("a", "b", "c"))
    await claim(backend)
    await backend.end_claims({ME})
    location.execute("UPDATE {}.jobsync_message SET due = due - interval '5 minutes'")
    for is_more in (True, True, False):
        (suspect,) = await claim(backend, 1, suspects=True)
        await settle(backend, [suspect], "complete")
        claimed = await backend.claim(10, session=ME, visibility=60)
        assert claimed.suspects is is_more


async def test_a_claim_beside_those_of_others_says_that_there_may_be_more(
    location: PostgresQueues, backend: QueueBackend, postgres: PostgresServer
) -> None:
    """Messages of tasks that others are about to claim are left to them, and it tries again."""
    await backend.push(new_messages(*"abcd", task="send"))
    found = []
    ((schema,),) = location.execute("SELECT '{}'")
    lock = f"SELECT id FROM {schema}.jobsync_message ORDER BY position LIMIT 2 FOR UPDATE"
    with psycopg.connect(postgres.url) as other:
        assert len(other.execute(lock.encode()).fetchall()) == 2
        for limit in (2, 10):
            claimed = await backend.claim(limit, session=ME, visibility=60, tasks=["send"])
            found.append(([each.id for each in claimed.messages], claimed.more))
    assert found == [([], True), (["c", "d"], False)]
    assert [each.id for each in await claim(backend, tasks=["send"])] == ["a", "b"]


@pytest.mark.parametrize("move", [None, "retry", "complete", "cancel", "bury"])
@pytest.mark.parametrize("is_partial", [False, True])
async def test_a_push_in_doubt_is_found_whatever_became_of_its_messages(
    backend: QueueBackend, move: Transition | None, *, is_partial: bool
) -> None:
    """Waiting, claimed or finished, in a claim that is closed or not."""
    assert isinstance(backend, PostgresBackend)
    await backend.push(new_messages("a", "b", "c"))
    assert await backend._exists(["a", "z"])
    # Nobody has ever claimed it.
    assert await backend.cancel("c") is not None
    assert await backend._exists(["c"])
    messages = await claim(backend, 2 if is_partial else 1)
    assert await backend._exists(["a"])
    if move is not None:
        assert await settle(backend, messages[:1], move) == [True]
    assert await backend._exists(["a"])
    assert not await backend._exists(["z"])
