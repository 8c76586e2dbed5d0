"""When PostgreSQL is notified, and who is told, with a pool and connections of the test."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from chance import FakeClock, SeededRandomness, StandingClock
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from jobsync import (
    Applied,
    Components,
    Conflicted,
    Events,
    Misconfigured,
    OutcomeUnknown,
    Put,
    Record,
    Unavailable,
    Unknown,
)
from jobsync.core.clock import Clock
from jobsync.core.urls import PostgresUrl
from jobsync.stores.postgres import listener as listener_module
from jobsync.stores.postgres import schema as schema_module
from jobsync.stores.postgres import store as store_module
from jobsync.stores.postgres.listener import Listener
from jobsync.stores.postgres.notifier import Notifier, PoolAccess
from jobsync.stores.postgres.pool import ReplyLost
from jobsync.stores.postgres.schema import POSTGRES_STEPS
from jobsync.stores.postgres.store import PostgresStore

COOLDOWN = 0.05


def build_components(clock: Clock) -> Components:
    """Return components with this clock."""
    return Components(clock=clock, randomness=SeededRandomness(1), events=Events())


class RecordingPool:
    """Records what is notified, and when."""

    def __init__(self, clock: FakeClock) -> None:
        self.sent: list[tuple[float, str]] = []
        self._clock = clock

    async def run(self, statement: str, parameters: Any) -> list[Any]:
        """Record a notification."""
        assert "pg_notify" in statement
        self.sent += [(self._clock.mono_seconds, topic) for topic in parameters[1]]
        return []


async def let_run() -> None:
    """Run all tasks that can."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [ReplyLost("gone"), Unavailable("server", "gone")])
async def test_a_notification_that_was_lost_is_sent_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pauses that grow to a second. Found: others learned of the change at their next poll."""
    clock = FakeClock()
    pool = RecordingPool(clock)
    notifier = Notifier(cast("Any", pool), "channel", build_components(clock), listens=True)
    failures: list[float] = []

    async def fail(statement: str, parameters: Any) -> list[Any]:
        failures.append(clock.mono_seconds)
        if len(failures) == 6:
            monkeypatch.undo()
        notifier.notify_later(["b"])
        del statement, parameters
        raise error

    monkeypatch.setattr(pool, "run", fail)
    notifier.notify_later(["a"])
    await until(lambda: pool.sent, "the notification is sent", 10)
    assert {topic for _, topic in pool.sent} == {"a", "b"}
    waits = [late - early for early, late in pairwise([*failures, pool.sent[0][0]])]
    assert waits == pytest.approx([COOLDOWN + pause for pause in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)])
    await notifier.close()


async def test_the_pauses_of_a_later_outage_begin_as_short_as_those_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if there was always something left to notify in between."""
    clock = FakeClock()
    pool = RecordingPool(clock)
    notifier = Notifier(cast("Any", pool), "channel", build_components(clock), listens=True)
    outcomes = ["fails", "fails", "fails", "works", "fails", "fails", "works", "works", "fails"]
    tried: list[float] = []

    async def run(statement: str, parameters: Any) -> list[Any]:
        del statement, parameters
        tried.append(clock.mono_seconds)
        outcome = outcomes.pop(0) if outcomes else "ends"
        if outcome != "ends":
            notifier.notify_later(["a"])
        if outcome == "fails":
            raise Unavailable("server", "gone")
        return []

    monkeypatch.setattr(pool, "run", run)
    notifier.notify_later(["a"])
    await until(lambda: len(tried) == 10, "all of them were tried", 10)
    waits = [late - early - COOLDOWN for early, late in pairwise(tried)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.0, 0.1, 0.2, 0.0, 0.0, 0.1], abs=1e-6)
    await notifier.close()


pauses = st.sampled_from([0.0, 0.001, 0.02, 0.05, 0.06, 0.2])


