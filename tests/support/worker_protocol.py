"""What a worker process and the test that runs it exchange.

A worker gets its options as JSON in its only argument, and orders as lines of standard input. It
reports facts as JSON lines of a file that all workers of a test append to. A fact that was
reported before a SIGKILL is in the file after it.
"""

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

__all__ = ["Fact", "FactLog", "FactWriter", "WorkerOptions", "read_options", "read_orders"]


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that every worker has."""

    url: str
    name: str
    facts: str
    """The file that it reports to."""


Options = TypeVar("Options", bound=WorkerOptions)


def read_options(kind: type[Options]) -> Options:
    """Read the options of this process."""
    return msgspec.json.decode(sys.argv[1], type=kind)


async def read_orders() -> asyncio.StreamReader:
    """Return a reader of standard input that needs no thread."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


class Fact(msgspec.Struct, frozen=True):
    """Something that a worker reported."""

    at: float
    """By the clock that all processes of this machine share."""
    who: str
    what: str
    details: Mapping[str, Any]

    def __getitem__(self, detail: str) -> Any:
        return self.details[detail]


class FactWriter:
    """Reports the facts of one worker."""

    def __init__(self, path: str, who: str) -> None:
        self._who = who
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def report(self, what: str, /, **details: object) -> None:
        """Append a fact, in one write."""
        fact = Fact(time.monotonic(), self._who, what, details)
        os.write(self._file, msgspec.json.encode(fact) + b"\n")


class FactLog:
    """Reads a file of facts while it grows. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._facts: list[Fact] = []
        self._by_kind: dict[str, list[Fact]] = defaultdict(list)

    def read(self, *what: str) -> list[Fact]:
        """Return the facts of some kinds, or all, in the order of the lines."""
        if self.path.exists():
            self._read_on()
        if len(what) == 1:
            return self._by_kind[what[0]].copy()
        return [fact for fact in self._facts if not what or fact.what in what]

    def _read_on(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            # The last line may be half written.
            lines, end, _ = file.read().rpartition(b"\n")
        self._offset += len(lines) + len(end)
        for line in lines.split(b"\n") if lines else []:
            fact = msgspec.json.decode(line, type=Fact)
            self._facts.append(fact)
            self._by_kind[fact.what].append(fact)
