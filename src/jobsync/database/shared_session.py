"""The one session that a database's plugins share. All their roles and locks depend on it.

The first user opens it; the last one to leave ends it, or the database when it disconnects or
fails: another process then does the work.
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
from jobsync.stores.contract import Store
from jobsync.stores.decorator import StoreDecorator
from jobsync.stores.opening import open_another

__all__ = ["SharedSession"]


class SharedSession:
    """Opens the session for its first user and counts its users.

    Args:
        store: of the database.
        url: of the store, so that the session can have its own connection; None if the
            database was given an open store, which the session then shares.
        components: time, randomness and events.
        run: runs work in the background; an error of the session makes the database fail.
        cleanup: what a process with a session does for all others from then on.
    """

    def __init__(
        self,
        store: Store,
        url: StoreUrl | None,
        components: Components,
        run: Callable[[Work, str], object],
        cleanup: Work,
    ) -> None:
        self._store = store
        self._url = url
        self._components = components
        self._run = run
        self._cleanup: Work | None = cleanup
        self._lock = asyncio.Lock()
        self._count = 0
        self._has_ended = False
        self._membership: Membership | None = None

    async def join(
        self, settings: CoordinatorSettings, *, accept_other_timing: bool = False
    ) -> Membership:
        """Use the session from now on; open it for the first user.

        Args:
            settings: of the session, if it is not open yet.
            accept_other_timing: whether an open session may have another timing.

        Raises:
            Invalid: the open session has another timing, or the database is disconnected.
            Unavailable: the store does not answer.
        """
        async with self._lock:
            self._check_open()
            if self._membership is None:
                self._membership = await self._open(settings)
            elif not accept_other_timing:
                _check_timing(self._membership, settings)
            self._count += 1
            return self._membership

    async def leave(self) -> None:
        """Stop using the session; end it after the last user."""
        self._count -= 1
        if self._count <= 0:
            await self._end()

    async def end(self) -> None:
        """End the session, even if it is in use, and open no other."""
        self._has_ended = True
        await self._end()

    async def _end(self) -> None:
        # Without the lock: hooks that are being waited for may call `leave`, too.
        if self._membership is not None:
            membership, self._membership = self._membership, None
            self._count = 0
            await membership.leave()

    def _check_open(self) -> None:
        if self._has_ended:
            fix = "await database.connect() first"
            raise Invalid("database", self._store.name, "is not connected", fix)

    async def _open(self, settings: CoordinatorSettings) -> Membership:
        membership = self._make_membership(settings)
        await membership.start()
        try:
            self._check_open()
            self._run(partial(_stay, membership), "session")
        except BaseException:
            await membership.leave()
            raise
        self._start_cleanup()
        return membership

    def _start_cleanup(self) -> None:
        cleanup, self._cleanup = self._cleanup, None
        if cleanup is not None:
            self._run(cleanup, "cleanup")

    def _make_membership(self, settings: CoordinatorSettings) -> Membership:
        facts, components = describe_process(self._components), self._components
        if self._url is None:
            borrow, host = self._borrow_store, SameLoop()
            return Membership(
                self._store, components, settings, open_own=borrow, host=host, facts=facts
            )
        open_own = partial(open_another, self._store, self._url, components)
        return Membership(
            self._store, components, settings, open_own=open_own, host=OwnThread(), facts=facts
        )

    async def _borrow_store(self) -> Store:
        return _BorrowedStore(self._store)


async def _stay(membership: Membership) -> None:
    """Wait until a session has ended; end it if the database fails, which cancels this."""
    try:
        await membership.ended()
    finally:
        membership.start_leaving()


class _BorrowedStore(StoreDecorator):
    """A store that stays open when its borrower closes it."""

    async def close(self) -> None:
        """Leave it open."""


def _check_timing(membership: Membership, settings: CoordinatorSettings) -> None:
    timing = membership.timing
    for field, requested, current in (
        ("heartbeat_interval", settings.heartbeat_interval, timing.heartbeat),
        ("worker_timeout", settings.worker_timeout, timing.timeout),
    ):
        if requested is not None and requested != current:
            raise Invalid(
                field,
                requested,
                f"must be {current:g}, as in the session that all plugins share",
                "pass the same value to all plugins",
            )
