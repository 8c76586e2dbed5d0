"""Two queues in one database, with the same tasks, groups, keys and sessions: each is its own."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from queue_locations import PostgresQueues, SqliteQueues, find_empty_location

from jobsync.core.messages import FINISHED, LIVE, Transition
from jobsync.queue.backend import Message, NewMessage, Settlement
from jobsync.queue.limits import QueueLimits
from jobsync.queue.settings import QueueOrder
from jobsync.queue.single_message import ProgressReport, StoredResult
from jobsync.queue.sql.common import SqlBackend

ME, DEAD = "worker-1.a", "worker-2.b"
MINE, OTHERS = "mine", "others"
TABLES = ("message", "claim", "finished", "result", "progress", "group", "key", "limit", "pause")
MUCH = QueueLimits(rate=1e6, burst=1_000_000)
LIMITS = QueueLimits(
    rate=1e6, burst=1_000_000, max_concurrency=1_000, group_concurrency=2, tasks={"send": MUCH}
)
HOUR = 3600.0

Location = SqliteQueues | PostgresQueues


class Queue:
    """A queue with messages in every state, at every place."""

    def __init__(self, location: Location, name: str, backend: SqlBackend) -> None:
        self.location = location
        self.name = name
        self.backend = backend
        self.claimed: list[Message] = []
        self.ids: list[str] = []

    @classmethod
    async def fill(cls, location: Location, name: str) -> "Queue":
        """Open an empty queue, and fill it."""
        backend = await location.open(name, None, "priority", LIMITS)
        assert isinstance(backend, SqlBackend)
        queue = cls(location, name, backend)
        for move in ("complete", "cancel", "bury"):
            await queue.push(move, key=f"key-{move}")
            await queue.settle(move, await queue.claim())
        location.advance(HOUR)
        await queue.push("suspect")
        await queue.claim(session=DEAD)
        await backend.end_claims({DEAD})
        await queue.push_all(
            queue.build("head", group="g"),
            queue.build("second-head", group="g"),
            queue.build("follower", group="g"),
            queue.build("held", key="k"),
        )
        queue.claimed = await queue.claim()
        await queue.push("lost")
        await queue.claim(session=DEAD)
        reports = [ProgressReport(each.receipt, 0.5, "half") for each in queue.claimed]
        await backend.report_progress(reports)
        day = "interval '25 hours'" if isinstance(location, PostgresQueues) else "90000"
        location.execute(f"UPDATE {{}}.jobsync_progress SET reported = reported - {day}")
        await queue.push_all(
            queue.build("ready"),
            queue.build("urgent", priority=5),
            queue.build("task", task="send"),
            queue.build("urgent-task", task="send", priority=5),
            queue.build("late", delay=1),
            queue.build("late-task", task="send", delay=1),
            queue.build("later", delay=10 * HOUR),
            queue.build("later-key", key="later", key_ttl=HOUR, delay=10 * HOUR),
        )
        # Some delays are over.
        location.advance(2)
        return queue

    def build(self, label: str, **options: Any) -> NewMessage:
        """Return a new message."""
        return NewMessage(id=f"{self.name}-{label}", value=label, max_attempts=4, **options)

    async def push_all(self, *new_messages: NewMessage) -> Mapping[str, str]:
        """Push messages; return who holds their keys."""
        self.ids += [each.id for each in new_messages]
        return await self.backend.push(new_messages)

    async def push(self, label: str, **options: Any) -> Mapping[str, str]:
        """Push a message."""
        return await self.push_all(self.build(label, **options))

    async def claim(self, session: str = ME, **options: Any) -> list[Message]:
        """Claim all that can be claimed."""
        claimed = await self.backend.claim(100, session=session, visibility=60, **options)
        return claimed.messages

    async def settle(self, move: Transition, messages: list[Message]) -> None:
        """Settle messages in one way."""
        result = StoredResult("1") if move == "complete" else None
        batch = [Settlement(receipt=each.receipt, move=move, result=result) for each in messages]
        assert all(await self.backend.settle(batch))

    def dump(self) -> dict[str, list[Any]]:
        """Return all its rows."""
        is_own = f"queue = '{self.name}' OR queue LIKE '{self.name}#%'"
        if isinstance(self.location, PostgresQueues):
            is_own = is_own.replace("%", "%%")
        query = "SELECT * FROM {}.jobsync_%s WHERE %s"
        return {name: sorted(map(repr, self.execute(query % (name, is_own)))) for name in TABLES}

    def execute(self, query: str) -> list[Any]:
        """Run a statement behind the library's back."""
        return self.location.execute(query)


