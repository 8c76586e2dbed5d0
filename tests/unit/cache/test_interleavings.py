"""However reads and writes of one database overlap, no read is older than without a cache.

The store records its contents after every change. A read may return what was in the store at some
moment between its call and its return, and nothing else.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from chance import FakeClock, SeededRandomness
from hypothesis import given, settings
from hypothesis import strategies as st

from jobsync import (
    CachePlugin,
    Components,
    Database,
    Document,
    Events,
    Incomplete,
    JobsyncError,
    Resource,
    Unavailable,
)
from jobsync.cache.memory import MemoryCache
from jobsync.database import read_cache
from jobsync.database.read_cache import ReadGuard
from jobsync.stores.contract import LATEST_ARRIVAL, Change, Outcome, Put, Unknown
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.memory import MemoryStore

T = TypeVar("T")
Contents = dict[str, Any]

PREFIX = "data/tasks/"


class SlowStore(StoreDecorator):
    """A store whose requests and replies take some turns of the loop, as the test says.

    Args:
        inner: the store that does the work.
        delays: turns before and after each call, in the order of the calls; then none.
        fates: what becomes of each write that a test does not want to succeed.
    """

    def __init__(self, inner: MemoryStore, delays: list[tuple[int, int]], fates: list[str]) -> None:
        super().__init__(inner)
        self._delays = iter(delays)
        self._fates = iter(fates)
        self._late: set[asyncio.Task[None]] = set()
        self.history: list[Contents] = [{}]
        """The contents after each change."""

    async def around(self, call: str, sent: int, work: Callable[[], Awaitable[T]]) -> T:
        del call, sent
        before, after = next(self._delays, (0, 0))
        await _wait(before)
        result = await work()
        await _wait(after)
        return result

    async def write(self, changes: Sequence[Change]) -> list[Outcome]:
        before, after = next(self._delays, (0, 0))
        fate = next(self._fates, "applied") if _is_of_records(changes) else "applied"
        try:
            await _wait(before)
        except asyncio.CancelledError:
            # It was sent, and nobody waits for the reply.
            self._send_late(changes, before)
            raise
        match fate:
            case "unavailable":
                raise Unavailable(self.name, "it is broken")
            case "late":
                self._send_late(changes, before + after)
                return [Unknown("no reply") for _ in changes]
            case "lost":
                await self._apply(changes)
                return [Unknown("no reply") for _ in changes]
        outcomes = await self._apply(changes)
        await _wait(after)
        return outcomes

    async def drop(self, keys: Sequence[str]) -> None:
        before, after = next(self._delays, (0, 0))
        try:
            await _wait(before)
        except asyncio.CancelledError:
            self._start_late(self._drop(keys), before)
            raise
        await self._drop(keys)
        await _wait(after)

    async def settle(self) -> None:
        """Wait for writes that arrive late."""
        if self._late:
            await asyncio.wait(self._late)

    async def write_elsewhere(self, name: str, n: int) -> None:
        """Write a record as another process does."""
        key = f"{PREFIX}{name}"
        base = await self.inner.get(key, tombstones=True)
        await self._apply([Put(key, {"id": name, "n": n}, base)])

    def _send_late(self, changes: Sequence[Change], turns: int) -> None:
        self._start_late(self._apply(changes), turns)

    def _start_late(self, work: Coroutine[Any, Any, object], turns: int) -> None:
        self._late.add(asyncio.ensure_future(_run_later(work, turns)))

    async def _apply(self, changes: Sequence[Change]) -> list[Outcome]:
        outcomes = await self.inner.write(changes)
        if _is_of_records(changes):
            await self._note()
        return outcomes

    async def _drop(self, keys: Sequence[str]) -> None:
        await self.inner.drop(keys)
        await self._note()

    async def _note(self) -> None:
        records = await self.inner.scan(PREFIX)
        self.history.append({each.value["id"]: each.value["n"] for each in records})


def _is_of_records(changes: Sequence[Change]) -> bool:
    return any(change.key.startswith(PREFIX) for change in changes)


async def _run_later(work: Coroutine[Any, Any, object], turns: int) -> None:
    await _wait(2 * turns + 3)
    await work


async def _wait(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


READS: dict[str, tuple[Callable[[Resource, str], Awaitable[Any]], Callable[[Contents, str], Any]]]
READS = {
    "get": (lambda tasks, name: tasks.get(name), lambda now, name: now.get(name)),
    "exists": (lambda tasks, name: tasks.exists(name), lambda now, name: name in now),
    "get_many": (
        lambda tasks, name: tasks.get_many([name, "a", name]),
        lambda now, name: [now.get(name), now.get("a"), now.get(name)],
    ),
    "list": (lambda tasks, _: tasks.list(), lambda now, _: [now[name] for name in sorted(now)]),
    "list_ids": (lambda tasks, _: tasks.list_ids(), lambda now, _: sorted(now)),
    "count": (lambda tasks, _: tasks.count(), lambda now, _: len(now)),
    "query": (
        lambda tasks, _: tasks.query({"n": {"$gt": 2}}),
        lambda now, _: [now[name] for name in sorted(now) if now[name] > 2],
    ),
    "page": (
        lambda tasks, _: tasks.page(size=2),
        lambda now, _: [now[name] for name in sorted(now)[:2]],
    ),
}
"""Each read, and what it returns for the contents of the store."""

WRITES: dict[str, Callable[[Resource, str, int], Awaitable[Any]]] = {
    "insert": lambda tasks, name, n: tasks.insert({"id": name, "n": n}),
    "update": lambda tasks, name, n: tasks.update(name, {"n": n}),
    "replace": lambda tasks, name, n: tasks.replace(name, {"n": n}),
    "upsert": lambda tasks, name, n: tasks.upsert({"id": name, "n": n}),
    "delete": lambda tasks, name, _: tasks.delete(name),
    "insert_many": lambda tasks, name, n: tasks.insert_many([{"id": name, "n": n}, {"n": n}]),
    "delete_many": lambda tasks, name, _: tasks.delete_many([name, "a"]),
    "delete_all": lambda tasks, *_: tasks.delete_all(),
    "drop": lambda tasks, name, _: tasks.records.keyspace.store.drop([f"{PREFIX}{name}"]),
}

CANCELLED = {"cancel": "upsert", "cancel drop": "drop"}
"""Writes whose caller gives up; they may arrive later."""

FORGETTING = ["clear one", "clear all", "restart"]
"""The ways in which a process that hears of another's write has its cache forget."""


