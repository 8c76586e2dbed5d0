"""Probes over HTTP: answered whatever else comes to their port."""

import asyncio
import http.client
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from chance import FakeClock
from click.testing import CliRunner
from waiting import until

from jobsync.cli.health import (
    HealthReport,
    HealthState,
    health,
    parse_address,
    write_heartbeat,
)
from jobsync.cli.probes import MAX_CONNECTIONS, _ProbeServer, serve_probes
from jobsync.core.clock import Wall
from jobsync.errors import Invalid, Misconfigured

PATIENCE = 60.0
"""Seconds after which a test gives up. Nothing promises to be this fast or slow."""


class Server:
    """A server of probes, and clients of it."""

    def __init__(self, url: str) -> None:
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 0

    def probe(self, path: str = "/readyz", method: str = "GET") -> tuple[int, bytes]:
        """Return the status and the body of a response."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection((self.host, self.port), PATIENCE)

    def send(self, request: bytes) -> bytes:
        """Return everything that a raw request is answered with."""
        with self.connect() as client:
            client.sendall(request)
            return read_all(client)


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


@contextmanager
def serving(reasons: list[str], timeout: float = PATIENCE) -> Iterator[Server]:
    """Serve probes that fail for these reasons."""
    state = HealthState(FakeClock(), lambda: reasons)
    with serve_probes(("127.0.0.1", 0), state, timeout) as url:
        yield Server(url)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of a healthy process, with all the time in the world for a request."""
    with serving([]) as server:
        yield server


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow this process a few thousand open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", ["/readyz", "/health/ready"])
def test_each_probe_tells_what_is_so_now(path: str) -> None:
    """Readiness comes and goes; a process that is not ready is alive."""
    reasons: list[str] = []
    with serving(reasons) as server:
        for _ in range(2):
            assert server.probe(path) == (200, b'{"status": "ready"}')
            reasons.append("the store does not answer")
            status, body = server.probe(path)
            assert (status, json.loads(body)) == (503, {"status": "not_ready", "reasons": reasons})
            assert server.probe("/livez") == (200, b'{"status": "alive"}')
            reasons.clear()


NOW = 1_800_000_000.0


@pytest.mark.parametrize("max_age", [1.0, 15.0])
@pytest.mark.parametrize("reasons", [[], ["the store does not answer"]])
@pytest.mark.parametrize("probe", ["live", "ready"])
def test_health_tells_what_the_heartbeat_file_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    probe: str,
    reasons: list[str],
    max_age: float,
) -> None:
    """Alive while the file is young, and ready if nothing is in the way; 3 otherwise."""
    monkeypatch.setattr("jobsync.cli.health.now", lambda: NOW)
    file = tmp_path / "heartbeat.json"
    words = [f"--{probe}", "--json", "--heartbeat-file", str(file), "--max-age", str(max_age)]
    if (probe, max_age) == ("ready", 15.0):
        # The defaults.
        words = ["--json", "--heartbeat-file", str(file)]
    for age in (None, 0.0, 1.0, 2.0, 15.0, 15.5):
        expected = reasons if probe == "ready" else []
        if age is None:
            expected = [f"{file} does not exist: no process has started to work"]
        else:
            write_heartbeat(file, HealthReport(status="", reasons=reasons), Wall(NOW - age))
            if age > max_age:
                expected = [f"no heartbeat for {age:.0f} s"]
        done = CliRunner().invoke(health, words)
        (row,) = json.loads(done.stdout)
        status = "unhealthy" if expected else {"live": "alive", "ready": "ready"}[probe]
        pid = None if age is None else os.getpid()
        assert row == {"status": status, "pid": pid, "reasons": expected}
        assert done.exit_code == (3 if expected else 0)


