"""A coordinator: calls a worker's hooks while it leads one kind of work.

Guarantees: hooks come in pairs and in order: `on_become` once per term, then `work` repeatedly,
then `on_stop`, before the next `on_become`. Work is cancelled when the term is over; the clock
decides that, even if the store cannot be reached. A hook that raises becomes an event, and the
next call still comes; until one succeeds, the session shows the error to everybody.

It runs on the home loop. While that is blocked the term goes on, unless the session is lost; the
store then refuses the next write, see `term`.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from jobsync.coordination.election import Election
from jobsync.coordination.events import CoordinatorDemoted, CoordinatorPromoted
from jobsync.coordination.observer import Candidates
from jobsync.coordination.role import ROLES, HeldTerm, Role, read_role, worker_of
from jobsync.coordination.runner import find_caller
from jobsync.coordination.session import HookFailure, Session
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.coordination.succession import HandoverRequest, request_handover
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
from jobsync.safe_text import format_error
from jobsync.stores.corruption_log import CorruptionLog
from jobsync.user_functions import is_for_task

if TYPE_CHECKING:
    from jobsync.coordination.membership import Membership

__all__ = ["Coordinator", "Hooks", "StandaloneElection"]


class StandaloneElection:
    """A role without an election, for a process that is configured to work alone.

    It holds the role from start to end in epoch 0, which no election uses.

    Args:
        name: the role's.
        session: only to report; the term does not depend on it.
    """

    def __init__(self, name: str, session: Session) -> None:
        self.name = name
        self.session = session
        self.role: Role | None = None
        self.can_take = True
        self.end_reason = (0, "stopped")
        self._withheld = ""
        self._held_term: HeldTerm | None = self._build_term()

    @property
    def withheld(self) -> str:
        """Why it does not work for now."""
        return self._withheld

    @withheld.setter
    def withheld(self, reason: str) -> None:
        self._withheld = reason
        if reason:
            self.end_reason = (0, reason)
            if self._held_term is not None:
                # What has seen this term end does not go on in the next one.
                self._held_term = self._build_term()

    def _build_term(self) -> HeldTerm:
        return HeldTerm(0, self.session.incarnation, 0, Mono(0))

    @property
    def held_term(self) -> HeldTerm | None:
        """The term that lasts now."""
        return None if self.withheld else self._held_term

    @property
    def leading_term(self) -> HeldTerm | None:
        """The term that lasts now."""
        return self.held_term

    def end(self) -> None:
        """Release the role."""
        self.end_reason = (0, "stopped")
        self._held_term = None


_SHORTEST_WAIT = 0.001
_MAX_ERROR_LENGTH = 500
"""Characters of an error that a session shows; it is written with every heartbeat."""


async def _do_nothing(*_: object) -> None:
    pass


def _check_awaitable(hook: str, result: object) -> Awaitable[object]:
    """Return what a hook has returned.

    Raises:
        Invalid: it cannot be awaited.
    """
    if not inspect.isawaitable(result):
        raise Invalid(hook, result, "must be a coroutine function", "define it with `async def`")
    return result


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """Functions to call while leading. Each takes the term."""

    on_become: Callable[[Term], Awaitable[object]] = _do_nothing
    work: Callable[[Term], Awaitable[object]] = _do_nothing
    """Called every `coordinator_work_interval`, the first time at once."""
    on_stop: Callable[[Term], Awaitable[object]] = _do_nothing


class Coordinator:
    """One worker's candidacy for one kind of work. Created by `Membership.coordinate`."""

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
        self._interval = settings.coordinator_work_interval or membership.timing.heartbeat
        self._governs = governs
        self._clock = membership.components.clock
        self._events = membership.components.events
        self._corruption_log = CorruptionLog(membership.store.name, self._events)
        self._task: asyncio.Task[None] | None = None
        self._work_task: asyncio.Task[None] | None = None
        self._stopped_by: asyncio.Task[Any] | None = None
        self._is_stopping = False
        self._has_started = False
        self._term: Term | None = None
        self._failure: HookFailure | None = None

    @property
    def is_coordinator(self) -> bool:
        """Whether this worker leads now. Reads the clock each time."""
        return self.election.leading_term is not None

    @property
    def worker_id(self) -> str:
        """This worker's id."""
        return self._membership.worker_id

    @property
    def term(self) -> Term | None:
        """The current term, if this worker leads."""
        term = self._term
        return term if term is not None and term.lasts else None

    @property
    def coordinator_id(self) -> str | None:
        """The worker that leads, as far as this one knows."""
        role = self.election.role
        if role is None or role.owner is None:
            return self.worker_id if isinstance(self.election, StandaloneElection) else None
        return worker_of(role.owner)

    @property
    def is_calling(self) -> bool:
        """Whether the caller is one of its own hooks."""
        caller = find_caller()
        return caller is not None and caller in {self._task, self._work_task}

    @property
    def withheld(self) -> str:
        """Why this worker stands back for now; empty if it is a candidate."""
        return self.election.withheld

    def withhold(self, reason: str) -> None:
        """Stand back until `stand` is called: release the role if it is held, and do not take it.

        The role is released at the next check, which starts at once. Meanwhile this worker is not
        a candidate: others neither wait for it nor hand over to it. If all stand back, nobody
        leads. The session shows the reason to everybody, and the event of a demotion has it.
        Repeated calls keep the first reason. A process that works alone stops its work likewise.

        Args:
            reason: a sentence for people.
        """
        if not self.election.withheld:
            self._set_withheld(reason)

    def stand(self) -> None:
        """Be a candidate again. Does nothing if it is one."""
        if self.election.withheld:
            self._set_withheld("")

    def _set_withheld(self, reason: str) -> None:
        self.election.withheld = reason
        self._membership.publish_withheld(self.election.name, reason)
        self._membership.wake_waiters()

    def start(self) -> None:
        """Start the task that leads whenever this worker is elected. Safe to repeat."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Release the role and end the candidacy; returns after `on_stop`. Safe to repeat.

        If a hook calls this, it returns at once, and the rest happens after the hook has ended.
        """
        self._is_stopping = True
        if self._stopped_by is None and self.is_calling:
            self._stopped_by = find_caller()
        with suppress(Unavailable):
            await self._membership.withdraw(self)
        self._membership.wake_waiters()
        task = self._task
        if task is None or self.is_calling:
            return
        if task.get_loop().is_closed():
            # It ended with its loop, in which the database was connected before.
            return
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def start_stopping(self) -> None:
        """End the candidacy when the session ends; `on_stop` is called after the work."""
        self._is_stopping = True
        if isinstance(self.election, StandaloneElection):
            self.election.end()
        self._membership.wake_waiters()

    def abandon(self) -> None:
        """Stop leading, without waiting for anything."""
        self._is_stopping = True
        self._set_failure(None)
        if self._task is not None:
            self._task.cancel()

    async def ensure_coordinator(
        self, *, force: bool = False, desired_coordinator: str | None = None
    ) -> str | None:
        """Wait until some worker leads, and return its id.

        Args:
            force: ask the current coordinator to hand over. It does so at once where the store
                sends notifications, else within two timeouts, but never before
                `min_epoch_duration`; this call does not wait for it.
            desired_coordinator: the worker that should lead next.

        Raises:
            NotFound: no such live worker is a candidate for this work.
            OutcomeUnknown: the request to hand over may or may not be stored; call again.
            Invalid: this coordinator was stopped, so it no longer learns who leads.
            Unavailable: its session has ended.
        """
        store, name = self._membership.store, self.election.name
        self._membership.refresh()
        if not force:
            return await self._wait_for_leader()
        if desired_coordinator == self.worker_id and isinstance(self.election, Election):
            await self._wait_until_candidate()
        while True:
            role = read_role(await store.get(f"{ROLES}{name}", tombstones=True))
            candidates = Candidates(store, self._corruption_log.report)
            workers = [worker_of(each) for each in await candidates.list_for(name)]
            if desired_coordinator not in {None, *workers}:
                raise NotFound("worker for this work", str(desired_coordinator), workers)
            if role is None or role.owner is None:
                return None
            leader = worker_of(role.owner)
            request = HandoverRequest(
                epoch=role.epoch, by=self.worker_id, desired=desired_coordinator, forced=True
            )
            if leader == desired_coordinator or await request_handover(store, name, request):
                return leader
            # Somebody else has asked meanwhile, perhaps for another worker.

    async def _wait_until_candidate(self) -> None:
        """Wait until others can see this candidacy: the next heartbeat tells of it."""
        timing = self._membership.timing
        until = self._clock.mono() + timing.timeout
        while self._clock.mono() < until and not self._is_stopping and not self.withheld:
            if self.election.name in self._membership.session.recorded_works:
                return
            self._membership.check()
            await self._clock.sleep(timing.heartbeat / 100)

    async def _wait_for_leader(self) -> str:
        while (leader := self.coordinator_id) is None:
            if self._is_stopping:
                problem, fix = "is no longer coordinated here", "coordinate it again"
                raise Invalid("work", self.election.name, problem, fix)
            self._membership.check()
            await self._membership.change()
        return leader

    async def _run(self) -> None:
        while not self._is_stopping:
            held_term = self.election.leading_term
            if held_term is None:
                await self._membership.change()
            else:
                await self._lead(held_term)

    async def _lead(self, held_term: HeldTerm) -> None:
        """Lead for one term, from its start to its end."""
        # This worker is not elected again before its last term is wound up.
        self.election.can_take = False
        newer_epochs: list[int] = []

        def on_replaced(epoch: int) -> None:
            newer_epochs.append(epoch)
            self._membership.wake_waiters()

        term = Term(
            self._membership.store,
            held_term.epoch,
            lambda: self.election.held_term is held_term,
            self._membership.components.ids,
            on_replaced,
        )
        role = self.election.role
        until = 0.0 if role is None else role.until
        self._term = term
        self._events.emit(
            CoordinatorPromoted(
                role=self.election.name,
                worker_id=self.worker_id,
                epoch=held_term.epoch,
                until=until,
                timestamp=self._clock.wall().seconds,
            )
        )
        self._has_started = False
        async with asyncio.TaskGroup() as group:
            self._work_task = group.create_task(self._work(term))
            await self._wait_until_over(held_term, newer_epochs)
            # A hook that called `stop` runs to its end.
            if self._work_task is not self._stopped_by:
                self._work_task.cancel()
        self._term = None
        self._set_failure(None)
        self._report_end(held_term, role)
        if self._has_started:
            await self._call("on_stop", self._hooks.on_stop, term)
        self.election.can_take = True

    async def _wait_until_over(self, held_term: HeldTerm, newer_epochs: Sequence[int]) -> None:
        """Wait until a term is over, by notification or by the clock; end one that is fenced."""
        while self.election.held_term is held_term:
            if newer_epochs:
                await self._membership.step_down(
                    self.election.name, held_term.epoch, max(newer_epochs)
                )
            await self._membership.change(self._longest_wait)

    @property
    def _longest_wait(self) -> float | None:
        """Seconds after which a term may be over without a notification; None for none."""
        if isinstance(self.election, StandaloneElection):
            # It does not depend on the trust in the session.
            return None
        return max(self._membership.trust_left, _SHORTEST_WAIT)

    async def _work(self, term: Term) -> None:
        if not await self._seal(term):
            return
        self._has_started = True
        await self._call("on_become", self._hooks.on_become, term)
        # A hook may answer its cancellation with an error of its own, or with nothing.
        while self._should_work(term):
            await self._call("coordinator_work", self._hooks.work, term)
            if self._should_work(term):
                await self._clock.sleep(self._interval)

    def _should_work(self, term: Term) -> bool:
        return term.lasts and not self._is_stopping

    async def _seal(self, term: Term) -> bool:
        """Seal the governed singletons before anything else; return whether the term may go on."""
        beat = self._membership.timing.heartbeat
        pause, reported = beat / 10, ""
        while True:
            try:
                await term.seal(self._governs)
            except Fenced as fenced:
                self._report("seal", fenced)
                return False
            except (Corrupt, NewerFormat) as error:
                # Nothing can be done until the record is repaired.
                if str(error) != reported:
                    reported = str(error)
                    self._report("seal", error)
                pause = beat
            except (OutcomeUnknown, Unavailable, Misconfigured):
                pause = min(2 * pause, beat)
            else:
                self._forget_failure("seal")
                return True
            await self._clock.sleep(pause)

    async def _call(self, name: str, hook: Callable[[Term], Awaitable[object]], term: Term) -> None:
        try:
            await _check_awaitable(name, hook(term))
        except BaseException as error:
            if is_for_task(error):
                raise
            self._report(name, error)
        else:
            self._forget_failure(name)

    def _report(self, name: str, error: BaseException) -> None:
        text = format_error(error)
        self._events.emit(HandlerFailed(event=self.election.name, callback=name, error=text))
        if self._term is None:
            # Nobody looks for the error of a term that is over.
            return
        last = self._failure
        times = last.times + 1 if last is not None and last.callback == name else 1
        text = format_error(error, _MAX_ERROR_LENGTH)
        now = self._clock.wall().seconds
        self._set_failure(HookFailure(callback=name, error=text, at=now, times=times))

    def _forget_failure(self, name: str) -> None:
        """Publish that a hook has succeeded, if it had raised before."""
        if self._failure is not None and self._failure.callback == name:
            self._set_failure(None)

    def _set_failure(self, failure: HookFailure | None) -> None:
        if failure != self._failure:
            self._failure = failure
            self._membership.publish_failure(self.election.name, failure)

    def _report_end(self, held_term: HeldTerm, role: Role | None) -> None:
        session = self.election.session
        is_lapsed = session.incarnation == held_term.incarnation and session.state == "live"
        epoch, reason = self.election.end_reason
        latest = self.election.role
        if latest is not None and latest.epoch == held_term.epoch:
            role = latest
        if epoch != held_term.epoch:
            reason = "trust lapsed" if is_lapsed else "session lost"
        self._events.emit(
            CoordinatorDemoted(
                role=self.election.name,
                worker_id=self.worker_id,
                epoch=held_term.epoch,
                until=0.0 if role is None else role.until,
                reason=reason,
            )
        )
