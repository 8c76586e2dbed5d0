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

__all__ = ["begin", "finish"]

_PATIENCE = 120.0
_SIZE = 1 << 20


def begin(words: Sequence[str], environ: dict[str, str], files: Sequence[int]) -> None:
    """Begin a command with its standard input, output and error; one at a time."""
    request = json.dumps([words, environ, str(Path.cwd())]).encode()
    _, line = _start()
    socket.send_fds(line, [request], list(files))


def finish() -> int:
    """Wait for the end of the command; give its exit status."""
    _, line = _start()
    told = line.recv(_SIZE)
    assert told, "the process that starts commands has died"
    return int(told)


@cache
def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that starts commands; it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_PATIENCE)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SIZE)
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(number)], pass_fds=[number]
        )
    atexit.register(_end, process, ours)
    return process, ours


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    line.close()
    process.wait(_PATIENCE)


def _serve(line: socket.socket) -> list[str]:
    """Fork for each call; return in the child only, with its words."""
    while True:
        request, files, _, _ = socket.recv_fds(line, _SIZE, 3)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            line.close()
            return _become(request, files)
        for each in files:
            os.close(each)
        _, status = os.waitpid(child, 0)
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: bytes, files: list[int]) -> list[str]:
    """Be the process that was asked for."""
    words, environ, folder = json.loads(request)
    for place, each in enumerate(files):
        os.dup2(each, place)
        os.close(each)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.stdin, sys.stdout, sys.stderr = (
        open(place, mode, closefd=False, encoding="utf-8")  # noqa: SIM115 - as Python does
        for place, mode in enumerate(("r", "w", "w"))
    )
    return [str(word) for word in words]


if __name__ == "__main__":
    import jobsync.cli.examination
    import jobsync.cli.explanation
    import jobsync.cli.shell
    import jobsync.cli.target
    import jobsync.queue.enqueue
    import jobsync.queue.sql.postgres
    import jobsync.stores.postgres.store  # noqa: F401 - not that of objects, which forks badly
    from jobsync.cli.main import main

    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    main()
