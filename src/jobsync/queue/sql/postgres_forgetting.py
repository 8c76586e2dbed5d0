"""Removes what was finished long ago on PostgreSQL: messages, claims, results and keys.

On its own because `postgres` is large.
"""

from collections.abc import Mapping
from typing import Any

from jobsync.core.messages import MessageState
from jobsync.queue.backend import SeenKeys
from jobsync.queue.sql.claims import ANSWERS_TTL
from jobsync.queue.sql.postgres_messages import PostgresMessageOperations

__all__ = ["PostgresForgetting"]


class PostgresForgetting(PostgresMessageOperations):
    """The old messages of a queue in a schema."""

    async def _forget(self, state: MessageState, older_than: float, limit: int) -> int:
        parameters = {"queue": self.queue, "older_than": float(older_than), "limit": limit}
        ((count,),) = await self._run("forget", {**parameters, "state": state})
        if state != "completed" or count >= limit:
            return int(count)
        total = int(count) + await self._forget_claims(parameters)
        if total < limit:
            await self._forget_results(older_than, limit)
        return total

    async def _forget_claims(self, parameters: Mapping[str, Any]) -> int:
        """Forget completed messages, and claims that nobody asks about; count the messages."""
        is_old = parameters["older_than"] >= ANSWERS_TTL
        ((closed,),) = await self._run(
            "forget_claims" if is_old else "forget_completed", parameters
        )
        ((single,),) = await self._run("forget_in_claims", parameters)
        kept = max(parameters["older_than"], ANSWERS_TTL)
        is_more = True
        while is_more:
            ((removed,),) = await self._run("forget_answers", {**parameters, "older_than": kept})
            is_more = removed >= parameters["limit"]
        return int(closed + single)

    async def forget_keys(self, *, after: str, limit: int) -> SeenKeys:
        """Remove keys that nobody holds."""
        parameters = {"queue": self.queue, "after": after, "limit": limit}
        ((last, removed, seen),) = await self._run_repeatable("forget_keys", parameters)
        return SeenKeys(last if seen == limit else "", removed)
