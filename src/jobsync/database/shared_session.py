"""The one session that a database's plugins share: open while one of them needs it.

The first who comes opens it, the last who leaves ends it, and so does the database at its
own end. Everything that plugins hold, roles and locks, hangs on it.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from jobsync.components import Components
from jobsync.coordination.membership import Membership, describe_process
from jobsync.coordination.runner import OwnThread, SameLoop
from jobsync.coordination.settings import CoordinatorSettings
from jobsync.core.urls import StoreUrl
from jobsync.database.supervisor import Work
from jobsync.errors import Invalid
from jobsync.stores.contract import Store, StoreDecorator
from jobsync.stores.opening import open_another

__all__ = ["SharedSession"]


class SharedSession:
    """Counts who needs the session.

    Args:
        store: what the database uses.
        url: where that is, so that the session can have a way of its own to it; None where
            the database was given a store, which the session then shares.
        components: time, randomness and events.
        run: runs what watches over the session: if that ends by an error, so must the
            database.
        chore: what a process with a session does for all others from then on.
    """

    def __init__(
        self,
        store: Store,
        url: StoreUrl | None,
        components: Components,
        run: Callable[[Work, str], object],
        chore: Work,
    ) -> None:
        self._store = store
        self._url = url
        self._components = components
        self._run = run
        self._chore: Work | None = chore
        self._turn = asyncio.Lock()
        self._count = 0
        self._is_over = False
        self._membership: Membership | None = None

    async def enter(
        self, settings: CoordinatorSettings, *, at_any_pace: bool = False
    ) -> Membership:
        """Need the session from now on.

        Args:
            settings: what it goes by, if it is not open yet.
            at_any_pace: whether it may go by others, if it is.

        Raises:
            Invalid: it beats at another pace than these settings ask for; or the database
                is disconnected.
            Unavailable: the store does not answer.
        """
        async with self._turn:
            self._check_open()
            if self._membership is None:
                self._membership = await self._open(settings)
            elif not at_any_pace:
                _check_pace(self._membership, settings)
            self._count += 1
            return self._membership

    async def leave(self) -> None:
        """Need it no longer."""
        self._count -= 1
        if self._count <= 0:
            await self._end()

    async def end(self) -> None:
        """End the session, whoever needs it, and open no other."""
        self._is_over = True
        await self._end()

    async def _end(self) -> None:
        # Without the turn: hooks that are waited for now may want to leave, too.
        if self._membership is not None:
            membership, self._membership = self._membership, None
            self._count = 0
            await membership.leave()

    def _check_open(self) -> None:
        if self._is_over:
            fix = "await database.connect() first"
            raise Invalid("database", self._store.name, "is not connected", fix)

    async def _open(self, settings: CoordinatorSettings) -> Membership:
        membership = self._make(settings)
        await membership.start()
        try:
            self._check_open()
            self._run(membership.ended, "session")
        except BaseException:
            await membership.leave()
            raise
        self._begin_chore()
        return membership

    def _begin_chore(self) -> None:
        chore, self._chore = self._chore, None
        if chore is not None:
            self._run(chore, "tidying")

    def _make(self, settings: CoordinatorSettings) -> Membership:
        facts, components = describe_process(self._components), self._components
        if self._url is None:
            lend, host = self._lend, SameLoop()
            return Membership(
                self._store, components, settings, open_own=lend, host=host, facts=facts
            )
        open_own = partial(open_another, self._store, self._url, components)
        return Membership(
            self._store, components, settings, open_own=open_own, host=OwnThread(), facts=facts
        )

    async def _lend(self) -> Store:
        return _BorrowedStore(self._store)


class _BorrowedStore(StoreDecorator):
    """A store that its borrower must not close."""

    async def close(self) -> None:
        """Leave it open."""


def _check_pace(membership: Membership, settings: CoordinatorSettings) -> None:
    timing = membership.timing
    for field, asked, there in (
        ("heartbeat_interval", settings.heartbeat_interval, timing.beat),
        ("worker_timeout", settings.worker_timeout, timing.timeout),
    ):
        if asked is not None and asked != there:
            raise Invalid(
                field,
                asked,
                f"the plugins of a database share one session, which goes by {there:g}",
                "give all plugins the same",
            )
