"""What SQLite and PostgreSQL have in common for one message, see `MessageOperations`."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from jobsync.core.messages import LIVE
from jobsync.queue.arguments import check_ids
from jobsync.queue.backend import EndedClaim, MessageInfo, Settlement
from jobsync.queue.single_message import Deletion, MessageOperations, ProgressReport
from jobsync.queue.sql.message_rows import read_infos
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.sql import SqlAccess

__all__ = ["PROGRESS_TTL", "SqlMessageOperations"]

PROGRESS_TTL = 86_400.0
"""Seconds after which a report is removed whose process did not do it."""

_MAX_TRIES = 5
"""How often to look for a message that moves from table to table."""


class SqlMessageOperations(MessageOperations):
    """One message of a queue in a SQL database."""

    queue: str
    topic: str
    _notifications: SqlAccess
    _corruption_log: CorruptionLog
    _waiting_for_ends = 0
    """How many callers in this process wait for the end of a message."""

    async def get(self, id: str) -> MessageInfo | None:
        """Return a message, its progress and its result, as one statement reads them."""
        rows = await self._find(check_ids([id]))
        found = read_infos(rows, self._corruption_log)
        return next((info for info in found if info.queue == self.queue), None)

    async def cancel(self, id: str) -> EndedClaim | None:
        """Cancel a message, and end its claim if it is claimed."""
        check_ids([id])
        for _ in range(_MAX_TRIES):
            found = await self._cancel(id)
            if found is not None:
                attempt, session = found
                self._notifications.wake(self._ends_topic)
                return EndedClaim(id=id, state="cancelled", attempt=attempt, session=session)
            if not await self._is_in((*LIVE,), id):
                break
        return None

    async def delete(self, id: str) -> Deletion:
        """Remove a message for good, unless it is claimed."""
        check_ids([id])
        for _ in range(_MAX_TRIES):
            if await self._delete(id):
                self._notifications.wake(self._ends_topic)
                return "deleted"
            info = await self.get(id)
            if info is None:
                return "absent"
            if info.state == "claimed":
                return "claimed"
        return "absent"

    async def run_now(self, id: str) -> bool:
        """End the delay of a message, and wake the workers."""
        check_ids([id])
        has_changed = await self._run_now(id)
        if has_changed:
            self._notifications.wake(self.topic)
        return has_changed

    async def report_progress(self, reports: Sequence[ProgressReport]) -> None:
        """Store how far handlers are, a row for each."""
        if reports:
            await self._report_progress(reports)

    async def clear_progress(self, ids: Collection[str]) -> None:
        """Remove the rows of messages that are settled."""
        if ids:
            await self._clear_progress(list(ids))

    async def wait_for_end(self, timeout: float) -> None:
        """Return early if a message may have ended."""
        self._waiting_for_ends += 1
        try:
            await self._notifications.wait(self._ends_topic, timeout)
        finally:
            self._waiting_for_ends -= 1

    @property
    def _ends_topic(self) -> str:
        return f"{self.topic}/ends"

    def _announce_ends(self, settlements: Sequence[Settlement]) -> None:
        """Wake those who wait for results, if somebody may: most settlements tell nobody."""
        if self._waiting_for_ends or any(each.result is not None for each in settlements):
            self._notifications.wake(self._ends_topic)

    async def _is_in(self, states: Collection[str], name: str) -> bool:
        info = await self.get(name)
        return info is not None and info.state in states

    @abstractmethod
    async def _find(self, ids: Sequence[str]) -> Sequence[Sequence[Any]]: ...

    @abstractmethod
    async def _cancel(self, name: str) -> tuple[int, str] | None:
        """Cancel a message; return its attempt and the session that had claimed it."""

    @abstractmethod
    async def _delete(self, name: str) -> bool:
        """Delete a message that is not claimed; return whether there was one."""

    @abstractmethod
    async def _run_now(self, name: str) -> bool: ...

    @abstractmethod
    async def _report_progress(self, reports: Sequence[ProgressReport]) -> None: ...

    @abstractmethod
    async def _clear_progress(self, ids: Sequence[str]) -> None: ...
