"""The calls of a database about its resources and their indexes."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, overload

from jobsync.core.attributes import parse
from jobsync.core.partitions import parse_partitions
from jobsync.core.schema import Fields
from jobsync.database.backfill import Backfill
from jobsync.database.definition import Rule
from jobsync.database.home_loop import on_home_loop
from jobsync.database.hooks import parse_hooks
from jobsync.database.plugin_set import PluginSet
from jobsync.database.record_types import RecordType
from jobsync.database.registry import Registry, ResourceRegistry, check_text_name
from jobsync.database.resource import Resource
from jobsync.errors import Invalid, JobsyncError
from jobsync.events import Events

__all__ = ["ResourceCalls"]

ModelT = TypeVar("ModelT")


@on_home_loop
class ResourceCalls(ABC):
    """What `Database` does with its resources, their partitions and their expiry."""

    resources: Registry[Resource]
    events: Events
    works: bool
    _backfill: Backfill
    _plugins: PluginSet
    _registry: ResourceRegistry

    @overload
    async def create_resource(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = ...,
        *,
        strict: bool | None = ...,
        partitions: Mapping[str, Any] | None = ...,
        hooks: Mapping[str, Any] | None = ...,
    ) -> Resource: ...
    @overload
    async def create_resource(
        self,
        name: str,
        *,
        type: type[ModelT],
        strict: bool | None = ...,
        partitions: Mapping[str, Any] | None = ...,
        hooks: Mapping[str, Any] | None = ...,
    ) -> Resource[ModelT]: ...
    async def create_resource(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        type: type[Any] | None = None,
        strict: bool | None = None,
        partitions: Mapping[str, Any] | None = None,
        hooks: Mapping[str, Any] | None = None,
    ) -> Resource[Any]:
        """Define a resource, or use the existing one.

        Args:
            name: a letter, then letters, digits, `_` and `-`.
            attributes: what its records look like, such as `{"name": "string|required"}`;
                without them the existing definition stays, or anything is allowed.
            type: what its records are, in place of attributes: a `Struct`, a dataclass, a
                `TypedDict` or a model of pydantic.
            strict: whether fields that are not described are refused; by default they are
                stored.
            partitions: fields by whose values records can be found without reading the
                others, such as `{"by_region": ["region"]}`. They are added to those that the
                resource has; records that exist already are added in the background.
            hooks: functions around its verbs, by names such as `before_insert`.

        Raises:
            Invalid: a name, type or rule is unknown, or existing records would no longer
                pass; gives the reason. Nothing was written.
        """
        if type is not None and attributes is not None:
            problem = "cannot be combined with type, which describes records"
            raise Invalid("attributes", attributes, problem, "pass one of them")
        model = None if type is None else RecordType("type", type)
        fields = None if attributes is None else parse(attributes)
        fields = fields if model is None else model.fields
        if hooks is not None:
            parse_hooks(hooks)
        rules: Sequence[Rule] = ()
        if partitions is not None:
            rules = parse_partitions(partitions, self._registry.list_fields(name, fields))
        resource = await self.define_resource(name, fields, strict=strict, rules=rules)
        resource.add_hooks(hooks or {})
        return resource if model is None else _read_as(resource, model)

    async def define_resource(
        self,
        name: str,
        fields: Fields | None = None,
        *,
        strict: bool | None = None,
        rules: Sequence[Rule] = (),
    ) -> Resource:
        """Define a resource by what was parsed already; for plugins. See `create_resource`."""
        resource = await self._registry.define(name, fields, strict=strict, rules=rules)
        definition = resource.definition
        for rule in [*rules, *self._plugins.choose_rules(definition)]:
            if dispute := definition.find_dispute(rule):
                self.events.emit(dispute)
        if self.works and not definition.is_settled:
            self._backfill.start(name)
        return resource

    @overload
    def resource(self, name: str) -> Resource: ...
    @overload
    def resource(self, name: str, *, type: type[ModelT]) -> Resource[ModelT]: ...
    def resource(self, name: str, *, type: type[Any] | None = None) -> Resource[Any]:
        """Return a resource known since `connect`, `create_resource` or `list_resources`.

        Args:
            name: of the resource.
            type: what its records are read and written as; documents by default.

        Raises:
            NotFound: there is no such resource; lists the known ones.
            Invalid: records cannot be of this type.
        """
        self._get_connection()
        found = self.resources[name]
        return found if type is None else _read_as(found, RecordType("type", type))

    async def list_resources(self) -> list[str]:
        """Read which resources there are, including those that others have defined since."""
        return await self._registry.refresh()

    async def drop_resource(self, name: str) -> None:
        """Remove a resource and all its records.

        The records go first: if it fails half-way, repeat it. Processes that still write to
        the resource bring records back; stop them before.

        Raises:
            NotFound: there is no such resource.
            Conflict: its definition was changed meanwhile.
            Incomplete: some records could not be removed; lists which.
        """
        name = check_text_name(name)
        # It would note its progress again.
        await self._backfill.stop(name)
        try:
            await self._registry.drop(name)
        except JobsyncError:
            # Its indexes are still to be completed.
            if self.works and self.is_connected:
                self._backfill.start(name)
            raise

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

    @property
    @abstractmethod
    def is_connected(self) -> bool:
        """Whether it is connected, and not being disconnected."""

    @abstractmethod
    def _get_connection(self) -> Any: ...


def _read_as(resource: Resource, model: RecordType[ModelT]) -> Resource[ModelT]:
    """Return a resource with records of a type, and the same hooks, queues and events."""
    typed = cast("Resource[ModelT]", copy.copy(resource))
    typed.record_type = model
    return typed
