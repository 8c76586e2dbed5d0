"""Wakes waiters across processes with LISTEN and NOTIFY: only a hint, nothing relies on it.

Where the server's notifications are received, a waiter is woken within 100 ms of a commit; see
`listener`. Behind a pooler they are not: then one query every half second checks whether anything
was committed on the server. Whenever listening starts, all waiters are woken once.

NOTIFY takes a server-wide lock at commit, so a process notifies a topic at most once in 50 ms:
at once after a pause, then at the end of each 50 ms.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from psycopg.sql import quote

from jobsync.components import Components
from jobsync.core.retry import ExponentialBackoff
from jobsync.errors import Corrupt, Misconfigured, OutcomeUnknown, Unavailable
from jobsync.stores.postgres.listener import Listener
from jobsync.stores.postgres.pool import MalformedJson, PostgresPool, ReplyLost
from jobsync.stores.sql import Parameters, PostgresAccess, Steps

__all__ = ["Notifier", "PoolAccess"]

T = TypeVar("T")

_BACKOFF = ExponentialBackoff(first=0.1, longest=1.0)
_COOLDOWN = 0.05
_POLL_INTERVAL = 0.5
_MAX_COOLDOWNS = 1000

_NOTIFY = "SELECT pg_notify(%s, topic) FROM unnest(%s::text[]) AS t (topic)"
# Changes whenever a transaction that wrote anything ends; costs no lock.
_READ_SNAPSHOT = "SELECT pg_current_snapshot()::text"


class Notifier:
    """Notifies of changes in one schema, and wakes waiters in this process.

    Args:
        pool: the connections.
        channel: the channel of this schema.
        components: clock and randomness, for pauses.
        listens: whether notifications are received; else it polls.
    """

    def __init__(
        self, pool: PostgresPool, channel: str, components: Components, *, listens: bool
    ) -> None:
        self.channel = channel
        self.listens = listens
        self._pool = pool
        self._components = components
        self._clock = components.clock
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._cooldown_ends: dict[str, float] = {}
        self._deferred: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None

    def take_due(self, topics: Iterable[str]) -> list[str]:
        """Return the topics that the caller may notify now, and start their cooldown."""
        self._raise_failure()
        now = self._clock.mono().seconds
        due = [
            topic
            for topic in topics
            # A deferred topic is notified soon, whatever the outcome of this write.
            if topic not in self._deferred and self._cooldown_ends.get(topic, now) <= now
        ]
        self._start_cooldown(due, now)
        return due

    def notify_later(self, topics: Iterable[str]) -> None:
        """Notify these topics after their cooldown. Their changes were just committed."""
        self._deferred.update(topics)
        if self._deferred:
            self._start("notify", self._notify_deferred)

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was notified."""
        self._pool.check_usable()
        woken = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, set()).add(woken)
        self._start("listen", self._listen if self.listens else self._poll)
        try:
            async with asyncio.timeout(timeout):
                await woken
        except TimeoutError:
            pass
        finally:
            self._remove(topic, woken)
        self._raise_failure()

    async def close(self) -> None:
        """Notify the deferred topics, then stop. All waiters are woken."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        self._tasks = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._deferred:
            # Waiters poll, too.
            with suppress(ReplyLost, Misconfigured, Unavailable):
                await self._notify()
        self._wake_all()

    def _start_cooldown(self, topics: Iterable[str], now: float) -> None:
        ends = self._cooldown_ends
        if len(ends) > _MAX_COOLDOWNS:
            ends = self._cooldown_ends = {topic: end for topic, end in ends.items() if end > now}
        ends.update(dict.fromkeys(topics, now + _COOLDOWN))

    async def _notify_deferred(self) -> None:
        failures = 0
        while self._deferred:
            await self._clock.sleep(_COOLDOWN + _BACKOFF.limit(failures))
            topics = self._deferred
            try:
                await self._notify()
                failures = 0
            except Misconfigured:
                # The next statement raises it.
                return
            except (ReplyLost, Unavailable):
                # Waiters would find out at their next poll, which may be half a minute away.
                self._deferred |= topics
                failures += 1

    async def _notify(self) -> None:
        topics, self._deferred = self._deferred, set()
        self._start_cooldown(topics, self._clock.mono().seconds)
        await self._pool.run(_NOTIFY, [self.channel, list(topics)])

    async def _listen(self) -> None:
        """Pass on the notifications that this process receives, until cancelled."""
        loop = asyncio.get_running_loop()

        def receive(topic: str | None) -> None:
            """Wake waiters from the listener's thread."""
            if topic is None or topic in self._waiting:
                # A closed loop has no waiters.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(received.put_nowait, topic)

        received = asyncio.Queue[str | None]()
        key = (self._pool.conninfo, self.channel)
        listener = Listener.subscribe(key, self._pool.open_connection, self._components, receive)
        try:
            while True:
                topic = await received.get()
                if listener.failure is not None:
                    raise listener.failure
                if topic is None:
                    self._wake_all()
                else:
                    self._wake(topic)
        finally:
            listener.unsubscribe(receive)

    async def _poll(self) -> None:
        """Wake all whenever something was committed on the server, while anybody waits."""
        last = await self._read_snapshot()
        while self._waiting:
            await self._clock.sleep(_POLL_INTERVAL)
            current = await self._read_snapshot()
            if current != last:
                self._wake_all()
            last = current

    async def _read_snapshot(self) -> str:
        try:
            ((snapshot,),) = await self._pool.run(_READ_SNAPSHOT)
        except (ReplyLost, Misconfigured, Unavailable):
            # Differs from every snapshot: all wake when the server goes and when it is back.
            return ""
        return str(snapshot)

    def _wake(self, topic: str) -> None:
        for woken in self._waiting.get(topic, ()):
            if not woken.done():
                woken.set_result(None)

    def _wake_all(self) -> None:
        for topic in self._waiting:
            self._wake(topic)

    def _remove(self, topic: str, woken: asyncio.Future[None]) -> None:
        self._waiting[topic].discard(woken)
        if not self._waiting[topic]:
            del self._waiting[topic]

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task in the background until `close`, unless it already runs."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = task = asyncio.create_task(work(), name=f"jobsync-{name}")
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._wake_all()

    def _raise_failure(self) -> None:
        """Raise the error of a background task, if one failed."""
        if self._failure is not None:
            raise self._failure


