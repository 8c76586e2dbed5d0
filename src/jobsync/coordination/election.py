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
    """When it was taken, by its owner's wall clock; for people."""
    successor: str | None = None
    """Who alone may take it for one beat after a hand-over."""


class Term(msgspec.Struct, frozen=True):
    """A time in office. Whether it still lasts is asked of the election."""

    epoch: int
    incarnation: str


class Election:
    """One worker's part in the election for one role. The owner calls `step` once a beat.

    Args:
        store: where roles and sessions are; its writes are settled.
        components: the clock that dates terms.
        session: what holds the role.
        namespace: which fleet.
        work: which kind of work.
    """

    def __init__(
        self, store: Store, components: Components, session: Session, namespace: str, work: str
    ) -> None:
        self._store = store
        self._clock = components.clock
        self._session = session
        self._key = f"{ROLES}{namespace}/{work}"
        self._term: Term | None = None
        self._over: set[int] = set()
        self._highest = 0

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
        self._end_what_lapsed()
        record = await self._store.get(self._key)
        role = None if record is None else msgspec.convert(record.value, Role)
        if role is not None:
            self._highest = max(self._highest, role.epoch)
        if self.term is None and await self._is_free(role):
            await self._take(record)
        return self.term

    async def release(self, successor: str | None = None) -> None:
        """Give the role up, keeping its epoch. From the moment this is sent the term is over."""
        term, self._term = self._term, None
        if term is None:
            return
        self._over.add(term.epoch)
        record = await self._store.get(self._key)
        if record is None or record.value["epoch"] != term.epoch:
            return
        free = Role(term.epoch, None, self._clock.wall().seconds, successor)
        document = {**record.value, **msgspec.to_builtins(free)}
        await self._store.write([record.replace(document, epoch=term.epoch)])

    def _holds(self, term: Term) -> bool:
        session = self._session
        return session.trusted and session.incarnation == term.incarnation

    def _end_what_lapsed(self) -> None:
        """A term that lapsed never comes back, even if trust does."""
        if self._term is not None and not self._holds(self._term):
            self._over.add(self._term.epoch)
            self._term = None

    async def _is_free(self, role: Role | None) -> bool:
        if not self._session.trusted:
            return False
        if role is None or role.owner is None:
            return True
        if role.owner == self._session.incarnation:
            # A take whose reply was lost, or a term that lapsed: both are taken anew.
            return True
        owner = await self._store.get(f"{SESSIONS}{role.owner}")
        return owner is not None and owner.value["state"] == "dead"

    async def _take(self, base: Record | None) -> None:
        """Replace the role that was read by a term of our own, of an epoch never used."""
        incarnation = self._session.incarnation
        epoch = max(self._highest, base.epoch if base else 0) + 1
        role = Role(epoch, incarnation, self._clock.wall().seconds)
        document = {**(base.value if base else {}), **msgspec.to_builtins(role)}
        (outcome,) = await self._store.write([Put(self._key, document, base, epoch=epoch)])
        # Trust is asked again: the write may have taken longer than it lasted.
        if isinstance(outcome, Applied) and self._session.trusted:
            self._highest = epoch
            self._term = Term(epoch, incarnation)
