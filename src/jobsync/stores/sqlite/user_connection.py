"""A connection to an SQLite store for people's own SQL, written as for PostgreSQL.

Every statement is a transaction of its own, or part of the block of `transaction()`.
Parameters are marked by `%s`. Dates and times go in as text in UTC, the form in which
jobsync's views have them; a time without a zone is the process's. Where another process
writes, a statement waits.
"""

import datetime as dt
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobsync.core.clock import Clock
from jobsync.errors import Invalid

__all__ = ["SqliteConnection"]

_PATIENCE = 30.0
_marks = re.compile(r"%(.?)", re.DOTALL)


class SqliteConnection:
    """An open file, and beside it, as `sessions`, the one with the sessions.

    It may be used by one thread at a time.

    Args:
        path: the file.
        clock: tells when something happened that was dated by the machine's start.
        zone: whose time a time without a zone is; the process's own, if None.
    """

    def __init__(self, path: Path, clock: Clock, zone: dt.tzinfo | None = None) -> None:
        self._clock = clock
        self._zone = zone
        self._depth = 0
        self._inner = sqlite3.connect(
            path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        beside = path.with_name(f"{path.name}-sessions")
        self._inner.execute("ATTACH DATABASE ? AS sessions", [str(beside)])
        self._inner.create_function("jobsync_instant", 2, self._instant)

    def execute(self, statement: str, parameters: Sequence[Any] | None = None) -> sqlite3.Cursor:
        """Run a statement; `%s` stands for each parameter, `%%` for a percent sign.

        Raises:
            Invalid: a parameter is marked in another way.
            sqlite3.Error: SQLite refuses it.
        """
        if parameters is None:
            return self._inner.execute(statement)
        return self._inner.execute(_mark(statement), self._adapt(parameters))

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        """Run a statement once for each row of parameters, in one transaction."""
        with self.transaction():
            return self._inner.executemany(_mark(statement), map(self._adapt, rows))

    def cursor(self) -> sqlite3.Cursor:
        """Give a cursor of the driver's own, which marks parameters by `?`."""
        return self._inner.cursor()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Do what stands in a block together, or not at all. Blocks may stand in blocks."""
        name = f"block_{self._depth}"
        self._inner.execute(f"SAVEPOINT {name}" if self._depth else "BEGIN IMMEDIATE")
        self._depth += 1
        try:
            yield
        except BaseException:
            self._depth -= 1
            self._inner.execute(f"ROLLBACK TO {name}" if self._depth else "ROLLBACK")
            raise
        self._depth -= 1
        self._inner.execute(f"RELEASE {name}" if self._depth else "COMMIT")

    def close(self) -> None:
        """Close both files."""
        self._inner.close()

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""
        try:
            return self._inner.total_changes < 0
        except sqlite3.ProgrammingError:
            return True

    def _adapt(self, parameters: Sequence[Any]) -> list[Any]:
        return [self._to_text(each) for each in parameters]

    def _to_text(self, value: Any) -> Any:
        if isinstance(value, dt.datetime):
            known = value.replace(tzinfo=self._zone) if value.tzinfo is None else value
            # Without a zone, `astimezone` takes it for the process's.
            return known.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        return value.isoformat() if isinstance(value, dt.date) else value

    def _instant(self, boot: int | None, seconds: float | None) -> float | None:
        """Give the time of day of something that was dated by the machine's start."""
        if seconds is None or boot != self._clock.boot():
            return None
        return self._clock.wall().seconds - (self._clock.mono().seconds - seconds)


def _mark(statement: str) -> str:
    """Mark parameters as SQLite does."""
    return _marks.sub(_translate, statement)


def _translate(found: re.Match[str]) -> str:
    match found.group(1):
        case "s":
            return "?"
        case "%":
            return "%"
        case other:
            fix = "write %s for a parameter and %% for a percent sign"
            raise Invalid("statement", f"%{other}", "is no parameter", fix)