def test_a_heartbeat_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Who reads it meanwhile gets the former one to its end; nothing is left beside it."""
    file = tmp_path / "heartbeat.json"
    write_heartbeat(file, HealthReport(status="ready"), Wall(NOW))
    former = file.read_bytes()
    with file.open("rb") as reader:
        write_heartbeat(file, HealthReport(status="", reasons=["connecting"]), Wall(NOW + 1))
        assert reader.read() == former
    assert json.loads(file.read_bytes())["at"] == NOW + 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"pid": 1, "at": "now"}', None])
def test_what_is_no_heartbeat_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """Or cannot be read: that says nothing about the process."""
    file = tmp_path / "heartbeat.json"
    file.write_bytes(content or b"")
    if content is None:

        def refuse(_: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", refuse)
    error = CliRunner().invoke(health, ["--heartbeat-file", str(file)]).exception
    assert isinstance(error, Misconfigured)
    assert (error.field, error.value) == ("--heartbeat-file", str(file))
    assert error.problem.startswith("cannot be read: ")


@pytest.mark.parametrize("unready", [[], ["connecting"]])
@pytest.mark.parametrize("failure", ["", "a bug"])
@pytest.mark.parametrize("seconds", [0.0, 300.0, 301.0])
def test_a_process_whose_loop_is_blocked_is_neither_live_nor_ready(
    unready: list[str], failure: str, seconds: float
) -> None:
    """After five minutes, until the loop runs again; a failure is for good."""
    clock = FakeClock()
    state = HealthState(clock, lambda: unready)
    state.failure = failure
    clock.mono_seconds += seconds
    blocked = ["the event loop has been blocked for 301 s"] if seconds > 300 else []
    for stuck in ([failure] * bool(failure) + blocked, [failure] * bool(failure)):
        live, ready = state.live(), state.ready()
        assert (live.status, live.reasons) == ("stuck" if stuck else "alive", stuck)
        reasons = stuck or unready
        assert (ready.status, ready.reasons) == ("not_ready" if reasons else "ready", reasons)
        state.mark_alive()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8080", ("127.0.0.1", 8080)),
        (":8080", ("127.0.0.1", 8080)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        ("[::1]:8080", ("::1", 8080)),
        ("here.example:80", ("here.example", 80)),
        ("65536", None),
        ("-1", None),
        ("here.example", None),
        ("here.example:", None),
        ("", None),
    ],
)
def test_an_address_is_a_port_with_or_without_a_host(
    text: str, address: tuple[str, int] | None
) -> None:
    """Without one, only this machine can reach it."""
    if address is None:
        with pytest.raises(Invalid, match="--http is not an address"):
            parse_address(text)
    else:
        assert parse_address(text) == address


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_url_of_the_probes_can_be_requested(host: str, shown: str) -> None:
    """As it is printed, with the port that was chosen; what follows a question mark is ignored."""
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with serve_probes((host, 0), HealthState(FakeClock(), list)) as url:
        server = Server(url)
        assert url == f"http://{shown}:{server.port}"
        assert server.probe("/livez?verbose") == (200, b'{"status": "alive"}')
        head = server.send(b"HEAD /health/live HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.endswith(b"\r\n\r\n")


def has_ipv6() -> bool:
    """Whether this machine can listen on its IPv6 address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.usefixtures("many_files")
def test_a_probe_is_answered_beside_a_thousand_idle_connections(server: Server) -> None:
    """The oldest make room; neither threads nor open connections grow with them."""
    count = 1000
    threads = threading.active_count()
    with ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(count)]
        # Asked for readiness, the server checks it on a thread that may outlive the answer.
        assert server.probe("/livez") == (200, b'{"status": "alive"}')
        assert threading.active_count() <= threads
        # The oldest were closed, to the last one: more than the limit cannot be open.
        for client in idle[: count - MAX_CONNECTIONS]:
            assert read_all(client) == b""
        assert server.probe() == (200, b'{"status": "ready"}')


def test_a_slow_request_is_cut_off() -> None:
    """A client that keeps sending, but never ends its request, is disconnected in time."""
    with serving([], timeout=0.2) as server, server.connect() as slow:
        slow.settimeout(0.01)
        closed = False
        while not closed:
            try:
                slow.send(b"X")
                closed = slow.recv(1) == b""
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                closed = True


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /readyz\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /readyz SPDY/1\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET  /readyz HTTP/1.1\r\n\r\n", b"HTTP/1.1 400"),
        (b"\xff\x00\xfe" * 20 + b"\r\n\r\n", b"HTTP/1.1 400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"HTTP/1.1 400"),
        (b"POST /readyz HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
        (b"GET /../readyz HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"GET /\xe4\xdc HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"GET /readyz?verbose HTTP/1.0\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\nGET /livez HTTP/1.1\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /readyz HTTP/1.1\r\nA: " + b"x" * 4096 + b"\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /readyz HTTP/1.1\r\nA: " + b"x" * 8192 + b"\r\n\r\n", b"HTTP/1.1 431"),
        (b"GET /" + b"x" * 9000, b"HTTP/1.1 431"),
        (b"", b""),
    ],
)
def test_malformed_requests_do_no_harm(server: Server, request_: bytes, answer: bytes) -> None:
    """Each gets at most one response, and the next probe is answered."""
    with server.connect() as client:
        client.sendall(request_)
        client.shutdown(socket.SHUT_WR)
        answered = read_all(client)
    assert answered.startswith(answer)
    assert answered.count(b"HTTP/1.1") == bool(answer)
    assert server.probe()[0] == 200