@settings(max_examples=60, deadline=None)
@given(
    changes=st.one_of(
        *(
            st.lists(st.tuples(pauses, st.sets(st.sampled_from(topics), min_size=1)), max_size=25)
            for topics in ("a", "abc")
        )
    ),
    closes=st.booleans(),
)
async def test_each_change_is_notified_soon_and_no_topic_too_often(
    changes: list[tuple[float, set[str]]], closes: bool
) -> None:
    """At once after a pause, else at the end of 50 ms; and before a store is closed."""
    clock = StandingClock()
    pool = RecordingPool(clock)
    notifier = Notifier(cast("Any", pool), "channel", build_components(clock), listens=True)
    made: list[tuple[float, str]] = []
    for pause, topics in changes:
        for _ in range(4):
            clock.move(pause / 4)
            await let_run()
        due = notifier.take_due(sorted(topics))
        pool.sent += [(clock.mono_seconds, topic) for topic in due]
        made += [(clock.mono_seconds, topic) for topic in topics]
        if later := topics.difference(due):
            notifier.notify_later(later)
        await let_run()
    if not closes:
        for _ in range(4):
            clock.move(COOLDOWN / 2)
            await let_run()
    await notifier.close()
    for at, topic in made:
        ends = [time for time, each in pool.sent if each == topic and time >= at]
        assert ends, "a change was not notified"
        # A quarter of the longest pause is how coarse the clock is.
        assert min(ends) <= at + COOLDOWN + 0.06
    for topic in {topic for _, topic in made}:
        times = sorted(time for time, each in pool.sent if each == topic)
        # Topics share a timer, so one that is deferred behind another may come a little early.
        step = 1 if {each for _, each in made} == {"a"} else 2
        last = times[-1] if closes else float("inf")
        for earlier, later_time in zip(times, times[step:], strict=False):
            assert later_time - earlier >= COOLDOWN - 1e-9 or later_time == last


class ScriptedConnection:
    """A connection that receives some notifications and is lost then."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self.listens_to: list[bytes] = []
        self.closed = False

    async def execute(self, statement: bytes) -> None:
        """Listen."""
        self.listens_to.append(statement)

    async def notifies(self) -> AsyncIterator[Any]:
        """Yield the notifications, then fail."""
        for note in self._notes:
            yield SimpleNamespace(payload=note)
        raise psycopg.OperationalError("the connection was lost")

    async def close(self) -> None:
        """Close it."""
        self.closed = True


class CountingClock(FakeClock):
    """Records how long the listener pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """Record it."""
        self.pauses.append(seconds)
        await super().sleep(seconds)


def test_a_listener_starts_anew_after_each_loss() -> None:
    """The pauses grow while it cannot connect, and are short again after it could.

    Each time it listens, all subscribers are told that they may have missed something, and each
    lost connection is closed.
    """
    clock, ended = CountingClock(), threading.Event()
    connections: list[ScriptedConnection] = []
    script = [None, None, None, ["n/"], None, None, ["m/", "n/"], None]
    told: list[str | None] = []

    async def connect() -> Any:
        if not script:
            ended.set()
            await asyncio.Event().wait()
        notes = script.pop(0)
        if notes is None:
            raise Unavailable("server", "it does not answer")
        connections.append(ScriptedConnection(notes))
        return connections[-1]

    listener = Listener.subscribe(
        ("server", "channel"), connect, build_components(clock), told.append
    )
    assert ended.wait(30)
    other: list[str | None] = []
    assert (
        Listener.subscribe(("server", "channel"), connect, build_components(clock), other.append)
        is listener
    )
    # It does not listen now, so there is nothing to look at yet.
    assert other == []
    assert told == [None, "n/", None, "m/", "n/"]
    assert all(each.closed for each in connections)
    assert {each.listens_to[0] for each in connections} == {b'LISTEN "channel"'}
    bounds = [0.1, 0.2, 0.4, 0.1, 0.2, 0.4, 0.1, 0.2]
    assert len(clock.pauses) == len(bounds)
    for pause, longest in zip(clock.pauses, bounds, strict=True):
        assert longest / 2 <= pause <= longest
    listener.unsubscribe(told.append)
    assert listener._thread.is_alive()
    listener.unsubscribe(other.append)
    assert not listener._thread.is_alive()
    assert ("server", "channel") not in listener_module._listeners


