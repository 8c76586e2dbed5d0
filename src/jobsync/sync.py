"""The same names for callers that block: threads, Flask, Django and scripts.

    from jobsync.sync import Database, QueuePlugin

    emails = QueuePlugin(resource="emails")
    with Database("sqlite:///app.db", plugins=[emails], work=False) as db:
        db.resources.emails.enqueue({"to": "user@example.com"})

Each class is derived from the class of the same name in `jobsync`: what is awaited there, blocks
here. A database has an event loop on a thread of its own while it is connected. Its objects may be
used by any number of threads. Errors are the same; Ctrl-C ends the wait, and cancels the call.

A call on a thread with a running event loop is refused: it would block that loop.
"""

import atexit
import functools
import inspect
import os
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Iterator,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from jobsync.cache.plugin import CachePlugin as AsyncCachePlugin
from jobsync.database.coordinator_plugin import CoordinatorPlugin as AsyncCoordinatorPlugin
from jobsync.database.database import Database as AsyncDatabase
from jobsync.database.home_loop import HomeLoop, check_blocking
from jobsync.database.plugin import Plugin as AsyncPlugin
from jobsync.database.plugin_storage import PluginStorage as AsyncPluginStorage
from jobsync.database.producer import producer as async_producer
from jobsync.database.registry import Registry
from jobsync.database.resource import Resource as AsyncResource
from jobsync.errors import Invalid, Unavailable
from jobsync.loop_calls import Background
from jobsync.queue.plugin import QueuePlugin as AsyncQueuePlugin
from jobsync.queue.pull import ClaimedMessage as AsyncClaimedMessage
from jobsync.queue.tasks import QueueTask as AsyncQueueTask
from jobsync.queue.tasks import TaskCall as AsyncTaskCall
from jobsync.queue.tasks import TaskHandle as AsyncTaskHandle
from jobsync.scheduler.plugin import SchedulerPlugin as AsyncSchedulerPlugin
from jobsync.ttl.plugin import TTLPlugin as AsyncTTLPlugin

__all__ = [
    "CachePlugin",
    "ClaimedMessage",
    "CoordinatorPlugin",
    "Database",
    "Plugin",
    "PluginStorage",
    "QueuePlugin",
    "QueueTask",
    "Resource",
    "S3QueuePlugin",
    "SchedulerPlugin",
    "TTLPlugin",
    "TaskCall",
    "TaskHandle",
    "producer",
]

_EXIT_TIME = 5.0
"""Seconds in which the databases that a program has not disconnected are, when it exits."""

_faces: dict[type, type["_Face"]] = {}
"""By the class that each is derived from."""


