"""This process's place in a fleet: one session, shared by everything that it does.

Everything here runs on the loop that joined, which is home to the user's callbacks. The
session itself beats elsewhere, see `runner`, so that nothing done here can starve it.
"""

import asyncio
import os
import platform
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import msgspec

from jobsync.components import Components
from jobsync.coordination.coordinator import Coordinator, Hooks, StandaloneElection
from jobsync.coordination.election import Election
from jobsync.coordination.member_loop import MemberLoop
from jobsync.coordination.role import name_role
from jobsync.coordination.runner import LoopHost, OwnThread
from jobsync.coordination.session import SESSIONS, Session, SessionRecord, read_session_record
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.codec import Json
from jobsync.core.keys import check_key
from jobsync.errors import Corrupt, Invalid, Unavailable
from jobsync.events import Event, Events
from jobsync.settings import Sources, resolve
from jobsync.stores.contract import Store
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.stores.opening import open_another, open_store, read_url

__all__ = ["Membership", "Peer", "describe_process"]

_MOST = 10_000


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that lives, as it tells of itself."""

    worker_id: str
    incarnation: str
    works: tuple[str, ...]
    """The roles that it stands for."""
    holds: Mapping[str, int]
    """The roles that it holds, each with its epoch."""
    facts: Mapping[str, Json]
    """Host, process, when it joined, and the version of this library."""


class Membership:
    """A live session in a store. Make it with `join`, end it with `leave`.

    Args:
        store: what this loop reads and writes; the caller closes it.
        components: time, randomness and events.
        settings: beat and timeout, and what elections go by unless told otherwise.
        open_own: opens the store that the session beats in, for it alone.
        host: where the session lives.
        facts: what others may want to know of this process.
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
        """This worker's name, the same for all its sessions. Sorts by start time."""
        self._host = host
        self._open_own = open_own
        self._facts = dict(facts or {})
        self._witness = CorruptionLog(store.name, components.events)
        self._waiting: dict[asyncio.Future[None], None] = {}
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
        """The present session's name."""
        return self._member.session.incarnation

    @property
    def session(self) -> Session:
        """The present session, to look at; another follows it when it is lost."""
        return self._member.session

    @property
    def is_trusted(self) -> bool:
        """Whether what the session holds may be acted on now. Asks the clock each time."""
        return self._member.session.trusted

    @property
    def trust_left(self) -> float:
        """Seconds for which the session trusts itself if no further beat succeeds."""
        return self._member.session.trust_left

    async def start(self) -> None:
        """Begin to beat; return once the session is recorded.

        Raises:
            Unavailable, Misconfigured: the store cannot be used.
        """
        self._host.start(self._live)
        try:
            await self._host.call(self._opened.wait)
        except Unavailable:
            # What ended it says more than that it has ended.
            await self._host.finish()
            raise
        except asyncio.CancelledError:
            # Nobody would be left who could end it.
            self._host.post(self._dismiss)
            raise

    def _dismiss(self) -> None:
        """End what nobody waits for, on the host; what may be recorded in good order."""
        if self._is_recording:
            self._member.stop()
        else:
            self._host.cancel()

    async def _live(self) -> None:
        """Be a member, on the host."""
        store = await self._open_own()
        try:
            self._member = MemberLoop(
                store,
                msgspec.structs.replace(
                    self.components, events=_Relay(self._host, self.components.events)
                ),
                self.timing,
                self.worker_id,
                self._facts,
                lambda: self._host.post_home(self.wake_waiters),
            )
            self._is_recording = True
            await self._member.open()
            self._opened.set()
            await self._member.run()
        finally:
            await store.close()

    def check(self) -> None:
        """Refuse to go on without a session.

        Raises:
            Unavailable: it has ended.
        """
        if self._member.has_ended:
            raise Unavailable("the session", "has ended", "join again")

    async def ended(self) -> None:
        """Wait until the session has ended.

        Raises:
            Exception: what ended it, unless it was `leave`.
        """
        await self._host.finish()

    async def leave(self) -> None:
        """Hand over what is held and end the session. Safe to repeat.

        Waits for `on_stop`. If that is cancelled, by somebody who lost patience, everything
        ends without waiting.

        Raises:
            Exception: what had ended the session before.
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

    async def coordinate(
        self,
        work: str,
        hooks: Hooks | None = None,
        *,
        namespace: str = "default",
        governs: Iterable[str] = (),
        settings: CoordinatorSettings | None = None,
    ) -> Coordinator:
        """Stand for the coordination of a kind of work, and do it while elected.

        Args:
            work: which kind; workers that do not stand for it are never elected to it.
            hooks: what to do; nothing but lead, if left out.
            namespace: which fleet.
            governs: keys of the singletons that only this work's coordinator writes.
            settings: what this election goes by; the membership's own by default.

        Raises:
            Invalid: this membership stands for that work already, or a key is ill-formed.
        """
        settings = settings or self.settings
        role = name_role(namespace, work)
        if role in self._coordinators:
            raise Invalid("work", work, "is coordinated here already", "stop that one first")
        keys = tuple(governs)
        for key in keys:
            check_key(key, "governs")
        election = await self._stand(role, settings, keys)
        coordinator = Coordinator(self, election, hooks or Hooks(), settings, keys)
        self._coordinators[role] = coordinator
        coordinator.start()
        return coordinator

    async def withdraw(self, coordinator: Coordinator) -> None:
        """Stand no longer for a role, and give it up; unless another candidacy took its place."""
        role = coordinator.election.name
        if self._coordinators.get(role) is not coordinator:
            return
        del self._coordinators[role]
        if isinstance(coordinator.election, StandaloneElection):
            coordinator.election.end()
        else:
            await self._host.call(lambda: self._member.withdraw(role))

    async def _stand(
        self, role: str, settings: CoordinatorSettings, governs: Sequence[str]
    ) -> Election | StandaloneElection:
        if not settings.enable_coordinator:
            return StandaloneElection(role, self._member.session)
        options = settings.for_store(self.store, self.timing)

        is_wanted, standing = True, list[Election]()

        async def stand() -> Election:
            if not is_wanted:
                raise asyncio.CancelledError
            standing.append(self._member.stand(role, options, governs))
            return standing[0]

        def undo() -> None:
            for election in standing:
                self._member.drop_out(election)

        try:
            return await self._host.call(stand)
        except asyncio.CancelledError:
            # It may have happened: nobody is to stand whom nobody here knows of.
            is_wanted = False
            self._host.post(undo)
            raise

    async def step_down(self, role: str, epoch: int, current: int) -> None:
        """Give up a term that another epoch stands in the way of."""
        await self._host.call(lambda: self._member.step_down(role, epoch, current))

    def publish(self, **facts: Json) -> None:
        """Tell the other workers something, with a beat at once."""
        self._host.post(self._member.publish, facts)

    def watch(self, purpose: str, incarnations: Iterable[str]) -> None:
        """Look at these sessions at every beat from now on, for this purpose at no others."""
        self._watched[purpose] = frozenset(incarnations)
        self._member.watched = frozenset().union(*self._watched.values())

    def watched(self, purpose: str) -> frozenset[str]:
        """The sessions that are watched for a purpose."""
        return self._watched.get(purpose, frozenset())

    def is_dead(self, incarnation: str) -> bool:
        """Say whether a session is dead, by a write, as far as this worker has looked."""
        return self._member.is_dead(incarnation)

    @property
    def living(self) -> frozenset[str]:
        """The sessions that live, as this worker saw at its last beat; complete while it leads."""
        return self._member.living

    @property
    def seen(self) -> Mapping[str, SessionRecord]:
        """What the sessions that lead this worker, or that it watches, told last."""
        return self._member.seen

    def refresh(self) -> None:
        """Beat and look at once."""
        self._host.post(self._member.refresh)

    async def members(self) -> list[Peer]:
        """Give the workers that live, the oldest first."""
        peers = []
        for record in await self.store.scan(SESSIONS, limit=_MOST):
            try:
                life = read_session_record(record)
            except Corrupt as corrupt:
                self._witness.report(corrupt)
                continue
            if life.state == "live":
                peers.append(
                    Peer(
                        worker_id=life.worker,
                        incarnation=record.key.removeprefix(SESSIONS),
                        works=life.works,
                        holds=life.holds,
                        facts=life.facts,
                    )
                )
        return peers

    async def change(self, timeout: float | None = None) -> None:
        """Wait until something may be different: a beat, an election, a loss."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            pass
        finally:
            self._waiting.pop(waiter, None)

    def wake_waiters(self) -> None:
        """Wake whoever waits for a change."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)


class _Relay(Events):
    """Tells facts at home, whichever thread they are found on."""

    def __init__(self, host: LoopHost, home: Events) -> None:
        super().__init__()
        self._host = host
        self._home = home
        self._facts: deque[Event] = deque()

    def emit(self, event: Event) -> None:
        """Tell it soon, after all that happened before it."""
        self._facts.append(event)
        self._host.post_home(self._emit_next)

    def _emit_next(self) -> None:
        self._home.emit(self._facts.popleft())


def describe_process(components: Components) -> dict[str, Json]:
    """Give what others may want to know of this process."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "since": components.clock.wall().seconds,
        "version": version("jobsync-fleet"),
    }
