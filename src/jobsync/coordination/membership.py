"""A process's membership in a fleet: one session, shared by everything that it does.

Everything here runs on the home loop: the one that joined, which runs the user's callbacks. The
heartbeats run elsewhere, see `runner`, so that nothing done here can starve them.
"""

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import msgspec

from jobsync.components import Components
from jobsync.coordination.coordinator import Coordinator, Hooks, StandaloneElection
from jobsync.coordination.election import Election
from jobsync.coordination.member_loop import MemberLoop
from jobsync.coordination.observer import list_live_sessions
from jobsync.coordination.role import name_role
from jobsync.coordination.runner import HomeEvents, LoopHost, OwnThread
from jobsync.coordination.session import HookFailure, Session, SessionOwner, SessionRecord
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.codec import Json
from jobsync.core.keys import check_key
from jobsync.errors import Invalid, Unavailable
from jobsync.settings import Sources, resolve
from jobsync.stores.contract import Store
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.opening import open_another, open_store, read_url

__all__ = ["Membership", "Peer", "describe_process"]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker, as its session describes it."""

    worker_id: str
    incarnation: str
    works: tuple[str, ...]
    """The roles that it is a candidate for."""
    holds: Mapping[str, int]
    """The roles that it holds, each with its epoch."""
    facts: Mapping[str, Json]
    """Host, process, when it joined, and the version of this library."""


class Membership:
    """A live session in a store. Create it with `join`, end it with `leave`.

    Args:
        store: the store for calls on this loop; the caller closes it.
        components: time, randomness and events.
        settings: heartbeat and timeout, and the defaults of elections.
        open_own: opens the store that the heartbeats use, for them alone.
        host: where the member loop runs.
        facts: published for other workers.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        settings: CoordinatorSettings,
        *,
        open_own: Callable[[], Awaitable[Store]],
        host: LoopHost,
        facts: Mapping[str, Json] | None = None,
    ) -> None:
        self.store = store
        self.components = components
        self.settings = settings
        self.timing = settings.timing(store)
        self.worker_id = components.ids.worker()
        """This worker's id, the same for all its sessions. Sorts by start time."""
        self._host = host
        self._open_own = open_own
        self._facts = dict(facts or {})
        self._corruption_log = CorruptionLog(store.name, components.events)
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._coordinators: dict[str, Coordinator] = {}
        self._watched: dict[str, frozenset[str]] = {}
        self._owned: Store | None = None
        self._opened = asyncio.Event()
        self._is_recording = False
        self._member: MemberLoop

    @classmethod
    async def join(
        cls,
        url: str | None = None,
        components: Components | None = None,
        **options: Any,
    ) -> Self:
        """Open a store and a session in it.

        Args:
            url: which store; as for `open_store`.
            components: time, randomness and events; this machine's by default.
            options: as in `CoordinatorSettings`.

        Raises:
            Invalid, Misconfigured: an option or the store cannot be used, with the fix.
            Unavailable: the store does not answer.
        """
        components = components or Components.system()
        sources = Sources.load(os.environ, Path.cwd())
        settings = resolve(CoordinatorSettings, options, sources).value
        parsed = read_url(url)
        store = await open_store(url, components)
        try:
            membership = cls(
                store,
                components,
                settings,
                open_own=lambda: open_another(store, parsed, components),
                host=OwnThread(),
                facts=describe_process(components),
            )
            membership._owned = store
            await membership.start()
        except BaseException:
            await store.close()
            raise
        return membership

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    @property
    def incarnation(self) -> str:
        """The current session's name."""
        return self._member.session.incarnation

    @property
    def session(self) -> Session:
        """The current session, read-only; a new one replaces it when it is lost."""
        return self._member.session

    @property
    def is_trusted(self) -> bool:
        """Whether what the session holds may be acted on now. Reads the clock each time."""
        return self._member.session.trusted

    @property
    def trust_left(self) -> float:
        """Seconds for which the session trusts itself if no further heartbeat succeeds."""
        return self._member.session.trust_left

    @property
    def clock_skew(self) -> float | None:
        """Seconds that this machine's wall clock is ahead of the server's; None while unknown.

        Known only where the store cannot be asked for its time, and listings tell it. Leaders
        list all sessions at every check; others call `measure_clock`.
        """
        return self._member.heartbeats.clock_comparison.skew

    async def measure_clock(self) -> None:
        """Make `clock_skew` known, by one request unless it was compared in the last two timeouts.

        It stays unknown while a heartbeat is under way; call again.

        Raises:
            Unavailable: the store does not answer, or the session has ended.
        """
        await self._host.call(self._member.heartbeats.measure_clock)

    async def start(self) -> None:
        """Start the heartbeats; return once the session is stored.

        Raises:
            Unavailable, Misconfigured: the store cannot be used.
        """
        self._host.start(self._run_member)
        try:
            await self._host.call(self._opened.wait)
        except Unavailable:
            # Raises the error that ended the member, which says more.
            await self._host.finish()
            raise
        except asyncio.CancelledError:
            # Nobody else could end it.
            self._host.post(self._end_unwanted)
            raise

    def _end_unwanted(self) -> None:
        """End a member that nobody waits for; cleanly, if its session may be stored."""
        if self._is_recording:
            self._member.stop()
        else:
            self._host.cancel()

    async def _run_member(self) -> None:
        """Run the member loop, on the host."""
        store = await self._open_own()
        try:
            events = HomeEvents(self._host, self.components.events)
            components = msgspec.structs.replace(self.components, events=events)
            self._member = MemberLoop(
                SessionOwner(store, components, self.timing, self.worker_id, self._facts),
                lambda: self._host.post_home(self.wake_waiters),
            )
            self._is_recording = True
            await self._member.open()
            self._opened.set()
            await self._member.run()
        finally:
            await store.close()

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended for good."""
        return self._member.has_ended

    def check(self) -> None:
        """Check that the session has not ended.

        Raises:
            Unavailable: it has ended.
        """
        if self._member.has_ended:
            raise Unavailable("the session", "it has ended", "join again")

    async def ended(self) -> None:
        """Wait until the session has ended.

        Raises:
            Exception: the error that ended it, if any.
        """
        await self._host.finish()

    async def leave(self) -> None:
        """Release everything held and end the session. Safe to repeat.

        Waits for `on_stop`. If this call is cancelled meanwhile, everything ends without
        waiting.

        Raises:
            Exception: the error that had ended the session before.
        """
        coordinators = list(self._coordinators.values())
        try:
            for coordinator in coordinators:
                await coordinator.stop()
            self._host.post(self._member.stop)
            await self._host.finish()
        except asyncio.CancelledError:
            for coordinator in coordinators:
                coordinator.abandon()
            self._host.post(self._member.stop)
            raise
        finally:
            if self._owned is not None:
                await self._owned.close()

    def start_leaving(self) -> None:
        """Start to release everything held and to end the session, without waiting.

        For a process that cannot go on working: others take over at once.
        """
        for coordinator in self._coordinators.values():
            coordinator.start_stopping()
        self._host.post(self._member.stop)

    async def coordinate(
        self,
        work: str,
        hooks: Hooks | None = None,
        *,
        namespace: str = "default",
        governs: Iterable[str] = (),
        settings: CoordinatorSettings | None = None,
    ) -> Coordinator:
        """Become a candidate for coordinating a kind of work, and do it while elected.

        Args:
            work: the kind of work; workers that are not candidates for it are never elected.
            hooks: what to do while leading; nothing by default.
            namespace: the fleet.
            governs: keys of the singletons that only this work's coordinator writes.
            settings: the options of this election; the membership's own by default.

        Raises:
            Invalid: this membership coordinates that work already, or a key is ill-formed.
        """
        settings = settings or self.settings
        role = name_role(namespace, work)
        if role in self._coordinators:
            raise Invalid("work", work, "is already coordinated here", "stop that one first")
        keys = tuple(governs)
        for key in keys:
            check_key(key, "governs")
        election = await self._add_candidacy(role, settings, keys)
        coordinator = Coordinator(self, election, hooks or Hooks(), settings, keys)
        self._coordinators[role] = coordinator
        coordinator.start()
        return coordinator

    async def withdraw(self, coordinator: Coordinator) -> None:
        """End a candidacy and release its role, unless a newer candidacy has replaced it."""
        role = coordinator.election.name
        if self._coordinators.get(role) is not coordinator:
            return
        del self._coordinators[role]
        if isinstance(coordinator.election, StandaloneElection):
            coordinator.election.end()
            if coordinator.withheld:
                self.publish_withheld(role, "")
        else:
            await self._host.call(lambda: self._member.withdraw(role))

    async def _add_candidacy(
        self, role: str, settings: CoordinatorSettings, governs: Sequence[str]
    ) -> Election | StandaloneElection:
        if not settings.enable_coordinator:
            return StandaloneElection(role, self._member.session)
        options = settings.for_store(self.store, self.timing)

        is_wanted, added = True, list[Election]()

        async def add() -> Election:
            if not is_wanted:
                raise asyncio.CancelledError
            added.append(self._member.add_candidacy(role, options, governs))
            return added[0]

        def undo() -> None:
            for election in added:
                self._member.drop_candidacy(election)

        try:
            return await self._host.call(add)
        except asyncio.CancelledError:
            # It may have been added already: no candidacy may remain without an owner here.
            is_wanted = False
            self._host.post(undo)
            raise

    async def step_down(self, role: str, epoch: int, current: int) -> None:
        """Release a term that another epoch has replaced."""
        await self._host.call(lambda: self._member.step_down(role, epoch, current))

    def publish(self, **facts: Json) -> None:
        """Publish facts for other workers, with a heartbeat at once."""
        self._host.post(self._member.heartbeats.publish, facts)

    def publish_failure(self, role: str, failure: HookFailure | None) -> None:
        """Publish that a hook raises, or that none does, with the next heartbeat."""
        self._host.post(self._member.heartbeats.publish_failure, role, failure)

    def publish_withheld(self, role: str, reason: str) -> None:
        """Publish why this worker stands back from a role, or that it does not, at once."""
        self._host.post(self._member.publish_withheld, role, reason)

    def watch(self, purpose: str, incarnations: Iterable[str]) -> None:
        """Check these sessions at every heartbeat, in place of the purpose's earlier ones.

        New ones are checked at once, where requests cost nothing: the process of one may have
        ended.
        """
        before = self._member.watched
        self._watched.pop(purpose, None)
        if watched := frozenset(incarnations):
            self._watched[purpose] = watched
        self._member.watched = frozenset().union(*self._watched.values())
        if self._member.watched - before and not self.store.is_billed:
            self._host.post(self._member.check)

    def watched(self, purpose: str) -> frozenset[str]:
        """Return the sessions that are watched for a purpose."""
        return self._watched.get(purpose, frozenset())

    def is_dead(self, incarnation: str) -> bool:
        """Whether a session is known to be dead, by a write, as of this worker's last check."""
        return self._member.is_dead(incarnation)

    def has_process_ended(self, incarnation: str) -> bool:
        """Whether a session is dead and its process had ended before, so that it does nothing."""
        return self._member.has_process_ended(incarnation)

    @property
    def living(self) -> frozenset[str]:
        """The live sessions as of this worker's last check; complete while it leads."""
        return self._member.living

    @property
    def seen(self) -> Mapping[str, SessionRecord]:
        """The latest records of the sessions that lead this worker, or that it watches."""
        return self._member.seen

    def refresh(self) -> None:
        """Send a heartbeat and run a check at once."""
        self._host.post(self._member.refresh)

    async def members(self) -> list[Peer]:
        """Return the live workers, the oldest first."""
        found = await list_live_sessions(self.store, self._corruption_log.report)
        return [
            Peer(
                worker_id=record.worker,
                incarnation=incarnation,
                works=record.works,
                holds=record.holds,
                facts=record.facts,
            )
            for incarnation, record in found.items()
        ]

    async def change(self, timeout: float | None = None) -> None:
        """Wait until something may have changed: a heartbeat, an election, a lost session."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiters.pop(waiter, None)

    def wake_waiters(self) -> None:
        """Wake all that wait in `change`."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def describe_process(components: Components) -> dict[str, Json]:
    """Return the facts that every session publishes about its process."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "since": components.clock.wall().seconds,
        "version": _find_version(),
    }


@cache
def _find_version() -> str:
    """Return the installed version. Finding it takes a millisecond: it reads a file."""
    return version("jobsync-fleet")