def simplify(answer: Any) -> Any:
    """Return an answer of a resource as the model gives it."""
    match answer:
        case Document():
            return answer["n"]
        case list():
            return [simplify(each) for each in answer]
        case _ if hasattr(answer, "items"):
            return simplify(answer.items)
        case _:
            return answer


class Story:
    """Tasks that read and write one resource at once."""

    def __init__(self, store: SlowStore, tasks: Resource, cache: CachePlugin) -> None:
        self._store = store
        self._tasks = tasks
        self._cache = cache
        self._numbers = iter(range(1, 1_000))
        self._restarting = asyncio.Lock()

    async def run(self, steps: list[tuple[str, str]]) -> None:
        """Run the steps of one task; check every answer."""
        for verb, name in steps:
            if verb in READS:
                await self._read(verb, name)
            elif verb == "clear":
                self._cache.clear("tasks")
            elif verb in FORGETTING:
                await self._write_elsewhere(verb, name)
            elif verb in CANCELLED:
                await self._cancel(CANCELLED[verb], name)
            else:
                try:
                    await WRITES[verb](self._tasks, name, next(self._numbers))
                except JobsyncError:
                    # Refused, or its outcome is unknown: the history of the store tells.
                    continue

    async def _read(self, verb: str, name: str) -> None:
        read, expect = READS[verb]
        first = len(self._store.history) - 1
        answer = simplify(await read(self._tasks, name))
        allowed = [expect(contents, name) for contents in self._store.history[first:]]
        assert answer in allowed, f"{verb} {name}: {answer} is none of {allowed}"

    async def _write_elsewhere(self, verb: str, name: str) -> None:
        """Another process writes, and this one forgets what it has read."""
        async with self._restarting:
            if verb == "restart":
                await self._cache.stop()
            await self._store.write_elsewhere(name, next(self._numbers))
            match verb:
                case "restart":
                    await self._cache.start()
                case "clear one":
                    self._cache.clear("tasks")
                case _:
                    self._cache.clear()

    async def _cancel(self, verb: str, name: str) -> None:
        """Cancel a write while it is under way."""
        task = asyncio.ensure_future(WRITES[verb](self._tasks, name, next(self._numbers)))
        await _wait(3)
        task.cancel()
        await asyncio.wait([task])


