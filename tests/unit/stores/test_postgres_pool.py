"""The connection pool of PostgreSQL, with connections that a test controls."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from chance import FakeClock, SeededRandomness
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from waiting import until

from jobsync import Components, Events, Misconfigured, Unavailable
from jobsync.core.secrets import Secret
from jobsync.core.urls import PostgresUrl
from jobsync.stores.postgres import pool as pool_module
from jobsync.stores.postgres.pool import (
    _DEFAULTS,
    _LONG_CHECKS,
    _MAX_LONG,
    PostgresPool,
    ReplyLost,
    _build_conninfo,
)

URL = PostgresUrl(host="127.0.0.1", database="nowhere")


class FakeConnection:
    """A connection whose statements end when the test says so."""

    def __init__(self, opened: "list[FakeConnection]") -> None:
        opened.append(self)
        self.pgconn = SimpleNamespace(transaction_status=TransactionStatus.IDLE)
        self.is_stale = False
        self.closed = False
        self.prepare_threshold: int | None = None
        self.answer: asyncio.Future[list[Any]] | None = None

    async def run(self, statement: str, parameters: object) -> list[Any]:
        """Wait for the answer."""
        del statement, parameters
        assert self.answer is None, "two statements share a connection"
        assert not self.closed
        self.answer = asyncio.get_running_loop().create_future()
        try:
            return await self.answer
        except (asyncio.CancelledError, TimeoutError):
            await self.close()
            raise
        finally:
            self.answer = None

    async def close(self) -> None:
        """Close it."""
        self.closed = True
        self.pgconn.transaction_status = TransactionStatus.UNKNOWN


class FakePool(PostgresPool):
    """A pool of such connections."""

    def __init__(self, max_connections: int) -> None:
        self.opened: list[FakeConnection] = []
        self.clock = FakeClock()
        self.refusal: Exception | None = None
        super().__init__(
            URL,
            Components(clock=self.clock, randomness=SeededRandomness(1), events=Events()),
            statement_timeout=30.0,
            max_connections=max_connections,
        )

    async def open_connection(self) -> Any:
        """Open a connection, unless the server refuses it."""
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        return FakeConnection(self.opened)

    @property
    def busy(self) -> list[FakeConnection]:
        """The connections with a statement."""
        return [each for each in self.opened if each.answer is not None and not each.answer.done()]

    @property
    def open_count(self) -> int:
        """How many connections are open."""
        return sum(not each.closed for each in self.opened)

    def is_looking(self) -> bool:
        """Whether it will look at the running statements."""
        return self._long_check is not None

    def look(self) -> None:
        """Look at the running statements once, as the timer does."""
        if self._long_check is not None:
            self._long_check.cancel()
        self._check_long()


async def settle() -> None:
    """Run all tasks that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def answer(connection: FakeConnection, kind: str) -> None:
    """End a statement."""
    assert connection.answer is not None
    match kind:
        case "rows":
            connection.answer.set_result([(1,)])
        case "timeout":
            connection.answer.set_exception(TimeoutError())
        case "lost":
            connection.closed = True
            connection.pgconn.transaction_status = TransactionStatus.UNKNOWN
            connection.answer.set_exception(psycopg.OperationalError("gone"))


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
async def test_a_pool_runs_so_many_statements_and_loses_no_place(most: int, seed: int) -> None:
    """However they end, in whatever order, and whichever of them take long.

    Long ones get a connection more, up to six, which is closed. At the end there are as many places
    as at first, and no connection is lost.
    """
    dice, pool = random.Random(seed), FakePool(most)
    tasks: list[asyncio.Task[Any]] = []
    for _ in range(120):
        match dice.choice(["ask", "ask", "rows", "rows", "timeout", "lost", "cancel", "look"]):
            case "ask":
                tasks.append(asyncio.create_task(pool.run("SELECT 1")))
            case "cancel" if tasks:
                dice.choice(tasks).cancel()
            case "look":
                pool.look()
            case kind if kind in {"rows", "timeout", "lost"} and pool.busy:
                answer(dice.choice(pool.busy), kind)
        await settle()
        long = sum(running.is_long for running in pool._running)
        assert long <= _MAX_LONG
        assert len(pool.busy) <= most + long
        waiting = [task for task in tasks if not task.done()]
        assert len(pool.busy) == min(len(waiting), most + long)
    while pool.busy:
        answer(pool.busy[0], "rows")
        await settle()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    errors = {type(end) for end in ends if isinstance(end, BaseException)}
    assert errors <= {ReplyLost, asyncio.CancelledError}
    assert pool._slots._value == most
    assert pool.open_count == len(pool._idle) <= most
    await pool.close()
    assert pool.open_count == 0


