"""Plugins with central work that one instance in the whole fleet does.

    class Cleaner(CoordinatorPlugin):
        async def coordinator_work(self):
            ...

Every instance is a candidate; the hooks of the elected one are called, with the guarantees of
`coordination.coordinator`. All coordinator plugins of a database share one session. Each kind of
work has its own coordinator, and an instance without the plugin is never elected for it.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

from jobsync.coordination.coordinator import Coordinator, Hooks
from jobsync.coordination.events import CoordinatorDemoted, CoordinatorElected, CoordinatorPromoted
from jobsync.coordination.membership import Membership, Peer
from jobsync.coordination.role import name_role
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.coordination.term import Term
from jobsync.database.plugin import Plugin
from jobsync.database.shared_session import SharedSession
from jobsync.errors import Invalid, closest_name
from jobsync.events import Event
from jobsync.setting_fields import fields
from jobsync.settings import Settings, Sources, resolve

__all__ = ["CoordinatorPlugin", "PluginWithoutWork", "split_options"]

_TYPO_LIKENESS = 0.85

_HOOKS = ("coordinator_work", "on_become_coordinator", "on_stop_being_coordinator")

_COORDINATOR_EVENTS: dict[str, type[Event]] = {
    "elected": CoordinatorElected,
    "promoted": CoordinatorPromoted,
    "demoted": CoordinatorDemoted,
}

_plugin_events: dict[str, Mapping[type[Event], type[Event]]] = {}
"""The plugin's own events for coordinator events, by slug; classes with one slug share them."""


class PluginWithoutWork(Event, frozen=True, kw_only=True):
    """A coordinator plugin overrides none of the hooks for its central work: it leads idly."""

    name = "db:plugin-without-work"
    level = logging.WARNING

    plugin: str
    fix: str


