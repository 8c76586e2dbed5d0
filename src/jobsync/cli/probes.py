"""The HTTP server that answers probes of a worker process, on a thread of its own.

A busy event loop does not delay it. Clients cannot exhaust it: the number of open connections is
limited, and the oldest one makes room for a new one. So are the time and the size of a request.
Each connection gets one response. Readiness is found out on yet another thread, because plugins
of the user take part: one that blocks leaves the other probes alone.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus

from jobsync.cli.health import HealthReport, HealthState
from jobsync.errors import Misconfigured
from jobsync.safe_text import format_error

__all__ = ["MAX_CONNECTIONS", "serve_probes"]

MAX_CONNECTIONS = 100
"""How many connections are open at once. A probe lasts milliseconds: the others are idle."""

_MAX_REQUEST = 8192
_BACKLOG = 1024
_TIMEOUT = 5.0
"""Seconds that a connection may take, from its first byte to its last."""
_STOP_TIMEOUT = 1.0
_END = b"\r\n\r\n"
_WORDS = 3
"""Method, path and version: the words of a request's first line."""


@contextmanager
def serve_probes(
    address: tuple[str, int], state: HealthState, timeout: float = _TIMEOUT
) -> Iterator[str]:
    """Answer probes over HTTP as long as the block lasts; yield the URL.

    Args:
        address: host and port.
        state: answers the probes.
        timeout: seconds that a connection may take.

    Raises:
        Misconfigured: the address cannot be listened on.
    """
    listener = _listen(address)
    port = listener.getsockname()[1]
    server = _ProbeServer(listener, state, timeout)
    thread = threading.Thread(target=server.run, name="jobsync-probes", daemon=True)
    thread.start()
    try:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        thread.join(_STOP_TIMEOUT)


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"cannot be listened on: {error.strerror or error}"
        raise Misconfigured("--http", f"{host}:{port}", problem, "choose another") from None
    return listener


class _ProbeServer:
    """Answers requests on its own event loop.

    Args:
        listener: the socket that listens.
        state: answers the probes.
        timeout: seconds that a connection may take.
    """

    def __init__(self, listener: socket.socket, state: HealthState, timeout: float) -> None:
        self._listener = listener
        self._state = state
        self._timeout = timeout
        self._probes: Mapping[str, Callable[[], Awaitable[HealthReport]]] = {
            "/livez": self._check_live,
            "/health/live": self._check_live,
            "/readyz": self._check_ready,
            "/health/ready": self._check_ready,
        }
        self._ready_check: asyncio.Future[HealthReport] | None = None
        """The check of readiness that runs now."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, None] = {}
        """The open connections, the oldest first."""

    def run(self) -> None:
        """Serve until `stop`."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def stop(self) -> None:
        """Close all connections and end `run`, from another thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._converse, sock=self._listener, limit=_MAX_REQUEST, backlog=_BACKLOG
        )
        await self._stopping.wait()
        server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request, answer it and close the connection."""
        self._open[writer] = None
        if len(self._open) > MAX_CONNECTIONS:
            self._abort(next(iter(self._open)))
        try:
            async with asyncio.timeout(self._timeout):
                writer.write(await self._read_and_answer(reader))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, EOFError):
            # Too slow, or gone: nobody waits for an answer.
            pass
        finally:
            self._abort(writer)

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        self._open.pop(writer, None)
        writer.transport.abort()

    async def _read_and_answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(_END)
        except asyncio.LimitOverrunError:
            return _build_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, {})
        return await self._answer(head)

    async def _check_live(self) -> HealthReport:
        return self._state.live()

    async def _check_ready(self) -> HealthReport:
        """Check readiness on a thread of its own, one for all that ask meanwhile."""
        if self._ready_check is None:
            self._ready_check = self._loop.create_future()
            check = threading.Thread(
                target=self._run_ready_check,
                args=(self._ready_check,),
                name="jobsync-readiness",
                daemon=True,
            )
            check.start()
        return await asyncio.shield(self._ready_check)

    def _run_ready_check(self, check: asyncio.Future[HealthReport]) -> None:
        try:
            report = self._state.ready()
        except BaseException as error:  # noqa: BLE001 - a plugin of the user may raise anything
            report = HealthReport(status="not_ready", reasons=[format_error(error)])
        # A server that has stopped meanwhile has closed its loop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_ready_check, check, report)

    def _end_ready_check(self, check: asyncio.Future[HealthReport], report: HealthReport) -> None:
        self._ready_check = None
        if not check.done():
            check.set_result(report)

    async def _answer(self, head: bytes) -> bytes:
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != _WORDS or not words[-1].startswith("HTTP/1."):
            return _build_response(HTTPStatus.BAD_REQUEST, {"status": "malformed"})
        method, path, _ = words
        if method not in {"GET", "HEAD"}:
            return _build_response(HTTPStatus.METHOD_NOT_ALLOWED, {"allowed": ["GET", "HEAD"]})
        probe = self._probes.get(path.partition("?")[0])
        if probe is None:
            body: Mapping[str, object] = {"status": "unknown", "paths": sorted(self._probes)}
            status = HTTPStatus.NOT_FOUND
        else:
            report = await probe()
            body = report.body()
            status = HTTPStatus.OK if report.is_healthy else HTTPStatus.SERVICE_UNAVAILABLE
        return _build_response(status, body, has_body=method == "GET")


def _build_response(
    status: HTTPStatus, body: Mapping[str, object], *, has_body: bool = True
) -> bytes:
    data = json.dumps(body).encode()
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Connection: close",
    )
    head = "\r\n".join(lines).encode() + _END
    return head + data if has_body else head
