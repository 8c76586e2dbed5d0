"""Tells the user's own functions what changed, on a thread of their own, in order."""

import inspect
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from jobsync.events import Events, HandlerFailed
from jobsync.jobs.owned_tokens import TokenChange

__all__ = ["Callbacks", "RebalanceEvent"]


class RebalanceEvent(msgspec.Struct, frozen=True):
    """What another assignment has changed for this node."""

    is_initial: bool
    token_version: int
    tokens_added: int
    tokens_removed: int


class Callbacks:
    """Calls functions one after the other; one that raises becomes an event.

    Args:
        events: where failures are told.
        on_rebalance: takes nothing, or a `RebalanceEvent`.
        on_tokens_added: takes the set of tokens gained.
        on_tokens_removed: takes the set of tokens given up.
    """

    def __init__(
        self,
        events: Events,
        on_rebalance: Callable[..., object] | None,
        on_tokens_added: Callable[[frozenset[int]], object] | None,
        on_tokens_removed: Callable[[frozenset[int]], object] | None,
    ) -> None:
        self._events = events
        self._on_rebalance = on_rebalance
        self._on_added = on_tokens_added
        self._on_removed = on_tokens_removed
        self._calls: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, change: TokenChange) -> None:
        """Have the functions called soon."""
        if self._on_removed is not None and change.removed:
            self._call(self._on_removed, change.removed)
        if self._on_added is not None and change.added:
            self._call(self._on_added, change.added)
        if self._on_rebalance is not None and (change.added or change.removed):
            event = RebalanceEvent(
                change.is_initial, change.number, len(change.added), len(change.removed)
            )
            self._call(self._on_rebalance, *([event] if _takes_one(self._on_rebalance) else []))

    def stop(self, wait: float) -> None:
        """Let the calls that wait be made, for so many seconds at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._calls.put(None)
            self._thread.join(wait)
            # Should the job be entered again, there will be another.
            self._thread = None

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._thread is None:
            # A daemon: a function that never returns must not keep the program from ending.
            self._thread = threading.Thread(target=self._run, name="jobsync-tell", daemon=True)
            self._thread.start()
        self._calls.put((function, arguments))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, arguments = call
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001 - user code may raise anything
                text = "".join(traceback.format_exception_only(error)).strip()
                name = getattr(function, "__qualname__", repr(function))
                failed = HandlerFailed(event="jobs:tokens-changed", callback=name, error=text)
                self._events.emit(failed)


def _takes_one(function: Callable[..., object]) -> bool:
    """Say whether a function takes an argument; one that cannot be asked is given none."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True
