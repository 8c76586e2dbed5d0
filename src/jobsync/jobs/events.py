"""Events of a node and its tasks, and the callbacks that users pass to a `Job`."""

import inspect
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeAlias

import msgspec

from jobsync.events import Event, Events, HandlerFailed
from jobsync.safe_text import format_error, safe_name

__all__ = [
    "AuditRefused",
    "Callbacks",
    "DefaultStoreUsed",
    "NameAwaited",
    "NoTokens",
    "NodeFailed",
    "NodeJoined",
    "NodeRestored",
    "PinsExpired",
    "PinsIgnored",
    "RebalanceEvent",
    "Rebalanced",
    "SettingsChanged",
    "TokenChange",
    "TokensChanged",
    "ViewsMissing",
]


class _NodeEvent(Event, frozen=True, kw_only=True):
    node: str


class DefaultStoreUsed(_NodeEvent, frozen=True, kw_only=True):
    """No setting names a store, so only nodes that are started in this directory share tasks."""

    name: ClassVar[str] = "jobs:default-store"
    level: ClassVar[int] = logging.WARNING

    path: str
    """The absolute path of the SQLite file that is used."""
    fix: str


class NameAwaited(_NodeEvent, frozen=True, kw_only=True):
    """Another process holds the node's name: this one waits until it has left or is dead."""

    name: ClassVar[str] = "jobs:name-awaited"
    level: ClassVar[int] = logging.WARNING

    host: str
    """Of the other process."""
    pid: int
    wait: float
    """The most seconds that this one waits."""


class NodeJoined(_NodeEvent, frozen=True, kw_only=True):
    """This process has taken the node's name, in a new session."""

    name: ClassVar[str] = "jobs:node-joined"
    level: ClassVar[int] = logging.INFO

    incarnation: str


class NoTokens(_NodeEvent, frozen=True, kw_only=True):
    """This node was entered without a single token: until it gets some, it does nothing."""

    name: ClassVar[str] = "jobs:no-tokens"
    level: ClassVar[int] = logging.WARNING

    reason: str
    fix: str


class NodeRestored(_NodeEvent, frozen=True, kw_only=True):
    """This node's record had been deleted. The node is alive and has written it again."""

    name: ClassVar[str] = "jobs:node-restored"
    level: ClassVar[int] = logging.WARNING


class NodeFailed(_NodeEvent, frozen=True, kw_only=True):
    """This node was stopped by a bug in this library or by a bad record. It owns nothing."""

    name: ClassVar[str] = "jobs:node-failed"
    level: ClassVar[int] = logging.ERROR

    error: str


class TokensChanged(_NodeEvent, frozen=True, kw_only=True):
    """This node has applied a new assignment."""

    name: ClassVar[str] = "jobs:tokens-changed"
    level: ClassVar[int] = logging.INFO

    number: int
    tokens: int
    """How many tokens it owns now."""
    added: int
    removed: int


class Rebalanced(_NodeEvent, frozen=True, kw_only=True):
    """This node is the leader and has written a new assignment."""

    name: ClassVar[str] = "jobs:rebalanced"
    level: ClassVar[int] = logging.INFO

    number: int
    """Of the assignment; it grows with each."""
    reason: str
    """initial_distribution, membership_change, dead_nodes or locks_changed."""
    nodes_before: int
    nodes_after: int
    tokens_moved: int


class AuditRefused(_NodeEvent, frozen=True, kw_only=True):
    """A task was finished too late: another node had claimed it by then."""

    name: ClassVar[str] = "jobs:audit-refused"
    level: ClassVar[int] = logging.WARNING

    task_id: str
    reason: str


class SettingsChanged(_NodeEvent, frozen=True, kw_only=True):
    """No node was alive, and this node has changed the settings that all nodes share."""

    name: ClassVar[str] = "jobs:settings-changed"
    level: ClassVar[int] = logging.WARNING

    appname: str
    changed: dict[str, Any]
    """The new values."""


class PinsExpired(_NodeEvent, frozen=True, kw_only=True):
    """This node is the leader and has removed expired pins."""

    name: ClassVar[str] = "jobs:pins-expired"
    level: ClassVar[int] = logging.INFO

    count: int


class PinsIgnored(_NodeEvent, frozen=True, kw_only=True):
    """This node is the leader with `locks_enabled=False`, and pins exist."""

    name: ClassVar[str] = "jobs:pins-ignored"
    level: ClassVar[int] = logging.WARNING

    count: int


class ViewsMissing(_NodeEvent, frozen=True, kw_only=True):
    """The SQL views are missing or old, and this user may not create them. Tasks still run."""

    name: ClassVar[str] = "jobs:views-missing"
    level: ClassVar[int] = logging.WARNING

    appname: str
    reason: str
    fix: str


class TokenChange(msgspec.Struct, frozen=True):
    """The tokens that a new assignment gives to this node and takes from it."""

    number: int
    added: frozenset[int]
    removed: frozenset[int]
    is_initial: bool
    is_leaving: bool = False
    """Whether this node hands over because it is about to leave."""


class RebalanceEvent(msgspec.Struct, frozen=True):
    """What a new assignment has changed for this node, as `on_rebalance` receives it."""

    is_initial: bool
    token_version: int
    tokens_added: int
    tokens_removed: int


_CallbackCalls: TypeAlias = queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None]


class Callbacks:
    """Calls the user's functions one after the other, in order, on their own thread.

    A function that raises is reported as an event.

    Args:
        events: receives failures.
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
        self._takes_event = on_rebalance is not None and _takes_one(on_rebalance)
        self._on_added = on_tokens_added
        self._on_removed = on_tokens_removed
        self._calls: _CallbackCalls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def notify(self, change: TokenChange) -> None:
        """Schedule the calls for a change."""
        if self._on_removed is not None and change.removed:
            self._call(self._on_removed, change.removed)
        if self._on_added is not None and change.added:
            self._call(self._on_added, change.added)
        # The user ends this node: that its tokens go elsewhere is no news to the program.
        is_news = not change.is_leaving and bool(change.added or change.removed)
        if self._on_rebalance is not None and is_news:
            event = RebalanceEvent(
                change.is_initial, change.number, len(change.added), len(change.removed)
            )
            self._call(self._on_rebalance, *([event] if self._takes_event else []))

    def stop(self, wait: float) -> None:
        """Wait for the scheduled calls, up to `wait` seconds."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._calls.put(None)
            self._thread.join(wait)
            # A job that is entered again starts a new thread. This one may go on for a while.
            self._thread, self._calls = None, queue.SimpleQueue()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._thread is None:
            # A daemon: a function that never returns must not keep the program from ending.
            self._thread = threading.Thread(
                target=self._run, args=(self._calls,), name="jobsync-callbacks", daemon=True
            )
            self._thread.start()
        self._calls.put((function, arguments))

    def _run(self, calls: "_CallbackCalls") -> None:
        while (call := calls.get()) is not None:
            function, arguments = call
            try:
                _check_has_run(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - nothing may end this thread
                name, text = safe_name(function), format_error(error)
                failed = HandlerFailed(event="jobs:tokens-changed", callback=name, error=text)
                self._events.emit(failed)


def _check_has_run(result: object) -> None:
    """Raise if a function has not done its work, but returned a coroutine that would."""
    if isinstance(result, Coroutine):
        result.close()
        raise TypeError("it returned a coroutine, which nobody awaits")


def _takes_one(function: Callable[..., object]) -> bool:
    """Whether a function takes an argument; False if it has no signature to inspect."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True