@pytest.fixture(params=["sqlite", "postgres"])
async def location(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Location]:
    """An empty database."""
    location = find_empty_location(request, tmp_path)
    assert isinstance(location, SqliteQueues | PostgresQueues)
    yield location
    await location.close()


async def claim_in_order(mine: Queue, order: QueueOrder, **options: Any) -> int:
    """Claim in an order; return how many."""
    backend = await mine.location.open(mine.name, None, order, LIMITS)
    claimed = await backend.claim(100, session=ME, visibility=60, **options)
    return len(claimed.messages)


async def replace(mine: Queue, label: str, **options: Any) -> int:
    """Replace the message that holds a key; return whether it was replaced or added."""
    holders = await mine.push(f"new-{label}", key=label, replace=True, **options)
    return len(holders) + 1


async def take_key(mine: Queue) -> int:
    """Push a message with a key whose message is finished."""
    assert await mine.push("again", key="key-bury") == {}
    return 1


async def for_all(mine: Queue, work: Callable[[str], Coroutine[Any, Any, Any]]) -> int:
    """Do something with each message; return with how many it was done."""
    done = [await work(name) for name in mine.ids]
    return len([each for each in done if each not in (None, False, "absent", "claimed")])


async def extend(mine: Queue) -> int:
    """Extend all claims."""
    return sum(await mine.backend.extend([each.receipt for each in mine.claimed], HOUR))


async def settle(mine: Queue, move: Transition) -> int:
    """Settle the claimed messages, of which two are the heads of a group."""
    await mine.settle(move, mine.claimed)
    return len(mine.claimed)


async def add_to_group(mine: Queue) -> int:
    """Add to a group that is known, and to one that is new."""
    for number, group in enumerate("gh"):
        await mine.push(f"added-{number}", group=group)
    return 2


async def end_group(mine: Queue) -> int:
    """End all messages of a group, one after the other."""
    await mine.settle("complete", mine.claimed)
    followers = [each for each in await mine.claim() if "follower" in each.id]
    await mine.settle("complete", followers)
    return len(followers)


async def forget_keys(mine: Queue) -> int:
    """Remove keys that nobody holds."""
    return (await mine.backend.forget_keys(after="", limit=100)).removed


async def resume(mine: Queue) -> int:
    """Pause and resume."""
    return int(await mine.backend.pause("because")) + int(await mine.backend.resume())


async def report(mine: Queue) -> int:
    """Report progress, and clear some of it."""
    await mine.backend.report_progress(
        [ProgressReport(each.receipt, 0.9, "soon") for each in mine.claimed]
    )
    await mine.backend.clear_progress([each.id for each in mine.claimed[:1]])
    return len(mine.claimed)


Work = Callable[[Queue], Coroutine[Any, Any, Any]]

