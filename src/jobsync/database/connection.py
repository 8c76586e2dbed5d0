"""What a database has between `connect` and `disconnect`, and its end in bounded time.

Each step of the end has a time limit. A step that does not end is cancelled; one that runs on
nevertheless is left behind. An event reports both.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any

from jobsync.components import Components
from jobsync.coordination.runner import run_for
from jobsync.core.clock import Clock, Mono
from jobsync.core.secrets import redact
from jobsync.core.urls import StoreUrl
from jobsync.database.plugin_set import PluginSet
from jobsync.database.shared_session import SharedSession
from jobsync.database.supervisor import Supervisor
from jobsync.errors import Invalid
from jobsync.events import Event
from jobsync.setting_fields import Origin, mask_value
from jobsync.stores.contract import Store
from jobsync.stores.opening import open_store, read_url, resolve_url

__all__ = [
    "Connection",
    "DatabaseConnected",
    "DatabaseDisconnected",
    "DisconnectIncomplete",
    "StoreTarget",
]

_CANCEL_TIME = 0.15
"""Seconds in which a step of a disconnect must end after it is cancelled."""


class _StoreEvent(Event, frozen=True, kw_only=True):
    store: str


class DatabaseConnected(_StoreEvent, frozen=True, kw_only=True):
    """The store answers, and the plugins added before have started."""

    name = "db:connected"


class DatabaseDisconnected(_StoreEvent, frozen=True, kw_only=True):
    """The plugins have stopped; the store is no longer used."""

    name = "db:disconnected"


class DisconnectIncomplete(_StoreEvent, frozen=True, kw_only=True):
    """Work did not end in time when the database was disconnected."""

    name = "db:disconnect-incomplete"
    level = logging.ERROR

    cancelled: tuple[str, ...]
    """What was cancelled, and has ended."""
    running: tuple[str, ...]
    """What runs on."""


def _suggest_url(target: object) -> str:
    return f"sqlite:///{target}" if isinstance(target, Path) else "sqlite:///app.db"


class StoreTarget:
    """The store that a database is to be connected to.

    Args:
        targets: its URL, or an open store, under the names of the arguments that say so.

    Attributes:
        target: the one that was given; None for the default.

    Raises:
        Invalid: several of them were given.
    """

    def __init__(self, **targets: str | Store | None) -> None:
        given = [target for target in targets.values() if target is not None]
        if len(given) > 1:
            fix = f"pass one of {' and '.join(', '.join(targets).rsplit(', ', 1))}"
            raise Invalid("url", len(given), "must name one store", fix)
        arguments: Mapping[str, object] = targets
        for name, target in arguments.items():
            if not (target is None or isinstance(target, str | Store)):
                # It may be a URL of another library's, with a password.
                shown = mask_value("url", target)
                fix = f"write a URL such as {_suggest_url(shown)}"
                raise Invalid(name, shown, "must be a text", fix)
        self.target = given[0] if given else None

    @property
    def name(self) -> str:
        """The URL or the name of the store, without secrets."""
        match self.target:
            case None:
                return "default store"
            case str() as url:
                return redact(url)
            case store:
                return store.name

    def resolve(self) -> tuple[StoreUrl, Origin] | None:
        """Return the URL, as of now, and where it comes from; None for an open store.

        Raises:
            Invalid, Misconfigured: the URL is wrong.
        """
        return None if isinstance(self.target, Store) else resolve_url(self.target)

    async def open(self, components: Components) -> tuple[Store, StoreUrl | None]:
        """Open the store; return it with its URL, which an open store does not have."""
        if isinstance(self.target, Store):
            return self.target, None
        # Read once: the environment and the working directory may change later.
        url = read_url(self.target)
        return await open_store(self.target, components), url


class Connection:
    """What a database has between `connect` and `disconnect`.

    Args:
        store: that is open.
        supervisor: of the background work.
        session: that plugins share.
        plugins: of the database.
        components: time and events.
        owns_store: whether the store was opened for this connection, and so is closed with it.

    Attributes:
        context: of the caller of `connect`.
    """

    def __init__(
        self,
        store: Store,
        supervisor: Supervisor,
        session: SharedSession,
        plugins: PluginSet,
        components: Components,
        *,
        owns_store: bool,
    ) -> None:
        self.store = store
        self.supervisor = supervisor
        self.session = session
        self.context = copy_context()
        self._plugins = plugins
        self._clock = components.clock
        self._events = components.events
        self._owns_store = owns_store
        self._close_by: Mono | None = None
        self._shutdown: _Shutdown | None = None

    @property
    def time_left(self) -> float | None:
        """Seconds left until the caller of `close` cannot wait any longer; None if it can."""
        return None if self._close_by is None else self._close_by - self._clock.mono()

    def hurry(self, within: float) -> None:
        """Shorten a `close` under way for a caller that cannot wait as long."""
        if self._shutdown is None:
            return
        end = self._clock.mono() + within
        if self._close_by is None or end < self._close_by:
            self._close_by = end
        self._shutdown.hurry(within)
        for plugin in self._plugins:
            plugin.prepare_stop()

    async def close(
        self, on_end: Callable[[], None], within: float | None = None, event: Event | None = None
    ) -> None:
        """Stop and close everything, even if a part of it raises or does not end.

        Args:
            on_end: called last.
            within: seconds that the caller can wait; by default the plugins' own time to stop.
            event: to emit once the plugins have stopped.
        """
        if within is not None:
            self._close_by = self._clock.mono() + within
        stop_time = self._plugins.stop_time if within is None else within
        plugins, shutdown = list(self._plugins), _Shutdown(self._clock, stop_time)
        self._shutdown = shutdown
        async with AsyncExitStack() as stack:
            # Called from the last to the first.
            stack.callback(on_end)
            stack.callback(self._report_running, shutdown)
            if self._owns_store:
                stack.push_async_callback(shutdown.run, "the store", self.store.close, 1.6)
            stack.push_async_callback(shutdown.run, "background work", self.supervisor.stop, 1.5)
            stack.push_async_callback(shutdown.run, "the session", self.session.end, 1.4)
            if event is not None:
                stack.callback(self._events.emit, event)
            for plugin in plugins:
                stack.push_async_callback(shutdown.run, plugin.name, plugin.stop, 1.3)
            for plugin in plugins:
                stack.callback(plugin.prepare_stop)

    def _report_running(self, shutdown: "_Shutdown") -> None:
        """Report what was cancelled or left behind, if anything."""
        user_code = self._plugins.list_running()
        running = (*shutdown.left_behind, *user_code, *self.supervisor.list_running())
        cancelled = tuple(shutdown.cancelled)
        if running or cancelled:
            name = self.store.name
            self._events.emit(
                DisconnectIncomplete(store=name, cancelled=cancelled, running=running)
            )


class _Shutdown:
    """Runs the steps of a disconnect, and leaves those behind that do not end.

    Args:
        clock: this machine's clock.
        seconds: that the plugins have to stop.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._end = clock.mono() + seconds
        self._was_hurried = asyncio.get_running_loop().create_future()
        self.cancelled: list[str] = []
        self.left_behind: list[str] = []

    def hurry(self, seconds: float) -> None:
        """Leave the plugins no more than this many seconds from now."""
        end = self._clock.mono() + seconds
        if end < self._end:
            self._end = end
            self._was_hurried.set_result(None)
            self._was_hurried = asyncio.get_running_loop().create_future()

    async def run(
        self, name: str, step: Callable[[], Coroutine[Any, Any, None]], extra: float
    ) -> None:
        """Run a step, until so many extra seconds after the end of the plugins' time."""

        async def wait(task: asyncio.Task[None]) -> None:
            while True:
                left = self._end - self._clock.mono() + extra - _CANCEL_TIME
                waited: list[asyncio.Future[None]] = [task, self._was_hurried]
                done, _ = await asyncio.wait(
                    waited, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
                if task in done or not done:
                    return

        match await run_for(wait, step, cancelled_for=_CANCEL_TIME):
            case "cancelled":
                self.cancelled.append(name)
            case "running":
                self.left_behind.append(name)
