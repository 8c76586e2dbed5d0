"""The proxy causes the faults that it is told to, and no others."""

import asyncio
import http.client
import select
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from proxy import Proxy, Request, Splitter

BIG = b"x" * 1_000_000


class RecordingServer(ThreadingHTTPServer):
    """A server that records each PUT and answers with the path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.puts: list[tuple[str, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    """One connection to the server."""

    server: RecordingServer
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """Record it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.puts.append((self.path, body))
        self.do_GET()

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    """Start the server."""
    with RecordingServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: RecordingServer) -> Iterator[Proxy]:
    """Start a proxy in front of it."""
    with Proxy("127.0.0.1", server.server_port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[http.client.HTTPConnection]:
    """Return a client that keeps its connection open."""
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    yield client
    client.close()


def ask(client: http.client.HTTPConnection, path: str, body: bytes | None = None) -> bytes:
    """Send a GET, or a PUT if there is a body; return the body of the answer."""
    client.request("GET" if body is None else "PUT", path, body)
    return client.getresponse().read()


def is_put(request: bytes) -> bool:
    """Whether a request writes."""
    return request.startswith(b"PUT")


def test_requests_pass_and_are_counted(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """Several on one connection, one of them far larger than a packet."""
    assert ask(client, "/a", b"1") == b"/a"
    first = client.sock
    assert ask(client, "/b", BIG) == b"/b"
    assert ask(client, "/c") == b"/c"
    assert client.sock is first
    assert server.puts == [("/a", b"1"), ("/b", BIG)]
    assert (proxy.requests, proxy.faults) == (3, 0)


def test_a_delayed_reply_comes_later(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """The server has carried out the request while its client still waits."""
    proxy.delay(3600)
    client.request("PUT", "/a", b"1")
    proxy.wait_for(faults=1)
    assert server.puts == [("/a", b"1")]
    assert select.select([client.sock], [], [], 0) == ([], [], [])


def test_a_delay_ends_by_itself(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    """Every reply is delayed once and then arrives, until the delay is lifted."""
    proxy.delay(0.001)
    assert ask(client, "/a") == b"/a"
    assert ask(client, "/b") == b"/b"
    assert proxy.faults == 2
    proxy.pass_through()
    assert ask(client, "/c") == b"/c"
    assert proxy.faults == 2


def test_new_connections_are_refused_and_old_ones_go_on(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    """Nobody listens until connections are accepted again, on the same port."""
    ask(client, "/a")
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))
    assert ask(client, "/b") == b"/b"
    proxy.accept()
    socket.create_connection(("127.0.0.1", proxy.port)).close()


@pytest.mark.parametrize("size", [100, 1 << 16])
def test_a_cut_reply_ends_in_its_middle(
    proxy: Proxy,
    client: http.client.HTTPConnection,
    server: RecordingServer,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    """The server has carried out the request; the client sees that the rest is missing.

    However the reply comes: in parts of 100 bytes, or all at once.
    """
    monkeypatch.setattr("proxy._CHUNK", size)
    proxy.cut_reply(when=is_put)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(client, f"/{'a' * 1000}", b"1")
    assert [body for _, body in server.puts] == [b"1"]
    client.close()
    assert ask(client, "/b") == b"/b"


def test_a_failed_request_does_not_reach_the_server(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """The client gets the status; its next request passes."""
    proxy.fail_request(503)
    client.request("PUT", "/a", b"1")
    assert client.getresponse().status == 503
    client.close()
    assert server.puts == []
    assert ask(client, "/b", b"2") == b"/b"


def test_a_failed_reply_hides_what_the_server_did(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """The server has carried out the request, and the client gets the status."""
    proxy.fail_reply(500)
    client.request("PUT", "/a", b"1")
    assert client.getresponse().status == 500
    assert server.puts == [("/a", b"1")]


def test_requests_are_rewritten(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """The server sees what the change returns."""
    proxy.rewrite(lambda request: request.replace(b"/a", b"/z"))
    assert ask(client, "/a", b"1") == b"/z"
    assert server.puts == [("/z", b"1")]


def test_passing_through_ends_all_faults(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    """One call ends every fault."""
    proxy.refuse()
    proxy.drop_request()
    proxy.pass_through()
    assert ask(client, "/a") == b"/a"


def test_a_cut_closes_every_connection_at_once(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    """The client notices without sending anything, and may connect again."""
    ask(client, "/a")
    proxy.cut()
    assert client.sock.recv(1) == b""
    assert proxy.faults == 1
    client.close()
    assert ask(client, "/b") == b"/b"


def test_a_cut_does_not_wait_for_a_delayed_reply(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    """What the proxy holds back is lost."""
    proxy.delay(3600)
    client.request("GET", "/a")
    proxy.wait_for(faults=1)
    proxy.cut()
    with pytest.raises(http.client.RemoteDisconnected):
        client.getresponse()


def test_a_dropped_request_never_arrives(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """The server does nothing, the client sees its connection close, the next one passes."""
    proxy.drop_request()
    with pytest.raises(http.client.RemoteDisconnected):
        ask(client, "/a", b"1")
    client.close()
    assert ask(client, "/b", b"2") == b"/b"
    assert server.puts == [("/b", b"2")]
    assert (proxy.requests, proxy.faults) == (2, 1)


def test_a_dropped_reply_leaves_the_request_carried_out(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """When the client sees its connection close, the server has done the work."""
    ask(client, "/a")
    proxy.drop_reply()
    with pytest.raises(http.client.RemoteDisconnected):
        ask(client, "/b", b"1")
    assert server.puts == [("/b", b"1")]
    client.close()
    assert ask(client, "/c") == b"/c"
    assert (proxy.requests, proxy.faults) == (3, 1)


def test_only_requests_that_match_are_struck_and_only_so_many(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    """Reads pass while two writes fail; the third write passes."""
    proxy.drop_reply(2, is_put)
    for _ in range(2):
        assert ask(client, "/r") == b"/r"
        with pytest.raises(http.client.RemoteDisconnected):
            ask(client, "/w", b"1")
        client.close()
    assert ask(client, "/w", b"1") == b"/w"
    assert proxy.faults == 2


def test_a_fault_sees_the_whole_request(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    """It finds a word at the end of a large body."""
    proxy.drop_request(when=lambda request: request.endswith(b"END"))
    assert ask(client, "/a", BIG) == b"/a"
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(client, "/b", BIG + b"END")


def test_a_held_request_lands_later(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """Its client is gone, others have written since, and then it arrives completely."""
    ask(client, "/a")
    proxy.hold_request(when=is_put)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(client, "/late", BIG)
    client.close()
    ask(client, "/b", b"2")
    assert server.puts == [("/b", b"2")]

    [answer] = proxy.release()

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"/late")
    assert server.puts == [("/b", b"2"), ("/late", BIG)]
    assert proxy.release() == []


def test_held_requests_survive_a_cut_and_land_in_order(
    proxy: Proxy, client: http.client.HTTPConnection, server: RecordingServer
) -> None:
    """A cut closes connections of clients; a held request has none."""
    proxy.hold_request(2)
    for path in ("/1", "/2"):
        with pytest.raises(http.client.RemoteDisconnected):
            ask(client, path, b"")
        client.close()
    proxy.cut()
    assert len(proxy.release()) == 2
    assert [path for path, _ in server.puts] == ["/1", "/2"]


def test_a_request_that_is_held_at_the_end_never_lands(server: RecordingServer) -> None:
    """Stopping drops it."""
    with Proxy("127.0.0.1", server.server_port) as proxy:
        proxy.hold_request()
        client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
        with pytest.raises(http.client.RemoteDisconnected):
            ask(client, "/a", b"1")
        client.close()
    assert server.puts == []


def test_a_server_that_is_down_looks_like_a_closed_connection(
    proxy: Proxy, server: RecordingServer, client: http.client.HTTPConnection
) -> None:
    """The proxy outlives it."""
    server.socket.close()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(client, "/a")
    proxy.pass_through()


def test_a_condition_that_raises_is_not_swallowed(server: RecordingServer) -> None:
    """The connection closes, and stopping raises what went wrong."""

    def fail(request: bytes) -> bool:
        raise LookupError(request[:3].decode())

    proxy = Proxy("127.0.0.1", server.server_port).start()
    proxy.drop_reply(when=fail)
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(client, "/a")
    client.close()
    with pytest.raises(ExceptionGroup) as caught:
        proxy.stop()
    assert caught.group_contains(LookupError, match="GET")


def test_a_stopped_proxy_says_so(server: RecordingServer) -> None:
    """Stopping again does nothing, and faults can no longer be changed."""
    proxy = Proxy("127.0.0.1", server.server_port).start()
    proxy.stop()
    proxy.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        proxy.cut()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))


async def test_it_serves_a_client_in_an_event_loop(proxy: Proxy) -> None:
    """Faults change from within the loop, because the proxy runs in a thread of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    proxy.drop_reply()
    writer.write(b"GET /a HTTP/1.1\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


class Connection:
    """Both ends of one connection through a proxy, controlled by the test."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.proxy = Proxy("127.0.0.1", listener.getsockname()[1]).start()
            self.client = socket.create_connection(("127.0.0.1", self.proxy.port), 30)
            self.server, _ = listener.accept()
            self.server.settimeout(30)

    def close(self) -> None:
        """Close both ends."""
        self.client.close()
        self.proxy.stop()
        self.server.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    """Return an open connection."""
    connection = Connection()
    yield connection
    connection.close()


GET = b"GET /a HTTP/1.1\r\n\r\n"


def test_a_dropped_request_closes_both_sides(connection: Connection) -> None:
    """The server notices that a connection without a request has closed."""
    connection.proxy.drop_request()
    connection.client.sendall(GET)
    assert connection.client.recv(100) == b""
    assert connection.server.recv(100) == b""


def test_a_cut_closes_both_sides(connection: Connection) -> None:
    """Neither has to send anything to notice."""
    connection.proxy.cut()
    assert connection.client.recv(100) == b""
    assert connection.server.recv(100) == b""


def test_a_dropped_reply_closes_the_client_first(connection: Connection) -> None:
    """The server may finish its answer; later cuts find no client."""
    connection.proxy.drop_reply()
    connection.client.sendall(GET)
    assert connection.server.recv(100) == GET
    connection.server.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.server.recv(100)
    connection.server.settimeout(30)
    connection.server.sendall(b"HTTP/1.1 200 OK\r\n")
    assert connection.client.recv(100) == b""
    assert connection.server.recv(100) == b""
    connection.proxy.cut()
    assert connection.proxy.faults == 1


def test_a_client_that_dies_while_it_sends_is_shown_as_it_is(connection: Connection) -> None:
    """Half a request and the end."""
    connection.client.sendall(GET[:-1])
    connection.client.close()
    assert connection.server.recv(100) == GET[:-1]
    assert connection.server.recv(100) == b""
    assert connection.proxy.requests == 0


def test_a_server_that_left_answers_nothing(connection: Connection) -> None:
    """A held request cannot arrive there, and nobody waits for it."""
    connection.proxy.hold_request()
    connection.client.sendall(GET)
    assert connection.client.recv(100) == b""
    connection.server.close()
    assert connection.proxy.release() == [b""]


def message(kind: bytes, body: bytes = b"") -> bytes:
    """Return a PostgreSQL message; the opening ones have no kind."""
    return kind + (len(body) + 4).to_bytes(4, "big") + body


STARTUP = message(b"", b"\0\3\0\0user\0postgres\0\0")
EXTENDED = message(b"P", b"\0INSERT\0") + message(b"B") + message(b"E") + message(b"S")


def test_the_opening_of_postgresql_always_passes(connection: Connection) -> None:
    """A fault waits for the first statement."""
    connection.proxy.hold_request()
    connection.client.sendall(STARTUP)
    assert connection.server.recv(100) == STARTUP
    connection.server.sendall(b"ready")
    assert connection.client.recv(100) == b"ready"
    assert connection.proxy.requests == 0
    connection.client.sendall(EXTENDED)
    assert connection.client.recv(100) == b""
    assert (connection.proxy.requests, connection.proxy.faults) == (1, 1)


CONVERSATION = [
    Request(message(b"", b"\x04\xd2\x16\x2f"), is_formality=True),
    Request(STARTUP, is_formality=True),
    Request(message(b"p", b"secret\0"), is_formality=True),
    Request(message(b"Q", b"BEGIN\0")),
    Request(EXTENDED),
    Request(message(b"X"), is_formality=True),
]


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_postgresql_is_cut_where_the_server_answers(piece: int) -> None:
    """However packets are cut, a request ends with a query or a sync; the opening is none."""
    sent = b"".join(request.data for request in CONVERSATION)
    splitter = Splitter()
    found = [
        request
        for at in range(0, len(sent), piece)
        for request in splitter.feed(sent[at : at + piece])
    ]
    assert found == CONVERSATION
    assert splitter.rest == b""


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_http_is_cut_by_its_lengths(piece: int) -> None:
    """However packets are cut, a body belongs to its head."""
    requests = [
        Request(b"PUT /a HTTP/1.1\r\ncontent-length:5\r\n\r\nX /\r\n"),
        Request(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"),
        Request(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n0\r\n\r\n"
            + b"x" * 6
            + b"\r\n0\r\n\r\n"
        ),
        Request(b"HTTP/1.1 204 No Content\r\n\r\n"),
    ]
    sent = b"".join(request.data for request in requests)
    splitter = Splitter()
    found = [
        request
        for at in range(0, len(sent), piece)
        for request in splitter.feed(sent[at : at + piece])
    ]
    assert found == requests


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 a TLS handshake",
        b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n",
    ],
)
def test_what_cannot_be_cut_is_refused(data: bytes) -> None:
    """Guessing where a request ends would hang the test."""
    with pytest.raises(ValueError, match=r"not|neither"):
        list(Splitter().feed(data))
