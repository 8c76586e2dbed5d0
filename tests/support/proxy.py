"""Fault-injecting proxy between a client and a server.

It forwards plain HTTP/1.1 and PostgreSQL's protocol, whose clients await each answer. A
request is forwarded only when it is complete, so a fault hits all of it or nothing. The messages
that open and end a PostgreSQL connection always pass and are not counted. Anything else, and
a `when` that raises, closes the proxy, and `stop` raises the reason.
"""

import asyncio
import concurrent.futures
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, NamedTuple, Self, TypeVar

__all__ = ["Proxy", "Request", "Splitter"]

T = TypeVar("T")
When = Callable[[bytes], bool]
Fault = Literal[
    "drop request", "drop reply", "hold request", "cut reply", "fail request", "fail reply"
]

_HOST = "127.0.0.1"
_CHUNK = 1 << 16
_TIMEOUT = 30.0
_QUIET_SECONDS = 1.0


class Proxy:
    """A proxy in its own thread, for synchronous and asynchronous tests.

    Faults may be changed at any time and are active when the call returns. An armed fault
    hits the next `count` requests for which `when` is true.

    Attributes:
        port: the port on 127.0.0.1; `refuse` and `accept` keep it.
        requests: how many complete requests came.
        faults: how often a reply was delayed, a request hit or a connection cut.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.port = 0
        self.requests = 0
        self.faults = 0
        self._target = (target_host, target_port)
        self._changed = threading.Condition()
        self._delay = 0.0
        self._rewrite: Callable[[bytes], bytes] = lambda request: request
        self._armed: list[_Armed] = []
        self._held: list[_Held] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Accept connections; `port` is known from now on."""
        # Bound but never listening: it reserves the port while connections are refused.
        self._reservation = _bind(0)
        self.port = self._reservation.getsockname()[1]
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "proxy")
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended = self._thread.submit(asyncio.run, self._main(ready))
        concurrent.futures.wait([ready, self._ended], return_when="FIRST_COMPLETED")
        return self

    def stop(self) -> None:
        """Close everything; requests that are still held never arrive. Safe to repeat.

        Raises:
            ExceptionGroup: the errors that had closed the proxy before.
        """
        # A closed loop has ended by itself.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        try:
            self._ended.result()
        finally:
            self._thread.shutdown()
            self._reservation.close()

    def pass_through(self) -> None:
        """End all faults. Held requests stay held until `release`."""
        self._call(self._pass_through())

    def delay(self, seconds: float) -> None:
        """Delay each reply."""
        self._call(self._set_delay(seconds))

    def refuse(self) -> None:
        """Refuse new connections, as if nobody listened. Existing ones continue."""
        self._call(self._stop_listening())

    def accept(self) -> None:
        """Accept new connections again."""
        self._call(self._start_listening())

    def cut(self) -> None:
        """Close both sides of every connection now. New ones are accepted."""
        self._call(self._cut())

    def drop_request(self, count: int = 1, when: When | None = None) -> None:
        """Close both sides when a request comes, before the server sees any of it."""
        self._call(self._arm("drop request", count, when))

    def drop_reply(self, count: int = 1, when: When | None = None) -> None:
        """Forward a request; when its reply comes, close the client's side instead."""
        self._call(self._arm("drop reply", count, when))

    def hold_request(self, count: int = 1, when: When | None = None) -> None:
        """Close the client's side when a request comes, and hold the request until `release`."""
        self._call(self._arm("hold request", count, when))

    def cut_reply(self, count: int = 1, when: When | None = None) -> None:
        """Forward a request, and only the first half of its reply; then close the client's side."""
        self._call(self._arm("cut reply", count, when))

    def fail_request(self, status: int, count: int = 1, when: When | None = None) -> None:
        """Answer with an HTTP status and close, before the server sees any of the request."""
        self._call(self._arm("fail request", count, when, status))

    def fail_reply(self, status: int, count: int = 1, when: When | None = None) -> None:
        """Forward a request; when its reply comes, answer with an HTTP status and close."""
        self._call(self._arm("fail reply", count, when, status))

    def rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """Change each request before it is forwarded, so that a server seems to be another."""
        self._call(self._set_rewrite(change))

    def release(self) -> list[bytes]:
        """Deliver the held requests, oldest first, each on its own connection.

        Returns the server's answers, b"" if it had closed the connection meanwhile.
        Call it in a thread if the server runs in this event loop.
        """
        return self._call(self._release())

    def wait_for(self, *, requests: int = 0, faults: int = 0) -> None:
        """Wait until at least this many have been counted.

        Raises:
            TimeoutError: they were not, within 30 seconds.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.requests >= requests and self.faults >= faults, _TIMEOUT
            ):
                raise TimeoutError(f"only {self.requests} requests and {self.faults} faults came")

    def _call(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change in the proxy's event loop, so that nothing needs a lock."""
        try:
            done = asyncio.run_coroutine_threadsafe(change, self._loop)
        except RuntimeError:
            change.close()
            self._ended.result()
            raise RuntimeError("The proxy is stopped. Start another.") from None
        return done.result(_TIMEOUT)

    def _count(self, *, requests: int = 0, faults: int = 0) -> None:
        with self._changed:
            self.requests += requests
            self.faults += faults
            self._changed.notify_all()

    async def _main(self, ready: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as self._group:
                await self._start_listening()
                ready.set_result(None)
                await self._stopping.wait()
                await self._stop_listening()
                for task in self._tasks:
                    task.cancel()
        finally:
            await self._stop_listening()

    async def _start_listening(self) -> None:
        if self._listening is None:
            self._listening = _bind(self.port)
            self._listening.listen()
            self._loop.add_reader(self._listening, self._accept, self._listening)

    async def _stop_listening(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def _set_rewrite(self, change: Callable[[bytes], bytes]) -> None:
        self._rewrite = change

    async def _pass_through(self) -> None:
        self._delay = 0.0
        self._armed.clear()
        await self._start_listening()

    async def _set_delay(self, seconds: float) -> None:
        self._delay = seconds

    async def _arm(self, fault: Fault, count: int, when: When | None, status: int = 0) -> None:
        self._armed.append(_Armed(fault, count, when or (lambda _: True), status))

    async def _cut(self) -> None:
        tasks = self._tasks - {held.link.task for held in self._held}
        self._count(faults=len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _release(self) -> list[bytes]:
        released, self._held = self._held, []
        return [await held.link.deliver(held.request) for held in released]

    def _accept(self, listening: socket.socket) -> None:
        # Not by asyncio's server: when it closes, it loses clients that connect at that moment.
        try:
            client, _ = listening.accept()
        except OSError:  # the client has left
            return
        client.setblocking(False)
        # In the group: an error of a connection must end the proxy, not go unnoticed.
        task = self._group.create_task(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before it starts closes nothing.
        task.add_done_callback(lambda _: client.close())

    async def _serve(self, accepted: socket.socket) -> None:
        async with _Stream(*await asyncio.open_connection(sock=accepted)) as client:
            try:
                server = _Stream(*await asyncio.open_connection(*self._target))
            except OSError:
                return
            async with server, _Link(client, server) as link, asyncio.TaskGroup() as both:
                requests = both.create_task(self._forward_requests(link))
                await self._forward_replies(link)
                requests.cancel()

    async def _forward_requests(self, link: "_Link") -> None:
        splitter = Splitter()
        while data := await link.client.read():
            for request in splitter.feed(data):
                found = self._find_fault(request)
                match found and found.fault:
                    case "drop request":
                        link.client.abort()
                        link.server.abort()
                        return
                    case "hold request":
                        link.muted = True
                        self._held.append(_Held(link, request.data))
                        link.client.abort()
                        return
                    case "drop reply":
                        link.muted = True
                    case "cut reply":
                        link.muted, link.cut = True, True
                    case "fail request" if found:
                        await link.client.write(found.answer)
                        link.client.end()
                        link.server.abort()
                        return
                    case "fail reply" if found:
                        link.muted, link.answer = True, found.answer
                link.awaiting = True
                await link.server.write(self._rewrite(request.data))
        # A request that the client left incomplete is forwarded as it is.
        await link.server.write(splitter.rest)
        link.server.end()

    async def _forward_replies(self, link: "_Link") -> None:
        while reply := await link.server.read():
            if link.muted:
                if link.cut:
                    reply = await link.read_rest(reply)
                await link.end_client(reply)
                # There is no client left to cut.
                self._tasks.discard(link.task)
                await link.swallow(reply)
                return
            if link.awaiting and self._delay:
                self._count(faults=1)
                await asyncio.sleep(self._delay)
            link.awaiting = False
            await link.client.write(reply)

    def _find_fault(self, request: "Request") -> "_Armed | None":
        """Count a request and return the fault that hits it."""
        if request.is_formality:
            return None
        found = next((a for a in self._armed if a.when(request.data)), None)
        self._count(requests=1, faults=found is not None)
        if found is None:
            return None
        found.left -= 1
        if not found.left:
            self._armed.remove(found)
        return found


class Request(NamedTuple):
    """All bytes that a client sends before it awaits an answer."""

    data: bytes
    is_formality: bool = False
    """Whether it only opens or ends a connection."""


class Splitter:
    """Splits the bytes of one client into complete requests."""

    def __init__(self) -> None:
        self.rest = b""
        self._is_postgres: bool | None = None

    def feed(self, data: bytes) -> Iterator[Request]:
        """Add received bytes, and yield the requests that are complete now.

        Raises:
            ValueError: the proxy cannot forward this protocol.
        """
        self.rest += data
        if self._is_postgres is None:
            # PostgreSQL opens with a length below 16 MB, HTTP with a verb.
            self._is_postgres = self.rest[0] == 0
        measure = _measure_postgres if self._is_postgres else _measure_http
        while size := measure(self.rest):
            data, self.rest = self.rest[:size], self.rest[size:]
            # The opening message has no type byte; `p` has passwords, `X` terminates.
            yield Request(data, is_formality=self._is_postgres and data[:1] in b"\0pX")


def _measure_http(data: bytes) -> int:
    """Return the length of the first request or reply, 0 if it is incomplete."""
    if data and not data[:1].isupper():
        raise ValueError(f"neither HTTP nor PostgreSQL: {data[:20]!r}")
    body = data.find(b"\r\n\r\n") + 4
    if body < 4:
        return 0
    head = data[:body]
    if head.startswith(b"HTTP/") and re.search(rb"(?i)\r\ntransfer-encoding: *chunked\r\n", head):
        return _measure_chunks(data, body)
    if found := re.search(rb"(?i)\r\n(transfer-encoding|expect):.*", head):
        raise ValueError(f"the length of a body must be in Content-Length, not {found[0]!r}")
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    size = body + (int(found[1]) if found else 0)
    return size if len(data) >= size else 0


def _measure_chunks(data: bytes, at: int) -> int:
    """Return where a body in chunks ends that begins there, 0 if it is incomplete."""
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].partition(b";")[0], 16)
        at = end + 2 + size + 2
        if not size:
            return at if len(data) >= at else 0
    return 0


def _measure_postgres(data: bytes) -> int:
    """Return the length of the first request, 0 if it is incomplete."""
    if data[:1] == b"\0":
        size = int.from_bytes(data[:4], "big")
        return size if 4 <= size <= len(data) else 0
    at = 0
    while len(data) >= at + 5:
        kind, at = data[at : at + 1], at + 1 + int.from_bytes(data[at + 1 : at + 5], "big")
        if at > len(data):
            return 0
        # The messages after which a server answers: Query, Sync, Flush, FunctionCall,
        # CopyDone, CopyFail, passwords; and Terminate, after which it does not.
        if kind in b"QSHFcfpX":
            return at
    return 0


class _Stream:
    """One side of a connection. A broken connection looks like an ended one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._has_ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        try:
            self._writer.close()
            await self._writer.wait_closed()
        except OSError:
            pass
        finally:
            self.abort()

    async def read(self) -> bytes:
        try:
            return await self._reader.read(_CHUNK)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        if self._has_ended:
            return
        with contextlib.suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    def end(self) -> None:
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def abort(self) -> None:
        self._writer.transport.abort()


class _Link:
    """A client, and the server behind it."""

    def __init__(self, client: _Stream, server: _Stream) -> None:
        self.client = client
        self.server = server
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[None] = task
        self.awaiting = False
        self.muted = False
        """Whether the client does not get the whole reply."""
        self.cut = False
        """Whether it gets half of the reply."""
        self.answer = b""
        """What it gets instead of the reply."""
        self._answer: asyncio.Future[bytes] = asyncio.Future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._answer.done():
            self._answer.set_result(b"")

    async def deliver(self, request: bytes) -> bytes:
        """Deliver a held request; return the server's answer."""
        await self.server.write(request)
        return await self._answer

    async def read_rest(self, reply: bytes) -> bytes:
        """Return an HTTP reply with its body: half of a head alone may look like a whole reply."""
        # The reply to a HEAD names a length and has no body.
        with contextlib.suppress(TimeoutError):
            while reply.startswith(b"HTTP/") and not _measure_http(reply):
                more = await asyncio.wait_for(self.server.read(), _QUIET_SECONDS)
                if not more:
                    break
                reply += more
        return reply

    async def end_client(self, reply: bytes) -> None:
        """Close the client's side, after the part of the reply or the answer that it gets."""
        if not (self.cut or self.answer):
            self.client.abort()
            return
        await self.client.write(reply[: len(reply) // 2] if self.cut else self.answer)
        self.client.end()

    async def swallow(self, reply: bytes) -> None:
        """Read an answer to its end without forwarding it."""
        # Not before an answer came: servers abort the work of a client that leaves.
        self.server.end()
        # Some servers close only long after their client did.
        with contextlib.suppress(TimeoutError):
            while more := await asyncio.wait_for(self.server.read(), _QUIET_SECONDS):
                reply += more
        self._answer.set_result(reply)


class _Armed:
    """A fault that waits for its request."""

    def __init__(self, fault: Fault, left: int, when: When, status: int) -> None:
        self.fault = fault
        self.left = left
        self.when = when
        head = f"HTTP/1.1 {status} Fault\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        self.answer = head.encode()


class _Held(NamedTuple):
    """A request that is held back."""

    link: _Link
    request: bytes


def _bind(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setblocking(False)
    bound.bind((_HOST, port))
    return bound
