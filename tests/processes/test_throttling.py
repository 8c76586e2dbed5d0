"""An overloaded or wrong server: no busy loop, no false outcome."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jobsync import Components, Misconfigured, OutcomeUnknown, Unavailable, open_store
from jobsync.core.urls import ObjectsUrl, parse_url
from jobsync.stores.objects.store import ObjectsStore
from jobsync.stores.settling import SettlingStore


class FixedAnswerServer(ThreadingHTTPServer):
    """Answers every request in the same way, and counts them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.body = b""
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        """Its URL, as a bucket."""
        return f"s3://KEY:hush-hush@127.0.0.1:{self.server_port}/bucket"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FixedAnswerServer

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(self.command)
        self.send_response(self.server.status)
        self.send_header("ETag", '"same"')
        self.send_header("Last-Modified", "Sun, 15 Nov 2026 08:00:00 GMT")
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.server.body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[FixedAnswerServer]:
    """A server with a configurable answer."""
    with FixedAnswerServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


EMPTY_LIST = (
    b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount>'
    b"<IsTruncated>false</IsTruncated></ListBucketResult>"
)
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"


async def open_through(server: FixedAnswerServer, clock: Any) -> SettlingStore:
    """Open a store on the server, with a clock that moves only during sleeps."""
    server.body = EMPTY_LIST
    url = parse_url(server.url)
    assert isinstance(url, ObjectsUrl)
    system = Components.system()
    components = Components(clock=clock, randomness=system.randomness, events=system.events)
    store = SettlingStore(await ObjectsStore.connect(url, components), components, deadline=60)
    server.requests.clear()
    return store


async def test_a_throttled_minute_costs_few_requests(server: FixedAnswerServer, clock: Any) -> None:
    """Throttled for a minute, a writer retries less and less often, then returns unknown."""
    store = await open_through(server, clock)
    server.status, server.body = 503, SLOW_DOWN
    begun = clock.mono()
    with pytest.raises((OutcomeUnknown, Unavailable)):
        await store.create("n/1", 1)
    writes = server.requests.count("PUT")
    assert clock.mono() - begun < 70
    assert 1 <= writes <= 120
    assert len(server.requests) <= 500
    await store.close()


async def test_a_throttled_reader_is_unavailable(server: FixedAnswerServer, clock: Any) -> None:
    """A read fails after a few tries, with the reason."""
    store = await open_through(server, clock)
    server.status, server.body = 503, SLOW_DOWN
    with pytest.raises(Unavailable, match="503 SlowDown"):
        await store.get("n/1")
    assert len(server.requests) <= 10
    await store.close()


async def test_expired_credentials_are_named(server: FixedAnswerServer, clock: Any) -> None:
    """The error states what expired and shows no secret; there are no retries."""
    store = await open_through(server, clock)
    server.status, server.body = 400, EXPIRED
    with pytest.raises(Misconfigured, match="ExpiredToken") as caught:
        await store.create("n/1", 1)
    assert "hush-hush" not in f"{caught.value} {caught.value!r}"
    assert len(server.requests) <= 2
    await store.close()


async def test_a_server_that_answers_200_to_everything_is_refused(
    server: FixedAnswerServer,
) -> None:
    """Opening it fails with the reason."""
    server.body = EMPTY_LIST
    with pytest.raises(Misconfigured, match="that jobsync did not write") as caught:
        await open_store(server.url)
    assert "hush-hush" not in f"{caught.value} {caught.value!r}"
