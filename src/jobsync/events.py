"""Events: facts that listeners, logs and metrics receive.

Every event reaches each listener that was registered when it was emitted and still is when its
turn comes, in the order of registration. A listener that raises stops neither the others nor the
emitter: its error becomes an event, `jobsync:handler-failed`. So does the error of a log handler.
Only an exit of the program passes through.

An event is written to the logger `jobsync` once, before any listener receives it, as
`name key=value key=value`; the logger's level decides which events are logged. Payloads are
plain data and never hold a secret.

Callbacks run on the thread that emits. Coroutines go to the host, once there is one; until
then they are queued, in order. No lock is needed: registering, removing and emitting from
several threads rely on single dictionary and deque operations, which are atomic.
"""

import itertools
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

import msgspec

from jobsync.errors import Invalid, closest_name
from jobsync.safe_text import format_error, safe_name, safe_repr, safe_str, to_exc_info
from jobsync.user_functions import check_function, is_exit, is_for_task

__all__ = [
    "Callback",
    "Event",
    "EventEmitter",
    "Events",
    "HandlerFailed",
    "Spawn",
    "known_events",
]

Callback: TypeAlias = Callable[[Any], object]
"""Takes an event. Its result is ignored, unless it is a coroutine, which the host runs."""

Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], object]
"""Runs a coroutine in the background, as `TaskGroup.create_task` does."""

_C = TypeVar("_C", bound=Callback)

_log = logging.getLogger("jobsync")
_MAX_VALUE_WIDTH = 500
_is_name = re.compile(r"[A-Za-z0-9]+(?:[:_-][A-Za-z0-9]+)*").fullmatch
_is_bare = re.compile(r"[^\s\"'=]+").fullmatch


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A fact, readable as `e.worker_id` and as `e["worker_id"]`.

    A subclass with a `name` of its own is a kind of event that can be listened to:

        class CoordinatorElected(Event, frozen=True, kw_only=True):
            name = "coord:coordinator-elected"
            worker_id: str

    A subclass without one shares fields with its own subclasses, or refines its parent and
    has its parent's name.

    Raises:
        Invalid: a class is defined whose name or alias is malformed or taken.
    """

    name: ClassVar[str]
    """In lower case: `family:fact`."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names of this event."""

    level: ClassVar[int] = logging.DEBUG
    """The level of its log record."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            _register(cls)

    def __getitem__(self, field: str) -> Any:
        if field in self.__struct_fields__:
            return getattr(self, field)
        hint = closest_name(str(field), self.__struct_fields__)
        known = f"Known: {', '.join(self.__struct_fields__) or 'no fields'}."
        raise KeyError(
            f"{self.name} has no field {field!r}. {f'Did you mean {hint}?' if hint else known}"
        )

    def __contains__(self, field: object) -> bool:
        return field in self.__struct_fields__


_kinds: dict[str, type[Event]] = {}


def known_events() -> Mapping[str, type[Event]]:
    """Return every kind of event by its name, sorted. Aliases are attributes of the kinds."""
    return {name: kind for name, kind in sorted(_kinds.items()) if kind.name == name}


def _register(kind: type[Event]) -> None:
    names: tuple[Any, ...] = (kind.name, *kind.aliases)
    for name in names:
        # A payload field called `name` would hide the event's own: its slot arrives here.
        if not (isinstance(name, str) and _is_name(name)):
            problem = "must have a well-formed event name"
            raise Invalid(kind.__qualname__, name, problem, "write it as family:some-fact")
        holder = _kinds.get(name, kind)
        if _origin(holder) != _origin(kind):
            problem = f"must not have the event name of {_origin(holder)}"
            raise Invalid(kind.__qualname__, name, problem, "choose another name")
    # A module that is loaded again defines the same kinds again; only the newest count.
    for name in [name for name, holder in _kinds.items() if _origin(holder) == _origin(kind)]:
        del _kinds[name]
    _kinds.update(dict.fromkeys(names, kind))


def _origin(thing: Any) -> str:
    """Return the qualified name of a class or callable, or of its type if it has none."""
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"


class HandlerFailed(Event, frozen=True, kw_only=True):
    """A user's function raised. Its event stands, and all other listeners receive it too."""

    name = "jobsync:handler-failed"
    level = logging.ERROR

    event: str
    callback: str
    error: str


