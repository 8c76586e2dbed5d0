"""Run the command line in processes that are forked from one which has loaded it already.

A command behaves as it does in a new interpreter, without the quarter of a second of CPU that
loading takes. `tests/integration/cli/test_help.py` and the tests that run `python -m jobsync`
cover a start from nothing.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

__all__ = ["start", "wait"]

_TIMEOUT = 120.0
_MAX_REQUEST = 1 << 20


def start(words: Sequence[str], environ: dict[str, str], files: Sequence[int]) -> None:
    """Start a command with its standard input, output and error; one at a time."""
    request = json.dumps([words, environ, str(Path.cwd())]).encode()
    _, connection = _start_server()
    socket.send_fds(connection, [request], list(files))


def wait() -> int:
    """Wait for the command to end; return its exit code."""
    _, connection = _start_server()
    reply = connection.recv(_MAX_REQUEST)
    assert reply, "the fork server has died"
    return int(reply)


@cache
def _start_server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the fork server; it ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_TIMEOUT)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(number)], pass_fds=[number]
        )
    atexit.register(_stop_server, process, ours)
    return process, ours


def _stop_server(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.wait(_TIMEOUT)


def _serve(connection: socket.socket) -> list[str]:
    """Fork for each request; return in the child only, with the words of its command line."""
    while True:
        request, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 3)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            connection.close()
            return _set_up_child(request, files)
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _set_up_child(request: bytes, files: list[int]) -> list[str]:
    words, environ, folder = json.loads(request)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False, encoding="utf-8")  # noqa: SIM115 - as Python does
        for number, mode in enumerate(("r", "w", "w"))
    )
    return [str(word) for word in words]


if __name__ == "__main__":
    import jobsync.cli.worker_process
    import jobsync.jobs.sql_views
    import jobsync.queue.enqueue
    import jobsync.queue.sql.postgres
    import jobsync.status.why
    import jobsync.stores.postgres.store
    import jobsync.stores.probe  # noqa: F401 - but not the store for objects, which forks badly
    from jobsync.cli.main import main

    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    main()
