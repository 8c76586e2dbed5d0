"""A narrow way into an SQL store, for who keeps rows of its own kind beside the records.

It runs one transaction a call, and tells what became of it in the contract's own words:
`Unavailable` and `Misconfigured`, nothing was done; `OutcomeUnknown`, nobody can say. Who
wants to wait for others is told when something happened, as a hint.
"""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from jobsync.core.clock import Clock

__all__ = ["Parameters", "PostgresAccess", "SqlAccess", "SqliteAccess"]

T = TypeVar("T")

Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""By place, or by name."""


class SqlAccess(ABC):
    """What both have in common."""

    @abstractmethod
    def wake(self, topic: str) -> None:
        """Let those who wait look, here or in another process, soon."""

    @abstractmethod
    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was woken, here or in another process; a hint."""


class SqliteAccess(SqlAccess):
    """The main file of an SQLite store.

    Attributes:
        clock: this machine's, which all processes on a file share.
        path: where it is; None if it is nowhere but in memory.
    """

    clock: Clock
    path: Path | None = None

    @abstractmethod
    async def read(self, query: str, parameters: Parameters = ()) -> list[Any]:
        """Run a query."""

    @abstractmethod
    async def write(self, work: Callable[[sqlite3.Connection], T], place: str) -> T:
        """Run work in one transaction, which is the only one that writes.

        Raises:
            OutcomeUnknown: names the place; nobody can say whether it happened.
        """


class PostgresAccess(SqlAccess):
    """The tables of a PostgreSQL store.

    Attributes:
        schema: where they are, quoted.
        channel: what notifications go by: their text is the topic.
    """

    schema: str
    channel: str

    @abstractmethod
    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Run one statement, which is one transaction, and give its rows.

        Raises:
            OutcomeUnknown: names the place; nobody can say whether it happened.
        """

    @abstractmethod
    async def run_loudly(
        self, quietly: str, loudly: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement, and let those who wait for the topic look.

        Args:
            quietly: the statement.
            loudly: the same, which also notifies: it takes `channel` and `topic`.
            parameters: of both.
            topic: what to tell of; also the place that an unknown outcome names.
        """
