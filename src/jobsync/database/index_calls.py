"""The calls of a database about the indexes of its resources."""

from abc import ABC, abstractmethod
from typing import Any

from jobsync.database.backfill import Backfill
from jobsync.database.home_loop import on_home_loop

__all__ = ["IndexCalls"]


@on_home_loop
class IndexCalls(ABC):
    """What `Database` does with the partitions and the expiry of existing resources."""

    _backfill: Backfill

    async def backfill(self, name: str, *, again: bool = False) -> None:
        """Wait until the partitions of a resource have all its records; work on it meanwhile.

        It begins two minutes after a partition was added, 17 on object stores, so that all
        processes know of it, and no write of an earlier moment arrives any more. Progress
        is told by the event `resource:index-progress`. Without it the same is done in the
        background, by every process that has defined the partitions.

        Args:
            name: of the resource.
            again: whether to add all records again, also to partitions that are ready. That
                repairs what a process has left that stood still for minutes.

        Raises:
            NotFound: there is no such resource.
            Unavailable: the store does not answer; what was done stays done.
        """
        await self._backfill.run(name)
        if again:
            await self._backfill.repair(name)

    async def drop_partition(self, resource: str, partition: str) -> None:
        """Remove a partition; its entries are removed in the background.

        Raises:
            NotFound: there is no such resource or partition.
        """
        await self._backfill.drop_index(resource, "partition", partition)
        await self.define_resource(resource)

    async def drop_expiry(self, resource: str) -> None:
        """Stop the expiry of the records of a resource; they stay as they are.

        Those whose move to an archive has begun are moved first. Remove the resource from the
        TTL plugin's options before: a process that starts with it adds the rule again.

        Raises:
            NotFound: there is no such resource, or its records do not expire.
            Unavailable: the store does not answer; the rule stays.
        """
        await self._backfill.complete_moves(resource)
        await self._backfill.drop_index(resource, "expiry", "expiry")
        await self.define_resource(resource)

    @abstractmethod
    async def define_resource(self, name: str) -> Any:
        """Define a resource again, by the definition that is stored."""