async def run_story(
    lanes: list[list[tuple[str, str]]], delays: list[tuple[int, int]], fates: list[str]
) -> None:
    """Run some tasks at once on a resource with a cache."""
    components = Components(
        clock=FakeClock(), randomness=SeededRandomness(1), events=Events(lambda work: work.close())
    )
    store = SlowStore(MemoryStore(components=components), [], [])
    cache = CachePlugin(max_size=8)
    async with Database(connection=store, plugins=[cache], components=components) as database:
        tasks = await database.create_resource("tasks", {"n": "number|required"})
        store._delays, store._fates = iter(delays), iter(fates)
        story = Story(store, tasks, cache)
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(story.run(lane))
        await store.settle()
        await story.run([(verb, name) for verb in READS for name in "abc"])


story_steps = st.tuples(
    st.sampled_from(
        ["get", "get", "list", *READS, *WRITES, "upsert", "clear", *CANCELLED, *FORGETTING]
    ),
    st.sampled_from("abc"),
)
turns = st.integers(0, 4)


@settings(deadline=None, max_examples=300)
@given(
    lanes=st.lists(st.lists(story_steps, max_size=12), min_size=1, max_size=4),
    delays=st.lists(st.tuples(turns, turns), max_size=40),
    fates=st.lists(st.sampled_from(["applied"] * 3 + ["unavailable", "late", "lost"]), max_size=12),
)
def test_no_read_is_older_than_without_a_cache(
    lanes: list[list[tuple[str, str]]], delays: list[tuple[int, int]], fates: list[str]
) -> None:
    """Also after writes that fail, get no reply, arrive late or are cancelled."""
    asyncio.run(run_story(lanes, delays, fates))


@pytest.mark.parametrize("verb", READS)
async def test_an_answer_that_a_write_overtakes_is_not_kept(verb: str) -> None:
    """The read takes long; meanwhile a whole write happens."""
    lanes = [
        [("upsert", "a"), (verb, "a"), (verb, "a"), (verb, "a")],
        # There is no b, and so these take their time.
        [("get", "b")] * 4 + [("delete", "a")],
    ]
    for turn in range(12):
        await run_story(lanes, [(1, 1)] * turn + [(1, 30)] + [(1, 1)] * 40, [])


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("forget", FORGETTING)
async def test_an_answer_on_its_way_is_forgotten_too(verb: str, forget: str) -> None:
    """The read takes long; meanwhile another process writes, and the cache is told to forget."""
    lanes = [
        [("upsert", "a"), (verb, "a"), (verb, "a")],
        # There is no b, and so these take their time.
        [("get", "b")] * 4 + [(forget, "a")],
    ]
    for turn in range(6):
        await run_story(lanes, [(1, 1)] * turn + [(1, 30)] + [(1, 1)] * 40, [])


@pytest.mark.parametrize("verb", READS)
async def test_an_answer_that_comes_during_a_write_is_not_kept(verb: str) -> None:
    """The request of the write takes long; meanwhile reads are answered."""
    lanes = [
        [("upsert", "a"), ("update", "a"), (verb, "a")],
        [("get", "b")] * 4 + [(verb, "a"), ("get", "b")] * 20,
    ]
    for turn in range(12):
        await run_story(lanes, [(1, 0)] * turn + [(15, 0)] + [(1, 0)] * 60, [])


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("end", [*CANCELLED, "update"])
async def test_a_write_that_arrives_late_is_seen(verb: str, end: str) -> None:
    """It was cancelled, or got no reply, and is applied after the next reads."""
    lanes = [[("upsert", "a"), (end, "a"), *[(verb, "a")] * 12]]
    for turn in range(6):
        await run_story(lanes, [(0, 0)] * turn + [(5, 0)] + [(1, 0)] * 40, ["applied", "late"])


@pytest.mark.parametrize("keys", [None, frozenset({f"{PREFIX}a"}), frozenset({f"{PREFIX}b"})])
def test_answers_are_kept_again_when_the_last_late_write_cannot_arrive_any_more(
    keys: frozenset[str] | None,
) -> None:
    """Each write that may arrive late counts from its own end; other records are not in doubt."""
    clock = FakeClock()
    guard = ReadGuard(clock)
    ends: list[float] = []
    is_about_it = keys is None or f"{PREFIX}a" in keys
    for pause in (0.0, 1.0, LATEST_ARRIVAL - 1.0, LATEST_ARRIVAL, 5.0):
        clock.mono_seconds += pause
        guard.expect_late([f"{PREFIX}a"])
        ends.append(clock.mono_seconds + LATEST_ARRIVAL)
        for moment in (clock.mono_seconds, *ends, *(end - 0.5 for end in ends)):
            was, clock.mono_seconds = clock.mono_seconds, moment
            with guard.read(PREFIX, keys) as read:
                assert read.is_outdated == (is_about_it and moment < ends[-1])
            clock.mono_seconds = was


