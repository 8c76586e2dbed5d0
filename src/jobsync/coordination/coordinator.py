"""What this worker does while it leads one kind of work.

Promises: hooks come in pairs, in order: `on_become` once for each term, then `work` again
and again, then `on_stop`, before any further `on_become`. Work is cancelled when the term
is over, which is known by the clock even if nobody can be reached. A hook that raises
becomes an event, and the next call comes.

Runs on the loop that joined. While that is blocked the term goes on, unless the session is
lost meanwhile; then what work does next is refused by the store, see `fencing`.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from jobsync.coordination.election import Election, HeldTerm, ask
from jobsync.coordination.events import CoordinatorDemoted, CoordinatorPromoted
from jobsync.coordination.observer import Candidates
from jobsync.coordination.role import ROLES, Request, Role, read_role, worker_of
from jobsync.coordination.session import Session
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.coordination.term import Term
from jobsync.core.clock import Mono
from jobsync.errors import (
    Corrupt,
    Fenced,
    Invalid,
    Misconfigured,
    NewerFormat,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from jobsync.events import HandlerFailed
from jobsync.stores.corruption_log import CorruptionLog

if TYPE_CHECKING:
    from jobsync.coordination.membership import Membership

__all__ = ["Coordinator", "Hooks", "StandaloneElection"]


# A role without an election: for a process that works alone and was told so.


class StandaloneElection:
    """Holds a role from the beginning to the end, in epoch 0, which no election ever gives.

    Args:
        name: the role's.
        session: for the look of it; nothing hangs on it.
    """

    def __init__(self, name: str, session: Session) -> None:
        self.name = name
        self.session = session
        self.role: Role | None = None
        self.is_open = True
        self.why_over = (0, "stopped")
        self._held: HeldTerm | None = HeldTerm(0, session.incarnation, 0, Mono(0))

    @property
    def held(self) -> HeldTerm | None:
        """The one term there is."""
        return self._held

    @property
    def leading(self) -> HeldTerm | None:
        """The one term there is."""
        return self._held

    def end(self) -> None:
        """Hold it no longer."""
        self._held = None


_MOMENT = 0.001


async def _do_nothing(*_: object) -> None:
    """Stand in for a hook that was not given."""


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """What to do while leading. Each takes the term."""

    on_become: Callable[[Term], Awaitable[object]] = _do_nothing
    work: Callable[[Term], Awaitable[object]] = _do_nothing
    """Called each `coordinator_work_interval`, the first time at once."""
    on_stop: Callable[[Term], Awaitable[object]] = _do_nothing


class Coordinator:
    """One worker's candidacy for one kind of work. Made by `Membership.coordinate`."""

    def __init__(
        self,
        membership: "Membership",
        election: Election | StandaloneElection,
        hooks: Hooks,
        settings: CoordinatorSettings,
        governs: Sequence[str],
    ) -> None:
        self._membership = membership
        self.election = election
        self._hooks = hooks
        self._interval = settings.coordinator_work_interval or membership.timing.beat
        self._governs = governs
        self._clock = membership.components.clock
        self._events = membership.components.events
        self._witness = CorruptionLog(membership.store.name, self._events)
        self._task: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None
        self._stopped_by: asyncio.Task[Any] | None = None
        self._is_stopping = False
        self._has_begun = False
        self._term: Term | None = None

    @property
    def is_coordinator(self) -> bool:
        """Whether this worker leads now. Asks the clock each time."""
        return self.election.leading is not None

    @property
    def worker_id(self) -> str:
        """This worker's name."""
        return self._membership.worker_id

    @property
    def term(self) -> Term | None:
        """The term that this worker leads in now."""
        term = self._term
        return term if term is not None and term.lasts else None

    @property
    def coordinator_id(self) -> str | None:
        """The worker that leads, as far as this one has heard."""
        role = self.election.role
        if role is None or role.owner is None:
            return self.worker_id if isinstance(self.election, StandaloneElection) else None
        return worker_of(role.owner)

    @property
    def is_calling(self) -> bool:
        """Whether it is one of its own hooks that asks."""
        caller = asyncio.current_task()
        return caller is not None and caller in {self._task, self._working}

    def start(self) -> None:
        """Begin to stand and to lead. Safe to repeat."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._lead_for_ever())

    async def stop(self) -> None:
        """Give the role up and stand no longer; `on_stop` has returned. Safe to repeat.

        A hook that calls it goes on to its own end; what is to come after that comes later.
        """
        self._is_stopping = True
        if self._stopped_by is None and self.is_calling:
            self._stopped_by = asyncio.current_task()
        with suppress(Unavailable):
            await self._membership.withdraw(self)
        self._membership.wake_waiters()
        task = self._task
        if task is None or self.is_calling:
            return
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def abandon(self) -> None:
        """Lead no longer, and wait for nothing."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()

    async def ensure_coordinator(
        self, *, force: bool = False, desired_coordinator: str | None = None
    ) -> str | None:
        """See to it that somebody leads; give the worker that does.

        Args:
            force: ask the present coordinator to hand over. It does so at once where the
                store tells of changes, else within two timeouts, but never before
                `min_epoch_duration`; this does not wait for it.
            desired_coordinator: the worker that shall lead next.

        Raises:
            NotFound: no such worker lives and stands for this work.
            Invalid: this worker stands no longer, and so hears of nobody.
            Unavailable: its session has ended.
        """
        store, name = self._membership.store, self.election.name
        self._membership.refresh()
        if not force:
            return await self._hear_of_leader()
        role = read_role(await store.get(f"{ROLES}{name}", tombstones=True))
        roll = Candidates(store, self._witness.report)
        workers = [worker_of(each) for each in await roll.standing_for(name)]
        if desired_coordinator not in {None, *workers}:
            raise NotFound("worker for this work", str(desired_coordinator), workers)
        if role is None or role.owner is None:
            return None
        if worker_of(role.owner) != desired_coordinator:
            request = Request(
                epoch=role.epoch, by=self.worker_id, desired=desired_coordinator, forced=True
            )
            if not await ask(store, name, request):
                raise OutcomeUnknown(name, "the request to hand over")
        return worker_of(role.owner)

    async def _hear_of_leader(self) -> str:
        while (leader := self.coordinator_id) is None:
            if self._is_stopping:
                fix = "coordinate it again"
                raise Invalid("work", self.election.name, "is stood for no longer", fix)
            self._membership.check()
            await self._membership.change()
        return leader

    async def _lead_for_ever(self) -> None:
        while not self._is_stopping:
            held = self.election.leading
            if held is None:
                await self._membership.change()
            else:
                await self._lead(held)

    async def _lead(self, held: HeldTerm) -> None:
        """Serve one term, from its beginning to its end."""
        # Nobody is elected anew whose last term is not wound up.
        self.election.is_open = False
        in_the_way: list[int] = []

        def stand_back(epoch: int) -> None:
            in_the_way.append(epoch)
            self._membership.wake_waiters()

        term = Term(
            self._membership.store,
            held.epoch,
            lambda: self.election.held is held,
            self._membership.components.ids,
            stand_back,
        )
        role = self.election.role
        until = 0.0 if role is None else role.until
        self._term = term
        self._events.emit(
            CoordinatorPromoted(
                role=self.election.name,
                worker_id=self.worker_id,
                epoch=held.epoch,
                until=until,
                timestamp=self._clock.wall().seconds,
            )
        )
        self._has_begun = False
        async with asyncio.TaskGroup() as group:
            self._working = group.create_task(self._work(term))
            await self._until_over(held, in_the_way)
            # Whoever stops us from the work itself has more to do.
            if self._working is not self._stopped_by:
                self._working.cancel()
        self._term = None
        self._tell_of_the_end(held, role)
        if self._has_begun:
            await self._call("on_stop", self._hooks.on_stop, term)
        self.election.is_open = True

    async def _until_over(self, held: HeldTerm, in_the_way: Sequence[int]) -> None:
        """Wait until a term is over, be it told or by the clock; end one that is fenced off."""
        while self.election.held is held:
            if in_the_way:
                await self._membership.step_down(self.election.name, held.epoch, max(in_the_way))
            await self._membership.change(max(self._membership.trust_left, _MOMENT))

    async def _work(self, term: Term) -> None:
        if not await self._seal(term):
            return
        self._has_begun = True
        await self._call("on_become", self._hooks.on_become, term)
        while not self._is_stopping:
            await self._call("coordinator_work", self._hooks.work, term)
            if not self._is_stopping:
                await self._clock.sleep(self._interval)

    async def _seal(self, term: Term) -> bool:
        """Shut earlier terms out before anything is done; say whether this term may go on."""
        beat = self._membership.timing.beat
        pause, told = beat / 10, ""
        while True:
            try:
                await term.seal(self._governs)
            except Fenced as fenced:
                self._report("seal", fenced)
                return False
            except (Corrupt, NewerFormat) as error:
                # Until somebody has mended it nothing can be done.
                if str(error) != told:
                    told = str(error)
                    self._report("seal", error)
                pause = beat
            except (OutcomeUnknown, Unavailable, Misconfigured):
                pause = min(2 * pause, beat)
            else:
                return True
            await self._clock.sleep(pause)

    async def _call(self, name: str, hook: Callable[[Term], Awaitable[object]], term: Term) -> None:
        try:
            await hook(term)
        except asyncio.CancelledError as error:
            # Unless it was meant for us, it is the hook's own, from something that it waited for.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._report(name, error)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            self._report(name, error)

    def _report(self, name: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception_only(error)).strip()
        self._events.emit(HandlerFailed(event=self.election.name, callback=name, error=text))

    def _tell_of_the_end(self, held: HeldTerm, role: Role | None) -> None:
        session = self.election.session
        is_lapsed = session.incarnation == held.incarnation and session.state == "live"
        epoch, reason = self.election.why_over
        latest = self.election.role
        if latest is not None and latest.epoch == held.epoch:
            role = latest
        if epoch != held.epoch:
            reason = "trust lapsed" if is_lapsed else "session lost"
        self._events.emit(
            CoordinatorDemoted(
                role=self.election.name,
                worker_id=self.worker_id,
                epoch=held.epoch,
                until=0.0 if role is None else role.until,
                reason=reason,
            )
        )
