"""A connection to an SQLite store for the user's own SQL, used like one to PostgreSQL.

Every statement is its own transaction, or part of a `transaction()` block. Placeholders are
`%s`. Dates and times are stored as text in UTC, as in jobsync's views; a time without a zone is
in the process's zone. A statement waits while another process writes.
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

_BUSY_TIMEOUT = 30.0
_placeholders = re.compile(r"%(.?)", re.DOTALL)


class SqliteConnection:
    """A connection to the store's file, with the session file attached as `sessions`.

    One thread may use it at a time.

    Args:
        path: the file.
        clock: converts times since the machine's boot to times of day.
        zone: the zone of times without one; the process's zone if None.
    """

    def __init__(self, path: Path, clock: Clock, zone: dt.tzinfo | None = None) -> None:
        self._clock = clock
        self._zone = zone
        self._depth = 0
        self._inner = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        session_path = path.with_name(f"{path.name}-sessions")
        self._inner.execute("ATTACH DATABASE ? AS sessions", [str(session_path)])
        self._inner.create_function("jobsync_instant", 2, self._to_wall_time)

    def execute(self, statement: str, parameters: Sequence[Any] | None = None) -> sqlite3.Cursor:
        """Run a statement; `%s` is a placeholder, `%%` a percent sign.

        Raises:
            Invalid: there is another placeholder.
            sqlite3.Error: SQLite refuses the statement.
        """
        if parameters is None:
            return self._inner.execute(statement)
        return self._inner.execute(_to_sqlite(statement), self._adapt(parameters))

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        """Run a statement once for each row of parameters, in one transaction."""
        with self.transaction():
            return self._inner.executemany(_to_sqlite(statement), map(self._adapt, rows))

    def cursor(self) -> sqlite3.Cursor:
        """Return a cursor of the driver, whose placeholder is `?`."""
        return self._inner.cursor()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block as one transaction. Blocks can be nested."""
        name = f"block_{self._depth}"
        self._inner.execute(f"SAVEPOINT {name}" if self._depth else "BEGIN IMMEDIATE")
        self._depth += 1
        is_outermost = self._depth == 1
        try:
            try:
                yield
            finally:
                self._depth -= 1
            # Within the other `try`: a COMMIT that fails leaves the transaction open.
            self._inner.execute("COMMIT" if is_outermost else f"RELEASE {name}")
        except BaseException:
            # Some errors have ended it already. The caller must get the first error, not another.
            if self._inner.in_transaction:
                self._inner.execute("ROLLBACK" if is_outermost else f"ROLLBACK TO {name}")
            raise

    def close(self) -> None:
        """Close both files."""
        self._inner.close()

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        try:
            return self._inner.total_changes < 0
        except sqlite3.ProgrammingError:
            return True

    def _adapt(self, parameters: Sequence[Any]) -> list[Any]:
        return [self._to_text(value) for value in parameters]

    def _to_text(self, value: Any) -> Any:
        if isinstance(value, dt.datetime):
            zoned = value.replace(tzinfo=self._zone) if value.tzinfo is None else value
            # Without a zone, `astimezone` assumes the process's.
            return zoned.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        return value.isoformat() if isinstance(value, dt.date) else value

    def _to_wall_time(self, boot: int | None, seconds: float | None) -> float | None:
        """Return the Unix time of a number of seconds since a boot; None for another boot."""
        if seconds is None or boot != self._clock.boot():
            return None
        return self._clock.wall().seconds - (self._clock.mono().seconds - seconds)


def _to_sqlite(statement: str) -> str:
    """Replace the placeholders with SQLite's."""
    return _placeholders.sub(_translate_placeholder, statement)


def _translate_placeholder(found: re.Match[str]) -> str:
    match found.group(1):
        case "s":
            return "?"
        case "%":
            return "%"
        case other:
            fix = "write %s for a parameter and %% for a percent sign"
            raise Invalid("statement", f"%{other}", "must have only %s as placeholders", fix)