class PoolAccess(PostgresAccess):
    """Access to a store's tables through its connection pool.

    Args:
        pool: the connections.
        notifier: wakes waiters.
        schema: the schema of jobsync's tables, quoted.
    """

    def __init__(self, pool: PostgresPool, notifier: Notifier, schema: str) -> None:
        self.schema = schema
        self.channel = notifier.channel
        self.user_connections = pool
        self._pool = pool
        self.notifier = notifier

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Run one statement and return its rows."""
        with _public_errors(place):
            return await self._pool.run(statement, parameters)

    async def run_steps(self, build: Callable[[], Steps[T]], place: str) -> T:
        """Run statements in one transaction, and return their result."""
        with _public_errors(place):
            return await self._pool.run_steps(build)

    async def run_and_notify(
        self, statement: str, notifying: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement and wake those who wait for the topic, at once or soon."""
        with self._notifying(topic) as is_due:
            if not is_due:
                return await self.run(statement, parameters, topic)
            notification = {"channel": self.channel, "topic": topic}
            return await self.run(notifying, {**parameters, **notification}, topic)

    async def copy_and_notify(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        """Run a COPY and wake those who wait for the topic, at once or soon."""
        with self._notifying(topic) as is_due:
            if is_due:
                statement += f"; SELECT pg_notify({quote(self.channel)}, {quote(topic)})"
            with _public_errors(topic):
                await self._pool.copy(statement, rows)

    @contextmanager
    def _notifying(self, topic: str) -> Iterator[bool]:
        """Whether the caller's statement may notify the topic; otherwise it is notified soon."""
        is_due = bool(self.notifier.take_due([topic]))
        try:
            yield is_due
        except OutcomeUnknown:
            self.notifier.notify_later([topic])
            raise
        if not is_due:
            self.notifier.notify_later([topic])

    def wake(self, topic: str) -> None:
        """Notify the topic, soon."""
        self.notifier.notify_later([topic])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was notified."""
        await self.notifier.wait(topic, timeout)


@contextmanager
def _public_errors(place: str) -> Iterator[None]:
    """Raise the errors of the pool as those of an access, which name the place."""
    try:
        yield
    except ReplyLost as lost:
        raise OutcomeUnknown(place, str(lost)) from lost
    except MalformedJson as malformed:
        raise Corrupt(place, str(malformed)) from malformed