@pytest.mark.parametrize("part", [b"GET /", b"GET /readyz HTTP/1.1\r\nA: b\r\n"])
def test_a_huge_request_is_not_read(server: Server, part: bytes) -> None:
    """The connection is closed long before the client has sent everything."""
    with server.connect() as client:
        sent = client.send(part)
        try:
            while sent < 1_000_000_000:
                sent += client.send(b"x" * 65536)
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert sent < 100_000_000
    assert server.probe()[0] == 200


def test_clients_that_leave_or_never_read_do_no_harm(server: Server) -> None:
    """A connection may be reset or half closed at any time."""
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            client = stack.enter_context(server.connect())
            client.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
        with server.connect() as reset:
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            reset.sendall(b"GET /readyz HTTP/1.1\r\n")
        assert server.probe()[0] == 200


def test_a_probe_says_why_it_fails() -> None:
    """In the body, with the status that orchestrators expect; HEAD has no body."""
    with serving(["the store is away"]) as server:
        body = b'{"status": "not_ready", "reasons": ["the store is away"]}'
        assert server.probe("/health/ready") == (503, body)
        assert server.probe("/health/ready", "HEAD") == (503, b"")
        assert server.probe("/health/live") == (200, b'{"status": "alive"}')
        assert server.probe("/metricz")[0] == 404


def test_a_check_of_readiness_that_blocks_leaves_other_probes_alone() -> None:
    """It is not repeated meanwhile: all who ask get its result."""
    may_end, checks = threading.Event(), list[str]()

    def check() -> list[str]:
        checks.append("started")
        may_end.wait(PATIENCE)
        return ["late"]

    state = HealthState(FakeClock(), check)
    with serve_probes(("127.0.0.1", 0), state, PATIENCE) as url, ThreadPoolExecutor(2) as threads:
        server = Server(url)
        waiting = [threads.submit(server.probe) for _ in range(2)]
        assert server.probe("/livez")[0] == 200
        may_end.set()
        assert [each.result()[0] for each in waiting] == [503, 503]
    with serve_probes(("127.0.0.1", 0), state, PATIENCE) as url:
        assert Server(url).probe()[0] == 503


def test_a_check_of_readiness_that_raises_is_a_reason() -> None:
    """The answer has the error, and the next probe asks again."""
    answers = iter([ZeroDivisionError("a bug")])

    def check() -> list[str]:
        for error in answers:
            raise error
        return []

    with serve_probes(("127.0.0.1", 0), HealthState(FakeClock(), check), PATIENCE) as url:
        status, body = Server(url).probe()
        assert (status, b"ZeroDivisionError: a bug" in body) == (503, True)
        assert Server(url).probe()[0] == 200


def test_an_address_that_is_taken_is_refused(server: Server) -> None:
    """The error names it; after the end it is free again."""
    taken = ("127.0.0.1", server.port)
    state = HealthState(FakeClock(), list)
    with (
        pytest.raises(Misconfigured, match=r"--http cannot be listened on: Address already in use"),
        serve_probes(taken, state),
    ):
        pass
    with serve_probes(("127.0.0.1", 0), state) as url:
        port = urlsplit(url).port or 0
    with serve_probes(("127.0.0.1", port), state) as url:
        assert Server(url).probe()[0] == 200


async def test_a_probe_that_gives_up_leaves_the_others_alone() -> None:
    """They get the answer of the same check, which one thread makes for all."""
    may_end, checks = threading.Event(), 0

    def check() -> HealthReport:
        nonlocal checks
        checks += 1
        may_end.wait(60)
        return HealthReport(status="ready")

    server = _ProbeServer(cast("Any", None), cast("Any", SimpleNamespace(ready=check)), 60.0)
    server._loop.close()
    server._loop = asyncio.get_running_loop()
    probes = [asyncio.ensure_future(server._check_ready()) for _ in range(3)]
    await until(lambda: checks, "the check has begun")
    probes[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await probes[0]
    may_end.set()
    assert await asyncio.gather(*probes[1:]) == [HealthReport(status="ready")] * 2
    assert checks == 1