class _Face:
    """An object for callers that block, around an object of `jobsync`."""

    _kind: type
    """The class that it is derived from."""
    wrapped: Any
    """The object that it is around."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kind = getattr(cls, "_kind", None)
        if "_kind" not in vars(cls) and kind in {AsyncPlugin, AsyncCoordinatorPlugin}:
            # Its hooks would never be called: the object inside is of another class.
            name = kind.__name__
            fix = f"inherit jobsync.{name}, with `async def`; `plugins=` accepts it here too"
            problem = f"must not inherit jobsync.sync.{name}"
            raise Invalid(cls.__name__, cls, problem, fix)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _set_wrapped(self, self._kind(*_unwrap_all(arguments), **_unwrap_named(options)))

    def __class_getitem__(cls, _: object) -> type[Self]:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "wrapped":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.wrapped, name)
        if inspect.ismethod(value) and value.__self__ is self.wrapped:
            # Of a user's subclass: nothing was derived from it.
            return functools.partial(_call_method, self, name)
        return _wrap(value)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.wrapped, name, _unwrap(value))

    def __repr__(self) -> str:
        return f"sync.{self.wrapped!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Face) and self.wrapped is other.wrapped

    def __hash__(self) -> int:
        return hash(id(self.wrapped))


def _set_wrapped(face: _Face, wrapped: object) -> None:
    # Setting an attribute of a face sets that of what it is around.
    object.__setattr__(face, "wrapped", wrapped)


def _derive(kind: type, *bases: type[_Face]) -> Any:
    """Return the class for callers that block: with the same methods, none of them a coroutine."""
    members: dict[str, Any] = {
        name: _derive_member(name, inspect.getattr_static(kind, name))
        for name in dir(kind)
        if not name.startswith("_") and not any(hasattr(base, name) for base in bases)
    }
    if hasattr(kind, "__aiter__"):
        members["__iter__"] = _iterate
    details = {"_kind": kind, "__doc__": kind.__doc__, "__module__": __name__}
    face = type(kind.__name__, (*bases, _Face), {**members, **details})
    face.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    _faces[kind] = face
    return face


def _derive_member(name: str, member: Any) -> Any:
    if isinstance(member, property):
        return property(lambda face: _wrap(getattr(face.wrapped, name)), doc=member.__doc__)
    if isinstance(member, classmethod | staticmethod) or not inspect.isfunction(member):
        return member

    @functools.wraps(member)
    def method(self: _Face, /, *arguments: Any, **options: Any) -> Any:
        return _call_method(self, name, *arguments, **options)

    # What `wraps` has copied would let frameworks await it.
    vars(method).pop("_is_coroutine_marker", None)
    vars(method).pop("_is_coroutine", None)
    return method


def _call_method(face: _Face, name: str, /, *arguments: Any, **options: Any) -> Any:
    """Call a method on the loop of the database, and wait for its result."""
    home: HomeLoop | None = face.wrapped.home_loop
    # That of a user's subclass, if it has one.
    method = getattr(face.wrapped, name)
    call = functools.partial(method, *_unwrap_all(arguments), **_unwrap_named(options))
    function = inspect.unwrap(method)
    if inspect.isasyncgenfunction(function):
        return _Block(call(), home)
    if inspect.iscoroutinefunction(function):
        if options.get("connection") is not None and home is not None:
            return _wrap(home.call_here(call()))
        return _wrap(_wait(call(), home))
    # Methods that do not wait are called there too, where they are safe. Some block by themselves.
    if home is None or not home.is_elsewhere or name.endswith("_sync"):
        return _wrap(call())
    return _wrap(_wait(_run(call), home))


async def _run(call: Callable[[], Any]) -> Any:
    return call()


def _wait(work: Coroutine[Any, Any, Any], home: HomeLoop | None) -> Any:
    return _NO_HOME.call(work) if home is None else home.call(work)


_NO_HOME = HomeLoop(lambda: "no database")


def _iterate(face: _Face) -> Iterator[Any]:
    """Iterate over all records in the order of their ids, a page at a time."""
    home: HomeLoop = face.wrapped.home_loop
    items = home.call(_open_iterator(face.wrapped))
    try:
        while (item := home.call(_get_next(items))) is not _END:
            yield _wrap(item)
    finally:
        home.call(_close_iterator(items))


_END = object()


async def _open_iterator(records: AsyncIterable[Any]) -> Any:
    return aiter(records)


async def _get_next(items: AsyncGenerator[Any, None]) -> Any:
    return await anext(items, _END)


async def _close_iterator(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


class _Block(AbstractContextManager[Any]):
    """A `with` block around an `async with` block."""

    def __init__(self, block: AbstractAsyncContextManager[Any], home: HomeLoop | None) -> None:
        self._block = block
        self._home = home

    def __enter__(self) -> Any:
        return _wrap(_wait(self._block.__aenter__(), self._home))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return bool(_wait(self._block.__aexit__(kind, error, trace), self._home))


class _RegistryFace:
    """A live view of objects by name, readable as `view.name` and as `view["name"]`."""

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> Any:
        return _wrap(self._registry[name])

    def __getattr__(self, name: str) -> Any:
        if name == "_registry":
            # Of a half-made object, as `copy` makes one.
            raise AttributeError(name)
        return _wrap(getattr(self._registry, name))

    def __contains__(self, name: object) -> bool:
        return name in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def __repr__(self) -> str:
        return repr(self._registry)


def _wrap(value: Any) -> Any:
    """Return a value as callers that block see it."""
    if isinstance(value, Registry):
        return _RegistryFace(value)
    if type(value) is list and value and _find_face(value[0]) is not None:
        return [_wrap(item) for item in value]
    kind = _find_face(value)
    if kind is None:
        return value
    face = kind.__new__(kind)
    _set_wrapped(face, value)
    return face


def _find_face(value: object) -> type[_Face] | None:
    return next((_faces[base] for base in type(value).__mro__ if base in _faces), None)


def _unwrap(value: Any) -> Any:
    if isinstance(value, _Face):
        return value.wrapped
    return [_unwrap(item) for item in value] if type(value) in {list, tuple} else value


def _unwrap_all(values: tuple[Any, ...]) -> list[Any]:
    return [_unwrap(value) for value in values]


def _unwrap_named(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _unwrap(value) for name, value in options.items()}


class _Lifecycle(_Face):
    """What connects a database: an event loop on a thread of its own."""

    wrapped: AsyncDatabase

    def connect(self) -> Self:
        """Start an event loop on a thread of its own and connect there. Safe to repeat.

        A forked child connects again, if the database does not work.

        Raises:
            Invalid, Misconfigured: the url is invalid, or the store cannot be used.
            Unavailable: the store does not answer.
        """
        _find_thread(self.wrapped).connect(self.wrapped)
        return self

    def disconnect(self, *, within: float | None = None) -> None:
        """Stop the plugins, close the store, and end the thread. Safe to repeat.

        Args:
            within: seconds that the caller can wait; see `jobsync.Database.disconnect`.
        """
        work = functools.partial(self.wrapped.disconnect, within=within)
        _find_thread(self.wrapped).disconnect(self.wrapped, work)

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        work = functools.partial(self.wrapped.__aexit__, kind, error, trace)
        _find_thread(self.wrapped).disconnect(self.wrapped, work)


def _find_thread(database: AsyncDatabase) -> "_DatabaseThread":
    return _threads.setdefault(database, _DatabaseThread())


class _DatabaseThread:
    """The thread of a database, from `connect` to `disconnect`."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may disconnect while its own thread connects.
        self._lock = threading.RLock()
        self._background: Background | None = None

    def connect(self, database: AsyncDatabase) -> None:
        """Connect a database on this thread, unless it lives on another one."""
        check_blocking("connect")
        home = database.home_loop
        with self._lock:
            if home.is_elsewhere:
                home.call(database.connect())
                return
            if self._background is not None:
                # A handler has disconnected the database, and could not end the thread. The rest of
                # that must not be cut off.
                try:
                    self._background.call(database.disconnect(within=None))
                finally:
                    self._end(self._background)
            background = self._background = Background(
                "jobsync-sync", functools.partial(_build_end_error, database.store_name)
            )
            try:
                background.call(database.connect())
            except BaseException:
                self._end(background)
                raise

    def disconnect(
        self, database: AsyncDatabase, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Disconnect a database, and end this thread.

        Args:
            database: that lives here, or elsewhere.
            work: disconnects it.
        """
        check_blocking("disconnect")
        with self._lock:
            background = self._background
            if background is None:
                if database.home_loop.is_elsewhere:
                    database.home_loop.call(work())
                return
            try:
                background.call(work())
            finally:
                # Called by a handler of a queue, it disconnects after that handler.
                if not database.home_loop.is_elsewhere:
                    self._end(background)

    def _end(self, background: Background) -> None:
        self._background = None
        background.stop()


def _build_end_error(name: str) -> Unavailable:
    return Unavailable(name, "the database was disconnected meanwhile", "connect again")


_threads: WeakKeyDictionary[AsyncDatabase, _DatabaseThread] = WeakKeyDictionary()
_left_to_parent: list[_DatabaseThread] = []
"""Those of a parent process. They are kept, because their ends would disturb it."""


def _forget_parent() -> None:
    """Start without threads in a forked child: they run in the parent only."""
    _left_to_parent.extend(_threads.values())
    _threads.clear()


os.register_at_fork(after_in_child=_forget_parent)


@atexit.register
def _disconnect_all() -> None:
    """Disconnect what the program has not, so that no session is left behind."""
    for database, thread in list(_threads.items()):
        with suppress(Exception):
            thread.disconnect(database, functools.partial(database.disconnect, within=_EXIT_TIME))


class _TaskQueue(_Face):
    """What makes functions tasks, whose calls block."""

    @functools.wraps(AsyncQueuePlugin.task)
    def task(self, function: Any = None, **options: Any) -> Any:
        made = _call_method(self, "task", function, **options)
        add = functools.partial(_call_method, self, "task", **options)
        return add if function is None else made


class _TaskFunction(_Face):
    """A task, which calls its function when it is called."""

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        return self.wrapped(*arguments, **named)


CachePlugin = _derive(AsyncCachePlugin)
ClaimedMessage = _derive(AsyncClaimedMessage)
CoordinatorPlugin = _derive(AsyncCoordinatorPlugin)
Database = _derive(AsyncDatabase, _Lifecycle)
Plugin = _derive(AsyncPlugin)
PluginStorage = _derive(AsyncPluginStorage)
QueuePlugin = S3QueuePlugin = _derive(AsyncQueuePlugin, _TaskQueue)
QueueTask = _derive(AsyncQueueTask, _TaskFunction)
Resource = _derive(AsyncResource)
SchedulerPlugin = _derive(AsyncSchedulerPlugin)
TTLPlugin = _derive(AsyncTTLPlugin)
TaskCall = _derive(AsyncTaskCall)
TaskHandle = _derive(AsyncTaskHandle)


@functools.wraps(async_producer)
def producer(*arguments: Any, **options: Any) -> Any:
    """Return a database of a process that only enqueues, reads and writes."""
    return _wrap(async_producer(*_unwrap_all(arguments), **_unwrap_named(options)))
