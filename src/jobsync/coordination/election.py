"""One coordinator for each kind of work in a namespace.

Promises: epochs of a role only grow, and each has one owner. While sessions keep their
promise, at most one worker at a time holds the role. A holder that cannot renew its
session stops before anybody may take its place; what it writes late is refused by the
epoch that its successor has written.

A role costs nothing to hold beyond the session. It is taken only from an owner whose death
is written, or that has released it; nobody takes a live role.

    free ── take: epoch + 1 ──▶ held ── release sent, trust lapsed, or session lost ──▶ over
      ▲                                                                                  │
      └──────────── the owner is dead, or empty: whoever is eligible takes it ◀──────────┘
"""

import msgspec

from jobsync.components import Components
from jobsync.coordination.session import SESSIONS, Session
from jobsync.core.trust import Timing, Watch
from jobsync.stores.contract import Applied, Put, Record, Store

__all__ = ["ROLES", "Election", "Role", "Term"]

ROLES = "role/"
"""Where roles are."""


class Role(msgspec.Struct, frozen=True):
    """Who leads, as the store has it."""

    epoch: int
    owner: str | None
    """The incarnation that holds it; None after a release."""
    since: float
    """When it was taken or released, by that worker's wall clock; for people."""


class Term(msgspec.Struct, frozen=True):
    """A time in office. Whether it still lasts is asked of the election."""

    epoch: int
    incarnation: str


class Election:
    """One worker's part in the election for one role. The owner calls `step` once a beat.

    Args:
        store: where roles and sessions are; its writes are settled.
        components: the clock that dates terms.
        timing: the sessions' timeout.
        session: what holds the role; a new one needs a new election.
        namespace: which fleet.
        work: which kind of work.
    """

    def __init__(
        self,
        store: Store,
        components: Components,
        timing: Timing,
        session: Session,
        namespace: str,
        work: str,
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._timing = timing
        self._session = session
        self._key = f"{ROLES}{namespace}/{work}"
        self._term: Term | None = None
        self._absent: Watch | None = None

    @property
    def term(self) -> Term | None:
        """The term that lasts now. Asks the session, and so the clock, each time."""
        term = self._term
        if term is None or not self._holds(term):
            return None
        return term

    async def step(self) -> Term | None:
        """Look at the role once, and take it if it is to be had.

        Raises:
            Unavailable: the store does not answer; a term lasts as long as trust does.
        """
        # A term that lapsed never comes back, even if trust does.
        self._term = self.term
        if self._term is None:
            record = await self._store.get(self._key, tombstones=True)
            if await self._is_free(record):
                await self._take(record)
        return self.term

    async def release(self) -> None:
        """Give the role up, keeping its epoch. From the moment this is called the term is over."""
        term, self._term = self._term, None
        if term is None:
            return
        record = await self._store.get(self._key)
        if record is not None and record.epoch == term.epoch:
            await self._store.write([self._change(record, term.epoch, None)])

    def _holds(self, term: Term) -> bool:
        session = self._session
        return session.trusted and session.incarnation == term.incarnation

    async def _is_free(self, record: Record | None) -> bool:
        if not self._session.trusted:
            return False
        if record is None or record.deleted:
            return True
        owner = msgspec.convert(record.value, Role).owner
        # One's own: a take whose reply was lost, or a term that lapsed. Both are taken anew.
        return owner in {None, self._session.incarnation} or await self._is_dead(str(owner))

    async def _is_dead(self, incarnation: str) -> bool:
        """Ask the store; a session that is not there is dead after a timeout of absence."""
        session = await self._store.get(f"{SESSIONS}{incarnation}")
        if session is not None:
            self._absent = None
            return bool(session.value["state"] == "dead")
        now = self._clock.mono()
        self._absent = (self._absent or Watch(None, now, now)).look(None, now, self._timing)
        return self._absent.expired(self._timing)

    async def _take(self, base: Record | None) -> None:
        """Replace the role that was read by a term of our own, of an epoch never used."""
        epoch = 1 if base is None else base.epoch + 1
        incarnation = self._session.incarnation
        (outcome,) = await self._store.write([self._change(base, epoch, incarnation)])
        # Whether it lasts is asked of the clock: the write may have taken longer than trust.
        if isinstance(outcome, Applied):
            self._term = Term(epoch, incarnation)

    def _change(self, base: Record | None, epoch: int, owner: str | None) -> Put:
        role = Role(epoch, owner, self._clock.wall().seconds)
        # Facts of newer code in the record survive.
        known = base.value if base is not None and not base.deleted else {}
        return Put(self._key, {**known, **msgspec.to_builtins(role)}, base, epoch=epoch)
