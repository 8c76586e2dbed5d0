"""The tokens that this node owns, and how they change without two owners at once.

A node owns what its latest assignment gives it, and only while its session is trusted; so a
node that was paused refuses by itself. It gives up first: after a revocation it stops
claiming those tasks, and acknowledges once their claims in flight have ended. It uses the tokens
that it gains only after it has read what other nodes were doing under them.

Tasks that this node has just pinned to others are withheld: it claims none of them, although the
assignment still gives them to it. That ends with the first assignment that certainly knows the
pins, or when the pins are gone.

A positive answer to "may I claim this?" holds for a moment: a revocation that comes between the
answer and the claim waits for the claim, so a loop that asks first does not lose the race.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import msgspec

from jobsync.coordination.session import Session
from jobsync.core.assignment import Ownership, Plan, must_acknowledge
from jobsync.core.codec import Json
from jobsync.jobs.claims import Claims
from jobsync.jobs.events import TokenChange
from jobsync.jobs.registration import Registration

__all__ = ["OwnedTokens"]

_get_thread = threading.get_ident

_NOTHING = Ownership(0)

_GRACE = 0.2
"""Seconds for which an answer holds: far longer than a program takes from asking to claiming."""


class _Withheld(msgspec.Struct, frozen=True):
    """A task that the assignment may still give to this node, although it is pinned to others."""

    token: int
    known_from: int
    """The number of the first assignment that knows the pin."""


class OwnedTokens:
    """This node's part of the assignment.

    Args:
        registration: where revocations are acknowledged.
        claims: this node's claims, and what it knows about others'.
        on_change: called with each change after it was applied.
    """

    def __init__(
        self,
        registration: Registration,
        claims: Claims,
        on_change: Callable[[TokenChange], object],
    ) -> None:
        self._registration = registration
        self._claims = claims
        self._store_clock = claims.store_clock
        self._on_change = on_change
        self._session: Session | None = None
        self._incarnation = ""
        self._joined: float | None = None
        self._first_number = 0
        """The first assignment that named this node, in any of its sessions."""
        self._has_gained = False
        self._has_had_tokens = False
        self._answered: dict[int, tuple[str, int]] = {}
        """The task that each thread asked about last, with its token."""
        self._exempt: dict[str, int] = {}
        self._granted = _NOTHING
        """What the assignment gives to this node."""
        self._withheld: dict[str, _Withheld] = {}
        self.current = _NOTHING
        """What it may use: what is granted, without what is withheld."""

    def reset(self, session: Session | None) -> None:
        """Own nothing, in a new session or in none."""
        self._use(_NOTHING)
        self._session = session
        self._incarnation = "" if session is None else session.incarnation
        # Set once: the program may go on with a list that it read before the session began.
        if self._joined is None:
            self._joined = self._store_clock.now

    def owns(self, task: str, token: int) -> bool:
        """Whether this node owns a task now. Reads the clock, not the store."""
        session = self._session
        # A session that was replaced by another is no longer trusted.
        return self.current.covers(task, token) and session is not None and session.trusted

    def may_claim(self, task: str, token: int) -> bool:
        """Whether this node owns a task now. A positive answer holds for a moment."""
        # Before the answer: a revocation checks this after it has revoked.
        self._answered[_get_thread()] = task, token
        # The same as `owns`, without a call: this runs for each task of every list.
        session = self._session
        return self.current.covers(task, token) and session is not None and session.trusted

    def withhold(self, tasks: Mapping[str, int], known_from: int) -> None:
        """Use none of these tasks until an assignment that knows their pins is applied.

        Args:
            tasks: each with its token.
            known_from: the number of the first assignment that knows them.
        """
        self._withheld |= {task: _Withheld(token, known_from) for task, token in tasks.items()}
        self._use(self._granted)

    def release(self, tasks: Iterable[str]) -> None:
        """Use these tasks again, if the assignment gives them to this node."""
        for task in tasks:
            self._withheld.pop(task, None)
        self._use(self._granted)

    @property
    def withheld(self) -> dict[str, int]:
        """The tasks that are granted and withheld, each with its token."""
        return {
            task: withheld.token
            for task, withheld in self._withheld.items()
            if self._granted.covers(task, withheld.token)
        }

    def _use(self, granted: Ownership) -> None:
        self._granted = granted
        if self._withheld:
            self._withheld = {
                task: withheld
                for task, withheld in self._withheld.items()
                if granted.number < withheld.known_from
            }
        self.current = granted.without(self._withheld.keys()) if self._withheld else granted

    async def apply(self, plan: Plan) -> None:
        """Apply an assignment, if it is newer than the current one.

        Raises:
            Unavailable, OutcomeUnknown: the store does not answer; call again.
            Conflict: another process has this node's name.
        """
        before = self._granted
        number = plan.assignment.number
        if number <= before.number:
            return
        after = plan.seen_by(self._incarnation)
        if not self._first_number and plan.assignment.find(self._incarnation):
            self._first_number = number
        if must_acknowledge(plan, self._incarnation):
            await self._give_up(before, after, number)
        gained = after.tokens - before.tokens
        if tokens := gained | self._find_tokens_of_tasks(before, after, plan):
            await self._store_clock.read()
            await self._claims.foreign.load(tokens, self._build_recent_filter())
            self._has_gained = True
        self._use(after)
        self._exempt = {exempt.task: exempt.token for exempt in plan.exceptions.tasks}
        # Not by the number: who joins a fleet first applies an assignment without a share.
        is_initial = bool(gained) and not self._has_had_tokens
        self._has_had_tokens |= is_initial
        self._on_change(TokenChange(number, gained, before.tokens - after.tokens, is_initial))

    def _build_recent_filter(self) -> dict[str, Json]:
        """Return a filter for claims that others may have finished since lists were read here."""
        if self._store_clock.is_shared:
            since = max(self._joined or 0.0, self._store_clock.now - self._claims.handover_memory)
            return {"ended": {"$gte": since}}
        # Nodes share no clock, but they share the numbers. Lists are read after the first tokens
        # have come; for some time other nodes may still use the assignment before that.
        return {"number": {"$gte": self._first_number - self._has_gained}}

    async def _give_up(self, before: Ownership, after: Ownership, number: int) -> None:
        """Claim nothing more of what is revoked; acknowledge when nothing is in flight."""
        remaining = Ownership(
            before.number,
            before.tokens & after.tokens,
            before.own & after.own,
            before.others | after.others,
        )
        usable = self.current
        self._use(remaining)
        if promised := self._find_promised(usable, remaining):
            self._use(msgspec.structs.replace(remaining, own=remaining.own | promised))
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE):
                    await self._claims.wait_until_claiming(promised)
            self._use(remaining)
        await self._claims.settle(remaining.covers)
        await self._registration.update(applied=number)

    def _find_promised(self, before: Ownership, remaining: Ownership) -> frozenset[str]:
        """Return the tasks that threads were last told they may claim, and have not claimed."""
        answered = list(self._answered.values())
        self._answered.clear()
        return frozenset(
            task
            for task, token in answered
            if before.covers(task, token)
            and not remaining.covers(task, token)
            and not self._claims.has_claimed(task)
        )

    def _find_tokens_of_tasks(
        self, before: Ownership, after: Ownership, plan: Plan
    ) -> frozenset[int]:
        """Return the tokens of single tasks that are gained: their claims must be read too."""
        gained = after.own - before.own
        # Tasks that did not follow their token until now, and do again; the token is ours.
        returned = (before.others - after.others) & self._exempt.keys()
        found = {exempt.token for exempt in plan.exceptions.tasks if exempt.task in gained}
        return frozenset(found | {self._exempt[task] for task in returned})
