"""Where probes ask over HTTP: a server on a thread of its own, so that a busy loop is no death."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from jobsync.cli.health_state import HealthReport, HealthState
from jobsync.errors import Invalid, Misconfigured

__all__ = ["read_address", "serving"]

_HIGHEST_PORT = 65_535


def read_address(text: str) -> tuple[str, int]:
    """Understand [HOST:]PORT; without a host, only this machine may ask.

    Raises:
        Invalid: it is none.
    """
    host, _, port = text.rpartition(":")
    if port.isdecimal() and 0 <= int(port) <= _HIGHEST_PORT:
        return host.strip("[]") or "127.0.0.1", int(port)
    raise Invalid("--http", text, "is no address", "give a port, or 0.0.0.0:8080 for all to ask")


@contextmanager
def serving(address: tuple[str, int], pulse: HealthState) -> Iterator[str]:
    """Answer probes over HTTP; give the address that is listened on.

    Raises:
        Misconfigured: it cannot be listened on.
    """
    answers: Mapping[str, Callable[[], HealthReport]] = {
        "/livez": pulse.live,
        "/health/live": pulse.live,
        "/readyz": pulse.ready,
        "/health/ready": pulse.ready,
    }

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            probe = answers.get(self.path.partition("?")[0])
            if probe is None:
                self._send(404, {"status": "unknown", "paths": sorted(answers)})
            else:
                report = probe()
                self._send(200 if report.is_well else 503, report.body())

        do_HEAD = do_GET  # noqa: N815 - as the server looks for it

        def _send(self, status: int, body: Mapping[str, object]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing: probes come every few seconds."""

    try:
        server = http.server.ThreadingHTTPServer(address, Answer)
    except OSError as error:
        host, port = address
        raise Misconfigured(
            "--http", f"{host}:{port}", error.strerror or str(error), "choose another"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="jobsync-probes", daemon=True)
    thread.start()
    try:
        yield f"http://{address[0]}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