def test_a_second_subscriber_is_told_at_once_if_somebody_listens_already() -> None:
    """It may have missed something, too; and it hears what comes from then on."""
    listening, told, other = threading.Event(), list[str | None](), list[str | None]()
    loops: list[asyncio.AbstractEventLoop] = []
    notes: list[asyncio.Queue[str]] = []

    class OpenConnection(ScriptedConnection):
        async def notifies(self) -> AsyncIterator[Any]:
            listening.set()
            while True:
                yield SimpleNamespace(payload=await notes[0].get())

    async def connect() -> Any:
        loops.append(asyncio.get_running_loop())
        notes.append(asyncio.Queue())
        return OpenConnection([])

    key, components = ("server", "other"), build_components(CountingClock())
    heard = threading.Event()

    def hear(topic: str | None) -> None:
        other.append(topic)
        if topic:
            heard.set()

    listener = Listener.subscribe(key, connect, components, told.append)
    assert listening.wait(30)
    assert Listener.subscribe(key, connect, components, hear) is listener
    assert other == [None]
    loops[0].call_soon_threadsafe(notes[0].put_nowait, "n/")
    assert heard.wait(30)
    assert (told, other) == ([None, "n/"], [None, "n/"])
    listener.unsubscribe(hear)
    listener.unsubscribe(told.append)
    assert not listener._thread.is_alive()


async def test_a_pooler_is_asked_while_somebody_waits_and_wakes_only_after_a_change() -> None:
    """Also after a change that was seen before, and when the server goes and comes back."""
    clock = StandingClock()
    answers = ["1", "1", "2", "2", "", "", "2", "2"]
    asked = 0

    class Pool(RecordingPool):
        async def run(self, statement: str, parameters: Any = ()) -> list[Any]:
            nonlocal asked
            del parameters
            assert "pg_current_snapshot" in statement
            answer = answers[min(asked, len(answers) - 1)]
            asked += 1
            if not answer:
                raise Unavailable("server", "it does not answer")
            return [(answer,)]

        def check_usable(self) -> None:
            """It is."""

    notifier = Notifier(cast("Any", Pool(clock)), "channel", build_components(clock), listens=False)
    woken = []
    waiting = asyncio.create_task(notifier.wait("n/", 3600))
    await let_run()
    for number in range(1, len(answers)):
        clock.move(0.5)
        await let_run()
        if waiting.done():
            woken.append(number)
            waiting = asyncio.create_task(notifier.wait("n/", 3600))
            await let_run()
    assert woken == [n for n in range(1, len(answers)) if answers[n] != answers[n - 1]]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    before = asked
    for _ in range(3):
        clock.move(0.5)
        await let_run()
    # It looks once more, finds that nobody waits, and stops.
    assert asked <= before + 1
    await notifier.close()


class AnsweringPool(RecordingPool):
    """Answers statements of a store as the test says."""

    name = "server"
    is_forked = False

    def __init__(self, clock: FakeClock, answer: Any) -> None:
        super().__init__(clock)
        self._answer = answer
        self.statements: list[str] = []

    async def run(self, statement: str, parameters: Any = ()) -> list[Any]:
        """Answer, or raise."""
        if statement.startswith("SELECT pg_notify"):
            return await super().run(statement, parameters)
        self.statements.append(statement)
        if isinstance(self._answer, BaseException):
            raise self._answer
        return list(self._answer)

    async def close(self) -> None:
        """There is nothing to close."""


ANSWERS: dict[str, Any] = {
    "applied": [("n/a",), ("n/b",)],
    "conflicted": [],
    "lost": ReplyLost("gone"),
    "unavailable": Unavailable("server", "gone"),
}


