"""Stories in which the requests of one call have one fault after the other.

All faults of a request are tried alone, in pairs and in threes: a copy that gets lost, then a
refusal, then the copy that arrives late. Whoever sends again must remember all of them.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from queue_fleet import OPEN_STORE

from jobsync import Conflict, Misconfigured, OutcomeUnknown, Put, Unavailable
from jobsync.core.messages import Transition
from jobsync.database.locks import Lock
from jobsync.queue.backend import Message, NewMessage, Settlement
from jobsync.queue.opening import open_backend
from jobsync.stores.memory import MemoryStore
from jobsync.testing import NodeDatabase, World, check_answers, check_messages, connect
from jobsync.testing.invariants import Violation, require
from jobsync.testing.recording import RecordingBackend
from jobsync.testing.stories import Story
from jobsync.testing.weather import FAULTS, Fault
from jobsync.testing.world import Node

__all__ = ["STORIES", "appends", "locks", "messages", "removals", "writes"]


_LATEST = 120.0
"""Seconds after which no ordained request is under way."""
_MINUTE = 60.0
_STUCK = 300.0
"""Seconds for which nobody waits for a lock, unless it is stuck."""
_PASSING = tuple(fault for fault in FAULTS if fault != "forbidden")
_ERRORS = (Misconfigured, OutcomeUnknown, Unavailable)
"""What a call raises because of faults."""


def list_series() -> Iterator[tuple[Fault, ...]]:
    """Yield each fault, each pair of faults, and all threes."""
    for length in (1, 2, 3):
        yield from itertools.product(FAULTS, repeat=length)


async def writes(world: World) -> None:
    """Records are created, replaced and deleted; the reads that settle them have faults too."""
    shared = MemoryStore(components=world.components)
    node = world.node("a")
    store = connect(node, shared)
    (link,) = node.links
    for number, series in enumerate(list_series()):
        key = f"record/{number}"
        made = None if number % 3 == 0 else await store.create(key, 0)
        base = await store.delete(made) if made is not None and number % 3 == 1 else made
        link.ordain("write", *series)
        link.ordain("get", *world.dice.choices(FAULTS, k=world.dice.choice((0, 1, 2))))
        # Their outcomes are recorded, and compared with the commits.
        with contextlib.suppress(Conflict, *_ERRORS):
            is_delete = base is not None and number % 2
            await store.write([base.delete() if base and is_delete else Put(key, 1, base)])
        link.mend()
    await asyncio.sleep(_LATEST)


async def appends(world: World) -> None:
    """Lines are in the history once if it was reported, and never if they were refused."""
    shared = MemoryStore(components=world.components)
    node = world.node("a")
    store = connect(node, shared)
    (link,) = node.links
    told: dict[int, str] = {}
    for number, series in enumerate(list_series()):
        link.ordain("append", *series)
        try:
            await store.append("lines", [number])
            told[number] = "stored"
        except (Misconfigured, Unavailable):
            told[number] = "refused"
        except OutcomeUnknown:
            told[number] = "unknown"
        link.mend()
    await asyncio.sleep(_LATEST)
    found = [entry.value for entry in await shared.read("lines", limit=10_000)]
    for number, outcome in told.items():
        allowed = {"stored": {1}, "refused": {0}, "unknown": {0, 1}}[outcome]
        if found.count(number) not in allowed:
            what = f"line {number} is there {found.count(number)} times, its writer heard {outcome}"
            world.violations.append(Violation("C5", what))


async def removals(world: World) -> None:
    """What is dropped, buried or discarded is gone when that is reported, and nothing else is."""
    shared = MemoryStore(components=world.components)
    node = world.node("a")
    store = connect(node, shared)
    (link,) = node.links
    for number, series in enumerate(list_series()):
        prefix, stream = f"gone/{number}/", f"stream/{number}"
        await shared.write([Put(f"{prefix}{name}", 0) for name in ("drop", "bury", "keep")])
        buried = await shared.get(f"{prefix}bury")
        assert buried is not None
        await shared.delete(buried)
        await shared.append(stream, [number])
        removals: dict[str, Callable[[], Awaitable[object]]] = {
            "drop": lambda prefix=prefix: store.drop([f"{prefix}drop"]),  # type: ignore[misc]
            "bury": lambda prefix=prefix: store.bury(prefix, older_than=-1.0),  # type: ignore[misc]
            "discard": lambda stream=stream: store.discard(stream, older_than=-86_400.0),  # type: ignore[misc]
        }
        for call, remove in removals.items():
            link.ordain(call, *series)
            await _repeat(remove)
        link.mend()
        left = await shared.get_many(
            [f"{prefix}{name}" for name in ("drop", "bury", "keep")], tombstones=True
        )
        is_right = [record is None for record in left] == [True, True, False]
        require(is_right, "C6", f"after {series} {left} are left")
        require(not await shared.read(stream), "C6", f"after {series} a line is left")
    await asyncio.sleep(_LATEST)


async def _repeat(work: Callable[[], Awaitable[object]]) -> None:
    """Call something until it reports success."""
    is_done = False
    while not is_done:
        with contextlib.suppress(*_ERRORS):
            await work()
            is_done = True
        await asyncio.sleep(1)


async def messages(world: World) -> None:
    """Every call of a queue backend has faults in a row, as a worker makes them."""
    shared = OPEN_STORE.get()(world)
    world.expect(check_messages, check_answers)
    node = world.node("a")
    backend = RecordingBackend(node, open_backend(connect(node, shared), "q", node.components))
    (link,) = node.links
    for number, series in enumerate(list_series()):
        call = ("push", "claim", "extend", "settle", "end_claims", "redrive", "forget")[number % 7]
        verdict = ("complete", "fail", "fail", "release")[number % 4]
        link.ordain(call, *series)
        pushed = [NewMessage(id=f"m{number}-{at}", value=number, max_attempts=3) for at in range(2)]
        for work in (
            lambda: backend.push(pushed),  # noqa: B023 - called at once
            lambda: _work(backend, verdict),  # noqa: B023 - called at once
            backend.end_claims,
            backend.redrive,
            lambda: backend.forget("completed", older_than=3600.0),
        ):
            with contextlib.suppress(*_ERRORS):
                await work()
        link.mend()
    await asyncio.sleep(_LATEST)


async def _work(backend: RecordingBackend, verdict: str) -> None:
    """Claim messages, extend their claims and settle them; give up what gets no reply."""
    claimed = await backend.claim(5, session="worker-1", visibility=30.0)
    if not claimed.messages:
        return
    await backend.extend([message.receipt for message in claimed.messages], 40.0)
    await backend.settle([_settle(message, verdict) for message in claimed.messages])


def _settle(message: Message, verdict: str) -> Settlement:
    """Return a settlement; a message that fails is retried, or buried after its last attempt."""
    match verdict:
        case "complete":
            return Settlement(receipt=message.receipt, move="complete")
        case "release":
            return Settlement(receipt=message.receipt, move="release")
    move: Transition = "bury" if message.attempt >= message.max_attempts else "retry"
    return Settlement(receipt=message.receipt, move=move, error="as the story demands")


async def locks(world: World) -> None:
    """Nodes take a lock again and again, give up waiting, and are cancelled, with faults in a row.

    At most one holds it, no fence comes twice, and it is never stuck while all sessions live.
    """
    shared = MemoryStore(components=world.components)
    held: dict[str, Lock] = {}
    fences: list[int] = []

    async def take(database: NodeDatabase, timeout: float | None) -> None:
        name = database.node.name
        async with database.open_storage("test").lock("door", timeout=timeout) as lock:
            held[name] = lock
            holders = [each for each, other in held.items() if other.lasts]
            require(len(holders) <= 1, "L1", f"{holders} hold the lock")
            require(lock.fence > max(fences, default=0), "L2", f"{lock.fence} follows {fences}")
            fences.append(lock.fence)
            try:
                await database.node.clock.sleep(world.dice.uniform(0, 2))
            finally:
                del held[name]

    async def use_again(node: Node, database: NodeDatabase, faults: Sequence[Fault]) -> None:
        # Keeps the session alive, so that its end does not free the lock.
        async with database.open_storage("test").lock(f"own {node.name}"):
            for _ in range(12):
                # Rarely that of the session.
                link = node.links[world.dice.random() < 0.1]
                link.ordain("write", *world.dice.choices(faults, k=2))
                link.ordain("get", *world.dice.choices(faults, k=world.dice.choice((0, 0, 1))))
                taking = node.run(take(database, world.dice.choice((None, 5.0))))
                await asyncio.wait([taking], timeout=world.dice.uniform(0, 8))
                if world.dice.random() < 0.5:
                    taking.cancel()
                await asyncio.wait([taking], timeout=_STUCK)
                require(taking.done(), "L3", f"{node.name} waits for a lock for {_STUCK:g} s")
                _raise_unexpected(taking)
                # Whatever is under way arrives before anybody else takes the lock, at times.
                await asyncio.sleep(world.dice.choice((0.0, 0.0, _LATEST)))
            for each in node.links:
                each.mend()
            # A release that got no reply is sent again in the background.
            await asyncio.sleep(_LATEST)
            await _take_in_time(node, take(database, None))
            await _take_in_time(node, take(database, None))

    async def use(node: Node) -> None:
        async with NodeDatabase(node, shared) as database:
            await use_again(node, database, FAULTS if node.name == "a" else _PASSING)

    names = "abc"[: 1 + world.seed % 3]
    users = {name: node.run(use(node)) for name in names for node in [world.node(name)]}
    await asyncio.wait(users.values())
    # The database of a process that is denied access may fail, and leaves no lock behind.
    with contextlib.suppress(Misconfigured):
        await users.pop("a")
    await asyncio.gather(*users.values())


async def _take_in_time(node: Node, taking: Coroutine[Any, Any, None]) -> None:
    task = node.run(taking)
    await asyncio.wait([task], timeout=_MINUTE)
    require(task.done(), "L3", f"{node.name} does not get the lock within a minute")
    await task


def _raise_unexpected(task: "asyncio.Task[None]") -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, (TimeoutError, *_ERRORS)):
        raise error


STORIES: tuple[Story, ...] = (writes, appends, removals, messages, locks)