@pytest.mark.parametrize("keys", [None, frozenset({f"{PREFIX}a"}), frozenset({f"{PREFIX}b"})])
@pytest.mark.parametrize("began", ["before the cache", "with the cache"])
@pytest.mark.parametrize("doubt", ["late", "under way"])
def test_a_write_is_in_doubt_however_often_the_cache_is_restarted(
    doubt: str, began: str, keys: frozenset[str] | None
) -> None:
    """What a write may still change does not depend on who kept answers when it was sent."""
    clock = FakeClock()
    guard, cache = ReadGuard(clock), MemoryCache(ttl=60.0, max_size=10)
    if began == "with the cache":
        guard.attach(cache)
    written = guard.begin_write([f"{PREFIX}a"])
    if doubt == "late":
        guard.expect_late([f"{PREFIX}a"])
        guard.end_write(written)
    # A write that began without a cache may be about anything.
    is_about_it = keys is None or f"{PREFIX}a" in keys or (written is None and doubt != "late")
    for _ in range(3):
        guard.detach()
        guard.attach(cache)
        clock.mono_seconds += 1.0
        with guard.read(PREFIX, keys) as read:
            assert read.is_outdated is is_about_it
            guard.keep(read, f"{PREFIX}b", "an answer")
        assert cache.stats.size == int(not is_about_it)
    if doubt == "late":
        clock.mono_seconds += LATEST_ARRIVAL
    else:
        guard.end_write(written)
    with guard.read(PREFIX, keys) as read:
        assert not read.is_outdated


@pytest.mark.parametrize("keys", [None, frozenset({f"{PREFIX}a"}), frozenset({f"{PREFIX}b"})])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_record_is_in_doubt_until_the_last_of_its_writes_has_ended(
    order: Sequence[int], keys: frozenset[str] | None
) -> None:
    """Several tasks may write it at once, and their writes end in any order."""
    guard, cache = ReadGuard(FakeClock()), MemoryCache(ttl=60.0, max_size=10)
    guard.attach(cache)
    written = [{f"{PREFIX}a"}, {f"{PREFIX}a", f"{PREFIX}b"}, {f"{PREFIX}b"}]
    under_way = dict(enumerate(map(guard.begin_write, written)))
    for number in [*order, None]:
        about = frozenset().union(*(written[each] for each in under_way))
        with guard.read(PREFIX, keys) as read:
            assert read.is_outdated is bool(about if keys is None else about & keys)
        if number is not None:
            guard.end_write(under_way.pop(number))


@pytest.mark.parametrize("lost", [{"a"}, {"b"}, {"c"}, {"a", "c"}])
@pytest.mark.parametrize("verb", ["get", "list"])
async def test_each_record_of_a_batch_may_be_written_late(verb: str, lost: set[str]) -> None:
    """Whichever of its writes had no reply."""

    class LosingStore(MemoryStore):
        """Writes some records of a batch later than it says."""

        late: Sequence[Change] = ()

        async def write(self, changes: Sequence[Change]) -> list[Outcome]:
            if len(changes) < 3:
                return await super().write(changes)
            self.late = [each for each in changes if each.key.rpartition("/")[2] in lost]
            done = await super().write([each for each in changes if each not in self.late])
            answered = iter(done)
            return [
                Unknown("no reply") if each in self.late else next(answered) for each in changes
            ]

    store = LosingStore()
    components = Components(clock=FakeClock(), randomness=SeededRandomness(1), events=Events())
    cache = CachePlugin()
    async with Database(connection=store, plugins=[cache], components=components) as database:
        tasks = await database.create_resource("tasks")
        await tasks.insert_many([{"id": name, "n": 1} for name in "ab"])
        await tasks.insert({"id": "c", "n": 1})
        read, expect = READS[verb]
        with pytest.raises(Incomplete):
            await tasks.delete_many([*"abc"])
        contents = dict.fromkeys(lost, 1)
        for name in "abc":
            assert simplify(await read(tasks, name)) == expect(contents, name)
        await MemoryStore.write(store, store.late)
        for name in "abc":
            assert simplify(await read(tasks, name)) == expect({}, name)


def test_a_cache_is_of_the_process_that_has_attached_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child gets no answers of its parent; one that attaches it again has its own."""
    forks = 0
    monkeypatch.setattr(read_cache, "count_forks", lambda: forks)
    guard, cache = ReadGuard(FakeClock()), MemoryCache(ttl=60.0, max_size=10)
    for _ in range(2):
        guard.attach(cache)
        assert not guard.is_forked
        forks += 1
        assert guard.is_forked
