"""Facts that others may listen to. Logs, metrics and faces all start here.

Every event reaches each listener that was there when it was emitted and still is when its
turn comes, in the order in which they were registered. A listener that raises stops
neither the others nor the emitter: it becomes an event, `jobsync:handler-failed`.

An event is written to the logger `jobsync` once, before anybody hears of it, as
`name key=value key=value`; the logger's own level decides which ones are seen. Payloads
are plain data and never hold a secret.

Callbacks run on the thread that emits. Coroutines go to the host, once there is one; until
then they are kept, in order. No lock is needed: registering, removing and emitting from
several threads rest on single dictionary and deque operations, each of which is atomic.
"""

import itertools
import json
import logging
import re
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

import msgspec

from jobsync.errors import Invalid, closest_name

__all__ = ["Callback", "Event", "EventEmitter", "Events", "HandlerFailed", "Spawn", "known_events"]

Callback: TypeAlias = Callable[[Any], object]
"""Takes an event. What it returns is ignored, but for a coroutine, which the host runs."""

Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], object]
"""Runs a coroutine in the background, as `TaskGroup.create_task` does."""

_C = TypeVar("_C", bound=Callback)

_log = logging.getLogger("jobsync")
_SHOWN = 500
_is_name = re.compile(r"[A-Za-z0-9]+(?:[:_-][A-Za-z0-9]+)*").fullmatch
_is_bare = re.compile(r"[^\s\"'=]+").fullmatch


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A fact, readable as `e.worker_id` and as `e["worker_id"]`.

    A subclass with a `name` of its own is a kind of event that can be listened to:

        class CoordinatorElected(Event, frozen=True, kw_only=True):
            name = "coord:coordinator-elected"
            worker_id: str

    A subclass without one shares fields with its own subclasses, or refines its parent and
    goes by its parent's name.

    Raises:
        Invalid: when a class is defined whose name or alias is ill-formed or taken.
    """

    name: ClassVar[str]
    """What it is called, in lower case: `family:fact`."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """What else it answers to."""

    level: ClassVar[int] = logging.DEBUG
    """How loudly it is logged."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            _register(cls)

    def __getitem__(self, field: str) -> Any:
        if field in self.__struct_fields__:
            return getattr(self, field)
        hint = closest_name(str(field), self.__struct_fields__)
        there = f"it has {', '.join(self.__struct_fields__) or 'no fields'}"
        raise KeyError(
            f"{self.name} has no {field!r}; {f'did you mean {hint}?' if hint else there}"
        )

    def __contains__(self, field: object) -> bool:
        return field in self.__struct_fields__


_kinds: dict[str, type[Event]] = {}


def known_events() -> Mapping[str, type[Event]]:
    """Give every kind of event by its name, in order; aliases are in the kinds."""
    return {name: kind for name, kind in sorted(_kinds.items()) if kind.name == name}


def _register(kind: type[Event]) -> None:
    names: tuple[Any, ...] = (kind.name, *kind.aliases)
    for name in names:
        # A payload field called `name` would hide the event's own: it arrives here as a slot.
        if not (isinstance(name, str) and _is_name(name)):
            raise Invalid(
                kind.__qualname__, name, "is no name for an event", "write it as family:some-fact"
            )
        holder = _kinds.get(name, kind)
        if _origin(holder) != _origin(kind):
            raise Invalid(
                kind.__qualname__, name, f"is taken by {_origin(holder)}", "choose another name"
            )
    # A module that is loaded again defines the same kinds anew; only the newest count.
    for name in [name for name, holder in _kinds.items() if _origin(holder) == _origin(kind)]:
        del _kinds[name]
    _kinds.update(dict.fromkeys(names, kind))


def _origin(thing: Any) -> str:
    """Give the qualified name of a class or callable; of its type, where it has none."""
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"