@pytest.mark.parametrize("is_due", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("call", ["one", "batch", "append"])
async def test_whoever_waits_is_notified_of_every_change_that_may_have_been_made(
    call: str, answer: str, is_due: bool
) -> None:
    """With the statement if that may notify now, else soon; of an unknown change, too."""
    clock = FakeClock()
    pool = AnsweringPool(clock, ANSWERS[answer])
    components = build_components(clock)
    notifier = Notifier(cast("Any", pool), "channel", components, listens=True)
    access = PoolAccess(cast("Any", pool), notifier, '"schema"')
    store = PostgresStore(cast("Any", pool), access, components)
    if not is_due:
        notifier.take_due(["n/", "h"])
    outcomes: list[Any] = []
    error: Exception | None = None
    try:
        if call == "append":
            await store.append("h", [1])
        else:
            outcomes = await store.write([Put(f"n/{n}", 1) for n in "ab"[: 1 + (call == "batch")]])
    except (Unavailable, OutcomeUnknown) as raised:
        error = raised
    notifies = "pg_notify" in pool.statements[0]
    assert notifies is is_due
    await store.close()
    topic = "h" if call == "append" else "n/"
    later = [each for _, each in pool.sent]
    may_have_changed = answer in {"applied", "lost"} or (call, answer) == ("append", "conflicted")
    is_told = is_due and answer != "lost"
    assert later == ([topic] if may_have_changed and not is_told else [])
    if call == "append":
        assert type(error) is {"lost": OutcomeUnknown, "unavailable": Unavailable}.get(
            answer, type(None)
        )
    elif answer != "unavailable":
        kind = {"applied": Applied, "conflicted": Conflicted, "lost": Unknown}[answer]
        assert {type(outcome) for outcome in outcomes} == {kind}
    else:
        assert isinstance(error, Unavailable)


@pytest.mark.parametrize("answer", ["applied", "lost"])
@pytest.mark.parametrize("resting", [(), ("m/",), ("n/",), ("m/", "n/")])
async def test_a_batch_notifies_each_of_its_topics(answer: str, resting: Sequence[str]) -> None:
    """Those that rest are notified after the pause, whatever the others do."""
    clock = FakeClock()
    pool = AnsweringPool(clock, [("m/a",), ("n/a",)] if answer == "applied" else ANSWERS[answer])
    notifier = build_notifier(pool, clock)
    access = PoolAccess(cast("Any", pool), notifier, '"schema"')
    store = PostgresStore(cast("Any", pool), access, build_components(clock))
    notifier.take_due(resting)
    await store.write([Put("m/a", 1), Put("n/a", 1)])
    assert ("pg_notify" in pool.statements[0]) is (len(resting) < 2)
    await until(lambda: not notifier._deferred, "all are notified")
    # What was to be notified with a statement that may not have arrived is notified, too.
    expected = sorted(resting) if answer == "applied" else ["m/", "n/"]
    assert sorted(topic for _, topic in pool.sent) == expected
    await store.close()


@pytest.mark.parametrize(
    ("rows", "age"), [([(5.5,)], 5.5), ([(0.0,)], 0.0), ([(-0.1,)], None), ([], None)]
)
async def test_a_clock_that_went_back_tells_no_age(
    rows: list[tuple[float]], age: float | None
) -> None:
    """Neither does a version that is not current."""
    clock = FakeClock()
    pool = AnsweringPool(clock, rows)
    components = build_components(clock)
    notifier = Notifier(cast("Any", pool), "channel", components, listens=True)
    store = PostgresStore(
        cast("Any", pool), PoolAccess(cast("Any", pool), notifier, '"s"'), components
    )
    assert await store.age(Record("n/a", 1, "A" * 12, 1, 0, 1, "A" * 12)) == age
    await store.close()


def test_a_listener_that_fails_is_replaced_by_the_next_subscriber() -> None:
    """Whoever waits gets its error; it is not asked again."""
    told, heard = list[str | None](), threading.Event()

    def hear(topic: str | None) -> None:
        told.append(topic)
        heard.set()

    async def fail() -> Any:
        raise ZeroDivisionError

    async def wait() -> Any:
        await asyncio.Event().wait()

    key, components = ("server", "failing"), build_components(CountingClock())
    first = Listener.subscribe(key, fail, components, hear)
    assert heard.wait(30)
    first._thread.join(30)
    assert isinstance(first.failure, ZeroDivisionError)
    second = Listener.subscribe(key, wait, components, hear)
    assert second is not first
    assert second.failure is None
    first.unsubscribe(hear)
    assert Listener.subscribe(key, wait, components, told.append) is second
    second.unsubscribe(hear)
    second.unsubscribe(told.append)
    assert key not in listener_module._listeners


@pytest.mark.parametrize(
    ("row", "version"),
    [
        (None, 0),
        ((0, 0), 0),
        ((len(POSTGRES_STEPS), len(POSTGRES_STEPS) - 1), len(POSTGRES_STEPS)),
        ((len(POSTGRES_STEPS), len(POSTGRES_STEPS)), len(POSTGRES_STEPS)),
        ((len(POSTGRES_STEPS) + 3, len(POSTGRES_STEPS)), len(POSTGRES_STEPS) + 3),
        ((len(POSTGRES_STEPS) + 3, len(POSTGRES_STEPS) + 1), None),
        (psycopg.errors.UndefinedTable(), 0),
        (psycopg.errors.UndefinedColumn(), 0),
        (psycopg.errors.InvalidSchemaName(), 0),
        (psycopg.errors.InsufficientPrivilege(), None),
    ],
)
async def test_tables_are_used_unless_they_say_that_this_code_is_too_old(
    row: Any, version: int | None
) -> None:
    """Without a version they are to be created; without the right to read it, not."""

    class Connection:
        async def execute(self, _: object) -> "Connection":
            if isinstance(row, BaseException):
                raise row
            return self

        async def fetchone(self) -> Any:
            return row

    url = PostgresUrl(host="h", database="d")
    reading = schema_module._read_version(cast("Any", Connection()), url, "s")
    if version is None:
        with pytest.raises(Misconfigured):
            await reading
    else:
        assert await reading == version


class FailingPool(RecordingPool):
    """Raises what the test says, as often as it says."""

    def __init__(self, clock: FakeClock, *errors: BaseException | None) -> None:
        super().__init__(clock)
        self.errors = list(errors)

    async def run(self, statement: str, parameters: Any = ()) -> list[Any]:
        """Raise the next error, or answer."""
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        if statement.startswith("SELECT pg_notify"):
            return await super().run(statement, parameters)
        return [("1",)]

    async def copy(self, statement: str, rows: Any) -> None:
        """Raise the next error, or do nothing."""
        await self.run(statement, rows)

    def check_usable(self) -> None:
        """It is."""


def build_notifier(pool: Any, clock: FakeClock, *, listens: bool = True) -> Notifier:
    """Return a notifier with this pool."""
    return Notifier(pool, "channel", build_components(clock), listens=listens)


REFUSALS = [
    ReplyLost("gone"),
    Unavailable("server", "gone"),
    Misconfigured("url", "server", "is refused", "correct it"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
async def test_polling_goes_on_after_every_failure(error: Exception) -> None:
    """All are woken when the server goes, and when it is back; nobody gets an error."""
    clock = StandingClock()
    pool = FailingPool(clock, None, error, None, error)
    notifier = build_notifier(pool, clock, listens=False)
    for _ in range(3):
        waiting = asyncio.create_task(notifier.wait("n/", 3600))
        await let_run()
        clock.move(0.5)
        await let_run()
        assert waiting.done()
        await waiting
    assert not pool.errors
    await notifier.close()


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
async def test_closing_survives_what_has_become_of_the_server(error: Exception) -> None:
    """What could not be notified is left to the polls of others, and waiters are woken."""
    clock = StandingClock()
    notifier = build_notifier(FailingPool(clock, None, error), clock, listens=False)
    waiting = asyncio.create_task(notifier.wait("n/", 3600))
    await let_run()
    notifier.notify_later(["n/"])
    await notifier.close()
    await waiting


async def test_closing_wakes_waiters_even_if_there_is_nothing_to_notify() -> None:
    """They look at the store once more, and find it closed."""
    clock = StandingClock()
    notifier = build_notifier(FailingPool(clock), clock, listens=False)
    waiters = [asyncio.create_task(notifier.wait(topic, 3600)) for topic in ("n/", "n/", "h")]
    await let_run()
    assert not any(waiter.done() for waiter in waiters)
    await notifier.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiters)


async def test_a_failure_in_the_background_is_raised_to_all_at_once() -> None:
    """Those who wait need not wait in vain, and those who come later hear of it, too."""
    clock = StandingClock()
    notifier = build_notifier(FailingPool(clock, None, ZeroDivisionError()), clock, listens=False)
    waiters = [asyncio.create_task(notifier.wait(topic, 3600)) for topic in ("n/", "n/", "h")]
    await let_run()
    clock.move(0.5)
    async with asyncio.timeout(60):
        errors = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(error) for error in errors] == [ZeroDivisionError] * 3
    with pytest.raises(ZeroDivisionError):
        notifier.take_due(["n/"])
    await notifier.close()


async def test_of_many_topics_those_that_rest_are_remembered() -> None:
    """However many there were before, none is notified again within its pause."""
    clock = StandingClock()
    notifier = build_notifier(FailingPool(clock), clock)
    old = [f"old-{n}" for n in range(800)]
    young = [f"young-{n}" for n in range(800)]
    assert notifier.take_due(old) == old
    clock.move(COOLDOWN / 2)
    assert notifier.take_due(young) == young
    clock.move(COOLDOWN * 0.75)
    assert notifier.take_due(["another"]) == ["another"]
    # Those that rest no longer are forgotten.
    assert len(notifier._cooldown_ends) == 801
    assert notifier.take_due([*young, "another"]) == []
    assert notifier.take_due(old) == old
    await notifier.close()


@pytest.mark.parametrize("is_due", [True, False])
@pytest.mark.parametrize("error", [None, *REFUSALS], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["run", "copy"])
async def test_workers_are_told_of_every_push_that_may_have_arrived(
    call: str, error: Exception | None, is_due: bool
) -> None:
    """With the statement if that may notify now, else soon; of one in doubt, too."""
    clock = StandingClock()
    pool = FailingPool(clock, error)
    notifier = build_notifier(pool, clock)
    access = PoolAccess(cast("Any", pool), notifier, '"schema"')
    if not is_due:
        notifier.take_due(["queue/a"])
    raised: Exception | None = None
    try:
        if call == "run":
            await access.run_and_notify("INSERT", "INSERT, notify", {}, "queue/a")
        else:
            await access.copy_and_notify("COPY", [], "queue/a")
    except (OutcomeUnknown, Unavailable, Misconfigured) as found:
        raised = found
    assert type(raised) is (OutcomeUnknown if isinstance(error, ReplyLost) else type(error))
    in_doubt = isinstance(error, ReplyLost)
    expected = {"queue/a"} if in_doubt or (error is None and not is_due) else set()
    assert notifier._deferred == expected
    await notifier.close()


@pytest.mark.parametrize("listens", [True, False])
async def test_a_store_on_another_loop_prepares_statements_only_without_a_pooler(
    listens: bool,
) -> None:
    """Behind one, the next statement may run in another session."""
    clock = StandingClock()
    pool: Any = FailingPool(clock)
    pool.name = "server"
    notifier = build_notifier(pool, clock, listens=listens)
    access = PoolAccess(pool, notifier, '"schema"')
    components = build_components(clock)
    store = PostgresStore(pool, access, components)
    another = PostgresStore.open_like(
        store, PostgresUrl(host="127.0.0.1", database="d"), components
    )
    assert (another._pool._prepare_after is not None) is listens
    assert another._notifier.listens is listens
    assert (another.sql.schema, another.sql.channel) == (access.schema, "channel")
    await another.close()
    await notifier.close()


@pytest.mark.parametrize(
    "error", [Unavailable("server", "gone"), REFUSALS[2], asyncio.CancelledError(), TimeoutError()]
)
async def test_a_connect_that_fails_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whatever it fails with, the pool is closed."""
    pools: list[Any] = []

    async def fail(pool: Any, *_: object) -> Any:
        pools.append(pool)
        raise error

    monkeypatch.setattr(store_module, "_prepare", fail)
    expected = Unavailable if isinstance(error, TimeoutError) else type(error)
    with pytest.raises(expected):
        await PostgresStore.connect(PostgresUrl(host="127.0.0.1", database="d"))
    assert [pool._is_closed for pool in pools] == [True]
