"""The command line, as people and as programs meet it."""

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

import warm
from waiting import TIMEOUT

__all__ = ["JOBSYNC", "jobsync", "on_terminal", "read_json", "read_tsv", "run", "see"]

JOBSYNC = [sys.executable, "-W", "error", "-m", "jobsync"]
_colours = re.compile(r"\x1b\[\d*m")


def jobsync(
    *words: str, given: str = "", environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a pipe."""
    with TemporaryFile("w+") as into, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        into.write(given)
        into.seek(0)
        warm.begin(words, dict(environ), [each.fileno() for each in (into, out, err)])
        status = warm.finish()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), err.read())


def run(url: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Likewise, with the store named by the environment."""
    return jobsync(*words, given=given, environ=os.environ | {"JOBSYNC_URL": url})


def read_json(url: str, *words: str) -> Any:
    """Give what --json prints."""
    done = run(url, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_tsv(text: str) -> list[dict[str, str]]:
    """Give the rows that a pipe got."""
    head, *lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [dict(zip(head, line, strict=True)) for line in lines]


def on_terminal(url: str, columns: int, *words: str) -> list[str]:
    """Run the command line on a terminal of a width; give the lines, without colours."""
    status, lines = see(url, columns, *words)
    assert status == 0, lines
    return lines


def see(url: str, columns: int, *words: str, typed: str = "") -> tuple[int, list[str]]:
    """Likewise, with something typed; give the exit status too."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = os.environ | {"JOBSYNC_URL": url, "TERM": "xterm"}
    environ.pop("COLUMNS", None)
    warm.begin(words, environ, [theirs] * 3)
    os.close(theirs)
    os.write(ours, typed.encode())
    text = b""
    # A terminal whose other side is closed gives an error instead of an end.
    while chunk := _read(ours):
        text += chunk
    os.close(ours)
    return warm.finish(), _colours.sub("", text.decode()).splitlines()


def _read(terminal: int) -> bytes:
    assert select.select([terminal], [], [], TIMEOUT)[0], "it shows nothing more"
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
