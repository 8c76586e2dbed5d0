"""The narrow way into a PostgreSQL store."""

from collections.abc import Mapping
from typing import Any

from jobsync.errors import OutcomeUnknown
from jobsync.stores.postgresbell import Bell
from jobsync.stores.postgrespool import Lost, PostgresPool
from jobsync.stores.sql.access import Parameters, PostgresAccess

__all__ = ["PoolAccess"]


class PoolAccess(PostgresAccess):
    """Runs statements on a store's connections.

    Args:
        pool: the connections.
        bell: wakes who waits.
        schema: where jobsync's tables are, quoted.
    """

    def __init__(self, pool: PostgresPool, bell: Bell, schema: str) -> None:
        self.schema = schema
        self.channel = bell.channel
        self._pool = pool
        self._bell = bell

    async def run(self, statement: str, parameters: Parameters, place: str) -> list[Any]:
        """Run one statement, and give its rows."""
        try:
            return await self._pool.run(statement, parameters)
        except Lost as lost:
            raise OutcomeUnknown(place, str(lost)) from lost

    async def run_loudly(
        self, quietly: str, loudly: str, parameters: Mapping[str, Any], topic: str
    ) -> list[Any]:
        """Run a statement, and let those who wait for the topic look, at once or soon."""
        try:
            if self._bell.due([topic]):
                notice = {"channel": self._bell.channel, "topic": topic}
                return await self.run(loudly, {**parameters, **notice}, topic)
            rows = await self.run(quietly, parameters, topic)
        except OutcomeUnknown:
            self._bell.ring_later([topic])
            raise
        self._bell.ring_later([topic])
        return rows

    def wake(self, topic: str) -> None:
        """Ring, soon."""
        self._bell.ring_later([topic])

    async def wait(self, topic: str, timeout: float) -> None:
        """Return early if the topic was rung for."""
        await self._bell.wait(topic, timeout)
