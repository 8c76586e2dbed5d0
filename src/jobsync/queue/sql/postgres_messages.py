"""One message from outside on PostgreSQL, see `MessageOperations`.

A message is in one table at a time, and each statement has its own snapshot. So one that moves
meanwhile may be missed by each of them; the caller looks again, see `SqlMessageOperations`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from jobsync.core.messages import REVOKED
from jobsync.queue.backend import Settlement
from jobsync.queue.single_message import ProgressReport
from jobsync.queue.sql.message_rows import encode_error
from jobsync.queue.sql.postgres_places import PostgresPlaces
from jobsync.queue.sql.single_message import PROGRESS_TTL, SqlMessageOperations
from jobsync.stores.sql import PostgresAccess, as_array

__all__ = ["PostgresMessageOperations", "build_results"]


class PostgresMessageOperations(SqlMessageOperations):
    """One message of a queue in a schema."""

    _access: PostgresAccess
    _places: PostgresPlaces

    async def _find(self, ids: Sequence[str]) -> Sequence[Sequence[Any]]:
        return await self._run_repeatable("find", {"ids": as_array(ids)})

    async def _cancel(self, name: str) -> tuple[int, str] | None:
        parameters = {**self._name(name), "error": encode_error(REVOKED)}
        rows = await self._end("cancel_waiting", parameters)
        rows = rows or await self._end("cancel_claimed", parameters, is_claimed=True)
        return None if not rows else (int(rows[0][0]), rows[0][1])

    async def _delete(self, name: str) -> bool:
        parameters = self._name(name)
        rows = await self._end("delete_waiting", parameters)
        return bool(rows or await self._run("delete_finished", parameters))

    async def _end(
        self, statement: str, parameters: Mapping[str, Any], *, is_claimed: bool = False
    ) -> list[Any]:
        """End a message, and wake workers if another one can be claimed now.

        That is the next of its group if it was the head, or one that a limit held back.
        """
        rows = await self._access.run_steps(
            lambda: self._places.end_message(statement, parameters), self.topic
        )
        if rows and (is_claimed or rows[0][-1] is not None):
            self._notifications.wake(self.topic)
        return rows

    async def _run_now(self, name: str) -> bool:
        return bool(await self._run("run_now", self._name(name)))

    async def _report_progress(self, reports: Sequence[ProgressReport]) -> None:
        latest = {each.receipt.id: each for each in reports}.values()
        columns = {
            "queue": self.queue,
            "ids": as_array([each.receipt.id for each in latest]),
            "deliveries": as_array([each.receipt.deliveries for each in latest]),
            "progress": as_array([each.progress for each in latest]),
            "notes": as_array([each.note for each in latest]),
        }
        await self._run_repeatable("report_progress", columns)

    async def _clear_progress(self, ids: Sequence[str]) -> None:
        await self._run_repeatable("clear_progress", {"ids": as_array(ids)})

    async def _forget_results(self, older_than: float, limit: int) -> None:
        """Remove the results of messages that are forgotten, and reports of dead processes.

        Not earlier than the messages, which would look as if they had returned nothing.
        """
        parameters = {"queue": self.queue, "older_than": float(older_than), "limit": limit}
        count = limit
        while count >= limit:
            ((count,),) = await self._run("forget_results", parameters)
        kept = max(older_than, PROGRESS_TTL)
        await self._run_repeatable("forget_progress", {**parameters, "older_than": kept})

    def _name(self, name: str) -> dict[str, str]:
        return {"id": name, "queue": self.queue}

    @abstractmethod
    async def _run(self, name: str, parameters: Mapping[str, Any]) -> list[Any]: ...

    @abstractmethod
    async def _run_repeatable(self, name: str, parameters: Mapping[str, Any]) -> list[Any]: ...


def build_results(batch: Sequence[Settlement]) -> dict[str, str]:
    """Return the parameters for what handlers returned."""
    results = [each.result for each in batch]
    return {
        "results": as_array([None if each is None else each.text for each in results]),
        "problems": as_array(["" if each is None else each.problem for each in results]),
    }
