"""A plugin of which one instance in the whole fleet does the central work.

    class Cleaner(CoordinatorPlugin):
        async def coordinator_work(self):
            ...

Every instance stands for election; the one that is elected has its hooks called, as
`coordination.coordinator` promises. All coordinator plugins of a database share one
session; each kind of work has a coordinator of its own, and an instance that does not have
the plugin is never elected to it.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.events import (
    CoordinatorDemoted,
    CoordinatorElected,
    CoordinatorPromoted,
)
from jobsync.coordination.membership import Membership, Peer
from jobsync.coordination.role import name_role
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.coordination.term import Term
from jobsync.database.plugin import Plugin
from jobsync.database.shared_session import SharedSession
from jobsync.errors import Invalid
from jobsync.events import Event
from jobsync.settings import Sources, resolve

__all__ = ["CoordinatorPlugin"]

_ABOUT_LEADERS: dict[str, type[Event]] = {
    "elected": CoordinatorElected,
    "promoted": CoordinatorPromoted,
    "demoted": CoordinatorDemoted,
}

_facts: dict[str, Mapping[type[Event], type[Event]]] = {}
"""What plugins of a kind tell, by slug: classes that share a slug tell the same."""


class CoordinatorPlugin(Plugin):
    """Inherit it, and override `coordinator_work` and what else is needed.

    Args:
        namespace: keeps several of one kind apart, their elections too.
        options: as in `CoordinatorSettings`.

    Raises:
        Invalid, Misconfigured: an option is unknown or wrong, with the fix.
    """

    governs: ClassVar[tuple[str, ...]] = ()
    """Keys of the records that only the coordinator writes."""

    slug_aliases: ClassVar[tuple[str, ...]] = ()
    """Other slugs under which this class's own coordinator events can be listened to. A
    subclass does not inherit them."""

    _facts: ClassVar[Mapping[type[Event], type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.slug not in _facts:
            slugs = (cls.slug, *vars(cls).get("slug_aliases", ()))
            _facts.update(dict.fromkeys(slugs, _name_facts(slugs, cls.__module__)))
        cls._facts = _facts[cls.slug]

    def __init__(self, *, namespace: str | None = None, **options: Any) -> None:
        super().__init__(namespace=namespace)
        sources = Sources.load(os.environ, Path.cwd())
        self.coordination = resolve(CoordinatorSettings, options, sources).value
        self._membership: Membership | None = None
        self._coordinator: Coordinator | None = None
        self._former: Coordinator | None = None

    async def on_become_coordinator(self) -> None:
        """Called when this instance is elected, before any work."""

    async def on_stop_being_coordinator(self) -> None:
        """Called when it leads no more, after all work."""

    async def coordinator_work(self) -> None:
        """Called each `coordinator_work_interval` while it leads; cancelled with its term."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this instance leads now. Asks the clock each time."""
        return self._coordinator is not None and self._coordinator.is_coordinator

    @property
    def worker_id(self) -> str:
        """This worker's name.

        Raises:
            Invalid: the plugin does not run.
        """
        return self._joined().worker_id

    @property
    def term(self) -> Term | None:
        """The term that this instance leads in: `term.epoch`, `term.put`."""
        return None if self._coordinator is None else self._coordinator.term

    async def members(self) -> list[Peer]:
        """Give the workers that live and stand for this work, the oldest first."""
        membership = self._joined()
        # What this worker stands for may be told with its next beat only.
        own = None if self._coordinator is None else membership.incarnation
        return [
            peer
            for peer in await membership.members()
            if self._role in peer.works or peer.incarnation == own
        ]

    async def ensure_coordinator(
        self, *, force: bool = False, desired_coordinator: str | None = None
    ) -> str | None:
        """See to it that somebody leads; see `Coordinator.ensure_coordinator`."""
        if self._coordinator is None:
            raise Invalid("plugin", self.name, "does not run", "await plugin.start() first")
        return await self._coordinator.ensure_coordinator(
            force=force, desired_coordinator=desired_coordinator
        )

    @property
    def is_calling(self) -> bool:
        """Whether it is a hook of its own that asks, for which `stop` waits."""
        return self._coordinator is not None and self._coordinator.is_calling

    def unready(self) -> str:
        """Tell what keeps it from working now: its session is not current, for one."""
        membership = self._membership
        if membership is not None and not membership.is_trusted:
            return "its session is not current: the store has not answered in time"
        return super().unready()

    async def _set_up(self, undo: AsyncExitStack) -> None:
        """Join the session, start, and stand for election."""
        attendance = self.database.attendance
        self._membership = await attendance.enter(self.coordination)
        undo.push_async_callback(self._leave, attendance)
        await super()._set_up(undo)
        events = self.database.events
        events.on("coord:*", self._overhear)
        undo.callback(events.off, "coord:*", self._overhear)
        if self._former is not None:
            # Work that stopped itself may not be at its end; its term is wound up first.
            await self._former.stop()
        self._coordinator = await self._membership.coordinate(
            self.kind,
            Hooks(on_become=self._become, work=self._work, on_stop=self._cease),
            namespace=self.namespace,
            governs=self.governs,
            settings=self.coordination,
        )
        undo.push_async_callback(self._stand_down, self._coordinator)

    async def _stand_down(self, coordinator: Coordinator) -> None:
        """Stand no longer, and give up the role if it is held."""
        try:
            await coordinator.stop()
        except asyncio.CancelledError:
            coordinator.abandon()
            raise
        finally:
            self._coordinator, self._former = None, coordinator

    async def _leave(self, attendance: SharedSession) -> None:
        self._membership = None
        await attendance.leave()

    @property
    def _role(self) -> str:
        return name_role(self.namespace, self.kind)

    def _joined(self) -> Membership:
        if self._membership is None:
            raise Invalid("plugin", self.name, "does not run", "await plugin.start() first")
        return self._membership

    async def _become(self, _: Term) -> None:
        await self.on_become_coordinator()

    async def _work(self, _: Term) -> None:
        await self.coordinator_work()

    async def _cease(self, _: Term) -> None:
        await self.on_stop_being_coordinator()

    def _overhear(self, event: Event) -> None:
        """Tell who listens to this plugin of what concerns it: its role, and the session."""
        if getattr(event, "role", self._role) != self._role:
            return
        self.events.overhear(event)
        own = self._facts.get(type(event))
        if own is not None:
            self.emit(own(**{field: event[field] for field in event.__struct_fields__}))


def _name_facts(slugs: Sequence[str], module: str) -> dict[type[Event], type[Event]]:
    """Create the events by which one kind of plugin reports its coordinators.

    The first slug names them; the others become aliases.
    """
    slug, *aliases = slugs
    return {
        kind: type(
            f"{slug.title().replace('-', '')}{fact.capitalize()}",
            (kind,),
            {
                "__module__": module,
                "__doc__": f"As `{kind.name}`, of this kind of plugin.",
                "name": f"plg:{slug}:coordinator-{fact}",
                "aliases": tuple(f"plg:{alias}:coordinator-{fact}" for alias in aliases),
                # The fact is logged already, under its general name.
                "level": logging.DEBUG,
            },
            frozen=True,
            kw_only=True,
        )
        for fact, kind in _ABOUT_LEADERS.items()
    }