class HandlerFailed(Event, frozen=True, kw_only=True):
    """A user's function raised. The fact it was told of stands; everybody else was told too."""

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
    """Tells listeners what happened.

    A name is an event's own, one of its aliases, or a family that ends in `*`: `coord:*`, `*`.
    Each registration is called once per event that it matches, so a callback that is
    registered under a name and under its alias is called twice.

    Args:
        spawn: see `host`.
    """

    def __init__(self, spawn: Spawn | None = None) -> None:
        self._spawn = spawn
        self._above: Events | None = None
        self._tickets = itertools.count()
        self._listeners: dict[int, _Listener] = {}
        self._wanted: dict[type[Event], tuple[tuple[int, _Listener], ...]] = {}
        """Who listens to which kind, as far as somebody has asked since that changed."""
        self._waiting: deque[Coroutine[Any, Any, None]] = deque()

    @overload
    def on(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def on(self, name: str, callback: _C) -> _C: ...
    def on(self, name: str, callback: Any = None) -> Any:
        """Call back whenever it happens. Without a callback, decorates one.

        Raises:
            Invalid: there is no such event, or the callback cannot be called.
        """
        return self._add(name, callback, once=False)

    @overload
    def once(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def once(self, name: str, callback: _C) -> _C: ...
    def once(self, name: str, callback: Any = None) -> Any:
        """Call back the next time it happens, and then no more.

        Raises:
            Invalid: there is no such event, or the callback cannot be called.
        """
        return self._add(name, callback, once=True)

    def off(self, name: str, callback: Callback) -> bool:
        """Stop calling back, at once; say whether there was anything to stop.

        Ends what was registered under this very name: not under an alias or a family.

        Raises:
            Invalid: there is no such event.
        """
        _check_name(name)
        found = [
            ticket
            for ticket, listener in self._listeners.copy().items()
            if listener.name == name and listener.callback == callback
        ]
        removed = [self._remove(ticket) for ticket in found]
        return any(removed)

    def emit(self, event: Event) -> None:
        """Log it, then tell everybody who listens."""
        _write(event)
        self._tell(event)

    def hears(self, kind: type[Event]) -> bool:
        """Say whether anybody hears of such an event, or the log: else it need not be made."""
        if _log.isEnabledFor(kind.level):
            return True
        place: Events | None = self
        while place is not None and not place._find_listeners(kind):  # noqa: SLF001 - one class
            place = place._above  # noqa: SLF001 - likewise
        return place is not None

    def overhear(self, event: Event) -> None:
        """Tell those who listen here of what was emitted elsewhere, and nobody above."""
        for ticket, listener in self._find_listeners(type(event)):
            if self._is_due(ticket, listener):
                self._call(listener.callback, event)

    def join(self, whole: "Events") -> None:
        """Become part of a whole, which hears of all that is emitted here, and hosts it."""
        self._above = whole
        while self._waiting:
            self._keep(self._waiting.popleft())

    def host(self, spawn: Spawn | None) -> None:
        """Say who runs coroutines from now on; whatever was kept is handed over, in order.

        The host is called on the thread that emits. With None, coroutines are kept again,
        until the next host comes.
        """
        self._spawn = spawn
        self._hand_over()

    def _add(self, name: str, callback: Any, *, once: bool) -> Any:
        _check_name(name)
        if callback is None:
            return lambda decorated: self._add(name, decorated, once=once)
        if not callable(callback):
            raise Invalid("callback", callback, "cannot be called", "pass a function of one event")
        self._listeners[next(self._tickets)] = _Listener(name, callback, once)
        self._wanted = {}
        return callback

    def _remove(self, ticket: int) -> bool:
        """End a registration; say whether it was there."""
        found = self._listeners.pop(ticket, None)
        self._wanted = {}
        return found is not None

    def _find_listeners(self, kind: type[Event]) -> tuple[tuple[int, _Listener], ...]:
        # Taken before the look: who registers meanwhile puts another in its place, and what
        # was found without them is forgotten with this one.
        wanted = self._wanted
        found = wanted.get(kind)
        if found is None:
            there = self._listeners.copy().items()
            found = wanted[kind] = tuple(each for each in there if each[1].wants(kind))
        return found

    def _tell(self, event: Event) -> None:
        self.overhear(event)
        if self._above is not None:
            # Told, not emitted: it is logged already.
            self._above._tell(event)  # noqa: SLF001 - one class

    def _is_due(self, ticket: int, listener: _Listener) -> bool:
        if listener.once:
            # Taken before the call: neither another thread nor an emit from within the
            # callback may run it a second time.
            return self._remove(ticket)
        return ticket in self._listeners

    def _call(self, callback: Callback, event: Event) -> None:
        try:
            result = callback(event)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it becomes an event
            self._report(callback, event, error)
            return
        if isinstance(result, Coroutine):
            self._keep(self._finish(result, callback, event))

    def _keep(self, waiting: Coroutine[Any, Any, None]) -> None:
        if self._above is not None:
            self._above._keep(waiting)  # noqa: SLF001 - one class
        else:
            self._waiting.append(waiting)
            self._hand_over()

    async def _finish(
        self, result: Coroutine[Any, Any, object], callback: Callback, event: Event
    ) -> None:
        try:
            await result
        except Exception as error:  # noqa: BLE001 - as in _call
            self._report(callback, event, error)

    def _hand_over(self) -> None:
        # Always through the queue, so that a coroutine which arrives while a host does is
        # handed over by one of the two threads, and never stays behind.
        while (spawn := self._spawn) is not None:
            try:
                waiting = self._waiting.popleft()
            except IndexError:
                return
            spawn(waiting)

    def _report(self, callback: Callback, event: Event, error: Exception) -> None:
        failure = HandlerFailed(
            event=event.name,
            callback=_origin(callback),
            error="".join(traceback.format_exception_only(error)).strip(),
        )
        _write(failure, error)
        # A listener that fails to hear of failures would be told of its own for ever.
        if not isinstance(event, HandlerFailed):
            self._tell(failure)


class EventEmitter:
    """Something that tells facts of its own: who listens to it hears of those alone."""

    events: Events

    @overload
    def on(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def on(self, name: str, callback: _C) -> _C: ...
    def on(self, name: str, callback: Any = None) -> Any:
        """Call back whenever it happens; see `Events.on`."""
        return self.events.on(name, callback)

    @overload
    def once(self, name: str) -> Callable[[_C], _C]: ...
    @overload
    def once(self, name: str, callback: _C) -> _C: ...
    def once(self, name: str, callback: Any = None) -> Any:
        """Call back the next time it happens; see `Events.once`."""
        return self.events.once(name, callback)

    def off(self, name: str, callback: Callback) -> bool:
        """Stop calling back; see `Events.off`."""
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
        "is no event, and no family such as 'coord:*'",
        f"did you mean {hint!r}?" if hint else "known_events() gives all names",
    )


def _write(event: Event, error: Exception | None = None) -> None:
    if _log.isEnabledFor(event.level):
        fields = (f"{field}={_show(event[field])}" for field in event.__struct_fields__)
        line = " ".join((event.name, *fields))
        # The event itself comes along, for those who want its fields.
        _log.log(event.level, "%s", line, exc_info=error, extra={"fact": event})


def _show(value: object) -> str:
    """Give a value as one word, or as a quoted one; long ones are cut."""
    # Exactly text: a type derived from it may have a repr that hides what it holds.
    text = value if type(value) is str else repr(value)
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN - 1]}…"
    return text if _is_bare(text) and text.isprintable() else json.dumps(text, ensure_ascii=False)
