"""What this node owns, and how it changes without two nodes owning one thing.

A node owns what its latest assignment gives it, and only while its session trusts itself;
so a node that was paused says no by itself. It gives up first: from the moment that it
knows of a revocation it claims nothing of it; when no such claim is under way any more it
acknowledges. What it gains it uses only after it has learned what others were doing there.

A yes to "may I claim this?" is kept for a moment: a revocation that comes between the
answer and the claim waits for the claim, so that a loop that asks first need not fear it.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from jobsync.coordination.session import Session
from jobsync.core.assignment import Ownership, Plan, owes
from jobsync.core.codec import Json
from jobsync.jobs.claims import Claims
from jobsync.jobs.registration import Registration

__all__ = ["OwnedTokens", "TokenChange"]

_thread = threading.get_ident

_NOTHING = Ownership(0)

_GRACE = 0.2
"""Seconds for which a yes is kept: far longer than a program takes from asking to claiming."""


class TokenChange(msgspec.Struct, frozen=True):
    """What another assignment has changed for this node."""

    number: int
    added: frozenset[int]
    removed: frozenset[int]
    is_initial: bool


class OwnedTokens:
    """This node's part of the assignment.

    Args:
        name: where revocations are acknowledged.
        claims: what is under way, and what others do.
        tell: called with each change, after it was applied.
    """

    def __init__(
        self,
        name: Registration,
        claims: Claims,
        tell: Callable[[TokenChange], object],
    ) -> None:
        self._name = name
        self._claims = claims
        self._tell = tell
        self._session: Session | None = None
        self._incarnation = ""
        self._joined: float | None = None
        self._named = 0
        """The first assignment that named this node, in any of its sessions."""
        self._has_gained = False
        self._asked: dict[int, tuple[str, int]] = {}
        self._exempt: dict[str, int] = {}
        self.mine = _NOTHING

    def join(self, session: Session | None) -> None:
        """Begin with nothing, in a new session or in none."""
        self.mine = _NOTHING
        self._session = session
        self._incarnation = "" if session is None else session.incarnation
        # Kept for good: whoever works here may go on with a list from before the session.
        if self._joined is None:
            self._joined = self._claims.now

    def owns(self, task: str, token: int) -> bool:
        """Say whether a task is this node's now. Asks the clock; touches no store."""
        session = self._session
        # A session that another has followed is trusted no more.
        return self.mine.covers(task, token) and session is not None and session.trusted

    def may_claim(self, task: str, token: int) -> bool:
        """Say whether a task is this node's now, and keep to a yes for a moment."""
        # Before the answer: who revokes looks here after it has revoked.
        self._asked[_thread()] = task, token
        # As `owns` says, without a call: this is asked for each task of every list.
        session = self._session
        return self.mine.covers(task, token) and session is not None and session.trusted

    async def apply(self, plan: Plan) -> None:
        """Carry out an assignment, if it is later than the one that holds.

        Raises:
            Unavailable, OutcomeUnknown: the store does not answer; call again.
            Conflict: this node's name is another's.
        """
        before = self.mine
        number = plan.assignment.number
        if number <= before.number:
            return
        after = plan.seen_by(self._incarnation)
        if not self._named and plan.assignment.find(self._incarnation):
            self._named = number
        if owes(plan, self._incarnation):
            await self._give_up(before, after, number)
        gained = after.tokens - before.tokens
        if tokens := gained | self._tokens_of_tasks(before, after, plan):
            await self._claims.set_clock()
            await self._claims.load(tokens, self._recent())
            self._has_gained = True
        self.mine = after
        self._exempt = {each.task: each.token for each in plan.exceptions.tasks}
        change = TokenChange(
            number, gained, before.tokens - after.tokens, is_initial=before.number == 0
        )
        self._tell(change)

    def _recent(self) -> dict[str, Json]:
        """Give what claims are like that others may have finished since lists were read here."""
        if self._claims.has_clock:
            since = max(self._joined or 0.0, self._claims.now - self._claims.memory)
            return {"ended": {"$gte": since}}
        # Nodes share no clock, but they share the numbers. Lists are read when the first tokens
        # have come; for some time others may go by the assignment before that.
        return {"number": {"$gte": self._named - self._has_gained}}

    async def _give_up(self, before: Ownership, after: Ownership, number: int) -> None:
        """Claim nothing more of what is revoked; acknowledge when nothing is under way."""
        kept = Ownership(
            before.number,
            before.tokens & after.tokens,
            before.own & after.own,
            before.others | after.others,
        )
        self.mine = kept
        if promised := self._promised(before, kept):
            self.mine = msgspec.structs.replace(kept, own=kept.own | promised)
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE):
                    await self._claims.begun(promised)
            self.mine = kept
        await self._claims.settle(kept.covers)
        await self._name.tell(applied=number)

    def _promised(self, before: Ownership, kept: Ownership) -> frozenset[str]:
        """Give what each thread asked for last and was told yes, and has not claimed yet."""
        asked = list(self._asked.values())
        self._asked.clear()
        return frozenset(
            task
            for task, token in asked
            if before.covers(task, token)
            and not kept.covers(task, token)
            and not self._claims.knows(task)
        )

    def _tokens_of_tasks(self, before: Ownership, after: Ownership, plan: Plan) -> frozenset[int]:
        """Give the tokens of tasks that are gained by themselves: their claims matter too."""
        apart = after.own - before.own
        # What went a way of its own until now, and is back with its token, which is ours.
        back = (before.others - after.others) & self._exempt.keys()
        found = {each.token for each in plan.exceptions.tasks if each.task in apart}
        return frozenset(found | {self._exempt[task] for task in back})
