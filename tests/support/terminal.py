"""Run the command line in a pipe and on a terminal, and read its output."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import Any

import fork_server
from waiting import TIMEOUT

__all__ = ["JOBSYNC", "jobsync", "on_terminal", "read_json", "read_tsv", "run", "run_on_terminal"]

JOBSYNC = [sys.executable, "-W", "error", "-m", "jobsync"]
_colours = re.compile(r"\x1b\[\d*m")
_notes = re.compile(r"\n?^not shown, for want of width:.*(?:\n  .*)*", re.MULTILINE)


def jobsync(
    *words: str, stdin: str = "", environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a pipe."""
    with TemporaryFile("w+") as into, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        into.write(stdin)
        into.seek(0)
        fork_server.start(words, dict(environ), [file.fileno() for file in (into, out, err)])
        status = fork_server.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), err.read())


def run(url: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a pipe, with the URL of the store in the environment."""
    return jobsync(*words, stdin=stdin, environ=os.environ | {"JOBSYNC_URL": url})


def read_json(url: str, *words: str) -> Any:
    """Run a command with --json; return what it prints."""
    done = run(url, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_tsv(text: str) -> list[dict[str, str]]:
    """Parse rows that were printed to a pipe."""
    header, *lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [dict(zip(header, line, strict=True)) for line in lines]


def on_terminal(url: str, columns: int, *words: str) -> list[str]:
    """Run a command on a terminal of this width; return the lines of its tables and texts.

    Without colours, and without the notes about columns that do not fit.
    """
    status, lines = run_on_terminal(url, columns, *words)
    assert status == 0, lines
    return _notes.sub("", "\n".join(lines)).splitlines()


def run_on_terminal(url: str, columns: int, *words: str, typed: str = "") -> tuple[int, list[str]]:
    """Run a command on a terminal, type something; return the exit code and the lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = os.environ | {"JOBSYNC_URL": url, "TERM": "xterm"}
    environ.pop("COLUMNS", None)
    fork_server.start(words, environ, [theirs] * 3)
    os.close(theirs)
    os.write(ours, typed.encode())
    text = b""
    # A terminal whose other side is closed raises an error instead of returning nothing.
    while chunk := _read(ours):
        text += chunk
    os.close(ours)
    return fork_server.wait(), _colours.sub("", text.decode()).splitlines()


def _read(terminal: int) -> bytes:
    assert select.select([terminal], [], [], TIMEOUT)[0], "the command prints nothing more"
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