class _Listener(msgspec.Struct, frozen=True):
    """One registration."""

    name: str
    callback: Callback
    once: bool

    def wants(self, kind: type[Event]) -> bool:
        names = (kind.name, *kind.aliases)
        if self.name.endswith("*"):
            return any(name.startswith(self.name[:-1]) for name in names)
        return self.name in names


class Events:
    """Delivers events to listeners.

    A name is an event's own, one of its aliases, or a family that ends in `*`: `coord:*`, `*`.
    Each registration is called once for every event that it matches, so a callback that is
    registered under a name and under its alias is called twice.

    Args:
        spawn: see `host`.
    """

    def __init__(self, spawn: Spawn | None = None) -> None:
        self._spawn = spawn
        self._parent: Events | None = None
        self._tickets = itertools.count()
        self._listeners: dict[int, _Listener] = {}
        self._listeners_of: dict[type[Event], tuple[tuple[int, _Listener], ...]] = {}
        """Cache of the listeners by kind of event, emptied when a registration changes."""
        self._waiting: deque[Coroutine[Any, Any, None]] = deque()

    @overload
    def on(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def on(self, name: str, callback: _C) -> _C: ...
    def on(self, name: str, callback: Any = None) -> Any:
        """Register a callback for every such event. Without a callback, decorates one.

        Raises:
            Invalid: the event is unknown, or the callback cannot be called.
        """
        return self._add(name, callback, once=False)

    @overload
    def once(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def once(self, name: str, callback: _C) -> _C: ...
    def once(self, name: str, callback: Any = None) -> Any:
        """Register a callback for the next such event only.

        Raises:
            Invalid: the event is unknown, or the callback cannot be called.
        """
        return self._add(name, callback, once=True)

    def off(self, name: str, callback: Callback) -> bool:
        """Remove a callback at once. Return whether it was registered.

        Removes registrations under this name only: not under an alias or a family.

        Raises:
            Invalid: the event is unknown.
        """
        _check_name(name)
        tickets = [
            ticket
            for ticket, listener in self._listeners.copy().items()
            if listener.name == name and listener.callback == callback
        ]
        removed = [self._remove(ticket) for ticket in tickets]
        return any(removed)

    def emit(self, event: Event) -> None:
        """Log an event, then deliver it to all listeners."""
        failure = _write(event)
        self._deliver(event)
        if failure is not None:
            self._deliver(failure)

    def has_listener(self, kind: type[Event]) -> bool:
        """Whether such an event is logged or has a listener: otherwise it need not be built."""
        if _log.isEnabledFor(kind.level):
            return True
        events: Events | None = self
        while events is not None and not events._find_listeners(kind):  # noqa: SLF001 - one class
            events = events._parent  # noqa: SLF001 - likewise
        return events is not None

    def deliver_here(self, event: Event) -> None:
        """Deliver an event that was emitted elsewhere to listeners here, not to the parent."""
        for ticket, listener in self._find_listeners(type(event)):
            if self._is_due(ticket, listener):
                self._call(listener.callback, event)

    def join(self, parent: "Events") -> None:
        """Deliver all events to a parent too, which also runs the coroutines."""
        self._parent = parent
        while self._waiting:
            self._enqueue(self._waiting.popleft())

    def host(self, spawn: Spawn | None) -> None:
        """Set the host, which runs coroutines from now on. It gets the queued ones, in order.

        The host is called on the thread that emits. With None, coroutines are queued again,
        until the next host is set.
        """
        self._spawn = spawn
        self._spawn_queued()

    def _add(self, name: str, callback: Any, *, once: bool) -> Any:
        _check_name(name)
        if callback is None:
            return lambda decorated: self._add(name, decorated, once=once)
        check_function("callback", callback, "pass a function of one event")
        self._listeners[next(self._tickets)] = _Listener(name, callback, once)
        self._listeners_of = {}
        return callback

    def _remove(self, ticket: int) -> bool:
        """Remove a registration. Return whether it was there."""
        listener = self._listeners.pop(ticket, None)
        self._listeners_of = {}
        return listener is not None

    def _find_listeners(self, kind: type[Event]) -> tuple[tuple[int, _Listener], ...]:
        # Read before the listeners: a registration meanwhile replaces the cache, so that a result
        # without it is dropped with this one.
        cache = self._listeners_of
        result = cache.get(kind)
        if result is None:
            listeners = self._listeners.copy().items()
            result = cache[kind] = tuple(item for item in listeners if item[1].wants(kind))
        return result

    def _deliver(self, event: Event) -> None:
        self.deliver_here(event)
        if self._parent is not None:
            # Delivered, not emitted: it is logged already.
            self._parent._deliver(event)  # noqa: SLF001 - one class

    def _is_due(self, ticket: int, listener: _Listener) -> bool:
        if listener.once:
            # Removed before the call: neither another thread nor an emit from within the
            # callback may call it a second time.
            return self._remove(ticket)
        return ticket in self._listeners

    def _call(self, callback: Callback, event: Event) -> None:
        try:
            result = callback(event)
            is_coroutine = isinstance(result, Coroutine)
        except BaseException as error:
            if is_exit(error):
                raise
            self._report(callback, event, error)
            return
        if is_coroutine:
            self._enqueue(self._finish(result, callback, event))

    def _enqueue(self, waiting: Coroutine[Any, Any, None]) -> None:
        if self._parent is not None:
            self._parent._enqueue(waiting)  # noqa: SLF001 - one class
        else:
            self._waiting.append(waiting)
            self._spawn_queued()

    async def _finish(self, result: Any, callback: Callback, event: Event) -> None:
        try:
            await result
        except BaseException as error:
            if is_for_task(error):
                raise
            self._report(callback, event, error)

    def _spawn_queued(self) -> None:
        # Always through the queue: a coroutine that arrives at the same time as a host is
        # started by one of the two threads, and never stays behind.
        while (spawn := self._spawn) is not None:
            try:
                waiting = self._waiting.popleft()
            except IndexError:
                return
            spawn(waiting)

    def _report(self, callback: Callback, event: Event, error: BaseException) -> None:
        failure = HandlerFailed(
            event=event.name,
            callback=safe_name(callback),
            error=format_error(error),
        )
        _write(failure, error)
        # A listener of failures that fails would otherwise receive its own failures for ever.
        if not isinstance(event, HandlerFailed):
            self._deliver(failure)


class EventEmitter:
    """Base class of objects with their own events: listeners receive those alone."""

    events: Events

    @overload
    def on(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def on(self, name: str, callback: _C) -> _C: ...
    def on(self, name: str, callback: Any = None) -> Any:
        """Register a callback for every such event; see `Events.on`."""
        return self.events.on(name, callback)

    @overload
    def once(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def once(self, name: str, callback: _C) -> _C: ...
    def once(self, name: str, callback: Any = None) -> Any:
        """Register a callback for the next such event; see `Events.once`."""
        return self.events.once(name, callback)

    def off(self, name: str, callback: Callback) -> bool:
        """Remove a callback; see `Events.off`."""
        return self.events.off(name, callback)


def _check_name(name: object) -> None:
    # Anything, because `@events.on` without a name arrives here as a function.
    text = str(name)
    if text in _kinds or (text.endswith("*") and "*" not in text[:-1]):
        return
    hint = closest_name(text, _kinds)
    raise Invalid(
        "event",
        name,
        "must be a known event, or a family such as 'coord:*'",
        f"did you mean {hint!r}?" if hint else "call known_events() for all names",
    )


def _write(event: Event, error: BaseException | None = None) -> HandlerFailed | None:
    """Log an event. Return the failure of a log handler, which is the user's code too."""
    if not _log.isEnabledFor(event.level):
        return None
    fields = (f"{field}={_show(event[field])}" for field in event.__struct_fields__)
    line = " ".join((event.name, *fields))
    raised = None if error is None else to_exc_info(error)
    try:
        # The event itself comes along, for log handlers that want its fields.
        _log.log(event.level, "%s", line, exc_info=raised, extra={"fact": event})
    except BaseException as failure:
        if is_exit(failure):
            raise
        return HandlerFailed(event=event.name, callback="logging", error=format_error(failure))
    return None


def _show(value: object) -> str:
    """Return a value as one word, or quoted; long values are cut."""
    # `str` itself: a derived type may have a repr that hides its content.
    show = safe_str if type(value) is str else safe_repr
    text = show(value, _MAX_VALUE_WIDTH)
    return text if _is_bare(text) and text.isprintable() else json.dumps(text, ensure_ascii=False)