class CoordinatorPlugin(Plugin):
    """Base class of plugins with central work: override `coordinator_work` and other hooks.

    Args:
        namespace: separates several plugins of one kind, and their elections.
        options: of `CoordinatorSettings`.

    Raises:
        Invalid, Misconfigured: an option is unknown or invalid; gives the fix.
    """

    governs: ClassVar[tuple[str, ...]] = ()
    """Keys of the records that only the coordinator writes."""

    _slug_aliases: ClassVar[tuple[str, ...]] = ()
    """Other slugs under which this class's own coordinator events can be listened to. A
    subclass does not inherit them."""

    _own_events: ClassVar[Mapping[type[Event], type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.slug not in _plugin_events:
            slugs = (cls.slug, *vars(cls).get("_slug_aliases", ()))
            events = _make_events(slugs, cls.__module__)
            _plugin_events.update(dict.fromkeys(slugs, events))
        cls._own_events = _plugin_events[cls.slug]

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
        """Called when it is no longer coordinator, after all work."""

    async def coordinator_work(self) -> None:
        """Called every `coordinator_work_interval` while it leads; cancelled when its term ends."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this instance leads now, by the clock at each call."""
        return self._coordinator is not None and self._coordinator.is_coordinator

    @property
    def worker_id(self) -> str:
        """This worker's name.

        Raises:
            Invalid: the plugin is not running.
        """
        return self._get_membership().worker_id

    @property
    def term(self) -> Term | None:
        """The term in which this instance leads, with `term.epoch` and `term.put`; else None."""
        return None if self._coordinator is None else self._coordinator.term

    async def members(self) -> list[Peer]:
        """Return the live workers that are candidates for this work, the oldest first."""
        membership = self._get_membership()
        # This worker's own candidacy may be published only with its next heartbeat.
        is_candidate = self._coordinator is not None and not self._coordinator.withheld
        own = membership.incarnation if is_candidate else None
        return [
            peer
            for peer in await membership.members()
            if self._role in peer.works or peer.incarnation == own
        ]

    async def ensure_coordinator(
        self, *, force: bool = False, desired_coordinator: str | None = None
    ) -> str | None:
        """Wait until there is a coordinator; see `Coordinator.ensure_coordinator`."""
        if self._coordinator is None:
            raise Invalid("plugin", self.name, "is not running", "await plugin.start() first")
        return await self._coordinator.ensure_coordinator(
            force=force, desired_coordinator=desired_coordinator
        )

    @property
    def is_calling(self) -> bool:
        """Whether the caller is one of its own hooks, or other user code that `stop` waits for."""
        is_hook = self._coordinator is not None and self._coordinator.is_calling
        return is_hook or super().is_calling

    def unready(self) -> str:
        """Return why it cannot work now, such as a session that is not current."""
        membership = self._membership
        if membership is not None and not membership.is_trusted:
            return "its session is not current: the store has not answered in time"
        return super().unready()

    async def _set_up(self, exit_stack: AsyncExitStack) -> None:
        """Join the session, start, and become a candidate."""
        self._check_hooks()
        session = self.database.shared_session
        self._membership = await session.join(self.coordination)
        exit_stack.push_async_callback(self._leave, session)
        await super()._set_up(exit_stack)
        events = self.database.events
        events.on("coord:*", self._forward)
        exit_stack.callback(events.off, "coord:*", self._forward)
        if self._former is not None:
            # Work that stopped its own plugin may still run; its term is ended first.
            await self._former.stop()
        self._coordinator = await self._membership.coordinate(
            self.kind,
            Hooks(
                on_become=lambda _: self.on_become_coordinator(),
                work=lambda _: self.coordinator_work(),
                on_stop=lambda _: self.on_stop_being_coordinator(),
            ),
            namespace=self.namespace,
            governs=self.governs,
            settings=self.coordination,
        )
        exit_stack.push_async_callback(self._resign, self._coordinator)

    def _check_hooks(self) -> None:
        """Warn if there is nothing that it would do as coordinator."""
        inherited = [getattr(getattr(self, hook), "__func__", None) for hook in _HOOKS]
        if inherited != [getattr(CoordinatorPlugin, hook) for hook in _HOOKS]:
            return
        fix = "override coordinator_work"
        for name in sorted(set(dir(self)) - set(dir(CoordinatorPlugin))):
            hook = closest_name(name, _HOOKS, likeness=_TYPO_LIKENESS)
            fix = fix if hook is None else f"rename {name} to {hook}"
        self.emit(PluginWithoutWork(plugin=self.name, fix=fix))

    async def _resign(self, coordinator: Coordinator) -> None:
        """Withdraw the candidacy, and give up the role if it is held."""
        try:
            await coordinator.stop()
        except asyncio.CancelledError:
            coordinator.abandon()
            raise
        finally:
            self._coordinator, self._former = None, coordinator

    async def _leave(self, session: SharedSession) -> None:
        self._membership = None
        await session.leave()

    @property
    def _role(self) -> str:
        return name_role(self.namespace, self.kind)

    def _get_membership(self) -> Membership:
        if self._membership is None:
            raise Invalid("plugin", self.name, "is not running", "await plugin.start() first")
        return self._membership

    def _forward(self, event: Event) -> None:
        """Emit coordination events of this plugin's role and session to its own listeners."""
        if getattr(event, "role", self._role) != self._role:
            return
        self.events.deliver_here(event)
        # Also of a kind that refines one of them.
        kinds = (kind for kind in type(event).__mro__ if kind in self._own_events)
        own = self._own_events.get(next(kinds, Event))
        if own is not None:
            self.emit(own(**{field: event[field] for field in event.__struct_fields__}))


def split_options(
    kind: type[Settings], options: Mapping[str, Any], plugin: str, aliases: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that are a plugin's own settings, and those of `CoordinatorSettings`.

    Args:
        kind: the plugin's own settings.
        options: as they were passed.
        plugin: what the plugin is, for the error: "a queue".
        aliases: other names of options and arguments, which the error may suggest.

    Raises:
        Invalid: an option is neither.
    """
    own = {field.name for field in fields(kind)}
    known = own | {field.name for field in fields(CoordinatorSettings)}
    for name, value in options.items():
        if name not in known:
            hint = closest_name(name, [*known, *aliases])
            fix = f"did you mean {hint}?" if hint else f"use one of {', '.join(sorted(known))}"
            raise Invalid(name, value, f"is not an option of {plugin}", fix)
    passed = {name: value for name, value in options.items() if name in own}
    return passed, {name: value for name, value in options.items() if name not in own}


def _make_events(slugs: Sequence[str], module: str) -> dict[type[Event], type[Event]]:
    """Create the events with which one kind of plugin reports its coordinators.

    The first slug names them; the others become aliases.
    """
    slug, *aliases = slugs
    return {
        kind: type(
            f"{slug.title().replace('-', '')}{change.capitalize()}",
            (kind,),
            {
                "__module__": module,
                "__doc__": f"As `{kind.name}`, for this kind of plugin.",
                "name": f"plg:{slug}:coordinator-{change}",
                "aliases": tuple(f"plg:{alias}:coordinator-{change}" for alias in aliases),
                # Already logged, under the general name.
                "level": logging.DEBUG,
            },
            frozen=True,
            kw_only=True,
        )
        for change, kind in _COORDINATOR_EVENTS.items()
    }