async def test_only_what_is_seen_so_often_is_long() -> None:
    """Others run in its place at the third look, and not before; its connection is not kept."""
    pool = FakePool(1)
    first = asyncio.create_task(pool.run("SELECT 1"))
    await settle()
    second = asyncio.create_task(pool.run("SELECT 2"))
    await settle()
    for _ in range(_LONG_CHECKS - 1):
        pool.look()
        await settle()
        assert len(pool.busy) == 1
    pool.look()
    await settle()
    long, other = pool.busy
    answer(other, "rows")
    answer(long, "rows")
    assert [await first, await second] == [[(1,)], [(1,)]]
    assert (long.closed, other.closed) == (True, False)
    await pool.close()


@pytest.mark.parametrize("most", [1, 3])
async def test_only_so_many_statements_run_beside_the_others(most: int) -> None:
    """However long they take, and however many wait; the next may when one of them has ended."""
    pool = FakePool(most)
    asking = [asyncio.create_task(pool.run("SELECT 1")) for _ in range(4 * _MAX_LONG)]
    await settle()
    for looks in range(4 * _MAX_LONG):
        pool.look()
        await settle()
        assert len(pool.busy) <= most + min(_MAX_LONG, most * (looks + 1) // _LONG_CHECKS)
    assert len(pool.busy) == most + _MAX_LONG
    answer(pool.busy[0], "rows")
    await settle()
    assert len(pool.busy) == most + _MAX_LONG - 1
    for _ in range(_LONG_CHECKS):
        pool.look()
        await settle()
    assert len(pool.busy) == most + _MAX_LONG
    while pool.busy:
        answer(pool.busy[0], "rows")
        await settle()
    assert await asyncio.gather(*asking) == [[(1,)]] * len(asking)
    assert pool._slots._value == most
    await pool.close()


def test_a_pool_is_as_new_on_each_later_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long statements are found there too, although those of the loop before never ended."""
    monkeypatch.setattr(pool_module, "_CHECK_INTERVAL", 0.001)

    async def open_pool() -> FakePool:
        return FakePool(1)

    async def use(pool: FakePool) -> None:
        asking = [asyncio.create_task(pool.run("SELECT 1")) for _ in range(2 * _MAX_LONG)]
        await until(lambda: len(pool.busy) > 1, "the first one is long", 5)
        # The loop is closed while they run, and others wait.
        del asking

    pool = asyncio.run(open_pool())
    for _ in range(3):
        asyncio.run(use(pool))


async def test_a_look_when_nobody_waits_counts_for_nothing() -> None:
    """The timer stops, and starts again with the next that waits."""
    pool = FakePool(2)
    asking = asyncio.create_task(pool.run("SELECT 1"))
    await settle()
    for _ in range(_LONG_CHECKS + 1):
        pool.look()
    assert not pool.is_looking()
    (running,) = pool._running
    assert (running.checks, running.is_long) == (0, False)
    more = [asyncio.create_task(pool.run("SELECT 1")) for _ in range(2)]
    await settle()
    assert pool.is_looking()
    while pool.busy:
        answer(pool.busy[0], "rows")
        await settle()
    await asyncio.gather(asking, *more)
    await pool.close()


async def test_a_stale_connection_is_closed_and_another_is_used() -> None:
    """Again and again; the server may have been restarted twice."""
    pool = FakePool(1)
    for number in range(1, 4):
        asking = asyncio.create_task(pool.run("SELECT 1"))
        await settle()
        (busy,) = pool.busy
        assert busy is pool.opened[-1]
        assert (len(pool.opened), pool.open_count) == (number, 1)
        answer(busy, "rows")
        await asking
        busy.is_stale = True
    await pool.close()


async def test_a_refused_connection_takes_no_place() -> None:
    """What worked once may work again: it is unavailable, and the next statement works."""
    pool = FakePool(1)
    for refusal in (Misconfigured("url", "x", "is refused", "fix"), Unavailable("x", "gone")) * 2:
        pool.refusal = refusal
        with pytest.raises(Unavailable):
            await pool.run("SELECT 1")
        assert (pool._slots._value, pool._running) == (1, set())
    pool.refusal = None
    asking = asyncio.create_task(pool.run("SELECT 1"))
    await settle()
    answer(pool.busy[0], "rows")
    assert await asking == [(1,)]
    await pool.close()


async def test_a_pool_looks_at_its_statements_as_long_as_others_wait() -> None:
    """Also after it has found a long one; and not once it is closed."""
    pool = FakePool(1)
    asking = [asyncio.create_task(pool.run("SELECT 1")) for _ in range(3)]
    await settle()
    for _ in range(_LONG_CHECKS + 1):
        pool.look()
        assert pool.is_looking()
        await settle()
    assert len(pool.busy) == 2
    timer = pool._long_check
    assert timer is not None
    await pool.close()
    assert timer.cancelled()
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_pool_that_closes_leaves_no_connection() -> None:
    """Neither an idle one, nor those in use when they are released."""
    pool = FakePool(2)
    asking = [asyncio.create_task(pool.run("SELECT 1")) for _ in range(2)]
    await settle()
    answer(pool.busy[0], "rows")
    await settle()
    await pool.close()
    await pool.close()
    answer(pool.busy[0], "rows")
    await asyncio.gather(*asking)
    assert (pool.open_count, pool._idle) == (0, [])
    with pytest.raises(Unavailable, match="the store is closed"):
        await pool.run("SELECT 1")


async def test_a_statement_that_is_rolled_back_is_sent_again_a_limited_number_of_times() -> None:
    """Nothing was written then; the pauses grow."""
    pool = FakePool(1)
    sent = 0

    async def run(connection: FakeConnection, statement: str, parameters: object) -> list[Any]:
        nonlocal sent
        del connection, statement, parameters
        sent += 1
        raise psycopg.errors.DeadlockDetected if sent % 2 else psycopg.errors.SerializationFailure

    begun = pool.clock.mono()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeConnection, "run", run)
        with pytest.raises(Unavailable, match="rolled the statement back 12 times"):
            await pool.run("SELECT 1")
    assert sent == 12
    assert 0 < pool.clock.mono() - begun < 3
    assert cast("Any", pool)._slots._value == 1
    await pool.close()


async def test_connections_that_are_idle_for_long_are_closed_one_by_one() -> None:
    """Exactly after ten minutes they stay, later not; the one that was used last always stays."""
    pool = FakePool(3)
    asking = [asyncio.create_task(pool.run("SELECT 1")) for _ in range(2 * _MAX_LONG)]
    await settle()
    while pool.busy:
        answer(pool.busy[0], "rows")
        await settle()
    await asyncio.gather(*asking)

    async def use() -> None:
        asked = asyncio.create_task(pool.run("SELECT 1"))
        await settle()
        answer(pool.busy[0], "rows")
        await asked

    for seconds, left in ((600.0, 3), (0.1, 2), (0.1, 1), (5000.0, 1), (5000.0, 1)):
        pool.clock.mono_seconds += seconds
        await use()
        assert (pool.open_count, len(pool._idle)) == (left, left)
        assert not any(connection.closed for _, connection in cast("Any", pool._idle))
    assert len(pool.opened) == 3
    await pool.close()


@pytest.mark.parametrize("name", sorted(_DEFAULTS))
def test_a_parameter_of_the_url_is_not_replaced_by_a_default(name: str) -> None:
    """All the others have their defaults."""
    given = "mine" if name == "fallback_application_name" else "17"
    url = PostgresUrl(host="h", database="d", params=((name, Secret(given)),))
    found = conninfo_to_dict(_build_conninfo(url))
    assert found[name] == given
    wanted = {each: str(value) for each, value in _DEFAULTS.items() if each != name}
    assert {each: str(found[each]) for each in wanted} == wanted
    assert found["client_encoding"] == "utf8"
