"""SQL shared by the stores and by the packages that keep tables beside the records.

`SqlAccess` runs one transaction a call. Its errors mean the same as a store's: after
`Unavailable` and `Misconfigured` nothing was done; after `OutcomeUnknown` it may have
happened or not.

Statements are in `.sql` files, which `load_sql` reads once, when a module is imported::

    _SQL = load_sql(__file__, "queries.sql")
    await connection.execute(_SQL["read"], [key])

A file is a list of blocks. Text before the first block is a comment on the file. A block starts
with `-- name:` (a statement) or `-- fragment:` (a part of statements, inserted where its name
stands in braces; fragments come before their users). The comment lines directly below that line
explain the block and are not part of it; the semicolon at its end is not either::

    -- fragment: is_live
    value IS NOT NULL

    -- name: read
    -- Read one record.
    SELECT value FROM {schema}.jobsync_record WHERE key = %s AND {is_live};

Other names in braces stay until `fill_in` replaces them (`{schema}`, `{where}`). Braces of
JSON and of arrays are left alone, because only the names passed are replaced.
"""

import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from jobsync.core.clock import Clock

__all__ = [
    "Parameters",
    "PostgresAccess",
    "SqlAccess",
    "SqliteAccess",
    "Steps",
    "UserConnections",
    "as_array",
    "escape_copy",
    "fill_in",
    "load_schema_steps",
    "load_sql",
    "quote_name",
]

T = TypeVar("T")

Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""Parameters of a statement, by position or by name."""

Steps: TypeAlias = Generator[tuple[str, Parameters], list[Any], T]
"""Statements of one transaction: yields each with its parameters, gets its rows, and returns a
result. So it knows nothing of connections, and any kind of them can run it."""

_BLOCK = re.compile(
    r"^-- (?P<kind>name|fragment): (?P<name>\w+)\n(?:--.*\n)*"
    r"(?P<text>(?s:.*?))(?=^-- (?:name|fragment):|\Z)",
    re.MULTILINE,
)
_encode = msgspec.json.Encoder().encode
_COPY_CODES = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})
"""The characters that end a field or a row, and the one that escapes them."""


class SqlAccess(ABC):
    """Access to the database of an SQL store."""

    @abstractmethod
    def wake(self, topic: str) -> None:
        """Wake those who wait for the topic, in this process and others, soon."""

    @abstractmethod
    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken, in this process or another; only a hint."""


class SqliteAccess(SqlAccess):
    """Access to the main file of an SQLite store.

    Attributes:
        clock: this machine's clock, which all processes on a file share.
        path: the file; None if it is only in memory.
    """

    clock: Clock
    path: Path | None = None

    @property
    def has_user_transactions(self) -> bool:
        """Whether users can write on connections of their own."""
        return self.path is not None

    @abstractmethod
    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query and return its rows."""

    @abstractmethod
    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction; no other transaction writes meanwhile.

        Raises:
            OutcomeUnknown: it may have happened or not; the error names `place`.
        """


class UserConnections(Protocol):
    """Opens connections of psycopg's own for users' SQL; who calls closes them."""

    async def open_user_connection(self) -> Any:
        """Open an asynchronous connection.

        Raises:
            Misconfigured, Unavailable: the server refuses it, or cannot be reached.
        """

    def open_blocking_connection(self) -> Any:
        """Likewise, a connection that blocks, on any thread."""


class PostgresAccess(SqlAccess):
    """Access to the tables of a PostgreSQL store.

    Attributes:
        schema: the schema of the tables, quoted.
        channel: the channel of notifications; their payload is the topic.
        user_connections: opens connections for users' SQL; None if users have none here.
    """

    schema: str
    channel: str
    user_connections: UserConnections | None = None

    @abstractmethod
    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Run one statement, which is one transaction, and return its rows.

        Raises:
            Corrupt: it cannot process a stored value; nothing was done.
            OutcomeUnknown: it may have happened or not; the error names `place`.
        """

    @abstractmethod
    async def run_steps(self, build: Callable[[], Steps[T]], place: str) -> T:
        """Run statements in one transaction, and return their result.

        Args:
            build: returns the statements; called again if the server rolls them back.
            place: what an unknown outcome names.

        Raises:
            Corrupt, OutcomeUnknown: as of `run`.
        """

    @abstractmethod
    async def run_and_notify(
        self, statement: str, notifying: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement and wake those who wait for the topic.

        Args:
            statement: the statement.
            notifying: the same statement, which also notifies: it takes `channel` and `topic`.
            parameters: the parameters of both.
            topic: the topic to notify; also the place that an unknown outcome names.
        """

    @abstractmethod
    async def copy_and_notify(self, statement: str, rows: Iterable[bytes], topic: str) -> None:
        """Add rows and wake those who wait for the topic.

        Args:
            statement: a COPY from STDIN.
            rows: whole rows in PostgreSQL's text format, see `escape_copy`, in parts; read again
                if the statement is sent again. If they raise, nothing is added.
            topic: the topic to notify; also the place that an unknown outcome names.
        """


def load_sql(module: str, file: str) -> dict[str, str]:
    """Return the statements of a file beside the module, by name and in the file's order.

    Args:
        module: the `__file__` of the module.
        file: the name of the SQL file.
    """
    statements: dict[str, str] = {}
    fragments: dict[str, str] = {}
    for block in _BLOCK.finditer(Path(module).with_name(file).read_text(encoding="utf-8")):
        name = block["name"]
        if name in statements or name in fragments:
            raise ValueError(f"{file} has two blocks with the name {name!r}.")
        text = fill_in(block["text"].strip().removesuffix(";"), fragments)
        (statements if block["kind"] == "name" else fragments)[name] = text
    return statements


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Return the text with `{name}` replaced by its value, for each name in `values`."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def load_schema_steps(module: str, file: str) -> tuple[tuple[str, ...], ...]:
    """Return the steps of a schema file: step n brings the tables from version n to n + 1.

    The statements of the first step are the blocks whose names begin with `v1_`, and so on.
    """
    steps: dict[str, list[str]] = {}
    for name, text in load_sql(module, file).items():
        if re.match(r"v\d+_", name):
            steps.setdefault(name.partition("_")[0], []).append(text)
    return tuple(map(tuple, steps.values()))


def quote_name(name: str) -> str:
    """Return a name as a quoted SQL identifier, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def as_array(items: Sequence[str | int | float | None]) -> str:
    """Return a PostgreSQL array literal, at a tenth of psycopg's cost.

    It is a JSON array in other brackets. That is right as long as no text has a control
    character: keys have none, and JSON texts have them escaped.
    """
    return f"{{{_encode(items)[1:-1].decode()}}}"


def escape_copy(text: str) -> str:
    """Return a text as a field of a row for COPY."""
    is_plain = text.isprintable() and "\\" not in text
    return text if is_plain else text.translate(_COPY_CODES)