WRITES: dict[str, Work] = {
    "claim the oldest": lambda mine: claim_in_order(mine, "fifo"),
    "claim the newest": lambda mine: claim_in_order(mine, "lifo"),
    "claim by priority": lambda mine: claim_in_order(mine, "priority"),
    "claim tasks": lambda mine: claim_in_order(mine, "fifo", tasks=["send", ""]),
    "claim the newest of tasks": lambda mine: claim_in_order(mine, "lifo", tasks=["send"]),
    "claim suspects": lambda mine: claim_in_order(mine, "fifo", suspects=True),
    "extend": extend,
    "complete": lambda mine: settle(mine, "complete"),
    "retry": lambda mine: settle(mine, "retry"),
    "bury": lambda mine: settle(mine, "bury"),
    "end claims": lambda mine: mine.backend.end_claims({DEAD}),
    "redrive": lambda mine: mine.backend.redrive(),
    "purge": lambda mine: mine.backend.purge([*LIVE, *FINISHED]),
    "forget completed": lambda mine: mine.backend.forget("completed", older_than=60),
    "forget completed and answers": lambda mine: mine.backend.forget("completed", older_than=600),
    "forget dead": lambda mine: mine.backend.forget("dead", older_than=60),
    "forget keys": forget_keys,
    "take a key": take_key,
    "replace": lambda mine: replace(mine, "later", key_ttl=2 * HOUR),
    "replace what is claimed": lambda mine: replace(mine, "k"),
    "add to groups": add_to_group,
    "end a group": end_group,
    "pause": lambda mine: mine.backend.pause("because"),
    "resume": resume,
    "report": report,
    "cancel": lambda mine: for_all(mine, mine.backend.cancel),
    "delete": lambda mine: for_all(mine, mine.backend.delete),
    "run now": lambda mine: for_all(mine, mine.backend.run_now),
}


@pytest.mark.parametrize("work", WRITES.values(), ids=WRITES)
async def test_what_is_done_to_one_queue_changes_no_other(location: Location, work: Work) -> None:
    """Not a row of it."""
    mine, others = await Queue.fill(location, MINE), await Queue.fill(location, OTHERS)
    before = others.dump()
    assert all(before[name] for name in TABLES if name != "pause")
    assert await work(mine)
    assert others.dump() == before


async def test_a_message_is_changed_by_its_own_queue_only(location: Location) -> None:
    """Another one does not know its id."""
    mine, others = await Queue.fill(location, MINE), await Queue.fill(location, OTHERS)
    before = others.dump()
    for name in others.ids:
        assert await mine.backend.get(name) is None
        assert await mine.backend.cancel(name) is None
        assert await mine.backend.delete(name) == "absent"
        assert not await mine.backend.run_now(name)
    assert await mine.backend.redrive(others.ids) == 0
    assert others.dump() == before


async def test_what_is_shown_of_a_queue_is_its_own(location: Location) -> None:
    """Its messages in each state, its numbers, its holders, its groups."""
    mine, others = await Queue.fill(location, MINE), await Queue.fill(location, OTHERS)
    await others.backend.purge(["waiting", "completed"])
    await others.settle("complete", others.claimed)
    await others.push("stranger", group="theirs")
    await others.claim(session="worker-3.c")
    await others.backend.pause("because")
    await others.backend.end_claims({DEAD})
    for table in ("message", "claim"):
        location.execute(f"UPDATE {{}}.jobsync_{table} SET format = 9 WHERE queue = 'others'")
    shown = [each.id for state in (*LIVE, *FINISHED) for each in await mine.backend.browse(state)]
    assert sorted(shown) == sorted(mine.ids)
    counts = await mine.backend.count()
    assert sum(counts.values()) == len(mine.ids)
    assert counts == {
        state: len(await mine.backend.browse(state))
        for state in (*LIVE, *FINISHED)
        if await mine.backend.browse(state)
    }
    assert await mine.backend.list_holders() == [ME, DEAD]
    assert await mine.backend.find_newer() == {}
    assert sum((await others.backend.find_newer()).values()) > 0
    directory = location.open_directory()
    head = await directory.find_head(MINE, "g")
    assert head is not None
    assert head.queue == MINE
    assert await directory.find_head(MINE, "theirs") is None
    assert await directory.find_head(OTHERS, "theirs") is not None
    live = await directory.list(MINE, "queue", after="", limit=100)
    dead = await directory.list(MINE, "dead", after="", limit=100)
    assert {each.queue for each in (*live, *dead)} == {MINE}
    assert len(live) == sum(counts.get(state, 0) for state in LIVE)
    assert len(dead) == counts["dead"]
