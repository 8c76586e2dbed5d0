"""Waking those who wait, across processes: a hint, on which nothing rests.

Where the server's notifications reach us, a waiter is woken within 100 ms of a commit.
Behind a pooler they do not: then one glance every half second tells whether anything at
all was committed on the server. Whenever listening begins, everybody wakes once.

NOTIFY holds a lock of the whole server at commit, so a process notifies of one topic at
most once per 50 ms: at once after a pause, then at the end of each 50 ms.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Any

import psycopg

from jobsync.components import Components
from jobsync.errors import Misconfigured, Unavailable
from jobsync.stores.postgres.connection import PostgresConnection
from jobsync.stores.postgres.pool import Lost, PostgresPool

__all__ = ["Notifier", "channel_of", "hears"]

_REST = 0.05
_POLL = 0.5
_PROBE = 0.25
_PROBE_DIRECT = 5.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_REMEMBERED = 1000

_RING = "SELECT pg_notify(%s, topic) FROM unnest(%s::text[]) AS t (topic)"
# Changes whenever a transaction that wrote anything ends; costs no lock.
_GLANCE = "SELECT pg_current_snapshot()::text"


def channel_of(schema: str) -> str:
    """Name the channel of a schema; a database has one set of channels for all schemas."""
    return f"jobsync_{sha256(schema.encode()).hexdigest()[:16]}"


async def hears(listener: PostgresConnection, speaker: PostgresConnection, channel: str) -> bool:
    """Say whether notifications pass from one connection to another. A pooler stops them."""
    await listener.execute(_listen_to(channel))
    cursor = await speaker.execute("SELECT pg_backend_pid(), pg_notify(%s, '')", [channel])
    ((server_process, _),) = await cursor.fetchall()
    # Whoever connects to the server itself knows its process, and will hear it in the end.
    direct = server_process == speaker.info.backend_pid
    timeout = _PROBE_DIRECT if direct else _PROBE
    heard = [note async for note in listener.notifies(timeout=timeout, stop_after=1)]
    # A pooler's session would go on listening for whoever gets it next.
    await listener.execute("UNLISTEN *")
    return bool(heard)


def _listen_to(channel: str) -> bytes:
    return f'LISTEN "{channel}"'.encode()


class Notifier:
    """Rings for changes of one schema, and wakes who waits for them.

    Args:
        pool: the connections.
        channel: what this schema's notifications go by.
        components: clock and randomness, for pauses.
        listens: whether notifications reach us.
    """

    def __init__(
        self, pool: PostgresPool, channel: str, components: Components, *, listens: bool
    ) -> None:
        self.channel = channel
        self._pool = pool
        self._clock = components.clock
        self._randomness = components.randomness
        self._listens = listens
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._resting: dict[str, float] = {}
        self._late: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None

    def due(self, topics: Iterable[str]) -> list[str]:
        """Give the topics that may be rung for at once, and take it that they are."""
        self._check()
        now = self._clock.mono().seconds
        rung = [
            topic
            for topic in topics
            # What is late already is rung for soon, whatever comes of this write.
            if topic not in self._late and self._resting.get(topic, now) <= now
        ]
        self._rest(rung, now)
        return rung

    def ring_later(self, topics: Iterable[str]) -> None:
        """Ring for these when their rest is over. They were committed just now."""
        self._late.update(topics)
        if self._late:
            self._start("ring", self._ring_late)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if it was rung for."""
        self._pool.check_usable()
        woken = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, set()).add(woken)
        self._start("hear", self._listen if self._listens else self._poll)
        try:
            async with asyncio.timeout(timeout):
                await woken
        except TimeoutError:
            pass
        finally:
            self._forget(topic, woken)
        self._check()

    async def close(self) -> None:
        """Ring for what is late, then stop. Whoever waits is woken."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        if self._late:
            await self._ring()
        self._wake_all()

    def _rest(self, topics: Iterable[str], now: float) -> None:
        if len(self._resting) > _REMEMBERED:
            self._resting = {topic: end for topic, end in self._resting.items() if end > now}
        self._resting.update(dict.fromkeys(topics, now + _REST))

    async def _ring_late(self) -> None:
        while self._late:
            await self._clock.sleep(_REST)
            await self._ring()

    async def _ring(self) -> None:
        topics, self._late = self._late, set()
        self._rest(topics, self._clock.mono().seconds)
        # Whoever waits looks for itself in time; the next caller learns what is wrong.
        with suppress(Lost, Misconfigured, Unavailable):
            await self._pool.run(_RING, [self.channel, list(topics)])

    async def _listen(self) -> None:
        """Pass on notifications, for ever. Until one listens nobody knows what was missed."""
        pause = _FIRST_PAUSE
        while True:
            with suppress(psycopg.OperationalError, Misconfigured, Unavailable):
                connection = await self._pool.connect_apart()
                try:
                    await connection.execute(_listen_to(self.channel))
                    self._wake_all()
                    pause = _FIRST_PAUSE
                    async for note in connection.notifies():
                        self._wake(note.payload)
                finally:
                    await connection.close()
            await self._clock.sleep(self._randomness.uniform(pause / 2, pause))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _poll(self) -> None:
        """Wake everybody whenever the server has changed, while anybody waits."""
        seen = await self._glance()
        while self._waiting:
            await self._clock.sleep(_POLL)
            found = await self._glance()
            if found != seen:
                self._wake_all()
            seen = found

    async def _glance(self) -> str:
        try:
            ((snapshot,),) = await self._pool.run(_GLANCE)
        except (Lost, Misconfigured, Unavailable):
            # Differs from every snapshot: whoever waits wakes when it goes and when it comes.
            return ""
        return str(snapshot)

    def _wake(self, topic: str) -> None:
        for woken in self._waiting.get(topic, ()):
            if not woken.done():
                woken.set_result(None)

    def _wake_all(self) -> None:
        for topic in self._waiting:
            self._wake(topic)

    def _forget(self, topic: str, woken: asyncio.Future[None]) -> None:
        self._waiting[topic].discard(woken)
        if not self._waiting[topic]:
            del self._waiting[topic]

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something in the background until `close`, unless it runs already."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = task = asyncio.create_task(work(), name=f"jobsync-{name}")
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._wake_all()

    def _check(self) -> None:
        """Let a mistake in the background be known to whoever comes next."""
        if self._failure is not None:
            raise self._failure
